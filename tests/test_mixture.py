"""What requests are like: shares of hopeless and ordinary ones, and which of them one may be."""

from random import Random

import hypothesis.strategies as st
import pytest
from controlling import judged
from hypothesis import given, settings

from layerskip.control.experience import Experience
from layerskip.control.mixture import (
    DOUBTED,
    FIRST_SHARES,
    LIKELIHOODS,
    NUM_HOPELESS,
    NUM_SLOW,
    ODDS_RATIOS,
    RECENT,
    Mixture,
    Sort,
)

COMMON = [0.6] * 8


def stream(acceptances, *, drafts=16, seed=0):
    """The mixture once requests with such acceptances are over, one after another."""
    mixture, chance = Mixture(), Random(seed)
    for acceptance in acceptances:
        sort = Sort(mixture)
        for _ in range(drafts):
            sort.add(judged([chance.random() < acceptance for _ in range(3)]), COMMON)
    return mixture


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_the_share_of_hopeless_requests_is_learnt(share):
    shares = stream([0.01 if i % 4 < 4 * share else 0.8 for i in range(2 * RECENT)]).shares
    assert sum(shares) == pytest.approx(1.0)
    assert sum(shares[:NUM_HOPELESS]) == pytest.approx(share, abs=0.06)


def test_requests_that_are_alike_are_of_one_sort():
    """Though some of them are unlucky."""
    for seed in range(3):
        shares = stream([0.6] * 48, seed=seed).shares
        assert max(shares) == shares[3]
        assert sum(shares[:NUM_SLOW]) < 0.1


def test_what_was_long_ago_is_forgotten():
    mixture = stream([0.01] * RECENT + [0.8] * RECENT)
    assert sum(mixture.shares[:NUM_HOPELESS]) < 0.05


def after(mixture, *drafts):
    sort = Sort(mixture)
    for draft in drafts:
        sort.add(draft, COMMON)
    return sort


def test_a_wrong_draft_is_bad_luck_where_no_request_is_hopeless():
    alike, mixed = stream([0.6] * 40), stream([0.01, 0.8, 0.8, 0.8] * 10)
    wrong = [[False]] * 3
    assert after(alike, *wrong).hopes(COMMON[:1])[0] > 0.55
    assert after(mixed, *wrong).hopes(COMMON[:1])[0] < 0.1
    assert not after(alike, *wrong).is_doubted
    assert after(mixed).is_doubted  # one of four is
    assert not after(mixed, [True] * 3, [True] * 3).is_doubted


def test_few_requests_are_thought_to_be_hopeless_before_any_is_seen():
    new = Mixture()
    assert not after(new, [False]).is_doubted
    assert sum(FIRST_SHARES[:NUM_HOPELESS]) / sum(FIRST_SHARES) < DOUBTED
    sort = after(new, *[[False]] * 8)
    assert sort.is_doubted
    assert sort.hopes(COMMON[:1])[0] < 0.3


def test_a_text_may_become_like_any_other():
    mixed = stream([0.01, 0.8, 0.8, 0.8] * 10)
    sort = after(mixed, *[[False]] * 50)
    for _ in range(4):
        sort.add([True] * 4, COMMON)
    assert not sort.is_doubted
    assert sort.hopes(COMMON[:1])[0] > 0.5


def test_requests_that_have_not_ended_count():
    """Those of the first batch are known before the first of them is done."""
    mixture = Mixture()
    sorts = [Sort(mixture) for _ in range(8)]
    for _ in range(8):
        for i, sort in enumerate(sorts):
            sort.add([i % 2 == 0] * 2 if i % 2 == 0 else [False], COMMON)
    assert sum(mixture.shares[:NUM_HOPELESS]) == pytest.approx(0.45, abs=0.1)


def test_a_draft_of_which_nothing_was_judged_tells_nothing():
    mixture = Mixture()
    sort = Sort(mixture)
    before = sort.posterior
    for _ in range(100):
        sort.add([], COMMON)
    assert sort.posterior == before
    assert mixture.shares == Mixture().shares


def test_likelihoods_are_odds_times_those_of_all():
    for place, acceptance in ((60, 0.605), (99, 0.995), (0, 0.005)):
        for ratio, wrong, right in zip(ODDS_RATIOS, *LIKELIHOODS[place], strict=True):
            assert wrong + right == pytest.approx(1.0)
            assert right / wrong == pytest.approx(ratio * acceptance / (1.0 - acceptance))


@settings(max_examples=30)
@given(
    st.sampled_from([(0.7,), ()]),
    st.lists(st.lists(st.booleans(), min_size=1, max_size=8), max_size=80),
)
def test_a_posterior_is_a_distribution_whatever_was_drafted(prior, drafts):
    experience = Experience(prior)
    sort = Sort(experience.mixture)
    for draft in drafts:
        told = judged(draft)
        sort.add(told, experience.acceptances)
        experience.add(told)
    assert sum(sort.posterior) == pytest.approx(1.0)
    assert min(sort.posterior) > 0.0
    hopes = sort.hopes(experience.acceptances)
    assert hopes == sorted(hopes, reverse=True)
    assert all(0.0 < hope < 1.0 for hope in hopes)
