"""Drafts chosen from round to round on the real engine: the text never depends on them."""

import gc
import itertools
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from decoding import PROMPT, SAMPLED, decode, join
from toys import PLANS, VOCAB_SIZE, make_model, random_ids
from zoo import make_toy

import layerskip.speculation
from layerskip import DraftPlan, LookupStore, SamplingParams, SelfSpeculativeLM
from layerskip.clocks import Clocks
from layerskip.controller import Controller
from layerskip.cost import DRAFTS_IN_A_ROW, CostTable, Curve
from layerskip.decode import Decoder
from layerskip.drafting import DraftRequest, EarlyExitDrafter
from layerskip.exactness import MAX_PASS_ROWS
from layerskip.experience import lookup_confidence
from layerskip.guessing import Lookahead, guess_for, judged, lookahead
from layerskip.lookup import FORCED_MATCH, Guess, TokenIndex
from layerskip.ops.reference import DRAFT_STREAM, TARGET_STREAM
from layerskip.pass_times import FIRST_PLAIN, PLAIN_ONE_IN, PassTimes
from layerskip.plan import PlanFile
from layerskip.sampling import Sampler
from layerskip.speculation import Speculator, _looked_up
from layerskip.stopping import PLAIN, Choice

FREE = Curve((1,), (0,), ((0.0,),))
REPEATING = [*random_ids(12), *random_ids(12), *random_ids(7)]
NEW = 40
GREEDY = SamplingParams()
WITH_RULES = SamplingParams(temperature=0.8, top_p=0.9, seed=3, repetition_penalty=1.2)


def cost_of(c: float) -> CostTable:
    draft, verify = (Curve((8, 64), (0,), ((unit, 2 * unit),)) for unit in (c, 1.0))
    return CostTable(draft, FREE, verify, 0.0, 8, {})


class Scripted(Controller):
    """Chooses what a test says, round after round."""

    def __init__(self, *choices: Choice) -> None:
        super().__init__(cost_of(0.1), follows_clock=False)
        self.choices = itertools.cycle(choices)

    def choose(self, asks, *, drafts, fixed=()):
        return [next(self.choices) for _ in asks]


@pytest.fixture(scope="module")
def lm(toy) -> SelfSpeculativeLM:
    lm = SelfSpeculativeLM(toy(), None, PLANS["exit"])
    lm._controller = Controller(cost_of(0.1), follows_clock=False)
    return lm


@pytest.fixture(scope="module")
def plain(toy) -> SelfSpeculativeLM:
    return SelfSpeculativeLM(toy(), None, num_draft_tokens=0)


def run(lm, prompt=REPEATING, **settings):
    return lm.generate(prompt, **{"max_new_tokens": NEW} | settings)


def store_of(*texts) -> LookupStore:
    store = LookupStore()
    for text in texts:
        store.add(text)
    return store


def with_controller(toy, controller, plan="exit", **settings) -> SelfSpeculativeLM:
    lm = SelfSpeculativeLM(toy(), None, PLANS[plan] if plan else None, **settings)
    lm._controller = controller
    return lm


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, WITH_RULES], ids=["greedy", "0.8", "rules"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("c", [0.01, 0.3])
@pytest.mark.one_in(3)
def test_automatic_text_is_plain_text(toy, plain, sampling, plan, c):
    lm = with_controller(toy, Controller(cost_of(c), follows_clock=False), plan)
    for prompt in (REPEATING, PROMPT):
        assert run(lm, prompt, sampling=sampling).token_ids == (
            run(plain, prompt, sampling=sampling).token_ids
        )


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "0.8"])
def test_switching_every_round_changes_no_token(toy, plain, sampling):
    exits = [Choice("early_exit", k) for k in (4, 1, 16)]
    script = [exits[0], PLAIN, Choice("lookup", 5), exits[1], exits[2], Choice("lookup", 1)]
    expected = run(plain, sampling=sampling).token_ids
    known = store_of([*REPEATING, *expected])
    out = run(with_controller(toy, Scripted(*script), lookup=known), sampling=sampling)
    assert out.token_ids == expected
    assert {r.drafter for r in out.rounds} == {"none", "early_exit", "lookup"}


@pytest.mark.parametrize("verification", ["token", "block"])
def test_looked_up_tokens_were_certain_to_be_drafted(verification):
    sampler = Sampler(SAMPLED, 3, 20, verification=verification)
    drafted = _looked_up(DraftRequest(0, 5, 7, 2, sampler), (3, 9))
    assert drafted.tokens == (3, 9)
    assert torch.equal(torch.stack(drafted.q), torch.eye(20, dtype=torch.float64)[[3, 9]])


@pytest.mark.parametrize("verification", ["token", "block"])
def test_no_two_drafted_tokens_have_the_same_noise(toy, monkeypatch, verification):
    """A later round must not meet the numbers again that a rejected draft was drawn with."""
    asked, gumbel = [], Sampler._gumbel

    def noting(self, position, device, *, stream=TARGET_STREAM, start=0):
        if stream == DRAFT_STREAM:
            asked.append((position, start))
        return gumbel(self, position, device, stream=stream, start=start)

    monkeypatch.setattr(Sampler, "_gumbel", noting)
    lm = SelfSpeculativeLM(toy(), None, PLANS["exit"], num_draft_tokens=6, lookup=False)
    sampling = SamplingParams(temperature=1.0, seed=3)
    out = run(lm, sampling=sampling, verification=verification)
    assert 0 < out.stats.num_accepted_tokens < out.stats.num_draft_tokens == len(asked)
    assert len(set(asked)) == len(asked)
    starts = [start for _, start in asked]
    ends = [len(REPEATING) + 1]  # where each round's first drafted token stands
    for r in out.rounds[1:]:
        ends.append(ends[-1] + len(r.token_ids))
    assert set(starts) <= set(ends)
    assert len({position for position, _ in asked}) < len(asked)  # some were drafted again


