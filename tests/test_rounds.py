"""Rounds that the device runs by itself, against rounds that the host drives.

The definitions run them, and a CPU's recorder proves of each that it does not ask the host.
"""

import contextlib
import threading
import weakref
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from decoding import CountingDecoder
from toys import PLANS, VOCAB_SIZE, make_model, make_tokenizer, random_ids, without_times

from layerskip import SamplingParams, SelfSpeculativeLM
from layerskip.batch import Batch
from layerskip.cache import KVCache
from layerskip.controller import Controller
from layerskip.cost import CostTable, Curve
from layerskip.device_round import DeviceRound
from layerskip.drafting import EarlyExitDrafter
from layerskip.graphs import (
    LIMIT_BYTES,
    Allowance,
    RecordingError,
    Recordings,
    RepeatingRecorder,
)
from layerskip.model import pack_model
from layerskip.packed import PackedStack
from layerskip.recorded_passes import RecordedPasses
from layerskip.row import RowSpec
from layerskip.sampling import Sampler
from layerskip.seats import MOST_DRAFTED, Ring, Seats, rounded_up, slot_sizes
from layerskip.speculation import Speculator
from layerskip.stopping import Choice
from layerskip.text import TextStream
from layerskip.workbench import Workbench, open_bench

GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8)
PROMPTS = [random_ids(n) for n in (9, 2, 17, 5)]
EXIT = PLANS["exit"]
FIRST_SLOTS = 64


@pytest.fixture(scope="module")
def stack():
    model = make_model()
    pack_model(model)
    return PackedStack(model)


@pytest.fixture
def short_recordings(monkeypatch):
    """Of few slots, which a toy's texts can outgrow."""
    monkeypatch.setattr("layerskip.seats.FIRST_SLOTS", FIRST_SLOTS)


def test_slots_that_recordings_are_made_for():
    assert slot_sizes(300) == [300]
    assert slot_sizes(1024) == [1024]
    assert slot_sizes(9000) == [1024, 4096, 9000]
    assert [rounded_up(n, 9000) for n in (1, 1024, 1025, 4096, 4097, 9000)] == [
        *(1024, 1024, 4096, 4096, 9000, 9000)
    ]


@pytest.fixture(scope="module")
def bench(stack):
    """Shared, so that few rounds are recorded, and each decoder finds what others left."""
    return Workbench(stack, EXIT, RepeatingRecorder)


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


def mixed_specs():
    """Rows of all kinds: they end in different rounds, and draft different numbers of tokens."""
    kinds = [(GREEDY, 14, 3), (SAMPLED, 9, 2), (GREEDY, 1, 4), (SAMPLED, 11, 0)]
    return [
        spec(prompt, params, seed=7 + i, limit=limit, k=k)
        for i, (prompt, (params, limit, k)) in enumerate(zip(PROMPTS, kinds, strict=True))
    ]


@pytest.mark.parametrize("num_rows", [1, 4])
def test_a_ragged_batch_is_decoded_as_by_the_host(stack, bench, num_rows):
    fast, slow = decoder_of(stack, bench), decoder_of(stack)
    rows = [decode(d, *mixed_specs()[-num_rows:]) for d in (fast, slow)]
    assert_same(fast, slow, *rows)
    assert_device_ran(fast)


@pytest.mark.parametrize("plan", ["without-layer-0", None])
def test_any_plan_and_none(stack, plan):
    plan = PLANS[plan] if plan else None
    fast = decoder_of(stack, Workbench(stack, plan, RepeatingRecorder), plan)
    slow = decoder_of(stack, None, plan)
    specs = [spec(PROMPTS[0], limit=8), spec(PROMPTS[1], SAMPLED, limit=6)]
    assert_same(fast, slow, decode(fast, *specs), decode(slow, *specs))
    assert_device_ran(fast)


@pytest.fixture(scope="module")
def text(stack):
    """Plain greedy tokens after the first prompt."""
    return decode(decoder_of(stack), spec(PROMPTS[0], k=0))[0].token_ids


@pytest.mark.parametrize("place", [1, 3, 6])
def test_an_end_of_sequence_inside_a_block(stack, bench, text, place):
    eos_ids = frozenset({text[place], VOCAB_SIZE - 1})
    specs = [spec(PROMPTS[0], eos_ids=eos_ids), spec(PROMPTS[1], eos_ids=eos_ids, limit=7)]
    fast, slow = decoder_of(stack, bench), decoder_of(stack)
    rows = decode(fast, *specs)
    assert_same(fast, slow, rows, decode(slow, *specs))
    assert rows[0].finish_reason == "stop"
    assert rows[0].token_ids == text[: text.index(text[place]) + 1]
    assert_device_ran(fast)


@pytest.mark.parametrize("limit", [2, 4, 7])
def test_a_limit_inside_a_block(stack, bench, text, limit):
    fast, slow = decoder_of(stack, bench), decoder_of(stack)
    (row,) = rows = decode(fast, spec(PROMPTS[0], limit=limit))
    assert_same(fast, slow, rows, decode(slow, spec(PROMPTS[0], limit=limit)))
    assert (row.token_ids, row.finish_reason) == (text[:limit], "length")


@pytest.mark.parametrize("place", [2, 4])
def test_a_stop_string_ends_a_row_that_the_device_goes_on_with(stack, bench, text, place):
    tokenizer = make_tokenizer()
    piece = tokenizer.decode(text[place : place + 1])
    specs = [
        spec(PROMPTS[0], stream=TextStream(tokenizer, [piece])),
        spec(PROMPTS[1], stream=TextStream(tokenizer, ["\0"]), limit=12),
    ]
    fast, slow = decoder_of(stack, bench), decoder_of(stack)
    rows = decode(fast, *specs)
    assert_same(fast, slow, rows, decode(slow, *specs))
    assert rows[0].finish_reason == "stop"
    # The row's slots serve the next one, which finds nothing of what was written too much.
    following = spec(PROMPTS[3], limit=6)
    for decoder in (fast, slow):
        decoder.leave(rows[0].id)
    assert_same(fast, slow, decode(fast, following), decode(slow, following))
    assert_device_ran(fast)


def joining_and_leaving(decoder):
    """Rows come in while others go on, one of them leaves unfinished; all rows that ever were."""
    rows = [decoder.join(spec(PROMPTS[0])), decoder.join(spec(PROMPTS[1], SAMPLED, limit=9))]
    for _ in range(3):
        decoder.step()
    rows.append(decoder.join(spec(PROMPTS[2], limit=8, k=2)))
    decoder.step()
    decoder.step()
    decoder.leave(rows[0].id)
    rows.append(decoder.join(spec(PROMPTS[3], SAMPLED, limit=10)))  # where the first one was
    assert rows[3].slot_row == rows[0].slot_row
    decoder.step()
    decoder.leave(decoder.join(spec(PROMPTS[0])).id)  # never began
    finish(decoder)
    return rows


def test_rows_join_and_leave(stack, bench):
    fast, slow = decoder_of(stack, bench), decoder_of(stack)
    assert_same(fast, slow, joining_and_leaving(fast), joining_and_leaving(slow))
    assert_device_ran(fast)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "0.8"])
def test_the_cache_grows_while_rounds_are_in_flight(stack, params):
    bench = Workbench(stack, EXIT, RepeatingRecorder)
    decoders = [decoder_of(stack, b, num_rows=1, num_slots=30) for b in (bench, None)]
    grown = []
    for decoder in decoders:
        rows = [decoder.join(spec(PROMPTS[0], params, limit=18))]
        for _ in range(3):
            decoder.step()
        before = decoder.cache
        rows.append(decoder.join(spec(random_ids(90), SAMPLED, limit=9)))
        assert decoder.cache is not before
        finish(decoder)
        grown.append(rows)
    assert_same(*decoders, *grown)
    assert_device_ran(decoders[0])


def test_a_context_that_outgrows_a_recording(stack, bench, short_recordings):
    prompt = random_ids(FIRST_SLOTS - 12)
    fast, slow = (decoder_of(stack, b, num_rows=1, num_slots=400) for b in (bench, None))
    one = spec(prompt, limit=18)
    assert_same(fast, slow, decode(fast, one), decode(slow, one))
    assert len({shape.num_slots for shape in fast.rounds.recordings._kept}) == 2


def test_a_recording_has_slots_for_what_rounds_in_flight_may_add(
    stack, bench, short_recordings, monkeypatch
):
    """They are ahead of the length that the host knows."""
    decoder = decoder_of(stack, bench, num_rows=1, num_slots=400)
    rounds, sizes = decoder.rounds, set()
    run = rounds.recordings.run

    def running(shape, function):
        if rounds.seats.num_left[0]:
            sizes.add(shape.num_slots)
            assert rounds.seats.lengths[0] + shape.num_draft_tokens + 1 <= shape.num_slots
        run(shape, function)

    monkeypatch.setattr(rounds.recordings, "run", running)
    decode(decoder, spec(random_ids(FIRST_SLOTS - 12), limit=18))
    assert len(sizes) == 2


