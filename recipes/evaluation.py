"""What exits give on held-out text: acceptance, likelihood, and speed on held-out prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data import Sample
from torch import Tensor

from layerskip import SelfSpeculativeLM
from layerskip.cost import CostTable
from layerskip.model import DecoderStack
from layerskip.params import AUTO, NumDraftTokens

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
        raise NotImplementedError

    def lengths(self, exit_layer: int) -> tuple[float, ...]:
        """Mean accepted length with 0, 1, 2, ... drafted tokens, for ``prediction.predict``."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        raise NotImplementedError


@dataclass(frozen=True)
class SpeedReport:
    """Self-speculative decoding against plain decoding of the same prompts, in turn.

    Attributes:
        temperature: 0 is greedy.
        speedup, interval: median over prompts of the paired ratio of wall times after the first
            token, and its 95 % bootstrap interval.
        cpu_speedup, cpu_interval: the same of the process's CPU time.
        acceptance_rate, mean_accepted_length: of all rounds.
        by_position: as in ``ExitScores``, of real rounds.
        prompts, left_out: counted, and left out since their plain output loops.
        new_tokens: of plain decoding.
        repeated_share: repeated 8-grams of what was counted.
    """

    temperature: float
    speedup: float
    interval: tuple[float, float]
    cpu_speedup: float
    cpu_interval: tuple[float, float]
    acceptance_rate: float
    mean_accepted_length: float
    by_position: tuple[float, ...]
    prompts: int
    left_out: int
    new_tokens: int
    repeated_share: float

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        raise NotImplementedError


@dataclass(frozen=True)
class Measurement:
    """A model, before or after training.

    Attributes:
        exits: a report for each temperature.
        exit_layer: that was drafted from.
        c: time of a draft pass in units of a plain one, at the speeds' context.
        v: of a verify pass of ``k + 1`` rows, k the drafted tokens that are predicted best.
        speeds: a report for each temperature.
    """

    exits: tuple[ExitReport, ...]
    exit_layer: int
    c: float
    v: float
    speeds: tuple[SpeedReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        raise NotImplementedError


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
        exits: exit layers, below full depth.
        temperature: 0 compares argmaxes, ties to the lowest id.
        num_positions: drafted tokens that a chain is followed over.
        max_tokens: of all samples together; those after it are left out.
        max_sample_tokens: longer samples are cut.
        exit_logits: of exits with an adapter; None: the stack's.

    Raises:
        ValueError: an exit is not of the model, or nothing is left to predict.
    """
    raise NotImplementedError


def measure_speed(
    lm: SelfSpeculativeLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int = 0,
    num_draft_tokens: NumDraftTokens = AUTO,
    repeats: int = 1,
    max_repeated: float = 0.2,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> SpeedReport:
    """Decode each prompt plainly and self-speculatively, in turn; both give the same tokens.

    ``lm`` made with ``lookup=False`` measures the exit alone.

    Args:
        prompts: token ids, such as ``data.prompts`` gives.
        max_new_tokens: of each; ends of sequence are passed over.
        repeats: of each prompt; its ratio is their median.
        max_repeated: prompts whose plain greedy output repeats more of its 8-grams are left out.
        on_progress: called with (prompts done, prompts).

    Raises:
        ValueError: no prompt is left.
        AssertionError: an output is not plain decoding's.
    """
    raise NotImplementedError


def best_exit(
    report: ExitReport, costs: Mapping[int, CostTable], context: float
) -> tuple[int, int, float]:
    """Exit layer, number of drafted tokens and speed-up that are predicted best.

    Args:
        report: acceptance of the exits.
        costs: of each exit; those without are left out.
        context: slots that passes attend to.
    """
    raise NotImplementedError


def exit_costs(
    stack: DecoderStack, exits: Sequence[int], *, seconds: float = 6.0
) -> dict[int, CostTable]:
    """Cost tables of exits, between measured ones of the shallowest and of all layers."""
    raise NotImplementedError


def measure(
    model: Any,
    tokenizer: Any,
    samples: Sequence[Sample],
    prompts: Sequence[Sequence[int]],
    exits: Sequence[int],
    *,
    temperature: float,
    max_new_tokens: int,
    seed: int = 0,
    exit_layer: int | None = None,
    on_progress: Callable[[str], None] = lambda what: None,
) -> Measurement:
    """All of a table's column for a plain model (without an exit adapter): exits teacher-forced,
    the best of them by prediction at ``temperature``, and its speed, greedy and at ``temperature``.

    Args:
        model: a transformers causal LM, or one inside PEFT.
        samples, exits: as of ``evaluate_exits``.
        prompts, max_new_tokens, seed: as of ``measure_speed``.
        exit_layer: drafted from; None: the best by prediction.
        on_progress: called with what is done next.
    """
    raise NotImplementedError
