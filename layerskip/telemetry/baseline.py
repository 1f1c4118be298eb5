"""What is usual in a bucket, learnt from its first requests, for ``drift`` to hold others against.

Requests differ: drafts of one are alike, and the more they are, the longer a shift takes to tell
(``cusum``). Most of how requests differ is known to the draft itself: where it is less sure, less
is accepted. So beside the accepted tokens of each draft, their surprise is watched, the score of a
common shift of all log-odds:

    surprise = sum (x_i - s_i) / sqrt(sum s_1 ... s_(i-1) s_i (1 - s_i))

The first sum is over judged tokens, where x_i is 1 for an accepted one and 0 for the first that is
not, the second over all drafted ones; s_i is the share accepted of the tokens that were drafted
with such a confidence and judged. If the shares are right, and no draft is surer than
``LEAST_VARIANCE``, its mean is 0 and its deviation 1. Under automatic drafting its correlation
within a request is a sixth to five sixths of that of accepted tokens; of greedy text under a fixed
number it may be as high (bench/README.md has both by bucket). That a draft of fifteen sure tokens
fails is one event, not fifteen. It cannot tell where the text became harder and the draft knows it;
accepted tokens can.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, Literal, NamedTuple

from layerskip.estimates import EDGES
from layerskip.params import check_integer, check_number

Direction = Literal["down", "up"]
SIGNS: tuple[tuple[Direction, float], ...] = (("down", -1.0), ("up", 1.0))

LEAST_REQUESTS = 20
LEAST_DEVIATION = 0.1  # of what is watched: a shift by half of it is of no interest
MOST_CORRELATION = 0.95
MOST_TOKENS = 1e6
LEAST_VARIANCE = 0.1  # of successes less their chances: no draft is surer than that
NUM_BINS = 2 * (len(EDGES) + 1)  # of an early exit's tokens, and of looked-up ones


class BinnedDraft(NamedTuple):
    """A draft that goes on to be verified in full: one that its text's end cuts says nothing.

    Attributes:
        accepted: tokens.
        bins: of its tokens' confidences.
    """

    accepted: int
    bins: bytes

    @classmethod
    def of(
        cls, accepted: int, confidences: Iterable[float], *, looked_up: bool = False
    ) -> "BinnedDraft":
        """Of a draft with known confidences, 0 to 1."""
        first = looked_up * NUM_BINS // 2
        return cls(accepted, bytes(first + bisect_right(EDGES, told) for told in confidences))


@dataclass(frozen=True)
class Baseline:
    """What is watched of a bucket, while all was well.

    Attributes:
        mean, variance: of accepted tokens a draft, or of their surprise.
        correlation: of two drafts of one request (intraclass), 0 to 1.
        mean_error, correlation_error: standard errors of both; 0 if exactly known.
        drafts_per_request: mean number.
        num_requests: that it was learnt from.
        surprise: of the same drafts; None: few of them told their confidence.
    """

    mean: float
    variance: float
    correlation: float = 0.0
    mean_error: float = 0.0
    correlation_error: float = 0.0
    drafts_per_request: float = 1.0
    num_requests: int = 0
    surprise: "Surprise | None" = None

    def __post_init__(self) -> None:
        check_number("mean", self.mean, -MOST_TOKENS, MOST_TOKENS)
        for name in ("variance", "mean_error", "correlation_error"):
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
        """Standard deviation of what is watched of a draft; 0.1 at least."""
        return max(LEAST_DEVIATION, math.sqrt(self.variance))

    @property
    def assumed_correlation(self) -> float:
        """One standard error above the estimate."""
        return min(MOST_CORRELATION, self.correlation + self.correlation_error)

    @property
    def design_effect(self) -> float:
        """The D of ``cusum``."""
        return 1.0 + (self.drafts_per_request - 1.0) * self.assumed_correlation

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
        shares: accepted, of judged tokens with a confidence up to each of ``estimates.EDGES``, and
            above the last; first of an early exit's, then of looked-up ones.
        baseline: of the surprises of drafts.
    """

    shares: tuple[float, ...]
    baseline: Baseline

    def __post_init__(self) -> None:
        if len(self.shares) != NUM_BINS:
            raise ValueError(f"shares must be {NUM_BINS} numbers, got {len(self.shares)}")
        for share in self.shares:
            check_number("shares", share, 0.0, 1.0)
        if self.baseline.surprise is not None:
            raise ValueError("the baseline of surprises has no surprise of its own")

    @classmethod
    def of(cls, requests: Iterable[Sequence[BinnedDraft]]) -> "Surprise | None":
        """Learn from the drafts of each request; None of fewer than 20 requests."""
        requests = [drafts for drafts in requests if drafts]
        if len(requests) < LEAST_REQUESTS:
            return None
        # In any order: requests of two kinds may come in turn.
        order = random.Random(0).sample(requests, len(requests))
        reference, halves = Reference(), (order[::2], order[1::2])
        for half, other in zip(halves, reversed(halves), strict=True):
            shares = _shares(other)  # its own would make it look less surprising than it is
            for drafts in half:
                one = OpenRequest()
                for draft in drafts:
                    one.add(_surprise(shares, draft))
                reference.add(one)
        baseline = reference.baseline()
        # If shares are right it is 1; less is luck, or drafts that were surer than we believe.
        baseline = replace(baseline, variance=max(1.0, baseline.variance))
        return cls(_shares(requests), baseline)

    def of_draft(self, draft: BinnedDraft) -> float:
        """Of one draft, in standard deviations; less accepted than expected is negative."""
        return _surprise(self.shares, draft)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Surprise":
        """What ``Baseline.to_dict`` made of it; its errors."""
        if not isinstance(content, Mapping) or set(content) != {"shares", "baseline"}:
            raise TypeError(f"a surprise must have shares and a baseline, got {content!r}")
        return cls(tuple(content["shares"]), Baseline.from_dict(content["baseline"]))


def _shares(requests: Iterable[Iterable[BinnedDraft]]) -> tuple[float, ...]:
    """Accepted in each bin; in an empty one as in all together."""
    hits, trials = [0] * NUM_BINS, [0] * NUM_BINS
    for accepted, bins in chain.from_iterable(requests):
        for i, place in enumerate(bins[: accepted + 1]):  # none behind a wrong one is judged
            hits[place] += i < accepted
            trials[place] += 1
    every = sum(hits) / max(1, sum(trials))
    return tuple(h / t if t else every for h, t in zip(hits, trials, strict=True))


def _surprise(shares: Sequence[float], draft: BinnedDraft) -> float:
    """As this module defines it."""
    surplus, variance, survival = 0.0, 0.0, 1.0
    for i, place in enumerate(draft.bins):
        chance = shares[place]
        if i <= draft.accepted:
            surplus += (i < draft.accepted) - chance
        variance += survival * chance * (1.0 - chance)
        survival *= chance
    return surplus / math.sqrt(max(LEAST_VARIANCE, variance))


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
    """Requests to learn a baseline from, in sums: a one-way analysis of variance."""

    def __init__(self) -> None:
        self.num_requests = self._drafts = 0
        self._total = self._squares = 0.0
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
