"""What a controller has learnt: calibrations, and estimates of requests and of look-ups."""

import itertools
import operator
import statistics
from random import Random

import pytest
from controlling import CONTEXT, table

from layerskip.control.estimates import RowState
from layerskip.control.experience import (
    LARGEST,
    Calibration,
    Experience,
    ToldChances,
    bin_of_match,
    lookup_confidence,
)
from layerskip.control.stopping import Choice
from layerskip.controller import Controller
from layerskip.lookup import FORCED_MATCH, LONGEST_MATCH


def test_calibration_learns_what_confidence_means():
    calibration, random = Calibration(), Random(0)
    for _ in range(3000):
        for confidence, chance in ((0.15, 0.5), (0.55, 0.75), (0.99, 0.9)):
            accepted = random.random() < chance
            calibration.add(confidence, calibration.chance(confidence), accepted)
    assert calibration.chance(0.15) == pytest.approx(0.5, abs=0.05)
    assert calibration.chance(0.99) == pytest.approx(0.9, abs=0.05)
    assert calibration.told.error < 0.03
    assert calibration.chance(0.35) == pytest.approx(0.35)  # none was so sure: it is believed


def test_a_known_calibration_is_where_it_begins():
    known = ((0.05, 0.5), (0.35, 0.8), (0.95, 0.98))
    calibration = Calibration(known)
    assert calibration.chance(0.05) == pytest.approx(0.5)
    assert calibration.chance(0.2) == pytest.approx(0.65)  # between points it is linear
    assert calibration.chance(0.999) == pytest.approx(0.98)  # and beyond them as at the last one
    again = Calibration(calibration.points)
    assert dict(again.points) == pytest.approx(dict(calibration.points))
    for _ in range(5):
        calibration.add(0.35, 0.8, accepted=False)
    assert 0.6 < calibration.chance(0.35) < 0.7  # it takes 20 tokens to halve it
    for _ in range(100):
        calibration.add(0.35, 0.8, accepted=False)
    assert calibration.chance(0.35) < 0.2
    assert calibration.chance(0.05) == pytest.approx(0.5)


def test_greedy_and_sampled_drafts_have_each_their_calibration():
    known = {"greedy": ((0.5, 0.9),), "sampled": ((0.5, 0.7),)}
    controller = Controller(table(), calibration=known)
    kinds = {"greedy": 0.9, "coupled": 0.7, "token": 0.7, "block": 0.7}
    for kind, chance in kinds.items():
        assert controller.row(kind).chance(0.3) == pytest.approx(chance)
    unknown = Controller(table(), calibration={"greedy": ((0.5, 0.9),)}).row("coupled")
    assert unknown.chance(0.3) == Controller(table()).row("coupled").chance(0.3)


def test_a_stretch_of_luck_says_little_of_a_request():
    """What a confidence is worth in a text is steadier than whether its next tokens are right."""
    state = RowState(Experience((0.8,)))
    for i in range(200):
        state.add_draft([i % 4 > 0], [0.7])
    before = state.chance(0.7) / state.shared.calibration.chance(0.7)
    state.add_draft([True] * 12, [0.7] * 12)
    assert 1.0 < state.chance(0.7) / state.shared.calibration.chance(0.7) / before < 1.04


def test_the_calibration_error_is_of_the_chances_that_were_told():
    """In a batch other rows are judged between a row's draft and its own judgement."""
    controller = Controller(table(c=0.2), [0.8])
    state = controller.row("greedy", greedy=True)
    choice = Choice("early_exit", 2, 1.0, (0.1,) * 16, 0.2, 1.0)
    controller.observe_draft(
        state, choice, CONTEXT, [True, False], [0.9, 0.9], [0.75, 0.65], num_passes=2
    )
    assert controller.told("greedy").error == pytest.approx((0.25 + 0.65) / 2)


def test_calibration_error_is_the_gap_between_told_and_true():
    told = ToldChances()
    for i in range(100):
        told.add(0.9, i % 2 == 0)
    assert told.error == pytest.approx(0.4)
    assert ToldChances().error == ToldChances().error_by_chance == 0.0


