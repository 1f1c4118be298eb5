"""``model.generate(..., custom_generate=lm.custom_generate)``: transformers' contract, our loop.

Transformers prepares logits processors, stopping criteria and lengths; the tokens come from here,
and what goes back is what its own greedy search or sampling gives back.
"""

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, cast

import torch
from einops import rearrange
from torch import FloatTensor, LongTensor, Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from layerskip.batch import Batch
from layerskip.cache import CachedText
from layerskip.loading import eos_ids_of
from layerskip.outputs import GenerationOutput
from layerskip.params import SamplingParams
from layerskip.request import RowRequest, RowSettings
from layerskip.sampling import ids_of

MODEL_KWARGS = {
    "attention_mask",
    "cache_position",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "token_type_ids",
    "use_cache",
}
STATEFUL = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")
# What transformers samples with waits for the grammar: all that a cut keeps may be forbidden.
WARPER = ("LogitsWarper", "LogitNormalization")  # ends of names
ROW_AWARE = (
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
)
UNSUPPORTED = {
    "num_beams": (1, None),
    "guidance_scale": (1, None),
    "penalty_alpha": (0, None),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "dola_layers": (None,),
    "use_mtp": (False, None),
    "constraints": (None,),
    "force_words_ids": (None,),
    "output_attentions": (False, None),
    "output_hidden_states": (False, None),
}


@dataclass(frozen=True)
class Call:
    """What transformers hands over, checked; names as in its decoding methods."""

    model: PreTrainedModel
    input_ids: Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    streamer: Any
    model_kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        unknown = sorted(set(self.model_kwargs) - MODEL_KWARGS)
        if unknown:
            raise ValueError(f"custom_generate does not take {', '.join(unknown)}")
        if len(self.input_ids) == 0:
            raise ValueError("custom_generate got input_ids of no rows; give it one row or more")
        held = self.model_kwargs.get("past_key_values")
        if held is not None and held.get_seq_length() > 0:
            raise ValueError(
                "custom_generate starts from an empty cache; to go on from an earlier text, use "
                "generate(..., cache=out.cache) of the wrapper"
            )
        self._check_inputs()
        for name, allowed in UNSUPPORTED.items():
            value = getattr(self.generation_config, name, None)
            if value not in allowed:
                raise ValueError(f"custom_generate does not work with {name}={value!r}")
        for processor in self.logits_processor:
            if type(processor).__name__ in STATEFUL:
                raise ValueError(
                    f"{type(processor).__name__} keeps a state of its own between calls, and "
                    "speculation asks about tokens that may be dropped; use plain generate"
                )
        if self.returns_cache and not isinstance(held, DynamicCache | None):
            instead = "past_key_values"
            if not _is_callers(held):
                instead = "cache_implementation or return_dict_in_generate"
            raise ValueError(
                "custom_generate gives keys and values back in a DynamicCache, and a "
                f"{type(held).__name__} was asked for; leave out {instead}"
            )
        if self.streamer is not None and len(self.input_ids) > 1:
            raise ValueError(
                f"a streamer takes one sequence, and the batch has {len(self.input_ids)}"
            )

    @property
    def returns_cache(self) -> bool:
        """Whether keys and values go back: with the output, or in a cache that the caller gave."""
        if self.model_kwargs.get("use_cache") is False:
            return False
        held = self.model_kwargs.get("past_key_values")
        return bool(self.generation_config.return_dict_in_generate) or _is_callers(held)

    def _check_inputs(self) -> None:
        """Raise if the caller's own inputs would be left out, and give other tokens."""
        for name in ("attention_mask", "position_ids"):
            given = self.model_kwargs.get(name)
            if given is not None and given.shape[-1] != self.input_ids.shape[-1]:
                # From a mask of ones transformers makes positions, and leaves it out.
                raise ValueError(
                    f"custom_generate got input_ids of {self.input_ids.shape[-1]} tokens and an "
                    f"attention_mask or position_ids of {given.shape[-1]}; give as many"
                )
        taken = inspect.signature(self.model.forward).parameters
        if "token_type_ids" in taken and "token_type_ids" in self.model_kwargs:
            raise ValueError(
                "custom_generate does not take the token_type_ids that "
                f"{type(self.model).__name__} adds to its embeddings; leave them out"
            )
        given = self.model_kwargs.get("position_ids")  # transformers makes them if nobody gives any
        mask = self.model_kwargs.get("attention_mask")
        kept = (torch.ones_like(self.input_ids) if mask is None else mask).bool()
        counted = kept.long().cumsum(-1) - 1
        if given is None:
            return
        if not ((given.to(kept.device) == counted) | ~kept).all():
            raise ValueError(
                "custom_generate counts positions from each row's first token; leave out "
                "position_ids"
            )

    def prompts(self) -> list[list[int]]:
        """Each row's ids without padding."""
        mask = self.model_kwargs.get("attention_mask")
        if mask is None:
            return self.input_ids.tolist()
        for row in mask.bool().int().tolist():  # floats and booleans are masks, too
            if "".join(map(str, row)).strip("0").count("0"):
                raise ValueError("attention_mask has a hole; padding can only be at the ends")
        return [ids[kept.bool()].tolist() for ids, kept in zip(self.input_ids, mask, strict=True)]


