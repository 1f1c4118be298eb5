"""Token ids to text, piece by piece."""

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """What we ask of a transformers tokenizer."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class TextStream:
    """Decodes a growing list of tokens, holding back what is not final.

    Held back: bytes of an unfinished character, and an end that may become a stop string. The
    pieces joined are the whole text, whatever rounds the tokens came in.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.stopped = False
        self._ids: list[int] = []
        self._anchor = self._read = 0  # decoding restarts at a token boundary before the new text
        self._pending = ""

    def push(self, token_id: int) -> str:
        """Add one token; returns the text that is now final."""
        self._ids.append(token_id)
        known = self._decode(self._ids[self._anchor : self._read])
        grown = self._decode(self._ids[self._anchor :])
        if len(grown) <= len(known) or grown.endswith("\ufffd"):
            return ""
        self._pending += grown[len(known) :]
        self._anchor, self._read = self._read, len(self._ids)
        return self._release()

    def finish(self) -> str:
        """No more tokens: everything held back becomes final, unless a stop string cut it."""
        if self.stopped:
            return ""
        known = self._decode(self._ids[self._anchor : self._read])
        rest = self._decode(self._ids[self._anchor :])[len(known) :]
        piece, self._pending = self._pending + rest, ""
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _release(self) -> str:
        found = [i for i in (self._pending.find(s) for s in self.stop) if i >= 0]
        if found:
            self.stopped = True
            piece, self._pending = self._pending[: min(found)], ""
            return piece
        keep = max((_overlap(self._pending, s) for s in self.stop), default=0)
        cut = len(self._pending) - keep
        piece, self._pending = self._pending[:cut], self._pending[cut:]
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
