"""Rows whose drafts are seldom right, beside others whose drafts are: neither keeps the other
waiting for long."""

from dataclasses import replace
from itertools import cycle, islice
from random import Random

import pytest
from controlling import CONTEXT, Request, judged, paper, steady, table

import layerskip.control.ending
from layerskip.control.asks import Ask
from layerskip.control.ending import IN_DOUBT, Ending
from layerskip.control.pace import Pace, Split
from layerskip.control.pass_times import PassTimes
from layerskip.controller import Controller
from layerskip.cost import RECORDED

COSTS = {"padded": table(0.2), "by rows": table(0.3, quantum=1, slope=0.005)}


def mixed(acceptances, rows):
    """A batch that nobody joins."""
    each = islice(cycle(acceptances), rows)
    return [Request(64, lambda _, chance=chance: chance) for chance in each]


def time_of(run, acceptances, rows, *, batches=6):
    for _ in range(batches):
        run.run(mixed(acceptances, rows), rows=rows)
    return run.seconds


MIXED = [(0.95, 0.05), (0.9, 0.9, 0.3, 0.0), (0.9, 0.9, 0.9, 0.0)]


@pytest.mark.parametrize("rows", [4, 8, 16])
@pytest.mark.parametrize("acceptances", MIXED, ids=str)
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_a_mixed_batch_ends_little_later_than_plainly(cost, acceptances, rows):
    """Up to a third later, by the most tokens a second."""
    auto, plain = (time_of(paper(cost, fixed), acceptances, rows) for fixed in (None, 0))
    assert auto < 1.041 * plain


@pytest.mark.parametrize("rows", [4, 8, 16])
@pytest.mark.parametrize("acceptances", MIXED, ids=str)
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.one_in(6)
def test_mixed_batches_of_other_texts_end_little_later_too(cost, acceptances, rows):
    """3 % is the aim, the worst of these 3.5."""
    auto, plain = (
        sum(time_of(replace(paper(cost, k), seed=seed), acceptances, rows) for seed in range(3))
        for k in (None, 0)
    )
    assert auto < 1.036 * plain


@pytest.mark.parametrize("rows", [2, 8, 16])
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.one_in(2)
def test_rows_that_are_alike_keep_nobody_waiting(cost, rows, monkeypatch):
    held = paper(cost).run(steady(0.8, count=48), rows=rows)
    monkeypatch.setattr(Ending, "within", lambda _, found: found)
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


def test_a_row_that_drafts_nothing_has_no_part_in_the_rate():
    """Though its drafts would be good: that is for the rounds to come."""
    less = ending([GOOD, [0.5, 0.2], GOOD]).within(Split([4, 4, 0], [0, 0, 0], 9.0))
    count = less.drafted[0]
    assert list(less.drafted) == [count, count, 0]
    assert 0 < count < 4
    seconds = Pace(PassTimes(COSTS["by rows"]), CONTEXT, 3).round(less.drafted, 3 + 2 * count, 3)
    emitted = 3 + sum(GOOD[:count]) + sum([0.5, 0.2][:count])
    assert less.rate == pytest.approx(emitted / seconds)


def test_rounds_take_less_once_rows_have_left():
    """Then the last one makes up for what it waited."""
    found = Split([1, 0], [0, 0], 1.0)
    assert ending([[0.99], []], cost=table(0.01, quantum=1, slope=0.2)).within(found) is found


def test_nobody_waits_for_a_row_that_is_nearly_done():
    found = Split([4, 0], [0, 0], 1.0)
    assert not any(ending([GOOD, []]).within(found).drafted)
    assert ending([GOOD, []], left=[60, 4]).within(found) is found


@pytest.mark.parametrize("left", [3, 600])
def test_rows_wait_where_that_ends_the_batch_no_later(left):
    """Those that draft are done at once, or are the last."""
    found = Split([4, 0], [0, 0], 1.0)
    assert ending([GOOD, []], left=[left, 120]).within(found) is found


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


def among(hopeless, *, requests=40):
    """What is known once so many requests are over, of which this share was hopeless."""
    controller = Controller(table(0.2, slope=0.0), follows_clock=False)
    chance = Random(0)
    for i in range(requests):
        state = controller.row("greedy")
        acceptance = 0.02 if i % 10 < 10 * hopeless else 0.8
        for _ in range(20):
            state.add_draft(judged([chance.random() < acceptance for _ in range(3)]), ())
        state.end(64)
    return controller


def tried(controller, *, wrong=0, right=0):
    state = controller.row("greedy")
    for _ in range(wrong):
        state.add_draft([False], ())
    for _ in range(right):
        state.add_draft([True] * 4, ())
    return state


def test_neighbours_of_a_hopeless_row_draft_no_more_than_it_bears():
    controller = among(0.3)
    state, good = tried(controller, wrong=10), tried(controller, right=4)

    def drafted(*lefts):
        asks = [Ask(s, CONTEXT, 16, left=n) for s, n in zip((state, good), lefts, strict=True)]
        choices = controller.choose(asks, drafts=True)
        return [c.num_draft_tokens for c in choices]

    assert drafted(60, 60) == [0, 0]
    good.wakes(drafts=True)
    assert drafted(2, 60)[1] > 1  # it is nearly done


def test_rounds_are_short_while_a_row_may_be_hopeless():
    """Whatever confidence says: a draft's first token tells as much of it as its fourth."""
    controller = among(0.3)
    new, good = controller.row("greedy"), tried(controller, right=4)
    asks = [Ask(s, CONTEXT, 16, left=60) for s in (new, good)]
    choices = controller.choose(asks, drafts=True)
    assert [c.num_draft_tokens for c in choices] == [new.last, good.last]
    assert 1 <= max(new.last, good.last) <= (IN_DOUBT - 1.0) / 0.2
    new.add_draft([True] * 3, ())
    new.add_draft([True] * 3, ())
    controller.choose(asks, drafts=True)
    assert good.last > (IN_DOUBT - 1.0) / 0.2


def test_one_token_may_be_tried_whatever_a_round_takes():
    found = Split([4, 4], [0, 0], 1.0)
    cost = table(0.9, quantum=1, slope=0.0)
    sure = replace(ending([[0.99] * 4] * 2, cost=cost), doubted=True)
    assert list(sure.within(found).drafted) == [1, 1]


def test_nothing_is_tried_ahead_of_its_time_while_a_row_holds_the_others():
    controller = among(0.3)
    asks = [
        Ask(state, CONTEXT, 16, left=60)
        for state in (tried(controller, wrong=10), tried(controller, right=4))
    ]
    controller.choose(asks, drafts=True)
    assert [a.state.owed for a in asks] == [0, 0]


@pytest.mark.parametrize("rows", [2, 5, 9, 32])
def test_rows_that_leave_together_end_about_when_each_would(rows, monkeypatch):
    hopes = [[0.9 - 0.8 * i / rows, 0.5 - 0.4 * i / rows] for i in range(rows)]
    found = Split([2] * rows, [0] * rows, 1.0)
    batch = ending(hopes, left=[60 + i % 7 for i in range(rows)], cost=table(0.3, slope=0.02))
    some = batch._end(found, found.drafted, 2)
    monkeypatch.setattr(layerskip.control.ending, "STAGES", rows)
    each = batch._end(found, found.drafted, 2)
    assert some == pytest.approx(each, rel=0.02)
    assert (some == each) == (rows <= 5)
