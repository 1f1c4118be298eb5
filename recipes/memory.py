"""How much memory a step of the LoRA recipe takes, by arithmetic.

    python recipes/memory.py meta-llama/Llama-3.2-1B seq_len=2048 rows=4

An upper estimate for Llama-like models, whose tests hold it against what torch saves. Attention's
kernels are taken to keep no scores (flash, memory-efficient); what CUDA itself and the allocator's
gaps take, a gigabyte or two, comes on top.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from settings import read

from layerskip.checkpoint import BUILTIN, builtin_folder, load_config
from layerskip.params import check_integer

READ = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
)
USAGE = "usage: python recipes/memory.py MODEL [name=value ...]"
ADAM_BYTES = 16  # a trained parameter: float32 weight, gradient and two moments


@dataclass(frozen=True)
class StepShape:
    """What memory depends on, beside the model.

    Attributes:
        rows: sequences of a micro-batch on one device.
        seq_len: their tokens.
        rank: of LoRA.
        chunk_tokens: tokens whose logits exist at once.
        weight_bytes: of a frozen weight: 2 in bfloat16.
        activation_bytes: of an activation: 2 with ``mixed_precision=bf16`` or bfloat16 weights.
        compared: logits of exit and full depth beside each other (``distil`` or ``consistency``).
        gradient_checkpointing: one layer's activations at a time, and every layer's input.
    """

    rows: int = 4
    seq_len: int = 2048
    rank: int = 16
    chunk_tokens: int = 512
    weight_bytes: int = 2
    activation_bytes: int = 2
    compared: bool = True
    gradient_checkpointing: bool = True

    def __post_init__(self) -> None:
        for name in ("rows", "seq_len", "rank", "chunk_tokens", "weight_bytes", "activation_bytes"):
            check_integer(name, getattr(self, name), 1)


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a training step at its highest.

    Attributes:
        weights: frozen ones.
        adapter: LoRA's weights, gradients and Adam's moments.
        layer_inputs: kept from the forward pass until the backward pass comes by.
        activations: of one layer that is made again, or of all; as much again for gradients
            of one layer.
        logits: of one chunk: as computed, in float32, log-probabilities, and gradients.
    """

    weights: int
    adapter: int
    layer_inputs: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(asdict(self).values())


def step_memory(config: Any, shape: StepShape) -> StepMemory:
    """Memory of one step.

    Args:
        config: of a Llama-like model.
        shape: of the step.
    """
    layers, width = config.num_hidden_layers, config.hidden_size
    tokens, size = shape.rows * shape.seq_len, shape.activation_bytes
    lora = layers * sum(shape.rank * (a + b) for a, b in linear_shapes(config))
    one = tokens * layer_bytes(config, shape.rank, size)
    kept = shape.gradient_checkpointing
    logits = shape.chunk_tokens * config.vocab_size
    return StepMemory(
        weights=shape.weight_bytes * num_weights(config),
        adapter=ADAM_BYTES * lora,
        layer_inputs=layers * tokens * width * size,
        activations=(2 if kept else layers + 1) * one,
        logits=logits * (2 if shape.compared else 1) * (2 * size + 12),
    )


def linear_shapes(config: Any) -> list[tuple[int, int]]:
    """(in, out) of a layer's linear maps, all of which get LoRA."""
    width, inner = config.hidden_size, config.intermediate_size
    heads, keys = _attention_widths(config)
    attention = [(width, heads), (width, keys), (width, keys), (heads, width)]
    return [*attention, (width, inner), (width, inner), (inner, width)]


def layer_bytes(config: Any, rank: int, size: int) -> int:
    """What autograd keeps of one layer and token: both norms in float32 beside their results;
    queries, keys, values and the attention's output; four widths of the gated MLP; and for each
    linear map LoRA's inner activation and, in mixed precision, a copy of its input."""
    heads, keys = _attention_widths(config)
    width, inner = config.hidden_size, config.intermediate_size
    norms = 2 * (8 + size) * width
    attention = size * (5 * heads + 2 * keys)
    mlp = size * (4 * inner + width)
    lora = sum(4 * rank + (size if size < 4 else 0) * a for a, _ in linear_shapes(config))
    return norms + attention + mlp + lora


def num_weights(config: Any) -> int:
    """Of the model, biases and norms of heads left out."""
    linear = sum(a * b for a, b in linear_shapes(config))
    width, ends = config.hidden_size, 1 if config.tie_word_embeddings else 2
    per_layer = linear + 2 * width
    return config.num_hidden_layers * per_layer + width + ends * config.vocab_size * width


def _attention_widths(config: Any) -> tuple[int, int]:
    """Of all queries, and of all keys."""
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads * dim, (getattr(config, "num_key_value_heads", None) or heads) * dim


def main(argv: Sequence[str]) -> None:
    """Print the terms for a checkpoint."""
    if not argv:
        raise SystemExit(USAGE)
    if argv[0] in ("-h", "--help"):
        names = " ".join(f"{name}={value}" for name, value in asdict(StepShape()).items())
        print(f"{USAGE}\n\n{__doc__}\nAs it is: {names}")
        return
    try:
        shape = read(StepShape, None, argv[1:])
        config = load_config(builtin_folder() if argv[0] == BUILTIN else argv[0])
        if lacking := [name for name in READ if not hasattr(config, name)]:
            raise ValueError(
                f"{argv[0]} is not like a Llama: its config has no {', '.join(lacking)}"
            )
        memory = step_memory(config, shape)
    except ValueError as error:
        raise SystemExit(f"memory: {error}") from None
    for name, value in {**asdict(memory), "total": memory.total}.items():
        print(f"{name.replace('_', ' '):>14} {value / 1e9:7.2f} GB")


if __name__ == "__main__":
    main(sys.argv[1:])
