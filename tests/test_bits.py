"""Tokens, log-probabilities and the cache of a row do not depend on drafts, on the other
rows of its batch, or on its place among them.

Every case is held against the same prompt alone, without a draft. Floats are compared exactly.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toys import DTYPES, PLANS, VOCAB_SIZE, make_model
from zoo import NUM_LAYERS, make_toy

from layerskip import DraftPlan, GenerationOutput, SamplingParams, SelfSpeculativeLM
from layerskip.blocks import multiplied, works
from layerskip.cache import Segment
from layerskip.exactness import MAX_PASS_ROWS, Exactness, products_agree, small_agree, tails
from layerskip.fingerprint import cost_key
from layerskip.model import DecoderStack, pack_model
from layerskip.roundings import revealing

NUM_ROWS = 8
PRODUCTS_OF_A_LAYER = 7  # of weights that do not lie side by side
SAMPLINGS = {"greedy": SamplingParams(), "sampled": SamplingParams(temperature=0.8, seed=3)}


@dataclass(frozen=True)
class Trial:
    """What a batch decodes, apart from how.

    Attributes:
        lm: decodes it.
        prompts: of one batch.
        settings: of ``generate``.
    """

    lm: SelfSpeculativeLM
    prompts: list[list[int]]
    settings: dict[str, Any]

    def together(self, num_draft_tokens: int, order: Sequence[int]) -> list[GenerationOutput]:
        """All of them, in another order, handed back in their own."""
        prompts = [self.prompts[i] for i in order]
        outputs = self.lm.generate(prompts, num_draft_tokens=num_draft_tokens, **self.settings)
        return [outputs[order.index(i)] for i in range(len(order))]

    def mixed(self, counts: Sequence[int], order: Sequence[int]) -> list[GenerationOutput]:
        """Together, each with its own number of draft tokens; who is done leaves at once."""
        batch = self.lm.open_batch(**self.settings)
        rows = {batch.add(self.prompts[i], num_draft_tokens=counts[i]): i for i in order}
        outputs = {}
        while batch.unfinished:
            for record in batch.step():
                if record.finish_reason is not None:
                    outputs[rows[record.row]] = batch.remove(record.row)
        return [outputs[i] for i in range(len(order))]

    def alone(self, num_draft_tokens: int) -> Iterator[GenerationOutput]:
        for prompt in self.prompts:
            yield self.lm.generate(prompt, num_draft_tokens=num_draft_tokens, **self.settings)


def check_bits(outputs: Iterator[GenerationOutput], expected: list[GenerationOutput]) -> None:
    for out, plain in zip(outputs, expected, strict=True):
        assert out.token_ids == plain.token_ids
        assert out.logprobs == plain.logprobs
        assert out.cache.token_ids == plain.cache.token_ids
        for name in ("keys", "values"):
            got, want = (getattr(o.cache, name).view(torch.uint8) for o in (out, plain))
            assert torch.equal(got, want)


def random_prompts(
    count: int, shortest: int, longest: int, vocab: int, seed: int
) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]


def settings_of(sampling: str, count: int) -> dict[str, Any]:
    return {
        "sampling": SAMPLINGS[sampling],
        "max_new_tokens": count,
        "logprobs": 3,
        "return_cache": True,
        "ignore_eos": True,
    }


def shuffled(seed: int) -> list[int]:
    return torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(seed)).tolist()


# From far below a block of 128 attended slots to over the end of the fourth, and over a chunk.
LENGTHS = (1, 100, 121, 126, 250, 383, 507, 520)
AROUND_BLOCKS = [random_prompts(1, n, n, VOCAB_SIZE, n)[0] for n in LENGTHS]


@pytest.mark.parametrize(
    ("plan", "dtype", "sampling"),
    [
        ("exit", "float32", "greedy"),
        ("skipping", "bfloat16", "greedy"),
        ("without-layer-0", "bfloat16", "sampled"),
    ],
)
def test_bits_around_the_blocks_of_attention(wrap: Callable, plan, dtype, sampling):
    """Ragged, permuted, alone; a part of the numbers of draft tokens each."""
    trial = Trial(wrap(plan, "llama", dtype), AROUND_BLOCKS, settings_of(sampling, 10))
    expected = list(trial.alone(0))
    check_bits(trial.alone(5), expected)
    check_bits(trial.together(0, shuffled(0)), expected)
    drafted = accepted = 0
    for num_draft_tokens in (1, 3, 8):
        outputs = trial.together(num_draft_tokens, shuffled(num_draft_tokens))
        check_bits(outputs, expected)
        drafted += sum(out.stats.num_draft_tokens for out in outputs)
        accepted += sum(out.stats.num_accepted_tokens for out in outputs)
    assert 0 < accepted < drafted  # bits of both kinds were looked at
    # Where the row at 507 slots comes to the end of its block, a neighbour has more tokens.
    for order in ([6, 1, 0, 2, 3, 4, 5, 7], shuffled(1)):
        check_bits(trial.mixed([0, 3, 1, 16, 0, 5, 1, 2], order), expected)


@pytest.mark.slow
@pytest.mark.parametrize("group", range(25))
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_200_prompts(wrap: Callable, dtype, group):
    """Eight prompts at a time; every number of draft tokens, in the order given and in another."""
    plan, sampling = list(PLANS)[group % 3], list(SAMPLINGS)[group % 2]
    prompts = random_prompts(NUM_ROWS, 100, 588, VOCAB_SIZE, group)
    trial = Trial(wrap(plan, "llama", dtype), prompts, settings_of(sampling, 12))
    expected = list(trial.alone(0))
    for num_draft_tokens in range(9):
        check_bits(trial.together(num_draft_tokens, list(range(NUM_ROWS))), expected)
        check_bits(trial.together(num_draft_tokens, shuffled(group)), expected)
        if num_draft_tokens:
            check_bits(trial.alone(num_draft_tokens), expected)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_the_built_in_checkpoint(dtype, sampling):
    lm = SelfSpeculativeLM.from_pretrained(dtype=dtype, device="cpu")
    for group in range(2):
        prompts = random_prompts(NUM_ROWS, 100, 600, lm.stack.vocab_size, group)
        trial = Trial(lm, prompts, settings_of(sampling, 12))
        expected = list(trial.alone(0))
        check_bits(trial.alone(5 - group), expected)
        for num_draft_tokens in range(9):
            order = shuffled(9 * group + num_draft_tokens)
            check_bits(trial.together(num_draft_tokens, order), expected)


def test_exactness_can_be_switched_off(toy):
    """Passes are as wide as what is in them; float32 text is the same but for ties."""
    model = toy("llama", "float32")
    exact, free = (
        SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4, exact=exact)
        for exact in (True, False)
    )
    assert "exact=False" in free.exactness
    assert not free.stack.exactness.holds
    assert [len(lm.stack.embed([1, 2, 3])) for lm in (exact, free)] == [8, 3]
    prompts = [list(range(2, 2 + n)) for n in (3, 40, 9)]
    outputs = [lm.generate(prompts, max_new_tokens=20) for lm in (exact, free)]
    assert [o.token_ids for o in outputs[1]] == [o.token_ids for o in outputs[0]]
    assert outputs[1][0].stats.num_draft_tokens > 0


def test_a_size_is_proven_by_few_passes_of_proven_sizes_alone(toy, monkeypatch):
    stack = SelfSpeculativeLM(toy("llama", "float32"), None, PLANS["exit"]).stack
    asked = []

    def agree(stack, size, reference, product_rows):
        asked.append((size, reference))
        return size != 48

    monkeypatch.setattr("layerskip.pass_sizes.rows_agree", agree)
    assert [stack.pass_sizes.largest(n) for n in (16, 32, 48, 64)] == [16, 32, 40, 64]
    # Not 32 for 40 and 48: of halves of 20 and 24 nobody has proven a pass of 24.
    first = {16: 8, 32: 16, 48: 16, 40: 16, 64: 32}
    assert dict(asked) == first


def test_sizes_are_proven_while_other_threads_prove_theirs(toy, monkeypatch):
    stack = SelfSpeculativeLM(toy("llama", "float32"), None, PLANS["exit"]).stack
    sizes = stack.pass_sizes

    class Cores(int):
        """Of this thread; while they are compared, a thread with other cores proves a size."""

        def __eq__(self, other):
            sizes._proven[99, len(sizes._proven)] = True
            return int(self) == other

        def __ne__(self, other):
            return not self == other

        __hash__ = int.__hash__

    cores = Cores(torch.get_num_threads())
    monkeypatch.setattr("layerskip.pass_sizes.torch.get_num_threads", lambda: cores)
    monkeypatch.setattr("layerskip.pass_sizes.rows_agree", lambda *asked: asked[-1] <= 16)
    assert [sizes.largest(n) for n in (16, 48)] == [16, 48]


def test_products_are_divided_where_larger_ones_change_bits(toy, monkeypatch):
    stack = SelfSpeculativeLM(
        toy("llama", "float32"), None, PLANS["exit"], num_draft_tokens=4
    ).stack
    asked = []

    def agree(stack, size, reference, product_rows):
        asked.append((size, product_rows))
        return product_rows <= 16

    monkeypatch.setattr("layerskip.pass_sizes.rows_agree", agree)
    assert stack.pass_sizes.largest(48) == 48
    assert asked == [(48, 64), (48, 32), (48, 16)]
    assert stack.pass_sizes.product_rows == 16
    widths = []
    linear = torch.nn.functional.linear

    def spy(x, *rest):
        widths.append(len(x))
        return linear(x, *rest)

    monkeypatch.setattr("layerskip.dense.F.linear", spy)
    cache = stack.new_cache(num_rows=8, num_slots=64)
    with torch.inference_mode():
        hidden = stack.embed(list(range(48)))
        stack.run_layers(hidden, range(2), cache, [Segment(i, 3, 6) for i in range(8)])
    assert set(widths) == {16}


def test_passes_that_no_division_changes_are_proven_once(toy, monkeypatch):
    """Where larger products change bits, the sizes before them took theirs whole, and still do."""
    stack = SelfSpeculativeLM(toy("llama", "float32"), None, PLANS["exit"]).stack
    asked = []

    def agree(stack, size, reference, product_rows):
        asked.append((size, product_rows))
        return size <= 32 or product_rows <= 32

    monkeypatch.setattr("layerskip.pass_sizes.rows_agree", agree)
    monkeypatch.setattr("layerskip.pass_sizes.attention_agrees", lambda _: asked.append("slots"))
    stack.pass_sizes.prove_ahead(60.0)
    smaller, larger = (16, 24, 32), (48, 56, 64)
    whole, divided = [(size, 64) for size in (*smaller, 40)], [(size, 32) for size in (40, *larger)]
    assert asked == [*whole, *divided]
    stack.pass_sizes.prove_ahead(60.0)
    assert asked == [*whole, *divided]


def test_a_size_that_another_thread_drops_is_proven_again(toy):
    class Dropped(dict):
        """The other thread has dropped all that was met when this one looks."""

        def __contains__(self, key):
            return True

    stack = SelfSpeculativeLM(toy("llama", "float32"), None, PLANS["exit"]).stack
    sizes = stack.pass_sizes
    with torch.inference_mode():
        assert sizes.largest(16) == 16
        sizes._proven = Dropped({k: v for k, v in sizes._proven.items() if k[1] < 16})
        assert sizes.largest(16) == 16


def test_passes_that_a_division_changes_are_proven_again(toy, monkeypatch):
    """Of 64 tokens by whole products, and then by halves, which 40 need."""
    stack = SelfSpeculativeLM(toy("llama", "float32"), None, PLANS["exit"]).stack
    asked = []

    def agree(stack, size, reference, product_rows):
        asked.append((size, product_rows))
        return size != 40 or product_rows <= 32

    monkeypatch.setattr("layerskip.pass_sizes.rows_agree", agree)
    assert [stack.pass_sizes.largest(n) for n in (32, 64, 40)] == [32, 64, 40]
    first = [(32, 64), (64, 64), (40, 64), (40, 32)]
    assert asked == first
    assert [stack.pass_sizes.largest(n) for n in (32, 64, 40)] == [32, 64, 40]
    assert asked == [*first, (64, 32)]


@pytest.mark.parametrize(("dtype", "sampling"), [("float32", "greedy"), ("bfloat16", "sampled")])
def test_bits_where_products_are_emulated(toy, monkeypatch, dtype, sampling):
    """Where several rows cost so many passes, products take tokens one by one, no spare row among
    them, on a processor of any kind."""
    monkeypatch.setattr("layerskip.exactness.emulates", lambda *_: True)
    lm = SelfSpeculativeLM(toy("llama", dtype), None, PLANS["skipping"], num_draft_tokens=4)
    assert "products take them one by one" in lm.exactness
    assert (lm.stack.free_rows, cost_key(lm.stack, None)["row_quantum"]) == (1, 1)
    multiplied = []
    linear = torch.nn.functional.linear

    def spy(x, weight, bias=None):
        multiplied.append(len(x))
        return linear(x, weight, bias)

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr("layerskip.dense.F.linear", spy)
        cache = lm.stack.new_cache(num_rows=2, num_slots=64)
        hidden = lm.stack.embed([1, 2, 3])
        hidden = lm.stack.run_layers(hidden, [0], cache, [Segment(0, 3, 2), Segment(1, 5, 1)])
    assert len(lm.stack.logits(hidden)) == 3
    assert multiplied == [1] * 3 * PRODUCTS_OF_A_LAYER
    trial = Trial(lm, AROUND_BLOCKS, settings_of(sampling, 10))
    expected = list(trial.alone(0))
    check_bits(trial.alone(5), expected)
    for num_draft_tokens in (0, 3):
        check_bits(trial.together(num_draft_tokens, shuffled(num_draft_tokens)), expected)


def test_bits_of_emulated_products_within_modules(monkeypatch):
    """Layers that are not ours to divide: tokens run one by one, in passes without spare rows."""
    monkeypatch.setattr("layerskip.exactness.emulates", lambda *_: True)
    plan = DraftPlan.exiting(num_layers=NUM_LAYERS, exit_layer=2)
    lm = SelfSpeculativeLM(make_toy("gemma2", "bfloat16"), None, plan, num_draft_tokens=3)
    assert lm.exactness.startswith("tokens run one by one: this processor has no bfloat16")
    passes = []
    run_pass = lm.stack.run_pass

    def spy(hidden, *rest):
        passes.append(len(hidden))
        return run_pass(hidden, *rest)

    monkeypatch.setattr(lm.stack, "run_pass", spy)
    trial = Trial(lm, [[3, 5, 7], list(range(2, 30)), [9]], settings_of("sampled", 12))
    expected = list(trial.alone(0))
    check_bits(trial.alone(3), expected)
    check_bits(trial.together(3, [2, 0, 1]), expected)
    assert set(passes) == {1}


@pytest.mark.parametrize(
    ("family", "shape", "dtype", "sampling"),
    [
        ("llama", "even", "bfloat16", "greedy"),
        ("qwen2", "odd", "bfloat16", "sampled"),
        ("qwen3", "even", "float32", "sampled"),
        ("mistral", "odd", "float32", "greedy"),
    ],
)
def test_bits_of_a_model_that_we_loaded(family, shape, dtype, sampling):
    """Its weights are packed and, where the processor has products for it, copied in blocks."""
    model = make_model(family, dtype, shape)
    pack_model(model)
    lm = SelfSpeculativeLM(model, None, PLANS["skipping"], num_draft_tokens=4)
    assert "weights packed" in lm.stack.backend
    trial = Trial(lm, AROUND_BLOCKS, settings_of(sampling, 10))
    expected = list(trial.alone(0))
    check_bits(trial.alone(5), expected)
    for num_draft_tokens in (0, 3):
        check_bits(trial.together(num_draft_tokens, shuffled(num_draft_tokens)), expected)


def loaded(
    monkeypatch, multiplied: Callable, plan: str = "skipping", processor: str = "AVX2"
) -> SelfSpeculativeLM:
    """A float32 model that we loaded, with products of its copied weights of the test's own."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: processor)
    monkeypatch.setattr("layerskip.dense.multiplied", multiplied)
    model = make_model("llama", "float32")
    pack_model(model)
    lm = SelfSpeculativeLM(model, None, PLANS[plan], num_draft_tokens=4)
    assert "copied in blocks" in lm.stack.backend
    return lm


