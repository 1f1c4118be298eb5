"""How far a growing draft goes: what its confidence says, and what a round's rows share."""

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from layerskip.control.estimates import RowState
from layerskip.control.pace import Pace
from layerskip.outputs import Drafter, StopReason


@dataclass(frozen=True)
class Choice:
    """What a row's round does.

    Attributes:
        source: of the drafted tokens.
        num_draft_tokens: most that are drafted.
        rate: tokens a second that the whole round expects.
        verify_seconds: of one more row in the verify pass, by drafted tokens.
        draft_seconds: the row's share of a draft pass.
        start_seconds: of what the first draft passes take beyond that, together.
        plain_seconds: of a round without drafts, the row's share.
        charged_seconds: as ``verify_seconds``, of what is counted as lost; empty: the same.
        dearer: the same of draft passes, as a factor.
        may_lose: seconds that the round may take in vain.
        held: whether the batch does not draft because one of its rows is waited for. What a probe
            gains for the others then makes it end no sooner.
    """

    source: Drafter
    num_draft_tokens: int
    rate: float = 0.0
    verify_seconds: tuple[float, ...] = ()
    draft_seconds: float = 0.0
    start_seconds: float = 0.0
    plain_seconds: float = 0.0
    charged_seconds: tuple[float, ...] = ()
    dearer: float = 1.0
    may_lose: float = math.inf
    held: bool = False

    def gained(self, num_saved: int, num_drafted: int, num_passes: float) -> float:
        """Seconds that a draft saved, or lost if negative, at the prices of what is lost.

        Args:
            num_saved: plain rounds that it made needless.
            num_passes: that drafted; one with guesses is more than one.
        """
        verify = sum((self.charged_seconds or self.verify_seconds)[:num_drafted])
        drafting = self.dearer * (self.start_seconds + num_passes * self.draft_seconds)
        return num_saved * self.plain_seconds - drafting - verify

    def at_most(self, num_draft_tokens: int) -> "Choice":
        """The same with no more drafted tokens than that."""
        if self.num_draft_tokens <= num_draft_tokens:
            return self
        return replace(self, num_draft_tokens=num_draft_tokens)


PLAIN = Choice("none", 0)
# What is looked up behind a draft is right less often than its chances say (bench/LOG.md,
# 2026-11-26); so much of them counts.
RELIED_ON = 0.8


