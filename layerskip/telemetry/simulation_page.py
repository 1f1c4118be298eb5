"""A simulation as one HTML page, in the frame of the report's."""

from collections.abc import Sequence
from pathlib import Path

from layerskip.files import write_text
from layerskip.simulate import Cell, Simulation, Spread
from layerskip.telemetry.charts import Axis, Series, line_chart
from layerskip.telemetry.figures import Figure
from layerskip.telemetry.html import page
from layerskip.telemetry.tables import Table, number, seconds

TIMES = (("first_token", "First token"), ("token", "Each further token"), ("end_to_end", "End to end"))


def write_page(path: str | Path, simulation: Simulation, said: Sequence[str]) -> None:
    """Write the page in one move.

    Args:
        said: sentences about what came out and what was assumed.
    """
    write_text(path, render(simulation, said))


def render(simulation: Simulation, said: Sequence[str]) -> str:
    """The page's text."""
    policies = list(dict.fromkeys(c.policy for c in simulation.cells))
    return page(
        "simulation.html",
        num_requests=simulation.num_requests,
        seed=simulation.seed,
        said=said,
        figures=[
            _figure(simulation, "Tokens per second", "tokens/s", policies, _throughput),
            _figure(simulation, "Each further token, p50", "ms", policies, _typical),
            _figure(simulation, "Each further token, p90", "ms", policies, _late),
            _figure(simulation, "First token, p90", "ms", policies, _late_first),
        ],
        tables=[_table(simulation, name, title) for name, title in TIMES],
    )


def _throughput(cell: Cell) -> float:
    return cell.tokens_per_second


def _typical(cell: Cell) -> float:
    return 1e3 * cell.token.p50


def _late(cell: Cell) -> float:
    return 1e3 * cell.token.p90


def _late_first(cell: Cell) -> float:
    return 1e3 * cell.first_token.p90
