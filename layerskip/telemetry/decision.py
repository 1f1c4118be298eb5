"""Where drafting pays: from a report to a policy, by the tails and not by the means.

A user waits for one request, not for the average of all (article S2): drafting stays on where the
90 % quantile of the time until the last token falls and the request at the 10 % quantile of gain
does not lose. Where one of them says no, a cap on drafted tokens that mends it is looked for, in
the recorded rounds of the worst tenth of requests, each cut to the cap; else drafting goes off.
Rules are by task and prompt length: nobody knows a request's output length when it arrives.
"""

from layerskip.params import AUTO
from layerskip.policy import Policy, Rule
from layerskip.telemetry.report import (
    AcceptanceReport,
    BucketReport,
)

# With fewer requests than this, the chance that none of them is of the worst tenth is over 5 %.
FEWEST_REQUESTS = 29
TIE = 0.03  # losing less is none: what drafting that is left to the controller may lose at worst


def decide(report: AcceptanceReport) -> Policy:
    """A rule for each task and range of prompt lengths that was measured."""
    limit = None if report.arm == AUTO else int(report.arm)
    rules = []
    for route in report.routes:
        most, reason = _decide(route, limit)
        rules.append(Rule(route.bucket.task or "", route.bucket.prompt_tokens, most, reason))
    measured = {
        "model": report.model,
        "arm": report.arm,
        "requests": report.total.num_requests,
        **report.measured,
    }
    return Policy(tuple(rules), report.label, measured)


def _decide(route: BucketReport, limit: int | None) -> tuple[int | None, str]:
    """Most drafted tokens, and why.

    Args:
        limit: what was measured drafted no more than this; None: the controller chose.
    """
    paired, inequality = route.paired, route.inequality
    if paired is None:
        return limit, "nothing was measured without drafting (arm 0), so it is left as it was"
    if paired.num_prompts < FEWEST_REQUESTS:
        return limit, (
            f"only {paired.num_prompts} prompts; with fewer than {FEWEST_REQUESTS} the chance "
            f"that none is of the worst tenth is over 5 %"
        )
    if route.num_drafts == 0:
        return limit, "the controller drafted nothing here by itself"
    slower, faster = paired.p90.low > 1.0, paired.p90.high < 1.0
    p90 = f"the p90 latency is {_shown(paired.p90)} of plain"
    loses, p10 = _worst(paired.worst_decile, inequality)
    if faster and not loses:
        return limit, f"{p90}, and {p10}"
    if not slower and not loses:
        return limit, f"{p90}, which is no clear loss, and {p10}"
    reason = f"{p90}, {'and' if slower and loses else 'but'} {p10}"
    most, what = best_cap(route)
    return most, f"{reason}; {what}"
