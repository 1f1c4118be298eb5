"""Verification is proven by enumeration: every draft, every acceptance path, no statistics.

Small random models whose distributions depend on the whole history. The functions are those that
decoding calls; what decides over acceptance is integrated, not drawn.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from layerskip import SamplingParams
from layerskip.constraint import Context
from layerskip.ops.reference import (
    ACCEPTANCE_STREAM,
    DRAFT_STREAM,
    TARGET_STREAM,
    UNIFORM_BITS,
    Philox,
)
from layerskip.sampling import Drawn, Sampler
from layerskip.verification import (
    Case,
    acceptance_chances,
    count_accepted,
    count_matches,
    judge,
    judge_all,
    recovered,
)

TOKENS = st.integers(0, 2)  # few, so that prefixes agree often
SIZES = [(vocab, length) for vocab in (2, 3, 4) for length in (1, 2, 3, 4) if vocab + length < 8]
SEEDS = range(4)
DRAWN = ("token", "block")
NEARLY_0 = 1e-12

Text = tuple[int, ...]
Rule = Callable[[float], bool]


@given(st.lists(TOKENS, max_size=8), st.data())
def test_matches_are_the_longest_common_prefix(draft, data):
    target = data.draw(st.lists(TOKENS, min_size=len(draft) + 1, max_size=len(draft) + 1))
    prefixes = [n for n in range(len(draft) + 1) if draft[:n] == target[:n]]
    assert count_matches(draft, target) == max(prefixes)


@given(st.lists(TOKENS, max_size=8), TOKENS)
def test_all_match_when_the_target_agrees(draft, bonus):
    assert count_matches(draft, [*draft, bonus]) == len(draft)


@given(st.lists(TOKENS, max_size=8), st.lists(TOKENS, max_size=8), TOKENS)
def test_nothing_after_a_mismatch_counts(agreed, rest, bonus):
    draft, target = [*agreed, 0, *rest], [*agreed, 1, *rest, bonus]
    assert count_matches(draft, target) == len(agreed)


def test_an_empty_draft_matches_nothing():
    assert count_matches((), [5]) == 0


@dataclass(frozen=True, eq=False)
class Models:
    """A target and a draft model over a tiny vocabulary.

    Attributes:
        p, q: next-token distributions after texts of 0, 1, ... tokens: the i-th tensor has i + 1
            axes, the last one for the next token. p knows one more length than q.
    """

    p: list[Tensor]
    q: list[Tensor]

    @property
    def vocab(self) -> int:
        return len(self.p[0])

    @property
    def num_draft_tokens(self) -> int:
        return len(self.q)

    def rows(self, draft: Text) -> tuple[Tensor, Tensor]:
        """What verification sees of one draft."""
        p = [self.p[i][draft[:i]] for i in range(len(draft) + 1)]
        return torch.stack(p), torch.stack([self.q[i][draft[:i]] for i in range(len(draft))])


@cache
def make_models(kind: str, vocab: int, num_draft_tokens: int, seed: int) -> Models:
    generator = torch.Generator().manual_seed(seed)

    def scores(length: int) -> Tensor:
        shape = (vocab,) * (length + 1)
        return 1.5 * torch.randn(shape, generator=generator, dtype=torch.float64)

    p = [scores(i) for i in range(num_draft_tokens + 1)]
    q = [scores(i) for i in range(num_draft_tokens)]
    if kind == "zeros":  # at least the best token of each stays
        for s in (*p, *q):
            unlucky = torch.rand(s.shape, generator=generator) < 0.5
            s.masked_fill_(unlucky & (s < s.amax(-1, keepdim=True)), -math.inf)
    elif kind == "one-hot":
        q = [s.masked_fill(s < s.amax(-1, keepdim=True), -math.inf) for s in q]
    elif kind == "trimmed":
        for s in q:
            s[..., vocab - 1 :] = -math.inf
    elif kind == "near":
        q = [a + 0.1 * b for a, b in zip(p, q, strict=False)]
    elif kind == "equal":
        q = p[:-1]
    elif kind == "damaged":
        for s in p[1:]:
            s[torch.rand(s.shape[:-1], generator=generator) < 0.3] = math.nan
    return Models([s.softmax(-1) for s in p], [s.softmax(-1) for s in q])


KINDS = ("any", "zeros", "one-hot", "trimmed", "near", "equal", "damaged")


@dataclass(frozen=True)
class Stopping:
    """When a draft ends before its full length.

    Attributes:
        when: asked with one probability of q.
        looks_at: "before": the largest one, before the token is drawn. "after": the drawn
            token's; it stays in the draft ("kept") or not ("dropped").
    """

    when: Rule
    looks_at: Literal["before", "kept", "dropped"]


NEVER = Stopping(lambda q: False, "before")
# Two of these are allowed. Dropping what was drawn is not.
BEFORE, KEPT, DROPPED = (Stopping(lambda q: q < 0.6, how) for how in ("before", "kept", "dropped"))


def drafts(models: Models, stopping: Stopping) -> Iterator[tuple[Text, float]]:
    """Every draft and its probability."""
    growing: list[tuple[Text, float]] = [((), 1.0)]
    while growing:
        draft, chance = growing.pop()
        if len(draft) == models.num_draft_tokens:
            yield draft, chance
            continue
        row = models.q[len(draft)][draft]
        if stopping.looks_at == "before" and stopping.when(float(row.max())):
            yield draft, chance
            continue
        for token, q in enumerate(row.tolist()):
            if q == 0.0:
                continue
            if stopping.looks_at == "before" or not stopping.when(q):
                growing.append(((*draft, token), chance * q))
            else:
                yield ((*draft, token) if stopping.looks_at == "kept" else draft), chance * q


def acceptances(verification: str, chances: list[float]) -> Counter[int]:
    """Probability of each number of accepted tokens: all patterns of success and failure."""
    lengths: Counter[int] = Counter()
    for pattern in product((True, False), repeat=len(chances)):
        uniforms = [0.0 if success else 2.0 for success in pattern]
        weight = math.prod(c if s else 1.0 - c for c, s in zip(chances, pattern, strict=True))
        lengths[count_accepted(verification, chances, uniforms)] += weight
    return lengths


@dataclass(frozen=True)
class Outcome:
    """What comes of a round.

    Attributes:
        error: largest difference between the laws of a text as long as a full block: a round
            and the target after it, against the target alone. A text that meets a NaN ends there.
        num_accepted: expected.
    """

    error: float
    num_accepted: float


@cache
def outcome(
    models: Models,
    verification: str,
    stopping: Stopping = NEVER,
    *,
    rest: Callable[..., Tensor] = recovered,
    seen: Models | None = None,
) -> Outcome:
    """Enumerate a round.

    Args:
        rest: in place of ``recovered``.
        seen: the models that verification is told of, where they are others.
    """
    blocks = [torch.zeros_like(p) for p in models.p]
    expected = 0.0
    for draft, probability in drafts(models, stopping):
        if not draft:
            blocks[0] += probability * models.p[0]
            continue
        p, q = (seen or models).rows(draft)
        chances = acceptance_chances(verification, p, q, draft)
        for count, chance in acceptances(verification, chances).items():
            if chance > 0.0:
                after = p[count] if count == len(draft) else rest(verification, p, q, draft, count)
                blocks[count][draft[:count]] += probability * chance * after.nan_to_num()
                expected += probability * chance * count
    emitted, target = torch.tensor(0.0).double(), torch.tensor(1.0).double()
    for p, block in zip(models.p, blocks, strict=True):
        emitted = emitted[..., None] * p.nan_to_num() + block
        target = target[..., None] * p.nan_to_num()
    return Outcome(float((emitted - target).abs().max()), expected)


@pytest.mark.parametrize("verification", DRAWN)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(2)
def test_the_law_is_the_target_s(kind, verification):
    for size in SIZES:
        for seed in SEEDS:
            models = make_models(kind, *size, seed)
            for stopping in (NEVER, BEFORE, KEPT):
                error = outcome(models, verification, stopping).error
                assert error < NEARLY_0, f"{size}, seed {seed}, {stopping.looks_at}"


@pytest.mark.parametrize("kind", KINDS)
def test_block_never_accepts_fewer_in_expectation(kind):
    for size in SIZES:
        for seed in SEEDS:
            models = make_models(kind, *size, seed)
            token, block = (outcome(models, way, NEVER).num_accepted for way in DRAWN)
            assert block >= token - NEARLY_0
            if kind == "equal":
                assert token == pytest.approx(size[1])
                assert block == pytest.approx(size[1])


def test_expected_acceptance_is_the_paper_s():
    """The example of Sun et al. 2025: two tokens, two drafted, no history."""
    target = torch.tensor([1.0, 2.0]).double() / 3
    p = [target.expand((2,) * i) for i in (1, 2, 3)]
    models = Models(p, [row.flip(-1) for row in p[:2]])
    assert outcome(models, "token").num_accepted == pytest.approx(10 / 9)
    assert outcome(models, "block").num_accepted == pytest.approx(11 / 9)


def plain_p(verification, p, q, draft, num_accepted):
    """Wrong: the drafted token that p likes less than q was accepted too rarely already."""
    return p[num_accepted]


def token_level_residual(verification, p, q, draft, num_accepted):
    """Wrong for a block: forgets the weight of the accepted tokens."""
    return recovered("token", p, q, draft, num_accepted)


@pytest.mark.parametrize("verification", DRAWN)
def test_what_is_wrong_is_seen(verification):
    """Mistakes that are easily made: enumeration that let them pass would prove nothing."""
    models = make_models("trimmed", 3, 3, seed=1)
    bare = replace(models, q=[q * 0.7 for q in models.q])  # of the kept ids alone, as if all were
    errors = {
        "residual": outcome(models, verification, rest=plain_p).error,
        "dropping": outcome(models, verification, DROPPED).error,
        "trimming": outcome(models, verification, seen=bare).error,
    }
    if verification == "block":
        errors["weight"] = outcome(models, verification, rest=token_level_residual).error
    assert min(errors.values()) > 1e-3, errors


class Tables:
    """Logits of a target and a draft after any text over a tiny vocabulary, made when asked for."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab, self.seed = vocab, seed

        self.logits = cache(self._logits)

    def _logits(self, text: Text, *, draft: bool) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, text)) % 2**40)
        target, other = 1.5 * torch.randn(2, 1, self.vocab, generator=generator)
        return target if not draft else 0.6 * target + 0.8 * other


