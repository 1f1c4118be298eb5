"""The law of the text that a grammar's row emits, enumerated: plain, and by one round."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from layerskip.sampling import Sampler
from layerskip.verification import acceptance_chances, count_accepted, recovered

Text = tuple[int, ...]


@dataclass(frozen=True)
class Game:
    """A random target and a random draft that know a row's text, under one sampler.

    Attributes:
        sampler: with a grammar that few texts fit.
        prompt: before the text.
        seed: of the logits.
    """

    sampler: Sampler
    prompt: Text
    seed: int
    _known: dict[tuple[str, Text], Any] = field(default_factory=dict)

    def _once(self, kind: str, text: Text, make: Callable[[], Any]) -> Any:
        if (kind, text) not in self._known:
            self._known[kind, text] = make()
        return self._known[kind, text]

    def logits(self, text: Text, *, draft: bool = False) -> Tensor:
        """After ``text``, ``(1, vocab)``."""
        generator = torch.Generator().manual_seed(hash((self.seed, text)) % 2**40)
        target, other = 1.5 * torch.randn(2, 1, self.sampler.vocab_size, generator=generator)
        return target if not draft else 0.5 * target + other

    def probabilities(self, text: Text, *, draft: bool = False) -> Tensor:
        def make() -> Tensor:
            scores = self.sampler.scores(self.logits(text, draft=draft), self.prompt + text)
            return scores[0].double().softmax(-1)

        return self._once("q" if draft else "p", text, make)

    def closed(self, text: Text) -> bool:
        return self._once("closed", text, lambda: self.sampler.closed(self.prompt + text))

    def target_law(self, text: Text = ()) -> Counter[Text]:
        """Plain decoding's, from ``text`` on."""
        return self._once("law", text, lambda: self._target_law(text))

    def _target_law(self, text: Text) -> Counter[Text]:
        if self.closed(text):
            return Counter({text: 1.0})
        law: Counter[Text] = Counter()
        for token, p in _likely(self.probabilities(text)):
            for whole, chance in self.target_law((*text, token)).items():
                law[whole] += p * chance
        return law

    def drafts(self, most: int) -> Iterator[tuple[Text, Tensor, float]]:
        """Every draft with its q and its probability: it ends where the text does."""
        growing: list[tuple[Text, list[Tensor], float]] = [((), [], 1.0)]
        while growing:
            draft, q, chance = growing.pop()
            if len(draft) == most or (draft and self.closed(draft)):
                yield draft, torch.stack(q), chance
                continue
            row = self.probabilities(draft, draft=True)
            growing += [((*draft, token), [*q, row], chance * p) for token, p in _likely(row)]

    def round_law(self, most: int) -> Counter[Text]:
        """One round from the beginning, cut at the grammar's end, and the target after it."""
        law: Counter[Text] = Counter()
        way = self.sampler.verification
        for draft, q, probability in self.drafts(most):
            rows = torch.cat([self.logits(draft[:i]) for i in range(len(draft) + 1)])
            p = self.sampler.scores(rows, self.prompt + draft).double().softmax(-1)
            chances = acceptance_chances(way, p, q, draft)
            for pattern in itertools.product((True, False), repeat=len(chances)):
                weight = math.prod(c if s else 1 - c for c, s in zip(chances, pattern, strict=True))
                if weight == 0.0:
                    continue
                count = count_accepted(way, chances, [2.0 - 2 * s for s in pattern])
                whole = count == len(draft)
                after = p[count] if whole else recovered(way, p, q, draft, count)
                for token, chance in _likely(after):
                    text = self._cut((*draft[:count], token))
                    for end, rest in self.target_law(text).items():
                        law[end] += probability * weight * chance * rest
        return law

    def _cut(self, text: Text) -> Text:
        ends = (i for i in range(len(text) + 1) if self.closed(text[:i]))
        return text[: next(ends, len(text))]


def _likely(row: Tensor) -> list[tuple[int, float]]:
    """Tokens of ``(vocab,)`` probabilities that can come, with theirs."""
    ids = row.nonzero()[:, 0].tolist()
    return list(zip(ids, row[ids].tolist(), strict=True))


def assert_same_law(wanted: Counter[Text], got: Counter[Text]) -> None:
    assert set(wanted) == set(got)
    assert max(abs(wanted[t] - got[t]) for t in wanted) < 1e-12
    assert abs(sum(got.values()) - 1.0) < 1e-9
