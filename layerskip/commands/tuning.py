"""Commands that measure a model before it is used: profile, search."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from layerskip.commands.options import (
    examples_of,
    load,
    model_options,
    new_table,
    output_of,
    quiet,
    say,
)
from layerskip.commands.progress import counting, sharing
from layerskip.plan import PlanFile, ranges

if TYPE_CHECKING:
    from layerskip.cost import CostTable
    from layerskip.prediction import Found
    from layerskip.search import SearchResult
    from layerskip.trimming import Trimming

VERIFIED_ROWS = 8  # of the v that is printed
MAX_SECONDS = 600.0
FIGURES = ("accepted", "length", "c", "tokens", "predicted", "measured")  # of what was tried


def add_parsers(commands: Any) -> None:
    """Add this module's commands to those of ``add_subparsers``."""
    profile = commands.add_parser("profile", help="measure what passes take, for simulate")
    profile.set_defaults(run=run_profile)
    model_options(profile, lookup=False)
    profile.set_defaults(num_draft_tokens=0)  # else the loader measures a little by itself
    profile.add_argument(
        "--out", metavar="FILE", required=True, help="JSON file for the cost table"
    )
    profile.add_argument(
        "--seconds", type=float, default=20.0, help="most time to measure for (default 20)"
    )
    search = commands.add_parser("search", help="find the layers to draft with, or that none pay")
    search.set_defaults(run=run_search)
    model_options(search, drafts=False)
    search.add_argument(
        "--prompts", metavar="FILE", help="JSON lines; without it, held-out library code"
    )
    search.add_argument(
        "--vocabulary-texts",
        metavar="FILE",
        help="more text like that to come (.jsonl as for --prompts, else plain), to choose the "
        "tokens of drafts by",
    )
    search.add_argument("--out", metavar="FILE", required=True, help="JSON file for the plan")
    search.add_argument("--limit", type=int, default=16, help="most prompts (default 16)")
    search.add_argument(
        "--max-new-tokens", type=int, default=64, help="after each prompt (default 64)"
    )
    search.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default 0.8)")
    search.add_argument("--seed", type=int, default=0, help="of sampling (default 0)")
    search.add_argument(
        "--max-draft-tokens", type=int, default=8, help="most tokens drafted a round (default 8)"
    )
    search.add_argument(
        "--refinements", type=int, default=16, help="plans the local search may try (default 16)"
    )


