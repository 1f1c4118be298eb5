"""Drift: an alarm when a bucket's drafts are no longer accepted as they used to be.

``cusum`` has the test, what it can find and what it cannot.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from layerskip.outputs import Round
from layerskip.params import check_integer, check_number
from layerskip.telemetry.cusum import (
    DRAFTS_PER_FALSE_ALARM,
    LEAST_REQUESTS,
    MOST_OPEN,
    SHIFT,
    Baseline,
    Cusum,
    Direction,
    OpenRequest,
    Reference,
)

REFERENCE_REQUESTS = 100
MOST_BUCKETS = 100  # a label may have more values than a monitor or a scrape should
MOST_POINTS = 400
OTHER_BUCKET = "(other)"


# Drafts watched, and the largest down and up since the point before; an alarm is at 1.
PathPoint = tuple[int, float, float]


@dataclass(frozen=True)
class Alarm:
    """A shift that was found.

    Attributes:
        bucket: it is in.
        direction: "down": fewer drafted tokens are accepted.
        request_id: whose draft raised it.
        num_drafts: watched in the bucket until then.
        since: of these, the last ones, in which the shift was gathered.
        before: accepted tokens a draft in the baseline.
        now: the same in the last ones.
    """

    bucket: str
    direction: Direction
    request_id: str
    num_drafts: int
    since: int
    before: float
    now: float

    def __str__(self) -> str:
        verb = "fell" if self.direction == "down" else "rose"
        return (
            f"{self.bucket or 'all requests'}: accepted tokens a draft {verb} from "
            f"{self.before:.2f} to {self.now:.2f} over {self.since} drafts"
        )


@dataclass(frozen=True)
class DriftState:
    """Where a bucket stands.

    Attributes:
        baseline: None while it is learnt.
        num_requests: learnt from, so far.
        num_drafts: watched.
        down, up: the two sums, in parts of the threshold: an alarm is at 1.
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


class DriftMonitor:
    """Watches acceptance by bucket: a callable for ``on_round=``, from any number of threads.

    A bucket learns its baseline from its first requests, unless it is given one, and is watched
    from then on. After an alarm the sum begins again from zero: alarms repeat while the shift
    lasts. ``relearn`` takes what is now for usual. Rounds that drafted nothing do not count. With
    ``num_draft_tokens="auto"`` a change of load changes how much is drafted, and so what is
    accepted of a draft: that is a shift, too.

    Args:
        label: whose value is the bucket; None: all requests are one. Beyond 100 values the rest is
            one bucket.
        baselines: of buckets by name, such as an earlier monitor's ``baselines()``.
        num_reference_requests: that a baseline is learnt from, 20 at least.
        shift: to be found, in standard deviations of accepted tokens a draft.
        drafts_per_false_alarm: at which the threshold aims, both directions together. A baseline
            that is learnt and drafts that are not normal cost a part of it.
        on_alarm: called with each ``Alarm``, in the thread that decodes; what it raises goes
            through.
    """

    def __init__(
        self,
        *,
        label: str | None = None,
        baselines: Mapping[str, Baseline] | None = None,
        num_reference_requests: int = REFERENCE_REQUESTS,
        shift: float = SHIFT,
        drafts_per_false_alarm: float = DRAFTS_PER_FALSE_ALARM,
        on_alarm: Callable[[Alarm], None] = lambda alarm: None,
    ) -> None:
        check_integer("num_reference_requests", num_reference_requests, LEAST_REQUESTS)
        check_number("shift", shift, 0.1, 3.0)
        check_number("drafts_per_false_alarm", drafts_per_false_alarm, 1e3, 1e12)
        self._label, self._on_alarm = label, on_alarm
        self._num_reference_requests = num_reference_requests
        self._shift, self._drafts_per_false_alarm = shift, drafts_per_false_alarm
        self._lock = threading.Lock()
        self._buckets: dict[str, _Bucket] = {}
        for name, baseline in (baselines or {}).items():
            self._buckets[name] = _Bucket(name, self._cusum(baseline))

    def __call__(self, record: Round) -> None:
        self.observe(
            self._bucket_of(record.labels),
            record.request_id,
            record.num_accepted_tokens if record.num_draft_tokens else None,
            finished=record.finish_reason is not None,
        )

    def observe(
        self, bucket: str, request_id: str, accepted: int | None, *, finished: bool = False
    ) -> None:
        """Count a round that is in no ``Round``.

        Args:
            bucket: of the request.
            request_id: the same for all rounds of a request.
            accepted: tokens; None where nothing was drafted.
            finished: whether it was the request's last.
        """
        with self._lock:
            watched = self._bucket(bucket)
            alarm = watched.observe(request_id, accepted, finished)
            enough = watched.reference.num_requests >= self._num_reference_requests
            if watched.cusum is None and enough:
                watched.watch(self._cusum(watched.reference.baseline()))
        if alarm is not None:
            self._on_alarm(alarm)

    def states(self) -> dict[str, DriftState]:
        """Every bucket's, as it is now."""
        with self._lock:
            return {name: bucket.state() for name, bucket in self._buckets.items()}

    def baselines(self) -> dict[str, Baseline]:
        """Those that are known, by bucket."""
        states = self.states()
        return {name: s.baseline for name, s in states.items() if s.baseline is not None}

    def paths(self) -> dict[str, tuple[PathPoint, ...]]:
        """How the sums of each bucket went."""
        with self._lock:
            return {name: tuple(bucket.path.points) for name, bucket in self._buckets.items()}

    def relearn(self, bucket: str) -> None:
        """Forget a bucket's baseline: its next requests are what is usual.

        Raises:
            ValueError: no such bucket was seen.
        """
        with self._lock:
            if bucket not in self._buckets:
                seen = ", ".join(map(repr, self._buckets)) or "none"
                raise ValueError(f"there is no bucket {bucket!r}; seen so far: {seen}")
            self._buckets[bucket].relearn()

    def _bucket_of(self, labels: Mapping[str, str]) -> str:
        return labels.get(self._label, "") if self._label is not None else ""

    def _bucket(self, name: str) -> "_Bucket":
        if name not in self._buckets and len(self._buckets) >= MOST_BUCKETS:
            name = OTHER_BUCKET
        return self._buckets.setdefault(name, _Bucket(name, None))

    def _cusum(self, baseline: Baseline) -> Cusum:
        return Cusum(baseline, self._shift, self._drafts_per_false_alarm)


