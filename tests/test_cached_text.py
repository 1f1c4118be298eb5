"""Returned caches: the same bits with drafts and without, and next turns that go on from them."""

import copy
import dataclasses
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import DTYPES, FAMILIES, PLANS, make_model, random_ids

from layerskip import GenerationOutput, SamplingParams, SelfSpeculativeLM
from layerskip.cache import CachedText

SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=3)
MODES = {"greedy": SamplingParams(), "sampled": SAMPLED}
PROMPT = random_ids(61)


def run(lm: SelfSpeculativeLM, prompt: Any = PROMPT, **more: Any) -> Any:
    return lm.generate(prompt, **{"max_new_tokens": 12, "return_cache": True, "logprobs": 2} | more)


def assert_same_bits(one: CachedText, other: CachedText) -> None:
    assert one.token_ids == other.token_ids
    assert torch.equal(one.keys, other.keys)
    assert torch.equal(one.values, other.values)


def assert_same(one: GenerationOutput, other: GenerationOutput) -> None:
    """Tokens, log-probabilities to the bit, and caches."""
    assert one.token_ids == other.token_ids
    assert one.logprobs == other.logprobs
    assert one.finish_reason == other.finish_reason
    assert one.stats.cached_tokens == other.stats.cached_tokens
    assert_same_bits(one.cache, other.cache)


def assert_close(one: GenerationOutput, other: GenerationOutput) -> None:
    """Tokens, and log-probabilities up to rounding: other prefill shapes round otherwise."""
    assert one.token_ids == other.token_ids
    expected = [entry.logprob for entry in other.logprobs]
    assert [entry.logprob for entry in one.logprobs] == pytest.approx(expected, abs=1e-4)


def assert_counted(out: GenerationOutput, prompt: list[int], cached: int) -> None:
    """Layer 0 saw what was not cached, what was decoded and what was rejected, each once."""
    stats = out.stats
    assert (stats.prompt_tokens, stats.cached_tokens) == (len(prompt), cached)
    rejected = sum(r.positions - len(r.token_ids) for r in out.rounds[1:])
    expected = len(prompt) - cached + stats.new_tokens - 1 + rejected
    assert stats.positions_through_first_layer == expected
    assert rejected == sum(r.num_draft_tokens + 1 - len(r.token_ids) for r in out.rounds[1:])


def next_prompt(out: GenerationOutput, seed: int) -> list[int]:
    """The whole text so far, and what a user says to it."""
    return [*out.cache.token_ids, out.token_ids[-1], *random_ids(7, seed=seed)]


# Every run takes both dtypes and modes, and each family once or more.
ALL_TURNS = [(f, d, m) for f in FAMILIES for d in DTYPES for m in MODES]


@pytest.mark.parametrize(
    ("family", "dtype", "mode"),
    [
        pytest.param(*c, marks=() if i % 3 == 0 else pytest.mark.slow)
        for i, c in enumerate(ALL_TURNS)
    ],
)
def test_three_turns_are_those_of_plain_decoding(wrap, family, dtype, mode):
    """Tokens, log-probabilities and caches, whichever decoding a turn goes on from."""
    lm = wrap("exit", family, dtype)
    slow = run(lm, sampling=MODES[mode], num_draft_tokens=0)
    quick = run(lm, sampling=MODES[mode])
    assert slow.cache.token_ids == (*PROMPT, *slow.token_ids[:-1])
    assert_same(quick, slow)
    for turn in (1, 2):
        prompt = next_prompt(slow, turn)
        held = len(slow.cache.token_ids)
        rest = {"sampling": MODES[mode], "num_draft_tokens": 3 * turn}
        crossed = run(lm, prompt, cache=slow.cache, **rest)
        slow = run(lm, prompt, cache=quick.cache, **rest | {"num_draft_tokens": 0})
        quick = run(lm, prompt, cache=quick.cache, **rest)
        assert_same(quick, slow)
        assert_same(crossed, slow)
        for out in (slow, quick):
            assert_counted(out, prompt, held)
    if dtype == "float32":
        assert_close(quick, run(lm, prompt, sampling=MODES[mode]))