class Stopper:
    """Whether a growing draft goes on; one for each row and round.

    Args:
        alone: whether no other row decodes beside it.
        behind: asked for what is looked up behind the tokens so far, at most so many: the chance
            that the first, the first two, ... of it are accepted once those are. None: nothing is.
        drawing: seconds that judging a looked-up token takes beside a drafted one.

    Attributes:
        greedy: whether the row takes the likeliest token.
        rate: tokens a second that the round expects.
        chances: of acceptance, of each token so far.
        survival: the chance that one more token is accepted.
        gain: tokens that one more is expected to add, less what verifying it costs.
        stopped: what ended the draft before it had all its tokens; "" if nothing did.
    """

    def __init__(
        self,
        state: RowState,
        choice: Choice,
        *,
        alone: bool = True,
        behind: Callable[[Sequence[int], int], Sequence[float]] | None = None,
        drawing: float = 0.0,
    ) -> None:
        self._state, self._choice, self.alone = state, choice, alone
        self.greedy, self.rate = state.greedy, choice.rate
        self._behind, self._drawing = behind, drawing
        self._reached = 1.0
        self.chances: list[float] = []
        self.survival, self.gain = 1.0, 0.0
        self.stopped: StopReason = ""

    def goes_on(self, confidence: float, ahead: bool = False, draft: Sequence[int] = ()) -> bool:
        """After a token that was drafted with ``confidence``, and stays: is another worth its
        passes? What several rows share of them, ``Controller.going_on`` weighs.

        Args:
            ahead: whether the pass that drafted it has run for the next one, too, which had been
                looked up: all that it still costs is to be verified.
            draft: the tokens so far.
        """
        choice, chances = self._choice, self.chances
        chance = self._state.chance(confidence)
        chances.append(chance)
        self._reached *= chance
        done = len(chances)
        if done >= choice.num_draft_tokens:
            return False  # there is no other
        more = choice.verify_seconds[done] if done < len(choice.verify_seconds) else 0.0
        self.survival = self._reached * self._state.acceptance(done)
        self.gain = self.survival - self.rate * more
        if self.alone and not self._pays(done, ahead, draft):
            self.stop(alone=False)
        return not self.stopped

    def _pays(self, done: int, ahead: bool, draft: Sequence[int]) -> bool:
        """Whether another token is worth its passes, beside what is looked up in its place."""
        if ahead:
            return self._gains(done, self.gain)
        gain = self.gain - self.rate * self._choice.draft_seconds
        if not self._gains(done, gain):
            return False
        if self._behind is None:
            return True
        instead = self._gain_behind(self._looked_up(draft, 1))[0]
        return instead <= 0.0 or self._gains(done, gain - instead)

    def _gains(self, done: int, gain: float) -> bool:
        """Whether the next token, which gains so much, or several together gain more than their
        passes take: the next one may cost the verify pass a whole tile, and those after it nothing
        there."""
        choice, survival = self._choice, self.survival
        price = self.rate * choice.draft_seconds
        for i in range(done + 1, choice.num_draft_tokens):
            if gain > 0.0 or survival <= price:
                break
            more = choice.verify_seconds[i] if i < len(choice.verify_seconds) else 0.0
            survival *= self._state.acceptance(i)
            gain += survival - price - self.rate * more
        return gain > 0.0

    def num_behind(self, draft: Sequence[int]) -> int:
        """How many looked-up tokens go to the verify pass behind a draft that has ended, of a row
        by itself. No pass drafts them, and where the verify pass is padded the first are next to
        free."""
        most = len(self._choice.verify_seconds) - len(self.chances)
        # Were all of them right: mostly none would pay, and the rest need not be asked.
        if not self._gain_behind([1.0] * most)[1] or not (most := min(most, self._bearable())):
            return 0
        return self._gain_behind(self._looked_up(draft, most))[1]

    def _bearable(self) -> int:
        """How many looked-up tokens behind the draft may be wrong with all of it."""
        choice, done = self._choice, len(self.chances)
        charged = (choice.charged_seconds or choice.verify_seconds)[done:]
        lost = itertools.accumulate(
            (seconds + self._drawing for seconds in charged),
            initial=-choice.gained(0, done, done),
        )
        return bisect_right(list(lost)[1:], choice.may_lose)

    def _looked_up(self, draft: Sequence[int], most: int) -> Sequence[float]:
        return self._behind(draft, most) if self._behind is not None else ()

    def _gain_behind(self, acceptances: Sequence[float]) -> tuple[float, int]:
        """Tokens that looked-up ones behind the draft are expected to add, less what verifying them
        costs; and how many of them there are best."""
        gain, best, count = 0.0, 0.0, 0
        steps = self._choice.verify_seconds[len(self.chances) :]
        for n, (acceptance, more) in enumerate(zip(acceptances, steps, strict=False), 1):
            gain += RELIED_ON * self._reached * acceptance
            gain -= self.rate * (more + self._drawing)
            if gain > best:
                best, count = gain, n
        return best, count

    @property
    def survival_after(self) -> float:
        """The chance that the token after the next one is accepted; 0 if there may be none."""
        done = len(self.chances) + 1
        if done >= self._choice.num_draft_tokens:
            return 0.0
        return self.survival * self._state.acceptance(done)

    def stop(self, *, alone: bool) -> None:
        """Draft no further.

        Args:
            alone: of the rows that might, some draft another token.
        """
        self.stopped = "confidence" if alone or self.gain <= 0.0 else "cost"


def another(pace: Pace, stoppers: Sequence[Stopper], verified: int, others: int) -> list[bool]:
    """Which rows draft another token, for the most tokens beyond what the time would give else.

    A verify pass is padded: the next token may be free, and the one after it cost as much as a
    whole tile. So where not all gain in one more pass it is weighed what they gain in two.

    Args:
        verified: tokens of the verify pass so far.
        others: rows that draft another token in any case; what it takes to verify is in
            ``verified``.
    """
    count, rate = len(stoppers), stoppers[0].rate
    ranked = sorted(range(count), key=lambda i: -stoppers[i].survival)
    draft, verify = pace.drafts, pace.verify
    spent = draft[others] + verify(verified)
    gain, best, taken = 0.0, 0.0, 0
    for n, i in enumerate(ranked, 1):
        gain += stoppers[i].survival
        profit = gain - rate * (draft[others + n] + verify(verified + n) - spent)
        if profit > best:
            best, taken = profit, n
    if taken < count:
        before = draft[others + count] - spent
        later = sorted((s.survival_after for s in stoppers), reverse=True)
        for n, survival in enumerate(later, 1):
            gain += survival
            pass_after = draft[others + n] - draft[others]
            if gain - rate * (before + pass_after + verify(verified + count + n)) > best:
                return [True] * count
    kept = set(ranked[:taken])
    return [i in kept for i in range(count)]
