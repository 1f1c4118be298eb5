"""What is refused of JSON schemas, and that the rest means to grammars what validators read."""

import json
import math
import random

import pytest
from grammars import random_tokens
from optional import needed
from toys import VOCAB_SIZE, make_tokenizer

from layerskip.grammar import Grammar
from layerskip.grammar_xgrammar import XGrammarBackend
from layerskip.schemas.check import checked_schema
from layerskip.schemas.formats import FORMATS
from layerskip.schemas.patterns import string_pattern

AB = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
# Nobody can say of what the branch has not named: another branch may name it, too.
UNSEEN = {
    "allOf": [
        {"unevaluatedProperties": False, "anyOf": [AB, {"properties": {"c": {}}}]},
        {"properties": {"d": {}}},
    ]
}
REFUSED = [
    ({"uniqueItems": True, "type": "array"}, "uniqueItems", "/uniqueItems"),
    ({"properties": {"x": {"type": "number", "multipleOf": 0.5}}}, "multipleOf", "/properties/x"),
    ({"not": {"pattern": "a"}}, "not", "/not"),
    ({"type": "array", "contains": {"const": 1}}, "contains", "/contains"),
    ({"items": {"if": {"format": "date"}, "then": {"maxLength": 3}}}, "if", "/items/if"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf", "/oneOf"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired", "/dependentRequired"),
    ({"dependencies": {"a": ["b"]}}, "dependencies", "/dependencies"),
    ({"allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, "pattern", "/allOf/1/pattern"),
    ({"type": "string", "pattern": "^(?!a)b"}, "pattern", "/pattern"),
    ({"type": "string", "pattern": "^a*b*$", "maxLength": 3}, "pattern", "/pattern"),
    ({"type": "string", "format": "regex"}, "format", "/format"),
    ({"$defs": {"a/b": {"not": {"format": ""}}}, "$ref": "#/$defs/a~1b"}, "not", "/$defs/a~1b/not"),
    ({"patternProperties": {"a": {}, "b": {}}}, "patternProperties", "/patternProperties"),
    ({"type": "object", "minProperties": 2}, "minProperties", "/minProperties"),
    ({"$dynamicRef": "#x"}, "$dynamicRef", "/$dynamicRef"),
    (UNSEEN | {"required": ["z"]}, "unevaluatedProperties", "/allOf/0/unevaluatedProperties"),
    ({"type": "integer", "minimum": 0, "multipleOf": 5}, "multipleOf", "/multipleOf"),
    ({"type": "integer", "maximum": 3, "multipleOf": 7}, "multipleOf", "/multipleOf"),
    ({"type": "integer", "minimum": 0, "maximum": 5000, "multipleOf": 5}, "multipleOf", "/multi"),
    ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.000001}, "exclusiveMinimum", "/exclusiveMin"),
    ({"minimum": 1e-8, "maximum": 1e-7}, "minimum", "/minimum"),
    ({"enum": [1, [{"a": 2**63}]]}, "enum", "/enum"),
    ({"const": 12345678901234567890}, "enum", "/const"),
    ({"not": {"dependentRequired": {"a": ["b"]}}}, "not", "/not"),
    ({"if": {"dependencies": {"a": ["b"]}}, "then": {"minimum": 1}}, "if", "/if"),
    ({"type": "integer", "divisibleBy": 2}, "divisibleBy", "/divisibleBy"),
    ({"type": "integer", "disallow": [{"minimum": 3}]}, "disallow", "/disallow"),
    ({"type": "number", "extends": {"type": "integer"}}, "extends", "/extends"),
    ({"properties": {"a": {"required": True}}}, "required: true", "/properties/a/required"),
    ({"type": "integer", "minimum": 2**63}, "minimum", "/minimum"),
    ({"type": "integer", "maximum": 1e19}, "maximum", "/maximum"),
    ({"type": "number", "exclusiveMinimum": 2**53 + 1}, "exclusiveMinimum", "/exclusiveMinimum"),
    ({"type": "number", "maximum": 10**400}, "maximum", "/maximum"),
    # Only the first of the two that are merged has the keyword that nothing can stand for.
    (
        {
            "properties": {"a": {}},
            "additionalProperties": False,
            "allOf": [{"patternProperties": {"^x": {"type": "string"}}}],
        },
        "additionalProperties",
        "/additionalProperties",
    ),
    (
        {"properties": {"a": {}}, "propertyNames": {"pattern": "^(a?){20000}$"}},
        "propertyNames",
        "/propertyNames",
    ),
    # Python's dialect has no such class: nobody says whether it is about "a".
    (
        {"properties": {"a": {}}, "patternProperties": {"^\\p{L}+$": {}}},
        "patternProperties",
        "/patternProperties",
    ),
    (
        {"properties": {"n": {"required": ["a"], "patternProperties": {"^\\p{L}+$": {}}}}},
        "patternProperties",
        "/properties/n/patternProperties",
    ),
    (
        {
            "type": "object",
            "required": ["a"],
            "not": {"properties": {"a": {}}, "patternProperties": {"^\\p{L}+$": {}}},
        },
        "not",
        "/not",
    ),
    # Dialects differ on whether these fit.
    ({"enum": ["\u0663", "3"], "pattern": "^\\d$"}, "enum", "/enum"),
    ({"enum": ["a\n", "a"], "pattern": "^a$"}, "enum", "/enum"),
    (
        {"properties": {"gr\u00f6\u00dfe": {}}, "patternProperties": {"^\\w+$": {"type": "null"}}},
        "patternProperties",
        "/patternProperties",
    ),
]
# References under an "$id" lead under it: "#/$defs/t" is a text there, a number outside.
NAMED = {
    "$id": "https://x.org/root",
    "properties": {"a": {"$ref": "a"}, "b": {"$ref": "#/$defs/t"}},
    "required": ["a"],
    "$defs": {
        "t": {"type": "integer"},
        "a": {
            "$id": "https://x.org/a",
            "prefixItems": [
                {"$ref": "#/$defs/t"},
                {"$ref": "#t"},
                {"$ref": "root#/$defs/t"},
                {"$ref": "#/$defs/chain", "type": ["null", "string"]},
            ],
            "minItems": 4,
            "$defs": {
                "t": {"type": "string", "$anchor": "t", "maxLength": 3},
                "chain": {"$id": "chain", "$ref": "#/$defs/t", "$defs": {"t": {"type": "null"}}},
            },
        },
    },
}
NO = {"no": {"allOf": [{"type": "integer"}, {"type": "string"}]}}
BAD = [
    (False, "contradicts itself"),
    ({"enum": []}, "contradicts itself"),
    ({"allOf": [{"type": "integer"}, {"type": "string"}]}, "contradicts itself"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "contradicts itself"),
    ({"properties": {"a": False}, "required": ["a"]}, "contradicts itself"),
    ({"type": "integer", "multipleOf": 0}, "'multipleOf' at /multipleOf must be a number above 0"),
    (
        {"type": "string", "maxLength": 2.5},
        "'maxLength' at /maxLength must be a number of at least 0, w",
    ),
    ({"type": "strnig"}, "'type' at /type must be one or more of null, boolean"),
    ({"properties": {"a": {"minLength": "3"}}}, "at /properties/a/minLength must be a number"),
    ({"properties": {"a": 3}}, "what stands at /properties/a is no schema: 3"),
    ({"type": "integer", "not": {"type": "integer"}}, "contradicts itself"),
    ({"maxItems": math.inf}, "at /maxItems must be a number"),
    ({"type": "number", "maximum": math.inf}, "at /maximum must be a number"),
    ({"multipleOf": math.nan}, "at /multipleOf must be a number"),
    ({"const": math.nan}, "at /const must be a list of JSON values"),
    ({"const": "\ud800"}, "at /const must be a list of JSON values"),
    ({"enum": [{1, 2}]}, "at /enum must be a list of JSON values"),
    ({"required": [1]}, "at /required must be a list of texts"),
    ({"required": ["a", ["b"]]}, "at /required must be a list of texts"),
    ({"properties": {1: {}}}, "at /properties must be an object with texts as names"),
    ({"properties": {"\ud800": {}}}, "at /properties must be an object with texts as names"),
    ({"type": "string", "format": ["date"]}, "at /format must be text"),
    ({"$ref": "#/$defs/none"}, "nothing at"),
    *(
        ({"$ref": f"#/anyOf/{index}", "anyOf": [{"type": "null"}] * 2}, "nothing at")
        for index in ("-1", "+1", "01", "1_0", " 1", "2")
    ),
    ({"$ref": "http://elsewhere/x"}, "leads out of it"),
    (NAMED | {"properties": {"a": {"$ref": "elsewhere"}}}, "leads out of it"),
    (NAMED | {"properties": {"a": {"$ref": "a#/$defs/none"}}}, "nothing at"),
    ({"$ref": "a", "$defs": {"1": {"$id": "a"}, "2": {"$id": "a"}}}, "leads out of it"),
    ({"$ref": "#"}, "round in circles|can't be held to"),
    (
        {"maximum": -1e-9, "exclusiveMinimum": 0.1},
        "no value fulfils it that .* is of a type that its keywords are about where it has none",
    ),
    ({"allOf": [{"$ref": "#"}]}, "round in circles|can't be held to"),
    (
        {"properties": {"a\n": {"pattern": "(?!a)"}}},
        r'at "/properties/a\\n/pattern" can\'t be held',
    ),
    ({"properties": {"a\u2028": 3}}, r'at "/properties/a\\u2028" is no schema'),
    ({"properties": {"a\n": {"minLength": "3"}}}, r'at "/properties/a\\n/minLength" must be'),
    ({"properties": {"a\n": {"$ref": "b"}}}, r'at "/properties/a\\n/\$ref" leads out of it'),
    ({"$ref": "#/a%0Ab"}, r"nothing at \$ref '#/a\\nb'"),
]
# Invalid values are accepted by xgrammar 0.2.8 alone for each of these.
HELD = {
    "required-undeclared": {"required": ["b"]},
    "no-type-number": {"minimum": 3, "exclusiveMaximum": 5},
    "no-type-string": {"minLength": 2},
    "no-type-array": {"minItems": 2, "maxItems": 3},
    "anyOf-beside": {"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": 1}]},
    "anyOf-required": AB | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "oneOf-required": AB | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "oneOf-tagged": {
        "oneOf": [
            {"properties": {"k": {"const": k}, "v": {"type": t}}, "required": ["k"]}
            for k, t in (("x", "integer"), ("y", "null"))
        ]
    },
    "allOf": {"type": "integer", "allOf": [{"minimum": 3}, {"maximum": 12}]},
    "allOf-properties": {"allOf": [AB | {"required": ["a"]}, {"required": ["b"]}]},
    "allOf-closed": {"allOf": [AB, {"properties": {"a": {}}, "additionalProperties": False}]},
    "ref-beside": {"$ref": "#/$defs/x", "minimum": 3, "$defs": {"x": {"type": "integer"}}},
    "ref-named": NAMED,
    "draft-4-others": {
        "items": [{"type": "null"}],
        "additionalItems": {"$ref": "#/$defs/a%20~1b"},
        "minItems": 2,
        "$defs": {"a /b": {"type": "integer"}},
    },
    "draft-4-anchor": {
        "id": "https://x.org/r",
        "allOf": [{"$ref": "#n"}],
        "definitions": {"x": {"id": "#n", "type": "null"}},
    },
    "ref-anchor": {"$ref": "#n", "$defs": {"x": {"$anchor": "n", "type": "null"}}},
    "recursive": {"properties": {"a": {"$ref": "#"}, "n": {"type": "null"}}},
    "not-type": {"not": {"type": ["string", "object", "array", "number"]}},
    "not-enum": {"enum": [1, 2, 3, True], "not": {"const": 1}},
    "not-required": AB | {"not": {"required": ["b"]}, "required": ["a"]},
    "not-anything": {"properties": {"a": {"not": {}}, "b": {"type": "null"}}},
    "enum-beside": {"enum": ["a", "abc", 7], "minLength": 2, "type": "string"},
    "const-of-another-type": {"anyOf": [{"const": 1, "type": "string"}, {"type": "null"}]},
    "length": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern-and-length": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 2},
    "pattern-quote": {"type": "string", "pattern": '^["\\\\]{2}$'},
    "pattern-control": {"type": "string", "pattern": "^a\\nb[\\x00-\\x1f]$"},
    "pattern-classes": {"type": "string", "pattern": "^\\W\\D\\S[^\\w]$"},
    "pattern-within": {"type": "string", "pattern": "b$", "maxLength": 3},
    "pattern-names": {"patternProperties": {"^[ab]$": {"type": "null"}}, "maxProperties": 2},
    "names": {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}},
    "names-and-named": AB | {"propertyNames": {"enum": ["a"]}},
    "ends-of-both-kinds": {"type": "number", "minimum": 1, "exclusiveMinimum": 3, "maximum": 4},
    "multiples-up-to": {"type": "integer", "minimum": 0, "maximum": 10**4, "multipleOf": 100},
    "decimals-few": {"exclusiveMinimum": 1, "exclusiveMaximum": 1.000002},
    "decimals-coarse": {"exclusiveMinimum": 1e20},
    "draft-4": {"type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 5},
    "draft-4-items": {"items": [{"type": "null"}], "additionalItems": False, "minItems": 1},
    "prefix-longer": {"prefixItems": [{"type": "null"}] * 3, "maxItems": 2},
}
HELD |= {f"format-{name}": {"type": "string", "format": name} for name in FORMATS}


