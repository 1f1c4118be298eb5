"""How to sample: one frozen value per request."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

MAX_SEED = 2**63 - 1
MAX_NUM_DRAFT_TOKENS = 32
MAX_AUTO_DRAFT_TOKENS = 16
DEFAULT_MAX_NEW_TOKENS = 128
SMALLEST = 1e-6
LARGEST = 1e30  # scores are float32, and have to stay finite
CUTS = ("top_k", "top_p", "min_p")
# Of a draft's confidence, beside the softmax of its logits. A draft is wrong where more layers put
# another token first, and how far the next ones are behind tells that better than a probability,
# which tokens that cannot win share. Of 1, 1.5, 2, 3, 4 and the distance to the second alone 3
# tells most (bench/LOG.md, 2026-11-26).
SHARPNESS = 3.0

Verification = Literal["coupled", "token", "block"]
VERIFICATIONS: tuple[Verification, ...] = ("coupled", "token", "block")
AUTO: Literal["auto"] = "auto"
NumDraftTokens = int | Literal["auto"]


@dataclass(frozen=True)
class SamplingParams:
    """Settings of the target distribution, named as in transformers (penalties: as in vLLM).

    The rules are applied in this order: logit bias, repetition, presence and frequency penalty,
    repeated n-grams, bad words, ``min_new_tokens``, forced tokens, the request's own processors,
    temperature, top-k, top-p, min-p. Greedy decoding skips the last four.

    Attributes:
        temperature: 0.0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this; 1.0 keeps all.
        min_p: drop tokens less likely than ``min_p`` times the most likely one; 0.0 drops none.
        seed: of the Gumbel noise, 0 to 2**63 - 1. None draws one, and the output returns it.
        repetition_penalty: divides positive and multiplies negative logits of every token in
            prompt or output (Keskar et al. 2019); 1.0 does nothing.
        presence_penalty: subtracted from the logit of every token in the output, -2 to 2.
        frequency_penalty: subtracted once for each time a token is in the output, -2 to 2.
        no_repeat_ngram_size: no run of this many tokens, prompt included, comes twice; 0 is off.
        logit_bias: added to the logits of token ids; given as a mapping, kept as sorted pairs.
        bad_words_ids: token sequences that are never emitted whole, nor ended if the prompt began
            them.
        min_new_tokens: no end of sequence before this many tokens; stop strings still end.
        forced_token_ids: the output begins with these.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    forced_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0.0, math.inf)
        check_number("top_p", self.top_p, 0.0, 1.0)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_integer("top_k", self.top_k, 0)
        if self.top_p == 0.0:
            raise ValueError("top_p must be above 0 and at most 1, got 0: use temperature=0.0")
        for name, value in (("temperature", self.temperature), ("top_p", self.top_p)):
            if 0.0 < value < SMALLEST:  # float32 would make NaN of it, or keep no token at all
                raise ValueError(
                    f"{name} must be at least {SMALLEST:g}, got {value}: use temperature=0.0"
                )
        if self.temperature > LARGEST:
            raise ValueError(f"temperature must be at most {LARGEST:g}, got {self.temperature}")
        if self.seed is not None:
            check_integer("seed", self.seed, 0, MAX_SEED)
        check_number("repetition_penalty", self.repetition_penalty, SMALLEST, LARGEST)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_integer("no_repeat_ngram_size", self.no_repeat_ngram_size, 0)
        check_integer("min_new_tokens", self.min_new_tokens, 0)
        # Lists are what users write; what is kept can be hashed and not changed.
        self._keep("logit_bias", _checked_bias(self.logit_bias))
        self._keep("forced_token_ids", _checked_ids("forced_token_ids", self.forced_token_ids))
        self._keep("bad_words_ids", _checked_words(self.bad_words_ids))

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, with no chance in it."""
        return self.temperature == 0.0

    @property
    def cuts(self) -> bool:
        """Whether top-k, top-p or min-p may take tokens out of the distribution."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of what is set beside temperature, cuts and seed."""
        own = (f for f in fields(self) if f.name not in ("temperature", *CUTS, "seed"))
        return tuple(f.name for f in own if getattr(self, f.name) != f.default)

    @property
    def token_ids(self) -> frozenset[int]:
        """Every id that is named anywhere, to be checked against a vocabulary."""
        return frozenset(dict(self.logit_bias)).union(self.forced_token_ids, *self.bad_words_ids)


