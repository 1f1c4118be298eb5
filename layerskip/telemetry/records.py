"""A runs folder as tables of a database on the disk, which the figures of a report come from.

DuckDB reads the lines as a stream and keeps a few numbers of each in a temporary file, so that the
records may be larger than memory.
"""

import glob
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerskip.control.pass_times import CONTEXT_STEP
from layerskip.telemetry import runs
from layerskip.telemetry.buckets import Lengths

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

PLAIN_ARM = "0"
MEMORY = "1GB"  # that DuckDB may use; the rest goes through the disk
REQUESTS = {
    "request_id": "VARCHAR",
    "prompt_index": "BIGINT",
    "arm": "VARCHAR",
    "labels": "MAP(VARCHAR, VARCHAR)",
    "prompt_tokens": "BIGINT",
    "new_tokens": "BIGINT",
    "num_rounds": "BIGINT",
    "ttft_seconds": "DOUBLE",
    "decode_seconds": "DOUBLE",
    "e2e_seconds": "DOUBLE",
    "tokens_sha256": "VARCHAR",
}
ROUNDS = {
    "request_id": "VARCHAR",
    "index": "INTEGER",
    "mode": "VARCHAR",
    "num_draft_tokens": "INTEGER",
    "num_accepted_tokens": "INTEGER",
    "num_emitted_tokens": "INTEGER",
    "num_draft_passes": "INTEGER",
    "draft_seconds": "DOUBLE",
    "verify_seconds": "DOUBLE",
    "rows": "INTEGER",
    "context": "INTEGER",
    "confidences": "DOUBLE[]",
    "stopped": "VARCHAR",
    "finish_reason": "VARCHAR",
}


@dataclass(frozen=True)
class MeasuredRun:
    """What a folder's ``run.json`` says.

    Attributes:
        folder: where it lies.
        content: of the file.
        arm: the one that drafts, of those that were measured.
    """

    folder: Path
    content: Mapping[str, Any]
    arm: str

    @property
    def label(self) -> str | None:
        """Name of the field that tells tasks apart."""
        return self.content.get("label")


def measured_run(folder: str | Path, arm: str | None) -> MeasuredRun:
    """A runs folder that ``layerskip measure`` wrote.

    Args:
        arm: whose drafting is reported on; None: "auto" if it was measured, else the only one.

    Raises:
        ValueError: it is no runs folder, lacks a file, or has no such arm.
    """
    folder = Path(folder)
    content = runs.read_run(folder)
    if set(str(folder)) & set("*?["):  # DuckDB would look for other folders like it
        raise ValueError(f"{folder} has a name that stands for several: rename it, without * ? [")
    for name in (runs.REQUESTS, runs.ROUNDS):
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder} cannot be read: it has no {name}, which `layerskip measure` wrote "
                f"beside {runs.RUN}; put it back, or measure again"
            )
    arms = content.get("arms")
    if not isinstance(arms, list) or not all(isinstance(name, str) for name in arms):
        raise ValueError(f"{folder}/run.json must list its arms as texts, got {arms!r}")
    return MeasuredRun(folder, content, _chosen(folder, arms, arm))


def _chosen(folder: Path, arms: list[str], arm: str | None) -> str:
    drafting = [name for name in arms if name != PLAIN_ARM]
    if not drafting:
        raise ValueError(f"{folder} measured nothing that drafts (its only arm is {PLAIN_ARM})")
    if arm is None and "auto" in drafting:
        return "auto"
    if arm is None and len(drafting) == 1:
        return drafting[0]
    if arm is None or arm not in drafting:
        got = "name one of them" if arm is None else f"{arm!r} is none of them"
        raise ValueError(f"{folder} has the drafting arms {', '.join(drafting)}; {got}")
    return arm


@contextmanager
def opened(
    run: MeasuredRun, prompts: tuple[Lengths, ...], outputs: tuple[Lengths, ...]
) -> "Iterator[DuckDBPyConnection]":
    """A database with the run's finished requests and their rounds.

    Its tables: ``requests``, with ``number``, in the order in which they ended; ``is_on``, true of
    the arm that drafts, false of the plain one, NULL of others; ``task`` with ``task_number``; and
    ``prompt`` and ``output``, the indices of the ranges that they lie in. ``rounds`` of both arms
    without prefills, with ``request``, the number of theirs, NULL where it never finished.

    Raises:
        ValueError: DuckDB is not installed, a file is missing or damaged, or the disk is full.
    """
    try:
        import duckdb
    except ImportError:
        raise ValueError(
            'reports need DuckDB, which is not installed: pip install "layerskip[report]"'
        ) from None
    with tempfile.TemporaryDirectory(prefix="layerskip-report-") as scratch:
        settings: dict[str, str | bool | int | float | list[str]] = {
            "memory_limit": MEMORY,
            "temp_directory": scratch,
            "autoinstall_known_extensions": False,
        }
        try:
            with duckdb.connect(f"{scratch}/records.duckdb", config=settings) as database:
                database.execute("SET enable_progress_bar = false")
                _load_requests(database, run, prompts, outputs)
                _load_rounds(database, run.folder)
                yield database
        except RuntimeError as error:  # what DuckDB makes of Ctrl-C, which is none of its errors
            if "interrupted" not in str(error):
                raise
            raise KeyboardInterrupt from None
        except duckdb.Error as error:
            what = f"{run.folder} cannot be read"
            if scratch in str(error):  # what could not be written lies there
                what = (
                    f"a report needs room for its tables in {Path(scratch).parent} "
                    f"(free some, or set TMPDIR to another folder)"
                )
            first_line = str(error).strip().partition("\n")[0]
            raise ValueError(f"{what}: {first_line}") from None


