"""What the general stack computes by itself, on any device, in plain PyTorch; ``definitions`` has
every operation."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

UNIFORM_BITS = 24
# What random numbers are for. The target's are keyed by position alone: each is used for one
# emitted token at most. Draft and acceptance numbers are keyed by the round too: which of them came
# to nothing depends on their values, so that a later round must not meet them again.
TARGET_STREAM, DRAFT_STREAM, ACCEPTANCE_STREAM = 0, 1, 2
KEY_BLOCK = 128  # divides every multiple of slots that a decode pass attends to


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    mask: Tensor,
    softmax_scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a few new positions per sequence over its cache.

    Query heads are folded into rows of their key head, so keys are read once and never repeated,
    and every call of one model has the same number of rows per position.

    Args:
        q: ``(batch, seqlen, nheads, headdim)``.
        k_cache: ``(batch, seqlen_cache, nheads_k, headdim)``, a view of the cache; ``nheads_k``
            divides ``nheads``.
        v_cache: like ``k_cache``. Scratch slots must be finite.
        mask: broadcastable to ``(batch, 1, group * seqlen, seqlen_cache)``, of q's dtype: 0 where
            a position may look, -inf elsewhere; ``group = nheads / nheads_k`` repeats of seqlen.
        softmax_scale: multiplies the scores.
        softcap, sinks: as in ``blockwise_attention``.

    Returns:
        ``(batch, seqlen, nheads, headdim)``.
    """
    batch, seqlen, nheads, headdim = q.shape
    nheads_k = k_cache.shape[2]
    group = nheads // nheads_k
    rows = q.unflatten(2, (nheads_k, group)).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, nheads_k, group * seqlen, headdim)
    k, v = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=softmax_scale)
    else:
        out = blockwise_attention(rows, k, v, mask, softmax_scale, softcap, sinks)
    out = out.view(batch, nheads_k, group, seqlen, headdim).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, seqlen, nheads, headdim)


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    mask: Tensor,
    softmax_scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one sequence's chunk of prompt; shapes as in ``decode_attention``.

    Args:
        mask: ``(1, 1, seqlen, seqlen_cache)``.
    """
    if softcap is not None or sinks is not None:
        group = q.shape[2] // k_cache.shape[2]
        mask = mask.repeat(1, 1, group, 1)
        return decode_attention(q, k_cache, v_cache, mask, softmax_scale, softcap, sinks)
    rows, k, v = (x.transpose(1, 2) for x in (q, k_cache, v_cache))
    group = rows.shape[1] // k.shape[1]
    if group > 1 and q.device.type != "cpu":
        # On CUDA no kernel takes both a mask and grouped heads, and what torch does then holds all
        # scores at once (transformers' use_gqa_in_sdpa says so, too).
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = F.scaled_dot_product_attention(
        rows, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=rows.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)


def blockwise_attention(
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    softmax_scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with capped scores or sinks, which torch's own does not have.

    With ``s = softmax_scale * q k``: ``s' = softcap * tanh(s / softcap)`` (Gemma 2, Riviere et al.
    2024, section 2), and ``p_j = exp(s'_j) / (exp(sink) + sum_i exp(s'_i))``: a sink is one more
    score per head that takes weight and gives no value (gpt-oss model card, OpenAI 2025; after
    Xiao et al. 2023).

    In float32, by blocks of keys counted from slot 0 and combined in their order (Milakov and
    Gimelshein 2018): a block that is masked for a row leaves the row's bits as they are.

    Args:
        rows: ``(batch, nheads_k, group * seqlen, headdim)``.
        keys, values: ``(batch, nheads_k, seqlen_cache, headdim)``.
        mask: broadcastable to ``(batch, 1, group * seqlen, seqlen_cache)``.
        sinks: ``(nheads,)``, or None.

    Returns:
        Like ``rows``.
    """
    wide = rows.float()
    # Finite where nothing has been seen: -inf less -inf is no number.
    highest = wide.new_full((*wide.shape[:-1], 1), torch.finfo(torch.float32).min)
    total, out = torch.zeros_like(highest), torch.zeros_like(wide)
    if sinks is not None:
        seqlen = wide.shape[2] * wide.shape[1] // len(sinks)
        per_row = sinks.float().repeat_interleave(seqlen)  # heads of a group follow each other
        highest = per_row.view(1, *wide.shape[1:3], 1).expand_as(total)
        total = torch.ones_like(total)
    for start in range(0, keys.shape[2], KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        scores = wide @ keys[:, :, block].float().transpose(-1, -2) * softmax_scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores + mask[..., block]
        higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
        weights, kept = torch.exp(scores - higher), torch.exp(highest - higher)
        total = total * kept + weights.sum(-1, keepdim=True)
        out = out * kept + weights @ values[:, :, block].float()
        highest = higher
    return (out / total).to(rows.dtype)


class Philox:
    """Random numbers that depend on nothing but what they are asked for (Salmon et al. 2011).

    To make numpy's generator takes longer than the numbers of a position do: one is kept, and
    moved. Not for several threads at a time.

    Args:
        seed: of the request.
    """

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Philox(counter=0, key=[seed, 0])
        self._begun = self._generator.state  # with nothing left over from a block
        self._counter = self._begun["state"]["counter"]

    def bits(self, position: int, count: int, *, stream: int = 0, start: int = 0) -> np.ndarray:
        """24-bit integers, one for every token id, from Philox4x64-10.

        Key ``(seed, 0)``, counter ``(1 + block, position, start, stream)``. Number ``t`` takes
        64-bit word ``t // 2`` of the stream (four words a block), its low half if t is even, its
        high half if odd, and of that half the upper 24 bits.

        Args:
            position: absolute position that the numbers are for.
            count: how many: the size of the vocabulary.
            stream: 0 is the target's; others are independent of it and of each other.
            start: position of the round's first token, where each round needs numbers of its own.

        Returns:
            ``(count,)`` uint32, each below 2**24.
        """
        self._counter[:] = 0, position, start, stream
        self._generator.state = self._begun
        words = np.asarray(self._generator.random_raw((count + 1) // 2))
        return words.astype("<u8", copy=False).view("<u4")[:count] >> (32 - UNIFORM_BITS)

    def uniforms(self, position: int, count: int) -> list[float]:
        """As the function, of this seed."""
        bits = self.bits(position, count, stream=ACCEPTANCE_STREAM)
        return ((bits + 0.5) * 2.0**-UNIFORM_BITS).tolist()

    def gumbel(self, position: int, count: int, *, stream: int = 0, start: int = 0) -> Tensor:
        """As ``gumbel_noise``, of this seed."""
        bits = self.bits(position, count, stream=stream, start=start)
        return torch.from_numpy(gumbel_from_bits(bits))


def gumbel_from_bits(bits: np.ndarray) -> np.ndarray:
    """Standard Gumbel noise of 24-bit uniforms: ``-log(-log((bits + 0.5) / 2**24))``.

    Computed in float64 and rounded once, so that a value depends on its bits alone, not on the
    shape of the array or the vector unit (tested on all 2**24 values).

    Returns:
        float32 array of the same shape.
    """
    u = (bits.astype(np.float64) + 0.5) * 2.0**-UNIFORM_BITS
    return (-np.log(-np.log(u))).astype(np.float32)


def uniforms(seed: int, position: int, count: int) -> list[float]:
    """Numbers in (0, 1), midpoints of 2**24 intervals, that decide over ``count`` tokens drafted
    from ``position`` on."""
    return Philox(seed).uniforms(position, count)


def gumbel_noise(
    seed: int, position: int, vocab_size: int, *, stream: int = 0, start: int = 0
) -> Tensor:
    """Noise of one absolute position: ``(vocab_size,)`` float32 on the CPU."""
    return Philox(seed).gumbel(position, vocab_size, stream=stream, start=start)
