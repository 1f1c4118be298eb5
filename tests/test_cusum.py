"""What drift's alarms are worth on accepted tokens alone: how soon, how often for nothing."""

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from drifting import (
    MOST,
    PROMISED_DELAY,
    PROMISED_DRAFTS,
    SPREADS,
    baseline_of,
    requests_of,
    shifted,
    traffic,
)

from layerskip.telemetry import baseline as baselines
from layerskip.telemetry.baseline import Baseline, OpenRequest
from layerskip.telemetry.cusum import DRAFTS_PER_FALSE_ALARM, MOST_HEARD, Cusum, threshold


def false_alarms(baseline: Baseline, accepted: np.ndarray, exists: np.ndarray) -> int:
    """Alarms of both directions: the same test, written for whole arrays."""
    height, rho = threshold(0.5, DRAFTS_PER_FALSE_ALARM), baseline.assumed_correlation
    tolerance = baseline.tolerance(0.5)
    counts = np.arange(1, accepted.shape[1] + 1)
    totals = np.cumsum((accepted - baseline.usual) / baseline.deviation, axis=1)
    found = 0
    for sign in (-1, 1):
        said = (0.5 - tolerance) * (sign * totals - counts * (0.5 + tolerance) / 2)
        said /= 1 + (counts - 1) * rho
        over = np.maximum.accumulate(said >= MOST_HEARD * height, axis=1)
        steps = np.diff(said, axis=1, prepend=0.0)
        steps[:, 1:][over[:, :-1]] = 0.0
        found += crossings(np.cumsum(steps[exists]), height)
    return found


def crossings(sums: np.ndarray, height: float) -> int:
    """How often a sum that is kept from falling below zero, and begins again, gets so high."""
    found = 0
    while len(sums):
        lowest = np.minimum(np.minimum.accumulate(sums), 0.0)
        high = sums - lowest >= height
        first = int(high.argmax())
        if not high[first]:
            break
        found += 1
        sums = sums[first + 1 :] - sums[first]
    return found


def alarms_of(monitor: Cusum, requests: list[list[int]]) -> Iterator[tuple[int, str]]:
    drafts = 0
    for request in requests:
        state = OpenRequest()
        for accepted in request:
            found = monitor.observe(state, accepted)
            drafts += 1
            if found is not None:
                yield drafts, found[0]


def delay(rng: np.random.Generator, correlation: float, deviations: float) -> float:
    """Drafts from a shift to its alarm, of a monitor that learnt from a hundred requests."""
    monitor = Cusum(baseline_of(requests_of(*traffic(rng, 100, correlation))))
    assert not list(alarms_of(monitor, requests_of(*traffic(rng, 10, correlation))))
    accepted, exists = traffic(rng, 120, correlation)
    wanted = "up" if deviations > 0 else "down"
    after = requests_of(shifted(rng, accepted, deviations), exists)
    return next((n for n, way in alarms_of(monitor, after) if way == wanted), math.inf)


@pytest.mark.parametrize("deviations", [-0.5, 0.5])
@pytest.mark.parametrize("correlation", [0.0, 0.017])
def test_half_a_deviation_is_found_within_200_rounds(correlation: float, deviations: float) -> None:
    rng = np.random.default_rng(1)
    delays = [delay(rng, correlation, deviations) for _ in range(31)]
    assert statistics.median(delays) < PROMISED_DELAY


def count_false_alarms(correlation: float, references: int, requests: int) -> tuple[int, int]:
    """False alarms of monitors that each learnt from other requests, and drafts."""
    rng, found, drafts = np.random.default_rng(3), 0, 0
    for _ in range(references):
        baseline = baseline_of(requests_of(*traffic(rng, 100, correlation)))
        accepted, exists = traffic(rng, requests, correlation)
        found += false_alarms(baseline, accepted, exists)
        drafts += int(exists.sum())
    return found, drafts


@pytest.mark.parametrize("correlation", [0.017, 0.1])
def test_false_alarms_are_rare(correlation: float) -> None:
    found, drafts = count_false_alarms(correlation, references=10, requests=2000)
    assert drafts > 7 * PROMISED_DRAFTS
    assert found < drafts / PROMISED_DRAFTS


@pytest.mark.slow
@pytest.mark.parametrize("correlation", SPREADS)
def test_false_alarms_are_rare_for_long(correlation: float) -> None:
    found, drafts = count_false_alarms(correlation, references=50, requests=6000)
    assert drafts > 100 * PROMISED_DRAFTS
    assert found < 0.5 * drafts / PROMISED_DRAFTS


