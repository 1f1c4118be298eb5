"""Text to train on: JSON lines, files, or a data set of ``datasets``; a part of it held out.

Rows are ``{"text"}``, ``{"prompt", "completion"}``, ``{"messages"}``, ``{"question", "answer"}`` or
``{"prompt"}`` alone. Which side a row is on depends on its content alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

UNTRAINED = -100  # the label that torch's cross-entropy leaves out

BadRows = Literal["skip", "fail"]


@dataclass(frozen=True)
class Sample:
    """One row as tokens.

    Attributes:
        ids: of prompt and what follows, with the end-of-sequence token if the text ends there.
        num_prompt_tokens: leading ones that are given, not learned; 0 of plain text.
        untrained: further spans ``(start, end)`` that are not learned: other people's turns of a
            chat.
    """

    ids: tuple[int, ...]
    num_prompt_tokens: int = 0
    untrained: tuple[tuple[int, int], ...] = ()

    @property
    def labels(self) -> tuple[int, ...]:
        """``ids`` with ``UNTRAINED`` in the place of what is not learned; not shifted."""
        labels = list(self.ids)
        for start, end in ((0, self.num_prompt_tokens), *self.untrained):
            labels[start:end] = [UNTRAINED] * len(labels[start:end])
        return tuple(labels)


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
class Corpus:
    """What was read.

    Attributes:
        train: in the order of the source.
        held_out: never trained on, in the order of the source.
        bad: rows left out.
    """

    train: Sequence[Sample]
    held_out: Sequence[Sample]
    bad: tuple[BadRow, ...]

    def report(self, most: int = 5) -> str:
        """Counts, and the first bad rows, for people."""
        raise NotImplementedError


def load(
    source: str,
    tokenizer: Any,
    *,
    held_out_share: float = 0.05,
    bad_rows: BadRows = "skip",
    allow_prompts: bool = False,
    limit: int | None = None,
) -> Corpus:
    """Read, tokenize and divide a source of text.

    Args:
        source: a ``.jsonl`` file; a ``.txt``, ``.md`` or ``.py`` file; a folder of such files, one
            document each, or of a data set that ``datasets`` saved; or a hub id, ``id:name`` for
            one of its configurations.
        tokenizer: of the model, a transformers tokenizer.
        held_out_share: of the rows, chosen by the hash of their content: a row is on the same side
            for ever, in whatever order or company. Of few rows, one is on either side at least; of
            a single text its last part is held out.
        bad_rows: "skip" reports them in the result, "fail" raises at the first.
        allow_prompts: rows that are a prompt alone are taken, with nothing to learn in them: what
            follows is to be generated.
        limit: most rows that are read.

    Raises:
        ValueError: there is no such source, it holds fewer than two different rows that can be
            used, or with "fail" a row cannot be used (file and line are named).
    """
    raise NotImplementedError


def prompts(
    samples: Sequence[Sample], *, limit: int, max_prompt_tokens: int, seed: int = 0
) -> list[tuple[int, ...]]:
    """Beginnings to generate from: a row's prompt, or the first half of a plain text.

    Args:
        samples: such as ``Corpus.held_out``.
        limit: most prompts; drawn by ``seed``.
        max_prompt_tokens: longer prompts are left out, and halves of texts cut to it.

    Raises:
        ValueError: none is left.
    """
    raise NotImplementedError
