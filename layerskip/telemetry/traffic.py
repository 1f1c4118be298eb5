"""Requests to measure on, read line by line: a file of any size, in the shapes that logs have."""

import hashlib
import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from layerskip.encoding import Message, Prompt, as_ids, is_single
from layerskip.params import check_integer, check_labels
from layerskip.prompts import CONTINUATION_FIELDS, example_of

BadLines = Literal["fail", "skip"]
BAD_LINES: tuple[BadLines, ...] = ("fail", "skip")
MOST_KEPT = 20  # bad lines that are named; the others are counted


@dataclass(frozen=True)
class Request:
    """A prompt with its labels.

    Attributes:
        index: of its line in the file, from 0.
        prompt: text or token ids; None for a chat.
        messages: a chat, which goes through the tokenizer's template.
        labels: what the request is counted under; the first name given is its task.
    """

    index: int
    prompt: str | tuple[int, ...] | None
    messages: tuple[Message, ...] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LeftOut:
    """A line that is no request, or one that was not decoded: its number, from 1, and why."""

    number: int
    reason: str


@dataclass(frozen=True)
class Traffic:
    """Requests that can be gone through again and again, held by no one.

    Attributes:
        name: of the file.
        sha256: of its lines, as far as they were read.
        count: requests.
        labels: names of the fields that become labels, the task's first.
        num_bad_lines: lines left out.
        bad_lines: the first of them.
        source: begins reading.
    """

    name: str
    sha256: str
    count: int
    source: Callable[[], Iterator[Request]] = field(repr=False)
    labels: tuple[str, ...] = ()
    num_bad_lines: int = 0
    bad_lines: tuple[LeftOut, ...] = ()

    @property
    def label(self) -> str | None:
        """That which holds the task."""
        return self.labels[0] if self.labels else None

    def __iter__(self) -> Iterator[Request]:
        return self.source()

    @classmethod
    def of(
        cls, prompts: Sequence[Prompt], labels: Sequence[Mapping[str, str]] | None = None
    ) -> "Traffic":
        """Prompts that are in memory: texts or token ids, and the labels of each."""
        if is_single(prompts):
            raise ValueError(f"prompts must be a list of them, got a single one: {prompts!r}")
        if not isinstance(prompts, Sequence) or not prompts:
            raise ValueError(f"prompts must be a list of texts or token ids, got {prompts!r}")
        given = [{} for _ in prompts] if labels is None else labels
        if len(given) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts came with {len(given)} labels; give as many")
        for one in given:
            check_labels(one)
        each = [dict(one) for one in given]
        requests = [
            Request(i, p if isinstance(p, str) else tuple(as_ids(p)), None, own)
            for i, (p, own) in enumerate(zip(prompts, each, strict=True))
        ]
        content = json.dumps([[r.prompt, r.labels] for r in requests]).encode()
        return cls(
            "memory",
            hashlib.sha256(content).hexdigest(),
            len(requests),
            lambda: iter(requests),
            tuple(dict.fromkeys(name for one in each for name in one)),
        )

    @classmethod
    def read(
        cls,
        path: str | Path,
        *,
        labels: Sequence[str] = (),
        bad_lines: BadLines = "fail",
        limit: int | None = None,
    ) -> "Traffic":
        """Go through a JSON-lines file once, to know what it holds; no line of it is kept.

        A line has ``prompt`` (text or token ids), or ``prompt_token_ids``, or ``messages`` (an
        answer at their end is left out), or Spec-Bench's ``turns`` (the first is taken), or
        ``question`` and perhaps ``answer``.

        Args:
            path: of the file.
            labels: fields that become labels, "outer.inner" for one inside another; the first is
                the task. A request that lacks one goes without it.
            bad_lines: "fail" at the first line that is no request, or "skip" and count them.
            limit: most requests; None takes all.

        Raises:
            ValueError: the file cannot be read, holds no request or a bad line, or no line has one
                of the labels.
        """
        if bad_lines not in BAD_LINES:
            raise ValueError(f"bad_lines must be one of {BAD_LINES}, got {bad_lines!r}")
        if limit is not None:
            check_integer("limit", limit, 1)
        if Path(path).exists() and not Path(path).is_file():
            raise ValueError(
                f"{path} is no regular file, and prompts are read more than once: write them into "
                "a file first"
            )
        lines = _Lines(Path(path), tuple(dict.fromkeys(labels)), bad_lines, limit)
        count = sum(1 for _ in lines.requests())
        if not count:
            raise ValueError(f"{path} holds no prompts{_said(lines.bad)}")
        missing = [name for name in lines.labels if name not in lines.found]
        if missing:
            raise ValueError(
                f"no line of {path} has a field {missing[0]!r} to label by; "
                f"the first has {', '.join(lines.fields)}"
            )
        return cls(
            lines.path.name,
            lines.digest.hexdigest(),
            count,
            lambda: lines.again(count),
            lines.labels,
            lines.num_bad,
            tuple(lines.bad),
        )


