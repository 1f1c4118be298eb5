"""How sure a measured ratio is: intervals from drawing the measured prompts again."""

import math
import statistics
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

BOOTSTRAP_SAMPLES = 2000
DRAWN_AT_ONCE = 1 << 20
TAIL = 0.025  # on either side of a 95 % interval
LEAST_PROMPTS = 6  # of fewer, 95 % cannot be said: six heads in a row have a chance of 3 %

Places = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]


def bootstrap_interval(ratios: Sequence[float]) -> list[float]:
    """95 % interval of the median, 2000 resamples, always the same ones.

    Of fewer than ``LEAST_PROMPTS`` it goes from the lowest to the highest, which is less than 95 %.
    Files of bench/results from before 2026-11-29 hold percentile intervals that are not expanded:
    88 % of 7 values, about 92 % of 8, 13 and 14.
    """
    values = np.asarray(ratios, dtype=np.float64)
    return expanded_interval(lambda places: np.median(values[places], axis=1), len(values))


def median_interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the ends of its ``bootstrap_interval``."""
    middle = statistics.median(ratios)
    low, high = bootstrap_interval(ratios)
    return middle, low, high


def expanded_interval(
    statistic: Callable[[Places], Values], count: int, worth: float | None = None
) -> list[float]:
    """95 % interval of any statistic, widened for small samples.

    The percentile interval of few values is too narrow. This one goes out to those percentiles
    that would make it a t interval if the statistic were the mean of normal values (Hesterberg
    2015, "What teachers should know about the bootstrap", expanded percentile interval).

    Args:
        statistic: from places of the drawn values, (resamples, count) int64, to (resamples,).
        count: of the values; of one the interval is that value alone.
        worth: of how many equally heavy values they are worth; None: all are equally heavy.
    """
    number = max(2.0, count if worth is None else worth)
    out = math.sqrt(number / (number - 1)) * student(number - 1)
    drawn = _drawn(statistic, count)
    cut = int(NormalDist().cdf(-out) * len(drawn))
    return [float(drawn[cut]), float(drawn[len(drawn) - 1 - cut])]


def student(freedom: float) -> float:
    """The 97.5 % quantile of Student's distribution, to 0.3 % from 4 degrees of freedom on.

    Abramowitz and Stegun 26.7.5.
    """
    z = NormalDist().inv_cdf(1 - TAIL)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**i for i, term in enumerate(terms))


def _drawn(statistic: Callable[[Places], Values], count: int) -> Values:
    """The statistic of each resample, ascending."""
    generator = np.random.default_rng(0)
    rows = max(1, DRAWN_AT_ONCE // count)
    parts = [
        statistic(generator.integers(0, count, (min(rows, BOOTSTRAP_SAMPLES - done), count)))
        for done in range(0, BOOTSTRAP_SAMPLES, rows)
    ]
    return np.sort(np.concatenate(parts))
