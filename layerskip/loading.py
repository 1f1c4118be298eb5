"""From a folder or hub id to what is wrapped: a model, its tokenizer, and the plan to draft by."""

from dataclasses import replace
from operator import index
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from layerskip.adapter_file import read_adapter
from layerskip.adapter_shape import AdapterShape
from layerskip.checkpoint import (
    BUILTIN,
    builtin_folder,
    known_plan,
    pick_device,
    read_checkpoint,
    trained_exits,
)
from layerskip.model import pack_model
from layerskip.params import NumDraftTokens, check_integer, check_num_draft_tokens
from layerskip.plan import DraftPlan, PlanFile, ranges


def load_parts(
    model: str | Path,
    *,
    exit_layer: int | None = None,
    plan: DraftPlan | PlanFile | None = None,
    num_draft_tokens: NumDraftTokens | None = None,
    dtype: str | torch.dtype | None = None,
    device: str = "auto",
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | None = None,
    local_files_only: bool = False,
    exit_adapter: str | Path | None = None,
) -> tuple[PreTrainedModel, Any, PlanFile, NumDraftTokens]:
    """What ``from_pretrained`` wraps: model, tokenizer, plan file, number of draft tokens.

    Of an adapter only the exit is read here; ``ExitAdapter.load`` takes the model.
    """
    if exit_layer is not None and plan is not None:
        raise ValueError("give exit_layer or plan, not both")
    if num_draft_tokens is not None:
        check_num_draft_tokens(num_draft_tokens)
    folder = builtin_folder() if str(model) == BUILTIN else model
    shape = None if exit_adapter is None else read_adapter(exit_adapter).shape
    if exit_layer is None and plan is None:
        plan = None if exit_adapter is None else known_plan(exit_adapter)
        if plan is None:
            own = known_plan(folder)
            plan = own if shape is None else _at_exit(own, shape)
    known = plan if isinstance(plan, PlanFile) else PlanFile(plan)
    if shape is not None:
        known = with_exit_of(known, shape, exit_layer)
    where = pick_device(device)
    loaded, tokenizer = read_checkpoint(
        folder,
        dtype=dtype,
        hub={
            "revision": revision or "main",
            "cache_dir": cache_dir,
            "token": token,
            "local_files_only": local_files_only,
        },
        check=lambda config: check_plan_depth(config, exit_layer, known.plan),
    )
    cast(Any, loaded).to(where)  # transformers' type of it takes no device
    pack_model(loaded)
    if exit_layer is not None:
        depth = loaded.config.num_hidden_layers
        known = PlanFile(DraftPlan.exiting(num_layers=depth, exit_layer=exit_layer))
    if exit_layer is not None or plan is not None:
        known = _with_exits(known, folder)
    exits = trained_exits(loaded.config, known)
    if plan is None and exit_layer is None and exits:
        known = PlanFile(
            DraftPlan.exiting(num_layers=loaded.config.num_hidden_layers, exit_layer=exits[0])
        )
    wanted = known.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
    return loaded, tokenizer, known, wanted


def _with_exits(known: PlanFile, folder: str | Path) -> PlanFile:
    """A plan that was given, and which exits the checkpoint's own plan file says were trained."""
    try:
        own = known_plan(folder)
    except ValueError:  # it is not what drafts
        own = None
    said = own.measurements.get("trained_exits") if own is not None else None
    if said is None:
        return known
    return replace(known, measurements={"trained_exits": said, **known.measurements})


def _at_exit(known: PlanFile | None, shape: AdapterShape) -> PlanFile:
    """A checkpoint's own plan, moved to an adapter's exit: what was measured of the plan goes."""
    if known is None:
        return PlanFile(shape.plan)
    coverage = {k: v for k, v in known.measurements.items() if k == "coverage"}
    return PlanFile(
        shape.plan,
        draft_vocabulary=known.draft_vocabulary,
        fingerprint=known.fingerprint,
        measurements=coverage,
    )


def with_exit_of(known: PlanFile, shape: AdapterShape, exit_layer: int | None = None) -> PlanFile:
    """A plan file whose drafts leave where an adapter goes on, which one without a plan means.

    Args:
        exit_layer: asked for instead of a plan.

    Raises:
        ValueError: drafts are to leave elsewhere.
    """
    plan = known.plan
    where = exit_layer if plan is None else plan.exit_layer
    if plan is None and where is None:
        return replace(known, plan=shape.plan)
    if where != shape.exit_layer:
        said = f"exits after {where}"
        if plan is not None and where is None:
            said = f"runs layers {ranges(plan.layers)}"
        raise ValueError(
            f"the exit adapter goes on after layer {shape.exit_layer}, and the plan {said}; give "
            "that exit, or no plan"
        )
    return known


def check_plan_depth(config: Any, exit_layer: int | None, plan: DraftPlan | None) -> None:
    """Raise unless an exit or a plan is of a model as deep as the one of ``config``."""
    depth = getattr(config, "num_hidden_layers", None)
    if depth is None:  # no model that we know: refused later, with the reason
        return
    check_integer("num_hidden_layers of the config", depth, 1)
    if exit_layer is not None:
        DraftPlan.exiting(num_layers=depth, exit_layer=exit_layer)
    if plan is not None and plan.num_layers != depth:
        raise ValueError(
            f"the plan is for a model of {plan.num_layers} layers; this one has {depth}"
        )


def eos_ids_of(config: Any) -> frozenset[int]:
    """What ends a sequence.

    Args:
        config: a generation config, or where a model has none its own.

    Raises:
        ValueError: it names something else than token ids.
    """
    eos = getattr(config, "eos_token_id", None)
    if eos is None:
        return frozenset()
    ids = eos.tolist() if hasattr(eos, "tolist") else eos  # as of a tensor
    try:
        return frozenset([ids] if isinstance(ids, int) else map(index, ids))
    except TypeError:
        raise ValueError(
            "eos_token_id in generation_config.json, or where there is none in config.json, must "
            f"be a token id or a list of them, got {eos!r}"
        ) from None
