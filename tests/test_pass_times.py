"""What rounds' clocks make of a cost table: made-up seconds, so that every figure is exact."""

import math
import statistics
from random import Random
from types import SimpleNamespace

import pytest
from controlling import CONTEXT, table
from recorded import flat_cost

from layerskip.control.clocks import Clocks
from layerskip.control.pace import LOOKING, Pace
from layerskip.control.pass_times import (
    DRAFTED_ONE_IN,
    FIRST_DRAFTED,
    FIRST_PLAIN,
    PLAIN_ONE_IN,
    PassTimes,
)
from layerskip.controller import Controller, _drafting
from layerskip.params import MAX_AUTO_DRAFT_TOKENS


def run_rounds(controller, count, *, pace=1.0, drafts=1.0, verify=1.0, tokens=5, rows=1):
    """Rounds whose passes take the table's seconds times these; ``tokens`` == ``rows``: plain."""
    cost, drafted = controller.cost, tokens > rows
    draft = cost.draft_pass(rows, CONTEXT, sequences=rows)
    full = cost.verify_pass(tokens, CONTEXT, sequences=rows)
    for _ in range(count):
        expected = (
            controller.times.draft(rows, CONTEXT) if drafted else 0.0,
            controller.times.verify(tokens, CONTEXT, rows=rows),
        )
        took = pace * drafts * draft * drafted, pace * full * (verify if drafted else 1.0)
        controller.times.observe_phases(*took, *expected, tokens, rows)


def beside_plain(controller) -> tuple[float, float]:
    """A draft and a pass of five tokens, in plain passes."""
    plain = controller.times.verify(1, CONTEXT)
    return (
        controller.times.draft(1, CONTEXT) / plain,
        controller.times.verify(5, CONTEXT) / plain,
    )


@pytest.mark.parametrize("pace", [1.0, 3.0])
def test_seconds_that_were_measured_correct_the_table(pace):
    """Drafts take twice what the table says of them; all of it three times as long where others
    work."""
    cost = table()
    said = beside_plain(Controller(cost))
    for follows in (True, False):
        controller = Controller(cost, follows_clock=follows)
        for _ in range(60):
            run_rounds(controller, 9, pace=pace, drafts=2.0)
            run_rounds(controller, 1, pace=pace, tokens=1)
        draft, verify = (
            now / then for now, then in zip(beside_plain(controller), said, strict=True)
        )
        assert draft == pytest.approx(2.0 if follows else 1.0, rel=0.02)
        assert verify == pytest.approx(1.0, rel=0.02)


def test_what_a_draft_took_says_little_of_the_verify_pass_behind_it():
    """Both were expected by what was known before the round."""
    controller = Controller(table())
    run_rounds(controller, 1, drafts=2.0)
    told = controller.times.verify(5, CONTEXT) / table().verify_pass(5, CONTEXT)
    assert told == pytest.approx(1.0, abs=0.05)


def test_a_machine_that_is_slower_than_its_table_has_no_dear_drafts():
    """All that was seen since are drafted rounds: what they share is laid to the machine, or a
    few of them would end drafting."""
    controller = Controller(table())
    said = beside_plain(controller)
    run_rounds(controller, 8, pace=1.7)
    draft, verify = (now / then for now, then in zip(beside_plain(controller), said, strict=True))
    assert 1.0 < verify < draft < 1.2
    assert controller.times.verify(5, CONTEXT) == pytest.approx(
        1.7 * table().verify_pass(5, CONTEXT), rel=0.05
    )


@pytest.mark.parametrize("pace", [2.5, 0.4])
@pytest.mark.parametrize("rounds", [4, 30])
def test_a_machine_that_was_another_at_first_leaves_no_pass_dear_or_cheap(pace, rounds):
    """Drafted rounds alone never tell the two apart: what is put down to them then, stays."""
    controller = Controller(table())
    said = beside_plain(controller)
    run_rounds(controller, rounds, pace=pace)
    run_rounds(controller, 200)
    draft, verify = (now / then for now, then in zip(beside_plain(controller), said, strict=True))
    assert draft == pytest.approx(1.0, abs=0.03)
    assert verify == pytest.approx(1.0, abs=0.03)


