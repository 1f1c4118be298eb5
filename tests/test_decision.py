"""Decisions: by the tails, with a reason; hand arithmetic of caps; to a file and back."""

import random

import pytest
from recorded import PLAIN, Request, flat_cost, pair, write_run

from layerskip.policy import Policy
from layerskip.telemetry.aggregation import acceptance_report
from layerskip.telemetry.decision import FEWEST_REQUESTS, capped_gains, decide
from layerskip.telemetry.report import Distribution, Estimate, Inequality, Position

RISING = tuple(PLAIN * (1.0 + 0.15 * extra) for extra in range(17))


def accepting(rng: random.Random, chance: float, drafted: int, rounds: int):
    """Rounds whose tokens are each accepted with a chance, after accepted ones."""
    found = []
    for _ in range(rounds):
        count = 0
        while count < drafted and rng.random() < chance:
            count += 1
        found.append((drafted, count))
    return tuple(found)


def decided(folder, requests, *, cost=None, **settings) -> Policy:
    return decide(acceptance_report(write_run(folder, requests, cost=cost, **settings)))


def requests_of(chances, *, drafted=4, rounds=15, count=60, task="code"):
    """Prompts whose acceptance goes through ``chances`` in turn."""
    rng = random.Random(1)
    return [
        request
        for i in range(count)
        for request in pair(
            i, accepting(rng, chances[i % len(chances)], drafted, rounds), task=task
        )
    ]


def test_what_pays_in_the_tails_stays_on(tmp_path):
    policy = decided(tmp_path / "runs", requests_of((0.9,)), cost=flat_cost())
    (rule,) = policy.rules
    assert (rule.task, rule.prompt_tokens, rule.max_draft_tokens) == ("code", (0, 128), None)
    assert rule.reason.startswith("on: p90 latency is 0.")
    assert policy.label == "category"
    assert policy.max_draft_tokens({"category": "chat"}, 50) is None  # nothing is known of it


def test_a_mean_that_pays_does_not_hide_a_tail_that_loses(tmp_path):
    """Three of four requests gain a lot, one loses, and is among the slowest: off."""
    requests = requests_of((0.95, 0.95, 0.95, 0.05), rounds=20)
    # As many tokens, whatever is accepted: those that accept little take the longest.
    report = acceptance_report(write_run(tmp_path / "runs", requests, cost=flat_cost()))
    (route,) = report.routes
    assert route.inequality.margin > 0.5
    assert route.paired.end_to_end.high < 1.0
    (rule,) = decide(report).rules
    assert rule.max_draft_tokens == 0
    assert rule.reason.startswith("off: ")
    assert (
        f"the p10 request runs at {route.inequality.gain.at(10):.2f} of plain speed" in rule.reason
    )


def test_a_shorter_draft_that_mends_the_tail_is_a_cap(tmp_path):
    """The worst requests accept the first token, and never the second."""
    good = tuple((4, 4) for _ in range(30))
    bad = tuple((4, 1 if i % 4 else 0) for i in range(30))
    requests = [r for i in range(60) for r in pair(i, good if i % 4 else bad, task="code")]
    (rule,) = decided(tmp_path / "runs", requests, cost=flat_cost(verify=RISING)).rules
    assert rule.max_draft_tokens == 1
    # One draft pass 0.2 and two rows 1.15: 1.35 plain passes for 1 + 22/30 tokens.
    assert f"with 1 token at most, these run at {(1 + 22 / 30) / 1.35:.2f}" in rule.reason


def test_few_prompts_decide_nothing(tmp_path):
    requests = requests_of((0.0,), count=FEWEST_REQUESTS - 1)
    (rule,) = decided(tmp_path / "few", requests, cost=flat_cost()).rules
    assert rule.max_draft_tokens is None
    assert "28 of the 29 prompts that it takes" in rule.reason
    requests = requests_of((0.0,), count=FEWEST_REQUESTS)
    (rule,) = decided(tmp_path / "enough", requests, cost=flat_cost()).rules
    assert rule.max_draft_tokens == 0


def test_the_threshold_is_where_a_worst_tenth_was_likely_seen():
    assert 0.9**FEWEST_REQUESTS < 0.05 < 0.9 ** (FEWEST_REQUESTS - 1)


def test_one_arm_alone_decides_nothing(tmp_path):
    requests = [r for r in requests_of((0.0,)) if r.arm != "0"]
    (rule,) = decided(tmp_path / "runs", requests, cost=flat_cost()).rules
    assert rule.max_draft_tokens is None
    assert "nothing was measured without drafting" in rule.reason


def test_rules_are_by_task_and_prompt_over_all_outputs(tmp_path):
    rng = random.Random(2)
    requests = []
    for i in range(120):
        prompt, chance = (50, 0.9) if i % 2 else (300, 0.05)
        rounds = accepting(rng, chance, 4, rng.randint(2, 30))
        task = "code" if i % 4 < 2 else "chat"
        requests += pair(i, rounds, task=task, prompt_tokens=prompt)
    policy = decided(tmp_path / "runs", requests, cost=flat_cost())
    assert [(r.task, r.prompt_tokens, r.max_draft_tokens) for r in policy.rules] == [
        ("chat", (0, 128), None),
        ("chat", (128, 512), 0),
        ("code", (0, 128), None),
        ("code", (128, 512), 0),
    ]


