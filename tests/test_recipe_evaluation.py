"""What the recipes' table says: acceptance by exit and position, likelihood, speed, costs."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from controlling import table
from recipe_modules import imported
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F
from toys import make_model, make_tokenizer, random_ids

from layerskip import SamplingParams
from layerskip.calibration import KnownTexts, Text
from layerskip.model import DecoderStack
from layerskip.prediction import predict

VOCAB, DEPTH = 5, 3


@pytest.fixture(scope="module")
def recipes() -> Iterator[SimpleNamespace]:
    with imported(["tokens", "exits", "settings", "speed", "evaluation", "table"]) as modules:
        yield modules


class FakeStack:
    """Logits that are a fixed function of exit and tokens."""

    num_layers, vocab_size, max_positions = DEPTH, VOCAB, 100

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tables = {e: 2 * torch.randn(VOCAB, VOCAB, generator=generator) for e in (1, 2, 3)}
        self.asked: list[tuple[int, tuple[int, ...]]] = []

    def all_exit_logits(self, ids: Sequence[int], exits: Sequence[int]) -> Mapping[int, Tensor]:
        self.asked.append((len(ids), tuple(exits)))
        return {e: self.tables[e][list(ids)] for e in exits}


def texts_of(recipes: SimpleNamespace) -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    lengths = ((12, 4, ((7, 9),)), (9, 0, ()), (3, 3, ()), (6, 5, ()))
    return [
        recipes.tokens.Sample(tuple(torch.randint(VOCAB, (n,), generator=draw).tolist()), p, u)
        for n, p, u in lengths
    ]


def chance(stack: FakeStack, exit_layer: int, token: int, temperature: float) -> float:
    draft, target = (stack.tables[e][token].double() for e in (exit_layer, DEPTH))
    if temperature == 0.0:
        return float(draft.argmax() == target.argmax())
    q, p = ((x / temperature).softmax(-1) for x in (draft, target))
    return 1.0 - 0.5 * float((q - p).abs().sum())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("exit_layer", [1, 2])
def test_acceptance_by_position_is_its_definition(
    recipes: SimpleNamespace, exit_layer: int, temperature: float
) -> None:
    stack, samples = FakeStack(), texts_of(recipes)
    report = recipes.exits.evaluate_exits(
        stack, samples, [1, 2], temperature=temperature, num_positions=3
    )
    reached, accepted = [0.0] * 3, [0.0] * 3
    for sample in samples:
        for start in range(len(sample.ids) - 1):
            so_far = 1.0
            for i in range(3):
                place = start + i
                if place + 1 >= len(sample.ids) or sample.labels[place + 1] == -100:
                    break
                reached[i] += so_far
                so_far *= chance(stack, exit_layer, sample.ids[place], temperature)
                accepted[i] += so_far
    wanted = [a / r for a, r in zip(accepted, reached, strict=True) if r]
    scores = report.exits[exit_layer]
    assert scores.by_position == pytest.approx(wanted, abs=1e-6)
    assert scores.acceptance == scores.by_position[0]
    products = [1.0, 1 + wanted[0], 1 + wanted[0] + wanted[0] * wanted[1]]
    assert report.lengths(exit_layer)[:3] == pytest.approx(products, abs=1e-6)


def test_the_loss_is_of_what_is_learned_at_temperature_one(recipes: SimpleNamespace) -> None:
    stack, samples = FakeStack(), texts_of(recipes)
    report = recipes.exits.evaluate_exits(stack, samples, [1], temperature=0.5)
    nats = [
        -float(stack.tables[DEPTH][s.ids[i]].log_softmax(-1)[s.ids[i + 1]])
        for s in samples
        for i in range(len(s.ids) - 1)
        if s.labels[i + 1] != -100
    ]
    assert report.positions == len(nats) == 6 + 8 + 1
    assert report.loss == pytest.approx(sum(nats) / len(nats), rel=1e-6)
    assert report.perplexity == pytest.approx(math.exp(report.loss))
    alone = recipes.exits.evaluate_exits(stack, samples, [], temperature=0.5)
    assert (alone.loss, alone.exits) == (report.loss, {})


def test_few_logits_exist_at_once(
    recipes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = recipes.exits.evaluate_exits(FakeStack(), texts_of(recipes), [1, 2], temperature=0.8)
    monkeypatch.setattr(recipes.exits, "LOGITS_BYTES", 1)
    stack = FakeStack()
    found = recipes.exits.evaluate_exits(stack, texts_of(recipes), [1, 2], temperature=0.8)
    assert found == wanted
    assert {exits for _, exits in stack.asked} == {(1, DEPTH), (2, DEPTH)}


def test_long_texts_are_read_in_pieces_their_beginnings_first(recipes: SimpleNamespace) -> None:
    stack, sample = FakeStack(), recipes.tokens.Sample
    samples = [sample((1,) * 25), sample((2,) * 7)]
    report = recipes.exits.evaluate_exits(
        stack, samples, [1], temperature=0.0, max_sample_tokens=10
    )
    assert [n for n, _ in stack.asked] == [9, 6, 9, 4]
    assert report.positions == 9 + 6 + 9 + 4
    stack.asked.clear()
    recipes.exits.evaluate_exits(
        stack, samples, [1], temperature=0.0, max_sample_tokens=10, max_tokens=15
    )
    assert [n for n, _ in stack.asked] == [9, 4]


def test_the_exits_of_a_model_are_those_of_transformers(recipes: SimpleNamespace) -> None:
    model = make_model()
    ids = random_ids(40)
    report = recipes.exits.evaluate_exits(
        DecoderStack(model),
        [recipes.tokens.Sample(tuple(ids), 8)],
        [2, 5],
        temperature=0.7,
        num_positions=1,
    )
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True)
        target = out.logits[0, 7:-1]
        for layer in (2, 5):
            draft = model.lm_head(model.model.norm(out.hidden_states[layer]))[0, 7:-1]
            q, p = (F.softmax(x / 0.7, -1) for x in (draft, target))
            overlap = torch.minimum(q, p).sum(-1).mean()
            assert report.exits[layer].acceptance == pytest.approx(float(overlap), abs=1e-4)
    loss = F.cross_entropy(target, torch.tensor(ids[8:]))
    assert report.loss == pytest.approx(float(loss), rel=1e-4)


def test_greedy_chains_are_those_of_the_plan_search(recipes: SimpleNamespace) -> None:
    stack, ids, start, most = DecoderStack(make_model()), tuple(random_ids(60)), 10, 4
    text = Text(ids, start, 0)
    (chain,) = KnownTexts(stack, [text], sampling=SamplingParams()).exit_chains(3, most)
    report = recipes.exits.evaluate_exits(
        stack,
        [recipes.tokens.Sample(ids, start + 1)],
        [3],
        temperature=0.0,
        num_positions=most,
    )
    window = len(ids) - 1 - start
    wanted = []
    for i in range(most):
        reached = [n for slot, n in enumerate(chain) if n >= i and slot + i < window]
        wanted.append(sum(n > i for n in reached) / len(reached))
    assert report.exits[3].by_position == pytest.approx(wanted)
    assert 0.0 < wanted[0] < 1.0


def test_an_exit_that_is_none_and_text_without_labels_are_refused(
    recipes: SimpleNamespace,
) -> None:
    samples = texts_of(recipes)
    with pytest.raises(ValueError, match=r"an exit layer must be .* 1 .* 2"):
        recipes.exits.evaluate_exits(FakeStack(), samples, [DEPTH], temperature=0.0)
    with pytest.raises(ValueError, match="holds nothing to predict"):
        recipes.exits.evaluate_exits(FakeStack(), samples[2:3], [1], temperature=0.0)


@pytest.mark.parametrize("most", [1, 3])
def test_a_prompt_longer_than_all_that_is_read_leaves_something_to_predict(
    recipes: SimpleNamespace, most: int
) -> None:
    samples = texts_of(recipes)[:2]
    report = recipes.exits.evaluate_exits(
        FakeStack(), samples, [1], temperature=0.0, max_tokens=most
    )
    whole = recipes.exits.evaluate_exits(FakeStack(), samples[:1], [1], temperature=0.0)
    assert report == whole  # and of the next sample nothing


class FakeClock:
    """Seconds that pass only where it is said."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return 3 * self.now


