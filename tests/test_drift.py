"""Drift: what alarms are worth on streams of requests that differ, and how a monitor is used."""

import json
import math
import statistics
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from toys import PLANS, make_model, random_ids

from layerskip import Round, SelfSpeculativeLM
from layerskip.estimates import EDGES
from layerskip.telemetry import baseline as baselines
from layerskip.telemetry.baseline import NUM_BINS, Baseline, BinnedDraft, OpenRequest, Surprise
from layerskip.telemetry.cusum import DRAFTS_PER_FALSE_ALARM, MOST_HEARD, Cusum, threshold
from layerskip.telemetry.drift import MOST_BUCKETS, OTHER_BUCKET, DriftMonitor, find_drift
from layerskip.telemetry.drift_bucket import MOST_POINTS, Alarm

MOST = 4  # tokens a draft
ACCEPTANCE = 0.79
# Spread of a request's logit, and the correlation of its drafts that it makes.
SPREADS = {0.0: 0.0, 0.017: 0.2, 0.03: 0.26, 0.05: 0.35, 0.1: 0.515}
PROMISED_DELAY, PROMISED_DRAFTS = 200, 100_000
RECORD = Round(0, 1, (1,), "", MOST, 0, "recovered", 0.0, 0.0, 1, request_id="a")


def traffic(
    rng: np.random.Generator, num_requests: int, correlation: float, mean_drafts: float = 40.0
) -> tuple[np.ndarray, np.ndarray]:
    """Accepted tokens (request, draft), and which of the drafts there are.

    Each request has an acceptance and a number of drafts of its own; the built-in checkpoint's
    rounds have such means and deviations.
    """
    logit = math.log(ACCEPTANCE / (1 - ACCEPTANCE))
    logits = logit + SPREADS[correlation] * rng.standard_normal(num_requests)
    drafts = np.clip(rng.lognormal(math.log(0.85 * mean_drafts), 0.55, num_requests), 3, 200)
    exists = np.arange(int(drafts.max())) < np.floor(drafts)[:, None]
    right = np.log(rng.random(exists.shape)) / np.log(1 / (1 + np.exp(-logits)))[:, None]
    return np.minimum(np.floor(right), MOST).astype(int), exists


def shifted(rng: np.random.Generator, accepted: np.ndarray, deviations: float) -> np.ndarray:
    """Two tokens more or less, where there is room, as often as moves the mean so far."""
    moved = np.clip(accepted + math.copysign(2, deviations), 0, MOST).astype(int)
    chance = deviations * accepted.std() / (moved - accepted).mean()
    assert 0 <= chance <= 1
    return np.where(rng.random(accepted.shape) < chance, moved, accepted)


def requests_of(accepted: np.ndarray, exists: np.ndarray) -> list[list[int]]:
    return [row[there].tolist() for row, there in zip(accepted, exists, strict=True)]


def false_alarms(baseline: Baseline, accepted: np.ndarray, exists: np.ndarray) -> int:
    """Alarms of both directions: the same test, written for whole arrays."""
    height, rho = threshold(0.5, DRAFTS_PER_FALSE_ALARM), baseline.assumed_correlation
    tolerance = baseline.tolerance(0.5)
    counts = np.arange(1, accepted.shape[1] + 1)
    totals = np.cumsum((accepted - baseline.mean) / baseline.deviation, axis=1)
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
    monitor = Cusum(Baseline.of(requests_of(*traffic(rng, 100, correlation))))
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


def test_the_delay_is_what_was_expected() -> None:
    rng = np.random.default_rng(2)
    for correlation in (0.0, 0.05):
        expected = Cusum(Baseline.of(requests_of(*traffic(rng, 100, correlation)))).expected_delay
        median = statistics.median(delay(rng, correlation, -0.5) for _ in range(31))
        assert median == pytest.approx(expected, rel=0.35)


def count_false_alarms(correlation: float, references: int, requests: int) -> tuple[int, int]:
    """False alarms of monitors that each learnt from other requests, and drafts."""
    rng, found, drafts = np.random.default_rng(3), 0, 0
    for _ in range(references):
        baseline = Baseline.of(requests_of(*traffic(rng, 100, correlation)))
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


