"""How far simulated rows draft: not at all, a fixed number, or as ``Controller`` has it.

``Automatic`` is the controller's rule over arrays, for many batches at once. It chooses by tokens a
second, stops on a token's chance, weighs a further pass, keeps hysteresis, stakes and probes as
``Controller`` does, with the same constants; a test holds one against the other. It is simpler in
these points: what all requests have in common is known from the start, a request departs from that
by one ratio (not by position too) and stakes by its limit, whatever the lengths of others,
looked-up tokens are not chosen, no row is kept from drafting by a neighbour that would end late,
a row by itself does not look back at its plain rounds, and clocks correct nothing.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerskip.control.asks import HYSTERESIS, MOST_CREDIT, PAYING, PROBE_SHARE, STAKE_SHARE
from layerskip.control.estimates import LEAST_SURVIVAL, ROW_DISCOUNT, ROW_WEIGHT
from layerskip.control.experience import LARGEST
from layerskip.control.pace import BET
from layerskip.control.pass_times import MANY_ROWS
from layerskip.controller import STAKE_TOKENS
from layerskip.params import MAX_AUTO_DRAFT_TOKENS
from layerskip.pass_costs import PassCosts
from layerskip.workload import STEPS, Stream

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
DEPTH = MAX_AUTO_DRAFT_TOKENS
TINY = 1e-12  # seconds: nothing is divided by zero


@dataclass(frozen=True, eq=False)
class Batches:
    """Rows of many batches before a round; arrays are ``(batches, rows)``.

    Attributes:
        requests: of the stream.
        decoding: rows that take part.
        fresh: rows in their first round after the prefill.
        emitted: tokens so far.
        room: most tokens that may be drafted.
        context: slots that each batch's rows hold on the average, ``(batches,)``.
        right: drafted tokens that would be right.
    """

    requests: Ints
    decoding: Bools
    fresh: Bools
    emitted: Ints
    room: Ints
    context: Ints
    right: Ints


class Fixed:
    """The same number in every round, as far as there is room; 0: plain decoding."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens

    def lengths(self, batches: Batches) -> Ints:
        """Tokens that rows draft, ``(batches, rows)``; 0 where one does not decode."""
        wanted = np.minimum(self.num_draft_tokens, batches.room)
        return np.where(batches.decoding, wanted, 0)

    def observe(self, batches: Batches, drafted: Ints) -> None:
        """Nothing is learnt."""


@dataclass(frozen=True, eq=False)
class Prices:
    """What drafting costs in a round of each batch; seconds.

    Attributes:
        single: a plain pass of one row.
        token: a row's share of a plain pass.
        draft_share: of one more draft pass, a drafting row's share.
        start_share: of what the first ones take beyond that.
        steps: what verify grows by for a row's first, second, ... token, ``(batches, DEPTH)``.
    """

    single: Floats
    token: Floats
    draft_share: Floats
    start_share: Floats
    steps: Floats


