"""Weights in the order in which a processor's products read them, and products that need no order.

torch has each product bring its weight into oneDNN's blocked order anew, or do without it, which
for the few rows of a decode pass takes up to twice as long (bench/LOG.md, 2026-11-23). A model that
we loaded ourselves gets a second copy of its weights in that order. Nothing is assumed of the bits
that products give: the probe runs with the copies.
"""

import os
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from layerskip.fingerprint import by_amd

MEMORY_SHARE = 1 / 8  # of the machine's: copies of larger models are not made
LIMITS = (  # of a container, by control groups of version 2 and 1
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
LARGE, MOSTLY = 2**20, 3 / 4  # elements of a weight; share of a model's that such weights hold
FEW_ROWS = 64  # up to so many are quicker in place
NUM_WATCHED = 64
ROWS = 8
Stamp = list[tuple[int, int | None]]
Places = list[tuple[int, torch.Size]]


def stamp(weights: Iterable[Tensor]) -> Stamp:
    """Changes whenever torch sees the weights change; tensors of inference mode don't count."""
    return [(w.data_ptr(), None if w.is_inference() else w._version) for w in weights]  # noqa: SLF001


def multiplied(x: Tensor, copy: Tensor, bias: Tensor | None) -> Tensor:
    """``(rows, in)`` by a copy of an ``(out, in)`` weight, as ``F.linear`` has it."""
    return torch.ops.mkldnn._linear_pointwise(x, copy, bias, "none", [], "")  # noqa: SLF001


def multiplied_in_place(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As ``multiplied``, by the weight itself. A row alone would take another kernel, and get other
    bits than beside others: it is multiplied beside itself. Many rows, which a prompt has, are left
    to torch."""
    if x.shape[0] > FEW_ROWS:
        return F.linear(x, weight, bias)
    if x.shape[0] == 1:
        return multiplied(x.expand(2, -1), weight, bias)[:1]
    return multiplied(x, weight, bias)


def blocked(weight: Tensor) -> Tensor:
    """A copy of an ``(out, in)`` weight, for ``multiplied``."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)  # noqa: SLF001


class Blocks:
    """Copies of weights in blocked order.

    Args:
        weights: ``(out, in)`` each, contiguous views of the model's.
        parameters: that they are views of.

    Attributes:
        copies: of the weights, in their order.
    """

    @torch.no_grad()
    def __init__(self, weights: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        self.copies = [blocked(w) for w in weights]
        self._parameters, self._stamp = parameters, stamp(parameters)
        flat = [w.view(-1) for w in weights]
        self._watched = [w[:: -(-len(w) // NUM_WATCHED)] for w in flat]
        self._seen = torch.cat(self._watched)

    @torch.no_grad()
    def stale(self) -> bool:
        """Whether the weights are others than those that were copied: by torch's counters of
        changes, and where they are passed by (``.data``), by some elements of each weight."""
        same = self._stamp == stamp(self._parameters)
        return not (same and torch.equal(self._seen, torch.cat(self._watched)))


class Copies:
    """On a model that we loaded: the copies of its weights, for all stacks that run over it.

    Each stack with copies of its own would take the memory again. They differ in speed, too, by
    where they came to lie (bench/LOG.md, 2026-11-23). Neither copied nor pickled with the model.
    """

    def __init__(self) -> None:
        self._blocks: Blocks | None = None
        self._places: Places = []

    def of(self, weights: Sequence[Tensor], parameters: Sequence[Tensor]) -> Blocks:
        """The copies of these weights as they are now; arguments as for ``Blocks``."""
        places = [(w.data_ptr(), w.shape) for w in weights]
        blocks = self._blocks
        if blocks is None or places != self._places or blocks.stale():
            self._blocks = blocks = Blocks(weights, parameters)
            self._places = places
        return blocks

    def __deepcopy__(self, memo: object) -> "Copies":
        return self

    def __reduce__(self) -> tuple[type["Copies"], tuple[()]]:
        return Copies, ()


def why_not(weights: Sequence[Tensor]) -> str | None:
    """Why these weights get no copies, in a few words; None if they do.

    By what weights and machine are, never by what is free at the moment: a machine has to give the
    same bits each time.
    """
    first = weights[0]
    if first.device.type != "cpu" or first.dtype not in (torch.bfloat16, torch.float32):
        return "only products in bfloat16 and float32 on a CPU are known to gain"
    if not works(first.dtype):
        return "this processor or this torch has no such products"
    if sum(w.nbytes for w in weights) > MEMORY_SHARE * memory_bytes():
        return "they would take more than an eighth of the machine's memory"
    return None


def read_in_place(weights: Sequence[Tensor]) -> bool:
    """Whether few rows in float32 are to be multiplied by oneDNN where these weights lie.

    torch leaves them to a library whose products need spare rows for a row's bits to stay, and take
    longer for as many; of small weights, which caches hold, they are the faster ones. By what
    processor and weights are, never by a clock: measured on AMD's, with AVX2 alone and with AVX-512
    (bench/LOG.md, 2026-11-29), and not on Intel's, whose that library is.
    """
    first = weights[0]
    if first.device.type != "cpu" or first.dtype != torch.float32:
        return False
    large = sum(w.numel() for w in weights if w.numel() >= LARGE)
    if large < MOSTLY * sum(w.numel() for w in weights):
        return False
    known = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and by_amd()
    return known and works(first.dtype, in_place=True) and all(w.is_contiguous() for w in weights)


def fewest_rows(dtype: torch.dtype, *, copied: bool, in_place: bool) -> int:
    """Of a decode pass on a processor where oneDNN multiplies, which may give a row the same bits
    among any number of them: as many as take no longer than one. 0: others multiply.

    With AVX-512 a row by a copy takes longer than three to six, and two as long as eight, as far as
    AMD's processors go; elsewhere each row takes more (bench/LOG.md, 2026-11-29). Where a row alone
    has a kernel of its own two take as long, and the proof says whether it has other bits.

    Args:
        copied: weights are, for ``multiplied``.
        in_place: it is ``multiplied_in_place``, which sees to rows alone itself.
    """
    if copied:
        return 4 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1
    if in_place:
        return 1
    return 2 if dtype == torch.bfloat16 and works(dtype) else 0


@cache
def works(dtype: torch.dtype, *, in_place: bool = False) -> bool:
    """Whether torch has such products here, by copies or in place, and the processor arithmetic of
    this dtype."""
    ops = torch.ops.mkldnn  # torch has no public way to ask, nor to multiply
    try:
        if dtype == torch.bfloat16 and not ops._is_mkldnn_bf16_supported():  # noqa: SLF001
            return False
        ones = torch.ones(ROWS, ROWS, dtype=dtype, device="cpu")
        weight = ones if in_place else blocked(ones)
        return bool((multiplied(ones, weight, None) == ROWS).all())
    except (AttributeError, RuntimeError):
        return False


def memory_bytes() -> int:
    """Of the machine, or of the container; 0 where nobody says."""
    try:
        least = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
    for limit in LIMITS:
        try:
            least = min(least, int(limit.read_text(encoding="utf-8")))
        except (ValueError, OSError):  # none is set, or there are none
            continue
    return least
