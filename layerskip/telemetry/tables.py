"""A report's tables: its figures written for people."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from layerskip.policy import Policy, Rule
from layerskip.telemetry.buckets import Bucket
from layerskip.telemetry.drift import Drift
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
    routes = {(r.bucket.task, r.bucket.prompt_tokens): r for r in report.routes}
    rows = []
    for rule in policy.rules[:MAX_ROWS]:
        bucket = Bucket(rule.task, rule.prompt_tokens)
        route = routes.get((rule.task, rule.prompt_tokens), BucketReport(bucket))
        accepted, found, pair = route.accepted_per_request, route.inequality, route.paired
        rows.append(
            (
                bucket.name,
                _drafting(rule),
                rule.reason,
                _requests(route),
                number(accepted.at(10) if accepted else None),
                number(found.gain.at(10) if found else None),
                interval(pair.p90 if pair else None),
            )
        )
    columns = (
        "requests",
        "drafting",
        "why",
        "measured",
        "accepted a draft, p10",
        "gain, p10",
        "time on / off, p90",
    )
    words = frozenset({"requests", "drafting", "why"})
    caption = "What was decided, by task and length of prompt"
    return Table(caption, columns, tuple(rows), words, _left_out(len(policy.rules), "rules"))


def acceptance_table(report: AcceptanceReport) -> Table:
    """Accepted tokens a draft, of all drafts and by request."""
    rows = []
    for bucket in _with_total(report):
        mean = bucket.mean_accepted
        by_round = _quantiles(bucket.accepted_per_round, QUANTILES, 0)
        by_request = _quantiles(bucket.accepted_per_request, QUANTILES)
        counts = (_requests(bucket), f"{bucket.num_drafts}", f"{bucket.num_rounds}")
        rows.append((bucket.bucket.name, *counts, interval(mean), *by_round, *by_request))
    columns = (
        "bucket",
        "requests",
        "drafts",
        "rounds",
        "mean (95 % interval)",
        *(f"drafts, p{p}" for p in QUANTILES),
        *(f"requests, p{p}" for p in QUANTILES),
    )
    return _by_bucket("Accepted tokens a draft", columns, rows, report)


def position_table(sources: Sequence[tuple[str, Sequence[Position]]]) -> Table:
    """Acceptance of each draft position, of named groups of requests."""
    rows = [
        (
            name,
            f"{p.position}",
            f"{p.reached}",
            f"{p.accepted}",
            share(p.conditional),
            share(p.survival),
        )
        for name, positions in sources
        for p in positions
    ]
    columns = ("requests", "position", "reached", "accepted", "of those reached", "of all drafts")
    caption = "Acceptance by draft position"
    return Table(caption, columns, tuple(rows), frozenset({"requests"}))


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
    return _by_bucket("What requests waited", columns, rows, report)


def drift_table(drift: Drift) -> Table:
    """What is usual in each bucket, and how far it was left."""
    rows = []
    for name, state in list(drift.states.items())[:MAX_ROWS]:
        baseline = state.baseline
        sums = (state.down, state.up) if baseline else (None, None)
        rows.append(
            (
                drift.shown(name),
                f"{state.num_requests}",
                number(baseline.usual if baseline else None),
                f"{state.num_drafts}",
                *(number(value) for value in sums),
                f"{state.num_down_alarms}",
                f"{state.num_up_alarms}",
                str(state.last_alarm or UNKNOWN),
            )
        )
    columns = (
        "bucket",
        "requests learnt from",
        "usual",
        "drafts watched",
        "fewer, at the end",
        "more, at the end",
        "alarms, fewer",
        "alarms, more",
        "last alarm",
    )
    words = frozenset({"bucket", "last alarm"})
    note = _left_out(len(drift.states), "buckets")
    return Table("Accepted tokens a draft, watched", columns, tuple(rows), words, note)


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


def _table_of(
    caption: str,
    columns: Columns[T],
    report: AcceptanceReport,
    part: Callable[[BucketReport], T | None],
) -> Table:
    """Of one part of the buckets that have it."""
    names, cells = zip(*columns, strict=True)
    rows = [
        (b.bucket.name, *(cell(found) for cell in cells))
        for b in _with_total(report)
        if (found := part(b)) is not None
    ]
    return _by_bucket(caption, ("bucket", *names), rows, report)


def _by_bucket(
    caption: str,
    columns: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    report: AcceptanceReport,
) -> Table:
    note = _left_out(len(report.buckets), "buckets")
    words = frozenset({"bucket", "drafting"})
    return Table(f"{caption}, by bucket", columns, tuple(rows), words, note)


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
    spread: Distribution | None, percents: Sequence[int], digits: int = 2
) -> tuple[str, ...]:
    return tuple(number(spread.at(p) if spread else None, digits) for p in percents)
