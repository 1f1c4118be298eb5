import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import layerskip
from layerskip import DraftPlan
from layerskip.cost import COST_VERSION, CostTable, Curve
from layerskip.params import SHARPNESS
from layerskip.plan import PlanFile

PACKAGE = Path(layerskip.__file__).parent


def test_exit_drafts_with_the_first_layers():
    plan = DraftPlan.exiting(num_layers=6, exit_layer=2)
    assert plan.layers == (0, 1)
    assert plan.shared_depth == 2


def test_skipping_shares_what_comes_before_the_first_skipped_layer():
    plan = DraftPlan.skipping(num_layers=6, skipped=[4, 2])
    assert plan.layers == (0, 1, 3, 5)
    assert plan.shared_depth == 2


@given(st.integers(1, 12), st.data())
def test_shared_depth_is_the_common_prefix_with_the_whole_model(depth, data):
    indices = st.sets(st.integers(0, depth - 1), min_size=1)
    layers = tuple(sorted(data.draw(indices)))
    expected = next((i for i, layer in enumerate(layers) if layer != i), len(layers))
    assert DraftPlan(depth, layers).shared_depth == expected


def test_plans_are_values():
    assert DraftPlan.exiting(num_layers=4, exit_layer=2) == DraftPlan(4, (0, 1))
    with pytest.raises(AttributeError, match="cannot assign"):
        DraftPlan(4, (0, 1)).layers = (0,)


@pytest.mark.parametrize("exit_layer", [0, -1, 6, 7])
def test_exit_layer_leaves_at_least_one_layer_on_either_side(exit_layer):
    message = f"exit_layer must be between 1 and 5, got {exit_layer}"
    with pytest.raises(ValueError, match=message):
        DraftPlan.exiting(num_layers=6, exit_layer=exit_layer)


@pytest.mark.parametrize("exit_layer", [[2], "2", 2.0, True, None])
def test_exit_layer_is_an_int(exit_layer):
    with pytest.raises(TypeError, match=r"exit_layer must be an int, got .+ \(\w+\)"):
        DraftPlan.exiting(num_layers=6, exit_layer=exit_layer)


@pytest.mark.parametrize("layers", [(), (1, 0), (1, 1)])
def test_layers_strictly_increase(layers):
    with pytest.raises(ValueError, match="layers must be one or more strictly increasing"):
        DraftPlan(6, layers)


def test_layers_are_a_tuple_of_ints():
    with pytest.raises(TypeError, match=r"layers must be a tuple of ints, got \[0, 1\]"):
        DraftPlan(6, [0, 1])
    with pytest.raises(TypeError, match="a draft layer must be an int, got '1'"):
        DraftPlan(6, (0, "1"))


@pytest.mark.parametrize("layer", [-1, 6])
def test_layers_are_layers_of_the_model(layer):
    with pytest.raises(ValueError, match=f"a draft layer must be between 0 and 5, got {layer}"):
        DraftPlan(6, (layer,))
    with pytest.raises(ValueError, match=f"a skipped layer must be between 0 and 5, got {layer}"):
        DraftPlan.skipping(num_layers=6, skipped=[layer])


def test_skipping_every_layer_leaves_no_draft():
    with pytest.raises(ValueError, match="one or more"):
        DraftPlan.skipping(num_layers=3, skipped=[0, 1, 2])


def test_a_saved_plan_is_read_back(tmp_path):
    plan = DraftPlan.skipping(num_layers=16, skipped=[9, 11])
    plan.save(tmp_path / "plan.json")
    assert DraftPlan.load(tmp_path / "plan.json") == plan


def test_the_file_names_what_it_holds(tmp_path):
    DraftPlan(6, (0, 2)).save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content == {"version": 1, "num_layers": 6, "draft_layers": [0, 2]}


def test_a_name_may_be_as_long_as_the_system_takes(tmp_path):
    path = tmp_path / ("p" * 255)
    FILE.save(path)
    assert PlanFile.load(path) == FILE


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"3", b"\xff\xfe", b'{"version": 1, "num_layers": 6, "draft_layers": 3}'],
)
def test_other_files_are_not_plans(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"plan\.json is not a plan file"):
        DraftPlan.load(path)


def test_a_missing_plan_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.json cannot be read: No such file"):
        DraftPlan.load(tmp_path / "none.json")


