"""A transformers checkpoint as a stack of layers driven by index. Only here do its internals
have names.

The user's model is never touched: everything runs on a twin that shares every tensor but has its
own modules and config, and whose attention is ours.
"""

import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from layerskip.admission import check_model, unwrapped
from layerskip.cache import CacheGuest, KVCache, Layout, PassLayout, PrefillLayout, Segment
from layerskip.dense import DenseLayer, fits, pack, signed_rope
from layerskip.errors import UnsupportedModelError
from layerskip.exactness import Exactness, probe, rows_agree

logger = logging.getLogger(__name__)

ATTENTION = "layerskip"
PREFILL_CHUNK = 512
ROPE_CHUNK = 1024
MAX_PASS_ROWS = 64


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Transformers' attention hook: keys and values are in the cache already."""
    assert layout is not None, "a twin's layers are only run by DecoderStack"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = cast(int, module.layer_idx)
    return layout.attend(query[0].transpose(0, 1), layer, scale)[None], None


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def share_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of ``model`` with its own modules and config over the same tensors.

    Shared too: the user's hooks, which may hold what cannot be copied, and PEFT's record of what
    is merged into the weights.
    """
    shared: list[object] = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        shared += [value for value in vars(module).values() if isinstance(value, Tensor)]
        hooks = chain(module._forward_hooks.values(), module._forward_pre_hooks.values())  # noqa: SLF001
        shared += [h for h in hooks if not isinstance(getattr(h, "__self__", None), nn.Module)]
        shared.append(vars(module).get("merged_adapters"))
    try:
        twin = copy.deepcopy(model, {id(item): item for item in shared})
    except (TypeError, RuntimeError) as error:
        raise UnsupportedModelError(f"the model's modules cannot be copied: {error}") from None
    twin.set_attn_implementation(ATTENTION)
    return twin.eval()


def pack_model(model: PreTrainedModel) -> None:
    """Re-home a model's weights for speed; only one that we loaded ourselves. Values stay."""
    if all(fits(layer) for layer in model.model.layers):
        for layer in model.model.layers:
            pack(layer)


