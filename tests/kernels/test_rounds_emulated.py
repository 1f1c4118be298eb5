"""Rounds that the device runs by itself, by the kernels: the bits of rounds driven by the host."""

import pytest
import torch
from decoding import CountingDecoder
from stack import NUM_LAYERS, VOCAB_SIZE, make_stack

from layerskip import DraftPlan, SamplingParams
from layerskip.decode import Decoder
from layerskip.device_round import CERTAIN
from layerskip.drafting import EarlyExitDrafter
from layerskip.graphs import PATIENCE, GraphRecorder, RepeatingRecorder
from layerskip.packed import Noise
from layerskip.recorded_passes import RecordedPasses
from layerskip.row import RowSpec
from layerskip.sampling import Sampler
from layerskip.workbench import Workbench

PLAN = DraftPlan.exiting(num_layers=NUM_LAYERS, exit_layer=2)
PROMPTS = [[5, 400, 17, 3, 77, 250], [9, 8], list(range(100, 121)), [31]]
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8)


def make_bench(stack):
    device = stack.device

    def make_recorder():
        return GraphRecorder(device) if device.type == "cuda" else RepeatingRecorder(PATIENCE)

    return Workbench(stack, PLAN, make_recorder)


def row_of(i, params, limit, k, eos_ids=frozenset()):
    return RowSpec(tuple(PROMPTS[i]), Sampler(params, 11 + i, VOCAB_SIZE), limit, k, eos_ids)


def end_inside_a_block(stack, params):
    """A token that the first row has drafted right, in the middle of a block."""
    decoder = Decoder(stack, EarlyExitDrafter(stack, PLAN), PLAN, num_rows=1, num_slots=80)
    decoder.join(row_of(0, params, 14, 3))
    rounds = (decoder.step()[0] for _ in range(14))
    return next(r.token_ids[1] for r in rounds if r.num_accepted_tokens > 1)


def decode(stack, bench, params, eos_ids):
    """Four rows: they end in different rounds, one is left, and one comes in its place."""
    decoder = CountingDecoder(
        stack, EarlyExitDrafter(stack, PLAN), PLAN, bench=bench, num_rows=3, num_slots=80
    )

    def join(*row):
        return decoder.join(row_of(*row, eos_ids))

    rows = [join(0, params, 14, 3), join(1, params, 9, 3), join(2, params, 40, 2)]
    for _ in range(4):
        decoder.step()
    decoder.leave(rows[2].id)
    rows.append(join(3, params, 8, 1))
    while any(row.finish_reason is None for row in decoder.rows.values()):
        decoder.step()
    return decoder, rows


def kept(decoder, row):
    """Bits of a row's committed keys and values."""
    at = (slice(None), row.slot_row, slice(0, row.length))
    return [t[at].view(torch.int16) for t in (decoder.cache.keys, decoder.cache.values)]


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_no_bit_depends_on_who_drives(kernels, mode):
    dtype, params = (torch.bfloat16, GREEDY) if mode == "greedy" else (torch.float16, SAMPLED)
    stack = make_stack(kernels, dtype)
    eos_ids = frozenset({end_inside_a_block(stack, params)})
    slow, slow_rows = decode(stack, None, params, eos_ids)
    fast, fast_rows = decode(stack, make_bench(stack), params, eos_ids)
    assert fast.rounds.reason == ""
    assert len(fast.rounds.recordings) > 0
    assert fast.host_rounds == 0
    assert fast_rows[0].finish_reason == "stop"
    for one, other in zip(fast_rows, slow_rows, strict=True):
        assert one.token_ids == other.token_ids
        accepted = [[r.num_accepted_tokens for r in row.rounds] for row in (one, other)]
        assert accepted[0] == accepted[1]
        if one.id in fast.rows:
            pairs = zip(kept(fast, one), kept(slow, other), strict=True)
            assert all(torch.equal(mine, its) for mine, its in pairs)


@pytest.mark.parametrize("k", [0, 3])
def test_a_single_row_draws_its_own_noise(kernels, k):
    """Numbers that are the same for all its positions lie in memory as often as they are read."""
    stack = make_stack(kernels)

    def tokens(bench):
        drafter = EarlyExitDrafter(stack, PLAN)
        decoder = Decoder(stack, drafter, PLAN, bench=bench, num_rows=1, num_slots=40)
        row = decoder.join(RowSpec((5, 400, 17), Sampler(SAMPLED, 11, VOCAB_SIZE), 12, k))
        while row.finish_reason is None:
            decoder.step()
        assert bench is None or len(decoder.rounds.recordings) > 0
        return row.token_ids

    assert tokens(make_bench(stack)) == tokens(None)


def test_rounds_recorded_ahead_decode_as_the_host_does(kernels):
    """On a GPU each runs once, at rest, and is captured then."""
    stack, texts = make_stack(kernels), []
    for bench in (None, make_bench(stack)):
        if bench is not None:
            assert bench.record_ahead([0, 2], num_rows=1, num_slots=40) == 4
        drafter = EarlyExitDrafter(stack, PLAN)
        decoder = Decoder(stack, drafter, PLAN, bench=bench, num_rows=1, num_slots=40)
        row = decoder.join(RowSpec((5, 400, 17), Sampler(GREEDY, 11, VOCAB_SIZE), 12, 2))
        while row.finish_reason is None:
            decoder.step()
        assert bench is None or len(decoder.rounds.recordings) == 4
        texts.append(row.token_ids)
    assert texts[0] == texts[1]


def test_recorded_passes_are_timed(kernels):
    stack = make_stack(kernels)
    device = stack.device
    recorder = GraphRecorder(device) if device.type == "cuda" else RepeatingRecorder()
    passes = RecordedPasses(stack, PLAN, None, (8, 40), recorder)
    points = [(k, r, c) for k in ("verify", "draft") for r, c in ((1, 0), (8, 40))]
    points += [("head", 8, 0), ("verify sequences", 8, 0), ("draft sequences", 8, 0)]
    for point in points:
        if device.type == "cuda":
            passes.timing(point)  # its first replay
        assert 0.0 < passes.timing(point)[0] < 60.0
    assert passes.timing(("draft behind", 1, 0)) == passes.last_draft
    assert passes.timing(("sampling judging", 1, 0)) == (0.0, 0.0)


def test_a_row_whose_logits_are_no_numbers_is_left_as_it_was(kernels):
    """The kernels say so by the token's probability."""
    stack = make_stack(kernels)
    hidden = kernels.noise(3, 64, dtype=torch.bfloat16)
    hidden[1, 7] = float("nan")
    hidden[2, 7] = float("inf")
    _, sure = stack.choose(hidden)
    assert sure.isfinite().tolist() == [True, False, False]
    assert (sure <= CERTAIN).tolist() == [True, False, False]  # what a round asks


def test_the_host_chooses_as_the_kernels_do(kernels):
    """From the same logits and noise, at any temperature: the text must not depend on who does."""
    stack, rows = make_stack(kernels), 24
    hidden = kernels.noise(rows, 64, dtype=torch.bfloat16)
    logits = stack.logits(hidden)
    for temperature in (0.1, 0.7, 1.3):
        noise = Noise(
            kernels.tensor([temperature] * rows, torch.float32),
            kernels.tensor([5] * rows, torch.int64),
            kernels.tensor(range(40, 40 + rows), torch.int64),
        )
        tokens, _ = stack.choose(hidden, noise)
        sampler = Sampler(SamplingParams(temperature=temperature), 5, VOCAB_SIZE)
        assert sampler.pick(logits, 40) == tokens.tolist()
