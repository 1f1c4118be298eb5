"""What fulfils one schema and not another, as schemas: for ``not``, ``oneOf`` and ``if``."""

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from layerskip.schemas.automata import any_but, matches
from layerskip.schemas.merge import Contradiction, Node, Unmergeable, kinds_of, merged
from layerskip.schemas.values import fits

ALL_TYPES = ("null", "boolean", "number", "string", "array", "object")
KIND_OF = {
    word: kind
    for kind, words in {
        "number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
        "string": "minLength maxLength pattern format",
        "array": "items prefixItems minItems maxItems uniqueItems contains unevaluatedItems",
        "object": "properties required additionalProperties patternProperties propertyNames "
        "minProperties maxProperties unevaluatedProperties",
    }.items()
    for word in words.split()
}
OPPOSITE = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
MAX_DEPTH = 6
MAX_PIECES = 200


class NoNegationError(Exception):
    """No schemas say what does not fulfil this one."""


class Negator:
    """Takes schemas away from others.

    Args:
        opened: a schema with its references followed and its ``allOf`` merged.
    """

    def __init__(self, opened: Callable[[Node], Node]) -> None:
        self._opened = opened

    def without(self, node: Node, other: Node) -> list[Node]:
        """Schemas, one of which at least every value fulfils that fulfils ``node`` and not
        ``other``, and no other value. Both are opened. An object that names properties gets no
        others, as everywhere.

        Raises:
            NoNegationError: there are none, or too many.
        """
        try:
            return _products([[node], self._negated(other, node, 0)])
        except Unmergeable:
            raise NoNegationError from None

    def _negated(self, node: Node, within: Node, depth: int) -> list[Node]:
        """Schemas of what does not fulfil ``node``, as far as it fulfils ``within``."""
        if depth > MAX_DEPTH:
            raise NoNegationError
        if node.false:
            return [Node({}, {})]
        listed = _among_listed(node, within)
        if listed is not None:
            return [listed]
        kinds = kinds_of(within) or ALL_TYPES
        pieces: list[Node] = []
        for word in node.words:
            kind = KIND_OF.get(word)
            if kind is None or kind in kinds or (kind == "number" and "integer" in kinds):
                pieces += self._failing(node, word, within, depth)
        if len(pieces) > MAX_PIECES:
            raise NoNegationError
        return pieces

    def _failing(self, node: Node, word: str, within: Node, depth: int) -> list[Node]:
        """Schemas of what fails one of the keywords."""
        value, place = node.words[word], node.places[word]
        kinds = kinds_of(within) or ALL_TYPES
        if word == "type":
            return _of_other_types(node, kinds, place)
        if word == "enum":
            return _other_values(value, kinds, place)
        if word in OPPOSITE:
            return [_piece(place, "number", **{OPPOSITE[word]: value})]
        if word in ("minLength", "minItems", "minProperties"):
            most = {f"max{word[3:]}": value - 1}
            return [_piece(place, KIND_OF[word], **most)] if value > 0 else []
        if word in ("maxLength", "maxItems", "maxProperties"):
            return [_piece(place, KIND_OF[word], **{f"min{word[3:]}": value + 1})]
        if word in ("required", "properties", *ABOUT_OTHERS):
            return self._failing_properties(node, word, within, depth)
        return self._failing_schemas(node, word, within, depth)

    def _failing_schemas(self, node: Node, word: str, within: Node, depth: int) -> list[Node]:
        """The same of keywords that hold schemas about the value itself."""
        if word == "not":
            part = node.part(word)
            return [self._opened(part)] if part is not None else []
        if word in ("anyOf", "oneOf"):
            parts = [self._opened(part) for part in node.parts(word)]
            none = _products([self._negated(part, within, depth + 1) for part in parts])
            pairs = itertools.combinations(parts, 2) if word == "oneOf" else ()
            return none + [both for pair in pairs for both in _products([[p] for p in pair])]
        part = node.part(word) if word == "items" else None
        if part is not None and part.false and "prefixItems" not in node.words:
            return [_piece(node.places[word], "array", minItems=1)]
        if part is not None and not part.says_something:
            return []
        raise NoNegationError

    def _failing_properties(self, node: Node, word: str, within: Node, depth: int) -> list[Node]:
        """The same of keywords about an object's properties."""
        place, names = node.places[word], within.names
        if names is None and (word in ABOUT_OTHERS or not within.keeps_others):
            raise NoNegationError
        if word == "required":
            wanted = node.words[word]
            return [_piece(place, "object", properties={name: False}) for name in wanted]
        if word == "propertyNames":
            return self._failing_names(node, names or frozenset())
        pieces = []
        for name in _named_by(node, word, names):
            part, inside = node.property(name), within.property(name)
            if part is None:
                continue
            part, inside = self._opened(part), self._opened(inside or Node({}, {}))
            pieces += [
                _piece(place, "object", properties={name: wrong}, required=[name])
                for wrong in self._negated(part, inside, depth + 1)
            ]
        return pieces

    def _failing_names(self, node: Node, names: frozenset[str]) -> list[Node]:
        part = node.part("propertyNames")
        assert part is not None
        part = self._opened(part)
        verdicts = {name: not part.false and fits(name, part.words) for name in sorted(names)}
        if None in verdicts.values():
            raise NoNegationError
        bad = [name for name, verdict in verdicts.items() if not verdict]
        return [_piece(node.places["propertyNames"], "object", required=[name]) for name in bad]


