"""Every operation at a model's sizes: its inputs, its reference, the bytes that it must move."""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from gpu.backends import Backend, Noise
from gpu.shapes import ELEMENT, ModelShape, Sizes
from layerskip.ops import definitions
from layerskip.ops.registry import OPERATORS

DRAFTED = 4
# The largest relative error of one rounding to bf16, and how many of it an operation may be off;
# a probability has the absolute error of its logit as its relative one. Noise has the CPU's bits.
ROUNDING = 2.0**-8
ROUNDINGS = {"swiglu": 4, "lm_head_argmax": 8, "gumbel_noise": 0, "gumbel_from_bits": 0}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of an operation.

    Attributes:
        op: its name.
        shape: what is special about it.
        args: positional arguments; those of ``rotated`` are weights or caches.
        kwargs: keyword arguments.
        rotated: indices of args that a measurement takes from memory, not from a cache.
        moved: bytes that pass between memory and chip at least.
        rival: the same by torch's own kernels.
    """

    op: str
    shape: str
    args: tuple[Tensor, ...]
    kwargs: dict[str, Any]
    rotated: tuple[int, ...]
    moved: int
    rival: Callable[..., Any] | None = None

    def to(self, device: str) -> "Case":
        """The same call on another device."""
        args = tuple(arg.to(device) for arg in self.args)
        kwargs = {
            name: arg.to(device) if isinstance(arg, Tensor) else arg
            for name, arg in self.kwargs.items()
        }
        return dataclasses.replace(self, args=args, kwargs=kwargs)


def cases(model: ModelShape, rows: int, sizes: Sizes, device: str) -> Iterator[Case]:
    """Every operation, for ``rows`` tokens of one sequence; attention for more of them, too."""
    noise = Noise(device)
    yield from products(model, rows, noise)
    for batch in sizes.batches:
        yield attention(model, batch, rows, sizes.keys, noise)
    yield append(model, rows, sizes.keys, noise)
    yield from small(model, rows, noise)
    bits = torch.arange(sizes.uniforms, dtype=torch.int32, device=device)
    yield Case("gumbel_from_bits", "", (bits,), {}, (), 8 * sizes.uniforms)
    yield from acceptance(model, noise)


def products(model: ModelShape, rows: int, noise: Noise) -> Iterator[Case]:
    """Projections, the MLP's first half, the head."""
    dtype, hidden = torch.bfloat16, model.hidden
    for what, (n, k) in model.linears.items():
        x, weight = noise.normal(rows, k, dtype=dtype), noise.normal(n, k, dtype=dtype, scale=0.02)
        moved = ELEMENT * (n * k + rows * (n + k))
        yield Case("linear", what, (x, weight), {}, (1,), moved, F.linear)
    x = noise.normal(rows, hidden, dtype=dtype)
    norm = noise.normal(hidden, dtype=dtype)
    gate, up = (noise.normal(model.inner, hidden, dtype=dtype, scale=0.02) for _ in range(2))
    moved = ELEMENT * (2 * model.inner * hidden + rows * (model.inner + hidden))
    fused = {"norm_weight": norm}

    def rival(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        normed = F.rms_norm(x, (hidden,), norm)
        return F.silu(F.linear(normed, gate)) * F.linear(normed, up)

    yield Case("swiglu", "norm, gate and up", (x, gate, up), fused, (1, 2), moved, rival)
    head = noise.normal(model.vocab, hidden, dtype=dtype, scale=0.02)
    moved = ELEMENT * (model.vocab + rows) * hidden

    def choose(x: Tensor, head: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x, (hidden,), norm), head).argmax(-1)

    yield Case("lm_head_argmax", "greedy", (x, head), fused, (1,), moved, choose)
    sampled = fused | {
        "temperature": torch.full((rows,), 0.8, device=noise.device),
        "seeds": noise.integers(1 << 40, rows),
        "positions": noise.integers(1 << 20, rows),
    }
    yield Case("lm_head_argmax", "sampled", (x, head), sampled, (1,), moved)


def attention(model: ModelShape, batch: int, rows: int, keys: int, noise: Noise) -> Case:
    """New positions at the end of full caches."""
    dtype, heads, dim = torch.bfloat16, model.heads, model.head_dim
    q = noise.normal(batch, rows, heads, dim, dtype=dtype)
    shape = (batch, keys, model.heads_k, dim)
    cache = [noise.normal(*shape, dtype=dtype) for _ in range(2)]
    lengths = torch.full((batch,), keys - rows, dtype=torch.int32, device=noise.device)
    moved = ELEMENT * batch * (2 * keys * model.heads_k + 2 * rows * heads) * dim
    # The mask that flash attention has built in: the last row sees everything.
    seen = None if rows == 1 else causal_lower_right(rows, keys)

    def rival(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)

    args = (q, *cache, lengths)
    return Case("decode_attention", f"{batch} x {keys} keys", args, {}, (1, 2), moved, rival)


def append(model: ModelShape, rows: int, keys: int, noise: Noise) -> Case:
    """Rotary embedding, and the end of a full cache."""
    dtype, heads, dim = torch.bfloat16, model.heads, model.head_dim
    q = noise.normal(1, rows, heads, dim, dtype=dtype)
    new = [noise.normal(1, rows, model.heads_k, dim, dtype=dtype) for _ in range(2)]
    cache = [noise.normal(1, keys, model.heads_k, dim, dtype=dtype) for _ in range(2)]
    length = torch.tensor([keys - rows], dtype=torch.int32, device=noise.device)
    angles = torch.outer(
        torch.arange(keys, device=noise.device).float(),
        10000.0 ** (-torch.arange(0, dim, 2, device=noise.device) / dim),
    )
    tables = (angles.cos().contiguous(), angles.sin().contiguous())
    moved = 2 * ELEMENT * rows * (heads + 2 * model.heads_k) * dim
    return Case("rope_append_kv", "", (q, *new, *cache, *tables, length), {}, (3, 4), moved)


