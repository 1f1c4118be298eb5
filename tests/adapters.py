"""Exit adapters that say something, for tests of what runs them."""

from typing import Any

import torch
from transformers import PreTrainedModel

from layerskip.exit_adapter import ExitAdapter

EXIT = 2
KINDS: dict[str, dict[str, Any]] = {
    "head": {},
    "bridge": {"bridge_rank": 4},
    "block": {"block": True, "block_width": 96},
}


def make_adapter(
    model: PreTrainedModel, kind: str = "block", *, exit_layer: int = EXIT, **changes: Any
) -> ExitAdapter:
    """An adapter whose every parameter matters, and whose drafts are right now and then."""
    adapter = ExitAdapter.create(model, exit_layer, head_rank=3, **KINDS[kind] | changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapter.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.03 * noise.to(parameter.dtype))
    adapter.temperature = 1.25
    return adapter
