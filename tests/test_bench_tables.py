"""What a cell and a run of them tell, and the tables and pictures made of that."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benching import BENCH, REPO, lab_fixtures, refuse, suite_options

from layerskip.journal import Journal

bench, folder, lab = lab_fixtures(
    "cells",
    "figures",
    "goals",
    "history",
    "lab",
    "measuring",
    "modes",
    "paired",
    "plots",
    "readme",
    "tables",
)
FIGURES = {
    "new_tokens", "tokens_per_second", "tokens_per_cpu_second", "seconds_to_first_token",
    "seconds_per_token_p50", "seconds_per_token_p90", "seconds_per_token_p99",
    "speedup_vs_autoregressive", "speedup_vs_autoregressive_ci95",
    "cpu_speedup_vs_autoregressive", "speedup_vs_hf", "speedup_vs_hf_ci95",
    "cpu_speedup_vs_hf", "identical_to_own_plain", "identical_to_our_plain", "kv_cache_bytes",
    "peak_memory_bytes", "settings", "seconds_per_token",
}  # fmt: skip


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


def test_what_was_measured_before_an_interruption_is_not_measured_again(
    bench: SimpleNamespace,
    lab: Any,
    greedy: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, cell = tmp_path / "journal.jsonl", bench.cells.Cell("prompts", "forced")
    monkeypatch.setattr(bench.measuring, "measure", lambda *_: greedy)
    with closing(Journal(path, lab.subject())) as journal:
        first = bench.measuring.Results(journal.once).of(lab, cell)
    assert first == greedy
    monkeypatch.setattr(bench.measuring, "measure", lambda *_: refuse())
    with closing(Journal(path, lab.subject())) as journal:
        again = bench.measuring.Results(journal.once)
        assert again.of(lab, cell) == first
        with pytest.raises(ValueError, match="not with this model"):
            again.of(lab, bench.cells.Cell("prompts", "greedy"))
    with pytest.raises(ValueError, match="another"):
        Journal(path, lab.subject() | {"threads": 99})


@pytest.fixture(scope="module")
def written(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """``pytest bench --smoke`` of one cell on the toy, as it writes its JSON.

    That nothing is saved to compare with is a warning of pytest-benchmark's, and no more.
    """
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    command = [sys.executable, "-m", "pytest", "bench", "--smoke", "--benchmark-only", "-q"]
    own = ["--model", str(folder), "--prompts", str(folder / "prompts.jsonl"), "--device", "cpu"]
    cells = ["--cells", "prompts-forced"]
    compare = ["--benchmark-compare", f"--benchmark-storage={path.parent}"]
    done = subprocess.run(
        [*command, *own, *cells, *compare, f"--benchmark-json={path}", "-p", "no:cacheprovider"],
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
    assert "PytestBenchmarkWarning: Can't compare" in done.stderr
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


def test_no_prompts_are_refused_before_anything_is_loaded(bench: Any) -> None:
    def configure(limit: int, seconds: float) -> None:
        asked = {"--limit": limit, "--seconds": seconds, "--matrix": "quick", "--device": "auto"}
        suite_options().pytest_configure(SimpleNamespace(getoption=asked.get))

    for limit in (0, -3):
        with pytest.raises(pytest.UsageError, match=f"--limit must be 1 or more.*, got {limit}"):
            configure(limit, 46.0)
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(pytest.UsageError, match=f"--seconds must be a .*, got {seconds}"):
            configure(1, seconds)
    configure(1, 0.0)


@pytest.mark.parametrize(("matrix", "kept"), [("full", {"mean"}), ("quick", {"mean", "data"})])
def test_the_whole_matrix_leaves_single_samples_out(
    bench: Any, matrix: str, kept: set[str]
) -> None:
    document = {"benchmarks": [{"stats": {"mean": 1.0, "data": [1.0]}}]}
    suite_options().pytest_benchmark_update_json(
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
        "exactness": {"dtype": "bfloat16", "commit": "c0ffee", "modes": {
            "hf": {"equal": 4, "prompts": 4, "why_not": ""},
            "hf-static": {"equal": 0, "prompts": 0, "why_not": "not with this model"},
            "automatic, batch of 8": {"equal": 3, "prompts": 4, "why_not": ""},
        }},
        "scaling": {
            "commit": "dec0de", "machine": "toy", "threads": 2,
            "axes": {"rows": {"points": points, "fits": {"cpu_seconds": fit}}},
        },
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


def test_what_is_learnt_while_memory_is_counted_is_forgotten(
    bench: SimpleNamespace, lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes take longer then: in a cell of 16 tokens six texts were decoded plainly after it."""
    measured = bench.measuring.Measured(lab, bench.cells.Cell("prompts", "greedy"))
    lm, learnt = measured.source.ways["automatic"].lm, []
    peak = bench.measuring.peak_memory
    monkeypatch.setattr(
        bench.measuring, "peak_memory", lambda device: learnt.append(lm.controller) or peak(device)
    )
    measured._warm_up(measured.source.groups[0])
    assert learnt
    assert lm.controller not in learnt
    assert lm.controller._experiences, "it has seen a text since"


def test_each_bound_is_held_against_its_own_case(bench: SimpleNamespace) -> None:
    cases = {"cold": {"wall": 2.9, "bound": 3.0}, "switching": {"wall": 1.4, "bound": 1.0}}
    assert bench.goals.of_bounds(cases)[1:] == ["all", "1 of 2; switching 1.4 of 1"]


