"""Charts as outlines and texts, which the report's template draws as SVG.

The unit is a CSS pixel on a narrow phone: a chart is as wide as such a screen, so that its text can
be read there, and grows with a wider one. Colours, dashes and fonts are the template's style sheet.
"""

import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

WIDTH = 320.0
LEFT, RIGHT, LINE = 40.0, 312.0, 16.0
PLOT_HEIGHT = 170.0
ROW_HEIGHT = 36.0
TICKS = 5  # about so many
FORMS = (  # of series' marks, around a point
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",  # disc
    "m-4-4h8v8h-8z",  # square
    "m0-5 5 5-5 5-5-5z",  # diamond
    "m0-5 5 8h-10z",  # triangle
    "m0 5 5-8h-10z",  # triangle on its head
    "m-1.5-5h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5v-3h3.5z",  # cross
)
MARK_STEP = 4.0
MARKS = 6  # on a line with many points


@dataclass(frozen=True)
class Outline:
    """An SVG path and the class that the style sheet draws it by."""

    style: str
    path: str


@dataclass(frozen=True)
class Label:
    """One line of text; ``anchor`` says which of its ends, or its middle, is at x."""

    x: float
    y: float
    text: str
    anchor: str = "start"


@dataclass(frozen=True)
class Chart:
    """A drawing, and what a reader who can't see it should know."""

    description: str
    height: float
    outlines: tuple[Outline, ...]
    texts: tuple[Label, ...]


@dataclass(frozen=True)
class Axis:
    """A range of values with round ticks.

    Attributes:
        label: with the unit.
        low, high: ends of the axis, both ticks.
        step: from tick to tick.
        percent: whether values are shares, written as percentages.
    """

    label: str
    low: float
    high: float
    step: float
    percent: bool = False

    @classmethod
    def over(
        cls,
        label: str,
        values: Iterable[float | None],
        *,
        percent: bool = False,
        whole: bool = False,
    ) -> "Axis":
        """The axis from 0, or from the least value if that is less, to the greatest.

        Args:
            whole: ticks at whole numbers alone.
        """
        known = [v for v in values if v is not None and math.isfinite(v)]
        low, high = min([0.0, *known]), max([0.0, *known])
        high = high if high > low else 1.0
        rough = max((high - low) / TICKS, 1.0 if whole else 0.0)
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(f * power for f in (1.0, 2.0, 5.0, 10.0) if f * power >= rough * 0.999)
        low = math.floor(low / step + 1e-9) * step
        return cls(label, low, max(math.ceil(high / step - 1e-9), 1) * step, step, percent)

    @property
    def ticks(self) -> tuple[tuple[float, str], ...]:
        """Values and what is written at them."""
        count = round((self.high - self.low) / self.step)
        first = round(self.low / self.step)
        values = [(first + i) * self.step for i in range(count + 1)]
        scale, unit = (100.0, " %") if self.percent else (1.0, "")
        digits = max(0, -math.floor(math.log10(self.step * scale) + 1e-9))
        return tuple((v, f"{v * scale:.{digits}f}{unit}") for v in values)

    def place(self, start: float, end: float) -> Callable[[float], float]:
        """From values to places between ``start`` and ``end``; values beyond stay at the ends."""
        span = self.high - self.low

        def at(value: float) -> float:
            share = min(1.0, max(0.0, (value - self.low) / span))
            return start + share * (end - start)

        return at


@dataclass(frozen=True)
class Row:
    """A labelled line of a row chart.

    Attributes:
        spans: (low, high, class) of the lines drawn, where both ends are finite.
        marks: (value, series) of the marks drawn, where the value is finite.
    """

    label: str
    spans: tuple[tuple[float, float, str], ...] = ()
    marks: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True)
class Series:
    """A named line through points."""

    name: str
    points: tuple[tuple[float, float], ...]


def row_chart(
    description: str,
    rows: Sequence[Row],
    axis: Axis,
    *,
    legend: Sequence[str],
    line_at: float | None,
) -> Chart:
    """Rows one under the other, each with its label above its spans and marks.

    Args:
        legend: what the marks of series 0, 1, ... are.
        line_at: value at which a strong line is drawn.
    """
    top = 2 * LINE + 2
    bottom = top + ROW_HEIGHT * len(rows)
    x = axis.place(LINE, RIGHT)
    outlines = [Outline("grid", f"M{_n(x(v))} {_n(top)}V{_n(bottom)}") for v, _ in axis.ticks]
    texts = [*_ticks(axis, x, top - 5), Label(0.0, LINE - 4, axis.label)]
    if line_at is not None:
        outlines.append(Outline("strong", f"M{_n(x(line_at))} {_n(top)}V{_n(bottom)}"))
    for line, row in enumerate(rows):
        y = top + ROW_HEIGHT * line
        texts.append(Label(0.0, y + 13, shorten(row.label)))
        y += 21
        for low, high, style in row.spans:
            if math.isfinite(low) and math.isfinite(high):
                outlines.append(Outline(style, f"M{_n(x(low))} {_n(y)}H{_n(x(high))}"))
        # One below the other, lest equal values hide each other.
        outlines += [
            Outline(f"mark s{series}", marker(series, x(value), y + MARK_STEP * i))
            for i, (value, series) in enumerate(row.marks)
            if math.isfinite(value)
        ]
    height = _add_legend(outlines, texts, legend, bottom + 4, lines=False)
    return Chart(description, height, tuple(outlines), tuple(texts))


