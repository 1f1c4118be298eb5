"""Side by side on the same work: our modes and transformers', interleaved, paired."""

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from layerskip.ambient import Decoding
from layerskip.api import SelfSpeculativeLM
from layerskip.bootstrap import bootstrap_interval
from layerskip.cache import Segment
from layerskip.graphs import wait_for
from layerskip.hf_modes import (
    DEFAULT_EARLY_EXIT,
    PROMPT_LOOKUP_TOKENS,
    EarlyExitSettings,
    configured,
    counted,
    exits_to_try,
    fastest,
    generate_arguments,
    settings_to_try,
)
from layerskip.model import Head
from layerskip.outputs import DecodeStats
from layerskip.params import SamplingParams, check_bare, check_integer
from layerskip.prompts import Example, checked_examples

MODES = ("plain", "layerskip", "hf", "hf-early-exit", "hf-early-exit-default", "hf-prompt-lookup")
REPEAT_SPAN = 8
WARM_UPS, TIMED = 3, 30  # bare passes of each kind
FEWEST_TIMED = 3  # prompts, beside those that are tuned on
# Of what kind transformers' error is where it cannot draft for a family is not said anywhere.
REFUSALS = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class ModeRun:
    """One decoding of one prompt in one mode.

    Attributes:
        token_ids: what was emitted.
        seconds: wall time of the whole call, prefill included.
        stats: of our modes; None for transformers'.
        positions: (token, position) pairs through layer 0; 0 where not counted.
        kv_cache_bytes: of every cache that the call used; 0 where not counted.
    """

    token_ids: tuple[int, ...]
    seconds: float
    stats: DecodeStats | None = None
    positions: int = 0
    kv_cache_bytes: int = 0

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds


