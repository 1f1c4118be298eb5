"""Rules on the logits: their arithmetic, and that drafting does not change what they give."""

import itertools
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import NUM_LAYERS, PLANS, VOCAB_SIZE, make_model, random_ids
from transformers import PreTrainedModel

from layerskip import DraftPlan, RowError, SamplingParams, SelfSpeculativeLM
from layerskip.batch import Batch
from layerskip.processors import LogitBias, processors_of

PROMPT = random_ids(21)
LIMIT = 14
# Without it a toy says 14 different tokens, and rules against repeating have nothing to do.
FEW = dict.fromkeys(range(40, 46), 9.0)
MODES = {
    "greedy": SamplingParams(logit_bias=FEW),
    "sampled": SamplingParams(logit_bias=FEW, temperature=1.5, top_p=0.95, seed=11),
}
RULES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.6},
    "rewarded-repetition": {"repetition_penalty": 0.4},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.75},
    "rewarded-frequency": {"frequency_penalty": -2.0},
    "1-grams": {"no_repeat_ngram_size": 1},
    "2-grams": {"no_repeat_ngram_size": 2},
    "bias": {"logit_bias": {40: -30.0, 7: 9.5, 42: 9.25}},
    "bad-words": {"bad_words_ids": [[40], [41, 42], [43, 44, 43], [41, 41], [45, 41], [44, 44]]},
    "min-new-tokens": {"min_new_tokens": 9},
    "forced": {"forced_token_ids": [300, 2, 300, 41, 17, 300]},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[41, 42]],
        "min_new_tokens": 5,
        "forced_token_ids": [300, 2],
        "min_p": 0.01,
    },
}
SAMPLING_ONLY: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.4},
    "min-p": {"min_p": 0.3},
    "temperature": {"temperature": 0.5},
}
CASES = [(mode, rule) for rule in RULES for mode in MODES]
CASES += [("sampled", rule) for rule in SAMPLING_ONLY]


def params_of(mode: str, rule: str) -> SamplingParams:
    return replace(MODES[mode], **(RULES | SAMPLING_ONLY)[rule])


def run(lm: SelfSpeculativeLM, params: SamplingParams, **more: Any) -> tuple[int, ...]:
    return lm.generate(PROMPT, **{"max_new_tokens": LIMIT, "sampling": params} | more).token_ids


def finish(batch: Batch) -> None:
    while batch.unfinished:
        batch.step()


@pytest.fixture(scope="module")
def ending_model() -> PreTrainedModel:
    """Its ends of sequence come in the middle of ``MODES``' texts."""
    model = make_model()
    lm = SelfSpeculativeLM(model, num_draft_tokens=0)
    model.generation_config.eos_token_id = [run(lm, params)[4] for params in MODES.values()]
    return model


@pytest.fixture(scope="module")
def ending(ending_model) -> dict[str, SelfSpeculativeLM]:
    plans = ("exit", "skipping")
    return {
        name: SelfSpeculativeLM(ending_model, None, PLANS[name], num_draft_tokens=4)
        for name in plans
    }


# The arithmetic. All numbers are sums of quarters and powers of two: float32 holds them exactly.

VOCAB = 8
TOKEN = st.integers(0, VOCAB - 1)
QUARTERS = st.integers(-20, 20).map(lambda n: n / 4)
PENALTY = st.integers(-8, 8).map(lambda n: n / 4)
RULED = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([0.5, 1.0, 2.0, 4]),
    presence_penalty=PENALTY,
    frequency_penalty=PENALTY,
    no_repeat_ngram_size=st.integers(0, 4),
    logit_bias=st.dictionaries(TOKEN, QUARTERS, max_size=3),
    bad_words_ids=st.lists(st.lists(TOKEN, min_size=1, max_size=3), max_size=4),
    min_new_tokens=st.integers(0, 6),
    forced_token_ids=st.lists(TOKEN, max_size=2),
)


