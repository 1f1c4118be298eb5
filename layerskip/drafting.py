"""Drafting: guess the next tokens with a subset of the layers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

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
        context: prompt and output, for processors; empty if there are none.
    """

    row: int
    length: int
    pending: int
    num_draft_tokens: int
    sampler: Sampler
    context: tuple[int, ...] = ()


@dataclass(frozen=True)
class Draft:
    """Drafted tokens of one row, and the hidden states verify goes on from.

    Attributes:
        tokens: drafted ids; may be fewer than asked for.
        shared: for each token that went through the shared layers (the pending one and all
            drafted but the last), its hidden state after them, ``(hidden,)``. Their keys and
            values in the shared layers are in the cache.
        q: for token-level and block verification, the distribution that each of ``tokens`` was
            drawn from, ``(vocab,)`` float64.
    """

    tokens: tuple[int, ...]
    shared: tuple[Tensor, ...]
    q: tuple[Tensor, ...] = ()


class EarlyExitDrafter:
    """Drafts with ``plan.layers``, one token of every asking row at a time."""

    def __init__(self, stack: DecoderStack, plan: DraftPlan) -> None:
        self.stack, self.plan = stack, plan
        self._rest = plan.layers[plan.shared_depth :]

    def draft(self, requests: Sequence[DraftRequest], cache: KVCache) -> list[Draft]:
        """One draft per request. Writes scratch slots only."""
        growing = [_Growing(request) for request in requests]
        for _ in range(max(r.num_draft_tokens for r in requests)):
            asking = [g for g in growing if not g.done]
            if not asking:
                break
            segments = [Segment(g.request.row, g.position - 1, 1) for g in asking]
            hidden = self.stack.embed([g.last for g in asking])
            hidden = self.stack.run_layers(hidden, range(self.plan.shared_depth), cache, segments)
            for g, state in zip(asking, hidden, strict=False):
                g.shared.append(state)
            logits = self.stack.logits(self.stack.run_layers(hidden, self._rest, cache, segments))
            if all(g.request.sampler.is_argmax for g in asking):
                for g, token in zip(asking, greedy_tokens(logits[: len(asking)]), strict=True):
                    g.tokens.append(token)
            else:
                for i, g in enumerate(asking):
                    g.draw(logits[i : i + 1])
        return [g.draft() for g in growing]


@dataclass(eq=False)
class _Growing:
    """One row's draft while it is made."""

    request: DraftRequest
    tokens: list[int] = field(default_factory=list)
    shared: list[Tensor] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    ended: bool = False

    @property
    def done(self) -> bool:
        return self.ended or len(self.tokens) >= self.request.num_draft_tokens

    @property
    def last(self) -> int:
        """The token that goes through the layers next."""
        return self.tokens[-1] if self.tokens else self.request.pending

    @property
    def position(self) -> int:
        """Of the next drafted token."""
        return self.request.length + len(self.tokens) + 1

    def draw(self, logits: Tensor) -> None:
        request = self.request
        context = (*request.context, *self.tokens)
        drawn = request.sampler.draft(logits, self.position, request.length + 1, context)
        if drawn is None:
            self.ended = True
            return
        token, q = drawn
        self.tokens.append(token)
        if q is not None:
            self.q.append(q)

    def draft(self) -> Draft:
        # A state without a token drafted from it is left: verify runs that token by itself.
        return Draft(tuple(self.tokens), tuple(self.shared[: len(self.tokens)]), tuple(self.q))
