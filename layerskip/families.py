"""The families that are let in, and how a config says that a model is not one of them.

A family stands here once ``tests/test_architectures.py`` proves it; the README's table is made of
both. What a family needs is learnt from its own code when it is wrapped (``skeleton.py``): the
words are for readers.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "",
        "mistral": "sliding window",
        "qwen2": "sliding window in the upper layers",
        "qwen3": "norms of queries and keys",
        "apertus": "xIELU, no gate",
        "arcee": "squared ReLU, no gate",
        "biogpt": "learned positions",
        "bloom": "ALiBi",
        "codegen": "rotary in part of a head, attention and MLP in parallel",
        "cohere": "scaled logits, tied head, attention and MLP in parallel",
        "cohere2": "sliding and full layers, the full ones without positions; tied head",
        "ernie4_5": "rotary pairs interleaved",
        "exaone4": "sliding and full layers, norms after the blocks",
        "falcon": "ALiBi or rotary, one key head",
        "gemma": "scaled embeddings, tied head",
        "gemma2": "scores and logits soft-capped, sliding and full layers",
        "gemma3_text": "sliding and full layers with a rotary table each",
        "glm": "rotary in half of a head",
        "glm4": "norms around the blocks, rotary in half of a head",
        "gpt2": "learned positions, Conv1D weights, tied head",
        "gpt_bigcode": "learned positions, one key head",
        "gpt_neox": "rotary in part of a head, attention and MLP in parallel",
        "gptj": "rotary in part of a head, attention and MLP in parallel",
        "granite": "scaled embeddings, residuals, scores and logits",
        "granite_swa": "attention sinks, sliding and full layers",
        "helium": "rotary pairs interleaved",
        "hunyuan_v1_dense": "norms of queries and keys after the rotary embedding",
        "ministral": "sliding and full layers",
        "ministral3": "queries scaled by their position",
        "nanochat": "logits soft-capped, no weights in norms",
        "nemotron": "squared ReLU, rotary in part of a head",
        "olmo": "no weights in norms, clipped projections",
        "olmo2": "norms after the blocks",
        "olmo3": "sliding and full layers, norms after the blocks",
        "opt": "learned positions, projected embeddings, tied head",
        "phi": "rotary in part of a head, attention and MLP in parallel",
        "phi3": "fused projections, sliding window",
        "seed_oss": "biases in attention",
        "smollm3": "some layers without positions",
        "stablelm": "rotary in part of a head, attention and MLP in parallel",
        "starcoder2": "sliding window, biases",
        "ernie4_5_moe": "experts above a dense layer, shared experts",
        "exaone_moe": "experts above a dense layer, sliding and full layers",
        "glm4_moe": "experts above a dense layer, shared experts",
        "gpt_oss": "experts with biases, attention sinks, sliding and full layers",
        "granitemoe": "experts, scaled residuals",
        "mixtral": "experts, sliding window",
        "olmoe": "experts, norms of queries and keys",
        "phimoe": "experts chosen one after the other",
        "qwen2_moe": "experts, one shared behind a gate",
        "qwen3_moe": "experts, norms of queries and keys",
    }
)

POSITION_LIMITS = ("max_position_embeddings", "max_seq_len", "seq_length")
NO_LIMIT = 2**20
PLAIN_LAYERS = {"full_attention", "sliding_attention"}
RECURRENT_LAYERS = {"conv", "linear_attention", "mamba", "recurrent"}
# Layers with a state of their own leave one of these in a config.
RECURRENT = (
    "chunkwise_kernel",
    "conv_kernel",
    "conv_L_cache",
    "linear_num_key_heads",
    "mamba_d_state",
    "mamba_expand",
    "rwkv_version",
    "rescale_every",
    "ssm_state_size",
    "state_size",
)
COMPOSITE = ("text_config", "vision_config", "audio_config")
OTHERS: Mapping[str, str] = MappingProxyType(
    {
        "diffllama": "its attention reads the values of other heads after they are cached",
        "gpt_neo": "its attention takes the last slot that it is given for the newest token",
        "mpt": "its attention takes the last slot that it is given for the newest token",
    }
)


def position_limit(config: object) -> int:
    """The number of positions that a model with this config knows.

    A config may tell those of before YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071)
    stretched them, as transformers allows.
    """
    known = (getattr(config, name, None) for name in POSITION_LIMITS)
    limit = next((limit for limit in known if limit), NO_LIMIT)
    stretched = [
        int(rope["original_max_position_embeddings"] * rope["factor"])
        for rope in ropes(config)
        if rope.get("rope_type") == "yarn"
        and rope.get("factor")
        and rope.get("original_max_position_embeddings")
    ]
    return max([limit, *stretched])


def ropes(config: object) -> list[Mapping[str, Any]]:
    """Parameters of a config's rotary embeddings: one, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [r for r in rope.values() if isinstance(r, dict)] or [rope]


def unsuitable(config: object) -> str | None:
    """Why a model with this config does not fit, or None; no weights and no classes are needed.

    The reasons are of layers and caches, so families that nobody has thought of get one too.
    """
    family = getattr(config, "model_type", None)
    kinds = set(getattr(config, "layer_types", None) or PLAIN_LAYERS)
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, and only decoders are driven"
    if family not in FAMILIES and any(hasattr(config, name) for name in COMPOSITE):
        return "it reads more than text; load its language model by itself"
    recurrent = family not in FAMILIES and any(hasattr(config, name) for name in RECURRENT)
    if recurrent or kinds & RECURRENT_LAYERS:
        return "layers with a recurrent state cannot take back a rejected draft"
    if getattr(config, "kv_lora_rank", None):
        return "multi-latent attention keeps latents in the cache, not keys and values"
    if not kinds <= PLAIN_LAYERS:
        strange = ", ".join(sorted(kinds - PLAIN_LAYERS))
        return f"it has layers of the type {strange}"
    if getattr(config, "add_cross_attention", False):
        return "it attends to an encoder"
    looks_back = getattr(config, "is_causal", True)
    if getattr(config, "use_bidirectional_attention", False) or not looks_back:
        return "its attention looks ahead"
    if family in FAMILIES:
        return None
    return OTHERS.get(str(family), "it is not among the tested families, which the README lists")
