"""Rows whose drafts are seldom right, beside others whose drafts are: neither keeps the other
waiting for long."""

from dataclasses import replace
from itertools import cycle, islice

import pytest
from controlling import CONTEXT, Request, paper, steady, table

import layerskip.estimates as estimates
from layerskip.asks import Ask
from layerskip.controller import Controller
from layerskip.cost import RECORDED
from layerskip.ending import Ending
from layerskip.pace import Pace, Split
from layerskip.pass_times import PassTimes
from layerskip.stopping import Choice

COSTS = {"padded": table(0.2), "by rows": table(0.3, quantum=1, slope=0.005)}


def mixed(acceptances, rows):
    """A batch that nobody joins."""
    each = islice(cycle(acceptances), rows)
    return [Request(64, lambda _, chance=chance: chance) for chance in each]


def time_of(run, acceptances, rows, *, batches=6):
    for _ in range(batches):
        run.run(mixed(acceptances, rows), rows=rows)
    return run.seconds


@pytest.mark.parametrize("rows", [4, 8, 16])
@pytest.mark.parametrize(
    "acceptances", [(0.95, 0.05), (0.9, 0.9, 0.3, 0.0), (0.9, 0.9, 0.9, 0.0)], ids=str
)
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_a_mixed_batch_ends_little_later_than_plainly(cost, acceptances, rows):
    """Up to a third later, by the most tokens a second."""
    auto, plain = (time_of(paper(cost, fixed), acceptances, rows) for fixed in (None, 0))
    assert auto < 1.08 * plain


@pytest.mark.parametrize("rows", [2, 8, 16])
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.one_in(2)
def test_rows_that_are_alike_keep_nobody_waiting(cost, rows, monkeypatch):
    held = paper(cost).run(steady(0.8, count=48), rows=rows)
    monkeypatch.setattr(estimates, "PATIENCE", 1e9)
    free = paper(cost).run(steady(0.8, count=48), rows=rows)
    assert held.seconds == pytest.approx(free.seconds, rel=0.02)


def ending(hopes, *, left=None, offers=None, others=(), cost=COSTS["by rows"]):
    rows = len(hopes)
    pace = Pace(PassTimes(cost), CONTEXT, rows + len(others))
    return Ending(pace, hopes, offers or [(0, 0.0)] * rows, left or [60] * rows, others)


GOOD = [0.9, 0.8, 0.7, 0.6]


def test_drafts_are_as_long_as_the_last_row_can_bear():
    """Draft passes take 0.3 each, and the last row emits 1.7 tokens: it bears two, and no third."""
    found = Split([4, 4], [0, 0], 1.0)
    assert ending([GOOD, GOOD]).within(found) is found
    less = ending([GOOD, [0.5, 0.2]]).within(found)
    assert less.is_less
    assert list(less.drafted) == [2, 2]
    assert list(ending([GOOD, [0.1]]).within(found).drafted) == [0, 0]


def test_what_is_left_has_its_rate():
    """That of all rows, of which those with fixed numbers emit a token in any case."""
    less = ending([GOOD, [0.5, 0.2]], others=(0,)).within(Split([4, 4], [0, 0], 9.0))
    assert list(less.drafted) == [2, 2]
    seconds = Pace(PassTimes(COSTS["by rows"]), CONTEXT, 3).round([2, 2, 0], 7, 3)
    assert less.rate == pytest.approx((1 + 0.9 + 0.8 + 1 + 0.5 + 0.2 + 1) / seconds)


def test_rounds_take_less_once_rows_have_left():
    """Then the last one makes up for what it waited."""
    found = Split([1, 0], [0, 0], 1.0)
    assert ending([[0.99], []], cost=table(0.05, quantum=1, slope=0.2)).within(found) is found


def test_nobody_waits_for_a_row_that_is_nearly_done():
    found = Split([4, 0], [0, 0], 1.0)
    assert not any(ending([GOOD, []]).within(found).drafted)
    assert ending([GOOD, []], left=[60, 4]).within(found) is found


@pytest.mark.parametrize("left", [4, 600])
def test_rows_wait_where_that_ends_the_batch_no_later(left):
    """Those that draft are done at once, or are the last."""
    found = Split([4, 0], [0, 0], 1.0)
    assert ending([GOOD, []], left=[left, 60]).within(found) is found


def test_a_row_that_looks_up_is_not_waited_for():
    found = Split([4, 0], [0, 5], 1.0)
    assert ending([GOOD, []], offers=[(0, 0.0), (5, 4.0)]).within(found) is found


def test_what_is_looked_up_is_left_as_it_is():
    found = Split([4, 0, 0], [0, 5, 0], 1.0)
    less = ending([GOOD, [], []], offers=[(0, 0.0), (5, 4.0), (0, 0.0)]).within(found)
    assert list(less.drafted) == [0, 0, 0]
    assert list(less.looked_up) == [0, 5, 0]


def test_what_others_draft_in_any_case_is_no_reason_to_wait():
    """Their tokens make a draft's round longer, and the round without it."""
    found = Split([1, 1], [0, 0], 1.0)
    assert not any(ending([GOOD, [0.26]]).within(found).drafted)
    assert ending([GOOD, [0.26]], others=(6, 6)).within(found) is found


def test_all_rows_of_a_recorded_round_go_through_all_passes():
    cost = COSTS["by rows"]
    paces = [
        Pace(PassTimes(replace(cost, key=key)), CONTEXT, 4) for key in ({}, {"passes": RECORDED})
    ]
    by_host, recorded = (p.round([3, 1, 0, 0], 8, 4) for p in paces)
    verify = [cost.verify_pass(n, CONTEXT, sequences=4) for n in (8, 16)]
    draft = [cost.draft_pass(n, CONTEXT, sequences=n, late=True) for n in (1, 2, 4)]
    assert by_host == pytest.approx(verify[0] + draft[1] + 2 * draft[0])
    assert recorded == pytest.approx(verify[1] + 3 * draft[2])
    assert paces[1].round([0, 0, 0, 0], 4, 4) == pytest.approx(paces[1].verify(4))


