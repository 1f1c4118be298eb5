"""Requests whose acceptance is known, decoded on paper: counted passes times a cost table."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from layerskip.control.asks import Ask
from layerskip.control.estimates import MOST_SEEN, RowState
from layerskip.control.stopping import Choice, Stopper
from layerskip.controller import Controller
from layerskip.cost import CostTable, Curve
from layerskip.lookup import Guess

CONTEXT = 100


def guessed(count: int, match_length: int) -> Guess:
    return Guess((0,) * count, match_length)


def table(
    c: float = 0.2,
    *,
    quantum: int = 8,
    slope: float = 0.02,
    far: float = 0.0,
    start: float = 0.0,
    head: float = 0.0,
) -> CostTable:
    """A plain pass takes 1; 64 rows take ``1 + 64 slope``; drafts ``c`` of it all.

    Args:
        far: what 1000 slots of context add.
        start: of a round's first drafts.
        head: of a draft pass, however many rows it has; their layers take what is left of ``c``.
    """

    def curve(unit: float) -> Curve:
        rows = (1, 64)
        return Curve(
            rows,
            (0, 1000),
            tuple(tuple(unit * (1 + more + slope * (n - 1)) for n in rows) for more in (0.0, far)),
        )

    free = Curve((1,), (0,), ((0.0,),))
    heads = Curve((1,), (0,), ((head,),)) if head else free
    return CostTable(curve(c - head), heads, curve(1.0), 0.0, quantum, {}, draft_start=start)


COSTS = {
    "padded": table(),
    "flat": table(slope=0.0),
    "sloping": table(0.15, quantum=1, slope=0.01),
    "falling": table(0.2, start=0.1),
}


@dataclass
class Request:
    """A request that emits ``tokens`` tokens.

    Attributes:
        acceptance: of a drafted token, by the number of tokens emitted so far.
        telling: whether confidence tells right drafts from wrong ones.
        boast: confidence is at least this.
        guessed, match_length, guess_right: tokens that a look-up offers before each round, after
            so long a match, and the chance that one is right once those before it are.
        limit: most tokens that it may have; 0: as many as it has.
        luck: of each of its tokens, 0 to 1: below the acceptance, it is drafted right, by whatever
            round.
        seen: its latest tokens that no draft was made for: whether one would have been right, and
            its confidence.
    """

    tokens: int
    acceptance: Callable[[int], float]
    telling: bool = False
    boast: float = 0.5
    limit: int = 0
    guessed: int = 0
    match_length: int = 0
    guess_right: float = 0.0
    emitted: int = 0
    state: RowState | None = None
    luck: Sequence[float] = ()
    seen: list[tuple[bool, float]] = field(default_factory=list)

    def draft(self, ahead: int) -> tuple[bool, float]:
        """Whether the token so many behind the last one is drafted right, and with what
        confidence."""
        chance = self.acceptance(self.emitted)
        right = self.luck[self.emitted + ahead] < chance
        if self.telling:
            return right, 0.98 if right else 0.15
        return right, max(self.boast, chance)


@dataclass
class Growing:
    """One row's draft: which tokens are right."""

    request: Request
    choice: Choice
    stopper: Stopper
    looked_up: list[bool] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    ended: bool = False

    @property
    def done(self) -> bool:
        drafts = self.choice.source == "early_exit"
        return self.ended or not drafts or len(self.right) >= self.choice.num_draft_tokens

    @property
    def verified(self) -> int:
        """Tokens of the verify pass, beside the pending one."""
        looks_up = self.choice.source == "lookup"
        return self.choice.num_draft_tokens if looks_up else len(self.right)

    def grow(self, *, stops: bool) -> None:
        right, confidence = self.request.draft(len(self.right))
        self.right.append(right)
        self.confidences.append(confidence)
        self.ended = stops and not self.stopper.goes_on(confidence)


