"""What a measurement is of: the checkpoint, by its values, the plan, and what runs them."""

import hashlib
import json
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from layerskip import __version__
from layerskip.cost import BY_HOST, RECORDED, CostTable, differences
from layerskip.plan import DraftPlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
def fingerprint(model: "PreTrainedModel") -> str:
    """16 hexadecimal digits of SHA-256 over the config and a grid of samples of every weight.

    The same in every process and on every device, and in every dtype that a bfloat16 checkpoint is
    loaded in: samples are rounded to bfloat16. (A float32 one may differ in float16: rounded
    twice.) Training moves it: every tensor is sampled. It is of the PEFT adapters that are run, and
    of their scales, which no tensor holds. Takes milliseconds.
    """
    config = model.config.to_dict()
    kept = {k: v for k, v in config.items() if k not in NOT_OF_THE_MODEL and k[:6] != "_attn_"}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode())
    named = sorted(model.named_parameters())
    digest.update("\n".join(f"{name} {tuple(p.shape)}" for name, p in named).encode())
    if adapters := adapters_run(model):
        digest.update(json.dumps(adapters, sort_keys=True).encode())
    samples = [_sampled(p) for _, p in named]
    digest.update(torch.cat(samples).cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def adapters_run(model: nn.Module) -> dict[str, dict[str, float]]:
    """The PEFT adapters that each module with some runs, by its name: none where disabled. Each
    with what its output is multiplied by: 1 where it has no scale."""
    return {
        name: {} if part.disable_adapters else {a: _scale(part, a) for a in part.active_adapters}
        for name, part in model.named_modules()
        # Of a transformers model these are methods.
        if isinstance(getattr(part, "disable_adapters", None), bool)
        and hasattr(part, "active_adapters")
    }


def _scale(part: nn.Module, adapter: str) -> float:
    scales = getattr(part, "scaling", None)
    return float(scales.get(adapter, 1.0)) if isinstance(scales, dict) else 1.0


def _sampled(weight: Tensor) -> Tensor:
    """A few values of ``weight`` in bfloat16, evenly over every axis; a view until the last."""
    steps = (slice(None, None, max(1, size // SAMPLES_PER_AXIS)) for size in weight.shape)
    sample = weight.detach()[tuple(steps)].flatten().to(torch.bfloat16)
    return torch.where(sample.abs() < SMALLEST_NORMAL, 0.0, sample)


def device_name(device: torch.device) -> str:
    """Of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _processor("model name") or platform.processor() or platform.machine()


def by_amd() -> bool:
    """Whether the processor is, as far as the system says whose it is."""
    return _processor("vendor_id") == "AuthenticAMD"


def _processor(what: str) -> str:
    """What Linux says of the first of them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    said = (line.partition(":")[2].strip() for line in lines if line.startswith(what))
    return next(said, "")


def cost_key(
    stack: "DecoderStack", plan: DraftPlan | None, draft_vocabulary: Sequence[int] | None = None
) -> dict[str, str | int]:
    """All that a cost table depends on."""
    return {
        "fingerprint": fingerprint(stack.twin),
        "device": device_name(stack.device),
        "dtype": str(stack.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "layerskip": __version__,
        "backend": stack.backend,
        "exact": stack.exactness.wanted,  # row_quantum can be 1 with it and without
        "row_quantum": stack.exactness.free_rows,
        "draft_layers": "none" if plan is None else ",".join(map(str, plan.layers)),
        "draft_vocabulary": _described(draft_vocabulary),
        "exit_adapter": _adapter(stack, plan),
        "passes": RECORDED if prices_recorded(stack, plan) else BY_HOST,
    }


def prices_recorded(stack: "DecoderStack", plan: DraftPlan | None) -> bool:
    """Whether a cost table is of recorded passes, as the stack's device runs rounds of drafts by
    itself. Without a plan drafts are looked up, by the host."""
    return stack.runs_rounds and plan is not None


def _adapter(stack: "DecoderStack", plan: DraftPlan | None) -> str:
    adapter = None if plan is None else stack.adapter_at(plan)
    return "none" if adapter is None else adapter.fingerprint()


def _described(draft_vocabulary: Sequence[int] | None) -> str:
    if draft_vocabulary is None:
        return "all"
    return f"{len(draft_vocabulary)} ids, {digest_of(draft_vocabulary)[:8]}"


def digest_of(token_ids: Iterable[int]) -> str:
    """SHA-256 of token ids, to tell whether two texts are equal."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()


def mismatch(
    table: CostTable,
    stack: "DecoderStack",
    plan: DraftPlan | None,
    draft_vocabulary: Sequence[int] | None = None,
) -> str | None:
    """One sentence that says what a table was measured with and is not now; None if it fits."""
    now = cost_key(stack, plan, draft_vocabulary)
    differing = differences(table.key, now, now)
    return f"the cost table was measured {', '.join(differing.values())}" if differing else None
