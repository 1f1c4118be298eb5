"""Samples packed into rows of one length, and the batches of each step.

Documents of a row do not see each other: positions start again at 0 with each, which transformers
takes as the sign of packed rows when it is given no mask and no cache.
"""

import bisect
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from settings import RunSettings
from tokens import UNTRAINED, Sample
from torch import Tensor, nn

PROBED = 6  # tokens of each document of ``check_apart``

Piece = tuple[tuple[int, ...], tuple[int, ...]]  # ids and labels


@dataclass(frozen=True, eq=False)
class Packed:
    """Rows of ``seq_len`` tokens, all int64 ``(rows, seq_len)`` on the CPU.

    Attributes:
        ids: tokens; the rest of a row is filled with a padding token.
        labels: the token that follows in the same document, ``ids`` shifted already; -100 at a
            document's end, in its prompt, and in padding. Every row has one that counts.
        positions: from 0 in each document.
        documents: which document of its row a token is of, from 0 up; padding is one, too.
    """

    ids: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor

    @property
    def num_rows(self) -> int:
        return self.ids.shape[0]

    @property
    def digest(self) -> str:
        """Of tokens and labels, so that a run does not go on with other text."""
        digest = hashlib.sha256(self.ids.numpy().tobytes())
        digest.update(self.labels.numpy().tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Batch:
    """A micro-batch, ``(rows, seq_len)`` int64 each, as in ``Packed``.

    Attributes:
        documents: as numbers from 0 to ``num_documents`` - 1 of this micro-batch.
        num_documents: of it, padding's counted.
        first_document: documents of the step before this micro-batch's, over all processes.
        num_labels: that count.
    """

    ids: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor
    num_documents: int
    first_document: int
    num_labels: int

    def to(self, device: torch.device | str) -> "Batch":
        """The same on another device."""
        moved = {
            n: getattr(self, n).to(device) for n in ("ids", "labels", "positions", "documents")
        }
        return replace(self, **moved)


@dataclass(frozen=True, eq=False)
class Step:
    """What one process does in a step of the optimiser.

    Attributes:
        batches: its micro-batches.
        num_labels: that count in the whole step, over all processes.
    """

    batches: tuple[Batch, ...]
    num_labels: int


def pack(samples: Sequence[Sample], seq_len: int, *, pad_id: int) -> Packed:
    """Fit samples into rows, those that fit uncut (best fit, the longest first).

    Longer ones are cut into pieces that are documents of their own. Pieces without a label are left
    out.

    Args:
        samples: in any order; the result depends on it.
        seq_len: tokens of a row, 2 or more.
        pad_id: token that fills rows up, such as the end of sequence.

    Raises:
        ValueError: no sample has a label that counts.

    References:
        Ding et al. 2024, "Fewer truncations improve language modeling" (arXiv 2404.10830).
    """
    pieces = [piece for sample in samples for piece in _pieces(sample, seq_len)]
    if not pieces:
        raise ValueError("there is nothing to learn: every sample is a prompt, or a single token")
    rows = _fitted(pieces, seq_len)
    ids = torch.full((len(rows), seq_len), pad_id)
    labels = torch.full((len(rows), seq_len), UNTRAINED)
    positions, documents = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, members in enumerate(rows):
        start = 0
        for number, piece in enumerate([*members, None]):  # None: what is left is padding
            end = seq_len if piece is None else start + len(pieces[piece][0])
            if piece is not None:
                ids[row, start:end] = torch.tensor(pieces[piece][0])
                labels[row, start:end] = torch.tensor(pieces[piece][1])
            positions[row, start:end] = torch.arange(end - start)
            documents[row, start:end] = number
            start = end
    return Packed(ids, labels, positions, documents)


def _pieces(sample: Sample, seq_len: int) -> Iterator[Piece]:
    """A sample cut into what a row holds, each token with the one after it as its label."""
    labels = (*sample.labels[1:], UNTRAINED)
    for start in range(0, len(sample.ids), seq_len):
        piece = sample.ids[start : start + seq_len], labels[start : start + seq_len]
        if any(label != UNTRAINED for label in piece[1]):
            yield piece


def _fitted(pieces: Sequence[Piece], seq_len: int) -> list[list[int]]:
    """Numbers of the pieces in each row: the longest first, each into the fullest row it fits."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # left in a row, and the row, ascending
    for number in sorted(range(len(pieces)), key=lambda i: -len(pieces[i][0])):
        length = len(pieces[number][0])
        place = bisect.bisect_left(room, (length, -1))
        left, row = room.pop(place) if place < len(room) else (seq_len, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        if left > length:
            bisect.insort(room, (left - length, row))
    return rows


@dataclass(frozen=True)
class Batches:
    """The batches of any step, as a function of the step alone: a run that goes on, or one on more
    processes, gets the same rows. Each epoch has its own order.

    Attributes:
        packed: the rows.
        batch_size: rows of a step, over all processes; divisible by ``num_processes *
            gradient_accumulation``.
        gradient_accumulation: micro-batches a process.
        seed: of the order.
        num_processes, process_index: as accelerate has them.
    """

    packed: Packed
    batch_size: int
    gradient_accumulation: int = 1
    seed: int = 0
    num_processes: int = 1
    process_index: int = 0

    def __post_init__(self) -> None:
        parts = self.num_processes * self.gradient_accumulation
        if self.batch_size < 1 or self.batch_size % parts:
            raise ValueError(
                f"batch_size ({self.batch_size}) must be a multiple of {parts}: it is divided over "
                f"{self.num_processes} processes and {self.gradient_accumulation} micro-batches"
            )
        if not 0 <= self.process_index < self.num_processes:
            raise ValueError(
                f"process_index must be 0 to {self.num_processes - 1}, got {self.process_index}"
            )

    @classmethod
    def of(cls, packed: Packed, settings: RunSettings, accelerator: Accelerator) -> "Batches":
        """Those of a run, on this process."""
        return cls(
            packed,
            settings.batch_size,
            settings.gradient_accumulation,
            settings.seed,
            accelerator.num_processes,
            accelerator.process_index,
        )

    def at(self, step: int) -> Step:
        """This process's part of a step, from 0."""
        rows = self._rows(step)
        counts = self.packed.documents[rows].amax(1) + 1
        before = counts.cumsum(0) - counts  # documents of the step before each row
        size = self.batch_size // (self.num_processes * self.gradient_accumulation)
        first = self.process_index * self.gradient_accumulation * size
        starts = range(first, first + self.gradient_accumulation * size, size)
        batches = [
            self._batch(rows[s : s + size], counts[s : s + size], before[s : s + size])
            for s in starts
        ]
        num_labels = int((self.packed.labels[rows] != UNTRAINED).sum())
        return Step(tuple(batches), num_labels)

    def _rows(self, step: int) -> Tensor:
        """Numbers of the step's rows: those of one epoch after another, each in its own order."""
        count = self.packed.num_rows
        places = range(step * self.batch_size, (step + 1) * self.batch_size)
        orders = {epoch: self._order(epoch) for epoch in {place // count for place in places}}
        return torch.stack([orders[place // count][place % count] for place in places])

    def _order(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(self.packed.num_rows, generator=generator)

    def _batch(self, rows: Tensor, counts: Tensor, before: Tensor) -> Batch:
        packed, first = self.packed, int(before[0])
        labels = packed.labels[rows]
        return Batch(
            packed.ids[rows],
            labels,
            packed.positions[rows],
            packed.documents[rows] + (before - first)[:, None],
            int(counts.sum()),
            first,
            int((labels != UNTRAINED).sum()),
        )


def micro_batches(step: Step, module: nn.Module, accelerator: Accelerator) -> Iterator[Batch]:
    """A step's, on their device. Each goes backward before the next one is asked for: gradients
    are exchanged in the backward pass of the last.

    Args:
        module: that they go through, as ``accelerator.prepare`` gave it.
    """
    *others, last = step.batches
    for batch in others:
        with accelerator.no_sync(module):
            yield batch.to(accelerator.device)
    yield last.to(accelerator.device)


def document_mask(documents: Tensor) -> Tensor:
    """``(rows, 1, seq_len, seq_len)`` bool, True where a token attends: itself and earlier ones of
    its document. For attention that is not transformers'."""
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril()


def within(mask: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """A mask as of ``document_mask`` where a token attends to itself and the ``window`` - 1
    positions before it; None: to all that the mask has."""
    if window is None:
        return mask
    return mask & (positions[:, None, None, :] > positions[:, None, :, None] - window)


@torch.no_grad()
def check_apart(model: nn.Module, vocab_size: int) -> None:
    """Raise unless documents of a packed row leave each other's logits as they are.

    Args:
        model: a transformers causal LM, or one inside PEFT; left in the mode that it is in.
        vocab_size: of its input embedding.

    Raises:
        ValueError: the model lets one document see another; it cannot be trained on packed rows.
    """
    device = next(model.parameters()).device
    ids = torch.arange(2 * PROBED, device=device)[None] * 7 % vocab_size
    others = ids.clone()
    others[:, :PROBED] = (ids[:, :PROBED] + 1) % vocab_size
    positions = torch.arange(PROBED, device=device).repeat(2)[None]
    training = model.training
    model.eval()
    try:
        given, changed = (
            model(input_ids=i, position_ids=positions, use_cache=False).logits[:, PROBED:].float()
            for i in (ids, others)
        )
    finally:
        model.train(training)
    # Masked keys weigh exactly 0; the rounding of fused kernels is allowed for all the same.
    if (given - changed).abs().max() > 1e-3 * given.abs().max():
        raise ValueError(
            "this model lets documents of a packed row see each other (it overlooks positions that "
            "start again); models whose attention transformers masks by position_ids can be trained"
        )
