"""Tokens that may come next without a pass: looked up, or forced by a grammar."""

import itertools
from collections.abc import Sequence

from layerskip.lookup import FORCED_MATCH, NO_GUESS, Guess, LookupStore, TokenIndex
from layerskip.params import MAX_AUTO_DRAFT_TOKENS, MAX_NUM_DRAFT_TOKENS, most_draft_tokens
from layerskip.row import Row


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
    most = min(left, most_draft_tokens(wanted))
    guess = _indexed(row, store).guess(most) if looks_up else NO_GUESS
    return _governed(row, (), _until_end(guess, row.spec.eos_ids), most)


def _indexed(row: Row, store: LookupStore | None) -> TokenIndex:
    """A row's prompt and output so far, ready to be looked up in: what it has emitted is added
    here, so that rounds in which nothing is looked up take no time for it."""
    if row.index is None:
        sampler = row.spec.sampler
        # Random numbers of the seed decide over a text and judge its drafts, whose lengths guesses
        # change: what the same seed drew before would not be independent of them.
        may_know = sampler.verification == "coupled"
        known = store if may_know else None
        row.index = TokenIndex(row.context, store=known, vocab_size=sampler.vocab_size)
        return row.index
    try:
        row.index.extend(row.token_ids[len(row.index) - len(row.spec.prompt) :])
    except BaseException:  # Ctrl-C: tokens without their places break every later guess
        row.index = None
        raise
    return row.index


class Lookahead:
    """What may follow a row's draft while it grows: forced text, else what is looked up, once at
    each place.

    Args:
        row: whose index, or grammar, knows.
        first: what ``guess_for`` found to follow the row's last token.
        prices: of one, two, ... tokens in a draft pass, as ``Controller.guess_prices`` has them:
            only as many are told as save more by what is known of the row's look-ups. None: all.
    """

    def __init__(self, row: Row, first: Guess, prices: Sequence[float] | None = None) -> None:
        self._row, self._first, self._prices = row, first, prices
        # Tokens of a draft; and how many were looked up behind them at most, and which.
        self._at, self._most, self._known = 0, 0, NO_GUESS

    def __call__(self, draft: Sequence[int], most: int) -> Sequence[int]:
        """So many tokens at most, for a draft pass to check."""
        found = self._first
        if draft:
            found = _governed(self._row, draft, self._looked_up(draft, most), most)
        return found.tokens[: min(most, self._num_worthwhile(found))]

    def _num_worthwhile(self, found: Guess) -> int:
        """How many tokens save more than they take: few of what matched little, or of a text whose
        look-ups have mostly been wrong; all that a grammar forces."""
        count = len(found.tokens)
        sure = found.match_length == FORCED_MATCH
        if self._prices is None or sure or (state := self._row.state) is None:
            return count
        survivals = state.lookup_survivals(found.match_length, found.stored, count)
        gains = itertools.accumulate(survivals)
        profits = [gain - price for gain, price in zip(gains, self._prices, strict=False)]
        best = max(profits, default=0.0)
        return profits.index(best) + 1 if best > 0.0 else 0

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


def lookahead(row: Row, first: Guess, prices: Sequence[float] | None = None) -> Lookahead | None:
    """None where nothing can be known."""
    if row.index is None and row.spec.sampler.constraint is None:
        return None
    return Lookahead(row, first, prices)


def judged(guessed: Sequence[int], emitted: Sequence[int]) -> list[bool]:
    """Right guesses up to the first wrong one, which is False; none beyond what was emitted."""
    verdicts = []
    for guess, token in zip(guessed, emitted, strict=False):
        verdicts.append(guess == token)
        if guess != token:
            break
    return verdicts


def _governed(row: Row, draft: Sequence[int], found: Guess, most: int) -> Guess:
    """What a row's grammar, if there is one, leaves of what was looked up behind a draft, or knows
    to follow it."""
    constraint = row.spec.sampler.constraint
    if constraint is None:
        return found
    tokens, forced = constraint.guess(row.context + draft, found.tokens[:most], most)
    if not tokens:
        return NO_GUESS
    length = FORCED_MATCH if forced else found.match_length
    return Guess(tokens, length, found.stored and not forced)


def _until_end(guess: Guess, eos_ids: frozenset[int]) -> Guess:
    """Nothing is emitted after an end of sequence."""
    if eos_ids.isdisjoint(guess.tokens):
        return guess
    end = next(i for i, token in enumerate(guess.tokens) if token in eos_ids)
    return Guess(guess.tokens[: end + 1], guess.match_length, guess.stored)
