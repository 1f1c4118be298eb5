"""Prompt lookup: guess the next tokens from what followed the same tokens earlier.

A text's longest suffix that stood in it before is found by the places of its last two tokens,
newest first, compared backwards. A suffix automaton finds it too, but takes longer and far more
memory, and guesses no better. The idea is Saxena's
(github.com/apoorvumang/prompt-lookup-decoding). Pure Python: nothing here runs a model.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, takewhile
from threading import Lock

from layerskip.params import check_integer

# More places of a pair find longer matches, but older ones: nothing gained, measured.
MOST_PLACES = 32
LONGEST_MATCH = 64
# A store's match counts for less than the own text's: at equal lengths it is accepted less.
STORE_HANDICAP = 3
NOTHING = array("i")
# Between two texts of a store. No token is negative, so nothing matches across it.
SEPARATOR = -1
FORCED_MATCH = LONGEST_MATCH + 1  # stands for text that a grammar forces


@dataclass(frozen=True)
class Guess:
    """Tokens that followed an earlier occurrence of a text's longest suffix.

    Attributes:
        tokens: the guess; empty if nothing matched.
        match_length: tokens of the suffix that matched, ``LONGEST_MATCH`` at most: the longer,
            the likelier the guess. ``FORCED_MATCH`` of tokens that a grammar forces.
        stored: it comes from a store: less likely than one of the own text at the same length.
    """

    tokens: tuple[int, ...] = ()
    match_length: int = 0
    stored: bool = False


NO_GUESS = Guess()


class TokenIndex:
    """One request's text, prompt and output so far, ready to be looked up.

    Args:
        tokens: the prompt's ids.
        store: texts of earlier requests. They count where the own text has no match, or one that
            is shorter by ``STORE_HANDICAP`` or more.
        vocab_size: of the model, which a store need not know: a guess ends before what is beyond.
            None: any token may be guessed.

    Raises:
        TypeError: a token is not an integer.
        ValueError: a token is negative, or 2**31 or more.
    """

    def __init__(
        self,
        tokens: Iterable[int] = (),
        *,
        store: "LookupStore | None" = None,
        vocab_size: int | None = None,
    ) -> None:
        self._text, self._store, self._vocab_size = _IndexedText(), store, vocab_size
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._text.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add emitted tokens. O(1) each; if one is refused, none is added.

        Raises:
            TypeError: a token is not an integer.
            ValueError: a token is negative, or 2**31 or more.
        """
        self._text.extend(_checked(tokens))

    def guess(self, max_tokens: int, ahead: Sequence[int] = ()) -> Guess:
        """What may come next: the continuation of the longest match, the newest of equals.

        A match that reaches the text's end goes on with what it just guessed: a loop is continued
        for as long as is asked.

        Args:
            max_tokens: most tokens to guess; fewer only if the match is in the store, at the end
                of its text.
            ahead: tokens taken to follow the text, such as a draft so far; not kept. Short ones:
                the time grows with them.
        """
        if max_tokens < 1:
            return NO_GUESS
        later = _checked(ahead) if ahead else NOTHING
        tail = self._text.tokens[-LONGEST_MATCH:] + later
        end, length = self._longest(tail, len(later))
        needed = length + STORE_HANDICAP if length else 1
        if self._store is not None and needed <= LONGEST_MATCH:
            guess = self._known(self._store.guess(max_tokens, tail))
            if guess.match_length >= needed:
                return guess
        if not length:
            return NO_GUESS
        text = self._text.tokens[end : end + max_tokens]
        following = text + later[max(0, end - len(self)) :]
        return Guess(tuple(islice(cycle(following), max_tokens)), length)

    def _known(self, guess: Guess) -> Guess:
        """As much of a store's guess as the model has tokens for."""
        size = self._vocab_size
        if size is None or not guess.tokens or max(guess.tokens) < size:
            return guess
        tokens = tuple(takewhile(lambda token: token < size, guess.tokens))
        return replace(guess, tokens=tokens) if tokens else Guess()

    def _longest(self, tail: "array[int]", ahead: int) -> tuple[int, int]:
        """End and length of the longest match in the text with its last ``ahead`` of ``tail``."""
        best_end, best = 0, 0
        for back in range(1, ahead + 1):  # these few are in no index
            length = _match_length(tail, len(tail) - back, tail, best)
            if length:
                best_end, best = len(self) + ahead - back, length
        end, length = self._text.longest(tail, best)
        return (end, length) if length else (best_end, best)