class _Bucket:
    """A bucket that learns its baseline, then is watched."""

    def __init__(self, name: str, cusum: Cusum | None) -> None:
        self.name, self.cusum, self.reference = name, cusum, Reference()
        self._open: dict[str, OpenRequest] = {}
        self._alarms: dict[Direction, int] = {"down": 0, "up": 0}
        self._last: Alarm | None = None
        self.path = _Path()

    def observe(self, request_id: str, accepted: int | None, finished: bool) -> Alarm | None:
        request = self._open.get(request_id)
        if request is None:
            if len(self._open) >= MOST_OPEN:  # the oldest was given up without an end
                del self._open[next(iter(self._open))]
            request = self._open[request_id] = OpenRequest()
        found = None
        if accepted is not None and self.cusum is not None:
            found = self.cusum.observe(request, accepted)
            self.path.add(
                *(
                    1.0 if found and found[0] == direction else value / self.cusum.threshold
                    for direction, value in self.cusum.sums.items()
                )
            )
        elif accepted is not None:
            request.add(accepted)
        if finished:
            del self._open[request_id]
            if self.cusum is None:
                self.reference.add(request)
        if self.cusum is None or found is None:
            return None
        direction, since, now = found
        base = self.cusum.baseline
        self._alarms[direction] += 1
        self._last = Alarm(
            self.name, direction, request_id, self.cusum.num_drafts, since, base.mean, now
        )
        return self._last

    def watch(self, cusum: Cusum) -> None:
        self.cusum = cusum
        self._open.clear()  # what they did so far was learnt from, or is of before

    def relearn(self) -> None:
        self.cusum, self.reference = None, Reference()
        self._open.clear()

    def state(self) -> DriftState:
        cusum = self.cusum
        return DriftState(
            None if cusum is None else cusum.baseline,
            self.reference.num_requests,
            0 if cusum is None else cusum.num_drafts,
            0.0 if cusum is None else cusum.sums["down"] / cusum.threshold,
            0.0 if cusum is None else cusum.sums["up"] / cusum.threshold,
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


@dataclass(frozen=True)
class Drift:
    """What a monitor finds in recorded rounds.

    Attributes:
        states: of each bucket, at the end.
        alarms: in the order in which they were raised.
        paths: of each bucket, up to 400 points, for plots.
    """

    states: Mapping[str, DriftState]
    alarms: tuple[Alarm, ...]
    paths: Mapping[str, tuple[PathPoint, ...]]


def find_drift(
    rounds: Iterable[Mapping[str, Any]],
    *,
    label: str | None = None,
    num_reference_requests: int = REFERENCE_REQUESTS,
) -> Drift:
    """Run a monitor over recorded rounds, in the order in which they came.

    Args:
        rounds: entries as ``Round.to_dict()`` makes them, of one arm.
        label, num_reference_requests: as of ``DriftMonitor``.
    """
    alarms: list[Alarm] = []
    monitor = DriftMonitor(
        label=label, num_reference_requests=num_reference_requests, on_alarm=alarms.append
    )
    for entry in rounds:
        monitor.observe(
            entry["labels"].get(label, "") if label is not None else "",
            entry["request_id"],
            entry["num_accepted_tokens"] if entry["num_draft_tokens"] else None,
            finished=entry["finish_reason"] is not None,
        )
    return Drift(monitor.states(), tuple(alarms), monitor.paths())
