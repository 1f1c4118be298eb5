"""What transformers' own modules call while they run for us: attention, masks, experts, a cache.

The three functions are registered with transformers under one name; a twin's config names them.
What a thread is running is in its ``Running``, which hangs on the modules of the twin: several
threads may use one stack.
"""

import threading
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from layerskip.draft_head import Projection
from layerskip.errors import UnsupportedModelError
from layerskip.layout import Layout

NAME = "layerskip"
RUN = "layerskip_run"  # the attribute of a twin's modules that holds their ``Running``


class Lesson:
    """Places of the first call of a model: they note the shapes that its attention comes with.

    Attributes:
        num_heads, num_kv_heads, head_dim: of layer 0.
        asked: whether the layer asked for our attention; some families have their own.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = self.num_visible = num_tokens
        self.start, self.padded = 0, False
        self.num_heads = self.num_kv_heads = self.head_dim = 0
        self.softcap: float | None = None
        self.sinks: Tensor | None = None
        self.asked = False

    def append(self, key: Tensor, value: Tensor, layer: int) -> None:
        _, self.num_kv_heads, self.head_dim = key.shape
        if value.shape != key.shape:  # one cache holds both
            raise UnsupportedModelError(
                f"keys and values differ in shape in layer {layer}: {self.head_dim} and "
                f"{value.shape[-1]} channels a head; layerskip supports equal ones"
            )
        self._seen = key, value

    def seen(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._seen

    def attend(
        self,
        query: Tensor,
        layer: int,
        softmax_scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        self.asked, self.num_heads = True, query.shape[1]
        self.softcap, self.sinks = softcap, sinks
        return torch.zeros_like(query)


Places = Layout | Lesson  # where a pass writes and what it may read


@dataclass(frozen=True, eq=False)
class LayerCall:
    """What a body called a layer with: hidden states, and all that comes beside them."""

    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Running(threading.local):
    """What the thread that asks is running.

    Attributes:
        places: of the layers that run now.
        calls: what stand-ins were called with, layer by layer.
        injected: what stand-ins return; None lets their input through.
        project: in the place of the head; None for the head itself.
    """

    def __init__(self) -> None:  # once in every thread that asks
        self.places: Places | None = None
        self.calls: list[LayerCall] = []
        self.injected: Tensor | None = None
        self.project: Projection | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> "Running":
        return Running()  # a copied module belongs to nobody yet


class LearntMask(Tensor):
    """Stands for a mask while a model is learnt: the window it was made for, None for all."""

    window: int | None = None


def running_places(module: nn.Module) -> Places:
    run: Running = getattr(module, RUN)
    assert run.places is not None, "a twin's layers are only run by DecoderStack"
    return run.places


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Transformers' attention hook: keys and values are in the cache already.

    What masks would say (causality, sliding windows) the layout of the pass knows.
    """
    places = running_places(module)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = cast(int, module.layer_idx)
    mixed = places.attend(query[0].transpose(0, 1), layer, scale, softcap, s_aux)
    return mixed[None].contiguous(), None  # some families take views of it


def mask(*, device: torch.device, local_size: int | None = None, **_: object) -> Tensor:
    """Transformers' mask hook. Only called while a model is learnt: later passes bring a mask."""
    learnt = torch.zeros(1, 1, 1, 1, device=device).as_subclass(LearntMask)
    learnt.window = local_size
    return learnt


def experts(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Routed experts, each over all rows of the pass, so that no row depends on the others' routes.

    An expert that no token asks for is not read. In a decode pass the others multiply as many
    rows as the pass has: the same kernel whoever is routed to it. In a prefill, whose shape is
    the same alone and in a batch, an expert multiplies the rows that ask for it.

    Args:
        hidden: ``(rows, hidden)``, spare rows last.
        top_k_index, top_k_weights: ``(rows, experts per token)``.

    Returns:
        ``(rows, hidden)``; zeros in spare rows.
    """
    places = running_places(module)
    num_tokens = places.num_tokens
    out = torch.zeros_like(hidden, dtype=torch.float32)
    chosen = top_k_index[:num_tokens]
    for expert in chosen.unique().tolist():
        asking = chosen == expert
        rows = asking.any(-1).nonzero()[:, 0]
        weights = (top_k_weights[:num_tokens] * asking).sum(-1)[rows, None]
        result = _expert(module, expert, hidden if places.padded else hidden[rows])
        result = result[rows] if places.padded else result
        out[rows] += result * weights
    return out.to(hidden.dtype)


def _expert(module: Any, expert: int, x: Tensor) -> Tensor:
    """One expert of a transformers experts module: ``(rows, hidden)`` -> the same."""
    name = "gate_up_proj" if module.has_gate else "up_proj"
    x = _linear(module, name, expert, x)
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)  # noqa: SLF001
    x = _linear(module, "down_proj", expert, x)
    normed = getattr(module, "has_post_expert_norm", False)  # newer than transformers 5.17
    return module.post_expert_norm(x) if normed else x


def _linear(module: Any, name: str, expert: int, x: Tensor) -> Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return F.linear(x, weight.T if module.is_transposed else weight, bias)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
ALL_EXPERTS_FUNCTIONS.register(NAME, experts)


class CacheGuest:
    """A layout in the place of transformers' cache: layers call ``update``, bodies ask for sizes.

    Args:
        hands_back: True where the layers' own attention needs what the row may read, False where
            ours reads the cache.
    """

    is_compileable = False

    def __init__(self, places: Places, *, hands_back: bool) -> None:
        self.places, self.hands_back = places, hands_back

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        """``(1, kv_head, rows, head_dim)`` each."""
        self.places.append(key[0].transpose(0, 1), value[0].transpose(0, 1), layer)
        if not self.hands_back:
            return key, value
        keys, values = self.places.seen(layer)
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    def get_seq_length(self, *_: object) -> int:
        return self.places.start or 0

    def get_query_offset(self, *_: object) -> int:
        return self.places.start or 0

    def get_mask_sizes(self, *_: object) -> tuple[int, int]:
        return self.places.num_visible, 0
