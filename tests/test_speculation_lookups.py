"""Looked-up tokens, alone, in drafts and behind them: what they change, and never the text."""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from decoding import PROMPT, SAMPLED, decode, join
from speculating import (
    FREE,
    GREEDY,
    NEW,
    REPEATING,
    Scripted,
    cost_of,
    run,
    store_of,
    with_controller,
)
from toys import PLANS, VOCAB_SIZE, random_ids
from transformers import LlamaConfig, LlamaForCausalLM
from zoo import make_toy

import layerskip.guessing
import layerskip.speculation
from layerskip import DraftPlan, LookupStore, SamplingParams, SelfSpeculativeLM
from layerskip.attempt import _looked_up
from layerskip.constraint import Context
from layerskip.control.experience import lookup_confidence
from layerskip.control.pass_times import PassTimes
from layerskip.control.stopping import Choice
from layerskip.controller import Controller
from layerskip.cost import CostTable, Curve
from layerskip.decode import Decoder
from layerskip.drafting import DraftRequest, EarlyExitDrafter
from layerskip.guessing import Lookahead, guess_for, judged, lookahead
from layerskip.lookup import FORCED_MATCH, Guess, TokenIndex, _IndexedText
from layerskip.plan import PlanFile
from layerskip.sampling import Sampler


@pytest.fixture(scope="module")
def plain(toy) -> SelfSpeculativeLM:
    return SelfSpeculativeLM(toy(), None, num_draft_tokens=0)


def exits(most: int, verify_seconds: float = 0.0, rate: float = 1.0) -> Choice:
    """An early exit of one pass beside a verify pass whose tokens cost so much each."""
    return Choice("early_exit", most, rate, (verify_seconds,) * 16)


@pytest.mark.parametrize("verification", ["token", "block"])
def test_looked_up_tokens_were_certain_to_be_drafted(verification):
    sampler = Sampler(SAMPLED, 3, 20, verification=verification)
    drafted = _looked_up(DraftRequest(0, 5, 7, 2, sampler), (3, 9))
    assert drafted.tokens == (3, 9)
    assert torch.equal(torch.stack(drafted.q), torch.eye(20, dtype=torch.float64)[[3, 9]])


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
    monkeypatch.setattr(controller, "guess_prices", lambda context, greedy: [])
    monkeypatch.setattr(controller.times, "draft", noting)
    without = run(with_controller(toy, controller, lookup=known), sampling=SAMPLED)
    assert set(charged) == {1}
    monkeypatch.setattr(controller, "guess_prices", lambda context, greedy: [0.0] * 4)
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
    monkeypatch.setattr(controller, "guess_prices", lambda context, greedy: [])
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
        lm.eos_ids = frozenset([ends])
        out = run(lm)
        rounds = [r for r in out.rounds[1:] if r.num_draft_tokens]
        assert out.token_ids == text[: text.index(ends) + 1]
        assert seen[-len(rounds) :] == [len(r.token_ids) - 1 for r in rounds]
        seen.append(any(r.num_accepted_tokens == len(r.token_ids) for r in rounds))
    assert True in seen


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
            decoder,
            prompt=REPEATING,
            max_new_tokens=NEW,
            num_draft_tokens="auto",
            max_draft_tokens=most,
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
def test_guesses_change_no_sampled_draft_either(toy, verification, monkeypatch):
    sampling, outs = SamplingParams(temperature=0.3, seed=5), []
    for _ in range(2):
        lm = SelfSpeculativeLM(toy(), None, PLANS["exit"], num_draft_tokens=5, lookup=bool(outs))
        outs.append(run(lm, sampling=sampling, verification=verification))
        known = partial(TokenIndex, store=store_of([*REPEATING, *outs[0].token_ids]))
        monkeypatch.setattr(layerskip.guessing, "TokenIndex", lambda text, k=known, **_: k(text))
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


