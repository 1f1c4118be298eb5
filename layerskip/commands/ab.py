"""``layerskip ab``: two settings on the same prompts, and whether one is really faster."""

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from layerskip.commands.options import (
    MOST_SAID,
    bad_lines_option,
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

if TYPE_CHECKING:
    from layerskip.ab_result import ABResult, Speedup
    from layerskip.telemetry.traffic import Traffic


def add_parsers(commands: Any) -> None:
    """Add this module's command to those of ``add_subparsers``."""
    command = commands.add_parser("ab", help="compare two settings on your own prompts")
    command.set_defaults(run=run_ab, num_draft_tokens=0)  # else the loader measures by itself
    model_options(command)
    command.add_argument("--prompts", metavar="FILE", required=True, help="JSON lines")
    arms = "0 is plain, a number of draft tokens, 'auto', or a policy file"
    command.add_argument("--a", default="0", metavar="ARM", help=f"{arms} (default 0)")
    command.add_argument("--b", default="auto", metavar="ARM", help="the same (default auto)")
    bad_lines_option(command)
    command.add_argument("--limit", type=int, help="most prompts (default all)")
    command.add_argument(
        "--repeats", type=int, default=1, help="runs of each prompt in each arm (default 1)"
    )
    sampling_options(command)


def run_ab(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Both arms' times, their ratios with intervals, and the winner, if there is one."""
    from layerskip.params import check_integer

    with importing():
        from layerskip.ab import Arm, ab
        from layerskip.telemetry.traffic import Traffic

    check_integer("--repeats", args.repeats, 1)
    check_integer("--max-new-tokens", args.max_new_tokens, 1)
    a, b, sampling = Arm.parse(args.a), Arm.parse(args.b), sampling_of(args)
    labels = [arm.policy.label for arm in (a, b) if arm.policy and arm.policy.label]
    traffic = Traffic.read(args.prompts, labels=labels, bad_lines=args.bad_lines, limit=args.limit)
    say_bad_lines(console, traffic)
    lm = load(args)
    if a.num_draft_tokens != 0 or b.num_draft_tokens != 0:
        lm.warn_without_plan(args.model)
    with counting(console) as progress:
        task = progress.add_task("runs")
        result = ab(
            lm,
            traffic,
            a=a,
            b=b,
            max_new_tokens=args.max_new_tokens,
            sampling=replace(sampling, seed=None),
            repeats=args.repeats,
            seed=args.seed or 0,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    _show(console, result, traffic)
    return {"model": args.model, "temperature": sampling.temperature, **result.to_dict()}


def _show(console: Console, result: "ABResult", traffic: "Traffic") -> None:
    if result.interrupted:
        say(console, f"interrupted after {len(result.pairs)} of {traffic.count} prompts", "yellow")
    for index, why in list(result.left_out.items())[:MOST_SAID]:
        say(console, f"line {index + 1} left out: {why}")
    if len(result.left_out) > MOST_SAID:
        say(console, f"{len(result.left_out)} prompts left out in all")
    console.print(_table(result))
    say(console, result.equality, "bold red" if result.differences else None)
    say(console, result.verdict, "bold")


def _table(result: "ABResult") -> Table:
    shown = new_table(
        ("", escape(f"a ({result.a})"), escape(f"b ({result.b})"), "b vs a", "95 %"),
        left=("",),
        title=f"{len(result.pairs)} prompts, {len(result.pairs[0].a)} runs of each in each arm",
        caption="b's speed over a's; above 1, b is faster",
    )
    arms = [result.summaries[side] for side in ("a", "b")]
    for name, time, ratio in (
        ("first token, p50", "ttft_p50", ("", "")),
        ("a token after it, p50", "per_token_p50", _ratio(result.per_token)),
        ("end to end, p50", "end_to_end_p50", _ratio(result.end_to_end)),
        ("end to end, p90", "end_to_end_p90", ("", "")),
    ):
        shown.add_row(name, *(_ms(getattr(arm, time)) for arm in arms), *ratio)
    speeds = (f"{arm.tokens_per_second:.1f}" for arm in arms)
    shown.add_row("tokens/s", *speeds, *_ratio(result.tokens_per_second))
    return shown


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f} ms"


def _ratio(ratio: "Speedup | None") -> tuple[str, str]:
    if ratio is None:
        return "-", ""
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.2f}x", "too few"
    return f"{ratio.value:.2f}x", f"{ratio.low:.2f}-{ratio.high:.2f}"
