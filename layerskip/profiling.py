"""Measure what passes take: bare, interleaved, and in a bounded time whatever the model's size."""

import itertools
import logging
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from layerskip.ambient import Decoding
from layerskip.bare_passes import (
    BEHIND,
    DRAFT,
    JUDGED,
    Grid,
    Passes,
    Point,
    Timing,
    grids,
    rounds,
    shuffled,
)
from layerskip.cost import BY_HOST, DRAFTS_IN_A_ROW, NUM_SEQUENCES, CostTable, Curve
from layerskip.draft_head import DraftHead
from layerskip.exactness import MAX_PASS_ROWS
from layerskip.fingerprint import (
    cost_key,
    fingerprint,
    mismatch,
    prices_recorded,
)
from layerskip.graphs import GraphRecorder, RecordingError
from layerskip.model import DecoderStack
from layerskip.packed import PackedStack
from layerskip.params import check_number
from layerskip.plan import DraftPlan, PlanFile
from layerskip.recorded_passes import RecordedPasses

logger = logging.getLogger(__name__)

QUICK_SECONDS, QUICK_MOST = 0.45, 1.5  # in all, and for the first sweeps of a slow model
MAX_SWEEPS, MAX_ROUNDS = 40, 120
# At least, of what decides, of a quick table if time allows. With five sweeps in a random order a
# pass of eight tokens took 1.07 of a plain one, give or take 0.09 (bench/LOG.md, 2026-11-26).
QUICK_ROUNDS = 11
LARGE_EVERY = 4  # sweeps: passes of many rows are rarely run, and take long to measure
LARGE_ROWS = 16  # are those of more rows
RESERVE = 0.85  # of the time, for passes; the rest is for what comes before and after them
SKETCH_SHARE = 0.2  # of the time for a table's first sweeps
UNDISTURBED, BUSY = 0.95, 0.7
MANY = 6  # timings of a sweep; a round has two to four
PLAIN = ("verify", 1, 0)
FREE = Curve((1,), (0,), ((0.0,),))

Sweep = Mapping[Point, Timing]


@Decoding()
def measure_cost(
    stack: DecoderStack,
    plan: DraftPlan | None,
    *,
    draft_vocabulary: Sequence[int] | None = None,
    head: DraftHead | None = None,
    seconds: float = 20.0,
    quick: bool = False,
    by_host: bool = False,
    on_progress: Callable[[float], None] = lambda share: None,
) -> CostTable:
    """Time bare passes over a grid of rows and contexts, in interleaved sweeps.

    A sweep runs the passes in a new order each time, so that what else the machine does hits all
    alike; on a processor the thread's own clock is read, which stands still while others run. Where
    a GPU runs whole rounds by itself, recorded passes are timed, by its own clock.
    Rounds add their own overhead: it counts against predictions made from the table.

    Args:
        stack: the model, on its device, with this thread's number of cores.
        plan: draft layers. None: drafts run no layer and no head and cost nothing, as looked-up
            ones do.
        draft_vocabulary: ids that the draft's head knows, None for all; goes into the key.
        head: the draft's, over its vocabulary; None: the model's own.
        seconds: upper bound, unless the few passes that a table needs at least take longer.
        quick: a coarse table in less than a second, or from a handful of passes.
        by_host: time passes as the host starts them, also where the device would run rounds.
        on_progress: called with the share done, 0 to 1.

    Returns:
        The table, its key filled in. Times in seconds.

    Raises:
        ValueError: ``seconds`` is less than a millisecond.
    """
    check_number("seconds", seconds, 1e-3, math.inf)
    began = time.perf_counter()
    key, offered = cost_key(stack, plan, draft_vocabulary), grids(stack, quick=quick)
    asked = stack, plan, head, (max(offered[0].rows), max(offered[0].contexts))
    sweep = partial(
        _swept,
        offered=offered,
        drafts=plan is not None,
        seconds=seconds,
        quick=quick,
        on_progress=on_progress,
    )
    if by_host:
        key["passes"] = BY_HOST
    try:
        grid, sweeps = sweep(Passes(*asked) if by_host else _passes(*asked), began)
    except RecordingError as error:
        logger.warning("passes are timed as the host starts them: %s", str(error))
        key["passes"] = BY_HOST
        sweeps = []
    if not sweeps:  # only here: the error held what was recorded, and its memory
        grid, sweeps = sweep(Passes(*asked), time.perf_counter())
    _say_if_busy(stack, sweeps, logging.INFO if quick else logging.WARNING)
    share = len(stack.draft_layers(plan)) / stack.num_layers if plan else 0.0
    return _table(stack, key, grid, sweeps, share)


