"""Decoding with an exit adapter: what it changes of drafts, and that it changes nothing else."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from adapters import EXIT, KINDS, make_adapter
from decoding import Interruption
from speculating import Scripted
from test_cached_text import assert_same, next_prompt
from torch import Tensor
from toys import DTYPES, NUM_LAYERS, PLANS, make_model, random_ids, without_times

from layerskip import (
    GenerationOutput,
    LookupStore,
    PlanFile,
    SamplingParams,
    SelfSpeculativeLM,
)
from layerskip.control.stopping import PLAIN, Choice
from layerskip.drafting import EarlyExitDrafter
from layerskip.exit_adapter import AdaptedHead, ExitAdapter
from layerskip.model import DecoderStack

PROMPT = random_ids(61)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=3)
MODES = {"greedy": SamplingParams(), "sampled": SAMPLED}
NEW = 16
DRAFT = Choice("early_exit", 3)
SCHEDULES = {
    "never": (PLAIN,),
    "always": (DRAFT,),
    "every other round": (PLAIN, DRAFT),
    "now and then": (PLAIN, PLAIN, PLAIN, DRAFT, DRAFT),
    "long pauses": (*[PLAIN] * 11, DRAFT),
    "looked up": (Choice("lookup", 4), DRAFT),
    # Verifying costs nothing: whatever is looked up behind the draft goes with it.
    "looked up behind drafts": (Choice("early_exit", 1, verify_seconds=(0.0,) * 16), DRAFT),
}


@pytest.fixture(scope="module")
def adapt(toy) -> Callable[..., SelfSpeculativeLM]:
    """``adapt(kind, dtype, family)``: a toy with an adapter after ``EXIT`` layers."""

    @functools.cache
    def build(kind: str = "block", dtype: str = "float32", family: str = "llama"):
        model = toy(family, dtype)
        adapter = make_adapter(model, kind)
        return SelfSpeculativeLM(model, num_draft_tokens=4, lookup=False, exit_adapter=adapter)

    return build


def run(lm: SelfSpeculativeLM, prompt: Any = PROMPT, **more: Any) -> Any:
    return lm.generate(
        prompt, **{"max_new_tokens": NEW, "return_cache": True, "logprobs": 2} | more
    )


def model_s_own(out: GenerationOutput) -> tuple[Any, ...]:
    """Tokens, log-probabilities, and keys and values of the model's layers."""
    assert out.cache is not None
    return out.token_ids, out.logprobs, out.cache.keys[:NUM_LAYERS], out.cache.values[:NUM_LAYERS]


def assert_same_output(one: GenerationOutput, other: GenerationOutput) -> None:
    """To the bit, whatever an adapter keeps beside."""
    for a, b in zip(model_s_own(one), model_s_own(other), strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


ALL_WAYS = [(k, m, d) for k in KINDS for m in MODES for d in DTYPES]
QUICK_WAYS = {("head", "greedy", "float32"), ("bridge", "sampled", "bfloat16")}


def slow_unless(quick: bool, *values: Any) -> Any:
    return pytest.param(*values, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "mode", "dtype"),
    [slow_unless(way[0] == "block" or way in QUICK_WAYS, *way) for way in ALL_WAYS],
)
def test_the_output_is_that_of_the_model_alone(adapt, wrap, kind, mode, dtype):
    """Tokens, log-probabilities and caches, alone and in a ragged batch."""
    lm, sampling = adapt(kind, dtype), MODES[mode]
    prompts = [PROMPT, random_ids(5), random_ids(130)]
    plain = run(wrap(None, "llama", dtype), prompts, sampling=sampling)
    together = run(lm, prompts, sampling=sampling)
    alone = run(lm, PROMPT, sampling=sampling)
    for one, other in zip((*together, alone), (*plain, plain[0]), strict=True):
        assert_same_output(one, other)
    assert_same(alone, together[0])
    assert alone.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_it_drafts_what_its_training_form_says(adapt, kind, monkeypatch):
    """Every drafted token, from the whole text before it."""
    lm = adapt(kind)
    drafts = recorded(monkeypatch)
    out = run(lm)
    assert len(drafts) > 5
    text = (*PROMPT, *out.token_ids)
    for length, tokens in drafts.items():
        ahead = [*text[: length + 1]]
        for token in tokens:
            assert int(trained_logits(lm, ahead)[-1].argmax()) == token
            ahead.append(token)


def trained_logits(lm: SelfSpeculativeLM, ids: Sequence[int]) -> Tensor:
    """What an adapter's training form gives along a text: ``(tokens, vocab)``."""
    stack, adapter = lm.stack, lm.stack.adapter
    chunks: list[Tensor] = []
    with torch.no_grad():
        stack.prefill(ids, stack.new_cache(num_rows=1, num_slots=len(ids)), 0, states=chunks)
        hidden = adapter.hidden(torch.cat(chunks)[None])[0]
        head = stack.twin.get_output_embeddings()
        return adapter.logits(hidden, lambda x, project: stack.head(x, len(x), project), head)