def of_a_length(rng: np.random.Generator, num_requests: int, tokens: int, most: int) -> list[Any]:
    """Requests of so many tokens: those of which more is accepted take fewer drafts. Three in ten
    loop."""
    requests = []
    for loops in rng.random(num_requests) < 0.3:
        request, left = [], tokens
        while left > 0:
            right = rng.random(most) < (0.98 if loops else 0.6)
            request.append(int(np.logical_and.accumulate(right).sum()))
            left -= request[-1] + 1
        requests.append(request)
    return requests


@pytest.mark.parametrize("most", [5, 8])
def test_requests_that_end_by_their_length_are_no_drift(most: int) -> None:
    rng, found, drafts = np.random.default_rng(8), 0, 0
    for _ in range(4):
        baseline = baseline_of(of_a_length(rng, 100, 128, most))
        requests = of_a_length(rng, 800, 128, most)
        found += len(list(alarms_of(Cusum(baseline), requests)))
        drafts += sum(map(len, requests))
    assert drafts > PROMISED_DRAFTS
    assert found < drafts / PROMISED_DRAFTS


def test_an_alarm_tells_the_mean_of_requests_as_they_are_weighed() -> None:
    monitor, sizes, accepted, found = Cusum(Baseline(2.0, 2.0, 0.5)), list[int](), [3, 4], None
    while found is None:
        state, last = OpenRequest(), len(sizes) % 2
        while found is None and state.count < (1, 20)[last]:
            found = monitor.observe(state, accepted[last])
        sizes.append(state.count)
    weights = [n / (1 + (n - 1) * 0.5) for n in sizes]
    mean = sum(w * accepted[i % 2] for i, w in enumerate(weights)) / sum(weights)
    assert found == ("up", sum(sizes), pytest.approx(mean))
    assert mean < 3.7 < (sizes.count(1) * 3 + (sum(sizes) - sizes.count(1)) * 4) / sum(sizes)


def test_the_variance_is_what_no_correlation_is_enough_for() -> None:
    """Of requests of one draft, beside long ones that are all alike."""
    reference = baselines.Reference()
    for drafts in [[0], [4], *[[2] * 10] * 2] * 10:
        one = OpenRequest()
        for accepted in drafts:
            one.add(accepted)
        reference.add(one)
    found = reference.baseline()
    assert reference._weighed(found.correlation)[2] <= found.variance * (1 + 1e-9)
    assert found.variance > 1.5 * np.var([0, 4, *[2] * 20])


def test_an_alarm_says_nothing_of_what_was_not_heard() -> None:
    """Requests that are bad at first, and soon better than usual when they have said enough."""
    alarms = []
    monitor = Cusum(Baseline(2.0, 2.0, 0.02, 0.02, 0.01))
    for request in [[0] * 15 + [4] * 60] * 40:
        state = OpenRequest()
        alarms += [found for a in request if (found := monitor.observe(state, a)) is not None]
    assert "down" in {way for way, *_ in alarms}
    assert all((way == "down") == (now < 2) for way, _, now in alarms)


@pytest.mark.parametrize("correlation", [0.05, 0.3])
def test_an_alarm_tells_of_nothing_that_no_draft_has(correlation: float) -> None:
    """Requests side by side that grow worse: the drafts before count for less with each one."""
    monitor, told = Cusum(Baseline(2.0, 2.0, correlation, 0.02, 0.02)), []
    states = [OpenRequest() for _ in range(12)]
    for accepted in [4] * 60 + [1] * 60:
        found = [monitor.observe(state, accepted) for state in states]
        told += [one for one in found if one is not None]
    assert told
    assert all(1 <= now <= 4 for *_, now in told)


def test_requests_that_differ_too_much_for_any_correlation_are_watched_all_the_same() -> None:
    """Short ones differ draft by draft, and long ones do not: shifts are still found."""
    rng = np.random.default_rng(10)

    def requests(number: int, kept: float = 1.0) -> list[Any]:
        found = []
        for short in rng.random(number) < 0.3:
            count, share = (int(rng.integers(1, 4)), 0.7) if short else (40, 0.97)
            right = rng.random((count, 5)) < share * kept
            found.append(np.logical_and.accumulate(right, axis=1).sum(axis=1).tolist())
        return found

    delays = []
    for _ in range(9):
        alarms = alarms_of(Cusum(baseline_of(requests(100))), requests(60, kept=0.85))
        delays.append(next((n for n, way in alarms if way == "down"), math.inf))
    assert statistics.median(delays) < 2 * PROMISED_DELAY


def test_who_takes_drafts_for_independent_raises_false_alarms() -> None:
    rng = np.random.default_rng(4)
    baseline = baseline_of(requests_of(*traffic(rng, 1000, 0.05)))
    naive = replace(baseline, correlation=0.0, correlation_error=0.0)
    accepted, exists = traffic(rng, 5000, 0.05)
    assert false_alarms(naive, accepted, exists) > 3 * exists.sum() / PROMISED_DRAFTS
    assert false_alarms(baseline, accepted, exists) < exists.sum() / PROMISED_DRAFTS


