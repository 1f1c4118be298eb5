"""Rounds that the device runs by itself, against rounds that the host drives.

The definitions run them, and a CPU's recorder proves of each that it does not ask the host.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from device_rounds import (
    EXIT,
    FIRST_SLOTS,
    GREEDY,
    PROMPTS,
    SAMPLED,
    Unable,
    assert_device_ran,
    assert_same,
    decode,
    decoder_of,
    finish,
    idle_of,
    spec,
)
from toys import PLANS, VOCAB_SIZE, make_model, make_tokenizer, random_ids, without_times

from layerskip import SelfSpeculativeLM
from layerskip.batch import Batch
from layerskip.graphs import RepeatingRecorder
from layerskip.model import pack_model
from layerskip.sampling import Sampler
from layerskip.seats import Ring, rounded_up, slot_sizes
from layerskip.text import TextStream
from layerskip.workbench import Workbench, open_bench


def test_slots_that_recordings_are_made_for():
    assert slot_sizes(300) == [300]
    assert slot_sizes(1024) == [1024]
    assert slot_sizes(9000) == [1024, 4096, 9000]
    assert [rounded_up(n, 9000) for n in (1, 1024, 1025, 4096, 4097, 9000)] == [
        *(1024, 1024, 4096, 4096, 9000, 9000)
    ]


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
        second = decoder.join(replace(host_spec(name), max_new_tokens=3))
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


def test_rounds_run_without_recordings_too(stack, text):
    decoder = decoder_of(stack, Workbench(stack, EXIT, Unable))
    assert decode(decoder, spec(PROMPTS[0]))[0].token_ids == text
    assert (decoder.rounds.reason, decoder.rounds.recordings.reason) == ("", "no graphs here")


def test_drafts_may_have_a_vocabulary_of_their_own(stack, text):
    """A token that it lacks is never drafted, and emitted all the same."""
    bench, _ = open_bench(stack, EXIT, stack.head_over(range(0, VOCAB_SIZE, 2)))
    decoder = decoder_of(stack, bench)
    drafted, attempted = [], decoder.round_drafter.attempted
    decoder.round_drafter.attempted = lambda landing: (
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
    with mock.patch("layerskip.api.Batch", wraps=Batch) as made:
        for count in (None, 4, 0, "auto"):
            fixed.open_batch(num_draft_tokens=count)
    decoders = [call.kwargs["new_decoder"] for call in made.call_args_list]
    assert [d.keywords["looks_up"] for d in decoders] == [True, True, False, False]
    text = list(range(VOCAB_SIZE))  # whatever comes has come before
    for lookup, count, expected in ((None, 4, True), (None, 0, False), (False, 4, False)):
        lm = SelfSpeculativeLM(model, lookup=lookup, packed=True)
        drafted = lm.generate(text, max_new_tokens=4, num_draft_tokens=count).stats.num_draft_tokens
        assert (drafted > 0, lm.looks_up) == (expected, False)
        with mock.patch("layerskip.api.Batch", wraps=Batch) as made:
            settings = {"custom_generate": lm.custom_generate, "num_draft_tokens": count}
            lm.stack.twin.generate(torch.tensor([text]), max_new_tokens=4, **settings)
        assert made.call_args.kwargs["new_decoder"].keywords["looks_up"] is expected
    assert SelfSpeculativeLM(make_model(), tokenizer).looks_up  # where the host runs each round
