"""One round of all rows, wholly on the device: draft, verify, accept, commit.

This is the function that a graph holds. It takes its rows from ``Seats``, leaves them there, and
never asks the host: every shape in it follows from a ``Shape``. Each of torch's small kernels here
takes a graph about a microsecond, of some thousand that a token of a small model takes.
"""

import torch
from torch import Tensor

from layerskip.cache import KVCache
from layerskip.packed import Noise, PackedStack
from layerskip.plan import DraftPlan
from layerskip.seats import Seats, Shape

CERTAIN = 1.5  # more than any probability, rounded


class DeviceRound:
    """Draft with a plan's layers, verify with all of them.

    Args:
        stack: runs layers and chooses tokens by what the device knows.
        plan: of the drafts; None decodes plainly.
        vocab_ids: ids that drafts may have, ``(kept,)`` int32 ascending on the device; None: all.
    """

    def __init__(
        self, stack: PackedStack, plan: DraftPlan | None, vocab_ids: Tensor | None
    ) -> None:
        self.stack, self._vocab_ids = stack, vocab_ids
        depth = plan.shared_depth if plan is not None else 0
        self._shared, self._later = range(depth), range(depth, stack.num_layers)
        self._rest = plan.layers[depth:] if plan is not None else ()

    def __call__(self, shape: Shape, seats: Seats, cache: KVCache) -> None:
        """Draft, verify, accept, and leave a packet.

        A row drafts ``most`` tokens, but none that could not be emitted. One whose logits are not
        finite is left as it was, at rest: the host finds out why.
        """
        drafted, rows = shape.num_draft_tokens, slice(0, shape.num_rows)
        lengths, left, pending = seats.lengths[rows], seats.num_left[rows], seats.pending[rows]
        place = seats.places[: drafted + 1]
        # Places behind a row's draft; all of a row at rest, which has no token left.
        free = place > torch.minimum(seats.most[rows], left - 1)[:, None]
        slots = lengths[:, None] + place
        at = slots.masked_fill(free, -1).T.contiguous()
        following = slots.long() + 1 if shape.sampled else slots
        draft, hidden = self._draft(shape, seats, cache, at, following)
        draft = draft.masked_fill(free[:, 1:], -1)
        hidden = self.stack.run_rows(
            hidden, self._later, cache, at[0], drafted + 1, num_slots=shape.num_slots
        )
        target, sure = self.stack.choose(hidden, _noise(shape, seats, following))
        target, sure = (t.unflatten(0, (-1, drafted + 1)) for t in (target, sure))
        # A probability, unless logits are not finite: then no comparison holds, or it is infinite.
        left.mul_((free | (sure <= CERTAIN)).all(1))
        accept = self.stack.ops.accept_tokens
        emitted, _, last = accept(draft, target, lengths, left, seats.eos_ids)
        torch.where(last >= 0, last, pending, out=pending)
        counts = (emitted >= 0).sum(1, keepdim=True)
        torch.cat([draft, target, counts], dim=1, out=seats.packet_of(shape))

    def _draft(
        self, shape: Shape, seats: Seats, cache: KVCache, at: Tensor, following: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Drafted tokens, ``(rows, drafted)``, and what verify goes on from: the hidden states of
        the pending token and of each drafted one after the shared layers, ``(rows * (drafted + 1),
        width)``.

        Args:
            at: ``(drafted + 1, rows)`` int32, the slot of each row's next token; -1: it drafts no
                more.
            following: ``(rows, drafted + 1)``, positions of the tokens after those, of every row,
                whether it drafts or rests; int64 where rows draw by them.
        """
        drafted, slots = shape.num_draft_tokens, shape.num_slots
        token, tokens, states = seats.pending[: shape.num_rows], [], []
        for i in range(drafted + 1):
            hidden = self.stack.embed_ids(token)
            hidden = self.stack.run_rows(hidden, self._shared, cache, at[i], 1, num_slots=slots)
            states.append(hidden)
            if i < drafted:
                deep = self.stack.run_rows(hidden, self._rest, cache, at[i], 1, num_slots=slots)
                noise = _noise(shape, seats, following[:, i : i + 1])
                token, _ = self.stack.choose(deep, noise, self._vocab_ids)
                tokens.append(token)
        if not tokens:
            return token.new_empty(len(token), 0), states[0]
        return torch.stack(tokens, dim=1), torch.stack(states, dim=1).flatten(0, 1)


def _noise(shape: Shape, seats: Seats, positions: Tensor) -> Noise | None:
    """What the tokens at ``positions``, ``(rows, any)``, are drawn by; None is greedy."""
    if not shape.sampled:
        return None
    rows, count = slice(0, shape.num_rows), positions.shape[1]
    temperature, seeds = seats.temperature[rows], seats.seeds[rows]
    if count > 1:  # copied: of one row, expanding gives a view that repeats one number
        temperature, seeds = (t.repeat_interleave(count) for t in (temperature, seeds))
    return Noise(temperature, seeds, positions.flatten().contiguous())
