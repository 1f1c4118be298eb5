"""One table per workload: plain, fixed numbers of draft tokens, automatic, look-ups, theirs.

    OMP_NUM_THREADS=1 python bench/workloads.py
    OMP_NUM_THREADS=1 python bench/workloads.py --prompts math=math.jsonl --prompts chat=chat.jsonl

Code, copying and adversarial come from this Python's library; other workloads are JSON lines, taken
evenly from the whole file. Our modes decode each prompt round by round in alternation, whichever
has emitted least; transformers' then do, one after another in random order. A ratio is one
prompt's, by the wall and by the process's own CPU time, and its figure is the median with a
bootstrap 95 % interval. Greedy prompts whose plain output loops are left out. Our modes must emit
what plain decoding does, or the script stops; for transformers' the share of prompts is given.

"Automatic" looks nothing up and is held against the best fixed number that looks nothing up;
"combined", which is what a call without settings does, against that and against the best fixed
number beside look-ups, which is what a call with a number does.

The prediction is ``mean_accepted_length / (passes c + v)`` from the cost table, for what follows
the first token; what was measured of that stands beside it. Predictions compare modes without a
clock, too: "counted" is what automatic drafting's passes cost beside those of the fixed number
whose passes cost least. With ``--profile-seconds`` tables are measured right before each workload
and, in a quarter of that time each, after every third of its prompts: a machine changes within
minutes, and a prediction is the median of those by all of these tables. Adversarial means that no
drafted token is ever right, while the model is as sure of its own as always
(bench/bad_drafters.py).

Without ``--out``, a run of all five kinds of text at both temperatures (``is_record``) is the day's
record in bench/results once it is done. Of any other, and of one that was stopped, the results are
beside it in a file that ends in ``-part.json``, which no table reads.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bad_drafters import Corrupted, install
from figures import over_best, typical_prediction
from lab import draft_model_of
from measuring import reason
from modes import ALONE, TUNED, Theirs
from paired import (
    Clock,
    Decoded,
    as_usual,
    circumstances,
    cost_now,
    dated,
    decode_together,
    geometric_mean,
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
from tasks import TASKS, examples_of, spread

from layerskip import DecodeStats, SamplingParams, SelfSpeculativeLM
from layerskip.compare import REFUSALS, repeated_share
from layerskip.cost import CostTable
from layerskip.outputs import acceptance_by_position
from layerskip.params import NumDraftTokens
from layerskip.prompts import Example, read_prompts

FIXED = (2, 3, 4, 5, 7)
LOOKED_UP = 10
GOAL = 0.03
PROMPTS_OF_A_TABLE = 3
TUNING_PROMPTS = 2
RECORDED_PROMPTS = 12  # of a workload, at least
THEIRS = ("no_theirs", "draft_model")  # options


@dataclass(frozen=True)
class Mode:
    """A way of decoding. ``lm`` is None for transformers' own."""

    name: str
    lm: SelfSpeculativeLM | None
    num_draft_tokens: NumDraftTokens = 0


@dataclass(frozen=True)
class Setting:
    """What all workloads share."""

    model: Any
    tokenizer: Any
    known: Any
    cost: CostTable
    alone: CostTable
    tokens: int
    limit: int
    max_repeated: float
    theirs: tuple[str, ...]
    draft_model: Any
    profile_seconds: float


def beside_look_ups(num_draft_tokens: int) -> str:
    """The mode's name."""
    return f"k={num_draft_tokens}, look-up"


def modes_of(name: str, setting: Setting, bad: list[Corrupted]) -> list[Mode]:
    """Of one workload, with controllers that have seen nothing yet."""

    def lm(*, plan: bool = True, lookup: bool = False) -> SelfSpeculativeLM:
        made = wrapped(
            setting.model,
            setting.tokenizer,
            setting.known if plan else None,
            setting.cost if plan else setting.alone,
            lookup=lookup,
        )
        if plan and name == "adversarial":
            bad.append(install(made, Corrupted(made, 0.0)))
        return made

    exiting = lm()
    modes = [Mode("plain", exiting, 0)]
    modes += [Mode(f"k={k}", exiting, k) for k in FIXED]
    modes += [Mode("automatic", lm(), "auto")]
    if name != "adversarial":
        modes += [Mode("look-up", lm(plan=False, lookup=True), LOOKED_UP)]
        modes += [Mode("look-up, automatic", lm(plan=False, lookup=True), "auto")]
    modes += [Mode("combined", lm(lookup=True), "auto")]
    guessing = lm(lookup=True)
    modes += [Mode(beside_look_ups(k), guessing, k) for k in FIXED]
    theirs = setting.theirs if name != "adversarial" else ()
    return [*modes, *(Mode(theirs_name, None) for theirs_name in theirs)]


