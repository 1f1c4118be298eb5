"""Train what runs only in the draft: the checkpoint's own output stays bit-identical.

    python recipes/exit_adapter.py data=stdlib                       # the built-in checkpoint
    python recipes/exit_adapter.py model=PATH data=prompts.jsonl     # recipes/exit_adapter.yaml
    accelerate launch recipes/exit_adapter.py model=PATH data=...    # on several processes
    layerskip generate PATH --exit-adapter runs/exit_adapter         # use it

The model is frozen. An exit norm, a low-rank addition to the head and one transformer block (or a
low-rank bridge) learn to draft from a shallow exit, on the model's own continuations of the data's
prompts and on the data's text. Stopping is safe at any time; the same command goes on from the last
checkpoint, to the weights that an uninterrupted run would have.
"""

import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import adapter_measure
import torch
from accelerate import Accelerator
from adapter_settings import Settings
from adapter_trainer import Trainer, identity, weights_hash
from checkpoints import check_same, checkpoints
from continuations import beginnings, num_prompts, written
from data import UNTRAINED, Corpus, Sample, Samples, prompts
from evaluation import measure
from packing import Packed, check_apart, pack
from rich.console import Console
from running import (
    accelerator_of,
    check_positions,
    end_stopped,
    facts,
    fit,
    go_on,
    leave_table,
    load_model,
    plain_console,
    progress_bar,
    read_corpus,
    run_script,
    source_folder,
    train,
)
from settings import command
from settings import save as save_settings
from table import Result, peak_memory

from layerskip import SelfSpeculativeLM
from layerskip.checkpoint import PLAN_FILE
from layerskip.exit_adapter import ExitAdapter
from layerskip.families import position_limit
from layerskip.files import read_json, write_json
from layerskip.model import pack_model
from layerskip.vocabulary import choose_vocabulary

MAX_PROMPT_TOKENS = 256
HELD_OUT_SEED = 1_000_000  # continuations of held-out prompts are others than those trained on


@dataclass(frozen=True)
class Texts:
    """What a run reads.

    Attributes:
        corpus: the data, with continuations among what is trained on.
        packed, held_out: rows of its two sides.
    """

    corpus: Corpus
    packed: Packed
    held_out: Packed


def main(argv: Sequence[str] | None = None) -> None:
    """Run the recipe."""
    run_script(__file__, Settings, run, sys.argv[1:] if argv is None else argv, __doc__)


def run(settings: Settings) -> None:
    """Train, unless that is done already, write the adapter, and measure it."""
    out, console = Path(settings.out), plain_console()
    folder = source_folder(settings.model)
    accelerator = accelerator_of(settings)
    model, tokenizer = load_model(folder, settings.dtype)
    model.to(accelerator.device)
    check_fits(settings, model.config)
    check_apart(model, model.config.vocab_size)
    pack_model(model)  # as from_pretrained does: costs are of the backend that decodes later
    before = weights_hash(model)
    with accelerator.main_process_first():
        texts = read_texts(settings, model, tokenizer, console)
    if accelerator.is_main_process:
        out.mkdir(parents=True, exist_ok=True)
        console.print(texts.corpus.report())
    accelerator.wait_for_everyone()
    layer = settings.exit_layer or chosen_exit(settings, model, texts, accelerator)
    trainer = Trainer(settings, model, texts.packed, accelerator, exit_layer=layer)
    go_on(trainer, console)
    if accelerator.is_main_process:
        save_settings(settings, out / "settings.yaml")
    accelerator.wait_for_everyone()
    stopped = fit(
        trainer,
        console,
        evaluate=partial(held_out_scores, trainer, texts.held_out),
        said=lambda record: f"acceptance {record['text_acceptance']:.3f}",
    )
    accelerator.end_training()
    if not accelerator.is_main_process:
        return
    if stopped:
        end_stopped(trainer, stopped, console)
    details = adapter_measure.calibrate(trainer, texts.held_out) | facts(trainer)
    adapter_measure.decoding(trainer.adapter, model).save(out)
    check_frozen(model, before)
    seconds, peak = trainer.seconds, peak_memory()
    del trainer
    gc.collect()
    conclude(settings, model, tokenizer, texts.corpus, details, (seconds, peak), console)
    check_frozen(model, before)


