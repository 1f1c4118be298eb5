"""Where the tokens of a pass write, and what they may read: of a decode pass, and of a prompt."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, zip_longest

import torch
from torch import Tensor
from torch.nn import functional as F

from layerskip.cache import KVCache, Segment, causal_mask
from layerskip.ops.reference import decode_attention, prefill_attention

# What a call of attention costs beside its work, in slots times positions: a processor takes rows
# one after another (bench/ragged.py), a GPU takes them side by side.
CALL, NEVER = 1600, 10**15


@dataclass(frozen=True)
class AttentionCall:
    """What attention takes at once: neighbouring rows, equally many positions of each.

    Attributes:
        first: the first of these rows of the cache.
        starts: each row's first position; 0 where a row between them has no tokens.
        tile: positions of each row.
        slots: that the row which sees farthest attends to.
    """

    first: int
    starts: tuple[int, ...]
    tile: int
    slots: int

    @property
    def end(self) -> int:
        """The row behind the last one."""
        return self.first + len(self.starts)

    def joined(self, other: "AttentionCall") -> "AttentionCall":
        """One call for both; the other's rows are behind these."""
        between = (0,) * (other.first - self.end)
        return AttentionCall(
            self.first,
            (*self.starts, *between, *other.starts),
            max(self.tile, other.tile),
            max(self.slots, other.slots),
        )


def attention_calls(rows: Sequence[AttentionCall], price: int) -> list[AttentionCall]:
    """The rows in as many calls as cost least together: what a row computes in vain, because
    another one of its call has more positions or sees farther, against a call of its own.

    Args:
        rows: a call for each, ascending.
        price: of a call beside its work.
    """
    runs = list(rows[:1])
    for row in rows[1:]:
        last = runs[-1]
        alike = (row.first, row.tile, row.slots) == (last.end, last.tile, last.slots)
        runs[-1:] = [last.joined(row)] if alike else [last, row]
    # For the first 0, 1, 2, ... runs: what they cost at least, and where their last call begins.
    best = [(0, 0)]
    for end, last in enumerate(runs):
        tile, slots, ways = 0, 0, []
        for begin in range(end, -1, -1):
            tile, slots = max(tile, runs[begin].tile), max(slots, runs[begin].slots)
            # Each slot's key and value are read once, and seen from each position.
            work = (last.end - runs[begin].first) * (tile + 1) * slots
            ways.append((best[begin][0] + work + price, begin))
        best.append(min(ways))
    found, end = [], len(runs)
    while end:
        begin = best[end][1]
        found.append(reduce(AttentionCall.joined, runs[begin:end]))
        end = begin
    return found[::-1]


def _place(
    call: AttentionCall,
    done: int,
    spans: Mapping[int, tuple[int, int]],
    gather: list[int],
    scatter: list[int],
) -> None:
    """Add the token of each place of a call to ``gather``, 0 where there is none, and the place of
    each token to ``scatter``.

    Args:
        done: tokens of each row that earlier calls have.
        spans: each row's tokens in the pass.
    """
    for row in range(call.first, call.end):
        first, end = spans.get(row, (0, 0))
        tokens, place = range(first + done, end)[: call.tile], len(gather)
        gather += [*tokens, *[0] * (call.tile - len(tokens))]
        for i, token in enumerate(tokens):
            scatter[token] = place + i


