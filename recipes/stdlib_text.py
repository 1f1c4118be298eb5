"""Python's standard library as data: ``data=stdlib``, text that every machine has.

The built-in checkpoint, and whatever ``pretrain_small.py`` trains, hold the same modules out.
"""

from collections.abc import Mapping
from typing import Any

from corpus import read_documents, stdlib_files
from data import Corpus, Samples
from rows import Row
from tokens import Sample, encode

STDLIB = "stdlib"


def stdlib_corpus(tokenizer: Any) -> Corpus:
    """Modules that ``pretrain_small.py`` trains on, and those that it holds out."""
    train, held_out = read_documents(stdlib_files())
    return Corpus(_encoded(train, tokenizer), _encoded(held_out, tokenizer), ())


def _encoded(documents: Mapping[str, str], tokenizer: Any) -> Samples:
    samples = Samples()
    for name in sorted(documents):
        sample = encode(Row("text", (documents[name],), name, 1), tokenizer)
        if isinstance(sample, Sample):
            samples.append(sample)
    return samples
