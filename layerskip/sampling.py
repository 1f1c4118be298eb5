"""From logits to the next token: greedy, or sampled with noise that depends on nothing but
(seed, absolute position, token id)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from layerskip.constraint import Constraint
from layerskip.ops.reference import DRAFT_STREAM, TARGET_STREAM, Philox
from layerskip.outputs import TokenLogprob
from layerskip.params import SHARPNESS, SamplingParams, Verification

if TYPE_CHECKING:
    from layerskip.ops.kernels import KernelOps

CPU = torch.device("cpu")
# Scores that are chosen from at once, of several rows. What leaves a processor's caches is quicker
# row by row (bench/LOG.md, 2026-11-27); on a GPU it is memory that is spared.
AT_ONCE, AT_ONCE_ON_GPU = 2**17, 2**23
TOP_P_BITS = 40  # of a probability, where integers are summed up: 2**23 of them, at most 1, fit
Processor = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Drawn:
    """A drafted token.

    Attributes:
        token: its id.
        q: the distribution that it was drawn from, ``(vocab,)`` float64, where verification asks.
        confidence: what speaks for the token, 0 to 1: its probability in ``q``, or where the noise
            is the target's as well, by how much it won (``confidences``). 1 if it was not asked
            for, NaN of scores that are no numbers.
    """

    token: int
    q: Tensor | None = None
    confidence: float = 1.0


def greedy_tokens(logits: Tensor) -> list[int]:
    """Most likely token of each row; ties go to the lowest id.

    Args:
        logits: ``(rows, vocab)`` of any dtype. Through float32, which keeps order and ties:
            torch's bfloat16 argmax takes three times as long on a CPU.
    """
    return logits.float().argmax(-1).tolist()


def confidences(scores: Tensor, temperature: float | Sequence[float] = 1.0) -> list[float]:
    """What speaks for the largest score's being the target's, too, 0 to 1: its share of a softmax
    ``SHARPNESS`` times as sharp as that of the logits.

    Args:
        scores: ``(rows, vocab)`` float32: logits, or logits over ``temperature`` and noise.
        temperature: above 0, of all rows or of each.

    Returns:
        Of each row; NaN of scores that are no numbers.
    """
    if isinstance(temperature, Sequence):
        sharper = scores * _column([SHARPNESS * t for t in temperature], scores.device)
    else:
        sharper = scores * (SHARPNESS * temperature)
    return sharper.softmax(-1).amax(-1).tolist()


def keep_mask(scores: Tensor, params: SamplingParams) -> Tensor:
    """Scores of what top-k, top-p and min-p keep, -inf elsewhere.

    Args:
        scores: ``(rows, vocab)`` float32, logits over temperature.

    Returns:
        The same shape. Applied in the order top-k, top-p, min-p, as transformers does; ties at a
        top-k border are all kept.
    """
    vocab = scores.shape[-1]
    if 0 < params.top_k < vocab:
        border = scores.topk(params.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < border, float("-inf"))
    if params.top_p < 1.0:
        ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
        behind = _behind if scores.is_cuda else _behind_in_order
        dropped = behind(ordered.softmax(-1), params.top_p)
        scores = scores.masked_fill(dropped.scatter(-1, ids, dropped), float("-inf"))
    if params.min_p > 0.0:
        probabilities = scores.softmax(-1)
        border = params.min_p * probabilities.amax(-1, keepdim=True)
        scores = scores.masked_fill(probabilities < border, float("-inf"))
    return scores


def _behind_in_order(probabilities: Tensor, top_p: float) -> Tensor:
    """Where those before sum up to ``top_p``, as a CPU sums up: one after another."""
    return probabilities.cumsum(-1) - probabilities >= top_p


def _behind(probabilities: Tensor, top_p: float) -> Tensor:
    """The same by integers, whose sum no order changes: a GPU's depends on the number of rows, and
    for one row on the moment (torch, ``use_deterministic_algorithms``, on ``cumsum``)."""
    parts = (probabilities * 2.0**TOP_P_BITS).long()
    return parts.cumsum(-1) - parts >= int(top_p * 2.0**TOP_P_BITS)


def token_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of emitted tokens, and the ``count`` likeliest, before any processor.

    Args:
        logits: ``(len(tokens), vocab)`` of the full model.
        tokens: emitted at these positions.
        count: of ``top``.
    """
    logits = logits[: len(tokens)].float()
    logprobs = logits.log_softmax(-1)
    entries = []
    for i, token in enumerate(tokens):
        ids = _likeliest(logits[i], min(count, logits.shape[-1]))
        top = tuple(zip(ids.tolist(), logprobs[i, ids].tolist(), strict=True))
        entries.append(TokenLogprob(token, float(logprobs[i, token]), top))
    return tuple(entries)


