"""Every way of decoding that the benchmarks compare: transformers' own, and ours."""

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from paired import Clock, by_turns, collected, total
from torch import Tensor
from torch.autograd.profiler import profile
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from layerskip import GenerationOutput, Round, SamplingParams, SelfSpeculativeLM
from layerskip.hf_modes import (
    PROMPT_LOOKUP_TOKENS,
    EarlyExitSettings,
    configured,
    counted,
    exits_to_try,
    fastest,
    generate_arguments,
    settings_to_try,
)
from layerskip.params import NumDraftTokens

FIXED = 4
BASE, THEIR_BASE = "autoregressive", "hf"
OURS = (BASE, "fixed", "automatic", "look-up")
ALONE = ("hf-early-exit", "hf-prompt-lookup", "hf-draft-model")  # transformers: one prompt a call
THEIRS = (THEIR_BASE, "hf-static", *ALONE)
MODES = (*THEIRS, *OURS)
TUNED = ("hf-early-exit", "hf-draft-model")
NOT_TUNED = EarlyExitSettings(2, 4, 0.4)  # of modes that do not read them
PADDING = 0


@dataclass(frozen=True)
class Turn:
    """Some prompts decoded together, once.

    Attributes:
        texts: what each emitted.
        whole: the call.
        arrivals: (wall seconds since the call began, tokens of all prompts that came then).
        rounds: the records, of our modes.
        cache_bytes: of every cache that the call used; 0 where not counted.
        going: texts that each arrival was for, as those that have ended get no more tokens; empty:
            all, as transformers hands out padding for them.
    """

    texts: tuple[tuple[int, ...], ...]
    whole: Clock
    arrivals: tuple[tuple[float, int], ...]
    rounds: tuple[Round, ...] = ()
    cache_bytes: int = 0
    going: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def wall_per_token(self) -> float:
        return self.whole.wall / max(1, self.tokens)

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0][0]

    def gaps(self) -> list[tuple[float, int]]:
        """(seconds per token of a row, tokens that it holds for) after the first token. Tokens
        that came together share the time since those before them."""
        going = self.going or [len(self.texts)] * len(self.arrivals)
        steps = zip(self.arrivals[1:], going[1:], strict=True)
        gaps, before = [], self.first
        for (now, count), rows in steps:
            if count:
                gaps.append((rows * (now - before) / count, count))
            before = now
        return gaps


@dataclass(frozen=True)
class Way:
    """One of our modes."""

    lm: SelfSpeculativeLM
    num_draft_tokens: NumDraftTokens


class _Decoding:
    """Prompts through an open batch, as a service would decode them."""

    def __init__(self, prompts: Sequence[Sequence[int]], way: Way, settings: Any) -> None:
        self.prompts, self.way, self.settings = prompts, way, settings
        self.counts: list[int] = []
        self.going: list[int] = []
        self.rounds: list[Round] = []
        self.outputs: list[GenerationOutput] = []

    def __iter__(self) -> Iterator[int]:
        batch = self.way.lm.open_batch(num_draft_tokens=self.way.num_draft_tokens, **self.settings)
        rows = [batch.add(prompt) for prompt in self.prompts]
        while batch.unfinished:
            records = batch.step()
            self.counts.append(sum(len(r.token_ids) for r in records))
            self.going.append(len(records))
            self.rounds += records
            yield sum(self.counts)
        self.outputs += (batch.remove(row) for row in rows)

    def turn(self, laps: Sequence[Clock]) -> Turn:
        times = itertools.accumulate(lap.wall for lap in laps[:-1])
        texts = tuple(out.token_ids for out in self.outputs)
        arrivals = tuple(zip(times, self.counts, strict=True))
        cache = self.outputs[0].stats.kv_cache_bytes
        going = tuple(self.going)
        return Turn(texts, total(laps), arrivals, tuple(self.rounds), cache, going)


def ours(
    ways: Mapping[str, Way],
    prompts: Sequence[Sequence[int]],
    chance: random.Random,
    *,
    sampling: SamplingParams,
    max_new_tokens: int,
    logits_processor: Sequence[Callable[[Tensor, Tensor], Tensor]] = (),
    ignore_eos: bool = False,
) -> dict[str, Turn]:
    """The same prompts in several ways, round by round in alternation (``paired.by_turns``)."""
    settings = {
        "max_new_tokens": max_new_tokens,
        "sampling": sampling,
        "logits_processor": logits_processor,
        "ignore_eos": ignore_eos,
    }
    works = {name: _Decoding(prompts, way, settings) for name, way in ways.items()}
    laps = by_turns({name: iter(work) for name, work in works.items()}, chance)
    return {name: work.turn(laps[name]) for name, work in works.items()}