class LookupStore:
    """Texts of earlier requests, to look up in. Requests and threads may share it.

    Requests with token-level and block verification do not look into it: a text that was drawn with
    their seed has come of the random numbers that judge their drafts, which gives another
    distribution.

    Kept are the newest texts: between half of ``max_tokens`` and all of them, once so many were
    added. Of a text longer than half of them its end is kept. Where adding one is interrupted
    (Ctrl-C), the newer half is dropped with it.

    Args:
        max_tokens: bound of the tokens kept, 2 at least; they take some 140 bytes each.

    Raises:
        TypeError: ``max_tokens`` is not an int.
        ValueError: ``max_tokens`` is less than 2.
    """

    def __init__(self, max_tokens: int = 1_000_000) -> None:
        check_integer("max_tokens", max_tokens, 2)
        self.max_tokens = max_tokens
        self._half = max_tokens // 2
        # Two halves: to forget, the older is dropped whole.
        self._newer, self._older = _IndexedText(), _IndexedText()
        self._lock = Lock()

    def __len__(self) -> int:
        """Tokens kept, one between any two texts included."""
        with self._lock:
            return len(self._newer.tokens) + len(self._older.tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Keep a finished request's text. Guesses wait meanwhile (under 1 us a token).

        Raises:
            TypeError: it is no sequence of integers.
            ValueError: a token is negative, or 2**31 or more.
        """
        raw = isinstance(tokens, str | bytes | bytearray | memoryview)  # an array would read memory
        if not raw and hasattr(tokens, "tolist"):  # of numpy, or torch
            tokens = tokens.tolist()
        if raw or not isinstance(tokens, Sequence):
            raise TypeError(f"a text must be a list of token ids, got {type(tokens).__name__}")
        if any(isinstance(token, bool) for token in tokens):
            raise TypeError("token ids must be integers, got a bool")
        text = _checked(tokens)[-self._half :]
        if not text:
            return
        with self._lock:
            if len(self._newer.tokens) + 1 + len(text) > self._half:
                self._newer, self._older = _IndexedText(), self._newer
            try:
                self._newer.begin_another()
                self._newer.extend(text)
            except BaseException:  # Ctrl-C: tokens without their places break every later guess
                self._newer = _IndexedText()
                raise

    def guess(self, max_tokens: int, tail: Sequence[int]) -> Guess:
        """What followed the longest suffix of ``tail`` in a text kept, up to that text's end."""
        if max_tokens < 1:
            return NO_GUESS
        wanted = _checked(tail)
        with self._lock:
            text = self._newer
            end, length = text.longest(wanted)
            older_end, older_length = self._older.longest(wanted, length)
            if older_length:
                text, end, length = self._older, older_end, older_length
            following = text.tokens[end : end + max_tokens]
        if not length:
            return NO_GUESS
        if SEPARATOR in following:
            following = following[: following.index(SEPARATOR)]
        return Guess(tuple(following), length, stored=True)


class _IndexedText:
    """Tokens, and where each pair of neighbours and each token stood before another one.

    A place is named by its end, the number of tokens up to and with it; 0 is no place. The text's
    own end is not indexed until a token follows it.
    """

    def __init__(self) -> None:
        self.tokens: array[int] = array("i")
        self._last_single: dict[int, int] = {}
        self._last_pair: dict[int, int] = {}
        # At each place, the one before it of the same pair.
        self._earlier: array[int] = array("i", [0])

    def extend(self, tokens: "array[int]") -> None:
        if not tokens:
            return
        pairs, singles, earlier = self._last_pair, self._last_single, self._earlier
        end = len(self.tokens)
        before, last = [SEPARATOR, SEPARATOR, *self.tokens[-2:]][-2:]
        self.tokens.extend(tokens)
        for token in tokens:
            if end:
                pair = (before << 32) + last
                earlier.append(pairs.get(pair, 0))
                pairs[pair] = singles[last] = end
            before, last = last, token
            end += 1

    def begin_another(self) -> None:
        """What follows is a text of its own."""
        if self.tokens:
            # Not through extend: the last token's place would be one that nothing follows.
            self.tokens.append(SEPARATOR)
            self._earlier.append(0)

    def longest(self, tail: "array[int]", above: int = 0) -> tuple[int, int]:
        """End and length of the longest match of a suffix of ``tail``.

        (0, 0) if none is longer than ``above``.
        """
        best_end, best = 0, above
        if not tail:
            return 0, 0
        end = self._last_pair.get((tail[-2] << 32) + tail[-1], 0) if len(tail) > 1 else 0
        for _ in range(MOST_PLACES):
            if not end or best >= LONGEST_MATCH:
                break
            length = _match_length(self.tokens, end, tail, best)
            if length:
                best_end, best = end, length
            end = self._earlier[end]
        if best == 0:
            best_end = self._last_single.get(tail[-1], 0)
            best = min(best_end, 1)
        return (best_end, best) if best > above else (0, 0)


def _match_length(text: "array[int]", end: int, tail: "array[int]", above: int) -> int:
    """Tokens before ``end`` that equal the last of ``tail``; 0 if not more than ``above``."""
    most = min(end, len(tail), LONGEST_MATCH)
    length = above + 1
    if length > most or text[end - length : end] != tail[len(tail) - length :]:
        return 0
    while length < most and text[end - length - 1] == tail[len(tail) - length - 1]:
        length += 1
    return length


def _checked(tokens: Iterable[int]) -> "array[int]":
    try:
        ids = array("i", tokens)
    except OverflowError:
        raise ValueError("a token id must be from 0 to 2**31 - 1, got a larger one") from None
    except TypeError as error:
        raise TypeError(f"token ids must be integers: {error}") from None
    if ids and min(ids) < 0:
        raise ValueError(f"a token id must be from 0 to 2**31 - 1, got {min(ids)}")
    return ids
