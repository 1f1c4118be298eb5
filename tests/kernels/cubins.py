"""Kernels compiled for GPUs that are not here, from a cache in the checkout.

    PYTHONPATH=. python tests/kernels/cubins.py

compiles what the tests look at. They have it done in a process beside theirs, while others of them
run: a process, because some of them replace parts of the compiler in their own.
"""

import functools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from emulator import alone

from layerskip.ops.build import Cubin, compile_kernel
from layerskip.ops.catalog import CATALOG

REPO = Path(__file__).parents[2]
CACHE = REPO / ".cache" / "cubins"
ARCHS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100"]
IN_FULL = "sm_90"


def selected(arch: str) -> list[str]:
    """All kernels of one number format for one architecture, the largest of each template for the
    others; slow tests look at the rest."""
    names = [name for name in CATALOG if "Fp16" not in name]
    if arch == IN_FULL:
        return names
    return list({name.split("<")[0]: name for name in names}.values())


def compiled(names: list[str], arch: str) -> dict[str, Cubin]:
    """Only what changed is compiled again."""
    compiling().wait()
    return dict(zip(names, _all([(name, arch) for name in names]), strict=True))


def _all(wanted: list[tuple[str, str]]) -> list[Cubin]:
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # NVRTC takes no lock of ours
        futures = [
            pool.submit(compile_kernel, name, CATALOG[name].source, arch, cache=CACHE)
            for name, arch in wanted
        ]
        return [future.result() for future in futures]


@functools.cache
def compiling() -> "subprocess.Popen[bytes]":
    """The process that compiles what the tests look at, started once. Its mistakes are theirs to
    meet again."""
    return subprocess.Popen(
        [sys.executable, __file__],
        env=os.environ | {"PYTHONPATH": str(REPO)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def stop() -> None:
    """End that process, where no test has waited for it."""
    if compiling.cache_info().currsize:
        compiling().kill()
        compiling().wait()


if __name__ == "__main__":
    with alone(CACHE / "all"):
        _all([(name, arch) for arch in ARCHS for name in selected(arch)])
