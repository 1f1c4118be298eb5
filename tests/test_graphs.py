"""Recorded functions: what a CPU's recorder proves of them, and what is kept."""

import contextlib
import gc
import signal
import threading
import weakref
from random import Random

import pytest
import torch

from layerskip.graphs import (
    TRIED_AGAIN_AFTER,
    GraphRecorder,
    HostWorkError,
    OneAtATime,
    RecordingError,
    Recordings,
    RepeatingRecorder,
    wait_for,
)


@pytest.fixture
def buffer():
    return torch.arange(4.0)


def reads(buffer):
    return buffer.sum().item()


def decides(buffer):
    if buffer[0] > 0:
        buffer.add_(1)


def lists(buffer):
    return buffer.tolist()


def makes(buffer):
    buffer.add_(torch.tensor([1.0, 2.0, 3.0, 4.0]))


def chooses(buffer):
    buffer.copy_(torch.where(buffer > 0, buffer, -1))


def filters(buffer):
    return buffer[buffer > 0]


def counts(buffer):
    return buffer.nonzero()


def writes_by_mask(buffer):
    buffer[buffer > 0] = torch.zeros_like(buffer)[:3]


@pytest.mark.parametrize(
    "function", [reads, decides, lists, makes, chooses, filters, counts, writes_by_mask]
)
def test_what_a_graph_could_not_hold_is_refused(buffer, function):
    with pytest.raises(HostWorkError, match=r"host|depends on data"):
        RepeatingRecorder().record(lambda: function(buffer))


def test_a_recording_does_the_same_again(buffer):
    at = torch.tensor([1, 3])

    def function():
        buffer.index_add_(0, at, torch.ones_like(at, dtype=buffer.dtype))
        buffer[at] = torch.where(buffer[at] > 3, buffer[at].clamp(max=5), buffer[at])

    recording = RepeatingRecorder().record(function)
    for _ in range(3):
        recording.replay()
    assert buffer.tolist() == [0, 5, 2, 5]


def test_a_number_of_the_host_that_changes_is_seen(buffer):
    step = [1]
    recording = RepeatingRecorder().record(lambda: buffer.add_(step[0]))
    recording.replay()
    step[0] = 2
    with pytest.raises(HostWorkError, match="a graph would have done that again"):
        recording.replay()


def test_memory_that_moved_is_seen(buffer):
    place = [buffer]
    recording = RepeatingRecorder().record(lambda: place[0].add_(1))
    place[0] = buffer.clone()
    with pytest.raises(HostWorkError, match="a graph would have done that again"):
        recording.replay()


def test_work_that_grows_is_seen(buffer):
    times = [1]
    recording = RepeatingRecorder().record(lambda: [buffer.add_(1) for _ in range(times[0])])
    times[0] = 2
    with pytest.raises(HostWorkError, match="did 2 operations, and 1"):
        recording.replay()


class Sized:
    """Recordings of so many bytes; functions named in ``unfit`` have none."""

    def __init__(self, num_bytes, unfit=(), patience=0):
        self.num_bytes, self.unfit, self.made, self.patience = num_bytes, unfit, 0, patience

    def record(self, function):
        if function in self.unfit:
            raise RecordingError("no graph for this")
        self.made += 1
        return Played(function, self.num_bytes)


class Played:
    def __init__(self, function, num_bytes):
        self.function, self.num_bytes = function, num_bytes

    def replay(self):
        self.function()


def run(recordings, key, function):
    recordings.prepare(key, function)
    recordings.run(key, function)


def test_what_comes_up_again_is_recorded():
    played, recorder = [], Sized(10, patience=2)
    recordings, made = Recordings(recorder), []
    for key in "aabaab":
        if recordings.due(key):
            recordings.prepare(key, lambda: None)
        recordings.run(key, lambda key=key: played.append(key))
        made.append(recorder.made)
    assert made == [0, 0, 0, 1, 1, 1]  # the third time; b came up twice
    assert played == ["a", "a", "b", "b"]  # what was recorded did nothing
    recordings.clear()
    assert not recordings.due("a"), "over other memory it is counted anew"


