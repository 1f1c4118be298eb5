"""Looking back: what drafts would have come to in rounds that made none.

A plain round runs the layers of an early exit anyway, and leaves the hidden state that a draft
would have begun from. One product of the head over several of these states says which of the tokens
since then the exit would have drafted, for less than one draft pass takes. So a request whose first
drafts were unlucky is not decoded plainly to its end, and one whose text changes drafts again.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from layerskip.control.estimates import MOST_SEEN
from layerskip.draft_head import DraftHead, over_all
from layerskip.drafting import EarlyExitDrafter
from layerskip.row import Row, Seen
from layerskip.sampling import confidences

# Judged tokens of a draft, accepted ones and the first that was not, and their confidences.
Stretch = tuple[list[bool], list[float]]


def tells(row: Row, drafter: EarlyExitDrafter | None) -> bool:
    """Whether plain rounds of a row tell what its drafts would come to: of an early exit without
    layers of its own, where a drafted token is right if it is the one that follows, and depends on
    the logits and the noise alone."""
    if row.state is None or drafter is None or not drafter.may_look_back:
        return False
    return row.spec.sampler.verification == "coupled" and not row.spec.sampler.reads_context


def remember(row: Row, emitted: Sequence[int], states: Tensor) -> None:
    """Keep what these tokens would have been drafted from, of a row that ``tells``.

    Args:
        row: has ``emitted`` already, but for its ``own_ids``; the noise that these tokens were
            chosen with is still known.
        states: ``(>= tokens, hidden)`` after the exit, of the token before each.
    """
    state, sampler, first = row.state, row.spec.sampler, row.length + 1 - len(emitted)
    assert state is not None
    state.next_look -= len(emitted)
    if state.next_look > MOST_SEEN:  # it would be forgotten before
        return
    for i, token in enumerate(emitted):
        greedy = sampler.params.greedy
        noise = None if greedy else sampler.noise(first + i, states.device)
        own_ids = row.own_ids.union(emitted[:i]) if i else row.own_ids
        # Copied: a view would keep all rows of the pass.
        row.seen.append(Seen(states[i].clone(), noise, token, own_ids))
    del row.seen[:-MOST_SEEN]


def look_back(row: Row, drafter: EarlyExitDrafter, head: DraftHead | None) -> list[Stretch]:
    """Drafts that a row's seen tokens would have had, each as long as it would have been right."""
    seen, sampler = row.seen, row.spec.sampler
    logits = drafter.looked_back(torch.stack([s.state for s in seen]), head)
    if head is not None:
        size, each = sampler.vocab_size, zip(logits.split(1), seen, strict=True)
        logits = torch.cat([over_all(part, head, s.own_ids, size) for part, s in each])
    scores = sampler.scores(logits)
    noise = [s.noise for s in seen if s.noise is not None]
    if noise:
        scores = scores + torch.stack(noise)
    told = confidences(scores, 1.0 if sampler.params.greedy else sampler.params.temperature)
    runs: list[Stretch] = [([], [])]
    for s, drafted, confidence in zip(seen, scores.argmax(-1).tolist(), told, strict=True):
        right = drafted == s.token
        runs[-1][0].append(right)
        runs[-1][1].append(0.0 if math.isnan(confidence) else confidence)
        if not right:
            runs.append(([], []))
    return [run for run in runs if run[0]]
