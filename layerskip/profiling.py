"""Measure what passes take: bare, interleaved, and in a bounded time whatever the model's size."""

import logging
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerskip.cache import Segment
from layerskip.cost import CostTable, Curve
from layerskip.draft_head import DraftHead
from layerskip.exactness import MAX_PASS_ROWS
from layerskip.fingerprint import cost_key, fingerprint, mismatch, row_quantum
from layerskip.model import DecoderStack
from layerskip.params import SamplingParams, check_number
from layerskip.plan import DraftPlan, PlanFile
from layerskip.sampling import Sampler

logger = logging.getLogger(__name__)

QUICK_SECONDS, QUICK_MOST = 0.45, 1.5  # in all, and for the first sweeps of a slow model
MAX_SWEEPS, QUICK_SWEEPS = 40, 5  # at least, of what decides, of a quick table if time allows
LARGE_EVERY = 4  # sweeps: passes of many rows are rarely run, and take long to measure
LARGE_ROWS, DECIDING_ROWS = 16, 8  # are those of more rows; most of a round that decides
MAX_CONTEXT, QUICK_CONTEXT = 4096, 1024
MAX_CACHE_BYTES = 2**29
NUM_SEQUENCES = 8
DRAFTS_IN_A_ROW = 4  # as in a round: those after the first find their weights in the caches
JUDGED = 8  # tokens of one sequence
KINDS = ("sampling", "greedy")  # of sampling
DRAFTED = tuple(f"{kind} drafting" for kind in KINDS)
RESERVE = 0.85  # of the time, for passes; the rest is for what comes before and after them
UNDISTURBED, BUSY = 0.95, 0.7
PLAIN = ("verify", 1, 0)
FREE = Curve((1,), (0,), ((0.0,),))

Point = tuple[str, int, int]  # kind of pass, rows, context
Timing = tuple[float, float]  # seconds that went by, and that this thread was at work
Sweep = Mapping[Point, Timing]


