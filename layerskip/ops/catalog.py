"""Every kernel that can be launched: its name, its source, what it moves."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

FORMATS = {"Bf16": "bfloat16", "Fp16": "float16"}
HEAD_DIMS = (64, 80, 96, 128, 256)
PRODUCT_TILES = (1, 2, 4, 8)  # 64 tokens per read of the weights
ATTENTION_TILES = (1, 4)
TILE = 8  # tokens of one mma tile
SPLIT_KEYS = 256  # of decode attention
VOCAB_CHUNK = 64  # of lm_head
VERIFY_CHUNK = 2048  # of block_verify
MOST_DRAFTED = 31  # a warp accepts a sequence's drafted tokens and one more
ELEMENT_BYTES = 2


@dataclass(frozen=True)
class KernelInstance:
    """One compiled kernel.

    Attributes:
        name: C++ name expression, as NVRTC is given it and as it is launched.
        source: file in ``kernels/``.
        bytes_moved: what has to pass between memory and chip at least; takes the kernel's sizes
            by name.
    """

    name: str
    source: str
    bytes_moved: Callable[..., int]


def linear_bytes(tiles: int, matrices: int) -> Callable[..., int]:
    """Weights once per ``8 * tiles`` rows, input and output once."""

    def moved(*, m: int, n: int, k: int) -> int:
        reads = -(-m // (TILE * tiles))
        return ELEMENT_BYTES * (matrices * n * k * reads + m * k + m * n)

    return moved


def lm_head_bytes(tiles: int) -> Callable[..., int]:
    """Weights once per ``8 * tiles`` rows, and 16 bytes a chunk."""

    def moved(*, m: int, vocab: int, k: int) -> int:
        reads = -(-m // (TILE * tiles))
        return ELEMENT_BYTES * (vocab * k * reads + m * k) + 16 * m * -(-vocab // VOCAB_CHUNK)

    return moved


def attention_bytes(head_dim: int) -> Callable[..., int]:
    """Keys, values and queries once, partial results."""

    def moved(*, batch: int, seqlen: int, heads: int, heads_k: int, keys: int) -> int:
        splits = -(-keys // SPLIT_KEYS)
        cached = 2 * ELEMENT_BYTES * batch * keys * heads_k * head_dim
        rows = batch * seqlen * heads
        return cached + rows * (ELEMENT_BYTES * head_dim + splits * 4 * (head_dim + 2))

    return moved


def _instances() -> Iterator[KernelInstance]:
    for form in FORMATS:
        for tiles in PRODUCT_TILES:
            yield KernelInstance(
                f"linear<{form},{tiles}>",
                "linear.cu",
                linear_bytes(tiles, 1),
            )
            yield KernelInstance(
                f"swiglu<{form},{tiles}>",
                "linear.cu",
                linear_bytes(tiles, 2),
            )
            yield KernelInstance(
                f"lm_head<{form},{tiles}>",
                "lm_head.cu",
                lm_head_bytes(tiles),
            )
        for head_dim, tiles in itertools.product(HEAD_DIMS, ATTENTION_TILES):
            yield KernelInstance(
                f"decode_attention<{form},{head_dim},{tiles}>",
                "attention.cu",
                attention_bytes(head_dim),
            )
        yield KernelInstance(
            f"combine_splits<{form}>",
            "attention.cu",
            lambda *, rows, splits, head_dim: rows * (splits * 4 * (head_dim + 2) + 2 * head_dim),
        )
        yield KernelInstance(
            f"rms_norm<{form}>",
            "norm.cu",
            lambda *, m, width, residual=False: 2 * m * width * (4 if residual else 2),
        )
        yield KernelInstance(
            f"rope_append_kv<{form}>",
            "rope.cu",
            lambda *, tokens, heads, heads_k, head_dim: (
                4 * tokens * (heads + 2 * heads_k) * head_dim
            ),
        )
    yield KernelInstance(
        "lm_head_finish",
        "lm_head.cu",
        lambda *, m, vocab: m * (16 * -(-vocab // VOCAB_CHUNK) + 16),
    )
    yield KernelInstance(
        "gumbel_noise",
        "noise.cu",
        lambda *, rows, vocab: 4 * rows * vocab,
    )
    yield KernelInstance(
        "gumbel_from_bits",
        "noise.cu",
        lambda *, vocab: 8 * vocab,
    )
    yield KernelInstance(
        "accept_tokens",
        "accept.cu",
        lambda *, batch, k: 8 * batch * (3 * k + 4),
    )
    yield KernelInstance(
        "block_verify",
        "accept.cu",
        lambda *, batch, k, vocab: 4 * batch * (2 * k + 1) * vocab,
    )
    yield KernelInstance(
        "accept_block",
        "accept.cu",
        lambda *, batch, k, vocab: 20 * batch * (k + 1) * -(-vocab // VERIFY_CHUNK),
    )


CATALOG: dict[str, KernelInstance] = {kernel.name: kernel for kernel in _instances()}