def _load_requests(
    database: "DuckDBPyConnection",
    run: MeasuredRun,
    prompts: tuple[Lengths, ...],
    outputs: tuple[Lengths, ...],
) -> None:
    task = "''" if run.label is None else "coalesce(labels[$label], '')"
    given = {"path": _place(run.folder, runs.REQUESTS), "arm": run.arm, "plain": PLAIN_ARM}
    given |= {} if run.label is None else {"label": run.label}
    database.execute(
        f"""
        CREATE TABLE requests AS
        SELECT number, request_id, prompt_index,
            CASE arm WHEN $arm THEN true WHEN $plain THEN false END AS is_on,
            {task} AS task,
            {_range_of("prompt_tokens", prompts)} AS prompt,
            {_range_of("new_tokens", outputs)} AS output,
            new_tokens, num_rounds, ttft_seconds, decode_seconds, e2e_seconds, tokens_sha256,
            {_is_broken(REQUESTS, {"labels", "tokens_sha256"})} AS broken
        FROM (SELECT row_number() OVER () AS number, * FROM {_source(REQUESTS)})
        """,
        given,
    )
    _drop_broken(database, "requests", run.folder)
    database.execute(  # without what was dropped: no number is left out
        """
        CREATE OR REPLACE TABLE requests AS
        SELECT *, dense_rank() OVER (ORDER BY task) - 1 AS task_number FROM requests
        ORDER BY number
        """
    )
    (again,) = one_row(database, "SELECT count(*) - count(DISTINCT request_id) FROM requests")
    if again:
        raise ValueError(f"{run.folder}/requests.jsonl has {again} requests more than once")


def _load_rounds(database: "DuckDBPyConnection", folder: Path) -> None:
    database.execute("SET preserve_insertion_order = false")  # takes less memory
    database.execute(
        f"""
        CREATE TABLE rounds AS
        SELECT number AS request, index, is_on, mode, stopped, rows,
            num_draft_tokens AS drafted, num_accepted_tokens AS accepted,
            num_emitted_tokens AS emitted, num_draft_passes AS passes,
            -- What was judged: not what a round drafted behind the end of the text.
            least(num_draft_tokens, num_accepted_tokens
                  + (num_emitted_tokens > num_accepted_tokens)::INTEGER) AS judged,
            context, context // {CONTEXT_STEP} AS place, draft_seconds, verify_seconds,
            confidences, finish_reason IS NOT NULL AS is_last,
            {_is_broken(ROUNDS, {"confidences", "stopped", "finish_reason"})} AS broken
        FROM {_source(ROUNDS)} LEFT JOIN requests USING (request_id)
        WHERE (index > 0 OR index IS NULL) AND (number IS NULL OR is_on IS NOT NULL)
        """,
        {"path": _place(folder, runs.ROUNDS)},
    )
    _drop_broken(database, "rounds", folder)
    (differing,) = one_row(
        database,
        """
        SELECT count(*) FROM requests
        LEFT JOIN (SELECT request, count(*) AS found FROM rounds GROUP BY request) AS counted
            ON counted.request = requests.number
        WHERE is_on IS NOT NULL AND coalesce(found, 0) <> num_rounds
        """,
    )
    if differing:
        raise ValueError(
            f"{folder}/rounds.jsonl has not the rounds that requests.jsonl counts, "
            f"for {differing} requests; measure again into another folder"
        )


def _place(folder: Path, name: str) -> str:
    """A file's path for DuckDB: whole, for it takes a folder "~" for the user's own."""
    return glob.escape(str((folder / name).absolute()))


def _source(columns: Mapping[str, str]) -> str:
    """Lines of the file ``$path``; what cannot be read in them is NULL."""
    typed = ", ".join(f"{name}: '{kind}'" for name, kind in columns.items())
    form = "format = 'newline_delimited', ignore_errors = true"
    form += ", hive_partitioning = false"  # "arm=auto" in the path is no column
    return f"read_json($path, {form}, columns = {{{typed}}})"


def _is_broken(columns: Mapping[str, str], optional: set[str]) -> str:
    lacking = [f"{name} IS NULL" for name in columns if name not in optional]
    endless = [f"NOT isfinite({name})" for name, kind in columns.items() if kind == "DOUBLE"]
    return " OR ".join([*lacking, *endless])


def _range_of(column: str, ranges: tuple[Lengths, ...]) -> str:
    """Index of the range that the column's value lies in."""
    if len(ranges) == 1:
        return "0"
    cases = " ".join(
        f"WHEN {column} < {high} THEN {i}" for i, (_, high) in enumerate(ranges) if high is not None
    )
    return f"CASE {cases} ELSE {len(ranges) - 1} END"


def _drop_broken(database: "DuckDBPyConnection", table: str, folder: Path) -> None:
    """Forget a last line that was cut off by a kill; any other damage is an error."""
    path = folder / (runs.ROUNDS if table == "rounds" else runs.REQUESTS)
    (broken,) = one_row(database, f"SELECT count(*) FROM {table} WHERE broken")
    with path.open("rb") as file:
        cut_off = runs.whole_lines(file) < file.seek(0, os.SEEK_END)
    if broken > cut_off:
        raise ValueError(f"{path} is damaged: {broken} of its lines are no records of {table}")
    database.execute(f"DELETE FROM {table} WHERE broken")


def one_row(database: "DuckDBPyConnection", query: str) -> tuple[Any, ...]:
    """The only row of a query's result."""
    row = database.execute(query).fetchone()
    assert row is not None
    return row
