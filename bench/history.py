"""Every kept run of a dated script, a line each: how often its goals held, and where not."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from figures import over_best
from tables import Files, by_wall, number, rows

GOAL = 0.97  # of the best fixed number
# What was run again the same day has the plain name last.
RUNS = ("first", "second", "third", "fourth")
Record = Mapping[str, Any]


def kept(folder: Path, name: str) -> Iterator[tuple[str, Record]]:
    """Records whose names begin so, by day: the name without ``.json``, and the content."""

    def when(path: Path) -> tuple[str, str, int]:
        base, _, last = path.stem.rpartition("-")
        is_again = last in RUNS
        return path.stem[:10], base if is_again else path.stem, RUNS.index(last) if is_again else 9

    for path in sorted(folder.glob(f"????-??-??-{name}*.json"), key=when):
        yield path.stem, json.loads(path.read_text(encoding="utf-8"))


def kind(name: str, record: Record) -> str:
    """Of a run: where and with what numbers."""
    return f"{record['machine']}, {'float32' if 'float32' in name else 'bfloat16'}"


def bounds(files: Files) -> str:
    """What drafting costs at most, run by run: the cases that were beyond, by the wall."""
    lines = []
    for name, record in kept(files.folder, "never-slower"):
        cases = record["cases"]
        beyond = [
            f"{case} {by_wall(found)}, counted {number(found['counted'], '+.1f')}"
            for case, found in cases.items()
            if not found["wall_within"]
        ]
        within = f"{len(cases) - len(beyond)} of {len(cases)}"
        drawn = "0.8" if "sampled" in name else "0"
        cold = by_wall(cases["adversarial, cold"])
        line = [f"`{name[:10]}{name[23:]}`", f"`{record['commit'][:7]}`", kind(name, record), drawn]
        lines.append([*line, within, cold, "; ".join(beyond) or "-"])
    header = ["run", "commit", "machine", "temperature", "within", "cold, by the wall (95 %)"]
    return rows([*header, "beyond"], lines, left=7)


def workloads(files: Files) -> str:
    """Automatic drafting beside the best fixed number, run by run, adversarial texts apart: by CPU
    time, all prompts of a text together."""
    lines = []
    for name, record in kept(files.folder, "workloads"):
        texts = [t for t in record["workloads"] if t["prompts"] and t["workload"] != "adversarial"]
        if not texts:
            continue
        counts = sorted({t["prompts"] for t in texts})
        prompts = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
        line = [f"`{name[:10]}{name[20:]}`", f"`{record['commit'][:7]}`", kind(name, record)]
        lines.append([*line, f"{len(texts)} x {prompts}"])
        for mode, looking_up in (("automatic", False), ("combined", True)):
            lines[-1] += against(texts, mode, looking_up=looking_up)
    header = ["run", "commit", "machine", "texts x prompts", "look-ups off", "below 0.97"]
    return rows([*header, "look-ups on", "below 0.97"], lines, left=8)


def against(texts: Sequence[Record], mode: str, *, looking_up: bool) -> list[str]:
    """Least and largest of the ratios, and those that miss the goal."""
    if looking_up and not any(name.endswith(", look-up") for name in texts[0]["modes"]):
        return ["-", "-"]  # the first runs had no numbers beside look-ups
    ratios = {
        f"{text['workload']}, {text['temperature']:g}": over_best(
            text["modes"], mode, looking_up=looking_up
        )
        for text in texts
    }
    missed = [f"{text} {ratio:.3f}" for text, ratio in ratios.items() if ratio < GOAL]
    return [f"{min(ratios.values()):.3f} to {max(ratios.values()):.3f}", "; ".join(missed) or "-"]


HISTORY: dict[str, Callable[[Files], str]] = {
    "never-slower-runs": bounds,
    "workloads-runs": workloads,
}