def _likeliest(scores: Tensor, count: int) -> Tensor:
    """Ids of the ``count`` largest of ``(vocab,)``, largest first; ties go to the lowest id.

    ``topk`` alone keeps no order among ties, which bfloat16 logits are full of.
    """
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=scores.device)
    ids = (scores >= scores.topk(count).values[-1]).nonzero()[:, 0]
    return ids[scores[ids].argsort(descending=True, stable=True)[:count]]


def _noise_kernels(device: torch.device) -> "KernelOps | None":
    """What draws noise on a GPU; None where the host does."""
    if device.type != "cuda":
        return None
    from layerskip.ops.registry import cuda_noise

    return cuda_noise(device)


class Sampler:
    """Turns one row's logits into scores and tokens; draft and verify share it.

    Args:
        params: temperature, top-k, top-p, min-p. Its other rules are among ``processors``.
        seed: of the noise.
        vocab_size: columns of the logits.
        verification: how drafts are judged; greedy decoding has one way only.
        processors: called as transformers' logits processors are, with ``(1, tokens)`` ids of
            prompt, output and drafted prefix, and ``(1, vocab)`` float32 scores. They must be
            functions of these two alone, and may write into the scores only.
        constraint: a grammar's masks, after the processors.
        warpers: processors after the masks, such as cuts: before them, what a cut keeps may be all
            forbidden. What the masks forbid stays so, whatever they give.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        vocab_size: int,
        *,
        verification: Verification = "coupled",
        processors: Sequence[Processor] = (),
        constraint: Constraint | None = None,
        warpers: Sequence[Processor] = (),
    ) -> None:
        self.constraint = constraint
        self.params, self.seed, self.vocab_size = params, seed, vocab_size
        self.processors, self.warpers = tuple(processors), tuple(warpers)
        self.verification: Verification = "coupled" if params.greedy else verification
        self._noise: dict[int, Tensor] = {}
        self._temperature: Tensor | None = None

    def draw_apart(self, number: int) -> None:
        """Draw by a seed that no other request has, as nothing was drawn yet: for token and block
        verification whose drafts' lengths depend on how others of the same seed were judged. By the
        same numbers what is drafted would not be independent of what is to come.

        Args:
            number: of the request, from 1 on.
        """
        self.seed = int(np.random.Philox(counter=0, key=[self.seed, number]).random_raw()) >> 1

    @cached_property
    def _numbers(self) -> Philox:
        """Made when first asked for: greedy rows never do."""
        return Philox(self.seed)

    @cached_property
    def is_argmax(self) -> bool:
        """Whether the next token is the likeliest of the bare logits."""
        return self.params.greedy and not self.reads_context

    @property
    def is_noisy_argmax(self) -> bool:
        """Whether the next token is the likeliest by the logits over temperature and by coupled
        noise, and by nothing else."""
        if self.params.greedy or self.params.cuts:
            return False
        return self.verification == "coupled" and not self.reads_context

    @cached_property
    def reads_context(self) -> bool:
        """Whether scores depend on the tokens before them."""
        return bool(self.processors or self.warpers) or self.constraint is not None

    def closed(self, context: Sequence[int]) -> bool:
        """Whether a grammar lets nothing follow the text."""
        return self.constraint is not None and self.constraint.closed(context)

    def noise(self, position: int, device: torch.device = CPU) -> Tensor:
        """Gumbel noise of ``position``, made once however often it is drafted and verified.

        Args:
            position: absolute.
            device: with an index, as tensors have it. The bits are the same on every one.

        Returns:
            ``(vocab,)`` float32 on the device, and kept there.
        """
        kept = self._noise.get(position)
        if kept is None or kept.device != device:
            kept = self._noise[position] = self._gumbel(position, device)
        return kept

    def _gumbel(
        self, position: int, device: torch.device, *, stream: int = TARGET_STREAM, start: int = 0
    ) -> Tensor:
        """Noise made anew, where it is wanted."""
        kernels = _noise_kernels(device)
        if kernels is None:
            numbers = self._numbers.gumbel(position, self.vocab_size, stream=stream, start=start)
            return numbers.to(device)
        # Filled in by the device: a copy from the host would wait for all that was begun before.
        at = torch.full((1,), position, dtype=torch.int64, device=device)
        return kernels.gumbel_noise(
            at.new_full((1,), self.seed),
            at,
            vocab_size=self.vocab_size,
            stream=stream,
            starts=at.new_full((1,), start) if start else None,
        )[0]

    def forget_before(self, position: int) -> None:
        """Drop noise that can't be asked for again."""
        for old in [p for p in self._noise if p < position]:
            del self._noise[old]
        if self.constraint is not None:
            self.constraint.forget_before(position)

    def scores(self, logits: Tensor, context: Sequence[int] = ()) -> Tensor:
        """What the tokens are chosen by: the softmax is the distribution of the next token.

        Args:
            logits: ``(rows, vocab)`` of consecutive positions.
            context: all tokens before the last row's prediction; read by processors and the
                grammar only.

        Returns:
            ``(rows, vocab)`` float32.
        """
        scores = self._after(self.processors, logits.float(), context)
        if self.constraint is not None:
            scores = self.constraint.masked(scores, context)
        if self.warpers:
            scores = self._after(self.warpers, scores, context)
            if self.constraint is not None:
                scores = self.constraint.masked(scores, context)
        if self.params.greedy:
            return scores
        return keep_mask(scores / self._temperature_for(scores), self.params)

    def _temperature_for(self, scores: Tensor) -> Tensor:
        """``(1,)`` as scores are, float64 where a processor gives that; made once. By a number a
        GPU multiplies its reciprocal, which ``lm_head_argmax`` does not."""
        kept = self._temperature
        if kept is None or kept.device != scores.device or kept.dtype != scores.dtype:
            kept = self._temperature = scores.new_full((1,), self.params.temperature)
        return kept

    def _after(
        self, processors: Sequence[Processor], scores: Tensor, context: Sequence[int]
    ) -> Tensor:
        """What processors make of the scores of consecutive positions."""
        if not processors:
            return scores
        rows, ids = scores.shape[0], ids_of(context, scores.device)
        known = range(len(context) - rows + 1, len(context) + 1)
        asked = (_asked(processors, ids[:, :n], scores[i : i + 1]) for i, n in enumerate(known))
        # Copied where more follow: a processor may give the same tensor each time.
        return torch.cat([row.clone() if rows > 1 else row for row in asked])

    def choose(self, scores: Tensor, position: int) -> list[int]:
        """Tokens of consecutive positions, by ``scores``; ties go to the lowest id."""
        return self._noisy(scores, position).argmax(-1).tolist()

    def _noisy(self, scores: Tensor, position: int) -> Tensor:
        """What the largest of is chosen."""
        if self.params.greedy:
            return scores
        rows, device = range(scores.shape[0]), scores.device
        # As ``lm_head_argmax`` does: to normalise the scores first would round them differently.
        if len(rows) == 1:  # as of each drafted token
            return scores + self.noise(position, device)
        return scores + torch.stack([self.noise(position + i, device) for i in rows])

    def pick(self, logits: Tensor, position: int) -> list[int]:
        """Next tokens of consecutive positions, of a row without processors and grammar; ties go
        to the lowest id.

        Args:
            logits: ``(rows, vocab)``; row i predicts the token at ``position + i``.
            position: absolute position of the first predicted token.
        """
        if self.is_argmax:
            return greedy_tokens(logits)
        return self.choose(self.scores(logits), position)

    def draft(
        self,
        logits: Tensor,
        position: int,
        start: int,
        context: Sequence[int] = (),
        *,
        with_confidence: bool = False,
    ) -> Drawn | None:
        """A drafted token.

        Args:
            logits: ``(1, vocab)`` of a draft pass.
            position: absolute position of the token.
            start: position of the round's first token.
            context: as in ``scores``.
            with_confidence: fill in ``Drawn.confidence``.

        Returns:
            None if a trimmed draft vocabulary has nothing that the grammar and the processors
            allow, or for token and block verification if the distribution is not finite. Nothing
            was drawn then, so ending the draft here leaves both exact.
        """
        if self.verification == "coupled":
            scores = self.scores(logits, context)
            noisy = self._noisy(scores, position)
            token = int(noisy.argmax())
            if self.reads_context and float(noisy[0, token]) == -math.inf:  # nothing is allowed
                return None
            if not with_confidence:
                return Drawn(token)
            temperature = 1.0 if self.params.greedy else self.params.temperature
            return Drawn(token, None, confidences(noisy.float(), temperature)[0])
        q = self.scores(logits, context)[0].double().softmax(-1)
        if not q.isfinite().all():
            return None
        noise = self._gumbel(position, q.device, stream=DRAFT_STREAM, start=start)
        token = int((q.log() + noise).argmax())
        return Drawn(token, q, float(q[token]))

    def draw(self, probabilities: Tensor, position: int) -> int:
        """A token of ``(vocab,)`` probabilities, with the target's noise at ``position``."""
        noise = self.noise(position, probabilities.device)
        return int((probabilities.log() + noise).argmax())

    def uniforms(self, position: int, count: int) -> list[float]:
        """Numbers in (0, 1) that decide over ``count`` tokens drafted from ``position`` on."""
        return self._numbers.uniforms(position, count)