class FakeLM:
    """Emits a prompt's own rule; a token takes 1 second plainly, and 1 / k when drafted."""

    def __init__(self, clock: FakeClock, *, wrong: bool = False) -> None:
        self.clock, self.wrong, self.calls = clock, wrong, []

    def stream(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: SamplingParams,
        num_draft_tokens: int | str,
        ignore_eos: bool,
    ) -> Iterator[Any]:
        from layerskip import Round

        self.calls.append((tuple(prompt), num_draft_tokens, sampling))
        k = 4 if num_draft_tokens == "auto" else num_draft_tokens
        looping = prompt[0] == 0
        tokens = [i % 2 if looping else i for i in range(max_new_tokens)]
        if self.wrong and k:
            tokens[-1] += 1
        self.clock.now += 100.0  # up to the first token, which does not count
        common = {"draft_seconds": 0.0, "verify_seconds": 0.0, "positions": 1}
        for index, token in enumerate(tokens):
            if index:
                self.clock.now += 1.0 / max(1, k)
            yield Round(
                row=0,
                index=index,
                token_ids=(token,),
                text="",
                num_draft_tokens=k if index else 0,
                num_accepted_tokens=min(k, index % 3) if index else 0,
                origin="target",
                finish_reason="length" if index == len(tokens) - 1 else None,
                **common,
            )


