"""Drafts beside a real grammar: exact by enumeration, cut at its end, begun at its marker."""

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from enumeration import Game, assert_same_law
from optional import needed
from toys import PLANS, VOCAB_SIZE

from layerskip import Grammar, SamplingParams, SelfSpeculativeLM
from layerskip.constraint import Constraint
from layerskip.decode import Decoder
from layerskip.drafting import Draft, EarlyExitDrafter
from layerskip.grammar_xgrammar import XGrammarMatcher
from layerskip.plan import PlanFile
from layerskip.row import RowSpec
from layerskip.sampling import Sampler

needed("xgrammar")

PROMPT = "an object: "
EOS = 1
SAMPLED = SamplingParams(temperature=0.8, seed=5)
OBJECT = Grammar.json_schema({"enum": [{"a": 1}, {"a": 20}, {"a": [2]}]})


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize(
    ("rule", "most"), [("[te]a?[in]?", 2), ("(ta|te)n*", 1), ("t(ea|in)s?|e", 3)]
)
def test_token_and_block_modes_keep_xgrammar_s_law(backend, verification, rule, most):
    """Many spellings of few texts: "te", "ta", "ea", "in" are tokens, and so is each letter."""
    for seed in range(2):
        sampler = Sampler(
            SamplingParams(temperature=1.0),
            0,
            VOCAB_SIZE,
            verification=verification,
            constraint=Constraint(
                backend.matcher(Grammar.regex(rule.replace("*", "{0,2}"))),
                prompt_length=2,
                eos_ids=frozenset({EOS}),
                vocab_size=VOCAB_SIZE,
            ),
        )
        game = Game(sampler, (5, 6), seed)
        wanted = game.target_law()
        assert len(wanted) > 3
        assert_same_law(wanted, game.round_law(most))


@pytest.mark.parametrize("count", [0, 3])
def test_rounds_beside_a_grammar_read_no_prompt(wrap, backend, count):
    """It may be long, and every token of a draft asks the grammar."""

    class Counted(tuple):
        times_read = 0

        def __iter__(self):
            Counted.times_read += 1
            return super().__iter__()

    stack, plan, prompt = wrap("exit").stack, PLANS["exit"], Counted(range(5, 45))
    constraint = Constraint(
        backend.matcher(Grammar.regex("[a-z]{30}")),
        prompt_length=len(prompt),
        eos_ids=frozenset({EOS}),
        vocab_size=VOCAB_SIZE,
    )
    sampler = Sampler(SAMPLED, 5, VOCAB_SIZE, constraint=constraint)
    decoder = Decoder(stack, EarlyExitDrafter(stack, plan), plan)
    row = decoder.join(RowSpec(prompt, sampler, 12, count))
    decoder.step()
    Counted.times_read = 0
    while row.finish_reason is None:
        decoder.step()
    assert len(row.token_ids) == 12
    assert sum(r.num_draft_tokens for r in row.rounds) > 0 or not count
    assert Counted.times_read == 0


def scripted(tokens: Sequence[int], start: int) -> Any:
    """A logits processor that wants these tokens, then nothing more."""

    def wants(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        at = ids.shape[1] - start
        if at < len(tokens):
            scores[:, tokens[at]] += 1000.0
        return scores

    return wants


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED])
def test_a_marker_of_several_tokens_in_the_middle_of_a_block(ending, tokenizer, sampling):
    """vLLM #31858, #34650, #43338 (27 % garbage before the JSON), #48228 (a doubled brace)."""
    thought, prompt = "no one</t>", tokenizer(PROMPT)["input_ids"]
    tokens = tokenizer(thought)["input_ids"]
    assert len(tokenizer("</t>")["input_ids"]) > 2
    outs = [
        ending.generate(
            prompt,
            grammar=OBJECT.after("</t>"),
            sampling=sampling,
            logits_processor=[scripted(tokens, len(prompt))],
            num_draft_tokens=count,
            max_new_tokens=60,
        )
        for count in (0, 2, 7, "auto")
    ]
    assert len({(out.token_ids, out.finish_reason) for out in outs}) == 1
    before, value = outs[0].text.split("</t>")
    assert before == "no one"
    assert json.loads(value) in ({"a": 1}, {"a": 20}, {"a": [2]})
    emitted = 0
    for record in outs[2].rounds:
        begun, emitted = emitted, emitted + len(record.token_ids)
        if begun < len(tokens) - 1 and emitted > len(tokens):
            return
    pytest.fail("no block has the marker in its middle")


