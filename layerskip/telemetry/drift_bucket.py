"""One bucket of a ``DriftMonitor``: it learns what is usual, then watches."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from layerskip.telemetry.baseline import (
    MOST_KEPT,
    SIGNS,
    Baseline,
    BinnedDraft,
    Direction,
    OpenRequest,
    Reference,
    Repeats,
    Surprise,
)
from layerskip.telemetry.cusum import Cusum

MOST_OPEN = 4096  # requests: some may never end
MOST_POINTS = 400

Watched = Literal["accepted", "surprise"]

# Drafts watched, and the largest down and up since the point before; an alarm is at 1.
PathPoint = tuple[int, float, float]


@dataclass(frozen=True)
class Alarm:
    """A shift that was found.

    Attributes:
        bucket: it is in.
        watched: of each draft, its "accepted" tokens, or their "surprise": how much more is
            accepted than the draft's confidence spoke for, in standard deviations.
        direction: "down": fewer drafted tokens are accepted.
        request_id: whose draft raised it.
        num_drafts: watched in the bucket until then.
        since: of these, the last ones, in which the shift was gathered.
        before: what is usual of what is watched (``Baseline.usual``).
        now: the same of the last ones, but for requests that had said enough.
        labelled: whether buckets are values of a label; that of "" has the requests without one.
    """

    bucket: str
    watched: Watched
    direction: Direction
    request_id: str
    num_drafts: int
    since: int
    before: float
    now: float
    labelled: bool = False

    def __str__(self) -> str:
        verb, side = ("fell", "below") if self.direction == "down" else ("rose", "above")
        whose = self.bucket or ("requests without a label" if self.labelled else "all requests")
        found = f"{whose}: accepted tokens a draft {verb}"
        if self.watched == "accepted":
            found += f" from {self.before:.2f} to {self.now:.2f}"
        else:
            found += f" {abs(self.now - self.before):.2f} standard deviations {side}"
            found += " what its confidence used to mean"
        return f"{found} over {self.since} drafts"


@dataclass(frozen=True)
class DriftState:
    """Where a bucket stands.

    Attributes:
        baseline: None while it is learnt.
        num_requests: learnt from, so far.
        num_drafts: watched.
        down, up: the sums of what is watched, the larger of both, in parts of the threshold: an
            alarm is at 1.
        num_down_alarms, num_up_alarms: so far.
        last_alarm: if there was one.
    """

    baseline: Baseline | None
    num_requests: int
    num_drafts: int
    down: float
    up: float
    num_down_alarms: int
    num_up_alarms: int
    last_alarm: Alarm | None


class _Open:
    """A request that goes on.

    Attributes:
        watched: its drafts so far, in sums.
        known: those whose confidence is known, while a baseline is learnt.
        repeats: of these.
    """

    __slots__ = ("known", "repeats", "watched")

    def __init__(self) -> None:
        self.watched: dict[Watched, OpenRequest] = {w: OpenRequest() for w in get_args(Watched)}
        self.known: list[BinnedDraft] = []
        self.repeats = Repeats()


class WatchedBucket:
    """A bucket that learns its baseline, then is watched."""

    def __init__(self, name: str, *, labelled: bool) -> None:
        self.name, self.labelled = name, labelled
        self._open: dict[str, _Open] = {}
        self._alarms: dict[Direction, int] = {"down": 0, "up": 0}
        self._last: Alarm | None = None
        self.relearn()

    def relearn(self) -> None:
        """Begin anew."""
        self._tests: dict[Watched, Cusum] = {}
        self._reference = Reference()
        self._known: list[list[BinnedDraft]] = []
        self._open.clear()
        self.path = _Path()

    @property
    def baseline(self) -> Baseline | None:
        """None while it is learnt."""
        return self._tests["accepted"].baseline if self._tests else None

    @property
    def num_requests(self) -> int:
        """Learnt from, so far."""
        return self._reference.num_requests

    def learnt(self) -> Baseline:
        """From the requests so far."""
        return replace(self._reference.baseline(), surprise=Surprise.of(self._known))

    def watch(self, tests: dict[Watched, Cusum]) -> None:
        """From now on."""
        self._tests = tests
        self._known.clear()
        self._open.clear()  # what they did so far was learnt from, or is of before

    def observe(
        self,
        request_id: str,
        accepted: int | None,
        draft: BinnedDraft | None,
        finished: bool,
    ) -> list[Alarm]:
        """Count a round; ``draft`` is what is known of one that was judged in full."""
        request = self._open.get(request_id)
        if request is None:
            if len(self._open) >= MOST_OPEN:  # the oldest was given up without an end
                self._end(next(iter(self._open)))
            request = self._open[request_id] = _Open()
        if draft is not None:
            draft = request.repeats.place(draft)
        alarms: list[Alarm] = []
        if accepted is not None and self._tests:
            alarms = self._step(request_id, request, accepted, draft)
        elif accepted is not None:
            request.watched["accepted"].add(accepted)
            if draft is not None and len(request.known) < MOST_KEPT:
                request.known.append(draft)
        if finished:
            self._end(request_id)
        return alarms

    def _end(self, request_id: str) -> None:
        request = self._open.pop(request_id)
        if not self._tests:
            self._reference.add(request.watched["accepted"])
            self._known += [request.known] if request.known else []

    def _step(
        self, request_id: str, request: _Open, accepted: int, draft: BinnedDraft | None
    ) -> list[Alarm]:
        """Watch one draft."""
        usual, alarms = self._tests["accepted"].baseline, []
        values: dict[Watched, float] = {"accepted": accepted}
        if usual.surprise is not None and draft is not None:
            values["surprise"] = usual.surprise.of_draft(draft)
        for watched, value in values.items():
            test = self._tests[watched]
            found = test.observe(request.watched[watched], value)
            if found is not None:
                direction, since, now = found
                of = (self.num_drafts, since, test.baseline.usual, now)
                alarms.append(
                    Alarm(self.name, watched, direction, request_id, *of, labelled=self.labelled)
                )
                self._alarms[direction] += 1
        self._last = alarms[-1] if alarms else self._last
        raised = {alarm.direction for alarm in alarms}
        self.path.add(*(1.0 if d in raised else self._height(d) for d, _ in SIGNS))
        return alarms

    @property
    def num_drafts(self) -> int:
        """Watched."""
        return self._tests["accepted"].num_drafts if self._tests else 0

    def _height(self, direction: Direction) -> float:
        heights = [test.sums[direction] / test.threshold for test in self._tests.values()]
        return max(heights, default=0.0)

    def state(self) -> DriftState:
        return DriftState(
            self.baseline,
            self.num_requests,
            self.num_drafts,
            self._height("down"),
            self._height("up"),
            self._alarms["down"],
            self._alarms["up"],
            self._last,
        )


class _Path:
    """The course of two sums in a bounded number of points."""

    def __init__(self) -> None:
        self.points: list[PathPoint] = []
        self._stride, self._count = 1, 0

    def add(self, down: float, up: float) -> None:
        if self._count % self._stride:
            _, *before = self.points.pop()
            down, up = max(down, before[0]), max(up, before[1])
        elif len(self.points) == MOST_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [(b[0], max(a[1], b[1]), max(a[2], b[2])) for a, b in pairs]
            self._stride *= 2
        self._count += 1
        self.points.append((self._count, down, up))