class Comparison:
    """Runs the modes of one model on the same prompts.

    Args:
        model: the loaded checkpoint; transformers' modes run on it as it is.
        lm: our decoder over the same model.
        sampling: greedy or sampled, for all modes.
        max_new_tokens: most tokens a prompt.

    Raises:
        ValueError: ``sampling`` has rules that transformers' modes would not follow.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        lm: SelfSpeculativeLM,
        *,
        sampling: SamplingParams,
        max_new_tokens: int,
    ) -> None:
        check_bare(sampling, "a comparison")
        self.model, self.lm = model, lm
        self.sampling, self.max_new_tokens = sampling, max_new_tokens
        self.early_exit = EarlyExitSettings(2, 4, 0.4)

    def run(self, mode: str, ids: Sequence[int], *, count: bool = False) -> ModeRun:
        """Decode one prompt; ``count`` also counts positions and cache bytes, untimed."""
        if mode in ("plain", "layerskip"):
            return self._ours(ids, 0 if mode == "plain" else None)
        extra: dict[str, Any] = {}
        settings = self.early_exit
        if mode == "hf-early-exit-default":  # the best exit all the same
            settings = replace(DEFAULT_EARLY_EXIT, exit_layer=settings.exit_layer)
        if mode.startswith("hf-early-exit"):
            extra["assistant_early_exit"] = settings.exit_layer
        elif mode == "hf-prompt-lookup":
            extra["prompt_lookup_num_tokens"] = PROMPT_LOOKUP_TOKENS
        # Its sampling draws from the process's generators, the caller's; seeding is of all devices.
        gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with (
            torch.random.fork_rng(gpus, enabled=not self.sampling.greedy),
            counted(self.model, count) as counts,
            configured(self.model, settings),
        ):
            began = time.perf_counter()
            tokens = self._transformers(ids, extra)
            seconds = time.perf_counter() - began
        return ModeRun(tokens, seconds, None, counts.positions, counts.kv_cache_bytes)

    def _ours(self, ids: Sequence[int], num_draft_tokens: int | None) -> ModeRun:
        began = time.perf_counter()
        out = self.lm.generate(
            ids,
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            num_draft_tokens=num_draft_tokens,
        )
        seconds = time.perf_counter() - began
        stats = out.stats
        positions, cache = stats.positions_through_first_layer, stats.kv_cache_bytes
        return ModeRun(out.token_ids, seconds, stats, positions, cache)

    def _transformers(self, ids: Sequence[int], extra: dict[str, Any]) -> tuple[int, ...]:
        if not self.sampling.greedy:
            torch.manual_seed(self.sampling.seed or 0)
        prompt = torch.tensor([ids], device=self.model.device)
        generate: Callable[..., torch.Tensor] = self.model.generate  # type: ignore[assignment]
        out = generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=self.max_new_tokens,
            pad_token_id=0,
            **generate_arguments(self.sampling),
            **extra,
        )
        return tuple(out[0, len(ids) :].tolist())

    def tune_early_exit(self, prompts: Sequence[Sequence[int]]) -> None:
        """Find transformers' best exit settings on a few prompts, before anything is timed.

        Raises:
            ValueError: the model has no exit, or transformers cannot leave there.
        """
        grid = settings_to_try(exits_to_try(self.lm.stack.num_layers, self.lm.plan))
        if not grid:
            raise ValueError("a model of one layer has no early exit: leave these modes out")
        self.early_exit, first = grid[0], prompts[0]
        try:
            self.run("hf-early-exit", first)  # a process's first call allocates, and imports
        except torch.OutOfMemoryError:  # which is no word on the family
            raise
        except REFUSALS as error:
            family = self.model.config.model_type
            raise ValueError(
                f"transformers' early exit does not run on {family}: leave out hf-early-exit"
            ) from error

        def seconds(settings: EarlyExitSettings, ids: Sequence[int]) -> float:
            self.early_exit = settings
            run = self.run("hf-early-exit", ids)
            return run.seconds / len(run.token_ids)

        self.early_exit = fastest(grid, prompts, seconds)

    def theory(self, stats: DecodeStats, *, context: int) -> dict[str, float]:
        """Predicted speed-up, ``mean_accepted_length / (d c + v)``, from bare passes.

        There are d draft passes in a round; look-ups make them fewer than drafted tokens. Draft,
        verify and plain passes are timed in turn, at ``context`` committed slots.

        Returns:
            ``c``, a draft token's pass, and ``v``, a full-depth pass over a draft and the token
            before it, in units of one plain pass; and ``speedup``, the prediction.
        """
        stack, plan = self.lm.stack, self.lm.plan
        rows = round(stats.num_draft_tokens / max(1, stats.num_rounds)) + 1
        cache = stack.new_cache(num_rows=1, num_slots=context + rows).written()
        everything = tuple(range(stack.num_layers))
        draft_layers = stack.draft_layers(plan) if plan is not None else everything
        head = self.lm.draft_head
        draft_head = stack.draft_head(plan, head) if plan is not None else stack.logits

        def bare(layers: Sequence[int], num_tokens: int, head: Head = stack.logits) -> float:
            began = time.perf_counter()
            hidden = stack.embed([1] * num_tokens)
            segment = Segment(0, context, num_tokens)
            head(stack.run_layers(hidden, layers, cache, [segment]))
            wait_for(stack.device)
            return time.perf_counter() - began

        with Decoding():
            times = [
                (bare(draft_layers, 1, draft_head), bare(everything, rows), bare(everything, 1))
                for _ in range(WARM_UPS + TIMED)
            ][WARM_UPS:]
        c = statistics.median(draft / plain for draft, _, plain in times)
        v = statistics.median(verify / plain for _, verify, plain in times)
        passes = stats.num_draft_passes / max(1, stats.num_rounds)  # look-ups save some
        return {"c": c, "v": v, "speedup": stats.mean_accepted_length / (passes * c + v)}


def compare(
    comparison: Comparison,
    examples: Iterable[Example],
    *,
    modes: Sequence[str],
    repeats: int,
    optional: Sequence[str] = (),
    max_repeated: float = 1.0,
    tuning_prompts: int = 3,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Run every mode on every prompt, in random order within each repeat.

    Args:
        comparison: model and settings.
        examples: prompts.
        modes: names out of ``MODES``; "plain" is always run, as the base of every ratio.
        repeats: timed runs of each (prompt, mode), after one that only warms up and counts.
        optional: modes to leave out where the model cannot have them; any other is an error then.
        max_repeated: leave out prompts whose plain output repeats more of its 8-grams than this
            (looping text flatters every drafter).
        tuning_prompts: prompts, the first ones, on which transformers' early-exit settings are
            chosen. They are not timed where at least ``FEWEST_TIMED`` others are left.
        on_progress: called with (prompts done, prompts).

    Returns:
        The document that ``layerskip compare --json`` prints, less ``model``.

    Raises:
        TypeError, ValueError: an argument is wrong, or a prompt cannot be decoded.
    """
    check_integer("repeats", repeats, 1)
    check_integer("tuning_prompts", tuning_prompts, 1)
    unknown = [m for m in modes if m not in MODES]
    if unknown:
        raise ValueError(f"unknown mode {unknown[0]!r}; there are {', '.join(MODES)}")
    modes = tuple(dict.fromkeys(("plain", *modes)))
    prompts = [_encoded(comparison, i, e) for i, e in enumerate(checked_examples(examples))]
    prompts, unsupported = _tuned(comparison, modes, prompts, optional, tuning_prompts)
    modes = tuple(m for m in modes if m not in unsupported)
    shuffle = random.Random(0)
    kept: list[list[int]] = []
    shares = []
    counted: dict[str, list[ModeRun]] = {m: [] for m in modes}
    timed: dict[str, list[list[ModeRun]]] = {m: [] for m in modes}
    for done, ids in enumerate(prompts):
        on_progress(done, len(prompts))
        plain = comparison.run("plain", ids)
        share = repeated_share([plain.token_ids])
        if share > max_repeated:
            continue
        first = {m: comparison.run(m, ids, count=True) if m != "plain" else plain for m in modes}
        kept.append(ids)
        shares.append(share)
        runs: dict[str, list[ModeRun]] = {m: [] for m in modes}
        for _ in range(repeats):
            for mode in shuffle.sample(modes, len(modes)):
                runs[mode].append(comparison.run(mode, ids))
        for mode in modes:
            counted[mode].append(first[mode])
            timed[mode].append(runs[mode])
    on_progress(len(prompts), len(prompts))
    if not kept:
        raise ValueError(f"every prompt's plain output repeats more than {max_repeated:.0%}")
    document = _document(comparison, kept, counted, timed, shares, len(prompts) - len(kept))
    return {**document, "unsupported": unsupported}


