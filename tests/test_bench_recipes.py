"""The benchmark of training steps, at a tiny size."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from recipe_modules import RECIPES, imported
from toys import make_model

SMALL = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(RECIPES.parent / "bench" / "recipes"))
    with imported(["training_steps"]) as modules:
        yield modules.training_steps


def test_every_way_takes_turns(steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    real = steps.steps_of

    def noting(*args: Any) -> Any:
        def note(name: str, step: Any) -> Any:
            def run() -> None:
                taken.append(name)
                step()

            return run

        return {name: note(name, step) for name, step in real(*args).items()}

    monkeypatch.setattr(steps, "steps_of", noting)
    work = steps.Work(rows=2, seq_len=16, exits=(1,), rank=4, mixed_precision="no")
    found = steps.measure(lambda: make_model(**SMALL), work, turns=2, warm_up=1)
    assert list(found) == ["lora_early_exit", "exit_adapter", steps.THEIRS]
    for turn in range(3):
        assert set(taken[3 * turn : 3 * turn + 3]) == set(found)
    assert len(taken) == 12  # one more each for the memory
    assert found[steps.THEIRS].over_theirs == 1.0
    assert all(cost.tokens_per_second > 0.0 and cost.peak_bytes >= 0 for cost in found.values())


def test_costs_are_medians_of_pairs(steps: Any) -> None:
    work = steps.Work(rows=4, seq_len=8)
    found = steps.cost(work, [1.0, 4.0, 3.0], [2.0, 2.0, 2.0], 7)
    assert found.tokens_per_second == pytest.approx(32 / 3.0)
    assert found.over_theirs == pytest.approx(1.5)
    assert found.interval[0] <= 1.5 <= found.interval[1]
    assert found.peak_bytes == 7
