"""Prompt lookup: what followed the text's latest tokens when they occurred before.

Saxena (2023, "Prompt Lookup Decoding") drafts so from n-grams of the prompt. Here the longest match
among the latest occurrences counts, in prompt and output alike, and in texts of earlier requests
if there is a store of them. A guess costs a few dictionary look-ups, whatever the text's length.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

GRAMS = (3, 2)  # the longer one first
MOST_TRIED = 16  # latest occurrences of an n-gram that are compared
LONGEST_MATCH = 64
FORCED_MATCH = LONGEST_MATCH + 1  # stands for text that a grammar forces
SEPARATOR = -1  # between texts of a store: no token


@dataclass(frozen=True)
class Guess:
    """Looked-up tokens.

    Attributes:
        tokens: that may follow the text; empty if nothing matched.
        match_length: tokens at the text's end that occurred before.
    """

    tokens: tuple[int, ...]
    match_length: int


NO_GUESS = Guess((), 0)


class _Grams:
    """Where the n-grams of a growing text end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for n in GRAMS:
                if end >= n:
                    self._ends.setdefault(tuple(self.tokens[end - n :]), []).append(end)

    def longest(self, suffix: Sequence[int], own: bool) -> tuple[int, int]:
        """End of the longest match of ``suffix``'s end, and its length; the latest of several.

        Args:
            own: the text itself ends with ``suffix``, which is no match.
        """
        best, length = 0, 0
        for n in GRAMS:
            ends = self._ends.get(tuple(suffix[-n:]), ()) if len(suffix) >= n else ()
            for end in reversed(ends[-MOST_TRIED - own :]):
                if own and end == len(self.tokens):
                    continue
                matched = self._matched(suffix, end)
                if matched > length:
                    best, length = end, matched
            if length:
                break
        return best, length

    def _matched(self, suffix: Sequence[int], end: int) -> int:
        """Tokens before ``end`` that are those at the end of ``suffix``."""
        most = min(end, len(suffix), LONGEST_MATCH)
        tokens, count = self.tokens, 0
        while count < most and tokens[end - 1 - count] == suffix[-1 - count]:
            count += 1
        return count


class LookupStore:
    """Texts of finished requests, for later ones to look up; threads may share it.

    Nothing but speed depends on what it holds. A request can't tell what others wrote but by
    how fast it is: do not share a store between users who must not know of each other.

    Args:
        max_tokens: most that it keeps; then the older half goes.
    """

    def __init__(self, max_tokens: int = 1_000_000) -> None:
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise ValueError(f"max_tokens must be an int of at least 1, got {max_tokens!r}")
        self._max_tokens, self._grams, self._lock = max_tokens, _Grams(), threading.Lock()

    def __len__(self) -> int:
        return len(self._grams.tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Keep a text; of one that is too long its end."""
        with self._lock:
            self._grams.extend((*tokens[-self._max_tokens + 1 :], SEPARATOR))
            if len(self._grams.tokens) > self._max_tokens:
                kept = self._grams.tokens[-(self._max_tokens // 2) :]
                self._grams = _Grams()
                self._grams.extend(kept)

    def guess(self, suffix: Sequence[int], max_tokens: int) -> Guess:
        """What followed the longest match of the end of ``suffix``, up to its text's end."""
        with self._lock:
            end, length = self._grams.longest(suffix, own=False)
            tokens = self._grams.tokens[end : end + max_tokens] if length else []
        if SEPARATOR in tokens:
            tokens = tokens[: tokens.index(SEPARATOR)]
        return Guess(tuple(tokens), length) if tokens else NO_GUESS


class TokenIndex:
    """One request's text, to be looked up in itself.

    Args:
        tokens: the text so far.
        store: searched too; the longer match counts, and of equal ones the text's own.
    """

    def __init__(self, tokens: Iterable[int] = (), *, store: LookupStore | None = None) -> None:
        self._grams, self._store = _Grams(), store
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._grams.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add to the text what was emitted."""
        self._grams.extend(tokens)

    def guess(self, max_tokens: int, ahead: Sequence[int] = ()) -> Guess:
        """At most ``max_tokens`` that may follow the text and ``ahead``.

        A match that runs up to the text's end goes on in what it guesses: periods repeat.

        Args:
            ahead: tokens taken to follow the text, which stays as it is.
        """
        if max_tokens < 1:
            return NO_GUESS
        text = self._grams.tokens
        suffix = [*text[-LONGEST_MATCH:], *ahead] if ahead else text[-LONGEST_MATCH:]
        end, length = self._grams.longest(suffix, own=not ahead)
        if self._store is not None:
            stored = self._store.guess(suffix, max_tokens)
            if stored.match_length > length:
                return stored
        if not length:
            return NO_GUESS
        tokens: list[int] = []
        for i in range(end, end + max_tokens):
            beyond = i - len(text)
            if beyond < 0:
                tokens.append(text[i])
            elif beyond < len(ahead):
                tokens.append(ahead[beyond])
            else:
                tokens.append(tokens[beyond - len(ahead)])
        return Guess(tuple(tokens), length)
