"""The controller on paper: counted passes times a cost table, so every bound is deterministic."""

import itertools
import operator
import statistics
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from unittest import mock

import pytest
from controlling import CONTEXT, Paper, Request, paper, steady, table

import layerskip.controller
from layerskip.asks import MOST_CREDIT, Ask
from layerskip.controller import Controller
from layerskip.cost import CostTable, Curve
from layerskip.estimates import RowState
from layerskip.experience import (
    LARGEST,
    Calibration,
    Experience,
    ToldChances,
    bin_of_match,
    lookup_confidence,
)
from layerskip.lookup import FORCED_MATCH, LONGEST_MATCH
from layerskip.pace import LOOKING, Pace, affordable, split
from layerskip.params import MAX_AUTO_DRAFT_TOKENS
from layerskip.pass_times import PassTimes
from layerskip.stopping import Choice, Stopper

COSTS = {
    "padded": table(),
    "flat": table(slope=0.0),
    "sloping": table(0.15, quantum=1, slope=0.01),
    "falling": table(0.2, start=0.1),
}
FIXED = (0, 1, 2, 3, 4, 5, 7, 9, 12, 16)


def plain_rate(cost) -> float:
    return 1.0 / cost.verify_pass(1, CONTEXT)


def against_plain(run: Paper) -> float:
    return run.rate / plain_rate(run.controller.cost)


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("boast", [0.1, 0.5, 0.98])
@pytest.mark.parametrize("requests", [1, 10])
def test_a_drafter_that_is_never_right_costs_three_percent_at_most(cost, boast, requests):
    run = paper(cost).run(steady(0.0, count=requests, boast=boast))
    assert 0.97 <= against_plain(run) < 1.0


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_a_measured_prior_is_unlearnt_within_the_bound(cost):
    sure = dict.fromkeys(("greedy", "sampled"), ((0.0, 0.9), (1.0, 0.99)))
    for calibration in (None, sure):
        run = paper(cost, None, (0.9, 0.9), calibration).run(steady(0.0, count=10, boast=0.98))
        assert against_plain(run) >= 0.97


@pytest.mark.parametrize("tokens", [16, 24, 48, 64, 128])
@pytest.mark.parametrize("boast", [0.1, 0.5, 0.98])
@pytest.mark.parametrize("c", [0.1, 0.2, 0.3, 0.5])
def test_no_request_loses_more_than_it_may_stake(c, boast, tokens):
    """Of which nothing is known yet, of any length, however sure its drafter is."""
    run = paper(table(c)).run(steady(0.0, count=1, tokens=tokens, boast=boast))
    assert against_plain(run) >= 0.97
    assert c > 0.2 or any(run.chosen)  # it did try


@pytest.mark.parametrize("tokens", [8, 16, 32])
def test_requests_that_end_before_their_limits_lose_three_percent_at_most(tokens):
    """But for the first one, which nobody can know of that it will: it stakes by its limit."""
    run, stream = paper(table(0.2)), steady(0.0, count=100, tokens=tokens, limit=128)
    lost, seconds = [], 0.0
    for part in (stream[:1], stream[1:10], stream[10:]):
        run.run(part)
        plain = len(part) * tokens / plain_rate(run.controller.cost)
        lost.append((run.seconds - seconds) / plain - 1.0)
        seconds = run.seconds
    assert lost[0] == pytest.approx(1.2 / tokens, rel=0.2)
    assert max(lost[1:]) <= 0.03


@pytest.mark.parametrize(("gained", "left"), [(-0.1, 0.0), (0.0, 0.0), (0.1, 0.4)])
def test_a_request_whose_drafts_gained_has_paid_for_what_it_had_in_advance(gained, left):
    state = Controller(table(0.2)).row("greedy", 40)
    state.claim(0.01)
    state.settle(gained, 0.0)
    state.end(5)
    assert state.shared.credit == pytest.approx(left)


def test_what_is_given_back_is_what_was_had():
    """Though it would be more by now: rounds of fewer rows earn more."""
    state = Controller(table(0.2)).row("greedy", 40)
    state.claim(0.01)
    state.claim(0.05)
    state.end(5)
    assert state.shared.credit == pytest.approx(0.0)


def test_a_request_is_over_once():
    """When it ends, and when it is taken out of its batch; one that waited has no length."""
    controller = Controller(table(0.2))
    waiting, first, second = (controller.row("greedy") for _ in range(3))
    waiting.end(0)
    first.end(20)
    for _ in range(2):
        second.end(10)
    assert first.shared.usual_length == pytest.approx(19.0)
    assert controller.row("coupled").shared.usual_length == float("inf")
    owing = Controller(table(0.2)).row("greedy", 40)
    owing.claim(0.01)
    for _ in range(2):
        owing.end(5)
    assert owing.shared.credit == pytest.approx(0.0)


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_a_hard_request_among_easy_ones_loses_three_percent_at_most(cost):
    run, losses = paper(cost), []
    for i in range(24):
        before = run.seconds
        run.run(steady(0.05 if i % 3 == 2 else 0.95, count=1, tokens=64))
        if i % 3 == 2:
            losses.append((run.seconds - before) / (64 / plain_rate(cost)) - 1)
    assert sum(losses) / len(losses) <= 0.03
    assert max(losses) <= 0.035  # now and then a draft is right, and drafting goes on a little
    assert against_plain(run) > 1.3


def test_what_drafts_gained_may_be_staked_again():
    controller = Controller(table(0.2, slope=0.0), follows_clock=False)
    short, first = controller.row("greedy", 16), controller.row("greedy", 500)
    assert short.stake == pytest.approx(0.015 * 16)  # and a hundredth of each for probes
    assert controller.row("greedy", 40).stake == pytest.approx(first.stake * 40 / 64)
    choice = Choice(
        "early_exit", 4, plain_seconds=1.0, draft_seconds=0.2, verify_seconds=(0.1,) * 4
    )
    before = short.stake
    controller.observe_draft(short, choice, CONTEXT, [True, False], [0.5, 0.5, 0.5], num_passes=2)
    assert short.stake == pytest.approx(before + 1.0 - 2 * 0.2 - 3 * 0.1)
    assert short.shared.ledger == pytest.approx(0.3)
    assert controller.row("greedy", 16).stake == first.stake  # the next short one may lose more


def test_look_ups_gain_and_lose_of_the_stake_and_then_of_what_rounds_earned():
    cost = replace(table(slope=0.0), sampling=0.1, judging=0.001)
    controller = Controller(cost, follows_clock=False)
    state = controller.row("coupled", 16)
    choice = Choice("lookup", 4, 1.0, (0.1, 0.0, 0.0, 0.0), plain_seconds=1.0)
    before, drawing = state.stake, 4 * controller.times.drawing()
    assert drawing > 0.0
    lost = 0.1 + drawing + LOOKING
    controller.observe_lookup(state, choice, CONTEXT, 2, 4)
    assert state.stake == pytest.approx(before + 2.0 - lost)
    assert state.shared.ledger == pytest.approx(2.0 - lost)
    state.stake, state.shared.credit = 0.2, lost
    controller.observe_lookup(state, choice, CONTEXT, 0, 4)
    one = controller.times.verify(1, CONTEXT)  # credit is of plain passes of one row
    assert state.stake == pytest.approx(0.0)
    assert state.shared.credit == pytest.approx(lost - (lost - 0.2) / one + 0.01 / one)


