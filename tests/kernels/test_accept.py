"""Acceptance on the device: by hand, against the definition, and block verification's law."""

import itertools

import pytest
import torch
from backends import Backend

from layerskip.ops import definitions
from layerskip.ops.reference import Philox
from layerskip.verification import acceptance_chances, count_accepted

EOS = 99
DEFINITION = Backend(definitions, "cpu")


def accept(backend, draft, target, lengths, left, eos=(EOS,)):
    """Everything ``accept_tokens`` returns and changes, as lists."""
    k = len(draft[0])
    state = backend.tensor(lengths), backend.tensor(left)
    tokens = [
        torch.tensor(ids, dtype=torch.int64).view(len(draft), n).to(backend.device)
        for ids, n in ((draft, k), (target, k + 1))
    ]
    outputs = backend.ops.accept_tokens(*tokens, *state, backend.tensor(eos, torch.int64))
    return [t.tolist() for t in (*outputs, *state)]


@pytest.mark.parametrize(
    ("draft", "target", "left", "emitted", "accepted", "left_after"),
    [
        pytest.param([1, 2, 3], [1, 2, 3, 4], 50, [1, 2, 3, 4], 3, 46, id="all, and a bonus"),
        pytest.param([1, 7, 3], [1, 2, 3, 4], 50, [1, 2], 1, 48, id="a recovered token"),
        pytest.param([7, 2, 3], [1, 2, 3, 4], 50, [1], 0, 49, id="none"),
        pytest.param([1, -1, -1], [1, 2, 3, 4], 50, [1, 2], 1, 48, id="one was drafted"),
        pytest.param([-1, 2, 3], [1, 2, 3, 4], 50, [1], 0, 49, id="nothing was drafted"),
        pytest.param([1, 2, 3], [1, EOS, 3, 4], 50, [1, EOS], 1, 0, id="ends as recovered"),
        pytest.param([1, EOS, 3], [1, EOS, 3, 4], 50, [1, EOS], 2, 0, id="ends as accepted"),
        pytest.param([1, 2, 3], [1, 2, 3, EOS], 50, [1, 2, 3, EOS], 3, 0, id="ends as bonus"),
        pytest.param([1, 7, 3], [1, 2, EOS, 4], 50, [1, 2], 1, 48, id="an end behind a mismatch"),
        pytest.param([1, 2, 3], [1, 2, 3, 4], 3, [1, 2, 3], 3, 0, id="the limit cuts the bonus"),
        pytest.param([1, 2, 3], [1, 2, 3, 4], 1, [1], 1, 0, id="the limit cuts the draft"),
        pytest.param([1, 2, EOS], [1, 2, EOS, 4], 2, [1, 2], 2, 0, id="the limit before the end"),
        pytest.param([1, 2, 3], [1, 2, 3, 4], 0, [], 0, 0, id="it had ended"),
    ],
)
def test_one_sequence(backend, draft, target, left, emitted, accepted, left_after):
    got = accept(backend, [draft], [target], [10], [left])
    padded = emitted + [-1] * (4 - len(emitted))
    pending = emitted[-1] if emitted else -1
    assert got == [[padded], [accepted], [pending], [10 + len(emitted)], [left_after]]


def test_sequences_without_part_without_draft_and_without_eos(backend):
    got = accept(backend, [[1], [1], [-1]], [[1, 2]] * 3, [-1, 0, 5], [9, 9, 9], eos=())
    assert got[0] == [[-1, -1], [1, 2], [1, -1]]
    assert got[1:] == [[0, 1, 0], [-1, 2, 1], [-1, 2, 6], [9, 7, 8]]
    assert accept(backend, [[]], [[4]], [7], [2])[0] == [[4]]


def test_many_sequences_are_each_their_own(backend):
    batch, k = 64, 31
    target = torch.randint(0, 30, (batch, k + 1))
    draft = target[:, :-1].clone()
    draft[torch.rand(batch, k) < 0.05] = 77
    lengths, left = torch.randint(-1, 50, (batch,)).int(), torch.randint(0, 60, (batch,)).int()
    eos = torch.tensor([3, 29])
    want_state = lengths.clone(), left.clone()
    want = definitions.accept_tokens(draft, target, *want_state, eos)
    state = [t.to(backend.device) for t in (lengths, left)]
    args = [t.to(backend.device) for t in (draft, target)]
    got = backend.ops.accept_tokens(*args, *state, eos.to(backend.device))
    for one, other in zip((*got, *state), (*want, *want_state), strict=True):
        assert torch.equal(one.cpu(), other)


def make_block(batch, k, vocab, sharpness=2.0):
    """Probabilities, a draft sampled from them, seeds and positions."""
    q = (sharpness * torch.randn(batch, k, vocab)).softmax(-1)
    p = (q.log() + 0.7 * torch.randn(batch, k, vocab)).softmax(-1)
    p = torch.cat([p, torch.randn(batch, 1, vocab).softmax(-1)], dim=1)
    draft = torch.multinomial(q.view(-1, vocab), 1).view(batch, k)
    seeds = torch.randint(0, 2**62, (batch,))
    return draft, q, p, seeds, torch.arange(batch) + 5


def accept_block(backend, block, eos=()):
    batch = block[0].shape[0]
    state = backend.tensor([4] * batch), backend.tensor([100] * batch)
    args = [t.to(backend.device) for t in block]
    outputs = backend.ops.accept_block(*args, *state, backend.tensor(eos, torch.int64))
    return [t.cpu() for t in (*outputs, *state)]


