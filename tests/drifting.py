"""Streams of requests that differ, as drift is told in."""

import math
from collections.abc import Iterable

import numpy as np

from layerskip import Round
from layerskip.telemetry.baseline import Baseline, OpenRequest, Reference

MOST = 4  # tokens a draft
ACCEPTANCE = 0.79
# Spread of a request's logit, and the correlation of its drafts that it makes.
SPREADS = {0.0: 0.0, 0.017: 0.2, 0.03: 0.26, 0.05: 0.35, 0.1: 0.515}
PROMISED_DELAY, PROMISED_DRAFTS = 200, 100_000
RECORD = Round(0, 1, (1,), "", MOST, 0, "recovered", 0.0, 0.0, 1, request_id="a")


def traffic(
    rng: np.random.Generator, num_requests: int, correlation: float, mean_drafts: float = 40.0
) -> tuple[np.ndarray, np.ndarray]:
    """Accepted tokens (request, draft), and which of the drafts there are.

    Each request has an acceptance and a number of drafts of its own; the built-in checkpoint's
    rounds have such means and deviations.
    """
    logit = math.log(ACCEPTANCE / (1 - ACCEPTANCE))
    logits = logit + SPREADS[correlation] * rng.standard_normal(num_requests)
    drafts = np.clip(rng.lognormal(math.log(0.85 * mean_drafts), 0.55, num_requests), 3, 200)
    exists = np.arange(int(drafts.max())) < np.floor(drafts)[:, None]
    right = np.log(rng.random(exists.shape)) / np.log(1 / (1 + np.exp(-logits)))[:, None]
    return np.minimum(np.floor(right), MOST).astype(int), exists


def shifted(rng: np.random.Generator, accepted: np.ndarray, deviations: float) -> np.ndarray:
    """Two tokens more or less, where there is room, as often as moves the mean so far."""
    moved = np.clip(accepted + math.copysign(2, deviations), 0, MOST).astype(int)
    chance = deviations * accepted.std() / (moved - accepted).mean()
    assert 0 <= chance <= 1
    return np.where(rng.random(accepted.shape) < chance, moved, accepted)


def requests_of(accepted: np.ndarray, exists: np.ndarray) -> list[list[int]]:
    return [row[there].tolist() for row, there in zip(accepted, exists, strict=True)]


def baseline_of(requests: Iterable[Iterable[int]]) -> Baseline:
    """What is learnt from the accepted tokens of each draft, request by request."""
    reference = Reference()
    for drafts in requests:
        one = OpenRequest()
        for accepted in drafts:
            one.add(accepted)
        reference.add(one)
    return reference.baseline()
