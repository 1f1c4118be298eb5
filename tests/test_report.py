"""Acceptance reports: known figures from made-up runs, intervals that hold, broken folders."""

import json
import math
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pytest
from recorded import DRAFT, PLAIN, Request, flat_cost, pair, write_run

from layerskip.cli import main
from layerskip.cost import COST_VERSION
from layerskip.metrics import speculative_metrics
from layerskip.policy import Policy
from layerskip.telemetry import records
from layerskip.telemetry.aggregation import acceptance_report
from layerskip.telemetry.buckets import Bucket, lengths
from layerskip.telemetry.resampling import (
    counted_distribution,
    distribution,
    estimate,
    ratio_of_p90,
    ratio_of_sums,
    ratio_of_worst,
)

RISING = (PLAIN, 0.012, 0.014, 0.016, 0.018)  # verify passes over 1 to 5 tokens


def accepted(rng: random.Random, chance: float, drafted: int) -> int:
    count = 0
    while count < drafted and rng.random() < chance:
        count += 1
    return count


def traffic() -> list[Request]:
    """Two tasks, prompts of 20 to 700 tokens, drafts of 0 to 4."""
    rng = random.Random(5)
    requests = []
    for index in range(60):
        task, chance = [("code", 0.8), ("chat", 0.3), ("", 0.5)][index % 3]
        drafted = [rng.choice((0, 2, 4)) for _ in range(rng.randint(1, 30))]
        rounds = tuple((d, accepted(rng, chance, d)) for d in drafted)
        prompt = rng.randint(20, 700)
        seconds = rng.uniform(0.5, 2.0) * PLAIN
        requests += pair(index, rounds, task=task, prompt_tokens=prompt, seconds=seconds)
    return requests


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The traffic, and its report."""
    requests = traffic()
    folder = write_run(tmp_path_factory.mktemp("runs"), requests, cost=flat_cost(verify=RISING))
    return requests, acceptance_report(folder, prompt_edges=(128,), output_edges=(16,)), folder


def in_bucket(request: Request, bucket: Bucket) -> bool:
    line, _ = request.records()
    return (bucket.task is None or request.task == bucket.task) and all(
        low <= line[name] and (high is None or line[name] < high)
        for name, (low, high) in (
            ("prompt_tokens", bucket.prompt_tokens),
            ("new_tokens", bucket.new_tokens),
        )
    )


def test_every_bucket_is_what_a_plain_count_gives(recorded):
    requests, report, _ = recorded
    every = (*report.buckets, *report.routes, report.total)
    assert len(report.buckets) == len({b.bucket for b in report.buckets}) > len(report.routes) == 6
    for row in every:
        own = [r for r in requests if r.arm == "auto" and in_bucket(r, row.bucket)]
        rounds = [counts for r in own for counts in r.rounds]
        drafts = [(d, a) for d, a in rounds if d]
        means = [np.mean([a for d, a in r.rounds if d]) for r in own if any(d for d, _ in r.rounds)]
        assert (row.num_requests, row.num_rounds) == (len(own), len(rounds))
        assert row.num_drafts == len(drafts)
        assert row.mean_accepted.value == pytest.approx(np.mean([a for _, a in drafts]))
        assert row.accepted_counts == tuple(
            Counter(a for _, a in drafts)[i] for i in range(len(row.accepted_counts))
        )
        assert sum(row.drafted_counts) == len(rounds)
        metrics = speculative_metrics(rounds)
        assert row.accepted_per_round.mean + 1 == pytest.approx(metrics["mean_acceptance_length"])
        for percent in (10, 50, 90):
            assert row.accepted_per_round.at(percent) == metrics[f"accepted_p{percent}"]
            quantile = np.quantile(means, percent / 100)
            assert row.accepted_per_request.at(percent) == pytest.approx(quantile)
        assert dict(row.modes) == {
            name: count
            for name, count in (("early_exit", len(drafts)), ("plain", len(rounds) - len(drafts)))
            if count
        }
        for p in row.positions:
            reached = [a for d, a in drafts if d >= p.position and a >= p.position - 1]
            assert (p.drafts, p.reached) == (len(drafts), len(reached))
            assert p.drafted == sum(d >= p.position for d, _ in drafts)
            assert p.accepted == sum(a >= p.position for a in reached)


def test_latency_is_what_a_plain_count_gives(recorded):
    requests, report, _ = recorded
    for row in (*report.buckets, *report.routes, report.total):
        own = [r for r in requests if in_bucket(r, row.bucket)]
        for arm, latency in (("auto", row.on), ("0", row.off)):
            lines = [r.records() for r in own if r.arm == arm]
            end_to_end = [line["e2e_seconds"] for line, _ in lines]
            gaps = [line["decode_seconds"] / (line["new_tokens"] - 1) for line, _ in lines]
            bursts = [
                r["draft_seconds"] + r["verify_seconds"] for _, rounds in lines for r in rounds[1:]
            ]
            for percent in (10, 50, 90, 99):
                share = percent / 100
                assert latency.end_to_end.at(percent) == pytest.approx(
                    np.quantile(end_to_end, share)
                )
                assert latency.per_token.at(percent) == pytest.approx(np.quantile(gaps, share))
                exact = np.quantile(bursts, share, method="inverted_cdf")
                assert latency.burst.at(percent) == pytest.approx(exact, rel=0.003)
            assert latency.burst.mean == pytest.approx(np.mean(bursts))
            tokens = sum(line["new_tokens"] - 1 for line, _ in lines)
            seconds = sum(line["decode_seconds"] for line, _ in lines)
            assert latency.tokens_per_second == pytest.approx(tokens / seconds)


def test_arms_are_compared_prompt_by_prompt(recorded):
    requests, report, _ = recorded
    seconds = {(r.prompt_index, r.arm): r.records()[0]["e2e_seconds"] for r in requests}
    indices = sorted({r.prompt_index for r in requests})
    on, off = (np.array([seconds[i, arm] for i in indices]) for arm in ("auto", "0"))
    paired = report.total.paired
    assert (paired.num_prompts, paired.num_identical) == (60, 60)
    assert paired.end_to_end.value == pytest.approx(np.median(on / off))
    assert paired.ttft.value == 1.0
    assert paired.p90.value == pytest.approx(np.quantile(on, 0.9) / np.quantile(off, 0.9))
    slowest = np.sort(on)[-6:].mean() / np.sort(off)[-6:].mean()
    assert paired.slowest_decile.value == pytest.approx(slowest)
    gains = [gain(next(r for r in requests if r.prompt_index == i and r.rounds)) for i in indices]
    worst = np.argsort(gains)[:6]
    assert paired.worst_decile.value == pytest.approx(on[worst].sum() / off[worst].sum())
    assert paired.ratios.at(90) == pytest.approx(np.quantile(on / off, 0.9))


def gain(request: Request) -> float:
    """Plain passes' time for its tokens over that of the passes it ran, by the cost table."""
    spent = sum(d * DRAFT + RISING[d] for d, _ in request.rounds)
    return sum(a + 1 for _, a in request.rounds) * PLAIN / spent


