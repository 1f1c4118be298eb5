"""The recipes' modules as tests get at them: scripts import each other by bare names."""

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import make_model, random_ids

REPO = Path(__file__).parents[1]
RECIPES = REPO / "recipes"


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


def environment() -> dict[str, str]:
    """Of a process of its own."""
    return os.environ | {"PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}


def launched(script: str, argv: Sequence[str]) -> None:
    """Run a recipe on two processes: ``accelerate launch --cpu`` starts one, whatever is asked.

    By itself it has a port of its own: with the usual one two test runs at once would meet.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc_per_node", "2"]
    done = subprocess.run(
        [*launch, str(RECIPES / script), *argv],
        env=environment() | {"ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def killed(script: str, argv: Sequence[str], checkpoints: Callable[[], list[Path]]) -> None:
    """Run a recipe in a process of its own, and kill it when it has left a checkpoint."""
    command = [sys.executable, str(RECIPES / script), *argv]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not checkpoints():
            time.sleep(0.01)
        process.kill()
    assert checkpoints()


@contextmanager
def exiting(code: int) -> Iterator[None]:
    """A command within it ends with that exit code."""
    if not code:
        yield
        return
    with pytest.raises(SystemExit) as ended:
        yield
    assert ended.value.code == code


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Within it no file grows beyond so many bytes."""
    resource = pytest.importorskip("resource", reason="Windows has no such limits")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def assert_full_disk_leaves_checkpoint(
    checkpoints: Any, trainer: Any, file: str, out: Path
) -> None:
    """What a trainer says when there is no room for a file, and what it leaves."""
    take(trainer, 1)
    trainer.save(out)
    kept = out / "step-1" / file
    before = kept.read_bytes()
    take(trainer, 1)
    said = rf"partial-2/{file} cannot be written: File too large$"
    with full_disk(len(before) - 1), pytest.raises(ValueError, match=said):
        trainer.save(out)
    assert [path.name for path in checkpoints.checkpoints(out)] == ["step-1"]
    assert kept.read_bytes() == before
    assert not (out / "partial-2" / file).exists()
    trainer.save(out)
    assert [path.name for path in checkpoints.checkpoints(out)] == ["step-1", "step-2"]


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


def of_other_weights(**shape: int) -> Any:
    """A toy of the same form as ``make_model`` makes, one weight of which is another."""
    model = make_model(**shape)
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight.add_(0.01)
    return model
