"""Rounds, caches and recordings that are kept for the next request, and make room for it."""

import threading
import weakref

import pytest
import torch
from device_rounds import EXIT, PROMPTS, decode, decoder_of, finish, idle_of, spec

from layerskip.cache import KVCache
from layerskip.graphs import Recordings, RepeatingRecorder
from layerskip.seats import InTurn
from layerskip.workbench import Workbench


def test_what_is_left_behind_forgets_whose_text_ended_where(stack, text):
    """Rounds recorded over the small cache end later rows by those rows' own ids."""
    bench = Workbench(stack, EXIT, RepeatingRecorder)
    decoder = decoder_of(stack, bench, num_rows=1)
    eos_ids = frozenset({text[7]})
    first = decoder.join(spec(PROMPTS[0], eos_ids=eos_ids))
    for _ in range(2):
        decoder.step()
    decoder.join(spec(PROMPTS[1], eos_ids=eos_ids))
    assert idle_of(bench).cache.num_rows == 1
    assert (idle_of(bench).seats.eos_ids == -1).all()
    finish(decoder)
    assert first.token_ids == text[: text.index(text[7]) + 1]
    assert decode(decoder_of(stack, bench, num_rows=1), spec(PROMPTS[0]))[0].token_ids == text


def test_a_kept_cache_goes_where_memory_has_no_room_beside_it(stack, text, monkeypatch):
    bench = Workbench(stack, EXIT, RepeatingRecorder)
    bench.record_ahead([0], num_rows=1, num_slots=64)
    kept, new_cache = weakref.ref(idle_of(bench).cache), stack.new_cache

    def limited(*, num_rows, num_slots):
        if kept() is not None:
            raise RuntimeError("CUDA out of memory")
        return new_cache(num_rows=num_rows, num_slots=num_slots)

    monkeypatch.setattr(stack, "new_cache", limited)
    assert bench.take(num_rows=2, num_slots=64).cache.num_rows == 2
    assert bench._idle == []


@pytest.mark.parametrize("ask", ["another", "a row more"])
def test_of_two_kept_caches_both_go_before_a_request_finds_no_memory(stack, monkeypatch, ask):
    """One that has no room is replaced first; the other may hold what is missing."""
    bench = Workbench(stack, EXIT, RepeatingRecorder)
    bench.record_ahead([0], num_rows=1, num_slots=64)
    bench.record_ahead([0, 1], num_rows=2, num_slots=64)
    assert len(bench._idle) == 2
    decoder = decoder_of(stack, bench, num_rows=1) if ask == "a row more" else None
    kept = weakref.ref(next(r.cache for r in bench._idle if r.cache.num_rows == 2))

    def limited(make):
        def made(*sizes, **named):
            if kept() is not None:
                raise RuntimeError("CUDA out of memory")
            return make(*sizes, **named)

        return made

    if decoder is None:
        monkeypatch.setattr(stack, "new_cache", limited(stack.new_cache))
        assert bench.take(num_rows=3, num_slots=64).cache.num_rows == 3
    else:
        decoder.join(spec(PROMPTS[0]))
        monkeypatch.setattr(decoder.cache, "_resized", limited(decoder.cache._resized))
        decoder.join(spec(PROMPTS[1]))
        assert decoder.cache is decoder.rounds.cache
        assert decoder.cache.num_rows == 2
    assert kept() is None


def test_a_longer_request_has_a_larger_cache_and_new_recordings(stack, text):
    bench = Workbench(stack, EXIT, RepeatingRecorder)
    eos_ids = frozenset({text[7]})
    decode(decoder_of(stack, bench, num_rows=1), spec(PROMPTS[0], eos_ids=eos_ids))
    decoder = decoder_of(stack, bench, num_rows=2, num_slots=65)
    assert (decoder.cache.num_rows, decoder.cache.num_slots) == (2, 128)
    (row,) = decode(decoder, spec(PROMPTS[0], eos_ids=eos_ids))
    assert row.token_ids == text[: text.index(text[7]) + 1]


@pytest.mark.parametrize(
    ("kept", "asked", "expected"),
    [
        ((2, 128), (1, 200), (2, 256)),  # both kinds find room
        ((4, 128), (8, 64), (8, 128)),
        ((32, 64), (1, 576), (1, 576)),  # not 32 times as much as it needs
        ((1, 576), (32, 64), (32, 64)),
    ],
)
def test_a_kept_cache_grows_to_what_two_kinds_of_texts_need(stack, kept, asked, expected):
    bench = Workbench(stack, EXIT, RepeatingRecorder)
    for rows, slots in (kept, asked):
        rounds = bench.take(num_rows=rows, num_slots=slots)
        bench.give_back(rounds)
    assert (rounds.cache.num_rows, rounds.cache.num_slots) == expected
    assert len(rounds.seats.num_left) == expected[0]


