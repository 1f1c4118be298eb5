"""A runs folder in short: what each task drafted, accepted and took, by arm."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from layerskip.policy import task_of
from layerskip.telemetry.buckets import counted_as
from layerskip.telemetry.runs import REQUEST_FIELDS, REQUESTS, damaged, read_lines, read_run


@dataclass
class Totals:
    """Sums over the requests of one task in one arm."""

    requests: int = 0
    new_tokens: int = 0
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    decode_seconds: float = 0.0

    def add(self, request: Mapping[str, Any]) -> None:
        self.requests += 1
        self.new_tokens += request["new_tokens"]
        self.num_rounds += request["num_rounds"]
        self.num_draft_tokens += request["num_draft_tokens"]
        self.num_accepted_tokens += request["num_accepted_tokens"]
        self.decode_seconds += request["decode_seconds"]

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted; None if nothing was drafted."""
        drafted = self.num_draft_tokens
        return self.num_accepted_tokens / drafted if drafted else None

    @property
    def mean_accepted_length(self) -> float:
        """1 + accepted / rounds."""
        return 1.0 + self.num_accepted_tokens / max(1, self.num_rounds)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after each request's first, over the time after it; None without any."""
        later = self.new_tokens - self.requests
        return later / self.decode_seconds if self.decode_seconds else None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self) | {
            "acceptance_rate": self.acceptance_rate,
            "mean_accepted_length": self.mean_accepted_length,
            "tokens_per_second": self.tokens_per_second,
        }


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
    tasks: Mapping[str, Mapping[str, Totals]]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        tasks = {
            task: {arm: totals.to_dict() for arm, totals in arms.items()}
            for task, arms in self.tasks.items()
        }
        return {"prompts": self.prompts, "equal": self.equal, "tasks": tasks}


def summarize(folder: str | Path) -> Summary:
    """Sum up a runs folder, one line at a time; prompts that some arm lacks count in the others.

    Raises:
        ValueError: the folder is no runs folder, or is damaged.
    """
    run = read_run(folder)
    tasks: dict[str, dict[str, Totals]] = {}
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
            arms = tasks.setdefault(task, {arm: Totals() for arm in run["arms"]})
            if request["arm"] not in arms:
                raise damaged(path, f"an arm {request['arm']!r}")
            arms[request["arm"]].add(request)
    return Summary(prompts, equal, tasks)