def ruled_slowly(
    params: SamplingParams, prompt: list[int], output: list[int], eos: set[int], s: list[float]
) -> list[float]:
    """The rules in Python lists, as the docstring of ``SamplingParams`` words them."""
    s, text = list(s), prompt + output
    for token, bias in params.logit_bias:
        s[token] += bias
    for token in set(text):
        by = params.repetition_penalty
        s[token] = s[token] / by if s[token] > 0 else s[token] * by
    for token in set(output):
        s[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    n = params.no_repeat_ngram_size
    seen = {tuple(text[i : i + n]) for i in range(len(text) - n + 1)}
    for token in range(len(s)):
        ends = [(*text, token)[-size:] for size in range(1, len(text) + 2)]
        if n and any(end in seen for end in ends if len(end) == n):
            s[token] = -math.inf
        if set(ends) & set(params.bad_words_ids):
            s[token] = -math.inf
        if token in eos and len(output) < params.min_new_tokens:
            s[token] = -math.inf
    forced = params.forced_token_ids[len(output) : len(output) + 1]
    return [0.0 if token in forced else -math.inf for token in range(len(s))] if forced else s


@settings(max_examples=150)
@given(
    RULED,
    st.lists(TOKEN, min_size=1, max_size=7),
    st.lists(TOKEN, max_size=7),
    st.sets(TOKEN, max_size=2),
    st.lists(QUARTERS, min_size=VOCAB, max_size=VOCAB),
)
def test_rules_compute_what_lists_compute(params, prompt, output, eos, scores):
    got = torch.tensor([scores])
    for rule in processors_of(
        params,
        prompt_length=len(prompt),
        eos_ids=frozenset(eos),
        vocab_size=VOCAB,
        device=torch.device("cpu"),
    ):
        before = got.clone()
        after = rule(torch.tensor([prompt + output]), got)
        assert torch.equal(got, before), "a rule wrote into what it was given"
        got = after
    assert got[0].tolist() == ruled_slowly(params, prompt, output, eos, scores)


def test_no_rule_is_no_processor():
    nothing = SamplingParams(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1)
    where = {"prompt_length": 1, "vocab_size": VOCAB, "device": torch.device("cpu")}
    assert processors_of(nothing, eos_ids=frozenset({1}), **where) == []
    without_eos = processors_of(SamplingParams(min_new_tokens=3), eos_ids=frozenset(), **where)
    assert without_eos == []


# Where transformers has the rule, its `generate` gives our tokens. It has no penalties on the
# output alone, and a bad word that is an end of sequence alone it lets through.


def forcing(tokens: Sequence[int]) -> Callable[[int, torch.Tensor], list[int]]:
    def allowed(_row: int, ids: torch.Tensor) -> list[int]:
        done = len(ids) - len(PROMPT)
        return [tokens[done]] if done < len(tokens) else list(range(VOCAB_SIZE))

    return allowed


@pytest.mark.parametrize(
    "rule",
    [
        *("repetition", "rewarded-repetition", "1-grams", "2-grams"),
        *("bias", "bad-words", "min-new-tokens", "forced"),
    ],
)
def test_greedy_tokens_are_those_of_transformers(toy, wrap, ending_model, ending, rule):
    model, lm = toy(), wrap("exit")
    if rule == "min-new-tokens":
        model, lm = ending_model, ending["exit"]
    params, same = params_of("greedy", rule), dict(RULES[rule])
    same.pop("logit_bias", None)
    if "forced_token_ids" in same:
        same["prefix_allowed_tokens_fn"] = forcing(same.pop("forced_token_ids"))
    ids = torch.tensor([PROMPT])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),  # or ids like the padding's are masked
        pad_token_id=0,
        max_new_tokens=LIMIT,
        do_sample=False,
        sequence_bias={(token,): by for token, by in params.logit_bias},
        **same,
    )
    assert tuple(out[0, len(PROMPT) :].tolist()) == run(lm, params)


# With drafts and without.


@pytest.mark.parametrize(("mode", "rule"), CASES)
@pytest.mark.one_in(2)
def test_drafts_change_no_token_and_rules_do(wrap, ending, mode, rule):
    lms = ending if rule == "min-new-tokens" else {name: wrap(name) for name in ending}
    params = params_of(mode, rule)
    expected = run(lms["exit"], params, num_draft_tokens=0)
    for lm, k in zip(lms.values(), (4, 7), strict=True):
        assert run(lm, params, num_draft_tokens=k) == expected
    assert expected != run(lms["exit"], MODES[mode])