def _swept(
    passes: Passes,
    began: float,
    *,
    offered: Sequence[Grid],
    drafts: bool,
    seconds: float,
    quick: bool,
    on_progress: Callable[[float], None],
) -> tuple[Grid, list[dict[Point, Timing]]]:
    """Sweeps over the finest grid that there is time for."""
    ends = began + (min(seconds, QUICK_SECONDS) if quick else RESERVE * seconds)
    bearable = min(seconds, QUICK_MOST) if quick else seconds / 2
    latest = began + bearable if quick else ends
    grid, least = _affordable(passes, offered, bearable), offered[-1]
    first, order = dict[Point, Timing](), random.Random(0)
    if grid is not least:
        points = grid.points(drafts=drafts, sequences=True)
        first = _warmed(passes, shuffled(points, order), began + bearable)
    if not first:  # of a huge model, or because the machine has become slower
        grid, passes.drafts_in_a_row, passes.led_in = least, 1, False
        points = least.points(drafts=drafts, sequences=False)
    sweeps: list[dict[Point, Timing]] = [first]
    dues = _quick_dues(points, order, first) if quick else _dues(points, order)
    most = MAX_ROUNDS if quick else MAX_SWEEPS
    for sweep, due in enumerate(itertools.islice(dues, most)):
        sweeps.append({})
        for point in due:
            now = time.perf_counter()
            # One timing each, the plain pass's in a fast moment, made all else 1.7 times as dear.
            late = now > (latest if sweep < QUICK_ROUNDS else ends)
            if late and (sweep or first) and point != BEHIND:  # which has run
                return grid, sweeps
            on_progress(min(1.0, max((now - began) / (ends - began), sweep / most)))
            sweeps[-1][point] = passes.timing(point)
    return grid, sweeps


def _dues(points: Sequence[Point], order: random.Random) -> Iterator[list[Point]]:
    """What each sweep goes over: passes of many rows not each time."""
    for sweep in itertools.count():
        due = [p for p in points if p[1] <= LARGE_ROWS or sweep % LARGE_EVERY == 0]
        yield shuffled(due, order)


def _quick_dues(
    points: Sequence[Point], order: random.Random, first: Mapping[Point, Timing]
) -> Iterator[list[Point]]:
    """What a quick table has more than one timing of, behind all that it can't do without."""
    if not first:
        yield shuffled(points, order)
    yield from rounds(points)


