"""How long a batch takes until its last row is done, if nobody joins it.

The most tokens a second of all rows together may be a later end: a row whose drafts are never right
emits a token a round, and rounds take the longer the more its neighbours draft. These are done soon
then, and that one late. So what rows draft may end a batch little later than plain decoding would.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from layerskip.control.pace import Pace, Split

MOST_LONGER = 1.01  # than a batch takes without drafts
IN_DOUBT = 1.6  # plain rounds, of a round with more than a draft token a row
STAGES = 4  # in which rows leave, the last one by itself


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
        doubted: whether drafts of some row may hardly ever be right. Few of them tell, and short
            ones tell as much, so rounds are short until then.
    """

    pace: Pace
    hopes: Sequence[Sequence[float]]
    offers: Sequence[tuple[int, float]]
    left: Sequence[int]
    others: Sequence[int]
    doubted: bool = False

    def within(self, found: Split) -> Split:
        """What was found best for all, or as much of its drafts as ends no later than is allowed:
        shorter ones, or none."""
        deepest, none = max(found.drafted), [0] * len(self.left)
        longest = self._seconds(found, none) * (IN_DOUBT if self.doubted else math.inf)
        allowed = MOST_LONGER * self._end(found, none, 0)
        for most in range(deepest, 0, -1):
            drafted = [min(n, most) for n in found.drafted]
            short = most == 1 or self._seconds(found, drafted) <= longest
            if short and self._end(found, drafted, most) <= allowed:
                return self._less(found, drafted) if most < deepest else found
        return self._less(found, none)

    def _less(self, found: Split, drafted: Sequence[int]) -> Split:
        tokens = sum(self._emitted(found, drafted)) + len(self.others)
        rate = tokens / self._seconds(found, drafted)
        return Split(drafted, found.looked_up, rate, is_less=True)

    def _emitted(self, found: Split, drafted: Sequence[int]) -> list[float]:
        """Tokens of each row and round, if those that look nothing up draft so many each."""
        rows = zip(found.looked_up, self.offers, self.hopes, drafted, strict=True)
        return [1.0 + (gain if n else sum(hope[:most])) for n, (_, gain), hope, most in rows]

    def _seconds(
        self, found: Split, drafted: Sequence[int], rows: Sequence[int] | None = None
    ) -> float:
        """Of a round of these rows, which draft so many tokens each; None: of all."""
        looked_up = found.looked_up
        if rows is not None:
            drafted, looked_up = [drafted[i] for i in rows], [looked_up[i] for i in rows]
        count = len(drafted) + len(self.others)
        tokens = sum(drafted) + sum(looked_up) + sum(self.others)
        return self.pace.round([*drafted, *self.others], count + tokens, count)

    def _end(self, found: Split, drafted: Sequence[int], most: int) -> float:
        """Seconds until the last row is done: as rows leave, rounds take less. A row that drafts
        less now may draft as many as others later."""
        emitted = self._emitted(found, [most] * len(self.left))
        rounds = [n / each for n, each in zip(self.left, emitted, strict=True)]
        rows = sorted(range(len(rounds)), key=lambda i: rounds[i])
        # Of many rows some leave together: each time that is asked for takes its own.
        stages = sorted({len(rows) * i // STAGES for i in range(STAGES)} | {len(rows) - 1})
        ends = [0.0, *(rounds[rows[first - 1]] for first in stages[1:]), rounds[rows[-1]]]
        return sum(
            (after - before) * self._seconds(found, drafted, rows[first:])
            for first, (before, after) in zip(stages, itertools.pairwise(ends), strict=True)
            if after > before
        )