@pytest.mark.parametrize("plan", [p for p in PLANS if p != "exit"])
def test_other_plans_leave_the_same_bits(wrap, plan):
    assert_same(run(wrap(plan), num_draft_tokens=6), run(wrap(plan), num_draft_tokens=0))


@pytest.mark.parametrize("verification", ["token", "block"])
def test_verification_by_distribution_leaves_what_plain_decoding_of_its_text_does(
    wrap, verification
):
    lm, hot = wrap("exit"), SamplingParams(temperature=1.2, seed=1)
    out = run(lm, sampling=hot, verification=verification)
    forced = SamplingParams(forced_token_ids=out.token_ids)
    assert_same_bits(out.cache, run(lm, sampling=forced, num_draft_tokens=0).cache)
    assert out.stats.num_accepted_tokens > 0


@settings(max_examples=15)
@given(st.integers(0, 72), st.integers(1, 9), st.sampled_from(list(MODES)), st.integers(0, 5))
def test_what_a_prompt_shares_is_taken_and_no_more(wrap, shared, more, mode, k):
    """A prompt that parts from the cache after ``shared`` tokens, or ends there."""
    lm = wrap("exit")
    cache = run(lm).cache
    other = [(token + 1) % 331 for token in random_ids(more, seed=9)]
    prompt = [*cache.token_ids[:shared], *other]
    if shared < len(cache.token_ids) and other[0] == cache.token_ids[shared]:
        prompt[shared] = (other[0] + 1) % 331
    settings = {"sampling": MODES[mode], "max_new_tokens": 6}
    out = run(lm, prompt, cache=cache, num_draft_tokens=k, **settings)
    assert_counted(out, prompt, shared)
    assert_same(out, run(lm, prompt, cache=cache, num_draft_tokens=0, **settings))
    (assert_close if shared else assert_same)(out, run(lm, prompt, **settings))


