"""Ends inside a block: text, statistics and cache are those of plain decoding, and so is what
comes after."""

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import PLANS, byte_symbols, make_model, random_ids
from transformers import PreTrainedTokenizerFast

from layerskip import GenerationOutput, SamplingParams, SelfSpeculativeLM
from layerskip.cache import KVCache

EOS = [1, 44, 120, 121, 200, 290, 302, 310]
EAGER = dict.fromkeys(EOS, 2.5)  # so that a text meets one of them sooner or later
MODES = {
    "greedy": SamplingParams(logit_bias=EAGER),
    "sampled": SamplingParams(logit_bias=EAGER, temperature=0.9, top_p=0.95, seed=8),
}
PROMPTS = ["the tea 😀", "a", "on it we rest"]
LIMIT = 20


@pytest.fixture(scope="module")
def lms(tokenizer: PreTrainedTokenizerFast) -> dict[str, SelfSpeculativeLM]:
    """Wrappers of a model with many ends of sequence."""
    model = make_model()
    model.generation_config.eos_token_id = EOS
    return {
        name: SelfSpeculativeLM(model, tokenizer, plan, lookup=False)
        for name, plan in PLANS.items()
    }


def run(lm: SelfSpeculativeLM, prompt: Any, **more: Any) -> GenerationOutput:
    return lm.generate(prompt, **{"max_new_tokens": LIMIT, "return_cache": True} | more)


def assert_counted(out: GenerationOutput) -> None:
    """The sums of a row's rounds agree with each other and with its text."""
    stats, (first, *rounds) = out.stats, out.rounds
    assert tuple(t for r in out.rounds for t in r.token_ids) == out.token_ids
    assert "".join(r.text for r in out.rounds) == out.text
    assert [r.finish_reason for r in out.rounds[:-1]] == [None] * len(rounds)
    assert out.rounds[-1].finish_reason == out.finish_reason
    assert (first.origin, len(first.token_ids)) == ("prefill", 1)
    after = [r for r in rounds if r.origins[-1] != "accepted"]  # rounds that were not cut
    assert all(r in after for r in rounds[:-1])
    assert stats.new_tokens == len(out.token_ids) == 1 + stats.num_accepted_tokens + len(after)
    assert stats.num_rounds == len(rounds)
    for r in rounds:
        assert 0 <= r.num_accepted_tokens <= min(r.num_draft_tokens, len(r.token_ids))
        assert r.positions == r.num_draft_tokens + 1
    rejected = sum(r.positions - len(r.token_ids) for r in rounds)
    positions = stats.prompt_tokens - stats.cached_tokens + stats.new_tokens - 1 + rejected
    assert stats.positions_through_first_layer == positions
    held = stats.prompt_tokens + stats.new_tokens - 1
    assert out.cache is None or len(out.cache.token_ids) == held


def assert_same(fast: GenerationOutput, slow: GenerationOutput) -> None:
    for out in (fast, slow):
        assert_counted(out)
    for name in ("text", "token_ids", "finish_reason", "seed"):
        assert getattr(fast, name) == getattr(slow, name)
    for name in ("prompt_tokens", "cached_tokens", "new_tokens"):
        assert getattr(fast.stats, name) == getattr(slow.stats, name)
    assert fast.cache.token_ids == slow.cache.token_ids
    assert torch.equal(fast.cache.keys, slow.cache.keys)
    assert torch.equal(fast.cache.values, slow.cache.values)


@settings(max_examples=12)
@given(st.data())
def test_any_end_is_that_of_plain_decoding_and_so_is_the_next_turn(lms, data):
    plan, mode = data.draw(st.sampled_from(list(PLANS))), data.draw(st.sampled_from(list(MODES)))
    lm, k = lms[plan], data.draw(st.integers(1, 9))
    request = {"sampling": MODES[mode], "ignore_eos": data.draw(st.booleans())}
    prompt = data.draw(st.sampled_from(PROMPTS))
    whole = run(lm, prompt, num_draft_tokens=0, **request).text
    if data.draw(st.booleans()) and whole:
        start = data.draw(st.integers(0, len(whole) - 1))
        request["stop"] = ["no", whole[start : start + data.draw(st.integers(1, 4))]]
    request["max_new_tokens"] = data.draw(st.integers(1, LIMIT))
    slow = run(lm, prompt, num_draft_tokens=0, **request)
    fast = run(lm, prompt, num_draft_tokens=k, **request)
    assert_same(fast, slow)
    following = [*slow.cache.token_ids, slow.token_ids[-1], *random_ids(5)]
    request["max_new_tokens"] = 8
    slow = run(lm, following, cache=slow.cache, num_draft_tokens=0, **request)
    fast = run(lm, following, cache=fast.cache, num_draft_tokens=k, **request)
    assert_same(fast, slow)
    assert slow.stats.cached_tokens == len(following) - 6


