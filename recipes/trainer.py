"""A small Llama and one training step of it: full depth plus a sampled early exit."""

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import check_same, write_state
from corpus import Corpus
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from layerskip.params import MAX_SEED, check_integer, check_number
from layerskip.training.losses import consistency_loss, exit_loss
from layerskip.training.schedules import layer_dropout_rate, warmup_stable_decay

ATTENTION_CHUNK = 128
EVAL_EXITS = (1, 2, 3, 4)
BYTES, MOST_IDS = 256, 1 << 16  # a tokenizer's alphabet, and what streams of uint16 can name
# A step takes whole rows: how many, no size of a micro-batch may change.
WHOLE_PARTS = (
    ("num_heads", "num_kv_heads"),
    ("hidden_size", "num_heads"),
    ("batch_tokens", "micro_tokens"),
    ("micro_tokens", "seq_len"),
    ("micro_tokens", "long_seq_len"),
)
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_positions",
    "max_steps",
    "batch_tokens",
    "micro_tokens",
    "seq_len",
    "long_seq_len",
)
# How long a run goes on, and what a pass holds: a run may go on with others.
NOT_OF_THE_WEIGHTS = {"minutes", "max_steps", "micro_tokens"}


@dataclass(frozen=True)
class Settings:
    """Everything that decides the result, as in the YAML."""

    vocab_size: int = 4096
    hidden_size: int = 320
    intermediate_size: int = 768
    num_layers: int = 16
    num_heads: int = 5
    num_kv_heads: int = 1
    head_dim: int = 64
    max_positions: int = 1024
    minutes: float = 100.0
    max_steps: int = 10**9
    batch_tokens: int = 8192
    micro_tokens: int = 4096
    seq_len: int = 512
    long_seq_len: int = 1024
    learning_rate: float = 0.004
    weight_decay: float = 0.1
    layer_dropout: float = 0.1
    early_exit: float = 1.0
    distil: float = 0.7
    consistency: float = 0.0
    exit_weights: dict[int, float] | None = None
    math_share: float = 0.14
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("vocab_size", self.vocab_size, BYTES + 1, MOST_IDS)
        for name in SIZES:
            check_integer(name, getattr(self, name), 1)
        check_integer("seed", self.seed, 0, MAX_SEED)
        for whole, part in WHOLE_PARTS:
            sizes = getattr(self, whole), getattr(self, part)
            if sizes[0] % sizes[1]:
                raise ValueError(
                    f"{whole} must be divisible by {part}, got {sizes[0]} and {sizes[1]}"
                )
        if self.head_dim % 2:  # positions turn pairs
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        for name in ("layer_dropout", "distil", "math_share"):
            check_number(name, getattr(self, name), 0.0, 1.0)
        for name in ("learning_rate", "weight_decay", "early_exit", "consistency"):
            check_number(name, getattr(self, name), 0.0, math.inf)
        check_number("minutes", self.minutes, 1e-6, math.inf)
        weights = (self.exit_weights or {}) if self.early_exit else {}
        for layer, weight in weights.items():
            check_number(f"exit_weights.{layer}", weight, 0.0, 1e6)
            if not 1 <= layer < self.num_layers:
                raise ValueError(
                    f"exit_weights has a layer {layer}; an exit lies in [1, {self.num_layers - 1}] "
                    f"(num_layers={self.num_layers} is full depth); write others into a --config"
                )
        if weights and not any(weights.values()):
            raise ValueError("exit_weights are all 0; give an exit more, or early_exit: 0")
        check_integer("num_layers", self.num_layers, 2)  # of one layer nothing can exit


