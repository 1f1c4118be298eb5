"""The tables of the READMEs, each made of files in bench/results (``Files``)."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from gpu.tables import summary
from modes import ALONE, BASE, MODES, OURS
from paired import geometric_mean

from layerskip.params import AUTO
from layerskip.telemetry.decision import FEWEST_REQUESTS

TITLES = {
    "hf": "transformers `generate`",
    "hf-static": "transformers, static cache",
    "hf-early-exit": "transformers `assistant_early_exit`, tuned",
    "hf-prompt-lookup": "transformers `prompt_lookup_num_tokens`",
    "hf-draft-model": "transformers `assistant_model`, an independent one, tuned",
    BASE: "layerskip, plain",
    "fixed": "layerskip, 4 drafted tokens a round",
    "automatic": "**layerskip, automatic**",
    "look-up": "layerskip, look-ups alone",
}
FIRST_SCREEN = {
    "code, T 0.8": "code-sampled",
    "code, greedy": "code-greedy",
    "maths, T 0.8": "math-sampled",
    "maths, greedy": "math-greedy",
}
DETAILED = "code-sampled"
TRAINED = (
    "exit-adapter-plain",
    "lora-plain-consistency",
    "exit-adapter-builtin",
    "lora-builtin",
)
RATIOS = ("end_to_end", "tokens_per_second")
SIMULATED = ("first_token", "token", "end_to_end")
PERCENT = 100.0
MAKE = {
    "bench.json": "make bench",
    "bench-full.json": "make bench-full",
    "exactness.json": "make bench-full",
    "scaling.json": "make bench-full",
}

Modes = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Files:
    """The result files, read when a table asks for them."""

    folder: Path

    def read(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if not path.is_file():
            raise SystemExit(f"{path} is not there; `{MAKE[name]}` writes it")
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content

    def cells(self, name: str) -> dict[str, dict[str, dict[str, Any]]]:
        """Figures by cell and mode, of a file that pytest-benchmark wrote; with each prompt's
        ``seconds_per_token`` where the file has them."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for one in self.read(name)["benchmarks"]:
            info = one["extra_info"]
            data = {"seconds_per_token": one["stats"]["data"]} if "data" in one["stats"] else {}
            found.setdefault(info["cell"], {})[info["mode"]] = info | data
        return found

    def latest(self, name: str) -> dict[str, Any]:
        """The newest file of a script whose results are dated."""
        found = sorted(self.folder.glob(f"????-??-??-{name}.json"))
        if not found:
            raise SystemExit(
                f"{self.folder} has no dated {name}.json; bench/LOG.md has its command"
            )
        content: dict[str, Any] = json.loads(found[-1].read_text(encoding="utf-8"))
        return content

    @cached_property
    def quick(self) -> dict[str, dict[str, dict[str, Any]]]:
        return self.cells("bench.json")


