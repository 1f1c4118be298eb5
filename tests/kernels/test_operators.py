"""What all operations share: torch's checks, errors that name the argument, thread orders."""

import inspect

import pytest
import torch
from measure import error

import layerskip.ops
from layerskip.ops import arguments, definitions
from layerskip.ops.catalog import CATALOG
from layerskip.ops.kernels import KernelOps
from layerskip.ops.registry import OPERATORS

ORDERS = [0, 1, 2, 3]  # seeds of the emulator


def example(name, dtype=torch.bfloat16):
    """Small arguments of an operation that use everything it has."""
    torch.manual_seed(1)

    def noise(*shape):
        return torch.randn(shape).to(dtype)

    def ids(*values):
        return torch.tensor(values)

    lengths, left = torch.tensor([62, 0], dtype=torch.int32), torch.tensor([9, 1]).int()
    choice = {
        "temperature": torch.tensor([0.0, 0.7, 1.0]),
        "seeds": ids(1, 2, 3),
        "positions": ids(4, 5, 6),
    }
    draft = ids([1, 2], [3, -1])
    probs = torch.rand(2, 5, 80).softmax(-1)
    angles = torch.rand(70, 16)
    norm = {"norm_weight": noise(65), "eps": 1e-5}
    kept = {"vocab_ids": torch.arange(1, 70, 2).int()}
    heads = [noise(2, 3, n, 80) for n in (4, 2, 2)]
    caches = [noise(2, 70, 2, 80) for _ in range(2)]
    return {
        "rms_norm": ((noise(3, 65), noise(65)), {"eps": 1e-5}),
        "add_rms_norm": ((noise(3, 65), noise(3, 65), noise(65)), {"eps": 1e-5}),
        "linear": (
            (noise(3, 65), noise(20, 65)),
            {"bias": noise(20), "residual": noise(3, 20), **norm},
        ),
        "swiglu": ((noise(3, 65), noise(9, 65), noise(9, 65)), norm),
        "rope_append_kv": (
            (*heads, *caches, angles.cos(), angles.sin(), lengths),
            {"interleaved": True},
        ),
        "decode_attention": (
            (heads[0], *caches, lengths),
            {"window": 50, "softcap": 4.0, "sinks": torch.randn(4), "softmax_scale": 0.2},
        ),
        "gumbel_noise": ((ids(1, 2), ids(3, 4)), {"vocab_size": 70, "stream": 1}),
        "gumbel_from_bits": ((torch.arange(70, dtype=torch.int32),), {}),
        "lm_head_argmax": ((noise(3, 65), noise(70, 65)), choice | kept | norm),
        "accept_tokens": ((draft, ids([1, 5, 6], [7, 8, 9]), lengths, left, ids(5)), {}),
        "accept_block": (
            (draft, probs[:, :2], probs[:, 2:], ids(1, 2), ids(3, 4), lengths, left, ids(5)),
            {},
        ),
    }[name]


def example_on(backend, name, dtype=torch.bfloat16):
    """The same, where the backend's tensors are."""
    args, kwargs = copied(*example(name, dtype))
    on_device = [a.to(backend.device) for a in args]
    return on_device, {
        n: a.to(backend.device) if isinstance(a, torch.Tensor) else a for n, a in kwargs.items()
    }


def copied(args, kwargs):
    def copy(value):
        return value.clone() if isinstance(value, torch.Tensor) else value

    return tuple(map(copy, args)), {name: copy(value) for name, value in kwargs.items()}


def tensors_after(function, args, kwargs):
    """What a call returns, and its arguments after it."""
    args, kwargs = copied(args, kwargs)
    out = function(*args, **kwargs)
    returned = [] if out is None else [out] if isinstance(out, torch.Tensor) else list(out)
    return [*returned, *(a for a in args if isinstance(a, torch.Tensor))]


@pytest.mark.parametrize("name", OPERATORS)
def test_torch_s_own_checks(name):
    args, kwargs = copied(*example(name, torch.float32))
    torch.library.opcheck(getattr(torch.ops.layerskip, name).default, args, kwargs)


