"""``layerskip info``: what a checkpoint is, what came with its plan, and which paths run."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from layerskip import __version__
from layerskip.commands.options import draft_options, load, model_options

if TYPE_CHECKING:
    from layerskip.api import SelfSpeculativeLM


def add_parsers(commands: Any) -> None:
    """Add this module's command to those of ``add_subparsers``."""
    info = commands.add_parser("info", help="what a checkpoint is and which paths run")
    info.set_defaults(run=run_info)
    model_options(info)
    draft_options(info)


def run_info(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """``layerskip info``."""
    from layerskip.errors import UnsupportedModelError
    from layerskip.ops.build import description

    try:
        lm = load(args)
    except UnsupportedModelError as error:
        refused = {"model": args.model, "supported": False, "reason": str(error)}
        console.print(_facts_table(refused))
        return refused
    import torch

    stack = lm.stack
    gpu = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    document = {
        "model": args.model,
        "supported": True,
        "architecture": stack.twin.config.model_type,
        "num_layers": stack.num_layers,
        "exit_layers": f"1 to {stack.num_layers - 1}" if stack.num_layers > 1 else "none",
        "trained_exits": list(lm.trained_exits) or "the checkpoint does not say",
        "plan_from": _source(args, lm),
        "draft_layers": list(lm.plan.layers) if lm.plan else None,
        "shared_depth": lm.plan.shared_depth if lm.plan else None,
        "exit_adapter": _adapter(lm),
        "draft_vocabulary": _vocabulary(lm),
        "num_draft_tokens": lm.num_draft_tokens,
        "cost_table": _cost(lm),
        "vocab_size": stack.vocab_size,
        "max_positions": stack.max_positions,
        "parameters": sum(p.numel() for p in stack.twin.parameters()),
        "dtype": str(stack.dtype).removeprefix("torch."),
        "device": str(stack.device),
        "threads": torch.get_num_threads(),
        "kv_cache_bytes_per_token": stack.kv_bytes_per_token,
        "bit_identical": stack.exactness.wanted,
        "exactness": lm.exactness,
        "stack": lm.stack_choice,
        "rounds": lm.rounds_choice,
        "backend": stack.backend,
        "kernels": description(gpu),
        "version": __version__,
    }
    console.print(_facts_table(document))
    return document


def _facts_table(document: dict[str, Any]) -> Table:
    table = Table(show_header=False, title=f"layerskip {__version__}")
    for key, value in document.items():
        table.add_row(key.replace("_", " "), escape(str(value)))
    return table


def _source(args: argparse.Namespace, lm: "SelfSpeculativeLM") -> str:
    from layerskip.checkpoint import BUILTIN, PLAN_FILE, builtin_folder

    if args.plan:
        return str(args.plan)
    if args.exit_layer is not None:
        return "--exit-layer"
    if args.exit_adapter:
        return "--exit-adapter"
    if lm.plan is None:
        return "nowhere: only look-ups draft" if lm.looks_up else "nowhere: nothing drafts"
    folder = builtin_folder() if args.model == BUILTIN else Path(args.model)
    if (folder / PLAN_FILE).is_file():
        return f"{PLAN_FILE} of the checkpoint"
    return "the first of the trained exits that its config names"


def _adapter(lm: "SelfSpeculativeLM") -> str:
    adapter = lm.stack.adapter
    if adapter is None:
        return "none"
    shape, count = adapter.shape, sum(p.numel() for p in adapter.parameters())
    parts = ["norm"] if shape.norm else []
    parts += [f"head rank {shape.head_rank}"] if shape.head_rank else []
    parts += [f"bridge rank {shape.bridge_rank}"] if shape.bridge_rank else []
    parts += [f"block of width {shape.block_width}"] if shape.block_width else []
    return (
        f"after layer {shape.exit_layer}: {', '.join(parts)}; {count} parameters, "
        f"temperature {adapter.temperature:g}"
    )


def _vocabulary(lm: "SelfSpeculativeLM") -> str:
    ids, vocab_size = lm.plan_file.draft_vocabulary, lm.stack.vocab_size
    if ids is None or lm.plan is None:
        return f"all {vocab_size} ids"
    if lm.draft_head is None or lm.coverage_meter is None:
        return f"all {vocab_size} ids: {lm.stack.why_whole_head}"
    # A round that the device runs by itself has one head for all rows.
    beside = ", in rounds that the host drives also" if lm.stack.runs_rounds else " and"
    return (
        f"{len(ids)} of {vocab_size} ids{beside} those of a row's own text; "
        f"{lm.coverage_meter.least_coverage:.1%} of what is emitted is promised to be among them"
    )


def _cost(lm: "SelfSpeculativeLM") -> str:
    """Whether a saved table is used."""
    from layerskip.fingerprint import mismatch

    saved = lm.plan_file.cost
    if saved is None:
        saves = "" if lm.stack.adapter is not None else "; layerskip search saves one"
        return f"none saved: measured at each load with 'auto', in about a second{saves}"
    difference = mismatch(saved, lm.stack, lm.plan, lm.plan_file.draft_vocabulary)
    return "saved, and of this machine" if difference is None else f"not used: {difference}"
