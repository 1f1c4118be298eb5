"""What scripts of bench/ leave: records of whole runs, parts of others, runs that go on."""

import io
import json
import shutil
import sys
from contextlib import closing, redirect_stdout
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benching import REPO, TEXTS, lab_fixtures
from toys import PLANS, make_model

from layerskip.cli import main
from layerskip.journal import Journal
from layerskip.plan import PlanFile

bench, folder, lab = lab_fixtures(
    "drift",
    "exactness_table",
    "lab",
    "modes",
    "never_slower",
    "paired",
    "recording_cost",
    "scaling",
    "simulation",
    "tables",
    "traffic",
)
TRAFFIC = "--prompts traffic.jsonl --label category"
DRIFT = "0.8 0 --arms auto,4 --label category"


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
        with closing(Journal(base / "journal.jsonl", bench.lab.Lab(options).subject())) as journal:
            journal.once("a cell", dict, dict)
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
