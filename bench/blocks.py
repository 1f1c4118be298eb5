"""What a second copy of the weights, in the order that products read, gains.

    OMP_NUM_THREADS=1 python bench/blocks.py
    python bench/blocks.py --rows 8 --limit 6

Two decoders of one checkpoint, one of them without the copy, decode the same batches in random
order, each with the cost table of its own load; seconds without over with, by the process's own
clock if there is one thread. Where no copy is made (``layerskip info`` says so) it stops.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from paired import circumstances, dated, quiet, sampling_at, write
from rich.progress import track
from tasks import examples_from, spread

from layerskip import SelfSpeculativeLM
from layerskip.bootstrap import bootstrap_interval
from layerskip.params import NumDraftTokens

LONGEST = 300  # tokens of a prompt
MODES: tuple[NumDraftTokens, ...] = (0, 4, "auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--prompts", help="JSON lines; default: held-out functions")
    parser.add_argument("--rows", type=int, default=1, help="of a batch (1)")
    parser.add_argument("--limit", type=int, default=16, help="batches (16)")
    parser.add_argument("--tokens", type=int, default=48, help="of each row (48)")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--out", type=Path, default=dated("blocks"))
    args = parser.parse_args()
    quiet()
    copied, plain = both(args.model, args.dtype)
    examples = examples_from(args.prompts, 8 * args.limit * args.rows)
    encoded = [copied.tokenizer(e.prompt)["input_ids"] for e in examples]
    wanted = args.limit * args.rows
    prompts = spread([ids for ids in encoded if 0 < len(ids) <= LONGEST], wanted)[:wanted]
    batches = [prompts[i : i + args.rows] for i in range(0, len(prompts), args.rows)]
    settings = {"max_new_tokens": args.tokens, "sampling": sampling_at(args.temperature)}
    found = compared(copied, plain, batches, settings)
    for mode, figures in found.items():
        print(mode, figures)
    asked = {"rows": args.rows, "tokens": args.tokens, "temperature": args.temperature}
    asked["dtype"] = str(copied.stack.dtype).removeprefix("torch.")
    write(args.out, {**circumstances(), **asked, "modes": found})


def both(model: str, dtype: str | None = None) -> tuple[SelfSpeculativeLM, SelfSpeculativeLM]:
    """With copies of the weights, and without."""
    copied = SelfSpeculativeLM.from_pretrained(model, dtype=dtype)
    if "blocks" not in copied.stack.backend:
        raise SystemExit(f"no copy is made here: {copied.stack.backend}")
    with mock.patch("layerskip.dense.why_not", return_value="to compare"):
        return copied, SelfSpeculativeLM.from_pretrained(model, dtype=dtype)


def compared(
    copied: SelfSpeculativeLM,
    plain: SelfSpeculativeLM,
    batches: Sequence[list[list[int]]],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """For each number of draft tokens: speed-ups, and the share of batches with equal texts."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    draw, seconds, same = random.Random(0), {m: ([], []) for m in MODES}, {m: [] for m in MODES}
    for turn, batch in enumerate(track([batches[0], *batches], "decoding")):
        for mode in draw.sample(MODES, len(MODES)):
            texts: dict[int, list[tuple[int, ...]]] = {}
            for side in draw.sample((0, 1), 2):
                began = clock()
                outs = (copied, plain)[side].generate(batch, num_draft_tokens=mode, **settings)
                if turn:  # the first one warms up
                    seconds[mode][side].append(clock() - began)
                texts[side] = [out.token_ids for out in outs]
            same[mode].append(texts[0] == texts[1])
    found = {}
    for mode, (fast, slow) in seconds.items():
        ratios = [b / a for a, b in zip(fast, slow, strict=True)]
        found[str(mode)] = {
            "speedup": statistics.median(ratios),
            "ci95": list(bootstrap_interval(ratios)),
            "together": sum(slow) / sum(fast),
            "equal_texts": statistics.fmean(same[mode]),
        }
    return found


if __name__ == "__main__":
    main()
