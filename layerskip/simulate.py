"""Latency under load, before there is any: discrete events over a cost table and acceptance.

A closed loop: each of N users has one request in the batch and sends the next one when it is done.
A step is the decoder's (``Decoder.step``): the prefill of every new row, one after another, and one
round of all others, which wait for these prefills; rows leave at its end. Many such batches run
side by side as arrays, each with users of its own, over one stream of requests, which every policy
and concurrency gets in the same order. Recorded rounds also say when the machine was slow: each
batch's clock follows another part of that (``machine_time``).

Users are taken up somewhere in their first request, and go on sending until the last counted one
is done: the requests before and after are not counted, so no time and no throughput holds a start
or an end. What is said of rounds (rows, drafted tokens, prefills) is of all of them.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerskip.cost import CostTable
from layerskip.machine_time import MachineTime
from layerskip.params import (
    MAX_AUTO_DRAFT_TOKENS,
    MAX_NUM_DRAFT_TOKENS,
    check_integer,
    check_number,
)
from layerskip.pass_costs import Overhead, PassCosts, prefill_seconds
from layerskip.simulated_controller import Automatic, Batches, Fixed
from layerskip.workload import Requests, Stream

OFF = "off"
QUANTILES = (0.5, 0.9, 0.99)
LANES = 1024  # rows of all batches together, about
REQUESTS_OF_A_USER = 10  # at least, where there are enough
MOST_CONCURRENCY = 1024
MOST_REQUESTS = 10_000_000

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """Quantiles of a time, in seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Floats) -> "Spread":
        """Of these; zeros if there are none."""
        if not len(seconds):
            return cls(0.0, 0.0, 0.0)
        return cls(*(float(q) for q in np.quantile(seconds, QUANTILES)))


@dataclass(frozen=True)
class Cell:
    """One policy at one concurrency.

    Attributes:
        policy: "off", "fixed:4", "auto".
        concurrency: users in the loop.
        first_token: from sending to the end of the step that gave the first token.
        token: of each further token of a request, its mean; requests with one token have none.
        end_to_end: from sending to the last token.
        tokens_per_second: of the whole batch.
        mean_accepted_length: tokens a row and round.
        mean_draft_tokens: drafted for a row in a round.
        rows: mean number that took part in a round.
        prefills: mean number of a step with any.
    """

    policy: str
    concurrency: int
    first_token: Spread
    token: Spread
    end_to_end: Spread
    tokens_per_second: float
    mean_accepted_length: float
    mean_draft_tokens: float
    rows: float
    prefills: float


@dataclass(frozen=True)
class Crossover:
    """Where plain decoding overtakes a policy, by tokens a second.

    Attributes:
        policy: that drafts.
        on: largest concurrency below ``off`` at which it is as fast as plain decoding, or faster.
        off: smallest one at which it is slower; None: at none that was simulated.
    """

    policy: str
    on: int | None
    off: int | None


