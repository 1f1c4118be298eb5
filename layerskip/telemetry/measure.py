"""Decode traffic with drafts and without, and record what every round and request took."""

import hashlib
import json
import os
import platform
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from layerskip import __version__
from layerskip.fingerprint import device_name, digest_of
from layerskip.outputs import GenerationOutput
from layerskip.params import (
    AUTO,
    DEFAULT_MAX_NEW_TOKENS,
    MAX_SEED,
    NumDraftTokens,
    SamplingParams,
    check_integer,
    check_num_draft_tokens,
    check_sampling,
    following_seed,
)
from layerskip.policy import Policy, task_of
from layerskip.telemetry.buckets import MOST_NAMES
from layerskip.telemetry.runs import RunsFolder
from layerskip.telemetry.summary import Summary, summarize
from layerskip.telemetry.traffic import LeftOut, Request, Traffic
from layerskip.text import TextStream, by_origin

if TYPE_CHECKING:
    from layerskip.api import SelfSpeculativeLM

WARM_TOKENS = 8


@dataclass(frozen=True)
class MeasureSettings:
    """How traffic is decoded.

    Attributes:
        arms: numbers of draft tokens: 0 is plain decoding, "auto" what pays (a policy, if the model
            has one), or so many a round.
        max_new_tokens: most tokens a prompt; the model's positions must have room for them.
        sampling: greedy, or without a seed.
        seed: of the order of the arms, and of sampling: prompt i decodes with seed + i.
        samples: requests of each task whose text is kept, for each arm that drafts.
    """

    arms: tuple[NumDraftTokens, ...] = (0, AUTO)
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    samples: int = 3

    def __post_init__(self) -> None:
        if not isinstance(self.arms, tuple):
            raise TypeError(f"arms must be a tuple of numbers of draft tokens, got {self.arms!r}")
        for arm in self.arms:
            check_num_draft_tokens(arm)
        if not self.arms or len(set(self.arms)) < len(self.arms):
            raise ValueError(f"arms must be one or more, each once, got {self.arms}")
        check_integer("max_new_tokens", self.max_new_tokens, 1)
        check_sampling(self.sampling, optional=False)
        if self.sampling.seed is not None:
            raise ValueError("give the seed to measure: it makes one of it for each prompt")
        check_integer("seed", self.seed, 0, MAX_SEED)
        check_integer("samples", self.samples, 0)

    @property
    def drafting(self) -> tuple[NumDraftTokens, ...]:
        """Arms that draft, or all if none does: samples are theirs."""
        return tuple(arm for arm in self.arms if arm != 0) or self.arms

    def order(self, index: int) -> list[NumDraftTokens]:
        """The arms in the order in which they decode a prompt: random, and always the same."""
        return random.Random(f"{self.seed}/{index}").sample(self.arms, len(self.arms))

    def sampling_of(self, index: int) -> SamplingParams:
        """Noise of its own for each prompt, the same in every arm."""
        return replace(self.sampling, seed=following_seed(self.seed, index))


def measure(
    lm: "SelfSpeculativeLM",
    traffic: Traffic,
    out: str | Path,
    *,
    settings: MeasureSettings = MeasureSettings(),
    model: str = "",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_left_out: Callable[[LeftOut], None] = lambda prompt: None,
) -> Summary:
    """Decode every prompt in every arm, one request at a time.

    The arms of a prompt come one after another, in random order. A run that was stopped, in
    whatever way, goes on with the next call with the same arguments. Of the text itself nothing is
    kept but a few samples. A ``LookupStore`` would show one arm what the one before it wrote:
    measure without.

    Args:
        lm: the model, wrapped.
        traffic: requests; they are gone through one by one.
        out: runs folder, made if there is none.
        settings: how they are decoded. A prompt that leaves no room in the model's positions for
            ``max_new_tokens`` is left out.
        model: name of the model, for reports.
        on_progress: called with (requests done, requests), from the first one that is decoded on.
        on_left_out: called for each prompt that is left out.

    Returns:
        What the folder holds then.

    Raises:
        ValueError: an argument is wrong, the folder holds something else, or no prompt fits.
    """
    with closing(RunsFolder(out, _run(lm, traffic, settings, model))) as folder:
        measurement = Measurement(lm, traffic, settings, folder, on_left_out)
        for done in measurement.steps():
            on_progress(done, traffic.count * len(settings.arms))
        if not measurement.measured:
            raise ValueError(f"no prompt could be decoded: {measurement.first_reason}")
    return summarize(out)