def _passes(
    stack: DecoderStack, plan: DraftPlan | None, head: DraftHead | None, largest: tuple[int, int]
) -> Passes:
    """As most rounds will run them. Those that the host drives all the same, for a grammar or
    log-probabilities, take longer than recorded passes: they have a table of their own."""
    if isinstance(stack, PackedStack) and prices_recorded(stack, plan):
        return RecordedPasses(stack, plan, head, largest, GraphRecorder(stack.device))
    return Passes(stack, plan, head, largest)


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
        # A guess: rows are cheap, but not free.
        sketched = sum(1 + r / 16 for r in grid.sketched) * len(grid.contexts)
        whole = sum(1 + r / 16 for r in grid.whole)
        passes_of_a_point = 1.4 + DRAFTS_IN_A_ROW * share
        # What is only sketched may not make a table take longer: it is for models with time left.
        bearable = SKETCH_SHARE * seconds if sketched else seconds
        if 2 * once * (whole * len(grid.contexts) * passes_of_a_point + sketched) < bearable:
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
    stack: DecoderStack,
    key: dict[str, str | int],
    grid: Grid,
    sweeps: Sequence[Sweep],
    share: float,
) -> CostTable:
    """Of sweeps over a grid, with drafts of a ``share`` of the layers, if of any."""
    clock = _clock(stack, [timing for sweep in sweeps for timing in sweep.values()])
    typical = _typical([{p: timing[clock] for p, timing in sweep.items()} for sweep in sweeps])
    drafts = DRAFT in typical
    grid.fill(typical, share)
    heads = {r: typical.get(("head", r, 0), 0.0) for r in grid.rows}
    apart = {
        tokens: typical[several] - typical["verify", several[1], 0]
        for tokens in grid.tiles
        if (several := ("verify sequences", NUM_SEQUENCES * tokens, 0)) in typical
    }
    start = 0.0
    if BEHIND in typical:
        start = DRAFTS_IN_A_ROW * max(0.0, typical[DRAFT] - typical[BEHIND])
    quantum = stack.exactness.free_rows
    # A number of positions that was not measured costs what the next larger one does. A line
    # between two measured ones would turn the error of one into a price of each drafted token.
    tiles = tuple(t for t in stack.exactness.tiles if t < quantum and t in grid.rows)
    return CostTable(
        draft_layers=_curve(typical, grid, "draft", heads) if drafts else FREE,
        draft_head=Curve(grid.rows, (0,), (tuple(heads.values()),)) if drafts else FREE,
        verify=_curve(typical, grid, "verify", {}),
        sampling=typical["sampling", 1, 0],
        row_quantum=quantum,
        key=key,
        tiles=tiles,
        draft_sequence=_another_sequence(typical, "draft"),
        verify_sequence=_another_sequence(typical, "verify"),
        pass_rows=MAX_PASS_ROWS if stack.exactness.wanted else 0,
        judging=typical["sampling judging", 1, 0] / JUDGED,
        greedy_sampling=typical["greedy", 1, 0],
        greedy_judging=typical["greedy judging", 1, 0] / JUDGED,
        draft_sampling=typical.get(("sampling drafting", 1, 0)),
        greedy_draft_sampling=typical.get(("greedy drafting", 1, 0)),
        slot_block=stack.exactness.slot_block if stack.exactness.slot_block > 1 else 0,
        draft_start=start,
        verify_tiles=tuple(apart.items()),
        large_quantum=stack.exactness.row_quantum if stack.exactness.fewest else 0,
    )


def _curve(
    typical: Mapping[Point, float], grid: Grid, kind: str, less: Mapping[int, float]
) -> Curve:
    """Seconds of passes of a kind, ``less`` what their rows take that is counted elsewhere."""
    near = [typical[kind, r, grid.contexts[0]] for r in grid.rows]
    seconds = []
    for c in grid.contexts:
        grown = [typical[kind, r, c] - n for r, n in zip(grid.rows, near, strict=True)]
        # To attend further takes no longer for fewer rows; that it seemed so was the machine.
        least = [*itertools.accumulate(reversed(grown), min)][::-1]
        parts = zip(grid.rows, near, least, strict=True)
        seconds.append(tuple(max(0.0, n + far - less.get(r, 0.0)) for r, n, far in parts))
    return Curve(grid.rows, grid.contexts, tuple(seconds))


def _another_sequence(typical: Mapping[Point, float], kind: str) -> float:
    """Seconds that a pass takes longer for each further sequence that its rows are of."""
    together = typical.get((f"{kind} sequences", NUM_SEQUENCES, 0))
    if together is None:
        return 0.0
    apart = together - typical[kind, NUM_SEQUENCES, 0]
    return max(0.0, apart) / (NUM_SEQUENCES - 1)


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
        # Of few, of which half were disturbed, those that were not.
        middle = statistics.median_low if len(ratios) < MANY else statistics.median
        pace = (middle(ratios) if ratios else 0.0) or 1.0
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
        saved: of a plan file; None measures quickly, and silently.
        stack, plan, draft_vocabulary, head: as in ``measure_cost``.
    """
    if saved is not None:
        difference = mismatch(saved, stack, plan, draft_vocabulary)
        if difference is None:
            return saved
        # It writes the table into the plan; with an adapter there is nothing that does.
        advice = "; run layerskip search again" if stack.adapter is None else ""
        logger.warning("%s: a quick measurement is used%s", difference, advice)
    return measure_cost(stack, plan, draft_vocabulary=draft_vocabulary, head=head, quick=True)


def warn_of_another_checkpoint(file: PlanFile, stack: DecoderStack) -> None:
    """Log it if a plan was chosen on other weights: it still works, less well perhaps."""
    if file.fingerprint is None:
        return
    own = fingerprint(stack.twin)
    if own != file.fingerprint:
        logger.warning(
            "the plan was chosen on another checkpoint (fingerprint %s, this one has %s); "
            "run layerskip search again",
            file.fingerprint,
            own,
        )
