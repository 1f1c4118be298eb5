"""What rows of one cache do to each other, and what an interrupted round leaves: nothing."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from decoding import PROMPT, SAMPLED, Interruption, Oracle, decode, join, self_drafting
from toys import PLANS, VOCAB_SIZE, random_ids
from transformers import ByT5Tokenizer

from layerskip import RowError, SamplingParams, SelfSpeculativeLM
from layerskip.ambient import Decoding
from layerskip.cache import KVCache
from layerskip.decode import Decoder
from layerskip.drafting import DraftRequest, EarlyExitDrafter
from layerskip.model import DecoderStack
from layerskip.sampling import Sampler
from layerskip.text import TextStream


@pytest.fixture(scope="module")
def stack(wrap) -> DecoderStack:
    return wrap("exit").stack


@pytest.fixture(scope="module")
def plain(stack) -> list[int]:
    return decode(Decoder(stack, None, None)).token_ids


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED])
def test_what_lies_in_scratch_slots_never_matters(stack, plan, sampling):
    prompts = [PROMPT, random_ids(3), random_ids(125)]  # 125 crosses a block of 128 slots
    expected = [decode(Decoder(stack, None, None), prompt=p, sampling=sampling) for p in prompts]
    batch = self_drafting(stack, plan)
    rows = [
        join(batch, p, num_draft_tokens=k, sampling=sampling)
        for p, k in zip(prompts, (4, 2, 7), strict=True)
    ]
    while any(row.finish_reason is None for row in rows):
        for row in rows:
            poison = 3e4 if row.length % 2 else -3e4
            batch.cache.keys[:, row.slot_row, row.length :] = poison
            batch.cache.values[:, row.slot_row, row.length :] = -poison
        batch.step()
    assert [row.token_ids for row in rows] == [row.token_ids for row in expected]


@pytest.mark.parametrize("plan", PLANS)
def test_committed_slots_are_those_of_plain_decoding(stack, plan):
    slow, fast = Decoder(stack, None, None), self_drafting(stack, plan)
    length = decode(slow, max_new_tokens=40).length
    assert decode(fast, max_new_tokens=40).length == length == fast.cache.lengths[0]
    assert torch.equal(fast.cache.keys[:, :, :length], slow.cache.keys[:, :, :length])
    assert torch.equal(fast.cache.values[:, :, :length], slow.cache.values[:, :, :length])


def test_one_cache_and_accepting_copies_nothing(stack, plain, monkeypatch):
    decode(self_drafting(stack))  # so that probing new pass sizes is over
    made, init = [], KVCache.__init__
    monkeypatch.setattr(
        KVCache, "__init__", lambda self, **kw: (made.append(self), init(self, **kw))[1]
    )
    batch = Decoder(stack, Oracle(stack, plain, hits=[9]), None, num_slots=len(PROMPT) + 40)
    places = batch.cache.keys.data_ptr(), batch.cache.values.data_ptr()
    decode(batch)
    assert made == [batch.cache]
    assert (batch.cache.keys.data_ptr(), batch.cache.values.data_ptr()) == places


@pytest.mark.parametrize("kept", [None, range(0, 300, 3)])
def test_rows_that_draft_together_draft_what_each_drafts_alone(stack, kept):
    """The text does not tell: other drafts would only be accepted less often."""
    head = None if kept is None else stack.head_over(kept).including([1, 2])
    drafter, cache = (
        EarlyExitDrafter(stack, PLANS["exit"]),
        stack.new_cache(num_rows=5, num_slots=64),
    )
    hot, cool = SamplingParams(temperature=1.3), SamplingParams(temperature=0.5)
    settings = [hot, cool, SamplingParams(), replace(cool, top_k=9), hot]
    requests = [
        DraftRequest(
            row,
            length,
            pending=row,
            num_draft_tokens=4 - row % 2,
            sampler=Sampler(params, 7 + row, VOCAB_SIZE),
            own_ids=frozenset({1} if row else {2}),
            tells=True,
        )
        for row, (params, length) in enumerate(zip(settings, (3, 9, 4, 4, 20), strict=True))
    ]
    with Decoding():
        for r in requests:
            stack.prefill(random_ids(r.length, seed=r.slot_row), cache, r.slot_row)
        alone = [drafter.draft([r], cache, head)[0] for r in requests]
        together = drafter.draft(requests, cache, head)
    assert [d.tokens for d in together] == [d.tokens for d in alone]
    for one, other in zip(together, alone, strict=True):
        assert one.confidences == other.confidences
        assert len(one.confidences) == len(one.tokens) > 2


def snapshot(batch: Decoder) -> list:
    rows = batch.rows.values()
    state = [(list(r.token_ids), list(r.rounds), r.length, r.finish_reason) for r in rows]
    return [*state, batch.cache.lengths.tolist()]


PROMPTS = [PROMPT, random_ids(5)]
SHORT = {"max_new_tokens": 6, "num_draft_tokens": 3}


def finish(batch: Decoder) -> list[list[int]]:
    """Decode every row to its end; their tokens."""
    for _ in range(100):
        batch.step()
        if all(row.finish_reason is not None for row in batch.rows.values()):
            break
    return [row.token_ids for row in batch.rows.values()]


def alone(stack: DecoderStack, prompts=PROMPTS, **settings) -> list[list[int]]:
    return [decode(Decoder(stack, None, None), prompt=p, **settings).token_ids for p in prompts]


def step_until_broken(batch: Decoder, broken: Interruption) -> None:
    """Steps until ``broken`` has raised; the step that it ended must have changed nothing."""
    while broken.left >= 0 and any(r.finish_reason is None for r in batch.rows.values()):
        before = snapshot(batch)
        try:
            batch.step()
        except broken.error:
            assert snapshot(batch) == before


@pytest.mark.parametrize("place", ["run_layers", "logits", "embed"])
@pytest.mark.parametrize(
    ("error", "sampling"), [(RuntimeError, SAMPLED), (KeyboardInterrupt, SamplingParams())]
)
def test_a_round_that_breaks_off_changes_nothing(stack, monkeypatch, place, error, sampling):
    """Wherever in draft or verify it breaks off, the next step goes on to the same text."""
    expected = alone(stack, sampling=sampling, **SHORT)
    for times in range(9):  # a round of three drafts makes 8, 4 and 4 of these calls
        batch = self_drafting(stack)
        for prompt in PROMPTS:
            join(batch, prompt, sampling=sampling, **SHORT)
        batch.step()
        with monkeypatch.context() as patch:
            broken = Interruption(getattr(stack, place), times, error)
            patch.setattr(stack, place, broken)
            step_until_broken(batch, broken)
        assert broken.left < 0 or place != "run_layers"
        assert finish(batch) == expected


@pytest.mark.parametrize("times", range(2))
def test_a_prefill_that_breaks_off_is_done_again(stack, monkeypatch, times):
    expected = alone(stack, **SHORT)
    batch = self_drafting(stack)
    for prompt in PROMPTS:
        join(batch, prompt, **SHORT)
    with monkeypatch.context() as patch:
        patch.setattr(stack, "prefill", Interruption(stack.prefill, times, KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            batch.step()
    assert [row.length for row in batch.rows.values()] == [0, 0]  # all rows or none
    assert finish(batch) == expected


@pytest.mark.parametrize("times", range(0, 24, 3))
def test_an_interrupt_while_text_is_decoded_loses_nothing(stack, tokenizer, times):
    """Ctrl-C falls into Python's part of a round too, where tokens become text."""
    expected = alone(stack, **SHORT)
    broken = Interruption(tokenizer.decode, times, KeyboardInterrupt)
    batch = self_drafting(stack)
    for prompt in PROMPTS:
        join(batch, prompt, stream=TextStream(SimpleNamespace(decode=broken), ()), **SHORT)
    with pytest.raises(KeyboardInterrupt):
        finish(batch)
    assert finish(batch) == expected
    for row in batch.rows.values():
        assert [t for r in row.rounds for t in r.token_ids] == row.token_ids
        text = tokenizer.decode(row.token_ids, skip_special_tokens=True)
        assert "".join(r.text for r in row.rounds) == text


