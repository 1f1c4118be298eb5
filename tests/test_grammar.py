"""Structured output with xgrammar: exact under speculation, valid, and the bugs that others had.

The bugs, and the tests that hold them off (g/ here, c/ test_constraint.py, d/
test_grammar_drafts.py, each name without its ``test_``):

A marker inside the accepted window or of several tokens (vLLM #31858, #34650, #43338), and a
doubled brace behind it (#48228)
  c/a_grammar_begins_behind_its_marker_however_that_is_spelt
  c/a_marker_matcher_rolls_back
  d/a_marker_of_several_tokens_in_the_middle_of_a_block

A mask asked for after the end, or tokens after a stop (vLLM #53777, OpenVINO #4081, SGLang
#21723)
  c/rows_past_the_end_or_past_a_forbidden_token_are_left_alone
  d/a_block_past_the_grammar_s_end_is_cut_there
  g/a_row_ends_where_its_grammar_does
  g/a_draft_ends_where_the_grammar_does

A matcher that drafts moved and that failed to advance (vLLM #44006, #46118, #46272)
  g/rollback_windows_leave_what_a_new_matcher_has
  c/any_walk_gives_what_a_new_matcher_gives

Masks of another type or shape (SGLang #24283, #15050), and -1 as padding
  c/masks_survive_packing
  g/a_padded_vocabulary_is_never_emitted
  g/tokens_that_are_none_are_not_taken

A backend that can't go back, let through (SGLang #24413)
  d/a_matcher_can_go_back

Stuck after a first forced choice (SGLang #9187)
  c/a_forbidden_draft_gives_way_to_the_target_s_own_token
  g/looked_up_tokens_that_the_grammar_forbids_are_not_verified

Blanks for ever (vLLM #55313, #38696)
  g/blanks_come_to_an_end

Text biased by invalid drafts that are dropped
  c/the_law_is_plain_decoding_s
  d/token_and_block_modes_keep_xgrammar_s_law

A structure cut by the limit, and not told
  d/a_limit_inside_a_structure_cuts_what_plain_decoding_writes
  g/a_structure_cut_by_the_limit_is_reported

Rows of a batch that get each other's grammar
  g/a_batch_of_grammars_gives_each_row_what_it_gives_alone
  d/every_row_of_a_batch_may_have_a_pydantic_class_of_its_own

Keywords that xgrammar compiles and ignores
  test_schema_check.py, test_schema_rewrites.py
"""

import json
import random
import re
import sys
import threading
from typing import Any
from unittest import mock

import pytest
import torch
from grammars import random_root, random_tokens
from interrupting import assert_same_wherever_interrupted
from optional import needed
from toys import PLANS, VOCAB_SIZE, byte_symbols, make_model
from transformers import PreTrainedModel

from layerskip import Grammar, PlanFile, SamplingParams, SelfSpeculativeLM
from layerskip.constraint import Constraint
from layerskip.grammar_lengths import _least, longest_shortest
from layerskip.grammar_xgrammar import XGrammarBackend
from layerskip.lookup import LookupStore
from layerskip.verify import Verifier

xgrammar = needed("xgrammar")
jsonschema = needed("jsonschema")

PROMPT = "an object: "
SAMPLED = SamplingParams(temperature=0.8, seed=5)
PERSON_SCHEMA = {
    "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"enum": [1, 20]}},
    "required": ["name", "age"],
}
PERSON = Grammar.json_schema(PERSON_SCHEMA)


def valid(text: str, schema: object) -> bool:
    checker = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    return checker.is_valid(json.loads(text))


def same_tokens(lm: SelfSpeculativeLM, seeds: range, counts: tuple, limit: int = 60) -> int:
    """Checks schemas, every other one sampled; how many outputs were whole."""
    whole = 0
    for seed in seeds:
        schema = random_root(seed)
        outs = [
            lm.generate(
                PROMPT,
                grammar=Grammar.json_schema(schema, max_whitespace=seed % 3),
                sampling=SamplingParams(temperature=1.2, seed=seed) if seed % 2 else None,
                max_new_tokens=limit,
                num_draft_tokens=count,
            )
            for count in counts
        ]
        assert len({(out.token_ids, out.text, out.finish_reason) for out in outs}) == 1
        if outs[0].finish_reason == "stop":
            whole += 1
            assert valid(outs[0].text, schema), (schema, outs[0].text)
        else:
            assert len(outs[0].token_ids) == limit
    return whole


