"""Sections of ``bench/gpu_bench.py``: beside transformers, in batches, at long contexts, in memory.

Each takes a ``Lab``, the dictionary that it fills and the time by which it has to end.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from gpu.frame import Found, limited
from gpu.lab import Lab, in_parts, label
from gpu.models import Loaded, for_auto, with_rounds_of_its_own
from gpu.moved import kv_bytes, round_bytes
from gpu.tables import NEVER_SLOWER
from gpu.timing import decode, in_turns, peak_of, synchronize
from layerskip import SelfSpeculativeLM
from layerskip.params import NumDraftTokens

EAGER_GOALS = {"Llama-3.2-1B": 3.0, "Llama-3.1-8B": 1.3}  # plain over transformers' generate
FIRST_TOKEN_GOAL = 1.02  # of transformers' time
DRAFTED = 4
COMPILE_SECONDS = 90.0
COMPILE_SHARE = 0.5  # of the time that is left, of which a first call may take so much
AUTO_TEXTS = 2  # before "auto" is timed: many a round is recorded only when it comes up often
EXIT_SETTINGS = {  # transformers' early exit, as ``layerskip compare`` tunes it on real prompts
    "num_assistant_tokens": DRAFTED,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.0,
}
MODES: tuple[NumDraftTokens, ...] = (0, DRAFTED, "auto")
TOGETHER: tuple[NumDraftTokens, ...] = (0, 1, DRAFTED, "auto")  # large batches gain from few
NAMES = {0: "off", 1: "one", DRAFTED: "on", "auto": "auto"}


def beside_transformers(lab: Lab, found: Found, until: float) -> None:
    """Whole calls, prompt included: ours, and transformers' ways to decode the same weights."""

    def measure(loaded: Loaded, entry: Found, end: float) -> None:
        lab.usual(loaded)
        with borrowed(lab, loaded) as model:
            entry |= race(lab, loaded, model, end)

    lab.each(found, until, measure)


WAYS: dict[str, dict[str, Any]] = {  # of transformers
    "transformers": {},
    "transformers, early exit": {"assistant_early_exit": 0},
    "transformers, static cache, compiled": {"cache_implementation": "static"},
}


def race(lab: Lab, loaded: Loaded, model: PreTrainedModel, until: float) -> Found:
    """Every mode in turns on one prompt."""
    ids, tokens = lab.prompt(loaded, lab.extent.prompt), lab.extent.tokens
    auto = for_auto(loaded)
    emitted: dict[str, Sequence[int]] = {}
    rates: dict[str, float] = {}

    def ours(name: str, drafted: NumDraftTokens) -> float:
        synchronize()
        began = time.perf_counter()
        (out,) = (auto if drafted == "auto" else loaded.lm).generate(
            [ids], max_new_tokens=tokens, num_draft_tokens=drafted, ignore_eos=True
        )
        synchronize()
        emitted[name], rates[name] = out.token_ids, out.stats.acceptance_rate
        return (time.perf_counter() - began) / tokens

    def theirs(name: str) -> float:
        extra = dict(WAYS[name])
        if "assistant_early_exit" in extra:
            extra["assistant_early_exit"] = loaded.model.exit_layer
        most = COMPILE_SECONDS
        if name not in emitted:  # what it takes at first must leave time for the others' turns
            most = min(most, max(COMPILE_SHARE * (until - time.monotonic()), 1.0))
        with limited(most):
            emitted[name], seconds = generated(model, ids, tokens, extra)
        return seconds / tokens

    kinds: dict[str, Callable[[], float]] = {NAMES[k]: lambda k=k: ours(NAMES[k], k) for k in MODES}
    kinds |= {name: lambda n=name: theirs(n) for name in WAYS}
    run = in_turns(kinds, until, repeats=lab.extent.repeats, warm_ups={NAMES["auto"]: AUTO_TEXTS})
    found: Found = {"unit": "ms per token, prompt included"}
    for name in kinds:
        same = agreement(emitted.get(name, ()), emitted.get("off", ()))
        found[name] = run.summary(name, 1e3) | {"tokens_as_off": same}
    gained = run.ratio("transformers", "off")
    goal = EAGER_GOALS.get(loaded.model.name)
    return found | {
        "off_over_transformers": lab.against(gained, goal) if goal else gained,
        "auto_over_transformers": run.ratio("transformers", "auto"),
        **run.extent,
        **label(loaded, rates.get("on", float("nan"))),
    }


@contextmanager
def borrowed(lab: Lab, loaded: Loaded) -> Iterator[PreTrainedModel]:
    """The same weights as a model of transformers, given back afterwards."""
    yield loaded.model.make(lab.device, loaded.eps)
    torch.compiler.reset()
    gc.collect()
    if lab.device == "cuda":
        torch.cuda.empty_cache()


def generated(
    model: PreTrainedModel, ids: Sequence[int], tokens: int, extra: dict[str, Any]
) -> tuple[list[int], float]:
    """Transformers' greedy tokens, and the seconds of the call."""
    prompt = torch.tensor([ids], device=model.device)
    if "assistant_early_exit" in extra:  # read from the model's own generation config only
        for name, value in EXIT_SETTINGS.items():
            setattr(model.generation_config, name, value)
    synchronize()
    began = time.perf_counter()
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        **extra,
    )
    synchronize()
    seconds = time.perf_counter() - began
    return out[0, len(ids) :].tolist(), seconds