class Workload:
    """One workload at one temperature: runs, and what they come to."""

    def __init__(self, name: str, setting: Setting, sampling: SamplingParams) -> None:
        self.name, self.setting, self.sampling = name, setting, sampling
        self.bad: list[Corrupted] = []
        self.modes = modes_of(name, setting, self.bad)
        lm = self.modes[0].lm
        self.theirs = Theirs(setting.model, lm, setting.draft_model, sampling=sampling)
        self.runs: dict[str, list[Decoded]] = {m.name: [] for m in self.modes}
        self.left_out, self.lengths, self.repeated = 0, [], []
        self.tables = [setting.cost]

    def decode(
        self, modes: Sequence[Mode], prompt: Sequence[int], chance: random.Random
    ) -> dict[str, Decoded]:
        """Ours by turns, transformers' one after another."""
        found = decode_together(
            prompt,
            {m.name: (m.lm, m.num_draft_tokens) for m in modes if m.lm is not None},
            chance,
            max_new_tokens=self.setting.tokens,
            sampling=self.sampling,
        )
        theirs = [m.name for m in modes if m.lm is None]
        for name in chance.sample(theirs, len(theirs)):
            turn = self.theirs.decode(name, [prompt], max_new_tokens=self.setting.tokens)
            found[name] = Decoded(turn.texts[0], turn.whole)
        return found

    def run(self, prompts: Sequence[list[int]], on_turn: Callable[[int, int], None]) -> None:
        """Every mode on ``limit`` prompts that do not loop."""
        chance, setting = random.Random(0), self.setting
        tuned = [m.name for m in self.modes if m.name in TUNED]
        for name in tuned:
            try:
                best = self.theirs.tune(name, prompts[-TUNING_PROMPTS:], setting.tokens)
            except REFUSALS as error:
                told = f"transformers' {name} does not run on this model: {reason(error)}"
                raise SystemExit(f"{told}; --no-theirs leaves their modes out") from error
            self.theirs.settings[name] = best
        if tuned and len(prompts) >= setting.limit + TUNING_PROMPTS:  # else these have to do
            prompts = prompts[:-TUNING_PROMPTS]
        kept = 0
        for prompt in prompts:
            if kept == setting.limit:
                break
            plain = self.decode(self.modes[:1], prompt, chance)["plain"]
            share = repeated_share([plain.token_ids])
            if len(plain.token_ids) < 2 or (self.sampling.greedy and share > setting.max_repeated):
                self.left_out += 1
                continue
            for drafter in self.bad:
                drafter.text = (*prompt, *plain.token_ids)
            if not kept:  # each mode's first call allocates, and imports
                self.decode(self.modes, prompt, chance)
            kept += 1
            self.lengths.append(len(prompt))
            self.repeated.append(share)
            found = self.decode(self.modes, prompt, chance)
            for mode in self.modes:
                self._add(mode, found[mode.name], plain.token_ids)
            if setting.profile_seconds and kept % PROMPTS_OF_A_TABLE == 0:
                lm, seconds = self.modes[0].lm, setting.profile_seconds / 4
                self.tables.append(cost_now(lm, seconds))
            on_turn(kept, setting.limit)

    def _add(self, mode: Mode, decoded: Decoded, wanted: tuple[int, ...]) -> None:
        if mode.lm is not None and decoded.token_ids != wanted:
            raise AssertionError(f"{self.name}, {mode.name}: other tokens than plain decoding")
        self.runs[mode.name].append(decoded)

    def document(self) -> dict[str, Any]:
        plain = self.runs["plain"]
        if not plain:
            return {"workload": self.name, "temperature": self.sampling.temperature, "prompts": 0}
        modes = {m.name: self._figures(m) for m in self.modes}
        fixed = ["plain", *(f"k={k}" for k in FIXED)]
        looking_up = ["plain", *(beside_look_ups(k) for k in FIXED)]
        return {
            "workload": self.name,
            "temperature": self.sampling.temperature,
            "prompts": len(self.lengths),
            "prompts_left_out": self.left_out,
            "new_tokens": sum(len(r.token_ids) for r in plain),
            "repeated_8gram_share": sum(self.repeated) / len(self.repeated),
            "modes": modes,
            "automatic_to_best_fixed": self._against_best("automatic", fixed, modes),
            "combined_to_best_looking_up": self._against_best("combined", looking_up, modes),
        }

    def _figures(self, mode: Mode) -> dict[str, Any]:
        runs, plain = self.runs[mode.name], self.runs["plain"]
        speed = ratios([per_token(r) for r in runs], [per_token(r) for r in plain])
        same = [r.token_ids == p.token_ids for r, p in zip(runs, plain, strict=True)]
        spent = total([r.whole for r in runs])
        tokens = sum(len(r.token_ids) for r in runs)
        figures = {
            "tokens_per_second": tokens / spent.wall,
            "speedup_vs_plain": speed["wall"],
            "speedup_vs_plain_ci95": speed["wall_ci95"],
            "cpu_speedup_vs_plain": speed["cpu"],
            "cpu_speedup_vs_plain_ci95": speed["cpu_ci95"],
            "identical_to_plain": sum(same) / len(same)
            if mode.lm is not None or self.sampling.greedy
            else None,
        }
        if mode.lm is None:
            return figures | {"settings": self.theirs.described(mode.name)}
        return figures | self._of_ours(mode, runs, plain)

    def _of_ours(
        self, mode: Mode, runs: Sequence[Decoded], plain: Sequence[Decoded]
    ) -> dict[str, Any]:
        stats = DecodeStats.merge(r.stats for r in runs)
        rounds = [r for run in runs for r in run.rounds if r.index > 0]
        context = sum(self.lengths) / len(self.lengths) + self.setting.tokens / 2
        costs = [cost.of(greedy=self.sampling.greedy) for cost in self.tables]
        spent, base = (total([r.after_first for r in of]) for of in (runs, plain))
        kind = "greedy" if self.sampling.greedy else "coupled"
        told = mode.lm.controller.told(kind)
        learns = mode.num_draft_tokens == "auto" and mode.lm.plan is not None
        return {
            "acceptance_rate": stats.acceptance_rate,
            "mean_accepted_length": stats.mean_accepted_length,
            "acceptance_by_position": list(acceptance_by_position(rounds)),
            "draft_tokens_per_round": stats.num_draft_tokens / max(1, stats.num_rounds),
            "share_of_plain_rounds": stats.num_plain_rounds / max(1, stats.num_rounds),
            "share_of_lookup_rounds": stats.num_lookup_rounds / max(1, stats.num_rounds),
            **typical_prediction(rounds, stats, costs, context),
            "measured_speedup": base.wall / spent.wall,
            "measured_cpu_speedup": base.cpu / spent.cpu,
            "calibration_error": told.error if learns else None,
            "calibration_error_by_chance": told.error_by_chance if learns else None,
        }

    def _against_best(
        self, name: str, fixed: Sequence[str], modes: dict[str, Any]
    ) -> dict[str, Any]:
        """A mode beside the fixed number of draft tokens, or plain, that took least CPU time; and
        the passes that it made beside those of the number that has the cheapest, by the cost table:
        none is the best by luck, but what automatic drafting chose follows its clock still."""
        of = {n: [r.whole for r in runs] for n, runs in self.runs.items()}
        best = min(fixed, key=lambda n: total(of[n]).cpu)
        counted = {n: modes[n]["predicted_speedup"] for n in (*fixed, name)}
        cheapest = max(fixed, key=lambda n: counted[n])
        return {
            "best": best,
            **ratios(of[name], of[best]),
            "counted_best": cheapest,
            "counted": counted[name] / counted[cheapest],
        }