class Measurement:
    """One start of a measurement: what is there is passed over, the rest decoded."""

    def __init__(
        self,
        lm: "SelfSpeculativeLM",
        traffic: Traffic,
        settings: MeasureSettings,
        folder: RunsFolder,
        on_left_out: Callable[[LeftOut], None],
    ) -> None:
        self.lm, self.traffic, self.settings, self.folder = lm, traffic, settings, folder
        self.measured, self.first_reason = False, ""
        self._on_left_out, self._warm = on_left_out, False
        self._samples = Counter(
            (task_of(s["labels"], traffic.label), s["arm"]) for s in folder.samples()
        )

    def steps(self) -> Iterator[int]:
        """Go through all requests; yields how many are done."""
        done, finished = 0, self.folder.finished()
        last = next(finished, None)
        for request in self.traffic:
            ids = None
            for arm in self.settings.order(request.index):
                done += 1
                if last is not None:  # the order is always the same: it was decoded, or left out
                    if last["request_id"] == _request_id(request, arm):
                        last, self.measured = next(finished, None), True
                    continue
                ids = self._encoded(request) if ids is None else ids
                if ids:
                    self._decode(request, ids, arm)
                yield done
        if last is not None:
            raise ValueError(f"{self.folder.path} has requests that are not in {self.traffic.name}")

    def _encoded(self, request: Request) -> list[int]:
        """Its token ids; none if it is left out."""
        try:
            return self.lm.encode_fitting(
                request.prompt, request.messages, self.settings.max_new_tokens
            )
        except (ValueError, TypeError) as error:
            left_out = LeftOut(request.index + 1, str(error))
            self.first_reason = self.first_reason or f"line {left_out.number}: {error}"
            self._on_left_out(left_out)
            return []

    def _decode(self, request: Request, ids: list[int], arm: NumDraftTokens) -> None:
        if not self._warm:  # what a process does at its first pass is no part of a round
            for each in self.settings.arms:
                self._generate(request, ids, each, min(WARM_TOKENS, self.settings.max_new_tokens))
            self._warm = True
        output = self._generate(request, ids, arm, self.settings.max_new_tokens)
        marks = {"arm": str(arm), "prompt_index": request.index}
        # Written when the request has ended, so that writing takes none of its time.
        self.folder.add(
            _record(request, arm, output, self.settings.max_new_tokens),
            [record.to_dict() | marks for record in output.rounds],
            self._sample(request, ids, arm, output),
        )
        self.measured = True

    def _generate(
        self, request: Request, ids: list[int], arm: NumDraftTokens, max_new_tokens: int
    ) -> GenerationOutput:
        batch = self.lm.open_batch(
            max_new_tokens=max_new_tokens,
            sampling=self.settings.sampling_of(request.index),
            num_draft_tokens=arm,
            on_round=lambda _: None,  # listened to, rounds tell all: they are written in the end
        )
        row = batch.add(ids, labels=request.labels, request_id=_request_id(request, arm))
        while batch.unfinished:
            batch.step()
        return batch.remove(row)

    def _sample(
        self, request: Request, ids: list[int], arm: NumDraftTokens, output: GenerationOutput
    ) -> dict[str, Any] | None:
        """The text by origin, if it is among the first of its task."""
        tokenizer, drafting = self.lm.tokenizer, self.settings.drafting
        key = task_of(request.labels, self.traffic.label), str(arm)
        known = key in self._samples or len(self._samples) < MOST_NAMES * len(drafting)
        wanted = known and self._samples[key] < self.settings.samples
        if tokenizer is None or arm not in drafting or not wanted:
            return None
        self._samples[key] += 1
        text = request.prompt
        return {
            "request_id": _request_id(request, arm),
            "labels": dict(request.labels),
            "arm": str(arm),
            "prompt": text if isinstance(text, str) else tokenizer.decode(ids),
            "pieces": _pieces(tokenizer, output, self.lm.eos_ids),
        }