@pytest.mark.parametrize(("schema", "keyword", "pointer"), REFUSED, ids=lambda v: str(v)[:30])
def test_what_can_t_be_held_to_is_named_with_its_place(schema, keyword, pointer):
    with pytest.raises(ValueError, match="allow invalid output with strict=False") as caught:
        checked_schema(schema)
    assert f"{keyword!r} at {pointer}" in str(caught.value)
    assert "\n" not in str(caught.value)
    json.loads(checked_schema(schema, strict=False))


@pytest.mark.parametrize(("schema", "message"), BAD, ids=lambda v: str(v)[:40])
def test_what_is_no_schema_or_contradicts_itself_is_one_sentence(schema, message):
    with pytest.raises(ValueError, match=message) as caught:
        checked_schema(schema)
    assert "\n" not in str(caught.value)


def test_few_words_that_stand_for_very_many_schemas_are_refused_soon():
    """A reference to the whole beside keywords: merged with itself, again and again."""
    circle = {"multipleOf": 2, "$ref": "#", "additionalProperties": {"required": ["x", "y"]}}
    others = [{"unevaluatedProperties": {"type": "boolean"}}, {"dependentRequired": {"b": ["b"]}}]
    with pytest.raises(ValueError, match="has more than 20000 parts once written out"):
        checked_schema({"anyOf": [*others, circle], "uniqueItems": True}, strict=False)