def test_looked_up_tokens_behind_a_draft_are_charged_and_counted():
    cost = replace(table(slope=0.0), sampling=0.1, judging=0.001)
    choice = Choice(
        "early_exit", 2, plain_seconds=1.0, draft_seconds=0.2, verify_seconds=(0.1,) * 16
    )
    stakes = []
    for behind in ({}, {"num_behind": 3, "num_saved": 3}):
        controller = Controller(cost, follows_clock=False)
        state = controller.row("coupled", 16)
        controller.observe_draft(
            state, choice, CONTEXT, [True, True], [0.5] * 2, num_passes=2, **behind
        )
        stakes.append(state.stake)
    drawing = controller.times.drawing()
    assert stakes[1] - stakes[0] == pytest.approx(1.0 - 3 * 0.1 - 3 * drawing)


@pytest.mark.parametrize(("match_length", "taken"), [(LONGEST_MATCH, 2), (FORCED_MATCH, 9)])
def test_a_look_up_takes_what_its_request_may_lose_unless_a_grammar_forces_it(match_length, taken):
    controller = Controller(table(quantum=1, slope=0.05), follows_clock=False)
    state = controller.row("greedy", 16)
    state.stake = 0.2
    ask = Ask(state, CONTEXT, 9, 9, match_length)
    (choice,) = controller.choose([ask], drafts=False)
    assert (choice.source, choice.num_draft_tokens) == ("lookup", taken)
    state.stake, state.shared.credit = -1.0, 0.06 + LOOKING  # what rounds earned pays
    (choice,) = controller.choose([ask], drafts=False)
    assert choice.num_draft_tokens == (1 if match_length < FORCED_MATCH else taken)


def test_a_draft_is_charged_the_guesses_in_its_passes():
    """Or a drafter whose look-ups are wrong, too, would lose more than it stakes."""
    layers = Curve((1, 4, 8, 64), (0,), ((0.2, 0.2, 0.24, 1.0),))
    cost = replace(table(quantum=1), draft_layers=layers)
    choice = Choice("early_exit", 4, plain_seconds=1.0, draft_seconds=0.2)
    for positions, charged in ((0, 0.4), (2, 0.4), (8, 0.4), (16, 0.48)):
        controller = Controller(cost, follows_clock=False)
        state = controller.row("greedy", 16)
        before = state.stake
        controller.observe_draft(
            state, choice, CONTEXT, [False], [0.5, 0.5], num_passes=2, num_positions=positions
        )
        assert before - state.stake == pytest.approx(charged)


def test_what_a_probe_loses_is_paid_by_what_all_requests_saved():
    controller = Controller(table(0.2, slope=0.0), follows_clock=False)
    one, other = controller.row("greedy"), controller.row("greedy")
    one.shared.credit = 0.0
    for _ in range(30):
        controller.observe_plain(one, Choice("none", 0, plain_seconds=0.5), CONTEXT)
    assert other.shared.credit == pytest.approx(0.15)  # half a pass each: two rows share one
    choice = Choice("early_exit", 1, plain_seconds=1.0, draft_seconds=0.15, verify_seconds=(0.0,))
    other.probing, stake = True, other.stake
    controller.observe_draft(other, choice, CONTEXT, [False], [0.5], num_passes=1)
    assert (one.shared.credit, other.stake) == (pytest.approx(0.0), stake)
    controller.observe_draft(other, choice, CONTEXT, [True], [0.5], num_passes=1)
    assert (one.shared.credit, other.stake) == (pytest.approx(0.0), stake + 0.85)


def test_what_a_probe_loses_is_not_paid_by_what_is_owed():
    state = Controller(table(0.2)).row("greedy", 0)
    state.probing, state.stake, state.shared.credit = True, 1.0, -0.5
    state.settle(-0.3, -0.3)
    assert (state.stake, state.shared.credit) == pytest.approx((0.7, -0.5))


def test_one_bad_draft_leaves_enough_for_another():
    controller = Controller(table(0.2), prior=(0.85,), follows_clock=False)
    state = controller.row("greedy", 64)
    choice = asked(controller, state)
    lost = choice.num_draft_tokens * 0.2 + sum(choice.verify_seconds[: choice.num_draft_tokens])
    assert 0.4 < lost < 0.68 * state.stake  # several tokens
    wrong(controller, state, choice)
    choice = asked(controller, state)
    assert (choice.num_draft_tokens, state.probing) == (1, False)


def test_what_is_left_of_a_stake_pays_for_a_probe_with_what_plain_rounds_earned():
    controller = Controller(table(0.2, slope=0.0), prior=(0.85,), follows_clock=False)
    state = controller.row("greedy", 0)  # which has nothing in advance
    state.stake, state.shared.credit = 0.15, 0.1
    choice = asked(controller, state)
    assert (choice.num_draft_tokens, state.probing) == (1, True)
    wrong(controller, state, choice)
    assert state.shared.credit == pytest.approx(0.0)
    assert state.stake == pytest.approx(0.05)
    for _ in range(14):  # 0.01 plain passes each
        assert asked(controller, state).num_draft_tokens == 0
        controller.observe_plain(state, Choice("none", 0, plain_seconds=1.0), CONTEXT)
    for _ in range(2):
        controller.observe_plain(state, Choice("none", 0, plain_seconds=1.0), CONTEXT)
    assert asked(controller, state).num_draft_tokens == 1  # 0.2: 0.05 are left of the stake


def test_a_text_that_began_badly_is_tried_again_while_most_of_it_is_to_come():
    """With what its plain rounds would earn, which they then do not."""
    controller = Controller(table(0.2, slope=0.0), prior=(0.01,), follows_clock=False)
    state = controller.row("greedy", 50)
    state.stake = state.shared.credit = 0.0
    chosen, credit = [], []
    for _ in range(56):
        choice = asked(controller, state)
        chosen.append(choice.num_draft_tokens)
        if choice.num_draft_tokens:
            wrong(controller, state, choice)
        else:
            controller.observe_plain(state, choice, CONTEXT)
        credit.append(state.shared.credit)
    # A probe takes a fifth of a plain pass, and half of one is there before any has been earned.
    assert chosen == [1, 0, 1] + [0] * 53
    assert credit[2:52] == pytest.approx([0.1] * 50)
    assert credit[52:] == pytest.approx([0.11, 0.12, 0.13, 0.14])


def test_what_a_row_has_in_advance_is_its_share_of_a_pass():
    controller = Controller(table(0.2, slope=0.0), (0.01,), follows_clock=False)
    asks = [Ask(controller.row("greedy", 40), CONTEXT, 30) for _ in range(4)]
    shared = asks[0].state.shared
    shared.credit = 0.0
    for _ in range(2):
        controller.choose(asks, drafts=True)
        assert shared.credit == pytest.approx(0.01 * 40)  # four rows, a quarter each


def test_a_row_that_has_no_room_for_a_draft_has_nothing_in_advance():
    """Or each request would leave it to the next one at its end."""
    controller = Controller(table(0.2, slope=0.0), (0.01,), follows_clock=False)
    rows = [controller.row("greedy", 40) for _ in range(2)]
    asks = [Ask(state, CONTEXT, room) for state, room in zip(rows, (30, 0), strict=True)]
    controller.choose(asks, drafts=True)
    assert (rows[0].owed, rows[1].owed) == (40, 0)
    assert rows[0].shared.credit == pytest.approx(0.01 * 40 / 2)


