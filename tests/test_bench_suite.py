"""The benchmark suite: its cells, its modes, what it writes, and the tables made of that."""

import importlib.util
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from benching import BENCH, COST, REPO, TEXTS, TOLD, bench_modules, toy_checkpoint, toy_lab
from toys import PLANS, make_model, random_ids

from layerskip import SamplingParams, SelfSpeculativeLM
from layerskip.calibration import walk
from layerskip.cli import main
from layerskip.journal import Journal
from layerskip.plan import PlanFile
from layerskip.prompts import Example

MODULES = (
    "cells", "drift", "exactness_table", "figures", "forced", "goals", "lab", "measuring",
    "modes", "never_slower", "paired", "plots", "readme", "recording_cost", "scaling",
    "simulation", "tables", "tasks", "traffic",
)  # fmt: skip
FIGURES = {
    "new_tokens", "tokens_per_second", "tokens_per_cpu_second", "seconds_to_first_token",
    "seconds_per_token_p50", "seconds_per_token_p90", "seconds_per_token_p99",
    "speedup_vs_autoregressive", "speedup_vs_autoregressive_ci95",
    "cpu_speedup_vs_autoregressive", "speedup_vs_hf", "speedup_vs_hf_ci95",
    "cpu_speedup_vs_hf", "identical_to_own_plain", "identical_to_our_plain", "kv_cache_bytes",
    "peak_memory_bytes", "settings", "seconds_per_token",
}  # fmt: skip


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    with bench_modules(*MODULES) as modules:
        yield modules


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    return toy_checkpoint(tmp_path_factory.mktemp("toy"), tokenizer)


@pytest.fixture(scope="module")
def lab(bench: SimpleNamespace, folder: Path) -> Iterator[Any]:
    with toy_lab(bench, folder) as lab:
        yield lab


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


@pytest.fixture(scope="module")
def greedy(bench: SimpleNamespace, lab: Any) -> dict[str, Any]:
    return bench.measuring.measure(lab, bench.cells.Cell("prompts", "greedy"))


def test_a_cell_tells_everything_of_every_mode(bench: SimpleNamespace, greedy: Any) -> None:
    assert set(greedy["modes"]) == set(bench.modes.MODES)
    assert not greedy["unsupported"]
    assert (greedy["cell"]["prompts"], greedy["cell"]["tokens"]) == (2, 8)
    assert {"commit", "machine", "versions", "threads", "load", "dtype"} <= set(greedy["cell"])
    for mode, found in greedy["modes"].items():
        assert set(found) >= FIGURES
        assert found["new_tokens"] == 16
        assert found["kv_cache_bytes"] > 0 < found["peak_memory_bytes"]
        assert len(found["seconds_per_token"]) == 2
        p50, p90, p99 = (found[f"seconds_per_token_p{p}"] for p in (50, 90, 99))
        assert 0.0 < p50 <= p90 <= p99
        for base in ("autoregressive", "hf"):
            low, high = found[f"speedup_vs_{base}_ci95"]
            assert low <= found[f"speedup_vs_{base}"] <= high
        if mode in bench.modes.OURS:
            assert found["identical_to_own_plain"] == found["identical_to_our_plain"] == 1.0
    assert greedy["modes"]["autoregressive"]["predicted_speedup"] == pytest.approx(1.0)
    assert greedy["modes"]["autoregressive"]["speedup_vs_autoregressive"] == 1.0
    assert greedy["modes"]["hf"]["speedup_vs_hf"] == 1.0
    assert greedy["modes"]["fixed"]["acceptance_rate"] > 0.0
    assert greedy["modes"]["hf-early-exit"]["settings"]["assistant_early_exit"] == 2
    for mode in bench.modes.ALONE:  # of eight tokens
        assert 1.0 <= greedy["modes"][mode]["mean_accepted_length"] <= 8.0


