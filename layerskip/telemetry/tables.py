"""A report's tables: its figures written for people."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from layerskip.policy import Policy, Rule
from layerskip.telemetry.buckets import Bucket
from layerskip.telemetry.drift import Drift
from layerskip.telemetry.drift_bucket import DriftState
from layerskip.telemetry.report import (
    AcceptanceReport,
    BucketReport,
    Distribution,
    Estimate,
    Inequality,
    Paired,
    Position,
)

MAX_ROWS = 500
UNKNOWN = "\N{EN DASH}"
QUANTILES = (10, 50, 90, 99)
LATE = (50, 90, 99)
T = TypeVar("T")
Columns = Sequence[tuple[str, Callable[[T], str]]]  # names, and what stands below them


@dataclass(frozen=True)
class Table:
    """Cells as text.

    Attributes:
        caption: what it shows.
        columns: their names; the first one names the row.
        rows: of as many cells.
        words: columns that hold no numbers.
        note: what it leaves out; "" if nothing.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: frozenset[str]
    note: str = ""


def decision_table(report: AcceptanceReport, policy: Policy) -> Table:
    """What was decided for which requests, why, and by which figures."""
    routes = {route.bucket: route for route in report.routes}
    rules = [(Bucket(r.task, r.prompt_tokens), r) for r in policy.rules[:MAX_ROWS]]
    decisions = [(b.name, (r, routes.get(b, BucketReport(b)))) for b, r in rules]
    columns: Columns[tuple[Rule, BucketReport]] = (
        ("drafting", lambda d: _drafting(d[0])),
        ("why", lambda d: d[0].reason),
        ("measured", lambda d: _requests(d[1])),
        (
            "accepted a draft, p10",
            lambda d: number(s.at(10) if (s := d[1].accepted_per_request) else None),
        ),
        ("gain, p10", lambda d: number(i.gain.at(10) if (i := d[1].inequality) else None)),
        ("time on / off, p90", lambda d: interval(p.p90 if (p := d[1].paired) else None)),
    )
    caption = "What was decided, by task and length of prompt"
    note = _left_out(len(policy.rules), "rules")
    return _table(caption, "requests", columns, decisions, ("drafting", "why"), note)


def acceptance_table(report: AcceptanceReport) -> Table:
    """Accepted tokens a draft, of all drafts and by request."""
    columns: Columns[BucketReport] = (
        ("requests", _requests),
        ("drafts", lambda b: f"{b.num_drafts}"),
        ("rounds", lambda b: f"{b.num_rounds}"),
        ("mean (95 % interval)", lambda b: interval(b.mean_accepted)),
        *_quantiles("drafts", lambda b: b.accepted_per_round, 0),
        *_quantiles("requests", lambda b: b.accepted_per_request),
    )
    return _table_of("Accepted tokens a draft", columns, report, lambda b: b)


def position_table(sources: Sequence[tuple[str, Sequence[Position]]]) -> Table:
    """Acceptance of each draft position, of named groups of requests."""
    columns: Columns[Position] = (
        ("position", lambda p: f"{p.position}"),
        ("reached", lambda p: f"{p.reached}"),
        ("accepted", lambda p: f"{p.accepted}"),
        ("of those reached", lambda p: share(p.conditional)),
        ("of all drafts", lambda p: share(p.survival)),
    )
    found = [(name, p) for name, positions in sources for p in positions]
    return _table("Acceptance by draft position", "requests", columns, found)


def reason_table(report: AcceptanceReport) -> Table:
    """How many rounds there were of each mode, and why drafts ended."""
    total = report.total
    rows = [("round", name, f"{count}") for name, count in sorted(total.modes.items())]
    rows += [("draft ended by", name, f"{count}") for name, count in sorted(total.stops.items())]
    columns, words = ("what", "kind", "count"), frozenset({"what", "kind"})
    return Table("Rounds by mode, and why drafts ended", columns, tuple(rows), words)


def inequality_table(report: AcceptanceReport) -> Table:
    """The parts of the inequality; costs in plain passes."""
    columns: Columns[Inequality] = (
        ("emitted a round (95 % interval)", lambda i: interval(i.emitted)),
        ("c", lambda i: number(i.c)),
        ("draft passes", lambda i: number(i.draft_passes)),
        ("alpha", lambda i: number(i.alpha)),
        ("beta", lambda i: number(i.beta)),
        ("1 + alpha + beta", lambda i: number(i.threshold)),
        ("margin, bonus counted", lambda i: number(i.margin)),
        ("margin, bonus not counted", lambda i: number(i.margin_without_bonus)),
        ("predicted speed", lambda i: number(i.predicted_speed)),
        ("gain, p10", lambda i: number(i.gain.at(10))),
        ("gain, p50", lambda i: number(i.gain.at(50))),
        ("alpha by the clock", lambda i: number(i.clock_alpha)),
        ("beta by the clock", lambda i: number(i.clock_beta)),
    )
    return _table_of("The inequality, in plain passes", columns, report, lambda b: b.inequality)


