"""Whether a draft knows how sure it may be."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

SHARPEST, FLATTEST, NUM_TRIED = 0.25, 4.0, 65  # temperatures, on a logarithmic scale
NUM_BINS = 15


@torch.no_grad()
def fit_temperature(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The temperature of a draft's logits under which the target's tokens are likeliest.

    Minimises the mean of ``-sum p log softmax(logits / t)``: maximum likelihood of tokens drawn
    from the target, without drawing them. It is convex in ``1 / t``, of which a grid is tried in
    one pass over the pairs, and the lowest three points are joined by a parabola.

    Args:
        pairs: of draft and target logits, ``(tokens, vocab)`` each; held-out ones.

    Returns:
        Between ``SHARPEST`` and ``FLATTEST``.

    Raises:
        ValueError: there are no tokens.

    References:
        Guo et al. 2017, "On calibration of modern neural networks" (arXiv 1706.04599).
    """
    ends = -math.log2(FLATTEST), -math.log2(SHARPEST)
    factors = torch.logspace(*ends, NUM_TRIED, base=2.0, dtype=torch.float64)  # 1 / t
    losses, count = torch.zeros_like(factors), 0
    for draft_logits, target_logits in pairs:
        logits = draft_logits.float()
        agreement = (target_logits.float().softmax(-1) * logits).sum(-1).double().cpu()
        for i, factor in enumerate(factors.tolist()):
            normaliser = (factor * logits).logsumexp(-1).double().cpu()
            losses[i] += (normaliser - factor * agreement).sum()
        count += len(logits)
    if count == 0:
        raise ValueError("a temperature is fitted on held-out tokens, got none")
    return 1.0 / _lowest(factors.log2(), losses / count)


def _lowest(at: Tensor, values: Tensor) -> float:
    """Two to the power of where a parabola through the lowest of evenly spaced points is lowest."""
    i = int(values.argmin())
    if i in (0, len(values) - 1):
        return 2.0 ** float(at[i])
    left, middle, right = values[i - 1 : i + 2].tolist()
    bend = left - 2 * middle + right
    moved = 0.5 * (left - right) / bend if bend > 0 else 0.0
    return 2.0 ** (float(at[i]) + moved * float(at[1] - at[0]))


def calibration_error(confidence: Tensor, right: Tensor) -> float:
    """Expected calibration error: how far confidence is from being right, on average.

    Tokens are put into 15 bins of equal width by confidence; the gaps between each bin's mean
    confidence and its share of right ones are averaged over tokens.

    Args:
        confidence: ``(tokens,)`` in [0, 1], the draft's probability of its likeliest token.
        right: ``(tokens,)`` in [0, 1], the target's probability of that token, or 0 and 1.

    References:
        Guo et al. 2017 (arXiv 1706.04599), equation 5.
    """
    bins = (confidence.double() * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    gaps = torch.zeros(NUM_BINS, dtype=torch.float64, device=bins.device)
    gaps.index_add_(0, bins, confidence.double() - right.double())
    return float(gaps.abs().sum() / len(confidence))