def decode(tables: Tables, sampler: Sampler, length: int, num_draft_tokens: int) -> Text:
    """Rounds over tables as ``Decoder`` does them, in a text of which 5 tokens were there."""
    text: Text = ()
    while len(text) < length:
        start, draft, q = 5 + len(text), (), []
        for i in range(num_draft_tokens):
            row = tables.logits(text + draft, draft=True)
            drawn = sampler.draft(row, start + i, start)
            token, distribution = drawn.token, drawn.q
            draft = (*draft, token)
            q += [] if distribution is None else [distribution]
        rows = [tables.logits(text + draft[:i], draft=False) for i in range(len(draft) + 1)]
        text = (*text, *judge(Case(sampler, torch.cat(rows), start, draft, q)).tokens)
    return text[:length]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 3}])
def test_coupled_texts_are_those_without_a_draft(params):
    """The same path, not the same law, for thousands of random (p, q)."""
    params = SamplingParams(**{"temperature": 0.7} | params)
    for seed in range(100):
        tables, sampler = Tables(5, seed), Sampler(params, seed, 5)
        plain = decode(tables, sampler, 10, 0)
        for num_draft_tokens in (1, 4):
            assert decode(tables, sampler, 10, num_draft_tokens) == plain


@pytest.mark.parametrize("verification", DRAWN)
def test_rounds_in_a_row_follow_the_target(verification):
    """With noise as decoding draws it. A round that met the numbers of an earlier, rejected draft
    again would be biased, which no enumeration of one round can see."""
    draws, length, tables = 1200, 4, Tables(2, 3)
    params = SamplingParams(temperature=1.0)
    counts = Counter(
        decode(tables, Sampler(params, seed, 2, verification=verification), length, 3)
        for seed in range(draws)
    )
    statistic = 0.0
    for text in product(range(2), repeat=length):
        p = math.prod(
            float(tables.logits(text[:i], draft=False).double().softmax(-1)[0, text[i]])
            for i in range(length)
        )
        statistic += (counts[text] - draws * p) ** 2 / (draws * p)
    assert statistic < 45.0  # 15 degrees of freedom: exceeded once in ten thousand


