"""Whether a row's bits depend on its column, its place, the number of rows, or an early start."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gpu.backends import Backend, Noise, with_own_sources
from gpu.cases import Case, cases
from gpu.shapes import TOY, ModelShape, Sizes

MAX_ROWS = 16
PROBE = Path(__file__).parent / "mma_probe.cu"
FORMATS = {"Bf16": torch.bfloat16, "Fp16": torch.float16}
DEPTH = 64  # of the products that probe mma
EARLY_ROWS = 5
EARLY_TURNS = 8


def column_invariance(backend: Backend, sizes: Sizes) -> dict[str, Any]:
    """One token in each of the eight columns, other numbers in the others.

    The others are noise, then infinities. Each sum is of numbers of very different sizes, so that
    another order, or another place to cut digits off, would show.
    """
    names = [f"mma_probe<{form}>" for form in FORMATS]
    launcher = with_own_sources(backend, PROBE, names)
    noise = Noise(backend.device)
    result: dict[str, Any] = {}
    for name, dtype in zip(names, FORMATS.values(), strict=True):
        a = uneven(noise, sizes.products, 16, DEPTH, dtype=dtype)
        token = uneven(noise, sizes.products, 1, DEPTH, dtype=dtype)
        columns = []
        for column in range(8):
            b = uneven(noise, sizes.products, 8, DEPTH, dtype=dtype)
            b[:, (column + 3) % 8] = float("inf")
            b[:, column] = token[:, 0]
            c = torch.full((sizes.products, 16, 8), float("nan"), device=backend.device)
            launcher.launch(name, (sizes.products, 1, 1), (32, 1, 1), 0, [a, b, c, DEPTH])
            columns.append(c[:, :, column].clone())
        equal = [bool(torch.equal(c, columns[0])) for c in columns]
        result[name] = {"columns_equal": equal, "finite": bool(columns[0].isfinite().all())}
    result["ok"] = all(all(r["columns_equal"]) and r["finite"] for r in result.values())
    return result


def uneven(noise: Noise, *shape: int, dtype: torch.dtype) -> Tensor:
    """Numbers over eight binary orders of magnitude."""
    scale = torch.exp2(noise.integers(8, *shape).float())
    return (noise.normal(*shape, dtype=torch.float32) * scale).to(dtype)


def row_bits(backend: Backend, sizes: Sizes) -> dict[str, Any]:
    """Bits of a row alone, first among 1 to 16, and among 16 in another order; per shape."""
    result: dict[str, Any] = {}
    for model in sizes.models:
        for what, run in functions_of_rows(backend, model):
            result[f"{model.name} {what}"] = differences(run, backend)
        result[f"{model.name} attention"] = attention_differences(backend, model, sizes.keys)
    result["ok"] = all(not sum(r.values()) for r in result.values())
    result["cublas"] = {m.name: cublas_rows(backend, m) for m in sizes.models}
    return result


Run = tuple[Callable[[Tensor], Tensor], Tensor]


def functions_of_rows(backend: Backend, model: ModelShape) -> Iterator[tuple[str, Run]]:
    """Each product of a layer, and 16 rows for it.

    Weights and rows are two halves, the second of weights the negative of the first: sums cancel,
    and what is left is rounding alone.
    """
    ops, dtype = backend.ops, torch.bfloat16
    noise = Noise(backend.device)

    def cancelling(n: int, k: int) -> Tensor:
        half = noise.normal(n, k // 2, dtype=dtype, scale=k**-0.5)
        return torch.cat([half, -half], dim=1)

    def rows(k: int) -> Tensor:
        return noise.normal(MAX_ROWS, k // 2, dtype=dtype).repeat(1, 2)

    for what, (n, k) in model.linears.items():
        weight = cancelling(n, k)
        yield what, ((lambda x, w=weight: ops.linear(x, w)), rows(k))
    norm_weight = noise.normal(model.hidden, dtype=dtype)
    gate, up = (noise.normal(model.inner, model.hidden, dtype=dtype) for _ in range(2))
    normed = (lambda x: ops.swiglu(x, gate, up, norm_weight=norm_weight)), rows(model.hidden)
    yield "norm, gate and up", normed
    head = noise.normal(model.vocab, model.hidden, dtype=dtype)

    def choose(x: Tensor) -> Tensor:
        return torch.stack([t.double() for t in ops.lm_head_argmax(x, head)], dim=1)

    yield "norm, head", (choose, rows(model.hidden))


def differences(run: Run, backend: Backend) -> dict[str, int]:
    """How many of the comparisons find another bit."""
    function, x = run
    together = function(x)
    order = torch.randperm(MAX_ROWS, generator=torch.Generator().manual_seed(0)).to(backend.device)
    counts = range(1, MAX_ROWS + 1)
    return {
        "counts": sum(not torch.equal(function(x[:m]), together[:m]) for m in counts),
        "alone": sum(
            not torch.equal(function(x[i : i + 1])[0], together[i]) for i in range(MAX_ROWS)
        ),
        "order": int(not torch.equal(function(x[order].contiguous()), together[order])),
    }


def attention_differences(backend: Backend, model: ModelShape, keys: int) -> dict[str, int]:
    """Each of 16 new positions alone, and the last of fewer, against all 16 at once."""
    noise, dtype = Noise(backend.device), torch.bfloat16
    q = noise.normal(1, MAX_ROWS, model.heads, model.head_dim, dtype=dtype)
    shape = (1, keys, model.heads_k, model.head_dim)
    k, v = (noise.normal(*shape, dtype=dtype) for _ in range(2))
    start = keys - MAX_ROWS

    def attend(first: int, last: int) -> Tensor:
        length = torch.tensor([start + first], dtype=torch.int32, device=backend.device)
        return backend.ops.decode_attention(q[:, first:last], k, v, length)

    together = attend(0, MAX_ROWS)
    places = range(MAX_ROWS)
    return {
        "counts": sum(not torch.equal(attend(0, m + 1), together[:, : m + 1]) for m in places),
        "alone": sum(not torch.equal(attend(m, m + 1)[:, 0], together[:, m]) for m in places),
    }


def cublas_rows(backend: Backend, model: ModelShape) -> int:
    """For comparison: of 16 numbers of rows, how many give the first row the bits it has alone."""
    noise = Noise(backend.device)
    n, k = model.linears["qkv"]
    x = noise.normal(MAX_ROWS, k, dtype=torch.bfloat16)
    weight = noise.normal(n, k, dtype=torch.bfloat16)
    alone = F.linear(x[:1], weight)[0]
    return sum(torch.equal(F.linear(x[:m], weight)[0], alone) for m in range(1, MAX_ROWS + 1))


def early_bits(backend: Backend) -> dict[str, Any]:
    """How often an operation's bits change where its kernels may start early.

    All small cases are launched one after another, without anything between them, several times:
    a kernel that did not wait would meet what another one leaves, or spoil what it reads.
    """
    if (reason := backend.why_no_overlap()) is not None:
        return {"ok": True, "left_out": reason}
    small = [case.to(backend.device) for case in cases(TOY.models[0], EARLY_ROWS, TOY, "cpu")]
    with backend.overlapping(False):
        wanted = one_after_another(small, backend)
    with backend.overlapping(True):
        turns = [one_after_another(small, backend) for _ in range(EARLY_TURNS)]
    result: dict[str, Any] = {}
    for i, case in enumerate(small):
        name = f"{case.op} {case.shape}".strip()
        result[name] = sum(turn[i] != wanted[i] for turn in turns)
    result["ok"] = not any(result.values())
    return result


def one_after_another(some: list[Case], backend: Backend) -> list[list[bytes]]:
    """The bytes of each case's results and arguments."""
    args = [copy.deepcopy(case.args) for case in some]
    results = [
        getattr(backend.ops, case.op)(*own, **case.kwargs)
        for case, own in zip(some, args, strict=True)
    ]
    return [
        [raw(t) for t in (*own, *(out if isinstance(out, tuple) else (out,))) if t is not None]
        for own, out in zip(args, results, strict=True)
    ]


def raw(tensor: Tensor) -> bytes:
    """Its bits."""
    return tensor.cpu().view(torch.uint8).numpy().tobytes()
