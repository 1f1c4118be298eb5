"""Drift: an alarm when a bucket's drafts are no longer accepted as they used to be.

``cusum`` has the test, what it can find and what it cannot; ``baseline`` what it watches.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from layerskip.outputs import Round
from layerskip.params import check_integer, check_number
from layerskip.policy import task_of
from layerskip.telemetry.baseline import LEAST_REQUESTS, Baseline, BinnedDraft
from layerskip.telemetry.buckets import MOST_NAMES, OTHER, counted_as
from layerskip.telemetry.cusum import DRAFTS_PER_FALSE_ALARM, SHIFT, Cusum
from layerskip.telemetry.drift_bucket import Alarm, DriftState, PathPoint, Watched, WatchedBucket

REFERENCE_REQUESTS = 100
MOST_ACCEPTED = 1_000_000  # tokens of a draft: what a baseline can have
HEAVY_TAILS = 2  # times as many false alarms as of normal steps: sure tokens are seldom wrong


class DriftMonitor:
    """Watches acceptance by bucket: a callable for ``on_round=``, from any number of threads.

    A bucket learns its baseline from its first requests, unless it is given one, and is watched
    from then on: the accepted tokens of each draft, and, where drafts tell their confidence
    (``Round.confidences``), how far these are from what it spoke for. The first finds any shift of
    acceptance, the later the more requests differ; the second finds one of the drafter soon, and
    none of text that its confidence follows. Drafts are counted, not rounds: automatic drafting
    that no longer pays soon hardly drafts, and takes more rounds to tell.

    After an alarm the sum begins again from zero: alarms repeat while the shift lasts. ``relearn``
    takes what is now for usual. Rounds that drafted nothing do not count. With
    ``num_draft_tokens="auto"`` a change of load changes how much is drafted, and so what is
    accepted of a draft: that is a shift, too.

    Args:
        label: whose value is the bucket; None: all requests are one. Beyond 100 values the rest is
            one bucket.
        baselines: of buckets by name, such as an earlier monitor's ``baselines()``
            (``Baseline.to_dict`` and ``from_dict`` keep them as JSON).
        num_reference_requests: that a baseline is learnt from, 20 at least.
        shift: to be found, in standard deviations of what is watched.
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
        on_alarm: Callable[[Alarm], None] | None = None,
    ) -> None:
        check_integer("num_reference_requests", num_reference_requests, LEAST_REQUESTS)
        check_number("shift", shift, 0.1, 3.0)
        check_number("drafts_per_false_alarm", drafts_per_false_alarm, 1e3, 1e12)
        if on_alarm is not None and not callable(on_alarm):
            raise TypeError(f"on_alarm must be callable, or None, got {on_alarm!r}")
        _check_baselines(baselines)
        named = len(set(baselines or ()) - {OTHER})
        if named > MOST_NAMES:
            raise ValueError(f"baselines must be of at most {MOST_NAMES} buckets, got {named}")
        self._label, self._on_alarm = label, on_alarm
        self._num_reference_requests = num_reference_requests
        self._shift, self._drafts_per_false_alarm = shift, drafts_per_false_alarm
        self._lock = threading.Lock()
        self._buckets: dict[str, WatchedBucket] = {}
        for name, baseline in (baselines or {}).items():
            self._bucket(name).watch(self._tests(baseline))

    def __call__(self, record: Round) -> None:
        self.observe(
            task_of(record.labels, self._label),
            record.request_id,
            record.num_accepted_tokens if record.num_draft_tokens else None,
            confidences=record.confidences,
            looked_up=record.drafter == "lookup",
            finished=record.finish_reason is not None,
        )

    def observe(
        self,
        bucket: str,
        request_id: str,
        accepted: int | None,
        *,
        confidences: Sequence[float] | NDArray[Any] | None = (),
        looked_up: bool = False,
        finished: bool = False,
    ) -> None:
        """Count a round that is in no ``Round``.

        Args:
            bucket: of the request.
            request_id: the same for all rounds of a request.
            accepted: tokens; None where nothing was drafted.
            confidences: of all drafted tokens; none, or None, where they are not known.
            looked_up: whether the tokens were, rather than drafted by an early exit.
            finished: whether it was the request's last.

        Raises:
            TypeError, ValueError: no such number of tokens can be accepted, or confidences are no
                numbers; nothing is counted.
        """
        draft = None
        if accepted is not None:  # one NaN in a sum would hide all shifts to come
            check_integer("accepted", accepted, 0, MOST_ACCEPTED)
            try:
                if confidences is not None and len(confidences) and not finished:
                    draft = BinnedDraft.of(accepted, confidences, looked_up=looked_up)
            except TypeError:
                what = "a sequence of numbers, or None"
                raise TypeError(f"confidences must be {what}, got {confidences!r:.80}") from None
        with self._lock:
            watched = self._bucket(bucket)
            alarms = watched.observe(request_id, accepted, draft, finished)
            enough = watched.num_requests >= self._num_reference_requests
            if watched.baseline is None and enough:
                watched.watch(self._tests(watched.learnt()))
        for alarm in alarms:
            if self._on_alarm is not None:
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

    def _bucket(self, name: str) -> WatchedBucket:
        name = counted_as(name, self._buckets)
        if name not in self._buckets:
            self._buckets[name] = WatchedBucket(name, labelled=self._label is not None)
        return self._buckets[name]

    def _tests(self, baseline: Baseline) -> dict[Watched, Cusum]:
        """Of all that is known of a bucket.

        Two tests share the false alarms, and are surer of their baselines: it takes one of them.
        """
        rare = self._drafts_per_false_alarm
        if baseline.surprise is None:
            return {"accepted": Cusum(baseline, self._shift, rare)}
        surprise = baseline.surprise.baseline
        return {
            "accepted": Cusum(baseline, self._shift, 2 * rare, errors=2),
            "surprise": Cusum(surprise, self._shift, 2 * HEAVY_TAILS * rare, errors=2),
        }


def _check_baselines(baselines: object) -> None:
    """Raise unless they are baselines by name, or None."""
    rule = "must be a mapping from buckets to Baseline (Baseline.from_dict makes one of a dict)"
    if not isinstance(baselines, Mapping | None):
        raise TypeError(f"baselines {rule}, got {type(baselines).__name__}")
    for name, baseline in (baselines or {}).items():
        if not isinstance(name, str) or not isinstance(baseline, Baseline):
            raise TypeError(f"baselines {rule}, got {type(baseline).__name__} for {name!r}")


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

    def shown(self, bucket: str) -> str:
        """A bucket's name for people; where there are several, that of "" lacks the label."""
        return bucket or ("no label" if len(self.states) > 1 else "all requests")


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
            task_of(entry["labels"], label),
            entry["request_id"],
            entry["num_accepted_tokens"] if entry["num_draft_tokens"] else None,
            confidences=entry.get("confidences") or (),
            looked_up=entry.get("mode") == "lookup",
            finished=entry["finish_reason"] is not None,
        )
    return Drift(monitor.states(), tuple(alarms), monitor.paths())
