"""What the LoRA recipe is told."""

from dataclasses import dataclass

from settings import RunSettings, check_exits

from layerskip.params import check_integer, check_number
from layerskip.training.schedules import Curriculum


@dataclass(frozen=True)
class Settings(RunSettings):
    """What decides the result, and ``RunSettings``.

    Attributes:
        rank, alpha: of LoRA; its updates are scaled with ``alpha / rank``.
        exits: exit layers that are trained, ascending, below full depth.
        curriculum: "rotational", "gradual" or "none" (``enabled_exits``).
        rotation: of the rotational curriculum, steps until every exit had its turn.
        early_scale, floor: weights of the exits' losses (``exit_loss_scales``): exits are not
            trained where both are 0.
        distil: share of KL from full depth in an exit's loss; the rest is cross-entropy.
        consistency: weight of full depth's pull towards its exits.
        layer_dropout: of the last layer; rates rise exponentially with depth.
        gradient_checkpointing: a layer's activations are made again in the backward pass.
        chunk_tokens: tokens whose logits exist at once.
        merge: whether the result is a whole model, or an adapter beside the one it was made of.
        cost_seconds: of the measurement at the end.
    """

    rank: int = 16
    alpha: float = 32.0
    exits: tuple[int, ...] = (1, 2, 4)
    curriculum: Curriculum = "rotational"
    rotation: int = 2
    early_scale: float = 1.0
    floor: float = 0.5
    distil: float = 0.5
    consistency: float = 0.0
    layer_dropout: float = 0.1
    gradient_checkpointing: bool = False
    chunk_tokens: int = 512
    merge: bool = True
    cost_seconds: float = 6.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_exits(self.exits)
        for name in ("rank", "rotation", "chunk_tokens"):
            check_integer(name, getattr(self, name), 1)
        for name, most in {"distil": 1.0, "layer_dropout": 0.99, "floor": 0.99}.items():
            check_number(name, getattr(self, name), 0.0, most)
        for name in ("early_scale", "consistency", "alpha"):
            check_number(name, getattr(self, name), 0.0, 1e6)
        check_number("cost_seconds", self.cost_seconds, 2e-3, 1e6)  # in halves: each a millisecond

    def check_depth(self, num_layers: int) -> None:
        """Raise unless every exit is one of a model this deep."""
        if self.exits[-1] >= num_layers:
            raise ValueError(
                f"exits name layer {self.exits[-1]}; an exit of this model lies in "
                f"[1, {num_layers - 1}] (its {num_layers} layers are full depth)"
            )


# Not among what makes two runs different: where results go, how often, and what is measured.
NOT_OF_THE_WEIGHTS = {
    *("out", "save_every", "eval_every", "resume", "max_new_tokens", "temperature", "merge"),
    *("eval_tokens", "final_tokens", "final_prompts", "cost_seconds", "gradient_accumulation"),
    *("chunk_tokens", "gradient_checkpointing", "held_out", "held_out_share"),
}
