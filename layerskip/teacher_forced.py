"""Acceptance along real text, which does not loop whatever the model would write by itself."""

from collections.abc import Sequence
from typing import Any

import torch

from layerskip.ambient import Decoding
from layerskip.api import SelfSpeculativeLM
from layerskip.params import SamplingParams, check_bare
from layerskip.prompts import Example
from layerskip.sampling import Sampler


@Decoding()
def teacher_forced(
    lm: SelfSpeculativeLM,
    examples: Sequence[Example],
    *,
    sampling: SamplingParams,
    exits: Sequence[int],
    max_new_tokens: int,
) -> dict[str, Any]:
    """Acceptance of the first drafted token along each prompt's real continuation, by exit.

    At every position of the continuation the exit and the full model pick a token, with the same
    noise when sampling; acceptance is the share of positions where they agree. The overlap is the
    mean of the sum over tokens of the smaller probability, 1 - TV, of both distributions as the
    logits have them: before temperature, top-k, top-p and min-p.

    Returns:
        ``{"prompts": m, "prompts_left_out": 0, "positions": n, "exits": {E: {"acceptance_rate": a,
        "overlap": 1 - TV}}}``. Left out are prompts without a continuation.

    Raises:
        ValueError: no prompt has one, or ``sampling`` has rules beside temperature and cuts.
    """
    check_bare(sampling, "acceptance along a text")
    stack = lm.stack
    agree = dict.fromkeys(exits, 0)
    overlap = dict.fromkeys(exits, 0.0)
    prompts = positions = 0
    for example in examples:
        prompt = lm.encode(example.prompt)
        ids = lm.tokenizer(example.prompt + example.continuation)["input_ids"]
        ids = ids[: min(len(prompt) + max_new_tokens, stack.max_positions)]
        if len(ids) <= len(prompt):
            continue
        first = len(prompt) - 1
        logits = stack.all_exit_logits(ids[:-1], (*exits, stack.num_layers), since=first)
        sampler = Sampler(sampling, sampling.seed or 0, stack.vocab_size)
        target_logits = logits[stack.num_layers]
        target = sampler.pick(target_logits, len(prompt))
        p = target_logits.softmax(-1)
        prompts, positions = prompts + 1, positions + len(target)
        for e in exits:
            picked = sampler.pick(logits[e], len(prompt))
            agree[e] += sum(a == b for a, b in zip(picked, target, strict=True))
            overlap[e] += torch.minimum(p, logits[e].softmax(-1)).sum().item()
    if not positions:
        raise ValueError("no prompt has a continuation to be read along; give some that have")
    rates = {
        e: {"acceptance_rate": agree[e] / positions, "overlap": overlap[e] / positions}
        for e in exits
    }
    left_out = len(examples) - prompts
    return {
        "prompts": prompts,
        "prompts_left_out": left_out,
        "positions": positions,
        "exits": rates,
    }
