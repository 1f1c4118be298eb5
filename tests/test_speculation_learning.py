"""What a controller is told by requests and their rounds, on the real engine."""

import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest
from decoding import PROMPT
from speculating import NEW, REPEATING, WITH_RULES, Scripted, cost_of, run, with_controller
from toys import PLANS, VOCAB_SIZE, make_model

from layerskip import SelfSpeculativeLM
from layerskip.control.clocks import Clocks
from layerskip.control.pass_times import FIRST_PLAIN, PLAIN_ONE_IN, PassTimes
from layerskip.control.stopping import PLAIN, Choice
from layerskip.controller import Controller
from layerskip.cost import DRAFTS_IN_A_ROW
from layerskip.drafting import EarlyExitDrafter
from layerskip.exactness import MAX_PASS_ROWS
from layerskip.plan import PlanFile
from layerskip.speculation import Speculator


@pytest.fixture
def blind(monkeypatch) -> None:
    """No row looks back (tests/test_hindsight.py)."""
    monkeypatch.setattr(EarlyExitDrafter, "may_look_back", False)


@pytest.fixture(scope="module")
def plain(toy) -> SelfSpeculativeLM:
    return SelfSpeculativeLM(toy(), None, num_draft_tokens=0)


def test_a_request_that_nobody_reads_to_its_end_is_over(toy):
    """What requests of its kind are thought to be long by, and what it had in advance, is of it."""

    def stream(lm) -> int:
        steps = lm.stream(REPEATING, max_new_tokens=NEW)
        emitted = sum(len(next(steps).token_ids) for _ in range(3))
        steps.close()
        return emitted

    def generate(lm) -> int:
        rounds = []

        def stopping(record):
            rounds.append(record)
            if len(rounds) == 3:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            run(lm, on_round=stopping)
        return sum(len(r.token_ids) for r in rounds)

    def batch(lm) -> int:
        dropped = lm.open_batch(max_new_tokens=NEW)
        dropped.add(REPEATING)
        emitted = sum(len(r.token_ids) for _ in range(3) for r in dropped.step())
        del dropped
        gc.collect()
        return emitted

    for way in (stream, generate, batch):
        lm = with_controller(toy, Controller(cost_of(0.1), follows_clock=False))
        emitted = way(lm)
        assert lm.controller._experiences["greedy"].usual_length == emitted < NEW
        run(lm, num_draft_tokens=0)  # nothing else is left of it


def test_a_dear_draft_is_given_up_and_the_response_says_so(toy):
    out = run(with_controller(toy, Controller(cost_of(5.0), follows_clock=False), lookup=False))
    assert out.stats.num_plain_rounds == out.stats.num_rounds == NEW - 1


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize("early", ["end", "removed"])
def test_a_request_that_is_over_gives_back_what_it_had_in_advance(toy, plain, early):
    """For plain rounds up to its limit, which do not come."""
    lm = with_controller(toy, Controller(cost_of(0.5), (0.01,), follows_clock=False), lookup=False)
    if early == "end":
        text = run(plain, PROMPT).token_ids
        new = next(t for i, t in enumerate(text) if i > 6 and t not in text[:i])
        lm.eos_ids = frozenset({new})
    batch = lm.open_batch(max_new_tokens=NEW, num_draft_tokens="auto")
    row = batch.add(PROMPT)
    for _ in range(5):
        batch.step()
    state = batch._rows.row(row).state
    assert state.owed > 0
    held = state.shared.credit
    while early == "end" and batch.unfinished:
        batch.step()
    assert (state.owed == 0) == (early == "end")
    batch.remove(row)
    assert state.owed == 0
    assert state.shared.credit < held - 0.2


@pytest.mark.usefixtures("blind")  # of a row with a grammar
def test_passes_that_draft_nothing_are_charged(toy, plain, monkeypatch):
    """As where a grammar allows no token of the draft vocabulary."""
    lm = with_controller(toy, Controller(cost_of(0.1), follows_clock=False), lookup=False)
    draft = lm._drafter.draft

    def in_vain(*arguments):
        return [replace(d, tokens=(), shared=(), confidences=()) for d in draft(*arguments)]

    monkeypatch.setattr(lm._drafter, "draft", in_vain)
    out = run(lm)
    assert out.token_ids == run(plain).token_ids
    assert 0 < out.stats.num_draft_passes < 12  # of more than a hundred
    (kind,) = lm.controller._experiences.values()
    assert kind.ledger < 0.0


