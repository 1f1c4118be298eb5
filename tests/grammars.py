"""Random JSON schemas, and random text that a compiled grammar allows."""

import random
from typing import Any

import torch

from layerskip.constraint import unpacked
from layerskip.grammar import Matcher

WORDS = ("id", "name", "size", "tags", "on", "kind")


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Small, so that random models finish; every kind of keyword that is held to is in some."""
    kinds = ["integer", "boolean", "null", "string", "enum", "const", "number", "merged", "choice"]
    if depth:
        kinds += ["object"] * 5 + ["array"] * 3
    return MAKERS[rng.choice(kinds)](rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 3))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
    }
    return schema | ({"additionalProperties": False} if rng.random() < 0.5 else {})


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        parts = [random_schema(rng, depth - 1) for _ in range(2)]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": 1}
    low = rng.randint(0, 2)
    return {"items": random_schema(rng, depth - 1), "minItems": low, "maxItems": low + 2}


def _integer(rng: random.Random, _depth: int) -> dict[str, Any]:
    low = rng.randint(-20, 100)
    step = {"multipleOf": rng.randint(2, 4)} if rng.random() < 0.3 else {}
    return {"type": "integer", "minimum": low, "exclusiveMaximum": low + 50} | step


def _string(rng: random.Random, _depth: int) -> dict[str, Any]:
    low = rng.randint(0, 3)
    bounds = {"minLength": low, "maxLength": low + 3}
    shape = {"type": "string", "pattern": rng.choice(["^[a-z]+$", '^x["\\\\a-f]*$', "^\\w\\d*$"])}
    return rng.choice(
        [
            {"type": "string"} | bounds,
            shape | {"maxLength": 4},
            {"type": "string", "format": "date"},
        ]
    )


def _merged(rng: random.Random, depth: int) -> dict[str, Any]:
    name = rng.choice(WORDS)
    part = {"properties": {name: random_schema(rng, 0)}, "required": [name]}
    return {"allOf": [{"type": "object"}, part], "properties": {"z": {"$ref": "#/$defs/z"}}}


def _choice(rng: random.Random, depth: int) -> dict[str, Any]:
    branches = [_integer(rng, 0), _string(rng, 0), {"type": "null"}]
    return {rng.choice(["anyOf", "oneOf"]): rng.sample(branches, 2), "description": "either"}


MAKERS: dict[str, Any] = {
    "object": _object,
    "array": _array,
    "integer": _integer,
    "string": _string,
    "merged": _merged,
    "choice": _choice,
    "boolean": lambda rng, depth: {"type": "boolean"},
    "null": lambda rng, depth: {"type": ["null", "boolean"]},
    "number": lambda rng, depth: {"type": "number", "minimum": 0, "maximum": 1},
    "enum": lambda rng, depth: {"enum": ["red", 'a "b"', 3, None, [1, {"a": 2}]], "type": "string"},
    "const": lambda rng, depth: {"const": rng.choice([1.5, "on", {"a": [True]}])},
}


def random_root(seed: int) -> dict[str, Any]:
    """A schema whose top is an object or an array."""
    rng = random.Random(seed)
    return rng.choice([_object, _object, _array])(rng, 2) | {"$defs": {"z": {"enum": [0, "z"]}}}


def random_tokens(matcher: Matcher, rng: random.Random, vocab: int, most: int) -> list[int] | None:
    """Tokens up to where the text is whole; None if it is not within ``most``."""
    tokens: list[int] = []
    while len(tokens) < most:
        words = torch.zeros(-(-vocab // 32), dtype=torch.int32)
        matcher.fill(words)
        following = unpacked(words, vocab).nonzero()[:, 0].tolist()
        if matcher.complete and (not following or rng.random() < 0.5):
            return tokens
        assert following, "neither whole nor can it go on"
        tokens.append(rng.choice(following))
        assert matcher.advance(tokens[-1])
    return None
