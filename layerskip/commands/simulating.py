"""``layerskip simulate``: latency under load from a cost table and recorded acceptance."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.table import Table

from layerskip.commands.options import new_table, output_of, say
from layerskip.commands.progress import sharing

if TYPE_CHECKING:
    from layerskip.cost import CostTable
    from layerskip.machine_time import MachineTime
    from layerskip.pass_costs import Overhead
    from layerskip.simulate import Simulation
    from layerskip.telemetry.replay import Replay
    from layerskip.workload import Requests

CONCURRENCY = "1,2,4,8,16,32"
POLICIES = "off,fixed:4,auto"
FINE_ROWS = 64  # of a table that was not measured in a hurry
MOST_TOKENS = 10_000_000  # of an invented prompt

Number = TypeVar("Number", int, float)


def add_parsers(commands: Any) -> None:
    """Add this module's command to those of ``add_subparsers``."""
    command = commands.add_parser(
        "simulate", help="latency and throughput under load, before there is any"
    )
    command.set_defaults(run=run_simulate)
    command.add_argument(
        "--cost", metavar="FILE", required=True, help="cost table of layerskip profile"
    )
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--runs", metavar="DIR", help="folder of layerskip measure: its requests are drawn from"
    )
    source.add_argument(
        "--acceptance",
        metavar="A,B,...",
        help="invented instead: of the first, second, ... drafted token, if those before are right",
    )
    command.add_argument(
        "--concurrency", default=CONCURRENCY, help=f"users in a closed loop (default {CONCURRENCY})"
    )
    command.add_argument(
        "--policies", default=POLICIES, help=f"off, fixed:K, auto (default {POLICIES})"
    )
    command.add_argument(
        "--requests", type=int, default=2000, help="counted in each cell (default 2000)"
    )
    command.add_argument(
        "--new-tokens", type=int, help="of each request; default: as recorded, or 128 if invented"
    )
    command.add_argument("--prompt-tokens", type=int, help="of invented requests (default 256)")
    command.add_argument("--seed", type=int, default=0, help="of all that is drawn (default 0)")
    command.add_argument("--html", metavar="FILE", help="also a page with tables and charts")
    command.add_argument("--json", action="store_true", help="one JSON document as last line")