def rows(header: Sequence[str], lines: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A Markdown table; the first ``left`` columns are text."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, rule, *lines))


def measured_at(*records: Mapping[str, Any]) -> str:
    """Under a table: the commits and machines of what it was made from."""
    of = sorted({f"`{r['commit']}`, {r['machine']}, threads: {r['threads']}" for r in records})
    return f"\nMeasured at {'; '.join(of)}.\n"


def number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def with_interval(figures: Mapping[str, Any] | None, name: str) -> str:
    if figures is None or name not in figures:
        return "-"
    low, high = figures[f"{name}_ci95"]
    return f"{figures[name]:.2f} ({low:.2f} to {high:.2f})"


def speed(files: Files) -> str:
    """The first screen: tokens a second, our plain decoding being 1."""
    name = f"speedup_vs_{BASE}"
    cells = [files.quick.get(cell, {}) for cell in FIRST_SCREEN.values()]
    lines = []
    for mode in MODES:
        if any(mode in cell for cell in cells):
            values = [number(cell.get(mode, {}).get(name)) for cell in cells]
            bold = "**" if mode == "automatic" else ""
            lines.append([TITLES[mode], *(f"{bold}{v}{bold}" for v in values)])
    predicted = [number(c.get("automatic", {}).get("predicted_speedup")) for c in cells]
    lines.append(["predicted for it by `m / (d c + v)`, after the first token", *predicted])
    measured = [number(c.get("automatic", {}).get("measured_speedup")) for c in cells]
    lines.append(["measured, after the first token", *measured])
    return rows(["tokens per second, ours plain = 1", *FIRST_SCREEN], lines)


def cells(files: Files) -> str:
    """Every cell: intervals for ours, the fastest of transformers' modes beside them."""
    lines = []
    for name, modes in files.quick.items():
        lines.append(
            [
                f"`{name}`",
                str(modes[BASE]["prompts"]),
                number(modes[BASE].get("repeated_8gram_share"), ".0%"),
                with_interval(modes.get("hf"), f"speedup_vs_{BASE}"),
                best_of_theirs(modes),
                *(
                    with_interval(modes.get(m), f"speedup_vs_{BASE}")
                    for m in ("fixed", "look-up", "automatic")
                ),
            ]
        )
    header = ["cell", "prompts", "repeated", "`generate`", "the fastest of its drafting modes"]
    return rows([*header, "ours, 4 drafted", "ours, look-ups", "**ours, automatic**"], lines)


def best_of_theirs(modes: Modes) -> str:
    name = f"speedup_vs_{BASE}"
    found = {m: modes[m] for m in ALONE if m in modes}
    if not found:
        return "-"
    best = max(found, key=lambda m: found[m][name])
    told = f"{with_interval(found[best], name)}, {best.removeprefix('hf-').replace('-', ' ')}"
    same = found[best].get("identical_to_own_plain")  # None of samples, which cannot be compared
    return told if same is None else f"{told}; {same:.0%} as plain"


def latency(files: Files) -> str:
    """One cell in full."""
    lines = []
    for mode, f in sorted(files.quick[DETAILED].items(), key=lambda item: MODES.index(item[0])):
        times = [f["seconds_to_first_token"], *(f[f"seconds_per_token_p{p}"] for p in (50, 90, 99))]
        lines.append(
            [
                TITLES[mode],
                f"{f['tokens_per_second']:.0f}",
                *(f"{1e3 * seconds:.1f}" for seconds in times),
                f"{f['peak_memory_bytes'] / 2**20:.1f}",
                f"{f['kv_cache_bytes'] / 2**20:.2f}",
                number(f.get("acceptance_rate"), ".0%"),
                number(
                    f.get("mean_accepted_length")
                    if f.get("acceptance_rate") or mode in ALONE
                    else None
                ),
            ]
        )
    header = ["mode", "tokens/s", "first token, ms", "per token p50", "p90", "p99", "peak MiB"]
    return rows([*header, "cache MiB", "accepted", "mean length"], lines)


def matrix(files: Files) -> str:
    """The full matrix: geometric means over tasks, and the worst cell of each group."""
    groups: dict[tuple[Any, ...], list[Modes]] = {}
    cells = files.cells("bench-full.json").values()
    for modes in cells:
        info = modes[BASE]
        group = (info["kind"], info["batch"], info["context"], info["tokens"])
        groups.setdefault(group, []).append(modes)
    lines = []
    for group, found in groups.items():
        ours = "fixed" if group[0] == "forced" else "automatic"
        lines.append([*map(str, group), str(len(found))])
        for name in (f"speedup_vs_{BASE}", "speedup_vs_hf"):
            ratios = [modes[ours][name] for modes in found if name in modes.get(ours, {})]
            lines[-1] += (
                [f"{geometric_mean(ratios):.2f}", f"{min(ratios):.2f}"] if ratios else ["-", "-"]
            )
    header = ["kind", "batch", "context", "new tokens", "tasks", "to ours plain", "worst task"]
    table = rows([*header, "to `generate`", "worst task"], lines)
    return table + measured_at(*(modes[BASE] for modes in cells))


def exactness(files: Files) -> str:
    """Whose drafts change the text."""
    found = files.read("exactness.json")
    lines = []
    same: dict[str, list[str]] = {}  # ours, by what was found
    for mode, entry in found["modes"].items():
        base, comma, batch = mode.partition(", ")
        equal = entry["equal"] / entry["prompts"] if entry["prompts"] else None
        count = f"{entry['equal']} of {entry['prompts']}" if entry["prompts"] else entry["why_not"]
        title = TITLES[base].removesuffix(", tuned") + comma + batch  # nothing is timed here
        if base in OURS:
            same.setdefault(f"{count} | {number(equal, '.1%')}", []).append(title)
        else:
            lines.append([title, count, number(equal, ".1%")])
    for figures, titles in same.items():
        names = [t.replace("**", "").removeprefix("layerskip, ") for t in titles]
        lines.append([f"**layerskip**: {'; '.join(names)}", *figures.split(" | ")])
    return rows(["mode", f"prompts, {found['dtype']}, at `{found['commit']}`", "share"], lines)


def scaling(files: Files) -> str:
    """How a round grows."""
    lines, record = [], files.read("scaling.json")
    for axis, found in record["axes"].items():
        first, last = found["points"][0], found["points"][-1]
        fit = found["fits"]["cpu_seconds"]
        lines.append(
            [
                axis,
                f"{first['size']} to {last['size']}",
                f"{1e3 * first['cpu_seconds']:.2f} to {1e3 * last['cpu_seconds']:.2f}",
                f"{fit['exponent']:.2f}",
                f"{1e6 * fit['slope']:.3g}",
                f"{first['copied_bytes'] / 2**20:.2f} to {last['copied_bytes'] / 2**20:.2f}",
                f"{last['held_cache_bytes'] / 2**20:.2f}",
            ]
        )
    header = ["axis", "from, to", "ms of CPU a round", "exponent", "us a unit", "MiB copied"]
    return rows([*header, "MiB that the cache holds"], lines, left=2) + measured_at(record)


def where(files: Files) -> str:
    """Machine, versions and commit of `make bench`."""
    content = files.read("bench.json")
    machine = content["machine_info"]
    infos = [one["extra_info"] for one in content["benchmarks"]]
    loads = [max(info["load"]) for info in infos]
    dtypes = "/".join(sorted({info["dtype"] for info in infos}))
    models = "/".join(sorted({info["model"] for info in infos}))
    return (
        f"Model `{models}`, {dtypes}, {machine['gpu'] or machine['processor']}, "
        f"threads: {machine['threads']}, load {min(loads):.1f} to {max(loads):.1f}; Python "
        f"{machine['python_version']}, torch {machine['torch']}, transformers "
        f"{machine['transformers']}, layerskip {machine['layerskip']} at "
        f"{'/'.join(sorted({info['commit'] for info in infos}))}, {content['datetime'][:10]}.\n"
    )


def recipes(files: Files) -> str:
    """What the trainings bought: the best exit before, and after."""
    lines = []
    for name in TRAINED:
        found = files.latest(f"recipe-{name}")
        recipe, model = found["title"].split(" on ")
        model = "without" if model != "builtin" else "with (built-in)"
        lines.append([f"`{recipe}`", model])
        stages = [found["before"], found["after"]]
        lines[-1].append(before_after([str(s["exit_layer"]) for s in stages]))
        for what in ("by_position", "speedup"):
            values = [automatic(stage)[what] for stage in stages]
            firsts = [v[0] if isinstance(v, list) else v for v in values]
            lines[-1].append(before_after([f"{v:.2f}" for v in firsts]))
        lines[-1].append(before_after([f"{perplexity(s):.1f}" for s in stages]))
    header = ["recipe", "model's trained exits", "best exit", "first draft accepted"]
    return rows([*header, "automatic, times plain", "perplexity"], lines, left=2)


def before_after(values: Sequence[str]) -> str:
    return " -> ".join(dict.fromkeys(values))


def automatic(stage: Mapping[str, Any]) -> Mapping[str, Any]:
    """Automatic drafting at temperature 0.8."""
    of: dict[Any, Mapping[str, Any]] = {
        (s["temperature"], s["num_draft_tokens"]): s for s in stage["speeds"]
    }
    return of[0.8, "auto"]


def perplexity(stage: Mapping[str, Any]) -> float:
    return float(stage["exits"][0]["perplexity"])


def workloads(files: Files, name: str = "workloads") -> str:
    """Kinds of text by mode, plain decoding being 1."""
    lines, record = [], files.latest(name)
    for one in record["workloads"]:
        if not one["prompts"]:
            continue
        best = one["automatic_to_best_fixed"]["best"]
        beside = one["combined_to_best_looking_up"]["best"]
        names = (best, "automatic", "look-up, automatic", beside, "combined")
        shown = [one["modes"].get(m) for m in (*names, *ALONE)]
        speeds = [with_interval(m, "speedup_vs_plain") for m in shown]
        for place, fixed in ((0, best), (3, beside)):
            speeds[place] += f", {fixed.split(',')[0]}"
        task = f"{one['workload']}, {one['temperature']:g}"
        repeated = f"{one['repeated_8gram_share']:.0%}"
        lines.append([task, str(one["prompts"]), repeated, *speeds])
    header = ["text, temperature", "prompts", "repeated", "best fixed", "automatic", "look-ups"]
    header += ["best fixed and look-ups", "automatic and look-ups"]
    header += ["hf early exit", "hf look-up", "hf draft model"]
    return rows(header, lines) + measured_at(record)


def never_slower(files: Files) -> str:
    """What drafting costs at most, percent of plain decoding."""
    lines, record = [], files.latest("never-slower")
    for name, case in record["cases"].items():
        lines.append([name, f"{case['bound']:g}", number(case["counted"], "+.1f"), by_wall(case)])
    header = ["drafts", "allowed, %", "counted passes x costs", "by the wall (95 %)"]
    return rows(header, lines) + measured_at(record)


def by_wall(case: Mapping[str, Any]) -> str:
    """Percent over plain decoding."""
    low, high = case["wall_ci95"]
    return f"{case['wall']:+.1f} ({low:+.1f} to {high:+.1f})"


def simulation(files: Files) -> str:
    """Simulated over real less one, percent."""
    lines, record = [], files.latest("simulation")
    for cell in record["cells"]:
        off = {name: PERCENT * f["wall_off"] for name, f in cell["figures"].items()}
        pairs = [f"{off[f'{m} p50']:+.0f} / {off[f'{m} p90']:+.0f}" for m in SIMULATED]
        lines.append([f"{cell['concurrency']}, {cell['policy']}", *pairs])
    header = ["users, policy", "first token p50 / p90", "each further one p50 / p90"]
    return rows([*header, "end to end p50 / p90"], lines) + measured_at(record)


def drift(files: Files) -> str:
    """How soon a shift is told, and how often there was none."""
    lines, record = [], files.latest("drift")
    for found in record["buckets"]:
        pairs = [
            f"{one['median_delay']:.0f} / {one['false_alarms_per_100000']:.2f}" if one else "-"
            for one in (found["accepted_alone"], found["with_confidences"])
        ]
        correlations = [found["correlation"], found["correlation_of_surprise"]]
        lines.append(
            [
                f"{drafter_of(found)}, {found['bucket'] or 'all'}",
                str(found["requests"]),
                f"{found['drafts_per_request']:.0f}",
                *(number(c, ".3f") for c in correlations),
                *pairs,
            ]
        )
    header = ["drafts, requests", "requests", "drafts each", "correlation", "of surprise"]
    table = rows([*header, "accepted tokens alone", "with confidences"], lines)
    return table + measured_at(record)


def traffic(files: Files) -> str:
    """What requests of each task said, what was decided, and what that was worth."""
    found = files.latest("traffic")
    auto, fixed = (found["reports"][arm] for arm in (AUTO, found["fixed"]))
    capped = {one["task"]: decision(one) for one in fixed["tasks"]}
    lines = []
    for one in (*auto["tasks"], auto["total"]):
        whole = one["task"] is None
        lines.append(
            [
                "all" if whole else one["task"],
                str(one["requests"]),
                interval_of(one["accepted"]),
                number(one["p10_request"]),
                f"{number(one['margin'], '+.2f')} / {number(one['margin_without_bonus'], '+.2f')}",
                interval_of(one["end_to_end"]),
                interval_of(one["worst_decile"]),
                "" if whole else decision(one),
                "" if whole else capped[one["task"]],
            ]
        )
    header = ["task", "n", "accepted a draft", "p10 request", "margin / without bonus"]
    header += ["time on/off", "worst tenth", "decision", f"of {found['fixed']} drafted"]
    pairs = [
        [f"{one['b']} over {one['a']}", str(one["prompts"])] + [interval_of(one[r]) for r in RATIOS]
        for one in found["compared"]
    ]
    ratios = rows(["compared", "prompts", "end to end", "tokens a second"], pairs)
    return rows(header, lines) + "\n" + ratios + measured_at(found)


def interval_of(found: Mapping[str, float | None] | None) -> str:
    if found is None or found["value"] is None:
        return "-"
    return f"{found['value']:.2f} ({number(found['low'])} to {number(found['high'])})"


def decision(one: Mapping[str, Any]) -> str:
    """Of a task's rule."""
    if one["requests"] < FEWEST_REQUESTS:
        return "too few: on"
    most = one["max_draft_tokens"]
    return {None: "on", 0: "off"}.get(most, f"{most} at most")


def drafter_of(found: Mapping[str, Any]) -> str:
    arm = "automatic" if found["arm"] == AUTO else f"{found['arm']} drafted"
    return f"{arm}, T {found['temperature']:g}" if found["temperature"] else f"{arm}, greedy"


def gpu(files: Files) -> str:
    """What decoding and its largest product take on a GPU."""
    return rows(*summary(files.folder))


TABLES: dict[str, Callable[[Files], str]] = {
    "speed": speed,
    "cells": cells,
    "latency": latency,
    "matrix": matrix,
    "exactness": exactness,
    "scaling": scaling,
    "where": where,
    "recipes": recipes,
    "workloads": workloads,
    "workloads-float": partial(workloads, name="workloads-float32"),
    "never-slower": never_slower,
    "simulation": simulation,
    "drift": drift,
    "traffic": traffic,
    "gpu": gpu,
}
