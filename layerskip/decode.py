"""The decoding loop: prefill, draft, verify, accept, commit. Open this file first.

A decoder holds a set of cache rows. ``Decoder.step`` runs one round for every row: the pending
token and k drafted ones are verified in one full-depth pass, the confirmed ones are emitted and
committed. ``k = 0`` is plain decoding through the same code.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from layerskip.cache import Segment
from layerskip.drafting import Draft, DraftRequest, EarlyExitDrafter
from layerskip.model import DecoderStack
from layerskip.outputs import FinishReason, Origin, Round
from layerskip.plan import DraftPlan
from layerskip.sampling import Sampler, greedy_tokens
from layerskip.text import TextStream
from layerskip.verification import count_matches


@dataclass(eq=False)
class Row:
    """One sequence being decoded.

    Attributes:
        id: what ``join`` gave it.
        slot_row: its row of the cache.
        prompt: token ids.
        limit: most tokens to emit.
        num_draft_tokens: drafted per round, while that many are left to emit.
        eos_ids: ids that end it.
        stream: decodes text and finds stop strings; None without a tokenizer.
        token_ids: emitted so far; the last one is pending.
        length: committed slots; the same number as ``cache.lengths[slot_row]``.
    """

    id: int
    slot_row: int
    prompt: tuple[int, ...]
    sampler: Sampler
    limit: int
    num_draft_tokens: int
    eos_ids: frozenset[int]
    stream: TextStream | None
    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    length: int = 0
    finish_reason: FinishReason | None = None

    def emission(self, tokens: Iterable[int]) -> "Emission":
        """What emitting ``tokens`` gives, up to where something ends the row; changes nothing."""
        stream = self.stream.fork() if self.stream is not None else None
        taken: list[int] = []
        text = ""
        reason: FinishReason | None = None
        for token in tokens:
            taken.append(token)
            if token in self.eos_ids:
                reason = "stop"
            elif stream is not None:
                text += stream.push(token)
                reason = "stop" if stream.stopped else None
            if reason is None and len(self.token_ids) + len(taken) >= self.limit:
                reason = "length"
            if reason is not None:
                break
        if reason is not None and stream is not None:
            text += stream.finish()
            reason = "stop" if stream.stopped else reason
        return Emission(tuple(taken), text, stream, reason)


@dataclass(frozen=True)
class Emission:
    """Tokens a row is about to emit, their final text, and its state after them."""

    token_ids: tuple[int, ...]
    text: str
    stream: TextStream | None
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Step:
    """One row's finished work of a round, not yet applied."""

    row: Row
    emission: Emission
    num_committed: int
    record: Round


