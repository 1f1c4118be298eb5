"""Regular expressions of JSON schemas, as expressions over the text between the quotes.

Schemas mean ECMA-262's dialect and search for a match anywhere; validators in Python use ``re``.
What comes out holds in both: where they differ (``\\d``, ``\\W``, ...), by leaving characters out.
"""

import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

Ranges = tuple[tuple[int, int], ...]
LAST = 0x10FFFF
DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Ranges = (
    (9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000),
)  # fmt: skip
CLASSES = {"d": DIGIT, "w": WORD, "s": SPACE}
CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
LINE_ENDS: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
SHORT_ESCAPES = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 0x22: '"', 0x5C: "\\"}
RAW: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, LAST))
QUANTIFIER = re.compile(r"\*|\+|\?|\{(\d+)(,?)(\d*)\}")
AGAIN = re.compile(r"[*+?]|\{,?\d")


@dataclass(frozen=True)
class Item:
    """A set of characters, or several sequences to choose from, repeated.

    Attributes:
        chars: ranges of code points; None for a group.
        options: of a group.
        least, most: repetitions; ``most`` is infinite where there is no end.
    """

    chars: Ranges | None
    options: "tuple[tuple[Item, ...], ...]" = ()
    least: int = 1
    most: float = 1

    @property
    def widths(self) -> tuple[int, float]:
        """Least and most characters."""
        low, high = (1, 1.0) if self.chars is not None else _widths_of(self.options)
        endless = math.inf in (high, self.most)  # 0 times infinity is no number
        return low * self.least, math.inf if endless else high * self.most


def _widths(items: "tuple[Item, ...]") -> tuple[int, float]:
    widths = [item.widths for item in items]
    return sum(low for low, _ in widths), sum(high for _, high in widths)


def _widths_of(options: "tuple[tuple[Item, ...], ...]") -> tuple[int, float]:
    widths = [_widths(option) for option in options]
    return min(low for low, _ in widths), max(high for _, high in widths)


LAST_LINE_END = Item(((10, 10),), least=0)  # "$" may stand before it
ANYTHING = Item(((0, 0xD7FF), (0xE000, LAST)), least=0, most=math.inf)


def string_pattern(
    pattern: str | None, *, whole: bool = False, least: int = 0, most: float = math.inf
) -> str:
    """An anchored expression for what stands between a JSON string's quotes.

    Args:
        pattern: of the schema; None allows any characters.
        whole: it matches from beginning to end, as ``FORMATS`` do, and not somewhere.
        least, most: characters.

    Raises:
        ValueError: why this can't be expressed.
    """
    if pattern is None:
        options: tuple[tuple[Item, ...], ...] = ((ANYTHING,),)
    else:
        options = _Parser(pattern).options(whole=whole)
    if least or most < math.inf:
        options = tuple(fitted for option in options for fitted in _fitted(option, least, most))
    if not options:
        raise ValueError("no text has that length")
    return f"^(?:{'|'.join(_written(option) for option in options)})$"


def options_of(pattern: str, *, widest: bool) -> tuple[tuple[Item, ...], ...]:
    """Alternatives that match what ``pattern`` matches somewhere in all dialects, and no more; or
    with ``widest`` whatever it does in any, and more.

    Raises:
        ValueError: why this can't be expressed.
    """
    return _Parser(pattern, widest=widest).options(whole=False)


def _fitted(option: tuple[Item, ...], least: int, most: float) -> Iterator[tuple[Item, ...]]:
    """The option as far as its texts have the right length; nothing if none has."""
    low, high = _widths(option)
    if high < least or low > most:
        return
    if low >= least and high <= most:
        yield option
        return
    free = [i for i, item in enumerate(option) if item.widths[0] != item.widths[1]]
    if len(free) != 1 or option[free[0]].chars is None:
        raise ValueError("which of its parts the length limits can't be told")
    item = option[free[0]]
    rest = low - item.least
    fitted = replace(item, least=max(item.least, least - rest), most=min(item.most, most - rest))
    yield (*option[: free[0]], fitted, *option[free[0] + 1 :])


def _written(items: tuple[Item, ...]) -> str:
    return "".join(_written_item(item) for item in items)


