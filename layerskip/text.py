"""Token ids to text, piece by piece."""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerskip.outputs import Round

from layerskip.errors import UndecodableError

# What no page and no table may hold: control characters (but for tabs and line breaks), half
# characters, and marks that turn the direction of what follows them: they made "128-511" out of
# "115-821".
SPANS = ((0, 32), (127, 160), (0xD800, 0xE000), (0x202A, 0x202F), (0x2066, 0x206A))
NOT_TEXT = {code: "\N{REPLACEMENT CHARACTER}" for span in SPANS for code in range(*span)}
NOT_TEXT |= {ord("\t"): "\t", ord("\n"): "\n", ord("\r"): ""}
# Of a long run of broken bytes the last tokens tell whether it still is one, if they have as many
# characters, and so bytes, as one character may: the rest is not decoded again for each of them.
RECENT, MOST_BYTES = 16, 4
# Where transformers has its fast tokenizers' ``decode``, and what that calls.
FAST = ("transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers")


def decoder_of(tokenizer: Any) -> Callable[..., str]:
    """The tokenizer's ``decode``, without special tokens (or with them: ``skips=False``) and as it
    is.

    Of transformers' fast tokenizers it is that of the library beneath, which theirs calls: each
    token of a batch is decoded twice, and to see first what it was given takes theirs four times
    as long (bench/LOG.md, 2026-11-27). One that decodes in its own way does so.

    Args:
        tokenizer: of transformers, or what has a ``decode`` that takes the arguments below.

    Raises:
        UndecodableError: when it is called: whatever the tokenizer raises, of an id beyond its
            vocabulary perhaps, where a model has more.
    """
    beneath = getattr(tokenizer, "backend_tokenizer", None)
    steps = [getattr(tokenizer, name, None) for name in ("decode", "_decode")]
    makers = [getattr(step, "__module__", None) for step in steps]
    if beneath is not None and makers == list(FAST):
        decode = beneath.decode
        return lambda ids, skips=True: str(decode(ids, skip_special_tokens=skips))

    def decoded(ids: Sequence[int], skips: bool = True) -> str:
        # Cleaning takes blanks back once the next token is known, so that the text of some tokens
        # need not begin that of more; and it is not what a grammar and stop strings are about.
        arguments = {"skip_special_tokens": skips, "clean_up_tokenization_spaces": False}
        try:
            text: str = tokenizer.decode(ids, **arguments)
        except Exception as error:
            told = f"the tokenizer can't decode token ids that end with {list(ids[-8:])}"
            raise UndecodableError(f"{told}: {type(error).__name__}: {error}") from error
        return text

    return decoded


def special_names(tokenizer: Any) -> dict[int, str]:
    """What a tokenizer calls its special tokens, which are no text, by id."""
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return named | {i: str(token) for i, token in added.items() if token.special}


def stop_ids(tokenizer: Any, stop: Collection[str]) -> frozenset[int]:
    """Special tokens that are among the stop strings: a text leaves their names out."""
    if not stop or not hasattr(tokenizer, "all_special_ids"):  # each request asks
        return frozenset()
    return frozenset(i for i, name in special_names(tokenizer).items() if name in stop)


class TextStream:
    """Decodes a growing list of tokens, holding back what is not final.

    Held back: bytes of an unfinished character, and an end that may become a stop string. The
    pieces joined are the whole text, whatever rounds the tokens came in.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self._decode = decoder_of(tokenizer)
        self.stopped = False
        # Tokens since a boundary shortly before the new text: decoding needs that much context.
        self._ids: tuple[int, ...] = ()
        self._read = 0  # how many of them are final text already
        # What those came after if they came together: ``push`` would have kept fewer of them.
        self._before: tuple[int, ...] | None = None
        self._pending = ""

    def push(self, token_id: int) -> str:
        """Add one token; returns the text that is now final."""
        if self._before is not None:
            self._part()
        if self._grow((token_id,)):
            return self._release()
        alone = self._decode([token_id])
        # What is left out as special would be so wherever it stood: not to be decoded ever again.
        # A blank may be stripped where it stands alone.
        if alone or not self._decode([token_id], skips=False).strip():
            self._ids = (*self._ids, token_id)
        return ""

    def push_all(self, token_ids: Sequence[int]) -> str:
        """The same of several, without stop strings, which a text may reach between them. Where
        nothing is held back they take as long as one."""
        before = self._ids[: self._read]
        if self._grow(token_ids, together=True):
            self._before = before
            return self._release()
        return "".join([self.push(token) for token in token_ids])

    def _grow(self, token_ids: Sequence[int], *, together: bool = False) -> bool:
        """Add tokens and their text, if it ends with a whole character; else nothing is done.

        Args:
            together: not if a character is broken within, either: where bytes stand in for missing
                tokens, a broken one breaks all bytes that are decoded with it.
        """
        ids = (*self._ids, *token_ids)
        if len(self._ids) - self._read > RECENT:
            end = self._decode(ids[-RECENT:])
            if len(end) >= MOST_BYTES and end.endswith("\ufffd"):
                return False
        known, grown = self._decode(ids[: self._read]), self._decode(ids)
        new = grown[len(known) :]
        whole = new != "" and "\ufffd" not in (new if together else new[-1])
        if whole:
            self._pending += new
            self._ids = ids[self._read :]
            self._read = len(self._ids)
        return whole

    def _part(self) -> None:
        """Keep the tokens that would have been kept had they come one by one."""
        assert self._before is not None
        apart = TextStream(self.tokenizer, ())
        apart._ids, apart._read = self._before, len(self._before)
        for token in self._ids:
            apart.push(token)
        self._ids, self._read, self._before = apart._ids, apart._read, None

    def finish(self) -> str:
        """No more tokens: what was held back becomes final, cut before a stop string."""
        if self.stopped:
            return ""
        known = self._decode(self._ids[: self._read])
        self._pending += self._decode(self._ids)[len(known) :]
        piece = self._release()
        rest, self._pending = self._pending, ""
        return piece if self.stopped else piece + rest

    def fork(self) -> "TextStream":
        """An independent copy."""
        other = TextStream.__new__(TextStream)
        other.__dict__.update(self.__dict__)  # a third of what copy.copy takes, each round
        return other

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


def by_origin(
    stream: TextStream, record: "Round", eos_ids: Collection[int] = ()
) -> list[tuple[str, str]]:
    """The text that each of a round's tokens makes final, with the token's origin; what was held
    back is the last one's, where the text ends. Ends of sequence are no text, whatever the
    tokenizer makes of them."""
    told = zip(record.token_ids, record.origins, strict=True)
    pieces: list[tuple[str, str]] = [("" if t in eos_ids else stream.push(t), o) for t, o in told]
    return [*pieces, (stream.finish(), record.origins[-1])] if record.finish_reason else pieces


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
