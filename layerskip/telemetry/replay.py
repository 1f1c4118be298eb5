"""From a runs folder to texts to simulate, and to what rounds take beside their passes."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerskip.cost import CostTable, differences
from layerskip.files import reason_of
from layerskip.machine_time import MachineTime
from layerskip.pass_costs import Overhead
from layerskip.telemetry.recorded_times import RecordedTimes
from layerskip.telemetry.runs import REQUESTS, ROUNDS, read_lines, read_run
from layerskip.workload import UNKNOWN, Recorded, RecordedText

# Recorded times fit a cost table whose key agrees in all but these.
VERSIONS = {"torch", "transformers", "layerskip"}
# Recorded acceptance fits one that agrees in these.
SAME_DRAFT = ("fingerprint", "draft_layers", "draft_vocabulary", "exit_adapter")


@dataclass(frozen=True)
class Replay:
    """What a runs folder tells a simulation.

    Attributes:
        recorded: requests to draw from.
        overhead: of rounds; none if the runs are of another machine than the table.
        passes_per_token: draft passes of a drafted token; below 1 where look-ups saved some.
        machine: its pace from round to round; None if the runs are of another one, or have no round
            of one row.
        of_this_table: whether recorded times count.
        differing: what else than the runs the table was measured with, in words, by the names in
            its key; empty as well where the runs do not tell.
        num_requests: that were read.
        table: the cost table, its passes ending as the runs' did: in greedy sampling, or drawing.
    """

    recorded: Recorded
    overhead: Overhead
    passes_per_token: float
    machine: MachineTime | None
    of_this_table: bool
    differing: Mapping[str, str]
    num_requests: int
    table: CostTable

    @property
    def of_another_draft(self) -> bool:
        """Whether the table's draft would have had other tokens accepted."""
        return any(name in self.differing for name in SAME_DRAFT)


def replay(folder: str | Path, table: CostTable) -> Replay:
    """Read a runs folder.

    Args:
        folder: of ``layerskip measure``.
        table: that the simulation will use. Recorded seconds count only if the runs are of the same
            model, plan and machine; acceptance always does.

    Raises:
        ValueError: there is no such folder, or nothing in it that could be simulated.
    """
    try:
        return _replay(folder, table)
    except (KeyError, TypeError, IndexError, OverflowError) as error:
        raise ValueError(
            f"{folder} has a line that is not complete ({reason_of(error)}); measure again"
        ) from None


def _replay(folder: str | Path, table: CostTable) -> Replay:
    run = read_run(folder)
    table = table.of(greedy=(run.get("sampling") or {}).get("temperature") == 0.0)
    key = dict((run.get("cost") or {}).get("key") or {})
    names = [name for name in {**table.key, **key} if name not in VERSIONS]
    differing = differences(table.key, key, names, "the runs'") if key else {}
    same = bool(key) and not differing
    requests = {
        r["request_id"]: _Request(r) for r in read_lines(Path(folder) / REQUESTS) if _whole(r)
    }
    if not requests:
        raise ValueError(f"{folder} has no finished request; run layerskip measure to its end")
    times, behind = RecordedTimes(table), list[float]()
    for line in read_lines(Path(folder) / ROUNDS):
        request = requests.get(line.get("request_id", ""))
        if request is not None:
            times.add(line, request.elapsed)
            request.add(line, behind)
    if lacking := sum(r.prefill is None for r in requests.values()):
        raise ValueError(
            f"{Path(folder) / ROUNDS} lacks the rounds of {lacking} of {len(requests)} requests; "
            "put it back, or measure again"
        )
    paces = times.paces() if same else None
    recorded = Recorded(_texts(list(requests.values()), paces), behind)
    return Replay(
        recorded,
        times.overhead if same else Overhead(),
        times.passes / max(1, times.drafted),
        times.machine if same else None,
        same,
        differing,
        len(requests),
        table,
    )


def _whole(line: Mapping[str, Any]) -> bool:
    return all(name in line for name in ("request_id", "prompt_tokens", "new_tokens"))


class _Request:
    """One recorded request while its rounds are read."""

    def __init__(self, line: Mapping[str, Any]) -> None:
        self.line = line
        self.right = np.full(line["new_tokens"], UNKNOWN, dtype=np.int8)
        self.chances = np.full(line["new_tokens"], np.nan)
        self.emitted = 0
        self.elapsed: float | None = None
        self.prefill: float | None = None

    @property
    def text(self) -> tuple[Any, ...]:
        """The same for requests with the same prompt and output: what is known of them is one."""
        line = self.line
        return line.get("prompt_index", line["request_id"]), line.get("tokens_sha256")

    def add(self, line: Mapping[str, Any], behind: list[float]) -> None:
        """The next round; chances of tokens behind a wrong one go to ``behind``."""
        emitted = line["num_emitted_tokens"]
        self.elapsed = line["elapsed_seconds"]
        if line["index"] == 0:
            self.prefill, self.emitted = line["verify_seconds"], 0
        elif line["mode"] == "early_exit":
            # What was looked up behind the draft says nothing of what an early exit would draft.
            drafted = line["num_draft_tokens"] - line.get("num_lookup_tokens", 0)
            accepted, start = min(line["num_accepted_tokens"], drafted), self.emitted
            judged = self.right[start : start + emitted]
            judged[:accepted] = 1
            if accepted < min(drafted, emitted):
                judged[accepted] = 0
            chances = line.get("chances", ())
            known = self.chances[start : start + min(accepted + 1, emitted)]
            known[: len(chances)] = chances[: len(known)]
            if accepted < emitted:  # else the end of the text cut it: nothing was found wrong
                behind += chances[accepted + 1 :]
        self.emitted += emitted


def _texts(requests: Sequence[_Request], paces: Mapping[str, float] | None) -> list[RecordedText]:
    """One for each prompt and output; arms that decoded the same tell of different tokens.

    Args:
        paces: of the machine during each request's rounds, which its prefill, just before them,
            is taken to have had, too; None: seconds do not count.
    """
    by_text: dict[tuple[Any, ...], list[_Request]] = {}
    for request in requests:
        by_text.setdefault(request.text, []).append(request)
    texts = []
    for same in by_text.values():
        first = same[0].line
        seconds = [
            r.prefill / paces.get(r.line["request_id"], 1.0)
            for r in same
            if paces is not None and r.prefill is not None
        ]
        texts.append(
            RecordedText(
                first["prompt_tokens"],
                first.get("max_new_tokens", first["new_tokens"]),
                _first_known([r.right for r in same], lambda a: a == UNKNOWN),
                _first_known([r.chances for r in same], np.isnan),
                statistics.median(seconds) if seconds else None,
            )
        )
    return texts


def _first_known(
    parts: Sequence[NDArray[Any]], unknown: Callable[[NDArray[Any]], NDArray[np.bool_]]
) -> NDArray[Any]:
    """Of each place the first part that is not ``unknown`` there."""
    found = parts[0].copy()
    for part in parts[1:]:
        found = np.where(unknown(found), part, found)
    return found