def test_no_round_is_launched_for_a_text_that_ends_in_flight(stack, bench, monkeypatch):
    sent, send = [], Ring.send
    monkeypatch.setattr(Ring, "send", lambda *given: sent.append(1) or send(*given))
    (row,) = decode(decoder_of(stack, bench), spec(PROMPTS[0], limit=6, k=0))
    assert len(sent) == len(row.rounds) - 1 == 5  # the first token is the prefill's


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


def test_another_number_of_draft_tokens_in_every_round(stack, bench, text):
    decoder = decoder_of(stack, bench, controller=Scripted(4, 0, 2, 1))
    rows = decode(decoder, spec(PROMPTS[0], k="auto"), spec(PROMPTS[1], k=2, limit=7))
    plain = decode(decoder_of(stack), spec(PROMPTS[1], k=0, limit=7))
    assert [row.token_ids for row in rows] == [text, plain[0].token_ids]
    assert [r.num_draft_tokens for r in rows[0].rounds[1:6]] == [0, 2, 1, 4, 0]
    assert_device_ran(decoder)


class Probing(Scripted):
    """Every other round is a probe."""

    def choose(self, asks, **more):
        choices = super().choose(asks, **more)
        for ask in asks:
            ask.state.probing = self.asked % 2 == 1
        return choices


def test_a_round_is_judged_as_the_probe_that_it_was_when_it_was_launched(stack, bench):
    """The next one, which is on its way by then, is of the other kind."""
    controller, judged = Probing(2), []
    controller.observe_draft = lambda state, *_, **__: judged.append(state.probing)
    decoder = decoder_of(stack, bench, controller=controller)
    row = decoder.join(spec(PROMPTS[0], k="auto", limit=14))
    decoder.step()
    for _ in range(5):
        decoder.step()
        assert row.state.probing == (controller.asked % 2 == 1)
    assert judged[:4] == [True, False, True, False]


class Hopeful(Scripted):
    """Lets drafts go on while they are sure, beyond what pays on the whole."""

    def choose(self, asks, **more):
        choices = super().choose(asks, **more)
        return [replace(c, num_draft_tokens=7) if c.num_draft_tokens else c for c in choices]


def test_the_device_drafts_what_pays_on_the_whole(stack, bench):
    """No confidence ends its drafts."""
    (row,) = decode(decoder_of(stack, bench, controller=Hopeful(2)), spec(PROMPTS[0], k="auto"))
    assert [r.num_draft_tokens for r in row.rounds[1:4]] == [2, 2, 2]


def test_the_controller_learns_a_round_behind(stack, bench):
    controller = Scripted(3)
    decoder = decoder_of(stack, bench, controller=controller)
    (row,) = decode(decoder, spec(PROMPTS[0], k="auto"))
    judged = sum(
        r.num_accepted_tokens + (r.num_accepted_tokens < r.num_draft_tokens) for r in row.rounds
    )
    (kind,) = controller._experiences.values()
    trials = sum(share.trials for share in kind.positions)
    assert judged * 0.8 < trials <= judged  # discounted
    assert row.rounds[1].draft_seconds > 0


@pytest.mark.parametrize("passes", ["recorded", "started by the host"])
def test_rounds_that_the_host_drives_teach_no_prices_of_recorded_passes(stack, bench, passes):
    """Beside those they look slow, and the device's rounds after them as if drafts were cheap."""
    controller, seen = Scripted(3), []
    controller.cost = replace(controller.cost, key={"passes": passes})
    for name in ("observe_phases", "observe_round"):
        setattr(controller.times, name, lambda *_, name=name: seen.append(name))
    for settings, driver in (({}, "observe_round"), ({"logprobs": 2}, "observe_phases")):
        seen.clear()
        decode(
            decoder_of(stack, bench, controller=controller), spec(PROMPTS[0], k="auto", **settings)
        )
        teaches = driver == "observe_round" or passes == "started by the host"
        assert set(seen) == ({driver} if teaches else set())


@pytest.mark.parametrize(
    ("settings", "driver"),
    [
        ({}, "device"),
        ({"logprobs": 2}, "host"),
        ({"params": SamplingParams(temperature=0.8, top_p=0.9)}, "host"),
    ],
)
def test_rounds_that_the_host_drives_are_decided_and_learnt_from_at_its_own_prices(
    stack, bench, settings, driver
):
    device, host = Scripted(3), Scripted(2)
    device.by_host, seen = host, []
    device.cost = replace(device.cost, key={"passes": "recorded"})
    for name, one in (("device", device), ("host", host)):
        for clock in ("observe_phases", "observe_round"):
            told = lambda *_, name=name, clock=clock: seen.append((name, clock))  # noqa: E731
            setattr(one.times, clock, told)
        one.observe_draft = lambda *_, name=name, **__: seen.append((name, "draft"))
    (row,) = decode(
        decoder_of(stack, bench, controller=device), spec(PROMPTS[0], k="auto", **settings)
    )
    clock = {"device": "observe_round", "host": "observe_phases"}[driver]
    assert set(seen) == {(driver, clock), (driver, "draft")}
    assert max(r.num_draft_tokens for r in row.rounds) == {"device": 3, "host": 2}[driver]
    assert {"device": host, "host": device}[driver].asked == 0


def test_the_hosts_work_is_no_price_of_a_round(stack, bench, monkeypatch):
    """Or a batch that chooses for longer than a plain round takes would never find that to rest
    pays, and each text would find drafts dear, whose first round has another launched behind it.
    Its records have all that went by."""
    now, learnt = [0.0], []
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("layerskip.rounds.time", clock)
    monkeypatch.setattr("layerskip.decode.time", clock)
    receive = Ring.receive
    monkeypatch.setattr(Ring, "receive", lambda *given: (receive(*given)[0], 1.0))

    class Slow(Scripted):
        def choose(self, asks, **more):
            now[0] += 5.0
            return super().choose(asks, **more)

    controller = Slow(2)
    controller.times.observe_round = lambda seconds, *_: learnt.append(seconds)
    decoder = decoder_of(stack, bench, controller=controller)
    run = decoder.rounds.recordings.run

    def running(shape, function):
        now[0] += 1.0
        run(shape, function)

    monkeypatch.setattr(decoder.rounds.recordings, "run", running)
    (row,) = decode(decoder, spec(PROMPTS[0], k="auto", limit=30))
    assert len(learnt) > 5
    assert set(learnt) == {1.0}
    assert all(r.draft_seconds + r.verify_seconds == pytest.approx(6.0) for r in row.rounds[3:6])


def test_what_is_learnt_from_a_round_is_of_the_passes_that_the_device_ran(
    stack, bench, monkeypatch
):
    """Of all rows of its shape and all its drafted tokens, though rows have ended, and drafts near
    a row's end are short: or it would look as if the machine were slow at each text's end."""
    receive, shapes, learnt = Ring.receive, [], []

    def received(ring, turn, shape):
        shapes.append(shape)
        return receive(ring, turn, shape)

    monkeypatch.setattr(Ring, "receive", received)
    controller = Scripted(3)
    controller.times.observe_round = lambda *told: learnt.append((shapes[-1], told[-2:]))
    limits = zip(PROMPTS, (30, 9, 14), strict=False)
    decode(
        decoder_of(stack, bench, controller=controller),
        *(spec(prompt, k="auto", limit=limit) for prompt, limit in limits),
    )
    assert len(learnt) > 5
    for shape, told in learnt:
        rows = shape.num_rows
        assert told == (rows * (shape.num_draft_tokens + 1), rows)


def test_few_of_many_rounds_are_learnt_from(stack, bench):
    """Learning takes the host some 40 us, and a clock soon knows enough."""
    controller, asked, learnt = Scripted(3, 0), [], []
    controller.times.observe_round = lambda *told: learnt.append(told)

    def due(*, drafted):
        asked.append(drafted)
        return len(asked) == 5

    controller.times.due = due
    asks = spec(PROMPTS[0], k="auto", limit=40)
    decode(decoder_of(stack, bench, controller=controller), asks)
    assert len(learnt) == 1
    assert set(asked) == {False, True}


