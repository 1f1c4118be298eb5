"""What requests are like, and which of those a new one may be.

Drafts are hardly ever right in some requests and nearly always in others; and of many that are
alike, some are unlucky. What tells the two apart is how many requests of each sort there are. So
requests are taken for a mixture of a few sorts, whose shares are estimated on line by expectation
maximisation (Dempster, Laird and Rubin 1977), and what a request is, follows by Bayes' rule.
"""

from collections import deque
from collections.abc import Sequence
from operator import mul

# A sort of request has odds of a right draft that are so many times those of all requests.
ODDS_RATIOS = (0.001, 0.03, 0.25, 1.0, 4.0)
NUM_HOPELESS, NUM_SLOW = 2, 3  # the first of them, whose drafts are hardly ever right, or seldom
# What is known of their shares before any is seen: as if so many had been, a request and a half.
FIRST_SHARES = (0.01, 0.02, 0.2, 0.95, 0.3)
RECENT, EACH = 24, 16  # requests that are remembered; judged drafts, after which shares are renewed
TELLING = 2  # of a draft's tokens: whether it begins well or badly is what sorts differ in
CHANGES = 0.01  # of the drafts, before which a text may have become like any other
DOUBTED, SHOWN = 0.15, 0.8  # chances of being hopeless, of being slow
NUM_STEPS = 100  # of acceptance, between which likelihoods are the same


def _likelihoods(acceptance: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    odds = [ratio * acceptance / (1.0 - acceptance) for ratio in ODDS_RATIOS]
    return tuple(1.0 / (1.0 + o) for o in odds), tuple(o / (1.0 + o) for o in odds)


# Of a token being wrong, and right, in requests of each sort, by the share that is right in all.
LIKELIHOODS = [_likelihoods((i + 0.5) / NUM_STEPS) for i in range(NUM_STEPS)]


class Mixture:
    """Of the latest requests of one kind.

    Attributes:
        shares: of each sort; together 1.
    """

    def __init__(self) -> None:
        self._recent: deque[list[float]] = deque(maxlen=RECENT)
        self._num_drafts = 0
        self.shares = _normalised(FIRST_SHARES)

    def began(self, evidence: list[float]) -> None:
        """A request's first draft was judged; what becomes of the others is seen in ``evidence``,
        likelihoods by sort."""
        self._recent.append(evidence)

    def judged(self) -> None:
        """One more draft of any request was: now and then the shares are estimated anew."""
        self._num_drafts += 1
        if self._num_drafts % EACH == 0:
            found = [_posterior(self.shares, evidence) for evidence in list(self._recent)]
            self.shares = _normalised(list(map(sum, zip(FIRST_SHARES, *found, strict=True))))


class Sort:
    """Which of them one request is.

    Attributes:
        is_doubted: whether its drafts may hardly ever be right.
    """

    def __init__(self, mixture: Mixture) -> None:
        self._mixture, self._evidence, self._has_begun = mixture, [1.0] * len(ODDS_RATIOS), False
        self.is_doubted = sum(mixture.shares[:NUM_HOPELESS]) > DOUBTED

    @property
    def posterior(self) -> list[float]:
        """How likely it is of each sort."""
        return _posterior(self._mixture.shares, self._evidence)

    def add(self, accepted: Sequence[bool], acceptances: Sequence[float]) -> None:
        """A draft's judged tokens: accepted ones, and the first that was not.

        Args:
            acceptances: of all requests, by position.
        """
        if not accepted:
            return
        likely: Sequence[float] = self._evidence
        for success, acceptance in zip(accepted[:TELLING], acceptances, strict=False):
            likely = list(map(mul, likely, LIKELIHOODS[int(NUM_STEPS * acceptance)][success]))
        same, changed = (1.0 - CHANGES) / sum(likely), CHANGES / len(likely)
        self._evidence[:] = [same * each + changed for each in likely]
        if not self._has_begun:
            self._mixture.began(self._evidence)
            self._has_begun = True
        self._mixture.judged()
        likely = list(map(mul, self._mixture.shares, self._evidence))
        self.is_doubted = sum(likely[:NUM_HOPELESS]) > DOUBTED * sum(likely)

    def hopes(self, acceptances: Sequence[float]) -> list[float]:
        """The chance that the first, the first two, ... drafted tokens are accepted, as far as can
        be hoped: where it is not shown to be slow, it isn't.

        Args:
            acceptances: of all requests, by position.
        """
        found, shares = [], self.posterior
        if sum(shares[:NUM_SLOW]) < SHOWN:
            shares = _normalised([*[0.0] * NUM_SLOW, *shares[NUM_SLOW:]])
        for acceptance in acceptances:
            right = LIKELIHOODS[int(NUM_STEPS * acceptance)][True]
            shares = list(map(mul, shares, right))
            found.append(sum(shares))
        return found


def _posterior(shares: Sequence[float], evidence: Sequence[float]) -> list[float]:
    return _normalised(list(map(mul, shares, evidence)))


def _normalised(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]
