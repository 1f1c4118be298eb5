"""Commands that time our decoding beside transformers': compare, demo."""

import argparse
import math
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from layerskip.commands.options import (
    STYLES,
    chosen_plan,
    draft_options,
    examples_of,
    load,
    model_options,
    new_table,
    print_round,
    print_text,
    quiet,
    sampling_of,
    sampling_options,
    say,
)
from layerskip.text import TextStream

if TYPE_CHECKING:
    from layerskip.api import SelfSpeculativeLM
    from layerskip.params import SamplingParams
    from layerskip.prompts import Example

DEFAULT_MODES = "plain,layerskip,hf,hf-early-exit,hf-prompt-lookup"  # of compare, if none are named
MOST_EXITS = 8  # that --teacher-forced reads if none is named
# What it has no use for: nothing is decoded, and exits are read with the whole head.
OF_DECODING = ("plan", "lookup", "num_draft_tokens", "modes", "repeats", "max_repeated")
DEMO_MODES = ("hf", "hf-early-exit", "plain", "layerskip")
DEMO_NAMES = {
    "hf": "transformers generate",
    "hf-early-exit": "transformers early exit",
    "plain": "layerskip plain",
    "layerskip": "layerskip self-spec.",
}


def add_parsers(commands: Any) -> None:
    """Add this module's commands to those of ``add_subparsers``."""
    comparing = commands.add_parser("compare", help="time our modes and transformers' in turn")
    comparing.set_defaults(run=run_compare)
    model_options(comparing)
    draft_options(comparing)
    comparing.add_argument(
        "--prompts", metavar="FILE", help="JSON lines; without it, held-out library code"
    )
    comparing.add_argument(
        "--modes", help=f"default {DEFAULT_MODES}, less what a model cannot have"
    )
    comparing.add_argument(
        "--limit",
        type=int,
        default=50,
        help="most prompts (default 50); transformers' early exit is tuned on the first three, "
        "which are not timed where three others are left",
    )
    comparing.add_argument(
        "--repeats", type=int, default=3, help="timed runs of each prompt in each mode (default 3)"
    )
    comparing.add_argument(
        "--max-repeated",
        type=float,
        default=1.0,
        help="leave out prompts whose plain output repeats more of its 8-grams (default 1.0)",
    )
    comparing.add_argument(
        "--teacher-forced",
        action="store_true",
        help="acceptance along the real continuations instead of generated text, at --exit-layer "
        f"or the first {MOST_EXITS} exits",
    )
    sampling_options(comparing)
    comparing.set_defaults(of_decoding={n: comparing.get_default(n) for n in OF_DECODING})
    demo = commands.add_parser("demo", help="complete held-out code and compare four decoders")
    demo.set_defaults(run=run_demo)
    model_options(demo)
    draft_options(demo)
    demo.add_argument("--limit", type=int, default=4, help="prompts (default 4)")
    demo.add_argument("--max-new-tokens", type=int, default=96, help="of each (default 96)")


def _check_counts(args: argparse.Namespace, *names: str) -> None:
    from layerskip.params import check_integer

    for name in names:
        check_integer(f"--{name.replace('_', '-')}", getattr(args, name), 1)


