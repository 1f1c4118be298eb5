import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerskip import SamplingParams
from layerskip.sampling import Sampler
from layerskip.verification import count_matches, judge

TOKENS = st.integers(0, 2)  # few, so that prefixes agree often
DRAWN = ("token", "block")


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


@pytest.mark.parametrize("verification", DRAWN)
def test_a_target_that_is_not_finite_is_an_error_where_it_is_reached(verification):
    """Accepted as often as if p after it were known: p(1) / q(1) is about 0.2 here."""
    draws, failures = 100, 0
    q = torch.tensor([0.5, 0.5, 0.0, 0.0]).double()
    logits = torch.tensor([[1.0, 0.0, 1.0, 1.0], [math.nan] * 4, [0.0] * 4])
    for position in range(draws):
        sampler = Sampler(SamplingParams(temperature=1.0), 7, 4, verification=verification)
        try:
            judge(sampler, logits, position, (1, 0), (q, q))
        except ValueError:
            failures += 1
    assert 0.1 * draws < failures < 0.35 * draws
