"""Rounds recorded ahead of the requests that need them, and recordings that outlive a decoder."""

import pytest
import torch
from device_rounds import (
    EXIT,
    FIRST_SLOTS,
    GREEDY,
    PROMPTS,
    SAMPLED,
    Unable,
    assert_same,
    decode,
    decoder_of,
    finish,
    idle_of,
    spec,
)
from toys import make_model

from layerskip import SamplingParams, SelfSpeculativeLM
from layerskip.device_round import DeviceRound
from layerskip.graphs import LIMIT_BYTES, RepeatingRecorder
from layerskip.model import pack_model
from layerskip.ops.catalog import MOST_DRAFTED
from layerskip.packed import PackedStack
from layerskip.recorded_passes import RecordedPasses
from layerskip.workbench import Workbench


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


def test_recording_ahead_ends_where_there_is_no_memory(stack, monkeypatch):
    """And what nobody asked for is held against no round."""
    tried = []

    def calling(function, shape, *others):
        tried.append(shape)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512 MiB.")

    bench = Workbench(stack, EXIT, lambda: RepeatingRecorder(2))
    with monkeypatch.context() as patched:
        patched.setattr(DeviceRound, "__call__", calling)
        with pytest.raises(torch.OutOfMemoryError):
            bench.record_ahead([0, 3], num_rows=1, num_slots=64)
    assert len(tried) == 1
    assert bench.record_ahead([0, 3], num_rows=1, num_slots=64) > 0
    (rounds,) = bench._idle
    assert tried[0] in rounds.recordings


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
    general.stack.max_positions = 17  # fewer than are warmed up for otherwise
    assert general.warm_up() == 0
    for settings, sentence in (
        ({"num_rows": 0}, "num_rows must be at least 1, got 0"),
        ({"num_slots": 10**6}, "num_slots must be between 1 and"),
        ({"num_draft_tokens": 33}, "num_draft_tokens"),
    ):
        with pytest.raises(ValueError, match=sentence):
            general.warm_up(**settings)