def test_a_draft_model_and_an_early_exit_have_caches_of_their_own(greedy: Any) -> None:
    cache = {mode: found["kv_cache_bytes"] for mode, found in greedy["modes"].items()}
    assert cache["hf-draft-model"] > cache["hf"]
    assert cache["hf-early-exit"] > cache["hf"]
    assert cache["fixed"] == cache["autoregressive"]


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


def refuse() -> None:
    raise ValueError("not with this model\nand more")


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


def test_what_was_measured_before_an_interruption_is_not_measured_again(
    bench: SimpleNamespace,
    lab: Any,
    greedy: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, cell = tmp_path / "journal.jsonl", bench.cells.Cell("prompts", "forced")
    monkeypatch.setattr(bench.measuring, "measure", lambda *_: greedy)
    first = bench.measuring.Results(Journal(path, lab.subject()).once).of(lab, cell)
    assert first == greedy
    monkeypatch.setattr(bench.measuring, "measure", lambda *_: refuse())
    again = bench.measuring.Results(Journal(path, lab.subject()).once)
    assert again.of(lab, cell) == first
    with pytest.raises(ValueError, match="not with this model"):
        again.of(lab, bench.cells.Cell("prompts", "greedy"))
    with pytest.raises(ValueError, match="another"):
        Journal(path, lab.subject() | {"threads": 99})


@pytest.fixture(scope="module")
def resumed(
    bench: SimpleNamespace, lab: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    """Options with files of their own, and the journal of a run that went on with them."""
    base = tmp_path_factory.mktemp("resumed")
    for name in ("checkpoint", "draft"):
        shutil.copytree(folder, base / name)
    options = replace(
        lab.options,
        model=str(base / "checkpoint"),
        prompts=base / "checkpoint" / "prompts.jsonl",
        draft_model=str(base / "draft"),
    )
    for _ in range(2):
        Journal(base / "journal.jsonl", bench.lab.Lab(options).subject()).once("a cell", dict, dict)
    return options, base / "journal.jsonl"


@pytest.mark.parametrize(
    ("changed", "said"),
    [("prompts", "prompts"), ("model", "fingerprint"), ("plan", "plan file"), ("draft", "draft")],
)
def test_a_resumed_run_knows_its_files_by_what_they_hold(
    bench: SimpleNamespace, resumed: tuple[Any, Path], folder: Path, changed: str, said: str
) -> None:
    options, path = resumed
    checkpoint, draft = Path(options.model), Path(options.draft_model)
    for one in (checkpoint, draft):  # as they were
        shutil.copytree(folder, one, dirs_exist_ok=True)
    if changed == "prompts":
        options.prompts.write_text('{"prompt": "as it was"}\n', encoding="utf-8")
    elif changed == "plan":
        PlanFile(PLANS["exit"], acceptance=(0.5,)).save(checkpoint / "layerskip.json")
    else:
        other = make_model()
        other.get_output_embeddings().weight.data.mul_(1.5)
        other.save_pretrained(checkpoint if changed == "model" else draft)
    with pytest.raises(ValueError, match=rf"journal of another measurement \({said}"):
        Journal(path, bench.lab.Lab(options).subject())


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


def test_fewer_prompts_than_tasks_are_refused_before_anything_is_loaded(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench.exactness_table, "Lab", lambda _: pytest.fail("loaded"))
    monkeypatch.setattr(sys, "argv", ["exactness_table.py", "--limit", "3"])
    with pytest.raises(SystemExit):
        bench.exactness_table.main()
    assert "--limit is 3 prompts; give 4 or more" in capsys.readouterr().err


def test_a_round_copies_the_same_bytes_whatever_the_context(bench: SimpleNamespace) -> None:
    size = bench.scaling.Size(vocabulary=64, layers=2)
    lm = bench.scaling.model_of(size)
    short, long = (bench.scaling.copied(lm, replace(size, context=n)) for n in (60, 450))
    assert long["copied_bytes"] - short["copied_bytes"] < 64
    assert long["largest_copy_bytes"] < long["held_cache_bytes"]
    cache = bench.scaling.started(lm, size)._rows.cache
    with bench.scaling.Copied() as counted:
        cache.keys.clone()
        cache.keys.to(cache.keys.dtype)  # does nothing
        torch.empty_like(cache.keys).copy_(cache.keys)
    assert counted.total == 2 * cache.keys.nbytes
    assert counted.largest == cache.keys.nbytes
    with bench.scaling.Copied() as counted:
        cache.keys[:, torch.tensor([0]), torch.tensor([1])] = cache.keys[:, [0], [2]]
    assert counted.total < 3 * cache.keys[:, 0, 0].nbytes  # one token's, not the cache's


@pytest.mark.parametrize("rows", [1, 3])
def test_a_round_never_copies_the_cache(bench: SimpleNamespace, rows: int) -> None:
    size = bench.scaling.Size(vocabulary=64, layers=2, context=890, rows=rows)
    found = bench.scaling.copied(bench.scaling.model_of(size), size)
    keys_of_a_row = found["held_cache_bytes"] // (2 * size.layers * rows)  # in one layer
    assert found["largest_copy_bytes"] < keys_of_a_row


def test_a_line_and_an_exponent_are_fitted(bench: SimpleNamespace) -> None:
    fit = bench.scaling.fitted([0, 1, 2, 4], [3.0, 5.0, 7.0, 11.0])
    assert (fit["start"], fit["slope"], fit["r2"]) == pytest.approx((3.0, 2.0, 1.0))
    assert bench.scaling.fitted([1, 2, 4], [5.0, 20.0, 80.0])["exponent"] == pytest.approx(2.0)


def test_scaling_writes_every_point(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "scaling.json"
    monkeypatch.setattr(bench.scaling, "AXES", {"drafted": (0, 1, 2)})
    small = bench.scaling.Size(vocabulary=64, layers=2, context=8)
    monkeypatch.setattr(bench.scaling, "Size", lambda: small)
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--turns", "1", "--out", str(out)])
    bench.scaling.main()
    found = json.loads(out.read_text(encoding="utf-8"))
    points = found["axes"]["drafted"]["points"]
    assert [p["size"] for p in points] == [0, 1, 2]
    assert all(p["cpu_seconds"] > 0.0 < p["copied_bytes"] for p in points)
    assert "commit" in found


def runs_in_no_time(bench: SimpleNamespace, patch: pytest.MonkeyPatch, record: Path) -> None:
    """Scripts that measure nothing, and write what they would have measured there."""
    lab = SimpleNamespace(subject=dict)
    patch.setattr(bench.exactness_table, "Lab", lambda _: lab)
    patch.setattr(bench.exactness_table, "shares", lambda *_: {})
    patch.setattr(bench.scaling, "along", lambda *_: {})
    patch.setattr(bench.scaling, "table", lambda _: "")
    patch.setattr(bench.never_slower, "lab_of", lambda _: lab)
    patch.setattr(bench.never_slower, "summed", lambda name, pairs: {})
    for name in bench.never_slower.SETUPS:
        patch.setitem(bench.never_slower.SETUPS, name, lambda *_: lambda _: [])
    for module in (bench.exactness_table, bench.scaling):
        patch.setattr(module, "RECORD", record)
    for module in (bench.drift, bench.never_slower, bench.recording_cost, bench.traffic):
        patch.setattr(module, "dated", lambda _: record)
    patch.setattr(bench.recording_cost, "measured", lambda _: {})
    requests = [[]] * bench.drift.LEAST
    patch.setattr(
        bench.drift, "read_run", lambda path: {"sampling": {"temperature": float(path.name)}}
    )
    patch.setattr(
        bench.drift, "recorded", lambda _, arm, label: dict.fromkeys(("", label or ""), requests)
    )
    patch.setattr(bench.drift, "report", lambda *_: {})
    patch.setattr(bench.drift, "line_of", lambda _: "")
    counts = dict.fromkeys(("bad_lines", "left_out", "equal"), 0)

    def command(*given: Any) -> dict[str, Any]:
        prompts = given[given.index("--limit") + 1] if "--limit" in given else 177
        return {**counts, "prompts": prompts, "cells": []}

    patch.setattr(bench.traffic, "layerskip", command)
    patch.setattr(bench.traffic, "decided", lambda *_: {})
    patch.setattr(bench.traffic, "compared", lambda *_: {})


TRAFFIC = "--prompts traffic.jsonl --label category"
DRIFT = "0.8 0 --arms auto,4 --label category"


@pytest.mark.parametrize(
    ("name", "given", "whole"),
    [
        ("exactness_table", "", True),
        ("exactness_table", "--limit 8", False),
        ("exactness_table", "--dtype float32", False),
        ("exactness_table", "--draft-model none", False),
        ("scaling", "--turns 30", True),
        ("scaling", "--turns 3", False),
        ("scaling", "--axes rows", False),
        ("never_slower", "--turns 60 --ramp-turns 6", True),
        ("never_slower", "--cases short", False),
        ("never_slower", "--turns 4", False),
        ("never_slower", "--model elsewhere", False),
        ("traffic", f"{TRAFFIC} --limit 220", True),
        ("traffic", f"{TRAFFIC} --limit 20", False),
        ("traffic", f"{TRAFFIC} --pairs 4", False),
        ("traffic", f"{TRAFFIC} --temperature 0", False),
        ("drift", f"{DRIFT} --drafts 1000000", True),
        ("drift", f"{DRIFT} --drafts 3000", False),
        ("drift", "0.8 0 --label category", False),
        ("drift", "0.8 --arms auto,4 --label category", False),
        ("drift", "0.8 0 --arms auto,4", False),
        ("recording_cost", "--turns 5 --limit 6 --tokens 48", True),
        ("recording_cost", "--turns 1", False),
        ("recording_cost", "--model elsewhere", False),
    ],
)
def test_only_a_whole_run_becomes_a_record(
    bench: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    given: str,
    whole: bool,
) -> None:
    record = tmp_path / "record.json"
    runs_in_no_time(bench, monkeypatch, record)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *given.split()])
    getattr(bench, name).main()
    (found,) = tmp_path.iterdir()
    assert found.name == ("record.json" if whole else "record-part.json")


def test_what_a_part_of_a_run_leaves_is_not_committed(bench: SimpleNamespace) -> None:
    record = bench.paired.dated("workloads")
    ignored = (REPO / ".gitignore").read_text(encoding="utf-8").split()

    def matches(path: Path) -> bool:
        return any(fnmatch(f"/{path.relative_to(REPO).as_posix()}", one) for one in ignored)

    assert matches(bench.paired.part_of(record))
    assert not matches(record)


@pytest.mark.parametrize(
    ("given", "whole"),
    [
        ("--turns 24 --requests 192 --new-tokens 48", True),
        ("--turns 4", False),
        ("--requests 24", False),
        ("--policies off", False),
        ("--concurrency 1", False),
        ("--new-tokens 32", False),
        ("--clock cpu", False),
        ("--lookup", False),
    ],
)
def test_only_a_whole_simulation_becomes_a_record(
    bench: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: str,
    whole: bool,
) -> None:
    monkeypatch.setattr(bench.simulation, "dated", lambda _: tmp_path / "record.json")
    for out, name in (((), f"record{'' if whole else '-part'}.json"), (("--out", "a"), "a")):
        monkeypatch.setattr(sys, "argv", ["simulation.py", *given.split(), *out])
        assert bench.simulation.parsed().out.name == name


@pytest.mark.parametrize(
    ("name", "measured", "given"),
    [
        ("scaling", "along", ""),
        ("never_slower", "summed", ""),
        ("drift", "report", DRIFT),
        ("traffic", "compared", TRAFFIC),
    ],
)
def test_a_stopped_run_becomes_no_record(
    bench: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    measured: str,
    given: str,
) -> None:
    runs_in_no_time(bench, monkeypatch, tmp_path / "record.json")
    left = iter([{}, {}])  # of five axes, eight cases, eight buckets and four comparisons
    monkeypatch.setattr(getattr(bench, name), measured, lambda *_: next(left))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *given.split()])
    with pytest.raises(StopIteration):
        getattr(bench, name).main()
    assert [path.name for path in tmp_path.iterdir()] == ["record-part.json"]


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