class _Arrivals(BaseStreamer):
    """When transformers hands out tokens; the prompt comes first and is not counted."""

    def __init__(self) -> None:
        self.times: list[tuple[float, int]] | None = None
        self.began = time.perf_counter()

    def put(self, value: Tensor) -> None:
        if self.times is None:
            self.times = []
        else:
            self.times.append((time.perf_counter() - self.began, value.numel()))

    def end(self) -> None:
        pass


class Theirs:
    """Transformers' modes on the model as it is.

    Args:
        model: the checkpoint.
        lm: our decoder over it, for its depth, plan and end of sequence.
        draft_model: an independent one with the same tokenizer, if there is one.
        sampling: as for ours.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        lm: SelfSpeculativeLM,
        draft_model: PreTrainedModel | None,
        *,
        sampling: SamplingParams,
    ) -> None:
        self.model, self.lm, self.draft_model, self.sampling = model, lm, draft_model, sampling
        self.settings = dict.fromkeys(TUNED, NOT_TUNED)
        self._models = [m for m in (model, draft_model) if m is not None]

    def decode(
        self,
        mode: str,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        count: bool = False,
    ) -> Turn:
        """One call of ``generate``; ``count`` also counts bytes of caches, and is not for timing.

        Shorter prompts of a batch are padded at the left.
        """
        longest = max(map(len, prompts))
        padded = [[PADDING] * (longest - len(p)) + list(p) for p in prompts]
        mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
        ids = torch.tensor(padded, device=self.model.device)
        attention_mask = torch.tensor(mask, device=self.model.device)
        settings = self._settings(mode)
        with ExitStack() as stack:
            for model in self._models:
                stack.enter_context(configured(model, self.settings.get(mode, NOT_TUNED)))
            counts = [stack.enter_context(counted(m, count)) for m in self._models]
            collected()
            began, arrivals = Clock.now(), _Arrivals()
            out = self.model.generate(
                ids,
                attention_mask=attention_mask,
                max_new_tokens=max_new_tokens,
                pad_token_id=PADDING,
                streamer=arrivals,
                **settings,
            )
            emitted = out[:, longest:].tolist()
            whole = Clock.now() - began
        texts = tuple(self._ended(text) for text in emitted)
        cache = sum(c.kv_cache_bytes for c in counts)
        return Turn(texts, whole, tuple(arrivals.times or ()), (), cache)

    def _settings(self, mode: str) -> dict[str, Any]:
        settings = generate_arguments(self.sampling)
        if not self.sampling.greedy:
            torch.manual_seed(self.sampling.seed or 0)
        if mode == "hf-early-exit":
            settings["assistant_early_exit"] = self.settings[mode].exit_layer
        elif mode == "hf-draft-model":
            settings["assistant_model"] = self.draft_model
        elif mode == "hf-prompt-lookup":
            settings["prompt_lookup_num_tokens"] = PROMPT_LOOKUP_TOKENS
        elif mode == "hf-static":
            # On a GPU it would be compiled for each length of a prompt, most of a minute each time;
            # `make gpu-bench` has it compiled, for one length.
            settings |= {"cache_implementation": "static", "disable_compile": True}
        return settings

    def _ended(self, text: Sequence[int]) -> tuple[int, ...]:
        """Up to the end of its sequence; the others of a batch go on beside it."""
        ends = (i + 1 for i, token in enumerate(text) if token in self.lm.eos_ids)
        return tuple(text[: next(ends, len(text))])

    def tune(
        self, mode: str, prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> EarlyExitSettings:
        """The mode's fastest settings on these prompts."""
        self.decode(mode, prompts[:1], max_new_tokens=2)  # a first call allocates, and imports

        def seconds(settings: EarlyExitSettings, prompt: Sequence[int]) -> float:
            self.settings[mode] = settings
            return self.decode(mode, [prompt], max_new_tokens=max_new_tokens).wall_per_token

        return fastest(self.grid(mode), prompts, seconds)

    def grid(self, mode: str) -> list[EarlyExitSettings]:
        """Settings to try; a draft model has no exit to choose."""
        exits = exits_to_try(self.lm.stack.num_layers, self.lm.plan)
        return settings_to_try(exits if mode == "hf-early-exit" else [1])

    def described(self, mode: str) -> dict[str, Any]:
        """What was found for it, in transformers' names."""
        if mode not in TUNED:
            return {}
        best = self.settings[mode]
        settings: dict[str, Any] = {
            "num_assistant_tokens": best.num_assistant_tokens,
            "assistant_confidence_threshold": best.confidence,
        }
        exits = {"assistant_early_exit": best.exit_layer} if mode == "hf-early-exit" else {}
        return exits | settings


@contextmanager
def peak_memory(device: torch.device) -> Iterator[list[int]]:
    """Bytes that a block allocates at most at one time beyond what was there; not for timing."""
    found: list[int] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        found.append(torch.cuda.max_memory_allocated(device) - before)
        return
    with profile(profile_memory=True) as recorded:  # torch.profiler's works all events out
        yield found
    events = recorded.kineto_results.events()
    held = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    found.append(most)
