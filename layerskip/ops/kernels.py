"""Each operation as launches of kernels: same names and signatures as ``definitions``.

Grid arithmetic is here; checks of arguments are in ``arguments``, of their place in memory in
``layout``; the kernels, and what each takes, in ``kernels/*.cu``. A launch outside a kernel's
limits is an error, never another path.
"""

import ctypes

import torch
from torch import Tensor

from layerskip.ops import arguments, layout
from layerskip.ops.catalog import (
    ATTENTION_TILES,
    ELEMENT_BYTES,
    HEAD_DIMS,
    MOST_DRAFTED,
    PRODUCT_TILES,
    SPLIT_KEYS,
    TILE,
    VERIFY_CHUNK,
    VOCAB_CHUNK,
)
from layerskip.ops.launch import Argument, Dim3
from layerskip.ops.prepared import PreparedOps, prepared

THREADS = 256
WARPS = THREADS // 32
ATTENTION_THREADS = 128
MAX_GRID = 65535  # of a grid's second and third size
SUMMED_DIMS = 64  # of values, that a block of attention sums at a time
UNIFORMS_PER_BLOCK = 4096
SUMMARY_WORDS = 4  # of lm_head
# Of shared memory, for rows that a product norms by itself: two of its blocks have to find room on
# a multiprocessor. More rows are normed by a kernel of their own, once and not in every block.
NORMED_BYTES = 72 * 1024
# As many blocks as find room at once on a GPU of some hundred multiprocessors. Up to twice as many
# tiles of outputs are better spread.
MANY_BLOCKS, FEW_TILES = 256, 512
# Of attention with a tile each. They do not fill the GPU, and are done sooner than fewer of more
# tiles, which read keys and values less often.
FEW_BLOCKS = 512
VERIFY_WORDS = 5  # of block_verify
Arguments = tuple[Argument, ...]