def _pieces(
    tokenizer: Any, output: GenerationOutput, eos_ids: Collection[int]
) -> list[dict[str, str]]:
    """The output's text, cut where tokens of another origin begin."""
    stream = TextStream(tokenizer, ())
    pieces: list[dict[str, str]] = []

    def add(text: str, origin: str) -> None:
        if pieces and (not text or pieces[-1]["origin"] == origin):
            pieces[-1]["text"] += text
        else:
            pieces.append({"text": text, "origin": origin})

    for record in output.rounds:
        for text, origin in by_origin(stream, record, eos_ids):
            add(text, origin)
    return pieces


def _request_id(request: Request, arm: NumDraftTokens) -> str:
    return f"{request.index}/{arm}"


def _record(
    request: Request, arm: NumDraftTokens, output: GenerationOutput, max_new_tokens: int
) -> dict[str, Any]:
    """Line of ``requests.jsonl``."""
    first, last, stats = output.rounds[0], output.rounds[-1], output.stats
    return {
        "request_id": _request_id(request, arm),
        "prompt_index": request.index,
        "arm": str(arm),
        "labels": dict(request.labels),
        "prompt_tokens": stats.prompt_tokens,
        "new_tokens": stats.new_tokens,
        "max_new_tokens": max_new_tokens,
        "num_rounds": stats.num_rounds,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "ttft_seconds": first.elapsed_seconds,
        "decode_seconds": last.elapsed_seconds - first.elapsed_seconds,
        "e2e_seconds": last.elapsed_seconds,
        "finish_reason": output.finish_reason,
        "tokens_sha256": digest_of(output.token_ids),
        "metrics": output.metrics,
    }


def _described(policy: Policy) -> str:
    """What tells it from another: its rules, whatever they were chosen by."""
    rules = json.dumps(policy.to_dict() | {"measured": None})
    return f"{len(policy.rules)} rules, {hashlib.sha256(rules.encode()).hexdigest()[:8]}"


def _template_of(tokenizer: Any) -> str | None:
    """What tells its chat template from another: it makes other prompts of the same messages."""
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        return None
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:8]


def _run(
    lm: "SelfSpeculativeLM", traffic: Traffic, settings: MeasureSettings, model: str
) -> dict[str, Any]:
    """Content of ``run.json``."""
    plan = lm.plan
    return {
        "model": model,
        "arms": [str(arm) for arm in settings.arms],
        "label": traffic.label,
        "labels": list(traffic.labels),
        "sampling": asdict(settings.sampling),
        "seed": settings.seed,
        "max_new_tokens": settings.max_new_tokens,
        "plan": None if plan is None else asdict(plan),
        "exit_layer": None if plan is None else plan.exit_layer,
        "exact": lm.stack.exactness.wanted,
        "lookup": lm.looks_up,
        "policy": None if lm.policy is None else _described(lm.policy),
        "chat_template": _template_of(lm.tokenizer),
        "prompts": {"name": traffic.name, "sha256": traffic.sha256, "count": traffic.count},
        "cost": lm.controller.cost.to_dict(),
        "versions": {
            "layerskip": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
        },
        "machine": {
            "device": device_name(lm.stack.device),
            "system": platform.system(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
        },
        "threads": torch.get_num_threads(),
    }