def one_by_one(x: torch.Tensor, *weights: Any) -> torch.Tensor:
    """Products whose rows keep their bits among any number that a decode pass may have; a chunk of
    a prompt is as long whoever decodes it."""
    if len(x) > MAX_PASS_ROWS:
        return multiplied(x, *weights)
    return torch.cat([multiplied(row, *weights) for row in x.split(1)])


@pytest.mark.parametrize(
    ("sampling", "processor", "fewest", "larger"),
    [("greedy", "AVX2", 1, 16), ("sampled", "AVX512", 4, 12)],
)
def test_float32_passes_have_no_spare_rows_where_bits_allow_it(
    monkeypatch, sampling, processor, fewest, larger
):
    lm = loaded(monkeypatch, one_by_one, processor=processor)
    assert f"in passes of {fewest} to 8 rows" in lm.exactness
    assert (lm.stack.free_rows, cost_key(lm.stack, None)["row_quantum"]) == (fewest, fewest)
    widths = []

    def spy(x, *weights):
        widths.append(len(x))
        return one_by_one(x, *weights)

    with monkeypatch.context() as patch, torch.inference_mode():
        assert lm.stack.pass_sizes.largest(9) == larger  # what it is proven by is not counted
        patch.setattr("layerskip.dense.multiplied", spy)
        cache = lm.stack.new_cache(num_rows=2, num_slots=64)
        for count in (1, 3, 5, 8, 9):  # 3 and 5 positions fill no tile of attention
            hidden = lm.stack.embed(list(range(count)))
            hidden = lm.stack.run_layers(hidden, [0], cache, [Segment(0, 3, count)])
            rows = max(count, fewest) if count <= 8 else larger
            assert len(lm.stack.logits(hidden)) == len(hidden) == rows
    assert set(widths) == {max(count, fewest) for count in (1, 3, 5, 8)} | {larger}
    trial = Trial(lm, AROUND_BLOCKS, settings_of(sampling, 10))
    expected = list(trial.alone(0))
    check_bits(trial.alone(5), expected)
    for num_draft_tokens in (0, 1, 3):
        check_bits(trial.together(num_draft_tokens, shuffled(num_draft_tokens)), expected)
    check_bits(iter(trial.mixed((0, 1, 2, 3, 4, 5, 6, 8), shuffled(4))), expected)


