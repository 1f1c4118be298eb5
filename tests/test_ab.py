"""A/B: order, equality, and a winner only where there is one."""

import contextlib
import io
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from toys import MAX_POSITIONS, PLANS, make_model, random_ids

from layerskip import Policy, Rule, SamplingParams, SelfSpeculativeLM
from layerskip.ab import Arm, ab, run_in_turn
from layerskip.ab_result import ABResult, Pair, Run, Speedup
from layerskip.bootstrap import LEAST_PROMPTS
from layerskip.cli import main
from layerskip.controller import Controller
from layerskip.cost import CostTable, Curve
from layerskip.telemetry.traffic import Request, Traffic

PLAIN, DRAFT = (Curve((1, 8), (0,), ((s, s),)) for s in (1.0, 0.001))
COST = CostTable(DRAFT, DRAFT, PLAIN, 0.0, 1, {"threads": 1})
TEXTS = ["one fish two fish", "to be or not", "a stitch 😀 in time", "as it is in rain"]


# Order and arithmetic, with decoders that only pretend.


class Clock:
    """A machine that gets slower and faster, with bursts; a decoder takes what it is told to."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.phase, self.calls = 0.0, list[tuple[str, int]]()

    def decoder(self, name: str, pace: float = 1.0) -> Callable[[Request], Run]:
        def decode(task: Request) -> Run:
            self.calls.append((name, task.index))
            self.phase += 0.3
            noise = math.exp(self.random.gauss(0.2 * math.sin(self.phase), 0.05))
            if self.random.random() < 0.05:
                noise *= 2
            tokens = 20 + task.index % 5 * 40
            seconds = (0.1 + 0.01 * tokens) * pace * noise
            return Run(tuple(range(tokens)), 0.1 * seconds, seconds)

        return decode


def tasks(count: int) -> list[Request]:
    return [Request(i, (1, 2)) for i in range(count)]


def pretended(
    count: int, seed: int, *, pace: float = 1.0, repeats: int = 1
) -> tuple[ABResult, list[tuple[str, int]]]:
    clock = Clock(seed)
    decoders = {"a": clock.decoder("a"), "b": clock.decoder("b", pace)}
    pairs, interrupted = run_in_turn(tasks(count), decoders, repeats, seed)
    assert not interrupted
    return ABResult("0", "auto", pairs), clock.calls


def test_arms_come_in_turn_and_in_random_order() -> None:
    _, calls = pretended(200, 1, repeats=2)
    assert calls[:2] == [("a", 0), ("b", 0)]  # to warm up
    timed = calls[2:]
    assert [index for _, index in timed] == [i for i in range(200) for _ in range(4)]
    turns = ["".join(name for name, _ in timed[i : i + 2]) for i in range(0, 800, 2)]
    assert set(turns) == {"ab", "ba"}
    assert 160 < turns.count("ab") < 240
    assert {turns[i] == turns[i + 1] for i in range(0, 400, 2)} == {True, False}
    assert pretended(200, 1, repeats=2)[1] == calls


def test_equal_arms_rarely_have_a_winner() -> None:
    winners = [pretended(LEAST_PROMPTS + i % 20, i)[0].winner for i in range(300)]
    wrong = sum(winner is not None for winner in winners)
    assert wrong <= 24  # 5 % are 15, three standard deviations more are 26
    assert wrong > 0  # else it would never call one


@pytest.mark.parametrize(("pace", "winner"), [(0.8, "b"), (1.25, "a")])
def test_the_faster_arm_wins(pace: float, winner: str) -> None:
    result, _ = pretended(40, 5, pace=pace, repeats=2)
    assert result.winner == winner
    for ratio in (result.end_to_end, result.per_token, result.tokens_per_second):
        assert ratio is not None
        assert ratio.low < 1 / pace < ratio.high
    assert result.verdict.startswith({"b": "b (auto) is 1.", "a": "a (0) is 1."}[winner])
    assert "times as fast as" in result.verdict


def pair(index: int, a: float, b: float, tokens: int = 11, first: float = 0.0) -> Pair:
    ids = tuple(range(tokens))
    return Pair(index, (Run(ids, first, a),), (Run(ids, first, b),))


def test_ratios_are_what_arithmetic_says() -> None:
    pairs = (pair(0, 2.0, 1.0, 11, 0.5), pair(1, 3.0, 1.0, 11, 0.5), pair(2, 4.0, 4.0, 101, 0.5))
    result = ABResult("0", "4", pairs)
    assert result.end_to_end == Speedup(pytest.approx(2.0))
    assert result.per_token == Speedup(pytest.approx(3.0))
    assert result.tokens_per_second == Speedup(pytest.approx(9.0 / 6.0))
    a = result.summaries["a"]
    assert (a.ttft_p50, a.end_to_end_p50, a.end_to_end_p90) == (0.5, 3.0, pytest.approx(3.8))
    assert a.per_token_p50 == pytest.approx(0.15)
    assert a.tokens_per_second == pytest.approx(123 / 9)
    assert result.verdict == "no winner: 3 prompts are too few to tell; give 6 or more"
    one = ABResult("0", "4", pairs[:1])
    assert one.verdict == "no winner: 1 prompt is too few to tell; give 6 or more"
    repeated = Pair(0, tuple(Run((1,), s, s) for s in (1, 2, 9)), (Run((1,), 1, 1),) * 3)
    assert repeated.speedup(lambda run: run.seconds) == 2.0
    assert ABResult("0", "4", (repeated,)).per_token is None


def test_no_winner_where_the_interval_covers_1() -> None:
    result = ABResult("0", "4", tuple(pair(i, 1.0 + 0.1 * (-1) ** i, 1.0) for i in range(20)))
    assert (result.winner, result.end_to_end.faster) == (None, None)
    assert result.verdict.startswith("no winner: the 95 % interval of a's time over b's, 0.9")
    assert result.verdict.endswith("over 20 prompts, covers 1")
    assert Speedup(1.1, 1.0, 1.2).faster is None


def test_no_winner_where_all_tokens_say_the_opposite() -> None:
    short = [pair(i, 1.2, 1.0) for i in range(20)]
    long = [pair(i, 100.0, 200.0, 1000) for i in range(20, 39)]
    result = ABResult("0", "4", (*short, *long[:8]))
    assert result.end_to_end.faster == "b"
    assert result.tokens_per_second.faster == "a"
    assert result.winner is None
    assert result.verdict == (
        "no winner: b (4) is faster on the median prompt, a (0) over all tokens"
    )


def test_differing_tokens_are_said_first_and_where() -> None:
    same, one = Run((1, 2, 3), 0.1, 0.2), Run((1, 9, 3), 0.1, 0.2)
    shorter = Run((1, 2), 0.1, 0.2)
    pairs = (
        Pair(3, (same, same), (same, same)),
        Pair(5, (same, same), (same, one)),
        Pair(8, (same, same), (shorter, same)),
        Pair(9, (same, shorter), (same, same)),
    )
    result = ABResult("0", "4", pairs)
    assert result.differences == {5: 1, 8: 2, 9: 2}
    assert result.equal_share == 0.25
    assert result.equality == (
        "TOKENS DIFFER on 3 of 4 prompts: line 6 (from token 1), line 9 (from token 2), "
        "line 10 (from token 2); they must not: please report it"
    )
    assert ABResult("0", "4", pairs[1:2], inexact="rows depend").equality.endswith("; rows depend")
    assert ABResult("0", "4", pairs[:1]).equality == "the tokens of the prompt are equal"
    assert ABResult("0", "4", pairs[:1] * 2).equality == "the tokens of all 2 prompts are equal"
    document = json.loads(json.dumps(result.to_dict()))
    assert (document["equal_share"], document["differences"]) == (0.25, {"5": 1, "8": 2, "9": 2})


@pytest.mark.parametrize("calls", [1, 3, 6, 7])
def test_an_interrupt_gives_the_pairs_so_far(calls: int) -> None:
    clock, left = Clock(1), iter(range(calls))

    def interrupted(name: str) -> Callable[[Request], Run]:
        decode = clock.decoder(name)

        def run(task: Request) -> Run:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return decode(task)

        return run

    decoders = {"a": interrupted("a"), "b": interrupted("b")}
    if calls < 4:  # two to warm up, two for a pair
        with pytest.raises(KeyboardInterrupt):
            run_in_turn(tasks(9), decoders, 1, 0)
        return
    pairs, stopped = run_in_turn(tasks(9), decoders, 1, 0)
    assert stopped
    assert [p.index for p in pairs] == list(range((calls - 2) // 2))


# The decoder itself.


@pytest.fixture(scope="module")
def lm(tokenizer: Any) -> SelfSpeculativeLM:
    made = SelfSpeculativeLM(make_model(), tokenizer, PLANS["exit"], num_draft_tokens=2)
    made._controller = Controller(COST, follows_clock=False)
    return made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_arms_of_a_model_write_the_same(lm: SelfSpeculativeLM, temperature: float) -> None:
    progress: list[tuple[int, int]] = []
    result = ab(
        lm,
        TEXTS,
        a=0,
        b=3,
        max_new_tokens=9,
        sampling=SamplingParams(temperature=temperature),
        repeats=2,
        seed=7,
        on_progress=lambda done, total: progress.append((done, total)),
    )
    assert (result.a, result.b, result.equal_share, result.inexact) == ("0", "3", 1.0, "")
    assert progress == [(i, 16) for i in range(1, 17)]
    for i, found in enumerate(result.pairs):
        alone = lm.generate(
            TEXTS[i],
            max_new_tokens=9,
            sampling=SamplingParams(temperature=temperature, seed=7 + i),
            num_draft_tokens=0,
        )
        assert {run.token_ids for run in (*found.a, *found.b)} == {alone.token_ids}
        assert all(0 < run.first_seconds < run.seconds for run in (*found.a, *found.b))


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """(prompt tokens, most drafted in a round) of each decoded request."""
    seen: list[tuple[int, int]] = []
    remove = SelfSpeculativeLM.open_batch

    def opened(self: SelfSpeculativeLM, **settings: Any) -> Any:
        batch = remove(self, **settings)
        take = batch.remove

        def taken(row: int) -> Any:
            out = take(row)
            most = max(r.num_draft_tokens for r in out.rounds)
            seen.append((out.stats.prompt_tokens, most))
            return out

        batch.remove = taken
        return batch

    monkeypatch.setattr(SelfSpeculativeLM, "open_batch", opened)
    return seen


def test_a_policy_is_an_arm(lm: SelfSpeculativeLM, drafted: list[tuple[int, int]]) -> None:
    rules = (Rule("code", (0, None), 0), Rule("poem", (0, None), 1))
    own = Policy((Rule("", (0, None), 0),))
    traffic = Traffic.of(
        [random_ids(5), random_ids(6), random_ids(7)],
        [{"task": "code"}, {"task": "poem"}, {"task": "prose"}],
    )
    lm.policy = own
    try:
        result = ab(lm, traffic, a="auto", b=Policy(rules, "task"), max_new_tokens=12)
    finally:
        assert lm.policy is own
        lm.policy = None
    assert (result.a, result.b, result.equal_share) == ("auto", "policy", 1.0)
    of = {n: sorted(most for tokens, most in drafted[2:] if tokens == n) for n in (5, 6, 7)}
    assert of[5][0] == 0 < of[5][1]  # the policy; automatic, not under the model's own policy
    assert of[6][0] == 1 < of[6][1]
    assert min(of[7]) > 1


def test_requests_that_do_not_fit_are_left_out(lm: SelfSpeculativeLM) -> None:
    requests = [random_ids(5), random_ids(MAX_POSITIONS - 3), [10**6], random_ids(4)]
    result = ab(lm, requests, b=1, max_new_tokens=5)
    assert [p.index for p in result.pairs] == [0, 3]
    assert list(result.left_out) == [1, 2]
    assert "at most" in result.left_out[1]
    with pytest.raises(ValueError, match=r"no prompt could be decoded: .* at most"):
        ab(lm, requests[1:2], b=1, max_new_tokens=5)


def test_what_cannot_be_is_refused(lm: SelfSpeculativeLM) -> None:
    for wrong, sentence in (
        ({"a": -1}, "num_draft_tokens must be between 0"),
        ({"b": "fast"}, "num_draft_tokens must be 'auto'"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"seed": -1}, "seed must be between 0"),
        ({"sampling": SamplingParams(temperature=1.0, seed=1)}, "give the seed to ab"),
    ):
        with pytest.raises(ValueError, match=sentence):
            ab(lm, TEXTS, **wrong)
    with pytest.raises(ValueError, match="prompts must be a list"):
        ab(lm, "one text")


# The command.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy")
    make_model().save_pretrained(path)
    PLANS["exit"].save(path / "layerskip.json")
    lines = [json.dumps({"prompt": random_ids(5 + i), "task": "code"}) for i in range(7)]
    (path / "traffic.jsonl").write_text("\n".join(lines), encoding="utf-8")
    Policy((Rule("code", (0, 8), 1),), "task").save(path / "policy.json")
    return path


def command(*argv: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["ab", *map(str, argv)])
    return code, out.getvalue(), err.getvalue()


def test_the_command_prints_times_and_a_verdict(folder: Path) -> None:
    argv = (folder, "--prompts", folder / "traffic.jsonl", "--limit", "6", "--max-new-tokens", "6")
    code, out, err = command(
        *argv, "--b", folder / "policy.json", "--temperature", "1", "--seed", "3", "--json"
    )
    document = json.loads(out)
    assert code == 0
    assert (document["a"], document["b"], document["prompts"]) == ("0", "policy.json", 6)
    assert (document["equal_share"], document["interrupted"]) == (1.0, False)
    assert set(document["speedup"]) == {"end_to_end", "per_token", "tokens_per_second"}
    assert document["verdict"] in err
    assert "tokens of all 6 prompts are equal" in err
    code, out, _ = command(*argv[:-1], 3, "--b", "2", "--repeats", "2", "--limit", "2")
    assert code == 0
    assert "2 prompts, 2 runs of each in each arm" in out
    assert "tokens/s" in out


def test_the_command_skips_bad_lines_and_numbers_them(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "some.jsonl"
    good = (folder / "traffic.jsonl").read_text(encoding="utf-8").splitlines()[0]
    prompts.write_text(f"{good}\nnonsense\n{good}\n", encoding="utf-8")
    argv = (folder, "--prompts", prompts, "--max-new-tokens", "4", "--b", "2")
    code, _, err = command(*argv)
    assert code == 2
    assert "line 2 is not a prompt" in err
    code, out, _ = command(*argv, "--bad-lines", "skip")
    assert code == 0
    assert "line 2 skipped: " in out
    assert "tokens of all 2 prompts are equal" in out


def test_the_command_refuses_before_it_loads_anything(folder: Path, tmp_path: Path) -> None:
    prompts = ("--prompts", folder / "traffic.jsonl")
    (tmp_path / "bad.json").write_text("{}", encoding="utf-8")
    for argv, sentence in (
        (("--a", "fast"), "an arm must be 0, a number of draft tokens, 'auto' or a policy file"),
        (("--a=--5",), "an arm must be 0, a number of draft tokens, 'auto' or a policy file"),
        (("--a", tmp_path / "bad.json"), f"{tmp_path / 'bad.json'} is not a policy"),
        (("--b", "-1"), "num_draft_tokens must be between 0"),
        (("--repeats", "0"), "--repeats must be at least 1"),
        (("--max-new-tokens", "0"), "--max-new-tokens must be at least 1"),
        (("--limit", "0"), "limit must be at least 1"),
    ):
        code, out, err = command("no/such/model", *prompts, *argv)
        assert (code, out) == (2, "")
        assert err.startswith(f"layerskip: {sentence}")
        assert len(err.splitlines()) == 1


def test_arms_have_the_names_that_were_given() -> None:
    assert Arm.parse("0") == Arm("0", 0)
    assert Arm.parse("auto") == Arm("auto", "auto")
    assert Arm.of(Arm("mine", 3)).name == "mine"
