"""Tokens that may come next without a pass: looked up, or forced by a grammar."""

from collections.abc import Callable, Sequence

from layerskip.lookup import FORCED_MATCH, Guess, LookupStore, TokenIndex
from layerskip.params import MAX_NUM_DRAFT_TOKENS, most_draft_tokens
from layerskip.row import Row

Guesser = Callable[[Sequence[int], int], Sequence[int]]
NO_GUESS = Guess()


def room(row: Row) -> int:
    """Tokens that may be drafted: the pending token's successor is emitted without."""
    most = min(MAX_NUM_DRAFT_TOKENS, row.spec.max_draft_tokens)
    return min(most, row.spec.limit - len(row.token_ids) - 1)


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
        row.index = TokenIndex(row.context, store=store)
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


def guess_behind(row: Row, draft: Sequence[int]) -> Guess:
    """What may follow a draft, by the text with it; nothing where a grammar knows more, or the
    draft ends the text."""
    most = room(row) - len(draft)
    if row.index is None or row.spec.sampler.constraint is not None or most < 1:
        return NO_GUESS
    if not draft or draft[-1] in row.spec.eos_ids:
        return NO_GUESS
    return _until_end(row.index.guess(most, draft), row.spec.eos_ids)


def guesser(row: Row, first: Guess) -> Guesser | None:
    """What may follow tokens drafted so far: forced text, else what is looked up.

    Args:
        first: what ``guess_for`` found to follow the row's last token.
    """
    index, constraint = row.index, row.spec.sampler.constraint
    if index is None and constraint is None:
        return None

    def guess(ahead: Sequence[int], most: int) -> Sequence[int]:
        if not ahead:
            return first.tokens[:most]
        found = index.guess(most, ahead).tokens if index is not None else ()
        if constraint is None:
            return found
        return constraint.guess((*row.context, *ahead), found, most)[0]

    return guess


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
    ends = [i for i, token in enumerate(guess.tokens) if token in eos_ids]
    if not ends:
        return guess
    return Guess(guess.tokens[: ends[0] + 1], guess.match_length, guess.stored)