def test_nothing_is_had_in_advance_where_something_is_looked_up():
    """A probe would take its place. It is had in the next round without."""
    controller = Controller(table(0.2, slope=0.0), (0.01,), follows_clock=False)
    ask = Ask(controller.row("greedy", 40), CONTEXT, 30, num_guessed=6, match_length=20)
    assert controller.choose([ask], drafts=True)[0].source == "lookup"
    assert ask.state.shared.credit == 0.0
    found = controller.choose([replace(ask, num_guessed=0)], drafts=True)[0]
    assert (found.source, ask.state.probing) == ("early_exit", True)
    assert ask.state.shared.credit == pytest.approx(0.4)


def test_what_rounds_have_earned_is_not_had_in_advance_as_well():
    state = Controller(table(0.2)).row("greedy", 40)
    for _ in range(10):
        state.earn(0.01)
    state.claim(0.01)
    assert state.shared.credit == pytest.approx(0.01 * 40)


def test_a_long_rest_buys_no_long_run_of_probes():
    """Three of them take nearly a plain pass, which is the most that is kept for them."""
    controller = Controller(table(0.3, slope=0.0), (0.01,), follows_clock=False)
    state = controller.row("greedy", 0)
    state.stake, state.shared.credit = 0.0, 50.0
    probes = 0
    for _ in range(12):
        choice = asked(controller, state)
        if choice.num_draft_tokens:
            wrong(controller, state, choice)
        else:
            controller.observe_plain(state, choice, CONTEXT)
        probes += choice.num_draft_tokens
    assert probes == 3


def test_no_stake_is_spent_on_a_draft_that_would_not_pay():
    controller = Controller(table(0.2, slope=0.0), prior=(0.85,), follows_clock=False)
    state = controller.row("greedy", 0)
    for _ in range(30):
        state.add_draft([False], [])
    state.stake, state.shared.credit = 0.15, 0.1
    assert asked(controller, state).num_draft_tokens == 0
    state.shared.credit = 0.2  # what was saved for trying is
    assert asked(controller, state).num_draft_tokens == 1


def asked(controller: Controller, state: RowState) -> Choice:
    return controller.choose([Ask(state, CONTEXT, 60)], drafts=True)[0]


def wrong(controller: Controller, state: RowState, choice: Choice) -> None:
    count = choice.num_draft_tokens
    controller.observe_draft(state, choice, CONTEXT, [False], [0.5] * count, num_passes=count)


@pytest.mark.parametrize("chance", [0.02, 0.1])
def test_a_random_drafter_costs_three_percent_at_most(chance):
    assert against_plain(paper(table()).run(steady(chance, count=10))) >= 0.97


def test_probes_alone_cost_one_percent():
    run = paper(table()).run(steady(0.0, count=1))  # learns
    before, run.seconds, run.emitted = run.num_rounds, 0.0, 0
    run.run(steady(0.0, count=20))
    probes = sum(n > 0 for n in run.chosen[before:])
    assert probes > 10
    assert against_plain(run) >= 0.989


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("tokens", [16, 48, 128])
@pytest.mark.parametrize("match_length", [3, 17, LONGEST_MATCH])
@pytest.mark.parametrize(("quantum", "slope"), [(8, 0.02), (1, 0.02), (1, 0.05), (1, 0.2)])
def test_look_ups_that_are_never_right_cost_three_percent_at_most(
    quantum, slope, match_length, tokens, rows
):
    """Of which nothing is known yet, however long the matches; nor are the drafts ever right."""
    cost = table(quantum=quantum, slope=slope)
    stream = steady(0.0, count=rows, tokens=tokens, guessed=16, match_length=match_length)
    run, plain = (paper(cost, fixed).run(stream_of(stream), rows=rows) for fixed in (None, 0))
    assert run.seconds <= 1.03 * plain.seconds
    if rows == 1:
        assert any(run.chosen)  # it did try


def stream_of(requests: Sequence[Request]) -> list[Request]:
    """The same ones, none of which has begun."""
    return [replace(r) for r in requests]


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_a_text_that_copies_later_looks_up_though_its_look_ups_began_badly(cost):
    """What is looked up is judged by the text, taken or not."""
    paying = {"tokens": 300, "guessed": 8, "match_length": 20}
    run = paper(cost)
    run.run([Request(acceptance=lambda _: 0.0, **paying | {"tokens": 64})])
    before = run.seconds
    run.run([Request(acceptance=lambda _: 0.0, guess_right=0.95, **paying)])
    assert 300 / (run.seconds - before) >= 2.0 * plain_rate(cost)


def test_a_text_that_begins_badly_is_tried_again_by_what_all_rounds_earned():
    """Rounds that draft earn for probes, too: what good texts gained keeps another from rest."""

    def seconds(*, before: int) -> float:
        run = paper(table(0.25, slope=0.0, start=0.1))
        run.run(steady(0.8, count=before, tokens=64))
        began = run.seconds
        run.run([Request(64, lambda emitted: 0.9 if emitted > 5 else 0.0)])
        return run.seconds - began

    assert seconds(before=0) > 60.0  # nearly all its rounds are plain
    assert seconds(before=10) < 45.0


def test_probes_cost_a_hundredth_of_the_rounds_that_earned_them():
    controller = Controller(table(0.2, slope=0.0), follows_clock=False)
    state = controller.row("greedy", 0)
    choice = Choice(
        "early_exit", 2, plain_seconds=1.0, draft_seconds=0.2, verify_seconds=(0.0,) * 2
    )
    for _ in range(30):
        controller.observe_draft(state, choice, CONTEXT, [True, True], [0.9] * 2, num_passes=2)
    controller.observe_lookup(state, Choice("lookup", 3, plain_seconds=1.0), CONTEXT, 3, 3)
    assert state.shared.credit == pytest.approx(0.31)
    state.probing = True
    controller.observe_draft(state, choice, CONTEXT, [True], [0.9], num_passes=1)
    assert state.shared.credit == pytest.approx(0.31)  # a probe that gains costs nothing


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.one_in(3)
def test_automatic_is_near_the_best_fixed_number_where_confidence_tells_nothing(cost, acceptance):
    auto = paper(cost).run(steady(acceptance, count=16)).rate
    best = max(paper(cost, k).run(steady(acceptance, count=16)).rate for k in FIXED)
    assert auto >= 0.95 * best


@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.one_in(2)
def test_automatic_beats_every_fixed_number_where_confidence_tells(cost, acceptance):
    auto = paper(cost).run(steady(acceptance, count=8, telling=True)).rate
    best = max(paper(cost, k).run(steady(acceptance, count=8)).rate for k in FIXED)
    assert auto >= 1.05 * best


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.one_in(2)
def test_over_a_bimodal_stream_automatic_beats_every_fixed_number(cost):
    def stream() -> list[Request]:
        return [r for i in range(12) for r in steady(0.95 if i % 2 else 0.05, count=1)]

    best = max(paper(cost, k).run(stream()).rate for k in FIXED)
    assert paper(cost).run(stream()).rate >= 1.1 * best


def test_short_outputs_of_an_ordinary_drafter_gain():
    assert against_plain(paper(table()).run(steady(0.7, count=20, tokens=16))) >= 1.2


def test_short_outputs_lose_two_percent_at_most_once_the_drafter_is_known():
    run = paper(table()).run(steady(0.05, count=4))
    run.seconds, run.emitted = 0.0, 0
    run.run(steady(0.05, count=20, tokens=16))
    assert against_plain(run) >= 0.98


def test_drafting_comes_back_when_it_pays_again():
    request = Request(600, lambda emitted: 0.0 if emitted < 200 else 0.95, boast=0.5)
    run = paper(table()).run([request])
    off = next(i for i, n in enumerate(run.chosen) if n == 0)
    first = next(i for i in range(off, len(run.chosen)) if run.chosen[i] > 1)
    assert sum(run.chosen[off:first]) <= 30  # probes on the way
    assert run.num_rounds < 420  # 600 plain rounds without
    assert max(run.chosen[-20:]) >= 4