@pytest.mark.parametrize("name", HELD)
@pytest.mark.one_in(2)
def test_random_text_of_a_rewritten_schema_is_valid(backend, name):
    jsonschema = needed("jsonschema")
    schema = HELD[name]
    draft = jsonschema.Draft4Validator if "draft-4" in name else jsonschema.Draft202012Validator
    checker = draft(schema, format_checker=draft.FORMAT_CHECKER)
    tokenizer, rng, done = make_tokenizer(), random.Random(name), 0
    for _ in range(15):
        matcher = backend.matcher(Grammar.json_schema(schema))
        tokens = random_tokens(matcher, rng, VOCAB_SIZE, 200)
        if tokens is None:
            continue
        text, done = tokenizer.decode(tokens), done + 1
        assert checker.is_valid(json.loads(text)), text
    assert done > 3


def accepts(backend: XGrammarBackend, schema: object, text: str) -> bool:
    matcher = backend.matcher(Grammar.json_schema(schema))
    ids = backend._tokenizer(text)["input_ids"]
    return all(map(matcher.advance, ids)) and matcher.complete


@pytest.mark.parametrize(
    ("schema", "text", "fits"),
    [
        ({"minimum": 3}, "3", True),
        ({"allOf": [{"minimum": 3}, {"maximum": 5}]}, "4.5", True),
        (HELD["oneOf-required"], '{"a": 1}', True),
        (HELD["oneOf-required"], '{"a": 1, "b": 2}', False),
        (HELD["oneOf-tagged"], '{"k": "y", "v": null}', True),
        (HELD["oneOf-tagged"], '{"k": "y", "v": 1}', False),
        (HELD["length"], '"a\\"b"', True),
        (HELD["length"], '"a"', False),
        (HELD["pattern-within"], '"aab"', True),
        (HELD["pattern-within"], '"ba"', False),
        ({"pattern": "b"}, '"abc"', True),
        (HELD["required-undeclared"], '{"b": [1]}', True),
        (HELD["recursive"], '{"a": {"a": {"n": null}}}', True),
        ({"type": "array"}, '[1, "a"]', True),
        ({"type": "object"}, '{"b": 1, "a": {}}', True),
        (AB, '{"c": 1}', False),
        (HELD["format-date"], '"2024-02-29"', True),
        (HELD["format-date"], '"2023-02-29"', False),
        (HELD["format-date"], '"1900-02-29"', False),
        (HELD["format-date"], '"2000-02-29"', True),
        (HELD["format-ipv4"], '"010.1.1.1"', False),
        ({"format": "uri-reference"}, '"/a//b?"', False),
        ({"format": "uri-reference"}, '"/a//b"', True),
        ({"format": "uri-reference"}, '"/"', True),
        ({"format": "uri-reference"}, '"//a:b"', False),
        ({"enum": ["\u00e9", "e"], "pattern": "^[a-z]$"}, '"e"', True),
        ({"enum": ["\u00e9", "e"], "pattern": "^[a-z]$"}, '"\u00e9"', False),
        ({"enum": ["\u00e9", "e"], "pattern": "^.$"}, '"\u00e9"', True),
        ({"const": {"a": [1]}}, '{"a":[1]}', True),
        ({"properties": {"a": {"$ref": "#/$defs/no"}, "b": {}}, "$defs": NO}, '{"b": 1}', True),
        ({"anyOf": [{"$ref": "#/$defs/no"}, {"type": "null"}], "$defs": NO}, "null", True),
        ({"type": "integer", "not": {"anyOf": [NO["no"], {"minimum": 3}]}}, "2", True),
        ({"type": "integer", "not": {"anyOf": [NO["no"], {"minimum": 3}]}}, "3", False),
        ({"type": "array", "items": NO["no"], "uniqueItems": True}, "[]", True),
        ({"prefixItems": [{"type": "null"}], "minItems": 2}, "[null, 1]", True),
        ({"prefixItems": [{"type": "null"}], "minItems": 2}, "[null]", False),
        (NAMED, '{"a": ["x", "", 1, null]}', True),
        (NAMED, '{"a": ["x", 1, 1, null]}', False),
        (NAMED, '{"a": [2, "", 1, null]}', False),
        (HELD["decimals-coarse"], "100000000000000000000.5", False),
        (HELD["decimals-coarse"], "100000000000000016384", True),
        ({"exclusiveMaximum": -1e21}, "-1000000000000000000000.5", False),
        ({"exclusiveMaximum": 1e15}, "999999999999999.875", True),
        ({"exclusiveMaximum": 1e15}, "999999999999999.99", False),
        ({"exclusiveMinimum": 2**33}, "8589934592.000001", False),
        ({"exclusiveMinimum": 2**33}, "8589934592.000002", True),
        ({"exclusiveMinimum": 2**33 - 1}, "8589934591.000001", True),
        ({"exclusiveMinimum": 0.1}, "0.100001", True),
        ({"exclusiveMinimum": 0.1}, "0.10000000000000000001", False),
        (True, "null", True),
    ],
    ids=lambda v: str(v)[:30],
)
def test_rewrites_take_away_nothing_that_they_should_not(backend, schema, text, fits):
    assert accepts(backend, schema, text) == fits


@pytest.mark.parametrize(
    "pattern",
    [
        "(?!a)b", "a(?=b)", "\\bfoo", "(a)\\1", "^a^b", "[", "(a", "a**", "\\p{L}", "a{,2}",
        "(^a$)", "^[^]]$", "[]a]", "\\01", "[\\01]", "a{2}{3}", "a*??", "a{2}?{,3}",
    ],
)  # fmt: skip
def test_patterns_that_can_t_be_expressed_are_refused(pattern):
    with pytest.raises(ValueError, match="in "):
        string_pattern(pattern)


def test_a_repetition_that_no_text_reaches_is_one_without_end():
    far = "1" + "0" * 400
    assert string_pattern(f"^a{{2,{far}}}$", most=3) == string_pattern("^a{2,}$", most=3)
    with pytest.raises(ValueError, match="no text has that length"):
        string_pattern(f"^a{{{far}}}$", most=3)
    assert string_pattern(f"^a{{2,{3:0>19}}}$") == string_pattern("^a{2,3}$")
    assert string_pattern(f"^a{{2,{3:0>19}}}$") == string_pattern("^a{2,3}$")
