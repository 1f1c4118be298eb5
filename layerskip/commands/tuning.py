"""Commands that measure a model before it is used: profile."""

import argparse
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from layerskip.commands.options import load, model_options

if TYPE_CHECKING:
    from layerskip.cost import CostTable

VERIFIED_ROWS = 8  # of the v that is printed
MAX_SECONDS = 600.0


def add_parsers(commands: Any) -> None:
    """Add this module's commands to those of ``add_subparsers``."""
    profile = commands.add_parser("profile", help="measure what passes take, for a plan to use")
    model_options(profile)
    profile.add_argument("--out", required=True, help="JSON file for the cost table")
    profile.add_argument(
        "--seconds", type=float, default=20.0, help="most time to measure for (default 20)"
    )


def run_profile(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """``layerskip profile``: a cost table, to a file."""
    from layerskip.files import check_writable
    from layerskip.params import check_number

    check_number("--seconds", args.seconds, 0.1, MAX_SECONDS)
    check_writable(args.out)
    lm = load(args)
    from layerskip.profiling import measure_cost

    columns = (TextColumn("measuring passes"), BarColumn(), TimeElapsedColumn())
    began = time.perf_counter()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("passes", total=1.0)
        table = measure_cost(
            lm.stack,
            lm.plan,
            seconds=args.seconds,
            on_progress=lambda share: progress.update(task, completed=share),
        )
    seconds = time.perf_counter() - began
    table.save(args.out)
    document = {
        "model": args.model,
        "out": args.out,
        "seconds": seconds,
        "draft_layers": list(lm.plan.layers) if lm.plan else None,
        "units": _units(table),
        "cost": table.to_dict(),
    }
    console.print(_cost_table(document, table))
    return document


def _units(table: "CostTable") -> list[dict[str, float]]:
    """c and v at each context that was measured: passes in units of a plain one."""
    return [
        {
            "context": context,
            "plain_seconds": table.verify_pass(1, context),
            "c": table.draft_pass(1, context) / table.verify_pass(1, context),
            "v": table.verify_pass(VERIFIED_ROWS, context) / table.verify_pass(1, context),
        }
        for context in table.verify.contexts
    ]


def _cost_table(document: dict[str, Any], table: "CostTable") -> Table:
    """Milliseconds of passes by rows and context, and what they are in plain passes."""
    drafts = document["draft_layers"] is not None
    of = f"draft layers {_ranges(document['draft_layers'])}" if drafts else "no draft layers"
    shown = Table(
        box=None,
        padding=(0, 1),
        pad_edge=False,
        title=f"{document['model']}, {of}, {table.key['dtype']}, {table.key['threads']} threads",
    )
    for name in ("pass, ms", "rows", *(f"at {c}" for c in table.verify.contexts)):
        shown.add_column(name, justify="left" if name == "pass, ms" else "right", no_wrap=True)
    kinds = [("verify", table.verify_pass), *([("draft", table.draft_pass)] if drafts else [])]
    for kind, seconds in kinds:
        for rows in table.verify.rows:
            times = [f"{1e3 * seconds(rows, c):.2f}" for c in table.verify.contexts]
            shown.add_row("plain" if (kind, rows) == ("verify", 1) else kind, str(rows), *times)
    units = document["units"]
    if drafts:
        shown.add_row("c: draft / plain", "1", *(f"{u['c']:.3f}" for u in units))
    shown.add_row("v: verify / plain", str(VERIFIED_ROWS), *(f"{u['v']:.3f}" for u in units))
    shown.caption = f"measured in {document['seconds']:.1f} s on {table.key['device']}"
    return shown


def _ranges(layers: list[int]) -> str:
    """``[0, 1, 2, 5]`` as "0-2, 5"."""
    starts = [i for i in layers if i - 1 not in layers]
    ends = [i for i in layers if i + 1 not in layers]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)