@dataclass(frozen=True)
class Simulation:
    """What came out.

    Attributes:
        cells: by concurrency, then in the order of the policies.
        crossovers: of each policy that drafts, if "off" was simulated, too.
        num_requests: counted, in each cell.
        seed: of everything drawn.
    """

    cells: tuple[Cell, ...]
    crossovers: tuple[Crossover, ...]
    num_requests: int
    seed: int

    def cell(self, policy: str, concurrency: int) -> Cell:
        """One of ``cells``.

        Raises:
            ValueError: there is no such cell.
        """
        cells = {(c.policy, c.concurrency): c for c in self.cells}
        if (policy, concurrency) not in cells:
            known = ", ".join(f"{name!r} with {users}" for name, users in cells)
            raise ValueError(
                f"policy {policy!r} was not simulated with {concurrency} users; there are {known}"
            )
        return cells[policy, concurrency]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def simulate(
    table: CostTable,
    traffic: Requests,
    *,
    concurrency: Collection[int] = (1, 2, 4, 8, 16, 32),
    policies: Collection[str] = (OFF, "fixed:4", "auto"),
    num_requests: int = 2000,
    new_tokens: int | None = None,
    seed: int = 0,
    overhead: Overhead | None = None,
    passes_per_token: float = 1.0,
    machine: MachineTime | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Simulation:
    """Run every policy at every concurrency over the same requests.

    Args:
        table: of bare passes.
        traffic: requests, with their lengths and acceptance.
        concurrency: users in the loop, each number at most 1024.
        policies: "off", "fixed:K" with K drafted tokens a round, "auto".
        num_requests: counted in each cell.
        new_tokens: of every request; None: the traffic's own.
        seed: the same seed gives the same figures.
        overhead: of rounds, beside passes.
        passes_per_token: draft passes of a drafted token, where look-ups save some.
        machine: whose pace clocks follow; None: every pass takes what it usually does.
        on_progress: called with requests done and requests in all.

    Raises:
        TypeError, ValueError: a number is none or out of range, or a policy unknown.
    """
    for name, several in (("concurrency", concurrency), ("policies", policies)):
        if isinstance(several, str) or not isinstance(several, Collection):
            raise TypeError(f"{name} must be a list, such as [{several!r}], got {several!r}")
    for number in concurrency:
        check_integer("concurrency", number, 1, MOST_CONCURRENCY)
    check_integer("the number of requests", num_requests, 1, MOST_REQUESTS)
    if new_tokens is not None:
        check_integer("the number of new tokens", new_tokens, 1, MOST_REQUESTS)
    check_integer("seed", seed, 0)
    check_number("passes_per_token", passes_per_token, 0.0, math.inf)
    drafted = {name: most_drafted(name) for name in policies}
    if not concurrency or not policies:
        raise ValueError("at least one concurrency and one policy are needed")
    stream = traffic.stream(num_requests, seed, new_tokens)
    prefill = _prefills(stream, table)
    longest = int((stream.prompt_tokens + stream.tokens).max())
    cells: list[Cell] = []
    users = sorted(set(concurrency))
    total = len(users) * len(drafted) * num_requests
    for number in users:
        for name in drafted:
            costs = PassCosts(
                table,
                rows=number,
                most_drafted=drafted[name],
                longest=longest,
                overhead=overhead,
                passes_per_token=passes_per_token,
            )
            loop = Loop(stream, prefill, costs, number, seed, machine)
            policy: Automatic | Fixed = Fixed(drafted[name])
            if name == "auto":
                policy = Automatic(costs, stream, loop.shape, seed)
            loop.run(policy, lambda done: on_progress(len(cells) * num_requests + done, total))
            cells.append(loop.cell(name))
    return Simulation(tuple(cells), _crossovers(cells), num_requests, seed)


def most_drafted(policy: str) -> int:
    """Tokens that a policy drafts in a round at most.

    Raises:
        ValueError: there is no such policy.
    """
    kind, _, number = policy.partition(":")
    if kind == "fixed" and number.isdecimal() and 1 <= int(number) <= MAX_NUM_DRAFT_TOKENS:
        return int(number)
    if policy in (OFF, "auto"):
        return MAX_AUTO_DRAFT_TOKENS if policy == "auto" else 0
    raise ValueError(
        f"policy {policy!r} is not known; allowed are off, auto, and fixed:1 to "
        f"fixed:{MAX_NUM_DRAFT_TOKENS}"
    )


def _prefills(stream: Stream, table: CostTable) -> Floats:
    """Recorded seconds, and the table's where there are none."""
    missing = np.isnan(stream.prefill)
    lengths, place = np.unique(stream.prompt_tokens[missing], return_inverse=True)
    filled = stream.prefill.copy()
    filled[missing] = np.array([prefill_seconds(table, int(n)) for n in lengths])[place]
    return filled


class Loop:
    """Batches of one policy and concurrency, from their start to the last counted request.

    Args:
        stream: requests, dealt out to the batches in turn.
        prefill: seconds of each.
        costs: of passes.
        concurrency: rows of each batch.
        seed: of where users are taken up, and batches in the machine's time.
        machine: whose pace each batch's clock follows; None: always the usual one.

    Attributes:
        shape: batches and rows.
    """

    def __init__(
        self,
        stream: Stream,
        prefill: Floats,
        costs: PassCosts,
        concurrency: int,
        seed: int,
        machine: MachineTime | None = None,
    ) -> None:
        self._stream, self._prefill, self._costs = stream, prefill, costs
        lanes = len(stream) // (concurrency * REQUESTS_OF_A_USER)
        count = max(1, min(lanes, LANES // concurrency))
        self.shape = count, concurrency
        self._began = np.full(count, np.nan)
        self._emitted_in_all = np.zeros(count, dtype=np.int64)
        # Requests beyond the stream's length are those from its start again: they are not counted.
        size = len(stream)
        self._left = np.array([len(range(i, size, count)) for i in range(count)])
        self._next = np.zeros(count, dtype=np.int64)
        draw = np.random.default_rng([seed, concurrency, 2])
        self._request = size + draw.integers(size, size=self.shape)
        self._tokens = stream.tokens[self._request % size]
        self._tokens = 1 + (draw.random(self.shape) * self._tokens).astype(np.int64)
        self._machine = machine
        # In usual seconds; those of the clock are what the machine made of them.
        self._work = np.zeros(count) if machine is None else machine.somewhere(count, draw)
        self._work_on(np.zeros(count))
        self._joined = np.zeros(self.shape)
        self._emitted = np.zeros(self.shape, dtype=np.int64)
        self._first_token, self._end_to_end = np.zeros(size), np.zeros(size)
        self._rounds = self._rows = self._drafted = self._round_tokens = 0
        self._prefills = self._steps_with_prefills = 0

    def run(self, policy: Automatic | Fixed, on_progress: Callable[[int], None]) -> None:
        """To the last counted request."""
        steps = 0
        while self._left.any():
            self._step(policy)
            steps += 1
            if steps % 256 == 0:
                on_progress(len(self._stream) - int(self._left.sum()))

    def cell(self, policy: str) -> Cell:
        """The figures."""
        # Batches saw a part of the recording each: how slow it was in all is known better.
        slowness = 1.0 if self._machine is None else self._machine.slowness
        worked = np.maximum(self._work - self._began, 1e-12)
        several = self._stream.tokens > 1
        decoding = (self._end_to_end - self._first_token)[several]
        rounds = max(1, self._rows)
        return Cell(
            policy,
            self.shape[1],
            Spread.of(self._first_token),
            Spread.of(decoding / (self._stream.tokens[several] - 1)),
            Spread.of(self._end_to_end),
            float((self._emitted_in_all / worked).mean()) / slowness,
            self._round_tokens / rounds,
            self._drafted / rounds,
            self._rows / max(1, self._rounds),
            self._prefills / max(1, self._steps_with_prefills),
        )

    def _step(self, policy: Automatic | Fixed) -> None:
        """One ``Decoder.step`` of every batch that still has counted requests."""
        stream, size = self._stream, len(self._stream)
        running = (self._left > 0)[:, None]
        request = self._request % size
        new, decoding = running & (self._emitted == 0), running & (self._emitted > 0)
        prefill = np.where(new, self._prefill[request] + self._costs.overhead.row, 0.0).sum(1)
        context = stream.prompt_tokens[request] + self._emitted - 1
        at = stream.offsets[request] + self._emitted
        batches = Batches(
            request,
            decoding,
            decoding & (self._emitted == 1),
            self._emitted,
            np.where(decoding, np.maximum(stream.limits[request] - self._emitted - 1, 0), 0),
            np.where(decoding, context, 0).sum(1) // np.maximum(1, decoding.sum(1)),
            np.where(decoding, stream.runs[at], 0),
        )
        drafted = policy.lengths(batches)
        seconds = prefill + self._costs.round(drafted, decoding, batches.context)
        policy.observe(batches, drafted)
        accepted = np.minimum(drafted, batches.right)
        given = np.where(decoding, np.minimum(accepted + 1, self._tokens - self._emitted), new)
        self._work_on(seconds)
        self._emitted += given
        counted = running[:, 0] & ~np.isnan(self._began)
        self._emitted_in_all += np.where(counted, given.sum(1), 0)
        self._rounds += int(decoding.any(1).sum())
        self._rows += int(decoding.sum())
        self._drafted += int(drafted.sum())
        self._prefills += int(new.sum())
        self._steps_with_prefills += int(new.any(1).sum())
        self._round_tokens += int(given[decoding].sum())
        self._settle(new, running & (self._emitted >= self._tokens))

    def _work_on(self, seconds: Floats) -> None:
        """Let each batch do what usually takes so long."""
        self._work = self._work + seconds
        self._clock = self._work if self._machine is None else self._machine.clock(self._work)

    def _settle(self, new: NDArray[np.bool_], done: NDArray[np.bool_]) -> None:
        """Note the times of what happened in a step, and let finished users send again."""
        size, (count, _) = len(self._stream), self.shape
        since = self._clock[:, None] - self._joined
        for event, times in ((new, self._first_token), (done, self._end_to_end)):
            of = event & (self._request < size)
            times[self._request[of]] = since[of]
        ended = done & (self._request < size)
        self._left -= ended.sum(1)
        if not done.any():
            return
        order = self._next[:, None] + np.cumsum(done, axis=1) - 1
        self._next += done.sum(1)
        batch = np.arange(count)[:, None]
        following = order * count + batch
        first = done.any(1) & np.isnan(self._began)
        self._began[first] = self._work[first]
        self._request = np.where(done, following, self._request)
        self._tokens = np.where(done, self._stream.tokens[following % size], self._tokens)
        self._emitted = np.where(done, 0, self._emitted)
        self._joined = np.where(done, self._clock[:, None], self._joined)


def _crossovers(cells: Sequence[Cell]) -> tuple[Crossover, ...]:
    plain = {c.concurrency: c.tokens_per_second for c in cells if c.policy == OFF}
    found = []
    for policy in dict.fromkeys(c.policy for c in cells if c.policy != OFF and plain):
        own = {c.concurrency: c.tokens_per_second for c in cells if c.policy == policy}
        slower = [n for n in sorted(own) if own[n] < plain[n]]
        off = slower[0] if slower else None
        on = [n for n in own if off is None or n < off]
        found.append(Crossover(policy, max(on, default=None), off))
    return tuple(found)