def test_passes_that_vary_more_than_is_thought_say_less():
    """Others use the core, and the table is right: their moments are no reason to draft less."""
    said, found = beside_plain(Controller(table())), []
    for seed in range(20):
        controller, chance = Controller(table()), Random(seed)
        for i in range(100):
            drafts, verify = (math.exp(chance.gauss(0.0, 0.4)) for _ in range(2))
            plain = {"tokens": 1, "pace": verify}
            run_rounds(
                controller, 1, **(plain if i % 10 == 9 else {"drafts": drafts, "verify": verify})
            )
            found.append([a / b for a, b in zip(beside_plain(controller), said, strict=True)])
    draft, verify = (
        statistics.fmean(abs(math.log(x)) for x in of) for of in zip(*found, strict=True)
    )
    assert draft < 0.17
    assert verify < 0.09


def test_one_plain_pass_in_ten_tells_a_wrong_table_from_a_slow_machine():
    """Both have every pass of five tokens take 1.3 times what the table says."""
    for pace, verify in ((1.3, 1.0), (1.0, 1.3)):
        controller = Controller(table())
        run_rounds(controller, 30, pace=pace, verify=verify)
        told = controller.times.verify(5, CONTEXT) / table().verify_pass(5, CONTEXT)
        assert told == pytest.approx(1.3, rel=0.01)
        for _ in range(12):
            run_rounds(controller, 1, pace=pace, tokens=1)
            run_rounds(controller, 9, pace=pace, verify=verify)
        assert beside_plain(controller)[1] == pytest.approx(
            verify * beside_plain(Controller(table()))[1], rel=0.03
        )


def test_a_machine_that_gets_slower_while_nothing_is_drafted_changes_no_ratio():
    controller = Controller(table())
    run_rounds(controller, 50, drafts=1.5, verify=0.9)
    before = beside_plain(controller)
    run_rounds(controller, 300, pace=2.0, tokens=1)
    assert controller.times.verify(1, CONTEXT) == pytest.approx(
        2.0 * table().verify_pass(1, CONTEXT), rel=0.01
    )
    # Nor is what was learnt while drafting lost; the share of it that was the machine's comes out.
    draft, verify = beside_plain(controller)
    assert draft / verify == pytest.approx(before[0] / before[1], rel=0.005)


@pytest.mark.parametrize(
    ("drafted", "first", "one_in"),
    [(False, FIRST_PLAIN, PLAIN_ONE_IN), (True, FIRST_DRAFTED, DRAFTED_ONE_IN)],
)
def test_all_of_the_first_rounds_are_learnt_from_and_then_some(drafted, first, one_in):
    """Of either kind by itself, so that none is missed for the others' number."""
    times = Controller(table()).times
    assert all(times.due(drafted=drafted) for _ in range(first))
    told = [(times.due(drafted=drafted), times.due(drafted=not drafted)) for _ in range(64)]
    assert [mine for mine, _ in told] == [n % one_in == 0 for n in range(first + 1, first + 65)]
    others = FIRST_PLAIN if drafted else FIRST_DRAFTED
    assert all(other for _, other in told[:others])


def test_prices_are_the_same_objects_until_something_is_learnt():
    """So that rounds between cost little."""
    controller = Controller(table())
    known = controller._pace(CONTEXT, 1, greedy=False)
    assert controller._pace(CONTEXT, 1, greedy=False) is known
    run_rounds(controller, 4, pace=1.5, tokens=1)
    assert controller._pace(CONTEXT, 1, greedy=False).plain > 1.1 * known.plain


def test_a_round_after_others_that_nobody_learnt_from_says_more():
    """The machine had so much longer to become another."""
    after = []
    for count in (1, PLAIN_ONE_IN):
        controller = Controller(table())
        run_rounds(controller, 100, tokens=1)
        for _ in range(count):
            controller.times.due(drafted=False)
        run_rounds(controller, 1, tokens=1)  # which counts what went by
        run_rounds(controller, 1, pace=1.1, tokens=1)
        after.append(controller.times.verify(1, CONTEXT) / table().verify_pass(1, CONTEXT) - 1.0)
    assert after[1] > 1.3 * after[0] > 0.0