@pytest.mark.parametrize("rows", [1, 2, 8, 32])
@pytest.mark.parametrize("acceptance", [0.0, 0.05, 0.5, 0.8])
@pytest.mark.one_in(2)
def test_batches_of_any_size_are_never_slower_than_plain_and_near_the_best_number(rows, acceptance):
    def seconds(fixed: int | None) -> float:
        requests = steady(acceptance, count=64 if rows > 2 else 24, tokens=64)
        return paper(cost, fixed).run(requests, rows=rows).seconds

    cost = table(slope=0.02)
    best = min(seconds(k) for k in (0, 1, 2, 3, 4, 5))
    assert seconds(None) <= 1.03 * best


@pytest.mark.parametrize("rows", [8, 16, 32])
@pytest.mark.parametrize("acceptance", [0.7, 0.8])
def test_large_batches_draft_where_their_tokens_are_nearly_free(rows, acceptance):
    """As on a GPU, whose passes take 64 tokens: one more is another pass, which none asked for."""

    def rate(fixed: int | None) -> float:
        requests = steady(acceptance, count=3 * rows, tokens=96)
        return paper(cost, fixed).run(requests, rows=rows).rate

    cost = replace(table(0.35, quantum=1, slope=0.002), pass_rows=64)
    assert rate(None) >= 0.97 * max(rate(k) for k in (0, 1, 2, 3, 4, 5))


@pytest.mark.parametrize("each", [1, 3])
def test_rows_are_charged_together_what_their_pass_takes_more(each):
    times = PassTimes(replace(table(0.35, quantum=1, slope=0.002), pass_rows=64))
    rows = 64 // (1 + each)
    pace = Pace(times, CONTEXT, rows).settled(rows * each, rows)
    grown = pace.verify(64) - pace.verify(rows)
    assert rows * sum(pace.steps[:each]) == pytest.approx(grown)
    charged = pace.charged
    assert rows * sum(charged.steps[:each]) == pytest.approx(
        charged.verify(64) - charged.verify(rows)
    )


def test_a_row_that_drafts_beside_others_is_charged_the_whole_draft_pass():
    controller = Controller(table(0.2, slope=0.2), (0.95,), follows_clock=False)
    asks = [Ask(controller.row("greedy"), CONTEXT, room) for room in (16, 0, 0, 0)]
    choices = controller.choose(asks, drafts=True)
    assert [c.source for c in choices] == ["early_exit", "none", "none", "none"]
    assert choices[0].draft_seconds == pytest.approx(controller.times.draft(1, CONTEXT))


def test_a_ramp_of_the_batch_is_never_slower_than_plain():
    def ramp(run: Paper) -> Paper:
        for rows in (1, 2, 4, 8, 16, 32, 16, 8, 4, 2, 1):
            run.run(steady(0.7, count=rows, tokens=48), rows=rows)
        return run

    cost = table(slope=0.03)
    auto, plain = ramp(paper(cost)), ramp(paper(cost, 0))
    assert auto.seconds < 0.9 * plain.seconds


def test_where_verifying_is_dear_large_batches_do_not_draft():
    dear = table(0.3, quantum=1, slope=1.0)  # compute-bound: every row costs a pass
    run = paper(dear).run(steady(0.5, count=64, tokens=64), rows=32)
    assert sum(n > 0 for n in run.chosen) <= 0.3 * run.num_rounds
    assert (
        run.seconds <= 1.03 * paper(dear, 0).run(steady(0.5, count=64, tokens=64), rows=32).seconds
    )


def test_the_choice_is_the_largest_of_the_formula():
    controller = Controller(table(0.25, slope=0.0), (0.8,), follows_clock=False)
    state = controller.row("greedy")
    state.stake = 100.0
    choice = controller.choose([Ask(state, 0, MAX_AUTO_DRAFT_TOKENS)], drafts=True)[0]
    expected = {  # at c = 0.25 and a = 0.8 the best k is 3, 1.64 times plain
        k: sum(0.8**i for i in range(k + 1)) / (0.25 * k + 1.0) for k in range(17)
    }
    assert max(expected, key=expected.get) == 3
    assert choice.rate == pytest.approx(expected[3], rel=1e-6)
    assert choice.rate == pytest.approx(1.64, abs=0.05)


def test_what_begins_a_draft_is_counted_once():
    """The dearer the first pass beside the later ones, the longer a draft, or there is none."""
    counts = {}
    for start in (0.0, 0.4, 0.76):
        controller = Controller(table(0.2, slope=0.0, start=start), (0.7,), follows_clock=False)
        state = controller.row("greedy")
        state.stake = 100.0
        controller.choose([Ask(state, CONTEXT, 16)], drafts=True)
        counts[start] = state.last
    assert 1 < counts[0.0] < counts[0.4] < counts[0.76]
    pace = Pace(PassTimes(table(0.2, slope=0.0, start=0.4)), CONTEXT, 1)
    assert [affordable(s, pace) for s in (0.49, 0.5, 0.89, 0.91)] == [0, 1, 1, 2]
    choice = Choice("early_exit", 4, 0.0, (0.0,) * 4, 0.1, 0.4, 1.0)
    assert choice.gained(1, 4, 3) == pytest.approx(1.0 - 0.4 - 3 * 0.1)


def test_one_unlucky_round_of_eight_rows_says_less_than_the_plan():
    """Each row's first token takes 0.51 of its plain round; of eight, two are right."""
    controller = Controller(table(0.1, slope=0.08), (0.8,), follows_clock=False)
    asks = [Ask(controller.row("greedy"), CONTEXT, 60) for _ in range(8)]
    for i, (ask, choice) in enumerate(zip(asks, controller.choose(asks, drafts=True), strict=True)):
        controller.observe_draft(ask.state, choice, CONTEXT, [i < 2], [0.6], num_passes=1)
    again = controller.choose(asks, drafts=True)
    assert [c.source for c in again[:2]] == ["early_exit"] * 2
    assert not any(ask.state.probing for ask in asks)


def test_what_a_plan_says_wears_off():
    shared = Experience((0.8,))
    assert shared.acceptance(0) == pytest.approx(0.8)
    for _ in range(400):
        shared.add(0, False)
    assert shared.acceptance(0) < 0.01
    assert shared.acceptance(1) == pytest.approx(0.8)


def test_nothing_is_drafted_where_there_is_no_room_or_no_drafter():
    controller = Controller(table(), follows_clock=False)
    state = controller.row("greedy")
    assert controller.choose([Ask(state, 0, 0)], drafts=True)[0].num_draft_tokens == 0
    assert controller.choose([Ask(state, 0, 9)], drafts=False)[0].source == "none"


def test_a_long_match_goes_straight_to_verify_and_a_poor_one_to_the_draft():
    controller = Controller(table(slope=0.2), follows_clock=False)
    state = controller.row("greedy")
    good = controller.choose([Ask(state, 0, 16, 10, 20)], drafts=True)[0]
    assert (good.source, good.num_draft_tokens) == ("lookup", 7)  # as many rows as cost nothing
    poor = controller.choose([Ask(state, 0, 16, 10, 1)], drafts=True)[0]
    assert poor.source == "early_exit"
    for _ in range(40):
        state.add_lookup(20, [False], stored=False)
    again = controller.choose([Ask(state, 0, 16, 10, 20)], drafts=True)[0]
    assert again.source == "early_exit"


