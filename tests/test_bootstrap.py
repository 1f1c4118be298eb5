"""Intervals from drawing measured values again."""

import random
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerskip import bootstrap
from layerskip.bootstrap import bootstrap_interval, expanded_interval, student


@settings(max_examples=30)
@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=15))
def test_interval_surrounds_the_median(ratios: list[float]) -> None:
    low, high = bootstrap_interval(ratios)
    assert min(ratios) <= low <= statistics.median(ratios) <= high <= max(ratios)


def test_interval_has_the_width_that_theory_gives() -> None:
    generator = random.Random(1)
    low, high = bootstrap_interval([generator.gauss(2.0, 0.5) for _ in range(200)])
    expected = 2 * 1.96 * 1.2533 * 0.5 / 200**0.5  # of the median of normal samples
    assert high - low == pytest.approx(expected, rel=0.3)
    assert low < 2.0 < high


def test_interval_is_the_same_in_every_run() -> None:
    ratios = [1.0, 1.3, 0.9, 1.7, 1.1]
    assert bootstrap_interval(ratios) == bootstrap_interval(ratios)


@pytest.mark.parametrize("count", [7, 8, 13])
def test_intervals_of_few_prompts_hold_95_percent(count: int) -> None:
    generator = np.random.default_rng(4)
    intervals = [bootstrap_interval(np.exp(generator.normal(0, 0.2, count))) for _ in range(400)]
    missed = sum(not low <= 1.0 <= high for low, high in intervals)
    assert missed <= 20  # percentiles alone miss 8 to 12 %: the median takes few values


def mean_interval(values: np.ndarray, worth: float | None = None) -> list[float]:
    return expanded_interval(lambda places: values[places].mean(axis=1), len(values), worth)


@pytest.mark.parametrize("count", [6, 12])
def test_small_samples_get_an_interval_that_is_wide_enough(count: int) -> None:
    generator = np.random.default_rng(2)
    intervals = [mean_interval(generator.standard_normal(count)) for _ in range(300)]
    missed = sum(not low <= 0.0 <= high for low, high in intervals)
    assert 3 <= missed <= 28  # 5 % are 15; the plain percentile interval misses 10 to 14 %


def test_many_values_need_no_expansion() -> None:
    values = np.random.default_rng(3).standard_normal(2000)
    low, high = mean_interval(values)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 2000**0.5, rel=0.1)
    few = mean_interval(values, worth=5.0)
    assert few[0] < low < high < few[1]


def test_students_quantiles_are_those_of_the_tables() -> None:
    for freedom, quantile in ((4, 2.776), (5, 2.571), (9, 2.262), (30, 2.042), (10**9, 1.960)):
        assert student(freedom) == pytest.approx(quantile, rel=3e-3)


def test_resamples_are_drawn_in_parts_where_values_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def counted(places: np.ndarray) -> np.ndarray:
        sizes.append(places.size)
        return places.mean(axis=1)

    monkeypatch.setattr(bootstrap, "DRAWN_AT_ONCE", 1000)
    expanded_interval(counted, 7)
    assert max(sizes) <= 1000
    assert sum(sizes) == bootstrap.BOOTSTRAP_SAMPLES * 7
