"""What commands share: which model, how it is loaded, and how tables look."""

import argparse
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.markup import escape
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table

from layerskip.commands.signals import importing
from layerskip.params import (
    DEFAULT_MAX_NEW_TOKENS,
    NumDraftTokens,
    SamplingParams,
    read_num_draft_tokens,
)
from layerskip.text import NOT_TEXT, TextStream, by_origin

if TYPE_CHECKING:
    from rich.console import Console

    from layerskip.api import SelfSpeculativeLM
    from layerskip.outputs import Round
    from layerskip.plan import PlanFile
    from layerskip.policy import Policy
    from layerskip.prompts import Example
    from layerskip.telemetry.traffic import Traffic

READ_FILES = ("prompts", "vocabulary_texts", "plan", "cost")  # options that name them
# What a model's folder, or an exit adapter's, is loaded from.
LOADED_FILES = (
    *("*config.json", "*.safetensors*", "*.bin*", "tokenizer*", "vocab*", "merges.txt", "*.model"),
    *("*tokens*.json", "chat_template*", "exit_adapter.json", "layerskip.json"),
)
MOST_SAID = 5  # bad lines and prompts left out that are named; the others are counted
# How tokens are shown, by where they came from.
STYLES = {
    "prefill": "bold",
    "plain": "",
    "accepted": "green",
    "recovered": "yellow",
    "bonus": "cyan",
}


def print_text(console: "Console", text: str, style: str) -> None:
    """Text as it is. As a string rich would take it for markup, wrap it and expand its tabs."""
    console.print(Segments([Segment(text, Style.parse(style))]), end="", soft_wrap=True)


def print_round(
    console: "Console", stream: TextStream, record: "Round", eos_ids: Collection[int] = ()
) -> None:
    """A round's text, each token in the style of its origin; ends of sequence are none."""
    for text, origin in by_origin(stream, record, eos_ids):
        print_text(console, text, STYLES[origin])


def say(console: "Console", text: str, style: str | None = None) -> None:
    """A line as it is, without what a terminal would follow."""
    console.print(cell(text), style=style, highlight=False, soft_wrap=True)


def cell(text: str) -> str:
    """Somebody's text, as for a table: no markup, and nothing that a terminal would follow."""
    return escape(text.translate(NOT_TEXT))


def new_table(
    columns: Iterable[str],
    *,
    left: Collection[str] = (),
    wrapped: Collection[str] = (),
    gap: int = 2,
    title: str | None = None,
    caption: str | None = None,
) -> Table:
    """An empty table without lines around its cells.

    Args:
        columns: their names, of numbers.
        left: those of words instead.
        wrapped: those that may take several lines where a row is too long.
        gap: blanks between two columns.
        title, caption: above and below.
    """
    shown = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, title=title, caption=caption)
    for name in columns:
        side: Literal["left", "right"] = "left" if name in left else "right"
        # Digits that find no room leave a mark: 179 and no more is another number than 1798.
        overflow: Literal["fold", "ellipsis"] = "fold" if name in wrapped else "ellipsis"
        shown.add_column(name, justify=side, no_wrap=name not in wrapped, overflow=overflow)
    return shown


def bad_lines_option(command: argparse.ArgumentParser) -> None:
    """What is done about lines of a prompt file that are none."""
    command.add_argument(
        "--bad-lines",
        choices=("fail", "skip"),
        default="fail",
        help="what a line that is no prompt does (default fail)",
    )


def say_bad_lines(console: "Console", traffic: "Traffic") -> None:
    """Which lines are skipped: the first ones, and how many there are."""
    for line in traffic.bad_lines[:MOST_SAID]:
        say(console, f"line {line.number} skipped: {line.reason}")
    if traffic.num_bad_lines > MOST_SAID:
        say(console, f"{traffic.num_bad_lines} lines skipped in all")


def model_options(
    command: argparse.ArgumentParser, *, drafts: bool = True, lookup: bool = True
) -> None:
    """Model, what drafts where it can be given, dtype, device and the form of the answer."""
    command.add_argument(
        "model", nargs="?", default="builtin", help="folder, hub id or 'builtin' (the default)"
    )
    if drafts:
        plan = command.add_mutually_exclusive_group()
        plan.add_argument("--exit-layer", type=int, help="draft with this many leading layers")
        plan.add_argument("--plan", metavar="FILE", help="draft with the plan in this JSON file")
        command.add_argument(
            "--exit-adapter", metavar="DIR", help="draft at the exit that this folder's is of"
        )
    if drafts and lookup:
        command.add_argument(
            "--lookup",
            action=argparse.BooleanOptionalAction,
            default=None,
            help="whether tokens are looked up in prompt and output (the default where the host "
            "drives rounds)",
        )
    command.add_argument("--dtype", help="bfloat16, float16, float32; default: the checkpoint's")
    command.add_argument("--device", default="auto", help="cpu, cuda or auto (default %(default)s)")
    command.add_argument(
        "--exact",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether a row's bits may not depend on drafts and batch (the default)",
    )
    command.add_argument("--json", action="store_true", help="one JSON document as last line")


