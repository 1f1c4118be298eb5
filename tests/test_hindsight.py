"""What plain rounds tell of drafts that they did not make, and what a request may do with it."""

import math
from dataclasses import replace

import pytest
from controlling import Request, against_plain, paper, steady, table
from decoding import PROMPT, SAMPLED
from speculating import GREEDY, NEW, REPEATING, WITH_RULES, cost_of, run, with_controller
from toys import PLANS, VOCAB_SIZE

from layerskip import SamplingParams, SelfSpeculativeLM
from layerskip.control.asks import Ask
from layerskip.control.estimates import LAST_LOOK, TRUST_SHARE, RowState
from layerskip.control.experience import Experience
from layerskip.control.stopping import Choice
from layerskip.controller import Controller
from layerskip.cost import CostTable, Curve
from layerskip.drafting import EarlyExitDrafter
from layerskip.hindsight import tells
from layerskip.plan import PlanFile

CUT = SamplingParams(temperature=0.9, top_k=20, seed=5)
RIGHT = [([True] * 8, [0.9] * 8)]
# What a pass of the head alone takes makes looking back cheap, or not.
COSTS = {
    "usual": table(head=0.08),
    "cheap": table(0.15, quantum=1, slope=0.01, head=0.05),
    "dear": table(0.3, quantum=1, slope=0.05, head=0.2),
}


class Watched(Controller):
    """Never drafts, and keeps what it is told in hindsight."""

    def __init__(self) -> None:
        super().__init__(cost_of(5.0), follows_clock=False)
        self.runs = []

    def observe_hindsight(self, state, runs, context, seconds):
        super().observe_hindsight(state, runs, context, seconds)
        self.runs += runs


@pytest.mark.parametrize("kept", [None, tuple(range(0, VOCAB_SIZE, 3))], ids=["all", "trimmed"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, CUT], ids=["greedy", "0.8", "top-k"])
def test_hindsight_says_what_drafts_come_to(toy, sampling, kept):
    """Of each token: whether a draft of one, made there, is accepted, and how sure it is."""
    known = PlanFile(PLANS["exit"], draft_vocabulary=kept)
    lm = SelfSpeculativeLM(toy(), None, known, lookup=False)
    lm._controller = told = Watched()
    text = run(lm, sampling=sampling, max_new_tokens=33).token_ids
    found = [pair for right, sure in told.runs for pair in zip(right, sure, strict=True)]
    # After 2 tokens, 4, 8, and 16, of which it looks at the last 8.
    places, made = [*range(14), *range(22, 30)], []
    assert len(found) == len(places)
    for i in places:
        settings = {"max_new_tokens": 3, "num_draft_tokens": 1, "on_round": lambda _: None}
        record = run(lm, [*REPEATING, *text[:i]], sampling=sampling, **settings).rounds[1]
        assert record.num_draft_tokens == 1
        made.append((record.num_accepted_tokens == 1, record.confidences[0]))
    assert [right for right, _ in found] == [right for right, _ in made]
    assert [sure for _, sure in found] == pytest.approx([sure for _, sure in made], abs=1e-3)
    assert {right for right, _ in found} == {False, True}, "the toy tells nothing"


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("tokens", [16, 64, 256])
@pytest.mark.parametrize("acceptance", [0.0, 0.05, 0.2])
def test_looking_back_at_what_never_pays_stays_within_the_bound(cost, tokens, acceptance):
    """As for rows that do not: at most 3 % slower than plain decoding."""
    requests = steady(acceptance, count=24, tokens=tokens)
    assert against_plain(looking(cost).run(requests)) >= 0.97


@pytest.mark.parametrize(
    ("cost", "good", "bad"),
    [("cheap", 2, 8), ("cheap", 12, 24), ("cheap", 4, 32), ("usual", 2, 8), ("dear", 8, 8)],
)
def test_texts_that_are_right_where_nothing_is_drafted_stay_within_the_bound(cost, good, bad):
    """What hindsight grants them is lost beside the stake and the probes; the worst of 144 such."""
    for shift in (good, 0):
        right = [float((n + shift) % (good + bad) < good) for n in range(64)]
        texts = [Request(64, right.__getitem__) for _ in range(4)]
        assert against_plain(looking(cost).run(texts)) >= 0.97


