"""Rounds that the device runs, and errors and interruptions at every point: nothing is lost."""

import contextlib

import pytest
import torch
from device_rounds import EXIT, PROMPTS, assert_same, decode, decoder_of, finish, spec
from toys import make_model, make_tokenizer

from layerskip.cache import KVCache
from layerskip.drafting import EarlyExitDrafter
from layerskip.graphs import RepeatingRecorder
from layerskip.model import pack_model
from layerskip.packed import PackedStack
from layerskip.seats import Ring, Seats
from layerskip.speculation import Speculator
from layerskip.text import TextStream
from layerskip.workbench import Workbench


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