@pytest.mark.parametrize("verification", ["token", "block"])
def test_looked_up_tokens_can_be_seen_by_distributions(toy, plain, verification):
    """One token that is certain: p is one-hot, so every mode must give plain text."""
    certain = SamplingParams(temperature=0.001, seed=1)
    lm = with_controller(toy, Scripted(Choice("lookup", 6)))
    out = run(lm, sampling=certain, verification=verification)
    assert out.token_ids == run(plain, sampling=certain).token_ids
    assert out.stats.num_lookup_rounds > 0


def test_guesses_change_no_drafted_token_and_save_passes(toy, plain):
    known = store_of([*REPEATING, *run(plain).token_ids])
    without, guessed = (
        run(SelfSpeculativeLM(toy(), None, PLANS["exit"], num_draft_tokens=5, lookup=lookup))
        for lookup in (False, known)
    )
    assert guessed.token_ids == without.token_ids
    for name in ("num_draft_tokens", "num_accepted_tokens", "num_rounds"):
        assert getattr(guessed.stats, name) == getattr(without.stats, name)
    assert without.stats.num_draft_passes == without.stats.num_draft_tokens
    assert guessed.stats.num_draft_passes < 0.9 * without.stats.num_draft_passes


def test_automatic_drafts_take_guesses_and_charge_them(toy, plain, monkeypatch):
    """However dear sampling is: a guess that is wrong is not sampled."""
    expected = run(plain, sampling=SAMPLED).token_ids
    controller = Scripted(Choice("early_exit", 5))
    controller.times = PassTimes(replace(cost_of(0.1), sampling=0.2))
    known, charged, draft = store_of([*REPEATING, *expected]), [], controller.times.draft

    def noting(*arguments, each=1, **settings):
        charged.append(each)
        return draft(*arguments, each=each, **settings)

    guessed = run(with_controller(toy, controller, lookup=known), sampling=SAMPLED)
    monkeypatch.setattr(controller, "guesses", lambda rows, context: 0)
    monkeypatch.setattr(controller.times, "draft", noting)
    without = run(with_controller(toy, controller, lookup=known), sampling=SAMPLED)
    assert set(charged) == {1}
    monkeypatch.setattr(controller, "guesses", lambda rows, context: 4)
    settled, observe = [], controller.observe_draft

    def observing(*arguments, num_positions, num_passes, **settings):
        settled.append(num_positions > num_passes)
        observe(*arguments, num_positions=num_positions, num_passes=num_passes, **settings)

    monkeypatch.setattr(controller, "observe_draft", observing)
    run(with_controller(toy, controller, lookup=known), sampling=SAMPLED)
    assert max(charged) > 1
    assert any(settled)
    assert guessed.token_ids == without.token_ids == expected
    assert without.stats.num_draft_passes == without.stats.num_draft_tokens
    assert guessed.stats.num_draft_passes < 0.9 * guessed.stats.num_draft_tokens


def test_tokens_that_a_pass_has_run_for_are_drafted_however_dear_the_next_pass_is(
    toy, plain, monkeypatch
):
    text = run(plain).token_ids
    controller = Scripted(Choice("early_exit", 5, 1.0, (0.0,) * 16, draft_seconds=1e9))
    monkeypatch.setattr(controller, "guesses", lambda rows, context: 4)
    for known in (False, store_of([*REPEATING, *text])):
        out = run(with_controller(toy, controller, lookup=known))
        drafted = [r for r in out.rounds if r.drafter == "early_exit"]
        assert out.token_ids == text
        assert {r.num_draft_passes for r in drafted} == {1}
        by_passes = [r.num_draft_tokens - r.num_lookup_tokens for r in drafted]
        assert [len(r.chances) for r in drafted] == by_passes
        assert any(count > 1 for count in by_passes) is bool(known)


def exits(most: int, verify_seconds: float = 0.0, rate: float = 1.0) -> Choice:
    """An early exit of one pass beside a verify pass whose tokens cost so much each."""
    return Choice("early_exit", most, rate, (verify_seconds,) * 16)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "0.8"])
def test_what_is_looked_up_behind_a_draft_is_verified_with_it(toy, plain, sampling):
    text = run(plain, sampling=sampling).token_ids
    known = store_of([*REPEATING, *text])
    out = run(with_controller(toy, Scripted(exits(2)), lookup=known), sampling=sampling)
    drafted = [r for r in out.rounds if r.drafter == "early_exit"]
    assert out.token_ids == text
    assert all(1 <= r.num_draft_tokens - r.num_lookup_tokens <= 2 for r in drafted)
    assert max(r.num_accepted_tokens for r in drafted) > 2
    assert len({r.num_lookup_tokens for r in drafted}) > 1
    for r in drafted:
        ahead = r.num_draft_tokens - r.num_lookup_tokens
        assert (len(r.chances), len(r.confidences)) == (ahead, r.num_draft_tokens)
        behind = [lookup_confidence(64, True), lookup_confidence(1, True)]
        assert all(min(behind) <= told <= 1.0 for told in r.confidences[ahead:])
        assert r.positions >= 1 + r.num_draft_tokens
        assert r.stopped == ("number" if ahead == 2 else "end")


