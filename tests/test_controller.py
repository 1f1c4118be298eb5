"""The controller on paper: counted passes times a cost table, so every bound is deterministic."""

from dataclasses import replace
from random import Random
from unittest import mock

import pytest
from controlling import CONTEXT, COSTS, Paper, Request, against_plain, guessed, paper, steady, table

import layerskip.controller
from layerskip.control.asks import Ask
from layerskip.control.experience import Experience
from layerskip.control.pace import Pace, affordable, split
from layerskip.control.pass_times import PassTimes
from layerskip.control.stopping import Choice
from layerskip.controller import Controller
from layerskip.cost import Curve
from layerskip.params import MAX_AUTO_DRAFT_TOKENS

FIXED = (0, 1, 2, 3, 4, 5, 7, 9, 12, 16)


@pytest.mark.parametrize(("count", "least"), [(16, 0.95), (48, 0.97)])
@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.7, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.one_in(4)
def test_automatic_is_near_the_best_fixed_number_where_confidence_tells_nothing(
    cost, acceptance, count, least
):
    rates: list[float] = []
    for k in FIXED:  # of one acceptance: far beyond the best number none is better
        rates.append(paper(cost, k).run(steady(acceptance, count=count)).rate)
        if rates[-1] < 0.8 * max(rates):
            break
    assert paper(cost).run(steady(acceptance, count=count)).rate >= least * max(rates)


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
        shared.add([False])
    assert shared.acceptance(0) < 0.01
    assert shared.acceptance(1) == pytest.approx(0.8)


def test_without_a_plan_late_positions_are_thought_to_be_as_early_ones_are():
    shared = Experience(())
    assert shared.acceptances == pytest.approx([0.7] * MAX_AUTO_DRAFT_TOKENS)
    for _ in range(60):
        shared.add([True] * 4)
    assert shared.acceptance(3) > 0.95
    assert shared.acceptances[4:] == pytest.approx([shared.acceptance(3)] * 12)
    for _ in range(60):
        shared.add([True] * 4 + [False])
    assert shared.acceptance(3) > 0.95
    assert shared.acceptance(4) < 0.5
    assert shared.acceptances[5:] == pytest.approx([shared.acceptance(4)] * 11)


def test_nothing_is_drafted_where_there_is_no_room_or_no_drafter():
    controller = Controller(table(), follows_clock=False)
    state = controller.row("greedy")
    assert controller.choose([Ask(state, 0, 0)], drafts=True)[0].num_draft_tokens == 0
    assert controller.choose([Ask(state, 0, 9)], drafts=False)[0].source == "none"


def test_a_long_match_goes_straight_to_verify_and_a_poor_one_to_the_draft():
    controller = Controller(table(slope=0.2), follows_clock=False)
    state = controller.row("greedy")
    good = controller.choose([Ask(state, 0, 16, guessed(10, 20))], drafts=True)[0]
    assert (good.source, good.num_draft_tokens) == ("lookup", 7)  # as many rows as cost nothing
    poor = controller.choose([Ask(state, 0, 16, guessed(10, 1))], drafts=True)[0]
    assert poor.source == "early_exit"
    for _ in range(40):
        state.add_lookup(20, [False], stored=False)
    again = controller.choose([Ask(state, 0, 16, guessed(10, 20))], drafts=True)[0]
    assert again.source == "early_exit"


def test_what_one_token_matched_goes_straight_to_verify_only_where_nothing_drafts():
    controller = Controller(table(slope=0.02), (0.5,), follows_clock=False)
    state = controller.row("greedy")
    for _ in range(40):
        state.add_lookup(1, [True] * 8, stored=False)
    one, two = (Ask(state, 0, 16, guessed(8, match_length)) for match_length in (1, 2))
    sources = [
        controller.choose([ask], drafts=drafts)[0].source
        for ask, drafts in ((one, True), (two, True), (one, False))
    ]
    assert sources == ["early_exit", "lookup", "lookup"]