@dataclass(frozen=True)
class HostedRow:
    """One row's processors and criteria, shown what transformers would show them.

    To those that may know which row is which that is a batch: all its rows are this one, and only
    this one's answer is taken.

    Attributes:
        index: in the batch.
        prompt: its tokens.
        kept: logits and scores of emitted tokens, ``(tokens, vocab)`` per round.
    """

    call: Call
    index: int
    prompt: tuple[int, ...]
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def process(self, processors: Sequence[LogitsProcessor], ids: Tensor, scores: Tensor) -> Tensor:
        """Some of the logits processors, as one of ours."""
        batch = self._shown(ids[:, len(self.prompt) :])
        for processor in processors:
            if _knows_rows(processor):
                answers = processor(batch, cast(FloatTensor, scores.expand(len(batch), -1).clone()))
                scores = answers[self.index][None]
            else:
                scores = processor(cast(LongTensor, batch[:1]), cast(FloatTensor, scores))
        return scores

    def warp(self, warpers: Sequence[LogitsProcessor], ids: Tensor, scores: Tensor) -> Tensor:
        """The same of those behind a grammar, which may leave a trimmed draft no token: to cut that
        is an error to some, and NaN to others."""
        return self.process(warpers, ids, scores) if scores.isfinite().any() else scores

    def ends(self, context: Sequence[int]) -> bool:
        """Whether a stopping criterion says so."""
        new = ids_of(context[len(self.prompt) :], self.call.input_ids.device)
        return bool(self.call.stopping_criteria(self._shown(new), None)[self.index])

    def _shown(self, new: Tensor) -> LongTensor:
        """The row of ``input_ids``, padding included, and its new tokens."""
        ids = self.call.input_ids
        row = torch.cat([ids[self.index][None].to(new.device), new], dim=1)
        return cast(LongTensor, row.expand(len(ids), -1))

    def keep(self, logits: Tensor, scores: Tensor) -> None:
        # Copied: of a float32 model they are views of all rows of the pass.
        kept = logits.clone()
        self.kept.append((kept, kept if scores is logits else scores.clone()))

    def settings(self, shared: RowSettings, seed: int) -> RowSettings:
        """What the call says, over the batch's own settings."""
        config, grammar = self.call.generation_config, shared.grammar
        dictionary = bool(config.return_dict_in_generate)
        sampling = SamplingParams(temperature=1.0, seed=seed) if config.do_sample else None
        chain = [*self.call.logits_processor]
        places = [i for i, processor in enumerate(chain) if _warps(processor)]
        cut = places[0] if places and grammar is not None else len(chain)
        before, behind = chain[:cut], chain[cut:]
        return replace(
            shared,
            max_new_tokens=int(config.max_length) - self.call.input_ids.shape[1],
            sampling=sampling or SamplingParams(),
            logits_processor=(partial(self.process, before),) if before else (),
            warpers=(partial(self.warp, behind),) if behind else (),
            return_cache=self.call.returns_cache,
            # A stopping criterion ends the row as well; a grammar has to know what may.
            eos_ids=eos_ids_of(config) if grammar is not None else frozenset(),
            ends=self.ends,
            sink=self.keep
            if dictionary and (config.output_scores or config.output_logits)
            else None,
        )


def _knows_rows(processor: Any) -> bool:
    """Whether a processor may treat rows differently: some of transformers' own, and any other."""
    kind = type(processor)
    return kind.__name__ in ROW_AWARE or not kind.__module__.startswith("transformers.")


def _warps(processor: Any) -> bool:
    """Whether a processor, or what it was derived from, is one that transformers samples with."""
    return any(kind.__name__.endswith(WARPER) for kind in type(processor).__mro__)


