"""A decoder's passes, bare: which sizes are measured, in which order, and how one is timed."""

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from layerskip.cache import Segment
from layerskip.cost import DRAFTS_IN_A_ROW, NUM_SEQUENCES
from layerskip.draft_head import DraftHead
from layerskip.exactness import MAX_PASS_ROWS
from layerskip.graphs import wait_for
from layerskip.model import DecoderStack
from layerskip.params import SamplingParams
from layerskip.plan import DraftPlan
from layerskip.sampling import Sampler

MAX_CONTEXT, QUICK_CONTEXT = 4096, 1024
# A pass of 64 rows over one of 32, on a processor: 1.71 and 1.83 on two (bench/LOG.md, 2026-11-27).
# By a line through 8 and 32 it was 1.44, and batches of 16 rows drafted a token too many.
TWICE_AS_MANY = 1.75
# Beyond 32 tokens our kernels have twice as many columns: a pass of 33 takes 1.39 and 1.51 of one
# of 32 on an H200 (bench/LOG.md, 2026-11-27), where a line from 32 to 64 has 1.02 and 1.03.
STEP = 33
# Sizes beside the powers of two, where passes hold no spare rows. Attention takes up to four or up
# to eight positions of a sequence at once, so that five take as long as six; and by copied weights
# passes of seven rows take 1.2 to 1.3 times as long as of four to six on some processors
# (bench/LOG.md, 2026-11-29 and 30).
AT_STEPS = (5, 6)
MAX_CACHE_BYTES = 2**29
JUDGED = 8  # tokens of one sequence
KINDS = ("sampling", "greedy")  # of sampling
DRAFT, BEHIND = ("draft", 1, 0), ("draft behind", 1, 0)  # the last one of those in a row
DRAFTED = tuple(f"{kind} drafting" for kind in KINDS)
Point = tuple[str, int, int]  # kind of pass, rows, context
Timing = tuple[float, float]  # seconds that went by, and that this thread was at work


