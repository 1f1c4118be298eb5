"""Rewritten schemas accept exactly what their originals do: jsonschema judges both."""

import json
import random
from typing import Any

import pytest
from grammars import random_tokens
from optional import needed
from toys import VOCAB_SIZE

from layerskip.grammar import Grammar
from layerskip.schemas.automata import any_but, apart, matches
from layerskip.schemas.check import checked_schema

jsonschema = needed("jsonschema")

INT, NUM, TEXT, NONE = ({"type": kind} for kind in ("integer", "number", "string", "null"))
# Every name is known, so that the rule "no others than those named" takes nothing away.
ABC = {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False}
ASKED = {name: {"required": [name]} for name in "abc"}
CLOSED = {"type": "object", "properties": {"a": {}, "b": {}}, "unevaluatedProperties": False}
KINDS = [{"properties": {"a": {"const": k}, "b": t}} for k, t in (("x", NUM), ("y", NONE))]

# Objects, arrays and texts of the schemas are drawn from few names and values.
REWRITES: dict[str, Any] = {
    "allOf": {"allOf": [ABC, ASKED["a"], {"properties": {"a": INT}}], "minProperties": 2},
    "allOf-of-anyOf": {
        "allOf": [ABC, {"anyOf": [ASKED["a"], ASKED["b"]]}, {"anyOf": [ASKED["c"]]}]
    },
    "anyOf-with-impossible-branch": {"type": "integer", "anyOf": [TEXT, {"minimum": 2}]},
    "oneOf-overlapping-numbers": {"type": "integer", "oneOf": [{"minimum": 0}, {"maximum": 2}]},
    "oneOf-of-three": {"type": "number", "oneOf": [{"minimum": n} for n in (0, 1, 2)]},
    "oneOf-required": ABC | {"oneOf": [ASKED["a"], ASKED["b"], {"required": ["b", "c"]}]},
    "oneOf-tagged": ABC | {"oneOf": [one | ASKED["a"] for one in KINDS]},
    "oneOf-tag-in-the-schema-beside": ABC | {"oneOf": KINDS, "required": ["a"]},
    "oneOf-without-tag": ABC | {"oneOf": [{"properties": {n: NUM}} for n in "ab"]},
    "oneOf-closed": {
        "oneOf": [{**ABC, "required": ["a"]}, {**ABC, "required": ["b"], "maxProperties": 1}]
    },
    "oneOf-patterns": {"type": "string", "oneOf": [{"pattern": "^a"}, {"pattern": "^[bx]+$"}]},
    "oneOf-pattern-and-list": {"type": "string", "oneOf": [{"pattern": "^a"}, {"enum": ["x"]}]},
    "oneOf-lengths": {"type": "string", "oneOf": [{"minLength": 1}, {"maxLength": 1}]},
    "oneOf-lists": {"oneOf": [{"enum": [1, 2, "a"]}, {"enum": [2, None]}]},
    "oneOf-arrays": {
        "oneOf": [{"type": "array", "items": one, "minItems": 1} for one in (INT, TEXT)]
    },
    "not-bound": {"type": "number", "not": {"minimum": 2}},
    "not-bounds": {"type": "integer", "not": {"minimum": 0, "exclusiveMaximum": 2}},
    "not-type": {"type": ["integer", "string", "null"], "not": {"type": ["string", "number"]}},
    "not-length": {"type": "string", "not": {"minLength": 1, "maxLength": 2}},
    "not-count": {"type": "array", "not": {"minItems": 2}},
    "not-listed-text": {"type": "string", "not": {"enum": ["a", "ab", "", "x"]}},
    "not-listed-numbers": {"type": ["number", "string"], "not": {"enum": [1, 2.5, -1, True]}},
    "not-a-value-of-any-type": {"type": ["boolean", "null", "integer"], "not": {"const": True}},
    "not-of-listed": {"enum": [1, 2, "a", None, [1]], "not": {"type": "integer"}},
    "not-required": ABC | {"not": {"required": ["a", "b"]}},
    "not-property": ABC | {"not": {"properties": {"a": NUM}, "required": ["b"]}},
    "not-anyOf": ABC | {"not": {"anyOf": [ASKED["a"], ASKED["b"]]}},
    "not-oneOf": ABC | {"not": {"oneOf": [ASKED["a"], ASKED["b"]]}},
    "not-allOf": ABC | {"not": {"allOf": [ASKED["a"], ASKED["b"]]}},
    "not-not": {"type": "number", "not": {"not": {"minimum": 2}}},
    "not-closed": ABC | {"not": {"properties": {"a": {}}, "additionalProperties": False}},
    "not-others": ABC | {"not": {"additionalProperties": NUM}},
    "not-names": ABC | {"not": {"propertyNames": {"enum": ["a", "b"]}}},
    "not-matching-names": ABC | {"not": {"patternProperties": {"^[ab]$": NUM}}},
    "not-property-of-an-open-object": {
        "type": "object", "additionalProperties": INT, "not": {"required": ["a"]}
    },
    "two-nots": {"allOf": [{"type": "string", "not": {"const": c}} for c in ("a", "x")]},
    "if-then-else": ABC | {"if": KINDS[0], "then": ASKED["b"], "else": ASKED["c"]},
    "if-then": ABC | {"if": {"properties": {"a": NONE}, **ASKED["a"]}, "then": ASKED["b"]},
    "if-else": ABC | {"if": {"properties": {"a": NUM}}, "else": ASKED["b"]},
    "if-in-allOf": {
        "allOf": [
            ABC,
            {"if": ASKED["a"], "then": {"properties": {"b": INT}, **ASKED["b"]}},
            {"if": ASKED["b"], "then": {"properties": {"c": INT}, **ASKED["c"]}},
        ]
    },
    "if-in-if": ABC | {
        "if": ASKED["a"], "then": {"if": {"properties": {"a": NUM}}, "then": ASKED["b"]}
    },
    "if-number": {"type": ["number", "string"], "if": {"minimum": 2}, "then": {"type": "string"}},
    "dependentRequired": ABC | {"dependentRequired": {"a": ["b"], "b": ["a", "c"]}},
    "draft-7-dependencies": ABC | {"dependencies": {"a": ["b"], "c": {"properties": {"b": INT}}}},
    "dependentSchemas": ABC | {"dependentSchemas": {"a": {"maxProperties": 1}}},
    "dependentSchemas-beside-null": ABC | {
        "type": ["object", "null"], "required": ["a"], "dependentRequired": {"b": ["c"]},
        "dependentSchemas": {"a": {"type": "object", "required": ["b"]}},
    },
    "draft-7-dependencies-beside-text": ABC | {
        "type": ["object", "string", "integer"],
        "dependencies": {"a": {"type": "object", "maxProperties": 1}, "b": ["c"]},
    },
    "dependentSchemas-of-no-object": {
        "type": ["null", "integer"], "dependentSchemas": {"a": {"type": "object"}}
    },
    "unique-few": {"type": "array", "uniqueItems": True, "items": {"enum": ["a", 1, True]}},
    "unique-booleans": {
        "type": "array", "uniqueItems": True, "items": {"type": "boolean"}, "minItems": 1
    },
    "unique-at-most": {
        "type": ["array", "null"], "uniqueItems": True, "maxItems": 2,
        "items": {"enum": [1, 2, 2.5, "a"]},
    },
    "unique-one": {"type": "array", "uniqueItems": True, "maxItems": 1, "items": INT},
    "others-beside-named": {
        "type": "object", "properties": {"a": INT, "ab": NONE}, "additionalProperties": TEXT
    },
    "others-beside-required": {
        "type": "object", "properties": {"a": INT}, "required": ["a"],
        "additionalProperties": NONE, "maxProperties": 2,
    },
    "names-but-some": {
        "type": "object", "properties": {"a": INT}, "additionalProperties": NONE,
        "propertyNames": {"not": {"enum": ["b", "ab"]}},
    },
    "listed-names": {
        "type": "object", "additionalProperties": INT, "propertyNames": {"enum": ["a", "x"]}
    },
    "names-that-are-no-text": ABC | {"type": ["object", "null"], "propertyNames": INT},
    "no-names": {"type": "object", "additionalProperties": INT, "propertyNames": False},
    "patterns-of-names-apart": {
        "type": "object", "patternProperties": {"^a": INT, "^[bx]$": NONE},
        "additionalProperties": False,
    },
    "unevaluated-in-allOf": {
        "allOf": [CLOSED, {"properties": {"b": INT, "c": {}, "x": {}, "ab": {}}}]
    },
    "unevaluated-beside-ref": {
        "$ref": "#/$defs/ab", "properties": {"b": INT}, "$defs": {"ab": CLOSED}
    },
    "unevaluated-about-ref": {
        "$ref": "#/$defs/c", "unevaluatedProperties": False, "required": ["c"],
        "$defs": {"c": {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}}},
    },
    "unevaluated-but-asked": {"anyOf": [CLOSED | ASKED["c"], INT]},
    "unevaluated-tagged": {
        "type": "object", "unevaluatedProperties": False,
        "oneOf": [
            {"properties": {"a": NUM, "b": {}}, **ASKED["a"]},
            {"properties": {"a": TEXT, "c": {}}, **ASKED["a"]},
        ],
    },
    "unevaluated-if": {
        "type": "object", "properties": {"a": {}}, "unevaluatedProperties": False,
        "if": {"properties": {"a": NUM}, **ASKED["a"]}, "then": {"properties": {"b": {}}},
    },
    "unevaluated-items": {
        "allOf": [
            {"type": "array", "prefixItems": [INT], "unevaluatedItems": False},
            {"prefixItems": [{}, INT]},
        ]
    },
}  # fmt: skip
ATOMS = [None, True, False, -1, 0, 1, 1.0, 2, 2.5, 3, "", "a", "b", "x", "y", "ab", "xx", "abc"]


