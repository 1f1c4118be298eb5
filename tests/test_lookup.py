"""Prompt lookup, against a search through the whole text, and the store of earlier texts."""

import itertools
import math
import random
import threading
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerskip.lookup import LONGEST_MATCH, MOST_PLACES, Guess, LookupStore, TokenIndex

RANDOM = st.lists(st.integers(0, 3), max_size=120)
PERIODIC = st.builds(
    lambda start, unit, times, end: start + unit * times + end,
    st.lists(st.integers(0, 3), max_size=9),
    st.lists(st.integers(0, 3), min_size=1, max_size=9),
    st.integers(2, 30),
    st.lists(st.integers(0, 3), max_size=5),
)
TEXTS = st.one_of(RANDOM, PERIODIC)
AHEAD = st.lists(st.integers(0, 3), max_size=6)


def common_suffix(left: list[int], right: list[int]) -> int:
    pairs = zip(reversed(left), reversed(right), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], pairs))


def naive(text: list[int], max_tokens: int, ahead: list[int]) -> Guess:
    """Every place compared; of the committed text's, the newest few that share two tokens count."""
    whole = text + ahead
    lengths = {end: common_suffix(whole[:end], whole) for end in range(1, len(whole))}
    inside = [end for end in lengths if end < len(text)]
    pairs = [end for end in reversed(inside) if lengths[end] >= 2][:MOST_PLACES]
    singles = [end for end in reversed(inside) if lengths[end] >= 1][:1]
    counted = [end for end in lengths if end >= len(text)] + pairs + ([] if pairs else singles)
    best = max((min(lengths[end], LONGEST_MATCH) for end in counted), default=0)
    if best == 0 or max_tokens == 0:
        return Guess((), 0)
    end = max(end for end in counted if min(lengths[end], LONGEST_MATCH) == best)
    grown = list(whole)
    for i in range(max_tokens):
        grown.append(grown[end + i])
    return Guess(tuple(grown[len(whole) :]), best)


@given(TEXTS, AHEAD, st.integers(0, 12), st.data())
def test_a_guess_is_the_naive_one_however_the_text_came(text, ahead, max_tokens, data):
    cut = data.draw(st.integers(0, len(text)))
    index = TokenIndex(text[:cut])
    index.guess(3, ahead)
    index.extend(text[cut:])
    assert len(index) == len(text)
    assert index.guess(max_tokens, ahead) == naive(text, max_tokens, ahead)


@given(TEXTS)
def test_every_prefix_of_a_text_is_guessed_as_naively(text):
    index = TokenIndex()
    for i, token in enumerate(text):
        assert index.guess(4) == naive(text[:i], 4, [])
        index.extend([token])


@given(st.lists(st.integers(0, 2), min_size=2, max_size=30), AHEAD)
def test_in_a_short_text_no_suffix_that_matches_is_longer(text, ahead):
    whole = text + ahead
    longest = max(common_suffix(whole[:end], whole) for end in range(1, len(whole)))
    assert TokenIndex(text).guess(1, ahead).match_length == longest


def test_the_newest_of_equal_matches_is_taken_and_the_longest_before_it():
    assert TokenIndex([1, 2, 7, 1, 2, 8, 1, 2]).guess(3) == Guess((8, 1, 2), 2)
    assert TokenIndex([5, 1, 2, 7, 1, 2, 8, 5, 1, 2]).guess(1) == Guess((7,), 3)


def test_a_loop_goes_on_for_as_long_as_is_asked():
    assert TokenIndex([9, 1, 2, 3, 1, 2, 3]).guess(8) == Guess((1, 2, 3, 1, 2, 3, 1, 2), 3)
    assert TokenIndex([4, 4]).guess(3) == Guess((4, 4, 4), 1)


def test_a_draft_ahead_is_matched_and_forgotten():
    index = TokenIndex([1, 2, 3, 4, 5])
    assert index.guess(2) == Guess()
    assert index.guess(2, [1, 2]) == Guess((3, 4), 2)
    assert index.guess(4, [7, 8, 7]) == Guess((8, 7, 8, 7), 1)
    assert index.guess(2) == Guess()
    assert len(index) == 5


