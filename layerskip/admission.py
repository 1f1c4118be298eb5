"""Which models are let in, and one sentence for each that is not, before anything is built."""

import torch
from transformers import PreTrainedModel

from layerskip.errors import UnsupportedModelError
from layerskip.families import unsuitable

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def refusal(config: object) -> str | None:
    """Why a checkpoint with this config cannot be decoded, or None if it can."""
    reason = unsuitable(config)
    if reason is not None:
        family = getattr(config, "model_type", None)
        return f"architecture {family!r} is not supported: {reason}"
    reason = changing_rope(config)
    if reason is not None:
        return reason
    if getattr(config, "quantization_config", None) is not None:
        return "quantised weights are not supported; load the checkpoint in bfloat16 or float32"
    return None


def changing_rope(config: object) -> str | None:
    """Why the positions of a model with this config do not stand still, or None if they do."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_kind = [r for r in rope.values() if isinstance(r, dict)]  # one for each type of layer
    for parameters in by_kind or [rope]:
        rope_type = parameters.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            return (
                f"rope type {rope_type!r} changes with the length of the text; "
                f"supported are {', '.join(ROPE_TYPES)}"
            )
    return None


def check_model(model: object) -> None:
    """Raise ``UnsupportedModelError`` with the reason unless ``model`` can be wrapped."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"model must be a transformers causal language model, got {type(model).__name__}"
        )
    reason = refusal(model.config)
    if reason is not None:
        raise UnsupportedModelError(reason)
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no language-model head; load it as a causal LM"
        )
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"the model is spread over {len(devices)} devices; load it on one"
        )
    for name, parameter in model.named_parameters():
        # The sum is finite unless an entry is not: one read of the weights, no mask.
        if not torch.isfinite(parameter.detach().sum(dtype=torch.float32)):
            raise ValueError(f"weight {name} holds NaN or infinite values; the file is damaged")
