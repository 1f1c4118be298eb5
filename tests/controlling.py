"""Requests whose acceptance is known, decoded on paper: counted passes times a cost table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from layerskip.controller import Ask, Choice, Controller, Stopper
from layerskip.cost import CostTable, Curve
from layerskip.estimates import RowState

CONTEXT = 100


def table(c: float = 0.2, *, quantum: int = 8, slope: float = 0.02, far: float = 0.0) -> CostTable:
    """A plain pass takes 1; 64 rows take ``1 + 64 slope``; drafts ``c`` of it all.

    Args:
        far: what 1000 slots of context add.
    """

    def curve(unit: float) -> Curve:
        rows = (1, 64)
        return Curve(
            rows,
            (0, 1000),
            tuple(tuple(unit * (1 + more + slope * (n - 1)) for n in rows) for more in (0.0, far)),
        )

    free = Curve((1,), (0,), ((0.0,),))
    return CostTable(curve(c), free, curve(1.0), 0.0, quantum, {})


@dataclass
class Request:
    """A request that emits ``tokens`` tokens.

    Attributes:
        acceptance: of a drafted token, by the number of tokens emitted so far.
        telling: whether confidence tells right drafts from wrong ones.
        boast: confidence is at least this.
    """

    tokens: int
    acceptance: Callable[[int], float]
    telling: bool = False
    boast: float = 0.5
    emitted: int = 0
    state: RowState | None = None


@dataclass
class Paper:
    """A decoder that only counts.

    Attributes:
        seconds: of all rounds; ``plain``: of as many plain passes as were needed without drafts.
        chosen: tokens drafted, round by round.
    """

    controller: Controller
    fixed: int | None = None
    random: Random = field(default_factory=lambda: Random(0))
    seconds: float = 0.0
    emitted: int = 0
    num_rounds: int = 0
    chosen: list[int] = field(default_factory=list)

    def run(self, requests: Sequence[Request], *, rows: int = 1) -> "Paper":
        """Decode all requests, ``rows`` at a time."""
        waiting, going = list(requests)[::-1], []
        while waiting or going:
            while waiting and len(going) < rows:
                going.append(waiting.pop())
            self.round(going)
            going = [r for r in going if r.emitted < r.tokens]
        return self

    def round(self, going: Sequence[Request]) -> None:
        for r in going:
            r.state = r.state or self.controller.row("greedy")
        choices = self._choices(going)
        drafts = [self._draft(r, c) for r, c in zip(going, choices, strict=True)]
        counts = [len(right) for right, _ in drafts]
        cost = self.controller.cost
        for i in range(max(counts)):
            drafting = sum(n > i for n in counts)
            self.seconds += cost.draft_pass(drafting, CONTEXT, sequences=drafting)
        verified = sum(counts) + len(going)
        self.seconds += cost.verify_pass(
            verified, CONTEXT, sequences=len(going), longest=max(counts) + 1
        )
        for r, (right, confidences) in zip(going, drafts, strict=True):
            accepted = right[: right.index(False) + 1] if False in right else right
            if right:
                self.controller.observe_draft(r.state, CONTEXT, accepted, confidences)
            else:
                self.controller.observe_plain(r.state, CONTEXT)
            new = min(sum(accepted) + 1, r.tokens - r.emitted)
            r.emitted += new
            self.emitted += new
        self.num_rounds += 1
        self.chosen.append(max(counts))

    def _choices(self, going: Sequence[Request]) -> list[Choice]:
        rooms = [r.tokens - r.emitted - 1 for r in going]
        if self.fixed is not None:
            return [Choice("early_exit", min(self.fixed, room)) for room in rooms]
        asks = [Ask(r.state, CONTEXT, room) for r, room in zip(going, rooms, strict=True)]
        return self.controller.choose(asks, drafts=True)

    def _draft(self, r: Request, choice: Choice) -> tuple[list[bool], list[float]]:
        """Which of the drafted tokens are right, and their confidences."""
        right: list[bool] = []
        stopper = Stopper(r.state, choice)
        while len(right) < choice.num_draft_tokens:
            chance = r.acceptance(r.emitted)
            right.append(self.random.random() < chance)
            sure = 0.98 if right[-1] else 0.15
            confidence = sure if r.telling else max(r.boast, chance)
            if self.fixed is None and not stopper.goes_on(confidence):
                break
        return right, stopper.confidences

    @property
    def rate(self) -> float:
        """Tokens per second of the table."""
        return self.emitted / self.seconds


def paper(cost: CostTable, fixed: int | None = None, prior: Sequence[float] = ()) -> Paper:
    return Paper(Controller(cost, prior, follows_clock=False), fixed)


def steady(acceptance: float, *, count: int, tokens: int = 128, **how) -> list[Request]:
    return [Request(tokens, lambda _: acceptance, **how) for _ in range(count)]
