"""What rows of one cache do to each other, and what an interrupted round leaves: nothing."""

import pytest
import torch
from decoding import PROMPT, SAMPLED, Oracle, decode, join, self_drafting
from toys import PLANS, random_ids

from layerskip import SamplingParams
from layerskip.cache import KVCache
from layerskip.decode import Decoder
from layerskip.model import DecoderStack


@pytest.fixture(scope="module")
def stack(wrap) -> DecoderStack:
    return wrap("exit").stack


@pytest.fixture(scope="module")
def plain(stack) -> list[int]:
    return decode(Decoder(stack, None, None)).token_ids


# --- scratch and cache


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
    batch = Decoder(stack, Oracle(stack, plain, hits=[9]), None, num_slots=len(PROMPT) + 40)
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


def snapshot(batch: Decoder) -> list:
    rows = batch.rows.values()
    state = [(list(r.token_ids), list(r.rounds), r.length, r.finish_reason) for r in rows]
    return [*state, batch.cache.lengths.tolist()]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["run_layers", "logits", "embed"])
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED])
def test_a_round_that_breaks_off_changes_nothing(stack, monkeypatch, error, place, sampling):
    """Wherever in draft or verify it breaks off, the next step goes on to the same text."""
    prompts = [PROMPT, random_ids(5)]
    expected = [decode(Decoder(stack, None, None), prompt=p, sampling=sampling) for p in prompts]
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
