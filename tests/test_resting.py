"""Rounds in which a row that drafts nothing is not even asked whether it should."""

from controlling import CONTEXT, table

from layerskip.controller import MOST_AT_REST, Ask, Controller
from layerskip.estimates import RowState
from layerskip.stopping import Choice


def resting_row() -> tuple[Controller, RowState]:
    controller = Controller(table(0.2, slope=0.0), (0.01,), follows_clock=False)
    state = controller.row("greedy", 0)  # nothing to stake, and nothing in advance
    state.shared.credit = 0.0
    assert controller.choose([Ask(state, CONTEXT, 30)], drafts=True)[0].source == "none"
    assert state.rests
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
    ask = Ask(state, CONTEXT, 30, num_guessed=4, match_length=20)
    assert controller.choose([ask], drafts=True)[0].source == "lookup"


def test_a_row_at_rest_is_thought_about_with_one_that_joins():
    controller, state = resting_row()
    asks = [Ask(s, CONTEXT, 30) for s in (state, Controller(table(0.2), (0.95,)).row("greedy"))]
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
