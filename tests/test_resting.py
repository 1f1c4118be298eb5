"""Rounds in which a row that drafts nothing is not even asked whether it should."""

from collections.abc import Sequence

from controlling import CONTEXT, guessed, table

from layerskip.control.asks import AWAKE_ONE_IN, MOST_AT_REST, Ask, speaks_for
from layerskip.control.estimates import RowState
from layerskip.control.experience import lookup_confidence
from layerskip.control.pace import LOOKING
from layerskip.control.stopping import Choice
from layerskip.controller import Controller


def resting_row() -> tuple[Controller, RowState]:
    controller = Controller(table(0.2, slope=0.0), (0.01,), follows_clock=False)
    state = controller.row("greedy", 0)  # nothing to stake, and nothing in advance
    state.shared.credit = 0.0
    assert controller.choose([Ask(state, CONTEXT, 30)], drafts=True)[0].source == "none"
    assert state.rests(1)
    return controller, state


def test_a_few_rounds_at_rest_are_not_thought_about(monkeypatch):
    controller, state = resting_row()
    state.shared.credit, thought, pace_of = -1.0, [], Controller._pace
    monkeypatch.setattr(
        Controller, "_pace", lambda *given, **of: thought.append(1) or pace_of(*given, **of)
    )
    for times in range(3):
        for _ in range(MOST_AT_REST):
            chosen = controller.choose([Ask(state, CONTEXT, 30)], drafts=True)[0]
            assert (chosen.source, chosen.plain_seconds) == ("none", 1.0)
        assert len(thought) == times
        controller.choose([Ask(state, CONTEXT, 30)], drafts=True)
    assert len(thought) == 3


def test_a_row_at_rest_takes_what_is_looked_up():
    controller, state = resting_row()
    state.shared.credit = 1.01 * LOOKING  # its passes take nothing more here
    ask = Ask(state, CONTEXT, 30, guessed(4, 20))
    assert controller.choose([ask], drafts=True)[0].source == "lookup"


def test_a_row_at_rest_is_thought_about_with_one_that_joins():
    """That has far more left, so that it need not wait for it."""
    controller, state = resting_row()
    joined = Controller(table(0.2), (0.95,)).row("greedy")
    asks = [Ask(state, CONTEXT, 30, left=2), Ask(joined, CONTEXT, 30, left=60)]
    assert [c.source for c in controller.choose(asks, drafts=True)] == ["none", "early_exit"]


def test_a_row_at_rest_probes_in_the_round_that_can_pay_for_it():
    """Neither later, for having rested, nor sooner."""
    controller, state = resting_row()
    drafted = []
    while not any(drafted) and len(drafted) < 100:
        controller.observe_plain(state, Choice("none", 0, plain_seconds=1.0), CONTEXT)
        drafted.append(
            controller.choose([Ask(state, CONTEXT, 30)], drafts=True)[0].source != "none"
        )
    # A draft pass is a fifth of a plain one, and a round earns a hundredth.
    assert len(drafted) == 20


def looking_up(num_rows: int, *, slope: float) -> tuple[Controller, list[RowState]]:
    """Rows whose looked-up tokens are never right; no drafts."""
    controller = Controller(table(quantum=1, slope=slope), follows_clock=False)
    states = [controller.row("greedy") for _ in range(num_rows)]
    for state in states:
        for match_length in (1, 4):
            for _ in range(20):
                state.add_lookup(match_length, [False], stored=False)
    return controller, states


def asked(states: Sequence[RowState], match_length: int) -> list[Ask]:
    return [Ask(s, CONTEXT, 30, guessed(4 * (match_length > 0), match_length)) for s in states]


def test_what_was_declined_is_not_weighed_again_but_more_is():
    controller, states = looking_up(2, slope=0.1)
    for state in states:
        for _ in range(8):
            state.add_lookup(20, [True] * 4, stored=False)
    short, longer, long = (asked(states, length) for length in (1, 4, 20))
    controller.choose(longer, drafts=False)
    for asks in (short, longer, asked(states, 0)):
        confidences = [speaks_for(a.guess) for a in asks]
        assert controller.at_rest(states, confidences) is not None
    assert controller.at_rest(states, [speaks_for(a.guess) for a in long]) is None
    assert {c.source for c in controller.choose(long, drafts=False)} == {"lookup"}
    # What is declined after that is weighed first.
    controller.choose(short, drafts=False)
    assert controller.at_rest(states, [speaks_for(a.guess) for a in longer]) is None


def test_rows_that_only_look_up_await_no_credit():
    controller, states = looking_up(2, slope=1.0)
    states[0].shared.credit = 100.0
    controller.choose(asked(states, 1), drafts=False)
    assert all(state.rests(2) for state in states)


def test_rows_rest_beside_one_whose_number_is_fixed():
    controller, states = looking_up(2, slope=1.0)
    controller.choose(asked(states, 1), drafts=False, fixed=(2,))
    assert controller.at_rest(states, [0.0, 0.0], beside=1) is not None
    assert controller.at_rest(states, [0.0, 0.0]) is None  # once that one has left
    assert controller.at_rest(states, [0.0, 0.0], beside=2) is None


