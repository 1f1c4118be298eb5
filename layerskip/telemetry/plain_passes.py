"""What drafting takes, in plain passes of as many rows as share its rounds."""

from layerskip.control.pass_times import SHORTEST
from layerskip.cost import CostTable


def in_plain_passes(
    cost: CostTable, context: float, rows: float, most_drafted: int
) -> tuple[float, tuple[float, ...]]:
    """A draft pass, and verify passes over 1, 2, 3, ... tokens of each row.

    Args:
        context: slots that a row holds, on the average.
        rows: that share a round, on the average: a token each in a draft pass and in a plain one.
        most_drafted: tokens of a draft, of the last verify pass.
    """
    together = max(1, round(rows))
    plain = max(cost.verify_pass(together, context, sequences=together), SHORTEST)
    verify = tuple(
        cost.verify_pass(tokens * together, context, sequences=together) / plain
        for tokens in range(1, most_drafted + 2)
    )
    return cost.draft_pass(together, context, sequences=together) / plain, verify