@pytest.mark.parametrize("patience", [0, 2])
def test_no_round_that_was_recorded_meanwhile_is_learnt_from(stack, patience, monkeypatch):
    """Nor one that the host started in the place of a recording, nor one of more passes than the
    tokens that were wanted, which ran in another's place or near the text's end."""
    monkeypatch.setattr("layerskip.stand_ins.WAITS", 1)
    bench = Workbench(stack, EXIT, lambda: RepeatingRecorder(patience))
    learnt, texts = [], []
    for _ in range(2):  # the second time all is recorded
        controller, seen = Scripted(3, 0), []
        controller.times.observe_round = lambda *_, seen=seen: seen.append(1)
        decoder = decoder_of(stack, bench, controller=controller)
        row = decoder.join(spec(PROMPTS[0], k="auto", limit=80))
        for _ in range(12):
            decoder.step()
        assert row.finish_reason is None  # near its end drafts get shorter
        decoder.leave(row.id)
        bench.give_back(decoder.rounds)
        learnt.append(len(seen))
        texts.append(row.token_ids)
    assert 0 < learnt[0] < learnt[1] == len(row.rounds) - 1
    # The first rounds drafted nothing while nothing was recorded: they emitted less.
    assert texts[0] == texts[1][: len(texts[0])]


def runs_of(decoder, monkeypatch):
    """Drafted tokens of each round that the decoder launches, and whether it is recorded."""
    ran, recordings = [], decoder.rounds.recordings
    run = recordings.run

    def running(shape, function):
        ran.append((shape.num_draft_tokens, recordings.has(shape)))
        run(shape, function)

    monkeypatch.setattr(recordings, "run", running)
    return ran


def told_of(row):
    return [(r.num_draft_tokens, r.num_accepted_tokens) for r in row.rounds]


@pytest.mark.parametrize(
    ("kept", "wanted", "runs_as", "times"),
    [
        ((4, 0), 1, 4, 16),
        ((5, 0), 1, 0, 16),
        ((2, 5), 4, 2, 20),
        ((1, 5), 4, 5, 16),
        ((1,), 4, 1, 16),
    ],
)
@pytest.mark.one_in(2)
def test_a_recorded_round_runs_until_a_number_has_come_up_often(
    stack, kept, wanted, runs_as, times, monkeypatch
):
    """One of half as many tokens or more, else one of a few more, else what there is; the first
    longer than the others, as there is less to gain.
    Tokens are as if the host had done it, and what is told is what was done.
    What is recorded has run before, elsewhere or for this: kernels are loaded where they run."""
    done, call = [], DeviceRound.__call__

    def calling(function, shape, *others):
        done.append(shape)
        call(function, shape, *others)

    class Recorder(RepeatingRecorder):
        def record(self, function):
            before = Counter(done)
            recording = super().record(function)
            (shape,) = (Counter(done) - before).keys()
            assert before[shape] > 0
            return recording

    monkeypatch.setattr(DeviceRound, "__call__", calling)
    monkeypatch.setattr("layerskip.stand_ins.WAITS_BY_HALF", 10)  # texts here are short
    bench = Workbench(stack, EXIT, lambda: Recorder(2))
    decoder = decoder_of(stack, bench, controller=Scripted(wanted), num_slots=128)
    for k in kept:
        (before,) = decode(decoder, spec(PROMPTS[0], k=k, limit=30))
        decoder.leave(before.id)
    assert [s.num_draft_tokens for s in decoder.rounds.recordings._kept] == [*kept]
    ran, learnt = runs_of(decoder, monkeypatch), []
    decoder.speculator.controller.times.observe_round = lambda *_: learnt.append(len(ran))
    (row,) = decode(decoder, spec(PROMPTS[1], k="auto", limit=110))
    slow = decoder_of(stack, controller=Scripted(wanted), num_slots=128)
    (other,) = decode(slow, spec(PROMPTS[1], k="auto", limit=110))
    assert row.token_ids == other.token_ids
    assert ran[:times] == [(runs_as, True)] * times
    assert ran[times] == (wanted, True)
    drafted = [count for count, _ in told_of(row)]
    assert drafted[: times + 2] == [0, *[min(runs_as, wanted)] * times, wanted]
    if runs_as > wanted:  # of passes that nobody wanted nothing is learnt
        assert told_of(row) == told_of(other)
    assert (len([n for n in learnt if n < times]) > 5) == (runs_as <= wanted)


@pytest.mark.parametrize("rows", [1, 3])
def test_where_nothing_is_recorded_texts_decode_plainly_until_that_is(stack, rows, monkeypatch):
    """One that asks for a number has it at once, from the host."""
    bench = Workbench(stack, EXIT, lambda: RepeatingRecorder(2))
    decoder = decoder_of(stack, bench, controller=Scripted(3), num_slots=128)
    ran = runs_of(decoder, monkeypatch)
    decode(decoder, *(spec(p, k="auto", limit=60) for p in PROMPTS[:rows]))
    assert ran[:16] == [(0, False)] * 2 + [(0, True)] * 14
    assert ran[16] == (3, True)
    ran.clear()
    row = decoder.join(spec(PROMPTS[3], k=5, limit=30))
    finish(decoder)
    assert ran[:3] == [(5, False)] * 2 + [(5, True)]
    assert max(count for count, _ in told_of(row)) == 5


def test_drafts_are_the_host_s_where_nothing_can_be_recorded(stack, monkeypatch):
    class Refusing(RepeatingRecorder):
        def record(self, function):
            raise RecordingError("not here")

    bench = Workbench(stack, EXIT, lambda: Refusing(2))
    decoder = decoder_of(stack, bench, controller=Scripted(3), num_slots=128)
    ran = runs_of(decoder, monkeypatch)
    decode(decoder, spec(PROMPTS[0], k="auto", limit=60))
    counts = [count for count, _ in ran]
    assert counts[:2] == [0, 0]  # and the third is tried, in vain
    assert set(counts[3:-4]) == {3}


def test_a_row_that_asks_for_a_number_has_it_beside_one_that_does_not(stack, monkeypatch):
    bench = Workbench(stack, EXIT, lambda: RepeatingRecorder(2))
    decoder = decoder_of(stack, bench, controller=Scripted(1), num_slots=128)
    rows = decode(decoder, spec(PROMPTS[0], k="auto", limit=20), spec(PROMPTS[1], k=4, limit=20))
    assert [told_of(row)[1][0] for row in rows] == [1, 4]


def test_a_probe_that_ran_as_a_plain_round_is_no_probe(stack, monkeypatch):
    bench = Workbench(stack, EXIT, lambda: RepeatingRecorder(2))
    controller = Scripted(1)
    decoder = decoder_of(stack, bench, controller=controller, num_slots=128)
    row = decoder.join(spec(PROMPTS[0], k="auto", limit=20))
    decoder.step()
    row.state.probing = True
    seen = []
    observe = decoder.speculator.observe

    def observing(row, attempt, *others, **more):
        seen.append((attempt.probing, attempt.draft.tokens))
        observe(row, attempt, *others, **more)

    monkeypatch.setattr(decoder.speculator, "observe", observing)
    decoder.step()
    assert seen == [(False, ())]


