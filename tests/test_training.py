"""Losses and schedules against their closed forms."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from toys import make_model

from layerskip.training.confidence import calibration_error, fit_temperature
from layerskip.training.dropout import LayerDropout, dropping
from layerskip.training.losses import (
    consistency_loss,
    draft_loss,
    exit_loss,
    losses_by_exit,
    sliding_survival,
    total_variation,
)
from layerskip.training.schedules import (
    enabled_exits,
    exit_loss_scales,
    layer_dropout_rate,
    warmup_stable_decay,
)

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
    one_hot = F.one_hot(labels, VOCAB).float()
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


def test_total_variation_is_the_chance_of_a_rejection() -> None:
    draft, target, _ = some_logits()
    q, p = draft.double().softmax(-1), target.double().softmax(-1)
    each = (1.0 - torch.minimum(q, p).sum(-1)).tolist()  # Leviathan et al. 2023, theorem 3.5
    assert total_variation(draft, target).item() == pytest.approx(sum(each) / TOKENS, rel=1e-5)
    weights = torch.tensor([1.0, 0.0, 0.0, 3.0, 0.0])
    weighed = total_variation(draft, target, weights).item()
    assert weighed == pytest.approx((each[0] + 3 * each[3]) / 4, rel=1e-5)
    assert total_variation(draft, draft - 2.0).item() == pytest.approx(0.0, abs=1e-6)


def test_draft_loss_mixes_its_terms_and_leaves_the_target_alone() -> None:
    draft, target, labels = some_logits()
    draft.requires_grad_()
    target.requires_grad_()
    weights = torch.tensor([1.0, 0.5, 0.25, 0.0, 0.0])
    loss = draft_loss(draft, target, labels, weights=weights, cross_entropy=0.3)
    nll = -draft.detach().log_softmax(-1)[range(TOKENS), labels]
    expected = 0.7 * total_variation(draft.detach(), target.detach(), weights)
    expected += 0.3 * (weights * nll).sum() / weights.sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    assert target.grad is None
    assert draft.grad is not None
    assert draft.grad[:3].abs().sum() > 0.0
    assert not draft.grad[3:].any()  # no weight


@pytest.mark.parametrize("chunk_tokens", [1, 2, 5, 100])
def test_losses_of_several_exits_are_what_they_are_however_they_are_cut(chunk_tokens: int) -> None:
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(VOCAB, 3, generator=generator, requires_grad=True)
    hidden = {e: torch.randn(TOKENS, 3, generator=generator, requires_grad=True) for e in (1, 2, 4)}
    labels, scales = torch.tensor([3, -100, 0, 10, 7]), {1: 0.25, 4: 0.75}
    losses = losses_by_exit(
        hidden, lambda h: h @ head.T, labels, tuple(scales), chunk_tokens=chunk_tokens
    )
    loss = sum(scale * losses[e] for e, scale in scales.items())
    loss.backward()
    got = [head.grad, hidden[1].grad, hidden[4].grad]
    assert hidden[2].grad is None
    whole = sum(
        scale * torch.nn.functional.cross_entropy(hidden[e] @ head.T, labels)
        for e, scale in scales.items()
    )
    expected = torch.autograd.grad(whole, [head, hidden[1], hidden[4]])
    assert loss.item() == pytest.approx(whole.item(), rel=1e-5)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_logits_of_one_chunk_exist_at_once() -> None:
    sizes, kept = [], []
    states = torch.randn(64, 3, requires_grad=True)

    def head(part: Tensor) -> Tensor:
        sizes.append(len(part))
        return part @ torch.ones(3, VOCAB)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape)
        return tensor

    labels = torch.zeros(64, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = losses_by_exit({1: states, 2: states}, head, labels, (1, 2), chunk_tokens=8)
    assert kept
    assert not any(VOCAB in shape for shape in kept)  # between the passes there are none
    (losses[1] + losses[2]).backward()
    assert sizes == [8] * (2 * 2 * 8)  # each chunk of each exit again in the backward pass


def test_losses_without_labels_or_states_are_refused() -> None:
    states = {1: torch.zeros(2, 3)}
    with pytest.raises(ValueError, match=r"exit layer 2 has no hidden states; they are of \[1\]"):
        losses_by_exit(states, lambda h: h, torch.tensor([0, 1]), (2,))
    with pytest.raises(ValueError, match="no label counts"):
        losses_by_exit(states, lambda h: h, torch.tensor([-100, -100]), (1,))


@pytest.mark.parametrize("chunk_tokens", [1, 2, 100])
def test_exits_are_compared_with_full_depth_in_chunks_as_at_once(chunk_tokens: int) -> None:
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(VOCAB, 3, generator=generator, requires_grad=True)
    hidden = {e: torch.randn(TOKENS, 3, generator=generator, requires_grad=True) for e in (1, 4)}
    labels = torch.tensor([3, -100, 0, 10, 7])
    losses = losses_by_exit(
        hidden,
        lambda h: h @ head.T,
        labels,
        (1, 4),
        distil=0.7,
        consistency=0.5,
        chunk_tokens=chunk_tokens,
    )
    kept = labels != -100
    draft, target = (hidden[e][kept] @ head.T for e in (1, 4))
    early = exit_loss(draft, target, labels[kept], distil=0.7)
    early = early + 0.5 * consistency_loss(target, draft)
    assert losses[1].item() == pytest.approx(early.item(), rel=1e-5)
    full = torch.nn.functional.cross_entropy(target, labels[kept])
    assert losses[4].item() == pytest.approx(full.item(), rel=1e-5)
    expected = torch.autograd.grad(early, [head, hidden[1], hidden[4]])
    losses[1].backward()
    for got, wanted in zip((head.grad, hidden[1].grad, hidden[4].grad), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def test_an_exit_alone_leaves_full_depth_alone() -> None:
    hidden = {e: torch.randn(TOKENS, VOCAB, requires_grad=True) for e in (1, 2)}
    labels = torch.arange(TOKENS)
    losses_by_exit(hidden, lambda h: h, labels, (1,), distil=0.5)[1].backward()
    assert hidden[1].grad is not None
    assert hidden[2].grad is None


def test_parts_of_a_step_add_up_to_the_step_however_labels_are_spread() -> None:
    states, labels = torch.randn(8, VOCAB), torch.tensor([1, -100, -100, -100, 2, 3, 4, 5])
    whole = losses_by_exit({1: states}, lambda h: h, labels, (1,))[1]
    halves = zip(states.split(4), labels.split(4), strict=True)
    parts = [losses_by_exit({1: h}, lambda h: h, y, (1,), num_labels=5)[1] for h, y in halves]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-6)
    empty = torch.full((4,), -100)  # a micro-batch may be all prompt
    for distil in (0.0, 0.5):
        hidden = {1: states[:4], 2: states[4:]}
        losses = losses_by_exit(hidden, lambda h: h, empty, (1, 2), num_labels=5, distil=distil)
        assert losses[1].item() == losses[2].item() == 0.0


def test_chosen_exits_have_their_curricula() -> None:
    chosen = (1, 2, 4)
    turns = [enabled_exits("rotational", s, 9, 16, every=2, exits=chosen) for s in range(3)]
    assert turns == [(1, 4, 16), (2, 16), (1, 4, 16)]
    joined = [enabled_exits("gradual", s, 80, 16, exits=chosen) for s in (0, 10, 20, 30, 79)]
    assert joined == [(16,), (4, 16), (2, 4, 16), (1, 2, 4, 16), (1, 2, 4, 16)]
    assert enabled_exits("none", 0, 80, 16, exits=(2, 16)) == (2, 16)


def test_every_exit_has_its_turn_in_a_rotation() -> None:
    turns = [enabled_exits("rotational", step, 100, 9, every=4) for step in range(4)]
    assert turns == [(1, 5, 9), (2, 6, 9), (3, 7, 9), (4, 8, 9)]
    assert enabled_exits("rotational", 6, 100, 9, every=4) == turns[2]  # of the step alone


def test_exits_join_gradually_from_the_deepest() -> None:
    counts = [len(enabled_exits("gradual", step, 80, 8)) for step in range(80)]
    assert counts == [min(8, 1 + step // 5) for step in range(80)]
    assert enabled_exits("gradual", 12, 80, 8) == (6, 7, 8)
    assert enabled_exits("none", 0, 80, 3) == (1, 2, 3)


def test_a_run_that_goes_on_has_the_exits_of_its_step() -> None:
    """torchtune's forgets where it was: at step 80 of 100 it trains one layer instead of eight."""
    assert enabled_exits("gradual", 80, 100, 8) == tuple(range(1, 9))


