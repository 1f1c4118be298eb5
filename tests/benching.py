"""The scripts of bench/ as modules: they import each other by plain names, so only for a while."""

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

REPO = Path(__file__).parents[1]
BENCH = REPO / "bench"


@contextmanager
def bench_modules(*names: str) -> Iterator[SimpleNamespace]:
    """These modules; afterwards none of bench/ is left among the imported ones."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    gc.unfreeze()  # what is timed sets objects aside
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == BENCH:
            del sys.modules[name]
