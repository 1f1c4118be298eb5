"""Section ``recording`` of ``bench/gpu_bench.py``: what a graph takes to record, and saves."""

import copy
import dataclasses
import statistics
import time

from gpu.decoding import AUTO, MOST_DRAFTED
from gpu.frame import Found
from gpu.lab import Lab, label
from gpu.models import Loaded
from gpu.overlap import tokens_of
from gpu.timing import decode, in_turns, synchronize
from layerskip.graphs import Function, Recorder, Recording
from layerskip.rounds import open_bench

DRAFTED = (0, 1, MOST_DRAFTED)
NEVER = 1 << 60
BY_HOST, REPLAYED = "by the host", "replayed"


class Clocked:
    """A recorder whose recordings are timed.

    Args:
        recorder: makes them.
        patience: as of ``Recorder``; None: the recorder's own.

    Attributes:
        seconds: of each recording.
    """

    def __init__(self, recorder: Recorder, patience: int | None) -> None:
        self._recorder = recorder
        self.patience = recorder.patience if patience is None else patience
        self.seconds: list[float] = []

    def record(self, function: Function) -> Recording:
        synchronize()
        began = time.perf_counter()
        made = self._recorder.record(function)
        synchronize()
        self.seconds.append(time.perf_counter() - began)
        return made


def recording(lab: Lab, found: Found, until: float) -> None:
    """Rounds by the host and replayed, ms of a recording, and a first text with "auto" over plain
    decoding that has its graph: what recording costs, and waiting for it."""
    lab.each(found, until, lambda *model: one_model(lab, *model))


def one_model(lab: Lab, loaded: Loaded, entry: Found, end: float) -> None:
    if loaded.lm._bench is None:
        entry["left_out"] = loaded.lm.rounds_choice
        return
    lab.usual(loaded)
    ids = [lab.prompt(loaded, lab.extent.prompt)]
    sides = {BY_HOST: NEVER, REPLAYED: None}
    clocked: dict[str, list[Clocked]] = {side: [] for side in sides}
    benches = {side: anew(loaded, p, clocked[side]) for side, p in sides.items()}

    def seconds(side: str, drafted: int) -> float:
        run = decode(benches[side].lm, ids, drafted, tokens_of(lab, drafted))
        return run.seconds / run.num_passes

    rounds = {
        f"{side} {k}": lambda side=side, k=k: seconds(side, k) for side in sides for k in DRAFTED
    }

    def first(drafted: str | int) -> float:
        """Of a token of a text whose rounds were not recorded before."""
        return decode(anew(loaded, None, []).lm, ids, drafted, lab.extent.tokens).seconds_per_token

    def plain() -> float:
        run = decode(benches[REPLAYED].lm, ids, 0, lab.extent.tokens)
        return run.seconds_per_token

    kinds = rounds | {"first, auto": lambda: first(AUTO), "first, plain": lambda: first(0)}
    run = in_turns(kinds | {"plain": plain}, end, repeats=lab.extent.repeats)
    for k in DRAFTED:
        entry[f"k={k}"] = {side: run.summary(f"{side} {k}", 1e3) for side in sides}
    taken = [seconds for one in clocked[REPLAYED] for seconds in one.seconds]
    entry["ms_to_record"] = {
        "median": 1e3 * statistics.median(taken) if taken else None,
        "recordings": len(taken),
    }
    entry["first_text"] = {
        "automatic": run.ratio("plain", "first, auto"),
        "plain": run.ratio("plain", "first, plain"),
    }
    entry |= {"complete": run.complete, **label(loaded, lab.extent.acceptances[1])}


def anew(loaded: Loaded, patience: int | None, made: list[Clocked]) -> Loaded:
    """The same model with no round recorded; its recorders go into ``made``."""
    lm = copy.copy(loaded.lm)
    lm._bench, _ = open_bench(lm.stack, lm.plan, lm._head)
    assert lm._bench is not None
    make_recorder = lm._bench._make_recorder

    def clocked() -> Clocked:
        made.append(Clocked(make_recorder(), patience))
        return made[-1]

    lm._bench._make_recorder = clocked
    return dataclasses.replace(loaded, lm=lm)