ABOUT_OTHERS = ("additionalProperties", "patternProperties", "propertyNames")


def _named_by(node: Node, word: str, names: frozenset[str] | None) -> list[str]:
    """The properties that a keyword speaks of, as far as they may be written."""
    own = node.words.get("properties", {})
    if word == "properties":
        return [name for name in own if names is None or name in names]
    patterns = node.words.get("patternProperties", {})
    verdicts = {name: [matches(pattern, name) for pattern in patterns] for name in names or ()}
    if any(None in each for each in verdicts.values()):
        raise NoNegationError
    matching = {name for name, each in verdicts.items() if any(each)}
    chosen = matching - set(own) if word == "patternProperties" else set(names or ()) - matching
    return sorted(chosen - set(own))


def _among_listed(node: Node, within: Node) -> Node | None:
    """Listed values that don't fulfil ``node``; None if there is no list, or it can't be told."""
    if "enum" not in within.words:
        return None
    verdicts = [fits(value, node.words) for value in within.words["enum"]]
    if None in verdicts:
        return None
    pairs = zip(within.words["enum"], verdicts, strict=True)
    wrong = [value for value, verdict in pairs if not verdict]
    return Node({"enum": wrong}, {"enum": within.places["enum"]})


def _of_other_types(node: Node, kinds: tuple[str, ...], place: str) -> list[Node]:
    named = kinds_of(node) or ()
    if "integer" in named and "number" in kinds:
        raise NoNegationError
    others = [k for k in kinds if k not in named and not (k == "integer" and "number" in named)]
    return [Node({"type": others}, {"type": place})] if others else []


def _other_values(values: list[Any], kinds: tuple[str, ...], place: str) -> list[Node]:
    """Schemas of what is none of the values."""
    if any(isinstance(v, dict | list) for v in values) and {"array", "object"} & set(kinds):
        raise NoNegationError
    pieces = [_piece(place, kind) for kind in kinds if kind in ("array", "object")]
    if "null" in kinds and None not in values:
        pieces.append(_piece(place, "null"))
    if "boolean" in kinds:
        kept = [one for one in (False, True) if not any(v is one for v in values)]
        pieces.append(Node({"enum": kept}, {"enum": place}))
    if "string" in kinds:
        texts = [v for v in values if isinstance(v, str)]
        pieces.append(_piece(place, "string", **({"pattern": any_but(texts)} if texts else {})))
    if {"number", "integer"} & set(kinds):
        known = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        ends = [None, *sorted(known, key=lambda v: Fraction(str(v))), None]
        for low, high in itertools.pairwise(ends):
            bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
            pieces.append(
                _piece(place, "number", **{w: v for w, v in bounds.items() if v is not None})
            )
    return pieces


def _products(options: list[list[Node]]) -> list[Node]:
    """What fulfils one schema of each list."""
    found = [Node({}, {})]
    for option in options:
        pairs = list(itertools.product(found, option))
        if len(pairs) > MAX_PIECES:
            raise NoNegationError
        found = [both for one, other in pairs for both in _both(one, other)]
    return found


def _both(one: Node, other: Node) -> list[Node]:
    try:
        return [merged(one, other)]
    except Contradiction:
        return []
    except Unmergeable:
        raise NoNegationError from None


def _piece(place: str, kind: str, **words: Any) -> Node:
    words = {"type": kind} | words
    return Node(words, dict.fromkeys(words, place))
