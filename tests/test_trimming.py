"""Choosing a draft vocabulary: what it is ranked by and held against, and when it is kept. Chains,
costs and times are given."""

import json
from contextlib import closing
from dataclasses import dataclass

import pytest
import torch
from test_search import given_cost
from toys import PLANS, make_model

from layerskip import SamplingParams, SelfSpeculativeLM, trimming
from layerskip.calibration import Text
from layerskip.cost import CostTable, Curve
from layerskip.journal import Journal
from layerskip.search import SearchSettings
from layerskip.trimming import Trimmer, measured_coverage, vocabularies, with_head_of

PLAN = PLANS["exit"]
RANKED, HELD = tuple(range(2, 60)) * 20, (*range(2, 41), 300)
TEXTS = [Text(RANKED, 8, 0), Text(HELD, 10, 1), Text(RANKED, 8, 2), Text(HELD, 20, 3)]


@dataclass
class GivenChains:
    """Drafts over some ids agree so often in a row, those over all twice."""

    some: int
    asked: int = 0

    def chains(self, plan, most, vocabulary=None):
        self.asked += 1
        length = 2 if vocabulary is None else self.some
        return tuple((99 if i % 2 == 0 else length,) * t.window for i, t in enumerate(TEXTS))


def trimmed(monkeypatch, lm, chains: GivenChains, *, took=(2.0, 1.1, 1.0), **changes):
    """What ``Trimmer`` finds where the head is dearer than all layers together."""
    heads = changes.pop("heads", [])

    def cost(stack, plan, head=None, **settings) -> CostTable:
        heads.append(head)
        table = given_cost(stack, plan, **settings)
        head = table.draft_head
        dear = Curve(head.rows, head.contexts, (tuple(60 * t for t in head.seconds[0]),))
        whole = Curve(head.rows, head.contexts, ((21.0, 21.0),))
        return CostTable(table.draft_layers, dear, whole, 0.0, 1, dict(table.key))

    def in_turn(stack, plan, ways, texts, **_):
        heads.extend(way.head for way in ways)
        return [list(took)] * 3

    monkeypatch.setattr(trimming, "measure_cost", cost)
    monkeypatch.setattr(trimming, "time_in_turn", in_turn)
    texts = changes.pop("texts", TEXTS)
    journal = changes.pop("journal", Journal(None, {}))
    said: list[str] = []
    found = Trimmer(
        lm,
        PLAN,
        cost(lm.stack, PLAN),
        texts,
        known_texts=lambda: chains,
        journal=journal,
        say=said.append,
        settings=SearchSettings(SamplingParams(), max_draft_tokens=4, cost_seconds=1.0),
        **changes,
    ).run()
    assert len(said) <= trimming.STEPS
    return found


def test_a_vocabulary_that_is_faster_is_kept(monkeypatch, talking):
    heads = []
    monkeypatch.setattr(talking, "eos_ids", frozenset({320}))
    found = trimmed(monkeypatch, talking, GivenChains(2), heads=heads)
    whole, best = found.tried
    assert 320 in best.ids
    measured, *ways = heads[1:]  # the first table is the whole head's
    assert set(measured.ids.tolist()) == {*best.ids, *HELD}  # as a round on that text has it
    assert [None if head is None else tuple(head.ids.tolist()) for head in ways] == [
        None,
        None,
        best.ids,
    ]
    assert found.chosen == best
    assert (whole.ids, whole.coverage) == (None, 1.0)
    assert set(best.ids) >= {0, 1, *range(2, 60)}  # special ones first, then the ranked
    assert len(best.ids) == 128
    assert 300 not in best.ids  # known from the held texts only
    assert best.coverage == pytest.approx(48 / 50)
    assert 0.0 < best.promised < best.coverage
    assert best.counts == whole.counts
    assert best.counts.first == 1.0
    assert best.counts.lengths[2] == 3.0  # of the held texts alone: the others would give 99
    assert best.c == pytest.approx((2 + 15 * 128 / 331) / 21)
    assert best.predicted > 1.02 * whole.predicted
    assert (best.measured, best.over_whole) == ((2.0, 2.0, 2.0), 1.1)
    assert found.cost.draft_head.at(1, 0) == pytest.approx(15 * 128 / 331)
    assert found.verdict.endswith("1.10 measured; it covers 96.0% of other texts")
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("some", "took", "verdict"),
    [
        (0, (2.0, 1.1, 1.0), "and 1.02 is asked for"),
        (2, (0.9, 1.1, 1.0), "1.10 measured: not confirmed, so the whole vocabulary is drafted"),
        (2, (2.0, 0.9, 1.0), "0.90 measured: not confirmed, so the whole vocabulary is drafted"),
    ],
    ids=["accepted-less", "slower-than-plain", "slower-than-the-whole-head"],
)
def test_another_is_not(monkeypatch, talking, some, took, verdict):
    found = trimmed(monkeypatch, talking, GivenChains(some), took=took)
    assert found.chosen is found.cost is None
    assert len(found.tried) == 2
    assert verdict in found.verdict


