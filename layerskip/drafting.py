"""Drafting: guess the next tokens with a subset of the layers."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from layerskip.cache import KVCache, Segment
from layerskip.constraint import NO_CONTEXT, Context
from layerskip.draft_head import DraftHead, greedy_kept, over_all
from layerskip.guessing import judged
from layerskip.model import DecoderStack, Head
from layerskip.plan import DraftPlan
from layerskip.row import ExitStates
from layerskip.sampling import Sampler, confidences, greedy_tokens, noisy_scores, portions


@dataclass(frozen=True)
class DraftRequest:
    """What one row asks for.

    Attributes:
        slot_row: of the cache.
        length: committed slots; the pending token goes to slot ``length``.
        pending: emitted token that is not in the cache yet.
        num_draft_tokens: how many to draft; 0 is plain decoding.
        sampler: shared with verification.
        context: prompt and output, for processors and grammar; empty if there is neither.
        goes_on: asked after each token, with its confidence (``Drawn``), whether the pass that
            drafted it has run for the next one, too, and the tokens so far; None drafts
            ``num_draft_tokens``. The token stays in any case.
        guess: looked-up tokens after those drafted so far, at most so many: the draft's layers
            check them in one pass, which changes no drafted token. None: there is no look-up.
        num_guesses: most of them in one pass.
        own_ids: tokens beyond the draft vocabulary that this row may draft, if there is one.
        exit_states: of the committed tokens that the adapter's block has yet to see.
        tells: whether the draft's confidences are wanted, if nothing asks for them meanwhile.
    """

    slot_row: int
    length: int
    pending: int
    num_draft_tokens: int
    sampler: Sampler
    context: Context = NO_CONTEXT
    goes_on: Callable[[float, bool, Sequence[int]], bool] | None = None
    guess: Callable[[Sequence[int], int], Sequence[int]] | None = None
    num_guesses: int = 0
    own_ids: frozenset[int] = frozenset()
    exit_states: ExitStates | None = None
    tells: bool = False

    @property
    def with_confidence(self) -> bool:
        """Whether anybody wants to know how sure the draft is."""
        return self.tells or self.goes_on is not None


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
        confidences: of ``tokens`` (``Drawn``), if they are wanted; of looked-up ones none.
        num_looked_up: the last ones of an early exit's, which no pass drafted.
    """

    tokens: tuple[int, ...]
    shared: tuple[Tensor, ...]
    q: tuple[Tensor, ...] = ()
    num_passes: int = 0
    num_positions: int = 0
    confidences: tuple[float, ...] = ()
    num_looked_up: int = 0


NO_DRAFT = Draft((), ())