def test_what_one_token_matched_goes_straight_to_verify_only_where_nothing_drafts():
    controller = Controller(table(slope=0.02), (0.5,), follows_clock=False)
    state = controller.row("greedy")
    for _ in range(40):
        state.add_lookup(1, [True] * 8, stored=False)
    one, two = (Ask(state, 0, 16, 8, match_length) for match_length in (1, 2))
    sources = [
        controller.choose([ask], drafts=drafts)[0].source
        for ask, drafts in ((one, True), (two, True), (one, False))
    ]
    assert sources == ["early_exit", "lookup", "lookup"]


@pytest.mark.parametrize(("guessing", "looks_up"), [(1, False), (8, True)])
def test_a_pass_grows_for_look_ups_only_if_all_rows_gain(guessing, looks_up):
    """Eight rows fill a quantum; a token more, and the pass takes as long as one of sixteen."""
    controller = Controller(table(quantum=8, slope=0.05), follows_clock=False)
    asks = [Ask(controller.row("greedy"), CONTEXT, 16, 2 * (i < guessing), 4) for i in range(8)]
    choices = controller.choose(asks, drafts=False)
    assert [c.source == "lookup" for c in choices] == [looks_up] * 8
    alone = controller.choose(asks[:1], drafts=False)
    assert alone[0].source == "lookup"


@pytest.mark.parametrize(("margin", "looks_up"), [(1.13, False), (1.17, True)])
def test_look_ups_of_several_rows_have_to_pay_clearly(margin, looks_up):
    pace = Pace(PassTimes(table(quantum=8, slope=0.05)), CONTEXT, 8)
    gain = margin * pace.verify(16) / pace.verify(8) - 1.0
    found = split(pace, [()] * 8, [(1, gain)] * 8, ())
    assert list(found.looked_up) == [int(looks_up)] * 8


@pytest.mark.parametrize("best", [0, 1])
def test_of_several_look_ups_those_that_give_most_for_their_tokens_are_taken(best):
    offers = [(8, 0.1), (8, 0.1)]
    offers[best] = (2, 1.9)
    pace = Pace(PassTimes(table(quantum=1, slope=0.2)), CONTEXT, 2)
    found = split(pace, [()] * 2, offers, ())
    assert list(found.looked_up) == [2 * (i == best) for i in range(2)]


@pytest.mark.parametrize(
    ("match_length", "num_guessed", "sources"),
    [(9, 3, ["early_exit"] * 4), (17, 9, ["lookup", *["none"] * 3])],
)
def test_a_row_whose_neighbours_draft_looks_up_only_what_is_more_than_its_draft(
    match_length, num_guessed, sources
):
    """It saves none of their passes. Alone, a fair match will do: it spares a dear draft."""
    controller = Controller(table(0.3, slope=0.01), (0.85,), follows_clock=False)
    states = [controller.row("greedy") for _ in range(4)]
    for state in states:
        state.stake = 100.0
    first, *others = [Ask(state, CONTEXT, 16) for state in states]
    first = replace(first, num_guessed=num_guessed, match_length=match_length)
    (alone,) = controller.choose([first], drafts=True)
    assert alone.source == "lookup"
    choices = controller.choose([first, *others], drafts=True)
    assert [c.source for c in choices] == sources


def test_all_rows_look_up_where_that_is_quicker_than_to_draft():
    """As many tokens as drafts give, and no draft pass."""
    controller = Controller(table(0.3, slope=0.01), (0.85,), follows_clock=False)
    asks = [Ask(controller.row("greedy"), CONTEXT, 16, 6, 20) for _ in range(4)]
    for ask in asks:
        ask.state.stake = 100.0
    choices = controller.choose(asks, drafts=True)
    assert [c.source for c in choices] == ["lookup"] * 4


def test_looked_up_tokens_are_drawn_and_drafted_ones_only_judged():
    """Nobody made their noise: where that is dear, fewer are taken."""
    cost = replace(table(0.9, slope=0.01), sampling=0.1, judging=0.001)
    counts = []
    for drawing in (cost, replace(cost, sampling=0.001)):
        controller = Controller(drawing, (0.2,), follows_clock=False)
        ask = Ask(controller.row("coupled"), CONTEXT, 16, 10, 4)
        counts.append(controller.choose([ask], drafts=True)[0].num_draft_tokens)
    assert 0 < counts[0] < counts[1]


def test_free_rows_of_a_draft_pass_take_guesses():
    controller = Controller(table(0.2, slope=0.2), follows_clock=False)  # 8 rows as one
    assert controller.guesses(1, CONTEXT) == 7
    assert controller.guesses(2, CONTEXT) == 3
    assert controller.guesses(8, CONTEXT) == 0


@pytest.mark.parametrize(
    ("four", "eight", "width"), [(0.2, 0.23, 7), (0.3, 0.23, 7), (0.2, 0.4, 3), (0.3, 0.4, 1)]
)
def test_guesses_cost_what_the_pass_grows_by_and_no_sampling(four, eight, width):
    """A fifth of a pass at most. What is right is sampled in the place of a pass of its own, and a
    size of pass that a busy machine made look dear hides no wider one."""
    layers = Curve((1, 4, 8, 16), (0,), ((0.2, four, eight, 0.6),))
    cost = replace(table(quantum=1), draft_layers=layers, sampling=0.01)
    assert Controller(cost, follows_clock=False).guesses(1, CONTEXT) == width


def test_guesses_of_several_rows_have_to_be_free():
    """A pass is saved only where no row needs it."""
    for price, width in ((0.2, 3), (0.202, 0)):
        layers = Curve((1, 2, 7, 8, 9), (0,), ((0.2, 0.2, price, price, 0.3),))
        cost = replace(table(quantum=1), draft_layers=layers)
        assert Controller(cost, follows_clock=False).guesses(2, CONTEXT) == width


@pytest.mark.parametrize("fixed", [(), (3,)])
@pytest.mark.parametrize("c", [0.2, 0.45])
def test_a_row_that_goes_on_drafting_is_decided_in_few_steps_as_in_many(monkeypatch, c, fixed):
    """However much it may stake and has room for, and whatever its drafts made of it. Beside a row
    whose number is fixed all steps are taken."""
    chosen: dict[bool, list[object]] = {}
    for few in (True, False):
        if not few:
            monkeypatch.setattr(Controller, "_again", lambda *_: None)
        controller, luck = Controller(table(c, start=0.05), follows_clock=False), Random(7)
        state = controller.row("greedy")
        for turn in range(900):
            if turn % 50 == 0:  # a text that gets worse, or better
                share = luck.uniform(0.3, 0.8)
            match = luck.randrange(1, 40)
            guessed = luck.choice((0, 0, 4, 12))
            ask = Ask(state, CONTEXT, luck.randrange(1, 20), guessed, match)
            (choice,) = controller.choose([ask], drafts=True, fixed=fixed)
            chosen.setdefault(few, []).append((choice, state.last, state.probing))
            state.add_lookup(match, [luck.random() < match / 40] * (guessed > 0), stored=False)
            if choice.source != "early_exit":
                controller.observe_plain(state, choice, CONTEXT)
                continue
            accepted = [luck.random() < share for _ in range(choice.num_draft_tokens)]
            judged = accepted[: accepted.index(False) + 1] if False in accepted else accepted
            controller.observe_draft(state, choice, CONTEXT, judged, num_passes=1, num_drafted=1)
    assert chosen[True] == chosen[False]
    sources = [choice.source for choice, *_ in chosen[True]]
    assert sources.count("early_exit") > 20
    assert sources.count("lookup") > 20


