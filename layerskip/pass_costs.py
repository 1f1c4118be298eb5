"""What passes take, for many batches at once: a cost table as arrays, and what comes on top of it.

The table holds bare passes. A round also has the engine's own work, and sampling that depends on
the request's settings: both are taken from recorded rounds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from layerskip.cost import CostTable

PREFILL_CHUNK = 512  # a CPU's; a GPU's engine takes 2048: its long prompts are priced too high
CONTEXT_BUCKETS = 512

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Overhead:
    """What rounds take beside their bare passes.

    Attributes:
        verify_ratio, draft_ratio: seconds of a round's phase over those of its passes: the
            engine's own work inside, and how fast the machine was.
        row: seconds outside of both phases, for each row of a round.
        sampling, judging: seconds of a sequence's first token in a pass, and of each further one in
            a verify pass, in the place of the table's; None: the table's.
    """

    verify_ratio: float = 1.0
    draft_ratio: float = 1.0
    row: float = 0.0
    sampling: float | None = None
    judging: float | None = None

    def applied(self, table: CostTable) -> CostTable:
        """The table, with this sampling, of drafted tokens as well."""
        if self.sampling is None:
            return table
        return replace(table, sampling=self.sampling, judging=self.judging, draft_sampling=None)


class PassCosts:
    """T(rows, context) over arrays; all in seconds.

    Args:
        table: of bare passes.
        rows: most rows of a batch.
        most_drafted: tokens of a row in a round.
        longest: context, in slots.
        overhead: of rounds.
        passes_per_token: draft passes of a drafted token; below 1 where look-ups save some.

    Attributes:
        draft_start: seconds that a round's first draft passes take beyond ``draft``, together.
    """

    def __init__(
        self,
        table: CostTable,
        *,
        rows: int,
        most_drafted: int,
        longest: int,
        overhead: Overhead | None = None,
        passes_per_token: float = 1.0,
    ) -> None:
        self.overhead = overhead or Overhead()
        self.passes_per_token = passes_per_token
        self.row_quantum = table.row_quantum
        table = self.overhead.applied(table)
        self._step = -(-(longest + 1) // CONTEXT_BUCKETS)
        count = longest // self._step + 1
        contexts = [(i + 0.5) * self._step - 0.5 for i in range(count)]
        self._verify = _Passes(
            table.verify_pass,
            contexts,
            most_tokens=rows * (most_drafted + 1) + 2 * table.row_quantum,
            longest=most_drafted + 1 + 2 * table.row_quantum,
            attending=(table.attending, partial(table.attending, padded=True)),
            another=table.sampling - table.further,
            ratio=self.overhead.verify_ratio,
        )
        self.draft_start = self.overhead.draft_ratio * table.draft_start
        draft = _Passes(
            partial(table.draft_pass, late=True),
            contexts,
            most_tokens=rows,
            longest=1,
            attending=(
                partial(table.attending, draft=True),
                partial(table.attending, draft=True, padded=True),
            ),
            another=table.drawing,
            ratio=self.overhead.draft_ratio,
        )
        self._buckets = np.arange(count)
        sizes, one = np.arange(rows + 1)[:, None], np.array(1)
        self._draft = draft.seconds(sizes, sizes, self._buckets).ravel()
        self._plain = self._verify.seconds(sizes, sizes, self._buckets).ravel()
        up_to = np.arange(1, most_drafted + 2)
        self._alone = np.diff(self._verify.seconds(up_to, one, self._buckets[:, None]), axis=1)

    def verify(self, tokens: Ints, rows: Ints, context: Ints) -> Floats:
        """One full-depth pass over ``tokens`` of ``rows`` sequences.

        Args:
            context: slots that a sequence holds, on the average.
        """
        return self._verify.seconds(tokens, rows, context // self._step)

    def plain(self, rows: Ints, context: Ints) -> Floats:
        """One full-depth pass over a token of each of ``rows`` sequences."""
        return self._plain.take(rows * len(self._buckets) + context // self._step)

    def alone(self, context: Ints) -> Floats:
        """What a pass of one sequence grows by for its first, second, ... drafted token."""
        return self._alone[context // self._step]

    def draft(self, rows: Ints, context: Ints) -> Floats:
        """One draft pass over a token of each of ``rows`` sequences, behind others."""
        return self._draft.take(rows * len(self._buckets) + context // self._step)

    def drafts(self, drafted: Ints, context: Ints) -> Floats:
        """All draft passes of a round.

        Args:
            drafted: tokens of each row, ``(batches, rows)``.
            context: of each batch, ``(batches,)``.
        """
        seconds = np.zeros(len(drafted))
        begun = np.where(drafted.any(1), self.draft_start, 0.0)
        for depth in range(1, int(drafted.max(initial=0)) + 1):
            seconds += self.draft((drafted >= depth).sum(1), context)
        return begun + self.passes_per_token * seconds

    def round(self, drafted: Ints, decoding: NDArray[np.bool_], context: Ints) -> Floats:
        """Draft, verify and what comes on top, for each batch; 0 where no row decodes.

        Args:
            drafted: tokens of each row, ``(batches, rows)``; 0 where a row does not decode.
            decoding: rows that take part.
            context: slots that each batch's rows hold, on the average.
        """
        rows = decoding.sum(1)
        tokens = drafted.sum(1) + rows
        seconds = self.verify(tokens, rows, context) + self.overhead.row * rows
        if drafted.any():
            seconds += self.drafts(drafted, context)
        return np.where(rows > 0, seconds, 0.0)


class _Passes:
    """One kind of pass, as ``CostTable`` has it: products over all tokens, attention of each
    sequence's tokens over its own context.

    Args:
        single: seconds of a pass by tokens of one sequence, and its context.
        contexts: that are told apart.
        most_tokens: of a pass.
        longest: most tokens of a sequence.
        attending: seconds of a sequence's tokens beside what all sequences share; and of those of a
            pass that has no other sequence's.
        another: of sampling for each further sequence.
        ratio: what all is multiplied by.
    """

    def __init__(
        self,
        single: Callable[[int, float], float],
        contexts: Sequence[float],
        *,
        most_tokens: int,
        longest: int,
        attending: tuple[Callable[[int], float], Callable[[int], float]],
        another: float,
        ratio: float,
    ) -> None:
        starts = [single(n, 0) if n else 0.0 for n in range(max(most_tokens, longest) + 1)]
        products = ratio * np.array(starts[: most_tokens + 1])
        lines = [
            [single(n, c) - starts[n] if n else 0.0 for c in contexts] for n in range(longest + 1)
        ]
        far = ratio * np.array(lines)
        near, alone = (
            ratio * np.array([0.0, *(of(n) for n in range(1, most + 1))])
            for of, most in zip(attending, (longest, most_tokens), strict=True)
        )
        shared = np.maximum(0.0, products - alone)
        # As CostTable has it: noise must not make further sequences cheaper than none.
        several = near[:, None] + np.maximum(0.0, far) + ratio * another
        own = np.stack([far + (products - shared)[: longest + 1, None], several])
        more = np.diff(own, axis=1, append=own[:, -1:])
        self._shared = np.concatenate([shared, shared - ratio * another])
        self._own, self._more, self._buckets = own.ravel(), more.ravel(), len(contexts)

    def seconds(self, tokens: Ints, rows: Ints, bucket: Ints) -> Floats:
        # What is of one sequence, and behind it of several. Simulations spend their time here.
        behind = rows > 1
        each = ((tokens + 0.5) / np.maximum(1, rows)).astype(np.int64)  # quicker than //
        place = each * self._buckets + (bucket + behind * (len(self._own) // 2))
        own = rows * self._own.take(place) + (tokens - each * rows) * self._more.take(place)
        return self._shared.take(tokens + behind * (len(self._shared) // 2)) + own


def prefill_seconds(table: CostTable, num_tokens: int) -> float:
    """What a prompt takes by the table alone: its chunks as verify passes.

    Too much for a small model: the table's passes run the head for every token, a prefill for one;
    and beyond its last number of rows the table is a straight line.
    """
    table, seconds = replace(table, pass_rows=0), 0.0  # a prefill's chunk is one pass
    for start in range(0, num_tokens, PREFILL_CHUNK):
        count = min(PREFILL_CHUNK, num_tokens - start)
        seconds += table.verify_pass(count, start) - (count - 1) * table.further
    return seconds