def test_a_requests_gain_is_its_tokens_over_its_costs(recorded):
    requests, report, _ = recorded
    gains = [gain(r) for r in requests if r.arm == "auto"]
    for percent in (0, 10, 50, 100):
        expected = np.quantile(gains, percent / 100)
        assert report.total.inequality.gain.at(percent) == pytest.approx(expected)
    worst = sorted((r for r in requests if r.arm == "auto"), key=gain)[:6]
    drafts = [counts for r in worst for counts in r.rounds if counts[0]]
    first, second = report.total.worst_positions[:2]
    assert (first.drafts, first.accepted) == (len(drafts), sum(a >= 1 for _, a in drafts))
    assert second.reached == first.accepted


def test_the_inequality_by_hand(tmp_path):
    """A draft of 4 accepts 3, one of 2 accepts none: 2.5 emitted and 1.5 accepted a draft.

    c = 2/10; 3 draft passes on the mean: alpha = 0.6. Verifying 5 tokens costs 1.8 plain passes, 3
    cost 1.4: beta = 0.6. A round without a draft changes nothing.
    """
    request = Request(0, rounds=((4, 3), (0, 0), (2, 0)))
    folder = write_run(tmp_path / "runs", [request], cost=flat_cost(verify=RISING), label=None)
    found = acceptance_report(folder).total.inequality
    assert found.c == pytest.approx(0.2)
    assert found.alpha == pytest.approx(0.6)
    assert found.beta == pytest.approx(0.6)
    assert found.threshold == pytest.approx(2.2)
    assert found.emitted.value == 2.5
    assert found.margin == pytest.approx(0.3)
    assert found.margin_without_bonus == pytest.approx(1.5 - 2.2)
    assert found.predicted_speed == pytest.approx(2.5 / 2.2)
    assert found.verify == pytest.approx((1.0, 1.2, 1.4, 1.6, 1.8))
    assert (found.clock_alpha, found.clock_beta) == (None, None)