def random_value(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.3:
        return [rng.choice(ATOMS) for _ in range(rng.randint(0, 3))]
    if kind < 0.7:
        names = rng.sample(["a", "b", "c", "x", "ab"], rng.choice((0, 1, 2, 2, 3)))
        return {name: rng.choice(ATOMS) for name in names}
    return rng.choice(ATOMS)


def judge_of(name: str) -> Any:
    return jsonschema.Draft7Validator if "draft-7" in name else jsonschema.Draft202012Validator


@pytest.mark.parametrize("name", REWRITES)
def test_a_rewritten_schema_accepts_what_the_original_does(name):
    schema, rng = REWRITES[name], random.Random(name)
    judge = judge_of(name)
    original = judge(schema)
    core = jsonschema.Draft202012Validator(json.loads(checked_schema(schema)))
    verdicts = []
    for value in [*ATOMS, *(random_value(rng) for _ in range(250))]:
        verdicts.append(original.is_valid(value))
        assert core.is_valid(value) == verdicts[-1], value
    assert set(verdicts) == {True, False}


@pytest.mark.parametrize("name", REWRITES)
def test_random_text_of_a_rewritten_schema_is_valid_by_the_original(backend, name):
    judge, rng = judge_of(name)(REWRITES[name]), random.Random(name)
    done = 0
    for _ in range(5):
        matcher = backend.matcher(Grammar.json_schema(REWRITES[name]))
        tokens = random_tokens(matcher, rng, VOCAB_SIZE, 120)
        if tokens is not None:
            done += 1
            text = backend._tokenizer.decode(tokens)
            assert judge.is_valid(json.loads(text)), text
    assert done


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        ("^a", "^b", True),
        ("^a", "b$", False),
        ("a", "^b*$", True),
        ("^a{3,5}$", "^a{1,2}$", True),
        ("^a{2,}$", "^a{1,2}$", False),
        ("^(ab|c)+$", "^a?cb$", True),
        ("^u?int(8|16)?$", "^address$", True),
        ("^\\d$", "^[a-z]$", True),
        ("^\\d$", "^\u0663$", False),  # a digit to Python, none to ECMA-262
        ("^\\W$", "^\u00e9$", False),  # the other way round
        ("^.$", "^\\r$", False),
        ("^a$", "^a\\n$", False),  # Python's "$" stands before a last line end, too
        ("^(?!a)b", "^c", False),  # can't be read
        ("^.{30000}$", "^a$", False),  # too long to tell
    ],
)
def test_patterns_are_apart_where_no_text_matches_both_in_any_dialect(one, other, wanted):
    assert apart([one, other]) == wanted


