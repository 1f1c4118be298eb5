"""What both recipes do around their steps: what they read, going on, the bar, and what is left."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import torch
from accelerate import Accelerator
from checkpoints import STOPPING, StopRequest, alone_in, checkpoints, loading
from corpus import read_documents, stdlib_files
from data import Corpus, Sample, Samples, load, load_whole
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rows import Row
from run_log import RunLog
from safetensors import SafetensorError
from settings import RunSettings, from_command_line
from steps import Trainer
from table import Result, as_markdown, as_table, save
from tokens import encode
from transformers import PreTrainedModel

from layerskip import SelfSpeculativeLM
from layerskip.checkpoint import BUILTIN, builtin_folder, read_checkpoint
from layerskip.families import position_limit, ropes
from layerskip.files import write_text

S = TypeVar("S", bound=RunSettings)
STDLIB = "stdlib"  # as data: text that every machine has


def run_script(
    script: str,
    cls: type[S],
    run: Callable[[S], None],
    argv: Sequence[str],
    description: str | None,
) -> None:
    """Run a recipe by its command line; mistakes of the user end it with one sentence.

    Args:
        script: its file; the YAML of its name is read where no other is given.
        cls: its settings.
        argv: arguments without the script's name.
        description: its documentation, whose first line ``--help`` shows.
    """
    path = Path(script)
    first = (description or "").split("\n")[0]
    with ending_in_a_sentence(path.stem):
        settings = from_command_line(cls, first, path.with_suffix(".yaml"), argv)
        check_folder(settings.out)
        with alone_in(Path(settings.out)):
            run(settings)


@contextmanager
def ending_in_a_sentence(script: str) -> Iterator[None]:
    """Within it mistakes of the user, and Ctrl-C, end the process with one sentence."""
    try:
        yield
    except (ValueError, OSError, SafetensorError) as error:  # the last of full disks
        raise SystemExit(f"{script}: {error}") from None
    except KeyboardInterrupt:  # while nothing is trained; what was saved is whole
        print(f"{script}: interrupted; the same command goes on", file=sys.stderr)
        raise SystemExit(130) from None


def check_folder(out: str | Path) -> None:
    """Raise unless a folder is there or can be made: before a model is loaded and trained for it.

    Raises:
        ValueError: it cannot, or it is a model's own, whose plan a recipe's would replace.
    """
    path = Path(out)
    if (path / "config.json").exists():
        raise ValueError(f"out {out} is a model's folder (it holds config.json); give another")
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not there.is_dir():
        raise ValueError(f"out {out} cannot be made: {there} is no folder")
    if not os.access(there, os.W_OK):
        raise ValueError(f"out {out} cannot be made: folder {there} is not writable")


def accelerator_of(settings: RunSettings) -> Accelerator:
    """What spreads a run over processes, if there are several.

    Raises:
        ValueError: several were started, and do not work together.
    """
    made = Accelerator(
        mixed_precision=settings.mixed_precision,
        log_with="tensorboard",
        project_dir=Path(settings.out),
    )
    launched = "LOCAL_RANK" in os.environ  # a cluster may set the other by itself
    started = int(os.environ.get("WORLD_SIZE", "1")) if launched else 1
    if made.num_processes < started:
        raise ValueError(
            f"{started} processes were started, and accelerate has joined {made.num_processes}; "
            "start them with accelerate launch, on CPUs with torchrun and ACCELERATE_USE_CPU=true"
        )
    return made


def source_folder(model: str) -> Path | str:
    """What transformers loads: a folder with its whole path, so that an adapter finds it again
    from anywhere, or a hub id."""
    if model == BUILTIN:
        return builtin_folder()
    return Path(model).resolve() if Path(model).is_dir() else model


def load_model(folder: Path | str, dtype: str) -> tuple[PreTrainedModel, Any]:
    """The model as transformers has it, and its tokenizer.

    Raises:
        ValueError: one of them cannot be loaded, the model is an adapter over another, or decoding
            would refuse them: what is trained is measured and used by it.
    """
    model, tokenizer = read_checkpoint(
        folder,
        dtype=None if dtype == "auto" else dtype,
        hub={"cache_dir": None, "local_files_only": False},
    )
    if tokenizer is None:
        raise ValueError(f"model {str(folder)!r} has no tokenizer, which the data is read with")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"model {str(folder)!r} is an adapter over another model; merge it first (peft's "
            "merge_and_unload, or merge=true in the run that made it) and give what comes of it"
        )
    SelfSpeculativeLM(model, tokenizer, exact=False)
    return model, tokenizer


def check_positions(config: Any, seq_len: int, *, behind: int = 0) -> None:
    """Raise unless a model whose positions are a table has as many as a packed row may take.

    Args:
        behind: tokens that drafts add to a row.
    """
    most = position_limit(config) - behind
    if seq_len > most and not any(ropes(config)):
        room = f", {behind} of them for drafts" if behind else ""
        raise ValueError(
            f"seq_len={seq_len} is too long for this model's {most + behind} positions{room}; "
            f"give seq_len={most} or less"
        )


def read_corpus(settings: RunSettings, tokenizer: Any, *, allow_prompts: bool = False) -> Corpus:
    """The data ("stdlib" is Python's), divided by content; or held-out texts of their own, none of
    which is trained on.

    Args:
        allow_prompts: rows may have nothing to learn.

    Raises:
        ValueError: there is nothing to train on, or nothing to hold out.
    """
    if not settings.held_out:
        if settings.data == STDLIB:
            return stdlib_corpus(tokenizer)
        share = settings.held_out_share
        return load(settings.data, tokenizer, held_out_share=share, allow_prompts=allow_prompts)
    held_out, bad = load_whole(settings.held_out, tokenizer, allow_prompts=allow_prompts)
    known = {sample.ids for sample in held_out}
    if settings.data == STDLIB:
        corpus = stdlib_corpus(tokenizer)
        found: Iterable[Sample] = chain(corpus.train, corpus.held_out)
    else:
        found, more = load_whole(settings.data, tokenizer, allow_prompts=allow_prompts)
        bad = (*more, *bad)
    train = Samples(sample for sample in found if sample.ids not in known)
    if not train:
        raise ValueError(f"{settings.held_out} holds out every row of {settings.data}")
    return Corpus(train, held_out, bad)


def stdlib_corpus(tokenizer: Any) -> Corpus:
    """Modules of Python that ``pretrain_small.py`` trains on, and those that it holds out, as the
    built-in checkpoint does."""
    sides = []
    for documents in read_documents(stdlib_files()):
        rows = (Row("text", (documents[name],), name, 1) for name in sorted(documents))
        encoded = (encode(row, tokenizer) for row in rows)
        sides.append(Samples(sample for sample in encoded if isinstance(sample, Sample)))
    return Corpus(*sides, ())


def go_on(trainer: Trainer, console: Console) -> None:
    """Load the last checkpoint, if there is one."""
    settings, out = trainer.settings, Path(trainer.settings.out)
    found = checkpoints(out / "checkpoints")
    if found and not settings.resume:
        raise ValueError(f"{out} holds checkpoints; give resume=true to go on, or another out")
    if found:
        before = f"go on from {found[-2].name}" if len(found) > 1 else "begin again"
        with loading(found[-1], before):
            trainer.load(found[-1])
        if trainer.accelerator.is_main_process:
            console.print(f"going on from step {trainer.steps} of {settings.steps}")


def train(
    trainer: Trainer,
    *,
    until: int,
    stopping: Callable[[], int],
    on_step: Callable[[dict[str, Any]], None],
) -> int:
    """Take steps up to ``until``, or to the one in which a signal came to any process, the last
    one, too: what follows takes minutes.

    Args:
        stopping: number of the signal that has come to this process; 0: none.

    Returns:
        That of the signal which stopped it, on every process; 0: none.
    """
    while trainer.steps < until:
        on_step(trainer.step())
        came = came_to_any(trainer.accelerator, stopping())
        if came:
            return came
    return 0


def came_to_any(accelerator: Accelerator, number: int) -> int:
    """The signal that came to any process, by the one that came to this; 0: none."""
    asked = torch.tensor([float(number == n) for n in STOPPING], device=accelerator.device)
    counts = cast(torch.Tensor, accelerator.reduce(asked, "sum")).tolist()
    return next((int(n) for n, count in zip(STOPPING, counts, strict=True) if count), 0)


def fit(
    trainer: Trainer,
    console: Console,
    *,
    evaluate: Callable[[], dict[str, Any]],
    said: Callable[[dict[str, Any]], str],
) -> int:
    """Train with a bar, a log and checkpoints.

    Args:
        evaluate: what the log notes of held-out text, by the main process.
        said: what the bar says of a step, by its record.

    Returns:
        Number of the signal that stopped it; 0: none.
    """
    settings, accelerator = trainer.settings, trainer.accelerator
    if trainer.steps == settings.steps:
        return 0
    kept = Path(settings.out) / "checkpoints"
    log = RunLog(Path(settings.out), accelerator, step=trainer.steps)

    def note_held_out() -> None:
        if accelerator.is_main_process:
            log.add({"step": trainer.steps, **evaluate()})
            log.plot()

    def on_step(record: dict[str, Any]) -> None:
        log.add(record)
        bar.update(task, completed=trainer.steps, description=said(record))
        if trainer.steps % settings.eval_every == 0 or trainer.steps == settings.steps:
            note_held_out()
        if trainer.steps % settings.save_every == 0 and trainer.steps < settings.steps:
            trainer.save(kept)

    progress = progress_bar(console, disable=not accelerator.is_main_process)
    with StopRequest() as request, progress as bar:
        task = bar.add_task("training", total=settings.steps, completed=trainer.steps)
        if trainer.steps == 0:
            note_held_out()
        stopped = train(
            trainer, until=settings.steps, stopping=lambda: request.number, on_step=on_step
        )
        trainer.save(kept)
    return stopped or came_to_any(accelerator, request.number)  # while the last one was saved


def end_stopped(trainer: Trainer, number: int, console: Console) -> NoReturn:
    """End as what a signal has killed, so that a shell does not go on to what needs the result.

    The main process alone: launchers end the others, whatever they do, when one has failed.
    """
    console.print(f"stopped at step {trainer.steps}; the same command goes on from there")
    raise SystemExit(128 + number)


def plain_console() -> Console:
    """What shows text as it is: rows, names and commands may hold what rich takes for markup."""
    return Console(markup=False, emoji=False)


def progress_bar(console: Console, *, disable: bool = False) -> Progress:
    """What is done, how much of it, and the time that is left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=disable)


def facts(trainer: Trainer) -> dict[str, Any]:
    """Further lines of the table."""
    rows = trainer.settings.batch_size * trainer.settings.seq_len
    return {
        "trained parameters": sum(p.numel() for p in trainer.trained),
        "steps": trainer.steps,
        "tokens per second": round(trainer.steps * rows / max(trainer.seconds, 1e-9), 1),
    }


def leave_table(result: Result, out: Path, console: Console) -> None:
    """Print the result, and write it as ``table.json`` and ``table.md``."""
    save(result, out / "table.json")
    write_text(out / "table.md", as_markdown(result) + "\n")
    console.print(as_table(result))
