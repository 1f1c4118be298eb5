"""Verifying: one full-depth pass over the pending tokens and the drafts, above what drafts left."""

from collections.abc import Sequence

import torch
from torch import Tensor

from layerskip.cache import KVCache, Segment
from layerskip.drafting import Draft, DraftRequest
from layerskip.model import DecoderStack
from layerskip.params import MAX_NUM_DRAFT_TOKENS


class Verifier:
    """Verifies what was drafted with the first ``shared_depth`` layers, and others.

    Args:
        stack: the model.
        shared_depth: leading layers that drafts ran as full depth does: it goes on from there.
    """

    def __init__(self, stack: DecoderStack, shared_depth: int) -> None:
        self.stack, self.shared_depth = stack, shared_depth

    def verify(
        self, requests: Sequence[DraftRequest], drafts: Sequence[Draft], cache: KVCache
    ) -> tuple[list[Tensor], list[Tensor]]:
        """One full-depth pass. Writes slots from each row's length on, in all layers.

        Returns:
            Each row's logits after the pending token and after each drafted one, ``(tokens,
            vocab)``, and the hidden states of these tokens after the shared layers.
        """
        self._sweep_drafts(requests, drafts, cache)
        hidden = shared = self._through_shared_layers(requests, drafts, cache)
        segments = [
            Segment(r.slot_row, r.length, len(d.tokens) + 1)
            for r, d in zip(requests, drafts, strict=True)
        ]
        layers = range(self.shared_depth, self.stack.num_layers)
        hidden = self.stack.run_layers(hidden, layers, cache, segments)
        counts = [s.count for s in segments]
        parts = list(self.stack.logits(hidden)[: sum(counts)].split(counts))
        for r, d in zip(requests, drafts, strict=True):
            if r.sampler.constraint is not None:
                r.sampler.constraint.prepare(r.context + d.tokens, len(d.tokens) + 1)
        states = list(shared[: sum(counts)].split(counts))
        # Nothing spoils a pass without drafts; on a GPU to ask is also to wait for its end, by
        # which sampling is told from it.
        asks = hidden.is_cuda or any(d.tokens for d in drafts)
        if asks and not hidden[: sum(counts)].isfinite().all():
            for i, (r, d) in enumerate(zip(requests, drafts, strict=True)):
                if d.tokens:
                    parts[i], states[i] = self._one_by_one(r, d, cache)
        return parts, states

    def _one_by_one(
        self, request: DraftRequest, draft: Draft, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        """What ``verify`` gives of a row, without later tokens in the pass: as plain decoding
        has it.

        Attention reads what it masks, and 0 times NaN is NaN: one drafted token that the model
        can't take spoils the positions before it, which have to be judged as if it were not there.
        """
        end = request.length + len(draft.tokens) + 1
        cache.sweep(request.slot_row, request.length, end, cache.model_layers)
        rows, states, depth = [], [], self.shared_depth
        for i, token in enumerate((request.pending, *draft.tokens)):
            segments = [Segment(request.slot_row, request.length + i, 1)]
            hidden, deep = self.stack.embed([token]), range(depth, self.stack.num_layers)
            hidden = self.stack.run_layers(hidden, range(depth), cache, segments)
            states.append(hidden[:1])
            hidden = self.stack.run_layers(hidden, deep, cache, segments)
            rows.append(self.stack.logits(hidden)[:1])
        return torch.cat(rows), torch.cat(states)

    def _sweep_drafts(
        self, requests: Sequence[DraftRequest], drafts: Sequence[Draft], cache: KVCache
    ) -> None:
        """Leave nothing of a draft but what is built on: the slots of the shared layers, and of
        the adapter's block."""
        above = slice(self.shared_depth, self.stack.num_layers)
        for r, d in zip(requests, drafts, strict=True):
            kept = r.length + len(d.shared)
            cache.sweep(r.slot_row, kept, r.length + MAX_NUM_DRAFT_TOKENS + 1)
            if d.shared:
                cache.sweep(r.slot_row, r.length, kept, above)

    def _through_shared_layers(
        self, requests: Sequence[DraftRequest], drafts: Sequence[Draft], cache: KVCache
    ) -> Tensor:
        """Hidden states after the shared layers for all tokens to verify, rows one after another.

        An early exit's draft left them for every token but each row's last. What has none goes
        through here: that one, and looked-up tokens.
        """
        rest = [
            (r.pending, *d.tokens)[len(d.shared) :] for r, d in zip(requests, drafts, strict=True)
        ]
        segments = [
            Segment(r.slot_row, r.length + len(d.shared), len(tokens))
            for r, d, tokens in zip(requests, drafts, rest, strict=True)
        ]
        hidden = self.stack.embed([token for tokens in rest for token in tokens])
        hidden = self.stack.run_layers(hidden, range(self.shared_depth), cache, segments)
        if not any(d.shared for d in drafts):
            return hidden
        parts = hidden[: sum(map(len, rest))].split([len(tokens) for tokens in rest])
        states = [s for d, part in zip(drafts, parts, strict=True) for s in (*d.shared, *part)]
        return torch.stack(states)
