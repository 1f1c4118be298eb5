"""What a trained exit adds: it runs in the draft only, between the last shared layer and the head.

The backbone is left as it is: committed keys and values are its own, and so is the text. Three
parts, each optional: a bridge, or a block with keys and values of its own, changes the exit's
hidden states; an exit norm scales what the model's final norm leaves of them; a low-rank addition
(Hu et al. 2021, arXiv 2106.09685) changes the head. A new adapter computes exactly what the plain
exit computes.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layerskip.adapter_file import AdapterFile, read_adapter
from layerskip.adapter_shape import WIDTH_QUANTUM, AdapterShape, check_temperature
from layerskip.admission import is_finite, model_inside
from layerskip.dense import by_rows
from layerskip.draft_head import DraftHead, Projection
from layerskip.exit_block import ExitBlock, LowRank
from layerskip.fingerprint import fingerprint
from layerskip.layout import Layout
from layerskip.skeleton import Skeleton, share_twin

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from layerskip.model import DecoderStack

NO_BLOCK = "cannot have a block: the model has attention code of its own"
Finish = Callable[[Tensor, Projection], Tensor]


class ExitAdapter(nn.Module):
    """A trained addition to one early exit of one checkpoint.

    It can be trained in another dtype than the model's. To decode with it, it has to be in the
    model's, on its device: ``load`` sees to that, and ``to`` is torch's.

    Args:
        shape: of its parts, and of the model that it belongs to.
        backbone: fingerprint of that model.

    Attributes:
        temperature: the draft's logits are divided by it; chosen after training, so that tokens
            of the model are likeliest under the draft's distribution.
        measurements: what was measured of it; ready for JSON.
    """

    def __init__(self, shape: AdapterShape, backbone: str) -> None:
        super().__init__()
        self.shape, self.backbone = shape, backbone
        self.temperature = 1.0
        self.measurements: Mapping[str, Any] = {}
        hidden, head = shape.hidden_size, shape.head_size
        self.norm_scale = nn.Parameter(torch.ones(head)) if shape.norm else None
        self.head_lora = (
            LowRank(head, shape.vocab_size, shape.head_rank) if shape.head_rank else None
        )
        self.bridge = LowRank(hidden, hidden, shape.bridge_rank) if shape.bridge_rank else None
        self.block = ExitBlock(shape) if shape.block_width else None

    @classmethod
    def create(
        cls,
        model: "PreTrainedModel",
        exit_layer: int,
        *,
        norm: bool = True,
        head_rank: int = 16,
        bridge_rank: int = 0,
        block: bool = False,
        block_width: int | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> "ExitAdapter":
        """A new adapter of a loaded model, on its device; it changes nothing yet.

        Args:
            model: a transformers causal LM, or one inside PEFT or ``torch.compile``.
            exit_layer: leading layers that the draft runs.
            norm: whether the exit has a norm of its own: the model's final one, scaled by channel.
            head_rank: of the addition to the head; 0: none.
            bridge_rank: of a low-rank map that is added to the hidden states; 0: none.
            block: a transformer block with heads like the model's, instead of a bridge.
            block_width: of the block's MLP, a multiple of 32; None: the hidden size, rounded up.
            dtype: of its parameters; None: the model's.
            seed: of what is drawn.

        Raises:
            TypeError: ``model`` is none of transformers', such as a wrapper of one.
            ValueError: the exit is not one of this model, or a size makes no sense.
        """
        inner = model_inside(model)
        hidden: int = inner.config.hidden_size
        attention: dict[str, Any] = {}
        if block:
            width = -(-hidden // WIDTH_QUANTUM) * WIDTH_QUANTUM
            attention = {"block_width": width if block_width is None else block_width}
            attention |= _attention_of(inner)
        elif block_width is not None:
            raise ValueError(f"block_width={block_width} needs block=True")
        shape = AdapterShape(
            exit_layer=exit_layer,
            num_layers=inner.config.num_hidden_layers,
            hidden_size=hidden,
            head_size=_head(inner).weight.shape[1],
            vocab_size=inner.config.vocab_size,
            norm=norm,
            head_rank=head_rank,
            bridge_rank=bridge_rank,
            **attention,
        )
        adapter = cls(shape, fingerprint(inner))
        generator = torch.Generator().manual_seed(seed)
        for part in (adapter.head_lora, adapter.bridge, adapter.block):
            if part is not None:
                part.draw(generator)
        return adapter.to(device=inner.device, dtype=dtype or inner.dtype)

    # Training: whole sequences, differentiable in the adapter.

    def hidden(
        self, states: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Hidden states that the head reads, of whole sequences.

        Args:
            states: ``(batch, seqlen, hidden)`` after ``exit_layer`` layers, of any dtype.
            positions: ``(batch, seqlen)`` int64; None counts from 0.
            mask: of the block's attention, broadcastable to ``(batch, 1, seqlen, seqlen)``: bool,
                True where a query may look, or what is added to scores. None is causal.

        Returns:
            ``(batch, seqlen, hidden)`` in the adapter's dtype.
        """
        states = states.to(next(self.parameters()).dtype)
        if self.bridge is not None:
            return states + self.bridge(states)
        if self.block is not None:
            return self.block.sequences(states, positions, mask)
        return states

    def logits(self, hidden: Tensor, finish: Finish, head: nn.Linear) -> Tensor:
        """The draft's logits, temperature included.

        Args:
            hidden: ``(rows, hidden)`` from ``hidden``; as few rows at a time as memory asks for.
            finish: all that the model does after its layers, with a given map in the place of its
                head: ``lambda x, project: project(model.model.norm(x))`` in a Llama, and for any
                family ``lambda x, project: stack.head(x, len(x), project)`` of a ``DecoderStack``.
            head: the model's output embedding, which is not trained.

        Returns:
            ``(rows, vocab)``.
        """

        def plain(x: Tensor) -> Tensor:
            return F.linear(x.to(head.weight.dtype), head.weight, head.bias)

        return finish(hidden, lambda x: self.project(x, plain))

    # Decoding: rows of a pass, each with the bits that it has alone.

    def project(
        self, x: Tensor, plain: Projection, *, up: Tensor | None = None, at_once: int | None = None
    ) -> Tensor:
        """The head with what the adapter adds to it: norm, low-rank product, temperature.

        Args:
            x: ``(rows, head_size)``, what the model's head would read.
            plain: the model's head, over all tokens or some.
            up: ``(tokens, head_rank)``, rows of ``head_lora.up`` at those tokens; None: all.
            at_once: rows of one low-rank product; None: all.

        Returns:
            ``(rows, tokens)``.
        """
        if self.norm_scale is not None:
            x = x * self.norm_scale
        logits = plain(x)
        if self.head_lora is not None:
            low_rank = self.head_lora
            logits = logits + by_rows(lambda part: low_rank(part, up), x, at_once)
        return logits if self.temperature == 1.0 else logits / self.temperature

    def run(self, hidden: Tensor, layout: Layout, at_once: int | None) -> Tensor:
        """``hidden`` as a pass has it: ``(rows, hidden)`` -> the same.

        The block appends its keys and values to the cache, as layer ``num_layers``.

        Args:
            at_once: rows of one product; None: all.
        """
        if self.bridge is not None:
            return hidden + by_rows(self.bridge, hidden, at_once, layout.num_tokens)
        if self.block is not None:
            return self.block.rows(hidden, layout, self.shape.num_layers, at_once)
        return hidden

    @torch.no_grad()
    def fingerprint(self) -> str:
        """16 hexadecimal digits of SHA-256 over shape, temperature and every parameter."""
        content = [self.shape.to_dict(), self.backbone, self.temperature]
        digest = hashlib.sha256(json.dumps(content).encode())
        for name, parameter in sorted(self.named_parameters()):
            digest.update(name.encode())
            values = parameter.detach().to("cpu", torch.bfloat16).contiguous()
            digest.update(values.view(torch.int16).numpy().tobytes())
        return digest.hexdigest()[:16]

    def save(self, folder: str | Path) -> None:
        """Write ``exit_adapter.json`` and ``exit_adapter.safetensors`` into a folder, made if it
        is not there.

        Raises:
            ValueError: they cannot be written.
        """
        check_temperature(self.temperature)
        written = AdapterFile(
            Path(folder), self.shape, self.backbone, self.temperature, self.measurements
        )
        written.write(self.state_dict())

    @classmethod
    def load(cls, folder: str | Path, model: "PreTrainedModel") -> "ExitAdapter":
        """The adapter that ``save`` wrote, on the model's device and in its dtype.

        Raises:
            TypeError: ``model`` is none of transformers', such as a wrapper of one.
            ValueError: there is none, or it belongs to another model: another depth, width,
                vocabulary, or other weights.
        """
        inner = model_inside(model)
        file = read_adapter(folder)
        adapter = cls(file.shape, file.backbone)
        reason = adapter.misfit(inner)
        if reason is not None:
            raise ValueError(f"exit adapter {folder} {reason}")
        try:
            adapter.load_state_dict(dict(file.tensors()))
        except RuntimeError as error:
            first = str(error).strip().split("\n")[-1].strip()
            raise ValueError(f"exit adapter {folder} is not whole: {first}") from None
        adapter.temperature, adapter.measurements = file.temperature, file.measurements
        return adapter.to(device=inner.device, dtype=inner.dtype).eval()

    def misfit(self, model: "PreTrainedModel") -> str | None:
        """Half a sentence that says why it does not belong to a model; None if it does."""
        config, shape = model.config, self.shape
        for what, own, other in (
            ("layers", shape.num_layers, config.num_hidden_layers),
            ("hidden units", shape.hidden_size, config.hidden_size),
            ("token ids", shape.vocab_size, config.vocab_size),
        ):
            if own != other:
                return f"is for a model of {own} {what}; this one has {other}"
        found = fingerprint(model)
        if found != self.backbone:
            return (
                f"was trained on another checkpoint (fingerprint {self.backbone}, this one has "
                f"{found}); train one for this checkpoint"
            )
        return None


