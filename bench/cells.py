"""What the benchmarks measure: one cell is one kind of request."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tasks import TASKS

Kind = Literal["greedy", "sampled", "forced"]
TEMPERATURE = 0.8
TOKENS = 48
BATCHES = (1, 2, 4, 8)
CONTEXTS = (100, 500, 870)
OUTPUTS = (16, 128, 512)


@dataclass(frozen=True)
class Cell:
    """One kind of request.

    Attributes:
        task: of the prompts.
        kind: "greedy", "sampled" (temperature 0.8), or "forced": along the text that is known to
            follow the prompt, whatever the model would have written.
        batch: prompts decoded together.
        context: tokens of a prompt; None: as it is.
        tokens: most new tokens of a prompt.
    """

    task: str
    kind: Kind
    batch: int = 1
    context: int | None = None
    tokens: int = TOKENS

    @property
    def name(self) -> str:
        parts = [self.task, self.kind]
        parts += [f"batch{self.batch}"] if self.batch > 1 else []
        parts += [f"context{self.context}"] if self.context is not None else []
        parts += [f"tokens{self.tokens}"] if self.tokens != TOKENS else []
        return "-".join(parts)

    @property
    def temperature(self) -> float:
        return TEMPERATURE if self.kind == "sampled" else 0.0


# Each task greedily and sampled, but copying, which is the same thing twice; then one thing at a
# time away from them: text that is not the model's own, batches, short outputs, long prompts.
QUICK = (
    Cell("code", "greedy"),
    Cell("code", "sampled"),
    Cell("code", "forced"),
    Cell("math", "greedy"),
    Cell("math", "sampled"),
    Cell("chat", "greedy"),
    Cell("chat", "sampled"),
    Cell("copying", "greedy"),
    Cell("code", "sampled", batch=4),
    Cell("code", "sampled", batch=8),
    Cell("code", "sampled", tokens=16),
    Cell("code", "sampled", context=870, tokens=128),
)


def full(tasks: Sequence[str] = TASKS) -> list[Cell]:
    """The matrix. A known text is followed in one row at a time."""
    every = itertools.product(tasks, ("greedy", "sampled", "forced"), BATCHES, CONTEXTS, OUTPUTS)
    cells = [Cell(*each) for each in every]
    return [c for c in cells if c.batch == 1 or c.kind != "forced"]


def cells_of(matrix: str, own_prompts: bool) -> list[Cell]:
    """The named matrix, of our tasks or of the prompts that a user gave.

    Args:
        matrix: "quick" or "full".
        own_prompts: there is one task, "prompts", in the place of ours.
    """
    if not own_prompts:
        return list(QUICK) if matrix == "quick" else full()
    if matrix == "full":
        return full(["prompts"])
    return list(dict.fromkeys(replace(c, task="prompts") for c in QUICK))
