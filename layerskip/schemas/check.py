"""JSON schemas in a form that a grammar can hold to; what can't be is refused, by name and place.

xgrammar compiles keywords that it then ignores (measured, 0.2.8: keywords without ``type``, beside
``$ref`` or ``anyOf``, ``oneOf``'s exclusivity, ``allOf``, ``not``, ``if``, ``contains``, ...). What
comes out of here is a core in which each schema is one of: anything, one type with that type's
keywords, ``enum``, ``anyOf`` alone, ``$ref`` alone.
"""

import itertools
import json
import operator
from collections.abc import Mapping
from typing import Any

from layerskip.schemas.automata import apart
from layerskip.schemas.merge import (
    DRAFT_3,
    Condition,
    Contradiction,
    Node,
    Unmergeable,
    kinds_of,
    merged,
)
from layerskip.schemas.negate import KIND_OF, Negator, NoNegationError
from layerskip.schemas.refs import References, shown
from layerskip.schemas.values import fits, json_equal
from layerskip.schemas.write import NOTHING, Core, Writer

REFUSED = (
    "contains", "uniqueItems", "$dynamicRef", "$recursiveRef", "unevaluatedItems",
    "unevaluatedProperties",
)  # fmt: skip
MAX_SCHEMAS = 20_000
MAX_BRANCHES = 64
MAX_UNIQUE = 4
MAX_DEPTH = 3


def checked_schema(schema: Any, *, strict: bool = True) -> str:
    """The core of a schema, as JSON.

    Exact rewrites: ``allOf`` merged, what stands beside ``anyOf`` and ``$ref`` merged into them,
    ``oneOf``, ``if`` and keywords about a property's presence as ``anyOf`` of branches that say
    what the others are not, ``not`` as what is left, values of ``enum`` held against the keywords
    beside it, lengths, patterns and formats as one expression, ``uniqueItems`` of few values as
    the sequences that there are. A schema without a type takes that of its keywords.

    Args:
        schema: of any draft, as Python values.
        strict: refuse what can't be held to; False leaves it out.

    Raises:
        ValueError: it is no schema, nothing fulfils it, or one sentence names the keyword that
            can't be held to, and its JSON pointer.
    """
    core = _Core(schema, strict)
    try:
        root = core.ref("")
    except RecursionError:
        raise ValueError("the schema is nested too deeply, or goes round in circles") from None
    _check_circles(core.defs)
    if core.defs[root] == NOTHING:
        raise ValueError(
            "the schema contradicts itself: no value fulfils it that has only properties it names, "
            "and is of a type that its keywords are about where it has none"
        )
    return json.dumps({"$ref": f"#/$defs/{root}", "$defs": core.defs})