def test_who_takes_drafts_for_independent_raises_false_alarms() -> None:
    rng = np.random.default_rng(4)
    baseline = Baseline.of(requests_of(*traffic(rng, 1000, 0.05)))
    naive = replace(baseline, correlation=0.0, correlation_error=0.0)
    accepted, exists = traffic(rng, 5000, 0.05)
    assert false_alarms(naive, accepted, exists) > 3 * exists.sum() / PROMISED_DRAFTS
    assert false_alarms(baseline, accepted, exists) < exists.sum() / PROMISED_DRAFTS


def test_arrays_and_drafts_one_by_one_give_the_same_alarms() -> None:
    rng = np.random.default_rng(5)
    baseline = Baseline.of(requests_of(*traffic(rng, 100, 0.05)))
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
        baseline = Baseline.of(requests_of(accepted, exists))
        assert baseline.mean == pytest.approx(accepted[exists].mean())
        assert baseline.variance == pytest.approx(accepted[exists].var(), rel=0.01)
        assert abs(baseline.correlation - correlation) < 0.01
    accepted, exists = traffic(rng, 4000, 0.1)
    parts = [Baseline.of(requests_of(accepted[i::40], exists[i::40])) for i in range(40)]
    means = [part.mean for part in parts]
    spread = statistics.stdev(means) / statistics.fmean(part.mean_error for part in parts)
    assert 0.7 < spread < 1.2  # a little below 1: a correlation above the likely one is assumed
    errors = [part.correlation_error for part in parts]
    spread = statistics.stdev(part.correlation for part in parts) / statistics.fmean(errors)
    assert 0.7 < spread < 1.4


def test_odd_references_still_make_a_baseline() -> None:
    always = Baseline.of([[4] * 10] * 20)
    assert (always.mean, always.variance, always.deviation) == (4.0, 0.0, 0.1)
    assert any(way == "down" for _, way in alarms_of(Cusum(always), [[4] * 10, *[[3] * 10] * 9]))
    single = Baseline.of([[i % 5] for i in range(50)])
    assert (single.correlation, single.drafts_per_request) == (0.0, 1.0)
    apart = Baseline.of([[4 * (i % 2)] * 10 for i in range(50)])
    assert apart.correlation == pytest.approx(1.0)
    assert apart.assumed_correlation == baselines.MOST_CORRELATION
    assert Baseline.from_dict(apart.to_dict()) == apart
    with pytest.raises(ValueError, match="a baseline needs 20 requests that drafted, got 19"):
        Baseline.of([[1, 2]] * 19 + [[]] * 10)


@pytest.mark.parametrize("level", [0, MOST])
def test_two_requests_in_a_loop_are_no_drift(level: int) -> None:
    rng = np.random.default_rng(7)
    reference = requests_of(*traffic(rng, 200, 0.017))
    stream = [[level] * 500, reference[0], [level] * 500, *reference[1:5]]
    assert not list(alarms_of(Cusum(Baseline.of(reference)), stream))


# Drafts that tell their confidence.

Told = tuple[int, tuple[float, ...]]  # accepted tokens of a draft, and its confidences


def told_traffic(
    rng: np.random.Generator, num_requests: int, loss: float = 0.0, doubt: float = 0.0
) -> list[list[Told]]:
    """Requests that differ as much as greedy ones do, in their confidence and in what it means.

    A token is right with the chance that its confidence says, but for a logit of the request's
    own; ``loss`` is the share of right tokens that are lost all the same, ``doubt`` is taken from
    each logit, and the confidence knows.
    """
    requests = []
    for _ in range(num_requests):
        level = 1.2 - doubt + 1.0 * rng.standard_normal()
        own = 0.2 * rng.standard_normal()
        count = int(np.clip(rng.lognormal(math.log(34.0), 0.55), 3, 200))
        logits = level + rng.standard_normal((count, MOST))
        confidences = 1 / (1 + np.exp(-logits))
        right = rng.random((count, MOST)) < (1 - loss) / (1 + np.exp(-logits - own))
        accepted = np.cumprod(right, axis=1).sum(axis=1)
        told = (tuple(line) for line in confidences.tolist())
        requests.append(list(zip(accepted.tolist(), told, strict=True)))
    return requests