def test_arrays_and_drafts_one_by_one_give_the_same_alarms() -> None:
    rng = np.random.default_rng(5)
    baseline = baseline_of(requests_of(*traffic(rng, 100, 0.05)))
    accepted, exists = traffic(rng, 150, 0.05)
    accepted = shifted(rng, accepted, -0.4)
    found = list(alarms_of(Cusum(baseline), requests_of(accepted, exists)))
    assert len(found) > 5
    assert len(found) == false_alarms(baseline, accepted, exists)


@pytest.mark.parametrize("error", [0.0, 0.06])
def test_a_request_says_what_normal_densities_say(error: float) -> None:
    rho, shift = 0.3, 0.5
    baseline = Baseline(2.0, 1.5, rho, mean_error=error)
    monitor, request = Cusum(baseline, shift), OpenRequest()
    drafts = [1, 3, 2, 0, 2]
    for accepted in drafts:
        monitor.observe(request, accepted)
    z = (np.array(drafts) - 2.0) / math.sqrt(1.5)
    covariance = np.full((5, 5), rho) + (1 - rho) * np.eye(5)

    def log_density(mean: float) -> float:
        return -0.5 * (z - mean) @ np.linalg.solve(covariance, z - mean)

    before = error / math.sqrt(1.5)
    for direction, sign in (("down", -1), ("up", 1)):
        ratio = log_density(sign * shift) - log_density(sign * before)
        assert request.said[direction] == pytest.approx(ratio)


def test_the_threshold_is_siegmunds() -> None:
    for shift, drafts in ((0.5, 1e5), (0.5, 1e7), (1.0, 1e4)):
        b = threshold(shift, drafts) + 2 * 0.583 * shift
        each_direction = (math.exp(b) - b - 1) / (shift**2 / 2)
        assert each_direction == pytest.approx(2 * drafts)


def test_what_is_planted_is_learnt() -> None:
    rng, means = np.random.default_rng(6), []
    for correlation in (0.0, 0.05, 0.1):
        accepted, exists = traffic(rng, 3000, correlation)
        baseline = baseline_of(requests_of(accepted, exists))
        assert baseline.mean == pytest.approx(accepted[exists].mean())
        counts = exists.sum(axis=1)
        weights = 1 / (1 + (counts - 1) * baseline.assumed_correlation)
        weighed = (weights[:, None] * exists * accepted).sum() / (weights * counts).sum()
        assert baseline.usual == pytest.approx(weighed)
        assert baseline.variance == pytest.approx(accepted[exists].var(), rel=0.01)
        assert abs(baseline.correlation - correlation) < 0.01
    accepted, exists = traffic(rng, 4000, 0.1)
    parts = [baseline_of(requests_of(accepted[i::40], exists[i::40])) for i in range(40)]
    means = [part.usual for part in parts]
    spread = statistics.stdev(means) / statistics.fmean(part.mean_error for part in parts)
    assert 0.7 < spread < 1.2  # a little below 1: a correlation above the likely one is assumed
    errors = [part.correlation_error for part in parts]
    spread = statistics.stdev(part.correlation for part in parts) / statistics.fmean(errors)
    assert 0.7 < spread < 1.4


def test_odd_references_still_make_a_baseline() -> None:
    always = baseline_of([[4] * 10] * 20)
    assert (always.mean, always.variance, always.deviation) == (4.0, 0.0, 0.1)
    assert any(way == "down" for _, way in alarms_of(Cusum(always), [[4] * 10, *[[3] * 10] * 9]))
    single = baseline_of([[i % 5] for i in range(50)])
    assert (single.correlation, single.drafts_per_request) == (0.0, 1.0)
    apart = baseline_of([[4 * (i % 2)] * 10 for i in range(50)])
    assert apart.correlation == pytest.approx(1.0)
    assert apart.assumed_correlation == baselines.MOST_CORRELATION
    assert Baseline.from_dict(apart.to_dict()) == apart
    assert baseline_of([[1, 2]] * 19 + [[]] * 10).num_requests == 19  # others never drafted


@pytest.mark.parametrize("level", [0, MOST])
def test_two_requests_in_a_loop_are_no_drift(level: int) -> None:
    rng = np.random.default_rng(7)
    reference = requests_of(*traffic(rng, 200, 0.017))
    stream = [[level] * 500, reference[0], [level] * 500, *reference[1:5]]
    assert not list(alarms_of(Cusum(baseline_of(reference)), stream))