def recorded(monkeypatch) -> dict[int, tuple[int, ...]]:
    """Drafted tokens by the length that the row had, as decoding goes on."""
    drafts: dict[int, tuple[int, ...]] = {}
    draft = EarlyExitDrafter.draft

    def record(self, requests, *rest):
        made = draft(self, requests, *rest)
        drafts.update({r.length: d.tokens for r, d in zip(requests, made, strict=True)})
        return made

    monkeypatch.setattr(EarlyExitDrafter, "draft", record)
    return drafts


@pytest.mark.parametrize(
    ("dtype", "mode"),
    [
        ("float32", "greedy"),
        ("bfloat16", "sampled"),
        pytest.param("float32", "sampled", marks=pytest.mark.slow),
        pytest.param("bfloat16", "greedy", marks=pytest.mark.slow),
    ],
)
def test_drafts_do_not_depend_on_the_rounds_before(toy, dtype, mode, monkeypatch):
    """After plain rounds, look-ups and accepted drafts the block has seen what it sees when every
    round drafts: the same tokens from the same place, so as many accepted, and the same bits."""
    drafts = recorded(monkeypatch)
    seen: dict[int, set[tuple[int, ...]]] = {}
    outputs = []
    model, store = toy("llama", dtype), LookupStore()
    lm = SelfSpeculativeLM(model, lookup=store, exit_adapter=make_adapter(model))
    for schedule in SCHEDULES.values():
        lm._controller = Scripted(*schedule)
        drafts.clear()
        outputs.append(run(lm, sampling=MODES[mode], num_draft_tokens="auto"))
        for length, tokens in drafts.items():
            seen.setdefault(length, set()).add(tokens)
        store.add([*PROMPT, *outputs[0].token_ids])
    for out in outputs[1:]:
        assert_same(out, outputs[0])
    whole = {length: {t for t in made if len(t) == 3} for length, made in seen.items()}
    assert all(len(made) <= 1 for made in whole.values())
    assert sum(len(made) for made in whole.values()) > NEW // 2
    assert len({len(out.rounds) for out in outputs}) > 3
    behind = [r for r in outputs[-1].rounds if 0 < r.num_lookup_tokens < r.num_draft_tokens]
    assert any(r.num_accepted_tokens > 1 for r in behind)


def test_a_row_that_never_drafts_keeps_no_states(adapt):
    lm = adapt("block")
    batch = lm.open_batch(max_new_tokens=8)
    plain, drafting = batch.add(PROMPT, num_draft_tokens=0), batch.add(PROMPT, num_draft_tokens=2)
    while batch.unfinished:
        batch.step()
    rows = batch._rows.rows
    assert rows[plain].exit_states is None
    states = rows[drafting].exit_states
    assert not states.prompt
    assert states.num_decoded <= 1
    assert batch._rows.cache.adapter_lengths[0] == 0
    assert batch.remove(plain).token_ids == batch.remove(drafting).token_ids


def test_rows_join_leave_and_outgrow_the_cache(adapt, wrap):
    """Each row's text and keys and values as if it had been alone."""
    lm = adapt("block")
    prompts = [random_ids(n) for n in (11, 130, 3, 500, 61)]
    expected = [run(lm, p, max_new_tokens=14) for p in prompts]
    batch = lm.open_batch(max_new_tokens=14, return_cache=True, logprobs=2)
    rows = [batch.add(prompts[0])]
    for number, prompt in enumerate(prompts[1:]):
        rows.append(batch.add(prompt, num_draft_tokens=number))
        batch.step()
        if number == 1:
            batch.remove(rows[0])
    while batch.unfinished:
        batch.step()
    for row, out, prompt in zip(rows[1:], expected[1:], prompts[1:], strict=True):
        got = batch.remove(row)
        assert_same(got, out)
        assert_same_output(got, run(wrap(None), prompt, max_new_tokens=14))


@pytest.mark.parametrize("dtype", [slow_unless(d == "bfloat16", d) for d in DTYPES])
def test_turns_go_on_from_any_cache(adapt, wrap, dtype):
    lm = adapt("block", dtype)
    slow, quick = run(lm, num_draft_tokens=0), run(lm)
    alone = run(wrap(None, "llama", dtype))
    for turn in (1, 2):
        prompt = next_prompt(slow, turn)
        crossed = run(lm, prompt, cache=slow.cache, num_draft_tokens=3)
        slow, quick = (
            run(lm, prompt, cache=quick.cache, num_draft_tokens=0),
            run(lm, prompt, cache=quick.cache),
        )
        alone = run(wrap(None, "llama", dtype), prompt, cache=alone.cache)
        assert_same(quick, slow)
        assert_same(crossed, slow)
        assert_same_output(quick, alone)