def run_profile(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """``layerskip profile``: a cost table, to a file."""
    from layerskip.params import check_number

    check_number("--seconds", args.seconds, 0.1, MAX_SECONDS)
    output_of(args, "out")
    lm = load(args)
    from layerskip.profiling import measure_cost

    began = time.perf_counter()
    with sharing(console) as progress:
        task = progress.add_task("measuring passes", total=1.0)
        table = measure_cost(
            lm.stack,
            lm.plan,
            draft_vocabulary=lm.plan_file.draft_vocabulary,
            head=lm.draft_head,
            seconds=args.seconds,
            on_progress=lambda share: progress.update(task, completed=share),
        )
        table.save(args.out)  # before the bar ends, which ends all where nobody reads stdout
    seconds = time.perf_counter() - began
    document = {
        "model": args.model,
        "out": args.out,
        "seconds": seconds,
        "draft_layers": list(lm.plan.layers) if lm.plan else None,
        "draft_vocabulary": None if lm.draft_head is None else len(lm.draft_head.ids),
        "units": _units(table),
        "cost": table.to_dict(),
    }
    of = f"draft layers {ranges(list(lm.plan.layers))}" if lm.plan else "no draft layers"
    if lm.draft_head is not None:
        of += f" over {len(lm.draft_head.ids)} of {lm.stack.vocab_size} ids"
    passes = f"{table.key['dtype']}, {table.key['threads']} threads"
    say(console, f"{args.model}, {of}, {passes}")
    console.print(_cost_table(document, table))
    say(console, f"measured in {seconds:.1f} s on {table.key['device']}")
    return document


def _units(table: "CostTable") -> list[dict[str, float]]:
    """c and v at each context that was measured, greedy and drawing: in units of a plain pass."""
    units = []
    for context in table.verify.contexts:
        line: dict[str, float] = {"context": context}
        for suffix, greedy in (("", True), ("_sampled", False)):
            of = table.of(greedy=greedy)
            plain = of.verify_pass(1, context)
            line["plain_seconds" + suffix] = plain
            line["c" + suffix] = of.draft_pass(1, context) / plain
            line["v" + suffix] = of.verify_pass(VERIFIED_ROWS, context) / plain
        units.append(line)
    return units


def _cost_table(document: dict[str, Any], table: "CostTable") -> Table:
    """Milliseconds of passes by rows and context, and what they are in plain passes."""
    drafts = document["draft_layers"] is not None
    contexts = table.verify.contexts
    shown = new_table(("pass, ms", "rows", *(f"at {c}" for c in contexts)), left=("pass, ms",))
    greedy = table.of(greedy=True)
    kinds = [("verify", greedy.verify_pass), *([("draft", greedy.draft_pass)] if drafts else [])]
    for kind, seconds in kinds:
        for rows in table.verify.rows:
            times = [f"{1e3 * seconds(rows, c):.2f}" for c in contexts]
            shown.add_row("plain" if (kind, rows) == ("verify", 1) else kind, str(rows), *times)
    units = document["units"]
    for suffix, when in (("", ""), ("_sampled", ", sampled")):
        if drafts:
            c = [f"{u['c' + suffix]:.3f}" for u in units]
            shown.add_row(f"c: draft / plain{when}", "1", *c)
        v = [f"{u['v' + suffix]:.3f}" for u in units]
        shown.add_row(f"v: verify / plain{when}", str(VERIFIED_ROWS), *v)
    return shown


def run_search(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """``layerskip search``: a plan file, with the table of what was tried."""
    from layerskip.params import SamplingParams, check_integer

    check_integer("--limit", args.limit, 2)
    output_of(args, "out", is_plan=True)
    sampling = SamplingParams(temperature=args.temperature, seed=args.seed)
    quiet()
    from layerskip.api import SelfSpeculativeLM
    from layerskip.journal import remove
    from layerskip.prompts import read_texts
    from layerskip.search import SearchSettings, search

    settings = SearchSettings(
        sampling=sampling,
        max_texts=args.limit,
        max_new_tokens=args.max_new_tokens,
        max_draft_tokens=args.max_draft_tokens,
        refinements=args.refinements,
    )
    examples = examples_of(args.prompts, args.limit)
    more = [] if args.vocabulary_texts is None else read_texts(args.vocabulary_texts)
    journal = Path(f"{args.out}.journal")
    try:
        lm = SelfSpeculativeLM.from_pretrained(
            args.model,
            plan=PlanFile(None),
            num_draft_tokens=0,
            dtype=args.dtype,
            device=args.device,
            exact=args.exact,
        )
        with counting(console) as progress:
            task = progress.add_task("")
            result = search(
                lm,
                examples,
                settings=settings,
                vocabulary_texts=more,
                journal=journal,
                on_progress=lambda done, total, what: progress.update(
                    task, completed=done, total=total, description=what
                ),
            )
            result.file.save(args.out)  # before the bar ends, as in run_profile
    except KeyboardInterrupt:
        if journal.exists():
            say(console, f"the same command goes on from {journal}")
        raise
    remove(journal)
    _show(result, args.out, console)
    plan, vocabulary = result.file.plan, result.file.draft_vocabulary
    return {
        "model": args.model,
        "out": args.out,
        "draft_layers": list(plan.layers) if plan else None,
        "draft_vocabulary": None if vocabulary is None else len(vocabulary),
        **result.file.measurements,
    }


def _show(result: "SearchResult", out: str, console: Console) -> None:
    """What was tried, and what came of it."""
    console.print(_tried_table(result))
    if result.trimming is not None:
        if result.trimming.tried:
            console.print(_vocabulary_table(result.trimming))
        say(console, result.trimming.verdict)
    say(console, f"{result.verdict}; written to {out}")


def _tried_table(result: "SearchResult") -> Table:
    """Every plan that was measured, the best prediction first."""
    found = result.file.measurements
    shown = new_table(
        ("draft layers", "found by", *FIGURES),
        left=("draft layers", "found by"),
        wrapped=("draft layers",),
        title=f"{found['positions']} positions of {found['texts']} texts, "
        f"temperature {found['temperature']:g}",
    )
    for tried in result.tried:
        shown.add_row(ranges(tried.plan.layers), tried.found_by, *_figures(tried))
    return shown


def _vocabulary_table(trimming: "Trimming") -> Table:
    """Every draft vocabulary that was measured, the whole one first."""
    shown = new_table(
        ("ids", "coverage", *FIGURES),
        title=f"draft vocabularies, ranked by {trimming.ranked_tokens} tokens of other texts",
    )
    for tried in trimming.tried:
        ids = "all" if tried.ids is None else str(len(tried.ids))
        shown.add_row(ids, f"{tried.coverage:.1%}", *_figures(tried))
    return shown


def _figures(found: "Found") -> tuple[str, ...]:
    """As ``FIGURES`` has them."""
    return (
        f"{found.counts.first:.0%}",
        f"{found.counts.lengths[found.num_draft_tokens]:.2f}",
        f"{found.c:.3f}",
        str(found.num_draft_tokens),
        f"{found.predicted:.2f}x",
        "" if found.measured is None else f"{found.measured[0]:.2f}x",
    )