def watch(monitor: DriftMonitor, requests: list[list[Told]], *, tell: bool = True) -> None:
    for i, request in enumerate(requests):
        for j, (accepted, told) in enumerate(request, 1):
            known = told if tell else ()
            ends = j == len(request)
            monitor.observe("", f"{i}", accepted, confidences=known, finished=ends)


def told_alarms(
    baseline: Baseline, requests: list[list[Told]], *, tell: bool = True
) -> list[Alarm]:
    alarms: list[Alarm] = []
    watch(DriftMonitor(baselines={"": baseline}, on_alarm=alarms.append), requests, tell=tell)
    return alarms


def learnt(requests: list[list[Told]], *, tell: bool = True) -> Baseline:
    monitor = DriftMonitor(num_reference_requests=len(requests))
    watch(monitor, requests, tell=tell)
    return monitor.baselines()[""]


def losing_half_a_deviation(requests: list[list[Told]]) -> float:
    """The ``loss`` that takes half a standard deviation of accepted tokens a draft."""
    counts = np.array([accepted for request in requests for accepted, _ in request])
    low, high = 0.0, 1.0
    while high - low > 1e-4:
        loss = (low + high) / 2
        kept = np.cumsum(np.concatenate([[0.0], (1 - loss) ** np.arange(1, MOST + 1)]))[counts]
        low, high = (loss, high) if (counts - kept).mean() < counts.std() / 2 else (low, loss)
    return high


def test_half_a_deviation_is_found_within_200_rounds_however_much_requests_differ() -> None:
    rng = np.random.default_rng(11)
    loss = losing_half_a_deviation(told_traffic(rng, 300))
    delays: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(21):
        usual, worse = told_traffic(rng, 100), told_traffic(rng, 60, loss)
        for tell, found in delays.items():
            alarms = told_alarms(learnt(usual, tell=tell), worse, tell=tell)
            found.append(next((a.num_drafts for a in alarms if a.direction == "down"), math.inf))
    assert learnt(usual).correlation > 0.1 > 2 * learnt(usual).surprise.baseline.correlation
    assert statistics.median(delays[True]) < PROMISED_DELAY < statistics.median(delays[False])


def test_false_alarms_of_both_sums_are_rare() -> None:
    rng, found, drafts = np.random.default_rng(12), 0, 0
    for _ in range(5):
        usual, stream = told_traffic(rng, 100), told_traffic(rng, 1000)
        found += len(told_alarms(learnt(usual), stream))
        drafts += sum(map(len, stream))
    assert drafts > 1.5 * PROMISED_DRAFTS
    assert found < drafts / PROMISED_DRAFTS


def test_text_that_became_harder_is_seen_in_accepted_tokens_alone() -> None:
    rng = np.random.default_rng(13)
    baseline = learnt(told_traffic(rng, 100))
    alarms = told_alarms(baseline, told_traffic(rng, 200, doubt=1.5))
    assert {(alarm.watched, alarm.direction) for alarm in alarms} == {("accepted", "down")}
    alarms = told_alarms(baseline, told_traffic(rng, 60, loss=0.3))
    assert ("surprise", "down") in {(alarm.watched, alarm.direction) for alarm in alarms}
    first = next(alarm for alarm in alarms if alarm.watched == "surprise")
    fall = first.before - first.now
    assert fall > 0.3
    assert str(first) == (
        f"all requests: accepted tokens a draft fell {fall:.2f} standard deviations below what its "
        f"confidence used to mean over {first.since} drafts"
    )


