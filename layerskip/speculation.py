"""What each row drafts in a round, and what is learnt from how it went."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from layerskip.attempt import Attempt
from layerskip.cache import KVCache
from layerskip.constraint import NO_CONTEXT
from layerskip.control.asks import Ask, speaks_for
from layerskip.control.stopping import PLAIN, Choice, Stopper
from layerskip.controller import Controller
from layerskip.draft_head import DraftHead
from layerskip.drafting import NO_DRAFT, Draft, DraftRequest, EarlyExitDrafter
from layerskip.guessing import Lookahead, guess_for, judged, lookahead, room
from layerskip.hindsight import look_back, remember, tells
from layerskip.learning import learn
from layerskip.lookup import FORCED_MATCH, NO_GUESS, Guess, LookupStore
from layerskip.params import AUTO, most_draft_tokens
from layerskip.row import Row
from layerskip.seats import Landing


class Speculator:
    """Decides for a decoder's rows what to draft, has it drafted, and learns.

    Args:
        drafter: early exit; None looks up or decodes plainly.
        looks_up: whether tokens are looked up in a row's own prompt and output.
        store: and in what earlier requests left there.
        free_rows: rows of a pass that cost no more than one, where no controller knows.
        head: over the draft vocabulary; None: drafts know every token.

    Attributes:
        controller: decides for rows that ask for "auto"; None: they decode plainly. Rounds that the
            host drives have its ``by_host``, if there is one.
    """

    def __init__(
        self,
        drafter: EarlyExitDrafter | None,
        *,
        looks_up: bool,
        store: LookupStore | None,
        free_rows: int,
        head: DraftHead | None,
    ) -> None:
        self.drafter = drafter
        self.controller: Controller | None = None
        self.looks_up, self.store, self.free_rows = looks_up, store, free_rows
        self._plain = Attempt(PLAIN, NO_DRAFT, NO_GUESS, None)
        self._exits: dict[int, Choice] = {}  # by number of drafted tokens
        self._base = self._head = head
        self._kept = frozenset(head.ids.tolist()) if head is not None else frozenset()

    def admit(self, row: Row) -> None:
        """Give a new row its estimates, and see whether the head's weights are new."""
        if self._base is not None:
            self._base = self._head = self._base.fresh()
        if row.spec.num_draft_tokens == AUTO and self.controller is not None:
            sampler = row.spec.sampler
            if sampler.verification != "coupled":
                sampler.draw_apart(self.controller.next_number())
            row.state = self.controller.row(
                "greedy" if sampler.params.greedy else sampler.verification,
                row.spec.max_new_tokens,
                greedy=sampler.is_argmax,
            )

    def decide(self, rows: Sequence[Row]) -> list[tuple[Choice, Guess]]:
        """What each row's round does, and what was looked up for it. No pass is run, but the head's
        where a row looks back; the time that this takes is no draft's."""
        alone = len(rows) == 1
        if alone:
            self._look_back(rows[0])
        # Next, since plain rounds should cost nothing; nor is learnt from their look-ups.
        if _all_sleep(rows):
            guesses = [NO_GUESS] * len(rows)
        else:
            guesses = [guess_for(row, self.store, looks_up=self.looks_up) for row in rows]
        if (rest := self._at_rest(rows, guesses, self.by_host)) is not None:
            return [(choice, NO_GUESS) for choice in rest]
        drafts = self.drafter is not None
        looks_back = alone and tells(rows[0], self.drafter)
        choices = self._choices(rows, guesses, self.by_host, drafts=drafts, looks_back=looks_back)
        return list(zip(choices, guesses, strict=True))

    def _look_back(self, row: Row) -> None:
        """Learn from rounds without drafts what these would have come to."""
        state, drafter = row.state, self.drafter
        if state is None or state.next_look > 0 or not row.seen or drafter is None:
            return  # of most rounds, which should cost nothing
        controller = self.by_host
        if controller is None or room(row) < 1:
            return
        if controller.looks_back(state, len(row.seen), row.length):
            head = None
            if self._head is not None:
                head = self._head = self._head.including(row.own_ids)
            began = time.perf_counter()
            runs = look_back(row, drafter, head)
            seconds = time.perf_counter() - began
            controller.observe_hindsight(state, runs, row.length, seconds)
            row.seen.clear()

    def attempt(
        self, rows: Sequence[Row], decided: Sequence[tuple[Choice, Guess]], cache: KVCache
    ) -> tuple[list[DraftRequest], list[Attempt]]:
        """A draft for each row as was decided, many of which are empty; and what was asked of the
        drafter, which is also what verification needs to know of the row."""
        choices, guesses = [c for c, _ in decided], [g for _, g in decided]
        drafting = sum(c.source == "early_exit" for c in choices)
        context = sum(row.length for row in rows) // len(rows)
        guessing = self.looks_up or any(row.spec.sampler.constraint for row in rows)
        alone = len(rows) == 1
        prices = self._guess_prices(rows[0]) if alone and guessing and drafting else None
        width = self._width(drafting, context, guessing=guessing)
        if prices is not None:  # it brings what is worth it, however many that is
            width = len(prices)
        aheads = [lookahead(row, guess, prices) for row, guess in zip(rows, guesses, strict=True)]
        stoppers = [
            self._stopper(row, c, a, alone=alone)
            for row, c, a in zip(rows, choices, aheads, strict=True)
        ]
        requests = [
            self._request(row, c, a, s, width)
            for row, c, a, s in zip(rows, choices, aheads, stoppers, strict=True)
        ]
        drafts = self._drafts(requests, choices, guesses, stoppers, cache)
        behind = [NO_GUESS] * len(rows)
        if alone:
            drafts[0], behind[0] = _with_more(drafts[0], stoppers[0], aheads[0])
        probing = [row.state is not None and row.state.probing for row in rows]
        parts = zip(choices, drafts, guesses, stoppers, probing, behind, strict=True)
        return requests, [Attempt(*each) for each in parts]

    def counted(self, rows: Sequence[Row], *, drafts: bool = True) -> list[tuple[Choice, int]]:
        """For rounds whose drafts have their length before they begin, and are early exits: each
        row's choice, and how many tokens it would draft if its limit were far.

        Args:
            drafts: whether rows that leave it to the controller may draft at all.
        """
        guesses, has_exit = [NO_GUESS] * len(rows), self.drafter is not None
        if (rest := self._at_rest(rows, guesses, self.controller)) is not None:
            return [(choice, 0) for choice in rest]
        choices = self._choices(rows, guesses, self.controller, drafts=drafts and has_exit)
        return [self._counted(row, c) for row, c in zip(rows, choices, strict=True)]

    def _counted(self, row: Row, choice: Choice) -> tuple[Choice, int]:
        if row.state is not None:
            # No confidence ends the draft: it has the tokens that pay on the whole.
            fewer = choice.at_most(row.state.last or 1)
            return fewer, fewer.num_draft_tokens
        wanted = row.spec.num_draft_tokens
        if self.drafter is None or wanted == AUTO:
            return choice, 0
        return choice, min(most_draft_tokens(wanted), row.spec.max_draft_tokens)

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

    def _at_rest(
        self, rows: Sequence[Row], guesses: Sequence[Guess], controller: Controller | None
    ) -> list[Choice] | None:
        """Of rows that all leave it to the controller, and are all at rest; None of others."""
        states = [row.state for row in rows if row.state is not None]
        if controller is None or len(states) < len(rows):
            return None
        # Not in a list: where the first row drafts, no other's is asked for.
        return controller.at_rest(states, map(speaks_for, guesses))

    @property
    def by_host(self) -> Controller | None:
        """Decides for rounds that the host drives."""
        known = self.controller
        return known if known is None or known.by_host is None else known.by_host

    def _choices(
        self,
        rows: Sequence[Row],
        guesses: Sequence[Guess],
        controller: Controller | None,
        *,
        drafts: bool,
        looks_back: bool = False,
    ) -> list[Choice]:
        fixed = [
            self._fixed(row, guess)
            for row, guess in zip(rows, guesses, strict=True)
            if row.state is None
        ]
        asks = [
            Ask(
                row.state,
                context=row.length,
                room=room(row),
                guess=guess,
                left=row.spec.max_new_tokens - len(row.token_ids),
                looks_back=looks_back,
            )
            for row, guess in zip(rows, guesses, strict=True)
            if row.state is not None
        ]
        if not asks:
            return fixed
        assert controller is not None
        counts = [choice.num_draft_tokens for choice in fixed]
        chosen = iter(controller.choose(asks, drafts=drafts, fixed=counts))
        others = iter(fixed)
        return [next(others if row.state is None else chosen) for row in rows]

    def _fixed(self, row: Row, guess: Guess) -> Choice:
        if not row.spec.may_draft:
            return PLAIN
        wanted = row.spec.num_draft_tokens
        count = 0 if wanted == AUTO else min(most_draft_tokens(wanted), room(row))
        # What is forced needs no draft pass, if there is nothing to draft after it.
        forced = guess.match_length == FORCED_MATCH and (
            len(guess.tokens) >= count or row.spec.sampler.closed(row.context + guess.tokens)
        )
        if self.drafter is None or forced:
            count = min(count, len(guess.tokens))
            return Choice("lookup", count) if count else PLAIN
        if not count:
            return PLAIN
        if count not in self._exits:  # the same for every row, and in the next round again
            self._exits[count] = Choice("early_exit", count)
        return self._exits[count]

    def _width(self, drafting: int, context: int, *, guessing: bool) -> int:
        """Looked-up or forced tokens that each row brings into a draft pass."""
        if not guessing or not drafting:
            return 0
        if self.by_host is not None:
            return self.by_host.guesses(drafting, context)
        return max(0, self.free_rows // drafting - 1)

    def _guess_prices(self, row: Row) -> Sequence[float] | None:
        """Of looked-up tokens in a draft pass of one row; None if nobody knows how often its are
        right."""
        if row.state is None or self.by_host is None:
            return None
        return self.by_host.guess_prices(row.length, greedy=row.state.greedy)

    def _stopper(
        self, row: Row, choice: Choice, ahead: Lookahead | None, *, alone: bool
    ) -> Stopper | None:
        state, sampler = row.state, row.spec.sampler
        if state is None or choice.source != "early_exit" or self.by_host is None:
            return None
        # A looked-up token behind a draft has no distribution that it was drawn from.
        compared = sampler.verification == "coupled"
        if ahead is None or not alone or not compared:
            return Stopper(state, choice, alone=alone)

        def behind(draft: Sequence[int], most: int) -> Sequence[float]:
            found = ahead.behind(draft)
            most = min(most, len(found.tokens))
            return state.lookup_survivals(found.match_length, found.stored, most)

        drawing = self.by_host.times.drawing(greedy=state.greedy)
        return Stopper(state, choice, behind=behind, drawing=drawing)

    def _request(
        self,
        row: Row,
        choice: Choice,
        ahead: Lookahead | None,
        stopper: Stopper | None,
        width: int,
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

    def _drafts(
        self,
        requests: Sequence[DraftRequest],
        choices: Sequence[Choice],
        guesses: Sequence[Guess],
        stoppers: Sequence[Stopper | None],
        cache: KVCache,
    ) -> list[Draft]:
        drafts = [NO_DRAFT] * len(requests)
        exits = [i for i, c in enumerate(choices) if c.source == "early_exit"]
        if exits:
            assert self.drafter is not None
            asked = [requests[i] for i in exits]
            going_on = None  # a row by itself asks its stopper
            if len(choices) > 1:
                going_on = self._going_on(asked, [stoppers[i] for i in exits], choices)
            made = self.drafter.draft(asked, cache, self._head_of(asked), going_on)
            for i, draft in zip(exits, made, strict=True):
                drafts[i] = draft
        for i, choice in enumerate(choices):
            if choice.source == "lookup":
                tokens = guesses[i].tokens[: choice.num_draft_tokens]
                drafts[i] = _looked_up(requests[i], tokens)
        return drafts

    def _going_on(
        self,
        requests: Sequence[DraftRequest],
        stoppers: Sequence[Stopper | None],
        choices: Sequence[Choice],
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
        sure += sum(
            r.num_draft_tokens for r, s in zip(requests, stoppers, strict=True) if s is None
        )

        controller = self.by_host

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

    def _head_of(self, requests: Sequence[DraftRequest]) -> DraftHead | None:
        """The trimmed head with what these rows' texts hold beside."""
        if self._head is None:
            return None
        self._head = self._head.including(frozenset().union(*(r.own_ids for r in requests)))
        return self._head

    def uncovered(self, emitted: Sequence[int]) -> int:
        """Emitted tokens that the draft vocabulary lacks."""
        return 0 if self._base is None else sum(t not in self._kept for t in emitted)

    def began(self, row: Row) -> None:
        """After a row's prefill: its draft may take the tokens of its prompt, and the first one."""
        self._own(row, row.context)
        self._ended(row)

    def _own(self, row: Row, tokens: Sequence[int]) -> None:
        """Its draft may take these tokens, and the few of a grammar that may come next."""
        if self._base is None:
            return
        more, constraint = frozenset(tokens), row.spec.sampler.constraint
        if constraint is not None and row.finish_reason is None:
            more |= constraint.few(row.context)  # the next pass asks for the same mask
        if new := more - self._kept - row.own_ids:
            row.own_ids |= new

    def _ended(self, row: Row) -> None:
        """A finished text is looked up in by later ones."""
        if row.finish_reason is not None and self.store is not None:
            self.store.add(row.context)

    def observe(
        self,
        row: Row,
        attempt: Attempt,
        emitted: Sequence[int],
        num_matches: int,
        *,
        states: Tensor | None = None,
        by_host: bool = True,
    ) -> None:
        """What became of a row's draft; the row has ``emitted`` already.

        Args:
            num_matches: drafted tokens that verification confirmed, before any cut.
            states: ``(tokens, hidden)`` after the exit, of a row by itself: of the token that was
                pending, and of those that were drafted.
            by_host: whether the host drove the round; else the device ran it by itself.
        """
        if states is None or attempt.draft.num_passes or row.finish_reason is not None:
            row.seen.clear()
        elif tells(row, self.drafter) and row.state is not None and not row.state.last:
            remember(row, emitted, states)
        self._own(row, emitted)
        self._ended(row)
        controller = self.by_host if by_host else self.controller
        if row.state is None or controller is None:
            return
        guess = attempt.guess
        if guess.tokens:
            right = judged(guess.tokens, emitted)
            row.state.add_lookup(guess.match_length, right, stored=guess.stored)
        learn(controller, row.state, attempt, row.length, emitted, num_matches)
        if row.finish_reason is not None:
            row.state.end(len(row.token_ids))

    def left(self, row: Row) -> None:
        """A row was taken out before its end, or after it."""
        if row.state is not None:
            row.state.end(len(row.token_ids))


def _with_more(
    draft: Draft, stopper: Stopper | None, ahead: Lookahead | None
) -> tuple[Draft, Guess]:
    """An early exit's draft with what is looked up behind it, as far as that pays; and that."""
    count = stopper.num_behind(draft.tokens) if stopper is not None and ahead is not None else 0
    if not count or ahead is None:
        return draft, NO_GUESS
    found = ahead.behind(draft.tokens)
    tokens = (*draft.tokens, *found.tokens[:count])
    return replace(draft, tokens=tokens, num_looked_up=count), found


def _all_sleep(rows: Sequence[Row]) -> bool:
    """Whether nothing is looked up for them; what a grammar forces pays in any batch."""
    for row in rows:  # a plain loop: each round asks
        free = row.spec.sampler.constraint is None
        if not free or row.state is None or not row.state.sleeps(len(rows)):
            return False
    return True


def _looked_up(request: DraftRequest, tokens: tuple[int, ...]) -> Draft:
    """Looked-up tokens as a draft: each was certain to be drafted."""
    sampler = request.sampler
    if sampler.verification == "coupled":
        return Draft(tokens, ())
    q = torch.zeros(len(tokens), sampler.vocab_size, dtype=torch.float64, device="cpu")
    q[range(len(tokens)), list(tokens)] = 1.0
    return Draft(tokens, (), tuple(q))
