"""Batches that stay full: automatic drafting and fixed numbers against plain decoding.

    OMP_NUM_THREADS=1 python bench/batches.py
    OMP_NUM_THREADS=1 python bench/batches.py --rows 32 --temperature 0 --batches 5

Held-out code. The ways of a batch take turns, round by round, each on its own clock, and each until
one of its rows ends: what a batch that nobody joins takes for its last rows is in
no figure, and `pytest bench` has that. One decoder decodes all batches, so the first one's rounds
meet sizes of passes whose bits are not proven yet, and a controller that knows nothing of the
texts: it has a line of its own. Tokens a second over those of plain rounds.
"""

import argparse
import random
from collections.abc import Iterator, Mapping, Sequence

from paired import Clock, by_turns, quiet, sampling_at, total
from rich.console import Console
from rich.progress import track
from rich.table import Table

from layerskip import SelfSpeculativeLM
from layerskip.checkpoint import held_out_modules
from layerskip.params import NumDraftTokens
from layerskip.prompts import held_out_code

LONGEST = 96  # tokens of a prompt: its last ones


class Full:
    """One batch, decoded one way while all of its rows go on.

    Attributes:
        first: tokens before the first round.
        emitted: tokens so far.
    """

    def __init__(
        self,
        lm: SelfSpeculativeLM,
        prompts: Sequence[Sequence[int]],
        count: NumDraftTokens,
        options: argparse.Namespace,
    ) -> None:
        self.batch = lm.open_batch(
            max_new_tokens=options.tokens,
            num_draft_tokens=count,
            sampling=sampling_at(options.temperature),
            ignore_eos=True,
            on_round=lambda _: None,  # listened to, rounds tell how far they are
        )
        for prompt in prompts:
            self.batch.add(prompt)
        self.emitted = self.first = sum(len(r.token_ids) for r in self.batch.step())
        self._rows = len(prompts)

    def __iter__(self) -> Iterator[int]:
        while len(self.batch.unfinished) == self._rows:
            self.emitted += sum(len(r.token_ids) for r in self.batch.step())
            yield self.emitted


def rate(work: Full, laps: Sequence[Clock]) -> float:
    """Tokens a second of the process's own work, after the first ones."""
    return (work.emitted - work.first) / total(laps).cpu


def measured(
    lm: SelfSpeculativeLM,
    prompts: Sequence[Sequence[int]],
    ways: Mapping[str, NumDraftTokens],
    options: argparse.Namespace,
) -> dict[str, float]:
    """Tokens a second of each way over the plain one's, of one batch."""
    works = {name: Full(lm, prompts, count, options) for name, count in ways.items()}
    laps = by_turns({name: iter(work) for name, work in works.items()}, random.Random(0))
    rates = {name: rate(work, laps[name]) for name, work in works.items()}
    return {name: found / rates["plain"] for name, found in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--batches", type=int, default=4, help="of each number of rows")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--fixed", type=int, nargs="*", default=[1, 2])
    options = parser.parse_args()
    quiet()
    ways: dict[str, NumDraftTokens] = {"plain": 0, "auto": "auto"}
    ways |= {str(k): k for k in options.fixed}
    examples = held_out_code(held_out_modules(), options.batches * max(options.rows))
    table = Table("rows", "batch", *list(ways)[1:], box=None)
    for rows in options.rows:
        lm = SelfSpeculativeLM.from_pretrained(options.model, lookup=False)
        prompts = [lm.tokenizer(e.prompt)["input_ids"][-LONGEST:] for e in examples]
        for i in track(range(options.batches), f"{rows} rows"):
            found = measured(lm, prompts[i * rows :][:rows], ways, options)
            table.add_row(str(rows), str(i), *(f"{found[name]:.3f}" for name in list(ways)[1:]))
    Console().print(table)


if __name__ == "__main__":
    main()
