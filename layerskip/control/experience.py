"""What requests have in common: discounted counts of accepted tokens by position, by confidence and
by look-up."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from layerskip.control.mixture import Mixture
from layerskip.lookup import FORCED_MATCH, LONGEST_MATCH
from layerskip.params import MAX_AUTO_DRAFT_TOKENS

DEFAULT_ACCEPTANCE = 0.7
SHARED_DISCOUNT, CALIBRATION_DISCOUNT = 0.99, 0.998
LOOKUP_WEIGHT, CALIBRATION_WEIGHT = 6.0, 4.0  # of a prior, in trials
# The same of acceptance, a plan's or the default, until it wears off: the first tokens of eight
# rows, all of one round, tell less than the texts that a plan's was measured on.
PRIOR_WEIGHT = 20.0
KNOWN_CALIBRATION_WEIGHT = 20.0  # the same of a plan's calibration, for good
LENGTH_SHARE = 0.1  # of a request, in what is their usual length
LARGEST = 0.995  # of an estimate: nothing is certain
EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
MATCH_EDGES = (2, 3, 5, 9, 17, FORCED_MATCH)
LOOKUP_PRIORS = (0.3, 0.5, 0.65, 0.75, 0.82, 0.87, 0.97)  # after matches between the edges
NUM_ERROR_BINS = 10


def lookup_confidence(match_length: int, stored: bool, *, ahead: int = 0) -> float:
    """What speaks for a looked-up token, 0 to 1, before any is seen.

    Args:
        match_length: of the look-up.
        stored: whether it is from a store.
        ahead: looked-up tokens before it, if they are right: the match is longer by so many.
    """
    return lookup_prior(bin_of_match(match_length, ahead), stored)


def lookup_prior(match_bin: int, stored: bool) -> float:
    """The share of such looked-up tokens that is thought to be right before any is seen."""
    return LOOKUP_PRIORS[match_bin] / (1 + stored)


def bin_of_match(match_length: int, ahead: int) -> int:
    """Of a looked-up token, with so many before it that are right."""
    if match_length < FORCED_MATCH:
        match_length = min(match_length + ahead, LONGEST_MATCH)
    return bisect_right(MATCH_EDGES, match_length)


@dataclass
class Share:
    """A discounted share of successes in trials, or in what was expected of them: then its ratio
    says how one request differs from all."""

    hits: float = 0.0
    trials: float = 0.0

    @classmethod
    def begun(cls, prior: float, weight: float) -> "Share":
        """As if so many trials with the share ``prior`` had been seen, until that wears off."""
        return cls(weight * prior, weight)

    def add(self, success: bool, discount: float, expected: float = 1.0) -> None:
        self.hits = discount * self.hits + success
        self.trials = discount * self.trials + expected

    def fade(self, kept: float) -> None:
        """Give what is known so much of its weight."""
        self.hits, self.trials = kept * self.hits, kept * self.trials

    @property
    def value(self) -> float:
        """Of one that has begun."""
        return min(LARGEST, self.hits / self.trials)

    def mean(self, prior: float, weight: float) -> float:
        """As if ``weight`` trials with the share ``prior`` had come first."""
        return min(LARGEST, (weight * prior + self.hits) / (weight + self.trials))

    def ratio(self, weight: float) -> float:
        """Over what was expected, as if ``weight`` had come of as much first."""
        return (self.hits + weight) / (self.trials + weight)


class ToldChances:
    """Chances told of tokens, in ten bins of equal width, and what became of the tokens.

    Attributes:
        num_tokens: judged so far.
    """

    def __init__(self) -> None:
        self._bins = [[0.0, 0, 0] for _ in range(NUM_ERROR_BINS)]  # chances, accepted, tokens
        self.num_tokens = 0

    def add(self, told: float, accepted: bool) -> None:
        line = self._bins[min(int(told * NUM_ERROR_BINS), NUM_ERROR_BINS - 1)]
        line[0] += told
        line[1] += accepted
        line[2] += 1
        self.num_tokens += 1

    @property
    def error(self) -> float:
        """Expected calibration error (Naeini et al. 2015); 0 of no token."""
        return sum(abs(told - hits) for told, hits, _ in self._bins) / max(1, self.num_tokens)

    @property
    def error_by_chance(self) -> float:
        """About what ``error`` would be of so many tokens if all chances told were right: in each
        bin the mean deviation of a binomial count, sqrt(2 n p (1 - p) / pi)."""
        bins = ((told, max(0.0, 1.0 - told / n)) for told, _, n in self._bins if n)
        gaps = (math.sqrt(2.0 * told * wrong / math.pi) for told, wrong in bins)
        return sum(gaps) / max(1, self.num_tokens)


class Calibration:
    """From a draft's confidence to the chance that its token is accepted, learnt on line.

    Args:
        known: points of it, ``(confidence, share accepted)`` with increasing confidences, to begin
            with; none: drafts are right as often as they are sure, as those of most exits and skip
            sets of the built-in checkpoint are, or nearly (bench/LOG.md, 2026-11-26).

    Attributes:
        told: the chances that judged tokens were given when they were drafted.
    """

    def __init__(self, known: Sequence[tuple[float, float]] = ()) -> None:
        self._bins = [Share() for _ in range(len(EDGES) + 1)]
        bins = zip((0.0, *EDGES), (*EDGES, 1.0), strict=True)
        self._middles = [(a + b) / 2 for a, b in bins]
        self._priors = self._middles
        self._weight = CALIBRATION_WEIGHT
        if known:
            confidences, shares = zip(*known, strict=True)
            self._priors = np.interp(self._middles, confidences, shares).tolist()
            self._weight = KNOWN_CALIBRATION_WEIGHT
        self._means = [self._mean(i) for i in range(len(self._bins))]
        self.told = ToldChances()

    def chance(self, confidence: float) -> float:
        """Of acceptance, if all before it is accepted; between the bins' middles it is linear."""
        i = bisect_right(self._middles, confidence)
        if i == 0 or i == len(self._middles):
            return self._means[min(i, len(self._middles) - 1)]
        low, high = self._middles[i - 1], self._middles[i]
        share = (confidence - low) / (high - low)
        return (1.0 - share) * self._means[i - 1] + share * self._means[i]

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """What is known now, in the form of ``known``."""
        return tuple(zip(self._middles, self._means, strict=True))

    def _mean(self, i: int) -> float:
        return self._bins[i].mean(self._priors[i], self._weight)

    def add(self, confidence: float, told: float, accepted: bool) -> None:
        """What became of a token, and the chance that it was given."""
        i = bisect_right(EDGES, confidence)
        self._bins[i].add(accepted, CALIBRATION_DISCOUNT)
        self._means[i] = self._mean(i)
        self.told.add(told, accepted)