def test_what_is_dear_has_run_before_it_is_recorded():
    """No matter how often it was asked for: something else may have run in its place."""
    ran = []

    class Recorder(Sized):
        def record(self, function):
            ran.append("recorded")
            return super().record(function)

    recordings = Recordings(Recorder(10, patience=2))
    assert [recordings.due("a") for _ in range(3)] == [False, False, True]
    recordings.prepare("a", lambda: ran.append("a"))
    assert ran == ["a", "recorded"]
    recordings.run("b", lambda: ran.append("b"))
    recordings.prepare("b", lambda: ran.append("b"))
    assert ran[2:] == ["b", "recorded"]


def test_what_has_no_memory_to_run_is_not_recorded(caplog):
    def function():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512 MiB.\nGPU 0 has")

    recorder = Sized(10, patience=2)
    recordings = Recordings(recorder)
    recordings.prepare("a", function)
    assert ("a" in recordings, recordings.has("a"), recorder.made) == (True, False, 0)
    reason = "a round could not run: CUDA out of memory. Tried to allocate 512 MiB."
    assert recordings.reason == reason
    assert caplog.messages == [f"this runs without a graph: {reason}"]


def test_what_cannot_be_recorded_is_not_tried_again():
    recordings = Recordings(Sized(10, unfit=(print,)))
    assert recordings.due("u")
    recordings.prepare("u", print)
    assert not recordings.due("u")


def test_the_second_try_comes_later_however_long_the_first_was_put_off():
    """It is due for as long as there is no time for it."""

    class Failing(Sized):
        def record(self, function):
            raise RecordingError("spoilt")

    recordings = Recordings(Failing(10, patience=2))
    assert sum(recordings.due("a") for _ in range(150)) == 148
    recordings.prepare("a", lambda: None)
    assert [recordings.due("a") for _ in range(TRIED_AGAIN_AFTER + 2)].count(True) == 0


def test_what_ran_over_memory_that_is_gone_runs_again_before_it_is_recorded():
    ran, recordings = [], Recordings(Sized(10, patience=2))
    recordings.run("a", lambda: ran.append("before"))
    recordings.clear()
    recordings.prepare("a", lambda: ran.append("after"))
    assert ran == ["before", "after"]


@pytest.mark.parametrize("fails", [1, 2])
def test_a_recording_that_failed_is_tried_once_more_and_later(fails, caplog):
    class Failing(Sized):
        def record(self, function):
            times.append(len(asked))
            if len(times) <= fails:
                raise RecordingError("spoilt")
            return super().record(function)

    times, asked = [], []
    recordings = Recordings(Failing(10, patience=2))
    for _ in range(300):
        asked.append("a")
        if recordings.due("a"):
            tried = recordings.num_tried
            recordings.prepare("a", lambda: None)
            assert recordings.num_tried == tried + 1, "as rounds are told not to learn of it"
        recordings.run("a", lambda: None)
        assert ("a" in recordings) == (len(times) > 0)
    assert times == [3, 3 + TRIED_AGAIN_AFTER + 3]
    assert recordings.has("a") == (fails < 2)
    assert recordings.reason == ("spoilt" if fails == 2 else "")
    assert caplog.messages == ["this runs without a graph: spoilt"]


def test_what_finds_no_room_runs_as_it_is_and_nothing_is_dropped_for_it():
    """What is shared is not given back, so that another turn would not help either."""
    played, recorder = [], Sized(100)
    recordings = Recordings(recorder, limit_bytes=250)
    for key in "abcabcd" * 3:
        assert recordings.full == ("c" in recordings)
        run(recordings, key, lambda key=key: played.append(key))
    assert "".join(played) == "abcabcd" * 3
    assert (len(recordings), recorder.made, recordings.num_bytes) == (2, 3, 300)
    assert recordings.reason == "recorded rounds keep 300 bytes, and 250 are allowed"
    recordings.clear()
    assert (recordings.num_bytes, recordings.full, recordings.reason) == (0, False, "")
    run(recordings, "c", lambda: None)
    assert (len(recordings), recorder.made) == (1, 4)


