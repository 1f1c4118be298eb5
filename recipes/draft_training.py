"""One training step of an exit adapter: the frozen model's states, its own drafts, and the loss."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from einops import rearrange, repeat
from packing import Batch, document_mask, within
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from layerskip.admission import decoder_layers
from layerskip.exit_adapter import ExitAdapter
from layerskip.model import DecoderStack
from layerskip.training.losses import draft_loss, sliding_survival

CHUNK_TOKENS = 512
# Bytes of draft's and target's logits along a micro-batch's text; of more, chunks are made again in
# the backward pass.
KEPT_LOGITS = 1 << 27


class _DeepEnoughError(Exception):
    """Ends a forward pass at the exit."""


class Backbone:
    """A frozen model: its states after the exit and after its last layer.

    Args:
        model: a loaded transformers causal LM. Its parameters are set to need no gradients.
        exit_layer: leading layers that the draft runs.
    """

    def __init__(self, model: Any, exit_layer: int) -> None:
        self.model, self.exit_layer = model.eval().requires_grad_(False), exit_layer
        self.stack = DecoderStack(model, exact=False)
        self.head = model.get_output_embeddings()
        self._layers = decoder_layers(model)

    def finish(self, states: Tensor, project: Any = None) -> Tensor:
        """Final norm and head, or another map in its place: ``(rows, hidden)`` -> ``(rows, n)``."""
        return self.stack.head(states, len(states), project)

    @torch.no_grad()
    def states(
        self, ids: Tensor, positions: Tensor, mask: Tensor, *, to_exit: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states after the exit and, unless ``to_exit``, after the last layer.

        Args:
            ids, positions: ``(rows, seqlen)`` int64.
            mask: ``(rows, 1, seqlen, seqlen)`` bool, True where a token attends, as far as the
                layer's window reaches.

        Returns:
            ``(rows, seqlen, hidden)`` twice, before the final norm.
        """
        at_exit: list[Tensor] = []
        at_end: list[Tensor] = []

        def note_exit(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            at_exit.append(args[0] if args else kwargs["hidden_states"])
            if to_exit:
                raise _DeepEnoughError

        def note_end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            at_end.append(output[0] if isinstance(output, tuple) else output)

        handles = [
            self._layers[self.exit_layer].register_forward_pre_hook(note_exit, with_kwargs=True),
            self._layers[-1].register_forward_hook(note_end),
            *self._see_windows(positions, mask),
        ]
        try:
            self.model.base_model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=self._bias(mask),
                use_cache=False,
            )
        except _DeepEnoughError:
            return at_exit[0], None
        finally:
            for handle in handles:
                handle.remove()
        return at_exit[0], at_end[0]

    def hidden(
        self, adapter: ExitAdapter, at_exit: Tensor, positions: Tensor, mask: Tensor
    ) -> Tensor:
        """``ExitAdapter.hidden`` where its block sees as far as in decoding."""
        return adapter.hidden(at_exit, positions, within(mask, positions, self.stack.widest_window))

    def _see_windows(self, positions: Tensor, mask: Tensor) -> Iterator[RemovableHandle]:
        """Give layers with a window their own mask: transformers takes one of ours as it is."""
        windows = self.stack.windows
        biases = {w: self._bias(within(mask, positions, w)) for w in set(windows) - {None}}
        for layer, window in zip(self._layers, windows, strict=True):
            if window is not None:

                def see(
                    module: nn.Module,
                    args: tuple[Any, ...],
                    kwargs: dict[str, Any],
                    bias: Tensor = biases[window],
                ) -> tuple[tuple[Any, ...], dict[str, Any]]:
                    return args, kwargs | {"attention_mask": bias}

                yield layer.register_forward_pre_hook(see, with_kwargs=True)

    def _bias(self, mask: Tensor) -> Tensor:
        """What is added to scores: the lowest number where a token does not attend."""
        bias = torch.zeros(mask.shape, dtype=self.model.dtype, device=mask.device)
        return bias.masked_fill_(~mask, torch.finfo(self.model.dtype).min)


@dataclass(frozen=True)
class Rollout:
    """The draft's own steps from sampled places.

    Attributes:
        starts: places of a row.
        tokens: drafted from each, and each judged by the full model; at least 1.
        temperature: that they are drawn at, above 0.
        seed: of the draws.
    """

    starts: int
    tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, eq=False)