@dataclass
class Experience:
    """What requests of one kind (greedy, coupled, token, block) have in common.

    Attributes:
        prior: acceptance by position, as measured before; empty: unknown.
        acceptances: of a request's first, second, ... drafted token once those before it are
            accepted.
        ledger: what their drafts gained less what they lost, in tokens of plain rounds.
        credit: plain passes of one row that probes and looking back may take: a share of all
            rounds but probes; negative where requests ended that had more in advance than they came
            to earn.
        usual_length: tokens of the requests that ended, on the average; infinite of none. Of those
            that their limits ended only the longer ones count.
        mixture: of requests whose drafts are right more often and less often than all of them.
    """

    prior: tuple[float, ...]
    positions: list[Share] = field(default_factory=lambda: new_shares(MAX_AUTO_DRAFT_TOKENS))
    lookups: dict[tuple[bool, int], Share] = field(default_factory=dict)
    calibration: Calibration = field(default_factory=Calibration)
    ledger: float = 0.0
    credit: float = 0.0
    usual_length: float = math.inf
    mixture: Mixture = field(default_factory=Mixture)

    def __post_init__(self) -> None:
        self._weights = [PRIOR_WEIGHT] * MAX_AUTO_DRAFT_TOKENS
        given = self.prior or (DEFAULT_ACCEPTANCE,)
        self._priors = [given[min(i, len(given) - 1)] for i in range(MAX_AUTO_DRAFT_TOKENS)]
        self.acceptances = [min(LARGEST, share) for share in self._priors]

    def end(self, num_tokens: int) -> None:
        """A request of so many tokens is over."""
        before = self.usual_length if math.isfinite(self.usual_length) else num_tokens
        self.usual_length = before + LENGTH_SHARE * (num_tokens - before)

    def acceptance(self, i: int) -> float:
        """Of drafted token ``i`` (from 0) once those before it are accepted."""
        return self.acceptances[min(i, MAX_AUTO_DRAFT_TOKENS - 1)]

    def add(self, accepted: Sequence[bool]) -> None:
        """What became of a draft's judged tokens: accepted ones, and the first that was not."""
        for i, success in enumerate(accepted):
            self.positions[i].add(success, SHARED_DISCOUNT)
            self._weights[i] *= SHARED_DISCOUNT
            if self.prior:
                self.acceptances[i] = self.positions[i].mean(self._priors[i], self._weights[i])
        if not self.prior:
            self._guess_late_ones()

    def _guess_late_ones(self) -> None:
        """Where no plan says better, a position begins with what the one before it has come to: few
        drafts are long, and those that might be would never be tried on a guess."""
        begun, found = DEFAULT_ACCEPTANCE, []
        # As ``Share.mean`` has them, in few steps: each draft of each row asks for all.
        for weight, own in zip(self._weights, self.positions, strict=True):
            acceptance = (weight * begun + own.hits) / (weight + own.trials)
            begun = min(LARGEST, acceptance)
            found.append(begun)
        self.acceptances = found

    def lookup(self, match_bin: int, stored: bool) -> Share:
        """Of looked-up tokens; a match in a store says less than one in the text itself."""
        key = (stored, match_bin)
        if key not in self.lookups:
            # It wears off: some texts never repeat themselves, and that has to be learnt.
            begun = Share.begun(lookup_prior(match_bin, stored), LOOKUP_WEIGHT)
            return self.lookups.setdefault(key, begun)
        return self.lookups[key]


def new_shares(count: int) -> list[Share]:
    """Of nothing yet."""
    return [Share() for _ in range(count)]
