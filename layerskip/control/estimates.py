"""What is known of one request's acceptance.

Requests differ, and each is too short to learn much from: so a request begins with what all of
its kind had in common, and departs from that by a ratio of its own.
"""

import math
from collections.abc import Sequence

from layerskip.control.experience import (
    LARGEST,
    LOOKUP_PRIORS,
    SHARED_DISCOUNT,
    Experience,
    bin_of_match,
    new_shares,
)
from layerskip.control.mixture import Sort
from layerskip.params import MAX_AUTO_DRAFT_TOKENS

ROW_DISCOUNT = 0.97
CONFIDENCE_DISCOUNT = 0.99  # a text's ratio to its confidences is steadier than its drafts' luck
ROW_WEIGHT, CONFIDENCE_WEIGHT = 3.0, 20.0  # of "like the others", in expected successes
LOOKUP_RATIO_WEIGHT = 8.0  # the same of looked-up tokens
POSITION_WEIGHT = 20.0  # of what is known of all, in trials
LEAST_SURVIVAL = 0.02
# Tokens without drafts until a row looks back at them: the first time since it drafted, then twice
# as many each time, and at most; and the tokens that it looks back at. They come in a row, where
# drafts are some rounds apart, and of a text that changes the latest tell most. Of few tokens many
# are right by chance, so they have to gain more than their price (bench/LOG.md, 2026-11-29).
FIRST_LOOK, LAST_LOOK, MOST_SEEN = 2, 32, 8
LOOK_DISCOUNT, LOOK_MARGIN = 0.95, 1.25
# Of what a request may stake, what hindsight may add: a text that is right only where nothing is
# drafted for it loses that, too.
TRUST_SHARE = 1 / 3


