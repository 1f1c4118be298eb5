"""lm_head_argmax and its noise: the CPU's choice, the CPU's bits."""

import pytest
import torch
from measure import exactly, mirrored

from layerskip import SamplingParams, sampling
from layerskip.ops import definitions, reference
from layerskip.ops.kernels import KernelOps
from layerskip.sampling import Sampler

SEEDS = [0, 1, 2**63 - 1]
BLOCK = 2**20


def test_noise_has_the_cpu_s_bits_for_every_uniform(backend):
    """All 2**24: so a token is the same on every device, at any temperature."""
    for first in range(0, 2**reference.UNIFORM_BITS, BLOCK):
        bits = torch.arange(first, first + BLOCK, dtype=torch.int32)
        want = torch.from_numpy(reference.gumbel_from_bits(bits.numpy()))
        got = backend.ops.gumbel_from_bits(bits.to(backend.device)).cpu()
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize("vocab_size", [1, 63, 257, 512])
def test_noise_of_a_position_is_the_reference_s(backend, vocab_size):
    positions = [0, 1, 131_071]
    seeds = backend.tensor(SEEDS, torch.int64)
    got = backend.ops.gumbel_noise(
        seeds, backend.tensor(positions, torch.int64), vocab_size=vocab_size
    )
    for row, seed, position in zip(got.cpu(), SEEDS, positions, strict=True):
        assert torch.equal(row, reference.gumbel_noise(seed, position, vocab_size))


def test_streams_of_noise_are_different(backend):
    seed, position = backend.tensor([3], torch.int64), backend.tensor([4], torch.int64)
    noise = [
        backend.ops.gumbel_noise(seed, position, vocab_size=300, stream=stream).cpu()
        for stream in range(3)
    ]
    for stream, one in enumerate(noise):
        bits = reference.Philox(3).bits(4, 300, stream=stream)
        assert torch.equal(one[0], torch.from_numpy(reference.gumbel_from_bits(bits)))
        assert all((one != other).sum() > 290 for other in noise[:stream])


def test_a_draft_s_noise_is_new_in_every_round(backend):
    """The draft's stream depends on where its round began; the CPU's bits again."""
    seeds, positions, starts = [3, 3, 2**63 - 1], [9, 9, 131_071], [7, 9, 131_060]
    got = backend.ops.gumbel_noise(
        *(backend.tensor(values, torch.int64) for values in (seeds, positions)),
        vocab_size=300,
        stream=reference.DRAFT_STREAM,
        starts=backend.tensor(starts, torch.int64),
    )
    for row, seed, position, start in zip(got.cpu(), seeds, positions, starts, strict=True):
        stream = reference.DRAFT_STREAM
        want = reference.gumbel_noise(seed, position, 300, stream=stream, start=start)
        assert torch.equal(row, want)
    assert (got[0] != got[1]).sum() > 290


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sampler_draws_by_the_kernel_what_it_draws_on_a_cpu(kernels, monkeypatch, seed):
    """A verify pass that shares a drafted token's noise, recovered tokens, drafts of both kinds."""
    logits = torch.randn(4, 257)

    def drawn(device):
        shared, own = (
            Sampler(SamplingParams(temperature=0.8, top_k=200), seed, 257, verification=way)
            for way in ("coupled", "token")
        )
        at = logits.to(device)
        tokens = [shared.draft(at[:1], 131_071, 131_060).token]
        tokens += shared.choose(shared.scores(at), 131_070)
        tokens += [own.draft(at[:1], p, start).token for p in (9, 10) for start in (0, 8, 9)]
        tokens += [own.draw(row.softmax(-1), 40) for row in at.double()]
        return tokens, torch.stack([shared.noise(p, at.device) for p in (0, 131_071)])

    want, noise = drawn("cpu")
    assert len(set(want)) > 5
    calls = []
    draw = KernelOps.gumbel_noise
    monkeypatch.setattr(
        KernelOps, "gumbel_noise", lambda *a, **k: calls.append(k["stream"]) or draw(*a, **k)
    )
    monkeypatch.delattr(reference.Philox, "gumbel")  # the host's way
    if kernels.launcher is not None:
        monkeypatch.setattr(sampling, "_noise_kernels", lambda _: kernels.ops)
    got, on_device = drawn(kernels.device)
    assert got == want
    assert on_device.device.type == kernels.device
    assert torch.equal(on_device.cpu(), noise)
    # Four positions verified, one drafted among them; one of recovered tokens; one more asked for.
    assert (calls.count(reference.TARGET_STREAM), calls.count(reference.DRAFT_STREAM)) == (6, 6)


def make_head(backend, dtype, m, vocab, k=65):
    """Hidden states of few values, so that logits are exact, and often equal."""
    x = torch.randint(-2, 3, (m, k)).to(dtype).to(backend.device)
    weight = torch.randint(-1, 2, (vocab, k)).to(dtype).to(backend.device)
    return x, weight


