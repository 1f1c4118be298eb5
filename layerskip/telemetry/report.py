"""What a run's records say of speculation, by bucket: the values that reports are made of.

``layerskip.telemetry.aggregation`` computes them; decisions and pages only read. "On" is the arm
that drafts, "off" the arm that never does. Definitions by round are vLLM's: a round that drafted
nothing is no draft, and is left out of acceptance.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

from layerskip.bootstrap import LEAST_PROMPTS
from layerskip.telemetry.buckets import Bucket
from layerskip.telemetry.drift import Drift

ENOUGH_REQUESTS = 500  # a p10 of 500 still lies anywhere from the 7.4 to the 12.6 %
REPORT_VERSION = 1


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % bootstrap interval; what is drawn again are whole requests (or
    prompts, where two arms are compared), for rounds of one request are alike.

    Attributes:
        value: measured.
        low, high: of the interval; of ``too_few`` requests it holds less than 95 %.
        count: of the requests.
    """

    value: float
    low: float
    high: float
    count: int

    @property
    def too_few(self) -> bool:
        """Whether 95 % cannot be said."""
        return self.count < LEAST_PROMPTS


@dataclass(frozen=True)
class Distribution:
    """How a quantity is spread.

    Attributes:
        count: of what was measured: rounds or requests.
        mean: of them.
        quantiles: 101 values, at 0, 1, ..., 100 %: the curve of the CDF, ready to be plotted
            against ``range(101)``. Between two values linear, but counts of tokens stay whole.
    """

    count: int
    mean: float
    quantiles: tuple[float, ...] = field(repr=False)

    def at(self, percent: int) -> float:
        """The quantile at so many percent."""
        return self.quantiles[percent]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON: the named quantiles, without the curve."""
        named = {f"p{p}": self.quantiles[p] for p in (10, 50, 90, 99)}
        return {"count": self.count, "mean": self.mean, **named}


@dataclass(frozen=True)
class Position:
    """Acceptance of one draft position, the first being 1.

    Attributes:
        position: of the token in its draft.
        drafts: rounds that drafted anything.
        drafted: rounds that drafted this position.
        reached: of these, rounds that judged it, its predecessors being accepted.
        accepted: of these, rounds that accepted it.
    """

    position: int
    drafts: int
    drafted: int
    reached: int
    accepted: int

    @property
    def survival(self) -> float:
        """vLLM's rate per position: of all drafts, the share that accepted this position."""
        return self.accepted / max(1, self.drafts)

    @property
    def conditional(self) -> float:
        """Of the drafts that got here, the share that got further: the a_i of E(k)."""
        return self.accepted / max(1, self.reached)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON, with both rates."""
        return asdict(self) | {"survival": self.survival, "conditional": self.conditional}


@dataclass(frozen=True)
class Latency:
    """What one arm's requests waited, in seconds.

    Attributes:
        ttft: until the first token, by request.
        per_token: between emitted tokens after the first, on a request's average, by request; of
            requests with two tokens or more.
        end_to_end: until the last token, by request.
        burst: of a round, which emits its tokens together: drafting and verifying; by round,
            quantiles exact to 0.3 %.
        tokens_per_second: all tokens after the first ones, over all seconds after them; None of
            requests of one token.
    """

    ttft: Distribution
    per_token: Distribution | None
    end_to_end: Distribution
    burst: Distribution | None
    tokens_per_second: float | None


@dataclass(frozen=True)
class Paired:
    """The same prompts with drafting on and off: on / off, below 1 where drafting is faster.

    Attributes:
        num_prompts: that both arms finished.
        num_identical: of these, prompts whose two outputs have the same tokens.
        end_to_end: median of the ratios of prompts, until the last token.
        ttft: median of the ratios of prompts, until the first token.
        p90: the 90 % quantile of the time until the last token, on / off.
        slowest_decile: mean time until the last token of the slowest tenth of the requests with
            drafting, over that of the slowest tenth without.
        worst_decile: of the tenth of the prompts whose drafts gained least (by ``gain``, which
            knows no clock; else by accepted tokens a draft): all seconds on / off. What they pay.
        ratios: of prompts, until the last token.
    """

    num_prompts: int
    num_identical: int
    end_to_end: Estimate
    ttft: Estimate
    p90: Estimate
    slowest_decile: Estimate
    worst_decile: Estimate
    ratios: Distribution


@dataclass(frozen=True)
class Inequality:
    """Whether drafting pays, ``a > 1 + alpha + beta``, in units of a plain pass of the cost table.

    That is right if ``a`` counts the token that every round emits by itself (bonus or recovered),
    and ``alpha`` is the whole draft phase. Over rounds that drafted; those that did not cost 1 and
    emit 1, and change no sign.

    Attributes:
        c: one draft pass, at the mean context.
        draft_passes: mean number in a round; where nothing is looked up: of drafted tokens.
        beta: verifying beyond a plain pass, averaged over the numbers of drafted tokens.
        emitted: tokens a round, the bonus or recovered one counted.
        accepted: tokens a round without it.
        verify: passes over 1, 2, 3, ... tokens, at the mean context.
        gain: by request, over all its rounds: the time of a plain pass for each token emitted, over
            that of the passes run, each at its own context. What the inequality says of one
            request: above 1 drafting pays, 1 if nothing was drafted.
        clock_alpha, clock_beta: what draft phases took, and verify phases beyond the off arm's,
            in units of the off arm's mean round; None without that arm.
    """

    c: float
    draft_passes: float
    beta: float
    emitted: Estimate
    accepted: Estimate
    verify: tuple[float, ...]
    gain: Distribution
    clock_alpha: float | None = None
    clock_beta: float | None = None

    @property
    def alpha(self) -> float:
        """The whole draft phase."""
        return self.draft_passes * self.c

    @property
    def threshold(self) -> float:
        """What ``a`` has to exceed."""
        return 1.0 + self.alpha + self.beta

    @property
    def margin(self) -> float:
        """Bonus counted: drafting pays, on the mean, where this is positive."""
        return self.emitted.value - self.threshold

    @property
    def margin_without_bonus(self) -> float:
        """Bonus not counted: one whole token too strict."""
        return self.accepted.value - self.threshold

    @property
    def predicted_speed(self) -> float:
        """Of rounds that draft, over plain ones: emitted / (1 + alpha + beta)."""
        return self.emitted.value / self.threshold

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON, with what follows from the fields."""
        derived = ("alpha", "threshold", "margin", "margin_without_bonus", "predicted_speed")
        return _document(self) | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True)
