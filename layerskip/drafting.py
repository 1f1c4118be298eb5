"""Drafting: guess the next tokens with a subset of the layers."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from layerskip.cache import KVCache, Segment
from layerskip.model import DecoderStack
from layerskip.plan import DraftPlan
from layerskip.sampling import Sampler, greedy_tokens


@dataclass(frozen=True)
class DraftRequest:
    """What one row asks for.

    Attributes:
        row: of the cache.
        length: committed slots; the pending token goes to slot ``length``.
        pending: emitted token that is not in the cache yet.
        num_draft_tokens: how many to draft; 0 is plain decoding.
        sampler: shared with verification.
    """

    row: int
    length: int
    pending: int
    num_draft_tokens: int
    sampler: Sampler


@dataclass(frozen=True)
class Draft:
    """Drafted tokens of one row, and the hidden states verify goes on from.

    Attributes:
        tokens: drafted ids; may be fewer than asked for.
        shared: for each token that went through the shared layers (the pending one and all
            drafted but the last), its hidden state after them, ``(hidden,)``. Their keys and
            values in the shared layers are in the cache.
    """

    tokens: tuple[int, ...]
    shared: tuple[Tensor, ...]


class EarlyExitDrafter:
    """Drafts with ``plan.layers``, one token of every asking row at a time."""

    def __init__(self, stack: DecoderStack, plan: DraftPlan) -> None:
        self.stack, self.plan = stack, plan
        self._rest = plan.layers[plan.shared_depth :]

    def draft(self, requests: Sequence[DraftRequest], cache: KVCache) -> list[Draft]:
        """One draft per request. Writes scratch slots only."""
        tokens: list[list[int]] = [[] for _ in requests]
        shared: list[list[Tensor]] = [[] for _ in requests]
        for step in range(max(r.num_draft_tokens for r in requests)):
            asking = [i for i, r in enumerate(requests) if step < r.num_draft_tokens]
            inputs = [tokens[i][-1] if step else requests[i].pending for i in asking]
            segments = [Segment(requests[i].row, requests[i].length + step, 1) for i in asking]
            hidden = self.stack.embed(inputs)
            hidden = self.stack.run_layers(hidden, range(self.plan.shared_depth), cache, segments)
            for i, state in zip(asking, hidden, strict=False):
                shared[i].append(state)
            hidden = self.stack.run_layers(hidden, self._rest, cache, segments)
            logits = self.stack.logits(hidden)
            for i, token in zip(asking, self._pick(requests, asking, logits, step), strict=True):
                tokens[i].append(token)
        return [Draft(tuple(t), tuple(s)) for t, s in zip(tokens, shared, strict=True)]

    def _pick(
        self, requests: Sequence[DraftRequest], asking: Sequence[int], logits: Tensor, step: int
    ) -> list[int]:
        if all(requests[i].sampler.params.greedy for i in asking):
            return greedy_tokens(logits[: len(asking)])
        return [
            requests[i].sampler.pick(logits[n : n + 1], requests[i].length + step + 1)[0]
            for n, i in enumerate(asking)
        ]