@pytest.mark.parametrize(("cost", "least"), [("usual", 1.4), ("cheap", 1.5)])
def test_a_text_whose_first_drafts_fail_is_drafted_once_it_is_easier(cost, least):
    """One that does not look back has lost its stake, and is decoded plainly for most of it."""

    def texts() -> list[Request]:
        return [Request(64, lambda n: 0.05 if n < 16 else 0.9) for _ in range(24)]

    blind = against_plain(looking(cost, looks_back=False).run(texts()))
    assert against_plain(looking(cost).run(texts())) > max(least, 1.3 * blind)


@pytest.mark.parametrize("cost", COSTS)
def test_hopeless_texts_tell_nothing_about_the_others(cost):
    """They look back at all of their tokens, which would be most of what all of them share."""

    def texts() -> list[Request]:
        pairs = ((0.95, 0.05) for _ in range(12))
        return [r for pair in pairs for a in pair for r in steady(a, count=1, tokens=256)]

    blind = against_plain(looking(cost, looks_back=False).run(texts()))
    assert against_plain(looking(cost).run(texts())) > 0.99 * blind


def looking(cost: str, *, looks_back: bool = True):
    return replace(paper(COSTS[cost], prior=(0.8,)), looks_back=looks_back)


def test_what_hindsight_lets_a_row_stake_is_lost_once():
    """A drafter that comes to less than hindsight says is not believed again until it gains."""
    state = RowState(Experience((0.8,)), stake=1.0)
    state.settle(-1.2, -1.2)
    state.look_back(RIGHT, 0.0, 0.2)
    once = TRUST_SHARE - 0.2
    assert state.stake == pytest.approx(once), "a share of what it began with may be lost once more"
    state.settle(-once, -once)
    state.look_back(RIGHT, 0.0, 0.2)
    assert state.stake == pytest.approx(0.0)
    state.settle(once + 0.1, once + 0.1)
    state.look_back(RIGHT, 0.0, 0.2)
    assert state.stake == pytest.approx(once + 0.2), "what it gained beyond what it had lost"
    assert state.has_lost


def test_what_was_gained_and_lost_again_is_not_granted():
    """Else a drafter might lose its gains twice, time and again; nor do look-ups speak for it."""
    state = RowState(Experience((0.8,)), stake=1.0)
    state.settle(-1.0, -1.0)
    state.look_back(RIGHT, 0.0, 0.2)
    state.settle(-state.stake, -state.stake)
    for _ in range(5):
        state.settle(0.9, 0.9)
        state.settle(-0.9, -0.9)
        state.look_back(RIGHT, 0.0, 0.2)
    state.settle(0.9, 0.9, looked_up=True)
    state.settle(-0.9, -0.9)
    state.look_back(RIGHT, 0.0, 0.2)
    assert state.stake == pytest.approx(0.0)


def test_what_was_gained_and_lost_again_is_no_reason_to_grant_less():
    state = RowState(Experience((0.8,)), stake=1.0)
    for gained in (2.0, -2.0, -1.0):
        state.settle(gained, gained)
    state.look_back(RIGHT, 0.0, 0.2)
    assert state.stake == pytest.approx(TRUST_SHARE)


def test_what_is_granted_is_no_gain():
    """A request that ends early gives back what it had in advance, if it gained nothing."""
    shared = Experience((0.8,))
    state = RowState(shared, stake=1.0, advance=64)
    state.reserve(0.01)
    state.settle(-0.9, -0.9)
    state.look_back(RIGHT, 0.0, 0.2)
    state.settle(0.8, 0.8)
    assert state.stake > 1.0
    assert state.has_lost
    state.end(10)
    assert shared.credit == pytest.approx(0.0)


def test_hindsight_of_long_ago_grants_nothing():
    state = RowState(Experience((0.8,)), stake=1.0)
    for _ in range(10):
        state.look_back(RIGHT, 0.0, 0.2)
    state.settle(-1.5, -1.5)
    state.look_back([([False], [0.9])] * 8, 0.0, 0.2)
    assert state.stake == pytest.approx(-0.5)


