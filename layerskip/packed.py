"""The stack for GPUs: a dense model by ``layerskip.ops`` alone, over weights packed once.

It is driven in two ways. By segments, as every stack is; and by ``run_rows`` and ``choose``, which
take everything from the device and tell the host nothing, so that a graph can hold a whole round.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import layerskip.ops
from layerskip.admission import unwrapped
from layerskip.cache import KVCache, Segment
from layerskip.draft_head import Projection
from layerskip.exactness import Exactness
from layerskip.exit_adapter import ExitAdapter
from layerskip.model import DecoderStack
from layerskip.ops.build import KernelBuildError
from layerskip.ops.catalog import TILE
from layerskip.packed_forward import PackedModel, layer_caches
from layerskip.packing import LayerWeights, kernels_lack, why_not

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SLOT_BLOCK = 64  # of an allocation; what a row sees has no blocks
PREFILL_CHUNK = 2048  # a GPU is not full of fewer; activations of more take memory
BY_CONSTRUCTION = Exactness(
    True,
    1,
    SLOT_BLOCK,
    "rows keep their bits in every pass, by the construction of the kernels",
    any_size=True,
)
BY_DEFINITIONS = replace(
    BY_CONSTRUCTION,
    reason="on a CPU, for tests, rows keep their bits as far as torch's products do",
)


@dataclass(frozen=True, eq=False)
class Noise:
    """What ``PackedStack.choose`` draws by, on the device; each ``(rows,)``.

    Attributes:
        temperature: float32; 0 is greedy.
        seeds: int64.
        positions: int64, absolute, of the tokens to choose.
    """

    temperature: Tensor
    seeds: Tensor
    positions: Tensor


class PackedStack(DecoderStack):
    """``DecoderStack`` by ``layerskip.ops``: no padding, and no bits to prove.

    With the kernels a row's bits depend on nothing but the row. With the definitions, which run
    on a CPU, they do as far as torch's do: there it is for tests.

    Args:
        model: as for ``DecoderStack``; ``packing.why_not`` has nothing against it.
        ops: where the operations come from; None: from ``ops_on`` the model's device.
    """

    prefill_chunk = PREFILL_CHUNK
    weights_may_move = False  # kernels, and rounds that were recorded, know their addresses
    _forward: PackedModel

    def __init__(self, model: object, *, ops: Any = None) -> None:
        self.ops = ops
        super().__init__(model)

    def _make_forward(self, owner: "PreTrainedModel", *, exact: bool) -> PackedModel:  # noqa: ARG002
        if self.ops is None:
            self.ops = ops_on(self.twin.device)
        return PackedModel(self.twin, self.ops)

    def _settle(self, exact: bool) -> Exactness:  # noqa: ARG002
        return BY_CONSTRUCTION if self.device.type == "cuda" else BY_DEFINITIONS

    @property
    def free_rows(self) -> int:
        """Rows of one tile: the kernels multiply all of it."""
        return TILE

    def embed_ids(self, token_ids: Tensor) -> Tensor:
        """``(n,)`` int64 on the device -> ``(n, width)``; a placeholder (-1) is as good as id 0."""
        return self._forward.embed(token_ids.clamp(min=0))

    def run_rows(
        self,
        hidden: Tensor,
        layers: Iterable[int],
        cache: KVCache,
        lengths: Tensor,
        seqlen: int,
        *,
        num_slots: int | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Run layers over as many new positions of each row, without asking the device anything.

        All shapes follow from the arguments', so that a graph can capture it. ``lengths`` is read
        when the kernels run.

        Args:
            hidden: ``(rows * seqlen, width)``, a row's positions one after another; row i is the
                cache's row i.
            layers: indices, in order.
            cache: its slots at the new positions are overwritten in those layers.
            lengths: ``(rows,)`` int32 on the device: the slot of each row's first new position;
                -1 for a row that takes no part, whose output means nothing.
            seqlen: new positions of each row.
            num_slots: slots below this are attended to; every row's new positions must be among
                them. All of the cache's if None. The bits do not depend on it.
            places: ``(tokens,)`` int64, which of the ``rows * seqlen`` ``hidden`` has, if not all;
                keys and values of the others are 0.

        Returns:
            As ``hidden``.
        """
        layers, batch = tuple(layers), len(lengths)
        caches = layer_caches(cache, layers, slice(0, batch), slice(0, num_slots))

        def attend(w: LayerWeights, *qkv: Tensor) -> Tensor:
            if places is None:
                q, k, v = (x.view(batch, seqlen, *x.shape[1:]) for x in qkv)
            else:
                q, k, v = (_spread(x, places, batch, seqlen) for x in qkv)
            both = caches[w.index]
            self._forward.append(w, q, k, v, both, lengths)
            mixed = self.ops.decode_attention(
                q, *both, lengths, softmax_scale=w.scale, window=w.window
            ).reshape(batch * seqlen, -1)
            return mixed if places is None else mixed.index_select(0, places)

        for i in layers:
            hidden = self._forward.layer(i, hidden, self.ops, attend)
        return hidden

    def choose(
        self, hidden: Tensor, noise: Noise | None = None, vocab_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The token after each position, without logits and without asking the device anything.

        Args:
            hidden: ``(rows, width)`` after the last layer that runs.
            noise: None is greedy.
            vocab_ids: ``(kept,)`` int32 ascending on the device: a draft vocabulary.

        Returns:
            Token ids ``(rows,)`` int64, and the probability of each row's likeliest token under
            its temperature, ``(rows,)`` float32.
        """
        keys: dict[str, Tensor] = {} if noise is None else vars(noise)
        forward = self._forward
        token_ids, likeliest, _ = self.ops.lm_head_argmax(
            hidden,
            forward.head_weight,
            vocab_ids=vocab_ids,
            norm_weight=forward.norm,
            eps=forward.eps,
            **keys,
        )
        return token_ids, likeliest

    @property
    def why_no_choice(self) -> str | None:
        """Why ``choose`` would not choose by ``logits``; None if it does."""
        if self._forward.logits_divisor != 1.0:
            return "the model divides its logits, which a choice on the device does not"
        return None

    @property
    def runs_rounds(self) -> bool:
        """A CPU repeats them in the place of recordings."""
        return self.device.type == "cuda" and self.why_no_choice is None

    def run_pass(
        self,
        hidden: Tensor,
        layers: Sequence[int],
        cache: KVCache,
        segments: Sequence[Segment],
        product_rows: int | None = None,  # noqa: ARG002
    ) -> Tensor:
        """As of ``DecoderStack``; no rows are spare."""
        counts = [s.count for s in segments]
        batch, longest = max(s.row for s in segments) + 1, max(counts)
        starts = [-1] * batch
        for s in segments:
            starts[s.row] = s.start
        lengths = torch.tensor(starts, dtype=torch.int32, device=hidden.device)
        if [s.row for s in segments] == [*range(batch)] and min(counts) == longest:
            return self.run_rows(hidden, layers, cache, lengths, longest)
        held = [s.row * longest + i for s in segments for i in range(s.count)]
        places = torch.tensor(held, device=hidden.device)
        return self.run_rows(hidden, layers, cache, lengths, longest, places=places)

    def logits(self, hidden: Tensor, project: Projection | None = None) -> Tensor:
        """As of ``DecoderStack``; no rows are spare."""
        return self._forward.head(hidden, project)


def _spread(x: Tensor, at: Tensor, batch: int, seqlen: int) -> Tensor:
    """``(tokens, heads, dim)`` -> ``(batch, seqlen, heads, dim)``, token i at place ``at[i]``."""
    out = x.new_zeros(batch * seqlen, *x.shape[1:])
    return out.index_copy_(0, at, x).unflatten(0, (batch, seqlen))


def open_stack(
    model: object,
    *,
    exact: bool = True,
    packed: bool | None = None,
    adapter: ExitAdapter | None = None,
) -> tuple[DecoderStack, str]:
    """The stack that decodes a model, and one sentence for ``info`` on which and why.

    Args:
        model: as for ``DecoderStack``.
        exact: of the general stack; the packed one always is.
        packed: None: the packed stack on a GPU, if it can run the model. False: never. True:
            always, on a CPU too, where the operations' definitions stand for the kernels.
        adapter: for drafts; only the general stack runs it.

    Raises:
        UnsupportedModelError: the model does not fit any stack.
        ValueError: ``packed`` is True and the model cannot be, with the reason.
    """
    reason = why_general(model, packed)
    if reason is None and adapter is not None:
        reason = "the kernels have no exit adapter"
    if reason is None:
        stack = PackedStack(model)
        kernels = "our kernels" if stack.device.type == "cuda" else "our kernels' definitions"
        return stack, f"packed: {kernels} run every decode pass"
    if packed:
        raise ValueError(f"packed is True, but {reason}; leave it out for the general stack")
    return DecoderStack(model, exact=exact, adapter=adapter), f"general: {reason}"


def why_general(model: object, packed: bool | None = None) -> str | None:
    """Why the packed stack does not decode a model, in a few words; None if it does."""
    if packed is False:
        return "the packed stack was switched off (packed=False)"
    inner: Any = unwrapped(model)
    device = getattr(inner, "device", None)
    on_gpu = isinstance(device, torch.device) and device.type == "cuda"
    if not on_gpu and packed is None:
        return "on a CPU torch's own products are faster than the operations' definitions"
    reason = why_not(inner)
    if reason is None and on_gpu:
        head_dim = inner.model.layers[0].self_attn.head_dim
        reason = kernels_lack(inner.dtype, head_dim) or _failure(inner.device)
    return reason


def ops_on(device: torch.device) -> Any:
    """The operations of ``layerskip.ops`` on one device.

    On a GPU without torch's operators before them: those take a host longer than a launch, and
    are there for tracing, which decoding has no use for.
    """
    if device.type != "cuda":
        return layerskip.ops
    from layerskip.ops.registry import cuda_ops

    return cuda_ops(device)


def _failure(device: torch.device) -> str | None:
    """What keeps the kernels from being built and loaded, or None; they are, then."""
    from layerskip.ops.registry import cuda_ops

    try:
        cuda_ops(device)
    except KernelBuildError as error:
        return str(error)
    return None
