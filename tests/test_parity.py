"""The matrix: tokens are those of plain decoding, however they are drafted.

The plain reference of every case runs alone. Contexts lie around the blocks of 128 and 512 slots
that attention reads, and around the chunk of 512 tokens that a prefill takes.
"""

from collections.abc import Callable

import pytest
import torch
from snapshots import hf_text
from toys import DTYPES, FAMILIES, PLANS, SHAPES, VOCAB_SIZE, random_ids

from layerskip import GenerationOutput, SamplingParams, SelfSpeculativeLM
from layerskip.ops.reference import gumbel_noise
from layerskip.sampling import keep_mask

CONTEXTS = (1, 5, 61, 122, 130, 500, 509)
PROMPTS = [random_ids(n) for n in CONTEXTS]
SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, top_p=0.9, seed=3),
}
# Every family in both dtypes, each time with the other shape.
SHAPE_OF = {
    (family, dtype): list(SHAPES)[(i + j) % 2]
    for i, family in enumerate(FAMILIES)
    for j, dtype in enumerate(DTYPES)
}


def texts(outputs: list[GenerationOutput]) -> list[tuple[int, ...]]:
    return [out.token_ids for out in outputs]


def plain(lm: SelfSpeculativeLM, sampling: SamplingParams, count: int) -> list[tuple[int, ...]]:
    """Each prompt alone, without drafts."""
    settings = {"max_new_tokens": count, "sampling": sampling, "num_draft_tokens": 0}
    return texts([lm.generate(p, **settings) for p in PROMPTS])


def check_row_by_row(lm, expected, prompts=PROMPTS, **settings) -> None:
    count = len(expected[0])
    got = texts([lm.generate(p, max_new_tokens=count, **settings) for p in prompts])
    assert got == expected


def check_ragged_batch(lm, expected, **settings) -> None:
    outputs = lm.generate(PROMPTS, max_new_tokens=len(expected[0]), **settings)
    assert texts(outputs) == expected


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("family", "dtype"), SHAPE_OF)
@pytest.mark.one_in(2)
def test_drafting_never_changes_a_token(wrap: Callable, family, dtype, sampling):
    """A part of the matrix: three plans with lengths 1 to 8, in a batch and two prompts alone."""
    shape, params = SHAPE_OF[family, dtype], SAMPLINGS[sampling]
    expected = plain(wrap("exit", family, dtype, shape), params, 12)
    accepted = 0
    for plan, in_batch, single in (("exit", 4, 3), ("skipping", 8, 6), ("without-layer-0", 1, 7)):
        lm = wrap(plan, family, dtype, shape)
        check_ragged_batch(lm, expected, sampling=params, num_draft_tokens=in_batch)
        for prompt, tokens in [(PROMPTS[0], expected[0]), (PROMPTS[-1], expected[-1])]:
            settings = {"sampling": params, "num_draft_tokens": single}
            out = lm.generate(prompt, max_new_tokens=12, **settings)
            assert out.token_ids == tokens
            accepted += out.stats.num_accepted_tokens
    assert accepted > 0  # a draft that is never right tests half of the loop
    check_ragged_batch(lm, expected, sampling=params, num_draft_tokens=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(2)
def test_fp32_tokens_are_those_of_transformers(toy: Callable, wrap: Callable, family, shape):
    model, lm = toy(family, "float32", shape), wrap("exit", family, "float32", shape)
    for prompt, tokens in zip(PROMPTS, plain(lm, SamplingParams(), 24), strict=True):
        assert hf_text(model, prompt, 24) == list(tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_tokens_are_those_of_the_definition(toy: Callable, wrap: Callable, family):
    """``argmax(log p + g)``, g from (seed, position, token): written out over transformers."""
    params, text = SAMPLINGS["sampled"], random_ids(5)
    for position in range(5, 17):
        with torch.inference_mode():
            logits = toy(family)(torch.tensor([text])).logits[0, -1:]
        log_p = keep_mask(logits / params.temperature, params).log_softmax(-1)[0]
        text.append(int((log_p + gumbel_noise(3, position, VOCAB_SIZE)).argmax()))
    out = wrap("exit", family).generate(text[:5], max_new_tokens=12, sampling=params)
    assert list(out.token_ids) == text[5:]


def test_texts_are_worth_comparing(wrap: Callable):
    """Toy models that say the same whatever they read would pass every test above."""
    for dtype in DTYPES:
        outputs = plain(wrap("exit", "llama", dtype), SamplingParams(), 16)
        assert len(set(outputs)) == len(outputs)
        assert min(len(set(tokens)) for tokens in outputs) > 8


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_matrix(wrap: Callable, family, dtype, shape, plan, sampling):
    lm, params = wrap(plan, family, dtype, shape), SAMPLINGS[sampling]
    expected = plain(lm, params, 24)
    for k in range(9):
        check_row_by_row(lm, expected, sampling=params, num_draft_tokens=k)
        check_ragged_batch(lm, expected, sampling=params, num_draft_tokens=k)
