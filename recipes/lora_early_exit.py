"""Make early exits worth taking: LayerSkip's training, through LoRA.

    python recipes/lora_early_exit.py data=stdlib                      # the built-in checkpoint
    python recipes/lora_early_exit.py model=PATH data=train.jsonl      # lora_early_exit.yaml
    accelerate launch recipes/lora_early_exit.py model=PATH data=...   # on several processes
    layerskip generate runs/lora_early_exit/model --prompt "..."       # use what it made

LoRA on every linear layer, layer dropout that rises with depth, and the losses of chosen exits
through the shared head. This changes the model: the table at the end says how much, and what it
buys. Stopping is safe at any time; the same command goes on from the last checkpoint, to the
weights that an uninterrupted run would have.
"""

import gc
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data import Corpus, prompts
from early_exit_settings import Settings
from early_exit_trainer import Trainer, in_evaluation
from evaluation import Measurement, measure
from exits import evaluate_exits
from packing import check_apart, pack
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
    read_corpus,
    run_script,
    source_folder,
)
from settings import command
from settings import save as save_settings
from table import Result, peak_memory

from layerskip import DraftPlan, SelfSpeculativeLM
from layerskip.checkpoint import PLAN_FILE, load_config
from layerskip.families import position_limit
from layerskip.fingerprint import fingerprint
from layerskip.model import DecoderStack
from layerskip.plan import PlanFile

MAX_PROMPT_TOKENS = 128


def main(argv: Sequence[str] | None = None) -> None:
    """Run the recipe."""
    run_script(__file__, Settings, run, sys.argv[1:] if argv is None else argv, __doc__)


def run(settings: Settings) -> None:
    """Train, unless that is done already, write the result, and measure it."""
    out, console = Path(settings.out), plain_console()
    folder = source_folder(settings.model)
    if (out / "model").resolve() == folder:
        raise ValueError(f"model {str(folder)!r} is where this run's result goes; give another out")
    settings.check_depth(load_config(folder).num_hidden_layers)
    accelerator = accelerator_of(settings)
    model, tokenizer = load_model(folder, settings.dtype)
    check_positions(model.config, settings.seq_len)
    corpus = read_corpus(settings, tokenizer)
    pad = tokenizer.eos_token_id or 0
    check_apart(model, model.config.vocab_size)
    packed = pack(corpus.train, settings.seq_len, pad_id=pad)
    trainer = Trainer(settings, model, packed, accelerator)
    go_on(trainer, console)
    if accelerator.is_main_process:
        out.mkdir(parents=True, exist_ok=True)
        save_settings(settings, out / "settings.yaml")
        console.print(corpus.report())
    accelerator.wait_for_everyone()
    stopped = fit(
        trainer,
        console,
        evaluate=held_out_scores(trainer, corpus),
        said=lambda record: f"loss {record['loss']:.3f}",
    )
    accelerator.end_training()
    if not accelerator.is_main_process:
        return
    if stopped:
        end_stopped(trainer, stopped, console)
    details = facts(trainer)
    write_result(trainer, tokenizer, folder, out / "model")
    seconds, peak = trainer.seconds, peak_memory()
    del trainer, model
    gc.collect()
    before, after = compare(settings, folder, out / "model", corpus, console)
    title = f"lora_early_exit on {settings.model}"
    leave_table(Result(title, before, after, seconds, peak, command(), details), out, console)


def held_out_scores(trainer: Trainer, corpus: Corpus) -> Callable[[], dict[str, Any]]:
    """What the exits give along held-out text, with the adapters as they are then."""
    settings = trainer.settings
    stack = DecoderStack(trainer.peft, exact=False) if trainer.accelerator.is_main_process else None

    def evaluate() -> dict[str, Any]:
        assert stack is not None, "the main process alone evaluates"
        with in_evaluation(trainer):
            report = evaluate_exits(
                stack,
                corpus.held_out,
                settings.exits,
                temperature=settings.temperature,
                max_tokens=settings.eval_tokens,
                max_sample_tokens=settings.seq_len,
            )
        return {
            "acceptance": {e: score.acceptance for e, score in report.exits.items()},
            "held_out_loss": report.loss,
            "held_out_perplexity": report.perplexity,
        }

    return evaluate


def write_result(trainer: Trainer, tokenizer: Any, folder: Path | str, result: Path) -> None:
    """A folder that transformers (and peft, where the adapter is kept) loads as usual, with the
    trained exits in its config, and a plan beside the weights. The trainer is spent."""
    settings, partial = trainer.settings, result.with_name(result.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    peft, dtype = trainer.peft.cpu(), trainer.peft.get_base_model().dtype
    if settings.merge:
        # Added up in float32 and rounded once.
        merged = peft.float().merge_and_unload().to(dtype)
        merged.config.early_exit_layers = list(settings.exits)
        merged.save_pretrained(partial)
    else:
        peft.peft_config["default"].base_model_name_or_path = str(folder)
        peft.save_pretrained(partial, save_embedding_layers=False)
    tokenizer.save_pretrained(partial)
    write_plan(settings, partial, PlanFile(plan_of(trainer.depth, settings.exits[0])))
    shutil.rmtree(result, ignore_errors=True)
    partial.rename(result)


def plan_of(depth: int, exit_layer: int) -> DraftPlan:
    return DraftPlan.exiting(num_layers=depth, exit_layer=exit_layer)


def write_plan(settings: Settings, folder: Path, file: PlanFile) -> None:
    """``layerskip.json``, with the trained exits among its measurements."""
    trained = {**file.measurements, "trained_exits": list(settings.exits)}
    PlanFile(
        file.plan,
        fingerprint=file.fingerprint,
        acceptance=file.acceptance,
        measurements=trained,
    ).save(folder / PLAN_FILE)


def compare(
    settings: Settings, folder: Path | str, result: Path, corpus: Corpus, console: Console
) -> tuple[Measurement, Measurement]:
    """The model before and after, each at its best exit; and the plan that this chooses."""
    measured = []
    for name, path in (("before", folder), ("after", result)):
        model, tokenizer, _, _ = SelfSpeculativeLM.load_parts(path, num_draft_tokens=0)
        depth = model.config.num_hidden_layers
        some = range(1, depth, max(1, depth // 8))
        begun = prompts(
            corpus.held_out,
            limit=settings.final_prompts,
            max_prompt_tokens=min(MAX_PROMPT_TOKENS, position_limit(model.config) // 2),
            seed=settings.seed,
        )
        found = measure(
            settings,
            model,
            tokenizer,
            corpus.held_out,
            begun,
            sorted({*settings.exits, *some}),
            cost_seconds=settings.cost_seconds,
            on_progress=lambda what, name=name: console.print(f"{name}: {what}"),
        )
        measured.append(found)
    before, after = measured
    speed = next(s for s in after.speeds if s.temperature == settings.temperature)
    plan = PlanFile(
        plan_of(depth, after.exit_layer),
        fingerprint=fingerprint(model),
        acceptance=speed.by_position,
        measurements={"before": before.to_dict(), "after": after.to_dict()},
    )
    write_plan(settings, result, plan)
    return before, after


if __name__ == "__main__":
    main()
