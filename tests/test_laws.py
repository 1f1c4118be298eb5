"""What the built-in checkpoint emits at temperature 1, against the exact law of its full model.

20,000 continuations a mode, of one prompt that is prefilled once. The law is enumerated over the
likely prefixes with passes of the engine's own kind, so that it has their bits.
"""

import math
from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from layerskip import SamplingParams, SelfSpeculativeLM
from layerskip import verification as verification_module
from layerskip.cache import CachedText, Segment
from layerskip.params import VERIFICATIONS

PROMPT = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self."
NUM_TOKENS = 5  # one of the prefill, a block of three drafted ones, the one after them
NUM_DRAWS = 20_000
FEWEST_EXPECTED = 5.0

Text = tuple[int, ...]
Law = dict[Text, float]


@dataclass(frozen=True)
class Lab:
    """The checkpoint, its prompt, and keys and values of the prompt."""

    lm: SelfSpeculativeLM
    prompt: list[int]
    held: CachedText

    def draw(self, verification: str, count: int) -> list[Text]:
        """Continuations with seeds 0 to ``count - 1``."""
        outputs = self.lm.generate(
            self.prompt,
            num_return_sequences=count,
            max_new_tokens=NUM_TOKENS,
            num_draft_tokens=NUM_TOKENS - 2,
            sampling=SamplingParams(temperature=1.0, seed=0),
            verification=verification,
            ignore_eos=True,
            cache=self.held,
        )
        assert sum(out.stats.num_accepted_tokens for out in outputs) > count
        return [out.token_ids for out in outputs]

    @torch.inference_mode()
    def law(self, num_draws: int) -> Law:
        """The share of every cell of ``partition`` that ``num_draws`` fill."""
        stack, start = self.lm.stack, len(self.prompt)
        cache = stack.new_cache(num_rows=1, num_slots=start + NUM_TOKENS)
        cache.restore(0, self.held, start - 1)
        first = stack.prefill(self.prompt, cache, 0, start=start - 1)
        total, growing = {(): 1.0}, [()]
        while growing:
            prefix = growing.pop()
            logits = first
            if prefix:
                segments = [Segment(0, start, len(prefix))]
                hidden = stack.embed(prefix)
                hidden = stack.run_layers(hidden, range(stack.num_layers), cache, segments)
                logits = stack.logits(hidden)[len(prefix) - 1]
            for token, p in enumerate((total[prefix] * logits.double().softmax(-1)).tolist()):
                if p * num_draws >= 2 * FEWEST_EXPECTED:
                    total[*prefix, token] = p
                    if len(prefix) + 1 < NUM_TOKENS:
                        growing.append((*prefix, token))
        return partition(total, FEWEST_EXPECTED / num_draws)


def partition(total: Law, least: float) -> Law:
    """Shares of cells: a text belongs to the longest of its prefixes that is one.

    Args:
        total: probability of each prefix, whatever follows; all of a prefix's own are among them.
        least: a prefix with a smaller share becomes no cell.
    """
    shares: Law = {}
    below: Counter[Text] = Counter()
    for prefix in sorted(total, key=len, reverse=True):
        share = total[prefix] - below[prefix]
        if share >= least:
            shares[prefix] = share
            below[prefix] = total[prefix]
        if prefix:
            below[prefix[:-1]] += below[prefix]
    assert math.isclose(sum(shares.values()), 1.0)
    return shares


def chi_square(texts: list[Text], law: Law) -> tuple[float, int, float]:
    """Statistic, degrees of freedom, and the chance of one as large if the law holds."""
    lengths = range(NUM_TOKENS, -1, -1)
    counts = Counter(next(t[:n] for n in lengths if t[:n] in law) for t in texts)
    expected = {cell: share * len(texts) for cell, share in law.items()}
    statistic = sum((counts[cell] - e) ** 2 / e for cell, e in expected.items())
    freedom = len(law) - 1
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return statistic, freedom, float(torch.special.gammaincc(*half))


@pytest.fixture(scope="module")
def lab() -> Lab:
    lm = SelfSpeculativeLM.from_pretrained()
    prompt = lm.encode(PROMPT)
    lm.tokenizer = None
    held = lm.generate(prompt, max_new_tokens=1, return_cache=True).cache
    return Lab(lm, prompt, held)


@pytest.mark.slow
@pytest.mark.parametrize("verification", VERIFICATIONS)
def test_continuations_follow_the_law_of_the_full_model(lab: Lab, verification: str) -> None:
    law = lab.law(NUM_DRAWS)
    statistic, freedom, p = chi_square(lab.draw(verification, NUM_DRAWS), law)
    print(f"{verification}: chi-square {statistic:.1f}, {freedom} degrees of freedom, p {p:.4f}")
    assert freedom > 200
    assert max(map(len, law)) == NUM_TOKENS
    assert p > 1e-4


@pytest.mark.slow
def test_a_wrong_recovered_token_is_noticed(lab: Lab, monkeypatch) -> None:
    """Tokens after a rejection drawn from p. Few cells, which few draws fill."""
    monkeypatch.setattr(verification_module, "recovered", lambda _, p, q, draft, n: p[n])
    assert chi_square(lab.draw("token", 3000), lab.law(300))[2] < 1e-6
