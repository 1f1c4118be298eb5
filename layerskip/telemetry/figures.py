"""A report's figures: each a chart, with the table of its numbers behind it."""

from collections.abc import Sequence
from dataclasses import dataclass

from layerskip.bootstrap import LEAST_PROMPTS
from layerskip.telemetry.charts import (
    Axis,
    Chart,
    Row,
    Series,
    bar_chart,
    line_chart,
    row_chart,
)
from layerskip.telemetry.drift import Drift
from layerskip.telemetry.report import AcceptanceReport, Distribution, Estimate, Position
from layerskip.telemetry.tables import (
    Table,
    acceptance_table,
    inequality_table,
    largest,
    number,
    position_table,
    ratio_table,
    seconds,
    share,
)

MAX_ROWS = 16
LEAST_REACHED = 10  # drafts, that a share of them means something
MAX_DRIFTS = 4
MAX_ROUTES = 3  # drawn singly, beside all requests together
DECILES = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)


@dataclass(frozen=True)
class Figure:
    """A chart and the table behind it.

    Attributes:
        title: of the chart.
        chart: None where nothing was recorded.
        table: its numbers.
        note: what the chart leaves out; "" if nothing.
    """

    title: str
    chart: Chart | None
    table: Table
    note: str = ""


def acceptance(report: AcceptanceReport) -> Figure:
    """Accepted tokens a draft by bucket: the mean's interval, and how requests differ."""
    known = [b for b in report.buckets if b.mean_accepted and b.accepted_per_request]
    rows = [
        Row(
            b.bucket.name,
            ((spread.at(10), spread.at(90), "thin"), *_thick(mean)),
            ((mean.value, 0), (spread.at(10), 1)),
        )
        for b in largest(known, MAX_ROWS)
        if (mean := b.mean_accepted) and (spread := b.accepted_per_request)
    ]
    description = (
        "A thick line is the 95 % interval of the mean, a thin one goes from the 10 % to the 90 % "
        f"quantile of requests; under {LEAST_PROMPTS} have no thick one. "
        f"The mean goes {_extremes(rows)}."
    )
    legend = ("mean (thick: its 95 % interval)", "p10 of requests (thin: to p90)")
    title, label = "Accepted tokens a draft, by bucket", "accepted tokens a draft"
    chart = _rows(description, rows, label, legend)
    return Figure(title, chart, acceptance_table(report), _left_out(len(known)))


def positions(report: AcceptanceReport) -> Figure:
    """Chance of each draft position, once those before it were accepted."""
    total = report.total
    sources = [("all requests", total.positions), ("worst tenth", total.worst_positions)]
    if len(report.routes) > 1:
        sources += [(r.bucket.name, r.positions) for r in largest(report.routes, MAX_ROUTES)]
    series = [
        Series(name, points)
        for name, found in sources
        if (points := tuple((float(p.position), p.conditional) for p in found if _enough(p)))
    ]
    title, chart = "Acceptance by draft position", None
    if series:
        last = max(x for s in series for x, _ in s.points)
        ends = [f"{s.name} {share(s.points[0][1])} and {share(s.points[-1][1])}" for s in series]
        chart = line_chart(
            "The chance of each drafted token once those before it were accepted. At the first "
            f"and at the last position: {'; '.join(ends)}.",
            series,
            Axis.over("position in the draft", [last], whole=True),
            Axis.over("accepted, of those reached", [1.0], percent=True),
        )
    rare = any(not _enough(p) for _, found in sources for p in found)
    note = f"Positions that under {LEAST_REACHED} drafts reached are in the numbers alone. "
    note = (note if rare else "") + _smaller(report)
    return Figure(title, chart, position_table(sources), note)


def histograms(report: AcceptanceReport) -> tuple[Figure, ...]:
    """Of accepted tokens a draft and drafted tokens a round."""
    total = report.total
    figures = [
        _histogram("Accepted tokens a draft, all requests", total.accepted_counts, "accepted"),
        _histogram("Drafted tokens a round, all requests", total.drafted_counts, "drafted"),
    ]
    if len(report.routes) > 1:
        figures += [
            _histogram(f"Accepted tokens a draft, {r.bucket.name}", r.accepted_counts, "accepted")
            for r in largest(report.routes, MAX_ROUTES)
        ]
    return tuple(figures)


