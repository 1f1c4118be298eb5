"""The head over chosen columns of the vocabulary: copied rows of its weight.

A draft pass of a small model is mostly its head, and the head is as wide as what may be guessed.
Whatever a draft can't guess has q = 0: every verification mode stays exact.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layerskip.ambient import Decoding
from layerskip.blocks import NUM_WATCHED, ROWS, blocked, fewest_rows, multiplied, stamp, why_not
from layerskip.cache import Segment

if TYPE_CHECKING:
    from layerskip.model import DecoderStack

Projection = Callable[[Tensor], Tensor]
EXTRA_MULTIPLE = 16  # extra columns come in as many, so that few kernels ever run
COLUMN_ROUNDINGS = 16  # of the largest logit: products of other shapes add up in other orders


def spread(logits: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """Logits of some ids as logits of all, -inf elsewhere: softmax gives q on the kept ids alone.

    Args:
        logits: ``(rows, n)`` of any dtype.
        ids: ``(n,)`` int64, the columns' token ids.

    Returns:
        ``(rows, vocab_size)`` float32.
    """
    wide = logits.new_full((len(logits), vocab_size), float("-inf"), dtype=torch.float32)
    return wide.scatter_(1, ids.expand(len(logits), -1), logits.float())


def greedy_kept(logits: Tensor, ids: Tensor) -> list[int]:
    """Likeliest kept id of each row of ``(rows, n)``; ties go to the lowest, as ``ids`` ascend."""
    return ids[logits.float().argmax(-1)].tolist()


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Copies of some rows of a head.

    Attributes:
        ids: ``(n,)`` int64 ascending, on the head's device.
        weight: ``(>= n, hidden)``; rows beyond are spare.
        bias: as long as ``weight``, or None.
        blocks: of the weight, where products read them faster; None for few rows, which change.
        fewest: rows of a product at least: its kernel, and q, would be others of fewer.
    """

    ids: Tensor
    weight: Tensor
    bias: Tensor | None
    blocks: Tensor | None
    fewest: int

    @classmethod
    @torch.no_grad()
    def of(cls, head: nn.Linear, ids: Tensor, multiple: int = 1) -> "HeadRows":
        missing = -len(ids) % multiple
        rows = torch.cat([ids, ids[-1:].expand(missing)])
        # Several times as fast as ``weight[rows]``, where there are thousands of them.
        weight = head.weight.index_select(0, rows)
        bias = None if head.bias is None else head.bias[rows]
        blocks = blocked(weight) if multiple == 1 and why_not([weight]) is None else None
        fewest = fewest_rows(weight.dtype, copied=True, in_place=False)
        return cls(ids, weight, bias, blocks, ROWS if blocks is None else max(2, fewest))

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[-2]
        if rows < self.fewest:
            x = F.pad(x, (0, 0, 0, self.fewest - rows))
        if self.blocks is not None:
            return multiplied(x, self.blocks, self.bias)[..., :rows, :]
        return F.linear(x, self.weight, self.bias)[..., :rows, :]

    def equal(self, head: nn.Linear) -> bool:
        """Whether some of the rows, spread over all, are still those of the head."""
        every = slice(0, len(self.ids), max(1, len(self.ids) // NUM_WATCHED))
        at = self.ids[every]
        same = torch.equal(self.weight[: len(self.ids)][every], head.weight[at])
        if self.bias is None or not same:
            return same
        return torch.equal(self.bias[: len(self.ids)][every], head.bias[at])


class DraftHead:
    """``(rows, hidden)`` -> ``(rows, len(ids))``: the model's logits at ``ids``, but for rounding.

    A value: ``including`` and ``fresh`` give others, which share the copied rows.

    Args:
        head: the model's own.
        base: its copied rows.
        logits: all that comes before and after the head, with another map in its place.
        extra: more copied rows, none of them in ``base``.
    """

    def __init__(
        self,
        head: nn.Linear,
        base: HeadRows,
        logits: Callable[[Tensor, Projection], Tensor],
        extra: HeadRows | None = None,
    ) -> None:
        self._head, self._base, self._logits, self._extra = head, base, logits, extra
        self._stamp = stamp(head.parameters())
        self._has = base.ids.new_zeros(head.out_features, dtype=torch.bool)
        self._has[base.ids] = True
        self.ids = base.ids
        self.extra_ids = frozenset[int]() if extra is None else frozenset(extra.ids.tolist())
        self._order: Tensor | None = None
        if extra is not None:
            self._has[extra.ids] = True
            self.ids = self._has.nonzero()[:, 0]  # ascending: a sort takes far longer
            place = base.ids.new_empty(head.out_features)
            joined = torch.cat([base.ids, extra.ids])
            place[joined] = torch.arange(len(joined), device=place.device)
            self._order = place[self.ids]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Final norm and head over ``ids``, in the model's dtype; spare rows last."""
        return self._logits(hidden, self.project)

    def project(self, x: Tensor) -> Tensor:
        """The head alone: ``(rows, what it reads)`` -> ``(rows, len(ids))``."""
        if self._extra is None:
            return self._base(x)
        # Two products: one matrix would have to be copied as a whole for every request.
        return torch.cat([self._base(x), self._extra(x)], dim=-1)[..., self._order]

    def including(self, extra_ids: Iterable[int]) -> "DraftHead":
        """This head with these ids too: of a prompt, of a grammar, emitted but not kept.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        new = frozenset(extra_ids) - self.extra_ids
        if not new:  # as in most rounds, whose rows bring thousands of ids
            return self
        more = _checked_ids(new, self._head)
        more = more[~self._has[more]]
        if not len(more):
            return self
        if self._extra is not None:
            more = torch.cat([self._extra.ids, more]).sort().values
        rows = HeadRows.of(self._head, more, EXTRA_MULTIPLE)
        return DraftHead(self._head, self._base, self._logits, rows)

    def fresh(self) -> "DraftHead":
        """This head, its rows copied anew if the model's weights have changed since.

        Whole updates are seen, by torch's counter of changes or in some watched rows. An old copy
        would cost acceptance, never exactness.
        """
        if self._stamp == stamp(self._head.parameters()) and self._base.equal(self._head):
            return self
        base = HeadRows.of(self._head, self._base.ids)
        extra = self._extra
        if extra is not None:
            extra = HeadRows.of(self._head, extra.ids, EXTRA_MULTIPLE)
        return DraftHead(self._head, base, self._logits, extra)


def over_all(
    logits: Tensor, head: DraftHead | None, own_ids: frozenset[int], vocab_size: int
) -> Tensor:
    """A row's logits over the whole vocabulary. What the head knows for other rows' sake only is
    left out: q must not depend on the neighbours.

    Args:
        logits: ``(rows, ids of the head)``.
        head: that they are of; None: the model's own, and they are as they are.
        own_ids: beyond the draft vocabulary, that the row may draft.

    Returns:
        ``(rows, vocab_size)``.
    """
    if head is None:
        return logits
    scores = spread(logits, head.ids, vocab_size)
    foreign = head.extra_ids - own_ids
    if foreign:
        scores[:, list(foreign)] = float("-inf")
    return scores


def head_over(stack: "DecoderStack", ids: Iterable[int] | Tensor) -> DraftHead:
    """The head over ``ids``, of a stack that has no reason to use the whole one."""
    head = cast(nn.Linear, stack.twin.get_output_embeddings())
    chosen = _checked_ids(ids, head)
    if not len(chosen):
        raise ValueError("a draft vocabulary needs at least one id, got none")
    return DraftHead(head, HeadRows.of(head, chosen), stack.logits)


def why_whole(stack: "DecoderStack") -> str | None:
    """Why rows of the head's weight do not give columns of the logits; None if they do."""
    head = stack.twin.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"its head is {type(head).__name__}, not a plain Linear"
    # torch has no public way to ask.
    if head._forward_hooks or head._forward_pre_hooks:  # noqa: SLF001
        return "its head has hooks"
    if not all(type(p) is nn.Parameter and type(p.data) is Tensor for p in head.parameters()):
        return "its head's weight is not a plain tensor"
    if head.out_features != stack.vocab_size:
        return f"its head has {head.out_features} columns, its vocabulary {stack.vocab_size}"
    return None if _columns_agree(stack) else "what follows its head depends on all columns"


@Decoding()
def _columns_agree(stack: "DecoderStack") -> bool:
    """Whether every other column, of one token after one layer of each kind, is that of all."""
    if stack.vocab_size < 2:
        return True
    cache = stack.new_cache(num_rows=1, num_slots=1)
    hidden = stack.run_layers(stack.embed([0]), stack.probed_layers, cache, [Segment(0, 0, 1)])
    head = head_over(stack, range(1, stack.vocab_size, 2))
    want, got = stack.logits(hidden)[:1, head.ids].float(), head(hidden)[:1].float()
    if got.shape != want.shape:
        return False
    rounding = torch.finfo(stack.dtype).eps * want.abs().max()
    return bool((got - want).abs().max() <= COLUMN_ROUNDINGS * rounding)


def _checked_ids(ids: Iterable[int] | Tensor, head: nn.Linear) -> Tensor:
    """Ascending ``(n,)`` int64 on the head's device, each id once."""
    if not isinstance(ids, Tensor):
        ids = torch.tensor(list(ids), dtype=torch.int64, device="cpu")
    chosen = ids.to(head.weight.device, torch.int64).unique()
    if len(chosen) and not 0 <= int(chosen[0]) <= int(chosen[-1]) < head.out_features:
        raise ValueError(
            f"draft vocabulary ids must be between 0 and {head.out_features - 1}, "
            f"got {int(chosen[0])} to {int(chosen[-1])}"
        )
    return chosen
