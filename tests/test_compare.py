"""The comparison: what it counts, what it predicts and what it leaves behind."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from toys import MAX_POSITIONS, NUM_LAYERS, PLANS, make_model, random_ids

from layerskip import DecodeStats, DraftPlan, SamplingParams, SelfSpeculativeLM, compare
from layerskip.compare import REPEAT_SPAN, Comparison, ModeRun, repeated_share
from layerskip.hf_modes import (
    DEFAULT_EARLY_EXIT,
    FINALISTS,
    EarlyExitSettings,
    exits_to_try,
    fastest,
)
from layerskip.model import DecoderStack
from layerskip.prompts import Example
from layerskip.teacher_forced import teacher_forced

PROMPT, NEW = random_ids(20), 10
KV_BYTES_PER_TOKEN = 2 * NUM_LAYERS * 2 * 16 * 4  # keys and values, 2 heads of 16, float32


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    """A toy of our own: its generation config is exchanged and its layers get hooks."""
    model = make_model()
    lm = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4)
    return Comparison(model, lm, sampling=SamplingParams(), max_new_tokens=NEW)


def repeated_by_hand(outputs: Sequence[Sequence[int]]) -> float:
    repeated = total = 0
    for ids in outputs:
        for i in range(len(ids) - REPEAT_SPAN + 1):
            gram = ids[i : i + REPEAT_SPAN]
            total += 1
            repeated += any(ids[j : j + REPEAT_SPAN] == gram for j in range(i))
    return repeated / total if total else 0.0


LOOPS = st.builds(
    lambda ids, n: ids * n, st.lists(st.integers(0, 3), max_size=5), st.integers(0, 9)
)
TEXTS = st.builds(lambda *parts: list(chain(*parts)), LOOPS, LOOPS, LOOPS)


@given(st.lists(TEXTS, max_size=4))
def test_repeated_share_is_what_counting_gives(outputs: list[list[int]]) -> None:
    assert repeated_share(outputs) == pytest.approx(repeated_by_hand(outputs))


def test_repeated_share_of_a_loop_and_of_fresh_text() -> None:
    assert repeated_share([list(range(50))]) == 0.0
    assert repeated_share([[1, 2] * 20]) == pytest.approx(31 / 33)
    assert repeated_share([list(range(8)), list(range(8))]) == 0.0  # other outputs do not count
    assert repeated_share([[1, 2] * 20, list(range(40))]) == pytest.approx(31 / 66)
    assert repeated_share([[1] * 7]) == 0.0


def test_transformers_runs_each_position_once(comparison: Comparison) -> None:
    run = comparison.run("hf", PROMPT, count=True)
    assert len(run.token_ids) == NEW
    assert run.positions == len(PROMPT) + NEW - 1
    assert run.kv_cache_bytes == run.positions * KV_BYTES_PER_TOKEN


def test_ours_runs_each_position_once_and_rejected_drafts(comparison: Comparison) -> None:
    model, plan = comparison.model, PLANS["exit"]
    lm = SelfSpeculativeLM(model, None, plan, num_draft_tokens=4, lookup=False)
    comparison = Comparison(model, lm, sampling=SamplingParams(), max_new_tokens=NEW)
    plain, ours = (comparison.run(mode, PROMPT) for mode in ("plain", "layerskip"))
    assert plain.positions == len(PROMPT) + NEW - 1
    rejected = ours.stats.num_draft_tokens - ours.stats.num_accepted_tokens
    assert rejected > 0
    assert ours.positions == plain.positions + rejected


def test_transformers_early_exit_runs_more(comparison: Comparison) -> None:
    hf, exiting = (comparison.run(m, PROMPT, count=True) for m in ("hf", "hf-early-exit"))
    assert exiting.token_ids == hf.token_ids
    assert exiting.positions >= hf.positions + len(PROMPT)  # the prompt twice
    assert exiting.kv_cache_bytes > hf.kv_cache_bytes  # a second cache


@pytest.mark.parametrize("mode", compare.MODES)
def test_every_mode_gives_the_same_greedy_tokens(comparison: Comparison, mode: str) -> None:
    prompt = torch.tensor([PROMPT])
    out = comparison.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False
    )
    run = comparison.run(mode, PROMPT)
    assert run.token_ids == tuple(out[0, len(PROMPT) :].tolist())
    assert run.tokens_per_second == pytest.approx(NEW / run.seconds)


def test_nothing_is_counted_where_it_was_not_asked_for(comparison: Comparison) -> None:
    run = comparison.run("hf", PROMPT)
    assert (run.positions, run.kv_cache_bytes) == (0, 0)
    assert not comparison.model.model.layers[0]._forward_pre_hooks


def test_early_exit_as_it_comes_has_transformers_defaults() -> None:
    config, ours = transformers.GenerationConfig(), DEFAULT_EARLY_EXIT
    theirs = config._get_default_generation_params()
    assert ours.num_assistant_tokens == theirs["num_assistant_tokens"]
    assert ours.confidence == theirs["assistant_confidence_threshold"]


def test_sampled_modes_repeat_with_their_seed(comparison: Comparison) -> None:
    def sampled(mode: str, seed: int) -> tuple[int, ...]:
        sampling = SamplingParams(temperature=0.9, top_k=50, seed=seed)
        other = Comparison(comparison.model, comparison.lm, sampling=sampling, max_new_tokens=NEW)
        return other.run(mode, PROMPT).token_ids

    for mode in ("plain", "layerskip", "hf"):
        assert sampled(mode, 3) == sampled(mode, 3) != sampled(mode, 4)
    assert sampled("plain", 3) == sampled("layerskip", 3)


def test_the_caller_s_random_numbers_go_on_as_if_nothing_had_been_compared(
    comparison: Comparison,
) -> None:
    sampling = SamplingParams(temperature=0.9, seed=3)
    other = Comparison(comparison.model, comparison.lm, sampling=sampling, max_new_tokens=NEW)
    before = torch.get_rng_state()
    for mode in ("hf", "hf-prompt-lookup"):
        other.run(mode, PROMPT)
    assert torch.equal(torch.get_rng_state(), before)


def test_early_exit_settings_are_lent_and_given_back(
    comparison: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = comparison.model.generation_config
    snapshot, seen = before.to_dict(), []

    def look(ids: Sequence[int], extra: dict[str, Any]) -> tuple[int, ...]:
        config = comparison.model.generation_config
        seen.append((config.num_assistant_tokens, config.assistant_confidence_threshold, extra))
        return (1,)

    monkeypatch.setattr(comparison, "_transformers", look)
    monkeypatch.setattr(comparison, "early_exit", EarlyExitSettings(3, 6, 0.25))
    comparison.run("hf-early-exit", PROMPT)
    comparison.run("hf-early-exit-default", PROMPT)
    exiting = {"assistant_early_exit": 3}
    assert seen == [(6, 0.25, exiting), (20, 0.4, exiting)]
    assert comparison.model.generation_config is before
    assert before.to_dict() == snapshot


def test_processors_of_the_model_s_own_config_do_not_count(
    comparison: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours has none: beside it transformers would write another text."""
    expected = comparison.run("hf", PROMPT).token_ids
    config = comparison.model.generation_config
    monkeypatch.setattr(config, "repetition_penalty", 50.0)
    monkeypatch.setattr(config, "no_repeat_ngram_size", 1)
    assert comparison.run("hf", PROMPT).token_ids == expected
    assert comparison.model.generation_config.repetition_penalty == 50.0


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_nothing_on_the_model(
    comparison: Comparison, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    before = comparison.model.generation_config

    def fail(*_: object) -> tuple[int, ...]:
        assert comparison.model.generation_config is not before
        assert comparison.model.model.layers[0]._forward_pre_hooks
        raise error

    monkeypatch.setattr(comparison, "_transformers", fail)
    with pytest.raises(error):
        comparison.run("hf-early-exit", PROMPT, count=True)
    assert comparison.model.generation_config is before
    assert not comparison.model.model.layers[0]._forward_pre_hooks


def test_tuning_keeps_the_fastest_setting(
    comparison: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    best, tried = EarlyExitSettings(1, 6, 0.4), []

    def run(mode: str, ids: Sequence[int]) -> ModeRun:
        assert mode == "hf-early-exit"
        tried.append(comparison.early_exit)
        return ModeRun((1,) * NEW, 0.5 if comparison.early_exit == best else 1.0)

    monkeypatch.setattr(comparison, "run", run)
    monkeypatch.setattr(comparison, "early_exit", EarlyExitSettings(2, 4, 0.4))
    comparison.tune_early_exit([PROMPT])
    assert comparison.early_exit == best
    assert {s.exit_layer for s in tried} == {1, 2, 3, 4}
    assert {s for s in tried if s.num_assistant_tokens == 20} == {
        replace(DEFAULT_EARLY_EXIT, exit_layer=e) for e in (1, 2, 3, 4)
    }


@pytest.mark.parametrize(
    ("num_layers", "exit_layer", "expected"),
    [
        *((1, None, []), (2, 1, [1]), (6, None, [1, 2, 3, 4]), (16, 2, [1, 2, 3, 4])),
        *((32, None, [2, 4, 6, 8]), (32, 13, [2, 4, 6, 8, 13])),
    ],
)
def test_exits_are_tried_up_to_a_quarter_of_the_layers(num_layers, exit_layer, expected) -> None:
    plan = exit_layer and DraftPlan.exiting(num_layers=num_layers, exit_layer=exit_layer)
    assert exits_to_try(num_layers, plan) == expected


def test_few_settings_are_tried_on_every_prompt() -> None:
    """The best of all prompts among those that are good on the first."""
    grid, tried = [EarlyExitSettings(e, 4, 0.0) for e in range(1, 13)], []

    def seconds(settings: EarlyExitSettings, ids: Sequence[int]) -> float:
        tried.append((settings.exit_layer, ids))
        if ids == (0,):
            return float(settings.exit_layer)
        return 0.0 if settings.exit_layer in (4, 12) else 9.0

    assert fastest(grid, [(0,), (1,), (2,)], seconds).exit_layer == 4
    few = range(1, FINALISTS + 1)
    assert sorted(tried) == sorted(
        [(e, (0,)) for e in range(1, 13)] + [(e, (i,)) for e in few for i in (1, 2)]
    )


def test_what_has_no_exit_is_not_tuned() -> None:
    lm = SimpleNamespace(stack=SimpleNamespace(num_layers=1), plan=None)
    made = Comparison(None, lm, sampling=SamplingParams(), max_new_tokens=NEW)
    with pytest.raises(ValueError, match="a model of one layer has no early exit"):
        made.tune_early_exit([PROMPT])


class Clock:
    """Time that passes only where a fake says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class TimedStack:
    """A stack of 8 layers: each costs 1 and 0.1 a token, the head 2."""

    num_layers, device = 8, torch.device("cpu")

    def __init__(self, clock: Clock, context: int) -> None:
        self.clock, self.context = clock, context

    def new_cache(self, *, num_rows: int, num_slots: int) -> Any:
        assert num_rows == 1
        return SimpleNamespace(written=lambda: num_slots)  # over no other are passes timed

    def embed(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def run_layers(
        self, hidden: int, layers: Sequence[int], cache: int, segments: Sequence[Any]
    ) -> int:
        (segment,) = segments
        assert (segment.start, segment.count) == (self.context, hidden)
        assert segment.start + segment.count <= cache
        self.clock.now += sum(1 + 0.1 * hidden for _ in layers)
        return hidden

    def logits(self, hidden: int) -> None:
        self.clock.now += 2

    def draft_layers(self, plan: Any) -> Sequence[int]:
        return plan.layers

    def draft_head(self, plan: Any, head: Any) -> Any:
        return head or self.logits


def predict(
    monkeypatch: pytest.MonkeyPatch,
    stats: DecodeStats,
    layers: Sequence[int],
    head_seconds: int | None = None,
) -> dict[str, float]:
    clock = Clock()
    monkeypatch.setattr(compare, "time", clock)

    def head(hidden: int) -> None:
        clock.now += head_seconds

    lm = SimpleNamespace(
        stack=TimedStack(clock, 300),
        plan=SimpleNamespace(layers=layers),
        draft_head=None if head_seconds is None else head,
    )
    made = Comparison(None, lm, sampling=SamplingParams(), max_new_tokens=NEW)
    return made.theory(stats, context=300)


def test_theory_is_the_formula_over_bare_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = DecodeStats(
        num_rounds=10, num_draft_tokens=40, num_accepted_tokens=30, num_draft_passes=30
    )
    theory = predict(monkeypatch, stats, (0, 1))
    plain = 8 * 1.1 + 2
    c, v = (2 * 1.1 + 2) / plain, (8 * 1.5 + 2) / plain
    assert (theory["c"], theory["v"]) == pytest.approx((c, v))
    assert theory["speedup"] == pytest.approx((1 + 3) / (3 * c + v))


def test_theory_takes_the_draft_length_that_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = DecodeStats(
        num_rounds=10, num_draft_tokens=25, num_accepted_tokens=5, num_draft_passes=25
    )
    theory = predict(monkeypatch, stats, (0, 3, 5))
    plain = 8 * 1.1 + 2
    c = (3 * 1.1 + 2) / plain
    assert theory["c"] == pytest.approx(c)
    assert theory["speedup"] == pytest.approx(1.5 / (2.5 * c + theory["v"]))


def test_theory_prices_the_head_over_the_draft_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    theory = predict(monkeypatch, DecodeStats(num_rounds=10), (0, 1), head_seconds=1)
    assert theory["c"] == pytest.approx((2 * 1.1 + 1) / (8 * 1.1 + 2))


def test_theory_of_plain_decoding_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    theory = predict(monkeypatch, DecodeStats(num_rounds=10), range(8))
    assert (theory["v"], theory["speedup"]) == pytest.approx((1.0, 1.0))


class Scripted:
    """A comparison whose runs are written down: ``plain`` takes 1 s, ``layerskip`` 0.5 s."""

    sampling, max_new_tokens = SamplingParams(), 20
    early_exit = EarlyExitSettings(1, 2, 0.0)

    def __init__(self, outputs: dict[str, list[tuple[int, ...]]]) -> None:
        self.outputs, self.calls, self.tuned = outputs, [], 0
        self.lm = SimpleNamespace(encode=lambda text: [int(text)])

    def run(self, mode: str, ids: Sequence[int], *, count: bool = False) -> ModeRun:
        self.calls.append((mode, ids[0], count))
        tokens = self.outputs[mode][ids[0]]
        stats = DecodeStats(new_tokens=20, num_rounds=4, num_draft_tokens=16, num_accepted_tokens=8)
        seconds = {"plain": 1.0, "layerskip": 0.5, "hf-early-exit": 2.0}.get(mode, 3.0)
        return ModeRun(tokens, seconds, None if mode.startswith("hf") else stats, 30, 1000)

    def tune_early_exit(self, prompts: Sequence[Sequence[int]]) -> None:
        self.tuned += len(prompts)

    def theory(self, stats: DecodeStats, *, context: int) -> dict[str, float]:
        assert stats.num_draft_tokens == 16 * 2
        return {"c": 0.25, "v": 1.25, "speedup": stats.mean_accepted_length}


FRESH, OTHER, LOOP = tuple(range(20)), tuple(range(1, 21)), (1, 2) * 10
EXAMPLES = [Example("0"), Example("1")]


def scripted(**outputs: list[tuple[int, ...]]) -> Scripted:
    return Scripted({name.replace("_", "-"): ids for name, ids in outputs.items()})


def test_the_document_is_made_of_the_runs() -> None:
    fake = scripted(plain=[FRESH, OTHER], layerskip=[FRESH, FRESH])
    document = compare.compare(fake, EXAMPLES, modes=["layerskip"], repeats=3)
    assert document["prompts"] == 2
    assert document["new_tokens"] == 40
    assert document["repeated_8gram_share"] == 0.0
    assert document["theory"] == {"c": 0.25, "v": 1.25, "speedup": 3.0}
    assert document["modes"]["layerskip"] == {
        "tokens_per_second": 40.0,
        "speedup_vs_plain": 2.0,
        "speedup_vs_plain_ci95": [2.0, 2.0],
        "identical_to_plain": 0.5,
        "acceptance_rate": 0.5,
        "mean_accepted_length": 3.0,
        "kv_cache_bytes": 1000,
        "positions_through_first_layer": 60,
    }
    plain = document["modes"]["plain"]
    assert plain["speedup_vs_plain"] == plain["identical_to_plain"] == 1.0
    assert plain["acceptance_rate"] is None
    assert fake.tuned == 0


def test_nothing_drafted_is_no_share_that_was_accepted() -> None:
    fake = scripted(plain=[FRESH], layerskip=[FRESH])
    run, stats = fake.run, DecodeStats(new_tokens=20, num_rounds=19)
    fake.run = lambda *args, **how: replace(run(*args, **how), stats=stats)
    fake.theory = lambda *_, **__: {}
    document = compare.compare(fake, EXAMPLES[:1], modes=["layerskip"], repeats=1)
    assert document["modes"]["layerskip"]["acceptance_rate"] is None


def test_an_interval_of_seven_prompts_goes_out_to_both_ends() -> None:
    """From the second to the sixth of seven is 87.5 %, by the binomial law."""
    fake, ratios = scripted(plain=[FRESH] * 7, layerskip=[FRESH] * 7), [1.1, 3, 2, 1.5, 4, 2.5, 1.7]
    run = fake.run

    def timed(mode: str, ids: Sequence[int], *, count: bool = False) -> ModeRun:
        seconds = 1.0 if mode == "plain" else 1 / ratios[ids[0]]
        return replace(run(mode, ids, count=count), seconds=seconds)

    fake.run = timed
    fake.theory = lambda *_, **__: {}
    examples = [Example(str(i)) for i in range(7)]
    document = compare.compare(fake, examples, modes=["layerskip"], repeats=1)
    interval = document["modes"]["layerskip"]["speedup_vs_plain_ci95"]
    assert interval == pytest.approx([1.1, 4.0])


def test_a_mode_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown mode 'hf-early'; there are plain, layerskip, hf"):
        compare.compare(scripted(plain=[FRESH, OTHER]), EXAMPLES, modes=["hf-early"], repeats=1)


@pytest.mark.parametrize("name", ["repeats", "tuning_prompts"])
def test_numbers_below_one_are_refused_before_anything_is_decoded(name: str) -> None:
    fake = scripted(plain=[FRESH, OTHER], hf_early_exit=[FRESH, OTHER])
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        compare.compare(fake, EXAMPLES, modes=["hf-early-exit"], **{"repeats": 1, name: 0})
    assert (fake.calls, fake.tuned) == ([], 0)


def test_tuning_on_no_prompt_is_no_word_on_the_family(comparison: Comparison) -> None:
    with pytest.raises(IndexError):
        comparison.tune_early_exit([])


def test_default_settings_are_tried_at_the_best_exit_too() -> None:
    fake = scripted(plain=[FRESH, FRESH], hf_early_exit_default=[FRESH, FRESH])
    compare.compare(fake, EXAMPLES, modes=["hf-early-exit-default"], repeats=1)
    assert fake.tuned == 2


@pytest.mark.parametrize(
    ("mode", "prompts", "timed"),
    [
        ("hf-early-exit", "01234", {2, 3, 4}),
        ("hf-early-exit-default", "0123014", {2, 3, 4}),  # however often they are there
        ("hf-early-exit", "0123", {0, 1, 2, 3}),  # too few without them
        ("hf", "01234", {0, 1, 2, 3, 4}),
    ],
)
def test_what_early_exit_is_tuned_on_is_not_timed(mode: str, prompts: str, timed: set[int]) -> None:
    fake, seen = Scripted({m: [FRESH] * 5 for m in ("plain", mode)}), []
    document = compare.compare(
        fake,
        [Example(name) for name in prompts],
        modes=[mode],
        repeats=1,
        tuning_prompts=2,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert {prompt for _, prompt, _ in fake.calls} == timed
    assert fake.tuned == (0 if mode == "hf" else 2)
    assert document["prompts"] == len(timed)
    assert document["prompts_left_out"] == 0
    assert seen[-1] == (len(timed), len(timed))


def test_a_family_that_transformers_cannot_leave_early_is_said_as_such() -> None:
    config = transformers.GPT2Config(vocab_size=99, n_embd=64, n_layer=3, n_head=4, n_positions=64)
    model = transformers.GPT2LMHeadModel(config).eval()
    lm = SelfSpeculativeLM(model, None, num_draft_tokens=0)
    comparison = Comparison(model, lm, sampling=SamplingParams(), max_new_tokens=4)
    sentence = "transformers' early exit does not run on gpt2: leave out hf-early-exit"
    with pytest.raises(ValueError, match=sentence):
        comparison.tune_early_exit([[1, 2, 3]])
    assert model.config.num_hidden_layers == 3  # transformers lowers it, and forgets it so


def test_a_lack_of_memory_is_no_word_on_the_family(
    comparison: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: object, mode: str, ids: object, **more: object) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(Comparison, "run", run)
    with pytest.raises(torch.OutOfMemoryError, match="no memory is left"):
        comparison.tune_early_exit([[1, 2, 3]])


def test_rules_that_transformers_modes_would_not_follow_are_refused(
    talking: SelfSpeculativeLM, forced: list[Example]
) -> None:
    ruled = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.3)
    said = "by temperature, top_k, top_p and min_p alone; leave out repetition_penalty"
    with pytest.raises(ValueError, match=f"a comparison samples {said}"):
        Comparison(talking.stack.twin, talking, sampling=ruled, max_new_tokens=4)
    with pytest.raises(ValueError, match=f"acceptance along a text samples {said}"):
        teacher_forced(talking, forced, sampling=ruled, exits=[1], max_new_tokens=NEW)


def test_a_mode_that_nobody_named_is_left_out_with_the_reason() -> None:
    fake = scripted(plain=[FRESH, FRESH], layerskip=[FRESH, FRESH])
    modes = ("layerskip", "hf-early-exit", "hf-early-exit-default")

    def refuse(prompts: object) -> None:
        raise ValueError("transformers' early exit does not run on gpt2: leave out hf-early-exit")

    fake.tune_early_exit = refuse
    document = compare.compare(fake, EXAMPLES, modes=modes, optional=modes, repeats=1)
    assert set(document["modes"]) == {"plain", "layerskip"}
    reason = "transformers' early exit does not run on gpt2"
    assert document["unsupported"] == dict.fromkeys(modes[1:], reason)
    with pytest.raises(ValueError, match="leave out hf-early-exit"):
        compare.compare(fake, EXAMPLES, modes=modes, repeats=1)


def test_every_mode_is_timed_equally_often_after_one_warm_run() -> None:
    fake = scripted(plain=[FRESH, FRESH], layerskip=[FRESH, FRESH], hf_early_exit=[FRESH, FRESH])
    modes = ["layerskip", "hf-early-exit", "layerskip"]
    document = compare.compare(fake, EXAMPLES, modes=modes, repeats=8, tuning_prompts=1)
    assert set(document["modes"]) == {"plain", "layerskip", "hf-early-exit"}
    assert fake.tuned == 1
    for mode in document["modes"]:
        for prompt in (0, 1):
            assert [c[:2] for c in fake.calls].count((mode, prompt)) == 1 + 8
    assert all(c[2] for c in fake.calls[1:3])  # what only transformers' modes need counted
    orders = [tuple(c[0] for c in fake.calls[i : i + 3]) for i in range(3, 27, 3)]
    assert all(set(order) == set(document["modes"]) for order in orders)
    assert len(set(orders)) > 1  # no mode is always first


def test_looping_prompts_are_left_out() -> None:
    fake, contexts = scripted(plain=[LOOP, FRESH], layerskip=[LOOP, FRESH]), []
    fake.lm.encode = lambda text: [int(text)] * (500 if text == "0" else 30)
    fake.theory = lambda stats, context: contexts.append(context) or {}
    document = compare.compare(fake, EXAMPLES, modes=["layerskip"], repeats=1, max_repeated=0.2)
    assert (document["prompts"], document["prompts_left_out"]) == (1, 1)
    assert document["new_tokens"] == 20
    assert contexts == [30 + 20 // 2]  # of the prompt that is left, and half of what follows it
    assert [c[:2] for c in fake.calls].count(("plain", 0)) == 1
    assert ("layerskip", 0) not in [c[:2] for c in fake.calls]
    with pytest.raises(ValueError, match="repeats more than 20%"):
        compare.compare(fake, EXAMPLES[:1], modes=["plain"], repeats=1, max_repeated=0.2)


def test_no_prompts_is_said_as_such() -> None:
    with pytest.raises(ValueError, match="no prompts"):
        compare.compare(scripted(plain=[]), [], modes=["plain"], repeats=1)


def test_prompts_that_are_none_are_named(talking: SelfSpeculativeLM) -> None:
    made = Comparison(talking.stack.twin, talking, sampling=SamplingParams(), max_new_tokens=NEW)
    for example, error, said in (
        ("text", TypeError, "must be an Example, got str; Example"),
        (Example("\ud800"), ValueError, "is not valid Unicode"),
        (Example("q" * MAX_POSITIONS), ValueError, "the prompt has 600 tokens; the model has"),
        (Example(""), ValueError, "the prompt is empty"),
    ):
        with pytest.raises(error, match=rf"examples\[1\]:? {said}"):
            compare.compare(made, iter([Example("a"), example]), modes=["plain"], repeats=1)


def test_sampled_transformers_text_is_not_called_different() -> None:
    fake = scripted(plain=[FRESH, FRESH], hf_early_exit=[OTHER, OTHER])
    fake.sampling = SamplingParams(temperature=0.8, seed=0)
    document = compare.compare(fake, EXAMPLES, modes=["hf-early-exit"], repeats=1)
    assert document["modes"]["hf-early-exit"]["identical_to_plain"] is None


@pytest.fixture
def forced() -> list[Example]:
    texts = [("def f(x):\n", "    return x + 1\n"), ("Question\n", "0123456789 " * 4), ("x\n", "")]
    return [Example(*pair) for pair in texts]


def test_teacher_forced_agreement_is_what_transformers_gives(
    talking: SelfSpeculativeLM, toy: Any, forced: list[Example]
) -> None:
    model, agree, positions = toy(), 0, 0
    for example in forced[:2]:
        first = len(talking.encode(example.prompt))
        ids = talking.tokenizer(example.prompt + example.continuation)["input_ids"][: first + NEW]
        with torch.inference_mode():
            out = model(torch.tensor([ids[:-1]]), output_hidden_states=True)
            early = model.lm_head(model.model.norm(out.hidden_states[2]))
        same = early.argmax(-1) == out.logits.argmax(-1)
        agree += same[0, first - 1 :].sum().item()
        positions += len(ids) - first
    document = teacher_forced(
        talking, forced, sampling=SamplingParams(), exits=[1, 2], max_new_tokens=NEW
    )
    assert document["positions"] == positions
    assert (document["prompts"], document["prompts_left_out"]) == (2, 1)  # one has no continuation
    assert document["exits"][2]["acceptance_rate"] == pytest.approx(agree / positions)
    assert 0 < agree < positions


def test_teacher_forced_makes_logits_of_the_continuation_alone(
    talking: SelfSpeculativeLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, head = [], DecoderStack.head

    def counting(self: DecoderStack, hidden: torch.Tensor, *more: Any, **named: Any) -> Any:
        asked.append(len(hidden))
        return head(self, hidden, *more, **named)

    monkeypatch.setattr(DecoderStack, "head", counting)
    document = teacher_forced(
        talking,
        [Example("Question\n" * 9, "0123456789 " * 4)],
        sampling=SamplingParams(),
        exits=[1, 2],
        max_new_tokens=NEW,
    )
    assert asked == [document["positions"]] * 3


def test_teacher_forced_needs_a_continuation(
    talking: SelfSpeculativeLM, forced: list[Example]
) -> None:
    with pytest.raises(ValueError, match="continuation"):
        teacher_forced(
            talking, forced[2:], sampling=SamplingParams(), exits=[1], max_new_tokens=NEW
        )