def test_what_is_looked_up_behind_a_draft_does_not_hide_why_it_stopped(toy, plain, monkeypatch):
    known = store_of([*REPEATING, *run(plain).token_ids])
    controller = Scripted(Choice("early_exit", 3, 1.0, (0.0,) * 16, draft_seconds=1e9))
    monkeypatch.setattr(controller, "guesses", lambda rows, context: 0)
    out = run(with_controller(toy, controller, lookup=known))
    drafted = [r for r in out.rounds if r.num_draft_tokens]
    assert max(r.num_draft_tokens for r in drafted) > 3
    assert {r.stopped for r in drafted} == {"cost"}


def test_no_more_is_looked_up_behind_a_draft_than_its_round_may_lose(toy, plain):
    known = store_of([*REPEATING, *run(plain).token_ids])
    bounded = Choice("early_exit", 2, 0.1, (0.1,) * 16, may_lose=0.35)
    out = run(with_controller(toy, Scripted(bounded), lookup=known))
    assert any(r.num_lookup_tokens for r in out.rounds)
    assert max(r.num_draft_tokens for r in out.rounds) == 3


def test_nothing_is_looked_up_behind_a_draft_where_it_does_not_pay(toy, plain):
    text = run(plain).token_ids
    known = store_of([*REPEATING, *text])
    out = run(with_controller(toy, Scripted(exits(2, verify_seconds=1.1)), lookup=known))
    assert out.token_ids == text
    assert not any(r.num_lookup_tokens for r in out.rounds)


@pytest.mark.parametrize("wrong", [False, True])
def test_what_was_looked_up_behind_a_draft_says_nothing_of_the_exit(toy, plain, monkeypatch, wrong):
    text = run(plain).token_ids
    shown = [(token + 1) % VOCAB_SIZE for token in text] if wrong else text
    controller, seen = Scripted(exits(1)), []
    monkeypatch.setattr(
        controller,
        "observe_draft",
        lambda state, choice, context, accepted, *told, **counts: seen.append(
            (len(accepted), [len(t) for t in told], counts["num_drafted"])
        ),
    )
    out = run(with_controller(toy, controller, lookup=store_of([*REPEATING, *shown])))
    assert out.token_ids == text
    assert any(r.num_lookup_tokens for r in out.rounds)
    assert {drafted for _, _, drafted in seen} == {1}
    assert max(count for count, _, _ in seen) == 1
    assert all(told == [1, 1] for _, told, _ in seen)


@pytest.mark.parametrize("wrong", [False, True])
def test_what_became_of_look_ups_is_settled_with_the_controller(toy, plain, monkeypatch, wrong):
    """Of those behind drafts, too; the text may end before they do."""
    text = run(plain).token_ids
    shown = [(token + 1) % VOCAB_SIZE for token in text] if wrong else text
    for choice, told in ((Choice("lookup", 4), "observe_lookup"), (exits(1), "observe_draft")):
        controller, seen = Scripted(choice), []
        monkeypatch.setattr(
            controller,
            told,
            lambda state, choice, context, *counts, seen=seen, **named: seen.append(
                (named["num_saved"], named["num_behind"]) if named else counts
            ),
        )
        out = run(with_controller(toy, controller, lookup=store_of([*REPEATING, *shown])))
        assert out.token_ids == text
        rounds = [r for r in out.rounds[1:] if r.num_draft_tokens]
        looked_up = [r.num_draft_tokens - (told == "observe_draft") for r in rounds]
        saved = [len(r.token_ids) - 1 for r in rounds]
        assert seen == list(zip(saved, looked_up, strict=True))
        assert any(count > 1 for _, count in seen)
        assert (sum(n for n, _ in seen) > 20) != wrong


@pytest.mark.parametrize("choice", [Choice("lookup", 6), exits(6)], ids=["look-ups", "drafts"])
def test_a_text_that_ends_in_its_draft_saved_a_round_less(toy, plain, monkeypatch, choice):
    """Nothing comes after the accepted tokens: a draft of a last token saves none."""
    text = run(plain).token_ids
    known, seen = store_of([*REPEATING, *text]), []
    for last in range(2, 8):
        controller = Scripted(choice)
        for told in ("observe_lookup", "observe_draft"):
            monkeypatch.setattr(
                controller,
                told,
                lambda state, choice, context, *rest, **named: seen.append(
                    named.get("num_saved", rest[0])
                ),
            )
        lm, ends = with_controller(toy, controller, lookup=known), text[last]
        lm._eos_ids = frozenset([ends])
        out = run(lm)
        rounds = [r for r in out.rounds[1:] if r.num_draft_tokens]
        assert out.token_ids == text[: text.index(ends) + 1]
        assert seen[-len(rounds) :] == [len(r.token_ids) - 1 for r in rounds]
        seen.append(any(r.num_accepted_tokens == len(r.token_ids) for r in rounds))
    assert True in seen


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


def test_a_cap_on_drafts_holds_for_what_is_looked_up_behind_them(toy, plain):
    text, counts = run(plain).token_ids, set()
    stack = SelfSpeculativeLM(toy(), None, PLANS["exit"]).stack
    for most in (2, 4):
        decoder = Decoder(
            stack,
            EarlyExitDrafter(stack, PLANS["exit"]),
            PLANS["exit"],
            looks_up=True,
            store=store_of([*REPEATING, *text]),
        )
        decoder.speculator.controller = Scripted(exits(1))
        row = decode(
            decoder, prompt=REPEATING, limit=NEW, num_draft_tokens="auto", max_draft_tokens=most
        )
        assert tuple(row.token_ids) == text
        counts.add(max(r.num_draft_tokens for r in row.rounds))
    assert counts == {2, 4}


