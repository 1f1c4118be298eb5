"""One row's draft of a round: how it came about, what it should take, and what its end teaches."""

from collections.abc import Sequence
from dataclasses import dataclass

from layerskip.control.estimates import RowState
from layerskip.control.experience import lookup_confidence
from layerskip.control.pass_times import PassTimes
from layerskip.control.stopping import Choice, Stopper
from layerskip.controller import Controller
from layerskip.drafting import Draft
from layerskip.lookup import NO_GUESS, Guess
from layerskip.outputs import Drafter, StopReason
from layerskip.row import Row


@dataclass(frozen=True, eq=False)
class Attempt:
    """One row's draft of a round, and how it came about.

    Attributes:
        choice: where the draft came from.
        draft: the tokens.
        guess: what was looked up before the round.
        stopper: what the draft's confidence was held against.
        probing: whether the controller tried what it had given up.
        behind: what was looked up behind an early exit's draft.
    """

    choice: Choice
    draft: Draft
    guess: Guess
    stopper: Stopper | None
    probing: bool = False
    behind: Guess = NO_GUESS

    @property
    def source(self) -> Drafter:
        """Where the drafted tokens came from."""
        return self.choice.source if self.draft.tokens else "none"

    @property
    def confidences(self) -> tuple[float, ...]:
        """What spoke for each drafted token; none where nobody asked."""
        if self.source == "lookup":
            return _told(self.guess, len(self.draft.tokens))
        if not self.draft.confidences:
            return ()
        return *self.draft.confidences, *_told(self.behind, self.draft.num_looked_up)

    @property
    def stopped(self) -> StopReason:
        """Why the draft went no further."""
        if not self.draft.tokens:
            return ""
        if len(self.draft.tokens) - self.draft.num_looked_up >= self.choice.num_draft_tokens:
            return "number"
        told = self.stopper.stopped if self.stopper is not None else ""
        return told or "end"


def expected_seconds(
    rows: Sequence[Row], attempts: Sequence[Attempt], times: PassTimes
) -> tuple[float, float]:
    """Of a round's draft and verify passes, by the cost table; before the rows go on from it."""
    context = sum(row.length for row in rows) // len(rows)
    greedy = all(row.spec.sampler.is_argmax for row in rows)
    passes = [a.draft.num_passes for a in attempts]
    positions = sum(a.draft.num_positions for a in attempts)
    each = max(1, round(positions / max(1, sum(passes))))
    draft = sum(
        times.draft(sum(n > i for n in passes), context, each=each, greedy=greedy)
        for i in range(max(passes))
    )
    draft += times.draft_start() if any(passes) else 0.0
    verify = times.verify(num_tokens(attempts), context, rows=len(rows), greedy=greedy)
    # No draft pass has drawn for these: straight look-ups, and what stands behind an exit's draft.
    looked_up = sum(
        len(a.draft.tokens) if a.source == "lookup" else a.draft.num_looked_up for a in attempts
    )
    return draft, verify + looked_up * times.drawing(greedy=greedy)


def learn(
    controller: Controller,
    state: RowState,
    attempt: Attempt,
    context: int,
    emitted: Sequence[int],
    num_matches: int,
) -> None:
    """Tell the controller what became of the draft of a row that left its length to it.

    Args:
        context: committed slots of the row, after the round.
        emitted: tokens of the round.
        num_matches: drafted tokens that verification confirmed, before any cut.
    """
    draft, plain = attempt.draft, (state, attempt.choice, context)
    if attempt.source == "none" and not draft.num_passes:
        controller.observe_plain(*plain)
        return
    # Each emitted token but one saved a plain round; a text that ended within its draft had no
    # token after the accepted ones.
    saved, looked_up = len(emitted) - 1, draft.num_looked_up
    drafted = len(draft.tokens) - looked_up
    if attempt.source == "lookup":
        controller.observe_lookup(*plain, saved, drafted)
        return
    num_matches = min(num_matches, drafted)
    # Behind the text's end nobody knows what is right.
    known, wrong = min(num_matches, len(emitted)), num_matches < min(drafted, len(emitted))
    accepted = [True] * known + [False] * wrong
    # A round that is on its way already may be of another kind than the one that is judged.
    latest, state.probing = state.probing, attempt.probing
    stopper = attempt.stopper
    controller.observe_draft(
        state,
        attempt.choice,
        context,
        accepted,
        attempt.draft.confidences,
        stopper.chances if stopper is not None else (),
        num_passes=attempt.draft.num_passes,
        num_drafted=drafted,
        num_positions=attempt.draft.num_positions,
        num_behind=looked_up,
        num_saved=saved,
        alone=stopper is not None and stopper.alone,
    )
    state.probing = latest


def num_tokens(attempts: Sequence[Attempt]) -> int:
    """That a round's verify pass takes."""
    return sum(len(a.draft.tokens) + 1 for a in attempts)


def _told(found: Guess, count: int) -> tuple[float, ...]:
    """What speaks for the first looked-up tokens."""
    return tuple(lookup_confidence(found.match_length, found.stored, ahead=i) for i in range(count))