def small(model: ModelShape, rows: int, noise: Noise) -> Iterator[Case]:
    """Norms and noise."""
    dtype, hidden = torch.bfloat16, model.hidden
    x, residual = (noise.normal(rows, hidden, dtype=dtype) for _ in range(2))
    weight = noise.normal(hidden, dtype=dtype)
    moved = 2 * ELEMENT * rows * hidden
    yield Case("rms_norm", "", (x, weight), {"eps": 1e-5}, (0,), moved)
    yield Case("add_rms_norm", "", (x, residual, weight), {"eps": 1e-5}, (0, 1), 2 * moved)
    seeds, positions = noise.integers(1 << 40, rows), noise.integers(1 << 20, rows)
    kwargs = {"vocab_size": model.vocab}
    yield Case("gumbel_noise", "", (seeds, positions), kwargs, (), 4 * rows * model.vocab)


def acceptance(model: ModelShape, noise: Noise) -> Iterator[Case]:
    """How much of four drafted tokens stands."""
    device, vocab = noise.device, model.vocab
    target = noise.integers(vocab, 1, DRAFTED + 1)
    draft = target[:, :DRAFTED].clone()
    draft[:, -1] += 1
    state = [torch.tensor([n], dtype=torch.int32, device=device) for n in (7, 100)]
    eos = torch.tensor([vocab], device=device)
    yield Case("accept_tokens", "", (draft, target, *state, eos), {}, (), 8 * (2 * DRAFTED + 1))
    logits = [noise.normal(1, n, vocab, dtype=torch.float32) for n in (DRAFTED, DRAFTED + 1)]
    probs = [x.softmax(-1) for x in logits]
    places = (noise.integers(1 << 40, 1), noise.integers(1 << 20, 1))
    args = (draft % vocab, *probs, *places, *state, eos)
    yield Case("accept_block", "", args, {}, (1, 2), 4 * (2 * DRAFTED + 1) * vocab)


def check(case: Case, backend: Backend) -> dict[str, Any]:
    """Results, and arguments that the operation changes, against the definition in float64.

    What it must leave alone is compared byte by byte.
    """
    ours, theirs = copy.deepcopy(case.args), tuple(_wide(arg) for arg in case.args)
    kwargs = {name: _wide(arg) for name, arg in case.kwargs.items()}
    results = _tuple(getattr(backend.ops, case.op)(*ours, **case.kwargs))
    wanted = _tuple(getattr(definitions, case.op)(*theirs, **kwargs))
    found: dict[str, Any] = {"bound": ROUNDING * ROUNDINGS.get(case.op, 2)}
    if case.op == "lm_head_argmax":
        found["behind"] = behind(results[0], wanted[0], theirs, kwargs)
        results, wanted = results[1:], wanted[1:]
    pairs = [*zip(results, wanted, strict=True)]
    for name, got, want, before in zip(_names(case), ours, theirs, case.args, strict=True):
        if name in OPERATORS[case.op]:
            pairs.append((got, want))
        elif not torch.equal(got.cpu().view(torch.uint8), before.cpu().view(torch.uint8)):
            found["changed"] = name
    found["error"] = max(_error(got, want) for got, want in pairs)
    right = max(found["error"], found.get("behind", 0.0)) <= found["bound"]
    found["ok"] = right and "changed" not in found
    return found


def _names(case: Case) -> list[str]:
    """Of the positional arguments."""
    return [*inspect.signature(getattr(definitions, case.op)).parameters][: len(case.args)]


def behind(chosen: Tensor, best: Tensor, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> float:
    """How far the chosen tokens' scores lie behind the best ones, in largest scores.

    Logits are rounded to bf16 before the choice, so that two of nearly the same size may be
    chosen either way.
    """
    x, head = args
    places = torch.stack([chosen.cpu(), best], dim=1)
    scores = torch.einsum(
        "mk,mck->mc", definitions.rms_norm(x, kwargs["norm_weight"], eps=1e-6), head[places]
    )
    noise = torch.zeros_like(scores)
    if "temperature" in kwargs:
        drawn = definitions.gumbel_noise(
            kwargs["seeds"], kwargs["positions"], vocab_size=head.shape[0]
        )
        noise = drawn.double().gather(1, places)
        scores = scores / kwargs["temperature"][:, None]
    mine, theirs = (scores + noise).unbind(1)
    return ((theirs - mine) / scores.abs().amax(1)).max().item()


def _tuple(results: Any) -> tuple[Tensor, ...]:
    if results is None:
        return ()
    return results if isinstance(results, tuple) else (results,)


def _wide(arg: Any) -> Any:
    """Its copy on the CPU, bf16 as float64."""
    if not isinstance(arg, Tensor):
        return arg
    return arg.cpu().double() if arg.dtype == torch.bfloat16 else arg.cpu().clone()


def _error(got: Tensor, want: Tensor) -> float:
    """Of numbers, the norm of the difference over the norm; of integers, the share that differs."""
    got = got.cpu()
    if got.shape != want.shape or bool(got.isnan().any()):
        return float("inf")
    if not got.is_floating_point():
        return (got != want).double().mean().item()
    want = want.double()
    return ((got.double() - want).norm() / want.norm().clamp(min=1e-30)).item()
