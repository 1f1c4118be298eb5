"""Models of real shapes with random weights, whose early exits are right as often as wanted.

Where they are, the weights of a real checkpoint change nothing about speed: bytes are bytes. What
speculation gains depends on how often a draft is accepted, and that is set here: the branches that
layers after the exit add to the residual stream are scaled by ``eps``. At 0 the exit says what
the model says. Every acceptance made so is synthetic, and every record says so.
"""

import copy
import dataclasses
import gc
import math
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from gpu.shapes import MODELS, ModelShape
from layerskip import SelfSpeculativeLM
from layerskip.workbench import open_bench

DTYPE = torch.bfloat16
SHARP = 2.0  # of queries and keys: attention that looks at few slots keeps texts from looping
EPS = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
SYNTHETIC = "synthetic: random weights, branches after the exit scaled by eps"


@dataclass(frozen=True)
class Synthetic:
    """A whole model's shape; from the config.json of its checkpoint.

    Attributes:
        shape: of its layers and its vocabulary.
        family: transformers' ``model_type``.
        layers: how many.
        exit_layer: leading layers that draft.
        tied: whether the head is the embedding.
        max_positions: most slots of a row.
        rope: rotary embedding, as ``rope_parameters``.
    """

    shape: ModelShape
    family: str
    layers: int
    exit_layer: int
    tied: bool
    max_positions: int
    rope: dict[str, Any]

    @property
    def name(self) -> str:
        return self.shape.name

    def config(self) -> Any:
        """For transformers. Nothing ends a sequence."""
        shape = self.shape
        return AutoConfig.for_model(
            self.family,
            hidden_size=shape.hidden,
            intermediate_size=shape.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads_k,
            head_dim=shape.head_dim,
            vocab_size=shape.vocab,
            max_position_embeddings=self.max_positions,
            rope_parameters=dict(self.rope),
            rms_norm_eps=1e-6 if self.family == "qwen3" else 1e-5,
            tie_word_embeddings=self.tied,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )

    def make(self, device: str, eps: float = 1.0) -> PreTrainedModel:
        """The model, made where it will run. The same weights on every call."""
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(self.config(), dtype=DTYPE)
        model.eval().requires_grad_(False)
        for name, weight in model.named_parameters():
            fill(name, weight, eps if self.is_after_exit(name) else 1.0)
        return model

    def is_after_exit(self, name: str) -> bool:
        """Whether a weight writes a branch of a layer that drafts don't run."""
        parts = name.split(".")
        if "layers" not in parts or not {"o_proj", "down_proj"} & set(parts):
            return False
        return int(parts[parts.index("layers") + 1]) >= self.exit_layer


def fill(name: str, weight: Tensor, scale: float) -> None:
    """Set a weight in place, by its name alone: again, with another scale, whenever wanted."""
    if weight.dim() == 1:
        weight.fill_(SHARP if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0)
        return
    generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
    sharp = SHARP if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
    noise = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    noise.normal_(generator=generator)
    weight.copy_(noise.mul_(sharp * scale / math.sqrt(weight.shape[1])))


LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
_8B, _1B, _4B = MODELS
FULL = (
    Synthetic(_8B, "llama", 32, 8, False, 131072, LLAMA_ROPE | {"factor": 8.0}),
    Synthetic(_1B, "llama", 16, 4, True, 131072, LLAMA_ROPE | {"factor": 32.0}),
    Synthetic(_4B, "qwen3", 36, 9, True, 40960, {"rope_type": "default", "rope_theta": 1e6}),
)
_TOY_ROPE = {"rope_type": "default", "rope_theta": 1e4}
TOY = (
    Synthetic(ModelShape("toy", 64, 2, 1, 64, 96, 300), "llama", 6, 2, False, 1024, _TOY_ROPE),
    Synthetic(ModelShape("toy tied", 64, 2, 1, 64, 96, 300), "qwen3", 4, 1, True, 1024, _TOY_ROPE),
)


