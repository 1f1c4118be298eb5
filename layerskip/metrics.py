"""Acceptance of one request, in the shape that serving engines report it.

Fields and definitions are those of vLLM's ``metrics.speculative_decoding``
(documentation of 0.32, "Per-Request Acceptance Metrics"), which load generators read;
``accepted_*`` and ``mode`` are ours.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

QUANTILES = (10, 50, 90)


def speculative_metrics(rounds: Iterable[tuple[int, int]]) -> dict[str, Any]:
    """Sum up a request's rounds.

    Rounds without a draft are left out, as in vLLM, so that they lower no mean.

    Args:
        rounds: drafted and accepted tokens of each, prefill left out.

    Returns:
        ``num_spec_steps`` rounds that drafted, ``num_draft_tokens``, ``num_accepted_draft_tokens``,
        ``num_spec_tokens`` (most drafted in a round), ``mean_acceptance_length`` (1 + accepted a
        round), ``draft_acceptance_rate``, ``acceptance_histogram`` (rounds by accepted tokens), the
        same ``_by_draft_length``, ``per_step_accepted``, ``per_step_drafted``; ``accepted_p10``,
        ``_p50``, ``_p90`` of accepted tokens a round, nearest rank, None without any; ``mode``,
        "speculative" or "plain".
    """
    drafts = [(drafted, accepted) for drafted, accepted in rounds if drafted]
    drafted = sum(d for d, _ in drafts)
    accepted = [a for _, a in drafts]
    most = max((d for d, _ in drafts), default=0)
    by_length = {
        str(k): _histogram((a for d, a in drafts if d == k), k)
        for k in sorted({d for d, _ in drafts})
    }
    return {
        "mean_acceptance_length": 1.0 + sum(accepted) / max(1, len(drafts)),
        "draft_acceptance_rate": sum(accepted) / max(1, drafted),
        "acceptance_histogram": _histogram(accepted, most),
        "acceptance_histogram_by_draft_length": by_length,
        "num_spec_steps": len(drafts),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": drafted,
        "num_spec_tokens": most,
        "per_step_accepted": accepted,
        "per_step_drafted": [d for d, _ in drafts],
        **{f"accepted_p{q}": _nearest_rank(accepted, q) for q in QUANTILES},
        "mode": "speculative" if drafts else "plain",
    }


def _histogram(accepted: Iterable[int], most: int) -> list[int]:
    counts = Counter(accepted)
    return [counts[j] for j in range(most + 1)]


def _nearest_rank(values: list[int], percent: int) -> int | None:
    """The smallest value that so many percent of all do not exceed."""
    if not values:
        return None
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]