@dataclass(frozen=True)
class Grid:
    """What is measured: sizes of passes, and slots that they attend to."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]

    def points(self, *, drafts: bool, sequences: bool) -> list[Point]:
        """Every pass of a sweep."""
        kinds = ("verify", "draft") if drafts else ("verify",)
        points = [(kind, r, c) for kind in kinds for r in self.rows for c in self.contexts]
        if drafts:
            points += [("head", r, 0) for r in self.rows]
        if sequences:
            points += [(f"{kind} sequences", NUM_SEQUENCES, 0) for kind in kinds]
            points += [(kind, NUM_SEQUENCES, 0) for kind in kinds]
        sampled = [*KINDS, *(f"{kind} judging" for kind in KINDS), *(DRAFTED if drafts else ())]
        return list(dict.fromkeys([*points, *((kind, 1, 0) for kind in sampled)]))


def grids(stack: DecoderStack, *, quick: bool) -> list[Grid]:
    """Grids to choose from, the finest first; the last one is what a table can't do without."""
    quantum = row_quantum(stack)
    most = max(1, min(MAX_PASS_ROWS, stack.max_positions // 2))
    few, all_rows = max(quantum, 8), {t for t in stack.exactness.tiles if t < quantum}
    all_rows |= {quantum * 2**i for i in range(7)} | {1}
    fine = tuple(sorted(r for r in all_rows if r <= most))
    exactness = stack.exactness
    one_by_one = exactness.by_token or (exactness.wanted and not exactness.holds)
    # Three points, the last one far out: what lies beyond is a line through the last two.
    coarse = tuple(r for r in (1, few, (2 if one_by_one else 4) * few) if r <= most)
    longest = QUICK_CONTEXT if quick else MAX_CONTEXT
    fitting = MAX_CACHE_BYTES // stack.kv_bytes_per_token
    top = max(0, min(stack.max_positions, longest, fitting) - max(fine))
    block = stack.exactness.slot_block
    wanted = [0, top // 2, top] + ([512] if top >= 2048 else [])
    contexts = tuple(sorted({c // block * block for c in wanted}))
    ends = tuple(sorted({0, contexts[-1]}))
    in_steps = exactness.wanted and not exactness.holds
    full = [Grid(coarse if in_steps else fine, contexts)] if not quick else []
    return [*full, Grid(coarse, ends), Grid(coarse[:2], (0,))]


class Passes:
    """The passes of one decoder, bare, each timed by itself.

    Args:
        stack: runs them.
        plan: layers of a draft pass; the stack's adapter runs after them.
        head: over the draft vocabulary; None: the model's own.
        largest: rows and context of the largest pass.
    """

    def __init__(
        self,
        stack: DecoderStack,
        plan: DraftPlan | None,
        head: DraftHead | None,
        largest: tuple[int, int],
    ) -> None:
        self.stack = stack
        self.head = stack.logits if plan is None else stack.draft_head(plan, head)
        self.draft_layers = stack.draft_layers(plan) if plan is not None else ()
        self.drafts_in_a_row, self.led_in = DRAFTS_IN_A_ROW, True
        self.cache = stack.new_cache(num_rows=1, num_slots=sum(largest))
        self.many = stack.new_cache(num_rows=NUM_SEQUENCES, num_slots=NUM_SEQUENCES)
        self.samplers = {
            kind: Sampler(SamplingParams(temperature=temperature), 0, stack.vocab_size)
            for kind, temperature in zip(KINDS, (1.0, 0.0), strict=True)
        }
        draw = random.Random(0)
        self.ids = [draw.randrange(stack.vocab_size) for _ in range(MAX_PASS_ROWS)]
        self.logits = stack.logits(stack.embed(self.ids[:1]))[:1].expand(JUDGED, -1)
        self.drawn = JUDGED

    def timing(self, point: Point) -> Timing:
        """One timing of one pass.

        A verify pass is run after what it follows in decoding, as that leaves some weights in the
        processor's caches: plain passes follow each other, others a draft. What drafts and sampled
        tokens follow, ``_shuffled`` sees to.
        """
        kind, rows, context = point
        kind, _, of = kind.partition(" ")
        segments = [Segment(0, context, rows)]
        if of == "sequences":
            segments = [Segment(i, 0, 1) for i in range(rows)]
        if kind == "verify":
            if self.led_in:
                alone = [Segment(0, context, 1)]
                drafts = bool(self.draft_layers) and rows > 1
                (self._draft if drafts else self._verify)(1, alone)
            return self._timed(lambda: self._verify(rows, segments))
        if kind == "draft":
            return self._timed(lambda: self._draft(rows, segments), self.drafts_in_a_row)
        if kind == "head":
            hidden = self.stack.embed(self.ids[:rows])
            return self._timed(lambda: self._draft_head(hidden, rows), self.drafts_in_a_row)
        if of == "judging":
            self.samplers[kind].pick(self.logits, 0)  # its noise is made: by a draft, in a round
            return self._timed(lambda: self.samplers[kind].pick(self.logits, 0))
        # In a row drafted ones find about what those between short drafts do: 0.13 ms, and 0.14.
        times = self.drafts_in_a_row if of == "drafting" else 1
        return self._timed(lambda: self._sample(kind), times)

    def _verify(self, rows: int, segments: Sequence[Segment]) -> None:
        stack = self.stack
        cache = self.cache if len(segments) == 1 else self.many
        hidden = stack.embed(self.ids[:rows])
        stack.logits(stack.run_layers(hidden, range(stack.num_layers), cache, segments))

    def _draft(self, rows: int, segments: Sequence[Segment]) -> None:
        cache = self.cache if len(segments) == 1 else self.many
        hidden = self.stack.embed(self.ids[:rows])
        hidden = self.stack.run_layers(hidden, self.draft_layers, cache, segments)
        self._draft_head(hidden, rows)

    def _draft_head(self, hidden: Tensor, rows: int) -> None:
        self.head(hidden)[:rows].float().softmax(-1).amax(-1).tolist()

    def _sample(self, kind: str) -> None:
        self.drawn += 1  # its noise is new
        self.samplers[kind].pick(self.logits[:1], self.drawn)
        self.samplers[kind].forget_before(self.drawn)

    def _timed(self, run: Callable[[], object], times: int = 1) -> Timing:
        self._wait()
        began, worked = time.perf_counter(), time.thread_time()
        for _ in range(times):
            run()
        self._wait()
        return (time.perf_counter() - began) / times, (time.thread_time() - worked) / times

    def _wait(self) -> None:
        if self.stack.device.type == "cuda":
            torch.cuda.synchronize(self.stack.device)


@torch.inference_mode()
def measure_cost(
    stack: DecoderStack,
    plan: DraftPlan | None,
    *,
    draft_vocabulary: Sequence[int] | None = None,
    head: DraftHead | None = None,
    seconds: float = 20.0,
    quick: bool = False,
    on_progress: Callable[[float], None] = lambda share: None,
) -> CostTable:
    """Time bare passes over a grid of rows and contexts, in interleaved sweeps.

    A sweep runs the passes in a new order each time, so that what else the machine does hits all
    alike; on a processor the thread's own clock is read, which stands still while others run.
    Rounds add their own overhead: it counts against predictions made from the table.

    Args:
        stack: the model, on its device, with this thread's number of cores.
        plan: draft layers. None: drafts run no layer and no head and cost nothing, as looked-up
            ones do.
        draft_vocabulary: ids that the draft's head knows, None for all; goes into the key.
        head: the draft's, over its vocabulary; None: the model's own.
        seconds: upper bound, unless the few passes that a table needs at least take longer.
        quick: a coarse table in about half a second, or from a handful of passes.
        on_progress: called with the share done, 0 to 1.

    Returns:
        The table, its key filled in. Times in seconds.

    Raises:
        ValueError: ``seconds`` is less than a millisecond.
    """
    check_number("seconds", seconds, 1e-3, math.inf)
    began = time.perf_counter()
    key = cost_key(stack, plan, draft_vocabulary)
    ends = began + (min(seconds, QUICK_SECONDS) if quick else RESERVE * seconds)
    bearable = min(seconds, QUICK_MOST) if quick else seconds / 2
    latest = began + bearable if quick else ends
    offered = grids(stack, quick=quick)
    largest = max(offered[0].rows), max(offered[0].contexts)
    passes = Passes(stack, plan, head, largest)
    grid, least = _affordable(passes, offered, bearable), offered[-1]
    first, order = dict[Point, Timing](), random.Random(0)
    if grid is not least:
        points = grid.points(drafts=plan is not None, sequences=True)
        first = _warmed(passes, _shuffled(points, order), began + bearable)
        if quick and first:
            points = [p for p in points if _decides(p)]
    if not first:  # of a huge model, or because the machine has become slower
        grid, passes.drafts_in_a_row, passes.led_in = least, 1, False
        points = least.points(drafts=plan is not None, sequences=False)
    sweeps: list[dict[Point, Timing]] = [first]
    for sweep in range(MAX_SWEEPS):
        due = [p for p in points if p[1] <= LARGE_ROWS or sweep % LARGE_EVERY == 0]
        sweeps.append({})
        for point in _shuffled(due, order):
            now = time.perf_counter()
            # One timing each, the plain pass's in a fast moment, made all else 1.7 times as dear.
            if now > (latest if sweep < QUICK_SWEEPS else ends) and (sweep or first):
                break
            on_progress(min(1.0, max((now - began) / (ends - began), sweep / MAX_SWEEPS)))
            sweeps[-1][point] = passes.timing(point)
    _say_if_busy(stack, sweeps, logging.INFO if quick else logging.WARNING)
    return _table(stack, key, grid, sweeps)


def _decides(point: Point) -> bool:
    """Whether its price decides most choices: what a quick table has more than one timing of."""
    kind, rows, context = point
    return context == 0 and rows <= DECIDING_ROWS and kind in ("verify", "draft")


def _shuffled(points: Sequence[Point], order: random.Random) -> list[Point]:
    """In a new order, each after what it follows in a round, which decides what is left in the
    processor's caches: sampled tokens and drafts after a verify pass, drafted tokens after a draft.
    After a verify pass sampling takes twice as long (measured)."""
    mixed = order.sample(points, len(points))
    sampled = [p for p in mixed if p[0] in KINDS]
    drafts = [p for p in mixed if p[0].startswith("draft")]
    drafted = [p for p in mixed if p[0] in DRAFTED]
    following = sampled, drafts, drafted
    found = []
    for point in [p for p in mixed if p not in {*sampled, *drafts, *drafted}]:
        found.append(point)
        if point[0].startswith("verify"):
            found += [due.pop() for due in following if due]
    return found + [p for due in following for p in due]


def _warmed(passes: Passes, points: Sequence[Point], ends: float) -> dict[Point, Timing]:
    """A first sweep. The first pass of so many rows does not count: it proves their bits. Empty if
    not even these are done in time."""
    first: dict[Point, Timing] = {}
    proven: set[int] = set()
    for point in points:
        if time.perf_counter() > ends:
            return {}
        if point[1] not in proven:
            passes.timing(point)
            proven.add(point[1])
        first[point] = passes.timing(point)
    return first


def _affordable(passes: Passes, offered: Sequence[Grid], seconds: float) -> Grid:
    """The finest grid that can be gone over twice, once to warm up; if there is none, the last."""
    passes.led_in = False
    first = passes.timing(PLAIN)[0]
    # More if they are cheap: one slow pass must not make the table of a small model a coarse one.
    once = min(passes.timing(PLAIN)[0] for _ in range(5 if first < seconds / 50 else 2))
    passes.led_in = True
    share = len(passes.draft_layers) / passes.stack.num_layers
    for grid in offered[:-1]:
        rows = sum(1 + r / 16 for r in grid.rows)  # a guess: rows are cheap, but not free
        passes_of_a_point = 1.4 + DRAFTS_IN_A_ROW * share
        if 2 * once * rows * len(grid.contexts) * passes_of_a_point < seconds:
            return grid
    return offered[-1]


def _say_if_busy(stack: DecoderStack, sweeps: Sequence[Sweep], level: int) -> None:
    """Log it if this thread was kept waiting: with several threads that can't be corrected."""
    passed, worked = (sum(t[i] for sweep in sweeps for t in sweep.values()) for i in (0, 1))
    if _has_own_clock(stack) and worked < BUSY * passed:
        logger.log(
            level,
            "the machine was busy: passes had a processor for %.0f %% of their time, and the cost "
            "table may be off; measure again when nothing else runs",
            100 * worked / passed,
        )


def _table(
    stack: DecoderStack, key: dict[str, str | int], grid: Grid, sweeps: Sequence[Sweep]
) -> CostTable:
    clock = _clock(stack, [timing for sweep in sweeps for timing in sweep.values()])
    typical = _typical([{p: timing[clock] for p, timing in sweep.items()} for sweep in sweeps])
    heads = {r: typical.get(("head", r, 0), 0.0) for r in grid.rows}
    drafts = ("draft", grid.rows[0], grid.contexts[0]) in typical

    def curve(kind: str, less: dict[int, float]) -> Curve:
        seconds = tuple(
            tuple(max(0.0, typical[kind, r, c] - less.get(r, 0.0)) for r in grid.rows)
            for c in grid.contexts
        )
        return Curve(grid.rows, grid.contexts, seconds)

    def another(kind: str) -> float:
        together = typical.get((f"{kind} sequences", NUM_SEQUENCES, 0))
        if together is None:
            return 0.0
        apart = together - typical[kind, NUM_SEQUENCES, 0]
        return max(0.0, apart) / (NUM_SEQUENCES - 1)

    quantum = row_quantum(stack)
    # A number of positions that was not measured costs what the next larger one does. A line
    # between two measured ones would turn the error of one into a price of each drafted token.
    tiles = tuple(t for t in stack.exactness.tiles if t < quantum and t in grid.rows)
    return CostTable(
        draft_layers=curve("draft", heads) if drafts else FREE,
        draft_head=Curve(grid.rows, (0,), (tuple(heads.values()),)) if drafts else FREE,
        verify=curve("verify", {}),
        sampling=typical["sampling", 1, 0],
        row_quantum=quantum,
        key=key,
        tiles=tiles,
        draft_sequence=another("draft"),
        verify_sequence=another("verify"),
        pass_rows=MAX_PASS_ROWS if stack.exactness.wanted else 0,
        judging=typical["sampling judging", 1, 0] / JUDGED,
        greedy_sampling=typical["greedy", 1, 0],
        greedy_judging=typical["greedy judging", 1, 0] / JUDGED,
        draft_sampling=typical.get(("sampling drafting", 1, 0)),
        greedy_draft_sampling=typical.get(("greedy drafting", 1, 0)),
        slot_block=stack.exactness.slot_block if stack.exactness.slot_block > 1 else 0,
    )


def _clock(stack: DecoderStack, timings: Sequence[Timing]) -> int:
    """Which of a timing's two clocks to believe: the thread's own on a processor, if a pass keeps
    the thread at work as long as it takes.

    On a busy machine a long pass is interrupted and a short one is not: by the time that went by, a
    draft looked five times as cheap as it is (measured).
    """
    if not _has_own_clock(stack):
        return 0
    return int(max(worked / max(passed, 1e-9) for passed, worked in timings) >= UNDISTURBED)


def _has_own_clock(stack: DecoderStack) -> bool:
    """Whether passes are the work of this thread, and its clock is fine enough: on POSIX it is."""
    return stack.device.type == "cpu" and os.name == "posix"


def _typical(sweeps: Sequence[Mapping[Point, float]]) -> dict[Point, float]:
    """Seconds of each pass, on a machine that is faster and slower by turns.

    What else a machine does makes a pass slower, hardly ever faster: so passes are first held
    against their lower quartiles, which tells each sweep's pace. Then each is the lower third of
    what it took by the pace of its sweep (two steps much like those of a median polish, Tukey
    1977): the ratios of two passes, which decide, scatter a quarter to a half less (bench/LOG.md,
    2026-11-23).
    """
    times: dict[Point, list[float]] = {}
    for sweep in sweeps:
        for point, seconds in sweep.items():
            times.setdefault(point, []).append(seconds)
    usual = {point: sorted(found)[len(found) // 4] for point, found in times.items()}
    paced: dict[Point, list[float]] = {point: [] for point in times}
    for sweep in sweeps:
        ratios = [seconds / usual[p] for p, seconds in sweep.items() if usual[p] > 0.0]
        pace = (statistics.median(ratios) if ratios else 0.0) or 1.0
        for point, seconds in sweep.items():
            paced[point].append(seconds / pace)
    return {point: sorted(found)[len(found) // 3] for point, found in paced.items()}


def fitting_cost(
    stack: DecoderStack,
    plan: DraftPlan | None,
    saved: CostTable | None = None,
    *,
    draft_vocabulary: Sequence[int] | None = None,
    head: DraftHead | None = None,
) -> CostTable:
    """The saved table if it is of this model, plan and machine; else a quick one, with a warning.

    Args:
        saved: from a plan file or ``layerskip profile``; None measures quickly, and silently.
        stack, plan, draft_vocabulary, head: as in ``measure_cost``.
    """
    if saved is not None:
        difference = mismatch(saved, stack, plan, draft_vocabulary)
        if difference is None:
            return saved
        logger.warning("%s: a quick measurement is used; run layerskip profile again", difference)
    return measure_cost(stack, plan, draft_vocabulary=draft_vocabulary, head=head, quick=True)


def warn_of_another_checkpoint(file: PlanFile, stack: DecoderStack) -> None:
    """Log it if a plan was chosen on other weights: it still works, less well perhaps."""
    if file.fingerprint is None:
        return
    own = fingerprint(stack)
    if own != file.fingerprint:
        logger.warning(
            "the plan was chosen on another checkpoint (fingerprint %s, this one has %s); "
            "run layerskip search again",
            file.fingerprint,
            own,
        )
