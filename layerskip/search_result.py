"""What plan search found: every plan it measured, and the file to decode with."""

from dataclasses import dataclass
from typing import Any

from layerskip.plan import DraftPlan, PlanFile
from layerskip.prediction import Found
from layerskip.trimming import Trimming


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
