"""What a model's decoders have in turn: caches, and the rounds recorded over them."""

import math
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from layerskip.cache import KVCache
from layerskip.draft_head import DraftHead
from layerskip.graphs import Allowance, GraphRecorder, Recorder, Recordings, RepeatingRecorder
from layerskip.model import DecoderStack
from layerskip.ops.catalog import MOST_DRAFTED
from layerskip.packed import PackedStack
from layerskip.plan import DraftPlan
from layerskip.rounds import Rounds
from layerskip.seats import Seats

KEPT = 2  # of those that nobody decodes with


def open_bench(
    stack: DecoderStack, plan: DraftPlan | None, head: DraftHead | None
) -> "tuple[Workbench | None, str]":
    """What lets a stack's device run rounds by itself, or None; and one sentence for ``info``.

    Args:
        stack: that decodes.
        plan: of the drafts.
        head: over the draft vocabulary. What it learns from a row's own text stays on the host:
            drafts on the device have the vocabulary alone.
    """
    if not isinstance(stack, PackedStack):
        return None, "each pass is started by the host: the general stack needs it"
    if stack.why_no_choice is not None:
        return None, f"each pass is started by the host: {stack.why_no_choice}"
    device, ids = stack.device, None if head is None else head.ids.int()
    if device.type != "cuda":
        bench = Workbench(stack, plan, RepeatingRecorder, vocab_ids=ids)
        return bench, "whole rounds, by our kernels' definitions, each proven to need no host"
    bench = Workbench(stack, plan, lambda: GraphRecorder(device), vocab_ids=ids)
    return bench, "whole rounds as CUDA graphs, a round ahead of the host"


