"""A transformers checkpoint as a stack of layers driven by index.

The user's model is never touched: everything runs on a twin that shares every tensor but has its
own modules and config, and whose attention is ours.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from layerskip.admission import check_model, decoder_layers, unwrapped
from layerskip.ambient import Decoding
from layerskip.blocks import Copies
from layerskip.cache import KVCache, Segment
from layerskip.dense import COPIES, DenseModel, Projections, fits
from layerskip.draft_head import DraftHead, Projection, head_over, why_whole
from layerskip.exactness import SWITCHED_OFF, Exactness, probe
from layerskip.exit_adapter import AdaptedHead, ExitAdapter, check_adapter
from layerskip.families import position_limit
from layerskip.layout import Layout, PassLayout, PrefillLayout
from layerskip.packing import FAMILIES, pack
from layerskip.pass_sizes import PassSizes
from layerskip.plan import DraftPlan
from layerskip.shared import SharedWeights
from layerskip.skeleton import Skeleton, share_twin

if TYPE_CHECKING:
    from layerskip.packed_forward import PackedModel

Head = Callable[[Tensor], Tensor]
PREFILL_CHUNK = 512
POSITION_CHUNK = 1024


def pack_model(model: PreTrainedModel) -> None:
    """Re-home a model's weights for speed; only one that we loaded ourselves. Values stay."""
    layers = decoder_layers(model)
    if all(fits(layer, FAMILIES) for layer in layers):
        for layer in layers:
            pack(layer)
        setattr(model, COPIES, Copies())