def test_recordings_of_drafts_take_a_small_share_of_the_time_of_rounds(stack, monkeypatch):
    """One may be made as soon as it is due, the next when rounds have taken so long that the first
    was a small share of it. By a clock that goes on by a second a round and by ten a recording."""
    now = [0.0]
    monkeypatch.setattr("layerskip.rounds.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr("layerskip.graphs.RECORDING_SHARE", 0.5)
    monkeypatch.setattr("layerskip.graphs.MOST_SAVED", 100.0)
    monkeypatch.setattr("layerskip.stand_ins.WAITS", 1)

    class Recorder(RepeatingRecorder):
        def record(self, function):
            now[0] += 10.0
            return super().record(function)

    bench = Workbench(stack, EXIT, lambda: Recorder(2))
    decoder = decoder_of(stack, bench, controller=Scripted(3), num_slots=256, num_rows=1)
    run = decoder.rounds.recordings.run

    def running(shape, function):
        now[0] += 1.0
        run(shape, function)

    monkeypatch.setattr(decoder.rounds.recordings, "run", running)
    made = []
    for number in (3, 2, 1):
        decoder.speculator.controller = Scripted(number)
        row = decoder.join(spec(PROMPTS[0], k="auto", limit=200))
        for _ in range(45):
            before = len(decoder.rounds.recordings), now[0]
            decoder.step()
            if len(decoder.rounds.recordings) > before[0]:
                made.append((number, before[1]))
            if row.finish_reason is not None or (made and made[-1][0] == number):
                break
        decoder.leave(row.id)
    numbers, times = zip(*made, strict=True)
    assert numbers == (3, 2, 1)
    # Two rounds had earned a second: the first is owed for, and the next must be there before it
    # is made.
    assert [later - earlier for earlier, later in pairwise(times)] == [38.0, 20.0]


def test_a_recording_that_had_to_wait_is_not_owed_for_long():
    allowance = Allowance()
    assert allowance.affords
    allowance.spend(5.0)
    rounds = 0
    while not allowance.affords:
        allowance.earn(0.01)
        rounds += 1
    assert 0.01 * rounds == pytest.approx(2 * 0.2 / 0.05, rel=0.01)


def test_rows_rest_while_no_round_that_drafts_can_run(stack, monkeypatch):
    """Else they would try one again and again, and choose anew in each round."""
    monkeypatch.setattr("layerskip.graphs.RECORDING_SHARE", 0.0)
    passes, draft = (Curve((8, 64), (0,), ((each, 2 * each),)) for each in (1.0, 0.6))
    known = Controller(CostTable(draft, draft, passes, 0.0, 1, {}), [0.3], follows_clock=False)
    full, at_rest = [], known.at_rest

    def resting(*given, **more):
        rest = at_rest(*given, **more)
        full.append(rest is None)
        return rest

    monkeypatch.setattr(known, "at_rest", resting)
    bench = Workbench(stack, EXIT, lambda: RepeatingRecorder(2))
    decoder = decoder_of(stack, bench, controller=known, num_slots=256)
    decoder.rounds._allowance.spend(1.0)
    rows = decode(decoder, *(spec(p, k="auto", limit=150) for p in PROMPTS[:2]))
    assert {r.num_draft_tokens for row in rows for r in row.rounds} == {0}
    assert len(full) > 100
    assert sum(full) < 20


def test_a_plain_round_is_recorded_as_soon_as_one_of_drafts_would_be(stack):
    decoder = decoder_of(stack, Workbench(stack, EXIT, lambda: RepeatingRecorder(2)))
    for k in (1, 0):
        (row,) = decode(decoder, spec(PROMPTS[0], k=k, limit=12))
        decoder.leave(row.id)
    kept = [shape.num_draft_tokens for shape in decoder.rounds.recordings._kept]
    assert kept == [1, 0]


def test_a_round_is_recorded_once_it_has_come_up_twice(stack, text):
    decoder = decoder_of(stack, Workbench(stack, EXIT, lambda: RepeatingRecorder(2)))
    row = decoder.join(spec(PROMPTS[0], k=0))
    recorded, usual = [], []
    while row.finish_reason is None:
        decoder.step()
        recorded.append(len(decoder.rounds.recordings))
        usual.append(decoder.rounds.usual)
    assert row.token_ids == text
    # A prefill; an unrecorded round; another, and behind it the recorded one, whose first replay
    # is read next, and says as little of the others.
    assert recorded[:4] == [0, 0, 1, 1]
    assert usual[1:5] == [False, False, False, True]
    decoder = decoder_of(stack, Workbench(stack, EXIT, lambda: RepeatingRecorder(99)))
    assert decode(decoder, spec(PROMPTS[0]))[0].token_ids == text
    assert decoder.rounds.reason == ""
    assert len(decoder.rounds.recordings) == 0


def test_a_row_that_finds_no_room_leaves_the_others_theirs(stack, monkeypatch):
    bench = Workbench(stack, EXIT, RepeatingRecorder)
    decoder = decoder_of(stack, bench, num_rows=1, num_slots=30)
    row = decoder.join(spec(PROMPTS[0], limit=18))
    decoder.step()
    before, move = decoder.cache, decoder.rounds.move

    def no_room(cache, recordings):
        raise MemoryError("none is left")

    monkeypatch.setattr(decoder.rounds, "move", no_room)
    with pytest.raises(MemoryError):
        decoder.join(spec(random_ids(90)))
    assert decoder.cache is before is decoder.rounds.cache
    monkeypatch.setattr(decoder.rounds, "move", move)
    finish(decoder)
    assert row.token_ids == decode(decoder_of(stack), spec(PROMPTS[0], limit=18))[0].token_ids


def test_the_host_reads_a_round_behind(stack, bench):
    decoder = decoder_of(stack, bench)
    row = decoder.join(spec(PROMPTS[0], limit=12))
    decoder.step()
    assert not decoder.rounds.flies(row)
    decoder.step()
    assert decoder.rounds.flies(row)  # the next one is on its way
    assert decoder.cache.lengths[row.slot_row] > row.length
    finish(decoder)
    assert not decoder.rounds.flies(row)


REASONS = {
    "processor": (spec(PROMPTS[1]), "read the text on the host"),
    "top-k": (spec(PROMPTS[1], replace(SAMPLED, top_k=5)), "top_k, top_p and min_p"),
    "top-p": (spec(PROMPTS[1], replace(SAMPLED, top_p=0.9)), "top_k, top_p and min_p"),
    "min-p": (spec(PROMPTS[1], replace(SAMPLED, min_p=0.2)), "top_k, top_p and min_p"),
    "block": (spec(PROMPTS[1]), "verification='block' needs whole distributions"),
    "logprobs": (spec(PROMPTS[1], logprobs=1), "log-probabilities"),
    "scores": (spec(PROMPTS[1], sink=lambda logits, scores: None), "scores were asked for"),
    "ends": (spec(PROMPTS[1], eos_ids=frozenset({3})), "rows end with different tokens"),
    "many-drafts": (spec(PROMPTS[1], k=32), "more than 31 tokens"),
}


def host_spec(name):
    one, _ = REASONS[name]
    if name == "processor":
        sampler = Sampler(GREEDY, 0, VOCAB_SIZE, processors=[lambda ids, scores: scores])
        return replace(one, sampler=sampler)
    if name == "block":
        return replace(one, sampler=Sampler(SAMPLED, 0, VOCAB_SIZE, verification="block"))
    return one


@pytest.mark.parametrize("name", REASONS)
def test_what_needs_the_host_has_it_and_says_why(stack, bench, name):
    """A row joins that the device can't decode, while a round of another one is in flight."""
    reasons, decoders, rows = set(), [], []
    for decoder in (decoder_of(stack, bench), decoder_of(stack)):
        first = decoder.join(spec(PROMPTS[0], limit=26))
        for _ in range(3):
            decoder.step()
        second = decoder.join(replace(host_spec(name), limit=3))
        while second.finish_reason is None:
            decoder.step()
            reasons.add(decoder.rounds.reason if decoder.rounds else "")
        decoder.leave(second.id)
        decoder.host_rounds = 0
        finish(decoder)
        decoders.append(decoder)
        rows.append([first, second])
    assert any(REASONS[name][1] in reason for reason in reasons)
    assert_same(*decoders, *rows)
    assert_device_ran(decoders[0])  # again, once the other row has left


def test_a_row_that_comes_to_draft_what_is_looked_up_is_the_hosts(stack, bench, text):
    """Whether rounds need the host is asked again once a row asks for something else."""
    decoder = decoder_of(stack, bench, looks_up=True)
    row = decoder.join(spec(PROMPTS[0], k=0))
    for wanted, reason in ((0, ""), (2, "tokens are looked up in the text"), (0, "")):
        row.spec = replace(row.spec, num_draft_tokens=wanted)
        for _ in range(3):
            decoder.step()
        assert decoder.rounds.reason == reason
    finish(decoder)
    assert row.token_ids == text


def test_looked_up_tokens_are_the_hosts(stack, bench):
    decoder = decoder_of(stack, bench, looks_up=True)
    decode(decoder, spec(PROMPTS[0], limit=4))
    assert decoder.rounds.reason == "tokens are looked up in the text"
    decode(decoder, spec(PROMPTS[0], limit=4, k=0))  # here none are
    assert decoder.rounds.reason == ""


def test_too_many_ends_are_the_hosts(stack, bench):
    decoder = decoder_of(stack, bench)
    decode(decoder, spec(PROMPTS[0], limit=3, eos_ids=frozenset(range(300, 333))))
    assert decoder.rounds.reason == "33 token ids end a sequence, at most 32 can on the device"
    decode(decoder, spec(PROMPTS[0], limit=3, eos_ids=frozenset(range(300, 332))))
    assert decoder.rounds.reason == ""


def test_a_cap_on_drafts_lets_the_device_run_what_asks_for_too_many(stack, bench):
    decoder = decoder_of(stack, bench)
    (row,) = decode(decoder, spec(PROMPTS[0], limit=6, k=32, max_draft_tokens=3))
    assert row.rounds[1].num_draft_tokens == 3
    assert decoder.rounds.reason == ""


@pytest.fixture
def spoiled():
    """A stack of its own, whose embeddings a test may spoil after the wrapping."""
    model = make_model()
    pack_model(model)
    return PackedStack(model)


def spoil(stack, token):
    stack.twin.get_input_embeddings().weight.data[token] = float("nan")


def test_a_drafted_token_that_the_model_cannot_take(spoiled):
    """It is rejected, and what stands before it is judged as if it were not there."""
    plain = decode(decoder_of(spoiled), spec(PROMPTS[0], limit=12, k=0))[0].token_ids
    drafted, drafter = [], EarlyExitDrafter.draft
    decoder = decoder_of(spoiled)
    decoder.speculator.drafter.draft = lambda *args: (
        drafted.extend(made := drafter(decoder.speculator.drafter, *args)) or made
    )
    decode(decoder, spec(PROMPTS[0], limit=12))
    spoil(spoiled, next(t for d in drafted for t in d.tokens[:-1] if t not in plain))
    fast = decoder_of(spoiled, Workbench(spoiled, EXIT, RepeatingRecorder))
    slow = decoder_of(spoiled)
    rows = decode(fast, spec(PROMPTS[0], limit=12))
    assert rows[0].token_ids == plain
    assert_same(fast, slow, rows, decode(slow, spec(PROMPTS[0], limit=12)))


def test_a_model_that_breaks_is_an_error_that_loses_nothing(spoiled, text):
    spoil(spoiled, text[5])
    texts = []
    for bench in (Workbench(spoiled, EXIT, RepeatingRecorder), None):
        decoder = decoder_of(spoiled, bench)
        row = decoder.join(spec(PROMPTS[0]))
        for _ in range(2):
            with pytest.raises(ValueError, match="are NaN, infinite"):
                finish(decoder)
        texts.append(row.token_ids)
    assert texts == [text[:6], text[:6]]


class Stumbling:
    """A tokenizer that fails once."""

    def __init__(self, calls):
        self.tokenizer, self.calls = make_tokenizer(), calls

    def decode(self, *args, **kwargs):
        self.calls -= 1
        if self.calls == 0:
            raise KeyboardInterrupt
        return self.tokenizer.decode(*args, **kwargs)


@pytest.mark.parametrize("calls", [5, 11])
def test_an_interruption_loses_nothing(stack, bench, text, calls):
    decoder = decoder_of(stack, bench)
    row = decoder.join(spec(PROMPTS[0], stream=TextStream(Stumbling(calls), [])))
    with pytest.raises(KeyboardInterrupt):
        finish(decoder)
    finish(decoder)
    assert row.token_ids == text
    assert tuple(t for r in row.rounds for t in r.token_ids) == tuple(text)


def once(real, *, after=False, when=lambda kwargs: True):
    """``real``, which is interrupted the first time: before its work or behind it."""
    failed = []

    def call(*args, **kwargs):
        if failed or not when(kwargs):
            return real(*args, **kwargs)
        failed.append(True)
        if after:
            real(*args, **kwargs)
        raise KeyboardInterrupt

    return call


PLACES = {
    "accepted": (torch, "cat", {"when": lambda kwargs: "out" in kwargs}),
    "ran": (Ring, "send", {}),
    "sent": (Ring, "send", {"after": True}),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_round_that_was_launched_and_not_noted_loses_nothing(
    stack, bench, text, monkeypatch, place
):
    """One row goes on; the other ends in the round before, which is read afterwards."""
    decoder, short = decoder_of(stack, bench), spec(PROMPTS[1], limit=3)
    rows = [decoder.join(one) for one in (spec(PROMPTS[0]), short)]
    for _ in range(2):
        decoder.step()
    assert rows[1].finish_reason is None
    owner, name, how = PLACES[place]
    monkeypatch.setattr(owner, name, once(getattr(owner, name), **how))
    with pytest.raises(KeyboardInterrupt):
        decoder.step()
    finish(decoder)
    slow = decoder_of(stack)
    assert [row.token_ids for row in rows] == [text, decode(slow, short)[0].token_ids]
    assert decoder.cache.lengths[:2].tolist() == [row.length for row in rows]


LEAVING = {
    "rested": (Seats, "rest"),
    "empty": (KVCache, "release"),
    "learnt": (Speculator, "left"),
}


@pytest.mark.parametrize("place", LEAVING)
@pytest.mark.parametrize("driver", ["device", "host"])
@pytest.mark.one_in(2)
def test_a_row_whose_leaving_is_interrupted_leaves(stack, bench, text, monkeypatch, place, driver):
    """It does not go on over slots that were emptied, nor does the next row that has them find
    anything of it."""
    decoder = decoder_of(stack, bench if driver == "device" else None)
    rows = [decoder.join(spec(PROMPTS[0])), decoder.join(spec(PROMPTS[1]))]
    for _ in range(3):
        decoder.step()
    owner, name = LEAVING[place]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, once(getattr(owner, name), after=True))
        with contextlib.suppress(KeyboardInterrupt):  # the host rests nobody
            decoder.leave(rows[1].id)
    for _ in range(2):
        decoder.step()
    slow = decoder_of(stack)
    plain = [decode(slow, spec(prompt))[0].token_ids for prompt in PROMPTS]
    assert rows[1].token_ids == plain[1][: len(rows[1].token_ids)]
    rows.append(decoder.join(spec(PROMPTS[3])))
    assert rows[2].slot_row == rows[1].slot_row
    finish(decoder)
    assert [rows[0].token_ids, rows[2].token_ids] == [text, plain[3]]


def test_a_round_that_was_forgotten_and_not_applied_ends_its_rows(stack, bench, text, monkeypatch):
    """Its tokens are gone, and those of the round in flight behind it are not the next ones."""
    decoder = decoder_of(stack, bench)
    row = decoder.join(spec(PROMPTS[0]))
    for _ in range(3):
        decoder.step()
    landed = decoder.rounds.landed
    monkeypatch.setattr(decoder.rounds, "landed", once(landed, after=True))
    with pytest.raises(KeyboardInterrupt):
        decoder.step()
    with pytest.raises(RuntimeError, match="a round was interrupted"):
        decoder.step()
    assert row.token_ids == text[: len(row.token_ids)]


def test_a_row_that_was_seated_and_not_noted_leaves_the_device_too(stack, bench, monkeypatch):
    """Or rounds of the others would go on with it, over the slots of the next one that has them."""
    decoder = decoder_of(stack, bench)
    specs = [spec(PROMPTS[0], limit=14), spec(PROMPTS[1], limit=12), spec(PROMPTS[2], limit=8)]
    rows = [decoder.join(one) for one in specs[:2]]
    decoder.step()
    monkeypatch.setattr(Seats, "put", once(Seats.put, after=True))
    with pytest.raises(KeyboardInterrupt):
        decoder.step()
    decoder.leave(rows[0].id)
    rows.append(decoder.join(specs[2]))
    assert rows[2].slot_row == rows[0].slot_row
    finish(decoder)
    slow = decoder_of(stack)
    plain = [decode(slow, one)[0].token_ids for one in specs]
    assert [row.token_ids for row in rows] == [plain[0][:1], *plain[1:]]


def test_a_cache_that_grew_while_interrupted_is_the_rounds_own(stack, text, monkeypatch):
    bench = Workbench(stack, EXIT, RepeatingRecorder)
    decoder = decoder_of(stack, bench, num_rows=1, num_slots=30)
    row = decoder.join(spec(PROMPTS[0]))
    for _ in range(3):
        decoder.step()
    monkeypatch.setattr(bench, "grow", once(bench.grow, after=True))
    with pytest.raises(KeyboardInterrupt):
        decoder.join(spec(PROMPTS[1]))
    assert decoder.cache is decoder.rounds.cache
    other = decoder.join(spec(PROMPTS[1], limit=6))
    finish(decoder)
    assert row.token_ids == text
    plain = decode(decoder_of(stack), spec(PROMPTS[1], limit=6))[0].token_ids
    assert other.token_ids == plain


class Unable:
    patience = 2

    def record(self, function):
        raise RecordingError("no graphs here")


class Counting(RepeatingRecorder):
    made = 0

    def record(self, function):
        type(self).made += 1
        return super().record(function)


def test_recordings_outlive_a_decoder(stack, text):
    class Recorder(Counting):
        made = 0

    bench = Workbench(stack, EXIT, Recorder)
    decoder = decoder_of(stack, bench, num_rows=1)
    cache = decoder.cache
    (row,) = decode(decoder, spec(PROMPTS[0]))
    decoder.leave(row.id)
    made = Recorder.made
    decoder.join(spec(PROMPTS[1]))
    for _ in range(3):
        decoder.step()  # it is left while a round is in flight
    del decoder
    decoder = decoder_of(stack, bench, num_rows=1)
    assert decoder.cache is cache
    assert not cache.keys.any()
    assert decode(decoder, spec(PROMPTS[0]))[0].token_ids == text
    assert Recorder.made == made
    other = decoder_of(stack, bench, num_rows=1)  # at the same time
    assert other.cache is not cache
    assert decode(other, spec(PROMPTS[0]))[0].token_ids == text


def test_rows_that_were_left_unfinished_do_not_go_on_beside_the_next_decoder_s(stack):
    """Or they would write where one of those has its prompt, and waits for its first round."""
    bench = Workbench(stack, EXIT, RepeatingRecorder)
    decoder = decoder_of(stack, bench, num_rows=3)
    for prompt in PROMPTS[:3]:
        decoder.join(spec(prompt, limit=40))
    for _ in range(3):
        decoder.step()
    cache = decoder.cache
    del decoder
    fast, slow = decoder_of(stack, bench, num_rows=3), decoder_of(stack, num_rows=3)
    assert fast.cache is cache
    rows = []
    for decoder in (fast, slow):
        mine = [decoder.join(spec(prompt)) for prompt in PROMPTS[:3]]
        decoder.leave(mine[1].id)  # never began
        decoder.step()
        decoder.step()
        mine[1] = decoder.join(spec(PROMPTS[3]))
        finish(decoder)
        rows.append(mine)
    assert_same(fast, slow, *rows)


def test_what_was_recorded_over_a_cache_goes_with_it(stack, text):
    """Or rounds over the next one would replay it, emit nothing, and be left to the host."""
    bench = Workbench(stack, EXIT, RepeatingRecorder)
    for num_rows in (1, 2):
        bench.record_ahead([0], num_rows=num_rows, num_slots=64)
    decoder = decoder_of(stack, bench, num_rows=3)
    assert len(bench._idle) == 1
    row = decoder.join(spec(PROMPTS[0], k=0))
    for _ in range(3):
        decoder.step()
    assert decoder.rounds.flies(row)
    finish(decoder)
    assert row.token_ids == text


@pytest.mark.parametrize("patience", [0, 2])
def test_rounds_that_are_recorded_ahead_are_all_that_requests_need(stack, text, patience):
    class Recorder(Counting):
        made = 0

    bench = Workbench(stack, EXIT, lambda: Recorder(patience))
    # 0 to 3 drafted tokens, one, two and three rows, greedy and sampled.
    assert bench.record_ahead(range(4), num_rows=3, num_slots=64) == Recorder.made == 4 * 3 * 2
    assert bench.record_ahead(range(4), num_rows=2, num_slots=40) == Recorder.made
    specs = [spec(PROMPTS[0]), spec(PROMPTS[1], SAMPLED, k=1), spec(PROMPTS[2], k=0)]
    for rows in (1, 3):
        decoder = decoder_of(stack, bench, num_rows=rows)
        found = [decoder.join(one) for one in specs[:rows]]
        decoder.step()  # prefills
        while any(row.finish_reason is None for row in found):
            decoder.step()
            assert decoder.rounds.usual
        slow = decoder_of(stack, num_rows=rows)
        assert_same(decoder, slow, found, decode(slow, *specs[:rows]))
        assert found[0].token_ids == text
        for row in found:
            decoder.leave(row.id)
        bench.give_back(decoder.rounds)
    assert Recorder.made == 4 * 3 * 2


def test_rounds_are_recorded_ahead_for_every_context(stack, short_recordings):
    bench = Workbench(stack, EXIT, RepeatingRecorder)
    slots = 4 * FIRST_SLOTS + 10
    assert bench.record_ahead([2], num_rows=1, num_slots=slots) == 3 * 2
    shapes = {(shape.num_slots, shape.sampled) for shape in idle_of(bench).recordings._kept}
    sizes = (FIRST_SLOTS, 4 * FIRST_SLOTS, idle_of(bench).cache.num_slots)
    assert sizes[-1] >= slots
    assert shapes == {(n, sampled) for n in sizes for sampled in (False, True)}
    assert bench.record_ahead([MOST_DRAFTED + 1], num_rows=1, num_slots=slots) == 3 * 2


class Large(RepeatingRecorder):
    """Five of its recordings fit."""

    def record(self, function):
        recording = super().record(function)
        recording.num_bytes = LIMIT_BYTES // 5
        return recording


def test_rounds_recorded_ahead_end_where_memory_does(stack):
    """The first ones are kept, plain rounds among them, and requests drop none of them."""
    bench = Workbench(stack, EXIT, Large)
    assert bench.record_ahead(range(8), num_rows=1, num_slots=64) == 5
    kept = dict(idle_of(bench).recordings._kept)
    assert [shape.num_draft_tokens for shape in kept] == [0, 0, 1, 1, 2]
    decoder = decoder_of(stack, bench, num_rows=1)
    decode(decoder, spec(PROMPTS[0], limit=6))
    assert decoder.rounds.recordings._kept == kept
    assert "bytes, and" in decoder.rounds.recordings.reason


def test_what_cannot_be_recorded_ahead_runs_as_it_is(stack, text):
    bench = Workbench(stack, EXIT, Unable)
    assert bench.record_ahead([0, 3], num_rows=1, num_slots=64) == 0
    assert decode(decoder_of(stack, bench, num_rows=1), spec(PROMPTS[0]))[0].token_ids == text


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ({"num_draft_tokens": 3}, {0, 3}),
        ({"num_draft_tokens": 0}, {0}),
        ({"num_draft_tokens": "auto"}, set(range(8))),
        ({"num_draft_tokens": 3, "plan": None}, {0}),
        ({"num_draft_tokens": 3, "lookup": True}, {0}),
    ],
)
def test_the_library_records_what_its_requests_will_need(tokenizer, settings, counts):
    model = make_model()
    pack_model(model)
    lm = SelfSpeculativeLM(model, tokenizer, **{"plan": EXIT} | settings, packed=True)
    assert lm.warm_up(num_slots=40) == 2 * len(counts)
    kept = [shape.num_draft_tokens for shape in idle_of(lm._bench).recordings._kept]
    assert set(kept) == counts
    if len(counts) == 8:  # what serves most comes first, if time or memory runs out
        assert kept[::2] == [0, 1, 2, 4, 3, 5, 6, 7]
    assert (lm._controller is not None) == (settings["num_draft_tokens"] == "auto")
    made = len(idle_of(lm._bench).recordings)
    lm.generate("a", max_new_tokens=20, sampling=SAMPLED)
    assert len(idle_of(lm._bench).recordings) == made