def test_costs_of_nothing_are_told_too(tmp_path):
    free = flat_cost(draft=0.0, verify=(0.0,) * 17)
    total = acceptance_report(write_run(tmp_path / "r", pair(0, ((4, 2),) * 9), cost=free)).total
    assert total.inequality.c == 0.0


def test_a_run_with_costs_of_another_version_is_reported_without_them(tmp_path, capsys):
    folder = write_run(tmp_path / "runs", pair(0, ((4, 2),) * 9), cost=flat_cost())
    damage("run.json", f'"version": {COST_VERSION}', '"version": 3')(folder)
    page = tmp_path / "page.html"
    assert main(["report", str(folder), "--html", str(page)]) == 0
    assert "the recorded costs are of version 3, which" in " ".join(capsys.readouterr().out.split())
    assert "the recorded costs are of version 3, which" in page.read_text()
    report = acceptance_report(folder)
    assert (report.unread_costs, report.total.inequality) == (3, None)
    assert report.total.num_rounds == 9


def change_rounds(folder: Path, change) -> None:
    """Rewrite each round's line by ``change(entry)``."""
    path = folder / "rounds.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(entry | change(entry)) + "\n" for entry in entries))


def test_looked_up_tokens_cost_no_draft_pass(tmp_path):
    requests = [Request(0, rounds=((4, 4),) * 3), Request(0, new_tokens=11, arm="0")]
    folder = write_run(tmp_path / "runs", requests, cost=flat_cost())
    change_rounds(folder, lambda e: {"num_draft_passes": 0, "mode": "lookup", "draft_seconds": 0.0})
    found = acceptance_report(folder).total
    assert found.modes == {"lookup": 3}
    assert found.inequality.alpha == 0.0
    assert found.inequality.margin == pytest.approx(4.0)
    assert found.inequality.clock_alpha == 0.0
    assert found.inequality.clock_beta == pytest.approx(0.0)


def test_costs_are_those_at_the_rounds_context_and_rows(tmp_path):
    """At 1000 slots a plain pass takes twice as long, and a draft pass as long as at none."""
    wide = tuple(PLAIN * (0.9 + 0.1 * n) for n in range(1, 41))
    base = flat_cost(verify=wide)
    verify = replace(base.verify, contexts=(0, 1000), seconds=(wide, tuple(2 * t for t in wide)))
    requests = [Request(0, rounds=((2, 1),), prompt_tokens=500)]
    folder = write_run(tmp_path / "runs", requests, cost=replace(base, verify=verify))
    assert acceptance_report(folder).total.inequality.c == pytest.approx(DRAFT / (1.5 * PLAIN))
    change_rounds(folder, lambda e: {"rows": 3})
    table = replace(base, verify=verify)
    plain = table.verify_pass(3, 500, sequences=3)
    found = acceptance_report(folder).total.inequality
    assert found.c == pytest.approx(table.draft_pass(3, 500, sequences=3) / plain)
    assert found.verify[2] == pytest.approx(table.verify_pass(9, 500, sequences=3) / plain)
    # Contexts of 448 to 511 slots cost what 480 do.
    spent = 2 * table.draft_pass(3, 480, sequences=3) + table.verify_pass(9, 480, sequences=3)
    gained = 2 * table.verify_pass(3, 480, sequences=3) / spent
    assert found.gain.at(50) == pytest.approx(gained)


