"""Rounds that the device runs while the round that is wanted is not recorded."""

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from device_rounds import (
    EXIT,
    PROMPTS,
    SAMPLED,
    Scripted,
    assert_same,
    decode,
    decoder_of,
    finish,
    spec,
)
from toys import random_ids

from layerskip.controller import Controller
from layerskip.cost import CostTable, Curve
from layerskip.device_round import DeviceRound
from layerskip.graphs import Allowance, RecordingError, RepeatingRecorder
from layerskip.workbench import Workbench


def runs_of(decoder, monkeypatch):
    """Drafted tokens of each round that the decoder launches, and whether it is recorded."""
    ran, recordings = [], decoder.rounds.recordings
    run = recordings.run

    def running(shape, function):
        ran.append((shape.num_draft_tokens, recordings.has(shape)))
        run(shape, function)

    monkeypatch.setattr(recordings, "run", running)
    return ran


def recorder_that_looks(monkeypatch):
    """A recorder, and what it recorded: drafted tokens of each round, and whether it ran before."""
    done, call, recorded = [], DeviceRound.__call__, []

    def calling(function, shape, *others):
        done.append(shape)
        call(function, shape, *others)

    class Recorder(RepeatingRecorder):
        def record(self, function):
            before = Counter(done)
            recording = super().record(function)
            (shape,) = (Counter(done) - before).keys()
            recorded.append((shape.num_draft_tokens, before[shape] > 0))
            return recording

    monkeypatch.setattr(DeviceRound, "__call__", calling)
    return Recorder, recorded


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
    make_recorder, recorded = recorder_that_looks(monkeypatch)
    monkeypatch.setattr("layerskip.stand_ins.WAITS_BY_HALF", 10)  # texts here are short
    bench = Workbench(stack, EXIT, lambda: make_recorder(2))
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
    assert recorded
    assert all(ran_before for _, ran_before in recorded)
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


def test_a_round_that_finds_no_memory_leaves_texts_to_the_recorded_one(stack, monkeypatch):
    """It was to be recorded in the place of a plain one, which runs on: tokens are the same, drawn
    by the same noise, and what is in the cache."""
    call = DeviceRound.__call__

    def calling(function, shape, *others):
        call(function, shape, *others)  # as far as it may come
        if shape.num_draft_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512 MiB.")

    monkeypatch.setattr(DeviceRound, "__call__", calling)
    bench = Workbench(stack, EXIT, lambda: RepeatingRecorder(2))
    decoder = decoder_of(stack, bench, controller=Scripted(3), num_slots=128)
    ran = runs_of(decoder, monkeypatch)
    given = [spec(p, SAMPLED, k="auto", limit=60) for p in PROMPTS[:2]]
    rows = decode(decoder, *given)
    assert {count for count, _ in ran} == {0}
    assert decoder.rounds.recordings.num_tried > len(decoder.rounds.recordings)
    slow = decoder_of(stack, controller=Scripted(0), num_slots=128)
    assert_same(decoder, slow, rows, decode(slow, *given))


def test_a_round_runs_before_it_is_recorded_however_often_it_was_asked_for(stack, monkeypatch):
    """Here a plain one runs in its place, and then a request asks for it by number."""
    make_recorder, recorded = recorder_that_looks(monkeypatch)
    bench = Workbench(stack, EXIT, lambda: make_recorder(2))
    decoder = decoder_of(stack, bench, controller=Scripted(3), num_slots=128)
    (row,) = decode(decoder, spec(PROMPTS[0], k="auto", limit=12))
    decoder.leave(row.id)
    decode(decoder, spec(PROMPTS[1], k=3, limit=20))
    assert recorded == [(0, True), (3, True)]


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
