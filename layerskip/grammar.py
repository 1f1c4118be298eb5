"""What output must look like: ``Grammar`` is the user's value, ``Matcher`` what decoding asks.

A backend makes matchers (``layerskip.grammar_xgrammar``); decoding knows this protocol alone.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from layerskip.params import check_integer, check_text
from layerskip.schemas.check import checked_schema

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["json_schema", "regex", "ebnf"]
MAX_WHITESPACE = 1000
# Of a regular expression: escapes, sets, anchors.
PARTS = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|[$^]", re.DOTALL)
# What may follow a backslash: of other letters and digits xgrammar 0.2.8 takes the letter itself.
ESCAPED = re.compile(
    r"[^A-Za-z0-9]|[adDefnrsStvwW]|0(?!\d)|c[A-Za-z]|x[0-9a-fA-F]{2}"
    r"|u(?:(?P<four>[0-9a-fA-F]{4})|\{(?P<any>[0-9a-fA-F]+)\})",
    re.DOTALL,
)
MEMBERS = re.compile(r"(?P<first>\\.|.)(?:-(?P<last>\\.|.))?", re.DOTALL)
SETS = {"\\d", "\\D", "\\s", "\\S", "\\w", "\\W"}


class Matcher(Protocol):
    """Where a text stands in a grammar. It belongs to one row, and one thread at a time.

    The end of sequence is no token of the text: it is never given to ``advance``, and whether it
    may follow is what ``complete`` says.
    """

    @property
    def complete(self) -> bool:
        """Whether the text so far may end here."""

    def fill(self, mask: "Tensor") -> None:
        """Write the tokens that may follow.

        Args:
            mask: ``(ceil(vocab / 32),)`` int32 on the CPU; bit i of word j is token 32 j + i.
        """

    def advance(self, token: int) -> bool:
        """Add a token to the text; False, and nothing has changed, if it may not follow."""

    def rollback(self, count: int) -> None:
        """Take the last ``count`` tokens back."""

    def reset(self) -> None:
        """Take all tokens back, even if the call before was interrupted anywhere."""

    def forced(self) -> tuple[int, ...]:
        """Tokens of the text that has to follow whatever happens, as the tokenizer would write
        it; another spelling may be allowed too."""


@dataclass(frozen=True)
class Grammar:
    """What a row may emit; made by one of the constructors below.

    Attributes:
        kind: of ``source``.
        source: the grammar as text; of a schema the form that ``checked_schema`` gives.
        max_whitespace: of JSON: 0 writes ``{"a": [1, 2]}`` as ``json.dumps`` does; a number allows
            up to so many blanks and line breaks at every place where JSON takes them.
        marker: text after which the grammar begins; before it everything but the end is allowed.
    """

    kind: Kind
    source: str
    max_whitespace: int = 0
    marker: str = ""

    def __post_init__(self) -> None:
        check_integer("max_whitespace", self.max_whitespace, 0, MAX_WHITESPACE)
        for name, value in ((self.kind, self.source), ("the marker", self.marker)):
            check_text(name, value)

    @classmethod
    def json_schema(cls, schema: Any, *, strict: bool = True, max_whitespace: int = 0) -> "Grammar":
        """JSON that a schema describes.

        Properties come in the order of the schema. An object that names properties gets no
        others, unless ``additionalProperties`` is a schema that says more than ``true``; an array
        with ``prefixItems`` gets no items behind them, unless there is ``items`` or ``minItems``
        asks for more. Of formats only common texts are written, such as URIs without query,
        fragment or port; numbers with bounds get at most 6 decimals and no exponent.

        Args:
            schema: a mapping, JSON text, or a pydantic model class.
            strict: refuse keywords that can't be held to. False leaves them out: output may then
                be invalid.
            max_whitespace: see the class.

        Raises:
            ValueError: the schema is none, nothing fulfils it, or a keyword can't be held to; the
                message names it and its JSON pointer.
        """
        return cls("json_schema", checked_schema(_loaded(schema), strict=strict), max_whitespace)

    @classmethod
    def json(cls, *, max_whitespace: int = 0) -> "Grammar":
        """Any JSON value."""
        return cls("json_schema", "{}", max_whitespace)

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Text that a regular expression matches from its beginning to its end.

        ``.`` stands for any character, a line break too; ``\\d``, ``\\s`` and ``\\w`` for those of
        ASCII.

        Raises:
            ValueError: an anchor stands inside, where it could not be held to, or something that
                would be read as something else.
        """
        if isinstance(pattern, str):
            _check_regex(pattern)
        return cls("regex", pattern)

    @classmethod
    def ebnf(cls, rules: str) -> "Grammar":
        """Text of a grammar in llama.cpp's notation (GBNF); it begins with the rule ``root``."""
        return cls("ebnf", rules)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "Grammar":
        """One of several texts."""
        if isinstance(texts, str) or not isinstance(texts, Sequence):
            raise TypeError(f"choice takes a list of texts, got {texts!r}")
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"choice takes one or more non-empty texts, got {texts!r}")
        for text in texts:
            check_text("a text of choice", text)
        return cls("ebnf", f"root ::= {' | '.join(map(_literal, dict.fromkeys(texts)))}")

    def after(self, marker: str) -> "Grammar":
        """The same, beginning where ``marker`` has been written, such as ``</think>``.

        Until then everything but the end of sequence is allowed. The marker may be spelt with any
        tokens; what stands behind it in its last token does not count.
        """
        if not isinstance(marker, str) or not marker:
            raise ValueError(f"marker must be a non-empty text, got {marker!r}")
        return replace(self, marker=marker)