def test_a_text_s_part_is_taken_with_what_the_block_saw(adapt):
    lm = adapt("block")
    cache = run(lm).cache
    prompt = [*cache.token_ids[:40], *random_ids(9, seed=2)]
    shared, fresh = run(lm, prompt, cache=cache), run(lm, prompt)
    assert shared.stats.cached_tokens == 40
    assert shared.token_ids == fresh.token_ids
    torch.testing.assert_close(shared.cache.keys, fresh.cache.keys, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(shared.cache.values, fresh.cache.values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("place", ["run_layers", "adapt_chunk", "logits"])
def test_a_round_that_breaks_off_is_done_again(adapt, monkeypatch, place):
    lm = adapt("block")
    expected = run(lm, max_new_tokens=8)
    for times in (0, 2):
        batch = lm.open_batch(max_new_tokens=8, return_cache=True, logprobs=2)
        row = batch.add(PROMPT)
        with monkeypatch.context() as patch:
            broken = Interruption(getattr(lm.stack, place), times, RuntimeError)
            patch.setattr(lm.stack, place, broken)
            while batch.unfinished:
                try:
                    batch.step()
                except RuntimeError:
                    assert broken.left == -1
        assert_same(batch.remove(row), expected)


@pytest.mark.parametrize("dtype", [slow_unless(d == "float32", d) for d in DTYPES])
def test_a_drafted_token_that_breaks_the_model_breaks_nothing_else(monkeypatch, dtype):
    """One token's embedding is NaN, and drafted now and then."""
    model = make_model("llama", dtype)
    adapter = make_adapter(model)
    alone, lm = (
        SelfSpeculativeLM(model, num_draft_tokens=k, lookup=False, exit_adapter=a)
        for k, a in ((0, None), (4, adapter))
    )
    with torch.no_grad():
        model.model.embed_tokens.weight[1] = torch.nan
        model.lm_head.weight[1] = 0.0
    draft, noise = AdaptedHead.__call__, torch.Generator().manual_seed(0)

    def poisoned(self, hidden):
        logits = draft(self, hidden).clone()
        logits[torch.rand(len(logits), generator=noise) < 0.3, 1] = 1e4
        return logits

    monkeypatch.setattr(AdaptedHead, "__call__", poisoned)
    prompts = [PROMPT, random_ids(5)]
    together, plain = run(lm, prompts), run(alone, prompts)
    for got, want in zip(together, plain, strict=True):
        assert 1 not in want.token_ids
        assert_same_output(got, want)
        assert got.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("verification", ["token", "block"])
def test_drawn_drafts_do_not_depend_on_the_batch(adapt, verification):
    """q has the same bits alone and beside others: so has the text."""
    lm, hot = adapt("block"), SamplingParams(temperature=1.1, seed=5)
    prompts = [PROMPT, *(random_ids(n) for n in range(3, 14))]
    settings = {"sampling": hot, "verification": verification}
    together = run(lm, prompts, **settings)
    for prompt, out in zip(prompts[:2], together, strict=False):
        assert_same(run(lm, prompt, **settings), out)


def test_products_take_as_many_rows_as_were_probed(adapt, monkeypatch):
    """Passes of 16 rows: nothing says that other products than the model's keep bits there. A
    prompt's chunk is the same alone and in a batch, and goes through as a whole."""
    lm, calls, run_it = adapt("block"), set(), ExitAdapter.run

    def recorded_run(self, hidden, layout, at_once):
        calls.add((layout.padded, len(hidden), at_once))
        return run_it(self, hidden, layout, at_once)

    monkeypatch.setattr(ExitAdapter, "run", recorded_run)
    lm.generate([random_ids(n) for n in range(3, 13)], max_new_tokens=3)
    quantum = lm.stack.exactness.row_quantum
    assert {at_once for padded, _, at_once in calls if padded} == {quantum}
    assert {at_once for padded, _, at_once in calls if not padded} == {None}
    assert max(rows for padded, rows, _ in calls if padded) > quantum


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_adapter_drafts_as_the_plain_exit(toy, wrap, kind):
    new = ExitAdapter.create(toy(), EXIT, **KINDS[kind])
    lm = SelfSpeculativeLM(toy(), num_draft_tokens=4, lookup=False, exit_adapter=new)
    settings = {"sampling": SAMPLED, "max_new_tokens": NEW}
    got, want = lm.generate(PROMPT, **settings), wrap("exit").generate(PROMPT, **settings)
    assert without_times(got.rounds) == without_times(want.rounds)


@pytest.mark.parametrize(
    ("family", "window"),
    [("mistral", 40), slow_unless(False, "qwen2", None)],
)
def test_a_block_looks_as_far_as_any_layer(adapt, wrap, family, window):
    lm = adapt("block", "bfloat16", family)
    out = run(lm, num_draft_tokens=3)
    assert_same_output(out, run(wrap(None, family, "bfloat16")))
    assert_same(out, run(lm, num_draft_tokens=0))
    assert lm.stack.windows[-1] == window


def test_other_exits_of_the_stack_draft_plainly(adapt, wrap):
    """A search tries them beside the adapter's: none of them runs it."""
    stack, own = adapt("block").stack, wrap("exit").stack
    ids = random_ids(30)
    with torch.inference_mode():
        got, want = (s.all_exit_logits(ids, (1, EXIT, 3)) for s in (stack, own))
        assert torch.equal(got[1], want[1])
        assert torch.equal(got[3], want[3])
        expected = trained_logits(adapt("block"), ids)
    torch.testing.assert_close(got[EXIT], expected, atol=1e-4, rtol=1e-4)
    assert not torch.equal(got[EXIT], want[EXIT])
    assert stack.draft_layers(PLANS["exit"]) == (0, 1, NUM_LAYERS)
    assert stack.draft_layers(PLANS["skipping"]) == PLANS["skipping"].layers


@pytest.mark.parametrize("since", [3, 64, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_every_exit_since_a_token_are_those_of_the_whole(adapt, kind, since, monkeypatch):
    monkeypatch.setattr(DecoderStack, "prefill_chunk", 32)
    stack, ids = adapt(kind).stack, random_ids(71)
    with torch.inference_mode():
        whole = stack.all_exit_logits(ids, (1, EXIT, 3))
        part = stack.all_exit_logits(ids, (1, EXIT, 3), since=since)
    for e, logits in whole.items():
        torch.testing.assert_close(part[e], logits[since:], atol=1e-5, rtol=1e-5)


def test_a_trimmed_draft_vocabulary_keeps_the_adapter_s_part(adapt):
    stack, plan = adapt("block").stack, PLANS["exit"]
    part = stack.head_over(range(2, 331, 3)).including([4, 9, 100])
    with torch.inference_mode():
        hidden = torch.randn(11, 64, generator=torch.Generator().manual_seed(0))
        whole, some = stack.draft_head(plan)(hidden), stack.draft_head(plan, part)(hidden)
        torch.testing.assert_close(some, whole[:, part.ids], atol=1e-5, rtol=1e-5)
        assert not torch.allclose(some, part(hidden), atol=1e-2)


def test_drafts_over_a_trimmed_vocabulary_leave_the_output_alone(toy, wrap, monkeypatch):
    model, kept = toy("llama", "float32"), tuple(range(0, 331, 2))
    file, drafts = PlanFile(PLANS["exit"], 4, draft_vocabulary=kept), recorded(monkeypatch)
    adapter = make_adapter(model)
    lm = SelfSpeculativeLM(
        model, None, file, lookup=False, num_draft_tokens=4, exit_adapter=adapter
    )
    out = run(lm)
    assert_same_output(out, run(wrap(None)))
    drafted = {token for tokens in drafts.values() for token in tokens}
    assert drafted <= {*kept, *PROMPT, *out.token_ids}
    assert len(drafted) > 4


def test_a_trimmed_head_with_an_adapter_follows_the_row_s_text(toy, monkeypatch):
    """Of the kept tokens and those of the text so far the likeliest is drafted."""
    model, kept = toy("llama", "float32"), tuple(range(2, 331, 16))
    file, drafts = PlanFile(PLANS["exit"], 4, draft_vocabulary=kept), recorded(monkeypatch)
    lm = SelfSpeculativeLM(model, None, file, lookup=False, exit_adapter=make_adapter(model))
    text = (*PROMPT, *run(lm, num_draft_tokens=4).token_ids)
    assert len(drafts) > 5
    for length, (token, *_) in drafts.items():
        known = sorted({*kept, *text[: length + 1]})
        logits = trained_logits(lm, text[: length + 1])[-1, known]
        assert token == known[int(logits.argmax())]


def test_returned_caches_of_transformers_hold_the_model_s_layers(adapt, toy):
    lm, ids, model = adapt("block"), torch.tensor([PROMPT]), toy("llama", "float32")
    settings = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    out = model.generate(ids, custom_generate=lm.custom_generate, **settings)
    want = model.generate(ids, **settings)
    assert torch.equal(out.sequences, want.sequences)
    assert len(out.past_key_values.layers) == NUM_LAYERS
    keys = [c.past_key_values.layers[-1].keys for c in (out, want)]
    torch.testing.assert_close(*keys, atol=1e-4, rtol=1e-4)