@pytest.mark.parametrize("plan", ["exit", "skipping"])
def test_rows_of_a_batch_have_rules_of_their_own(ending, plan):
    lm = ending[plan]
    batch = lm.open_batch(max_new_tokens=LIMIT)
    rows = {}
    for i, (mode, rule) in enumerate(CASES):
        params = params_of(mode, rule)
        rows[batch.add(PROMPT, sampling=params, num_draft_tokens=i % 6)] = params
    finish(batch)
    outputs = {row: batch.remove(row) for row in rows}
    assert sum(out.stats.num_accepted_tokens for out in outputs.values()) > 50
    for row, params in rows.items():
        assert outputs[row].token_ids == run(lm, params, num_draft_tokens=0)


def keeps_rules(params: SamplingParams, output: tuple[int, ...], eos: frozenset[int]) -> bool:
    """Whether a text is one that the rules allow."""
    text, forced = [*PROMPT, *output], params.forced_token_ids
    n = params.no_repeat_ngram_size
    grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
    repeated = n > 0 and any(g in grams[:i] for i, g in enumerate(grams) if i + n > len(PROMPT))
    ends = {tuple(output[i:j]) for i, j in itertools.combinations(range(len(output) + 1), 2)}
    bad = bool(ends & set(params.bad_words_ids))
    early = any(t in eos for t in output[len(forced) : params.min_new_tokens])
    return output[: len(forced)] == forced and not (repeated or bad or early)


@pytest.mark.parametrize("verification", ["token", "block"])
def test_every_verification_keeps_the_rules(ending, verification):
    """These texts depend on the drafts: that each is allowed is what can be said of one."""
    lm, accepted = ending["exit"], 0
    for rule in ("1-grams", "2-grams", "bad-words", "min-new-tokens", "forced", "all"):
        params = params_of("sampled", rule)
        out = lm.generate(PROMPT, max_new_tokens=LIMIT, sampling=params, verification=verification)
        assert keeps_rules(params, out.token_ids, lm.eos_ids)
        accepted += out.stats.num_accepted_tokens
    assert accepted > 10
    assert not keeps_rules(params_of("sampled", "2-grams"), (1, 2, 1, 2), frozenset())


def test_a_forced_end_of_sequence_ends(ending):
    lm = ending["exit"]
    tokens = [5, 6, min(lm.eos_ids), 7]
    out = lm.generate(PROMPT, sampling=SamplingParams(forced_token_ids=tokens, min_new_tokens=9))
    assert (list(out.token_ids), out.finish_reason) == (tokens[:3], "stop")


# The request's own processors.


def history(ids: torch.Tensor) -> int:
    """A token that every token before it decides on."""
    return sum((i + 1) * t for i, t in enumerate(ids[0].tolist())) % VOCAB_SIZE


