"""The cost table: between, beyond and before what was measured; to JSON and back."""

import json

import pytest

from layerskip.cost import CostTable, Curve

CURVE = Curve((8, 16), (0, 100), ((1.0, 2.0), (3.0, 6.0)))
TABLE = CostTable(CURVE, Curve((8, 16), (0,), ((0.5, 0.5),)), CURVE, 0.01, 8, {"device": "cpu"})


@pytest.mark.parametrize(
    ("rows", "context", "seconds"),
    [(8, 0, 1.0), (16, 100, 6.0), (12, 0, 1.5), (8, 50, 2.0), (12, 50, 3.0), (24, 0, 3.0)]
    + [(8, 200, 5.0), (1, 0, 1.0), (8, -5, 1.0)],
)
def test_a_curve_is_linear_inside_and_beyond_and_flat_before(rows, context, seconds):
    assert CURVE.at(rows, context) == pytest.approx(seconds)


def test_a_falling_curve_never_gets_negative():
    falling = Curve((8, 16), (0, 100), ((2.0, 1.0), (1.0, 0.5)))
    assert falling.at(1000, 1000) == 0.0


def test_passes_are_padded_and_sampled():
    assert TABLE.verify_pass(1, 0) == pytest.approx(1.0 + 0.01)
    assert TABLE.verify_pass(8, 0) == pytest.approx(1.0 + 0.08)
    assert TABLE.verify_pass(9, 0) == pytest.approx(2.0 + 0.09)
    assert TABLE.draft_pass(2, 100) == pytest.approx(3.0 + 0.5 + 0.02)


def test_a_table_survives_json():
    assert CostTable.from_dict(json.loads(json.dumps(TABLE.to_dict()))) == TABLE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 1 was expected, got 2"),
        ({"verify": {"rows": [8]}}, "not complete"),
        ({"sampling": None}, "not complete"),
    ],
)
def test_what_is_no_table_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        CostTable.from_dict(TABLE.to_dict() | change)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (((16, 8), (0,), ((1.0, 1.0),)), "rows must ascend"),
        (((8,), (), ()), "contexts must ascend"),
        (((8,), (0,), ((1.0, 2.0),)), "1 lines of 1 times"),
        (((8,), (0,), ((float("nan"),),)), "finite"),
    ],
)
def test_a_bad_grid_is_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        Curve(*parts)
