"""Rounds without the host: launched before the one before has been read.

All that a round needs to know of its rows is in buffers on the device, and so is all that it
leaves. The host starts a round before it has read the one before: the device has always something
to do, and never waits. What only the host can see, a stop string, ends a row one round later; what
the device did with it since is not counted, and forgotten.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerskip.ambient import Decoding
from layerskip.cache import KVCache
from layerskip.control.stopping import Choice
from layerskip.device_round import DeviceRound
from layerskip.graphs import Allowance, Recordings
from layerskip.ops.catalog import MOST_DRAFTED
from layerskip.packed import PackedStack
from layerskip.params import most_draft_tokens
from layerskip.plan import DraftPlan
from layerskip.row import Row, RowSpec
from layerskip.seats import (
    MOST_EOS,
    ON_THEIR_WAY,
    InTurn,
    Landing,
    Ring,
    Seats,
    Shape,
    rounded_up,
    slot_sizes,
)
from layerskip.speculation import Speculator
from layerskip.stand_ins import may_draft, patience, stand_in
from layerskip.verification import count_matches


@dataclass(eq=False)
class Flight:
    """A round that was launched and not read.

    Attributes:
        rows: by cache row, with what each was to draft, and whether that was a probe.
        turn: place in the ring.
        usual: whether it took as long as rounds of its shape will; a recording's first replay may
            not.
        numbers, seconds: of its packet and on its clock, once they have been read.
    """

    shape: Shape
    rows: dict[int, tuple[Row, Choice, bool]]
    turn: int
    usual: bool
    numbers: list[list[int]] | None = None
    seconds: float = 0.0

    def holds(self, row: Row) -> bool:
        return row.slot_row in self.rows and self.rows[row.slot_row][0] is row


class Rounds:
    """One cache with its seats and recorded rounds; serves one decoder at a time.

    Args:
        stack: runs layers and chooses tokens by what the device knows.
        plan: of the drafts; None decodes plainly.
        recordings: of rounds over the cache and the seats; or none yet.
        cache: that nobody else decodes with.
        seats: that were recorded with it; None makes new ones.
        vocab_ids: ids that drafts may have, ``(kept,)`` int32 ascending on the device; None: all.
        allowance: of seconds that recordings may take.

    Attributes:
        reason: why the last round asked for ran by the host; "" if it did not.
        recordings: rounds by shape.
        follow: to be called before anything is started for the cache: see ``InTurn``.
        usual: whether what ``advance`` read took as long as such rounds do, and nothing else kept
            the host: a round that is recorded, or not yet, takes far longer.
    """

    def __init__(
        self,
        stack: PackedStack,
        plan: DraftPlan | None,
        recordings: Recordings,
        *,
        cache: KVCache,
        seats: Seats | None,
        vocab_ids: Tensor | None,
        allowance: Allowance,
    ) -> None:
        self._allowance = allowance
        self._function = DeviceRound(stack, plan, vocab_ids)
        self.recordings, self.reason = recordings, ""
        self.usual = True
        self.follow = InTurn(cache.lengths.device).follow
        self._flights: deque[Flight] = deque()
        self._seated: dict[int, Row] = {}
        self._most: dict[int, int] = {}
        self._found: tuple[list[RowSpec], str] = ([], "")  # of rows, why they need the host
        self._eos_ids: frozenset[int] = frozenset()
        if seats is not None:
            seats.eos_ids.fill_(-1)
        self._settle_in(seats or Seats(cache), cache)

    def _settle_in(self, seats: Seats, cache: KVCache) -> None:
        ring = Ring(len(seats.packet), cache.lengths.device)
        self.cache, self.seats, self._ring = cache, seats, ring

    def move(self, cache: KVCache, recordings: Recordings) -> None:
        """Go on over a larger cache that holds what this one holds, with nothing recorded yet.
        Rounds in flight are ahead of what the host knows: their rows move on the device."""
        for flight in self._flights:
            self._receive(flight)
        seats = self.seats.grown(cache)
        self.recordings = recordings  # first: what was recorded over one cache runs over no other
        self._settle_in(seats, cache)

    @Decoding()
    def record_ahead(self, counts: Sequence[int], *, seconds: float = math.inf) -> int:
        """Record the rounds that this cache's rows may have, with so many drafted tokens, while
        there are none: of every number of rows and slots, greedy and sampled, until memory is full
        or ``seconds`` are over. The shortest texts' come first.

        Returns:
            Recordings that are kept.

        Raises:
            torch.OutOfMemoryError: there is no memory for one of them.
        """
        began, rows, slots = time.perf_counter(), self.cache.num_rows, self.cache.num_slots
        sizes = itertools.product(slot_sizes(slots), _powers_up_to(rows), counts, (False, True))
        for num_slots, num_rows, count, sampled in sizes:
            shape = Shape(count, num_rows, num_slots, sampled)
            if self.recordings.full or time.perf_counter() - began > seconds:
                break
            if shape not in self.recordings:
                self._record(shape, ahead=True)
        return len(self.recordings)

    def has_room(self, num_rows: int, num_slots: int) -> bool:
        """Whether a decoder of so many rows and slots finds what is recorded here."""
        return num_rows <= self.cache.num_rows and num_slots <= self.cache.num_slots

    def forget(self) -> None:
        """Hold nothing of any row; what the device holds, ``reset`` empties."""
        self._flights.clear()
        self._seated.clear()
        self._most.clear()
        self.reason, self._found = "", ([], "")

    def reset(self) -> None:
        """Empty everything for another decoder."""
        self.follow()
        self.forget()
        for row in range(self.cache.num_rows):
            self.cache.release(row)
        self.seats.num_left.zero_()

    def advance(self, rows: Sequence[Row], speculator: Speculator, *, ahead: bool) -> list[Landing]:
        """Launch what may be launched, and read the oldest round in flight.

        If it raises, nothing has been read, and it can be called again.

        Args:
            rows: all that go on.
            speculator: decides what is drafted.
            ahead: whether a round may start before the one that is read.

        Returns:
            One entry for each row that the read round emitted tokens of; ``landed`` forgets it.
        """
        self.reason, self.usual = self.why_not(rows, speculator), True
        began = time.perf_counter()
        while self._flights and not self._flights[0].rows:
            self._flights.popleft()
        if not self.reason:
            while len(self._flights) <= ahead and self._launch(rows, speculator):
                pass
        landings = self._read(self._flights[0]) if self._flights else []
        self._allowance.earn(time.perf_counter() - began)
        return landings

    def landed(self) -> None:
        """What ``advance`` read has been taken over."""
        if self._flights and self._flights[0].numbers is not None:
            self._flights.popleft()

    def flies(self, row: Row) -> bool:
        """Whether a round in flight may emit tokens of ``row``."""
        return any(flight.holds(row) for flight in self._flights)

    def settle(self, landing: Landing) -> None:
        """Bring the device to where a row stands after its landing, if it has ended."""
        row = landing.row
        if row.finish_reason is None:
            return
        self.leave(row)
        # Rounds in flight may have gone on with a row whose stop string was only found here.
        self.cache.lengths[row.slot_row].fill_(row.length)

    def leave(self, row: Row) -> None:
        """The host has ``row`` from here on: rounds in flight are not counted for it."""
        if self._seated.get(row.slot_row) is not row:
            return
        self.seats.rest(row.slot_row)
        for flight in self._flights:
            if flight.holds(row):
                del flight.rows[row.slot_row]
        del self._seated[row.slot_row]  # last: until then an interrupted call is not over

    def why_not(self, rows: Sequence[Row], speculator: Speculator) -> str:
        """Why rounds of these rows need the host; "" if they do not: asked in each round, and the
        same in most."""
        specs = [row.spec for row in rows]
        known, reason = self._found
        if known != specs:
            reason = _why_not(specs, looks_up=speculator.looks_up)
            self._found = specs, reason
        return reason

    def _launch(self, rows: Sequence[Row], speculator: Speculator) -> bool:
        """Start a round, unless those in flight end every row."""
        most_left = self._left(rows)
        going = [row for row, left in zip(rows, most_left, strict=True) if left > 0]
        if not going:
            return False
        shape_of = self._shapes(going)
        drafts = may_draft(self.recordings, shape_of(0), self._allowance)
        counts = speculator.counted(going, drafts=drafts)
        room = (left - 1 for left in most_left if left > 0)
        wanted = max(map(min, (choice.num_draft_tokens for choice, _ in counts), room))
        num_tried = self.recordings.num_tried
        chosen = all(row.state is not None or row.spec.num_draft_tokens == 0 for row in going)
        shape = self._shape(shape_of, wanted, max(most for _, most in counts), chosen=chosen)
        drafted = shape.num_draft_tokens
        choices = [choice.at_most(drafted) for choice, _ in counts]
        self._seat(going, choices)
        usual = shape in self.recordings and drafted <= wanted
        usual &= self.recordings.num_tried == num_tried
        self.usual &= usual
        entries = {
            row.slot_row: (row, choice, drafted > 0 and row.state is not None and row.state.probing)
            for row, choice in zip(going, choices, strict=True)
        }
        turn = (self._flights[-1].turn + 1) % ON_THEIR_WAY if self._flights else 0
        try:
            self._ring.begin(turn)
            self.recordings.run(shape, self._round(shape))
            self._ring.send(turn, self.seats.packet_of(shape).flatten())
            self._flights.append(Flight(shape, entries, turn, usual))
        except BaseException:  # the device may have gone on: rows start again where the host is
            for row in going:
                self.leave(row)
                self.cache.lengths[row.slot_row].fill_(row.length)
            raise
        return True

    def _left(self, rows: Sequence[Row]) -> list[int]:
        """Most tokens that each row may emit after the rounds in flight, which emit one or more."""
        left = [row.spec.max_new_tokens - len(row.token_ids) for row in rows]
        for flight in self._flights:
            left = [n - flight.holds(row) for n, row in zip(left, rows, strict=True)]
        return left

    def _shapes(self, rows: Sequence[Row]) -> Callable[[int], Shape]:
        """By number of drafted tokens, the round of these rows once those in flight have landed."""
        last = max([row.slot_row for row in rows])
        num_rows = next(n for n in _powers_up_to(self.cache.num_rows) if n > last)
        flying = sum(flight.shape.num_draft_tokens + 1 for flight in self._flights)
        needed, most = max([row.length for row in rows]) + flying + 1, self.cache.num_slots
        sampled = not all(row.spec.sampler.params.greedy for row in rows)
        return lambda count: Shape(count, num_rows, rounded_up(needed + count, most), sampled)

    def _shape(
        self, shape_of: Callable[[int], Shape], wanted: int, most: int, *, chosen: bool
    ) -> Shape:
        """What a round of so many drafted tokens runs as; recorded before it, if that is due.

        Drafts get shorter near a row's limit: no round is recorded for that alone, but one for
        ``most`` is taken. Until it is sure that a number comes up again, and rounds have taken long
        enough for a recording to be a small share of it, another one runs in its place: that is far
        quicker than one that the host starts.

        Args:
            chosen: whether every row's number of drafted tokens is chosen, not asked for.
        """
        shapes = (shape_of(count) for count in (wanted, max(wanted, most)))
        for shape in shapes:
            if self.recordings.has(shape):
                return shape
        count = shape.num_draft_tokens
        instead = self._instead(shape_of, count, chosen=chosen)
        waits = patience(count, None if instead is None else instead.num_draft_tokens)
        due = self.recordings.due(shape, waits=waits)
        if due and (instead is None or not self.recordings.dear or self._allowance.affords):
            began = time.perf_counter()
            self._record(shape)
            if instead is not None:
                self._allowance.spend(time.perf_counter() - began)
        return shape if instead is None or self.recordings.has(shape) else instead

    def _instead(
        self, shape_of: Callable[[int], Shape], count: int, *, chosen: bool
    ) -> Shape | None:
        """What runs in the place of a round that is not recorded: one that is, at worst a plain one
        that will be; None: nothing does."""
        found = stand_in(
            count, lambda other: self.recordings.has(shape_of(other)), may_be_fewer=chosen
        )
        if found is not None:
            return shape_of(found)
        if not count or not chosen:
            return None
        plain = self._shape(shape_of, 0, 0, chosen=chosen)
        # If that can't be recorded, the host starts both.
        return plain if self.recordings.has(plain) or plain not in self.recordings else None

    def _seat(self, rows: Sequence[Row], choices: Sequence[Choice]) -> None:
        """Tell the device what it does not know yet."""
        eos_ids = rows[0].spec.eos_ids
        if eos_ids != self._eos_ids:
            padded = [*sorted(eos_ids), *[-1] * (MOST_EOS - len(eos_ids))]
            self.seats.eos_ids.copy_(torch.tensor(padded, device="cpu"))
            self._eos_ids = eos_ids
        for row, choice in zip(rows, choices, strict=True):
            at = row.slot_row
            if self._seated.get(at) is not row:
                self._seated[at] = row  # first: whoever takes it out must let the device know
                self.seats.put(row)
            if self._most.get(at) != choice.num_draft_tokens:
                self.seats.most[at].fill_(choice.num_draft_tokens)
                self._most[at] = choice.num_draft_tokens

    def _record(self, shape: Shape, *, ahead: bool = False) -> None:
        """While no row takes part: a round of none changes nothing, however often it runs.

        Args:
            ahead: nobody has asked for it. If it finds no memory that is raised, and not held
                against it.
        """
        left = self.seats.num_left.clone()
        self.seats.num_left.zero_()
        try:
            if ahead:
                self.recordings.run(shape, self._round(shape))
            self.recordings.prepare(shape, self._round(shape))
        finally:
            self.seats.num_left.copy_(left)

    def _round(self, shape: Shape) -> Callable[[], None]:
        function, seats, cache = self._function, self.seats, self.cache
        return lambda: function(shape, seats, cache)  # as a graph: these, whatever comes later

    def _read(self, flight: Flight) -> list[Landing]:
        numbers = self._receive(flight)
        self.usual &= flight.usual
        most = flight.shape.num_draft_tokens
        emitting = sum(numbers[at][-1] > 0 for at in flight.rows)
        of_round = flight.shape, flight.seconds, emitting
        landings = []
        for at, (row, choice, probing) in list(flight.rows.items()):
            *told, num_sent = numbers[at]
            if num_sent == 0:  # the device lost it: the host takes it from where it stands
                self.leave(row)
                continue
            draft, tokens = _verified(told, most) if most else ((), told)
            landings.append(Landing(row, choice, draft, tokens, num_sent, probing, *of_round))
        return landings

    def _receive(self, flight: Flight) -> list[list[int]]:
        """A flight's numbers."""
        if flight.numbers is None:
            flight.numbers, flight.seconds = self._ring.receive(flight.turn, flight.shape)
        return flight.numbers


