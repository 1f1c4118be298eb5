"""Kernels on the CPU: builds ``emulator/`` with a kernel's source, and launches like the driver.

``EmulatorLauncher`` takes torch CPU tensors. A mistake that the emulator sees (a deadlock, threads
at different barriers, shared memory overrun, arguments of other types than the parameters) raises
``EmulatorError`` with lines of the source.
"""

import ctypes
import dataclasses
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from layerskip.ops import launch
from layerskip.ops.launch import Argument, Dim3

HERE = Path(__file__).parent
RUNTIME = HERE / "emulator"
KERNELS = HERE.parents[1] / "kernels"
CACHE = HERE.parents[1] / ".cache" / "emulator"
MAX_THREADS = 1024
MAX_SMEM = 99 * 1024  # of a block on sm_86 and sm_89, the least of our architectures
REPORT_BYTES = 4096


class EmulatorError(RuntimeError):
    """A kernel did what it must not do."""


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """How the emulator is compiled."""

    compiler: str = "g++"
    sanitize: bool = False
    """With AddressSanitizer and UBSan; the process must have been started with their library."""
    ucontext: bool = False
    """With POSIX's context switch instead of our own."""

    @classmethod
    def default(cls) -> "Toolchain":
        """The environment's choice: that is how a subprocess runs the same tests another way."""
        return cls(
            os.environ.get("LAYERSKIP_EMULATOR_COMPILER", "g++"),
            sanitize=os.environ.get("LAYERSKIP_EMULATOR_SANITIZE") == "1",
        )

    @property
    def path(self) -> str | None:
        """Where the compiler is, or None."""
        return shutil.which(self.compiler)

    @property
    def is_clang(self) -> bool:
        return "clang" in self.compiler

    def sanitizers(self) -> list[str]:
        """The libraries that a process has to be started with."""
        names = ["libasan.so", "libubsan.so"]
        if self.is_clang:  # one library for both
            names = [f"libclang_rt.asan-{platform.machine()}.so"]
        return [self._library(name) for name in [*names, "libstdc++.so"]]

    def _library(self, name: str) -> str:
        """Where the compiler has a library; its bare name if it has none."""
        command = [self.compiler, f"-print-file-name={name}"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def flags(self, *, runtime: bool = False) -> list[str]:
        """For a source of kernels, or for the emulator's own."""
        # Contraction would hide where a kernel needs fmaf; CUDA code reinterprets its loads.
        flags = ["-std=c++17", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-strict-aliasing"]
        flags += ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
        if has_fma():
            flags.append("-march=x86-64-v3")
        if self.sanitize:
            # UBSan is for kernels: in the emulator itself it only doubles the time of compiling.
            checks = "address" if runtime else "address,undefined"
            flags += ["-O1", "-g", f"-fsanitize={checks}", "-fno-sanitize-recover=all"]
            flags += ["-fno-omit-frame-pointer", "-ftrivial-auto-var-init=pattern"]
            flags += ["-shared-libasan"] * self.is_clang  # as g++ has it: Python has none within
        else:
            # Of kernels there are many, which run for a moment each: -O2 takes twice as long.
            flags.append("-O2" if runtime else "-O1")
        if self.ucontext:
            flags.append("-DLAYERSKIP_EMULATOR_UCONTEXT=1")
        return flags


@functools.cache
def has_fma() -> bool:
    """Whether this CPU runs x86-64-v3 (else fmaf is a slow, equally exact, library call)."""
    if platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists():
        return False
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    return {"avx2", "bmi2", "fma", "f16c"} <= set(flags)


@functools.cache
def _compiler_version(path: str) -> bytes:
    return subprocess.run([path, "--version"], check=True, capture_output=True).stdout


def _runtime_sources() -> list[Path]:
    return [*RUNTIME.glob("*.h"), *RUNTIME.glob("*.cpp")]


def _key(files: Iterable[Path], *rest: str) -> str:
    digest = hashlib.sha256()
    for part in [*(p.read_bytes() for p in sorted(files)), *(r.encode() for r in rest)]:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _compile(toolchain: Toolchain, flags: Sequence[str], out: Path) -> Path:
    """Compile to ``out``, which appears whole or not at all."""
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        made = Path(folder) / out.name
        command = [toolchain.path or toolchain.compiler, *flags]
        done = subprocess.run(
            [*command, "-o", str(made)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise EmulatorError(f"{toolchain.compiler} refuses {out.stem}:\n{done.stderr}")
        made.replace(out)
    return out


@contextmanager
def alone(made: Path) -> Iterator[None]:
    """One process at a time makes a file; the others wait, and find it there."""
    made.parent.mkdir(parents=True, exist_ok=True)
    with (made.parent / f"{made.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def _compilers() -> ThreadPoolExecutor:
    """As many at once as there are cores. What waits for another was begun after it."""
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)))


def stop() -> None:
    """Begin nothing more of what nobody waits for."""
    if _compilers.cache_info().currsize:
        _compilers().shutdown(cancel_futures=True)


@functools.cache
def begin_runtime(toolchain: Toolchain) -> list[Future[Path]]:
    """The emulator's own objects, the same for all kernels; not waited for."""
    version = _compiler_version(toolchain.path or toolchain.compiler).decode()
    flags = toolchain.flags(runtime=True)
    key = _key(_runtime_sources(), version, *flags)

    def make(source: Path) -> Path:
        out = CACHE / f"{source.stem}-{key}.o"
        with alone(out):
            return out if out.exists() else _compile(toolchain, [*flags, "-c", str(source)], out)

    return [_compilers().submit(make, source) for source in sorted(RUNTIME.glob("*.cpp"))]


@functools.cache
def _begun(source: Path, names: tuple[str, ...], toolchain: Toolchain, out: Path) -> Future[Path]:
    """Compile a library, unless that was begun before."""
    runtime = begin_runtime(toolchain)

    def make() -> Path:
        with alone(out):
            return out if out.exists() else build()

    def build() -> Path:
        lines = ['#include "emulator.h"', f'#include "{source}"']
        lines += [f'EMULATOR_KERNEL("{name}", {name})' for name in names]
        with tempfile.NamedTemporaryFile("w", suffix=".cpp", dir=out.parent) as unit:
            unit.write("\n".join(lines) + "\n")
            unit.flush()
            objects = [str(future.result()) for future in runtime]
            flags = [*toolchain.flags(), f"-I{RUNTIME}", "-shared", unit.name, *objects]
            return _compile(toolchain, flags, out)

    return _compilers().submit(make)


def begin(
    kernels: Iterable[tuple[str, str]],
    *,
    folder: Path = KERNELS,
    toolchain: Toolchain | None = None,
    cache: Path = CACHE,
) -> dict[str, Future[Path]]:
    """Compile the libraries with these kernels, one of each source; not waited for.

    What is in the cache, and has not changed since, is not compiled.

    Args:
        kernels, folder, toolchain, cache: as ``EmulatorLauncher`` takes them.
    """
    toolchain = toolchain or Toolchain.default()
    names: dict[str, list[str]] = {}
    for name, source in kernels:
        names.setdefault(source, []).append(name)
    headers = [*folder.glob("*.cuh"), *_runtime_sources()]
    version = _compiler_version(toolchain.path or toolchain.compiler).decode()
    flags = [*toolchain.flags(), *toolchain.flags(runtime=True), version]
    begun = {}
    for source, own in names.items():
        key = _key([folder / source, *headers], *own, *flags)
        out = cache / f"{Path(source).stem}-{key}.so"
        begun[source] = _begun(folder / source, tuple(own), toolchain, out)
    return begun


class EmulatorLauncher:
    """Runs kernels on the CPU; the other ``Launcher`` is the driver's.

    Args:
        kernels: ``(name expression, source file)`` of each kernel that may be launched.
        folder: where the sources are.
        seed: order of threads and blocks: 0 in order, 1 backwards, others shuffled; an odd one
            above 1 lets a warp run until all of it waits before another does.
        threads: OS threads over which blocks are spread.
    """

    def __init__(
        self,
        kernels: Iterable[tuple[str, str]],
        *,
        folder: Path = KERNELS,
        seed: int = 0,
        threads: int = 2,
        toolchain: Toolchain | None = None,
        cache: Path = CACHE,
    ):
        self.seed = seed
        self.threads = threads
        kernels = list(kernels)
        begun = begin(kernels, folder=folder, toolchain=toolchain, cache=cache)
        libraries = {source: ctypes.CDLL(str(made.result())) for source, made in begun.items()}
        self._libraries = {name: libraries[source] for name, source in kernels}
        for library in libraries.values():
            library.emulator_signature.restype = ctypes.c_char_p
            library.emulator_signature.argtypes = [ctypes.c_char_p]

    def launch(
        self,
        kernel: str,
        grid: Dim3,
        block: Dim3,
        smem: int,
        args: Sequence[Argument],
        *,
        cooperative: bool = False,
    ) -> None:
        """Run one kernel to its end; see ``layerskip.ops.launch.Launcher``."""
        library = self._libraries[kernel]
        _check_sizes(kernel, grid, block, smem)
        _check_arguments(kernel, library.emulator_signature(kernel.encode()).decode(), args)
        report = ctypes.create_string_buffer(REPORT_BYTES)
        failed = library.emulator_launch(
            kernel.encode(),
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(*block),
            ctypes.c_size_t(smem),
            pack_arguments(args),
            ctypes.c_int(cooperative),
            ctypes.c_uint(self.seed),
            ctypes.c_uint(self.threads),
            report,
            ctypes.c_size_t(REPORT_BYTES),
        )
        if failed:
            raise EmulatorError(f"{kernel}: {report.value.decode()}")


def _check_sizes(kernel: str, grid: Dim3, block: Dim3, smem: int) -> None:
    """What the driver would refuse."""
    threads = block[0] * block[1] * block[2]
    if not 0 < threads <= MAX_THREADS or not all(n > 0 for n in grid) or max(grid[1:]) > 65535:
        raise EmulatorError(f"{kernel}: no device starts grid {grid} of blocks {block}")
    if not 0 <= smem <= MAX_SMEM:
        raise EmulatorError(f"{kernel}: {smem} bytes of shared memory, more than {MAX_SMEM}")


def argument_codes(args: Sequence[Argument]) -> str:
    """One letter for each argument, as ``layerskip.ops.launch`` has them."""
    return "".join(launch._code(type(arg)) for arg in args)


def pack_arguments(args: Sequence[Argument]) -> ctypes.Array[ctypes.c_void_p]:
    """The ``void **`` that a launch takes, which also owns what it points to."""
    cells = ctypes.create_string_buffer(8 * len(args) + 8)
    launch._write_arguments(cells, args)
    return launch._pointers_to(cells, len(args))


def _check_arguments(kernel: str, expected: str, args: Sequence[Argument]) -> None:
    got = argument_codes(args)
    if got != expected:
        raise EmulatorError(
            f"{kernel} takes parameters of types {expected}, got {got} (see argument_codes)"
        )
    for arg in args:
        if isinstance(arg, Tensor) and arg.device.type != "cpu":
            raise EmulatorError(f"{kernel} runs on the CPU here, and got a tensor on {arg.device}")


def run_with(
    toolchain: Toolchain, *arguments: str, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, in a process in which this is the default toolchain.

    The sanitizers' libraries have to be there before Python is, so it takes a process of its own.
    A mistake that they see ends it, with a report on stderr.
    """
    for begun in begin_runtime(toolchain):
        begun.result()
    environment = os.environ | {
        "LAYERSKIP_EMULATOR_COMPILER": toolchain.compiler,
        "PYTHONPATH": f"{HERE}:{HERE.parents[1]}",
    }
    if toolchain.sanitize:
        # Python keeps much to its end. LLVM's symbolizer may never end on torch's libraries.
        options = "detect_leaks=0" + ":symbolize=0" * toolchain.is_clang
        environment |= {
            "ASAN_OPTIONS": options,
            "LAYERSKIP_EMULATOR_SANITIZE": "1",
            "LD_PRELOAD": " ".join(toolchain.sanitizers()),
        }
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE.parents[1],
        env=environment,
        timeout=timeout,
    )


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An output to be written: NaN, or the most negative integer, wherever a kernel leaves it."""
    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=dtype)
    return torch.full(shape, torch.iinfo(dtype).min, dtype=dtype)
