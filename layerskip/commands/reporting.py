"""``layerskip report``: from recorded traffic to tables, a page, and the decision."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from layerskip.commands.options import cell, new_table, output_of, say
from layerskip.telemetry.buckets import OUTPUT_EDGES, PROMPT_EDGES, shown

if TYPE_CHECKING:
    from layerskip.policy import Policy
    from layerskip.telemetry.report import AcceptanceReport, Estimate

MOST_ROWS, MOST_ALARMS = 60, 5  # that a terminal shows


def add_parsers(commands: Any) -> None:
    """Add this module's command to those of ``add_subparsers``."""
    report = commands.add_parser("report", help="what measured traffic says, and what to do")
    report.set_defaults(run=run_report)
    report.add_argument("runs", help="folder that `layerskip measure` wrote")
    report.add_argument("--policy", metavar="FILE", help="write the decision, for --policy")
    report.add_argument("--html", metavar="FILE", help="write the report as one page")
    report.add_argument("--arm", help="that drafts (default: auto, or the only one)")
    for name, edges in (("prompt", PROMPT_EDGES), ("output", OUTPUT_EDGES)):
        report.add_argument(
            f"--{name}-edges",
            metavar="N,N,...",
            type=_edges,
            default=edges,
            help=f"tokens at which a new bucket of {name}s begins; '' for one bucket "
            f"(default {','.join(map(str, edges))})",
        )
    report.add_argument("--json", action="store_true", help="one JSON document as last line")


def _edges(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"numbers of tokens with commas between them, got {text!r}"
        ) from None


def run_report(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The report and the decision, as tables and files."""
    from layerskip.telemetry.aggregation import acceptance_report
    from layerskip.telemetry.decision import decide
    from layerskip.telemetry.runs import SAMPLES, read_lines

    given = [name for name in ("policy", "html") if getattr(args, name) is not None]
    files = [output_of(args, name) for name in given]
    if len(set(files)) < len(files):
        raise ValueError(f"--policy and --html must be two files, got {args.html!r} for both")
    with console.status("counting rounds"):
        report = acceptance_report(
            args.runs,
            arm=args.arm,
            prompt_edges=args.prompt_edges,
            output_edges=args.output_edges,
        )
        policy = decide(report)
        # Files first: printing ends all where nobody reads stdout.
        if args.html is not None:  # a damaged sample ends it
            from layerskip.telemetry.html import write_html

            samples = list(read_lines(Path(args.runs) / SAMPLES))
            write_html(report, policy, samples, args.html)
        if args.policy is not None:
            policy.save(args.policy)
    for table in (_acceptance_table(report), _latency_table(report), _decision_table(policy)):
        console.print(table)
    for note in _notes(report):
        say(console, note, "dim")
    for path in (args.policy, args.html):
        if path is not None:
            say(console, f"written to {path}")
    return {"report": report.to_dict(), "policy": policy.to_dict()}


TEXTS = ("task", "bucket", "arm", "drafts", "why")  # columns of words; the others are of numbers


def _table(title: str, columns: tuple[str, ...]) -> Table:
    return new_table(columns, left=TEXTS, wrapped=TEXTS, gap=1, title=title)


def _acceptance_table(report: "AcceptanceReport") -> Table:
    """Acceptance and the inequality, of every bucket and of all."""
    shares = ("mean", "95 %", "p10/50/90", "req.p10", "margin", "no bonus")
    table = _table(
        escape(f"accepted tokens a draft, {report.model}, {report.arm} against 0"),
        ("task", "prompt", "output", "n", *shares),
    )
    for row in (*report.buckets[:MOST_ROWS], report.total):
        rounds, requests, inequality = (
            row.accepted_per_round,
            row.accepted_per_request,
            row.inequality,
        )
        every = row is report.total
        table.add_row(
            "all" if every else cell(row.bucket.task or "-"),
            "" if every else shown(row.bucket.prompt_tokens),
            "" if every else shown(row.bucket.new_tokens),
            f"{row.num_requests}{'*' if row.few else ''}",
            *_estimate(row.mean_accepted),
            "-" if rounds is None else "/".join(f"{rounds.at(p):.0f}" for p in (10, 50, 90)),
            "-" if requests is None else f"{requests.at(10):.2f}",
            "-" if inequality is None else f"{inequality.margin:+.2f}",
            "-" if inequality is None else f"{inequality.margin_without_bonus:+.2f}",
        )
    table.caption = "* fewer than 500 requests"
    if len(report.buckets) > MOST_ROWS:
        table.caption += f"; {len(report.buckets) - MOST_ROWS} more buckets in --html and --json"
    return table


def _latency_table(report: "AcceptanceReport") -> Table:
    """What requests waited with drafting off and on, over all output lengths."""
    table = _table(
        "milliseconds until the last token",
        ("bucket", "arm", "n", "p50", "p90", "p99", "tok/s", "on/off p90", "worst tenth"),
    )
    for row in (*report.routes[:MOST_ROWS], report.total):
        paired = row.paired
        ratios = ["-", "-"]
        if paired is not None:
            ratios = [" ".join(_estimate(e)) for e in (paired.p90, paired.worst_decile)]
        arms = [(name, t) for name, t in (("off", row.off), ("on", row.on)) if t is not None]
        for name, times in arms:
            first, last = name == arms[0][0], name == arms[-1][0]
            speed = times.tokens_per_second
            table.add_row(
                cell(row.bucket.name) if first else "",
                name,
                str(times.end_to_end.count),
                *(f"{1e3 * times.end_to_end.at(p):.0f}" for p in (50, 90, 99)),
                "-" if speed is None else f"{speed:.0f}",
                *(ratios if last else ["", ""]),
            )
    if len(report.routes) > MOST_ROWS:
        table.caption = f"{len(report.routes) - MOST_ROWS} more buckets in --html and --json"
    return table


def _decision_table(policy: "Policy") -> Table:
    table = _table("decision", ("task", "prompt", "drafts", "why"))
    for rule in policy.rules:
        most = rule.max_draft_tokens
        table.add_row(
            cell(rule.task or "-"),
            shown(rule.prompt_tokens),
            "auto" if most is None else "off" if most == 0 else f"at most {most}",
            cell(rule.reason),
        )
    return table


def _estimate(estimate: "Estimate | None") -> tuple[str, str]:
    if estimate is None:
        return "-", "-"
    if estimate.too_few:
        return f"{estimate.value:.2f}", "too few"
    return f"{estimate.value:.2f}", f"{estimate.low:.2f}-{estimate.high:.2f}"


def _notes(report: "AcceptanceReport") -> list[str]:
    """What the tables need said beside them."""
    notes, i = [], report.total.inequality
    if i is not None:
        notes.append(
            f"margin: emitted tokens a draft less 1 + passes x c + beta, of all: "
            f"{i.emitted.value:.2f} - (1 + {i.draft_passes:.2f} x {i.c:.3f} + {i.beta:.3f}); "
            f"no bonus: accepted less the same"
        )
        if i.clock_alpha is not None and i.clock_beta is not None:
            notes.append(
                f"by the cost table alpha {i.alpha:.3f}, beta {i.beta:.3f}; "
                f"by the clock alpha {i.clock_alpha:.3f}, beta {i.clock_beta:.3f}"
            )
    alarms = report.drift.alarms if report.drift is not None else ()
    notes += [f"drift: {alarm}" for alarm in alarms[:MOST_ALARMS]]
    if len(alarms) > MOST_ALARMS:
        notes.append(f"drift: {len(alarms) - MOST_ALARMS} more alarms in --json")
    return notes + report.cautions