def test_a_stopper_counts_survival_against_the_rate():
    state = RowState(Experience((0.8,)))
    choice = Choice("early_exit", 8, rate=1.5, verify_seconds=(0.2,) * 8)
    sure, unsure = Stopper(state, choice), Stopper(state, choice)
    assert sure.goes_on(0.99)
    assert sure.gain == pytest.approx(sure.chances[0] * 0.8 - 1.5 * 0.2)
    assert not sure.stopped
    assert not unsure.goes_on(0.0)
    assert unsure.stopped
    assert sure.chances[0] > unsure.chances[0]


def test_a_row_by_itself_fills_a_tile_that_its_next_token_alone_would_not_pay_for():
    """Beyond a tile of the verify pass a token costs the next one, and those after it nothing."""

    def going(most: int, confidence: float) -> bool:
        choice = Choice(
            "early_exit",
            most,
            rate=2.0,
            verify_seconds=(0.0, 0.4, 0.0, 0.0, 0.0, 0.4),
            draft_seconds=0.1,
        )
        return Stopper(RowState(Experience((0.9,))), choice).goes_on(confidence)

    assert not going(2, 0.99)  # 0.9 of a token for one
    assert going(5, 0.99)
    assert not going(5, 0.3)
    assert not going(1, 0.99)


def test_a_token_that_its_pass_has_run_for_is_weighed_against_its_place_in_the_verify_pass():
    def going(verify: float, confidence: float, *, ahead: bool) -> bool:
        choice = Choice("early_exit", 2, 2.0, (0.0, verify), draft_seconds=0.45)
        return Stopper(RowState(Experience((0.9,))), choice).goes_on(confidence, ahead)

    assert not going(0.0, 0.9, ahead=False)
    assert going(0.0, 0.9, ahead=True)
    assert going(0.0, 0.1, ahead=True)
    assert not going(0.45, 0.9, ahead=True)


def test_tokens_behind_a_draft_are_worth_their_places_in_the_verify_pass():
    """The first two of them are in the draft's tile, the third begins another."""

    def behind(acceptances: list[float], confidence: float = 0.99, drawing: float = 0.0) -> int:
        choice = Choice("early_exit", 1, 2.0, (0.1, 0.01, 0.01, 0.4, 0.0, 0.0))
        stopper = Stopper(
            RowState(Experience((0.9,))),
            choice,
            behind=lambda draft, most: acceptances[: most * (draft == (7,))],
            drawing=drawing,
        )
        stopper.goes_on(confidence, draft=(7,))
        return stopper.num_behind((7,))

    assert behind([0.9, 0.8, 0.5, 0.1]) == 2
    assert behind([0.9, 0.8, 0.7, 0.6, 0.5]) == 5  # the last three pay for the tile together
    assert behind([0.9] * 9) == 5  # no further than a controller drafts
    assert behind([0.9, 0.8, 0.7, 0.6, 0.5], confidence=0.0) == 2
    assert behind([0.05, 0.01], confidence=0.99) == 1
    assert behind([0.9, 0.8, 0.5], drawing=0.32) == 1
    assert behind([]) == 0


def test_tokens_behind_a_draft_are_as_many_as_the_round_may_lose_with_it():
    """The draft costs 0.3 with its place, each token behind it 0.1 and 0.02 to judge."""
    steps = (0.1,) * 16
    for may_lose, taken in ((0.0, 0), (0.41, 0), (0.43, 1), (0.67, 3), (9.0, 9)):
        choice = Choice("early_exit", 1, 1.0, steps, 0.2, may_lose=may_lose)
        stopper = Stopper(
            RowState(Experience((0.9,))),
            choice,
            behind=lambda draft, most: ([0.9] * 9)[:most],
            drawing=0.02,
        )
        stopper.goes_on(0.99, draft=(7,))
        assert stopper.num_behind((7,)) == taken


@pytest.mark.parametrize("credit", [0.5, 50.0])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_draft_knows_what_its_round_may_lose(rows, credit):
    """Of what rows staked, and of what rounds earned; one that drafted before, too."""
    controller = Controller(table(0.1), prior=(0.9,), follows_clock=False)
    states = [controller.row("greedy", 64) for _ in range(rows)]
    for _ in range(2):
        choices = controller.choose([Ask(s, CONTEXT, 60) for s in states], drafts=True)
        pace = controller._pace(CONTEXT, rows, greedy=False)
        states[0].shared.credit = credit
        for choice in choices:
            assert choice.source == "early_exit"
        asked = controller.choose([Ask(s, CONTEXT, 60) for s in states], drafts=True)
        stake = sum(s.stake for s in states) / rows
        earned = min(MOST_CREDIT, credit) / rows
        wanted = (2 / 3 if rows == 1 else 1.0) * stake * pace.token + earned * pace.plain
        assert [c.may_lose for c in asked] == pytest.approx([wanted] * rows)


def test_a_token_that_is_looked_up_as_well_is_worth_less_of_a_pass():
    asked = []

    def going(acceptance: float, *, ahead: bool = False, draft_seconds: float = 0.1) -> bool:
        choice = Choice("early_exit", 3, 2.0, (0.1, 0.05, 0.4), draft_seconds=draft_seconds)
        stopper = Stopper(
            RowState(Experience((0.9,))),
            choice,
            behind=lambda draft, most: asked.append(draft) or [acceptance][:most],
        )
        goes = stopper.goes_on(0.99, ahead, (7,))
        assert stopper.stopped == ("" if goes else "cost")
        return goes

    # The pass gains 0.6 of a token, and the place in the verify pass costs 0.1 either way.
    assert going(0.5)
    assert not going(0.95)
    assert going(0.0)
    assert asked == [(7,)] * 3
    assert going(0.95, ahead=True)  # it has run
    assert not going(0.0, draft_seconds=0.5)
    assert asked == [(7,)] * 3  # nor is anything looked up for what does not pay anyway


def test_rows_share_a_draft_pass_or_none_of_them_goes_on():
    controller = Controller(table(0.4, slope=0.0), follows_clock=False)
    choice = Choice("early_exit", 8, rate=2.0, draft_seconds=0.4)

    def stopper(*, shares: bool) -> Stopper:
        return Stopper(RowState(Experience((0.8,))), choice, shares=shares)

    alone = stopper(shares=False)
    assert not alone.goes_on(0.9)
    assert 0.0 < alone.gain < 2.0 * 0.4
    assert alone.stopped == "cost"
    assert controller.going_on([alone], CONTEXT) == [False]
    together = [stopper(shares=True) for _ in range(4)]
    assert all(s.goes_on(0.9) for s in together)
    assert controller.going_on(together, CONTEXT, rows=4, verified=8) == [True] * 4
    assert not any(s.stopped for s in together)