class Workbench:
    """Keeps what decoders of one model use in turn: a cache, and the rounds recorded over it.

    Recording takes far longer than a round, so that a decoder's rounds outlive it. Those of two
    decoders are kept, or what was recorded for single texts would be lost to the first batch and
    recorded again after it; a cache with nothing recorded over it goes for the next one. Threads
    that decode at the same time have others.

    Args:
        stack, plan, vocab_ids: as for ``Rounds``.
        make_recorder: called for each cache: recordings are made by one thread at a time.
    """

    def __init__(
        self,
        stack: PackedStack,
        plan: DraftPlan | None,
        make_recorder: Callable[[], Recorder],
        *,
        vocab_ids: Tensor | None = None,
    ) -> None:
        self._stack, self._plan, self._make_recorder = stack, plan, make_recorder
        self._vocab_ids = vocab_ids
        self._allowance = Allowance()
        self._idle: list[Rounds] = []
        # A garbage collection may give rounds back in the middle of ``take`` or ``give_back``.
        self._lock = threading.RLock()

    def take(self, *, num_rows: int, num_slots: int, grows: bool = False) -> Rounds:
        """Rounds over an empty cache of at least so many rows and slots.

        Args:
            grows: whether more rows may come: then of those kept that have room the largest.
        """
        asked = num_rows, num_slots
        if (rounds := self._fitting(asked, grows=grows)) is not None:
            rounds.reset()
            return rounds
        kept, recordings = self._replaced()
        roomy = asked if kept is None else _roomy(kept, asked)
        return self._over(self._cache(roomy, asked), recordings)

    def _fitting(self, asked: tuple[int, int], *, grows: bool) -> Rounds | None:
        """Of those kept one with room, which is not kept any more."""
        with self._lock:
            best = max if grows else min
            fitting = (r for r in self._idle if r.has_room(*asked))
            rounds = best(fitting, key=lambda r: r.cache.nbytes, default=None)
            # Not ``remove``: a collection in between may have put others in their place.
            self._idle = [kept for kept in self._idle if kept is not rounds]
        return rounds

    def _replaced(self) -> tuple[tuple[int, int] | None, Recordings | None]:
        """Rows and slots of a cache that the next one comes after; and what its recordings were
        made with, if it goes: one with none does, or there would be too many."""
        with self._lock:
            if not self._idle:
                return None, None
            least = min(self._idle, key=lambda r: len(r.recordings))
            kept = least.cache.num_rows, least.cache.num_slots
            if len(self._idle) < KEPT and len(least.recordings):
                return kept, None
            self._idle = [rounds for rounds in self._idle if rounds is not least]
        least.recordings.clear()
        return kept, least.recordings

    def _cache(self, roomy: tuple[int, int], asked: tuple[int, int]) -> KVCache:
        """Empty, of so many rows and slots, or where memory has no room for that, of those asked
        for; in the place of those kept, if it has none beside them."""
        new_cache = self._stack.new_cache
        try:
            return new_cache(num_rows=roomy[0], num_slots=roomy[1])
        except RuntimeError:  # out of memory; a CPU has no kind of its own for it
            pass  # out of here: the error holds what the first try has got
        return self._with_room(lambda: new_cache(num_rows=asked[0], num_slots=asked[1]))

    def _with_room(self, make: Callable[[], KVCache]) -> KVCache:
        """What ``make`` makes: where memory has no room beside the caches kept, without them."""
        try:
            return make()
        except RuntimeError:
            with self._lock:
                if not self._idle:
                    raise
                self._idle.clear()
        return make()

    def _over(
        self, cache: KVCache, recordings: Recordings | None, seats: Seats | None = None
    ) -> Rounds:
        if recordings is None:
            recordings = Recordings(self._make_recorder())
        return Rounds(
            self._stack,
            self._plan,
            recordings,
            cache=cache,
            seats=seats,
            vocab_ids=self._vocab_ids,
            allowance=self._allowance,
        )

    def grow(self, rounds: Rounds, *, num_rows: int, num_slots: int) -> None:
        """Let a decoder's rounds go on over a larger cache, with all that theirs holds. What was
        recorded over that one is kept for decoders that need no more room."""
        before = rounds.cache, rounds.recordings, rounds.seats
        larger = self._with_room(lambda: rounds.cache.grown(num_rows=num_rows, num_slots=num_slots))
        if len(rounds.recordings):
            rounds.move(larger, Recordings(self._make_recorder()))
            self.give_back(self._over(*before))
        else:
            rounds.move(larger, rounds.recordings)
            rounds.recordings.clear()

    def record_ahead(
        self,
        counts: Sequence[int],
        *,
        num_rows: int,
        num_slots: int,
        seconds: float = math.inf,
        only_if_dear: bool = False,
    ) -> int:
        """Before there is a decoder: see ``Rounds.record_ahead``. One of as many rows and slots, or
        fewer, finds all that it needs. Numbers of drafted tokens that need the host are left out.

        Args:
            only_if_dear: do nothing where a recording takes no longer than a round.
        """
        if only_if_dear and not self._make_recorder().patience:
            return 0
        rounds = self.take(num_rows=num_rows, num_slots=num_slots)
        try:
            return rounds.record_ahead([k for k in counts if k <= MOST_DRAFTED], seconds=seconds)
        finally:
            self.give_back(rounds)

    def give_back(self, rounds: Rounds) -> None:
        """Keep ``rounds`` for other decoders; what it holds of this one's rows is let go."""
        rounds.forget()
        with self._lock:
            # Beside the newest the one with the most recordings, and none without any. Were it
            # always those with the most, a batch that grows over several sizes would record anew
            # each time.
            known = [r for r in self._idle if r is not rounds and len(r.recordings)]
            known.sort(key=lambda r: len(r.recordings))
            self._idle = [*known[1 - KEPT :], rounds]


def _roomy(kept: tuple[int, int], asked: tuple[int, int]) -> tuple[int, int]:
    """Rows and slots of the cache after one of ``kept``, for a decoder that needs those ``asked``.

    Both kinds of text find room, and later their recordings, unless that takes over twice what the
    larger of them takes alone: after a batch of many short texts a long one must not have as many
    rows. Slots grow by half at least, or every longer text would record anew.
    """
    grown = kept[1] + kept[1] // 2 if asked[1] > kept[1] else kept[1]
    both = max(kept[0], asked[0]), max(asked[1], grown)
    return both if math.prod(both) <= 2 * max(math.prod(kept), math.prod(asked)) else asked