def test_a_draft_cut_at_the_end_of_the_text_was_judged_no_further(tmp_path):
    folder = write_run(tmp_path / "runs", [Request(0, rounds=((4, 4), (4, 1)))])
    change_rounds(folder, lambda e: {"num_emitted_tokens": 1} if e["index"] == 2 else {})
    positions = acceptance_report(folder).total.positions
    assert [(p.reached, p.accepted) for p in positions] == [(2, 2), (1, 1), (1, 1), (1, 1)]
    assert [p.conditional for p in positions] == [1.0] * 4
    assert [p.survival for p in positions] == [1.0, 0.5, 0.5, 0.5]


def test_intervals_hold_what_they_promise():
    """Rounds of one request are alike: requests are drawn again, and 95 % of intervals cover."""
    rng = np.random.default_rng(3)
    covered = {}
    for num_requests, trials in ((15, 200), (1500, 30)):
        covered[num_requests] = 0
        for _ in range(trials):
            rounds = rng.integers(5, 40, num_requests).astype(float)
            level = rng.choice((0.5, 2.5), num_requests)  # of the request's rounds
            tokens = rounds * level + rng.normal(0.0, 1.0, num_requests) * np.sqrt(rounds)
            found = estimate(ratio_of_sums, tokens, rounds)
            covered[num_requests] += found.low <= 1.5 <= found.high
    assert 182 <= covered[15] <= 199
    assert covered[1500] >= 26


def test_intervals_shrink_with_the_root_of_the_requests():
    rng = np.random.default_rng(4)
    values = rng.lognormal(0.0, 0.5, 16_000)
    widths = {}
    for count in (1000, 16_000):
        found = estimate(ratio_of_p90, values[:count], np.ones(count))
        widths[count] = found.high - found.low
    assert widths[1000] / widths[16_000] == pytest.approx(4.0, rel=0.25)


def test_the_worst_tenth_is_chosen_by_gain():
    on, off = np.full(50, 2.0), np.full(50, 4.0)
    on[:5] = 12.0
    gains = np.linspace(0.5, 2.0, 50)
    assert float(ratio_of_worst(on, off, gains)) == 3.0
    assert float(ratio_of_worst(on, off, -gains)) == 0.5


def test_counted_quantiles_are_nearest_ranks():
    found = counted_distribution({0: 1, 1: 8, 4: 1})
    assert [found.at(p) for p in (10, 50, 90, 99)] == [0, 1, 1, 4]
    assert (found.count, found.mean) == (10, pytest.approx(1.2))
    assert distribution([]) is None


def test_buckets_are_cut_at_the_edges():
    assert lengths((128, 512), "prompt edges") == ((0, 128), (128, 512), (512, None))
    assert lengths((), "prompt edges") == ((0, None),)
    assert Bucket("code", (128, 512), (512, None)).name == "code, prompt 128-511, output 512 on"
    assert Bucket("").name == "no label"
    for edges in ((0, 5), (5, 5), (9, 5), (5, 10**60)):
        with pytest.raises(ValueError, match="prompt edges"):
            lengths(edges, "prompt edges")


def test_edges_belong_to_the_bucket_above(tmp_path):
    requests = [Request(i, prompt_tokens=n) for i, n in enumerate((127, 128))]
    folder = write_run(tmp_path / "runs", requests)
    report = acceptance_report(folder, prompt_edges=(128,), output_edges=())
    assert [b.bucket.prompt_tokens for b in report.buckets] == [(0, 128), (128, None)]
    assert [b.num_requests for b in report.buckets] == [1, 1]


def test_too_many_buckets_are_refused(tmp_path):
    folder = write_run(tmp_path / "runs", [Request(i, task=f"t{i}") for i in range(1001)])
    with pytest.raises(ValueError, match=r"'category' \(1001 values\) .* make 1001 buckets"):
        acceptance_report(folder)


