"""Early-exit losses."""

from torch import Tensor
from torch.nn import functional as F


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
