"""How fast each way of decoding is: ``pytest bench --benchmark-only``.

Benchmarks run one after another, so a drift of the machine's speed shows in their ratios:
``layerskip compare`` interleaves. They are for following one figure over time, and for the grid.
"""

from collections.abc import Callable
from typing import Any

import pytest

Measure = Callable[..., None]


@pytest.mark.benchmark(group="batch 1")
def test_plain(lab: Any, measure: Measure) -> None:
    measure(lambda: lab.decode(lab.plain, 0, 1), lab.plain)


@pytest.mark.benchmark(group="batch 1")
@pytest.mark.parametrize("num_draft_tokens", [2, 4, 6])
@pytest.mark.parametrize("exit_layer", [1, 2, 3])
def test_self_speculative(
    lab: Any, measure: Measure, exit_layer: int, num_draft_tokens: int
) -> None:
    lm = lab.wrap(exit_layer)
    measure(lambda: lab.decode(lm, num_draft_tokens, 1), lm)


@pytest.mark.benchmark(group="batch 1")
@pytest.mark.parametrize("mode", ["hf", "hf-early-exit", "hf-prompt-lookup"])
def test_transformers(lab: Any, measure: Measure, mode: str) -> None:
    comparison = lab.comparison(lab.plain)
    if mode == "hf-early-exit" and lab.size.rounds > 1:
        comparison.tune_early_exit(lab.prompts[:1])
    measure(lambda: [comparison.run(mode, ids) for ids in lab.prompts])


@pytest.mark.benchmark(group="batches")
@pytest.mark.parametrize("batch_size", [1, 4, 8])
def test_plain_batch(lab: Any, measure: Measure, batch_size: int) -> None:
    measure(lambda: lab.decode(lab.plain, 0, batch_size))


@pytest.mark.benchmark(group="batches")
@pytest.mark.parametrize("batch_size", [1, 4, 8])
def test_self_speculative_batch(lab: Any, measure: Measure, batch_size: int) -> None:
    lm = lab.wrap()
    measure(lambda: lab.decode(lm, lab.num_draft_tokens, batch_size))
