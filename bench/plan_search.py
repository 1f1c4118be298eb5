"""Predicted against measured speed of draft plans, good and bad ones: does the order hold?

    OMP_NUM_THREADS=1 python bench/plan_search.py [--written] [--texts 16] [--tokens 64]

Plans: exits, and skip sets by similarity, of many sizes. Each with the number of draft tokens that
is predicted to be its best (at least 1). Measured: processor time of decoding, in turn with plain
decoding, all plans on four texts before the next four. ``--written`` calibrates on what the model
writes instead of the known continuations.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence

from paired import quiet
from tasks import examples_from

from layerskip import DraftPlan, SamplingParams, SelfSpeculativeLM
from layerskip.calibration import KnownTexts, texts_to_draft_along
from layerskip.plan import ranges
from layerskip.prediction import count, draft_costs, predict
from layerskip.profiling import measure_cost
from layerskip.prompts import Example
from layerskip.skipping import closest_skip_sets
from layerskip.timing import time_against_plain

MOST = 8
AT_ONCE = 4  # texts on which one plan is timed before the next one's turn


def ranks(values: Sequence[float]) -> list[float]:
    """Place of each value in ascending order; ties share the mean of theirs."""
    return [
        statistics.fmean(i for i, v in enumerate(sorted(values)) if v == value) for value in values
    ]


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation (Spearman 1904)."""
    return statistics.correlation(ranks(a), ranks(b))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--prompts", help="JSON lines; without it, held-out library code")
    parser.add_argument("--written", action="store_true", help="on the model's own text")
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--exits", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8, 11])
    parser.add_argument("--skipped", type=int, nargs="+", default=[2, 5, 8, 10, 11, 12, 13])
    args = parser.parse_args()
    quiet()
    lm = SelfSpeculativeLM.from_pretrained(args.model)
    stack, depth = lm.stack, lm.stack.num_layers
    sampling = SamplingParams(temperature=0.8, seed=0)
    examples = examples_from(args.prompts, args.texts)
    if args.written:
        examples = [Example(e.prompt) for e in examples]
    texts = texts_to_draft_along(
        lm, examples, sampling=sampling, max_texts=args.texts, max_tokens=args.tokens
    )
    context = statistics.fmean(t.start + t.window / 2 for t in texts)
    known_texts = KnownTexts(stack, texts, sampling=sampling)
    sets = closest_skip_sets(known_texts)
    plans = [DraftPlan.exiting(num_layers=depth, exit_layer=e) for e in args.exits]
    plans = list(dict.fromkeys([*plans, *(sets[n] for n in args.skipped)]))
    shallow, deep = (
        measure_cost(stack, DraftPlan(depth, tuple(range(n))), seconds=10.0) for n in (1, depth)
    )
    found = []
    for plan in plans:
        table = draft_costs(shallow, deep, len(plan.layers), depth)
        counts = count(known_texts.chains(plan, MOST), MOST)
        k, speed = predict(table, counts.lengths, context, least=1)
        c = table.draft_pass(1, context) / table.verify_pass(1, context)
        found.append((plan, counts.first, c, k, speed))
    ratios: dict[DraftPlan, list[float]] = {plan: [] for plan in plans}
    shuffle = random.Random(0)
    for first in range(0, len(texts), AT_ONCE):
        some = texts[first : first + AT_ONCE]
        for plan, _, _, k, _ in shuffle.sample(found, len(found)):
            ratios[plan] += time_against_plain(
                stack, plan, k, some, sampling=sampling, clock=time.process_time
            )
    measured = [statistics.median(ratios[plan]) for plan, *_ in found]
    print("| draft layers | first accepted | c | k | predicted | measured |")
    print("|---|---:|---:|---:|---:|---:|")
    for (plan, first, c, k, speed), ratio in zip(found, measured, strict=True):
        print(
            f"| {ranges(plan.layers)} | {first:.3f} | {c:.3f} | {k} | {speed:.2f} | {ratio:.2f} |"
        )
    predicted = [speed for *_, speed in found]
    print(f"\n{len(plans)} plans, Spearman {spearman(predicted, measured):.3f}")


if __name__ == "__main__":
    main()