@pytest.mark.parametrize("known", [100, 2000])
def test_a_service_that_has_run_for_long_learns_that_drafts_became_dearer(known):
    """Its rows are more now, or its contexts longer, and the table is wrong of those."""
    controller = Controller(table())
    said = beside_plain(controller)[0]
    for count, drafts in ((known, 1.0), (250, 1.5)):
        for i in range(count):
            for _ in range(DRAFTED_ONE_IN):
                controller.times.due(drafted=True)
            run_rounds(controller, 1, drafts=drafts, tokens=5 if i % 8 else 1)
    assert beside_plain(controller)[0] == pytest.approx(1.5 * said, rel=0.05)


def test_rounds_that_nobody_learnt_from_go_by_once(monkeypatch):
    gone, pass_time = [], Clocks.pass_time
    monkeypatch.setattr(
        Clocks, "pass_time", lambda clocks, rounds: gone.append(rounds) or pass_time(clocks, rounds)
    )
    controller = Controller(table())
    for _ in range(5):
        controller.times.due(drafted=False)
    run_rounds(controller, 2, tokens=1)
    assert gone == [5, 1]


def test_what_begins_a_draft_is_corrected_as_its_passes_are():
    controller = Controller(table(start=0.4))
    before = controller.times.draft(1, CONTEXT)
    run_rounds(controller, 20, pace=2.0)
    corrected = controller.times.draft(1, CONTEXT) / before
    assert corrected > 1.5
    assert controller.times.draft_start() == pytest.approx(0.4 * corrected)


def test_what_one_size_of_pass_shows_is_thought_of_the_next_ones():
    controller = Controller(table(quantum=8))
    before = [controller.times.verify(n, CONTEXT) for n in (8, 16, 64)]
    for _ in range(20):
        run_rounds(controller, 1, tokens=1)
        run_rounds(controller, 1, verify=0.7, tokens=8)
    sizes = [controller.times.verify(n, CONTEXT) for n in (8, 16, 64)]
    near, next_one, far = (now / then for now, then in zip(sizes, before, strict=True))
    assert 0.7 < near < 0.73 < next_one < far < 0.95


def test_the_largest_passes_have_each_their_clock_where_nothing_is_padded():
    """A GPU's products take 16, 32 and 64 tokens at once: a batch of 16 rows has to know apart what
    one drafted token of each costs, and what three do."""
    controller = Controller(table(quantum=1))
    for _ in range(60):
        for tokens, verify in ((16, 1.0), (32, 1.0), (64, 1.5)):
            run_rounds(controller, 1, verify=verify, tokens=tokens, rows=16)
    times, cost = controller.times, controller.cost
    ratios = [
        times.verify(n, CONTEXT, rows=16) / cost.verify_pass(n, CONTEXT, sequences=16)
        for n in (32, 64)
    ]
    assert ratios == pytest.approx([1.0, 1.5], rel=0.05)


