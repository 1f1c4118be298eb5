"""Early-exit losses."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 512


def exit_loss(
    exit_logits: Tensor, target_logits: Tensor, labels: Tensor, *, distil: float = 0.7
) -> Tensor:
    """Loss of one early exit: distillation from the full model mixed with cross-entropy.

    ``distil * KL(target || exit) + (1 - distil) * CE(exit, labels)``, averaged over tokens. The
    target is detached: this loss never pulls the full model towards its own draft.

    Args:
        exit_logits: ``(tokens, vocab)``, the shared head applied at the exit layer.
        target_logits: ``(tokens, vocab)``, the same head at full depth.
        labels: ``(tokens,)`` int64 next-token ids.
        distil: share of the KL term, in [0, 1].

    Returns:
        A float32 scalar in nats per token.

    References:
        LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) section 3.1 for the shared exit;
        Hinton et al. 2015 (arXiv 1503.02531) for distillation.
    """
    log_q = F.log_softmax(exit_logits.float(), dim=-1)
    cross_entropy = F.nll_loss(log_q, labels)
    if distil == 0.0:
        return cross_entropy
    log_p = F.log_softmax(target_logits.detach().float(), dim=-1)
    divergence = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    return distil * divergence + (1.0 - distil) * cross_entropy


def consistency_loss(target_logits: Tensor, exit_logits: Tensor) -> Tensor:
    """Pull of the full model towards its draft, ``KL(exit || target)``, averaged over tokens.

    The exit is detached. With weight w beside the full model's own cross-entropy, the optimum is
    the mixture ``(data + w * exit) / (1 + w)``: where the data leave a choice open, the full model
    chooses as its draft does, and total variation to the draft falls by ``w / (1 + w)``. The price
    is at most ``log(1 + w)`` nats a token.

    Args:
        target_logits: ``(tokens, vocab)`` at full depth.
        exit_logits: ``(tokens, vocab)`` of the early exit.

    Returns:
        A float32 scalar in nats per token.
    """
    log_p = F.log_softmax(target_logits.float(), dim=-1)
    log_q = F.log_softmax(exit_logits.detach().float(), dim=-1)
    return F.kl_div(log_p, log_q, log_target=True, reduction="batchmean")


def total_variation(
    draft_logits: Tensor, target_logits: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Distance of a draft's distribution from the target's, ``0.5 * sum |q - p|``, averaged.

    One minus it is the chance that token-level verification accepts the draft's token (Leviathan et
    al. 2023, arXiv 2211.17192, section 3.2): to lower it is to raise acceptance. The target is
    detached.

    Args:
        draft_logits: ``(tokens, vocab)``.
        target_logits: ``(tokens, vocab)``.
        weights: ``(tokens,)`` not negative, of which the average is taken; None weighs all alike.

    Returns:
        A float32 scalar in [0, 1].
    """
    q, p = draft_logits.float().softmax(-1), target_logits.detach().float().softmax(-1)
    return _averaged(0.5 * (q - p).abs().sum(-1), weights)


def draft_loss(
    draft_logits: Tensor,
    target_logits: Tensor,
    labels: Tensor,
    *,
    weights: Tensor | None = None,
    cross_entropy: float = 0.1,
) -> Tensor:
    """Loss of a draft for the sake of acceptance: total variation and a little cross-entropy.

    ``(1 - cross_entropy) * TV(draft, target) + cross_entropy * CE(draft, labels)``. Total variation
    alone has next to no gradient where draft and target hardly overlap; cross-entropy has it there
    (the mixture of DSpark, arXiv 2607.05147).

    Args:
        draft_logits: ``(tokens, vocab)``.
        target_logits: ``(tokens, vocab)``, detached.
        labels: ``(tokens,)`` int64, the tokens that follow; or ``(tokens, vocab)``, their chances.
        weights: ``(tokens,)``, such as ``sliding_survival`` gives.
        cross_entropy: share of the second term, in [0, 1].

    Returns:
        A float32 scalar.
    """
    distance = total_variation(draft_logits, target_logits, weights)
    likelihood = F.cross_entropy(draft_logits.float(), labels, reduction="none")
    return (1.0 - cross_entropy) * distance + cross_entropy * _averaged(likelihood, weights)


