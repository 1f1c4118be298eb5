"""JSON schemas as keywords that can be merged: what fulfils both, and nothing else."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from layerskip.schemas.automata import matches
from layerskip.schemas.refs import escaped, shown
from layerskip.schemas.values import NUMBERS, json_equal

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
ONE_SCHEMA = (
    "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
MAPS = (
    "dependencies", "dependentRequired", "dependentSchemas", "patternProperties", "properties",
)  # fmt: skip
COUNTS = (
    "maxContains", "maxItems", "maxLength", "maxProperties", "minContains", "minItems",
    "minLength", "minProperties",
)  # fmt: skip
OTHERS = (
    "$dynamicRef", "$recursiveRef", "$ref", "enum", "format", "pattern", "required", "type",
    "uniqueItems",
)  # fmt: skip
# What these say depends on what keywords in the same place say of properties or items.
UNEVALUATED = {"unevaluatedItems": "items", "unevaluatedProperties": "additionalProperties"}
IN_PLACE = {
    "$ref",
    "allOf",
    "anyOf",
    "contains",
    "if",
    "not",
    "oneOf",
    "$dynamicRef",
    "$recursiveRef",
}
INNER = ("properties", "patternProperties", "additionalProperties", "prefixItems", "items")
CONDITIONAL = ("if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas")
DRAFT_3 = ("disallow", "divisibleBy", "extends", "required: true")
KEYWORDS = frozenset((*ONE_SCHEMA, *LISTS, *MAPS, *COUNTS, *NUMBERS, *OTHERS, *DRAFT_3))
SMALLEST = {"maximum", "exclusiveMaximum", "maxItems", "maxLength", "maxProperties"}
LARGEST = {"minimum", "exclusiveMinimum", "minItems", "minLength", "minProperties"}


class Contradiction(Exception):  # noqa: N818
    """Nothing fulfils both schemas."""


@dataclass(frozen=True)
class Condition:
    """What holds if something else does.

    Attributes:
        keyword: that says so: ``if``, ``dependentRequired`` and the like.
        pointer: its place.
        test: where it is fulfilled, ``then`` has to be, else ``otherwise``.
    """

    keyword: str
    pointer: str
    test: "Node"
    then: "Node"
    otherwise: "Node"


class Unmergeable(Exception):  # noqa: N818
    """Two schemas have a keyword that no single one can stand for."""

    def __init__(self, keyword: str, pointer: str) -> None:
        super().__init__(keyword)
        self.keyword, self.pointer = keyword, pointer


@dataclass(frozen=True)
class Node:
    """A schema's keywords. Schemas inside are as the user wrote them, or nodes.

    Attributes:
        words: keywords that validate, in one spelling: ``const`` is an ``enum`` of one, a list of
            ``items`` is ``prefixItems``.
        places: the JSON pointer of each.
        false: nothing fulfils it.
        through: pointers of references that were followed to get here.
    """

    words: dict[str, Any]
    places: dict[str, str]
    false: bool = False
    through: tuple[str, ...] = ()

    @classmethod
    def of(cls, schema: Any, pointer: str, through: tuple[str, ...] = ()) -> "Node":
        """A schema's keywords, checked."""
        if isinstance(schema, Node):
            return schema
        if isinstance(schema, bool):
            return cls({}, {}, not schema, through)
        if not isinstance(schema, Mapping):
            raise ValueError(f"what stands at {shown(pointer)} is no schema: {schema!r}")
        words = _one_spelling(schema)
        spelt = {"enum": "const", "prefixItems": "items", "required: true": "required"}
        places = {w: f"{pointer}/{w if w in schema else spelt.get(w, w)}" for w in words}
        for word, value in words.items():
            _check(word, value, places[word])
        if isinstance(schema.get("items"), list):
            places["items"] = f"{pointer}/additionalItems"
        conditions = tuple(_conditions(words, places))
        words = {w: v for w, v in words.items() if w not in CONDITIONAL}
        if conditions:
            words["if"] = conditions
            places.setdefault("if", conditions[0].pointer)
        return cls(words, places, False, through).sealed

    @property
    def sealed(self) -> "Node":
        """The same without ``unevaluated...``, where no other schema in its place is left."""
        node = self
        for word, rest in UNEVALUATED.items():
            if word in self.words and not IN_PLACE & self.words.keys():
                node = node.without(word)
                if rest not in self.words:
                    node = node.having(rest, self.words[word], self.places[word])
        return node

    @property
    def says_something(self) -> bool:
        return self.false or bool(self.words)

    @property
    def names(self) -> frozenset[str] | None:
        """Names that an object's properties are written with; None: others, too."""
        if self.keeps_others:
            return None
        named = frozenset((*self.words.get("properties", ()), *self.words.get("required", ())))
        free = self.part("additionalProperties")
        closed = free is not None and free.false and "patternProperties" not in self.words
        return named if named or closed else None

    @property
    def keeps_others(self) -> bool:
        """Whether an object still gets other properties when one is named."""
        free = self.part("additionalProperties")
        return free is not None and free.says_something and not free.false

    def without(self, keyword: str) -> "Node":
        return replace(self, words={w: v for w, v in self.words.items() if w != keyword})

    def having(self, keyword: str, value: Any, place: str) -> "Node":
        places = {keyword: place} | self.places
        return replace(self, words=self.words | {keyword: value}, places=places)

    def parts(self, keyword: str) -> list["Node"]:
        """Schemas of a keyword that has a list of them."""
        place = self.places.get(keyword, "")
        return [Node.of(s, f"{place}/{i}") for i, s in enumerate(self.words.get(keyword, ()))]

    def part(self, keyword: str) -> "Node | None":
        """The schema of a keyword that has one."""
        if keyword not in self.words:
            return None
        return Node.of(self.words[keyword], self.places[keyword])

    def pattern_parts(self) -> dict[str, "Node"]:
        """Schemas of properties by the pattern of their names."""
        place = self.places.get("patternProperties", "")
        found = self.words.get("patternProperties", {})
        return {p: Node.of(s, f"{place}/{escaped(p)}") for p, s in found.items()}

    def property(self, name: str) -> "Node | None":
        """What a property of this name has to fulfil; None if it is free.

        Raises:
            Unmergeable: whether one of the patterns of names is about it can't be told.
        """
        found = []
        named = self.words.get("properties", {})
        if name in named:
            found.append(Node.of(named[name], f"{self.places['properties']}/{escaped(name)}"))
        for pattern, part in self.pattern_parts().items():
            verdict = matches(pattern, name)
            if verdict is None:
                raise Unmergeable("patternProperties", self.places["patternProperties"])
            found += [part] if verdict else []
        return both(found) if found else self.part("additionalProperties")


