"""What plan search found: every plan it measured, and the file to decode with."""

from dataclasses import dataclass
from typing import Any

from layerskip.plan import DraftPlan, PlanFile
from layerskip.prediction import Counts
from layerskip.trimming import Trimming


@dataclass(frozen=True)
class Tried:
    """A plan and what was found about it.

    Attributes:
        plan: its layers.
        found_by: "exit", "trained exit" (the checkpoint says so), "similarity" or "refinement".
        counts: along the texts.
        c: a drafted token's pass in units of a plain one.
        num_draft_tokens: the best number; 0 if none beats plain decoding.
        predicted: speed-up with that many, ``mean_accepted_length / (k c + v)``.
        measured: the speed-up that decoding showed, and the ends of its 95 % interval; None where
            it was not timed.
    """

    plan: DraftPlan
    found_by: str
    counts: Counts
    c: float
    num_draft_tokens: int
    predicted: float
    measured: tuple[float, float, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "draft_layers": list(self.plan.layers),
            "found_by": self.found_by,
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
class SearchResult:
    """What a search found.

    Attributes:
        file: to be saved; without a plan, and with 0 draft tokens, if none pays.
        tried: every plan that was measured, the best prediction first.
        verdict: one sentence.
        trimming: what was found about draft vocabularies; None without a plan.
    """

    file: PlanFile
    tried: tuple[Tried, ...]
    verdict: str
    trimming: Trimming | None = None
