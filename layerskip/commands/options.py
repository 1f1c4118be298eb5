"""What commands share: which model, and how it is loaded."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerskip.api import SelfSpeculativeLM
    from layerskip.plan import PlanFile


def model_options(command: argparse.ArgumentParser, *, plans: bool = True) -> None:
    """Model, plan where it can be given, dtype, device and the form of the answer."""
    command.add_argument(
        "model", nargs="?", default="builtin", help="folder, hub id or 'builtin' (the default)"
    )
    if plans:
        plan = command.add_mutually_exclusive_group()
        plan.add_argument("--exit-layer", type=int, help="draft with this many leading layers")
        plan.add_argument("--plan", help="draft with the plan in this JSON file")
    command.add_argument("--dtype", help="bfloat16, float16, float32; default: the checkpoint's")
    command.add_argument("--device", default="auto", help="cpu, cuda or auto")
    command.add_argument(
        "--exact",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether a row's bits may not depend on drafts and batch (the default)",
    )
    command.add_argument(
        "--lookup",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether tokens are looked up in prompt and output (the default)",
    )
    command.add_argument("--json", action="store_true", help="one JSON document as last line")


def quiet() -> None:
    """No warnings and bars from transformers."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def chosen_plan(args: argparse.Namespace) -> "PlanFile | None":
    """The plan file that ``--plan`` names."""
    from layerskip.plan import PlanFile

    return PlanFile.load(args.plan) if args.plan else None


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
        lookup=args.lookup,
    )
