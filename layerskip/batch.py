"""Rows that decode together, as users hold them: ``add``, ``step``, ``remove``."""

import contextlib
import logging
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from layerskip.cache import CachedText
from layerskip.constraint import Constraint
from layerskip.controller import Controller
from layerskip.decode import Decoder
from layerskip.encoding import Message, Prompt, PromptEncoder, is_single
from layerskip.grammar_xgrammar import XGrammarBackend
from layerskip.model import DecoderStack
from layerskip.outputs import DecodeStats, GenerationOutput, Round
from layerskip.params import (
    AUTO,
    NumDraftTokens,
    SamplingParams,
    Verification,
    check_integer,
    check_sampling,
    following_seed,
)
from layerskip.policy import Policy
from layerskip.processors import processors_of
from layerskip.request import RowRequest, RowSettings, as_grammar, seeded
from layerskip.row import Row, RowSpec
from layerskip.sampling import Sampler
from layerskip.text import TextStream
from layerskip.vocabulary import CoverageMeter

logger = logging.getLogger(__name__)

MAX_ROWS = 32


class Batch:
    """Rows decoding together: ``add``, ``step``, ``remove``; made by ``open_batch``.

    Threads may share one: they wait for each other's rounds, joins and removals. ``on_round`` is
    called outside of that, and where several step may hear of a later round first; a processor is
    called within: it can neither add, step nor remove, and may wait for nothing that another thread
    does with the batch.

    Attributes:
        settings: of rows that say nothing else.
    """

    def __init__(
        self,
        stack: DecoderStack,
        encoder: PromptEncoder,
        settings: RowSettings,
        *,
        new_decoder: Callable[..., Decoder],
        controller: Callable[[], Controller],
        meter: CoverageMeter | None,
        grammars: XGrammarBackend | None,
        policy: Policy | None,
        on_round: Callable[[Round], None] | None,
    ) -> None:
        self._grammars, self._policy, self._on_round = grammars, policy, on_round
        self._stack, self._encoder, self.settings = stack, encoder, settings
        self._new_decoder, self._controller, self._meter = new_decoder, controller, meter
        self._rows: Decoder | None = None
        self._requests: dict[int, RowRequest] = {}
        # What a round calls, as a logits processor, is in the round's thread: it must not wait.
        self._turn, self._in_round = threading.RLock(), threading.Lock()
        self._check_settings(settings)
        self._constraint(settings, 0)

    def add(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        max_new_tokens: int | None = None,
        num_draft_tokens: NumDraftTokens | None = None,
        sampling: SamplingParams | None = None,
        verification: Verification | None = None,
        cache: CachedText | None = None,
        grammar: Any = None,
        labels: Mapping[str, str] | None = None,
        request_id: str | None = None,
    ) -> int:
        """Add a row; its prefill runs in the next ``step``. Returns its id.

        Args:
            prompt: text or token ids.
            messages: a chat instead.
            max_new_tokens, num_draft_tokens, sampling, verification, cache, grammar, labels: of
                this row; None is the batch's own.
            request_id: that its rounds carry; None makes one up.
        """
        check_sampling(sampling)
        own: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "num_draft_tokens": num_draft_tokens,
            "sampling": None if sampling is None else seeded(sampling),
            "verification": verification,
            "cache": cache,
            "grammar": as_grammar(grammar),
            "labels": labels,
            "follows_policy": None if num_draft_tokens is None else num_draft_tokens == AUTO,
        }
        settings = replace(self.settings, **{k: v for k, v in own.items() if v is not None})
        self._check_settings(settings)
        if messages is None and not is_single(prompt):
            raise TypeError(f"a row takes one prompt, text or token ids, got {prompt!r}")
        ids = self._encoder.encode_all(prompt, messages)[0]
        return self.join(self.check(ids, settings=settings, request_id=request_id))

    def step(self) -> list[Round]:
        """One round of every unfinished row; for a new row that is its prefill.

        ``on_round`` gets every record, whatever it raises for one; that is raised then.

        Raises:
            RowError: nothing may follow the text of its ``row``: scores are no numbers, rules
                contradict each other, or the tokenizer can't decode what was emitted. After
                ``remove`` of that row the others go on.
            RuntimeError: an earlier step was interrupted (Ctrl-C) while its tokens were added to
                the rows, which can only be taken out then; or a round called it.
            ValueError: a pass failed, and the model was moved, cast or resized since it was
                wrapped, or given other weights.
        """
        with self._turn:
            self._check_between_rounds("step")
            try:
                with self._in_round:
                    records = self._rows.step() if self._rows is not None else []
            except (RuntimeError, IndexError):  # an id may be gone
                self._stack.shared.check()  # torch does not say what was done to the model
                raise
            if self._meter is not None:
                self._watch_coverage(self._meter, records)
        if self._on_round is not None:
            with contextlib.ExitStack() as telling:  # of all: none of these rounds comes again
                for record in reversed(records):
                    telling.callback(self._on_round, record)
        return records

    def _watch_coverage(self, meter: CoverageMeter, records: Sequence[Round]) -> None:
        for record in records:
            meter.observe(record.token_ids)
        if any(r.finish_reason for r in records) and (news := meter.news()) is not None:
            logger.warning(news)

    def remove(self, row: int) -> GenerationOutput:
        """Take a row out, finished or not; its output so far."""
        check_integer("row", row, 0)
        if self._rows is None:
            raise ValueError(f"the batch has no row {row}; its rows are []")
        rows = self._rows
        with self._turn:
            self._check_between_rounds("remove")
            output = self._output(rows.row(row))
            rows.leave(row)
            del self._requests[row]
        return output

    def _check_between_rounds(self, name: str) -> None:
        """A pass may be half done, over the cache and the rows as they were when it began."""
        if self._in_round.locked():
            raise RuntimeError(
                f"{name} was called by something that a round of this batch calls (a logits "
                "processor, a signal handler, ...); call it between two steps, or in on_round"
            )

    @property
    def num_layers(self) -> int:
        """Of the model: a returned cache may have one more, for an exit adapter."""
        return self._stack.num_layers

    @property
    def unfinished(self) -> list[int]:
        """Ids of rows that go on."""
        with self._turn:
            rows = self._rows.rows.values() if self._rows is not None else ()
            return [row.id for row in rows if row.finish_reason is None]

    def check(
        self,
        prompt: Sequence[int],
        *,
        seed_offset: int = 0,
        settings: RowSettings | None = None,
        request_id: str | None = None,
    ) -> RowRequest:
        """A request for encoded ids; decoding stops where the model's positions end."""
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise TypeError(f"request_id must be non-empty text, got {request_id!r}")
        settings = settings or self.settings
        seed = settings.sampling.seed
        if seed is not None and not settings.sampling.greedy:
            seed = following_seed(seed, seed_offset)
        else:
            seed = None
        room = self._stack.max_positions - len(prompt)
        settings = replace(settings, max_new_tokens=min(settings.max_new_tokens, room))
        settings = self._by_policy(settings, len(prompt))
        return RowRequest(tuple(prompt), seed, settings, request_id or secrets.token_hex(8))

    def _by_policy(self, settings: RowSettings, prompt_tokens: int) -> RowSettings:
        """What the policy makes of a request that left its drafts to us."""
        if self._policy is None or not settings.follows_policy:
            return settings
        most = self._policy.max_draft_tokens(settings.labels, prompt_tokens)
        if most == 0:
            return replace(settings, num_draft_tokens=0)
        return settings if most is None else replace(settings, max_draft_tokens=most)

    def run(self, requests: Sequence[RowRequest]) -> list[GenerationOutput]:
        """Decode all requests, at most ``MAX_ROWS`` at a time; outputs in their order."""
        self._reserve(requests[:MAX_ROWS])
        waiting = list(enumerate(requests))[::-1]
        places: dict[int, int] = {}
        outputs: dict[int, GenerationOutput] = {}
        with self._giving_up():
            while len(outputs) < len(requests):
                while waiting and len(places) < MAX_ROWS:
                    place, request = waiting.pop()
                    places[self.join(request)] = place
                for record in self.step():
                    if record.finish_reason is not None:
                        outputs[places.pop(record.row)] = self.remove(record.row)
        return [outputs[i] for i in range(len(requests))]

    def stream(self, request: RowRequest) -> Iterator[Round]:
        """Decode one request, round by round."""
        self._reserve([request])
        with self._giving_up():
            self.join(request)
            while self.unfinished:
                yield from self.step()

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """However this ends, the requests that are left are over: also of a stream that nobody
        reads to its end."""
        try:
            yield
        finally:
            if self._rows is not None:
                self._rows.give_up()

    def _check_settings(self, settings: RowSettings) -> None:
        """What only the model can tell."""
        vocab = self._stack.vocab_size
        bad = [token for token in settings.sampling.token_ids if token >= vocab]
        if bad:
            raise ValueError(
                f"sampling names token id {min(bad)}; the model's vocabulary ends at {vocab - 1}"
            )
        if settings.cache is not None:
            self._check_cache(settings.cache)
        if settings.stop and self._encoder.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model has none")

    def _check_cache(self, cache: CachedText) -> None:
        if cache.source() is not self._stack:
            raise ValueError(
                "cache was made by another SelfSpeculativeLM; use the one that returned it"
            )
        if cache.source.weights != self._stack.shared.stamp():
            raise ValueError(
                "cache was made before the model's weights changed; leave it out, and the whole "
                "prompt is prefilled"
            )

    def _constraint(self, settings: RowSettings, prompt_length: int) -> Constraint | None:
        if settings.grammar is None:
            return None
        if self._grammars is None:
            raise ValueError("a grammar needs a tokenizer, and this model has none")
        return Constraint(
            self._grammars.matcher(settings.grammar),
            prompt_length=prompt_length,
            eos_ids=settings.eos_ids,
            vocab_size=self._stack.vocab_size,
        )

    def _reserve(self, requests: Sequence[RowRequest], *, grows: bool = False) -> None:
        """Make the decoder.

        Args:
            requests: the first ones.
            grows: whether others may join beside them.
        """
        if any(r.settings.num_draft_tokens == AUTO for r in requests):
            self._controller()  # whose rounds, recorded when it is made, this decoder is to have
        num_slots = max(r.num_slots for r in requests)
        self._rows = self._new_decoder(num_rows=len(requests), num_slots=num_slots, grows=grows)
        # Who lets go of a batch need not have removed its rows.
        weakref.finalize(self, self._rows.give_up).atexit = False

    def join(self, request: RowRequest) -> int:
        """Add a checked request; its id."""
        spec = self._spec(request)  # first: what its grammar is found to lack changes nothing
        with self._turn:
            self._check_between_rounds("add")
            if self._rows is None:
                self._reserve([request], grows=True)
            assert self._rows is not None
            if request.settings.num_draft_tokens == AUTO:
                self._rows.speculator.controller = self._controller()
            try:
                row = self._rows.join(spec, cached=request.settings.cache)
                self._requests[row.id] = request
            except BaseException:  # Ctrl-C: of a row that is in already nobody would know
                for unknown in self._rows.rows.keys() - self._requests.keys():
                    self._rows.leave(unknown)
                raise
        return row.id

    def _spec(self, request: RowRequest) -> RowSpec:
        settings, tokenizer = request.settings, self._encoder.tokenizer
        rules = processors_of(
            settings.sampling,
            prompt_length=len(request.prompt),
            eos_ids=settings.eos_ids,
            vocab_size=self._stack.vocab_size,
            device=self._stack.device,
        )
        constraint = self._constraint(settings, len(request.prompt))
        return RowSpec(
            request.prompt,
            Sampler(
                settings.sampling,
                request.seed or 0,
                self._stack.vocab_size,
                verification=settings.verification,
                processors=[*rules, *settings.logits_processor],
                constraint=constraint,
                warpers=settings.warpers,
            ),
            max_new_tokens=settings.max_new_tokens,
            num_draft_tokens=settings.num_draft_tokens,
            eos_ids=settings.eos_ids,
            stream=TextStream(tokenizer, settings.stop) if tokenizer is not None else None,
            ends=_either(settings.ends, constraint.closed if constraint is not None else None),
            logprobs=settings.logprobs,
            sink=settings.sink,
            max_draft_tokens=settings.max_draft_tokens,
            request_id=request.request_id,
            labels=settings.labels,
            returns_cache=settings.return_cache,
            tells=self._on_round is not None,
        )

    def _output(self, row: Row) -> GenerationOutput:
        assert self._rows is not None
        request, cache = self._requests[row.id], self._rows.cache
        stats = DecodeStats.from_rounds(
            row.rounds,
            prompt_tokens=len(request.prompt),
            cached_tokens=row.cached_tokens,
            kv_cache_bytes=cache.nbytes,
        )
        wanted = request.settings.return_cache
        return GenerationOutput(
            text="".join(r.text for r in row.rounds),
            token_ids=tuple(row.token_ids),
            finish_reason=row.finish_reason or "cancelled",
            seed=request.seed,
            stats=stats,
            rounds=tuple(row.rounds),
            cache=self._rows.copied(row) if wanted else None,
        )


Condition = Callable[[Sequence[int]], bool]


def _either(one: Condition | None, other: Condition | None) -> Condition | None:
    """What ends a row if one of two conditions does."""
    if one is None or other is None:
        return one or other
    return lambda context: one(context) or other(context)
