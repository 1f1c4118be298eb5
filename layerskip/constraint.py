"""A grammar's word on one row's tokens: masks for draft and verify, where it ends, what it forces.

A ``Constraint`` answers for any text, as a function of the text alone: its matcher is moved to the
tokens that are asked about, back over drafted ones that were dropped and on over new ones. So draft
and verify share what they ask, and an error anywhere leaves nothing to repair: a matcher that was
interrupted on its way begins again.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from layerskip.grammar import Matcher

FEW = 64  # tokens: where no others may follow, a draft may take each of them
_BITS = torch.arange(8, dtype=torch.uint8, device="cpu")


@dataclass(frozen=True)
class Context(Sequence[int]):
    """A prompt and what follows it, as one sequence.

    A round asks what may follow each token of its draft. The prompt is not copied for that, however
    long it is, but where all of the tokens are read; a grammar reads those behind the prompt.
    """

    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()

    def __add__(self, tokens: Iterable[int]) -> "Context":
        return Context(self.prompt, (*self.output, *tokens))

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(self.prompt, self.output)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...
    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        begins = len(self.prompt)
        if isinstance(at, slice) and (at.start or 0) >= begins and at.stop is at.step is None:
            return self.output[(at.start or 0) - begins :]
        return (*self.prompt, *self.output)[at]


NO_CONTEXT = Context()


@dataclass(frozen=True)
class _State:
    """What holds after some tokens.

    Attributes:
        following: tokens of the text that may follow, ``(vocab,)`` bool; the end is none of it.
        complete: whether the text may end.
        closed: whether it has to.
    """

    following: Tensor
    complete: bool
    closed: bool


class Constraint:
    """The grammar of one row.

    Text that has to follow is spelt as the tokenizer would, drafts or not: the tokens of all but
    its end are certain then, and a model of another mind can't make them rare ones.

    Args:
        matcher: at the beginning of the grammar.
        prompt_length: tokens that come before the grammar's text.
        eos_ids: what ends the row; allowed where the text is complete, and only there.
        vocab_size: columns of the scores.

    Raises:
        ValueError: no text but the empty one fits the grammar with this vocabulary.
    """

    def __init__(
        self, matcher: Matcher, *, prompt_length: int, eos_ids: frozenset[int], vocab_size: int
    ) -> None:
        self._matcher, self._prompt_length, self._vocab_size = matcher, prompt_length, vocab_size
        # Others are in configs, too: none is ever emitted, and -1 would be the last token.
        self._eos_ids = [token for token in sorted(eos_ids) if 0 <= token < vocab_size]
        self._path: list[int] = []  # tokens that the matcher has taken
        self._states: dict[int, _State] = {}  # by number of tokens taken, along the path
        self._in_step = True  # whether the path is the matcher's: not while that moves
        first = self._state((), 0)
        # Before its marker anything may stand: what counts is how the grammar itself begins.
        begins = self._following(matcher.inner) if isinstance(matcher, AfterMarker) else None
        if first is None or not (first.following if begins is None else begins).any():
            raise ValueError(
                "no token of the vocabulary can begin what the grammar allows; it contradicts "
                "itself, allows the empty text alone, or needs characters that the tokenizer lacks"
            )

    def prepare(self, context: Sequence[int], rows: int) -> None:
        """Fill masks ahead of ``masked``, while a device is busy with what they are for.

        Args:
            context: as there.
            rows: how many will be asked for.
        """
        output = context[self._prompt_length :]
        for count in range(max(0, len(output) - rows + 1), len(output) + 1):
            self._state(output, count)

    def masked(self, scores: Tensor, context: Sequence[int]) -> Tensor:
        """Scores with -inf for what the grammar forbids, each row by its own state.

        Args:
            scores: ``(rows, vocab)`` float32 of consecutive positions.
            context: all tokens before the last row's prediction.

        Returns:
            The same shape. A row behind the grammar's end, or behind a token that it forbids, is
            as it was: nothing of it can be emitted.
        """
        output = context[self._prompt_length :]
        first = len(output) - scores.shape[0] + 1
        masks = [self._allowed(output, count) for count in range(first, len(output) + 1)]
        if all(mask is None for mask in masks):
            return scores
        free = torch.ones(self._vocab_size, dtype=torch.bool, device="cpu")
        allowed = torch.stack([free if mask is None else mask for mask in masks])
        return scores.masked_fill(~allowed.to(scores.device), float("-inf"))

    def closed(self, context: Sequence[int]) -> bool:
        """Whether the text can't go on: it is whole, or its end has been emitted."""
        output = context[self._prompt_length :]
        if output and output[-1] in self._eos_ids:
            return True
        same = self._shared(output)
        known = same == len(output) and same in self._states
        # What is not whole is not closed, and that needs no mask: it can wait for the next pass.
        if not known and not (self._moved(output, len(output), same) and self._matcher.complete):
            return False
        state = self._state(output, len(output))
        return state is not None and state.closed

    def guess(
        self, context: Sequence[int], found: Sequence[int], most: int
    ) -> tuple[tuple[int, ...], bool]:
        """Tokens that may follow: those of forced text, else those found, as far as allowed.

        Returns:
            At most ``most`` tokens, and whether they are forced.
        """
        output = context[self._prompt_length :]
        if most < 1 or not self._moved(output, len(output), self._shared(output)):
            return (), False
        forced = self._legal(self._matcher.forced(), certain=True)
        if forced:
            return forced[:most], True
        return self._legal(tuple(found[:most])), False

    def few(self, context: Sequence[int]) -> frozenset[int]:
        """Tokens of the text that may come next, if they are few: a digit, one of some names.

        Args:
            context: all tokens before.
        """
        output = context[self._prompt_length :]
        state = self._state(output, len(output))
        if state is None or int(state.following.sum()) > FEW:
            return frozenset()
        return frozenset(state.following.nonzero()[:, 0].tolist())

    def _legal(self, tokens: tuple[int, ...], *, certain: bool = False) -> tuple[int, ...]:
        """The allowed ones, up to the first that is not.

        Args:
            certain: without the last, unless the text ends with it.
        """
        count, self._in_step = 0, False
        for token in tokens:
            if token in self._eos_ids or not self._matcher.advance(token):
                break
            count += 1
        ends = self._matcher.complete
        self._matcher.rollback(count)
        self._in_step = True
        return tokens[: count - 1] if certain and count and not ends else tokens[:count]

    def forget_before(self, position: int) -> None:
        """Drop masks that can't be asked for again."""
        for old in [n for n in self._states if n < position - self._prompt_length]:
            del self._states[old]

    def _allowed(self, output: Sequence[int], count: int) -> Tensor | None:
        """What may follow the first ``count`` tokens, ``(vocab,)`` bool; None: it can't matter."""
        state = self._state(output, count)
        if state is None or state.closed:
            return None
        if not state.complete or not self._eos_ids:
            return state.following
        mask = state.following.clone()
        mask[self._eos_ids] = True
        return mask

    def _state(self, output: Sequence[int], count: int) -> _State | None:
        """After the first ``count`` tokens; None if the grammar forbids one of them."""
        same = self._shared(output)
        if count <= same and count in self._states:
            return self._states[count]
        if not self._moved(output, count, same):
            return None
        following = self._following(self._matcher)
        complete = self._matcher.complete
        spelt = () if complete else self._matcher.forced()
        # The last token of forced text may reach into what follows it: the model's to choose.
        if len(spelt) > 1 and following[spelt[0]]:
            following = torch.zeros_like(following)
            following[spelt[0]] = True
        state = _State(following, complete, complete and not bool(following.any()))
        self._states[count] = state
        return state

    def _following(self, matcher: Matcher) -> Tensor:
        """Tokens of the text that a matcher allows next, ``(vocab,)`` bool."""
        words = torch.zeros(-(-self._vocab_size // 32), dtype=torch.int32, device="cpu")
        matcher.fill(words)
        following = unpacked(words, self._vocab_size)
        following[self._eos_ids] = False
        return following

    def _moved(self, output: Sequence[int], count: int, same: int) -> bool:
        """Bring the matcher behind the first ``count`` tokens; False if it can't go there.

        Args:
            same: length of the common prefix of ``output`` and the path.
        """
        same, taken, self._in_step = min(same, count), True, False
        if same < len(self._path):
            self._matcher.rollback(len(self._path) - same)
            del self._path[same:]
            for gone in [n for n in self._states if n > same]:
                del self._states[gone]
        for token in output[same:count]:
            taken = token not in self._eos_ids and self._matcher.advance(token)
            if not taken:
                break
            self._path.append(token)
        self._in_step = True
        return taken

    def _shared(self, output: Sequence[int]) -> int:
        """Length of the common prefix of the path and ``output``."""
        if not self._in_step:  # an interruption came in between
            self._matcher.reset()
            self._path.clear()
            self._states.clear()
            self._in_step = True
        most = min(len(self._path), len(output))
        if list(output[:most]) == self._path[:most]:
            return most
        return next(i for i in range(most) if output[i] != self._path[i])


def unpacked(words: Tensor, vocab_size: int) -> Tensor:
    """``(vocab_size,)`` bool of int32 words whose lowest bit is the first token."""
    return (words.view(torch.uint8)[:, None] >> _BITS & 1).flatten()[:vocab_size].bool()


def packed(mask: Tensor) -> Tensor:
    """The int32 words of a ``(vocab_size,)`` bool mask."""
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -len(mask) % 32))
    return (padded.view(-1, 8) << _BITS).sum(-1).to(torch.uint8).view(torch.int32)