def test_a_kept_cache_makes_room_for_the_next_one(stack, monkeypatch):
    """It goes first; and where there is no room for more than was asked, that is enough."""
    bench, made = Workbench(stack, EXIT, RepeatingRecorder), []
    new_cache = stack.new_cache

    def limited(*, num_rows, num_slots):
        assert [cache for cache in made if cache() is not None] == []
        if num_rows * num_slots > 300:
            raise RuntimeError("CUDA out of memory")
        cache = new_cache(num_rows=num_rows, num_slots=num_slots)
        made.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(stack, "new_cache", limited)
    bench.give_back(bench.take(num_rows=2, num_slots=128))
    rounds = bench.take(num_rows=1, num_slots=200)
    assert (rounds.cache.num_rows, rounds.cache.num_slots) == (1, 256)
    bench.give_back(rounds)
    del rounds
    with pytest.raises(RuntimeError, match="out of memory"):
        bench.take(num_rows=3, num_slots=200)
    assert bench.take(num_rows=1, num_slots=300).cache.num_rows == 1


@pytest.mark.parametrize("fits", [True, False])
def test_rounds_that_a_collection_gives_back_meanwhile_are_no_hindrance(stack, monkeypatch, fits):
    """It may let go of those that were just found: they are taken, or replaced, all the same."""
    bench, asked = Workbench(stack, None, RepeatingRecorder), []
    first, second = (bench.take(num_rows=1, num_slots=8) for _ in range(2))
    bench.give_back(first)

    def collecting():
        asked.append(1)
        if len(asked) == 1:
            bench.give_back(second)

    class Collected(Recordings):
        def __len__(self):
            collecting()
            return super().__len__()

    if fits:
        monkeypatch.setattr(first, "has_room", lambda *_: collecting() or True)
        assert bench.take(num_rows=1, num_slots=8) is first
    else:
        first.recordings = Collected(RepeatingRecorder())
        assert bench.take(num_rows=3, num_slots=8).recordings is first.recordings
    assert asked
    assert idle_of(bench) is second


def test_a_garbage_collection_may_give_rounds_back_while_others_are_taken(stack):
    """Finalizers run in the thread that is in ``take`` or ``give_back``."""
    bench = Workbench(stack, None, RepeatingRecorder)
    rounds = bench.take(num_rows=1, num_slots=8)

    def collected():
        with bench._lock:
            bench.give_back(rounds)

    thread = threading.Thread(target=collected, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert idle_of(bench) is rounds


def test_rounds_that_are_given_back_twice_are_taken_once(stack):
    bench = Workbench(stack, EXIT, RepeatingRecorder)
    bench.record_ahead([0], num_rows=1, num_slots=40)
    rounds = idle_of(bench)
    bench.give_back(rounds)
    taken = [bench.take(num_rows=1, num_slots=40) for _ in range(2)]
    assert taken[0] is rounds is not taken[1]


class Stream:
    def __init__(self, name, waits):
        self.name, self._waits = name, waits

    def wait_stream(self, other):
        self._waits.append((self.name, other.name))


def test_what_is_started_on_another_stream_waits_for_what_was(monkeypatch):
    waits = []
    one, other = (Stream(name, waits) for name in ("one", "other"))
    now = [one]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[0])
    turn = InTurn(torch.device("cuda", 0))
    for now[0] in (one, other, other, one):
        turn.follow()
    assert waits == [("other", "one"), ("one", "other")]
    InTurn(torch.device("cpu")).follow()


def test_requests_and_steps_follow_each_other_on_a_kept_cache(stack, monkeypatch):
    """Before anything is done to it: to empty it, to add a row, to run a round, to copy one, to let
    it go."""
    done = []

    class Watched(InTurn):
        def follow(self):
            done.append("follow")

    monkeypatch.setattr("layerskip.rounds.InTurn", Watched)
    for name in ("release", "restore", "copied"):
        own = getattr(KVCache, name)
        monkeypatch.setattr(
            KVCache, name, lambda *a, own=own, name=name: done.append(name) or own(*a)
        )
    bench = Workbench(stack, EXIT, RepeatingRecorder)
    decoder = decoder_of(stack, bench)
    advance = decoder.rounds.advance
    decoder.rounds.advance = lambda *a, **k: done.append("advance") or advance(*a, **k)
    row = decoder.join(spec(PROMPTS[0], limit=6))
    finish(decoder)
    decoder.copied(row)
    decoder.leave(row.id)
    assert done[:2] == ["follow", "follow"]  # a row joins, and is prefilled by a step
    assert {"advance", "copied"} <= set(done)
    assert all(done[i - 1] == "follow" for i, name in enumerate(done) if name != "follow")
    bench.give_back(decoder.rounds)
    done.clear()
    bench.take(num_rows=1, num_slots=8)
    assert done[:2] == ["follow", "release"]