@pytest.mark.parametrize(
    ("family", "shape", "sampling"),
    [("llama", "even", "sampled"), ("qwen2", "odd", "greedy")],
)
def test_bits_of_float32_weights_that_are_multiplied_where_they_lie(
    monkeypatch, family, shape, sampling
):
    monkeypatch.setattr(
        "layerskip.dense.read_in_place", lambda _: works(torch.float32, in_place=True)
    )
    model = make_model(family, "float32", shape)
    lm = SelfSpeculativeLM(model, None, PLANS["skipping"], num_draft_tokens=4)
    if works(torch.float32, in_place=True):
        assert "multiplied by oneDNN" in lm.stack.backend
        # A width that is no multiple of a vector leaves a tail at any number of rows but eights.
        assert ("in passes of 1 to 8 rows" in lm.exactness) == (shape == "even")
    trial = Trial(lm, AROUND_BLOCKS, settings_of(sampling, 10))
    expected = list(trial.alone(0))
    check_bits(trial.alone(5), expected)
    for num_draft_tokens in (0, 1, 3):
        check_bits(trial.together(num_draft_tokens, shuffled(num_draft_tokens)), expected)
    check_bits(iter(trial.mixed((0, 1, 2, 3, 4, 5, 6, 8), shuffled(4))), expected)