def both(nodes: list[Node]) -> Node | None:
    """What fulfils all of them; merged when it is looked into, for schemas may be endless."""
    if len(nodes) < 2:
        return nodes[0] if nodes else None
    return Node({"allOf": nodes}, {"allOf": ""})


def kinds_of(node: Node) -> tuple[str, ...] | None:
    """The types that a schema names; None if it names none."""
    wanted = node.words.get("type")
    if wanted is None:
        return None
    names = (wanted,) if isinstance(wanted, str) else tuple(dict.fromkeys(wanted))
    return tuple(n for n in names if not (n == "integer" and "number" in names))


def merged(one: Node, other: Node) -> Node:
    """What fulfils both. What ``one`` says of unevaluated properties or items is about both.

    Raises:
        Contradiction, Unmergeable: see there.
    """
    if one.false or other.false:
        raise Contradiction
    other = other.sealed
    for word in UNEVALUATED:
        if word in other.words:
            raise Unmergeable(word, other.places[word])
    words = dict(one.words)
    places = other.places | {w: p for w, p in one.places.items() if w in words}
    words |= _properties(one, other) | _items(one, other)
    for word in other.words:
        if word in INNER:
            continue
        if word not in words:
            words[word] = other.words[word]
        else:
            words |= _merged(word, one, other)
    return Node(words, places, False, tuple(dict.fromkeys((*one.through, *other.through))))


