"""A simulation as one HTML page, in the frame of the report's."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from layerskip.files import write_text
from layerskip.simulate import Cell, Simulation, Spread
from layerskip.telemetry.charts import Axis, Series, line_chart
from layerskip.telemetry.figures import Figure
from layerskip.telemetry.html import page
from layerskip.telemetry.tables import Table, number, seconds

TIMES = (
    ("first_token", "Time to the first token"),
    ("token", "Time of each further token"),
    ("end_to_end", "Time to the last token"),
)
DRAWN: tuple[tuple[str, str, Callable[[Cell], float]], ...] = (
    ("Tokens a second", "of the batch", lambda c: c.tokens_per_second),
    ("Further token, p50", "ms", lambda c: 1e3 * c.token.p50),
    ("Further token, p90", "ms", lambda c: 1e3 * c.token.p90),
    ("First token, p90", "ms", lambda c: 1e3 * c.first_token.p90),
)


@dataclass(frozen=True)
class Doublings(Axis):
    """Numbers of users by their logarithm to base 2."""

    @property
    def ticks(self) -> tuple[tuple[float, str], ...]:
        return tuple((float(i), str(2**i)) for i in range(int(self.low), int(self.high) + 1))


def write_page(path: str | Path, simulation: Simulation, said: Sequence[str]) -> None:
    """Write the page in one move.

    Args:
        said: sentences about what came out and what was assumed.
    """
    policies = list(dict.fromkeys(c.policy for c in simulation.cells))
    text = page(
        "simulation.html",
        num_requests=simulation.num_requests,
        seed=simulation.seed,
        said=said,
        figures=[
            _figure(simulation, title, unit, policies, [value(c) for c in simulation.cells])
            for title, unit, value in DRAWN
        ],
        tables=[_table(simulation, name, title) for name, title in TIMES],
    )
    write_text(path, text)


def _figure(
    simulation: Simulation,
    title: str,
    unit: str,
    policies: Sequence[str],
    values: Sequence[float],
) -> Figure:
    """A line for each policy over the users.

    Args:
        values: of each of the simulation's cells.
    """
    users = sorted({c.concurrency for c in simulation.cells})
    known = {(c.policy, c.concurrency): v for c, v in zip(simulation.cells, values, strict=True)}
    low, high = math.floor(math.log2(users[0])), math.ceil(math.log2(users[-1]))
    lines = [Series(p, tuple((math.log2(n), known[p, n]) for n in users)) for p in policies]
    rows = tuple((str(n), *(number(known[p, n], 1) for p in policies)) for n in users)
    spoken = "; ".join(
        f"{p} from {known[p, users[0]]:.1f} to {known[p, users[-1]]:.1f}" for p in policies
    )
    chart = line_chart(
        f"{title} ({unit}) from {users[0]} to {users[-1]} users: {spoken}.",
        lines,
        Doublings("users at a time", low, max(high, low + 1), 1.0),
        Axis.over(f"{title}, {unit}", values),
    )
    return Figure(title, chart, Table(f"{title}, {unit}", ("users", *policies), rows, frozenset()))


def _table(simulation: Simulation, name: str, title: str) -> Table:
    """Quantiles of one time, with what the batch did."""
    rows = []
    for cell in simulation.cells:
        spread: Spread = getattr(cell, name)
        rows.append(
            (
                str(cell.concurrency),
                cell.policy,
                *(seconds(t) for t in (spread.p50, spread.p90, spread.p99)),
                number(cell.tokens_per_second, 1),
                number(cell.mean_accepted_length),
                number(cell.mean_draft_tokens),
            )
        )
    columns = ("users", "policy", "p50", "p90", "p99", "tokens/s", "length", "drafted")
    return Table(title, columns, tuple(rows), frozenset({"policy"}))