def test_scales_are_those_of_the_paper() -> None:
    scales = exit_loss_scales(range(1, 5), 4, early_scale=0.5)
    raw = [0.0, 0.5 * 1, 0.5 * 3, 3 + 0.5 * 3]  # e(l) of section 3.2, l = exit - 1
    assert list(scales.values()) == pytest.approx([w / sum(raw) for w in raw])
    assert exit_loss_scales([2, 4], 4)[2] == pytest.approx(1 / (1 + 3 + 3))
    assert exit_loss_scales([1, 4], 4, early_scale=0.0) == {1: 0.0, 4: 1.0}


@given(st.integers(2, 40), st.floats(0.0, 0.9), st.floats(0.0, 2.0))
def test_scales_add_up_to_one_and_shallow_exits_keep_their_share(
    depth: int, floor: float, early: float
) -> None:
    exits = enabled_exits("rotational", 1, 10, depth, every=3)
    scales = exit_loss_scales(exits, depth, early_scale=early, floor=floor)
    assert sum(scales.values()) == pytest.approx(1.0)
    assert min(scales.values()) >= floor / len(exits) - 1e-12


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: enabled_exits("spiral", 0, 10, 4), "curriculum must be one of none, rotational"),
        (lambda: enabled_exits("gradual", -1, 10, 4), "step must be"),
        (lambda: enabled_exits("none", 0, 10, 4, exits=[2, 1]), r"exits must ascend, got \[2, 1\]"),
        (lambda: enabled_exits("none", 0, 10, 4, exits=[5]), "an exit layer must be"),
        (lambda: exit_loss_scales([1, 2], 4), "hold full depth"),
        (lambda: exit_loss_scales([4, 4], 4), "distinct"),
        (lambda: exit_loss_scales([0, 4], 4), "an exit layer must be"),
        (lambda: exit_loss_scales([1, 4], 4, floor=1.0), "floor must"),
        (lambda: LayerDropout(4, 1.0), r"max_rate must lie in \[0, 1\), got 1.0"),
    ],
)
def test_bad_schedules_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_layers_are_dropped_as_often_as_their_rates_say() -> None:
    dropout = LayerDropout(5, 0.4, seed=3)
    shares = torch.stack([dropout.dropped(step, 50) for step in range(200)]).double().mean((0, 2))
    rates = [layer_dropout_rate(i, 5, 0.4) for i in range(5)]
    assert shares[0] == 0.0  # the first layer never is
    assert shares.tolist() == pytest.approx(rates, abs=0.015)