def test_a_row_falls_behind_by_what_rounds_take_beyond_what_it_emits():
    controller = Controller(table(0.2))
    state = controller.row("greedy")
    controller.observe_plain(state, Choice("none", 0, plain_seconds=1.0, plain_rounds=1.5), CONTEXT)
    assert state.behind == pytest.approx(0.5)
    choice = Choice("early_exit", 2, plain_seconds=1.0, plain_rounds=1.5)
    controller.observe_draft(state, choice, CONTEXT, [True, False], [0.5, 0.5], num_passes=2)
    assert state.behind == pytest.approx(0.0)
    choice = Choice("lookup", 3, plain_seconds=1.0, plain_rounds=1.5)
    controller.observe_lookup(state, choice, CONTEXT, 3, 3)
    assert state.behind == pytest.approx(-2.5)


def test_choices_say_what_their_round_takes():
    controller = Controller(table(0.2, slope=0.0), follows_clock=False)
    asks = [Ask(controller.row("greedy"), CONTEXT, room) for room in (16, 0)]
    first, second = controller.choose(asks, drafts=True)
    drafted = asks[0].state.last
    assert drafted > 1
    assert first.num_draft_tokens > drafted  # its confidence ends it
    assert second.num_draft_tokens == 0
    assert first.plain_rounds == second.plain_rounds == pytest.approx(1 + 0.2 * drafted)
    (alone,) = controller.choose([Ask(controller.row("greedy"), CONTEXT, 16)], drafts=True)
    assert alone.plain_rounds == 1.0


def test_what_others_draft_in_any_case_keeps_no_row_behind():
    controller = Controller(table(0.2, quantum=1, slope=0.5), (0.95,), follows_clock=False)
    asks = [Ask(controller.row("greedy"), CONTEXT, 1) for _ in range(2)]
    choices = controller.choose(asks, drafts=True, fixed=[6])
    assert [c.num_draft_tokens for c in choices] == [1, 1]
    verify = 1 + 0.5 * 8, 1 + 0.5 * 10  # of 9 and 11 tokens
    one, three = 0.2, 0.2 * (1 + 0.5 * 2)  # rows of a draft pass
    ratio = (verify[1] + three + 5 * one) / (verify[0] + 6 * one)
    assert choices[0].plain_rounds == pytest.approx(ratio)


def test_no_draft_pass_is_waited_for_where_nothing_but_look_ups_drafts():
    controller = Controller(table(0.2, quantum=1, slope=0.05), follows_clock=False)
    asks = [Ask(controller.row("greedy"), CONTEXT, 16, num_guessed=4, match_length=64)]
    (choice,) = controller.choose(asks, drafts=False, fixed=[6])
    assert (choice.source, choice.num_draft_tokens) == ("lookup", 4)
    assert choice.plain_rounds == pytest.approx((1 + 0.05 * 11) / (1 + 0.05 * 7))


def late(controller, *, wrong, beside):
    """A row whose drafts were wrong so often, that has waited; its neighbours' were right."""
    state = controller.row("greedy")
    for _ in range(wrong):
        state.add_draft([False], [0.5])
    state.behind = 4.0
    for _ in range(beside):
        controller.row("greedy").add_draft([True] * 8, [0.9] * 8)
    return state


def test_a_late_rows_neighbours_draft_no_more_than_it_bears():
    controller = Controller(table(0.2, slope=0.0), follows_clock=False)
    state = late(controller, wrong=10, beside=4)
    good = controller.row("greedy")

    def drafted(*lefts):
        asks = [Ask(s, CONTEXT, 16, left=n) for s, n in zip((state, good), lefts, strict=True)]
        choices = controller.choose(asks, drafts=True)
        return [c.num_draft_tokens for c in choices]

    assert drafted(60, 60) == [0, 0]
    good.wakes(drafts=True)
    assert drafted(2, 60)[1] > 1  # it is nearly done
    state.behind = 0.0
    assert drafted(60, 60)[1] > 1  # it has not waited


def test_confidence_makes_no_draft_longer_than_a_late_row_bears():
    controller = Controller(table(0.2, slope=0.0), follows_clock=False)
    state, good = late(controller, wrong=2, beside=4), controller.row("greedy")
    asks = [Ask(s, CONTEXT, 16, left=60) for s in (state, good)]
    choices = controller.choose(asks, drafts=True)
    assert 0 < choices[1].num_draft_tokens == good.last < 4


def test_few_wrong_drafts_of_one_of_many_rows_are_bad_luck():
    controller = Controller(table(0.2, slope=0.0), follows_clock=False)
    state = late(controller, wrong=2, beside=0)
    others = state.survivals(1)[0] / state._ratio.value  # where nothing is known of it
    assert state.hopes(1, 32)[0] > state.hopes(1, 2)[0]
    assert state.hopes(1, 32)[0] <= others
    state.behind = 0.0
    assert state.hopes(1, 2) == state.hopes(1, 32)
    assert state.hopes(1, 2)[0] > state.survivals(1)[0]


def test_nothing_is_tried_ahead_of_its_time_while_a_late_row_holds_the_others():
    controller = Controller(table(0.2, slope=0.0), follows_clock=False)
    state, good = late(controller, wrong=10, beside=4), controller.row("greedy")
    asks = [Ask(s, CONTEXT, 16, left=60) for s in (state, good)]
    controller.choose(asks, drafts=True)
    assert (state.owed, good.owed) == (0, 0)
