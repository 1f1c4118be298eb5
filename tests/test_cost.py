"""The cost table: between, beyond and before what was measured; to JSON and back."""

import json
from dataclasses import replace

import pytest

from layerskip.cost import CostTable, Curve

CURVE = Curve((8, 16), (0, 100), ((1.0, 2.0), (3.0, 6.0)))
TABLE = CostTable(CURVE, Curve((8, 16), (0,), ((0.5, 0.5),)), CURVE, 0.01, 8, {"device": "cpu"})


@pytest.mark.parametrize(
    ("rows", "context", "seconds"),
    [
        (8, 0, 1.0),
        (16, 100, 6.0),
        (12, 0, 1.5),
        (8, 50, 2.0),
        (12, 50, 3.0),
        (24, 0, 3.0),
        (8, 200, 5.0),
        (1, 0, 1.0),
        (8, -5, 1.0),
    ],
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
    assert TABLE.draft_pass(2, 100) == pytest.approx(3.0 + 0.5 + 0.01)  # the other is looked up


def test_fewer_rows_than_a_quantum_are_rounded_up_to_a_tile():
    curve = Curve((1, 4, 8, 16), (0,), ((1.0, 2.0, 4.0, 8.0),))
    table = CostTable(curve, curve, curve, 0.0, 8, {}, tiles=(1, 4))
    assert [table.verify_pass(n, 0) for n in (1, 2, 4, 5, 8, 9)] == [1.0, 2.0, 2.0, 4.0, 4.0, 8.0]


def test_sequences_share_products_but_not_attention():
    """Products 1, 2 s for 8, 16 rows; attention 3 s for 8 rows of one sequence at 100 slots."""
    table = replace(TABLE, verify=Curve((8, 16), (0, 100), ((1.0, 2.0), (4.0, 8.0))))
    table = replace(table, sampling=0.0, draft_sequence=0.25, verify_sequence=0.5)
    # Sixteen rows of one sequence are two tiles, as eight of two are; of four each has its own.
    assert table.verify_pass(16, 100, sequences=2) == pytest.approx(2.0 + 2 * 3.0)
    assert table.verify_pass(9, 100, sequences=2) == pytest.approx(2.0 + 6.0)
    assert table.verify_pass(16, 100, sequences=4) == pytest.approx(2.0 + 4 * 3.0 + 2 * 0.5)
    assert table.draft_pass(2, 100, sequences=2) == pytest.approx(1.0 + 2 * 2.0 + 0.25 + 0.5)


def test_sequences_are_attended_tile_by_tile():
    """Products take 10 s up to 8 rows, and 11 up to 16; tiles of 1, 2, 4 and 8 rows these."""
    tile = {1: 0.5, 2: 0.7, 4: 0.9, 8: 1.7}
    seconds = (*(10.0 + s for s in tile.values()), 11.0 + 2 * tile[8])
    curve = Curve((1, 2, 4, 8, 16), (0,), (seconds,))
    another = (8 * tile[1] - tile[8]) / 7  # eight sequences of a token, less eight tokens of one
    table = CostTable(
        curve,
        Curve((1,), (0,), ((0.0,),)),
        curve,
        0.0,
        8,
        {},
        (1, 2, 4),
        draft_sequence=another,
        verify_sequence=another,
    )
    for each, padded in ((1, 1), (2, 2), (3, 4), (4, 4), (5, 8)):
        wanted = (10.0 if 3 * each <= 8 else 11.0) + 3 * tile[padded]
        assert table.verify_pass(3 * each, 0, sequences=3) == pytest.approx(wanted)
    assert table.verify_pass(8, 0, sequences=8) == pytest.approx(10.0 + 8 * tile[1])
    assert table.verify_pass(5, 0, sequences=4) == pytest.approx(10.0 + tile[2] + 3 * tile[1])
    # One of three has three tokens, a tile of four; not all have as many.
    assert table.verify_pass(7, 0, sequences=3) == pytest.approx(10.0 + tile[4] + 2 * tile[2])
    assert table.draft_pass(5, 0, sequences=5) == pytest.approx(10.0 + 5 * tile[1])
    assert table.attending(11) == pytest.approx(tile[8] + tile[4])
    quick = replace(table, tiles=(1,))
    assert quick.attending(3) == pytest.approx(tile[1] + 3 / 7 * (tile[8] - tile[1]))


def test_what_eight_sequences_took_is_what_several_attend_for():
    """Of one sequence a pass grows by a call of attention a tile, which several share."""
    call, tile = 0.3, {1: 0.5, 2: 0.7, 4: 0.9, 8: 1.7}
    rows, wholes = (1, 2, 4, 8, 16, 32, 64), {16: 2, 32: 4, 64: 8}
    products = {n: 10.0 + n / 8 for n in (8, 16, 32, 64)}
    seconds = [products[8] + call + tile[n] for n in (1, 2, 4, 8)]
    seconds += [products[n] + count * (call + tile[8]) for n, count in wholes.items()]
    verify, free = Curve(rows, (0,), (tuple(seconds),)), Curve((1,), (0,), ((0.0,),))

    def took(each: int) -> float:
        return products[8 * each] + call + 8 * tile[each]

    apart = {n: took(n) - verify.at(8 * n, 0) for n in tile}
    table = CostTable(free, free, verify, 0.0, 8, {}, (1, 2, 4), verify_sequence=apart.pop(1) / 7)
    told = replace(table, verify_tiles=tuple(apart.items()))
    for each in (2, 4, 8):
        assert told.verify_pass(8 * each, 0, sequences=8) == pytest.approx(took(each))
        assert table.verify_pass(8 * each, 0, sequences=8) > took(each) + 0.2
    assert [told.verify_pass(n, 0) for n in rows] == pytest.approx(seconds)
    assert told.verify_pass(8, 0, sequences=8) == table.verify_pass(8, 0, sequences=8)
    # Measured on a machine that was quicker just then: more tokens take no less.
    never = replace(told, verify_tiles=((2, apart[2]), (4, -100.0), (8, apart[8])))
    two, four = (never.attending(n) for n in (2, 4))
    assert two == told.attending(2) == four < told.attending(4)
    same = replace(told, draft_layers=verify, draft_sequence=told.verify_sequence)
    assert same.draft_pass(16, 0, sequences=8) == table.verify_pass(16, 0, sequences=8)


def test_a_sequence_that_drafts_makes_no_other_one_attend_to_more():
    """Attention of 1, 4, 8 tokens takes 1, 2, 4 s at 100 slots, and products nothing."""
    curve = Curve((1, 4, 8), (0, 100), ((0.0, 0.0, 0.0), (1.0, 2.0, 4.0)))
    table = CostTable(curve, curve, curve, 0.0, 8, {}, tiles=(1, 4))
    tokens = (5, 6, 9, 10, 11, 20, 40)
    seconds = [table.verify_pass(n, 100, sequences=5) for n in tokens]
    assert seconds == [5.0, 4 + 2.0, 1 + 4 * 2.0, 5 * 2.0, 5 * 2.0, 5 * 2.0, 5 * 4.0]


def test_more_rows_than_a_pass_takes_go_through_several():
    table = replace(TABLE, sampling=0.0, pass_rows=16)
    at = replace(TABLE, sampling=0.0).verify_pass
    assert table.verify_pass(16, 100) == at(16, 100)
    assert table.verify_pass(32, 100) == pytest.approx(2 * at(16, 100))
    assert table.verify_pass(39, 100) == pytest.approx(2 * at(16, 100) + at(7, 100))
    bare = replace(TABLE, sampling=0.0).draft_pass
    assert table.draft_pass(20, 100) == pytest.approx(bare(16, 100) + bare(4, 100))
    both = table.verify_pass(20, 0, sequences=2)
    assert both == pytest.approx(at(16, 0) + at(4, 0))


def test_a_table_is_saved_and_read_back(tmp_path):
    table = replace(TABLE, tiles=(1, 2, 4), draft_sequence=0.1, verify_sequence=0.2, pass_rows=64)
    table = replace(table, judging=0.002, greedy_sampling=0.003, greedy_judging=0.001)
    table = replace(table, draft_sampling=0.004, greedy_draft_sampling=0.005, draft_start=0.2)
    table = replace(table, verify_tiles=((2, -0.1), (8, 0.3)))
    table.save(tmp_path / "cost.json")
    assert CostTable.load(tmp_path / "cost.json") == table
    assert [f.name for f in tmp_path.iterdir()] == ["cost.json"]


def test_what_the_first_drafts_take_more_is_shared_out_or_counted_by_itself():
    table = replace(TABLE, draft_start=1.2)
    mean = TABLE.draft_pass(2, 100)
    assert table.draft_pass(2, 100) == mean
    assert table.draft_pass(2, 100, late=True) == pytest.approx(mean - 0.3)
    told = [table.drafting(passes, 2, 100) for passes in (0, 1, 4, 8)]
    assert told == pytest.approx([0.0, 1.2 + mean - 0.3, 4 * mean, 8 * mean - 1.2])


def test_greedy_tokens_have_a_price_of_their_own():
    table = replace(TABLE, greedy_sampling=0.001, greedy_judging=0.0005)
    greedy = table.of(greedy=True)
    assert greedy.verify_pass(8, 0) == pytest.approx(1.0 + 0.001 + 7 * 0.0005)
    assert greedy.draft_pass(2, 100) == pytest.approx(3.0 + 0.5 + 0.001)
    assert table.of(greedy=False) == table
    assert TABLE.of(greedy=True) == TABLE  # one price
    drawn = replace(table, draft_sampling=0.2, greedy_draft_sampling=0.0002)
    assert drawn.draft_pass(2, 100) == pytest.approx(3.0 + 0.5 + 0.2)
    assert drawn.of(greedy=True).draft_pass(2, 100) == pytest.approx(3.0 + 0.5 + 0.0002)
    assert drawn.verify_pass(8, 0) == table.verify_pass(8, 0)


def test_drafted_tokens_are_judged_for_less_than_they_are_drawn():
    """Their noise is made: a verify pass draws one token of each sequence anew."""
    table = replace(TABLE, judging=0.001)
    more = table.verify_pass(8, 0, sequences=2) - TABLE.verify_pass(8, 0, sequences=2)
    assert more == pytest.approx(6 * (0.001 - TABLE.sampling))
    assert table.draft_pass(2, 100) == TABLE.draft_pass(2, 100)


@pytest.mark.parametrize("content", ["{}", "[", "[]", '{"version": 2, "verify": 3}'])
def test_other_files_are_no_cost_tables(tmp_path, content):
    (tmp_path / "cost.json").write_text(content)
    with pytest.raises(ValueError, match=r"cost\.json is not a cost table \("):
        CostTable.load(tmp_path / "cost.json")


def test_a_table_survives_json():
    assert CostTable.from_dict(json.loads(json.dumps(TABLE.to_dict()))) == TABLE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "version 6 was expected, got 1"),
        ({"version": 5}, "version 6 was expected, got 5; layerskip profile writes one"),
        ({"verify": {"rows": [8]}}, "not complete"),
        ({"sampling": None}, "not complete"),
        ({"sampling": 10**400}, "not complete"),
        ({"tiles": 3}, "not complete"),
        ({"judging": []}, "not complete"),
        ({"row_quantum": 0}, "row_quantum must be 1 or more, got 0"),
        ({"sampling": float("nan")}, "sampling must be finite and not negative"),
        ({"greedy_judging": -1.0}, "greedy_judging must be finite and not negative"),
        ({"verify_sequence": float("inf")}, "verify_sequence must be finite and not negative"),
        ({"pass_rows": -4}, "pass_rows must be 0 or more, got -4"),
        ({"large_quantum": -1}, "large_quantum must be 0 or more, got -1"),
        ({"tiles": [4, 1]}, "tiles must ascend from 1 on"),
        ({"row_quantum": 10**30}, "row_quantum must be at most 2147483647, got 1000"),
        ({"slot_block": 10**400}, "slot_block must be at most 2147483647, got 1000"),
        ({"tiles": [1, 10**30]}, "tiles must ascend from 1 on"),
        ({"tiles": [1.5]}, "tiles must ascend from 1 on"),
        ({"tiles": "12"}, "tiles must ascend from 1 on"),
        ({"verify_tiles": 2}, "not complete"),
        ({"verify_tiles": [[2]]}, "not complete"),
        ({"verify_tiles": [[3, 0.1]]}, r"pairs of tokens, of \(2, 4, 8\), ascending, and finite"),
        ({"verify_tiles": [[1, 0.1]]}, "verify_tiles must be pairs"),
        ({"verify_tiles": [[2, 0.1], [2, 0.2]]}, "verify_tiles must be pairs"),
        ({"verify_tiles": [[4, 0.1], [2, 0.2]]}, "verify_tiles must be pairs"),
        ({"verify_tiles": [[2.7, 0.1]]}, "verify_tiles must be pairs"),
        ({"verify_tiles": [[2, float("nan")]]}, "verify_tiles must be pairs"),
    ],
)
def test_what_is_no_table_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        CostTable.from_dict(TABLE.to_dict() | change)