def test_the_matrix_says_where_automatic_drafting_is_not_the_fastest(
    bench: SimpleNamespace,
) -> None:
    def modes(**speeds: float) -> dict[str, dict[str, float]]:
        return {
            name.replace("_", "-"): {"speedup_vs_autoregressive": speed}
            for name, speed in speeds.items()
        }

    cells = {
        "a": modes(hf=0.5, hf_static=1.6, automatic=1.2, fixed=1.0),
        "b": modes(hf=0.5, automatic=1.2, fixed=1.5),
        "c": modes(automatic=0.96),
        "forced": modes(autoregressive=1.0, fixed=1.2),
    }
    found = [line[1:] for line in bench.goals.of_matrix(cells)]
    plain = ["0.97", "2 of 3; worst 0.96, `c`"]
    others = [["1", "1 of 2; worst 0.75, `a`"], ["0.97", "1 of 2; worst 0.80, `b`"]]
    assert found == [plain, *others]


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


def write_record(folder: Path, name: str, **content: Any) -> None:
    record = {"commit": "0123456789ab", "machine": "a machine"} | content
    (folder / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")


def lines_of(table: str) -> list[list[str]]:
    """Cells of each line below the header."""
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def test_every_run_of_the_bounds_says_what_was_beyond(
    bench: SimpleNamespace, tmp_path: Path
) -> None:
    def case(wall: float, bound: float, counted: float | None = 1.5) -> dict[str, Any]:
        interval = [wall - 0.5, wall + 0.5]
        within = wall <= bound
        return {"wall": wall, "wall_ci95": interval, "wall_within": within, "counted": counted}

    good = {"adversarial, cold": case(2.0, 3.0), "switching": case(0.1, 1.0, None)}
    bad = {"adversarial, cold": case(3.2, 3.0), "switching": case(1.4, 1.0, None)}
    write_record(tmp_path, "2026-01-02-never-slower", cases=good)
    write_record(tmp_path, "2026-01-02-never-slower-second", cases=bad)
    write_record(tmp_path, "2026-01-02-never-slower-first", cases=good)
    write_record(tmp_path, "2026-01-01-never-slower-float32-sampled", cases=good)
    write_record(tmp_path, "2026-01-01-workloads", workloads=[])
    found = lines_of(bench.history.bounds(bench.tables.Files(tmp_path)))
    of = ["`0123456`", "a machine, bfloat16", "0"]
    cold = "+2.0 (+1.5 to +2.5)"
    assert found[0][:4] == ["`2026-01-01-float32-sampled`", of[0], "a machine, float32", "0.8"]
    assert found[1] == ["`2026-01-02-first`", *of, "2 of 2", cold, "-"]
    beyond = [
        "adversarial, cold +3.2 (+2.7 to +3.7), counted +1.5",
        "switching +1.4 (+0.9 to +1.9), counted -",
    ]
    assert found[2][0] == "`2026-01-02-second`"
    assert found[2][-3:] == ["0 of 2", "+3.2 (+2.7 to +3.7)", "; ".join(beyond)]
    assert found[3] == ["`2026-01-02`", *of, "2 of 2", cold, "-"]
    assert len(found) == 4


def test_every_run_of_the_workloads_says_which_texts_missed_the_goal(
    bench: SimpleNamespace, tmp_path: Path
) -> None:
    def text(name: str, prompts: int, automatic: float, **more: float) -> dict[str, Any]:
        speeds = {"plain": 1.0, "k=3": 2.0, "automatic": automatic, "combined": automatic} | more
        modes = {mode: {"measured_cpu_speedup": speed} for mode, speed in speeds.items()}
        return {"workload": name, "temperature": 0.8, "prompts": prompts, "modes": modes}

    def beside(name: str, prompts: int, automatic: float) -> dict[str, Any]:
        return text(name, prompts, automatic, **{"k=3, look-up": 1.6})

    bad = beside("adversarial", 4, 0.1)
    write_record(tmp_path, "2026-01-01-workloads", workloads=[text("code", 4, 1.94), bad])
    texts = [beside("code", 4, 2.0), beside("chat", 5, 1.5), {"workload": "math", "prompts": 0}]
    write_record(tmp_path, "2026-01-02-workloads-float32", workloads=[*texts, bad])
    write_record(tmp_path, "2026-01-03-workloads", workloads=[bad])
    found = lines_of(bench.history.workloads(bench.tables.Files(tmp_path)))
    of = ["`0123456`", "a machine, bfloat16"]
    assert found[0] == ["`2026-01-01`", *of, "1 x 4", "0.970 to 0.970", "-", "-", "-"]
    assert found[1][:4] == ["`2026-01-02-float32`", of[0], "a machine, float32", "2 x 4 to 5"]
    missed = ["0.750 to 1.000", "chat, 0.8 0.750", "0.938 to 1.250", "chat, 0.8 0.938"]
    assert found[1][4:] == missed
    assert len(found) == 2


# Tables of make bench, of trainings and of a GPU, and those that name what they show themselves.
TELL_ELSEWHERE = (
    *("speed", "where", "cells", "latency", "exactness", "recipes", "gpu", "goals"),
    *("never-slower-runs", "workloads-runs"),
)


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
    assert "| prompts, bfloat16, at `c0ffee` |" in text
    assert "\n\nMeasured at `dec0de`, toy, threads: 2.\n" in text
    assert text.count("\nMeasured at ") == len(bench.readme.KNOWN) - len(TELL_ELSEWHERE)


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
