"""How the cost of a round grows: with rows, context, drafted tokens, vocabulary and layers.

    OMP_NUM_THREADS=1 python bench/scaling.py
    OMP_NUM_THREADS=1 python bench/scaling.py --axes context,rows --turns 40

Models have the built-in checkpoint's shape and random weights; one axis at a time leaves the
others as they are. Sizes are timed in turn, in random order, and a size's figure is the median of
its turns, by the wall and by the process's own CPU time. Two lines are fitted to the medians:
seconds = start + slope x size (with R^2), and the exponent, the slope of logarithms (1: in
proportion; 0: not at all).

"Bytes copied" are counted, not timed: what a round's copying operators write, and the largest
single copy. A round that copied the cache would write as much as the cache holds.
"""

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from paired import Clock, as_many, as_usual, circumstances, part_of, quiet, write
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from layerskip import DraftPlan, SelfSpeculativeLM
from layerskip.batch import Batch

COPIES = {
    "_to_copy", "cat", "clone", "constant_pad_nd", "contiguous", "copy_", "gather", "index",
    "index_copy_", "index_put_", "index_select", "repeat", "roll", "scatter_", "stack", "to",
}  # fmt: skip
SOURCES = {"copy_": 1, "index_put_": 2, "index_copy_": 3, "scatter_": 3}  # arguments' places
ROUNDS = 4  # of one turn; the first is not timed
LONG = 890
RECORD = Path(__file__).parent / "results" / "scaling.json"


@dataclass(frozen=True)
class Size:
    """One model, and one batch of it.

    Attributes:
        rows: sequences of the batch.
        context: tokens of each prompt.
        drafted: tokens a round.
        vocabulary, layers: of the model; a quarter of the layers draft, at least one.
    """

    rows: int = 1
    context: int = 100
    drafted: int = 4
    vocabulary: int = 4096
    layers: int = 16


AXES: dict[str, tuple[int, ...]] = {
    "rows": (1, 2, 4, 8, 16, 32),
    "context": (100, 200, 400, 600, LONG),
    "drafted": (0, 1, 2, 4, 6, 8, 12),
    "vocabulary": (1024, 4096, 16384, 65536),
    "layers": (4, 8, 16, 32),
}


def model_of(size: Size) -> SelfSpeculativeLM:
    """With random weights: times do not depend on them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=320,
        intermediate_size=768,
        num_hidden_layers=size.layers,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    plan = DraftPlan.exiting(num_layers=size.layers, exit_layer=max(1, size.layers // 4))
    return SelfSpeculativeLM(model, None, plan, lookup=False)


def started(lm: SelfSpeculativeLM, size: Size) -> Batch:
    """A batch whose rows are prefilled."""
    most = ROUNDS * (size.drafted + 1) + 1
    batch = lm.open_batch(max_new_tokens=most, num_draft_tokens=size.drafted, ignore_eos=True)
    draw = random.Random(0)
    for _ in range(size.rows):
        batch.add([draw.randrange(size.vocabulary) for _ in range(size.context)])
    batch.step()
    return batch


def turn(lm: SelfSpeculativeLM, size: Size) -> Clock:
    """A round, on average over a few."""
    batch = started(lm, size)
    batch.step()
    began = Clock.now()
    for _ in range(ROUNDS - 1):
        batch.step()
    spent = Clock.now() - began
    return Clock(spent.wall / (ROUNDS - 1), spent.cpu / (ROUNDS - 1))


class Copied(TorchDispatchMode):
    """Bytes that copying operators write."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in COPIES and isinstance(out, torch.Tensor):
            written = args[SOURCES[name]] if name in SOURCES else out
            moved = written.nbytes if isinstance(written, torch.Tensor) else 0
            if name != "to" or out.data_ptr() != args[0].data_ptr():  # "to" may do nothing
                self.total += moved
                self.largest = max(self.largest, moved)
        return out


def copied(lm: SelfSpeculativeLM, size: Size) -> dict[str, int]:
    """What one round copies, beside the bytes that the cache's committed slots hold."""
    batch = started(lm, size)
    batch.step()  # makes what later rounds use again
    with Copied() as counted:
        batch.step()
    held = size.rows * size.context * lm.stack.kv_bytes_per_token
    return {
        "copied_bytes": counted.total,
        "largest_copy_bytes": counted.largest,
        "held_cache_bytes": held,
    }