def _column(numbers: Sequence[float], device: torch.device) -> Tensor:
    """``(rows, 1)`` float32."""
    return torch.tensor(numbers, dtype=torch.float32, device=device)[:, None]


def portions(counts: Sequence[int], vocab_size: int, device: torch.device) -> list[range]:
    """Cases that are chosen for at once: one after another, as many as take no longer together.

    Args:
        counts: rows of each case.
        vocab_size: scores of a row.
        device: that they are on.
    """
    most = (AT_ONCE if device.type == "cpu" else AT_ONCE_ON_GPU) // vocab_size
    found, first, rows = [], 0, 0
    for i, count in enumerate(counts):
        if i > first and rows + count > most:
            found.append(range(first, i))
            first, rows = i, 0
        rows += count
    return [*found, range(first, len(counts))]


def noisy_scores(
    samplers: Sequence[Sampler], logits: Tensor, positions: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Scores of many rows at once, and what the largest of is chosen: the bits that each row's
    sampler has for it.

    Args:
        samplers: of each row of ``logits``; all of them ``is_noisy_argmax``.
        logits: ``(rows, vocab)``.
        positions: absolute, of the tokens that they predict.

    Returns:
        Both ``(rows, vocab)`` float32.
    """
    device = logits.device
    scores = logits.float() / _column([s.params.temperature for s in samplers], device)
    rows = zip(samplers, positions, strict=True)
    return scores, scores + torch.stack([sampler.noise(at, device) for sampler, at in rows])


def ids_of(context: Sequence[int], device: torch.device) -> Tensor:
    """``(1, length)`` int64. torch itself takes eight times as long to read a long tuple."""
    return torch.from_numpy(np.fromiter(context, np.int64, len(context)))[None].to(device)


def _asked(processors: Sequence[Processor], ids: Tensor, scores: Tensor) -> Tensor:
    """What processors make of one position's scores."""
    expected = tuple(scores.shape)
    scores = scores.clone()  # processors may write in place
    for processor in processors:
        scores = processor(ids, scores)
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        if got != expected:
            raise ValueError(
                f"a logits processor must return scores of shape {expected}, got {got}"
            )
    # Of integers, or of few digits, it would round the temperature.
    return scores.to(torch.promote_types(scores.dtype, torch.float32))
