"""How far a result is from the definition in float64."""

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
