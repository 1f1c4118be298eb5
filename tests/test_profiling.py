"""Cost tables by a clock of our own: what is measured is known exactly. Fingerprints and keys."""

import copy
import gc
import math
import random
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from toys import NUM_LAYERS, PLANS, VOCAB_SIZE, make_model

import layerskip.bare_passes as bare_passes
import layerskip.profiling as profiling
from layerskip.cost import CostTable
from layerskip.exactness import SWITCHED_OFF, Exactness
from layerskip.fingerprint import cost_key, fingerprint, mismatch
from layerskip.graphs import RecordingError, RepeatingRecorder
from layerskip.model import DecoderStack, pack_model
from layerskip.packed import PackedStack
from layerskip.plan import PlanFile
from layerskip.profiling import fitting_cost, measure_cost, warn_of_another_checkpoint
from layerskip.recorded_passes import RecordedPasses

PLAN = PLANS["exit"]
BLOCK = 128
PADDED = Exactness(True, 8, BLOCK, "", (1, 2, 4, 8))
LAYER, PER_ROW, PER_SLOT, ANOTHER, HEAD = 1e-3, 1e-5, 1e-7, 2e-4, 3e-4
SAMPLE, LIKELIEST, JUDGE, JUDGE_LIKELIEST = 5e-5, 1e-5, 4e-6, 2e-6
DRAWN = 0.4  # of that, where a draft pass was the last


