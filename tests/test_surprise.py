"""Drift beside drafts' own confidence: what it finds, and what it is made of."""

import json
import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
from drifting import (
    MOST,
    PROMISED_DELAY,
    PROMISED_DRAFTS,
    RECORD,
)

from layerskip import Round
from layerskip.control.experience import EDGES
from layerskip.telemetry.baseline import (
    CONFIDENCE_BINS,
    LOSS,
    MOST_CERTAIN,
    MOST_KEPT,
    NUM_BINS,
    Baseline,
    BinnedDraft,
    Repeats,
    Surprise,
)
from layerskip.telemetry.cusum import DRAFTS_PER_FALSE_ALARM, threshold
from layerskip.telemetry.drift import HEAVY_TAILS, DriftMonitor, find_drift
from layerskip.telemetry.drift_bucket import Alarm

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


def watch(monitor: DriftMonitor, requests: list[list[Told]]) -> None:
    for i, request in enumerate(requests):
        for j, (accepted, told) in enumerate(request, 1):
            monitor.observe("", f"{i}", accepted, confidences=told, finished=j == len(request))


def told_alarms(baseline: Baseline, requests: list[list[Told]]) -> list[Alarm]:
    alarms: list[Alarm] = []
    watch(DriftMonitor(baselines={"": baseline}, on_alarm=alarms.append), requests)
    return alarms


def delay(baseline: Baseline, requests: list[list[Told]]) -> float:
    """Drafts until it is found that fewer are accepted; those behind them are not watched."""
    alarms: list[Alarm] = []
    monitor = DriftMonitor(baselines={"": baseline}, on_alarm=alarms.append)
    for request in requests:
        watch(monitor, [request])
        for alarm in alarms:
            if alarm.direction == "down":
                return alarm.num_drafts
    return math.inf


def learnt(requests: list[list[Told]]) -> Baseline:
    monitor = DriftMonitor(num_reference_requests=len(requests))
    watch(monitor, requests)
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
    told, alone = [], []
    for _ in range(21):
        usual, worse = learnt(told_traffic(rng, 100)), told_traffic(rng, 60, loss)
        told.append(delay(usual, worse))
        alone.append(delay(replace(usual, surprise=None), worse))
    assert usual.correlation > 0.1 > 2 * usual.surprise.baseline.correlation
    assert statistics.median(told) < PROMISED_DELAY < statistics.median(alone)


def test_false_alarms_of_both_sums_are_rare() -> None:
    rng, found, drafts = np.random.default_rng(12), 0, 0
    for _ in range(5):
        usual, stream = told_traffic(rng, 100), told_traffic(rng, 800)
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
    for watched, rarer in (("accepted", 2), ("surprise", 2 * HEAVY_TAILS)):
        test = both[watched]
        assert test.threshold == threshold(0.5, rarer * DRAFTS_PER_FALSE_ALARM)
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
    exits, lookups = np.split(np.array(baseline.surprise.shares[:CONFIDENCE_BINS]), 2)
    assert len(set(shares)) > CONFIDENCE_BINS / 2
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


def test_a_surprise_is_successes_less_their_chances_by_what_they_say() -> None:
    low, high = EDGES[2], EDGES[8]  # each the least of a bin of its own
    drafts = [(2, (high, high, low)), (0, (low,)), (1, (high, low)), (1, (low, high))]
    binned = [BinnedDraft.of(*draft) for draft in drafts]
    surprise = Surprise.of([binned] * 20)
    assert surprise is not None
    # Judged with the higher confidence: three right, and one wrong; with the lower: one and three.
    assert sorted(set(surprise.shares)) == [0.25, 0.5, 0.75]

    def logit(p: float) -> float:
        return math.log(p / (1 - p))

    def weight(share: float) -> float:
        return logit(share) - logit((1 - LOSS) * share)

    def variance(chances: tuple[float, ...]) -> float:
        before = np.cumprod((1.0, *chances))[:-1]
        return sum(s * weight(c) ** 2 * c * (1 - c) for s, c in zip(before, chances, strict=True))

    of_drafts = [(0.75, 0.75, 0.25), (0.25,), (0.75, 0.25), (0.25, 0.75)]
    deviation = math.sqrt(statistics.mean(map(variance, of_drafts)))
    assert surprise.deviation == pytest.approx(deviation)
    sure, doubtful = weight(0.75), weight(0.25)
    for accepted, surplus in (
        (0, -0.75 * sure),
        (1, (0.25 - 0.75) * sure),
        (2, 2 * 0.25 * sure - 0.25 * doubtful),
        (3, 2 * 0.25 * sure + 0.75 * doubtful),
    ):
        found = surprise.of_draft(BinnedDraft.of(accepted, (high, high, low)))
        assert found == pytest.approx(surplus / deviation)
    looked_up = BinnedDraft.of(2, (high, high), looked_up=True)  # of which none was seen
    assert surprise.of_draft(looked_up) == pytest.approx(weight(0.5) / deviation)
    certain = replace(surprise, shares=(1.0,) * NUM_BINS)  # but never that certain
    found = certain.of_draft(BinnedDraft.of(1, (high, high)))
    most = MOST_CERTAIN
    assert found == pytest.approx(weight(most) * (1 - most - most) / deviation)
    assert Surprise.of([binned] * 19) is None
    told = replace(Baseline(1.0, 1.0), surprise=surprise)
    assert Baseline.from_dict(json.loads(json.dumps(told.to_dict()))) == told


