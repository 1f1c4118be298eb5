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
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

from accelerate import Accelerator
from checkpoints import StopRequest, checkpoints
from data import Corpus, Samples, load, prompts
from early_exit_settings import Settings
from early_exit_trainer import Trainer, in_evaluation, train
from evaluation import Measurement, evaluate_exits, measure
from packing import check_apart, pack
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from run_log import RunLog
from settings import command, from_command_line
from settings import save as save_settings
from stdlib_text import STDLIB, stdlib_corpus
from table import Result, as_markdown, as_table, peak_memory
from table import save as save_table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from layerskip import DraftPlan, SelfSpeculativeLM
from layerskip.checkpoint import BUILTIN, PLAN_FILE, builtin_folder, load_config
from layerskip.files import write_text
from layerskip.fingerprint import fingerprint
from layerskip.model import DecoderStack
from layerskip.plan import PlanFile

CONFIG = Path(__file__).with_suffix(".yaml")
MAX_PROMPT_TOKENS = 128


def main(argv: Sequence[str] | None = None) -> None:
    """Run the recipe; mistakes of the user end it with one sentence."""
    first = (__doc__ or "").split("\n")[0]
    try:
        run(from_command_line(Settings, first, CONFIG, sys.argv[1:] if argv is None else argv))
    except ValueError as error:
        raise SystemExit(f"lora_early_exit: {error}") from None


def run(settings: Settings) -> None:
    """Train, unless that is done already, write the result, and measure it."""
    out, console = Path(settings.out), Console()
    folder = source_folder(settings.model)
    settings.check_depth(load_config(folder).num_hidden_layers)
    accelerator = Accelerator(
        mixed_precision=settings.mixed_precision, log_with="tensorboard", project_dir=out
    )
    model, tokenizer = load_model(folder, settings.dtype)
    corpus = read_corpus(settings, tokenizer)
    pad = tokenizer.eos_token_id or 0
    check_apart(model, model.config.vocab_size)
    packed = pack(corpus.train, settings.seq_len, pad_id=pad)
    trainer = Trainer(settings, model, packed, accelerator)
    found = checkpoints(out / "checkpoints")
    if found and not settings.resume:
        raise ValueError(f"{out} holds checkpoints; give resume=true to go on, or another out")
    if found:
        trainer.load(found[-1])
    if accelerator.is_main_process:
        out.mkdir(parents=True, exist_ok=True)
        save_settings(settings, out / "settings.yaml")
        console.print(corpus.report())
        if found:
            console.print(f"going on from step {trainer.steps} of {settings.steps}")
    accelerator.wait_for_everyone()
    stopped = fit(trainer, corpus, console)
    accelerator.end_training()
    if not accelerator.is_main_process:
        return
    if stopped:
        console.print(f"stopped at step {trainer.steps}; the same command goes on from there")
        return
    details = facts(trainer)
    write_result(trainer, tokenizer, folder, out / "model")
    seconds, peak = trainer.seconds, peak_memory()
    del trainer, model
    gc.collect()
    before, after = compare(settings, folder, out / "model", corpus, console)
    title = f"lora_early_exit on {settings.model}"
    result = Result(title, before, after, seconds, peak, command(), details)
    save_table(result, out / "table.json")
    write_text(out / "table.md", as_markdown(result) + "\n")
    console.print(as_table(result))


def source_folder(model: str) -> Path | str:
    """What transformers loads: a folder with its whole path, so that an adapter finds it again
    from anywhere, or a hub id."""
    if model == BUILTIN:
        return builtin_folder()
    return Path(model).resolve() if Path(model).is_dir() else model


