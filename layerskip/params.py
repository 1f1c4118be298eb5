"""How to sample: one frozen value per request."""

import math
import sys
from dataclasses import dataclass

MAX_SEED = 2**63 - 1
SMALLEST = 1e-6


@dataclass(frozen=True)
class SamplingParams:
    """Settings of the target distribution, named as in transformers.

    Attributes:
        temperature: 0.0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this; 1.0 keeps all.
        min_p: drop tokens less likely than ``min_p`` times the most likely one; 0.0 drops none.
        seed: of the Gumbel noise, 0 to 2**63 - 1. None draws one, and the output returns it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0.0, math.inf)
        check_number("top_p", self.top_p, 0.0, 1.0)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_integer("top_k", self.top_k, 0)
        if self.top_p == 0.0:
            raise ValueError("top_p must be above 0 and at most 1, got 0: use temperature=0.0")
        for name, value in (("temperature", self.temperature), ("top_p", self.top_p)):
            if 0.0 < value < SMALLEST:  # float32 would make NaN of it, or keep no token at all
                raise ValueError(
                    f"{name} must be at least {SMALLEST:g}, got {value}: use temperature=0.0"
                )
        if self.seed is not None:
            check_integer("seed", self.seed, 0, MAX_SEED)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise unless ``value`` is an int (bool is not) in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {allowed}, got {value}")


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Raise unless ``value`` is a finite int or float in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    finite = abs(value) <= sys.float_info.max  # of an int without a float too, and not of NaN
    if not finite or not low <= value <= high:
        allowed = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise ValueError(f"{name} must be finite and {allowed}, got {value}")
