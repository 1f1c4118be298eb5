"""How transformers is run beside us: its arguments, the settings it is lent, and what it took."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from layerskip.admission import decoder_layers
from layerskip.params import SamplingParams
from layerskip.plan import DraftPlan

PROMPT_LOOKUP_TOKENS = 10
FINALISTS = 6  # of the settings to try
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class EarlyExitSettings:
    """Transformers' early exit, at its best on this work or as it comes.

    Attributes:
        exit_layer: ``assistant_early_exit``.
        num_assistant_tokens, confidence: as in its generation config.
    """

    exit_layer: int
    num_assistant_tokens: int
    confidence: float


DEFAULT_EARLY_EXIT = EarlyExitSettings(2, 20, 0.4)  # transformers' defaults but for the exit


def exits_to_try(num_layers: int, plan: DraftPlan | None) -> list[int]:
    """Four up to a quarter of the layers, or the first four, and the plan's own, as far as there
    are so many: none of a model of one layer."""
    exits = {max(i, round(num_layers * i / 16)) for i in (1, 2, 3, 4)}
    exits |= {plan.exit_layer} if plan is not None and plan.exit_layer else set()
    return sorted(e for e in exits if e < num_layers)


def settings_to_try(exits: Iterable[int]) -> list[EarlyExitSettings]:
    """With each exit drafts of 2, 4 and 6 tokens, with and without a threshold of confidence, and
    transformers' own default."""
    tried = [(k, p) for k in (2, 4, 6) for p in (0.0, 0.4)]
    tried += [(DEFAULT_EARLY_EXIT.num_assistant_tokens, DEFAULT_EARLY_EXIT.confidence)]
    return [EarlyExitSettings(e, k, p) for e in exits for k, p in tried]


def fastest(
    grid: Sequence[EarlyExitSettings],
    prompts: Sequence[Sequence[int]],
    seconds: Callable[[EarlyExitSettings, Sequence[int]], float],
) -> EarlyExitSettings:
    """The settings that take least on all prompts, of the few that take least on the first.

    Args:
        grid: settings to try.
        prompts: token ids; at least one.
        seconds: a token of this prompt takes by these settings.
    """
    first = {settings: seconds(settings, prompts[0]) for settings in grid}
    few = sorted(grid, key=lambda settings: first[settings])[:FINALISTS]
    total = {s: first[s] + sum(seconds(s, ids) for ids in prompts[1:]) for s in few}
    return min(few, key=lambda settings: total[settings])


def generate_arguments(sampling: SamplingParams) -> dict[str, Any]:
    """Of ``model.generate``, for the distribution of ``sampling``; its seed is torch's."""
    if sampling.greedy:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p or None,
    }


@contextmanager
def configured(model: PreTrainedModel, settings: EarlyExitSettings) -> Iterator[None]:
    """Within it, transformers drafts by these settings, which it reads from the model's own
    generation config only. Of that nothing else counts but which tokens end a text: a repetition
    penalty there would give another text than ours, which has none."""
    before, depth = model.generation_config, model.config.num_hidden_layers
    ids = {name: getattr(before, name) for name in SPECIAL}
    config = GenerationConfig(**ids)
    config.num_assistant_tokens = settings.num_assistant_tokens
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = settings.confidence
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = before
        model.config.num_hidden_layers = depth  # an early exit lowers it, and an error leaves it so


@dataclass
class Counted:
    """What one call of transformers took.

    Attributes:
        positions: (token, position) pairs through layer 0.
        kv_cache_bytes: of its caches.
    """

    positions: int = 0
    kv_cache_bytes: int = 0


@contextmanager
def counted(model: PreTrainedModel, wanted: bool) -> Iterator[Counted]:
    """Count what transformers runs through layer 0, and the caches it uses."""
    counts = Counted()
    if not wanted:
        yield counts
        return
    caches: dict[int, Any] = {}

    def hook(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        counts.positions += hidden.shape[0] * hidden.shape[1]
        cache = kwargs.get("past_key_values")
        if cache is not None:
            caches[id(cache)] = cache

    handle = decoder_layers(model)[0].register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield counts
    finally:
        handle.remove()
    for cache in caches.values():
        for layer in cache.layers:
            if getattr(layer, "keys", None) is not None:
                counts.kv_cache_bytes += layer.keys.nbytes + layer.values.nbytes