def _merged(word: str, one: Node, other: Node) -> dict[str, Any]:  # noqa: C901
    a, b = one.words[word], other.words[word]
    if word in SMALLEST or word in LARGEST:
        return {word: (min if word in SMALLEST else max)(a, b)}
    if word == "type":
        return {word: _common_kinds(kinds_of(one) or (), kinds_of(other) or ())}
    if word == "enum":
        return {word: [v for v in a if any(json_equal(v, o) for o in b)]}
    if word == "required":
        return {word: list(dict.fromkeys((*a, *b)))}
    if word == "uniqueItems":
        return {word: a or b}
    if word == "if":
        return {word: (*a, *b)}
    if word == "allOf":
        return {word: [*one.parts(word), *other.parts(word)]}
    if word in ("anyOf", "oneOf"):
        rest = Node({word: b}, {word: other.places[word]})
        return {word: [both([part, rest]) for part in one.parts(word)]}
    if word == "propertyNames":
        return {word: both([p for n in (one, other) if (p := n.part(word)) is not None])}
    if word == "not":
        parts = [one.part(word), other.part(word)]
        listed = [p.words["enum"] for p in parts if p is not None and set(p.words) == {"enum"}]
        if len(listed) == 2:
            return {word: Node({"enum": [*listed[0], *listed[1]]}, {"enum": one.places[word]})}
        return {word: Node({"anyOf": parts}, {"anyOf": one.places[word]})}
    if word == "multipleOf" and isinstance(a, int) and isinstance(b, int):
        return {word: math.lcm(a, b)}
    if json_equal(a, b):
        return {}
    raise Unmergeable(word, other.places[word])


def _common_kinds(one: tuple[str, ...], other: tuple[str, ...]) -> list[str]:
    common = [k for k in one if k in other or (k == "integer" and "number" in other)]
    common += [k for k in other if k == "integer" and "number" in one and k not in common]
    if not common:
        raise Contradiction
    return common


def _properties(one: Node, other: Node) -> dict[str, Any]:
    """What both say of properties, each for those that the other names."""
    for node, rest in ((one, other), (other, one)):
        free = rest.words.get("additionalProperties", True)
        others = node.words.get("patternProperties", {})
        if others and free is not True and others != rest.words.get("patternProperties"):
            raise Unmergeable("additionalProperties", rest.places["additionalProperties"])
    names = dict.fromkeys((*one.words.get("properties", {}), *other.words.get("properties", {})))
    found: dict[str, Any] = {}
    if names:
        parts = {n: [p for o in (one, other) if (p := o.property(n)) is not None] for n in names}
        found["properties"] = {n: both(p) if p else True for n, p in parts.items()}
    free_parts = [p for n in (one, other) if (p := n.part("additionalProperties")) is not None]
    if free_parts:
        found["additionalProperties"] = both(free_parts)
    patterns: dict[str, list[Node]] = {}
    for node in (one, other):
        for pattern, part in node.pattern_parts().items():
            patterns.setdefault(pattern, []).append(part)
    if patterns:
        found["patternProperties"] = {p: both(parts) for p, parts in patterns.items()}
    return found


def _items(one: Node, other: Node) -> dict[str, Any]:
    """What both say of items, place by place."""
    found: dict[str, Any] = {}
    prefixes = [node.parts("prefixItems") for node in (one, other)]
    rests = [node.part("items") for node in (one, other)]
    count = max(map(len, prefixes))
    if count:
        places = [
            [
                prefix[i] if i < len(prefix) else rest
                for prefix, rest in zip(prefixes, rests, strict=True)
            ]
            for i in range(count)
        ]
        found["prefixItems"] = [
            both([part for part in parts if part is not None]) or True for parts in places
        ]
    known = [rest for rest in rests if rest is not None]
    if known:
        found["items"] = both(known)
    return found


