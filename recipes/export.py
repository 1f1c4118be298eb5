"""Write a trained model as an ordinary Hugging Face folder, with its plan, card and curves."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")
import torch
from corpus import END_OF_TEXT
from matplotlib import pyplot as plt
from rich.progress import track
from transformers import GenerationConfig, PreTrainedTokenizerFast

from layerskip import SamplingParams, SelfSpeculativeLM
from layerskip.calibration import Text
from layerskip.files import write_text
from layerskip.params import SHARPNESS
from layerskip.prompts import held_out_code
from layerskip.timing import Way, confidence_points

if TYPE_CHECKING:
    from corpus import Corpus
    from trainer import Trainer

SHARD_SIZE = "14MB"
CALIBRATION_TEXTS, CALIBRATION_TOKENS, CALIBRATION_DRAFT = 64, 64, 8  # tokens of a text, a draft
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}Question: {{ m['content'] }}\n"
    "{% elif m['role'] == 'assistant' %}Answer: {{ m['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)


def export_checkpoint(
    trainer: "Trainer",
    corpus: "Corpus",
    scores: dict[str, float],
    folder: Path,
    *,
    note: str = "",
) -> None:
    """Weights in bfloat16 shards, tokenizer, generation config, ``layerskip.json`` and card."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = trainer.model
    model.config.dtype = torch.bfloat16
    model.set_attn_implementation("sdpa")
    model.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0)
    model.save_pretrained(partial, max_shard_size=SHARD_SIZE)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=corpus.tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=trainer.settings.max_positions,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(partial)
    trained = trainer.settings.exit_weights if trainer.settings.early_exit else None
    exits = sorted(int(e) for e, weight in (trained or {}).items() if weight)
    best = _best_exit(scores, exits)
    plan = {
        "version": 1,
        "num_layers": trainer.settings.num_layers,
        "draft_layers": list(range(best)),
        "acceptance": [round(acceptance_at(scores, best), 3)],
        "num_draft_tokens": "auto",
        "trained_exits": exits,
        "held_out_modules": sorted(corpus.held_out),
        "scores": scores,
    }
    (partial / "layerskip.json").write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
    card = model_card(trainer, corpus, scores, note)
    (partial / "README.md").write_text(card, encoding="utf-8")
    calibrate(partial)
    plot_curves(trainer.log, partial / "curves.png")
    shutil.rmtree(folder, ignore_errors=True)
    for path in partial.iterdir():
        path.chmod(0o644)
    partial.rename(folder)


def calibrate(folder: Path) -> None:
    """Measure what a controller begins with of its drafts' confidences, after functions that were
    held out, and note it in the folder's ``layerskip.json``. A Python that has none of them notes
    nothing, nor does a model that none leaves room in."""
    path = folder / "layerskip.json"
    plan = json.loads(path.read_text(encoding="utf-8"))
    examples = held_out_code(plan["held_out_modules"], CALIBRATION_TEXTS)
    if not examples:
        return
    lm = SelfSpeculativeLM.from_pretrained(folder)
    # Not by `lm.encode`, which refuses a prompt that leaves no room.
    prompts = [lm.tokenizer(example.prompt)["input_ids"] for example in examples]
    texts = [  # of what follows a prompt only the length counts
        Text((*ids, *[0] * CALIBRATION_TOKENS), len(ids), seed)
        for seed, ids in enumerate(prompts)
        if len(ids) + CALIBRATION_TOKENS <= lm.stack.max_positions
    ]
    if not texts:
        return
    way, found = Way(CALIBRATION_DRAFT), {}
    for kind, temperature in (("greedy", 0.0), ("sampled", 0.8)):
        sampling = SamplingParams(temperature=temperature)
        shown = track(texts, f"how sure {kind} drafts are")
        found[kind] = confidence_points(lm.stack, lm.plan, way, shown, sampling=sampling)
    content = json.dumps(plan | {"calibration": found, "sharpness": SHARPNESS}, indent=1) + "\n"
    write_text(path, content)