@pytest.mark.parametrize("verification", ["token", "block"])
def test_distributions_judge_no_token_that_was_drawn_from_none(toy, verification):
    """Nor does a fixed number get more than it says, nor a row that shares its passes."""
    sampling, known = SamplingParams(temperature=0.3, seed=5), LookupStore()
    known.add(REPEATING)
    lm = with_controller(toy, Scripted(exits(2)), lookup=known)
    outs = [run(lm, sampling=sampling, verification=verification)]
    outs += lm.generate([REPEATING, REPEATING], max_new_tokens=NEW)
    outs.append(run(lm, num_draft_tokens=2))
    for out in outs:
        assert any(r.drafter == "early_exit" for r in out.rounds)
        assert not any(r.num_lookup_tokens for r in out.rounds)


@pytest.mark.parametrize("verification", ["token", "block"])
def test_guesses_change_no_sampled_draft_either(toy, verification):
    sampling, outs, known = SamplingParams(temperature=0.3, seed=5), [], False
    for _ in range(2):
        lm = SelfSpeculativeLM(toy(), None, PLANS["exit"], num_draft_tokens=5, lookup=known)
        outs.append(run(lm, sampling=sampling, verification=verification))
        known = store_of([*REPEATING, *outs[0].token_ids])
    assert outs[0].token_ids == outs[1].token_ids
    assert outs[1].stats.num_draft_passes < outs[0].stats.num_draft_passes


@pytest.mark.parametrize("verification", ["coupled", "token"])
@pytest.mark.parametrize("plan", [None, "exit"])
@pytest.mark.parametrize("behind", [1, 4])
def test_a_store_of_a_larger_vocabulary_changes_nothing(toy, plain, plan, behind, verification):
    sampling = SamplingParams(temperature=0.3, seed=5)
    text = run(plain, sampling=sampling).token_ids
    known = store_of([*REPEATING, *text[:behind], 10**6, 7, 8])
    plan = PLANS[plan] if plan else None
    lm = SelfSpeculativeLM(toy(), None, plan, num_draft_tokens=6, lookup=known)
    out = run(lm, sampling=sampling, verification=verification)
    assert len(out.token_ids) == NEW
    if verification == "coupled":
        assert out.token_ids == text


def test_wrong_guesses_are_counted_among_the_positions(toy):
    lm = SelfSpeculativeLM(toy(), None, PLANS["exit"], num_draft_tokens=4)
    stack, plan = lm.stack, PLANS["exit"]
    decoder = Decoder(stack, EarlyExitDrafter(stack, plan), plan, looks_up=True)
    row = join(decoder, REPEATING, num_draft_tokens=4)
    decoder.step()
    (record,) = decoder.step()
    assert record.positions >= record.num_draft_tokens + 1
    assert record.num_draft_passes <= record.num_draft_tokens
    assert row.index is not None
    assert len(row.index) == len(REPEATING) + len(row.token_ids)


def test_without_a_plan_a_number_looks_up_alone(toy, plain):
    known = store_of(random_ids(9), [*REPEATING[5:], *run(plain).token_ids])
    out = run(SelfSpeculativeLM(toy(), None, num_draft_tokens=6, lookup=known))
    assert out.token_ids == run(plain).token_ids
    assert out.stats.num_draft_passes == 0
    assert out.stats.num_lookup_rounds > 0 < out.stats.num_accepted_tokens
    off = SelfSpeculativeLM(toy(), None, num_draft_tokens=6, lookup=False)
    assert run(off).stats.num_draft_tokens == 0


def test_a_store_helps_the_next_request(toy, plain):
    store = LookupStore()
    lm = SelfSpeculativeLM(toy(), None, num_draft_tokens=6, lookup=store)
    first, second = (run(lm, PROMPT) for _ in range(2))
    assert first.token_ids == second.token_ids == run(plain, PROMPT).token_ids
    assert len(store) == 2 * (len(PROMPT) + NEW) + 1  # each text once, whole
    assert second.stats.num_rounds <= 0.5 * first.stats.num_rounds


def test_what_a_store_offered_is_judged_as_the_store_s(toy, plain):
    controller = Controller(cost_of(0.1), follows_clock=False)
    known = store_of([*PROMPT, *run(plain, PROMPT).token_ids])
    run(with_controller(toy, controller, lookup=known), PROMPT)
    (kind,) = controller._experiences.values()
    stored, own = (
        sum(share.trials for (of_store, _), share in kind.lookups.items() if of_store == wanted)
        for wanted in (True, False)
    )
    assert stored > 5 * own


def test_rows_of_a_batch_choose_for_themselves(toy, plain):
    lm = with_controller(toy, Controller(cost_of(0.05), follows_clock=False))
    prompts = [REPEATING, PROMPT, random_ids(30, 3), random_ids(5, 4)]
    numbers = ["auto", 0, 3, "auto"]
    batch = lm.open_batch(max_new_tokens=NEW)
    rows = [batch.add(p, num_draft_tokens=n) for p, n in zip(prompts, numbers, strict=True)]
    while batch.unfinished:
        batch.step()
    outs = [batch.remove(row) for row in rows]
    assert [o.token_ids for o in outs] == [run(plain, p).token_ids for p in prompts]
    assert outs[1].stats.num_draft_tokens == 0
    assert {r.num_draft_tokens for r in outs[2].rounds[1:-3]} == {3}
    assert outs[0].stats.num_draft_tokens > 0