def _written_item(item: Item) -> str:
    if item.chars is None:
        text = f"(?:{'|'.join(_written(option) for option in item.options)})"
    else:
        text = _written_chars(item.chars)
    if (item.least, item.most) == (1, 1):
        return text
    most = "" if item.most == math.inf else str(int(item.most))
    return f"{text}{{{item.least},{most}}}"


def _written_chars(chars: Ranges) -> str:
    """Characters as they stand in JSON: some only after a backslash."""
    raw = [both for one in chars for other in RAW if (both := _common(one, other))]
    parts = [f"[{''.join(f'{escaped_char(a)}-{escaped_char(b)}' for a, b in raw)}]"] if raw else []
    special = [c for c in (*range(0x20), 0x22, 0x5C) if any(a <= c <= b for a, b in chars)]
    parts += _after_backslash(special)
    if not parts:
        raise ValueError("a set of characters is empty")
    return parts[0] if len(parts) == 1 and raw else f"(?:{'|'.join(parts)})"


def _after_backslash(codes: Sequence[int]) -> list[str]:
    short = [SHORT_ESCAPES[c].replace("\\", "\\\\") for c in codes if c in SHORT_ESCAPES]
    found = ["\\\\" + (short[0] if len(short) == 1 else f"[{''.join(short)}]")] if short else []
    for high in (0, 1):
        low = [f"{c:x}"[-1] for c in codes if c not in SHORT_ESCAPES and c >> 4 == high]
        found += [f"\\\\u00{high}[{''.join(low)}]"] if low else []
    return found


def _common(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int] | None:
    low, high = max(one[0], other[0]), min(one[1], other[1])
    return (low, high) if low <= high else None


def escaped_char(code: int) -> str:
    """A code point as a member of a set."""
    return f"\\u{code:04x}" if code <= 0xFFFF else chr(code)


def _count(digits: str) -> float:
    """Of repetitions; no text is so long that what no float counts is not without end."""
    return int(digits) if len(digits.lstrip("0")) <= sys.float_info.dig else math.inf


