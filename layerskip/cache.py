"""The one KV cache.

One invariant: slots below ``lengths[row]`` hold full-depth keys and values in every layer. Slots
at or above it are scratch: drafts write there, verify overwrites, and what else is read there is
masked. Accepting is ``commit``. Rejecting is doing nothing but ``sweep``, which keeps scratch
finite.
"""

import math
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

SLOT_BLOCK = 512  # torch's CPU attention splits keys here: whole blocks keep a row's bits
MOST_RAMPS = 16  # masks of passes that come again: they differ by tile and window

EVERY_LAYER = slice(None)
# Memory that a forked process has a copy of; Windows forks none, and has no flags.
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}


class KVCache:
    """Keys and values of all layers and rows, the halves of one tensor.

    Attributes:
        keys, values: ``(layer, row, slot, kv_head, head_dim)``; an exit adapter's block has the
            layer after the model's own.
        lengths: ``(row,)`` int32 on the device: committed slots.
        adapter_lengths: by row, committed slots that hold the block's keys and values. It lags
            behind ``lengths``: only drafts run the block.
        model_layers: the layers that full depth writes.
        attended_block: a pass attends to a multiple of this many slots, masked.
    """

    @torch.inference_mode(False)  # inside it, its tensors could not be written outside it
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
        self._both = _zeros((2, *shape), dtype, device)
        self.keys, self.values = self._both.unbind(0)
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

    def written(self) -> "KVCache":
        """The same with memory for all of it, to time passes over: what was never written is read
        from one page of zeros, far faster than what a text has filled."""
        self._both.zero_()
        return self

    def commit(self, row: int, num_tokens: int) -> None:
        """Make ``num_tokens`` more slots of ``row`` permanent."""
        self.lengths[row] += num_tokens

    def release(self, row: int, num_written: int | None = None) -> None:
        """Empty ``row``, so that another sequence can take it.

        Args:
            num_written: slots behind these were never written; None: all may have been.
        """
        self.sweep(row, 0, self.num_slots if num_written is None else num_written)
        self.lengths[row] = self.adapter_lengths[row] = 0

    def sweep(self, row: int, start: int, end: int, layers: slice = EVERY_LAYER) -> None:
        """Set keys and values in slots ``[start, end)`` to zero.

        Attention reads scratch, too, and only then masks it: a NaN there would spread.
        """
        self._both[:, layers, row, start:end] = 0.0

    def copied(
        self, row: int, token_ids: tuple[int, ...], source: object, weights: object = None
    ) -> "CachedText":
        """The committed keys and values of ``row``, which hold ``token_ids`` in every layer;
        ``source`` and ``weights`` as for ``Source``."""
        held = slice(0, len(token_ids))
        keys, values = self.keys[:, row, held].clone(), self.values[:, row, held].clone()
        return CachedText(token_ids, keys, values, Source(source, weights))

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
        except RuntimeError:  # out of memory; a CPU has no kind of its own for it
            larger = None
        if larger is None:  # out of there: the error holds what the first try has got
            larger = self._resized(*asked)
        # Each row's own: zeros behind a short one would be written, and take memory.
        for row, length in enumerate(self.lengths.tolist()):
            held = slice(0, max(0, length))
            larger.keys[:, row, held] = self.keys[:, row, held]
            larger.values[:, row, held] = self.values[:, row, held]
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

    def attended(self, end: int) -> int:
        """Slots that a position before ``end`` attends to: whole blocks."""
        return min(self.num_slots, -(-end // self.attended_block) * self.attended_block)

    def causal_rows(self, start: int, tile: int, group: int, window: int | None) -> Tensor:
        """Mask ``(group * tile, slots)`` of ``tile`` positions from ``start``: a view, no work.

        Row ``g * tile + t`` may see slot ``s`` iff ``start + t - window < s <= start + t``. All
        starts read one ramp at different offsets.
        """
        key = (tile, group, window)
        if key not in self._ramps:
            offset = torch.arange(2 * self.num_slots, device=self.keys.device) - self.num_slots
            behind = torch.arange(tile, device=self.keys.device)[:, None] - offset
            ramp = causal_mask(behind, window, self.keys.dtype)
            if len(self._ramps) == MOST_RAMPS:  # without exactness a tile has any length
                del self._ramps[next(iter(self._ramps))]
            self._ramps[key] = ramp.repeat(group, 1)
        end, first = self.attended(start + tile), self.num_slots - start
        return self._ramps[key][:, first : first + end]


def causal_mask(behind: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """What is added to attention's scores: 0 where a position may see a slot, else -inf.

    Args:
        behind: by how many slots each lies behind the position; a negative one is of the future.
        window: a position sees so many slots, itself the first; None: all up to itself.
        dtype: of the mask.
    """
    visible = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    mask = torch.zeros(behind.shape, dtype=dtype, device=behind.device)
    return mask.masked_fill_(~visible, float("-inf"))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; a CPU's system gives each page of them when it is first written. Most never are: a
    text may be far longer than it becomes."""
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not nbytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:  # not numpy's zeros: it asks for pages of 2 MB, whose writing takes as long (bench/LOG.md)
        pages = mmap.mmap(-1, nbytes, **PRIVATE)
    except (OSError, OverflowError) as error:
        raise torch.OutOfMemoryError(f"no memory for a cache of {nbytes} bytes") from error
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def _doubled(have: int, wanted: int) -> int:
    return have if wanted <= have else max(wanted, 2 * have)


class Source:
    """Called, it gives the stack that made a cache, or None if that is gone.

    Held weakly, so that neither keeping nor copying a cache keeps or copies a model. A copy has the
    same source; what comes out of a pickle has none.

    Args:
        stack: None is one that is gone.
        weights: what they were when the row joined: ``SharedWeights.stamp``.
    """

    def __init__(self, stack: object | None = None, weights: object = None) -> None:
        self.weights = weights
        self._stack = None if stack is None else weakref.ref(stack)

    def __call__(self) -> object | None:
        return None if self._stack is None else self._stack()

    def __deepcopy__(self, memo: object) -> "Source":
        return self

    def __reduce__(self) -> "tuple[type[Source], tuple[()]]":
        return Source, ()


@dataclass(frozen=True, eq=False)
class CachedText:
    """Keys and values of a row that is over, for another row that begins with the same tokens.

    It can be pickled, to look at: out of a pickle it is of no model, and decoding refuses it.

    Attributes:
        token_ids: what the slots hold.
        keys, values: ``(layer, token, kv_head, head_dim)``.
        source: the stack that made them, and its weights then; no other can use them, nor the same
            with weights that torch has seen change since.
    """

    token_ids: tuple[int, ...]
    keys: Tensor = field(repr=False)
    values: Tensor = field(repr=False)
    source: Source = field(repr=False)

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
