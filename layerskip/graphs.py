"""Functions over tensors that stay where they are, recorded once and replayed.

On a GPU a recording is a CUDA graph: one call starts every kernel of a round. On a CPU it is the
function, called again under a watch which proves that a graph could hold it: that it asks the host
nothing, and that every call does the same operations on the same memory.
"""

import functools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

logger = logging.getLogger(__name__)

WARM_UPS = 2  # what is made at first use, kernels and their memory, is made before the capture
# Rounds of a kind that run unrecorded before one is recorded, as skis are rented until they might
# have been bought (Karlin and others 1988): many a kind comes up once or twice in a text. On an
# H200 a plain round's recording takes 5 to 19 times what it saves (bench/LOG.md, 2026-11-27), and
# there is nothing else that could run: most texts have more rounds than that.
PATIENCE = 2
# Of the time of rounds, what recordings of drafts may take while others can run in their place; and
# what may be saved up, so that a long run without any is not followed by a long wait.
RECORDING_SHARE, MOST_SAVED = 0.05, 0.2
# A capture may fail for what others do at that moment: it is made once more, when what it is of has
# come up so many times more than before the first.
TRIED_AGAIN_AFTER = 64
LIMIT_BYTES = 1 << 30
Function = Callable[[], None]
Tape = list[tuple[Any, ...]]


class RecordingError(RuntimeError):
    """A function cannot be recorded; the message is the reason."""


class HostWorkError(AssertionError):
    """A function that is to be recorded asked the host something, or did not repeat itself."""


class OneAtATime:
    """What one thread of a process does at a time, and no signal's handler in the middle of it.

    A capture begins by waiting for the device and freeing what torch's cache holds, which spoils
    one that another thread has under way, over any model: torch allows one at a time.
    """

    def __init__(self) -> None:
        # At a plain lock a handler would wait for the very code that waits for the handler.
        self._lock, self._busy = threading.RLock(), False

    def run(self, function: Callable[[], Any]) -> Any:
        """What ``function`` gives, once no other thread is at it.

        Raises:
            RuntimeError: this thread is at it already.
        """
        # No context manager of ours: an interrupt as one is entered or left would keep the lock.
        with self._lock:
            if self._busy:
                raise RuntimeError(
                    "this thread is capturing a CUDA graph or waiting for the GPU: a signal's "
                    "handler cannot decode in the middle of that; let it set a flag"
                )
            try:
                self._busy = True
                return function()
            finally:
                self._busy = False


ONE_CAPTURE = OneAtATime()


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what it was given, if it is a GPU; and until no capture of
    another thread is under way, which that would spoil."""
    if device.type == "cuda":
        ONE_CAPTURE.run(functools.partial(torch.cuda.synchronize, device))


@dataclass(frozen=True, eq=False)
class Graph:
    """A captured CUDA graph, whose pool of memory others may have grown, too.

    Attributes:
        num_bytes: how much more device memory its recorder's graphs keep since it was made.
    """

    graph: torch.cuda.CUDAGraph
    num_bytes: int

    def replay(self) -> None:
        self.graph.replay()


class GraphRecorder:
    """Captures CUDA graphs that share a pool of memory, which goes when the last of them goes. It
    is about as large as the largest of them needs (not measured yet), however many there are.

    No two of one recorder may run at the same time, and what one leaves in the pool the next
    overwrites; what is to stay is written outside.

    Args:
        device: a CUDA device.

    Attributes:
        patience: times that a function runs unrecorded before it is worth a recording.
    """

    patience = PATIENCE

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._warm = False
        self._sharing: weakref.WeakSet[Graph] = weakref.WeakSet()  # the pool of the next graph

    def record(self, function: Function) -> Graph:
        """Capture ``function``, which has run before. It may be called any number of times, so that
        what it changes must not matter then.

        Raises:
            RecordingError: it cannot be recorded; the message is the reason.
            RuntimeError: it is called in the middle of another recording, by a signal's handler.
        """
        graph: Graph = ONE_CAPTURE.run(functools.partial(self._record, function))
        return graph

    def _record(self, function: Function) -> Graph:
        try:
            with torch.cuda.device(self._device):
                if not self._warm:  # the stream; a function's own first use was where it ran
                    self._warm_up(function)
                    self._warm = True
                return self._capture(function)
        except RuntimeError as error:  # out of memory is one, too
            self._sharing.clear()  # torch may hold their pool for one that is still being captured
            raise RecordingError(f"CUDA could not capture a round: {_first_line(error)}") from error

    def _warm_up(self, function: Function) -> None:
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    function()
        finally:  # what the caller does next comes after what was started, if it was interrupted
            here.wait_stream(self._stream)
        torch.cuda.synchronize()

    def _capture(self, function: Function) -> Graph:
        torch.cuda.empty_cache()  # as the capture does: else what it frees would be counted
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        shared = next(iter(self._sharing), None)  # alive until this one has a share
        # Other threads may use the GPU meanwhile: only this one's calls can spoil the capture.
        capture = torch.cuda.graph(
            graph,
            pool=None if shared is None else shared.graph.pool(),
            stream=self._stream,
            capture_error_mode="thread_local",
        )
        # A capture that fails leaves its thread on its stream.
        with torch.cuda.stream(torch.cuda.current_stream()), capture:
            function()
        made = Graph(graph, max(0, torch.cuda.memory_reserved() - before))
        self._sharing.add(made)
        return made


@dataclass(eq=False)
class Repetition:
    """A function that is called again in the place of a graph, and watched."""

    function: Function
    tape: Tape
    num_bytes: int = 0

    def replay(self) -> None:
        tape = taped(self.function)
        if len(tape) != len(self.tape):
            raise HostWorkError(
                f"a recorded function did {len(tape)} operations, and {len(self.tape)} when it was "
                "recorded"
            )
        for now, then in zip(tape, self.tape, strict=True):
            if now != then:
                raise HostWorkError(
                    f"a recorded function did {now}, and when it was recorded {then}: a graph "
                    "would have done that again"
                )


class RepeatingRecorder:
    """The recorder of a CPU: proves that a graph could hold what it records.

    Args:
        patience: as of ``GraphRecorder``; here nothing is won by waiting.
    """

    def __init__(self, patience: int = 0) -> None:
        self.patience = patience

    def record(self, function: Function) -> Repetition:
        """Call ``function`` under the watch."""
        return Repetition(function, taped(function))


Recording = Graph | Repetition
Recorder = GraphRecorder | RepeatingRecorder


class Allowance:
    """Seconds that may go into recordings that nothing depends on, while requests wait: a share of
    what their rounds take. One serves all threads that decode with a model; it need not be exact.

    Attributes:
        affords: whether there are enough for one more, by what the last one took.
    """

    def __init__(self) -> None:
        self._saved = self._last = 0.0

    @property
    def affords(self) -> bool:
        return self._saved >= self._last

    def earn(self, seconds: float) -> None:
        """Rounds have taken so many."""
        self._saved = min(self._saved + RECORDING_SHARE * seconds, MOST_SAVED)

    def spend(self, seconds: float) -> None:
        """A recording has taken so many: of one that had to wait for another's, not all of it."""
        self._last = min(seconds, MOST_SAVED)
        self._saved -= self._last