def sampler_of(verification: str, vocab: int = 331) -> Sampler:
    return Sampler(SamplingParams(temperature=1.0), 7, vocab, verification=verification)


def test_streams_are_distinct():
    """Each number of 24 bits; 1000 of two streams agree at about no place."""
    keys = [
        (position, stream, start)
        for position in (5, 6)
        for stream in (0, 1, 2)
        for start in (0, 3, 4)
    ]
    numbers = [Philox(7).bits(p, 1000, stream=stream, start=start) for p, stream, start in keys]
    for i, a in enumerate(numbers):
        for j, b in enumerate(numbers[:i]):
            assert (a == b).sum() < 3, (keys[i], keys[j])
    assert len({TARGET_STREAM, DRAFT_STREAM, ACCEPTANCE_STREAM}) == 3


def uniforms_as_bits(uniforms: list[float]) -> np.ndarray:
    return np.array([int(u * 2**UNIFORM_BITS) for u in uniforms])


def test_draft_and_accept_numbers_are_of_their_round():
    """The same position, drafted by rounds that start at different places. One place is 0, where
    only the stream tells a round's numbers from the target's."""
    sampler, flat = sampler_of("token"), torch.zeros(1, 331)
    assert sampler.draft(flat, 30, 0).token != sampler.pick(flat, 30)[0]
    others = [Philox(7).bits(0, 4, stream=stream) for stream in (TARGET_STREAM, DRAFT_STREAM)]
    assert all((uniforms_as_bits(sampler.uniforms(0, 4)) != other).all() for other in others)
    drafted = {start: sampler.draft(flat, 30, start).token for start in range(20, 31)}
    assert len(set(drafted.values())) > 8
    decided = [u for start in range(20, 31) for u in sampler.uniforms(start, 4)]
    assert len(set(decided)) == len(decided)
    assert [sampler.uniforms(20, n) for n in range(4)] == [decided[:n] for n in range(4)]
    assert sampler.draft(flat, 30, 25).token == drafted[25]