class Sequences:
    """Rows of text followed by chains, drafts that branch off it.

    Attributes:
        ids, positions: ``(rows, seq_len + starts * steps)`` int64; chain by chain after the text.
        mask: ``(rows, 1, length, length)`` bool.
        starts: ``(rows, starts)`` int64, the text's token that each chain follows.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    starts: Tensor


def with_chains(batch: Batch, starts: Tensor, tokens: Tensor) -> Sequences:
    """Text with chains behind it. A chain's token attends to the text of its document up to the
    chain's start, and to its chain.

    Args:
        batch: rows of text.
        starts: ``(rows, starts)`` int64.
        tokens: ``(rows, starts, steps)`` int64, drafted after each start.
    """
    rows, num_starts, steps = tokens.shape
    length = batch.ids.shape[1]
    begins = repeat(starts, "row start -> row (start step)", step=steps)  # of each chain token
    after = torch.arange(1, steps + 1, device=starts.device).repeat(num_starts)
    chain = repeat(
        torch.arange(num_starts, device=starts.device), "start -> (start step)", step=steps
    )
    slots = torch.arange(length, device=starts.device)
    document = batch.documents.gather(1, begins)
    to_text = (batch.documents[:, None] == document[..., None]) & (slots <= begins[..., None])
    to_chain = (chain[:, None] == chain) & (after <= after[:, None])
    lower = torch.cat([to_text, to_chain.expand(rows, -1, -1)], dim=2)
    upper = document_mask(batch.documents)[:, 0]
    upper = torch.cat([upper, upper.new_zeros(rows, length, num_starts * steps)], dim=2)
    return Sequences(
        torch.cat([batch.ids, rearrange(tokens, "row start step -> row (start step)")], dim=1),
        torch.cat([batch.positions, batch.positions.gather(1, begins) + after], dim=1),
        torch.cat([upper, lower], dim=1)[:, None],
        starts,
    )


def draw_starts(batch: Batch, rollout: Rollout, step: int) -> tuple[Tensor, list[torch.Generator]]:
    """``(rows, starts)`` places whose next token counts, and each row's generator.

    By seed, step and the row's number in the step, so that processes draw what one would.
    """
    starts, generators = [], []
    for labels, documents in zip(batch.labels.cpu(), batch.documents.cpu(), strict=True):
        row = batch.first_document + int(documents[0])
        seed = (rollout.seed * 1_000_003 + step) * 1_000_003 + row
        generator = torch.Generator().manual_seed(seed % 2**63)
        places = (labels != -100).nonzero()[:, 0]
        picked = torch.randint(len(places), (rollout.starts,), generator=generator)
        starts.append(places[picked])
        generators.append(generator)
    return torch.stack(starts).to(batch.ids.device), generators


class DraftLoss(nn.Module):
    """What an adapter learns by; one module, so that accelerate can wrap it.

    Args:
        adapter: is trained.
        backbone: is not, and is no part of the module.
        temperature: of the distributions that are compared, above 0.
        cross_entropy: share of the loss.
        survival_tokens: of the drafts whose survival weighs positions.
    """

    def __init__(
        self,
        adapter: ExitAdapter,
        backbone: Backbone,
        *,
        temperature: float,
        cross_entropy: float,
        survival_tokens: int,
    ) -> None:
        super().__init__()
        self.adapter = adapter
        self._outside = (backbone,)  # a tuple hides it from the module's parameters
        self.temperature, self.cross_entropy = temperature, cross_entropy
        self.survival_tokens = survival_tokens

    @property
    def backbone(self) -> Backbone:
        return self._outside[0]

    def forward(
        self, at_exit: Tensor, at_end: Tensor, sequences: Sequences, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """The mean of the rows' losses, and of the acceptance along the text.

        Each row's is an average over its positions, weighted by how many of the drafts considered
        get there: one from every place of the text, by ``sliding_survival``, and each chain.

        Args:
            at_exit, at_end: ``(rows, length, hidden)`` states of ``sequences``.
            sequences: text and chains.
            batch: the text.
        """
        hidden = self.backbone.hidden(self.adapter, at_exit, sequences.positions, sequences.mask)
        rows = zip(hidden, at_end, batch.documents, batch.labels, sequences.starts, strict=True)
        logits_bytes = 8 * batch.labels.numel() * self.backbone.head.weight.shape[0]
        kept = logits_bytes <= KEPT_LOGITS
        make = _made if kept else partial(checkpoint, use_reentrant=False)
        found = [self._row(make, *row) for row in rows]
        losses, accepted = zip(*found, strict=True)
        return torch.stack(losses).mean(), torch.stack(accepted).mean()

    def _row(
        self,
        make: Callable[..., Any],
        hidden: Tensor,
        at_end: Tensor,
        documents: Tensor,
        labels: Tensor,
        starts: Tensor,
    ) -> tuple[Tensor, Tensor]:
        length, counts = len(labels), labels != -100
        accepted = hidden.new_zeros(0, dtype=torch.float32)
        total = weight = torch.zeros((), device=hidden.device)
        for begin in range(0, length, CHUNK_TOKENS):
            end = min(begin + CHUNK_TOKENS, length)
            back = max(0, begin - self.survival_tokens)
            before, part = accepted[back:], slice(begin, end)
            loss, share, chunk = make(
                self._text, hidden[part], at_end[part], before, documents[back:end], counts[part]
            )
            total, weight = total + loss, weight + share
            accepted = torch.cat([accepted, chunk])
        if len(hidden) > length:
            loss, share = make(self._chains, hidden[length:], at_end[length:], accepted[starts])
            total, weight = total + loss, weight + share
        return total / weight, accepted.sum() / counts.sum()

    def _text(
        self, hidden: Tensor, at_end: Tensor, before: Tensor, documents: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Summed loss, its weight, and acceptance where it counts, ``(tokens,)``, 0 elsewhere."""
        draft, target = self.logits(hidden, at_end)
        accepted = acceptance(draft, target) * counts
        chances = torch.cat([before, accepted])
        weights = sliding_survival(chances, documents, most=self.survival_tokens)
        weights = weights[len(before) :] * counts
        return self._loss(draft, target, weights), weights.sum(), accepted

    def _chains(self, hidden: Tensor, at_end: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """Summed loss of chains and its weight; ``accepted``: ``(starts,)``, of first tokens."""
        draft, target = self.logits(hidden, at_end)
        chances = rearrange(
            acceptance(draft, target), "(start step) -> start step", start=len(accepted)
        )
        arrives = torch.cat([accepted[:, None], chances[:, :-1]], dim=1).cumprod(1).flatten()
        return self._loss(draft, target, arrives), arrives.sum()

    def _loss(self, draft: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        loss = draft_loss(
            draft, target, target.softmax(-1), weights=weights, cross_entropy=self.cross_entropy
        )
        return loss * weights.sum()

    def logits(self, hidden: Tensor, at_end: Tensor) -> tuple[Tensor, Tensor]:
        """Draft's and target's, ``(tokens, vocab)`` float32, divided by the temperature."""
        backbone = self.backbone
        draft = self.adapter.logits(hidden, backbone.finish, backbone.head).float()
        with torch.no_grad():
            target = backbone.finish(at_end).float()
        return draft / self.temperature, target / self.temperature


def _made(part: Callable[..., Any], *parts: Tensor) -> Any:
    return part(*parts)


@torch.no_grad()
def acceptance(draft: Tensor, target: Tensor) -> Tensor:
    """``(tokens,)``: the chance that each drafted token is accepted, 1 - total variation."""
    return torch.minimum(draft.softmax(-1), target.softmax(-1)).sum(-1)


@torch.no_grad()
def roll_out(loss: DraftLoss, batch: Batch, rollout: Rollout | None, step: int) -> Sequences:
    """Text with the draft's own chains behind it, drawn token by token with the adapter as it is;
    text alone without a ``rollout``.

    The exit's layers run over the whole text again for each token: a few layers of many, and no
    cache to keep.
    """
    rows, length = batch.ids.shape
    if rollout is None:
        none = batch.ids.new_zeros(rows, 0)
        return with_chains(batch, none, none[..., None])
    starts, generators = draw_starts(batch, rollout, step)
    tokens = batch.ids.new_zeros(rows, rollout.starts, 0)
    backbone, adapter = loss.backbone, loss.adapter
    for drawn in range(rollout.tokens):
        sequences = with_chains(batch, starts, tokens)
        at_exit, _ = backbone.states(
            sequences.ids, sequences.positions, sequences.mask, to_exit=True
        )
        hidden = backbone.hidden(adapter, at_exit, sequences.positions, sequences.mask)
        ends = torch.arange(1, rollout.starts + 1, device=starts.device) * drawn + length - 1
        last = starts if drawn == 0 else ends.expand(rows, -1)
        picked = torch.stack([h[at] for h, at in zip(hidden, last, strict=True)])
        picked = rearrange(picked, "row start hidden -> (row start) hidden")
        logits = adapter.logits(picked, backbone.finish, backbone.head).float()
        logits = rearrange(logits, "(row start) vocab -> row start vocab", row=rows)
        logits = logits / rollout.temperature
        noise = torch.stack(
            [torch.rand(logits.shape[1:], generator=g).clamp_min(1e-30) for g in generators]
        ).to(logits.device)
        token = (logits.log_softmax(-1) - (-noise.log()).log()).argmax(-1)
        tokens = torch.cat([tokens, token[..., None]], dim=2)
    return with_chains(batch, starts, tokens)