def test_texts_do_meet_their_ends(lms):
    """The test above would say little if no end of sequence ever cut a block."""
    prompts = [random_ids(n) for n in range(1, 13)]
    outs = [
        run(lms["exit"], prompt, sampling=params, num_draft_tokens=6)
        for prompt in prompts
        for params in MODES.values()
    ]
    last = [out.rounds[-1] for out in outs if out.finish_reason == "stop"]
    assert len(last) > len(outs) / 2
    assert len({r.token_ids[-1] for r in last}) > 3
    assert sum(r.num_draft_tokens > r.num_accepted_tokens == len(r.token_ids) for r in last) > 3


# A text that is forced is drafted right every time: whole blocks are accepted, and the end can be
# put on any token of any block.

TEXT = "ea 😀é😀\u0301 END 😀."


def forced(tokenizer: PreTrainedTokenizerFast, text: str, by_bytes: bool) -> SamplingParams:
    """Sampling that emits ``text``; by single bytes no character beyond ASCII is one token."""
    symbols = byte_symbols()
    pieces = [symbols[byte] for byte in text.encode()] if by_bytes else tokenizer.tokenize(text)
    ids = tokenizer.convert_tokens_to_ids(pieces)
    assert not set(ids) & set(EOS)
    return SamplingParams(forced_token_ids=ids)


@pytest.mark.parametrize(("by_bytes", "k"), [(False, 2), (True, 5)])
def test_stop_strings_span_blocks_tokens_and_characters(lms, tokenizer, by_bytes, k):
    params, lm = forced(tokenizer, TEXT, by_bytes), lms["exit"]
    pieces = {TEXT[i : i + n] for i in range(len(TEXT)) for n in (1 + i % 3,)}
    for stop in sorted(pieces):
        request = {"sampling": params, "stop": stop, "max_new_tokens": 40}
        fast = run(lm, "a", num_draft_tokens=k, **request)
        assert_same(fast, run(lm, "a", num_draft_tokens=0, **request))
        assert (fast.text, fast.finish_reason) == (TEXT[: TEXT.index(stop)], "stop")
        assert {r.origin for r in fast.rounds[1:-1]} <= {"bonus"}  # whole blocks were accepted


def test_a_limit_inside_a_character_is_that_of_plain_decoding(lms, tokenizer):
    params = forced(tokenizer, TEXT, by_bytes=True)
    for limit in range(4, 13):  # through an emoji and é
        request = {"sampling": params, "max_new_tokens": limit}
        fast = run(lms["exit"], "a", num_draft_tokens=4, **request)
        assert_same(fast, run(lms["exit"], "a", num_draft_tokens=0, **request))
        assert fast.text == tokenizer.decode(params.forced_token_ids[:limit])
        assert fast.finish_reason == "length"


@pytest.mark.parametrize("eos", EOS)
@pytest.mark.parametrize("place", range(7))
def test_any_of_several_ends_of_sequence_ends_at_any_place(lms, eos, place):
    """It is emitted, it is no text, and what a stop string held back comes out before it."""
    body = [79, 80, 78, 81, 77, 82][:place]  # no token of these is an end
    params = SamplingParams(forced_token_ids=[*body, eos, 90, 91])
    out = run(lms["exit"], "a", sampling=params, num_draft_tokens=4, stop="".join("never" * 2))
    assert (list(out.token_ids), out.finish_reason) == ([*body, eos], "stop")
    assert out.text == lms["exit"].tokenizer.decode(body)
    assert_same(out, run(lms["exit"], "a", sampling=params, num_draft_tokens=0))


def test_what_was_held_back_comes_out_at_an_end_of_sequence(lms, tokenizer):
    ids = [*forced(tokenizer, "tEN", by_bytes=True).forced_token_ids, EOS[0]]
    params = SamplingParams(forced_token_ids=ids)
    for k in (0, 1, 5):
        out = run(lms["exit"], "a", sampling=params, stop="END", num_draft_tokens=k)
        assert (out.text, out.finish_reason) == ("tEN", "stop")


@pytest.mark.parametrize("k", [0, 1, 2, 3, 8])
def test_two_ends_at_once(lms, tokenizer, k):
    """On the last token that is allowed, an end of sequence or a stop string still says so."""
    body = forced(tokenizer, "tea", by_bytes=True).forced_token_ids
    for ids, stop in [((*body, EOS[1]), "no"), (body, "ea")]:
        params = SamplingParams(forced_token_ids=ids)
        request = {"sampling": params, "stop": stop, "num_draft_tokens": k}
        out = run(lms["exit"], "a", max_new_tokens=len(ids), **request)
        assert (out.token_ids, out.finish_reason) == (ids, "stop")
        assert (
            run(lms["exit"], "a", max_new_tokens=len(ids) - 1, **request).finish_reason == "length"
        )


@pytest.mark.parametrize("k", [0, 3])
def test_a_stop_string_that_only_the_end_completes(lms, tokenizer, k):
    """Bytes that never become a character are held back until the limit, and are text then."""
    broken = forced(tokenizer, "t😀", by_bytes=True).forced_token_ids[:3]
    request = {"sampling": SamplingParams(forced_token_ids=broken), "num_draft_tokens": k}
    out = run(lms["exit"], "a", stop="\ufffd", max_new_tokens=3, **request)
    assert (out.text, out.token_ids, out.finish_reason) == ("t", broken, "stop")


