"""Text to train on: JSON lines, files, or a data set of ``datasets``; a part of it held out.

Rows are ``{"text"}``, ``{"prompt", "completion"}``, ``{"messages"}``, ``{"question", "answer"}`` or
``{"prompt"}`` alone (``rows.py``). Which side a row is on depends on its content alone.
"""

import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

from rows import BadRow, Row, read_rows
from tokens import UNTRAINED, Sample, encode

__all__ = ["UNTRAINED", "BadRow", "Corpus", "Sample", "Samples", "load", "load_whole", "prompts"]

HASHES = 2**64


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
        lines = [
            f"{len(part)} rows {where}, {sum(len(s.ids) for s in part):,} tokens"
            for part, where in ((self.train, "to train on"), (self.held_out, "held out"))
        ]
        if self.bad:
            lines.append(f"{len(self.bad)} rows left out:")
            lines += [f"  {row}" for row in self.bad[:most]]
        if len(self.bad) > most:
            lines.append(f"  and {len(self.bad) - most} more")
        return "\n".join(lines)


class Samples(Sequence[Sample]):
    """Samples in flat arrays: as tuples, the numbers of a large corpus would fill the memory."""

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        self._ids, self._starts = array("i"), array("q", [0])
        self._prompts = array("i")
        self._untrained: dict[int, tuple[tuple[int, int], ...]] = {}
        for sample in samples:
            self.append(sample)

    def append(self, sample: Sample) -> None:
        """Add one at the end."""
        if sample.untrained:
            self._untrained[len(self)] = sample.untrained
        self._ids.extend(sample.ids)
        self._starts.append(len(self._ids))
        self._prompts.append(sample.num_prompt_tokens)

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        i = range(len(self))[index]
        ids = self._ids[self._starts[i] : self._starts[i + 1]]
        return Sample(tuple(ids), self._prompts[i], self._untrained.get(i, ()))


def load(
    source: str,
    tokenizer: Any,
    *,
    held_out_share: float = 0.05,
    allow_prompts: bool = False,
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
        allow_prompts: rows that are a prompt alone are taken, with nothing to learn in them: what
            follows is to be generated.

    Raises:
        ValueError: there is no such source, or it holds fewer than two different rows that can be
            used.
    """
    if not 0.0 < held_out_share <= 0.5:
        raise ValueError(f"held_out_share must be above 0 and at most 0.5, got {held_out_share}")
    encoded, hashes, bad, only = _read(source, tokenizer, allow_prompts=allow_prompts)
    if len(set(hashes)) == 1 and only is not None and only.kind == "text":
        train, held_out = (encode(part, tokenizer) for part in _cut(only, held_out_share))
        if isinstance(train, Sample) and isinstance(held_out, Sample):
            return Corpus([train], [held_out], bad)
    if len(set(hashes)) < 2:
        raise ValueError(
            f"{source} holds {len(set(hashes))} different rows that can be used, and one to train "
            f"on and one to hold out are needed{_first(bad)}"
        )
    return Corpus(*_divided(encoded, hashes, held_out_share), bad)


def load_whole(
    source: str, tokenizer: Any, *, allow_prompts: bool = False
) -> tuple[Samples, tuple[BadRow, ...]]:
    """All rows of a source that ``load`` would divide, and those left out.

    Raises:
        ValueError: there is no such source, or no row of it can be used.
    """
    encoded, _, bad, _ = _read(source, tokenizer, allow_prompts=allow_prompts)
    if not encoded:
        raise ValueError(f"{source} holds no row that can be used{_first(bad)}")
    return encoded, bad


def _read(
    source: str, tokenizer: Any, *, allow_prompts: bool
) -> tuple[Samples, Sequence[int], tuple[BadRow, ...], Row | None]:
    """Samples, hashes of their rows, rows left out, and the first row that can be used."""
    bad: list[BadRow] = []
    hashes = array("Q")
    encoded = Samples()
    first: Row | None = None
    for row in read_rows(source):
        if isinstance(row, BadRow):
            bad.append(row)
            continue
        sample = encode(row, tokenizer, allow_prompts=allow_prompts)
        if isinstance(sample, str):
            bad.append(BadRow(row.source, row.line, sample))
            continue
        first = first or row
        hashes.append(row.hash)
        encoded.append(sample)
    return encoded, hashes, tuple(bad), first


def _first(bad: Sequence[BadRow]) -> str:
    return f"; the first that cannot be used is {bad[0]}" if bad else ""


def _cut(row: Row, share: float) -> tuple[Row, Row]:
    """A text in two, at the end of a line where one lies within a tenth of the text before."""
    (text,) = row.parts
    at = min(len(text) - 1, int(len(text) * (1.0 - share)))
    line_end = text.rfind("\n", max(0, at - len(text) // 10), at) + 1
    at = line_end or at
    return (
        Row("text", (text[:at],), row.source, row.line),
        Row("text", (text[at:],), row.source, row.line),
    )


def _divided(
    samples: Sequence[Sample], hashes: Sequence[int], share: float
) -> tuple[Samples, Samples]:
    """Training and held-out samples; of different ones, some on either side."""
    lowest, highest = min(hashes), max(hashes)
    bound = min(max(int(share * HASHES), lowest + 1), highest)
    train, held_out = Samples(), Samples()
    for sample, number in zip(samples, hashes, strict=True):
        (held_out if number < bound else train).append(sample)
    return train, held_out


def prompts(
    samples: Sequence[Sample], *, limit: int, max_prompt_tokens: int, seed: int = 0
) -> list[tuple[int, ...]]:
    """Beginnings to generate from: a row's prompt, or places all over a plain text.

    Args:
        samples: such as ``Corpus.held_out``.
        limit: most prompts; drawn by ``seed``.
        max_prompt_tokens: of a longer prompt its end is taken; of a text, prompts of so many tokens
            are taken, or its first half where it is shorter than two of them.

    Raises:
        ValueError: none is left.
    """
    places: list[tuple[int, int, int]] = []
    for i, sample in enumerate(samples):
        if end := sample.num_prompt_tokens:
            places.append((i, max(0, end - max_prompt_tokens), end))
        else:
            length = min(max_prompt_tokens, len(sample.ids) // 2)
            starts = range(0, len(sample.ids) - length, 2 * max(1, length))
            places += [(i, start, start + length) for start in starts if length]
    if not places:
        raise ValueError("there is nothing to begin with: no row has a prompt or two tokens")
    random.Random(seed).shuffle(places)
    return [samples[i].ids[start:end] for i, start, end in places[:limit]]
