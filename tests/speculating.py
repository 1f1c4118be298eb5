"""Wrappers whose drafts a test scripts, from round to round, and what they say."""

import itertools

from toys import PLANS, random_ids

from layerskip import LookupStore, SamplingParams, SelfSpeculativeLM
from layerskip.control.stopping import Choice
from layerskip.controller import Controller
from layerskip.cost import CostTable, Curve

FREE = Curve((1,), (0,), ((0.0,),))
REPEATING = [*random_ids(12), *random_ids(12), *random_ids(7)]
NEW = 40
GREEDY = SamplingParams()
WITH_RULES = SamplingParams(temperature=0.8, top_p=0.9, seed=3, repetition_penalty=1.2)


def cost_of(c: float) -> CostTable:
    draft, verify = (Curve((8, 64), (0,), ((unit, 2 * unit),)) for unit in (c, 1.0))
    return CostTable(draft, FREE, verify, 0.0, 8, {})


class Scripted(Controller):
    """Chooses what a test says, round after round."""

    def __init__(self, *choices: Choice) -> None:
        super().__init__(cost_of(0.1), follows_clock=False)
        self.choices = itertools.cycle(choices)

    def choose(self, asks, *, drafts, fixed=()):
        return [next(self.choices) for _ in asks]


def run(lm, prompt=REPEATING, **settings):
    return lm.generate(prompt, **{"max_new_tokens": NEW} | settings)


def store_of(*texts) -> LookupStore:
    store = LookupStore()
    for text in texts:
        store.add(text)
    return store


def with_controller(toy, controller, plan="exit", **settings) -> SelfSpeculativeLM:
    lm = SelfSpeculativeLM(toy(), None, PLANS[plan] if plan else None, **settings)
    lm._controller = controller
    return lm
