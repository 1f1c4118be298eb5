"""The READMEs' tables of the newest records in bench/results/gpu, section by section."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

DECODING = "-decoding"
ROUND = 4  # drafted tokens
BATCHES = (1, 4, 8)
PRODUCT = "swiglu norm, gate and up"
NEVER_SLOWER = 0.97  # of plain decoding
GOALS = {
    "models": "peak bytes at load over the weights'",
    "plain": "plain decoding, share of the copy bandwidth, by model",
    "rounds": "a round over the time that its bytes take",
    "speedup": "gain of a fixed number over the formula's",
    "transformers": "plain over transformers' `generate`",
    "batches": "automatic over plain, by batch",
    "contexts": "automatic over plain, by context",
    "memory": "slots more for drafts",
    "first-tokens": "time to the first token over transformers'",
}

Found = Mapping[str, Any]


def newest(results: Path, *, decoding: bool) -> dict[str, Any]:
    """Each section of the kernels, or of decoding, from the newest record that has it, of all of
    the GPU that was measured last.

    Raises:
        SystemExit: there is none.
    """
    every = sorted((results / "gpu").glob("????-??-??-*.json"))
    paths = [path for path in every if path.stem.endswith(DECODING) == decoding]
    if not paths:
        raise SystemExit(
            f"{results / 'gpu'} lacks a record; `make gpu-check` or gpu-bench writes it"
        )
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    machine, sections = records[-1]["machine"], dict[str, Any]()
    for record in records:
        if record["machine"]["gpu"] == machine["gpu"]:
            sections |= record["sections"]
    return {"machine": machine, "sections": sections}


def summary(results: Path) -> tuple[list[str], list[list[str]]]:
    """Header and lines: what a token and a round take, and what one product of the kernels does."""
    kernels, decoding = (newest(results, decoding=decoded) for decoded in (False, True))
    sections, speeds = decoding["sections"], kernels["sections"]["speed"]
    models = [m for m in sections["plain"] if isinstance(sections["plain"][m], dict)]
    plain = [sections["plain"][m] for m in models]
    rounds = [sections["rounds"][m][f"k={ROUND}"] for m in models]
    products = [[speeds[f"{m} {PRODUCT} rows={n}"] for n in (1, 16)] for m in models]
    lines = [
        [
            "ms a plain token, and the share of the copy bandwidth",
            *(
                f"{p['ms_per_token']['median']:.2f}, {p['share_of_copy']['value']:.0%}"
                for p in plain
            ),
        ],
        [
            f"ms a round of {ROUND} drafted tokens",
            *(f"{r['ms_per_round']['median']:.2f}" for r in rounds),
        ],
        [
            "us of gate and up, ours and torch's product; 16 rows",
            *("; ".join(f"{p['us']:.0f}, {p['torch_us']:.0f}" for p in pair) for pair in products),
        ],
        [
            f"automatic over plain, batches of {', '.join(map(str, BATCHES))}",
            *(", ".join(by_batch(sections["batches"][m])) for m in models),
        ],
    ]
    gpu = kernels["machine"]["gpu"]
    return [f"{gpu}, bf16, random weights", *models], lines


def by_batch(found: Found) -> list[str]:
    """Where there was no time for one, a dash."""
    values = (found.get(f"batch {n}", {}).get("auto_over_off", {}).get("value") for n in BATCHES)
    return [f"{v:.2f}" if isinstance(v, float) else "-" for v in values]


def goals(results: Path) -> list[list[str]]:
    """A line for each kind of figure that has a goal: what was wanted, and what was found."""
    record = newest(results, decoding=True)
    kinds: dict[str, list[Found]] = {}
    for section, title in GOALS.items():
        found = (figure for _, figure in figures(record["sections"].get(section, {})))
        kinds[title] = [figure for figure in found if figure["met"] is not None]
    kinds["automatic over plain, by acceptance"] = by_acceptance(record["sections"])
    lines = []
    for title, judged in kinds.items():
        wanted = "; ".join(dict.fromkeys(f["goal"] for f in judged))
        lines.append([f"{record['machine']['gpu']}: {title}", wanted or "-", said(judged)])
    return lines


def by_acceptance(sections: Found) -> list[Found]:
    """Of section ``speedup``, whose figures have no goal of their own; NaN, where there was no time
    for it, is a text."""
    models = [m for m in sections.get("speedup", {}).values() if isinstance(m, dict)]
    entries = [entry for m in models for entry in m.values() if isinstance(entry, dict)]
    values = [entry["auto"]["speedup"] for entry in entries if "auto" in entry]
    return [
        {"value": v, "goal": f">= {NEVER_SLOWER}", "met": v >= NEVER_SLOWER}
        for v in values
        if isinstance(v, float)
    ]


def said(judged: Sequence[Found]) -> str:
    """How many are met, and between which values they lie."""
    if not judged:
        return "nothing was measured"
    values = [f"{v:.2f}" for v in sorted(f["value"] for f in judged)]
    lie = " and ".join(values) if len(values) < 3 else f"{values[0]} to {values[-1]}"
    return f"{sum(f['met'] for f in judged)} of {len(judged)}; {lie}"


def figures(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Found]]:
    """Every figure of a record that has a goal, by its place."""
    if isinstance(value, dict):
        if "goal" in value:
            yield " / ".join(path), value
        for name, inner in value.items():
            yield from figures(inner, (*path, name))
