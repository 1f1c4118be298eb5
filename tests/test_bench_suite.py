"""The benchmark suite: its prompts, its cells, its modes."""

import random
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from benching import BENCH, COST, REPO, TEXTS, TOLD, lab_fixtures, refuse, suite_options
from toys import PLANS, random_ids

from layerskip import SamplingParams, SelfSpeculativeLM
from layerskip.calibration import walk
from layerskip.journal import Journal
from layerskip.plan import PlanFile
from layerskip.prompts import Example

bench, folder, lab = lab_fixtures(
    "cells", "exactness_table", "lab", "measuring", "modes", "paired", "tasks"
)


def test_a_cell_s_table_is_measured_over_the_plan_s_draft_vocabulary(
    bench: SimpleNamespace, lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed = PlanFile(PLANS["exit"], draft_vocabulary=tuple(range(2, 330, 3)))
    monkeypatch.setattr(lab, "_exiting", SelfSpeculativeLM(lab.model, None, trimmed, lookup=False))
    asked: dict[str, Any] = {}
    for module in (bench.lab, bench.paired):
        monkeypatch.setattr(
            module, "measure_cost", lambda *_, **given: asked.update(given) or COST, raising=False
        )
    assert lab.cost_now(5.0) is COST
    assert asked["draft_vocabulary"] == trimmed.draft_vocabulary
    assert tuple(asked["head"].ids.tolist()) == trimmed.draft_vocabulary


def test_the_worked_answers_are_right(bench: SimpleNamespace) -> None:
    sums = 0
    for task in ("math", "chat"):
        examples = bench.tasks.examples_of(task)
        assert len({e.prompt for e in examples}) == len(examples) >= 50
        assert all(e.continuation.strip() for e in examples)
        for e in examples if task == "math" else ():
            for left, right in re.findall(r"([\d(][\d +*/()-]*) = \$?(\d+)", e.continuation):
                assert eval(left) == int(right), e.continuation
                sums += 1
            *_, last, answer = e.continuation.strip().split("\n")
            assert answer.removeprefix("#### ") in re.findall(r"\d+", last)
    assert sums > 100


def test_prompts_have_the_length_that_is_asked_for(bench: SimpleNamespace, tokenizer: Any) -> None:
    examples = [Example(t, TOLD) for t in TEXTS]
    told = tuple(tokenizer(TOLD)["input_ids"])
    as_they_are = bench.tasks.asked(examples, tokenizer, context=None, room=100)
    assert [tokenizer.decode(p.ids) for p in as_they_are] == list(TEXTS)
    assert all(p.continuation == told for p in as_they_are)
    long = bench.tasks.asked(examples, tokenizer, context=40, room=40)
    assert [len(p.ids) for p in long] == [40] * len(long)
    assert tokenizer.decode(long[-1].ids).endswith(TOLD + "\n\n" + TEXTS[-1])
    assert not bench.tasks.asked(examples, tokenizer, context=40, room=39)
    shortest = min(len(p.ids) for p in as_they_are)
    fit = bench.tasks.asked(examples, tokenizer, context=None, room=shortest)
    assert [len(p.ids) for p in fit] == [shortest]


def test_cells_have_names_of_their_own(bench: SimpleNamespace) -> None:
    quick, full = bench.cells.QUICK, bench.cells.full()
    assert len(quick) == len({c.name for c in quick}) == 12
    assert len(full) == len({c.name for c in full}) == 4 * (2 * 4 + 1) * 3 * 3
    assert {c.batch for c in full if c.kind == "forced"} == {1}
    own = bench.cells.cells_of("quick", own_prompts=True)
    assert {c.task for c in own} == {"prompts"}
    assert len(own) == len(set(own)) == 7


def test_times_of_a_call_are_kept_token_by_token(bench: SimpleNamespace, lab: Any) -> None:
    ways = lab.ours()
    prompts = [random_ids(9), random_ids(5)]
    sampling = SamplingParams(temperature=0.8, seed=1)
    for turn in (
        *bench.modes.ours(
            ways, prompts, random.Random(0), sampling=sampling, max_new_tokens=7
        ).values(),
        bench.modes.Theirs(lab.model, ways["fixed"].lm, None, sampling=sampling).decode(
            "hf", prompts, max_new_tokens=7
        ),
    ):
        assert turn.tokens == sum(count for _, count in turn.arrivals) == 14
        assert 0.0 < turn.first < turn.arrivals[-1][0] <= turn.whole.wall
        steps = list(pairwise([seconds for seconds, _ in turn.arrivals]))
        going = turn.going[1:] or [2] * len(steps)
        assert len(turn.rounds) == sum(turn.going)  # a record of each row that goes on
        spent = [rows * (now - before) for (before, now), rows in zip(steps, going, strict=True)]
        assert [seconds * count for seconds, count in turn.gaps()] == pytest.approx(spent)


def test_rows_that_have_ended_wait_for_no_token(bench: SimpleNamespace) -> None:
    whole = SimpleNamespace(wall=4.0)
    arrivals = ((1.0, 2), (2.0, 2), (3.0, 1), (4.0, 2))
    gaps = [(1.0, 2), (1.0, 1), (0.5, 2)]
    ours = bench.modes.Turn(((5, 6), (5, 6, 7, 8, 9)), whole, arrivals, going=(2, 2, 1, 1))
    assert ours.gaps() == gaps
    padded = bench.modes.Turn(((5, 6), (5, 6, 7, 8)), whole, tuple((s, 2) for s, _ in arrivals))
    assert padded.gaps() == [(1.0, 2)] * 3


def test_our_modes_take_turns_where_no_device_works_ahead(bench: SimpleNamespace) -> None:
    parties, modes = bench.measuring.parties, ["hf", "fixed", "hf-static", "automatic"]
    orders = set()
    for seed in range(20):
        found = parties(modes, torch.device("cpu"), random.Random(seed))
        assert sorted(found) == [["fixed", "automatic"], ["hf"], ["hf-static"]]
        orders.add(tuple(map(tuple, found)))
    assert len(orders) == 6
    alone = parties(modes, torch.device("cuda"), random.Random(0))
    assert sorted(alone) == [["automatic"], ["fixed"], ["hf"], ["hf-static"]]


def test_a_padded_batch_gives_transformers_each_prompt_as_it_is(
    bench: SimpleNamespace, lab: Any
) -> None:
    theirs = bench.modes.Theirs(lab.model, lab.lm(), None, sampling=SamplingParams())
    prompts = [random_ids(9), random_ids(4)]
    together = theirs.decode("hf", prompts, max_new_tokens=6)
    alone = [theirs.decode("hf", [p], max_new_tokens=6).texts[0] for p in prompts]
    assert list(together.texts) == alone


def test_transformers_static_cache_is_not_compiled_for_each_prompt(
    bench: SimpleNamespace, lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU it would be, most of a minute each time."""
    given, generate = [], type(lab.model).generate

    def generating(model: Any, *args: Any, **settings: Any) -> Any:
        given.append((settings.get("cache_implementation"), settings.get("disable_compile")))
        return generate(model, *args, **settings)

    monkeypatch.setattr(type(lab.model), "generate", generating)
    theirs = bench.modes.Theirs(lab.model, lab.lm(), None, sampling=SamplingParams())
    theirs.decode("hf-static", [random_ids(9)], max_new_tokens=3)
    theirs.decode("hf", [random_ids(9)], max_new_tokens=3)
    assert given == [("static", True), (None, None)]


def test_another_token_stops_the_cell_and_is_measured_once(
    bench: SimpleNamespace, lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, calls = bench.measuring.ours, []

    def wrong(ways: Any, *given: Any, **settings: Any) -> Any:
        calls.extend(ways)
        turns = right(ways, *given, **settings)
        return {
            name: replace(turn, texts=((1,),)) if ways[name].num_draft_tokens == "auto" else turn
            for name, turn in turns.items()
        }

    monkeypatch.setattr(bench.measuring, "ours", wrong)
    monkeypatch.setattr(bench.measuring, "THEIR_BASE", "")
    theirs = bench.modes.Theirs
    monkeypatch.setattr(theirs, "decode", lambda *_, **__: refuse())
    results = bench.measuring.Results(Journal(None, {}).once)
    cell = bench.cells.Cell("prompts", "greedy")
    for _ in range(2):
        with pytest.raises(AssertionError, match="other tokens than plain"):
            results.of(lab, cell)
    assert 4 < len(calls) < 20


def test_a_mode_that_transformers_refuses_is_left_out_with_the_reason(
    bench: SimpleNamespace, lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = bench.modes.Theirs.decode

    def decode(self: Any, mode: str, prompts: Any, **settings: Any) -> Any:
        return refuse() if mode == "hf-static" else right(self, mode, prompts, **settings)

    monkeypatch.setattr(bench.modes.Theirs, "decode", decode)
    found = bench.measuring.measure(lab, bench.cells.Cell("prompts", "sampled", batch=3))
    assert found["unsupported"] == {"hf-static": "not with this model"}
    assert set(found["modes"]) == {"hf", *bench.modes.OURS}
    assert found["modes"]["hf"]["identical_to_own_plain"] is None
    assert found["modes"]["automatic"]["identical_to_own_plain"] == 1.0
    assert "predicted_speedup" not in found["modes"]["automatic"]


@pytest.mark.parametrize("context", [None, 6, 40])
def test_no_prompt_is_there_twice(bench: SimpleNamespace, lab: Any, context: int | None) -> None:
    found = lab.prompts(bench.cells.Cell("prompts", "sampled", context=context))
    assert len(TEXTS) <= len(found) == len(set(found))


def test_what_settings_are_tuned_on_is_not_timed(
    bench: SimpleNamespace, lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(cell: Any) -> list[tuple[int, ...]]:
        source = bench.measuring.Written(lab, cell)
        source.prepare()
        return [ids for group in source.groups for ids in group]

    ways = lab.ours()
    monkeypatch.setattr(lab, "ours", lambda: ways)  # nothing is decoded
    (spare,) = lab.spares
    for cell in (bench.cells.Cell("prompts", "sampled"), bench.cells.Cell("prompts", "greedy")):
        assert set(timed(cell)) == {p.ids for p in lab.prompts(cell)} - {spare}
    behind = timed(bench.cells.Cell("prompts", "sampled", context=len(spare) + 20))
    assert behind
    assert all(ids[-len(spare) :] != spare for ids in behind)
    shorter = timed(bench.cells.Cell("prompts", "sampled", context=6))
    assert shorter
    assert spare[-6:] not in shorter
    monkeypatch.setattr(bench.measuring, "LEAST", len(TEXTS))
    assert spare in timed(bench.cells.Cell("prompts", "greedy"))  # too few without it


def test_a_known_text_is_followed_with_the_drafts_that_were_counted(
    bench: SimpleNamespace, lab: Any
) -> None:
    cell = bench.cells.Cell("prompts", "forced")
    source = bench.measuring.Known(lab, cell)
    assert len(source.groups) == len(TEXTS)
    for text in source.groups:
        runs = source._runs(text)
        assert len(runs) == text.window
        turn = source.decode(["fixed"], text, tokens=8)["fixed"]
        assert turn.texts[0] == text.ids[text.start :]
        whole = [r for r in turn.rounds if r.index and r.finish_reason is None]
        counted = walk(runs, bench.modes.FIXED)
        full = [r.num_accepted_tokens for r in whole if r.num_draft_tokens == bench.modes.FIXED]
        assert full[: len(counted)] == counted[: len(full)]
        assert all(r.num_draft_passes == r.num_draft_tokens for r in whole)
    found = bench.measuring.measure(lab, cell)
    assert set(found["modes"]) == {"autoregressive", "fixed"}
    assert "speedup_vs_hf" not in found["modes"]["fixed"]


def test_whose_drafts_change_the_text_is_counted(
    bench: SimpleNamespace, lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = bench.modes.Theirs.decode

    def decode(self: Any, mode: str, prompts: Any, **settings: Any) -> Any:
        turn = right(self, mode, prompts, **settings)
        spoilt = mode == "hf-prompt-lookup" and len(prompts[0]) > 10
        return replace(turn, texts=((0,),)) if spoilt else turn

    monkeypatch.setattr(bench.modes.Theirs, "decode", decode)
    found = bench.exactness_table.shares(lab, ["prompts"], 4, 6, Journal(None, {}))
    lengths = [len(lab.tokenizer(t)["input_ids"]) for t in TEXTS]
    equal = {mode: entry["equal"] for mode, entry in found.items()}
    assert equal.pop("hf-prompt-lookup") == sum(n <= 10 for n in lengths) < 4
    assert set(equal.values()) == {4}
    assert {"hf, batch of 8", "automatic, batch of 8"} < set(equal)


def test_the_draft_model_is_trained_once_with_the_built_in_tokenizer(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def run(command: list[str], **_: Any) -> None:
        commands.append(command)
        assert (tmp_path / "tokenizer.json").is_file()
        (tmp_path / "checkpoint").mkdir()

    monkeypatch.setattr(bench.lab.subprocess, "run", run)
    for _ in range(2):
        assert bench.lab.trained_draft(tmp_path) == tmp_path / "checkpoint"
    (command,) = commands
    assert all(Path(part).exists() for part in command if part.endswith((".py", ".yaml")))
    ours = yaml.safe_load((BENCH / "draft_model.yaml").read_text(encoding="utf-8"))
    theirs = yaml.safe_load((REPO / "recipes/pretrain_small.yaml").read_text(encoding="utf-8"))
    assert set(ours) <= set(theirs)
    assert ours["minutes"] <= 2.0
    assert ours["vocab_size"] == theirs["vocab_size"]


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--cells", "code-greedy,wrong", "--cells has 'wrong'; allowed are code-greedy"),
        ("--device", "tpu", "device must be 'cpu', 'cuda' or 'auto', got 'tpu'"),
        ("--dtype", "int8", "dtype must be one of bfloat16"),
        ("--prompts", Path("nowhere.jsonl"), "nowhere.jsonl cannot be read"),
    ],
)
def test_options_of_cells_are_refused_before_anything_is_loaded(
    bench: SimpleNamespace, option: str, value: Any, told: str
) -> None:
    usual = {"--limit": 12, "--seconds": 46.0, "--matrix": "quick", "--device": "auto"}
    with pytest.raises(pytest.UsageError, match=told):
        suite_options().pytest_configure(SimpleNamespace(getoption={**usual, option: value}.get))


def test_a_checkpoint_that_is_none_ends_the_cells_in_one_sentence(
    bench: SimpleNamespace, lab: Any, tmp_path: Path
) -> None:
    right, nowhere, opened = lab.options, str(tmp_path / "nowhere"), suite_options().opened
    for wrong in ({"model": nowhere}, {"draft_model": nowhere}):
        with pytest.raises(pytest.exit.Exception, match="nowhere' is not a folder"):
            opened(replace(right, **wrong))
    assert opened(right).draft_model is not None


@pytest.mark.parametrize(("seconds", "told"), [(0.0, "2 prompts of 4 end"), (1e6, "all 4 prompts")])
def test_an_empty_cell_says_how_many_prompts_were_tried(
    bench: SimpleNamespace,
    lab: Any,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    told: str,
) -> None:
    monkeypatch.setattr(lab, "options", replace(lab.options, max_repeated=-1.0))  # all texts loop
    monkeypatch.setattr(bench.measuring.Written, "prepare", lambda _: None)
    measured = bench.measuring.Measured(lab, bench.cells.Cell("prompts", "greedy"))
    measured.run(seconds, limit=2)
    reason = bench.measuring.why_empty(measured.document()["cell"])
    assert reason.startswith(told)
    assert ("--seconds" in reason) == (seconds == 0.0)


@pytest.mark.slow
def test_cells_that_are_gone_on_with_end_well(tmp_path: Path) -> None:
    """Nothing is left open, which pytest would make an error of when all cells have passed."""
    words = ["-m", "pytest", "bench", "--benchmark-only", "--smoke", "--cells", "code-sampled"]
    for _ in range(2):
        ended = subprocess.run(
            [sys.executable, *words, "--resume", str(tmp_path / "journal.jsonl")],
            cwd=REPO,
            check=False,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
