"""One sequence being decoded: what it asks for, what it has emitted, where it ends."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from layerskip.constraint import Context
from layerskip.control.estimates import RowState
from layerskip.lookup import TokenIndex
from layerskip.outputs import FinishReason, Round
from layerskip.params import MAX_NUM_DRAFT_TOKENS, NumDraftTokens
from layerskip.sampling import Sampler
from layerskip.text import TextStream


@dataclass(frozen=True)
class RowSpec:
    """What a row asks for.

    Attributes:
        prompt: token ids.
        sampler: of this row alone.
        max_new_tokens: most tokens to emit.
        num_draft_tokens: drafted per round, while that many are left to emit; "auto" leaves it to
            the controller.
        eos_ids: ids that end it.
        stream: decodes text and finds stop strings; None without a tokenizer.
        ends: asked after each emitted token, with prompt and output, whether the row ends there.
        logprobs: None, or how many of the likeliest tokens to report beside each emitted one.
        sink: called after each round with ``(tokens, vocab)`` float32 logits and scores of the
            emitted tokens.
        max_draft_tokens: whatever ``num_draft_tokens`` says, no round drafts more.
        request_id, labels: what its rounds are marked with.
        returns_cache: whether its keys and values are wanted in the end.
        tells: whether its rounds say how sure their drafts were, though nothing depends on it.
    """

    prompt: tuple[int, ...]
    sampler: Sampler
    max_new_tokens: int
    num_draft_tokens: NumDraftTokens
    eos_ids: frozenset[int] = frozenset()
    stream: TextStream | None = None
    ends: Callable[[Sequence[int]], bool] | None = None
    logprobs: int | None = None
    sink: Callable[[Tensor, Tensor], None] | None = None
    max_draft_tokens: int = MAX_NUM_DRAFT_TOKENS
    request_id: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    returns_cache: bool = False
    tells: bool = False

    @property
    def may_draft(self) -> bool:
        """Whether any round can draft."""
        return self.num_draft_tokens != 0 and self.max_draft_tokens != 0


@dataclass(eq=False)
class ExitStates:
    """Hidden states after the exit, of the committed tokens that an adapter's block has not seen.

    Attributes:
        prompt: of each chunk of the prompt, ``(tokens, hidden)``.
        decoded: of what follows it, in pieces of the same form.
    """

    prompt: list[Tensor] = field(default_factory=list)
    decoded: list[Tensor] = field(default_factory=list)

    @property
    def any(self) -> bool:
        return bool(self.prompt or self.decoded)

    @property
    def num_decoded(self) -> int:
        return sum(map(len, self.decoded))

    def clear(self) -> None:
        """The block has seen them."""
        self.prompt, self.decoded = [], []


@dataclass(frozen=True, eq=False)
class Seen:
    """A token that no draft was made for, and what one would have been made from.

    Attributes:
        state: ``(hidden,)`` after the exit, of the token before.
        noise: that the token was chosen with, ``(vocab,)``; None of a greedy one.
        token: its id.
        own_ids: beyond the draft vocabulary, that a draft could have had.
    """

    state: Tensor
    noise: Tensor | None
    token: int
    own_ids: frozenset[int]


@dataclass(frozen=True)
class Emission:
    """Tokens a row is about to emit, their final text, and its state after them."""

    token_ids: tuple[int, ...]
    text: str
    stream: TextStream | None
    finish_reason: FinishReason | None


@dataclass(eq=False)
class Row:
    """One sequence being decoded.

    Attributes:
        id: what ``join`` gave it.
        slot_row: its row of the cache.
        stream: of ``spec``, after the tokens emitted so far.
        cached_tokens: slots that were filled when it joined.
        token_ids: emitted so far; the last one is pending.
        length: committed slots; the same number as ``cache.lengths[slot_row]``, unless a round is
            in flight on the device.
        state: the controller's, of a row that leaves the number of draft tokens to it.
        index: of prompt and output up to the last round that looked up, for look-ups.
        own_ids: tokens of prompt and output, and few that a grammar allowed, which the draft
            vocabulary lacks, if there is one.
        exit_states: what an adapter's block has yet to see; None: this row never runs it.
        seen: its latest tokens that no draft was made for, if it may tell drafts from them.
        weights: stamp of the model's when its prefill began, of a row whose cache is wanted or that
            began with one.
        joined: when, by ``time.perf_counter``.
    """

    id: int
    slot_row: int
    spec: RowSpec
    stream: TextStream | None
    cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    length: int = 0
    finish_reason: FinishReason | None = None
    state: RowState | None = None
    index: TokenIndex | None = None
    own_ids: frozenset[int] = frozenset()
    exit_states: ExitStates | None = None
    seen: list[Seen] = field(default_factory=list)
    weights: object = None
    joined: float = field(default_factory=time.perf_counter)

    @property
    def context(self) -> Context:
        """Prompt and output."""
        return Context(self.spec.prompt, tuple(self.token_ids))

    def emission(self, tokens: Iterable[int]) -> Emission:
        """What emitting ``tokens`` gives, up to where something ends the row; changes nothing."""
        stream = self.stream.fork() if self.stream is not None else None
        stops = stream is not None and bool(stream.stop)  # else nothing in the text ends the row
        taken: list[int] = []
        text = ""
        reason: FinishReason | None = None
        for token in tokens:
            taken.append(token)
            if token in self.spec.eos_ids:
                reason = "stop"
            elif stream is not None and stops:
                text += stream.push(token)
                reason = "stop" if stream.stopped else None
            if self.spec.ends is not None and self.spec.ends(self.context + taken):
                reason = "stop"
            if reason is None and len(self.token_ids) + len(taken) >= self.spec.max_new_tokens:
                reason = "length"
            if reason is not None:
                break
        if stream is not None and not stops:
            text = stream.push_all([t for t in taken if t not in self.spec.eos_ids])
        if reason is not None and stream is not None:
            text += stream.finish()
            reason = "stop" if stream.stopped else reason
        return Emission(tuple(taken), text, stream, reason)
