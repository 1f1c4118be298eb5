"""What an A/B test found: both arms' times, their ratios and how sure they are."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any, Literal

import numpy as np

from layerskip.bootstrap import LEAST_PROMPTS, Places, Values, expanded_interval

Side = Literal["a", "b"]
SIDES: tuple[Side, Side] = ("a", "b")
MOST_NAMED = 5  # differences


@dataclass(frozen=True)
class Run:
    """One request decoded once.

    Attributes:
        token_ids: emitted.
        first_seconds: wall time until the first token.
        seconds: wall time until the last one.
    """

    token_ids: tuple[int, ...]
    first_seconds: float
    seconds: float

    @property
    def per_token(self) -> float | None:
        """Seconds a token after the first; None where there is none."""
        more = len(self.token_ids) - 1
        return (self.seconds - self.first_seconds) / more if more > 0 else None


@dataclass(frozen=True)
class Pair:
    """One prompt in both arms, as often as asked for.

    Attributes:
        index: of the request.
        a, b: the runs; the i-th of both came one after the other.
    """

    index: int
    a: tuple[Run, ...]
    b: tuple[Run, ...]

    @property
    def differs_at(self) -> int | None:
        """First position at which two runs have not the same token; None if all are equal."""
        tokens = zip_longest(*(run.token_ids for run in (*self.a, *self.b)))
        return next((i for i, each in enumerate(tokens) if len(set(each)) > 1), None)

    def speedup(self, seconds: Callable[[Run], float | None]) -> float | None:
        """How many times faster b was, the median of the repeats."""
        both = [(seconds(a), seconds(b)) for a, b in zip(self.a, self.b, strict=True)]
        ratios = [a / b for a, b in both if a is not None and b is not None]
        return statistics.median(ratios) if ratios else None


@dataclass(frozen=True)
class Speedup:
    """How many times faster b is than a: above 1, b is.

    Attributes:
        value: measured.
        low, high: 95 % bootstrap interval over prompts; None if they are too few.
    """

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def faster(self) -> Side | None:
        """Which side; None where the interval covers 1, or there is none."""
        if self.low is None or self.high is None or self.low <= 1.0 <= self.high:
            return None
        return "b" if self.low > 1.0 else "a"


@dataclass(frozen=True)
class ArmSummary:
    """What one arm's requests took, in seconds; of repeats of a prompt the median counts.

    Attributes:
        ttft_p50, ttft_p90: until the first token.
        end_to_end_p50, end_to_end_p90: until the last token.
        per_token_p50, per_token_p90: a token after the first; None if no output has two.
        tokens_per_second: all tokens over all seconds.
    """

    ttft_p50: float
    ttft_p90: float
    end_to_end_p50: float
    end_to_end_p90: float
    per_token_p50: float | None
    per_token_p90: float | None
    tokens_per_second: float


@dataclass(frozen=True)
class ABResult:
    """Two arms on the same prompts.

    Attributes:
        a, b: names of the arms.
        pairs: the prompts that both arms decoded.
        left_out: reasons why requests were not decoded, by their index.
        interrupted: whether there were more to come.
        inexact: why tokens may differ, where the decoder does not promise that they are equal.
    """

    a: str
    b: str
    pairs: tuple[Pair, ...]
    left_out: Mapping[int, str] = field(default_factory=dict)
    interrupted: bool = False
    inexact: str = ""

    @cached_property
    def end_to_end(self) -> Speedup:
        """Time until the last token: the median of the prompts' ratios."""
        found = _median_speedup(self.pairs, lambda run: run.seconds)
        assert found is not None
        return found

    @cached_property
    def per_token(self) -> Speedup | None:
        """The same of the time a token after the first; None if no output has two."""
        return _median_speedup(self.pairs, lambda run: run.per_token)

    @cached_property
    def tokens_per_second(self) -> Speedup:
        """Ratio of all tokens over all seconds: long outputs count for more."""
        return _throughput_ratio(self.pairs)

    @cached_property
    def summaries(self) -> dict[Side, ArmSummary]:
        """What the requests of each arm took."""
        return {"a": _summary([p.a for p in self.pairs]), "b": _summary([p.b for p in self.pairs])}

    @property
    def differences(self) -> dict[int, int]:
        """Prompts whose tokens are not the same in all runs, with the first such position."""
        places = ((pair.index, pair.differs_at) for pair in self.pairs)
        return {index: place for index, place in places if place is not None}

    @property
    def equal_share(self) -> float:
        """Of the prompts, those whose tokens are the same in all runs."""
        return 1.0 - len(self.differences) / len(self.pairs)

    @property
    def winner(self) -> Side | None:
        """Who is faster end to end, unless that is not sure, or throughput says the opposite."""
        faster = self.end_to_end.faster
        return None if self.tokens_per_second.faster not in (None, faster) else faster

    @property
    def verdict(self) -> str:
        """The winner in a sentence, or why there is none."""
        ratio, names = self.end_to_end, {"a": f"a ({self.a})", "b": f"b ({self.b})"}
        one = len(self.pairs) == 1
        prompts = f"{len(self.pairs)} prompt" + "s" * (not one)
        if ratio.low is None or ratio.high is None:
            are = "is" if one else "are"
            return f"no winner: {prompts} {are} too few to tell; give {LEAST_PROMPTS} or more"
        interval = f"{ratio.low:.3f} to {ratio.high:.3f}"
        if ratio.faster is None:
            return (
                f"no winner: the 95 % interval of a's time over b's, {interval} over {prompts}, "
                "covers 1"
            )
        if self.winner is None:
            return (
                f"no winner: {names[ratio.faster]} is faster on the median prompt, "
                f"{names['b' if ratio.faster == 'a' else 'a']} over all tokens"
            )
        times = ratio.value if self.winner == "b" else 1 / ratio.value
        other = names["a" if self.winner == "b" else "b"]
        return (
            f"{names[self.winner]} is {times:.2f} times as fast as {other} end to end "
            f"(a's time over b's: 95 % interval {interval} over {prompts})"
        )

    @property
    def equality(self) -> str:
        """In a sentence, whether the arms wrote the same."""
        if not self.differences:
            prompts = "the prompt" if len(self.pairs) == 1 else f"all {len(self.pairs)} prompts"
            return f"the tokens of {prompts} are equal"
        said = ", ".join(
            f"line {i + 1} (from token {at})"
            for i, at in list(self.differences.items())[:MOST_NAMED]
        )
        why = self.inexact or "they must not: please report it"
        more = ", ..." if len(self.differences) > MOST_NAMED else ""
        return (
            f"TOKENS DIFFER on {len(self.differences)} of {len(self.pairs)} prompts: "
            f"{said}{more}; {why}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; of the outputs only how they compare and what they took."""
        return {
            "a": self.a,
            "b": self.b,
            "prompts": len(self.pairs),
            "repeats": len(self.pairs[0].a),
            "left_out": {str(index): why for index, why in self.left_out.items()},
            "interrupted": self.interrupted,
            "speedup": {
                "end_to_end": asdict(self.end_to_end),
                "per_token": None if self.per_token is None else asdict(self.per_token),
                "tokens_per_second": asdict(self.tokens_per_second),
            },
            "arms": {side: asdict(summary) for side, summary in self.summaries.items()},
            "winner": self.winner,
            "verdict": self.verdict,
            "equal_share": self.equal_share,
            "differences": {str(index): at for index, at in self.differences.items()},
            "equality": self.equality,
            "pairs": [
                {
                    "index": pair.index,
                    "new_tokens": len(pair.a[0].token_ids),
                    **{f"{s}_seconds": [run.seconds for run in getattr(pair, s)] for s in SIDES},
                }
                for pair in self.pairs
            ],
        }


def _median_speedup(
    pairs: Sequence[Pair], seconds: Callable[[Run], float | None]
) -> Speedup | None:
    found = [ratio for pair in pairs if (ratio := pair.speedup(seconds)) is not None]
    if not found:
        return None
    logs = np.log(found)

    def medians(places: Places) -> Values:
        return np.exp(np.median(logs[places], axis=1))

    return _speedup(float(np.exp(np.median(logs))), medians, len(found))


def _throughput_ratio(pairs: Sequence[Pair]) -> Speedup:
    sums = {
        side: np.array(
            [
                (sum(len(r.token_ids) for r in runs), sum(r.seconds for r in runs))
                for runs in (getattr(pair, side) for pair in pairs)
            ]
        )
        for side in SIDES
    }

    def speeds(side: Side, places: Places) -> Values:
        tokens, seconds = (sums[side][:, i][places].sum(axis=1) for i in (0, 1))
        return tokens / seconds

    def ratios(places: Places) -> Values:
        return speeds("b", places) / speeds("a", places)

    both = sums["a"][:, 1] + sums["b"][:, 1]
    worth = both.sum() ** 2 / (both**2).sum()  # prompts of one length that would say as much
    value = float(ratios(np.arange(len(pairs))[None])[0])
    return _speedup(value, ratios, len(pairs), float(worth))


def _speedup(
    value: float, statistic: Callable[[Places], Values], count: int, worth: float | None = None
) -> Speedup:
    if count < LEAST_PROMPTS:
        return Speedup(value)
    return Speedup(value, *expanded_interval(statistic, count, worth))


def _summary(prompts: Sequence[Sequence[Run]]) -> ArmSummary:
    def quantiles(seconds: Callable[[Run], float | None]) -> tuple[Any, Any]:
        values = [[s for run in runs if (s := seconds(run)) is not None] for runs in prompts]
        medians = [statistics.median(each) for each in values if each]
        if not medians:
            return None, None
        return float(np.quantile(medians, 0.5)), float(np.quantile(medians, 0.9))

    runs = [run for each in prompts for run in each]
    return ArmSummary(
        *quantiles(lambda run: run.first_seconds),
        *quantiles(lambda run: run.seconds),
        *quantiles(lambda run: run.per_token),
        sum(len(run.token_ids) for run in runs) / sum(run.seconds for run in runs),
    )