def test_hindsight_is_of_one_request():
    """Its neighbours and those after it know no more than before."""
    controller = Controller(COSTS["usual"], (0.8,), follows_clock=False)
    state, shared = controller.row("greedy", 64), controller.row("greedy", 64).shared
    before = repr(shared), shared.mixture.shares
    for _ in range(4):
        state.look_back([([False], [0.9])] * 8, 0.0, 0.2)
    assert (repr(shared), shared.mixture.shares) == before


def test_hindsight_of_wrong_drafts_lets_a_row_stake_nothing():
    state = RowState(Experience((0.8,)), stake=1.0)
    state.settle(-1.0, -1.0)
    for _ in range(20):
        state.look_back([([False], [0.9])] * 7 + [([True], [0.9])], 0.0, 0.2)
    assert state.stake == pytest.approx(0.0)
    assert state.survivals(1)[0] < 0.4, "and it is thought to be wrong"


def test_what_a_request_had_for_looking_back_is_given_back():
    """All of it that rounds to come would have earned, and what rounds earned but looks did not
    take is for the requests after it."""
    shared = Experience((0.8,))
    early, late = (RowState(shared, stake=1.0, advance=50) for _ in range(2))
    early.reserve(0.01)
    assert early.lacks(0.4) == 0.0
    early.reserve(0.01)
    assert early.lacks(0.6) == pytest.approx(0.1), "it has had all"
    early.look_back([([False], [0.9])], 0.1, 0.2)
    early.end(10)
    assert shared.credit == pytest.approx(-0.1)
    late.reserve(0.01)
    assert late.lacks(0.1) == 0.0
    for _ in range(50):
        assert late.repays()
    late.end(50)
    assert shared.credit == pytest.approx(0.4)


@pytest.mark.parametrize("right", [True, False])
def test_a_row_with_nothing_to_stake_probes_if_hindsight_says_that_it_pays(right):
    """Of what it had for looking back: or what was staked in vain once would be the last draft."""
    controller = Controller(COSTS["usual"], (0.8,), follows_clock=False)
    state = controller.row("greedy", 64)
    state.settle(-1.0, -1.0)
    state.reserve(0.01)
    for _ in range(2):  # the second time it lets the row stake nothing more
        runs = [([True] * 8, [0.9] * 8)] if right else [([False], [0.9])] * 8
        state.look_back(runs, 0.0, 0.2)
        state.settle(-state.stake, -state.stake)
    ask = Ask(state, 100, 10, looks_back=True)
    (choice,) = controller.choose([ask], drafts=True)
    assert (choice.num_draft_tokens, state.probing) == ((1, True) if right else (0, False))


@pytest.mark.parametrize("right", [True, False])
def test_what_the_stake_lacks_for_a_probe_is_taken_of_what_was_for_looking_back(right):
    """Of a short request, whose stake pays for no draft any more; the rest stays."""
    controller = Controller(COSTS["usual"], (0.8,), follows_clock=False)
    state, had = controller.row("greedy", 16), 0.16
    state.reserve(0.01)
    state.settle(-0.2, -0.2)
    assert state.lacks(had) == pytest.approx(0.0)
    for _ in range(2):
        state.look_back([([right], [0.9])] * 8, 0.0, 0.2)
    (choice,) = controller.choose([Ask(state, 100, 10, looks_back=True)], drafts=True)
    assert (choice.num_draft_tokens, state.probing) == ((1, True) if right else (0, False))
    assert (0.0 < state.shared.credit < had) == right
    assert state.lacks(had) == pytest.approx(0.0)  # both together are what it had


