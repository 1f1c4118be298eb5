"""The table that a recipe ends with, and the curves of acceptance over time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation import Measurement
from rich.table import Table


@dataclass(frozen=True)
class Result:
    """What a run bought and cost.

    Attributes:
        title: such as "lora_early_exit on builtin".
        before, after: the model without and with what was trained.
        wall_seconds: of the training, measurements not counted.
        peak_memory_bytes: of the process (on CUDA, of the device).
        command: that reproduces it.
        details: further figures of the recipe, by name.
    """

    title: str
    before: Measurement
    after: Measurement
    wall_seconds: float
    peak_memory_bytes: int
    command: str
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        raise NotImplementedError


def rows(result: Result) -> list[tuple[str, str, str, str]]:
    """Figure, before, after, change: what every form of the table shows."""
    raise NotImplementedError


def as_table(result: Result) -> Table:
    """For a terminal."""
    raise NotImplementedError


def as_markdown(result: Result) -> str:
    """For bench/LOG.md."""
    raise NotImplementedError


def save(result: Result, path: Path) -> None:
    """Write ``table.json``."""
    raise NotImplementedError


def peak_memory() -> int:
    """Bytes: the most that this process has held so far; on CUDA, what tensors held on devices."""
    raise NotImplementedError


def plot_acceptance(history: Sequence[tuple[int, Mapping[int, float]]], path: Path) -> None:
    """A PNG of acceptance over steps, a line for each exit layer.

    Args:
        history: (step, acceptance by exit layer), in order.
        path: written whole or not at all.
    """
    raise NotImplementedError