class EarlyExitDrafter:
    """Drafts with ``plan.layers``: in each pass one token of every asking row, and as many more
    as its look-up guessed right.

    The stack's adapter, if it is of the plan's exit, runs after them. Its block may not have seen
    the last committed tokens: those of plain rounds and of look-ups, the last one of a draft that
    was accepted as a whole, and before the first draft the prompt, if no cache brought its states.
    It sees them in the pass that goes on from them.
    """

    def __init__(self, stack: DecoderStack, plan: DraftPlan) -> None:
        self.stack, self.plan = stack, plan
        self._rest = stack.draft_layers(plan)[plan.shared_depth :]
        self._adapter = stack.adapter_at(plan)
        self._heads: tuple[DraftHead | None, Head] = (None, stack.draft_head(plan))

    def draft(
        self,
        requests: Sequence[DraftRequest],
        cache: KVCache,
        head: DraftHead | None = None,
        going_on: Callable[[Sequence[int]], Collection[int]] | None = None,
    ) -> list[Draft]:
        """One draft per request. Writes scratch slots only, and of an adapter's block the committed
        slots that it lags behind in.

        Args:
            head: over the draft vocabulary and all requests' ``own_ids``; None: the model's own.
            going_on: asked before each pass but the first with the places of the requests that may
                take part: which of them do. The drafts of the others end.
        """
        growing = [_Growing(request) for request in requests]
        while places := [i for i, g in enumerate(growing) if not g.done]:
            if going_on is not None and growing[places[0]].num_passes:
                kept = going_on(places)
                for i in places:
                    growing[i].ended = i not in kept
                places = [i for i in places if i in kept]
                if not places:
                    break
            self._grow([growing[i] for i in places], cache, head)
        return [g.draft() for g in growing]

    @cached_property
    def may_look_back(self) -> bool:
        """Whether rounds that draft nothing leave what a draft would have begun with."""
        return self._adapter is None and self.plan.exit_layer is not None

    def looked_back(self, states: Tensor, head: DraftHead | None = None) -> Tensor:
        """Logits of what a draft's first pass would have drafted, where ``may_look_back``.

        Args:
            states: ``(tokens, hidden)`` after the exit, as ``Verifier.verify`` leaves them.
            head: as in ``draft``.

        Returns:
            ``(tokens, ids of the head)``.
        """
        return self._head_for(head)(states)[: len(states)]

    def _grow(self, asking: "Sequence[_Growing]", cache: KVCache, head: DraftHead | None) -> None:
        """One pass: each row's last token, and what it guesses to follow."""
        inputs = [g.inputs() for g in asking]
        segments = [
            Segment(g.request.slot_row, g.position - 1, len(tokens))
            for g, tokens in zip(asking, inputs, strict=True)
        ]
        flat = [token for tokens in inputs for token in tokens]
        hidden = self.stack.embed(flat)
        hidden = self.stack.run_layers(hidden, range(self.plan.shared_depth), cache, segments)
        deep = self._deepen(hidden, asking, cache, segments)
        logits = self._head_for(head)(deep)[: len(flat)]
        for g, given in zip(asking, inputs, strict=True):
            g.prepare(given)
        bare = [g for g in asking if g.request.sampler.is_argmax]
        scores = logits.float() if bare else logits
        tokens = _greedy(scores, head) if bare else []
        sure = any(g.request.with_confidence for g in bare)
        if sure and len(asking) == 1:  # nobody asks behind its first wrong guess
            scores = scores[: 1 + sum(judged(flat[1:], tokens))]
        told = confidences(scores) if sure else []
        drawn = _drawn(asking, logits, head) if len(flat) == len(asking) else {}
        done = 0
        for i, (g, given) in enumerate(zip(asking, inputs, strict=True)):
            at = slice(done, done + len(given))
            if g.request.sampler.is_argmax:
                g.take(given, hidden[at], tokens[at], told[at])
            elif i in drawn:
                token, confidence = drawn[i]
                g.take(given, hidden[at], [token], [confidence])
            else:
                g.draw(given, hidden[at], logits[at], head)
            done += len(given)

    def _deepen(
        self,
        hidden: Tensor,
        asking: "Sequence[_Growing]",
        cache: KVCache,
        segments: Sequence[Segment],
    ) -> Tensor:
        """What only the draft runs, over ``hidden`` and what the block has yet to see."""
        behind = [g.request.exit_states if g.num_passes == 1 else None for g in asking]
        if not any(states is not None and states.any for states in behind):
            return self.stack.run_layers(hidden, self._rest, cache, segments)
        pieces: list[Tensor] = []
        longer: list[Segment] = []
        for states, s, tokens in zip(behind, segments, _by_row(hidden, segments), strict=True):
            late = 0
            if states is not None:
                self._catch_up_prompt(states, cache, s.row)
                late = states.num_decoded
                pieces += states.decoded
            pieces.append(tokens)
            longer.append(Segment(s.row, s.start - late, late + s.count))
        deep = self.stack.run_layers(torch.cat(pieces), self._rest, cache, longer)
        rows = zip(_by_row(deep, longer), segments, strict=True)
        return torch.cat([part[-s.count :] for part, s in rows])

    def _catch_up_prompt(self, states: ExitStates, cache: KVCache, row: int) -> None:
        start = cache.adapter_lengths[row]
        for chunk in states.prompt:
            self.stack.adapt_chunk(chunk, cache, row, start)
            start += len(chunk)

    def catch_up(self, states: ExitStates, cache: KVCache, row: int, length: int) -> None:
        """Let the block see all of a row that it has not seen yet, up to slot ``length``."""
        self._catch_up_prompt(states, cache, row)
        if states.decoded:
            count = states.num_decoded
            segments = [Segment(row, length - count, count)]
            self.stack.run_layers(torch.cat(states.decoded), self._rest, cache, segments)

    def _head_for(self, part: DraftHead | None) -> Head:
        """The draft's head over a part of the vocabulary; an adapted one is made once for each."""
        if self._adapter is None:
            return self.stack.logits if part is None else part
        heads = self._heads  # read once: other threads draft with other parts
        if heads[0] is not part:
            heads = self._heads = (part, self.stack.draft_head(self.plan, part))
        return heads[1]


