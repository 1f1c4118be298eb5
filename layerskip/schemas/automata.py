"""Whether regular expressions match a text, or the same one, and texts other than some."""

import functools
import math
from collections.abc import Iterable, Sequence
from itertools import combinations

from layerskip.schemas.patterns import LAST, Item, Ranges, escaped_char, options_of

MAX_STATES = 20_000
MAX_PAIRS = 200_000


class _TooLargeError(Exception):
    """It would take too long to tell."""


class _Machine:
    """States with moves by a character and without one; it begins in 0 and ends in 1.

    Args:
        options: any of which matches.
        longest: so many repetitions more than have to be are as good as any number.
    """

    def __init__(self, options: Iterable[Sequence[Item]], longest: float = math.inf) -> None:
        self._longest = longest
        self.moves: list[list[tuple[Ranges, int]]] = [[], []]
        self.free: list[list[int]] = [[], []]
        for option in options:
            self.free[self._sequence(0, option)].append(1)

    def _state(self) -> int:
        if len(self.moves) == MAX_STATES:
            raise _TooLargeError
        self.moves.append([])
        self.free.append([])
        return len(self.moves) - 1

    def _sequence(self, state: int, items: Iterable[Item]) -> int:
        for item in items:
            for _ in range(item.least):
                state = self._once(state, item)
            more = item.most - item.least
            if more >= self._longest:  # which may be infinite, as ``most`` may
                begin = self._state()
                self.free[state].append(begin)
                self.free[self._once(begin, item)].append(begin)
                state = begin
            else:
                end = self._state()
                for _ in range(int(more)):
                    self.free[state].append(end)
                    state = self._once(state, item)
                self.free[state].append(end)
                state = end
        return state

    def _once(self, state: int, item: Item) -> int:
        end = self._state()
        if item.chars is not None:
            self.moves[state].append((item.chars, end))
        for option in item.options:
            begin = self._state()
            self.free[state].append(begin)
            self.free[self._sequence(begin, option)].append(end)
        return end


@functools.lru_cache(maxsize=8)  # one after another is held against the same few
def _machine(pattern: str, *, widest: bool, longest: float = math.inf) -> _Machine:
    return _Machine(options_of(pattern, widest=widest), longest)


def matches(pattern: str, text: str) -> bool | None:
    """Whether a text fulfils ``pattern``, in all dialects; None if in some, or it can't be told.

    Whoever writes a schema may mean harm: ``re`` could take forever.
    """
    try:
        text.encode()  # half a character is in no dialect
        longest = 1 << len(text).bit_length()  # of few kinds: machines are kept
        spelt = _Machine([[Item(((ord(char), ord(char)),)) for char in text]])
        if _meet(spelt, _machine(pattern, widest=False, longest=longest)):
            return True
        return None if _meet(spelt, _machine(pattern, widest=True, longest=longest)) else False
    except (ValueError, _TooLargeError):
        return None


def apart(patterns: Sequence[str]) -> bool:
    """Whether no text matches two of the patterns, in any dialect; False if that can't be told."""
    if len(patterns) < 2:
        return True
    try:
        machines = [_machine(pattern, widest=True) for pattern in patterns]
        return not any(_meet(one, other) for one, other in combinations(machines, 2))
    except (ValueError, _TooLargeError):
        return False


def _meet(one: _Machine, other: _Machine) -> bool:
    """Whether both can end after the same text."""
    seen, waiting = {(0, 0)}, [(0, 0)]
    while waiting:
        a, b = waiting.pop()
        if (a, b) == (1, 1):
            return True
        reached = [(x, b) for x in one.free[a]] + [(a, y) for y in other.free[b]]
        reached += [
            (x, y)
            for chars, x in one.moves[a]
            for others, y in other.moves[b]
            if _overlap(chars, others)
        ]
        new = [pair for pair in reached if pair not in seen]
        seen.update(new)
        waiting += new
        if len(seen) > MAX_PAIRS:
            raise _TooLargeError
    return False


def _overlap(one: Ranges, other: Ranges) -> bool:
    return any(a <= d and c <= b for a, b in one for c, d in other)


def any_but(texts: Iterable[str]) -> str:
    """A pattern of every text but some."""
    return f"^{_any_but(frozenset(texts))}$"


def _any_but(texts: frozenset[str]) -> str:
    """Ways to go on that end in none of ``texts``."""
    tails: dict[str, set[str]] = {}
    for text in texts:
        if text:
            tails.setdefault(text[0], set()).add(text[1:])
    heads = "".join(escaped_char(ord(c)) for c in sorted(tails))
    anything = f"[{escaped_char(0)}-{escaped_char(LAST)}]"
    ways = [(f"[^{heads}]" if heads else anything) + f"{anything}*"]
    ways += [f"[{escaped_char(ord(c))}]{_any_but(frozenset(tails[c]))}" for c in sorted(tails)]
    return f"(?:{'|'.join(ways)})" + ("" if "" in texts else "?")