@pytest.mark.parametrize(("patience", "made"), [(2, 16), (0, 0)])
def test_a_controller_comes_with_recordings_where_they_are_dear(
    tokenizer, monkeypatch, patience, made
):
    """So that a first text makes none; with a CPU's recorder nothing is won, and nothing done."""
    monkeypatch.setattr("layerskip.api.RECORDING_SECONDS", float("inf"))
    model = make_model()
    pack_model(model)
    lm = SelfSpeculativeLM(model, tokenizer, plan=EXIT, num_draft_tokens="auto", packed=True)
    recorders = []

    def make_recorder():
        recorders.append(RepeatingRecorder(patience))
        return recorders[-1]

    lm._bench._make_recorder = make_recorder
    _ = lm.controller
    assert len(lm._bench._idle) == bool(made)
    if made:
        idle = idle_of(lm._bench)
        sizes = len({shape.num_slots for shape in idle.recordings._kept})
        assert len(idle.recordings) == made * sizes
        assert {shape.num_draft_tokens for shape in idle.recordings._kept} == set(range(8))
        for sampling in (GREEDY, SAMPLED):
            lm.generate("a", max_new_tokens=20, sampling=sampling)
        assert len(idle.recordings) == made * sizes
        assert idle_of(lm._bench) is idle


