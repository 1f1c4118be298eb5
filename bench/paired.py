"""What the wall-clock measurements share: decodings and their clocks, ratios to plain, reports.

A machine that others use, too, is 1.5 times slower for seconds, so works that are compared take
turns within a prompt: round by round, each on its own clock (``decode_together``).
"""

import argparse
import datetime
import gc
import hashlib
import json
import math
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

import layerskip
from layerskip import (
    DecodeStats,
    Grammar,
    LookupStore,
    Round,
    SamplingParams,
    SelfSpeculativeLM,
)
from layerskip.bootstrap import bootstrap_interval
from layerskip.controller import Controller
from layerskip.cost import CostTable
from layerskip.files import write_text
from layerskip.fingerprint import device_name
from layerskip.params import NumDraftTokens
from layerskip.plan import PlanFile
from layerskip.profiling import measure_cost


@dataclass(frozen=True)
class Clock:
    """Seconds on the wall and of this process's own work, on all its threads."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> "Clock":
        return cls(time.perf_counter(), time.process_time())

    def __sub__(self, other: "Clock") -> "Clock":
        return Clock(self.wall - other.wall, self.cpu - other.cpu)

    def __add__(self, other: "Clock") -> "Clock":
        return Clock(self.wall + other.wall, self.cpu + other.cpu)


NO_TIME = Clock(0.0, 0.0)


@dataclass(frozen=True)
class Decoded:
    """One prompt decoded once.

    Attributes:
        token_ids: emitted.
        whole: the call.
        first: up to its first token; none of transformers' modes tells.
        rounds: the records, of our modes.
    """

    token_ids: tuple[int, ...]
    whole: Clock
    first: Clock = NO_TIME
    rounds: tuple[Round, ...] = ()

    @property
    def after_first(self) -> Clock:
        return self.whole - self.first

    @property
    def stats(self) -> DecodeStats:
        return DecodeStats.from_rounds(self.rounds, prompt_tokens=0, kv_cache_bytes=0)


def collected() -> None:
    """Before something is timed: no garbage is left, and what is in use is set aside.

    One full collection goes through 400,000 objects of torch and transformers. It takes as long as
    fifty tokens do (bench/LOG.md, 2026-11-25), and fell on whichever mode came next.
    """
    gc.collect()
    gc.freeze()


def by_turns(works: Mapping[str, Iterator[int]], chance: random.Random) -> dict[str, list[Clock]]:
    """Works that tell after each step how far they are; what each step took.

    Next is the one that is least far, any of those at random: all see the same machine.
    """
    laps: dict[str, list[Clock]] = {name: [] for name in works}
    far = dict.fromkeys(works, 0)
    collected()
    while far:
        name = min(far, key=lambda n: (far[n], chance.random()))
        began = Clock.now()
        reached = next(works[name], None)
        laps[name].append(Clock.now() - began)
        if reached is None:
            del far[name]
        else:
            far[name] = reached
    return laps


class _Decoding:
    """One prompt through the public stream."""

    def __init__(self, lm: SelfSpeculativeLM, arguments: Mapping[str, Any]) -> None:
        self.lm, self.arguments = lm, arguments
        self.rounds: list[Round] = []

    def __iter__(self) -> Iterator[int]:
        far = 0
        for record in self.lm.stream(**self.arguments):
            self.rounds.append(record)
            far += len(record.token_ids)
            yield far

    def decoded(self, laps: Sequence[Clock]) -> Decoded:
        tokens = tuple(token for r in self.rounds for token in r.token_ids)
        return Decoded(tokens, total(laps), laps[0], tuple(self.rounds))


def decode_together(
    prompt: Sequence[int],
    ways: Mapping[str, tuple[SelfSpeculativeLM, NumDraftTokens]],
    chance: random.Random,
    *,
    max_new_tokens: int,
    sampling: SamplingParams,
    grammar: Grammar | None = None,
) -> dict[str, Decoded]:
    """One prompt in several ways at once, by turns, with the clocks at their first tokens."""
    shared = {"prompt": prompt, "max_new_tokens": max_new_tokens, "sampling": sampling}
    shared["grammar"] = grammar
    works = {
        name: _Decoding(lm, {**shared, "num_draft_tokens": count})
        for name, (lm, count) in ways.items()
    }
    laps = by_turns({name: iter(work) for name, work in works.items()}, chance)
    return {name: work.decoded(laps[name]) for name, work in works.items()}


def decode(
    lm: SelfSpeculativeLM,
    prompt: Sequence[int],
    num_draft_tokens: NumDraftTokens,
    **settings: Any,
) -> Decoded:
    """One prompt in one way; settings as of ``decode_together``."""
    ways = {"": (lm, num_draft_tokens)}
    return decode_together(prompt, ways, random.Random(0), **settings)[""]


def sampling_at(temperature: float) -> SamplingParams:
    """Seed 0, or greedy."""
    return SamplingParams(temperature=temperature, seed=0 if temperature else None)


def wrapped(
    model: Any,
    tokenizer: Any,
    known: PlanFile | None,
    cost: CostTable | None,
    *,
    lookup: bool | LookupStore | None,
) -> SelfSpeculativeLM:
    """A decoder whose controller knows what ``known`` says, and a table measured before."""
    file = replace(known or PlanFile(None), cost=cost)
    return SelfSpeculativeLM(model, tokenizer, file, lookup=lookup)


def cost_now(lm: SelfSpeculativeLM, seconds: float) -> CostTable:
    """The decoder's cost table, measured for so long, over what its drafts are made over."""
    return measure_cost(
        lm.stack,
        lm.plan,
        draft_vocabulary=lm.plan_file.draft_vocabulary,
        head=lm.draft_head,
        seconds=seconds,
    )


