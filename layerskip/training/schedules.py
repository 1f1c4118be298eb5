"""Schedules over depth and over time."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

from layerskip.params import check_integer, check_number

Curriculum = Literal["none", "rotational", "gradual"]
CURRICULA: tuple[Curriculum, ...] = ("none", "rotational", "gradual")


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


def enabled_exits(
    curriculum: Curriculum,
    step: int,
    num_steps: int,
    num_layers: int,
    *,
    every: int = 4,
    exits: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Exit layers whose loss counts at a step, from the shallowest on; full depth always does.

    A function of the step alone: a run that goes on from a checkpoint goes on where it was.

    - "none": every exit at every step.
    - "rotational": every ``every``-th exit, another set at each step, so that after ``every`` steps
      all had their turn.
    - "gradual": from the deepest down to the first, one more every ``num_steps / 2`` divided by
      their number steps: all of them from half of the run on.

    Args:
        curriculum: one of the three.
        step: from 0.
        num_steps: of the whole run.
        num_layers: depth of the model; its exits are 1 to ``num_layers``, the last of them full
            depth.
        every: of the rotational curriculum, ``R`` in the paper.
        exits: those that are trained, ascending, in [1, ``num_layers``]; None: all. Full depth is
            one of them, named or not.

    References:
        LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710), section 3.2.
    """
    if curriculum not in CURRICULA:
        raise ValueError(f"curriculum must be one of {', '.join(CURRICULA)}, got {curriculum!r}")
    check_integer("step", step, 0)
    check_integer("num_steps", num_steps, 1)
    check_integer("num_layers", num_layers, 1)
    check_integer("every", every, 1)
    trained = _trained_exits(exits, num_layers)
    if curriculum == "rotational":
        turn = step % every
        return tuple(e for i, e in enumerate(trained) if e == num_layers or i % every == turn)
    if curriculum == "gradual":
        count = 1 + 2 * len(trained) * step // num_steps
        return trained[max(0, len(trained) - count) :]
    return trained


def _trained_exits(exits: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    if exits is None:
        return tuple(range(1, num_layers + 1))
    for layer in exits:
        check_integer("an exit layer", layer, 1, num_layers)
    if any(a >= b for a, b in pairwise(exits)):
        raise ValueError(f"exits must ascend, got {list(exits)}")
    return tuple(sorted({*exits, num_layers}))


def exit_loss_scales(
    exits: Sequence[int], num_layers: int, *, early_scale: float = 1.0, floor: float = 0.0
) -> Mapping[int, float]:
    """Weights of the enabled exits' losses; they add up to 1.

    The paper's grow with depth, ``early_scale * sum_{i < e} i`` for an exit after ``e`` layers and
    ``num_layers - 1 + early_scale * sum_{i < num_layers - 1} i`` at full depth, divided by their
    sum: the fourth of 32 layers gets 0.1 % of it, and exits that one drafts from hardly learn.
    ``floor`` is a share of all weight that is handed out equally instead.

    Args:
        exits: enabled, full depth among them.
        num_layers: depth of the model.
        early_scale: of early exits against full depth; 0 leaves exits their part of
            ``floor`` alone.
        floor: in [0, 1); 0 is the paper's rule.

    References:
        LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710), equations 5 and 6.
    """
    check_number("early_scale", early_scale, 0.0, 1e6)
    check_number("floor", floor, 0.0, 0.999)
    if num_layers not in exits or len(set(exits)) < len(exits):
        raise ValueError(f"exits must be distinct and hold full depth ({num_layers}), got {exits}")
    for layer in exits:
        check_integer("an exit layer", layer, 1, num_layers)
    raw = {e: early_scale * math.comb(e, 2) for e in exits}
    raw[num_layers] = num_layers - 1 + early_scale * math.comb(num_layers - 1, 2)
    total = sum(raw.values())
    if total == 0.0:  # of a model of one layer
        return dict.fromkeys(exits, 1.0 / len(exits))
    return {e: (1.0 - floor) * w / total + floor / len(exits) for e, w in raw.items()}
