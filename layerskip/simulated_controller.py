"""How far simulated rows draft: not at all, a fixed number, or as ``Controller`` has it.

``Automatic`` is the controller's rule over arrays, for many batches at once. It chooses by tokens a
second, stops on a token's chance, weighs a further pass, keeps hysteresis and pays for probes as
``Controller`` does, with the same constants; a test holds one against the other. It is simpler in
these points: what all requests have in common is known from the start, a request departs from that
by one ratio (not by position too), looked-up tokens are not chosen, and clocks correct nothing.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from layerskip.controller import HYSTERESIS, PROBE_SHARE
from layerskip.estimates import LARGEST, LEAST_SURVIVAL, ROW_DISCOUNT, ROW_WEIGHT
from layerskip.params import MAX_AUTO_DRAFT_TOKENS
from layerskip.pass_costs import PassCosts
from layerskip.workload import STEPS, Stream

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
DEPTH = MAX_AUTO_DRAFT_TOKENS


@dataclass(frozen=True, eq=False)
class Batches:
    """Rows of many batches before a round; arrays are ``(batches, rows)``.

    Attributes:
        requests: of the stream.
        decoding: rows that take part.
        fresh: rows in their first round after the prefill.
        emitted: tokens so far.
        room: most tokens that may be drafted.
        context: slots that each batch's longest row holds, ``(batches,)``.
        right: drafted tokens that would be right.
    """

    requests: Ints
    decoding: Bools
    fresh: Bools
    emitted: Ints
    room: Ints
    context: Ints
    right: Ints


class Policy(Protocol):
    """How many tokens rows draft."""

    def lengths(self, batches: Batches) -> Ints:
        """Of this round, ``(batches, rows)``; 0 where a row does not decode."""
        ...

    def observe(self, batches: Batches, drafted: Ints) -> None:
        """The round was run."""
        ...


class Fixed:
    """The same number in every round, as far as there is room; 0: plain decoding."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens

    def lengths(self, batches: Batches) -> Ints:
        wanted = np.minimum(self.num_draft_tokens, batches.room)
        return np.where(batches.decoding, wanted, 0)

    def observe(self, batches: Batches, drafted: Ints) -> None:
        """Nothing is learnt."""


