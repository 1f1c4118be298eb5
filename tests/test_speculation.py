"""Drafts chosen from round to round on the real engine: the text never depends on them."""

import threading

import pytest
import torch
from decoding import PROMPT, SAMPLED
from speculating import (
    GREEDY,
    NEW,
    REPEATING,
    WITH_RULES,
    Scripted,
    cost_of,
    run,
    store_of,
    with_controller,
)
from toys import PLANS, VOCAB_SIZE, random_ids

from layerskip import LookupStore, SamplingParams, SelfSpeculativeLM
from layerskip.control.experience import lookup_confidence
from layerskip.control.stopping import PLAIN, Choice
from layerskip.controller import Controller
from layerskip.lookup import FORCED_MATCH
from layerskip.ops.reference import DRAFT_STREAM, TARGET_STREAM
from layerskip.outputs import Round
from layerskip.plan import PlanFile
from layerskip.sampling import Sampler


@pytest.fixture(scope="module")
def lm(toy) -> SelfSpeculativeLM:
    lm = SelfSpeculativeLM(toy(), None, PLANS["exit"])
    lm._controller = Controller(cost_of(0.1), follows_clock=False)
    return lm


@pytest.fixture(scope="module")
def plain(toy) -> SelfSpeculativeLM:
    return SelfSpeculativeLM(toy(), None, num_draft_tokens=0)


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


class Passes:
    """What the layers ran, round by round: which of them over how many rows."""

    def __init__(self, lm: SelfSpeculativeLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lm, self.rounds, self._now = lm, [], []
        self._drive = lm.stack._drive
        monkeypatch.setattr(lm.stack, "_drive", self.drive)

    def drive(self, hidden, layers, layout):
        self._now.append((tuple(layers), hidden.shape))
        return self._drive(hidden, layers, layout)

    def run(self, **settings) -> list[Round]:
        rounds = []
        for record in self.lm.stream(REPEATING, max_new_tokens=NEW, **settings):
            rounds.append(record)
            self.rounds.append(tuple(self._now))
            self._now.clear()
        return rounds


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "0.8"])
def test_a_switch_adds_no_pass_to_the_rounds_beside_it(toy, monkeypatch, sampling):
    def kinds(*script: Choice) -> dict[tuple[str, int], set[tuple]]:
        passes = Passes(with_controller(toy, Scripted(*script), lookup=False), monkeypatch)
        found: dict[tuple[str, int], set[tuple]] = {}
        for r, ran in zip(passes.run(sampling=sampling), passes.rounds, strict=True):
            if r.index:
                found.setdefault((r.drafter, r.num_draft_tokens), set()).add(ran)
        return found

    drafting = Choice("early_exit", 4)
    kept = kinds(PLAIN) | kinds(drafting)
    both = kinds(drafting, PLAIN)
    assert both.keys() >= {("none", 0), ("early_exit", 4)}
    assert all(len(ran) == 1 for ran in kept.values())
    assert {kind: kept[kind] for kind in both} == both


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "0.8"])
def test_the_first_token_takes_the_passes_that_it_takes_without_drafts(toy, monkeypatch, sampling):
    def first(num_draft_tokens: int | str) -> tuple:
        lm = with_controller(toy, Controller(cost_of(0.1), follows_clock=False))
        passes = Passes(lm, monkeypatch)
        rounds = passes.run(sampling=sampling, num_draft_tokens=num_draft_tokens)
        assert any(r.num_draft_tokens for r in rounds) is bool(num_draft_tokens)
        assert len(rounds[0].token_ids) == 1
        return passes.rounds[0]

    assert first(0) == first("auto") == first(4) != ()


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