def test_any_but_matches_all_but_the_texts():
    rng = random.Random(3)
    for _ in range(15):
        texts = {"".join(rng.choices("ab\n\U0001f600", k=rng.randint(0, 3))) for _ in range(3)}
        judge = jsonschema.Draft202012Validator({"pattern": any_but(texts)})
        for _ in range(30):
            text = "".join(rng.choices("abc\U0001f600", k=rng.randint(0, 4)))
            assert judge.is_valid(text) == (text not in texts)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["a" * 2000 + "!", "a"], "pattern": "^(a+)+$"},
        {"enum": ["a" * 2000 + "!", "a"], "pattern": "^(?:a|a)*$"},
        {"properties": {"a" * 2000 + "!": {}, "a": {}}, "propertyNames": {"pattern": "^(a+)+$"}},
    ],
)
def test_patterns_with_ways_beyond_number_are_answered(schema):
    core = checked_schema(schema)
    assert "a!" not in core
    assert '"a"' in core


@pytest.mark.parametrize(
    "names",
    [{"maxLength": 1000}, {"minLength": 1, "maxLength": 1000}, {"pattern": "^\\S{1,1000}$"}],
)
def test_long_names_may_be_allowed(names):
    core = checked_schema({"type": "object", "properties": {"a": {}}, "propertyNames": names})
    assert '"a"' in core


@pytest.mark.parametrize(
    ("pattern", "text", "wanted"),
    [
        ("b", "abc", True), ("^b", "abc", False), ("^\\W$", "!", True), ("^.$", "\n", False),
        ("^.$", "\r", None), ("^\\d$", "\u0663", None), ("^a$", "a\n", None), (".", "\ud800", None),
        ("^.{1,1000}$", "a", True), ("^.{0,30000}$", "ab", True), ("^[ab]{1,9}$", "a" * 10, False),
        ("^(a?){3,4}$", "aaaaa", False), ("^(?:ab?){0,3}$", "ababab", True),
        ("^(?:ab?){0,3}$", "aaaa", False), ("^(a?){20000}$", "a", None),
        ("^(a?){9000}b", "a" * 99, None), ("(?=a)", "a", None),
    ],
)  # fmt: skip
def test_what_a_pattern_matches_holds_in_all_dialects(pattern, text, wanted):
    assert matches(pattern, text) is wanted
