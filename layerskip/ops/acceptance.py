"""Definitions of acceptance: how much of a draft stands, what is emitted, how far a cache came.

Tokens past an end are ``NO_TOKEN``. Rejecting a draft is nothing but not advancing a length.
"""

import torch
from torch import Tensor

from layerskip.ops.reference import gumbel_noise, uniforms

NO_TOKEN = -1


def accept_tokens(
    draft_token_ids: Tensor,
    target_token_ids: Tensor,
    cache_seqlens: Tensor,
    num_left: Tensor,
    eos_ids: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Greedy and coupled acceptance: the target's tokens up to the first that was not drafted.

    What is emitted ends with an end-of-sequence token or at the limit. The cache advances by the
    emitted tokens: the pending one and all emitted but the last are in it.

    Args:
        draft_token_ids: ``(batch, k)`` int64; -1 from where a sequence drafted no more.
        target_token_ids: ``(batch, k + 1)`` int64.
        cache_seqlens: ``(batch,)`` int32; changed. A sequence of negative length emits nothing.
        num_left: ``(batch,)`` int32, tokens that may still be emitted; changed. 0 once a sequence
            has ended; it emits nothing then.
        eos_ids: ``(any,)`` int64.

    Returns:
        Emitted token ids ``(batch, k + 1)`` int64, -1 after the last; the number of drafted ones
        among them ``(batch,)`` int32; the last of them, or -1, ``(batch,)`` int64.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    matches = (draft_token_ids >= 0) & (draft_token_ids == target_token_ids[:, :-1])
    num_matches = matches.long().cumprod(-1).sum(-1)
    return _emit(target_token_ids, num_matches, cache_seqlens, num_left, eos_ids)


def accept_block(
    draft_token_ids: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    seeds: Tensor,
    positions: Tensor,
    cache_seqlens: Tensor,
    num_left: Tensor,
    eos_ids: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Block verification (Sun et al. 2025): the longest prefix that stands, and a token after it.

    The acceptance stream is read at the position of the first drafted token, where no other round
    of the sequence begins, and the target's own noise for the token after the prefix.

    Args:
        draft_token_ids: ``(batch, k)`` int64; -1 from where a sequence drafted no more.
        draft_probs: ``(batch, k, vocab)`` float32, what the tokens were drawn from.
        target_probs: ``(batch, k + 1, vocab)`` float32.
        seeds, positions: ``(batch,)`` int64; positions of the first drafted token.
        cache_seqlens, num_left, eos_ids: as in ``accept_tokens``; the first two are changed.

    Returns:
        As ``accept_tokens``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    tokens = torch.zeros_like(target_probs[..., 0], dtype=torch.int64)
    num_accepted = tokens.new_zeros(len(tokens))
    for b, drafted in enumerate(draft_token_ids.tolist()):
        count = drafted.index(NO_TOKEN) if NO_TOKEN in drafted else len(drafted)
        seed, position = int(seeds[b]), int(positions[b])
        numbers = uniforms(seed, position, count)
        accepted, mass = _longest_prefix(drafted[:count], draft_probs[b], target_probs[b], numbers)
        noise = gumbel_noise(seed, position + accepted, mass.shape[0]).to(mass.device)
        tokens[b, :accepted] = draft_token_ids[b, :accepted]
        tokens[b, accepted] = (mass.double().log().float() + noise).argmax()
        num_accepted[b] = accepted
    return _emit(tokens, num_accepted, cache_seqlens, num_left, eos_ids)


def _longest_prefix(
    drafted: list[int], draft_probs: Tensor, target_probs: Tensor, uniforms: list[float]
) -> tuple[int, Tensor]:
    """Length of the longest prefix that stands, and the mass that the token after it is drawn from.

    With P the running minimum of 1 and the product of target over draft probability, and S the
    mass of the residual max(P p - q, 0), a prefix stands with probability S / (S + 1 - P), the
    whole draft with probability P.
    """
    accepted, mass = 0, target_probs[0]
    joint = torch.ones((), device=target_probs.device)
    for i in range(len(drafted) + 1):
        if i > 0:
            p, q = target_probs[i - 1, drafted[i - 1]], draft_probs[i - 1, drafted[i - 1]]
            known = q > 0 and p >= 0  # a target that is no number lets nothing stand
            joint = (joint * p / q).clamp(max=1.0) if known else torch.zeros_like(joint)
        residual, bar = target_probs[i], joint
        if i < len(drafted):
            residual = (joint * target_probs[i] - draft_probs[i]).clamp(min=0.0)
            residual = residual.nan_to_num(0.0)
            whole = residual.sum() + 1 - joint
            bar = residual.sum() / whole if whole > 0 else torch.ones_like(joint)
        if i == 0 or uniforms[i - 1] <= bar.item():
            accepted = i
            mass = residual if residual.sum() > 0 else target_probs[i]
    return accepted, mass.nan_to_num(0.0)


def _emit(
    tokens: Tensor, num_matches: Tensor, cache_seqlens: Tensor, num_left: Tensor, eos_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens 0 to ``num_matches`` up to the end of the sequence or the limit; advances both."""
    place = torch.arange(tokens.shape[1], device=tokens.device)
    count = torch.minimum(num_matches + 1, num_left.long()).clamp(min=0)
    count = count.where(cache_seqlens >= 0, 0)
    ends = torch.isin(tokens, eos_ids) & (place < count[:, None])
    first_end = torch.where(ends, place, tokens.shape[1]).amin(-1)
    count = torch.minimum(count, first_end + 1)
    emitted = tokens.where(place < count[:, None], -1)
    pending = tokens.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0].where(count > 0, -1)
    cache_seqlens += count.int()
    left = torch.where(ends.any(-1), 0, num_left - count)
    num_left.copy_(left.where(count > 0, num_left))
    return emitted, torch.minimum(num_matches, count).int(), pending
