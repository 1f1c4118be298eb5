import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from layerskip.ops.definitions import rms_norm
from layerskip.ops.reference import (
    UNIFORM_BITS,
    Philox,
    decode_attention,
    gumbel_from_bits,
    gumbel_noise,
    prefill_attention,
)

BLOCK = 2**20
MASK_64 = 2**64 - 1


def naive_attention(q, k, v, mask, scale):
    """Float64, head by head; ``mask`` is ``(seqlen, seqlen_cache)``."""
    group = q.shape[2] // k.shape[2]
    out = torch.empty(q.shape, dtype=torch.float64)
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        keys, values = k[b, :, h // group].double(), v[b, :, h // group].double()
        scores = q[b, :, h].double() @ keys.T * scale + mask.double()
        out[b, :, h] = scores.softmax(-1) @ values
    return out


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize(("batch", "seqlen", "slots"), [(1, 8, 40), (3, 5, 128), (2, 1, 7)])
def test_decode_attention_is_attention(group, batch, seqlen, slots):
    generator = torch.Generator().manual_seed(group)
    q = torch.randn(batch, seqlen, 2 * group, 10, generator=generator)
    k, v = (torch.randn(batch, slots, 2, 10, generator=generator) for _ in range(2))
    # Slot 0 stays visible: a query that sees nothing has no answer.
    hidden = torch.rand(seqlen, slots, generator=generator) < 0.5
    hidden[:, 0] = False
    mask = torch.zeros(seqlen, slots).masked_fill_(hidden, -math.inf)
    expected = naive_attention(q, k, v, mask, 0.3)
    got = decode_attention(q, k, v, mask.repeat(group, 1)[None, None], 0.3)
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=2e-6)
    got = prefill_attention(q, k, v, mask[None, None], 0.3)
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=2e-6)