@pytest.mark.parametrize("rows", [4, 12])
def test_many_rows_are_thought_to_verify_as_many_tokens_each(rows):
    """So all of them draft, or none: what some leave out saves nothing."""
    controller = Controller(table(quantum=1))
    times = controller.times
    before = [times.verify(rows + n, CONTEXT, rows=rows) for n in (0, 1, rows // 2, rows, rows + 1)]
    if rows < 8:
        assert before == sorted(set(before))
    else:
        assert before[0] < before[1] == before[2] == before[3] < before[4]
        assert before[4] == times.verify(3 * rows, CONTEXT, rows=rows)
    for _ in range(40):  # what rounds take corrects the price of such ones
        run_rounds(controller, 1, tokens=rows, rows=rows)
        run_rounds(controller, 1, verify=1.5, tokens=rows + 2, rows=rows)
    took = 1.5 * controller.cost.verify_pass(rows + 2, CONTEXT, sequences=rows)
    assert times.verify(rows + 2, CONTEXT, rows=rows) == pytest.approx(took, rel=0.03)


def test_no_clock_makes_a_longer_pass_cheaper_than_a_plain_one():
    """A step below nothing would be drafts that a stake is not charged for."""
    controller = Controller(table())
    for _ in range(20):
        run_rounds(controller, 1, tokens=1)
        run_rounds(controller, 1, verify=0.7, tokens=8)
    alone = controller.times.alone(CONTEXT)
    assert min(alone) < 0.8 * alone[0]  # so it is believed
    pace = controller._pace(CONTEXT, 1, greedy=False)
    assert min(pace.steps) == 0.0
    assert pace.plain == pace.verify(1) == alone[0] == pace.verify(8)


def test_no_table_makes_a_longer_pass_of_a_batch_cheaper_than_a_plain_one():
    """Though it says so: it may have been measured while others kept the machine busy."""
    falling = flat_cost(verify=[0.010 - 0.0001 * n for n in range(17)])
    assert set(Pace(PassTimes(falling), CONTEXT, 2).steps) == {0.0}
    risks = Pace(PassTimes(falling), CONTEXT, 2).lookup_risks
    assert risks == sorted(risks)  # which is how they are searched


def cheaper(rounds, rows=1):
    """Prices after so many rounds of which half drafted for less than the table says; and its."""
    controller = Controller(table())
    for _ in range(rounds // 2):
        run_rounds(controller, 1, tokens=1)
        run_rounds(controller, 1, drafts=0.7, verify=0.8, tokens=8)
    tabled = Controller(table(), follows_clock=False)
    return (c._pace(CONTEXT, rows, greedy=False) for c in (controller, tabled))


@pytest.mark.parametrize("rows", [1, 3])
def test_what_may_be_lost_is_counted_below_the_table_s_price_only_if_that_is_sure(rows):
    """A clock may have put a machine's change of speed down to the passes that were run since."""
    believed, tabled = cheaper(2, rows)
    scale = believed.plain / tabled.plain
    for name in ("risks", "lookup_risks"):
        charged, wanted = getattr(believed, name), getattr(tabled, name)
        assert charged == pytest.approx([scale * seconds for seconds in wanted], rel=0.03)
    thought = believed.start_share + believed.draft_share + believed.steps[0]
    assert thought < 0.9 * believed.risks[0]  # so it is believed, and chosen by
    choice = _drafting(8, 1.0, believed, math.inf)
    assert choice.gained(0, 3, 3) == pytest.approx(-believed.risks[2])
    assert choice.gained(2, 3, 3) == pytest.approx(2 * believed.token - believed.risks[2])
    sure, tabled = cheaper(400, rows)
    thought = sure.start_share + sure.draft_share + sure.steps[0]
    dear = sure.plain / tabled.plain * tabled.risks[0]
    assert thought < 0.85 * dear
    assert sure.risks[0] < thought + 0.5 * (dear - thought)


@pytest.mark.parametrize("rows", [1, 3])
def test_however_sure_a_clock_is_a_token_more_costs_half_of_what_the_table_says(rows):
    controller, tabled = (Controller(table(), follows_clock=follows) for follows in (True, False))
    for _ in range(200):
        run_rounds(controller, 1, tokens=1)
        run_rounds(controller, 1, verify=0.7, tokens=8)
        run_rounds(controller, 1, verify=0.7, tokens=18)
    pace, wanted = (c._pace(CONTEXT, rows, greedy=False) for c in (controller, tabled))
    assert max(pace.shares[:8]) <= pace.token  # so they are thought to be free
    scale = pace.plain / wanted.plain
    for charged, share in zip(pace.lookup_risks[:7], wanted.shares[1:], strict=False):
        own = charged - LOOKING * pace.token
        assert own == pytest.approx(scale * 0.5 * (share - wanted.token), rel=0.01)


def test_what_may_be_lost_is_counted_dearer_if_a_clock_says_so():
    controller = Controller(table())
    for _ in range(20):
        run_rounds(controller, 1, tokens=1)
        run_rounds(controller, 1, drafts=1.3, verify=1.2, tokens=8)
    pace = controller._pace(CONTEXT, 1, greedy=False)
    assert pace.dearer == 1.0
    assert pace.charged.steps == pace.steps
    tabled = Controller(table(), follows_clock=False)._pace(CONTEXT, 1, greedy=False)
    assert pace.risks[0] > 1.2 * pace.plain / tabled.plain * tabled.risks[0]


def test_a_clock_that_took_a_slow_start_for_dear_plain_passes_lets_nothing_be_lost_for_free():
    """The first rounds were plain and slow; since then every round looks up a token, in vain. It is
    thought to cost next to nothing; what it really takes is charged within a fourth."""
    controller = Controller(table(slope=0.05, quantum=1))
    run_rounds(controller, 4, pace=1.15, tokens=1)
    run_rounds(controller, 60, tokens=2)
    pace = controller._pace(CONTEXT, 1, greedy=False)
    tabled = Controller(table(slope=0.05, quantum=1), follows_clock=False)
    real = tabled._pace(CONTEXT, 1, greedy=False).lookup_risks[0]
    assert pace.steps[0] < 0.1 * real
    assert pace.lookup_risks[0] > 0.75 * real


def test_passes_of_one_row_are_known_all_at_once():
    controller = Controller(table(slope=0.03, far=0.5))
    for _ in range(2):  # as the table has them, and corrected
        for context in (CONTEXT, 700):
            each = [
                controller.times.verify(n, context) for n in range(1, MAX_AUTO_DRAFT_TOKENS + 2)
            ]
            assert controller.times.alone(context) == each
        run_rounds(controller, 5, verify=0.8, tokens=12)


def test_one_stalled_round_changes_little():
    stalled, controller = 1000.0, Controller(table())
    for _ in range(2):
        run_rounds(controller, 10)
        before = beside_plain(controller)
        run_rounds(controller, 1, pace=stalled)
        assert beside_plain(controller) == pytest.approx(before, rel=0.1)
        run_rounds(controller, 10)
        assert beside_plain(controller) == pytest.approx(before, rel=0.03)


def test_threads_that_learn_at_once_leave_a_clock_that_learns(monkeypatch):
    """One comes between what another read and what it writes."""
    clocks, waiting = Clocks(), [1]

    def interrupted(variance):
        if waiting:
            waiting.pop()
            clocks.observe(1.5, [])
        return math.sqrt(variance)

    known = {name: getattr(math, name) for name in ("log", "exp", "inf")}
    monkeypatch.setattr("layerskip.control.clocks.math", SimpleNamespace(**known, sqrt=interrupted))
    clocks.observe(1.5, [])
    for _ in range(3):
        clocks.pass_time()
        clocks.observe(1.5, [])  # a negative variance has no root
    assert 1.2 < clocks.ratios[0] < 1.5


def test_a_round_that_took_no_time_or_forever_says_nothing():
    controller = Controller(table())
    for seconds in (0.0, float("inf"), float("nan")):
        controller.times.observe_phases(seconds, seconds, 1.0, 1.0, 5, 1)
        controller.times.observe_round(seconds, 1.0, 1.0, 5, 1)
    assert beside_plain(controller) == beside_plain(Controller(table()))


def test_rounds_whose_phases_no_clock_tells_apart_are_learnt_from_as_a_whole():
    controller, cost = Controller(table(0.2)), table(0.2)
    draft, verify = (3 * cost.draft_pass(1, CONTEXT), cost.verify_pass(4, CONTEXT))
    for _ in range(30):
        run_rounds(controller, 2, tokens=1)
        expected = (3 * controller.times.draft(1, CONTEXT), controller.times.verify(4, CONTEXT))
        controller.times.observe_round(2.0 * draft + verify, *expected, 4, 1)
    told = 3 * controller.times.draft(1, CONTEXT) + controller.times.verify(4, CONTEXT)
    assert told == pytest.approx(2.0 * draft + verify, rel=0.02)
    plain = cost.verify_pass(1, CONTEXT)
    assert controller.times.verify(1, CONTEXT) == pytest.approx(plain, rel=0.01)


@pytest.mark.parametrize("rows", [2, 7, 8, 9, 16])
def test_a_pace_has_every_pass_at_the_price_that_the_times_have(rows):
    """Whatever was asked before: of many rows one answer is kept for several numbers of tokens."""
    times = PassTimes(table(0.2, quantum=1, slope=0.05))
    for first in (rows, rows + 1, 3 * rows):
        pace = Pace(times, CONTEXT, rows)
        for tokens in (first, *range(1, rows * (MAX_AUTO_DRAFT_TOKENS + 1) + 1)):
            assert pace.verify(tokens) == times.verify(tokens, CONTEXT, rows=rows)


def test_a_pace_that_is_settled_again_is_the_same_one():
    pace = Pace(PassTimes(table(0.2, quantum=1)), CONTEXT, 4)
    assert pace.settled(6, 3) is pace.settled(6, 3)
    assert pace.settled(6, 3).draft_share != pace.settled(6, 4).draft_share