def test_without_costs_the_clock_decides(tmp_path):
    (rule,) = decided(tmp_path / "off", requests_of((0.05,))).rules
    assert rule.max_draft_tokens == 0
    assert "the worst tenth takes 1." in rule.reason
    (rule,) = decided(tmp_path / "on", requests_of((0.9,))).rules
    assert rule.max_draft_tokens is None


def test_where_the_clock_clearly_contradicts_the_costs_are_not_believed(tmp_path):
    """By the table a draft pass takes five plain ones; by the clock it takes a fifth of one."""
    dear = flat_cost(draft=5 * PLAIN)
    (rule,) = decided(tmp_path / "runs", requests_of((0.95,)), cost=dear).rules
    assert rule.max_draft_tokens is None
    assert rule.reason.startswith("on: ")


def test_costs_that_say_yes_do_not_help_where_the_clock_says_no(tmp_path):
    free = flat_cost(draft=0.0)
    report = acceptance_report(write_run(tmp_path / "runs", requests_of((0.2,)), cost=free))
    (route,) = report.routes
    assert route.inequality.gain.at(10) > 1.0
    assert route.paired.p90.low > 1.05
    (rule,) = decide(report).rules
    assert rule.max_draft_tokens == 0


def test_a_p90_latency_that_rises_is_seen_behind_a_median_that_falls(tmp_path):
    """One of four requests is long and accepts little; costs that are wrong say that all gain."""
    rng = random.Random(3)
    requests = [
        request
        for i in range(60)
        for request in pair(
            i, accepting(rng, 0.95, 4, 10) if i % 4 else accepting(rng, 0.05, 4, 60)
        )
    ]
    free = flat_cost(draft=0.0)
    report = acceptance_report(write_run(tmp_path / "runs", requests, cost=free))
    assert report.total.paired.end_to_end.high < 1.0 < report.total.inequality.gain.at(10)
    (rule,) = decide(report).rules
    assert rule.max_draft_tokens == 0
    assert rule.reason.startswith("off: p90 latency is 1.")


def test_an_arm_of_a_fixed_number_is_the_most_that_was_measured(tmp_path):
    requests = [
        Request(**(vars(r) | {"arm": "4"})) if r.arm == "auto" else r for r in requests_of((0.9,))
    ]
    (rule,) = decided(tmp_path / "runs", requests, cost=flat_cost(), arms=("0", "4")).rules
    assert rule.max_draft_tokens == 4


def test_a_controller_that_drafted_nothing_is_left_alone(tmp_path):
    requests = [r for i in range(40) for r in pair(i, ((0, 0),) * 10)]
    (rule,) = decided(tmp_path / "runs", requests, cost=flat_cost()).rules
    assert rule.max_draft_tokens is None
    assert "drafted nothing" in rule.reason


def inequality(**settings) -> Inequality:
    nothing = Distribution(1, 1.0, (1.0,) * 101)
    one = Estimate(1.0, 1.0, 1.0, 1)
    known = {"c": 0.2, "draft_passes": 2.0, "beta": 0.1, "verify": (1.0, 1.1, 1.3, 1.6)}
    return Inequality(**(known | settings), emitted=one, accepted=one, gain=nothing)


def test_capped_gains_by_hand():
    """Ten drafts: six of 3 tokens, four of 1; 7 accept a first, 3 a second, 1 a third token."""
    worst = tuple(
        Position(i, 10, drafted, drafted, accepted)
        for i, (drafted, accepted) in enumerate(((10, 7), (6, 3), (6, 1)), 1)
    )
    gains = capped_gains(worst, worst, inequality(draft_passes=2.2))
    assert gains == pytest.approx(
        (
            (10 + 7) / (10 * 0.2 + 10 * 1.1),
            (10 + 10) / (16 * 0.2 + 4 * 1.1 + 6 * 1.3),
            (10 + 11) / (22 * 0.2 + 4 * 1.1 + 6 * 1.6),
        )
    )
    looked_up = capped_gains(worst, worst, inequality(draft_passes=0.0))
    assert looked_up[0] == pytest.approx(17 / 11)
    assert capped_gains(worst, (), inequality()) == ()


def test_a_policy_is_written_and_read_back(tmp_path):
    policy = decided(tmp_path / "runs", requests_of((0.9,)), cost=flat_cost())
    policy.save(tmp_path / "policy.json")
    assert Policy.load(tmp_path / "policy.json") == policy
    assert policy.measured["arm"] == "auto"
    assert policy.measured["requests"] == 60
    assert policy.measured["prompts"]["name"] == "traffic.jsonl"
    settings = [policy.measured[name] for name in ("exact", "lookup", "policy")]
    assert settings == [True, False, None]
