"""The cache against a plain list model, its attention against float64 arithmetic."""

import itertools
import math
import mmap
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerskip.bare_passes import Passes
from layerskip.cache import MOST_RAMPS, SLOT_BLOCK, KVCache, Segment
from layerskip.layout import CALL, NEVER, AttentionCall, PassLayout, PrefillLayout, attention_calls
from layerskip.model import DecoderStack

NUM_LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 6
STATM = Path("/proc/self/statm")
POSITIONS = torch.arange(4 * SLOT_BLOCK)[None]
# Starts on both sides of the 128- and 512-slot borders, and of the cache's own end.
STARTS = st.one_of(
    st.integers(0, 20), st.sampled_from([119, 120, 127, 128, 500, 505, 511, 512, 631])
)
WINDOWS = st.sampled_from([None, 1, 7, 200])


def resident() -> int:
    """Bytes of memory in use."""
    return int(STATM.read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def make_cache(num_rows: int = 1, num_slots: int = 1, **settings) -> KVCache:
    shape = {"num_layers": NUM_LAYERS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    shape |= {"dtype": torch.float32, "device": torch.device("cpu")} | settings
    return KVCache(num_rows=num_rows, num_slots=num_slots, **shape)


def fill(cache: KVCache, seed: int = 0) -> torch.Generator:
    """Random keys and values in every slot, scratch or not."""
    generator = torch.Generator().manual_seed(seed)
    cache.keys.normal_(generator=generator)
    cache.values.normal_(generator=generator)
    return generator


def visible(position: int, window: int | None) -> range:
    """Slots that a position may read."""
    return range(0 if window is None else max(0, position - window + 1), position + 1)


def naive_attention(query, keys, values, position, window):
    """One position in float64: ``(head, dim)`` over ``(slot, kv_head, dim)``."""
    seen = list(visible(position, window))
    group = query.shape[0] // keys.shape[1]
    out = []
    for head, q in enumerate(query.double()):
        k, v = keys[seen, head // group].double(), values[seen, head // group].double()
        out.append((k @ q / math.sqrt(len(q))).softmax(0) @ v)
    return torch.stack(out)


@pytest.mark.skipif(not STATM.exists(), reason="only Linux tells so how much memory is in use")
def test_passes_are_timed_over_memory_that_is_there(wrap, monkeypatch):
    """Else all their reads are of one page of zeros, which is always at hand."""
    made, new_cache = [], DecoderStack.new_cache

    def large(stack: DecoderStack, *, num_rows: int, num_slots: int) -> KVCache:
        made.append(new_cache(stack, num_rows=num_rows, num_slots=num_slots + 2**16))
        return made[-1]

    lm = wrap("exit")
    monkeypatch.setattr(DecoderStack, "new_cache", large)
    before = resident()
    passes = Passes(lm.stack, lm.plan, None, (512, 16))
    assert [passes.cache, passes.many] == made
    assert resident() - before > 0.9 * sum(cache.nbytes for cache in made)


@pytest.mark.skipif(not STATM.exists(), reason="only Linux tells so how much memory is in use")
def test_memory_is_taken_where_something_is_written():
    """A limit of 65,536 tokens is no text of as many."""
    before = resident()
    cache = make_cache(num_rows=4, num_slots=2**16, head_dim=64)
    cache.keys[:, 1, :100] = 1.0
    cache.release(1, 133)
    assert cache.nbytes == 2**29
    assert resident() - before < 2**25
    assert not cache.keys[:, 1].any()


@pytest.mark.skipif(not STATM.exists(), reason="only Linux tells so how much memory is in use")
def test_a_larger_cache_takes_memory_for_what_each_row_holds():
    cache = make_cache(num_rows=8, num_slots=2**13, head_dim=64)
    for row, length in enumerate([8000, 5]):
        cache.keys[:, row, :length] = cache.values[:, row, :length] = row + 1.0
        cache.commit(row, length)
    before = resident()
    larger = cache.grown(num_rows=64, num_slots=1)
    assert resident() - before < 2**25
    assert larger.nbytes == 2**30
    for row in range(8):
        assert torch.equal(larger._both[:, :, row], cache._both[:, :, row])


def test_a_cache_of_nothing_is_one():
    assert make_cache(num_rows=0).nbytes == 0


def test_what_memory_cannot_hold_is_out_of_memory():
    """As torch says it of a GPU: who asked for more than is needed asks for less."""
    for num_rows in (2**30, 2**45):
        with pytest.raises(torch.OutOfMemoryError, match=r"^no memory for a cache of \d+ bytes$"):
            make_cache(num_rows=num_rows, num_slots=2**14)


@given(st.lists(st.tuples(st.sampled_from(["commit", "release"]), st.integers(0, 2))))
def test_lengths_are_counted_per_row(steps):
    cache, expected = make_cache(num_rows=3), [0, 0, 0]
    before = cache.keys.clone()
    for number, (action, row) in enumerate(steps):
        if action == "commit":
            cache.commit(row, number)
            expected[row] += number
        else:
            cache.release(row)
            expected[row] = 0
        assert cache.lengths.tolist() == expected
    assert torch.equal(cache.keys, before)


@given(st.integers(1, 3), st.integers(1, 1100), st.integers(1, 4), st.integers(1, 1600))
@settings(max_examples=25)
def test_growing_keeps_what_was_held(rows, slots, more_rows, more_slots):
    cache = make_cache(rows, slots, attended_block=128)
    fill(cache)
    for row in range(rows):
        cache.commit(row, 10 + row)
        cache.adapter_lengths[row] = 3 + row  # the block lags behind
    larger = cache.grown(num_rows=more_rows, num_slots=more_slots)
    assert larger.num_rows == (rows if more_rows <= rows else max(more_rows, 2 * rows))
    assert larger.num_slots >= max(slots, more_slots)
    assert larger.num_slots % 128 == 0
    assert larger.attended_block == 128
    expected = [10 + row for row in range(rows)] + [0] * (larger.num_rows - rows)
    assert larger.lengths.tolist() == expected
    assert larger.adapter_lengths[:rows] == cache.adapter_lengths
    for old, new in ((cache.keys, larger.keys), (cache.values, larger.values)):
        for row in range(rows):
            assert torch.equal(new[:, row, : 10 + row], old[:, row, : 10 + row])
            assert torch.count_nonzero(new[:, row, 10 + row :]) == 0
        assert torch.count_nonzero(new[:, rows:]) == 0  # a NaN there would survive any mask


@pytest.mark.parametrize("longer", [0, 7])
def test_rows_that_join_one_by_one_copy_their_history_about_once(longer):
    """As many bytes as there are in the end; growing by one would copy 16 times as many."""
    cache, length, copied = make_cache(attended_block=8), 20, 0
    for row in range(32):
        slots = length + longer * row
        if row >= cache.num_rows or slots > cache.num_slots:
            copied += int(cache.lengths.sum())
            cache = cache.grown(num_rows=row + 1, num_slots=slots)
        cache.commit(row, slots)
    ways = 2 if longer else 1  # rows and slots double each for itself
    assert copied <= ways * int(cache.lengths.sum())
    assert cache.num_rows == 32


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])  # a GPU's, a CPU's
def test_without_room_to_double_a_cache_grows_as_far_as_asked(monkeypatch, error):
    cache, resized = make_cache(num_rows=4, num_slots=64, attended_block=64), KVCache._resized

    def limited(self, num_rows, num_slots):
        if num_rows * num_slots > 5 * 64:
            raise error
        assert sys.exception() is None, "the error still holds the memory of the first try"
        return resized(self, num_rows, num_slots)

    monkeypatch.setattr(KVCache, "_resized", limited)
    larger = cache.grown(num_rows=5, num_slots=60)
    assert (larger.num_rows, larger.num_slots) == (5, 64)


def test_a_cache_is_two_tensors():
    cache = make_cache(num_rows=2, num_slots=600, dtype=torch.bfloat16)
    assert cache.num_slots == 1024
    assert cache.nbytes == 2 * NUM_LAYERS * 2 * 1024 * KV_HEADS * HEAD_DIM * 2
    assert cache.layer_keys[1].data_ptr() == cache.keys[1].data_ptr()
    assert cache.lengths.dtype == torch.int32


@given(st.integers(0, 1016), st.sampled_from([8, 16]), st.sampled_from([1, 2, 4]), WINDOWS)
def test_causal_rows_are_the_mask_written_out(start, tile, group, window):
    cache = MASKED
    mask = cache.causal_rows(start, tile, group, window)
    assert mask.shape[0] == group * tile
    assert mask.shape[1] == min(1024, math.ceil((start + tile) / 128) * 128)
    for row in range(group * tile):
        seen = visible(start + row % tile, window)
        expected = torch.full((mask.shape[1],), -math.inf)
        expected[seen.start : seen.stop] = 0.0
        assert torch.equal(mask[row], expected)


MASKED = make_cache(num_slots=1024, attended_block=128)


@pytest.mark.parametrize("block", [128, 512])
@pytest.mark.parametrize("end", [127, 128, 129, 511, 512, 513, 1024])
def test_masks_are_whole_blocks_wide_and_no_copies(block, end):
    cache = make_cache(num_slots=1024, attended_block=block)
    mask = cache.causal_rows(end - 8, 8, 1, None)
    assert mask.shape[1] == math.ceil(end / block) * block
    other = cache.causal_rows(3, 8, 1, None)
    assert mask.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_few_masks_are_kept_however_many_lengths_a_pass_may_have():
    cache = make_cache(num_slots=1024, attended_block=128)
    masks = [cache.causal_rows(5, tile, 1, None) for tile in range(1, 2 * MOST_RAMPS)]
    assert len(cache._ramps) == MOST_RAMPS
    for mask in (*masks, cache.causal_rows(5, 3, 1, None)):
        assert [int((row == 0.0).sum()) for row in mask] == [*range(6, 6 + len(mask))]


@dataclass(frozen=True)
class Pass:
    """A ragged decode pass: segments, the shape of its layout and its windows per layer.

    Attributes:
        tiles: positions that attention may take at once, ascending.
        block: of slots that are attended to.
    """

    segments: tuple[Segment, ...]
    group: int
    tiles: tuple[int, ...]
    block: int
    windows: tuple[int | None, int | None]

    def tile(self, count: int) -> int:
        """As ``Exactness.tile`` has it; without tiles, as with ``exact=False``."""
        if not self.tiles:
            return count
        return next((t for t in self.tiles if t >= count), self.tiles[-1])

    def cache(self) -> KVCache:
        return make_cache(num_rows=4, num_slots=600, attended_block=self.block)


@st.composite
def passes(draw) -> Pass:
    rows = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True))
    segments = tuple(Segment(r, draw(STARTS), draw(st.integers(1, 9))) for r in rows)
    tiles = draw(st.sampled_from([(8,), (16,), (1, 8), (1, 2, 4, 8), ()]))
    shape = draw(st.sampled_from([1, 2, 4])), tiles, draw(st.sampled_from([1, 128]))
    return Pass(segments, *shape, (draw(WINDOWS), draw(WINDOWS)))