def agreement(one: Sequence[int], other: Sequence[int]) -> int:
    """Leading tokens that are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def batches(lab: Lab, found: Found, until: float) -> None:
    """Tokens a second of ragged batches: speculation off, on and automatic."""
    tokens = max(2, lab.extent.tokens // 2)

    def measure(loaded: Loaded, entry: Found, end: float) -> None:
        lab.usual(loaded)
        auto = for_auto(loaded)
        for name, batch, part in in_parts(entry, "batch", lab.extent.batches, end):
            prompts = [
                lab.prompt(loaded, lab.extent.prompt - row % (lab.extent.prompt // 2), row)
                for row in range(batch)
            ]
            entry[name] = by_mode(lab, loaded, auto, prompts, tokens, part)

    lab.each(found, until, measure)


def by_mode(
    lab: Lab,
    loaded: Loaded,
    auto: SelfSpeculativeLM,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    until: float,
) -> Found:
    """Off, on and automatic, which has ``auto`` for itself, on the same prompts together."""
    rates: dict[str, float] = {}
    drafts: list[float] = []

    def seconds(drafted: NumDraftTokens) -> float:
        run = decode(auto if drafted == "auto" else loaded.lm, prompts, drafted, tokens)
        rates[NAMES[drafted]] = run.acceptance_rate
        if drafted == "auto":
            drafts.append(run.mean_drafted)
        return run.seconds_per_token

    kinds = {NAMES[k]: lambda k=k: seconds(k) for k in TOGETHER}
    run = in_turns(kinds, until, repeats=lab.extent.repeats, warm_ups={NAMES["auto"]: AUTO_TEXTS})
    context = sum(map(len, prompts)) / len(prompts) + tokens / 2
    step = round_bytes(loaded.model, 0, context=context, batch=len(prompts))
    per_token = step / len(prompts)
    result: Found = {name: run.summary(name, 1e3) for name in kinds}
    return result | {
        "unit": "ms per token of all sequences together",
        "tokens_per_second": {name: 1.0 / run.median(name) for name in kinds},
        "off_share_of_copy": per_token / lab.copy / run.median("off"),
        "on_over_off": run.ratio("off", "on"),
        "one_over_off": run.ratio("off", "one"),
        "auto_drafted": drafts,
        "auto_over_off": lab.against(run.ratio("off", "auto"), NEVER_SLOWER),
        **run.extent,
        **label(loaded, rates.get("on", float("nan"))),
    }


def contexts(lab: Lab, found: Found, until: float) -> None:
    """Plain and speculative decoding behind prompts of several lengths."""
    tokens = max(2, lab.extent.tokens // 2)

    def measure(loaded: Loaded, entry: Found, end: float) -> None:
        lab.usual(loaded)
        auto = for_auto(loaded)
        for name, context, part in in_parts(entry, "context", lab.extent.contexts, end):
            ids = [lab.prompt(loaded, context)]
            entry[name] = by_mode(lab, loaded, auto, ids, tokens, part)

    lab.each(found, until, measure)


def memory(lab: Lab, found: Found, until: float) -> None:
    """Peak bytes of a call above the weights, off and on; bytes of the cache."""
    tokens = lab.extent.tokens - DRAFTED - 2  # with drafts, too, in the same block of slots

    def measure(loaded: Loaded, entry: Found, end: float) -> None:
        lab.usual(loaded)
        lm = with_rounds_of_its_own(loaded).lm  # the kept cache of another section may be larger
        ids = lab.prompt(loaded, lab.extent.prompt)
        for drafted in (0, DRAFTED):
            first: Found = {}
            again: Found = {}
            for call in (first, again):  # what only the first one allocates, it keeps
                with peak_of(lab.device, call):
                    (out,) = lm.generate(
                        [ids], max_new_tokens=tokens, num_draft_tokens=drafted, ignore_eos=True
                    )
            entry[NAMES[drafted]] = again | {
                "kept_by_first_call": first["kept_bytes"],
                "kv_cache_bytes": out.stats.kv_cache_bytes,
            }
        off, on = entry["off"], entry["on"]
        slot = kv_bytes(loaded.model, loaded.model.layers)
        more = (on["kv_cache_bytes"] - off["kv_cache_bytes"]) / slot
        entry["slots_more_for_drafts"] = lab.against(more, DRAFTED + 1, at_least=False)
        if on["peak_bytes"] is not None:
            entry["peak_bytes_more"] = on["peak_bytes"] - off["peak_bytes"]

    lab.each(found, until, measure)


def first_tokens(lab: Lab, found: Found, until: float) -> None:
    """Time to the first token, ours over transformers'."""

    def measure(loaded: Loaded, entry: Found, end: float) -> None:
        with borrowed(lab, loaded) as model:
            for name, length, part in in_parts(entry, "prompt", lab.extent.prefills, end):
                entry[name] = first_token(lab, loaded, model, length, part)

    lab.each(found, until, measure)


def first_token(
    lab: Lab, loaded: Loaded, model: PreTrainedModel, length: int, until: float
) -> Found:
    """Of one length of prompt."""
    ids = lab.prompt(loaded, length)
    kinds: dict[str, Callable[[], float]] = {
        "ours": lambda: decode(loaded.lm, [ids], 0, 1).first_seconds,
        "transformers": lambda: generated(model, ids, 1, {})[1],
    }
    run = in_turns(kinds, until, repeats=lab.extent.repeats)
    ratio = run.ratio("ours", "transformers")
    return {
        "ours_ms": run.summary("ours", 1e3),
        "transformers_ms": run.summary("transformers", 1e3),
        "ratio": lab.against(ratio, FIRST_TOKEN_GOAL, at_least=False),
        **run.extent,
    }
