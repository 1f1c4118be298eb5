"""``bench/workloads.py`` runs, at a tiny size, and writes what it promises."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benching import COST, bench_modules, refuse, run, toy_arguments
from toys import PLANS

from layerskip.cost import CostTable
from layerskip.hf_modes import EarlyExitSettings
from layerskip.plan import PlanFile

SCRIPTS = ("bad_drafters", "modes", "paired", "tables", "workloads")
TRIMMED = tuple(range(2, 330, 3))


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    with bench_modules(*SCRIPTS) as modules:
        yield modules


@pytest.fixture
def arguments(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: Any,
    scripts: SimpleNamespace,
) -> list[str]:
    monkeypatch.setattr(scripts.workloads, "FIXED", (2, 3))
    return toy_arguments(tmp_path / "toy", tokenizer, monkeypatch)


def workload_arguments(arguments: Sequence[str], out: Path) -> list[str]:
    *model, _, file = arguments
    named = [f"--prompts={name}={file}" for name in ("code", "adversarial")]
    size = ["--workloads", "code,adversarial", "--limit", "2", "--tokens", "8", "--no-theirs"]
    return [*model, *named, *size, "--temperatures", "0.8", "--out", str(out)]


def test_workloads_writes_every_mode_beside_plain(
    scripts: SimpleNamespace,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out.json"
    run(scripts.workloads, workload_arguments(arguments, out), monkeypatch)
    document = json.loads(out.read_text(encoding="utf-8"))
    code, adversarial = document["workloads"]
    fixed = [f"k={k}" for k in scripts.workloads.FIXED]
    guessing = [f"{name}, look-up" for name in fixed]
    ours = ["plain", *fixed, "automatic", "combined", *guessing]
    assert sorted(code["modes"]) == sorted([*ours, "look-up", "look-up, automatic"])
    assert sorted(adversarial["modes"]) == sorted(document["mix"]) == sorted(ours)
    for mode in (*code["modes"].values(), *adversarial["modes"].values()):
        assert mode["identical_to_plain"] == 1.0
        for clock in ("", "cpu_"):
            low, high = mode[f"{clock}speedup_vs_plain_ci95"]
            assert low <= mode[f"{clock}speedup_vs_plain"] <= high
    assert code["modes"]["plain"]["share_of_plain_rounds"] == 1.0
    assert code["modes"]["plain"]["predicted_speedup"] == pytest.approx(1.0)
    assert code["modes"]["k=3"]["acceptance_rate"] > 0.0
    for mode in adversarial["modes"].values():
        assert mode["acceptance_rate"] == 0.0
    assert adversarial["modes"]["k=2"]["draft_tokens_per_round"] > 1.5
    for one in (code, adversarial):
        speeds = {name: mode["predicted_speedup"] for name, mode in one["modes"].items()}
        found = one["automatic_to_best_fixed"]
        best = max(speeds[name] for name in ("plain", *fixed))
        assert speeds[found["counted_best"]] == best
        assert found["counted"] == pytest.approx(speeds["automatic"] / best)
        assert one["combined_to_best_looking_up"]["best"] in ("plain", *guessing)
    assert adversarial["automatic_to_best_fixed"]["counted_best"] == "plain"
    assert capsys.readouterr().out.count("automatic / ") == 2


def test_workloads_knows_no_name_without_prompts(
    scripts: SimpleNamespace,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out.json"
    given = [*workload_arguments(arguments, out), "--workloads", "code,maths"]
    with pytest.raises(SystemExit):
        run(scripts.workloads, given, monkeypatch)
    assert "no workload maths: there are " in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("whole", "interrupted"), [(True, False), (False, False), (True, True)], ids=str
)
def test_only_a_whole_run_of_workloads_becomes_the_record(
    scripts: SimpleNamespace,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    whole: bool,
    interrupted: bool,
) -> None:
    record = tmp_path / "2026-01-01-workloads.json"
    monkeypatch.setattr(scripts.workloads, "dated", lambda name: record)
    monkeypatch.setattr(scripts.workloads, "is_record", lambda *_: whole)
    if interrupted:
        monkeypatch.setattr(scripts.workloads, "speed_table", lambda _: 1 / 0)
    *given, _, _ = workload_arguments(arguments, record)
    given += ["--workloads", "code", "--limit", "1", "--tokens", "3"]
    with pytest.raises(ZeroDivisionError) if interrupted else contextlib.nullcontext():
        run(scripts.workloads, given, monkeypatch)
    (found,) = tmp_path.glob("2026*.json")
    assert (found == record) == (whole and not interrupted)
    content = json.loads(found.read_text(encoding="utf-8"))
    assert content["command"]["out"] == (record if whole else found).name
    files = scripts.tables.Files(tmp_path)
    if found == record:
        assert files.latest("workloads") == content
    else:
        with pytest.raises(SystemExit, match="has no dated workloads"):
            files.latest("workloads")


@pytest.mark.parametrize(
    ("given", "whole"),
    [
        ("", True),
        ("--profile-seconds 20 --limit 12 --temperatures 0.8 0 1", True),
        ("--limit 11", False),
        ("--workloads code,math,chat,copying", False),
        ("--temperatures 0.8", False),
        ("--no-theirs", False),
        ("--model elsewhere", False),
        ("--dtype float32", False),
        ("--tokens 8", False),
    ],
)
def test_a_record_of_workloads_has_all_that_its_tables_show(
    scripts: SimpleNamespace, given: str, whole: bool
) -> None:
    workloads = scripts.workloads
    options = workloads.parser_of().parse_args(given.split())
    names = workloads.names_of(options, ("math", "chat"))
    assert workloads.is_record(options, names) == whole
    assert not workloads.is_record(options, workloads.names_of(options, ("math",)))


def test_workloads_times_each_prompt_once(
    scripts: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    """Repeats of one prompt are not independent, and intervals would take them so."""
    with pytest.raises(SystemExit):
        scripts.workloads.parser_of().parse_args(["--repeats", "2"])
    assert "unrecognized arguments: --repeats" in capsys.readouterr().err


def test_workloads_measures_tables_among_the_prompts(
    scripts: SimpleNamespace,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(
        scripts.paired, "measure_cost", lambda *_, seconds, **__: asked.append(seconds) or COST
    )
    given = [*workload_arguments(arguments, tmp_path / "out.json"), "--profile-seconds", "8"]
    given += ["--workloads", "code", "--limit", "4", "--tokens", "2"]
    run(scripts.workloads, given, monkeypatch)
    assert asked == [4.0, 4.0, 2.0]  # drafts, look-ups; and after the third of four prompts


@pytest.mark.parametrize(("limit", "spared"), [(2, True), (3, False)])
def test_workloads_times_none_of_the_prompts_that_theirs_is_tuned_on(
    scripts: SimpleNamespace,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    limit: int,
    spared: bool,
) -> None:
    right, looked_at, tuned = scripts.workloads.decode_together, [], []

    def decode_together(prompt: list[int], *given: Any, **settings: Any) -> Any:
        looked_at.append(prompt)
        return right(prompt, *given, **settings)

    monkeypatch.setattr(scripts.workloads, "decode_together", decode_together)
    one = scripts.modes.NOT_TUNED

    def tune(_: Any, mode: str, prompts: list[list[int]], tokens: int) -> Any:
        tuned.extend(prompts)
        return one

    monkeypatch.setattr(scripts.modes.Theirs, "tune", tune)
    given = workload_arguments(arguments, tmp_path / "out.json")
    given.remove("--no-theirs")
    # As if each of the four texts looped: all that may be timed are looked at.
    given += ["--temperatures", "0", "--max-repeated=-1", "--workloads", "code"]
    run(scripts.workloads, [*given, "--limit", str(limit)], monkeypatch)
    assert len(tuned) == 2
    assert len(looked_at) == (2 if spared else 4)
    assert spared == all(prompt not in looked_at for prompt in tuned)


def test_workloads_has_transformers_three_assisted_modes(
    scripts: SimpleNamespace,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Each with the settings that were found for it; the draft model is the toy itself."""
    tried = [EarlyExitSettings(2, k, 0.0) for k in (2, 3)]
    monkeypatch.setattr(scripts.modes.Theirs, "grid", lambda self, mode: tried)
    out = tmp_path / "out.json"
    given = [*workload_arguments(arguments, out), "--draft-model", str(tmp_path / "toy")]
    given.remove("--no-theirs")
    given += ["--temperatures", "0", "--max-repeated", "1"]
    run(scripts.workloads, given, monkeypatch)
    document = json.loads(out.read_text(encoding="utf-8"))
    code, adversarial = (set(one["modes"]) for one in document["workloads"])
    theirs = {"hf-early-exit", "hf-prompt-lookup", "hf-draft-model"}
    assert theirs == code - adversarial - {"look-up", "look-up, automatic"}
    assert document["command"]["draft_model"] == "toy"  # no folder of this machine
    modes = document["workloads"][0]["modes"]
    assert all(modes[name]["identical_to_plain"] == 1.0 for name in theirs)
    drafts = [modes[name]["settings"].get("num_assistant_tokens") for name in sorted(theirs)]
    assert drafts[0] in (2, 3)
    assert drafts[1] in (2, 3)
    assert drafts[2] is None
    assert modes["hf-early-exit"]["settings"]["assistant_early_exit"] == 2