def run_simulate(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Simulate, print the table, write the page."""
    from layerskip.cost import CostTable
    from layerskip.params import check_integer
    from layerskip.simulate import simulate

    if args.html is not None:
        output_of(args, "html")
    check_integer("--seed", args.seed, 0)
    if args.new_tokens is not None:
        check_integer("--new-tokens", args.new_tokens, 1)
    concurrency = _numbers("--concurrency", args.concurrency, int)
    table = CostTable.load(args.cost)
    table, traffic, overhead, passes_per_token, machine, assumptions = _traffic(args, table)
    if table.verify.rows[-1] < FINE_ROWS:
        assumptions.append(
            f"The cost table ends at {table.verify.rows[-1]} rows, and beyond them is a guess: "
            "layerskip profile measures a finer one."
        )
    progress = sharing(console)
    task = progress.add_task("simulating", total=1.0)

    def advanced(done: int, total: int) -> None:
        progress.start()  # not before the first word: bad input is told without a bar
        progress.update(task, completed=done / total)

    try:
        simulation = simulate(
            table,
            traffic,
            concurrency=concurrency,
            policies=[name.strip() for name in args.policies.split(",")],
            num_requests=args.requests,
            new_tokens=args.new_tokens,
            seed=args.seed,
            overhead=overhead,
            passes_per_token=passes_per_token,
            machine=machine,
            on_progress=advanced,
        )
        said = [*crossings(simulation), *assumptions]
        if args.html is not None:  # before the bar ends, which ends all where nobody reads stdout
            from layerskip.telemetry.simulation_page import write_page

            write_page(args.html, simulation, said)
    finally:
        if progress.live.is_started:
            progress.stop()
    console.print(_shown(simulation))
    for line in said:
        say(console, line)
    return {
        "cost": args.cost,
        "runs": args.runs,
        "synthetic": args.runs is None,
        "assumptions": assumptions,
        **simulation.to_dict(),
    }


def _traffic(
    args: argparse.Namespace, table: "CostTable"
) -> "tuple[CostTable, Requests, Overhead | None, float, MachineTime | None, list[str]]":
    """The table of such traffic, requests, what rounds take beside passes, draft passes of a token,
    the machine's pace, and what to say of it."""
    if args.runs is None:
        from layerskip.params import check_integer
        from layerskip.workload import Synthetic

        prompt_tokens = 256 if args.prompt_tokens is None else args.prompt_tokens
        check_integer("--prompt-tokens", prompt_tokens, 1, MOST_TOKENS)
        acceptance = tuple(_numbers("--acceptance", args.acceptance, float))
        invented = Synthetic(acceptance, prompt_tokens, args.new_tokens or 128)
        said = [SYNTHETIC, BY_TABLE]
        if _drafts_cost_nothing(args, table):
            said.insert(0, NO_DRAFT_PASSES)
        return table, invented, None, 1.0, None, said
    if args.prompt_tokens is not None:
        raise ValueError("--prompt-tokens is for --acceptance; with --runs they are as recorded")
    from layerskip.telemetry.replay import replay

    known = replay(args.runs, table)
    if _drafts_cost_nothing(args, table):
        raise ValueError(
            f"{args.cost} has no draft passes, and the runs' drafts are an early exit's: give "
            "layerskip profile their --exit-layer or --plan"
        )
    extra = known.overhead
    said = [f"{known.num_requests} recorded requests of {args.runs}, drawn with replacement."]
    if known.of_this_table:
        said.append(
            f"Prefill as recorded. Recorded rounds took {extra.verify_ratio:.2f} times the table's "
            f"passes in verify and {extra.draft_ratio:.2f} times in drafts, and "
            f"{1e6 * extra.row:.0f} us outside: so do simulated ones, the last for each row."
        )
    else:
        said += [_other_times(known), BY_TABLE]
    if known.passes_per_token < 1.0:
        said.append(
            f"Look-ups: {known.passes_per_token:.2f} draft passes a drafted token, as recorded; in "
            "larger batches they save less."
        )
    if not known.recorded.has_confidence:
        said.append(NO_CONFIDENCE)
    if known.machine is not None:
        said.append(
            f"The machine's pace changed while it recorded, and does so again: in all it took "
            f"{known.machine.slowness:.2f} times as long as if no round had been slower or faster "
            "than usual."
        )
    return known.table, known.recorded, extra, known.passes_per_token, known.machine, said


def _other_times(known: "Replay") -> str:
    """Why recorded seconds do not count, and what recorded acceptance is of."""
    why = "The runs do not tell what their passes were measured with"
    if known.differing:
        why = f"The cost table was measured {', '.join(known.differing.values())}"
    but = ", though it is of another draft than the table's" if known.of_another_draft else ""
    return f"{why}: recorded seconds are not used, recorded acceptance is{but}."


def _drafts_cost_nothing(args: argparse.Namespace, table: "CostTable") -> bool:
    """Whether a policy drafts, and the table is of no draft layers."""
    names = {name.strip() for name in args.policies.split(",")}
    return table.key.get("draft_layers") == "none" and names != {"off"}


NO_DRAFT_PASSES = (
    "The cost table has no draft passes, so drafts cost what looked-up tokens do: of an early exit "
    "give layerskip profile its --exit-layer or --plan."
)
SYNTHETIC = (
    "Synthetic: acceptance and lengths are invented, not recorded; tokens are drawn, as at a "
    "temperature above 0."
)
BY_TABLE = (
    "Prefill by the table alone, which is too much for a small model; no engine time beside passes."
)
NO_CONFIDENCE = (
    "No round says how sure its draft was, as those of an automatic arm do where the host starts "
    "them: auto is simulated without it, and would do better."
)


def crossings(simulation: "Simulation") -> list[str]:
    """A sentence for each policy that drafts: where plain decoding overtakes it."""
    said = []
    for crossing in simulation.crossovers:
        if crossing.off is None:
            said.append(f"{crossing.policy} is never slower than off up to {_users(crossing.on)}.")
        elif crossing.on is None:
            said.append(f"{crossing.policy} is slower than off from {_users(crossing.off)} on.")
        else:
            said.append(
                f"{crossing.policy} is faster than off up to {_users(crossing.on)} and slower at "
                f"{crossing.off}: the crossover lies between."
            )
    return said


def _users(number: int | None) -> str:
    return f"{number} user" + "s" * (number != 1)


def _shown(simulation: "Simulation") -> Table:
    """One line for each concurrency and policy."""
    times = [h for of in ("first", "token", "whole") for h in (f"{of}\np50", "\np90", "\np99")]
    shown = new_table(
        ("users", "policy", *times, "tok/s", "vs\noff"),
        left=("policy",),
        gap=1,
        title=f"{simulation.num_requests} requests each: first token and each further one in ms, "
        "end to end in s",
    )
    shown.columns[0].min_width = 3
    plain = {c.concurrency: c.tokens_per_second for c in simulation.cells if c.policy == "off"}
    for cell in simulation.cells:
        spreads = ((cell.first_token, 1e3), (cell.token, 1e3), (cell.end_to_end, 1.0))
        against = cell.tokens_per_second / plain.get(cell.concurrency, float("nan"))
        shown.add_row(
            str(cell.concurrency),
            cell.policy,
            *(_brief(unit * t) for s, unit in spreads for t in (s.p50, s.p90, s.p99)),
            _brief(cell.tokens_per_second),
            f"{against:.2f}" if plain else "-",
        )
    return shown


def _brief(value: float) -> str:
    """Three figures, but no fewer than the whole number has."""
    return f"{value:.0f}" if value >= 100.0 else f"{value:.3g}"


def _numbers(option: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} must be numbers with commas between, got {text!r}") from None
