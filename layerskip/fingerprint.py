"""What a measurement is of: the checkpoint, by its values, and the machine that runs it."""

import hashlib
import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from layerskip.model import DecoderStack

SAMPLES_PER_AXIS = 16
SMALLEST_NORMAL = 2.0**-14  # of float16: below it, bfloat16 numbers lose bits there
# What a config says of how and where a model was loaded, not of what it computes.
NOT_OF_THE_MODEL = {
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "dtype",
    "output_attentions",
    "output_hidden_states",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


@torch.inference_mode()
def fingerprint(stack: "DecoderStack") -> str:
    """16 hexadecimal digits of SHA-256 over the config and a grid of samples of every weight.

    The same in every process and on every device, and in every dtype that a bfloat16 checkpoint is
    loaded in: samples are rounded to bfloat16. (A float32 one may differ in float16: rounded
    twice.) Training moves it: every tensor is sampled. Takes milliseconds.
    """
    config = stack.twin.config.to_dict()
    kept = {k: v for k, v in config.items() if k not in NOT_OF_THE_MODEL and k[:6] != "_attn_"}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode())
    named = sorted(stack.twin.named_parameters())
    digest.update("\n".join(f"{name} {tuple(p.shape)}" for name, p in named).encode())
    samples = [_sampled(p) for _, p in named]
    digest.update(torch.cat(samples).cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def _sampled(weight: Tensor) -> Tensor:
    """A few values of ``weight`` in bfloat16, evenly over every axis; a view until the last."""
    steps = (slice(None, None, max(1, size // SAMPLES_PER_AXIS)) for size in weight.shape)
    sample = weight.detach()[tuple(steps)].flatten().to(torch.bfloat16)
    return torch.where(sample.abs() < SMALLEST_NORMAL, 0.0, sample)


def device_name(device: torch.device) -> str:
    """Of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
