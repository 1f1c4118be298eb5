"""What every operation asks of its arguments, and the tensors it returns, still empty.

One function per operation, with its signature. It raises a ``ValueError`` that names the operation,
the argument, what was expected and what was got, and returns uninitialised outputs: all that a
fake implementation has to do, and what every other does first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Shaped = tuple[Tensor | None, str]


def _sizes_of(op: str, **tensors: Shaped) -> dict[str, int]:
    """Match tensors with shapes given as names of sizes, such as ``"m k"``; all on one device.

    Returns:
        The size behind each name.
    """
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    for name, (tensor, pattern) in tensors.items():
        if tensor is None:
            continue
        names = pattern.split()
        if tensor.dim() != len(names):
            raise ValueError(
                f"{op}: {name} has shape {tuple(tensor.shape)}, expected ({', '.join(names)})"
            )
        for axis, size in zip(names, tensor.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                raise ValueError(
                    f"{op}: {name} has shape {tuple(tensor.shape)}, expected ({', '.join(names)}) "
                    f"with {axis} = {sizes[axis]} as in {origin[axis]}"
                )
            origin.setdefault(axis, name)
    present = [(name, tensor) for name, (tensor, _) in tensors.items() if tensor is not None]
    first, device = present[0][0], present[0][1].device
    for name, tensor in present:
        if tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, expected {device} as {first} is")
    return sizes


def _of_dtype(op: str, dtype: torch.dtype, **tensors: Tensor | None) -> None:
    """All of one dtype."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype != dtype:
            raise ValueError(f"{op}: {name} has dtype {tensor.dtype}, expected {dtype}")


def _floating(op: str, **tensors: Tensor | None) -> None:
    """The first is a float of any width, and the others are as it is."""
    name, first = next(iter(tensors.items()))
    assert first is not None
    if not first.dtype.is_floating_point:
        raise ValueError(f"{op}: {name} has dtype {first.dtype}, expected a floating one")
    _of_dtype(op, first.dtype, **tensors)


def _at_least_one(op: str, sizes: dict[str, int], names: Sequence[str]) -> None:
    for name in names:
        if sizes[name] < 1:
            raise ValueError(f"{op}: {name} is {sizes[name]}, expected at least 1")


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    _sizes_of("rms_norm", x=(x, "m width"), weight=(weight, "width"))
    _floating("rms_norm", x=x, weight=weight)
    return x.new_empty(x.shape)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    op = "add_rms_norm"
    _sizes_of(op, x=(x, "m width"), residual=(residual, "m width"), weight=(weight, "width"))
    _floating(op, x=x, residual=residual, weight=weight)
    return x.new_empty(x.shape), x.new_empty(x.shape)


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    op = "linear"
    sizes = _sizes_of(
        op,
        x=(x, "m k"),
        weight=(weight, "n k"),
        bias=(bias, "n"),
        residual=(residual, "m n"),
        norm_weight=(norm_weight, "k"),
    )
    _floating(op, x=x, weight=weight, bias=bias, residual=residual, norm_weight=norm_weight)
    _at_least_one(op, sizes, ("n", "k"))
    return x.new_empty(sizes["m"], sizes["n"])


