"""What a step of each recipe costs: ``pytest bench/recipes --benchmark-only``.

Beside transformers' Trainer with the same LoRA and no early exit; ``extra_info`` of the JSON has
tokens per second, the step's time over theirs with its interval, and peak memory of a step.
"""

from dataclasses import asdict
from typing import Any

import pytest
import torch
import training_steps
import transformers
from transformers import AutoModelForCausalLM

from layerskip.checkpoint import BUILTIN, builtin_folder

SMOKE = training_steps.Work(rows=2, seq_len=16, exits=(1,), rank=4, mixed_precision="no")


@pytest.mark.benchmark(group="training step")
def test_training_steps(request: pytest.FixtureRequest, benchmark: Any) -> None:
    transformers.logging.set_verbosity_error()
    name, smoke = request.config.getoption("--model"), request.config.getoption("--smoke")
    folder = builtin_folder() if name == BUILTIN else name
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device)

    work = SMOKE if smoke else training_steps.Work()
    costs = benchmark.pedantic(
        training_steps.measure,
        args=(load, work),
        kwargs={"turns": 1 if smoke else 9},
        rounds=1,
    )
    benchmark.extra_info["work"] = asdict(work)
    for way, cost in costs.items():
        benchmark.extra_info[way] = asdict(cost)
        print(
            f"{way}: {cost.tokens_per_second:,.0f} tokens/s, {cost.over_theirs:.2f} "
            f"({cost.interval[0]:.2f} to {cost.interval[1]:.2f}) of their time, "
            f"{cost.peak_bytes / 2**20:,.0f} MiB"
        )
