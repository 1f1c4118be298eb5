"""Where a draft stops: what its next token is worth, and what a pass for it costs."""

import pytest
from controlling import CONTEXT, table

from layerskip.control.asks import MOST_CREDIT, Ask
from layerskip.control.estimates import RowState
from layerskip.control.experience import Experience
from layerskip.control.stopping import Choice, Stopper
from layerskip.controller import Controller
from layerskip.cost import CostTable, Curve


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

    def stopper(*, alone: bool) -> Stopper:
        return Stopper(RowState(Experience((0.8,))), choice, alone=alone)

    alone = stopper(alone=True)
    assert not alone.goes_on(0.9)
    assert 0.0 < alone.gain < 2.0 * 0.4
    assert alone.stopped == "cost"
    assert controller.going_on([alone], CONTEXT) == [False]
    together = [stopper(alone=False) for _ in range(4)]
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
    made = [Stopper(RowState(Experience((0.6,))), choice, alone=False) for _ in confidences]
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