@pytest.mark.parametrize("name", OPERATORS)
def test_compiled_as_one_graph(name):
    function = getattr(layerskip.ops, name)

    def program(*args, **kwargs):
        function(*args, **kwargs)
        return function(*args, **kwargs)

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    want = tensors_after(program, *example(name))
    for got, other in zip(tensors_after(compiled, *example(name)), want, strict=True):
        assert torch.equal(got, other)
    torch.compiler.reset()


@pytest.mark.parametrize("made_outside", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_inference_mode_changes_nothing(backend, name, made_outside):
    def run(args, kwargs):
        getattr(backend.ops, name)(*args, **kwargs)  # what it changes, it changes twice
        return tensors_after(getattr(backend.ops, name), args, kwargs)

    want = run(*example_on(backend, name))
    outside = example_on(backend, name)
    with torch.inference_mode():
        got = run(*(outside if made_outside else example_on(backend, name)))
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", OPERATORS)
def test_kernels_agree_with_the_definition(kernels, name, dtype):
    got = tensors_after(getattr(kernels.ops, name), *example_on(kernels, name, dtype))
    want = tensors_after(getattr(definitions, name), *example(name, dtype))
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        if one.dtype.is_floating_point:
            assert error(one, other.double()) < 2 * torch.finfo(dtype).eps
        else:
            assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("name", OPERATORS)
def test_the_order_of_threads_changes_no_bit(kernels, name):
    if kernels.launcher is None:
        pytest.skip("a GPU's order cannot be chosen")
    runs = []
    for seed in ORDERS:
        kernels.launcher.seed = seed
        runs.append(tensors_after(getattr(kernels.ops, name), *example(name)))
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("name", OPERATORS)
def test_one_signature_everywhere(name):
    definition = inspect.signature(getattr(definitions, name))
    assert inspect.signature(getattr(layerskip.ops, name)) == definition
    for other in (getattr(arguments, name), getattr(KernelOps, name)):
        parameters = [p for p in inspect.signature(other).parameters.values() if p.name != "self"]
        assert parameters == list(definition.parameters.values())


def test_every_operation_is_public_and_documented():
    assert sorted(OPERATORS) == layerskip.ops.__all__
    for name in OPERATORS:
        assert "Raises:" in getattr(layerskip.ops, name).__doc__
    with pytest.raises(AttributeError, match="has no attribute 'typo'"):
        _ = layerskip.ops.typo


def replaced(name, position, tensor):
    args, kwargs = example(name)
    return (*args[:position], tensor(args[position]), *args[position + 1 :]), kwargs


@pytest.mark.parametrize(
    ("name", "position", "change", "message"),
    [
        ("linear", 0, lambda t: t[0], r"linear: x has shape \(65,\), expected \(m, k\)"),
        (
            "linear",
            1,
            lambda t: t[:, :9],
            r"linear: weight has shape \(20, 9\), expected \(n, k\) with k = 65 as in x",
        ),
        ("linear", 1, lambda t: t.half(), "linear: weight has dtype torch.float16, expected torch"),
        ("rms_norm", 0, lambda t: t.int(), "rms_norm: x has dtype torch.int32, expected a float"),
        ("linear", 1, lambda t: t.to("meta"), "linear: weight is on meta, expected cpu as x is"),
        ("linear", 1, lambda t: t[:0, :], "linear: bias has shape"),
        (
            "decode_attention",
            3,
            lambda t: t.long(),
            "cache_seqlens has dtype torch.int64, expected torch.int32",
        ),
        (
            "decode_attention",
            0,
            lambda t: t[:, :, :3],
            "decode_attention: sinks has shape",
        ),
        ("rope_append_kv", 5, lambda t: t[:9], "sine has shape .* with positions = 9 as in cosine"),
        ("accept_tokens", 1, lambda t: t[:, :2], "target_token_ids has 2 tokens a sequence"),
        ("accept_block", 2, lambda t: t[:, :2], "target_probs has 2 rows a sequence"),
        ("accept_tokens", 0, lambda t: t.int(), "draft_token_ids has dtype torch.int32"),
    ],
)
def test_wrong_arguments_are_named(backend, name, position, change, message):
    args, kwargs = replaced(name, position, change)
    with pytest.raises(ValueError, match=message):
        getattr(backend.ops, name)(*args, **kwargs)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("linear", {"bias": torch.ones(3)}, "bias has shape"),
        ("lm_head_argmax", {"seeds": None}, "given together or not at all"),
        ("decode_attention", {"window": -1}, "window and softcap are 0"),
        ("gumbel_noise", {"vocab_size": 0}, "vocab_size is at least 1, got 0"),
    ],
)
def test_wrong_options_are_named(backend, name, change, message):
    args, kwargs = example(name)
    with pytest.raises(ValueError, match=message):
        getattr(backend.ops, name)(*args, **kwargs | change)


