"""GB/s of every operation, as a share of what copying reaches, beside torch's own kernels."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpu.backends import Backend
from gpu.cases import Case, cases
from gpu.shapes import Sizes

MAX_COPIES = 64


def copy_bandwidth(backend: Backend, sizes: Sizes) -> float:
    """Bytes a second, read and written, of copying one large tensor to another.

    By the faster of torch's two: a copy in a graph is the driver's own, which reached two thirds of
    what a kernel does (H200).
    """
    source = torch.ones(sizes.copied_bytes // 4, dtype=torch.float32, device=backend.device)
    target = torch.empty_like(source)
    ways = (lambda: target.copy_(source)), (lambda: torch.neg(source, out=target))
    return 2 * sizes.copied_bytes / min(backend.seconds([way] * 2) for way in ways)


def speeds(
    backend: Backend,
    sizes: Sizes,
    deadline: float,
    result: dict[str, Any],
    write: Callable[[], None],
) -> None:
    """Every operation for 1 to 16 rows into ``result``; stops at the deadline.

    Args:
        write: called after each measurement, so that none is lost where a later one ends the run.
    """
    result["ok"] = True  # a measurement cannot fail
    bandwidth = copy_bandwidth(backend, sizes)
    result |= {"copy_gb_per_s": bandwidth / 1e9, "complete": False}
    for name, case in wanted(sizes, backend.device):
        if time.monotonic() > deadline:
            return
        result[name] = measure(case, backend, sizes.rotated_bytes, bandwidth)
        write()
    result["complete"] = True


def wanted(sizes: Sizes, device: str) -> Iterator[tuple[str, Case]]:
    for model in sizes.models:
        for rows in sizes.rows:
            for case in cases(model, rows, sizes, device):
                yield f"{model.name} {case.op} {case.shape} rows={rows}".replace("  ", " "), case


def measure(case: Case, backend: Backend, rotated: int, bandwidth: float) -> dict[str, Any]:
    """Microseconds of one call out of memory, ours and torch's."""
    weights = sum(case.args[i].nbytes for i in case.rotated)
    copies = 2 if weights == 0 else min(MAX_COPIES, max(2, -(-rotated // weights)))
    operands = [case.args] + [
        tuple(arg.clone() if i in case.rotated else arg for i, arg in enumerate(case.args))
        for _ in range(copies - 1)
    ]
    ours = getattr(backend.ops, case.op)
    seconds = backend.seconds([lambda a=args: ours(*a, **case.kwargs) for args in operands])
    result: dict[str, Any] = {
        "us": seconds * 1e6,
        "gb_per_s": case.moved / seconds / 1e9,
        "share_of_copy": case.moved / seconds / bandwidth,
    }
    if case.rival is not None:
        rival = case.rival
        try:
            theirs = backend.seconds([lambda a=args: rival(*a) for args in operands])
            result["torch_us"] = 1e6 * theirs
        except (RuntimeError, TypeError, ValueError) as error:  # torch may have no such kernel
            result["torch_error"] = str(error)[:200]
    return result
