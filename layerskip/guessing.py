"""Tokens that may come next without a pass: looked up, or forced by a grammar."""

from collections.abc import Sequence

from layerskip.lookup import FORCED_MATCH, Guess, LookupStore, TokenIndex
from layerskip.params import MAX_AUTO_DRAFT_TOKENS, MAX_NUM_DRAFT_TOKENS, most_draft_tokens
from layerskip.row import Row

NO_GUESS = Guess()


def room(row: Row) -> int:
    """Tokens that may be drafted: the pending token's successor is emitted without."""
    most = min(MAX_NUM_DRAFT_TOKENS, row.spec.max_draft_tokens)
    return min(most, row.spec.max_new_tokens - len(row.token_ids) - 1)


def guess_for(row: Row, store: LookupStore | None, *, looks_up: bool) -> Guess:
    """What may follow a row's last token; nothing where it may not draft.

    Args:
        store: of earlier texts, searched if ``looks_up``; the row's index is made here.
        looks_up: whether tokens are looked up. What a grammar forces is known in any case.
    """
    left, wanted = room(row), row.spec.num_draft_tokens
    constraint = row.spec.sampler.constraint
    if not (looks_up or constraint) or left == 0 or wanted == 0:
        return NO_GUESS
    if looks_up and row.index is None:
        vocab_size = row.spec.sampler.vocab_size
        row.index = TokenIndex(row.context, store=store, vocab_size=vocab_size)
    most = min(left, most_draft_tokens(wanted))
    guess = row.index.guess(most) if row.index is not None else NO_GUESS
    guess = _until_end(guess, row.spec.eos_ids)
    if constraint is None:
        return guess
    tokens, forced = constraint.guess(row.context, guess.tokens, most)
    if not tokens:
        return NO_GUESS
    length = FORCED_MATCH if forced else guess.match_length
    return Guess(tokens, length, guess.stored and not forced)


class Lookahead:
    """What may follow a row's draft while it grows: forced text, else what is looked up, once at
    each place.

    Args:
        row: whose index, or grammar, knows.
        first: what ``guess_for`` found to follow the row's last token.
    """

    def __init__(self, row: Row, first: Guess) -> None:
        self._row, self._first = row, first
        # Tokens of a draft; and how many were looked up behind them at most, and which.
        self._at, self._most, self._known = 0, 0, NO_GUESS

    def __call__(self, draft: Sequence[int], most: int) -> Sequence[int]:
        """So many tokens at most, for a draft pass to check."""
        if not draft:
            return self._first.tokens[:most]
        found = self._looked_up(draft, most).tokens[:most]
        constraint = self._row.spec.sampler.constraint
        if constraint is None:
            return found
        return constraint.guess((*self._row.context, *draft), found, most)[0]

    def behind(self, draft: Sequence[int]) -> Guess:
        """For the verify pass to check: nothing where a grammar knows more, or the text ends."""
        eos_ids = self._row.spec.eos_ids
        if self._row.spec.sampler.constraint is not None or not draft or draft[-1] in eos_ids:
            return NO_GUESS
        return _until_end(self._looked_up(draft, MAX_AUTO_DRAFT_TOKENS - len(draft)), eos_ids)

    def _looked_up(self, draft: Sequence[int], most: int) -> Guess:
        index, count = self._row.index, len(draft)
        most = min(most, room(self._row) - count)
        if index is None or most < 1:
            return NO_GUESS
        if count != self._at or most > self._most:  # a draft only grows
            self._at, self._most, self._known = count, most, index.guess(most, draft)
        return self._known


def lookahead(row: Row, first: Guess) -> Lookahead | None:
    """None where nothing can be known."""
    if row.index is None and row.spec.sampler.constraint is None:
        return None
    return Lookahead(row, first)


def judged(guessed: Sequence[int], emitted: Sequence[int]) -> list[bool]:
    """Right guesses up to the first wrong one, which is False; none beyond what was emitted."""
    verdicts = []
    for guess, token in zip(guessed, emitted, strict=False):
        verdicts.append(guess == token)
        if guess != token:
            break
    return verdicts


def _until_end(guess: Guess, eos_ids: frozenset[int]) -> Guess:
    """Nothing is emitted after an end of sequence."""
    if eos_ids.isdisjoint(guess.tokens):
        return guess
    end = next(i for i, token in enumerate(guess.tokens) if token in eos_ids)
    return Guess(guess.tokens[: end + 1], guess.match_length, guess.stored)
