"""What a verify pass of a batch takes whose rows differ: in what they drafted, and in context.

    OMP_NUM_THREADS=1 python bench/ragged.py
    OMP_NUM_THREADS=1 python bench/ragged.py --inexact
    OMP_NUM_THREADS=1 python bench/ragged.py --slot-block 128 --sweeps 9

Bare passes of full depth over random keys, interleaved in random order. Attention of all rows in
one call computes for each row what any of them needs; ``attention_calls`` divides them where
that saves more than a call costs; beside it a call for each run of rows that are alike. Medians.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from layerskip import SelfSpeculativeLM, layout
from layerskip.cache import Segment
from layerskip.layout import CALL, NEVER

CALLS = NEVER, CALL, 0
ROWS, CONTEXTS, FAR = (4, 8, 32), (60, 700), 700
Shape = Sequence[Segment]


def shapes(chance: random.Random) -> dict[str, Shape]:
    """Passes by name; those of equal rows come first for each number of rows."""
    found: dict[str, Shape] = {}
    for count in ROWS:
        rows = range(count)
        for context in CONTEXTS:
            name = f"{count} rows at {context}:"
            found |= {
                f"{name} 1 token": [Segment(r, context, 1) for r in rows],
                f"{name} 5 tokens": [Segment(r, context, 5) for r in rows],
                f"{name} 1 to 6": [Segment(r, context, chance.randint(1, 6)) for r in rows],
                f"{name} 1, every fourth 9": [
                    Segment(r, context, 1 + 8 * (r % 4 == 1)) for r in rows
                ],
            }
        far = [Segment(r, FAR if r % 4 == 1 else CONTEXTS[0], 5) for r in rows]
        found[f"{count} rows, every fourth at {FAR}: 5 tokens"] = far
        found[f"every other of {2 * count} rows: 5 tokens"] = [Segment(2 * r, 60, 5) for r in rows]
    return found


@torch.inference_mode()
def measure(lm: SelfSpeculativeLM, passes: dict[str, Shape], sweeps: int) -> dict[str, list[float]]:
    """Median seconds of each pass, by what a call is said to cost: ``CALLS``."""
    stack, chance = lm.stack, random.Random(1)
    cache = stack.new_cache(num_rows=2 * max(ROWS), num_slots=FAR + 64)
    for filled in (cache.keys, cache.values):
        filled.normal_()
    times: dict[tuple[str, int], list[float]] = {(p, c): [] for p in passes for c in CALLS}
    for sweep in track(range(sweeps + 1), "passes"):
        for name, call in chance.sample(sorted(times), len(times)):
            segments = passes[name]
            with patch.object(layout, "CALL", call):
                began = time.perf_counter()
                hidden = stack.embed([5] * sum(s.count for s in segments))
                stack.logits(stack.run_layers(hidden, range(stack.num_layers), cache, segments))
                seconds = time.perf_counter() - began
            if sweep:  # the first one proves the pass's size
                times[name, call].append(seconds)
    return {p: [statistics.median(times[p, c]) for c in CALLS] for p in passes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--sweeps", type=int, default=15)
    parser.add_argument("--slot-block", type=int, help="attend to multiples of so many slots")
    parser.add_argument("--inexact", action="store_true", help="exact=False")
    options = parser.parse_args()
    lm = SelfSpeculativeLM.from_pretrained(
        options.model, num_draft_tokens=0, exact=not options.inexact
    )
    if options.slot_block is not None:  # as on another machine; bits may not hold
        lm.stack.exactness = replace(lm.stack.exactness, slot_block=options.slot_block)
    found = measure(lm, shapes(random.Random(0)), options.sweeps)
    table = Table("pass", "one call, ms", "divided, ms", "a call each kind, ms", "divided / one")
    for name, seconds in found.items():
        table.add_row(name, *(f"{1e3 * s:.1f}" for s in seconds), f"{seconds[1] / seconds[0]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
