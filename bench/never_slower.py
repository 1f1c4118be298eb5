"""How much slower than plain decoding it can get, by the clock, beside what is allowed.

    OMP_NUM_THREADS=1 python bench/never_slower.py
    OMP_NUM_THREADS=1 python bench/never_slower.py --prompts prompts.jsonl --cases 'short; ramp'

Each turn decodes the same work plainly and otherwise, round by round in alternation, whichever has
emitted less; a figure is the median of the turns' ratios less one, with a bootstrap 95 % interval,
by the wall and by the process's own CPU time; "counted" are the passes after the first token times
the cost table, summed over all turns; those of a batch's rows are one.
Every mode must emit plain decoding's tokens, or the script stops.

- adversarial, random: no drafted token is right, or hardly any, yet the model is as sure of them as
  ever (bench/bad_drafters.py); in a stream of requests, and with a controller that knows nothing.
- adversarial, look-ups: nor is any looked-up token right, though all seem to follow the longest of
  matches; "alone" without an early exit.
- adversarial, batch: eight rows at temperature 0.8 whose drafts are never right, and who look up.
- mixed: eight such rows that look nothing up; every fourth one's drafts are never right, those of
  the others nine times of ten. It ends with its last row.
- bimodal: requests of 0.95 and 0.05 acceptance in random order, one controller; the latter alone.
- switching: the same text with 0 drafted tokens in every round, with k, and with both in turn. The
  overhead is that of the alternating rounds over as many of both kinds among their own, by their
  medians: what it costs to change, beyond the passes.
- ramp: requests that join once so much has been emitted: batches of 1 to 32 rows and back.
- short: outputs of 16 tokens by the default setting; and what comes before their first token.
"""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bad_drafters import Corrupted, CorruptedRows, Losing, Misleading, Random, install
from paired import (
    Clock,
    Decoded,
    as_many,
    as_usual,
    by_turns,
    circumstances,
    dated,
    decode,
    decode_together,
    forget,
    part_of,
    quiet,
    ratios,
    sampling_at,
    total,
    wrapped,
    write,
)
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tasks import examples_from

from layerskip import LookupStore, Round, SamplingParams, SelfSpeculativeLM
from layerskip.cost import CostTable

ROWS, BATCH = 32, 8
MIXED = (0.9, 0.9, 0.9, 0.0)  # how often rows' drafts are right
SWITCHED = 5  # draft tokens
SHORT, FIRSTS = 16, 8  # tokens; first tokens, each a prefill alone, that are timed in a turn
CONTEXT = 200  # of the cost table, for what is counted
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, seed=0)


@dataclass(frozen=True)
class Lab:
    """One checkpoint, its prompts and its cost table."""

    model: Any
    tokenizer: Any
    known: Any
    cost: CostTable
    prompts: list[list[int]]
    tokens: int
    rows: int
    sampling: SamplingParams = GREEDY

    def lm(self, *, lookup: bool | LookupStore = False, plan: bool = True) -> SelfSpeculativeLM:
        """With a controller that has seen nothing; without the plan it measures its own costs."""
        known, cost = (self.known, self.cost) if plan else (None, None)
        return wrapped(self.model, self.tokenizer, known, cost, lookup=lookup)


@dataclass(frozen=True)
class Pair:
    """The same work in plain decoding and otherwise.

    Attributes:
        kind: tells pairs of a case apart.
        counted: seconds by the cost table, of the passes after the first token of each.
    """

    plain: Clock
    other: Clock
    kind: str = ""
    counted: tuple[float, float] = (0.0, 0.0)


Case = Callable[[Lab, random.Random], Callable[[int], list[Pair]]]


def taking_turns(
    lab: Lab, lm: SelfSpeculativeLM, prompt: Sequence[int], tokens: int, chance: random.Random
) -> tuple[Decoded, Decoded]:
    """Plain and automatic, side by side."""
    ways = {"plain": (lm, 0), "auto": (lm, "auto")}
    got = decode_together(prompt, ways, chance, max_new_tokens=tokens, sampling=lab.sampling)
    same(got["auto"].token_ids, got["plain"].token_ids)
    return got["plain"], got["auto"]


