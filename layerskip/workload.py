"""Requests to simulate: recorded ones, resampled whole, or invented ones.

With greedy or coupled sampling, and drafts from leading layers, whether the draft of a text's token
is right depends on the text before it alone, not on where a round began. Recorded rounds tell it
for most tokens, and a simulated round that begins anywhere reads on from there: so rounds of a
request hang together as they did. Tokens that no draft tried (the extra one of a round, plain
rounds) are drawn by their request's own share of right drafts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from layerskip.params import MAX_NUM_DRAFT_TOKENS, check_integer

UNKNOWN = -1
OWN_WEIGHT = 8.0  # known tokens of a text that weigh as much as what texts have in common
MOST_TOKENS = 500_000_000
BLOCK_TOKENS = 1_000_000
STEPS = 255  # of a chance

NO_CHANCES = np.zeros(0, dtype=np.uint8)
Bits = NDArray[np.int8]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RecordedText:
    """One recorded request.

    Attributes:
        prompt_tokens: of its prompt.
        limit: most tokens that it might have emitted; the draft's room ends there.
        right: for each emitted token whether its draft was right: 1, 0, or -1 where not known, as
            for the first one, which is never drafted.
        chances: of being right that its confidence gave it (``Round.chances``); NaN if not known.
        prefill: seconds; None if not recorded.
    """

    prompt_tokens: int
    limit: int
    right: Bits
    chances: Floats
    prefill: float | None = None


@dataclass(frozen=True, eq=False)
class Stream:
    """Requests in the order of their arrival; tokens of all of them lie one after another.

    Attributes:
        prompt_tokens, tokens, limits: of each request; ``tokens`` are what it will emit.
        prefill: seconds of each; NaN where not recorded.
        offsets: of each request's first token.
        runs: for each token how many drafted ones would be right in a row, from it on.
        chances: of being right that each token's confidence gives it, in steps of 1 / ``STEPS``;
            empty if no confidence was recorded.
        chances_after_wrong: of tokens drafted behind a wrong one, to draw from; likewise.
    """

    prompt_tokens: Ints
    tokens: Ints
    limits: Ints
    prefill: Floats
    offsets: Ints
    runs: NDArray[np.uint8]
    chances: NDArray[np.uint8]
    chances_after_wrong: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def acceptance(self) -> Floats:
        """Of the first, second, ... drafted token, if those before it are right. Where the text
        ends nobody knows of the next one."""
        room = np.repeat(self.offsets + self.tokens, self.tokens) - np.arange(len(self.runs))
        runs, depths = np.minimum(self.runs, room), MAX_NUM_DRAFT_TOKENS + 1
        ends, cut = (np.bincount(r, minlength=depths) for r in (runs, runs[runs == room]))
        reached = ends[::-1].cumsum()[::-1].astype(np.float64)
        return reached[1:] / np.maximum(reached[:-1] - cut[:-1], 1.0)


class Recorded:
    """Texts to draw requests from.

    Args:
        texts: at least one, with at least one judged token.
        chances_after_wrong: of drafted tokens behind a wrong one.
    """

    def __init__(
        self, texts: Sequence[RecordedText], chances_after_wrong: Sequence[float] = ()
    ) -> None:
        if not texts:
            raise ValueError("texts must be one or more recorded requests, got none")
        self.texts = texts
        right = np.concatenate([t.right for t in texts])
        if not (right >= 0).any():
            raise ValueError(
                "no early exit's draft was recorded, and what is looked up says nothing of one: "
                "measure with an arm other than 0, a draft plan and more than one new token"
            )
        chances = np.concatenate([t.chances for t in texts])
        known = ~np.isnan(chances) & (right >= 0)
        # Of right tokens and of wrong ones: what to draw from where a token's own is not known.
        self._pools = tuple(_stepped(chances[known & (right == r)]) for r in (0, 1))
        self._after_wrong = _stepped(np.asarray(chances_after_wrong))
        self._right, self._known, self._chances = right, known, _stepped(chances)
        lengths = np.array([len(t.right) for t in texts])
        self._lengths, self._starts = lengths, np.cumsum(lengths) - lengths
        self._rates = _rates(texts, float(right[right >= 0].mean()))

    @property
    def has_confidence(self) -> bool:
        """Whether there are chances of right tokens and of wrong ones."""
        return all(len(pool) for pool in self._pools)

    def stream(self, num_requests: int, seed: int, new_tokens: int | None = None) -> Stream:
        """Whole requests, drawn with replacement.

        Args:
            new_tokens: of every request, recorded texts being gone over again where they are
                shorter; None: as recorded.
        """
        draw = np.random.default_rng([seed, 0])
        chosen = draw.integers(len(self.texts), size=num_requests)
        tokens = self._lengths[chosen]
        limits = np.array([t.limit for t in self.texts])[chosen]
        if new_tokens is not None:
            tokens = limits = np.full(num_requests, new_tokens)
        runs, chances = [], []
        for part in _blocks(tokens):
            text = np.repeat(chosen[part], tokens[part])
            place = _within(tokens[part])
            length = self._lengths[text]
            again = 1 + (place - 1) % np.maximum(length - 1, 1)
            at = self._starts[text] + np.where(place < length, place, np.minimum(again, length - 1))
            right = self._right[at].astype(np.int8)
            unknown = right == UNKNOWN
            right[unknown] = draw.random(int(unknown.sum())) < self._rates[text[unknown]]
            runs.append(run_lengths(right == 1, tokens[part]))
            if self.has_confidence:
                chances.append(self._drawn_chances(at, right, draw))
        prefill = [np.nan if t.prefill is None else t.prefill for t in self.texts]
        return Stream(
            np.array([t.prompt_tokens for t in self.texts])[chosen],
            tokens,
            limits,
            np.array(prefill)[chosen],
            np.cumsum(tokens) - tokens,
            np.concatenate(runs),
            np.concatenate(chances) if chances else NO_CHANCES,
            self._after_wrong if len(self._after_wrong) else self._pools[0],
        )

    def _drawn_chances(self, at: Ints, right: Bits, draw: np.random.Generator) -> NDArray[np.uint8]:
        """Recorded ones, and drawn ones where a token's own is not known."""
        chances = self._chances[at]
        for r, pool in enumerate(self._pools):
            missing = ~self._known[at] & (right == r)
            chances[missing] = draw.choice(pool, int(missing.sum()))
        return chances


