"""Steps of the exit adapter's recipe, each a function of its number."""

import copy
import hashlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import convert_to_fp32
from adapter_settings import OF_THE_WEIGHTS, Settings
from draft_training import Backbone, DraftLoss, acceptance, roll_out
from packing import Batch, Packed, Step, document_mask, micro_batches
from steps import Trainer as StepTrainer
from torch import Tensor, nn

from layerskip.adapter_shape import WIDTH_QUANTUM
from layerskip.admission import decoder_layers
from layerskip.exit_adapter import ExitAdapter
from layerskip.exit_block import EPSILON
from layerskip.fingerprint import fingerprint

EVAL_ROWS = 4
COMPARED, MOST_APART = 16, 0.01  # tokens of ``check_copy``, share of what the layer adds


def new_adapter(model: Any, exit_layer: int, settings: Settings) -> ExitAdapter:
    """An adapter in float32, as it is before training.

    Raises:
        ValueError: the exit is not one of the model, or its next layer has not the block's form.
    """
    inner = getattr(model.config, "intermediate_size", None) or 0
    inner += -inner % WIDTH_QUANTUM  # a copy of narrower ones adds nothing there
    adapter = ExitAdapter.create(
        model,
        exit_layer,
        norm=settings.norm,
        head_rank=settings.head_rank,
        bridge_rank=settings.bridge_rank,
        block=settings.block,
        block_width=(settings.block_width or inner or None) if settings.block else None,
        dtype=torch.float32,
        seed=settings.seed,
    )
    if adapter.block is not None and settings.block_start == "next_layer":
        copy_layer(decoder_layers(model)[exit_layer], adapter.block)
        if settings.block_width and settings.block_width < inner:  # whose copy is only a part
            new_adapter(model, exit_layer, replace(settings, block_width=0))
        else:
            check_copy(model, adapter)
    return adapter


@torch.no_grad()
def check_copy(model: Any, adapter: ExitAdapter) -> None:
    """Raise unless an adapter's block does what the model's next layer does: layers of Llama's
    parts may scale, normalise or turn otherwise. Both are run in float32, with the block's epsilon.

    Raises:
        ValueError: it does something else.
    """
    layer = decoder_layers(model)[adapter.shape.exit_layer]
    positions = torch.arange(COMPARED, device=model.device)[None]
    ids, mask = positions * 7 % model.config.vocab_size, document_mask(positions * 0)
    backbone, calls = Backbone(model, adapter.shape.exit_layer), []
    hook = layer.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    try:
        backbone.states(ids, positions, mask)
    finally:
        hook.remove()
    alike = copy.deepcopy(layer).float()
    for norm in (alike.input_layernorm, alike.post_attention_layernorm):
        for name in {"variance_epsilon", "eps"} & set(vars(norm)):
            setattr(norm, name, EPSILON)
    args, kwargs = convert_to_fp32(calls[0])
    before, after = args[0] if args else kwargs["hidden_states"], alike(*args, **kwargs)
    after = after[0] if isinstance(after, tuple) else after
    apart = (backbone.hidden(adapter, before, positions, mask) - after).norm()
    if not apart <= MOST_APART * (after - before).norm():
        raise ValueError(_no_copy(type(layer).__name__))


def _no_copy(name: str) -> str:
    return (
        f"a block cannot start as a copy of {name}, which is not built like Llama's layers; give "
        "block_start=nothing"
    )


@torch.no_grad()
def copy_layer(layer: Any, block: Any) -> None:
    """Give a block the values of a Llama-like layer; of a wider MLP some, of a narrower one all.

    A narrower block takes the first of the layer's MLP units, a wider one has zeros in the output
    of the rest.

    Raises:
        ValueError: the layer is of another form.
    """
    try:
        attention, mlp = layer.self_attn, layer.mlp
        linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        norms = [layer.input_layernorm.weight, layer.post_attention_layernorm.weight]
        fits = type(linears[0]) is nn.Linear and all(m.bias is None for m in linears)
        fits = fits and not hasattr(attention, "q_norm")
    except AttributeError:
        fits = False
    if not fits:
        raise ValueError(_no_copy(type(layer).__name__))
    q, k, v, out, gate, up, down = (m.weight.float() for m in linears)
    block.qkv.copy_(torch.cat([q, k, v]))
    block.out.copy_(out)
    block.attention_norm.copy_(norms[0])
    block.mlp_norm.copy_(norms[1])
    width = block.down.shape[1]
    kept = min(width, len(gate))
    block.gate_up[:kept], block.gate_up[width : width + kept] = gate[:kept], up[:kept]
    block.down.zero_()
    block.down[:, :kept] = down[:, :kept]


