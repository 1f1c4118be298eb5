"""GB/s of every operation, as a share of what copying reaches, beside torch's own kernels."""

import time
from collections.abc import Iterator
from typing import Any

import torch

from gpu.backends import Backend
from gpu.cases import Case, cases
from gpu.shapes import Sizes

MAX_COPIES = 64


def copy_bandwidth(backend: Backend, sizes: Sizes) -> float:
    """Bytes a second, read and written, of copying one large tensor to another."""
    source = torch.empty(sizes.copied_bytes, dtype=torch.uint8, device=backend.device).fill_(1)
    target = torch.empty_like(source)
    return 2 * sizes.copied_bytes / backend.seconds([lambda: target.copy_(source)] * 2)


def speeds(backend: Backend, sizes: Sizes, deadline: float) -> dict[str, Any]:
    """Every operation for 1 to 16 rows, the larger models last; stops at the deadline."""
    bandwidth = copy_bandwidth(backend, sizes)
    result: dict[str, Any] = {"copy_gb_per_s": bandwidth / 1e9, "complete": True}
    for name, case in wanted(sizes, backend.device):
        if time.monotonic() > deadline:
            result["complete"] = False
            break
        result[name] = measure(case, backend, sizes.rotated_bytes, bandwidth)
    result["ok"] = True  # a measurement cannot fail
    return result


def wanted(sizes: Sizes, device: str) -> Iterator[tuple[str, Case]]:
    for model in sizes.models:
        for rows in sizes.rows:
            for case in cases(model, rows, sizes.keys, device):
                yield f"{model.name} {case.op} {case.shape} rows={rows}".replace("  ", " "), case


def measure(case: Case, backend: Backend, rotated: int, bandwidth: float) -> dict[str, float]:
    """Seconds of one call out of memory, ours and torch's."""
    weights = sum(case.args[i].nbytes for i in case.rotated)
    copies = 2 if weights == 0 else min(MAX_COPIES, max(2, -(-rotated // weights)))
    operands = [case.args] + [
        tuple(arg.clone() if i in case.rotated else arg for i, arg in enumerate(case.args))
        for _ in range(copies - 1)
    ]
    ours = getattr(backend.ops, case.op)
    seconds = backend.seconds([lambda a=args: ours(*a, **case.kwargs) for args in operands])
    result = {
        "us": seconds * 1e6,
        "gb_per_s": case.moved / seconds / 1e9,
        "share_of_copy": case.moved / seconds / bandwidth,
    }
    if case.rival is not None:
        rival = case.rival
        result["torch_us"] = 1e6 * backend.seconds([lambda a=args: rival(*a) for args in operands])
    return result