def test_the_error_that_right_chances_show_by_chance():
    """Of as few tokens as a request has it is far from 0, and smaller the more there are."""
    draw = Random(0)

    def told(tokens):
        chances = ToldChances()
        for chance in (draw.choice((0.25, 0.55, 0.85)) for _ in range(tokens)):
            chances.add(chance, draw.random() < chance)
        return chances

    for tokens, wanted in ((60, 0.08), (6000, 0.008)):
        some = [told(tokens) for _ in range(200)]
        by_chance = statistics.mean(c.error_by_chance for c in some)
        assert by_chance == pytest.approx(wanted, rel=0.1)
        assert statistics.mean(c.error for c in some) == pytest.approx(by_chance, rel=0.1)


def test_estimates_start_from_what_requests_have_in_common_and_depart_from_it():
    shared = Experience((0.6,))
    poor, other = RowState(shared), RowState(shared)
    assert poor.acceptance(0) == pytest.approx(0.6)
    for _ in range(30):
        poor.add_draft([False], [])
    assert poor.acceptance(0) < 0.1
    assert poor.acceptance(0) < other.acceptance(0) < 0.6
    for _ in range(300):
        other.add_draft([True] * 4, [])
    assert 0.9 < other.acceptance(2) <= LARGEST


def test_look_ups_as_good_as_others_say_nothing_of_a_request():
    state, poor = RowState(Experience((0.6,))), lookup_confidence(1, True)
    for i in range(40):
        state.add_lookup(1, [i % 20 in (3, 10, 16)], stored=True)
    assert poor == pytest.approx(3 / 20)
    told = state.lookup_survivals(20, False, 1)
    assert told == pytest.approx([lookup_confidence(20, False)], 0.1)


def test_what_a_store_offered_says_nothing_of_a_text_s_own_look_ups():
    state, other = (RowState(Experience((0.6,))) for _ in range(2))
    for stored in (True, False):
        told = state.lookup_survivals(4, stored, 1)
        assert told == pytest.approx([lookup_confidence(4, stored)])
    for _ in range(20):
        state.add_lookup(4, [False], stored=True)
    own, stored = (state.shared.lookup(2, kind).value for kind in (False, True))
    assert own == other.shared.lookup(2, False).value
    assert stored < 0.5 * other.shared.lookup(2, True).value


def test_look_ups_that_are_never_right_are_given_up_and_come_back():
    """However cheap a second token is thought to be: what was expected of them wears off."""
    shared = Experience((0.6,))
    for _ in range(4):
        state = RowState(shared)
        for _ in range(100):
            state.add_lookup(LONGEST_MATCH, [False], stored=False)
    assert shared.lookup(bin_of_match(LONGEST_MATCH, 0), False).value < 0.01
    assert RowState(shared).lookup_survivals(LONGEST_MATCH, False, 1) == []
    for _ in range(10):
        state.add_lookup(LONGEST_MATCH, [True], stored=False)
    assert state.lookup_survivals(LONGEST_MATCH, False, 1)[0] > 0.1


def test_right_tokens_lengthen_a_match():
    """The second looked-up token, if the first is right, is the first one after a longer match."""
    state = RowState(Experience((0.6,)))
    wanted = [lookup_confidence(length, False) for length in (1, 2, 3, 4)]
    assert len(set(wanted)) == 3
    told = state.lookup_survivals(1, False, 4)
    assert told == pytest.approx(list(itertools.accumulate(wanted, operator.mul)))
    for _ in range(50):
        state.add_lookup(1, [True, False], stored=False)
    one, two, three = (state.shared.lookup(i, False).value for i in (0, 1, 2))
    assert (one > 0.9, two < 0.1, three) == (True, True, wanted[2])
    assert lookup_confidence(LONGEST_MATCH, False, ahead=9) < lookup_confidence(FORCED_MATCH, False)


def test_told_chances_are_those_before_any_token_of_the_draft_was_judged():
    state = RowState(Experience((0.6,)))
    given = [state.chance(confidence) for confidence in (0.3, 0.3, 0.35)]
    state.add_draft([True] * 3, (0.3, 0.3, 0.35))
    assert state.shared.calibration.told.error == pytest.approx(1.0 - statistics.mean(given))
