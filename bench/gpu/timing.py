"""Clocks of decoding: one run, several kinds of run in turn, and what there is time for."""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from layerskip import SamplingParams, SelfSpeculativeLM
from layerskip.cache import CachedText
from layerskip.outputs import Round
from layerskip.params import NumDraftTokens

REPEATS = 7
NO_TIME = "there was no time for it"
GREEDY = SamplingParams()


def synchronize() -> None:
    """Wait for what a GPU still has to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Decoded:
    """Sequences decoded together once.

    Attributes:
        token_ids: of each sequence, in the order of the prompts.
        first_seconds: until each had its first token.
        seconds: after that.
        rounds: records of the rounds after that, of all sequences.
        num_passes: rounds of the batch, however many sequences took part; a step without records
            only started one.
        caches: what was kept of keys and values, if asked for.
    """

    token_ids: tuple[tuple[int, ...], ...]
    first_seconds: float
    seconds: float
    rounds: tuple[Round, ...]
    num_passes: int
    caches: tuple[CachedText | None, ...]

    @property
    def num_tokens(self) -> int:
        """Emitted in ``seconds``."""
        return sum(len(r.token_ids) for r in self.rounds)

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / max(1, self.num_tokens)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0 if nothing was drafted."""
        drafted = sum(r.num_draft_tokens for r in self.rounds)
        return sum(r.num_accepted_tokens for r in self.rounds) / max(1, drafted)

    @property
    def mean_drafted(self) -> float:
        """Drafted tokens a round and sequence."""
        return sum(r.num_draft_tokens for r in self.rounds) / max(1, len(self.rounds))

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a round and sequence."""
        return self.num_tokens / max(1, len(self.rounds))


def decode(
    lm: SelfSpeculativeLM,
    prompts: Sequence[Sequence[int]],
    num_draft_tokens: NumDraftTokens,
    tokens: int,
    *,
    sampling: SamplingParams = GREEDY,
    keep: bool = False,
    until: float = float("inf"),
) -> Decoded:
    """Decode ``tokens`` of each prompt, or fewer if the clock says so.

    Args:
        keep: keys and values, too.
        until: by ``time.monotonic``: no round is begun after it.
    """
    batch = lm.open_batch(
        max_new_tokens=tokens,
        num_draft_tokens=num_draft_tokens,
        sampling=sampling,
        ignore_eos=True,
        return_cache=keep,
    )
    rows = [batch.add(prompt) for prompt in prompts]
    synchronize()
    began = time.perf_counter()
    batch.step()
    synchronize()
    first = time.perf_counter()
    rounds: list[Round] = []
    passes = 0
    while batch.unfinished and time.monotonic() < until:
        records = batch.step()
        rounds += records
        passes += bool(records)
    # The last token is here. A device that runs ahead of the host may be in a round that nobody
    # needs, which is not waited for.
    ended = time.perf_counter()
    outputs = [batch.remove(row) for row in rows]
    return Decoded(
        token_ids=tuple(out.token_ids for out in outputs),
        first_seconds=first - began,
        seconds=ended - first,
        rounds=tuple(rounds),
        num_passes=passes,
        caches=tuple(out.cache for out in outputs),
    )


@dataclass(frozen=True)
class Turns:
    """What several kinds of run gave, taken in turns.

    Attributes:
        values: of each kind, one a turn; empty if it failed, or if time ran out before.
        errors: why a kind failed.
        wanted: turns.
    """

    values: dict[str, list[float]]
    errors: dict[str, str]
    wanted: int

    @property
    def num_turns(self) -> int:
        """That every kind had which has not failed."""
        return min((len(v) for k, v in self.values.items() if k not in self.errors), default=0)

    @property
    def complete(self) -> bool:
        """Whether those were all."""
        return not self.values.keys() - self.errors.keys() or self.num_turns == self.wanted

    @property
    def extent(self) -> dict[str, Any]:
        """The same for a record."""
        return {
            "complete": self.complete,
            "turns": self.num_turns,
            "wanted_turns": self.wanted,
        }

    def median(self, kind: str) -> float:
        """NaN if there is no value."""
        values = self.values.get(kind)
        return statistics.median(values) if values else float("nan")

    def ratio(self, of: str, to: str) -> float:
        """Median of ``of / to`` within each turn; NaN if there is none."""
        pairs = zip(self.values.get(of, ()), self.values.get(to, ()), strict=False)
        ratios = [a / b for a, b in pairs]
        return statistics.median(ratios) if ratios else float("nan")

    def summary(self, kind: str, scale: float = 1.0) -> dict[str, Any]:
        """Median, lowest, highest and number of values; or the error."""
        values = [scale * value for value in self.values.get(kind, ())]
        if not values:
            return {"error": self.errors.get(kind, NO_TIME)}
        return {
            "median": statistics.median(values),
            "low": min(values),
            "high": max(values),
            "turns": len(values),
        }


def in_turns(
    kinds: Mapping[str, Callable[[], float]],
    until: float,
    *,
    repeats: int = REPEATS,
    warm_ups: Mapping[str, int] | None = None,
) -> Turns:
    """Each kind once to warm up, then every kind once a turn, in another order each time.

    A kind that fails is left out from then on. No run is begun after ``until``; a turn that is cut
    short is kept only if it is the first.

    Args:
        warm_ups: how often a kind runs to warm up, where that is not once.
    """
    errors: dict[str, str] = {}
    values: dict[str, list[float]] = {kind: [] for kind in kinds}
    times = warm_ups or {}
    _turn(kinds, [kind for kind in kinds for _ in range(times.get(kind, 1))], until, errors)
    shuffle = random.Random(0)
    for turn in range(repeats):
        found = _turn(kinds, shuffle.sample([*kinds], len(kinds)), until, errors)
        whole = found.keys() == kinds.keys() - errors.keys()
        if whole or turn == 0:
            for kind, value in found.items():
                values[kind].append(value)
        if not whole:
            break
    values |= {kind: [] for kind in errors}
    return Turns(values, errors, repeats)


def _turn(
    kinds: Mapping[str, Callable[[], float]],
    order: Sequence[str],
    until: float,
    errors: dict[str, str],
) -> dict[str, float]:
    """One run of each kind that has not failed, while there is time."""
    found: dict[str, float] = {}
    for kind in order:
        if kind not in errors and time.monotonic() < until:
            try:
                found[kind] = kinds[kind]()
            except Exception as error:  # noqa: BLE001  the other kinds can still be measured
                errors[kind] = f"{type(error).__name__}: {error}"[:400]
    return found


@contextmanager
def peak_of(device: str, found: dict[str, Any]) -> Iterator[None]:
    """Into ``found``: bytes that the body had at most above what there was, and what it kept."""
    if device != "cuda":
        yield
        found |= {"peak_bytes": None, "kept_bytes": None}  # torch counts none on a CPU
        return
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    synchronize()
    found["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    found["kept_bytes"] = torch.cuda.memory_allocated() - before