def lay_out(cache: KVCache, case: Pass) -> PassLayout:
    tokens = sum(s.count for s in case.segments)
    return PassLayout(
        cache,
        case.segments,
        num_rows=math.ceil(tokens / 16) * 16,
        group=case.group,
        tile=case.tile,
        product_rows=64,
        windows=case.windows,
        all_positions=POSITIONS,
    )


def token_places(segments) -> list[tuple[int, int]]:
    """(row, slot) of each token, in the order of the pass."""
    return [(s.row, s.start + i) for s in segments for i in range(s.count)]


def write(layout, cache: KVCache, places, layer: int, generator: torch.Generator) -> None:
    """Append to the cache through the layout, and check that nothing but ``places`` changed."""
    shape = (layout.num_rows, KV_HEADS, HEAD_DIM)
    new_keys, new_values = (torch.randn(shape, generator=generator) for _ in range(2))
    keys, values = cache.keys.clone(), cache.values.clone()
    for token, (row, slot) in enumerate(places):
        keys[layer, row, slot] = new_keys[token]
        values[layer, row, slot] = new_values[token]
    layout.append(new_keys, new_values, layer)
    assert torch.equal(cache.keys, keys)
    assert torch.equal(cache.values, values)


def check_attention(layout, cache: KVCache, places, layer, window, heads, generator) -> None:
    query = torch.randn(layout.num_rows, heads, HEAD_DIM, generator=generator)
    out = layout.attend(query, layer, HEAD_DIM**-0.5)
    assert out.shape == query.shape
    for token, (row, slot) in enumerate(places):
        keys, values = cache.keys[layer, row], cache.values[layer, row]
        expected = naive_attention(query[token], keys, values, slot, window)
        torch.testing.assert_close(out[token].double(), expected, atol=2e-6, rtol=2e-6)