@pytest.fixture
def clock(recipes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(recipes.speed, "time", clock)
    return clock


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speed_is_the_paired_ratio_after_the_first_token(
    recipes: SimpleNamespace, clock: FakeClock, temperature: float
) -> None:
    lm = FakeLM(clock)
    two, auto = recipes.speed.measure_speeds(
        lm,
        [[1, 2], [0, 3], [5], [6, 7]],
        (2, "auto"),
        max_new_tokens=20,
        temperature=temperature,
    )
    assert (two.speedup, two.cpu_speedup) == pytest.approx((2.0, 2.0))
    assert (auto.speedup, *auto.interval) == pytest.approx((4.0, 4.0, 4.0))
    assert (two.num_draft_tokens, auto.num_draft_tokens) == (2, "auto")
    assert (two.prompts, two.left_out, two.new_tokens) == (3, 1, 60)
    assert two.repeated_share == 0.0
    # Accepted tokens go 1, 2, 0, 1, 2, 0, ... in the 18 rounds before the last.
    assert two.by_position == pytest.approx((12 / 18, 6 / 12))
    assert two.mean_accepted_length == pytest.approx(1 + 19 / 19)
    seeds = {sampling.seed for _, _, sampling in lm.calls}
    assert seeds == ({0} if temperature else {None})
    assert sum(prompt == (0, 3) for prompt, _, _ in lm.calls) == 1  # it loops


def test_where_every_prompt_loops_nothing_is_claimed(
    recipes: SimpleNamespace, clock: FakeClock
) -> None:
    (report,) = recipes.speed.measure_speeds(
        FakeLM(clock), [[0, 1], [0, 2]], ["auto"], max_new_tokens=20, temperature=0.0
    )
    assert (report.prompts, report.left_out) == (0, 2)
    content = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert content["speedup"] is None
    assert content["interval"] == [None, None]


def test_other_tokens_than_plain_are_an_error(recipes: SimpleNamespace, clock: FakeClock) -> None:
    with pytest.raises(RuntimeError, match="other tokens than plain decoding"):
        recipes.speed.measure_speeds(
            FakeLM(clock, wrong=True), [[1]], ["auto"], max_new_tokens=8, temperature=0.0
        )


@pytest.mark.parametrize(
    ("prompts", "numbers", "said"),
    [([], (2,), "no prompts"), ([[1]], (0,), "not be 0"), ([[1]], (2, 2), "must differ")],
)
def test_what_cannot_be_timed_is_refused(
    recipes: SimpleNamespace, clock: FakeClock, prompts: Any, numbers: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        recipes.speed.measure_speeds(
            FakeLM(clock), prompts, numbers, max_new_tokens=8, temperature=0.0
        )


class FakeCosts:
    """A plain pass takes 1, a draft pass ``c``, each further row of a verify pass 0.1."""

    def __init__(self, c: float) -> None:
        self.c = c

    def drafting(self, passes: int, rows: int, context: float) -> float:
        return passes * rows * self.c

    def verify_pass(self, rows: int, context: float) -> float:
        return 0.9 + 0.1 * rows


def test_the_best_exit_is_that_of_the_best_prediction(recipes: SimpleNamespace) -> None:
    scores = {e: recipes.exits.ExitScores(a, (a,) * 6) for e, a in {1: 0.5, 2: 0.8}.items()}
    report = recipes.exits.ExitReport(0.0, 10, 1.0, scores)

    def predicted(a: float, c: float, k: int) -> float:
        return sum(a**i for i in range(k + 1)) / (k * c + 1.0 + 0.1 * k)

    found = recipes.evaluation.best_exit(report, {1: FakeCosts(0.1), 2: FakeCosts(0.2)}, 50)
    every = {
        (e, k): predicted(a, c, k)
        for e, a, c in ((1, 0.5, 0.1), (2, 0.8, 0.2))
        for k in range(1, 7)
    }
    best = max(every, key=every.__getitem__)
    assert found == (*best, pytest.approx(every[best]))
    layer, k, speed = recipes.evaluation.best_exit(report, {1: FakeCosts(0.9)}, 50)
    assert (layer, k) == (1, 1)
    assert speed < 1.0  # no exit pays, and that is said


@pytest.mark.parametrize("start", [0.0, 0.3])
def test_an_exit_is_predicted_as_decoding_predicts_it(
    recipes: SimpleNamespace, start: float
) -> None:
    """A round's first draft passes cost more than those behind them."""
    report = recipes.exits.ExitReport(
        0.0, 10, 1.0, {1: recipes.exits.ExitScores(0.8, (0.8, 0.7) * 3)}
    )
    cost = table(0.2, start=start)
    expected = predict(cost, report.lengths(1), 50)
    assert recipes.evaluation.best_exit(report, {1: cost}, 50) == (1, *expected)


@pytest.fixture(scope="module")
def measured(recipes: SimpleNamespace) -> Any:
    """A toy model's measurement, from end to end."""
    samples = [recipes.tokens.Sample(tuple(random_ids(30, seed=i)), 10) for i in range(4)]
    told: list[str] = []
    measurement = recipes.evaluation.measure(
        recipes.settings.RunSettings(data="none", out="nowhere", max_new_tokens=8),
        make_model(),
        make_tokenizer(),
        samples,
        [s.ids[:10] for s in samples],
        [1, 2],
        cost_seconds=0.1,
        on_progress=told.append,
    )
    assert len(told) == 5
    return measurement


def test_a_model_is_measured_greedy_and_at_the_temperature(measured: Any) -> None:
    assert [report.temperature for report in measured.exits] == [0.0, 0.8]
    assert [tuple(report.exits) for report in measured.exits] == [(1, 2)] * 2
    assert measured.exits[0].loss == measured.exits[1].loss
    assert [s.temperature for s in measured.speeds] == [0.0, 0.0, 0.8, 0.8]
    assert [s.num_draft_tokens == "auto" for s in measured.speeds] == [False, True] * 2
    assert measured.exit_layer in (1, 2)
    assert 0.0 < measured.c < 1.5
    assert measured.v > 0.0
    assert all(s.prompts + s.left_out == 4 for s in measured.speeds)


def result(recipes: SimpleNamespace, measured: Any) -> Any:
    """Before and after, with figures made up where they are looked for."""
    known = [
        replace(s, prompts=3, left_out=1, speedup=0.875, interval=(0.75, 1.0), num_draft_tokens=3)
        for s in measured.speeds[::2]
    ]
    looping = replace(known[1], prompts=0, speedup=math.nan, interval=(math.nan, math.nan))
    scores = {1: recipes.exits.ExitScores(0.25, (0.25, 0.5)), 3: measured.exits[0].exits[1]}
    before = [replace(measured.exits[0], loss=1.0, exits=scores), measured.exits[1]]
    after = [replace(r, loss=1.0 + math.log(1.02)) for r in measured.exits]
    after[0] = replace(after[0], exits={1: recipes.exits.ExitScores(0.75, (0.75, 0.5, 0.25))})
    return recipes.table.Result(
        "some recipe",
        replace(measured, exits=tuple(before), c=0.25, speeds=tuple(known)),
        replace(measured, exits=tuple(after), c=0.30, exit_layer=1, speeds=(looping,)),
        90.0,
        3 * 2**29,
        "python recipes/some.py model=x",
        {"trained parameters": 12345, "overhead": 1.23456789},
    )


def test_the_table_says_before_after_and_change(recipes: SimpleNamespace, measured: Any) -> None:
    found = result(recipes, measured)
    rows = {name.strip(): rest for name, *rest in recipes.table.rows(found)}
    assert rows["accepted at exit 1, greedy"] == ["0.25 0.50", "0.75 0.50 0.25", "+0.500"]
    assert rows["accepted at exit 3, greedy"][1:] == ["", ""]
    assert rows["c (a draft token, in plain passes)"] == ["0.250", "0.300", "+0.050"]
    assert rows["speed-up, fixed k, greedy"] == ["0.88 (0.75-1.00) k=3", "", ""]
    assert rows["speed-up, fixed k, temperature 0.8"][1] == "every prompt loops"
    assert rows["prompts, repeated 8-grams"][0].startswith("3 of 4, ")
    assert rows["full model's loss, nats a token"] == ["1.0000", "1.0198", "+0.0198"]
    assert rows["full model's perplexity"] == ["2.718", "2.773", "+2.00%"]


def test_every_form_of_the_table_holds_every_row(
    recipes: SimpleNamespace, measured: Any, tmp_path: Path
) -> None:
    found = result(recipes, measured)
    console = Console(width=140, file=StringIO())
    console.print(recipes.table.as_table(found))
    markdown = recipes.table.as_markdown(found)
    lines = [line for line in markdown.split("\n") if line.startswith("|")]
    assert len(lines) == 2 + len(recipes.table.rows(found))
    assert {line.count("|") for line in lines} == {5}
    for text in (console.file.getvalue(), markdown):
        for name, before, *_ in recipes.table.rows(found):
            assert name.strip() in text
            assert before in text
        for said in ("some recipe", "1.5 minutes", "1.50 GiB", "12345", "1.235", found.command):
            assert said in text
    recipes.table.save(found, tmp_path / "table.json")
    content = json.loads((tmp_path / "table.json").read_text())
    assert content["command"] == found.command
    assert content["before"]["exits"][0]["exits"]["1"]["by_position"] == [0.25, 0.5]
    assert content["after"]["speeds"][0]["speedup"] is None
    assert content["after"]["exits"][0]["perplexity"] == pytest.approx(math.e * 1.02)


def test_acceptance_is_plotted(recipes: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "acceptance.png"
    recipes.table.plot_acceptance([], path)
    assert not path.exists()
    recipes.table.plot_acceptance([(0, {1: 0.2}), (50, {1: 0.4, 2: 0.5})], path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert list(tmp_path.iterdir()) == [path]


def test_peak_memory_is_what_the_system_counts(
    recipes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("only Linux tells")
    (peak,) = (line.split()[1] for line in status.read_text().split("\n") if "VmHWM" in line)
    assert recipes.table.peak_memory() == pytest.approx(int(peak) * 1024, rel=0.02)
