"""The decoding loop with drafters that never, always and sometimes guess right."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from toys import MAX_POSITIONS, PLANS, VOCAB_SIZE, random_ids, without_times

from layerskip import SamplingParams
from layerskip.cache import KVCache
from layerskip.decode import Batch, Row
from layerskip.drafting import Draft, DraftRequest, EarlyExitDrafter
from layerskip.model import DecoderStack
from layerskip.sampling import Sampler
from layerskip.text import TextStream

PROMPT = random_ids(11)
LIMIT = 12
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=3)


@dataclass
class Oracle:
    """Drafts the known plain text, right for the next ``hits`` tokens, then wrong.

    Attributes:
        stack: embeds tokens: without a plan no layer is shared, so embeddings are all there is.
        plain: text after the prompt.
        hits: right guesses of each round, one round after another.
        most: drafts at most this many tokens, however many are asked for.
    """

    stack: DecoderStack
    plain: Sequence[int]
    hits: Sequence[int]
    most: int = 99
    asked: list[int] = field(default_factory=list)

    def draft(self, requests: Sequence[DraftRequest], cache: KVCache) -> list[Draft]:
        (request,) = requests
        right = self.hits[len(self.asked) % len(self.hits)]
        self.asked.append(request.num_draft_tokens)
        count = min(request.num_draft_tokens, self.most)
        done = request.length - len(PROMPT) + 1
        tokens = list(self.plain[done : done + count])
        for i in range(right, count):
            tokens[i] = (tokens[i] + 1) % VOCAB_SIZE
        states = self.stack.embed([request.pending, *tokens])[:count]
        return [Draft(tuple(tokens), tuple(states))]


@pytest.fixture(scope="module")
def stack(wrap) -> DecoderStack:
    return wrap("exit").stack


@pytest.fixture(scope="module")
def plain(stack) -> list[int]:
    return decode(Batch(stack, None, None)).token_ids


def join(batch: Batch, prompt: Sequence[int] = PROMPT, **changes) -> Row:
    params = changes.pop("sampling", SamplingParams())
    settings = {"limit": LIMIT, "num_draft_tokens": 4, "eos_ids": frozenset(), "stream": None}
    sampler = Sampler(params, params.seed or 0, VOCAB_SIZE)
    return batch.join(prompt, sampler=sampler, **settings | changes)


def decode(batch: Batch, **settings) -> Row:
    row = join(batch, **settings)
    while row.finish_reason is None:
        batch.step()
    return row


def self_drafting(stack: DecoderStack, plan: str = "exit") -> Batch:
    return Batch(stack, EarlyExitDrafter(stack, PLANS[plan]), PLANS[plan])


def record(index, tokens, drafted, accepted, origin, finish_reason=None) -> dict:
    return {
        "row": 0,
        "index": index,
        "token_ids": tuple(tokens),
        "text": "",
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "origin": origin,
        "positions": drafted + 1 if index else len(PROMPT),
        "finish_reason": finish_reason,
    }


# --- acceptance


def test_a_drafter_that_is_never_right(stack, plain):
    row = decode(Batch(stack, Oracle(stack, plain, hits=[0]), None), num_draft_tokens=3, limit=6)
    assert row.token_ids == plain[:6]
    assert (
        without_times(row.rounds)
        == [
            record(0, plain[:1], 0, 0, "prefill"),
            record(1, plain[1:2], 3, 0, "recovered"),
            record(2, plain[2:3], 3, 0, "recovered"),
            record(3, plain[3:4], 2, 0, "recovered"),  # no more than can still be emitted
            record(4, plain[4:5], 1, 0, "recovered"),
            record(5, plain[5:6], 0, 0, "plain", "length"),
        ]
    )


def test_a_drafter_that_is_always_right(stack, plain):
    row = decode(Batch(stack, Oracle(stack, plain, hits=[9]), None), num_draft_tokens=3, limit=11)
    assert row.token_ids == plain[:11]
    assert without_times(row.rounds) == [
        record(0, plain[:1], 0, 0, "prefill"),
        record(1, plain[1:5], 3, 3, "bonus"),
        record(2, plain[5:9], 3, 3, "bonus"),
        record(3, plain[9:11], 1, 1, "bonus", "length"),
    ]
    assert row.rounds[1].origins == ("accepted", "accepted", "accepted", "bonus")


def test_a_drafter_that_is_sometimes_right(stack, plain):
    oracle = Oracle(stack, plain, hits=[2, 0, 3])
    row = decode(Batch(stack, oracle, None), num_draft_tokens=3)
    assert row.token_ids == plain
    assert without_times(row.rounds) == [
        record(0, plain[:1], 0, 0, "prefill"),
        record(1, plain[1:4], 3, 2, "recovered"),
        record(2, plain[4:5], 3, 0, "recovered"),
        record(3, plain[5:9], 3, 3, "bonus"),
        record(4, plain[9:12], 2, 2, "bonus", "length"),
    ]
    assert oracle.asked == [3, 3, 3, 2]


def test_a_drafter_may_draft_less_than_asked(stack, plain):
    oracle = Oracle(stack, plain, hits=[9], most=1)
    row = decode(Batch(stack, oracle, None), num_draft_tokens=3, limit=5)
    assert row.token_ids == plain[:5]
    assert [len(r.token_ids) for r in row.rounds] == [1, 2, 2]


@pytest.mark.parametrize("hits", itertools.product([0, 1, 3], repeat=2))
@pytest.mark.parametrize("k", [0, 1, 3])
def test_positions_are_what_was_decoded_and_what_was_rejected(stack, plain, hits, k):
    row = decode(Batch(stack, Oracle(stack, plain, hits=hits), None), num_draft_tokens=k)
    rejected = sum(r.num_draft_tokens - r.num_accepted_tokens for r in row.rounds)
    assert sum(r.positions for r in row.rounds) == len(PROMPT) + LIMIT - 1 + rejected


@pytest.mark.parametrize("plan", PLANS)
def test_layer_0_sees_each_position_as_often_as_rounds_say(stack, plan, monkeypatch):
    """Counted at the layer itself, for plans that share it with the draft and one that does not."""
    seen = count_positions_through_layer_0(stack, monkeypatch)
    row = decode(self_drafting(stack, plan))
    drafted_apart = 0  # a draft that skips layer 0 never runs it, and shares nothing with verify
    assert len(seen) == sum(r.positions for r in row.rounds) + drafted_apart


def count_positions_through_layer_0(stack, monkeypatch) -> list[int]:
    seen, drive = [], stack._drive

    def counting(hidden, layers, layout):
        layers = tuple(layers)
        if 0 in layers:
            seen.extend(range(layout.num_tokens))
        return drive(hidden, layers, layout)

    monkeypatch.setattr(stack, "_drive", counting)
    return seen


# --- ends inside a block


@pytest.mark.parametrize("end", range(LIMIT))
@pytest.mark.parametrize("hits", [0, 2, 9])
def test_an_end_of_sequence_inside_a_block_cuts_it(stack, plain, end, hits):
    eos_ids = frozenset([plain[end]])
    batch = Batch(stack, Oracle(stack, plain, hits=[hits]), None)
    row = decode(batch, eos_ids=eos_ids)
    expected = plain[: plain.index(plain[end]) + 1]
    assert row.token_ids == expected
    assert row.finish_reason == "stop"
    assert batch.cache.lengths[0] == row.length == len(PROMPT) + len(expected) - 1
    last = row.rounds[-1]
    assert last.num_accepted_tokens <= len(last.token_ids) == len(last.origins)


@pytest.mark.parametrize("limit", range(1, 9))
@pytest.mark.parametrize("plan", [None, *PLANS])
def test_max_new_tokens_is_exact(stack, plain, limit, plan):
    batch = self_drafting(stack, plan) if plan else Batch(stack, Oracle(stack, plain, [9]), None)
    row = decode(batch, limit=limit)
    assert row.token_ids == plain[:limit]
    assert row.finish_reason == "length"
    assert batch.cache.lengths[0] == row.length == len(PROMPT) + limit - 1


def test_stop_strings_inside_a_block_cut_it(stack, plain, tokenizer):
    """Every piece of the text as a stop: inside tokens, across tokens and across rounds."""
    text = tokenizer.decode(plain)
    pieces = {text[i : i + n] for i in range(len(text)) for n in (1, 3)} - {""}
    assert len(pieces) > 15
    for stop in sorted(pieces):
        oracle = Oracle(stack, plain, hits=[9, 1])
        row = decode(Batch(stack, oracle, None), stream=TextStream(tokenizer, [stop]))
        slow = decode(Batch(stack, None, None), stream=TextStream(tokenizer, [stop]))
        assert row.token_ids == slow.token_ids == plain[: len(row.token_ids)]
        assert row.finish_reason == slow.finish_reason
        written = "".join(r.text for r in row.rounds)
        assert written == "".join(r.text for r in slow.rounds)
        assert (text.startswith(written + stop), row.finish_reason) == (True, "stop")
        assert row.length == slow.length


# --- scratch and cache


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED])
def test_what_lies_in_scratch_slots_never_matters(stack, plan, sampling):
    prompts = [PROMPT, random_ids(3), random_ids(125)]  # 125 crosses a block of 128 slots
    expected = [decode(Batch(stack, None, None), prompt=p, sampling=sampling) for p in prompts]
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
    slow, fast = Batch(stack, None, None), self_drafting(stack, plan)
    length = decode(slow, limit=40).length
    assert decode(fast, limit=40).length == length == fast.cache.lengths[0]
    assert torch.equal(fast.cache.keys[:, :, :length], slow.cache.keys[:, :, :length])
    assert torch.equal(fast.cache.values[:, :, :length], slow.cache.values[:, :, :length])


def test_one_cache_and_accepting_copies_nothing(stack, plain, monkeypatch):
    decode(self_drafting(stack))  # so that probing new pass sizes is over
    made, init = [], KVCache.__init__
    monkeypatch.setattr(
        KVCache, "__init__", lambda self, **kw: (made.append(self), init(self, **kw))[1]
    )
    batch = Batch(stack, Oracle(stack, plain, hits=[9]), None, num_slots=len(PROMPT) + 40)
    places = batch.cache.keys.data_ptr(), batch.cache.values.data_ptr()
    decode(batch)
    assert made == [batch.cache]
    assert (batch.cache.keys.data_ptr(), batch.cache.values.data_ptr()) == places


# --- interruptions


class Interruption:
    """Calls through ``times`` times, then raises after the work is done, once."""

    def __init__(self, function: Callable, times: int, error: type[BaseException]) -> None:
        self.function, self.left, self.error = function, times, error

    def __call__(self, *args, **kwargs):
        result = self.function(*args, **kwargs)
        self.left -= 1
        if self.left == -1:
            raise self.error
        return result


def snapshot(batch: Batch) -> list:
    rows = batch.rows.values()
    state = [(list(r.token_ids), list(r.rounds), r.length, r.finish_reason) for r in rows]
    return [*state, batch.cache.lengths.tolist()]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["run_layers", "logits", "embed"])
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED])
def test_a_round_that_breaks_off_changes_nothing(stack, monkeypatch, error, place, sampling):
    """Wherever in draft or verify it breaks off, the next step goes on to the same text."""
    prompts = [PROMPT, random_ids(5)]
    expected = [decode(Batch(stack, None, None), prompt=p, sampling=sampling) for p in prompts]
    for times in range(9):  # a round of four drafts makes 14, 5 and 5 of these calls
        batch = self_drafting(stack)
        rows = [join(batch, p, sampling=sampling) for p in prompts]
        batch.step()
        before = snapshot(batch)
        broken = Interruption(getattr(stack, place), times, error)
        with monkeypatch.context() as patch:
            patch.setattr(stack, place, broken)
            while broken.left >= 0:
                before = snapshot(batch)
                try:
                    batch.step()
                except error:
                    break
        assert snapshot(batch) == before
        while any(row.finish_reason is None for row in rows):
            batch.step()
        assert [row.token_ids for row in rows] == [row.token_ids for row in expected]
