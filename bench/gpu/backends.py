"""Where the checks run: a GPU, or the emulator at toy sizes, which tries the checks themselves."""

import importlib.metadata
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import layerskip.ops
from layerskip.ops.build import description, kernels_folder
from layerskip.ops.catalog import CATALOG
from layerskip.ops.kernels import KernelOps
from layerskip.ops.launch import DriverLauncher, Launcher
from layerskip.ops.registry import cuda_launcher

ROOT = Path(__file__).parents[2]
REPLAYS = 12
GRAPH_CALLS = 32  # in a graph, at least: starting one takes as long as a small kernel
Kernels = Iterable[tuple[str, str]]


class Backend(Protocol):
    """Operations, and what only this place can do."""

    device: str
    ops: Any

    def launcher(self, kernels: Kernels, folder: Path) -> Launcher:
        """For kernels that are no operation of ours."""
        ...

    def seconds(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Of one call: all are run one after another, several times; the median."""
        ...

    def why_no_overlap(self) -> str | None:
        """Why no kernel can start before the one before it has ended, or None."""
        ...

    def overlapping(self, allowed: bool) -> AbstractContextManager[None]:
        """Whether the operations' kernels may do so inside; see ``DriverLauncher.overlapping``."""
        ...

    def facts(self) -> dict[str, str]:
        """What the machine is."""
        ...


class CudaBackend:
    """A GPU, and the operations as users call them."""

    device = "cuda"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("no GPU here; --backend emulator --toy tries the checks without one")
        self.ops = layerskip.ops

    def launcher(self, kernels: Kernels, folder: Path) -> Launcher:
        return DriverLauncher(torch.device("cuda"), kernels, folder=folder)

    def seconds(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Replays of one CUDA graph of all calls, so that no host is in the time."""
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        calls = [*calls] * max(1, -(-GRAPH_CALLS // len(calls)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        times = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / len(calls))
        return statistics.median(times[2:])

    def why_no_overlap(self) -> str | None:
        return self._launcher().why_no_overlap

    def overlapping(self, allowed: bool) -> AbstractContextManager[None]:
        return self._launcher().overlapping(allowed)

    def _launcher(self) -> DriverLauncher:
        """The operations' own."""
        return cuda_launcher(torch.device("cuda", torch.cuda.current_device()))

    def facts(self) -> dict[str, str]:
        properties = torch.cuda.get_device_properties(0)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        return {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": str(properties.multi_processor_count),
            "driver": output_of(query) or "unknown",
            "cuda": str(torch.version.cuda),
            "cuda_bindings": version_of("cuda-bindings"),
            "kernels": description((properties.major, properties.minor)),
        }


class CpuBackend:
    """The CPU, and the operations' definitions."""

    device = "cpu"

    def __init__(self) -> None:
        self.ops = layerskip.ops

    def launcher(self, kernels: Kernels, folder: Path) -> Launcher:
        raise RuntimeError("a CPU has no kernels; the emulator runs them")

    def seconds(self, calls: Sequence[Callable[[], Any]]) -> float:
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)

    def why_no_overlap(self) -> str | None:
        return "a CPU ends each operation before it starts the next"

    def overlapping(self, allowed: bool) -> AbstractContextManager[None]:
        if allowed:
            raise RuntimeError(self.why_no_overlap())
        return nullcontext()

    def facts(self) -> dict[str, str]:
        return {"gpu": "none", "cpu": platform.machine()}


class EmulatorBackend(CpuBackend):
    """The CPU emulator of the tests: its times say nothing."""

    def __init__(self) -> None:
        sys.path.insert(0, str(ROOT / "tests" / "kernels"))
        from emulator import EmulatorLauncher

        self._make = EmulatorLauncher
        self.ops = KernelOps(self.launcher(catalog(), kernels_folder()))

    def launcher(self, kernels: Kernels, folder: Path) -> Launcher:
        return self._make(kernels, folder=folder)

    def facts(self) -> dict[str, str]:
        return {"gpu": "emulator", "cpu": platform.machine()}


BACKENDS: dict[str, Callable[[], Backend]] = {"cuda": CudaBackend, "emulator": EmulatorBackend}


def catalog() -> Kernels:
    """Every kernel that an operation may launch."""
    return [(kernel.name, kernel.source) for kernel in CATALOG.values()]


def with_own_sources(backend: Backend, source: Path, names: Sequence[str]) -> Launcher:
    """A launcher for kernels of a file beside ours, which may include our headers."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for file in [source, *kernels_folder().glob("*.cuh")]:
            shutil.copy(file, folder)
        return backend.launcher([(name, source.name) for name in names], folder)


def output_of(command: Sequence[str]) -> str:
    """What a command prints, or nothing if it cannot."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20, cwd=ROOT
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def version_of(package: str) -> str:
    """Of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


class Noise:
    """Tensors of numbers that are the same in every run."""

    def __init__(self, device: str, seed: int = 0):
        self.device = device
        self._generator = torch.Generator(device=device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        noise = torch.randn(shape, generator=self._generator, device=self.device)
        return noise.mul_(scale).to(dtype)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(
            high, shape, generator=self._generator, device=self.device, dtype=dtype
        )
