"""A whole decode by the operations: the kernels' text with speculation is their text without."""

import copy

import pytest
import torch
from stack import NUM_LAYERS, VOCAB_SIZE, make_llama, make_stack

from layerskip import DraftPlan, SamplingParams
from layerskip.cache import Segment
from layerskip.decode import Decoder
from layerskip.drafting import EarlyExitDrafter
from layerskip.packed import PackedStack
from layerskip.row import RowSpec
from layerskip.sampling import Sampler

NUM_TOKENS = 36
FEWER = 24
PROMPT = [5, 400, 17, 3, 77, 250, *range(100, 130)]  # the text ends in a second block of slots
PLANS = {
    "exit": DraftPlan.exiting(num_layers=NUM_LAYERS, exit_layer=2),
    "skipping": DraftPlan(NUM_LAYERS, (0, 1, 3)),
}
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)


def decode(stack, prompts, plan, params=GREEDY, *, num_draft_tokens=4, limit=NUM_TOKENS):
    """Decoder after its last round, and its rows."""
    drafter = EarlyExitDrafter(stack, plan) if plan is not None else None
    decoder = Decoder(stack, drafter, plan, num_rows=len(prompts), num_slots=80)
    rows = [
        decoder.join(
            RowSpec(tuple(prompt), Sampler(params, 11 + i, VOCAB_SIZE), limit, num_draft_tokens)
        )
        for i, prompt in enumerate(prompts)
    ]
    while any(row.finish_reason is None for row in rows):
        decoder.step()
    return decoder, rows


def committed(decoder, row):
    """Keys and values of a row's committed slots."""
    length = row.length
    return decoder.cache.keys[:, row.slot_row, :length], decoder.cache.values[
        :, row.slot_row, :length
    ]


def same_bits(one, other):
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)


@pytest.fixture(scope="module")
def plain():
    """``plain(kernels, dtype, params)``: the text without speculation, made once."""
    texts = {}

    def text(kernels, dtype=torch.bfloat16, params=GREEDY):
        key = (kernels.device, dtype, params)
        limit = NUM_TOKENS if params.greedy else FEWER
        if key not in texts:
            decoder, (row,) = decode(
                make_stack(kernels, dtype), [PROMPT], None, params, limit=limit
            )
            texts[key] = row.token_ids, committed(decoder, row)
        return texts[key]

    return text


@pytest.mark.parametrize(("plan", "limit"), [("exit", NUM_TOKENS), ("skipping", FEWER)])
def test_speculation_changes_no_bit(kernels, plain, plan, limit):
    tokens, cache = plain(kernels)
    assert len(set(tokens)) > 15  # the text does not loop from its start
    decoder, (row,) = decode(make_stack(kernels), [PROMPT], PLANS[plan], limit=limit)
    assert row.token_ids == tokens[:limit]
    assert same_bits(committed(decoder, row), [c[:, : row.length] for c in cache])
    accepted = {r.num_accepted_tokens for r in row.rounds[1:]}
    assert len(accepted) > 2  # drafts fail at different places


def test_speculation_changes_no_bit_of_sampled_text_in_fp16(kernels, plain):
    tokens, cache = plain(kernels, torch.float16, SAMPLED)
    stack = make_stack(kernels, torch.float16)
    decoder, (row,) = decode(stack, [PROMPT], PLANS["exit"], SAMPLED, limit=FEWER)
    assert row.token_ids == tokens
    assert same_bits(committed(decoder, row), cache)
    assert sum(r.num_accepted_tokens for r in row.rounds) > 0


def test_a_ragged_batch_changes_no_bit(kernels, plain):
    tokens, cache = plain(kernels)
    prompts = [[9, 8], PROMPT, list(range(100, 121))]
    decoder, rows = decode(make_stack(kernels), prompts, PLANS["exit"], limit=12)
    assert rows[1].token_ids == tokens[:12]
    keys_and_values = committed(decoder, rows[1])
    assert same_bits(keys_and_values, [c[:, : rows[1].length] for c in cache])


