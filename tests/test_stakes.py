"""What requests may lose with drafts, and that none loses more, on paper as in test_controller."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from controlling import (
    CONTEXT,
    COSTS,
    Request,
    against_plain,
    guessed,
    paper,
    plain_rate,
    steady,
    table,
)

from layerskip.control.asks import Ask
from layerskip.control.estimates import RowState
from layerskip.control.pace import LOOKING
from layerskip.control.stopping import Choice
from layerskip.controller import Controller
from layerskip.cost import Curve
from layerskip.lookup import FORCED_MATCH, LONGEST_MATCH, NO_GUESS


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


def test_a_request_that_its_limit_ended_says_only_that_others_are_no_shorter():
    """After a warm-up of one token the next text stakes as much as the first one would."""
    controller = Controller(table(0.2))
    begun = controller.row("greedy", 64).stake
    controller.row("greedy", 1).end(1)
    assert controller.row("greedy", 64).stake == begun
    controller.row("greedy", 64).end(5)
    shared = controller.row("greedy", 64).shared
    controller.row("greedy", 3).end(3)
    assert shared.usual_length == 5
    controller.row("greedy", 25).end(25)
    assert shared.usual_length == pytest.approx(7.0)


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


@pytest.mark.parametrize("alone", [True, False])
def test_a_draft_of_a_row_by_itself_is_charged_what_clocks_have_seen_it_take(alone):
    """A first table had draft passes at 0.8 of that: each request would lose more than it may."""
    controller = Controller(table(0.2, quantum=1))
    state, times = controller.row("greedy", 64, greedy=True), controller.times
    (choice,) = controller.choose([Ask(state, CONTEXT, 1)], drafts=True)
    tabled, stake = -choice.gained(0, 1, 1) / choice.plain_seconds, state.stake
    draft, verify = times.draft(1, CONTEXT), times.verify(2, CONTEXT)
    times.observe_phases(1.25 * draft, verify, draft, verify, 2, 1)
    controller.observe_draft(state, choice, CONTEXT, [False], [0.5], num_passes=1, alone=alone)
    (again,) = controller.choose([Ask(state, CONTEXT, 1)], drafts=True)
    now = -again.gained(0, 1, 1) / again.plain_seconds
    assert now > 1.15 * tabled
    assert stake - state.stake == pytest.approx(now if alone else tabled)


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
    ask = Ask(state, CONTEXT, 9, guessed(9, match_length))
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


@pytest.mark.parametrize(("held", "credit"), [(False, 0.3), (True, 0.3 - 0.17)])
def test_a_probe_beside_a_row_that_is_waited_for_costs_all_that_it_took(held, credit):
    """What it gained for one row makes the batch end no sooner."""
    controller = Controller(table(0.2, slope=0.0), follows_clock=False)
    state = controller.row("greedy", 0)
    state.probing, state.stake, state.shared.credit = True, 1.0, 0.3
    how = {"draft_seconds": 0.15, "verify_seconds": (0.02,), "held": held}
    choice = Choice("early_exit", 1, plain_seconds=1.0, **how)
    controller.observe_draft(state, choice, CONTEXT, [True], [0.5], num_passes=1)
    assert (state.stake, state.shared.ledger) == pytest.approx((1.83, 0.83))
    assert state.shared.credit == pytest.approx(credit)


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
    ask = Ask(controller.row("greedy", 40), CONTEXT, 30, guessed(6, 20))
    assert controller.choose([ask], drafts=True)[0].source == "lookup"
    assert ask.state.shared.credit == 0.0
    found = controller.choose([replace(ask, guess=NO_GUESS)], drafts=True)[0]
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
