"""Where the tokens of a pass write, and what they may read: of a decode pass, and of a prompt."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from layerskip.cache import KVCache, Segment
from layerskip.ops.reference import decode_attention, prefill_attention


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