def automatic_lm(tokenizer, monkeypatch):
    """Of a packed model whose recordings are as dear as graphs."""
    monkeypatch.setattr("layerskip.api.RECORDING_SECONDS", float("inf"))
    monkeypatch.setattr("layerskip.api.RECORDED_SLOTS", 60)
    model = make_model()
    pack_model(model)
    lm = SelfSpeculativeLM(model, tokenizer, plan=EXIT, num_draft_tokens="auto", packed=True)
    lm._bench._make_recorder = lambda: RepeatingRecorder(patience=2)
    return lm


def opened(lm):
    batch = lm.open_batch(max_new_tokens=20)
    batch.add("a")
    return batch


@pytest.mark.parametrize(
    "first",
    [
        lambda lm: lm.generate("a", max_new_tokens=20),
        lambda lm: list(lm.stream("a", max_new_tokens=20)),
        opened,
    ],
    ids=["generate", "stream", "open_batch"],
)
def test_a_first_request_finds_what_its_own_controller_recorded(tokenizer, monkeypatch, first):
    lm = automatic_lm(tokenizer, monkeypatch)
    assert lm._controller is None
    held = first(lm)
    if not lm._bench._idle:
        assert len(held._rows.rounds.recordings) == 16
    else:
        assert len(idle_of(lm._bench).recordings) == 16