def test_the_kernels_compute_the_checkpoint(monkeypatch, backend):
    """Against transformers in float64: four layers' roundings in bfloat16."""
    monkeypatch.setattr(PackedStack, "prefill_chunk", 16)
    stack = make_stack(backend)
    cache = stack.new_cache(num_rows=2, num_slots=64)
    ids = list(range(40, 77))
    prefilled = stack.prefill(ids, cache, 0)
    for start in range(0, len(ids), 16):
        chunk = ids[start : start + 16]
        segment = Segment(1, start, len(chunk))
        hidden = stack.run_layers(stack.embed(chunk), range(NUM_LAYERS), cache, [segment])
    decoded = stack.logits(hidden)[-1]
    with torch.no_grad():
        want = copy.deepcopy(make_llama(torch.bfloat16)).cpu().double()(torch.tensor([ids]))
    want = want.logits[0, -1]
    for got in (prefilled.cpu().double(), decoded.cpu().double()):
        assert (got - want).norm() < 0.05 * want.norm()
        assert got.argmax() == want.argmax()


def one_round(stack, cache, plan, state, k):
    """Draft, verify, accept and advance, all by operations: what one CUDA graph would hold.

    Args:
        state: pending tokens, cache_seqlens and num_left, one entry per row; the last two change.
    """
    pending, lengths, left, eos_ids = state
    drafted, token = [], pending
    for step in range(k):
        hidden = stack.embed_ids(token)
        hidden = stack.run_rows(hidden, plan.layers, cache, _shifted(lengths, step), 1)
        token, _ = stack.choose(hidden)
        drafted.append(token)
    draft = torch.stack(drafted, dim=1)
    hidden = stack.embed_ids(torch.cat([pending[:, None], draft], dim=1).flatten())
    hidden = stack.run_rows(hidden, range(stack.num_layers), cache, lengths, k + 1)
    target = stack.choose(hidden)[0].view(len(pending), k + 1)
    return stack.ops.accept_tokens(draft, target, lengths, left, eos_ids)


def _shifted(lengths, step):
    """Where the next token goes; a row that takes no part stays one."""
    return torch.where(lengths < 0, lengths, lengths + step)


def test_rounds_wholly_by_operations_give_the_same_text(kernels, plain):
    """Three rows, one of which ends, one of which is shorter, and one that takes no part."""
    tokens, keys_and_values = plain(kernels)
    stack, plan, k = make_stack(kernels), PLANS["exit"], 3
    cache = stack.new_cache(num_rows=4, num_slots=80)
    first = int(stack.prefill(PROMPT, cache, 0).argmax())
    assert first == tokens[0]
    for row in (1, 2):
        assert int(stack.prefill(PROMPT, cache, row).argmax()) == first
    eos = next(t for i, t in enumerate(tokens) if i > 14 and t not in tokens[:i])
    ends = [20, 12, 5]
    state = (
        kernels.tensor([first, first, first, -1], torch.int64),
        kernels.tensor([len(PROMPT)] * 3 + [-1]),
        kernels.tensor([*(n - 1 for n in ends), 9]),
        kernels.tensor([eos], torch.int64),
    )
    texts = [[first], [first], [first], []]
    while state[2][:3].any():
        emitted, _, pending = one_round(stack, cache, plan, state, k)
        state = (pending, *state[1:])
        for text, new in zip(texts, emitted.tolist(), strict=True):
            text += [t for t in new if t >= 0]
    stop = tokens.index(eos) + 1
    assert texts == [tokens[: min(n, stop)] for n in ends] + [[]]
    lengths = state[1].tolist()
    assert lengths == [len(PROMPT) + len(t) - 1 for t in texts[:3]] + [-1]
    for row, length in enumerate(lengths[:3]):
        own = [c[:, row, :length] for c in (cache.keys, cache.values)]
        assert same_bits(own, [c[:, :length] for c in keys_and_values])