def test_two_sums_share_the_false_alarms_and_are_surer_of_their_baselines() -> None:
    baseline = learnt(told_traffic(np.random.default_rng(15), 40))
    assert baseline.surprise is not None
    both = DriftMonitor(baselines={"": baseline})._buckets[""]._tests
    (alone,) = (
        DriftMonitor(baselines={"": replace(baseline, surprise=None)})._buckets[""]._tests.values()
    )
    assert alone.threshold == threshold(0.5, DRAFTS_PER_FALSE_ALARM)
    assert alone._gain == 0.5 - baseline.tolerance(0.5)
    assert set(both) == {"accepted", "surprise"}
    for test in both.values():
        assert test.threshold == threshold(0.5, 2 * DRAFTS_PER_FALSE_ALARM)
        assert test._gain == 0.5 - test.baseline.tolerance(0.5, errors=2.0)


def test_the_larger_sum_is_shown() -> None:
    rng = np.random.default_rng(16)
    usual = told_traffic(rng, 60)
    monitor = DriftMonitor(baselines={"": learnt(usual)})
    watch(monitor, told_traffic(rng, 1, loss=0.5))
    heights = {
        watched: test.sums["down"] / test.threshold
        for watched, test in monitor._buckets[""]._tests.items()
    }
    state = monitor.states()[""]
    assert state.down == max(heights.values()) > min(heights.values())
    assert monitor.paths()[""][-1][1] == state.down


def test_shares_are_not_those_of_the_requests_that_they_are_held_against() -> None:
    """Each request has a confidence of its own: of its own share nothing would be surprising."""
    requests = [
        [BinnedDraft(1, bytes([i])) if i % 4 else BinnedDraft(0, bytes([i]))] * 5
        for i in range(NUM_BINS)
    ]
    surprise = Surprise.of(requests)
    assert surprise is not None
    assert surprise.baseline.variance > 0.5
    assert surprise.baseline.correlation == pytest.approx(1.0)


def records_of(requests: list[list[Told]], name: str) -> list[Round]:
    """Rounds as a decoder makes them; every other draft was looked up, and its confidence means
    less."""
    found = []
    for i, request in enumerate(requests):
        for j, (accepted, told) in enumerate(request, 1):
            looked_up = j % 2 == 0
            found.append(
                replace(
                    RECORD,
                    index=j,
                    request_id=f"{name}{i}",
                    num_accepted_tokens=accepted // 2 if looked_up else accepted,
                    confidences=told,
                    drafter="lookup" if looked_up else "early_exit",
                    finish_reason="length" if j == len(request) else None,
                )
            )
    return found


def test_rounds_and_their_records_tell_confidences() -> None:
    rng, alarms = np.random.default_rng(17), []
    rounds = records_of(told_traffic(rng, 60), "a")
    rounds += records_of(told_traffic(rng, 60, loss=0.3), "b")
    monitor = DriftMonitor(num_reference_requests=60, on_alarm=alarms.append)
    for record in rounds:
        monitor(record)
    baseline = monitor.baselines()[""]
    assert baseline.surprise is not None
    shares = [s for s in baseline.surprise.shares if 0.0 < s < 1.0]
    exits, lookups = np.split(np.array(baseline.surprise.shares), 2)
    assert len(set(shares)) > NUM_BINS / 2
    assert exits[4:].mean() > lookups[4:].mean() + 0.1
    assert ("surprise", "down") in {(alarm.watched, alarm.direction) for alarm in alarms}
    drift = find_drift([r.to_dict() for r in rounds], num_reference_requests=60)
    again = drift.states[""].baseline
    assert again is not None
    assert again.surprise is not None
    assert again.surprise.shares == pytest.approx(baseline.surprise.shares, abs=0.02)
    assert {a.watched for a in drift.alarms} == {a.watched for a in alarms}


@pytest.mark.slow
def test_false_alarms_of_both_sums_are_rare_for_long() -> None:
    rng, found, drafts = np.random.default_rng(18), 0, 0
    for _ in range(40):
        baseline = learnt(told_traffic(rng, 100))
        stream = told_traffic(rng, 1500)
        found += len(told_alarms(baseline, stream))
        drafts += sum(map(len, stream))
    assert drafts > 20 * PROMISED_DRAFTS
    assert found < 0.5 * drafts / PROMISED_DRAFTS


