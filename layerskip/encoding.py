"""Prompts to token ids, checked against the vocabulary and the context."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError

from layerskip.params import check_integer, check_text

Prompt = str | Sequence[int]
Message = Mapping[str, str]


class PromptEncoder:
    """Encodes what users give.

    Args:
        tokenizer: of the checkpoint; None takes token ids only.
        vocab_size, max_positions: of the model.

    Raises:
        ValueError: the tokenizer has ids that the model has no embedding for. Fewer are fine:
            vocabularies are padded to a round size.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, max_positions: int) -> None:
        if tokenizer is not None:
            _check_tokenizer(tokenizer, vocab_size)
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
        if isinstance(prompts, torch.Tensor | np.ndarray):
            raise ValueError(
                f"an array of token ids has one dimension, got shape {tuple(prompts.shape)}; give "
                "a list of them, such as its tolist()"
            )
        if not isinstance(prompts, Sequence) or not prompts:
            raise ValueError(f"prompts must be text, token ids or a list of them, got {prompts!r}")
        return [self.encode(p) for p in prompts]  # type: ignore[arg-type]

    def encode_fitting(
        self, prompt: Prompt | None, messages: Sequence[Message] | None, max_new_tokens: int
    ) -> list[int]:
        """Token ids of one prompt, or chat, that leaves room for so many new ones."""
        room = self.max_positions - max_new_tokens
        if room < 1:
            raise ValueError(
                f"{max_new_tokens} new tokens leave a prompt no room in the model's "
                f"{self.max_positions} positions; ask for {self.max_positions - 1} at most"
            )
        ids = self.encode_all(prompt, messages)[0]
        if len(ids) > room:
            raise ValueError(
                f"{len(ids)} tokens; with {max_new_tokens} new ones at most {room} fit the "
                "model's positions"
            )
        return ids

    def _encode_chat(self, messages: Sequence[Message]) -> list[int]:
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("messages need a tokenizer with a chat template; give prompts instead")
        if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
            raise ValueError(f"messages must be a list of one or more, got {messages!r}")
        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message:
                raise TypeError(f"a message must be a mapping with a role, got {message!r}")
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError) as error:  # a template is a program
            raise ValueError(f"the chat template does not take these messages: {error}") from None
        return self.encode(self._tokenize(text, add_special_tokens=False))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, checked against the vocabulary and the context."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise TypeError("this model has no tokenizer: give token ids instead of text")
            ids = self._tokenize(prompt, add_special_tokens=True)
            checked = [max(ids, default=0)]  # it may have learnt tokens since it was wrapped
        else:
            ids = checked = as_ids(prompt)
        for token in checked:
            check_integer("a token id", token, 0, self.vocab_size - 1)
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        if len(ids) >= self.max_positions:
            raise ValueError(
                f"the prompt has {len(ids)} tokens; the model has {self.max_positions} "
                "positions, and at least one must be left to decode"
            )
        return ids

    def _tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        check_text("the prompt", text)
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def as_ids(prompt: object) -> list[int]:
    """A prompt of token ids, one array or sequence, as a list; what is in it is not checked."""
    if isinstance(prompt, torch.Tensor | np.ndarray) and prompt.ndim == 1:
        return prompt.tolist()
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray | memoryview):
        return [int(t) if isinstance(t, np.integer) else t for t in prompt]
    raise TypeError(f"a prompt must be text or a list of token ids, got {prompt!r}")


def _check_tokenizer(tokenizer: Any, vocab_size: int) -> None:
    if not callable(tokenizer) or not all(hasattr(tokenizer, n) for n in ("decode", "get_vocab")):
        raise TypeError(
            f"tokenizer must be a transformers tokenizer or None, got {type(tokenizer).__name__}"
        )
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= vocab_size:
        raise ValueError(
            f"the tokenizer has ids up to {largest}, the model's vocabulary only up to "
            f"{vocab_size - 1}; give the checkpoint's own tokenizer, or resize the model's "
            "embeddings and wrap it again"
        )


def is_single(prompt: object) -> bool:
    """Whether this is one prompt: text, an array of ids, or a sequence of ints."""
    if isinstance(prompt, str):
        return True
    if isinstance(prompt, torch.Tensor | np.ndarray):
        return prompt.ndim == 1
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], int | np.integer)