@pytest.mark.parametrize("wide", [True, False])
def test_bits_of_bfloat16_weights_of_a_users_own(wide):
    """torch sums two rows by few outputs in another order than eight on some processors, which
    shows in one output in thousands."""
    model = make_model("llama", "bfloat16", head_dim=64 if wide else 16)
    lm = SelfSpeculativeLM(model, None, PLANS["skipping"], num_draft_tokens=4)
    trial = Trial(lm, AROUND_BLOCKS, settings_of("greedy", 10))
    expected = list(trial.alone(0))
    check_bits(trial.alone(5), expected)
    for num_draft_tokens in (0, 1, 3):
        check_bits(trial.together(num_draft_tokens, shuffled(num_draft_tokens)), expected)


def summed(x: torch.Tensor, weight: torch.Tensor, *, backwards: bool = False) -> torch.Tensor:
    """A product, its sums taken in float32 in an order of the test's own."""
    terms = (x[:, None].float() * weight.float()).unbind(-1)
    return reduce(torch.add, terms[::-1] if backwards else terms).to(x.dtype)


@pytest.mark.parametrize("odd", [None, 2, 5, 7, 12])
def test_products_that_are_summed_in_another_order_are_seen(odd):
    """Noise does not show it in 16 bits."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(24, 64, generator=generator).bfloat16()

    def project(x: torch.Tensor, at_once: int = 64) -> torch.Tensor:
        bias = torch.full((40,), 3.0, dtype=x.dtype)
        outputs = summed(x, weight, backwards=len(x) == odd)
        return torch.cat([torch.zeros(len(x), 16, dtype=x.dtype), outputs], dim=-1) + bias

    noise = torch.randn(13, 64, generator=generator).bfloat16()
    assert all(torch.equal(project(noise[:n]), project(noise)[:n]) for n in range(2, 13))
    stack = SimpleNamespace(
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        exactness=Exactness(True, 4, 128, "", fewest=2),
        products=[(project, weight, 16)],
    )
    assert products_agree(stack, range(2, 8)) == (odd is None or odd > 8)
    assert products_agree(stack, [12]) == (odd != 12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [64, 65])
def test_inputs_that_leave_nothing_but_roundings(dtype, width):
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(30, width, generator=generator).to(dtype)
    x, outputs = revealing(weight, 8, generator)
    assert x.dtype == dtype
    assert outputs[0] == outputs[-1] == 29
    terms = x.double() * weight.double()[outputs[:, 0]]
    assert torch.equal(terms.sort(dim=-1, descending=True).values + terms.sort().values, 0 * terms)
    one, other = (summed(x, weight, backwards=b).gather(1, outputs) for b in (False, True))
    assert (one != other).float().mean() > 0.8


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.one_in(2)
def test_passes_are_padded_where_products_of_some_rows_have_other_bits(monkeypatch, rows):
    def otherwise(x, *weights):
        out = one_by_one(x, *weights)
        return torch.nextafter(out, out + 1) if len(x) == rows else out

    lm = loaded(monkeypatch, otherwise)
    fewest, held = (2, 3) if rows == 1 else (8, 8)
    how = "in passes of 2 to 8 rows" if rows == 1 else "padded to 8 rows"
    assert how in lm.exactness
    assert (lm.stack.free_rows, len(lm.stack.embed([1, 2, 3]))) == (fewest, held)
    assert len(lm.stack.embed([1])) == fewest
    trial = Trial(lm, AROUND_BLOCKS, settings_of("greedy", 6))
    check_bits(trial.together(3, shuffled(3)), list(trial.alone(0)))


@pytest.mark.parametrize("odd", [1, 3])
def test_numbers_of_rows_that_no_pass_has_do_not_matter(monkeypatch, odd):
    """A row alone by 2,048 inputs has a kernel of its own, the head's too."""

    def otherwise(x, *weights):
        out = one_by_one(x, *weights)
        return torch.nextafter(out, out + 1) if len(x) == odd else out

    how = "in passes of 2 to 8 rows" if odd == 1 else "padded to 8 rows"
    assert how in loaded(monkeypatch, otherwise).exactness
    lm = loaded(monkeypatch, otherwise, processor="AVX512")
    assert "in passes of 4 to 8 rows" in lm.exactness


