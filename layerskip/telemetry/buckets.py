"""Which bucket a request is counted in: its task, its prompt's length and its output's length."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from layerskip.params import check_integer

PROMPT_EDGES = (128, 512, 2048)
OUTPUT_EDGES = (32, 128, 512)
LARGEST_EDGE = 2**31 - 1  # tokens

# What is told apart by a label: it may have a value of its own in every request.
MOST_NAMES, OTHER = 100, "(other)"

Lengths = tuple[int, int | None]
EVERY_LENGTH: Lengths = (0, None)


@dataclass(frozen=True)
class Bucket:
    """Requests of one task with prompts and outputs of about one length.

    Attributes:
        task: what the requests' label says; "" if they have none, None: of every task.
        prompt_tokens, new_tokens: lengths from the first number on to below the second; None:
            without an end.
    """

    task: str | None
    prompt_tokens: Lengths = EVERY_LENGTH
    new_tokens: Lengths = EVERY_LENGTH

    @property
    def name(self) -> str:
        """For people: "code, prompt 128-511, output 0-31"."""
        task = "every task" if self.task is None else self.task or "no label"
        parts = [task]
        if self.prompt_tokens != EVERY_LENGTH:
            parts.append(f"prompt {shown(self.prompt_tokens)}")
        if self.new_tokens != EVERY_LENGTH:
            parts.append(f"output {shown(self.new_tokens)}")
        return ", ".join(parts)


def lengths(edges: Sequence[int], what: str) -> tuple[Lengths, ...]:
    """The ranges that ``edges`` cut all lengths into, from 0 on; no edges: one range.

    Args:
        edges: where a range ends and the next one begins, ascending, from 1 on.
        what: they are, for messages: "prompt edges".

    Raises:
        ValueError, TypeError: they are none.
    """
    for edge in edges:
        check_integer(f"each of the {what}", edge, 1, LARGEST_EDGE)
    if any(a >= b for a, b in pairwise(edges)):
        raise ValueError(f"{what} must ascend, got {', '.join(map(str, edges))}")
    return tuple(zip((0, *edges), (*edges, None), strict=True))


def shown(tokens: Lengths) -> str:
    """``(128, 512)`` as "128-511", ``(512, None)`` as "512 on"."""
    low, high = tokens
    return f"{low} on" if high is None else f"{low}-{high - 1}"


def counted_as(name: str, known: Collection[str]) -> str:
    """What a label's value is counted as, beside those that are known."""
    full = len(known) - (OTHER in known) >= MOST_NAMES
    return OTHER if full and name not in known else name