@dataclass
class Loaded:
    """A model as a user has it, and its eps.

    Attributes:
        model: its shape.
        lm: from ``from_pretrained``.
        facts: what the load took, and which stack was chosen.
        eps: of its weights now.
    """

    model: Synthetic
    lm: SelfSpeculativeLM
    facts: dict[str, Any]
    eps: float = 1.0
    curve: dict[float, float] = field(default_factory=dict)

    @cached_property
    def _branches(self) -> dict[str, Tensor]:
        """Weights that eps scales, those that decoding reads."""
        named = self.lm.stack.twin.named_parameters()
        found = {name: w for name, w in named if self.model.is_after_exit(name)}
        wanted = 2 * (self.model.layers - self.model.exit_layer)
        if len(found) != wanted:
            raise RuntimeError(
                f"{self.model.name}: {len(found)} weights after the exit can be scaled, "
                f"{wanted} should be; this stack keeps them elsewhere"
            )
        return found

    @torch.no_grad()
    def scale(self, eps: float) -> None:
        """Give the branches after the exit another eps, in place."""
        if eps != self.eps:
            for name, weight in self._branches.items():
                fill(name, weight, eps)
            self.eps = eps

    def eps_for(self, acceptance: float) -> float:
        """Where the measured curve has this acceptance, on a line between two of its points.

        Raises:
            RuntimeError: no curve was measured.
        """
        if not self.curve:
            raise RuntimeError(f"{self.model.name}: acceptance by eps has not been measured")
        if acceptance >= 1.0:
            return 0.0
        points = sorted(self.curve.items())
        for (low, above), (high, below) in pairwise(points):
            if below <= acceptance <= above and below < above:
                return low + (above - acceptance) / (above - below) * (high - low)
        return min(points, key=lambda point: abs(point[1] - acceptance))[0]


def load(model: Synthetic, device: str) -> Loaded:
    """Through a folder and ``from_pretrained``, which alone may pack weights; peaks are noted."""
    plain = model.make(device)
    size = sum(w.nbytes for w in {w.data_ptr(): w for w in plain.parameters()}.values())
    with scratch(size) as folder:
        began = time.perf_counter()
        plain.save_pretrained(folder)
        del plain
        gc.collect()
        saved = time.perf_counter()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        lm = SelfSpeculativeLM.from_pretrained(
            folder,
            exit_layer=model.exit_layer,
            num_draft_tokens=0,  # what "auto" costs is measured when a section asks for it
            device=device,
            local_files_only=True,
            lookup=False,
        )
    facts = {
        "weight_bytes": size,
        "save_seconds": saved - began,
        "load_seconds": time.perf_counter() - saved,
        **stack_facts(lm),
    }
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() - before
        facts |= {"peak_bytes_at_load": peak, "peak_over_weights": peak / size}
    return Loaded(model, lm, facts)


def with_rounds_of_its_own(loaded: Loaded) -> Loaded:
    """The same model, which captures its rounds anew."""
    lm = copy.copy(loaded.lm)
    lm._bench, _ = open_bench(lm.stack, lm.plan, lm.draft_head)
    return dataclasses.replace(loaded, lm=lm)


def for_auto(loaded: Loaded) -> SelfSpeculativeLM:
    """The same model as a load for "auto" leaves it: its costs are known, and what is recorded
    with them is. Nobody else decodes by it: where a number of drafts is not recorded yet, no longer
    round that a fixed number has recorded runs in its place.
    """
    _ = loaded.lm.controller  # all copies share this one
    lm = with_rounds_of_its_own(loaded).lm
    lm._record_ahead()
    return lm


def stack_facts(lm: SelfSpeculativeLM) -> dict[str, Any]:
    """Which stack decodes, and what it says of itself."""
    return {
        "stack": type(lm.stack).__name__,
        "why": lm.stack_choice,
        "backend": lm.stack.backend,
        "bit_identical": lm.stack.exactness.wanted,
        "exactness": lm.exactness,
        "exit_layer": lm.plan.exit_layer if lm.plan is not None else None,
    }


@contextmanager
def scratch(size: int) -> Iterator[Path]:
    """A folder for ``size`` bytes: in memory if that has twice the room, else where files go."""
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 2 * size
    place = shared if roomy else Path(tempfile.gettempdir())
    if shutil.disk_usage(place).free < size:
        raise RuntimeError(
            f"{place} has no room for {size / 1e9:.1f} GB of weights; set TMPDIR to a larger place"
        )
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)
