"""Layers of every packed family by the kernels: the definitions' numbers, and a row's own bits."""

import pytest
import torch
import transformers

from layerskip.model import pack_model
from layerskip.ops import definitions
from layerskip.packed import PackedStack

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 96,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
SPECIAL = {
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {},
    "olmo2": {},
    "granite": {"residual_multiplier": 0.7, "attention_multiplier": 0.2},
    "phi3": {"partial_rotary_factor": 0.5},
    "smollm3": {"no_rope_layers": [0]},
}
LENGTHS, SEQLEN = (7, -1, 30), 3


def make_model(family, device):
    config = transformers.AutoConfig.for_model(family, **SHAPE | SPECIAL[family])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(8) if parameter.dim() > 1 else parameter.add_(0.1)
    model.to(torch.bfloat16).to(device)
    pack_model(model)
    return model


def run(stack, hidden, cache, start, count):
    lengths = torch.tensor([n if n < 0 else n + start for n in LENGTHS], dtype=torch.int32)
    rows = hidden[:, start : start + count].flatten(0, 1)
    out = stack.run_rows(rows, [0], cache, lengths.to(hidden.device), count)
    return out.unflatten(0, (len(LENGTHS), count))


def filled(stack, noise):
    cache = stack.new_cache(num_rows=len(LENGTHS), num_slots=64)
    cache.keys.copy_(noise[0])
    cache.values.copy_(noise[1])
    return cache


@pytest.mark.parametrize("family", SPECIAL)
def test_layers_by_the_kernels(kernels, family):
    model = make_model(family, kernels.device)
    stack, measure = (PackedStack(model, ops=ops) for ops in (kernels.ops, definitions))
    noise = kernels.noise(2, 1, len(LENGTHS), 64, 1, 64, dtype=torch.bfloat16)
    hidden = kernels.noise(len(LENGTHS), SEQLEN, 64, dtype=torch.bfloat16)
    caches = [filled(stack, noise) for _ in range(3)]
    together = run(stack, hidden, caches[0], 0, SEQLEN)
    apart = torch.cat([run(stack, hidden, caches[1], i, 1) for i in range(SEQLEN)], dim=1)
    want = run(measure, hidden, caches[2], 0, SEQLEN)
    part = [0, 2]
    assert torch.equal(together[part], apart[part])
    assert torch.equal(caches[0].keys, caches[1].keys)
    assert torch.equal(caches[0].keys[:, 1], caches[2].keys[:, 1])
    for got, expected in ((together, want), (caches[0].keys, caches[2].keys)):
        error = (got[..., part, :, :].double() - expected[..., part, :, :].double()).norm()
        assert error < 0.01 * expected.double().norm()
    ids = stack.choose(together[part].flatten(0, 1))[0]
    assert ids.tolist() == measure.choose(together[part].flatten(0, 1))[0].tolist()