class KernelOps(PreparedOps):
    """The operations over one launcher: the driver's, or a test's emulator."""

    @prepared
    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        out = arguments.rms_norm(x, weight, eps=eps)
        self._norm("rms_norm", x, None, weight, eps, out, None)
        return out

    @prepared
    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
    ) -> tuple[Tensor, Tensor]:
        out, total = arguments.add_rms_norm(x, residual, weight, eps=eps)
        self._norm("add_rms_norm", x, residual, weight, eps, out, total)
        return out, total

    def _norm(
        self,
        op: str,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        out: Tensor,
        total: Tensor | None,
    ) -> None:
        layout.dense(op, weight=weight)
        strides = (
            layout.row_stride(op, x=x),
            0 if residual is None else layout.row_stride(op, residual=residual),
        )
        rows, width = x.shape
        aligned = layout.aligned(width, x, residual, weight, out, total)
        args = (x, strides[0], residual, strides[1], weight, eps, out, total, width, aligned)
        name = f"rms_norm<{layout.form(op, x=x)}>"
        self._start(op, name, (rows, 1, 1), THREADS, 4 * (WARPS + 1), args)

    @prepared
    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        norm_weight: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        out = arguments.linear(
            x, weight, bias=bias, residual=residual, norm_weight=norm_weight, eps=eps
        )
        layout.dense("linear", weight=weight, bias=bias, norm_weight=norm_weight)
        x, norm_weight, normed = self._to_norm(x, norm_weight, eps)
        (m, k), n = x.shape, weight.shape[0]
        tiles = _tiles(m, PRODUCT_TILES)
        args = (
            x,
            layout.row_stride("linear", x=x),
            weight,
            bias,
            residual,
            0 if residual is None else layout.row_stride("linear", residual=residual),
            norm_weight,
            eps,
            out,
            m,
            n,
            k,
            layout.aligned(k, x, weight, norm_weight),
            each := _outputs_each(n, 16),
        )
        grid = (-(-n // each), -(-m // (TILE * tiles)), 1)
        name = f"linear<{layout.form('linear', x=x)},{tiles}>"
        self._start("linear", name, grid, THREADS, _product_smem(tiles) + normed, args)
        return out

    @prepared
    def swiglu(
        self,
        x: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        *,
        norm_weight: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        out = arguments.swiglu(x, gate_weight, up_weight, norm_weight=norm_weight, eps=eps)
        layout.dense(
            "swiglu", gate_weight=gate_weight, up_weight=up_weight, norm_weight=norm_weight
        )
        x, norm_weight, normed = self._to_norm(x, norm_weight, eps)
        (m, k), n = x.shape, gate_weight.shape[0]
        tiles = _tiles(m, PRODUCT_TILES)
        stride = layout.row_stride("swiglu", x=x)
        aligned = layout.aligned(k, x, gate_weight, up_weight, norm_weight)
        each = _outputs_each(n, 8)
        args = (x, stride, gate_weight, up_weight, norm_weight, eps, out, m, n, k, aligned, each)
        grid = (-(-n // each), -(-m // (TILE * tiles)), 1)
        name = f"swiglu<{layout.form('swiglu', x=x)},{tiles}>"
        self._start("swiglu", name, grid, THREADS, _product_smem(tiles) + normed, args)
        return out

    def _to_norm(
        self, x: Tensor, weight: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor | None, int]:
        """What a product has to norm, the norm's weight, and bytes of shared memory for it; normed
        already, by the same order of sums, where there is no room."""
        m, k = x.shape
        if weight is None or m == 0:
            return x, weight, 0
        room = ELEMENT_BYTES * (m + 1) * (-(-k // 8) * 8 + 32)
        if m <= TILE and room <= NORMED_BYTES:
            return x, weight, room
        return self.rms_norm(x, weight, eps=eps), None, 0

    @prepared
    def rope_append_kv(
        self,
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
        arguments.rope_append_kv(
            q, k, v, k_cache, v_cache, cosine, sine, cache_seqlens, interleaved=interleaved
        )
        layout.dense(op, cosine=cosine, sine=sine, cache_seqlens=cache_seqlens)
        layout.dense_last(op, q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache)
        layout.same_strides(op, k_cache, v_cache)
        batch, seqlen, heads, dim = q.shape
        heads_k, positions = k.shape[2], cosine.shape[0]
        cache_batch, cache_slot, cache_head = layout.strides(k_cache)
        args: Arguments = (
            *(q, *layout.strides(q)),
            *(k, *layout.strides(k)),
            *(v, *layout.strides(v)),
            *(k_cache, v_cache, ctypes.c_int64(cache_batch), cache_slot, cache_head),
            *(cosine, sine, cache_seqlens, heads, heads_k, dim),
            *(2 * cosine.shape[1], k_cache.shape[1], positions, interleaved),
        )
        grid = (seqlen, heads + 2 * heads_k, batch)
        self._start(op, f"rope_append_kv<{layout.form(op, q=q)}>", grid, 32, 0, args)

    @prepared
    def decode_attention(
        self,
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
        out = arguments.decode_attention(
            q, k_cache, v_cache, cache_seqlens, window=window, softcap=softcap, sinks=sinks
        )
        layout.dense(op, cache_seqlens=cache_seqlens, sinks=sinks)
        layout.dense_last(op, q=q, k_cache=k_cache, v_cache=v_cache)
        layout.same_strides(op, k_cache, v_cache)
        batch, seqlen, heads, dim = q.shape
        slots, heads_k = k_cache.shape[1:3]
        if dim not in HEAD_DIMS:
            raise ValueError(f"{op}: headdim is {dim}, kernels exist for {HEAD_DIMS}")
        layout.aligned_heads(op, q=q, k_cache=k_cache, v_cache=v_cache)
        form, splits = layout.form(op, q=q), -(-slots // SPLIT_KEYS)
        part_out = q.new_empty(batch, seqlen, heads, splits, dim, dtype=torch.float32)
        part_stats = q.new_empty(batch, seqlen, heads, splits, 2, dtype=torch.float32)
        cache_batch, cache_slot, cache_head = layout.strides(k_cache)
        scale = dim**-0.5 if softmax_scale is None else softmax_scale
        args: Arguments = (
            *(q, *layout.strides(q)),
            *(k_cache, v_cache, ctypes.c_int64(cache_batch), cache_slot, cache_head),
            *(cache_seqlens, part_out, part_stats, seqlen, heads, heads_k, slots),
            *(float(scale), float(softcap), window),
        )
        rows = seqlen * heads // heads_k
        few = splits * heads_k * batch * -(-rows // TILE) <= FEW_BLOCKS
        tiles = 1 if few else _tiles(rows, ATTENTION_TILES)
        blocks = -(-rows // (TILE * tiles))
        smem = 4 * ATTENTION_THREADS // 32 * TILE * tiles * (SUMMED_DIMS + 3)
        name = f"decode_attention<{form},{dim},{tiles}>"
        self._start(op, name, (splits * blocks, heads_k, batch), ATTENTION_THREADS, smem, args)
        args = (part_out, part_stats, cache_seqlens, sinks, out, heads, splits, dim, slots, window)
        grid = (seqlen * heads, batch, 1)
        smem = 8 * ATTENTION_THREADS + ATTENTION_THREADS // 8
        self._start(op, f"combine_splits<{form}>", grid, ATTENTION_THREADS, smem, args)
        return out

    @prepared
    def gumbel_noise(
        self,
        seeds: Tensor,
        positions: Tensor,
        *,
        vocab_size: int,
        stream: int = 0,
        starts: Tensor | None = None,
    ) -> Tensor:
        op = "gumbel_noise"
        out = arguments.gumbel_noise(
            seeds, positions, vocab_size=vocab_size, stream=stream, starts=starts
        )
        layout.dense(op, seeds=seeds, positions=positions, starts=starts)
        grid = (-(-vocab_size // THREADS), seeds.shape[0], 1)
        self._start(op, op, grid, THREADS, 0, (seeds, positions, starts, out, vocab_size, stream))
        return out

    @prepared
    def gumbel_from_bits(self, bits: Tensor) -> Tensor:
        op = "gumbel_from_bits"
        out = arguments.gumbel_from_bits(bits)
        layout.dense(op, bits=bits)
        grid = (-(-bits.shape[0] // UNIFORMS_PER_BLOCK), 1, 1)
        self._start(op, op, grid, THREADS // 2, 0, (bits, out, bits.shape[0]))
        return out

    @prepared
    def lm_head_argmax(
        self,
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
        choice = (vocab_ids, temperature, seeds, positions, starts)
        outputs = arguments.lm_head_argmax(
            x,
            weight,
            vocab_ids=vocab_ids,
            temperature=temperature,
            seeds=seeds,
            positions=positions,
            starts=starts,
            norm_weight=norm_weight,
            eps=eps,
        )
        layout.dense(op, weight=weight, vocab_ids=vocab_ids, norm_weight=norm_weight)
        layout.dense(op, temperature=temperature, seeds=seeds, positions=positions, starts=starts)
        m, k = x.shape
        x, norm_weight, normed = self._to_norm(x, norm_weight, eps)
        vocab = weight.shape[0] if vocab_ids is None else vocab_ids.shape[0]
        tiles, chunks = _tiles(m, PRODUCT_TILES), -(-vocab // VOCAB_CHUNK)
        summaries = x.new_empty(m, chunks, SUMMARY_WORDS, dtype=torch.float32)
        aligned = layout.aligned(k, x, weight, norm_weight)
        stride = layout.row_stride(op, x=x)
        args: Arguments = (
            x,
            stride,
            weight,
            norm_weight,
            eps,
            *choice,
            summaries,
            m,
            vocab,
            k,
            aligned,
        )
        smem = _product_smem(tiles) + ELEMENT_BYTES * VOCAB_CHUNK * TILE * tiles + normed
        name = f"lm_head<{layout.form(op, x=x)},{tiles}>"
        self._start(op, name, (chunks, -(-m // (TILE * tiles)), 1), THREADS, smem, args)
        args = (summaries, chunks, *outputs)
        self._start(op, "lm_head_finish", (m, 1, 1), THREADS, 8 * WARPS, args)
        return outputs

    @prepared
    def accept_tokens(
        self,
        draft_token_ids: Tensor,
        target_token_ids: Tensor,
        cache_seqlens: Tensor,
        num_left: Tensor,
        eos_ids: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        op = "accept_tokens"
        state = (cache_seqlens, num_left)
        outputs = arguments.accept_tokens(draft_token_ids, target_token_ids, *state, eos_ids)
        layout.dense(op, draft_token_ids=draft_token_ids, target_token_ids=target_token_ids)
        layout.dense(op, cache_seqlens=cache_seqlens, num_left=num_left, eos_ids=eos_ids)
        batch, k = draft_token_ids.shape
        _short_draft(op, k)
        tokens = (draft_token_ids, target_token_ids, eos_ids, eos_ids.shape[0])
        self._start(op, op, (batch, 1, 1), 32, 0, (*tokens, *state, *outputs, k))
        return outputs

    @prepared
    def accept_block(
        self,
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
        inputs = (draft_token_ids, draft_probs, target_probs, seeds, positions)
        state = (cache_seqlens, num_left)
        outputs = arguments.accept_block(*inputs, *state, eos_ids)
        layout.dense(op, draft_token_ids=draft_token_ids, draft_probs=draft_probs)
        layout.dense(op, target_probs=target_probs, seeds=seeds, positions=positions)
        layout.dense(op, cache_seqlens=cache_seqlens, num_left=num_left, eos_ids=eos_ids)
        batch, k, vocab = draft_probs.shape
        _short_draft(op, k)
        chunks = -(-vocab // VERIFY_CHUNK)
        summaries = draft_probs.new_empty(batch, k + 1, chunks, VERIFY_WORDS)
        smem = 4 * VERIFY_WORDS * WARPS
        args = (*inputs, summaries, k, vocab)
        self._start(op, "block_verify", (chunks, k + 1, batch), THREADS, smem, args)
        rest = (eos_ids, eos_ids.shape[0], *state, *outputs, k, vocab)
        self._start(op, op, (batch, 1, 1), 32, 0, (*inputs, summaries, chunks, *rest))
        return outputs

    def _start(
        self, op: str, kernel: str, grid: Dim3, threads: int, smem: int, args: Arguments
    ) -> None:
        """Launch, unless there is nothing to do."""
        if 0 in grid:
            return
        if max(grid[1:]) > MAX_GRID:
            raise ValueError(f"{op}: a grid of {grid} blocks is more than {MAX_GRID} in y or z")
        self._launch(kernel, grid, (threads, 1, 1), smem, args)


def _tiles(rows: int, available: tuple[int, ...]) -> int:
    """Token tiles of a block: all rows if possible, for the weights are read once per block."""
    return next((t for t in available if TILE * t >= rows), available[-1])


def _outputs_each(outputs: int, tile: int) -> int:
    """Outputs of a block of a product, a multiple of those of a tile. Where there are many tiles a
    block takes several: what comes before its first is done once."""
    tiles = -(-outputs // tile)
    return tile * (1 if tiles <= FEW_TILES else -(-tiles // MANY_BLOCKS))


def _product_smem(tiles: int) -> int:
    """Sums of all warps, and a norm's factor for each token."""
    return 4 * (WARPS * 32 * 4 * tiles + TILE * tiles)


def _short_draft(op: str, k: int) -> None:
    if k > MOST_DRAFTED:
        raise ValueError(f"{op}: {k} drafted tokens a sequence, at most {MOST_DRAFTED}")