def inequality(report: AcceptanceReport) -> Figure:
    """By how much a round's tokens exceed what it costs, in both conventions."""
    known = [b for b in report.buckets if b.inequality]
    rows = [
        Row(
            b.bucket.name,
            _thick(found.emitted, found.threshold),
            ((found.margin, 0), (found.margin_without_bonus, 1)),
        )
        for b in largest(known, MAX_ROWS)
        if (found := b.inequality)
    ]
    paying = sum(b.inequality.margin > 0 for b in known if b.inequality)
    description = (
        f"Right of the strong line at 0 drafting pays: with the bonus counted in {paying} of "
        f"{len(known)} buckets. That margin goes {_extremes(rows)}."
    )
    legend = ("bonus counted (thick: 95 % interval)", "bonus not counted: one token too strict")
    title, label = "Margin of the inequality, by bucket", "tokens a round beyond 1 + alpha + beta"
    chart = _rows(description, rows, label, legend, line_at=0.0)
    return Figure(title, chart, inequality_table(report), _left_out(len(known)))


def gains(report: AcceptanceReport) -> Figure:
    """How gain differs between requests: what part of them loses by drafting."""
    sources = [("all requests", report.total)]
    if len(report.routes) > 1:
        sources += [(r.bucket.name, r) for r in largest(report.routes, MAX_ROUTES)]
    known = [(name, b.inequality.gain) for name, b in sources if b.inequality]
    title, chart = "Gain by request, from the least to the greatest", None
    if known:
        ends = [f"{name} {number(gain.at(10))} and {number(gain.at(90))}" for name, gain in known]
        chart = line_chart(
            "Requests below the strong line at 1 lose by drafting. 10 % and 90 % quantile: "
            f"{'; '.join(ends)}.",
            [
                Series(name, tuple((p / 100, gain.at(p)) for p in range(100)))
                for name, gain in known
            ],
            Axis.over("share of requests", [1.0], percent=True),
            Axis.over("gain", [1.0, *(gain.at(99) for _, gain in known)]),
            line_at=1.0,
        )
    rows = tuple((f"p{p}", *(number(gain.at(p)) for _, gain in known)) for p in DECILES)
    table = Table(title, ("quantile", *(name for name, _ in known)), rows, frozenset())
    return Figure(title, chart, table, _smaller(report))


def ratios(report: AcceptanceReport) -> Figure:
    """Time with drafting over time without, on the same prompts, by bucket."""
    known = [b for b in report.buckets if b.paired]
    rows = [
        Row(
            b.bucket.name,
            _thick(pair.end_to_end),
            ((pair.end_to_end.value, 0), (pair.p90.value, 1), (pair.worst_decile.value, 2)),
        )
        for b in largest(known, MAX_ROWS)
        if (pair := b.paired)
    ]
    description = (
        "Left of the strong line at 1 drafting is faster. The median of the prompts goes "
        f"{_extremes(rows)}."
    )
    legend = ("median (thick: 95 % interval)", "p90", "tenth whose drafts gained least")
    title, label = "Time on / off, by bucket", "time to the last token, on / off"
    chart = _rows(description, rows, label, legend, line_at=1.0)
    return Figure(title, chart, ratio_table(report), _left_out(len(known)))


def latencies(report: AcceptanceReport) -> tuple[Figure, ...]:
    """Which share of all requests waited how long at most, with drafting and without."""
    arms = [(f"on ({report.arm})", report.total.on), ("off", report.total.off)]
    known = [(name, arm) for name, arm in arms if arm is not None]
    return (
        _waits("Time to the last token", [(name, arm.end_to_end) for name, arm in known]),
        _waits(
            "Time for each further token",
            [(name, arm.per_token) for name, arm in known if arm.per_token is not None],
        ),
        _waits("Time to the first token", [(name, arm.ttft) for name, arm in known]),
    )


def drifts(drift: Drift) -> tuple[Figure, ...]:
    """How far acceptance was off over time, of the buckets that came nearest to an alarm."""
    peaks = {name: max(max(p[1:]) for p in path) for name, path in drift.paths.items() if path}
    return tuple(
        _drift(name, drift) for name in sorted(peaks, key=lambda name: -peaks[name])[:MAX_DRIFTS]
    )


