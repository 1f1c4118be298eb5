"""``layerskip profile``: a document, a table for people and a file that fits the model."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Result, run
from toys import NUM_LAYERS, PLANS, make_model

from layerskip import SelfSpeculativeLM
from layerskip.cli import main
from layerskip.cost import CostTable
from layerskip.fingerprint import mismatch
from layerskip.model import DecoderStack
from layerskip.plan import PlanFile, ranges
from layerskip.profiling import measure_cost


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a tokenizer, whose own plan is exit 2."""
    path = tmp_path_factory.mktemp("toy")
    make_model(dtype="bfloat16").save_pretrained(path)
    PLANS["exit"].save(path / "layerskip.json")
    return path


def profile(*argv: object) -> Result:
    """``layerskip profile ARGV`` in this process, briefly."""
    return run("profile", *argv, "--seconds", "0.1")


def check_refused(result: Result, sentence: str) -> None:
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith(f"layerskip: {sentence}")
    assert len(result.err.splitlines()) == 1


@pytest.fixture(scope="module")
def profiled(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("out") / "cost.json"
    return out, profile(folder, "--out", out, "--json")


def test_the_file_fits_the_model_and_its_plan(folder, profiled):
    table, lm = (
        CostTable.load(profiled[0]),
        SelfSpeculativeLM.from_pretrained(folder, num_draft_tokens=0),
    )
    assert mismatch(table, lm.stack, PLANS["exit"]) is None
    assert str(table.key["backend"]) == lm.stack.backend
    assert table.draft_head.at(1, 0) > 0.0
    assert table.verify.at(1, 0) > 0.0


def test_the_document_holds_the_table_and_its_units(folder, profiled):
    path, result = profiled
    assert len(result.out.splitlines()) == 1, result.err
    document = json.loads(result.out)
    table = CostTable.load(path)
    assert CostTable.from_dict(document["cost"]) == table
    assert document["model"] == str(folder)
    assert document["out"] == str(path)
    assert document["draft_layers"] == [0, 1]
    assert document["seconds"] > 0.0
    assert [u["context"] for u in document["units"]] == list(table.verify.contexts)
    first = document["units"][0]
    for suffix, of in (("", table.of(greedy=True)), ("_sampled", table)):
        plain = of.verify_pass(1, 0)
        assert first["plain_seconds" + suffix] == pytest.approx(plain)
        assert first["c" + suffix] == pytest.approx(of.draft_pass(1, 0) / plain)
        assert first["v" + suffix] == pytest.approx(of.verify_pass(8, 0) / plain)


def test_people_see_passes_by_rows_and_context(profiled):
    shown = profiled[1].err  # with --json, the table goes there
    for words in ("draft layers 0-1, bfloat16", "plain ", "c: draft / plain", "v: verify / plain"):
        assert words in shown
    table = CostTable.load(profiled[0]).of(greedy=True)
    assert f"{1e3 * table.verify_pass(8, 0):.2f}" in shown
    assert f"{1e3 * table.draft_pass(8, 0):.2f}" in shown


@pytest.mark.parametrize("kind", ["exit-layer", "plan", "plan-file"])
def test_another_plan_can_be_measured(folder, tmp_path, kind):
    plan = PLANS["skipping"]
    if kind == "plan":
        plan.save(tmp_path / "plan.json")
    else:
        PlanFile(plan).save(tmp_path / "plan.json")
    option = ("--exit-layer", 3) if kind == "exit-layer" else ("--plan", tmp_path / "plan.json")
    assert profile(folder, "--out", tmp_path / "cost.json", *option).code == 0
    layers = CostTable.load(tmp_path / "cost.json").key["draft_layers"]
    assert layers == ("0,1,2" if kind == "exit-layer" else "0,1,3,5")


KEPT = tuple(range(0, 331, 3))


@pytest.fixture
def trimmed(tmp_path: Path) -> Path:
    """A plan file with a draft vocabulary."""
    path = tmp_path / "plan.json"
    PlanFile(PLANS["skipping"], 3, draft_vocabulary=KEPT, measurements={"coverage": 0.957}).save(
        path
    )
    return path


def test_a_draft_vocabulary_is_measured_with_its_own_head(folder, tmp_path, trimmed, monkeypatch):
    heads = []

    def measured(stack, plan, *, head, **settings):
        heads.append(head)
        return measure_cost(stack, plan, head=head, **settings)

    monkeypatch.setattr("layerskip.profiling.measure_cost", measured)
    out = tmp_path / "cost.json"
    result = profile(folder, "--out", out, "--plan", trimmed)
    assert "draft layers 0-1, 3, 5 over 111 of 331 ids" in result.out
    assert [tuple(head.ids.tolist()) for head in heads] == [KEPT]
    table, lm = CostTable.load(out), SelfSpeculativeLM.from_pretrained(folder, num_draft_tokens=0)
    assert mismatch(table, lm.stack, PLANS["skipping"], KEPT) is None
    file = replace(PlanFile.load(trimmed), cost=table)
    file.save(trimmed)
    facts = info(folder, "--plan", trimmed)
    assert facts["cost_table"] == "saved, and of this machine"


def info(*argv: object) -> dict[str, Any]:
    result = run("info", *argv, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out.splitlines()[-1])


def test_info_says_that_rounds_of_a_device_draft_nothing_beside_the_vocabulary(
    folder, trimmed, monkeypatch
):
    monkeypatch.setattr(DecoderStack, "runs_rounds", True)
    assert info(folder, "--plan", trimmed)["draft_vocabulary"].startswith(
        "111 of 331 ids, in rounds that the host drives also those of a row's own text; 95.7%"
    )


def test_info_says_where_drafts_come_from(folder, trimmed):
    facts = info(folder, "--plan", trimmed)
    assert facts["plan_from"] == str(trimmed)
    assert facts["num_draft_tokens"] == 3
    assert facts["draft_vocabulary"].startswith(
        "111 of 331 ids and those of a row's own text; 95.7%"
    )
    assert facts["cost_table"].startswith("none saved")
    assert facts["cost_table"].endswith("layerskip search saves one")
    own = info(folder, "--num-draft-tokens", 0)
    assert own["plan_from"] == "layerskip.json of the checkpoint"
    assert own["draft_vocabulary"] == "all 331 ids"
    assert info(folder, "--exit-layer", 1, "--num-draft-tokens", 0)["plan_from"] == "--exit-layer"


def test_info_says_which_table_is_not_used(folder, trimmed, profiled):
    replace(PlanFile.load(trimmed), cost=CostTable.load(profiled[0])).save(trimmed)
    said = info(folder, "--plan", trimmed)["cost_table"]
    assert said.startswith("not used: the cost table was measured ")
    assert "(0,1, now 0,1,3,5)" in said
    assert "(all, now 111 ids" in said


def test_a_model_without_a_plan_is_measured_for_verify_alone(folder, tmp_path):
    (tmp_path / "model").mkdir()
    for file in folder.iterdir():
        if file.name != "layerskip.json":
            (tmp_path / "model" / file.name).symlink_to(file)
    result = profile(tmp_path / "model", "--out", tmp_path / "cost.json")
    assert result.code == 0, result.err
    assert "no draft layers" in result.out
    assert "c: draft" not in result.out
    table = CostTable.load(tmp_path / "cost.json")
    assert table.draft_pass(1, 0) == table.sampling


def test_an_older_table_is_replaced_whole(folder, tmp_path):
    out = tmp_path / "cost.json"
    out.write_text("old")
    assert profile(folder, "--out", out).code == 0
    assert CostTable.load(out).key["draft_layers"] == "0,1"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--out", "{tmp}/none/cost.json"), "{tmp}/none/cost.json cannot be written: there is no"),
        (("--out", "{tmp}"), "{tmp} is a folder; give the name of a file"),
        ((), "the following arguments are required: --out"),
        (("--out", "{tmp}/cost.json", "--lookup"), "unrecognized arguments: --lookup"),
        (("--out", "{tmp}/cost.json", "--plan", "{tmp}/none.json"), "plan file {tmp}/none.json ca"),
        (("--out", "{tmp}/cost.json", "--plan", "a", "--exit-layer", "1"), "argument --exit-layer"),
        (("--out", "{tmp}/cost.json", "--exit-layer", "6"), "exit_layer must be between 1 and 5"),
    ],
)
def test_mistakes_are_one_sentence_before_anything_is_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any, sentence: str
) -> None:
    def measured(*_: object, **__: object) -> Callable:
        pytest.fail("measured")

    monkeypatch.setattr("layerskip.profiling.measure_cost", measured)
    given = [str(o).replace("{tmp}", str(tmp_path)) for o in options]
    check_refused(profile(folder, *given), sentence.replace("{tmp}", str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seconds", ["0", "nan", "1e9"])
def test_a_time_that_makes_no_sense_is_refused(folder, tmp_path, seconds, capsys):
    out = str(tmp_path / "cost.json")
    assert main(["profile", str(folder), "--out", out, "--seconds", seconds]) == 2
    assert capsys.readouterr().err.startswith("layerskip: --seconds must be finite and between 0.1")


def test_an_interrupted_profile_leaves_nothing(folder, tmp_path, monkeypatch, capsys):
    def interrupted(*_: object, **__: object) -> CostTable:
        raise KeyboardInterrupt

    monkeypatch.setattr("layerskip.profiling.measure_cost", interrupted)
    assert main(["profile", str(folder), "--out", str(tmp_path / "cost.json")]) == 130
    assert "layerskip: interrupted" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_layers_are_written_as_ranges():
    assert ranges([0, 1, 2, 5]) == "0-2, 5"
    assert ranges([3]) == "3"
    assert ranges(list(range(NUM_LAYERS))) == "0-5"


def test_commands_are_described_without_torch():
    script = (
        "import sys; from layerskip.cli import parser; parser().format_help(); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_threads_are_those_of_the_caller(profiled):
    assert CostTable.load(profiled[0]).key["threads"] == torch.get_num_threads()
