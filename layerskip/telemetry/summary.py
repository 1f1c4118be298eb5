"""A runs folder in short: what each task drafted, accepted and took, by arm."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from layerskip.outputs import DecodeStats
from layerskip.policy import task_of
from layerskip.telemetry.buckets import counted_as
from layerskip.telemetry.runs import REQUEST_FIELDS, REQUESTS, damaged, read_lines, read_run

SUMMED = ("new_tokens", "num_rounds", "num_draft_tokens", "num_accepted_tokens", "decode_seconds")


def _figures(totals: DecodeStats) -> dict[str, Any]:
    """Ready for JSON; None where nothing was drafted, and where no time was taken."""
    figures = totals.to_dict()
    if not totals.num_draft_tokens:
        figures["acceptance_rate"] = None
    if not totals.decode_seconds:
        figures["tokens_per_second"] = None
    shown = (*SUMMED, "acceptance_rate", "mean_accepted_length", "tokens_per_second")
    return {"requests": totals.num_requests} | {name: figures[name] for name in shown}


@dataclass(frozen=True)
class Summary:
    """What a runs folder holds, in short.

    Attributes:
        prompts: decoded in every arm.
        equal: of them, those whose tokens are the same in all arms.
        tasks: totals by task and arm.
    """

    prompts: int
    equal: int
    tasks: Mapping[str, Mapping[str, DecodeStats]]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        tasks = {
            task: {arm: _figures(totals) for arm, totals in arms.items()}
            for task, arms in self.tasks.items()
        }
        return {"prompts": self.prompts, "equal": self.equal, "tasks": tasks}


def summarize(folder: str | Path) -> Summary:
    """Sum up a runs folder, one line at a time; prompts that some arm lacks count in the others.

    Raises:
        ValueError: the folder is no runs folder, or is damaged.
    """
    run = read_run(folder)
    tasks: dict[str, dict[str, DecodeStats]] = {}
    prompts = equal = 0
    path = Path(folder) / REQUESTS
    lines = read_lines(path, REQUEST_FIELDS)
    for _, of_prompt in groupby(lines, key=lambda line: line["prompt_index"]):
        requests = list(of_prompt)
        if len(requests) == len(run["arms"]):
            prompts += 1
            equal += len({r["tokens_sha256"] for r in requests}) == 1
        for request in requests:
            task = counted_as(task_of(request["labels"], run.get("label")), tasks)
            arms = tasks.setdefault(task, dict.fromkeys(run["arms"], DecodeStats(num_requests=0)))
            if request["arm"] not in arms:
                raise damaged(path, f"an arm {request['arm']!r}")
            one = DecodeStats(**{name: request[name] for name in SUMMED})
            arms[request["arm"]] = DecodeStats.merge((arms[request["arm"]], one))
    return Summary(prompts, equal, tasks)