@pytest.mark.parametrize(("guessing", "looks_up"), [(1, False), (8, True)])
def test_a_pass_grows_for_look_ups_only_if_all_rows_gain(guessing, looks_up):
    """Eight rows fill a quantum; a token more, and the pass takes as long as one of sixteen."""
    controller = Controller(table(quantum=8, slope=0.05), follows_clock=False)
    asks = [
        Ask(controller.row("greedy"), CONTEXT, 16, guessed(2 * (i < guessing), 4)) for i in range(8)
    ]
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
    first = replace(first, guess=guessed(num_guessed, match_length))
    (alone,) = controller.choose([first], drafts=True)
    assert alone.source == "lookup"
    choices = controller.choose([first, *others], drafts=True)
    assert [c.source for c in choices] == sources


def test_all_rows_look_up_where_that_is_quicker_than_to_draft():
    """As many tokens as drafts give, and no draft pass."""
    controller = Controller(table(0.3, slope=0.01), (0.85,), follows_clock=False)
    asks = [Ask(controller.row("greedy"), CONTEXT, 16, guessed(6, 20)) for _ in range(4)]
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
        ask = Ask(controller.row("coupled"), CONTEXT, 16, guessed(10, 4))
        counts.append(controller.choose([ask], drafts=True)[0].num_draft_tokens)
    assert 0 < counts[0] < counts[1]


def test_free_rows_of_a_draft_pass_take_guesses():
    controller = Controller(table(0.2, slope=0.2), follows_clock=False)  # 8 rows as one
    assert controller.guesses(1, CONTEXT) == 7
    assert controller.guesses(2, CONTEXT) == 3
    assert controller.guesses(8, CONTEXT) == 0


def test_guesses_that_nobody_counts_have_to_be_free():
    """Of several rows a pass is saved only where none needs it. What is right is sampled in the
    place of a pass of its own, and a size of pass that a busy machine made look dear hides no wider
    one."""
    for price, width in ((0.2, 3), (0.202, 0)):
        layers = Curve((1, 2, 7, 8, 9), (0,), ((0.2, 0.2, price, price, 0.3),))
        cost = replace(table(quantum=1), draft_layers=layers)
        assert Controller(cost, follows_clock=False).guesses(2, CONTEXT) == width
    for four, eight, width in ((0.2, 0.2, 7), (0.3, 0.2, 7), (0.2, 0.23, 3), (0.3, 0.23, 1)):
        layers = Curve((1, 2, 4, 8, 16), (0,), ((0.2, 0.2, four, eight, 0.6),))
        cost = replace(table(quantum=1), draft_layers=layers, sampling=0.01)
        assert Controller(cost, follows_clock=False).guesses(1, CONTEXT) == width


def test_a_guess_is_priced_in_what_a_right_one_saves():
    """A pass, but for drawing its token; a guess that is wrong is not drawn."""
    layers = Curve((1, 2, 4, 16), (0,), ((0.2, 0.21, 0.25, 0.65),))
    cost = replace(table(quantum=1), draft_layers=layers, sampling=0.01)
    head = table(quantum=1).draft_head
    prices = Controller(cost, follows_clock=False).guess_prices(CONTEXT, greedy=False)
    saved = 0.2 + head.at(1, 0)
    assert len(prices) == MAX_AUTO_DRAFT_TOKENS - 1
    for width, price in ((2, 0.01), (4, 0.05), (16, 0.45)):
        more = price + head.at(width, 0) - head.at(1, 0)
        assert prices[width - 2] == pytest.approx(more / saved)


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
            count = luck.choice((0, 0, 4, 12))
            ask = Ask(state, CONTEXT, luck.randrange(1, 20), guessed(count, match))
            (choice,) = controller.choose([ask], drafts=True, fixed=fixed)
            chosen.setdefault(few, []).append((choice, state.last, state.probing))
            state.add_lookup(match, [luck.random() < match / 40] * (count > 0), stored=False)
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
    greedy, block = controller.told("greedy"), controller.told("block")
    assert greedy.error > 0.0 == block.error
    assert greedy.error_by_chance > 0.0 == block.error_by_chance


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