class Trainer(StepTrainer):
    """One run over one exit.

    Attributes:
        adapter: that is trained, in float32.
    """

    settings: Settings
    state_file, decay = "state.pt", {"decay_from": 0.3}
    against_nan = "go on from the last checkpoint with a lower learning_rate in a run of its own"

    def __init__(
        self,
        settings: Settings,
        model: Any,
        packed: Packed,
        accelerator: Accelerator,
        *,
        exit_layer: int,
    ) -> None:
        self.exit_layer = exit_layer
        self.adapter = new_adapter(model, exit_layer, settings)
        self.loss = DraftLoss(
            self.adapter,
            Backbone(model, exit_layer),
            temperature=settings.temperature,
            cross_entropy=settings.cross_entropy,
            survival_tokens=settings.survival_tokens,
        )
        super().__init__(settings, packed, accelerator, self.loss)
        self._shared = identity(settings, packed, model) | {"exit_layer": exit_layer}

    def _identity(self) -> dict[str, Any]:
        return self._shared

    def _losses(self, work: Step) -> dict[str, Any]:
        totals = torch.zeros(2, device=self.accelerator.device)
        for batch in micro_batches(work, self.module, self.accelerator):
            totals += self._backward(batch, len(work.batches))
        loss, accepted = cast(Tensor, self.accelerator.reduce(totals, "mean")).tolist()
        return {"loss": loss, "text_acceptance": accepted}

    def _backward(self, batch: Batch, parts: int) -> Tensor:
        """Loss and acceptance of a micro-batch, as its share of the step's."""
        every = self.settings.rollout_every
        rollout = self.settings.rollout if every and self.steps % every == 0 else None
        with self.accelerator.autocast():
            sequences = roll_out(self.loss, batch, rollout, self.steps)
            at_exit, at_end = self.loss.backbone.states(
                sequences.ids, sequences.positions, sequences.mask
            )
        loss, accepted = self.module(at_exit, at_end, sequences, batch)
        self.accelerator.backward(loss / parts)
        return torch.stack([loss.detach(), accepted]) / parts

    @torch.no_grad()
    def evaluate(self, held_out: Packed, max_tokens: int) -> dict[str, float]:
        """Acceptance along held-out rows, at the temperature and of argmaxes, by the adapter as it
        is; the weights of ``max_tokens`` tokens at most."""
        sums = torch.zeros(3, dtype=torch.float64)
        rows = max(1, max_tokens // held_out.ids.shape[1])
        for draft, target in self.pairs(held_out, 0, min(rows, held_out.num_rows)):
            same = (draft.argmax(-1) == target.argmax(-1)).sum()
            found = torch.stack([acceptance(draft, target).sum(), same])
            sums += torch.cat([found.double().cpu(), torch.tensor([float(len(draft))])])
        shares = sums[:2] / sums[2]
        return {"sampled": float(shares[0]), "greedy": float(shares[1])}

    @torch.no_grad()
    def pairs(self, rows: Packed, first: int, last: int) -> Any:
        """Draft and target logits, divided by the temperature, where labels of held-out rows
        count, from the ``first`` row up to the ``last``, which is left out."""
        device = self.accelerator.device
        for begin in range(first, last, EVAL_ROWS):
            part = slice(begin, min(begin + EVAL_ROWS, last))
            ids, positions, documents, labels = (
                t[part].to(device) for t in (rows.ids, rows.positions, rows.documents, rows.labels)
            )
            mask = document_mask(documents)
            with self.accelerator.autocast():
                backbone = self.loss.backbone
                at_exit, at_end = backbone.states(ids, positions, mask)
                hidden = backbone.hidden(self.adapter, at_exit, positions, mask)
                counts = labels != -100
                for h, end, at in zip(hidden, cast(Tensor, at_end), counts, strict=True):
                    yield self.loss.logits(h[at], end[at])

    def _keep_weights(self, folder: Path) -> dict[str, Any]:
        self.adapter.save(folder)  # so that a checkpoint can be decoded with, too
        return {"adapter": self.adapter.state_dict()}

    def load(self, checkpoint: Path) -> dict[str, Any]:
        state = super().load(checkpoint)
        self.adapter.load_state_dict(state["adapter"])
        return state


def identity(settings: Settings, packed: Packed, model: Any) -> dict[str, Any]:
    """What two runs over one exit have to share to give the same weights."""
    kept = {k: v for k, v in asdict(settings).items() if k in OF_THE_WEIGHTS}
    # Other weights write other text: what differs is named in this order.
    return {"fingerprint of model": fingerprint(model)} | kept | {"content of data": packed.digest}


def weights_hash(model: nn.Module) -> str:
    """16 hexadecimal digits of SHA-256 over every parameter and buffer, bit by bit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        digest.update(name.encode())
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()
        digest.update(raw.numpy().tobytes())
    return digest.hexdigest()[:16]