def test_passes_are_padded_where_some_of_an_activation_is_a_tail(monkeypatch):
    """Its roundings are rare: no draw of the probe has to meet one."""
    stack = loaded(monkeypatch, one_by_one).stack
    with torch.inference_mode():
        assert small_agree(stack)
        monkeypatch.setattr(stack, "widths", {*stack.widths, 33})  # a tail at any number of rows
        assert all("some" in tails(stack, rows) for rows in range(1, 9))
        assert not small_agree(stack)


@pytest.mark.parametrize(
    ("processor", "usual"), [("AVX2", [1, 7, 8, 16]), ("AVX512", [4, 7, 8, 12])]
)
def test_small_passes_are_proven_again_with_other_threads(monkeypatch, processor, usual):
    stack = loaded(monkeypatch, one_by_one, processor=processor).stack
    sizes = stack.pass_sizes
    known = torch.get_num_threads()
    assert [sizes.padded(n) for n in (1, 7, 8, 9)] == usual
    proofs = sizes.num_proofs
    monkeypatch.setattr("layerskip.pass_sizes.small_agree", lambda _: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    assert [sizes.padded(n) for n in (1, 7, 8, 9)] == [8, 8, 8, 16]
    with torch.inference_mode():
        assert sizes.largest(3) == 8  # eight rows are proven by themselves
    assert sizes.num_proofs == proofs + 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: known)
    assert [sizes.padded(n) for n in (1, 7, 8, 9)] == usual
    assert sizes.num_proofs == proofs + 2