class Recordings:
    """Recordings by key, made for what comes up again until memory is full.

    Where there is none yet, or one can't be made, the function runs as it is. None is dropped for
    another: they share memory, so that this would free nothing.

    Args:
        recorder: makes them.
        limit_bytes: of device memory that all of them keep, as measured.

    Attributes:
        reason: why a function can't be recorded; "" if none was refused.
        num_bytes: kept now; above the limit by what the one took that was refused for it.
        num_tried: recordings that were made or refused.
    """

    def __init__(self, recorder: Recorder, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._recorder, self._limit = recorder, limit_bytes
        self._kept: dict[Hashable, Recording] = {}
        self._unrecorded: dict[Hashable, bool] = {}  # and whether that is tried once more
        self._asked: Counter[Hashable] = Counter()
        self._ran: set[Hashable] = set()
        self.num_bytes = self.num_tried = 0
        self.reason = self._warned = ""

    def __contains__(self, key: Hashable) -> bool:
        """Whether ``key`` runs as it will, for long at least: a recording was made, or refused."""
        return key in self._kept or key in self._unrecorded

    def has(self, key: Hashable) -> bool:
        """Whether there is a recording."""
        return key in self._kept

    def due(self, key: Hashable, *, waits: int = 1) -> bool:
        """Whether to ``prepare`` a key before it runs now, which counts as one more time.

        Args:
            waits: so many times as patiently, where something else can run in its place.
        """
        if self._is_settled(key):
            return False
        self._asked[key] += 1
        return self._asked[key] > waits * self._recorder.patience

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def dear(self) -> bool:
        """Whether a recording takes far longer than the function."""
        return self._recorder.patience > 0

    @property
    def full(self) -> bool:
        """Whether nothing more is recorded until they are cleared."""
        return self.num_bytes > self._limit

    def prepare(self, key: Hashable, function: Function) -> None:
        """Record ``function`` under ``key`` unless that was tried, or failed twice. What a dear one
        makes at its first use, no capture may: if it has not run yet, it does before."""
        if self._is_settled(key):
            return
        self.num_tried += 1
        if self.full:
            self._give_up(key, self.reason)
            return
        try:
            if self.dear and key not in self._ran:
                self._try_out(key, function)
            recording = self._recorder.record(function)
        except RecordingError as error:
            self._give_up(key, str(error), again=key not in self._unrecorded)
            return
        taken = self.num_bytes + recording.num_bytes
        if taken <= self._limit:
            self._kept[key], self.num_bytes = recording, taken
            self._unrecorded.pop(key, None)
            if not self._unrecorded:
                self.reason = ""
            return
        those = "a recorded round keeps"
        if self._kept:  # with them it keeps what it took; alone it goes, and that with it
            self.num_bytes, those = taken, "recorded rounds keep"
        self._give_up(key, f"{those} {taken} bytes, and {self._limit} are allowed")

    def run(self, key: Hashable, function: Function) -> None:
        """``key``'s recording, or ``function`` itself where there is none."""
        if key in self._kept:
            self._kept[key].replay()
        else:
            function()
            self._ran.add(key)

    def clear(self) -> None:
        """Drop all recordings: the memory that they know is not in use any more."""
        self._kept.clear()
        self._unrecorded.clear()
        self._asked.clear()
        self._ran.clear()
        self.num_bytes, self.reason = 0, ""

    def _try_out(self, key: Hashable, function: Function) -> None:
        """Run what nothing depends on yet: if there is no memory for it, others go on."""
        try:
            function()
        except RuntimeError as error:
            raise RecordingError(f"a round could not run: {_first_line(error)}") from error
        self._ran.add(key)

    def _is_settled(self, key: Hashable) -> bool:
        """Whether nothing is left to record."""
        return key in self._kept or not self._unrecorded.get(key, True)

    def _give_up(self, key: Hashable, reason: str, *, again: bool = False) -> None:
        self._unrecorded[key] = again
        if again:
            self._asked[key] = -TRIED_AGAIN_AFTER
        if reason != self._warned:  # not again for every memory that they are tried over
            logger.warning("this runs without a graph: %s", reason)
        self.reason = self._warned = reason


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def taped(function: Function) -> Tape:
    """Call ``function`` and list its operations: names, numbers, and which memory they touch.

    What lived before the call is known by its address, what is made in it by its maker's place
    in the list: two equal lists are one program over one memory.

    Raises:
        HostWorkError: it read a tensor on the host, made one from the host's numbers, or had
            shapes that depend on data: a GPU would have to wait for the host.
    """
    watch = _Watch()
    with _NoReads(), watch:
        function()
    return watch.tape


_READS = frozenset(
    getattr(Tensor, name)
    for name in (
        *("item", "tolist", "numpy", "cpu", "__array__", "__bool__"),
        *("__int__", "__float__", "__complex__", "__index__"),
    )
)


class _NoReads(TorchFunctionMode):
    """Refuses what a CPU's tensors do without an operation."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _READS:
            raise HostWorkError(f"{func.__name__} reads a tensor on the host")
        return func(*args, **(kwargs or {}))


class _Watch(TorchDispatchMode):
    """Refuses what needs the host, and lists the rest."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape: Tape = []
        self._makers: dict[int, int] = {}
        self._alive: list[Tensor] = []  # so that no address is used twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        _check(func, kind, args)
        known: set[int] = set()
        given = self._described((*args, *sorted(kwargs.items())), known)
        out = func(*args, **kwargs)
        for made in (out,) if isinstance(out, Tensor) else _tensors((out,)):
            self._alive.append(made)
            place = made.untyped_storage().data_ptr()
            if place not in known:
                self._makers[place] = len(self.tape)
        self.tape.append((kind.name, *given))
        return out

    def _described(self, value: Any, known: set[int]) -> Any:
        """What the tape says of an argument; the places of its tensors go to ``known``."""
        if isinstance(value, Tensor):
            place = value.untyped_storage().data_ptr()
            known.add(place)
            source = ("made", self._makers[place]) if place in self._makers else ("at", place)
            return (
                *source,
                value.dtype,
                tuple(value.shape),
                value.stride(),
                value.storage_offset(),
            )
        if isinstance(value, list | tuple):
            return tuple([self._described(v, known) for v in value])
        return repr(value)


class _Kind(NamedTuple):
    """What is to be known of an operation, whatever it is called with.

    Attributes:
        reads, resizes: whether its result, or its result's shape, depends on data.
        indexes: whether the second argument holds indices, or masks.
    """

    name: str
    reads: bool
    resizes: bool
    indexes: bool


@functools.cache
def _kind(func: Any) -> _Kind:
    tags = func.tags
    return _Kind(
        str(func),
        torch.Tag.data_dependent_output in tags,
        torch.Tag.dynamic_output_shape in tags,
        func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default),
    )


def _check(func: Any, kind: _Kind, args: Sequence[Any]) -> None:
    """Raise for an operation that no graph can hold."""
    if kind.reads:
        raise HostWorkError(f"{kind.name} reads a tensor on the host")
    if func is torch.ops.aten.lift_fresh.default:
        raise HostWorkError(f"{kind.name} makes a tensor from numbers of the host")
    # Of the element-wise operations it alone copies a number to the device as a tensor.
    if func is torch.ops.aten.where.self and any(t.dim() == 0 for t in args):
        raise HostWorkError(f"{kind.name} takes a number of the host: use masked_fill")
    masks = kind.indexes and any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1]))
    if masks or (kind.resizes and not kind.indexes):
        raise HostWorkError(f"{kind.name} has a shape that depends on data")


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """All tensors in nested lists and tuples."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found