def check_bare(sampling: SamplingParams, what: str) -> None:
    """Raise where rules are set for what knows temperature, top-k, top-p and min-p alone."""
    if sampling.rules:
        raise ValueError(
            f"{what} samples by temperature, top_k, top_p and min_p alone; leave out "
            f"{', '.join(sampling.rules)}"
        )


def _checked_bias(value: object) -> tuple[tuple[int, float], ...]:
    items = value.items() if isinstance(value, Mapping) else value
    try:
        pairs = [(token, bias) for token, bias in items]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise TypeError(f"logit_bias must map token ids to numbers, got {value!r}") from None
    for token, bias in pairs:
        check_integer("a token id of logit_bias", token, 0)
        check_number(f"logit_bias of token {token}", bias, -LARGEST, LARGEST)
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"logit_bias must name each token id once, got {value!r}")
    return tuple(sorted(pairs))


def _checked_words(value: object) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"bad_words_ids must be a list of lists of token ids, got {value!r}")
    words = tuple(_checked_ids("each of bad_words_ids", word) for word in value)
    if not all(words):
        raise ValueError("bad_words_ids has an empty sequence; give at least one token id each")
    return words


def _checked_ids(name: str, value: object) -> tuple[int, ...]:
    # No other iterable: a set has no order, and bytes are ints too.
    if not isinstance(value, list | tuple):
        raise TypeError(f"{name} must be a list of token ids, got {value!r}")
    for token in value:
        check_integer(f"a token id of {name}", token, 0)
    return tuple(value)


def following_seed(seed: int, index: int) -> int:
    """Of the i-th request behind one: ``seed + i``, or behind the largest seed from 0 on."""
    return (seed + index) % (MAX_SEED + 1)


def most_draft_tokens(num_draft_tokens: NumDraftTokens) -> int:
    """What a round may draft at most, and so the slots that it needs."""
    return MAX_AUTO_DRAFT_TOKENS if isinstance(num_draft_tokens, str) else num_draft_tokens


def read_num_draft_tokens(text: str) -> NumDraftTokens:
    """Of an option: "auto" or a number; ``ValueError`` of anything else."""
    return AUTO if text.strip() == AUTO else int(text)


def check_num_draft_tokens(value: object) -> None:
    """Raise unless ``value`` is "auto" or a number of tokens that can be drafted in a round."""
    if isinstance(value, str):
        if value != AUTO:
            raise ValueError(
                f"num_draft_tokens must be 'auto' or between 0 and {MAX_NUM_DRAFT_TOKENS}, "
                f"got {value!r}"
            )
        return
    check_integer("num_draft_tokens", value, 0, MAX_NUM_DRAFT_TOKENS)


def check_sampling(value: object, *, optional: bool = True) -> None:
    """Raise unless ``value`` is SamplingParams, or None where that means a default."""
    if value is None and optional:
        return
    if not isinstance(value, SamplingParams):
        left_out = ": leave it out" if value is None else ""
        raise TypeError(f"sampling must be SamplingParams, got {type(value).__name__}{left_out}")


def check_labels(labels: Mapping[str, str]) -> None:
    """Raise unless it maps texts to texts that can be written down."""
    if not isinstance(labels, Mapping) or not all(
        isinstance(part, str) for pair in labels.items() for part in pair
    ):
        raise TypeError(
            f"labels must map names to texts, such as {{'task': 'code'}}, got {labels!r}"
        )
    for text in (part for pair in labels.items() for part in pair):
        try:
            text.encode()
        except UnicodeEncodeError:  # no page of metrics that had it could be sent
            raise ValueError(
                f"labels must be valid Unicode, got half of a surrogate pair in {text!r}; "
                "leave it out"
            ) from None


def check_verification(value: object) -> None:
    """Raise unless ``value`` names a way of verifying."""
    if value not in VERIFICATIONS:
        allowed = ", ".join(repr(v) for v in VERIFICATIONS)
        raise ValueError(f"verification must be one of {allowed}, got {value!r}")


def check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise unless ``value`` is an int (bool is not) in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {allowed}, got {value}")


def check_text(name: str, value: object) -> None:
    """Raise unless ``value`` is a str without half a surrogate pair, which no tokenizer takes."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be text, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode: {error}") from None


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Raise unless ``value`` is a finite int or float in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    finite = abs(value) <= sys.float_info.max  # of an int without a float too, and not of NaN
    if not finite or not low <= value <= high:
        allowed = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise ValueError(f"{name} must be finite and {allowed}, got {value}")
