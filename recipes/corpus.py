"""Training text every machine has, and its split: Python's standard library, or your own files.

A file is held out by the SHA-256 of its module path, so the split is the same on every machine
and no function of a held-out module is ever trained on.
"""

import hashlib
import json
import platform
import random
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from layerskip.files import write_text
from layerskip.prompts import read_text

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_EVERY = 40  # files
MAX_FILE_BYTES = 300_000  # larger ones in the standard library are tables, not code
# Newlines, indentation and single digits stand alone: easy tokens that early layers get right.
SPLIT = r"\n| {2,}| ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+|\s"


def is_held_out(module_path: str) -> bool:
    """True for about one module path in ``HELD_OUT_EVERY``, by its hash alone."""
    return _path_hash(module_path) % HELD_OUT_EVERY == 0


def _path_hash(path: str) -> int:
    return int(hashlib.sha256(path.encode()).hexdigest(), 16)


def stdlib_files() -> Iterator[tuple[str, Path]]:
    """(module path, file) of the running Python's standard library, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith("encodings/"):  # code pages: tables that differ in a few entries
            continue
        if "site-packages" not in name and 200 < path.stat().st_size < MAX_FILE_BYTES:
            yield name, path


def text_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """(relative path, file) of every ``.py``, ``.txt`` and ``.md`` file under ``folder``."""
    for path in sorted(p for p in [folder, *folder.rglob("*")] if p.is_file()):
        if path.suffix in {".py", ".txt", ".md"}:
            yield (path.name if path == folder else path.relative_to(folder).as_posix()), path


def read_documents(files: Iterable[tuple[str, Path]]) -> tuple[dict[str, str], dict[str, str]]:
    """Read files as (training, held-out) documents, both of any text there is; files that are
    empty, such as many __init__.py, and what is not UTF-8 are left out."""
    train: dict[str, str] = {}
    held_out: dict[str, str] = {}
    for name, path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            (held_out if is_held_out(name) else train)[name] = text
    if train and held_out:
        return train, held_out
    train, held_out = train | held_out, {}  # too few files for one in forty
    if len(train) > 1:  # the lowest hash
        name = min(train, key=_path_hash)
        held_out[name] = train.pop(name)
    else:  # one file: its last twentieth
        for name, text in train.items():
            cut = len(text) - len(text) // 20
            train[name], held_out[name] = text[:cut], text[cut:]
    return train, held_out


def read_questions(path: Path) -> list[str]:
    """GSM8K-style JSON lines (``question``, ``answer``) as plain documents."""
    documents = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            documents.append(f"Question: {row['question']}\nAnswer: {row['answer']}")
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{path} line {number} is no JSON object with 'question' and 'answer'"
            ) from None
    return documents


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; lossless on any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Corpus:
    """Token streams: training code and math, and held-out documents with their byte counts.

    Args:
        out: folder of the run. A ``tokenizer.json`` in it is the tokenizer; else one is trained.

    Attributes:
        found: whether the tokenizer was there.
    """

    def __init__(
        self,
        out: Path,
        *,
        vocab_size: int,
        seed: int,
        text: Path | None = None,
        math: Path | None = None,
        math_held_out: Path | None = None,
    ) -> None:
        python = f"the standard library of Python {platform.python_version()} (PSF licence)"
        self.source = python if text is None else f"text files in {text.name!r}"
        train, self.held_out = read_documents(stdlib_files() if text is None else text_files(text))
        if not train:
            raise ValueError(f"{text} holds no .py, .txt or .md text to train on")
        questions = read_questions(math) if math else []
        self.math_held_out = read_questions(math_held_out) if math_held_out else []
        self._path = out / "tokenizer.json"
        self.found = self._path.exists()
        if self.found:
            self.tokenizer = Tokenizer.from_file(str(self._path))
            if (size := self.tokenizer.get_vocab_size()) > vocab_size:
                raise ValueError(
                    f"{self._path} has {size} ids, and the model {vocab_size}; delete it to have "
                    "one trained, or give a larger vocab_size"
                )
        else:
            self.tokenizer = train_tokenizer([*train.values(), *questions], vocab_size)
        if all(len(self.tokenizer.encode(held).ids) < 2 for held in self.held_out.values()):
            names = ", ".join(self.held_out)
            raise ValueError(
                f"what is held out of {text} ({names}) is shorter than two tokens; add more text"
            )
        names = sorted(train)
        random.Random(seed).shuffle(names)
        self.code = self.encode(train[name] for name in names)
        self.math = self.encode(questions) if questions else None
        streams = [self.code] if self.math is None else [self.code, self.math]
        self.digest = hashlib.sha256(b"".join(s.tobytes() for s in streams)).hexdigest()[:16]

    def keep_tokenizer(self) -> None:
        """Write the tokenizer into the run's folder, if it is not there. Not before there is a
        state: of a run that came to nothing it would be the tokenizer of the next one's text."""
        if not self._path.exists():
            write_text(self._path, self.tokenizer.to_str())

    def encode(self, texts: Iterator[str] | list[str]) -> np.ndarray:
        """One uint16 stream, documents separated by the end-of-text token."""
        end = self.tokenizer.token_to_id(END_OF_TEXT)
        encoded = self.tokenizer.encode_batch_fast(list(texts))
        return np.concatenate([np.array([*e.ids, end], dtype=np.uint16) for e in encoded])

    def batch(
        self, rng: np.random.Generator, rows: int, length: int, math_share: float
    ) -> torch.Tensor:
        """``(rows, length + 1)`` int64 ids, each row a random piece of text."""
        pieces = []
        for _ in range(rows):
            use_math = self.math is not None and rng.random() < math_share
            stream = self.math if use_math else self.code
            start = int(rng.integers(0, max(1, len(stream) - length - 1)))
            pieces.append(np.resize(stream[start : start + length + 1], length + 1))
        return torch.from_numpy(np.stack(pieces).astype(np.int64))
