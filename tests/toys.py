"""Small random models and a tokenizer that the tests build for themselves."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from layerskip import DraftPlan, Round

NUM_LAYERS = 6
VOCAB_SIZE = 331
MAX_POSITIONS = 600
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPES = {
    "even": {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16},
    # No width is a multiple of 16: vector loops of the CPU have tails.
    "odd": {"hidden_size": 120, "intermediate_size": 250, "head_dim": 30},
}
# Windows are shorter than the contexts of the tests; Qwen2 slides in its upper layers only.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 40}),
    "qwen2": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 3},
    ),
    "qwen3": ("Qwen3", {}),
}
PLANS = {
    "exit": DraftPlan.exiting(num_layers=NUM_LAYERS, exit_layer=2),
    "skipping": DraftPlan.skipping(num_layers=NUM_LAYERS, skipped=[2, 4]),
    "without-layer-0": DraftPlan(NUM_LAYERS, (1, 3)),
}


def make_model(
    family: str = "llama", dtype: str = "float32", shape: str = "even", **changes: Any
) -> PreTrainedModel:
    """A random model whose text varies and whose early exits are sometimes right."""
    name, extra = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=None,
        **{"num_hidden_layers": NUM_LAYERS, "vocab_size": VOCAB_SIZE, "eos_token_id": None}
        | SHAPES[shape]
        | extra
        | changes,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # at the usual scale every context gives the same few tokens
        for layer in model.model.layers[2:]:  # quiet upper layers: drafts are right now and then
            layer.self_attn.o_proj.weight.mul_(0.2)
            layer.mlp.down_proj.weight.mul_(0.2)
    return model.to(DTYPES[dtype]).eval()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over all 331 ids; emoji fall apart into tokens across their borders."""
    symbols = byte_symbols()
    emoji = [symbols[b] for b in "😀".encode()]
    pairs = [tuple(emoji[:2]), tuple(emoji[2:]), (emoji[3], emoji[0])]
    pairs += [("Ġ", letter) for letter in "etaoin"]
    pairs += list(itertools.product("etaoinsr", repeat=2))
    tokens = ["<s>", "</s>", *sorted(symbols.values()), *["".join(p) for p in pairs]]
    assert len(tokens) == VOCAB_SIZE == len(set(tokens))
    bpe = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return wrapped


def random_ids(count: int, seed: int = 0) -> list[int]:
    """``count`` token ids, none of them special."""
    generator = torch.Generator().manual_seed(1000 * seed + count)
    return torch.randint(2, VOCAB_SIZE, (count,), generator=generator).tolist()


def without_times(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Rounds as dictionaries, less what a clock measured and the request that they are of."""
    own = {"draft_seconds", "verify_seconds", "sample_seconds", "elapsed_seconds", "request_id"}
    return [{k: v for k, v in vars(r).items() if k not in own} for r in rounds]


def byte_symbols() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [b for b in range(256) if b not in printable]
    symbols = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    assert set(symbols.values()) == set(ByteLevel.alphabet())
    return symbols
