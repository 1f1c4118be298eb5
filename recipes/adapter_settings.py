"""What the exit adapter's recipe is told."""

from dataclasses import dataclass
from typing import Literal

from draft_training import Rollout
from settings import RunSettings, check_exits

from layerskip.adapter_shape import WIDTH_QUANTUM
from layerskip.params import check_integer, check_number


@dataclass(frozen=True)
class Settings(RunSettings):
    """What decides the result, and ``RunSettings``, whose ``temperature`` is also that of the
    model's own continuations and of the distributions that the loss compares.

    Attributes:
        exit_layer: that gets the adapter; 0: that of ``exits`` which is predicted fastest.
        exits: tried where ``exit_layer`` is 0, and measured before.
        search_steps: of each exit that is tried.
        norm: whether the exit's norm is scaled.
        head_rank: of the addition to the head; 0: none.
        bridge_rank: of the addition to the hidden states; 0: none.
        block: a transformer block in the place of a bridge.
        block_width: of its MLP, a multiple of 32; 0: that of the model's layers, rounded up.
        block_start: "next_layer": the block starts as a copy of the layer after the exit, which
            has to have the block's form; "nothing": it starts as the plain exit.
        text: whether the data are trained on.
        continuations: tokens of the model's own that are trained on, after prompts of the data; 0:
            none.
        continuation_length: most tokens of each.
        cross_entropy: share of it in the loss; the rest is total variation.
        survival_tokens: of the drafts whose survival weighs positions.
        rollout_every: steps between those that train on drafts of the adapter's own; 0: never.
        rollout_starts, rollout_tokens: of such a step: drafts of each row, tokens of each draft.
        draft_vocabulary: ids that the result drafts over, the most frequent of what was trained
            on: the less of the head, the cheaper a draft; 0: all.
        calibration_tokens: of held-out text, for the temperature, and as many to judge it; where
            there are fewer, half of the rows each.
    """

    exit_layer: int = 1
    exits: tuple[int, ...] = (1, 2)
    search_steps: int = 40
    norm: bool = True
    head_rank: int = 16
    bridge_rank: int = 0
    block: bool = True
    block_width: int = 0
    block_start: Literal["next_layer", "nothing"] = "next_layer"
    text: bool = True
    continuations: int = 65536
    continuation_length: int = 128
    cross_entropy: float = 0.1
    survival_tokens: int = 5
    rollout_every: int = 4
    rollout_starts: int = 8
    rollout_tokens: int = 3
    draft_vocabulary: int = 0
    calibration_tokens: int = 4_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.text and not self.continuations:
            raise ValueError("there is nothing to train on; give text=true or continuations=65536")
        if self.block_width and not self.block:
            raise ValueError(
                f"block_width={self.block_width} needs a block; give block=true, or leave it out"
            )
        if isinstance(self.block_width, int) and self.block_width % WIDTH_QUANTUM:
            raise ValueError(
                f"block_width must be a multiple of {WIDTH_QUANTUM}, got {self.block_width}"
            )
        if self.bridge_rank and self.block:
            raise ValueError(
                f"bridge_rank={self.bridge_rank} takes the block's place; give block=false, or "
                "leave it out"
            )
        if not (self.norm or self.head_rank or self.bridge_rank or self.block):
            raise ValueError(
                "there is no part to train; give norm=true, a head_rank, a bridge_rank or "
                "block=true"
            )
        least = {"exit_layer": 0, "head_rank": 0, "bridge_rank": 0, "block_width": 0}
        least |= {
            "draft_vocabulary": 0,
            "continuations": 0,
            "continuation_length": 2,
            "rollout_every": 0,
        }
        ones = ("search_steps", "survival_tokens", "rollout_starts", "rollout_tokens")
        for name, low in (least | dict.fromkeys((*ones, "calibration_tokens"), 1)).items():
            check_integer(name, getattr(self, name), low)
        check_exits(self.exits)
        check_number("cross_entropy", self.cross_entropy, 0.0, 1.0)

    @property
    def rollout(self) -> Rollout:
        return Rollout(self.rollout_starts, self.rollout_tokens, self.temperature, self.seed)


# What two runs have to share to give the same weights, beside the data.
OF_THE_WEIGHTS = {
    *("model", "steps", "batch_size", "seq_len", "learning_rate", "mixed_precision", "seed"),
    *("temperature", "dtype", "norm", "head_rank", "bridge_rank", "block", "block_width"),
    *("block_start", "text", "cross_entropy", "survival_tokens", "rollout_every"),
    *("rollout_starts", "rollout_tokens", "clip"),
}
