"""decode_attention and rope_append_kv: against float64, and a row's bits."""

import pytest
import torch
from backends import forget_steps
from measure import ROUNDING, error, exactly, mirrored

import layerskip.ops.kernels
from layerskip.ops import definitions
from layerskip.ops.catalog import HEAD_DIMS, SPLIT_KEYS

SLOTS = 300
LENGTHS = [0, 1, 62, 63, 64, 65, 254, 255, 256, 257]  # before the append: sums end around blocks


def make_case(backend, dtype, *, lengths, seqlen=1, heads=4, heads_k=2, dim=64, slots=SLOTS):
    """q, caches whose unwritten slots are NaN, and lengths."""
    batch = len(lengths)
    q = backend.noise(batch, seqlen, heads, dim, dtype=dtype)
    caches = [backend.noise(batch, slots, heads_k, dim, dtype=dtype) for _ in range(2)]
    for cache in caches:
        for row, length in zip(cache, lengths, strict=True):
            row[max(length, 0) + seqlen :] = float("nan")
    return q, *caches, backend.tensor(lengths)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("seqlen", [1, 5])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_attention_at_the_borders_of_blocks(backend, dtype, group, seqlen):
    case = make_case(backend, dtype, lengths=LENGTHS, seqlen=seqlen, heads=group, heads_k=1)
    want = exactly(definitions.decode_attention, *case)
    got = backend.ops.decode_attention(*case)
    for b in range(len(LENGTHS)):
        # The weights are rounded, and so is the answer.
        assert error(got[b], want[b]) < ROUNDING[dtype], LENGTHS[b]


def test_more_splits_than_a_block_of_threads_combines_at_a_time(backend, dtype):
    slots = 130 * SPLIT_KEYS
    case = make_case(backend, dtype, lengths=[slots - 9], heads=1, heads_k=1, dim=256, slots=slots)
    want = exactly(definitions.decode_attention, *case)
    assert error(backend.ops.decode_attention(*case), want) < ROUNDING[dtype]


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("lengths", [[257], [63, 0, 255], [5, -1, 64, 0, 1, 254, 66, -1]])
def test_attention_of_ragged_batches(backend, dtype, dim, lengths):
    case = make_case(backend, dtype, lengths=lengths, seqlen=3, heads=8, dim=dim)
    want = exactly(definitions.decode_attention, *case)
    got = backend.ops.decode_attention(*case)
    assert error(got, want) < ROUNDING[dtype]
    assert all(not got[b].any() for b, length in enumerate(lengths) if length < 0)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 64},
        {"window": 100, "softmax_scale": 0.3},
        {"softcap": 3.0},
        {"sinks": True},
        {"sinks": True, "window": 70, "softcap": 5.0},
    ],
)
def test_windows_softcap_and_sinks(backend, dtype, options):
    case = make_case(backend, dtype, lengths=[0, 63, 257, -1], seqlen=4, heads=8)
    if options.get("sinks"):
        options = options | {"sinks": backend.noise(8, dtype=torch.float32, scale=2.0)}
    want = exactly(definitions.decode_attention, *case, **options)
    assert error(backend.ops.decode_attention(*case, **options), want) < ROUNDING[dtype]


def test_a_sink_may_be_no_sink(backend, dtype):
    case = make_case(backend, dtype, lengths=[70, -1], seqlen=2)
    none = torch.full((4,), float("-inf")).to(backend.device)
    got = backend.ops.decode_attention(*case, sinks=none)
    assert not got.isnan().any()
    want = exactly(definitions.decode_attention, *case)
    assert error(got, want) < ROUNDING[dtype]


def test_a_window_far_from_the_start_skips_splits(backend, dtype):
    case = make_case(backend, dtype, lengths=[590, 511], seqlen=9, heads=4, slots=600)
    for window in (5, 80, 300):
        want = exactly(definitions.decode_attention, *case, window=window)
        got = backend.ops.decode_attention(*case, window=window)
        assert error(got, want) < ROUNDING[dtype]


def test_a_window_is_the_slots_in_it(backend, dtype):
    q, k, v, lengths = make_case(backend, dtype, lengths=[256])
    windowed = backend.ops.decode_attention(q, k, v, lengths, window=40)
    inside = [t[:, 217:257].contiguous() for t in (k, v)]
    alone = backend.ops.decode_attention(q, *inside, backend.tensor([39]))
    assert error(windowed, alone.cpu().double()) < 2 * ROUNDING[dtype]  # other blocks, other bits


def test_caches_may_be_views_with_strides(backend, dtype):
    q, k, v, lengths = make_case(backend, dtype, lengths=[70, 3], seqlen=2)
    want = backend.ops.decode_attention(q, k, v, lengths)
    by_head = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)]
    assert torch.equal(backend.ops.decode_attention(q, *by_head, lengths), want)
    packed = torch.cat([q, q], dim=2)[:, :, :4]
    assert torch.equal(backend.ops.decode_attention(packed, k, v, lengths), want)