def chunked_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float = 1.0,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention in query chunks, query heads folded into rows of their key head.

    3.5 times the speed of torch's CPU flash attention, forward and backward, at 512 positions
    (bench/LOG.md): it skips the upper triangle and never repeats keys.
    """
    kv_heads, length = key.shape[1:3]
    keys = rearrange(key, "row kv_head token dim -> (row kv_head) dim token")
    values = rearrange(value, "row kv_head token dim -> (row kv_head) token dim")
    folded = (query * scaling).unflatten(1, (kv_heads, -1))
    chunk = min(ATTENTION_CHUNK, length)
    bias = torch.full((chunk, chunk), float("-inf"), dtype=query.dtype).triu(1)
    outputs = []
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        count = end - start
        queries = rearrange(
            folded[..., start:end, :],
            "row kv_head group token dim -> (row kv_head) (group token) dim",
        )
        scores = (queries @ keys[..., :end]).unflatten(1, (-1, count))
        scores[..., start:] += bias[:count, :count]
        weights = scores.softmax(-1).flatten(1, 2)
        mixed = weights @ values[:, :end]
        outputs.append(
            rearrange(
                mixed,
                "(row kv_head) (group token) dim -> row token (kv_head group) dim",
                kv_head=kv_heads,
                token=count,
            )
        )
    return torch.cat(outputs, dim=1), None


def run_stack(
    model: LlamaForCausalLM, ids: Tensor, kept: set[int], exits: tuple[int, ...]
) -> tuple[Tensor, dict[int, Tensor]]:
    """Logits' hidden states at full depth and after each of ``exits`` layers, normed."""
    body = model.model
    hidden = body.embed_tokens(ids)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    rope = body.rotary_emb(hidden, positions)
    at_exit = {}
    for i, layer in enumerate(body.layers):
        if i in kept:
            hidden = layer(
                hidden, attention_mask=None, position_embeddings=rope, position_ids=positions
            )
        if i + 1 in exits:
            at_exit[i + 1] = body.norm(hidden)
    return body.norm(hidden), at_exit