class Beyond(EarlyExitDrafter):
    """Drafts the text that is coming, and then more: it knows of no grammar."""

    def __init__(self, lm: SelfSpeculativeLM, prompt: int, text: Sequence[int]) -> None:
        assert lm.plan is not None
        super().__init__(lm.stack, lm.plan)
        self.prompt, self.text = prompt, [*text, *[7, 8, 9, 10] * 3]

    def draft(self, requests, cache, head=None, pays=None) -> list[Draft]:
        (request,) = requests
        done = request.length + 1 - self.prompt
        tokens = self.text[done : done + request.num_draft_tokens]
        return [Draft(tuple(tokens), (), num_passes=1, num_positions=len(tokens))]


@pytest.mark.parametrize(
    ("rule", "bias"), [("[QWXY]{4}", None), ("b{3}[a-z]*", {EOS: 50.0})], ids=["closed", "eos"]
)
def test_a_block_past_the_grammar_s_end_is_cut_there(ending, tokenizer, monkeypatch, rule, bias):
    """vLLM #53777, OpenVINO #4081: legal to draft past the end; cut, and nothing left behind."""
    prompt, grammar = tokenizer(PROMPT)["input_ids"], Grammar.regex(rule)
    sampling = SamplingParams(logit_bias=bias or {})
    plain = ending.generate(prompt, grammar=grammar, sampling=sampling, num_draft_tokens=0)
    assert re.fullmatch(rule, plain.text)
    monkeypatch.setattr(ending, "_drafter", Beyond(ending, len(prompt), plain.token_ids))
    out = ending.generate(prompt, grammar=grammar, sampling=sampling, num_draft_tokens=8)
    last = out.rounds[-1]
    assert (out.token_ids, out.text, out.finish_reason) == (plain.token_ids, plain.text, "stop")
    assert last.num_draft_tokens == 8 > len(last.token_ids)
    assert last.num_accepted_tokens == len(last.token_ids)
    monkeypatch.undo()
    assert ending.generate(prompt, grammar=grammar, sampling=sampling).token_ids == plain.token_ids


@pytest.mark.parametrize("count", [0, 5])
def test_a_limit_inside_a_structure_cuts_what_plain_decoding_writes(ending, count):
    grammar = Grammar.json_schema({"properties": {"name": {"enum": ["tea", "on"]}, "n": {}}})
    whole = ending.generate(PROMPT, grammar=grammar, max_new_tokens=40, num_draft_tokens=0)
    for limit in range(2, len(whole.token_ids), 7):
        out = ending.generate(PROMPT, grammar=grammar, max_new_tokens=limit, num_draft_tokens=count)
        assert out.token_ids == whole.token_ids[:limit]
        assert out.finish_reason == "length"


@pytest.mark.parametrize(("rule", "few"), [("[0-9]{12}", True), ("[ -~]{12}", False)])
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_the_few_tokens_that_a_grammar_allows_are_drafted_over(
    toy, tokenizer, monkeypatch, sampling, rule, few
):
    """They are not in the draft vocabulary, nor in the prompt."""
    known = PlanFile(PLANS["exit"], draft_vocabulary=(EOS,))
    plain = SelfSpeculativeLM(toy(), tokenizer, num_draft_tokens=0)
    trimmed = SelfSpeculativeLM(toy(), tokenizer, known, num_draft_tokens=3, lookup=False)
    asked, draft = [], trimmed._drafter.draft

    def spy(requests, *rest):
        asked.extend(requests)
        return draft(requests, *rest)

    monkeypatch.setattr(trimmed._drafter, "draft", spy)
    settings = {"grammar": Grammar.regex(rule), "max_new_tokens": 14, "sampling": sampling}
    out = trimmed.generate(PROMPT, **settings)
    assert out.token_ids == plain.generate(PROMPT, **settings).token_ids
    allowed = {i for i in range(VOCAB_SIZE) if re.fullmatch("[0-9]+", tokenizer.decode([i]))}
    assert len(allowed) >= 10
    assert (allowed <= asked[0].own_ids) is few
    if few:
        assert all(r.num_draft_tokens for r in out.rounds[1:-1])


