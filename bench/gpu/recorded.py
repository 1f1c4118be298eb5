"""Section ``recording`` of ``bench/gpu_bench.py``: what a graph takes to record, and saves."""

import statistics
import time
from functools import partial

from gpu.decoding import AUTO, MOST_DRAFTED
from gpu.frame import Found
from gpu.lab import Lab, label
from gpu.models import Loaded, with_rounds_of_its_own
from gpu.overlap import tokens_of
from gpu.timing import Decoded, decode, in_turns, synchronize
from layerskip import SelfSpeculativeLM
from layerskip.graphs import Function, Recorder, Recording

DRAFTED = (0, 1, MOST_DRAFTED)
NEVER = 1 << 60
LOADED, WARMED = "auto, as loaded", "auto, recorded ahead"
FIRSTS = (AUTO, LOADED, WARMED, "plain")
UNRECORDED, REPLAYED = "unrecorded", "replayed"


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