@pytest.mark.parametrize("recorded", [True, False])
def test_prices_of_rounds_that_the_host_drives_come_with_those_of_recorded_ones(
    tokenizer, monkeypatch, recorded
):
    """Of one model, so that what is known of requests is the same."""
    monkeypatch.setattr(PackedStack, "runs_rounds", recorded)
    passes = lambda *asked: RecordedPasses(*asked, RepeatingRecorder())  # noqa: E731
    if recorded:
        monkeypatch.setattr("layerskip.profiling._passes", passes)
    lm = automatic_lm(tokenizer, monkeypatch)
    by_host = lm.controller.by_host
    if not recorded:
        assert by_host is None
        assert lm.controller.cost.key["passes"] == "started by the host"
        return
    assert lm.controller.cost.key["passes"] == "recorded"
    assert by_host.cost.key["passes"] == "started by the host"
    assert lm.controller.cost.sampling == 0.0 < by_host.cost.sampling
    lm.generate("a", max_new_tokens=12, sampling=SamplingParams(temperature=0.8, top_k=9))
    lm.generate("a", max_new_tokens=12, sampling=SAMPLED)
    assert lm.controller.row("coupled").shared is by_host.row("coupled").shared


def test_a_batch_leaves_single_texts_their_recordings(tokenizer, monkeypatch):
    """One that is known to have many rows has a cache of its own, one whose rows come later leaves
    the small one behind; and the next of them finds what the first recorded."""
    lm = automatic_lm(tokenizer, monkeypatch)
    single = lm.generate("a", max_new_tokens=20).token_ids
    small = idle_of(lm._bench)
    kept = dict(small.recordings._kept)
    assert len(kept) == 16
    lm.generate(["a", "b", "c"], max_new_tokens=20)
    assert small in lm._bench._idle
    assert small.recordings._kept == kept
    assert sorted(r.cache.num_rows for r in lm._bench._idle) == [1, 3]

    other = automatic_lm(tokenizer, monkeypatch)
    texts = []
    for _ in range(2):
        batch = other.open_batch(max_new_tokens=20)
        rows = [batch.add(prompt) for prompt in ("a", "b", "c")]
        while batch.unfinished:
            batch.step()
        texts.append([batch.remove(row).token_ids for row in rows])
        del batch
    assert texts[0] == texts[1]
    assert texts[0][0] == single
    small, large = sorted(other._bench._idle, key=lambda r: r.cache.num_rows)
    assert (small.cache.num_rows, large.cache.num_rows) == (1, 4)
    assert small.recordings._kept.keys() == kept.keys()
    assert len(large.recordings) > 0
    made = len(large.recordings)
    assert other.generate("a", max_new_tokens=20).token_ids == single
    assert small.recordings._kept.keys() == kept.keys()
    assert len(large.recordings) == made


def test_a_batch_that_grew_over_several_sizes_leaves_its_recordings(tokenizer, monkeypatch):
    """However much more was recorded for others before it."""
    lm = automatic_lm(tokenizer, monkeypatch)
    lm.generate("a", max_new_tokens=20)

    def made(prompts, count):
        batch = lm.open_batch(max_new_tokens=20, num_draft_tokens=count)
        for prompt in prompts:
            batch.add(prompt)
        rounds = batch._rows.rounds
        before = len(rounds.recordings)
        while batch.unfinished:
            batch.step()
        return len(rounds.recordings) - before

    assert all(made("ab", count) > 0 for count in (1, 2, 3, 4, 5))
    assert made("abcd", 3) > 0
    assert made("abcd", 3) == 0


def test_how_often_a_round_came_up_is_known_after_a_short_text(tokenizer, monkeypatch):
    """Though nothing is recorded over its cache yet, and much over another."""
    lm = automatic_lm(tokenizer, monkeypatch)
    lm.generate("a", max_new_tokens=20)
    for _ in range(3):
        lm.generate(["a", "b", "c"], max_new_tokens=3, num_draft_tokens=0)
    large = max(lm._bench._idle, key=lambda r: r.cache.num_rows)
    assert large.cache.num_rows == 3
    assert len(large.recordings) == 1


def test_what_is_left_behind_forgets_whose_text_ended_where(stack, text):
    """Rounds recorded over the small cache end later rows by those rows' own ids."""
    bench = Workbench(stack, EXIT, RepeatingRecorder)
    decoder = decoder_of(stack, bench, num_rows=1)
    eos_ids = frozenset({text[7]})
    first = decoder.join(spec(PROMPTS[0], eos_ids=eos_ids))
    for _ in range(2):
        decoder.step()
    decoder.join(spec(PROMPTS[1], eos_ids=eos_ids))
    assert idle_of(bench).cache.num_rows == 1
    assert (idle_of(bench).seats.eos_ids == -1).all()
    finish(decoder)
    assert first.token_ids == text[: text.index(text[7]) + 1]
    assert decode(decoder_of(stack, bench, num_rows=1), spec(PROMPTS[0]))[0].token_ids == text


def test_a_kept_cache_goes_where_memory_has_no_room_beside_it(stack, text, monkeypatch):
    bench = Workbench(stack, EXIT, RepeatingRecorder)
    bench.record_ahead([0], num_rows=1, num_slots=64)
    kept, new_cache = weakref.ref(idle_of(bench).cache), stack.new_cache

    def limited(*, num_rows, num_slots):
        if kept() is not None:
            raise RuntimeError("CUDA out of memory")
        return new_cache(num_rows=num_rows, num_slots=num_slots)

    monkeypatch.setattr(stack, "new_cache", limited)
    assert bench.take(num_rows=2, num_slots=64).cache.num_rows == 2
    assert bench._idle == []


@pytest.mark.parametrize("ask", ["another", "a row more"])
def test_of_two_kept_caches_both_go_before_a_request_finds_no_memory(stack, monkeypatch, ask):
    """One that has no room is replaced first; the other may hold what is missing."""
    bench = Workbench(stack, EXIT, RepeatingRecorder)
    bench.record_ahead([0], num_rows=1, num_slots=64)
    bench.record_ahead([0, 1], num_rows=2, num_slots=64)
    assert len(bench._idle) == 2
    decoder = decoder_of(stack, bench, num_rows=1) if ask == "a row more" else None
    kept = weakref.ref(next(r.cache for r in bench._idle if r.cache.num_rows == 2))

    def limited(make):
        def made(*sizes, **named):
            if kept() is not None:
                raise RuntimeError("CUDA out of memory")
            return make(*sizes, **named)

        return made

    if decoder is None:
        monkeypatch.setattr(stack, "new_cache", limited(stack.new_cache))
        assert bench.take(num_rows=3, num_slots=64).cache.num_rows == 3
    else:
        decoder.join(spec(PROMPTS[0]))
        monkeypatch.setattr(decoder.cache, "_resized", limited(decoder.cache._resized))
        decoder.join(spec(PROMPTS[1]))
        assert decoder.cache is decoder.rounds.cache
        assert decoder.cache.num_rows == 2
    assert kept() is None


