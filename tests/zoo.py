"""One toy model of every family in ``layerskip.families``, built from its config."""

import warnings
from typing import Any

import torch
import transformers
from toys import DTYPES, VOCAB_SIZE
from transformers import PreTrainedModel

NUM_LAYERS = 5
WINDOW = 24  # shorter than the contexts of the tests
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 72,  # a few more than the tests use: spare rows lie beyond
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
SLIDING = {"sliding_window": WINDOW}
MIXED = SLIDING | {
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full", "full")]
}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PARTIAL = {"partial_rotary_factor": 0.5}
TIED = {"tie_word_embeddings": True}
# Each by what makes it special; what is not said is as in SHAPE.
ZOO: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": SLIDING,
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2, **SLIDING},
    "qwen3": {},
    "apertus": {},
    "arcee": {},
    "biogpt": {},
    "bloom": {},
    "codegen": {"rotary_dim": 8},
    "cohere": {"logit_scale": 2.0, **TIED},
    "cohere2": {"logit_scale": 2.0, **MIXED, **TIED},
    "ernie4_5": {},
    "exaone4": MIXED,
    "falcon": {"alibi": True},
    "gemma": TIED,
    "gemma2": {
        "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 4,
        **SLIDING,
    },
    "gemma3_text": MIXED,
    "glm": PARTIAL,
    "glm4": PARTIAL,
    "gpt2": TIED,
    "gpt_bigcode": {},
    "gpt_neox": {"rotary_pct": 0.5},
    "gptj": {"rotary_dim": 8},
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "logits_scaling": 0.5,
        "residual_multiplier": 0.7,
    },
    "granite_swa": MIXED,
    "helium": {},
    "hunyuan_v1_dense": {},
    "ministral": MIXED,
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 18,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "nanochat": {},
    "nemotron": PARTIAL,
    "olmo": {"clip_qkv": 1.5},
    "olmo2": {},
    "olmo3": MIXED,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 32, **TIED},
    "phi": PARTIAL,
    "phi3": SLIDING,
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0, 1, 1, 1]},
    "stablelm": {"use_parallel_residual": True, **PARTIAL},
    "starcoder2": SLIDING,
    "ernie4_5_moe": {
        "moe_intermediate_size": 32,
        "moe_k": 2,
        "moe_layer_start_index": 1,
        "moe_num_experts": 8,
    },
    "exaone_moe": EXPERTS | MIXED,
    "glm4_moe": {"first_k_dense_replace": 1, **ROUTED},
    "gpt_oss": LOCAL | MIXED,
    "granitemoe": LOCAL,
    "mixtral": LOCAL | SLIDING,
    "olmoe": EXPERTS,
    "phimoe": LOCAL,
    "qwen2_moe": {"shared_expert_intermediate_size": 48, **EXPERTS},
    "qwen3_moe": EXPERTS,
}


# Other shapes of some families.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon with rotary positions": ("falcon", {"alibi": False}),
    "falcon with several key heads": (
        "falcon",
        {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "gpt_bigcode with a key head per head": ("gpt_bigcode", {"multi_query": False}),
    "opt with norms after the blocks": ("opt", {"do_layer_norm_before": False}),
    "stablelm with norms of queries": ("stablelm", {"qk_layernorm": True}),
}
NOT_IN_CONFIG = {"falcon": ("head_dim",)}


def make_config(family: str, **changes: Any) -> transformers.PretrainedConfig:
    settings = SHAPE | ZOO.get(family, {}) | changes
    for name in NOT_IN_CONFIG.get(family, ()):
        del settings[name]
    return transformers.AutoConfig.for_model(family, **settings)


def make_toy(family: str, dtype: str = "float32", **changes: Any) -> PreTrainedModel:
    """A random model whose text varies and whose upper layers are quiet: drafts are often right."""
    config = make_config(family, **changes)
    torch.manual_seed(0)
    # transformers 5.17 leaves out Gemma 2's caps unless told to run its eager attention.
    how = {"attn_implementation": "eager"} if family == "gemma2" else {}
    with (
        warnings.catch_warnings()
    ):  # 5.17 scripts a function of gpt_bigcode, which torch deprecates
        warnings.simplefilter("ignore", DeprecationWarning)
        model = transformers.AutoModelForCausalLM.from_config(config, **how)
    embeddings = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * (0.02 if "bias" in name else 0.2))
            elif id(parameter) not in embeddings:
                upper = any(f".{i}." in name for i in range(2, NUM_LAYERS))
                parameter.mul_(3 if upper else 8)
            else:
                parameter.mul_(2 if config.tie_word_embeddings else 10)
    return model.to(DTYPES[dtype]).eval()
