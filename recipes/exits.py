"""How often the full model takes what an exit would draft, teacher-forced along held-out text."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, takewhile
from typing import Any

import torch
from tokens import UNTRAINED, Sample
from torch import Tensor
from torch.nn.functional import cross_entropy

from layerskip import SamplingParams
from layerskip.model import DecoderStack
from layerskip.params import check_integer
from layerskip.sampling import Sampler

CHUNK_TOKENS = 128
LOGITS_BYTES = 2**30  # of one text at several exits, at once

# Token ids and exits (depths; full depth is among them) to float32 (tokens, vocab) logits of each.
ExitLogits = Callable[[Sequence[int], Sequence[int]], Mapping[int, Tensor]]


@dataclass(frozen=True)
class ExitScores:
    """How often the full model would take an exit's tokens, teacher-forced along text.

    Attributes:
        acceptance: chance that a first drafted token is accepted: 1 - total variation at the
            temperature, or at 0 the share of positions with the same argmax.
        by_position: of the first, second, ... drafted token, given that those before it were; from
            the second on an estimate, since the text's tokens are fed and not the draft's.
    """

    acceptance: float
    by_position: tuple[float, ...]


@dataclass(frozen=True)
class ExitReport:
    """Exits on held-out text.

    Attributes:
        temperature: of the distributions that are compared; 0 is greedy.
        positions: tokens predicted.
        loss: of the full model, nats a token (at temperature 1).
        exits: scores by exit layer.
    """

    temperature: float
    positions: int
    loss: float
    exits: Mapping[int, ExitScores]

    @property
    def perplexity(self) -> float:
        """Of the full model."""
        return math.exp(min(self.loss, 700.0))

    def lengths(self, exit_layer: int) -> tuple[float, ...]:
        """Mean accepted length with 0, 1, 2, ... drafted tokens, for ``prediction.predict``."""
        survived = accumulate(self.exits[exit_layer].by_position, lambda a, b: a * b)
        return tuple(accumulate(survived, initial=1.0))

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        exits = {str(layer): asdict(scores) for layer, scores in self.exits.items()}
        return asdict(self) | {"perplexity": self.perplexity, "exits": exits}


@torch.inference_mode()
def evaluate_exits(
    stack: DecoderStack,
    samples: Sequence[Sample],
    exits: Sequence[int],
    *,
    temperature: float,
    num_positions: int = 8,
    max_tokens: int = 20_000,
    max_sample_tokens: int = 512,
    exit_logits: ExitLogits | None = None,
) -> ExitReport:
    """Acceptance of exits and loss of the full model along held-out text.

    What is learned of a sample counts; its prompt is only read.

    Args:
        stack: the model; it shares the tensors of the one in training and sees each new value.
        samples: such as ``Corpus.held_out``.
        exits: exit layers, below full depth; none gives the full model's loss alone.
        temperature: 0 compares argmaxes, ties to the lowest id.
        num_positions: drafted tokens that a chain is followed over.
        max_tokens: of all samples together: of each its beginning first. More are read where else
            none that counts would be.
        max_sample_tokens: longer samples are read in pieces, each from position 0.
        exit_logits: of exits with an adapter; None: the stack's.

    Raises:
        ValueError: an exit is not of the model, or nothing is left to predict.
    """
    for layer in exits:
        check_integer("an exit layer", layer, 1, stack.num_layers - 1)
    logits = exit_logits or stack.all_exit_logits
    tallies = {layer: _Tally(num_positions) for layer in exits}
    loss, positions, read = 0.0, 0, 0
    size = min(max_sample_tokens, stack.max_positions)
    for window, window_labels in _windows(samples, size):
        if read >= max_tokens:
            break
        room = max_tokens - read if positions else len(window)
        ids, labels = window[:room][:-1], torch.tensor(window_labels[1:])
        labels = labels[: len(ids)]
        learned = labels != UNTRAINED
        if not learned.any():
            continue
        read += len(ids) + 1
        for group in _groups(exits, 4 * len(ids) * stack.vocab_size):
            found = logits(ids, (*group, stack.num_layers))
            target = found[stack.num_layers]
            for layer in group:
                chances = _acceptance(found[layer], target, temperature)
                tallies[layer].add(torch.where(learned, chances, -1.0))
        loss += cross_entropy(target, labels.to(target.device), reduction="sum").item()
        positions += int(learned.sum())
    if not positions:
        raise ValueError("the held-out text holds nothing to predict; give more, or a larger share")
    scores = {layer: tally.scores() for layer, tally in tallies.items()}
    return ExitReport(temperature, positions, loss / positions, scores)


def _windows(samples: Sequence[Sample], size: int) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Ids and labels of every sample's first ``size`` tokens, then of their next, and so on."""
    longest = max((len(sample.ids) for sample in samples), default=0)
    for start in range(0, longest, size):
        for sample in samples:
            if len(sample.ids) > start + 1:
                part = slice(start, start + size)
                yield sample.ids[part], sample.labels[part]


def _groups(exits: Sequence[int], exit_bytes: int) -> list[Sequence[int]]:
    """Exits whose logits exist at once, full depth's beside them."""
    size = max(1, LOGITS_BYTES // exit_bytes - 1)
    return [exits[i : i + size] for i in range(0, len(exits), size)] or [[]]


def _acceptance(draft: Tensor, target: Tensor, temperature: float) -> Tensor:
    """``(tokens,)`` chance that verification takes a draft's token at each position, on the CPU."""
    if temperature == 0.0:
        greedy = Sampler(SamplingParams(), 0, target.shape[-1])
        pairs = zip(greedy.pick(draft, 1), greedy.pick(target, 1), strict=True)
        return torch.tensor([float(a == b) for a, b in pairs])
    pieces = zip(draft.split(CHUNK_TOKENS), target.split(CHUNK_TOKENS), strict=True)
    shared = [
        torch.minimum((q / temperature).softmax(-1), (p / temperature).softmax(-1)).sum(-1)
        for q, p in pieces
    ]
    return torch.cat(shared).clamp(max=1.0).cpu()


class _Tally:
    """Sums over chains: drafts of ``num_positions`` tokens from every place of a text.

    Attributes:
        reached, accepted: by position of the draft, the chance of getting there, and of being
            accepted there, summed over places.
    """

    def __init__(self, num_positions: int) -> None:
        self.reached = torch.zeros(num_positions, dtype=torch.float64)
        self.accepted = torch.zeros(num_positions, dtype=torch.float64)

    def add(self, chances: Tensor) -> None:
        """Of one text, ``(tokens,)``; below 0 where nothing is drafted, which ends chains."""
        survived = torch.ones(len(chances), dtype=torch.float64)
        for i in range(min(len(self.reached), len(chances))):
            here = chances[i:].double()
            going = survived[: len(here)]
            # A place that nothing is drafted at is not reached, nor what lies beyond it.
            before = torch.where(here < 0.0, 0.0, going)
            survived = before * here.clamp_min(0.0)
            self.reached[i] += before.sum()
            self.accepted[i] += survived.sum()

    def scores(self) -> ExitScores:
        """Shares; positions that were never reached are left out."""
        pairs = zip(self.accepted.tolist(), self.reached.tolist(), strict=True)
        shares = tuple(a / r for a, r in takewhile(lambda pair: pair[1] > 0.0, pairs))
        return ExitScores(shares[0], shares)
