"""Drafting: guess the next tokens with a subset of the layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from layerskip.cache import KVCache, Segment
from layerskip.draft_head import DraftHead, greedy_kept, spread
from layerskip.model import DecoderStack
from layerskip.plan import DraftPlan
from layerskip.sampling import Sampler, greedy_tokens

Guesser = Callable[[Sequence[int], int], Sequence[int]]


@dataclass(frozen=True)
class DraftRequest:
    """What one row asks for.

    Attributes:
        row: of the cache.
        length: committed slots; the pending token goes to slot ``length``.
        pending: emitted token that is not in the cache yet.
        num_draft_tokens: how many to draft; 0 is plain decoding.
        sampler: shared with verification.
        context: prompt and output, for processors and grammar; empty if there is neither.
        goes_on: asked after each token, with its confidence (``Drawn``); None drafts
            ``num_draft_tokens``. The token stays in any case.
        guess: looked-up tokens after those drafted so far, at most so many: the draft's layers
            check them in one pass, which changes no drafted token. None: there is no look-up.
        num_guesses: most of them in one pass.
        own_ids: tokens beyond the draft vocabulary that this row may draft, if there is one.
    """

    row: int
    length: int
    pending: int
    num_draft_tokens: int
    sampler: Sampler
    context: tuple[int, ...] = ()
    goes_on: Callable[[float], bool] | None = None
    guess: Guesser | None = None
    num_guesses: int = 0
    own_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Draft:
    """Drafted tokens of one row, and the hidden states verify goes on from.

    Attributes:
        tokens: drafted ids; may be fewer than asked for.
        shared: for the pending token and the first drafted ones, as far as they went through the
            shared layers (of an early exit's draft all but the last, of looked-up tokens none),
            the hidden state after them, ``(hidden,)``. Their keys and values in the shared
            layers are in the cache.
        q: for token-level and block verification, the distribution that each of ``tokens`` was
            drawn from, ``(vocab,)`` float64.
        num_passes: draft passes that the row took part in.
        num_positions: tokens that they ran, wrong guesses among them.
    """

    tokens: tuple[int, ...]
    shared: tuple[Tensor, ...]
    q: tuple[Tensor, ...] = ()
    num_passes: int = 0
    num_positions: int = 0


NO_DRAFT = Draft((), ())


class EarlyExitDrafter:
    """Drafts with ``plan.layers``: in each pass one token of every asking row, and as many more
    as its look-up guessed right."""

    def __init__(self, stack: DecoderStack, plan: DraftPlan) -> None:
        self.stack, self.plan = stack, plan
        self._rest = plan.layers[plan.shared_depth :]

    def draft(
        self,
        requests: Sequence[DraftRequest],
        cache: KVCache,
        head: DraftHead | None = None,
        pays: Callable[[Sequence[int]], bool] | None = None,
    ) -> list[Draft]:
        """One draft per request. Writes scratch slots only.

        Args:
            head: over the draft vocabulary and all requests' ``own_ids``; None: the model's own.
            pays: asked before each pass but the first with the places of the requests that would
                take part; False ends all drafts.
        """
        growing = [_Growing(request) for request in requests]
        while places := [i for i, g in enumerate(growing) if not g.done]:
            asking = [growing[i] for i in places]
            if pays is not None and asking[0].num_passes and not pays(places):
                break
            self._grow(asking, cache, head)
        return [g.draft() for g in growing]

    def _grow(self, asking: "Sequence[_Growing]", cache: KVCache, head: DraftHead | None) -> None:
        """One pass: each row's last token, and what it guesses to follow."""
        inputs = [g.inputs() for g in asking]
        segments = [
            Segment(g.request.row, g.position - 1, len(tokens))
            for g, tokens in zip(asking, inputs, strict=True)
        ]
        flat = [token for tokens in inputs for token in tokens]
        hidden = self.stack.embed(flat)
        hidden = self.stack.run_layers(hidden, range(self.plan.shared_depth), cache, segments)
        deep = self.stack.run_layers(hidden, self._rest, cache, segments)
        logits = (self.stack.logits if head is None else head)(deep)[: len(flat)]
        for g, given in zip(asking, inputs, strict=True):
            g.prepare(given)
        bare = [g for g in asking if g.request.sampler.is_argmax]
        tokens = [] if not bare else _greedy(logits, head)
        sure = any(g.request.goes_on is not None for g in bare)
        likeliest = logits.float().softmax(-1).amax(-1).tolist() if sure else []
        done = 0
        for g, given in zip(asking, inputs, strict=True):
            at = slice(done, done + len(given))
            if g.request.sampler.is_argmax:
                g.take(given, hidden[at], tokens[at], likeliest[at])
            else:
                g.draw(given, hidden[at], logits[at], head)
            done += len(given)


def _greedy(logits: Tensor, head: DraftHead | None) -> list[int]:
    return greedy_tokens(logits) if head is None else greedy_kept(logits, head.ids)


@dataclass(eq=False)
class _Growing:
    """One row's draft while it is made."""

    request: DraftRequest
    tokens: list[int] = field(default_factory=list)
    shared: list[Tensor] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    num_passes: int = 0
    num_positions: int = 0
    ended: bool = False

    @property
    def done(self) -> bool:
        return self.ended or len(self.tokens) >= self.request.num_draft_tokens

    @property
    def position(self) -> int:
        """Of the next drafted token."""
        return self.request.length + len(self.tokens) + 1

    def inputs(self) -> list[int]:
        """What goes through the layers next: the last token and guesses."""
        request = self.request
        self.num_passes += 1
        last = self.tokens[-1] if self.tokens else request.pending
        room = min(request.num_guesses, request.num_draft_tokens - len(self.tokens) - 1)
        guessed = request.guess(self.tokens, room) if request.guess and room > 0 else ()
        self.num_positions += 1 + len(guessed)
        return [last, *guessed]

    def prepare(self, inputs: Sequence[int]) -> None:
        """What is known of the scores before the pass is read."""
        request, constraint = self.request, self.request.sampler.constraint
        if constraint is not None:
            constraint.prepare((*request.context, *self.tokens, *inputs[1:]), len(inputs))

    def take(
        self,
        inputs: Sequence[int],
        states: Tensor,
        tokens: Sequence[int],
        likeliest: Sequence[float],
    ) -> None:
        """Tokens of a greedy row: ``tokens[i]`` follows ``inputs[i]``."""
        for i, token in enumerate(tokens):
            self.shared.append(states[i])
            self.tokens.append(token)
            if not self._follows(inputs, i, likeliest[i] if likeliest else 1.0):
                return

    def draw(
        self, inputs: Sequence[int], states: Tensor, logits: Tensor, head: DraftHead | None
    ) -> None:
        """Tokens of a sampled row, or of one with processors."""
        request = self.request
        for i in range(len(inputs)):
            self.shared.append(states[i])
            drawn = request.sampler.draft(
                logits[i : i + 1] if head is None else self._spread(logits[i : i + 1], head),
                self.position,
                request.length + 1,
                (*request.context, *self.tokens),
                with_confidence=request.goes_on is not None,
            )
            if drawn is None:
                self.ended = True
                return
            self.tokens.append(drawn.token)
            if drawn.q is not None:
                self.q.append(drawn.q)
            if not self._follows(inputs, i, drawn.confidence):
                return

    def _spread(self, logits: Tensor, head: DraftHead) -> Tensor:
        """Over the whole vocabulary. What the head knows for other rows' sake only is left out:
        q must not depend on the neighbours."""
        scores = spread(logits, head.ids, self.request.sampler.vocab_size)
        foreign = [i for i in head.extra_ids if i not in self.request.own_ids]
        if foreign:
            scores[:, foreign] = float("-inf")
        return scores

    def _follows(self, inputs: Sequence[int], i: int, confidence: float) -> bool:
        """Whether the token just drafted is the next one that went through the layers."""
        goes_on = self.request.goes_on
        if goes_on is not None and not goes_on(confidence):
            self.ended = True
        # The token stays and is verified: ending here leaves the output's distribution alone.
        if self.request.sampler.closed((*self.request.context, *self.tokens)):
            self.ended = True
        return not self.done and i + 1 < len(inputs) and inputs[i + 1] == self.tokens[-1]

    def draft(self) -> Draft:
        # A state without a token drafted from it is left: verify runs that token by itself.
        shared = tuple(self.shared[: len(self.tokens)])
        return Draft(tuple(self.tokens), shared, tuple(self.q), self.num_passes, self.num_positions)
