"""Which layers draft: one frozen value that passes everywhere as an argument."""

import json
from dataclasses import dataclass
from pathlib import Path

from layerskip.params import check_integer

PLAN_VERSION = 1


@dataclass(frozen=True)
class DraftPlan:
    """The decoder layers that a draft pass runs, of a model with ``num_layers``.

    Attributes:
        num_layers: depth of the model.
        layers: strictly increasing layer indices, at least one.
    """

    num_layers: int
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        check_integer("num_layers", self.num_layers, 1)
        if not isinstance(self.layers, tuple):
            raise TypeError(f"layers must be a tuple of ints, got {self.layers!r}")
        for layer in self.layers:
            check_integer("a draft layer", layer, 0, self.num_layers - 1)
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(
                f"layers must be one or more strictly increasing indices, got {self.layers}"
            )

    @classmethod
    def exiting(cls, *, num_layers: int, exit_layer: int) -> "DraftPlan":
        """Draft with the first ``exit_layer`` layers."""
        check_integer("num_layers", num_layers, 2)
        check_integer("exit_layer", exit_layer, 1, num_layers - 1)
        return cls(num_layers, tuple(range(exit_layer)))

    @classmethod
    def skipping(cls, *, num_layers: int, skipped: list[int] | tuple[int, ...]) -> "DraftPlan":
        """Draft with every layer but ``skipped``."""
        check_integer("num_layers", num_layers, 1)
        if not isinstance(skipped, list | tuple):
            raise TypeError(f"skipped must be a list of layer indices, got {skipped!r}")
        for layer in skipped:
            check_integer("a skipped layer", layer, 0, num_layers - 1)
        return cls(num_layers, tuple(i for i in range(num_layers) if i not in set(skipped)))

    @property
    def shared_depth(self) -> int:
        """Leading layers that draft and verify both run: their results are computed once."""
        depth = 0
        while depth < len(self.layers) and self.layers[depth] == depth:
            depth += 1
        return depth

    def save(self, path: str | Path) -> None:
        """Write the plan as a small JSON file."""
        content = {
            "version": PLAN_VERSION,
            "num_layers": self.num_layers,
            "draft_layers": list(self.layers),
        }
        Path(path).write_text(json.dumps(content) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "DraftPlan":
        """Read a plan written by ``save``."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"plan file {path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a plan file ({error!r})") from None
        # The version first: another one may name its fields otherwise.
        if not isinstance(content, dict) or "version" not in content:
            raise ValueError(f"{path} is not a plan file (it has no version)")
        version = content["version"]
        if version != PLAN_VERSION or isinstance(version, bool):
            raise ValueError(f"{path} has plan version {version}; this layerskip reads version 1")
        try:
            return cls(content["num_layers"], tuple(content["draft_layers"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a plan file ({error!r})") from None