def test_without_a_recording_the_function_runs_and_says_why():
    played = []
    unfit, fit = (lambda: played.append("unfit")), (lambda: played.append("fit"))
    recordings = Recordings(Sized(10, unfit=(unfit,)), limit_bytes=100)
    for key, function in (("u", unfit), ("f", fit), ("u", unfit)):
        run(recordings, key, function)
    assert played == ["unfit", "fit", "unfit"]
    assert recordings.reason == "no graph for this"
    assert len(recordings) == 1


def test_what_could_not_be_recorded_over_other_memory_is_tried_again():
    recordings = Recordings(Sized(10, unfit=(print,)), limit_bytes=100)
    recordings.prepare("u", print)
    recordings.clear()
    assert recordings.reason == ""
    recordings.prepare("u", lambda: None)
    assert "u" in recordings


def test_a_recording_that_is_too_large_is_not_kept():
    played = []
    recordings = Recordings(Sized(500), limit_bytes=100)
    run(recordings, "a", lambda: played.append("a"))
    assert (played, len(recordings), recordings.full) == (["a"], 0, False)
    assert recordings.reason == "a recorded round keeps 500 bytes, and 100 are allowed"


class Stream:
    def __init__(self, device=None):
        pass

    def wait_stream(self, other):
        pass


class Captured:
    """A graph."""


class Cuda:
    """As much of ``torch.cuda`` as a capture needs. Pools live as long as graphs use them.

    Attributes:
        needs: bytes of the function that is captured.
        fails: whether the capture does.
        spoilt: set once a thread waits for the device while another captures.
    """

    def __init__(self):
        self.needs, self.fails, self.spoilt = 0, False, threading.Event()
        self.pools, self.users, self.stuck = {}, {}, set()
        self.here, self.capturing = Stream(), False

    def memory_reserved(self):
        return sum(self.pools.values())

    def empty_cache(self):
        self.pools = {pool: size for pool, size in self.pools.items() if len(self.users[pool])}

    def synchronize(self, device=None):
        if self.capturing:
            self.spoilt.set()

    def current_stream(self):
        return self.here

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.here = self.here, stream
        try:
            yield
        finally:
            self.here = before

    @contextlib.contextmanager
    def graph(self, graph, *, stream, capture_error_mode, pool=None):
        self.synchronize()
        before, self.here, self.capturing = self.here, stream, True
        number = len(self.users) if pool is None else pool
        assert pool is None or (len(self.users[pool]) and pool not in self.stuck)
        yield
        self.capturing = False
        if self.fails:  # torch's own comes no further, either
            self.stuck.add(number)
            raise RuntimeError("CUDA error: operation not permitted")
        self.here = before
        self.pools[number] = max(self.pools.get(number, 0), self.needs)
        self.users.setdefault(number, weakref.WeakSet()).add(graph)
        graph.pool = lambda: number


@pytest.fixture
def cuda(monkeypatch):
    """A GPU that is none."""
    fake = Cuda()
    for name in ("memory_reserved", "empty_cache", "synchronize", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "graph", fake.graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Captured)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return fake


def captured(cuda, recorder, needs):
    cuda.needs = needs
    return recorder.record(lambda: None)


def test_graphs_share_memory_that_goes_with_the_last_of_them(cuda):
    recorder = GraphRecorder(torch.device("cuda"))
    kept = [captured(cuda, recorder, needs) for needs in (100, 60, 140)]
    assert [graph.num_bytes for graph in kept] == [100, 0, 40]
    del kept[0]
    kept.append(captured(cuda, recorder, 130))
    assert (kept[-1].num_bytes, cuda.memory_reserved()) == (0, 140)
    kept.clear()
    kept = [captured(cuda, recorder, needs) for needs in (80, 80)]
    assert [graph.num_bytes for graph in kept] == [80, 0]
    assert cuda.memory_reserved() == 80


