"""The drafts of a round, made as was decided: early exits, look-ups, and the two combined."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch

from layerskip.cache import KVCache
from layerskip.constraint import NO_CONTEXT
from layerskip.control.experience import lookup_confidence
from layerskip.control.stopping import PLAIN, Choice, Stopper
from layerskip.controller import Controller
from layerskip.draft_head import DraftHead
from layerskip.drafting import NO_DRAFT, Draft, DraftRequest, EarlyExitDrafter
from layerskip.guessing import Lookahead, lookahead, room
from layerskip.lookup import NO_GUESS, Guess
from layerskip.outputs import Drafter, StopReason
from layerskip.row import Row
from layerskip.seats import Landing


@dataclass(frozen=True, eq=False)
class Attempt:
    """One row's draft of a round, and how it came about.

    Attributes:
        choice: where the draft came from.
        draft: the tokens.
        guess: what was looked up before the round.
        stopper: what the draft's confidence was held against.
        probing: whether the controller tried what it had given up.
        behind: what was looked up behind an early exit's draft.
    """

    choice: Choice
    draft: Draft
    guess: Guess
    stopper: Stopper | None
    probing: bool = False
    behind: Guess = NO_GUESS

    @property
    def source(self) -> Drafter:
        """Where the drafted tokens came from."""
        return self.choice.source if self.draft.tokens else "none"

    @property
    def confidences(self) -> tuple[float, ...]:
        """What spoke for each drafted token; none where nobody asked."""
        if self.source == "lookup":
            return _told(self.guess, len(self.draft.tokens))
        if not self.draft.confidences:
            return ()
        return *self.draft.confidences, *_told(self.behind, self.draft.num_looked_up)

    @property
    def stopped(self) -> StopReason:
        """Why the draft went no further."""
        if not self.draft.tokens:
            return ""
        if len(self.draft.tokens) - self.draft.num_looked_up >= self.choice.num_draft_tokens:
            return "number"
        told = self.stopper.stopped if self.stopper is not None else ""
        return told or "end"


class RoundDrafter:
    """Drafts for a decoder's rows what was decided, over the head that their texts let it have.

    Args:
        drafter: early exit; None looks up or decodes plainly.
        looks_up: whether tokens are looked up in a row's own prompt and output.
        free_rows: rows of a pass that cost no more than one, where no controller knows.
        head: over the draft vocabulary; None: drafts know every token.
    """

    def __init__(
        self,
        drafter: EarlyExitDrafter | None,
        *,
        looks_up: bool,
        free_rows: int,
        head: DraftHead | None,
    ) -> None:
        self.drafter, self.looks_up, self._free_rows = drafter, looks_up, free_rows
        self._plain = Attempt(PLAIN, NO_DRAFT, NO_GUESS, None)
        self._base = self._head = head
        self._kept = frozenset(head.ids.tolist()) if head is not None else frozenset()

    def renew(self) -> None:
        """See whether the head's weights are new; what was added to it is added again."""
        if self._base is not None:
            self._base = self._head = self._base.fresh()

    def attempt(
        self,
        rows: Sequence[Row],
        decided: Sequence[tuple[Choice, Guess]],
        cache: KVCache,
        controller: Controller | None,
    ) -> tuple[list[DraftRequest], list[Attempt]]:
        """A draft for each row as was decided, many of which are empty; and what was asked of the
        drafter, which is also what verification needs to know of the row.

        Args:
            controller: of rounds that the host drives, for rows that ask for "auto".
        """
        choices, guesses = [c for c, _ in decided], [g for _, g in decided]
        drafting = sum(c.source == "early_exit" for c in choices)
        guessing = self.looks_up or any(row.spec.sampler.constraint for row in rows)
        alone = len(rows) == 1
        width, prices = 0, None
        if guessing and drafting:
            width, prices = self._width(rows, drafting, controller)
        aheads = [lookahead(row, guess, prices) for row, guess in zip(rows, guesses, strict=True)]
        stoppers = [
            _stopper(row, c, a, controller, alone=alone)
            for row, c, a in zip(rows, choices, aheads, strict=True)
        ]
        requests = [
            _request(row, c, a, s, width)
            for row, c, a, s in zip(rows, choices, aheads, stoppers, strict=True)
        ]
        drafts = self._drafts(requests, choices, guesses, stoppers, cache, controller)
        behind = [NO_GUESS] * len(rows)
        if alone:
            drafts[0], behind[0] = _with_more(drafts[0], stoppers[0], aheads[0])
        probing = [row.state is not None and row.state.probing for row in rows]
        parts = zip(choices, drafts, guesses, stoppers, probing, behind, strict=True)
        return requests, [Attempt(*each) for each in parts]

    def attempted(self, landing: Landing) -> Attempt:
        """The draft of a round that is over, each token by a pass of its own."""
        tokens, choice = landing.draft, landing.choice
        if not tokens:
            if self._plain.choice is not choice:  # most rows have the one of the row before
                self._plain = Attempt(choice, NO_DRAFT, NO_GUESS, None)
            return self._plain
        # When it was launched the row's limit looked farther by a round.
        choice = choice.at_most(room(landing.row))
        # Together, draft and verify ran every token through the first layer once: it is counted
        # with verify, which does so without a draft.
        draft = Draft(tokens, (), num_passes=len(tokens))
        return Attempt(choice, draft, NO_GUESS, None, landing.probing)

    def _width(
        self, rows: Sequence[Row], drafting: int, controller: Controller | None
    ) -> tuple[int, Sequence[float] | None]:
        """Looked-up or forced tokens that each row brings into a draft pass; and what they cost in
        one of a row by itself, if anybody knows how often its are right: then it brings what is
        worth it, however many that is."""
        if controller is None:
            return max(0, self._free_rows // drafting - 1), None
        state = rows[0].state
        if len(rows) == 1 and state is not None:
            prices = controller.guess_prices(rows[0].length, greedy=state.greedy)
            return len(prices), prices
        context = sum(row.length for row in rows) // len(rows)
        return controller.guesses(drafting, context), None

    def _drafts(
        self,
        requests: Sequence[DraftRequest],
        choices: Sequence[Choice],
        guesses: Sequence[Guess],
        stoppers: Sequence[Stopper | None],
        cache: KVCache,
        controller: Controller | None,
    ) -> list[Draft]:
        drafts = [NO_DRAFT] * len(requests)
        exits = [i for i, c in enumerate(choices) if c.source == "early_exit"]
        if exits:
            assert self.drafter is not None
            asked = [requests[i] for i in exits]
            going_on = None  # a row by itself asks its stopper
            if len(choices) > 1:
                going_on = _going_on(asked, [stoppers[i] for i in exits], choices, controller)
            made = self.drafter.draft(asked, cache, self.head_of(asked), going_on)
            for i, draft in zip(exits, made, strict=True):
                drafts[i] = draft
        for i, choice in enumerate(choices):
            if choice.source == "lookup":
                tokens = guesses[i].tokens[: choice.num_draft_tokens]
                drafts[i] = _looked_up(requests[i], tokens)
        return drafts

    def head_of(self, asking: Sequence[DraftRequest] | Sequence[Row]) -> DraftHead | None:
        """The trimmed head with what these rows' texts hold beside."""
        if self._head is None:
            return None
        self._head = self._head.including(frozenset().union(*(a.own_ids for a in asking)))
        return self._head

    def own(self, row: Row, tokens: Sequence[int]) -> None:
        """Its draft may take these tokens, and the few of a grammar that may come next."""
        if self._base is None:
            return
        more, constraint = frozenset(tokens), row.spec.sampler.constraint
        if constraint is not None and row.finish_reason is None:
            more |= constraint.few(row.context)  # the next pass asks for the same mask
        if new := more - self._kept - row.own_ids:
            row.own_ids |= new

    def uncovered(self, emitted: Sequence[int]) -> int:
        """Emitted tokens that the draft vocabulary lacks."""
        return 0 if self._base is None else sum(t not in self._kept for t in emitted)


def _stopper(
    row: Row, choice: Choice, ahead: Lookahead | None, controller: Controller | None, *, alone: bool
) -> Stopper | None:
    state, sampler = row.state, row.spec.sampler
    if state is None or choice.source != "early_exit" or controller is None:
        return None
    # A looked-up token behind a draft has no distribution that it was drawn from.
    compared = sampler.verification == "coupled"
    if ahead is None or not alone or not compared:
        return Stopper(state, choice, alone=alone)

    def behind(draft: Sequence[int], most: int) -> Sequence[float]:
        found = ahead.behind(draft)
        most = min(most, len(found.tokens))
        return state.lookup_survivals(found.match_length, found.stored, most)

    drawing = controller.times.drawing(greedy=state.greedy)
    return Stopper(state, choice, behind=behind, drawing=drawing)


def _request(
    row: Row, choice: Choice, ahead: Lookahead | None, stopper: Stopper | None, width: int
) -> DraftRequest:
    sampler = row.spec.sampler
    return DraftRequest(
        slot_row=row.slot_row,
        length=row.length,
        pending=row.token_ids[-1],
        num_draft_tokens=choice.num_draft_tokens,
        sampler=sampler,
        context=row.context if sampler.reads_context else NO_CONTEXT,
        goes_on=stopper.goes_on if stopper is not None else None,
        guess=ahead,
        num_guesses=width,
        own_ids=row.own_ids,
        exit_states=row.exit_states,
        tells=row.spec.tells,
    )


def _going_on(
    requests: Sequence[DraftRequest],
    stoppers: Sequence[Stopper | None],
    choices: Sequence[Choice],
    controller: Controller | None,
) -> Callable[[Sequence[int]], Collection[int]]:
    """Which early exits are worth another draft pass; a row with a fixed number always has it.

    Args:
        requests, stoppers: of the early exits.
        choices: of all rows.
    """
    context = sum(r.length for r in requests) // len(requests)
    judged = [s for s in stoppers if s is not None]
    # A pending token of each row, and what is drafted in any case.
    sure = len(choices) + sum(c.num_draft_tokens for c in choices if c.source == "lookup")
    sure += sum(r.num_draft_tokens for r, s in zip(requests, stoppers, strict=True) if s is None)

    def going_on(places: Sequence[int]) -> Collection[int]:
        asking = [(i, s) for i in places if (s := stoppers[i]) is not None]
        if not asking or controller is None:
            return places
        going = controller.going_on(
            [s for _, s in asking],
            context,
            rows=len(choices),
            verified=sure + sum(len(s.chances) for s in judged),
            others=len(places) - len(asking),
        )
        ended = {i for (i, _), goes in zip(asking, going, strict=True) if not goes}
        return [i for i in places if i not in ended]

    return going_on


def _with_more(
    draft: Draft, stopper: Stopper | None, ahead: Lookahead | None
) -> tuple[Draft, Guess]:
    """An early exit's draft with what is looked up behind it, as far as that pays; and that."""
    if stopper is None or ahead is None or not (count := stopper.num_behind(draft.tokens)):
        return draft, NO_GUESS
    found = ahead.behind(draft.tokens)
    tokens = (*draft.tokens, *found.tokens[:count])
    return replace(draft, tokens=tokens, num_looked_up=count), found


def _looked_up(request: DraftRequest, tokens: tuple[int, ...]) -> Draft:
    """Looked-up tokens as a draft: each was certain to be drafted."""
    sampler = request.sampler
    if sampler.verification == "coupled":
        return Draft(tokens, ())
    q = torch.zeros(len(tokens), sampler.vocab_size, dtype=torch.float64, device="cpu")
    q[range(len(tokens)), list(tokens)] = 1.0
    return Draft(tokens, (), tuple(q))


def _told(found: Guess, count: int) -> tuple[float, ...]:
    """What speaks for the first looked-up tokens."""
    return tuple(lookup_confidence(found.match_length, found.stored, ahead=i) for i in range(count))
