"""Pictures of the results: bench/results/speed.png and bench/results/scaling.png.

python bench/plots.py
"""

import argparse
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from modes import BASE, MODES, OURS
from readme import REPO
from tables import Files

COLUMNS = 3


def speed(files: Files, path: Path) -> None:
    """A panel for each cell, a bar for each mode: tokens a second, ours plain = 1."""
    cells = files.quick
    count = -(-len(cells) // COLUMNS)
    figure, axes = plt.subplots(count, COLUMNS, figsize=(12, 2.6 * count), squeeze=False)
    for panel, (name, modes) in zip(axes.flat, cells.items(), strict=False):
        present = [m for m in MODES if m in modes][::-1]
        ratios = [modes[m][f"speedup_vs_{BASE}"] for m in present]
        ends = [modes[m][f"speedup_vs_{BASE}_ci95"] for m in present]
        below = [max(0.0, r - low) for r, (low, _) in zip(ratios, ends, strict=True)]
        above = [max(0.0, high - r) for r, (_, high) in zip(ratios, ends, strict=True)]
        colours = ["#1f77b4" if m in OURS else "#b0b0b0" for m in present]
        panel.barh(present, ratios, xerr=[below, above], color=colours, ecolor="#404040")
        panel.axvline(1.0, color="#404040", linewidth=0.8)
        panel.set_title(f"{name}, {modes[BASE]['prompts']} prompts", fontsize=9)
        panel.tick_params(labelsize=7)
    for panel in axes.flat[len(cells) :]:
        panel.set_visible(False)
    figure.suptitle("Tokens a second, layerskip's plain decoding = 1 (medians, 95 % intervals)")
    _save(figure, path)


def scaling(files: Files, path: Path) -> None:
    """A panel for each axis: a round's time, and its straight line."""
    found: dict[str, Any] = files.read("scaling.json")["axes"]
    figure, axes = plt.subplots(1, len(found), figsize=(3.2 * len(found), 3), squeeze=False)
    for panel, (axis, one) in zip(axes.flat, found.items(), strict=True):
        sizes = [p["size"] for p in one["points"]]
        fit = one["fits"]["cpu_seconds"]
        panel.plot(sizes, [1e3 * p["cpu_seconds"] for p in one["points"]], "o", label="CPU time")
        line = [1e3 * (fit["start"] + fit["slope"] * s) for s in sizes]
        panel.plot(sizes, line, linewidth=0.8, label=f"R2 {fit['r2']:.2f}")
        panel.set_title(f"{axis}: exponent {fit['exponent']:.2f}", fontsize=9)
        panel.set_ylim(bottom=0)
        panel.legend(fontsize=7)
        panel.tick_params(labelsize=7)
    axes[0, 0].set_ylabel("ms a round")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    # Neither date nor version inside: the same figures give the same file.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--results", type=Path, default=REPO / "bench" / "results")
    options = parser.parse_args()
    files = Files(options.results)
    for name, draw in (("bench", speed), ("scaling", scaling)):
        if (options.results / f"{name}.json").is_file():
            draw(files, options.results / f"{'speed' if name == 'bench' else name}.png")


if __name__ == "__main__":
    main()
