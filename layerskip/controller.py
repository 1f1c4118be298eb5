"""How far to draft: estimates of acceptance, and what the cost table makes of them.

A round with k drafted tokens emits ``E(k) = 1 + sum_{i<=k} prod_{j<=i} a_j`` tokens in
``T_round(k)`` seconds; the controller takes the k with the most tokens a second, 0 among them
(DESIGN 6). While a draft grows, each token's own confidence, calibrated by what verification made
of such confidences before, says whether the next one is worth its pass. Greedy and coupled output
never depends on any of this; for token-level and block verification a drafted token always stays
in the draft, so that its length depends only on what was drawn before (DESIGN 3.5).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from layerskip.cost import CostTable
from layerskip.estimates import DEFAULT_ACCEPTANCE, Experience, RowState
from layerskip.outputs import Drafter, StopReason
from layerskip.params import MAX_AUTO_DRAFT_TOKENS

HYSTERESIS = 0.03
PROBE_SHARE = 0.01
CONTEXT_STEP = 64
MOST_REMEMBERED = 100_000  # seconds looked up in the table
SHORTEST = 1e-9  # seconds of a pass: nothing is divided by zero


@dataclass(frozen=True)
class Ask:
    """A row that wants to know how far to draft.

    Attributes:
        state: of its request.
        context: committed slots.
        room: most tokens that may be drafted.
        num_guessed: tokens that a look-up offers.
        match_length: of the look-up.
        stored: whether it is from a store.
    """

    state: RowState
    context: int
    room: int
    num_guessed: int = 0
    match_length: int = 0
    stored: bool = False


@dataclass(frozen=True)
class Choice:
    """What a row's round does.

    Attributes:
        source: of the drafted tokens.
        num_draft_tokens: most that are drafted.
        rate: tokens a second that the whole round expects.
        verify_seconds: of one more row in the verify pass, by drafted tokens.
    """

    source: Drafter
    num_draft_tokens: int
    rate: float = 0.0
    verify_seconds: tuple[float, ...] = ()


PLAIN = Choice("none", 0)


class Stopper:
    """Whether a growing draft goes on; one for each row and round.

    Attributes:
        confidences: of the tokens so far, as the drafter gave them.
        chances: of acceptance, of each token so far.
        gain: tokens that one more is expected to add, less what verifying it costs.
        stopped: what ended the draft before it had all its tokens; "" if nothing did.
    """

    def __init__(self, state: RowState, choice: Choice) -> None:
        self._state, self._choice = state, choice
        self._survival = 1.0
        self.confidences: list[float] = []
        self.chances: list[float] = []
        self.gain = 0.0
        self.stopped: StopReason = ""

    def goes_on(self, confidence: float) -> bool:
        """After a token that was drafted with ``confidence``, and stays: is another worth a row
        of the verify pass? ``Controller.pays`` weighs the draft pass, which rows share."""
        state, choice = self._state, self._choice
        chance = state.chance(confidence)
        self.confidences.append(confidence)
        self.chances.append(chance)
        self._survival *= chance
        done = len(self.chances)
        more = choice.verify_seconds[done] if done < len(choice.verify_seconds) else 0.0
        self.gain = self._survival * state.acceptance(done) - choice.rate * more
        if self.gain <= 0.0:
            self.stopped = "confidence"
        return not self.stopped

    @property
    def rate(self) -> float:
        """Tokens a second that the round expects."""
        return self._choice.rate


class Controller:
    """Chooses for all rows of a decoder, and learns from what became of the choices.

    One controller serves all requests of a model; threads may share it.

    Args:
        cost: of passes.
        prior: acceptance by position, measured when the plan was chosen; empty: unknown.
        follows_clock: whether measured seconds correct the table while decoding.
    """

    def __init__(
        self, cost: CostTable, prior: Sequence[float] = (), *, follows_clock: bool = True
    ) -> None:
        self.cost = cost
        self._prior = tuple(prior) or (DEFAULT_ACCEPTANCE,)
        self._follows_clock = follows_clock
        self._experiences: dict[str, Experience] = {}
        # Measured seconds over the table's: of verify passes, which every round has, and of drafts
        # beside that. A ratio of its own for each kind of pass would be that of another time, when
        # the machine was slower or faster, for what is not run now.
        self._slowness = self._draft_ratio = 1.0
        self._seconds: dict[tuple[str, int, int, int, int], float] = {}

    def row(self, kind: str) -> RowState:
        """State of a new request."""
        return RowState(self._experiences.setdefault(kind, Experience(self._prior)))

    def calibration_error(self, kind: str) -> float:
        """Expected calibration error of the draft's confidence, for requests of ``kind``."""
        known = self._experiences.get(kind)
        return known.calibration.error if known is not None else 0.0

    def draft_seconds(self, rows: int, context: int, *, each: int = 1) -> float:
        """Of one draft pass over ``rows`` sequences with ``each`` tokens of each."""
        ratio = self._slowness * self._draft_ratio
        return ratio * self._looked_up("draft", rows * each, context, rows, each)

    def verify_seconds(
        self, tokens: int, context: int, *, rows: int = 1, longest: int | None = None
    ) -> float:
        """Of one full-depth pass over the tokens of ``rows`` sequences.

        Args:
            longest: tokens of the sequence with the most; None: all have equally many.
        """
        longest = -(-tokens // rows) if longest is None else longest
        return self._slowness * self._looked_up("verify", tokens, context, rows, longest)

    def _looked_up(self, what: str, tokens: int, context: int, rows: int, longest: int) -> float:
        if tokens == 0:
            return 0.0
        key = (what, tokens, context // CONTEXT_STEP, rows, longest)
        if key not in self._seconds:
            if len(self._seconds) >= MOST_REMEMBERED:
                self._seconds.clear()
            middle = (context // CONTEXT_STEP + 0.5) * CONTEXT_STEP
            if what == "draft":
                seconds = self.cost.draft_pass(tokens, middle, sequences=rows)
            else:
                seconds = self.cost.verify_pass(tokens, middle, sequences=rows, longest=longest)
            self._seconds[key] = max(seconds, SHORTEST)
        return self._seconds[key]

    def guesses(self, rows: int, context: int) -> int:
        """Looked-up tokens that each row may bring into a draft pass at next to no cost."""
        alone = self.draft_seconds(rows, context)
        width = 0
        while width < MAX_AUTO_DRAFT_TOKENS and (
            self.draft_seconds(rows, context, each=width + 2) <= alone * (1.0 + HYSTERESIS)
        ):
            width += 1
        return width

    def pays(self, stoppers: Sequence[Stopper], context: int) -> bool:
        """Whether rows that would go on gain more than a draft pass of them all costs; where not,
        their drafts are stopped."""
        seconds = self.draft_seconds(len(stoppers), context)
        if sum(s.gain for s in stoppers) > stoppers[0].rate * seconds:
            return True
        for stopper in stoppers:
            stopper.stopped = "cost"
        return False

    def choose(
        self, asks: Sequence[Ask], *, drafts: bool, fixed: Sequence[int] = ()
    ) -> list[Choice]:
        """One choice per row.

        Args:
            asks: rows that leave it to the controller.
            drafts: whether there is an early exit.
            fixed: numbers of draft tokens of the round's other rows.
        """
        pace = Pace(self, max(a.context for a in asks), len(asks) + len(fixed))
        lines = [a.state.survivals(_most_drafted(a)) if drafts else [] for a in asks]
        offers = [_offer(a, pace, line) for a, line in zip(asks, lines, strict=True)]
        lookups = [
            0 if drafts and self._probes(a, pace) else n
            for a, (n, _) in zip(asks, offers, strict=True)
        ]
        expected = sum(gain for n, (_, gain) in zip(lookups, offers, strict=True) if n)
        gains = [[] if n else line for n, line in zip(lookups, lines, strict=True)]
        counts, rate = _fill(pace, gains, len(asks) + expected, [*lookups, *fixed])
        drafting = sum(n > 0 for n in (*counts, *fixed))
        pace = pace.settled(sum((*counts, *lookups, *fixed)), drafting)
        choices = []
        for a, n, looked_up in zip(asks, counts, lookups, strict=True):
            settled = 0 if looked_up or not drafts else self._settled(a, n, pace)
            if looked_up:
                choices.append(Choice("lookup", looked_up, rate))
            elif settled:
                most = 1 if a.state.probing else _most_drafted(a)
                choices.append(Choice("early_exit", most, rate, pace.steps))
            else:
                choices.append(PLAIN)
        return choices

    def _probes(self, ask: Ask, pace: "Pace") -> bool:
        """Whether a row tries the early exit, which it gave up, once more."""
        return ask.state.last == 0 and ask.state.credit >= pace.loss

    def _settled(self, ask: Ask, num_tokens: int, pace: "Pace") -> int:
        """What hysteresis and probes make of a row's best number of draft tokens."""
        state = ask.state
        state.probing = False
        if ask.room == 0:
            return 0
        margin, gain = HYSTERESIS * pace.plain, state.acceptance(0) * pace.plain - pace.loss
        if num_tokens == 0 and state.last > 0 and gain > -margin:
            num_tokens = 1
        if num_tokens > 0 and state.last == 0 and gain < margin:
            num_tokens = 0
        state.last = num_tokens
        if num_tokens == 0 and self._probes(ask, pace):
            state.probing = True
            return 1
        return num_tokens

    def observe_plain(self, state: RowState, context: int) -> None:
        """A round without a draft: it earns credit for probes."""
        plain = self.verify_seconds(1, context)
        state.credit = min(state.credit + PROBE_SHARE * plain, plain)

    def observe_draft(
        self,
        state: RowState,
        context: int,
        accepted: Sequence[bool],
        confidences: Sequence[float] = (),
    ) -> None:
        """A round with an early exit's draft.

        Args:
            accepted: of the judged tokens: those that were accepted, and the first that was not.
            confidences: of the drafted tokens.
        """
        if state.probing:
            plain = self.verify_seconds(1, context)
            spent = self.draft_seconds(1, context) + self.verify_seconds(2, context)
            got = (1.0 + sum(accepted)) * plain
            state.credit = min(state.credit + got - spent, plain)
        state.add_draft(accepted, confidences)

    def observe_draft_seconds(self, measured: float, expected: float) -> None:
        """What a round's draft took beside what ``draft_seconds`` says of its passes."""
        if self._follows_clock and expected > 0.0:
            self._draft_ratio = _followed(self._draft_ratio, measured / expected)

    def observe_verify_seconds(self, measured: float, expected: float) -> None:
        """What a verify pass took beside what ``verify_seconds`` says of it."""
        if self._follows_clock:
            self._slowness = _followed(self._slowness, measured / expected)


class Pace:
    """What passes of a round with so many rows take.

    Attributes:
        plain: seconds of a plain pass of one row.
        loss: seconds that one rejected token of one row costs.
        draft_share: of one more draft pass, a drafting row's share.
        steps: seconds that the verify pass grows by for a row's first, second, ... drafted token.
    """

    def __init__(
        self, costs: Controller, context: int, rows: int, tokens: int = 0, drafting: int = 0
    ) -> None:
        self._costs, self._context, self.num_rows = costs, context, rows
        self.plain = costs.verify_seconds(1, context)
        self.loss = costs.draft_seconds(1, context) + costs.verify_seconds(2, context) - self.plain
        drafting = drafting or rows
        self.draft_share = costs.draft_seconds(drafting, context) / drafting
        if rows == 1:
            ends = [self.verify(n, n) for n in range(1, MAX_AUTO_DRAFT_TOKENS + 2)]
            self.steps = tuple(b - a for a, b in itertools.pairwise(ends))
        else:
            wide, base = 2 * costs.cost.row_quantum, rows + tokens
            longest = -(-base // rows)
            growth = self.verify(base + wide, longest) - self.verify(base, longest)
            self.steps = (max(0.0, growth) / wide,) * MAX_AUTO_DRAFT_TOKENS

    def settled(self, tokens: int, drafting: int) -> "Pace":
        """The same once it is known how many tokens are drafted, and in how many rows."""
        return Pace(self._costs, self._context, self.num_rows, tokens, drafting)

    def draft(self, rows: int) -> float:
        """Seconds of a draft pass of so many rows."""
        return self._costs.draft_seconds(rows, self._context)

    def verify(self, tokens: int, longest: int) -> float:
        """Seconds of the verify pass."""
        return self._costs.verify_seconds(
            tokens, self._context, rows=self.num_rows, longest=longest
        )

    def verify_share(self, each: int) -> float:
        """Of one row, if every row has ``each`` tokens in the verify pass."""
        return self.verify(self.num_rows * each, each) / self.num_rows


def _offer(ask: Ask, pace: Pace, survivals: Sequence[float]) -> tuple[int, float]:
    """Looked-up tokens that go straight to the verify pass, none where an early exit is better;
    and how many of them will be accepted.

    Args:
        survivals: of the early exit's tokens.
    """
    a = ask.state.lookup_acceptance(ask.match_length, ask.stored)
    best, best_gain, rate = 0, 0.0, 1.0 / pace.verify_share(1)
    gain, survival = 0.0, 1.0
    for n in range(1, min(ask.num_guessed, _most(ask)) + 1):
        survival *= a
        gain += survival
        got = (1.0 + gain) / pace.verify_share(n + 1)
        if got > rate:
            best, best_gain, rate = n, gain, got
    if best and rate < _exit_rate(survivals, ask.num_guessed, a, pace):
        return 0, 0.0
    return best, best_gain


def _exit_rate(survivals: Sequence[float], num_guessed: int, guessed: float, pace: Pace) -> float:
    """Tokens a second with an early exit; looked-up tokens that it confirms save passes.

    Args:
        guessed: chance of each looked-up token.
    """
    best, tokens, saved, chance = 0.0, 1.0, 0.0, 1.0
    for k, survival in enumerate(survivals, start=1):
        tokens += survival
        if 1 < k <= num_guessed + 1:
            chance *= guessed
            saved += chance
        seconds = pace.verify_share(k + 1) + (k - saved) * pace.draft_share
        best = max(best, tokens / seconds)
    return best


def _fill(
    pace: Pace, gains: Sequence[Sequence[float]], tokens: float, others: Sequence[int]
) -> tuple[list[int], float]:
    """Draft tokens of each row with the most tokens a second, and how many those are.

    Taken in the order of their survival, which within a row falls: so the best first ones are a
    prefix of each row's draft. Each is charged the rise of its draft pass and of verify.

    Args:
        gains: for each row the survival of its first, second, ... drafted token.
        tokens: that the round emits without them.
        others: tokens of the verify pass that are drafted in any case, by row.
    """
    order = sorted(
        ((g, i, r) for r, line in enumerate(gains) for i, g in enumerate(line)),
        key=lambda item: (-item[0], item[1]),
    )
    counts, depth = [0] * len(gains), [0] * MAX_AUTO_DRAFT_TOKENS
    # Every row verifies its pending token; a row that looks up stands in `others`, too.
    num_verified, longest = pace.num_rows + sum(others), 1 + max(others, default=0)
    drafting = 0.0
    best, chosen = tokens / pace.verify(num_verified, longest), list(counts)
    for gain, i, r in order:
        before = pace.draft(depth[i])
        depth[i] += 1
        drafting += pace.draft(depth[i]) - before
        counts[r] += 1
        num_verified += 1
        longest = max(longest, i + 2)
        tokens += gain
        rate = tokens / (drafting + pace.verify(num_verified, longest))
        if rate > best:
            best, chosen = rate, list(counts)
    return chosen, best


def _most(ask: Ask) -> int:
    return min(ask.room, MAX_AUTO_DRAFT_TOKENS)


def _most_drafted(ask: Ask) -> int:
    """By an early exit: few while nothing is known of it."""
    return min(_most(ask), ask.state.shared.most)


def _followed(ratio: float, measured: float) -> float:
    """An average over some dozen rounds; a stalled one moves it little."""
    return ratio * min(max(measured, 0.7), 1.4) ** 0.05