def fitted(sizes: Sequence[int], seconds: Sequence[float]) -> dict[str, float]:
    """Least squares: a straight line, and the exponent over sizes above zero."""
    x, y = np.asarray(sizes, dtype=float), np.asarray(seconds)
    slope, start = np.polyfit(x, y, 1)
    rest = y - (start + slope * x)
    spread = float(((y - y.mean()) ** 2).sum())
    positive = x > 0
    exponent = np.polyfit(np.log(x[positive]), np.log(y[positive]), 1)[0]
    return {
        "start": float(start),
        "slope": float(slope),
        "r2": 1.0 - float((rest**2).sum()) / spread if spread else 1.0,
        "exponent": float(exponent),
    }


def along(axis: str, values: Sequence[int], base: Size, turns: int) -> dict[str, Any]:
    """One axis: medians, fits and bytes."""
    sizes = [replace(base, **{axis: value}) for value in values]
    of_model = axis in ("vocabulary", "layers")
    shared = model_of(base) if not of_model else None
    lms = [shared or model_of(size) for size in sizes]
    clocks: list[list[Clock]] = [[] for _ in sizes]
    shuffle, places = random.Random(0), range(len(sizes))
    for n in track(range(turns + 1), axis, transient=True):
        for i in shuffle.sample(places, len(sizes)):
            clock = turn(lms[i], sizes[i])
            if n:  # the first turn allocates, and proves numbers of rows
                clocks[i].append(clock)
    points = [
        {
            "size": value,
            "seconds": statistics.median(c.wall for c in of),
            "cpu_seconds": statistics.median(c.cpu for c in of),
            **copied(lm, size),
        }
        for value, lm, size, of in zip(values, lms, sizes, clocks, strict=True)
    ]
    fits = {
        clock: fitted(values, [p[clock] for p in points]) for clock in ("seconds", "cpu_seconds")
    }
    return {"points": points, "fits": fits}


def table(found: Mapping[str, Any]) -> Table:
    """As people read it."""
    out = Table(box=None, header_style="bold", title="a round")
    for column in ("axis", "from", "to", "ms", "ms", "exponent", "R2", "copied", "largest", "held"):
        out.add_column(column, justify="right")
    for axis, one in found.items():
        first, last, fit = one["points"][0], one["points"][-1], one["fits"]["seconds"]
        ends = [f"{1e3 * p['seconds']:.2f}" for p in (first, last)]
        sizes = [str(p["size"]) for p in (first, last)]
        bytes_ = ("copied_bytes", "largest_copy_bytes", "held_cache_bytes")
        moved = [f"{last[name] / 1024:.0f} KiB" for name in bytes_]
        out.add_row(axis, *sizes, *ends, f"{fit['exponent']:.2f}", f"{fit['r2']:.2f}", *moved)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--axes", default=",".join(AXES), help="comma-separated")
    parser.add_argument("--turns", type=int, default=20, help="of each size (20)")
    parser.add_argument("--out", type=Path, help="default: the record, of a whole run")
    options = parser.parse_args()
    names = options.axes.split(",")
    unknown = [n for n in names if n not in AXES]
    if unknown:
        raise SystemExit(f"--axes has {unknown[0]!r}; allowed are {', '.join(AXES)}")
    quiet()
    out, found = options.out or part_of(RECORD), dict[str, Any]()
    for axis in names:
        found[axis] = along(axis, AXES[axis], Size(), options.turns)
        document = {**circumstances(), "dtype": "bfloat16", "turns": options.turns}
        write(out, document | {"axes": found})
    if options.out is None and is_record(options, parser):
        out = out.replace(RECORD)
    console = Console(width=120)
    console.print(table(found))
    console.print(f"written to {out}")


def is_record(options: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Whether a run has every axis, with turns enough; what tables read is of such a one."""
    return as_many(options, parser, "turns") and as_usual(options, parser, "axes")


if __name__ == "__main__":
    main()
