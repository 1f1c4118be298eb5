"""What a model is before a guest comes, and whether it is the same after."""

import random
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All there is to see: settings, identities, hooks, every bit, and the state outside."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    parts = [*model.named_modules()]
    return {
        "config": model.config.to_dict(),
        "config's identity": [id(vars(m)["config"]) for _, m in parts if "config" in vars(m)],
        "generation_config": model.generation_config.to_dict(),
        "attention": model.config._attn_implementation,
        "modules": [(n, id(m), type(m), m.training) for n, m in parts],
        "methods": {(type(m), name, id(f)) for _, m in parts for name, f in methods(m)},
        "settings": [settings(m) for _, m in parts],
        "hooks": [hooks(m) for _, m in parts],
        "places": [(n, id(t), t.data_ptr(), t.dtype, t.requires_grad) for n, t in tensors],
        "writes": [(n, t._version) for n, t in tensors],
        "gradients": [(n, id(t.grad)) for n, t in tensors],
        "bits": [bits(t) for _, t in tensors],
        "generators": (torch.get_rng_state().tolist(), random.getstate()),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "default": (torch.get_default_dtype(), torch.get_num_threads()),
    }


def settings(module: nn.Module) -> dict[str, str]:
    """A module's own attributes: values of plain kinds, the identity of others."""
    plain = (bool, int, float, str, list, type(None))
    return {
        name: repr(value) if isinstance(value, plain) else str(id(value))
        for name, value in vars(module).items()
        if "hook" not in name
    }


def methods(module: nn.Module) -> list[tuple[str, Any]]:
    """Of its class. Transformers keeps caches there too."""
    return [(name, f) for name, f in vars(type(module)).items() if callable(f)]


def hooks(module: nn.Module) -> dict[str, list[int]]:
    """Identities of the hooks of every kind."""
    return {
        name: [id(hook) for hook in value.values()]
        for name, value in vars(module).items()
        if "hook" in name and isinstance(value, dict)
    }


def bits(tensor: torch.Tensor) -> list[int]:
    """A checksum that sees every bit, and where it stands."""
    raw = tensor.detach().contiguous().flatten().view(torch.uint8).to(torch.int64)
    return [raw.sum().item(), (raw * torch.arange(1, len(raw) + 1)).sum().item()]


def check_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    """Raise with what has changed since ``before``."""
    after = snapshot(model)
    assert before.keys() == after.keys()
    assert {k: v for k, v in after.items() if v != before[k]} == {}


def hf_text(model: PreTrainedModel, prompt: list[int], count: int = 8) -> list[int]:
    """What transformers' own greedy ``generate`` appends to ``prompt``."""
    ids = torch.tensor([prompt])
    # Without a mask, generate takes every token that equals the padding id for padding.
    everything = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": -1}
    out = model.generate(input_ids=ids, max_new_tokens=count, do_sample=False, **everything)
    return out[0, len(prompt) :].tolist()
