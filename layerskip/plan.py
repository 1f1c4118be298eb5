"""Which layers draft, one frozen value that passes everywhere as an argument; and its file."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from layerskip.cost import COST_VERSION, CostTable
from layerskip.files import read_json, reason_of, write_json
from layerskip.params import SHARPNESS, check_integer, check_num_draft_tokens, check_number

PLAN_VERSION, PLAN_FILE_VERSION = 1, 2

logger = logging.getLogger(__name__)


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

    @property
    def exit_layer(self) -> int | None:
        """Leading layers of an early exit; None for a plan that skips layers and goes on."""
        return self.shared_depth if self.shared_depth == len(self.layers) else None

    def save(self, path: str | Path) -> None:
        """Write the plan as a small JSON file."""
        content = {
            "version": PLAN_VERSION,
            "num_layers": self.num_layers,
            "draft_layers": list(self.layers),
        }
        write_json(path, content)

    @classmethod
    def load(cls, path: str | Path) -> "DraftPlan":
        """The plan in a file written by ``save`` or ``PlanFile.save``.

        Raises:
            ValueError: the file can't be read, is no plan file, or says that no plan pays.
        """
        plan = PlanFile.load(path).plan
        if plan is None:
            raise ValueError(f"plan file {path} holds no plan: none was found to pay")
        return plan


@dataclass(frozen=True)
class PlanFile:
    """A plan, and what it was chosen with: what ``layerskip search`` writes and ``--plan`` reads.

    Attributes:
        plan: which layers draft; None: it was searched for, and no plan pays.
        num_draft_tokens: drafted per round, or "auto".
        draft_vocabulary: ids that the draft's head knows, ascending; None for all.
        cost: of the plan's passes, on the machine that it says. Of a file whose table is of another
            version of layerskip it is left out, with a warning.
        fingerprint: of the checkpoint that it was chosen on.
        acceptance: measured, by draft position: the share that is accepted of what is verified
            after accepted tokens only. What a controller begins with.
        calibration: of "greedy" and of "sampled" drafts, where measured: points
            ``(confidence, share accepted)`` of what is verified after accepted tokens only, with
            increasing confidences, between which it is linear. A controller begins with it, too.
            Of a file whose confidences were of another ``params.SHARPNESS`` it is left out.
        measurements: what the choice was made by; ready for JSON.
    """

    plan: DraftPlan | None
    num_draft_tokens: int | Literal["auto"] = "auto"
    draft_vocabulary: tuple[int, ...] | None = None
    cost: CostTable | None = None
    fingerprint: str | None = None
    acceptance: tuple[float, ...] = ()
    calibration: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    measurements: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.plan, DraftPlan | None):
            raise TypeError(
                f"plan must be a DraftPlan or None, got {type(self.plan).__name__}; "
                "PlanFile.load(path) reads a file"
            )
        check_num_draft_tokens(self.num_draft_tokens)
        if self.draft_vocabulary is not None:
            _check_vocabulary(self.draft_vocabulary)
        if self.cost is not None and not isinstance(self.cost, CostTable):
            raise TypeError(f"cost must be a CostTable or None, got {self.cost!r}")
        if not isinstance(self.acceptance, tuple):
            raise TypeError(f"acceptance must be a tuple of shares, got {self.acceptance!r}")
        for share in self.acceptance:
            check_number("an acceptance", share, 0.0, 1.0)
        _check_calibration(self.calibration)
        if self.fingerprint is not None and not isinstance(self.fingerprint, str):
            raise TypeError(f"fingerprint must be text, got {self.fingerprint!r}")
        if not isinstance(self.measurements, Mapping):
            raise TypeError(f"measurements must be a mapping, got {self.measurements!r}")
        if "coverage" in self.measurements:
            check_number("the coverage measured", self.measurements["coverage"], 0.0, 1.0)

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            ValueError: it cannot be written, or the measurements are not JSON.
        """
        plan, vocabulary = self.plan, self.draft_vocabulary
        content = {
            "version": PLAN_FILE_VERSION,
            "num_layers": None if plan is None else plan.num_layers,
            "draft_layers": None if plan is None else list(plan.layers),
            "num_draft_tokens": self.num_draft_tokens,
            "draft_vocabulary": None if vocabulary is None else list(vocabulary),
            "fingerprint": self.fingerprint,
            "acceptance": list(self.acceptance),
            "calibration": {kind: list(points) for kind, points in self.calibration.items()},
            "sharpness": SHARPNESS,
            "measurements": dict(self.measurements),
            "cost": None if self.cost is None else self.cost.to_dict(),
        }
        write_json(path, content)

    @classmethod
    def load(cls, path: str | Path) -> "PlanFile":
        """Read a file written by ``save``, or one of version 1, which holds less.

        Raises:
            ValueError: it can't be read, or is no plan file.
        """
        content = read_json(path, "plan file")
        # The version first: another one may name its fields otherwise.
        if not isinstance(content, dict) or "version" not in content:
            raise ValueError(f"{path} is not a plan file (it has no version)")
        version = content["version"]
        known = (PLAN_VERSION, PLAN_FILE_VERSION)
        if "row_quantum" in content:
            raise ValueError(f"{path} is a cost table, not a plan file, as layerskip search writes")
        if isinstance(version, bool) or version not in known:
            raise ValueError(
                f"{path} has plan version {version}; this layerskip reads versions 1 and 2"
            )
        try:
            return _from_dict(content)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a plan file ({reason_of(error)})") from None