def forget(lm: SelfSpeculativeLM) -> None:
    """Give ``lm`` a controller that has seen nothing, over the same table."""
    known = lm.plan_file
    lm._controller = Controller(lm.controller.cost, known.acceptance, known.calibration)


def ratios(of: Sequence[Clock], to: Sequence[Clock]) -> dict[str, Any]:
    """Medians of paired ratios ``to / of`` (above 1: ``of`` is faster), each with its interval."""
    found: dict[str, Any] = {}
    for name in ("wall", "cpu"):
        pairs = [getattr(b, name) / getattr(a, name) for a, b in zip(of, to, strict=True)]
        found[name] = statistics.median(pairs)
        found[f"{name}_ci95"] = bootstrap_interval(pairs)
    return found


def total(clocks: Sequence[Clock]) -> Clock:
    return sum(clocks, start=NO_TIME)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def quiet() -> None:
    """Transformers says nothing between our lines."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def dated(name: str) -> Path:
    """Today's file of results."""
    today = datetime.datetime.now(datetime.UTC).date()
    return Path(__file__).parent / "results" / f"{today}-{name}.json"


def part_of(record: Path) -> Path:
    """Beside a record, where no table looks: for a run that is not whole, or not yet."""
    return record.with_name(f"{record.stem}-part.json")


def as_usual(options: argparse.Namespace, parser: argparse.ArgumentParser, *names: str) -> bool:
    """Whether these options have their defaults; of a record they are part of what it shows."""
    return all(getattr(options, name) == parser.get_default(name) for name in names)


def as_many(options: argparse.Namespace, parser: argparse.ArgumentParser, *names: str) -> bool:
    """Whether these numbers are their defaults, or more."""
    return all(getattr(options, name) >= parser.get_default(name) for name in names)


def circumstances() -> dict[str, Any]:
    """Where and with what it was measured; the load says whether the wall clock means much."""
    return {
        "commit": commit(),
        "machine": device_name(torch.device("cpu")),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "versions": {
            "layerskip": layerskip.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def commit() -> str:
    """What is checked out, with a + if files differ from it, other than results."""
    try:
        told = _git("describe", "--always", "--abbrev=12", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):  # not a checkout
        return "unknown"
    return told.strip() + ("+" if changes() else "")


def changes() -> str:
    """Of tracked files, other than results, since that: the same for the same ones; "" of none."""
    try:
        told = _git("diff", "HEAD", "--", ".", ":!bench/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return hashlib.sha256(told.encode()).hexdigest()[:16] if told else ""


def _git(*arguments: str) -> str:
    folder = Path(__file__).parents[1]
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, check=True)
    return done.stdout.decode(errors="replace")


def write(path: Path, document: dict[str, Any]) -> None:
    """The whole document at once, so that a run that is broken off leaves what it had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(document) + "\n")
