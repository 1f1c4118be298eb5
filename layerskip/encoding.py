"""Prompts to token ids, checked against the vocabulary and the context."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from layerskip.params import check_integer

Prompt = str | Sequence[int]
Message = Mapping[str, str]


class PromptEncoder:
    """Encodes what users give.

    Args:
        tokenizer: of the checkpoint; None takes token ids only.
        vocab_size, max_positions: of the model.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, max_positions: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size, self.max_positions = vocab_size, max_positions

    def encode_all(
        self,
        prompts: Prompt | Sequence[Prompt] | None,
        messages: Sequence[Message] | None,
    ) -> list[list[int]]:
        if (prompts is None) == (messages is None):
            raise ValueError("give either prompts or messages")
        if messages is not None:
            return [self._encode_chat(messages)]
        if is_single(prompts):
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
                check_integer("a token id", token, 0, self.vocab_size - 1)
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        if len(ids) >= self.max_positions:
            raise ValueError(
                f"the prompt has {len(ids)} tokens; the model has {self.max_positions} "
                "positions, and at least one must be left to decode"
            )
        return ids


def is_single(prompt: object) -> bool:
    """Whether this is one prompt: text, a tensor of ids, or a sequence of ints."""
    if isinstance(prompt, str):
        return True
    if isinstance(prompt, torch.Tensor):
        return prompt.ndim == 1
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], int)
