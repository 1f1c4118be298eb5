"""Whose drafts change the text? Prompts whose greedy tokens equal their own plain decoding.

    python bench/exactness_table.py                       # 200 prompts, bfloat16
    python bench/exactness_table.py --prompts mine.jsonl --model PATH

Each of transformers' modes is held against transformers' plain ``generate``, each of ours against
our own plain decoding; "automatic, batch of 8" are the same prompts, eight at a time and of
different lengths, drafting as it pays. Nothing is timed, so anything may run beside it. A stopped
run goes on with the same command.
"""

import argparse
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from cells import Cell
from lab import Lab, Options
from measuring import REFUSALS, Written, reason
from modes import BASE, MODES, THEIR_BASE, Turn
from paired import as_many, as_usual, circumstances, part_of, write
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tasks import TASKS

from layerskip.journal import Journal

RECORD = Path(__file__).parent / "results" / "exactness.json"
BATCH = 8
BATCHED = ("hf", "automatic")


def key(mode: str, batch: int) -> str:
    return mode if batch == 1 else f"{mode}, batch of {batch}"


def decoded(
    source: Written, mode: str, groups: Sequence[Any], tokens: int
) -> list[tuple[int, ...]] | str:
    """Every prompt's text, or why the mode is left out."""
    if mode in source.unsupported:
        return source.unsupported[mode]
    try:
        turns: list[Turn] = [source.decode([mode], group, tokens=tokens)[mode] for group in groups]
    except REFUSALS as error:
        return reason(error)
    return [text for turn in turns for text in turn.texts]


def texts_of(lab: Lab, task: str, each: int, tokens: int, journal: Journal) -> dict[str, Any]:
    """Of one task: each mode's texts, prompt by prompt, or why there are none."""
    source = Written(lab, Cell(task, "greedy", tokens=tokens))
    prompts = [group[0] for group in source.groups][:each]
    # Neighbours in a file are alike: every so many'th, so that a batch is ragged.
    step = -(-len(prompts) // BATCH)
    order = [i for start in range(step) for i in range(start, len(prompts), step)]
    eights = [prompts[start::step] for start in range(step)]
    texts: dict[str, Any] = {}
    for batch, modes, groups in ((1, MODES, [[p] for p in prompts]), (BATCH, BATCHED, eights)):
        for mode in modes:
            run = partial(decoded, source, mode, groups, tokens)
            found = journal.once(f"{task}: {key(mode, batch)}", run, as_texts)
            if batch > 1 and not isinstance(found, str):
                found = [text for _, text in sorted(zip(order, found, strict=True))]
            texts[key(mode, batch)] = found
    return texts


def shares(lab: Lab, tasks: Sequence[str], each: int, tokens: int, journal: Journal) -> dict:
    """For each mode how many prompts have the text of their own plain decoding, of how many."""
    found: dict[str, dict[str, Any]] = {}
    for task in track(tasks, "tasks", transient=True):
        texts = texts_of(lab, task, each, tokens, journal)
        for mode, own in texts.items():
            entry = found.setdefault(mode, {"equal": 0, "prompts": 0, "why_not": ""})
            if isinstance(own, str):
                entry["why_not"] = own
                continue
            plain = texts[THEIR_BASE if mode.startswith("hf") else BASE]
            entry["equal"] += sum(a == b for a, b in zip(own, plain, strict=True))
            entry["prompts"] += len(own)
    return found


def as_texts(content: Any) -> Any:
    return content if isinstance(content, str) else [tuple(text) for text in content]


def table(found: dict[str, Any]) -> Table:
    """As people read it."""
    out = Table("mode", "equal to its own plain decoding", box=None, header_style="bold")
    for mode, entry in found.items():
        count = f"{entry['equal']} of {entry['prompts']}" if entry["prompts"] else entry["why_not"]
        out.add_row(mode, count)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--draft-model", default="auto")
    parser.add_argument("--prompts", type=Path, help="JSON lines, in the place of our tasks")
    parser.add_argument("--limit", type=int, default=200, help="prompts (200)")
    parser.add_argument("--tokens", type=int, default=48, help="most new tokens of each (48)")
    parser.add_argument("--resume", type=Path, help="journal of what was decoded")
    parser.add_argument("--out", type=Path, help="default: the record, if it is of as many")
    options = parser.parse_args()
    tasks = ["prompts"] if options.prompts else list(TASKS)
    if options.limit < len(tasks):
        needed = f"{len(tasks)} or more, so that each task has one"
        parser.error(f"--limit is {options.limit} prompts; give {needed}")
    lab = Lab(
        Options(
            model=options.model,
            device=options.device,
            dtype=options.dtype,
            prompts=options.prompts,
            draft_model=options.draft_model,
            limit=options.limit // len(tasks),
            tokens=options.tokens,
        )
    )
    if options.resume is not None:
        options.resume.parent.mkdir(parents=True, exist_ok=True)
    with closing(Journal(options.resume, lab.subject())) as journal:
        found = shares(lab, tasks, options.limit // len(tasks), options.tokens, journal)
    settings = {"model": options.model, "dtype": options.dtype, "tokens": options.tokens}
    out = options.out or (RECORD if is_record(options, parser) else part_of(RECORD))
    write(out, {**settings, **circumstances(), "modes": found})
    console = Console(width=100)
    console.print(table(found))
    console.print(f"written to {out}")


def is_record(options: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Whether a run is of as many prompts, of ours and in all modes, as tables read."""
    usual = ("model", "dtype", "draft_model", "prompts", "tokens")
    return as_many(options, parser, "limit") and as_usual(options, parser, *usual)


if __name__ == "__main__":
    main()