def load_model(folder: Path | str, dtype: str) -> tuple[PreTrainedModel, Any]:
    """The model as transformers has it, and its tokenizer.

    Raises:
        ValueError: one of them cannot be loaded.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, RuntimeError, ImportError) as error:
        said = str(error).strip().split("\n")[0]
        raise ValueError(f"model {str(folder)!r} cannot be loaded: {said}") from None
    return cast(PreTrainedModel, model), tokenizer


def read_corpus(settings: Settings, tokenizer: Any) -> Corpus:
    """The data ("stdlib" is Python's), divided by content; or held-out texts of their own, none of
    which is trained on."""
    if settings.data == STDLIB:
        corpus = stdlib_corpus(tokenizer)
    else:
        corpus = load(settings.data, tokenizer, held_out_share=settings.held_out_share)
    if not settings.held_out:
        return corpus
    other = load(settings.held_out, tokenizer, held_out_share=settings.held_out_share)
    held_out = [*other.train, *other.held_out]
    known = {sample.ids for sample in held_out}
    samples = Samples()
    for sample in chain(corpus.train, corpus.held_out):
        if sample.ids not in known:
            samples.append(sample)
    return Corpus(samples, held_out, (*corpus.bad, *other.bad))


def fit(trainer: Trainer, corpus: Corpus, console: Console) -> bool:
    """Train with a bar, a log and checkpoints; True if a signal stopped it."""
    settings, accelerator = trainer.settings, trainer.accelerator
    out = Path(settings.out)
    log = RunLog(out, accelerator, step=trainer.steps)
    main_process = accelerator.is_main_process
    stack = DecoderStack(trainer.peft, exact=False) if main_process else None

    def evaluate() -> None:
        if stack is None:
            return
        with in_evaluation(trainer):
            report = evaluate_exits(
                stack,
                corpus.held_out,
                settings.exits,
                temperature=settings.temperature,
                max_tokens=settings.eval_tokens,
                max_sample_tokens=settings.seq_len,
            )
        acceptance = {e: score.acceptance for e, score in report.exits.items()}
        held_out = {"held_out_loss": report.loss, "held_out_perplexity": report.perplexity}
        log.add({"step": trainer.steps, "acceptance": acceptance, **held_out})
        log.plot()

    def on_step(record: dict[str, Any]) -> None:
        log.add(record)
        bar.update(task, completed=trainer.steps, description=f"loss {record['loss']:.3f}")
        if trainer.steps % settings.eval_every == 0 or trainer.steps == settings.steps:
            evaluate()
        if trainer.steps % settings.save_every == 0 and trainer.steps < settings.steps:
            trainer.save(out / "checkpoints")

    if trainer.steps == settings.steps:
        return False
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    progress = Progress(*columns, TimeRemainingColumn(), console=console, disable=not main_process)
    with StopRequest() as request, progress as bar:
        task = bar.add_task("training", total=settings.steps, completed=trainer.steps)
        if trainer.steps == 0:
            evaluate()
        stopped = train(
            trainer, until=settings.steps, stopping=lambda: request.asked, on_step=on_step
        )
        trainer.save(out / "checkpoints")
    return stopped


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
            max_prompt_tokens=MAX_PROMPT_TOKENS,
            seed=settings.seed,
        )
        found = measure(
            model,
            tokenizer,
            corpus.held_out,
            begun,
            sorted({*settings.exits, *some}),
            temperature=settings.temperature,
            max_new_tokens=settings.max_new_tokens,
            seed=settings.seed,
            max_tokens=settings.final_tokens,
            cost_seconds=settings.cost_seconds,
            on_progress=lambda what, name=name: console.print(f"{name}: {what}"),
        )
        measured.append(found)
    before, after = measured
    speed = next(s for s in after.speeds if s.temperature == settings.temperature)
    plan = PlanFile(
        plan_of(depth, after.exit_layer),
        fingerprint=fingerprint(DecoderStack(model, exact=False)),
        acceptance=speed.by_position,
        measurements={"before": before.to_dict(), "after": after.to_dict()},
    )
    write_plan(settings, result, plan)
    return before, after


def facts(trainer: Trainer) -> dict[str, Any]:
    """Further lines of the table."""
    rows = trainer.settings.batch_size * trainer.settings.seq_len
    return {
        "trained parameters": sum(p.numel() for p in trainer.trained),
        "steps": trainer.steps,
        "tokens per second": round(trainer.steps * rows / max(trainer.seconds, 1e-9), 1),
    }


if __name__ == "__main__":
    main()
