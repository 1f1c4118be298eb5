"""The recipes' modules as tests get at them: scripts import each other by bare names."""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from toys import random_ids

RECIPES = Path(__file__).parents[1] / "recipes"


@contextmanager
def imported(names: Sequence[str]) -> Iterator[SimpleNamespace]:
    """Modules of ``recipes/``; they, and what they import from there, are forgotten at the end."""
    known = set(sys.modules)
    sys.path.insert(0, str(RECIPES))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(RECIPES))
        for name in set(sys.modules) - known:
            if (RECIPES / f"{name}.py").is_file():
                del sys.modules[name]


def packed_rows(recipes: SimpleNamespace) -> Any:
    """12 rows of 32 tokens, of several documents each, some with prompts."""
    samples = [
        recipes.data.Sample(tuple(random_ids(5 + 7 * i % 30, seed=i)), 2 * (i % 3 == 0))
        for i in range(24)
    ]
    return recipes.packing.pack(samples, 32, pad_id=1)


def take(trainer: Any, steps: int) -> list[dict[str, Any]]:
    """Records of so many steps, less what a clock measured."""
    records = [trainer.step() for _ in range(steps)]
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records]


def weights(trainer: Any) -> list[Tensor]:
    """What is trained, as it is now."""
    return [p.detach().clone() for p in trainer.trained]
