"""The guesser is not trusted: whatever it does to its tokens, its logits and the scratch slots,
what is emitted and what is committed are those of plain decoding.

A drafter owns the slots above the committed length: all of them in the layers that verify runs
again, and in the shared layers those above its own tokens, where verify builds on what it left.
"""

import functools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from decoding import Interruption, join
from torch import Tensor
from toys import DTYPES, PLANS, make_model, random_ids

from layerskip import SamplingParams
from layerskip import decode as decode_module
from layerskip.cache import KVCache
from layerskip.decode import Decoder
from layerskip.drafting import Draft, DraftRequest, EarlyExitDrafter
from layerskip.model import DecoderStack
from layerskip.params import MAX_NUM_DRAFT_TOKENS
from layerskip.plan import DraftPlan
from layerskip.row import Row

# Around a block of 128 attended slots; rows draft differently much, one not at all.
PROMPTS = [random_ids(n) for n in (3, 40, 122, 126)]
COUNTS = (4, 6, 0, 3)
COUPLED = SamplingParams(temperature=0.9, top_k=50, seed=3)
SAMPLINGS = (SamplingParams(), COUPLED, SamplingParams(), COUPLED)
EVERY_PLACE, SAMPLED = range(4), (1, 3)
PAIRS = list(zip(PLANS, [*DTYPES, "bfloat16"], strict=True))
NOISE = torch.Generator().manual_seed(0)


def random(like: Tensor) -> Tensor:
    return 10 * torch.randn(like.shape, generator=NOISE).to(like)


def constant(value: float) -> Callable[[Tensor], Tensor]:
    return functools.partial(torch.full_like, fill_value=value)


def mixed(like: Tensor) -> Tensor:
    """Every kind of number there is."""
    values = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1e30, -1e30]).to(like)
    return values[torch.randint(6, like.shape, generator=NOISE)]


LOGITS = {
    "untouched": lambda logits: logits,
    "random": random,
    "always wrong": torch.neg,
    "always the same": constant(0.0),
    "nan": constant(math.nan),
    "inf": constant(math.inf),
    "ruled out": constant(-math.inf),
    "mixed": mixed,
}
SCRATCH = {"random": random, "nan": constant(math.nan), "inf": constant(math.inf), "mixed": mixed}


class LyingStack:
    """A stack that shows a drafter other logits than it has."""

    def __init__(self, stack: DecoderStack, lie: Callable[[Tensor], Tensor]) -> None:
        self.stack, self.lie = stack, lie

    def __getattr__(self, name: str) -> object:
        return getattr(self.stack, name)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lie(self.stack.logits(hidden))


