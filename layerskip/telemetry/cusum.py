"""A CUSUM for accepted tokens a draft, of requests that differ: what ``drift`` raises alarms by.

Drafts of one request are alike: in standard deviations from the bucket's mean, any two of them have
the correlation rho, and drafts of two requests none. Of normal ones, ``n`` drafts of a request that
sum up to ``total`` say ``shift (total - n shift / 2) / (1 + (n - 1) rho)`` for "shifted by
``shift``" against "as before", as the logarithm of their likelihood ratio. A draft adds to its
bucket's sum what it changes in that of its request, whatever requests run side by side, and the sum
is kept from falling below zero: Page's test. Acceptance is bounded rather than normal, and the
baseline is estimated. Two things guard against both:

- "as before" includes a shift by one standard error of the baseline's mean, and the correlation is
  taken one standard error higher than estimated;
- a request that brought two fifths of what an alarm takes is not heard further: one that falls into
  a loop is no drift, and an alarm takes three requests as a rule.

By Siegmund's approximation (Sequential Analysis, 1985) for steps of a normal distribution, in
nats: ``ARL = (exp(b) - b - 1) / (shift^2 / 2)`` drafts between two false alarms of one direction,
with ``b = threshold + 1.166 shift``. Correlation only makes them rarer: fewer steps that matter. A
shift is found after ``(b + exp(-b) - 1) D / (shift^2 / 2)`` drafts, where ``D = 1 + (n - 1) rho``
for requests of n drafts. No test gets round D: levels of requests differ by ``sqrt(rho)``, and a
shift cannot be told from that before enough requests have come. For a shift of 0.5 and a false
alarm in 300,000 drafts, both directions together, this gives 82 drafts for rho = 0, and 200 drafts
at D = 2.4. There an alarm within 200 drafts ends: for requests of 40 drafts at rho = 0.036, of 80
at 0.018, less what a baseline's errors take. ``Baseline.expected_delay`` says it for a bucket.

Simulated (bench/LOG.md), baselines learnt from 100 requests of 40 drafts each: a median delay of
121 drafts at rho = 0, 164 at 0.017, 199 at 0.03, 269 at 0.05, 476 at 0.1, and 0.03 to 0.14 false
alarms in 100,000. The built-in checkpoint's sampled text has rho from 0.004 to 0.04; its greedy
text, which loops in some requests, 0.2.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from layerskip.params import check_integer, check_number

Direction = Literal["down", "up"]
SIGNS: tuple[tuple[Direction, float], ...] = (("down", -1.0), ("up", 1.0))

SHIFT = 0.5  # standard deviations of accepted tokens a draft
DRAFTS_PER_FALSE_ALARM = 300_000
LEAST_REQUESTS = 20
LEAST_DEVIATION = 0.1  # tokens: a shift by half of it is of no interest
MOST_CORRELATION = 0.95
MOST_HEARD = 0.4  # of the threshold, that one request may bring
MOST_OPEN = 4096  # requests: some may never end
OVERSHOOT = 1.166  # twice 0.583, standard deviations of a step


@dataclass(frozen=True)
class Baseline:
    """Acceptance of a bucket while all was well.

    Attributes:
        mean, variance: of accepted tokens a draft.
        correlation: of two drafts of one request (intraclass), 0 to 1.
        mean_error, correlation_error: standard errors of both; 0 if exactly known.
        drafts_per_request: mean number.
        num_requests: that it was learnt from.
    """

    mean: float
    variance: float
    correlation: float = 0.0
    mean_error: float = 0.0
    correlation_error: float = 0.0
    drafts_per_request: float = 1.0
    num_requests: int = 0

    def __post_init__(self) -> None:
        for name in ("mean", "variance", "mean_error", "correlation_error"):
            check_number(name, getattr(self, name), 0.0, math.inf)
        check_number("correlation", self.correlation, 0.0, 1.0)
        check_number("drafts_per_request", self.drafts_per_request, 1.0, math.inf)
        check_integer("num_requests", self.num_requests, 0)

    @classmethod
    def of(cls, requests: Iterable[Iterable[int]]) -> "Baseline":
        """Learn from the accepted tokens of each draft, request by request.

        Raises:
            ValueError: fewer than 20 requests drafted.
        """
        reference = Reference()
        for drafts in requests:
            one = OpenRequest()
            for accepted in drafts:
                one.add(accepted)
            reference.add(one)
        if reference.num_requests < LEAST_REQUESTS:
            raise ValueError(
                f"a baseline needs {LEAST_REQUESTS} requests that drafted, "
                f"got {reference.num_requests}"
            )
        return reference.baseline()

    @property
    def deviation(self) -> float:
        """Standard deviation of accepted tokens a draft; 0.1 at least."""
        return max(LEAST_DEVIATION, math.sqrt(self.variance))

    @property
    def assumed_correlation(self) -> float:
        """One standard error above the estimate."""
        return min(MOST_CORRELATION, self.correlation + self.correlation_error)

    @property
    def design_effect(self) -> float:
        """The D of this module."""
        return 1.0 + (self.drafts_per_request - 1.0) * self.assumed_correlation

    def tolerance(self, shift: float) -> float:
        """Standard deviations that the true mean may lie off: one standard error."""
        return min(self.mean_error / self.deviation, shift / 2)

    def expected_delay(self) -> float:
        """Drafts from a shift by ``SHIFT`` to its alarm, on the average."""
        b = threshold(SHIFT, DRAFTS_PER_FALSE_ALARM) + OVERSHOOT * SHIFT
        gain = (SHIFT - self.tolerance(SHIFT)) ** 2 / 2 / self.design_effect
        return (b + math.exp(-b) - 1.0) / gain

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; ``Baseline(**content)`` is the same again."""
        return asdict(self)