def test_one_request_alone(tmp_path):
    """No plain arm, no costs: what can be said is said."""
    folder = write_run(tmp_path / "runs", [Request(3, rounds=((4, 2), (4, 4)))], arms=("auto",))
    found = acceptance_report(folder).total
    assert (found.num_requests, found.num_plain_requests, found.few) == (1, 0, True)
    assert found.mean_accepted.value == found.mean_accepted.low == found.mean_accepted.high == 3.0
    assert found.on.end_to_end.at(50) == found.on.end_to_end.at(99)
    assert (found.off, found.paired, found.inequality) == (None, None, None)


def test_requests_of_one_token_have_no_speed(tmp_path, capsys):
    """As the totals of the same folder say: nothing came after the first."""
    folder = write_run(tmp_path / "runs", [Request(i, rounds=()) for i in range(3)], arms=("auto",))
    assert acceptance_report(folder).total.on.tokens_per_second is None
    assert main(["report", str(folder)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-3] for line in lines if line[-8:-7] == ["on"]] == ["-", "-"]


def test_an_interval_is_told_of_six_requests_or_more(tmp_path, capsys):
    """Of three its interval holds what it is of three times in four, not 95 in a hundred."""
    requests = [r for i in range(5) for r in pair(i, ((4, i % 3),) * 3)]
    five, six = tmp_path / "five", tmp_path / "six"
    assert main(["report", str(write_run(five, requests, cost=flat_cost()))]) == 0
    assert capsys.readouterr().out.count("too few") == 2 * 3  # acceptance, two times on / off
    requests += pair(5, ((4, 1),) * 3)
    assert main(["report", str(write_run(six, requests, cost=flat_cost()))]) == 0
    assert "too few" not in capsys.readouterr().out
    assert acceptance_report(six).total.mean_accepted.count == 6


def test_a_run_that_never_drafted(tmp_path):
    folder = write_run(tmp_path / "runs", pair(0, ((0, 0),) * 5), cost=flat_cost())
    found = acceptance_report(folder).total
    assert (found.num_rounds, found.num_drafts, found.positions) == (5, 0, ())
    assert (found.mean_accepted, found.inequality, found.drafted_counts) == (None, None, (5,))


def test_what_a_killed_run_left_is_ignored(tmp_path):
    requests = pair(0, ((4, 2),) * 3)
    folder = write_run(tmp_path / "runs", requests, unfinished=[Request(1, rounds=((4, 0),) * 7)])
    for name in ("rounds", "requests"):
        with (folder / f"{name}.jsonl").open("a") as file:
            file.write('{"request_id": "2/au')
    report = acceptance_report(folder)
    assert report.num_ignored_rounds == 7
    assert report.total.accepted_counts == (0, 0, 3)


@pytest.mark.parametrize("name", ["arm=auto", "prompt_tokens=4096", "request_id=5", "labels=code"])
def test_a_folder_s_name_is_no_record(tmp_path, name):
    requests = pair(0, ((4, 2),) * 3, task="chat")
    found = [
        acceptance_report(write_run(tmp_path / folder, requests)) for folder in ("plain", name)
    ]
    assert found[0].total == found[1].total


def test_a_line_that_was_cut_off_shifts_no_task(tmp_path):
    """It is of no task that is known, and would be the first of them."""
    requests = [*pair(0, ((4, 2),) * 3, task="chat"), *pair(1, ((4, 3),) * 3, task="code")]
    folder = write_run(tmp_path / "runs", requests)
    whole = acceptance_report(folder)
    with (folder / "requests.jsonl").open("a") as file:
        file.write((folder / "requests.jsonl").read_text().splitlines()[-1][:40])
    assert {row.bucket.task: row.accepted_counts for row in whole.buckets} == {
        "chat": (0, 0, 3),
        "code": (0, 0, 0, 3),
    }
    assert acceptance_report(folder).buckets == whole.buckets


def test_other_arms_are_left_out(tmp_path):
    requests = [*pair(0, ((4, 2),) * 3), Request(0, rounds=((2, 2),) * 2, arm="2")]
    folder = write_run(tmp_path / "runs", requests, arms=("0", "auto", "2"))
    report = acceptance_report(folder)
    assert (report.total.accepted_counts, report.total.off.burst.count) == ((0, 0, 3), 9)
    assert report.num_ignored_rounds == 0
    assert acceptance_report(folder, arm="2").total.accepted_counts == (0, 0, 2)