def test_coupled_drafts_take_the_target_s_numbers():
    sampler, flat = sampler_of("coupled"), torch.zeros(1, 331)
    for start in (20, 30):
        assert sampler.draft(flat, 30, start) == Drawn(sampler.pick(flat, 30)[0])


@pytest.mark.parametrize("verification", DRAWN)
@pytest.mark.parametrize("likely", [True, False])
def test_recovered_and_bonus_tokens_take_the_numbers_of_plain_decoding(verification, likely):
    """After a draft that is sure to be accepted, or rejected, and left p as it is."""
    sampler = sampler_of(verification, 8)
    for position in range(10, 40):
        q = torch.eye(8).double()[3]
        logits = torch.randn(2, 8, generator=torch.Generator().manual_seed(position))
        logits[0, 3] = 100.0 if likely else -math.inf
        verdict = judge(Case(sampler, logits, position, (3,), (q,)))
        assert verdict.num_matches == likely
        place = int(likely)
        plain = sampler.pick(logits[place : place + 1], position + place)
        assert verdict.tokens[place:] == plain


@pytest.mark.parametrize("verification", DRAWN)
def test_a_draft_ends_where_its_distribution_is_not_finite(verification):
    for bad in (math.nan, math.inf):
        logits = torch.zeros(1, 331)
        logits[0, 9] = bad
        assert sampler_of(verification).draft(logits, 30, 30) is None


@pytest.mark.parametrize("verification", DRAWN)
def test_a_target_that_is_not_finite_ends_what_is_confirmed_where_it_is_reached(verification):
    """Accepted as often as if p after it were known: p(1) / q(1) is about 0.2 here."""
    draws, reached = 100, 0
    q = torch.tensor([0.5, 0.5, 0.0, 0.0]).double()
    logits = torch.tensor([[1.0, 0.0, 1.0, 1.0], [math.nan] * 4, [0.0] * 4])
    for position in range(draws):
        sampler = Sampler(SamplingParams(temperature=1.0), 7, 4, verification=verification)
        verdict = judge(Case(sampler, logits, position, (1, 0), (q, q)))
        assert verdict.num_matches == verdict.is_cut
        assert not verdict.is_cut or verdict.tokens == [1]
        reached += verdict.is_cut
        with pytest.raises(ValueError, match=f"scores at position {position + 1} are NaN"):
            judge(Case(sampler, logits[1:], position + 1))  # as of the next round
    assert 0.1 * draws < reached < 0.35 * draws


