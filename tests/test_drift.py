"""How a monitor of drift is used."""

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from drifting import RECORD, baseline_of, requests_of, traffic
from toys import PLANS, make_model, random_ids

from layerskip import Round, SelfSpeculativeLM
from layerskip.telemetry.baseline import NUM_BINS, Baseline, Surprise
from layerskip.telemetry.drift import MOST_NAMES, OTHER, Drift, DriftMonitor, find_drift
from layerskip.telemetry.drift_bucket import MOST_POINTS, Alarm


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
    assert states["code"].baseline == baseline_of(usual[:50])
    assert (states["poems"].baseline, states["poems"].num_requests) == (None, 20)
    assert set(monitor.baselines()) == {"code"}
    feed(monitor, worse, "c", labels={"task": "code"})
    first, state = alarms[0], monitor.states()["code"]
    assert (first.bucket, first.watched, first.direction) == ("code", "accepted", "down")
    assert first.since <= first.num_drafts < 150
    assert first.before == baseline_of(usual[:50]).usual
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
        baselines={"": baseline_of(usual)}, num_reference_requests=20, on_alarm=alarms.append
    )
    feed(monitor, worse[:20], "a")
    assert alarms
    monitor.relearn("")
    assert monitor.states()[""].baseline is None
    alarms.clear()
    feed(monitor, worse[20:], "b")
    assert not alarms
    assert monitor.baselines()[""] == baseline_of(worse[20:40])
    with pytest.raises(ValueError, match=r"there is no bucket 'code'; seen so far: ''"):
        monitor.relearn("code")


def test_rounds_without_a_draft_do_not_count(usual: list[list[int]]) -> None:
    monitor = DriftMonitor(baselines={"": baseline_of(usual)})
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
    assert len(monitor.states()) == MOST_NAMES + 1
    assert len(monitor._buckets[OTHER]._open) == 10


def test_drift_of_requests_without_the_label_is_not_told_as_of_all(
    usual: list[list[int]], worse: list[list[int]]
) -> None:
    for label, whose in ((None, "all requests: "), ("task", "requests without a label: ")):
        alarms: list[Alarm] = []
        monitor = DriftMonitor(label=label, num_reference_requests=50, on_alarm=alarms.append)
        feed(monitor, usual[:50], "a")
        feed(monitor, usual[:50], "b", labels={"task": "code"})
        feed(monitor, worse, "c")
        assert str(alarms[0]).startswith(f"{whose}accepted tokens a draft fell")
        names = [Drift(monitor.states(), (), {}).shown(bucket) for bucket in monitor.states()]
        assert names == (["all requests"] if label is None else ["no label", "code"])


def test_what_many_buckets_learnt_is_handed_over() -> None:
    monitor = DriftMonitor(label="user", num_reference_requests=20)
    for name in range(MOST_NAMES + 30):
        for i in range(20):
            monitor.observe(f"user {name}", f"{name}/{i}", i % 3, finished=True)
    known = monitor.baselines()
    assert len(known) == MOST_NAMES + 1
    assert OTHER in known
    for order in (known, dict(reversed(known.items()))):
        assert DriftMonitor(label="user", baselines=order).baselines() == known
    with pytest.raises(ValueError, match=rf"at most {MOST_NAMES} buckets, got 101"):
        DriftMonitor(baselines=known | {"one more": known["user 0"]})


def test_requests_that_were_given_up_are_learnt_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerskip.telemetry.drift_bucket.MOST_OPEN", 10)
    monkeypatch.setattr("layerskip.telemetry.drift_bucket.MOST_KEPT", 3)
    monitor = DriftMonitor(num_reference_requests=40)
    for i in range(45):
        for _ in range(5):
            monitor.observe("", str(i), i % 3, confidences=(0.5, 0.9))
    assert monitor.states()[""].num_requests == 35
    assert {len(known) for known in monitor._buckets[""]._known} == {3}


def test_requests_that_drafted_nothing_take_no_room_while_learning() -> None:
    monitor = DriftMonitor(num_reference_requests=40)
    for i in range(10):
        monitor.observe("", str(i), None, finished=True)
    assert not monitor._buckets[""]._known


def test_what_is_forgotten_leaves_no_path(usual: list[list[int]]) -> None:
    monitor = DriftMonitor(baselines={"": baseline_of(usual)})
    feed(monitor, usual[:3], "a")
    assert monitor.paths()[""]
    monitor.relearn("")
    assert monitor.paths()[""] == ()


