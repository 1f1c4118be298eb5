"""Drafters that are wrong as often as told: real draft passes, then other tokens; and look-ups.

They know the plain text, and nothing else does: greedy and coupled output does not depend on what
is drafted. The states of the tokens that were really drafted do not belong to those put in their
place, so verify gets none and runs every token through all layers, in a pass as wide as otherwise.
The confidence is still the model's, about tokens that it never gets to see judged.
"""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from layerskip import LookupStore, SelfSpeculativeLM
from layerskip.cache import KVCache
from layerskip.draft_head import DraftHead
from layerskip.drafting import Draft, DraftRequest, EarlyExitDrafter
from layerskip.lookup import LONGEST_MATCH, Guess

Drafter = TypeVar("Drafter", bound="Spoiling")


class Spoiling(EarlyExitDrafter):
    """Drafts, and puts other tokens in the place of its own."""

    def __init__(self, lm: SelfSpeculativeLM) -> None:
        assert lm.plan is not None
        super().__init__(lm.stack, lm.plan)
        self.random = random.Random(0)

    def draft(
        self,
        requests: Sequence[DraftRequest],
        cache: KVCache,
        head: DraftHead | None = None,
        going_on: Callable[[Sequence[int]], Collection[int]] | None = None,
    ) -> list[Draft]:
        drafts = super().draft(requests, cache, head, going_on)
        return [self.spoilt(r, d) for r, d in zip(requests, drafts, strict=True)]

    @property
    def may_look_back(self) -> bool:
        """What it puts in the place of its tokens depends on where they are."""
        return False

    def spoilt(self, request: DraftRequest, draft: Draft) -> Draft:
        raise NotImplementedError


class Corrupted(Spoiling):
    """Drafts the right token with a chance of ``accuracy``, else a wrong one.

    ``text`` is what plain decoding makes of the prompt, the prompt included; it has to be set
    before each request.
    """

    def __init__(self, lm: SelfSpeculativeLM, accuracy: float) -> None:
        super().__init__(lm)
        self.accuracy, self.text = accuracy, ()

    def spoilt(self, request: DraftRequest, draft: Draft) -> Draft:
        at = request.length
        assert len(self.text) > at, "the text is of another prompt"
        assert self.text[at] == request.pending, "the text is of another prompt"
        coming = self.text[at + 1 : at + 1 + len(draft.tokens)]
        # Past the text's end nothing is emitted, whatever is drafted.
        right = [*coming, *draft.tokens[len(coming) :]]
        return replace(draft, tokens=tuple(map(self.instead, right)), shared=())

    @property
    def may_look_back(self) -> bool:
        """It may where no draft is ever right, nor would have been."""
        return not self.accuracy

    def looked_back(self, states: Tensor, head: DraftHead | None = None) -> Tensor:
        """As surely as the model would have, it would have drafted any token at all."""
        logits = super().looked_back(states, head)
        # All by as much, in one step: what it takes to spoil them is timed as the decoder's work.
        return logits.roll(self.random.randrange(1, logits.shape[-1]), -1)

    def instead(self, right: int) -> int:
        if self.random.random() < self.accuracy:
            return right
        return (right + 1) % self.stack.vocab_size


class CorruptedRows(Corrupted):
    """The same of each row; ``texts`` has one's text and its accuracy, in the order of joining a
    batch that nobody leaves before all have joined."""

    def __init__(self, lm: SelfSpeculativeLM) -> None:
        super().__init__(lm, 0.0)
        self.texts: list[tuple[tuple[int, ...], float]] = []

    def spoilt(self, request: DraftRequest, draft: Draft) -> Draft:
        self.text, self.accuracy = self.texts[request.slot_row]
        return super().spoilt(request, draft)


class Losing(Spoiling):
    """Drafts another token than its own with the chance ``lost``; greedy and coupled only."""

    lost = 0.0

    def spoilt(self, request: DraftRequest, draft: Draft) -> Draft:
        if not self.lost:
            return draft
        tokens = tuple(
            (t + 1) % self.stack.vocab_size if self.random.random() < self.lost else t
            for t in draft.tokens
        )
        return replace(draft, tokens=tokens, shared=())  # the states are of the tokens before


class Random(Corrupted):
    """Drafts any token at all."""

    def __init__(self, lm: SelfSpeculativeLM) -> None:
        super().__init__(lm, 0.0)

    def instead(self, right: int) -> int:
        return self.random.randrange(self.stack.vocab_size)


class Misleading(LookupStore):
    """Offers ``token`` over and over, as if it had followed the longest match of a text's own."""

    token = 0

    def guess(self, max_tokens: int, tail: Sequence[int]) -> Guess:
        return Guess((self.token,) * max_tokens, LONGEST_MATCH)


def install(lm: SelfSpeculativeLM, drafter: Drafter) -> Drafter:
    """Have ``lm`` draft with it."""
    lm._drafter = drafter
    return drafter
