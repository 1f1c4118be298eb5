"""Rows as tokens, and which of them are learned."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from rows import Row

UNTRAINED = -100  # the label that torch's cross-entropy leaves out
TELLS_ASSISTANT = re.compile(r"\{%-?\s*generation\s*-?%\}")

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Sample:
    """One row as tokens.

    Attributes:
        ids: of prompt and what follows, with the end-of-sequence token if the text ends there.
        num_prompt_tokens: leading ones that are given, not learned; 0 of plain text.
        untrained: further spans ``(start, end)`` that are not learned: other people's turns of a
            chat.
    """

    ids: tuple[int, ...]
    num_prompt_tokens: int = 0
    untrained: Spans = ()

    @property
    def labels(self) -> tuple[int, ...]:
        """``ids`` with ``UNTRAINED`` in the place of what is not learned; not shifted."""
        labels = list(self.ids)
        for start, end in ((0, self.num_prompt_tokens), *self.untrained):
            labels[start:end] = [UNTRAINED] * len(labels[start:end])
        return tuple(labels)


def encode(row: Row, tokenizer: Any, *, allow_prompts: bool = False) -> Sample | str:
    """A row as tokens, or why it cannot be used, as a clause.

    Of a prompt and its completion, and of a chat, only what the model has to write is learned.
    Which turns of a chat are the assistant's, its template says with ``{% generation %}``; if not,
    it is found out by rendering the chat up to each turn; where neither works (a template that
    writes past turns otherwise than the last), the whole chat is learned.

    Args:
        row: of ``rows.read_rows``.
        tokenizer: a transformers tokenizer.
        allow_prompts: a prompt alone is a sample without anything to learn, not a mistake.
    """
    if row.kind == "chat":
        return _chat(row.parts, tokenizer, allow_prompts=allow_prompts)
    if row.kind == "text":
        ids = _ended(_ids(tokenizer, row.parts[0]), tokenizer)
        return Sample(ids) if len(ids) > 1 else "it is a single token"
    prompt, follows = row.parts
    if not follows:
        ids = _ids(tokenizer, prompt)
        if not allow_prompts:
            return "nothing follows its prompt: there is nothing to learn"
        return Sample(ids, len(ids)) if ids else "its prompt is empty"
    ids = _ended(_ids(tokenizer, prompt + follows), tokenizer)
    return Sample(ids, _shared(ids, _ids(tokenizer, prompt)))


def _chat(turns: Sequence[tuple[str, str]], tokenizer: Any, *, allow_prompts: bool) -> Sample | str:
    if not getattr(tokenizer, "chat_template", None):
        return "the model's tokenizer has no chat template; give 'prompt' and 'completion'"
    messages = [{"role": role, "content": content} for role, content in turns]
    answered = turns[-1][0] == "assistant"
    if not answered and not allow_prompts and all(role != "assistant" for role, _ in turns):
        return "no message is the assistant's: there is nothing to learn"
    try:
        if not answered and allow_prompts:
            ids = _ids(tokenizer, _rendered(tokenizer, messages, ask=True), special=False)
            return Sample(ids, len(ids))
        ids, learned = _learned(tokenizer, messages)
    except (TemplateError, TypeError, ValueError) as error:  # a template is a program
        return f"the chat template does not take it: {' '.join(str(error).split())}"
    if answered and learned[-1][1] == len(ids) and not _ends_itself(ids, tokenizer):
        ids = _ended(ids, tokenizer)
        learned = (*learned[:-1], (learned[-1][0], len(ids)))
    between = itertools.pairwise((*learned, (len(ids), len(ids))))
    return Sample(ids, learned[0][0], tuple((a[1], b[0]) for a, b in between if a[1] < b[0]))


def _ends_itself(ids: Sequence[int], tokenizer: Any) -> bool:
    """Whether a template ended a chat with a token of its own, perhaps with a line end after it."""
    added = tokenizer.added_tokens_decoder
    return any(i in added and added[i].special for i in ids[-2:])


def _learned(
    tokenizer: Any, messages: Sequence[Mapping[str, str]]
) -> tuple[tuple[int, ...], Spans]:
    """Token ids of a chat and the spans that are learned, one or more; the last one goes up to the
    end if nothing that is not learned follows."""
    if TELLS_ASSISTANT.search(tokenizer.chat_template):
        told = tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = tuple(told["input_ids"]), told["assistant_masks"]
        if any(mask):
            return ids, _spans(mask)
    whole = _rendered(tokenizer, messages)
    ids = _ids(tokenizer, whole, special=False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = _rendered(tokenizer, messages[:i], ask=True)
        before = asked[: _shared(asked, whole)]
        told = before == asked
        if not told:  # it may open a thought that no answer has, but for its first letters
            earlier = _rendered(tokenizer, messages[:i])
            answer = message["content"].strip()
            begins = whole.rfind(answer, len(earlier), len(before) + len(answer))
            before = before[:begins] if begins >= 0 else before
            told = before.startswith(earlier)
        upto = _rendered(tokenizer, messages[: i + 1])
        if told and whole.startswith(upto) and len(before) < len(upto):
            ends = (_shared(ids, _ids(tokenizer, t, special=False)) for t in (before, upto))
            spans.append(tuple(ends))
    return ids, tuple(spans) or ((0, len(ids)),)


def _spans(mask: Sequence[int]) -> Spans:
    """Runs of ones."""
    edges = [i for i, (a, b) in enumerate(itertools.pairwise([0, *mask, 0])) if a != b]
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, ask: bool = False) -> str:
    if not messages:  # templates look at the first message
        return ""
    return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=ask)


def _ids(tokenizer: Any, text: str, *, special: bool = True) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _ended(ids: tuple[int, ...], tokenizer: Any) -> tuple[int, ...]:
    end = tokenizer.eos_token_id
    return ids if end is None or ids[-1:] == (end,) else (*ids, end)


def _shared(ids: Sequence[object], beginning: Sequence[object]) -> int:
    """Tokens, or letters, that two texts begin with. A token that reaches across the beginning's
    end is not among them: it is predicted from what comes before it."""
    pairs = zip(ids, beginning, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
