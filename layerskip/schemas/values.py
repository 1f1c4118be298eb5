"""JSON values held against a schema's simpler keywords, as validators do."""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from layerskip.schemas.automata import matches
from layerskip.schemas.formats import FORMATS

NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
SIZES = {"Length": str, "Items": list, "Properties": dict}


def json_equal(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(json_equal(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(json_equal, one, other))
    return bool(one == other)


def type_of(value: Any) -> str:
    """Its JSON type; "integer" of a number without a fraction."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    names = {float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def fits(value: Any, words: Mapping[str, Any]) -> bool | None:
    """Whether a value fulfils keywords; None if one of them is beyond this function."""
    unknown = False
    for keyword in words:
        verdict = _fits(value, keyword, words[keyword])
        if verdict is False:
            return False
        unknown |= verdict is None
    return None if unknown else True


def _fits(value: Any, keyword: str, wanted: Any) -> bool | None:
    kind = type_of(value)
    if keyword == "type":
        return kind in wanted or (kind == "integer" and "number" in wanted)
    if keyword == "enum":
        return any(json_equal(value, other) for other in wanted)
    if keyword in NUMBERS:
        return kind not in ("integer", "number") or _in_bounds(value, keyword, wanted)
    for name, of in SIZES.items():
        if keyword in (f"min{name}", f"max{name}"):
            if not isinstance(value, of):
                return True
            return len(value) >= wanted if keyword.startswith("min") else len(value) <= wanted
    if keyword == "required":
        return not isinstance(value, dict) or all(name in value for name in wanted)
    if keyword == "pattern":
        return not isinstance(value, str) or matches(wanted, value)
    if keyword == "format":
        known = isinstance(value, str) and wanted in FORMATS
        return True if not known or re.fullmatch(FORMATS[wanted], value) else None
    about_others = {"properties": "object", "additionalProperties": "object", "items": "array"}
    return True if keyword in about_others and kind != about_others[keyword] else None


def _in_bounds(value: Any, keyword: str, bound: Any) -> bool:
    number, limit = Fraction(str(value)), Fraction(str(bound))
    if keyword == "multipleOf":
        return (number / limit).denominator == 1
    if keyword.startswith("exclusive"):
        return number > limit if keyword.endswith("Minimum") else number < limit
    return number >= limit if keyword == "minimum" else number <= limit
