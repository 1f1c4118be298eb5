"""Inputs that show in which order a processor takes sums, where outputs of 16 bits hide it.

The terms of a sum come in pairs that cancel: nothing but the roundings is left, and they differ in
most outputs wherever the order does.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch

from layerskip.ops.reference import decode_attention

if TYPE_CHECKING:
    from layerskip.model import DecoderStack

SLOTS_OF_PROBE = 1024
EXPONENTS = (-10, 14)  # float16 ends at 2 ** 16
AMPLIFIED = 2.0**10  # the roundings of float32 scores of terms up to 2 ** 14 become about 1
# Of what a product is given: roundings are larger than biases then. Float16 has no room for that.
OF_PRODUCTS = {torch.float16: (-10, 10)}
LARGE_EXPONENTS = (40, 64)
Attend = Callable[[int, int, int], torch.Tensor]


def revealing(
    weight: torch.Tensor, count: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of a product, each with an output that is nothing but roundings.

    Args:
        weight: ``(out, in)``.
        count: of inputs; the first and the last are for the last output, the others for any.

    Returns:
        ``(count, in)`` inputs, and ``(count, 1)`` the output that each is for.
    """
    num_out, width = weight.shape
    outputs = torch.randint(num_out, (count,), generator=generator, device="cpu")
    outputs[0] = outputs[-1] = num_out - 1
    half, bounds = width // 2, OF_PRODUCTS.get(weight.dtype, LARGE_EXPONENTS)
    x = weight.new_zeros(count, width)
    for i, row in enumerate(weight[outputs.to(weight.device)]):
        order = torch.randperm(width, generator=generator, device="cpu").to(weight.device)
        one, other = order[:half], order[half : 2 * half]
        exponents = torch.randint(*bounds, (half,), generator=generator, device="cpu")
        scale = exponents.to(x.device, torch.float32).exp2().to(x.dtype)  # a power of two: exact
        x[i, one], x[i, other] = scale * row[other], -scale * row[one]
    return x, outputs[:, None].to(weight.device)


def attention_draws(stack: "DecoderStack") -> list[Attend]:
    """``attend(count, position, end)``: of one query ``count`` times over, each of which sees slots
    up to ``position``, over ``end`` slots. On noise, and on two draws that show every rounding.

    16-bit outputs hide the order in which sums were taken, but for one in some 100,000. In one draw
    it is the scores that cancel, multiplied until they matter; in the other the values, under equal
    weights.
    """
    generator = torch.Generator().manual_seed(0)
    kv_heads, dim = stack.num_kv_heads, stack.head_dim
    heads = stack.group * kv_heads

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    def spread(x: torch.Tensor) -> torch.Tensor:
        """Of many magnitudes, else sums of a few bits each would need no rounding."""
        exponents = torch.randint(*EXPONENTS, x.shape, generator=generator, device="cpu")
        return x * exponents.to(x.dtype).exp2()

    q, keys = noise(1, 1, heads, dim), noise(1, SLOTS_OF_PROBE, kv_heads, dim)
    values = noise(1, SLOTS_OF_PROBE, kv_heads, dim)
    number, sign = _cancelling(dim, generator)
    scores = q[..., number], spread(keys)[..., number] * sign
    wide_values = spread(values)

    @cache
    def opposites(position: int) -> torch.Tensor:
        seen = position + 1
        number, sign = _cancelling(seen, torch.Generator().manual_seed(seen))
        cancelling = wide_values[:, number] * sign[:, None, None]
        return torch.cat([cancelling, wide_values[:, seen:]], dim=1)

    return [
        _attention(stack, q, keys, lambda _: values, 1.0),
        _attention(stack, *scores, lambda _: values, AMPLIFIED),
        _attention(stack, torch.zeros_like(q), keys, opposites, 1.0),
    ]


def _cancelling(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Which number stands at each of ``count`` places, and its sign: each comes once with either,
    in random order; zero at the place that an odd ``count`` leaves."""
    half = count // 2
    order = torch.randperm(count, generator=generator, device="cpu")
    ones = torch.ones(half, dtype=torch.float32, device="cpu")
    sign = torch.cat([ones, -ones, ones.new_zeros(count % 2)])
    return order % max(1, half), sign[order]


def _attention(
    stack: "DecoderStack",
    q: torch.Tensor,
    keys: torch.Tensor,
    values: Callable[[int], torch.Tensor],
    scale: float,
) -> Attend:
    q, keys = (x.to(stack.device, stack.dtype) for x in (q, keys))

    @cache
    def attend(count: int, position: int, end: int) -> torch.Tensor:
        mask = torch.zeros(1, 1, stack.group * count, end, dtype=stack.dtype, device=stack.device)
        mask[..., position + 1 :] = float("-inf")
        queries, changes = q.repeat(1, count, 1, 1), stack.score_changes
        v = values(position)[:, :end].to(stack.device, stack.dtype)
        return decode_attention(queries, keys[:, :end], v, mask, scale, *changes)

    return attend
