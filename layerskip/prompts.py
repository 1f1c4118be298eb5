"""Prompts to measure on: JSON lines of several shapes, or held-out code of this Python."""

import ast
import json
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerskip.files import reason_of
from layerskip.params import check_text

CONTEXT_LINES = 20
MAX_PROMPT_CHARACTERS = 1500
CONTINUATION_FIELDS = ("continuation", "completion", "canonical_solution", "answer")


@dataclass(frozen=True)
class Example:
    """A prompt and, where known, the text that really follows it."""

    prompt: str
    continuation: str = ""


def checked_examples(examples: Iterable[Example]) -> tuple[Example, ...]:
    """All of them, to be gone over more than once.

    Raises:
        TypeError, ValueError: one is no example, its text is not valid Unicode, or there are none.
    """
    if not isinstance(examples, Iterable):
        raise TypeError(f"examples must be a list of Example, got {type(examples).__name__}")
    found = tuple(examples)
    for i, example in enumerate(found):
        if not isinstance(example, Example):
            raise TypeError(
                f"examples[{i}] must be an Example, got {type(example).__name__}; "
                "Example(prompt) makes one of text"
            )
        check_text(f"the prompt of examples[{i}]", example.prompt)
        check_text(f"the continuation of examples[{i}]", example.continuation)
    if not found:
        raise ValueError("examples holds no prompts; give one or more")
    return found


def read_text(path: str | Path) -> str:
    """A UTF-8 file's text, without the mark that Windows begins some with; one clear sentence if it
    cannot be read as such."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}); convert it first") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def read_prompts(path: str | Path) -> list[Example]:
    """Examples of a JSON-lines file.

    A line has ``prompt`` (and perhaps ``continuation``, ``completion``, ``canonical_solution`` or
    ``answer``), or ``question`` (and perhaps ``answer``), or Spec-Bench's ``turns`` (the first is
    taken).
    """
    examples = []
    lines = read_text(path).replace("\n\ufeff", "\n").split("\n")  # files that were joined
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            examples.append(example_of(json.loads(line)))
            (examples[-1].prompt + examples[-1].continuation).encode()
        except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
            raise ValueError(f"{path} line {number} is not valid Unicode: {error}") from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path} line {number} is not a prompt ({reason_of(error)}); "
                "it needs 'prompt', or 'question' and 'answer', or 'turns'"
            ) from None
    if not examples:
        raise ValueError(f"{path} holds no prompts")
    return examples


def read_texts(path: str | Path) -> list[str]:
    """Texts of a JSON-lines file (.jsonl), each prompt with what follows it, or of a plain one."""
    if Path(path).suffix == ".jsonl":
        return [e.prompt + e.continuation for e in read_prompts(path)]
    text = read_text(path)
    if not text.strip():
        raise ValueError(f"{path} holds no text")
    return [text]


def example_of(row: Mapping[str, Any]) -> Example:
    """The example in a line of a prompt file.

    Raises:
        KeyError: it has none.
        TypeError: what should be text is not.
    """
    if not isinstance(row, Mapping):
        raise TypeError(f"an object expected, got {row!r:.80}")
    row = {name: value for name, value in row.items() if value is not None}  # null: not known
    others = row if "prompt" not in row else {}  # a prompt goes before what else there is
    if "question" in others:
        question, answer = _text(row, "question"), _text({"answer": ""} | row, "answer")
        return Example(f"Question: {question}\nAnswer:", " " + answer if answer else "")
    if "turns" in others:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise TypeError(f"'turns' must be a list of one or more texts, got {turns!r:.80}")
        return Example(turns[0])
    follows = next((name for name in CONTINUATION_FIELDS if name in row), None)
    return Example(_text(row, "prompt"), _text(row, follows) if follows else "")


def _text(row: Mapping[str, Any], name: str) -> str:
    if not isinstance(row[name], str):
        raise TypeError(f"{name!r} must be text, got {row[name]!r:.80}")
    text: str = row[name]
    return text


def held_out_code(modules: list[str], limit: int) -> list[Example]:
    """Functions of standard-library modules, spread over them: context up to ``def``, then body.

    Args:
        modules: module paths below the standard library, such as "email/parser.py"; those this
            Python does not have are passed over.
        limit: most examples to return.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = [root / name for name in sorted(modules)]
    pools = [list(_functions(path.read_text("utf-8"))) for path in paths if path.is_file()]
    chosen: list[Example] = []
    while len(chosen) < limit and any(pools):
        for pool in pools:
            if pool and len(chosen) < limit:
                chosen.append(pool.pop(len(pool) // 2))
    return chosen


def _functions(source: str) -> Iterator[Example]:
    lines = source.split("\n")
    try:
        tree = ast.parse(source)
    except SyntaxError:  # held out by a Python with another grammar
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        body, end = node.body[0].lineno - 1, node.end_lineno or node.lineno
        if end - body >= 6 and body > node.lineno - 1 >= 8:
            start = max(0, node.lineno - 1 - CONTEXT_LINES)
            prompt = "\n".join(lines[start:body]) + "\n"
            if len(prompt) <= MAX_PROMPT_CHARACTERS:
                yield Example(prompt, "\n".join(lines[body:end]) + "\n")