def test_surprises_are_standard() -> None:
    usual = learnt(told_traffic(np.random.default_rng(14), 300)).surprise
    assert usual is not None
    assert abs(usual.baseline.mean) < 0.03
    assert usual.baseline.deviation == pytest.approx(1.0, abs=0.05)


def test_a_surprise_is_successes_less_their_chances_in_deviations() -> None:
    low, high = EDGES[2], EDGES[8]  # each the least of a bin of its own
    drafts = [(2, (high, high, low)), (0, (low,)), (1, (high, low)), (1, (low, high))]
    requests = [[BinnedDraft.of(*draft) for draft in drafts]] * 20
    surprise = Surprise.of(requests)
    assert surprise is not None
    # Judged with the higher confidence: three right, and one wrong; with the lower: one and three.
    assert sorted(set(surprise.shares)) == [0.25, 0.5, 0.75]
    variance = 0.75 * 0.25 + 0.75 * 0.75 * 0.25 + 0.75 * 0.75 * 0.25 * 0.75
    for accepted, surplus in ((0, -0.75), (1, 0.25 - 0.75), (2, 0.5 - 0.25), (3, 0.5 + 0.75)):
        found = surprise.of_draft(BinnedDraft.of(accepted, (high, high, low)))
        assert found == pytest.approx(surplus / math.sqrt(variance))
    sure = replace(surprise, shares=(1.0,) * NUM_BINS)  # but never that sure
    assert sure.of_draft(BinnedDraft.of(1, (high, high))) == pytest.approx(-1 / math.sqrt(0.1))
    looked_up = BinnedDraft.of(2, (high, high), looked_up=True)  # of which none was seen
    assert surprise.of_draft(looked_up) == pytest.approx(1.0 / math.sqrt(0.375))
    assert Surprise.of(requests[1:]) is None
    told = replace(Baseline(1.0, 1.0), surprise=surprise)
    assert Baseline.from_dict(json.loads(json.dumps(told.to_dict()))) == told


def test_a_draft_that_the_end_cuts_is_no_surprise() -> None:
    sure = [[(MOST, (0.99,) * MOST)] * 9 + [(1, (0.99,) * MOST)]] * 30
    baseline = learnt(sure)
    assert baseline.surprise is not None
    assert set(baseline.surprise.shares) == {1.0}
    assert not [a for a in told_alarms(baseline, sure * 4) if a.watched == "surprise"]


# The monitor.


def feed(monitor: DriftMonitor, requests: list[list[int]], name: str, **fields: Any) -> None:
    for i, request in enumerate(requests):
        monitor(replace(RECORD, index=0, num_draft_tokens=0, request_id=f"{name}{i}", **fields))
        for j, accepted in enumerate(request):
            monitor(
                replace(
                    RECORD,
                    index=j + 1,
                    num_accepted_tokens=accepted,
                    request_id=f"{name}{i}",
                    finish_reason="length" if j + 1 == len(request) else None,
                    **fields,
                )
            )


@pytest.fixture
def usual() -> list[list[int]]:
    return requests_of(*traffic(np.random.default_rng(8), 60, 0.017))


@pytest.fixture
def worse(usual: list[list[int]]) -> list[list[int]]:
    return [[max(0, accepted - 1) for accepted in request] for request in usual]


def test_a_bucket_learns_and_then_alarms(usual: list[list[int]], worse: list[list[int]]) -> None:
    alarms: list[Alarm] = []
    monitor = DriftMonitor(label="task", num_reference_requests=50, on_alarm=alarms.append)
    feed(monitor, usual[:50], "a", labels={"task": "code"})
    feed(monitor, worse[:20], "b", labels={"task": "poems"})  # still learning: nothing is usual
    states = monitor.states()
    assert states["code"].baseline == Baseline.of(usual[:50])
    assert (states["poems"].baseline, states["poems"].num_requests) == (None, 20)
    assert set(monitor.baselines()) == {"code"}
    feed(monitor, worse, "c", labels={"task": "code"})
    first, state = alarms[0], monitor.states()["code"]
    assert (first.bucket, first.watched, first.direction) == ("code", "accepted", "down")
    assert first.since <= first.num_drafts < 150
    assert first.before == Baseline.of(usual[:50]).mean
    assert first.now < first.before - 0.5
    assert str(first) == (
        f"code: accepted tokens a draft fell from {first.before:.2f} to {first.now:.2f} "
        f"over {first.since} drafts"
    )
    assert state.num_down_alarms == len(alarms) > 1
    assert (state.num_up_alarms, state.last_alarm) == (0, alarms[-1])
    assert state.num_drafts == sum(map(len, worse))
    assert 0.0 <= state.down < 1.0