def pair(got: tuple[Decoded, Decoded], lab: Lab, kind: str = "") -> Pair:
    plain, other = got
    cost = lab.cost.of(greedy=lab.sampling.greedy)
    return Pair(plain.whole, other.whole, kind, (counted(plain, cost), counted(other, cost)))


def counted(decoded: Decoded, cost: CostTable) -> float:
    """Seconds by the table, of one text."""
    return sum(counted_step([r], cost) for r in decoded.rounds)


def counted_step(rounds: Sequence[Round], cost: CostTable) -> float:
    """The same of a step of a batch; prefills are not counted."""
    rows = [r for r in rounds if r.index > 0]
    if not rows:
        return 0.0
    tokens = sum(r.num_draft_tokens + 1 for r in rows)
    passes = [r.num_draft_passes for r in rows]
    drafting = [sum(n > i for n in passes) for i in range(max(passes))]
    seconds = cost.verify_pass(tokens, CONTEXT, sequences=len(rows))
    seconds += sum(cost.draft_pass(n, CONTEXT, sequences=n, late=True) for n in drafting)
    return seconds + (cost.draft_start if drafting else 0.0)


def bad(accuracies: Sequence[float] | None, *, cold: bool = False) -> Case:
    """A stream of requests with a drafter that is right so often; None: it draws any token."""

    def case(lab: Lab, chance: random.Random) -> Callable[[int], list[Pair]]:
        lm = lab.lm()
        drafter = install(lm, Random(lm) if accuracies is None else Corrupted(lm, 0.0))
        waiting: list[float] = []

        def turn(i: int) -> list[Pair]:
            prompt = lab.prompts[i % len(lab.prompts)]
            wanted = decode(lm, prompt, 0, max_new_tokens=lab.tokens, sampling=lab.sampling)
            drafter.text = (*prompt, *wanted.token_ids)
            if accuracies is not None:
                if not waiting:  # as many of each
                    waiting.extend(chance.sample(accuracies, len(accuracies)))
                drafter.accuracy = waiting.pop()
            if cold:
                forget(lm)
            got = taking_turns(lab, lm, prompt, lab.tokens, chance)
            same(got[0].token_ids, wanted.token_ids)
            kind = f"at {drafter.accuracy:g}" if accuracies and len(accuracies) > 1 else ""
            return [pair(got, lab, kind)]

        return turn

    return case


def misled(*, plan: bool) -> Case:
    """Every look-up is wrong, and every draft, if there is a plan."""

    def case(lab: Lab, chance: random.Random) -> Callable[[int], list[Pair]]:
        store = Misleading()
        lm = lab.lm(lookup=store, plan=plan)
        drafter, ends = install(lm, Corrupted(lm, 0.0)) if plan else None, lm.eos_ids

        def turn(i: int) -> list[Pair]:
            prompt = lab.prompts[i % len(lab.prompts)]
            wanted = decode(lm, prompt, 0, max_new_tokens=lab.tokens, sampling=lab.sampling)
            store.token = next(t for t in itertools.count() if t not in (*wanted.token_ids, *ends))
            if drafter is not None:
                drafter.text = (*prompt, *wanted.token_ids)
            return [pair(taking_turns(lab, lm, prompt, lab.tokens, chance), lab)]

        return turn

    return case


def bad_batch(lab: Lab, chance: random.Random) -> Callable[[int], list[Pair]]:
    lm = lab.lm(lookup=True)
    install(lm, Losing(lm)).lost = 1.0

    def turn(i: int) -> list[Pair]:
        return [together(lm, lab, some_of(lab, i, BATCH), chance, joins=False, sampling=SAMPLED)]

    return turn


def mixed(lab: Lab, chance: random.Random) -> Callable[[int], list[Pair]]:
    lm = lab.lm()
    drafter = install(lm, CorruptedRows(lm))

    def turn(i: int) -> list[Pair]:
        prompts = some_of(lab, i, BATCH)
        settings = {"num_draft_tokens": 0, "sampling": SAMPLED, "ignore_eos": True}
        wanted = lm.generate(prompts, max_new_tokens=lab.tokens, **settings)
        drafter.texts = [
            ((*prompt, *out.token_ids), MIXED[n % len(MIXED)])
            for n, (prompt, out) in enumerate(zip(prompts, wanted, strict=True))
        ]
        return [together(lm, lab, prompts, chance, joins=False, sampling=SAMPLED)]

    return turn