def run_compare(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """``layerskip compare``."""
    quiet()
    from layerskip.compare import MODES, compare
    from layerskip.hf_modes import PROMPT_LOOKUP_TOKENS
    from layerskip.params import check_number

    named = args.modes is not None
    modes = tuple(mode.strip() for mode in (args.modes if named else DEFAULT_MODES).split(","))
    unknown = [m for m in modes if m not in MODES]
    if unknown:
        wrong = ", ".join(map(repr, unknown))
        raise ValueError(f"--modes has {wrong}; allowed are {', '.join(MODES)}")
    _check_counts(args, "limit", "repeats", "max_new_tokens")
    check_number("--max-repeated", args.max_repeated, 0.0, math.inf)
    sampling = sampling_of(args)
    if args.teacher_forced:
        return _teacher_forced(args, sampling, console)
    examples = examples_of(args.prompts, args.limit)[: args.limit]
    comparison = _comparison(args, sampling, args.max_new_tokens)
    looked_up = PROMPT_LOOKUP_TOKENS if "hf-prompt-lookup" in modes else 0
    fit = _fitting(comparison.lm, examples, args.max_new_tokens, console, looked_up)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("prompts", total=len(fit))
        document = compare(
            comparison,
            fit,
            modes=modes,
            repeats=args.repeats,
            optional=() if named else modes,
            max_repeated=args.max_repeated,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    document = {"model": args.model, **document, "prompts_too_long": len(examples) - len(fit)}
    console.print(_mode_table(document))
    _say_unsupported(document, console)
    return document


def _teacher_forced(
    args: argparse.Namespace, sampling: "SamplingParams", console: Console
) -> dict[str, Any]:
    """``layerskip compare --teacher-forced``."""
    from layerskip.teacher_forced import teacher_forced

    given = [n for n, default in args.of_decoding.items() if getattr(args, n) != default]
    if given:
        raise ValueError(
            f"--teacher-forced decodes nothing: leave out --{given[0].replace('_', '-')}; "
            "--exit-layer names the exit that it reads"
        )
    args.num_draft_tokens = 0  # else the loader measures what nothing here asks for
    examples, lm = examples_of(args.prompts, args.limit)[: args.limit], load(args)
    fit = _fitting(lm, examples, args.max_new_tokens, console)
    shallow = set(range(1, min(MOST_EXITS + 1, lm.stack.num_layers)))
    if lm.stack.adapter is not None:
        shallow.add(lm.stack.adapter.shape.exit_layer)
    document = teacher_forced(
        lm,
        fit,
        sampling=sampling,
        exits=sorted(shallow) if args.exit_layer is None else (args.exit_layer,),
        max_new_tokens=args.max_new_tokens,
    )
    document = {"model": args.model, **document, "prompts_too_long": len(examples) - len(fit)}
    console.print(_exit_table(document))
    return document


def _say_unsupported(document: dict[str, Any], console: Console) -> None:
    """Which modes the model cannot have, and why."""
    for mode, reason in document["unsupported"].items():
        say(console, f"{mode} left out: {reason}", "dim")


def _fitting(
    lm: "SelfSpeculativeLM",
    examples: "list[Example]",
    max_new_tokens: int,
    console: Console,
    looked_up: int = 0,
) -> "list[Example]":
    """Those that leave room for so many tokens, and for what transformers looks up beyond them,
    which it does not cut at the end of the positions; the others are counted aloud."""
    if lm.tokenizer is None:
        raise ValueError("prompts of text need a tokenizer, and this model has none")
    room = lm.stack.max_positions - max_new_tokens - looked_up
    wanted = f"{max_new_tokens} new tokens"
    if looked_up:
        wanted += f" and {looked_up} that transformers looks up"
    lengths = [len(lm.tokenizer(e.prompt)["input_ids"]) for e in examples]
    if 0 in lengths:
        raise ValueError(f"prompt {lengths.index(0) + 1} has no token; leave it out")
    fit = [e for e, length in zip(examples, lengths, strict=True) if length <= room]
    if not fit:
        raise ValueError(
            f"no prompt leaves room for {wanted} in the model's {lm.stack.max_positions} positions"
        )
    if len(fit) < len(examples):
        console.print(
            f"{len(examples) - len(fit)} of {len(examples)} prompts left out: they leave no room "
            f"for {wanted} in the model's positions",
            style="dim",
        )
    return fit


def _comparison(args: argparse.Namespace, sampling: "SamplingParams", tokens: int) -> Any:
    from dataclasses import replace

    from layerskip.api import SelfSpeculativeLM
    from layerskip.compare import Comparison
    from layerskip.exit_adapter import ExitAdapter

    if not sampling.greedy and sampling.seed is None:
        sampling = replace(sampling, seed=0)
    model, tokenizer, plan, num_draft_tokens = SelfSpeculativeLM.load_parts(
        args.model,
        exit_layer=args.exit_layer,
        plan=chosen_plan(args),
        num_draft_tokens=args.num_draft_tokens,
        dtype=args.dtype,
        device=args.device,
        exit_adapter=args.exit_adapter,
    )
    lm = SelfSpeculativeLM(
        model,
        tokenizer,
        plan,
        num_draft_tokens=num_draft_tokens,
        exact=args.exact,
        lookup=args.lookup,
        exit_adapter=ExitAdapter.load(args.exit_adapter, model) if args.exit_adapter else None,
    )
    if num_draft_tokens != 0:
        lm.warn_without_plan(args.model)
    return Comparison(model, lm, sampling=sampling, max_new_tokens=tokens)


def _mode_table(document: dict[str, Any], names: dict[str, str] | None = None) -> Table:
    from layerskip.bootstrap import LEAST_PROMPTS

    sure = "95 %" if document["prompts"] >= LEAST_PROMPTS else "lowest-highest"
    table = new_table(
        ("mode", "tok/s", "vs plain", sure, "same", "accepted", "length"),
        left=("mode",),
        title=f"{document['prompts']} prompts, {document['new_tokens']} tokens, "
        f"temperature {document['temperature']:g}, {document['threads']} threads, "
        f"repeated 8-grams {document['repeated_8gram_share']:.0%}",
    )
    for mode, row in document["modes"].items():
        low, high = row["speedup_vs_plain_ci95"]
        table.add_row(
            (names or {}).get(mode, mode),
            f"{row['tokens_per_second']:.0f}",
            f"{row['speedup_vs_plain']:.2f}x",
            f"{low:.2f}-{high:.2f}",
            _share(row["identical_to_plain"]),
            _share(row["acceptance_rate"]),
            "-" if row["mean_accepted_length"] is None else f"{row['mean_accepted_length']:.2f}",
        )
    theory = document.get("theory")
    if theory:
        table.caption = (
            f"theory: length / (d c + v) = {theory['speedup']:.2f}x "
            f"with c = {theory['c']:.3f}, v = {theory['v']:.3f} from bare passes"
        )
    return table


def _exit_table(document: dict[str, Any]) -> Table:
    table = Table(
        title=f"teacher-forced, {document['positions']} positions of {document['prompts']} prompts"
    )
    for name in ("exit layer", "first draft token accepted", "overlap"):
        table.add_column(name, justify="right")
    for e, row in document["exits"].items():
        table.add_row(str(e), f"{row['acceptance_rate']:.3f}", f"{row['overlap']:.3f}")
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def run_demo(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """``layerskip demo``."""
    from layerskip.compare import compare
    from layerskip.params import SamplingParams

    _check_counts(args, "limit", "max_new_tokens")
    quiet()
    examples = examples_of(None, args.limit)
    comparison = _comparison(args, SamplingParams(), args.max_new_tokens)
    fit = _fitting(comparison.lm, examples, args.max_new_tokens, console)
    legend = ", ".join(f"[{STYLES[o]}]{o}[/]" for o in ("accepted", "recovered", "bonus"))
    console.print(f"Held-out code, completed by {escape(args.model)}. Tokens: {legend}\n")
    for example in fit:
        tail = "\n".join(example.prompt.rstrip("\n").split("\n")[-4:]) + "\n"
        print_text(console, tail, "dim")
        stream = TextStream(comparison.lm.tokenizer, ())
        for record in comparison.lm.stream(example.prompt, max_new_tokens=args.max_new_tokens):
            print_round(console, stream, record, comparison.lm.eos_ids)
        console.print("\n")
    with console.status("timing four decoders in turn"):
        document = compare(
            comparison, fit, modes=DEMO_MODES, repeats=2, optional=DEMO_MODES, tuning_prompts=1
        )
    console.print(_mode_table(document, DEMO_NAMES))
    _say_unsupported(document, console)
    return {"model": args.model, **document, "prompts_too_long": len(examples) - len(fit)}