@torch.no_grad()
def sliding_survival(accepted: Tensor, documents: Tensor, *, most: int) -> Tensor:
    """How many drafts get as far as each position, if one was begun at every position.

    ``1 + a[j-1] + a[j-1] a[j-2] + ...`` with ``most`` terms: a draft begun m positions before
    arrives if the m tokens in between are accepted. What weighs a text's positions when a draft
    may begin anywhere.

    Args:
        accepted: ``(..., positions)``, the chance that each position's draft is accepted.
        documents: the same shape, int64; drafts end where a document ends.
        most: tokens of a draft, 1 or more.

    Returns:
        ``(..., positions)`` float32, from 1 to ``most``.
    """
    weights, arrives = torch.ones_like(accepted), torch.ones_like(accepted)
    for back in range(1, min(most, accepted.shape[-1])):
        same = documents[..., back:] == documents[..., :-back]
        arrives = arrives[..., 1:] * accepted[..., :-back] * same
        weights[..., back:] += arrives
    return weights


def losses_by_exit(
    hidden: Mapping[int, Tensor],
    head: Callable[[Tensor], Tensor],
    labels: Tensor,
    exits: Sequence[int],
    *,
    distil: float = 0.0,
    consistency: float = 0.0,
    num_labels: int | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> dict[int, Tensor]:
    """The loss of each exit through the shared head, and of full depth, the deepest of ``hidden``.

    Full depth has its cross-entropy. An exit has ``exit_loss`` and, with a weight of
    ``consistency``, ``consistency_loss``. Logits are made for ``chunk_tokens`` tokens of one exit
    at a time (and of full depth beside it, where they are compared), and again in the backward
    pass: of a vocabulary of 128,256, all exits' logits of a few thousand tokens would not fit.

    Args:
        hidden: by exit layer, ``(tokens, width)`` after so many layers.
        head: final norm and output embedding, ``(n, width)`` to ``(n, vocab)``.
        labels: ``(tokens,)`` int64 next-token ids; -100 is left out.
        exits: those whose losses are wanted; full depth among them or not.
        distil: share of KL from full depth in an exit's loss, in [0, 1]; full depth is detached.
        consistency: weight of full depth's pull towards each exit, the exit being detached.
        num_labels: what sums are divided by; None: the labels that count. Where a step is cut into
            micro-batches and among processes, those of the whole step: then the parts add up to
            what one batch would have given, however unevenly labels are spread.
        chunk_tokens: tokens whose logits exist at once.

    Returns:
        By exit layer, a float32 scalar in nats per token.

    Raises:
        ValueError: an exit has no hidden states, or no label counts.

    References:
        LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710): equation 4 is their weighted sum.
    """
    missing = sorted(set(exits) - set(hidden))
    if missing:
        raise ValueError(
            f"exit layer {missing[0]} has no hidden states; they are of {sorted(hidden)}"
        )
    count = int((labels != -100).sum()) if num_labels is None else num_labels
    if count == 0:
        raise ValueError("no label counts: all are -100")
    deepest = max(hidden)

    def alone(states: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(head(states).float(), wanted, ignore_index=-100, reduction="sum")

    def beside(states: Tensor, full: Tensor, wanted: Tensor) -> Tensor:
        counts = wanted != -100
        if not counts.any():
            return states.sum() * 0.0
        exit_logits, target_logits = head(states[counts]), head(full[counts])
        loss = exit_loss(exit_logits, target_logits, wanted[counts], distil=distil)
        if consistency:
            loss = loss + consistency * consistency_loss(target_logits, exit_logits)
        return loss * int(counts.sum())

    losses: dict[int, Tensor] = {}
    full = hidden[deepest] if consistency else hidden[deepest].detach()
    for layer in exits:
        total = torch.zeros((), device=labels.device)
        inputs: tuple[Tensor, ...] = (hidden[layer], labels)
        compared = layer != deepest and (distil > 0.0 or consistency > 0.0)
        if compared:
            inputs = (hidden[layer], full, labels)
        parts = zip(*(tensor.split(chunk_tokens) for tensor in inputs), strict=True)
        for part in parts:
            loss = checkpoint(beside if compared else alone, *part, use_reentrant=False)
            assert isinstance(loss, Tensor)
            total = total + loss / count
        losses[layer] = total
    return losses


def _averaged(values: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return values.mean()
    return (weights * values).sum() / weights.sum().clamp_min(1e-9)
