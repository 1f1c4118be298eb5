"""Look-ups against a naive search over random and periodic texts, and a store of texts."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerskip.lookup import LONGEST_MATCH, MOST_TRIED, Guess, LookupStore, TokenIndex

TEXTS = st.lists(st.integers(0, 2), max_size=40)


def naive(text, max_tokens):
    """The longest suffix of two tokens or more that occurred before; the latest occurrence."""
    best = (0, 0)
    for end in range(len(text) - 1, 1, -1):
        length = 0
        while length < end and text[end - 1 - length] == text[-1 - length]:
            length += 1
        if length >= 2 and length > best[0]:
            best = (length, end)
    length, end = best
    if not length:
        return Guess((), 0)
    longer = list(text)
    for i in range(end, end + max_tokens):
        longer.append(longer[i])
    return Guess(tuple(longer[len(text) :]), length)


def tried(text, n):
    """Earlier ends of the text's last n-gram."""
    return sum(text[i : i + n] == text[-n:] for i in range(len(text) - n))


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(1, 12))
def test_a_guess_is_what_a_naive_search_finds(text, max_tokens):
    index = TokenIndex(text)
    expected = naive(text, max_tokens)
    if tried(text, 3) <= MOST_TRIED and tried(text, 2) <= MOST_TRIED:
        assert index.guess(max_tokens) == expected
    else:  # older occurrences are not compared: the match may be shorter
        assert 2 <= index.guess(max_tokens).match_length <= expected.match_length


@settings(max_examples=300, deadline=None)
@given(TEXTS, TEXTS, st.integers(1, 12))
def test_tokens_ahead_are_looked_up_as_if_they_were_text(text, ahead, max_tokens):
    both = [*text, *ahead]
    few = tried(both, 3) <= MOST_TRIED and tried(both, 2) <= MOST_TRIED
    index = TokenIndex(text)
    got = index.guess(max_tokens, ahead)
    assert len(index) == len(text)
    if ahead and few:  # occurrences that begin or end in `ahead` are not in the index
        assert got.match_length <= naive(both, max_tokens).match_length
        if got.match_length:
            length = got.match_length
            assert any(both[i : i + length] == both[-length:] for i in range(len(both) - length))


@settings(max_examples=100, deadline=None)
@given(TEXTS, TEXTS)
def test_a_text_that_grows_is_one_that_was_given_whole(first, second):
    index = TokenIndex(first)
    index.extend(second)
    assert index.guess(8) == TokenIndex([*first, *second]).guess(8)


def test_periods_repeat_beyond_the_end():
    assert TokenIndex([7, 1, 2, 3, 1, 2, 3, 1, 2]).guess(7).tokens == (3, 1, 2, 3, 1, 2, 3)
    assert TokenIndex([5, 5, 5]).guess(4) == Guess((5, 5, 5, 5), 2)


def test_a_match_says_how_long_it_is():
    text = list(range(100, 100 + LONGEST_MATCH + 9))
    assert TokenIndex([*text, 1, *text]).guess(1) == Guess((1,), LONGEST_MATCH)
    assert TokenIndex([1, 2, 9, 1, 2]).guess(2) == Guess((9, 1), 2)
    assert TokenIndex([1, 2, 9, 3, 2]).guess(2) == Guess((), 0)
    assert TokenIndex([1, 2, 9, 1, 2]).guess(0) == Guess((), 0)


def test_a_store_answers_where_the_text_does_not():
    store = LookupStore()
    store.add([1, 2, 3, 4])
    index = TokenIndex([9, 1, 2], store=store)
    assert index.guess(9) == Guess((3, 4), 2)  # up to its text's end
    assert TokenIndex([9, 3, 4], store=store).guess(3) == Guess((), 0)
    own = TokenIndex([8, 1, 2, 7, 1, 2], store=store)
    assert own.guess(1) == Guess((7,), 2)  # of equal matches the text's own
    store.add([8, 7, 1, 2, 5])
    assert own.guess(1) == Guess((5,), 3)


def test_matches_do_not_reach_into_another_text_of_a_store():
    store = LookupStore()
    store.add([1])
    store.add([2, 3])
    assert TokenIndex([1, 2], store=store).guess(1) == Guess((), 0)


def test_a_store_is_bounded_and_forgets_the_oldest():
    store = LookupStore(max_tokens=100)
    for i in range(200):
        store.add([1000 + i, 2000 + i, 3000 + i])
        assert len(store) <= 100
    assert TokenIndex([1199, 2199], store=store).guess(1).tokens == (3199,)
    assert TokenIndex([1000, 2000], store=store).guess(1).tokens == ()
    store.add(range(5000))
    assert TokenIndex([4997, 4998], store=store).guess(2).tokens == (4999,)


@pytest.mark.parametrize("size", [0, True, 2.5])
def test_a_store_needs_a_size(size):
    with pytest.raises(ValueError, match="max_tokens must be"):
        LookupStore(size)


def test_threads_share_a_store():
    store, found = LookupStore(max_tokens=500), []

    def work(base):
        for i in range(200):
            store.add([base, base + 1, base + 2 + i % 3])
            guess = TokenIndex([base, base + 1], store=store).guess(1)
            found.append(guess.tokens in {(base + 2,), (base + 3,), (base + 4,), ()})

    threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 800
    assert all(found)
