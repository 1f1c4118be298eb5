from hypothesis import given
from hypothesis import strategies as st

from layerskip.verification import count_matches

TOKENS = st.integers(0, 2)  # few, so that prefixes agree often


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
