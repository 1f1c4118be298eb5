"""How far to draft: estimates of acceptance, and what the cost table makes of them.

A round with k drafted tokens emits ``E(k) = 1 + sum_{i<=k} prod_{j<=i} a_j`` tokens in
``T_round(k)`` seconds; the controller takes the k with the most tokens a second, 0 among them.
Rows of a batch share rounds, and take what gives all together the most, unless one would end late
(``layerskip.control.ending``).
While a draft grows, each token's own confidence, calibrated by what verification made of such
confidences before, says whether the next one is worth its pass. Greedy and coupled output never
depends on any of this; for token-level and block verification a drafted token always stays in the
draft, so that its length depends only on what was drawn before.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from layerskip.control.asks import (
    HYSTERESIS,
    PAYING,
    PROBE_SHARE,
    STAKE_SHARE,
    Ask,
    loss_allowed,
    may_probe,
    offered,
    put_to_rest,
    speaks_for,
    weighed,
)
from layerskip.control.estimates import FIRST_LOOK, LAST_LOOK, RowState
from layerskip.control.experience import Calibration, Experience, ToldChances
from layerskip.control.pace import LOOKING, Pace, Split, affordable
from layerskip.control.pass_times import CONTEXT_STEP, SHORTEST, PassTimes
from layerskip.control.stopping import PLAIN, Choice, Stopper, another
from layerskip.cost import CostTable
from layerskip.params import MAX_AUTO_DRAFT_TOKENS

STAKE_TOKENS = 64  # of so many tokens at most: few requests are as long as they may be


class Controller:
    """Chooses for all rows of a decoder, and learns from what became of the choices.

    One controller serves all requests of a model; threads may share it.

    Args:
        cost: of passes.
        prior: acceptance by position, measured when the plan was chosen; empty: unknown.
        calibration: of "greedy" and "sampled" drafts, as of a ``PlanFile``; None: unknown.
        follows_clock: whether measured seconds correct the table while decoding.

    Attributes:
        by_host: decides for rounds that the host drives, where the device runs others by itself,
            whose passes take less; None: this one does.
    """

    def __init__(
        self,
        cost: CostTable,
        prior: Sequence[float] = (),
        calibration: Mapping[str, Sequence[tuple[float, float]]] | None = None,
        *,
        follows_clock: bool = True,
    ) -> None:
        self.cost, self.times = cost, PassTimes(cost, follows_clock=follows_clock)
        self._prior, self._follows_clock = tuple(prior), follows_clock
        self._calibration = dict(calibration or {})
        self._experiences: dict[str, Experience] = {}
        self._numbers = itertools.count(1)
        self._guesses: dict[tuple[int, int], int] = {}  # of so many rows, at such contexts
        self._guess_prices: dict[tuple[int, bool], list[float]] = {}  # at such contexts
        self._paces: tuple[object, dict[tuple[int, int, bool], Pace]] = (None, {})
        self._rest = PLAIN
        self.by_host: Controller | None = None

    def beside(self, cost: CostTable) -> "Controller":
        """Another one for passes of such costs. What is known of requests is both's."""
        other = Controller(cost, self._prior, self._calibration, follows_clock=self._follows_clock)
        other._experiences, other._numbers = self._experiences, self._numbers
        return other

    def next_number(self) -> int:
        """Of one more request whose draws have to be its own (``Sampler.draw_apart``)."""
        return next(self._numbers)

    def row(self, kind: str, limit: int = STAKE_TOKENS, *, greedy: bool = False) -> RowState:
        """State of a new request of at most ``limit`` tokens.

        It may stake a share of its plain time on drafts, however little is known of it, if it is as
        long as it may be, or as those of its kind before it. What these gained lets a short one
        stake as much as a long one. What its first rounds earn for probes it may have before them,
        and gives back if it ends without them.

        Args:
            kind: requests of one kind learn from each other.
            limit: most tokens of it.
            greedy: whether it takes the likeliest token, and nothing is done to the logits before.
        """
        shared = self._experiences.get(kind) or self._begun(kind)
        advance = int(min(limit, STAKE_TOKENS, shared.usual_length))
        tokens = STAKE_TOKENS if shared.ledger > 0.0 else advance
        stake = STAKE_SHARE * tokens
        return RowState(shared, stake=stake, advance=advance, limit=limit, greedy=greedy)

    def _begun(self, kind: str) -> Experience:
        """What requests of a kind have in common before the first of them."""
        known = self._calibration.get("greedy" if kind == "greedy" else "sampled", ())
        begun = Experience(self._prior, calibration=Calibration(known))
        return self._experiences.setdefault(kind, begun)

    def told(self, kind: str) -> ToldChances:
        """The chances that drafted tokens of requests of ``kind`` were given."""
        known = self._experiences.get(kind)
        return known.calibration.told if known is not None else ToldChances()

    def guesses(self, rows: int, context: int) -> int:
        """Looked-up tokens that each row may bring into a draft pass for nothing: of several rows a
        pass is saved only where none needs it, and of a fixed number nobody counts them."""
        key = (rows, context // CONTEXT_STEP)
        if key not in self._guesses:  # clocks scale both sides: it is the table's answer
            one = self.times.draft(rows, context)
            widths = range(MAX_AUTO_DRAFT_TOKENS, 0, -1)  # a table's noise hides no wider one
            costs = ((w, self.times.draft(rows, context, each=w + 1)) for w in widths)
            self._guesses[key] = next((w for w, seconds in costs if seconds <= one), 0)
        return self._guesses[key]

    def guess_prices(self, context: int, *, greedy: bool) -> list[float]:
        """What a draft pass of one row grows by with one looked-up token, two, ..., in what a right
        one saves: a pass, but for drawing its token."""
        key = (context // CONTEXT_STEP, greedy)
        if key not in self._guess_prices:  # clocks scale both sides, as of ``guesses``
            one, *wider = (
                self.times.draft(1, context, each=width, greedy=greedy)
                for width in range(1, MAX_AUTO_DRAFT_TOKENS + 1)
            )
            saved = one - self.times.drafted(greedy=greedy)
            self._guess_prices[key] = [(seconds - one) / max(saved, SHORTEST) for seconds in wider]
        return self._guess_prices[key]

    def going_on(
        self,
        stoppers: Sequence[Stopper],
        context: int,
        *,
        rows: int = 1,
        verified: int = 0,
        others: int = 0,
    ) -> list[bool]:
        """Which of these rows draft another token: those that gain more than they add to the draft
        and the verify pass. The others are stopped. A row by itself has decided already.

        Args:
            stoppers: of rows whose drafts may go on.
            context: committed slots of a row, on the average.
            rows: of the round.
            verified: tokens of its verify pass so far, those of fixed numbers in full.
            others: rows that draft another token in any case.
        """
        if rows == 1:
            return [not s.stopped for s in stoppers]
        pace = self._pace(context, rows, greedy=all(s.greedy for s in stoppers))
        going = another(pace, stoppers, verified, others)
        for stopper, goes in zip(stoppers, going, strict=True):
            if not goes:
                stopper.stop(alone=any(going))
        return going

    def at_rest(
        self, states: Sequence[RowState], confidences: Iterable[float], *, beside: int = 0
    ) -> list[Choice] | None:
        """One plain round of each row if all of them are at rest; None if they are not.

        Args:
            confidences: of what was looked up for each; 0: nothing was.
            beside: rows of the round whose numbers are fixed.
        """
        for state in states:  # plain loops: of some texts most rounds are such
            if not state.may_rest:
                return None
        rows = len(states) + beside
        credit = min([s.shared.credit for s in states])  # a probe needs as much of each kind
        for state, confidence in zip(states, confidences, strict=True):
            if not state.rests(rows, confidence, credit):
                return None
        return [self._resting(state.rest()) for state in states]

    def _resting(self, seconds: float) -> Choice:
        """A plain round that is expected to take so long; mostly the one before's."""
        found = self._rest
        if found.plain_seconds != seconds:
            found = self._rest = Choice("none", 0, plain_seconds=seconds)
        return found

    def choose(
        self, asks: Sequence[Ask], *, drafts: bool, fixed: Sequence[int] = ()
    ) -> list[Choice]:
        """One choice per row.

        Args:
            asks: rows that leave it to the controller.
            drafts: whether there is an early exit.
            fixed: numbers of draft tokens of the round's other rows.
        """
        confidences = (speaks_for(a.guess) for a in asks)
        rest = self.at_rest([a.state for a in asks], confidences, beside=len(fixed))
        if rest is not None:
            return rest
        if len(asks) == 1 and drafts and not fixed:
            (ask,) = asks
            if ask.state.last and (again := self._again(ask)) is not None:
                return [again]
        greedy = all(a.state.greedy for a in asks)
        context = sum(a.context for a in asks) // len(asks)
        pace = self._pace(context, len(asks) + len(fixed), greedy=greedy)
        # Rows share passes, so they share what may be lost on them.
        stake = pace.token * sum(a.state.stake for a in asks) / len(asks)
        longest = affordable(stake, pace) if drafts else 0
        mosts = [min(longest, a.most) for a in asks]
        least = PAYING * pace.least
        lines = [a.state.survivals(most, least) for a, most in zip(asks, mosts, strict=True)]
        resting = not any(a.state.last for a in asks)
        found, may_lose = Split([0] * len(asks), [0] * len(asks), 0.0), 0.0
        if any(lines) or any(a.guess.tokens for a in asks):
            may_lose = loss_allowed(asks, pace)
            found = weighed(asks, pace, lines, fixed, may_lose, resting=resting)
        idle = resting and not any(found.drafted)
        left = 0.0 if longest else stake
        plain = idle and not any(found.looked_up)
        held = found.is_less
        claims = plain and not held
        probing = idle and drafts and may_probe(asks, pace, left, claims=claims)
        if plain and not probing:
            put_to_rest(asks, pace, left, drafts=drafts)
        if probing:
            mosts = [min(1, a.most) for a in asks]
            found = Split(mosts, [0] * len(asks), found.rate)
            may_lose = loss_allowed(asks, pace)  # with what was claimed for it
        counts, lookups = found.drafted, found.looked_up
        pace = pace.settled(sum((*counts, *lookups, *fixed)), sum(n > 0 for n in (*counts, *fixed)))
        choices, made = [], {}  # most rows of a large batch do the same
        for a, n, most, looked_up in zip(asks, counts, mosts, lookups, strict=True):
            a.state.probing = probing
            if looked_up or (n and not probing):
                a.state.wakes(drafts=n > 0)
            if not looked_up:
                a.state.last = 0 if probing else n
            same = looked_up, (n if found.is_less else most) if n and not looked_up else 0
            if same not in made:
                choice = _chosen(*same, found.rate, pace, may_lose)
                made[same] = replace(choice, held=True) if probing and held else choice
            choices.append(made[same])
        return choices

    def _again(self, ask: Ask) -> Choice | None:
        """What ``choose`` finds, in few steps, of a row by itself that has drafted, where it drafts
        or looks up; None where it does neither. Most rounds of one row are such, and thinking
        takes its time."""
        state = ask.state
        pace = self._pace(ask.context, 1, greedy=state.greedy)
        most = min(affordable(pace.token * state.stake, pace), ask.most)
        line = state.survivals(most, PAYING * pace.least)
        may_lose = loss_allowed([ask], pace)
        looked_up, gain = offered(ask, pace, line, may_lose)
        if looked_up:
            state.wakes(drafts=False)
            state.probing = False
            rate = (1.0 + gain) / (pace.verify(1 + looked_up) + looked_up * pace.drawing)
            return _looking_up(looked_up, rate, pace)
        count, rate = pace.of_one(line, bias=1.0 - HYSTERESIS)
        if not count:
            return None
        state.last, state.probing = count, False
        return _drafting(most, rate, pace, may_lose)

    def _pace(self, context: int, rows: int, *, greedy: bool) -> Pace:
        """Of rounds like this one: at rest most are as the one before."""
        ratios, known = self._paces
        if ratios is not self.times.ratios:
            ratios, known = self._paces = self.times.ratios, {}
        key = (context // CONTEXT_STEP, rows, greedy)
        if key not in known:
            known[key] = Pace(self.times, context, rows, greedy=greedy)
        return known[key]

    def looks_back(self, state: RowState, count: int, context: int) -> bool:
        """Whether a row by itself, which does not draft, looks back at what drafts would have come
        to in its last rounds: as credit for probes pays for it, of which this is the cheapest.

        Args:
            count: tokens that can be looked back at.
        """
        if state.next_look > 0 or state.last or count < FIRST_LOOK:
            return False
        state.reserve(PROBE_SHARE)
        missing = state.lacks(self._price_of_looking(state, count, context))
        # A round earns no more than that: before, it need not be asked again.
        state.next_look = math.ceil(min(missing / PROBE_SHARE, LAST_LOOK))
        return missing <= 0.0

    def _price_of_looking(self, state: RowState, count: int, context: int) -> float:
        """In plain passes."""
        plain = self.times.plain(context, greedy=state.greedy)
        return state.look_ratio * self.times.looking_back(count, greedy=state.greedy) / plain

    def observe_hindsight(
        self,
        state: RowState,
        runs: Sequence[tuple[Sequence[bool], Sequence[float]]],
        context: int,
        seconds: float = 0.0,
    ) -> None:
        """What drafts would have come to, as of ``RowState.look_back``, and what it took to see."""
        count = sum(len(accepted) for accepted, _ in runs)
        pace = self._pace(context, 1, greedy=state.greedy)
        if self._follows_clock:
            tabled = self.times.looking_back(count, greedy=state.greedy)
            state.look_ratio = max(1.0, seconds / max(tabled, SHORTEST))
        spent = self._price_of_looking(state, count, context)
        state.look_back(runs, spent, pace.risks[0] / pace.token)

    def observe_plain(self, state: RowState, choice: Choice, context: int) -> None:
        """A round that is no probe: it earns credit for them, unless its row has had that."""
        if state.repays():
            return
        plain = self.times.plain(context, greedy=state.greedy)
        state.earn(PROBE_SHARE * choice.plain_seconds / plain)

    def observe_lookup(
        self, state: RowState, choice: Choice, context: int, num_saved: int, num_tokens: int
    ) -> None:
        """A round whose verify pass was given ``num_tokens`` looked-up tokens, and no others, and
        which made ``num_saved`` plain rounds needless."""
        if choice.plain_seconds > 0.0:
            drawing = num_tokens * self.times.drawing(greedy=state.greedy)
            looking = LOOKING * choice.plain_seconds
            gained = choice.gained(num_saved, num_tokens, 0.0) - drawing - looking
            passes = gained / self.times.plain(context, greedy=state.greedy)
            state.settle(gained / choice.plain_seconds, passes, looked_up=True)
        self.observe_plain(state, choice, context)

    def observe_draft(
        self,
        state: RowState,
        choice: Choice,
        context: int,
        accepted: Sequence[bool],
        confidences: Sequence[float] = (),
        chances: Sequence[float] = (),
        *,
        num_passes: int,
        num_drafted: int | None = None,
        num_positions: int = 0,
        num_behind: int = 0,
        num_saved: int | None = None,
        alone: bool = False,
    ) -> None:
        """A round with an early exit's draft.

        Args:
            choice: that asked for it.
            accepted: of the judged tokens: those that were accepted, and the first that was not.
            confidences: of the drafted tokens, if they are known.
            chances: that a ``Stopper`` gave them, if one was asked.
            num_passes: that drafted them.
            num_drafted: tokens; None: as many as ``confidences``.
            num_positions: tokens that the passes ran, guesses among them; 0: one each.
            num_behind: looked-up tokens behind the draft.
            num_saved: plain rounds that accepted tokens made needless, those behind the draft, too;
                None: as many as ``accepted`` has.
            alone: whether it was a row's by itself. What it took is then counted at the prices that
                clocks give by now: they know this round, of which tables may have told too little.
        """
        if alone:
            pace = self._pace(context, 1, greedy=state.greedy)
            if choice.verify_seconds is not pace.steps:  # clocks say something else by now
                choice = _drafting(choice.num_draft_tokens, choice.rate, pace, choice.may_lose)
        drafted = len(confidences) if num_drafted is None else num_drafted
        each = round(num_positions / num_passes)
        wider = 1.0
        if each > 1:
            one = self.times.draft(1, context, greedy=state.greedy)
            wider = self.times.draft(1, context, each=each, greedy=state.greedy) / one
        saved = sum(accepted) if num_saved is None else num_saved
        seconds = choice.gained(saved, drafted + num_behind, wider * num_passes)
        if num_behind:
            seconds -= num_behind * self.times.drawing(greedy=state.greedy)
        plain = self.times.plain(context, greedy=state.greedy)
        if choice.plain_seconds > 0.0:
            spent = 0.0
            if state.probing and choice.held:
                spent = -choice.gained(0, drafted + num_behind, wider * num_passes) / plain
            state.settle(seconds / choice.plain_seconds, seconds / plain, spent=spent)
        if not state.probing and not state.repays():
            state.earn(PROBE_SHARE * choice.plain_seconds / plain)
        state.add_draft(accepted, confidences, chances)


def _chosen(looked_up: int, most: int, rate: float, pace: Pace, may_lose: float) -> Choice:
    """So many looked-up tokens, or an early exit of at most so many, or neither."""
    if looked_up:
        return _looking_up(looked_up, rate, pace)
    if most:
        return _drafting(most, rate, pace, may_lose)
    return Choice("none", 0, plain_seconds=pace.token)


def _drafting(most: int, rate: float, pace: Pace, may_lose: float) -> Choice:
    """An early exit of at most so many tokens, in a round that may take so long in vain."""
    return Choice(
        "early_exit",
        most,
        rate,
        pace.steps,
        pace.draft_share,
        pace.start_share,
        pace.token,
        pace.charged.steps,
        pace.dearer,
        may_lose,
    )


def _looking_up(count: int, rate: float, pace: Pace) -> Choice:
    """So many looked-up tokens, straight to the verify pass."""
    return Choice(
        "lookup",
        count,
        rate,
        pace.steps,
        plain_seconds=pace.token,
        charged_seconds=pace.charged.steps,
    )
