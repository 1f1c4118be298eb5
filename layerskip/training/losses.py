"""Early-exit losses."""

from torch import Tensor
from torch.nn import functional as F


def exit_loss(
    exit_logits: Tensor, target_logits: Tensor, labels: Tensor, *, distil: float = 0.7
) -> Tensor:
    """Loss of one early exit: distillation from the full model mixed with cross-entropy.

    ``distil * KL(target || exit) + (1 - distil) * CE(exit, labels)``, averaged over tokens. The
    target is detached, so the full model is never pulled towards its own draft.

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