def check_fits(settings: Settings, config: Any) -> None:
    """Raise unless the model has these exits, and positions for the rows."""
    num_layers = config.num_hidden_layers
    for layer in (settings.exit_layer, *settings.exits):
        if layer >= num_layers:
            raise ValueError(
                f"exit layer {layer} is none of this model's; an exit lies in "
                f"[1, {num_layers - 1}] (its {num_layers} layers are full depth)"
            )
    drafted = settings.rollout_tokens if settings.rollout_every else 0
    check_positions(config, settings.seq_len, behind=drafted)


def check_frozen(model: Any, before: str) -> None:
    """Raise if a bit of the model has changed: what is promised would not hold."""
    if weights_hash(model) != before:
        raise RuntimeError("the model's weights have changed; report this with the model's name")


def read_texts(settings: Settings, model: Any, tokenizer: Any, console: Console) -> Texts:
    """The data ("stdlib" is Python's) divided by content, and what the model writes after their
    prompts."""
    own = settings.continuations > 0
    corpus = read_corpus(settings, tokenizer, allow_prompts=own)
    train = Samples(s for s in corpus.train if settings.text and learns(s))
    held_out = Samples(s for s in corpus.held_out if learns(s))
    if own:
        lm = SelfSpeculativeLM(model, tokenizer)
        for sample in continued(settings, lm, corpus.train, console):
            train.append(sample)
        most = most_prompt_tokens(settings, lm)
        bare = [s.ids[-most:] for s in corpus.held_out if not learns(s)][: settings.final_prompts]
        for sample in follow(settings, lm, bare, HELD_OUT_SEED, console):
            held_out.append(sample)
    pad = tokenizer.eos_token_id or 0
    sides = [pack(side, settings.seq_len, pad_id=pad) for side in (train, held_out)]
    return Texts(Corpus(train, held_out, corpus.bad), *sides)


def learns(sample: Sample) -> bool:
    """Whether a row is more than a prompt."""
    return any(label != UNTRAINED for label in sample.labels[1:])


def continued(
    settings: Settings, lm: SelfSpeculativeLM, samples: Sequence[Sample], console: Console
) -> list[Sample]:
    """The model's own text after beginnings of the data."""
    count = num_prompts(settings.continuations, settings.continuation_length)
    most = most_prompt_tokens(settings, lm)
    begun = beginnings(samples, count, most=most, seed=settings.seed)
    return follow(settings, lm, begun, 0, console)


def most_prompt_tokens(settings: Settings, lm: SelfSpeculativeLM) -> int:
    """What is kept of a prompt, its end, so that what follows has room behind it."""
    length = settings.continuation_length
    most = min(MAX_PROMPT_TOKENS, settings.seq_len - length, lm.stack.max_positions - length)
    if most < 1:
        raise ValueError(
            f"continuation_length ({length}) leaves no room for a prompt in seq_len "
            f"({settings.seq_len}); lower the one or raise the other"
        )
    return most


def follow(
    settings: Settings,
    lm: SelfSpeculativeLM,
    begun: Sequence[Sequence[int]],
    seed: int,
    console: Console,
) -> list[Sample]:
    """What the model writes after prompts, kept under ``out``."""
    with progress_bar(console) as bar:
        task = bar.add_task("the model's own text (prompts)", total=len(begun))
        return written(
            lm,
            begun,
            Path(settings.out) / "continuations",
            max_new_tokens=settings.continuation_length,
            temperature=settings.temperature,
            seed=settings.seed + seed,
            on_progress=lambda done, total: bar.update(task, completed=done),
        )


def held_out_scores(trainer: Trainer, held_out: Packed) -> dict[str, Any]:
    """What the adapter gives along held-out rows, as it is now."""
    found = trainer.evaluate(held_out, trainer.settings.eval_tokens)
    return {"acceptance": {trainer.exit_layer: found["sampled"]}, "greedy": found["greedy"]}


