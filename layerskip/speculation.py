"""What each row does in a round, and what its texts and drafts leave for later ones."""

import time
from collections.abc import Sequence

from torch import Tensor

from layerskip.attempt import Attempt, RoundDrafter
from layerskip.control.asks import Ask, speaks_for
from layerskip.control.stopping import PLAIN, Choice
from layerskip.controller import Controller
from layerskip.guessing import guess_for, judged, room
from layerskip.hindsight import look_back, remember, tells
from layerskip.learning import learn
from layerskip.lookup import FORCED_MATCH, NO_GUESS, Guess, LookupStore
from layerskip.params import AUTO, most_draft_tokens
from layerskip.row import Row


class Speculator:
    """Decides for a decoder's rows what to draft, and learns from what became of it.

    Args:
        round_drafter: drafts what was decided.
        store: of earlier texts, searched where tokens are looked up at all.

    Attributes:
        controller: decides for rows that ask for "auto"; None: they decode plainly. Rounds that the
            host drives have its ``by_host``, if there is one.
    """

    def __init__(self, round_drafter: RoundDrafter, *, store: LookupStore | None) -> None:
        self._round_drafter, self.store = round_drafter, store
        self.drafter, self.looks_up = round_drafter.drafter, round_drafter.looks_up
        self.controller: Controller | None = None
        self._exits: dict[int, Choice] = {}  # by number of drafted tokens

    def admit(self, row: Row) -> None:
        """Give a new row its estimates, and see whether the head's weights are new."""
        self._round_drafter.renew()
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
            head = self._round_drafter.head_of([row])
            began = time.perf_counter()
            runs = look_back(row, drafter, head)
            seconds = time.perf_counter() - began
            controller.observe_hindsight(state, runs, row.length, seconds)
            row.seen.clear()

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

    def began(self, row: Row) -> None:
        """After a row's prefill: its draft may take the tokens of its prompt, and the first one."""
        self._round_drafter.own(row, row.context)
        self._ended(row)

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
        self._round_drafter.own(row, emitted)
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


def _all_sleep(rows: Sequence[Row]) -> bool:
    """Whether nothing is looked up for them; what a grammar forces pays in any batch."""
    for row in rows:  # a plain loop: each round asks
        free = row.spec.sampler.constraint is None
        if not free or row.state is None or not row.state.sleeps(len(rows)):
            return False
    return True