@pytest.mark.parametrize(("lost", "right"), [(0.0, None), (0.1, None), (0.1, True), (0.1, False)])
def test_what_has_lost_is_tried_again_if_it_would_have_gained(lost, right):
    """Drafts that are right as often as all were before gain; these did not, so that is not enough
    to take what was for looking back."""
    controller = Controller(COSTS["usual"], (0.8,), follows_clock=False)
    state = controller.row("greedy", 16)
    state.reserve(0.01)
    state.settle(-lost, -lost)
    if right is not None:
        state.look_back([([right], [0.9])], 0.0, 0.2)
    (choice,) = controller.choose([Ask(state, 100, 10, looks_back=True)], drafts=True)
    assert choice.num_draft_tokens == (1 if right or not lost else 0)


@pytest.mark.parametrize(("count", "least"), [(1, 1.4), (4, 1.4)])
def test_the_first_short_texts_are_drafted(count, least):
    """Their stakes pay for no draft, nor does what they have for looking back."""
    texts = steady(0.8, count=count, tokens=16)
    assert against_plain(looking("usual").run(texts)) > least


def test_a_look_that_nothing_can_pay_for_is_put_off():
    """A head that takes 1e300 s beside a pass that takes none."""
    nothing, endless = (Curve((1, 8), (0,), ((s, s),)) for s in (0.0, 1e300))
    controller = Controller(CostTable(nothing, endless, nothing, 0.0, 8, {}))
    state = controller.row("greedy", 64)
    state.next_look = 0
    assert not controller.looks_back(state, LAST_LOOK, 10)
    assert state.next_look == LAST_LOOK


def test_what_was_kept_for_looking_back_is_for_probes_of_a_batch():
    """A row that has been alone cannot look back any more, and nobody would try a token again."""
    controller = Controller(COSTS["usual"], (0.8,), follows_clock=False)
    states = [controller.row("greedy", 64) for _ in range(2)]
    for state in states:
        state.settle(-1.0, -1.0)
        state.reserve(0.01)
    asks = [Ask(state, 100, 10) for state in states]
    assert all(choice.num_draft_tokens == 1 for choice in controller.choose(asks, drafts=True))


def test_what_does_not_pay_for_a_probe_stays_for_looking_back():
    controller = Controller(COSTS["usual"], (0.8,), follows_clock=False)
    state = controller.row("greedy", 64)
    state.shared.credit = -2.0
    state.settle(-1.0, -1.0)
    state.reserve(0.01)
    state.look_back(RIGHT, 0.0, 0.2)
    state.settle(-state.stake, -state.stake)
    (choice,) = controller.choose([Ask(state, 100, 10, looks_back=True)], drafts=True)
    assert choice.num_draft_tokens == 0
    assert state.lacks(0.6) == 0.0
    assert state.shared.credit == -2.0


@pytest.mark.parametrize("follows", [True, False])
def test_a_look_that_took_longer_makes_the_next_one_dearer(follows):
    """Where the distribution is cut the vocabulary is sorted for each token that is looked at."""
    controller = Controller(COSTS["usual"], (0.8,), follows_clock=follows)
    state = controller.row("greedy", 64)
    state.next_look = 0
    assert controller.looks_back(state, 8, 100)
    controller.observe_hindsight(state, RIGHT, 100, 20 * controller.times.looking_back(8))
    state.next_look = 0
    assert controller.looks_back(state, 8, 100) is not follows


def test_a_row_that_cannot_pay_for_a_look_is_asked_when_its_rounds_may_have_earned_it():
    """Each round asked, and most of the time between plain rounds went into the same answer."""
    controller = Controller(COSTS["usual"], (0.8,), follows_clock=False)
    state = controller.row("greedy", 64)
    state.reserve(0.01)
    state.look_back(RIGHT, 0.64, 0.2)  # all that it reserved
    state.next_look, plain = 0, Choice("none", 0, plain_seconds=controller.times.verify(1, 100))
    price = controller.times.looking_back(8) / controller.times.verify(1, 100)
    state.owed, state.shared.credit = 0, -0.05
    asked, rounds = 1, 0
    while not controller.looks_back(state, 8, 100):
        controller.observe_plain(state, plain, 100)
        state.next_look, rounds = state.next_look - 1, rounds + 1
        asked += state.next_look <= 0
    assert rounds == math.ceil((price + 0.05) / 0.01)
    assert asked <= 3