def test_other_threads_do_not_take_small_passes_for_proven_while_they_are_tried(monkeypatch):
    stack = loaded(monkeypatch, one_by_one).stack
    sizes = stack.pass_sizes
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    met = []

    def agree(_) -> bool:
        met.append(sizes.padded(3))
        if len(met) == 1:  # elsewhere, the same proof goes on
            with ThreadPoolExecutor(1) as pool:
                met.append(pool.submit(sizes.padded, 3).result())
        return False

    monkeypatch.setattr("layerskip.pass_sizes.small_agree", agree)
    assert sizes.padded(3) == 8
    assert met == [3, 3, 8]


@pytest.mark.parametrize(("processor", "small"), [("AVX2", 3), ("AVX512", 4)])
def test_passes_are_padded_once_the_copies_are_gone(monkeypatch, processor, small):
    stack = loaded(monkeypatch, one_by_one, processor=processor).stack
    assert stack.pass_sizes.padded(3) == small
    stack._forward._copies = None
    stack._forward._settle()
    assert [stack.pass_sizes.padded(n) for n in (3, 9)] == [8, 16]


def refusing(monkeypatch, refused: set[int], dtype: str = "float32") -> DecoderStack:
    """A model some of whose sizes of passes have other bits, if one believes its proofs."""

    def agree(_, size: int, *rest: object) -> bool:
        return size not in refused

    for name in ("layerskip.pass_sizes.rows_agree", "layerskip.exactness.rows_agree"):
        monkeypatch.setattr(name, agree)
    monkeypatch.setattr("layerskip.dense.fewest_rows", lambda *_, **kinds: 0)
    return DecoderStack(make_model("llama", dtype))


