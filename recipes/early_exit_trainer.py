"""Steps of the LayerSkip recipe through LoRA, and checkpoints that a run goes on from exactly.

Everything a step does is a function of its number: its rows, who passes which layer by, which
exits count and the learning rate. What a checkpoint has to hold is weights and optimiser.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from checkpoints import (
    optimiser_state,
    read_run,
    restore_optimiser,
    step_of,
    write_by_one,
    write_run,
    write_state,
)
from early_exit_model import EarlyExitModel, ExitLosses, add_lora, weighted
from early_exit_settings import NOT_OF_THE_WEIGHTS, Settings
from packing import Batch, Batches, Packed, micro_batches
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import PreTrainedModel

from layerskip.fingerprint import fingerprint
from layerskip.training.dropout import LayerDropout, dropping
from layerskip.training.schedules import enabled_exits, exit_loss_scales, warmup_stable_decay

ADAPTER, OPTIMISER = "adapter_model.safetensors", "optimiser.pt"
WARMUP = 0.05


class Trainer:
    """One run.

    Attributes:
        steps: taken so far.
        seconds: that they took, those before an interruption, too.
    """

    def __init__(
        self,
        settings: Settings,
        model: PreTrainedModel,
        packed: Packed,
        accelerator: Accelerator,
    ) -> None:
        self.settings, self.accelerator = settings, accelerator
        self.depth = model.config.num_hidden_layers
        settings.check_depth(self.depth)
        self.batches = Batches.of(packed, settings, accelerator)
        self._fingerprint = fingerprint(model)  # LoRA moves it
        self.peft = add_lora(model, rank=settings.rank, alpha=settings.alpha, seed=settings.seed)
        if settings.gradient_checkpointing:
            checkpoint_layers(model)
        losses = ExitLosses(settings.distil, settings.consistency, settings.chunk_tokens)
        early = EarlyExitModel(self.peft, losses)
        self.layers = early.layers
        self.trained = [p for p in early.parameters() if p.requires_grad]
        optimiser = torch.optim.AdamW(
            self.trained, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.module, self.optimiser = accelerator.prepare(early, optimiser)
        self.dropout = LayerDropout(self.depth, settings.layer_dropout, settings.seed)
        self._data = packed.digest
        self.steps, self.seconds = 0, 0.0

    def step(self) -> dict[str, Any]:
        """One step of the optimiser; returns its record, the same on every process."""
        began, settings, step = time.perf_counter(), self.settings, self.steps
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
        rate = settings.learning_rate * warmup_stable_decay(
            (step + 0.5) / settings.steps, warmup=WARMUP
        )
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        # Dropout of the model's own, where it has some, as an uninterrupted run would have it.
        seed = (settings.seed * 1_000_003 + step) * 1_009 + self.batches.process_index
        torch.manual_seed(seed % 2**63)
        self.module.train()
        work = self.batches.at(step)
        totals = torch.zeros(len(exits), device=self.accelerator.device)
        for batch in micro_batches(work, self.module, self.accelerator):
            losses = self._backward(batch, scales, work.num_labels, step)
            totals += torch.stack([losses[e].detach() for e in exits])
        norm = self.accelerator.clip_grad_norm_(self.trained, settings.clip)
        self.optimiser.step()
        self.optimiser.zero_grad()
        by_exit = dict(zip(exits, self._over_processes(totals), strict=True))
        self.steps += 1
        self.seconds += time.perf_counter() - began
        return self._record(by_exit, scales, rate, float(norm))

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

    def _over_processes(self, totals: torch.Tensor) -> list[float]:
        return cast(torch.Tensor, self.accelerator.reduce(totals, "sum")).tolist()

    def _record(
        self, by_exit: dict[int, float], scales: Any, rate: float, norm: float
    ) -> dict[str, Any]:
        loss = sum(scales[e] * value for e, value in by_exit.items())
        if not math.isfinite(loss):
            raise ValueError(
                f"the loss of step {self.steps} is {loss}; the same command goes on from the last "
                "checkpoint, and a lower learning_rate, or mixed_precision=bf16 in the place of "
                "fp16, in a run of its own may help"
            )
        return {
            "step": self.steps,
            "tokens": self.steps * self.settings.batch_size * self.batches.packed.ids.shape[1],
            "seconds": round(self.seconds, 3),
            "loss": loss,
            "full_loss": by_exit[self.depth],
            "exit_losses": {e: v for e, v in by_exit.items() if e != self.depth},
            "learning_rate": rate,
            "gradient_norm": norm,
        }

    def save(self, folder: Path) -> None:
        """A checkpoint in ``folder``; every process calls this."""
        write_by_one(self.accelerator, folder, self.steps, self._write)

    def _write(self, folder: Path) -> None:
        self.peft.save_pretrained(folder, save_embedding_layers=False)
        write_state(folder / OPTIMISER, optimiser_state(self.accelerator, self.optimiser))
        write_run(folder, self.seconds, self._identity())

    def load(self, checkpoint: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            AnotherRunError: it is of another run; the first setting that differs is named.
        """
        seconds = read_run(checkpoint, self._identity())
        set_peft_model_state_dict(self.peft, load_file(checkpoint / ADAPTER))
        state = torch.load(checkpoint / OPTIMISER, weights_only=True, map_location="cpu")
        restore_optimiser(self.accelerator, self.optimiser, state)
        self.steps, self.seconds = step_of(checkpoint), seconds

    def _identity(self) -> dict[str, Any]:
        """What two runs have to share to give the same weights."""
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
