"""The scripts of bench/ as modules, and a toy that they measure.

The scripts import each other by plain names, so they are modules only for a while.
"""

import gc
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from toys import PLANS, make_model

from layerskip import api
from layerskip.cost import CostTable, Curve
from layerskip.hf_modes import EarlyExitSettings
from layerskip.plan import PlanFile

REPO = Path(__file__).parents[1]
BENCH = REPO / "bench"
TEXTS = ("one fish two fish", "to be or not", "a stitch in time saves", "as it is in rain")
TOLD = " that is another story to tell"


def curve(*seconds: float) -> Curve:
    return Curve((1, 8, 64), (0,), (seconds,))


COST = CostTable(curve(0.1, 0.2, 0.4), curve(0.1, 0.1, 0.1), curve(0.5, 0.6, 1.5), 0.0, 1, {})


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


def suite_options() -> ModuleType:
    """bench/conftest.py; by its own name it would be that of the tests."""
    spec = importlib.util.spec_from_file_location("bench_conftest", BENCH / "conftest.py")
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    return conftest


def toy_checkpoint(folder: Path, tokenizer: Any) -> Path:
    """A toy with its plan in ``folder``, and ``prompts.jsonl`` with what follows them."""
    make_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    PlanFile(PLANS["exit"]).save(folder / "layerskip.json")
    lines = [json.dumps({"prompt": t, "continuation": TOLD}) + "\n" for t in TEXTS]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def toy_arguments(folder: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """For a script: a toy, its prompts, and a table in the place of a measured one."""
    monkeypatch.setattr(api, "fitting_cost", lambda *_, **__: COST)
    toy_checkpoint(folder, tokenizer)
    return ["--model", str(folder), "--prompts", str(folder / "prompts.jsonl")]


@contextmanager
def toy_lab(bench: SimpleNamespace, folder: Path) -> Iterator[Any]:
    """Passes are not timed, and transformers' modes are tried with one setting only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "fitting_cost", lambda *_, **__: COST)
        patch.setattr(bench.paired, "measure_cost", lambda *_, **__: COST)
        one = [EarlyExitSettings(2, 3, 0.0)]
        patch.setattr(bench.modes.Theirs, "grid", lambda self, mode: one)
        yield bench.lab.Lab(
            bench.lab.Options(
                model=str(folder),
                device="cpu",
                prompts=folder / "prompts.jsonl",
                draft_model=str(folder),
                limit=2,
                tokens=8,
                max_repeated=1.0,
            )
        )


def lab_fixtures(*names: str) -> tuple[Any, Any, Any]:
    """For a file of tests: these modules, a toy's checkpoint, and a lab that measures it."""

    @pytest.fixture(scope="module")
    def bench() -> Iterator[SimpleNamespace]:
        with bench_modules(*names) as modules:
            yield modules

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
        return toy_checkpoint(tmp_path_factory.mktemp("toy"), tokenizer)

    @pytest.fixture(scope="module")
    def lab(bench: SimpleNamespace, folder: Path) -> Iterator[Any]:
        with toy_lab(bench, folder) as lab:
            yield lab

    return bench, folder, lab


def run(script: ModuleType, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The script, as the command line starts it."""
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    script.main()


def refuse() -> None:
    """As a mode that transformers has not for this model."""
    raise ValueError("not with this model\nand more")