class AdaptedHead:
    """``(rows, hidden)`` -> the draft's logits, over the whole vocabulary or a part of it.

    Args:
        adapter: what it adds to the head.
        head: the model's own.
        finish: as of ``ExitAdapter.logits``.
        at_once: rows of one low-rank product; None: all.
        part: of the vocabulary; None: all of it.
    """

    def __init__(
        self,
        adapter: ExitAdapter,
        head: nn.Linear,
        finish: Finish,
        at_once: int | None,
        part: DraftHead | None,
    ) -> None:
        self._adapter, self._head, self._finish = adapter, head, finish
        self._at_once, self.part = at_once, part
        self._up: Tensor | None = None
        if part is not None and adapter.head_lora is not None:
            self._up = adapter.head_lora.up.detach()[part.ids]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits in the model's dtype; spare rows last."""
        plain = self._plain if self.part is None else self.part.project
        return self._finish(
            hidden,
            lambda x: self._adapter.project(x, plain, up=self._up, at_once=self._at_once),
        )

    def _plain(self, x: Tensor) -> Tensor:
        return F.linear(x, self._head.weight, self._head.bias)


def check_adapter(adapter: ExitAdapter, stack: "DecoderStack") -> None:
    """Raise unless drafts of a stack can run an adapter: ``ValueError`` with the reason."""
    reason = adapter.misfit(stack.twin) or _refusal(adapter, stack)
    if reason is not None:
        raise ValueError(f"the exit adapter {reason}")