@given(passes())
@settings(max_examples=60)
def test_a_pass_writes_its_tokens_and_reads_what_they_may_see(case):
    cache = case.cache()
    generator = fill(cache)
    layout, places = lay_out(cache, case), token_places(case.segments)
    assert layout.positions[0, : len(places)].tolist() == [slot for _, slot in places]
    for layer, window in enumerate(case.windows):
        write(layout, cache, places, layer, generator)
        heads = KV_HEADS * case.group
        check_attention(layout, cache, places, layer, window, heads, generator)


@given(passes())
@settings(max_examples=30)
def test_huge_scratch_changes_no_bit(case):
    """Slots behind the tokens' own are masked: what lies there must not come through."""
    cache = case.cache()
    generator = fill(cache)
    layout, heads = lay_out(cache, case), KV_HEADS * case.group
    query = torch.randn(layout.num_rows, heads, HEAD_DIM, generator=generator)
    tokens = layout.num_tokens
    before = layout.attend(query, 0, 1.0)[:tokens].clone()
    for s in case.segments:
        cache.keys[:, s.row, s.start + s.count :] = 1e30
        cache.values[:, s.row, s.start + s.count :] = -1e30
    assert torch.equal(layout.attend(query, 0, 1.0)[:tokens], before)


@st.composite
def lone_calls(draw) -> list[AttentionCall]:
    """One call for each of some rows, ascending."""
    rows = sorted(draw(st.sets(st.integers(0, 31), min_size=1, max_size=8)))
    sizes = st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([128, 512, 1024]))
    return [AttentionCall(row, (row,), *draw(sizes)) for row in rows]


