"""The recipes' modules as tests get at them: scripts import each other by bare names."""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

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