def _one_spelling(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords that validate, older drafts' in today's spelling."""
    words = {word: value for word, value in schema.items() if word in KEYWORDS}
    if "const" in schema:
        listed = words.get("enum")
        same = not isinstance(listed, list) or any(json_equal(schema["const"], v) for v in listed)
        words["enum"] = [schema["const"]] if same else []
    if isinstance(words.get("items"), list):
        words["prefixItems"] = words.pop("items")
        if "additionalItems" in schema:
            words["items"] = schema["additionalItems"]
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        boolean = isinstance(words.get(exclusive), bool)  # draft 4
        if boolean and words.pop(exclusive) and bound in words:
            words[exclusive] = words.pop(bound)
    if isinstance(words.get("required"), bool) and words.pop("required"):
        words["required: true"] = True
    if words.get("additionalProperties") == {}:
        words["additionalProperties"] = True
    for word, rest in UNEVALUATED.items():
        if word in words and (rest in words or words[word] in (True, {})):
            del words[word]
    return {w: v for w, v in words.items() if not (w == "additionalProperties" and v is True)}


def _conditions(words: Mapping[str, Any], places: Mapping[str, str]) -> Iterator[Condition]:
    """What ``if`` and the keywords about a property's presence say."""
    if "if" in words:
        parts = [
            Node.of(words.get(word, True), places.get(word, "")) for word in ("if", "then", "else")
        ]
        if parts[1].says_something or parts[2].says_something:
            yield Condition("if", places["if"], *parts)
    for word in ("dependencies", "dependentRequired", "dependentSchemas"):
        for name, wanted in words.get(word, {}).items():
            place = f"{places[word]}/{escaped(name)}"
            asked = {"required": [wanted]} if isinstance(wanted, str) else wanted
            then = Node.of({"required": asked} if isinstance(asked, list) else asked, place)
            # By ``required`` alone, what is no object has every property.
            test = Node({"type": "object", "required": [name]}, {"type": place, "required": place})
            yield Condition(word, places[word], test, then, Node({}, {}))


def _check(word: str, value: Any, place: str) -> None:
    """Raise unless a keyword's value is of the right kind."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    number = number and (isinstance(value, int) or math.isfinite(value))
    if word in NUMBERS:
        fine, wanted = number and (word != "multipleOf" or value > 0), "a number"
        wanted += " above 0" if word == "multipleOf" else ""
    elif word in COUNTS:
        fine, wanted = (
            number and value >= 0 and value == int(value),
            "a number of at least 0, without a fraction",
        )
    elif word == "enum":
        fine, wanted = isinstance(value, list) and _is_json(value), "a list of JSON values"
    elif word == "required":
        fine = isinstance(value, list) and all(map(_is_text, value))
        wanted = "a list of texts"
    elif word in LISTS:
        fine, wanted = isinstance(value, list), "a list"
    elif word in MAPS:
        fine = isinstance(value, Mapping) and all(map(_is_text, value))
        wanted = "an object with texts as names"
    elif word in ("format", "pattern", "$ref"):
        fine, wanted = isinstance(value, str), "text"
    elif word == "type":
        names = [value] if isinstance(value, str) else value
        fine = isinstance(names, list) and bool(names) and all(n in TYPES for n in names)
        wanted = f"one or more of {', '.join(TYPES)}"
    else:
        return
    if not fine:
        raise ValueError(f"the schema's {word!r} at {shown(place)} must be {wanted}, got {value!r}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and _is_json(value)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError):  # no JSON at all, no finite number, or half of a character
        return False
    return True