def acceptance_at(scores: Mapping[str, float], exit_layer: int) -> float:
    """What a controller begins with: the mean over the held-out texts of how often an exit's token
    is the model's, greedily and sampled."""
    names = (f"agreement_{exit_layer}", f"overlap_{exit_layer}")
    return fmean(value for name, value in scores.items() if name.endswith(names))


def _best_exit(scores: dict[str, float], exits: list[int]) -> int:
    """The shallowest trained exit at most 2 that accepts most; measure to do better."""
    shallow = [e for e in exits if e <= 2] or [1]
    return max(shallow, key=lambda e: scores.get(f"code_agreement_{e}", 0.0))


def model_card(trainer: "Trainer", corpus: "Corpus", scores: dict[str, float], note: str) -> str:
    """What the checkpoint is, was trained on, scores, and cannot do."""
    settings = trainer.settings
    count = sum(p.numel() for p in trainer.model.parameters())
    rows = "\n".join(f"| {name} | {value:.3f} |" for name, value in scores.items())
    note = f"- {note}\n" if note else ""
    modules = ", ".join(f"`{name}`" for name in sorted(corpus.held_out))
    return f"""---
license: apache-2.0
---
# layerskip small

A Llama of {settings.num_layers} layers and {count / 1e6:.1f} M parameters, trained from nothing by
`recipes/pretrain_small.py` so that its first layers draft well. It exists to try, test and measure
self-speculative decoding on any machine.

**What it cannot do**: it is far too small to write correct programs or to solve problems. It has
seen English only in documentation, comments and school-maths questions. Do not use its output.

- Data: {corpus.source}{_math_line(corpus)};
  {trainer.tokens / 1e6:.1f} M tokens seen. None of it is in this folder.
- Vocabulary: {settings.vocab_size} byte-level BPE tokens; documents end with `{END_OF_TEXT}`.
- Context: {settings.max_positions} positions.
- Loss: next token at full depth, plus {settings.early_exit:g} times the loss of one sampled early
  exit through the shared head: {settings.distil:g} KL from the detached full-depth distribution,
  {1 - settings.distil:.1f} cross-entropy. Full depth is pulled towards that exit with weight
  {settings.consistency:g} (`consistency_loss`). Layer dropout to {settings.layer_dropout:g} at
  the last layer. After LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710).
- Time: {trainer.seconds / 60:.0f} minutes on {trainer.device}, {trainer.steps} steps.
{note}
Held-out scores: bits per byte at full depth; by exit layer, `agreement` is the share of
teacher-forced positions where the exit's most likely token is the full model's, and `overlap` is
1 minus the total variation distance.

| score | value |
|---|---|
{rows}

![curves](curves.png)

Held out, by the SHA-256 of the module path: {modules}.
They are other files, not another world: a library repeats itself, so text from elsewhere scores
worse.
"""


def _math_line(corpus: "Corpus") -> str:
    return " and GSM8K training questions (MIT)" if corpus.math is not None else ""


def plot_curves(log: list[dict[str, Any]], path: Path) -> None:
    """Loss over tokens, and held-out scores over tokens, as one PNG."""
    steps = [r for r in log if "loss" in r]
    scored = [r for r in log if "code_bits_per_byte" in r]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    tokens = [r["tokens"] / 1e6 for r in steps]
    left.plot(tokens, [r["loss"] for r in steps], linewidth=0.7, label="full depth")
    early = [(t, r["exit_loss"]) for t, r in zip(tokens, steps, strict=True) if r["exit_layer"]]
    left.plot(
        *zip(*early, strict=True), ".", markersize=1.5, label="sampled exit"
    ) if early else None
    left.set(xlabel="million tokens", ylabel="loss (nats per token)", title="training")
    left.legend()
    for name in [k for r in scored[:1] for k in r if "bits_per_byte" in k or "agreement_2" in k]:
        points = [(r["tokens"] / 1e6, r[name]) for r in scored if name in r]
        right.plot(*zip(*points, strict=True), label=name)
    right.set(xlabel="million tokens", title="held out")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)
