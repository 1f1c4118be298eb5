"""Rules on the logits, as transformers' logits processors: its own where it has them.

A processor takes ``(1, tokens)`` ids of prompt, output and drafted prefix, and ``(1, vocab)``
float32 scores, and gives scores.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from layerskip.params import SamplingParams
from layerskip.sampling import Processor


def processors_of(
    params: SamplingParams,
    *,
    prompt_length: int,
    eos_ids: frozenset[int],
    vocab_size: int,
    device: torch.device,
) -> list[Processor]:
    """The rules of ``params``, in the order its docstring gives; none for a rule that is off."""
    found: list[Processor] = []
    if params.logit_bias:
        found.append(LogitBias(dict(params.logit_bias), vocab_size, device))
    if params.repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if params.presence_penalty or params.frequency_penalty:
        found.append(
            OutputPenalty(params.presence_penalty, params.frequency_penalty, prompt_length)
        )
    if params.no_repeat_ngram_size:
        found.append(NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size))
    if params.bad_words_ids:
        found.append(NoBadWordsLogitsProcessor([list(word) for word in params.bad_words_ids]))
    if params.min_new_tokens and eos_ids:
        found.append(
            MinNewTokensLengthLogitsProcessor(
                prompt_length, params.min_new_tokens, sorted(eos_ids), device=str(device)
            )
        )
    if params.forced_token_ids:
        found.append(ForcedTokens(params.forced_token_ids, prompt_length))
    return found


class LogitBias:
    """Adds a number to the scores of chosen tokens."""

    def __init__(self, bias: dict[int, float], vocab_size: int, device: torch.device) -> None:
        self.bias = torch.zeros(1, vocab_size, dtype=torch.float32, device=device)
        self.bias[0, list(bias)] = self.bias.new_tensor(list(bias.values()))

    def __call__(self, _input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + self.bias


class OutputPenalty:
    """Presence and frequency penalty: on the tokens of the output, not of the prompt.

    ``score - frequency * count - presence * (count > 0)``, as OpenAI's interface defines them.
    """

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence, self.frequency, self.prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        output = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, output, scores.new_ones(output.shape))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class ForcedTokens:
    """Rules out all but the next of a list of tokens, while the output is shorter than it."""

    def __init__(self, tokens: Sequence[int], prompt_length: int) -> None:
        self.tokens, self.prompt_length = tuple(tokens), prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        done = input_ids.shape[1] - self.prompt_length
        if done >= len(self.tokens):
            return scores
        forced = torch.full_like(scores, float("-inf"))
        forced[:, self.tokens[done]] = 0.0
        return forced