class RowState:
    """One request's estimates.

    Attributes:
        stake: what drafts may lose, in tokens of plain rounds: what the request began with, what
            they gained, and what hindsight granted.
        owed: rounds to come, if there will be as many, that earn nothing for probes: what they do
            the request had in advance.
        greedy: whether it takes the likeliest token, which costs less than to draw one.
        num_rests: since it last drafted or took what was looked up.
        next_look: tokens without drafts that are still to come before it looks back.
        look_ratio: what looking back took, over what the cost table says; 1 at least. Where the
            distribution is cut, the whole vocabulary is sorted for each token that is looked at.
        sort: of request that it is, for its neighbours, who mind only what is shown.
    """

    def __init__(
        self,
        shared: Experience,
        *,
        stake: float = 0.0,
        advance: int = 0,
        limit: float = math.inf,
        greedy: bool = False,
    ) -> None:
        self.shared, self.stake, self.greedy = shared, stake, greedy
        self._limit = limit
        self._advance, self.owed, self._earned = advance, 0, 0.0
        self._staked, self._is_over = stake, False
        self.last, self.probing = 0, False
        self.next_look, self._waits, self._purse = FIRST_LOOK, FIRST_LOOK, 0.0
        self.look_ratio, self._gains = 1.0, False
        self._missed, self._trust, self._granted = 0.0, TRUST_SHARE * stake, 0.0
        self._since = 0.0  # the last grant: what drafts gained less what they lost
        self._rests, self._awaited, self._token = 0, 0.0, 0.0
        self._beside, self._declined, self._awake_one_in, self.num_rests = 0, 0.0, 1, 0
        self._positions, self.sort = new_shares(MAX_AUTO_DRAFT_TOKENS), Sort(shared.mixture)
        self._own, self._own_confidences, self._own_lookups = new_shares(3)

    def acceptance(self, i: int) -> float:
        """Of drafted token ``i`` (from 0) once those before it are accepted."""
        prior = min(LARGEST, self.shared.acceptance(i) * self._own.ratio(ROW_WEIGHT))
        own = self._positions[min(i, MAX_AUTO_DRAFT_TOKENS - 1)]
        return own.mean(prior, POSITION_WEIGHT)

    def survivals(self, most: int, least: float = 0.0) -> list[float]:
        """The chance that the first, the first two, ... of ``most`` drafted tokens are accepted;
        less than ``least``, and what hardly ever is, is left out."""
        found, survival, ratio = [], 1.0, self._own.ratio(ROW_WEIGHT)
        least = max(least, LEAST_SURVIVAL)
        # As ``acceptance`` has them, in few steps: each round of a row asks for all.
        for own, common in zip(self._positions[:most], self.shared.acceptances, strict=False):
            likely = POSITION_WEIGHT * min(LARGEST, common * ratio) + own.hits
            survival *= min(LARGEST, likely / (POSITION_WEIGHT + own.trials))
            if survival < least:
                break
            found.append(survival)
        return found

    def chance(self, confidence: float) -> float:
        """The same of a token drafted with ``confidence``."""
        chance = self.shared.calibration.chance(confidence)
        return min(LARGEST, chance * self._own_confidences.ratio(CONFIDENCE_WEIGHT))

    def lookup_survivals(self, match_length: int, stored: bool, most: int) -> list[float]:
        """As ``survivals``, of looked-up tokens."""
        ratio, known = self._own_lookups.ratio(LOOKUP_RATIO_WEIGHT), -1
        found, survival, acceptance = [], 1.0, 0.0
        for i in range(most):
            match_bin = bin_of_match(match_length, i)
            if match_bin != known:  # few of them are asked for, and each round asks
                known = match_bin
                shared = self.shared.lookup(match_bin, stored).value
                acceptance = min(LARGEST, shared * ratio)
            survival *= acceptance
            if survival < LEAST_SURVIVAL:
                break
            found.append(survival)
        return found

    def settle(
        self, gained: float, passes: float, *, looked_up: bool = False, spent: float = 0.0
    ) -> None:
        """What a draft gained, or lost if negative: that of a probe is paid by the credit that all
        requests share, and what it lacks by the stake; that of looked-up tokens the other way
        round; any other by the stake alone. Gains count in full.

        Args:
            gained: in the row's shares of plain rounds: tokens.
            passes: the same in plain passes of one row, where credit may pay.
            looked_up: whether the tokens were, and no others drafted.
            spent: plain passes of a probe beside a row that is waited for: credit pays for them
                all, whatever they gained for this one.
        """
        self.shared.ledger += gained
        self._since += 0.0 if looked_up else gained
        if spent:
            self.shared.credit -= spent
            self.stake += max(0.0, gained)
            return
        if passes < 0.0 and (self.probing or looked_up):
            lost = max(0.0, -gained - max(0.0, self.stake)) if looked_up else -gained
            each = passes / gained  # plain passes of a token
            paid = min(max(0.0, self.shared.credit), lost * each)
            self.shared.credit -= paid
            gained += paid / each
        self.stake += gained

    def claim(self, earned: float) -> None:
        """Have what the first rounds will earn for probes, once: of a text that began badly the
        next drafts should be tried while most of it is still to come.

        Args:
            earned: by one of them, in plain passes of one row.
        """
        if not self._advance:  # what it had before is given back as it was had
            return
        self.shared.credit += self._in_advance(earned)

    def _in_advance(self, earned: float) -> float:
        had = self._advance * earned
        self.owed, self._advance, self._earned = self.owed + self._advance, 0, earned
        return had

    def reserve(self, earned: float) -> None:
        """As ``claim``, for looking back: look-ups take none of it, and probes what is released."""
        if self._advance:
            self._purse += self._in_advance(earned)

    def release(self, amount: float) -> bool:
        """So much of what is reserved, if it is as much, for a probe after all."""
        if self._purse < amount:
            return False
        self._purse -= amount
        self.shared.credit += amount
        return True

    def release_all(self) -> None:
        """What is reserved for probes: it does not look back any more."""
        self.release(self._purse)

    def lacks(self, price: float) -> float:
        """Of so many plain passes of one row, what it has not got to look back: it has what it
        reserved, and the credit that all share."""
        return max(0.0, price - self._purse - max(0.0, self.shared.credit))

    def end(self, num_tokens: int) -> None:
        """The request is over, with so many tokens: what it had in advance for rounds that never
        came is taken back, if its drafts gained nothing, and those after it stake by its length.

        Or a stream of requests that end long before their limits would lose that time and again.
        One without a token, taken out while it waited, says nothing of lengths.
        """
        self.shared.credit += self._purse
        if self._kept <= self._staked:
            self.shared.credit -= self.owed * self._earned
        self.owed, self._purse = 0, 0.0
        # What its limit ended, as a warm-up of one token, might have been any longer.
        says_nothing = self._limit <= num_tokens <= self.shared.usual_length
        if num_tokens and not self._is_over and not says_nothing:
            self.shared.end(num_tokens)
        self._is_over = True

    def repays(self) -> bool:
        """Whether a round that is over earns nothing, since the request has had that."""
        if not self.owed:
            return False
        self.owed -= 1
        return True

    def earn(self, earned: float) -> None:
        """What a round that is over earns for probes, if it ``repays`` nothing."""
        self._advance = max(0, self._advance - 1)
        self.shared.credit += earned

    def rest_for(
        self,
        rounds: int,
        awaited: float,
        token: float,
        *,
        beside: int,
        declined: float = 0.0,
        awake_one_in: int = 1,
    ) -> None:
        """Draft nothing in so many rounds.

        Args:
            awaited: the credit that ends it before.
            token: seconds of each round.
            beside: rows of each; with more or fewer of them it is over.
            declined: confidence of what was looked up and not taken; what has more ends it, too.
            awake_one_in: so many of these rounds is looked up at all.
        """
        self._rests, self._awaited, self._token, self._beside = rounds, awaited, token, beside
        self._declined, self._awake_one_in = max(self._declined, declined), awake_one_in
        self.num_rests += 1

    def wakes(self, *, drafts: bool) -> None:
        """It drafts, or takes what is looked up, which ends no rest for longer than a round."""
        self._declined, self.num_rests = 0.0, 0
        if drafts:
            self._rests = 0
            self.next_look = self._waits = FIRST_LOOK

    @property
    def has_lost(self) -> bool:
        """Whether drafts and look-ups of it took more than they gained."""
        return self._kept < self._staked

    @property
    def is_hopeful(self) -> bool:
        """Whether it has lost nothing, or what it looked back at says that its drafts gain."""
        return self._gains or not self.has_lost

    @property
    def _kept(self) -> float:
        """What it began with and gained: its stake without what hindsight granted."""
        return self.stake - self._granted

    @property
    def may_rest(self) -> bool:
        """Whether the next round can be one of those at all; most rows' cannot."""
        return self._rests > 0

    def rests(self, beside: int, confidence: float = 0.0, credit: float | None = None) -> bool:
        """Whether the next round, of so many rows, is one of those, with looked-up tokens of such a
        confidence; by the credit that all rows have, if not its own kind's."""
        own = self.shared.credit if credit is None else credit
        idle = self._rests > 0 and own < self._awaited
        return idle and beside == self._beside and confidence <= self._declined

    def sleeps(self, beside: int) -> bool:
        """Whether it is one of those in which nothing is looked up either: nothing that could be
        found would end the rest, or its turn has not come."""
        deaf = self._declined >= LOOKUP_PRIORS[-2] or self._rests % self._awake_one_in != 0
        return deaf and self.rests(beside)

    def rest(self) -> float:
        """One of them: the seconds that it is expected to take."""
        self._rests -= 1
        return self._token

    def add_draft(
        self,
        accepted: Sequence[bool],
        confidences: Sequence[float],
        chances: Sequence[float] = (),
    ) -> None:
        """Judged tokens of an early exit's draft: accepted ones, and the first that was not.

        Args:
            chances: that the tokens were given when they were drafted; empty: nobody asked, and
                they are what they would be given now.
        """
        shared, calibration = self.shared, self.shared.calibration
        self.sort.add(accepted, shared.acceptances)
        self._add_judged(accepted)
        shared.add(accepted[:MAX_AUTO_DRAFT_TOKENS])
        told = chances or [self.chance(c) for c, _ in zip(confidences, accepted, strict=False)]
        for success, confidence, chance in zip(accepted, confidences, told, strict=False):
            self._own_confidences.add(success, CONFIDENCE_DISCOUNT, calibration.chance(confidence))
            calibration.add(confidence, chance, success)

    def _add_judged(self, accepted: Sequence[bool]) -> None:
        """To what is known of this request alone."""
        for i, success in enumerate(accepted[:MAX_AUTO_DRAFT_TOKENS]):
            self._own.add(success, ROW_DISCOUNT, self.shared.acceptances[i])
            self._positions[i].add(success, ROW_DISCOUNT)

    def look_back(
        self,
        runs: Sequence[tuple[Sequence[bool], Sequence[float]]],
        spent: float,
        price: float,
    ) -> None:
        """Drafts that were not made, and would have come to this (``layerskip.hindsight``). What
        they would have gained may be staked, as far as hindsight is trusted (``TRUST_SHARE``) and
        up to what the request began with: a drafter that is never right gains nothing in hindsight,
        either. Should its drafts come to less than that says, no more than that is lost until they
        have gained something.

        Args:
            runs: of each draft its judged tokens and their confidences, as of ``add_draft``.
            spent: on looking, in plain passes.
            price: of a drafted token, in tokens of plain rounds.
        """
        own = min(self._purse, spent)
        self._purse -= own
        self.shared.credit -= spent - own
        for accepted, confidences in runs:
            forgotten = LOOK_DISCOUNT ** len(accepted)
            self._own.fade(forgotten)
            self._positions[0].fade(forgotten)
            self._add_judged(accepted)
            for success, confidence in zip(accepted, confidences, strict=True):
                chance = self.shared.calibration.chance(confidence)
                self._own_confidences.add(success, CONFIDENCE_DISCOUNT, chance)
            missed = self._missed + sum(accepted) - LOOK_MARGIN * price * len(accepted)
            self._missed = min(self._staked, max(-self._staked, missed))
        self._gains = self._missed > 0.0
        # What was gained and lost again is not granted as well.
        trust = min(self._trust + max(0.0, self._since), TRUST_SHARE * self._staked)
        granted = min(self._missed, trust, self._staked - self.stake)
        if granted > 0.0:
            self.stake += granted
            self._missed -= granted
            self._trust, self._since = trust - granted, 0.0
            self._granted += granted
        self._waits = min(2 * self._waits, LAST_LOOK)
        self.next_look, self._rests = self._waits, 0

    def add_lookup(self, match_length: int, hits: Sequence[bool], *, stored: bool) -> None:
        """Looked-up tokens beside the text: right ones, and the first that was not."""
        for i, success in enumerate(hits):
            match_bin = bin_of_match(match_length, i)
            share = self.shared.lookup(match_bin, stored)
            self._own_lookups.add(success, ROW_DISCOUNT, share.value)
            share.add(success, SHARED_DISCOUNT)
