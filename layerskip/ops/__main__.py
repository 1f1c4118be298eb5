"""``python -m layerskip.ops build``: compile every kernel, for any GPU, on any machine."""

import argparse
import inspect
import logging
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from layerskip.ops.build import Cubin, KernelBuildError, compile_kernel
from layerskip.ops.catalog import CATALOG, KernelInstance

# What a verify pass of Llama-3.2-1B asks of a kernel: 5 rows, 1024 keys.
SIZES = {
    "batch": 1,
    "head_dim": 64,
    "heads": 32,
    "heads_k": 8,
    "k": 2048,
    "keys": 1024,
    "m": 5,
    "n": 8192,
    "rows": 5,
    "seqlen": 5,
    "splits": 4,
    "tokens": 5,
    "vocab": 128256,
    "width": 2048,
}
DRAFTED = 4  # what k means to the kernels of acceptance


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = argparse.ArgumentParser(prog="python -m layerskip.ops", description=__doc__)
    build = top.add_subparsers(required=True).add_parser("build", help="compile every kernel")
    build.add_argument(
        "--arch",
        type=lambda text: text.split(","),
        required=True,
        help="architectures, such as sm_80,sm_90",
    )
    build.add_argument(
        "--out",
        type=Path,
        help="folder for the cubins, to be used as $XDG_CACHE_HOME/layerskip/kernels where NVRTC "
        "is missing; the cache of this machine unless given",
    )
    build.set_defaults(run=build_all)
    return top


def build_all(args: argparse.Namespace) -> int:
    """Compile, and print what ptxas says. Not 0 if a kernel keeps registers in memory."""
    console = Console()
    archs = " ".join(arch.removeprefix("sm_") for arch in args.arch)
    columns = ("kernel", f"registers\nsm_{archs}", "spill", "smem", "MB moved")
    table = Table(*columns, box=box.SIMPLE_HEAD)
    for column in table.columns:
        column.no_wrap = True
        column.justify = "left" if column is table.columns[0] else "right"
    spilled = 0
    for kernel in CATALOG.values():
        usages = [cubin.usage for cubin in compiled(kernel, args.arch, args.out)]
        local = max(usage.spill_bytes + usage.stack_bytes for usage in usages)
        spilled = max(spilled, local)
        table.add_row(
            kernel.name,
            " ".join(f"{usage.registers:3}" for usage in usages),
            str(local),
            str(max(usage.static_smem_bytes for usage in usages)),
            f"{bytes_moved(kernel) / 1e6:.3f}",
        )
    console.print(table)
    console.print(
        "spill: bytes of local memory a thread; smem: bytes of static shared memory a block (the "
        "rest is given at launch); the most of any architecture. Moved by 5 rows of "
        "Llama-3.2-1B at 1024 keys, at least."
    )
    return 1 if spilled else 0


def compiled(kernel: KernelInstance, archs: Sequence[str], out: Path | None) -> list[Cubin]:
    """One kernel for each architecture."""
    with ThreadPoolExecutor(len(archs)) as pool:
        cubins = pool.map(lambda a: compile_kernel(kernel.name, kernel.source, a, cache=out), archs)
        return list(cubins)


def bytes_moved(kernel: KernelInstance) -> int:
    """What the catalog says, at the sizes above."""
    sizes = SIZES | ({"k": DRAFTED} if kernel.source == "accept.cu" else {})
    wanted = inspect.signature(kernel.bytes_moved).parameters
    return kernel.bytes_moved(**{name: sizes[name] for name in wanted if name in sizes})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; mistakes end in one sentence."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    args = parser().parse_args(argv)
    try:
        return args.run(args)
    except KernelBuildError as error:
        Console(stderr=True).print(f"error: {error}", markup=False)
        return 1


if __name__ == "__main__":
    sys.exit(main())