def _encoded(comparison: Comparison, index: int, example: Example) -> list[int]:
    """An example's prompt as token ids; which one it is that has none."""
    try:
        return comparison.lm.encode(example.prompt)
    except ValueError as error:
        raise ValueError(f"examples[{index}]: {error}") from None


def _tuned(
    comparison: Comparison,
    modes: Sequence[str],
    prompts: list[list[int]],
    optional: Sequence[str],
    tuning_prompts: int,
) -> tuple[list[list[int]], dict[str, str]]:
    """Tune transformers' early exit; what is left to time, and why modes are left out."""
    exiting = [m for m in modes if m.startswith("hf-early-exit")]
    if not exiting:
        return prompts, {}
    tuned_on = prompts[:tuning_prompts]
    try:
        comparison.tune_early_exit(tuned_on)
    except ValueError as error:
        if not set(exiting) <= set(optional):
            raise
        return prompts, dict.fromkeys(exiting, str(error).split(":")[0])
    others = [ids for ids in prompts if ids not in tuned_on]
    return others if len(others) >= FEWEST_TIMED else prompts, {}


def _document(
    comparison: Comparison,
    prompts: Sequence[Sequence[int]],
    counted: dict[str, list[ModeRun]],
    timed: dict[str, list[list[ModeRun]]],
    shares: Sequence[float],
    left_out: int,
) -> dict[str, Any]:
    modes = {mode: _summary(comparison, mode, counted, timed) for mode in counted}
    document: dict[str, Any] = {
        "prompts": len(shares),
        "prompts_left_out": left_out,
        "new_tokens": sum(len(r.token_ids) for r in counted["plain"]),
        "temperature": comparison.sampling.temperature,
        "threads": torch.get_num_threads(),
        "repeated_8gram_share": statistics.fmean(shares),
        "modes": modes,
    }
    if "layerskip" in counted:
        stats = DecodeStats.merge(r.stats for r in counted["layerskip"] if r.stats is not None)
        context = round(statistics.fmean(len(p) for p in prompts) + comparison.max_new_tokens / 2)
        document["theory"] = comparison.theory(stats, context=context)
    if "hf-early-exit" in counted:
        best = comparison.early_exit
        modes["hf-early-exit"]["settings"] = {
            "assistant_early_exit": best.exit_layer,
            "num_assistant_tokens": best.num_assistant_tokens,
            "assistant_confidence_threshold": best.confidence,
        }
    return document


def _summary(
    comparison: Comparison,
    mode: str,
    counted: dict[str, list[ModeRun]],
    timed: dict[str, list[list[ModeRun]]],
) -> dict[str, Any]:
    ratios = [  # one a prompt: repeats of one prompt are not independent
        statistics.median(
            run.tokens_per_second / base.tokens_per_second
            for run, base in zip(runs, bases, strict=True)
        )
        for runs, bases in zip(timed[mode], timed["plain"], strict=True)
    ]
    same = [
        r.token_ids == p.token_ids for r, p in zip(counted[mode], counted["plain"], strict=True)
    ]
    comparable = comparison.sampling.greedy or not mode.startswith("hf")
    stats = [r.stats for r in counted[mode] if r.stats is not None]
    merged = DecodeStats.merge(stats) if stats and mode != "plain" else None
    speeds = [run.tokens_per_second for runs in timed[mode] for run in runs]
    return {
        "tokens_per_second": statistics.median(speeds),
        "speedup_vs_plain": statistics.median(ratios),
        "speedup_vs_plain_ci95": bootstrap_interval(ratios),
        "identical_to_plain": statistics.fmean(same) if comparable else None,
        "acceptance_rate": merged.acceptance_rate if merged and merged.num_draft_tokens else None,
        "mean_accepted_length": merged.mean_accepted_length if merged else None,
        "kv_cache_bytes": max(r.kv_cache_bytes for r in counted[mode]),
        "positions_through_first_layer": sum(r.positions for r in counted[mode]),
    }


def repeated_share(outputs: Sequence[Sequence[int]]) -> float:
    """Share of 8-grams that occurred before in the same output."""
    seen_before = total = 0
    for ids in outputs:
        grams = [tuple(ids[i : i + REPEAT_SPAN]) for i in range(len(ids) - REPEAT_SPAN + 1)]
        total += len(grams)
        seen_before += len(grams) - len(set(grams))
    return seen_before / total if total else 0.0