class _Parser:
    """ECMA-262 expressions, without what can't be expressed: look-around, references, \\b, \\p.

    Args:
        pattern: what to read.
        widest: where dialects differ, take what matches in one of them, and not what does in all.
    """

    def __init__(self, pattern: str, *, widest: bool = False) -> None:
        self.pattern, self.at, self.widest = pattern, 0, widest

    def options(self, *, whole: bool) -> tuple[tuple[Item, ...], ...]:
        """The alternatives of the whole pattern, with anything around what is not anchored."""
        options = []
        while True:
            begins = self._take("^")
            items = self._sequence()
            ends = self._take("$")
            before, after = (
                () if begins or whole else (ANYTHING,),
                (() if not self.widest else (LAST_LINE_END,)) if ends or whole else (ANYTHING,),
            )
            options.append((*before, *items, *after))
            if not self._take("|"):
                break
        if self.at < len(self.pattern):
            self._fail(f"{self.pattern[self.at]!r} stands where it can't be expressed")
        return tuple(options)

    def _fail(self, why: str) -> NoReturn:
        raise ValueError(f"{why}, in {self.pattern!r} at {self.at}")

    def _take(self, text: str) -> bool:
        found = self.pattern.startswith(text, self.at)
        self.at += len(text) * found
        return found

    def _sequence(self) -> tuple[Item, ...]:
        items = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)$":
            items.append(self._repeated(self._atom()))
        return tuple(items)

    def _repeated(self, item: Item) -> Item:
        found = QUANTIFIER.match(self.pattern, self.at)
        if not found:
            if self.pattern.startswith("{,", self.at):
                self._fail("'{,' means different things to different readers")
            return item
        self.at = found.end()
        self._take("?")  # lazy or not, the texts are the same
        if AGAIN.match(self.pattern, self.at):
            self._fail("a repetition is repeated")
        sign, low, comma, high = found[0][0], found[1], found[2], found[3]
        least, most = {"*": (0, math.inf), "+": (1, math.inf), "?": (0, 1)}.get(sign, (0, 0))
        if sign == "{":
            least = int(low)
            most = _count(high or low) if high or not comma else math.inf
        if most < least:
            self._fail("a repetition ends before it begins")
        return replace(item, least=least, most=most)

    def _atom(self) -> Item:
        char = self.pattern[self.at]
        if char == "(":
            return self._group()
        if char == "[":
            return Item(self._set())
        self.at += 1
        if char == ".":
            return Item(_complement(LINE_ENDS[:1] if self.widest else LINE_ENDS))
        if char == "\\":
            return Item(self._escape()[0])
        if char in "^*+?":
            self.at -= 1
            self._fail(f"{char!r} stands where it can't be expressed")
        return Item(((ord(char), ord(char)),))

    def _group(self) -> Item:
        self.at += 1
        if self._take("?") and not self._take(":"):
            named = re.compile(r"P?<[A-Za-z_]\w*>").match(self.pattern, self.at)
            if not named:
                self._fail("look-around and flags can't be expressed")
            self.at = named.end()
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        if not self._take(")"):
            self._fail("a group does not end, or holds an anchor")
        return Item(None, tuple(options))

    def _escape(self) -> tuple[Ranges, bool]:
        """What an escape stands for, and whether it is a class; the backslash is taken."""
        if self.at == len(self.pattern):
            self._fail("a backslash stands at the end")
        char = self.pattern[self.at]
        self.at += 1
        if char.lower() in CLASSES:
            return self._class(CLASSES[char.lower()], negated=char.isupper()), True
        code = CONTROLS.get(char)
        if char == "0" and self.pattern[self.at : self.at + 1].isdigit():
            self._fail("'\\0' before a digit means different things to different readers")
        if char in "xu":
            known = r"\{[0-9a-fA-F]+\}|[0-9a-fA-F]{" + ("2}" if char == "x" else "4}")
            found = re.compile(known).match(self.pattern, self.at)
            if not found:
                self._fail("an escape lacks digits")
            self.at, code = found.end(), int(found[0].strip("{}"), 16)
        elif code is None and not char.isalnum():
            code = ord(char)
        if code is None or 0xD800 <= code <= 0xDFFF or code > LAST:
            self._fail(f"the escape \\{char} can't be expressed")
        return ((code, code),), False

    def _class(self, ranges: Ranges, *, negated: bool) -> Ranges:
        """Beyond ASCII the dialects differ about digits, letters and blanks; so do 1C to 1F."""
        if self.widest:
            return _complement(ranges) if negated else (*ranges, (0x1C, 0x1F), (0x80, LAST))
        return _complement((*ranges, (0x1C, 0x1F)), 0x7F) if negated else ranges

    def _set(self) -> Ranges:
        self.at += 1
        negated, restricted, widest = self._take("^"), False, self.widest
        if self.pattern.startswith("]", self.at):  # which ends an empty set, or is its first member
            self._fail("a ']' at the beginning of a set needs a backslash")
        self.widest = widest and not negated  # what is taken away is least
        ranges: list[tuple[int, int]] = []
        while not self._take("]"):
            if self.at >= len(self.pattern):
                self._fail("a set does not end")
            one, is_class = self._member()
            restricted |= is_class
            following = self.pattern[self.at + 1 : self.at + 2]
            if (
                not is_class
                and self.pattern.startswith("-", self.at)
                and following not in ("]", "")
            ):
                self.at += 1
                other, ends_in_class = self._member()
                if ends_in_class or other[0][0] < one[0][0]:
                    self._fail("a range of characters is none")
                one = ((one[0][0], other[0][0]),)
            ranges += one
        self.widest, found = widest, tuple(ranges)
        if not negated:
            return found
        return self._class(found, negated=True) if restricted else _complement(found)

    def _member(self) -> tuple[Ranges, bool]:
        if self._take("\\"):
            if self._take("b"):
                return ((8, 8),), False
            return self._escape()
        if self.pattern[self.at :][:1] == "[":  # other dialects nest sets
            self._fail("a bracket in a set needs a backslash")
        code = ord(self.pattern[self.at])
        self.at += 1
        return ((code, code),), False


def _complement(ranges: Ranges, last: int = LAST) -> Ranges:
    found, begin = [], 0
    for low, high in sorted(ranges):
        if begin < low:
            found.append((begin, min(low - 1, last)))
        begin = max(begin, high + 1)
    if begin <= last:
        found.append((begin, last))
    return tuple(found)
