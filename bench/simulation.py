"""Whether ``layerskip simulate`` tells what a batch really does.

    OMP_NUM_THREADS=1 python bench/simulation.py
    OMP_NUM_THREADS=1 python bench/simulation.py --clock cpu --turns 4 --requests 24 --new-tokens 32

A closed loop of real requests through ``open_batch`` at several concurrencies and with every
policy, against the simulation from a cost table and runs of the same sitting. All of these go on in
turns, a little at a time, so that what else the machine does hits all alike: a slow stretch of a
minute is longer than a loop's whole part would be, and no simulation can know whose part it hits.
Between turns a loop's requests wait and its clock stands still. The table is the median of several.
Requests have their own numbers of tokens: with the same one, users who once sent together would do
so forever, and a loop would show one such chance.
Loops begin and end as simulated ones do: users are taken up somewhere in a first request that is
not counted, and go on sending until the last counted request is done. Of many users more requests
are counted: they wait for each other's prompts, one, two or three at a time, and a quantile that
lies between two of these numbers is a matter of chance for long.

By ``--clock cpu`` the decoder's own clocks, and with them the recorded rounds and the controller,
count this process's CPU time: for a machine that does other things, too. Real figures are given by
both clocks in any case.
"""

import argparse
import hashlib
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from paired import (
    NO_TIME,
    Clock,
    as_many,
    as_usual,
    circumstances,
    cost_now,
    dated,
    part_of,
    write,
)
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tasks import examples_from

import layerskip.decode
from layerskip import GenerationOutput, Round, SelfSpeculativeLM
from layerskip.controller import Controller
from layerskip.cost import CostTable, Curve
from layerskip.simulate import Cell, most_drafted, simulate
from layerskip.telemetry.replay import Replay, replay

MEASURES = ("first_token", "token", "end_to_end")
BOUND = 0.15


@dataclass(frozen=True)
class Request:
    """A prompt's ids, and how many tokens it is answered with."""

    ids: list[int]
    new_tokens: int


@dataclass(frozen=True)
class Loop:
    """Times of counted requests, by ``MEASURES``, and counts of what all steps did."""

    times: dict[str, list[Clock]]
    done: Counter[str]

    def means(self) -> dict[str, float]:
        """As ``Cell`` has them, and the prefills of a step with any."""
        rows, steps = max(1, self.done["rows"]), max(1, self.done["rounds"])
        return {
            "mean_draft_tokens": self.done["drafted"] / rows,
            "mean_accepted_length": self.done["emitted"] / rows,
            "rows": rows / steps,
            "prefills": self.done["prefills"] / max(1, self.done["steps_with_prefills"]),
        }

    def quantile(self, measure: str, share: float, clock: str) -> float:
        return float(np.quantile([getattr(t, clock) for t in self.times[measure]], share))


@contextmanager
def clocked(clock: str) -> Iterator[None]:
    """The decoder's clocks count CPU time inside."""
    kept = layerskip.decode.time
    if clock == "cpu":
        layerskip.decode.time = SimpleNamespace(perf_counter=time.process_time)
    try:
        yield
    finally:
        layerskip.decode.time = kept


def setting(policy: str) -> Any:
    return "auto" if policy == "auto" else most_drafted(policy)


def over_and_over(requests: Sequence[Request], chance: random.Random) -> Iterator[Request]:
    """Each as often as any other, so that quantiles hold less of chance; in no order."""
    while True:
        yield from chance.sample(requests, len(requests))


class Users:
    """A closed loop: so many users, each of whom sends a request when the last one is answered.

    It runs in parts, and its clock stands still between them.

    Attributes:
        loop: what was counted so far.
    """

    def __init__(
        self,
        lm: SelfSpeculativeLM,
        requests: Sequence[Request],
        policy: str,
        concurrency: int,
        counted: int,
        chance: random.Random,
    ) -> None:
        self._requests, self._counted = over_and_over(requests, chance), counted
        self._batch = lm.open_batch(num_draft_tokens=setting(policy), ignore_eos=True)
        self._spent, self._joined, self._first = NO_TIME, dict[int, Clock](), dict[int, Clock]()
        self.loop = Loop({name: [] for name in MEASURES}, Counter())
        for _ in range(concurrency):
            first = chance.choice(requests)
            self._batch.add(first.ids, max_new_tokens=chance.randint(1, first.new_tokens))

    def run(self, counted: int) -> None:
        """Until so many counted requests are done, of all parts together."""
        while len(self.loop.times["end_to_end"]) < counted:
            began = Clock.now()
            records = self._batch.step()
            now = self._spent + (Clock.now() - began)
            for record in records:
                self._note(record, now)
            self._spent += Clock.now() - began
            self._tally(records)

    def _tally(self, records: Sequence[Round]) -> None:
        done, decoded = self.loop.done, [r for r in records if r.index > 0]
        done["prefills"] += len(records) - len(decoded)
        done["steps_with_prefills"] += len(decoded) < len(records)
        done["rounds"] += bool(decoded)
        done["rows"] += len(decoded)
        done["drafted"] += sum(r.num_draft_tokens for r in decoded)
        done["emitted"] += sum(len(r.token_ids) for r in decoded)

    def _note(self, record: Round, now: Clock) -> None:
        began, times = self._joined.get(record.row), self.loop.times
        if began is not None and record.index == 0:
            self._first[record.row] = now
            times["first_token"].append(now - began)
        if record.finish_reason is None:
            return
        tokens = len(self._batch.remove(record.row).token_ids)
        if began is not None:
            times["end_to_end"].append(now - began)
            spent = now - self._first[record.row]
            times["token"].append(Clock(spent.wall / (tokens - 1), spent.cpu / (tokens - 1)))
        following = next(self._requests)
        row = self._batch.add(following.ids, max_new_tokens=following.new_tokens)
        if len(self._joined) < self._counted:
            self._joined[row] = now