class _Core:
    """One schema's rewriting; referenced schemas are written once, so recursion ends."""

    def __init__(self, root: Any, strict: bool) -> None:
        self.strict = strict
        self.defs: dict[str, Any] = {}
        self._references = References(root)
        self._writer = Writer(self.schema, self.refuse)
        self._negator = Negator(self.opened)
        self._names: dict[str, str] = {}
        self._count = 0

    def ref(self, pointer: str) -> str:
        """Name of the definition that stands for the schema at ``pointer``."""
        if pointer not in self._names:
            name = self._names[pointer] = f"s{len(self._names)}"
            self.defs[name] = {}  # while it is being written
            self.defs[name] = self.schema(Node.of(self._references.at(pointer), pointer))
        return self._names[pointer]

    def refuse(self, keyword: str, pointer: str, why: str) -> None:
        if self.strict:
            raise ValueError(
                f"the schema's {keyword!r} at {shown(pointer)} can't be held to while decoding: "
                f"{why}; change it, or allow invalid output with strict=False"
            )

    def schema(self, node: Node) -> Core:
        """The core of a schema."""
        self._spend()
        if node.false:
            return NOTHING
        try:
            return self._schema(node)
        except Contradiction:
            return NOTHING
        except Unmergeable as error:
            why = "whether its patterns are about a property that the schema names can't be told"
            self.refuse(error.keyword, error.pointer, why)
            return self.schema(node.without(error.keyword))

    def _schema(self, node: Node) -> Core:
        words = node.words
        if "$ref" in words:
            return self._reference(node)
        if "allOf" in words:
            return self.schema(self._and(node))
        for keyword, branches in (
            ("anyOf", self._any),
            ("oneOf", self._one),
            ("if", self._conditional),
            ("not", self._not),
            ("uniqueItems", self._unique),
        ):
            if keyword in words and not _says_nothing(keyword, node):
                return _any_of([self.schema(branch) for branch in branches(node)])
        node = node.sealed
        words = node.words
        for keyword in REFUSED:
            if keyword in words and not _says_nothing(keyword, node):
                self.refuse(keyword, node.places[keyword], "grammars can't express it")
        for keyword in DRAFT_3:
            if keyword in words:
                self.refuse(keyword, node.places[keyword], "it is draft 3's")
        if "enum" in words:
            return self._enum(node)
        kinds = kinds_of(node) or _implied(node)
        if kinds is None:
            return {}
        return _any_of([self._writer.typed(node, kind) for kind in kinds])

    def _spend(self) -> None:
        """One schema more that was written, or merged: of few words there can be very many."""
        self._count += 1
        if self._count > MAX_SCHEMAS:
            raise ValueError(f"the schema has more than {MAX_SCHEMAS} parts once written out")

    def _merged(self, one: Node, other: Node) -> Node:
        self._spend()
        try:
            return merged(one, other)
        except Unmergeable as error:
            self.refuse(error.keyword, error.pointer, "it can't be merged with its like")
            if error.keyword in other.words:
                return self._merged(one, other.without(error.keyword))
            return self._merged(one.without(error.keyword), other)

    def _reference(self, node: Node) -> Core:
        beside = node.without("$ref")
        if not beside.says_something:
            pointer = self._references.target(node.words["$ref"], node.places["$ref"])
            name = self.ref(pointer)
            return NOTHING if self.defs[name] == NOTHING else {"$ref": f"#/$defs/{name}"}
        return self.schema(self._followed(node))

    def _followed(self, node: Node) -> Node:
        """A schema with its reference merged in."""
        pointer = self._references.target(node.words["$ref"], node.places["$ref"])
        beside = node.without("$ref")
        if pointer in node.through:
            self.refuse("$ref", node.places["$ref"], "it repeats itself beside keywords")
            return beside
        target = Node.of(self._references.at(pointer), pointer, (*node.through, pointer))
        return self._merged(beside, target)

    def _and(self, node: Node) -> Node:
        """A schema with its ``allOf`` merged in."""
        rest = node.without("allOf")
        for part in node.parts("allOf"):
            rest = self._merged(rest, self.opened(part))
        return rest

    def opened(self, node: Node) -> Node:
        """A schema with references followed and ``allOf`` merged; false if nothing fulfils it."""
        try:
            while True:
                if "$ref" in node.words:
                    node = self._followed(node)
                elif "allOf" in node.words:
                    node = self._and(node)
                else:
                    return node
        except Contradiction:
            return Node({}, {}, True)

    def _any(self, node: Node) -> list[Node]:
        """The branches of ``anyOf``, each with what stands beside it."""
        rest, parts = node.without("anyOf"), node.parts("anyOf")
        if not rest.says_something:
            return parts
        return [both for part in parts for both in self._joined(rest, part)]

    def _joined(self, node: Node, *parts: Node) -> list[Node]:
        """What fulfils a schema and those in its place; none if they contradict each other."""
        try:
            found = self.opened(node)
            for part in parts:
                found = self._merged(found, self.opened(part))
        except Contradiction:
            return []
        return [found]

    def _spread(self, *nodes: Node) -> list[Node]:
        """The same, with ``anyOf`` distributed and types named."""
        found = []
        for node in self._joined(*nodes):
            if "anyOf" in node.words:
                rest = node.without("anyOf")
                found += [b for p in node.parts("anyOf") for b in self._spread(rest, p)]
                continue
            kinds = kinds_of(node) or _implied(node)
            found.append(
                node
                if kinds is None or "enum" in node.words
                else node.having("type", list(kinds), "")
            )
        return found

    def _one(self, node: Node) -> list[Node]:
        """Branches of ``oneOf`` that fit no value that another fits."""
        rest, parts = node.without("oneOf"), node.parts("oneOf")
        found = []
        for i, part in enumerate(parts):
            branches = whole = self._spread(rest, part)
            for j, other in enumerate(parts):
                try:
                    if i != j:
                        branches = [b for one in branches for b in self._without(one, other)]
                except NoNegationError:
                    why = f"a value may fit its branches {min(i, j)} and {max(i, j)} at once"
                    self.refuse("oneOf", node.places["oneOf"], why)
            # A branch as it was keeps its reference, which may lead back here.
            same = len(branches) == len(whole) and all(map(operator.is_, branches, whole))
            found += [part] if same and not rest.says_something else branches
        return found

    def _conditional(self, node: Node) -> list[Node]:
        """Where the first condition's test is fulfilled, and where it is not."""
        first: Condition = node.words["if"][0]
        others = node.words["if"][1:]
        rest = node.having("if", others, "") if others else node.without("if")
        try:
            fulfilled = self._joined(rest, first.test, first.then)
            failed = [
                one
                for branch in self._spread(rest, first.otherwise)
                for one in self._without(branch, first.test)
            ]
        except NoNegationError:
            self.refuse(first.keyword, first.pointer, "grammars can't express its test's opposite")
            fulfilled, failed = [rest], []
        return fulfilled + failed

    def _not(self, node: Node) -> list[Node]:
        """What is left."""
        rest, part = node.without("not"), node.part("not")
        assert part is not None
        try:
            return [b for one in self._spread(rest) for b in self._without(one, part)]
        except NoNegationError:
            self.refuse("not", node.places["not"], "grammars can't express it")
            return [rest]

    def _without(self, node: Node, other: Node) -> list[Node]:
        """Schemas of what fulfils ``node``, which is opened, and not ``other``."""
        other = self.opened(other)
        if not self._may_meet(node, other):
            return [node]
        found = [one for one in self._negator.without(node, other) if self._possible(one)]
        if len(found) > MAX_BRANCHES:
            raise NoNegationError
        return found

    def _may_meet(self, one: Node, other: Node) -> bool:
        """Whether a value may fulfil both; True if that can't be told."""
        patterns = [n.words["pattern"] for n in (one, other) if "pattern" in n.words]
        if len(patterns) == 2 and kinds_of(one) == ("string",) and apart(patterns):
            return False
        try:
            return self._possible(merged(one, other))
        except Contradiction:
            return False
        except Unmergeable:
            return True

    def _possible(self, node: Node, depth: int = 0) -> bool:
        """Whether a value may fulfil the schema; True if that can't be told."""
        node = self.opened(node)
        if node.false:
            return False
        if "enum" in node.words:
            rest = node.without("enum").words
            return any(fits(value, rest) is not False for value in node.words["enum"])
        try:
            wanted = _needed(node) if depth <= MAX_DEPTH else []
        except Unmergeable:
            return True
        return all(part is None or self._possible(part, depth + 1) for part in wanted)

    def _unique(self, node: Node) -> list[Node]:
        """Every sequence of an array of few values, and what is no array."""
        rest, values = node.without("uniqueItems"), self._few_values(node)
        if values is None:
            self.refuse("uniqueItems", node.places["uniqueItems"], "grammars can't express it")
            return [rest]
        place = node.places["uniqueItems"]
        others = [kind for kind in kinds_of(node) or ("array",) if kind != "array"]
        found = [rest.having("type", others, place)] if others else []
        for count in range(len(values) + 1):
            for sequence in itertools.permutations(values, count):
                words = {
                    "type": "array",
                    "prefixItems": [{"enum": [value]} for value in sequence],
                    "items": False,
                    "minItems": count,
                }
                found += self._joined(rest, Node(words, dict.fromkeys(words, place)))
        return found

    def _few_values(self, node: Node) -> list[Any] | None:
        """All values that an item can have; None if they are many, or items differ."""
        items = node.part("items")
        if items is None or "prefixItems" in node.words:
            return None
        core = self.schema(self.opened(items))
        known = {"boolean": [False, True], "null": [None]}
        values = core.get("enum", known.get(core.get("type", "")))
        if values is None or len(values) > MAX_UNIQUE:
            return None
        return [v for i, v in enumerate(values) if not any(json_equal(v, o) for o in values[:i])]

    def _enum(self, node: Node) -> Core:
        beside = node.without("enum")
        kept = []
        for value in node.words["enum"]:
            verdict = fits(value, beside.words)
            if verdict is None:
                self.refuse(
                    "enum",
                    node.places["enum"],
                    "whether its values fulfil what is beside it can't be told",
                )
            if verdict is not False:
                kept.append(value)
        if _has_long_integer(kept):
            self.refuse("enum", node.places["enum"], "an integer in it takes more than 64 bits")
        return {"enum": kept}


