"""What is usual in a bucket, learnt from its first requests, for ``drift`` to hold others against.

Requests differ: drafts of one are alike, and the more they are, the longer a shift takes to tell
(``cusum``). Most of how requests differ is known to the draft itself: where it is less sure, less
is accepted. So beside the accepted tokens of each draft, their surprise is watched, summed over
judged tokens, where x_i is 1 for an accepted one and 0 for the first that is not:

    surprise = sum w_i (x_i - s_i) / deviation,  w_i = logit(s_i) - logit((1 - L) s_i)

s_i is the share accepted of the tokens that were drafted with such a confidence and judged, and the
deviation is what the sum has if the shares are right. But for a constant of each token the sum is
the logarithm of the likelihood that drafts are as usual against "each accepted token is lost with
the chance ``LOSS``": what Page's test (Biometrika, 1954) adds up. A sure token that is wrong says
ten times as much as a doubtful one, and no share counts as higher than ``MOST_CERTAIN``.

Greedy text loops in some requests, and there the same draft comes again with the same outcome. So
shares are apart for tokens whose draft looks as an earlier one of the request did (``Repeats``), by
whether that token was accepted then. Surprises cannot tell where the text became harder and the
draft knows it; accepted tokens can. bench/README.md has the correlations within a request.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain, count
from typing import Any, Literal, NamedTuple

from layerskip.control.experience import EDGES
from layerskip.params import check_integer, check_number

Direction = Literal["down", "up"]
SIGNS: tuple[tuple[Direction, float], ...] = (("down", -1.0), ("up", 1.0))

LEAST_REQUESTS = 20
LEAST_DEVIATION = 0.1  # of what is watched: a shift by half of it is of no interest
MOST_CORRELATION = 0.95
HALVINGS = 20
MOST_TOKENS = 1e6
LOSS = 0.3  # of accepted tokens: what surprises are made to tell
MOST_CERTAIN = 0.995  # share accepted that is believed in
MOST_KEPT = 512  # drafts of a request that others are held against
CONFIDENCE_BINS = 2 * (len(EDGES) + 1)  # of an early exit's tokens, and of looked-up ones
NEW, WAS_RIGHT, WAS_WRONG = range(3)  # a token, beside that of an earlier draft of the request
NUM_BINS = 3 * CONFIDENCE_BINS


class BinnedDraft(NamedTuple):
    """A draft that goes on to be verified in full: one that its text's end cuts says nothing.

    Attributes:
        accepted: tokens.
        bins: of its tokens' confidences; from ``Repeats`` on, of what they were before, too.
    """

    accepted: int
    bins: bytes

    @classmethod
    def of(
        cls, accepted: int, confidences: Iterable[float], *, looked_up: bool = False
    ) -> "BinnedDraft":
        """Of a draft with known confidences, 0 to 1."""
        first = looked_up * CONFIDENCE_BINS // 2
        return cls(accepted, bytes([first + bisect_right(EDGES, told) for told in confidences]))


class Repeats:
    """The drafts of a request so far, that the next is held against: those with the same bins."""

    __slots__ = ("_most",)

    def __init__(self) -> None:
        self._most: dict[bytes, int] = {}  # accepted of drafts with such bins

    def place(self, draft: BinnedDraft) -> BinnedDraft:
        """The next draft, in bins of those before it."""
        most = self._most.get(draft.bins)
        if most is None and len(self._most) == MOST_KEPT:
            return draft
        self._most[draft.bins] = max(draft.accepted, draft.accepted if most is None else most)
        if most is None:
            return draft
        before = (WAS_RIGHT if i < most else WAS_WRONG if i == most else NEW for i in count())
        bins = (b + CONFIDENCE_BINS * was for b, was in zip(draft.bins, before, strict=False))
        return BinnedDraft(draft.accepted, bytes(bins))


@dataclass(frozen=True)
class Baseline:
    """What is watched of a bucket, while all was well.

    Attributes:
        mean, variance: of accepted tokens a draft, or of their surprise; the variance as much
            larger as requests vary more than any correlation says.
        correlation: of two drafts of one request (intraclass), 0 to 1; or as much more as requests
            of few drafts differ more.
        mean_error, correlation_error: standard errors of ``usual`` and of the correlation; 0 if
            exactly known.
        drafts_per_request: mean number.
        num_requests: that it was learnt from.
        surprise: of the same drafts; None: few of them told their confidence.
        centre: the mean of requests weighed as ``cusum`` weighs them; None: ``mean``.
    """

    mean: float
    variance: float
    correlation: float = 0.0
    mean_error: float = 0.0
    correlation_error: float = 0.0
    drafts_per_request: float = 1.0
    num_requests: int = 0
    surprise: "Surprise | None" = None
    centre: float | None = None

    def __post_init__(self) -> None:
        check_number("mean", self.mean, -MOST_TOKENS, MOST_TOKENS)
        if self.centre is not None:
            check_number("centre", self.centre, -MOST_TOKENS, MOST_TOKENS)
        for name in ("variance", "mean_error", "correlation_error"):
            check_number(name, getattr(self, name), 0.0, math.inf)
        check_number("correlation", self.correlation, 0.0, 1.0)
        check_number("drafts_per_request", self.drafts_per_request, 1.0, math.inf)
        check_integer("num_requests", self.num_requests, 0)

    @property
    def usual(self) -> float:
        """What others are held against."""
        return self.mean if self.centre is None else self.centre

    @property
    def deviation(self) -> float:
        """Standard deviation of what is watched of a draft; 0.1 at least."""
        return max(LEAST_DEVIATION, math.sqrt(self.variance))

    @property
    def assumed_correlation(self) -> float:
        """One standard error above the estimate."""
        return min(MOST_CORRELATION, self.correlation + self.correlation_error)

    def tolerance(self, shift: float, errors: float = 1.0) -> float:
        """Standard deviations that the true mean may lie off: so many standard errors."""
        return min(errors * self.mean_error / self.deviation, shift / 2)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Baseline":
        """What ``to_dict`` made.

        Raises:
            TypeError: it has other fields.
            ValueError: a number is out of its range.
        """
        if not isinstance(content, Mapping):
            raise TypeError(f"a baseline must be a JSON object, got {content!r}")
        surprise = content.get("surprise")
        if surprise is not None:
            surprise = Surprise.from_dict(surprise)
        return cls(**{**content, "surprise": surprise})


@dataclass(frozen=True)
class Surprise:
    """How much more of a draft is accepted than its confidences speak for.

    Attributes:
        shares: accepted, of judged tokens with a confidence up to each of ``experience.EDGES``, and
            above the last; first of an early exit's, then of looked-up ones; both again for tokens
            that were right in a draft which looked the same, and once more for those that were not.
        deviation: of the weighted sum of a draft, if the shares are right.
        baseline: of the surprises of drafts.
    """

    shares: tuple[float, ...]
    deviation: float
    baseline: Baseline

    def __post_init__(self) -> None:
        if len(self.shares) != NUM_BINS:
            raise ValueError(f"shares must be {NUM_BINS} numbers, got {len(self.shares)}")
        for share in self.shares:
            check_number("shares", share, 0.0, 1.0)
        check_number("deviation", self.deviation, LEAST_DEVIATION, math.inf)
        if self.baseline.surprise is not None:
            raise ValueError("the baseline of surprises has no surprise of its own")

    @classmethod
    def of(cls, requests: Iterable[Sequence[BinnedDraft]]) -> "Surprise | None":
        """Learn from the drafts of each request; None of fewer than 20 requests."""
        requests = [drafts for drafts in requests if drafts]
        if len(requests) < LEAST_REQUESTS:
            return None
        shares = _shares(requests)
        deviation = _Expectation(shares).deviation(chain.from_iterable(requests))
        # In any order: requests of two kinds may come in turn.
        order = random.Random(0).sample(requests, len(requests))
        reference, halves = Reference(), (order[::2], order[1::2])
        for half, other in zip(halves, reversed(halves), strict=True):
            # Its own shares would make it look less surprising than it is.
            expected = _Expectation(_shares(other))
            for drafts in half:
                one = OpenRequest()
                for draft in drafts:
                    one.add(expected.surplus(draft) / deviation)
                reference.add(one)
        baseline = reference.baseline()
        # If shares are right it is 1; less is luck, or drafts that were surer than we believe.
        baseline = replace(baseline, variance=max(1.0, baseline.variance))
        return cls(shares, deviation, baseline)

    def of_draft(self, draft: BinnedDraft) -> float:
        """Of one draft, in standard deviations; less accepted than expected is negative."""
        return self._expected.surplus(draft) / self.deviation

    @cached_property
    def _expected(self) -> "_Expectation":
        return _Expectation(self.shares)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Surprise":
        """What ``Baseline.to_dict`` made of it; its errors."""
        names = {"shares", "deviation", "baseline"}
        if not isinstance(content, Mapping) or set(content) != names:
            raise TypeError(
                f"a surprise must have shares, a deviation and a baseline, got {content!r}"
            )
        baseline = Baseline.from_dict(content["baseline"])
        return cls(tuple(content["shares"]), content["deviation"], baseline)


def _shares(requests: Iterable[Iterable[BinnedDraft]]) -> tuple[float, ...]:
    """Accepted in each bin; in an empty one as in all together."""
    hits, trials = [0] * NUM_BINS, [0] * NUM_BINS
    for accepted, bins in chain.from_iterable(requests):
        for i, place in enumerate(bins[: accepted + 1]):  # none behind a wrong one is judged
            hits[place] += i < accepted
            trials[place] += 1
    every = sum(hits) / max(1, sum(trials))
    return tuple(h / t if t else every for h, t in zip(hits, trials, strict=True))


class _Expectation:
    """What shares speak for, and how much a token says that goes otherwise."""

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = [min(share, MOST_CERTAIN) for share in shares]
        # The difference of log-odds, of which a share of 0 has one, too.
        self._weights = [
            math.log((1.0 - (1.0 - LOSS) * share) / ((1.0 - LOSS) * (1.0 - share)))
            for share in self._shares
        ]

    def surplus(self, draft: BinnedDraft) -> float:
        """Its accepted tokens less their chances, weighted."""
        found = 0.0
        for i, place in enumerate(draft.bins[: draft.accepted + 1]):
            found += self._weights[place] * ((i < draft.accepted) - self._shares[place])
        return found

    def deviation(self, drafts: Iterable[BinnedDraft]) -> float:
        """Of the surplus of a draft, if the shares are right: root of the mean variance."""
        variance, number = 0.0, 0
        for draft in drafts:
            survival, number = 1.0, number + 1
            for place in draft.bins:
                chance = self._shares[place]
                variance += survival * self._weights[place] ** 2 * chance * (1.0 - chance)
                survival *= chance
        return max(LEAST_DEVIATION, math.sqrt(variance / number))


class OpenRequest:
    """A request's drafts so far.

    Attributes:
        count, total, squares: drafts; what is watched of them, summed; its squares, summed.
        said: what it brought to each direction's sum, in nats.
    """

    __slots__ = ("count", "said", "squares", "total")

    def __init__(self) -> None:
        self.count, self.total, self.squares = 0, 0.0, 0.0
        self.said = {direction: 0.0 for direction, _ in SIGNS}

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.squares += value * value


class Reference:
    """Requests to learn a baseline from: a one-way analysis of variance, and what it says is usual
    for a test that weighs a request of n drafts by ``1 / (1 + (n - 1) rho)``, as ``cusum`` does.

    How much is accepted and how often is drafted depend on each other: a text that loops takes few
    drafts. So there is a mean of requests as the test weighs them, or its steps would have another
    one, and ``rho``, or where none is enough the variance, is such that sums of requests, weighed
    so, vary no more than these let them.
    """

    def __init__(self) -> None:
        self._requests: list[tuple[int, float]] = []  # drafts, and what is watched, summed
        self._squares = 0.0

    @property
    def num_requests(self) -> int:
        """Those that drafted."""
        return len(self._requests)

    def add(self, request: OpenRequest) -> None:
        """Count a finished request; one that never drafted says nothing."""
        if not request.count:
            return
        self._requests.append((request.count, request.total))
        self._squares += request.squares

    def baseline(self) -> Baseline:
        """Mean, variance, correlation and their errors; of 2 requests or more."""
        requests, drafts = self.num_requests, sum(n for n, _ in self._requests)
        squared = sum(total**2 / n for n, total in self._requests)
        mean = sum(total for _, total in self._requests) / drafts
        between = max(0.0, squared - mean**2 * drafts) / (requests - 1)
        variance, correlation, error = between, 0.0, 0.0
        if drafts > requests:
            most = sum(n * n for n, _ in self._requests) / drafts
            size = (drafts - most) / (requests - 1)  # of a request, fairly weighed
            within = max(0.0, self._squares - squared) / (drafts - requests)
            levels = max(0.0, (between - within) / size)
            variance = within + levels
            correlation = levels / variance if variance else 0.0
            spread = (1.0 - correlation) * (1.0 + (size - 1.0) * correlation)
            error = math.sqrt(2.0 / (requests - 1)) * spread / size
            correlation = self._least_correlation(variance, correlation)
            variance = max(variance, self._weighed(correlation)[2])
        centre, heard, _ = self._weighed(min(MOST_CORRELATION, correlation + error))
        return Baseline(
            mean,
            variance,
            correlation,
            math.sqrt(variance / heard),
            error,
            drafts / requests,
            requests,
            centre=centre,
        )

    def _weighed(self, correlation: float) -> tuple[float, float, float]:
        """Mean by the weights of a correlation, the drafts that count, and what the variance of a
        draft would be if requests' sums varied by nothing but that and the correlation."""
        weights = [1.0 / (1.0 + (n - 1) * correlation) for n, _ in self._requests]
        heard = sum(w * n for w, (n, _) in zip(weights, self._requests, strict=True))
        mean = sum(w * t for w, (_, t) in zip(weights, self._requests, strict=True)) / heard
        steps = (w * (t - n * mean) for w, (n, t) in zip(weights, self._requests, strict=True))
        return mean, heard, sum(step**2 for step in steps) / heard

    def _least_correlation(self, variance: float, least: float) -> float:
        """The smallest from ``least`` on that the sums of requests agree with, by halving; where
        none does, ``least``: short requests differ more, draft by draft, than long ones."""
        low, high = least, MOST_CORRELATION
        if low >= high or self._weighed(low)[2] <= variance or self._weighed(high)[2] > variance:
            return low
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._weighed(middle)[2] <= variance else (middle, high)
        return high
