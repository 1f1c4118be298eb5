"""What a cost table has wrong, learnt from the rounds themselves.

A table is measured once, in less than a second of a machine that may do other things. Three kinds
of error are told apart, as logarithms of measured over tabled seconds: how fast the machine is at
the moment, which all passes share and which wanders; what drafts take beside that; and what
verifying drafted tokens takes beside a plain pass, by the size of the pass. The last two are facts
of model and machine, which nearly stay: where each kind of pass had a clock of its own, one that
was not run kept the ratio of another time (bench/LOG.md, 2026-11-21).

A Kalman filter (Kalman 1960) weighs them: of a round of drafts alone it cannot be known whether the
machine is slow or the table wrong, and what plain passes take is then left as uncertain as it is.
"""

import math
from collections.abc import Sequence

# Of the machine, at first, and what each round adds. It was 1.7 to 3 times slower than when its
# table was made, seconds before (bench/LOG.md, 2026-11-23 and 27). With 0.25 a part of that was
# taken for tokens that are dear to verify, for good: where all rounds draft nothing tells the two
# apart, and a text that drafted badly was decoded plainly to its end.
PACE_ERROR, PACE_DRIFT = 0.8, 0.02
DRAFT_ERROR = 0.35  # quick tables were off by -30 to +60 % for drafts,
SIZE_ERROR = 0.15  # and by -17 to +25 % for passes of 8 rows (bench/LOG.md, 2026-11-21)
SIZE_LIKENESS = 0.8  # correlation of the errors of a pass and of one twice as large
# Of one round, at least: where times are further off than was thought they say as much less, up to
# so many times, learnt by so much of each. Where that was not learnt noise made drafts look dear,
# and more rounds were plain (on paper; bench/LOG.md, 2026-11-29).
ROUND_NOISE, MOST_NOISE, NOISE_RATE = 0.1, 4.0, 0.1
OUTLIER = 1.5  # deviations: what is beyond says no more than that
USUAL = 0.76  # the mean of squared deviations, cut off there, of times as far off as was thought
SURE = 2.0  # deviations that a price is below the table's by, before less than that is charged
# Of what is sure of a table's errors, a round forgets so much: rows and contexts change, and tables
# are wrong of each by their own. After 80,000 rounds without it, drafts that came to take 1.4 times
# as long were half learnt in 200,000; with it in 520, and off by 2 % while nothing changes (on
# paper; bench/LOG.md, 2026-11-30).
FORGOTTEN = 1e-5
NUM_SIZES = 7  # up to one row quantum, two, four, ...: passes of one row to 64
PACE, DRAFT, FIRST_SIZE = 0, 1, 2


class Clocks:
    """Corrections of a table's seconds.

    Attributes:
        ratios: measured over tabled seconds: of plain passes, of drafts, and of passes that verify
            drafted tokens, by size. Another tuple once something was learnt.
        charged: the same of what is counted as lost: below the table's price, at the machine's
            pace, only by as much as is sure. Where a machine's speed changes while no plain pass is
            run, it may be put down to the passes that are: a token more was thought to be free for
            which 5 % of a plain pass were paid round by round (bench/LOG.md, 2026-11-26).
    """

    def __init__(self) -> None:
        count = FIRST_SIZE + NUM_SIZES
        self._noisier = 1.0  # than ROUND_NOISE
        self._mean = [0.0] * count
        self._spread = [[0.0] * count for _ in range(count)]
        self._spread[PACE][PACE] = PACE_ERROR**2
        self._spread[DRAFT][DRAFT] = DRAFT_ERROR**2
        for i in range(NUM_SIZES):
            for j in range(NUM_SIZES):
                likeness = SIZE_LIKENESS ** abs(i - j)
                self._spread[FIRST_SIZE + i][FIRST_SIZE + j] = SIZE_ERROR**2 * likeness
        self._doubt = [row[DRAFT:] for row in self._spread[DRAFT:]]  # of the errors, at first
        self.ratios = self.charged = (1.0,) * count

    @staticmethod
    def size(num_rows: int, row_quantum: int) -> int:
        """Index in ``ratios`` of a pass that verifies drafts in so many rows, or a few less."""
        quanta = -(-num_rows // row_quantum)
        return FIRST_SIZE + min((quanta - 1).bit_length(), NUM_SIZES - 1)

    def observe(self, ratio: float, weights: Sequence[tuple[int, float]]) -> None:
        """A time that was measured.

        Args:
            ratio: measured over tabled seconds, of the table alone.
            weights: whose errors are in it, and the share that each has of the time.
        """
        if not 0.0 < ratio < math.inf:
            return
        told, spread, mean = math.log(ratio), self._spread, self._mean
        places = [(PACE, 1.0), *weights]
        # The covariance of the sum with each error, and its own variance.
        along = [sum(row[i] * w for i, w in places) for row in spread]
        variance = sum(along[i] * w for i, w in places) + (self._noisier * ROUND_NOISE) ** 2
        bound = OUTLIER * math.sqrt(variance)
        surprise = told - sum(mean[i] * w for i, w in places)
        surprise = min(max(surprise, -bound), bound)
        noisier = self._noisier * math.exp(NOISE_RATE * (surprise**2 / variance - USUAL))
        self._noisier = min(max(noisier, 1.0), MOST_NOISE)
        surprise /= variance
        # New lists: of two threads' updates one may be lost, but none is made twice.
        self._mean = mean = [m + a * surprise for m, a in zip(mean, along, strict=True)]
        self._spread = [
            [own - a * b / variance for own, b in zip(row, along, strict=True)]
            for row, a in zip(spread, along, strict=True)
        ]
        pace, errors = mean[PACE], mean[DRAFT:]
        highest = [e + SURE * math.sqrt(self._spread[i][i]) for i, e in enumerate(errors, DRAFT)]
        charged = [max(e, min(0.0, high)) for e, high in zip(errors, highest, strict=True)]
        self.charged = (math.exp(pace), *(math.exp(pace + error) for error in charged))
        self.ratios = (math.exp(pace), *(math.exp(pace + error) for error in errors))

    def pass_time(self, rounds: int = 1) -> None:
        """So many rounds later, the machine may be another, and so may rows and contexts."""
        spread, share = self._spread, min(1.0, rounds * FORGOTTEN)
        spread[PACE][PACE] += rounds * PACE_DRIFT**2
        for row, doubt in zip(spread[DRAFT:], self._doubt, strict=True):
            known = row[DRAFT:]
            row[DRAFT:] = [own + share * (a - own) for own, a in zip(known, doubt, strict=True)]
