"""A dense Llama-family layer as one function over the checkpoint's own tensors.

The same arithmetic as transformers' modules, roundings included, without their Python: a small
layer takes two thirds of the time on a CPU (bench/LOG.md). A layer that is not exactly what this
file knows, or that somebody has hooked or adapted, goes through its own modules instead.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layerskip.blocks import (
    Blocks,
    Copies,
    fewest_rows,
    multiplied,
    multiplied_in_place,
    read_in_place,
    why_not,
)
from layerskip.draft_head import Projection
from layerskip.layout import Layout
from layerskip.ops.definitions import rms_norm
from layerskip.shared import hooks_of

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
ONE_WINDOW = ("Mistral", "Phi3")  # of all layers
BY_LAYER = ("Qwen2", "Qwen3", "SmolLM3")  # as layer_types says; families of neither have no windows
COPIES = "layerskip_copies"  # attribute of a model that we loaded
ROPE_CHUNK = 1024
KERNELS = ("kernels.",)  # where that package is installed it stands around transformers' functions
Rope = tuple[Tensor, Tensor]


def fits(layer: nn.Module, families: Sequence[str] = FAMILIES) -> bool:
    """Whether a layer is as transformers made it, of one of these families, with a SiLU gate.

    Those of ``FAMILIES`` are what ``DenseLayer`` computes.
    """
    if type(layer).__name__ not in {f"{family}DecoderLayer" for family in families}:
        return False
    known = {"Dropout", "Linear", "SiLUActivation", "SiLU"}
    ours = ("DecoderLayer", "Attention", "MLP", "RMSNorm")
    known |= {f"{family}{part}" for family in families for part in ours}
    return (
        unhooked(layer)
        and _is_original(_rotation(layer), *KERNELS)
        and all(
            type(m).__name__ in known
            and _is_original(type(m))
            and _is_original(type(m).forward)  # nobody has put another in its class
            and (not isinstance(m, nn.Linear) or type(m) is nn.Linear)
            for m in layer.modules()
        )
    )


def _is_original(code: object, *others: str) -> bool:
    return getattr(code, "__module__", "").startswith(("torch.", "transformers.", *others))


def _rotation(layer: nn.Module) -> object:
    """What the layer's own code rotates queries and keys with, where it is looked up by its name;
    the layer's class where it is not."""
    code = sys.modules.get(type(layer).__module__)
    return getattr(code, "apply_rotary_pos_emb", type(layer))


def unhooked(module: nn.Module) -> bool:
    """Whether a module has plain parameters, and nobody watches it or what is in it, or all modules
    that there are."""
    # torch has no public way to ask.
    everywhere = nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:  # noqa: SLF001
        return False
    hooked = any(hooks_of(m) for m in module.modules())
    return not hooked and all(type(p) is nn.Parameter for p in module.parameters())


class Projections:
    """Linear maps of one input: one product if their weights lie side by side, else several.

    Attributes:
        packed: ``(all outs, in)``, a view of weights that lie side by side, or None.
        blocks: a copy of it that products read faster, or None.
        in_place: whether oneDNN multiplies by the weights where they lie.
    """

    def __init__(self, *linears: nn.Linear) -> None:
        self.linears, self.in_place = linears, False
        self.settle()

    def settle(self) -> None:
        """See how the weights lie."""
        self.packed: Tensor | None
        self.bias: Tensor | None
        self.packed, self.bias = side_by_side(self.linears) or (None, None)
        self.blocks: Tensor | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """Those that are alike in it are multiplied alike."""
        shapes = tuple((m.weight.shape, m.weight.stride()) for m in self.linears)
        return shapes, self.packed is None, self.blocks is None, self.in_place

    def __call__(self, x: Tensor, at_once: int | None = None, needed: int | None = None) -> Tensor:
        """``(rows, in)`` -> ``(rows, all outs)``; arguments as for ``by_rows``."""
        return by_rows(self._multiplied, x, at_once, needed)

    def _multiplied(self, x: Tensor) -> Tensor:
        if self.blocks is not None:
            return multiplied(x, self.blocks, self.bias)
        run = multiplied_in_place if self.in_place else F.linear
        if len(self.linears) > 1 and self.packed is not None:
            return run(x, self.packed, self.bias)
        parts = [run(x, m.weight, m.bias) for m in self.linears]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def side_by_side(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None] | None:
    """One weight and one bias over several maps of one input; None if they lie apart, or some have
    a bias and others none."""
    weight = joined([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears]
    given = [bias for bias in biases if bias is not None]
    bias = joined(given) if len(given) == len(biases) else None
    return None if weight is None or (given and bias is None) else (weight, bias)


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """One view over tensors that follow each other in one storage, or None."""
    for left, right in pairwise(parts):
        follows = left.data_ptr() + left.nbytes == right.data_ptr()
        same = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        if not (follows and same and left.is_contiguous() and right.is_contiguous()):
            return None
    shape = (sum(len(p) for p in parts), *parts[0].shape[1:])
    first = parts[0].detach()
    return first.as_strided(shape, first.stride(), first.storage_offset())


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, at_once: int, needed: int | None = None
) -> Tensor:
    """``(rows, in)`` -> ``(rows, out)``, at most ``at_once`` rows at a time.

    How many rows torch multiplies together decides which kernel it takes, and so a row's bits.

    Args:
        needed: rows; where none of those that are multiplied together is needed, zeros stand for
            their products. None: all.
    """
    return by_rows(lambda part: F.linear(part, weight, bias), x, at_once, needed)