def swiglu(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    op = "swiglu"
    sizes = _sizes_of(
        op,
        x=(x, "m k"),
        gate_weight=(gate_weight, "n k"),
        up_weight=(up_weight, "n k"),
        norm_weight=(norm_weight, "k"),
    )
    _floating(op, x=x, gate_weight=gate_weight, up_weight=up_weight, norm_weight=norm_weight)
    _at_least_one(op, sizes, ("n", "k"))
    return x.new_empty(sizes["m"], sizes["n"])


def rope_append_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cosine: Tensor,
    sine: Tensor,
    cache_seqlens: Tensor,
    *,
    interleaved: bool = False,
) -> None:
    op = "rope_append_kv"
    sizes = _sizes_of(
        op,
        q=(q, "batch seqlen nheads headdim"),
        k=(k, "batch seqlen nheads_k headdim"),
        v=(v, "batch seqlen nheads_k headdim"),
        k_cache=(k_cache, "batch seqlen_cache nheads_k headdim"),
        v_cache=(v_cache, "batch seqlen_cache nheads_k headdim"),
        cosine=(cosine, "positions rotary_dim/2"),
        sine=(sine, "positions rotary_dim/2"),
        cache_seqlens=(cache_seqlens, "batch"),
    )
    _floating(op, q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    _of_dtype(op, torch.float32, cosine=cosine, sine=sine)
    _of_dtype(op, torch.int32, cache_seqlens=cache_seqlens)
    if 2 * sizes["rotary_dim/2"] > sizes["headdim"]:
        raise ValueError(
            f"{op}: cosine has shape {tuple(cosine.shape)}, which rotates "
            f"{2 * sizes['rotary_dim/2']} dimensions of a headdim of {sizes['headdim']}"
        )


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    *,
    softmax_scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    op = "decode_attention"
    sizes = _sizes_of(
        op,
        q=(q, "batch seqlen nheads headdim"),
        k_cache=(k_cache, "batch seqlen_cache nheads_k headdim"),
        v_cache=(v_cache, "batch seqlen_cache nheads_k headdim"),
        cache_seqlens=(cache_seqlens, "batch"),
        sinks=(sinks, "nheads"),
    )
    _floating(op, q=q, k_cache=k_cache, v_cache=v_cache)
    _of_dtype(op, torch.int32, cache_seqlens=cache_seqlens)
    _of_dtype(op, torch.float32, sinks=sinks)
    _at_least_one(op, sizes, ("batch", "seqlen", "seqlen_cache", "nheads_k"))
    if sizes["nheads"] % sizes["nheads_k"] != 0:
        raise ValueError(
            f"{op}: q has {sizes['nheads']} heads, expected a multiple of k_cache's "
            f"{sizes['nheads_k']}"
        )
    if window < 0 or softcap < 0:
        raise ValueError(
            f"{op}: window and softcap are 0 (none) or more, got {window} and {softcap}"
        )
    return q.new_empty(q.shape)


def gumbel_noise(
    seeds: Tensor,
    positions: Tensor,
    *,
    vocab_size: int,
    stream: int = 0,
    starts: Tensor | None = None,
) -> Tensor:
    op = "gumbel_noise"
    _sizes_of(op, seeds=(seeds, "rows"), positions=(positions, "rows"), starts=(starts, "rows"))
    _of_dtype(op, torch.int64, seeds=seeds, positions=positions, starts=starts)
    if vocab_size < 1:
        raise ValueError(f"{op}: vocab_size is at least 1, got {vocab_size}")
    return seeds.new_empty(seeds.shape[0], vocab_size, dtype=torch.float32)


def gumbel_from_bits(bits: Tensor) -> Tensor:
    _sizes_of("gumbel_from_bits", bits=(bits, "count"))
    _of_dtype("gumbel_from_bits", torch.int32, bits=bits)
    return bits.new_empty(bits.shape, dtype=torch.float32)


def lm_head_argmax(
    x: Tensor,
    weight: Tensor,
    *,
    vocab_ids: Tensor | None = None,
    temperature: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    starts: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    op = "lm_head_argmax"
    sizes = _sizes_of(
        op,
        x=(x, "m k"),
        weight=(weight, "vocab k"),
        vocab_ids=(vocab_ids, "kept"),
        temperature=(temperature, "m"),
        seeds=(seeds, "m"),
        positions=(positions, "m"),
        starts=(starts, "m"),
        norm_weight=(norm_weight, "k"),
    )
    _floating(op, x=x, weight=weight, norm_weight=norm_weight)
    _of_dtype(op, torch.int32, vocab_ids=vocab_ids)
    _of_dtype(op, torch.float32, temperature=temperature)
    _of_dtype(op, torch.int64, seeds=seeds, positions=positions, starts=starts)
    if len({t is None for t in (temperature, seeds, positions)}) > 1:
        raise ValueError(f"{op}: temperature, seeds and positions are given together or not at all")
    if starts is not None and temperature is None:
        raise ValueError(f"{op}: starts are given with temperature, seeds and positions only")
    _at_least_one(op, sizes, ("k", "vocab", *(["kept"] if vocab_ids is not None else [])))
    token_ids = x.new_empty(sizes["m"], dtype=torch.int64)
    top_probability = x.new_empty(sizes["m"], dtype=torch.float32)
    return token_ids, top_probability, top_probability.new_empty(sizes["m"])


def accept_tokens(
    draft_token_ids: Tensor,
    target_token_ids: Tensor,
    cache_seqlens: Tensor,
    num_left: Tensor,
    eos_ids: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    op = "accept_tokens"
    _sizes_of(
        op,
        draft_token_ids=(draft_token_ids, "batch k"),
        target_token_ids=(target_token_ids, "batch k+1"),
        cache_seqlens=(cache_seqlens, "batch"),
        num_left=(num_left, "batch"),
        eos_ids=(eos_ids, "any"),
    )
    _of_dtype(op, torch.int64, draft_token_ids=draft_token_ids, target_token_ids=target_token_ids)
    if target_token_ids.shape[1] != draft_token_ids.shape[1] + 1:
        raise ValueError(
            f"{op}: target_token_ids has {target_token_ids.shape[1]} tokens a sequence, expected "
            f"one more than the {draft_token_ids.shape[1]} of draft_token_ids"
        )
    return _emission(op, draft_token_ids, cache_seqlens, num_left, eos_ids)


def accept_block(
    draft_token_ids: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    seeds: Tensor,
    positions: Tensor,
    cache_seqlens: Tensor,
    num_left: Tensor,
    eos_ids: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    op = "accept_block"
    _sizes_of(
        op,
        draft_token_ids=(draft_token_ids, "batch k"),
        draft_probs=(draft_probs, "batch k vocab"),
        target_probs=(target_probs, "batch k+1 vocab"),
        seeds=(seeds, "batch"),
        positions=(positions, "batch"),
        cache_seqlens=(cache_seqlens, "batch"),
        num_left=(num_left, "batch"),
        eos_ids=(eos_ids, "any"),
    )
    if target_probs.shape[1] != draft_probs.shape[1] + 1:
        raise ValueError(
            f"{op}: target_probs has {target_probs.shape[1]} rows a sequence, expected one more "
            f"than the {draft_probs.shape[1]} of draft_probs"
        )
    _of_dtype(op, torch.float32, draft_probs=draft_probs, target_probs=target_probs)
    _of_dtype(op, torch.int64, draft_token_ids=draft_token_ids, seeds=seeds, positions=positions)
    return _emission(op, draft_token_ids, cache_seqlens, num_left, eos_ids)


def _emission(
    op: str, draft_token_ids: Tensor, cache_seqlens: Tensor, num_left: Tensor, eos_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What both acceptances check alike, and return."""
    _of_dtype(op, torch.int32, cache_seqlens=cache_seqlens, num_left=num_left)
    _of_dtype(op, torch.int64, eos_ids=eos_ids)
    batch, k = draft_token_ids.shape
    tokens = draft_token_ids.new_empty(batch, k + 1)
    num_accepted = draft_token_ids.new_empty(batch, dtype=torch.int32)
    return tokens, num_accepted, draft_token_ids.new_empty(batch)