@pytest.mark.parametrize(
    ("name", "position", "change", "message"),
    [
        ("linear", 0, lambda t: t.t().contiguous().t(), "x has strides .* expected 1 as the last"),
        ("linear", 1, lambda t: t.repeat(1, 2)[:, :65], "weight has strides .* it contiguous"),
        ("decode_attention", 1, lambda t: t[..., :63].contiguous(), "k_cache has shape"),
        (
            "decode_attention",
            2,
            lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
            "v_cache has strides .* as k_cache",
        ),
        ("decode_attention", 0, lambda t: torch.cat([t, t], -1)[..., 1:81], "at a multiple of 16"),
    ],
)
def test_launches_outside_the_limits_are_refused(kernels, name, position, change, message):
    args, kwargs = replaced(name, position, lambda t: change(t.to(kernels.device)))
    args = [a.to(kernels.device) for a in args]
    kwargs = {n: a.to(kernels.device) if hasattr(a, "to") else a for n, a in kwargs.items()}
    with pytest.raises(ValueError, match=message):
        getattr(kernels.ops, name)(*args, **kwargs)


def test_limits_of_sizes_and_dtypes(kernels):
    ops, device = kernels.ops, kernels.device
    with pytest.raises(ValueError, match=r"x has dtype torch.float32, kernels take \[torch.bf"):
        ops.linear(torch.ones(1, 8, device=device), torch.ones(1, 8, device=device))
    q = torch.ones(1, 1, 1, 72, device=device, dtype=torch.float16)
    with pytest.raises(ValueError, match="headdim is 72, kernels exist for"):
        ops.decode_attention(q, q, q, kernels.tensor([0]))
    draft, target = (torch.ones(1, n, dtype=torch.int64, device=device) for n in (32, 33))
    state = kernels.tensor([0]), kernels.tensor([1])
    with pytest.raises(ValueError, match="32 drafted tokens a sequence, at most 31"):
        ops.accept_tokens(draft, target, *state, draft[0])


def test_no_rows_are_no_launch(backend, dtype):
    x, weight = backend.noise(0, 16, dtype=dtype), backend.noise(4, 16, dtype=dtype)
    assert backend.ops.linear(x, weight).shape == (0, 4)


def test_the_catalogue_counts_bytes():
    assert CATALOG["linear<Bf16,1>"].bytes_moved(m=5, n=32, k=64) == 2 * (32 * 64 + 5 * (32 + 64))
    assert CATALOG["linear<Fp16,2>"].bytes_moved(m=17, n=32, k=64) == (
        2 * (2 * 32 * 64 + 17 * (32 + 64))
    )
    sizes = {"batch": 2, "seqlen": 1, "heads": 4, "heads_k": 2, "keys": 300}
    moved = CATALOG["decode_attention<Bf16,64,1>"].bytes_moved(**sizes)
    assert moved == 2 * 300 * 2 * 64 * 2 * 2 + 2 * 4 * (2 * 64 + 2 * 4 * 66)
