"""Whether a row's bits depend on the other rows of its pass: probed, not assumed.

On a CPU the kernels of one row and of several differ, and so do their roundings. Two habits undo
that wherever the probe finds that they do: passes are padded to a multiple of some rows, and
attention sees whole blocks of slots, masked (DESIGN 3.6).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch

from layerskip.cache import SLOT_BLOCK, Segment
from layerskip.ops.reference import decode_attention

if TYPE_CHECKING:
    from layerskip.model import DecoderStack

ROW_QUANTA = (8, 16, 32, 64)
SLOT_BLOCKS = (128, 256, SLOT_BLOCK)
SLOTS_OF_PROBE = 1024
TILE, SMALLER_TILES = 8, (1, 2, 4)
NUM_DRAWS = 3
TAIL_FREE_BYTES = 128
MAX_PASS_ROWS = 64


@dataclass(frozen=True)
class Exactness:
    """How rows keep their bits.

    Attributes:
        holds: True if passes of several rows give each row the bits it gets alone; else tokens
            run one by one.
        row_quantum: passes are padded to a multiple of this many rows.
        slot_block: passes attend to a multiple of this many slots, masked.
        reason: one sentence for ``info``.
        tiles: numbers of positions that attention may take at once, ascending.
        wanted: False where passes take the rows that come, in one piece, whatever the bits.
    """

    holds: bool
    row_quantum: int
    slot_block: int
    reason: str
    tiles: tuple[int, ...] = (TILE,)
    wanted: bool = True

    def tile(self, longest: int) -> int:
        """Positions that attention takes at once in a pass whose longest segment is this long."""
        if not self.wanted:
            return longest
        return next((t for t in self.tiles if t >= longest), self.tiles[-1])


SWITCHED_OFF = Exactness(
    False, 1, 1, "switched off (exact=False): rows may change in the last bits", wanted=False
)


def probe(stack: "DecoderStack") -> Exactness:
    """The smallest padding at which rows do not influence each other; sets it on ``stack``."""
    blocks: tuple[int, ...] = SLOT_BLOCKS
    if not stack.one_row:
        blocks = tuple(b for b in SLOT_BLOCKS if blocks_agree(stack, b))[:1] or SLOT_BLOCKS[-1:]
    smaller = () if stack.one_row else SMALLER_TILES
    fitting = [q for q in ROW_QUANTA if "some" not in tails(stack, q)]
    for block, quantum in product(blocks, fitting):
        reason = f"rows keep their bits in passes padded to {quantum} rows"
        if stack.one_row:
            reason += ", one sequence a pass: the model has attention code of its own"
        tiles = (*(t for t in smaller if tiles_agree(stack, t, block)), TILE)
        stack.exactness = Exactness(True, quantum, block, reason, tiles)
        if rows_agree(stack, quantum, 1):
            return stack.exactness
    reason = "rows influence each other in every pass size: tokens run one by one"
    return Exactness(False, ROW_QUANTA[0], blocks[-1], reason)


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


def blocks_agree(stack: "DecoderStack", block: int) -> bool:
    """Whether attending to more masked blocks of this many slots leaves a row's bits alone."""
    attend = _attention_of_noise(stack)
    for position in _positions(block):
        ends = range((position // block + 1) * block, SLOTS_OF_PROBE + 1, block)
        outputs = [attend(TILE, position, end) for end in ends]
        if not all(torch.equal(outputs[0], other) for other in outputs[1:]):
            return False
    return True


def tiles_agree(stack: "DecoderStack", tile: int, block: int) -> bool:
    """Whether attention of ``tile`` positions gives each the bits it has among ``TILE``."""
    attend = _attention_of_noise(stack)
    return all(
        torch.equal(attend(tile, position, end), attend(TILE, position, end)[:, :tile])
        for position in _positions(block)
        for end in ((position // block + 1) * block, SLOTS_OF_PROBE)
    )


def _positions(block: int) -> list[int]:
    """At the start, in the middle and at the end of every block."""
    middles, lasts = (range(first, SLOTS_OF_PROBE, block) for first in (block // 2, block - 1))
    return [1, *middles, *lasts]


def _attention_of_noise(stack: "DecoderStack") -> Callable[[int, int, int], torch.Tensor]:
    """``attend(count, position, end)``: of the first ``count`` of some queries, all of which see
    slots up to ``position``, over ``end`` slots."""
    generator = torch.Generator().manual_seed(0)
    heads, extra = stack.group * stack.num_kv_heads, stack.score_changes

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(stack.device, stack.dtype)

    q = noise(1, TILE, heads, stack.head_dim)
    keys, values = (noise(1, SLOTS_OF_PROBE, stack.num_kv_heads, stack.head_dim) for _ in "kv")

    def attend(count: int, position: int, end: int) -> torch.Tensor:
        mask = torch.zeros(1, 1, stack.group * count, end, dtype=stack.dtype, device=stack.device)
        mask[..., position + 1 :] = float("-inf")
        return decode_attention(q[:, :count], keys[:, :end], values[:, :end], mask, 1.0, *extra)

    return attend


def rows_agree(
    stack: "DecoderStack", size: int, reference: int, product_rows: int = MAX_PASS_ROWS
) -> bool:
    """Whether a pass of ``size`` tokens gives the bits of passes of ``reference`` tokens.

    One layer of each kind and the head, on several draws of tokens, as one sequence and as two
    with different contexts.

    Args:
        product_rows: most rows that a linear map of the larger pass takes at once.
    """
    if tails(stack, size) != tails(stack, stack.exactness.row_quantum):
        return False
    generator = torch.Generator().manual_seed(0)
    half = size // 2
    far = max(min(509, stack.max_positions - size), 0)
    cases = [[Segment(0, 3, size)], [Segment(0, 5, half), Segment(1, far, size - half)]]
    if stack.one_row:  # its last token ends a block: the same tokens alone attend to one more
        cases[1] = [Segment(0, stack.exactness.slot_block - size, size)]
    return all(
        _segments_agree(
            stack,
            torch.randint(stack.vocab_size, (size,), generator=generator).tolist(),
            segments,
            reference,
            product_rows,
        )
        for _ in range(NUM_DRAWS)
        for segments in cases
    )


def _segments_agree(
    stack: "DecoderStack",
    ids: list[int],
    segments: list[Segment],
    reference: int,
    product_rows: int,
) -> bool:
    together = stack.new_cache(num_rows=2, num_slots=SLOTS_OF_PROBE)
    apart = stack.new_cache(num_rows=2, num_slots=SLOTS_OF_PROBE)
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
