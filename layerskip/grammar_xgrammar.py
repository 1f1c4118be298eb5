"""Matchers by xgrammar (Dong et al. 2024, https://arxiv.org/abs/2411.15100), an optional package.

xgrammar is imported when the first grammar is compiled, not before.
"""

import functools
import re
import threading
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from layerskip.constraint import AfterMarker, packed
from layerskip.grammar import PARTS, Grammar, Matcher
from layerskip.grammar_lengths import longest_shortest
from layerskip.text import special_names

MAX_COMPILED = 256
MAX_SPELT = 4096
BEGUN, HALF = b"\xed", re.compile(rb"\xed[\xa0-\xbf]")  # of a surrogate pair, in UTF-8
PROBE = '{"a": [1, true], "b": "c d"}'
# Characters that a rule has at least: xgrammar looks for forced text without bound, and for each of
# so many again from the beginning.
MOST_FORCED = 4096
# xgrammar 0.2.8 reads \x41a as U+041A, and takes a class that begins with a caret for its opposite,
# in whatever way the caret is spelt.
ESCAPES = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|u\{(?P<any>[0-9a-fA-F]+)\}|.)", re.DOTALL
)
CARETS = re.compile(r"\A(?:\\?\^(?:-\\?\^|(?!-.)))+", re.DOTALL)  # but for a range to beyond


class XGrammarBackend:
    """Compiles grammars for one tokenizer, each once; threads may share it.

    Args:
        tokenizer: a transformers tokenizer.
        vocab_size: of the model, which may know more ids than the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._compiled = functools.lru_cache(MAX_COMPILED)(self._once_compiled)
        self._vocabulary: Vocabulary | None = None
        self._compiler: Any = None

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of the grammar.

        Raises:
            ValueError: xgrammar is not installed, the tokenizer's tokens can't be read as bytes,
                or the grammar is none, or has a rule no text of which ends.
        """
        xgrammar = _xgrammar()
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(xgrammar, self._tokenizer, self._vocab_size)
                self._compiler = xgrammar.GrammarCompiler(
                    self._vocabulary.info, max_threads=1, cache_enabled=False
                )
            compiled, shortest = self._compiled(replace(grammar, marker=""))
        inner = xgrammar.GrammarMatcher(compiled)
        matcher = XGrammarMatcher(inner, self._vocabulary, forces=shortest <= MOST_FORCED)
        if not grammar.marker:
            return matcher
        marker, known = grammar.marker.encode(), self._vocabulary
        return AfterMarker(matcher, marker, known.spelling, known.spelt)

    def _once_compiled(self, grammar: Grammar) -> tuple[Any, float]:
        """A grammar as xgrammar has it, and characters that a rule has at least."""
        compiled = self._compile(grammar)
        return compiled, longest_shortest(grammar.kind, str(compiled.grammar))

    def _compile(self, grammar: Grammar) -> Any:
        try:
            if grammar.kind == "regex":
                return self._compiler.compile_regex(_respelt(grammar.source))
            if grammar.kind == "ebnf":
                return self._compiler.compile_grammar(grammar.source)
            return self._compiler.compile_json_schema(
                grammar.source,
                any_whitespace=grammar.max_whitespace > 0,
                max_whitespace_cnt=grammar.max_whitespace or None,
                strict_mode=False,
            )
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"the {grammar.kind} is not usable: {_reason(error)}") from None