def _from_dict(content: Mapping[str, Any]) -> PlanFile:
    later = content["version"] == PLAN_FILE_VERSION
    layers = content["draft_layers"]
    plan = None
    if layers is not None or not later:  # a file that was not searched for has a plan
        plan = DraftPlan(content["num_layers"], _tuples(layers))
    wanted = content["num_draft_tokens"] if later else content.get("num_draft_tokens")
    settings: dict[str, Any] = {"acceptance": _tuples(content.get("acceptance", []))}
    if later:
        settings = {
            "draft_vocabulary": _tuples(content["draft_vocabulary"]),
            "cost": _cost_of(content["cost"]),
            "fingerprint": content["fingerprint"],
            "acceptance": _tuples(content["acceptance"]),
            "measurements": content["measurements"],
        }
    elif "trained_exits" in content:  # recipes/export.py writes them beside the plan
        settings["measurements"] = {"trained_exits": content["trained_exits"]}
    # Not every file of version 2 has it, or of such confidences.
    told = content.get("calibration", {}) if content.get("sharpness") == SHARPNESS else {}
    if isinstance(told, dict):
        told = {kind: _tuples(points) for kind, points in told.items()}
    return PlanFile(plan, "auto" if wanted is None else wanted, calibration=told, **settings)


def _tuples(content: Any) -> Any:
    """Lists as tuples; what is none is left to the check that names it."""
    return tuple(map(_tuples, content)) if isinstance(content, list) else content


def _cost_of(content: Any) -> CostTable | None:
    """A file's table. The plan of one of another version is as good as it was, and tables are
    measured again at the first use, as on another machine."""
    version = content.get("version") if isinstance(content, Mapping) else None
    if type(version) is int and version != COST_VERSION:
        logger.warning(
            "the plan's cost table is of version %d, this layerskip has version %d: a quick "
            "measurement is used; run layerskip search again",
            version,
            COST_VERSION,
        )
        return None
    return None if content is None else CostTable.from_dict(content)


def _check_vocabulary(ids: object) -> None:
    if not isinstance(ids, tuple):
        raise TypeError(f"draft_vocabulary must be a tuple of token ids or None, got {ids!r}")
    for token in ids:
        check_integer("a token id of draft_vocabulary", token, 0)
    if not ids or any(a >= b for a, b in pairwise(ids)):
        raise ValueError("draft_vocabulary must be one or more strictly increasing token ids")


def _check_calibration(calibration: object) -> None:
    if not isinstance(calibration, Mapping) or not {"greedy", "sampled"}.issuperset(calibration):
        raise ValueError(
            f'calibration must map "greedy", "sampled" or both to points, got {calibration!r}'
        )
    for points in calibration.values():
        if not isinstance(points, tuple) or any(
            not isinstance(point, tuple) or len(point) != 2 for point in points
        ):
            raise TypeError(f"a calibration must be a tuple of pairs of numbers, got {points!r}")
        for value in (value for point in points for value in point):
            check_number("a number of a calibration", value, 0.0, 1.0)
        if not points or any(a >= b for (a, _), (b, _) in pairwise(points)):
            raise ValueError("a calibration must be one or more points of increasing confidence")


def ranges(layers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as "0-2, 5"."""
    starts = [i for i in layers if i - 1 not in layers]
    ends = [i for i in layers if i + 1 not in layers]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)
