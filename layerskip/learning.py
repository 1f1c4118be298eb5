"""What is learnt from how a round went: of its drafts, and of the seconds that it took."""

from collections.abc import Sequence

from layerskip.attempt import Attempt
from layerskip.control.estimates import RowState
from layerskip.control.pass_times import PassTimes
from layerskip.controller import Controller
from layerskip.plan import DraftPlan
from layerskip.row import Row
from layerskip.seats import Shape


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


def observe_seconds(
    controller: Controller | None,
    rows: Sequence[Row],
    attempts: Sequence[Attempt],
    draft_seconds: float,
    verify_seconds: float,
) -> None:
    """What a round that the host drove took, for the cost table, if that is of such passes.

    Beside one of recorded passes it would look as if the machine were slow, and rounds that the
    device runs by itself, which come and go with the requests, as if drafts were cheap.
    """
    if controller is None or controller.cost.recorded:
        return
    if not controller.times.due(drafted=any(a.draft.tokens for a in attempts)):
        return
    expected = _expected_seconds(rows, attempts, controller.times)
    size = _num_tokens(attempts), len(attempts)
    controller.times.observe_phases(draft_seconds, verify_seconds, *expected, *size)


def observe_round_seconds(
    controller: Controller | None,
    plan: DraftPlan | None,
    shape: Shape,
    context: int,
    seconds: float,
    passes: float | None,
) -> float:
    """The same of a round that the device ran by itself, whose phases no clock can tell apart:
    all rows of its shape went through all its passes, those at rest and short drafts, too.

    Args:
        plan: of the drafts.
        context: committed slots of a row, on the average.
        seconds: of the round.
        passes: what the cost table may learn from, of the passes alone where a clock can tell;
            None: nothing, as such rounds will take less.

    Returns:
        What its draft is thought to have taken of it: by the cost table, or where there is
        none by the layers that were run.
    """
    count, rows, greedy = shape.num_draft_tokens, shape.num_rows, not shape.sampled
    if controller is None:
        run = count * len(plan.layers) if plan is not None else 0
        return seconds * run / (run + plan.num_layers) if plan is not None else 0.0
    times, tokens = controller.times, rows * (count + 1)
    draft = count * times.draft(rows, context, greedy=greedy)
    draft += times.draft_start() if count else 0.0
    verify = times.verify(tokens, context, rows=rows, greedy=greedy)
    if passes is not None and times.due(drafted=count > 0):
        times.observe_round(passes, draft, verify, tokens, rows)
    return seconds * draft / (draft + verify)


def _expected_seconds(
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
    verify = times.verify(_num_tokens(attempts), context, rows=len(rows), greedy=greedy)
    # No draft pass has drawn for these: straight look-ups, and what stands behind an exit's draft.
    looked_up = sum(
        len(a.draft.tokens) if a.source == "lookup" else a.draft.num_looked_up for a in attempts
    )
    return draft, verify + looked_up * times.drawing(greedy=greedy)


def _num_tokens(attempts: Sequence[Attempt]) -> int:
    """That a round's verify pass takes."""
    return sum(len(a.draft.tokens) + 1 for a in attempts)
