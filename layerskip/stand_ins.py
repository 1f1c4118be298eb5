"""Which recorded round runs in the place of one that is not recorded, and for how long."""

from collections.abc import Callable
from dataclasses import replace

from layerskip.graphs import Allowance, Recordings
from layerskip.ops.catalog import MOST_DRAFTED
from layerskip.params import MAX_AUTO_DRAFT_TOKENS
from layerskip.seats import Shape

# A round of up to so many drafted tokens more may run in the place of one that is not recorded.
# Each takes 0.3 to 0.35 of a plain token on an H200, a recording 4 to 19 plain tokens, and a round
# that the host starts 1.1 to 3 times as long as a recorded one (bench/LOG.md, 2026-11-27): so where
# another can run, a recording has to come up so many times as often as where the host would start
# it, and yet more often where one of half as many tokens or more can, which gains nearly as much.
MOST_MORE, WAITS, WAITS_BY_HALF = 3, 8, 64


def stand_in(count: int, recorded: Callable[[int], bool], *, may_be_fewer: bool) -> int | None:
    """Drafted tokens of the recorded round that runs in the place of one of ``count``: half as many
    or more; a few more, which nobody takes; or what there is. None: there is none.

    Args:
        recorded: whether there is one of so many.
        may_be_fewer: whether ``count`` was chosen, not asked for.
    """
    more = range(count + 1, min(count + MOST_MORE, MOST_DRAFTED) + 1) if count else range(0)
    larger = next(filter(recorded, more), None)
    smaller = next(filter(recorded, reversed(range(count))), None) if may_be_fewer else None
    if smaller is not None and (larger is None or _by_half(count, smaller)):
        return smaller
    return larger


def may_draft(recordings: Recordings, plain: Shape, allowance: Allowance) -> bool:
    """Whether a round that drafts can run for rows that leave that to the controller. Else they
    rest: a probe that runs as a plain round tells nothing, and would be tried again and again.

    Args:
        plain: the rows' plain round.
        allowance: of recordings to be made.
    """
    if not recordings.dear or (allowance.affords and not recordings.full):
        return True
    if plain in recordings and not recordings.has(plain):  # the host starts them all
        return True
    counts = range(1, MAX_AUTO_DRAFT_TOKENS + MOST_MORE + 1)
    return any(recordings.has(replace(plain, num_draft_tokens=count)) for count in counts)


def patience(count: int, instead: int | None) -> int:
    """How many times as patiently a round of ``count`` drafted tokens is recorded where one of
    ``instead`` can run."""
    if instead is None:
        return 1
    return WAITS_BY_HALF if _by_half(count, instead) else WAITS


def _by_half(count: int, instead: int) -> bool:
    return count <= 2 * instead <= 2 * count