def test_rows_say_how_many_tokens_they_have_left(toy):
    asked = []

    class Listening(Controller):
        def choose(self, asks, *, drafts, fixed=()):
            asked.append([ask.left for ask in asks])
            return super().choose(asks, drafts=drafts, fixed=fixed)

    batch = with_controller(toy, Listening(cost_of(0.05), follows_clock=False)).open_batch(
        ignore_eos=True
    )
    left = {batch.add(random_ids(5, n), max_new_tokens=n): n for n in (9, 30)}
    known = []
    while batch.unfinished:
        known.append([n for n in left.values() if n])
        for record in batch.step():
            left[record.row] -= len(record.token_ids)
    assert asked[0] == [8, 29]
    assert len(asked) > 3
    assert all(lefts in known for lefts in asked)


def test_what_a_grammar_forces_is_not_slept_through():
    free, forced = (
        SimpleNamespace(
            state=SimpleNamespace(sleeps=lambda beside: beside == 2),
            spec=SimpleNamespace(sampler=SimpleNamespace(constraint=constraint)),
        )
        for constraint in (None, object())
    )
    batches = ([free, free], [free, forced], [free])
    asleep = [all(layerskip.speculation._sleeps(r, len(rows)) for r in rows) for rows in batches]
    assert asleep == [True, False, False]


def test_rows_at_rest_are_seldom_looked_up_for_and_their_text_is_plain_text(toy, monkeypatch):
    """Where a looked-up token costs as much as a plain round of its row."""
    dear = Curve((1, 64), (0,), ((1.0, 64.0),))
    controller = Controller(CostTable(dear, FREE, dear, 0.0, 1, {}), follows_clock=False)
    lm, asked = with_controller(toy, controller, plan=None), []
    monkeypatch.setattr(
        layerskip.speculation,
        "guess_for",
        lambda row, *rest, **how: asked.append(row) or guess_for(row, *rest, **how),
    )
    prompts = [REPEATING, PROMPT]
    texts = {}
    for wanted in (0, "auto"):
        asked.clear()
        batch = lm.open_batch(max_new_tokens=NEW, num_draft_tokens=wanted, ignore_eos=True)
        rows = [batch.add(prompt) for prompt in prompts]
        while batch.unfinished:
            batch.step()
        texts[wanted] = [batch.remove(row).token_ids for row in rows]
    assert texts["auto"] == texts[0]
    assert 2 * NEW / 8 < len(asked) < 2 * NEW / 2


def test_a_dear_draft_is_given_up_and_the_response_says_so(toy):
    out = run(with_controller(toy, Controller(cost_of(5.0), follows_clock=False), lookup=False))
    assert out.stats.num_plain_rounds == out.stats.num_rounds == NEW - 1


@pytest.mark.parametrize("early", ["end", "removed"])
def test_a_request_that_is_over_gives_back_what_it_had_in_advance(toy, plain, early):
    """For plain rounds up to its limit, which do not come."""
    lm = with_controller(toy, Controller(cost_of(0.5), (0.01,), follows_clock=False), lookup=False)
    if early == "end":
        text = run(plain, PROMPT).token_ids
        new = next(t for i, t in enumerate(text) if i > 6 and t not in text[:i])
        lm._eos_ids = frozenset({new})
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


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "0.8"])
def test_a_draft_ends_where_a_processor_allows_nothing_of_its_vocabulary(toy, sampling):
    """Its scores are all -inf: there is no token, and no confidence in one."""
    known = PlanFile(PLANS["exit"], draft_vocabulary=(3, 50, 99))

    new = [t for t in range(VOCAB_SIZE) if t not in (3, 50, 99, *PROMPT)]

    def unheard_of(ids, scores):
        allowed = torch.full_like(scores, float("-inf"))
        only = new[ids.shape[1]]
        allowed[:, only] = scores[:, only]
        return allowed

    heard, rules = [], [unheard_of]
    settings = {"sampling": sampling, "logits_processor": rules, "max_new_tokens": 8}
    lm = SelfSpeculativeLM(toy(), None, known, num_draft_tokens=3, lookup=False)
    out = lm.generate(PROMPT, **settings, on_round=heard.append)
    plain = lm.generate(PROMPT, **settings, num_draft_tokens=0)
    assert out.token_ids == plain.token_ids
    assert [(r.num_draft_tokens, r.confidences) for r in heard] == [(0, ())] * 8
    assert all(r.num_draft_passes == 1 for r in heard[1:-1])


def test_a_text_that_ends_with_its_first_token_is_looked_up_too(toy):
    store = LookupStore()
    run(SelfSpeculativeLM(toy(), None, num_draft_tokens=6, lookup=store), max_new_tokens=1)
    assert len(store) >= len(REPEATING) + 1


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
    monkeypatch.setattr(lm, "_eos_ids", frozenset({text[last]}))
    monkeypatch.setattr(lm.controller, "observe_draft", lambda *given, **_: learnt.append(given[3]))
    out = run(lm)
    assert out.token_ids == text[: last + 1]
    assert learnt == [*[[True] * 4] * (len(learnt) - 1), [True] * (last % 5)]


@pytest.mark.parametrize(("wanted", "said"), [(1, "number"), (3, "confidence")])
def test_a_draft_that_has_all_its_tokens_was_stopped_by_their_number(toy, wanted, said):
    """However sure its last one was."""
    hopeless = Choice("early_exit", wanted, 1e9, (1.0,) * 16)
    out = run(with_controller(toy, Scripted(hopeless), lookup=False))
    drafted = [r for r in out.rounds[1:-1] if r.num_draft_tokens]
    assert {(r.num_draft_tokens, r.stopped) for r in drafted} == {(1, said)}


