"""One row's draft of a round, and how it came about."""

from dataclasses import dataclass

from layerskip.control.experience import lookup_confidence
from layerskip.control.stopping import Choice, Stopper
from layerskip.drafting import Draft
from layerskip.lookup import NO_GUESS, Guess
from layerskip.outputs import Drafter, StopReason


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


def _told(found: Guess, count: int) -> tuple[float, ...]:
    """What speaks for the first looked-up tokens."""
    return tuple(lookup_confidence(found.match_length, found.stored, ahead=i) for i in range(count))