def _drift(name: str, drift: Drift) -> Figure:
    path, state = drift.paths[name], drift.states[name]
    sides = (("fewer accepted", state.num_down_alarms), ("more accepted", state.num_up_alarms))
    series = [
        Series(side, tuple((float(point[0]), point[column]) for point in path))
        for column, (side, _) in enumerate(sides, 1)
    ]
    alarms = ", ".join(f"{count} that {side.replace(' ', ' are ')}" for side, count in sides)
    title = f"Drift, {drift.shown(name)}"
    chart = line_chart(
        f"Over {path[-1][0]} drafts; alarms at 1: {alarms}.",
        series,
        Axis.over("drafts watched", [path[-1][0]], whole=True),
        Axis.over("sum, in parts of an alarm's", [1.0, *(y for s in series for _, y in s.points)]),
        line_at=1.0,
    )
    rows = tuple(
        (f"{count}", number(down), number(up)) for count, down, up in path[:: -(-len(path) // 50)]
    )
    columns = ("drafts", *(side for side, _ in sides))
    return Figure(title, chart, Table(title, columns, rows, frozenset()))


def _thick(estimate: Estimate, less: float = 0.0) -> tuple[tuple[float, float, str], ...]:
    """The span of its interval; none of too few requests."""
    if estimate.too_few:
        return ()
    return ((estimate.low - less, estimate.high - less, "thick"),)


def _rows(
    description: str,
    rows: Sequence[Row],
    label: str,
    legend: Sequence[str],
    *,
    line_at: float | None = None,
) -> Chart | None:
    """A row chart whose axis holds all its spans and marks."""
    if not rows:
        return None
    values = [v for row in rows for low, high, _ in row.spans for v in (low, high)]
    values += [v for row in rows for v, _ in row.marks]
    axis = Axis.over(label, [line_at, *values])
    return row_chart(description, rows, axis, legend=legend, line_at=line_at)


def _histogram(title: str, counts: Sequence[int], what: str) -> Figure:
    total, chart = sum(counts), None
    if total:
        shares = [count / total for count in counts]
        often = max(range(len(counts)), key=counts.__getitem__)
        mean = sum(i * count for i, count in enumerate(counts)) / total
        chart = bar_chart(
            f"Of {total}, most often {often} ({share(shares[often])}); none in "
            f"{share(shares[0])}; {number(mean)} on average.",
            [(f"{i}", s) for i, s in enumerate(shares)],
            f"{what} tokens",
            Axis.over("share", shares, percent=True),
        )
    rows = tuple((f"{i}", f"{n}", share(n / max(1, total))) for i, n in enumerate(counts))
    return Figure(title, chart, Table(title, (what, "count", "share"), rows, frozenset()))


def _waits(title: str, arms: Sequence[tuple[str, Distribution]]) -> Figure:
    """The curves up to the 99 % quantile: the slowest requests would make them flat."""
    chart = None
    if arms:
        most = max(spread.at(99) for _, spread in arms)
        unit, size = ("s", 1.0) if most >= 1.0 else ("ms", 1e-3)
        series = [
            Series(name, tuple((spread.at(p) / size, p / 100) for p in range(100)))
            for name, spread in arms
        ]
        medians = "; ".join(
            f"{name} {seconds(s.at(50))} and {seconds(s.at(99))}" for name, s in arms
        )
        chart = line_chart(
            f"Up to the 99 % quantile. Median and 99 % quantile: {medians}.",
            series,
            Axis.over(f"{title.lower()}, {unit}", [most / size]),
            Axis.over("share of requests", [1.0], percent=True),
        )
    rows = tuple((f"p{p}", *(seconds(spread.at(p)) for _, spread in arms)) for p in DECILES)
    columns = ("quantile", *(name for name, _ in arms))
    return Figure(title, chart, Table(title, columns, rows if arms else (), frozenset()))


def _extremes(rows: Sequence[Row]) -> str:
    """Which rows' first marks are the least and the greatest, in words."""
    marks = [(row.marks[0][0], row.label) for row in rows]
    if not marks:
        return "nowhere"
    (low, where_low), (high, where_high) = min(marks), max(marks)
    return f"from {number(low)} ({where_low}) to {number(high)} ({where_high})"


def _enough(position: Position) -> bool:
    return position.reached >= LEAST_REACHED


def _smaller(report: AcceptanceReport) -> str:
    left_out = len(report.routes) - MAX_ROUTES
    return f"Smaller routes left out: {left_out}." if left_out > 0 else ""


def _left_out(count: int) -> str:
    if count <= MAX_ROWS:
        return ""
    return f"The {MAX_ROWS} of {count} buckets with most requests; the others are in the data."
