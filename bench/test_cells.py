"""The benchmarks: ``pytest bench --benchmark-only``.

A cell's modes decode the same prompts in turn, in random order, when the first of them is asked
for (bench/measuring.py). Each mode then reports its own times to pytest-benchmark, as seconds per
token, a round for each prompt, so that its tables, ``--benchmark-save`` and
``--benchmark-compare`` work as usual, and everything else as ``extra_info``.
"""

from typing import Any

import pytest
from cells import Cell
from lab import Lab
from measuring import Results, why_empty


class Replay:
    """A clock that goes on by recorded times."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def __str__(self) -> str:
        return "recorded"


CLOCK = Replay()
# What torch and transformers warn of on a machine or in a version of a user's is no error there.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.benchmark(timer=CLOCK)
def test_decoding(
    lab: Lab, results: Results, name: str, cell: Cell, mode: str, benchmark: Any
) -> None:
    document = results.of(lab, cell)
    if mode in document["unsupported"]:
        pytest.skip(document["unsupported"][mode])
    if mode not in document["modes"]:
        pytest.skip(why_empty(document["cell"]))
    figures = dict(document["modes"][mode])
    times = iter(figures.pop("seconds_per_token"))

    def again() -> None:
        CLOCK.now += next(times)

    benchmark.group = name
    benchmark.extra_info |= {"mode": mode, "cell": name, **document["cell"], **figures}
    rounds = len(document["modes"][mode]["seconds_per_token"])
    benchmark.pedantic(again, rounds=rounds)