def chosen_exit(settings: Settings, model: Any, texts: Texts, accelerator: Accelerator) -> int:
    """The exit whose adapter is predicted fastest after a few steps; kept in ``out``.

    Raises:
        ValueError: the run has checkpoints, and other settings than its choice was made with.
    """
    path = Path(settings.out) / "exits.json"
    made_with = identity(settings, texts.packed, model)
    del made_with["steps"]  # the search has its own
    made_with |= {"search_steps": settings.search_steps, "exits": list(settings.exits)}
    if path.exists():
        kept = read_json(path, "choice of an exit")
        if checkpoints(path.parent / "checkpoints"):
            check_same(path, kept.get("made_with", {}), made_with)
        if kept.get("made_with") == made_with:
            return int(kept["chosen"])
    predicted: dict[str, float] = {}
    short = replace(settings, steps=settings.search_steps)
    for layer in settings.exits:
        trainer = Trainer(short, model, texts.packed, accelerator, exit_layer=layer)
        train(trainer, until=short.steps, stopping=lambda: 0, on_step=lambda record: None)
        adapter = adapter_measure.decoding(trainer.adapter, model)
        predicted[str(layer)] = adapter_measure.predicted(
            settings, model, adapter, texts.corpus.held_out
        )
        accelerator.free_memory()
    best = max(predicted, key=predicted.__getitem__)
    chosen = torch.tensor(int(best), device=accelerator.device)
    # Clocks differ: every process goes by the first one's.
    layer = int(accelerator.gather(chosen.reshape(1))[0])
    if accelerator.is_main_process:
        content = {"chosen": layer, "predicted_speedup": predicted, "made_with": made_with}
        write_json(path, content)
    accelerator.wait_for_everyone()
    return layer


def conclude(
    settings: Settings,
    model: Any,
    tokenizer: Any,
    corpus: Corpus,
    details: dict[str, Any],
    spent: tuple[float, int],
    console: Console,
) -> None:
    """Measure without and with the adapter, write it with what was found, print the table."""
    out, began = Path(settings.out), time.perf_counter()
    begun = prompts(
        corpus.held_out,
        limit=settings.final_prompts,
        max_prompt_tokens=min(MAX_PROMPT_TOKENS, position_limit(model.config) // 2),
        seed=settings.seed,
    )
    adapter = ExitAdapter.load(out, model)
    depth = model.config.num_hidden_layers
    before = measure(
        settings,
        model,
        tokenizer,
        corpus.held_out,
        begun,
        sorted({adapter.shape.exit_layer, *settings.exits, *range(1, depth, max(1, depth // 8))}),
        cost_seconds=adapter_measure.COST_SECONDS,
        on_progress=lambda what: console.print(f"before: {what}"),
    )
    after, file = adapter_measure.measure_adapter(
        settings,
        model,
        tokenizer,
        adapter,
        corpus.held_out,
        begun,
        vocabulary=draft_vocabulary(settings, tokenizer, corpus, model.config.vocab_size),
        on_progress=lambda what: console.print(f"after: {what}"),
    )
    file.save(out / PLAN_FILE)
    details["measured in seconds"] = round(time.perf_counter() - began, 1)
    adapter.measurements = {"before": before.to_dict(), "after": after.to_dict(), **details}
    adapter.save(out)
    result = Result(f"exit_adapter on {settings.model}", before, after, *spent, command(), details)
    leave_table(result, out, console)


def draft_vocabulary(
    settings: Settings, tokenizer: Any, corpus: Corpus, vocab_size: int
) -> tuple[int, ...] | None:
    """The most frequent tokens of what was trained on; None: all of them."""
    if not settings.draft_vocabulary:
        return None
    size, eos = settings.draft_vocabulary, tokenizer.eos_token_id
    ids = choose_vocabulary(
        (sample.ids for sample in corpus.train),
        vocab_size=vocab_size,
        size=size,
        always=[] if eos is None else [eos],
    )
    return ids if len(ids) < vocab_size else None


if __name__ == "__main__":
    main()