def test_what_is_dropped_depends_on_seed_step_and_sample_alone() -> None:
    one, other = LayerDropout(6, 0.5, seed=1), LayerDropout(6, 0.5, seed=2)
    whole = one.dropped(7, 8)
    assert torch.equal(whole, LayerDropout(6, 0.5, seed=1).dropped(7, 8))
    halves = [one.dropped(7, 4), one.dropped(7, 4, first_sample=4)]  # of two processes
    assert torch.equal(torch.cat(halves, dim=1), whole)
    assert not torch.equal(whole, other.dropped(7, 8))
    assert not torch.equal(whole, one.dropped(8, 8))


def test_a_dropped_layer_hands_on_its_input_for_that_sample_alone() -> None:
    """Two documents packed in a row, whose mask is batched: torchtune's dropout breaks on it."""
    model = make_model().train()
    layers = model.model.layers
    dropped = torch.zeros(len(layers), 3, dtype=torch.bool)
    dropped[2, 1] = dropped[4, 0] = True
    samples = torch.tensor([[0, 0, 0, 1, 1, 1], [2, 2, 2, 2, 2, 2]])
    inputs: dict[int, Tensor] = {}
    for i, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda m, a, i=i: inputs.__setitem__(i, a[0]))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
    with dropping(layers, dropped, samples):
        model(torch.arange(12).reshape(2, 6) + 3, position_ids=positions)
    assert torch.equal(inputs[3][0, 3:], inputs[2][0, 3:])  # document 1 passed layer 2 by
    assert not torch.equal(inputs[3][0, :3], inputs[2][0, :3])
    assert torch.equal(inputs[5][0, :3], inputs[4][0, :3])  # document 0 passed layer 4 by
    for before, after in pairwise(inputs[i] for i in range(len(layers))):
        assert not torch.equal(after[1], before[1])  # document 2 passed none
    assert not any(layer._forward_hooks for layer in layers)