class Machine:
    """A stack that computes nothing, and a clock that says how long it took."""

    def __init__(self, stack: DecoderStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.speed, self.passes = 0.0, 1.0, []
        self.judged: set[int] = set()  # positions whose noise is made
        self.delay: Callable[[], float] = lambda: 0.0
        self.interruption: Callable[[], float] = lambda: 0.0
        self.pace: Callable[[float], float] = lambda now: 1.0
        monkeypatch.setattr(stack, "exactness", PADDED)
        monkeypatch.setattr(stack, "run_layers", self.run_layers)
        monkeypatch.setattr(stack, "logits", self.logits)

        def pick(sampler, logits, position):  # not a bound method: it is called with the sampler
            return self.pick(sampler, len(logits), position)

        monkeypatch.setattr(bare_passes.Sampler, "pick", pick)
        self.worked = -5.0
        clock = SimpleNamespace(perf_counter=lambda: self.now, thread_time=lambda: self.worked)
        for module in (profiling, bare_passes):
            monkeypatch.setattr(module, "time", clock)

    def run_layers(self, hidden, layers, cache, segments):
        rows, count = sum(s.count for s in segments), len(tuple(layers))
        context = max(s.start for s in segments)
        self.passes.append((count, rows, context, len(segments)))
        self.work(count * layer_seconds(rows, context, len(segments)))
        self.work(self.delay() / self.speed)
        self.now += self.interruption()
        return hidden

    def work(self, seconds: float) -> None:
        seconds *= self.speed * self.pace(self.now)
        self.now += seconds
        self.worked += seconds

    def logits(self, hidden):
        self.work(HEAD)
        return torch.zeros(len(hidden), VOCAB_SIZE)

    def pick(self, sampler, count, position):
        if count > 1:
            made = range(position, position + count)
            if not sampler.is_argmax and not self.judged.issuperset(made):
                self.judged.update(made)  # it took as long as to sample them
                self.work(count * SAMPLE)
            self.work(count * (JUDGE_LIKELIEST if sampler.is_argmax else JUDGE))
            return [0] * count
        assert position not in self.__dict__.setdefault("picked", set()), "its noise is known"
        self.picked.add(position)
        self.judged.clear()  # old noise is forgotten
        took = LIKELIEST if sampler.is_argmax else SAMPLE
        self.work(took if self.passes[-1][0] == NUM_LAYERS else DRAWN * took)
        return [0]


def judged(rows: int) -> float:
    """Seconds of sampling in a verify pass over so many tokens of one sequence."""
    return SAMPLE + (rows - 1) * JUDGE


def layer_seconds(rows: int, context: int, sequences: int = 1) -> float:
    padded = next((t for t in (1, 2, 4, 8) if t >= rows), -(-rows // 8) * 8)
    slots = -(-(context + padded) // BLOCK) * BLOCK  # attended to, masked
    return LAYER + PER_ROW * padded + PER_SLOT * slots * padded + ANOTHER * (sequences - 1)


@pytest.fixture
def stack() -> DecoderStack:
    return DecoderStack(make_model())


@pytest.fixture
def machine(stack: DecoderStack, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(stack, monkeypatch)


@pytest.fixture(scope="module")
def quick(toy: Callable) -> tuple[DecoderStack, CostTable]:
    """A table by the real clock."""
    stack = DecoderStack(toy())
    return stack, measure_cost(stack, PLAN, quick=True)


@pytest.mark.parametrize("speed", [1.0, 300.0])
def test_tokens_are_sampled_after_the_pass_that_they_follow_in_rounds(stack, machine, speed):
    """Its weights drive what sampling needs from the caches, and a draft's fewer of it."""
    machine.speed = speed
    table = measure_cost(stack, PLAN)
    assert table.sampling == pytest.approx(speed * SAMPLE)
    assert table.greedy_sampling == pytest.approx(speed * LIKELIEST)
    assert table.draft_sampling == pytest.approx(speed * DRAWN * SAMPLE)
    assert table.greedy_draft_sampling == pytest.approx(speed * DRAWN * LIKELIEST)


def test_without_draft_passes_drafts_have_no_sampling(stack, machine):
    """Looked-up tokens are drawn by nobody."""
    assert measure_cost(stack, None).draft_sampling is None


def test_the_table_says_what_passes_take(stack, machine):
    table = measure_cost(stack, PLAN)
    assert table.verify.rows == (1, 2, 4, 8, 16, 32, 64)
    assert table.verify.contexts == (0, 256, 512)
    assert table.sampling == pytest.approx(SAMPLE)
    assert table.judging == pytest.approx(JUDGE)
    assert table.greedy_sampling == pytest.approx(LIKELIEST)
    assert table.greedy_judging == pytest.approx(JUDGE_LIKELIEST)
    assert table.slot_block == BLOCK
    for rows in (1, 3, 8, 11, 64):
        for context in (0, 100, 130, 300, 536):  # 300: between what was measured
            full, draft = (n * layer_seconds(rows, context) for n in (NUM_LAYERS, 2))
            if rows != 11:  # not in the grid: between 8 and 16, as 16
                verified = full + HEAD + judged(rows)
                assert table.verify_pass(rows, context) == pytest.approx(verified)
                drafted = draft + HEAD + DRAWN * SAMPLE  # others are looked up
                assert table.draft_pass(rows, context) == pytest.approx(drafted)
    assert table.verify_pass(11, 0) - judged(11) == pytest.approx(
        table.verify_pass(16, 0) - judged(16)
    )
    assert table.draft_head.at(1, 0) == pytest.approx(HEAD)
    assert table.verify_sequence == pytest.approx(NUM_LAYERS * ANOTHER)
    assert table.draft_sequence == pytest.approx(2 * ANOTHER)
    # Eight sequences in one call of attention: no tile of one of them takes another.
    assert [tokens for tokens, _ in table.verify_tiles] == [2, 4, 8]
    assert [seconds for _, seconds in table.verify_tiles] == pytest.approx(
        [7 * NUM_LAYERS * ANOTHER] * 3
    )


@pytest.mark.parametrize(("quantum", "tiles"), [(16, (2, 4, 8)), (32, (4, 8)), (64, (8,))])
def test_eight_sequences_are_measured_where_as_many_tokens_of_one_are(
    stack, machine, quantum, tiles
):
    """Passes that are padded to more rows have fewer sizes."""
    stack.exactness = replace(stack.exactness, row_quantum=quantum)
    table = measure_cost(stack, PLAN)
    assert tuple(tokens for tokens, _ in table.verify_tiles) == tiles
    for tokens in tiles[:-1]:  # of eight attention alone would take longer here than the pass
        took = NUM_LAYERS * layer_seconds(8 * tokens, 0, 8) + HEAD
        sampled = 8 * SAMPLE + 8 * (tokens - 1) * JUDGE
        priced = table.verify_pass(8 * tokens, 0, sequences=8)
        assert priced == pytest.approx(took + sampled)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan])
def test_no_time_is_refused(stack, seconds):
    with pytest.raises(ValueError, match=r"seconds must be finite and at least 0\.001"):
        measure_cost(stack, None, seconds=seconds)


def test_passes_are_interleaved_and_small_ones_are_run_more_often(stack, machine, monkeypatch):
    timed, timing = [], bare_passes.Passes.timing
    monkeypatch.setattr(
        bare_passes.Passes, "timing", lambda self, point: timed.append(point) or timing(self, point)
    )
    measure_cost(stack, None)
    verify = [p for p in timed if p[0] == "verify" and p != ("verify", 4, 0)]
    small = [p for p in verify if p[1] <= 16]
    large = [p for p in timed if p[0].startswith("verify") and p[1] > 16]
    # 14 small points and 8 large ones, two of them of eight sequences: after a probe of six, a
    # warm-up, in which each of four and two numbers of rows is proven first, and 40 sweeps.
    assert len(small) == 6 + 4 + 14 * (1 + 40)
    assert len(large) == 2 + 8 * (1 + 40 / 4)
    sweeps = [tuple(small[i : i + 14]) for i in range(24, len(small), 14)]
    assert len(set(sweeps)) == 40, "the order is the same in every sweep"
    assert all(len(set(s)) == 14 for s in sweeps), "a pass is missing from a sweep"


def test_a_verify_pass_is_timed_after_what_it_follows_in_decoding(stack, machine):
    """There it finds some weights in the caches: of a draft's layers, or of the last pass."""
    passes = bare_passes.Passes(stack, PLAN, None, (8, 128))
    for point, before in ((("verify", 1, 128), NUM_LAYERS), (("verify", 8, 0), 2)):
        machine.passes.clear()
        seconds, _ = passes.timing(point)
        assert machine.passes == [(before, 1, point[2], 1), (NUM_LAYERS, point[1], point[2], 1)]
        assert seconds == pytest.approx(NUM_LAYERS * layer_seconds(*point[1:]) + HEAD)


@pytest.fixture
def device_stack() -> PackedStack:
    """Of a stack that chooses tokens by what the device knows."""
    model = make_model()
    pack_model(model)
    return PackedStack(model)


def test_a_table_of_recorded_passes(device_stack, monkeypatch):
    """Each is proven to ask the host nothing; what samples is part of it."""
    made = []

    def recorded(*args):
        made.append(RecordedPasses(*args, RepeatingRecorder()))
        return made[-1]

    monkeypatch.setattr(profiling, "_passes", recorded)
    table = measure_cost(device_stack, PLAN, quick=True)
    assert made[0]._recordings.reason == ""
    assert len(made[0]._recordings) >= 5
    greedy, sampled = (table.of(greedy=greedy) for greedy in (True, False))
    assert greedy.verify_pass(3, 40) == sampled.verify_pass(3, 40) > 0
    assert (table.sampling, table.further, table.drawing, table.draft_start) == (0, 0, 0, 0)


@torch.inference_mode()
def test_recorded_passes_are_measured_up_to_the_largest(device_stack, monkeypatch):
    """As a GPU's quick table has them: 64 rows, which a processor's guesses."""
    monkeypatch.setattr("layerskip.seats.FIRST_SLOTS", 256)
    context = bare_passes.grids(device_stack, quick=True)[0].contexts[-1]
    passes = RecordedPasses(device_stack, PLAN, None, (64, context), RepeatingRecorder())
    for point in (("verify", 64, 0), ("verify", 64, context), ("head", 64, 0)):
        assert min(passes.timing(point)) > 0.0
    assert passes._recordings.reason == ""
    assert len(passes._recordings) == 3


def test_passes_that_cannot_be_recorded_are_started_by_the_host(device_stack, monkeypatch, caplog):
    """All of them: those that were recorded before the memory was full are not in the table."""

    class Filling(RepeatingRecorder):
        made = 0

        def record(self, function):
            self.made += 1
            if self.made > 3:
                raise RecordingError("out of memory")
            return super().record(function)

    recorder, full = Filling(), []

    def recorded(*args):
        passes = RecordedPasses(*args, recorder)
        full.append(weakref.ref(passes))
        return passes

    monkeypatch.setattr(profiling, "_passes", recorded)
    timed, left = [], []
    timing, made = bare_passes.Passes.timing, bare_passes.Passes.__init__

    def making(self, *args):
        gc.collect()  # a CPU's recordings hold functions that hold them
        left.extend(ref() for ref in full)
        made(self, *args)

    monkeypatch.setattr(bare_passes.Passes, "__init__", making)
    monkeypatch.setattr(
        bare_passes.Passes, "timing", lambda self, point: timed.append(point) or timing(self, point)
    )
    table = measure_cost(device_stack, PLAN, quick=True)
    assert left == [None], "what was recorded holds memory that the others need"
    assert table.key["passes"] == "started by the host"
    assert recorder.made == 4
    assert table.sampling > 0.0  # by the host
    assert {"verify", "draft", "head"} <= {kind for kind, _, _ in timed}
    assert "as the host starts them: out of memory" in caplog.text


@torch.inference_mode()
def test_a_recorded_pass_is_that_of_a_round(device_stack, monkeypatch):
    """Its layers, at the context that the device is told, behind another one."""
    monkeypatch.setattr("layerskip.seats.FIRST_SLOTS", 256)
    ids = torch.arange(0, VOCAB_SIZE, 3)
    passes = RecordedPasses(
        device_stack, PLAN, device_stack.head_over(ids), (8, 300), RepeatingRecorder()
    )
    ran, run_rows, choose = [], device_stack.run_rows, device_stack.choose

    def running(hidden, layers, cache, lengths, seqlen, *, num_slots):
        ran.append((len(layers), seqlen, lengths.tolist(), num_slots))
        return run_rows(hidden, layers, cache, lengths, seqlen, num_slots=num_slots)

    def choosing(hidden, noise, vocab_ids):
        ran.append((len(hidden), None if vocab_ids is None else len(vocab_ids)))
        return choose(hidden, noise, vocab_ids)

    for point in [("verify", 4, 260), ("draft", 1, 30), ("draft sequences", 8, 0), ("head", 2, 0)]:
        passes.timing(point)  # recorded
        with monkeypatch.context() as patch:
            patch.setattr(RepeatingRecorder, "record", None)
            patch.setattr("layerskip.graphs.Repetition.replay", lambda self: self.function())
            patch.setattr(device_stack, "run_rows", running)
            patch.setattr(device_stack, "choose", choosing)
            passes.timing(point)
    of = len(ids)
    assert ran == [
        *[(NUM_LAYERS, 4, [260], 320), (4, None)] * 3,
        *[(2, 1, [30], 256), (1, of)] * 3,
        *[(2, 1, [0] * 8, 64), (8, of)] * 3,
        *[(2, of)] * 3,
    ]


def test_a_gpu_that_runs_rounds_by_itself_has_recorded_passes(device_stack, monkeypatch):
    monkeypatch.setattr(profiling, "RecordedPasses", lambda *args: ("recorded", args))
    monkeypatch.setattr(profiling, "GraphRecorder", lambda device: ("graphs of", device))
    monkeypatch.setattr(profiling, "Passes", lambda *args: ("by the host", args))
    asked = (device_stack, PLAN, None, (8, 128))
    assert profiling._passes(*asked) == ("by the host", asked)
    gpu = torch.device("cuda")
    monkeypatch.setattr(device_stack, "device", gpu)
    assert profiling._passes(*asked) == ("recorded", (*asked, ("graphs of", gpu)))
    assert profiling._passes(device_stack, None, *asked[2:])[0] == "by the host"  # looked up there
    monkeypatch.setattr(PackedStack, "why_no_choice", "the model divides its logits")
    assert profiling._passes(*asked) == ("by the host", asked)
    general = DecoderStack(make_model())
    monkeypatch.setattr(general, "device", gpu)
    assert profiling._passes(general, *asked[1:])[0] == "by the host"


def test_drafts_are_timed_after_a_verify_pass_which_took_their_weights_from_the_caches(
    stack, machine, monkeypatch
):
    timed, timing = [], bare_passes.Passes.timing
    monkeypatch.setattr(
        bare_passes.Passes, "timing", lambda self, point: timed.append(point) or timing(self, point)
    )
    measure_cost(stack, PLAN)
    places = [i for i, point in enumerate(timed) if point == bare_passes.BEHIND]
    assert places
    assert all(timed[i - 1] == bare_passes.DRAFT for i in places)
    timed = [point for point in timed if point != bare_passes.BEHIND]
    # One comes after the verify pass, as in a round.
    tokens = (*bare_passes.KINDS, *bare_passes.DRAFTED)
    sweeps = pairwise([p for p in timed if p[0] not in tokens][-10 * len(set(timed)) :])
    before = [(a[0].partition(" ")[0], b) for a, b in sweeps if b[0].startswith("draft")]
    assert {kind for kind, _ in before} == {"verify"}
    assert {b for _, b in before} == {p for p in timed if p[0].startswith("draft")}
    order = [b for _, b in before if b[1] <= profiling.LARGE_ROWS]
    sweep = len(set(order))
    assert order[:sweep] != order[sweep : 2 * sweep], "the order is the same in every sweep"


@pytest.mark.parametrize("quick", [True, False])
def test_what_the_first_draft_of_a_round_takes_more_is_told_apart(stack, machine, quick):
    more = 4e-4  # after a pass of all layers, which took its weights from the caches
    machine.delay = lambda: more if [p[0] for p in machine.passes[-2:]] == [NUM_LAYERS, 2] else 0.0
    table = measure_cost(stack, PLAN, quick=quick)
    assert table.draft_start == pytest.approx(more)
    late = len(PLAN.layers) * layer_seconds(1, 0) + HEAD + DRAWN * SAMPLE
    assert table.drafting(7, 1, 0) == pytest.approx(more + 7 * late)


def test_what_else_the_machine_does_is_not_in_the_table(stack, machine):
    calm = measure_cost(stack, PLAN)
    # Of twenty draws one delays most timings of a large pass, which has ten: 0 is such a one.
    draw = random.Random(1)
    machine.delay = lambda: 0.005 if draw.random() < 0.3 else 0.0  # and time for all sweeps
    machine.picked = set()
    noisy = measure_cost(stack, PLAN)
    for rows in calm.verify.rows:
        assert noisy.verify_pass(rows, 100) == pytest.approx(calm.verify_pass(rows, 100))


def test_passes_that_are_interrupted_are_timed_by_the_thread_s_own_clock(stack, machine, caplog):
    """Long passes always, drafts never: what the time that goes by says is wrong."""
    measure_cost(stack, PLAN)
    assert caplog.text == ""
    machine.picked = set()
    machine.interruption = lambda: 0.06 if machine.passes[-1][0] == NUM_LAYERS else 0.0
    table = measure_cost(stack, PLAN)
    assert table.verify.at(1, 0) == pytest.approx(NUM_LAYERS * layer_seconds(1, 0) + HEAD)
    assert "the machine was busy: passes had a processor for" in caplog.text


def test_a_thread_that_only_waits_has_no_clock_to_go_by():
    processor, gpu = (SimpleNamespace(device=torch.device(name)) for name in ("cpu", "cuda"))
    assert profiling._clock(processor, [(2.0, 0.5), (1.0, 0.99)]) == 1
    assert profiling._clock(processor, [(2.0, 0.5), (1.0, 0.6)]) == 0
    assert profiling._clock(gpu, [(1.0, 1.0)]) == 0


@pytest.mark.parametrize("quick", [True, False])
def test_a_machine_that_becomes_slow_is_not_waited_for(stack, machine, quick):
    machine.interruption = lambda: 0.0 if len(machine.passes) < 20 else 1.0
    table = measure_cost(stack, PLAN, quick=quick)
    assert machine.now < (12.0 if quick else 20.0)
    assert table.verify.contexts == (0,)
    assert table.verify.at(1, 0) == pytest.approx(NUM_LAYERS * layer_seconds(1, 0) + HEAD)


def test_passes_that_were_run_once_count_if_time_is_up(stack, machine):
    machine.interruption = lambda: 0.0 if len(machine.passes) < 160 else 1.0
    table = measure_cost(stack, PLAN)
    assert machine.now < 20.0
    assert len(table.verify.rows) == 7
    for rows in (1, 64):
        expected = NUM_LAYERS * layer_seconds(rows, 512) + HEAD
        assert table.verify.at(rows, 512) == pytest.approx(expected)


@pytest.mark.parametrize("speed", [0.01, 1.0, 10.0, 100.0, 300.0])
def test_measuring_ends_in_time_whatever_a_pass_takes(stack, machine, speed):
    """From 0.06 ms to 2 s for a plain pass."""
    machine.speed = speed
    table = measure_cost(stack, PLAN)
    assert machine.now < 20.0
    assert table.verify_pass(1, 0) == pytest.approx(
        speed * (NUM_LAYERS * layer_seconds(1, 0) + HEAD + SAMPLE)
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_machine_that_is_faster_and_slower_by_turns_leaves_the_ratios_alone(stack, machine, seed):
    calm, draw = measure_cost(stack, PLAN), random.Random(seed)
    paces = [draw.uniform(1.0, 1.6) for _ in range(40)]  # of each second
    machine.now, machine.picked, machine.pace = 0.0, set(), lambda now: paces[int(now)]
    restless = measure_cost(stack, PLAN)
    for table in (calm, restless):
        assert table.verify.rows == calm.verify.rows

    def ratios(table):
        passes = [table.verify_pass(rows, 100) for rows in (2, 4, 8, 16)]
        return [t / table.verify_pass(1, 100) for t in (*passes, table.draft_pass(1, 100))]

    assert ratios(restless) == pytest.approx(ratios(calm), rel=0.02)


def test_what_decides_is_timed_side_by_side(stack, machine, monkeypatch):
    """A verify pass and a plain one, so that a machine which becomes slower changes neither's price
    beside the other, and as often as there is time for; no pass is led in that needs none."""
    timed, timing = [], bare_passes.Passes.timing
    monkeypatch.setattr(
        bare_passes.Passes, "timing", lambda self, point: timed.append(point) or timing(self, point)
    )
    measure_cost(stack, PLAN, quick=True)
    tokens = (*bare_passes.KINDS, *bare_passes.DRAFTED)
    begun = max(i for i, (kind, *_) in enumerate(timed) if kind.removesuffix(" judging") in tokens)
    verify = [p for p in timed[begun:] if p[0].startswith("verify")]
    start = verify.index(("verify", 8, 0), len(verify) % 2)
    longer, plain = verify[start::2], verify[start + 1 :: 2]
    assert {rows for _, rows, _ in plain} == {1}
    assert all(a[2] == b[2] for a, b in zip(longer, plain, strict=True))
    assert len(plain) == profiling.QUICK_ROUNDS == 11
    seldom = {("verify", 8, 512): 2, ("verify sequences", 8, 0): 2, ("verify", 32, 0): 1}
    assert Counter(longer) == {("verify", 8, 0): 6} | seldom  # beside the first sweep's
    # A plain pass is what the verify pass left behind: none is run only to lead it in.
    full = [p for p in machine.passes if p[0] == NUM_LAYERS]
    assert [p[1] for p in full[-2:]] == [8, 1]


def test_a_quick_table_of_a_restless_machine_prices_a_second_token(stack, machine):
    """Passes take up to 1.4 times as long for 40 ms each. A second token that is thought to cost
    nothing is drafted at a loss, and nothing is charged for it: with five sweeps in a random order
    its price was off by 0.08 of a plain pass (standard deviation)."""
    machine.speed, errors = 1.6, []
    calm = measure_cost(stack, PLAN, quick=True)
    for seed in range(12):
        draw = random.Random(seed)
        paces = [draw.uniform(1.0, 1.4) for _ in range(100)]
        machine.now, machine.picked = 0.0, set()
        machine.pace = lambda now, paces=paces: paces[int(now / 0.04)]
        found = measure_cost(stack, PLAN, quick=True)
        now, truly = (t.verify_pass(2, 0) / t.verify_pass(1, 0) for t in (found, calm))
        errors.append(now - truly)
    assert math.sqrt(sum(e * e for e in errors) / len(errors)) < 0.03


def test_a_quick_table_has_more_than_one_timing_of_what_decides(stack, machine):
    calm = measure_cost(stack, PLAN, quick=True)
    draw = random.Random(0)
    machine.delay = lambda: 0.005 if draw.random() < 0.2 else 0.0
    machine.picked = set()
    noisy = measure_cost(stack, PLAN, quick=True)
    for rows in (1, 8):
        assert noisy.verify_pass(rows, 0) == pytest.approx(calm.verify_pass(rows, 0))
    assert noisy.draft_pass(1, 0) == pytest.approx(calm.draft_pass(1, 0))
    others = [(t.verify, t.draft_layers) for t in (noisy, calm)]
    assert others[0] != others[1]  # they have one


@pytest.mark.parametrize("first", [0.1, 0.6])
def test_a_first_sweep_that_takes_all_the_time_is_not_the_only_one(stack, machine, first):
    """Prices of one timing each are off by a quarter, and nothing may be drafted for long then."""
    waited = iter([first])  # as where thousands of positions are proven, on a busy machine
    machine.interruption = lambda: next(waited, 0.0)
    measure_cost(stack, PLAN, quick=True)
    plain = [p for p in machine.passes if p == (NUM_LAYERS, 1, 0, 1)]
    assert len(plain) >= 2 * (1 + 5)  # each after another one
    assert machine.now < first + 0.5


@pytest.mark.parametrize(("speed", "seconds"), [(0.1, 0.5), (1.0, 0.5), (10.0, 2.0)])
def test_a_quick_table_takes_no_longer(stack, machine, speed, seconds):
    machine.speed = speed
    table = measure_cost(stack, PLAN, quick=True)
    assert machine.now < seconds
    assert table.verify.contexts == (0, 512) if speed <= 1 else (0,)
    for rows in (1, 8):
        assert table.verify_pass(rows, 0) == pytest.approx(
            speed * (NUM_LAYERS * layer_seconds(rows, 0) + HEAD + judged(rows))
        )


def test_a_quick_table_is_done_when_its_time_is_up(stack, machine):
    measure_cost(stack, PLAN, quick=True)
    freely = machine.now
    machine.now, machine.picked = 0.0, set()
    measure_cost(stack, PLAN, quick=True, seconds=freely - 0.2)
    assert machine.now < freely - 0.15


def test_a_quick_table_draws_no_line_between_one_row_and_a_quantum(stack, machine):
    """An error of either would be a price of each token of a draft."""
    table = measure_cost(stack, PLAN, quick=True)
    assert table.tiles == (1,)
    at = [table.verify_pass(n, 0) - judged(n) for n in (1, 2, 5, 8, 9)]
    assert at[0] < 0.9 * at[3] < at[3] < 0.9 * at[4]
    assert at[1:4] == pytest.approx([at[3]] * 3)


def test_a_quick_table_of_a_small_model_knows_half_a_tile(stack, machine):
    """It measures the passes that decide, and has the rest from a whole tile."""
    machine.speed = 0.5
    table = measure_cost(stack, PLAN, quick=True)
    assert machine.now < 0.5
    assert (table.verify.rows, table.tiles) == ((1, 4, 8, 32, 64), (1, 4))
    at = [table.verify_pass(n, 0) - 0.5 * judged(n) for n in (1, 2, 4, 5, 8, 9)]
    assert at[0] < 0.95 * at[2] < at[2] < 0.95 * at[4] < at[4] < 0.9 * at[5]
    assert at[1] == pytest.approx(at[2])
    assert at[3] == pytest.approx(at[4])
    half = [p for p in machine.passes if p[1] == 4]
    assert {(layers, context) for layers, _, context, *_ in half} == {
        (NUM_LAYERS, 0),
        (NUM_LAYERS, 512),
    }
    assert table.verify.contexts == (0, 512)
    # What eight rows take at a long context is not what four do.
    grown = [table.verify_pass(rows, 512) - table.verify_pass(rows, 0) for rows in (4, 8)]
    truly = [NUM_LAYERS * (layer_seconds(r, 512) - layer_seconds(r, 0)) for r in (4, 8)]
    assert grown == pytest.approx([0.5 * seconds for seconds in truly])
    assert grown[0] < 0.6 * grown[1]
    assert table.draft_layers.at(4, 100) == table.draft_layers.at(8, 100)
    assert table.draft_head.at(4, 0) == table.draft_head.at(8, 0)


@pytest.mark.parametrize("speed", [0.5, 1.0])
def test_drafts_that_a_quick_table_does_not_run_are_reckoned_from_full_passes(
    stack, machine, speed
):
    """Of many rows, and at a long context: they are a share of the layers."""
    machine.speed = speed
    table = measure_cost(stack, PLAN, quick=True)
    drafts = [p for p in machine.passes if p[0] == len(PLAN.layers)]
    assert {(rows, context) for _, rows, context, *_ in drafts} <= {(1, 0), (8, 0), (1, 512)}
    for rows, context in ((1, 0), (8, 0), (32, 0), (1, 512), (8, 512), (32, 512)):
        expected = speed * len(PLAN.layers) * layer_seconds(rows, context)
        assert table.draft_layers.at(rows, context) == pytest.approx(expected), (rows, context)


def test_long_passes_of_few_rows_are_timed_again_if_there_is_time(stack, machine):
    """A batch's table is made of what one row takes there, as often as it has rows."""

    def timed(speed: float, rows: int) -> int:
        machine.speed, machine.now, machine.picked = speed, 0.0, set()
        machine.passes.clear()
        measure_cost(stack, PLAN, quick=True)
        return machine.passes.count((NUM_LAYERS, rows, 512, 1))

    for rows in (1, 8):
        quickly, slowly = timed(0.1, rows), timed(1.0, rows)
        assert quickly >= slowly + 5, rows


def test_fewer_rows_attend_no_longer(stack, machine):
    """A long pass that was disturbed does not make a batch's passes dear, row by row."""
    calm = measure_cost(stack, PLAN, quick=True)
    machine.now, machine.picked = 0.0, set()
    # Each timing of the longest passes of one row, and none of those of more.
    machine.delay = lambda: 0.01 if machine.passes[-1][1:3] == (1, 512) else 0.0
    found = measure_cost(stack, PLAN, quick=True)
    one, eight = (found.verify.at(r, 512) - found.verify.at(r, 0) for r in (1, 8))
    assert one <= 1.001 * eight
    more = [t.verify_pass(8, 512) - t.verify_pass(8, 0) for t in (found, calm)]
    assert more[0] == pytest.approx(more[1], rel=0.05)


def test_a_quick_table_of_a_huge_model_is_a_handful_of_passes(stack, machine):
    machine.speed = 1000.0  # 6 s for a plain pass
    measure_cost(stack, PLAN, quick=True)
    full = [p for p in machine.passes if p[0] == NUM_LAYERS]
    assert len(full) == 5  # three of one row, then one of one row and one of eight
    assert len(machine.passes) - len(full) == 2  # drafts of the same sizes


def test_without_a_plan_drafts_are_free_and_not_measured(stack, machine):
    table = measure_cost(stack, None, quick=True)
    assert {p[0] for p in machine.passes} == {NUM_LAYERS}
    assert table.draft_pass(8, 100) == pytest.approx(SAMPLE)
    assert table.verify_pass(8, 0) > 6 * LAYER


def test_a_draft_s_own_head_is_what_is_measured(stack, machine):
    def head(hidden: torch.Tensor) -> torch.Tensor:
        machine.work(0.04)
        return torch.zeros(len(hidden), 3)

    table = measure_cost(stack, PLAN, draft_vocabulary=[1, 5, 9], head=head)
    assert table.draft_head.at(8, 0) == pytest.approx(0.04)
    assert table.draft_layers.at(8, 0) == pytest.approx(2 * layer_seconds(8, 0))
    assert table.verify.at(8, 0) == pytest.approx(6 * layer_seconds(8, 0) + HEAD)
    assert str(table.key["draft_vocabulary"]).startswith("3 ids, ")


def test_progress_grows_to_the_end(stack, machine):
    shares: list[float] = []
    measure_cost(stack, PLAN, on_progress=shares.append)
    assert shares == sorted(shares)
    assert shares[0] < 0.1
    assert 0.9 < shares[-1] <= 1.0


def test_a_quick_table_is_of_small_passes_where_each_token_costs_as_much(
    stack, machine, monkeypatch
):
    assert measure_cost(stack, PLAN, quick=True).verify.rows == (1, 8, 32, 64)
    monkeypatch.setattr(stack, "exactness", replace(PADDED, product_rows=1))
    machine.picked = set()
    assert measure_cost(stack, PLAN, quick=True).verify.rows == (1, 8, 16)


def test_the_largest_pass_of_a_quick_table_is_reckoned_on_a_processor(stack, machine):
    """It would take too long. A line through the last two that are run has it too cheap."""
    table = measure_cost(stack, PLAN, quick=True)
    assert max(rows for _, rows, _, _ in machine.passes) == 32
    for context in (0, 512):
        assert table.verify.at(64, context) == pytest.approx(1.75 * table.verify.at(32, context))
    assert table.draft_pass(64, 0) < table.verify_pass(64, 0)
    assert table.draft_pass(48, 0) > table.draft_pass(32, 0)


def test_the_largest_pass_of_a_quick_table_is_run_on_a_gpu(stack, monkeypatch):
    """It reads weights once, whatever the rows: what it takes more for 64 of them is its own, and
    so is what it takes more for one beyond 32."""
    monkeypatch.setattr(stack, "exactness", SWITCHED_OFF)
    monkeypatch.setattr(stack, "device", torch.device("cuda"))
    for grid in bare_passes.grids(stack, quick=True)[:-1]:
        assert grid.rows == (1, 8, 32, 33, 64)
        for rows in (33, 64):
            assert ("verify", rows, 0) in grid.points(drafts=True, sequences=True)
    assert {32, 33, 64} < set(bare_passes.grids(stack, quick=False)[0].rows)
    monkeypatch.setattr(stack, "device", torch.device("cpu"))
    for quick in (True, False):
        assert 33 not in bare_passes.grids(stack, quick=quick)[0].rows


def test_passes_of_one_row_each_are_measured_as_such(stack, machine, monkeypatch):
    """Where nothing is padded, and where rows run one by one: no rows are rounded up."""
    for exactness, larger in ((SWITCHED_OFF, (32, 64)), (replace(PADDED, holds=False), (16,))):
        monkeypatch.setattr(stack, "exactness", exactness)
        machine.picked = set()
        table = measure_cost(stack, PLAN, quick=True)
        assert (table.row_quantum, table.tiles) == (1, ())
        assert table.verify.rows == (1, 8, *larger)


def test_passes_without_spare_rows_are_padded_beyond_a_tile(stack, machine, monkeypatch):
    monkeypatch.setattr(stack, "exactness", replace(PADDED, row_quantum=8, fewest=1))
    table = measure_cost(stack, PLAN)
    assert (table.row_quantum, table.large_quantum, table.tiles) == (1, 8, ())
    assert table.verify.rows[:5] == (1, 2, 4, 8, 16)
    assert table.attending(8) == table.attending(1)  # what grows is products, shared by sequences
    eight, nine, sixteen = (table.verify_pass(n, 0) for n in (8, 9, 16))
    assert sixteen - nine == pytest.approx(7 * JUDGE)  # all else is of as many rows
    assert nine - eight > 2 * JUDGE
    assert CostTable.from_dict(table.to_dict()) == table


@pytest.mark.parametrize(
    ("quick", "speed", "sizes"),
    [
        (True, 0.5, {1, 4, 5, 6, 8}),  # of a small model, for more of which there is time
        (True, 0.65, {1, 6, 8}),  # what a row takes alone three others take nothing more of
        (True, 1.0, {1, 8}),
        (False, 1.0, {1, 2, 4, 5, 6, 8}),
    ],
)
def test_passes_that_hold_four_rows_at_least(stack, machine, monkeypatch, quick, speed, sizes):
    """Attention of five positions is that of eight: no price lies between those of four and five
    where there is time to measure both."""
    monkeypatch.setattr(stack, "exactness", replace(PADDED, row_quantum=4, fewest=4))
    machine.speed = speed
    table = measure_cost(stack, PLAN, quick=quick)
    assert (table.row_quantum, table.large_quantum) == (4, 4)
    assert table.verify_tiles == ()  # nobody would read them
    assert {r for r in table.verify.rows if r <= 8} == {*sizes, 4}
    passes = {rows for layers, rows, *_ in machine.passes if layers == NUM_LAYERS}
    assert {r for r in passes if r <= 8} == sizes
    assert (table.draft_pass(1, 0) == table.draft_pass(4, 0)) == (4 not in sizes)
    finest, next_finest, *_ = bare_passes.grids(stack, quick=True)
    assert finest.rows == (1, 4, 5, 6, 8, 32, 64)
    assert next_finest.rows == (1, 4, 6, 8, 32, 64)
    three, four, five, eight, nine, twelve, sixteen = (
        table.verify_pass(n, 0) / speed for n in (3, 4, 5, 8, 9, 12, 16)
    )
    assert four - three == pytest.approx(JUDGE)
    assert five - four > 1.5 * JUDGE
    assert nine - eight > 2 * JUDGE
    assert twelve - nine == pytest.approx(3 * JUDGE)
    assert sixteen - twelve > 5 * JUDGE


def test_a_real_measurement_leaves_the_model_as_it_was(quick, toy):
    stack, table = quick
    assert mismatch(table, stack, PLAN) is None
    assert table.draft_pass(1, 100) > 0.0
    assert table.verify.at(1, 100) > 0.0
    assert CostTable.from_dict(table.to_dict()) == table
    assert fingerprint(stack.twin) == fingerprint(DecoderStack(toy()).twin)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("positions", [2, 15])
def test_models_of_few_positions_are_measured_too(exact, positions):
    model = make_model()
    model.config.max_position_embeddings = positions
    stack = DecoderStack(model, exact=exact)
    for grid in (g for quick in (True, False) for g in bare_passes.grids(stack, quick=quick)):
        passes = bare_passes.Passes(stack, PLAN, None, (max(grid.rows), max(grid.contexts)))
        points = grid.points(drafts=True, sequences=True)
        with torch.inference_mode():
            sweep = {p: passes.timing(p) for p in bare_passes.shuffled(points, random.Random(0))}
        table = profiling._table(stack, {}, grid, [sweep], share=0.5)
        assert table.verify.rows[0] == 1
        assert max(table.verify.rows) + max(table.verify.contexts) <= positions


def test_contexts_fit_the_model_and_memory_and_begin_a_block(stack, monkeypatch):
    monkeypatch.setattr(stack, "exactness", PADDED)
    for limit in (1, 20, 100, 600):
        monkeypatch.setattr(stack, "max_positions", limit)
        for grid in bare_passes.grids(stack, quick=False):
            assert max(grid.rows) + max(grid.contexts) <= limit
            assert grid.rows[0] == 1
    monkeypatch.setattr(stack, "max_positions", 10**6)
    assert bare_passes.grids(stack, quick=False)[0].contexts == (0, 512, 1920, 3968)
    monkeypatch.setattr(bare_passes, "MAX_CACHE_BYTES", 1000 * stack.kv_bytes_per_token)
    assert bare_passes.grids(stack, quick=False)[0].contexts[-1] == 896


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("fingerprint", "0" * 16, "of another checkpoint (0000000000000000, now "),
        ("device", "abacus", "on another device (abacus, now "),
        ("dtype", "bfloat16", "in another dtype (bfloat16, now float32)"),
        ("threads", 99, "with another number of threads (99, now "),
        ("torch", "1.0", "with another torch (1.0, now "),
        ("transformers", "1.0", "with another transformers (1.0, now "),
        ("layerskip", "0.0", "with another layerskip (0.0, now "),
        ("draft_layers", "0", "with other draft layers (0, now 0,1)"),
        ("draft_vocabulary", "3 ids", "with another draft vocabulary (3 ids, now all)"),
        ("exact", False, "with exact set otherwise (False, now True)"),
        ("row_quantum", 64, "with passes padded to another number of rows (64, now "),
        ("passes", "recorded", "with passes started otherwise (recorded, now started by the host)"),
    ],
)
def test_a_table_of_something_else_is_told(quick, name, value, words):
    stack, table = quick
    other = replace(table, key=dict(table.key) | {name: value})
    sentence = mismatch(other, stack, PLAN)
    assert sentence is not None
    assert sentence.startswith(f"the cost table was measured {words}")


def test_passes_one_by_one_and_as_they_come_have_tables_of_their_own(toy, monkeypatch):
    """Neither is padded: all else of their keys is the same."""
    monkeypatch.setattr("layerskip.exactness.emulates", lambda *_: True)
    free, exact = (DecoderStack(toy(), exact=exact) for exact in (False, True))
    tables = [measure_cost(stack, PLAN, quick=True) for stack in (free, exact)]
    assert [t.row_quantum for t in tables] == [1, 1]
    assert "(False, now True)" in str(mismatch(tables[0], exact, PLAN))
    assert "(True, now False)" in str(mismatch(tables[1], free, PLAN))
    assert [mismatch(t, s, PLAN) for t, s in zip(tables, (free, exact), strict=True)] == [None] * 2


def test_a_table_of_a_gpu_says_that_its_passes_were_recorded(device_stack, quick, monkeypatch):
    _, table = quick
    monkeypatch.setattr(PackedStack, "runs_rounds", True)
    key = cost_key(device_stack, PLAN)
    assert key["passes"] == "recorded"
    assert cost_key(device_stack, None)["passes"] == "started by the host"
    by_host = key | {"passes": "started by the host"}
    assert mismatch(replace(table, key=key), device_stack, PLAN) is None
    assert "(started by the host, now recorded)" in mismatch(
        replace(table, key=by_host), device_stack, PLAN
    )


def test_another_plan_and_another_vocabulary_are_told(quick):
    stack, table = quick
    assert "other draft layers (0,1, now none)" in str(mismatch(table, stack, None))
    assert "draft layers (0,1, now 1,3)" in str(mismatch(table, stack, PLANS["without-layer-0"]))
    trimmed = replace(table, key=cost_key(stack, PLAN, (1, 2)))
    assert mismatch(trimmed, stack, PLAN, (1, 2)) is None
    assert "draft vocabulary (2 ids, " in str(mismatch(trimmed, stack, PLAN, (1, 3)))
    assert mismatch(replace(table, key={}), stack, PLAN) is not None


def test_a_saved_table_that_fits_is_used(quick, monkeypatch, caplog):
    stack, table = quick
    monkeypatch.setattr(profiling, "measure_cost", lambda *_, **__: pytest.fail("measured"))
    assert fitting_cost(stack, PLAN, table) is table
    assert caplog.text == ""


def test_a_saved_table_that_does_not_fit_is_replaced_and_said(quick, monkeypatch, caplog):
    stack, table = quick
    saved, asked = replace(table, key=dict(table.key) | {"threads": 99}), {}
    monkeypatch.setattr(
        profiling, "measure_cost", lambda *args, **settings: asked.update(settings) or table
    )
    assert fitting_cost(stack, PLAN, saved, draft_vocabulary=None) is table
    assert asked["quick"]
    assert "with another number of threads (99, now" in caplog.text
    assert caplog.messages[-1].endswith(": a quick measurement is used; run layerskip search again")
    caplog.clear()
    assert fitting_cost(stack, PLAN) is table
    assert caplog.text == ""


def test_a_plan_of_another_checkpoint_is_said(quick, caplog):
    stack = quick[0]
    for known in (None, fingerprint(stack.twin)):
        warn_of_another_checkpoint(PlanFile(PLAN, fingerprint=known), stack)
    assert caplog.text == ""
    warn_of_another_checkpoint(PlanFile(PLAN, fingerprint="abc"), stack)
    assert "the plan was chosen on another checkpoint (fingerprint abc, this one" in caplog.text


def test_a_fingerprint_is_of_the_values_alone():
    model = make_model(dtype="bfloat16")
    same = make_model(dtype="bfloat16")
    assert fingerprint(DecoderStack(model).twin) == fingerprint(DecoderStack(same).twin)
    with torch.no_grad():  # numbers that float16 rounds
        model.model.embed_tokens.weight[:, :32] *= 1e-6
    expected = fingerprint(DecoderStack(model).twin)
    for dtype in (torch.float32, torch.float16):
        cast = copy.deepcopy(model).to(dtype)
        cast.config.dtype = dtype
        assert fingerprint(DecoderStack(cast).twin) == expected
    pack_model(model)
    assert fingerprint(DecoderStack(model).twin) == expected


def test_a_fingerprint_moves_with_every_weight_and_the_config():
    model = make_model(dtype="bfloat16")
    seen = {fingerprint(DecoderStack(model).twin)}
    names = ("model.embed_tokens", "model.layers.5.mlp.down_proj", "model.norm", "lm_head")
    for name in names:
        with torch.no_grad():
            model.get_submodule(name).weight.mul_(1.01)
        seen.add(fingerprint(DecoderStack(model).twin))
    assert len(seen) == 1 + len(names)
    seen.add(fingerprint(DecoderStack(make_model(dtype="bfloat16", rms_norm_eps=1e-4)).twin))
    assert len(seen) == 2 + len(names)


def test_a_step_of_training_moves_the_fingerprint():
    model = make_model()
    before = fingerprint(DecoderStack(model).twin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.arange(2, 40)[None]
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    assert fingerprint(DecoderStack(model.eval()).twin) != before


def test_what_proves_a_number_of_rows_is_no_time_of_theirs():
    """Where time leaves one pass of a kind, it must not be the one that is proven."""

    class Proving:
        def __init__(self) -> None:
            self.met: set[int] = set()

        def timing(self, point):
            seconds = 1.0 if point[1] in self.met else 100.0
            self.met.add(point[1])
            return seconds, seconds

    points = [("verify", 1, 0), ("verify", 16, 0), ("verify", 16, 900), ("draft", 16, 0)]
    found = profiling._warmed(Proving(), points, math.inf)
    assert found == dict.fromkeys(points, (1.0, 1.0))
    assert profiling._warmed(Proving(), points, -math.inf) == {}