@pytest.mark.parametrize("texts", [TEXTS[1:], TEXTS[:1]], ids=["few-tokens", "one-text"])
def test_too_little_text_is_said(monkeypatch, talking, texts):
    chains = GivenChains(2)
    found = trimmed(monkeypatch, talking, chains, texts=texts)
    assert "too little text to choose from (" in found.verdict
    assert (found.chosen, found.tried, chains.asked) == (None, (), 0)


def test_more_text_is_ranked_too(monkeypatch, talking):
    more = (300,) * 200
    found = trimmed(monkeypatch, talking, GivenChains(2), more_texts=(more,))
    assert found.ranked_tokens == 2 * len(RANKED) + len(more)
    assert 300 in found.tried[1].ids
    assert found.tried[1].coverage == 1.0


def test_a_head_that_cannot_be_trimmed_is_said(monkeypatch):
    class OwnLinear(torch.nn.Linear):
        pass

    model = make_model()
    model.lm_head.__class__ = OwnLinear
    found = trimmed(monkeypatch, SelfSpeculativeLM(model), GivenChains(2))
    assert found.verdict.startswith("drafts use the whole head: its head is OwnLinear, not a plain")
    assert (found.chosen, found.tried) == (None, ())


def test_nothing_is_measured_twice(monkeypatch, talking, tmp_path):
    chains, path = GivenChains(2), tmp_path / "journal"
    with closing(Journal(path, {})) as journal:
        first = trimmed(monkeypatch, talking, chains, journal=journal)
    asked = chains.asked
    assert asked == 2
    with closing(Journal(path, {})) as journal:
        again = trimmed(monkeypatch, talking, chains, journal=journal, took=(1.0, 1.0, 1.0))
    assert again == first
    assert chains.asked == asked


def test_candidates_cover_shares_and_have_text_enough():
    text = [t for i in range(300) for t in [i] * (1 if i >= 128 else 50)]
    sizes = [len(ids) for ids in vocabularies([text], 331, {330})]
    assert sizes == [128, 256]  # 97 % by the first, 99 % with more
    assert all(330 in ids for ids in vocabularies([text], 331, {330}))
    assert [len(ids) for ids in vocabularies([text[: 4 * 128]], 331, ())] == [128]
    assert vocabularies([text[: 4 * 128 - 1]], 331, ()) == []


def test_the_promise_allows_for_texts_that_differ():
    alike = [Text((*range(10), 50), 1, 0)] * 4
    apart = [Text((1,) * 11, 1, 0), Text((1,) * 7 + (50,) * 4, 1, 0)] * 2
    same, promised = measured_coverage(range(50), alike)
    assert same == pytest.approx(0.9)
    assert promised == pytest.approx(0.9 - 2 * (0.9 * 0.1 / 40) ** 0.5)
    share, promised = measured_coverage(range(50), apart)
    assert share == pytest.approx(0.8)
    assert promised == pytest.approx(0.8 - 2 * (4 * 0.04 / 3) ** 0.5 / 2)
    assert measured_coverage(range(60), alike) == (1.0, 1.0)


def test_a_heads_cost_is_taken_in_units_of_full_passes(talking):
    table = given_cost(talking.stack, PLAN)
    slow = given_cost(talking.stack, PLAN, draft_vocabulary=range(100))
    verify, head = (
        Curve(c.rows, c.contexts, (tuple(3 * t for t in c.seconds[0]),))
        for c in (slow.verify, slow.draft_head)
    )
    slow = CostTable(slow.draft_layers, head, verify, 0.0, 1, {"machine": "busy"})
    trimmed = with_head_of(table, slow)
    assert trimmed.draft_pass(1, 0) == pytest.approx(2 + 0.25 * 100 / 331)
    assert trimmed.verify == table.verify
