"""What ``layerskip info`` says of a plan and of what came with it."""

import argparse
from typing import TYPE_CHECKING, Any

from layerskip.checkpoint import PLAN_FILE
from layerskip.fingerprint import mismatch

if TYPE_CHECKING:
    from layerskip.api import SelfSpeculativeLM


def plan_facts(args: argparse.Namespace, lm: "SelfSpeculativeLM") -> dict[str, Any]:
    """Lines about drafting, by name."""
    return {
        "plan_from": _source(args, lm),
        "draft_layers": list(lm.plan.layers) if lm.plan else None,
        "shared_depth": lm.plan.shared_depth if lm.plan else None,
        "draft_vocabulary": _vocabulary(lm),
        "num_draft_tokens": lm.num_draft_tokens,
        "cost_table": _cost(lm),
    }


def _source(args: argparse.Namespace, lm: "SelfSpeculativeLM") -> str:
    if args.plan:
        return str(args.plan)
    if args.exit_layer is not None:
        return "--exit-layer"
    return f"{PLAN_FILE} of the checkpoint" if lm.plan else "nowhere: only look-ups draft"


def _vocabulary(lm: "SelfSpeculativeLM") -> str:
    ids, vocab_size = lm.plan_file.draft_vocabulary, lm.stack.vocab_size
    if ids is None or lm.plan is None:
        return f"all {vocab_size} ids"
    if lm.draft_head is None or lm.coverage_meter is None:
        return f"all {vocab_size} ids: {lm.stack.why_whole_head}"
    return (
        f"{len(ids)} of {vocab_size} ids and those of a row's own text; "
        f"{lm.coverage_meter.least_coverage:.1%} of what is emitted is promised to be among them"
    )


def _cost(lm: "SelfSpeculativeLM") -> str:
    """Whether a saved table is used."""
    saved = lm.plan_file.cost
    if saved is None:
        return "none saved: measured for a second at the first use"
    difference = mismatch(saved, lm.stack, lm.plan, lm.plan_file.draft_vocabulary)
    return "saved, and of this machine" if difference is None else f"not used: {difference}"