def test_only_the_newest_places_of_a_pair_are_compared():
    far, near = [7, 1, 2, 5], [8, 1, 2, 6]
    for places, expected in ((MOST_PLACES - 1, Guess((5,), 3)), (MOST_PLACES, Guess((6,), 2))):
        text = far + near * places + [7, 1, 2]
        assert TokenIndex(text).guess(1) == naive(text, 1, []) == expected


def test_matches_longer_than_the_limit_are_equals():
    unit = list(range(LONGEST_MATCH + 5))
    index = TokenIndex([*unit, 900, *unit, 901, *unit[3:]])
    assert index.guess(1) == Guess((901,), LONGEST_MATCH)
    assert TokenIndex([*unit, 900]).guess(1, unit) == Guess((900,), LONGEST_MATCH)


def test_a_text_of_one_token_over_and_over_costs_no_more():
    index = TokenIndex([3] * 100_000)
    assert index.guess(2) == Guess((3, 3), LONGEST_MATCH)


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([1, -1], ValueError, "got -1"),
        ([1, 2**31], ValueError, "got a larger one"),
        ([1, 2.0], TypeError, "must be integers"),
        ([1, "2"], TypeError, "must be integers"),
    ],
)
def test_what_is_no_token_id_is_refused_and_nothing_kept(tokens, error, message):
    store = LookupStore()
    index = TokenIndex([1, 2, 1], store=store)
    for call in (index.extend, store.add, lambda bad: index.guess(1, bad)):
        with pytest.raises(error, match=message):
            call(tokens)
    assert len(index) == 3
    assert len(store) == 0
    assert index.guess(1) == Guess((2,), 1)


@pytest.mark.parametrize("text", [b"abcdefgh", "ab", {9, 1}, [True, False]])
def test_a_store_takes_lists_of_token_ids_alone(text):
    """Bytes would be read as memory, four to a token."""
    store = LookupStore()
    with pytest.raises(TypeError, match="token ids"):
        store.add(text)
    assert len(store) == 0
    store.add(np.array([1, 2]))
    store.add(torch.tensor([3, 4]))
    assert len(store) == 5  # and one between them


def test_a_guess_is_a_value():
    with pytest.raises(FrozenInstanceError):
        Guess((1,), 1).match_length = 2


def stored(*tokens: int, match_length: int) -> Guess:
    return Guess(tokens, match_length, stored=True)


def test_a_store_counts_where_it_matches_much_more():
    store = LookupStore()
    store.add([1, 2, 3, 4, 5, 6])
    assert TokenIndex([3], store=store).guess(9) == stored(4, 5, 6, match_length=1)
    assert TokenIndex([2], store=store).guess(2, [3]) == stored(4, 5, match_length=2)
    assert TokenIndex([4, 9, 1, 2, 3, 4], store=store).guess(1) == stored(5, match_length=4)
    assert TokenIndex([4, 9, 2, 3, 4], store=store).guess(1) == Guess((9,), 1)
    assert TokenIndex([3, 4, 9, 1, 2, 3, 4], store=store).guess(1) == Guess((9,), 2)
    assert TokenIndex([2, 3]).guess(1) == store.guess(0, [2, 3]) == Guess()


def test_no_match_and_no_guess_of_a_store_crosses_texts():
    store = LookupStore()
    for text in ([1, 2], [3, 4], [5], [6, 7]):
        store.add(text)
    guesses = [store.guess(9, tail) for tail in ([1, 2], [2, 3], [2], [4], [5], [7])]
    assert guesses == [Guess(), stored(4, match_length=1), *[Guess()] * 4]


@given(st.lists(RANDOM, max_size=4), RANDOM)
def test_a_store_matches_as_the_naive_search_does(texts, tail):
    store = LookupStore()
    for text in texts:
        store.add(text)
    places = [(text, end) for text in texts for end in range(1, len(text))]
    lengths = [min(common_suffix(text[:end], tail), LONGEST_MATCH) for text, end in places]
    pairs = [i for i, length in enumerate(lengths) if length >= 2][-MOST_PLACES:]
    counted = pairs or [i for i, length in enumerate(lengths) if length][-1:]
    best = max(counted, key=lambda i: (lengths[i], i), default=None)
    expected = Guess()
    if best is not None:
        text, end = places[best]
        expected = stored(*text[end : end + 5], match_length=lengths[best])
    assert store.guess(5, tail) == expected