def test_a_capture_that_fails_costs_no_stream_and_no_later_one(cuda):
    recorder, here = GraphRecorder(torch.device("cuda")), cuda.current_stream()
    kept = [captured(cuda, recorder, 100)]
    cuda.fails = True
    with pytest.raises(RecordingError, match="could not capture a round: CUDA error"):
        recorder.record(lambda: None)
    assert cuda.current_stream() is here
    cuda.fails = False
    kept += [captured(cuda, recorder, needs) for needs in (100, 100)]
    assert [graph.num_bytes for graph in kept] == [100, 100, 0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_a_warm_up_started_is_waited_for_if_it_ends_early(cuda, monkeypatch, error):
    """Else the caller would go on beside it: a round that was started would still be running."""
    recorder, here, waits, calls = GraphRecorder(torch.device("cuda")), cuda.here, [], []
    monkeypatch.setattr(Stream, "wait_stream", lambda *streams: waits.append(streams))

    def function():
        calls.append(cuda.here)
        if len(calls) == 2:
            raise error

    with pytest.raises((KeyboardInterrupt, RecordingError)):
        recorder.record(function)
    side = calls[0]
    assert side is not here
    assert waits == [(side, here), (here, side)]


def test_threads_capture_one_after_another(cuda):
    recorders = [GraphRecorder(torch.device("cuda")) for _ in range(2)]

    def function():  # of the first one: the second one begins
        if cuda.capturing and not threads:
            threads.append(threading.Thread(target=another))
            threads[0].start()
            assert begun.wait(timeout=60)
            cuda.spoilt.wait(timeout=0.2)

    def another():
        begun.set()
        recorders[1].record(lambda: None)

    threads, begun = [], threading.Event()
    recorders[0].record(function)
    threads[0].join(timeout=60)
    assert not threads[0].is_alive()
    assert not cuda.spoilt.is_set()


def test_a_signal_s_handler_that_decodes_during_a_recording_is_told_so(cuda):
    """It would wait for a lock that its own thread has. The recording goes on without it."""
    recorder, told = GraphRecorder(torch.device("cuda")), []

    def function():
        if not told:
            told.append("called")
            with pytest.raises(
                RuntimeError, match="capturing a CUDA graph or waiting for the GPU: a"
            ):
                GraphRecorder(torch.device("cuda")).record(lambda: told.append("recorded"))

    thread = threading.Thread(target=recorder.record, args=(function,), daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert told == ["called"]
    captured(cuda, recorder, 100)


def test_who_waits_for_the_device_spoils_no_capture(cuda):
    def function():
        if cuda.capturing:
            thread.start()
            assert begun.wait(timeout=60)
            cuda.spoilt.wait(timeout=0.2)

    def another():
        begun.set()
        wait_for(torch.device("cuda"))

    begun, thread = threading.Event(), threading.Thread(target=another)
    GraphRecorder(torch.device("cuda")).record(function)
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert not cuda.spoilt.is_set()


def test_an_interrupt_leaves_no_capture_under_way():
    """Wherever it comes, and though its traceback is kept, as a notebook does."""
    one, random = OneAtATime(), Random(0)
    interrupted, armed = [], False

    def interrupt(*_):
        if armed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # what others have it call would swallow an interrupt
    try:
        for _ in range(3000):
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 8e-5))
                for _ in range(100):
                    one.run(int)
                armed = False
            except KeyboardInterrupt as error:
                armed = False
                interrupted.append(error)
    finally:
        armed = False
        gc.enable()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(interrupted) > 300
    other = threading.Thread(target=one.run, args=(int,), daemon=True)
    other.start()
    other.join(timeout=20)
    assert not other.is_alive()
    one.run(int)