def _verified(told: list[int], most: int) -> tuple[tuple[int, ...], list[int]]:
    """What a row drafted, of at most so many tokens, and what of that was confirmed with the token
    after it."""
    draft = tuple(token for token in told[:most] if token >= 0)
    target = told[most : most + len(draft) + 1]
    return draft, target[: count_matches(draft, target) + 1]


def _powers_up_to(last: int) -> list[int]:
    """Powers of two below ``last``, and ``last``: numbers of rows that rounds are recorded for."""
    found = [1]
    while found[-1] < last:
        found.append(min(2 * found[-1], last))
    return found


def _why_not(specs: Sequence[RowSpec], *, looks_up: bool) -> str:
    """Why a round of these rows needs the host; "" if it does not."""
    if len({spec.eos_ids for spec in specs}) > 1:
        return "rows end with different tokens"
    if looks_up and any(spec.num_draft_tokens != 0 for spec in specs):
        return "tokens are looked up in the text"
    return next((reason for spec in specs if (reason := _why_not_alone(spec))), "")


def _why_not_alone(spec: RowSpec) -> str:
    """Why a round of this row needs the host, whatever the others are."""
    sampler, params = spec.sampler, spec.sampler.params
    if sampler.reads_context:
        return "logits processors and grammars read the text on the host"
    if sampler.verification != "coupled":
        return f"verification={sampler.verification!r} needs whole distributions"
    if not params.greedy and params.cuts:
        return "top_k, top_p and min_p need whole distributions"
    if spec.logprobs is not None or spec.sink is not None:
        return "log-probabilities and scores were asked for"
    if len(spec.eos_ids) > MOST_EOS:
        return f"{len(spec.eos_ids)} token ids end a sequence, at most {MOST_EOS} can on the device"
    if min(most_draft_tokens(spec.num_draft_tokens), spec.max_draft_tokens) > MOST_DRAFTED:
        return f"more than {MOST_DRAFTED} tokens are drafted in a round"
    return ""
