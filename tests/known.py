"""What was found out of a toy, and need not be again: hundreds of tests wrap the same few.

How its rows keep their bits, which sizes of passes are proven, and what passes take: known by the
model's values, the settings of what runs it, and the number of threads.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import layerskip.exactness
from layerskip import profiling
from layerskip.cost import CostTable
from layerskip.exactness import Exactness, probe
from layerskip.fingerprint import cost_key
from layerskip.model import DecoderStack
from layerskip.plan import DraftPlan

measure_cost = profiling.measure_cost
probes: dict[tuple, Exactness] = {}
proofs: dict[tuple, bool] = {}
tables: dict[str, CostTable] = {}


def probed_once(stack: DecoderStack) -> Exactness:
    """What ``probe`` says."""
    now = (*identity(stack), torch.get_num_threads())
    if now not in probes:
        probes[now] = probe(stack)
    stack.exactness = probes[now]
    return probes[now]


def agreed_once(agree: Callable[..., bool]) -> Callable[..., bool]:
    """Of a proof of bits that ``PassSizes`` asks for, what it says."""

    def known(stack: DecoderStack, *asked: int) -> bool:
        sizes, threads = stack.pass_sizes, torch.get_num_threads()
        small = sizes._small.get(threads)
        now = agree, identity(stack), threads, stack.exactness, sizes.product_rows, small, asked
        if now not in proofs:
            proofs[now] = agree(stack, *asked)
        return proofs[now]

    return known


def measured_once(stack: DecoderStack, plan: DraftPlan | None, **asked: Any) -> CostTable:
    """A quick table of all that a table depends on, as the library says it."""
    if asked.keys() - {"draft_vocabulary", "head", "quick"} or not asked.get("quick"):
        return measure_cost(stack, plan, **asked)
    now = json.dumps(cost_key(stack, plan, asked.get("draft_vocabulary")), sort_keys=True)
    if now not in tables:
        tables[now] = measure_cost(stack, plan, **asked)
    return tables[now]


def identity(stack: DecoderStack) -> tuple:
    """All that bits depend on, but the threads; kept, as the stack keeps what it has found."""
    kept = vars(stack.pass_sizes)
    if "identity" not in kept:
        kept["identity"] = _identity(stack)
    return kept["identity"]


def _identity(stack: DecoderStack) -> tuple:
    twin = stack.twin
    modules = list(twin.modules())
    weights = [*twin.parameters(), *twin.buffers()]
    return (
        type(stack),
        type(stack._forward),
        stack.backend,
        stack.fewest_rows,
        layerskip.exactness.emulates(stack.device, stack.dtype),
        tuple(map(type, modules)),
        tuple(len(m._forward_hooks.keys() | m._forward_pre_hooks.keys()) for m in modules),
        json.dumps(twin.config.to_dict(), sort_keys=True, default=str),
        tuple((w.dtype, w.shape, w.stride()) for w in weights),
        digest(weights),
    )


def digest(weights: list[Tensor]) -> str:
    """Of all their values."""
    found = hashlib.sha1(usedforsecurity=False)
    for weight in weights:
        found.update(weight.detach().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()