def _by_row(hidden: Tensor, segments: Sequence[Segment]) -> Sequence[Tensor]:
    """The pass's tokens, ``(tokens, hidden)`` of each segment; spare rows are left out."""
    counts = [s.count for s in segments]
    return hidden[: sum(counts)].split(counts)


def _greedy(logits: Tensor, head: DraftHead | None) -> list[int]:
    return greedy_tokens(logits) if head is None else greedy_kept(logits, head.ids)


def _drawn(
    growing: "Sequence[_Growing]", logits: Tensor, head: DraftHead | None
) -> dict[int, tuple[int, float]]:
    """Tokens and confidences of all rows that are drawn by their own noise alone, by place, if they
    are several: as ``Sampler.draft`` draws them one by one.

    Args:
        logits: ``(rows, ids of the head)``, of one token each.
    """
    drawn: dict[int, tuple[int, float]] = {}
    places = [i for i, g in enumerate(growing) if g.request.sampler.is_noisy_argmax]
    vocab_size = growing[0].request.sampler.vocab_size  # of a trimmed head, too
    for part in portions([1] * len(places), vocab_size, logits.device):
        if len(part) < 2:
            continue
        rows = [(i, growing[i]) for i in (places[p] for p in part)]
        samplers = [g.request.sampler for _, g in rows]
        own = torch.cat([g.over_all(logits[i : i + 1], head) for i, g in rows])
        scores = noisy_scores(samplers, own, [g.position for _, g in rows])[1]
        told = [1.0] * len(rows)
        if any(g.request.with_confidence for _, g in rows):
            told = confidences(scores, [s.params.temperature for s in samplers])
        found = zip(scores.argmax(-1).tolist(), told, strict=True)
        drawn |= zip((i for i, _ in rows), found, strict=True)
    return drawn


@dataclass(eq=False)
class _Growing:
    """One row's draft while it is made."""

    request: DraftRequest
    tokens: list[int] = field(default_factory=list)
    shared: list[Tensor] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
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
            constraint.prepare(request.context + self.tokens + inputs[1:], len(inputs))

    def take(
        self,
        inputs: Sequence[int],
        states: Tensor,
        tokens: Sequence[int],
        told: Sequence[float],
    ) -> None:
        """Tokens of a greedy row: ``tokens[i]`` follows ``inputs[i]``, with the confidence
        ``told[i]``."""
        for i, token in enumerate(tokens):
            self.shared.append(states[i])
            self.tokens.append(token)
            if not self._follows(inputs, i, told[i] if told else 1.0):
                return

    def draw(
        self, inputs: Sequence[int], states: Tensor, logits: Tensor, head: DraftHead | None
    ) -> None:
        """Tokens of a sampled row, or of one with processors."""
        request = self.request
        for i in range(len(inputs)):
            self.shared.append(states[i])
            drawn = request.sampler.draft(
                self.over_all(logits[i : i + 1], head),
                self.position,
                request.length + 1,
                request.context + self.tokens,
                with_confidence=request.with_confidence,
            )
            if drawn is None:
                self.ended = True
                return
            self.tokens.append(drawn.token)
            if drawn.q is not None:
                self.q.append(drawn.q)
            if not self._follows(inputs, i, drawn.confidence):
                return

    def over_all(self, logits: Tensor, head: DraftHead | None) -> Tensor:
        """Over the whole vocabulary."""
        return over_all(logits, head, self.request.own_ids, self.request.sampler.vocab_size)

    def _follows(self, inputs: Sequence[int], i: int, confidence: float) -> bool:
        """Whether the token just drafted is the next one that went through the layers."""
        goes_on = self.request.goes_on
        if math.isnan(confidence):  # what is no number speaks for nothing
            confidence = 0.0
        if self.request.with_confidence:
            self.confidences.append(confidence)
        ahead = i + 1 < len(inputs) and inputs[i + 1] == self.tokens[-1]
        if goes_on is not None and not goes_on(confidence, ahead, self.tokens):
            self.ended = True
        # The token stays and is verified: ending here leaves the output's distribution alone.
        if self.request.sampler.closed(self.request.context + self.tokens):
            self.ended = True
        return ahead and not self.done

    def draft(self) -> Draft:
        # A state without a token drafted from it is left: verify runs that token by itself.
        shared = tuple(self.shared[: len(self.tokens)])
        counts = self.num_passes, self.num_positions
        told = tuple(self.confidences)
        return Draft(tuple(self.tokens), shared, tuple(self.q), *counts, confidences=told)
