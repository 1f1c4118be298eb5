"""Bytes that decoding has to move between memory and chip: pure functions of shapes.

Weights are read once a pass, keys and values once for each position's history, new ones written.
Activations of a few rows stay on the chip and count for nothing; neither does the embedding, of
which a row a token is read.
"""

from collections.abc import Sequence

from gpu.models import Synthetic
from gpu.shapes import ELEMENT
from layerskip import Round


def layer_bytes(model: Synthetic) -> int:
    """One layer's weights."""
    shape = model.shape
    attended, kept = shape.heads * shape.head_dim, shape.heads_k * shape.head_dim
    attention = shape.hidden * (2 * attended + 2 * kept)
    norms = 2 * shape.hidden + (2 * shape.head_dim if model.family == "qwen3" else 0)
    return ELEMENT * (attention + 3 * shape.hidden * shape.inner + norms)


def head_bytes(model: Synthetic) -> int:
    """The final norm and the whole vocabulary."""
    return ELEMENT * model.shape.hidden * (model.shape.vocab + 1)


def kv_bytes(model: Synthetic, layers: int) -> int:
    """Keys and values of one slot in some layers."""
    return ELEMENT * 2 * layers * model.shape.heads_k * model.shape.head_dim


def pass_bytes(
    model: Synthetic, layers: int, *, context: float, positions: int = 1, batch: int = 1
) -> float:
    """One pass through some layers and the head, over ``positions`` new ones of each sequence.

    Args:
        context: slots that each sequence holds before.
    """
    slots = batch * (context + positions)  # old ones are read, new ones written
    weights = layers * layer_bytes(model) + head_bytes(model)
    return weights + slots * kv_bytes(model, layers)


def round_bytes(model: Synthetic, drafted: int, *, context: float, batch: int = 1) -> float:
    """A round: each draft pass through the layers up to the exit, verify through all.

    ``drafted = 0`` is a plain token. Verify reads the drafting layers' weights again: the last
    token has not been through them.
    """
    drafts = sum(
        pass_bytes(model, model.exit_layer, context=context + i, batch=batch)
        for i in range(drafted)
    )
    verify = pass_bytes(model, model.layers, context=context, positions=drafted + 1, batch=batch)
    return drafts + verify


def speedup_by_bytes(model: Synthetic, rounds: Sequence[Round]) -> float:
    """Bytes of plain decoding over those of one sequence's rounds, for the same tokens."""
    plain = spent = 0.0
    for r in rounds:
        plain += len(r.token_ids) * round_bytes(model, 0, context=r.context)
        spent += round_bytes(model, r.num_draft_tokens, context=r.context)
    return plain / spent