def test_rows_join_and_leave_between_rounds(stack):
    """At every round another row comes; one goes early and its slots are taken again."""
    prompts = [random_ids(n) for n in (11, 130, 1, 500, 61)]
    expected = alone(stack, prompts)
    batch = self_drafting(stack)
    first = join(batch, prompts[0])
    rows = []
    for number, prompt in enumerate(prompts[1:]):
        rows.append(join(batch, prompt, num_draft_tokens=number))
        batch.step()
        if number == 1:
            gone = batch.leave(first.id)
    finish(batch)
    assert [row.token_ids for row in rows] == expected[1:]
    assert gone is first
    assert first.token_ids == expected[0][: len(first.token_ids)] != []
    assert first.slot_row in {row.slot_row for row in rows}  # the slots that were given back
    assert len({row.id for row in [first, *rows]}) == 5  # ids are never given twice


def test_greedy_and_sampled_rows_share_a_batch(stack):
    expected = alone(stack, [PROMPT]) + alone(stack, [PROMPT], sampling=SAMPLED)
    batch = self_drafting(stack)
    join(batch, PROMPT)
    join(batch, PROMPT, sampling=SAMPLED)
    assert finish(batch) == expected


def test_a_row_that_is_not_there_cannot_leave(stack):
    batch = self_drafting(stack)
    row = join(batch)
    batch.leave(row.id)
    with pytest.raises(ValueError, match=r"the batch has no row 0; its rows are \[\]"):
        batch.leave(row.id)


@pytest.mark.parametrize("k", [0, 3])
def test_a_row_whose_tokens_its_tokenizer_does_not_know_is_named_and_others_go_on(toy, k):
    """Models have more ids than their tokenizers, and some of these can't decode such a one."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    most = len(tokenizer)
    lm = SelfSpeculativeLM(toy(), tokenizer, PLANS["exit"], lookup=False)
    rules = dict.fromkeys(range(most, VOCAB_SIZE), -1e9), {most: 1e9}
    batch = lm.open_batch(max_new_tokens=8, num_draft_tokens=k)
    row, lost = (batch.add(PROMPT, sampling=SamplingParams(logit_bias=rule)) for rule in rules)
    for _ in range(2):  # as often as it is tried
        with pytest.raises(RowError, match=rf"^row {lost}: .*end with \[{most}\]: ValueError"):
            batch.step()
    assert batch.remove(lost).token_ids == ()
    while batch.unfinished:
        batch.step()
    out = batch.remove(row)
    assert out.text == tokenizer.decode(out.token_ids, skip_special_tokens=True)
    assert len(out.token_ids) == 8