def threshold(shift: float, drafts_per_false_alarm: float) -> float:
    """Where a sum is an alarm, in nats; two directions, each with half of the false alarms."""
    steps = 2.0 * drafts_per_false_alarm * shift**2 / 2.0
    b = math.log1p(steps)
    for _ in range(20):  # converges like 1 / steps
        b = math.log1p(steps + b)
    return b - OVERSHOOT * shift


class OpenRequest:
    """A request's drafts so far.

    Attributes:
        count, total, squares: drafts; accepted tokens, summed; their squares, summed.
        said: what it brought to each direction's sum, in nats.
    """

    __slots__ = ("count", "said", "squares", "total")

    def __init__(self) -> None:
        self.count, self.total, self.squares = 0, 0, 0
        self.said = {direction: 0.0 for direction, _ in SIGNS}

    def add(self, accepted: int) -> None:
        self.count += 1
        self.total += accepted
        self.squares += accepted * accepted


class Reference:
    """Requests to learn a baseline from, in sums: a one-way analysis of variance."""

    def __init__(self) -> None:
        self.num_requests = self._drafts = self._total = self._squares = 0
        self._between = 0.0  # of each request, its total squared by its drafts
        self._sizes = 0  # of each request, its drafts squared

    def add(self, request: OpenRequest) -> None:
        """Count a finished request; one that never drafted says nothing."""
        if not request.count:
            return
        self.num_requests += 1
        self._drafts += request.count
        self._total += request.total
        self._squares += request.squares
        self._between += request.total**2 / request.count
        self._sizes += request.count**2

    def baseline(self) -> Baseline:
        """Mean, variance, correlation and their errors; of 2 requests or more."""
        requests, drafts = self.num_requests, self._drafts
        mean = self._total / drafts
        between = max(0.0, self._between - self._total * mean) / (requests - 1)
        variance, correlation, error = between, 0.0, 0.0
        if drafts > requests:
            size = (drafts - self._sizes / drafts) / (requests - 1)  # of a request, fairly weighed
            within = max(0.0, self._squares - self._between) / (drafts - requests)
            levels = max(0.0, (between - within) / size)
            variance = within + levels
            correlation = levels / variance if variance else 0.0
            spread = (1.0 - correlation) * (1.0 + (size - 1.0) * correlation)
            error = math.sqrt(2.0 / (requests - 1)) * spread / size
        likely = min(MOST_CORRELATION, correlation + error)
        design = 1.0 + (self._sizes / drafts - 1.0) * likely
        return Baseline(
            mean,
            variance,
            correlation,
            math.sqrt(variance * design / drafts),
            error,
            drafts / requests,
            requests,
        )


class Cusum:
    """The two sums of one bucket.

    Args:
        baseline: of the bucket.
        shift: to be found, in standard deviations.
        drafts_per_false_alarm: at which the threshold aims.

    Attributes:
        sums: by direction, in nats.
        threshold: that makes an alarm.
        num_drafts: so far.
    """

    def __init__(
        self,
        baseline: Baseline,
        shift: float = SHIFT,
        drafts_per_false_alarm: float = DRAFTS_PER_FALSE_ALARM,
    ) -> None:
        self.baseline, self.threshold = baseline, threshold(shift, drafts_per_false_alarm)
        self.num_drafts = 0
        self.sums = {direction: 0.0 for direction, _ in SIGNS}
        self._since: dict[Direction, tuple[int, int]] = {d: (0, 0) for d, _ in SIGNS}
        tolerance = baseline.tolerance(shift)
        self._gain, self._middle = shift - tolerance, (shift + tolerance) / 2

    def observe(self, request: OpenRequest, accepted: int) -> tuple[Direction, int, float] | None:
        """Count one more draft of a request, and add it to the request.

        Returns:
            None, or of an alarm its direction, how many drafts ago its sum left zero, and the mean
            of accepted tokens since then. The sum begins again.
        """
        request.add(accepted)
        self.num_drafts += 1
        n, base = request.count, self.baseline
        total = (request.total - n * base.mean) / base.deviation
        weight = self._gain / (1.0 + (n - 1) * base.assumed_correlation)
        found = None
        for direction, sign in SIGNS:
            said = weight * (sign * total - n * self._middle)
            if request.said[direction] >= MOST_HEARD * self.threshold:
                said = request.said[direction]
            step, request.said[direction] = said - request.said[direction], said
            found = self._step(direction, step, accepted) or found
        return found

    def _step(
        self, direction: Direction, step: float, accepted: int
    ) -> tuple[Direction, int, float] | None:
        value = self.sums[direction] + step
        count, total = self._since[direction]
        count, total = count + 1, total + accepted
        alarmed = value >= self.threshold
        if alarmed or value <= 0.0:
            self.sums[direction], self._since[direction] = 0.0, (0, 0)
        else:
            self.sums[direction], self._since[direction] = value, (count, total)
        return (direction, count, total / count) if alarmed else None