def _check_regex(pattern: str) -> None:
    """Raise where xgrammar would read an expression as another than it is."""
    for found in PARTS.finditer(pattern):
        part, at = found[0], found.start()
        if part in ("[]", "[^]"):
            raise ValueError(
                f"the regex's ']' at {found.end() - 1} begins a set or ends an empty one, as "
                "different readers have it; write it as '\\]'"
            )
        if part.startswith("["):
            _check_set(pattern, found)
        inside = {"^": at > 0, "$": found.end() < len(pattern)}
        if inside.get(part, part in ("\\A", "\\Z")):
            raise ValueError(
                f"the regex's {part!r} at {at} can't be held to: only a '^' at the beginning and "
                "a '$' at the end can, and both are implied; take it out"
            )
        if part.startswith("\\"):
            _check_escape(pattern, at)


def _check_set(pattern: str, found: re.Match[str]) -> None:
    """Raise if a set of characters holds an escape or a range that is none."""
    begin = found.start() + (2 if found[0].startswith("[^") else 1)
    for member in MEMBERS.finditer(pattern, begin, found.end() - 1):
        for part in ("first", "last"):
            if (member[part] or "").startswith("\\") and member[part] != "\\b":  # a backspace here
                _check_escape(pattern, member.start(part))
        if member["last"] and SETS & set(member.groups()):
            raise ValueError(
                f"the regex's '-' at {member.end('first')} is no range of characters; write it as "
                "'\\-'"
            )


def _check_escape(pattern: str, at: int) -> None:
    found = ESCAPED.match(pattern, at + 1)
    code = int(found["four"] or found["any"] or "0", 16) if found else sys.maxunicode + 1
    if 0xD800 <= code <= 0xDFFF or code > sys.maxunicode:
        raise ValueError(
            f"the regex's {pattern[at : at + 2]!r} at {at} can't be held to: of a letter or digit "
            "only \\d \\w \\s \\D \\W \\S \\n \\r \\t \\f \\v \\a \\e \\0 are escapes, and "
            "characters as \\cA, \\x41, \\u0041 or \\u{41}; write it in other words"
        )


def _loaded(schema: Any) -> Any:
    """A schema as Python values."""
    if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
        return schema.model_json_schema()
    if isinstance(schema, str):
        try:
            return json.loads(schema)
        except ValueError as error:
            raise ValueError(f"the schema is not JSON: {error}") from None
        except RecursionError:
            raise ValueError("the schema is nested too deeply") from None
    if not isinstance(schema, Mapping | bool):
        raise TypeError(
            "a schema must be a mapping, JSON text or a pydantic model class, "
            f"got {type(schema).__name__}"
        )
    return schema


def _literal(text: str) -> str:
    """A string of the notation: JSON's escapes are among its own, but for pairs of surrogates."""
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\u0000"}
    return '"' + "".join(escapes.get(c, c) for c in text) + '"'
