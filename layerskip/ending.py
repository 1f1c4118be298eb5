"""How long a batch takes until its last row is done, if nobody joins it.

The most tokens a second of all rows together may be a later end: a row whose drafts are never right
emits a token a round, and rounds take the longer the more its neighbours draft. These are done soon
then, and that one late. So what rows draft may end a batch little later than plain decoding would.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from layerskip.pace import Pace, Split

MOST_LONGER = 1.03  # than a batch takes without drafts


@dataclass(frozen=True)
class Ending:
    """Rows that are waited for, in rounds which are all like the next one.

    What is looked up comes and goes, and is left as it is.

    Attributes:
        pace: of rounds.
        hopes: of each row's first, second, ... drafted token the chance that it is accepted, as
            far as can be hoped.
        offers: looked-up tokens of each row that takes them, and how many will be accepted.
        left: tokens that each row may still emit.
        others: tokens that rows draft in any case.
    """

    pace: Pace
    hopes: Sequence[Sequence[float]]
    offers: Sequence[tuple[int, float]]
    left: Sequence[int]
    others: Sequence[int]

    def within(self, found: Split) -> Split:
        """What was found best for all, or as much of its drafts as ends no later than is allowed:
        shorter ones, or none."""
        deepest = max(found.drafted)
        plain = self._at_most(found, 0)
        slowest = min(self._emitted(found, deepest))
        if self._seconds(found) <= MOST_LONGER * slowest * self._seconds(plain):
            return found  # rows that look nothing up emit as many tokens a second as without
        allowed = MOST_LONGER * self._end(plain, 0)
        for most in range(deepest, 0, -1):
            less = self._at_most(found, most)
            if self._end(less, most) <= allowed:
                return less if most < deepest else found
        return plain

    def _at_most(self, found: Split, most: int) -> Split:
        drafted = [min(n, most) for n in found.drafted]
        less = Split(drafted, found.looked_up, 0.0, is_less=True)
        tokens = sum(self._emitted(less, most)) + len(self.others)
        return replace(less, rate=tokens / self._seconds(less))

    def _emitted(self, found: Split, most: int) -> list[float]:
        """Tokens of each row and round, if those that look nothing up draft so many."""
        rows = zip(found.looked_up, self.offers, self.hopes, strict=True)
        return [1.0 + (gain if n else sum(hope[:most])) for n, (_, gain), hope in rows]

    def _seconds(self, split: Split, rows: Sequence[int] | None = None) -> float:
        """Of a round of these rows; None: of all."""
        rows = range(len(self.left)) if rows is None else rows
        drafted = [split.drafted[i] for i in rows]
        count = len(rows) + len(self.others)
        tokens = sum(drafted) + sum(split.looked_up[i] for i in rows) + sum(self.others)
        return self.pace.round([*drafted, *self.others], count + tokens, count)

    def _end(self, split: Split, most: int) -> float:
        """Seconds until the last row is done: as rows leave, rounds take less."""
        rounds = [n / each for n, each in zip(self.left, self._emitted(split, most), strict=True)]
        rows = sorted(range(len(rounds)), key=lambda i: rounds[i])
        ends = [0.0, *(rounds[i] for i in rows)]
        return sum(
            (after - before) * self._seconds(split, rows[done:])
            for done, (before, after) in enumerate(itertools.pairwise(ends))
            if after > before
        )