@pytest.mark.parametrize(("k", "vocab"), [(1, 7), (4, 65), (3, 2049)])
def test_block_verification_is_the_definition(kernels, k, vocab):
    block = make_block(24, k, vocab)
    block[0][3, k // 2 :] = -1  # drafted less
    block[0][5] = -1
    got, want = accept_block(kernels, block), accept_block(DEFINITION, block)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert len(want[1].unique()) > 1
    assert want[1][5] == 0


def test_a_block_without_a_draft_is_a_sample_of_the_target(backend):
    _, _, p, seeds, positions = make_block(4, 1, 40)
    none = torch.empty(4, 0, dtype=torch.int64), torch.empty(4, 0, 40)
    tokens, accepted, *_ = accept_block(backend, (*none, p[:, :1].contiguous(), seeds, positions))
    noise = definitions.gumbel_noise(seeds, positions, vocab_size=40)
    assert torch.equal(tokens[:, 0], (p[:, 0].double().log().float() + noise).argmax(-1))
    assert not accepted.any()


def test_a_block_s_sequences_are_each_their_own(kernels):
    block = make_block(9, 3, 70)
    together = accept_block(kernels, block)
    for b in range(9):
        alone = accept_block(kernels, [t[b : b + 1] for t in block])
        assert all(torch.equal(a[0], t[b]) for a, t in zip(alone, together, strict=True))


def test_a_draft_as_likely_as_the_target_thinks_always_stands(backend):
    draft, q, p, seeds, positions = make_block(8, 3, 33)
    p[:, :3] = q
    _, accepted, *_ = accept_block(backend, (draft, q, p, seeds, positions))
    assert accepted.tolist() == [3] * 8


def test_a_block_ends_where_its_sequence_does(backend):
    draft, q, p, seeds, positions = make_block(8, 3, 33)
    p[:, :3] = q
    tokens, accepted, pending, lengths, left = accept_block(
        backend, (draft, q, p, seeds, positions), eos=[int(draft[2, 1])]
    )
    end = draft[2].tolist().index(draft[2, 1]) + 1
    assert tokens[2, :end].tolist() == draft[2, :end].tolist()
    assert (tokens[2, end:] == -1).all()
    assert pending[2] == draft[2, 1]
    assert (accepted[2], lengths[2], left[2]) == (end, 4 + end, 0)


def test_a_target_that_is_no_number_lets_no_draft_stand(backend):
    """What is emitted is a token all the same: whoever reads it finds the logits that are none."""
    draft, q, p, seeds, positions = make_block(4, 2, 40)
    p[:] = torch.nan
    tokens, accepted, *_ = accept_block(backend, (draft, q, p, seeds, positions))
    assert accepted.tolist() == [0] * 4
    assert tokens.tolist() == [[0, -1, -1]] * 4


def test_what_of_a_target_is_no_number_is_not_emitted(backend):
    """And the kernel does what the definition does."""
    block = make_block(12, 3, 40)
    for b in range(12):
        block[2][b, b % 4, :: b + 1] = torch.nan
    found, defined = accept_block(backend, block), accept_block(DEFINITION, block)
    assert all(map(torch.equal, found, defined))


def test_block_verification_emits_the_target_s_distribution():
    """Pairs of tokens of many seeds, completed by plain sampling where a round emitted but one.

    Of the definition, of which the kernels have the bits.
    """
    trials = 2000
    q, p = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.3, 0.5])
    block = (
        torch.multinomial(q.repeat(trials, 1), 2, replacement=True),
        q.repeat(trials, 2, 1),
        p.repeat(trials, 3, 1),
        torch.arange(trials),
        torch.zeros(trials, dtype=torch.int64),
    )
    tokens, accepted, *_ = accept_block(DEFINITION, block)
    plain = torch.multinomial(p, trials, replacement=True)
    second = torch.where(tokens[:, 1] < 0, plain, tokens[:, 1])
    for one, other in itertools.product(range(3), repeat=2):
        share = ((tokens[:, 0] == one) & (second == other)).double().mean().item()
        expected = (p[one] * p[other]).item()
        assert abs(share - expected) < 4 * (expected * (1 - expected) / trials) ** 0.5
    # Independent tokens: the expectation over all drafts and uniforms, to four deviations.
    assert accepted.double().mean().item() == pytest.approx(expected_accepted(q, p), abs=0.08)


def test_block_verification_accepts_what_the_host_s_does():
    """Each sequence by its own: a token-level rule would accept others."""
    batch, k, vocab = 300, 3, 5
    q, p = (torch.rand(batch, k + i, vocab).pow(3) + 1e-3 for i in (0, 1))
    q, p = q / q.sum(-1, keepdim=True), p / p.sum(-1, keepdim=True)
    draft = torch.multinomial(q.view(-1, vocab), 1).view(batch, k)
    seeds, positions = torch.arange(batch), torch.arange(batch) % 7
    _, accepted, *_ = accept_block(DEFINITION, (draft, q, p, seeds, positions))
    expected: dict[str, list[int]] = {"token": [], "block": []}
    for i in range(batch):
        numbers = Philox(i).uniforms(int(positions[i]), k)
        for verification, counts in expected.items():
            args = p[i].double(), q[i].double(), draft[i].tolist()
            chances = acceptance_chances(verification, *args)
            counts.append(count_accepted(verification, chances, numbers))
    assert accepted.tolist() == expected["block"] != expected["token"]


def expected_accepted(q, p):
    """Mean accepted length of two drafted tokens, by the formulas, summed over all drafts."""
    total = 0.0
    for x, y in itertools.product(range(3), repeat=2):
        first = min(1.0, (p[x] / q[x]).item())
        second = min(1.0, first * (p[y] / q[y]).item())
        mass = (first * p - q).clamp(min=0).sum().item()
        bar = mass / (mass + 1 - first) if mass + 1 - first > 0 else 1.0
        total += (q[x] * q[y]).item() * (2 * second + (1 - second) * bar)
    return total
