"""``SelfSpeculativeLM``: the Python API."""

import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from layerskip.checkpoint import BUILTIN, builtin_folder, known_plan, load_checkpoint
from layerskip.decode import Batch as RowBatch
from layerskip.decode import Row
from layerskip.drafting import EarlyExitDrafter
from layerskip.model import DecoderStack
from layerskip.outputs import DecodeStats, GenerationOutput, Round
from layerskip.params import MAX_SEED, SamplingParams, check_integer
from layerskip.plan import DraftPlan
from layerskip.sampling import Sampler
from layerskip.text import TextStream

logger = logging.getLogger(__name__)

DEFAULT_NUM_DRAFT_TOKENS = 4
DEFAULT_MAX_NEW_TOKENS = 128
MAX_NUM_DRAFT_TOKENS = 32
MAX_ROWS = 32

Prompt = str | Sequence[int]
Message = Mapping[str, str]


@dataclass(frozen=True)
class StreamStep:
    """One round of a stream.

    Attributes:
        text: text that became final.
        token_ids: tokens emitted.
        round: the round's record.
    """

    text: str
    token_ids: tuple[int, ...]
    round: Round


class SelfSpeculativeLM:
    """A causal language model that drafts with some of its own layers.

    The model is not changed in any way: decoding runs on a twin that shares its tensors. Output
    is what plain decoding gives, bit for bit, whatever the plan and the number of draft tokens
    (``exactness`` says whether that holds for this model on this machine).

    Args:
        model: a loaded transformers causal LM of a supported family, on one device.
        tokenizer: its tokenizer; None takes and gives token ids.
        plan: which layers draft; None decodes plainly.
        num_draft_tokens: default for requests that do not say.

    Raises:
        UnsupportedModelError: the model does not fit, with the reason; it is left as it was.
        ValueError: the plan is for another depth, or a weight is not finite.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        plan: DraftPlan | None = None,
        *,
        num_draft_tokens: int = DEFAULT_NUM_DRAFT_TOKENS,
    ) -> None:
        if plan is not None and not isinstance(plan, DraftPlan):
            raise TypeError(f"plan must be a DraftPlan or None, got {type(plan).__name__}")
        _check_num_draft_tokens(num_draft_tokens)
        depth = getattr(getattr(model, "config", None), "num_hidden_layers", None)
        if plan is not None and depth is not None and plan.num_layers != depth:
            raise ValueError(
                f"the plan is for a model of {plan.num_layers} layers; this one has {depth}"
            )
        self.stack = DecoderStack(model)
        self.tokenizer, self.plan = tokenizer, plan
        self.num_draft_tokens = num_draft_tokens if plan is not None else 0
        self._eos_ids = _eos_ids(model)
        self._drafter = EarlyExitDrafter(self.stack, plan) if plan is not None else None

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = BUILTIN,
        *,
        exit_layer: int | None = None,
        plan: DraftPlan | None = None,
        num_draft_tokens: int | None = None,
        dtype: str | torch.dtype | None = None,
        device: str = "auto",
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | None = None,
        local_files_only: bool = False,
    ) -> "SelfSpeculativeLM":
        """Load a checkpoint; code from a hub is never run.

        Args:
            model: a folder, a hub id, or "builtin" for the checkpoint inside the package.
            exit_layer: draft with this many leading layers.
            plan: or with this plan. With neither, the one in the folder's ``layerskip.json``; if
                there is none, decoding is plain.
            num_draft_tokens: tokens drafted per round; None takes the plan's best or 4.
            dtype: "bfloat16", "float16", "float32" or None for the checkpoint's own.
            device: "cpu", "cuda" or "auto" (CUDA where there is one).
            revision, cache_dir, token, local_files_only: as in transformers.
        """
        loaded, tokenizer, plan, num_draft_tokens = cls.load_parts(
            model,
            exit_layer=exit_layer,
            plan=plan,
            num_draft_tokens=num_draft_tokens,
            dtype=dtype,
            device=device,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            local_files_only=local_files_only,
        )
        return cls(loaded, tokenizer, plan, num_draft_tokens=num_draft_tokens)

    @staticmethod
    def load_parts(
        model: str | Path,
        *,
        exit_layer: int | None = None,
        plan: DraftPlan | None = None,
        num_draft_tokens: int | None = None,
        dtype: str | torch.dtype | None = None,
        device: str = "auto",
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | None = None,
        local_files_only: bool = False,
    ) -> tuple[PreTrainedModel, Any, DraftPlan | None, int]:
        """What ``from_pretrained`` wraps: model, tokenizer, plan, number of draft tokens."""
        if exit_layer is not None and plan is not None:
            raise ValueError("give exit_layer or plan, not both")
        folder = builtin_folder() if str(model) == BUILTIN else model
        loaded, tokenizer = load_checkpoint(
            folder,
            dtype=dtype,
            device=device,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            local_files_only=local_files_only,
            check=lambda config: _check_plan_depth(config, exit_layer, plan),
        )
        if exit_layer is not None:
            depth = loaded.config.num_hidden_layers
            plan = DraftPlan.exiting(num_layers=depth, exit_layer=exit_layer)
        elif plan is None:
            plan, known = known_plan(folder)
            num_draft_tokens = known if num_draft_tokens is None else num_draft_tokens
            if plan is None:
                logger.warning("no draft plan is known for %s: decoding is plain", model)
        wanted = DEFAULT_NUM_DRAFT_TOKENS if num_draft_tokens is None else num_draft_tokens
        return loaded, tokenizer, plan, wanted

    @property
    def exactness(self) -> str:
        """One sentence: how rows keep their bits on this machine, or that they do not."""
        return self.stack.exactness.reason

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        sampling: SamplingParams | None = None,
        num_draft_tokens: int | None = None,
        num_return_sequences: int = 1,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> GenerationOutput | list[GenerationOutput]:
        """Decode one prompt, or several of any lengths together.

        Args:
            prompts: text or token ids; a list of either gives a list of outputs.
            messages: a chat instead, put through the tokenizer's chat template.
            max_new_tokens: most tokens to emit; less if the model's positions end first.
            sampling: greedy if None. Every prompt uses the same seed; of several sequences of
                one prompt, the i-th uses ``seed + i``.
            num_draft_tokens: tokens drafted per round; 0 is plain decoding; None is the default.
            num_return_sequences: outputs per prompt, one after another; above 1 gives a list.
            stop: text that ends a sequence and is cut from it.
            ignore_eos: go on after an end of sequence, for measuring.

        Returns:
            One output for one prompt, a list for a list.
        """
        check_integer("num_return_sequences", num_return_sequences, 1)
        single = messages is not None or _is_single(prompts)
        batch = self._open(sampling, num_draft_tokens, stop, ignore_eos, max_new_tokens)
        encoded = self._encode_all(prompts, messages)
        requests = []
        for ids in encoded:
            for i in range(num_return_sequences):
                requests.append(batch.check(ids, seed_offset=i))
        outputs = batch.run(requests)
        return outputs[0] if single and num_return_sequences == 1 else outputs

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        sampling: SamplingParams | None = None,
        num_draft_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> Iterator[StreamStep]:
        """Decode one prompt, yielding a ``StreamStep`` per round; arguments as in ``generate``.

        Arguments are checked at the call, not at the first step. The consumer may stop any time.
        """
        if messages is None and not _is_single(prompt):
            raise TypeError("stream takes one prompt; use generate or open_batch for several")
        batch = self._open(sampling, num_draft_tokens, stop, ignore_eos, max_new_tokens)
        request = batch.check(self._encode_all(prompt, messages)[0])
        return _stream(batch, request)

    def open_batch(
        self,
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        sampling: SamplingParams | None = None,
        num_draft_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> "Batch":
        """An empty batch that rows join and leave between rounds.

        The arguments are defaults for its rows, as in ``generate``.
        """
        return self._open(sampling, num_draft_tokens, stop, ignore_eos, max_new_tokens)

    def _open(
        self,
        sampling: SamplingParams | None,
        num_draft_tokens: int | None,
        stop: str | Sequence[str],
        ignore_eos: bool,
        max_new_tokens: int,
    ) -> "Batch":
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise TypeError(f"sampling must be SamplingParams, got {type(sampling).__name__}")
        if num_draft_tokens is None:
            num_draft_tokens = self.num_draft_tokens
        _check_num_draft_tokens(num_draft_tokens)
        check_integer("max_new_tokens", max_new_tokens, 1)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if any(not isinstance(s, str) or not s for s in stops):
            raise ValueError(f"stop must be one or more non-empty strings, got {stop!r}")
        if stops and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model has none")
        sampling = sampling or SamplingParams()
        if not sampling.greedy and sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbelow(2**32))
        eos = frozenset() if ignore_eos else self._eos_ids
        settings = RowSettings(max_new_tokens, sampling, num_draft_tokens, stops, eos)
        return Batch(self, settings)

    def _encode_all(
        self,
        prompts: Prompt | Sequence[Prompt] | None,
        messages: Sequence[Message] | None,
    ) -> list[list[int]]:
        if (prompts is None) == (messages is None):
            raise ValueError("give either prompts or messages")
        if messages is not None:
            return [self._encode_chat(messages)]
        if _is_single(prompts):
            return [self.encode(prompts)]  # type: ignore[arg-type]
        if not isinstance(prompts, Sequence) or not prompts:
            raise ValueError(f"prompts must be text, token ids or a list of them, got {prompts!r}")
        return [self.encode(p) for p in prompts]  # type: ignore[arg-type]

    def _encode_chat(self, messages: Sequence[Message]) -> list[int]:
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("messages need a tokenizer with a chat template; give prompts instead")
        text = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        return self.encode(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, checked against the vocabulary and the context."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise TypeError("this model has no tokenizer: give token ids instead of text")
            ids = list(self.tokenizer(prompt)["input_ids"])
        else:
            ids = prompt.tolist() if isinstance(prompt, torch.Tensor) else list(prompt)
            for token in ids:
                check_integer("a token id", token, 0, self.stack.vocab_size - 1)
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        if len(ids) >= self.stack.max_positions:
            raise ValueError(
                f"the prompt has {len(ids)} tokens; the model has {self.stack.max_positions} "
                "positions, and at least one must be left to decode"
            )
        return ids


@dataclass(frozen=True)
class RowSettings:
    """How a row of a ``Batch`` decodes; the arguments of ``generate``."""

    max_new_tokens: int
    sampling: SamplingParams
    num_draft_tokens: int
    stop: tuple[str, ...]
    eos_ids: frozenset[int]


@dataclass(frozen=True)
class RowRequest:
    """A checked prompt, ready to join."""

    prompt: tuple[int, ...]
    seed: int | None
    settings: RowSettings


class Batch:
    """Rows decoding together: ``add``, ``step``, ``remove``; made by ``open_batch``."""

    def __init__(self, lm: SelfSpeculativeLM, settings: RowSettings) -> None:
        self._lm, self._settings = lm, settings
        self._rows: RowBatch | None = None
        self._seeds: dict[int, int | None] = {}

    def add(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        max_new_tokens: int | None = None,
        num_draft_tokens: int | None = None,
        sampling: SamplingParams | None = None,
    ) -> int:
        """Add a row; its prefill runs in the next ``step``. Returns its id.

        Args:
            prompt: text or token ids.
            messages: a chat instead.
            max_new_tokens, num_draft_tokens, sampling: of this row; None is the batch's own.
        """
        settings = self._settings
        if max_new_tokens is not None:
            check_integer("max_new_tokens", max_new_tokens, 1)
            settings = replace(settings, max_new_tokens=max_new_tokens)
        if num_draft_tokens is not None:
            _check_num_draft_tokens(num_draft_tokens)
            settings = replace(settings, num_draft_tokens=num_draft_tokens)
        if sampling is not None:
            seed = secrets.randbelow(2**32) if sampling.seed is None else sampling.seed
            settings = replace(settings, sampling=replace(sampling, seed=seed))
        if messages is None and not _is_single(prompt):
            raise TypeError(f"a row takes one prompt, text or token ids, got {prompt!r}")
        ids = self._lm._encode_all(prompt, messages)[0]
        return self._join(self.check(ids, settings=settings)).id

    def step(self) -> list[Round]:
        """One round of every unfinished row; for a new row that is its prefill."""
        return self._rows.step() if self._rows is not None else []

    def remove(self, row: int) -> GenerationOutput:
        """Take a row out, finished or not; its output so far."""
        if self._rows is None:
            raise ValueError(f"the batch has no row {row}; its rows are []")
        return self._output(self._rows.leave(row))

    @property
    def unfinished(self) -> list[int]:
        """Ids of rows that go on."""
        rows = self._rows.rows.values() if self._rows is not None else ()
        return [row.id for row in rows if row.finish_reason is None]

    def check(
        self, prompt: Sequence[int], *, seed_offset: int = 0, settings: RowSettings | None = None
    ) -> RowRequest:
        """A request for encoded ids; decoding stops where the model's positions end."""
        settings = settings or self._settings
        seed = settings.sampling.seed
        if seed is not None and not settings.sampling.greedy:
            seed = (seed + seed_offset) % (MAX_SEED + 1)
        else:
            seed = None
        room = self._lm.stack.max_positions - len(prompt)
        settings = replace(settings, max_new_tokens=min(settings.max_new_tokens, room))
        return RowRequest(tuple(prompt), seed, settings)

    def run(self, requests: Sequence[RowRequest]) -> list[GenerationOutput]:
        """Decode all requests, at most ``MAX_ROWS`` at a time; outputs in their order."""
        self._reserve(requests[:MAX_ROWS])
        waiting = list(enumerate(requests))[::-1]
        places: dict[int, int] = {}
        outputs: dict[int, GenerationOutput] = {}
        while len(outputs) < len(requests):
            while waiting and len(places) < MAX_ROWS:
                place, request = waiting.pop()
                places[self._join(request).id] = place
            for record in self.step():
                if record.finish_reason is not None:
                    outputs[places.pop(record.row)] = self.remove(record.row)
        return [outputs[i] for i in range(len(requests))]

    def _reserve(self, requests: Sequence[RowRequest]) -> None:
        slots = max(
            len(r.prompt) + r.settings.max_new_tokens + r.settings.num_draft_tokens
            for r in requests
        )
        lm = self._lm
        self._rows = RowBatch(
            lm.stack, lm._drafter, lm.plan, num_rows=len(requests), num_slots=slots
        )

    def _join(self, request: RowRequest) -> Row:
        if self._rows is None:
            self._reserve([request])
        assert self._rows is not None
        settings, lm = request.settings, self._lm
        stream = TextStream(lm.tokenizer, settings.stop) if lm.tokenizer is not None else None
        row = self._rows.join(
            request.prompt,
            sampler=Sampler(settings.sampling, request.seed or 0, lm.stack.vocab_size),
            limit=settings.max_new_tokens,
            num_draft_tokens=settings.num_draft_tokens,
            eos_ids=settings.eos_ids,
            stream=stream,
        )
        self._seeds[row.id] = request.seed
        return row

    def _output(self, row: Row) -> GenerationOutput:
        assert self._rows is not None
        stats = DecodeStats.from_rounds(
            row.rounds,
            prompt_tokens=len(row.prompt),
            kv_cache_bytes=self._rows.cache.nbytes,
        )
        return GenerationOutput(
            text="".join(r.text for r in row.rounds),
            token_ids=tuple(row.token_ids),
            finish_reason=row.finish_reason or "cancelled",
            seed=self._seeds.pop(row.id),
            stats=stats,
            rounds=tuple(row.rounds),
        )


def _stream(batch: Batch, request: RowRequest) -> Iterator[StreamStep]:
    batch._join(request)
    while batch.unfinished:
        for record in batch.step():
            yield StreamStep(record.text, record.token_ids, record)


def _is_single(prompt: object) -> bool:
    """Whether this is one prompt: text, a tensor of ids, or a sequence of ints."""
    if isinstance(prompt, str):
        return True
    if isinstance(prompt, torch.Tensor):
        return prompt.ndim == 1
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], int)


def _check_num_draft_tokens(value: object) -> None:
    check_integer("num_draft_tokens", value, 0, MAX_NUM_DRAFT_TOKENS)


def _check_plan_depth(config: Any, exit_layer: int | None, plan: DraftPlan | None) -> None:
    depth = config.num_hidden_layers
    if exit_layer is not None:
        DraftPlan.exiting(num_layers=depth, exit_layer=exit_layer)
    if plan is not None and plan.num_layers != depth:
        raise ValueError(
            f"the plan is for a model of {plan.num_layers} layers; this one has {depth}"
        )


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """What ends a sequence; the generation config rules, as in transformers."""
    config = getattr(model, "generation_config", None) or model.config
    eos = getattr(config, "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)