@dataclass(frozen=True)
class Grid:
    """What is measured: sizes of passes, and slots that they attend to.

    Attributes:
        sketched: rows of which only the full-depth passes are; ``fill`` has the rest from the next
            larger size.
        drafted: rows of which draft passes are, at a short context alone; ``fill`` reckons the
            others. Empty: of all rows and contexts.
        guessed: rows of which none is, twice the next smaller size: ``fill`` has them from that.
        filled: rows of which none is, as a row alone has spare ones up to there.
        tiles: numbers of tokens that each of eight sequences has in a verify pass of theirs.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    sketched: tuple[int, ...] = ()
    drafted: tuple[int, ...] = ()
    guessed: tuple[int, ...] = ()
    tiles: tuple[int, ...] = ()
    filled: tuple[int, ...] = ()

    @property
    def whole(self) -> tuple[int, ...]:
        """Rows of which all passes are measured."""
        return tuple(r for r in self.measured if r not in self.sketched)

    @property
    def measured(self) -> tuple[int, ...]:
        """Rows of which some passes are."""
        return tuple(r for r in self.rows if r not in (*self.guessed, *self.filled))

    def points(self, *, drafts: bool, sequences: bool) -> list[Point]:
        """Every pass of a sweep."""
        points = [("verify", r, c) for r in self.measured for c in self.contexts]
        if drafts:
            contexts = self.contexts[:1] if self.drafted else self.contexts
            points += [("draft", r, c) for r in self.drafted or self.whole for c in contexts]
            points += [("head", r, 0) for r in self.whole]
        if sequences:
            if max(self.measured) >= NUM_SEQUENCES:  # else one sequence has no room for so many
                kinds = ("verify", "draft") if drafts else ("verify",)
                points += [(f"{kind} sequences", NUM_SEQUENCES, 0) for kind in kinds]
                points += [(kind, NUM_SEQUENCES, 0) for kind in kinds]
                points += [("verify sequences", NUM_SEQUENCES * t, 0) for t in self.tiles]
            points += [DRAFT, BEHIND] if drafts else []
        sampled = [*KINDS, *(f"{kind} judging" for kind in KINDS), *(DRAFTED if drafts else ())]
        return list(dict.fromkeys([*points, *((kind, 1, 0) for kind in sampled)]))

    def fill(self, typical: dict[Point, float], share: float) -> None:
        """Put in what was not measured.

        Args:
            share: of the layers, that a draft runs: its passes grow by as much of what full-depth
                ones do, heads apart.
        """
        alike = [(rows, 1, 1.0) for rows in self.filled]
        for rows, like, times in (*alike, *((r, r // 2, TWICE_AS_MANY) for r in self.guessed)):
            for (kind, r, context), seconds in list(typical.items()):
                if r == like and kind in ("verify", "draft", "head"):
                    typical[kind, rows, context] = times * seconds
        for rows in self.rows if self.drafted and DRAFT in typical else ():
            if rows not in self.sketched:
                known = max(r for r in self.drafted if r <= rows)
                more, head = (
                    typical[kind, rows, 0] - typical[kind, known, 0] for kind in ("verify", "head")
                )
                near = typical["draft", known, 0] + share * more + (1.0 - share) * head
                for context in self.contexts:
                    far = typical["verify", rows, context] - typical["verify", rows, 0]
                    typical.setdefault(("draft", rows, context), max(0.0, near + share * far))
        for rows in self.sketched:
            larger = next(r for r in self.rows if r > rows and r not in self.sketched)
            for (kind, r, context), seconds in list(typical.items()):
                if r == larger:
                    typical.setdefault((kind, rows, context), seconds)


def grids(stack: DecoderStack, *, quick: bool) -> list[Grid]:
    """Grids to choose from, the finest first; the last one is what a table can't do without."""
    quantum = stack.exactness.free_rows
    most = max(1, min(MAX_PASS_ROWS, stack.max_positions // 2))
    few, all_rows = max(quantum, 8), {t for t in stack.exactness.tiles if t < quantum}
    all_rows |= {quantum * 2**i for i in range(7)} | {1}
    exactness = stack.exactness
    steps = exactness.fewest > 1 and most >= few
    fine = tuple(sorted(r for r in {*all_rows, *(AT_STEPS if steps else ())} if r <= most))
    one_by_one = exactness.by_token or (exactness.wanted and not exactness.holds)
    # Three points, the last one far out, and where the largest pass has twice as many rows, that.
    coarse = tuple(r for r in (1, few, (2 if one_by_one else 4) * few) if r <= most)
    twice = 2 * max(coarse)
    largest: tuple[int, ...] = (twice,) if twice == MAX_PASS_ROWS <= most and not one_by_one else ()
    on_gpu = stack.device.type != "cpu"
    if on_gpu and largest:
        largest, fine = (STEP, *largest), tuple(sorted({*fine, STEP}))
    longest = QUICK_CONTEXT if quick else MAX_CONTEXT
    fitting = MAX_CACHE_BYTES // stack.kv_bytes_per_token
    top = max(0, min(stack.max_positions, longest, fitting) - max(fine))
    block = stack.exactness.slot_block
    wanted = [0, top // 2, top] + ([512] if top >= 2048 else [])
    contexts = tuple(sorted({c // block * block for c in wanted}))
    ends = tuple(sorted({0, contexts[-1]}))
    in_steps = exactness.wanted and not exactness.holds
    # Where passes have no spare rows a token more is another row, whoever's it is.
    tiles = () if exactness.fewest else exactness.tiles
    # Of as many tokens of one sequence a pass is measured, too.
    several = tuple(t for t in tiles if 1 < t <= quantum and NUM_SEQUENCES * t in fine)
    finest = Grid(coarse, contexts) if in_steps else Grid(fine, contexts, tiles=several)
    # A GPU reads weights as long for 64 rows as for 32 or nearly, and is quick enough to tell.
    guessed = () if on_gpu else largest
    finer: list[Grid] = []
    if quick:  # what three drafted tokens take less than seven decides how many are drafted
        between = min(quantum, few, max(coarse))  # of few positions there is no larger size
        half = tuple(t for t in exactness.tiles if 1 < t < between)[-1:]
        half = AT_STEPS[-1:] if steps else half
        finest = Grid(tuple(sorted({*coarse, *half, *largest})), ends, half, coarse[:2], guessed)
        if steps:
            least = {quantum, *(t for t in exactness.tiles if quantum < t < few)}
            sizes = tuple(sorted({*finest.rows, *least, *AT_STEPS}))
            finer = [replace(finest, rows=sizes, sketched=AT_STEPS)]
    rest = Grid((*coarse, *largest), ends, (), finest.drafted, guessed)
    offered = [*finer, finest, rest, Grid(coarse[:2], (0,))]
    if not steps:
        return offered
    return [
        grid
        if quantum in grid.rows
        else replace(grid, rows=tuple(sorted((*grid.rows, quantum))), filled=(quantum,))
        for grid in offered
    ]


class Passes:
    """The passes of one decoder, bare, each timed by itself.

    Args:
        stack: runs them.
        plan: layers of a draft pass; the stack's adapter runs after them.
        head: over the draft vocabulary; None: the model's own.
        largest: rows and context of the largest pass.
    """

    @torch.inference_mode()
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
        self.last_draft: Timing = (0.0, 0.0)
        self._ran = "", 0  # the last pass: its kind, its context
        self.cache = stack.new_cache(num_rows=1, num_slots=sum(largest)).written()
        self.many = stack.new_cache(num_rows=NUM_SEQUENCES, num_slots=NUM_SEQUENCES).written()
        self.samplers = {
            kind: Sampler(SamplingParams(temperature=temperature), 0, stack.vocab_size)
            for kind, temperature in zip(KINDS, (1.0, 0.0), strict=True)
        }
        draw = random.Random(0)
        self.ids = [draw.randrange(stack.vocab_size) for _ in range(MAX_PASS_ROWS)]
        # A layer's output: embeddings may be of another width.
        first = stack.embed(self.ids[:1])
        self.hidden = stack.run_pass(first, (0,), self.cache, [Segment(0, 0, 1)])[:1]
        self.logits = stack.logits(self.hidden)[:1].expand(JUDGED, -1)
        self.drawn = JUDGED
        # The first on a GPU loads its kernel, which is no part of a token's price.
        self.samplers["sampling"].noise(0, self.logits.device)

    def timing(self, point: Point) -> Timing:
        """One timing of one pass.

        A verify pass is run after what it follows in decoding, as that leaves some weights in the
        processor's caches: plain passes follow one of all layers, others a draft. What drafts and
        sampled tokens follow, ``shuffled`` and ``rounds`` see to.
        """
        kind, rows, context = point
        kind, _, of = kind.partition(" ")
        segments = [Segment(0, context, rows)]
        if of == "sequences":
            segments = [Segment(i, 0, rows // NUM_SEQUENCES) for i in range(NUM_SEQUENCES)]
        if kind == "verify":
            before = "draft" if self.draft_layers and rows > 1 else "verify"
            if self.led_in and self._ran != (before, context):
                run = self._draft if before == "draft" else self._verify
                run(1, [Segment(0, context, 1)])
            return self._timed(lambda: self._verify(rows, segments))
        if kind == "draft":
            if of == "behind":
                return self.last_draft
            return self._drafted(rows, segments)
        if kind == "head":
            hidden = self.hidden.repeat(rows, 1)
            return self._timed(lambda: self._draft_head(hidden, rows), self.drafts_in_a_row)
        if of == "judging":
            self.samplers[kind].pick(self.logits, 0)  # its noise is made: by a draft, in a round
            return self._timed(lambda: self.samplers[kind].pick(self.logits, 0))
        # In a row drafted ones find about what those between short drafts do: 0.13 ms, and 0.14.
        times = self.drafts_in_a_row if of == "drafting" else 1
        return self._timed(lambda: self._sample(kind), times)

    def _drafted(self, rows: int, segments: Sequence[Segment]) -> Timing:
        """As in a round, where those after the first find weights in the caches: the mean."""
        count = self.drafts_in_a_row
        timings = [self._timed(lambda: self._draft(rows, segments)) for _ in range(count)]
        self.last_draft = timings[-1]
        passed, worked = (sum(parts) / count for parts in zip(*timings, strict=True))
        return passed, worked

    def _verify(self, rows: int, segments: Sequence[Segment]) -> None:
        stack = self.stack
        cache = self.cache if len(segments) == 1 else self.many
        hidden = stack.embed(self.ids[:rows])
        stack.logits(stack.run_layers(hidden, range(stack.num_layers), cache, segments))
        self._ran = "verify", segments[0].start

    def _draft(self, rows: int, segments: Sequence[Segment]) -> None:
        cache = self.cache if len(segments) == 1 else self.many
        hidden = self.stack.embed(self.ids[:rows])
        hidden = self.stack.run_layers(hidden, self.draft_layers, cache, segments)
        self._draft_head(hidden, rows)
        self._ran = "draft", segments[0].start

    def _draft_head(self, hidden: Tensor, rows: int) -> None:
        self.head(hidden)[:rows].float().softmax(-1).amax(-1).tolist()

    def _sample(self, kind: str) -> None:
        self.drawn += 1  # its noise is new
        self.samplers[kind].pick(self.logits[:1], self.drawn)
        self.samplers[kind].forget_before(self.drawn)

    def _timed(self, run: Callable[[], object], times: int = 1) -> Timing:
        wait_for(self.stack.device)
        began, worked = time.perf_counter(), time.thread_time()
        for _ in range(times):
            run()
        wait_for(self.stack.device)
        return (time.perf_counter() - began) / times, (time.thread_time() - worked) / times


def shuffled(points: Sequence[Point], order: random.Random) -> list[Point]:
    """In a new order, each after what it follows in a round, which decides what is left in the
    processor's caches: sampled tokens and drafts after a verify pass, drafted tokens after a draft,
    later drafts after the first ones.
    After a verify pass sampling takes twice as long (measured)."""
    mixed = order.sample(points, len(points))
    sampled = [p for p in mixed if p[0] in KINDS]
    drafts = [p for p in mixed if p[0].startswith("draft") and p != BEHIND]
    drafted = [p for p in mixed if p[0] in DRAFTED]
    following = sampled, drafts, drafted
    found = []
    for point in [p for p in mixed if p not in {*sampled, *drafts, *drafted, BEHIND}]:
        found.append(point)
        if point[0].startswith("verify"):
            found += [due.pop() for due in following if due]
    found += [p for due in following for p in due]
    if BEHIND in mixed:
        found.insert(found.index(DRAFT) + 1, BEHIND)
    return found


def rounds(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Of these points what rounds are made of, round by round without end: a draft, which is timed
    in some, a verify pass of one size after another, and a plain one. What they take beside each
    other decides what is drafted; so close they mostly find the machine at one speed.
    Some are at the long context, as rows of a batch attend each for itself: an error of what one
    takes there counts as often as there are rows. Some are of what batches run.
    """
    contexts = sorted({context for _, _, context in points})
    longer = sorted({rows for kind, rows, _ in points if kind == "verify" and rows > 1}) or [1]
    sizes = longer[:-1] or longer  # the largest is what passes of batches are reckoned from
    size, far_size = itertools.cycle(sizes), itertools.cycle(sizes)
    together = [(f"{kind} sequences", NUM_SEQUENCES, 0) for kind in ("draft", "verify")]
    many: list[Point] = [("draft", sizes[-1], 0), ("verify", longer[-1], 0)]
    while True:
        near: list[list[Point]] = [[("verify", next(size), 0)] for _ in range(3)]
        far = [("verify", rows, contexts[-1]) for rows in (next(far_size), 1)]
        drafted = [DRAFT, BEHIND, *near[0]], [DRAFT, BEHIND, *near[2]]
        for found in (drafted[0], near[1], far, drafted[1], together, many):
            plain = [] if found is far else [("verify", 1, 0)]
            yield list(dict.fromkeys(point for point in [*found, *plain] if point in points))
