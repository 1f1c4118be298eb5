"""Log-probabilities of emitted tokens: the full model's own, the same floats with drafts and
without, and as many as tokens wherever a block was cut."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import DTYPES, VOCAB_SIZE, random_ids

from layerskip import GenerationOutput, SamplingParams, SelfSpeculativeLM
from layerskip.sampling import token_logprobs

SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=3)
RULED = SamplingParams(repetition_penalty=1.7, bad_words_ids=[[40]], min_new_tokens=2)
PROMPTS = [random_ids(n) for n in (2, 61, 130)]


def run(lm: SelfSpeculativeLM, prompts: Any = None, **more: Any) -> Any:
    settings = {"max_new_tokens": 12, "logprobs": 3} | more
    return lm.generate(PROMPTS if prompts is None else prompts, **settings)


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED, RULED], ids=["0", "0.8", "rules"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_drafts_and_other_rows_change_no_float(wrap, dtype, sampling):
    lm = wrap("exit", "llama", dtype)
    expected = [run(lm, p, sampling=sampling, num_draft_tokens=0).logprobs for p in PROMPTS]
    for other in (lm, wrap("skipping", "llama", dtype)):
        assert [out.logprobs for out in run(other, sampling=sampling)] == expected
    assert run(lm, PROMPTS[1], sampling=sampling, num_draft_tokens=7).logprobs == expected[1]


@pytest.mark.parametrize("verification", ["token", "block"])
def test_verification_by_distribution_reports_the_same_model(wrap, verification):
    """The text is of its own, so it is forced on plain decoding, which gives the same floats."""
    hot = SamplingParams(temperature=1.2, seed=9)
    fast = run(wrap("exit"), PROMPTS[1], sampling=hot, verification=verification)
    forced = SamplingParams(forced_token_ids=fast.token_ids)
    slow = run(wrap("exit"), PROMPTS[1], sampling=forced, num_draft_tokens=0)
    assert fast.logprobs == slow.logprobs
    assert fast.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED, RULED], ids=["0", "0.8", "rules"])
def test_they_are_the_log_softmax_of_the_model_itself(toy, wrap, sampling):
    """Before temperature and rules, which change the text but not what it is judged by."""
    for prompt, out in zip(PROMPTS, run(wrap("exit"), sampling=sampling), strict=True):
        with torch.inference_mode():
            logits = toy()(torch.tensor([[*prompt, *out.token_ids]])).logits[0]
        expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
        assert [entry.token_id for entry in out.logprobs] == list(out.token_ids)
        for row, entry in zip(expected, out.logprobs, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
            ids, values = zip(*entry.top, strict=True)
            assert list(values) == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
            assert list(values) == pytest.approx(row[list(ids)].tolist(), abs=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_tokens_are_the_likeliest(wrap, dtype):
    for out in run(wrap("exit", "llama", dtype)):
        assert [entry.top[0] for entry in out.logprobs] == [
            (entry.token_id, entry.logprob) for entry in out.logprobs
        ]


@pytest.mark.parametrize("count", [0, 1, 100])
def test_as_many_likeliest_as_asked_for(wrap, count):
    for entry in run(wrap("exit"), PROMPTS[0], logprobs=count).logprobs:
        values = [value for _, value in entry.top]
        assert len({token for token, _ in entry.top}) == count
        assert values == sorted(values, reverse=True)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 50))
def test_ties_go_to_the_lowest_id(levels, count):
    (entry,) = token_logprobs(torch.tensor([levels]).bfloat16(), [0], count)
    likely_first = sorted(range(len(levels)), key=lambda i: (-levels[i], i))
    assert [token for token, _ in entry.top] == likely_first[:count]


def test_likeliest_is_by_logit_not_by_what_rounding_leaves_of_it():
    """Greedy decoding compares logits, and two of them may have one log-probability."""
    logits = torch.zeros(1, 50)
    logits[0, 9] = 1e-8
    (entry,) = token_logprobs(logits, [7], 2)
    assert entry.top == ((9, entry.logprob), (0, entry.logprob))


def ends_of(text: str, tokens: tuple[int, ...]) -> list[dict[str, Any]]:
    stops = [{"stop": text[i : i + 2]} for i in range(0, len(text) - 1, 2)]
    return [*stops, *({"max_new_tokens": n} for n in range(1, len(tokens)))]


def test_one_for_each_token_wherever_a_block_is_cut(talking):
    whole = run(talking, "the tea")
    for end in ends_of(whole.text, whole.token_ids):
        out = run(talking, "the tea", num_draft_tokens=6, **end)
        assert [entry.token_id for entry in out.logprobs] == list(out.token_ids)
        assert out.logprobs == whole.logprobs[: len(out.token_ids)]
        for r in out.rounds:
            assert [entry.token_id for entry in r.logprobs] == list(r.token_ids)


def test_streams_and_batches_report_them_round_by_round(talking):
    expected = run(talking, "the tea").logprobs
    steps = list(talking.stream("the tea", max_new_tokens=12, logprobs=3))
    assert tuple(entry for step in steps for entry in step.logprobs) == expected
    batch = talking.open_batch(max_new_tokens=12, logprobs=3)
    row = batch.add("the tea")
    batch.step()
    batch.step()
    early = batch.remove(row)
    assert early.logprobs == expected[: len(early.token_ids)]


def test_json_holds_them_if_they_were_asked_for(wrap):
    out: GenerationOutput = run(wrap("exit"), PROMPTS[0], max_new_tokens=2)
    content = json.loads(json.dumps(out.to_dict(), allow_nan=False))
    expected = [dataclasses.asdict(entry) for entry in out.logprobs]
    assert content["logprobs"] == json.loads(json.dumps(expected))
    assert content["logprobs"][0]["token_id"] == out.token_ids[0]
    assert set(content["logprobs"][0]) == {"token_id", "logprob", "top"}
    assert "logprobs" not in run(wrap("exit"), PROMPTS[0], logprobs=None).to_dict()


@pytest.mark.parametrize(
    ("value", "error", "rule"),
    [
        (-1, ValueError, "between 0 and 100, got -1"),
        (101, ValueError, "between 0 and 100, got 101"),
        (True, TypeError, "an int, got True"),
        ("3", TypeError, "an int, got '3'"),
    ],
)
def test_how_many_is_checked(wrap, value, error, rule):
    for method in (wrap("exit").generate, wrap("exit").stream):
        with pytest.raises(error, match=f"logprobs must be {rule}"):
            method([1], logprobs=value)


def test_a_vocabulary_may_be_smaller_than_the_count():
    entries = token_logprobs(torch.zeros(2, 3), [2, 0], 5)
    assert [len(entry.top) for entry in entries] == [3, 3]
    assert VOCAB_SIZE > 100  # the largest count that `generate` takes fits the toys
