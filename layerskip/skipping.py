"""Which layers a draft can do without: skip sets by dynamic programming on hidden states, and the
plans next to one."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from torch import Tensor
from torch.nn import functional as F

from layerskip.ambient import Decoding
from layerskip.calibration import KnownTexts
from layerskip.plan import DraftPlan


@dataclass(frozen=True)
class _Path:
    """The best draft so far that skipped so many layers: its hidden states, what it skipped."""

    hidden: Tensor
    skipped: tuple[int, ...] = ()


@Decoding()
def closest_skip_sets(known_texts: KnownTexts) -> dict[int, DraftPlan]:
    """For each number of skipped layers from 1 on, a plan that keeps hidden states close.

    CLaSp's programme (Chen et al. 2025, arXiv 2505.24196): with ``h_i`` the full model's hidden
    states after i layers and ``g(i, j)`` the best draft's after i layers of which j were skipped,
    ``g(i, j)`` is whichever of ``g(i-1, j-1)`` and ``layer_i(g(i-1, j))`` has the larger cosine
    with ``h_i``. An approximation: a draft that is behind at layer i is not followed further.
    Here one set serves all sampled positions, by their mean cosine, and layer 0 is always run.
    """
    depth = known_texts.stack.num_layers
    known_texts.restore()
    paths = [_Path(known_texts.states(1))]
    for layer in range(1, depth):
        target = known_texts.states(layer + 1)
        run = known_texts.run_layer(layer, [path.hidden for path in paths])
        reached = [_Path(h, path.skipped) for h, path in zip(run, paths, strict=True)]
        passed = [_Path(path.hidden, (*path.skipped, layer)) for path in paths]
        both = zip([*reached[1:], None], passed, strict=True)  # with as many layers skipped
        better = [p if r is None or _cosine(p, target) > _cosine(r, target) else r for r, p in both]
        paths = [reached[0], *better]
    return {
        count: DraftPlan.skipping(num_layers=depth, skipped=path.skipped)
        for count, path in enumerate(paths)
        if count
    }


def _cosine(path: _Path, target: Tensor) -> float:
    return F.cosine_similarity(path.hidden.float(), target.float(), dim=-1).mean().item()


def neighbours(plan: DraftPlan, rng: random.Random) -> Iterator[DraftPlan]:
    """Plans with one layer less, one more, or another, each kind in random order; layer 0 stays."""
    depth, layers = plan.num_layers, set(plan.layers)
    inside = [i for i in plan.layers if i]
    outside = [i for i in range(depth) if i not in layers]
    fewer = [layers - {i} for i in inside]
    more = [layers | {i} for i in outside if len(layers) < depth - 1]
    other = [layers - {i} | {j} for i, j in product(inside, outside)]
    for kind in (fewer, more, other):
        for changed in rng.sample(kind, len(kind)):
            yield DraftPlan(depth, tuple(sorted(changed)))