@given(lone_calls())
def test_rows_share_a_call_where_that_costs_least(rows):
    found = attention_calls(rows, CALL)
    at = {x.first + i: (x, start) for x in found for i, start in enumerate(x.starts)}
    assert len(at) == sum(len(x.starts) for x in found)
    for row in rows:
        call, start = at.pop(row.first)
        assert (start, call.tile >= row.tile, call.slots >= row.slots) == (row.first, True, True)
    assert all(start == 0 for _, start in at.values()), "rows between them have no tokens"

    def cost(calls: list[AttentionCall]) -> int:
        return sum(len(x.starts) * (x.tile + 1) * x.slots + CALL for x in calls)

    for cuts in itertools.product((False, True), repeat=len(rows) - 1):
        ways = rows[:1]
        for row, cut in zip(rows[1:], cuts, strict=True):
            ways[-1:] = [ways[-1], row] if cut else [ways[-1].joined(row)]
        assert cost(found) <= cost(ways)


@given(lone_calls())
def test_rows_that_share_a_call_have_what_one_of_them_needs(rows):
    (found,) = attention_calls(rows, NEVER)
    starts = [0] * (rows[-1].end - rows[0].first)
    for row in rows:
        starts[row.first - rows[0].first] = row.first
    wanted = max(r.tile for r in rows), max(r.slots for r in rows)
    assert found == AttentionCall(rows[0].first, tuple(starts), *wanted)


