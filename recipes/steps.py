"""Steps of either recipe, and checkpoints that a run goes on from exactly.

Everything a step does is a function of its number. What a checkpoint has to hold is weights and
optimiser.
"""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from checkpoints import read_run, step_of, write_checkpoint, write_run, write_state
from packing import Batches, Packed, Step
from settings import RunSettings
from torch import nn

from layerskip.training.schedules import warmup_stable_decay

WARMUP = 0.05


class Trainer:
    """One run; each recipe adds what it trains and by which losses.

    Args:
        settings: of the run.
        packed: rows to train on.
        accelerator: what spreads the run over processes.
        module: gives the losses; those of its parameters that need gradients are trained.

    Attributes:
        trained: parameters.
        steps: taken so far.
        seconds: that they took, those before an interruption, too.
    """

    state_file: str
    decay: Mapping[str, float] = {}  # of ``warmup_stable_decay``
    against_nan: str  # what may help where a loss is no number

    def __init__(
        self, settings: RunSettings, packed: Packed, accelerator: Accelerator, module: nn.Module
    ) -> None:
        self.settings, self.accelerator = settings, accelerator
        self.batches = Batches.of(packed, settings, accelerator)
        self.trained = [p for p in module.parameters() if p.requires_grad]
        optimiser = torch.optim.AdamW(
            self.trained, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.module, self.optimiser = accelerator.prepare(module, optimiser)
        self.steps, self.seconds = 0, 0.0

    def step(self) -> dict[str, Any]:
        """One step of the optimiser; returns its record, the same on every process."""
        began, settings = time.perf_counter(), self.settings
        rate = settings.learning_rate * warmup_stable_decay(
            (self.steps + 0.5) / settings.steps, warmup=WARMUP, **self.decay
        )
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        losses = self._losses(self.batches.at(self.steps))
        norm = self.accelerator.clip_grad_norm_(self.trained, settings.clip)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.steps += 1
        self.seconds += time.perf_counter() - began
        if not math.isfinite(losses["loss"]):
            raise ValueError(
                f"the loss of step {self.steps} is {losses['loss']}; {self.against_nan}"
            )
        return {
            "step": self.steps,
            "tokens": self.steps * settings.batch_size * self.batches.packed.ids.shape[1],
            "seconds": round(self.seconds, 3),
            **losses,
            "learning_rate": rate,
            "gradient_norm": float(norm),
        }

    def _losses(self, work: Step) -> dict[str, Any]:
        """Go forward and backward; what the record says of it, ``loss`` first."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """A checkpoint in ``folder``; every process calls this, and the main one writes."""
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            write_checkpoint(folder, self.steps, self._write)
        self.accelerator.wait_for_everyone()

    def _write(self, folder: Path) -> None:
        scaler = self.accelerator.scaler  # of fp16 losses
        state = self._keep_weights(folder) | {
            "optimiser": self.optimiser.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        write_state(folder / self.state_file, state)
        write_run(folder, self.seconds, self._identity())

    def _keep_weights(self, folder: Path) -> dict[str, Any]:
        """Write what is trained; what of it goes into the state."""
        raise NotImplementedError

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """Go on from a checkpoint, whose state is returned: each recipe takes its weights back.

        Raises:
            AnotherRunError: it is of another run; the first setting that differs is named.
        """
        seconds = read_run(checkpoint, self._identity())
        state = torch.load(checkpoint / self.state_file, weights_only=True, map_location="cpu")
        self.optimiser.load_state_dict(state["optimiser"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.steps, self.seconds = step_of(checkpoint), seconds
        return state

    def _identity(self) -> dict[str, Any]:
        """What two runs have to share to give the same weights."""
        raise NotImplementedError
