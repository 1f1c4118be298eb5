"""What recording rounds costs: each sink by itself, and decoding with one against without.

    OMP_NUM_THREADS=1 python bench/recording_cost.py

The clock is the process's CPU time, in which other processes do not count (writing lines is part
of it; waiting for a disk is not, and no sink waits). A sink by itself: the same rounds again and
again, the best of several turns, over the quickest round. With against without: the same prompts in
turn, medians of paired ratios, beside the ratio of without to without, which says what the method
cannot see.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paired import as_many, as_usual, circumstances, dated, part_of, write
from prometheus_client import CollectorRegistry

from layerskip import Round, SelfSpeculativeLM
from layerskip.bootstrap import bootstrap_interval
from layerskip.checkpoint import held_out_modules
from layerskip.params import NumDraftTokens
from layerskip.prompts import held_out_code
from layerskip.telemetry.drift import DriftMonitor
from layerskip.telemetry.sinks import JsonlSink, MemorySink, PrometheusSink

DRAFTED: tuple[NumDraftTokens, ...] = (0, 5, "auto")
Sink = Callable[[Round], None]


def loaded(args: argparse.Namespace) -> tuple[SelfSpeculativeLM, list[list[int]]]:
    lm = SelfSpeculativeLM.from_pretrained(args.model, num_draft_tokens=0)
    examples = held_out_code(held_out_modules(), args.limit)
    return lm, [lm.encode(e.prompt)[-args.context :] for e in examples]


def seconds_per_round(
    lm: SelfSpeculativeLM,
    prompt: list[int],
    drafted: NumDraftTokens,
    tokens: int,
    **recording: Any,
) -> float:
    """CPU seconds of a decoding over its rounds, its prefill among both."""
    began = time.process_time()
    out = lm.generate(
        prompt, max_new_tokens=tokens, num_draft_tokens=drafted, ignore_eos=True, **recording
    )
    return (time.process_time() - began) / len(out.rounds)


@contextmanager
def sinks() -> Iterator[dict[str, Sink]]:
    counter = PrometheusSink(CollectorRegistry(), label="task")
    with tempfile.TemporaryDirectory() as folder, JsonlSink(f"{folder}/rounds.jsonl") as file:
        drift = DriftMonitor(label="task", num_reference_requests=20)
        yield {"memory": MemorySink(), "jsonl": file, "prometheus": counter, "drift": drift}


def alone(sink: Sink, rounds: Sequence[Round], turns: int) -> float:
    """CPU seconds of one call."""
    best = float("inf")
    for _ in range(turns):
        began = time.process_time()
        for record in rounds:
            sink(record)
        best = min(best, (time.process_time() - began) / len(rounds))
    return best


def measured(args: argparse.Namespace) -> dict[str, Any]:
    lm, prompts = loaded(args)
    found: dict[str, Any] = {}
    for drafted in DRAFTED:
        with sinks() as named:
            found[str(drafted)] = by_sink(lm, prompts, named, drafted, args)
    return found


def by_sink(
    lm: SelfSpeculativeLM,
    prompts: list[list[int]],
    named: dict[str, Sink],
    drafted: NumDraftTokens,
    args: argparse.Namespace,
) -> dict[str, Any]:
    every: dict[str, Sink | None] = {"nothing": None, **named}
    seconds_per_round(lm, prompts[0], drafted, args.tokens)
    pairs: dict[str, list[float]] = {name: [] for name in every}
    base: list[float] = []
    for turn, prompt in enumerate(prompts * args.turns):
        for name in list(every)[:: 1 if turn % 2 else -1]:
            recording = {"on_round": every[name], "labels": {"task": "code"}}
            plain = seconds_per_round(lm, prompt, drafted, args.tokens)
            recorded = seconds_per_round(lm, prompt, drafted, args.tokens, **recording)
            pairs[name].append(recorded / plain)
            base.append(plain)
    rounds: list[Round] = []
    lm.generate(
        prompts[0],
        max_new_tokens=args.tokens,
        num_draft_tokens=drafted,
        labels={"task": "code"},
        on_round=rounds.append,  # listened to, they tell all
    )
    calls = {name: alone(sink, rounds * 20, 5) for name, sink in named.items()}
    return {
        "seconds_per_round": min(base),
        "seconds_per_call": calls,
        "share_of_a_round": {name: seconds / min(base) for name, seconds in calls.items()},
        "with_over_without": {name: interval(ratios) for name, ratios in pairs.items()},
    }


def interval(ratios: Sequence[float]) -> list[float]:
    """Median, and its 95 % bootstrap interval."""
    return [statistics.median(ratios), *bootstrap_interval(ratios)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--limit", type=int, default=6, help="prompts")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--context", type=int, default=256, help="most tokens of a prompt")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--out", type=Path, help="default: the day's record, of as many rounds")
    args, record = parser.parse_args(), dated("recording-cost")
    document = {"num_draft_tokens": measured(args), **circumstances()}
    print(json.dumps(document, indent=1))
    usual = as_usual(args, parser, "model", "context")
    whole = usual and as_many(args, parser, "limit", "tokens", "turns")
    write(args.out or (record if whole else part_of(record)), document)


if __name__ == "__main__":
    main()
