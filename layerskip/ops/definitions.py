"""Each operation that has a kernel, in plain PyTorch: its definition, and its path on a CPU.

Every argument after the tensors that an operation always takes is keyword-only, so that a mask of
a tree can join them. Rounding happens where it is written, in the dtype of the inputs: in float64
a definition is the measure that kernels are tested against.
"""

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from layerskip.ops import reference
from layerskip.ops.acceptance import accept_block as accept_block
from layerskip.ops.acceptance import accept_tokens as accept_tokens


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Root-mean-square norm (Zhang and Sennrich 2019), rounded before the weight.

    Args:
        x: ``(m, width)``.
        weight: ``(width,)``.
        eps: added to the mean square.

    Returns:
        ``(m, width)``.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    wide = _wide(x)
    # In place, which is quicker: each layer has two of these.
    factor = wide.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * factor).to(x.dtype) * weight


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Residual connection and the norm after it.

    Args:
        x, residual: ``(m, width)``.
        weight: ``(width,)``.
        eps: added to the mean square.

    Returns:
        The norm of the sum, and the sum: ``(m, width)`` each.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    total = residual + x
    return rms_norm(total, weight, eps=eps), total


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """``norm(x) weight^T + bias + residual``; a row's bits do not depend on the other rows.

    Args:
        x: ``(m, k)``.
        weight: ``(n, k)``.
        bias: ``(n,)``.
        residual: ``(m, n)``, added after rounding.
        norm_weight: ``(k,)``; x goes through ``rms_norm`` first.
        eps: of the norm.

    Returns:
        ``(m, n)``.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    out = F.linear(_normed(x, norm_weight, eps), weight, bias)
    return out if residual is None else residual + out


def swiglu(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """``silu(x gate^T) * (x up^T)`` (Shazeer 2020), x optionally through ``rms_norm`` first.

    Args:
        x: ``(m, k)``.
        gate_weight, up_weight: ``(n, k)``.
        norm_weight: ``(k,)``.
        eps: of the norm.

    Returns:
        ``(m, n)``.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    normed = _normed(x, norm_weight, eps)
    return F.silu(F.linear(normed, gate_weight)) * F.linear(normed, up_weight)


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
    """Rotary embedding (Su et al. 2021) of q, in place, and k; k and v into the cache.

    Token t of sequence b is at position, and goes to slot, ``cache_seqlens[b] + t``. Tokens past
    the end of the cache or of the tables are left out, and so is a sequence of negative length.

    Args:
        q: ``(batch, seqlen, nheads, headdim)``; changed.
        k, v: ``(batch, seqlen, nheads_k, headdim)``.
        k_cache, v_cache: ``(batch, seqlen_cache, nheads_k, headdim)``; changed.
        cosine, sine: ``(positions, rotary_dim / 2)`` float32; dimensions from ``rotary_dim`` on
            are not rotated.
        cache_seqlens: ``(batch,)`` int32, lengths before this append.
        interleaved: pairs are neighbours, not halves of the rotated dimensions.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    seqlen = q.shape[1]
    positions = cache_seqlens[:, None].long() + torch.arange(seqlen, device=q.device)
    end = min(k_cache.shape[1], cosine.shape[0])
    batch, token = torch.nonzero((cache_seqlens[:, None] >= 0) & (positions < end), as_tuple=True)
    slot = positions[batch, token]
    tables = (cosine[slot, None], sine[slot, None])
    q[batch, token] = _rotated(q[batch, token], *tables, interleaved)
    k_cache[batch, slot] = _rotated(k[batch, token], *tables, interleaved)
    v_cache[batch, slot] = v[batch, token]


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
    """Causal attention of a few new positions per sequence, which are in the cache already.

    Position t of sequence b sees slots up to ``cache_seqlens[b] + t``. What lies beyond the
    sequence's last position is not read; what a position does not see must be finite.

    Args:
        q: ``(batch, seqlen, nheads, headdim)``.
        k_cache, v_cache: ``(batch, seqlen_cache, nheads_k, headdim)``; nheads_k divides nheads.
        cache_seqlens: ``(batch,)`` int32, lengths before the new positions; the answer of a
            sequence of negative length is 0.
        softmax_scale: multiplies the scores; ``headdim ** -0.5`` if None.
        window: a position sees itself and ``window - 1`` slots before it; 0 for all.
        softcap: scores become ``softcap * tanh(scores / softcap)``; 0 for none.
        sinks: ``(nheads,)`` float32, a score per head that takes part in the softmax and has
            no value.

    Returns:
        ``(batch, seqlen, nheads, headdim)``.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    heads_k = k_cache.shape[2]
    slots = torch.arange(k_cache.shape[1], device=q.device)
    last = cache_seqlens[:, None] + torch.arange(q.shape[1], device=q.device)
    visible = slots <= last[..., None]
    if window > 0:
        visible &= slots > last[..., None] - window
    visible &= (cache_seqlens >= 0)[:, None, None]
    keys, values = _wide(k_cache), _wide(v_cache)
    values = values.where(visible.any(1)[..., None, None], 0)  # 0 times NaN is NaN
    grouped = _wide(q).unflatten(2, (heads_k, -1))
    scores = torch.einsum("bqhgd,bshd->bqhgs", grouped, keys)
    scores = scores * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, :, None, None], float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, 1, heads_k, -1, 1)
        scores = torch.cat([scores, column.expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : len(slots)]  # NaN: nothing is visible
    return torch.einsum("bqhgs,bshd->bqhgd", weights, values).flatten(2, 3).to(q.dtype)


def gumbel_noise(
    seeds: Tensor,
    positions: Tensor,
    *,
    vocab_size: int,
    stream: int = reference.TARGET_STREAM,
    starts: Tensor | None = None,
) -> Tensor:
    """Counter-based standard Gumbel noise, the same bits on every device.

    Args:
        seeds: ``(rows,)`` int64.
        positions: ``(rows,)`` int64, absolute.
        vocab_size: token ids from 0 on.
        stream: 0 is the noise that draft and target share.
        starts: ``(rows,)`` int64, positions of the rounds' first tokens, for a stream that each
            round draws anew; 0 if None.

    Returns:
        ``(rows, vocab_size)`` float32.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    starts = torch.zeros_like(positions) if starts is None else starts
    numbers = zip(seeds.tolist(), positions.tolist(), starts.tolist(), strict=True)
    rows = [
        reference.gumbel_noise(s, p, vocab_size, stream=stream, start=start)
        for s, p, start in numbers
    ]
    out = torch.stack(rows) if rows else torch.empty(0, vocab_size)
    return out.to(seeds.device)


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """Standard Gumbel noise of 24-bit uniforms; see ``reference.gumbel_from_bits``.

    Args:
        bits: ``(count,)`` int32, each from 0 to 2**24 - 1.

    Returns:
        ``(count,)`` float32.

    Raises:
        ValueError: the shape or the dtype does not fit.
    """
    return torch.from_numpy(reference.gumbel_from_bits(bits.cpu().numpy())).to(bits.device)


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
    """The next token of each row, greedy or by Gumbel noise, without its logits in memory.

    Scores are logits over temperature; the token is the one whose score plus noise is largest,
    ties to the lowest id. A temperature of 0, or none, means no noise and scores that are logits.

    Args:
        x: ``(m, k)`` hidden states.
        weight: ``(vocab, k)``.
        vocab_ids: ``(kept,)`` int32, ids to choose from: a trimmed draft vocabulary. None for all.
            Each must be below vocab: a GPU does not check.
        temperature: ``(m,)`` float32.
        seeds, positions: ``(m,)`` int64, with ``temperature``: of the noise; a position is that of
            the token to choose.
        starts: ``(m,)`` int64, positions of the rounds' first tokens: noise of the draft's own
            stream, as block verification needs it. None for the noise that draft and target share.
        norm_weight: ``(k,)``; x goes through ``rms_norm`` first.
        eps: of the norm.

    Returns:
        Token ids ``(m,)`` int64; the probability of the likeliest token and the log-sum-exp of the
        scores, both over the ids to choose from, ``(m,)`` float32.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    kept = weight if vocab_ids is None else weight[vocab_ids.long()]
    scores = _wide(F.linear(_normed(x, norm_weight, eps), kept))
    noisy = scores
    if temperature is not None:
        seeds, positions = cast(Tensor, seeds), cast(Tensor, positions)
        hot = (temperature > 0)[:, None]
        scores = torch.where(hot, scores / temperature[:, None], scores)
        stream = reference.TARGET_STREAM if starts is None else reference.DRAFT_STREAM
        noise = gumbel_noise(
            seeds, positions, vocab_size=weight.shape[0], stream=stream, starts=starts
        )
        noise = noise if vocab_ids is None else noise[:, vocab_ids.long()]
        noisy = torch.where(hot, scores + noise, scores)
    ids = torch.arange(weight.shape[0], device=x.device) if vocab_ids is None else vocab_ids.long()
    noisy = noisy.where(~noisy.isnan(), float("inf"))  # NaN counts as the largest, as in torch
    winners = noisy == noisy.amax(-1, keepdim=True)
    token_ids = torch.where(winners, ids, torch.iinfo(torch.int64).max).amin(-1)
    log_sum_exp = scores.logsumexp(-1)
    top_probability = (scores.amax(-1) - log_sum_exp).exp()
    return token_ids, top_probability.float(), log_sum_exp.float()


def _normed(x: Tensor, norm_weight: Tensor | None, eps: float) -> Tensor:
    return x if norm_weight is None else rms_norm(x, norm_weight, eps=eps)


def _wide(x: Tensor) -> Tensor:
    """In float32, or in float64 if it is that already."""
    return x if x.dtype == torch.float64 else x.float()


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
    """``(tokens, heads, dim)`` by tables ``(tokens, 1, rotary_dim / 2)``; one rounding."""
    half = cosine.shape[-1]
    wide = _wide(x[..., : 2 * half])
    pairs = wide.unflatten(-1, (half, 2) if interleaved else (2, half))
    a, b = pairs.unbind(-1 if interleaved else -2)
    turned = torch.stack(
        [a * cosine - b * sine, b * cosine + a * sine], dim=-1 if interleaved else -2
    )
    return torch.cat([turned.flatten(-2).to(x.dtype), x[..., 2 * half :]], dim=-1)