def test_threads_may_share_a_monitor(usual: list[list[int]]) -> None:
    monitor = DriftMonitor(baselines={"": baseline_of(usual)})
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
                1.0,
                Baseline(0.0, 1.0, surprise=Surprise((0.5,) * NUM_BINS, 1.0, Baseline(0.0, 1.0))),
            ),
            "no surprise of its own",
        ),
        (lambda: Baseline(1.0, -1.0), "variance must be finite and at least 0"),
        (
            lambda: Surprise((0.5,), 1.0, Baseline(0.0, 1.0)),
            f"shares must be {NUM_BINS} numbers, got 1",
        ),
        (
            lambda: Surprise((1.5,) * NUM_BINS, 1.0, Baseline(0.0, 1.0)),
            "shares must be finite and betw",
        ),
        (
            lambda: Surprise((0.5,) * NUM_BINS, 0.0, Baseline(0.0, 1.0)),
            "deviation must be finite and at least 0.1",
        ),
        (lambda: Baseline(1.0, math.nan), "variance must be finite"),
        (lambda: Baseline(1.0, 1.0, 1.5), "correlation must be finite and between 0 and 1"),
        (lambda: Baseline(1.0, 1.0, drafts_per_request=0.5), "drafts_per_request must be finite"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


@pytest.mark.parametrize(
    ("accepted", "error"),
    [
        (math.nan, TypeError),
        (math.inf, TypeError),
        (2.0, TypeError),
        (True, TypeError),
        ("3", TypeError),
        (-5, ValueError),
        (10**400, ValueError),
    ],
    ids=lambda value: str(value)[:8],
)
@pytest.mark.parametrize("learns", [True, False])
def test_what_nobody_accepts_is_refused_and_counts_for_nothing(
    usual: list[list[int]], worse: list[list[int]], accepted: Any, error: type, learns: bool
) -> None:
    monitors = []
    for refused in (False, True):
        baselines = None if learns else {"": baseline_of(usual)}
        monitor = DriftMonitor(baselines=baselines, num_reference_requests=50)
        if refused:
            with pytest.raises(error, match=r"^accepted must be "):
                monitor.observe("", "a0", accepted, confidences=(0.5,), finished=True)
            with pytest.raises(error, match=r"^accepted must be "):
                monitor.observe("of no name", "a0", accepted)
        feed(monitor, usual, "a")
        feed(monitor, worse, "b")
        monitors.append(monitor)
    without, with_refused = monitors
    assert without.states() == with_refused.states()
    assert without.states()[""].num_down_alarms


def test_confidences_may_be_an_array_and_alarms_nobodys(
    usual: list[list[int]], worse: list[list[int]]
) -> None:
    monitors = [DriftMonitor(baselines={"": baseline_of(usual)}, on_alarm=None) for _ in range(2)]
    for monitor, array in zip(monitors, (list, np.array), strict=True):
        for i, request in enumerate(worse):
            for accepted in request:
                monitor.observe("", str(i), accepted, confidences=array([0.5, 0.25]))
    one, other = monitors
    assert one.states() == other.states()
    assert one.states()[""].num_down_alarms


@pytest.mark.parametrize("confidences", [0.5, "ab", [0.5, None]])
def test_what_are_no_confidences_is_refused_and_counts_for_nothing(confidences: Any) -> None:
    monitor = DriftMonitor()
    with pytest.raises(
        TypeError, match=r"^confidences must be a sequence of numbers, or None, got"
    ):
        monitor.observe("", "a", 1, confidences=confidences)
    assert not monitor.states()


def test_what_no_alarm_can_be_told_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="on_alarm must be callable, or None, got 5"):
        DriftMonitor(on_alarm=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("baselines", "got"),
    [
        ([], "list"),
        ([Baseline(1.0, 1.0)], "list"),
        ("code", "str"),
        ({"code": Baseline(1.0, 1.0).to_dict()}, "dict for 'code'"),
        ({"code": Baseline(1.0, 1.0), "poems": None}, "NoneType for 'poems'"),
        ({3: Baseline(1.0, 1.0)}, "Baseline for 3"),
    ],
)
def test_what_are_no_baselines_is_refused(baselines: Any, got: str) -> None:
    said = rf"^baselines must be a mapping .* \(Baseline\.from_dict makes .*\), got {got}$"
    with pytest.raises(TypeError, match=said):
        DriftMonitor(baselines=baselines)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([], "a baseline must be a JSON object"),
        ({"mean": 1.0, "variance": 1.0, "surprise": {}}, "a surprise must have shares, a dev"),
        ({"mean": 1.0, "variance": 1.0, "surprise": {"shares": []}}, "a surprise must have"),
        ({"mean": 1.0, "variance": 1.0, "more": 2}, "more"),
    ],
)
def test_what_is_no_baseline_is_refused(content: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        Baseline.from_dict(content)
