"""Losses and schedules against their closed forms."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from layerskip.training.losses import consistency_loss, exit_loss
from layerskip.training.schedules import layer_dropout_rate, warmup_stable_decay

TOKENS, VOCAB = 5, 11


def some_logits() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    draft, target = (torch.randn(TOKENS, VOCAB, generator=generator) * 2 for _ in range(2))
    return draft, target, torch.randint(VOCAB, (TOKENS,), generator=generator)


def by_hand(draft: Tensor, target: Tensor, labels: Tensor, distil: float) -> float:
    """The loss written out token by token, in float64."""
    total = 0.0
    for q_logits, p_logits, label in zip(draft, target, labels, strict=True):
        q, p = q_logits.double().softmax(-1), p_logits.double().softmax(-1)
        divergence = sum((p * (p / q).log()).tolist())
        total += distil * divergence - (1 - distil) * math.log(q[label])
    return total / len(labels)


@pytest.mark.parametrize("distil", [0.0, 0.3, 0.7, 1.0])
def test_exit_loss_is_the_mean_of_its_two_terms(distil: float) -> None:
    draft, target, labels = some_logits()
    loss = exit_loss(draft, target, labels, distil=distil)
    assert loss.item() == pytest.approx(by_hand(draft, target, labels, distil), rel=1e-5)


def test_exit_loss_is_zero_where_the_exit_is_the_target() -> None:
    draft, _, labels = some_logits()
    assert exit_loss(draft, draft + 3.0, labels, distil=1.0).item() == pytest.approx(0.0, abs=1e-6)


def test_exit_loss_of_a_uniform_exit() -> None:
    _, _, labels = some_logits()
    flat = torch.zeros(TOKENS, VOCAB)
    assert exit_loss(flat, flat, labels, distil=0.0).item() == pytest.approx(math.log(VOCAB))


@pytest.mark.parametrize("distil", [0.0, 0.7, 1.0])
def test_gradient_pulls_the_exit_and_never_the_target(distil: float) -> None:
    draft, target, labels = some_logits()
    draft.requires_grad_()
    target.requires_grad_()
    exit_loss(draft, target, labels, distil=distil).backward()
    q, p = draft.detach().softmax(-1), target.detach().softmax(-1)
    one_hot = torch.nn.functional.one_hot(labels, VOCAB).float()
    expected = (distil * (q - p) + (1 - distil) * (q - one_hot)) / TOKENS
    assert target.grad is None
    torch.testing.assert_close(draft.grad, expected, rtol=1e-4, atol=1e-6)


def test_bfloat16_logits_are_summed_in_float32() -> None:
    draft, target, labels = some_logits()
    rounded = (draft.bfloat16(), target.bfloat16())
    loss = exit_loss(*rounded, labels)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(by_hand(*rounded, labels, 0.7), rel=1e-5)


def test_consistency_loss_is_the_other_divergence() -> None:
    draft, target, _ = some_logits()
    q, p = draft.double().softmax(-1), target.double().softmax(-1)
    expected = (q * (q / p).log()).sum(-1).mean().item()
    assert consistency_loss(target, draft).item() == pytest.approx(expected, rel=1e-5)
    assert consistency_loss(target, target).item() == pytest.approx(0.0, abs=1e-6)


def test_consistency_pulls_the_target_and_never_the_exit() -> None:
    draft, target, _ = some_logits()
    draft.requires_grad_()
    target.requires_grad_()
    consistency_loss(target, draft).backward()
    expected = (target.detach().softmax(-1) - draft.detach().softmax(-1)) / TOKENS
    assert draft.grad is None
    torch.testing.assert_close(target.grad, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("weight", [0.25, 1.0])
def test_beside_cross_entropy_the_optimum_is_the_mixture(weight: float) -> None:
    draft, data, _ = some_logits()
    data, q = data.softmax(-1), draft.softmax(-1)
    mixture = ((data + weight * q) / (1 + weight)).log().requires_grad_()
    cross_entropy = -(data * mixture.log_softmax(-1)).sum(-1).mean()
    (cross_entropy + weight * consistency_loss(mixture, draft)).backward()
    assert mixture.grad.abs().max() < 1e-6
    distances = [(p - q).abs().sum(-1) / 2 for p in (data, mixture.detach().exp())]
    torch.testing.assert_close(distances[1], distances[0] / (1 + weight))


@given(num_layers=st.integers(2, 80), max_rate=st.floats(0.0, 1.0))
def test_layer_dropout_rises_from_nothing_to_the_rate(num_layers: int, max_rate: float) -> None:
    rates = [layer_dropout_rate(i, num_layers, max_rate) for i in range(num_layers)]
    closed = [max_rate * (2 ** (i / (num_layers - 1)) - 1) for i in range(num_layers)]
    assert rates == pytest.approx(closed, abs=1e-12)
    assert rates[0] == 0.0
    assert rates[-1] == pytest.approx(max_rate)
    assert rates == sorted(rates)


def test_a_model_of_one_layer_never_drops_it() -> None:
    assert layer_dropout_rate(0, 1, 0.5) == 0.0


@pytest.mark.parametrize(
    ("progress", "factor"),
    [(0.0, 0.0), (0.01, 0.5), (0.02, 1.0), (0.39, 1.0), (0.4, 1.0), (0.7, 0.5), (1.0, 0.0)],
)
def test_learning_rate_rises_stays_and_falls(progress: float, factor: float) -> None:
    assert warmup_stable_decay(progress) == pytest.approx(factor)


def test_learning_rate_follows_the_given_corners() -> None:
    factors = [warmup_stable_decay(p, warmup=0.5, decay_from=0.75) for p in (0.25, 0.6, 0.875)]
    assert factors == pytest.approx([0.5, 1.0, 0.5])


@given(st.floats(0.0, 1.5))
def test_learning_rate_stays_between_0_and_1(progress: float) -> None:
    assert 0.0 <= warmup_stable_decay(progress) <= 1.0
