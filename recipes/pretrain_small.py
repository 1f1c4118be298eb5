"""Train a small Llama checkpoint that drafts well from its first layers.

    python recipes/pretrain_small.py --out runs/small                  # the built-in checkpoint
    python recipes/pretrain_small.py --out runs/mine --text my/files   # the same on your own text
    python recipes/pretrain_small.py --out runs/try --smoke            # one minute, tiny

Data: the running Python's standard library, held out by module path, and (``--math FILE``) GSM8K
questions. Loss: next-token cross-entropy at full depth plus, each step, one sampled early exit
through the shared head (recipes/pretrain_small.yaml), with layer dropout rising with depth.
Stopping is safe at any time: ``--out`` holds ``state.pt``, written atomically, and the same
command goes on from it. When time is up the folder ``--out/checkpoint`` is an ordinary Hugging
Face checkpoint with ``layerskip.json`` beside the weights.
"""

import argparse
import json
import math
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
import yaml
from corpus import (
    END_OF_TEXT,
    read_documents,
    read_questions,
    stdlib_files,
    text_files,
    train_tokenizer,
)
from export import export_checkpoint, plot_curves
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from layerskip.training.losses import exit_loss
from layerskip.training.schedules import layer_dropout_rate, warmup_stable_decay

ATTENTION_CHUNK = 128
SAVE_EVERY_SECONDS = 300.0
EVAL_EXITS = (1, 2, 3, 4)


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
    exit_weights: dict[int, float] | None = None
    math_share: float = 0.14
    seed: int = 0


SMOKE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_layers": 4,
    "num_heads": 2,
    "head_dim": 32,
    "minutes": 0.5,
    "batch_tokens": 1024,
    "micro_tokens": 1024,
    "seq_len": 128,
    "long_seq_len": 256,
    "exit_weights": {1: 0.5, 2: 0.5},
}


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
    batch, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    group, chunk = heads // kv_heads, min(ATTENTION_CHUNK, length)
    keys = key.reshape(batch * kv_heads, length, dim).transpose(1, 2)
    values = value.reshape(batch * kv_heads, length, dim)
    folded = (query * scaling).view(batch, kv_heads, group, length, dim)
    bias = torch.full((chunk, chunk), float("-inf"), dtype=query.dtype).triu(1)
    outputs = []
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        rows = folded[:, :, :, start:end].reshape(batch * kv_heads, -1, dim)
        scores = (rows @ keys[:, :, :end]).view(-1, group, end - start, end)
        scores[..., start:] += bias[: end - start, : end - start]
        weights = scores.softmax(-1).view(batch * kv_heads, -1, end)
        outputs.append((weights @ values[:, :end]).view(batch, heads, end - start, dim))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