def test_a_shift_while_it_was_measured_is_told(tmp_path, capsys):
    """120 requests accept most of what is drafted, 10 more accept little."""
    rng = random.Random(6)
    chances = [0.8] * 120 + [0.2] * 10
    rounds = [tuple((4, accepted(rng, chance, 4)) for _ in range(10)) for chance in chances]
    requests = [Request(i, task="code", rounds=found) for i, found in enumerate(rounds)]
    folder = write_run(tmp_path / "runs", requests)
    drift = acceptance_report(folder).drift
    assert drift.alarms
    assert (drift.alarms[0].bucket, drift.alarms[0].direction) == ("code", "down")
    assert drift.states["code"].num_requests == 100
    assert main(["report", str(folder), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["report"]["drift"]["alarms"][0]["direction"] == "down"
    assert "drift: code: accepted tokens a draft fell" in err
    unlabelled = acceptance_report(write_run(tmp_path / "unlabelled", requests, label=None)).drift
    assert str(unlabelled.alarms[0]).startswith("all requests: ")


def test_a_drafter_that_is_less_often_right_than_it_is_sure_is_told(tmp_path):
    """Half of the requests are easy, and known to be; their drafts then become those of others."""
    rng, requests = random.Random(7), []
    for i in range(150):
        sure = i % 2 == 0
        chance = 0.9 if sure and i < 120 else 0.4
        rounds = tuple((4, accepted(rng, chance, 4)) for _ in range(10))
        confidence = 0.9 if sure else 0.4
        requests.append(Request(i, task="code", rounds=rounds, confidence=confidence))
    drift = acceptance_report(write_run(tmp_path / "runs", requests)).drift
    baseline = drift.states["code"].baseline
    assert baseline.surprise is not None
    assert baseline.surprise.baseline.correlation < 0.1 < 0.3 < baseline.correlation
    assert drift.alarms[0].watched == "surprise"


def damage(name: str, old: str, new: str):
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return change


BROKEN = {
    "no run.json": (lambda folder: (folder / "run.json").unlink(), "is no runs folder"),
    "no rounds": (lambda folder: (folder / "rounds.jsonl").unlink(), "cannot be read: .*rounds"),
    "no rounds at all": (
        lambda folder: (folder / "rounds.jsonl").unlink(),
        "has no rounds.jsonl, wh",
    ),
    "no requests at all": (
        lambda folder: (folder / "requests.jsonl").unlink(),
        "has no requests.jsonl, which",
    ),
    "half a line": (damage("rounds.jsonl", '"rows": 1', '"rows": '), "1 of its lines are no rec"),
    "wrong type": (damage("requests.jsonl", '"new_tokens": 10', '"new_tokens": []'), "no records"),
    "no end": (
        damage("requests.jsonl", '"e2e_seconds": ', '"e2e_seconds": 1e400, "": '),
        "no records",
    ),
    "no number": (  # not in the prefill, which is the first line
        lambda folder: (folder / "rounds.jsonl").write_text(
            (folder / "rounds.jsonl").read_text().replace('fy_seconds": ', 'fy_seconds": NaN, "": ')
        ),
        "no records of rounds",
    ),
    "rounds lost": (
        lambda folder: (folder / "rounds.jsonl").write_text(""),
        "has not the rounds that requests.jsonl counts, for 2 requests; measure again into another",
    ),
    "twice": (
        lambda folder: (folder / "requests.jsonl").write_text(
            (folder / "requests.jsonl").read_text() * 2
        ),
        "2 requests more than once",
    ),
    "no requests": (
        lambda folder: (folder / "requests.jsonl").write_text(""),
        "no request of arm auto has finished in .*: give the same",
    ),
    "plain only": (damage("run.json", '["0", "auto"]', '["0"]'), "measured nothing that drafts"),
    "which": (damage("run.json", '"auto"]', '"2", "4"]'), "arms 2, 4; name one of them"),
    "label": (damage("run.json", '"category", "labels"', '5, "labels"'), "label must be a text or"),
    "sampling": (
        damage("run.json", '{"temperature": 0.0}', "5"),
        "run.json: sampling must be an object or null, got 5",
    ),
    "bad costs": (damage("run.json", '"cost": null', '"cost": {}'), "version 6 was expected"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused_in_a_sentence(tmp_path, case, capsys):
    change, message = BROKEN[case]
    folder = write_run(tmp_path / "runs", pair(0, ((4, 2),) * 3))
    change(folder)
    with pytest.raises(ValueError, match=message):
        acceptance_report(folder)
    assert main(["report", str(folder)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none is no runs folder \(there is no such folder\): gi"):
        acceptance_report(tmp_path / "none")


def test_damaged_samples_leave_no_policy_behind(tmp_path, capsys):
    folder = write_run(tmp_path / "runs", pair(0, ((4, 2),) * 3))
    (folder / "samples.jsonl").write_text("no JSON\n")
    policy, page = tmp_path / "policy.json", tmp_path / "page.html"
    assert main(["report", str(folder), "--policy", str(policy), "--html", str(page)]) == 2
    assert "samples.jsonl is damaged" in capsys.readouterr().err
    assert not policy.exists()


def test_a_model_whose_name_looks_like_markup_is_told_as_it_is(tmp_path, capsys):
    folder = write_run(tmp_path / "runs", pair(0, ((4, 2),) * 3))
    damage("run.json", '"toy"', '"m[final]"')(folder)
    assert main(["report", str(folder)]) == 0
    assert "m[final]" in "".join(capsys.readouterr())


def test_labels_move_no_cursor(tmp_path, capsys):
    requests = pair(0, ((4, 2),) * 3, labels={"category": "\x1b[31m\u202ered"})
    folder = write_run(tmp_path / "runs", requests)
    assert main(["report", str(folder)]) == 0
    told = "".join(capsys.readouterr())
    assert "\ufffd[31m\ufffdred" in told
    assert not {"\x1b", "\u202e"} & set(told)


def test_digits_that_find_no_room_leave_a_mark(tmp_path, monkeypatch, capsys):
    requests = [r for i in range(12) for r in pair(i, ((4, 2),) * 3, seconds=1.0)]
    folder = write_run(tmp_path / "runs", requests)
    monkeypatch.setenv("COLUMNS", "44")
    assert main(["report", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "90… 90… 9…" in out  # milliseconds, 9050 in whole
    assert not {"9", "90", "905"} & set(out.split())


def test_a_full_disk_is_not_blamed_on_the_records(tmp_path, monkeypatch, capsys):
    def connect(path: str, **_):
        raise duckdb.IOException(f'Could not write file "{path}": No space left on device')

    folder = write_run(tmp_path / "runs", pair(0, ((4, 2),) * 3))
    monkeypatch.setattr(duckdb, "connect", connect)
    assert main(["report", str(folder)]) == 2
    err = capsys.readouterr().err
    assert "needs room" in err
    assert "TMPDIR" in err
    assert str(folder) not in err
    assert err.count("\n") == 1


def test_a_folder_whose_name_is_a_pattern_is_refused(tmp_path):
    folder = write_run(tmp_path / "runs[1]", pair(0, ((4, 2),) * 3))
    with pytest.raises(ValueError, match="rename it"):
        acceptance_report(folder)


def test_a_folder_that_is_named_like_a_home_is_read_itself(tmp_path, monkeypatch):
    home, here = tmp_path / "home", tmp_path / "here[1]*?"
    for folder in (home, here / "~"):
        folder.mkdir(parents=True)
    write_run(home / "runs", pair(0, ((4, 2),) * 3))
    write_run(here / "~" / "runs", pair(0, ((4, 2),) * 5))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    assert acceptance_report("~/runs").total.num_rounds == 5
    assert acceptance_report(home / "runs").total.num_rounds == 3


def test_a_report_is_interrupted_without_a_traceback(tmp_path, monkeypatch, capsys):
    folder = write_run(tmp_path / "runs", pair(0, ((4, 2),) * 3))

    def interrupted(*_):
        raise RuntimeError("Query interrupted")  # as DuckDB has it

    monkeypatch.setattr(records, "_load_rounds", interrupted)
    assert main(["report", str(folder)]) == 130
    assert capsys.readouterr().err == "layerskip: interrupted\n"


def test_an_unknown_arm_is_refused(recorded):
    with pytest.raises(ValueError, match="drafting arms auto; '3' is none of them"):
        acceptance_report(recorded[2], arm="3")


def test_the_command_shows_and_writes_what_was_decided(recorded, tmp_path, capsys):
    _, _, folder = recorded
    policy, page = tmp_path / "policy.json", tmp_path / "report.html"
    args = ["report", str(folder), "--policy", str(policy), "--html", str(page), "--json"]
    assert main([*args, "--prompt-edges", "128", "--output-edges", ""]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert Policy.load(policy).to_dict() == document["policy"]
    report = document["report"]
    assert report["prompt_edges"] == [128]
    assert len(report["buckets"]) == len(report["routes"]) == 6
    total = report["total"]
    assert total["inequality"]["margin"] == pytest.approx(
        total["inequality"]["emitted"]["value"] - total["inequality"]["threshold"]
    )
    assert total["off"]["ttft"]["p99"] == pytest.approx(0.05)
    assert total["positions"][0]["survival"] > total["positions"][1]["survival"]
    assert "decision" in err
    assert "written to" in err
    assert "chat" in page.read_text()
    assert not any(math.isnan(v) for v in total["mean_accepted"].values())


def test_files_that_cannot_be_written_are_told_of_before_anything_is_read(tmp_path, capsys):
    assert main(["report", "nowhere", "--html", str(tmp_path / "none" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_two_results_do_not_go_to_one_file(tmp_path, capsys):
    path = str(tmp_path / "both")
    for same in (path, f"{tmp_path}/./both"):
        assert main(["report", "nowhere", "--policy", path, "--html", same]) == 2
        assert "--policy and --html must be two files" in capsys.readouterr().err


def test_bad_edges_are_refused_before_anything_is_read(capsys):
    with pytest.raises(SystemExit):
        main(["report", "nowhere", "--prompt-edges", "a,b"])
    assert "--prompt-edges: numbers of tokens with commas" in capsys.readouterr().err
    assert main(["report", "nowhere", "--prompt-edges", "9,5"]) == 2
    assert "prompt edges must ascend, got 9, 5" in capsys.readouterr().err


MEASURE_MEMORY = """
import sys
from layerskip.telemetry import records
records.MEMORY = "200MB"
from layerskip.telemetry.aggregation import acceptance_report
report = acceptance_report(sys.argv[1])
lines = open("/proc/self/status").read().splitlines()
(kilobytes,) = [line.split()[1] for line in lines if line.startswith("VmHWM")]
print(report.total.num_rounds, kilobytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read there")
def test_memory_does_not_grow_with_the_rounds(tmp_path):
    """A million rounds, 450 MB of lines, are counted in 300 MB, Python and numpy among them."""
    folder = write_run(tmp_path / "runs", [])
    rounds_each, marks = 100, ("<name>", "<index>")
    _, lines = Request(0, rounds=((4, 0), (4, 2), (4, 4))).records()
    templates = [
        json.dumps(line | {"request_id": marks[0], "index": marks[1]}).replace(
            f'"{marks[1]}"', marks[1]
        )
        for line in lines[1:]
    ]
    with (
        (folder / "rounds.jsonl").open("w") as rounds,
        (folder / "requests.jsonl").open("w") as requests,
    ):
        for number in range(10_000):
            name = f"{number}/auto"
            for index in range(1, rounds_each + 1):
                text = templates[index % 3].replace(marks[0], name).replace(marks[1], str(index))
                rounds.write(text + "\n")
            line, _ = Request(number, new_tokens=200).records()
            requests.write(json.dumps(line | {"num_rounds": rounds_each}) + "\n")
    assert (folder / "rounds.jsonl").stat().st_size > 4e8
    command = [sys.executable, "-c", MEASURE_MEMORY, str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    num_rounds, kilobytes = map(int, done.stdout.split())
    assert num_rounds == 1_000_000
    assert kilobytes * 1024 < 3e8
