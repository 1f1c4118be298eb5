"""What the runs of a cell come to: one table row for each mode."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from modes import BASE, THEIR_BASE, Turn

from layerskip import DecodeStats, Round
from layerskip.bootstrap import bootstrap_interval
from layerskip.cost import CostTable
from layerskip.outputs import acceptance_by_position

PERCENTILES = (50, 90, 99)


def speeds(turns: Sequence[Turn], bases: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    """Tokens a second, and how many times as fast as each base: the median over prompts of paired
    ratios, with its 95 % bootstrap interval. A mode that writes less text is not faster for it."""
    gaps = [gap for turn in turns for gap in turn.gaps()]
    found: dict[str, Any] = {
        "new_tokens": sum(t.tokens for t in turns),
        "tokens_per_second": statistics.median(1.0 / t.wall_per_token for t in turns),
        "tokens_per_cpu_second": statistics.median(t.tokens / t.whole.cpu for t in turns),
        "seconds_to_first_token": statistics.median(t.first for t in turns),
    }
    if gaps:
        seconds, counts = zip(*gaps, strict=True)
        found |= {
            f"seconds_per_token_p{p}": float(np.percentile(np.repeat(seconds, counts), p))
            for p in PERCENTILES
        }
    for name, base in bases.items():
        pairs = list(zip(turns, base, strict=True))
        ratios = [b.wall_per_token / a.wall_per_token for a, b in pairs]
        cpu = [b.whole.cpu * a.tokens / (a.whole.cpu * b.tokens) for a, b in pairs]
        found[f"speedup_vs_{name}"] = statistics.median(ratios)
        found[f"speedup_vs_{name}_ci95"] = bootstrap_interval(ratios)
        found[f"cpu_speedup_vs_{name}"] = statistics.median(cpu)
    return found


def sameness(mode: str, runs: Mapping[str, Sequence[Turn]], greedy: bool) -> dict[str, Any]:
    """Share of the prompts whose tokens are those of plain decoding: one's own and ours. Samples of
    transformers depend on how they were drawn, and can't be compared."""
    theirs, found = mode.startswith("hf"), {}
    for name, base in (("own", THEIR_BASE if theirs else BASE), ("our", BASE)):
        comparable = greedy or not theirs
        same = [
            a == b
            for turn, plain in zip(runs[mode], runs[base], strict=True)
            for a, b in zip(turn.texts, plain.texts, strict=True)
        ]
        found[f"identical_to_{name}_plain"] = statistics.fmean(same) if comparable else None
    return found


def handed_out(turns: Sequence[Turn]) -> dict[str, Any]:
    """Of transformers' drafting modes, which tell no more: tokens of each hand-out, a round's."""
    counts = [count for turn in turns for _, count in turn.arrivals]
    return {"mean_accepted_length": statistics.fmean(counts) if counts else None}


def drafting(
    turns: Sequence[Turn], plain: Sequence[Turn], cost: CostTable | None, context: float
) -> dict[str, Any]:
    """Acceptance, and of one row the speed-up after the first token: predicted by the cost table
    and measured.

    Args:
        cost: None where nothing is predicted.
        context: slots that passes attend to, on average.
    """
    rounds = [r for turn in turns for r in turn.rounds]
    stats = DecodeStats.from_rounds(rounds, prompt_tokens=0, kv_cache_bytes=0)
    decoded = [r for r in rounds if r.index > 0]
    found: dict[str, Any] = {
        "acceptance_rate": stats.acceptance_rate if stats.num_draft_tokens else None,
        "mean_accepted_length": stats.mean_accepted_length,
        "draft_tokens_per_round": stats.num_draft_tokens / max(1, stats.num_rounds),
        "share_of_plain_rounds": stats.num_plain_rounds / max(1, stats.num_rounds),
        "acceptance_by_position": list(acceptance_by_position(decoded)),
    }
    if cost is not None:
        after, base = ([t.whole.wall - t.first for t in of] for of in (turns, plain))
        found |= prediction(decoded, stats, cost, context)
        found["measured_speedup"] = sum(base) / sum(after) if sum(after) else None
    return found


def typical_prediction(
    rounds: Sequence[Round], stats: DecodeStats, costs: Sequence[CostTable], context: float
) -> dict[str, Any]:
    """Medians of the predictions by several tables, measured at several times."""
    found = [prediction(rounds, stats, cost, context) for cost in costs]
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def prediction(
    rounds: Sequence[Round], stats: DecodeStats, cost: CostTable, context: float
) -> dict[str, Any]:
    """Speed-up by the cost table; c and v are means over the passes that were made."""
    plain, drafted, verified, passes = cost.verify_pass(1, context), 0.0, 0.0, 0
    for r in rounds:
        verified += cost.verify_pass(r.num_draft_tokens + 1, context)
        if r.num_draft_passes:
            passes += r.num_draft_passes
            # Of an early exit's round, all but one of the positions are the draft's, and but those
            # that were looked up behind it.
            ran = r.positions - 1 - r.num_lookup_tokens
            each = max(1, round(ran / r.num_draft_passes))
            drafted += cost.drafting(r.num_draft_passes, each, context)
    count = max(1, len(rounds))
    c, v = drafted / max(1, passes) / plain, verified / count / plain
    return {
        "draft_passes_per_round": passes / count,
        "c": c,
        "v": v,
        "beta": v - 1.0,
        "predicted_speedup": stats.mean_accepted_length / (passes / count * c + v),
    }


def over_best(modes: Mapping[str, Mapping[str, Any]], name: str, *, looking_up: bool) -> float:
    """A mode of ``workloads.py`` over plain decoding or the fixed number of draft tokens that is
    fastest: by CPU time of all prompts' tokens but each one's first.

    Args:
        looking_up: whether the fixed numbers are those beside look-ups.
    """
    fixed = [n for n in modes if n.startswith("k=") and n.endswith("look-up") == looking_up]
    best = max(modes[n]["measured_cpu_speedup"] for n in ("plain", *fixed))
    return float(modes[name]["measured_cpu_speedup"] / best)