def test_confidence_stops_drafts_and_chances_are_told(lm):
    out = run(lm, PROMPT)
    drafted = [r for r in out.rounds if r.drafter == "early_exit"]
    assert drafted
    assert all(len(r.chances) == r.num_draft_tokens - r.num_lookup_tokens for r in drafted)
    assert all(0.0 <= chance <= 1.0 for r in drafted for chance in r.chances)
    assert all(len(r.confidences) == r.num_draft_tokens for r in drafted)
    assert len({told for r in drafted for told in r.confidences}) > len(drafted)
    assert any(r.stopped for r in drafted)


@pytest.mark.parametrize("sampling", [None, SAMPLED])
def test_drafts_of_a_fixed_number_say_how_sure_they_were_if_anybody_listens(toy, sampling):
    lm = with_controller(toy, None, lookup=False)
    settings = {"max_new_tokens": NEW, "num_draft_tokens": 3, "sampling": sampling}
    silent, heard = lm.generate(PROMPT, **settings), []
    told = lm.generate(PROMPT, **settings, on_round=heard.append)
    assert told.token_ids == silent.token_ids
    assert not any(r.confidences for r in silent.rounds)
    drafted = [r for r in heard if r.num_draft_tokens]
    assert drafted
    for r in drafted:
        assert len(r.confidences) == r.num_draft_tokens
        assert all(0.0 < told <= 1.0 for told in r.confidences)
        assert (r.chances, r.stopped) == ((), "number")


def test_what_spoke_for_a_looked_up_token_is_the_length_of_its_match(lm):
    known = {lookup_confidence(length, False) for length in range(FORCED_MATCH + 1)}
    out = run(lm, PROMPT * 4)
    looked_up = [r for r in out.rounds if r.drafter == "lookup"]
    assert looked_up
    for r in looked_up:
        assert len(r.confidences) == r.num_draft_tokens
        assert set(r.confidences) <= known
        assert not r.chances


def test_no_round_in_which_a_size_was_proven_is_timed(toy, monkeypatch):
    """A proof takes several passes' time, which would be laid to the pass's own charge."""
    timed = []
    lm = with_controller(toy, Controller(cost_of(0.1)), num_draft_tokens=2)
    monkeypatch.setattr(Speculator, "observe_seconds", lambda *_: timed.append(len(counted)))
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


def test_what_others_look_up_is_verified_too_when_a_draft_goes_on(toy, plain, monkeypatch):
    known = store_of([*REPEATING, *run(plain).token_ids])
    controller, asked = Scripted(Choice("early_exit", 4), Choice("lookup", 5)), []

    def going_on(stoppers, context, **shape):
        asked.append(shape)
        return [False]

    monkeypatch.setattr(controller, "going_on", going_on)
    monkeypatch.setattr(controller, "guesses", lambda rows, context: 0)
    lm = with_controller(toy, controller, lookup=known)
    lm.generate([PROMPT, REPEATING], max_new_tokens=7)
    assert asked[0] == {"rows": 2, "verified": 2 + 5 + 1, "others": 0}


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
    monkeypatch.setattr(Speculator, "observe_seconds", lambda *given: timed.append(given[3:]))
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


def test_what_drawing_looked_up_tokens_takes_is_expected_of_the_verify_pass(
    toy, plain, monkeypatch
):
    known = store_of([*REPEATING, *run(plain, sampling=SAMPLED).token_ids])
    controller, told = Scripted(Choice("lookup", 4)), []
    cost = replace(cost_of(0.1), sampling=0.1, judging=0.001)
    times = controller.times = PassTimes(cost, follows_clock=False)
    assert times.drawing() > 0.0
    monkeypatch.setattr(times, "observe_phases", lambda *given: told.append(given[2:]))
    run(with_controller(toy, controller, lookup=known), sampling=SAMPLED)
    draft, verify, tokens, _ = told[0]
    assert (draft, tokens) == (0.0, 5)
    assert verify == pytest.approx(cost.verify_pass(5, 0) + 4 * times.drawing())


