"""Sections of ``bench/gpu_bench.py``: what a graph takes to record, and saves; bare passes."""

import random
import statistics
import time
from functools import partial

import torch

from gpu.decoding import AUTO, MOST_DRAFTED
from gpu.frame import Found
from gpu.lab import Lab, label
from gpu.models import Loaded, with_rounds_of_its_own
from gpu.overlap import tokens_of
from gpu.timing import NO_TIME, Decoded, decode, in_turns, synchronize
from layerskip import SelfSpeculativeLM
from layerskip.bare_passes import Grid
from layerskip.cost import NUM_SEQUENCES
from layerskip.graphs import Function, Recorder, Recording
from layerskip.profiling import _passes

DRAFTED = (0, 1, MOST_DRAFTED)
NEVER = 1 << 60
LOADED, WARMED = "auto, as loaded", "auto, recorded ahead"
FIRSTS = (AUTO, LOADED, WARMED, "plain")
UNRECORDED, REPLAYED = "unrecorded", "replayed"
TOKENS, TIMINGS = (1, 2, 4, 8, 9, 16, 17, 24, 32, 33, 48, 64), 9


class Clocked:
    """A recorder whose recordings are timed.

    Args:
        recorder: makes them.
        patience: as of ``GraphRecorder``; None: the recorder's own.

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
    """Rounds unrecorded and replayed, what a recording takes over what it saves a round, and plain
    decoding that has its graph over a first text with "auto": with no round recorded, with those
    that a controller comes with, and after a warm-up."""
    lab.each(found, until, lambda *model: one_model(lab, *model))


def one_model(lab: Lab, loaded: Loaded, entry: Found, end: float) -> None:
    if loaded.lm._bench is None:
        entry["left_out"] = loaded.lm.rounds_choice
        return
    lab.usual(loaded)
    _ = loaded.lm.controller  # its cost table is measured once, for all turns
    ids = [lab.prompt(loaded, lab.extent.prompt)]
    made: dict[int, list[Clocked]] = {k: [] for k in DRAFTED}
    lms = {(UNRECORDED, k): anew(loaded, NEVER, []) for k in DRAFTED}
    lms |= {(REPLAYED, k): anew(loaded, None, made[k]) for k in DRAFTED}

    def a_round(side: str, k: int) -> float:
        run = decode(lms[side, k], ids, k, tokens_of(lab, k))
        return run.seconds / run.num_passes

    last: dict[str, Decoded] = {}
    before: dict[str, list[float]] = {LOADED: [], WARMED: []}

    def first(what: str) -> float:
        """Of a token of a new decoder's first text."""
        lm, drafted = anew(loaded, None, []), 0 if what == "plain" else AUTO
        if what in before:
            slots = None if what == LOADED else len(ids[0]) + lab.extent.tokens
            before[what].append(warmed(lm, slots))
        last[what] = decode(lm, ids, drafted, lab.extent.tokens)
        return last[what].seconds_per_token

    def plain() -> float:
        return decode(lms[REPLAYED, 0], ids, 0, lab.extent.tokens).seconds_per_token

    kinds = {f"{side} {k}": partial(a_round, side, k) for side, k in lms}
    # First texts are to find nothing warm but kernels, which the controller has run.
    cold = {f"first {what}": partial(first, what) for what in FIRSTS} | {"plain": plain}
    run = in_turns(kinds | cold, end, repeats=lab.extent.repeats, warm_ups=dict.fromkeys(cold, 0))
    for k in DRAFTED:
        entry[f"k={k}"] = {side: run.summary(f"{side} {k}", 1e3) for side in (UNRECORDED, REPLAYED)}
        saved = run.median(f"{UNRECORDED} {k}") - run.median(f"{REPLAYED} {k}")
        entry[f"k={k}"] |= recordings([s for one in made[k] for s in one.seconds], saved)
    entry["first_text"] = {what: run.ratio("plain", f"first {what}") for what in FIRSTS}
    for what, name in ((LOADED, "seconds_of_a_load"), (WARMED, "seconds_to_warm_up")):
        entry[name] = statistics.median(before[what]) if before[what] else float("nan")
    rate = last[AUTO].acceptance_rate if AUTO in last else float("nan")
    entry |= {**run.extent, **label(loaded, rate)}


def warmed(lm: SelfSpeculativeLM, num_slots: int | None) -> float:
    """Seconds that its rounds with "auto", of one row and up to so many slots, take to record;
    None: as its controller has them recorded when it is made."""
    synchronize()
    began = time.perf_counter()
    if num_slots is None:
        lm._record_ahead()
    else:
        lm.warm_up(num_slots=num_slots, num_draft_tokens=AUTO)
    synchronize()
    return time.perf_counter() - began


@torch.inference_mode()
def passes(lab: Lab, found: Found, until: float) -> None:
    """What passes of many tokens take, beside what the table says by which "auto" decides: products
    go by 8, 16, 32 and 64 tokens, and a quick table has few of these."""
    lab.each(found, until, lambda *model: passes_of(lab, *model))


def passes_of(lab: Lab, loaded: Loaded, entry: Found, end: float) -> None:
    stack, plan, cost = loaded.lm.stack, loaded.lm.plan, loaded.lm.controller.cost
    # Of one sequence drafts pass a token or two.
    grid = Grid(TOKENS, (0, lab.extent.prompt), drafted=(1, 2, NUM_SEQUENCES), tiles=(2, 4, 8))
    bare = _passes(stack, plan, loaded.lm.draft_head, (max(TOKENS), lab.extent.prompt))
    kinds = ("verify", "draft", "head", "verify sequences", "draft sequences")
    points = [p for p in grid.points(drafts=True, sequences=True) if p[0] in kinds]
    shuffle, times = random.Random(0), {point: list[float]() for point in points}
    for turn in range(1 + TIMINGS):  # the first records
        for point in shuffle.sample(points, len(points)):
            if time.monotonic() > end:
                break
            seconds, _ = bare.timing(point)
            times[point] += [seconds] if turn else []
    for (kind, rows, context), seconds in times.items():
        sequences = NUM_SEQUENCES if kind.endswith("sequences") else 1
        table = float("nan")
        if kind.startswith("verify"):
            table = 1e6 * (
                cost.verify_pass(rows, context, sequences=sequences)
                - sequences * cost.sampling
                - (rows - sequences) * cost.further
            )
        elif kind.startswith("draft"):
            table = 1e6 * cost.draft_pass(rows, context, sequences=sequences)
        name = f"{kind}, {rows} tokens, {context} slots"
        entry[name] = {
            "us": 1e6 * statistics.median(seconds) if seconds else NO_TIME,
            "timings": len(seconds),
            "table_us": table,
        }
    entry["table"] = cost.to_dict()


def recordings(seconds: list[float], saved: float) -> Found:
    """What recordings took, each after its recorder's first, which warms up; and how many rounds
    that is worth, of which each saves so many seconds."""
    typical = statistics.median(seconds[1:] or seconds) if seconds else float("nan")
    return {
        "recordings": len(seconds),
        "ms_to_record": 1e3 * typical,
        "worth_rounds": typical / saved if saved > 0.0 else float("nan"),
    }


def anew(loaded: Loaded, patience: int | None, made: list[Clocked]) -> SelfSpeculativeLM:
    """The same model with no round recorded; its recorders go into ``made``."""
    lm = with_rounds_of_its_own(loaded).lm
    assert lm._bench is not None
    make_recorder = lm._bench._make_recorder

    def clocked() -> Clocked:
        made.append(Clocked(make_recorder(), patience))
        return made[-1]

    lm._bench._make_recorder = clocked
    return lm