class Vocabulary:
    """A tokenizer's tokens as bytes.

    Attributes:
        info: xgrammar's.
        text: bytes of each id; empty for special tokens, which are no text.
        spelling: the same, with special tokens by their names: a marker may be one.
        spelt: ids that have one, as ``packed`` has them: of each row that waits for a marker.
        everything: ids with text, as ``packed`` has them.
        sound: the same, but for bytes of half a surrogate pair, which no text has and xgrammar
            lets through; then where such a one has begun.
        tokens_of: how the tokenizer writes a piece of text; none if it would add anything.
    """

    def __init__(self, xgrammar: ModuleType, tokenizer: Any, vocab_size: int) -> None:
        try:
            known = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer, vocab_size=vocab_size, stop_token_ids=[0]
            ).decoded_vocab
            special = special_names(tokenizer)
            ids = list(tokenizer(PROBE, add_special_tokens=False)["input_ids"])
            readable = b"".join(known[i] for i in ids).strip() == PROBE.encode()
        except (AttributeError, KeyError, NotImplementedError, RuntimeError, ValueError) as error:
            raise ValueError(f"{_unreadable(tokenizer)}: {_reason(error)}") from None
        if not readable:
            raise ValueError(f"{_unreadable(tokenizer)}: its tokens do not add up to the text")
        self.text = [b"" if i in special else token for i, token in enumerate(known)]
        self.spelling = list(known)
        for i, name in special.items():
            self.spelling[i] = name.encode()
        # xgrammar wants a stop token: it gets one behind the vocabulary. Whether the text may end
        # we ask of it otherwise.
        self.info = xgrammar.TokenizerInfo([*self.text, b""], stop_token_ids=[vocab_size])
        whole = [bool(text) and not HALF.search(text) for text in self.text]
        goes_on = [found and text[0] < 0xA0 for found, text in zip(whole, self.text, strict=True)]
        masks = (*(list(map(bool, each)) for each in (self.spelling, self.text)), whole, goes_on)
        self.spelt, self.everything, *self.sound = (
            packed(torch.tensor(mask, device="cpu")) for mask in masks
        )
        self._tokenizer = tokenizer
        self.tokens_of = functools.lru_cache(MAX_SPELT)(self._tokens_of)

    def _tokens_of(self, text: str) -> tuple[int, ...]:
        ids = tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return ids if b"".join(self.text[i] for i in ids) == text.encode() else ()


class XGrammarMatcher:
    """``Matcher`` by xgrammar.

    Args:
        forces: whether forced text is looked for.
    """

    def __init__(self, matcher: Any, vocabulary: Vocabulary, *, forces: bool) -> None:
        self._matcher, self._vocabulary, self._forces = matcher, vocabulary, forces
        words = -(-(len(vocabulary.text) + 1) // 32)
        self._row = torch.zeros(1, words, dtype=torch.int32, device="cpu")
        self._begun = [False]  # after each token: whether the text may go on to half a pair

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_completed())

    def fill(self, mask: Tensor) -> None:
        restricts = self._matcher.fill_next_token_bitmask(self._row)
        mask.copy_(self._row[0, : len(mask)] if restricts else self._vocabulary.everything)
        mask.bitwise_and_(self._vocabulary.sound[self._begun[-1]])

    def advance(self, token: int) -> bool:
        text = self._vocabulary.text
        if not 0 <= token < len(text) or not text[token]:
            return False
        before = BEGUN if self._begun[-1] else b""
        if HALF.search(before + text[token]) or not self._matcher.accept_token(token):
            return False
        self._begun.append(text[token].endswith(BEGUN))
        return True

    def rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)
            del self._begun[-count:]

    def reset(self) -> None:
        self._matcher.reset()
        self._begun = [False]

    def forced(self) -> tuple[int, ...]:
        if not self._forces:
            return ()
        try:
            text = self._matcher.find_jump_forward_string()
        except UnicodeDecodeError:  # it ends within a character
            return ()
        return self._vocabulary.tokens_of(text) if text else ()


def _respelt(pattern: str) -> str:
    """The same regular expression, as xgrammar reads it right."""
    pattern = ESCAPES.sub(_respelt_escape, pattern)
    return PARTS.sub(
        lambda found: _without_caret(found[0]) if found[0].startswith("[\\^") else found[0], pattern
    )


def _respelt_escape(found: re.Match[str]) -> str:
    digits = found["x"] or found["u"] or found["any"]
    if digits is not None and int(digits, 16) == ord("^"):
        return "\\^"
    return f"\\u00{digits}" if found["x"] else found[0]


def _without_caret(chars: str) -> str:
    """A class that begins with an escaped caret, with the caret beside it."""
    rest = CARETS.sub("", chars[1:-1])
    rest = re.sub(r"\A\\?\^", "_", rest)  # a range from what follows the caret
    return f"(?:\\^|[{rest}])" if rest else "\\^"


def _xgrammar() -> ModuleType:
    try:
        import xgrammar
    except ImportError:
        raise ValueError(
            "grammars need xgrammar, which is not installed; pip install layerskip[grammar]"
        ) from None
    return xgrammar


def _unreadable(tokenizer: Any) -> str:
    return f"a grammar needs each token's text, which {type(tokenizer).__name__} does not tell"


def _reason(error: Exception) -> str:
    """One line, without the place in xgrammar's sources that it begins with."""
    line = str(error).strip().split("\n")[0]
    _, found, rest = line.partition(": ")
    return rest if found and line.startswith("[") else line
