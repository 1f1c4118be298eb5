"""A Llama checkpoint driven by the operations alone, with the interface that ``Decoder`` drives."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from layerskip.cache import KVCache, Segment
from layerskip.exactness import Exactness

PREFILL_CHUNK = 16
NUM_LAYERS = 4
VOCAB_SIZE = 512
SLOT_BLOCK = 64


def make_llama(dtype: torch.dtype) -> Any:
    """Four layers, two query heads per key head; quiet upper layers, so that drafts may stand."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=64,
        head_dim=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
    return model.to(dtype).requires_grad_(False)


class OpsStack:
    """``embed``, ``run_layers``, ``logits`` and ``prefill`` of a checkpoint, by ``ops``."""

    def __init__(self, model: Any, ops: Any, device: str) -> None:
        self.ops, self.device = ops, device
        self.model = model.to(device)
        body, config = self.model.model, self.model.config
        self.num_layers, self.vocab_size = config.num_hidden_layers, config.vocab_size
        self.heads, self.heads_k = config.num_attention_heads, config.num_key_value_heads
        self.dim, self.eps, self.dtype = config.head_dim, config.rms_norm_eps, model.dtype
        self.packed = [_pack(layer.self_attn) for layer in body.layers]
        positions = torch.arange(config.max_position_embeddings, device=device)[None]
        tables = body.rotary_emb(torch.zeros(1, device=device), positions)
        self.cosine, self.sine = (t[0, :, : self.dim // 2].contiguous() for t in tables)

    def new_cache(self, *, num_rows: int, num_slots: int) -> KVCache:
        return KVCache(
            num_layers=self.num_layers,
            num_rows=num_rows,
            num_slots=num_slots,
            num_kv_heads=self.heads_k,
            head_dim=self.dim,
            dtype=self.dtype,
            device=torch.device(self.device),
            attended_block=SLOT_BLOCK,
        )

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        ids = torch.tensor(token_ids, device=self.device)
        return self.model.model.embed_tokens(ids)

    def run_layers(
        self, hidden: Tensor, layers: Iterable[int], cache: KVCache, segments: Sequence[Segment]
    ) -> Tensor:
        """Tokens of the segments one after another; a row without a segment takes no part."""
        longest = max(s.count for s in segments)
        lengths = torch.full((cache.num_rows,), -1, dtype=torch.int32, device=self.device)
        rows, places = [], []
        for s in segments:
            lengths[s.row] = s.start
            rows += [s.row] * s.count
            places += range(s.count)
        for i in layers:
            hidden = self.run_layer(i, hidden, cache, lengths, longest, (rows, places))
        return hidden

    def run_layer(
        self,
        index: int,
        hidden: Tensor,
        cache: KVCache,
        lengths: Tensor,
        seqlen: int,
        at: tuple[Any, Any],
    ) -> Tensor:
        """``at``: cache row and place among its new positions of each token."""
        ops, layer = self.ops, self.model.model.layers[index]
        keys, values = cache.layer_keys[index], cache.layer_values[index]
        heads = (self.heads, self.heads_k, self.heads_k)
        first = {"norm_weight": layer.input_layernorm.weight, "eps": self.eps}
        qkv = ops.linear(hidden, self.packed[index], **first).unflatten(1, (-1, self.dim))
        padded = qkv.new_zeros(cache.num_rows, seqlen, *qkv.shape[1:])
        padded[at] = qkv
        q, k, v = padded.split(heads, dim=2)
        ops.rope_append_kv(q, k, v, keys, values, self.cosine, self.sine, lengths)
        mixed = ops.decode_attention(q, keys, values, lengths)[at].flatten(1)
        hidden = ops.linear(mixed, layer.self_attn.o_proj.weight, residual=hidden)
        second = {"norm_weight": layer.post_attention_layernorm.weight, "eps": self.eps}
        gated = ops.swiglu(hidden, layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight, **second)
        return ops.linear(gated, layer.mlp.down_proj.weight, residual=hidden)

    @property
    def exactness(self) -> Exactness:
        """Kernels keep a row's bits in a pass of any size: nothing is padded."""
        return Exactness(True, 1, SLOT_BLOCK, "by construction")

    def logits(self, hidden: Tensor) -> Tensor:
        norm = {"norm_weight": self.model.model.norm.weight, "eps": self.eps}
        return self.ops.linear(hidden, self.model.lm_head.weight, **norm)

    def choose(self, hidden: Tensor) -> Tensor:
        """Greedy tokens, without logits."""
        norm = {"norm_weight": self.model.model.norm.weight, "eps": self.eps}
        return self.ops.lm_head_argmax(hidden, self.model.lm_head.weight, **norm)[0]

    def prefill(
        self, token_ids: Sequence[int], cache: KVCache, row: int, *, start: int = 0
    ) -> Tensor:
        hidden = None
        for begin in range(start, len(token_ids), PREFILL_CHUNK):
            chunk = token_ids[begin : begin + PREFILL_CHUNK]
            segment = Segment(row, begin, len(chunk))
            hidden = self.run_layers(self.embed(chunk), range(self.num_layers), cache, [segment])
        assert hidden is not None
        return self.logits(hidden[-1:])[0]


def _pack(attention: Any) -> Tensor:
    """The weights of q, k and v side by side."""
    parts = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
    return torch.cat(parts)