CURVE = Curve((1, 8), (0,), ((1.0, 2.0),))
FILE = PlanFile(
    DraftPlan(6, (0, 2)),
    num_draft_tokens=3,
    draft_vocabulary=(0, 5, 9),
    cost=CostTable(CURVE, CURVE, CURVE, 0.5, 8, {"device": "cpu", "threads": 2}, (1, 2)),
    fingerprint="abc",
    acceptance=(0.8, 0.5),
    calibration={"greedy": ((0.0, 0.25), (1.0, 0.875)), "sampled": ((0.5, 0.5),)},
    measurements={"plans": [{"draft_layers": [0], "speedup": 1.25}]},
)


@pytest.mark.parametrize("file", [FILE, PlanFile(None), PlanFile(DraftPlan(6, (0,)))])
def test_a_saved_plan_file_is_read_back(tmp_path, file):
    file.save(tmp_path / "plan.json")
    assert PlanFile.load(tmp_path / "plan.json") == file
    assert [f.name for f in tmp_path.iterdir()] == ["plan.json"]  # nothing temporary is left


def test_a_stopped_save_leaves_the_older_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("older", encoding="utf-8")

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        FILE.save(path)
    assert [f.name for f in tmp_path.iterdir()] == ["plan.json"]
    assert path.read_text(encoding="utf-8") == "older"


def test_a_bare_plan_is_a_plan_file_too(tmp_path):
    plan = DraftPlan(6, (0, 2))
    plan.save(tmp_path / "plan.json")
    assert PlanFile.load(tmp_path / "plan.json") == PlanFile(plan, "auto")


SCORES = [(text, kind) for text in ("code", "math") for kind in ("agreement", "overlap")]


def test_the_built_in_checkpoint_s_plan_file_loads():
    path = PACKAGE / "checkpoints" / "small" / "layerskip.json"
    file, card = PlanFile.load(path), json.loads(path.read_text(encoding="utf-8"))
    exit_layer = file.plan.exit_layer
    scores = [card["scores"][f"{text}_{kind}_{exit_layer}"] for text, kind in SCORES]
    assert file.acceptance == (round(sum(scores) / len(scores), 3),)
    plan = DraftPlan(16, (0, 1))
    assert file == replace(
        PlanFile(plan, "auto"),
        acceptance=file.acceptance,
        calibration=file.calibration,
        measurements={"trained_exits": card["trained_exits"]},
    )
    for points in (file.calibration["greedy"], file.calibration["sampled"]):
        # Hardly any is less sure.
        assert all(abs(told - share) < 0.1 for told, share in points if told > 0.3)
        assert points[-1][1] > 0.95


def test_a_plan_file_from_before_calibrations_is_read(tmp_path):
    FILE.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    del content["calibration"]
    (tmp_path / "plan.json").write_text(json.dumps(content))
    assert PlanFile.load(tmp_path / "plan.json") == replace(FILE, calibration={})


@pytest.mark.parametrize("sharpness", [None, 1.0])
def test_a_calibration_of_other_confidences_is_left_out(tmp_path, sharpness):
    FILE.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content.pop("sharpness") == SHARPNESS
    if sharpness is not None:
        content["sharpness"] = sharpness
    (tmp_path / "plan.json").write_text(json.dumps(content))
    assert PlanFile.load(tmp_path / "plan.json") == replace(FILE, calibration={})


@pytest.mark.parametrize("version", [COST_VERSION - 1, COST_VERSION + 1])
def test_a_cost_table_of_another_version_is_left_out(tmp_path, caplog, version):
    FILE.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    content["cost"] = {"version": version, "other": "fields"}
    (tmp_path / "plan.json").write_text(json.dumps(content))
    assert PlanFile.load(tmp_path / "plan.json") == replace(FILE, cost=None)
    (said,) = caplog.messages
    assert f"is of version {version}, this layerskip has version {COST_VERSION}" in said
    assert "run layerskip search again" in said


def test_a_plan_is_read_out_of_a_plan_file(tmp_path):
    FILE.save(tmp_path / "plan.json")
    assert DraftPlan.load(tmp_path / "plan.json") == FILE.plan