def test_rows_of_two_kinds_rest_until_both_can_pay_for_a_probe():
    """It needs as much credit of each kind: with that of one of them nothing could be done."""
    controller = Controller(table(0.35), [0.05])
    states = [controller.row(kind, 60) for kind in ("greedy", "coupled")]
    for state in states:
        state.rest_for(MOST_AT_REST, 1.0, 1.0, beside=2)
    states[0].shared.credit, states[1].shared.credit = 2.0, 0.5
    assert controller.at_rest(states, [0.0, 0.0]) is not None
    states[1].shared.credit = 1.0
    assert controller.at_rest(states, [0.0, 0.0]) is None


def test_a_row_that_drafts_rests_no_more():
    """Even where it is as it was when it rested: by itself, with too little credit for a probe."""
    controller, state = resting_row()
    state.stake = 100.0
    for _ in range(40):
        state.add_draft([True] * 4, [])
    other = Ask(controller.row("greedy", 64), CONTEXT, 30)
    asks = [Ask(state, CONTEXT, 30), other]
    assert [c.source for c in controller.choose(asks, drafts=True)] == ["early_exit"] * 2
    assert [c.source for c in controller.choose(asks[:1], drafts=True)] == ["early_exit"]


def test_what_is_looked_up_ends_no_rest():
    controller, state = resting_row()
    state.shared.credit = 1.01 * LOOKING  # its passes take nothing more here
    ask = Ask(state, CONTEXT, 30, guessed(4, 20))
    assert controller.choose([ask], drafts=True)[0].source == "lookup"
    assert state.rests(1)


def test_a_stake_that_is_lost_puts_off_no_probe():
    """Nor does one that may not be spent keep a row awake."""
    for stake, prior in ((-2.0, 0.9), (-2.0, 0.01), (0.15, 0.01)):
        controller = Controller(table(0.2, slope=0.0), (prior,), follows_clock=False)
        state = controller.row("greedy", 0)
        state.stake, rounds, thought = stake, 0, 0
        while controller.choose([Ask(state, CONTEXT, 30)], drafts=True)[0].source == "none":
            thought += not state.rests(1)
            controller.observe_plain(state, Choice("none", 0, plain_seconds=1.0), CONTEXT)
            rounds += 1
        assert rounds == 20  # a draft pass is a fifth of a plain one, and a round earns a hundredth
        assert thought <= 2


def test_rest_is_over_when_another_row_has_ended():
    controller, states = looking_up(2, slope=1.0)
    controller.choose(asked(states, 1), drafts=False)
    assert states[0].rests(2)
    assert not states[0].rests(1)


def awake_rounds(controller: Controller, states: Sequence[RowState], match_length: int = 1) -> int:
    """Rounds of a rest in which tokens are looked up, after such a match was declined."""
    asks = asked(states, match_length)
    assert {c.source for c in controller.choose(asks, drafts=False)} == {"none"}
    awake = 0
    for _ in range(MOST_AT_REST):
        awake += not all(state.sleeps(len(states)) for state in states)
        assert controller.at_rest(states, [0.0] * len(states)) is not None
    return awake


def test_where_verifying_is_dear_most_rounds_at_rest_look_nothing_up():
    for slope, wanted in ((0.02, MOST_AT_REST), (1.0, MOST_AT_REST // AWAKE_ONE_IN)):
        controller, states = looking_up(2, slope=slope)
        assert awake_rounds(controller, states) == wanted
        assert not any(state.sleeps(2) for state in states)


def test_where_the_longest_match_was_declined_a_rest_looks_nothing_up():
    for match_length, wanted in ((16, MOST_AT_REST), (17, 0)):
        controller, states = looking_up(2, slope=0.02)
        for _ in range(20):
            states[0].add_lookup(match_length, [False], stored=False)
        assert awake_rounds(controller, states, match_length) == wanted


def test_rows_that_go_on_resting_are_looked_up_for_more_and_more_seldom():
    """Until one takes something: then each round again."""
    controller, states = looking_up(2, slope=0.02)
    seldom = MOST_AT_REST // AWAKE_ONE_IN
    for rounds in (MOST_AT_REST, MOST_AT_REST // 2, seldom, seldom):
        assert awake_rounds(controller, states) == rounds
    states[0].wakes(drafts=False)
    assert awake_rounds(controller, states) == MOST_AT_REST


def test_a_row_by_itself_is_looked_up_for_in_each_round():
    controller, states = looking_up(1, slope=0.1)
    assert [awake_rounds(controller, states) for _ in range(3)] == [MOST_AT_REST] * 3


def test_what_one_row_declined_is_declined_by_its_neighbours():
    """Or each of eight would have them all thought about in turn."""
    controller, states = looking_up(2, slope=0.1)
    first, second = asked(states, 4)[0], asked(states, 0)[1]
    assert [c.source for c in controller.choose([first, second], drafts=False)] == ["none"] * 2
    offered = lookup_confidence(4, False)
    assert controller.at_rest(states, [0.0, offered]) is not None
    assert controller.at_rest(states, [0.0, lookup_confidence(20, False)]) is None
