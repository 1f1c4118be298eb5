"""The READMEs' tables of the newest records in bench/results/gpu."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

NEWEST = "????-??-??-*"
DECODING = "-decoding"
ROUND = 4  # drafted tokens
BATCHES = (1, 4, 8)
PRODUCT = "swiglu norm, gate and up"
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


def newest(results: Path, suffix: str = "") -> dict[str, Any]:
    """The newest record of the kernels, or with ``DECODING`` of decoding.

    Raises:
        SystemExit: there is none.
    """
    paths = sorted((results / "gpu").glob(f"{NEWEST}{DECODING}.json"))
    if not suffix:
        decoding = {*paths}
        paths = [p for p in sorted((results / "gpu").glob(f"{NEWEST}.json")) if p not in decoding]
    if not paths:
        raise SystemExit(f"{results / 'gpu'} has no record; `make gpu-check` writes it")
    record: dict[str, Any] = json.loads(paths[-1].read_text(encoding="utf-8"))
    return record


def summary(results: Path) -> tuple[list[str], list[list[str]]]:
    """Header and lines: what a token and a round take, and what one product of the kernels does."""
    kernels, decoding = newest(results), newest(results, DECODING)
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
    record = newest(results, DECODING)
    lines = []
    for section, title in GOALS.items():
        judged = [f for f in figures(record["sections"].get(section, {})) if f["met"] is not None]
        wanted = "; ".join(dict.fromkeys(f["goal"] for f in judged))
        lines.append([f"{record['machine']['gpu']}: {title}", wanted or "-", said(judged)])
    return lines


def said(judged: Sequence[Found]) -> str:
    """How many are met, and between which values they lie."""
    if not judged:
        return "nothing was measured"
    values = [f"{v:.2f}" for v in sorted(f["value"] for f in judged)]
    lie = " and ".join(values) if len(values) < 3 else f"{values[0]} to {values[-1]}"
    return f"{sum(f['met'] for f in judged)} of {len(judged)}; {lie}"


def figures(value: Any) -> Iterator[Found]:
    """Every figure of a record that has a goal."""
    if isinstance(value, dict):
        if "goal" in value:
            yield value
        for inner in value.values():
            yield from figures(inner)