class Automatic:
    """What pays, from round to round.

    Nobody is waited for who came late (``layerskip.control.ending``): where rows come and go, the
    tokens a second are about the same (bench/LOG.md, 2026-11-28).

    Args:
        costs: of passes, as the controller knows them: its table takes any number of rows at once.
        stream: the requests' chances, and acceptance over all of them.
        shape: batches and rows.
        seed: of chances behind a wrong token.
    """

    def __init__(self, costs: PassCosts, stream: Stream, shape: tuple[int, int], seed: int) -> None:
        self._costs, self._stream = costs, stream
        self._draw = np.random.default_rng([seed, 1])
        self._common = np.minimum(LARGEST, stream.acceptance[:DEPTH])
        self._expected_up_to = np.concatenate([[0.0], np.cumsum(self._common)])
        self._hits, self._expected = np.zeros(shape), np.zeros(shape)
        self._stake, self._drafted_last = np.zeros(shape), np.zeros(shape, dtype=np.bool_)
        self._ledger, self._credit = np.zeros(shape[0]), np.zeros(shape[0])
        self._advance, self._owed = (np.zeros(shape, dtype=np.int64) for _ in range(2))
        self._staked, self._earned = np.zeros(shape), np.zeros(shape)
        self._probing = np.zeros(shape[0], dtype=np.bool_)
        nothing = np.zeros(shape[0])
        self._prices = Prices(nothing, nothing, nothing, nothing, np.zeros((shape[0], DEPTH)))

    def lengths(self, batches: Batches) -> Ints:
        """Tokens that rows draft, ``(batches, rows)``; 0 where one does not decode."""
        self._begin(batches)
        rows = batches.decoding.sum(1)
        prices = self._priced(batches, np.zeros_like(rows), rows)
        acceptance = self._acceptance()
        stake = self._pooled_stake(batches, prices)
        longest = _affordable(stake, prices, rows)
        most = np.minimum(batches.room, longest[:, None])
        resting: Bools = np.logical_not((self._drafted_last & batches.decoding).any(1))
        gains = self._gains(batches, acceptance, most, prices)
        wanted, planned, rate = self._best(batches, gains, resting)
        left = np.where(longest == 0, stake, 0.0)
        self._probing = resting & ~wanted.any(1)
        self._claim(batches, prices)
        self._probing &= self._may_probe(batches, prices, left, acceptance)
        probing = self._probing[:, None]
        most = np.where(probing, np.minimum(batches.room, 1), most)
        wanted = np.where(probing, batches.room > 0, wanted)
        self._drafted_last = np.where(batches.decoding, wanted & ~probing, self._drafted_last)
        planned = np.where(self._probing, wanted.sum(1), planned)
        self._prices = self._priced(batches, planned, wanted.sum(1))
        return self._grown(batches, wanted, most, acceptance, rate)

    def observe(self, batches: Batches, drafted: Ints) -> None:
        """The round was run."""
        accepted, prices = np.minimum(drafted, batches.right), self._prices
        judged = np.minimum(accepted + (accepted < drafted), DEPTH)
        keep = ROW_DISCOUNT**judged
        self._hits = keep * self._hits + accepted
        self._expected = keep * self._expected + self._expected_up_to[judged]
        others = batches.decoding & ~self._probing[:, None]
        token, single = np.maximum(prices.token, TINY), np.maximum(prices.single, TINY)
        earning = others & (self._owed == 0)
        self._owed -= others & ~earning
        self._advance -= earning & (self._advance > 0)
        self._credit += PROBE_SHARE * (token / single) * earning.sum(1)
        up_to = np.concatenate([np.zeros((len(token), 1)), np.cumsum(prices.steps, 1)], axis=1)
        gained = accepted * token[:, None] - drafted * prices.draft_share[:, None]
        gained -= prices.start_share[:, None] + np.take_along_axis(up_to, drafted, 1)
        gained = np.where(drafted > 0, gained, 0.0)
        self._ledger += gained.sum(1) / token
        lost = np.maximum(0.0, -gained).sum(1) / single
        paid = np.where(self._probing, np.minimum(self._credit, lost), 0.0)
        self._credit -= paid
        unpaid = 1.0 - paid / np.maximum(lost, TINY)
        self._stake += np.where(gained < 0.0, unpaid[:, None], 1.0) * gained / token[:, None]

    def _begin(self, batches: Batches) -> None:
        """Forget what was known of a row's last request, and give the next one its stake. What the
        last one had in advance is taken back, as ``RowState.end`` has it."""
        unearned = batches.fresh & (self._stake <= self._staked)
        self._credit -= np.where(unearned, self._owed * self._earned, 0.0).sum(1)
        for state in (self._hits, self._expected, self._drafted_last):
            state[batches.fresh] = 0
        own = np.minimum(self._stream.limits[batches.requests], STAKE_TOKENS)
        tokens = np.where(self._ledger[:, None] > 0.0, STAKE_TOKENS, own)
        self._staked = np.where(batches.fresh, STAKE_SHARE * tokens, self._staked)
        self._stake = np.where(batches.fresh, self._staked, self._stake)
        self._advance = np.where(batches.fresh, own, self._advance)
        self._owed[batches.fresh] = 0

    def _claim(self, batches: Batches, prices: Prices) -> None:
        """Where nothing would be drafted, rows have what their rounds earn in advance."""
        claiming = self._probing[:, None] & (batches.room > 0)
        claimed = np.where(claiming, self._advance, 0)
        earned = PROBE_SHARE * prices.token / np.maximum(prices.single, TINY)
        self._credit += earned * claimed.sum(1)
        self._earned = np.where(claiming, earned[:, None], self._earned)
        self._owed, self._advance = self._owed + claimed, self._advance - claimed

    def _acceptance(self) -> Floats:
        """Of each row's first, second, ... drafted token, ``(batches, rows, DEPTH)``."""
        ratio = (self._hits + ROW_WEIGHT) / (self._expected + ROW_WEIGHT)
        return np.minimum(LARGEST, ratio[:, :, None] * self._common)

    def _verify(self, tokens: Ints, rows: Ints, context: Ints) -> Floats:
        """Of a pass, as ``PassTimes.verify`` has it: of many rows as if each had as many tokens."""
        step = np.where(rows >= MANY_ROWS, rows, 1)
        return self._costs.verify(-(-tokens // step) * step, rows, context)

    def _priced(self, batches: Batches, drafted: Ints, drafting: Ints) -> Prices:
        """Prices in a round of so many drafted tokens, 0 while nobody knows; in a batch one token
        is another's, and passes are padded, so each verifies at the mean of all (``Pace``)."""
        costs, rows, context = self._costs, batches.decoding.sum(1), batches.context
        count = np.where(drafted > 0, drafted, np.maximum(2 * costs.row_quantum, rows))
        verify = self._verify(rows + np.array([[0], [1]]) * count, rows, context)
        growth = np.maximum(0.0, verify[1] - verify[0]) / count
        return Prices(
            costs.plain(np.ones_like(rows), context),
            costs.plain(rows, context) / np.maximum(rows, 1),
            costs.draft(drafting, context) / np.maximum(drafting, 1),
            costs.draft_start / np.maximum(drafting, 1),
            np.where((rows == 1)[:, None], costs.alone(context), growth[:, None]),
        )

    def _pooled_stake(self, batches: Batches, prices: Prices) -> Floats:
        """Seconds of each row, on the average."""
        stakes = np.where(batches.decoding, self._stake, 0.0).sum(1)
        return np.asarray(prices.token * stakes / np.maximum(1, batches.decoding.sum(1)))

    def _may_probe(
        self, batches: Batches, prices: Prices, left: Floats, acceptance: Floats
    ) -> Bools:
        """Whether rounds earned one in which every row drafts one token; what is left of the stakes
        adds to it where such a draft would pay."""
        rows, context = batches.decoding.sum(1), batches.context
        probing = (batches.room > 0).sum(1)
        more = self._verify(rows + probing, rows, context)
        more -= self._costs.plain(rows, context)
        more += self._costs.draft_start
        cost = (self._costs.draft(probing, context) + more) / np.maximum(prices.single, TINY)
        self._credit = np.minimum(self._credit, np.maximum(MOST_CREDIT, cost))
        lent = left * probing / np.maximum(prices.single, TINY)
        enough = self._credit >= cost
        if lent.any():
            gains = self._gains(batches, acceptance, batches.room, prices)
            enough |= (self._credit + lent >= cost) & (gains[:, :, 0] > 0.0).any(1)
        return np.asarray((probing > 0) & enough)

    def _gains(self, batches: Batches, acceptance: Floats, most: Ints, prices: Prices) -> Floats:
        """Tokens that a drafted one is expected to add; 0 if it may not be drafted, or gains too
        little to be looked at."""
        survivals: Floats = np.cumprod(acceptance, axis=2, dtype=np.float64)
        cheapest = prices.draft_share + prices.steps.min(1)
        least = np.maximum(LEAST_SURVIVAL, PAYING * cheapest / np.maximum(prices.token, TINY))
        possible = (survivals >= least[:, None, None]) & batches.decoding[:, :, None]
        return np.where(possible & (np.arange(DEPTH) < most[:, :, None]), survivals, 0.0)

    def _best(self, batches: Batches, gains: Floats, resting: Bools) -> tuple[Bools, Ints, Floats]:
        """Rows that draft if the round is to give the most tokens a second, how many tokens they
        draft, and that rate.

        Tokens are taken in the order of their survival, or pass by pass. Rows have one ratio each,
        so that their order is the same at every depth: the i-th row of a pass costs what i rows
        take more than i - 1.
        """
        deepest = np.count_nonzero((gains > 0.0).any((0, 1)))
        gains = gains[:, :, : max(1, int(deepest))]
        count, rows, depth = gains.shape
        num_rows, context = batches.decoding.sum(1), batches.context
        ranked = np.argsort(-gains[:, :, 0], axis=1, kind="stable")
        gains = gains[np.arange(count)[:, None], ranked].reshape(count, -1)
        more = np.diff(self._costs.draft(np.arange(rows + 1)[None], context[:, None]), axis=1)
        passes = np.arange(rows * depth).reshape(rows, depth).T.reshape(1, -1)
        orders = [np.argsort(-gains, axis=1, kind="stable"), np.repeat(passes, count, 0)]
        found = [
            self._prefix(batches, _along(gains, order), _along(more, order // depth))
            for order in orders
        ]
        second = found[1][1] > found[0][1]
        order = np.where(second[:, None], orders[1], orders[0])
        taken, rate = (np.where(second, b, a) for a, b in zip(*found, strict=True))
        alone = num_rows / np.maximum(self._costs.plain(num_rows, context), TINY)
        bias = np.where(resting, 1.0 + HYSTERESIS, 1.0 - HYSTERESIS)
        taken = np.where(rate > bias * alone, taken, 0)
        chosen = (np.arange(rows * depth) < taken[:, None]) & (_along(gains, order) > 0.0)
        batch, place = np.nonzero(chosen)
        wanted = np.zeros((count, rows), dtype=np.bool_)
        wanted[batch, ranked[batch, order[batch, place] // depth]] = True
        return wanted, chosen.sum(1), np.where(taken > 0, rate, alone)

    def _prefix(self, batches: Batches, gains: Floats, more: Floats) -> tuple[Ints, Floats]:
        """How many of the tokens, in this order, give the most tokens a second, and that rate.

        Args:
            gains: of each token; 0 for those that can't be drafted.
            more: seconds of drafting that each adds.
        """
        num_rows, real = batches.decoding.sum(1)[:, None], gains > 0.0
        drafting = self._costs.draft_start + np.cumsum(more * real, 1)
        verified = num_rows + np.cumsum(real, 1)
        verify = self._verify(verified, num_rows, batches.context[:, None])
        rates = (num_rows + np.cumsum(gains, 1)) / np.maximum(drafting + verify, TINY)
        rates[~real] = 0.0
        best = rates.argmax(1)
        return best + 1, rates.max(1)

    def _grown(
        self, batches: Batches, going: Bools, most: Ints, acceptance: Floats, rate: Floats
    ) -> Ints:
        """Each draft grows until its chances, or all rows' together, are not worth more."""
        drafted = np.zeros_like(batches.room)
        reached = np.ones(drafted.shape)
        single = batches.decoding.sum(1) == 1
        for depth in range(DEPTH):
            drafted += going
            going = going & (drafted < most)
            if depth + 1 == DEPTH or not going.any():
                break
            reached *= self._chances(batches, depth, acceptance)
            gain = reached * acceptance[:, :, depth + 1]
            after = np.zeros(gain.shape)
            if depth + 2 < DEPTH:
                after = gain * acceptance[:, :, depth + 2] * (drafted + 1 < most)
            beside = self._another(batches, going, drafted, gain, after, rate)
            if single.any():
                chances = reached[single, :, None] * acceptance[single, :, depth + 1 :].cumprod(2)
                chances[np.arange(depth + 1, DEPTH) >= most[single, :, None]] = 0.0
                beside[single] = going[single] & self._alone(batches, single, chances, rate[single])
            going = beside
        return drafted

    def _alone(self, batches: Batches, single: Bools, chances: Floats, rate: Floats) -> Bools:
        """Whether a row by itself drafts another token: whether that one or several together gain
        more than their passes take, as ``Stopper._gains`` has it.

        Args:
            single: batches of one row; what follows is of these.
            chances: that the next token, the next two, ... are accepted; 0 of none.
        """
        one = np.ones(len(rate), dtype=np.int64)
        price = (rate * self._costs.draft(one, batches.context[single]))[:, None, None]
        steps = self._prices.steps[single, None, -chances.shape[2] :]
        gains = np.cumsum(chances - price - rate[:, None, None] * steps, axis=2)
        looked_at = np.ones(gains.shape, dtype=np.bool_)  # none behind one below its draft's price
        looked_at[:, :, 1:] = chances[:, :, :-1] > price
        return np.asarray((looked_at & (gains > 0.0)).any(2))

    def _another(
        self,
        batches: Batches,
        going: Bools,
        drafted: Ints,
        gain: Floats,
        after: Floats,
        rate: Floats,
    ) -> Bools:
        """Which rows that share a round draft another token, as ``stopping.another`` has it.

        Args:
            gain, after: the chance that a row's next token is accepted, and the one after it.
        """
        num_rows, context = batches.decoding.sum(1)[:, None], batches.context[:, None]
        count, rows = going.sum(1)[:, None], going.shape[1]
        verified = num_rows + drafted.sum(1)[:, None]
        up_to = np.arange(1, rows + 1)[None]
        both = np.minimum(verified + count + up_to, num_rows * (DEPTH + 1))
        tokens = np.concatenate([verified, verified + np.minimum(up_to, count), both], axis=1)
        verify = self._verify(tokens, num_rows, context)
        draft = self._costs.draft(up_to, context)
        ranked = np.argsort(-np.where(going, gain, -1.0), axis=1, kind="stable")

        def profits(gains: Floats, seconds: Floats) -> Floats:
            worth = gains - rate[:, None] * (seconds - verify[:, :1])
            return np.where(up_to <= count, worth, 0.0)

        gains = np.cumsum(_along(np.where(going, gain, 0.0), ranked), 1)
        first = profits(gains, draft + verify[:, 1 : rows + 1])
        before = self._costs.draft(count, context)
        later = gains[:, -1:] + np.cumsum(-np.sort(-np.where(going, after, 0.0), axis=1), 1)
        second = profits(later, before + draft + verify[:, rows + 1 :]).max(1)
        best = first.max(1)
        taken = np.where(best > 0.0, first.argmax(1) + 1, 0)
        taken = np.where(second > np.maximum(best, 0.0), rows, taken)
        kept = np.zeros_like(going)
        np.put_along_axis(kept, ranked, np.arange(rows) < taken[:, None], 1)
        return kept & going

    def _chances(self, batches: Batches, depth: int, acceptance: Floats) -> Floats:
        """Of the token at this depth, as its confidence tells, else as is known of its row."""
        stream = self._stream
        if not len(stream.chances):
            return acceptance[:, :, depth]
        last = stream.tokens[batches.requests] - 1
        place = stream.offsets[batches.requests] + np.minimum(batches.emitted + depth, last)
        behind = self._draw.choice(stream.chances_after_wrong, batches.room.shape)
        told = np.where(depth > batches.right, behind, stream.chances[place])
        return np.minimum(LARGEST, told / STEPS)


def _along(values: NDArray[Any], places: Ints) -> NDArray[Any]:
    """``np.take_along_axis`` over rows of places in them, in a third of its time."""
    return values.ravel().take(places + values.shape[1] * np.arange(len(values))[:, None])


def _affordable(stake: Floats, prices: Prices, rows: Ints) -> Ints:
    """Tokens of a row's draft, as ``pace.affordable`` has it."""
    spent = np.cumsum(prices.draft_share[:, None] + prices.steps, axis=1)
    spent += prices.start_share[:, None]
    spent[rows == 1, 1:] /= BET
    return (spent <= stake[:, None]).sum(1)
