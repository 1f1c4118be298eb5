"""Settings of a recipe: a YAML file, overridden by ``key=value`` on the command line."""

import argparse
import dataclasses
import difflib
import math
import shlex
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from layerskip.files import write_text
from layerskip.params import check_integer, check_number

T = TypeVar("T")
MixedPrecision = Literal["no", "bf16", "fp16"]
NO_VALUE = dataclasses.MISSING


@dataclass(frozen=True)
class RunSettings:
    """What both recipes are told; each adds its own in a subclass.

    Attributes:
        model: a folder, a hub id, or "builtin".
        data: a file, a folder, or a hub id of ``datasets`` (``data.load``).
        out: folder of the run.
        steps: of the optimiser.
        batch_size: sequences of one step, over all processes and accumulated micro-batches, so
            that a step is the same whatever it is divided into.
        gradient_accumulation: micro-batches that each process divides its share of a step into.
        seq_len: tokens of a packed sequence.
        learning_rate: at its highest.
        mixed_precision: "no", "bf16" or "fp16", as accelerate takes it.
        seed: of the order of the data and of all that is drawn.
        held_out_share: of the rows, never trained on; above 0, at most 0.5.
        save_every, eval_every: steps.
        resume: go on from the last checkpoint in ``out``.
        max_new_tokens: of each prompt of the final measurement.
        temperature: of the final measurement, beside greedy; above 0.
    """

    model: str = "builtin"
    data: str = ""
    out: str = ""
    steps: int = 200
    batch_size: int = 8
    gradient_accumulation: int = 1
    seq_len: int = 512
    learning_rate: float = 1e-3
    mixed_precision: MixedPrecision = "no"
    seed: int = 0
    held_out_share: float = 0.05
    save_every: int = 50
    eval_every: int = 50
    resume: bool = True
    max_new_tokens: int = 64
    temperature: float = 0.8

    def __post_init__(self) -> None:
        for name in ("model", "data", "out"):
            if not getattr(self, name):
                raise ValueError(f"{name} is missing; give {name}=... or write it into the YAML")
        least = {"seq_len": 2, "max_new_tokens": 2, "seed": 0}
        names = ("steps", "batch_size", "gradient_accumulation", "save_every", "eval_every")
        for name, low in (dict.fromkeys(names, 1) | least).items():
            check_integer(name, getattr(self, name), low)
        check_number("learning_rate", self.learning_rate, 0.0, 10.0)
        check_number("held_out_share", self.held_out_share, 1e-6, 0.5)
        check_number("temperature", self.temperature, 1e-3, 10.0)
        if self.batch_size % self.gradient_accumulation:
            raise ValueError(
                f"batch_size ({self.batch_size}) must be a multiple of gradient_accumulation "
                f"({self.gradient_accumulation})"
            )


def from_command_line(cls: type[T], description: str, config: Path, argv: Sequence[str]) -> T:
    """Settings from ``--config FILE key=value ...``.

    Args:
        cls: a frozen dataclass.
        description: of ``--help``.
        config: read where no other is given.
        argv: arguments without the script's name.

    Raises:
        ValueError: as of ``read``.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", type=Path, default=config, help=f"default: {config.name}")
    keys = ", ".join(_fields_below(cls))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"keys: {keys}")
    args = parser.parse_intermixed_args(argv)
    return read(cls, args.config, args.overrides)


def command() -> str:
    """The command line that runs this process again."""
    return shlex.join(["python", *sys.argv])


def read(cls: type[T], config: Path | None, overrides: Sequence[str] = ()) -> T:
    """Settings from a YAML file and ``key=value`` pairs, which count more; later ones most.

    Args:
        cls: a frozen dataclass of strings, numbers, booleans, literals, tuples, mappings, optional
            ones of these, and other such dataclasses, whose keys are written ``outer.inner``.
        config: the file; None: the class's defaults.
        overrides: as on the command line; values are YAML, but text stays as it is typed.

    Raises:
        ValueError: a key is unknown (the nearest is named), a value is of another type than its
            key's, the file cannot be read, or the class refuses what it is given.
    """
    raise NotImplementedError


def save(settings: Any, path: Path) -> None:
    """Write settings as YAML that ``read`` takes back."""
    raise NotImplementedError


def _fields_below(cls: type, prefix: str = "") -> dict[str, Any]:
    raise NotImplementedError
