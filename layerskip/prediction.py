"""What a draft plan would gain: from replayed rounds and costs of passes to a speed-up."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from layerskip.calibration import Chains, walk
from layerskip.cost import CostTable, Curve
from layerskip.plan import DraftPlan


@dataclass(frozen=True)
class Counts:
    """What a plan's rounds along the texts gave.

    Attributes:
        lengths: mean accepted length with 0, 1, 2, ... drafted tokens.
        acceptance: by draft position, of those whose predecessors were accepted.
        first: acceptance of a first drafted token, over all positions of the texts.
    """

    lengths: tuple[float, ...]
    acceptance: tuple[float, ...]
    first: float

    def to_list(self) -> list[Any]:
        """Ready for JSON; ``from_list`` reads it."""
        return [list(self.lengths), list(self.acceptance), self.first]

    @classmethod
    def from_list(cls, content: Sequence[Any]) -> "Counts":
        """The counts that ``to_list`` wrote."""
        lengths, acceptance, first = content
        if not lengths:
            raise ValueError("there is no length, not even without drafted tokens")
        return cls(tuple(map(float, lengths)), tuple(map(float, acceptance)), float(first))


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was found about one way to draft.

    Attributes:
        counts: along texts.
        c: a drafted token's pass in units of a plain one.
        num_draft_tokens: the best number; 0 if none beats plain decoding.
        predicted: speed-up with that many, ``mean_accepted_length / (k c + v)``.
        measured: the speed-up that decoding showed, and the ends of its 95 % interval; None where
            it was not timed.
    """

    counts: Counts
    c: float
    num_draft_tokens: int
    predicted: float
    measured: tuple[float, float, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "acceptance": list(self.counts.acceptance),
            "first_acceptance": self.counts.first,
            "mean_accepted_length": self.counts.lengths[self.num_draft_tokens],
            "c": self.c,
            "num_draft_tokens": self.num_draft_tokens,
            "predicted_speedup": self.predicted,
            "measured_speedup": None if self.measured is None else self.measured[0],
            "measured_speedup_ci95": None if self.measured is None else list(self.measured[1:]),
        }


@dataclass(frozen=True)
class Tried(Found):
    """A plan and what was found about it.

    Attributes:
        plan: its layers.
        found_by: "exit", "trained exit" (the checkpoint says so), "similarity" or "refinement".
    """

    plan: DraftPlan
    found_by: str

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        layers = list(self.plan.layers)
        return {"draft_layers": layers, "found_by": self.found_by} | super().to_dict()


def count(chains: Chains, max_draft_tokens: int) -> Counts:
    """Sum up replayed rounds; draft lengths that no text has room for are left out."""
    lengths = [1.0]
    accepted: list[int] = []
    for k in range(1, max_draft_tokens + 1):
        rounds = [a for chain in chains for a in walk(chain, k)]
        if not rounds:
            break
        lengths.append(1.0 + statistics.fmean(rounds))
        accepted = rounds
    reached = [sum(a >= i for a in accepted) for i in range(len(lengths))]
    acceptance = [b / a for a, b in pairwise(reached) if a]
    first = statistics.fmean(n > 0 for chain in chains for n in chain)
    return Counts(tuple(lengths), tuple(acceptance), first)


def predict(
    table: CostTable, lengths: Sequence[float], context: float, *, least: int = 0
) -> tuple[int, float]:
    """The best number of draft tokens, and its speed-up over plain decoding.

    Args:
        table: costs of the plan's passes.
        lengths: mean accepted length with 0, 1, 2, ... drafted tokens.
        context: slots that passes attend to.
        least: fewest draft tokens that are taken.
    """
    plain = table.verify_pass(1, context)
    speeds = [
        length * plain / (table.drafting(k, 1, context) + table.verify_pass(k + 1, context))
        for k, length in enumerate(lengths)
    ]
    best = max(range(least, len(speeds)), key=speeds.__getitem__)
    return best, speeds[best]


def draft_costs(shallow: CostTable, deep: CostTable, num_layers: int, depth: int) -> CostTable:
    """Costs of drafting with any ``num_layers`` layers, between those of one and of all.

    Args:
        shallow: of drafts with one layer.
        deep: of drafts with all ``depth`` layers.
    """
    share = (num_layers - 1) / max(1, depth - 1)
    curve = deep.draft_layers
    # The two were measured at different times: in units of the full passes beside them.
    pace = deep.verify_pass(1, 0) / shallow.verify_pass(1, 0)
    seconds = tuple(
        tuple(
            (1 - share) * pace * shallow.draft_layers.at(r, c) + share * curve.at(r, c)
            for r in curve.rows
        )
        for c in curve.contexts
    )
    start = (1 - share) * pace * shallow.draft_start + share * deep.draft_start
    curve = Curve(curve.rows, curve.contexts, seconds)
    return replace(deep, draft_layers=curve, draft_start=start)