def follow_history(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores[:, history(ids)] += 1000.0  # in place
    return scores


def lean_on_history(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores + 3.0 * torch.sin(history(ids) * torch.arange(VOCAB_SIZE))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("verification", ["coupled", "token", "block"])
def test_a_processor_sees_prompt_output_and_drafted_prefix(wrap, mode, verification):
    text = list(PROMPT)
    for _ in range(LIMIT):
        text.append(history(torch.tensor([text])))
    outputs = wrap("exit").generate(
        [PROMPT, text[:30]],
        max_new_tokens=LIMIT,
        sampling=MODES[mode],
        verification=verification,
        logits_processor=[follow_history],
    )
    assert list(outputs[0].token_ids) == text[len(PROMPT) :]
    assert list(outputs[1].token_ids)[: len(text) - 30] == text[30:]
    assert outputs[0].stats.acceptance_rate == 1.0  # drafts saw the same history


def test_what_is_written_in_place_is_not_what_the_model_said(wrap):
    def write_elsewhere(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return follow_history(ids, scores.clone())

    request = {"max_new_tokens": 6, "logprobs": 2}
    in_place, elsewhere = (
        wrap("exit").generate(PROMPT, logits_processor=[processor], **request)
        for processor in (follow_history, write_elsewhere)
    )
    assert in_place.logprobs == elsewhere.logprobs
    assert min(entry.logprob for entry in in_place.logprobs) < -1.0


@pytest.mark.parametrize("mode", MODES)
def test_own_processors_come_after_rules_and_before_temperature(wrap, mode):
    """With drafts as without, each sees what the one before it gave."""
    seen = []

    def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append((scores.shape, scores.dtype, bool(scores[0, 40].isneginf())))
        return scores

    params = replace(MODES[mode], bad_words_ids=[[40]])
    texts = {
        run(wrap(plan), params, num_draft_tokens=k, logits_processor=[look, lean_on_history])
        for plan, k in [("exit", 0), ("exit", 3), ("skipping", 6)]
    }
    assert len(texts) == 1
    assert texts != {run(wrap("exit"), params)}
    assert set(seen) == {((1, VOCAB_SIZE), torch.float32, True)}


class Refusing:
    """Raises when a text that begins with ``first`` has ``length`` tokens."""

    def __init__(self, first: int, length: int) -> None:
        self.first, self.length = first, length

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if int(ids[0, 0]) == self.first and ids.shape[1] >= self.length:
            raise RuntimeError("refused")
        return scores


@pytest.mark.parametrize("length", range(4, 12, 2))
def test_a_processor_that_raises_changes_nothing(wrap, length):
    """In a prefill, a draft or a verify pass; the other rows go on when its row is gone."""
    lm, prompts = wrap("exit"), ([9, 8, 7, 6], [3, 4, 5], [2])
    expected = [lm.generate(p, max_new_tokens=10).token_ids for p in prompts]
    batch = lm.open_batch(max_new_tokens=10, logits_processor=[Refusing(9, length)])
    bad, *good = [batch.add(p) for p in prompts]
    for _ in range(3):
        with pytest.raises(RuntimeError, match="refused"):
            finish(batch)
        assert bad in batch.unfinished
    cancelled = batch.remove(bad)
    # A draft that is refused may be up to four tokens ahead of the text.
    assert max(0, length - 4 - 5) <= len(cancelled.token_ids) <= length - 4
    assert cancelled.token_ids == expected[0][: len(cancelled.token_ids)]
    finish(batch)
    assert [batch.remove(row).token_ids for row in good] == expected[1:]


def one_nan(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.index_fill(1, torch.tensor([7]), math.nan)


def one_infinite(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.index_fill(1, torch.tensor([7]), math.inf)


def nothing_left(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return torch.full_like(scores, -math.inf)


@pytest.mark.parametrize("spoil", [one_nan, one_infinite, nothing_left])
@pytest.mark.parametrize(
    ("mode", "verification"),
    [("greedy", "coupled"), *[("sampled", v) for v in ("coupled", "token", "block")]],
)
@pytest.mark.parametrize("length", [len(PROMPT), len(PROMPT) + 5])
def test_scores_that_name_no_token_are_one_sentence(wrap, spoil, mode, verification, length):
    def late(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return spoil(ids, scores) if ids.shape[1] == length else scores

    for params in (replace(MODES[mode], top_p=1.0), replace(MODES[mode], top_k=5, min_p=0.1)):
        for k in (0, 3):
            with pytest.raises(ValueError, match=f"scores at position {length} are NaN, infinite"):
                run(
                    wrap("exit"),
                    params,
                    num_draft_tokens=k,
                    verification=verification,
                    logits_processor=[late],
                )


def test_a_processor_may_give_the_same_tensor_each_time(wrap):
    kept = torch.empty(1, VOCAB_SIZE)

    def biased(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        kept.copy_(scores)[:, ids[0, -1]] -= 4.0
        return kept

    plain, drafted = (
        run(wrap("exit"), SamplingParams(), num_draft_tokens=k, logits_processor=[biased])
        for k in (0, 4)
    )
    assert drafted == plain


def test_every_token_a_bad_word_is_one_sentence(wrap):
    everything = SamplingParams(bad_words_ids=[[t] for t in range(VOCAB_SIZE)])
    with pytest.raises(ValueError, match=r"scores at position 21 .* rule out every token") as error:
        run(wrap("exit"), everything)
    assert "look at the rules of sampling" in str(error.value)
    assert "float16" not in str(error.value)


@pytest.mark.parametrize("draft_tokens", [0, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("forced", [(), (7,)])
def test_a_row_that_nothing_may_follow_is_named_and_the_others_go_on(
    wrap, forced, mode, draft_tokens
):
    barred = [[*forced, t] for t in range(VOCAB_SIZE)]
    rules = {"bad_words_ids": barred, "forced_token_ids": list(forced)}
    batch = wrap("exit").open_batch(max_new_tokens=LIMIT, num_draft_tokens=draft_tokens)
    given = [MODES[mode], replace(MODES[mode], **rules), MODES[mode]]
    rows = [batch.add(PROMPT[i:], sampling=params) for i, params in enumerate(given)]
    for _ in range(2):  # as often as it is tried
        with pytest.raises(RowError, match=rf"^row {rows[1]}: the scores .* rule out") as caught:
            finish(batch)
        assert pickle.loads(pickle.dumps(caught.value)).row == caught.value.row == rows[1]
    assert batch.remove(rows[1]).token_ids == forced
    finish(batch)
    for i in (0, 2):
        alone = wrap("exit").generate(PROMPT[i:], max_new_tokens=LIMIT, sampling=MODES[mode])
        assert batch.remove(rows[i]).token_ids == alone.token_ids


def nothing_after(*tokens):
    """A processor that lets nothing follow a text that ends with these."""

    def barred(ids, scores):
        return scores - math.inf if ids[0, -len(tokens) :].tolist() == [*tokens] else scores

    return barred


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_draft_beyond_what_nothing_may_follow_changes_nothing(toy, mode, rows):
    """Scores behind a text's end are never seen without a draft, nor is an error before its turn:
    the first row goes on to it, the others end there."""
    lm = SelfSpeculativeLM(toy(), None, DraftPlan(NUM_LAYERS, tuple(range(NUM_LAYERS))))
    settings = {"max_new_tokens": LIMIT, "sampling": MODES[mode]}
    text = lm.generate(PROMPT, **settings, num_draft_tokens=0).token_ids
    barred, where = nothing_after(*text[:5]), f"the scores at position {len(PROMPT) + 5} "
    for k in (0, 4, 7):
        batch = lm.open_batch(**settings, num_draft_tokens=k, logits_processor=[barred])
        first, *others = (batch.add(PROMPT, max_new_tokens=n) for n in (LIMIT, 5, 5)[:rows])
        with pytest.raises(RowError, match=f"^row {first}: {where}"):
            finish(batch)
        out = batch.remove(first)
        assert out.token_ids == text[:5]
        assert sum(r.num_accepted_tokens for r in out.rounds) == (4 if k else 0)
        finish(batch)
        assert [batch.remove(row).token_ids for row in others] == [text[:5]] * len(others)


@pytest.mark.parametrize(
    ("processor", "got"),
    [
        (lambda ids, scores: None, "NoneType"),
        (lambda ids, scores: scores[0], r"\(331,\)"),
        (lambda ids, scores: scores[:, :9], r"\(1, 9\)"),
    ],
)
def test_a_processor_has_to_return_scores(wrap, processor, got):
    with pytest.raises(ValueError, match=rf"must return scores of shape \(1, 331\), got {got}"):
        run(wrap("exit"), SamplingParams(), logits_processor=[processor])


@pytest.mark.parametrize("temperature", [0.6, 1.9])
def test_a_processor_may_return_integers(wrap, temperature):
    """The temperature was rounded to theirs."""
    sampling, texts = SamplingParams(temperature=temperature, seed=4), []
    for kind in (torch.int64, torch.float32):
        whole = [lambda ids, scores, kind=kind: (3 * scores).round().to(kind)]
        texts.append(run(wrap("exit"), sampling, logits_processor=whole))
    assert texts[0] == texts[1]


BEYOND = [
    {"logit_bias": {VOCAB_SIZE: 1.0}},
    {"bad_words_ids": [[1, VOCAB_SIZE]]},
    {"forced_token_ids": [1, VOCAB_SIZE]},
]


@pytest.mark.parametrize("rule", BEYOND)
def test_ids_beyond_the_vocabulary_are_refused_before_decoding(wrap, rule):
    lm, params = wrap("exit"), SamplingParams(**rule)
    sentence = "sampling names token id 331; the model's vocabulary ends at 330"
    for method in (lm.generate, lm.stream):
        with pytest.raises(ValueError, match=sentence):
            method(PROMPT, sampling=params)
    with pytest.raises(ValueError, match=sentence):
        lm.open_batch(sampling=params)
    batch = lm.open_batch()
    with pytest.raises(ValueError, match=sentence):
        batch.add(PROMPT, sampling=params)
    assert batch.unfinished == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_bias_is_float32_whatever_the_default(dtype):
    torch.set_default_dtype(dtype)
    try:
        bias = LogitBias({5: 1.2345678}, 9, torch.device("cpu")).bias
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(bias[0, 5], torch.tensor(1.2345678))