def ratio_table(report: AcceptanceReport) -> Table:
    """Time with drafting over time without, on the same prompts."""
    columns: Columns[Paired] = (
        ("prompts", lambda p: f"{p.num_prompts}"),
        ("same tokens", lambda p: f"{p.num_identical}"),
        ("last token, median", lambda p: interval(p.end_to_end)),
        ("first token, median", lambda p: interval(p.ttft)),
        ("last token, p90", lambda p: interval(p.p90)),
        ("slowest tenth", lambda p: interval(p.slowest_decile)),
        ("tenth that gained least", lambda p: interval(p.worst_decile)),
    )
    return _table_of("Time on / off (95 % interval)", columns, report, lambda b: b.paired)


def latency_table(report: AcceptanceReport) -> Table:
    """Quantiles of what requests waited, by bucket and arm."""
    rows = []
    for bucket in _with_total(report):
        for arm, found in (("on", bucket.on), ("off", bucket.off)):
            if found is not None:
                spreads = (found.ttft, found.per_token, found.end_to_end)
                cells = [seconds(s.at(p) if s else None) for s in spreads for p in LATE]
                speed = number(found.tokens_per_second, 1)
                rows.append((bucket.bucket.name, arm, *cells, speed))
    kinds = ("first token", "each further token", "last token")
    quantiles = (f"{kind}, p{p}" for kind in kinds for p in LATE)
    columns = ("bucket", "drafting", *quantiles, "tokens a second")
    words, note = frozenset({"bucket", "drafting"}), _left_out(len(report.buckets), "buckets")
    return Table("What requests waited, by bucket", columns, tuple(rows), words, note)


def drift_table(drift: Drift) -> Table:
    """What is usual in each bucket, and how far it was left."""
    columns: Columns[DriftState] = (
        ("requests learnt from", lambda s: f"{s.num_requests}"),
        ("usual", lambda s: number(s.baseline.usual if s.baseline else None)),
        ("drafts watched", lambda s: f"{s.num_drafts}"),
        ("fewer, at the end", lambda s: number(s.down if s.baseline else None)),
        ("more, at the end", lambda s: number(s.up if s.baseline else None)),
        ("alarms, fewer", lambda s: f"{s.num_down_alarms}"),
        ("alarms, more", lambda s: f"{s.num_up_alarms}"),
        ("last alarm", lambda s: str(s.last_alarm or UNKNOWN)),
    )
    states = [(drift.shown(name), s) for name, s in list(drift.states.items())[:MAX_ROWS]]
    caption, note = "Accepted tokens a draft, watched", _left_out(len(drift.states), "buckets")
    return _table(caption, "bucket", columns, states, ("last alarm",), note)


def number(value: float | None, digits: int = 2) -> str:
    """A number for people; a dash if there is none."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    """A share of 1 as a percentage."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"


def seconds(value: float | None) -> str:
    """A time with three figures, in its own unit."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    unit, size = ("s", 1.0) if value >= 1.0 else ("ms", 1e-3) if value >= 1e-3 else ("µs", 1e-6)
    value /= size
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def interval(estimate: Estimate | None) -> str:
    """A figure and its interval, unless its requests are too few for one."""
    if estimate is None:
        return UNKNOWN
    if estimate.too_few:
        return f"{number(estimate.value)} (too few)"
    return f"{number(estimate.value)} ({number(estimate.low)} to {number(estimate.high)})"


def largest(buckets: Sequence[BucketReport], most: int) -> list[BucketReport]:
    """Those with the most requests, in the order given."""
    by_size = sorted(range(len(buckets)), key=lambda i: -buckets[i].num_requests)
    return [buckets[i] for i in sorted(by_size[:most])]


def _with_total(report: AcceptanceReport) -> list[BucketReport]:
    return [report.total, *largest(report.buckets, MAX_ROWS)]


def _table(
    caption: str,
    first: str,
    columns: Columns[T],
    named: Iterable[tuple[str, T]],
    words: Sequence[str] = (),
    note: str = "",
) -> Table:
    """A row for each of what is named, its name in the first column."""
    names, cells = zip(*columns, strict=True)
    rows = tuple((name, *(cell(of) for cell in cells)) for name, of in named)
    return Table(caption, (first, *names), rows, frozenset((first, *words)), note)


def _table_of(
    caption: str,
    columns: Columns[T],
    report: AcceptanceReport,
    part: Callable[[BucketReport], T | None],
) -> Table:
    """Of one part of the buckets that have it."""
    known = [(b.bucket.name, p) for b in _with_total(report) if (p := part(b)) is not None]
    note = _left_out(len(report.buckets), "buckets")
    return _table(f"{caption}, by bucket", "bucket", columns, known, note=note)


def _left_out(count: int, what: str) -> str:
    if count <= MAX_ROWS:
        return ""
    return f"{count - MAX_ROWS} of {count} {what} are left out."


def _drafting(rule: Rule) -> str:
    if rule.max_draft_tokens is None:
        return "on, automatic"
    return f"on, at most {rule.max_draft_tokens} a round" if rule.max_draft_tokens else "off"


def _requests(bucket: BucketReport) -> str:
    return f"{bucket.num_requests}{' (few)' if bucket.few else ''}"


def _quantiles(
    name: str, spread: Callable[[BucketReport], Distribution | None], digits: int = 2
) -> Columns[BucketReport]:
    def at(percent: int) -> Callable[[BucketReport], str]:
        return lambda b: number(s.at(percent) if (s := spread(b)) else None, digits)

    return [(f"{name}, p{p}", at(p)) for p in QUANTILES]