def test_in_evaluation_nothing_is_dropped() -> None:
    model = make_model().eval()
    layers, ids = model.model.layers, torch.arange(6)[None] + 3
    dropped = torch.ones(len(layers), 1, dtype=torch.bool)
    expected = model(ids).logits
    with dropping(layers, dropped, torch.zeros(1, 6, dtype=torch.long)):
        assert torch.equal(model(ids).logits, expected)


def test_gradients_are_the_same_with_checkpointing() -> None:
    def gradients(*, checkpointing: bool) -> list[Tensor]:
        model = make_model().train()
        if checkpointing:
            # transformers 5.23 calls it by another name than 5.17.
            name = "activation_checkpointing_enable"
            getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")()
        ids = torch.arange(12).reshape(2, 6) + 3
        dropped = LayerDropout(len(model.model.layers), 0.9, seed=4).dropped(0, 2)
        assert dropped.any()
        samples = torch.arange(2)[:, None].expand(2, 6)
        with dropping(model.model.layers, dropped, samples):
            model(ids, labels=ids).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain, again = gradients(checkpointing=False), gradients(checkpointing=True)
    assert len(plain) == len(again) > 0
    for one, other in zip(plain, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_samples_that_dropped_does_not_know_are_refused() -> None:
    layers = make_model().model.layers
    dropped = torch.zeros(len(layers), 2, dtype=torch.bool)
    with (
        pytest.raises(ValueError, match="samples must be numbers of the 2 samples"),
        dropping(layers, dropped, torch.tensor([[0, 2]])),
    ):
        pass
    with (
        pytest.raises(ValueError, match="dropped is for 1 layers, the model has"),
        dropping(layers, dropped[:1], torch.tensor([[0, 1]])),
    ):
        pass


@pytest.mark.parametrize("most", [1, 2, 3, 9])
def test_sliding_survival_adds_up_the_drafts_that_arrive(most: int) -> None:
    accepted = [0.5, 0.8, 0.25, 1.0, 0.6, 0.9]
    documents = [0, 0, 0, 1, 1, 1]
    expected = []
    for at in range(len(accepted)):
        starts = [s for s in range(at + 1) if at - s < most and documents[s] == documents[at]]
        expected.append(sum(math.prod(accepted[s:at]) for s in starts))
    rows = torch.tensor([accepted, accepted]), torch.tensor([documents, documents])
    found = sliding_survival(*rows, most=most)
    for row in found:
        assert row.tolist() == pytest.approx(expected)


def test_a_draft_may_be_judged_by_chances_instead_of_tokens() -> None:
    draft, target, labels = some_logits()
    certain = F.one_hot(labels, VOCAB).float()
    one, other = (draft_loss(draft, target, by, cross_entropy=0.5) for by in (labels, certain))
    assert one.item() == pytest.approx(other.item(), rel=1e-6)


@pytest.mark.parametrize("truth", [0.5, 1.0, 1.7])
def test_the_temperature_that_was_taken_off_is_found(truth: float) -> None:
    target = torch.randn(300, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    pairs = [(part * truth, part) for part in target.split(100)]
    assert fit_temperature(pairs) == pytest.approx(truth, rel=2e-3)


def test_the_temperature_is_by_maximum_likelihood() -> None:
    generator = torch.Generator().manual_seed(2)
    target = torch.randn(400, VOCAB, generator=generator) * 2
    draft = 1.2 * (target + torch.randn(400, VOCAB, generator=generator))
    found = fit_temperature([(draft, target)])

    def likelihood(temperature: float) -> float:
        return (target.softmax(-1) * (draft / temperature).log_softmax(-1)).sum(-1).mean().item()

    assert found > 1.1
    assert likelihood(found) > max(likelihood(found * 1.02), likelihood(found / 1.02))


def test_a_temperature_needs_tokens() -> None:
    with pytest.raises(ValueError, match=r"^a temperature is fitted on held-out tokens, got none$"):
        fit_temperature([])


def test_calibration_error_by_hand() -> None:
    confidence = torch.tensor([0.95, 1.0, 0.14, 0.18])
    right = torch.tensor([1.0, 0.0, 0.0, 1.0])
    # Two bins of two tokens: |0.975 - 0.5| and |0.16 - 0.5|, half of the tokens each.
    expected = 0.5 * 0.475 + 0.5 * 0.34
    assert calibration_error(confidence, right) == pytest.approx(expected)
    assert calibration_error(right, right) == 0.0
