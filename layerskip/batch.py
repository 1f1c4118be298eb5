"""Rows that decode together, as users hold them: ``add``, ``step``, ``remove``."""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from layerskip.decode import Decoder, Row
from layerskip.drafting import EarlyExitDrafter
from layerskip.encoding import Message, Prompt, PromptEncoder, is_single
from layerskip.model import DecoderStack
from layerskip.outputs import DecodeStats, GenerationOutput, Round
from layerskip.params import MAX_SEED, SamplingParams, check_integer
from layerskip.plan import DraftPlan
from layerskip.sampling import Sampler
from layerskip.text import TextStream

MAX_NUM_DRAFT_TOKENS = 32
MAX_ROWS = 32


@dataclass(frozen=True)
class StreamStep:
    """One round of a stream.

    Attributes:
        text: text that became final.
        token_ids: tokens emitted.
        round: the round's record.
    """

    text: str
    token_ids: tuple[int, ...]
    round: Round


@dataclass(frozen=True)
class RowSettings:
    """How a row of a ``Batch`` decodes; the arguments of ``generate``."""

    max_new_tokens: int
    sampling: SamplingParams
    num_draft_tokens: int
    stop: tuple[str, ...]
    eos_ids: frozenset[int]


@dataclass(frozen=True)
class RowRequest:
    """A checked prompt, ready to join."""

    prompt: tuple[int, ...]
    seed: int | None
    settings: RowSettings


class Batch:
    """Rows decoding together: ``add``, ``step``, ``remove``; made by ``open_batch``."""

    def __init__(
        self,
        stack: DecoderStack,
        drafter: EarlyExitDrafter | None,
        plan: DraftPlan | None,
        encoder: PromptEncoder,
        settings: RowSettings,
    ) -> None:
        self._stack, self._drafter, self._plan = stack, drafter, plan
        self._encoder, self._settings = encoder, settings
        self._rows: Decoder | None = None
        self._seeds: dict[int, int | None] = {}

    def add(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        max_new_tokens: int | None = None,
        num_draft_tokens: int | None = None,
        sampling: SamplingParams | None = None,
    ) -> int:
        """Add a row; its prefill runs in the next ``step``. Returns its id.

        Args:
            prompt: text or token ids.
            messages: a chat instead.
            max_new_tokens, num_draft_tokens, sampling: of this row; None is the batch's own.
        """
        settings = self._settings
        if max_new_tokens is not None:
            check_integer("max_new_tokens", max_new_tokens, 1)
            settings = replace(settings, max_new_tokens=max_new_tokens)
        if num_draft_tokens is not None:
            check_num_draft_tokens(num_draft_tokens)
            settings = replace(settings, num_draft_tokens=num_draft_tokens)
        check_sampling(sampling)
        if sampling is not None:
            seed = secrets.randbelow(2**32) if sampling.seed is None else sampling.seed
            settings = replace(settings, sampling=replace(sampling, seed=seed))
        if messages is None and not is_single(prompt):
            raise TypeError(f"a row takes one prompt, text or token ids, got {prompt!r}")
        ids = self._encoder.encode_all(prompt, messages)[0]
        return self._join(self.check(ids, settings=settings)).id

    def step(self) -> list[Round]:
        """One round of every unfinished row; for a new row that is its prefill."""
        return self._rows.step() if self._rows is not None else []

    def remove(self, row: int) -> GenerationOutput:
        """Take a row out, finished or not; its output so far."""
        check_integer("row", row, 0)
        if self._rows is None:
            raise ValueError(f"the batch has no row {row}; its rows are []")
        return self._output(self._rows.leave(row))

    @property
    def unfinished(self) -> list[int]:
        """Ids of rows that go on."""
        rows = self._rows.rows.values() if self._rows is not None else ()
        return [row.id for row in rows if row.finish_reason is None]

    def check(
        self, prompt: Sequence[int], *, seed_offset: int = 0, settings: RowSettings | None = None
    ) -> RowRequest:
        """A request for encoded ids; decoding stops where the model's positions end."""
        settings = settings or self._settings
        seed = settings.sampling.seed
        if seed is not None and not settings.sampling.greedy:
            seed = (seed + seed_offset) % (MAX_SEED + 1)
        else:
            seed = None
        room = self._stack.max_positions - len(prompt)
        settings = replace(settings, max_new_tokens=min(settings.max_new_tokens, room))
        return RowRequest(tuple(prompt), seed, settings)

    def run(self, requests: Sequence[RowRequest]) -> list[GenerationOutput]:
        """Decode all requests, at most ``MAX_ROWS`` at a time; outputs in their order."""
        self._reserve(requests[:MAX_ROWS])
        waiting = list(enumerate(requests))[::-1]
        places: dict[int, int] = {}
        outputs: dict[int, GenerationOutput] = {}
        while len(outputs) < len(requests):
            while waiting and len(places) < MAX_ROWS:
                place, request = waiting.pop()
                places[self._join(request).id] = place
            for record in self.step():
                if record.finish_reason is not None:
                    outputs[places.pop(record.row)] = self.remove(record.row)
        return [outputs[i] for i in range(len(requests))]

    def stream(self, request: RowRequest) -> Iterator[StreamStep]:
        """Decode one request, round by round."""
        self._join(request)
        while self.unfinished:
            for record in self.step():
                yield StreamStep(record.text, record.token_ids, record)

    def _reserve(self, requests: Sequence[RowRequest]) -> None:
        slots = max(
            len(r.prompt) + r.settings.max_new_tokens + r.settings.num_draft_tokens
            for r in requests
        )
        self._rows = Decoder(
            self._stack, self._drafter, self._plan, num_rows=len(requests), num_slots=slots
        )

    def _join(self, request: RowRequest) -> Row:
        if self._rows is None:
            self._reserve([request])
        assert self._rows is not None
        settings, tokenizer = request.settings, self._encoder.tokenizer
        stream = TextStream(tokenizer, settings.stop) if tokenizer is not None else None
        row = self._rows.join(
            request.prompt,
            sampler=Sampler(settings.sampling, request.seed or 0, self._stack.vocab_size),
            limit=settings.max_new_tokens,
            num_draft_tokens=settings.num_draft_tokens,
            eos_ids=settings.eos_ids,
            stream=stream,
        )
        self._seeds[row.id] = request.seed
        return row

    def _output(self, row: Row) -> GenerationOutput:
        assert self._rows is not None
        stats = DecodeStats.from_rounds(
            row.rounds,
            prompt_tokens=len(row.prompt),
            kv_cache_bytes=self._rows.cache.nbytes,
        )
        return GenerationOutput(
            text="".join(r.text for r in row.rounds),
            token_ids=tuple(row.token_ids),
            finish_reason=row.finish_reason or "cancelled",
            seed=self._seeds.pop(row.id),
            stats=stats,
            rounds=tuple(row.rounds),
        )


def check_num_draft_tokens(value: object) -> None:
    check_integer("num_draft_tokens", value, 0, MAX_NUM_DRAFT_TOKENS)


def check_sampling(value: object) -> None:
    """Raise unless ``value`` is SamplingParams or None."""
    if value is not None and not isinstance(value, SamplingParams):
        raise TypeError(f"sampling must be SamplingParams, got {type(value).__name__}")
