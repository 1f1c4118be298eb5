"""JSON schemas in a form that a grammar can hold to; what can't be is refused, by name and place.

xgrammar compiles keywords that it then ignores (measured, 0.2.8: keywords without ``type``, beside
``$ref`` or ``anyOf``, ``oneOf``'s exclusivity, ``allOf``, ``not``, ``if``, ``contains``, ...). What
comes out of here is a core in which each schema is one of: anything, one type with that type's
keywords, ``enum``, ``anyOf`` alone, ``$ref`` alone.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from layerskip.schema_merge import Contradiction, Node, Unmergeable, kinds_of, merged
from layerskip.schema_patterns import FORMATS, UNCHECKED_FORMATS, string_pattern
from layerskip.schema_values import fits, json_equal

REFUSED = (
    "not", "if", "contains", "uniqueItems", "dependentRequired", "dependentSchemas",
    "dependencies", "$dynamicRef", "$recursiveRef", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
KEYWORDS_OF = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties",
    ),
}  # fmt: skip
ALL_TYPES = ("null", "boolean", "number", "string", "array", "object")
MAX_SCHEMAS = 20_000
NOTHING: dict[str, Any] = {"enum": []}


def checked_schema(schema: Any, *, strict: bool = True) -> str:
    """The core of a schema, as JSON.

    Exact rewrites: ``allOf`` merged, what stands beside ``anyOf`` and ``$ref`` merged into them,
    ``oneOf`` of branches that exclude each other as ``anyOf``, values of ``enum`` held against the
    keywords beside it, lengths, patterns and formats as one expression. A schema without a type
    takes that of its keywords.

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
        raise ValueError("the schema contradicts itself: no value fulfils it")
    return json.dumps({"$ref": f"#/$defs/{root}", "$defs": core.defs})


@dataclass(frozen=True)
class _Place:
    keyword: str
    pointer: str

    def __str__(self) -> str:
        return f"{self.keyword!r} at {self.pointer or '/'}"