class AfterMarker:
    """A matcher that allows everything until a marker has been written, then asks another.

    Args:
        inner: at the beginning of its grammar.
        marker: bytes to wait for; they may fall apart into any tokens.
        token_bytes: of every id; those of none are never allowed.
        anything: the others, as ``packed`` has them.
    """

    def __init__(
        self, inner: Matcher, marker: bytes, token_bytes: Sequence[bytes], anything: Tensor
    ) -> None:
        self.inner, self._marker, self._bytes = inner, marker, token_bytes
        self._anything = anything
        self._text: list[bytes] = []  # of tokens up to and with the marker's last
        self._inside = 0  # tokens that the inner matcher has taken
        self._found = False

    @property
    def complete(self) -> bool:
        return self._found and self.inner.complete

    def fill(self, mask: Tensor) -> None:
        if self._found:
            self.inner.fill(mask)
            return
        mask.copy_(self._anything)

    def advance(self, token: int) -> bool:
        if self._found:
            taken = self.inner.advance(token)
            self._inside += taken
            return taken
        if not 0 <= token < len(self._bytes) or not self._bytes[token]:
            return False
        self._text.append(self._bytes[token])
        # The marker is as long as its tokens at most: no need to look further back.
        self._found = self._marker in b"".join(self._text[-len(self._marker) :])
        return True

    def rollback(self, count: int) -> None:
        inside = min(count, self._inside)
        if inside:
            self.inner.rollback(inside)
            self._inside -= inside
        if count > inside:
            del self._text[len(self._text) - (count - inside) :]
            self._found = False

    def reset(self) -> None:
        self.inner.reset()
        self._text.clear()
        self._inside, self._found = 0, False

    def forced(self) -> tuple[int, ...]:
        return self.inner.forced() if self._found else ()
