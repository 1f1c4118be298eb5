"""Commands that decode a user's own traffic: measure."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import TaskID
from rich.table import Table

from layerskip.commands.options import (
    MOST_SAID,
    bad_lines_option,
    cell,
    load,
    model_options,
    new_table,
    sampling_of,
    sampling_options,
    say,
    say_bad_lines,
)
from layerskip.commands.progress import counting
from layerskip.commands.signals import importing
from layerskip.params import (
    AUTO,
    MAX_NUM_DRAFT_TOKENS,
    check_integer,
    read_num_draft_tokens,
)

if TYPE_CHECKING:
    from layerskip.params import NumDraftTokens
    from layerskip.telemetry.summary import Summary
    from layerskip.telemetry.traffic import LeftOut


def add_parsers(commands: Any) -> None:
    """Add this module's commands to those of ``add_subparsers``."""
    measure = commands.add_parser(
        "measure", help="decode your own prompts with drafts and without, and record every round"
    )
    model_options(measure)
    measure.set_defaults(run=run_measure)
    measure.add_argument(
        "--prompts", metavar="FILE", required=True, help="JSON lines, a file of any size"
    )
    measure.add_argument(
        "--out", metavar="DIR", required=True, help="for the records; goes on if stopped"
    )
    measure.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="FIELD",
        help="of a line, to count it under; may be given repeatedly, the first is the task",
    )
    bad_lines_option(measure)
    measure.add_argument(
        "--arms", default="0,auto", help="numbers of draft tokens, 0 is plain (default 0,auto)"
    )
    measure.add_argument("--limit", type=int, help="most prompts (default all)")
    sampling_options(measure)
    measure.add_argument(
        "--samples",
        type=int,
        default=3,
        metavar="N",
        help="requests of each task whose text is kept; 0 keeps none (default 3)",
    )


def run_measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """``layerskip measure``: a runs folder, and its totals."""
    with importing():
        from layerskip.telemetry.measure import MeasureSettings, measure
        from layerskip.telemetry.traffic import Traffic

    settings = MeasureSettings(
        arms=_arms(args.arms),
        max_new_tokens=args.max_new_tokens,
        sampling=replace(sampling_of(args), seed=None),
        seed=args.seed or 0,
        samples=args.samples,
    )
    traffic = Traffic.read(
        args.prompts, labels=args.label, bad_lines=args.bad_lines, limit=args.limit
    )
    say_bad_lines(console, traffic)
    bar = _Bar(console)
    try:
        lm = load(args)
        with bar.progress:
            summary = measure(
                lm,
                traffic,
                args.out,
                settings=settings,
                model=args.model,
                on_progress=bar.advance,
                on_left_out=bar.leave_out,
            )
    except KeyboardInterrupt:
        if Path(args.out).exists():
            say(console, f"the same command goes on from {args.out}")
        raise
    left_out = traffic.count - summary.prompts
    console.print(_table(summary))
    say(console, _verdict(summary, left_out, args.out))
    return {
        "model": args.model,
        "out": args.out,
        "bad_lines": traffic.num_bad_lines,
        "left_out": left_out,
        **summary.to_dict(),
    }


def _arms(text: str) -> "tuple[NumDraftTokens, ...]":
    try:
        arms = tuple(map(read_num_draft_tokens, text.split(",")))
    except ValueError:
        raise ValueError(
            f"--arms must be numbers of draft tokens or 'auto', as in '0,auto', got {text!r}"
        ) from None
    for arm in arms:
        if arm != AUTO:
            check_integer("each of --arms", arm, 0, MAX_NUM_DRAFT_TOKENS)
    return arms


class _Bar:
    """How far a measurement is; what it left out is said above."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = counting(console)
        self._task: TaskID | None = None
        self._num_left_out = 0

    def advance(self, done: int, total: int) -> None:
        if self._task is None:  # what an earlier start did says nothing of the speed of this one
            self._task = self.progress.add_task("requests", total=total, completed=done - 1)
        self.progress.update(self._task, completed=done)

    def leave_out(self, prompt: "LeftOut") -> None:
        self._num_left_out += 1
        if self._num_left_out <= MOST_SAID:
            say(self.console, f"line {prompt.number} left out: {prompt.reason}")


def _table(summary: "Summary") -> Table:
    """Every task in every arm."""
    columns = ("task", "arm", "requests", "accepted", "length", "tokens/s")
    shown = new_table(columns, left=("task", "arm"), wrapped=("task",))
    for task, arms in summary.tasks.items():
        for arm, totals in arms.items():
            drafted, took = totals.num_draft_tokens, totals.decode_seconds
            shown.add_row(
                cell(task or "(none)"),
                arm,
                str(totals.num_requests),
                f"{totals.acceptance_rate:.0%}" if drafted else "-",
                f"{totals.mean_accepted_length:.2f}" if drafted else "-",
                f"{totals.tokens_per_second:.0f}" if took else "-",
            )
    return shown


def _verdict(summary: "Summary", left_out: int, out: str) -> str:
    parts = [f"{summary.prompts} prompts"]
    if left_out:
        parts.append(f"{left_out} left out")
    if any(len(arms) > 1 for arms in summary.tasks.values()):
        parts.append(f"text equal in all arms for {summary.equal}")
    return f"{', '.join(parts)}; records in {out}"