def test_what_is_now_can_be_made_usual(usual: list[list[int]], worse: list[list[int]]) -> None:
    alarms: list[Alarm] = []
    monitor = DriftMonitor(
        baselines={"": Baseline.of(usual)}, num_reference_requests=20, on_alarm=alarms.append
    )
    feed(monitor, worse[:20], "a")
    assert alarms
    monitor.relearn("")
    assert monitor.states()[""].baseline is None
    alarms.clear()
    feed(monitor, worse[20:], "b")
    assert not alarms
    assert monitor.baselines()[""] == Baseline.of(worse[20:40])
    with pytest.raises(ValueError, match=r"there is no bucket 'code'; seen so far: ''"):
        monitor.relearn("code")


def test_rounds_without_a_draft_do_not_count(usual: list[list[int]]) -> None:
    monitor = DriftMonitor(baselines={"": Baseline.of(usual)})
    for i in range(1000):
        monitor(replace(RECORD, index=i, num_draft_tokens=0, origin="plain"))
    assert monitor.states()[""].num_drafts == 0
    learning = DriftMonitor(num_reference_requests=20)
    feed(learning, [[]] * 30, "a")
    learning.observe("", "b", None, finished=True)
    assert learning.states()[""].num_requests == 0


def test_rounds_of_requests_side_by_side_are_told_apart(usual: list[list[int]]) -> None:
    pairs = [r[:10] for r in usual if len(r) >= 10]
    one, mixed = (DriftMonitor(num_reference_requests=len(pairs)) for _ in range(2))
    feed(one, pairs, "a")
    for j in range(10):
        for i, request in enumerate(pairs):
            mixed.observe("", str(i), request[j], finished=j == 9)
    assert mixed.baselines() == one.baselines()


def test_what_was_decoded_while_learning_is_not_held_against_anyone(
    usual: list[list[int]],
) -> None:
    monitor = DriftMonitor(num_reference_requests=50)
    for _ in range(300):
        monitor.observe("", "long", 0)
    feed(monitor, usual[:50], "a")
    monitor.observe("", "long", 0)
    state = monitor.states()[""]
    assert (state.num_drafts, state.num_down_alarms) == (1, 0)
    assert state.down < 0.1


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerskip.telemetry.drift_bucket.MOST_OPEN", 10)
    monitor = DriftMonitor(label="user", num_reference_requests=20)
    for i in range(1000):
        monitor.observe("given up", str(i), 2)
        monitor.observe(f"user {i}", str(i), 2)
    assert len(monitor._buckets["given up"]._open) == 10
    assert len(monitor.states()) == MOST_BUCKETS + 1
    assert len(monitor._buckets[OTHER_BUCKET]._open) == 10


def test_requests_that_were_given_up_are_learnt_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerskip.telemetry.drift_bucket.MOST_OPEN", 10)
    monkeypatch.setattr("layerskip.telemetry.drift_bucket.MOST_KEPT", 3)
    monitor = DriftMonitor(num_reference_requests=40)
    for i in range(45):
        for _ in range(5):
            monitor.observe("", str(i), i % 3, confidences=(0.5, 0.9))
    assert monitor.states()[""].num_requests == 35
    assert {len(known) for known in monitor._buckets[""]._known} == {3}


def test_what_is_forgotten_leaves_no_path(usual: list[list[int]]) -> None:
    monitor = DriftMonitor(baselines={"": Baseline.of(usual)})
    feed(monitor, usual[:3], "a")
    assert monitor.paths()[""]
    monitor.relearn("")
    assert monitor.paths()[""] == ()