def per_token(run: Decoded) -> Clock:
    """Transformers' texts may end elsewhere: a mode that writes less is not faster for it."""
    count = max(1, len(run.token_ids))
    return Clock(run.whole.wall / count, run.whole.cpu / count)


def speed_table(document: dict[str, Any]) -> Table:
    """As people read it."""
    title = (
        f"{document['workload']}, temperature {document['temperature']:g}: {document['prompts']} "
        f"prompts ({document['prompts_left_out']} left out), "
        f"{document['repeated_8gram_share']:.0%} repeated"
    )
    table = Table(title=title, box=None, header_style="bold", title_justify="left")
    table.add_column("mode")
    columns = ("same", "wall / plain", "CPU / plain", "length", "passes", "c", "v", "predicted")
    for column in (*columns, "measured", "plain", "ECE", "a by position"):
        table.add_column(column, justify="left" if column == "a by position" else "right")
    for name, mode in document["modes"].items():
        table.add_row(name, *cells(mode))
    return table


def cells(mode: dict[str, Any]) -> list[str]:
    def number(name: str, form: str = ".2f") -> str:
        value = mode.get(name)
        return "" if value is None else format(value, form)

    def with_interval(name: str) -> str:
        low, high = mode[f"{name}_ci95"]
        return f"{mode[name]:.2f} ({low:.2f}-{high:.2f})"

    return [
        number("identical_to_plain", ".0%"),
        with_interval("speedup_vs_plain"),
        with_interval("cpu_speedup_vs_plain"),
        number("mean_accepted_length"),
        number("draft_passes_per_round"),
        number("c", ".3f"),
        number("v"),
        number("predicted_speedup"),
        number("measured_cpu_speedup"),
        number("share_of_plain_rounds", ".0%"),
        number("calibration_error", ".3f"),
        " ".join(f"{a:.2f}" for a in mode.get("acceptance_by_position", [])[:7]),
    ]


