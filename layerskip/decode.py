"""The decoding loop: prefill, draft, verify, accept, commit. Open this file first.

A decoder holds a set of cache rows. ``Decoder.step`` runs one round for every row: the pending
token and k drafted ones are verified in one full-depth pass, the confirmed ones are emitted and
committed. ``k = 0`` is plain decoding through the same code.
"""

import time
import weakref
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from layerskip.ambient import Decoding
from layerskip.attempt import Attempt, RoundDrafter
from layerskip.cache import CachedText
from layerskip.draft_head import DraftHead
from layerskip.drafting import EarlyExitDrafter
from layerskip.errors import RowError, UndecodableError
from layerskip.learning import observe_round_seconds, observe_seconds
from layerskip.lookup import LookupStore
from layerskip.model import DecoderStack
from layerskip.outcome import NO_LOGITS, Outcome, Times, record_of
from layerskip.outputs import Round
from layerskip.params import MAX_NUM_DRAFT_TOKENS, most_draft_tokens
from layerskip.plan import DraftPlan
from layerskip.row import ExitStates, Row, RowSpec
from layerskip.seats import Landing
from layerskip.speculation import Speculator
from layerskip.verification import Case, Verdict, judge, judge_all
from layerskip.verify import Verifier
from layerskip.workbench import Workbench


