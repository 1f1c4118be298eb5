"""``SelfSpeculativeLM``: the Python API."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from layerskip import hf
from layerskip.batch import Batch
from layerskip.cache import CachedText
from layerskip.checkpoint import BUILTIN, trained_exits
from layerskip.controller import Controller
from layerskip.decode import Decoder
from layerskip.draft_head import DraftHead
from layerskip.drafting import EarlyExitDrafter
from layerskip.encoding import Message, Prompt, PromptEncoder, is_single
from layerskip.exit_adapter import ExitAdapter
from layerskip.grammar_xgrammar import XGrammarBackend
from layerskip.loading import check_plan_depth, eos_ids_of, load_parts, with_exit_of
from layerskip.lookup import LookupStore
from layerskip.outputs import GenerationOutput, Round
from layerskip.packed import open_stack
from layerskip.params import (
    AUTO,
    DEFAULT_MAX_NEW_TOKENS,
    NumDraftTokens,
    SamplingParams,
    Verification,
    check_integer,
    check_num_draft_tokens,
    check_sampling,
    most_draft_tokens,
)
from layerskip.plan import DraftPlan, PlanFile
from layerskip.policy import Policy
from layerskip.profiling import fitting_cost, measure_cost, warn_of_another_checkpoint
from layerskip.request import GenerateArguments, RowSettings, Several, as_grammar, seeded, stops_of
from layerskip.sampling import Processor
from layerskip.text import stop_ids
from layerskip.vocabulary import CoverageMeter
from layerskip.workbench import open_bench

logger = logging.getLogger(__name__)

WARM_DRAFTS = 7  # longer ones seldom pay
WARM_SLOTS = 512
PROOF_SECONDS = 0.5  # of a load; those of a small model take less
RECORDING_SECONDS = 0.5  # the same
RECORDED_SLOTS = 1024  # of a sequence whose rounds are recorded then
LEAST_COVERAGE = 0.9  # of a draft vocabulary of which nothing was measured


class SelfSpeculativeLM:
    """A causal language model that drafts with some of its own layers.

    The model is not changed in any way: decoding runs on a twin that shares its tensors. Output
    is what plain decoding gives, bit for bit, whatever the plan and the number of draft tokens
    (``exactness`` says whether that holds for this model on this machine).

    The twin is made now. Of what is done to the model later it sees new values of its weights: an
    optimiser's steps, a loaded state dict, adapters trained on or merged. It does not see new
    modules or settings: adapters added, switched, scaled or disabled, hooks, ``train()``, the
    config. A model that was moved, cast or resized has to be wrapped again, and so has one with
    other tensors where its weights were (``load_state_dict`` with ``assign=True``,
    ``set_input_embeddings``, pruning); decoding says so.

    Passes run in the model's own dtype: while one decodes, ``torch.autocast`` is off, for logits
    processors, too.

    Args:
        model: a loaded transformers causal LM of a supported family, on one device. Of a PEFT model
            whose adapters are layers (LoRA and its like) the active adapters count; of one from
            ``torch.compile`` the model inside is run, not what was compiled. On a CPU its weights
            are read where they lie; of those that ``from_pretrained`` loads dense layers may have
            copies in the order that products read, which is faster (bench/LOG.md, 2026-11-23;
            ``bench/wrapped.py``).
        tokenizer: its tokenizer; None takes and gives token ids. It may know fewer ids than the
            model (vocabularies are padded), but not more.
        plan: which layers draft, or a plan file with what is known of them; None drafts by
            look-ups alone.
        num_draft_tokens: default for requests that do not say. "auto": from round to round what
            pays, by the acceptance seen so far and the time of passes, which are measured for less
            than a second at the first use unless the plan file brings them, after up to half a
            second of proving their sizes; at most 16. 0: plain decoding. A number, up to 32: so
            many tokens a round.
        lookup: whether tokens are looked up in a row's prompt and output, to draft them or to save
            draft passes. A ``LookupStore`` gets every finished text, and is searched, too, except
            with token-level and block verification. The host does that between a round's passes.
            None: unless the device runs rounds by itself (``rounds_choice``), as on a GPU, where
            rounds that the host starts may take longer than look-ups gain; there, too, for requests
            and batches whose ``num_draft_tokens`` is a number above 0, if there is no plan.
        exact: True keeps every row's bits whatever it is decoded with, so that drafts and batches
            never change a token. False is faster where that costs (on a CPU, batches and float32:
            bench/LOG.md), and lets last bits, and now and then a token, depend on both.
        policy: what was decided for kinds of requests (``layerskip report`` writes one); by their
            ``labels`` and length of prompt. A request that names a number has that.
        packed: whether our kernels decode, over packed weights. None: on a GPU, if they can
            (``stack_choice`` says why not). False: never. True: or an error with the reason; on a
            CPU the kernels' definitions run, for tests.
        exit_adapter: what was trained for one exit of this model; drafts that leave there run it,
            and nothing else does. ``plan`` is that exit, or None, which then means it.

    Attributes:
        stack: runs the layers; ``stack_choice`` says in one sentence which of the two it is, packed
            or general, and why.
        rounds_choice: one sentence: who runs the rounds, the device by itself or the host, and why.
        plan_file: ``plan``, and what is known of it.
        draft_head: over the plan file's draft vocabulary; None where drafts use the whole head.
        coverage_meter: watches how much of texts that vocabulary covers; None without one.
        eos_ids: token ids that end a sequence.

    Raises:
        UnsupportedModelError: the model does not fit, with the reason; it is left as it was.
        ValueError: the plan is for another depth, a weight is not finite, the tokenizer has ids
            that the model lacks, ``packed`` is True and cannot be, or the adapter is of another
            model, exit, dtype or device.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        plan: DraftPlan | PlanFile | None = None,
        *,
        num_draft_tokens: NumDraftTokens = AUTO,
        exact: bool = True,
        lookup: bool | LookupStore | None = None,
        policy: Policy | None = None,
        packed: bool | None = None,
        exit_adapter: ExitAdapter | None = None,
    ) -> None:
        _check_arguments(plan, num_draft_tokens, lookup, policy, exit_adapter)
        known = plan if isinstance(plan, PlanFile) else PlanFile(plan)
        check_plan_depth(getattr(model, "config", None), None, known.plan)
        if exit_adapter is not None:
            known = with_exit_of(known, exit_adapter.shape)
        self.stack, self.stack_choice = open_stack(
            model, exact=exact, packed=packed, adapter=exit_adapter
        )
        self.tokenizer, self.plan = tokenizer, known.plan
        self.plan_file, self.policy = known, policy
        warn_of_another_checkpoint(known, self.stack)
        self.num_draft_tokens = num_draft_tokens
        self._store = lookup if isinstance(lookup, LookupStore) else None
        self._encoder = PromptEncoder(
            tokenizer, vocab_size=self.stack.vocab_size, max_positions=self.stack.max_positions
        )
        self._grammars = (
            XGrammarBackend(tokenizer, self.stack.vocab_size) if tokenizer is not None else None
        )
        self.eos_ids = eos_ids_of(getattr(model, "generation_config", None) or model.config)
        self._drafter = EarlyExitDrafter(self.stack, self.plan) if self.plan is not None else None
        self.draft_head, self.coverage_meter = self._trimmed(known)
        self._bench, self.rounds_choice = open_bench(self.stack, self.plan, self.draft_head)
        # What is looked up needs rounds that the host starts, which take a small model on a GPU
        # three times as long (bench/LOG.md, 2026-11-27).
        self._looks_up = lookup is not False and (lookup is not None or self._bench is None)
        self._looks_up_for_numbers = lookup is None and self.plan is None  # else nothing drafts
        self._controller: Controller | None = None
        self._lock, self._process = threading.Lock(), os.getpid()

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = BUILTIN,
        *,
        exit_layer: int | None = None,
        plan: DraftPlan | PlanFile | None = None,
        num_draft_tokens: NumDraftTokens | None = None,
        dtype: str | torch.dtype | None = None,
        device: str = "auto",
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | None = None,
        local_files_only: bool = False,
        exact: bool = True,
        lookup: bool | LookupStore | None = None,
        policy: Policy | None = None,
        packed: bool | None = None,
        exit_adapter: str | Path | None = None,
    ) -> "SelfSpeculativeLM":
        """Load a checkpoint; code from a hub is never run.

        Args:
            model: a folder, a hub id, or "builtin" for the checkpoint inside the package.
            exit_layer: draft with this many leading layers.
            plan: or with this plan, or plan file (``layerskip search`` writes one). With neither,
                the one in the folder's ``layerskip.json``; if there is none, the first of the exits
                that its config says were trained (``early_exit_layers``); else only look-ups draft,
                if there are any (``lookup``).
            num_draft_tokens: as for the class; None takes the plan file's, "auto" as a rule.
            dtype: "bfloat16", "float16", "float32" or None for the checkpoint's own.
            device: "cpu", "cuda" or "auto" (CUDA where there is one).
            revision, cache_dir, token, local_files_only: as in transformers.
            exact, lookup, policy, packed: as for the class.
            exit_adapter: a folder that ``ExitAdapter.save`` wrote, for this checkpoint. Drafts
                leave at its exit: a plan that says another one is refused. With no plan given, the
                ``layerskip.json`` beside the adapter counts; if there is none, of the checkpoint's
                only the draft vocabulary.
        """
        _check_arguments(
            plan, AUTO if num_draft_tokens is None else num_draft_tokens, lookup, policy, None
        )
        loaded, tokenizer, known, wanted = cls.load_parts(
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
            exit_adapter=exit_adapter,
        )
        lm = cls(
            loaded,
            tokenizer,
            known,
            num_draft_tokens=wanted,
            exact=exact,
            lookup=lookup,
            policy=policy,
            packed=packed,
            exit_adapter=None if exit_adapter is None else ExitAdapter.load(exit_adapter, loaded),
        )
        if wanted != 0:
            lm.warn_without_plan(model)
        if wanted == AUTO:
            _ = lm.controller  # measured now, not in the first request
        return lm

    load_parts = staticmethod(load_parts)

    def warn_without_plan(self, name: object) -> None:
        """Log it if no plan is known for the checkpoint of this name, and what drafts then."""
        if self.plan is None:
            drafting = "only look-ups draft" if self.looks_up else "nothing drafts"
            verdict = self.plan_file.measurements.get("verdict")
            if verdict:
                logger.warning("the plan file says of %s: %s; %s", name, verdict, drafting)
            else:
                logger.warning("no draft plan is known for %s: %s", name, drafting)

    @property
    def exactness(self) -> str:
        """One sentence: how rows keep their bits on this machine, or that they do not."""
        return self.stack.exactness.reason

    @property
    def trained_exits(self) -> tuple[int, ...]:
        """Exit layers that the checkpoint says it was trained for; often none."""
        return trained_exits(self.stack.twin.config, self.plan_file)

    def _trimmed(self, known: PlanFile) -> tuple[DraftHead | None, CoverageMeter | None]:
        """The draft's head over the plan file's vocabulary, and what watches its coverage."""
        ids = known.draft_vocabulary
        if ids is None or known.plan is None:
            return None, None
        if ids[-1] >= self.stack.vocab_size:
            raise ValueError(
                f"draft_vocabulary names token id {ids[-1]}; the model's vocabulary ends at "
                f"{self.stack.vocab_size - 1}"
            )
        if self.stack.why_whole_head is not None:
            logger.warning("drafts use the whole head: %s", self.stack.why_whole_head)
            return None, None
        promised = known.measurements.get("coverage", LEAST_COVERAGE)
        return self.stack.head_over(ids), CoverageMeter(ids, least_coverage=promised)

    @property
    def controller(self) -> Controller:
        """What decides for ``num_draft_tokens="auto"``; made, and passes proven and measured, when
        first asked for. On a GPU passes are measured as the host starts them, too, for requests
        that need it, and rounds of one sequence are recorded, half a second each at most: a first
        text would wait longer for them than it takes."""
        self._warn_of_fork()
        with self._lock:
            if self._controller is None:
                self.stack.pass_sizes.prove_ahead(PROOF_SECONDS)
                cost = fitting_cost(
                    self.stack,
                    self.plan,
                    self.plan_file.cost,
                    draft_vocabulary=self.plan_file.draft_vocabulary,
                    head=self.draft_head,
                )
                controller = Controller(cost, self.plan_file.acceptance, self.plan_file.calibration)
                if cost.recorded:  # some rounds need the host all the same
                    by_host = measure_cost(
                        self.stack,
                        self.plan,
                        draft_vocabulary=self.plan_file.draft_vocabulary,
                        head=self.draft_head,
                        quick=True,
                        by_host=True,
                    )
                    controller.by_host = controller.beside(by_host)
                self._controller = controller
                self._record_ahead()
            return self._controller

    def _record_ahead(self) -> None:
        if self._bench is None:
            return
        slots = min(RECORDED_SLOTS, self.stack.max_positions)
        try:
            self._bench.record_ahead(
                self._recorded_counts(AUTO),
                num_rows=1,
                num_slots=slots + most_draft_tokens(AUTO),
                seconds=RECORDING_SECONDS,
                only_if_dear=True,
            )
        except torch.OutOfMemoryError as error:  # requests of fewer slots may find room
            logger.warning("no round is recorded ahead: %s", str(error).partition("\n")[0])

    @property
    def looks_up(self) -> bool:
        """Whether tokens are looked up for requests that do not say how many to draft."""
        return self._looks_up_for(self.num_draft_tokens)

    def _looks_up_for(self, num_draft_tokens: NumDraftTokens) -> bool:
        """Whether tokens are looked up for requests of so many."""
        return self._looks_up or (self._looks_up_for_numbers and num_draft_tokens not in (AUTO, 0))

    def _recorded_counts(self, wanted: NumDraftTokens) -> list[int]:
        """Numbers of drafted tokens whose rounds requests may need, on the device."""
        if self.plan is None or self._looks_up:  # what is looked up needs the host
            return [0]
        if wanted != AUTO:
            return sorted({0, int(wanted)})
        # Powers of two first, if time or memory runs out: each serves up to twice as many.
        return sorted(range(WARM_DRAFTS + 1), key=lambda count: (count.bit_count() > 1, count))

    def warm_up(
        self,
        *,
        num_rows: int = 1,
        num_slots: int | None = None,
        num_draft_tokens: NumDraftTokens | None = None,
    ) -> int:
        """Do before the first request what it would wait for: with "auto" the cost table, and on a
        device that runs rounds by itself their recordings, which on a GPU take far longer than the
        rounds. Without it ``controller`` makes some, and the others are made as texts need them.

        Args:
            num_rows: most sequences at a time.
            num_slots: most tokens of a sequence, prompt and output together; None: 512, or as many
                as the model has positions.
            num_draft_tokens: as of the requests; None is the default. With "auto" rounds of up to
                ``WARM_DRAFTS`` drafted tokens are recorded; longer ones are when they come up.

        Returns:
            Rounds that are recorded; 0 where the host runs them (``rounds_choice``).

        Raises:
            TypeError, ValueError: a number is not one that a request may have.
        """
        self._warn_of_fork()
        check_integer("num_rows", num_rows, 1)
        most = self.stack.max_positions
        num_slots = min(WARM_SLOTS, most) if num_slots is None else num_slots
        check_integer("num_slots", num_slots, 1, most)
        wanted = self.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        check_num_draft_tokens(wanted)
        if wanted == AUTO:
            _ = self.controller
        if self._bench is None:
            return 0
        return self._bench.record_ahead(
            self._recorded_counts(wanted),
            num_rows=num_rows,
            num_slots=num_slots + most_draft_tokens(wanted),
        )

    @overload
    def generate(
        self,
        prompts: Prompt | None = None,
        *,
        num_return_sequences: Literal[1] = 1,
        **arguments: Unpack[GenerateArguments],
    ) -> GenerationOutput: ...

    @overload
    def generate(
        self,
        prompts: Prompt | None = None,
        *,
        num_return_sequences: int,
        **arguments: Unpack[GenerateArguments],
    ) -> GenerationOutput | list[GenerationOutput]: ...

    @overload
    def generate(
        self,
        prompts: Several[Prompt],
        *,
        num_return_sequences: int = 1,
        **arguments: Unpack[GenerateArguments],
    ) -> list[GenerationOutput]: ...

    def generate(  # type: ignore[misc]  # Several is Sequence, but for text
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        sampling: SamplingParams | None = None,
        num_draft_tokens: NumDraftTokens | None = None,
        verification: Verification = "coupled",
        num_return_sequences: int = 1,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        logits_processor: Sequence[Processor] = (),
        logprobs: int | None = None,
        cache: CachedText | None = None,
        return_cache: bool = False,
        grammar: Any = None,
        labels: Mapping[str, str] | None = None,
        on_round: Callable[[Round], None] | None = None,
    ) -> GenerationOutput | list[GenerationOutput]:
        """Decode one prompt, or several of any lengths together.

        Args:
            prompts: text or token ids; a list of either gives a list of outputs, decoded 32 at a
                time.
            messages: a chat instead, put through the tokenizer's chat template.
            max_new_tokens: most tokens to emit; less if the model's positions end first.
            sampling: greedy if None. Every prompt uses the same seed; of several sequences of
                one prompt, the i-th uses ``seed + i``.
            num_draft_tokens: "auto": what pays, from round to round; 0: plain decoding; or so many
                tokens a round. None is the default. With "auto", which text token-level and block
                verification draw depends on the clock, and each request draws by a seed of its own.
            verification: how sampled drafts are judged. "coupled": the text is what plain
                sampling with the same seed gives, whatever is drafted. "token" (Leviathan et al.
                2023) and "block" (Sun et al. 2025): the same distribution and more accepted
                tokens, but which text of it depends on the drafts.
            num_return_sequences: outputs per prompt, one after another; above 1 gives a list.
            stop: text that ends a sequence and is cut from it, or a special token's name.
            ignore_eos: go on after an end of sequence, for measuring.
            logits_processor: called after the rules of ``sampling`` and before its temperature,
                as transformers calls its own: ``(1, tokens)`` ids, ``(1, vocab)`` float32 scores.
                Each must be a function of these two: it is asked about drafted tokens, too.
            logprobs: report each emitted token's log-probability, and of this many likeliest.
            cache: ``cache`` of an earlier output of this object. What a prompt shares with it, from
                the first token on, is not prefilled again. Rounding may then differ from that
                of a whole prefill, and is the same with drafts and without. One from before the
                weights changed is refused, as far as torch counts their changes: not those made
                through ``.data`` or in inference mode.
            return_cache: keep prompt and output as ``cache`` of the output.
            grammar: a ``Grammar`` that the text has to follow, or a pydantic model class, whose
                JSON it is then. The row ends ("stop") where nothing more may follow; "length"
                tells of a text that is not whole.
            labels: of the requests, such as ``{"task": "code"}``: for the policy, and in records.
            on_round: called with each ``Round`` when it is done. An exception that it raises goes
                through; the rows are as after the round.

        Returns:
            One output for one prompt, a list for a list.
        """
        check_integer("num_return_sequences", num_return_sequences, 1)
        single = messages is not None or is_single(prompts)
        batch = self.open_batch(
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            num_draft_tokens=num_draft_tokens,
            verification=verification,
            stop=stop,
            ignore_eos=ignore_eos,
            logits_processor=logits_processor,
            logprobs=logprobs,
            cache=cache,
            return_cache=return_cache,
            grammar=grammar,
            labels=labels,
            on_round=on_round,
        )
        encoded = self._encoder.encode_all(prompts, messages)
        requests = [
            batch.check(ids, seed_offset=i) for ids in encoded for i in range(num_return_sequences)
        ]
        outputs = batch.run(requests)
        return outputs[0] if single and num_return_sequences == 1 else outputs

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        sampling: SamplingParams | None = None,
        num_draft_tokens: NumDraftTokens | None = None,
        verification: Verification = "coupled",
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        logits_processor: Sequence[Processor] = (),
        logprobs: int | None = None,
        cache: CachedText | None = None,
        grammar: Any = None,
        labels: Mapping[str, str] | None = None,
        on_round: Callable[[Round], None] | None = None,
    ) -> Iterator[Round]:
        """Decode one prompt, yielding each ``Round``; arguments as in ``generate``.

        Arguments are checked at the call, not at the first step. The consumer may stop any time.
        """
        ids = self._encoder.encode_all(prompt, messages)[0]
        if prompt is not None and not is_single(prompt):
            raise TypeError("stream takes one prompt; use generate or open_batch for several")
        batch = self.open_batch(
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            num_draft_tokens=num_draft_tokens,
            verification=verification,
            stop=stop,
            ignore_eos=ignore_eos,
            logits_processor=logits_processor,
            logprobs=logprobs,
            cache=cache,
            grammar=grammar,
            labels=labels,
            on_round=on_round,
        )
        return batch.stream(batch.check(ids))

    def open_batch(
        self,
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        sampling: SamplingParams | None = None,
        num_draft_tokens: NumDraftTokens | None = None,
        verification: Verification = "coupled",
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        logits_processor: Sequence[Processor] = (),
        logprobs: int | None = None,
        cache: CachedText | None = None,
        return_cache: bool = False,
        grammar: Any = None,
        labels: Mapping[str, str] | None = None,
        on_round: Callable[[Round], None] | None = None,
    ) -> Batch:
        """An empty batch that rows join and leave between rounds.

        The arguments are defaults for its rows, as in ``generate``. A seed that ``sampling`` leaves
        open is drawn once, now: rows that bring no ``sampling`` of their own share it, and those
        with the same prompt have the same text, but for "auto" drafts under token and block
        verification.
        """
        check_sampling(sampling)
        if not isinstance(logits_processor, Sequence):
            raise TypeError(f"logits_processor must be a list, got {logits_processor!r}")
        stops, eos_ids = stops_of(stop), frozenset() if ignore_eos else self.eos_ids
        settings = RowSettings(
            max_new_tokens=max_new_tokens,
            sampling=seeded(sampling or SamplingParams()),
            num_draft_tokens=self.num_draft_tokens
            if num_draft_tokens is None
            else num_draft_tokens,
            follows_policy=num_draft_tokens in (None, AUTO),
            stop=stops,
            eos_ids=eos_ids | stop_ids(self.tokenizer, stops),
            verification=verification,
            logits_processor=tuple(logits_processor),
            logprobs=logprobs,
            cache=cache,
            return_cache=return_cache,
            grammar=as_grammar(grammar),
            labels={} if labels is None else labels,
        )
        self._warn_of_fork()
        if on_round is not None and not callable(on_round):
            raise TypeError(f"on_round must be callable with a Round, got {on_round!r}")
        new_decoder = partial(
            Decoder,
            self.stack,
            self._drafter,
            self.plan,
            looks_up=self._looks_up_for(settings.num_draft_tokens),
            store=self._store,
            head=self.draft_head,
            bench=self._bench,
        )
        return Batch(
            self.stack,
            self._encoder,
            settings,
            new_decoder=new_decoder,
            controller=lambda: self.controller,
            meter=self.coverage_meter,
            grammars=self._grammars,
            policy=self.policy,
            on_round=on_round,
        )

    def _warn_of_fork(self) -> None:
        """Log it, before the first pass, where that may hang: OpenMP's threads do not survive."""
        if os.getpid() == self._process:
            return
        self._process = os.getpid()
        if self.stack.device.type == "cpu" and torch.get_num_threads() > 1:
            logger.warning(
                "the model was wrapped before this process was forked: if decoding hangs, call "
                "torch.set_num_threads(1) first, or wrap it in the child"
            )

    def custom_generate(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: Any = None,
        num_draft_tokens: NumDraftTokens | None = None,
        verification: Verification = "coupled",
        seed: int | None = None,
        grammar: Any = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """For ``model.generate(**inputs, custom_generate=lm.custom_generate)``.

        Greedy search and sampling as ``generation_config`` says, with transformers' own logits
        processors, stopping criteria and streamer, and its own outputs. A ``DynamicCache`` that was
        given is filled, and has to be empty. Rows may be padded at either end. A processor must be
        a function of its two arguments. Processors and criteria are asked about one row at a time,
        shown as a batch of that row alone, and criteria without scores. Where a row has ended
        before others, scores are 0, and where a criterion ended it, padding follows. Of what
        ``grammar`` allows, temperature, top-k and the like choose, as in ``generate``. A row ends
        where the model's positions do; transformers goes on. Hooks that the model had not when it
        was wrapped, as PEFT's ``adapter_names`` gives it, are refused, and so are other adapters.

        Args:
            model: the model that this object wraps.
            input_ids, logits_processor, stopping_criteria, generation_config: from transformers.
            streamer: of a batch of one.
            num_draft_tokens, verification, grammar: as in ``generate``; give them to
                ``model.generate``.
            seed: of sampling; None draws one from torch's generator.
            model_kwargs: what transformers adds for the model's forward.

        Returns:
            ``(rows, tokens)`` ids, or with ``return_dict_in_generate`` transformers' output object.
        """
        if not self.stack.shared.are_those_of(model):
            raise ValueError("custom_generate belongs to another model; wrap this one")
        if (place := self.stack.shared.unseen_hook(model)) is not None:
            raise ValueError(
                f"{place} has a forward hook that it had not when the model was wrapped (as with "
                "PEFT's adapter_names), and decoding would not run it; leave it out, or wrap again"
            )
        if (place := self.stack.shared.switched_adapter(model)) is not None:
            raise ValueError(
                f"{place} runs other adapters than when the model was wrapped, or scales them "
                "otherwise (PEFT's set_adapter, disable_adapter, set_scale, ...), and decoding "
                "would not; switch back, or wrap again"
            )
        call = hf.Call(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            hf.callers_streamer(model) if streamer is None else streamer,
            model_kwargs,
        )
        batch = self.open_batch(
            num_draft_tokens=num_draft_tokens, verification=verification, grammar=grammar
        )
        prompts = [self.encode(prompt) for prompt in call.prompts()]
        return hf.generate(batch, call, prompts, seed=seed)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, checked against the vocabulary and the context."""
        return self._encoder.encode(prompt)

    def encode_fitting(
        self, prompt: Prompt | None, messages: Sequence[Message] | None, max_new_tokens: int
    ) -> list[int]:
        """Token ids of one prompt, or chat, that leaves room for so many new ones."""
        return self._encoder.encode_fitting(prompt, messages, max_new_tokens)


def _check_arguments(
    plan: object, num_draft_tokens: object, lookup: object, policy: object, exit_adapter: object
) -> None:
    """Raise unless the arguments of ``SelfSpeculativeLM`` are of the right types."""
    if plan is not None and not isinstance(plan, DraftPlan | PlanFile):
        raise TypeError(
            f"plan must be a DraftPlan, a PlanFile or None, got {type(plan).__name__}; "
            "PlanFile.load(path) reads one"
        )
    check_num_draft_tokens(num_draft_tokens)
    if not isinstance(lookup, bool | LookupStore | None):
        raise TypeError(f"lookup must be a bool, a LookupStore or None, got {lookup!r}")
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(
            f"policy must be a Policy or None, got {type(policy).__name__}; Policy.load(path) "
            "reads one"
        )
    if exit_adapter is not None and not isinstance(exit_adapter, ExitAdapter):
        raise TypeError(
            f"exit_adapter must be an ExitAdapter or None, got {type(exit_adapter).__name__}; "
            "ExitAdapter.load(folder, model) reads one"
        )
