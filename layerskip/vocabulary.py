"""Which token ids a draft may guess: the frequent ones of the user's own texts.

A draft over a part of the vocabulary reads a part of the head. What it can't guess, verify still
emits: the choice is about speed alone.
"""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

from layerskip.params import check_integer, check_number

KEPT_MULTIPLE = 128  # columns that kernels take at a time
DOUBT = 3.0  # standard errors by which coverage must fall short before it is said


def coverage(vocabulary: Collection[int], tokens: Iterable[int]) -> float:
    """Share of ``tokens`` that are in ``vocabulary``; 1.0 of none."""
    kept, counts = frozenset(vocabulary), Counter(tokens)
    total = counts.total()
    return sum(n for token, n in counts.items() if token in kept) / total if total else 1.0


def choose_vocabulary(
    texts: Iterable[Sequence[int]],
    *,
    vocab_size: int,
    least_coverage: float | None = None,
    size: int | None = None,
    always: Collection[int] = (),
    multiple: int = KEPT_MULTIPLE,
) -> tuple[int, ...]:
    """The ids that a draft keeps: the most frequent ones of ``texts``.

    Args:
        texts: token ids of outputs like those to come, and of prompts, which outputs repeat.
        vocab_size: of the model.
        least_coverage: share of the tokens of ``texts`` that the kept ids reach, in [0, 1]: as few
            ids as that takes.
        size: how many ids to keep, instead.
        always: ids kept whatever their frequency: end of text, other special ones.
        multiple: the number kept is rounded up to a multiple of it, by the next in rank, then by
            the lowest ids. In byte-pair vocabularies these are bytes and the earliest merges.

    Returns:
        Ascending ids; all of them where rounding leaves none out.

    Raises:
        ValueError: neither or both of ``least_coverage`` and ``size``, or an id out of range.
    """
    check_integer("vocab_size", vocab_size, 1)
    check_integer("multiple", multiple, 1)
    if (least_coverage is None) == (size is None):
        raise ValueError(f"give least_coverage or size, got {least_coverage!r} and {size!r}")
    counts = Counter(chain.from_iterable(texts))
    for token in (*always, *counts):
        check_integer("a token id", token, 0, vocab_size - 1)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    order = list(dict.fromkeys((*sorted(always), *ranked, *range(vocab_size))))
    least = max(1, len(set(always)))
    if size is None:
        check_number("least_coverage", least_coverage, 0.0, 1.0)
        size = _smallest(order, counts, float(least_coverage or 0.0))
    check_integer("size", size, 0)
    wanted = -(-max(size, least) // multiple) * multiple
    return tuple(sorted(order[:wanted]))


def _smallest(order: Sequence[int], counts: Counter[int], least_coverage: float) -> int:
    """How many ids from the start of ``order`` make up that share of all tokens."""
    missing, size = least_coverage * counts.total(), 0
    while missing > 0 and size < len(order):
        missing -= counts[order[size]]
        size += 1
    return size


class CoverageMeter:
    """Coverage of a vocabulary over the last tokens that were decoded, and when it is too low.

    Args:
        vocabulary: the kept ids.
        least_coverage: what the vocabulary was chosen for; below it ``alarm`` speaks.
        window: tokens that are remembered.
    """

    def __init__(
        self, vocabulary: Collection[int], *, least_coverage: float, window: int = 4096
    ) -> None:
        check_number("least_coverage", least_coverage, 0.0, 1.0)
        check_integer("window", window, 1)
        self.vocabulary, self.least_coverage = frozenset(vocabulary), least_coverage
        self._kept: deque[bool] = deque(maxlen=window)
        self._told = False

    def news(self) -> str | None:
        """``alarm``, once: again only after coverage has been as promised."""
        alarm, told = self.alarm, self._told
        self._told = alarm is not None
        return None if told else alarm

    def observe(self, tokens: Iterable[int]) -> None:
        """Count tokens that the target emitted."""
        self._kept.extend(token in self.vocabulary for token in tokens)

    @property
    def coverage(self) -> float:
        """Of the remembered tokens; 1.0 of none."""
        return sum(self._kept) / len(self._kept) if self._kept else 1.0

    @property
    def alarm(self) -> str | None:
        """One sentence once coverage is below ``least_coverage`` by more than chance explains."""
        count, least = len(self._kept), self.least_coverage
        missed, expected = count - sum(self._kept), count * (1.0 - least)
        if missed <= expected + 1.0 + DOUBT * math.sqrt(expected * least):
            return None
        return (
            f"the draft vocabulary covers {self.coverage:.1%} of the last {count} tokens, and was "
            f"chosen for {least:.1%}: choose it again from texts like these"
        )
