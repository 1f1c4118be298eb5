"""One training step of each recipe, and of transformers' Trainer with the same LoRA and no exit.

All of them train on the same packed rows of random tokens; what a step costs depends on their
number alone. Steps are taken in turn, so that a drift of the machine's speed hits all alike.
"""

import ctypes
import gc
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from transformers import PreTrainedModel

from layerskip.bootstrap import bootstrap_interval

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))  # the recipes' modules import each other by bare names

import adapter_settings  # noqa: E402
import adapter_trainer  # noqa: E402
import early_exit_settings  # noqa: E402
import early_exit_trainer  # noqa: E402
from early_exit_model import add_lora  # noqa: E402
from packing import Batches, Packed  # noqa: E402

THEIRS = "transformers' Trainer, LoRA"


@dataclass(frozen=True)
class Work:
    """What a step is of: rows of ``seq_len`` tokens, in so many micro-batches.

    ``exits`` and ``exit_layer`` are the recipes'; the rank of LoRA is the same for both that have
    it.
    """

    rows: int = 16
    seq_len: int = 256
    parts: int = 1
    exits: tuple[int, ...] = (1, 2, 4)
    exit_layer: int = 1
    rank: int = 16
    mixed_precision: str = "bf16"

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_len


@dataclass(frozen=True)
class Cost:
    """Of steps that were taken in turn.

    Attributes:
        tokens_per_second: median.
        over_theirs: time of a step in units of theirs, median of pairs; 1.0 of theirs.
        interval: of that, 95 %.
        peak_bytes: above what was held before the step: on CUDA of tensors, elsewhere of the
            process (Linux; 0 where nothing tells).
    """

    tokens_per_second: float
    over_theirs: float
    interval: tuple[float, float]
    peak_bytes: int


def rows_of(work: Work, vocab_size: int, steps: int) -> Packed:
    """Random tokens in rows of one document each."""
    generator = torch.Generator().manual_seed(0)
    shape = (work.rows * steps, work.seq_len)
    ids = torch.randint(vocab_size, shape, generator=generator)
    positions = torch.arange(work.seq_len).expand(shape).contiguous()
    labels = torch.cat([ids[:, 1:], ids.new_full((shape[0], 1), -100)], dim=1)
    return Packed(ids, labels, positions, torch.zeros_like(ids))


def steps_of(
    load: Callable[[], PreTrainedModel], work: Work, folder: Path
) -> Mapping[str, Callable[[], Any]]:
    """A step of each way, by name; every way has a model of its own."""
    common: dict[str, Any] = {"data": "random", "out": str(folder), "batch_size": work.rows}
    common |= {"gradient_accumulation": work.parts, "mixed_precision": work.mixed_precision}
    common |= {"seq_len": work.seq_len, "steps": 10_000}
    model = load()
    packed = rows_of(work, model.config.vocab_size, 4)
    lora = early_exit_settings.Settings(**common, exits=work.exits, rank=work.rank)
    adapter = adapter_settings.Settings(**common, exit_layer=work.exit_layer)
    accelerator = Accelerator(mixed_precision=work.mixed_precision)
    return {
        "lora_early_exit": early_exit_trainer.Trainer(lora, model, packed, accelerator).step,
        "exit_adapter": adapter_trainer.Trainer(
            adapter, load(), packed, accelerator, exit_layer=work.exit_layer
        ).step,
        THEIRS: their_step(load(), work, packed, folder),
    }


def their_step(
    model: PreTrainedModel, work: Work, packed: Packed, folder: Path
) -> Callable[[], None]:
    """The loop body of ``transformers.Trainer`` over the same rows."""
    torch.manual_seed(0)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "theirs"),
        per_device_train_batch_size=work.rows // work.parts,
        gradient_accumulation_steps=work.parts,
        bf16=work.mixed_precision == "bf16",
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
    )
    peft = add_lora(model, rank=work.rank, alpha=2.0 * work.rank, seed=0)
    trainer = transformers.Trainer(model=peft, args=arguments)
    trainer.create_optimizer()
    trainer.model_wrapped, trainer.optimizer = trainer.accelerator.prepare(
        trainer.model, trainer.optimizer
    )
    trainer.current_gradient_accumulation_steps = work.parts  # as its own loop does
    batches, taken = Batches(packed, work.rows, work.parts), [0]

    def step() -> None:
        for batch in batches.at(taken[0]).batches:
            # It shifts labels itself.
            inputs = {"input_ids": batch.ids, "labels": batch.ids, "position_ids": batch.positions}
            trainer.training_step(trainer.model_wrapped, inputs)
        trainer.accelerator.clip_grad_norm_(trainer.model_wrapped.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        taken[0] += 1

    return step


def measure(
    load: Callable[[], PreTrainedModel], work: Work, *, turns: int, warm_up: int = 1
) -> dict[str, Cost]:
    """Cost of a step of each way, ``turns`` steps of each, in random order.

    Args:
        load: gives the model anew.
        work: of a step.
        turns: that are timed.
        warm_up: that are not.
    """
    with tempfile.TemporaryDirectory() as folder:
        steps = steps_of(load, work, Path(folder))
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        order, draw = list(steps), random.Random(0)
        for turn in range(warm_up + turns):
            draw.shuffle(order)
            for name in order:
                began = time.perf_counter()
                steps[name]()
                if turn >= warm_up:
                    seconds[name].append(time.perf_counter() - began)
        return {
            name: cost(work, seconds[name], seconds[THEIRS], peak_bytes(step))
            for name, step in steps.items()
        }


def cost(work: Work, seconds: list[float], theirs: list[float], peak: int) -> Cost:
    """A way's figures from its steps' times and those of the steps they took turns with."""
    ratios = [one / other for one, other in zip(seconds, theirs, strict=True)]
    low, high = bootstrap_interval(ratios)
    speed = work.tokens / statistics.median(seconds)
    return Cost(speed, statistics.median(ratios), (low, high), peak)


def peak_bytes(step: Callable[[], Any]) -> int:
    """The most that one more step holds beyond what is held before it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        step()
        return int(torch.cuda.max_memory_allocated() - held)
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        return 0
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed but not given back would hide some
    reset.write_text("5")  # the process's highest mark starts anew (proc(5))
    held = _status("VmRSS")
    step()
    return max(0, _status("VmHWM") - held)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(name + ":"))
    return 1024 * int(line.split()[1])
