"""A causal language model with LoRA whose forward gives the losses of its exits."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip.admission import check_model, decoder_layers
from layerskip.training.losses import CHUNK_TOKENS, losses_by_exit


@dataclass(frozen=True)
class ExitLosses:
    """How the exits' losses are made; the arguments of ``losses_by_exit``."""

    distil: float = 0.0
    consistency: float = 0.0
    chunk_tokens: int = CHUNK_TOKENS


def add_lora(model: PreTrainedModel, *, rank: int, alpha: float, seed: int) -> PeftModel:
    """LoRA on every linear layer but the head; nothing else is trained.

    The head stays as it is because every exit shares it, and often the embeddings do, too.
    """
    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules="all-linear",
        bias="none",
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        # peft asks transformers 5.23 by the name that 5.17 knows.
        warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
        return cast(PeftModel, get_peft_model(model, config))


class EarlyExitModel(nn.Module):
    """The losses of a packed batch at the exits that are asked for.

    One module with one forward, so that DDP and autocast wrap all that is computed.

    Args:
        model: with adapters or without.
        losses: how they are made.

    Raises:
        UnsupportedModelError: layerskip cannot decode the model.
        ValueError: between its last layer and its logits it has more than a norm and a head.
    """

    def __init__(self, model: PeftModel | PreTrainedModel, losses: ExitLosses) -> None:
        super().__init__()
        self.model, self.losses = model, losses
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        check_model(base)
        # Lists hide them from parameters(): they are in the model already.
        self._base = [cast(PreTrainedModel, base)]
        self._norm = [final_norm(self.base)]

    @property
    def base(self) -> PreTrainedModel:
        """The transformers model, adapters in its layers."""
        return self._base[0]

    @property
    def layers(self) -> nn.ModuleList:
        """Its decoder layers."""
        return decoder_layers(self.base)

    def head(self, states: Tensor) -> Tensor:
        """``(n, width)`` after any layer to ``(n, vocab)`` logits."""
        norm, head = self._norm[0], cast(nn.Module, self.base.get_output_embeddings())
        return cast(Tensor, head(norm(states)))

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        labels: Tensor,
        exits: Sequence[int],
        num_labels: int,
    ) -> dict[int, Tensor]:
        """Losses by exit layer.

        Args:
            ids: ``(rows, seq_len)`` int64.
            positions: ``(rows, seq_len)`` int64, from 0 again at each document: transformers lets
                tokens of different documents not see each other then.
            labels: ``(rows, seq_len)`` int64, the token after each; -100 is left out.
            exits: whose losses are wanted, full depth among them.
            num_labels: labels of the whole step.
        """
        with capturing(self.layers, exits) as states:
            self.base.base_model(input_ids=ids, position_ids=positions, use_cache=False)
        return losses_by_exit(
            {e: state.flatten(0, 1) for e, state in states.items()},
            self.head,
            labels.flatten(),
            exits,
            distil=self.losses.distil,
            consistency=self.losses.consistency,
            num_labels=num_labels,
            chunk_tokens=self.losses.chunk_tokens,
        )


@contextmanager
def capturing(layers: nn.ModuleList, exits: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Within it, a forward leaves the hidden states after each of ``exits`` layers: ``(rows,
    seq_len, width)``, as the next layer gets them."""
    states: dict[int, Tensor] = {}

    def hook(exit_layer: int) -> Any:
        def keep(module: nn.Module, args: object, output: Any) -> None:
            states[exit_layer] = output[0] if isinstance(output, tuple) else output

        return keep

    handles = [layers[e - 1].register_forward_hook(hook(e)) for e in exits]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def final_norm(model: PreTrainedModel) -> nn.Module:
    """The module between the last layer and the head, found by what a few tokens pass through.

    Raises:
        ValueError: there is none that leads from one to the other, or logits are scaled or capped
            after the head.
    """
    layers, depth = decoder_layers(model), model.config.num_hidden_layers
    inside = {id(module) for layer in layers for module in layer.modules()}
    seen: list[tuple[nn.Module, Tensor, Tensor]] = []

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            seen.append((module, args[0], output))

    handles = [m.register_forward_hook(note) for m in model.modules() if id(m) not in inside]
    ids = torch.arange(4, device=model.device)[None]
    training = model.training
    try:
        with capturing(layers, [depth]) as states:
            logits = model.eval()(input_ids=ids, use_cache=False).logits
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    head = cast(nn.Module, model.get_output_embeddings())
    for norm, given, normed in seen:
        if given is states[depth] and torch.equal(head(normed), logits):
            return norm
    raise ValueError(
        f"{type(model).__name__} has more than a norm and a head after its last layer (scaled or "
        "capped logits, a projection), which this recipe does not train; take a Llama-like model"
    )


def weighted(losses: Mapping[int, Tensor], scales: Mapping[int, float]) -> Tensor:
    """The sum that is trained on."""
    return torch.stack([scale * losses[e] for e, scale in scales.items()]).sum()
