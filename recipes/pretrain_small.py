"""Train a small Llama checkpoint that drafts well from its first layers.

    python recipes/pretrain_small.py --out runs/small                  # one like the built-in one
    python recipes/pretrain_small.py --out runs/mine --text my/files   # the same on your own text
    python recipes/pretrain_small.py --out runs/try --smoke            # half a minute, tiny

Data: the running Python's standard library, held out by module path, and (``--math FILE``) GSM8K
questions. Loss: next-token cross-entropy at full depth plus, each step, one sampled early exit
through the shared head (recipes/pretrain_small.yaml), with layer dropout rising with depth.
Stopping is safe at any time: ``--out`` holds ``state.pt``, written atomically, and the same
command goes on from it. When time is up the folder ``--out/checkpoint`` is an ordinary Hugging
Face checkpoint with ``layerskip.json`` beside the weights.
"""

import argparse
import json
import time
from dataclasses import fields
from pathlib import Path

import torch
from checkpoints import StopRequest, alone_in, loading
from corpus import Corpus
from export import export_checkpoint, plot_curves
from rich.console import Console
from run_log import drop_later
from running import ending_in_a_sentence, plain_console, progress_bar
from settings import read
from trainer import Settings, Trainer

SAVE_EVERY_SECONDS = 300.0
LOG = "log.jsonl"
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


def read_settings(args: argparse.Namespace) -> Settings:
    flags = {f.name: getattr(args, f.name, None) for f in fields(Settings)}
    given = {name: value for name, value in flags.items() if value is not None}
    if args.smoke:
        return Settings(**SMOKE | given)
    return read(Settings, args.config, [f"{name}={value}" for name, value in given.items()])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--config", type=Path, default=Path(__file__).with_suffix(".yaml"))
    parser.add_argument("--text", type=Path, help="train on the text files under this folder")
    parser.add_argument("--math", type=Path, help="GSM8K-style JSON lines to train on")
    parser.add_argument("--math-held-out", type=Path, help="the same, to evaluate on")
    parser.add_argument("--note", default="", help="a line for the model card")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, half a minute")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for field in fields(Settings):
        if field.name != "exit_weights":
            kind = type(getattr(Settings(), field.name))
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    with ending_in_a_sentence("pretrain_small"), alone_in(args.out):
        run(args, plain_console())


def run(args: argparse.Namespace, console: Console) -> None:
    """Train until the budget is spent, or go on with that, and write the checkpoint."""
    settings = read_settings(args)
    corpus = Corpus(
        args.out,
        vocab_size=settings.vocab_size,
        seed=settings.seed,
        text=args.text,
        math=args.math,
        math_held_out=args.math_held_out,
    )
    if corpus.found:
        console.print(f"with the tokenizer that is in {args.out}")
    trainer, state = Trainer(settings, args.device, corpus.digest), args.out / "state.pt"
    if state.exists():
        with loading(state, "begin again"):
            trainer.load(state)
        console.print(f"going on from step {trainer.steps}, {trainer.seconds / 60:.1f} minutes")
    else:
        trainer.save(state)  # it knows its text, and with it the tokenizer's
    corpus.keep_tokenizer()
    drop_later(args.out / LOG, trainer.steps)
    stopped = train(trainer, corpus, state, console)
    if stopped:
        console.print(f"stopped at step {trainer.steps}; the same command goes on from {state}")
        raise SystemExit(128 + stopped)  # a shell must not go on to what needs the checkpoint
    final = trainer.evaluate(corpus, max_tokens=10**9)
    trainer.log.append({"step": trainer.steps, "tokens": trainer.tokens, **final})
    trainer.save(state)
    plot_curves(trainer.log, args.out / "curves.png")
    export_checkpoint(trainer, corpus, final, args.out / "checkpoint", note=args.note)
    console.print_json(json.dumps(final))


def train(trainer: Trainer, corpus: Corpus, state: Path, console: Console) -> int:
    """Run until the budget is spent; the number of the signal that stopped it, 0: none did."""
    saved, path = time.monotonic(), state.with_name(LOG)
    with (
        StopRequest() as request,
        progress_bar(console) as bar,
        path.open("a", encoding="utf-8") as log,
    ):
        task = bar.add_task("training (seconds)", total=int(60 * trainer.settings.minutes))
        while trainer.progress() < 1.0 and not request.number:
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
    return request.number


if __name__ == "__main__":
    main()
