"""Rows of text as files and data sets have them, each with its place or what is wrong with it."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from layerskip.prompts import example_of

TEXT_FILES = {".txt", ".md", ".py"}
TABLES = {".json": "json", ".csv": "csv", ".parquet": "parquet"}  # as ``datasets`` names them
FORMS = "'text', 'prompt' and 'completion', 'messages', or 'question' and 'answer'"


@dataclass(frozen=True)
class BadRow:
    """A row that could not be used.

    Attributes:
        source: file, or data set.
        line: of the file from 1, or number of the row from 1.
        reason: a clause.
    """

    source: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.source} line {self.line}: {self.reason}"


@dataclass(frozen=True)
class Row:
    """A row's content, whatever its form was.

    Attributes:
        kind: "text": ``parts`` is the text; "completion": prompt and what follows, which is empty
            where it is to be generated; "chat": (role, content) of every message.
        source, line: as of ``BadRow``.
    """

    kind: Literal["text", "completion", "chat"]
    parts: tuple[Any, ...]
    source: str
    line: int

    @cached_property
    def hash(self) -> int:
        """64 bits of the content's SHA-256: the same in every run and on every machine."""
        content = json.dumps([self.kind, self.parts])
        return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8])


def read_rows(source: str) -> Iterator[Row | BadRow]:
    """Rows of a file, a folder or a data set, in order; ``data.load`` says which there are.

    Raises:
        ValueError: there is no such source, or nothing in it that could be read.
    """
    if not source:
        raise ValueError("data is empty; give a file, a folder or a hub id")
    path = Path(source)
    if path.is_dir() and not _saved_data_set(path):
        return _of_folder(path)
    if path.is_file():
        return _of_file(path)
    return _of_data_set(source)


def _of_file(path: Path) -> Iterator[Row | BadRow]:
    if path.suffix == ".jsonl":
        return _of_lines(path)
    if path.suffix in TEXT_FILES:
        return _of_text(path)
    if path.suffix in TABLES:
        return _of_data_set(str(path))
    known = ", ".join(sorted([".jsonl", *TEXT_FILES, *TABLES]))
    raise ValueError(f"{path} is not a file of text; those that are read end in {known}")


def _of_folder(folder: Path) -> Iterator[Row | BadRow]:
    """Of every file of text; hidden ones and those in hidden folders are passed over."""
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix in {*TEXT_FILES, ".jsonl"}
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if files:
        return (row for path in files for row in _of_file(path))
    if any(path.suffix in TABLES for path in folder.rglob("*")):
        return _of_data_set(str(folder))
    raise ValueError(
        f"{folder} holds no .jsonl, {', '.join(sorted(TEXT_FILES))} file and no data set"
    )


def _of_text(path: Path) -> Iterator[Row | BadRow]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield BadRow(str(path), 1, f"it is not UTF-8 (byte {error.start} of the file)")
        return
    if text.strip():  # an empty file, such as many __init__.py, is no mistake
        yield Row("text", (text,), str(path), 1)


def _of_lines(path: Path) -> Iterator[Row | BadRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:  # a byte order mark may begin the file
                content = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                yield BadRow(str(path), number, f"it is not UTF-8 (byte {error.start})")
            except (ValueError, RecursionError) as error:
                yield BadRow(str(path), number, f"it is not JSON ({error})")
            else:
                yield _row(content, str(path), number)


def _saved_data_set(folder: Path) -> bool:
    return any((folder / n).is_file() for n in ("dataset_info.json", "dataset_dict.json"))


def _of_data_set(source: str) -> Iterator[Row | BadRow]:
    """Through ``datasets``, which knows formats, the hub and its cache."""
    if not Path(source).exists() and source.startswith((".", "/", "~")):
        raise ValueError(f"there is no file or folder {source!r}; give one, or a hub id")
    loaded = _loaded(source)
    if isinstance(loaded, Mapping):  # by split
        loaded = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
    return _of_rows(loaded, source)


def _loaded(source: str) -> Any:
    # Importing it takes a second, and most data are plain files.
    import datasets

    path = Path(source)
    try:
        if path.is_file():
            return datasets.load_dataset(TABLES[path.suffix], data_files=source)
        if path.is_dir():
            saved = _saved_data_set(path)
            return datasets.load_from_disk(source) if saved else datasets.load_dataset(source)
        name, _, configuration = source.partition(":")
        return datasets.load_dataset(name, configuration or None)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        said = " ".join(str(error).split())[:300]
        raise ValueError(f"data {source!r} is no file and no data set that loads: {said}") from None


def _of_rows(rows: Iterable[Mapping[str, Any]], source: str) -> Iterator[Row | BadRow]:
    for number, row in enumerate(rows, 1):
        yield _row(dict(row), source, number)


def _row(content: object, source: str, line: int) -> Row | BadRow:
    """The content of one JSON object, or what is wrong with it; null is as if it were not there."""
    if not isinstance(content, dict):
        return BadRow(source, line, f"an object is expected, with {FORMS}")
    content = {key: value for key, value in content.items() if value is not None}
    try:
        kind, parts = _parts(content)
        json.dumps(parts, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return BadRow(source, line, "its text is not Unicode: half of a surrogate pair")
    except (KeyError, TypeError) as error:
        keys = ", ".join(map(repr, content)) or "none"
        what = f"{error!s:.160}" if isinstance(error, TypeError) else f"its keys are {keys}"
        return BadRow(source, line, f"{FORMS} are expected; {what}")
    if not any(text.strip() for text in _texts(kind, parts)):
        return BadRow(source, line, "it holds no text")
    return Row(kind, parts, source, line)


def _texts(kind: str, parts: tuple[Any, ...]) -> Iterable[str]:
    return [content for _, content in parts] if kind == "chat" else parts


def _parts(
    content: Mapping[str, Any],
) -> tuple[Literal["text", "completion", "chat"], tuple[Any, ...]]:
    if "messages" in content:
        messages = content["messages"]
        if not isinstance(messages, list) or not messages:
            raise TypeError(f"'messages' must be a list of one or more, got {messages!r:.80}")
        return "chat", tuple(_message(message) for message in messages)
    if "text" in content:
        if not isinstance(content["text"], str):
            raise TypeError(f"text expected, got {content['text']!r:.80}")
        return "text", (content["text"],)
    example = example_of(content)
    follows = example.continuation if example.continuation.strip() else ""
    return "completion", (example.prompt, follows)


def _message(message: object) -> tuple[str, str]:
    if not isinstance(message, Mapping) or "role" not in message:
        raise TypeError(f"a message must have 'role' and 'content', got {message!r:.80}")
    if message.get("tool_calls") or message.get("function_call"):
        raise TypeError("messages with tool calls are not taken")
    role, content = message["role"], message.get("content") or ""
    if not isinstance(role, str) or not isinstance(content, str):
        raise TypeError(f"role and content of a message must be text, got {message!r:.80}")
    return role, content