def by_rows(
    run: Callable[[Tensor], Tensor], x: Tensor, at_once: int | None, needed: int | None = None
) -> Tensor:
    """``run`` over ``(rows, width)``, as ``product`` has it; ``at_once`` None: all together."""
    rows = x.shape[0]  # the length of a tensor is a function of Python, and this runs in each map
    if at_once is None or rows <= at_once:
        return run(x)
    whole = rows if needed is None else min(rows, -(-needed // at_once) * at_once)
    out = torch.cat([run(part) for part in x[:whole].split(at_once)])
    return F.pad(out, (0, 0, 0, rows - whole)) if whole < rows else out


def signed_rope(cos: Tensor, sin: Tensor) -> Rope:
    """Rotary tables for ``rotate``: ``(positions, 1, head_dim)``, the sine's first half negated."""
    half = sin.shape[-1] // 2
    signed = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
    return cos[0, :, None], signed[0, :, None]


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding (Su et al. 2021) of ``(rows, heads, head_dim)``, halves paired."""
    cos, signed_sin = rope
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * signed_sin


class DenseLayer:
    """Attention and gated MLP, each behind an RMS norm, each added to the residual."""

    def __init__(self, layer: Any, index: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index, self.scale, self.head_dim = index, attention.scaling, attention.head_dim
        self.norms = (layer.input_layernorm, layer.post_attention_layernorm)
        self.head_norms = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
        self.qkv = Projections(attention.q_proj, attention.k_proj, attention.v_proj)
        self.gate_up = Projections(mlp.gate_proj, mlp.up_proj)
        self.out, self.down = Projections(attention.o_proj), Projections(mlp.down_proj)
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        self.num_heads = attention.q_proj.out_features // self.head_dim

    def __call__(self, hidden: Tensor, rope: Rope, layout: Layout) -> Tensor:
        """``(rows, width)`` -> ``(rows, width)``; appends keys and values to the cache."""
        (first, second), taken = self.norms, (layout.product_rows, layout.num_tokens)
        qkv = self.qkv(rms_norm(hidden, first.weight, eps=first.variance_epsilon), *taken)
        qkv = qkv.view(hidden.shape[0], -1, self.head_dim)
        rotated = self.num_heads + self.num_kv_heads
        qk, value = qkv[:, :rotated], qkv[:, rotated:]
        q_norm, k_norm = self.head_norms
        if q_norm is not None and k_norm is not None:
            q = rms_norm(qk[:, : self.num_heads], q_norm.weight, eps=q_norm.variance_epsilon)
            k = rms_norm(qk[:, self.num_heads :], k_norm.weight, eps=k_norm.variance_epsilon)
            qk = torch.cat([q, k], dim=1)
        qk = rotate(qk, rope)
        layout.append(qk[:, self.num_heads :], value, self.index)
        mixed = layout.attend(qk[:, : self.num_heads], self.index, self.scale)
        hidden = hidden + self.out(mixed.flatten(1), *taken)
        normed = rms_norm(hidden, second.weight, eps=second.variance_epsilon)
        gate, up = self.gate_up(normed, *taken).chunk(2, dim=-1)
        return hidden + self.down(F.silu(gate) * up, *taken)

    @property
    def maps(self) -> tuple[Projections, ...]:
        """All its products."""
        return self.qkv, self.out, self.gate_up, self.down


class DenseModel:
    """``embed``, ``run`` and ``head`` of a model whose layers all fit.

    Args:
        model: the twin.
        exact: False leaves weights that have no copies to torch's products, whatever the bits: a
            row alone is twice as fast there.

    Attributes:
        windows: each layer's sliding window, None where it sees everything.
        fewest_rows: of a pass that may hold less than a quantum; else 0.
        backend: what multiplies by which weights, in a few words.
    """

    one_row = False
    divides_products = True
    softcap = sinks = None
    probed = (0,)

    def __init__(self, model: Any, *, exact: bool) -> None:
        self._body, self._lm_head = model.model, model.lm_head
        self._layers = [DenseLayer(layer, i) for i, layer in enumerate(self._body.layers)]
        first = self._layers[0]
        self.num_kv_heads, self.head_dim = first.num_kv_heads, first.head_dim
        self.group = first.num_heads // first.num_kv_heads
        self.widths = {model.config.intermediate_size}
        self.windows = windows_of(model)
        self._copies: Copies | None = getattr(model, COPIES, None)
        plain = type(self._lm_head) is nn.Linear and unhooked(self._lm_head)
        heads = [Projections(self._lm_head)] if plain else []
        self._head: Projection = heads[0] if heads else self._lm_head
        self._maps = [*(m for layer in self._layers for m in layer.maps), *heads]
        self._exact = exact
        self._settle()
        weight = self._body.embed_tokens.weight
        self._like = weight.new_zeros(1, 1, 1)
        empty = weight.new_zeros(0)
        self._rope: Rope = (empty, empty)

    @property
    def products(self) -> Iterator[tuple[Projections, Tensor, int]]:
        """One of each kind: with each of its weights, and where the outputs of that begin."""
        kinds = {own.kind: own for own in reversed(self._maps)}
        for own in kinds.values():
            start = 0
            for linear in own.linears:
                yield own, linear.weight, start
                start += linear.out_features

    def _settle(self) -> None:
        """See how the weights lie, and choose what multiplies by them."""
        for own in self._maps:
            own.settle()
        self._places = self._places_now()
        self._blocks = self._in_blocks()
        self._in_place = self._exact and self._blocks is None and read_in_place(self._weights)
        for own in self._maps:
            own.in_place = self._in_place
        weight, copied = self._weights[0], self._blocks is not None
        known = weight.device.type == "cpu" and isinstance(self._head, Projections)
        fewest = fewest_rows(weight.dtype, copied=copied, in_place=self._in_place)
        self.fewest_rows = fewest if known else 0
        by = ", and copied in blocks" if self._blocks is not None else ""
        by = ", multiplied by oneDNN" if self._in_place else by
        how = "packed" if self._layers[0].qkv.packed is not None else "where they lie"
        self.backend = f"dense layers by torch, weights {how}{by}"

    @property
    def _weights(self) -> list[Tensor]:
        """Of all products."""
        return [linear.weight for m in self._maps for linear in m.linears]

    def _places_now(self) -> list[int]:
        """Where weights and biases of all products are."""
        biases = [m.bias for own in self._maps for m in own.linears if m.bias is not None]
        return [t.data_ptr() for t in (*self._weights, *biases)]

    def _in_blocks(self) -> Blocks | None:
        """Copies of all weights for all products, or None: somebody else's model, or there is a
        reason for none."""
        packed = [m.packed for m in self._maps]
        weights = [w for w in packed if w is not None and w.is_contiguous()]
        if self._copies is None or len(weights) < len(self._maps) or why_not(weights) is not None:
            return None
        blocks = self._copies.of(weights, self._weights)
        for own, copy in zip(self._maps, blocks.copies, strict=True):
            own.blocks = copy
        return blocks

    def refresh(self) -> bool:
        """Before a prompt: if weights have changed since they were copied, they are again; views
        over weights that lie elsewhere by now are made anew.

        Returns:
            Whether some are multiplied otherwise from now on, so that nothing is proven of them.
        """
        moved = self._places != self._places_now()
        if not moved and (self._blocks is None or not self._blocks.stale()):
            return False
        before = [own.kind for own in self._maps]
        self._settle()
        return before != [own.kind for own in self._maps]

    def embed(self, ids: Tensor) -> Tensor:
        """``(tokens,)`` -> ``(tokens, hidden)``."""
        return self._body.embed_tokens(ids)

    def run(self, hidden: Tensor, layers: Iterable[int], layout: Layout) -> Tensor:
        """``(rows, hidden)`` -> the same, through these layers."""
        start, num_rows = layout.start, layout.num_rows
        at = layout.positions[0] if start is None else slice(start, start + num_rows)
        cos, sin = self._rope_below(layout.num_visible + num_rows)
        rope = cos[at], sin[at]
        for i in layers:
            hidden = self._layers[i](hidden, rope, layout)
        return hidden

    def head(self, hidden: Tensor, project: Projection | None = None) -> Tensor:
        """``(rows, hidden)`` -> ``(rows, vocab)``, or what ``project`` gives instead."""
        return (project or self._head)(self._body.norm(hidden))

    def _rope_below(self, num_positions: int) -> Rope:
        """Rotary tables for positions below ``num_positions``, made once, in fixed chunks."""
        rope = self._rope
        while (have := len(rope[0])) < num_positions:
            positions = torch.arange(have, have + ROPE_CHUNK, device=self._like.device)[None]
            more = signed_rope(*self._body.rotary_emb(self._like, positions))
            rope = (
                more if not have else (torch.cat([rope[0], more[0]]), torch.cat([rope[1], more[1]]))
            )
        self._rope = rope  # one assignment: another thread reads the old tables or the new ones
        return rope


def windows_of(model: Any) -> tuple[int | None, ...]:
    """Each layer's sliding window, None where it sees everything. A config may have more to say of
    windows than its family reads: that of a Llama that was made of another family's weights."""
    layers = model.model.layers
    family = type(layers[0]).__name__.removesuffix("DecoderLayer")
    window = getattr(model.config, "sliding_window", None)
    if family in BY_LAYER:
        types = model.config.layer_types
        return tuple(window if t == "sliding_attention" else None for t in types)
    return (window if family in ONE_WINDOW else None,) * len(layers)
