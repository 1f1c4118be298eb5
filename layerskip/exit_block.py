"""The parts of an exit adapter that read hidden states: low-rank maps, and a transformer block."""

import math

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from layerskip.adapter_shape import AdapterShape
from layerskip.dense import ROPE_CHUNK, Rope, product, rotate
from layerskip.layout import Layout
from layerskip.ops.definitions import rms_norm

EPSILON = 1e-6


class LowRank(nn.Module):
    """``x -> up (down x)``; ``up`` is zero before training."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, inputs))
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """New values of ``down``."""
        self.down.copy_(_drawn(self.down, generator))

    def forward(self, x: Tensor, up: Tensor | None = None) -> Tensor:
        """``(..., inputs)`` -> ``(..., outputs)``.

        Args:
            up: some rows of ``self.up``, in its place.
        """
        return F.linear(F.linear(x, self.down), self.up if up is None else up)


class ExitBlock(nn.Module):
    """Attention and a gated MLP, each behind an RMS norm, each added to the hidden states.

    Zero output maps make it the identity before training.
    """

    def __init__(self, shape: AdapterShape) -> None:
        super().__init__()
        hidden, width, dim = shape.hidden_size, shape.block_width, shape.head_dim
        self.shape = shape
        heads = shape.num_heads + 2 * shape.num_kv_heads
        self.attention_norm = nn.Parameter(torch.ones(hidden))
        self.qkv = nn.Parameter(torch.empty(heads * dim, hidden))
        self.out = nn.Parameter(torch.zeros(hidden, shape.num_heads * dim))
        self.mlp_norm = nn.Parameter(torch.ones(hidden))
        self.gate_up = nn.Parameter(torch.empty(2 * width, hidden))
        self.down = nn.Parameter(torch.zeros(hidden, width))
        empty = torch.zeros(0)
        self._tables: Rope = (empty, empty)

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """New values of what reads the hidden states."""
        for weight in (self.qkv, self.gate_up):
            weight.copy_(_drawn(weight, generator))

    def sequences(self, states: Tensor, positions: Tensor | None, mask: Tensor | None) -> Tensor:
        """For training: ``(batch, seqlen, hidden)`` -> the same; arguments as of
        ``ExitAdapter.hidden``."""
        if positions is None:
            positions = torch.arange(states.shape[1], device=states.device)[None]
        qk, value = self._heads(states, len(states))
        qk = self._turn(qk, self._rope(positions, qk.dtype))
        query, key = qk.split([self.shape.num_heads, self.shape.num_kv_heads], dim=-2)
        query, key, value = (
            rearrange(x, "row token head dim -> row head token dim") for x in (query, key, value)
        )
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask if mask is None or mask.dtype == torch.bool else mask.to(query.dtype),
            is_causal=mask is None,
            scale=self.shape.head_dim**-0.5,
            enable_gqa=True,
        )
        mixed = rearrange(mixed, "row head token dim -> row token head dim")
        return self._after(states, mixed, len(states))

    def rows(self, hidden: Tensor, layout: Layout, layer: int, at_once: int | None) -> Tensor:
        """For decoding: ``(rows, hidden)`` -> the same.

        Args:
            layer: of the cache, that its keys and values are in.
            at_once: rows of one product; None: all.
        """
        taken = at_once or len(hidden), layout.num_tokens
        qk, value = self._heads(hidden, *taken)
        cos, sin = self._rope_below(layout.num_visible + layout.num_rows, hidden)
        at = layout.positions[0]
        qk = self._turn(qk, (cos[at], sin[at]))
        heads = self.shape.num_heads
        layout.append(qk[:, heads:], value, layer)
        mixed = layout.attend(qk[:, :heads], layer, self.shape.head_dim**-0.5)
        return self._after(hidden, mixed, *taken)

    def _heads(self, x: Tensor, at_once: int, needed: int | None = None) -> tuple[Tensor, Tensor]:
        """Queries and keys together, and values: ``(..., heads, head_dim)`` each."""
        shape = self.shape
        qkv = product(
            rms_norm(x, self.attention_norm, eps=EPSILON), self.qkv, None, at_once, needed
        )
        heads = qkv.unflatten(-1, (-1, shape.head_dim))
        qk, value = heads.split([shape.num_heads + shape.num_kv_heads, shape.num_kv_heads], dim=-2)
        return qk, value

    def _after(self, x: Tensor, mixed: Tensor, at_once: int, needed: int | None = None) -> Tensor:
        """What attention found is added, and the MLP follows."""
        taken = at_once, needed
        x = x + product(mixed.flatten(-2), self.out, None, *taken)
        normed = rms_norm(x, self.mlp_norm, eps=EPSILON)
        gate, up = product(normed, self.gate_up, None, *taken).chunk(2, dim=-1)
        return x + product(F.silu(gate) * up, self.down, None, *taken)

    def _turn(self, heads: Tensor, rope: Rope) -> Tensor:
        """Rotary embedding of each head's first pairs, as many as there are frequencies."""
        turned = 2 * len(self.shape.frequencies)
        if turned == self.shape.head_dim:
            return rotate(heads, rope)
        if not turned:
            return heads
        return torch.cat([rotate(heads[..., :turned], rope), heads[..., turned:]], dim=-1)

    def _rope(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """``(...)`` positions -> tables ``(..., 1, 2 * pairs)``, the sine's first half negated."""
        frequencies = positions.new_tensor(self.shape.frequencies, dtype=torch.float32)
        angles = positions[..., None].float() * frequencies
        cos, sin = (
            f(angles)[..., None, :] * self.shape.rope_scaling for f in (torch.cos, torch.sin)
        )
        return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)

    def _rope_below(self, num_positions: int, like: Tensor) -> Rope:
        """Tables for positions below ``num_positions``, kept and made anew when more are needed."""
        tables = self._tables
        fits = tables[0].dtype == like.dtype and tables[0].device == like.device
        if not fits or len(tables[0]) < num_positions:
            count = -(-num_positions // ROPE_CHUNK) * ROPE_CHUNK
            tables = self._rope(torch.arange(count, device=like.device), like.dtype)
            self._tables = tables  # one assignment: another thread reads old tables or new ones
        return tables


def _drawn(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Normal numbers of a size that keeps the variance of what is multiplied with them."""
    return torch.randn(weight.shape, generator=generator) / math.sqrt(weight.shape[-1])