def switching(lab: Lab, chance: random.Random) -> Callable[[int], list[Pair]]:
    lm = lab.lm()

    def turn(i: int) -> list[Pair]:
        prompt = lab.prompts[i % len(lab.prompts)]
        counts = {"0": (0,), "k": (SWITCHED,), "both": (0, SWITCHED)}
        rounds: dict[str, list[Round]] = {name: [] for name in counts}
        works = {
            name: switched(lab, lm, prompt, itertools.cycle(counts[name]), rounds[name])
            for name in counts
        }
        laps = by_turns(works, chance)
        texts = [[t for r in some for t in r.token_ids] for some in rounds.values()]
        assert texts[0] == texts[1] == texts[2], "other tokens than plain decoding's"

        def clock(plain: str, drafting: str) -> Clock:
            """A plain round and one with drafts, of these: medians."""
            parts = [
                [t for r, t in zip(rounds[name], laps[name], strict=False) if asked(r, count)]
                for name, count in ((plain, 0), (drafting, SWITCHED))
            ]
            wall = sum(statistics.median(c.wall for c in part) for part in parts)
            return Clock(wall, sum(statistics.median(c.cpu for c in part) for part in parts))

        return [Pair(clock("0", "k"), clock("both", "both"))]

    return turn


def asked(record: Round, num_draft_tokens: int) -> bool:
    """Not the prefill, nor a round that the text's end cut."""
    return record.index > 0 and record.num_draft_tokens == num_draft_tokens


def switched(
    lab: Lab,
    lm: SelfSpeculativeLM,
    prompt: Sequence[int],
    counts: Iterator[int],
    rounds: list[Round],
) -> Iterator[int]:
    """Tokens emitted, round by round; each drafts the next of ``counts``."""
    settings = {"sampling": lab.sampling, "num_draft_tokens": SWITCHED, "ignore_eos": True}
    batch = lm.open_batch(max_new_tokens=lab.tokens, **settings)
    row, emitted = batch.add(prompt), 0
    while batch.unfinished:
        if rounds:  # the first is the prefill
            force(batch, row, next(counts))
        rounds += batch.step()
        emitted += len(rounds[-1].token_ids)
        yield emitted


def force(batch: Any, row: int, num_draft_tokens: int) -> None:
    """What a row's next round drafts."""
    state = batch._rows.rows[row]
    state.spec = replace(state.spec, num_draft_tokens=num_draft_tokens)


def ramp(lab: Lab, chance: random.Random) -> Callable[[int], list[Pair]]:
    lm = lab.lm(lookup=True)

    def turn(i: int) -> list[Pair]:
        return [
            together(lm, lab, some_of(lab, i, lab.rows), chance, joins=True, sampling=lab.sampling)
        ]

    return turn


def some_of(lab: Lab, turn: int, rows: int) -> list[list[int]]:
    """The turn's prompts, a batch of them."""
    return [lab.prompts[(turn * rows + n) % len(lab.prompts)] for n in range(rows)]