def test_threads_may_share_a_monitor(usual: list[list[int]]) -> None:
    monitor = DriftMonitor(baselines={"": Baseline.of(usual)})
    threads = [threading.Thread(target=feed, args=(monitor, usual, name)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert monitor.states()[""].num_drafts == 4 * sum(map(len, usual))


def test_recorded_rounds_give_what_the_monitor_gave(
    usual: list[list[int]], worse: list[list[int]]
) -> None:
    records: list[Round] = []
    alarms: list[Alarm] = []
    monitor = DriftMonitor(label="task", num_reference_requests=40, on_alarm=alarms.append)

    class Tee(DriftMonitor):
        def __call__(self, record: Round) -> None:
            records.append(record)
            monitor(record)

    feed(Tee(), [*usual, *worse], "a", labels={"task": "code"})
    drift = find_drift((r.to_dict() for r in records), label="task", num_reference_requests=40)
    assert drift.states == monitor.states()
    assert drift.alarms == tuple(alarms) != ()
    points = drift.paths["code"]
    watched = drift.states["code"].num_drafts
    assert MOST_POINTS / 2 <= len(points) <= MOST_POINTS
    assert points[-1][0] == watched
    assert len({b[0] - a[0] for a, b in pairwise(points[:-1])}) == 1
    assert max(p[1] for p in points) == 1.0 > max(p[2] for p in points)
    assert find_drift([]).states == {}


def test_a_decoder_can_be_watched() -> None:
    lm = SelfSpeculativeLM(make_model(), None, PLANS["exit"], num_draft_tokens=3)
    monitor = DriftMonitor(label="task", num_reference_requests=20)
    prompts = [random_ids(8, seed=i) for i in range(22)]
    outputs = lm.generate(prompts, max_new_tokens=8, labels={"task": "toy"}, on_round=monitor)
    state = monitor.states()["toy"]
    assert state.num_requests == 20
    assert state.baseline is not None
    drafts = [[r.num_accepted_tokens for r in o.rounds if r.num_draft_tokens] for o in outputs]
    assert min(sum(d) / len(d) for d in drafts) <= state.baseline.mean
    assert not monitor._buckets["toy"]._open


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: DriftMonitor(num_reference_requests=5), "num_reference_requests must be at least"),
        (lambda: DriftMonitor(shift=0.0), "shift must be finite and between 0.1 and 3"),
        (lambda: DriftMonitor(drafts_per_false_alarm=10), "drafts_per_false_alarm must be finite"),
        (lambda: Baseline(math.nan, 1.0), "mean must be finite"),
        (
            lambda: DriftMonitor(baselines={str(i): Baseline(1.0, 1.0) for i in range(101)}),
            "baselines must be of at most 100 buckets, got 101",
        ),
        (
            lambda: Surprise(
                (0.5,) * NUM_BINS,
                Baseline(0.0, 1.0, surprise=Surprise((0.5,) * NUM_BINS, Baseline(0.0, 1.0))),
            ),
            "no surprise of its own",
        ),
        (lambda: Baseline(1.0, -1.0), "variance must be finite and at least 0"),
        (lambda: Surprise((0.5,), Baseline(0.0, 1.0)), f"shares must be {NUM_BINS} numbers, got 1"),
        (lambda: Surprise((1.5,) * NUM_BINS, Baseline(0.0, 1.0)), "shares must be finite and betw"),
        (lambda: Baseline(1.0, math.nan), "variance must be finite"),
        (lambda: Baseline(1.0, 1.0, 1.5), "correlation must be finite and between 0 and 1"),
        (lambda: Baseline(1.0, 1.0, drafts_per_request=0.5), "drafts_per_request must be finite"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([], "a baseline must be a JSON object"),
        ({"mean": 1.0, "variance": 1.0, "surprise": {}}, "a surprise must have shares and"),
        ({"mean": 1.0, "variance": 1.0, "surprise": {"shares": []}}, "a surprise must have"),
        ({"mean": 1.0, "variance": 1.0, "more": 2}, "more"),
    ],
)
def test_what_is_no_baseline_is_refused(content: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        Baseline.from_dict(content)
