"""How many rounds of live decoding it takes until drift is told.

    OMP_NUM_THREADS=1 python bench/live_drift.py --prompts traffic.jsonl

``drift.py`` counts drafts of recorded rounds, in which nobody reacts. Here automatic drafting
learns that less is accepted, and drafts less. A monitor learns from four fifths of the prompts;
then each drafted token is another one with the chance that takes half a standard deviation of
accepted tokens a draft, in several streams of prompts drawn again. Look-ups are off: they would not
be lost.
"""

import argparse
import copy
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bad_drafters import Losing
from drift import loss
from paired import circumstances, dated, quiet, sampling_at, write
from rich.console import Console

from layerskip import Round, SelfSpeculativeLM
from layerskip.params import AUTO, NumDraftTokens
from layerskip.prompts import read_prompts
from layerskip.telemetry.baseline import LEAST_REQUESTS
from layerskip.telemetry.cusum import SHIFT
from layerskip.telemetry.drift import Alarm, DriftMonitor

LONGEST = 400  # tokens of a prompt


class Stream:
    """Requests that a monitor listens to, until an alarm that less is accepted."""

    def __init__(self, monitor: DriftMonitor, alarms: Sequence[Alarm]) -> None:
        self._monitor, self._alarms = monitor, alarms
        self.rounds = self.drafts = 0
        self.accepted: list[int] = []

    @property
    def told(self) -> bool:
        return any(alarm.direction == "down" for alarm in self._alarms)

    def __call__(self, record: Round) -> None:
        if self.told:
            return
        self.rounds += 1
        if record.num_draft_tokens:
            self.drafts += 1
            self.accepted.append(record.num_accepted_tokens)
        self._monitor(record)


def followed(
    lm: SelfSpeculativeLM, prompts: Sequence[list[int]], stream: Stream, **settings: Any
) -> None:
    """Decode until the alarm, or all."""
    for prompt in prompts:
        if stream.told:
            return
        lm.generate(prompt, on_round=stream, **settings)


def measured(
    lm: SelfSpeculativeLM,
    prompts: Sequence[list[int]],
    drafted: NumDraftTokens,
    temperature: float,
    args: argparse.Namespace,
) -> dict[str, Any]:
    settings = {"num_draft_tokens": drafted, "max_new_tokens": args.tokens}
    settings["sampling"] = sampling_at(temperature)
    lm._drafter = drafter = Losing(lm)
    monitor = DriftMonitor(num_reference_requests=max(LEAST_REQUESTS, len(prompts) * 4 // 5))
    usual = Stream(monitor, [])
    followed(lm, prompts, usual, **settings)
    baseline, controller = monitor.baselines()[""], lm._controller
    lost = loss(usual.accepted, SHIFT * baseline.deviation)
    draw, found = random.Random(0), []
    for _ in range(args.streams):
        alarms: list[Alarm] = []
        monitor = DriftMonitor(baselines={"": baseline}, on_alarm=alarms.append)
        stream, drafter.lost = Stream(monitor, alarms), lost
        lm._controller = copy.deepcopy(controller)  # each stream begins with what was learnt
        followed(lm, draw.choices(prompts, k=len(prompts)), stream, **settings)
        found.append((stream.rounds, stream.drafts, stream.told))
    lm._controller = controller
    return {
        "temperature": temperature,
        "arm": str(drafted),
        "requests": len(prompts),
        "drafts_per_round": usual.drafts / usual.rounds,
        "lost": lost,
        "rounds": [rounds for rounds, *_ in found],
        "drafts": [drafts for _, drafts, _ in found],
        "told": sum(told for *_, told in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=100, help="prompts (100)")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--streams", type=int, default=9)
    parser.add_argument("--arms", default="auto,4", help="comma-separated (auto,4)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.8, 0.0])
    parser.add_argument("--out", type=Path, default=dated("live-drift"))
    args = parser.parse_args()
    quiet()
    lm, console = SelfSpeculativeLM.from_pretrained(args.model, lookup=False), Console()
    encoded = [lm.tokenizer(e.prompt)["input_ids"] for e in read_prompts(args.prompts)]
    prompts = [ids for ids in encoded if 0 < len(ids) <= LONGEST][: args.limit]
    cases = []
    for temperature in args.temperatures:
        for arm in args.arms.split(","):
            drafted = arm if arm == AUTO else int(arm)
            cases.append(measured(lm, prompts, drafted, temperature, args))
            rounds, drafts = (statistics.median(cases[-1][name]) for name in ("rounds", "drafts"))
            console.print(
                f"T {temperature:g}, {drafted}: told in {cases[-1]['told']} of {args.streams}, "
                f"after {rounds:g} rounds, {drafts:g} drafts (medians)"
            )
            write(args.out, {**circumstances(), "tokens": args.tokens, "cases": cases})


if __name__ == "__main__":
    main()
