"""What rounds on the device know of their rows, and how the host reads what they did."""

from dataclasses import dataclass

import torch
from torch import Tensor

from layerskip.cache import KVCache
from layerskip.control.stopping import Choice
from layerskip.ops.catalog import MOST_DRAFTED
from layerskip.row import Row

MOST_EOS = 32
ON_THEIR_WAY = 2  # packets: one is waited for while the next is made
# The smallest context that a recording is made for; the next ones are four times as large. One that
# may attend to more than there is takes hardly longer: on an H200 a plain token of Llama-3.2-1B's
# shape 1.069 ms at 128 slots of 256, 1.072 at 512 of 1024, of 8B's 4.92 and 4.97, and a recording
# takes 4 to 19 of them (bench/LOG.md, 2026-11-27).
FIRST_SLOTS, SLOTS_APART = 1024, 4


@dataclass(frozen=True)
class Shape:
    """What a recorded round is made for.

    Attributes:
        num_draft_tokens: most that a row drafts.
        num_rows: of the cache, from row 0 on.
        num_slots: of the cache, that attention may look at.
        sampled: whether a row draws by noise.
    """

    num_draft_tokens: int
    num_rows: int
    num_slots: int
    sampled: bool

    @property
    def width(self) -> int:
        """Numbers that a row's part of a packet has: drafted tokens, the target's, how many were
        emitted."""
        return 2 * self.num_draft_tokens + 2


def slot_sizes(most: int) -> list[int]:
    """Slots that recordings are made for, of a cache of ``most``."""
    sizes = [min(FIRST_SLOTS, most)]
    while sizes[-1] < most:
        sizes.append(min(SLOTS_APART * sizes[-1], most))
    return sizes


def rounded_up(num_slots: int, most: int) -> int:
    """The slots that a recording is made for, where so many are needed of ``most``."""
    return next((size for size in slot_sizes(most) if size >= num_slots), most)


class Seats:
    """What rounds know of the rows of a cache, on its device, one entry per cache row.

    Attributes:
        lengths: the cache's own.
        pending: int64, the emitted token that is not in the cache yet.
        num_left: int32, tokens that may still be emitted; 0: the row takes no part.
        most: int32, tokens to draft in a round.
        temperature: float32; 0 is greedy.
        seeds: int64, of the noise.
        eos_ids: ``(MOST_EOS,)`` int64, -1 beyond the last.
        places: ``(MOST_DRAFTED + 1,)`` int32, 0, 1, ...: of tokens in a round.
        packet: int64, what a round leaves for the host, ``Shape.width`` numbers a row.
    """

    @torch.inference_mode(False)  # as the cache's
    def __init__(self, cache: KVCache) -> None:
        rows, device = cache.num_rows, cache.lengths.device
        self.lengths = cache.lengths
        self.pending = torch.zeros(rows, dtype=torch.int64, device=device)
        self.num_left = torch.zeros(rows, dtype=torch.int32, device=device)
        self.most = torch.zeros(rows, dtype=torch.int32, device=device)
        self.temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self.eos_ids = torch.full((MOST_EOS,), -1, device=device)
        self.places = torch.arange(MOST_DRAFTED + 1, dtype=torch.int32, device=device)
        widest = Shape(MOST_DRAFTED, rows, 0, sampled=False).width
        self.packet = torch.zeros(rows * widest, dtype=torch.int64, device=device)

    def packet_of(self, shape: Shape) -> Tensor:
        """The part that a round of this shape leaves, ``(num_rows, width)``."""
        return self.packet[: shape.num_rows * shape.width].view(shape.num_rows, shape.width)

    def grown(self, cache: KVCache) -> "Seats":
        """The same over a larger cache; the host need not know the numbers."""
        larger = Seats(cache)
        for name in ("pending", "num_left", "most", "temperature", "seeds"):
            own = getattr(self, name)
            getattr(larger, name)[: len(own)] = own
        larger.eos_ids.copy_(self.eos_ids)
        return larger

    def put(self, row: Row) -> None:
        """Let a row take part from the next round on."""
        at, sampler = row.slot_row, row.spec.sampler
        self.pending[at].fill_(row.token_ids[-1])
        self.temperature[at].fill_(sampler.params.temperature)
        self.seeds[at].fill_(sampler.seed)
        # Last: a row of which only part is known takes no part.
        self.num_left[at].fill_(row.spec.max_new_tokens - len(row.token_ids))

    def rest(self, slot_row: int) -> None:
        """Let a row take no part."""
        self.num_left[slot_row].fill_(0)


@dataclass(frozen=True, eq=False)
class Landing:
    """What a round did for one row, as the host reads it.

    Attributes:
        row: that it was launched for; a round further on, if another was in flight before it.
        choice: that asked for the draft.
        draft: drafted tokens.
        tokens: confirmed ones and the one after them, before any cut.
        num_sent: tokens that the device emitted, after its own cut.
        probing: whether the draft was the controller's probe.
        shape: of the round.
        seconds: that it took on the device; 0 where it ran while it was launched.
        num_rows: that emitted in it.
    """

    row: Row
    choice: Choice
    draft: tuple[int, ...]
    tokens: list[int]
    num_sent: int
    probing: bool
    shape: Shape
    seconds: float
    num_rows: int


class InTurn:
    """Lets what is started for a cache come after what was, whatever streams of a GPU both are on:
    requests take a kept cache one after another, each on its thread's own, and so may a batch's
    steps. Nothing is asked of a CPU.

    Args:
        device: of the cache, which was made on its current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def follow(self) -> None:
        """Before anything is started."""
        if self._last is None:
            return
        now = torch.cuda.current_stream(self._device)
        if now != self._last:
            now.wait_stream(self._last)
            self._last = now


class Ring:
    """Packets on their way to the host, which waits for one while the next is made; they take
    places 0 to ``ON_THEIR_WAY - 1`` in turn.

    Args:
        width: numbers of the largest packet.
        device: that packets come from.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = [
            torch.zeros(width, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
            for _ in range(ON_THEIR_WAY)
        ]
        self._events = [_event_pair() for _ in range(ON_THEIR_WAY)] if on_gpu else []
        self._device = device

    def begin(self, turn: int) -> None:
        """Start the clock of the round whose packet takes this place."""
        if self._events:
            self._events[turn][0].record(self._stream())

    def send(self, turn: int, packet: Tensor) -> None:
        """Start the copy of a packet, ``(any,)``, to its place."""
        self._host[turn][: len(packet)].copy_(packet, non_blocking=True)
        if self._events:
            self._events[turn][1].record(self._stream())

    def _stream(self) -> torch.cuda.Stream:
        """Of the packets' device, which need not be the current one."""
        return torch.cuda.current_stream(self._device)

    def receive(self, turn: int, shape: Shape) -> tuple[list[list[int]], float]:
        """Wait for a packet: its numbers, row by row, and the seconds since ``begin`` on the
        device; 0 on a CPU, where nothing goes on beside the host."""
        seconds = 0.0
        if self._events:
            begun, ended = self._events[turn]
            ended.synchronize()
            seconds = begun.elapsed_time(ended) / 1000
        numbers = self._host[turn][: shape.num_rows * shape.width]
        return numbers.view(shape.num_rows, shape.width).tolist(), seconds


def _event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