def generate(
    batch: Batch,
    call: Call,
    prompts: Sequence[Sequence[int]],
    *,
    seed: int | None,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode what transformers asks for.

    Args:
        batch: empty, with the drafts, verification and grammar that its rows shall have.
        prompts: of ``call``, checked.
        seed: of the first row; the i-th uses ``seed + i``. None draws one from torch's generator,
            so that ``torch.manual_seed`` makes sampling repeatable; greedy search draws nothing.
    """
    if seed is None:
        drawn = call.generation_config.do_sample
        seed = int(torch.randint(2**62, (1,), device="cpu")) if drawn else 0
    rows = [HostedRow(call, i, tuple(prompt)) for i, prompt in enumerate(prompts)]
    requests = [
        batch.check(row.prompt, seed_offset=i, settings=row.settings(batch.settings, seed))
        for i, row in enumerate(rows)
    ]
    outputs = _decode(batch, requests, call.streamer)
    return _returned(call, rows, outputs, batch.num_layers)


def _decode(batch: Batch, requests: list[RowRequest], streamer: Any) -> list[GenerationOutput]:
    if streamer is None:
        return batch.run(requests)
    row = batch.join(requests[0])
    while batch.unfinished:
        for record in batch.step():
            for token in record.token_ids:
                streamer.put(torch.tensor([token], device="cpu"))
    streamer.end()
    return [batch.remove(row)]


def _padding(config: GenerationConfig) -> int:
    """What follows a sequence that ended before others, as in transformers: where no padding is
    named the first end of sequence, and where there is none of that either any token."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    eos = () if config.eos_token_id is None else config.eos_token_id
    ids = torch.as_tensor(eos, device="cpu").flatten().tolist()
    return int(ids[0]) if ids else 0


def _returned(
    call: Call, rows: Sequence[HostedRow], outputs: Sequence[GenerationOutput], num_layers: int
) -> Tensor | GenerateDecoderOnlyOutput:
    config, device = call.generation_config, call.input_ids.device
    longest = max(len(o.token_ids) for o in outputs)
    pad = _padding(config)
    new = [[*o.token_ids, *[pad] * (longest - len(o.token_ids))] for o in outputs]
    sequences = torch.cat([call.input_ids, torch.tensor(new, device=device)], dim=1)
    cache = _as_dynamic_cache(call, [o.cache for o in outputs], num_layers)
    if not config.return_dict_in_generate:
        return sequences
    fields: dict[str, Any] = {
        name: _by_step([[pair[at] for pair in row.kept] for row in rows], longest, device)
        for at, name in enumerate(("logits", "scores"))
        if getattr(config, f"output_{name}")
    }
    return GenerateDecoderOnlyOutput(
        sequences=cast(LongTensor, sequences), past_key_values=cache, **fields
    )


def _by_step(
    rows: Sequence[Sequence[Tensor]], longest: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Per emitted token ``(rows, vocab)``; zeros where a row had ended."""
    whole = [torch.cat(list(pieces)) for pieces in rows]
    padded = [
        torch.nn.functional.pad(row, (0, 0, 0, longest - row.shape[0])).to(device) for row in whole
    ]
    return torch.stack(padded, dim=1).unbind(0)


def _as_dynamic_cache(
    call: Call, texts: Sequence[CachedText | None], num_layers: int
) -> DynamicCache | None:
    """Keys and values where transformers' own cache would have them; zeros under padding."""
    cache = call.model_kwargs.get("past_key_values")
    if not isinstance(cache, DynamicCache) or any(t is None for t in texts):
        return None
    mask, width = call.model_kwargs.get("attention_mask"), call.input_ids.shape[1]
    prompts = [len(p) for p in call.prompts()]
    held = [t for t in texts if t is not None]
    new = max(len(t.token_ids) - n for t, n in zip(held, prompts, strict=True))
    shape = (num_layers, len(held), width + new, *held[0].keys.shape[2:])
    keys, values = held[0].keys.new_zeros(shape), held[0].values.new_zeros(shape)
    for i, (text, length) in enumerate(zip(held, prompts, strict=True)):
        kept = torch.ones(width, device="cpu") if mask is None else mask[i].cpu()
        ends = width + len(text.token_ids) - length
        slots = torch.cat([kept.nonzero()[:, 0], torch.arange(width, ends, device="cpu")])
        keys[:, i, slots] = text.keys[:num_layers]
        values[:, i, slots] = text.values[:num_layers]
    keys, values = (
        rearrange(x, "layer row slot head dim -> layer row head slot dim").contiguous()
        for x in (keys, values)
    )
    for layer in range(num_layers):
        cache.update(keys[layer], values[layer], layer)
    return cache


def _is_callers(cache: Any) -> bool:
    """Whether ``generate`` was given this cache, which transformers (5.17 to 5.23) notes in it."""
    return bool(getattr(cache, "_is_user_defined", False))


def callers_streamer(model: PreTrainedModel) -> Any:
    """The streamer given to ``generate``, which transformers (5.17 to 5.23) drops for callables.

    Called for ``custom_generate``, or from a function around it, it reads the argument where the
    model's ``generate`` has it.
    """
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001
    while frame is not None:
        code, where = frame.f_code, frame.f_globals.get("__name__")
        if code.co_name == "generate" and where == GenerateDecoderOnlyOutput.__module__:
            known = frame.f_locals
            return known.get("streamer") if known.get("self") is model else None
        frame = frame.f_back
    return None
