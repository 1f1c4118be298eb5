"""What a report counts in a run's tables: rounds by kind, and some numbers of every request.

Rounds are only ever counted, by DuckDB, over files of any size. Of a request about two hundred
bytes come into memory: quantiles over requests and their intervals need every one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from layerskip.control.pass_times import CONTEXT_STEP
from layerskip.cost import CostTable
from layerskip.telemetry.records import one_row

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

FETCHED = 10_000  # rounds at a time
BINS = 200  # of a round's seconds, for each factor e: half a per cent wide

Columns = Mapping[str, npt.NDArray[np.float64]]


class Cell(NamedTuple):
    """A bucket, by task and indices of the ranges of lengths; None: any."""

    task: str | None
    prompt: int | None
    output: int | None

    def covers(self, other: "Cell") -> bool:
        """Whether all of the other's requests are in this one."""
        pairs = zip(self, other, strict=True)
        return all(own is None or own == theirs for own, theirs in pairs)


@dataclass(frozen=True, slots=True)
class RoundCount:
    """Rounds of one cell that went alike, with sums over them; ``judged`` drafted tokens were
    verified behind accepted ones only, and not behind the text's end."""

    cell: Cell
    mode: str
    stopped: str
    drafted: int
    judged: int
    accepted: int
    count: int
    passes: int
    rows: int
    context: int
    draft_seconds: float
    verify_seconds: float


@dataclass(frozen=True, slots=True)
class WorstCount:
    """Drafts that went alike, of the requests of a cell that gained least."""

    cell: Cell
    drafted: int
    judged: int
    accepted: int
    count: int


@dataclass(frozen=True, slots=True)
class BurstCount:
    """Rounds of one cell and arm that took about ``exp(bin / BINS)`` seconds."""

    cell: Cell
    is_on: bool
    bin: int
    count: int
    seconds: float


@dataclass(frozen=True)
class Tallies:
    """Everything that a report is made from.

    Attributes:
        tasks: that there are, in order; columns hold their indices.
        requests: that finished with drafting: task, prompt, output, ttft, decode, end_to_end,
            new_tokens, drafts (rounds that drafted), accepted, emitted (by these), gain.
        plain: without drafting: the first seven of these.
        pairs: prompts of both: task, prompt, output, ttft_on, ttft_off, on, off (until the last
            token), same (whether the tokens are), gain.
        rounds, worst, bursts: counts.
        num_ignored_rounds: of requests that never finished.
    """

    tasks: tuple[str, ...]
    requests: Columns
    plain: Columns
    pairs: Columns
    rounds: tuple[RoundCount, ...]
    worst: tuple[WorstCount, ...]
    bursts: tuple[BurstCount, ...]
    num_ignored_rounds: int

    def cells(self) -> list[Cell]:
        """The cells that requests with drafting are in, in order."""
        keys = np.stack([self.requests[name] for name in ("task", "prompt", "output")])
        found = np.unique(keys.astype(np.int64), axis=1).T.tolist()
        return [Cell(self.tasks[task], prompt, output) for task, prompt, output in found]

    def of(self, columns: Columns, cell: Cell) -> Columns:
        """The rows of a cell."""
        kept = np.ones(len(columns["task"]), dtype=bool)
        for name, value in (
            ("task", None if cell.task is None else self.tasks.index(cell.task)),
            ("prompt", cell.prompt),
            ("output", cell.output),
        ):
            if value is not None:
                kept &= columns[name] == value
        return {name: column[kept] for name, column in columns.items()}


def tally(database: "DuckDBPyConnection", cost: CostTable | None) -> Tallies:
    """Count the tables that ``layerskip.telemetry.records`` made.

    Args:
        cost: of passes; without it a request's gain is its accepted tokens a draft.
    """
    _price(database, cost)
    database.execute(SUMS.format(gain=GAIN if cost is not None else ACCEPTED))
    tasks = database.execute("SELECT DISTINCT task_number, task FROM requests ORDER BY 1")
    return Tallies(
        tasks=tuple(task for _, task in tasks.fetchall()),
        requests=_columns(database, ON),
        plain=_columns(database, OFF),
        pairs=_columns(database, PAIRS),
        rounds=tuple(RoundCount(Cell(*a[:3]), *a[3:]) for a in _rows(database, ROUNDS)),
        worst=tuple(WorstCount(Cell(*a[:3]), *a[3:]) for a in _rows(database, WORST)),
        bursts=tuple(BurstCount(Cell(*a[:3]), *a[3:]) for a in _rows(database, BURSTS)),
        num_ignored_rounds=one_row(database, IGNORED)[0],
    )


def drafts_in_order(database: "DuckDBPyConnection") -> Iterator[dict[str, Any]]:
    """Rounds with drafting one by one, as ``find_drift`` takes them, with the label "task": those
    of a request together, requests in the order in which they ended."""
    found = database.execute(IN_ORDER)
    while lines := found.fetchmany(FETCHED):
        for request, task, mode, drafted, accepted, confidences, reason in lines:
            yield {
                "request_id": request,
                "labels": {"task": task},
                "mode": mode,
                "num_draft_tokens": drafted,
                "num_accepted_tokens": accepted,
                "confidences": confidences,
                "finish_reason": reason,
            }


def _rows(database: "DuckDBPyConnection", query: str) -> list[tuple[Any, ...]]:
    return database.execute(query).fetchall()


