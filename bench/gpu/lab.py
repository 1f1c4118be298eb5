"""What the sections of ``bench/gpu_bench.py`` share: models, extents, the copy bandwidth, goals."""

import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch

from gpu.backends import Backend
from gpu.frame import Found
from gpu.models import EPS, SYNTHETIC, Loaded, Synthetic, load
from gpu.shapes import FULL as FULL_SHAPES
from gpu.shapes import TOY as TOY_SHAPES
from gpu.speed import copy_bandwidth
from gpu.timing import NO_TIME, REPEATS, decode
from layerskip.compare import repeated_share

Size = TypeVar("Size", int, float)
CURVE_PROMPTS = 8
PEAK_GOAL = 1.1  # of the weights' bytes, at load: one copy, and what is being moved


@dataclass(frozen=True)
class Extent:
    """How much is measured.

    Attributes:
        prompt, tokens: of one timed run, where nothing else is said.
        drafts: numbers of draft tokens whose rounds are timed.
        rounds: of each.
        few_drafts: numbers of draft tokens whose gain is measured.
        acceptances: for which, and that of every other section, the second.
        exact_tokens: compared between plain and speculative decoding, a model.
        batches: numbers of sequences.
        contexts: slots before the first new token.
        prefills: tokens of prompts whose first token is timed.
        repeats: turns of every measurement.
    """

    prompt: int
    tokens: int
    drafts: tuple[int, ...]
    rounds: int
    few_drafts: tuple[int, ...]
    acceptances: tuple[float, ...]
    exact_tokens: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prefills: tuple[int, ...]
    repeats: int = REPEATS


FULL = Extent(
    prompt=128,
    tokens=128,
    drafts=(0, 1, 2, 3, 4, 6, 8),
    rounds=24,
    few_drafts=(1, 2, 4, 6),
    acceptances=(1.0, 0.8, 0.9, 0.6, 0.4, 0.0),
    exact_tokens=2000,
    batches=(1, 2, 4, 8, 16, 32),
    contexts=(512, 4096, 16384),
    prefills=(512, 2048, 8192),
)
TOY = Extent(
    prompt=8,
    tokens=10,
    drafts=(0, 2),
    rounds=2,
    few_drafts=(2,),
    acceptances=(1.0, 0.8),
    exact_tokens=24,
    batches=(1, 3),
    contexts=(8, 40),
    prefills=(8,),
    repeats=2,
)


class Lab:
    """Models and machine of one run.

    Args:
        backend: GPU or CPU.
        models: the most important first.
        extent: of measurements.
        judged: whether goals are held against figures: those of toys and CPUs say nothing.
        write: puts the record on disk, after each model of a section.
    """

    def __init__(
        self,
        backend: Backend,
        models: Sequence[Synthetic],
        extent: Extent,
        *,
        judged: bool,
        write: Callable[[], None],
    ) -> None:
        self.backend, self.models, self.extent = backend, models, extent
        self.judged, self._write = judged, write
        self.loaded: dict[str, Loaded] = {}

    @property
    def device(self) -> str:
        return self.backend.device

    @cached_property
    def copy(self) -> float:
        """Bytes a second, read and written, of copying."""
        return copy_bandwidth(self.backend, FULL_SHAPES if self.judged else TOY_SHAPES)

    def load(self, model: Synthetic, found: Found) -> None:
        """Load one, and measure how often drafts of one token are accepted by eps."""
        lab = load(model, self.device)
        found |= {**lab.facts, "acceptance": SYNTHETIC, "curve": []}
        if "peak_over_weights" in lab.facts:
            peak = lab.facts["peak_over_weights"]
            found["peak_over_weights"] = self.against(peak, PEAK_GOAL, at_least=False)
        prompts = [prompt(model, self.extent.prompt, seed) for seed in range(CURVE_PROMPTS)]
        for eps in EPS:
            lab.scale(eps)
            run = decode(lab.lm, prompts, 1, self.extent.tokens // 2)
            lab.curve[eps] = run.acceptance_rate
            found["curve"].append(
                {
                    "eps": eps,
                    "acceptance_rate": run.acceptance_rate,
                    "drafted": sum(r.num_draft_tokens for r in run.rounds),
                    "repeated_8gram_share": repeated_share(run.token_ids),
                }
            )
        self.loaded[model.name] = lab
        if lab.curve[0.0] != 1.0:
            raise RuntimeError(f"at eps 0 every draft is right, and {lab.curve[0.0]} were accepted")

    def each(
        self, found: Found, until: float, measure: Callable[[Loaded, Found, float], None]
    ) -> None:
        """Measure every model that is loaded, each in its share of the time that is left.

        One that fails has an ``error`` and fails the section; the others go on.
        """
        found["ok"] = True
        for name, loaded, end in self._shares(found, until):
            entry: Found = {}
            found[name] = entry
            try:
                measure(loaded, entry, end)
            except Exception:  # noqa: BLE001  one model's failure says nothing of the others
                entry["error"] = traceback.format_exc(limit=-3)
            if "error" in entry or entry.get("ok") is False:
                found["ok"] = False
            self._write()

    def _shares(self, found: Found, until: float) -> Iterator[tuple[str, Loaded, float]]:
        for i, model in enumerate(self.models):
            now = time.monotonic()
            if model.name not in self.loaded:
                found[model.name] = {"left_out": "it was not loaded"}
                found["ok"] = False
            elif now > until:
                found[model.name] = {"left_out": NO_TIME}
            else:
                end = now + (until - now) / (len(self.models) - i)
                yield model.name, self.loaded[model.name], end

    def against(self, value: float, goal: float, *, at_least: bool = True) -> Found:
        """A figure beside its goal, and whether it is met; None where that would say nothing."""
        met = value >= goal if at_least else value <= goal
        wanted = f"{'>=' if at_least else '<='} {goal:g}"
        known = self.judged and not math.isnan(value)
        return {"value": value, "goal": wanted, "met": met if known else None}

    def prompt(self, loaded: Loaded, tokens: int, seed: int = 0) -> list[int]:
        """Random token ids."""
        return prompt(loaded.model, tokens, seed)

    def usual(self, loaded: Loaded) -> float:
        """Scale to the acceptance at which all but its own section measures; the eps."""
        eps = loaded.eps_for(self.extent.acceptances[1])
        loaded.scale(eps)
        return eps


def in_parts(
    entry: Found, what: str, sizes: Sequence[Size], until: float
) -> Iterator[tuple[str, Size, float]]:
    """Each size with its name and the time by which it has to end: all have the same share.

    One that no time is left for is left out of ``entry``, and says so there.
    """
    start = time.monotonic()
    for i, size in enumerate(sizes):
        name = f"{what} {size:g}"
        if time.monotonic() > until:
            entry[name] = {"left_out": NO_TIME}
        else:
            yield name, size, start + (until - start) * (i + 1) / len(sizes)


def prompt(model: Synthetic, tokens: int, seed: int) -> list[int]:
    """Random token ids, the same in every run."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(model.shape.vocab, (tokens,), generator=generator).tolist()
    return ids


def label(loaded: Loaded, acceptance_rate: float) -> dict[str, Any]:
    """How a record says by which eps, and how often, drafts were accepted."""
    return {
        "acceptance": SYNTHETIC,
        "eps": loaded.eps,
        "acceptance_rate": acceptance_rate,
    }
