"""What passes are thought to take now: a cost table, as the rounds have corrected it."""

from collections.abc import Sequence

from layerskip.control.clocks import DRAFT, PACE, Clocks
from layerskip.cost import CostTable
from layerskip.params import MAX_AUTO_DRAFT_TOKENS

CONTEXT_STEP = 64  # contexts this near cost the same
MOST_REMEMBERED = 100_000  # seconds looked up in the table
SHORTEST = 1e-9  # seconds: nothing is divided by zero
MANY_ROWS = 8  # sequences, of which each is thought to verify as many tokens
LEAST_GROWTH = 0.5  # of what a verify pass grows by, where it is charged
# Rounds: all of the first ones are learnt from, then some. A plain one tells less: how fast the
# machine is, which scales all that is chosen between.
FIRST_DRAFTED, FIRST_PLAIN = 32, 4
DRAFTED_ONE_IN, PLAIN_ONE_IN = 8, 32


class PassTimes:
    """Seconds of passes, of any number of rows.

    Args:
        cost: of passes.
        follows_clock: whether measured seconds correct the table.

    Attributes:
        row_quantum: rows that a pass is padded to.
        recorded: whether all rows of a round go through all its passes.
    """

    def __init__(self, cost: CostTable, *, follows_clock: bool = True) -> None:
        self.row_quantum, self.recorded = cost.row_quantum, cost.recorded
        self._tables = {greedy: cost.of(greedy=greedy) for greedy in (False, True)}
        self._follows_clock, self._clocks = follows_clock, Clocks()
        self._seen, self._unlearnt = {False: 0, True: 0}, 0  # rounds, by whether they drafted
        self._seconds: dict[tuple[str, int, int, int, bool], float] = {}
        self._alone: dict[tuple[int, bool], list[tuple[int, float]]] = {}

    @property
    def ratios(self) -> tuple[float, ...]:
        """What rounds have corrected the table by: another tuple once something was learnt."""
        return self._clocks.ratios

    def draft(
        self,
        rows: int,
        context: int,
        *,
        each: int = 1,
        greedy: bool = False,
        charged: bool = False,
    ) -> float:
        """Of one draft pass over ``rows`` sequences with ``each`` tokens of each, behind others.

        Args:
            greedy: all of them take the likeliest token.
            charged: the price of one that gained nothing; see ``Clocks.charged``.
        """
        ratio = self._ratio(DRAFT, charged=charged)
        return ratio * self._looked_up("draft", rows * each, context, rows, greedy)

    def draft_start(self, *, charged: bool = False) -> float:
        """What the first draft passes of a round take beyond ``draft``, together."""
        return self._ratio(DRAFT, charged=charged) * self._tables[False].draft_start

    def looking_back(self, tokens: int, *, greedy: bool = False) -> float:
        """Of the draft's head alone over so many states that plain rounds left, with the sampling
        of a token."""
        return self._ratio(DRAFT, charged=False) * self._tables[greedy].looking_back(tokens)

    def verify(
        self,
        tokens: int,
        context: int,
        *,
        rows: int = 1,
        greedy: bool = False,
        charged: bool = False,
    ) -> float:
        """Of one full-depth pass over the tokens of ``rows`` sequences.

        Of many as if each had as many, the mean rounded up: a GPU's recorded rounds are such, and
        on a CPU a batch of which some sequences have another token takes about as long as if all
        had (bench/LOG.md, 2026-11-27). Few fill what a pass is padded to.

        Args:
            greedy: all of them take the likeliest token.
            charged: as of ``draft``.
        """
        tokens = _evenly(tokens, rows)
        clock = self._verify_clock(tokens, rows)
        seconds = self._looked_up("verify", tokens, context, rows, greedy)
        if not charged:
            return self._clocks.ratios[clock] * seconds
        return self._charged(clock, seconds, self._looked_up("verify", rows, context, rows, greedy))

    def plain(self, context: int, *, greedy: bool = False) -> float:
        """Of a plain pass of one row, as ``verify`` has it, in few steps: each round asks."""
        return self._clocks.ratios[PACE] * self._looked_up("verify", 1, context, 1, greedy)

    def alone(self, context: int, *, greedy: bool = False, charged: bool = False) -> list[float]:
        """Of full-depth passes over one, two, ... tokens of one row; one more than may be drafted.

        As ``verify`` has them, and far quicker: each round of a row asks for all.
        """
        key = (context // CONTEXT_STEP, greedy)
        if key not in self._alone:
            counts = range(1, MAX_AUTO_DRAFT_TOKENS + 2)
            self._alone[key] = [
                (self._verify_clock(n, 1), self._looked_up("verify", n, context, 1, greedy))
                for n in counts
            ]
        if charged:
            plain = self._alone[key][0][1]
            return [self._charged(clock, seconds, plain) for clock, seconds in self._alone[key]]
        ratios = self._clocks.ratios
        return [ratios[clock] * seconds for clock, seconds in self._alone[key]]

    def _charged(self, clock: int, seconds: float, plain: float) -> float:
        """Of a verify pass, tabled like the plain one, at the price of what is lost: however sure
        a clock is, tokens cost half of what the table says that they add."""
        least = plain + LEAST_GROWTH * (seconds - plain)
        return max(self._clocks.charged[clock] * seconds, self._clocks.charged[PACE] * least)

    def _ratio(self, clock: int, *, charged: bool) -> float:
        """What a clock corrects its passes by."""
        return (self._clocks.charged if charged else self._clocks.ratios)[clock]

    def drawing(self, *, greedy: bool = False) -> float:
        """Of judging a looked-up token beside a drafted one, whose noise is made."""
        table = self._tables[greedy]
        return self._clocks.ratios[PACE] * max(0.0, table.drawing - table.further)

    def drafted(self, *, greedy: bool = False) -> float:
        """Of drawing a token in a draft pass, which ``draft`` has with it."""
        return self._clocks.ratios[DRAFT] * self._tables[greedy].drawing

    def _verify_clock(self, tokens: int, rows: int) -> int:
        """Whose error a verify pass has: that of plain ones, or of its size."""
        if tokens <= rows:
            return PACE
        return Clocks.size(_evenly(tokens, rows), self.row_quantum)

    def _looked_up(self, what: str, tokens: int, context: int, rows: int, greedy: bool) -> float:
        if tokens == 0:
            return 0.0
        key = (what, tokens, context // CONTEXT_STEP, rows, greedy)
        known = self._seconds.get(key)
        if known is None:
            if len(self._seconds) >= MOST_REMEMBERED:
                self._seconds.clear()
            middle = (context // CONTEXT_STEP + 0.5) * CONTEXT_STEP
            table = self._tables[greedy]
            if what == "draft":
                seconds = table.draft_pass(tokens, middle, sequences=rows, late=True)
            else:
                seconds = table.verify_pass(tokens, middle, sequences=rows)
            known = self._seconds[key] = max(seconds, SHORTEST)
        return known

    def due(self, *, drafted: bool) -> bool:
        """Whether a round that is over is to be learnt from. That takes as long as choosing what a
        round does, and tables are wrong for longer than a few rounds."""
        self._unlearnt += 1
        self._seen[drafted] += 1
        seen = self._seen[drafted]
        if drafted:
            return seen <= FIRST_DRAFTED or seen % DRAFTED_ONE_IN == 0
        return seen <= FIRST_PLAIN or seen % PLAIN_ONE_IN == 0

    def observe_phases(
        self,
        draft_seconds: float,
        verify_seconds: float,
        draft: float,
        verify: float,
        tokens: int,
        rows: int,
    ) -> None:
        """What a round's draft passes took, and its verify pass over the ``tokens`` of ``rows``
        sequences, beside what ``draft`` and ``verify`` said of them before."""
        # Both were expected by what was known before either was seen.
        tabled = self._tabled([(DRAFT, draft), (self._verify_clock(tokens, rows), verify)])
        for seconds, part in zip((draft_seconds, verify_seconds), tabled, strict=True):
            self._observe(seconds, [part])
        self._passed()

    def observe_round(
        self, measured: float, draft: float, verify: float, tokens: int, rows: int
    ) -> None:
        """The same of a draft and a verify pass that no clock could tell apart."""
        parts = [(DRAFT, draft), (self._verify_clock(tokens, rows), verify)]
        self._observe(measured, self._tabled(parts))
        self._passed()

    def _passed(self) -> None:
        self._clocks.pass_time(max(1, self._unlearnt))
        self._unlearnt = 0

    def _tabled(self, parts: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
        """By the table alone."""
        ratios = self._clocks.ratios
        return [(clock, expected / ratios[clock]) for clock, expected in parts]

    def _observe(self, measured: float, tabled: Sequence[tuple[int, float]]) -> None:
        total = sum(seconds for _, seconds in tabled)
        if self._follows_clock and total > 0.0:
            weights = [(clock, seconds / total) for clock, seconds in tabled if clock != PACE]
            self._clocks.observe(measured / total, weights)


def step_of(rows: int) -> int:
    """Tokens from one price of a verify pass of so many sequences to the next."""
    return rows if rows >= MANY_ROWS else 1


def _evenly(tokens: int, rows: int) -> int:
    """Tokens of a pass in which each of many rows has as many as any."""
    return -(-tokens // rows) * rows if rows >= MANY_ROWS else tokens