class _Core:
    """One schema's rewriting; referenced schemas are written once, so recursion ends."""

    def __init__(self, root: Any, strict: bool) -> None:
        self.root, self.strict = root, strict
        self.defs: dict[str, Any] = {}
        self._names: dict[str, str] = {}
        self._anchors = _anchors(root)
        self._count = 0

    def ref(self, pointer: str) -> str:
        """Name of the definition that stands for the schema at ``pointer``."""
        if pointer not in self._names:
            name = self._names[pointer] = f"s{len(self._names)}"
            self.defs[name] = {}  # while it is being written
            self.defs[name] = self.schema(Node.of(self.at(pointer), pointer))
        return self._names[pointer]

    def at(self, pointer: str) -> Any:
        found = self.root
        for part in pointer.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, IndexError, ValueError, TypeError):
                raise ValueError(f"the schema has nothing at $ref '#{pointer}'") from None
        return found

    def target(self, reference: Any, pointer: str) -> str:
        """The pointer that a ``$ref`` means."""
        if isinstance(reference, str):
            if reference in ("#", "#/"):
                return ""
            if reference.startswith("#/"):
                return reference[1:]
            if reference in self._anchors:
                return self._anchors[reference]
        raise ValueError(
            f"the schema's $ref {reference!r} at {pointer or '/'} leads out of it; put what it "
            "means under $defs"
        )

    def refuse(self, place: _Place, why: str) -> None:
        if self.strict:
            raise ValueError(
                f"the schema's {place} can't be held to while decoding: {why}; change it, or "
                "allow invalid output with strict=False"
            )

    def schema(self, node: Node) -> dict[str, Any]:
        """The core of a schema."""
        self._count += 1
        if self._count > MAX_SCHEMAS:
            raise ValueError(f"the schema has more than {MAX_SCHEMAS} parts once written out")
        if node.false:
            return NOTHING
        try:
            return self._schema(node)
        except Contradiction:
            return NOTHING

    def _merged(self, one: Node, other: Node) -> Node:
        try:
            return merged(one, other)
        except Unmergeable as error:
            self.refuse(_Place(error.keyword, error.pointer), "it can't be merged with its like")
            return self._merged(one, other.without(error.keyword))

    def _schema(self, node: Node) -> dict[str, Any]:
        words = node.words
        if "$ref" in words:
            return self._reference(node)
        if "allOf" in words:
            return self.schema(self._and(node.without("allOf"), node, "allOf"))
        for keyword in ("anyOf", "oneOf"):
            if keyword in words:
                return self._any(node, keyword)
        for keyword in REFUSED:
            if keyword in words and not _says_nothing(keyword, words):
                node = self._without(node, keyword)
        if node.false:
            return NOTHING
        if "enum" in node.words:
            return self._enum(node)
        kinds = kinds_of(node) or self._implied(node)
        if kinds is None:
            return {}
        return _any_of([self._typed(node, kind) for kind in kinds])

    def _reference(self, node: Node) -> dict[str, Any]:
        pointer = self.target(node.words["$ref"], node.places["$ref"])
        beside = node.without("$ref")
        if not beside.says_something:
            return {"$ref": f"#/$defs/{self.ref(pointer)}"}
        if pointer in node.through:
            self.refuse(_Place("$ref", node.places["$ref"]), "it repeats itself beside keywords")
            return self.schema(beside)
        target = Node.of(self.at(pointer), pointer, (*node.through, pointer))
        return self.schema(self._merged(beside, target))

    def _and(self, rest: Node, node: Node, keyword: str) -> Node:
        for part in node.parts(keyword):
            rest = self._merged(rest, self._opened(part))
        return rest

    def _opened(self, node: Node) -> Node:
        """A branch with its reference followed, so that it can be merged."""
        while set(node.words) & {"$ref"}:
            pointer = self.target(node.words["$ref"], node.places["$ref"])
            if pointer in node.through:
                self.refuse(_Place("$ref", node.places["$ref"]), "it repeats itself")
                return node.without("$ref")
            target = Node.of(self.at(pointer), pointer, (*node.through, pointer))
            node = self._merged(node.without("$ref"), target)
        return node

    def _any(self, node: Node, keyword: str) -> dict[str, Any]:
        rest = node.without(keyword)
        parts = node.parts(keyword)
        if not rest.says_something and keyword == "anyOf":
            return _any_of([self.schema(part) for part in parts])
        branches = [self._merged(rest, self._opened(part)) for part in parts]
        if keyword == "oneOf":
            branches = self._exclusive(node, [self._opened(part) for part in parts], branches)
        return _any_of([self.schema(branch) for branch in branches])

    def _exclusive(self, node: Node, parts: list[Node], branches: list[Node]) -> list[Node]:
        """``oneOf``'s branches, none of which fits a value that another fits."""
        alone = [_needs_only(part) for part in parts]
        if len(parts) > 1 and all(alone) and _closed(branches[0]):
            # Each asks for one property: it is that one and none of the others'.
            return [
                branch.forbidding({n for n in alone if n is not None} - {own})
                for branch, own in zip(branches, alone, strict=True)
            ]
        for i, one in enumerate(branches):
            for j, other in enumerate(branches[:i]):
                if not self._disjoint(one, other):
                    place = _Place("oneOf", node.places["oneOf"])
                    self.refuse(place, f"a value may fit its branches {j} and {i} at once")
        return branches

    def _disjoint(self, one: Node, other: Node, depth: int = 0) -> bool:
        try:
            both = merged(one, other)
        except Contradiction:
            return True
        except Unmergeable:
            return False
        if both.false or both.words.get("enum") == [] or kinds_of(both) == ():
            return True
        if "enum" in both.words:
            return not any(fits(v, both.words) is not False for v in both.words["enum"])
        if (kinds_of(both) or self._implied(both)) != ("object",) or depth > 2:
            return False
        for name in both.words.get("required", ()):
            parts = [self._opened(p) for n in (one, other) if (p := n.property(name)) is not None]
            if len(parts) == 2 and self._disjoint(parts[0], parts[1], depth + 1):
                return True
            if any(part.false for part in parts):
                return True
        return False

    def _without(self, node: Node, keyword: str) -> Node:
        kept = _rewritten(node, keyword)
        if kept is not None:
            return kept
        self.refuse(_Place(keyword, node.places[keyword]), "grammars can't express it")
        return node.without(keyword)

    def _enum(self, node: Node) -> dict[str, Any]:
        beside = node.without("enum")
        kept = []
        for value in node.words["enum"]:
            verdict = fits(value, beside.words)
            if verdict is None:
                self.refuse(_Place("enum", node.places["enum"]), "keywords beside it are too many")
            if verdict is not False:
                kept.append(value)
        return {"enum": kept}

    def _implied(self, node: Node) -> tuple[str, ...] | None:
        """Types whose keywords a schema without ``type`` has."""
        kinds = tuple(k for k, words in KEYWORDS_OF.items() if any(w in node.words for w in words))
        return kinds or None

    def _typed(self, node: Node, kind: str) -> dict[str, Any]:
        writers: dict[str, Callable[[Node], dict[str, Any]]] = {
            "string": self._string,
            "array": self._array,
            "object": self._object,
        }
        if kind in ("number", "integer"):
            return self._number(node, kind)
        return writers[kind](node) if kind in writers else {"type": kind}

    def _string(self, node: Node) -> dict[str, Any]:
        words = node.words
        least, most = int(words.get("minLength", 0)), words.get("maxLength")
        pattern, name = words.get("pattern"), words.get("format")
        if name in UNCHECKED_FORMATS:
            self.refuse(_Place("format", node.places["format"]), f"{name!r} has no expression")
        form = FORMATS.get(name) if isinstance(name, str) else None
        if form is not None and pattern is not None:
            self.refuse(_Place("pattern", node.places["pattern"]), f"format {name!r} is beside it")
            form = None
        if form is None and pattern is None and not least and most is None:
            return {"type": "string"}
        try:
            text = string_pattern(
                form or pattern,
                whole=form is not None,
                least=least,
                most=None if most is None else int(most),
            )
        except ValueError as error:
            keyword = next(w for w in ("pattern", "format", "maxLength", "minLength") if w in words)
            self.refuse(_Place(keyword, node.places[keyword]), str(error))
            return {"type": "string"}
        return {"type": "string", "pattern": text}

    def _number(self, node: Node, kind: str) -> dict[str, Any]:
        words, core = node.words, dict[str, Any](type=kind)
        step = words.get("multipleOf")
        if step is not None:
            whole = kind == "integer" and Fraction(str(step)).denominator == 1
            if whole and step <= 1000:
                core |= {"multipleOf": int(step)} if step != 1 else {}
            else:
                self.refuse(_Place("multipleOf", node.places["multipleOf"]), "it is no small int")
        low, high = words.get("minimum"), words.get("maximum")
        below, above = words.get("exclusiveMinimum"), words.get("exclusiveMaximum")
        if kind == "integer":
            lows = [math.ceil(low)] if low is not None else []
            lows += [math.floor(below) + 1] if below is not None else []
            highs = [math.floor(high)] if high is not None else []
            highs += [math.ceil(above) - 1] if above is not None else []
            core |= {"minimum": max(lows)} if lows else {}
            core |= {"maximum": min(highs)} if highs else {}
            if lows and highs and max(lows) > min(highs):
                return NOTHING
            return core
        if below is not None and (low is None or below >= low):
            core["exclusiveMinimum"] = below
        elif low is not None:
            core["minimum"] = low
        if above is not None and (high is None or above <= high):
            core["exclusiveMaximum"] = above
        elif high is not None:
            core["maximum"] = high
        return core

    def _array(self, node: Node) -> dict[str, Any]:
        least, most = int(node.words.get("minItems", 0)), node.words.get("maxItems")
        prefix = [self.schema(part) for part in node.parts("prefixItems")]
        if NOTHING in prefix:
            most = min(prefix.index(NOTHING), math.inf if most is None else most)
        rest = node.part("items")
        items = {} if rest is None else self.schema(rest)
        if items == NOTHING or (prefix and rest is None):  # what is not named is not written
            most = min(len(prefix), math.inf if most is None else most)
        if most is not None and most < least:
            return NOTHING
        core: dict[str, Any] = {"type": "array"}
        if prefix:
            core["prefixItems"] = prefix if most is None else prefix[: int(most)]
        core["items"] = items if most is None or most > len(prefix) else False
        core |= {"minItems": least} if least else {}
        core |= {"maxItems": int(most)} if most is not None and core["items"] is not False else {}
        if most == 0:
            return {"type": "array", "items": {}, "maxItems": 0}
        return core

    def _object(self, node: Node) -> dict[str, Any]:
        required = list(node.words.get("required", ()))
        names = dict.fromkeys([*node.words.get("properties", {}), *required])
        allowed = node.part("propertyNames")
        if allowed is not None and names:
            for name in [n for n in names if fits(n, allowed.words) is not True]:
                if fits(name, allowed.words) is None:
                    place = _Place("propertyNames", node.places["propertyNames"])
                    self.refuse(place, "it is too much to be held against the named ones")
                elif name in required:
                    return NOTHING
                else:
                    del names[name]
        declared = {}
        for name in names:
            part = node.property(name)
            core = {} if part is None else self.schema(part)
            if core != NOTHING:
                declared[name] = core
            elif name in required:
                return NOTHING
        core = {"type": "object", "properties": declared, "required": required}
        return self._others(node, core, allowed)

    def _others(self, node: Node, core: dict[str, Any], names: Node | None) -> dict[str, Any]:
        """Adds what holds for properties without a name: they are written if none has one."""
        words, declared = node.words, core["properties"]
        least, most = int(words.get("minProperties", 0)), words.get("maxProperties")
        closed = bool(words.get("properties") or declared)
        free = node.part("additionalProperties")
        if free is not None and free.says_something and not free.false and closed:
            place = _Place("additionalProperties", node.places["additionalProperties"])
            self.refuse(place, "a named property could be written again with an escape in it")
        core["additionalProperties"] = False
        patterns = node.pattern_parts()
        if closed or (free is not None and free.false and not patterns):
            if (most is not None and most < len(core["required"])) or least > len(declared):
                return NOTHING
            core |= {"minProperties": least} if least > len(core["required"]) else {}
            core |= (
                {"maxProperties": int(most)} if most is not None and most < len(declared) else {}
            )
            return core if declared else {"type": "object", "maxProperties": 0, "properties": {}}
        if least > 1:
            place = _Place("minProperties", node.places["minProperties"])
            self.refuse(place, "a name could be written twice")
        sizes = {"minProperties": 1} if least else {}
        sizes |= {"maxProperties": int(most)} if most is not None else {}
        if patterns:
            if len(patterns) > 1 or names is not None:
                place = _Place("patternProperties", node.places["patternProperties"])
                self.refuse(place, "a name may match several patterns")
            ((pattern, part),) = list(patterns.items())[:1]
            value = self.schema(part)
            key = self._names_pattern(
                pattern, _Place("patternProperties", node.places["patternProperties"])
            )
            return {
                "type": "object",
                "patternProperties": {key: value},
                "additionalProperties": False,
                **sizes,
            }
        value = {} if free is None else self.schema(free)
        if names is None:
            return {"type": "object", "additionalProperties": value, **sizes}
        written = self.schema(names)
        place = _Place("propertyNames", node.places["propertyNames"])
        if "enum" in written:
            listed = {n: value for n in written["enum"] if isinstance(n, str)}
            return {"type": "object", "properties": listed, "additionalProperties": False, **sizes}
        if set(written) - {"type", "pattern"}:
            self.refuse(place, "it is no pattern and no list")
        key = written.get("pattern", string_pattern(None))
        return {
            "type": "object",
            "patternProperties": {key: value},
            "additionalProperties": False,
            **sizes,
        }

    def _names_pattern(self, pattern: str, place: _Place) -> str:
        try:
            return string_pattern(pattern)
        except ValueError as error:
            self.refuse(place, str(error))
            return string_pattern(None)


