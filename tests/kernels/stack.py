"""A Llama checkpoint that the operations alone drive."""

import copy
import functools
from typing import Any

import torch
import transformers
from backends import Backend

from layerskip.model import pack_model
from layerskip.packed import PackedStack

NUM_LAYERS = 4
VOCAB_SIZE = 512


@functools.cache
def make_llama(dtype: torch.dtype) -> Any:
    """Four layers, two query heads per key head; quiet upper layers, so that drafts may stand.

    Its weights are packed.
    """
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=64,
        head_dim=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
    model = model.to(dtype).requires_grad_(False)
    pack_model(model)
    return model


def make_stack(backend: Backend, dtype: torch.dtype = torch.bfloat16) -> PackedStack:
    """The stack that decodes on GPUs, by a backend's operations."""
    model = make_llama(dtype)
    if backend.device != "cpu":
        model = copy.deepcopy(model).to(backend.device)
        pack_model(model)
    return PackedStack(model, ops=backend.ops)