def test_stop_strings_end_before_min_new_tokens(lms, tokenizer):
    params = replace(forced(tokenizer, "tea", by_bytes=True), min_new_tokens=9)
    out = run(lms["exit"], "a", sampling=params, stop="e")
    assert (out.text, len(out.token_ids)) == ("t", 2)


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("k", [2, 6])
def test_ends_under_verification_by_distribution(lms, verification, k):
    """The text is of its own: plain decoding that is forced to it ends as it does."""
    lm, ends = lms["exit"], set()
    for n in range(1, 13):
        params = replace(MODES["sampled"], seed=n, temperature=1.2)
        request = {"verification": verification, "num_draft_tokens": k, "stop": ["e", "o"]}
        fast = run(lm, random_ids(n), sampling=params, **request)
        same = SamplingParams(forced_token_ids=fast.token_ids)
        slow = run(lm, random_ids(n), sampling=same, num_draft_tokens=0, stop=["e", "o"])
        assert_same(replace(fast, seed=None), slow)
        ends.add((fast.finish_reason, fast.rounds[-1].origins[-1]))
    assert ("stop", "accepted") in ends


# Rows that end, or are left, while others go on.


def rows_alone(lm: SelfSpeculativeLM, requests: list[dict[str, Any]]) -> list[GenerationOutput]:
    return [run(lm, num_draft_tokens=0, **request) for request in requests]


REQUESTS = [
    {"prompt": random_ids(n), "sampling": MODES[mode], "max_new_tokens": limit}
    for n, mode, limit in [
        *((2, "greedy", 3), (130, "sampled", 24), (9, "greedy", 24), (5, "sampled", 1)),
        *((40, "sampled", 17), (500, "greedy", 9), (1, "greedy", 24)),
    ]
]


@pytest.mark.parametrize("at_once", [True, False], ids=["removed-at-once", "removed-at-the-end"])
@pytest.mark.parametrize("plan", PLANS)
def test_rows_that_end_leave_the_others_alone(lms, plan, at_once):
    lm = lms[plan]
    batch = lm.open_batch(return_cache=True)
    rows = {batch.add(num_draft_tokens=i % 7, **r): i for i, r in enumerate(REQUESTS)}
    outputs = {}
    while batch.unfinished:
        for record in batch.step():
            if record.finish_reason is not None and at_once:
                outputs[rows[record.row]] = batch.remove(record.row)
    assert batch.step() == []
    outputs |= {i: batch.remove(row) for row, i in rows.items() if i not in outputs}
    for i, expected in enumerate(rows_alone(lm, REQUESTS)):
        assert_same(outputs[i], expected)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_row_that_is_left_leaves_the_others_alone(lms, steps):
    lm = lms["exit"]
    batch = lm.open_batch(return_cache=True, ignore_eos=True)
    left, *rows = [batch.add(**request) for request in REQUESTS]
    for _ in range(steps):
        batch.step()
    early = batch.remove(left)
    while batch.unfinished:
        batch.step()
    for row, request in zip(rows, REQUESTS[1:], strict=True):
        assert_same(batch.remove(row), run(lm, num_draft_tokens=0, ignore_eos=True, **request))
    whole = run(lm, num_draft_tokens=0, ignore_eos=True, **REQUESTS[0])
    assert early.token_ids == whole.token_ids[: len(early.token_ids)] != ()


def leave(stream: Any) -> None:
    stream.close()


def throw(stream: Any) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt)


def forget(stream: Any) -> None:
    del stream


@pytest.mark.parametrize("stop", [leave, throw, forget])
@pytest.mark.parametrize("mode", MODES)
def test_a_consumer_that_stops_leaves_nothing_behind(lms, monkeypatch, mode, stop: Callable):
    """What it has seen is the beginning of the whole text, and the cache is gone with it."""
    lm, request = lms["exit"], {"sampling": MODES[mode], "ignore_eos": True}
    whole = run(lm, "the tea", num_draft_tokens=0, **request)
    caches, init = [], KVCache.__init__
    monkeypatch.setattr(
        KVCache,
        "__init__",
        lambda self, **kw: (caches.append(weakref.ref(self)), init(self, **kw))[1],
    )
    for steps in range(1, 5):
        stream = lm.stream("the tea", max_new_tokens=LIMIT, num_draft_tokens=3, **request)
        seen = [next(stream) for _ in range(steps)]
        tokens = tuple(t for step in seen for t in step.token_ids)
        assert tokens == whole.token_ids[: len(tokens)]
        assert whole.text.startswith("".join(step.text for step in seen))
        assert caches[-1]() is not None
        stop(stream)
        del stream
        assert caches[-1]() is None
    assert_same(run(lm, "the tea", **request), whole)