class Decoder:
    """Rows decoding together over one cache. Rows join and leave between rounds.

    With a ``bench``, rounds that the device can run by itself are run so; the others, and all
    prefills, are driven from here. Tokens, records and cache are the same.
    """

    def __init__(
        self,
        stack: DecoderStack,
        drafter: EarlyExitDrafter | None,
        plan: DraftPlan | None,
        *,
        looks_up: bool = False,
        store: LookupStore | None = None,
        head: DraftHead | None = None,
        bench: Workbench | None = None,
        num_rows: int = 1,
        num_slots: int = 1,
        grows: bool = False,
    ) -> None:
        self.stack = stack
        self.round_drafter = RoundDrafter(
            drafter, looks_up=looks_up, free_rows=stack.free_rows, head=head
        )
        self.speculator = Speculator(self.round_drafter, store=store)
        self.plan = plan
        self._has_block = drafter is not None and stack.has_block_at(plan)
        shared_depth = plan.shared_depth if plan is not None else 0
        self.verifier = Verifier(stack, shared_depth)
        self.rounds, self._bench = None, bench
        if bench is None:
            self.cache = stack.new_cache(num_rows=num_rows, num_slots=num_slots)
        else:
            self.rounds = bench.take(num_rows=num_rows, num_slots=num_slots, grows=grows)
            self.cache = self.rounds.cache
            weakref.finalize(self, bench.give_back, self.rounds).atexit = False
        self.rows: dict[int, Row] = {}
        self._left: list[Row] = []  # rows that leave
        # By row, not applied yet: the weights' stamp, and what they gave.
        self._prefilled: dict[int, tuple[object, Outcome]] = {}
        self._next_id, self._applying = 0, False

    def join(self, spec: RowSpec, *, cached: CachedText | None = None) -> Row:
        """Reserve a cache row; its prefill is the row's first round, in the next ``step``.

        Args:
            cached: of an earlier row; what the prompt shares with it is not prefilled again.

        Raises:
            ValueError: the model was moved, cast or resized, or given other weights.
        """
        if self._next_id or self._bench is not None:  # else the cache was made, and it checked
            self.stack.shared.check()
        self._empty_left()
        used = {row.slot_row for row in self.rows.values()}
        slot_row = next(i for i in range(len(used) + 1) if i not in used)
        slots = len(spec.prompt) + spec.max_new_tokens + most_draft_tokens(spec.num_draft_tokens)
        if slot_row >= self.cache.num_rows or slots > self.cache.num_slots:
            self._grow(num_rows=slot_row + 1, num_slots=slots)
        row = Row(self._next_id, slot_row, spec, spec.stream)
        if self._has_block and (spec.may_draft or spec.returns_cache):
            row.exit_states = ExitStates()
        if spec.returns_cache or cached is not None:
            row.weights = self.stack.shared.stamp()
        self._next_id += 1
        self.rows[row.id] = row  # before its slots hold anything: or nobody would empty them
        try:
            if cached is not None:
                row.cached_tokens = row.length = cached.shared_with(spec.prompt)
                self.cache.restore(slot_row, cached, row.length)
            self.speculator.admit(row)
        except BaseException:
            self.leave(row.id)
            raise
        return row

    def _grow(self, *, num_rows: int, num_slots: int) -> None:
        self._prefilled.clear()  # a larger cache has what is committed alone
        if self._bench is None or self.rounds is None:
            self.cache = self.cache.grown(num_rows=num_rows, num_slots=num_slots)
            return
        try:
            self._bench.grow(self.rounds, num_rows=num_rows, num_slots=num_slots)
        finally:  # interrupted or not, prefills and rounds have the same one
            self.cache = self.rounds.cache

    def row(self, row_id: int) -> Row:
        """A row that has joined and not left."""
        if row_id not in self.rows:
            raise ValueError(f"the batch has no row {row_id}; its rows are {sorted(self.rows)}")
        return self.rows[row_id]

    def leave(self, row_id: int) -> Row:
        """Give a row's slots back, finished or not."""
        row = self.row(row_id)
        self._left.append(row)  # from here on it leaves, even if this is interrupted (Ctrl-C)
        self._empty_left()
        self.speculator.left(row)
        return row

    def _empty_left(self) -> None:
        """Take out the rows that leave, and empty their slots: also of those whose ``leave`` was
        interrupted."""
        if self.rounds is not None:
            self.rounds.follow()
        while self._left:
            row = self._left[-1]
            self.rows.pop(row.id, None)
            self._prefilled.pop(row.id, None)
            if self.rounds is not None:
                self.rounds.leave(row)
            self.cache.release(row.slot_row, self._num_written(row))
            self._left.pop()

    def _num_written(self, row: Row) -> int:
        """Slots of a row, from the first on, that may hold something."""
        if self.rounds is not None:  # the device may be ahead of what is known of it
            return self.cache.num_slots
        return max(len(row.spec.prompt), row.length + MAX_NUM_DRAFT_TOKENS + 1)

    def give_up(self) -> None:
        """No row goes on: what is learnt from how requests end is learnt. The device, which may be
        what failed, is asked nothing."""
        for row in self.rows.values():
            self.speculator.left(row)

    def copied(self, row: Row) -> CachedText:
        """A row's committed keys and values, for a later one; it asked for them when it joined."""
        if self.rounds is not None:
            self.rounds.follow()
        states, drafter = row.exit_states, self.speculator.drafter
        if states is not None and drafter is not None:
            with Decoding():
                drafter.catch_up(states, self.cache, row.slot_row, row.length)
            self.cache.adapter_lengths[row.slot_row] = row.length
            states.clear()
        held = row.context[: row.length]
        return self.cache.copied(row.slot_row, held, self.stack, row.weights)

    @Decoding()
    def step(self) -> list[Round]:
        """One round for every unfinished row: its prefill if it is new, else draft and verify.

        If a pass or a verification raises, no row has changed, and it can be called again.

        Raises:
            RowError: nothing may follow one row's text, or nothing can be made of it; without it
                (``leave``) the others go on.
            RuntimeError: an earlier one was interrupted while rows were given what it did for them.
        """
        if self._applying:  # some have it, one perhaps in part, and the cache holds all of it
            raise RuntimeError(
                "a round was interrupted while its tokens were added to the rows, which cannot be "
                "decoded further: take them out, and add their prompts to another batch"
            )
        self._empty_left()
        going = [row for row in self.rows.values() if row.finish_reason is None]
        new = [row for row in going if not row.token_ids]
        decoding = [row for row in going if row.token_ids]
        weights = self.stack.shared.stamp() if new else None
        outcomes = [self._prefilled_by(weights, row) for row in new]
        if decoding and self.rounds is not None:
            # A prefill's token is known when this step ends: its row joins the round after that.
            outcomes += self._land(decoding, ahead=not new)
            decoding = self._left_to_host(decoding, outcomes)
        if decoding:
            outcomes += self._round(decoding)
        self._applying = True  # before the device's round is forgotten
        if self.rounds is not None:
            self.rounds.landed()
        for outcome in outcomes:
            self._apply(outcome)
        self._applying = False
        return [outcome.record for outcome in outcomes]

    def _apply(self, outcome: Outcome) -> None:
        row, emission = outcome.row, outcome.emission
        if row.exit_states is not None:
            self._keep(row.exit_states, outcome)
        row.length += outcome.num_committed
        if outcome.landing is None:
            self._commit(outcome)
        row.token_ids.extend(emission.token_ids)
        row.stream, row.finish_reason = emission.stream, emission.finish_reason
        row.rounds.append(outcome.record)
        if outcome.attempt is None:
            del self._prefilled[row.id]
            self.speculator.began(row)
        else:
            told = row, outcome.attempt, emission.token_ids, outcome.verdict.num_matches
            states = outcome.exit_states[0] if self._tells_of(outcome) else None
            self.speculator.observe(*told, states=states, by_host=outcome.landing is None)
        row.spec.sampler.forget_before(len(row.spec.prompt) + len(row.token_ids))
        if outcome.landing is not None and self.rounds is not None:
            self.rounds.settle(outcome.landing)
        if row.spec.sink is not None:
            count, scores = len(emission.token_ids), outcome.verdict.scores
            logits = outcome.verdict.logits[:count].float()
            row.spec.sink(logits, logits if scores is None else scores[:count])

    @staticmethod
    def _tells_of(outcome: Outcome) -> bool:
        """Whether a round leaves what drafts would have begun with, of a row by itself."""
        return outcome.landing is None and outcome.record.rows == 1 and bool(outcome.exit_states)

    def _commit(self, outcome: Outcome) -> None:
        row = outcome.row
        self.cache.commit(row.slot_row, outcome.num_committed)
        num_rejected = outcome.record.num_draft_tokens + 1 - outcome.num_committed
        if num_rejected > 0:  # of a prefill nothing is
            self.cache.sweep(row.slot_row, row.length, row.length + num_rejected)

    def _land(self, rows: Sequence[Row], *, ahead: bool) -> list[Outcome]:
        """What the oldest round that the device ran by itself did for these rows; the one after it
        is on its way by then."""
        assert self.rounds is not None
        began = time.perf_counter()
        landings = self.rounds.advance(rows, self.speculator, ahead=ahead)
        if not landings:
            return []
        attempts = [self.round_drafter.attempted(one) for one in landings]
        read = time.perf_counter()
        on_device = landings[0].seconds
        seconds = max(read - began, on_device)
        # By the device's clock: the host's has what choosing takes, and in the first round of a
        # text, which often drafts, that it seated the rows and launched another round behind it.
        passes = (on_device or seconds) if self.rounds.usual else None
        context = sum([one.row.length for one in landings]) // len(landings)
        shape = landings[0].shape
        controller = self.speculator.controller
        draft = observe_round_seconds(controller, self.plan, shape, context, seconds, passes)
        times = Times(draft, read - (seconds - draft), 0.0, landings[0].num_rows)
        return [
            self._landed(landing, attempt, times)
            for landing, attempt in zip(landings, attempts, strict=True)
        ]

    def _left_to_host(self, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> list[Row]:
        """Rows that the device neither had in this round nor has in the next one."""
        assert self.rounds is not None
        done = {outcome.row.id for outcome in outcomes}
        left = [row for row in rows if row.id not in done and not self.rounds.flies(row)]
        for row in left:
            self.rounds.leave(row)
        return left

    def _landed(self, landing: Landing, attempt: Attempt, times: Times) -> Outcome:
        verdict = Verdict(landing.tokens, None, NO_LOGITS)
        outcome = self._finished(landing.row, attempt, verdict, times, landing=landing)
        count, sent = len(outcome.emission.token_ids), landing.num_sent
        if count > sent or (count < sent and outcome.emission.finish_reason != "stop"):
            raise RuntimeError(
                f"the device emitted {sent} tokens where {count} were due: this is an error of "
                "layerskip; please report it"
            )
        return outcome

    def _keep(self, kept: ExitStates, outcome: Outcome) -> None:
        """What the block has seen, and what it has not: of a draft, what went through its passes
        and was accepted; of a plain round or of looked-up tokens, nothing."""
        row, seen = outcome.row, 0
        if outcome.attempt is None:
            kept.prompt += outcome.exit_states
            return
        draft = outcome.attempt.draft
        if draft.num_passes:
            kept.clear()
            seen = min(outcome.num_committed, len(draft.shared))
            self.cache.adapter_lengths[row.slot_row] = row.length + seen
        if seen < outcome.num_committed:
            # Copied: a view would keep all rows of the pass, spare ones too.
            kept.decoded += [s[seen : outcome.num_committed].clone() for s in outcome.exit_states]

    def _prefilled_by(self, weights: object, row: Row) -> Outcome:
        """A row's prefill by the weights of this stamp; that of an earlier step, if another row
        made that one fail."""
        then, outcome = self._prefilled.get(row.id, (None, None))
        if outcome is None or then != weights:
            outcome = self._prefill(row)
        else:
            elapsed = time.perf_counter() - row.joined
            outcome = replace(outcome, record=replace(outcome.record, elapsed_seconds=elapsed))
        self._prefilled[row.id] = weights, outcome
        return outcome

    def _prefill(self, row: Row) -> Outcome:
        began = time.perf_counter()
        if row.weights is not None and row.weights != (now := self.stack.shared.stamp()):
            # What was restored is of other weights than the rest would be.
            self.cache.release(row.slot_row, self._num_written(row))
            row.weights, row.length, row.cached_tokens = now, 0, 0
        prompt = row.spec.prompt
        states: list[Tensor] | None = None if row.exit_states is None else []
        logits = self.stack.prefill(
            prompt, self.cache, row.slot_row, start=row.length, states=states
        )[None]
        filled = time.perf_counter()
        case = Case(row.spec.sampler, logits, len(prompt), context=row.context, row=row.id)
        verdict = judge(case)
        times = Times(0.0, began, time.perf_counter() - filled, 1)
        return self._finished(row, None, verdict, times, states or ())

    def _round(self, rows: Sequence[Row]) -> list[Outcome]:
        began, sizes = time.perf_counter(), self.stack.pass_sizes
        num_proofs = sizes.num_proofs
        decided = self.speculator.decide(rows)
        chosen = time.perf_counter()
        controller = self.speculator.by_host
        requests, attempts = self.round_drafter.attempt(rows, decided, self.cache, controller)
        drafted = time.perf_counter()
        drafts = [a.draft for a in attempts]
        logits, states = self.verifier.verify(requests, drafts, self.cache)
        verified = time.perf_counter()
        cases = [
            Case(r.sampler, part, r.length + 1, d.tokens, d.q, r.context, row.id)
            for part, r, d, row in zip(logits, requests, drafts, rows, strict=True)
        ]
        verdicts = judge_all(cases)
        ended = time.perf_counter()
        if sizes.num_proofs == num_proofs:  # a proof's time is no pass's
            observe_seconds(controller, rows, attempts, drafted - chosen, ended - drafted)
        times = Times(drafted - began, drafted, ended - verified, len(rows))
        return [
            self._finished(row, attempt, verdict, times, (after,))
            for row, attempt, verdict, after in zip(rows, attempts, verdicts, states, strict=True)
        ]

    def _finished(
        self,
        row: Row,
        attempt: Attempt | None,
        verdict: Verdict,
        times: Times,
        exit_states: Sequence[Tensor] = (),
        *,
        landing: Landing | None = None,
    ) -> Outcome:
        """Emit the confirmed tokens and the one after them. All but the last are committed,
        and with them the token that was pending, or the prompt."""
        try:
            emission = row.emission(verdict.tokens)
        except UndecodableError as error:
            raise RowError(str(error), row.id) from error
        record = record_of(
            row,
            attempt,
            verdict,
            emission,
            times,
            ended=time.perf_counter(),
            num_uncovered_tokens=self.round_drafter.uncovered(emission.token_ids),
            exit_layer=self._exit_layer(attempt),
        )
        missing = len(row.spec.prompt) - row.length
        committed = len(emission.token_ids) if row.rounds else missing
        return Outcome(row, attempt, emission, verdict, committed, record, exit_states, landing)

    def _exit_layer(self, attempt: Attempt | None) -> int | None:
        if attempt is None or attempt.source != "early_exit" or self.plan is None:
            return None
        return self.plan.exit_layer
