"""From logits to the next token: greedy, or sampled with noise that depends on nothing but
(seed, absolute position, token id)."""

import torch
from torch import Tensor

from layerskip.ops.reference import gumbel_noise
from layerskip.params import SamplingParams


def greedy_tokens(logits: Tensor) -> list[int]:
    """Most likely token of each row; ties go to the lowest id.

    Args:
        logits: ``(rows, vocab)`` of any dtype. Through float32, which keeps order and ties:
            torch's bfloat16 argmax takes three times as long on a CPU.
    """
    return logits.float().argmax(-1).tolist()


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
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        dropped = (before >= params.top_p).scatter(-1, ids, before >= params.top_p)
        scores = scores.masked_fill(dropped, float("-inf"))
    if params.min_p > 0.0:
        probabilities = scores.softmax(-1)
        border = params.min_p * probabilities.amax(-1, keepdim=True)
        scores = scores.masked_fill(probabilities < border, float("-inf"))
    return scores


class Sampler:
    """Picks one row's tokens; draft and verify share it, and with it the noise."""

    def __init__(self, params: SamplingParams, seed: int, vocab_size: int) -> None:
        self.params, self.seed, self.vocab_size = params, seed, vocab_size
        self._noise: dict[int, Tensor] = {}

    def noise(self, position: int) -> Tensor:
        """Gumbel noise of ``position``, made once however often it is drafted and verified."""
        if position not in self._noise:
            self._noise[position] = gumbel_noise(self.seed, position, self.vocab_size)
        return self._noise[position]

    def forget_before(self, position: int) -> None:
        """Drop noise that can't be asked for again."""
        for old in [p for p in self._noise if p < position]:
            del self._noise[old]

    def pick(self, logits: Tensor, position: int) -> list[int]:
        """Next tokens of consecutive positions; ties go to the lowest id.

        Args:
            logits: ``(rows, vocab)``; row i predicts the token at ``position + i``.
            position: absolute position of the first predicted token.
        """
        if self.params.greedy:
            return greedy_tokens(logits)
        scores = keep_mask(logits.float() / self.params.temperature, self.params)
        noise = torch.stack([self.noise(position + i) for i in range(logits.shape[0])])
        return (scores.log_softmax(-1) + noise.to(scores.device)).argmax(-1).tolist()