class DecoderStack:
    """``embed``, ``run_layers`` and ``logits`` over a twin of a checkpoint.

    Args:
        model: a loaded transformers causal LM, or one inside ``torch.compile`` or PEFT.
        exact: False gives up that a row's bits do not depend on the other rows of a pass.
        adapter: of one exit of this model; drafts that leave there run it, as if its bridge or
            block were layer ``num_layers``.

    Attributes:
        prefill_chunk: most tokens of a prompt that go through the layers at once; chunks end at
            multiples.
        one_row: whether a pass holds tokens of one row only.
        divides_products: whether its linear maps can take fewer rows at once than a pass has.
        probed_layers: one layer of each kind.
        widths: of the arrays that activations run over.
        score_changes: cap and sinks of attention scores, where the model has them.
        shared: the weights; it tells whether the model has others by now.
        weights_may_move: whether values that lie elsewhere by now are found there.
    """

    prefill_chunk = PREFILL_CHUNK
    weights_may_move = True

    def __init__(
        self, model: object, *, exact: bool = True, adapter: ExitAdapter | None = None
    ) -> None:
        inner = unwrapped(model)
        check_model(inner)
        owner = cast(PreTrainedModel, inner)
        self.twin = share_twin(owner)
        self.shared = SharedWeights(owner, self.twin, may_move=self.weights_may_move)
        self._forward = forward = self._make_forward(owner, exact=exact)
        config = self.twin.config
        self.backend = forward.backend
        self.num_layers: int = config.num_hidden_layers
        self.num_kv_heads, self.head_dim = forward.num_kv_heads, forward.head_dim
        self.group = forward.group
        self.windows, self.widths = forward.windows, forward.widths
        self.one_row, self.divides_products = forward.one_row, forward.divides_products
        self.probed_layers: tuple[int, ...] = forward.probed
        self.score_changes: tuple[float | None, Tensor | None] = forward.softcap, forward.sinks
        self.vocab_size: int = config.vocab_size
        self.max_positions = position_limit(config)
        self.dtype, self.device = self.twin.dtype, self.twin.device
        self._positions = torch.zeros(1, 0, dtype=torch.int64, device=self.device)
        self.pass_sizes = PassSizes(self)
        self._adapted = adapter is not None
        self.adapter: ExitAdapter | None = None
        self.exactness: Exactness
        with Decoding():
            self.exactness = self._settle(exact)
        self.pass_sizes.note_probe()
        if adapter is not None:
            check_adapter(adapter, self)
            self.adapter = adapter
            self.windows = (*self.windows, self.widest_window)

    @property
    def fewest_rows(self) -> int:
        """Of the least pass, if passes without spare rows beyond that are worth a proof; else 0. Of
        an adapter's products none is probed."""
        return 0 if self._adapted else self._forward.fewest_rows

    @property
    def products(self) -> Iterable[tuple[Projections, Tensor, int]]:
        """Of passes, as far as they are known, with each weight, and where its outputs begin."""
        return self._forward.products

    @property
    def widest_window(self) -> int | None:
        """What a block sees: as far as the farthest of the model's layers."""
        windows = [w for w in self.windows if w is not None]
        return max(windows) if len(windows) == len(self.windows) else None

    @property
    def num_extra_layers(self) -> int:
        """Layers of the cache that are not the model's: 1 with an adapter's block."""
        return 0 if self.adapter is None or self.adapter.block is None else 1

    def adapter_at(self, plan: DraftPlan) -> ExitAdapter | None:
        """What drafts with this plan run after its layers."""
        adapter = self.adapter
        return adapter if adapter and plan.exit_layer == adapter.shape.exit_layer else None

    def has_block_at(self, plan: DraftPlan | None) -> bool:
        """Whether drafts with this plan read keys and values that full depth does not write."""
        return plan is not None and self.adapter_at(plan) is not None and self.num_extra_layers > 0

    def draft_layers(self, plan: DraftPlan) -> tuple[int, ...]:
        """Layers of a draft pass; ``num_layers`` stands for the adapter's bridge or block."""
        adapter = self.adapter_at(plan)
        return (*plan.layers, self.num_layers) if adapter and adapter.shape.deepens else plan.layers

    def draft_head(self, plan: DraftPlan, head: DraftHead | None = None) -> Head:
        """What draws a plan's drafts from its hidden states, adapter included.

        Args:
            head: over the draft vocabulary; None: the model's own.
        """
        adapter = self.adapter_at(plan)
        if adapter is None:
            return self.logits if head is None else head
        own = cast(nn.Linear, self.twin.get_output_embeddings())
        return AdaptedHead(adapter, own, self.logits, self._at_once, head)

    @property
    def _at_once(self) -> int | None:
        """Rows of an adapter's products in a decode pass: nothing was probed at other numbers."""
        exactness = self.exactness
        return min(exactness.row_quantum, exactness.product_rows) if exactness.wanted else None

    def _make_forward(
        self, owner: PreTrainedModel, *, exact: bool
    ) -> "DenseModel | Skeleton | PackedModel":
        """What runs the layers of the twin."""
        if all(fits(layer) for layer in decoder_layers(self.twin)):
            return DenseModel(self.twin, exact=exact)
        return Skeleton(self.twin, owner.config._attn_implementation)  # noqa: SLF001

    def _settle(self, exact: bool) -> Exactness:
        return probe(self) if exact else SWITCHED_OFF

    @property
    def kv_bytes_per_token(self) -> int:
        num_layers = self.num_layers + self.num_extra_layers
        elements = 2 * num_layers * self.num_kv_heads * self.head_dim
        return elements * torch.finfo(self.dtype).bits // 8

    @property
    def free_rows(self) -> int:
        """Rows of a decode pass that cost no more than one."""
        return self.exactness.free_rows

    @property
    def runs_rounds(self) -> bool:
        """Whether its device runs whole rounds, recorded, without the host."""
        return False

    def new_cache(self, *, num_rows: int, num_slots: int, num_layers: int | None = None) -> KVCache:
        """An empty cache; ``num_slots`` is rounded up to whole attention blocks.

        Args:
            num_layers: that run over it, from the first on, and nothing else does; None: all.
        """
        self.shared.check()
        return KVCache(
            num_layers=self.num_layers if num_layers is None else num_layers,
            num_rows=num_rows,
            num_slots=num_slots,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            device=self.device,
            attended_block=self.exactness.slot_block,
            num_extra_layers=self.num_extra_layers if num_layers is None else 0,
        )

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """Token ids -> ``(tokens, hidden)``, padded with spare rows to a legal pass size.

        Learned positions are added when the rows enter ``run_layers``, which knows where they are.
        """
        count = len(token_ids)
        padded = count if self.exactness.by_token else self.pass_sizes.padded(count)
        ids = torch.tensor([*token_ids, *[0] * (padded - count)], device=self.device)
        return self._forward.embed(ids)

    def run_layers(
        self, hidden: Tensor, layers: Iterable[int], cache: KVCache, segments: Sequence[Segment]
    ) -> Tensor:
        """Run decoder layers over the tokens of ``segments``, reading and writing ``cache``.

        Args:
            hidden: ``(>= tokens, hidden)``, tokens in the order of the segments, spare rows last.
            layers: indices, in order; ``num_layers`` is the adapter.
            cache: its slots at the segments' positions are overwritten in those layers.
            segments: at most one per row.

        Returns:
            ``(>= tokens, hidden)``, spare rows last.
        """
        layers = tuple(layers)
        if not layers:
            return hidden
        parts = self.pass_sizes.split(segments)
        if len(parts) == 1 and (self.exactness.holds or not self.exactness.wanted):
            out = self.run_pass(hidden, layers, cache, parts[0])
            return out[: sum(s.count for s in segments)] if self.exactness.by_token else out
        outputs, start = [], 0
        for part in parts:
            count = sum(s.count for s in part)
            out = self.run_pass(hidden[start : start + count], layers, cache, part)
            outputs.append(out[:count])
            start += count
        return torch.cat(outputs)

    def logits(self, hidden: Tensor, project: Projection | None = None) -> Tensor:
        """``(tokens, hidden)`` -> ``(tokens, vocab)`` in the model's dtype, spare rows last.

        Args:
            project: in the place of the head, where ``why_whole_head`` is None.
        """
        if self.exactness.by_token:
            return self.head(hidden, project=project)
        limit = self.pass_sizes.largest(hidden.shape[0])
        if hidden.shape[0] <= limit:
            return self.head(self._pad(hidden), project=project)
        pieces = hidden.split(self.pass_sizes.pieces(hidden.shape[0]))
        return torch.cat([self.head(self._pad(p), project=project)[: p.shape[0]] for p in pieces])

    def head(
        self,
        hidden: Tensor,
        product_rows: int | None = None,
        project: Projection | None = None,
    ) -> Tensor:
        """Final norm and vocabulary projection of one pass's rows, as they are."""
        rows = self.pass_sizes.product_rows if product_rows is None else product_rows
        if len(hidden) <= rows:
            return self._forward.head(hidden, project)
        return torch.cat([self._forward.head(part, project) for part in hidden.split(rows)])

    def head_over(self, ids: Iterable[int] | Tensor) -> DraftHead:
        """The head over these token ids alone; its rows at them are copied.

        Raises:
            ValueError: no ids, ids out of range, or a head that is not a plain product (the
                reason is ``why_whole_head``).
        """
        if self.why_whole_head is not None:
            raise ValueError(f"the draft's head cannot be trimmed: {self.why_whole_head}")
        return head_over(self, ids)

    @cached_property
    def why_whole_head(self) -> str | None:
        """Why a draft has to use the whole head; None if ``head_over`` can leave ids out."""
        return why_whole(self)

    def prefill(
        self,
        token_ids: Sequence[int],
        cache: KVCache,
        row: int,
        *,
        start: int = 0,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """Write a prompt into ``row`` at full depth; logits of its last position, ``(vocab,)``.

        Chunks end at fixed slots, so the bits do not depend on other rows.

        Args:
            token_ids: the whole prompt.
            start: slots below hold the tokens before it already.
            states: gets ``(tokens, hidden)`` of each chunk after the adapter's exit.
        """
        depth = 0 if states is None or self.adapter is None else self.adapter.shape.exit_layer
        for embedded, layout in self._chunks(token_ids, cache, row, start):
            hidden = self._drive(embedded, range(depth), layout) if depth else embedded
            if depth and states is not None:
                states.append(hidden)
            hidden = self._drive(hidden, range(depth, self.num_layers), layout)
        return self.logits(hidden[-1:])[0]

    def adapt_chunk(self, states: Tensor, cache: KVCache, row: int, start: int) -> None:
        """Write the adapter's keys and values of one chunk of a prompt, as ``prefill`` has it.

        Args:
            states: ``(tokens, hidden)`` after the adapter's exit.
            start: slot of the first one.
        """
        layout = self._chunk_at(cache, Segment(row, start, len(states)))
        self._drive(states, (self.num_layers,), layout)

    def all_exit_logits(
        self, token_ids: Sequence[int], exits: Sequence[int], *, since: int = 0
    ) -> dict[int, Tensor]:
        """Teacher-forced logits of one text after each number of layers in ``exits``.

        Args:
            since: the first token whose logits are wanted.

        Returns:
            For each exit ``(tokens since then, vocab)`` float32, at the adapter's exit those of
            its draft; the hidden states of one pass serve all.
        """
        adapter = self.adapter
        cache = self.new_cache(num_rows=1, num_slots=len(token_ids))
        collected: dict[int, list[Tensor]] = {e: [] for e in exits}
        for embedded, layout in self._chunks(token_ids, cache, 0, 0):
            hidden, depth = embedded, 0
            for e in sorted(exits):
                hidden = self._drive(hidden, range(depth, e), layout)
                depth, deep = e, hidden
                head: Head = self.head
                if adapter is not None and e == adapter.shape.exit_layer:
                    plan = DraftPlan.exiting(num_layers=self.num_layers, exit_layer=e)
                    deep = self._drive(hidden, self.draft_layers(plan)[e:], layout)
                    head = self.draft_head(plan)
                # The layers run over every token: later ones attend to it.
                if since < layout.end:
                    asked = deep[max(0, since - layout.start) :]
                    collected[e].append(head(asked)[: len(asked)].float())
        return {e: torch.cat(parts) for e, parts in collected.items()}

    def _chunks(
        self, token_ids: Sequence[int], cache: KVCache, row: int, start: int
    ) -> Iterator[tuple[Tensor, PrefillLayout]]:
        """Embedded pieces of a prompt from ``start`` on, and where each goes."""
        if self._forward.refresh():
            self.backend = self._forward.backend
            self.pass_sizes.forget()
        ids, chunk = torch.tensor(token_ids, device=self.device), self.prefill_chunk
        while start < len(token_ids):
            end = min(len(token_ids), (start // chunk + 1) * chunk)
            layout = self._chunk_at(cache, Segment(row, start, end - start))
            yield self._forward.embed(ids[start:end]), layout
            start = end

    def _chunk_at(self, cache: KVCache, segment: Segment) -> PrefillLayout:
        positions = self._positions_below(segment.start + segment.count)
        return PrefillLayout(cache, segment, windows=self.windows, all_positions=positions)

    def run_pass(
        self,
        hidden: Tensor,
        layers: Sequence[int],
        cache: KVCache,
        segments: Sequence[Segment],
        product_rows: int | None = None,
    ) -> Tensor:
        """``run_layers`` as one pass, whatever its size."""
        hidden = self._pad(hidden)
        rows = hidden.shape[0]
        layout = PassLayout(
            cache,
            segments,
            num_rows=rows,
            group=self.group,
            tile=self.exactness.tile,
            product_rows=self.pass_sizes.product_rows if product_rows is None else product_rows,
            windows=self.windows,
            all_positions=self._positions_below(max(s.start for s in segments) + rows),
        )
        return self._drive(hidden, layers, layout)

    def _drive(self, hidden: Tensor, layers: Iterable[int], layout: Layout) -> Tensor:
        """All that runs layers comes through here."""
        layers = tuple(layers)
        adapted = layers[-1:] == (self.num_layers,)
        own = layers[:-1] if adapted else layers
        if own or not adapted:
            hidden = self._forward.run(hidden, own, layout)
        if not adapted:
            return hidden
        assert self.adapter is not None
        return self.adapter.run(hidden, layout, self._at_once if layout.padded else None)

    def _pad(self, hidden: Tensor) -> Tensor:
        missing = self.pass_sizes.padded(hidden.shape[0]) - hidden.shape[0]
        return F.pad(hidden, (0, 0, 0, missing)) if missing else hidden

    def _positions_below(self, num_positions: int) -> Tensor:
        """``(1, >= num_positions)``: 0, 1, 2, ... Beyond the last legal position, where only spare
        rows lie, that one is repeated: a learned table has no more."""
        positions = self._positions
        if positions.shape[1] < num_positions:
            num_positions = -(-num_positions // POSITION_CHUNK) * POSITION_CHUNK
            positions = torch.arange(num_positions, device=self.device)[None]
            self._positions = positions = positions.clamp(max=self.max_positions - 1)
        return positions