def test_what_two_drafts_say_differs_as_their_likelihoods_do() -> None:
    """Of "each accepted token is lost with a chance" against "as usual", for the same tokens."""
    surprise = Surprise((0.8,) * NUM_BINS, 1.0, Baseline(0.0, 1.0))

    def evidence(accepted: int) -> float:
        usual = 0.8**accepted * (0.2 if accepted < 3 else 1.0)
        kept = 0.8 * (1 - LOSS)
        lost = kept**accepted * (1 - kept if accepted < 3 else 1.0)
        return math.log(lost / usual)

    def mean(accepted: int) -> float:  # of each judged token, as usual
        judged = min(3, accepted + 1)
        kept = 0.8 * (1 - LOSS)
        return judged * (0.8 * math.log(1 - LOSS) + 0.2 * math.log((1 - kept) / 0.2))

    for accepted in range(4):
        found = surprise.of_draft(BinnedDraft.of(accepted, (0.5, 0.5, 0.5)))
        assert -found == pytest.approx(evidence(accepted) - mean(accepted))


def test_tokens_are_held_against_those_of_a_draft_that_looked_the_same() -> None:
    drafts = [BinnedDraft(accepted, b"\1\2\3") for accepted in (1, 0, 2, 1)]
    repeats = Repeats()
    placed = [repeats.place(draft) for draft in drafts]
    assert [draft.accepted for draft in placed] == [1, 0, 2, 1]
    right, wrong = CONFIDENCE_BINS, 2 * CONFIDENCE_BINS
    assert [list(draft.bins) for draft in placed] == [
        [1, 2, 3],
        [1 + right, 2 + wrong, 3],
        [1 + right, 2 + wrong, 3],  # the most that was accepted counts
        [1 + right, 2 + right, 3 + wrong],
    ]
    assert repeats.place(BinnedDraft(1, b"\1\2")).bins == b"\1\2"


def test_of_a_long_request_no_more_drafts_are_remembered() -> None:
    repeats = Repeats()
    for i in range(MOST_KEPT + 1):
        for _ in range(2):
            placed = repeats.place(BinnedDraft(1, bytes([i % 8, i // 8 % 8, i // 64])))
        assert (placed.bins[0] == i % 8 + CONFIDENCE_BINS) == (i < MOST_KEPT)


def looping_traffic(
    rng: np.random.Generator, num_requests: int, loss: float = 0.0
) -> list[list[Told]]:
    """Greedy text: a request loops after a while, and its drafts come again with their outcome."""
    requests = []
    for _ in range(num_requests):
        confidences = rng.uniform(0.3, 1.0, (8, MOST))
        told = [tuple(line) for line in confidences.tolist()]
        accepted = np.cumprod(rng.random((8, MOST)) < confidences, axis=1).sum(axis=1)
        loop = list(zip(accepted.tolist(), told, strict=True))[4:]
        drafts = list(zip(accepted.tolist(), told, strict=True))[:4] + loop * 9
        lost = rng.random((len(drafts), MOST)) < loss
        kept = [int(np.argmax([*line, True])) for line in lost]
        requests.append([(min(a, k), t) for (a, t), k in zip(drafts, kept, strict=True)])
    return requests


def test_loops_are_no_reason_to_wait() -> None:
    rng = np.random.default_rng(19)
    loss, delays = losing_half_a_deviation(looping_traffic(rng, 300)), []
    for _ in range(11):
        baseline = learnt(looping_traffic(rng, 100))
        delays.append(delay(baseline, looping_traffic(rng, 60, loss)))
    assert baseline.surprise is not None
    assert baseline.correlation > 0.15 > 3 * baseline.surprise.baseline.correlation
    assert statistics.median(delays) < PROMISED_DELAY
    found = told_alarms(baseline, looping_traffic(rng, 1000))
    assert len(found) < 0.5  # in 40,000 drafts


def test_a_draft_that_the_end_cuts_is_no_surprise() -> None:
    sure = [[(MOST, (0.99,) * MOST)] * 9 + [(1, (0.99,) * MOST)]] * 30
    baseline = learnt(sure)
    assert baseline.surprise is not None
    assert set(baseline.surprise.shares) == {1.0}
    assert not [a for a in told_alarms(baseline, sure * 4) if a.watched == "surprise"]