@dataclass
class Paper:
    """A decoder that only counts. All of the same ``seed`` draft the same texts.

    Attributes:
        looks_back: whether rounds of a row by itself tell what drafts would have come to.
        seconds: of all rounds; ``plain``: of as many plain passes as were needed without drafts.
        chosen: tokens drafted, round by round.
    """

    controller: Controller
    fixed: int | None = None
    seed: int = 0
    looks_back: bool = False
    seconds: float = 0.0
    emitted: int = 0
    num_rounds: int = 0
    chosen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._texts, self._guesses = Random(self.seed), Random(self.seed)
        self._drafting, self._verifying = map(functools.cache, self._passes())

    def _passes(self) -> tuple[Callable[[int], float], Callable[[int, int], float]]:
        """What a draft pass takes, by its rows, and a verify pass, by its tokens and rows: each
        price is asked for in thousands of rounds."""
        cost = self.controller.cost
        return (
            lambda rows: cost.draft_pass(rows, CONTEXT, sequences=rows, late=True),
            lambda tokens, rows: cost.verify_pass(tokens, CONTEXT, sequences=rows),
        )

    def run(self, requests: Sequence[Request], *, rows: int = 1) -> "Paper":
        """Decode all requests, ``rows`` at a time."""
        waiting, going = list(requests)[::-1], []
        while waiting or going:
            while waiting and len(going) < rows:
                going.append(waiting.pop())
            self.round(going)
            for r in going:
                if r.emitted >= r.tokens:
                    r.state.end(r.tokens)
            going = [r for r in going if r.emitted < r.tokens]
        return self

    def round(self, going: Sequence[Request]) -> None:
        for r in going:
            if r.state is None:
                r.state = self.controller.row("greedy", r.limit or r.tokens)
                r.luck = [self._texts.random() for _ in range(r.tokens)]
        if self.looks_back and len(going) == 1:
            self._look_back(going[0])
        choices = self._choices(going)
        alone = len(going) == 1
        drafts = [
            Growing(r, c, Stopper(r.state, c, alone=alone), self._looked_up(r))
            for r, c in zip(going, choices, strict=True)
        ]
        cost = self.controller.cost
        self.seconds += cost.draft_start if any(not d.done for d in drafts) else 0.0
        while asking := [d for d in drafts if not d.done]:
            if self.fixed is None and asking[0].right:
                kept = self.controller.going_on(
                    [d.stopper for d in asking],
                    CONTEXT,
                    rows=len(going),
                    verified=len(going) + sum(d.verified for d in drafts),
                )
                for d, goes in zip(asking, kept, strict=True):
                    d.ended = not goes
                asking = [d for d in asking if not d.ended]
                if not asking:
                    break
            self.seconds += self._drafting(len(asking))
            for d in asking:
                d.grow(stops=self.fixed is None)
        counts = [d.verified for d in drafts]
        self.seconds += self._verifying(sum(counts) + len(going), len(going))
        for d in drafts:
            self._judge(d)
        self.num_rounds += 1
        self.chosen.append(max(counts))

    def _look_back(self, r: Request) -> None:
        if not r.seen or r.tokens - r.emitted < 2:
            return
        if not self.controller.looks_back(r.state, len(r.seen), CONTEXT):
            return
        runs = [([], [])]
        for right, confidence in r.seen:
            runs[-1][0].append(right)
            runs[-1][1].append(confidence)
            if not right:
                runs.append(([], []))
        self.controller.observe_hindsight(r.state, [run for run in runs if run[0]], CONTEXT)
        self.seconds += self.controller.cost.looking_back(len(r.seen))
        r.seen.clear()

    def _judge(self, draft: "Growing") -> None:
        r, right = draft.request, draft.right
        accepted = judged(right)
        if self.fixed is not None:
            pass
        elif draft.choice.source == "lookup":
            accepted = judged(draft.looked_up[: draft.verified])
            counts = sum(accepted), draft.verified
            self.controller.observe_lookup(r.state, draft.choice, CONTEXT, *counts)
        elif right:
            told = (r.state, draft.choice, CONTEXT, accepted, draft.confidences)
            alone = draft.stopper.alone
            self.controller.observe_draft(*told, num_passes=len(right), alone=alone)
        else:
            self.controller.observe_plain(r.state, draft.choice, CONTEXT)
        new = min(sum(accepted) + 1, r.tokens - r.emitted)
        if draft.looked_up and self.fixed is None:  # the text tells, taken or not
            told = judged(draft.looked_up)[:new]
            r.state.add_lookup(r.match_length, told, stored=False)
        if right:
            r.seen.clear()
        elif self.fixed is None and not r.state.last:
            r.seen += [r.draft(i) for i in range(new)]
            del r.seen[:-MOST_SEEN]
            r.state.next_look -= new
        r.emitted += new
        self.emitted += new

    def _looked_up(self, r: Request) -> list[bool]:
        count = min(r.guessed, r.tokens - r.emitted - 1)
        return [self._guesses.random() < r.guess_right for _ in range(count)]

    def _choices(self, going: Sequence[Request]) -> list[Choice]:
        rooms = [r.tokens - r.emitted - 1 for r in going]
        if self.fixed is not None:
            return [Choice("early_exit", min(self.fixed, room)) for room in rooms]
        asks = [
            Ask(
                r.state,
                CONTEXT,
                room,
                guessed(min(r.guessed, room), r.match_length),
                left=room + 1,
                looks_back=self.looks_back and len(going) == 1,
            )
            for r, room in zip(going, rooms, strict=True)
        ]
        return self.controller.choose(asks, drafts=True)

    @property
    def rate(self) -> float:
        """Tokens per second of the table."""
        return self.emitted / self.seconds


def judged(right: Sequence[bool]) -> Sequence[bool]:
    """Right ones, and the first that is not."""
    return right[: right.index(False) + 1] if False in right else right


def paper(
    cost: CostTable,
    fixed: int | None = None,
    prior: Sequence[float] = (),
    calibration: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Paper:
    return Paper(Controller(cost, prior, calibration, follows_clock=False), fixed)


def steady(acceptance: float, *, count: int, tokens: int = 128, **how) -> list[Request]:
    return [Request(tokens, lambda _: acceptance, **how) for _ in range(count)]


def plain_rate(cost) -> float:
    return 1.0 / cost.verify_pass(1, CONTEXT)


def against_plain(run: Paper) -> float:
    return run.rate / plain_rate(run.controller.cost)
