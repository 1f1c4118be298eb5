"""Schedules over depth and over time."""

import math


def layer_dropout_rate(layer: int, num_layers: int, max_rate: float) -> float:
    """Probability of dropping ``layer``, rising exponentially with depth.

    ``max_rate * (exp(layer * ln 2 / (num_layers - 1)) - 1)``: 0 at the first layer, ``max_rate``
    at the last (LayerSkip, Elhoushi et al. 2024, arXiv 2404.16710, equation 3).
    """
    if num_layers == 1:
        return 0.0
    return max_rate * math.expm1(layer * math.log(2.0) / (num_layers - 1))


def warmup_stable_decay(progress: float, *, warmup: float = 0.02, decay_from: float = 0.4) -> float:
    """Learning-rate factor for ``progress`` in [0, 1]: linear rise, plateau, linear fall to 0."""
    if progress < warmup:
        return progress / warmup
    if progress < decay_from:
        return 1.0
    return max(0.0, (1.0 - progress) / (1.0 - decay_from))
