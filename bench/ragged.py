"""What a verify pass of a batch takes whose rows differ: in what they drafted, and in context.

    OMP_NUM_THREADS=1 python bench/ragged.py
    OMP_NUM_THREADS=1 python bench/ragged.py --model PATH --sweeps 9

Bare passes of full depth over random keys, interleaved in random order: attention of all rows in
one call, which computes for each row what any of them needs; and with a call for each run of rows
that are alike, as ``layout.looks`` has it on a processor. Medians in milliseconds.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from functools import partial
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from layerskip import SelfSpeculativeLM, layout
from layerskip.cache import Segment
from layerskip.layout import looks

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
    """Median seconds of each pass, its rows together and apart."""
    stack, chance = lm.stack, random.Random(1)
    cache = stack.new_cache(num_rows=2 * max(ROWS), num_slots=FAR + 64)
    for filled in (cache.keys, cache.values):
        filled.normal_()
    times: dict[tuple[str, bool], list[float]] = {(p, a): [] for p in passes for a in (False, True)}
    for sweep in track(range(sweeps + 1), "passes"):
        for name, apart in chance.sample(sorted(times), len(times)):
            segments, divided = passes[name], partial(looks, apart=apart)
            with patch.object(layout, "looks", lambda rows, apart: divided(rows)):  # noqa: B023
                began = time.perf_counter()
                hidden = stack.embed([5] * sum(s.count for s in segments))
                stack.logits(stack.run_layers(hidden, range(stack.num_layers), cache, segments))
                seconds = time.perf_counter() - began
            if sweep:  # the first one proves the pass's size
                times[name, apart].append(seconds)
    return {p: [statistics.median(times[p, a]) for a in (False, True)] for p in passes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--sweeps", type=int, default=15)
    options = parser.parse_args()
    lm = SelfSpeculativeLM.from_pretrained(options.model, num_draft_tokens=0)
    found = measure(lm, shapes(random.Random(0)), options.sweeps)
    table = Table("pass", "together, ms", "apart, ms", "apart / together")
    for name, (together, apart) in found.items():
        table.add_row(
            name, f"{1e3 * together:.1f}", f"{1e3 * apart:.1f}", f"{apart / together:.2f}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