class Corpus:
    """Token streams: training code and math, and held-out documents with their byte counts."""

    def __init__(self, args: argparse.Namespace, settings: Settings, out: Path) -> None:
        files = stdlib_files() if args.text is None else text_files(args.text)
        train, self.held_out = read_documents(files)
        if not train or not self.held_out:
            raise SystemExit(f"--text {args.text}: too little text to train on and hold out")
        questions = read_questions(args.math) if args.math else []
        self.math_held_out = read_questions(args.math_held_out) if args.math_held_out else []
        path = out / "tokenizer.json"
        if path.exists():
            self.tokenizer = Tokenizer.from_file(str(path))
        else:
            self.tokenizer = train_tokenizer([*train.values(), *questions], settings.vocab_size)
            self.tokenizer.save(str(path))
        names = sorted(train)
        random.Random(settings.seed).shuffle(names)
        self.code = self.encode(train[name] for name in names)
        self.math = self.encode(questions) if questions else None

    def encode(self, texts: Iterator[str] | list[str]) -> np.ndarray:
        """One uint16 stream, documents separated by the end-of-text token."""
        end = self.tokenizer.token_to_id(END_OF_TEXT)
        encoded = self.tokenizer.encode_batch_fast(list(texts))
        return np.concatenate([np.array([*e.ids, end], dtype=np.uint16) for e in encoded])

    def batch(self, rng: np.random.Generator, rows: int, length: int, math_share: float) -> Tensor:
        """``(rows, length + 1)`` int64 ids, each row a random crop."""
        crops = []
        for _ in range(rows):
            use_math = self.math is not None and rng.random() < math_share
            stream = self.math if use_math else self.code
            start = int(rng.integers(0, max(1, len(stream) - length - 1)))
            crops.append(np.resize(stream[start : start + length + 1], length + 1))
        return torch.from_numpy(np.stack(crops).astype(np.int64))


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
    """Weights in bfloat16 for the passes, their masters in float32 for the optimisers."""

    def __init__(self, settings: Settings, device: str) -> None:
        self.settings, self.device = settings, device
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
        micro_steps = max(1, settings.batch_tokens // settings.micro_tokens)
        totals = np.zeros(2)
        for _ in range(micro_steps):
            rows = max(1, settings.micro_tokens // length)
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
        early = torch.zeros((), device=full.device)
        if exit_layer:
            exit_logits = self.model.lm_head(at_exit[exit_layer]).flatten(0, 1)
            early = exit_loss(exit_logits, logits, labels, distil=self.settings.distil)
        ((full + self.settings.early_exit * early) * share).backward()
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
            "settings": asdict(self.settings),
            "masters": self.masters,
            "optimisers": [o.state_dict() for o in self.optimisers],
            "rng": self.rng.bit_generator.state,
            "steps": self.steps,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "log": self.log,
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True, map_location=self.device)
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


def read_settings(args: argparse.Namespace) -> Settings:
    values = {} if args.smoke else yaml.safe_load(args.config.read_text(encoding="utf-8"))
    settings = replace(Settings(), **(SMOKE if args.smoke else values))
    given = {f.name: getattr(args, f.name, None) for f in fields(Settings)}
    return replace(settings, **{key: value for key, value in given.items() if value is not None})


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--config", type=Path, default=Path(__file__).with_suffix(".yaml"))
    parser.add_argument("--text", type=Path, help="train on the text files under this folder")
    parser.add_argument("--math", type=Path, help="GSM8K-style JSON lines to train on")
    parser.add_argument("--math-held-out", type=Path, help="the same, to evaluate on")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, half a minute")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for field in fields(Settings):
        if field.name != "exit_weights":
            kind = type(getattr(Settings(), field.name))
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    settings, console = read_settings(args), Console()
    args.out.mkdir(parents=True, exist_ok=True)
    corpus = Corpus(args, settings, args.out)
    trainer, state = Trainer(settings, args.device), args.out / "state.pt"
    if state.exists():
        trainer.load(state)
        console.print(f"going on from step {trainer.steps}, {trainer.seconds / 60:.1f} minutes")
    stopped = train(trainer, corpus, state, console)
    if stopped:
        console.print(f"stopped at step {trainer.steps}; the same command goes on from {state}")
        return
    final = trainer.evaluate(corpus, max_tokens=10**9)
    trainer.log.append({"step": trainer.steps, "tokens": trainer.tokens, **final})
    trainer.save(state)
    plot_curves(trainer.log, args.out / "curves.png")
    export_checkpoint(trainer, corpus, final, args.out / "checkpoint")
    console.print_json(json.dumps(final))


def train(trainer: Trainer, corpus: Corpus, state: Path, console: Console) -> bool:
    """Run until the budget is spent; True if a signal stopped it first."""
    stop = False

    def request_stop(*_: object) -> None:
        nonlocal stop
        stop = True

    signal.signal(signal.SIGINT, request_stop)
    signal.signal(signal.SIGTERM, request_stop)
    saved, columns = time.monotonic(), (TextColumn("{task.description}"), BarColumn())
    bar = Progress(*columns, MofNCompleteColumn(), TimeRemainingColumn(), console=console)
    with bar, state.with_name("log.jsonl").open("a", encoding="utf-8") as log:
        task = bar.add_task("training (seconds)", total=int(60 * trainer.settings.minutes))
        while trainer.progress() < 1.0 and not stop:
            record = trainer.step(corpus)
            due = time.monotonic() - saved > SAVE_EVERY_SECONDS
            if due:
                record |= trainer.evaluate(corpus)
            trainer.log.append(record)
            log.write(json.dumps(record) + "\n")
            log.flush()
            bar.update(task, completed=int(trainer.seconds))
            bar.update(task, description=f"step {record['step']} loss {record['loss']:.3f}")
            if due:
                trainer.save(state)
                saved = time.monotonic()
        trainer.save(state)
    return trainer.progress() < 1.0


if __name__ == "__main__":
    main()
