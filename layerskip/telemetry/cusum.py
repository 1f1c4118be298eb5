"""A CUSUM of drafts, of requests that differ: what ``drift`` raises alarms by.

It watches a number of each draft: its accepted tokens, or their surprise (``baseline``).

Drafts of one request are alike: in standard deviations from what is usual, the mean of requests
weighed as below, any two of them have the correlation rho, and drafts of two requests none. Of
normal ones, ``n`` drafts of a request that sum up to ``total`` say
``shift (total - n shift / 2) / (1 + (n - 1) rho)`` for "shifted by
``shift``" against "as before", as the logarithm of their likelihood ratio. A draft adds to its
bucket's sum what it changes in that of its request, whatever requests run side by side, and the sum
is kept from falling below zero: Page's test. Acceptance is bounded rather than normal, and the
baseline is estimated. Two things guard against both:

- "as before" includes a shift by one standard error of the baseline's mean, or by two where both
  numbers are watched, and the correlation is taken one standard error higher than estimated, the
  estimate being such that requests of few drafts, which may differ more, are believed, too;
- a request that brought two fifths of what an alarm takes is not heard further: one that falls into
  a loop is no drift, and an alarm takes three requests as a rule.

By Siegmund's approximation (Sequential Analysis, 1985) for steps of a normal distribution, in
nats: ``ARL = (exp(b) - b - 1) / (shift^2 / 2)`` drafts between two false alarms of one direction,
with ``b = threshold + 1.166 shift``. Correlation only makes them rarer: fewer steps that matter. A
shift is found after ``(b + exp(-b) - 1) D / (shift^2 / 2)`` drafts, where ``D = 1 + (n - 1) rho``
for requests of n drafts. No test of the same number gets round D: levels of requests differ by
``sqrt(rho)``, and a shift cannot be told from that before enough requests have come. For a shift of
0.5 and a false alarm in 300,000 drafts, both directions together, this gives 82 drafts for rho = 0,
and 200 drafts at D = 2.4. There an alarm within 200 drafts ends: for requests of 40 drafts at
rho = 0.036, of 80 at 0.018, less what a baseline's errors take.

Simulated (bench/LOG.md), baselines learnt from 100 requests of 40 drafts each: a median delay of
121 drafts at rho = 0, 164 at 0.017, 199 at 0.03, 269 at 0.05, 476 at 0.1, and 0.03 to 0.14 false
alarms in 100,000. Accepted tokens of the built-in checkpoint have rho from 0.004 to 0.12 in sampled
text, and up to 0.28 in greedy text, which loops in some requests. Their surprise has less there,
and a loss of accepted tokens moves it by more than the shift that is tested for (bench/README.md).
"""

import math

from layerskip.telemetry.baseline import SIGNS, Baseline, Direction, OpenRequest

SHIFT = 0.5  # standard deviations of what is watched
DRAFTS_PER_FALSE_ALARM = 300_000
MOST_HEARD = 0.4  # of the threshold, that one request may bring
# Since a sum left zero: drafts, those that were heard weighed, their deviations, least and most.
NOTHING = 0, 0.0, 0.0, math.inf, -math.inf
OVERSHOOT = 1.166  # twice 0.583, standard deviations of a step


def threshold(shift: float, drafts_per_false_alarm: float) -> float:
    """Where a sum is an alarm, in nats; two directions, each with half of the false alarms."""
    steps = 2.0 * drafts_per_false_alarm * shift**2 / 2.0
    b = math.log1p(steps)
    for _ in range(20):  # converges like 1 / steps
        b = math.log1p(steps + b)
    return b - OVERSHOOT * shift


class Cusum:
    """The two sums of one bucket.

    Args:
        baseline: of the bucket.
        shift: to be found, in standard deviations.
        drafts_per_false_alarm: at which the threshold aims.
        errors: standard errors of the baseline's mean that may lie between it and what is usual.

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
        errors: float = 1.0,
    ) -> None:
        self.baseline = baseline
        self.threshold = threshold(shift, drafts_per_false_alarm)
        self.num_drafts = 0
        self.sums = {direction: 0.0 for direction, _ in SIGNS}
        self._since = {direction: NOTHING for direction, _ in SIGNS}
        tolerance = baseline.tolerance(shift, errors)
        self._gain, self._middle = shift - tolerance, (shift + tolerance) / 2
        self._most_heard = MOST_HEARD * self.threshold
        # Of every draft: they take longer to work out than to use.
        self._usual, self._deviation = baseline.usual, baseline.deviation
        self._correlation = baseline.assumed_correlation

    def observe(self, request: OpenRequest, value: float) -> tuple[Direction, int, float] | None:
        """Count one more draft of a request, and add it to the request.

        Returns:
            None, or of an alarm its direction, how many drafts ago its sum left zero, and the mean
            of what was heard since then, requests weighed. The sum begins again.
        """
        known, weighed = self._weighed(request)
        request.add(value)
        self.num_drafts += 1
        n, total = self._weighed(request)
        step = n - known, total - weighed, value
        found = None
        for direction, sign in SIGNS:
            said = self._gain * (sign * total - n * self._middle)
            before = request.said[direction]
            if unheard := before >= self._most_heard:
                said = before
            more, request.said[direction] = said - before, said
            found = self._step(direction, more, None if unheard else step) or found
        return found

    def _weighed(self, request: OpenRequest) -> tuple[float, float]:
        """Its drafts, and by how many standard deviations they are above what is usual, summed."""
        n = request.count
        weight = 1.0 / (1.0 + (n - 1) * self._correlation)
        return weight * n, weight * (request.total - n * self._usual) / self._deviation

    def _step(
        self, direction: Direction, said: float, heard: tuple[float, float, float] | None
    ) -> tuple[Direction, int, float] | None:
        height = self.sums[direction] + said
        count, drafts, total, low, high = self._since[direction]
        count += 1
        if heard is not None:
            more, deviations, value = heard
            drafts, total = drafts + more, total + deviations
            low, high = min(low, value), max(high, value)
        alarmed = height >= self.threshold
        if alarmed or height <= 0.0:
            self.sums[direction], self._since[direction] = 0.0, NOTHING
        else:
            self.sums[direction], self._since[direction] = height, (count, drafts, total, low, high)
        if not alarmed:
            return None
        # Of requests that began before, more may be weighed anew than was watched since.
        return direction, count, min(max(self._usual + self._deviation * total / drafts, low), high)
