"""Section ``launches`` of ``bench/gpu_bench.py``: what is lost between kernels.

And what of it comes back where each may start while the one before it still runs.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from gpu.backends import Noise
from gpu.bits import raw
from gpu.decoding import kept, same
from gpu.frame import Found
from gpu.lab import Lab, label
from gpu.models import Loaded, with_rounds_of_its_own
from gpu.moved import round_bytes
from gpu.timing import GREEDY, decode, in_turns

CHAIN = 64  # small kernels one after another
WIDTH = 64  # of each
NORM_EPS = 1e-6
PASSES = {"plain": 0, "round": 4}  # drafted tokens
OFF, ON = "off", "on"  # early starts
CHAIN_SHARE = 0.1  # of the section's time
BITS_SHARE = 0.3  # of a model's


def launches(lab: Lab, found: Found, until: float) -> None:
    """A chain of small kernels, a plain token and a round: early starts off and on, bits equal.

    What a plain token takes beyond its bytes is the most that early starts can save; so is the time
    of a kernel with next to no work, as a graph replays it, times the launches of a token.
    """
    why_not = lab.backend.why_no_overlap()
    modes = (OFF,) if why_not else (OFF, ON)
    overlap: Found = {"measured": why_not is None}
    found["programmatic_dependent_launch"] = overlap
    if why_not:
        overlap["why_not"] = why_not
    found["small_kernel_us"] = chain_times(lab, modes, until)
    lab.each(found, until, lambda *model: one_model(lab, modes, *model))
    if not why_not:
        overlap["chain_equal"] = chained(lab, OFF) == chained(lab, ON)
        found["ok"] &= overlap["chain_equal"]


def mode_of(lab: Lab, mode: str) -> AbstractContextManager[None]:
    """What is launched, or captured, inside may start early if that is the mode."""
    return lab.backend.overlapping(mode == ON)


def chain_times(lab: Lab, modes: Sequence[str], until: float) -> Found:
    """Microseconds of one small kernel of a chain."""
    x = torch.ones(1, WIDTH, dtype=torch.bfloat16, device=lab.device)
    calls = [lambda: lab.backend.ops.rms_norm(x, x[0], eps=NORM_EPS)] * CHAIN

    def of_one(mode: str) -> float:
        with mode_of(lab, mode):
            return lab.backend.seconds(calls)

    now = time.monotonic()
    end = now + CHAIN_SHARE * (until - now)
    kinds = {mode: lambda m=mode: of_one(m) for mode in modes}
    run = in_turns(kinds, end, repeats=lab.extent.repeats)
    return {mode: run.summary(mode, 1e6) for mode in modes} | gained(run.ratio, modes, "")


def chained(lab: Lab, mode: str) -> bytes:
    """What comes of small kernels each of which needs what the one before it has written."""
    noise = Noise(lab.device)
    x, total, weight = (noise.normal(1, WIDTH, dtype=torch.bfloat16) for _ in range(3))
    with mode_of(lab, mode):
        for _ in range(CHAIN):
            x, total = lab.backend.ops.add_rms_norm(x, total, weight[0], eps=NORM_EPS)
    return b"".join(raw(t) for t in (x, total))


def one_model(lab: Lab, modes: Sequence[str], loaded: Loaded, entry: Found, end: float) -> None:
    """Of one model, at eps 0, where every draft is accepted: a round's time does not need that."""
    loaded.scale(0.0)
    # A graph keeps the launches that it holds: each mode records its rounds anew.
    sides = {mode: with_rounds_of_its_own(loaded) for mode in modes}
    if ON in modes:  # bits first: then every graph is there before anything is timed
        now = time.monotonic()
        entry["bits"] = bits(lab, sides, now + BITS_SHARE * (end - now))
        entry["ok"] = all(found["equal"] for found in entry["bits"].values())
    kinds = {
        f"{what} {mode}": lambda k=k, m=mode: seconds(lab, sides[m], k, m)
        for what, k in PASSES.items()
        for mode in modes
    }
    run = in_turns(kinds, end, repeats=lab.extent.repeats)
    for what, k in PASSES.items():
        context = lab.extent.prompt + tokens_of(lab, k) / 2
        of_bytes = round_bytes(loaded.model, k, context=context) / lab.copy
        entry[what] = gained(run.ratio, modes, f"{what} ")
        for mode in modes:
            beyond = run.median(f"{what} {mode}") - of_bytes
            found = run.summary(f"{what} {mode}", 1e3)
            entry[what][mode] = {"ms": found, "us_beyond_bytes": 1e6 * beyond}
    entry["us_beyond_bytes_a_layer"] = {
        mode: entry["plain"][mode]["us_beyond_bytes"] / loaded.model.layers for mode in modes
    }
    entry |= {**run.extent, **label(loaded, 1.0)}


def tokens_of(lab: Lab, drafted: int) -> int:
    """Of a timed run."""
    return 1 + (drafted + 1) * lab.extent.rounds if drafted else lab.extent.tokens


def seconds(lab: Lab, loaded: Loaded, drafted: int, mode: str) -> float:
    """Of a round; without drafts of a token."""
    ids = [lab.prompt(loaded, lab.extent.prompt)]
    with mode_of(lab, mode):
        run = decode(loaded.lm, ids, drafted, tokens_of(lab, drafted))
    return run.seconds / run.num_passes


def gained(ratio: Callable[[str, str], float], modes: Sequence[str], what: str) -> Found:
    """How many times as fast it is with early starts, where that was measured."""
    return {"gained": ratio(what + OFF, what + ON)} if ON in modes else {}


def bits(lab: Lab, sides: dict[str, Loaded], until: float) -> Found:
    """Tokens, keys and values of both modes on one prompt, plain and with drafts."""
    found: Found = {}
    wanted = [(what, k, mode) for what, k in PASSES.items() for mode in sides]
    runs = {}
    for i, (what, k, mode) in enumerate(wanted):
        now = time.monotonic()
        end = now + (until - now) / (len(wanted) - i)
        ids = [lab.prompt(sides[mode], lab.extent.prompt)]
        with mode_of(lab, mode):
            runs[mode] = kept(sides[mode], ids, k, lab.extent.tokens, GREEDY, end)
        if mode == ON:
            found[what] = same(runs[OFF], runs[ON])
    return found
