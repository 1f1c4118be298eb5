"""Prompts of the benchmarks: four tasks of our own, or one file's, at a length of one's choice."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerskip.checkpoint import held_out_modules
from layerskip.prompts import Example, held_out_code, read_prompts

TASKS = ("code", "math", "chat", "copying")
FOLDER = Path(__file__).parent / "prompts"
COPIED_CHARACTERS = 1200
BETWEEN = "\n\n"  # examples
CODE_CHOICE = 400  # functions to choose from


@dataclass(frozen=True)
class Asked:
    """A prompt's tokens, and those of the text that is known to follow it, if any."""

    ids: tuple[int, ...]
    continuation: tuple[int, ...] = ()


def examples_of(task: str, wanted: int = CODE_CHOICE) -> list[Example]:
    """A task's prompts; of code and copying at most so many are looked at."""
    if task in ("math", "chat"):
        return read_prompts(FOLDER / f"{task}.jsonl")
    code = examples_from(None, wanted)
    return copying(code) if task == "copying" else code


def examples_from(path: str | None, wanted: int) -> list[Example]:
    """A file's prompts; without one, those of so many held-out functions."""
    return read_prompts(path) if path else held_out_code(held_out_modules(), wanted)


def copying(examples: Sequence[Example]) -> list[Example]:
    """A function, then the same function asked for again with its first line given."""
    asked = []
    for e in examples:
        start = e.prompt.rfind("\n", 0, max(0, e.prompt.rfind("def "))) + 1
        function = (e.prompt[start:] + e.continuation).rstrip()
        first, _, rest = function.partition("\n")
        if len(function) <= COPIED_CHARACTERS and function.count("\n") > 2:
            asked.append(Example(f"{function}\n\n\n{first}\n", rest + "\n"))
    return asked


def spread(prompts: Sequence[Any], limit: int) -> list[Any]:
    """``limit`` of them, evenly from all: files are sorted by kind. Then the others, as spares, so
    many at a time."""
    left, found = list(prompts), list[Any]()
    while left:
        count = min(max(1, limit), len(left))
        places = [i * len(left) // count for i in range(count)]
        found += [left[i] for i in places]
        taken = set(places)
        left = [p for i, p in enumerate(left) if i not in taken]
    return found


def asked(
    examples: Sequence[Example], tokenizer: Any, *, context: int | None, room: int
) -> list[Asked]:
    """Encoded prompts that leave room for their output.

    Args:
        context: tokens of every prompt: the examples before it, with what follows them, stand in
            front of it, and what is too long is cut at the front. None: prompts as they are.
        room: most tokens of a prompt.
    """
    found: list[Asked] = []
    before: tuple[int, ...] = ()
    between = tuple(tokenizer(BETWEEN)["input_ids"])
    for e in examples if context is None or context <= room else ():
        ids = tuple(tokenizer(e.prompt)["input_ids"])
        # Encoded behind its prompt: a tokenizer may join the two at their border.
        whole = tuple(tokenizer(e.prompt + e.continuation)["input_ids"])
        follows = whole[len(ids) :] if whole[: len(ids)] == ids else ()
        if context is not None:
            kept = (*before, *ids)[-context:]
            before = (*before, *whole, *between)[-context:]
            ids = kept if len(kept) == context else ()
        if 0 < len(ids) <= room:
            found.append(Asked(ids, follows))
    return found
