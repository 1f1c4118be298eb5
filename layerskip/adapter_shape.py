"""What an exit adapter is made of, and the model that it fits: one frozen value, and its checks."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from layerskip.params import check_integer, check_number
from layerskip.plan import DraftPlan

WIDTH_QUANTUM = 32  # a width that vector units divide evenly: a row's bits then know no place
COLDEST, HOTTEST = 0.01, 100.0  # temperatures of an adapter's logits


def check_temperature(value: object) -> None:
    """Raise unless logits can be divided by ``value``."""
    check_number("an exit adapter's temperature", value, COLDEST, HOTTEST)


@dataclass(frozen=True)
class AdapterShape:
    """Sizes of an adapter's parts. One that is 0 or False is not there.

    Attributes:
        exit_layer: leading layers that the draft runs before it.
        num_layers, hidden_size, head_size, vocab_size: of the model: its depth, the width of its
            hidden states, the width that its head reads, the tokens that it knows.
        norm: whether the exit's norm is scaled.
        head_rank: of the addition to the head.
        bridge_rank: of the addition to the hidden states.
        block_width: of the block's MLP.
        num_heads, num_kv_heads, head_dim: of the block's attention: the model's.
        frequencies: radians a position by which pairs of a head are turned; empty: none are.
        rope_scaling: what turned pairs are multiplied with.
    """

    exit_layer: int
    num_layers: int
    hidden_size: int
    head_size: int
    vocab_size: int
    norm: bool = True
    head_rank: int = 16
    bridge_rank: int = 0
    block_width: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    frequencies: tuple[float, ...] = ()
    rope_scaling: float = 1.0

    def __post_init__(self) -> None:
        check_integer("num_layers", self.num_layers, 2)
        check_integer("exit_layer", self.exit_layer, 1, self.num_layers - 1)
        for name in ("hidden_size", "head_size", "vocab_size"):
            check_integer(name, getattr(self, name), 1)
        for name in ("head_rank", "bridge_rank", "block_width"):
            check_integer(name, getattr(self, name), 0)
        if not isinstance(self.norm, bool):
            raise TypeError(f"norm must be a bool, got {self.norm!r}")
        check_number("rope_scaling", self.rope_scaling, 0.0, math.inf)
        if self.bridge_rank and self.block_width:
            raise ValueError("an exit adapter has a bridge or a block, not both; leave one out")
        if not (self.norm or self.head_rank or self.bridge_rank or self.block_width):
            raise ValueError(
                "an exit adapter needs a part to train: norm, head_rank, bridge_rank or block"
            )
        if self.block_width:
            self._check_block()

    def _check_block(self) -> None:
        if self.block_width % WIDTH_QUANTUM:
            raise ValueError(
                f"block_width must be a multiple of {WIDTH_QUANTUM}, got {self.block_width}"
            )
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            check_integer(name, getattr(self, name), 1)
        if self.num_heads % self.num_kv_heads or 2 * len(self.frequencies) > self.head_dim:
            raise ValueError(
                f"a block cannot have {self.num_heads} heads of {self.head_dim} with "
                f"{len(self.frequencies)} turned pairs over {self.num_kv_heads} heads of keys"
            )

    @property
    def plan(self) -> DraftPlan:
        """The early exit that it belongs to."""
        return DraftPlan.exiting(num_layers=self.num_layers, exit_layer=self.exit_layer)

    @property
    def deepens(self) -> bool:
        """Whether it changes hidden states, not only what is made of them."""
        return bool(self.bridge_rank or self.block_width)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; ``from_dict`` reads it."""
        return {**asdict(self), "frequencies": list(self.frequencies)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "AdapterShape":
        """The shape that ``to_dict`` wrote.

        Raises:
            ValueError, TypeError: a field is missing, unknown or makes no sense.
        """
        if not isinstance(content, Mapping):
            raise TypeError(f"a shape is a mapping, got {content!r}")
        names = {f.name for f in fields(cls)}
        if set(content) != names:
            raise ValueError(f"a shape has the fields {sorted(names)}, got {sorted(content)}")
        return cls(**{**content, "frequencies": tuple(map(float, content["frequencies"]))})
