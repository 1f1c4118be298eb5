"""How many tokens a decode pass may hold for every row to keep its bits: proven when first met."""

import logging
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from layerskip.ambient import Decoding
from layerskip.cache import Segment
from layerskip.exactness import (
    MAX_PASS_ROWS,
    ROW_QUANTA,
    TILE,
    attention_agrees,
    rows_agree,
    small_agree,
)

if TYPE_CHECKING:
    from layerskip.model import DecoderStack

logger = logging.getLogger(__name__)


class PassSizes:
    """Sizes of passes that were proven for a stack, by the number of this thread's cores.

    Args:
        stack: its ``exactness`` says what is wanted, and holds at the smallest size.

    Attributes:
        num_proofs: so far; each takes as long as several passes.
    """

    def __init__(self, stack: "DecoderStack") -> None:
        # Weak, so that a stack that nobody holds is freed at once.
        self._stack: DecoderStack = weakref.proxy(stack)
        self._proven: dict[tuple[int, int], bool] = {}
        self._product_rows: dict[int, int] = {}
        self._small: dict[int, bool] = {}
        self._proving: set[int] = set()  # threads whose passes show whether they may be small
        self.num_proofs = 0

    @property
    def product_rows(self) -> int:
        """Most rows of a pass that a linear map takes at once."""
        most = self._stack.exactness.product_rows
        return self._product_rows.get(torch.get_num_threads(), most)

    def note_probe(self) -> None:
        """What the probe found when the model was wrapped is not proven again in the first
        round."""
        exactness = self._stack.exactness
        self._proven[torch.get_num_threads(), exactness.row_quantum] = exactness.holds

    def forget(self) -> None:
        """What was proven: products are others by now."""
        self._proven, self._product_rows, self._small = {}, {}, {}

    @Decoding()
    def prove_ahead(self, seconds: float) -> None:
        """Prove the sizes that passes may have, the smallest first, until ``seconds`` are over. The
        others are proven when they are met, in a round that somebody waits for."""
        began, quantum = time.perf_counter(), self._quantum
        for size in range(quantum, MAX_PASS_ROWS + 1, quantum):
            if time.perf_counter() - began > seconds:
                return
            self.largest(size)

    def padded(self, num_tokens: int) -> int:
        """Rows of a pass of ``num_tokens``."""
        fewest = self._stack.exactness.fewest
        if fewest and 0 < num_tokens <= TILE and self.are_small:
            return max(num_tokens, fewest)
        quantum = self._quantum
        return -(-num_tokens // quantum) * quantum

    @property
    def _quantum(self) -> int:
        """What passes are padded to a multiple of, with this thread's cores."""
        exactness = self._stack.exactness
        return exactness.row_quantum if not exactness.fewest or self.are_small else TILE

    @property
    def are_small(self) -> bool:
        """Whether passes of a few rows hold no spare ones beyond the fewest, with this thread's
        cores: proven when it is first asked."""
        if not self._stack.fewest_rows:  # any more: the copies may be gone
            return False
        threads = torch.get_num_threads()
        holds = self._small.get(threads)
        if holds is None:
            if threading.get_ident() in self._proving:
                return True
            holds = self._small[threads] = self._prove_small(threads)
        return holds

    def _prove_small(self, threads: int) -> bool:
        stack, thread = self._stack, threading.get_ident()
        self.num_proofs += 1
        self._proving.add(thread)
        try:
            holds = attention_agrees(stack) and small_agree(stack)
        finally:
            self._proving.discard(thread)
        if holds:
            self._proven |= {(threads, size): True for size in range(1, TILE + 1)}
        return holds

    def split(self, segments: Sequence[Segment]) -> list[list[Segment]]:
        """Passes of proven sizes; token by token where no size is proven, and row by row where
        the layers' own attention knows no rows."""
        total, one_row = sum(s.count for s in segments), self._stack.one_row
        if (len(segments) == 1 or not one_row) and total <= self.largest(total):
            return [list(segments)]
        parts: list[list[Segment]] = []
        for together in [[s] for s in segments] if one_row else [list(segments)]:
            for size in self.pieces(sum(s.count for s in together)):
                part: list[Segment] = []
                while room := size - sum(s.count for s in part):
                    s = together.pop(0)
                    take = min(room, s.count)
                    part.append(Segment(s.row, s.start, take))
                    if take < s.count:
                        together.insert(0, Segment(s.row, s.start + take, s.count - take))
                parts.append(part)
        return parts

    def pieces(self, num_tokens: int) -> list[int]:
        """How many tokens go through each of several passes, all of proven sizes."""
        while True:
            at_once, found, left = self.product_rows, list[int](), num_tokens
            while left:
                found.append(min(left, self.largest(left)))
                left -= found[-1]
            if self.product_rows == at_once:  # else larger ones are to be proven again
                return found

    def largest(self, num_tokens: int) -> int:
        """The most tokens one pass may hold for ``num_tokens`` to keep their bits."""
        exactness = self._stack.exactness
        if not exactness.wanted or exactness.any_size:
            return num_tokens
        if not exactness.holds:
            return 1
        size = min(self.padded(num_tokens), MAX_PASS_ROWS)
        if not self._is_proven(self._quantum):  # what larger passes are held against
            return 1
        while size and not self._is_proven(size):
            size -= self._quantum
        return max(size, 1)

    def _is_proven(self, size: int) -> bool:
        key = (torch.get_num_threads(), size)
        holds = self._proven.get(key)  # another thread may drop it meanwhile
        if holds is None:
            self.num_proofs += 1
            holds = self._prove(size)
            self._proven[key] = holds
            if not holds:
                self._tell(size)
        return holds

    def _tell(self, size: int) -> None:
        if size > self._quantum:
            logger.info("passes of %d rows change bits; smaller ones are used", size)
            return
        logger.warning(
            "with %d threads rows influence each other in every pass: tokens run one by one, which "
            "is slow; set the number of threads before the model is loaded, or pass exact=False",
            torch.get_num_threads(),
        )

    def _reference(self, size: int) -> int:
        """Rows of the passes that a larger one is held against: the more, the fewer passes.

        What remains of the whole and of its halves must be passes of proven sizes, too.
        """
        threads = torch.get_num_threads()
        met = self._proven.copy().items()  # other threads may meet more of them meanwhile
        proven = {s for (t, s), holds in met if holds and t == threads}
        lengths = (size, size // 2, size - size // 2)
        return max(
            rows
            for rows in proven
            if rows < size and all(self.padded(n % rows) in {0, *proven} for n in lengths)
        )

    def _prove(self, size: int) -> bool:
        """Whether a pass of ``size`` rows keeps bits, its products divided if that helps."""
        stack, threads, now = self._stack, torch.get_num_threads(), self.product_rows
        quantum = self._quantum
        if size == quantum and not attention_agrees(stack):
            return False
        fewer = [q for q in ROW_QUANTA if quantum <= q < min(now, size)][::-1]
        reference = self._reference(size) if size > quantum else 1
        for rows in (now, *(fewer if stack.divides_products else ())):
            if rows_agree(stack, size, reference, rows):
                if rows != now:
                    # Larger passes were proven with other products: they are proven again.
                    met = self._proven.copy().items()
                    self._proven = {k: v for k, v in met if k[0] != threads or k[1] <= rows}
                    self._product_rows[threads] = rows
                return True
        return False
