"""What kernels ask of tensors in memory: number format, strides, alignment.

Each mistake is a ``ValueError`` that names the operation and the argument.
"""

import torch
from torch import Tensor

from layerskip.ops.catalog import FORMATS

ALIGNMENT = 16  # bytes of one load
FORMS = {getattr(torch, name): form for form, name in FORMATS.items()}


def form(op: str, **tensor: Tensor) -> str:
    """The kernels' name of a tensor's number format."""
    ((name, t),) = tensor.items()
    if t.dtype not in FORMS:
        raise ValueError(f"{op}: {name} has dtype {t.dtype}, kernels take {[*FORMS]}")
    return FORMS[t.dtype]


def dense(op: str, **tensors: Tensor | None) -> None:
    """Without gaps, in order."""
    for name, t in tensors.items():
        if t is not None and not t.is_contiguous():
            raise ValueError(f"{op}: {name} has strides {t.stride()}, expected it contiguous")


def dense_last(op: str, **tensors: Tensor) -> None:
    """Without gaps in the last dimension."""
    for name, t in tensors.items():
        if t.stride(-1) != 1:
            raise ValueError(f"{op}: {name} has strides {t.stride()}, expected 1 as the last")


def row_stride(op: str, **tensor: Tensor) -> int:
    """Of a matrix whose rows have no gaps."""
    ((_, t),) = tensor.items()
    dense_last(op, **tensor)
    return t.stride(0)


def strides(t: Tensor) -> tuple[int, int, int]:
    """Of all dimensions but the last of four."""
    return t.stride(0), t.stride(1), t.stride(2)


def same_strides(op: str, k_cache: Tensor, v_cache: Tensor) -> None:
    """Kernels take one set of strides for both."""
    if k_cache.stride() != v_cache.stride():
        raise ValueError(
            f"{op}: v_cache has strides {v_cache.stride()}, expected {k_cache.stride()} as k_cache"
        )


def aligned(width: int, *tensors: Tensor | None) -> bool:
    """Whether rows can be read 16 bytes at a time; else kernels read element by element."""
    present = [t for t in tensors if t is not None]
    return width % 8 == 0 and all(
        t.data_ptr() % ALIGNMENT == 0 and (t.dim() < 2 or t.stride(0) % 8 == 0) for t in present
    )


def aligned_heads(op: str, **tensors: Tensor) -> None:
    """Attention reads heads 16 bytes at a time, and nothing else."""
    for name, t in tensors.items():
        if t.data_ptr() % ALIGNMENT or any(s % 8 for s in strides(t)):
            raise ValueError(
                f"{op}: {name} has strides {t.stride()} and address {t.data_ptr():#x}, expected "
                f"every head at a multiple of {ALIGNMENT} bytes"
            )
