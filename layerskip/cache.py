"""The one KV cache, and the layout of a pass over it.

One invariant: slots below ``lengths[row]`` hold full-depth keys and values in every layer. Slots
at or above it are scratch: drafts write there, verify overwrites, nothing else reads. Accepting
is ``commit``. Rejecting is doing nothing but ``sweep``, which keeps scratch finite.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from layerskip.ops.reference import decode_attention, prefill_attention

SLOT_BLOCK = 512  # torch's CPU attention splits keys here: whole blocks keep a row's bits

EVERY_LAYER = slice(None)


class KVCache:
    """Keys and values of all layers and rows in two tensors.

    Attributes:
        keys, values: ``(layer, row, slot, kv_head, head_dim)``; an exit adapter's block has the
            layer after the model's own.
        lengths: ``(row,)`` int32 on the device: committed slots.
        adapter_lengths: by row, committed slots that hold the block's keys and values. It lags
            behind ``lengths``: only drafts run the block.
        model_layers: the layers that full depth writes.
        attended_block: a pass attends to a multiple of this many slots, masked.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_rows: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        attended_block: int = SLOT_BLOCK,
        num_extra_layers: int = 0,
    ) -> None:
        self.attended_block = attended_block
        num_slots = -(-num_slots // attended_block) * attended_block
        shape = (num_layers + num_extra_layers, num_rows, num_slots, num_kv_heads, head_dim)
        # Zeros, not empty: a masked slot's value is multiplied by 0, which NaN would survive.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.adapter_lengths = [0] * num_rows
        self.model_layers = slice(0, num_layers)
        self.layer_keys = self.keys.unbind(0)
        self.layer_values = self.values.unbind(0)
        self._ramps: dict[tuple[int, int, int | None], Tensor] = {}

    @property
    def num_rows(self) -> int:
        return self.keys.shape[1]

    @property
    def num_slots(self) -> int:
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def commit(self, row: int, num_tokens: int) -> None:
        """Make ``num_tokens`` more slots of ``row`` permanent."""
        self.lengths[row] += num_tokens

    def release(self, row: int) -> None:
        """Empty ``row``, so that another sequence can take it."""
        self.sweep(row, 0, self.num_slots)
        self.lengths[row] = self.adapter_lengths[row] = 0

    def sweep(self, row: int, start: int, end: int, layers: slice = EVERY_LAYER) -> None:
        """Set keys and values in slots ``[start, end)`` to zero.

        Attention reads scratch, too, and only then masks it: a NaN there would spread.
        """
        self.keys[layers, row, start:end] = 0.0
        self.values[layers, row, start:end] = 0.0

    def copied(self, row: int, token_ids: tuple[int, ...], source: object) -> "CachedText":
        """The committed keys and values of ``row``, which hold ``token_ids`` in every layer."""
        held = slice(0, len(token_ids))
        keys, values = self.keys[:, row, held].clone(), self.values[:, row, held].clone()
        return CachedText(token_ids, keys, values, weakref.ref(source))

    def restore(self, row: int, text: "CachedText", num_tokens: int) -> None:
        """Make the first ``num_tokens`` of ``text`` the committed slots of ``row``."""
        self.keys[:, row, :num_tokens] = text.keys[:, :num_tokens]
        self.values[:, row, :num_tokens] = text.values[:, :num_tokens]
        self.lengths[row] = self.adapter_lengths[row] = num_tokens

    def grown(self, *, num_rows: int, num_slots: int) -> "KVCache":
        """A larger cache that holds what this one's rows have committed.

        What has to grow at least doubles: rows that join one after another copy what is committed
        once each, on average. Where memory has no room for that, it grows as far as it was asked.
        """
        asked = max(num_rows, self.num_rows), max(num_slots, self.num_slots)
        roomy = _doubled(self.num_rows, num_rows), _doubled(self.num_slots, num_slots)
        try:
            larger = self._resized(*roomy)
        except torch.OutOfMemoryError:
            larger = self._resized(*asked)
        held = slice(0, max(0, int(self.lengths.max())))
        larger.keys[:, : self.num_rows, held] = self.keys[:, :, held]
        larger.values[:, : self.num_rows, held] = self.values[:, :, held]
        larger.lengths[: self.num_rows] = self.lengths
        larger.adapter_lengths[: self.num_rows] = self.adapter_lengths
        return larger

    def _resized(self, num_rows: int, num_slots: int) -> "KVCache":
        """An empty cache of the same kind."""
        layers, _, _, heads, dim = self.keys.shape
        num_layers = self.model_layers.stop
        return KVCache(
            num_layers=num_layers,
            num_extra_layers=layers - num_layers,
            num_rows=num_rows,
            num_slots=num_slots,
            num_kv_heads=heads,
            head_dim=dim,
            dtype=self.keys.dtype,
            device=self.keys.device,
            attended_block=self.attended_block,
        )

    def causal_rows(self, start: int, tile: int, group: int, window: int | None) -> Tensor:
        """Mask ``(group * tile, slots)`` of ``tile`` positions from ``start``: a view, no work.

        Row ``g * tile + t`` may see slot ``s`` iff ``start + t - window < s <= start + t``. All
        starts read one ramp at different offsets.
        """
        key = (tile, group, window)
        if key not in self._ramps:
            offset = torch.arange(2 * self.num_slots, device=self.keys.device) - self.num_slots
            behind = torch.arange(tile, device=self.keys.device)[:, None] - offset
            visible = behind >= 0 if window is None else (behind >= 0) & (behind < window)
            ramp = torch.zeros(visible.shape, dtype=self.keys.dtype, device=self.keys.device)
            self._ramps[key] = ramp.masked_fill_(~visible, float("-inf")).repeat(group, 1)
        block = self.attended_block
        end = min(self.num_slots, -(-(start + tile) // block) * block)
        first = self.num_slots - start
        return self._ramps[key][:, first : first + end]


def _doubled(have: int, wanted: int) -> int:
    return have if wanted <= have else max(wanted, 2 * have)


@dataclass(frozen=True, eq=False)
class CachedText:
    """Keys and values of a finished row, for another row that begins with the same tokens.

    Attributes:
        token_ids: what the slots hold.
        keys, values: ``(layer, token, kv_head, head_dim)``.
        source: the stack that made them; no other can use them. Weak, so that neither keeping
            nor copying a cache keeps or copies a model.
    """

    token_ids: tuple[int, ...]
    keys: Tensor = field(repr=False)
    values: Tensor = field(repr=False)
    source: weakref.ref[object] = field(repr=False)

    def shared_with(self, prompt: Sequence[int]) -> int:
        """Leading tokens of ``prompt`` that need no prefill; the last one always does."""
        limit = min(len(self.token_ids), len(prompt) - 1)
        return next((i for i in range(limit) if self.token_ids[i] != prompt[i]), limit)


@dataclass(frozen=True)
class Segment:
    """``count`` consecutive positions of one row, from ``start``."""

    row: int
    start: int
    count: int


class PassLayout:
    """Where the tokens of one decode pass write and what they may read.

    The pass holds the tokens of all segments one after another, padded with spare rows to
    ``num_rows``. Spare rows write nothing.

    Attributes:
        num_tokens, num_rows: real tokens; with spare rows.
        positions: ``(1, num_rows)`` int64; spare rows repeat or follow legal positions.
        start: first position where they are consecutive (one row's), else None.
        num_visible: slots that the pass attends to, masked.
        padded: True: all passes that hold a token run it among as many rows, or a multiple.
        tile: positions of a row that attention takes at once, so that a long segment is computed
            as short ones are.
        product_rows: rows that a linear map takes at once, where it is ours.
    """

    padded = True

    def __init__(
        self,
        cache: KVCache,
        segments: Sequence[Segment],
        *,
        num_rows: int,
        group: int,
        tile: int,
        product_rows: int,
        windows: Sequence[int | None],
        all_positions: Tensor,
    ) -> None:
        self.cache, self.num_rows = cache, num_rows
        self.tile, self.product_rows = tile, product_rows
        self.num_tokens = sum(s.count for s in segments)
        self.windows = windows
        self.single = segments[0] if len(segments) == 1 else None
        self.start = self.single.start if self.single is not None else None
        if self.start is not None:
            start = self.start
            self.positions = all_positions[:, start : start + num_rows]
            starts = [start]
        else:
            starts = self._lay_out(segments, all_positions)
        longest = self._longest(segments)
        self.masks = {
            w: [self._stacked_mask(starts, done, group, w) for done in range(0, longest, tile)]
            for w in set(windows)
        }
        self.num_visible = next(iter(self.masks.values()))[-1].shape[-1]

    def _lay_out(self, segments: Sequence[Segment], all_positions: Tensor) -> list[int]:
        """Several rows: index tables between the flat tokens and ``(row, longest)`` queries; each
        row's first position."""
        num_rows, longest = self.num_rows, self._longest(segments)
        batch = max(s.row for s in segments) + 1
        starts = [0] * batch
        slots = [0] * num_rows
        gather, scatter = [0] * (batch * longest), [0] * num_rows
        write_rows, token = [], 0
        for s in segments:
            starts[s.row] = s.start
            for i in range(s.count):
                slots[token] = s.start + i
                gather[s.row * longest + i] = token
                scatter[token] = s.row * longest + i
                write_rows.append(s.row)
                token += 1
        device = self.cache.keys.device
        self.batch = batch
        at = torch.tensor(slots, device=device)
        self.positions = all_positions[:, at]
        self.gather = torch.tensor(gather, device=device)
        self.scatter = torch.tensor(scatter, device=device)
        self.write = (
            torch.tensor(write_rows, device=device),
            at[: self.num_tokens],
        )
        return starts

    def _longest(self, segments: Sequence[Segment]) -> int:
        """The longest segment in whole tiles."""
        return -(-max(s.count for s in segments) // self.tile) * self.tile

    def _stacked_mask(
        self, starts: Sequence[int], done: int, group: int, window: int | None
    ) -> Tensor:
        """Masks of the tile after ``done`` positions of every row, as wide as the farthest row's:
        ``(batch, 1, group * tile, slots)``."""
        cache, tile = self.cache, self.tile
        rows = [
            cache.causal_rows(min(start + done, cache.num_slots), tile, group, window)
            for start in starts
        ]
        if len(rows) == 1:
            return rows[0][None, None]
        widest = max(r.shape[1] for r in rows)
        full = rows[0].new_full((len(rows), 1, group * tile, widest), float("-inf"))
        for i, r in enumerate(rows):
            full[i, 0, :, : r.shape[1]] = r
        return full

    def append(self, key: Tensor, value: Tensor, layer: int) -> None:
        """Write new keys and values, ``(num_rows, kv_head, head_dim)``; spare rows are left."""
        n, cache = self.num_tokens, self.cache
        if self.single is not None:
            start = self.single.start
            at: tuple[int | Tensor, slice | Tensor] = self.single.row, slice(start, start + n)
        else:
            at = self.write
        cache.layer_keys[layer][at] = key[:n]
        cache.layer_values[layer][at] = value[:n]

    def seen(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values that a pass of one row attends to: ``(slots, kv_head, head_dim)``."""
        assert self.single is not None, "these layers take one row a pass"
        keys, values = self.cache.layer_keys[layer], self.cache.layer_values[layer]
        row, visible = self.single.row, self.num_visible
        return keys[row, :visible], values[row, :visible]

    def attend(
        self,
        query: Tensor,
        layer: int,
        softmax_scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """``(num_rows, head, head_dim)`` -> the same, over the cache."""
        keys, values = self.cache.layer_keys[layer], self.cache.layer_values[layer]
        heads, dim = query.shape[1:]
        if self.single is not None:
            rows = slice(self.single.row, self.single.row + 1)
            queries = query[None, : len(self.masks[self.windows[layer]]) * self.tile]
        else:
            rows = slice(0, self.batch)
            queries = query.index_select(0, self.gather).view(self.batch, -1, heads, dim)
        tiles = []
        for q, mask in zip(
            queries.split(self.tile, dim=1), self.masks[self.windows[layer]], strict=True
        ):
            visible = mask.shape[-1]
            k, v = keys[rows, :visible], values[rows, :visible]
            tiles.append(decode_attention(q, k, v, mask, softmax_scale, softcap, sinks))
        out = tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=1)
        if self.single is not None:  # spare rows beyond the last tile look at nothing
            return F.pad(out[0], (0, 0, 0, 0, 0, len(query) - out.shape[1]))
        return out.reshape(-1, heads, dim).index_select(0, self.scatter)


class PrefillLayout:
    """Like ``PassLayout``, for one row's chunk of prompt: no spare rows, exact widths."""

    padded = False

    def __init__(
        self,
        cache: KVCache,
        segment: Segment,
        *,
        windows: Sequence[int | None],
        all_positions: Tensor,
    ) -> None:
        self.cache, self.windows = cache, windows
        self.row = segment.row
        self.start: int = segment.start
        self.num_tokens = self.num_rows = self.product_rows = segment.count
        self.end = self.num_visible = segment.start + segment.count
        self.positions = all_positions[:, self.start : self.end]
        self._masks: dict[int | None, Tensor] = {}

    def _mask(self, window: int | None) -> Tensor:
        """``(1, 1, num_tokens, end)``, made when a layer first asks: not every attention does."""
        if window not in self._masks:
            keys = self.cache.keys
            behind = self.positions[0][:, None] - torch.arange(self.end, device=keys.device)
            visible = behind >= 0 if window is None else (behind >= 0) & (behind < window)
            mask = torch.zeros(visible.shape, dtype=keys.dtype, device=keys.device)
            self._masks[window] = mask.masked_fill_(~visible, float("-inf"))[None, None]
        return self._masks[window]

    def append(self, key: Tensor, value: Tensor, layer: int) -> None:
        """Write new keys and values, ``(num_tokens, kv_head, head_dim)``."""
        at = self.row, slice(self.start, self.end)
        self.cache.layer_keys[layer][at] = key
        self.cache.layer_values[layer][at] = value

    def seen(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values up to the chunk's end: ``(slots, kv_head, head_dim)``."""
        at = self.row, slice(0, self.end)
        return self.cache.layer_keys[layer][at], self.cache.layer_values[layer][at]

    def attend(
        self,
        query: Tensor,
        layer: int,
        softmax_scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """``(num_tokens, head, head_dim)`` -> the same, over the cache."""
        k, v = self.seen(layer)
        mask, extra = self._mask(self.windows[layer]), (softmax_scale, softcap, sinks)
        return prefill_attention(query[None], k[None], v[None], mask, *extra)[0]


Layout = PassLayout | PrefillLayout