class OnCuda(TorchFunctionMode):
    """Tensors that say they are on a GPU; what attention is asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == torch.Tensor.device.__get__:  # a new wrapper each time
            return torch.device("cuda")
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.asked.append(kwargs)
        return func(*args, **(kwargs or {}))


def test_a_gpu_is_asked_for_no_grouped_heads_beside_a_mask():
    # None of its fast kernels takes both; by what is left a chunk holds all of its scores.
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, 5, 6, 16, generator=generator)
    k, v = (torch.randn(1, 9, 2, 16, generator=generator) for _ in range(2))
    mask = torch.full((5, 9), -math.inf).triu(5)
    with OnCuda() as gpu:
        got = prefill_attention(q, k, v, mask[None, None], 0.3)
    (asked,) = gpu.asked
    assert asked["attn_mask"] is not None
    assert not asked["enable_gqa"]
    expected = naive_attention(q, k, v, mask, 0.3)
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=2e-6)


def naive_changed_attention(q, k, v, mask, scale, softcap, sinks):
    """As ``naive_attention``, with capped scores and a sink per head."""
    group = q.shape[2] // k.shape[2]
    out = torch.empty(q.shape, dtype=torch.float64)
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        keys, values = k[b, :, h // group].double(), v[b, :, h // group].double()
        scores = q[b, :, h].double() @ keys.T * scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        weights = (scores + mask.double()).exp()
        beside = math.exp(sinks[h]) if sinks is not None else 0.0
        out[b, :, h] = weights @ values / (weights.sum(-1, keepdim=True) + beside)
    return out


@pytest.mark.parametrize("sinks", [None, torch.tensor([2.0, -1.0, 0.5, 3.0])])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize(("batch", "seqlen", "slots"), [(1, 8, 40), (3, 5, 256), (2, 1, 300)])
def test_capped_attention_with_sinks_is_its_formula(batch, seqlen, slots, softcap, sinks):
    generator = torch.Generator().manual_seed(seqlen)
    q = torch.randn(batch, seqlen, 4, 10, generator=generator)
    k, v = (torch.randn(batch, slots, 2, 10, generator=generator) for _ in range(2))
    hidden = torch.rand(seqlen, slots, generator=generator) < 0.5
    hidden[:, :130] = slots > 130  # the first block of keys is masked as a whole
    hidden[:, -1] = False
    mask = torch.zeros(seqlen, slots).masked_fill_(hidden, -math.inf)
    expected = naive_changed_attention(q, k, v, mask, 0.3, softcap, sinks)
    got = decode_attention(q, k, v, mask.repeat(2, 1)[None, None], 0.3, softcap, sinks)
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=2e-6)
    got = prefill_attention(q, k, v, mask[None, None], 0.3, softcap, sinks)
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_blocks_leave_the_bits_of_capped_attention_alone(dtype):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 8, 4, 16, generator=generator).to(dtype)
    k, v = (torch.randn(1, 1024, 2, 16, generator=generator).to(dtype) for _ in range(2))
    mask = torch.zeros(1, 1, 16, 1024, dtype=dtype)
    mask[..., 100:] = -math.inf
    sinks = torch.zeros(4, dtype=dtype)
    outputs = [
        decode_attention(q, k[:, :end], v[:, :end], mask[..., :end], 0.3, 5.0, sinks)
        for end in (128, 256, 1024)
    ]
    assert outputs[0].dtype == dtype
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def in_odd_pieces(bits: np.ndarray) -> np.ndarray:
    """The noise of ``bits``, computed in pieces of 1, 2, 5, 12, ... entries."""
    parts, start, size = [], 0, 1
    while start < len(bits):
        parts.append(gumbel_from_bits(bits[start : start + size]))
        start, size = start + size, 2 * size + 3
    return np.concatenate(parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_norm_has_the_bits_of_its_formula(dtype):
    """And leaves what it is given alone."""
    x, weight = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, 96), (96,)))
    x, weight = (3.0 * x).to(dtype), weight.to(dtype)
    given, wide = x.clone(), x.to(torch.promote_types(dtype, torch.float32))
    wanted = (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)).to(dtype) * weight
    assert torch.equal(rms_norm(x, weight, eps=1e-5), wanted)
    assert torch.equal(x, given)


def test_noise_has_the_same_bits_for_every_uniform_in_any_shape():
    """All 2**24: another shape, stride, offset or library takes other vector loops."""
    for first in range(0, 2**UNIFORM_BITS, BLOCK):
        bits = np.arange(first, first + BLOCK, dtype=np.uint32)
        whole = gumbel_from_bits(bits)
        assert whole.dtype == np.float32
        assert np.isfinite(whole).all()
        assert np.array_equal(in_odd_pieces(bits), whole)
        table = gumbel_from_bits(bits.reshape(-1, 4).T)  # strided: column c holds 4c .. 4c + 3
        assert np.array_equal(table.T.ravel(), whole)
        u = (torch.from_numpy(bits.astype(np.float64)) + 0.5) * 2.0**-UNIFORM_BITS
        assert np.array_equal((-torch.log(-torch.log(u))).float().numpy(), whole)


def test_noise_is_what_scalar_arithmetic_gives():
    edges = [0, 1, 2, 2**23 - 1, 2**23, 2**24 - 2, 2**24 - 1]
    sample = edges + random.Random(0).choices(range(2**24), k=20_000)
    got = gumbel_from_bits(np.array(sample, dtype=np.uint32))
    expected = [-math.log(-math.log((b + 0.5) / 2**24)) for b in sample]
    assert np.array_equal(got, np.array(expected).astype(np.float32))


def test_noise_grows_with_its_uniform_and_is_gumbel_distributed():
    noise = [
        gumbel_from_bits(np.arange(first, first + BLOCK, dtype=np.uint32)).astype(np.float64)
        for first in range(0, 2**UNIFORM_BITS, BLOCK)
    ]
    assert all((np.diff(part) >= 0).all() for part in noise)
    mean = sum(part.sum() for part in noise) / 2**UNIFORM_BITS
    square = sum((part**2).sum() for part in noise) / 2**UNIFORM_BITS
    # Each uniform once, so these are midpoint sums of the integrals, not samples of them.
    assert mean == pytest.approx(0.5772156649, abs=1e-5)
    assert square - mean**2 == pytest.approx(math.pi**2 / 6, abs=1e-4)


def philox_block(seed: int, counter: int, position: int) -> list[int]:
    """Philox4x64-10 as in Salmon et al. 2011, in Python's integers."""
    c, key = [counter, position, 0, 0], [seed, 0]
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(b >> 64) ^ c[1] ^ key[0], b & MASK_64, (a >> 64) ^ c[3] ^ key[1], a & MASK_64]
        key = [(key[0] + 0x9E3779B97F4A7C15) & MASK_64, (key[1] + 0xBB67AE8584CAA73B) & MASK_64]
    return c


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 0), (0, 1), (2**63 - 1, 131_071)])
def test_uniforms_are_the_documented_philox_stream(seed, position):
    expected = []
    for token in range(19):
        word = philox_block(seed, 1 + token // 8, position)[token // 2 % 4]
        half = word >> 32 if token % 2 else word & 0xFFFFFFFF
        expected.append(half >> 8)
    assert Philox(seed).bits(position, 19).tolist() == expected


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**20), st.integers(1, 700), st.integers(1, 700))
def test_a_token_s_uniform_does_not_depend_on_the_vocabulary(seed, position, one, other):
    small, large = sorted([one, other])
    first = Philox(seed).bits(position, large)
    assert first.max() < 2**UNIFORM_BITS
    assert np.array_equal(Philox(seed).bits(position, small), first[:small])


def test_seeds_positions_and_tokens_all_matter():
    streams = [Philox(s).bits(p, 4096) for s in range(4) for p in range(4)]
    for i, one in enumerate(streams):
        assert len(np.unique(one)) > 4000  # 0.5 collisions expected within 4096 of 2**24
        for other in streams[:i]:
            assert np.count_nonzero(one == other) <= 3  # 0.0002 expected


def test_a_generator_that_is_kept_says_the_same_whatever_it_was_asked_before():
    draw, numbers = random.Random(0), Philox(2**63 - 1)
    for _ in range(200):
        key = draw.choice((0, 7, 2**33)), draw.choice((1, 2, 7, 331))
        use = {"stream": draw.randrange(3), "start": draw.choice((0, 900))}
        generator = np.random.Philox(
            counter=[0, key[0], use["start"], use["stream"]], key=[2**63 - 1, 0]
        )
        words = generator.random_raw((key[1] + 1) // 2)
        halves = [half >> 8 for word in words.tolist() for half in (word % 2**32, word >> 32)]
        assert numbers.bits(*key, **use).tolist() == halves[: key[1]]


def test_noise_of_a_position_is_made_from_its_uniforms():
    noise = gumbel_noise(7, 12, 331)
    assert noise.dtype == torch.float32
    assert np.array_equal(noise.numpy(), gumbel_from_bits(Philox(7).bits(12, 331)))