def check(got, want):
    tokens, top, log_sum_exp = (t.cpu() for t in got)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, want[0])
    torch.testing.assert_close(top, want[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(log_sum_exp, want[2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 255, 257])
@pytest.mark.parametrize("m", [1, 3, 8, 33, 66])
def test_greedy_choice_and_confidence(backend, dtype, m, vocab):
    x, weight = make_head(backend, dtype, m, vocab)
    got = backend.ops.lm_head_argmax(x, weight)
    check(got, exactly(definitions.lm_head_argmax, x, weight))


@pytest.mark.parametrize("vocab", [63, 257])
@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("drafted", [False, True])
def test_sampled_choice_is_the_cpu_s(backend, dtype, vocab, trimmed, drafted):
    m = 9
    x, weight = make_head(backend, dtype, m, vocab)
    options = {
        "temperature": torch.tensor([0.0, 0.8, 1.0, 2.0, 16.0, 0.8, 0.8, 0.0, 3.0]),
        "seeds": torch.tensor([0, 0, 1, 2**63 - 1, 2, 3, 3, 1, 5]),
        "positions": torch.tensor([0, 1, 2, 3, 131_071, 5, 6, 7, 8]),
    }
    if drafted:
        options["starts"] = (options["positions"] - 4).clamp(min=0)
    if trimmed:
        options["vocab_ids"] = torch.randperm(vocab)[: vocab // 2].int()
    want = exactly(definitions.lm_head_argmax, x, weight, **options)
    on_device = {name: t.to(backend.device) for name, t in options.items()}
    check(backend.ops.lm_head_argmax(x, weight, **on_device), want)
    assert len(want[0].unique()) > 3
    if drafted:
        shared = definitions.lm_head_argmax(x.cpu(), weight.cpu(), **options | {"starts": None})
        assert not torch.equal(shared[0], want[0])


def test_logits_that_overflow(backend):
    """A chunk of the vocabulary that is all -inf has no probability; NaN counts as the largest."""
    x = torch.full((2, 16), 300.0, dtype=torch.float16).to(backend.device)
    weight = torch.zeros(150, 16, dtype=torch.float16).to(backend.device)
    weight[64:128] = -20.0  # -96000: past the range of fp16
    weight[140] = 2.0**-10
    for options in ({}, {"vocab_ids": backend.tensor([*range(64, 150)])}):
        got = backend.ops.lm_head_argmax(x, weight, **options)
        kept = weight if not options else weight[64:]
        logits = (kept.double() @ x[0].double()).cpu()
        finite = logits.where(logits > -65504, float("-inf"))
        assert got[0].tolist() == [140, 140]
        want = finite.logsumexp(0)
        assert (got[2].cpu().double() - want).abs().max() < 1e-5
        assert (got[1].cpu().double() - (finite.max() - want).exp()).abs().max() < 1e-5
    weight[99, 0] = float("nan")
    assert backend.ops.lm_head_argmax(x, weight)[0].tolist() == [99, 99]


def test_ties_go_to_the_lowest_id(backend, dtype):
    x, weight = make_head(backend, dtype, 2, 300)
    weight[[17, 80, 211]] = 50 * x[0].sign()
    token, _, _ = backend.ops.lm_head_argmax(x, weight)
    assert token[0] == 17
    kept = backend.tensor([299, 211, 80, 3])
    token, _, _ = backend.ops.lm_head_argmax(x, weight, vocab_ids=kept)
    assert token[0] == 80


def test_the_norm_before_the_head(backend, dtype):
    x = backend.noise(5, 64, dtype=dtype)
    weight, norm = backend.noise(200, 64, dtype=dtype), backend.noise(64, dtype=dtype)
    fused = backend.ops.lm_head_argmax(x, weight, norm_weight=norm, eps=1e-5)
    apart = backend.ops.lm_head_argmax(backend.ops.rms_norm(x, norm, eps=1e-5), weight)
    assert all(torch.equal(a, b) for a, b in zip(fused, apart, strict=True))


def test_a_row_has_the_same_bits_among_any_rows(kernels, dtype):
    m, vocab, k = 70, 300, 48
    x = mirrored(kernels.noise(m, k, dtype=dtype))
    weight = mirrored(kernels.noise(vocab, k, dtype=dtype), -1)  # logits are their own roundings
    norm_weight = mirrored(kernels.noise(k, dtype=dtype))
    temperature = (torch.rand(m) * 1e-5).to(kernels.device)
    seeds, positions = (
        kernels.tensor([*range(m)], torch.int64),
        kernels.tensor([7] * m, torch.int64),
    )

    def choose(rows):
        return kernels.ops.lm_head_argmax(
            x[rows],
            weight,
            temperature=temperature[rows],
            seeds=seeds[rows],
            positions=positions[rows],
            norm_weight=norm_weight,
        )

    together = choose(slice(m))
    shuffled = torch.randperm(m)
    for rows in [
        slice(1),
        slice(3, 4),
        slice(69, 70),
        slice(5),
        slice(2, 18),
        slice(4, 37),
        slice(3, 67),
        shuffled,
    ]:
        for got, want in zip(choose(rows), together, strict=True):
            assert torch.equal(got, want[rows])