class DecoderStack:
    """``embed``, ``run_layers`` and ``logits`` over a twin of a checkpoint."""

    def __init__(self, model: object) -> None:
        inner = unwrapped(model)
        check_model(inner)
        self.twin = share_twin(cast(PreTrainedModel, inner))
        self._weights = list(self.twin.parameters())
        self._places = _places(self._weights)
        config = self.twin.config
        self._body = self.twin.model
        self._layers = list(self._body.layers)
        self._dense: list[DenseLayer] | None = None
        self.backend = "the checkpoint's own modules, attention by torch"
        if all(fits(layer) for layer in self._layers):
            self._dense = [DenseLayer(layer, i) for i, layer in enumerate(self._layers)]
            how = "packed" if self._dense[0].qkv.packed is not None else "where they lie"
            self.backend = f"dense layers by torch, weights {how} (no kernel of ours yet)"
        self.num_layers: int = config.num_hidden_layers
        heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.group = heads // self.num_kv_heads
        self.vocab_size: int = config.vocab_size
        self.max_positions: int = config.max_position_embeddings
        self.dtype, self.device = self.twin.dtype, self.twin.device
        self.windows = _windows(config)
        self._positions = torch.zeros(1, 0, dtype=torch.int64, device=self.device)
        self._cos = self._sin = torch.zeros(0)
        self._signed = (self._cos, self._sin)
        self._proven: dict[tuple[int, int], bool] = {}
        self.exactness: Exactness
        with torch.inference_mode():
            self.exactness = probe(self)
        at_start = (torch.get_num_threads(), self.exactness.row_quantum)
        self._proven[at_start] = self.exactness.holds  # not proven again in the first round

    @property
    def kv_bytes_per_token(self) -> int:
        elements = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return elements * torch.finfo(self.dtype).bits // 8

    def new_cache(self, *, num_rows: int, num_slots: int) -> KVCache:
        """An empty cache; ``num_slots`` is rounded up to whole attention blocks."""
        if _places(self._weights) != self._places:
            raise ValueError(
                "the model was moved, cast or resized after it was wrapped; wrap it again"
            )
        return KVCache(
            num_layers=self.num_layers,
            num_rows=num_rows,
            num_slots=num_slots,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            device=self.device,
            attended_block=self.exactness.slot_block,
        )

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """Token ids -> ``(tokens, hidden)``, padded with spare rows to a legal pass size."""
        padded = [*token_ids, *[0] * (self._padded(len(token_ids)) - len(token_ids))]
        return self._body.embed_tokens(torch.tensor(padded, device=self.device))

    def run_layers(
        self, hidden: Tensor, layers: Iterable[int], cache: KVCache, segments: Sequence[Segment]
    ) -> Tensor:
        """Run decoder layers over the tokens of ``segments``, reading and writing ``cache``.

        Args:
            hidden: ``(>= tokens, hidden)``, tokens in the order of the segments, spare rows last.
            layers: indices, in order.
            cache: its slots at the segments' positions are overwritten in those layers.
            segments: at most one per row.

        Returns:
            ``(>= tokens, hidden)``, spare rows last.
        """
        layers = tuple(layers)
        if not layers:
            return hidden
        parts = self._split(segments)
        if len(parts) == 1:
            return self.run_pass(hidden, layers, cache, parts[0])
        outputs, start = [], 0
        for part in parts:
            count = sum(s.count for s in part)
            out = self.run_pass(hidden[start : start + count], layers, cache, part)
            outputs.append(out[:count])
            start += count
        return torch.cat(outputs)

    def logits(self, hidden: Tensor) -> Tensor:
        """``(tokens, hidden)`` -> ``(tokens, vocab)`` in the model's dtype."""
        limit = self._largest_proven(hidden.shape[0])
        if hidden.shape[0] <= limit:
            return self.head(self._pad(hidden))
        pieces = hidden.split(limit)
        return torch.cat([self.head(self._pad(p))[: p.shape[0]] for p in pieces])

    def head(self, hidden: Tensor) -> Tensor:
        """Final norm and vocabulary projection of one pass's rows, as they are."""
        return self.twin.lm_head(self._body.norm(hidden))

    def prefill(
        self, token_ids: Sequence[int], cache: KVCache, row: int, *, start: int = 0
    ) -> Tensor:
        """Write a prompt into ``row`` at full depth; logits of its last position, ``(vocab,)``.

        Chunks end at fixed slots, so the bits do not depend on other rows.

        Args:
            token_ids: the whole prompt.
            start: slots below hold the tokens before it already.
        """
        for embedded, layout in self._chunks(token_ids, cache, row, start):
            hidden = self._drive(embedded, range(self.num_layers), layout)
        return self.logits(hidden[-1:])[0]

    def all_exit_logits(self, token_ids: Sequence[int], exits: Sequence[int]) -> dict[int, Tensor]:
        """Teacher-forced logits of one text after each number of layers in ``exits``.

        Returns:
            For each exit ``(tokens, vocab)`` float32; the hidden states of one pass serve all.
        """
        cache = self.new_cache(num_rows=1, num_slots=len(token_ids))
        collected: dict[int, list[Tensor]] = {e: [] for e in exits}
        for embedded, layout in self._chunks(token_ids, cache, 0, 0):
            hidden, depth = embedded, 0
            for e in sorted(exits):
                hidden = self._drive(hidden, range(depth, e), layout)
                depth = e
                collected[e].append(self.head(hidden).float())
        return {e: torch.cat(parts) for e, parts in collected.items()}

    def _chunks(
        self, token_ids: Sequence[int], cache: KVCache, row: int, start: int
    ) -> Iterator[tuple[Tensor, PrefillLayout]]:
        """Embedded pieces of a prompt from ``start`` on, and where each goes."""
        ids = torch.tensor(token_ids, device=self.device)
        while start < len(token_ids):
            end = min(len(token_ids), (start // PREFILL_CHUNK + 1) * PREFILL_CHUNK)
            self._extend_tables(end)
            layout = PrefillLayout(
                cache,
                Segment(row, start, end - start),
                windows=self.windows,
                all_positions=self._positions,
            )
            yield self._body.embed_tokens(ids[start:end]), layout
            start = end

    def run_pass(
        self, hidden: Tensor, layers: Sequence[int], cache: KVCache, segments: Sequence[Segment]
    ) -> Tensor:
        """``run_layers`` as one pass, whatever its size."""
        hidden = self._pad(hidden)
        rows = hidden.shape[0]
        self._extend_tables(max(s.start for s in segments) + rows)
        layout = PassLayout(
            cache,
            segments,
            num_rows=rows,
            group=self.group,
            tile=self.exactness.row_quantum,
            windows=self.windows,
            all_positions=self._positions,
        )
        return self._drive(hidden, layers, layout)

    def _drive(self, hidden: Tensor, layers: Iterable[int], layout: Layout) -> Tensor:
        positions = layout.positions
        if layout.start is not None:
            at: slice | Tensor = slice(layout.start, layout.start + layout.num_rows)
        else:
            at = positions[0]
        if self._dense is not None:
            signed = (self._signed[0][at], self._signed[1][at])
            for i in layers:
                hidden = self._dense[i](hidden, signed, layout)
            return hidden
        rope, hidden, guest = (self._cos[:, at], self._sin[:, at]), hidden[None], CacheGuest(layout)
        for i in layers:
            hidden = self._layers[i](
                hidden,
                attention_mask=None,
                position_embeddings=rope,
                position_ids=positions,
                past_key_values=guest,
                use_cache=True,
                layout=layout,
            )
        return hidden[0]

    def _padded(self, num_tokens: int) -> int:
        quantum = self.exactness.row_quantum
        return -(-num_tokens // quantum) * quantum

    def _pad(self, hidden: Tensor) -> Tensor:
        missing = self._padded(hidden.shape[0]) - hidden.shape[0]
        return F.pad(hidden, (0, 0, 0, missing)) if missing else hidden

    def _split(self, segments: Sequence[Segment]) -> list[Sequence[Segment]]:
        """Passes of proven sizes; token by token where no size is proven."""
        total = sum(s.count for s in segments)
        limit = self._largest_proven(total)
        if total <= limit:
            return [segments]
        parts: list[Sequence[Segment]] = []
        part: list[Segment] = []
        room = limit
        for s in segments:
            start, left = s.start, s.count
            while left:
                take = min(room, left)
                part.append(Segment(s.row, start, take))
                start, left, room = start + take, left - take, room - take
                if room == 0:
                    parts.append(part)
                    part, room = [], limit
        return [*parts, part] if part else parts

    def _largest_proven(self, num_tokens: int) -> int:
        """The most tokens one pass may hold for ``num_tokens`` to keep their bits."""
        if not self.exactness.holds:
            return 1
        size = min(self._padded(num_tokens), MAX_PASS_ROWS)
        while size and not self._is_proven(size):
            size -= self.exactness.row_quantum
        return max(size, 1)

    def _is_proven(self, size: int) -> bool:
        key = (torch.get_num_threads(), size)
        if key not in self._proven:
            quantum = self.exactness.row_quantum
            self._proven[key] = rows_agree(self, size, quantum if size > quantum else 1)
            if not self._proven[key]:
                logger.info("passes of %d rows change bits; smaller ones are used", size)
        return self._proven[key]

    def _extend_tables(self, num_positions: int) -> None:
        """Rotary tables for positions below ``num_positions``, made once, in fixed chunks."""
        have = self._positions.shape[1]
        while have < num_positions:
            positions = torch.arange(have, have + ROPE_CHUNK, device=self.device)[None]
            probe = torch.zeros(1, 1, 1, dtype=self.dtype, device=self.device)
            cos, sin = self._body.rotary_emb(probe, positions)
            if have:
                cos, sin = torch.cat([self._cos, cos], 1), torch.cat([self._sin, sin], 1)
                positions = torch.cat([self._positions, positions], 1)
            # Positions last: another thread takes their number for the tables' length.
            self._cos, self._sin, self._signed = cos, sin, signed_rope(cos, sin)
            self._positions = positions
            have += ROPE_CHUNK


def _places(weights: Sequence[Tensor]) -> list[tuple[torch.dtype, torch.device, torch.Size]]:
    """What a weight may not lose while a twin shares it; its values may change."""
    return [(w.dtype, w.device, w.shape) for w in weights]


def _windows(config: object) -> tuple[int | None, ...]:
    """Each layer's sliding window, None where it sees everything."""
    num_layers: int = config.num_hidden_layers  # type: ignore[attr-defined]
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return (window,) * num_layers
    return tuple(window if t == "sliding_attention" else None for t in types)
