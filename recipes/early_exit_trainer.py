"""Steps of the LayerSkip recipe through LoRA.

Everything a step does is a function of its number: its rows, who passes which layer by, which
exits count and the learning rate.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from early_exit_model import EarlyExitModel, ExitLosses, add_lora, weighted
from early_exit_settings import NOT_OF_THE_WEIGHTS, Settings
from packing import Batch, Packed, Step, micro_batches
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from steps import Trainer as StepTrainer
from transformers import PreTrainedModel

from layerskip.fingerprint import fingerprint
from layerskip.training.dropout import LayerDropout, dropping
from layerskip.training.schedules import enabled_exits, exit_loss_scales

ADAPTER = "adapter_model.safetensors"


class Trainer(StepTrainer):
    """One run."""

    settings: Settings
    state_file = "optimiser.pt"
    against_nan = (
        "the same command goes on from the last checkpoint, and a lower learning_rate, or "
        "mixed_precision=bf16 in the place of fp16, in a run of its own may help"
    )

    def __init__(
        self,
        settings: Settings,
        model: PreTrainedModel,
        packed: Packed,
        accelerator: Accelerator,
    ) -> None:
        self.depth = model.config.num_hidden_layers
        settings.check_depth(self.depth)
        self._fingerprint = fingerprint(model)  # LoRA moves it
        self.peft = add_lora(model, rank=settings.rank, alpha=settings.alpha, seed=settings.seed)
        if settings.gradient_checkpointing:
            checkpoint_layers(model)
        losses = ExitLosses(settings.distil, settings.consistency, settings.chunk_tokens)
        early = EarlyExitModel(self.peft, losses)
        self.layers = early.layers
        super().__init__(settings, packed, accelerator, early)
        self.dropout = LayerDropout(self.depth, settings.layer_dropout, settings.seed)
        self._data = packed.digest

    def _losses(self, work: Step) -> dict[str, Any]:
        settings, step = self.settings, self.steps
        exits = enabled_exits(
            settings.curriculum,
            step,
            settings.steps,
            self.depth,
            every=settings.rotation,
            exits=settings.exits,
        )
        scales = exit_loss_scales(
            exits, self.depth, early_scale=settings.early_scale, floor=settings.floor
        )
        # Dropout of the model's own, where it has some, as an uninterrupted run would have it.
        seed = (settings.seed * 1_000_003 + step) * 1_009 + self.batches.process_index
        torch.manual_seed(seed % 2**63)
        self.module.train()
        totals = torch.zeros(len(exits), device=self.accelerator.device)
        for batch in micro_batches(work, self.module, self.accelerator):
            losses = self._backward(batch, scales, work.num_labels, step)
            totals += torch.stack([losses[e].detach() for e in exits])
        summed = cast(torch.Tensor, self.accelerator.reduce(totals, "sum")).tolist()
        by_exit = dict(zip(exits, summed, strict=True))
        return {
            "loss": sum(scales[e] * value for e, value in by_exit.items()),
            "full_loss": by_exit[self.depth],
            "exit_losses": {e: v for e, v in by_exit.items() if e != self.depth},
        }

    def _backward(
        self, batch: Batch, scales: Any, num_labels: int, step: int
    ) -> dict[int, torch.Tensor]:
        dropped = self.dropout.dropped(step, batch.num_documents, first_sample=batch.first_document)
        # The backward pass within it, too: layers that are run again have to drop the same.
        with dropping(self.layers, dropped, batch.documents):
            losses = self.module(
                batch.ids, batch.positions, batch.labels, tuple(scales), num_labels
            )
            # Gradients are averaged over processes; num_labels is of them all already.
            self.accelerator.backward(weighted(losses, scales) * self.accelerator.num_processes)
        return cast(dict[int, torch.Tensor], losses)

    def _keep_weights(self, folder: Path) -> dict[str, Any]:
        self.peft.save_pretrained(folder, save_embedding_layers=False)
        return {}

    def load(self, checkpoint: Path) -> dict[str, Any]:
        state = super().load(checkpoint)
        set_peft_model_state_dict(self.peft, load_file(checkpoint / ADAPTER))
        return state

    def _identity(self) -> dict[str, Any]:
        kept = {k: v for k, v in asdict(self.settings).items() if k not in NOT_OF_THE_WEIGHTS}
        kept["exits"] = list(self.settings.exits)  # as JSON gives it back
        return kept | {"content of data": self._data, "fingerprint of model": self._fingerprint}


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Keep the input of every layer alone, and make the rest again in the backward pass."""
    # transformers 5.23 calls it by another name than 5.17. Re-entrant checkpoints would need
    # embeddings that are trained.
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})


@contextmanager
def in_evaluation(trainer: Trainer) -> Iterator[PreTrainedModel]:
    """The model with its adapters, in evaluation mode within it."""
    model = trainer.peft.get_base_model()
    trainer.module.eval()
    try:
        yield cast(PreTrainedModel, model)
    finally:
        trainer.module.train()
