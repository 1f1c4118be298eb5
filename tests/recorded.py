"""Runs folders as ``layerskip measure`` writes them, made up."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layerskip.cost import CostTable, Curve

PLAIN = 0.010  # seconds
DRAFT = 0.002


def flat_cost(draft: float = DRAFT, verify: Sequence[float] = (PLAIN,) * 17) -> CostTable:
    """Costs that no context changes: of a draft pass, and of verify passes over 1, 2, ... rows."""
    rows = tuple(range(1, len(verify) + 1))
    return CostTable(
        draft_layers=Curve((1,), (0,), ((draft,),)),
        draft_head=Curve((1,), (0,), ((0.0,),)),
        verify=Curve(rows, (0,), (tuple(verify),)),
        sampling=0.0,
        row_quantum=1,
        key={},
    )


@dataclass(frozen=True)
class Request:
    """One request; without ``rounds`` it is a plain one of ``new_tokens``.

    Attributes:
        rounds: (drafted, accepted) of each; a round emits one token more than it accepted.
        seconds: of a plain pass, in this request.
        confidence: of each drafted token; None: not told.
    """

    prompt_index: int
    task: str = ""
    prompt_tokens: int = 50
    rounds: tuple[tuple[int, int], ...] = ()
    new_tokens: int | None = None
    arm: str = "auto"
    seconds: float = PLAIN
    verify_seconds: float | None = None
    ttft: float = 0.05
    labels: dict[str, str] = field(default_factory=dict)
    confidence: float | None = None

    def records(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Its line, and those of its rounds, the prefill's among them."""
        rounds = self.rounds or ((0, 0),) * ((self.new_tokens or 1) - 1)
        name = f"{self.prompt_index}/{self.arm}"
        labels = self.labels or ({"category": self.task} if self.task else {})
        lines = [_round(name, labels, 0, (0, 0), self.prompt_tokens, self.seconds, "prefill")]
        emitted = 1
        for index, (drafted, accepted) in enumerate(rounds, 1):
            mode = "early_exit" if drafted else "plain"
            context = self.prompt_tokens + emitted - 1
            line = _round(name, labels, index, (drafted, accepted), context, self.seconds, mode)
            if self.confidence is not None:
                line["confidences"] = [self.confidence] * drafted
            lines.append(line)
            emitted += accepted + 1
        lines[-1]["finish_reason"] = "length"
        decode = sum(line["draft_seconds"] + line["verify_seconds"] for line in lines[1:])
        request = {
            "request_id": name,
            "prompt_index": self.prompt_index,
            "arm": self.arm,
            "labels": labels,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": emitted,
            "max_new_tokens": emitted,
            "num_rounds": len(rounds),
            "num_draft_tokens": sum(d for d, _ in rounds),
            "num_accepted_tokens": sum(a for _, a in rounds),
            "ttft_seconds": self.ttft,
            "decode_seconds": decode,
            "e2e_seconds": self.ttft + decode,
            "finish_reason": "length",
            "tokens_sha256": f"{self.prompt_index:064x}",
            "metrics": {"speculative_decoding": {}},
        }
        others = {"arm": self.arm, "prompt_index": self.prompt_index}
        return request, [line | others for line in lines]


def _round(
    name: str,
    labels: dict[str, str],
    index: int,
    counts: tuple[int, int],
    context: int,
    plain: float,
    mode: str,
) -> dict[str, Any]:
    drafted, accepted = counts
    return {
        "request_id": name,
        "labels": labels,
        "index": index,
        "mode": mode,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "num_emitted_tokens": accepted + 1,
        "num_rejected_tokens": drafted - accepted,
        "num_draft_passes": drafted,
        "draft_seconds": drafted * plain * DRAFT / PLAIN,
        "verify_seconds": plain,
        "sample_seconds": 0.0001,
        "elapsed_seconds": 0.05 + 0.01 * index,
        "rows": 1,
        "context": context,
        "exit_layer": 2 if drafted else None,
        "stopped": "number" if drafted else "",
        "origin": "bonus" if drafted == accepted else "recovered",
        "finish_reason": None,
    }


def write_run(
    folder: Path,
    requests: Iterable[Request],
    *,
    cost: CostTable | None = None,
    unfinished: Iterable[Request] = (),
    arms: Sequence[str] = ("0", "auto"),
    label: str | None = "category",
) -> Path:
    """A folder with these requests; of ``unfinished`` ones the rounds alone."""
    folder.mkdir(exist_ok=True)
    run = {
        "version": 1,
        "model": "toy",
        "arms": list(arms),
        "label": label,
        "labels": [label] if label else [],
        "sampling": {"temperature": 0.0},
        "seed": 0,
        "max_new_tokens": 64,
        "plan": None,
        "exact": True,
        "lookup": False,
        "policy": None,
        "exit_layer": 2,
        "prompts": {"name": "traffic.jsonl", "sha256": "0" * 64, "count": 1},
        "cost": None if cost is None else cost.to_dict(),
        "versions": {"layerskip": "0"},
        "machine": {"cpu": "toy"},
        "threads": 1,
    }
    (folder / "run.json").write_text(json.dumps(run))
    with (folder / "requests.jsonl").open("w") as done, (folder / "rounds.jsonl").open("w") as all_:
        for request in requests:
            line, rounds = request.records()
            done.write(json.dumps(line) + "\n")
            all_.writelines(json.dumps(r) + "\n" for r in rounds)
        for request in unfinished:
            all_.writelines(json.dumps(r) + "\n" for r in request.records()[1])
    return folder


def pair(prompt_index: int, rounds: tuple[tuple[int, int], ...], **settings: Any) -> list[Request]:
    """One prompt with drafting and without: as many tokens."""
    on = Request(prompt_index, rounds=rounds, **settings)
    emitted = 1 + sum(accepted + 1 for _, accepted in rounds)
    return [on, Request(prompt_index, new_tokens=emitted, arm="0", **settings)]
