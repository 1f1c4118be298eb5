"""How far a result is from the definition in float64, and numbers that show the order of a sum."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# The largest relative error of one rounding to nearest.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def exactly(definition: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The definition on a CPU, floats of 16 bits in float64."""
    return definition(*map(_wide, args), **{name: _wide(arg) for name, arg in kwargs.items()})


def error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference, relative to the norm of what is wanted."""
    assert got.shape == want.shape
    difference = (got.cpu().double() - want).norm()
    return (difference / want.norm().clamp(min=1e-30)).item()


def _wide(arg: Any) -> Any:
    if not isinstance(arg, Tensor):
        return arg
    return arg.cpu().double() if arg.dtype in ROUNDING else arg.cpu().clone()


def mirrored(left: Tensor, sign: int = 1) -> Tensor:
    """Columns, and after them the same columns shuffled, always alike, times ``sign``.

    A product of one ``mirrored(a)`` and one ``mirrored(b, -1)`` is 0: what comes out is nothing but
    roundings, and shows in all its bits the order in which it was added up.
    """
    columns = left.shape[-1]
    shuffled = torch.randperm(columns, generator=torch.Generator().manual_seed(3))
    return torch.cat([left, sign * left[..., shuffled.to(left.device)]], dim=-1)
