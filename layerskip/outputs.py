"""What decoding returns. Stats, streams and telemetry are all made of ``Round``."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from layerskip.metrics import speculative_metrics

if TYPE_CHECKING:
    from layerskip.cache import CachedText

FinishReason = Literal["stop", "length", "cancelled"]
Origin = Literal["prefill", "plain", "accepted", "recovered", "bonus"]
Drafter = Literal["none", "early_exit", "lookup"]
Mode = Literal["prefill", "plain", "early_exit", "lookup"]
StopReason = Literal["", "number", "confidence", "cost", "end"]


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of an emitted token under the full model, before any processor.

    Attributes:
        token_id: the token.
        logprob: natural logarithm of its probability at temperature 1.
        top: the likeliest (token id, logprob) pairs at its position, as many as asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Round:
    """What one round did for one row.

    Attributes:
        row: id that ``Batch.add`` returned.
        index: 0 for the prefill (which emits one token), then 1, 2, ...
        token_ids: tokens emitted, after any cut at an end of sequence or stop string.
        text: text that became final in this round.
        num_draft_tokens: tokens drafted.
        num_accepted_tokens: drafted tokens that were emitted.
        origin: of the last token of the uncut block; every token before it was accepted.
        draft_seconds, verify_seconds: wall time of the round's two phases. Shared by all rows of
            a batch, but that verify ends when a row's own text is found; for the prefill,
            ``verify_seconds`` is its time.
        positions: (token, position) pairs that went through layer 0, spare rows not counted.
        finish_reason: None while the row goes on.
        logprobs: of ``token_ids``, if asked for.
        drafter: where the drafted tokens came from.
        num_draft_passes: that the row took part in; fewer than its drafted tokens where looked-up
            tokens were right.
        num_lookup_tokens: drafted tokens that no pass drafted or confirmed: all that a look-up
            drafted, or the last ones behind an early exit's.
        chances: what the chance of acceptance of each token that an early exit drafted was thought
            to be, if every token before it was accepted; with ``num_draft_tokens="auto"`` only, and
            where the host drives rounds.
        confidences: what spoke for each drafted token when it was drafted, 0 to 1: how far ahead of
            others the draft had it (token and block verification: its probability there), where the
            host drives rounds, and with a fixed number where ``on_round`` listens; or of looked-up
            tokens the length of their match.
        stopped: why the draft went no further: it had the "number" of tokens that was to be
            drafted, the next one's "confidence" was too low, its draft pass would have had more
            "cost" than gain for the rows that went on or beside what was looked up in its place, or
            nothing can follow ("end"). "" where nothing was drafted.
        num_uncovered_tokens: emitted tokens that are not in the draft vocabulary, if there is one.
        request_id: of the row's request, unique in the process if none was given.
        labels: of the request, as given.
        rows: that shared the round's passes; 1 for a prefill.
        context: committed slots of the row before the round.
        exit_layer: leading layers that drafted; None where no early exit did, or one that skips.
        sample_seconds: part of ``verify_seconds`` that choosing tokens took, of all rows.
        elapsed_seconds: wall time since the request joined, at the end of the round.
    """

    row: int
    index: int
    token_ids: tuple[int, ...]
    text: str
    num_draft_tokens: int
    num_accepted_tokens: int
    origin: Origin
    draft_seconds: float
    verify_seconds: float
    positions: int
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    drafter: Drafter = "none"
    num_draft_passes: int = 0
    num_lookup_tokens: int = 0
    chances: tuple[float, ...] = ()
    confidences: tuple[float, ...] = ()
    stopped: StopReason = ""
    num_uncovered_tokens: int = 0
    request_id: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    rows: int = 1
    context: int = 0
    exit_layer: int | None = None
    sample_seconds: float = 0.0
    elapsed_seconds: float = 0.0

    @property
    def mode(self) -> Mode:
        """What kind of round it was."""
        if self.index == 0:
            return "prefill"
        return "plain" if self.drafter == "none" else self.drafter

    @property
    def num_rejected_tokens(self) -> int:
        """Drafted tokens that were not emitted: their positions are decoded again."""
        return self.num_draft_tokens - self.num_accepted_tokens

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON: counts, chances and times, nothing of the text itself."""
        return {
            "request_id": self.request_id,
            "labels": dict(self.labels),
            "index": self.index,
            "mode": self.mode,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_emitted_tokens": len(self.token_ids),
            "num_rejected_tokens": self.num_rejected_tokens,
            "num_draft_passes": self.num_draft_passes,
            "num_lookup_tokens": self.num_lookup_tokens,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "sample_seconds": self.sample_seconds,
            "elapsed_seconds": self.elapsed_seconds,
            "rows": self.rows,
            "context": self.context,
            "exit_layer": self.exit_layer,
            "stopped": self.stopped,
            "chances": [round(chance, 4) for chance in self.chances],
            "confidences": [round(confidence, 4) for confidence in self.confidences],
            "origin": self.origin,
            "finish_reason": self.finish_reason,
        }

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Where each of ``token_ids`` came from."""
        accepted = self.num_accepted_tokens
        return tuple(
            "accepted" if i < accepted else self.origin for i in range(len(self.token_ids))
        )


@dataclass(frozen=True)
class DecodeStats:
    """Counts and times of one generation, or of ``num_requests``; definitions as in vLLM.

    ``cached_tokens`` of the ``prompt_tokens`` were taken from a returned cache. Of ``num_rounds``,
    ``num_plain_rounds`` drafted nothing and ``num_lookup_rounds`` drafted looked-up tokens alone.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_plain_rounds: int = 0
    num_lookup_rounds: int = 0
    num_draft_passes: int = 0
    num_uncovered_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    kv_cache_bytes: int = 0
    positions_through_first_layer: int = 0
    num_requests: int = 1

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0 if nothing was drafted."""
        return self.num_accepted_tokens / max(1, self.num_draft_tokens)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted per round: 1 + accepted / rounds."""
        return 1.0 + self.num_accepted_tokens / max(1, self.num_rounds)

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: tokens after each request's first, over the time after the prefills."""
        later = self.new_tokens - self.num_requests
        return max(0, later) / self.decode_seconds if self.decode_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Fields and derived figures, ready for JSON."""
        return asdict(self) | {
            "acceptance_rate": self.acceptance_rate,
            "mean_accepted_length": self.mean_accepted_length,
            "tokens_per_second": self.tokens_per_second,
        }

    @classmethod
    def merge(cls, parts: Iterable["DecodeStats"]) -> "DecodeStats":
        """Field-wise sums, of requests decoded one after another: rows of a batch share their
        rounds' seconds. Cache bytes are the largest."""
        parts = list(parts)
        if not parts:
            return cls(num_requests=0)
        sums = {f.name: sum(getattr(part, f.name) for part in parts) for f in fields(cls)}
        sums["kv_cache_bytes"] = max(part.kv_cache_bytes for part in parts)
        return cls(**sums)

    @classmethod
    def from_rounds(
        cls,
        rounds: Iterable[Round],
        *,
        prompt_tokens: int,
        kv_cache_bytes: int,
        cached_tokens: int = 0,
    ) -> "DecodeStats":
        """Sum up one row's rounds, its prefill among them."""
        rounds = list(rounds)
        prefills = [r for r in rounds if r.index == 0]
        decoded = [r for r in rounds if r.index > 0]
        return cls(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            new_tokens=sum(len(r.token_ids) for r in rounds),
            num_rounds=len(decoded),
            num_draft_tokens=sum(r.num_draft_tokens for r in decoded),
            num_accepted_tokens=sum(r.num_accepted_tokens for r in decoded),
            num_plain_rounds=sum(r.num_draft_tokens == 0 for r in decoded),
            num_lookup_rounds=sum(r.drafter == "lookup" for r in decoded),
            num_draft_passes=sum(r.num_draft_passes for r in decoded),
            num_uncovered_tokens=sum(r.num_uncovered_tokens for r in rounds),
            prefill_seconds=sum(r.verify_seconds for r in prefills),
            decode_seconds=sum(r.draft_seconds + r.verify_seconds for r in decoded),
            kv_cache_bytes=kv_cache_bytes,
            positions_through_first_layer=sum(r.positions for r in rounds),
        )


