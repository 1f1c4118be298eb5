import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerskip import DraftPlan


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


def test_a_plan_of_a_later_version_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text('{"version": 2, "num_layers": 6, "draft_layers": [0]}')
    with pytest.raises(ValueError, match="plan version 2; this layerskip reads version 1"):
        DraftPlan.load(path)