def _check_circles(defs: Mapping[str, Any]) -> None:
    """Raise if a reference leads back to itself and to nothing else."""
    for name in defs:
        seen = [name]
        while set(defs[seen[-1]]) == {"$ref"}:
            seen.append(defs[seen[-1]]["$ref"].rpartition("/")[2])
            if seen[-1] in seen[:-1]:
                raise ValueError("the schema's references go round in circles")


def _any_of(cores: list[dict[str, Any]]) -> dict[str, Any]:
    """``anyOf`` without what nothing fulfils, and without itself inside."""
    flat = [one for core in cores for one in (core["anyOf"] if set(core) == {"anyOf"} else [core])]
    possible = [core for i, core in enumerate(flat) if core != NOTHING and core not in flat[:i]]
    if not possible:
        return NOTHING
    return possible[0] if len(possible) == 1 else {"anyOf": possible}


def _says_nothing(keyword: str, words: Mapping[str, Any]) -> bool:
    value = words[keyword]
    if keyword == "uniqueItems":
        return value is False or words.get("maxItems", 2) <= 1
    if keyword == "contains":
        return words.get("minContains") == 0 and "maxContains" not in words
    if keyword == "if":
        return words.get("then", True) is True and words.get("else", True) is True
    if keyword.startswith("unevaluated"):
        # What has no name is not written anyhow, but where nothing has one.
        named = "properties" if keyword.endswith("Properties") else "prefixItems"
        return value is True or named in words
    return keyword.startswith("depend") and not value