def _refusal(adapter: ExitAdapter, stack: "DecoderStack") -> str | None:
    """Half a sentence that says why drafts of its own model cannot run it."""
    weight, shape = next(adapter.parameters()), adapter.shape
    if (weight.dtype, weight.device) != (stack.dtype, stack.device):
        return (
            f"is in {weight.dtype} on {weight.device}, the model in {stack.dtype} on "
            f"{stack.device}; give adapter.to(model.device, model.dtype)"
        )
    for name, parameter in adapter.named_parameters():
        if not is_finite(parameter):
            return f"holds NaN or infinite values in {name}; train it again, or load a whole file"
    if stack.why_whole_head is not None:
        return f"cannot add to the head: {stack.why_whole_head}"
    if not shape.block_width:
        return None
    if stack.one_row:
        return NO_BLOCK
    own = (stack.num_kv_heads * stack.group, stack.num_kv_heads, stack.head_dim)
    if own != (shape.num_heads, shape.num_kv_heads, shape.head_dim):
        return (
            f"has a block of {shape.num_heads} heads over {shape.num_kv_heads} of "
            f"{shape.head_dim}; the model's cache is for {own[0]} over {own[1]} of {own[2]}"
        )
    return None


def _head(model: "PreTrainedModel") -> nn.Linear:
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ValueError(
            f"an exit adapter needs a plain Linear head, this one is {type(head).__name__}"
        )
    return head


def _attention_of(model: "PreTrainedModel") -> dict[str, Any]:
    """What a block takes over from the model's attention: heads, and how positions turn them."""
    learnt = Skeleton(share_twin(model), model.config._attn_implementation)  # noqa: SLF001
    if learnt.one_row:
        raise ValueError(f"an exit adapter {NO_BLOCK}; use a bridge")
    rotary = getattr(model.base_model, "rotary_emb", None)
    frequencies = getattr(rotary, "inv_freq", None)
    known = isinstance(frequencies, Tensor) and frequencies.ndim == 1
    return {
        "num_heads": learnt.num_kv_heads * learnt.group,
        "num_kv_heads": learnt.num_kv_heads,
        "head_dim": learnt.head_dim,
        "frequencies": tuple(cast(Tensor, frequencies).float().tolist()) if known else (),
        "rope_scaling": float(getattr(rotary, "attention_scaling", 1.0)) if known else 1.0,
    }
