"""What a pass costs: the table that decides whether, and how far, to draft.

Measured once per model, plan, device, dtype and number of threads (``layerskip profile``), saved
with a plan, and read by the controller and the simulator. Pure numbers: nothing here runs a model.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

COST_VERSION = 1


@dataclass(frozen=True)
class Curve:
    """Seconds of one kind of pass, by its rows and by the slots that it attends to.

    Attributes:
        rows: numbers of tokens that were measured, ascending.
        contexts: numbers of slots that were measured, ascending.
        seconds: ``seconds[i][j]`` at ``contexts[i]`` and ``rows[j]``.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for name, axis in (("rows", self.rows), ("contexts", self.contexts)):
            if not axis or list(axis) != sorted(set(axis)) or axis[0] < 0:
                raise ValueError(f"a cost table's {name} must ascend from 0 on, got {axis}")
        shape = [len(line) for line in self.seconds]
        if shape != [len(self.rows)] * len(self.contexts):
            raise ValueError(
                f"a cost table needs {len(self.contexts)} lines of {len(self.rows)} times, "
                f"got lines of {shape}"
            )
        if not all(0.0 <= t < float("inf") for line in self.seconds for t in line):
            raise ValueError("a cost table's times must be finite and not negative")

    def at(self, rows: float, context: float) -> float:
        """Seconds, linear between what was measured and beyond its end, flat before its start."""
        i, share = _between(self.contexts, context)
        j, part = _between(self.rows, rows)
        low = _mix(self.seconds[i], j, part)
        if share == 0.0:
            return low
        return max(0.0, low + share * (_mix(self.seconds[i + 1], j, part) - low))


def _between(axis: Sequence[int], value: float) -> tuple[int, float]:
    """Index of the grid point below ``value``, and the share of the way to the next one."""
    if len(axis) == 1 or value <= axis[0]:
        return 0, 0.0
    i = min(bisect_left(axis, value), len(axis) - 1) - 1
    return i, (value - axis[i]) / (axis[i + 1] - axis[i])


def _mix(line: Sequence[float], j: int, part: float) -> float:
    return line[j] if part == 0.0 else max(0.0, line[j] + part * (line[j + 1] - line[j]))


@dataclass(frozen=True)
class CostTable:
    """T(rows, context) of a decoder's passes, in seconds.

    Attributes:
        draft_layers: embedding and the plan's layers.
        draft_head: final norm and head, over the draft's vocabulary, and the draft's confidence;
            one context.
        verify: embedding, all layers and the full head.
        sampling: of one row, draft or target.
        row_quantum: passes are padded to a multiple of this many rows.
        key: what the table is of: fingerprint of the model, plan, device, dtype, threads, versions.
    """

    draft_layers: Curve
    draft_head: Curve
    verify: Curve
    sampling: float
    row_quantum: int
    key: Mapping[str, str | int]

    def draft_pass(self, rows: int, context: float) -> float:
        """One draft pass over ``rows`` tokens, with its head and sampling."""
        padded = self._padded(rows)
        layers, head = self.draft_layers.at(padded, context), self.draft_head.at(padded, 0)
        return layers + head + rows * self.sampling

    def verify_pass(self, rows: int, context: float) -> float:
        """One full-depth pass over ``rows`` tokens, with sampling; of one row: a plain pass."""
        return self.verify.at(self._padded(rows), context) + rows * self.sampling

    def _padded(self, rows: int) -> int:
        return -(-rows // self.row_quantum) * self.row_quantum

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; ``from_dict`` reads it."""
        return {"version": COST_VERSION, **asdict(self), "key": dict(self.key)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "CostTable":
        """The table that ``to_dict`` wrote.

        Raises:
            ValueError: it is none, or of another version.
        """
        if not isinstance(content, Mapping) or content.get("version") != COST_VERSION:
            got = content.get("version") if isinstance(content, Mapping) else content
            raise ValueError(f"a cost table of version {COST_VERSION} was expected, got {got!r}")
        try:
            return cls(
                _curve(content["draft_layers"]),
                _curve(content["draft_head"]),
                _curve(content["verify"]),
                float(content["sampling"]),
                int(content["row_quantum"]),
                dict(content["key"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"the cost table is not complete ({error!r})") from None


def _curve(content: Mapping[str, Any]) -> Curve:
    seconds = tuple(tuple(float(t) for t in line) for line in content["seconds"])
    return Curve(tuple(content["rows"]), tuple(content["contexts"]), seconds)
