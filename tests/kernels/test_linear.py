"""linear, swiglu and the norms: against float64, and a row's bits."""

import pytest
import torch
from backends import forget_steps
from measure import ROUNDING, error, exactly, mirrored

import layerskip.ops.kernels
from layerskip.ops import definitions

WIDTHS = [1, 63, 64, 65, 255, 257]
ALL_ROWS = 70  # more than one read of the weights serves


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize(("m", "n"), [(1, 65), (3, 1), (8, 63), (17, 24), (40, 33)])
def test_linear_is_within_its_roundings(backend, dtype, m, n, k):
    x = backend.noise(m, k, dtype=dtype)
    weight = backend.noise(n, k, dtype=dtype, scale=k**-0.5)
    want = exactly(definitions.linear, x, weight)
    # One rounding, and the sums in float32.
    assert error(backend.ops.linear(x, weight), want) < 1.02 * ROUNDING[dtype]


@pytest.mark.parametrize("k", [63, 64, 257])
@pytest.mark.parametrize("m", [1, 8, 17])
def test_linear_with_all_that_goes_before_and_after(backend, dtype, m, k):
    n = 33
    x, residual = backend.noise(m, k, dtype=dtype), backend.noise(m, n, dtype=dtype)
    weight = backend.noise(n, k, dtype=dtype, scale=k**-0.5)
    rest = {
        "bias": backend.noise(n, dtype=dtype),
        "residual": residual,
        "norm_weight": backend.noise(k, dtype=dtype),
        "eps": 1e-5,
    }
    want = exactly(definitions.linear, x, weight, **rest)
    # Four roundings, of the norm (two), the sum, and the sum with the residual, hardly ever agree.
    assert error(backend.ops.linear(x, weight, **rest), want) < 1.5 * ROUNDING[dtype]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 128), (5, 13, 63), (17, 8, 257), (33, 9, 64)])
def test_swiglu_is_within_its_roundings(backend, dtype, m, n, k, normed):
    x = backend.noise(m, k, dtype=dtype)
    gate, up = (backend.noise(n, k, dtype=dtype, scale=k**-0.5) for _ in range(2))
    norm_weight = backend.noise(k, dtype=dtype) if normed else None
    want = exactly(definitions.swiglu, x, gate, up, norm_weight=norm_weight)
    got = backend.ops.swiglu(x, gate, up, norm_weight=norm_weight)
    # Gate, up, silu, product, and the norm's two, which gate and up share.
    assert error(got, want) < 2 * ROUNDING[dtype]


@pytest.mark.parametrize("width", [*WIDTHS, 2056])
@pytest.mark.parametrize("m", [1, 3, 8])
def test_norms_are_within_their_roundings(backend, dtype, m, width):
    x, residual = (backend.noise(m, width, dtype=dtype) for _ in range(2))
    weight = backend.noise(width, dtype=dtype)
    want = exactly(definitions.rms_norm, x, weight, eps=1e-5)
    got = backend.ops.rms_norm(x, weight, eps=1e-5)
    assert error(got, want) < ROUNDING[dtype]
    got, total = backend.ops.add_rms_norm(x, residual, weight, eps=1e-5)
    assert torch.equal(total, residual + x)
    # The sum is rounded before it is normed: the definition of the rounded sum.
    want = exactly(definitions.rms_norm, total, weight, eps=1e-5)
    assert error(got, want) < ROUNDING[dtype]


def test_rows_may_be_views_with_strides(backend, dtype):
    wide = backend.noise(5, 200, dtype=dtype)
    weight, norm_weight = backend.noise(24, 64, dtype=dtype), backend.noise(64, dtype=dtype)
    for start in (8, 3):  # the second is not at a multiple of 16 bytes
        x, residual = wide[:, start : start + 64], wide[:, 100:124]
        rest = {"norm_weight": norm_weight, "eps": 1e-5}
        for options in (rest, rest | {"residual": residual}):
            got = backend.ops.linear(x, weight, **options)
            dense = {name: _dense(value) for name, value in options.items()}
            assert torch.equal(got, backend.ops.linear(x.contiguous(), weight, **dense))
        got = backend.ops.rms_norm(x, norm_weight, eps=1e-5)
        assert torch.equal(got, backend.ops.rms_norm(x.contiguous(), norm_weight, eps=1e-5))


