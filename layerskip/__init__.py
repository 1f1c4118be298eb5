"""A language model that drafts with its own early layers and verifies with all of them."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerskip.api import SelfSpeculativeLM as SelfSpeculativeLM
    from layerskip.errors import RowError as RowError
    from layerskip.errors import UnsupportedModelError as UnsupportedModelError
    from layerskip.grammar import Grammar as Grammar
    from layerskip.lookup import LookupStore as LookupStore
    from layerskip.outputs import DecodeStats as DecodeStats
    from layerskip.outputs import GenerationOutput as GenerationOutput
    from layerskip.outputs import Round as Round
    from layerskip.params import SamplingParams as SamplingParams
    from layerskip.plan import DraftPlan as DraftPlan
    from layerskip.plan import PlanFile as PlanFile
    from layerskip.policy import Policy as Policy
    from layerskip.policy import Rule as Rule

_HOMES = {
    "SelfSpeculativeLM": "layerskip.api",
    "Grammar": "layerskip.grammar",
    "RowError": "layerskip.errors",
    "UnsupportedModelError": "layerskip.errors",
    "LookupStore": "layerskip.lookup",
    "DecodeStats": "layerskip.outputs",
    "GenerationOutput": "layerskip.outputs",
    "Round": "layerskip.outputs",
    "SamplingParams": "layerskip.params",
    "DraftPlan": "layerskip.plan",
    "PlanFile": "layerskip.plan",
    "Policy": "layerskip.policy",
    "Rule": "layerskip.policy",
}
__all__ = ["__version__", *_HOMES]

try:
    __version__ = version("layerskip")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that ``layerskip --help`` need not load torch."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'layerskip' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names too that nothing has imported yet."""
    return sorted({*globals(), *__all__})