@pytest.fixture(scope="module")
def written(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """``pytest bench --smoke`` of one cell on the toy, as it writes its JSON."""
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    command = [sys.executable, "-m", "pytest", "bench", "--smoke", "--benchmark-only", "-q"]
    own = ["--model", str(folder), "--prompts", str(folder / "prompts.jsonl"), "--device", "cpu"]
    cells = ["--cells", "prompts-forced"]
    done = subprocess.run(
        [*command, *own, *cells, f"--benchmark-json={path}", "-p", "no:cacheprovider"],
        cwd=REPO,
        # A worker of pytest-xdist would have its benchmarks switched off.
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        | {"PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text(encoding="utf-8"))


def test_every_mode_reports_its_own_times(written: Any) -> None:
    found = {b["name"]: b for b in written["benchmarks"]}
    modes = ("autoregressive", "fixed")
    assert set(found) == {f"test_decoding[prompts-forced:{mode}]" for mode in modes}
    for b in found.values():
        info = b["extra_info"]
        assert info["mode"] in b["name"]
        assert (b["group"], b["stats"]["rounds"]) == ("prompts-forced", 2)
        times = b["stats"]["data"]
        speeds = sorted(1.0 / seconds for seconds in times)
        assert info["tokens_per_second"] == pytest.approx(sum(speeds) / 2)
        assert info["tokens"] == 6
        assert FIGURES - {"seconds_per_token"} - {k for k in FIGURES if "hf" in k} <= set(info)
    plain, fixed = (found[f"test_decoding[prompts-forced:{m}]"]["extra_info"] for m in modes)
    assert plain["speedup_vs_autoregressive"] == 1.0
    assert fixed["acceptance_rate"] is not None


def test_its_file_says_where_and_with_what_but_no_names(written: Any) -> None:
    machine = written["machine_info"]
    assert {"processor", "threads", "torch", "transformers", "layerskip"} <= set(machine)
    assert machine["node"] == ""
    assert "branch" not in written["commit_info"]
    assert "id" in written["commit_info"]


@pytest.mark.parametrize(("matrix", "kept"), [("full", {"mean"}), ("quick", {"mean", "data"})])
def test_the_whole_matrix_leaves_single_samples_out(
    bench: Any, matrix: str, kept: set[str]
) -> None:
    spec = importlib.util.spec_from_file_location("bench_conftest", BENCH / "conftest.py")
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    document = {"benchmarks": [{"stats": {"mean": 1.0, "data": [1.0]}}]}
    conftest.pytest_benchmark_update_json(
        SimpleNamespace(getoption={"--matrix": matrix}.get), document
    )
    assert set(document["benchmarks"][0]["stats"]) == kept


def results(folder: Path, written: dict[str, Any], greedy: dict[str, Any]) -> Path:
    """Result files for all tables, made of what was measured on the toy."""
    quick = written | {"benchmarks": []}
    for mode, found in greedy["modes"].items():
        info = {"mode": mode, "cell": "code-sampled", **greedy["cell"], **found}
        stats = {"data": info.pop("seconds_per_token")}
        quick["benchmarks"].append({"extra_info": info, "stats": stats})
    for b in written["benchmarks"]:
        info = b["extra_info"] | {"cell": "code-forced"}
        quick["benchmarks"].append({"extra_info": info, "stats": b["stats"]})
    points = [
        {"size": n, "seconds": n * 1e-3, "cpu_seconds": n * 1e-3, "copied_bytes": 2**20,
         "largest_copy_bytes": 2**10, "held_cache_bytes": n * 2**20}
        for n in (1, 2, 4)
    ]  # fmt: skip
    fit = {"start": 0.0, "slope": 1e-3, "r2": 1.0, "exponent": 1.0}
    contents = {
        "bench": quick,
        "bench-full": quick,
        "exactness": {"dtype": "bfloat16", "modes": {
            "hf": {"equal": 4, "prompts": 4, "why_not": ""},
            "hf-static": {"equal": 0, "prompts": 0, "why_not": "not with this model"},
            "automatic, batch of 8": {"equal": 3, "prompts": 4, "why_not": ""},
        }},
        "scaling": {"axes": {"rows": {"points": points, "fits": {"cpu_seconds": fit}}}},
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    for dated in (BENCH / "results").glob("????-??-??-*.json"):
        shutil.copy(dated, folder)
    shutil.copytree(BENCH / "results" / "gpu", folder / "gpu")
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def speed_of(figures: dict[str, Any]) -> float:
    return figures["speedup_vs_autoregressive"]


def test_each_bound_is_held_against_its_own_case(bench: SimpleNamespace) -> None:
    cases = {"cold": {"wall": 2.9, "bound": 3.0}, "switching": {"wall": 1.4, "bound": 1.0}}
    assert bench.goals.of_bounds(cases)[1:] == ["all", "1 of 2; switching 1.4 of 1"]


def test_a_cell_s_ratio_is_the_median_of_its_prompts_ratios(bench: SimpleNamespace) -> None:
    """Which is not that of their medians: 1 and 2 times as fast as plain decoding."""
    plain, fixed, automatic = [1.0, 2.0, 4.0], [4.0, 1.0, 2.0], [2.0, 1.0, 4.0]
    cells = {
        "code": {
            "autoregressive": {"seconds_per_token": plain, "speedup_vs_autoregressive": 1.0},
            "fixed": {"seconds_per_token": fixed, "speedup_vs_autoregressive": 2.0},
            "automatic": {"seconds_per_token": automatic, "speedup_vs_autoregressive": 1.0},
        }
    }
    found = [line[-1] for line in bench.goals.of_cells(cells)]
    assert found == ["1 of 1; worst 1.00, `code`", "1 of 1; worst 1.00, `code`"]


def test_a_gpu_s_figures_are_held_against_their_goals(
    bench: SimpleNamespace, tmp_path: Path
) -> None:
    """Those that no time was left for are not."""
    tables = sys.modules["gpu.tables"]
    with pytest.raises(SystemExit, match="make gpu-check"):
        tables.newest(tmp_path, decoding=False)
    share = {"value": 0.7, "goal": ">= 0.8", "met": False}
    ratios = [
        {"value": v, "goal": ">= 0.97", "met": v and v >= 0.97} for v in (1.2, 0.9, 1.5, None)
    ]
    sections = {
        "plain": {"ok": True, "8B": {"share_of_copy": share}},
        "batches": {"8B": {f"batch {i}": {"auto_over_off": r} for i, r in enumerate(ratios)}},
        "speedup": {"ok": True, "8B": {
            f"acceptance {i}": {"auto": {"speedup": v}} for i, v in enumerate((1.4, 0.9, "nan"))
        }},
    }  # fmt: skip
    folder = tmp_path / "gpu"
    folder.mkdir()
    for day, gpu in (("01", "old"), ("02", "new")):
        record = {"machine": {"gpu": gpu}, "sections": sections if gpu == "new" else {}}
        for suffix in ("", tables.DECODING):
            (folder / f"2026-01-{day}-G{suffix}.json").write_text(json.dumps(record))
    found = {title: rest for title, *rest in tables.goals(tmp_path)}
    assert found[f"new: {tables.GOALS['plain']}"] == [">= 0.8", "0 of 1; 0.70"]
    assert found[f"new: {tables.GOALS['batches']}"] == [">= 0.97", "2 of 3; 0.90 to 1.50"]
    assert found["new: automatic over plain, by acceptance"] == [">= 0.97", "1 of 2; 0.90 and 1.40"]
    assert found[f"new: {tables.GOALS['memory']}"] == ["-", "nothing was measured"]
    assert tables.by_batch(sections["batches"]["8B"]) == ["0.90", "-", "-"]
    # What a later run left out is what an earlier one of the same GPU found.
    record = {"machine": {"gpu": "new"}, "sections": {"plain": {}}}
    (folder / f"2026-01-03-G{tables.DECODING}.json").write_text(json.dumps(record))
    found = {title: rest for title, *rest in tables.goals(tmp_path)}
    assert found[f"new: {tables.GOALS['plain']}"] == ["-", "nothing was measured"]
    assert found[f"new: {tables.GOALS['batches']}"] == [">= 0.97", "2 of 3; 0.90 to 1.50"]


def test_a_mode_is_held_against_the_fastest_number_of_its_kind(bench: SimpleNamespace) -> None:
    speeds = {"plain": 1.0, "k=2": 1.6, "k=7": 2.0, "k=2, look-up": 2.4, "k=7, look-up": 2.2}
    modes = {n: {"measured_cpu_speedup": s} for n, s in (speeds | {"automatic": 1.9}).items()}
    over = bench.figures.over_best
    assert over(modes, "automatic", looking_up=False) == pytest.approx(1.9 / 2.0)
    assert over(modes, "automatic", looking_up=True) == pytest.approx(1.9 / 2.4)
    slow = {
        n: {"measured_cpu_speedup": min(s["measured_cpu_speedup"], 0.5)} for n, s in modes.items()
    }
    assert over(slow | {"plain": modes["plain"]}, "automatic", looking_up=False) == 0.5


def marked(name: str, inside: str = "out of date\n") -> str:
    return f"before\n<!-- bench:{name}:begin -->\n{inside}<!-- bench:{name}:end -->\nafter\n"


def test_tables_are_written_between_their_markers(
    bench: SimpleNamespace,
    written: Any,
    greedy: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, page = results(tmp_path / "results", written, greedy), tmp_path / "README.md"
    page.write_text("".join(map(marked, bench.readme.KNOWN)), encoding="utf-8")
    arguments = ["readme.py", "--readme", str(page), "--results", str(folder)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--check"])
    with pytest.raises(SystemExit, match="is not what"):
        bench.readme.main()
    monkeypatch.setattr(sys, "argv", arguments)
    with page.open(encoding="utf-8") as before:
        bench.readme.main()
        assert "out of date" in before.read()  # written in one move, never half
    text = page.read_text(encoding="utf-8")
    assert "out of date" not in text
    assert text.count("before\n") == text.count("after\n") == len(bench.readme.KNOWN)
    monkeypatch.setattr(sys, "argv", [*arguments, "--check"])
    bench.readme.main()
    automatic = greedy["modes"]["automatic"]
    assert f"**{automatic['speedup_vs_autoregressive']:.2f}**" in text
    assert f"{1e3 * automatic['seconds_per_token_p99']:.1f}" in text
    assert "| layerskip, automatic" not in text
    assert "3 of 4 | 75.0%" in text
    assert "not with this model | -" in text
    own = greedy["modes"][max(bench.modes.ALONE, key=lambda m: speed_of(greedy["modes"][m]))]
    assert f"; {own['identical_to_own_plain']:.0%} as plain |" in text
    assert "1 to 4 | 1.00 to 4.00 | 1.00 | 1e+03 | 1.00 to 1.00 | 4.00" in text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (marked("speeds"), "no table is called 'speeds'"),
        ("<!-- bench:speed:begin -->\n", "has no end"),
        ("<!-- bench:speed:begin -->\n<!-- bench:cells:end -->\n", "has no end"),
        (marked("speed"), "`make bench` writes it"),
    ],
)
def test_a_wrong_marker_is_refused(
    bench: SimpleNamespace, tmp_path: Path, text: str, reason: str
) -> None:
    with pytest.raises(SystemExit, match=reason):
        bench.readme.rewritten(text, bench.tables.Files(tmp_path))


def test_the_readmes_tables_are_what_the_result_files_give(bench: SimpleNamespace) -> None:
    for page in bench.readme.PAGES:
        text = page.read_text(encoding="utf-8")
        assert bench.readme.rewritten(text, bench.tables.Files(BENCH / "results")) == text


def test_pictures_are_drawn_of_the_result_files(
    bench: SimpleNamespace,
    written: Any,
    greedy: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = results(tmp_path / "results", written, greedy)
    monkeypatch.setattr(sys, "argv", ["plots.py", "--results", str(folder)])
    bench.plots.main()
    pictures = {p.name: p.read_bytes() for p in folder.glob("*.png")}
    assert set(pictures) == {"speed.png", "scaling.png"}
    bench.plots.main()
    assert {p.name: p.read_bytes() for p in folder.glob("*.png")} == pictures


def test_the_operator_s_commands_in_a_row(
    bench: SimpleNamespace, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_process(*arguments: object) -> Any:
        with redirect_stdout(io.StringIO()) as said:
            assert main([*map(str, arguments), "--json"]) == 0
        return json.loads(said.getvalue().splitlines()[-1])

    lines = [{"prompt": f"{text} {i}", "kind": "ab"[i % 2]} for i, text in enumerate(TEXTS * 2)]
    prompts, out = tmp_path / "traffic.jsonl", tmp_path / "2026-01-01-traffic.json"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    size = ["--max-new-tokens", "6", "--pairs", "6", "--users", "1,2", "--fixed", "2"]
    size += ["--profile-seconds", "0.2"]
    own = ["--model", str(folder), "--prompts", str(prompts), "--label", "kind"]
    files = ["--runs", str(tmp_path / "runs"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["traffic.py", *own, *size, *files])
    monkeypatch.setattr(bench.traffic, "layerskip", in_process)
    bench.traffic.main()
    text = out.read_text(encoding="utf-8")
    assert str(tmp_path) not in text
    found = json.loads(text)
    assert (found["prompts"], found["equal"]) == (8, 8)
    for report in found["reports"].values():
        assert {one["task"]: one["requests"] for one in report["tasks"]} == {"a": 4, "b": 4}
        assert report["total"]["requests"] == 8
    assert [(one["a"], one["b"]) for one in found["compared"]] == [
        ("0", "policy-auto"), ("auto", "policy-auto"), ("0", "policy-2"), ("2", "policy-2"),
    ]  # fmt: skip
    assert {one["equal_share"] for one in found["compared"]} == {1.0}
    assert {(c["policy"], c["concurrency"]) for c in found["simulated"]} == {
        (policy, users) for policy in ("off", "fixed:2", "auto") for users in (1, 2)
    }
    table = bench.tables.traffic(bench.tables.Files(tmp_path))
    assert "| too few: on |" in table
    assert "| policy-2 over 0 | 6 |" in table


def test_an_interval_of_too_few_has_no_ends(bench: SimpleNamespace) -> None:
    ends = {"low": None, "high": None}
    assert bench.tables.interval_of(ends | {"value": 1.5}) == "1.50 (- to -)"
    assert bench.tables.interval_of(ends | {"value": None}) == "-"
    assert (
        bench.tables.interval_of({"value": 1.0, "low": 0.5, "high": 2.0}) == "1.00 (0.50 to 2.00)"
    )
    assert bench.tables.interval_of(None) == "-"


@pytest.mark.parametrize(
    ("most", "said"), [(None, "on"), (0, "off"), (3, "3 at most")], ids=["on", "off", "capped"]
)
def test_a_decision_is_said_in_a_word(bench: SimpleNamespace, most: int | None, said: str) -> None:
    rule = {"requests": 29, "max_draft_tokens": most}
    assert bench.tables.decision(rule) == said
    assert bench.tables.decision(rule | {"requests": 28}) == "too few: on"