def test_drawing_what_is_looked_up_behind_a_draft_is_expected_too(toy, plain, monkeypatch):
    known = store_of([*REPEATING, *run(plain, sampling=SAMPLED).token_ids])
    controller, told = Scripted(exits(2)), []
    cost = replace(cost_of(0.1), sampling=0.1, judging=0.001)
    times = controller.times = PassTimes(cost, follows_clock=False)
    monkeypatch.setattr(times, "due", lambda **_: True)
    monkeypatch.setattr(times, "observe_phases", lambda *given: told.append(given[3:5]))
    lm = with_controller(toy, controller, lookup=known)
    run(lm, sampling=SAMPLED)  # proves the sizes of passes
    told.clear()
    out = run(lm, sampling=SAMPLED)
    drawn = [(v - cost.verify_pass(n, 0)) / times.drawing() for v, n in told]
    expected = {r.num_lookup_tokens for r in out.rounds[1:]}
    assert expected > {0}
    assert {round(n, 6) for n in drawn} == expected


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, WITH_RULES], ids=["greedy", "0.8", "rules"])
@pytest.mark.parametrize("size", [8, 64, VOCAB_SIZE])
@pytest.mark.one_in(3)
def test_a_trimmed_vocabulary_changes_no_token(toy, plain, sampling, size):
    kept = tuple(range(0, VOCAB_SIZE, VOCAB_SIZE // size))[:size]
    known = PlanFile(PLANS["exit"], draft_vocabulary=kept)
    lm = SelfSpeculativeLM(toy(), None, known, num_draft_tokens=4)
    outs = lm.generate([REPEATING, PROMPT], max_new_tokens=NEW, sampling=sampling)
    for out, prompt in zip(outs, (REPEATING, PROMPT), strict=True):
        assert out.token_ids == run(plain, prompt, sampling=sampling).token_ids
        assert out.stats.num_uncovered_tokens == sum(t not in kept for t in out.token_ids)
    assert lm.coverage_meter.coverage == pytest.approx(
        1 - sum(o.stats.num_uncovered_tokens for o in outs) / sum(len(o.token_ids) for o in outs)
    )


def test_trimmed_drafts_take_kept_tokens_and_those_of_the_row(toy):
    kept = (3, 50, 99)
    known = PlanFile(PLANS["exit"], draft_vocabulary=kept)
    lm = SelfSpeculativeLM(toy(), None, known, num_draft_tokens=4, lookup=False)
    taken, lengths = [], []
    draft = lm._drafter.draft

    def spy(requests, *rest):
        drafts = draft(requests, *rest)
        taken.extend((r.own_ids, d.tokens) for r, d in zip(requests, drafts, strict=True))
        lengths.extend(r.length for r in requests)
        return drafts

    lm._drafter.draft = spy
    (out,) = lm.generate([PROMPT], max_new_tokens=12, sampling=SAMPLED, verification="token")
    assert taken
    assert all(set(tokens) <= own | set(kept) for own, tokens in taken)
    assert set(PROMPT) - set(kept) <= taken[0][0]
    whole = (*PROMPT, *out.token_ids)
    assert [own for own, _ in taken] == [{*whole[: n + 1]} - {*kept} for n in lengths]


@pytest.mark.parametrize("verification", ["token", "block"])
def test_sampled_texts_over_a_trimmed_vocabulary_do_not_depend_on_neighbours(toy, verification):
    known = PlanFile(PLANS["exit"], draft_vocabulary=tuple(range(40)))
    lm = SelfSpeculativeLM(toy(), None, known, num_draft_tokens=3, lookup=False)
    settings = {"max_new_tokens": 24, "sampling": SAMPLED, "verification": verification}
    prompts = [PROMPT, random_ids(20, 5), random_ids(9, 6)]
    together = lm.generate(prompts, **settings)
    assert [o.token_ids for o in together] == [
        lm.generate(p, **settings).token_ids for p in prompts
    ]


def test_a_vocabulary_beyond_the_model_is_refused(toy):
    known = PlanFile(PLANS["exit"], draft_vocabulary=(1, VOCAB_SIZE))
    with pytest.raises(ValueError, match=f"names token id {VOCAB_SIZE}; the model's vocabulary"):
        SelfSpeculativeLM(toy(), None, known)


def test_a_poor_vocabulary_raises_the_alarm(toy, caplog):
    known = PlanFile(PLANS["exit"], draft_vocabulary=(0,))
    lm = SelfSpeculativeLM(toy(), None, known, num_draft_tokens=2)
    run(lm, PROMPT)
    assert "the draft vocabulary covers" in caplog.text
    run(lm, PROMPT)
    assert caplog.text.count("the draft vocabulary covers") == 1, "each request is warned of"


def test_new_weights_reach_the_trimmed_head():
    model = make_model()
    known = PlanFile(PLANS["exit"], draft_vocabulary=tuple(range(VOCAB_SIZE)))
    lm = SelfSpeculativeLM(model, None, known, num_draft_tokens=4, lookup=False)
    run(lm, PROMPT)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    trimmed = run(lm, PROMPT)
    whole = run(
        SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4, lookup=False), PROMPT
    )
    assert trimmed.token_ids == whole.token_ids
    assert trimmed.stats.num_accepted_tokens == whole.stats.num_accepted_tokens


@pytest.mark.parametrize(
    ("sampling", "greedy"),
    [
        (GREEDY, True),
        (SamplingParams(repetition_penalty=1.2), False),
        (SamplingParams(temperature=0.8, seed=1), False),
    ],
)
def test_the_controller_knows_who_takes_the_likeliest_token(lm, sampling, greedy):
    batch = lm.open_batch(max_new_tokens=4, sampling=sampling)
    row = batch.add(PROMPT)
    assert batch._rows.row(row).state.greedy is greedy


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


def test_no_plan_that_pays_means_look_ups_alone(toy, plain):
    lm = SelfSpeculativeLM(toy(), None, PlanFile(None))
    out = run(lm)
    assert lm.plan is None
    assert out.token_ids == run(plain).token_ids
    assert out.stats.num_draft_passes == 0


def test_threads_share_a_controller(toy, plain):
    lm = with_controller(toy, Controller(cost_of(0.1)), lookup=LookupStore())
    prompts = [REPEATING, PROMPT, random_ids(21, 8)]
    expected = [run(plain, p).token_ids for p in prompts]
    found = {}

    def work(i):
        found[i] = run(lm, prompts[i]).token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(3)] == expected