@pytest.mark.parametrize("length", [1, 2, 40, 72])
def test_a_cache_may_be_longer_than_the_prompt(wrap, length):
    """The last token of a prompt always runs: what follows it is not in a cache."""
    lm = wrap("exit")
    cache = run(lm).cache
    prompt = list(cache.token_ids[:length])
    out = run(lm, prompt, cache=cache)
    assert_counted(out, prompt, length - 1)
    assert_same(out, run(lm, prompt, cache=cache, num_draft_tokens=0))
    assert_close(out, run(lm, prompt))
    inside = len(PROMPT) <= length < len(PROMPT) + 12
    if inside:  # the text goes on as it did
        again = out.token_ids[: len(cache.token_ids) - length]
        assert again == cache.token_ids[length : length + len(again)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("held", [1, 511, 512, 513])
def test_prefixes_around_the_chunk_of_a_prefill(wrap, held, dtype):
    lm, prompt = wrap("exit", "llama", dtype), random_ids(530)
    cache = run(lm, prompt[:held], max_new_tokens=1).cache
    assert cache.token_ids == tuple(prompt[:held])
    out = run(lm, prompt, cache=cache)
    assert_counted(out, prompt, held)
    assert_same(out, run(lm, prompt, cache=cache, num_draft_tokens=0))
    fresh = run(lm, prompt)
    if held == 512:  # the same chunks as without a cache, so the same bits
        assert out.logprobs == fresh.logprobs
        assert_same_bits(out.cache, fresh.cache)
    elif dtype == "float32":
        assert_close(out, fresh)


def test_what_is_held_is_read_not_computed_again(wrap):
    """A cache that lies is believed."""
    lm, out = wrap("exit"), run(wrap("exit"))
    prompt = next_prompt(out, 1)
    lie = dataclasses.replace(out.cache, values=-out.cache.values)
    assert run(lm, prompt, cache=lie).logprobs != run(lm, prompt, cache=out.cache).logprobs


def test_one_cache_serves_many_rows_and_is_not_written(wrap):
    """Alone, twice, in a batch of prompts that share different parts, and while rows decode."""
    lm = wrap("exit")
    out = run(lm)
    before = copy.deepcopy(out.cache)
    prompts = [next_prompt(out, 1), next_prompt(out, 2), PROMPT[:20], random_ids(5)]
    alone = [run(lm, p, cache=out.cache) for p in prompts]
    assert [o.stats.cached_tokens for o in alone] == [72, 72, 19, 0]
    for together, expected in zip(run(lm, prompts, cache=out.cache), alone, strict=True):
        assert_same(together, expected)
    batch = lm.open_batch(max_new_tokens=12, return_cache=True, logprobs=2)
    rows = []
    for prompt in prompts:
        rows.append(batch.add(prompt, cache=out.cache))
        batch.step()
    while batch.unfinished:
        batch.step()
    for row, expected in zip(rows, alone, strict=True):
        assert_same(batch.remove(row), expected)
    assert_same_bits(out.cache, before)


def test_sequences_of_one_prompt_share_a_cache(wrap):
    lm = wrap("exit")
    cache = run(lm, max_new_tokens=1).cache
    outputs = run(lm, [*PROMPT, 7], cache=cache, num_return_sequences=3, sampling=SAMPLED)
    assert len({out.token_ids for out in outputs}) == 3
    assert {out.stats.cached_tokens for out in outputs} == {61}
    third = dataclasses.replace(SAMPLED, seed=5)
    assert_same(outputs[2], run(lm, [*PROMPT, 7], cache=cache, sampling=third))


def test_a_cache_is_a_copy_of_its_own_size(wrap):
    """It neither follows the rows that take its place nor keeps a batch's memory."""
    lm = wrap("exit")
    expected = run(lm).cache
    batch = lm.open_batch(max_new_tokens=12, return_cache=True)
    row, other = batch.add(PROMPT), batch.add(random_ids(30))
    while row in batch.unfinished:
        batch.step()
    cache = batch.remove(row).cache
    batch.add(random_ids(100), max_new_tokens=60)
    while batch.unfinished:
        batch.step()
    assert_same_bits(cache, expected)
    assert other not in batch.unfinished
    for tensor in (cache.keys, cache.values):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", range(5))
def test_a_row_removed_early_goes_on_later(wrap, mode, steps):
    lm = wrap("exit")
    batch = lm.open_batch(max_new_tokens=12, return_cache=True, sampling=MODES[mode])
    row = batch.add(PROMPT)
    for _ in range(steps):
        batch.step()
    early = batch.remove(row)
    held = (*PROMPT, *early.token_ids)[:-1] if steps else ()
    assert (early.finish_reason, early.cache.token_ids) == ("cancelled", held)
    rest = run(
        lm,
        [*PROMPT, *early.token_ids],
        cache=early.cache,
        sampling=MODES[mode],
        max_new_tokens=12 - len(early.token_ids),
    )
    whole = run(lm, sampling=MODES[mode])
    assert early.token_ids + rest.token_ids == whole.token_ids
    assert rest.stats.cached_tokens == len(held)


def test_a_row_removed_before_its_prefill_gives_back_what_it_was_given(wrap):
    lm = wrap("exit")
    cache = run(lm).cache
    batch = lm.open_batch(return_cache=True, cache=cache)
    out = batch.remove(batch.add([*PROMPT[:9], 1, 2]))
    assert out.cache.token_ids == tuple(PROMPT[:9])
    assert torch.equal(out.cache.keys, cache.keys[:, :9])
    assert out.stats.positions_through_first_layer == 0


def test_no_cache_unless_asked_for(wrap):
    assert run(wrap("exit"), return_cache=False).cache is None


def test_a_stream_goes_on_from_a_cache(wrap):
    lm = wrap("exit")
    out = run(lm)
    prompt = next_prompt(out, 1)
    steps = list(lm.stream(prompt, cache=out.cache, max_new_tokens=12))
    expected = run(lm, prompt, cache=out.cache)
    assert tuple(t for step in steps for t in step.token_ids) == expected.token_ids
    assert steps[0].positions == len(prompt) - len(out.cache.token_ids)


def foreign(wrap: Any) -> list[CachedText]:
    """Of another model, in another dtype, and of a wrapper that is gone."""
    gone = run(SelfSpeculativeLM(make_model(), None, PLANS["exit"], num_draft_tokens=4)).cache
    gc.collect()
    others = [wrap("exit", "mistral"), wrap("exit", "llama", "bfloat16"), wrap("skipping")]
    return [gone, *(run(other).cache for other in others)]


def test_caches_of_others_are_refused(wrap):
    lm, sentence = wrap("exit"), "cache was made by another SelfSpeculativeLM; use the one"
    batch = lm.open_batch()
    for cache in foreign(wrap):
        for method in (lm.generate, lm.stream, batch.add):
            with pytest.raises(ValueError, match=sentence):
                method(PROMPT, cache=cache)
        with pytest.raises(ValueError, match=sentence):
            lm.open_batch(cache=cache)
    assert batch.unfinished == []


@pytest.mark.parametrize("joined", [False, True])
def test_a_cache_of_weights_that_have_changed_is_refused(joined):
    """Whether they changed after its row or while it decoded."""
    model, sentence = make_model(), "cache was made before the model's weights changed; leave it"
    lm = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4)
    before = run(lm).cache
    batch = lm.open_batch(max_new_tokens=12, return_cache=True)
    row = batch.add(PROMPT)
    batch.step()
    early = None if joined else batch.remove(row).cache
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight.mul_(1.5)
    for cache in (before, early or batch.remove(row).cache):
        for method in (lm.generate, lm.stream, batch.add):
            with pytest.raises(ValueError, match=sentence):
                method(PROMPT, cache=cache)
    after = run(lm)
    assert run(lm, cache=after.cache).token_ids == after.token_ids


