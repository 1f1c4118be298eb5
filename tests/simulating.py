"""Simulations small enough to check by hand."""

from dataclasses import replace

import numpy as np
from controlling import table

from layerskip.cost import CostTable
from layerskip.pass_costs import PassCosts, prefill_seconds
from layerskip.simulate import Loop, most_drafted, simulate

POLICIES = ("off", "fixed:4", "auto")
KEY = {"fingerprint": "f", "device": "d", "dtype": "bfloat16", "threads": 1}


def flat(draft: float = 0.25) -> CostTable:
    """Every pass takes 1, every draft pass ``draft``, whatever their rows; so do chunks."""
    return replace(table(draft, quantum=1, slope=0.0), key=KEY)


def one_cell(cost, traffic, policy="off", concurrency=1, num_requests=40, **how):
    found = simulate(
        cost,
        traffic,
        concurrency=[concurrency],
        policies=[policy],
        num_requests=num_requests,
        **how,
    )
    return found.cells[0]


def loop_of(cost, stream, policy, concurrency, *, seed=0, prefill=None, costs=None, machine=None):
    most = most_drafted(policy) if isinstance(policy, str) else 16
    longest = int((stream.prompt_tokens + stream.tokens).max())
    costs = costs or PassCosts(cost, rows=concurrency, most_drafted=most, longest=longest)
    filled = [prefill_seconds(cost, int(n)) for n in stream.prompt_tokens]
    filled = np.array(filled if prefill is None else prefill)
    return Loop(stream, filled, costs, concurrency, seed, machine)