@pytest.mark.parametrize("rows", [1, 2])
def test_only_a_row_by_itself_is_charged_what_clocks_have_seen(toy, monkeypatch, rows):
    """What rows share of a round depends on what all of them drafted."""
    lm, told = with_controller(toy, Controller(cost_of(0.1)), lookup=False), []
    monkeypatch.setattr(lm.controller, "observe_draft", lambda *_, alone, **__: told.append(alone))
    batch = lm.open_batch(max_new_tokens=NEW)
    for _ in range(rows):
        batch.add(REPEATING)
    for _ in range(4):
        batch.step()
    assert set(told) == {rows == 1}


@pytest.mark.parametrize("wrong", [0, 1])
def test_nothing_is_learnt_behind_the_end_of_a_text(toy, plain, monkeypatch, wrong):
    """A drafter that is always right drafts on, or goes wrong there, and the text has ended."""
    text = run(plain).token_ids
    fits = (i for i in range(1, NEW) if i % 5 in (1, 2, 3) and text[i] not in text[:i])
    last = max(fits)  # not the last token of its round
    behind = [(token + wrong) % VOCAB_SIZE for token in text[last + 1 :]]
    whole = (*REPEATING, *text[: last + 1], *behind)
    lm = with_controller(toy, Scripted(Choice("early_exit", 4)), lookup=False)
    draft, learnt = lm._drafter.draft, []

    def right(requests, *rest):
        return [
            replace(d, tokens=whole[r.length + 1 :][: len(d.tokens)], shared=())
            for r, d in zip(requests, draft(requests, *rest), strict=True)
        ]

    monkeypatch.setattr(lm._drafter, "draft", right)
    monkeypatch.setattr(lm, "eos_ids", frozenset({text[last]}))
    monkeypatch.setattr(lm.controller, "observe_draft", lambda *given, **_: learnt.append(given[3]))
    out = run(lm)
    assert out.token_ids == text[: last + 1]
    assert learnt == [*[[True] * 4] * (len(learnt) - 1), [True] * (last % 5)]


def test_no_round_in_which_a_size_was_proven_is_timed(toy, monkeypatch):
    """A proof takes several passes' time, which would be laid to the pass's own charge."""
    timed = []
    lm = with_controller(toy, Controller(cost_of(0.1)), num_draft_tokens=2)
    monkeypatch.setattr("layerskip.decode.observe_seconds", lambda *_: timed.append(len(counted)))
    counted, prove = [], lm.stack.pass_sizes._prove
    monkeypatch.setattr(
        lm.stack.pass_sizes, "_prove", lambda size: counted.append(size) or prove(size)
    )
    batch = lm.open_batch(max_new_tokens=8)
    for _ in range(4):
        batch.add([5, 6, 7])
    batch.step()
    batch.step()  # the first round: twelve tokens, in a pass larger than what was probed
    assert (counted, timed) == ([16], [])
    batch.step()
    assert (counted, timed) == ([16], [1])


def test_no_round_of_automatic_drafting_waits_for_a_proof(toy, monkeypatch):
    """A proof is five plain passes; batches of short texts lost a third to those of their sizes."""
    monkeypatch.setattr("layerskip.api.PROOF_SECONDS", 60.0)
    lm = SelfSpeculativeLM(toy(), None, PLANS["exit"])
    controller, sizes = lm.controller, lm.stack.pass_sizes
    assert controller.cost.pass_rows == MAX_PASS_ROWS
    proven = sizes.num_proofs
    for rows in (2, 5, 8):
        lm.generate([PROMPT] * rows, max_new_tokens=8, num_draft_tokens=7)
    assert sizes.num_proofs == proven
    late = SelfSpeculativeLM(toy(), None, PLANS["exit"])
    late.stack.pass_sizes.prove_ahead(0.0)
    assert late.stack.pass_sizes.num_proofs == 0


