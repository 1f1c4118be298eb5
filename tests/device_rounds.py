"""Rounds that the device runs by itself, as their tests have them: rows, decoders, controllers."""

import torch
from decoding import CountingDecoder
from toys import PLANS, VOCAB_SIZE, random_ids, without_times

from layerskip import SamplingParams
from layerskip.control.stopping import Choice
from layerskip.controller import Controller
from layerskip.cost import CostTable, Curve
from layerskip.drafting import EarlyExitDrafter
from layerskip.graphs import RecordingError
from layerskip.row import RowSpec
from layerskip.sampling import Sampler

GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8)
PROMPTS = [random_ids(n) for n in (9, 2, 17, 5)]
EXIT = PLANS["exit"]
FIRST_SLOTS = 64


def spec(prompt, params=GREEDY, *, seed=5, limit=16, k=3, **more):
    return RowSpec(tuple(prompt), Sampler(params, seed, VOCAB_SIZE), limit, k, **more)


def decoder_of(stack, bench=None, plan=EXIT, *, controller=None, **more):
    drafter = EarlyExitDrafter(stack, plan) if plan is not None else None
    given = {"num_rows": 4, "num_slots": 64} | more
    decoder = CountingDecoder(stack, drafter, plan, bench=bench, **given)
    decoder.speculator.controller = controller
    return decoder


def idle_of(bench):
    """The only rounds that are kept."""
    (rounds,) = bench._idle
    return rounds


def finish(decoder):
    while any(row.finish_reason is None for row in decoder.rows.values()):
        assert decoder.step()
    return decoder


def decode(decoder, *specs):
    """The decoder's rows after their last round."""
    rows = [decoder.join(one) for one in specs]
    finish(decoder)
    return rows


def assert_same(fast, slow, fast_rows, slow_rows):
    """Tokens, records, and what plain decoding would go on from."""
    for one, other in zip(fast_rows, slow_rows, strict=True):
        assert one.token_ids == other.token_ids
        assert without_times(one.rounds) == without_times(other.rounds)
        assert (one.length, one.finish_reason) == (other.length, other.finish_reason)
        if one.id not in fast.rows:
            continue
        at, held = one.slot_row, slice(0, one.length)
        assert fast.cache.lengths[at] == slow.cache.lengths[other.slot_row] == one.length
        for name in ("keys", "values"):
            mine, its = (getattr(d.cache, name)[:, at, held] for d in (fast, slow))
            torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-3)


def assert_device_ran(decoder):
    assert decoder.rounds.reason == ""
    assert len(decoder.rounds.recordings) > 0
    assert decoder.host_rounds == 0


class Scripted(Controller):
    """Chooses what a test says, round after round."""

    def __init__(self, *counts):
        passes = Curve((8, 64), (0,), ((1.0, 2.0),))
        free = Curve((1,), (0,), ((0.0,),))
        super().__init__(CostTable(passes, free, passes, 0.0, 8, {}), follows_clock=False)
        self.times.due = lambda **_: True  # how often is no matter of these tests, but for one
        self.counts, self.asked = counts, 0

    def choose(self, asks, *, drafts, fixed=()):
        self.asked += 1
        for ask in asks:
            ask.state.last = min(ask.room, self.counts[self.asked % len(self.counts)])
        return [Choice("early_exit" if a.state.last else "none", a.state.last) for a in asks]


class Unable:
    patience = 2

    def record(self, function):
        raise RecordingError("no graphs here")