@pytest.fixture(scope="module")
def indifferent() -> SelfSpeculativeLM:
    """Four tokens, each as likely as any, everywhere."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=32,
            eos_token_id=None,
        )
    ).eval()
    torch.nn.init.zeros_(model.lm_head.weight)
    return SelfSpeculativeLM(model, num_draft_tokens=3, lookup=True)


@pytest.mark.parametrize("verification", ["coupled", "token", "block"])
def test_a_store_changes_no_distribution_where_a_seed_comes_again(indifferent, verification):
    """What was drawn when an earlier guess was refused comes back as a guess, to be judged by the
    same random number."""
    lm, found, tries = indifferent, Counter(), 256
    for seed in range(tries):
        lm._store = LookupStore()
        settings = {"verification": verification, "max_new_tokens": 5}
        settings["sampling"] = SamplingParams(temperature=1.0, seed=seed)
        outs = [run(lm, [1, 2, 3, 0], **settings) for _ in range(3)]
        found[outs[-1].token_ids[:3]] += 1
    due = tries / 4**3
    chi_square = sum((found[text] - due) ** 2 / due for text in product(range(4), repeat=3))
    assert chi_square < 63 + 5 * (2 * 63) ** 0.5  # 63 degrees of freedom, five deviations


@pytest.mark.parametrize("verification", ["coupled", "token", "block"])
@pytest.mark.parametrize("wanted", ["auto", 2])
def test_drafts_as_long_as_others_taught_are_judged_by_numbers_of_their_own(
    toy, verification, wanted
):
    """How far one drafts depends on how one with the same seed was judged: by the same numbers."""
    lm = with_controller(toy, Scripted(exits(2)), lookup=False)
    sampling = SamplingParams(temperature=1.0, seed=5)
    settings = {"sampling": sampling, "verification": verification, "num_draft_tokens": wanted}
    outs = [run(lm, **settings) for _ in range(3)]
    repeats = verification == "coupled" or wanted != "auto"
    assert len({out.token_ids for out in outs}) == (1 if repeats else 3)
    assert {out.seed for out in outs} == {5}


@pytest.mark.parametrize("plan", [None, "exit"])
@pytest.mark.parametrize("verification", ["token", "block"])
def test_nothing_is_looked_up_in_a_store_for_laws_that_its_texts_may_depend_on(
    toy, plan, verification
):
    """Nor in a draft's pass, whose guesses have a say in where the draft ends; the text itself is
    still looked up in."""
    settings = {"sampling": SamplingParams(temperature=0.3, seed=5), "verification": verification}
    chosen, counted, known = PLANS[plan] if plan else None, [], True
    for _ in range(2):
        lm = SelfSpeculativeLM(toy(), None, chosen, num_draft_tokens=4, lookup=known)
        out = run(lm, **settings)
        counted.append((out.token_ids, out.stats.num_draft_passes, out.stats.num_draft_tokens))
        known = store_of([*REPEATING, *out.token_ids])
    assert counted[0] == counted[1]
    assert counted[0][2] > 0


def test_wrong_guesses_are_counted_among_the_positions(toy):
    lm = SelfSpeculativeLM(toy(), None, PLANS["exit"], num_draft_tokens=4)
    stack, plan = lm.stack, PLANS["exit"]
    decoder = Decoder(stack, EarlyExitDrafter(stack, plan), plan, looks_up=True)
    row = join(decoder, REPEATING, num_draft_tokens=4)
    decoder.step()
    known = len(row.context)
    (record,) = decoder.step()
    assert record.positions >= record.num_draft_tokens + 1
    assert record.num_draft_passes <= record.num_draft_tokens
    assert row.index is not None
    assert len(row.index) == known


def test_a_look_up_knows_all_that_was_emitted_since_the_last_one(toy, monkeypatch):
    """Rounds that look nothing up add nothing; an interrupt that left half of it is survived."""
    lm = SelfSpeculativeLM(toy(), None, PLANS["exit"])
    decoder = Decoder(lm.stack, EarlyExitDrafter(lm.stack, lm.plan), lm.plan, looks_up=True)
    row = join(decoder, REPEATING, num_draft_tokens=4, max_new_tokens=40)
    decoder.step()
    guess_for(row, None, looks_up=True)

    def interrupted(text, tokens):
        text.tokens.extend(tokens)
        raise KeyboardInterrupt

    fresh = random_ids(6)
    row.token_ids += fresh
    with monkeypatch.context() as patched:
        patched.setattr(_IndexedText, "extend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            guess_for(row, None, looks_up=True)
    for _ in range(2):
        row.token_ids += fresh[:3]
        found = guess_for(row, None, looks_up=True)
        assert found == TokenIndex(row.context).guess(4)
        assert found.match_length == 3


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


def test_what_a_grammar_forces_is_not_slept_through():
    free, forced = (
        SimpleNamespace(
            state=SimpleNamespace(sleeps=lambda beside: beside == 2),
            spec=SimpleNamespace(sampler=SimpleNamespace(constraint=constraint)),
        )
        for constraint in (None, object())
    )
    batches = ([free, free], [free, forced], [free])
    assert [layerskip.speculation._all_sleep(rows) for rows in batches] == [True, False, False]


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


def test_a_text_that_ends_with_its_first_token_is_looked_up_too(toy):
    store = LookupStore()
    run(SelfSpeculativeLM(toy(), None, num_draft_tokens=6, lookup=store), max_new_tokens=1)
    assert len(store) >= len(REPEATING) + 1


def test_what_others_look_up_is_verified_too_when_a_draft_goes_on(toy, plain, monkeypatch):
    known = store_of([*REPEATING, *run(plain).token_ids])
    controller, asked = Scripted(Choice("early_exit", 4), Choice("lookup", 5)), []

    def going_on(stoppers, context, **shape):
        asked.append(shape)
        return [False]

    monkeypatch.setattr(controller, "going_on", going_on)
    monkeypatch.setattr(controller, "guess_prices", lambda context, greedy: [])
    lm = with_controller(toy, controller, lookup=known)
    lm.generate([PROMPT, REPEATING], max_new_tokens=7)
    assert asked[0] == {"rows": 2, "verified": 2 + 5 + 1, "others": 0}


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


def test_no_plan_that_pays_means_look_ups_alone(toy, plain):
    lm = SelfSpeculativeLM(toy(), None, PlanFile(None))
    out = run(lm)
    assert lm.plan is None
    assert out.token_ids == run(plain).token_ids
    assert out.stats.num_draft_passes == 0


def row_that_knows(asked: list[tuple[int, ...]], *found: int, constraint=None) -> SimpleNamespace:
    """With 9 tokens to come, and 3 as end of sequence."""
    guess = Guess(found, 2)
    index = SimpleNamespace(guess=lambda most, ahead: asked.append((most, *ahead)) or guess)
    spec = SimpleNamespace(
        sampler=SimpleNamespace(constraint=constraint),
        max_draft_tokens=32,
        max_new_tokens=10,
        eos_ids=frozenset({3}),
    )
    return SimpleNamespace(index=index, spec=spec, token_ids=(), context=Context((1,)))


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


def test_a_pass_takes_as_many_looked_up_tokens_as_save_more_than_they_take():
    """By what became of the text's look-ups: of a sure one all, of one that is mostly wrong few or
    none, however cheap the first are."""
    asked: list[tuple[int, ...]] = []
    row, first = row_that_knows(asked, 9, 8, 3, 7), TokenIndex([5, 6, 7, 5]).guess(4)
    sure, doubted = [0.9, 0.8, 0.6, 0.1], [0.3, 0.09, 0.03]
    row.state = SimpleNamespace(lookup_survivals=lambda match, stored, most: told[:most])
    told = sure
    for prices, width in (((0.1, 0.2, 0.3, 0.5), 3), ((1.0, 1.1, 1.2, 2.5), 3), ((), 0)):
        ahead = lookahead(row, first, prices)
        assert len(ahead((6,), 4)) == width
        assert len(ahead((6, 7), 2)) == min(2, width)
    told = doubted
    forced = Guess((6, 7, 5), FORCED_MATCH)  # each of them saves a pass
    assert len(lookahead(row, forced, [0.5, 0.6, 0.7])((), 4)) == 3
    for prices, width in (((0.0, 0.1, 0.2, 0.3), 1), ((0.1, 0.2, 0.25), 1), ((0.5, 0.6, 0.7), 0)):
        assert len(lookahead(row, first, prices)((), 4)) == width
    assert len(lookahead(row, first)((6,), 4)) == 4  # nobody counts


def test_nothing_is_behind_the_end_of_a_text_or_where_a_grammar_knows_more():
    asked: list[tuple[int, ...]] = []
    assert not Lookahead(row_that_knows(asked, 9), Guess()).behind((6, 3)).tokens
    forcing = SimpleNamespace(guess=lambda context, found, most: (context, False))
    governed = Lookahead(row_that_knows(asked, 9, 8, constraint=forcing), Guess())
    assert not governed.behind((6,)).tokens
    assert not asked
    assert governed((6,), 2) == (1, 6)
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