def _columns(database: "DuckDBPyConnection", query: str) -> Columns:
    found = database.execute(query).fetchnumpy()
    return {name: np.asarray(column, dtype=np.float64) for name, column in found.items()}


def _price(database: "DuckDBPyConnection", cost: CostTable | None) -> None:
    """A table of what rounds of each kind cost, and a plain one in their place, in seconds."""
    kinds = _rows(database, "SELECT DISTINCT rows, drafted, place FROM rounds WHERE is_on")
    columns: dict[str, list[float]] = {
        name: [] for name in ("rows", "drafted", "place", "plain", "draft", "verify")
    }
    for rows, drafted, place in kinds if cost is not None else []:
        assert cost is not None
        context = (place + 0.5) * CONTEXT_STEP
        plain = cost.verify_pass(rows, context, sequences=rows)
        draft = cost.draft_pass(rows, context, sequences=rows)
        verify = cost.verify_pass((drafted + 1) * rows, context, sequences=rows)
        line = (rows, drafted, place, plain, draft, verify)
        for column, value in zip(columns.values(), line, strict=True):
            column.append(value)
    listed = ", ".join(f"unnest(${name}) AS {name}" for name in columns)
    database.execute(f"CREATE TABLE prices AS SELECT {listed}", columns)


IN_ORDER = """
    SELECT request_id, task, mode, drafted, accepted, confidences,
        CASE WHEN is_last THEN 'ended' END
    FROM rounds JOIN requests ON number = request WHERE rounds.is_on ORDER BY number, index
"""
IGNORED = "SELECT count(*) FROM rounds WHERE request IS NULL"
ACCEPTED = "sum(accepted) / greatest(1, count(*) FILTER (drafted > 0))"
GAIN = "sum(emitted * plain) / sum(passes * draft + verify)"
SUMS = """
    CREATE TABLE sums AS
    SELECT number, coalesce(drafts, 0) AS drafts, coalesce(accepted, 0) AS accepted,
        coalesce(emitted, 0) AS emitted, coalesce(gain, 1) AS gain
    FROM requests LEFT JOIN (
        SELECT request AS number, count(*) FILTER (drafted > 0) AS drafts,
            sum(accepted) AS accepted, sum(emitted) FILTER (drafted > 0) AS emitted,
            {gain} AS gain
        FROM rounds LEFT JOIN prices USING (rows, drafted, place)
        WHERE is_on AND request IS NOT NULL GROUP BY request
    ) USING (number) WHERE is_on
"""
TIMES = "ttft_seconds AS ttft, decode_seconds AS decode, e2e_seconds AS end_to_end, new_tokens"
ON = f"""
    SELECT task_number AS task, prompt, output, {TIMES}, drafts, accepted, emitted, gain
    FROM requests JOIN sums USING (number) ORDER BY number
"""
OFF = f"""
    SELECT task_number AS task, prompt, output, {TIMES}
    FROM requests WHERE NOT is_on ORDER BY number
"""
PAIRS = """
    SELECT a.task_number AS task, a.prompt, a.output, a.ttft_seconds AS ttft_on,
        b.ttft_seconds AS ttft_off, a.e2e_seconds AS "on", b.e2e_seconds AS off,
        coalesce(a.tokens_sha256 = b.tokens_sha256, false) AS same, gain
    FROM requests AS a JOIN requests AS b USING (prompt_index) JOIN sums ON sums.number = a.number
    WHERE a.is_on AND NOT b.is_on ORDER BY a.number
"""
ROUNDS = """
    SELECT task, prompt, output, mode, coalesce(stopped, ''), drafted, judged, accepted, count(*),
        sum(passes)::BIGINT, sum(rows)::BIGINT, sum(context)::BIGINT, sum(draft_seconds),
        sum(verify_seconds)
    FROM rounds JOIN requests ON number = request WHERE rounds.is_on GROUP BY ALL ORDER BY ALL
"""
BURSTS = f"""
    SELECT task, prompt, output, rounds.is_on,
        round({BINS} * ln(greatest(draft_seconds + verify_seconds, 1e-9)))::INTEGER AS bin,
        count(*), sum(draft_seconds + verify_seconds)
    FROM rounds JOIN requests ON number = request GROUP BY ALL ORDER BY ALL
"""
WORST = """
    WITH ranked AS (
        SELECT number, task, prompt, output,
            row_number() OVER by_bucket <= greatest(1, count(*) OVER all_of_bucket // 10) AS bucket,
            row_number() OVER by_route <= greatest(1, count(*) OVER all_of_route // 10) AS route,
            row_number() OVER by_gain <= greatest(1, count(*) OVER () // 10) AS total
        FROM requests JOIN sums USING (number)
        WINDOW by_bucket AS (PARTITION BY task, prompt, output ORDER BY gain, number),
            all_of_bucket AS (PARTITION BY task, prompt, output),
            by_route AS (PARTITION BY task, prompt ORDER BY gain, number),
            all_of_route AS (PARTITION BY task, prompt),
            by_gain AS (ORDER BY gain, number)
    ), worst AS (
        SELECT number, task, prompt, output FROM ranked WHERE bucket
        UNION ALL SELECT number, task, prompt, NULL FROM ranked WHERE route
        UNION ALL SELECT number, NULL, NULL, NULL FROM ranked WHERE total
    )
    SELECT task, prompt, output, drafted, judged, accepted, count(*)
    FROM rounds JOIN worst ON number = request WHERE drafted > 0 GROUP BY ALL ORDER BY ALL
"""
