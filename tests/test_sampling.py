import math
from unittest.mock import patch

import pytest
import torch
import transformers
from hypothesis import assume, given
from hypothesis import strategies as st

from layerskip import SamplingParams, sampling
from layerskip.params import SHARPNESS
from layerskip.sampling import AT_ONCE, Drawn, Sampler, confidences, keep_mask, portions

VOCAB_SIZE = 331
SETTINGS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": VOCAB_SIZE + 5},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.05},
    {},
]


def random_logits(rows: int, vocab: int = VOCAB_SIZE, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def softmax(scores: list[float]) -> list[float]:
    weights = [math.exp(s - max(scores)) for s in scores]
    return [w / math.fsum(weights) for w in weights]


def kept_slowly(scores: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """One row in Python lists: top-k (ties at the border stay), then top-p, then min-p."""
    kept = list(range(len(scores)))
    if 0 < top_k < len(scores):
        border = sorted(scores, reverse=True)[top_k - 1]
        kept = [i for i in kept if scores[i] >= border]
    if top_p < 1.0:
        likely_first = sorted(kept, key=lambda i: -scores[i])
        nucleus, before = [], 0.0
        for i, p in zip(likely_first, softmax([scores[i] for i in likely_first]), strict=True):
            assume(abs(before - top_p) > 1e-5)  # on the border float32 may decide either way
            if before < top_p:
                nucleus.append(i)
            before += p
        kept = nucleus
    if min_p > 0.0:
        p = dict(zip(kept, softmax([scores[i] for i in kept]), strict=True))
        border = min_p * max(p.values())
        assume(all(abs(q - border) > 1e-6 or q == max(p.values()) for q in p.values()))
        kept = [i for i in kept if p[i] >= border]
    return set(kept)


# Quarters: exact in float32, and equal often enough to test ties.
SCORES = st.lists(st.integers(-20, 20).map(lambda n: n / 4), min_size=1, max_size=24)
PROBABILITY = st.integers(1, 100).map(lambda n: n / 100)


# As a GPU sums up, and as a CPU does.
SUMS = st.sampled_from([sampling._behind, sampling._behind_in_order])


@given(SUMS, SCORES, st.integers(0, 30), PROBABILITY, st.integers(0, 100).map(lambda n: n / 100))
def test_keep_mask_keeps_what_lists_keep(behind, scores, top_k, top_p, min_p):
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    with patch.object(sampling, "_behind_in_order", behind):
        masked = keep_mask(torch.tensor([scores]), params)[0].tolist()
    expected = kept_slowly(scores, top_k, top_p, min_p)
    assert {i for i, s in enumerate(masked) if s > -math.inf} == expected
    assert all(masked[i] == scores[i] for i in expected)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_keep_mask_keeps_what_transformers_keeps(settings, temperature):
    logits = random_logits(50)
    warpers = [transformers.TemperatureLogitsWarper(temperature)]
    if "top_k" in settings:
        warpers.append(transformers.TopKLogitsWarper(settings["top_k"]))
    if "top_p" in settings:
        warpers.append(transformers.TopPLogitsWarper(settings["top_p"]))
    if "min_p" in settings:
        warpers.append(transformers.MinPLogitsWarper(settings["min_p"]))
    expected = logits
    for warper in warpers:
        expected = warper(None, expected)
    params = SamplingParams(temperature=temperature, **settings)
    assert torch.equal(keep_mask(logits / temperature, params), expected)


@pytest.mark.parametrize("settings", SETTINGS)
def test_rows_together_are_rows_alone(settings):
    logits = random_logits(9)
    params = SamplingParams(temperature=0.8, seed=5, **settings)
    together = keep_mask(logits, params)
    alone = torch.cat([keep_mask(row[None], params) for row in logits])
    assert torch.equal(together, alone)
    sampler = Sampler(params, 5, VOCAB_SIZE)
    picked = sampler.pick(logits, 30)
    fresh = Sampler(params, 5, VOCAB_SIZE)
    assert picked == [fresh.pick(logits[i : i + 1], 30 + i)[0] for i in range(9)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 5, VOCAB_SIZE, 100_000])
def test_greedy_ties_go_to_the_lowest_id(dtype, vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(4, vocab, generator=generator).clamp(max=1.0).to(dtype)
    places = [torch.randint(vocab, (5,), generator=generator).tolist() for _ in range(4)]
    for row, ids in enumerate(places):
        logits[row, ids] = 2.0
    sampler = Sampler(SamplingParams(), 0, vocab)
    assert sampler.pick(logits, 0) == [min(ids) for ids in places]


def test_a_pick_depends_on_seed_and_position_alone():
    logits = torch.zeros(1, VOCAB_SIZE)
    params = SamplingParams(temperature=1.0, seed=1)
    picks = {
        (seed, position): Sampler(params, seed, VOCAB_SIZE).pick(logits, position)[0]
        for seed in range(8)
        for position in range(8)
    }
    assert len(set(picks.values())) > 40  # 64 draws of 331 ids repeat about six times
    walked = Sampler(params, 3, VOCAB_SIZE)
    again = [walked.pick(logits, position)[0] for position in (5, 2, 5, 7)]
    assert again == [picks[3, position] for position in (5, 2, 5, 7)]


def test_noise_is_made_once_and_forgotten():
    sampler = Sampler(SamplingParams(temperature=1.0), 3, VOCAB_SIZE)
    kept, dropped = sampler.noise(8), sampler.noise(7)
    sampler.forget_before(8)
    assert sampler.noise(8) is kept
    assert sampler.noise(7) is not dropped
    assert torch.equal(sampler.noise(7), dropped)


def test_noise_is_kept_where_the_scores_are():
    sampler, elsewhere = (
        Sampler(SamplingParams(temperature=1.0), 3, VOCAB_SIZE),
        torch.device("meta"),
    )
    here, there = sampler.noise(8), sampler.noise(8, elsewhere)
    assert (here.device.type, there.device.type) == ("cpu", "meta")
    assert sampler.noise(8, elsewhere) is there
    assert torch.equal(sampler.noise(8), here)


@pytest.mark.parametrize("found", ["kernel", None])
def test_a_gpu_s_noise_is_its_kernel_s_if_there_is_one(monkeypatch, found):
    asked = []
    monkeypatch.setattr("layerskip.ops.registry.cuda_noise", lambda d: asked.append(d) or found)
    gpu = torch.device("cuda", 1)
    assert sampling._noise_kernels(gpu) is found
    assert sampling._noise_kernels(torch.device("cpu")) is None
    assert asked == [gpu]


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * counts.sum()
    assert expected.min() > 5, "too few draws for the test to be sound"
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("seed", [0, 1])
def test_sampling_at_temperature_1_follows_softmax(seed):
    draws = 6000
    logits = torch.randn(20, generator=torch.Generator().manual_seed(seed))
    sampler = Sampler(SamplingParams(temperature=1.0), seed, 20)
    picked = torch.tensor(sampler.pick(logits.expand(draws, 20), 0))
    statistic = chi_square(picked.bincount(minlength=20), logits.softmax(-1))
    assert statistic < 64.0  # 19 degrees of freedom: exceeded once in a million


def test_restricted_sampling_follows_the_renormalised_softmax():
    draws = 6000
    logits = torch.randn(20, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(temperature=0.7, top_k=6)
    picked = torch.tensor(Sampler(params, 4, 20).pick(logits.expand(draws, 20), 100))
    best = logits.topk(6).indices
    assert set(picked.tolist()) == set(best.tolist())
    probabilities = (logits[best] / 0.7).softmax(-1)
    assert chi_square(picked.bincount(minlength=20)[best], probabilities) < 38.0  # 5 degrees


def test_confidence_is_of_those_who_may_win():
    two = torch.tensor([[4.0, 3.5], [4.0, 4.0], [4.0, -math.inf], [math.nan, 1.0]])
    beside, tied, alone, none = confidences(two)
    assert beside == pytest.approx(1.0 / (1.0 + math.exp(-SHARPNESS * 0.5)))
    assert (tied, alone) == (0.5, 1.0)
    assert math.isnan(none)
    hopeless = torch.cat([torch.tensor([[5.0, 2.0]]), torch.zeros(1, 4000)], dim=-1)
    assert hopeless.softmax(-1).amax() < 0.04  # each may be drawn, and none overtakes
    assert confidences(hopeless)[0] > 0.99


@pytest.mark.parametrize("processors", [(), (lambda ids, scores: scores,)])
def test_a_greedy_draft_is_as_sure_as_its_logits(processors):
    logits = random_logits(1)
    sampler = Sampler(SamplingParams(temperature=0.0), 0, VOCAB_SIZE, processors=processors)
    drawn = sampler.draft(logits, 9, 9, (1, 2), with_confidence=True)
    assert drawn == Drawn(int(logits.argmax()), None, confidences(logits)[0])


def test_a_sampled_draft_is_as_sure_as_its_noise_lets_it_be():
    """In logits, whatever the temperature: what other layers change of them knows none."""
    logits, told = random_logits(1), []
    for temperature in (0.2, 0.8):
        sampler = Sampler(SamplingParams(temperature=temperature), 3, VOCAB_SIZE)
        drawn = sampler.draft(logits, 9, 9, with_confidence=True)
        won = logits + temperature * sampler.noise(9)
        assert drawn.token == int(won.argmax())
        assert drawn.confidence == pytest.approx(confidences(won)[0], rel=1e-4)
        told.append(drawn.confidence)
    assert told[0] != told[1]


def test_scores_of_doubles_are_over_the_whole_temperature():
    doubled = [lambda ids, scores: scores.double()]
    sampler = Sampler(SamplingParams(temperature=0.8), 3, VOCAB_SIZE, processors=doubled)
    logits = random_logits(1)
    assert torch.equal(sampler.scores(logits, (1, 2)), logits.double() / 0.8)


def test_token_and_block_drafts_are_as_sure_as_their_probability():
    for verification in ("token", "block"):
        params = SamplingParams(temperature=0.8)
        sampler = Sampler(params, 3, VOCAB_SIZE, verification=verification)
        drawn = sampler.draft(random_logits(1), 9, 9, with_confidence=True)
        assert drawn.confidence == float(drawn.q[drawn.token])


def test_rows_are_chosen_for_at_once_as_far_as_the_caches_reach():
    eight = AT_ONCE // 8, torch.device("cpu")
    assert portions([1] * 19, *eight) == [range(8), range(8, 16), range(16, 19)]
    assert portions([3, 4, 1, 5, 9, 2], *eight) == [
        range(3),
        range(3, 4),
        range(4, 5),  # more than eight, by itself
        range(5, 6),
    ]
    assert [len(part) for part in portions([1] * 3, 2 * AT_ONCE, eight[1])] == [1, 1, 1]


@pytest.mark.parametrize("context", [(), (3,), (3, 1, 4), [1, 5, 9]])
def test_processors_are_shown_ids_of_a_kind_whatever_the_context(context):
    shown = []

    def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        shown.append((ids.dtype, ids.tolist()))
        return scores

    sampler = Sampler(SamplingParams(), 0, VOCAB_SIZE, processors=[look])
    sampler.scores(torch.zeros(1, VOCAB_SIZE), context)
    assert shown == [(torch.int64, [list(context)])]