def line_chart(
    description: str,
    series: Sequence[Series],
    x_axis: Axis,
    y_axis: Axis,
    *,
    line_at: float | None = None,
) -> Chart:
    """Lines over a common x; told apart by dashes and marks as well as by colour.

    Args:
        series: those after the sixth, which no mark is left for, are not drawn, and the legend
            says so.
        line_at: y at which a strong line is drawn.
    """
    x = x_axis.place(LEFT, RIGHT)
    y, outlines, texts, bottom = _plane(x_axis.label, y_axis)
    texts += _ticks(x_axis, x, bottom - LINE - 6)
    if line_at is not None:
        outlines.append(Outline("strong", f"M{_n(LEFT)} {_n(y(line_at))}H{_n(RIGHT)}"))
    for i, one in enumerate(series[: len(FORMS)]):
        places = [(x(a), y(b)) for a, b in one.points if math.isfinite(a) and math.isfinite(b)]
        if not places:
            continue
        through = "L".join(f"{_n(a)} {_n(b)}" for a, b in places)
        outlines.append(Outline(f"line s{i}", f"M{through}"))
        every = max(1, len(places) // MARKS)
        # Each series starts its marks elsewhere, so that lines on top of one another both show.
        first = i * every // len(FORMS)
        outlines += [Outline(f"mark s{i}", marker(i, *p)) for p in places[first::every]]
    height = _add_legend(outlines, texts, [s.name for s in series[: len(FORMS)]], bottom)
    if len(series) > len(FORMS):
        more = f"and {len(series) - len(FORMS)} more, in the table alone"
        texts.append(Label(38.0, height + 8, more))
        height += LINE
    return Chart(description, height, tuple(outlines), tuple(texts))


def bar_chart(
    description: str, bars: Sequence[tuple[str, float]], x_label: str, y_axis: Axis
) -> Chart:
    """Upright bars from 0, with their labels below: all of them, or every second, third, ..."""
    y, outlines, texts, bottom = _plane(x_label, y_axis)
    slot = (RIGHT - LEFT) / max(1, len(bars))
    every = -(-len(bars) // 14) if bars else 1
    for i, (label, value) in enumerate(bars):
        left, right = LEFT + slot * (i + 0.12), LEFT + slot * (i + 0.88)
        path = f"M{_n(left)} {_n(y(0.0))}V{_n(y(value))}H{_n(right)}V{_n(y(0.0))}z"
        outlines.append(Outline("bar", path))
        if i % every == 0:
            texts.append(Label((left + right) / 2, bottom - LINE - 6, label, "middle"))
    return Chart(description, bottom, tuple(outlines), tuple(texts))


def marker(series: int, x: float, y: float) -> str:
    """The outline of a series' mark around a point: each series has a form of its own."""
    return f"M{_n(x)} {_n(y)}{FORMS[series % len(FORMS)]}"


def shorten(text: str, columns: int = 50) -> str:
    """A text that fits a line of a chart, cut in its middle: buckets often differ at the end."""
    # Wide letters take two columns.
    widths = [2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text]
    if sum(widths) <= columns:
        return text
    ends = list(accumulate(widths))
    head = sum(end <= columns * 0.5 for end in ends)
    tail = sum(ends[-1] - end >= columns * 0.5 - 1 for end in ends)
    return f"{text[:head]}…{text[tail + 1 :]}"


def _n(value: float) -> str:
    """A coordinate: a tenth of a pixel is enough, and keeps the file small."""
    return f"{value:.1f}".removesuffix(".0")


def _ticks(axis: Axis, x: Callable[[float], float], y: float) -> list[Label]:
    """What is written at the ticks of an axis from left to right; the last ends at its own."""
    last = axis.ticks[-1]
    return [
        Label(x(v), y, text, "end" if (v, text) == last else "middle") for v, text in axis.ticks
    ]


def _plane(
    x_label: str, y_axis: Axis
) -> tuple[Callable[[float], float], list[Outline], list[Label], float]:
    """The y scale, grid and labels of a chart with two axes, and where it ends."""
    top = LINE + 6
    base = top + PLOT_HEIGHT
    y = y_axis.place(base, top)
    outlines, texts = [], [Label(0.0, LINE - 4, y_axis.label)]
    for value, text in y_axis.ticks:
        style = "axis" if value == 0.0 else "grid"
        outlines.append(Outline(style, f"M{_n(LEFT)} {_n(y(value))}H{_n(RIGHT)}"))
        texts.append(Label(LEFT - 4, y(value) + 4, text, "end"))
    bottom = base + 2 * LINE + 6
    texts.append(Label(RIGHT, bottom - 6, x_label, "end"))
    return y, outlines, texts, bottom


def _add_legend(
    outlines: list[Outline],
    texts: list[Label],
    names: Sequence[str],
    top: float,
    *,
    lines: bool = True,
) -> float:
    """Write what each series is, a line for each; returns where the legend ends."""
    for i, name in enumerate(names):
        y = top + LINE * i + 8
        if lines:
            outlines.append(Outline(f"line s{i}", f"M2 {_n(y)}H30"))
        outlines.append(Outline(f"mark s{i}", marker(i, 16.0, y)))
        texts.append(Label(38.0, y + 4, shorten(name, 44)))
    return top + LINE * len(names) + 4