def make_cancelling(kernels, dtype, *, lengths, **shape):
    """A case in which a key has several values, which add up to little more than roundings."""
    q, k, v, table = make_case(kernels, dtype, lengths=lengths, **shape)
    for cache, sign in ((k, 1), (v, -1)):
        cache.nan_to_num_(1.0)
        half = cache[:, : SLOTS // 2].transpose(1, 3)
        cache[:] = mirrored(half, sign).transpose(1, 3)
    return q, k, v, table


OPTIONS = [{}, {"window": 90, "softcap": 4.0}]


@pytest.fixture(params=["apart", "together"])
def tiles(request, monkeypatch):
    """Blocks of one tile each, as where there are few; or of several, as in large batches."""
    if request.param == "together":
        monkeypatch.setattr(layerskip.ops.kernels, "FEW_BLOCKS", 0)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "windowed"])
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (4, 128), (8, 80), (3, 64), (2, 256)])
def test_a_position_has_the_same_bits_alone_and_among_16(kernels, dtype, group, dim, options):
    start = SPLIT_KEYS - 5  # the new positions lie on both sides of a split's border
    shape = {"seqlen": 16, "heads": group, "heads_k": 1, "dim": dim}
    q, k, v, _ = make_cancelling(kernels, dtype, lengths=[start], **shape)
    together = kernels.ops.decode_attention(q, k, v, kernels.tensor([start]), **options)
    for first, count in [(0, 1), (4, 1), (5, 1), (15, 1), (0, 2), (3, 5), (1, 15)]:
        here = slice(first, first + count)
        got = kernels.ops.decode_attention(
            q[:, here], k, v, kernels.tensor([start + first]), **options
        )
        assert torch.equal(got, together[:, here]), (first, count)


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "windowed"])
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(kernels, dtype, options):
    lengths = [255, 0, -1, 64, 1, 257, 130, 63]
    q, k, v, table = make_cancelling(kernels, dtype, lengths=lengths, seqlen=3, heads=8)
    together = kernels.ops.decode_attention(q, k, v, table, **options)
    for b in range(len(lengths)):
        here = slice(b, b + 1)
        alone = kernels.ops.decode_attention(q[here], k[here], v[here], table[here], **options)
        assert torch.equal(alone[0], together[b])


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "windowed"])
def test_the_tiles_of_a_block_change_no_bit(kernels, dtype, options, monkeypatch):
    shape = {"seqlen": 16, "heads": 8, "heads_k": 2}
    case = make_cancelling(kernels, dtype, lengths=[250, 3, -1, 64], **shape)
    apart = kernels.ops.decode_attention(*case, **options)
    monkeypatch.setattr(layerskip.ops.kernels, "FEW_BLOCKS", 0)
    forget_steps(kernels)
    assert torch.equal(kernels.ops.decode_attention(*case, **options), apart)


def test_slots_that_are_not_looked_at_change_no_bit(kernels, dtype):
    q, k, v, lengths = make_case(kernels, dtype, lengths=[250], seqlen=2)
    want = kernels.ops.decode_attention(q, k, v, lengths)
    longer = [torch.cat([t, torch.full_like(t, float("inf"))], dim=1) for t in (k, v)]
    assert torch.equal(kernels.ops.decode_attention(q, *longer, lengths), want)
    k[:, 252:], v[:, 252:] = 7.0, float("-inf")
    assert torch.equal(kernels.ops.decode_attention(q, k, v, lengths), want)
    shorter = [t[:, :252] for t in (k, v)]
    assert torch.equal(kernels.ops.decode_attention(q, *shorter, lengths), want)


def make_rope(backend, dtype, *, lengths, seqlen, dim, rotary_dim, heads=4, heads_k=2, slots=72):
    shape = (len(lengths), seqlen, heads + 2 * heads_k, dim)
    packed = backend.noise(*shape, dtype=dtype)  # as one product gives it: views with strides
    q, k, v = packed.split([heads, heads_k, heads_k], dim=2)
    caches = [
        torch.full((len(lengths), slots, heads_k, dim), float("nan"), dtype=dtype).to(
            backend.device
        )
        for _ in range(2)
    ]
    half = torch.arange(0, rotary_dim, 2) / rotary_dim
    angles = torch.outer(torch.arange(70.0), 10_000.0**-half)
    tables = [angles.cos().to(backend.device), angles.sin().to(backend.device)]
    return [q, k, v, *caches, *tables, backend.tensor(lengths)]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (80, 32), (96, 96), (128, 2), (6, 4)])
@pytest.mark.parametrize("lengths", [[63], [0, -1, 65], [1, 64, 69, 0, 71, 7, -1, 67]])
def test_rope_and_append(backend, dtype, dim, rotary_dim, lengths, interleaved):
    args = make_rope(backend, dtype, lengths=lengths, seqlen=3, dim=dim, rotary_dim=rotary_dim)
    wide = [a.cpu().double() if a.dtype == dtype else a.cpu().clone() for a in args]
    definitions.rope_append_kv(*wide, interleaved=interleaved)
    backend.ops.rope_append_kv(*args, interleaved=interleaved)
    for got, want in zip(args[:5], wide[:5], strict=True):
        written = ~want.isnan()
        assert torch.equal(got.isnan().cpu(), ~written)  # nothing else is written
        assert error(got.cpu()[written], want[written]) < ROUNDING[dtype]
    v, v_cache = args[2], args[4]
    for b, length in enumerate(lengths):
        slots = range(length, min(length + 3, 70)) if length >= 0 else ()
        for t, slot in enumerate(slots):
            assert torch.equal(v_cache[b, slot], v[b, t])


def test_rope_has_the_same_bits_alone_and_in_a_batch(kernels, dtype):
    lengths = [3, 60, 0, 17]
    args = make_rope(kernels, dtype, lengths=lengths, seqlen=4, dim=64, rotary_dim=64)
    apart = [a.clone() for a in args]
    kernels.ops.rope_append_kv(*args)
    for b, length in enumerate(lengths):
        for t in range(4):
            q, k, v = (a[b : b + 1, t : t + 1] for a in apart[:3])
            caches = [a[b : b + 1] for a in apart[3:5]]
            kernels.ops.rope_append_kv(q, k, v, *caches, *args[5:7], kernels.tensor([length + t]))
    assert torch.equal(apart[0], args[0])
    for got, want in zip(apart[3:5], args[3:5], strict=True):
        assert torch.equal(got.nan_to_num(9.0), want.nan_to_num(9.0))