def test_tables_from_before_passes_could_be_small_are_read():
    content = TABLE.to_dict()
    assert content.pop("large_quantum") == 0
    assert CostTable.from_dict(content) == TABLE
    told = CostTable.from_dict(content | {"large_quantum": 8})
    assert told.large_quantum == 8
    assert CostTable.from_dict(told.to_dict()) == told


@pytest.mark.parametrize(
    "name", [name for name in TABLE.to_dict() if name not in ("version", "large_quantum")]
)
def test_a_table_that_lacks_a_field_is_refused(name):
    content = TABLE.to_dict()
    del content[name]
    with pytest.raises(ValueError, match=rf"not complete \(.*{name}"):
        CostTable.from_dict(content)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (((16, 8), (0,), ((1.0, 1.0),)), "rows must ascend"),
        (((8,), (), ()), "contexts must ascend"),
        (((8,), (-0.5, 4), ((1.0,), (2.0,))), "contexts must ascend from 0 on"),
        (((8,), (0, float("nan")), ((1.0,), (2.0,))), "contexts must ascend"),
        (((8,), (0, float("inf")), ((1.0,), (2.0,))), "contexts must ascend"),
        (((8,), (0,), ((1.0, 2.0),)), "1 lines of 1 times"),
        (((8,), (0,), ((float("nan"),),)), "finite"),
    ],
)
def test_a_bad_grid_is_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        Curve(*parts)


def test_contexts_within_a_block_of_slots_cost_the_same():
    curve = Curve((1, 8), (0, 64, 192), ((1.0, 1.5), (2.0, 3.0), (4.0, 6.0)))
    table = CostTable(curve, Curve((1, 8), (0,), ((0.0, 0.0),)), curve, 0.0, 8, {}, slot_block=64)
    whole = [table.verify_pass(8, context) for context in (0, 55, 56, 57, 120, 121, 250)]
    assert whole == [1.5, 1.5, 1.5, 3.0, 3.0, 4.5, 7.5]  # with its rows, 64 slots end at 56
    assert table.draft_pass(1, 56) == table.draft_pass(1, 0)
    several = table.verify_pass(16, 60, sequences=2)  # each to its second block
    assert several == table.verify_pass(16, 0, sequences=2) + 2 * 1.5
    assert replace(table, slot_block=0).verify_pass(8, 32) == 2.25
    assert CostTable.from_dict(table.to_dict()) == table
