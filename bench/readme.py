"""Write the README's tables again from the files in bench/results.

    python bench/readme.py            # rewrite
    python bench/readme.py --check    # or only say whether they are what the files give

A table stands between ``<!-- bench:NAME:begin -->`` and ``<!-- bench:NAME:end -->``; NAME is one of
``TABLES``. Nothing else in the file is touched, and no figure is typed by hand.
"""

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from modes import ALONE, BASE, MODES
from paired import geometric_mean

REPO = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- bench:([a-z-]+):begin -->\n).*?(<!-- bench:\2:end -->)", re.DOTALL)
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
        """Figures by cell and mode, of a file that pytest-benchmark wrote."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for one in self.read(name)["benchmarks"]:
            info = one["extra_info"]
            found.setdefault(info["cell"], {})[info["mode"]] = info
        return found

    @cached_property
    def quick(self) -> dict[str, dict[str, dict[str, Any]]]:
        return self.cells("bench.json")


def rows(header: Sequence[str], lines: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A Markdown table; the first ``left`` columns are text."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, rule, *lines))


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
    lines.append(["predicted for it by `m / (k c + v)`, after the first token", *predicted])
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
                *(with_interval(modes.get(m), f"speedup_vs_{BASE}") for m in ("hf",)),
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
    return f"{with_interval(found[best], name)}, {best.removeprefix('hf-').replace('-', ' ')}"


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
                number(f.get("mean_accepted_length") if f.get("acceptance_rate") else None),
            ]
        )
    header = ["mode", "tokens/s", "first token, ms", "per token p50", "p90", "p99", "peak MiB"]
    return rows([*header, "cache MiB", "accepted", "mean length"], lines)


def matrix(files: Files) -> str:
    """The full matrix: geometric means over tasks, and the worst cell of each group."""
    groups: dict[tuple[Any, ...], list[Modes]] = {}
    for modes in files.cells("bench-full.json").values():
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
    return rows([*header, "to `generate`", "worst task"], lines)


def exactness(files: Files) -> str:
    """Whose drafts change the text."""
    found = files.read("exactness.json")
    lines = []
    for mode, entry in found["modes"].items():
        base, comma, batch = mode.partition(", ")
        equal = entry["equal"] / entry["prompts"] if entry["prompts"] else None
        count = f"{entry['equal']} of {entry['prompts']}" if entry["prompts"] else entry["why_not"]
        lines.append([TITLES[base] + comma + batch, count, number(equal, ".1%")])
    return rows(["mode", f"prompts, {found['dtype']}", "share"], lines)


def scaling(files: Files) -> str:
    """How a round grows."""
    lines = []
    for axis, found in files.read("scaling.json")["axes"].items():
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
    return rows([*header, "MiB that the cache holds"], lines, left=2)


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
        f"{machine['threads']} threads, load {min(loads):.1f} to {max(loads):.1f}; Python "
        f"{machine['python_version']}, torch {machine['torch']}, transformers "
        f"{machine['transformers']}, layerskip {machine['layerskip']} at "
        f"{'/'.join(sorted({info['commit'] for info in infos}))}, {content['datetime'][:10]}.\n"
    )


TABLES: dict[str, Callable[[Files], str]] = {
    "speed": speed,
    "cells": cells,
    "latency": latency,
    "matrix": matrix,
    "exactness": exactness,
    "scaling": scaling,
    "where": where,
}


def rewritten(text: str, files: Files) -> str:
    """The text with what the files give between its markers.

    Raises:
        SystemExit: a marker has no end or another name, or its file is not there.
    """
    names = re.findall(r"<!-- bench:([a-z-]+):begin -->", text)
    if sorted(names) != sorted(m[1] for m in MARKED.findall(text)):
        raise SystemExit("a bench marker of the README has no end, or the end of another one")
    unknown = [n for n in names if n not in TABLES]
    if unknown:
        raise SystemExit(f"no table is called {unknown[0]!r}; there are {', '.join(TABLES)}")
    return MARKED.sub(lambda m: m[1] + TABLES[m[2]](files) + m[3], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--readme", type=Path, default=REPO / "README.md")
    parser.add_argument("--results", type=Path, default=REPO / "bench" / "results")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it differs")
    options = parser.parse_args()
    text = options.readme.read_text(encoding="utf-8")
    new = rewritten(text, Files(options.results))
    if options.check and new != text:
        raise SystemExit(f"{options.readme} is not what {options.results} gives")
    if not options.check:
        options.readme.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