@dataclass(frozen=True)
class GenerationOutput:
    """One finished generation.

    Attributes:
        text: decoded continuation, without special tokens and end of sequence, and cut before a
            stop string; of a cancelled row what was final by then. "" if there is no tokenizer.
            Blanks are as in the tokens, whatever ``clean_up_tokenization_spaces`` says.
        token_ids: emitted ids, those of an end of sequence or stop string included.
        finish_reason: "stop" (end of sequence, stop string, a grammar's end, or a criterion of
            transformers), "length", or "cancelled" (removed before its end).
        seed: of the sampling noise; the same seed gives the same text, but for "auto" drafts under
            token and block verification. None when greedy.
        stats: counts and times.
        rounds: the records that ``stats`` sums up.
        cache: keys and values of prompt and output, if asked for, to go on from; not once the
            output has been pickled, which leaves them of no model.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    seed: int | None
    stats: DecodeStats
    rounds: tuple[Round, ...]
    cache: "CachedText | None" = field(default=None, repr=False, compare=False)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """One for each of ``token_ids``; empty if they were not asked for."""
        return tuple(entry for r in self.rounds for entry in r.logprobs)

    @property
    def metrics(self) -> dict[str, Any]:
        """``speculative_decoding``: acceptance as vLLM reports it for a request."""
        judged = [(r.num_draft_tokens, r.num_accepted_tokens) for r in self.rounds if r.index]
        return {"speculative_decoding": speculative_metrics(judged)}

    def to_dict(self) -> dict[str, Any]:
        """As ``layerskip generate --json`` prints it."""
        document = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "stats": self.stats.to_dict(),
            "metrics": self.metrics,
        }
        return document | (
            {"logprobs": [asdict(entry) for entry in self.logprobs]} if self.logprobs else {}
        )


def acceptance_by_position(rounds: Iterable[Round]) -> tuple[float, ...]:
    """Share of the first, second, ... drafted token that is accepted after accepted ones.

    Rounds that a text ends in are left out: they may be cut before what was accepted.
    """
    whole = [r for r in rounds if r.finish_reason is None]
    shares: list[float] = []
    for i in range(max((r.num_draft_tokens for r in whole), default=0)):
        judged = [r for r in whole if r.num_draft_tokens > i and r.num_accepted_tokens >= i]
        if not judged:
            break
        shares.append(sum(r.num_accepted_tokens > i for r in judged) / len(judged))
    return tuple(shares)
