"""What rows ask of a round that leave it to the controller, and what speaks for each: look-ups that
are worth their tokens, what may be lost in vain, when to rest, and when to try once more."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from layerskip.control.ending import Ending
from layerskip.control.estimates import RowState
from layerskip.control.experience import lookup_confidence
from layerskip.control.pace import NO_OFFER, Pace, Split, bet, offer, split
from layerskip.lookup import FORCED_MATCH, NO_GUESS, Guess
from layerskip.params import MAX_AUTO_DRAFT_TOKENS

HYSTERESIS = 0.03
# Of its plain time, what a request may lose: to drafts that it stakes, to which hindsight may add a
# third, and to probes. Deciding takes some, too, and all together has to stay below 3 %, but for
# texts that are right only where nothing is drafted. The first one that ends long before its limit
# loses more: nobody can know that it will.
STAKE_SHARE, PROBE_SHARE = 0.015, 0.01
MOST_CREDIT = 1.0  # plain passes
MOST_AT_REST = 32  # rounds in which no row is asked again whether to draft
# Looking up takes 1 % of a round of eight rows. Hardly any look-up pays where a token more in the
# verify pass costs so much of a row's plain round, nor where one rest has followed another.
DEAR, AWAKE_ONE_IN = 1 / 3, 4
LEAST_MATCH = 2  # tokens
PAYING = 0.4  # of what a drafted token costs at least: one that gains less is not looked at


@dataclass(frozen=True)
class Ask:
    """A row that wants to know how far to draft.

    Attributes:
        state: of its request.
        context: committed slots.
        room: most tokens that the row takes.
        guess: what a look-up offers.
        left: tokens that the row may still emit; only how they differ from its neighbours' counts.
        looks_back: whether its plain rounds tell what drafts would come to.
    """

    state: RowState
    context: int
    room: int
    guess: Guess = NO_GUESS
    left: int = 1
    looks_back: bool = False

    @property
    def most(self) -> int:
        """Tokens that the controller lets a row draft."""
        return min(self.room, MAX_AUTO_DRAFT_TOKENS)


def speaks_for(guess: Guess) -> float:
    """The confidence in its first token; 0 of none."""
    return lookup_confidence(guess.match_length, guess.stored) if guess.tokens else 0.0


def weighed(
    asks: Sequence[Ask],
    pace: Pace,
    lines: Sequence[Sequence[float]],
    fixed: Sequence[int],
    may_lose: float,
    *,
    resting: bool,
) -> Split:
    """What rows do whose drafts survive so, or who have looked something up: what has the most
    tokens a second, unless some row would end late."""
    offers = [offered(a, pace, line, may_lose) for a, line in zip(asks, lines, strict=True)]
    bias = 1.0 + HYSTERESIS if resting else 1.0 - HYSTERESIS
    found = split(pace, lines, offers, fixed, bias=bias)
    deepest = max(found.drafted)
    if len(asks) == 1 or not deepest:
        return found
    doubted = any(a.state.sort.is_doubted for a in asks)
    if not doubted and _keeps_up(found, pace, lines, fixed):
        return found
    hopes = [a.state.sort.hopes(a.state.shared.acceptances[:deepest]) for a in asks]
    return Ending(pace, hopes, offers, [a.left for a in asks], fixed, doubted).within(found)


def _keeps_up(
    found: Split, pace: Pace, lines: Sequence[Sequence[float]], fixed: Sequence[int]
) -> bool:
    """Whether every row that looks nothing up emits as many tokens a second as without drafts."""
    deepest, rows = max(found.drafted), pace.num_rows
    emitted = 1.0 + min(
        (sum(line[:deepest]) for line, n in zip(lines, found.looked_up, strict=True) if not n),
        default=math.inf,
    )
    without = rows + sum(found.looked_up) + sum(fixed)
    seconds = pace.round([*found.drafted, *fixed], without + sum(found.drafted), rows)
    return seconds <= emitted * pace.round(fixed, without, rows)


def loss_allowed(asks: Sequence[Ask], pace: Pace) -> float:
    """Seconds that a row's look-up may take in vain, by itself or with the draft before it: of its
    stake, as a draft may, and of what rounds earned. Whether look-ups are right is known without
    taking any, so they need no probes.
    """
    stake = sum(a.state.stake for a in asks) / len(asks)
    credit = min(MOST_CREDIT, *(a.state.shared.credit for a in asks)) / len(asks)
    return bet(pace) * max(0.0, stake) * pace.token + max(0.0, credit) * pace.plain


def offered(ask: Ask, pace: Pace, line: Sequence[float], may_lose: float) -> tuple[int, float]:
    """Looked-up tokens of a row whose drafts survive so, as in ``offer``. What one token matched is
    no offer where there are drafts: those that were taken were right too seldom to be worth it.
    What a grammar forces is right: it may take what it takes.
    """
    guess, most = ask.guess, min(len(ask.guess.tokens), ask.most)
    if not guess.tokens or (line and guess.match_length < LEAST_MATCH):
        return NO_OFFER
    if guess.match_length < FORCED_MATCH:
        most = min(most, bisect_right(pace.lookup_risks, may_lose))
    return offer(pace, line, ask.state.lookup_survivals(guess.match_length, guess.stored, most))


def put_to_rest(asks: Sequence[Ask], pace: Pace, left: float, *, drafts: bool) -> None:
    """Rounds at rest should cost nothing: a few of them are not thought about, unless what they
    earn comes to pay for a probe, if there is something to try."""
    awaited = math.inf
    if drafts:
        trying = sum(a.room > 0 for a in asks)
        paid = max(0.0, left) if _promising(asks, pace) else 0.0
        awaited = _probe_cost(asks, pace) - paid * trying / pace.plain
        if not _tries(asks, pace):  # looking back ends the rest, if anything does
            awaited = math.inf
    one_in = 1
    if pace.steps[0] > DEAR * pace.token:
        one_in = AWAKE_ONE_IN
    elif len(asks) > 1:
        rested = min(AWAKE_ONE_IN, *(a.state.num_rests for a in asks))
        one_in = min(AWAKE_ONE_IN, 2**rested)
    # What did not pay for one does not for its neighbours, who would ask in turn.
    declined = max(speaks_for(a.guess) for a in asks)
    for a in asks:
        a.state.rest_for(
            MOST_AT_REST,
            awaited,
            pace.token,
            beside=pace.num_rows,
            declined=declined,
            awake_one_in=one_in,
        )


def _probe_cost(asks: Sequence[Ask], pace: Pace) -> float:
    """Of a token drafted by each row that has room for it, in plain rounds."""
    rows = sum(a.room > 0 for a in asks)
    verify = pace.verify(pace.num_rows + rows) - pace.verify(pace.num_rows)
    return (pace.start + pace.draft(rows) + verify) / pace.plain


def may_probe(asks: Sequence[Ask], pace: Pace, left: float, *, claims: bool) -> bool:
    """Whether what rounds earned pays for trying the early exit, which the rows gave up, once more:
    all rows together, since they share its pass.

    Args:
        left: seconds of each row's stake, if they are too few for a draft. They are added where by
            what is known a draft would pay: or one bad draft would end all for a long time.
        claims: whether rows have what they will earn in advance: not while they look up, since a
            probe would take the place of that.
    """
    trying = [a for a in asks if a.room > 0]
    rows = len(trying)
    if rows == 0 or any(a.state.probing for a in asks):  # a round ahead, one is not judged yet
        return False
    for a in trying if claims else ():
        if not a.looks_back:  # any more: it has neighbours
            a.state.release_all()
        # Once it has lost something, it looks back for that: it tells far more.
        if not a.looks_back or not a.state.has_lost:
            a.state.claim(PROBE_SHARE * pace.token / pace.plain)
    cost = _probe_cost(asks, pace)
    for shared in (a.state.shared for a in asks):  # of each kind of request, once or more
        shared.credit = min(shared.credit, max(MOST_CREDIT, cost))  # a long rest buys no long run
    missing = cost - min(a.state.shared.credit for a in asks)
    lacking = missing - left * rows / pace.plain
    for a in trying:  # by what is known a draft pays, and its stake does not do
        pays = a.looks_back and lacking > 0.0 and a.state.survivals(1, pace.least)
        if pays and a.state.is_hopeful and a.state.release(lacking):
            lacking = 0.0
    if missing <= 0.0:
        return _tries(asks, pace)
    return lacking <= 0.0 and _promising(asks, pace)


def _tries(asks: Sequence[Ask], pace: Pace) -> bool:
    """Whether to try what does not look as if it would pay: nothing else tells about it."""
    return not all(a.looks_back for a in asks) or _promising(asks, pace)


def _promising(asks: Sequence[Ask], pace: Pace) -> bool:
    """Whether by what is known a draft of some row would pay."""
    return any(a.state.survivals(1, PAYING * pace.least) for a in asks)