@pytest.mark.parametrize("bound", [16, 20])
def test_a_store_forgets_the_oldest_and_stays_in_its_bound(bound):
    store = LookupStore(max_tokens=bound)
    for start in range(0, 400, 4):
        store.add(range(start, start + 4))
        assert len(store) <= bound
        for kept in range(max(0, start - 4), start + 4, 4):
            assert store.guess(1, [kept, kept + 1]) == stored(kept + 2, match_length=2)
    assert store.guess(1, [0, 1]) == Guess()


@pytest.mark.parametrize(
    ("older", "newer", "expected"),
    [
        ([4, 2, 3, 9], [1, 2, 3, 8], stored(8, match_length=3)),
        ([1, 2, 3, 9], [4, 2, 3, 8], stored(9, match_length=3)),
        ([1, 2, 3, 9], [1, 2, 3, 8], stored(8, match_length=3)),
    ],
)
def test_both_halves_of_a_store_are_asked_and_the_newer_first(older, newer, expected):
    store = LookupStore(max_tokens=10)
    for text in (older, newer):
        store.add(text)
    assert store.guess(1, [1, 2, 3]) == expected


def test_of_a_text_too_long_a_store_keeps_the_end():
    store = LookupStore(max_tokens=20)
    for text in (range(100), range(200, 300)):
        store.add(text)
        assert store.guess(1, [text[-12], text[-11]]) == Guess()
        assert store.guess(1, [text[-10], text[-9]]) == stored(text[-8], match_length=2)
    store.add([])
    assert len(store) == 20
    assert store.guess(1, [95, 96]) == stored(97, match_length=2)


def test_a_store_too_small_is_refused():
    with pytest.raises(ValueError, match="max_tokens must be at least 2, got 1"):
        LookupStore(max_tokens=1)


@pytest.mark.parametrize("bound", [1e6, math.nan, "5", True, None])
def test_a_store_s_bound_is_an_int(bound):
    """Else the first text that is added would fail, at the end of its request."""
    with pytest.raises(TypeError, match="max_tokens must be an int, got "):
        LookupStore(max_tokens=bound)


@pytest.mark.parametrize("times", [0, 7, 30])
def test_a_text_whose_adding_is_interrupted_breaks_no_later_guess(times):
    class Interrupted(dict):
        def __setitem__(self, pair, place):
            if place > 40 + times:
                raise KeyboardInterrupt
            super().__setitem__(pair, place)

    text = random.Random(0).choices(range(3), k=40)
    store = LookupStore(1000)
    store.add(text)
    store._newer._last_pair = Interrupted(store._newer._last_pair)
    with pytest.raises(KeyboardInterrupt):
        store.add(text)
    for length in range(1, 40):
        store.guess(4, text[:length])
        store.add(text[:length])
    assert store.guess(3, text[4:20]).tokens == tuple(text[20:23])


def test_what_the_model_has_no_token_for_is_not_guessed():
    """A store may hold texts of a model with more."""
    store = LookupStore()
    store.add([*range(1, 10), 11, 500, 12])
    for size, tokens in ((501, (11, 500, 12)), (500, (11,)), (11, ()), (None, (11, 500, 12))):
        index = TokenIndex(range(1, 10), store=store, vocab_size=size)
        assert index.guess(3) == (Guess(tokens, 9, stored=True) if tokens else Guess())
    own = TokenIndex([1, 2, 5, 1, 2], store=store, vocab_size=11)
    assert own.guess(1) == Guess((5,), 2)


def test_threads_share_a_store():
    store, wrong = LookupStore(max_tokens=4_000), []

    def work(first: int) -> None:
        for i in range(200):
            unit = list(range(first + 10 * i, first + 10 * i + 10))
            store.add(unit)
            guess = store.guess(3, unit[:4])
            if guess not in (stored(*unit[4:7], match_length=4), Guess()):
                wrong.append(guess)

    threads = [threading.Thread(target=work, args=(10_000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 1_900 <= len(store) <= 4_000