@pytest.mark.parametrize(
    ("plan", "settings", "expected"),
    [
        ("exit", {}, True),
        ("exit", {"sampling": SAMPLED}, True),
        ("exit", {"sampling": WITH_RULES}, False),
        ("exit", {"sampling": SAMPLED, "verification": "token"}, False),
        ("exit", {"num_draft_tokens": 3}, False),
        ("skipping", {}, False),
        ("without-layer-0", {}, False),
    ],
)
def test_who_looks_back(toy, plan, settings, expected):
    lm = with_controller(toy, Controller(cost_of(5.0), follows_clock=False), plan, lookup=False)
    batch = lm.open_batch(max_new_tokens=NEW, **settings)
    added = batch.add(PROMPT)
    row = batch._rows.row(added)
    for _ in range(2):
        batch.step()
    assert tells(row, lm._drafter) is expected
    assert bool(row.seen) is expected


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "0.8"])
def test_a_row_whose_first_drafts_fail_drafts_again(toy, monkeypatch, sampling):
    """And writes what plain decoding writes, whether it looks back or not."""
    drafted = {}
    for looks_back in (False, True):
        lm = with_controller(toy, Controller(cost_of(0.2), follows_clock=False), lookup=False)
        lm._drafter = Unlucky(lm.stack, lm.plan)
        with monkeypatch.context() as changed:
            changed.setattr(EarlyExitDrafter, "may_look_back", looks_back)
            out = run(lm, PROMPT, sampling=sampling, max_new_tokens=120)
        plain = run(lm, PROMPT, sampling=sampling, max_new_tokens=120, num_draft_tokens=0)
        assert out.token_ids == plain.token_ids
        drafted[looks_back] = out.stats.num_accepted_tokens
    assert drafted[True] > drafted[False]


class Unlucky(EarlyExitDrafter):
    """Its first drafts are wrong."""

    num_wrong = 5

    def draft(self, requests, *rest):
        drafts = super().draft(requests, *rest)
        self.num_wrong -= 1
        if self.num_wrong < 0:
            return drafts
        wrong = [tuple((t + 1) % VOCAB_SIZE for t in d.tokens) for d in drafts]
        return [replace(d, tokens=w, shared=()) for d, w in zip(drafts, wrong, strict=True)]


def test_rows_of_a_batch_do_not_look_back(toy):
    lm = with_controller(toy, Controller(cost_of(5.0), follows_clock=False), lookup=False)
    batch = lm.open_batch(max_new_tokens=NEW, num_draft_tokens="auto")
    added = batch.add(PROMPT)
    first = batch._rows.row(added)
    for _ in range(2):
        batch.step()
    assert len(first.seen) == 1
    added = batch.add(REPEATING)
    second = batch._rows.row(added)
    for _ in range(3):
        batch.step()
    assert first.seen == second.seen == []


def test_a_row_that_has_ended_keeps_nothing_to_look_back_at(toy):
    """Noise of the whole vocabulary among it; nor does it look with no token left to draft."""
    lm = with_controller(toy, told := Watched(), lookup=False)
    batch = lm.open_batch(max_new_tokens=32, num_draft_tokens="auto", sampling=SAMPLED)
    added = batch.add(REPEATING)
    row = batch._rows.row(added)
    while batch.unfinished:
        batch.step()
    assert not row.seen
    assert sum(len(right) for right, _ in told.runs) == 14, "not after the 31st of 32 tokens"


def test_an_interrupted_look_changes_nothing(toy, monkeypatch):
    lm = with_controller(toy, Watched(), lookup=False)
    whole = run(lm).token_ids
    batch = lm.open_batch(max_new_tokens=NEW, num_draft_tokens="auto")
    row = batch.add(REPEATING)
    for _ in range(3):
        batch.step()
    with monkeypatch.context() as broken:
        broken.setattr(lm._drafter, "looked_back", interrupted)
        with pytest.raises(KeyboardInterrupt):
            batch.step()
    while batch.unfinished:
        batch.step()
    assert batch._rows.row(row).token_ids == list(whole)


def interrupted(*_) -> None:
    raise KeyboardInterrupt
