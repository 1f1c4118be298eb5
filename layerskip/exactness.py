"""Whether a row's bits depend on the other rows of its pass: probed, not assumed.

On a CPU the kernels of one row and of several differ, and so do their roundings. Two habits undo
that wherever the probe finds that they do: passes are padded to a multiple of some rows, and
attention sees whole blocks of slots, masked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import torch

from layerskip.cache import SLOT_BLOCK, KVCache, Segment
from layerskip.roundings import SLOTS_OF_PROBE, Attend, attention_draws, revealing

if TYPE_CHECKING:
    from layerskip.model import DecoderStack

ROW_QUANTA = (8, 16, 32, 64)
SLOT_BLOCKS = (128, 256, SLOT_BLOCK)
TILE, SMALLER_TILES = 8, (1, 2, 4)
NUM_DRAWS = 3
TAIL_FREE_BYTES = 128
MAX_PASS_ROWS = 64
ONE_BY_ONE = "tokens run one by one"
Caches = tuple[KVCache, KVCache]


@dataclass(frozen=True)
class Exactness:
    """How rows keep their bits.

    Attributes:
        holds: True if passes of several rows give each row the bits it gets alone; else tokens
            run one by one.
        row_quantum: passes are padded to a multiple of this many rows, but for ``fewest``.
        slot_block: passes attend to a multiple of this many slots, masked.
        reason: one sentence for ``info``.
        tiles: numbers of positions that attention may take at once, ascending.
        wanted: False where passes take the rows that come, in one piece, whatever the bits.
        any_size: whether bits hold in passes of every size, and nothing is to be proven.
        product_rows: most rows that a linear map takes at once; bits may need fewer. 1: it takes
            the pass's tokens one by one, and no spare row.
        fewest: rows of the least pass, where passes of up to ``TILE`` rows hold no spare ones
            beyond them; 0: they are padded to a quantum, as others are.
    """

    holds: bool
    row_quantum: int
    slot_block: int
    reason: str
    tiles: tuple[int, ...] = (TILE,)
    wanted: bool = True
    any_size: bool = False
    product_rows: int = MAX_PASS_ROWS
    fewest: int = 0

    @property
    def by_token(self) -> bool:
        """Whether products take tokens one by one, so that spare rows are left out of them."""
        return self.wanted and self.product_rows == 1

    @property
    def free_rows(self) -> int:
        """Rows of a pass that cost no more than one: one where tokens are multiplied, or run, by
        one; else what the least pass holds."""
        return (self.fewest or self.row_quantum) if self.holds and not self.by_token else 1

    def tile(self, left: int) -> int:
        """Positions of a row that attention takes at once where it has so many left."""
        if not self.wanted:
            return left
        return next((t for t in self.tiles if t >= left), self.tiles[-1])


SWITCHED_OFF = Exactness(
    False, 1, 1, "switched off (exact=False): rows may change in the last bits", wanted=False
)


def probe(stack: "DecoderStack") -> Exactness:
    """The smallest padding at which rows do not influence each other. It is tried on ``stack``,
    which is left with the last trial: what is returned is for the caller to set."""
    blocks: tuple[int, ...] = SLOT_BLOCKS
    tiles: tuple[int, ...] = (TILE,)
    if not stack.one_row:
        draws = attention_draws(stack)
        blocks = tuple(b for b in SLOT_BLOCKS if blocks_agree(draws, b))[:1]
        smaller = (t for t in SMALLER_TILES if blocks and tiles_agree(draws, t, blocks[0]))
        tiles = (*smaller, TILE)
    fitting = [q for q in ROW_QUANTA if "some" not in tails(stack, q)]
    at_once, why = MAX_PASS_ROWS, ""
    if emulates(stack.device, stack.dtype):
        name = str(stack.dtype).removeprefix("torch.")
        why = f": this processor has no {name} arithmetic, and rows save little by coming together"
        why += "; drafts gain more in float32"
        if not stack.divides_products:
            return Exactness(False, 1, (*blocks, SLOT_BLOCK)[0], ONE_BY_ONE + why, tiles=(1,))
        at_once, why = 1, f", and products take them one by one{why}"
    if not why and (small := _small(stack, blocks, tiles)) is not None:
        return small
    for block, quantum in product(blocks, fitting):
        reason = f"rows keep their bits in passes padded to {quantum} rows{why}"
        if stack.one_row:
            reason += ", one sequence a pass: the model has attention code of its own"
        stack.exactness = Exactness(True, quantum, block, reason, tiles, product_rows=at_once)
        if rows_agree(stack, quantum, 1, at_once):
            return stack.exactness
    reason = f"rows influence each other in every pass size: {ONE_BY_ONE}"
    return Exactness(False, ROW_QUANTA[0], (*blocks, SLOT_BLOCK)[0], reason)


def _small(
    stack: "DecoderStack", blocks: Sequence[int], tiles: tuple[int, ...]
) -> Exactness | None:
    """Without spare rows up to a tile of them, if bits hold in all these sizes of passes.

    Eight rows take a processor up to twice as long as a few, and oneDNN's products of copied
    weights, or of weights where they lie, mostly give a row the same bits among any number of
    others (bench/LOG.md, 2026-11-29).
    """
    quickest = stack.fewest_rows
    others = (2,) if quickest == 1 else ()  # a row alone may have a kernel of its own
    for fewest, block in product((quickest, *others) if quickest else (), blocks):
        # Copied weights, and those of 16 bits: twelve rows take 0.84 of what sixteen do.
        quantum = TILE // 2 if fewest > 1 else TILE
        reason = f"rows keep their bits in passes of {fewest} to {TILE} rows, "
        reason += f"larger ones padded to {quantum}s"
        stack.exactness = Exactness(True, quantum, block, reason, tiles, fewest=fewest)
        if stack.pass_sizes.are_small:
            return stack.exactness
        stack.pass_sizes.forget()
    return None


def small_agree(stack: "DecoderStack") -> bool:
    """Whether passes of the fewest rows to ``TILE``, without spare ones, give each the same bits.

    One layer of each kind and the head, as in ``rows_agree``: on several draws of tokens, as one
    sequence and as two. Each token runs alone once, and all sizes are held against that.
    """
    whole, sizes = tails(stack, TILE), range(stack.exactness.fewest, TILE)
    if "some" in whole or any(tails(stack, size) != whole for size in sizes):
        return False
    caches = _two_caches(stack)
    return products_agree(stack, sizes) and all(
        _prefixes_agree(stack, caches, *case) for case in _cases(stack, TILE)
    )


def products_agree(
    stack: "DecoderStack", sizes: Sequence[int], product_rows: int = MAX_PASS_ROWS
) -> bool:
    """Whether products give a row the same bits in passes of these sizes, at any place, as in the
    smallest one that is padded.

    In float32 that shows in any text. Of 16-bit outputs one in thousands had other bits where two
    rows were summed up in another order than eight (bench/LOG.md, 2026-11-29), and no text that is
    tried need meet it: inputs are made of which nothing but the roundings is left.
    """
    if stack.dtype == torch.float32 or stack.device.type != "cpu" or product_rows == 1:
        return True
    smaller = max(TILE, stack.exactness.row_quantum)
    generator = torch.Generator().manual_seed(0)
    order = torch.arange(max(smaller, *sizes), device="cpu")
    for project, weight, start in stack.products:
        for _ in range(NUM_DRAWS):
            x, outputs = revealing(weight, len(order), generator)
            parts = [project(part, product_rows) for part in x.split(smaller)]
            whole = torch.cat(parts).gather(1, outputs + start)
            # In their places, and each in another.
            for rows in (places[:n] for n in sizes for places in (order, order.roll(3))):
                got = project(x[rows], product_rows).gather(1, outputs[rows] + start)
                if not torch.equal(got, whole[rows]):
                    return False
    return True


def _two_caches(stack: "DecoderStack") -> Caches:
    """For all passes of a proof: of a large model, to make those of one is most of its time."""
    layers = max(stack.probed_layers) + 1
    one, other = (
        stack.new_cache(num_rows=2, num_slots=SLOTS_OF_PROBE, num_layers=layers) for _ in range(2)
    )
    return one, other


def _emptied(cache: KVCache) -> KVCache:
    for row in range(cache.num_rows):
        cache.release(row)
    return cache


def _prefixes_agree(
    stack: "DecoderStack", caches: Caches, ids: list[int], segments: list[Segment]
) -> bool:
    """Whether the segments' first tokens, 2, 3, ... in all, give together what each gives alone."""
    alone = _emptied(caches[0])
    tokens = [Segment(s.row, s.start + i, 1) for s in segments for i in range(s.count)]
    embedded, layers = stack.embed(ids), stack.probed_layers
    passes = [
        stack.run_pass(embedded[i : i + 1], layers, alone, [token])
        for i, token in enumerate(tokens)
    ]
    states = torch.cat([rows[:1] for rows in passes])
    logits = torch.cat([stack.head(rows)[:1] for rows in passes])
    for size in range(2, len(ids) + 1):
        counts = [size] if len(segments) == 1 else [size // 2, size - size // 2]
        first = [replace(s, count=n) for s, n in zip(segments, counts, strict=True)]
        at = [tokens.index(Segment(s.row, s.start + i, 1)) for s in first for i in range(s.count)]
        together = _emptied(caches[1])
        got = stack.run_pass(embedded[at], layers, together, first)
        same = torch.equal(got[:size], states[at])
        if not same or not torch.equal(stack.head(got)[:size], logits[at]):
            return False
        slots = [(s.row, slice(s.start, s.start + s.count)) for s in first]
        for one, several in ((alone.layer_keys[i], together.layer_keys[i]) for i in layers):
            if any(not torch.equal(one[s], several[s]) for s in slots):
                return False
    return True


def emulates(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of this dtype are emulated, so that rows cost as much together as apart.

    Where a processor lacks 16-bit arithmetic torch multiplies row by row: the larger maps take 6 to
    9 times as long for eight rows as for one (bench/LOG.md, 2026-11-22), and padding buys nothing.
    By what the processor is, never by a clock: a machine has to give the same bits each time.
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    known = torch.ops.mkldnn  # torch has no public way to ask
    kind = "bf16" if dtype == torch.bfloat16 else "fp16"
    supported = getattr(known, f"_is_mkldnn_{kind}_supported", None)
    return torch.backends.mkldnn.is_available() and supported is not None and not supported()


def tails(stack: "DecoderStack", rows: int) -> list[str]:
    """For each array that activations of ``rows`` rows run over, how much of it is tail.

    torch computes the last elements of an array that do not fill two 512-bit vectors by other
    code, with other roundings, and whose they are depends on the number of rows. Harmless are
    arrays without a tail, and those that are nothing else as long as no pass makes them longer.
    """
    sizes = [rows * width * stack.dtype.itemsize for width in sorted(stack.widths)]
    return [
        "none" if size % TAIL_FREE_BYTES == 0 else "all" if size < TAIL_FREE_BYTES else "some"
        for size in sizes
    ]


def blocks_agree(draws: Sequence[Attend], block: int) -> bool:
    """Whether attending to more masked blocks of this many slots leaves a row's bits alone, and
    its place among ``TILE`` too."""
    # At the start, in the middle and at the end of every block.
    positions = [1, *_middles(block), *range(block - 1, SLOTS_OF_PROBE, block)]
    for attend, position in product(draws, positions):
        ends = range((position // block + 1) * block, SLOTS_OF_PROBE + 1, block)
        outputs = torch.cat([attend(TILE, position, end) for end in ends], dim=1)
        if not torch.equal(outputs, outputs[:, :1].expand_as(outputs)):
            return False
    return True


def tiles_agree(draws: Sequence[Attend], tile: int, block: int) -> bool:
    """Whether attention of ``tile`` positions gives each the bits it has among ``TILE``."""
    return all(
        torch.equal(attend(tile, position, end), attend(TILE, position, end)[:, :tile])
        for attend, position in product(draws, _middles(block))
        for end in ((position // block + 1) * block, SLOTS_OF_PROBE)
    )


def attention_agrees(stack: "DecoderStack") -> bool:
    """Whether what ``stack.exactness`` says of attention holds with this thread's cores, too."""
    if stack.one_row:
        return True
    draws, block = attention_draws(stack), stack.exactness.slot_block
    smaller = (t for t in stack.exactness.tiles if t < TILE)
    return blocks_agree(draws, block) and all(tiles_agree(draws, t, block) for t in smaller)


def _middles(block: int) -> range:
    return range(block // 2 - 1, SLOTS_OF_PROBE, block)


def rows_agree(stack: "DecoderStack", size: int, reference: int, product_rows: int) -> bool:
    """Whether a pass of ``size`` tokens gives the bits of passes of ``reference`` tokens.

    One layer of each kind and the head, on several draws of tokens, as one sequence and as two
    with different contexts.

    Args:
        product_rows: most rows that a linear map of the larger pass takes at once.
    """
    if tails(stack, size) != tails(stack, stack.exactness.row_quantum):
        return False
    if not products_agree(stack, [size], product_rows):
        return False
    caches = _two_caches(stack)
    return all(
        _segments_agree(stack, caches, *case, reference, product_rows)
        for case in _cases(stack, size)
    )


def _cases(stack: "DecoderStack", size: int) -> Iterator[tuple[list[int], list[Segment]]]:
    """Draws of so many tokens, each as one sequence and as two with different contexts."""
    generator, half = torch.Generator().manual_seed(0), size // 2
    far = max(min(509, stack.max_positions - size), 0)
    cases = [[Segment(0, 3, size)], [Segment(0, 5, half), Segment(1, far, size - half)]]
    if stack.one_row:  # its last token ends a block: the same tokens alone attend to one more
        cases[1] = [Segment(0, stack.exactness.slot_block - size, size)]
    for _ in range(NUM_DRAWS):
        for segments in cases:
            ids = torch.randint(stack.vocab_size, (size,), generator=generator, device="cpu")
            yield ids.tolist(), segments


def _segments_agree(
    stack: "DecoderStack",
    caches: Caches,
    ids: list[int],
    segments: list[Segment],
    reference: int,
    product_rows: int,
) -> bool:
    together, apart = map(_emptied, caches)
    hidden, layers = stack.embed(ids)[: len(ids)], stack.probed_layers
    got = stack.run_pass(hidden, layers, together, segments, product_rows)
    got_logits = stack.head(got, product_rows)
    done = 0
    for s in segments:
        for start in range(0, s.count, reference):
            count = min(reference, s.count - start)
            at = slice(done, done + count)
            piece = Segment(s.row, s.start + start, count)
            want = stack.run_pass(hidden[at], layers, apart, [piece])
            same = torch.equal(got[at], want[:count])
            if not same or not torch.equal(got_logits[at], stack.head(want)[:count]):
                return False
            done += count
    return all(torch.equal(together.layer_keys[i], apart.layer_keys[i]) for i in layers)
