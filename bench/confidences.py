"""How far the chances that automatic drafting tells of its tokens are from what becomes of them.

    OMP_NUM_THREADS=1 python bench/confidences.py --prompts math=maths.jsonl --prompts chat=c.jsonl

The expected calibration error (Naeini et al. 2015, ten bins) of a controller that has seen nothing
before, over a text's prompts one after another: what it tells before it has learnt counts, too.
Beside it stands what right chances would show of so many tokens. Look-ups are off, no clock plays a
part in an error but through how many tokens are drafted. Without ``--out`` a whole run is the day's
record in bench/results; results of any other are beside it in a file that ends in ``-part.json``.
"""

import argparse
from pathlib import Path
from typing import Any

from paired import as_many, circumstances, dated, part_of, quiet, sampling_at, write
from rich.console import Console
from rich.progress import Progress
from tasks import TASKS, examples_from, examples_of, spread

from layerskip import SelfSpeculativeLM
from layerskip.compare import repeated_share

CHOICE = 1000  # functions to choose from
STEPS = (12, 16, 32, 64, 128, 256)  # prompts at which errors are told


def errors_of(
    options: argparse.Namespace, prompts: list[list[int]], temperature: float, progress: Progress
) -> dict[str, Any]:
    """Of one text at one temperature, by number of prompts."""
    lm = SelfSpeculativeLM.from_pretrained(
        options.model, dtype=options.dtype, device="cpu", lookup=False
    )
    kind = "greedy" if temperature == 0.0 else "coupled"
    outputs, by_prompts = [], {}
    for ids in progress.track(prompts, description=f"T {temperature:g}"):
        sampling = sampling_at(temperature)
        out = lm.generate(ids, max_new_tokens=options.tokens, sampling=sampling)
        outputs.append(out.token_ids)
        if len(outputs) in {*STEPS, len(prompts)}:
            told = lm.controller.told(kind)
            by_prompts[len(outputs)] = {"error": told.error, "by_chance": told.error_by_chance}
    return {"repeated": repeated_share(outputs), "by_prompts": by_prompts}


def prompts_of(name: str, options: argparse.Namespace, files: dict[str, str]) -> list[list[int]]:
    """A text's prompts, as many as are asked for, that leave room for their output."""
    parts = SelfSpeculativeLM.load_parts(options.model, dtype=options.dtype)
    model, tokenizer = parts[:2]
    examples = examples_from(files[name], CHOICE) if name in files else examples_of(name, CHOICE)
    room = model.config.max_position_embeddings - options.tokens
    ids = (list(tokenizer(e.prompt)["input_ids"]) for e in spread(examples, options.limit))
    return [prompt for prompt in ids if 0 < len(prompt) <= room][: options.limit]


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--dtype", default=None)
    parser.add_argument(
        "--prompts", action="append", default=[], metavar="NAME=FILE", help="a text's prompts"
    )
    parser.add_argument("--limit", type=int, default=128, help="prompts of a text (128)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of a prompt (64)")
    parser.add_argument("--out", type=Path, help="default: the day's record, of a whole run")
    return parser


def main() -> None:
    parser = parser_of()
    options = parser.parse_args()
    quiet()
    files = dict(given.split("=", 1) for given in options.prompts)
    whole = options.model == "builtin" and as_many(options, parser, "limit", "tokens")
    record = dated("confidences")
    out = options.out or part_of(record)
    texts: dict[str, dict[str, Any]] = {}
    console = Console()
    with Progress(console=console, transient=True) as progress:
        for name in TASKS:
            prompts = prompts_of(name, options, files)
            for temperature in (0.0, 0.8):
                found = errors_of(options, prompts, temperature, progress)
                texts[f"{name}, {temperature:g}"] = {"prompts": len(prompts), **found}
                told = "; ".join(
                    f"{n}: {100 * e['error']:.1f} ({100 * e['by_chance']:.1f})"
                    for n, e in found["by_prompts"].items()
                )
                line = f"{name}, T {temperature:g}, percent by prompts (by chance): {told}"
                console.print(line, highlight=False, soft_wrap=True)
                document = {**circumstances(), "dtype": options.dtype, "tokens": options.tokens}
                write(out, {**document, "texts": texts})
    if options.out is None and whole:
        out.replace(record)


if __name__ == "__main__":
    main()
