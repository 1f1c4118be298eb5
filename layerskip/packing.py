"""Weights of a dense Llama-family model as the operations take them: packed once, kept once.

Maps of one input lie side by side, so that one product gives q, k and v. Only a model that we
loaded ourselves is packed; its parameters keep their names and values and become views.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from layerskip.admission import decoder_layers
from layerskip.dense import fits, side_by_side, unhooked
from layerskip.ops.catalog import HEAD_DIMS
from layerskip.ops.layout import FORMS

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Olmo2", "Granite", "Phi3", "SmolLM3")


def pack(layer: Any) -> None:
    """Move the weights of projections that read the same input side by side in memory.

    Parameters keep their names and values and become views, so nothing is stored twice: while one
    group is moved, it alone is there a second time. Only for a model that we loaded ourselves: a
    guest's tensors are left where they are.
    """
    for group in (_qkv(layer.self_attn), _gate_up(layer.mlp)):
        for name in ("weight", "bias"):
            parameters = [getattr(linear, name) for linear in group]
            if len(group) > 1 and parameters[0] is not None:
                packed = torch.cat([p.data for p in parameters])
                sizes = [len(p) for p in parameters]
                for p, part in zip(parameters, packed.split(sizes), strict=True):
                    p.data = part


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer's tensors, all of them the checkpoint's own; ``None`` where the family has none.

    Attributes:
        index: of the layer.
        qkv, qkv_bias: of queries, keys and values, one after another.
        out, out_bias: of the projection after attention.
        gate, up, down: of the gated product, and of what follows it.
        before: weights of the norms before attention and before the gated product.
        after: weights of the norms after them, before the residual is added.
        head_norms: weights of the norms of queries and keys: of one head, or of all at once.
        eps: of all norms.
        scale: of attention scores.
        residual_scale: of what is added to the residual.
        window: slots that a position sees; 0 for all.
        rotates: whether queries and keys know their positions.
    """

    index: int
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    gate: Tensor
    up: Tensor
    down: Tensor
    before: tuple[Tensor | None, Tensor | None]
    after: tuple[Tensor | None, Tensor | None]
    head_norms: tuple[Tensor, Tensor] | None
    eps: float
    scale: float
    residual_scale: float
    window: int
    rotates: bool

    @classmethod
    def of(cls, layer: Any, index: int, window: int | None) -> "LayerWeights":
        """Of a layer whose weights lie side by side (``why_not``)."""
        attention, mlp = layer.self_attn, layer.mlp
        pre, middle = getattr(layer, "input_layernorm", None), layer.post_attention_layernorm
        before, after = (pre, middle), (None, None)
        if pre is None:  # OLMo 2: the same names, other places
            before, after = (None, None), (middle, layer.post_feedforward_layernorm)
        own = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        q_norm, k_norm = (_weight(norm) for norm in own)
        qkv, qkv_bias = cast(tuple[Tensor, Tensor | None], side_by_side(_qkv(attention)))
        gate_up, _ = cast(tuple[Tensor, None], side_by_side(_gate_up(mlp)))
        gate, up = gate_up.chunk(2)
        return cls(
            index=index,
            qkv=qkv,
            qkv_bias=qkv_bias,
            out=attention.o_proj.weight.detach(),
            out_bias=_detached(attention.o_proj.bias),
            gate=gate,
            up=up,
            down=mlp.down_proj.weight.detach(),
            before=(_weight(before[0]), _weight(before[1])),
            after=(_weight(after[0]), _weight(after[1])),
            head_norms=None if q_norm is None or k_norm is None else (q_norm, k_norm),
            eps=middle.variance_epsilon,
            scale=attention.scaling,
            residual_scale=getattr(layer, "residual_multiplier", 1.0),
            window=window or 0,
            rotates=bool(getattr(attention, "use_rope", True)),
        )


def why_not(model: Any) -> str | None:
    """Why the operations cannot run a model, in a few words; None if they can."""
    if type(model).__name__ not in {f"{family}ForCausalLM" for family in FAMILIES}:
        return "the operations know " + ", ".join(FAMILIES)
    layers, head, norm = decoder_layers(model), model.lm_head, model.model.norm
    if not all(fits(layer, FAMILIES) for layer in layers):
        return "its layers have hooks, adapters, or an activation that the operations lack"
    plain = type(head) is nn.Linear and type(norm).__name__.removesuffix("RMSNorm") in FAMILIES
    if not plain or head.bias is not None or not (unhooked(head) and unhooked(norm)):
        return "its head or the norm before it is not as transformers made it"
    for layer in model.model.layers:
        if any(linear.bias is not None for linear in (*_gate_up(layer.mlp), layer.mlp.down_proj)):
            return "its gated product has a bias"
        if side_by_side(_qkv(layer.self_attn)) is None or side_by_side(_gate_up(layer.mlp)) is None:
            return "its weights lie apart: only a model that from_pretrained loaded is packed"
    return None


def kernels_lack(dtype: torch.dtype, head_dim: int) -> str | None:
    """What the kernels do not exist for, in a few words; None if they do."""
    if dtype not in FORMS:
        names = " and ".join(str(d).removeprefix("torch.") for d in FORMS)
        return f"kernels exist for {names}, not for {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS:
        return f"kernels exist for heads of {HEAD_DIMS} dimensions, not of {head_dim}"
    return None


def _qkv(attention: Any) -> tuple[nn.Linear, ...]:
    fused = getattr(attention, "qkv_proj", None)
    return (fused,) if fused is not None else (attention.q_proj, attention.k_proj, attention.v_proj)


def _gate_up(mlp: Any) -> tuple[nn.Linear, ...]:
    fused = getattr(mlp, "gate_up_proj", None)
    return (fused,) if fused is not None else (mlp.gate_proj, mlp.up_proj)


def _weight(norm: Any) -> Tensor | None:
    return None if norm is None else norm.weight.detach()


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()
