"""Texts on paper whose rounds are told other times than their passes take."""

import math
import statistics
from collections.abc import Callable
from random import Random

import pytest
from controlling import CONTEXT, Paper, Request, table

from layerskip.controller import Controller

COST = table(0.16, quantum=1, slope=0.06, start=0.034, head=0.04)
Noise = Callable[[Random], tuple[float, float]]


def apart(spread: float) -> Noise:
    """A round's drafts and its verify pass are off by themselves."""
    return lambda chance: (math.exp(chance.gauss(0, spread)), math.exp(chance.gauss(0, spread)))


class Rough:
    """Another program comes and goes: a round in three the machine is another, all of it."""

    pace = 1.0

    def __call__(self, chance: Random) -> tuple[float, float]:
        if chance.random() < 1 / 3:
            self.pace = chance.choice((1.0, 2.0, 3.0))
        return self.pace, self.pace


class Told(Paper):
    """Tells its controller's clocks what rounds took, times what ``noise`` draws."""

    noise: Noise = apart(0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._clock = Random(1000 + self.seed)

    def _judge(self, draft) -> None:
        times, drafted, tokens = self.controller.times, len(draft.right), draft.verified + 1
        if times.due(drafted=drafted > 0):
            drafts, verify = self.noise(self._clock)
            start = COST.draft_start if drafted else 0.0
            took = drafted * self._drafting(1) + start, self._verifying(tokens, 1)
            took = drafts * took[0], verify * took[1]
            start = times.draft_start() if drafted else 0.0
            expected = drafted * times.draft(1, CONTEXT) + start, times.verify(tokens, CONTEXT)
            times.observe_phases(*took, *expected, tokens, 1)
        super()._judge(draft)


def speed(noise: Noise, seeds: int) -> float:
    """Tokens a second of counted passes: 16 requests for each seed, easy ones and hard ones."""
    found = []
    for seed in range(seeds):
        chance = Random(seed)
        requests = []
        for _ in range(16):
            acceptance = min(0.97, max(0.05, chance.betavariate(4, 1.6)))
            telling = chance.random() < 0.6
            requests.append(Request(64, lambda _, a=acceptance: a, telling=telling))
        told = Told(Controller(COST), seed=seed, looks_back=True)
        told.noise = noise
        found.append(told.run(requests).rate)
    return statistics.fmean(found)


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "least"), [(Rough(), 0.99), (apart(0.4), 0.995)])
def test_noise_of_the_clock_costs_little(noise, least):
    """What others do on a core is no reason to decode plainly."""
    assert speed(noise, 24) > least * speed(apart(0.0), 24)