def together(
    lm: SelfSpeculativeLM,
    lab: Lab,
    prompts: Sequence[list[int]],
    chance: random.Random,
    *,
    joins: bool,
    sampling: SamplingParams,
) -> Pair:
    """A batch plainly and automatically, by turns; see ``batched``."""
    texts: dict[str, dict[int, tuple[int, ...]]] = {"plain": {}, "auto": {}}
    steps: dict[str, list[list[Round]]] = {"plain": [], "auto": []}
    works = {}
    for name in texts:
        batch = lm.open_batch(
            max_new_tokens=lab.tokens,
            num_draft_tokens=0 if name == "plain" else "auto",
            ignore_eos=True,
            sampling=sampling,
        )
        joining = [lab.tokens // 2 * n // len(prompts) * joins for n in range(len(prompts))]
        some = list(zip(joining, prompts, strict=True))
        works[name] = batched(batch, some, texts[name], steps[name], at_once=name == "plain")
    spent = {name: total(laps) for name, laps in by_turns(works, chance).items()}
    same(texts["auto"], texts["plain"])
    cost = lab.cost.of(greedy=sampling.greedy)
    plain, auto = (sum(counted_step(s, cost) for s in steps[n]) for n in ("plain", "auto"))
    return Pair(spent["plain"], spent["auto"], counted=(plain, auto))


def batched(
    batch: Any,
    prompts: Sequence[tuple[int, list[int]]],
    texts: dict[int, tuple[int, ...]],
    steps: list[list[Round]],
    *,
    at_once: bool,
) -> Iterator[int]:
    """Tokens that all rows have emitted, step by step; ``texts`` gets theirs, ``steps`` the rounds.

    Each joins once the first one has emitted so many tokens; in the ramp the last by the time that
    it has half of its text, and then they end one after another. Drafts may end one before that:
    only plainly have all to be there ``at_once``.
    """
    waiting = list(prompts)[::-1]
    emitted = first = most = 0  # tokens: of all, of the row that joined first; rows
    while waiting or batch.unfinished:
        while waiting and waiting[-1][0] <= first:
            batch.add(waiting.pop()[1])
        most = max(most, len(batch.unfinished))
        steps.append(batch.step())
        for record in steps[-1]:
            emitted += len(record.token_ids)
            first += len(record.token_ids) if record.row == 0 else 0
            if record.finish_reason is not None:
                texts[record.row] = batch.remove(record.row).token_ids
        yield emitted
    assert not at_once or most == len(prompts), f"{most} rows at most, not {len(prompts)}"


def short(lab: Lab, chance: random.Random) -> Callable[[int], list[Pair]]:
    lm = lab.lm(lookup=True)

    def turn(i: int) -> list[Pair]:
        prompt = lab.prompts[i % len(lab.prompts)]
        got = pair(taking_turns(lab, lm, prompt, SHORT, chance), lab)
        firsts = [taking_turns(lab, lm, prompt, 1, chance) for _ in range(FIRSTS)]
        plain, other = (total([d.whole for d in of]) for of in zip(*firsts, strict=True))
        return [got, Pair(plain, other, "to the first token")]

    return turn


def same(tokens: object, wanted: object) -> None:
    if tokens != wanted:
        raise AssertionError("other tokens than plain decoding's")


SETUPS: dict[str, Case] = {
    "adversarial": bad((0.0,)),
    "adversarial, cold": bad((0.0,), cold=True),
    "random": bad(None),
    "adversarial, look-ups": misled(plan=True),
    "adversarial, look-ups alone": misled(plan=False),
    "adversarial, batch": bad_batch,
    "mixed": mixed,
    "bimodal": bad((0.95, 0.05)),
    "switching": switching,
    "ramp": ramp,
    "short": short,
}
BOUNDS = {  # percent slower
    "adversarial": 3.0,
    "adversarial, cold": 3.0,
    "random": 3.0,
    "adversarial, look-ups": 3.0,
    "adversarial, look-ups alone": 3.0,
    "adversarial, batch": 3.0,
    "mixed": 3.0,
    "bimodal": 3.0,
    "bimodal at 0.05": 3.0,
    "bimodal at 0.95": 3.0,
    "switching": 1.0,
    "ramp": 3.0,
    "short": 2.0,
    "short to the first token": 1.0,
}


def figures(name: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Percent slower than plain, by both clocks."""
    found = ratios([p.plain for p in pairs], [p.other for p in pairs])
    plain, other = (sum(p.counted[i] for p in pairs) for i in (0, 1))
    out: dict[str, Any] = {
        "turns": len(pairs),
        "bound": BOUNDS[name],
        "counted": 100.0 * (other / plain - 1.0) if plain else None,
    }
    for clock in ("wall", "cpu"):
        out[clock] = 100.0 * (found[clock] - 1.0)
        out[f"{clock}_ci95"] = [100.0 * (x - 1.0) for x in found[f"{clock}_ci95"]]
        out[f"{clock}_within"] = out[clock] <= BOUNDS[name]
    return out


def summed(name: str, pairs: Sequence[Pair]) -> dict[str, dict[str, Any]]:
    """A case as a whole, and its kinds."""
    kinds = sorted({p.kind for p in pairs})
    found = {
        f"{name} {k}".strip(): figures(f"{name} {k}".strip(), [p for p in pairs if p.kind == k])
        for k in kinds
    }
    if "" not in kinds:
        found = {name: figures(name, pairs)} | found
    return found


def table(found: dict[str, dict[str, Any]]) -> Table:
    out = Table(box=None, header_style="bold", title="slower than plain, median (95 %)")
    out.add_column("case")
    for column in ("turns", "bound", "counted", "wall", "CPU", "within (wall)"):
        out.add_column(column, justify="right")
    for name, f in found.items():
        cells = [
            "{:+.1f} % ({:+.1f} to {:+.1f})".format(f[c], *f[f"{c}_ci95"]) for c in ("wall", "cpu")
        ]
        counted = "" if f["counted"] is None else f"{f['counted']:+.1f} %"
        within = "yes" if f["wall_within"] else "no"
        out.add_row(name, str(f["turns"]), f"{f['bound']:g} %", counted, *cells, within)
    return out


def lab_of(options: argparse.Namespace) -> Lab:
    model, tokenizer, known, _ = SelfSpeculativeLM.load_parts(
        options.model, device="cpu", dtype=options.dtype
    )
    if known.plan is None:
        raise SystemExit(f"no plan is known for {options.model}")
    cost = wrapped(model, tokenizer, known, known.cost, lookup=False).controller.cost
    examples = examples_from(options.prompts, max(64, options.turns))
    random.Random(0).shuffle(examples)
    room = model.config.max_position_embeddings // 2
    prompts = [
        ids for ids in (tokenizer(e.prompt)["input_ids"] for e in examples) if 0 < len(ids) <= room
    ]
    sampling = sampling_at(options.temperature)
    return Lab(model, tokenizer, known, cost, prompts, options.tokens, options.rows, sampling)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--prompts", help="JSON lines; default: held-out functions")
    parser.add_argument("--cases", default=None, help=f"separated by ';' of {'; '.join(SETUPS)}")
    parser.add_argument("--turns", type=int, default=40, help="pairs of each case (40)")
    parser.add_argument("--ramp-turns", type=int, default=8, help="of the ramp (8)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="of cases that are greedy otherwise (0)"
    )
    parser.add_argument("--tokens", type=int, default=64, help="of long outputs (64)")
    parser.add_argument(
        "--rows", type=int, default=ROWS, help=f"of the ramp at its height ({ROWS})"
    )
    parser.add_argument("--out", type=Path, help="default: the day's record, of a whole run")
    options = parser.parse_args()
    quiet()
    names = [n.strip() for n in options.cases.split(";")] if options.cases else list(SETUPS)
    unknown = [n for n in names if n not in SETUPS]
    if unknown:
        raise SystemExit(f"--cases has {unknown[0]!r}; allowed are {'; '.join(SETUPS)}")
    record = dated("never-slower")
    out = options.out or part_of(record)
    lab, console, found = lab_of(options), Console(width=120), {}
    with Progress(console=console, transient=True) as progress:
        for name in names:
            turns = options.ramp_turns if name == "ramp" else options.turns
            turn = SETUPS[name](lab, random.Random(0))
            if not name.endswith("cold"):
                turn(0)  # allocates, and shows the controller one request
            task, began, pairs = progress.add_task(name, total=turns), time.monotonic(), []
            for i in range(turns):
                pairs += turn(i + 1)
                progress.update(task, completed=i + 1)
                if i == 0:
                    seconds = turns * (time.monotonic() - began)
                    progress.console.print(f"{name}: about {seconds:.0f} s")
            found |= summed(name, pairs)
            document = {"model": options.model, **circumstances(), "tokens": options.tokens}
            write(out, document | {"cases": found})
    console.print(table(found))
    if options.out is None and is_record(options, parser):
        out = out.replace(record)
    console.print(f"written to {out}")


def is_record(options: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Whether a run has every case, with turns enough; what tables read is of such a one."""
    usual = ("model", "dtype", "prompts", "cases", "tokens", "rows", "temperature")
    return as_many(options, parser, "turns") and as_usual(options, parser, *usual)


if __name__ == "__main__":
    main()