class Automatic:
    """What pays, from round to round.

    Args:
        costs: of passes, as the controller knows them: its table takes any number of rows at once.
        stream: the requests' chances, and acceptance over all of them.
        shape: batches and rows.
        seed: of chances behind a wrong token.
    """

    def __init__(self, costs: PassCosts, stream: Stream, shape: tuple[int, int], seed: int) -> None:
        self._costs, self._stream = costs, stream
        self._draw = np.random.default_rng([seed, 1])
        self._common = np.minimum(LARGEST, stream.acceptance[:DEPTH])
        self._expected_up_to = np.concatenate([[0.0], np.cumsum(self._common)])
        self._hits, self._expected = np.zeros(shape), np.zeros(shape)
        self._credit, self._drafted_last = np.zeros(shape), np.zeros(shape, dtype=np.bool_)
        self._probing = np.zeros(shape, dtype=np.bool_)
        self._plain = self._loss = np.zeros(shape[0])

    def lengths(self, batches: Batches) -> Ints:
        self._begin(batches)
        one = np.ones_like(batches.context)
        self._plain = self._costs.verify(one, one, one, batches.context)
        self._loss = (
            self._costs.draft(one, batches.context)
            + self._costs.verify(2 * one, one, 2 * one, batches.context)
            - self._plain
        )
        survivals: Floats = np.cumprod(self._acceptance(), axis=2, dtype=np.float64)
        wanted, planned, rate = self._best(batches, survivals)
        return self._grown(batches, self._settled(batches, wanted), planned, rate)

    def observe(self, batches: Batches, drafted: Ints) -> None:
        accepted = np.minimum(drafted, batches.right)
        judged = np.minimum(accepted + (accepted < drafted), DEPTH)
        keep = ROW_DISCOUNT**judged
        self._hits = keep * self._hits + accepted
        self._expected = keep * self._expected + self._expected_up_to[judged]
        plain = self._plain[:, None]
        earned = np.where(drafted == 0, PROBE_SHARE * plain, 0.0)
        won = (1.0 + accepted) * plain - (self._loss[:, None] + plain)
        earned = np.where(self._probing & (drafted > 0), won, earned)
        self._credit = np.minimum(self._credit + earned, plain)

    def _begin(self, batches: Batches) -> None:
        """Forget what was known of a row's last request."""
        for state in (self._hits, self._expected, self._credit, self._drafted_last):
            state[batches.fresh] = 0

    def _acceptance(self) -> Floats:
        """Of each row's first, second, ... drafted token, ``(batches, rows, DEPTH)``."""
        ratio = (self._hits + ROW_WEIGHT) / (self._expected + ROW_WEIGHT)
        return np.minimum(LARGEST, ratio[:, :, None] * self._common)

    def _best(self, batches: Batches, survivals: Floats) -> tuple[Bools, Ints, Floats]:
        """Rows that draft if the round is to give the most tokens a second, tokens that are then
        verified, and that rate.

        Tokens are taken in the order of their survival. Rows have one ratio each, so that their
        order is the same at every depth: the i-th row of a pass costs what i rows take more than
        i - 1.
        """
        count, rows, depth = survivals.shape
        likely = (survivals >= LEAST_SURVIVAL) & batches.decoding[:, :, None]
        possible = likely & (np.arange(depth) < batches.room[:, :, None])
        gains = np.where(possible, survivals, 0.0)
        rank = np.argsort(np.argsort(-gains[:, :, 0], axis=1), axis=1)
        more = self._more_for_a_row(batches.context, rows)[np.arange(count)[:, None], rank]
        order = np.argsort(-gains.reshape(count, -1), axis=1, kind="stable")
        taken = np.take_along_axis(gains.reshape(count, -1), order, 1)
        row, level = order // depth, order % depth
        num_rows = batches.decoding.sum(1)
        tokens = num_rows[:, None] + np.concatenate(
            [np.zeros((count, 1)), np.cumsum(taken, 1)], axis=1
        )
        drafting = np.cumsum(np.take_along_axis(more, row, 1), 1)
        longest = np.maximum.accumulate(level + 2, axis=1)
        verified = num_rows[:, None] + np.arange(1, rows * depth + 1)
        verify = self._costs.verify(verified, num_rows[:, None], longest, batches.context[:, None])
        plain = self._costs.verify(num_rows, num_rows, np.ones_like(num_rows), batches.context)
        seconds = np.concatenate([plain[:, None], drafting + verify], axis=1)
        rates = tokens / np.maximum(seconds, 1e-12)
        rates[:, 1:][taken == 0.0] = 0.0
        best = rates.argmax(1)
        chosen = np.arange(rows * depth) < best[:, None]
        wanted = np.zeros((count, rows), dtype=np.bool_)
        np.put_along_axis(wanted, np.where(chosen, row, row[:, :1]), best[:, None] > 0, 1)
        return wanted, num_rows + best, np.take_along_axis(rates, best[:, None], 1)[:, 0]

    def _more_for_a_row(self, context: Ints, rows: int) -> Floats:
        """Seconds that a draft pass grows by for its first, second, ... row."""
        counts = np.arange(rows + 1)
        seconds = self._costs.draft(counts[None], context[:, None])
        return np.diff(seconds, axis=1)

    def _settled(self, batches: Batches, wanted: Bools) -> Bools:
        """Rows that draft after hysteresis, and those that probe."""
        plain = self._plain[:, None]
        margin = HYSTERESIS * plain
        gain = self._acceptance()[:, :, 0] * plain - self._loss[:, None]
        fits = batches.decoding & (batches.room > 0)
        drafting = np.where(
            self._drafted_last, wanted | (gain > -margin), wanted & (gain >= margin)
        )
        self._probing = fits & ~drafting & (self._credit >= self._loss[:, None])
        self._drafted_last = np.where(fits, drafting, self._drafted_last)
        return fits & (drafting | self._probing)

    def _grown(self, batches: Batches, going: Bools, planned: Ints, rate: Floats) -> Ints:
        """Each draft grows until its chances, or all rows' together, are not worth more."""
        drafted = np.zeros_like(batches.room)
        reached = np.ones(drafted.shape)
        acceptance = self._acceptance()
        most = np.where(self._probing, 1, np.minimum(batches.room, DEPTH))
        for depth in range(DEPTH):
            drafted += going
            reached *= self._chances(batches, depth, acceptance)
            going = going & (drafted < most)
            if depth + 1 == DEPTH or not going.any():
                break
            gain = reached * acceptance[:, :, depth + 1]
            gain -= rate[:, None] * self._verify_growth(batches, planned, depth + 1)[:, None]
            going = going & (gain > 0.0)
            asking = going.sum(1)
            pass_seconds = self._costs.draft(asking, batches.context)
            going = going & ((gain * going).sum(1) > rate * pass_seconds)[:, None]
        return drafted

    def _chances(self, batches: Batches, depth: int, acceptance: Floats) -> Floats:
        """Of the token at this depth, as its confidence tells, else as is known of its row."""
        stream = self._stream
        if not len(stream.chances):
            return acceptance[:, :, depth]
        last = stream.tokens[batches.requests] - 1
        place = stream.offsets[batches.requests] + np.minimum(batches.emitted + depth, last)
        behind = self._draw.choice(stream.chances_after_wrong, batches.room.shape)
        told = np.where(depth > batches.right, behind, stream.chances[place])
        return np.minimum(LARGEST, told / STEPS)

    def _verify_growth(self, batches: Batches, planned: Ints, done: int) -> Floats:
        """Seconds that one more token adds to the verify pass, ``(batches,)``.

        In a batch, one token more or less is another's: passes are padded, so the mean over some.
        """
        rows, context = batches.decoding.sum(1), batches.context
        wide = 2 * self._costs.row_quantum
        done_then = np.full_like(rows, done + 1)
        single = rows == 1
        before = np.where(single, done_then, planned)
        longest = np.where(single, done_then, -(-planned // np.maximum(rows, 1)))
        step = np.where(single, 1, wide)
        growth = self._costs.verify(
            before + step, rows, longest + single, context
        ) - self._costs.verify(before, rows, longest, context)
        return np.where(single, growth, np.maximum(0.0, growth) / wide)