def test_what_a_round_verifies_is_known_when_a_draft_goes_on(toy, monkeypatch):
    """Beside a row with a fixed number, one that decodes plainly, and what was drafted so far."""
    asked, decide = [], Controller.going_on

    def going_on(controller, stoppers, context, **shape):
        asked.append((len(stoppers), sum(len(s.chances) for s in stoppers), shape))
        return decide(controller, stoppers, context, **shape)

    monkeypatch.setattr(Controller, "going_on", going_on)
    lm = with_controller(toy, Controller(cost_of(0.01), (0.99,)), lookup=False)
    batch = lm.open_batch(max_new_tokens=20)
    for count in ("auto", 3, 0):
        batch.add(PROMPT, num_draft_tokens=count)
    batch.step()
    batch.step()
    first, second, *_ = asked
    assert first == (1, 1, {"rows": 3, "verified": 3 + 3 + 1, "others": 1})
    assert second == (1, 2, {"rows": 3, "verified": 3 + 3 + 2, "others": 1})


def test_most_rounds_of_a_long_text_are_not_learnt_from(toy, monkeypatch):
    """Of the first rounds all are, and later ones seldom: it takes as long as to choose."""
    learnt, observe = [], Clocks.observe
    monkeypatch.setattr(Clocks, "observe", lambda *given: learnt.append(1) or observe(*given))
    lm = with_controller(toy, Controller(cost_of(2.0)), num_draft_tokens="auto", lookup=False)
    out = run(lm, max_new_tokens=1 + FIRST_PLAIN)  # the first token is the prefill's
    assert len(learnt) == len(out.rounds) - 1 == FIRST_PLAIN
    out = run(lm, max_new_tokens=1 + 2 * PLAIN_ONE_IN)
    assert len(out.rounds) - 1 == 2 * PLAIN_ONE_IN
    assert len(learnt) == FIRST_PLAIN + 2


def test_what_deciding_takes_is_no_draft_s(toy, monkeypatch):
    """By a clock that stands still but there."""
    lm = with_controller(toy, Controller(cost_of(0.1)))
    now, timed, decide = [0.0], [], Speculator.decide

    def deciding(*arguments):
        now[0] += 100.0
        return decide(*arguments)

    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("layerskip.decode.time", clock)
    monkeypatch.setattr(Speculator, "decide", deciding)
    monkeypatch.setattr("layerskip.decode.observe_seconds", lambda *given: timed.append(given[3:]))
    run(lm, max_new_tokens=6)
    assert timed
    assert set(timed) == {(0.0, 0.0)}


def test_what_begins_a_draft_is_expected_once_in_a_round_that_drafts(toy, monkeypatch):
    """Or the clock would learn it as an error of the price of drafts."""
    controller = Scripted(Choice("early_exit", 3), PLAIN)
    controller.times = PassTimes(replace(cost_of(0.1), draft_start=0.2), follows_clock=False)
    told = []
    monkeypatch.setattr(controller.times, "observe_phases", lambda *given: told.append(given[2]))
    lm = with_controller(toy, controller, lookup=False)
    out = run(lm, PROMPT, sampling=WITH_RULES)
    assert [r.num_draft_passes for r in out.rounds[1:5]] == [3, 0, 3, 0]
    late = 0.1 - 0.2 / DRAFTS_IN_A_ROW
    assert told[:4] == pytest.approx([0.2 + 3 * late, 0.0, 0.2 + 3 * late, 0.0])


def test_a_plan_file_brings_cost_and_prior(toy, tmp_path, caplog):
    lm = SelfSpeculativeLM(toy(), None, PLANS["exit"])
    cost = lm.controller.cost
    sure = {"greedy": ((0.5, 0.9),), "sampled": ((0.5, 0.7),)}
    known = PlanFile(PLANS["exit"], cost=cost, acceptance=(0.9, 0.8), calibration=sure)
    known.save(tmp_path / "plan.json")
    again = SelfSpeculativeLM(toy(), None, PlanFile.load(tmp_path / "plan.json"))
    assert again.controller.cost == cost
    assert again.controller.row("greedy").acceptance(1) == pytest.approx(0.8)
    chances = [again.controller.row(kind).chance(0.3) for kind in ("greedy", "coupled")]
    assert chances == pytest.approx([0.9, 0.7])
    assert not caplog.text
    other = SelfSpeculativeLM(make_model(shape="odd"), None, known)
    assert other.controller.cost != cost
    assert "measured" in caplog.text