def _dense(value):
    return value.contiguous() if isinstance(value, torch.Tensor) else value


@pytest.fixture
def layer(kernels, dtype):
    """A function of rows that goes through every path of the product, and rows for it."""
    width, inner = 76, 24  # 152 columns: not every warp has work, and the last block is short
    plain, cancelling = (kernels.noise(inner, width, dtype=dtype) for _ in range(2))
    plain, cancelling = mirrored(plain), mirrored(cancelling, -1)
    norm = {"norm_weight": mirrored(kernels.noise(width, dtype=dtype)), "eps": 1e-5}
    bias = kernels.noise(inner, dtype=dtype)
    ops = kernels.ops

    def run(x):
        outputs = [
            ops.linear(x, cancelling),
            ops.linear(x, cancelling, **norm),
            ops.linear(x, plain, bias=bias, residual=x[:, :inner], **norm),
            ops.swiglu(x, plain, cancelling, **norm),
            ops.swiglu(x, cancelling, plain),
            *ops.add_rms_norm(x, x, norm["norm_weight"], eps=1e-5),
        ]
        return torch.cat(outputs, dim=-1)

    x = kernels.noise(ALL_ROWS, width, dtype=dtype)
    x = mirrored(x * 2.0 ** torch.randint(9, x.shape).to(x))  # wide in range: more is rounded
    roundings = ops.linear(x, cancelling)
    assert roundings.abs().max() < 0.1
    assert (roundings != 0).double().mean() > 0.7
    return run, x


def test_a_row_has_the_same_bits_among_any_number_of_rows(layer):
    run, x = layer
    together = run(x)
    for count in [*range(1, 17), 24, 31, 32, 33, 63, 64, 65]:
        assert torch.equal(run(x[:count]), together[:count]), count


def test_outputs_of_a_block_change_no_bit(layer, kernels, monkeypatch):
    """A block of threads that takes three tiles of outputs, one after another."""
    run, x = layer
    apart = run(x)
    monkeypatch.setattr(layerskip.ops.kernels, "FEW_TILES", 0)
    monkeypatch.setattr(layerskip.ops.kernels, "MANY_BLOCKS", 1)
    forget_steps(kernels)
    for count in (1, 8, 9, 33, ALL_ROWS):
        assert torch.equal(run(x[:count]), apart[:count]), count


@pytest.mark.parametrize("k", [1536, 3200, 3224])
@pytest.mark.parametrize("m", [1, 9, 17, 40])
def test_wide_rows_go_around_the_ring(backend, dtype, m, k):
    """More blocks of K than a warp has on their way at a time, or just as many."""
    x, weight = backend.noise(m, k, dtype=dtype), backend.noise(17, k, dtype=dtype, scale=k**-0.5)
    want = exactly(definitions.linear, x, weight)
    assert error(backend.ops.linear(x, weight), want) < 1.05 * ROUNDING[dtype]


def test_a_row_has_the_same_bits_in_any_place(layer):
    run, x = layer
    together = run(x)
    for i in range(20):
        assert torch.equal(run(x[i : i + 1])[0], together[i])
    shuffled = torch.randperm(ALL_ROWS)
    assert torch.equal(run(x[shuffled]), together[shuffled])


def test_other_rows_may_hold_anything(layer):
    run, x = layer
    together = run(x[:16])
    x[[0, 3, 9, 15]] = float("nan")
    x[7] = float("inf")
    kept = [i for i in range(16) if i not in {0, 3, 7, 9, 15}]
    assert torch.equal(run(x[:16])[kept], together[kept])


@pytest.mark.parametrize("m", [1, 8, 9])  # of more than eight rows it is no fused one
def test_the_fused_norm_has_the_bits_of_the_norm_alone(kernels, dtype, m):
    for k in (63, 64, 257, 2056):
        x, weight = kernels.noise(m, k, dtype=dtype), kernels.noise(17, k, dtype=dtype)
        norm_weight = kernels.noise(k, dtype=dtype)
        normed = kernels.ops.rms_norm(x, norm_weight, eps=1e-5)
        fused = kernels.ops.linear(x, weight, norm_weight=norm_weight, eps=1e-5)
        assert torch.equal(fused, kernels.ops.linear(normed, weight))
