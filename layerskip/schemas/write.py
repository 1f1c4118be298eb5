"""Schemas of one type, in the keywords that a grammar is made from."""

import json
import math
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from layerskip.schemas.automata import apart, matches
from layerskip.schemas.formats import FORMATS, UNCHECKED_FORMATS
from layerskip.schemas.merge import Node, Unmergeable, merged
from layerskip.schemas.negate import OPPOSITE
from layerskip.schemas.patterns import string_pattern

Core = dict[str, Any]
NOTHING: Core = {"enum": []}
MAX_STEP, MAX_MULTIPLES = 1000, 1000
DECIMALS = 6  # that xgrammar writes of a number with bounds
COARSE = 2**33  # from here on a double's neighbours are further away than the last of them


class Writer:
    """Writes the core of schemas of one type.

    Args:
        schema: the core of any schema.
        refuse: told a keyword, its pointer, and why it can't be held to; raises, or lets the
            keyword be left out.
    """

    def __init__(
        self, schema: Callable[[Node], Core], refuse: Callable[[str, str, str], None]
    ) -> None:
        self._schema, self._refuse = schema, refuse

    def typed(self, node: Node, kind: str) -> Core:
        """The core of ``node`` for values of one type; ``NOTHING`` if there are none."""
        if kind in ("number", "integer"):
            return self._number(node, kind)
        writers = {"string": self._string, "array": self._array, "object": self._object}
        return writers[kind](node) if kind in writers else {"type": kind}

    def _string(self, node: Node) -> Core:
        words = node.words
        least, most = int(words.get("minLength", 0)), words.get("maxLength")
        pattern, name = words.get("pattern"), words.get("format")
        if most is not None and most < least:
            return NOTHING
        if name in UNCHECKED_FORMATS:
            self._refuse("format", node.places["format"], f"{name!r} has no expression")
        form = FORMATS.get(name) if isinstance(name, str) else None
        if form is not None and pattern is not None:
            self._refuse("pattern", node.places["pattern"], f"format {name!r} is beside it")
            form = None
        if form is None and pattern is None and not least and most is None:
            return {"type": "string"}
        try:
            text = string_pattern(
                form or pattern,
                whole=form is not None,
                least=least,
                most=math.inf if most is None else int(most),
            )
        except ValueError as error:
            keyword = next(w for w in ("pattern", "format", "maxLength", "minLength") if w in words)
            self._refuse(keyword, node.places[keyword], str(error))
            return {"type": "string"}
        return {"type": "string", "pattern": text}

    def _number(self, node: Node, kind: str) -> Core:
        core, bounds = Core(type=kind), self._bounds(node, kind)
        step = node.words.get("multipleOf")
        if step is not None:
            whole = kind == "integer" and Fraction(str(step)).denominator == 1
            if whole and step <= MAX_STEP:
                core |= {"multipleOf": int(step)} if step != 1 else {}
            else:
                self._refuse("multipleOf", node.places["multipleOf"], "it is no small integer")
        if kind == "integer":
            return self._whole_number(node, core, bounds)
        low, high = bounds.get("minimum"), bounds.get("maximum")
        below, above = bounds.get("exclusiveMinimum"), bounds.get("exclusiveMaximum")
        if below is not None and (low is None or below >= low):
            core["exclusiveMinimum"], low = below, below
        elif low is not None:
            core["minimum"] = low
        if above is not None and (high is None or above <= high):
            core["exclusiveMaximum"], high = above, above
        elif high is not None:
            core["maximum"] = high
        if low is None or high is None:
            return _coarse(core)
        closed = "minimum" in core and "maximum" in core
        if low > high or (low == high and not closed):
            return NOTHING
        core = _coarse(core)
        if not _has_short_number(core):
            word = next(iter(bounds))
            why = f"no number of at most {DECIMALS} decimals is within the bounds"
            self._refuse(word, node.places[word], why)
            return Core(type=kind)
        return core

    def _bounds(self, node: Node, kind: str) -> dict[str, Any]:
        """A number's bounds, as far as xgrammar reads them as they are written."""
        found = {word: node.words[word] for word in OPPOSITE if word in node.words}
        for word, bound in list(found.items()):
            if kind == "integer":
                fine = -(2**63) <= bound < 2**63
            else:
                fine = isinstance(bound, float) or (abs(bound) < 2**1000 and float(bound) == bound)
            if not fine:
                self._refuse(word, node.places[word], "the bound has too many digits")
                del found[word]
        return found

    def _whole_number(self, node: Node, core: Core, bounds: dict[str, Any]) -> Core:
        lows = [math.ceil(bounds["minimum"])] if "minimum" in bounds else []
        lows += [math.floor(bounds["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in bounds else []
        highs = [math.floor(bounds["maximum"])] if "maximum" in bounds else []
        highs += [math.ceil(bounds["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in bounds else []
        step = core.get("multipleOf", 1)
        if step != 1 and bounds:  # xgrammar drops a multipleOf beside bounds that are not close
            first, last = (
                (-(-max(lows) // step), min(highs) // step) if lows and highs else (0, math.inf)
            )
            if last - first < MAX_MULTIPLES:
                return {"enum": [n * step for n in range(first, int(last) + 1)]}
            why = f"beside bounds it takes a list, and at most {MAX_MULTIPLES} multiples get one"
            self._refuse("multipleOf", node.places["multipleOf"], why)
            del core["multipleOf"]
        core |= {"minimum": max(lows)} if lows else {}
        core |= {"maximum": min(highs)} if highs else {}
        return NOTHING if lows and highs and max(lows) > min(highs) else core

    def _array(self, node: Node) -> Core:
        least, most = int(node.words.get("minItems", 0)), node.words.get("maxItems")
        prefix = [self._schema(part) for part in node.parts("prefixItems")]
        if NOTHING in prefix:
            most = min(prefix.index(NOTHING), math.inf if most is None else most)
        rest = node.part("items")
        items = {} if rest is None else self._schema(rest)
        named = bool(prefix) and rest is None and least <= len(prefix)
        if items == NOTHING or named:  # what is not named is not written
            most = min(len(prefix), math.inf if most is None else most)
        if most is not None and most < least:
            return NOTHING
        if most == 0:
            return {"type": "array", "items": {}, "maxItems": 0}
        core: Core = {"type": "array"}
        if prefix:
            core["prefixItems"] = prefix if most is None else prefix[: int(most)]
        core["items"] = items if most is None or most > len(prefix) else False
        core |= {"minItems": least} if least else {}
        core |= {"maxItems": int(most)} if most is not None and core["items"] is not False else {}
        return core

    def _object(self, node: Node) -> Core:
        required = list(node.words.get("required", ()))
        names = list(dict.fromkeys([*node.words.get("properties", {}), *required]))
        wanted, only = node.part("propertyNames"), node.names is not None
        place = node.places.get("propertyNames", "")
        keys = self._schema(_text(wanted)) if wanted is not None else Core(type="string")
        if "enum" in keys and not only:
            names = list(dict.fromkeys([*names, *keys["enum"]]))
            only = True
        declared: Core = {}
        for name in names:
            part = node.property(name)
            core = {} if part is None else self._schema(part)
            if core != NOTHING and _allows(keys, name, place):
                declared[name] = core
            elif name in required:
                return NOTHING
        core = {"type": "object", "properties": declared, "required": required}
        core["additionalProperties"] = False
        pairs = {} if only else self._pairs(node, keys, names)
        return _with_others(core, pairs, *self._sizes(node, core, pairs))

    def _sizes(self, node: Node, core: Core, pairs: Core) -> tuple[int, int | None]:
        """Least and most properties."""
        least, most = int(node.words.get("minProperties", 0)), node.words.get("maxProperties")
        if pairs and least > max(1, len(core["required"])):
            self._refuse("minProperties", node.places["minProperties"], "a name may come twice")
            least = 1
        return least, None if most is None else int(most)

    def _pairs(self, node: Node, keys: Core, names: list[str]) -> Core:
        """Values of properties without a name, by what their names match; "" matches any."""
        patterns, wanted = node.pattern_parts(), node.part("propertyNames")
        if patterns:
            place = node.places["patternProperties"]
            if names or wanted is not None or not apart(list(patterns)):
                self._refuse("patternProperties", place, "a name may match several of its patterns")
            cores = {self._key(p, place): self._schema(part) for p, part in patterns.items()}
            return {key: core for key, core in cores.items() if core != NOTHING}
        free = node.part("additionalProperties")
        value = {} if free is None else self._schema(free)
        if value == NOTHING or keys == NOTHING:
            return {}
        if wanted is None and not names:
            return {"": value}
        place = node.places.get("propertyNames", node.places.get("additionalProperties", ""))
        taken = [name for name in names if _allows(keys, name, place)]
        if taken:  # a named one must not come again, in other words or spelt with an escape
            keys = self._schema(
                merged(_text(wanted), Node({"not": {"enum": taken}}, {"not": place}))
            )
        if set(keys) - {"type", "pattern"}:
            self._refuse("propertyNames", place, "it is no pattern and no list")
        return {keys.get("pattern", string_pattern(None)): value}

    def _key(self, pattern: str, place: str) -> str:
        try:
            return string_pattern(pattern)
        except ValueError as error:
            self._refuse("patternProperties", place, str(error))
            return string_pattern(None)


def _coarse(core: Core) -> Core:
    """The same, where decimals beside an exclusive bound are read as the bound itself: the next
    number that there is, inclusive."""
    for exclusive, inclusive, end in (
        ("exclusiveMinimum", "minimum", math.inf),
        ("exclusiveMaximum", "maximum", -math.inf),
    ):
        if COARSE <= abs(core.get(exclusive, 0)) < sys.float_info.max:
            core[inclusive] = math.nextafter(core.pop(exclusive), end)
    return core


def _has_short_number(core: Core) -> bool:
    """Whether a number with so few decimals as are written is within the bounds."""
    low = core["exclusiveMinimum" if "exclusiveMinimum" in core else "minimum"]
    high = core["exclusiveMaximum" if "exclusiveMaximum" in core else "maximum"]
    first, last = (Fraction(str(bound)) * 10**DECIMALS for bound in (low, high))
    least = math.floor(first) + 1 if "exclusiveMinimum" in core else math.ceil(first)
    return least < last if "exclusiveMaximum" in core else least <= last


def _with_others(core: Core, pairs: Core, least: int, most: int | None) -> Core:
    """An object with named properties, and with pairs behind them."""
    declared, required = core["properties"], core["required"]
    if most is not None and most < max(least, len(required)):
        return NOTHING
    if not pairs and least > len(declared):
        return NOTHING
    if most is not None and not pairs and most >= len(declared):
        most = None
    sizes = {"minProperties": least} if least > len(required) else {}
    sizes |= {"maxProperties": most} if most is not None else {}
    if declared:
        return core | ({"patternProperties": pairs} if pairs else {}) | sizes
    if not pairs:
        return {"type": "object", "maxProperties": 0, "properties": {}}
    if "" in pairs:
        return {"type": "object", "additionalProperties": pairs[""]} | sizes
    return {"type": "object", "patternProperties": pairs, "additionalProperties": False} | sizes


def _text(wanted: Node | None) -> Node:
    """What a name has to fulfil; it is text in any case."""
    text = Node({"type": "string"}, {"type": ""})
    # Merged when looked into: if nothing fulfils both, other types and {} still fulfil the schema.
    return text if wanted is None else Node({"allOf": [text, wanted]}, {"allOf": ""})


def _allows(keys: Core, name: str, place: str) -> bool:
    """Whether the core of names, which are those at ``place``, fits one.

    Raises:
        Unmergeable: that can't be told.
    """
    if "anyOf" in keys:
        return any(_allows(one, name, place) for one in keys["anyOf"])
    if "enum" in keys:
        return name in keys["enum"]
    if "pattern" in keys:
        verdict = matches(keys["pattern"], json.dumps(name, ensure_ascii=False)[1:-1])
        if verdict is None:
            raise Unmergeable("propertyNames", place)
        return verdict
    return keys.get("type", "string") == "string"
