"""The table that a recipe ends with, and the curves of acceptance over time."""

import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from evaluation import Measurement, named
from exits import ExitReport
from rich.table import Table
from speed import SpeedReport

from layerskip.files import write_json

mpl.use("Agg")
from matplotlib import pyplot as plt

SHOWN_POSITIONS = 4
Line = tuple[str, str, str, str]


@dataclass(frozen=True)
class Result:
    """What a run bought and cost.

    Attributes:
        title: such as "lora_early_exit on builtin".
        before, after: the model without and with what was trained.
        wall_seconds: of the training, measurements not counted.
        peak_memory_bytes: of the process (on CUDA, of the device).
        command: that reproduces it.
        details: further figures of the recipe, by name.
    """

    title: str
    before: Measurement
    after: Measurement
    wall_seconds: float
    peak_memory_bytes: int
    command: str
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "title": self.title,
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "wall_seconds": self.wall_seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
            "command": self.command,
            "details": dict(self.details),
        }


def rows(result: Result) -> list[Line]:
    """Figure, before, after, change: what every form of the table shows."""
    before, after = result.before, result.after
    lines = [*_acceptance(before.exits, after.exits)]
    lines += [
        ("drafts with exit", str(before.exit_layer), str(after.exit_layer), ""),
        _figure("c (a draft token, in plain passes)", before.c, after.c, ".3f"),
        _figure("v (a verify pass, in plain passes)", before.v, after.v, ".3f"),
    ]
    lines += [*_speeds(before.speeds, after.speeds)]
    old, new = before.exits[0], after.exits[0]
    change = f"{new.perplexity / old.perplexity - 1:+.2%}"
    lines += [
        _figure("full model's loss, nats a token", old.loss, new.loss, ".4f"),
        ("full model's perplexity", f"{old.perplexity:.3f}", f"{new.perplexity:.3f}", change),
    ]
    return lines


def _acceptance(before: Sequence[ExitReport], after: Sequence[ExitReport]) -> Iterator[Line]:
    """By exit and position, teacher-forced; the change is the first position's."""
    for old, new in _paired(before, after, lambda report: report.temperature):
        temperature = (old or new).temperature
        olds, news = (report.exits if report else {} for report in (old, new))
        for layer in sorted({*olds, *news}):
            known = [scores[layer] for scores in (olds, news) if layer in scores]
            change = known[-1].acceptance - known[0].acceptance
            yield (
                f"accepted at exit {layer}, {named(temperature)}",
                _positions(olds[layer].by_position if layer in olds else ()),
                _positions(news[layer].by_position if layer in news else ()),
                f"{change:+.3f}" if len(known) == 2 else "",
            )


def _speeds(before: Sequence[SpeedReport], after: Sequence[SpeedReport]) -> Iterator[Line]:
    def key(report: SpeedReport) -> tuple[float, bool]:
        return report.temperature, report.num_draft_tokens == "auto"

    for old, new in _paired(before, after, key):
        one, pair = old or new, (old, new)
        fixed = one.num_draft_tokens != "auto"
        mode = "fixed k" if fixed else "auto"
        where = f"{mode}, {named(one.temperature)}"
        yield f"speed-up, {where}", *(_speed(r, "speedup", "interval") for r in pair), ""
        yield (
            f"  by CPU time, {where}",
            *(_speed(r, "cpu_speedup", "cpu_interval") for r in pair),
            "",
        )
        if fixed:  # of "auto" these say more of its choices than of the exit
            yield (
                "  accepted by position",
                *(_positions(r.by_position if r else ()) for r in pair),
                "",
            )
            yield "  prompts, repeated 8-grams", *map(_circumstances, pair), ""


def _paired(before: Sequence[Any], after: Sequence[Any], key: Any) -> list[tuple[Any, Any]]:
    """Reports of the same circumstances; None where one side has none."""
    olds, news = ({key(report): report for report in side} for side in (before, after))
    return [(olds.get(k), news.get(k)) for k in dict.fromkeys([*olds, *news])]


def _figure(name: str, before: float, after: float, form: str) -> Line:
    return name, format(before, form), format(after, form), format(after - before, "+" + form)


def _positions(shares: Sequence[float]) -> str:
    return " ".join(f"{share:.2f}" for share in shares[:SHOWN_POSITIONS])


def _speed(report: SpeedReport | None, figure: str, interval: str) -> str:
    if report is None:
        return ""
    if not report.prompts:
        return "every prompt loops"
    low, high = getattr(report, interval)
    number = "" if report.num_draft_tokens == "auto" else f" k={report.num_draft_tokens}"
    return f"{getattr(report, figure):.2f} ({low:.2f}-{high:.2f}){number}"


def _circumstances(report: SpeedReport | None) -> str:
    if report is None:
        return ""
    left_out = f" of {report.prompts + report.left_out}" if report.left_out else ""
    return f"{report.prompts}{left_out}, {report.repeated_share:.0%}"


def _costs(result: Result) -> list[tuple[str, str]]:
    gib = result.peak_memory_bytes / 2**30
    return [
        ("trained for", f"{result.wall_seconds / 60:.1f} minutes"),
        ("peak memory", f"{gib:.2f} GiB"),
        *((name, _shown(value)) for name, value in result.details.items()),
    ]


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def as_table(result: Result) -> Table:
    """For a terminal."""
    costs = "; ".join(f"{name} {value}" for name, value in _costs(result))
    caption = f"{costs}\n{result.command}"
    table = Table(title=result.title, caption=caption, title_justify="left", box=None)
    table.caption_justify = "left"
    for name in ("", "before", "after", "change"):
        table.add_column(name, justify="left" if not name else "right", overflow="fold")
    for line in rows(result):
        table.add_row(*line)
    return table


def as_markdown(result: Result) -> str:
    """For bench/LOG.md."""
    lines = [f"**{result.title}**", "", "| | before | after | change |", "|---|---:|---:|---:|"]
    lines += ["| " + " | ".join(cell.strip() for cell in line) + " |" for line in rows(result)]
    lines += ["", *(f"- {name}: {value}" for name, value in _costs(result))]
    return "\n".join([*lines, "", "```", result.command, "```"])


def save(result: Result, path: Path) -> None:
    """Write ``table.json``."""
    write_json(path, result.to_dict(), indent=1)


def peak_memory() -> int:
    """Bytes: the most that this process has held so far; on CUDA, what tensors held on devices."""
    if torch.cuda.is_available():
        return sum(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def plot_acceptance(history: Sequence[tuple[int, Mapping[int, float]]], path: Path) -> None:
    """A PNG of acceptance over steps, a line for each exit layer.

    Args:
        history: (step, acceptance by exit layer), in order; of none, no file is written.
        path: written whole or not at all.
    """
    layers = sorted({layer for _, acceptance in history for layer in acceptance})
    if not layers:
        return
    figure, axes = plt.subplots(figsize=(7, 4.5))
    colours = mpl.colormaps["viridis"].resampled(len(layers))
    for i, layer in enumerate(layers):
        points = [(step, found[layer]) for step, found in history if layer in found]
        steps, shares = zip(*points, strict=True)
        axes.plot(steps, shares, marker=".", color=colours(i), label=f"exit {layer}")
    axes.set(xlabel="step", ylabel="acceptance of a first drafted token", ylim=(0.0, 1.0))
    axes.legend(fontsize="small", ncols=1 + len(layers) // 10)
    figure.tight_layout()
    partial = path.with_suffix(".partial")
    figure.savefig(partial, dpi=100, format="png")
    plt.close(figure)
    partial.replace(path)