class Trainer:
    """Weights in bfloat16 for the passes, their masters in float32 for the optimisers.

    Args:
        settings: of the run.
        device: as torch names it.
        data: digest of what is trained on, that no run goes on with other text.
    """

    def __init__(self, settings: Settings, device: str, data: str = "") -> None:
        self.settings, self.device, self.data = settings, device, data
        torch.manual_seed(settings.seed)
        config = LlamaConfig(
            vocab_size=settings.vocab_size,
            hidden_size=settings.hidden_size,
            intermediate_size=settings.intermediate_size,
            num_hidden_layers=settings.num_layers,
            num_attention_heads=settings.num_heads,
            num_key_value_heads=settings.num_kv_heads,
            head_dim=settings.head_dim,
            max_position_embeddings=settings.max_positions,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
            attn_implementation="layerskip_pretrain",
        )
        AttentionInterface.register("layerskip_pretrain", chunked_attention)
        self.model = LlamaForCausalLM(config)
        depth_scale = (2 * settings.num_layers) ** -0.5
        for name, parameter in self.model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.data.mul_(depth_scale)
        self.model.to(device)
        self.masters = [p.detach().clone().float() for p in self.model.parameters()]
        self.model.bfloat16().train()
        matrices, others = [], []
        for (name, _), master in zip(self.model.named_parameters(), self.masters, strict=True):
            (matrices if ".layers." in name and master.ndim == 2 else others).append(master)
        lr = settings.learning_rate
        self.optimisers = [
            torch.optim.Muon(
                matrices,
                lr=lr,
                weight_decay=settings.weight_decay,
                momentum=0.95,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.rng = np.random.default_rng(settings.seed)
        self.steps = self.tokens = 0
        self.seconds = 0.0
        self.log: list[dict[str, float]] = []

    def progress(self) -> float:
        by_time = self.seconds / (60 * self.settings.minutes)
        return min(1.0, max(by_time, self.steps / self.settings.max_steps))

    def step(self, corpus: Corpus) -> dict[str, float]:
        """One optimiser step; returns its record."""
        began, settings, progress = time.perf_counter(), self.settings, self.progress()
        length = settings.long_seq_len if progress > 0.75 else settings.seq_len
        weights = settings.exit_weights or {}
        exit_layer = 0
        if settings.early_exit and weights:
            shares = np.array(list(weights.values()))
            exit_layer = int(self.rng.choice(list(weights), p=shares / shares.sum()))
        dropped = self.rng.random(settings.num_layers) < [
            layer_dropout_rate(i, settings.num_layers, settings.layer_dropout)
            for i in range(settings.num_layers)
        ]
        kept = set(np.flatnonzero(~dropped).tolist())
        micro_steps = settings.batch_tokens // settings.micro_tokens
        totals = np.zeros(2)
        for _ in range(micro_steps):
            rows = settings.micro_tokens // length
            ids = corpus.batch(self.rng, rows, length, settings.math_share).to(self.device)
            totals += self.backward(ids, kept, exit_layer, 1.0 / micro_steps)
        self.update(warmup_stable_decay(progress))
        self.steps += 1
        self.tokens += micro_steps * rows * length
        self.seconds += time.perf_counter() - began
        return {
            "step": self.steps,
            "seconds": round(self.seconds, 1),
            "tokens": self.tokens,
            "loss": float(totals[0]) / micro_steps,
            "exit_layer": exit_layer,
            "exit_loss": float(totals[1]) / micro_steps,
        }

    def backward(self, ids: Tensor, kept: set[int], exit_layer: int, share: float) -> np.ndarray:
        labels = ids[:, 1:].reshape(-1)
        exits = (exit_layer,) if exit_layer else ()
        hidden, at_exit = run_stack(self.model, ids[:, :-1], kept, exits)
        logits = self.model.lm_head(hidden).flatten(0, 1).float()
        full = F.cross_entropy(logits, labels)
        early = pull = torch.zeros((), device=full.device)
        if exit_layer:
            exit_logits = self.model.lm_head(at_exit[exit_layer]).flatten(0, 1)
            early = exit_loss(exit_logits, logits, labels, distil=self.settings.distil)
            if self.settings.consistency:
                pull = consistency_loss(logits, exit_logits)
        settings = self.settings
        loss = full + settings.early_exit * early + settings.consistency * pull
        (loss * share).backward()
        return np.array([full.item(), early.item()])

    def update(self, factor: float) -> None:
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = self.settings.learning_rate * factor
        parameters = list(self.model.parameters())
        for master, parameter in zip(self.masters, parameters, strict=True):
            zeros = parameter.grad is None  # a dropped layer
            master.grad = torch.zeros_like(master) if zeros else parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, parameters, strict=True):
                parameter.copy_(master)
                parameter.grad = None

    @torch.inference_mode()
    def evaluate(self, corpus: Corpus, max_tokens: int = 40_000) -> dict[str, float]:
        """Bits per byte at full depth and next-token agreement of early exits, teacher-forced."""
        self.model.eval()
        result: dict[str, float] = {}
        sets = {"code": list(corpus.held_out.values()), "math": corpus.math_held_out}
        for name, documents in sets.items():
            if documents:
                score = self.score(corpus, documents, max_tokens)
                result |= {f"{name}_{key}": value for key, value in score.items()}
        self.model.train()
        return result

    def score(self, corpus: Corpus, documents: list[str], max_tokens: int) -> dict[str, float]:
        exits = tuple(e for e in EVAL_EXITS if e < self.settings.num_layers)
        everything = set(range(self.settings.num_layers))
        nats, tokens, total_bytes = 0.0, 0, 0
        agree, overlap = dict.fromkeys(exits, 0.0), dict.fromkeys(exits, 0.0)
        for document in documents:
            ids = corpus.tokenizer.encode(document).ids
            for start in range(0, len(ids) - 1, self.settings.long_seq_len):
                piece = ids[start : start + self.settings.long_seq_len + 1]
                if len(piece) < 2 or tokens > max_tokens:
                    continue
                batch = torch.tensor([piece], device=self.device)
                hidden, at_exit = run_stack(self.model, batch[:, :-1], everything, exits)
                log_p = self.model.lm_head(hidden)[0].float().log_softmax(-1)
                nats += F.nll_loss(log_p, batch[0, 1:], reduction="sum").item()
                tokens += len(piece) - 1
                total_bytes += len(corpus.tokenizer.decode(piece[1:]).encode())
                for layer in exits:
                    log_q = self.model.lm_head(at_exit[layer])[0].float().log_softmax(-1)
                    agree[layer] += (log_q.argmax(-1) == log_p.argmax(-1)).sum().item()
                    overlap[layer] += torch.minimum(log_q, log_p).exp().sum().item()
        scores = {"bits_per_byte": nats / math.log(2) / total_bytes}
        for layer in exits:
            scores[f"agreement_{layer}"] = agree[layer] / tokens
            scores[f"overlap_{layer}"] = overlap[layer] / tokens
        return scores

    def save(self, path: Path) -> None:
        state = {
            "identity": self._identity(),
            "masters": self.masters,
            "optimisers": [o.state_dict() for o in self.optimisers],
            "rng": self.rng.bit_generator.state,
            "steps": self.steps,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "log": self.log,
        }
        partial = path.with_suffix(".partial")
        write_state(partial, state)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Go on from what ``save`` wrote.

        Raises:
            AnotherRunError: it is of another run; the first setting that differs is named.
        """
        state = torch.load(path, weights_only=True, map_location=self.device)
        check_same(path, state.get("identity", {}), self._identity())
        for master, saved in zip(self.masters, state["masters"], strict=True):
            master.copy_(saved)
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                parameter.copy_(master)
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.rng.bit_generator.state = state["rng"]
        self.steps, self.tokens = state["steps"], state["tokens"]
        self.seconds, self.log = state["seconds"], state["log"]

    def _identity(self) -> dict[str, Any]:
        kept = {k: v for k, v in asdict(self.settings).items() if k not in NOT_OF_THE_WEIGHTS}
        return kept | {"content of data": self.data}