@pytest.mark.parametrize("verification", DRAWN)
def test_the_last_bit_of_a_chance_is_enough(verification):
    """Numbers lie strictly between 0 and 1: no chance of 0 is taken, none of 1 is missed."""
    lowest, highest = 0.5 * 2.0**-UNIFORM_BITS, 1.0 - 0.5 * 2.0**-UNIFORM_BITS
    assert count_accepted(verification, [0.0], [lowest]) == 0
    assert count_accepted(verification, [1.0], [highest]) == 1
    assert count_accepted(verification, [0.0, 1.0], [lowest] * 2) == 2 * (verification == "block")


def rows_of_a_batch(dtype: torch.dtype = torch.float32) -> list[Case]:
    """Greedy rows and sampled ones of several temperatures, with cuts, processors and other
    verifications between them, each with a draft of its own length, right at first."""
    hot, cool = SamplingParams(temperature=1.3), SamplingParams(temperature=0.7)
    samplers = [
        Sampler(SamplingParams(), 0, 50),
        Sampler(hot, 1, 50),
        Sampler(replace(cool, top_k=5), 2, 50),
        Sampler(SamplingParams(), 3, 50),
        Sampler(cool, 4, 50),
        Sampler(cool, 5, 50, verification="token"),
        Sampler(hot, 6, 50, processors=(lambda _, scores: 2.0 * scores,)),
        Sampler(SamplingParams(), 7, 50, processors=(lambda _, scores: 2.0 * scores,)),
        Sampler(replace(hot, min_p=0.1), 8, 50),
        Sampler(cool, 9, 50),
        Sampler(SamplingParams(), 10, 50),
    ]
    cases = []
    for i, sampler in enumerate(samplers):
        generator = torch.Generator().manual_seed(i)
        logits = torch.randn(1 + i % 4, 50, generator=generator).to(dtype)
        logits[:, 10:20] = logits[:, :10]  # ties
        position, context = 20 + 3 * i, Context(tuple(range(20 + 3 * i)))
        draft = [0] * (len(logits) - 1)
        if draft and sampler.verification == "coupled":
            draft[0] = judge(Case(sampler, logits, position, draft, (), context)).tokens[0]
        q = [torch.eye(50).double()[token] for token in draft]
        cases.append(Case(sampler, logits, position, tuple(draft), tuple(q), context))
    return cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_judged_together_as_each_by_itself(dtype):
    cases = rows_of_a_batch(dtype)
    together = judge_all(cases)
    apart = [judge(case) for case in cases]
    assert [v.tokens for v in together] == [v.tokens for v in apart]
    assert {v.num_matches for v in together} == {0, 1}
    for one, other in zip(together, apart, strict=True):
        assert (one.scores is None) == (other.scores is None)
        assert one.scores is None or torch.equal(one.scores, other.scores)


@pytest.mark.parametrize("place", range(11))
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_judged_together_say_where_scores_are_no_numbers(place, bad):
    cases = rows_of_a_batch()
    spoilt = cases[place].logits.clone()
    spoilt[0, 30] = bad
    cases[place] = replace(cases[place], logits=spoilt, row=70 + place)
    where = rf"^row {70 + place}: the scores at position {cases[place].position} are NaN"
    with pytest.raises(ValueError, match=where):
        judge_all(cases)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0)])
def test_a_position_behind_what_stands_is_not_looked_at(params):
    """As of a row by itself: what follows a wrong token is no row's text."""
    logits = torch.zeros(2, 2, 50)
    logits[:, 1] = math.nan
    cases = [
        Case(sampler, own, 9, (judge(Case(sampler, own[:1], 9)).tokens[0] ^ 1,))
        for sampler, own in zip([Sampler(params, seed, 50) for seed in (1, 2)], logits, strict=True)
    ]
    assert [verdict.num_matches for verdict in judge_all(cases)] == [0, 0]