def test_a_file_that_says_that_no_plan_pays_holds_no_plan(tmp_path):
    PlanFile(None).save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"plan\.json holds no plan: none was found to pay"):
        DraftPlan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    "change",
    [
        {"num_draft_tokens": "many"},
        {"num_draft_tokens": 33},
        {"num_draft_tokens": True},
        {"draft_vocabulary": [3, 3]},
        {"draft_vocabulary": []},
        {"draft_vocabulary": ["a"]},
        {"draft_vocabulary": 7},
        {"draft_layers": [9]},
        {"num_layers": None},
        {"fingerprint": 3},
        {"acceptance": [1.5]},
        {"acceptance": 0.5},
        {"acceptance": [10**400]},
        {"calibration": 3},
        {"calibration": {"greedy": 3}},
        {"calibration": {"greedy": [3]}},
        {"calibration": {"greedy": [[0.5]]}},
        {"calibration": {"greedy": [["a", 0.5]]}},
        {"calibration": {"often": [[0.5, 0.5]]}},
        {"measurements": []},
        {"cost": {}},
        {"cost": []},
        {"cost": {"version": True}},
        {"cost": {"version": "5"}},
        {"version": 1, "draft_layers": None},
    ],
)
def test_a_damaged_plan_file_is_refused(tmp_path, change):
    FILE.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text()) | change
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"plan\.json is not a plan file \("):
        PlanFile.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    "name",
    [
        "num_layers",
        "draft_layers",
        "num_draft_tokens",
        "draft_vocabulary",
        "fingerprint",
        "acceptance",
        "measurements",
        "cost",
    ],
)
def test_a_plan_file_that_lacks_something_is_refused(tmp_path, name):
    FILE.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    del content[name]
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"not a plan file \(it has no '{name}'\)"):
        PlanFile.load(tmp_path / "plan.json")


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "plan.json"
    FILE.save(path)
    before = path.read_bytes()
    for unwritable in (float("nan"), {1, 2}):
        with pytest.raises(ValueError, match=r"plan\.json cannot be written: not JSON"):
            PlanFile(FILE.plan, measurements={"speedup": unwritable}).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_broken_move_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    FILE.save(path)
    before = path.read_bytes()
    broken = OSError(28, "No space left on device")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(broken))
    with pytest.raises(ValueError, match="cannot be written: No space left on device"):
        PlanFile(None).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_where_no_file_can_be_is_said(tmp_path):
    with pytest.raises(ValueError, match="is a folder; give the name of a file"):
        FILE.save(tmp_path)
    with pytest.raises(ValueError, match=r"there is no folder .*none"):
        FILE.save(tmp_path / "none" / "plan.json")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"num_draft_tokens": 40}, ValueError, "num_draft_tokens must be between 0 and 32, got 40"),
        ({"num_draft_tokens": "all"}, ValueError, "must be 'auto' or between 0 and 32, got 'all'"),
        ({"draft_vocabulary": (2, 1)}, ValueError, "strictly increasing token ids"),
        ({"draft_vocabulary": [1]}, TypeError, r"must be a tuple of token ids or None, got \[1\]"),
        ({"cost": {"a": 1}}, TypeError, "cost must be a CostTable or None, got {'a': 1}"),
        ({"acceptance": (2.0,)}, ValueError, "an acceptance must be finite and between 0 and 1"),
        ({"acceptance": [0.5]}, TypeError, r"acceptance must be a tuple of shares, got \[0.5\]"),
        ({"acceptance": 0.5}, TypeError, "acceptance must be a tuple of shares, got 0.5"),
        ({"calibration": {"block": ()}}, ValueError, r'must map "greedy", "sampled" or both to'),
        ({"calibration": {"greedy": ((0.5,),)}}, TypeError, "must be a tuple of pairs of numbers"),
        ({"calibration": {"greedy": ()}}, ValueError, "one or more points of increasing"),
        (
            {"calibration": {"greedy": ((0.5, 0.5), (0.5, 0.6))}},
            ValueError,
            "one or more points of increasing confidence",
        ),
        ({"calibration": {"greedy": ((0.5, 2.0),)}}, ValueError, "a number of a calibration must"),
        ({"fingerprint": 1}, TypeError, "fingerprint must be text, got 1"),
        ({"measurements": 3}, TypeError, "measurements must be a mapping, got 3"),
        ({"measurements": {"coverage": "x"}}, TypeError, "the coverage measured must be a number"),
        ({"measurements": {"coverage": math.nan}}, ValueError, "the coverage measured must be fin"),
    ],
)
def test_a_plan_file_checks_what_it_is_given(settings, error, message):
    with pytest.raises(error, match=message):
        PlanFile(FILE.plan, **settings)


@pytest.mark.parametrize("plan", ["plan.json", {"layers": [0]}])
def test_a_plan_file_is_of_a_plan(plan):
    with pytest.raises(TypeError, match="plan must be a DraftPlan or None, got"):
        PlanFile(plan)