def alone(lm: SelfSpeculativeLM, asked: Request, policy: str) -> GenerationOutput:
    batch = lm.open_batch(num_draft_tokens=setting(policy), ignore_eos=True)
    row = batch.add(asked.ids, max_new_tokens=asked.new_tokens)
    while batch.unfinished:
        batch.step()
    return batch.remove(row)


def record_runs(
    lm: SelfSpeculativeLM,
    requests: Sequence[Request],
    turn: int,
    options: argparse.Namespace,
    folder: Path,
) -> None:
    """Some requests alone, with every policy, as ``layerskip measure`` writes them."""
    for number in range(turn, len(requests), options.turns):
        asked = requests[number]
        for policy in options.policies:
            output = alone(lm, asked, policy)
            own = {"request_id": f"{number}/{policy}", "arm": policy, "prompt_index": number}
            request = {
                **own,
                "prompt_tokens": len(asked.ids),
                "new_tokens": len(output.token_ids),
                "max_new_tokens": asked.new_tokens,
                "tokens_sha256": hashlib.sha256(repr(output.token_ids).encode()).hexdigest(),
            }
            append(folder / "rounds.jsonl", [{**r.to_dict(), **own} for r in output.rounds])
            append(folder / "requests.jsonl", [request])


def append(path: Path, entries: Sequence[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)


def median_table(tables: Sequence[CostTable]) -> CostTable:
    """Field by field and time by time, of those with the finest grid: a busy turn's is coarser."""
    most = max(len(t.verify.rows) * len(t.verify.contexts) for t in tables)
    tables = [t for t in tables if len(t.verify.rows) * len(t.verify.contexts) == most]

    def curve(name: str) -> Curve:
        curves = [getattr(t, name) for t in tables]
        seconds = np.median([c.seconds for c in curves], axis=0)
        return Curve(curves[0].rows, curves[0].contexts, tuple(map(tuple, seconds.tolist())))

    single = [f.name for f in fields(CostTable) if isinstance(getattr(tables[0], f.name), float)]
    return replace(
        tables[0],
        **{name: curve(name) for name in ("draft_layers", "draft_head", "verify")},
        **{name: statistics.median(getattr(t, name) for t in tables) for name in single},
    )


def compared(cell: Cell, loop: Loop) -> dict[str, dict[str, float]]:
    """Simulated and real quantiles, in seconds, and how far the simulation is off by each clock."""
    found = {}
    for measure in MEASURES:
        for name, share in (("p50", 0.5), ("p90", 0.9)):
            said = getattr(getattr(cell, measure), name)
            real = {clock: loop.quantile(measure, share, clock) for clock in ("wall", "cpu")}
            off = {f"{clock}_off": said / seconds - 1.0 for clock, seconds in real.items()}
            found[f"{measure} {name}"] = {"simulated": said, **real, **off}
    return found


def rounds_of(cell: Cell, loop: Loop) -> dict[str, dict[str, float]]:
    """What a round does on the average, simulated and real."""
    real = loop.means()
    return {name: {"simulated": getattr(cell, name), "real": real[name]} for name in real}


def table_of(found: dict[str, Any], clock: str) -> Table:
    out = Table(box=None, header_style="bold", title=f"simulated / real - 1, by {clock} time")
    names = [f"{m} {q}" for m in MEASURES for q in ("p50", "p90")]
    for column in ("concurrency", "policy", *names):
        out.add_column(column, justify="right", no_wrap=column == "policy")
    for cell in found["cells"]:
        off = [cell["figures"][name][f"{clock}_off"] for name in names]
        shown = [f"{x:+.1%}" if abs(x) <= BOUND else f"[red]{x:+.1%}[/]" for x in off]
        out.add_row(str(cell["concurrency"]), cell["policy"], *shown)
    return out


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--dtype", help="default: the checkpoint's own")
    parser.add_argument("--prompts", help="JSON lines; default: held-out functions")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--turns", type=int, default=16, help="of recorded runs and loops (16)")
    parser.add_argument("--tables", type=int, default=4, help="measured, between the turns (4)")
    parser.add_argument("--requests", type=int, default=192, help="of each loop, all turns (192)")
    parser.add_argument("--each", type=int, default=48, help="and of each user at least (48)")
    parser.add_argument("--num-prompts", type=int, default=48, help="that requests draw from (48)")
    parser.add_argument("--new-tokens", type=int, default=48, help="at most; at least a third (48)")
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--policies", default="off,fixed:4,auto")
    parser.add_argument("--profile-seconds", type=float, default=15.0, help="of each table (15)")
    parser.add_argument("--lookup", action="store_true", help="let the decoder look tokens up")
    parser.add_argument("--out", type=Path, help="default: the day's record, of a whole run")
    parser.add_argument("--keep-runs", type=Path, help="folder for table and runs, without any yet")
    options = parser.parse_args()
    if options.keep_runs is not None and (options.keep_runs / "rounds.jsonl").exists():
        parser.error(f"--keep-runs {options.keep_runs} has runs already; name another folder")
    record = dated("simulation")
    options.out = options.out or (record if is_record(options, parser) else part_of(record))
    options.concurrency = [int(n) for n in options.concurrency.split(",")]
    options.policies = options.policies.split(",")
    return options


def is_record(options: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Whether a run is of all the loops that tables show, and of requests enough."""
    usual = ("model", "dtype", "prompts", "clock", "new_tokens", "concurrency", "policies")
    many = ("turns", "tables", "requests", "each", "num_prompts", "profile_seconds")
    return as_many(options, parser, *many) and as_usual(options, parser, *usual, "lookup")


def sitting(
    lm: SelfSpeculativeLM, requests: Sequence[Request], options: argparse.Namespace, folder: Path
) -> tuple[CostTable, dict[tuple[int, str], Loop]]:
    """Table, runs and loops, in turns."""
    tables, users, chance = [], {}, random.Random(0)
    cases = [(n, p) for n in options.concurrency for p in options.policies]
    with Progress(transient=True) as progress:
        task = progress.add_task("real", total=options.turns * (len(cases) + 1) + options.tables)
        for turn in range(options.turns):
            if len(tables) <= turn * options.tables // options.turns:
                tables.append(cost_now(lm, options.profile_seconds))
                progress.advance(task)
            if turn == 0:
                known = lm.plan_file
                lm._controller = Controller(tables[0], known.acceptance, known.calibration)
                for policy in options.policies:  # what a process does once is no part of a round
                    alone(lm, requests[0], policy)
            with clocked(options.clock):
                record_runs(lm, requests, turn, options, folder)
                progress.advance(task)
                for number, policy in chance.sample(cases, len(cases)):
                    counted = max(options.requests, options.each * number)
                    if (number, policy) not in users:
                        wanted = policy, number, counted
                        users[number, policy] = Users(lm, requests, *wanted, chance)
                    users[number, policy].run(counted * (turn + 1) // options.turns)
                    progress.advance(task)
    return median_table(tables), {case: of.loop for case, of in users.items()}


def main() -> None:
    options, console = parsed(), Console(width=140)
    lm = SelfSpeculativeLM.from_pretrained(
        options.model,
        device="cpu",
        dtype=options.dtype,
        lookup=options.lookup,
        num_draft_tokens=0,
    )
    examples = examples_from(options.prompts, options.num_prompts)
    room = lm.stack.max_positions - options.new_tokens - 32
    prompts = [ids for ids in (lm.encode(e.prompt) for e in examples) if len(ids) <= room]
    chance, most = random.Random(0), options.new_tokens
    prompts = chance.sample(prompts, min(len(prompts), options.num_prompts))
    requests = [Request(ids, chance.randint(max(2, most // 3), most)) for ids in prompts]
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep_runs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        table, loops = sitting(lm, requests, options, folder)
        table.save(folder / "cost.json")
        run = {"version": 1, "cost": table.to_dict(), "sampling": {"temperature": 0.0}}
        (folder / "run.json").write_text(json.dumps(run))
        known: Replay = replay(folder, table)
    simulation = simulate(
        known.table,
        known.recorded,
        concurrency=options.concurrency,
        policies=options.policies,
        overhead=known.overhead,
        passes_per_token=known.passes_per_token,
        machine=known.machine,
    )
    cells = [
        {
            "concurrency": n,
            "policy": p,
            "figures": compared(simulation.cell(p, n), loop),
            "rounds": rounds_of(simulation.cell(p, n), loop),
        }
        for (n, p), loop in sorted(loops.items())
    ]
    found = {
        "model": options.model,
        "dtype": str(lm.stack.dtype).removeprefix("torch."),
        **circumstances(),
        "clock": options.clock,
        "seconds": time.monotonic() - began,
        "requests": options.requests,
        "requests_of_a_user": options.each,
        "new_tokens": options.new_tokens,
        "turns": options.turns,
        "prompts": len(prompts),
        "lookup": options.lookup,
        "overhead": vars(known.overhead),
        "passes_per_token": known.passes_per_token,
        "slowness": known.machine.slowness if known.machine else None,
        "cells": cells,
    }
    write(options.out, found)
    for clock in ("wall", "cpu"):
        console.print(table_of(found, clock))
    console.print(f"overhead {known.overhead}, passes per token {known.passes_per_token:.2f}")
    console.print(f"written to {options.out}")


if __name__ == "__main__":
    main()
