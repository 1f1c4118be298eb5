"""How long the shortest text of a grammar is, and whether it has one.

xgrammar looks for forced text without bound: a grammar of which each text needs another like it
takes all memory. It is refused by what is computed here: shortest paths, with rules in the place of
edges (Knuth, "A generalization of Dijkstra's algorithm", 1977).
"""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

DISPATCHES = ("TagDispatch", "TokenTagDispatch")
# The body of some takes several lines.
_RULE = re.compile(r"^(?P<name>[\w.-]+) ::= (?P<body>.*(?:\n(?![\w.-]+ ::= ).*)*)", re.MULTILINE)
# Alternatives of sequences; of these an entry is a name, a number of characters, or alternatives
# that stand so many times.
_Choices = list[list[str | int | tuple[Any, int]]]
_WORD = re.compile(
    r"""\s*(?:
    (?P<string>"(?:\\.|[^"\\])*")|(?P<set>\[(?:\\.|[^\]\\])*\])|(?P<name>[\w.-]+)
    |\{\s*(?P<least>\d+)\s*,[^}]*\}|(?P<ahead>\(=)|(?P<sign>.))""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|.", re.DOTALL)


def longest_shortest(kind: str, rules: str) -> float:
    """Characters of the shortest text of a rule, of whichever has most of those that can be met.

    Args:
        kind: of the grammar, for the sentence.
        rules: of a compiled grammar, a line each, as xgrammar prints them.

    Raises:
        ValueError: no text of some rule ends, as of an object that must have one like itself.
    """
    bodies = {rule["name"]: rule["body"] for rule in _RULE.finditer(rules)}
    parts = {name: _Parts(body).choices() for name, body in bodies.items()}
    named, users = {name: _named(choices) for name, choices in parts.items()}, defaultdict(list)
    for name, others in named.items():
        for other in others:
            users[other].append(name)
    found = dict.fromkeys(parts, math.inf)
    asked = dict.fromkeys(reversed(parts))  # in turn, each once: most name rules behind them
    while asked:
        name = next(iter(asked))
        del asked[name]
        least = _least(parts[name], found)
        if least < found[name]:
            found[name] = least
            asked |= dict.fromkeys(users[name])
    met, waiting = {"root"}, ["root"]
    while waiting:
        more = named.get(waiting.pop(), set()) - met
        met |= more
        waiting += more
    endless = sorted(name for name in met if found.get(name, 0.0) == math.inf)
    if endless:
        what = f"its rule {endless[0]!r}" if kind == "ebnf" else "it, or of a part of it,"
        raise ValueError(
            f"the {kind} is not usable: no text of {what} ends, as each needs another like it"
        )
    return max(found.get(name, 0.0) for name in met)


class _Parts:
    """Reads the body of a rule; what it does not know has no characters, and refuses nothing."""

    def __init__(self, body: str) -> None:
        self._words = [m for m in _WORD.finditer(body.strip()) if m.group().strip()]
        self._at = 0

    def choices(self) -> _Choices:
        """Up to the parenthesis that ends them, which is left out."""
        found: _Choices = [[]]
        while self._at < len(self._words):
            word = self._words[self._at]
            self._at += 1
            sign = word["sign"]
            if sign == ")":
                break
            if sign == "|":
                found.append([])
            elif sign == "(":  # nothing of a dispatch has to come
                taken = 0 if found[-1] and found[-1][-1] in DISPATCHES else 1
                found[-1].append((self.choices(), taken))
            elif word["ahead"]:  # only looked at
                self.choices()
            elif word["string"]:
                found[-1].append(len(_CHARACTER.findall(word["string"][1:-1])))
            elif word["set"]:
                found[-1].append(1)
            elif word["name"]:
                found[-1].append(word["name"])
            elif found[-1] and (word["least"] or sign in ("*", "?")):
                found[-1].append(([[found[-1].pop()]], int(word["least"] or 0)))
        return found


def _least(choices: _Choices, known: Mapping[str, float]) -> float:
    """Characters of the shortest of these, by those of rules."""

    def of(part: str | int | tuple[Any, int]) -> float:
        if isinstance(part, str):
            return known.get(part, 0.0)
        if isinstance(part, int):
            return part
        return _least(part[0], known) * part[1] if part[1] else 0.0

    return min(sum(map(of, parts)) for parts in choices)


def _named(choices: _Choices) -> set[str]:
    """Rules that stand in these."""
    found: set[str] = set()
    for part in itertools.chain.from_iterable(choices):
        if isinstance(part, str):
            found.add(part)
        elif isinstance(part, tuple):
            found |= _named(part[0])
    return found
