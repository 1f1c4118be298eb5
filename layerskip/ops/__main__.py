"""``python -m layerskip.ops build``: compile every kernel, for any GPU, on any machine."""

import argparse
import inspect
import logging
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
    """Compile, and print what ptxas says. Not 0 if a kernel spills registers."""
    console = Console()
    table = Table("kernel", "arch", "registers", "spills", "stack", "bytes moved")
    for column in table.columns[2:]:
        column.justify = "right"
    spilled = False
    for arch in args.arch:
        for kernel, cubin in compiled(arch, args.out):
            usage = cubin.usage
            spilled = spilled or usage.spill_bytes > 0
            table.add_row(
                kernel.name,
                arch,
                str(usage.registers),
                f"{usage.spill_bytes} B",
                f"{usage.stack_bytes} B",
                f"{bytes_moved(kernel):,}",
            )
    console.print(table)
    console.print("Bytes moved: 5 rows of Llama-3.2-1B at 1024 keys (linear: its MLP's sizes).")
    return 1 if spilled else 0


def compiled(arch: str, out: Path | None) -> list[tuple[KernelInstance, Cubin]]:
    """Every kernel of the catalog for one architecture."""
    kernels = list(CATALOG.values())
    with ThreadPoolExecutor() as pool:
        cubins = pool.map(lambda k: compile_kernel(k.name, k.source, arch, cache=out), kernels)
        return list(zip(kernels, cubins, strict=True))


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