@pytest.mark.parametrize(
    ("refused", "tokens", "pieces"),
    [
        (set(), 100, [64, 36]),
        ({48}, 112, [64, 40, 8]),
        ({40}, 100, [64, 32, 4]),
        ({16, 24, 32, 40, 48, 56, 64}, 20, [8, 8, 4]),
    ],
)
def test_every_part_of_a_large_round_is_of_a_proven_size(monkeypatch, refused, tokens, pieces):
    stack = refusing(monkeypatch, refused)
    first = tokens // 3
    parts = stack.pass_sizes.split([Segment(0, 5, first), Segment(1, 3, tokens - first)])
    assert [sum(s.count for s in part) for part in parts] == pieces
    got = [(s.row, s.start + i) for part in parts for s in part for i in range(s.count)]
    assert got == [(0, 5 + i) for i in range(first)] + [(1, 3 + i) for i in range(tokens - first)]
    widths, head = [], stack.head
    monkeypatch.setattr(stack, "head", lambda x, *rest, **kw: widths.append(len(x)) or head(x))
    with torch.inference_mode():
        logits = stack.logits(torch.zeros(tokens, stack.twin.config.hidden_size))
    assert len(logits) == tokens
    assert widths == [-(-n // 8) * 8 for n in pieces]


@pytest.mark.parametrize(
    ("odd", "how", "at_once"),
    [(0, "in passes of 2 to 8 rows", 64), (2, "padded to 8 rows", 64), (16, "2 to 8 rows", 8)],
)
def test_sizes_whose_products_show_other_roundings_are_refused(monkeypatch, odd, how, at_once):
    """No text shows them here: what is multiplied otherwise is what the proof alone asks for. Of
    larger passes products are divided."""

    def linear(x, weight, bias=None):
        rows = [row.float() @ weight.float().t() for row in x.split(1)]
        out = torch.cat(rows) * (1.5 if len(x) == odd and x.abs().max() > 1e9 else 1.0)
        return out.to(x.dtype)

    monkeypatch.setattr("layerskip.dense.F.linear", linear)
    monkeypatch.setattr("layerskip.exactness.emulates", lambda *_: False)
    monkeypatch.setattr("layerskip.dense.fewest_rows", lambda *_, **kinds: 2)
    stack = DecoderStack(make_model("llama", "bfloat16"))
    assert how in stack.exactness.reason
    with torch.inference_mode():
        assert stack.pass_sizes.largest(16) == 16
    assert stack.pass_sizes.product_rows == at_once


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_16_bits_agree_with_themselves(dtype):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(24, 64, generator=generator).to(dtype)
    stack = SimpleNamespace(
        dtype=dtype,
        device=torch.device("cpu"),
        exactness=Exactness(True, 8, 128, ""),
        products=[(lambda x, at_once: summed(x, weight), weight, 0)],
    )
    assert products_agree(stack, [16])