@pytest.mark.parametrize("verification", ["token", "block"])
def test_what_a_grammar_allows_one_row_is_nothing_to_its_neighbours(toy, tokenizer, verification):
    known = PlanFile(PLANS["exit"], draft_vocabulary=tuple(range(40)))
    lm = SelfSpeculativeLM(toy(), tokenizer, known, num_draft_tokens=3, lookup=False)
    grammars = [Grammar.regex(rule) for rule in ("[0-9]{12}", "(ta|te|ea){6}", "[ -~]{12}")]
    settings = {"sampling": SAMPLED, "verification": verification}
    batch = lm.open_batch(max_new_tokens=14, **settings)
    rows = [batch.add(PROMPT, grammar=grammar) for grammar in grammars]
    together = {row: [] for row in rows}
    while batch.unfinished:
        for r in batch.step():
            together[r.row] += r.token_ids
    for row, grammar in zip(rows, grammars, strict=True):
        alone = lm.generate(PROMPT, max_new_tokens=14, grammar=grammar, **settings)
        assert together[row] == [*alone.token_ids]


def test_masks_are_made_before_a_pass_is_read(ending, monkeypatch):
    """So a GPU works on the pass meanwhile: nothing is left to make when scores are masked."""
    made, late, reading = [], [], []
    fill, masked = XGrammarMatcher.fill, Constraint.masked

    def watched_fill(self, mask):
        (late if reading else made).append(1)
        return fill(self, mask)

    def watched_masked(self, scores, context):
        reading.append(1)
        try:
            return masked(self, scores, context)
        finally:
            reading.pop()

    monkeypatch.setattr(XGrammarMatcher, "fill", watched_fill)
    monkeypatch.setattr(Constraint, "masked", watched_masked)
    for count in (0, 4):
        ending.generate(
            PROMPT, grammar=OBJECT, sampling=SAMPLED, num_draft_tokens=count, max_new_tokens=30
        )
    assert made
    assert not late


def test_every_row_of_a_batch_may_have_a_pydantic_class_of_its_own(ending):
    from pydantic import BaseModel, Field

    class Point(BaseModel):
        x: int = Field(ge=0, lt=10)

    class Name(BaseModel):
        name: str = Field(max_length=2)

    batch = ending.open_batch(max_new_tokens=40, sampling=SAMPLED)
    rows = [batch.add(PROMPT, grammar=kind) for kind in (Point, Name, None, Point)]
    while batch.unfinished:
        batch.step()
    outs = [batch.remove(row) for row in rows]
    for kind, out in zip((Point, Name, None, Point), outs, strict=True):
        alone = ending.generate(
            PROMPT, grammar=kind, max_new_tokens=40, sampling=SAMPLED, num_draft_tokens=0
        )
        assert out.token_ids == alone.token_ids
        if kind is not None:
            assert kind.model_validate_json(out.text)


def test_a_matcher_can_go_back(backend):
    """SGLang #24413: a backend that could not was let through. Ours have to, all the way."""
    ids = backend._tokenizer('{"a":20}')["input_ids"]
    matcher = backend.matcher(OBJECT)
    assert all(matcher.advance(token) for token in ids)
    assert matcher.complete
    assert not matcher.advance(ids[0])  # past the end: no error, and nothing has changed
    for count, token in reversed(list(enumerate(ids))):
        matcher.rollback(1)
        fresh = backend.matcher(OBJECT)
        assert all(fresh.advance(before) for before in ids[:count])
        assert not matcher.complete
        masks = [torch.zeros(-(-VOCAB_SIZE // 32), dtype=torch.int32) for _ in range(2)]
        matcher.fill(masks[0])
        fresh.fill(masks[1])
        assert torch.equal(*masks)
        assert fresh.advance(token)