def test_weights_that_change_before_the_first_step_leave_nothing_of_a_cache():
    model = make_model()
    lm = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4)
    old, batch = run(lm).cache, lm.open_batch(max_new_tokens=12, return_cache=True)
    rows = [batch.add(PROMPT, cache=old), batch.add(PROMPT)]
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    while batch.unfinished:
        batch.step()
    fresh = run(lm)
    for out in map(batch.remove, rows):
        assert (out.token_ids, out.stats.cached_tokens) == (fresh.token_ids, 0)
        assert_same_bits(out.cache, fresh.cache)
        assert run(lm, cache=out.cache).token_ids == fresh.token_ids


def test_weights_whose_changes_nobody_counts_leave_caches_as_they_are():
    with torch.inference_mode():
        model = make_model()
    lm = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4)
    out = run(lm)
    assert run(lm, cache=out.cache).token_ids == out.token_ids


@pytest.mark.parametrize("value", [True, (), "cache", {"keys": 1}])
def test_a_cache_is_that_of_an_output(wrap, value):
    with pytest.raises(TypeError, match="cache must be the cache of an earlier output, got"):
        wrap("exit").generate(PROMPT, cache=value)


def test_an_output_with_a_cache_is_a_value_like_others(wrap):
    lm = wrap("exit")
    out = run(lm)
    assert repr(out.cache) == f"CachedText(token_ids={out.cache.token_ids})"
    assert "cache" not in repr(out).replace("kv_cache", "").replace("cached_tokens", "")
    again = copy.deepcopy(out)
    assert again == out
    prompt = next_prompt(out, 1)
    assert_same(run(lm, prompt, cache=again.cache), run(lm, prompt, cache=out.cache))
    assert dataclasses.asdict(out)["cache"]["token_ids"] == out.cache.token_ids


def test_an_output_with_a_cache_can_be_pickled_but_not_gone_on_from(wrap):
    lm = wrap("exit")
    out = run(lm)
    again = pickle.loads(pickle.dumps(out))
    assert again == out
    assert_same_bits(again.cache, out.cache)
    with pytest.raises(ValueError, match="cache was made by another SelfSpeculativeLM"):
        run(lm, cache=again.cache)
    assert run(lm, cache=out.cache).token_ids == out.token_ids  # which is as it was


def test_a_cache_keeps_no_model_alive():
    lm = SelfSpeculativeLM(make_model(), None, PLANS["exit"], num_draft_tokens=4)
    stack, cache = weakref.ref(lm.stack), run(lm).cache
    del lm
    gc.collect()
    assert stack() is None
    assert cache.source() is None