class BucketReport:
    """What is known of one bucket. Where an arm or the cost table is missing: None.

    Attributes:
        bucket: which requests.
        num_requests: finished with drafting on.
        num_plain_requests: finished with drafting off.
        num_rounds: of the former, prefills not counted.
        num_drafts: rounds that drafted anything.
        mean_context: slots held when these began.
        accepted_per_round: drafted tokens that were emitted, by draft.
        accepted_per_request: a request's mean of these; of requests that drafted anything.
        mean_accepted: of all drafts, with its interval.
        positions: acceptance by draft position.
        worst_positions: the same, of the tenth of the requests that gained least.
        accepted_counts: drafts that accepted 0, 1, 2, ... tokens: the histogram.
        drafted_counts: rounds that drafted 0, 1, 2, ... tokens.
        modes: rounds by mode: "plain", "early_exit", "lookup".
        stops: drafts by why they ended: "number", "confidence", "cost", "end".
        on, off: latency of the arms.
        paired: the arms on the same prompts.
        inequality: whether drafting pays, by counts and the cost table.
    """

    bucket: Bucket
    num_requests: int = 0
    num_plain_requests: int = 0
    num_rounds: int = 0
    num_drafts: int = 0
    mean_context: float = 0.0
    accepted_per_round: Distribution | None = None
    accepted_per_request: Distribution | None = None
    mean_accepted: Estimate | None = None
    positions: tuple[Position, ...] = ()
    worst_positions: tuple[Position, ...] = ()
    accepted_counts: tuple[int, ...] = ()
    drafted_counts: tuple[int, ...] = ()
    modes: Mapping[str, int] = field(default_factory=dict)
    stops: Mapping[str, int] = field(default_factory=dict)
    on: Latency | None = None
    off: Latency | None = None
    paired: Paired | None = None
    inequality: Inequality | None = None

    @property
    def few(self) -> bool:
        """Whether quantiles are rough: fewer than 500 requests."""
        return self.num_requests < ENOUGH_REQUESTS

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON, with what follows from the fields."""
        return _document(self) | {"name": self.bucket.name, "few": self.few}


@dataclass(frozen=True)
class AcceptanceReport:
    """What a runs folder says of drafting on against off.

    Attributes:
        model: that was measured.
        arm: "on": the ``num_draft_tokens`` that the other figures are of.
        label: name of the field that tells tasks apart; None: nothing does.
        prompt_edges, output_edges: of the buckets, in tokens.
        buckets: task x prompt length x output length, in this order; those with requests.
        routes: the same over all output lengths: what a policy can tell apart, for nobody knows
            a request's output length when it arrives.
        total: everything together.
        num_ignored_rounds: of requests that never finished: of a run that was killed.
        drift: whether acceptance shifted while it was measured, by task; alarms are sentences for
            ``str``.
        measured: what was run: prompts, sampling, seed, versions, machine; ready for JSON.
        unread_costs: version of the cost table that was recorded, where this layerskip reads
            another one; the inequality is not known then.
    """

    model: str
    arm: str
    label: str | None
    prompt_edges: tuple[int, ...]
    output_edges: tuple[int, ...]
    buckets: tuple[BucketReport, ...]
    routes: tuple[BucketReport, ...]
    total: BucketReport
    num_ignored_rounds: int = 0
    drift: Drift | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)
    unread_costs: int | None = None

    @property
    def cautions(self) -> list[str]:
        """What a reader has to know before believing the figures, in sentences."""
        total, pair, cautions = self.total, self.total.paired, []
        if not total.num_requests:
            cautions.append("no request was finished with drafting on.")
        if self.unread_costs is not None:
            cautions.append(
                f"the recorded costs are of version {self.unread_costs}, which this layerskip does "
                "not read, so the inequality is not known: measure again for it."
            )
        elif total.inequality is None:
            why = "no costs were recorded" if total.num_drafts else "nothing was drafted"
            cautions.append(f"{why}, so the inequality is not known.")
        if pair is None:
            cautions.append(
                "no prompt was finished both with drafting and without, so no times are compared."
            )
        elif pair.num_identical < pair.num_prompts:
            cautions.append(
                f"{pair.num_prompts - pair.num_identical} of {pair.num_prompts} prompts have other "
                "tokens with drafting than without."
            )
        few = sum(bucket.few for bucket in self.buckets)
        if few:
            cautions.append(
                f"{few} of {len(self.buckets)} buckets have under {ENOUGH_REQUESTS} requests: "
                "their outer quantiles are rough."
            )
        if self.num_ignored_rounds:
            cautions.append(
                f"{self.num_ignored_rounds} rounds of requests that never finished are left out."
            )
        return cautions

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; curves are left out, their named quantiles stay."""
        document = {"version": REPORT_VERSION, **_document(self)}
        if self.drift is not None:
            del document["drift"]["paths"]
        return document


def _document(value: Any) -> dict[str, Any]:
    return {f.name: _ready(getattr(value, f.name)) for f in fields(value)}


def _ready(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value):
        return _document(value)
    if isinstance(value, tuple):
        return [_ready(v) for v in value]
    if isinstance(value, Mapping):
        return {name: _ready(v) for name, v in value.items()}
    return value
