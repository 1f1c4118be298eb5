"""A/B: two settings on the same prompts, in turn, and whether one of them is really faster."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from layerskip.ab_result import SIDES, ABResult, Pair, Run, Side
from layerskip.encoding import Prompt
from layerskip.params import (
    AUTO,
    DEFAULT_MAX_NEW_TOKENS,
    MAX_SEED,
    NumDraftTokens,
    SamplingParams,
    check_integer,
    check_num_draft_tokens,
    check_sampling,
    following_seed,
)
from layerskip.policy import Policy
from layerskip.telemetry.traffic import Request, Traffic

if TYPE_CHECKING:
    from layerskip.api import SelfSpeculativeLM


@dataclass(frozen=True)
class Arm:
    """One of the two settings.

    Attributes:
        name: for people.
        num_draft_tokens: 0 is plain decoding, "auto" what pays, or so many tokens a round.
        policy: that "auto" follows.
    """

    name: str
    num_draft_tokens: NumDraftTokens
    policy: Policy | None = None

    def __post_init__(self) -> None:
        check_num_draft_tokens(self.num_draft_tokens)

    @classmethod
    def of(cls, value: "Arm | Policy | NumDraftTokens") -> "Arm":
        """As given to ``ab``."""
        if isinstance(value, Arm):
            return value
        if isinstance(value, Policy):
            return cls("policy", AUTO, value)
        check_num_draft_tokens(value)
        return cls(str(value), value)

    @classmethod
    def parse(cls, text: str) -> "Arm":
        """ "0", a number, "auto", or the name of a policy file.

        Raises:
            ValueError: it is none of them.
        """
        if text == AUTO or text.removeprefix("-").isdecimal():
            return cls.of(AUTO if text == AUTO else int(text))
        if not Path(text).is_file():
            raise ValueError(
                f"an arm must be 0, a number of draft tokens, 'auto' or a policy file, got {text!r}"
            )
        return cls(Path(text).name, AUTO, Policy.load(text))


def ab(
    lm: "SelfSpeculativeLM",
    requests: Traffic | Sequence[Prompt],
    *,
    a: Arm | Policy | NumDraftTokens = 0,
    b: Arm | Policy | NumDraftTokens = AUTO,
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
    sampling: SamplingParams | None = None,
    repeats: int = 1,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> ABResult:
    """Decode every prompt in both arms, one request at a time, and compare.

    The arms of a prompt come one right after the other, in random order; the first prompt is
    decoded once more before, to warm up. Interrupted (Ctrl-C), it gives what it has, if both arms
    have decoded a prompt. A ``LookupStore`` would show one arm what the other wrote: wrap the model
    without. Arms that leave drafting to the controller share it, and what it has learnt.

    Args:
        lm: the model, wrapped. Its own policy and number of draft tokens do not count.
        requests: traffic with its labels, or texts and token ids. One that leaves no room in the
            model's positions for ``max_new_tokens`` is left out.
        a, b: the arms: 0 is plain decoding, "auto" what pays, or so many tokens a round, or a
            policy. The same twice shows how much the clock wavers.
        max_new_tokens: most tokens a prompt.
        sampling: greedy if None; without a seed.
        repeats: runs of each prompt in each arm.
        seed: of the order of the arms, and of sampling: prompt i decodes with seed + i.
        on_progress: called with (runs done, runs).

    Raises:
        ValueError, TypeError: an argument is wrong, or no prompt fits.
    """
    sampling = SamplingParams() if sampling is None else sampling
    check_integer("max_new_tokens", max_new_tokens, 1)
    check_integer("repeats", repeats, 1)
    check_integer("seed", seed, 0, MAX_SEED)
    check_sampling(sampling)
    if sampling.seed is not None:
        raise ValueError("give the seed to ab, which makes one of it for each prompt")
    arms = {"a": Arm.of(a), "b": Arm.of(b)}
    traffic = requests if isinstance(requests, Traffic) else Traffic.of(requests)
    tasks, left_out = _tasks(lm, traffic, max_new_tokens)
    if AUTO in (arms["a"].num_draft_tokens, arms["b"].num_draft_tokens):
        _ = lm.controller  # passes are measured now, not in a request
    decoders = {s: _decoder(lm, arms[s], sampling, max_new_tokens, seed) for s in SIDES}
    pairs, interrupted = run_in_turn(tasks, decoders, repeats, seed, on_progress)
    inexact = "" if lm.stack.exactness.wanted else lm.exactness
    return ABResult(arms["a"].name, arms["b"].name, pairs, left_out, interrupted, inexact)


def run_in_turn(
    tasks: Sequence[Request],
    decoders: Mapping[Side, Callable[[Request], Run]],
    repeats: int,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[tuple[Pair, ...], bool]:
    """Both arms of each task, one after the other.

    Returns:
        The pairs, and whether an interrupt ended them early; one before the first pair goes on.
    """
    pairs: list[Pair] = []
    done, total = 0, 2 * repeats * len(tasks)
    try:
        for side in SIDES:
            decoders[side](tasks[0])
        for task in tasks:
            runs: dict[Side, list[Run]] = {side: [] for side in SIDES}
            for side in _order(task.index, repeats, seed):
                runs[side].append(decoders[side](task))
                done += 1
                on_progress(done, total)
            pairs.append(Pair(task.index, tuple(runs["a"]), tuple(runs["b"])))
    except KeyboardInterrupt:
        if not pairs:
            raise
        return tuple(pairs), True
    return tuple(pairs), False


def _order(index: int, repeats: int, seed: int) -> Iterator[Side]:
    """Both sides, in random order, as often as asked for; always the same."""
    draw = random.Random(f"{seed}/{index}")
    for _ in range(repeats):
        yield from draw.sample(SIDES, len(SIDES))


def _tasks(
    lm: "SelfSpeculativeLM", traffic: Traffic, max_new_tokens: int
) -> tuple[list[Request], dict[int, str]]:
    """Requests that fit, with their token ids; and of the others, why not."""
    tasks, left_out = [], dict[int, str]()
    for request in traffic:
        try:
            ids = lm.encode_fitting(request.prompt, request.messages, max_new_tokens)
        except (ValueError, TypeError) as error:
            left_out[request.index] = str(error)
            continue
        tasks.append(replace(request, prompt=tuple(ids), messages=None))
    if not tasks:
        raise ValueError(f"no prompt could be decoded: {next(iter(left_out.values()))}")
    return tasks, left_out


def _decoder(
    lm: "SelfSpeculativeLM", arm: Arm, sampling: SamplingParams, max_new_tokens: int, seed: int
) -> Callable[[Request], Run]:
    following = copy(lm)  # which shares all that it holds
    following.policy = arm.policy

    def decode(task: Request) -> Run:
        output = following.generate(
            task.prompt,
            max_new_tokens=max_new_tokens,
            sampling=replace(sampling, seed=following_seed(seed, task.index)),
            num_draft_tokens=arm.num_draft_tokens,
            labels=task.labels,
        )
        times = [record.elapsed_seconds for record in output.rounds]
        return Run(output.token_ids, times[0], times[-1])

    return decode
