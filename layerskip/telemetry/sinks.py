"""Where rounds go: callables for ``on_round=``, each called with every ``Round``.

Counts follow vLLM's: a draft is a round that drafted; a position is that of a drafted token in its
draft, from 0; the token that verification adds to the accepted ones is not among them. A prefill
drafts nothing, and is no round here.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerskip.cost import CostTable
from layerskip.outputs import Round
from layerskip.policy import task_of
from layerskip.telemetry.buckets import counted_as
from layerskip.telemetry.drift import DriftMonitor
from layerskip.telemetry.gauges import Drafts, ToldByRounds
from layerskip.telemetry.runs import JsonLines

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

EDGES = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16)  # of the histogram of accepted tokens


class MemorySink:
    """Keeps rounds in a list.

    Attributes:
        rounds: all so far, in the order in which they ended.
    """

    def __init__(self) -> None:
        self.rounds: list[Round] = []

    def __call__(self, record: Round) -> None:
        self.rounds.append(record)


class JsonlSink(AbstractContextManager["JsonlSink"]):
    """Appends each round to a file as a line of ``Round.to_dict()``, with the ``time`` at which it
    was written, in seconds since 1970: no text, no token ids. ``drift.find_drift`` reads them.

    A killed process loses no line; one that was cut off is dropped by whoever writes next. Threads
    and processes may share the file (on Windows, threads alone).

    Args:
        path: of the file.

    Raises:
        ValueError: it cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self._lines = JsonLines(path)

    def __call__(self, record: Round) -> None:
        self._lines.append([{"time": round(time.time(), 3), **record.to_dict()}])

    def close(self) -> None:
        """Bring all lines to the disk, and let go of the file."""
        self._lines.sync()
        self._lines.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class PrometheusSink:
    """Counts rounds for Prometheus, through its client library.

    Rounds are counted in plain numbers; metrics are made of them when they are asked for. Beside
    vLLM's counters: ``_num_emitted_tokens_total``, ``_draft_seconds_total`` and
    ``_verify_seconds_total`` (wall time of the passes, shared out among the rows in them; prefills
    are left out), ``_rounds_total{mode}``, the histogram ``_accepted_per_round{bucket}`` of rounds
    that drafted, and gauges: ``_k_current``, tokens drafted in the last round; ``_draft_ece``, the
    calibration error of the draft's confidence; and of about the last 500 drafts, in units of a
    plain pass of as many rows as shared their rounds, ``_cost_ratio_c``, a draft pass,
    ``_verify_overhead_beta``, what verifying takes beyond one plain pass, and
    ``_inequality_margin{bucket}``, ``a - (1 + d c + beta)``: drafting pays above 0. (a: tokens
    that a row emits a draft, the bonus among them; d: draft passes.)

    Args:
        registry: to be in; None: the library's own, which its ``start_http_server`` serves.
        prefix: of every name. With "vllm:spec_decode" the counters have vLLM's names.
        label: whose value is the bucket; None: all are one. Above 100 values the rest is one.
        cost: table of passes, as ``lm.controller.cost``, or of greedy requests alone
            ``lm.controller.cost.of(greedy=True)``; without it, no c, beta and margin.
        drift: a ``DriftMonitor``, which ``on_round`` has to call, too; adds its alarms,
            ``_drift_alarms_total{bucket,direction}``, and how near the next one is, ``_drift``.

    Raises:
        ValueError: prometheus-client is missing, or the names are in the registry already.
        TypeError: cost is no table.
    """

    def __init__(
        self,
        registry: "CollectorRegistry | None" = None,
        *,
        prefix: str = "selfspec",
        label: str | None = None,
        cost: CostTable | None = None,
        drift: DriftMonitor | None = None,
    ) -> None:
        try:
            import prometheus_client
        except ImportError:
            raise ValueError(
                'PrometheusSink needs prometheus-client: pip install "layerskip[report]"'
            ) from None
        if not isinstance(cost, CostTable | None):  # scrapes would fail, from a first draft on
            raise TypeError(
                f"cost must be a CostTable or None, got {cost!r}; CostTable.load(path) reads a file"
            )
        self._prefix, self._label, self._cost, self._drift = prefix, label, cost, drift
        self._lock = threading.Lock()
        self._modes: Counter[str] = Counter()
        self._per_position: Counter[int] = Counter()
        self._num_drafts = self._drafted = self._accepted = self._emitted = self._current = 0
        self._draft_seconds = self._verify_seconds = 0.0
        self._calibration = ToldByRounds()
        self._all, self._buckets = Drafts(), dict[str, Drafts]()
        self._registry = prometheus_client.REGISTRY if registry is None else registry
        self._registry.register(self)

    def __call__(self, record: Round) -> None:
        with self._lock:
            self._emitted += len(record.token_ids)
            if record.index == 0:
                return
            drafted, accepted = record.num_draft_tokens, record.num_accepted_tokens
            self._modes[record.mode] += 1
            self._draft_seconds += record.draft_seconds / record.rows
            self._verify_seconds += record.verify_seconds / record.rows
            self._current = drafted
            if not drafted:
                return
            self._num_drafts += 1
            self._drafted += drafted
            self._accepted += accepted
            for position in range(accepted):
                self._per_position[position] += 1
            self._calibration.observe(record)
            for bucket in (self._all, self._bucket(record)):
                bucket.observe(record)

    def _bucket(self, record: Round) -> Drafts:
        name = counted_as(task_of(record.labels, self._label), self._buckets)
        return self._buckets.setdefault(name, Drafts())

    def close(self) -> None:
        """Leave the registry."""
        self._registry.unregister(self)

    def collect(self) -> Iterable["Metric"]:
        """What the registry asks for at every scrape."""
        with self._lock:
            own = [*self._counters(), self._histogram(), *self._gauges()]
        return own if self._drift is None else [*own, *self._drifts(self._drift)]

    describe = collect  # so that a registry meets names that it has already

    def _family(self, kind: str, name: str, what: str, *labels: str) -> Any:
        from prometheus_client import core

        return getattr(core, f"{kind}MetricFamily")(f"{self._prefix}_{name}", what, labels=labels)

    def _counters(self) -> Iterator["Metric"]:
        family = partial(self._family, "Counter")
        for name, what, value in (
            ("num_drafts", "Rounds that drafted.", self._num_drafts),
            ("num_draft_tokens", "Drafted tokens.", self._drafted),
            ("num_accepted_tokens", "Drafted tokens that were emitted.", self._accepted),
            ("num_emitted_tokens", "Emitted tokens.", self._emitted),
            ("draft_seconds", "Wall time of drafting.", self._draft_seconds),
            ("verify_seconds", "Wall time of verifying.", self._verify_seconds),
        ):
            counter = family(name, what)
            counter.add_metric([], value)
            yield counter
        positions = family("num_accepted_tokens_per_pos", "By place in the draft.", "position")
        for position in range(max(self._per_position, default=-1) + 1):
            positions.add_metric([str(position)], self._per_position[position])
        modes = family("rounds", "Rounds after the prefill, by what drafted.", "mode")
        for mode in ("plain", "early_exit", "lookup"):
            modes.add_metric([mode], self._modes[mode])
        yield from (positions, modes)

    def _histogram(self) -> "Metric":
        what = "Accepted tokens of rounds that drafted."
        histogram = self._family("Histogram", "accepted_per_round", what, "bucket")
        for label, bucket in self._buckets.items():
            counts = [(str(float(edge)), sum(bucket.accepted[: edge + 1])) for edge in EDGES]
            total = sum(n * count for n, count in enumerate(bucket.accepted))
            histogram.add_metric([label], [*counts, ("+Inf", sum(bucket.accepted))], total)
        return histogram

    def _gauges(self) -> Iterator["Metric"]:
        family = partial(self._family, "Gauge")
        current = family("k_current", "Tokens drafted in the last round.")
        current.add_metric([], self._current)
        error = family("draft_ece", "Expected calibration error of the draft's confidence.")
        if self._calibration.num_tokens:
            error.add_metric([], self._calibration.error)
        c = family("cost_ratio_c", "A draft pass, in plain passes of as many rows.")
        beta = family("verify_overhead_beta", "Verifying, beyond one such pass, in such passes.")
        margin = family(
            "inequality_margin", "a - (1 + d c + beta): drafting pays above 0.", "bucket"
        )
        if self._cost is not None and self._num_drafts:
            units = self._all.units(self._cost)
            c.add_metric([], units[0])
            beta.add_metric([], units[1])
            for label, bucket in self._buckets.items():
                margin.add_metric([label], bucket.margin(self._cost))
        yield from (current, error, c, beta, margin)

    def _drifts(self, drift: DriftMonitor) -> Iterator["Metric"]:
        by, what = ("bucket", "direction"), "Gathered shift of acceptance; 1 is an alarm."
        near = self._family("Gauge", "drift", what, *by)
        alarms = self._family("Counter", "drift_alarms", "Shifts of acceptance.", *by)
        for bucket, state in drift.states().items():
            for direction, gathered, count in (
                ("down", state.down, state.num_down_alarms),
                ("up", state.up, state.num_up_alarms),
            ):
                near.add_metric([bucket, direction], gathered)
                alarms.add_metric([bucket, direction], count)
        yield from (near, alarms)
