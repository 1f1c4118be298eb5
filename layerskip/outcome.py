"""What a round did for one row, before it is applied, and the record of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerskip.attempt import Attempt
from layerskip.drafting import NO_DRAFT
from layerskip.outputs import Origin, Round
from layerskip.row import Emission, Row
from layerskip.sampling import token_logprobs
from layerskip.seats import Landing
from layerskip.verification import Verdict

NO_LOGITS = torch.empty(0, device="cpu")


@dataclass(frozen=True)
class Times:
    """Of a round's phases, which all its rows share.

    Attributes:
        draft: seconds.
        began: when verify did. It ends with a row's record: finding its text counts.
        sample: seconds of choosing tokens, a part of verify.
        num_rows: of the round.
    """

    draft: float
    began: float
    sample: float
    num_rows: int


@dataclass(frozen=True)
class Outcome:
    """One row's finished work of a round, not yet applied; a prefill attempts nothing.

    ``exit_states`` are those after the shared layers: of a prompt's chunks, or in one piece of the
    tokens that verify ran. What has a ``landing`` the device has applied to its own state already.
    """

    row: Row
    attempt: Attempt | None
    emission: Emission
    verdict: Verdict
    num_committed: int
    record: Round
    exit_states: Sequence[Tensor] = ()
    landing: Landing | None = None


def record_of(
    row: Row,
    attempt: Attempt | None,
    verdict: Verdict,
    emission: Emission,
    times: Times,
    *,
    ended: float,
    num_uncovered_tokens: int,
    exit_layer: int | None,
) -> Round:
    """The record of a row's round, or of its prefill, which attempts nothing.

    Args:
        row: as it was before the round.
        ended: when the row's text was found, by the clock of ``times``.
        num_uncovered_tokens: emitted, that the draft vocabulary lacks.
        exit_layer: that the draft left at, if it was an early exit.
    """
    draft = attempt.draft if attempt is not None else NO_DRAFT
    source = attempt.source if attempt is not None else "none"
    stopper = attempt.stopper if attempt is not None else None
    num_matches, drafted = verdict.num_matches, len(draft.tokens)
    count, missing = len(emission.token_ids), len(row.spec.prompt) - row.length
    left = drafted + 1 - len(draft.shared)  # for verify to run through the shared layers
    after: Origin = "recovered" if num_matches < drafted else "bonus" if drafted else "plain"
    top = row.spec.logprobs
    return Round(
        row=row.id,
        index=len(row.rounds),
        token_ids=emission.token_ids,
        text=emission.text,
        num_draft_tokens=drafted,
        num_accepted_tokens=min(num_matches, count),
        origin=after if row.rounds else "prefill",
        draft_seconds=times.draft,
        verify_seconds=ended - times.began,
        positions=draft.num_positions + left if row.rounds else missing,
        finish_reason=emission.finish_reason,
        logprobs=()
        if top is None
        else token_logprobs(verdict.logits[:count], emission.token_ids, top),
        drafter=source,
        num_draft_passes=draft.num_passes,
        num_lookup_tokens=drafted if source == "lookup" else draft.num_looked_up,
        chances=tuple(stopper.chances) if stopper is not None else (),
        confidences=attempt.confidences if attempt is not None else (),
        stopped=attempt.stopped if attempt is not None else "",
        num_uncovered_tokens=num_uncovered_tokens,
        request_id=row.spec.request_id,
        labels=row.spec.labels,
        rows=times.num_rows,
        context=row.length,
        exit_layer=exit_layer,
        sample_seconds=times.sample,
        elapsed_seconds=ended - row.joined,
    )