def test_a_failing_pass_leaves_nothing_behind(toy, plain, monkeypatch):
    lm = with_controller(toy, Controller(cost_of(0.05), follows_clock=False))
    batch = lm.open_batch(max_new_tokens=NEW)
    row = batch.add(REPEATING)
    for _ in range(3):
        batch.step()
    before = batch._rows.row(row).context
    logits = lm.stack.logits

    def fails(hidden):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(lm.stack, "logits", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        batch.step()
    assert batch._rows.row(row).context == before
    monkeypatch.setattr(lm.stack, "logits", logits)
    while batch.unfinished:
        batch.step()
    assert batch.remove(row).token_ids == run(plain).token_ids


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"num_draft_tokens": "some"},
            ValueError,
            "must be 'auto' or between 0 and 32, got 'some'",
        ),
        ({"num_draft_tokens": 33}, ValueError, "between 0 and 32, got 33"),
        ({"num_draft_tokens": True}, TypeError, "must be an int, got True"),
        ({"lookup": "yes"}, TypeError, "lookup must be a bool, a LookupStore or None, got 'yes'"),
    ],
)
def test_bad_settings_are_refused(toy, arguments, error, message):
    with pytest.raises(error, match=message):
        SelfSpeculativeLM(toy(), None, **arguments)


def row_that_knows(asked: list[tuple[int, ...]], *found: int, constraint=None) -> SimpleNamespace:
    """With 9 tokens to come, and 3 as end of sequence."""
    guess = Guess(found, 2)
    index = SimpleNamespace(guess=lambda most, ahead: asked.append((most, *ahead)) or guess)
    spec = SimpleNamespace(
        sampler=SimpleNamespace(constraint=constraint),
        max_draft_tokens=32,
        limit=10,
        eos_ids=frozenset({3}),
    )
    return SimpleNamespace(index=index, spec=spec, token_ids=(), context=(1,))


def test_each_place_is_looked_up_once():
    asked: list[tuple[int, ...]] = []
    ahead = lookahead(row_that_knows(asked, 9, 8, 3, 7), TokenIndex([5, 6, 7, 5]).guess(4))
    assert ahead((), 2) == (6, 7)
    assert not asked
    assert ahead.behind((6,)).tokens == (9, 8, 3)  # nothing follows an end of sequence
    assert ahead((6,), 2) == (9, 8)
    assert asked == [(8, 6)]  # as many as there is room for
    assert ahead((6, 9), 1) == (9,)
    assert ahead((6, 9), 9) == (9, 8, 3, 7)
    assert asked == [(8, 6), (1, 6, 9), (7, 6, 9)]


def test_nothing_is_behind_the_end_of_a_text_or_where_a_grammar_knows_more():
    asked: list[tuple[int, ...]] = []
    assert not Lookahead(row_that_knows(asked, 9), Guess()).behind((6, 3)).tokens
    forcing = SimpleNamespace(guess=lambda context, found, most: (context, found, most))
    governed = Lookahead(row_that_knows(asked, 9, 8, constraint=forcing), Guess())
    assert not governed.behind((6,)).tokens
    assert not asked
    assert governed((6,), 1) == (1, 6)
    assert lookahead(SimpleNamespace(index=None, spec=governed._row.spec), Guess()) is not None
    bare = SimpleNamespace(sampler=SimpleNamespace(constraint=None))
    assert lookahead(SimpleNamespace(index=None, spec=bare), Guess()) is None


def test_judging_guesses_ends_at_the_first_wrong_one():
    assert judged([1, 2, 3], [1, 2, 9, 4]) == [True, True, False]
    assert judged([1, 2, 3], [1]) == [True]
    assert judged([], [1]) == []


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "0.8"])
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "mixtral", "bloom"])
@pytest.mark.one_in(2)
def test_families_with_modules_of_their_own_check_guesses_too(family, sampling):
    """Learned positions, capped scores, experts, and attention that takes one row a pass."""
    model = make_toy(family, "bfloat16")
    depth = model.config.num_hidden_layers
    plan = DraftPlan.exiting(num_layers=depth, exit_layer=2)
    prompts = [random_ids(17, 1), random_ids(9, 2)]
    settings = {"max_new_tokens": 20, "sampling": sampling}
    expected = SelfSpeculativeLM(model, None, num_draft_tokens=0).generate(prompts, **settings)
    texts = [[*p, *o.token_ids] for p, o in zip(prompts, expected, strict=True)]
    # Right for a while, then wrong: guesses have to be checked, not believed.
    half_right = [[*t[:-8], *random_ids(8, 3)] for t in texts]
    lm = SelfSpeculativeLM(model, None, plan, num_draft_tokens=5, lookup=store_of(*half_right))
    outs = lm.generate(prompts, **settings)
    assert [o.token_ids for o in outs] == [o.token_ids for o in expected]
    assert sum(o.stats.num_draft_passes for o in outs) < sum(o.stats.num_draft_tokens for o in outs)


@pytest.mark.parametrize("model", [("llama", "bfloat16", "odd"), ("qwen2", "bfloat16")])
def test_bits_hold_when_rows_and_lengths_change_every_round(toy, model):
    """Rows of a batch look up, draft and decode plainly in turn."""
    expected = SelfSpeculativeLM(toy(*model), None, num_draft_tokens=0)
    prompts = [REPEATING, PROMPT, random_ids(30, 3)]
    plain = [expected.generate(p, max_new_tokens=NEW).token_ids for p in prompts]
    script = [Choice("early_exit", 5), PLAIN, Choice("lookup", 7), Choice("early_exit", 2)]
    lm = SelfSpeculativeLM(
        toy(*model),
        None,
        PLANS["skipping"],
        lookup=store_of(*([*p, *t] for p, t in zip(prompts, plain, strict=True))),
    )
    lm._controller = Scripted(*script)
    outs = lm.generate(prompts, max_new_tokens=NEW)
    assert [o.token_ids for o in outs] == plain
    assert {r.drafter for o in outs for r in o.rounds} == {"none", "early_exit", "lookup"}
