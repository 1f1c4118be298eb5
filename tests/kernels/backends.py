"""Backends of the operations: their definitions, the kernels emulated, the kernels on a GPU."""

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from emulator import EmulatorLauncher, Toolchain
from needs import need
from torch import Tensor

import layerskip.ops
from layerskip.ops.catalog import CATALOG
from layerskip.ops.kernels import KernelOps
from layerskip.ops.registry import cuda_ops


@dataclass(frozen=True)
class Backend:
    """Operations, and the device of their tensors."""

    ops: Any
    device: str
    launcher: EmulatorLauncher | None = None

    def noise(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Normal noise; the same numbers on every device."""
        return (torch.randn(shape) * scale).to(dtype).to(self.device)

    def tensor(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def every_kernel() -> list[tuple[str, str]]:
    """Names and sources of all that an operation may launch."""
    return [(kernel.name, kernel.source) for kernel in CATALOG.values()]


@functools.cache
def emulated() -> EmulatorLauncher:
    need(Toolchain.default().path, "g++, which builds the emulator")
    return EmulatorLauncher(every_kernel())


def forget_steps(backend: Backend) -> None:
    """Let no operation repeat what it did under other constants."""
    ops = backend.ops
    if not isinstance(ops, KernelOps):
        ops = cuda_ops(torch.device("cuda", torch.cuda.current_device()))
    ops._steps.clear()


def make_backend(name: str) -> Backend:
    if name == "emulator":
        launcher = emulated()
        launcher.seed = 0
        return Backend(KernelOps(launcher), "cpu", launcher)
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    backend = Backend(layerskip.ops, "cuda" if name == "cuda" else "cpu")
    if name == "cuda":  # of the tests before, which may have had other constants
        forget_steps(backend)
    return backend