def _needs_only(part: Node) -> str | None:
    """The property that a branch asks for, if it says nothing else."""
    needed = part.words.get("required", ())
    alone = not part.without("required").says_something
    return needed[0] if alone and len(needed) == 1 else None


def _closed(node: Node) -> bool:
    return bool(node.words.get("properties")) and kinds_of(node) in (None, ("object",))


def _rewritten(node: Node, keyword: str) -> Node | None:
    """The schema without a keyword, saying the same otherwise; None if it can't."""
    if keyword != "not":
        return None
    part = node.part("not")
    assert part is not None
    rest = node.without("not")
    if not part.says_something and not part.false:
        return Node.of(False, node.places["not"])
    if part.false:
        return rest
    if set(part.words) == {"type"}:
        named = kinds_of(part) or ()
        kinds = kinds_of(rest) or ALL_TYPES
        if "number" in kinds and named == ("integer",):
            return None
        kept = [k for k in kinds if k not in named and not (k == "integer" and "number" in named)]
        if not kept:
            return Node.of(False, node.places["not"])
        return rest.having("type", kept, node.places["not"])
    if set(part.words) == {"enum"} and "enum" in rest.words:
        kept = [
            v for v in rest.words["enum"] if not any(json_equal(v, o) for o in part.words["enum"])
        ]
        return rest.having("enum", kept, node.places["not"])
    needed = _needs_only(part)
    if needed is not None and _closed(rest):
        return rest.forbidding({needed})
    return None


def _anchors(root: Any) -> dict[str, str]:
    """Pointers of what has an anchor or an absolute name."""
    found: dict[str, str] = {}
    stack: list[tuple[Any, str]] = [(root, "")]
    while stack:
        value, pointer = stack.pop()
        if isinstance(value, Mapping):
            for word, prefix in (("$anchor", "#"), ("$id", ""), ("id", "")):
                if isinstance(value.get(word), str):
                    found.setdefault(prefix + value[word].removesuffix("#"), pointer)
                    found.setdefault(prefix + value[word], pointer)
            for key, inner in value.items():
                part = str(key).replace("~", "~0").replace("/", "~1").replace("%", "%25")
                stack.append((inner, f"{pointer}/{part}"))
        elif isinstance(value, list):
            stack += [(inner, f"{pointer}/{i}") for i, inner in enumerate(value)]
    return found
