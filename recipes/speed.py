"""What self-speculative decoding takes against plain decoding, on the same prompts, in turn."""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from layerskip import DecodeStats, Round, SamplingParams, SelfSpeculativeLM
from layerskip.bootstrap import bootstrap_interval
from layerskip.compare import repeated_share
from layerskip.outputs import acceptance_by_position
from layerskip.params import NumDraftTokens

NAN = math.nan
MAX_REPEATED = 0.2  # prompts whose plain output repeats more of its 8-grams are left out


@dataclass(frozen=True)
class SpeedReport:
    """Self-speculative decoding against plain decoding of the same prompts, in turn.

    Attributes:
        temperature: 0 is greedy.
        num_draft_tokens: a number a round, or "auto".
        speedup, interval: median over prompts of the paired ratio of wall times after the first
            token, and its 95 % bootstrap interval.
        cpu_speedup, cpu_interval: the same of the process's CPU time.
        acceptance_rate, mean_accepted_length: of all rounds.
        by_position: as in ``ExitScores``, of real rounds.
        prompts, left_out: counted, and left out since their plain output loops. If none is left,
            times and rates are not numbers (nan).
        new_tokens: of plain decoding.
        repeated_share: repeated 8-grams of what was counted.
    """

    temperature: float
    num_draft_tokens: NumDraftTokens
    speedup: float
    interval: tuple[float, float]
    cpu_speedup: float
    cpu_interval: tuple[float, float]
    acceptance_rate: float
    mean_accepted_length: float
    by_position: tuple[float, ...]
    prompts: int
    left_out: int
    new_tokens: int
    repeated_share: float

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; what is not known is None."""
        return {name: _known(value) for name, value in asdict(self).items()}


def _known(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_known(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def measure_speeds(
    lm: SelfSpeculativeLM,
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[NumDraftTokens],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int = 0,
) -> tuple[SpeedReport, ...]:
    """Decode each prompt plainly and self-speculatively, in random order; all give the same tokens.

    ``lm`` made with ``lookup=False`` measures the exit alone.

    Args:
        prompts: token ids, such as ``data.prompts`` gives.
        numbers: of draft tokens: each gets a report.
        max_new_tokens: of each prompt; ends of sequence are passed over.

    Raises:
        ValueError: there are no prompts, or a number is 0 or there twice.
        RuntimeError: an output is not plain decoding's.
    """
    if not prompts:
        raise ValueError("there are no prompts to measure on")
    if 0 in numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"numbers of draft tokens must differ and not be 0, got {list(numbers)}")
    sampling = SamplingParams(temperature=temperature, seed=seed if temperature else None)
    order, modes = random.Random(seed), [0, *numbers]
    decode = partial(_decode, lm, max_new_tokens=max_new_tokens, sampling=sampling)
    runs: dict[NumDraftTokens, list[_Decoded]] = {mode: [] for mode in modes}
    for prompt in prompts:
        plain = decode(prompt, 0)
        if len(plain.token_ids) < 3 or repeated_share([plain.token_ids]) > MAX_REPEATED:
            continue
        for mode in numbers if not runs[0] else ():
            decode(prompt, mode)  # a mode's first call allocates
        for mode in order.sample(modes, len(modes)):
            runs[mode].append(_same(decode(prompt, mode), plain))
    left_out = len(prompts) - len(runs[0])
    return tuple(_report(temperature, n, runs[n], runs[0], left_out) for n in numbers)


@dataclass(frozen=True)
class _Decoded:
    """One prompt decoded once: clocks run from its first token on."""

    token_ids: tuple[int, ...]
    wall: float
    cpu: float
    rounds: tuple[Round, ...]


def _decode(
    lm: SelfSpeculativeLM,
    prompt: Sequence[int],
    num_draft_tokens: NumDraftTokens,
    *,
    max_new_tokens: int,
    sampling: SamplingParams,
) -> _Decoded:
    stream = lm.stream(
        prompt,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        num_draft_tokens=num_draft_tokens,
        ignore_eos=True,
    )
    rounds = [next(stream)]
    wall, cpu = time.perf_counter(), time.process_time()
    rounds += stream
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return _Decoded(tuple(t for r in rounds for t in r.token_ids), wall, cpu, tuple(rounds))


def _same(decoded: _Decoded, plain: _Decoded) -> _Decoded:
    if decoded.token_ids != plain.token_ids:
        raise RuntimeError(
            "self-speculative decoding gave other tokens than plain decoding; report this with the "
            "model's name"
        )
    return decoded


def _report(
    temperature: float,
    num_draft_tokens: NumDraftTokens,
    runs: Sequence[_Decoded],
    plain: Sequence[_Decoded],
    left_out: int,
) -> SpeedReport:
    rounds = [r for run in runs for r in run.rounds]
    stats = DecodeStats.from_rounds(rounds, prompt_tokens=0, kv_cache_bytes=0)
    outputs = [run.token_ids for run in plain]
    wall, wall_interval = _ratio(runs, plain, lambda run: run.wall)
    cpu, cpu_interval = _ratio(runs, plain, lambda run: run.cpu)
    return SpeedReport(
        temperature,
        num_draft_tokens,
        wall,
        wall_interval,
        cpu,
        cpu_interval,
        stats.acceptance_rate if stats.num_draft_tokens else NAN,
        stats.mean_accepted_length if stats.num_rounds else NAN,
        acceptance_by_position(rounds),
        len(runs),
        left_out,
        sum(map(len, outputs)),
        repeated_share(outputs),
    )


def _ratio(
    runs: Sequence[_Decoded], plain: Sequence[_Decoded], clock: Callable[[_Decoded], float]
) -> tuple[float, tuple[float, float]]:
    """Median over prompts of the speed-up, and its interval."""
    ratios = [clock(base) / clock(run) for run, base in zip(runs, plain, strict=True)]
    if not ratios:
        return NAN, (NAN, NAN)
    low, high = bootstrap_interval(ratios)
    return statistics.median(ratios), (low, high)
