"""What looked-up tokens in the draft passes of automatic drafting gain.

    OMP_NUM_THREADS=1 python bench/guesses.py --prompts prompts.jsonl
    OMP_NUM_THREADS=1 python bench/guesses.py --prompts prompts.jsonl --rows 8 --width 1

Two decoders with the same cost table, one of which brings none, decode the same batches in random
order; CPU time without over with. ``--width`` has the other bring so many whatever they cost.
"""

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

from paired import circumstances, cost_now, dated, quiet, sampling_at, write
from tasks import spread

from layerskip import SelfSpeculativeLM
from layerskip.bootstrap import bootstrap_interval
from layerskip.controller import Controller
from layerskip.prompts import read_prompts

LONGEST = 400  # tokens of a prompt


class Told(Controller):
    """Brings so many into each draft pass."""

    width = 0

    def guesses(self, rows: int, context: int) -> int:
        return self.width


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1, help="of a batch (1)")
    parser.add_argument("--limit", type=int, default=24, help="batches (24)")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--width", type=int, help="looked-up tokens of a pass (the controller's)")
    parser.add_argument("--profile-seconds", type=float, default=10.0)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.8, 0.0])
    parser.add_argument("--out", type=Path, default=dated("guesses"))
    args = parser.parse_args()
    quiet()
    without, guessing = (SelfSpeculativeLM.from_pretrained(args.model) for _ in range(2))
    cost = cost_now(without, args.profile_seconds)
    encoded = [without.tokenizer(e.prompt)["input_ids"] for e in read_prompts(args.prompts)]
    fit = [ids for ids in encoded if 0 < len(ids) <= LONGEST]
    prompts = spread(fit, args.limit * args.rows)[: args.limit * args.rows]
    batches = [prompts[i : i + args.rows] for i in range(0, len(prompts), args.rows)]
    cases = []
    for temperature in args.temperatures:
        without._controller = Told(cost)
        guessing._controller = Controller(cost) if args.width is None else Told(cost)
        if args.width is not None:
            guessing._controller.width = args.width
        cases.append(paired(without, guessing, batches, temperature, args.tokens))
        print(cases[-1])
        setting = {"rows": args.rows, "tokens": args.tokens, "width": args.width}
        write(args.out, {**circumstances(), **setting, "cases": cases})


def paired(
    without: SelfSpeculativeLM,
    guessing: SelfSpeculativeLM,
    batches: list[list[list[int]]],
    temperature: float,
    tokens: int,
) -> dict[str, Any]:
    draw, ratios, totals = random.Random(0), [], [0.0, 0.0]
    passes, drafted = [0, 0], [0, 0]
    for turn, batch in enumerate([batches[0], *batches]):
        seconds, texts = [0.0, 0.0], [[], []]
        for side in draw.sample((0, 1), 2):
            began = time.process_time()
            settings = {"max_new_tokens": tokens, "sampling": sampling_at(temperature)}
            outs = (without, guessing)[side].generate(batch, **settings)
            seconds[side] = time.process_time() - began
            texts[side] = [out.token_ids for out in outs]
            passes[side] += sum(out.stats.num_draft_passes for out in outs)
            drafted[side] += sum(
                r.num_draft_tokens - r.num_lookup_tokens
                for o in outs
                for r in o.rounds
                if r.num_draft_passes
            )
        assert texts[0] == texts[1]
        if turn:  # the first warms up
            ratios.append(seconds[0] / seconds[1])
            totals = [t + s for t, s in zip(totals, seconds, strict=True)]
    return {
        "temperature": temperature,
        "median": statistics.median(ratios),
        "ci95": list(bootstrap_interval(ratios)),
        "together": totals[0] / totals[1],
        "passes_per_token": [p / max(1, d) for p, d in zip(passes, drafted, strict=True)],
    }


if __name__ == "__main__":
    main()