def _check_circles(defs: Mapping[str, Any]) -> None:
    """Raise if a reference leads back to itself and to nothing else."""
    for name in defs:
        seen = [name]
        while set(defs[seen[-1]]) == {"$ref"}:
            seen.append(defs[seen[-1]]["$ref"].rpartition("/")[2])
            if seen[-1] in seen[:-1]:
                raise ValueError("the schema's references go round in circles")


def _any_of(cores: list[Core]) -> Core:
    """``anyOf`` without what nothing fulfils, and without itself inside."""
    flat = [one for core in cores for one in (core["anyOf"] if set(core) == {"anyOf"} else [core])]
    written = {json.dumps(core): core for core in flat if core != NOTHING}  # 1 is not true here
    possible = list(written.values())
    if not possible:
        return NOTHING
    return possible[0] if len(possible) == 1 else {"anyOf": possible}


def _implied(node: Node) -> tuple[str, ...] | None:
    """Types whose keywords a schema without ``type`` has."""
    spoken_of = {KIND_OF.get(word) for word in node.words}
    return (
        tuple(kind for kind in ("number", "string", "array", "object") if kind in spoken_of) or None
    )


def _has_long_integer(value: Any) -> bool:
    """Whether an integer is in it that xgrammar would round."""
    if isinstance(value, list | tuple | Mapping):
        inner = value.values() if isinstance(value, Mapping) else value
        return any(map(_has_long_integer, inner))
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _needed(node: Node) -> list[Node | None]:
    """Schemas of the properties or items that a value can't do without."""
    kinds = kinds_of(node)
    if kinds == ("object",):
        return [node.property(name) for name in node.words.get("required", ())]
    if kinds == ("array",):
        prefix, count = node.parts("prefixItems"), int(node.words.get("minItems", 0))
        return [*prefix, node.part("items")][:count]
    return []


def _says_nothing(keyword: str, node: Node) -> bool:
    words, kinds = node.words, kinds_of(node)
    value, kind = words[keyword], KIND_OF.get(keyword)
    if kind is not None and kinds is not None and kind not in kinds:
        return True
    if keyword == "uniqueItems":
        return value is False or "enum" in words or words.get("maxItems", 2) <= 1
    if keyword == "contains":
        return words.get("minContains") == 0 and "maxContains" not in words
    return False