class _Lines:
    """One reading of a file, and what was met on the way."""

    def __init__(
        self, path: Path, labels: tuple[str, ...], bad_lines: BadLines, limit: int | None
    ) -> None:
        self.path, self.labels, self.bad_lines, self.limit = path, labels, bad_lines, limit
        self.fields: tuple[str, ...] = ()
        self.found: set[str] = set()
        self.num_bad, self.bad = 0, list[LeftOut]()
        self.digest = hashlib.sha256()
        # Up to the last request's line, and that one: a log that grows may end it.
        self._before, self._last = self.digest, b""

    def again(self, count: int) -> Iterator[Request]:
        """The same requests once more. A log may grow meanwhile: what was counted is what is read.

        Raises:
            ValueError: they were not the same.
        """
        later = _Lines(self.path, self.labels, self.bad_lines, count)
        yield from later.requests()
        if (later._before.digest(), later._last) != (self._before.digest(), self._last):
            raise ValueError(
                f"{self.path} was changed after it was first read, and what was decoded is not "
                "what it held then; begin anew, with a file that stays as it is"
            )

    def requests(self) -> Iterator[Request]:
        count = 0
        for index, line in enumerate(self._raw()):
            if count == self.limit:
                return
            before = self.digest.copy()
            self.digest.update(line)
            if not line.removeprefix(BOM_UTF8).strip():
                continue
            try:
                row = _row(line)
                request = _request(index, row, self.labels)
            except (ValueError, TypeError) as error:
                self._refuse(LeftOut(index + 1, str(error)))
                continue
            self.fields = self.fields or tuple(map(str, row))
            self.found.update(request.labels)
            count += 1
            self._before, self._last = before, line.rstrip()
            yield request

    def _raw(self) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as file:
                for lines in file:
                    yield from lines.splitlines(keepends=True)  # at "\r" alone, too
        except OSError as error:
            raise ValueError(f"{self.path} cannot be read: {error.strerror}") from None

    def _refuse(self, line: LeftOut) -> None:
        if self.bad_lines == "fail":
            raise ValueError(
                f"{self.path} line {line.number} is not a prompt ({line.reason}); "
                "correct it, or have bad lines skipped"
            )
        self.num_bad += 1
        if len(self.bad) < MOST_KEPT:
            self.bad.append(line)


def _said(bad: Sequence[LeftOut]) -> str:
    return f" (line {bad[0].number}: {bad[0].reason})" if bad else ""


def _row(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))  # of bytes it would guess what they are
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise TypeError(f"an object was expected, got {type(row).__name__}")
    return row


def _request(index: int, row: Mapping[str, Any], labels: Sequence[str]) -> Request:
    own = {name: text for name in labels if (text := _label(row, name)) is not None}
    if row.get("messages") is not None:
        return Request(index, None, _messages(row["messages"]), own)
    ids = row.get("prompt_token_ids")
    if ids is None and isinstance(row.get("prompt"), list):
        ids = row["prompt"]
    if ids is not None:
        return Request(index, _token_ids(ids), None, own)
    try:
        asked = {k: v for k, v in row.items() if k not in CONTINUATION_FIELDS}  # nobody reads them
        return Request(index, example_of(asked).prompt, None, own)
    except KeyError:
        raise ValueError(
            "it has none of prompt, prompt_token_ids, messages, turns, question"
        ) from None


def _token_ids(ids: object) -> tuple[int, ...]:
    whole = isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)
    if not whole or not ids:
        raise TypeError("token ids must be a list of one or more ints, none below 0")
    return tuple(ids)  # type: ignore[arg-type]


def _messages(messages: object) -> tuple[Message, ...]:
    """What was asked: logs often end with the answer."""
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
    ):
        raise TypeError("messages must be a list of objects, each with a role")
    asked = list(messages)
    while asked and asked[-1]["role"] == "assistant":
        asked.pop()
    if not asked:
        raise ValueError("messages hold no question")
    return tuple(asked)


def _label(row: Mapping[str, Any], name: str) -> str | None:
    value: Any = row.get(name)
    if name not in row:
        value = row
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
    if value is None:
        return None
    if isinstance(value, str):
        if any("\ud800" <= c <= "\udfff" for c in value):  # no file or screen takes these
            raise ValueError(f"label {name!r} is not valid Unicode")
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise TypeError(f"label {name!r} must be text or a number, got {type(value).__name__}")