def padded(*, tile: int) -> CostTable:
    """Passes that take as long for a token as for a whole tile; drafts cost next to nothing."""
    rows = tuple(range(1, 65))
    line = tuple(1.0 + 0.4 * ((r - 1) // tile) for r in rows)
    free = Curve((1,), (0,), ((0.0,),))
    draft = Curve((1, 64), (0,), ((0.01, 0.01),))
    return CostTable(draft, free, Curve(rows, (0,), (line,)), 0.0, 1, {})


def beside_others(choice: Choice, *confidences: float) -> list[Stopper]:
    """Rows of one round, each with a token that was drafted with such a confidence."""
    made = [Stopper(RowState(Experience((0.6,))), choice, shares=True) for _ in confidences]
    assert all(s.goes_on(c) for s, c in zip(made, confidences, strict=True))
    return made


def test_what_is_free_in_a_padded_verify_pass_is_drafted_and_what_fills_no_tile_is_not():
    controller = Controller(padded(tile=8), follows_clock=False)
    choice = Choice("early_exit", 8, rate=4.0)

    def going(*confidences: float, verified: int, others: int = 0) -> list[bool]:
        stoppers = beside_others(choice, *confidences)
        rows = len(stoppers) + others
        return controller.going_on(stoppers, CONTEXT, rows=rows, verified=verified, others=others)

    # Of eight positions six are taken: two more cost their draft. The ninth costs 1.6 tokens.
    assert going(0.3, 0.3, verified=6) == [True, True]
    assert going(0.3, 0.3, verified=8) == [False, False]
    # One is free, and goes to the surer of two.
    assert going(0.3, 0.6, verified=7) == [False, True]
    # A tile that both fill for two passes pays, and what others draft in any case costs nobody.
    assert going(0.99, 0.99, verified=8) == [True, True]
    assert going(0.99, 0.99, verified=16, others=1) == [True, True]
    assert going(0.1, 0.1, verified=16, others=1) == [False, False]


def test_passes_that_others_need_in_any_case_are_charged_to_nobody():
    """Those after the next one, too."""
    rows = tuple(range(1, 65))
    verify = Curve(rows, (0,), (tuple(1.0 + 0.4 * ((r - 1) // 8) for r in rows),))
    draft = Curve((1, 64), (0,), ((0.2, 0.2),))
    free = Curve((1,), (0,), ((0.0,),))
    controller = Controller(CostTable(draft, free, verify, 0.0, 1, {}), follows_clock=False)
    # A tile pays over two passes if another row needs these passes, too, and not if none does.
    for others in (0, 1):
        stoppers = beside_others(Choice("early_exit", 8, rate=3.5), 0.95, 0.95)
        shape = {"rows": 2 + others, "verified": 8, "others": others}
        assert controller.going_on(stoppers, CONTEXT, **shape) == [others > 0] * 2


def test_why_a_row_among_others_drafts_no_further():
    """By its confidence where others go on; else by what a pass costs, or by what it is worth."""
    controller = Controller(padded(tile=8), follows_clock=False)
    choice = Choice("early_exit", 8, rate=4.0, verify_seconds=(0.075,) * 8)

    def stopped(*confidences: float, verified: int) -> list[str]:
        stoppers = beside_others(choice, *confidences)
        controller.going_on(stoppers, CONTEXT, rows=len(stoppers), verified=verified)
        return [s.stopped for s in stoppers]

    assert stopped(0.3, 0.6, verified=7) == ["confidence", ""]
    assert stopped(0.65, 0.3, verified=8) == ["cost", "confidence"]


def test_calibration_learns_what_confidence_means():
    calibration, random = Calibration(), Random(0)
    for _ in range(3000):
        for confidence, chance in ((0.15, 0.5), (0.55, 0.75), (0.99, 0.9)):
            accepted = random.random() < chance
            calibration.add(confidence, calibration.chance(confidence), accepted)
    assert calibration.chance(0.15) == pytest.approx(0.5, abs=0.05)
    assert calibration.chance(0.99) == pytest.approx(0.9, abs=0.05)
    assert calibration.told.error < 0.03
    assert calibration.chance(0.35) == pytest.approx(0.35)  # none was so sure: it is believed


def test_a_known_calibration_is_where_it_begins():
    known = ((0.05, 0.5), (0.35, 0.8), (0.95, 0.98))
    calibration = Calibration(known)
    assert calibration.chance(0.05) == pytest.approx(0.5)
    assert calibration.chance(0.2) == pytest.approx(0.65)  # between points it is linear
    assert calibration.chance(0.999) == pytest.approx(0.98)  # and beyond them as at the last one
    again = Calibration(calibration.points)
    assert dict(again.points) == pytest.approx(dict(calibration.points))
    for _ in range(5):
        calibration.add(0.35, 0.8, accepted=False)
    assert 0.6 < calibration.chance(0.35) < 0.7  # it takes 20 tokens to halve it
    for _ in range(100):
        calibration.add(0.35, 0.8, accepted=False)
    assert calibration.chance(0.35) < 0.2
    assert calibration.chance(0.05) == pytest.approx(0.5)


def test_greedy_and_sampled_drafts_have_each_their_calibration():
    known = {"greedy": ((0.5, 0.9),), "sampled": ((0.5, 0.7),)}
    controller = Controller(table(), calibration=known)
    kinds = {"greedy": 0.9, "coupled": 0.7, "token": 0.7, "block": 0.7}
    for kind, chance in kinds.items():
        assert controller.row(kind).chance(0.3) == pytest.approx(chance)
    unknown = Controller(table(), calibration={"greedy": ((0.5, 0.9),)}).row("coupled")
    assert unknown.chance(0.3) == Controller(table()).row("coupled").chance(0.3)


def test_a_stretch_of_luck_says_little_of_a_request():
    """What a confidence is worth in a text is steadier than whether its next tokens are right."""
    state = RowState(Experience((0.8,)))
    for i in range(200):
        state.add_draft([i % 4 > 0], [0.7])
    before = state.chance(0.7) / state.shared.calibration.chance(0.7)
    state.add_draft([True] * 12, [0.7] * 12)
    assert 1.0 < state.chance(0.7) / state.shared.calibration.chance(0.7) / before < 1.04


def test_the_calibration_error_is_of_the_chances_that_were_told():
    """In a batch other rows are judged between a row's draft and its own judgement."""
    controller = Controller(table(c=0.2), [0.8])
    state = controller.row("greedy", greedy=True)
    choice = Choice("early_exit", 2, 1.0, (0.1,) * 16, 0.2, 1.0)
    controller.observe_draft(
        state, choice, CONTEXT, [True, False], [0.9, 0.9], [0.75, 0.65], num_passes=2
    )
    assert controller.calibration_error("greedy") == pytest.approx((0.25 + 0.65) / 2)


def test_calibration_error_is_the_gap_between_told_and_true():
    told = ToldChances()
    for i in range(100):
        told.add(0.9, i % 2 == 0)
    assert told.error == pytest.approx(0.4)
    assert ToldChances().error == ToldChances().error_by_chance == 0.0


def test_the_error_that_right_chances_show_by_chance():
    """Of as few tokens as a request has it is far from 0, and smaller the more there are."""
    draw = Random(0)

    def told(tokens):
        chances = ToldChances()
        for chance in (draw.choice((0.25, 0.55, 0.85)) for _ in range(tokens)):
            chances.add(chance, draw.random() < chance)
        return chances

    for tokens, wanted in ((60, 0.08), (6000, 0.008)):
        some = [told(tokens) for _ in range(200)]
        by_chance = statistics.mean(c.error_by_chance for c in some)
        assert by_chance == pytest.approx(wanted, rel=0.1)
        assert statistics.mean(c.error for c in some) == pytest.approx(by_chance, rel=0.1)


def test_estimates_start_from_what_requests_have_in_common_and_depart_from_it():
    shared = Experience((0.6,))
    poor, other = RowState(shared), RowState(shared)
    assert poor.acceptance(0) == pytest.approx(0.6)
    for _ in range(30):
        poor.add_draft([False], [])
    assert poor.acceptance(0) < 0.1
    assert poor.acceptance(0) < other.acceptance(0) < 0.6
    for _ in range(300):
        other.add_draft([True] * 4, [])
    assert 0.9 < other.acceptance(2) <= LARGEST


def test_look_ups_as_good_as_others_say_nothing_of_a_request():
    state, poor = RowState(Experience((0.6,))), lookup_confidence(1, True)
    for i in range(40):
        state.add_lookup(1, [i % 20 in (3, 10, 16)], stored=True)
    assert poor == pytest.approx(3 / 20)
    told = state.lookup_survivals(20, False, 1)
    assert told == pytest.approx([lookup_confidence(20, False)], 0.1)


def test_what_a_store_offered_says_nothing_of_a_text_s_own_look_ups():
    state, other = (RowState(Experience((0.6,))) for _ in range(2))
    for stored in (True, False):
        told = state.lookup_survivals(4, stored, 1)
        assert told == pytest.approx([lookup_confidence(4, stored)])
    for _ in range(20):
        state.add_lookup(4, [False], stored=True)
    own, stored = (state.shared.lookup_acceptance(2, kind) for kind in (False, True))
    assert own == other.shared.lookup_acceptance(2, False)
    assert stored < 0.5 * other.shared.lookup_acceptance(2, True)


def test_look_ups_that_are_never_right_are_given_up_and_come_back():
    """However cheap a second token is thought to be: what was expected of them wears off."""
    shared = Experience((0.6,))
    for _ in range(4):
        state = RowState(shared)
        for _ in range(100):
            state.add_lookup(LONGEST_MATCH, [False], stored=False)
    assert shared.lookup_acceptance(bin_of_match(LONGEST_MATCH, 0), False) < 0.01
    assert RowState(shared).lookup_survivals(LONGEST_MATCH, False, 1) == []
    for _ in range(10):
        state.add_lookup(LONGEST_MATCH, [True], stored=False)
    assert state.lookup_survivals(LONGEST_MATCH, False, 1)[0] > 0.1


def test_right_tokens_lengthen_a_match():
    """The second looked-up token, if the first is right, is the first one after a longer match."""
    state = RowState(Experience((0.6,)))
    wanted = [lookup_confidence(length, False) for length in (1, 2, 3, 4)]
    assert len(set(wanted)) == 3
    told = state.lookup_survivals(1, False, 4)
    assert told == pytest.approx(list(itertools.accumulate(wanted, operator.mul)))
    for _ in range(50):
        state.add_lookup(1, [True, False], stored=False)
    one, two, three = (state.shared.lookup_acceptance(i, False) for i in (0, 1, 2))
    assert (one > 0.9, two < 0.1, three) == (True, True, wanted[2])
    assert lookup_confidence(LONGEST_MATCH, False, ahead=9) < lookup_confidence(FORCED_MATCH, False)


def test_told_chances_are_those_before_any_token_of_the_draft_was_judged():
    state = RowState(Experience((0.6,)))
    given = [state.chance(confidence) for confidence in (0.3, 0.3, 0.35)]
    state.add_draft([True] * 3, (0.3, 0.3, 0.35))
    assert state.shared.calibration.told.error == pytest.approx(1.0 - statistics.mean(given))


@pytest.mark.parametrize(("fixed", "drafted"), [((), 1), ((0,), 0)])
def test_a_row_that_drafts_nothing_emits_a_token_all_the_same(fixed, drafted):
    """Half a token for 0.3 of a pass gains where it is one row's, and loses where it is two's."""
    controller = Controller(table(0.3, slope=0.0), (0.5, 0.01), follows_clock=False)
    ask = Ask(controller.row("text"), CONTEXT, 8)
    ask.state.claim(0.0)  # nothing pays for a probe
    (choice,) = controller.choose([ask], drafts=True, fixed=fixed)
    assert (choice.source == "early_exit") == bool(drafted)
    assert ask.state.last == drafted


@pytest.mark.parametrize(("others", "drafted"), [((), 0), ((0,), 0), ((1,), 1), ((6,), 2)])
def test_draft_passes_that_others_run_in_any_case_cost_a_row_nothing_more(others, drafted):
    """Of one row and of several they take the same here."""
    pace = Pace(PassTimes(table(0.3, slope=0.0)), CONTEXT, 2 + len(others))
    found = split(pace, [[0.3, 0.2], []], [(0, 0.0)] * 2, others)
    assert list(found.drafted) == [drafted, 0]
    tokens = pace.num_rows + sum([0.3, 0.2][:drafted])
    assert found.rate == pytest.approx(tokens / (pace.verify(8) + 0.3 * max([0, *others])))


def test_no_probe_follows_one_that_is_not_judged():
    controller = Controller(table(0.2), (0.01,), follows_clock=False)
    state = controller.row("text")
    state.shared.credit = 1.0
    ask = Ask(state, CONTEXT, 8)
    probes = []
    for _ in range(3):  # as where the device is a round ahead: nothing is observed between
        controller.choose([ask], drafts=True)
        probes.append(state.probing)
    assert probes == [True, False, True]


def test_kinds_of_requests_learn_apart():
    controller = Controller(table(), follows_clock=False)
    for _ in range(50):
        controller.row("greedy").add_draft([False], [0.5])
    assert controller.row("greedy").acceptance(0) < 0.2 < controller.row("coupled").acceptance(0)
    assert controller.calibration_error("greedy") > 0.0 == controller.calibration_error("block")
    by_chance = controller.calibration_error_by_chance
    assert by_chance("greedy") > 0.0 == by_chance("block")


def test_tokens_that_are_drawn_cost_more_than_the_likeliest():
    """Drawing takes as long as the draft's layers: half as many tokens pay."""
    cost = replace(table(0.1, slope=0.0), sampling=0.1, greedy_sampling=0.0)
    controller = Controller(cost, (0.7,), follows_clock=False)
    assert controller.times.draft(1, CONTEXT, greedy=True) == pytest.approx(0.1)
    assert controller.times.draft(1, CONTEXT) == pytest.approx(0.2)
    assert controller.times.verify(3, CONTEXT, greedy=True) == pytest.approx(1.0)
    assert controller.times.verify(3, CONTEXT) == pytest.approx(1.3)

    def drafted(*greedy: bool) -> list[int]:
        states = [controller.row("greedy", greedy=one) for one in greedy]
        asks = [Ask(state, CONTEXT, 30) for state in states]
        controller.choose(asks, drafts=True)
        return [state.last for state in states]

    assert drafted(True)[0] > drafted(False)[0] > 0
    # One row that draws makes the others careful, too: passes are shared.
    assert drafted(True, False)[0] == drafted(False, False)[0]


def test_rows_probe_together_only_if_each_kind_of_request_can_pay():
    controller = Controller(table(0.2, slope=0.0), (0.01,), follows_clock=False)
    states = [controller.row("greedy", 0), controller.row("coupled", 0)]
    asks = [Ask(state, CONTEXT, 30) for state in states]
    states[0].shared.credit, states[1].shared.credit = 1.0, 0.0
    assert [c.num_draft_tokens for c in controller.choose(asks, drafts=True)] == [0, 0]
    states[1].shared.credit = 1.0
    assert [c.num_draft_tokens for c in controller.choose(asks, drafts=True)] == [1, 1]


def test_what_a_round_may_lose_is_reckoned_once(monkeypatch):
    known = mock.Mock(wraps=layerskip.controller.loss_allowed)
    monkeypatch.setattr(layerskip.controller, "loss_allowed", known)
    controller = Controller(table(0.1), prior=(0.9,), follows_clock=False)
    asks = [Ask(controller.row("greedy", 64), CONTEXT, 60) for _ in range(2)]
    assert all(c.num_draft_tokens for c in controller.choose(asks, drafts=True))
    assert known.call_count == 1
