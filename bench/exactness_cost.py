"""What keeping every row's bits costs: the engine against itself without padding.

    OMP_NUM_THREADS=1 python bench/exactness_cost.py --dtype bfloat16

One engine pads passes to the row quantum and attends to whole blocks of slots, as the probe asks;
the other takes exact widths. They decode the same prompts for the same number of rounds, turn by
turn; the figure is the median of the ratios of neighbours. Without exactness texts may differ,
so times are per round. With one thread the clock is the process's CPU time, which other processes
on the machine do not count in.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial

import torch
from paired import quiet
from tasks import examples_from

from layerskip import SelfSpeculativeLM

BATCH_SIZES, DRAFTED = (1, 8), 5
PERCENT = 100.0


def seconds_per_round(
    lm: SelfSpeculativeLM, prompts: Sequence[list[int]], num_draft_tokens: int, num_rounds: int
) -> float:
    """Prefills are not counted; no row ends before the last round."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    batch = lm.open_batch(
        max_new_tokens=num_rounds * (num_draft_tokens + 1) + 2,
        num_draft_tokens=num_draft_tokens,
        ignore_eos=True,
    )
    for prompt in prompts:
        batch.add(prompt)
    batch.step()
    began = clock()
    for _ in range(num_rounds):
        batch.step()
    return (clock() - began) / num_rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", default=12, type=int, help="of one timed run (12)")
    parser.add_argument("--repeats", default=20, type=int, help="pairs of runs per figure (20)")
    options = parser.parse_args()
    quiet()

    load = partial(SelfSpeculativeLM.load_parts, options.model, dtype=options.dtype, device="cpu")
    exact, free = (SelfSpeculativeLM(*load()[:3], exact=exact) for exact in (True, False))
    examples = examples_from(None, 60)
    room = exact.stack.max_positions - options.rounds * (DRAFTED + 1) - 2
    prompts = [ids for ids in (exact.encode(e.prompt) for e in examples) if len(ids) <= room]
    print(f"{options.dtype}, {torch.get_num_threads()} threads; {exact.exactness},")
    print(f"attention to blocks of {exact.stack.exactness.slot_block} slots; ms are per round")
    print("batch  drafted  exact ms  free ms  cost (quartiles)")
    for size in BATCH_SIZES:
        for count in (0, DRAFTED):
            times = []
            for turn in range(options.repeats + 1):
                some = [prompts[(turn + i) % len(prompts)] for i in range(size)]
                pair = [(0, exact), (1, free)][:: 1 if turn % 2 else -1]
                found = {i: seconds_per_round(lm, some, count, options.rounds) for i, lm in pair}
                times.append((found[0], found[1]))
            times = times[1:]
            ratios = [PERCENT * (with_it / without - 1.0) for with_it, without in times]
            low, middle, high = statistics.quantiles(ratios, n=4)
            first, second = (1e3 * statistics.median(t) for t in zip(*times, strict=True))
            cost = f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})"
            print(f"{size:5} {count:8} {first:9.2f} {second:8.2f}  {cost}", flush=True)


if __name__ == "__main__":
    main()
