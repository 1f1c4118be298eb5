"""What is asked of a row: the arguments of ``generate``, checked."""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypedDict, TypeVar

from torch import Tensor

from layerskip.cache import CachedText
from layerskip.encoding import Message
from layerskip.grammar import Grammar
from layerskip.outputs import Round
from layerskip.params import (
    MAX_NUM_DRAFT_TOKENS,
    NumDraftTokens,
    SamplingParams,
    Verification,
    check_integer,
    check_labels,
    check_num_draft_tokens,
    check_sampling,
    check_text,
    check_verification,
    most_draft_tokens,
)
from layerskip.sampling import Processor

MAX_LOGPROBS = 100
T_co = TypeVar("T_co", covariant=True)


class Several(Protocol[T_co]):
    """A sequence that is no text, which is a sequence of texts, too: ``in`` takes any value."""

    def __contains__(self, value: object, /) -> bool: ...
    def __getitem__(self, i: int, /) -> T_co: ...
    def __iter__(self) -> Iterator[T_co]: ...
    def __len__(self) -> int: ...


class GenerateArguments(TypedDict, total=False):
    """What ``SelfSpeculativeLM.generate`` takes beside its prompts, for type checkers: what comes
    back is of the type that prompts and ``num_return_sequences`` say."""

    messages: Sequence[Message] | None
    max_new_tokens: int
    sampling: SamplingParams | None
    num_draft_tokens: NumDraftTokens | None
    verification: Verification
    stop: str | Sequence[str]
    ignore_eos: bool
    logits_processor: Sequence[Processor]
    logprobs: int | None
    cache: CachedText | None
    return_cache: bool
    grammar: Any
    labels: Mapping[str, str] | None
    on_round: Callable[[Round], None] | None


@dataclass(frozen=True)
class RowSettings:
    """How a row of a ``Batch`` decodes; the arguments of ``generate``, checked.

    ``ends`` and ``sink`` are of ``RowSpec``, ``warpers`` of ``Sampler``, for callers that are
    decoders themselves. ``follows_policy`` is of requests that named no number of draft tokens.
    """

    max_new_tokens: int
    sampling: SamplingParams
    num_draft_tokens: NumDraftTokens
    stop: tuple[str, ...] = ()
    eos_ids: frozenset[int] = frozenset()
    verification: Verification = "coupled"
    logits_processor: tuple[Processor, ...] = ()
    warpers: tuple[Processor, ...] = ()
    logprobs: int | None = None
    cache: CachedText | None = None
    return_cache: bool = False
    grammar: Grammar | None = None
    ends: Callable[[Sequence[int]], bool] | None = None
    sink: Callable[[Tensor, Tensor], None] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    max_draft_tokens: int = MAX_NUM_DRAFT_TOKENS
    follows_policy: bool = False

    def __post_init__(self) -> None:
        check_labels(self.labels)
        object.__setattr__(self, "labels", dict(self.labels))  # the caller's may change later
        check_integer("max_new_tokens", self.max_new_tokens, 1)
        check_sampling(self.sampling)
        check_num_draft_tokens(self.num_draft_tokens)
        check_verification(self.verification)
        if not all(callable(p) for p in self.logits_processor):
            raise TypeError(
                "logits_processor must be a list of callables (input_ids, scores) -> scores, "
                f"got {self.logits_processor!r}"
            )
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.cache is not None and not isinstance(self.cache, CachedText):
            raise TypeError(
                f"cache must be the cache of an earlier output, got {type(self.cache).__name__}"
            )
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise TypeError(
                "grammar must be a Grammar or a pydantic model class, "
                f"got {type(self.grammar).__name__}; make one with Grammar.json_schema(...), "
                ".regex(...), .ebnf(...), .json() or .choice(...)"
            )


@dataclass(frozen=True)
class RowRequest:
    """A checked prompt, ready to join a ``Batch``."""

    prompt: tuple[int, ...]
    seed: int | None
    settings: RowSettings
    request_id: str

    @property
    def num_slots(self) -> int:
        most = most_draft_tokens(self.settings.num_draft_tokens)
        return len(self.prompt) + self.settings.max_new_tokens + most


def stops_of(stop: str | Sequence[str]) -> tuple[str, ...]:
    """One stop string, or several, as a tuple."""
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or any(not isinstance(s, str) or not s for s in stops):
        raise ValueError(f"stop must be one or more non-empty strings, got {stop!r}")
    for text in stops:
        check_text("stop", text)
    return tuple(stops)


def as_grammar(value: Any) -> Any:
    """A pydantic model class stands for its schema; anything else is left."""
    return Grammar.json_schema(value) if hasattr(value, "model_json_schema") else value


def seeded(sampling: SamplingParams) -> SamplingParams:
    """The same with a seed, drawn if there is none."""
    if sampling.greedy or sampling.seed is not None:
        return sampling
    return replace(sampling, seed=secrets.randbelow(2**32))