def _num_draft_tokens(text: str) -> NumDraftTokens:
    try:
        return read_num_draft_tokens(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number or 'auto', got {text!r}") from None


def draft_options(command: argparse.ArgumentParser) -> None:
    """How much is drafted, for commands that decode."""
    command.add_argument(
        "--num-draft-tokens",
        type=_num_draft_tokens,
        metavar="N",
        help="drafted per round: 0 (plain) to 32, or 'auto', what pays, at most 16 (default: as "
        "the plan file says, else 'auto')",
    )


def examples_of(prompts: str | None, limit: int) -> "list[Example]":
    """Those of a file, or without one so many of this Python's held-out code."""
    with importing():
        from layerskip.checkpoint import held_out_modules
    from layerskip.prompts import held_out_code, read_prompts

    if prompts is not None:
        return read_prompts(prompts)
    return held_out_code(held_out_modules(), limit)


def output_of(args: argparse.Namespace, option: str, *, is_plan: bool = False) -> Path:
    """The file that an option names for the command to write, asked for before any work.

    Args:
        is_plan: what is written is a plan, and may be the one that the model is loaded with.

    Raises:
        ValueError: it cannot be written, or the command reads it: what it holds would be lost.
    """
    from layerskip.files import check_writable

    path = getattr(args, option)
    file = check_writable(path)
    for name, source in _inputs(args, is_plan=is_plan):
        if os.path.realpath(source) == str(file):
            raise ValueError(f"--{option} {path} would overwrite {name}; give another name")
    return file


def _inputs(args: argparse.Namespace, *, is_plan: bool) -> Iterator[tuple[str, str]]:
    """Files that the command reads as well, and what they are."""
    for option in READ_FILES:
        path = getattr(args, option, None)
        if path is not None:
            yield f"the file of --{option.replace('_', '-')}", path
    runs = getattr(args, "runs", None)
    if runs is not None:
        from layerskip.telemetry.runs import FILES

        for name in FILES:  # any other name there is free, as of the report's page
            yield "a file of the runs", str(Path(runs) / name)
    for option, what in (("model", "the model"), ("exit_adapter", "the exit adapter")):
        folder = getattr(args, option, None)
        if folder is None:
            continue
        with importing():
            from layerskip.checkpoint import BUILTIN, PLAN_FILE, builtin_folder

        path = builtin_folder() if folder == BUILTIN else Path(folder)
        # A plan file is looked for there: a new one, too, would be taken for the model's.
        names = {PLAN_FILE}
        for pattern in LOADED_FILES if path.is_dir() else ():  # cost tables may lie there as well
            names |= {p.name for p in path.glob(pattern)}
        for name in names - ({PLAN_FILE} if is_plan else set()):
            yield f"a file of {what}", str(path / name)


def sampling_option(
    command: argparse.ArgumentParser, name: str, kind: type[int] | type[float], what: str
) -> None:
    """One field of ``SamplingParams``, with its default."""
    command.add_argument(
        f"--{name.replace('_', '-')}",
        type=kind,
        default=getattr(SamplingParams, name),
        help=f"{what} (default %(default)s)",
    )


def sampling_options(command: argparse.ArgumentParser) -> None:
    """The target distribution, and how many tokens of it."""
    command.add_argument(
        "--max-new-tokens",
        type=int,
        default=DEFAULT_MAX_NEW_TOKENS,
        help="most tokens after a prompt (default %(default)s)",
    )
    for name, kind, what in (
        ("temperature", float, "0 is greedy"),
        ("top_k", int, "how many of the likeliest tokens are kept; 0 keeps all"),
        ("top_p", float, "probability that the tokens kept have to reach; 1 keeps all"),
        ("min_p", float, "times the likeliest token's probability: less is dropped"),
    ):
        sampling_option(command, name, kind, what)
    command.add_argument("--seed", type=int)


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """What the options say of sampling."""
    from dataclasses import fields

    options = vars(args)
    return SamplingParams(
        **{f.name: options[f.name] for f in fields(SamplingParams) if f.name in options}
    )


def quiet() -> None:
    """No warnings and bars from transformers. It is imported here, and what else takes long."""
    with importing():
        import transformers

        import layerskip.api  # noqa: F401

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def chosen_plan(args: argparse.Namespace) -> "PlanFile | None":
    """The plan file that ``--plan`` names."""
    from layerskip.plan import PlanFile

    return PlanFile.load(args.plan) if args.plan is not None else None


def chosen_policy(args: argparse.Namespace) -> "Policy | None":
    """The policy that ``--policy`` names, of a command that has it."""
    from layerskip.policy import Policy

    path = getattr(args, "policy", None)
    return Policy.load(path) if path is not None else None


def load(args: argparse.Namespace) -> "SelfSpeculativeLM":
    """The model, wrapped as the options say."""
    quiet()
    from layerskip.api import SelfSpeculativeLM

    return SelfSpeculativeLM.from_pretrained(
        args.model,
        exit_layer=args.exit_layer,
        plan=chosen_plan(args),
        num_draft_tokens=getattr(args, "num_draft_tokens", None),
        dtype=args.dtype,
        device=args.device,
        exact=args.exact,
        lookup=getattr(args, "lookup", None),
        policy=chosen_policy(args),
        exit_adapter=args.exit_adapter,
    )
