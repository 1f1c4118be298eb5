"""A packed model's forward by ``layerskip.ops``.

A layer of up to 8 tokens is seven launches: norm and q, k, v; rotary and cache; attention over
splits; their combination; output projection and residual; norm and gated product; down projection
and residual. Attention is two of them because its splits are added in a fixed order once all are
there. More tokens have their two norms in launches of their own. For some norms and scales no
kernel has a place, and a layer takes more: two for norms of queries and keys (Qwen3, OLMo 2), four
for norms after the blocks (OLMo 2) or for scaled residuals (Granite).

Roundings are those of the operations. In bf16 they are not all where transformers has them: rotary
tables stay in float32, and OLMo 2's norm rounds before its weight as the others do.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from layerskip.cache import KVCache
from layerskip.dense import unhooked, windows_of
from layerskip.draft_head import Projection
from layerskip.families import position_limit
from layerskip.layout import Layout, PrefillLayout
from layerskip.ops import definitions
from layerskip.packing import LayerWeights

Attend = Callable[[LayerWeights, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, q, k, v)``, each ``(tokens, heads, head_dim)``: appends k and v to the cache;
``(tokens, heads * head_dim)``."""


class TorchProducts:
    """``linear`` and ``swiglu`` as ``layerskip.ops`` has them for few rows, of a prompt's many: by
    torch's own library, which is made for those. Norms by the operation."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        norm_weight: Tensor | None = None,
        eps: float = 1e-6,
        **added: Any,
    ) -> Tensor:
        return definitions.linear(self._normed(x, norm_weight, eps), weight, **added)

    def swiglu(
        self, x: Tensor, gate: Tensor, up: Tensor, *, norm_weight: Tensor | None, eps: float
    ) -> Tensor:
        return definitions.swiglu(self._normed(x, norm_weight, eps), gate, up)

    def _normed(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return x if weight is None else self._ops.rms_norm(x, weight, eps=eps)


class PackedModel:
    """``embed``, ``layer`` and ``head`` of a model that ``why_not`` has nothing against.

    Args:
        model: a twin.
        ops: as ``layerskip.packed.ops_on`` gives them.
    """

    one_row = False
    divides_products = False
    fewest_rows, products = 0, ()
    softcap = sinks = None
    probed = (0,)
    backend = "packed weights by our kernels, prompts by torch's products and attention"

    def __init__(self, model: Any, ops: Any) -> None:
        self.ops, self._torch = ops, TorchProducts(ops)
        config = model.config
        self._body = model.model
        self._embedding = _embedding_of(self._body.embed_tokens)
        self.windows = windows_of(model)
        self.layers = [
            LayerWeights.of(layer, i, window)
            for i, (layer, window) in enumerate(zip(self._body.layers, self.windows, strict=True))
        ]
        attention = self._body.layers[0].self_attn
        self.head_dim: int = attention.head_dim
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.group = self.num_heads // self.num_kv_heads
        self._head_counts = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        self.widths: set[int] = set()  # the kernels know no tails
        self.norm, self.eps = self._body.norm.weight.detach(), self._body.norm.variance_epsilon
        self.head_weight = model.lm_head.weight.detach()
        self.embedding_scale = getattr(config, "embedding_multiplier", 1.0)
        self.logits_divisor = getattr(config, "logits_scaling", 1.0)
        self._rope = _rope_tables(self._body, position_limit(config))
        self._no_rope = tuple(t[:, :0] for t in self._rope)

    def refresh(self) -> bool:
        """Nothing is copied of the weights: changes are seen where they are."""
        return False

    def embed(self, ids: Tensor) -> Tensor:
        """``(tokens,)`` int64 -> ``(tokens, width)``."""
        hidden = self._embedding(ids)
        return hidden if self.embedding_scale == 1.0 else hidden * self.embedding_scale

    def layer(self, index: int, hidden: Tensor, products: Any, attend: Attend) -> Tensor:
        """``(tokens, width)`` -> the same, through one layer.

        Args:
            products: what multiplies: ``ops``, or ``TorchProducts``.
        """
        w = self.layers[index]
        first, second = w.before
        qkv = products.linear(hidden, w.qkv, bias=w.qkv_bias, norm_weight=first, eps=w.eps)
        mixed = attend(w, *self._heads(qkv, w))
        hidden = self._added(products, mixed, w.out, w.out_bias, hidden, w, w.after[0])
        gated = products.swiglu(hidden, w.gate, w.up, norm_weight=second, eps=w.eps)
        return self._added(products, gated, w.down, None, hidden, w, w.after[1])

    def _heads(self, qkv: Tensor, w: LayerWeights) -> tuple[Tensor, Tensor, Tensor]:
        """``(tokens, widths of q, k, v)`` -> q, k and v, ``(tokens, heads, head_dim)`` each."""
        dim, counts = self.head_dim, self._head_counts
        heads = qkv.view(len(qkv), sum(counts), dim)
        q, k, v = heads.split_with_sizes(counts, dim=1)
        if w.head_norms is None:
            return q, k, v
        weights = w.head_norms
        if len(weights[0]) == dim:  # of each head; all of qkv, as its rows follow each other
            rows = qkv.view(-1, dim)
            q, k = (self.ops.rms_norm(rows, n, eps=w.eps).view(heads.shape) for n in weights)
            return q[:, : counts[0]], k[:, counts[0] : -counts[2]], v
        normed = (
            self.ops.rms_norm(p.flatten(1), n, eps=w.eps)
            for p, n in zip((q, k), weights, strict=True)
        )
        q, k = (part.unflatten(1, (-1, dim)) for part in normed)
        return q, k, v

    def _added(
        self,
        products: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        w: LayerWeights,
        norm: Tensor | None,
    ) -> Tensor:
        """The residual and the projection of ``x``, which some families norm or scale first."""
        if norm is None and w.residual_scale == 1.0:
            return products.linear(x, weight, bias=bias, residual=residual)
        out = products.linear(x, weight, bias=bias)
        if norm is not None:
            out = self.ops.rms_norm(out, norm, eps=w.eps)
        return residual + (out if w.residual_scale == 1.0 else out * w.residual_scale)

    def append(
        self, w: LayerWeights, q: Tensor, k: Tensor, v: Tensor, caches: Iterable[Tensor], at: Tensor
    ) -> None:
        """Rotate q, in place, and k; k and v into the cache. All ``(batch, seqlen, heads, dim)``.

        Args:
            caches: of the keys and of the values of this layer, as many rows as ``at``.
            at: ``(batch,)`` int32, the slots of the first new positions.
        """
        tables = self._rope if w.rotates else self._no_rope
        self.ops.rope_append_kv(q, k, v, *caches, *tables, at)

    def run(self, hidden: Tensor, layers: Iterable[int], layout: Layout) -> Tensor:
        """``(tokens, width)`` -> the same, a chunk of a prompt through these layers."""
        assert isinstance(layout, PrefillLayout), "decode passes are PackedStack's own"
        cache, row = layout.cache, layout.row
        start = torch.full((1,), layout.start, dtype=torch.int32, device=hidden.device)
        layers = tuple(layers)
        caches = layer_caches(cache, layers, slice(row, row + 1))

        def attend(w: LayerWeights, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.append(w, q[None], k[None], v[None], caches[w.index], start)
            return prompt_attention(q, layout, w).flatten(1)

        for i in layers:
            hidden = self.layer(i, hidden, self._torch, attend)
        return hidden

    def head(self, hidden: Tensor, project: Projection | None = None) -> Tensor:
        """``(rows, width)`` -> ``(rows, vocab)``, or what ``project`` gives instead."""
        if project is not None:
            out = project(self.ops.rms_norm(hidden, self.norm, eps=self.eps))
        else:
            out = self.ops.linear(hidden, self.head_weight, norm_weight=self.norm, eps=self.eps)
        return out if self.logits_divisor == 1.0 else out / self.logits_divisor


def layer_caches(
    cache: KVCache, layers: Sequence[int], rows: slice, slots: slice = slice(None)
) -> dict[int, tuple[Tensor, Tensor]]:
    """Keys and values of these layers in these rows and slots, ``(rows, slots, heads, dim)``.

    All at once: two views for each layer take a host as long as a launch does.
    """
    if not layers:
        return {}
    span = range(min(layers), max(layers) + 1)
    part = (slice(span.start, span.stop), rows, slots)
    keys, values = (both[part].unbind(0) for both in (cache.keys, cache.values))
    return dict(zip(span, zip(keys, values, strict=True), strict=True))


def prompt_attention(q: Tensor, layout: PrefillLayout, w: LayerWeights) -> Tensor:
    """Attention of a chunk whose keys and values are in the cache: ``(tokens, heads, dim)``.

    A mask would keep torch from its fast kernels, which know the causal one by themselves; the
    CPU's is fast with it.
    """
    if not q.is_cuda or 0 < w.window < layout.end:
        return layout.attend(q, w.index, w.scale)
    keys, values = layout.seen(w.index)
    out = F.scaled_dot_product_attention(
        q[None].transpose(1, 2),
        keys[None].transpose(1, 2),
        values[None].transpose(1, 2),
        attn_mask=causal_lower_right(len(q), layout.end),
        scale=w.scale,
        enable_gqa=q.shape[1] != keys.shape[1],
    )
    return out[0].transpose(0, 1)


def _embedding_of(module: Any) -> Callable[[Tensor], Tensor]:
    """What embeds as a module does. A plain one's weight is held where it is, as recorded rounds
    know its address: the module's may be moved while they run."""
    if type(module) is nn.Embedding and module.max_norm is None and unhooked(module):
        return functools.partial(F.embedding, weight=module.weight.detach())
    return cast(nn.Module, module)


def _rope_tables(body: Any, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, ``(positions, rotary_dim / 2)`` float32.

    Of all positions at once: what is captured in a graph cannot move.
    """
    device = body.embed_tokens.weight.device
    like = torch.zeros(1, dtype=torch.float32, device=device)
    positions = torch.arange(num_positions, device=device)[None]
    cosine, sine = body.rotary_emb(like, positions)
    half = cosine.shape[-1] // 2
    return cosine[0, :, :half].contiguous(), sine[0, :, :half].contiguous()