def test_a_long_draft_and_a_long_context_are_their_rows_own():
    """With 32 rows: what one of them needs was once computed for all."""
    cache = make_cache(num_rows=32, num_slots=1024, attended_block=512)

    def work(segments) -> int:
        layout = PassLayout(
            cache,
            segments,
            num_rows=64,
            group=1,
            tile=lambda count: 1 if count == 1 else 8,
            product_rows=64,
            windows=(None,),
            all_positions=POSITIONS,
        )
        return sum(len(x.starts) * x.tile * x.slots for x in layout.calls)

    plain = [Segment(r, 60, 1) for r in range(32)]
    assert work(plain) == 32 * 512
    drafting = [Segment(r, 60, 17 if r == 5 else 1) for r in range(32)]
    assert work(drafting) == (31 + 17) * 512
    far = [Segment(r, 700 if r == 5 else 60, 1) for r in range(32)]
    assert work(far) == (32 + 1) * 512
    assert work([Segment(r, 60, 1) for r in (0, 31)]) == 2 * 512


@given(st.integers(0, 3), STARTS, st.integers(1, 40), st.sampled_from([1, 2, 4]), WINDOWS)
@settings(max_examples=40)
def test_a_chunk_of_prompt_is_attended_exactly(row, start, count, group, window):
    cache = make_cache(num_rows=4, num_slots=600)
    generator = fill(cache)
    segment = Segment(row, start, count)
    layout = PrefillLayout(cache, segment, windows=(None, window), all_positions=POSITIONS)
    places = token_places([segment])
    assert layout.positions[0].tolist() == [slot for _, slot in places]
    for layer, seen in enumerate((None, window)):
        write(layout, cache, places, layer, generator)
        check_attention(layout, cache, places, layer, seen, KV_HEADS * group, generator)


@pytest.mark.parametrize(("start", "end"), [(0, 3), (5, 200), (120, 10_000), (7, 7)])
def test_sweeping_empties_scratch_slots_of_one_row(start, end):
    cache = make_cache(num_rows=2, attended_block=128)
    fill(cache)
    cache.keys[:, 1, start:end] = math.nan
    before = cache.keys.clone(), cache.values.clone()
    cache.sweep(1, start, end)
    for tensor, old in zip((cache.keys, cache.values), before, strict=True):
        assert torch.count_nonzero(tensor[:, 1, start:end]) == 0
        tensor[:, 1, start:end] = old[:, 1, start:end]
        torch.testing.assert_close(tensor, old, rtol=0, atol=0, equal_nan=True)


def test_spare_rows_have_legal_positions_and_every_slot_its_own():
    """A learned table ends; slots do not follow the clamped positions."""
    cache = make_cache(num_rows=2, num_slots=128)
    table = POSITIONS.clamp(max=19)
    segments = [Segment(0, 18, 1), Segment(1, 3, 2)]
    layout = PassLayout(
        cache,
        segments,
        num_rows=8,
        group=1,
        tile=lambda longest: 8,
        product_rows=64,
        windows=(None,),
        all_positions=table,
    )
    assert layout.positions[0].tolist() == [18, 3, 4, 0, 0, 0, 0, 0]
    single = PassLayout(
        cache,
        segments[:1],
        num_rows=8,
        group=1,
        tile=lambda longest: 8,
        product_rows=64,
        windows=(None,),
        all_positions=table,
    )
    assert single.positions[0].tolist() == [18, 19, 19, 19, 19, 19, 19, 19]
    assert single.num_visible == cache.num_slots