class Vandal(EarlyExitDrafter):
    """Drafts from logits that lie, and spoils every slot that verify does not build on."""

    def __init__(
        self,
        stack: DecoderStack,
        plan: DraftPlan,
        lie: Callable[[Tensor], Tensor] = LOGITS["untouched"],
        spoil: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(LyingStack(stack, lie), plan)
        self.spoil, self.drafted = spoil, list[int]()

    def draft(
        self, requests: Sequence[DraftRequest], cache: KVCache, head: None = None, pays: None = None
    ) -> list[Draft]:
        drafts = super().draft(requests, cache)
        self.drafted += [token for draft in drafts for token in draft.tokens]
        if self.spoil is not None:
            for request, draft in zip(requests, drafts, strict=True):
                end = request.length + MAX_NUM_DRAFT_TOKENS
                free = request.length + len(draft.tokens)
                shared = self.plan.shared_depth
                for tensor in (cache.keys, cache.values):
                    for part in (
                        tensor[shared:, request.slot_row, request.length : end],
                        tensor[:shared, request.slot_row, free:end],
                    ):
                        part.copy_(self.spoil(part))
        return drafts


Held = tuple[Row, Tensor, Tensor]


def run(batch: Decoder, places: Sequence[int], drafted: bool = True, **settings) -> list[Held]:
    """Finished rows of some of ``PROMPTS``, with their committed keys and values."""
    settings = {"max_new_tokens": 8} | settings
    rows = [
        join(
            batch,
            PROMPTS[place],
            sampling=SAMPLINGS[place],
            num_draft_tokens=COUNTS[place] if drafted else 0,
            **settings,
        )
        for place in places
    ]
    while any(row.finish_reason is None for row in rows):
        batch.step()
    return [held(batch, row) for row in rows]


def held(batch: Decoder, row: Row) -> Held:
    text = batch.cache.copied(row.slot_row, row.context[: row.length], batch.stack)
    return row, text.keys, text.values


def run_plain(stack: DecoderStack) -> list[Held]:
    """Every prompt alone, without a drafter."""
    return [run(Decoder(stack, None, None), [i], drafted=False)[0] for i in EVERY_PLACE]


def check_same(results, expected) -> None:
    for (row, keys, values), (plain, plain_keys, plain_values) in zip(
        results, expected, strict=True
    ):
        assert row.token_ids == plain.token_ids
        assert same_bits(keys, plain_keys)
        assert same_bits(values, plain_values)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.fixture(scope="module")
def plain(wrap) -> Callable[[str], list[Held]]:
    return functools.cache(lambda dtype: run_plain(wrap("exit", "llama", dtype).stack))


def check_mutation(stack: DecoderStack, plan: str, lie: str, spoil: str, expected) -> None:
    drafter = Vandal(stack, PLANS[plan], LOGITS[lie], SCRATCH[spoil])
    together = run(Decoder(stack, drafter, PLANS[plan]), EVERY_PLACE)
    check_same(together, expected)
    rounds = [r for row, *_ in together for r in row.rounds]
    assert max(r.num_draft_tokens for r in rounds) == max(COUNTS)
    if lie == "always wrong":
        assert sum(r.num_accepted_tokens for r in together[0][0].rounds) == 0
    check_same(run(Decoder(stack, drafter, PLANS[plan]), [1]), expected[1:2])


MUTATIONS = [
    ("untouched", "nan"),
    ("untouched", "random"),
    ("random", "inf"),
    ("always wrong", "mixed"),
    ("always the same", "random"),
    ("nan", "nan"),
    ("inf", "mixed"),
    ("mixed", "inf"),
]


@pytest.mark.parametrize(("lie", "spoil"), MUTATIONS)
@pytest.mark.parametrize(("plan", "dtype"), PAIRS)
@pytest.mark.one_in(2)
def test_nothing_a_guesser_does_is_seen(wrap, plain, dtype, plan, lie, spoil):
    check_mutation(wrap("exit", "llama", dtype).stack, plan, lie, spoil, plain(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("spoil", SCRATCH)
@pytest.mark.parametrize("lie", LOGITS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_mutation_is_seen(wrap, plain, dtype, plan, lie, spoil):
    check_mutation(wrap("exit", "llama", dtype).stack, plan, lie, spoil, plain(dtype))


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("lie", ["nan", "inf", "ruled out"])
def test_nothing_is_drafted_from_what_is_no_distribution(wrap, plain, lie, verification):
    """And what is emitted without a draft is plain sampling, with its numbers."""
    stack, plan = wrap("exit").stack, PLANS["exit"]
    batch = Decoder(stack, Vandal(stack, plan, LOGITS[lie], SCRATCH["nan"]), plan)
    rows = run(batch, SAMPLED, verification=verification)
    check_same(rows, [plain("float32")[place] for place in SAMPLED])
    assert all(r.num_draft_tokens == 0 for row, *_ in rows for r in row.rounds)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.8, seed=3)])
@pytest.mark.parametrize("lie", ["nan", "inf"])
def test_nothing_speaks_for_a_draft_from_what_is_no_number(wrap, monkeypatch, lie, sampling):
    """It may be drafted, as verification decides; its confidence would be taken for a number."""
    lm, heard = wrap("exit"), []
    vandal = Vandal(lm.stack, PLANS["exit"], LOGITS[lie])
    monkeypatch.setattr(lm, "_drafter", vandal)
    settings = {"max_new_tokens": 12, "sampling": sampling, "num_draft_tokens": 3}
    lm.generate(PROMPTS[1], **settings, on_round=heard.append)
    told = [confidence for r in heard for confidence in r.confidences]
    assert told
    assert set(told) == {0.0}


@pytest.mark.parametrize("verification", ["token", "block"])
def test_a_draft_ends_before_what_is_no_distribution(wrap, verification):
    stack, plan, calls = wrap("exit").stack, PLANS["exit"], []

    def third_is_nan(logits: Tensor) -> Tensor:
        calls.append(logits)
        return LOGITS["nan" if len(calls) % 3 == 0 else "untouched"](logits)

    batch = Decoder(stack, Vandal(stack, plan, third_is_nan, SCRATCH["nan"]), plan)
    ((row, keys, _),) = run(batch, SAMPLED[:1], verification=verification, max_new_tokens=40)
    assert len(row.token_ids) == 40
    assert {r.num_draft_tokens for r in row.rounds[1:-3]} == {2}
    assert keys.isfinite().all()


POISON = 1  # a token id whose embedding is NaN; no prompt has it


def poisoned(dtype: str) -> DecoderStack:
    """A model in which one token is damaged after the weights were checked."""
    model = make_model("llama", dtype)
    stack = DecoderStack(model)
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = math.nan
        model.lm_head.weight[POISON] = 0.0  # a logit too small for any text below
    return stack


def poison(logits: Tensor) -> Tensor:
    """Drafts the damaged token now and then."""
    changed = logits.clone()
    changed[torch.rand(len(logits), generator=NOISE) < 0.3, POISON] = 1e4
    return changed


@pytest.mark.parametrize(("plan", "dtype"), PAIRS)
def test_a_drafted_token_that_breaks_the_model_breaks_nothing_else(dtype, plan):
    """Masked attention reads the keys and values of tokens that come later in the pass."""
    stack = poisoned(dtype)
    expected = run_plain(stack)
    assert all(POISON not in row.context for row, *_ in expected)
    vandal = Vandal(stack, PLANS[plan], poison)
    together = run(Decoder(stack, vandal, PLANS[plan]), EVERY_PLACE)
    check_same(together, expected)
    assert POISON in vandal.drafted


@pytest.mark.parametrize("verification", ["token", "block"])
def test_a_drafted_token_that_breaks_the_model_is_judged_like_others(verification):
    """p of the token is what it was; only a row that keeps it ends in an error."""
    stack, plan = poisoned("float32"), PLANS["exit"]
    vandal = Vandal(stack, plan, poison)
    batch = Decoder(stack, vandal, plan)
    (row, keys, _), _ = run(batch, SAMPLED, verification=verification, max_new_tokens=30)
    assert POISON in vandal.drafted
    assert sum(r.num_accepted_tokens for r in row.rounds) > 0
    assert keys.isfinite().all()


def test_what_an_interrupted_round_left_is_not_read(monkeypatch):
    """NaN of a rejected token stays behind where a round ends before it is swept."""
    stack, plan = poisoned("float32"), PLANS["exit"]
    batch = Decoder(stack, Vandal(stack, plan, poison), plan)
    rows = [
        join(batch, PROMPTS[i], max_new_tokens=8, num_draft_tokens=COUNTS[i], sampling=SAMPLINGS[i])
        for i in EVERY_PLACE
    ]
    batch.step()
    while any(row.finish_reason is None for row in rows):
        with monkeypatch.context() as patch:
            broken = Interruption(decode_module.judge_all, 0, KeyboardInterrupt)
            patch.setattr(decode_module, "judge_all", broken)
            with pytest.raises(KeyboardInterrupt):
                batch.step()
        batch.step()
    check_same([held(batch, row) for row in rows], run_plain(stack))