def test_a_controller_that_finds_no_memory_for_recordings_decides_without(tokenizer, caplog):
    model = make_model()
    pack_model(model)
    lm = SelfSpeculativeLM(model, tokenizer, plan=EXIT, num_draft_tokens="auto", packed=True)

    def record_ahead(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore of it")

    lm._bench.record_ahead = record_ahead
    assert len(lm.generate("a", max_new_tokens=8, ignore_eos=True).token_ids) == 8
    warned = [r.message for r in caplog.records if "recorded ahead" in r.message]
    assert warned == ["no round is recorded ahead: CUDA out of memory. Tried to allocate 2 GiB."]


def test_recording_ahead_ends_with_its_seconds(stack, short_recordings):
    """The shortest texts' rounds come first, greedy and sampled of each number."""
    bench = Workbench(stack, EXIT, RepeatingRecorder)
    asked = {"num_rows": 1, "num_slots": 2 * FIRST_SLOTS}
    assert bench.record_ahead([0, 2], **asked, seconds=0.0) <= 1
    assert bench.record_ahead([0, 2], **asked) == 8
    kept = [(shape.num_slots, shape.num_draft_tokens) for shape in idle_of(bench).recordings._kept]
    sizes = sorted({size for size, _ in kept})
    assert kept == [(size, k) for size in sizes for k in (0, 0, 2, 2)]


def test_a_warm_up_is_refused_before_anything_is_recorded(tokenizer):
    model = make_model()
    general = SelfSpeculativeLM(model, tokenizer, EXIT, num_draft_tokens=3)
    assert general.warm_up() == 0  # the host runs its rounds
    for settings, sentence in (
        ({"num_rows": 0}, "num_rows must be at least 1, got 0"),
        ({"num_slots": 10**6}, "num_slots must be between 1 and"),
        ({"num_draft_tokens": 33}, "num_draft_tokens"),
    ):
        with pytest.raises(ValueError, match=sentence):
            general.warm_up(**settings)


def test_a_longer_request_has_a_larger_cache_and_new_recordings(stack, text):
    bench = Workbench(stack, EXIT, RepeatingRecorder)
    eos_ids = frozenset({text[7]})
    decode(decoder_of(stack, bench, num_rows=1), spec(PROMPTS[0], eos_ids=eos_ids))
    decoder = decoder_of(stack, bench, num_rows=2, num_slots=65)
    assert (decoder.cache.num_rows, decoder.cache.num_slots) == (2, 128)
    (row,) = decode(decoder, spec(PROMPTS[0], eos_ids=eos_ids))
    assert row.token_ids == text[: text.index(text[7]) + 1]


@pytest.mark.parametrize(
    ("kept", "asked", "expected"),
    [
        ((2, 128), (1, 200), (2, 256)),  # both kinds find room
        ((4, 128), (8, 64), (8, 128)),
        ((32, 64), (1, 576), (1, 576)),  # not 32 times as much as it needs
        ((1, 576), (32, 64), (32, 64)),
    ],
)
def test_a_kept_cache_grows_to_what_two_kinds_of_texts_need(stack, kept, asked, expected):
    bench = Workbench(stack, EXIT, RepeatingRecorder)
    for rows, slots in (kept, asked):
        rounds = bench.take(num_rows=rows, num_slots=slots)
        bench.give_back(rounds)
    assert (rounds.cache.num_rows, rounds.cache.num_slots) == expected
    assert len(rounds.seats.num_left) == expected[0]


def test_a_kept_cache_makes_room_for_the_next_one(stack, monkeypatch):
    """It goes first; and where there is no room for more than was asked, that is enough."""
    bench, made = Workbench(stack, EXIT, RepeatingRecorder), []
    new_cache = stack.new_cache

    def limited(*, num_rows, num_slots):
        assert [cache for cache in made if cache() is not None] == []
        if num_rows * num_slots > 300:
            raise RuntimeError("CUDA out of memory")
        cache = new_cache(num_rows=num_rows, num_slots=num_slots)
        made.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(stack, "new_cache", limited)
    bench.give_back(bench.take(num_rows=2, num_slots=128))
    rounds = bench.take(num_rows=1, num_slots=200)
    assert (rounds.cache.num_rows, rounds.cache.num_slots) == (1, 256)
    bench.give_back(rounds)
    del rounds
    with pytest.raises(RuntimeError, match="out of memory"):
        bench.take(num_rows=3, num_slots=200)
    assert bench.take(num_rows=1, num_slots=300).cache.num_rows == 1


@pytest.mark.parametrize("fits", [True, False])
def test_rounds_that_a_collection_gives_back_meanwhile_are_no_hindrance(stack, monkeypatch, fits):
    """It may let go of those that were just found: they are taken, or replaced, all the same."""
    bench, asked = Workbench(stack, None, RepeatingRecorder), []
    first, second = (bench.take(num_rows=1, num_slots=8) for _ in range(2))
    bench.give_back(first)

    def collecting():
        asked.append(1)
        if len(asked) == 1:
            bench.give_back(second)

    class Collected(Recordings):
        def __len__(self):
            collecting()
            return super().__len__()

    if fits:
        monkeypatch.setattr(first, "has_room", lambda *_: collecting() or True)
        assert bench.take(num_rows=1, num_slots=8) is first
    else:
        first.recordings = Collected(RepeatingRecorder())
        assert bench.take(num_rows=3, num_slots=8).recordings is first.recordings
    assert asked
    assert idle_of(bench) is second


def test_a_garbage_collection_may_give_rounds_back_while_others_are_taken(stack):
    """Finalizers run in the thread that is in ``take`` or ``give_back``."""
    bench = Workbench(stack, None, RepeatingRecorder)
    rounds = bench.take(num_rows=1, num_slots=8)

    def collected():
        with bench._lock:
            bench.give_back(rounds)

    thread = threading.Thread(target=collected, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert idle_of(bench) is rounds


def test_rounds_that_are_given_back_twice_are_taken_once(stack):
    bench = Workbench(stack, EXIT, RepeatingRecorder)
    bench.record_ahead([0], num_rows=1, num_slots=40)
    rounds = idle_of(bench)
    bench.give_back(rounds)
    taken = [bench.take(num_rows=1, num_slots=40) for _ in range(2)]
    assert taken[0] is rounds is not taken[1]


def test_rounds_run_without_recordings_too(stack, text):
    decoder = decoder_of(stack, Workbench(stack, EXIT, Unable))
    assert decode(decoder, spec(PROMPTS[0]))[0].token_ids == text
    assert (decoder.rounds.reason, decoder.rounds.recordings.reason) == ("", "no graphs here")


def test_drafts_may_have_a_vocabulary_of_their_own(stack, text):
    """A token that it lacks is never drafted, and emitted all the same."""
    bench, _ = open_bench(stack, EXIT, stack.head_over(range(0, VOCAB_SIZE, 2)))
    decoder = decoder_of(stack, bench)
    drafted, attempted = [], decoder.speculator.attempted
    decoder.speculator.attempted = lambda landing: (
        drafted.extend(landing.draft) or attempted(landing)
    )
    assert decode(decoder, spec(PROMPTS[0]))[0].token_ids == text
    assert drafted
    assert not any(token % 2 for token in drafted)


def test_the_library_lets_a_packed_model_run_by_itself(tokenizer):
    plans = {"plan": EXIT, "num_draft_tokens": 3}
    model = make_model()
    general = SelfSpeculativeLM(model, tokenizer, **plans, lookup=False)
    pack_model(model)
    packed = SelfSpeculativeLM(model, tokenizer, **plans, packed=True)
    assert "general stack" in general.rounds_choice
    assert packed.rounds_choice.startswith("whole rounds, ")
    for settings in ({"stop": "e"}, {"sampling": replace(SAMPLED, seed=4)}):
        outputs = [
            lm.generate(["the tea", "a"], max_new_tokens=12, **settings) for lm in (packed, general)
        ]
        for one, other in zip(*outputs, strict=True):
            assert (one.text, one.token_ids) == (other.text, other.token_ids)
            assert without_times(one.rounds) == without_times(other.rounds)
    assert len(idle_of(packed._bench).recordings) > 0


@pytest.mark.parametrize("packed", [True, False])
def test_what_is_made_inside_inference_mode_serves_outside_it(tokenizer, packed):
    model = make_model()
    if packed:
        pack_model(model)
    settings = {"num_draft_tokens": 2, "lookup": False, "packed": packed}
    lm = SelfSpeculativeLM(model, tokenizer, EXIT, **settings)
    with torch.inference_mode():
        wanted = lm.generate("abc", max_new_tokens=6).token_ids
    assert lm.generate("abc", max_new_tokens=6).token_ids == wanted
    batch = lm.open_batch(max_new_tokens=6)
    with torch.inference_mode():
        row = batch.add("abc")
    batch.step()
    with torch.inference_mode():
        longer = batch.add("abc" * 30)  # the cache grows
    batch.step()
    batch.remove(longer)
    while batch.unfinished:
        batch.step()
    assert batch.remove(row).token_ids == wanted


def test_look_ups_give_way_unless_they_are_asked_for(tokenizer):
    model = make_model()
    pack_model(model)
    for lookup, plan, expected in ((None, EXIT, False), (True, EXIT, True), (None, None, False)):
        lm = SelfSpeculativeLM(model, tokenizer, plan, lookup=lookup, packed=True)
        assert lm.looks_up is expected
    fixed = SelfSpeculativeLM(model, tokenizer, num_draft_tokens=4, packed=True)
    assert fixed.looks_up  # nothing else drafts
    text = list(range(VOCAB_SIZE))  # whatever comes has come before
    for lookup, count, expected in ((None, 4, True), (None, 0, False), (False, 4, False)):
        lm = SelfSpeculativeLM(model, lookup=lookup, packed=True)
        drafted = lm.generate(text, max_new_tokens=4, num_draft_tokens=count).stats.num_draft_tokens
        assert (drafted > 0, lm.looks_up) == (expected, False)
        with mock.patch("layerskip.api.Batch", wraps=Batch) as made:
            settings = {"custom_generate": lm.custom_generate, "num_draft_tokens": count}
            lm.stack.twin.generate(torch.tensor([text]), max_new_tokens=4, **settings)
        assert made.call_args.kwargs["looks_up"] is expected
    assert SelfSpeculativeLM(make_model(), tokenizer).looks_up  # where the host runs each round