class Decoder:
    """Rows decoding together over one cache. Rows join and leave between rounds."""

    def __init__(
        self,
        stack: DecoderStack,
        drafter: EarlyExitDrafter | None,
        plan: DraftPlan | None,
        *,
        num_rows: int = 1,
        num_slots: int = 1,
    ) -> None:
        self.stack, self.drafter = stack, drafter
        self.shared_depth = plan.shared_depth if plan is not None else 0
        self.cache = stack.new_cache(num_rows=num_rows, num_slots=num_slots)
        self.rows: dict[int, Row] = {}
        self._next_id = 0

    def join(
        self,
        prompt: Sequence[int],
        *,
        sampler: Sampler,
        limit: int,
        num_draft_tokens: int,
        eos_ids: frozenset[int],
        stream: TextStream | None,
    ) -> Row:
        """Reserve a cache row; its prefill is the row's first round, in the next ``step``."""
        used = {row.slot_row for row in self.rows.values()}
        slot_row = next(i for i in range(len(used) + 1) if i not in used)
        slots = len(prompt) + limit + num_draft_tokens
        if slot_row >= self.cache.num_rows or slots > self.cache.num_slots:
            self.cache = self.cache.grown(num_rows=slot_row + 1, num_slots=slots)
        self.cache.release(slot_row)
        row = Row(
            self._next_id,
            slot_row,
            tuple(prompt),
            sampler,
            limit,
            num_draft_tokens if self.drafter is not None else 0,
            eos_ids,
            stream,
        )
        self.rows[row.id] = row
        self._next_id += 1
        return row

    def leave(self, row_id: int) -> Row:
        """Give a row's slots back, finished or not."""
        if row_id not in self.rows:
            raise ValueError(f"the batch has no row {row_id}; its rows are {sorted(self.rows)}")
        return self.rows.pop(row_id)

    @torch.inference_mode()
    def step(self) -> list[Round]:
        """One round for every unfinished row: its prefill if it is new, else draft and verify.

        If it raises, no row has changed, and it can be called again.
        """
        going = [row for row in self.rows.values() if row.finish_reason is None]
        new = [row for row in going if not row.token_ids]
        decoding = [row for row in going if row.token_ids]
        steps = [self._prefill(row) for row in new]
        if decoding:
            steps += self._round(decoding)
        for step in steps:
            self._apply(step)
        return [step.record for step in steps]

    def _apply(self, step: Step) -> None:
        row, emission = step.row, step.emission
        self.cache.commit(row.slot_row, step.num_committed)
        row.length += step.num_committed
        row.token_ids.extend(emission.token_ids)
        row.stream, row.finish_reason = emission.stream, emission.finish_reason
        row.rounds.append(step.record)
        row.sampler.forget_before(len(row.prompt) + len(row.token_ids))

    def _prefill(self, row: Row) -> Step:
        began = time.perf_counter()
        logits = self.stack.prefill(row.prompt, self.cache, row.slot_row)
        tokens = row.sampler.pick(logits[None], len(row.prompt))
        emission = row.emission(tokens)
        record = Round(
            row=row.id,
            index=0,
            token_ids=emission.token_ids,
            text=emission.text,
            num_draft_tokens=0,
            num_accepted_tokens=0,
            origin="prefill",
            draft_seconds=0.0,
            verify_seconds=time.perf_counter() - began,
            positions=len(row.prompt),
            finish_reason=emission.finish_reason,
        )
        return Step(row, emission, len(row.prompt), record)

    def _round(self, rows: Sequence[Row]) -> list[Step]:
        began = time.perf_counter()
        requests = [
            DraftRequest(
                row.slot_row,
                row.length,
                row.token_ids[-1],
                min(row.num_draft_tokens, row.limit - len(row.token_ids) - 1),
                row.sampler,
            )
            for row in rows
        ]
        if self.drafter is not None and any(r.num_draft_tokens for r in requests):
            drafts = self.drafter.draft(requests, self.cache)
        else:
            drafts = [Draft((), ())] * len(rows)
        drafted = time.perf_counter()
        targets = self._verify(requests, drafts)
        return [
            self._accept(row, draft, target, drafted - began, drafted)
            for row, draft, target in zip(rows, drafts, targets, strict=True)
        ]

    def _accept(
        self,
        row: Row,
        draft: Draft,
        target: Sequence[int],
        draft_seconds: float,
        verify_began: float,
    ) -> Step:
        """Emit the confirmed tokens and the one after them. All but the last are committed,
        and with them the token that was pending."""
        num_matches = count_matches(draft.tokens, target)
        origin: Origin = "recovered" if num_matches < len(draft.tokens) else "bonus"
        emission = row.emission(target[: num_matches + 1])
        record = Round(
            row=row.id,
            index=len(row.rounds),
            token_ids=emission.token_ids,
            text=emission.text,
            num_draft_tokens=len(draft.tokens),
            num_accepted_tokens=min(num_matches, len(emission.token_ids)),
            origin=origin if draft.tokens else "plain",
            draft_seconds=draft_seconds,
            verify_seconds=time.perf_counter() - verify_began,
            positions=len(draft.tokens) + 1,
            finish_reason=emission.finish_reason,
        )
        return Step(row, emission, len(emission.token_ids), record)

    def _verify(self, requests: Sequence[DraftRequest], drafts: Sequence[Draft]) -> list[list[int]]:
        """The target's token after the pending one and after each drafted one, per row."""
        hidden = self._through_shared_layers(requests, drafts)
        segments = [
            Segment(r.row, r.length, len(d.tokens) + 1)
            for r, d in zip(requests, drafts, strict=True)
        ]
        layers = range(self.shared_depth, self.stack.num_layers)
        logits = self.stack.logits(self.stack.run_layers(hidden, layers, self.cache, segments))
        everything_greedy = all(r.sampler.params.greedy for r in requests)
        tokens = greedy_tokens(logits) if everything_greedy else []
        targets, start = [], 0
        for request, segment in zip(requests, segments, strict=True):
            rows = slice(start, start + segment.count)
            picked = tokens[rows] or request.sampler.pick(logits[rows], segment.start + 1)
            targets.append(picked)
            start += segment.count
        return targets

    def _through_shared_layers(
        self, requests: Sequence[DraftRequest], drafts: Sequence[Draft]
    ) -> Tensor:
        """Hidden states after the shared layers for all tokens to verify, rows one after another.

        The draft left them for every token but each row's last, which goes through here.
        """
        pairs = list(zip(requests, drafts, strict=True))
        last = [d.tokens[-1] if d.tokens else r.pending for r, d in pairs]
        segments = [Segment(r.row, r.length + len(d.tokens), 1) for r, d in pairs]
        hidden = self.stack.run_layers(
            self.stack.embed(last), range(self.shared_depth), self.cache, segments
        )
        if not any(d.tokens for d in drafts):
            return hidden
        states = [state for i, d in enumerate(drafts) for state in (*d.shared, hidden[i])]
        return torch.stack(states)
