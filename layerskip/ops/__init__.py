"""Operations that draft and verify share: ``layerskip.ops.linear`` and its like.

``definitions`` says in plain PyTorch what each computes; ``kernels`` launches what computes it on
a GPU. A tensor's device chooses. ``reference`` holds what the general stack computes by itself.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerskip.ops.definitions import accept_block as accept_block
    from layerskip.ops.definitions import accept_tokens as accept_tokens
    from layerskip.ops.definitions import add_rms_norm as add_rms_norm
    from layerskip.ops.definitions import decode_attention as decode_attention
    from layerskip.ops.definitions import gumbel_from_bits as gumbel_from_bits
    from layerskip.ops.definitions import gumbel_noise as gumbel_noise
    from layerskip.ops.definitions import linear as linear
    from layerskip.ops.definitions import lm_head_argmax as lm_head_argmax
    from layerskip.ops.definitions import rms_norm as rms_norm
    from layerskip.ops.definitions import rope_append_kv as rope_append_kv
    from layerskip.ops.definitions import swiglu as swiglu

__all__ = [
    "accept_block",
    "accept_tokens",
    "add_rms_norm",
    "decode_attention",
    "gumbel_from_bits",
    "gumbel_noise",
    "linear",
    "lm_head_argmax",
    "rms_norm",
    "rope_append_kv",
    "swiglu",
]


def __getattr__(name: str) -> Any:
    """Register the operators when the first is asked for, so that importing stays cheap."""
    if name in __all__:
        from layerskip.ops.registry import FUNCTIONS

        return FUNCTIONS[name]
    raise AttributeError(f"module 'layerskip.ops' has no attribute {name!r}")
