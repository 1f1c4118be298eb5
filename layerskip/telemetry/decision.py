"""Where drafting pays: from a report to a policy, by the tails and not by the means.

A user waits for one request, not for the average of all: drafting stays on where the 90 % quantile
of the time until the last token does not clearly rise, nor the request at the 10 % quantile of gain
clearly lose. Where that request loses, a cap on drafted tokens that mends it is looked for, in the
recorded rounds of the worst tenth of requests, each cut to the cap; else drafting goes off.
Rules are by task and prompt length: nobody knows a request's output length when it arrives.
"""

from collections.abc import Sequence
from itertools import pairwise

from layerskip.policy import Policy, Rule
from layerskip.telemetry.report import (
    AcceptanceReport,
    BucketReport,
    Estimate,
    Inequality,
    Paired,
    Position,
)

# With fewer requests, the chance that none of them is of the worst tenth is over 5 % (0.9 ** 28).
FEWEST_REQUESTS = 29
TIE = 0.03  # losing less is none: what drafting that is left to the controller may lose at worst


def decide(report: AcceptanceReport) -> Policy:
    """A rule for each task and range of prompt lengths that was measured."""
    limit = int(report.arm) if report.arm.isdecimal() else None
    rules = []
    for route in report.routes:
        most, reason = _decided(route, limit)
        rules.append(Rule(route.bucket.task or "", route.bucket.prompt_tokens, most, reason))
    measured = {
        "model": report.model,
        "arm": report.arm,
        "requests": report.total.num_requests,
        **report.measured,
    }
    return Policy(tuple(rules), report.label, measured)


def _decided(route: BucketReport, limit: int | None) -> tuple[int | None, str]:
    """Most drafted tokens of a rule, and why.

    Args:
        limit: that drafting was measured with; None: the controller chose.
    """
    paired, inequality = route.paired, route.inequality
    if paired is None:
        return limit, "left on: nothing was measured without drafting (arm 0) to compare with"
    if paired.num_prompts < FEWEST_REQUESTS:
        return limit, (
            f"left on: measured both ways, {paired.num_prompts} of the {FEWEST_REQUESTS} prompts "
            f"that it takes to meet the worst tenth"
        )
    if route.num_drafts == 0:
        return limit, "left on: the controller drafted nothing here by itself"
    faster, slower = paired.p90.high < 1.0, paired.p90.low > 1.0
    loses, p10 = _worst(paired, inequality)
    p90 = f"p90 latency is {_shown(paired.p90)} of plain, {p10}"
    if not slower and not loses:
        return limit, f"on: {p90}" if faster else f"left on, as nothing is clear: {p90}"
    if not loses or inequality is None:
        return 0, f"off: {p90}"
    gains = capped_gains(route.positions, route.worst_positions, inequality)
    best = max(range(len(gains)), key=gains.__getitem__, default=0)
    tokens = f"{best + 1} token{'s' if best else ''}"
    if not gains or gains[best] < 1.0 - TIE:
        at_best = f"; no cap mends that ({gains[best]:.2f} with {tokens})" if gains else ""
        return 0, f"off: {p90}{at_best}"
    return best + 1, f"capped: {p90}; with {tokens} at most, these run at {gains[best]:.2f}"


def _worst(paired: Paired, inequality: Inequality | None) -> tuple[bool, str]:
    """Whether the worst requests lose, and a clause that says so.

    Counts and the cost table say it best, for they know no noise; but where the clock clearly
    contradicts, they are wrong.
    """
    clock = f"the worst tenth takes {_shown(paired.worst_decile)} of its plain time"
    if inequality is None:
        return paired.worst_decile.low > 1.0, clock
    gain = inequality.gain.at(10)
    loses = gain < 1.0 - TIE and paired.worst_decile.high >= 1.0
    return loses, f"the p10 request runs at {gain:.2f} of plain speed by its counts, {clock}"


def capped_gains(
    positions: Sequence[Position], worst: Sequence[Position], inequality: Inequality
) -> tuple[float, ...]:
    """What the worst requests' drafts would gain, were none longer than 1, 2, 3, ... tokens.

    Tokens emitted over the time spent in plain passes. A shorter draft accepts what the recorded
    one accepted in its first places, whatever drafted it.

    Args:
        positions: of all requests' drafts: how many draft passes a drafted token takes.
        worst: of the worst requests' drafts.
    """
    per_draft = sum(p.drafted for p in positions) / max(1, positions[0].drafts if positions else 0)
    pass_cost = inequality.c * inequality.draft_passes / max(per_draft, 1e-9)
    lengths = [p.drafted for p in worst] + [0]  # rounds that drafted at least 1, 2, ...
    exact = [a - b for a, b in pairwise(lengths)]
    gains = []
    for k in range(1, len(worst) + 1):
        emitted = worst[0].drafts + sum(p.accepted for p in worst[:k])
        drafting = pass_cost * sum(lengths[:k])
        verifying = sum(n * inequality.verify[min(d, k)] for d, n in enumerate(exact, 1))
        gains.append(emitted / (drafting + verifying))
    return tuple(gains)


def _shown(ratio: Estimate) -> str:
    return f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
