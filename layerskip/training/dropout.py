"""Layer dropout: in training a sample now and then passes a layer by."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.training.schedules import layer_dropout_rate


@dataclass(frozen=True)
class LayerDropout:
    """Which samples pass which layers by, as a function of seed and step alone.

    Rates rise exponentially with depth (``layer_dropout_rate``). Nothing is remembered: a run that
    goes on from a checkpoint drops what it would have dropped without the interruption.

    Attributes:
        num_layers: of the model.
        max_rate: of the last layer, in [0, 1).
        seed: of the run.
    """

    num_layers: int
    max_rate: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.max_rate < 1.0:
            raise ValueError(f"max_rate must lie in [0, 1), got {self.max_rate}")

    def dropped(self, step: int, num_samples: int, *, first_sample: int = 0) -> Tensor:
        """``(num_layers, num_samples)`` bool on the CPU: who passes which layer by.

        Args:
            step: of the optimiser, from 0.
            num_samples: of the batch; packed documents count as samples of their own.
            first_sample: place of the first of them among the step's samples of all processes, so
                that two processes together drop what one would.
        """
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) % 2**63)
        # Numbers are drawn sample by sample: those of a later process follow those of the first.
        drawn = torch.rand(
            first_sample + num_samples, self.num_layers, generator=generator, dtype=torch.float64
        )
        rates = torch.tensor(
            [layer_dropout_rate(i, self.num_layers, self.max_rate) for i in range(self.num_layers)],
            dtype=torch.float64,
        )
        return (drawn[first_sample:] < rates).T.contiguous()


@contextmanager
def dropping(layers: Sequence[nn.Module], dropped: Tensor, samples: Tensor) -> Iterator[None]:
    """Within it, decoder layers hand on their input where a sample passes them by.

    A layer in evaluation mode drops nothing. The layer runs in any case and its result is replaced:
    so masks and packing of any form stay as they are, and gradients flow through neither it nor its
    adapters. Works with gradient checkpointing if the backward pass is within it, too.

    Args:
        layers: in order; each takes hidden states ``(batch, seqlen, width)`` first, and returns
            them, alone or first in a tuple.
        dropped: ``(layers, samples)`` bool, from ``LayerDropout.dropped``.
        samples: ``(batch, seqlen)`` int64, which sample each token is of.
    """
    if dropped.shape[0] != len(layers):
        raise ValueError(f"dropped is for {dropped.shape[0]} layers, the model has {len(layers)}")
    if int(samples.max()) >= dropped.shape[1] or int(samples.min()) < 0:
        raise ValueError(
            f"samples must be numbers of the {dropped.shape[1]} samples that dropped is of"
        )

    def hook(number: int) -> Any:
        passed_by = dropped[number].to(samples.device)[samples][..., None]

        def replace(module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> Any:
            if not module.training:
                return output
            given = args[0] if args else kwargs["hidden_states"]
            result = output[0] if isinstance(output, tuple) else output
            result = torch.where(passed_by, given, result)
            return (result, *output[1:]) if isinstance(output, tuple) else result

        return replace

    handles = [
        layer.register_forward_hook(hook(i), with_kwargs=True)
        for i, layer in enumerate(layers)
        if dropped[i].any()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
