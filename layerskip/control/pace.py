"""What a round's passes take, and which drafted tokens are worth them."""

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

from layerskip.control.pass_times import PassTimes, step_of
from layerskip.params import MAX_AUTO_DRAFT_TOKENS

NO_OFFER = 0, 0.0
BET = 2 / 3  # of a stake, in one draft
UNTOLD = 1.3  # a draft gains by its confidence, and by what is looked up in its passes
# Beside the rate without look-ups. Finding, weighing and judging them takes 3.7 % of a plain round
# of eight rows, and a batch that nobody joins ends with its slowest row, so that what the others
# gain is worth less than its tokens (bench/LOG.md, 2026-11-27).
CLEARLY = 1.15
# What is charged of a plain round for finding, weighing and judging a look-up of a row by itself,
# beside its passes (1.2 to 1.6 % of 9 ms: bench/LOG.md, 2026-11-26).
LOOKING = 0.02


class Pace:
    """What passes of a round with so many rows take.

    Attributes:
        plain: seconds of a plain pass of one row.
        token: of a row's share of a plain pass.
        draft_share: of one more draft pass, a drafting row's share.
        start_share: of what a round's first draft passes take beyond that, together.
        steps: seconds that the verify pass grows by for a row's first, second, ... drafted token.
        least: tokens of plain rounds that a drafted token costs at least.
        drawing: seconds that judging a looked-up token takes beside a drafted one.
        dearer: what is charged for a draft pass that gained nothing, over what it is thought to
            take.
    """

    def __init__(
        self,
        times: PassTimes,
        context: int,
        rows: int,
        tokens: int = 0,
        drafting: int = 0,
        *,
        greedy: bool = False,
        charged: bool = False,
    ) -> None:
        self._times, self._context, self.num_rows, self._greedy = times, context, rows, greedy
        self._shape, self._charges = (context, rows, tokens, drafting), charged
        # No clock is so right that a longer pass would be thought to take less than a shorter one.
        alone = times.alone(context, greedy=greedy, charged=charged) if rows == 1 else []
        self._alone = list(itertools.accumulate(alone, max))
        self._settled: dict[tuple[int, int], Pace] = {}  # most rounds are as one before
        self.plain = times.plain(context, greedy=greedy)
        self.drawing = times.drawing(greedy=greedy)
        self._verify: dict[int, float] = {}  # tokens of a pass: each choice asks for dozens
        self._step = step_of(rows)
        self.token = self.verify(rows) / rows
        drafting = drafting or rows
        self.draft_share = self.draft(drafting) / drafting
        self.start = times.draft_start(charged=charged)
        self.start_share = self.start / drafting
        if rows == 1:
            self.steps = tuple(b - a for a, b in itertools.pairwise(self._alone))
        else:
            # The mean of those that there are: the next one may take another tile, or another pass.
            count = tokens or max(2 * times.row_quantum, rows)
            growth = self.verify(rows + count) - self.verify(rows)
            self.steps = (max(0.0, growth) / count,) * MAX_AUTO_DRAFT_TOKENS
        self.least = (self.draft_share + min(self.steps)) / self.token

    def settled(self, tokens: int, drafting: int) -> "Pace":
        """The same once it is known how many tokens are drafted, and in how many rows."""
        if self.num_rows == 1 or not tokens:
            return self
        if (tokens, drafting) not in self._settled:
            shape = (self._context, self.num_rows, tokens, drafting)
            self._settled[tokens, drafting] = Pace(self._times, *shape, greedy=self._greedy)
        return self._settled[tokens, drafting]

    @cached_property
    def charged(self) -> "Pace":
        """The same at the prices of what is lost."""
        return Pace(self._times, *self._shape, greedy=self._greedy, charged=True)

    @cached_property
    def dearer(self) -> float:
        return self.charged.draft_share / self.draft_share

    @cached_property
    def drafts(self) -> list[float]:
        """Seconds of a draft pass of no row, of one, ..., of all."""
        return [self.draft(n) for n in range(self.num_rows + 1)]

    @cached_property
    def rises(self) -> list[float]:
        """Seconds that a draft pass grows by for its first row, its second, ..."""
        return [b - a for a, b in itertools.pairwise(self.drafts)]

    @cached_property
    def shares(self) -> list[float]:
        """Seconds of a row's share of the verify pass, if every row drafted no token, one, ..."""
        if self.num_rows == 1:
            return self._alone
        counts = range(self.num_rows, self.num_rows * (MAX_AUTO_DRAFT_TOKENS + 2), self.num_rows)
        return [self.verify(tokens) / self.num_rows for tokens in counts]

    @cached_property
    def risks(self) -> list[float]:
        """Seconds that a row's first, first two, ... drafted tokens cost, its shares."""
        if not self._charges:
            return self.charged.risks
        each = [self.draft_share + step for step in self.steps]
        return list(itertools.accumulate(each, initial=self.start_share))[1:]

    @cached_property
    def lookup_risks(self) -> list[float]:
        """Seconds that a row's first, first two, ... looked-up tokens cost, its shares, ascending:
        what a table has for more tokens may be less."""
        if not self._charges:
            return self.charged.lookup_risks
        plain, *more = self.shares
        least = LOOKING * plain
        risks = (least + seconds - plain + n * self.drawing for n, seconds in enumerate(more, 1))
        return list(itertools.accumulate(risks, max))

    def draft(self, rows: int) -> float:
        """Seconds of a draft pass of so many rows."""
        return self._times.draft(rows, self._context, greedy=self._greedy, charged=self._charges)

    def verify(self, tokens: int) -> float:
        """Seconds of the verify pass."""
        if self.num_rows == 1:
            return self._alone[tokens - 1]
        if tokens not in self._verify:
            shape = tokens, self._context
            seconds = self._times.verify(
                *shape, rows=self.num_rows, greedy=self._greedy, charged=self._charges
            )
            last = -(-tokens // self._step) * self._step
            for alike in range(last - self._step + 1, last + 1):
                self._verify[alike] = seconds
        return self._verify[tokens]

    def round(self, drafted: Sequence[int], tokens: int, rows: int) -> float:
        """Seconds of a round of so many rows, some of which draft so many tokens each, and whose
        verify pass has so many."""
        deepest = max(drafted, default=0)
        passes = [sum(n > i for n in drafted) for i in range(deepest)]
        if self._times.recorded:
            passes, tokens = [rows] * deepest, rows * (deepest + 1)
        if rows == self.num_rows:
            verify = self.verify(tokens)
        else:
            verify = self._times.verify(tokens, self._context, rows=rows, greedy=self._greedy)
        start = self.start if deepest else 0.0
        return verify + start + sum(self.drafts[n] for n in passes)

    def of_one(self, gains: Sequence[float], *, bias: float) -> tuple[int, float]:
        """As ``fill``, of a row by itself that looks nothing up, in few steps."""
        best, count = bias / self._alone[0], 0
        tokens, drafting, each = 1.0, self.start, self.drafts[1]
        for i, gain in enumerate(gains, 1):
            tokens += gain
            drafting += each
            rate = tokens / (drafting + self._alone[i])
            if rate > best:
                best, count = rate, i
        return count, best if count else 1.0 / self._alone[0]


def offer(pace: Pace, survivals: Sequence[float], looked_up: Sequence[float]) -> tuple[int, float]:
    """Looked-up tokens that go straight to the verify pass, none where an early exit is better;
    and how many of them will be accepted.

    Args:
        survivals: of the early exit's tokens.
        looked_up: the same of looked-up ones.
    """
    best, best_gain, rate = 0, 0.0, 1.0 / pace.token
    gain, shares, drawing = 0.0, pace.shares, pace.drawing
    for n, survival in enumerate(looked_up, 1):
        gain += survival
        got = (1.0 + gain) / (shares[n] + n * drawing)
        if got > rate:
            best, best_gain, rate = n, gain, got
    if not best or rate < UNTOLD * _exit_rate(survivals, looked_up, pace):
        return NO_OFFER
    return best, best_gain


def agreed(
    pace: Pace, offers: Sequence[tuple[int, float]], others: Sequence[int]
) -> list[tuple[int, float]]:
    """The offers of all rows that pay beside each other, none in the place of those that do not.

    ``offer`` weighs a row as if all had as much to verify; where few have, the pass that grows for
    them is everybody's.

    Args:
        offers: looked-up tokens of each row, and how many will be accepted.
        others: tokens of the verify pass that are drafted in any case, by row.
    """
    wanting = [i for i, (count, _) in enumerate(offers) if count]
    wanting.sort(key=lambda i: -offers[i][1] / offers[i][0])
    tokens, verified = float(pace.num_rows), pace.num_rows + sum(others)
    best, taken, drawing = tokens / pace.verify(verified), 0, 0.0
    for done, i in enumerate(wanting, 1):
        count, gain = offers[i]
        tokens, verified = tokens + gain, verified + count
        drawing += count * pace.drawing
        rate = tokens / (pace.verify(verified) + drawing)
        if rate > best:
            best, taken = rate, done
    kept = set(wanting[:taken])
    return [found if i in kept else NO_OFFER for i, found in enumerate(offers)]


def _exit_rate(survivals: Sequence[float], looked_up: Sequence[float], pace: Pace) -> float:
    """Tokens a second with an early exit, whatever its confidence will say; looked-up tokens that
    it confirms save passes. 0.0 of no draft."""
    best, tokens, drafting = 0.0, 1.0, pace.start_share
    shares, each = pace.shares, pace.draft_share
    saved = itertools.chain((0.0,), looked_up, itertools.repeat(0.0))
    for survival, less, verify in zip(survivals, saved, shares[1:], strict=False):
        tokens += survival
        drafting += each - less * each
        best = max(best, tokens / (verify + drafting))
    return best


@dataclass(frozen=True)
class Split:
    """What the rows of a round do.

    Attributes:
        drafted, looked_up: tokens of each row.
        rate: tokens a second of the round.
        is_less: than would give the most tokens a second.
    """

    drafted: Sequence[int]
    looked_up: Sequence[int]
    rate: float
    is_less: bool = False


def split(
    pace: Pace,
    lines: Sequence[Sequence[float]],
    offers: Sequence[tuple[int, float]],
    others: Sequence[int],
    *,
    bias: float = 1.0,
) -> Split:
    """Who drafts, who looks up and who does neither, for the most tokens a second.

    A row that looks up saves no pass that its neighbours need. So beside what ``agreed`` says it is
    weighed that nobody looks up, and that those do who expect more of it than of their draft. What
    some rows look up has to pay clearly: they end sooner, and passes of few rows serve few.

    Args:
        lines: for each row the survival of its first, second, ... drafted token.
        offers: looked-up tokens of each row, and how many will be accepted.
        others: tokens that other rows draft in any case, and verify; by passes where any row of
            ``lines`` may.
        bias: drafting has to beat the rate without it by this factor.
    """
    none = [NO_OFFER] * len(lines)
    if not any(count for count, _ in offers):
        return _split(pace, lines, none, others, bias)
    together = agreed(pace, offers, others)
    best = _split(pace, lines, together, others, bias)
    if len(lines) == 1:
        return best
    drafting = _split(pace, lines, none, others, bias)
    better = [
        offer if offer[1] > sum(line[:count]) else NO_OFFER
        for offer, line, count in zip(offers, lines, drafting.drafted, strict=True)
    ]
    found = [best, drafting]
    if better not in (none, together):
        found.append(_split(pace, lines, better, others, bias))
    return max(found, key=lambda s: s.rate / CLEARLY if any(s.looked_up) else s.rate)


def _split(
    pace: Pace,
    lines: Sequence[Sequence[float]],
    offers: Sequence[tuple[int, float]],
    others: Sequence[int],
    bias: float,
) -> Split:
    """With these offers taken."""
    looked_up = [count for count, _ in offers]
    # Rows whose number is fixed emit a token each, whatever the others do.
    tokens = pace.num_rows + sum(gain for _, gain in offers)
    gains = [[] if count else line for count, line in zip(looked_up, lines, strict=True)]
    drawing = pace.drawing * sum(looked_up)
    drafted, rate = fill(pace, gains, tokens, looked_up, others, bias=bias, seconds=drawing)
    return Split(drafted, looked_up, rate)


def fill(
    pace: Pace,
    gains: Sequence[Sequence[float]],
    tokens: float,
    looked_up: Sequence[int],
    others: Sequence[int],
    *,
    bias: float = 1.0,
    seconds: float = 0.0,
) -> tuple[list[int], float]:
    """Draft tokens of each row with the most tokens a second, and how many those are.

    Two orders are tried, of which the best first tokens are taken, for each row a prefix of its
    draft: by survival, and pass by pass, which fills passes that some rows' tokens pay for.

    Args:
        gains: for each row the survival of its first, second, ... drafted token.
        tokens: that the round emits without them.
        looked_up: tokens of the verify pass that no pass drafts, by row.
        others: tokens that are drafted in any case, by row.
        bias: drafting has to beat the rate without it by this factor.
        seconds: of the round, beside its passes.
    """
    # Every row verifies its pending token.
    num_verified = pace.num_rows + sum(looked_up) + sum(others)
    running = [sum(n > i for n in others) for i in range(max(0, *others, *map(len, gains)))]
    if any(gains) and any(others):
        seconds += pace.start + sum(pace.drafts[n] for n in running)
    alone = tokens / (pace.verify(num_verified) + seconds)
    best, taken = bias * alone, []
    by_pass = _by_pass(pace, gains, running)
    by_survival = sorted(by_pass, key=itemgetter(0), reverse=True)  # of equals the first pass's
    verifies = [pace.verify(num_verified + n) for n in range(1, len(by_pass) + 1)]
    seconds += 0.0 if any(others) else pace.start
    for order in (by_survival, by_pass):
        count, rate = _best_prefix(order, tokens, seconds, verifies)
        if rate > best:
            best, taken = rate, order[:count]
    counts = [0] * len(gains)
    for *_, row in taken:
        counts[row] += 1
    return counts, best if taken else alone


def _by_pass(
    pace: Pace, gains: Sequence[Sequence[float]], running: Sequence[int]
) -> list[tuple[float, float, int]]:
    """Tokens of the first draft pass, of the second, ..., each pass's likeliest first: survival,
    what the token adds to its pass, and its row. Ordered by survival alone it adds the same: those
    of its pass that come before it are likelier.

    Args:
        running: rows of each draft pass that run in any case.
    """
    items: list[tuple[float, float, int]] = []
    for i, others in enumerate(running):
        column = [(line[i], row) for row, line in enumerate(gains) if len(line) > i]
        column.sort(key=itemgetter(0), reverse=True)
        rises = itertools.islice(pace.rises, others, None)
        items += [(gain, rise, row) for (gain, row), rise in zip(column, rises, strict=False)]
    return items


def _best_prefix(
    order: Sequence[tuple[float, float, int]],
    tokens: float,
    seconds: float,
    verifies: Sequence[float],
) -> tuple[int, float]:
    """How many of the drafted tokens, in this order, give the most tokens a second; 0 of none.

    Args:
        tokens: that the round emits without them.
        seconds: of it, but for its verify pass.
        verifies: of that, with the first of them, the first two, ...
    """
    rates = []
    for (gain, rise, _), verify in zip(order, verifies, strict=True):
        tokens += gain
        seconds += rise
        rates.append(tokens / (seconds + verify))
    best = max(rates, default=0.0)
    return rates.index(best) + 1 if rates else 0, best


def affordable(stake: float, pace: Pace) -> int:
    """Tokens of a row's draft that cost no more than ``stake`` seconds if all are wrong.

    A row by itself stakes a part of that in one draft, so that a bad one leaves it enough for
    another (a gambler's fraction, Kelly 1956), if the part pays for a token; rows that share what
    they may lose are seldom all wrong at once.
    """
    if pace.risks[0] > stake:
        return 0
    return max(1, bisect_right(pace.risks, bet(pace) * stake))


def bet(pace: Pace) -> float:
    """Of a stake, what one round may lose."""
    return BET if pace.num_rows == 1 else 1.0
