"""Distributions and bootstrap intervals of what a report holds."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from layerskip.bootstrap import expanded_interval
from layerskip.telemetry.report import Distribution, Estimate

Array = npt.NDArray[np.float64]
Statistic = Callable[..., Array]

T = TypeVar("T", int, float)

FEW = 500  # units whose intervals are widened for being few
RESAMPLES = 1000
DRAWN = 1000  # units in a resample at most: more say no more, only more slowly
PERCENTS = np.arange(101)


def distribution(values: Sequence[float] | Array) -> Distribution | None:
    """Of measured values; None of none."""
    if len(values) == 0:
        return None
    points = np.quantile(values, PERCENTS / 100)
    return Distribution(len(values), float(np.mean(values)), tuple(map(float, points)))


def counted_distribution(counts: Mapping[T, int], mean: float | None = None) -> Distribution:
    """Of values that are counted, each quantile one of them (nearest rank).

    Args:
        counts: of at least one value.
        mean: of the values, if the counted ones are rounded.
    """
    values = sorted(counts)
    numbers = np.array([counts[v] for v in values], dtype=np.int64)
    ends = np.cumsum(numbers)
    total = int(ends[-1])
    ranks = np.maximum(1, -(-total * PERCENTS // 100))
    places = np.searchsorted(ends, ranks)
    if mean is None:
        mean = float(np.dot(values, numbers) / total)
    return Distribution(total, mean, tuple(float(values[i]) for i in places))


def estimate(statistic: Statistic, *columns: Array) -> Estimate:
    """A statistic of units, with its 95 % interval from drawing units again, always the same ones.

    Of very many units a resample holds ``DRAWN``; what it varies by is then shrunk by the square
    root of the share (m out of n bootstrap, Bickel, Goetze and van Zwet 1997).

    Args:
        statistic: of arrays (..., units), one for each column; gives (...).
        columns: a number of each unit, in the same order; at least one unit.
    """
    num_units, value = len(columns[0]), float(statistic(*columns))
    if num_units == 1:
        return Estimate(value, value, value, num_units)

    def resampled(places: npt.NDArray[np.int64]) -> Array:
        return statistic(*(column[places] for column in columns))

    if num_units <= FEW:
        low, high = expanded_interval(resampled, num_units)
        return Estimate(value, low, high, num_units)
    drawn = min(num_units, DRAWN)
    places = np.random.default_rng(0).integers(0, num_units, (RESAMPLES, drawn))
    down, up = np.quantile(resampled(places) - value, (0.025, 0.975)) * np.sqrt(drawn / num_units)
    return Estimate(value, value + float(down), value + float(up), num_units)


def ratio_of_sums(above: Array, below: Array) -> Array:
    """Such as accepted tokens a round, of requests with their tokens and rounds."""
    return above.sum(axis=-1) / np.maximum(below.sum(axis=-1), 1e-300)


def median_ratio(above: Array, below: Array) -> Array:
    """The median of the units' own ratios."""
    return np.median(above / below, axis=-1)


def ratio_of_p90(above: Array, below: Array) -> Array:
    """The 90 % quantile of one column over that of another."""
    return np.quantile(above, 0.9, axis=-1) / np.quantile(below, 0.9, axis=-1)


def ratio_of_slowest(above: Array, below: Array) -> Array:
    """Mean of the largest tenth of one column over that of the largest tenth of another."""
    return _largest(above) / _largest(below)


def _largest(values: Array) -> Array:
    kept = tenth(values.shape[-1])
    return np.partition(values, -kept, axis=-1)[..., -kept:].mean(axis=-1)


def ratio_of_worst(above: Array, below: Array, gains: Array) -> Array:
    """Sums of one column over another's, of the tenth of the units with the least gain."""
    worst = np.argpartition(gains, tenth(gains.shape[-1]) - 1, axis=-1)
    worst = worst[..., : tenth(gains.shape[-1])]
    above, below = (np.take_along_axis(column, worst, axis=-1) for column in (above, below))
    return ratio_of_sums(above, below)


def tenth(num_units: int) -> int:
    """How many a tenth of the units are, at least one."""
    return max(1, num_units // 10)