def test_a_mode_that_transformers_refuses_ends_workloads_in_a_sentence(
    scripts: SimpleNamespace,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(scripts.modes.Theirs, "decode", lambda *_, **__: refuse())
    given = [*workload_arguments(arguments, tmp_path / "out.json"), "--draft-model", "none"]
    given.remove("--no-theirs")
    with pytest.raises(SystemExit, match=r"hf-early-exit does not run .* with .*; --no-theirs"):
        run(scripts.workloads, [*given, "--workloads", "code"], monkeypatch)


def test_tables_are_measured_over_the_plan_s_draft_vocabulary(
    scripts: SimpleNamespace,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """As decoders have theirs: a table of another draft would not fit, and be measured again."""
    _, folder, *_ = arguments
    PlanFile(PLANS["exit"], draft_vocabulary=TRIMMED).save(Path(folder) / "layerskip.json")
    asked: list[Any] = []

    def measured(_: Any, plan: Any, *, draft_vocabulary=None, head=None, **__: Any) -> CostTable:
        ids = None if head is None else tuple(head.ids.tolist())
        asked.append((plan, draft_vocabulary, ids))
        return COST

    for script in (scripts.paired, scripts.workloads):
        monkeypatch.setattr(script, "measure_cost", measured, raising=False)
    given = [*workload_arguments(arguments, tmp_path / "out.json"), "--profile-seconds", "8"]
    given += ["--workloads", "code", "--limit", "3", "--tokens", "2"]
    run(scripts.workloads, given, monkeypatch)
    whole, trimmed = (None, None, None), (PLANS["exit"], TRIMMED, TRIMMED)
    assert asked == [trimmed, whole, trimmed]  # look-ups draft by no plan


def test_a_mode_that_writes_less_is_not_faster_for_it(scripts: SimpleNamespace) -> None:
    clock = scripts.workloads.Clock
    runs = [SimpleNamespace(token_ids=(1,) * n, whole=clock(n, 2.0 * n)) for n in (2, 8)]
    assert {scripts.workloads.per_token(run) for run in runs} == {clock(1.0, 2.0)}


def test_workloads_stops_at_another_token_and_keeps_what_it_had(
    scripts: SimpleNamespace,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    out, right = tmp_path / "out.json", scripts.workloads.decode_together

    def wrong(prompt: Any, ways: Any, chance: Any, **settings: Any) -> Any:
        found = right(prompt, ways, chance, **settings)
        for name, (lm, k) in ways.items():
            if k == 3 and isinstance(lm._drafter, scripts.bad_drafters.Corrupted):
                found[name] = replace(found[name], token_ids=(0,))
        return found

    monkeypatch.setattr(scripts.workloads, "decode_together", wrong)
    given = [*workload_arguments(arguments, out), "--limit", "1", "--tokens", "4"]
    with pytest.raises(AssertionError, match="adversarial, k=3: other tokens"):
        run(scripts.workloads, given, monkeypatch)
    (code,) = json.loads(out.read_text(encoding="utf-8"))["workloads"]
    assert (code["workload"], code["prompts"]) == ("code", 1)