class PassLayout:
    """Where the tokens of one decode pass write and what they may read.

    The pass holds the tokens of all segments one after another, padded with spare rows to
    ``num_rows``. Spare rows write nothing.

    Attributes:
        num_tokens, num_rows: real tokens; with spare rows.
        positions: ``(1, num_rows)`` int64; spare rows repeat or follow legal positions.
        start: first position where they are consecutive (one row's), else None.
        num_visible: slots that the pass attends to, masked.
        padded: True: where bits are wanted, all passes that hold a token run it among as many rows,
            or a multiple, or among numbers that were proven to give it the same bits.
        calls: of attention; a long segment takes several.
        product_rows: rows that a linear map takes at once, where it is ours.

    Args:
        tile: positions of a row that attention takes at once where it has so many left.
    """

    padded = True

    def __init__(
        self,
        cache: KVCache,
        segments: Sequence[Segment],
        *,
        num_rows: int,
        group: int,
        tile: Callable[[int], int],
        product_rows: int,
        windows: Sequence[int | None],
        all_positions: Tensor,
    ) -> None:
        self.cache, self.num_rows, self.product_rows = cache, num_rows, product_rows
        self.num_tokens = sum(s.count for s in segments)
        self.windows = windows
        self.single = segments[0] if len(segments) == 1 else None
        self.start = self.single.start if self.single is not None else None
        self.calls: list[AttentionCall] = []
        if self.single is not None:
            start = self.single.start
            self.positions = all_positions[:, start : start + num_rows]
            self.calls = self._alone(self.single, tile)
            # Its tokens attend where they are, and a pass without spare rows may be too short.
            self.missing = max(0, sum(call.tile for call in self.calls) - num_rows)
        else:
            self._lay_out(segments, tile, all_positions)
        self.masks = {w: [self._mask(call, group, w) for call in self.calls] for w in set(windows)}
        self.num_visible = max(call.slots for call in self.calls)

    def _alone(self, segment: Segment, tile: Callable[[int], int]) -> list[AttentionCall]:
        """One after another, each at as many positions as are taken at once."""
        found, start, end = [], segment.start, segment.start + segment.count
        while start < end:
            size = tile(end - start)
            slots = self.cache.attended(start + size)
            found.append(AttentionCall(segment.row, (start,), size, slots))
            start += size
        return found

    def _lay_out(
        self, segments: Sequence[Segment], tile: Callable[[int], int], all_positions: Tensor
    ) -> None:
        """Several rows: their calls, and index tables between the flat tokens and their places."""
        device = self.cache.keys.device
        price = CALL if device.type == "cpu" else NEVER
        ends = accumulate(s.count for s in segments)
        spans = {s.row: (end - s.count, end) for s, end in zip(segments, ends, strict=True)}
        alone = [self._alone(s, tile) for s in sorted(segments, key=lambda s: s.row)]
        gather: list[int] = []
        scatter = [0] * self.num_rows
        done = 0
        # Each row's first tile, then the second ones of those that have any, ...
        for wave in zip_longest(*alone):
            rows = [row for row in wave if row is not None]
            for call in attention_calls(rows, price):
                self.calls.append(call)
                _place(call, done, spans, gather, scatter)
            done += max(row.tile for row in rows)
        slots = [s.start + i for s in segments for i in range(s.count)]
        rows_written = [s.row for s in segments for _ in range(s.count)]
        at = torch.tensor([*slots, *[0] * (self.num_rows - len(slots))], device=device)
        self.positions = all_positions[:, at]
        self.gather = torch.tensor(gather, device=device)
        self.scatter = torch.tensor(scatter, device=device)
        self.write = torch.tensor(rows_written, device=device), at[: self.num_tokens]

    def _mask(self, call: AttentionCall, group: int, window: int | None) -> Tensor:
        """``(rows, 1, group * tile, slots)``."""
        cache = self.cache
        rows = [
            cache.causal_rows(min(start, cache.num_slots), call.tile, group, window)
            for start in call.starts
        ]
        if len(rows) == 1:
            return rows[0][None, None]
        full = rows[0].new_full((len(rows), 1, group * call.tile, call.slots), float("-inf"))
        for i, r in enumerate(rows):
            # A row with fewer tokens than the call's tile may have places beyond the last slot.
            seen = r[:, : call.slots]
            full[i, 0, :, : seen.shape[1]] = seen
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
        rows, heads, dim = query.shape
        if self.single is None:
            queries = query.index_select(0, self.gather)
        elif self.missing:
            queries = F.pad(query, (0, 0, 0, 0, 0, self.missing))
        else:
            queries = query
        done, outputs = 0, []
        for call, mask in zip(self.calls, self.masks[self.windows[layer]], strict=True):
            count = len(call.starts)
            end = done + count * call.tile
            q = queries[done:end].unflatten(0, (count, call.tile))
            at = slice(call.first, call.end), slice(0, call.slots)
            out = decode_attention(q, keys[at], values[at], mask, softmax_scale, softcap, sinks)
            outputs.append(out.reshape(-1, heads, dim))
            done = end
        mixed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if self.single is not None:  # spare rows beyond the last tile look at nothing
            return F.pad(mixed, (0, 0, 0, 0, 0, rows - done))
        return mixed.index_select(0, self.scatter)


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
            self._masks[window] = causal_mask(behind, window, keys.dtype)[None, None]
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