def test_drafts_change_no_token_and_whole_output_is_valid(ending):
    assert same_tokens(ending, range(20), (0, 3, "auto")) >= 12


@pytest.mark.slow
def test_drafts_change_no_token_of_300_schemas(ending):
    assert same_tokens(ending, range(300), (0, 3, "auto"), 120) >= 225


def test_random_text_of_a_schema_is_valid(backend, tokenizer):
    rng, done = random.Random(1), 0
    for seed in range(100, 160):
        schema = random_root(seed)
        for _ in range(3):
            matcher = backend.matcher(Grammar.json_schema(schema))
            tokens = random_tokens(matcher, rng, VOCAB_SIZE, 150)
            if tokens is not None:
                done += 1
                assert valid(tokenizer.decode(tokens), schema)
    assert done > 120


GRAMMARS = {
    "json": Grammar.json(max_whitespace=2),
    "schema": PERSON,
    "regex": Grammar.regex("(foo|ba[rz])*[0-9]{2}é?"),
    "ebnf": Grammar.ebnf('root ::= "(" root ")" | "x"'),
    "marker": Grammar.choice(["yes", "no"]).after("</t>"),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_rollback_windows_leave_what_a_new_matcher_has(backend, name):
    """vLLM #44006, #46118, #46272: drafts move the matcher; masks are those of a fresh one."""
    rng, text, prompt = random.Random(4), [], (5, 6)
    made = {
        "prompt_length": 2,
        "eos_ids": frozenset({1}),
        "vocab_size": VOCAB_SIZE,
    }
    constraint = Constraint(backend.matcher(GRAMMARS[name]), **made)
    for _ in range(400):
        row = torch.zeros(1, VOCAB_SIZE)
        for _ in range(rng.randint(1, 4)):
            choices = constraint.masked(row, (*prompt, *text))[0].isfinite().nonzero()[:, 0]
            text.append(int(choices[rng.randrange(len(choices))]))
        if rng.random() < 0.3:
            text[-1] = rng.randrange(VOCAB_SIZE)
        fresh = Constraint(backend.matcher(GRAMMARS[name]), **made)
        rows = torch.zeros(min(4, len(text)), VOCAB_SIZE)
        got, wanted = (c.masked(rows, (*prompt, *text)) for c in (constraint, fresh))
        assert torch.equal(got, wanted)
        assert constraint.closed((*prompt, *text)) == fresh.closed((*prompt, *text))
        del text[max(0, len(text) - rng.randint(1, 6)) :]
        if len(text) > 30:
            text.clear()


@pytest.mark.parametrize(
    ("name", "text"),
    [("schema", '{"name":"ab","age":20}'), ("regex", "foobar12é"), ("marker", "hm</t>yes")],
)
def test_an_interruption_at_any_place_changes_no_answer(backend, tokenizer, name, text):
    """Ctrl-C, also between xgrammar's move and what we know of it."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]

    def made() -> Constraint:
        matcher = backend.matcher(GRAMMARS[name])
        return Constraint(matcher, prompt_length=0, eos_ids=frozenset({1}), vocab_size=VOCAB_SIZE)

    rows = torch.zeros(2, VOCAB_SIZE)
    questions: list[tuple[str, tuple]] = [
        ("guess", (ids[:2], ids[2:5], 3)),
        ("masked", (rows, ids[:4])),
        ("masked", (rows, (*ids[:3], ids[0]))),
        ("closed", (ids,)),
    ]
    assert_same_wherever_interrupted(made, questions)


def test_a_batch_of_grammars_gives_each_row_what_it_gives_alone(ending):
    grammars = [None, *GRAMMARS.values(), Grammar.choice(["aab", "aac"]), PERSON]
    batch = ending.open_batch(max_new_tokens=24, sampling=SAMPLED)
    rows = [batch.add(PROMPT, grammar=grammar) for grammar in grammars]
    while batch.unfinished:
        batch.step()
    for row, grammar in zip(rows, grammars, strict=True):
        alone = ending.generate(
            PROMPT, grammar=grammar, max_new_tokens=24, sampling=SAMPLED, num_draft_tokens=0
        )
        assert batch.remove(row).token_ids == alone.token_ids


@pytest.mark.parametrize("count", [0, 3, 8])
def test_a_row_ends_where_its_grammar_does(ending, count):
    """SGLang #21723: missing end. The draft goes past it, and nothing of that is seen."""
    out = ending.generate(PROMPT, grammar=Grammar.choice(["tea", "tin"]), num_draft_tokens=count)
    assert out.text in ("tea", "tin")
    assert out.finish_reason == "stop"
    assert out.rounds[-1].finish_reason == "stop"


@pytest.mark.parametrize("outside", [-1, 5000])
def test_an_end_outside_the_vocabulary_lets_nothing_else_end(tokenizer, outside):
    model = make_model()
    model.generation_config.eos_token_id = outside
    lm = SelfSpeculativeLM(model, tokenizer, PLANS["exit"], num_draft_tokens=3)
    last = SamplingParams(logit_bias={VOCAB_SIZE - 1: 60.0})
    out = lm.generate("ab", grammar=Grammar.regex("[0-9]+"), sampling=last, max_new_tokens=12)
    assert out.text.isdigit()
    assert out.finish_reason == "length"


def test_an_open_grammar_ends_with_the_end_of_sequence(ending):
    likes_it = SamplingParams(logit_bias={1: 50.0})
    out = ending.generate(PROMPT, grammar=Grammar.regex("b{3}[a-z]*"), sampling=likes_it)
    assert out.text == "bbb"
    assert out.finish_reason == "stop"
    assert out.token_ids[-1] == 1


def test_a_structure_cut_by_the_limit_is_reported(ending):
    out = ending.generate(PROMPT, grammar=PERSON, max_new_tokens=7)
    assert out.finish_reason == "length"
    exact = ending.generate(PROMPT, grammar=Grammar.choice(["x"]), max_new_tokens=1)
    assert (exact.text, exact.finish_reason) == ("x", "stop")


@pytest.mark.parametrize("verification", ["coupled", "token", "block"])
def test_every_way_of_verifying_keeps_to_the_grammar(ending, verification):
    for seed in range(6):
        out = ending.generate(
            PROMPT,
            grammar=PERSON,
            sampling=SamplingParams(temperature=1.5, seed=seed),
            verification=verification,
            num_draft_tokens=5,
        )
        assert out.finish_reason == "stop"
        assert set(json.loads(out.text)) == {"name", "age"}


LIST_WITHOUT_END = {
    "$id": "list",
    "type": "object",
    "properties": {"next": {"$ref": "list"}},
    "required": ["next"],
}


@pytest.mark.parametrize(
    ("rules", "longest"),
    [
        ('root ::= "a" root | "b"', 1),
        ('root ::= "(" root ")" | "\\"\\\\" [x)\\]]', 3),
        ('root ::= [a-z]{3,5} ("x"? | "\u00e9\\n" )* "end"+', 6),
        ('root ::= x x | "abcdefg"\nx ::= "ab" (y | z)\ny ::= "c" y | "d"\nz ::= "e"', 6),
        (
            "root ::= r30\nr0 ::= [0-9]\n"
            + "".join(f"r{i + 1} ::= r{i} r{i}\n" for i in range(30)),
            2**30,
        ),
    ],
)
def test_the_shortest_text_of_a_grammar_is_known(rules, longest):
    """Of its longest rule: xgrammar looks for forced text without bound."""
    assert longest_shortest("ebnf", str(xgrammar.Grammar.from_ebnf(rules))) == longest


def test_a_grammar_of_many_alternatives_is_measured_once():
    """Each rule that was known asked the one above it again, for all of its alternatives."""
    rules = "root ::= " + " | ".join(f"r{i}" for i in range(3000))
    rules += "".join(f'\nr{i} ::= "a" [x-z] "{i}"' for i in range(3000))
    asked = 0

    class Counted(dict):
        def get(self, *arguments):
            nonlocal asked
            asked += 1
            return super().get(*arguments)

    def least(choices, known):
        return _least(choices, Counted(known) if len(choices) > 1 else known)

    with mock.patch("layerskip.grammar_lengths._least", least):
        assert longest_shortest("ebnf", rules) == 6
    assert asked < 10_000


@pytest.mark.parametrize("count", [0, 4])
def test_long_forced_text_is_not_looked_for(ending, monkeypatch, count):
    """For each item xgrammar begins again: 54 s for 8 tokens of ten thousand."""
    schema = {"type": "array", "items": {"const": "abc"}, "minItems": 1_000}
    looked = []
    for most in (0, 10**9):
        monkeypatch.setattr("layerskip.grammar_xgrammar.MOST_FORCED", most)
        matcher = ending._grammars.matcher(Grammar.json_schema(schema, max_whitespace=0))
        looked.append(len(matcher.forced()))
    assert looked[0] == 0 < looked[1]
    monkeypatch.undo()
    grammar = Grammar.json_schema(schema | {"minItems": 10_000}, max_whitespace=0)
    out = ending.generate(PROMPT, grammar=grammar, max_new_tokens=8, num_draft_tokens=count)
    assert out.text.startswith('["a')


def test_forced_text_costs_no_draft_pass(ending):
    out = ending.generate(PROMPT, grammar=Grammar.choice(["QWXYZQWXYZQWXYZ"]), num_draft_tokens=4)
    assert out.text == "QWXYZQWXYZQWXYZ"
    drafted = [r for r in out.rounds if r.num_draft_tokens]
    assert drafted
    assert all(r.drafter == "lookup" and r.num_draft_passes == 0 for r in drafted)
    assert sum(r.num_accepted_tokens for r in drafted) == sum(r.num_draft_tokens for r in drafted)


@pytest.mark.parametrize("count", [0, 4])
def test_forced_text_is_spelt_as_the_tokenizer_would(ending, tokenizer, count):
    text = "{tea in tins: 3}!"
    out = ending.generate(
        PROMPT, grammar=Grammar.choice([text]), sampling=SAMPLED, num_draft_tokens=count
    )
    assert list(out.token_ids) == tokenizer(text)["input_ids"]


def test_a_draft_ends_where_the_grammar_does(ending):
    out = ending.generate(PROMPT, grammar=Grammar.regex("[QW][XY]"), num_draft_tokens=8)
    assert [r.num_draft_tokens for r in out.rounds] == [0, 1]


def test_looked_up_tokens_that_the_grammar_forbids_are_not_verified(toy, tokenizer, monkeypatch):
    """SGLang #9187. The store knows the plain text by heart, the grammar forbids it."""
    lm = SelfSpeculativeLM(toy(), tokenizer, None, num_draft_tokens=4, lookup=LookupStore())
    for _ in range(2):
        lm.generate(PROMPT, max_new_tokens=20)
    verified, verify = [], Verifier.verify

    def noting(self, requests, drafts, cache):
        verified.extend(draft.tokens for draft in drafts)
        return verify(self, requests, drafts, cache)

    monkeypatch.setattr(Verifier, "verify", noting)
    lm.generate(PROMPT, max_new_tokens=20, num_draft_tokens=4)
    assert any(verified)  # without a grammar what the store knows is
    verified.clear()
    grammar = Grammar.regex("[0-9]{12}")
    outs = [lm.generate(PROMPT, grammar=grammar, num_draft_tokens=k) for k in (0, 4)]
    assert outs[0].token_ids == outs[1].token_ids
    assert all(tokenizer.decode(tokens).isdigit() for tokens in verified if tokens)


def test_blanks_come_to_an_end(backend):
    """vLLM #55313: a quarter of a million blanks, and no error."""
    for limit in (0, 1, 4):
        for grammar in (
            Grammar.json(max_whitespace=limit),
            Grammar.json_schema({"type": "array"}, max_whitespace=limit),
        ):
            matcher, blanks = backend.matcher(grammar), 0
            assert all(map(matcher.advance, (backend_id(backend, "["),)))
            while matcher.advance(backend_id(backend, "\n")):
                blanks += 1
            assert blanks == limit


def backend_id(backend: XGrammarBackend, text: str) -> int:
    (token,) = backend._tokenizer(text)["input_ids"]
    return token


def test_special_tokens_are_no_text(backend):
    """The id of ``<s>`` spells four characters that a string may hold, but decodes to none."""
    constraint = Constraint(
        backend.matcher(Grammar.regex(".*")),
        prompt_length=0,
        eos_ids=frozenset({1}),
        vocab_size=VOCAB_SIZE,
    )
    row = constraint.masked(torch.zeros(1, VOCAB_SIZE), ())[0].isfinite()
    assert not row[0]
    assert row[1]


def test_half_of_a_surrogate_pair_is_no_character(backend, tokenizer):
    """Its three bytes, which UTF-8 does not have, would be decoded to three characters."""
    token_of = {b: tokenizer.convert_tokens_to_ids(s) for b, s in byte_symbols().items()}
    half, other, last = (token_of[b] for b in (0xED, 0xA0, 0x9F))
    matcher = backend.matcher(Grammar.regex("[^a-z]*"))
    mask = torch.zeros(-(-VOCAB_SIZE // 32), dtype=torch.int32)

    def allowed() -> torch.Tensor:
        matcher.fill(mask)
        return mask.view(torch.uint8)[:, None].bitwise_right_shift(torch.arange(8)).flatten() & 1

    assert matcher.advance(half)
    assert not allowed()[other]
    assert not matcher.advance(other)
    assert allowed()[last]
    matcher.rollback(1)
    assert matcher.advance(token_of[0xC3])
    assert allowed()[other]
    assert matcher.advance(other)


def test_a_padded_vocabulary_is_never_emitted(tokenizer):
    model = make_model(vocab_size=VOCAB_SIZE + 41, eos_token_id=1)
    lm = SelfSpeculativeLM(model, tokenizer, PLANS["exit"], num_draft_tokens=3)
    favourite = SamplingParams(logit_bias=dict.fromkeys(range(VOCAB_SIZE, VOCAB_SIZE + 41), 90.0))
    for grammar in (Grammar.regex("[^a]{9}"), Grammar.regex("[^a]{5}").after("e")):
        out = lm.generate(PROMPT, grammar=grammar, sampling=favourite, max_new_tokens=12)
        assert max(out.token_ids) < VOCAB_SIZE


def test_tokens_that_are_none_are_not_taken(backend):
    """-1 is others' padding of drafts; it must not count from the end."""
    matcher = backend.matcher(Grammar.json())
    assert not any(matcher.advance(token) for token in (-1, VOCAB_SIZE, 10**9, 0, 1))


@pytest.mark.parametrize("character", [chr(code) for code in range(32)])
def test_a_choice_may_hold_control_characters(backend, character):
    """The notation that choices are written in ends at a NUL."""
    letter = backend.matcher(Grammar.choice([f"a{character}b", f"{character}1"]))
    assert letter.advance(backend_id(backend, "a"))
    assert not letter.advance(backend_id(backend, "b"))


def test_a_stream_and_transformers_give_the_same(ending, tokenizer):
    out = ending.generate(PROMPT, grammar=PERSON, sampling=SAMPLED)
    steps = ending.stream(PROMPT, grammar=PERSON, sampling=SAMPLED)
    assert "".join(step.text for step in steps) == out.text
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    greedy = ending.generate(PROMPT, grammar=PERSON)
    model = make_model(eos_token_id=1)
    lm = SelfSpeculativeLM(model, tokenizer, PLANS["exit"])
    got = model.generate(
        ids, max_new_tokens=60, pad_token_id=0, custom_generate=lm.custom_generate, grammar=PERSON
    )
    assert tuple(got[0, ids.shape[1] :].tolist()) == greedy.token_ids


@pytest.fixture(scope="module")
def host() -> PreTrainedModel:
    return make_model(eos_token_id=1)


@pytest.fixture(scope="module")
def guest(host, tokenizer) -> SelfSpeculativeLM:
    return SelfSpeculativeLM(host, tokenizer, PLANS["exit"])


def hosted(host: PreTrainedModel, lm: SelfSpeculativeLM, **settings: Any) -> tuple[int, ...]:
    """What transformers samples with us, from one prompt."""
    ids = torch.tensor([lm.tokenizer(PROMPT)["input_ids"]])
    settings |= {"do_sample": True, "max_new_tokens": 60, "pad_token_id": 0}
    got = host.generate(ids, custom_generate=lm.custom_generate, grammar=PERSON, **settings)
    return tuple(got[0, ids.shape[1] :].tolist())


CUTS = [
    {"top_k": 2, "temperature": 0.7},
    {"top_k": 0, "top_p": 0.3},
    {"top_k": 0, "min_p": 0.4, "temperature": 1.5},
    {"top_k": 3, "top_p": 0.8, "min_p": 0.05},
]
CUTS_OF_THEIRS = [
    {"top_k": 0, "typical_p": 0.3},
    {"top_k": 0, "epsilon_cutoff": 0.2},
    {"top_k": 0, "eta_cutoff": 0.2},
    {"top_h": 0.3},
    {"renormalize_logits": True},
]


@pytest.mark.parametrize("cut", [*CUTS, *CUTS_OF_THEIRS], ids="+".join)
def test_transformers_cuts_come_after_the_grammar(host, guest, cut):
    for seed in range(2):
        settings = {"seed": seed} | cut
        outs = [hosted(host, guest, **settings, num_draft_tokens=count) for count in (0, 4)]
        assert outs[0] == outs[1]
        outs.append(hosted(host, guest, **settings, num_draft_tokens=4, verification="block"))
        for out in outs:
            assert valid(guest.tokenizer.decode(out, skip_special_tokens=True), PERSON_SCHEMA)


@pytest.mark.parametrize("cut", CUTS, ids="+".join)
def test_transformers_cuts_under_a_grammar_are_our_own(host, guest, cut):
    for seed in range(2):
        sampling = SamplingParams(**{"temperature": 1.0, "seed": seed} | cut)
        wanted = guest.generate(PROMPT, grammar=PERSON, sampling=sampling, max_new_tokens=60)
        assert hosted(host, guest, seed=seed, **cut) == wanted.token_ids


def test_a_draft_that_the_grammar_leaves_nothing_is_not_cut(host, guest, tokenizer):
    """A cut by entropy of no token at all is an error."""
    plan = PlanFile(PLANS["exit"], draft_vocabulary=tuple(range(2, 40)))
    trimmed = SelfSpeculativeLM(host, tokenizer, plan, lookup=False)
    settings = {"seed": 3, "eta_cutoff": 0.2, "num_draft_tokens": 4}
    assert hosted(host, trimmed, **settings) == hosted(host, guest, **settings)


def test_a_pydantic_class_is_its_schema(ending):
    from pydantic import BaseModel, Field

    class Point(BaseModel):
        x: int = Field(ge=0, lt=10)
        label: str = Field(max_length=2)

    out = ending.generate(PROMPT, grammar=Point)
    assert Point.model_validate_json(out.text)


def test_a_grammar_is_compiled_once_for_all_threads(tokenizer, monkeypatch):
    backend, compiled = XGrammarBackend(tokenizer, VOCAB_SIZE), []
    real = backend._compile
    monkeypatch.setattr(backend, "_compile", lambda g: (compiled.append(g), real(g))[1])
    workers = [threading.Thread(target=backend.matcher, args=(PERSON,)) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    backend.matcher(PERSON.after("x"))
    assert len(compiled) == 1


def test_a_row_asks_once_for_its_matcher_and_before_anything_changes(ending, monkeypatch):
    batch, asked = ending.open_batch(max_new_tokens=4), []
    real = XGrammarBackend.matcher
    monkeypatch.setattr(XGrammarBackend, "matcher", lambda *a: (asked.append(a), real(*a))[1])
    with pytest.raises(ValueError, match="no token of the vocabulary can begin"):
        batch.add(PROMPT, grammar=Grammar.regex(""))
    assert batch._rows is None  # nothing was reserved for it
    asked.clear()
    batch.add(PROMPT, grammar=PERSON)
    assert len(asked) == 1


def test_what_may_stand_before_a_marker_is_found_once(backend):
    one, other = (backend.matcher(PERSON.after(marker)) for marker in "xy")
    assert one._anything is other._anything


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.regex("[a"), "the regex is not usable: .*Unclosed"),
        (lambda: Grammar.regex("(?!a)b"), "the regex is not usable: .*Lookahead"),
        (
            lambda: Grammar.ebnf("root ::= other"),
            'the ebnf is not usable: .*"other" is not defined',
        ),
        (lambda: Grammar.ebnf('root ::= root "a"'), "no text of its rule 'root' ends"),
        (lambda: Grammar.ebnf('root ::= "a" root'), "no text of its rule 'root' ends"),
        (lambda: Grammar.ebnf('root ::= "b" x{0,2}\nx ::= "a" x'), "no text of its rule 'x' ends"),
        (
            lambda: Grammar.ebnf('root ::= TagDispatch(("ab", s))\ns ::= "x" s'),
            "no text of its rule 's' ends",
        ),
        (lambda: Grammar.json_schema(LIST_WITHOUT_END), "no text of it, or of a part of it, ends"),
        (lambda: Grammar.json_schema({"anyOf": [{"type": "null"}, LIST_WITHOUT_END]}), "no text"),
        (lambda: Grammar.json_schema("[" * 100_000), "the schema is nested too deeply"),
        (lambda: Grammar.regex(""), "no token of the vocabulary can begin"),
        (lambda: Grammar.regex("").after("x"), "no token of the vocabulary can begin"),
        (lambda: Grammar.regex(r"\Aab\Z"), r"regex's '\\\\A' at 0 can't be held to"),
        (lambda: Grammar.regex(r"^a[$^]\$\Z"), r"regex's '\\\\Z' at 8 can't be held to"),
        (lambda: Grammar.regex("a|^b"), r"regex's '\^' at 2 can't be held to"),
        (lambda: Grammar.regex("a$|b"), r"regex's '\$' at 1 can't be held to"),
        (lambda: Grammar.regex(r"a\z"), r"regex's '\\\\z' at 1 can't be held to: of a letter"),
        (lambda: Grammar.regex(r"\Qa.b\E"), r"regex's '\\\\Q' at 0"),
        (lambda: Grammar.regex(r"a\K b"), r"regex's '\\\\K' at 1"),
        (lambda: Grammar.regex(r"a|\bb"), r"regex's '\\\\b' at 2"),
        (lambda: Grammar.regex(r"[a\h]"), r"regex's '\\\\h' at 2"),
        (lambda: Grammar.regex(r"[\1]"), r"regex's '\\\\1' at 1"),
        (lambda: Grammar.regex(r"\07"), r"regex's '\\\\0' at 0"),
        (lambda: Grammar.regex(r"\xg1"), r"regex's '\\\\x' at 0"),
        (lambda: Grammar.regex(r"\ud83d\ude00"), r"regex's '\\\\u' at 0"),
        (lambda: Grammar.regex("a[]$]"), r"regex's '\]' at 2 begins a set or ends an empty one"),
        (lambda: Grammar.regex("[^]a]"), r"regex's '\]' at 2 begins a set or ends an empty one"),
        (lambda: Grammar.regex(r"[\w-.]"), "regex's '-' at 3 is no range"),
        (lambda: Grammar.regex(r"[&-\w]"), "regex's '-' at 2 is no range"),
        (lambda: Grammar.choice([]), "one or more non-empty texts"),
        (lambda: Grammar.choice("ab"), "takes a list of texts"),
        (lambda: Grammar.choice(["\ud800"]), "a text of choice is not valid Unicode"),
        (lambda: Grammar.json().after(""), "marker must be a non-empty text"),
        (lambda: Grammar.json(max_whitespace=-1), "max_whitespace must be between"),
        (lambda: Grammar.json_schema("{"), "the schema is not JSON"),
        (lambda: Grammar.json_schema(3), "a schema must be a mapping, JSON text or"),
        (
            lambda: {"type": "object"},
            "grammar must be a Grammar or a pydantic model class, got dict",
        ),
    ],
)
def test_bad_grammars_are_one_sentence_before_any_token(ending, make, message):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        ending.generate(PROMPT, grammar=make())
    assert "\n" not in str(caught.value)


def test_anchors_at_the_ends_of_a_regex_and_escaped_ones_stay(backend):
    for pattern in (r"^a\$[\]$^]b$", r"\\Ab", "[^$]", r"[\\]$"):
        assert Grammar.regex(pattern).source == pattern
        backend.matcher(Grammar.regex(pattern))


@pytest.mark.parametrize(
    "pattern",
    [
        r"[\^]", r"[\^]{2}", r"[\^a]", r"[\^0-9]", r"[\^+*/-]", r"[\^-z]", r"[\^-]", r"[\^^]",
        r"[\^\^-`]", r"[\^^-z]", r"[\^-\^]", r"[\^-\^-z]", r"[\^\]$]", r"\[[\^a]", r"[+[\^a]",
        r"[\\\^a]", r"\\[\^a]", r"[^\^a]", r"[^^a]", r"[a\^]", r"[\x5e]", r"[\x5ea]",
        r"[\u005eb]", r"[\x5e-z]", r"[_-\x61]", r"\x41a", r"\x41", r"[\x410]", r"\\x41a",
    ],
)  # fmt: skip
def test_a_regex_means_what_it_does_in_python(backend, tokenizer, pattern):
    spelt = re.compile(pattern)
    texts = [*map(chr, range(128)), "^^", "A0", "Aa", "[a", "[^", "[[", "\\^", "\\a", r"\x41a"]
    for text in texts:
        matcher = backend.matcher(Grammar.regex(pattern))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        fits = all(matcher.advance(token) for token in ids) and matcher.complete
        assert fits == bool(spelt.fullmatch(text)), text


def test_escapes_and_sets_that_mean_one_thing_are_no_mistake(backend):
    for pattern in (r"[\b-\t\d-]\\z", r"[-\w]\u{1F600}", r"[a-z-\d]\0a", r"[^-\s]\cA\e", "[a&&b]"):
        backend.matcher(Grammar.regex(pattern))


def test_without_tokenizer_or_xgrammar_one_sentence_says_so(ending, wrap, tokenizer, monkeypatch):
    with pytest.raises(ValueError, match="a grammar needs a tokenizer"):
        wrap().generate([1, 2], grammar=PERSON)
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ValueError, match=r"pip install layerskip\[grammar\]"):
        ending.generate(PROMPT, grammar=PERSON)
    monkeypatch.undo()
    assert ending.generate(PROMPT, grammar=PERSON).finish_reason == "stop"


def test_a_tokenizer_whose_tokens_are_no_text_is_refused(tokenizer):
    class Shuffled:
        def __init__(self) -> None:
            self.all_special_ids, self.all_special_tokens = [], []

        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer, name)

        def get_vocab(self) -> dict[str, int]:
            return {token: VOCAB_SIZE - 1 - i for token, i in tokenizer.get_vocab().items()}

        def __call__(self, *args, **kwargs) -> object:
            return tokenizer(*args, **kwargs)

    with pytest.raises(ValueError, match="needs each token's text, which Shuffled does not tell"):
        XGrammarBackend(Shuffled(), VOCAB_SIZE).matcher(PERSON)
