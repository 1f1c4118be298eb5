"""Samples packed into rows of one length, and the batches of each step.

Documents of a row do not see each other: positions start again at 0 with each, which transformers
takes as the sign of packed rows when it is given no mask and no cache (``model_inputs``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from data import Sample
from torch import Tensor, nn


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
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Step:
    """What one process does in a step of the optimiser.

    Attributes:
        batches: its micro-batches. Summed over all processes' with weight ``batch.num_labels /
            num_labels``, means over labels give the mean over the whole step.
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
    raise NotImplementedError


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

    def at(self, step: int) -> Step:
        """This process's part of a step, from 0."""
        raise NotImplementedError


def model_inputs(batch: Batch) -> dict[str, Any]:
    """Keyword arguments for a transformers causal LM that keep the documents apart: no mask, and
    no cache, which would hide the restarting positions."""
    return {"input_ids": batch.ids, "position_ids": batch.positions, "use_cache": False}


def document_mask(documents: Tensor) -> Tensor:
    """``(rows, 1, seq_len, seq_len)`` bool, True where a token attends: itself and earlier ones of
    its document. For attention that is not transformers'."""
    raise NotImplementedError


def check_apart(model: nn.Module, vocab_size: int) -> None:
    """Raise unless documents of a packed row leave each other's logits as they are.

    Raises:
        ValueError: the model lets one document see another; it cannot be trained on packed rows.
    """
    raise NotImplementedError