def mix(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means of the medians over all workloads, of the modes that all have."""
    done = [d for d in documents if d["prompts"]]
    names = [n for n in done[0]["modes"] if all(n in d["modes"] for d in done)] if done else []
    return {
        n: {
            key: geometric_mean([d["modes"][n][key] for d in done])
            for key in ("speedup_vs_plain", "cpu_speedup_vs_plain")
        }
        for n in names
    }


def texts_of(name: str, files: dict[str, str], wanted: int) -> list[Example]:
    """At least so many prompts where there are as many."""
    if name in files:
        return read_prompts(files[name])
    return examples_of("code" if name == "adversarial" else name, 8 * wanted)


def verdicts(documents: Sequence[dict[str, Any]], console: Console) -> None:
    """What is asked for beside what was found."""
    for d in (d for d in documents if d["prompts"]):
        for name, versus in (("automatic", "fixed"), ("combined", "looking_up")):
            found = d[f"{name}_to_best_{versus}"]
            together = over_best(d["modes"], name, looking_up=versus == "looking_up")
            low, high = found["cpu_ci95"]
            console.print(
                f"{d['workload']}, {d['temperature']:g}: {name} / {found['best']} by CPU time "
                f"{found['cpu']:.3f} (95 % {low:.3f}-{high:.3f}), all prompts together "
                f"{together:.3f} ({1 - GOAL:.2f} or more is asked for); passes by the cost table "
                f"{found['counted']:.3f} of {found['counted_best']}"
            )
        for name, mode in d["modes"].items():
            if "predicted_speedup" in mode and name != "plain":
                off = mode["measured_cpu_speedup"] / mode["predicted_speedup"] - 1.0
                if abs(off) > 0.1:
                    console.print(f"  {name}: {off:+.0%} of what the cost table predicts")


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--dtype", default=None)
    parser.add_argument(
        "--prompts", action="append", default=[], metavar="NAME=FILE", help="a workload's prompts"
    )
    parser.add_argument(
        "--workloads",
        help="comma-separated; default: code, those of --prompts, copying, adversarial",
    )
    parser.add_argument("--limit", type=int, default=30, help="prompts of a workload (30)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of a prompt (64)")
    parser.add_argument("--max-repeated", type=float, default=0.2, help="8-grams, greedy (0.2)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument(
        "--profile-seconds",
        type=float,
        default=0.0,
        help="before each workload, and again within it; 0: a load's table (0)",
    )
    parser.add_argument("--no-theirs", action="store_true", help="leave transformers' modes out")
    parser.add_argument(
        "--draft-model", default="auto", help="independent, same tokenizer; none leaves it out"
    )
    parser.add_argument("--out", type=Path, help="default: the day's record, of a whole run")
    return parser


def names_of(options: argparse.Namespace, files: Iterable[str]) -> list[str]:
    """The workloads that are asked for."""
    return (options.workloads or ",".join(["code", *files, "copying", "adversarial"])).split(",")


def is_record(options: argparse.Namespace, names: Iterable[str]) -> bool:
    """Whether a run measures all that the tables of the READMEs show, as they say it was."""
    parser = parser_of()
    return (
        options.limit >= RECORDED_PROMPTS
        and {*TASKS, "adversarial"} <= set(names)
        and set(parser.get_default("temperatures")) <= set(options.temperatures)
        and as_usual(options, parser, "model", "dtype", "tokens", "max_repeated", *THEIRS)
    )


def main() -> None:
    parser = parser_of()
    options = parser.parse_args()
    quiet()
    files = dict(pair.split("=", 1) for pair in options.prompts)
    names = names_of(options, files)
    known = (*files, *TASKS, "adversarial")
    if strange := [name for name in names if name not in known]:
        parser.error(f"no workload {', '.join(strange)}: there are {', '.join(known)}")
    setting, record = setting_of(options), dated("workloads")
    out = options.out or part_of(record)
    whole = options.out is None and is_record(options, names)
    named = {"out": (record if whole else out).name, "prompts": sorted(files)}
    named["draft_model"] = Path(options.draft_model).name
    console, documents = Console(width=170), []
    turns, done, began = len(names) * len(options.temperatures), 0, time.monotonic()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=float(turns))
        for temperature in options.temperatures:
            sampling = sampling_at(temperature)
            for name in dict.fromkeys(names):
                setting = profiled(setting, options.profile_seconds)
                workload = Workload(name, setting, sampling)

                def on_turn(kept: int, limit: int, done: int = done) -> None:
                    progress.update(task, completed=done + kept / limit)
                    if done == 0 and kept in (1, limit):
                        # The first prompt pays for warming up, too.
                        minutes = (time.monotonic() - began) / kept * limit * turns / 60.0
                        progress.console.print(f"about {minutes:.0f} minutes in all, or less")

                workload.run(prompts_of(name, files, setting), on_turn)
                done += 1
                documents.append(workload.document())
                found = {
                    "model": options.model,
                    **circumstances(),
                    "command": vars(options) | named,
                }
                write(out, found | {"workloads": documents, "mix": mix(documents)})
                if documents[-1]["prompts"]:
                    progress.console.print(speed_table(documents[-1]))
                else:
                    progress.console.print(f"{name}, {temperature:g}: every prompt loops")
    console.print(f"written to {out.replace(record) if whole else out}")
    verdicts(documents, console)
    for name, speed in mix(documents).items():
        console.print(f"mix, {name}: {speed['cpu_speedup_vs_plain']:.3f} by CPU time")


def setting_of(options: argparse.Namespace) -> Setting:
    model, tokenizer, known, _ = SelfSpeculativeLM.load_parts(
        options.model, dtype=options.dtype, device="cpu"
    )
    if known.plan is None:
        raise SystemExit(f"no plan is known for {options.model}")
    exiting = wrapped(model, tokenizer, known, known.cost, lookup=False)
    alone = wrapped(model, tokenizer, None, None, lookup=True)
    theirs = () if options.no_theirs else ALONE
    draft_model = draft_model_of(options.draft_model, options.model, model) if theirs else None
    if draft_model is None:
        theirs = tuple(name for name in theirs if name != "hf-draft-model")
    return Setting(
        model,
        tokenizer,
        known,
        exiting.controller.cost,
        alone.controller.cost,
        options.tokens,
        options.limit,
        options.max_repeated,
        theirs,
        draft_model,
        options.profile_seconds,
    )


def profiled(setting: Setting, seconds: float) -> Setting:
    """The same with tables of this moment; 0 seconds: with those that it has."""
    if not seconds:
        return setting
    exiting = wrapped(setting.model, setting.tokenizer, setting.known, setting.cost, lookup=False)
    alone = wrapped(setting.model, setting.tokenizer, None, setting.alone, lookup=True)
    cost, own = (cost_now(lm, seconds / 2) for lm in (exiting, alone))
    return replace(setting, cost=cost, alone=own)


def prompts_of(name: str, files: dict[str, str], setting: Setting) -> list[list[int]]:
    """Encoded, those that leave room, spread over the file."""
    examples = texts_of(name, files, setting.limit)
    room = setting.model.config.max_position_embeddings - setting.tokens - LOOKED_UP
    encoded = [setting.tokenizer(e.prompt)["input_ids"] for e in examples]
    return spread([ids for ids in encoded if 0 < len(ids) <= room], setting.limit)


if __name__ == "__main__":
    main()