@dataclass(frozen=True)
class Synthetic:
    """Invented requests: all alike, each round drawn by itself.

    Attributes:
        acceptance: of the first, second, ... drafted token, if those before it are right; the last
            one holds for all further ones.
        prompt_tokens, new_tokens: of every request.
    """

    acceptance: tuple[float, ...]
    prompt_tokens: int
    new_tokens: int

    def __post_init__(self) -> None:
        if not self.acceptance or not all(0.0 <= a <= 1.0 for a in self.acceptance):
            raise ValueError(
                f"acceptance must be one or more shares from 0 to 1, got {self.acceptance}"
            )
        for name in ("prompt_tokens", "new_tokens"):
            check_integer(name, getattr(self, name), 1)

    def stream(self, num_requests: int, seed: int, new_tokens: int | None = None) -> Stream:
        """So many of them."""
        draw = np.random.default_rng([seed, 0])
        tokens = np.full(num_requests, new_tokens or self.new_tokens)
        parts = list(_blocks(tokens))
        line = [
            self.acceptance[min(i, len(self.acceptance) - 1)] for i in range(MAX_NUM_DRAFT_TOKENS)
        ]
        survival = np.cumprod(line)[::-1]
        runs = []
        for part in parts:
            chance = draw.random(int(tokens[part].sum()))
            # As many as have a survival above the chance: the array ascends.
            runs.append(len(line) - np.searchsorted(survival, chance, side="right"))
        return Stream(
            np.full(num_requests, self.prompt_tokens),
            tokens,
            tokens,
            np.full(num_requests, np.nan),
            np.cumsum(tokens) - tokens,
            np.concatenate(runs).astype(np.uint8),
            NO_CHANCES,
            NO_CHANCES,
        )


Requests = Recorded | Synthetic


def run_lengths(right: NDArray[np.bool_], tokens: Ints) -> NDArray[np.uint8]:
    """For each token how many right ones follow in a row, itself the first, in its own request."""
    ends = np.repeat(np.cumsum(tokens), tokens)
    places = np.arange(len(right))
    wrong = np.where(right, len(right), places)
    following = np.minimum.accumulate(wrong[::-1])[::-1]
    return np.minimum(np.minimum(following, ends) - places, MAX_NUM_DRAFT_TOKENS).astype(np.uint8)


def _rates(texts: Sequence[RecordedText], common: float) -> Floats:
    """Each text's share of right drafts, drawn towards all texts' where it has few."""
    judged = np.array([(t.right >= 0).sum() for t in texts])
    right = np.array([(t.right == 1).sum() for t in texts])
    return (right + OWN_WEIGHT * common) / (judged + OWN_WEIGHT)


def _stepped(chances: Floats) -> NDArray[np.uint8]:
    return np.rint(STEPS * np.nan_to_num(chances)).astype(np.uint8)


def _within(tokens: Ints) -> Ints:
    """0, 1, 2, ... for each request's tokens."""
    return np.arange(int(tokens.sum())) - np.repeat(np.cumsum(tokens) - tokens, tokens)


def _blocks(tokens: Ints) -> Iterator[slice]:
    """Slices of requests with about a million tokens each.

    Raises:
        ValueError: there are more tokens than memory should be asked for.
    """
    total = int(tokens.sum())
    if total > MOST_TOKENS:
        raise ValueError(
            f"{total} tokens are too many to simulate, at most {MOST_TOKENS}; give fewer requests"
        )
    ends = np.cumsum(tokens)
    start = 0
    while start < len(tokens):
        before = int(ends[start - 1]) if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + BLOCK_TOKENS, side="right")))
        yield slice(start, end)
        start = end
