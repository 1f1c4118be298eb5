"""The command line: generate, compare, info, demo, and the commands of ``layerskip.commands``.

Heavy imports happen inside the commands, so that ``--help`` is quick.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from layerskip import __version__
from layerskip.commands import tuning
from layerskip.commands.options import chosen_plan, load, model_options, quiet
from layerskip.params import AUTO, VERIFICATIONS

if TYPE_CHECKING:
    from layerskip.api import SelfSpeculativeLM
    from layerskip.grammar import Grammar
    from layerskip.outputs import GenerationOutput
    from layerskip.params import SamplingParams
    from layerskip.prompts import Example

STYLES = {
    "prefill": "bold",
    "plain": "",
    "accepted": "green",
    "recovered": "yellow",
    "bonus": "cyan",
}
DEMO_PROMPTS = 4
DEMO_TOKENS = 96
DEMO_MODES = ("hf", "hf-early-exit", "plain", "layerskip")
DEMO_NAMES = {
    "hf": "transformers generate",
    "hf-early-exit": "transformers early exit",
    "plain": "layerskip plain",
    "layerskip": "layerskip self-spec.",
}


class Parser(argparse.ArgumentParser):
    """Says a bad option in one sentence, as all bad input is."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"layerskip: {message}\n")


def parser() -> Parser:
    top = Parser(
        prog="layerskip", description="Decode a checkpoint faster with its own early layers."
    )
    top.add_argument("--version", action="version", version=f"layerskip {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", help="complete a prompt")
    _model_options(generate)
    source = generate.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="text to complete")
    source.add_argument("--prompt-file", help="UTF-8 file with the text to complete")
    source.add_argument("--chat", metavar="TEXT", help="one user message, chat template applied")
    _sampling_options(generate)
    _rule_options(generate)
    generate.add_argument("--stop", action="append", default=[], help="may be given repeatedly")
    _grammar_options(generate)
    comparing = commands.add_parser("compare", help="time our modes and transformers' in turn")
    _model_options(comparing)
    comparing.add_argument("--prompts", help="JSON lines; without it, held-out library code")
    comparing.add_argument("--modes", default="plain,layerskip,hf,hf-early-exit,hf-prompt-lookup")
    comparing.add_argument("--limit", type=int, default=50, help="most prompts (default 50)")
    comparing.add_argument("--repeats", type=int, default=3)
    comparing.add_argument(
        "--max-repeated",
        type=float,
        default=1.0,
        help="leave out prompts whose plain output repeats more of its 8-grams (default 1.0)",
    )
    comparing.add_argument(
        "--teacher-forced",
        action="store_true",
        help="acceptance along the real continuations instead of generated text",
    )
    _sampling_options(comparing)
    info = commands.add_parser("info", help="what a checkpoint is and which paths run")
    _model_options(info)
    demo = commands.add_parser("demo", help="complete held-out code and compare four decoders")
    _model_options(demo)
    tuning.add_parsers(commands)
    return top


def _model_options(command: argparse.ArgumentParser) -> None:
    model_options(command)
    command.add_argument(
        "--num-draft-tokens",
        type=lambda text: text if text == AUTO else int(text),
        metavar="N",
        help="drafted per round; 0 is plain, 'auto' (the default) what pays",
    )


def _sampling_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--max-new-tokens", type=int, default=128)
    command.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    command.add_argument("--top-k", type=int, default=0)
    command.add_argument("--top-p", type=float, default=1.0)
    command.add_argument("--min-p", type=float, default=0.0)
    command.add_argument("--seed", type=int)


def _rule_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--repetition-penalty", type=float, default=1.0)
    command.add_argument("--presence-penalty", type=float, default=0.0)
    command.add_argument("--frequency-penalty", type=float, default=0.0)
    command.add_argument("--no-repeat-ngram-size", type=int, default=0)
    command.add_argument("--min-new-tokens", type=int, default=0)
    command.add_argument(
        "--verification",
        choices=VERIFICATIONS,
        default="coupled",
        help="of sampled drafts; with token and block the text depends on what is drafted",
    )
    command.add_argument(
        "--logprobs", type=int, metavar="N", help="of each token, and of the N likeliest"
    )


def _grammar_options(command: argparse.ArgumentParser) -> None:
    kinds = command.add_mutually_exclusive_group()
    kinds.add_argument(
        "--json-schema", metavar="FILE", help="write JSON that this schema describes"
    )
    kinds.add_argument("--json-output", action="store_true", help="write any JSON value")
    kinds.add_argument("--regex", metavar="PATTERN", help="write what matches it as a whole")
    kinds.add_argument("--ebnf", metavar="FILE", help="write what a GBNF grammar's root describes")
    kinds.add_argument(
        "--choice", action="append", metavar="TEXT", help="write one of these; given repeatedly"
    )
    command.add_argument(
        "--grammar-after", metavar="TEXT", help="the grammar begins after this, such as </think>"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; bad input is one sentence on stderr and exit code 2."""
    args = parser().parse_args(argv)
    console = Console(stderr=args.json)
    run = {
        "generate": _generate,
        "compare": _compare,
        "info": _info,
        "demo": _demo,
        "profile": tuning.run_profile,
        "search": tuning.run_search,
    }
    try:
        document = run[args.command](args, console)
    except (ValueError, TypeError) as error:
        print(f"layerskip: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("layerskip: interrupted", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(document))
    return 0


def _sampling(args: argparse.Namespace) -> "SamplingParams":
    from dataclasses import fields

    from layerskip.params import SamplingParams

    options = vars(args)
    return SamplingParams(
        **{f.name: options[f.name] for f in fields(SamplingParams) if f.name in options}
    )


def _grammar(args: argparse.Namespace) -> "Grammar | None":
    from layerskip.grammar import Grammar
    from layerskip.prompts import read_text

    grammar = None
    if args.json_schema is not None:
        grammar = Grammar.json_schema(read_text(args.json_schema))
    elif args.json_output:
        grammar = Grammar.json()
    elif args.regex is not None:
        grammar = Grammar.regex(args.regex)
    elif args.ebnf is not None:
        grammar = Grammar.ebnf(read_text(args.ebnf))
    elif args.choice:
        grammar = Grammar.choice(args.choice)
    if args.grammar_after is None:
        return grammar
    if grammar is None:
        raise ValueError("--grammar-after needs a grammar, such as --json-schema FILE")
    return grammar.after(args.grammar_after)


def _generate(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    from layerskip.outputs import DecodeStats
    from layerskip.prompts import read_text

    sampling, grammar = _sampling(args), _grammar(args)
    prompt = read_text(args.prompt_file) if args.prompt_file else args.prompt
    messages = [{"role": "user", "content": args.chat}] if args.chat is not None else None
    lm = load(args)
    batch = lm.open_batch(
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        verification=args.verification,
        stop=args.stop,
        logprobs=args.logprobs,
        grammar=grammar,
    )
    row = batch.add(messages=messages) if messages else batch.add(prompt)
    if prompt is not None:
        console.print(escape(prompt), style="dim", end="", highlight=False)
    while batch.unfinished:
        for record in batch.step():
            style = STYLES[record.origins[0]] or None
            console.print(escape(record.text), style=style, end="", highlight=False)
    out = batch.remove(row)
    console.print()
    _print_logprobs(console, lm, out)
    stats: DecodeStats = out.stats
    console.print(
        f"{stats.new_tokens} tokens, {stats.tokens_per_second:.0f} tokens/s, "
        f"acceptance rate {stats.acceptance_rate:.2f}, "
        f"mean accepted length {stats.mean_accepted_length:.2f}, finished: {out.finish_reason}"
        + (f", seed {out.seed}" if out.seed is not None else ""),
        style="dim",
    )
    return out.to_dict()


def _print_logprobs(console: Console, lm: "SelfSpeculativeLM", out: "GenerationOutput") -> None:
    """A line for each token: its logarithm, and the likeliest in its place."""
    for entry in out.logprobs:
        pairs = [(entry.token_id, entry.logprob), *entry.top]
        texts = [f"{value:.3f} {_token_text(lm, token)}" for token, value in pairs]
        console.print(escape("  ".join(texts)), style="dim", highlight=False, soft_wrap=True)


def _token_text(lm: "SelfSpeculativeLM", token: int) -> str:
    return repr(lm.tokenizer.decode([token])) if lm.tokenizer is not None else str(token)


def _examples(args: argparse.Namespace, limit: int) -> "list[Example]":
    from layerskip.checkpoint import held_out_modules
    from layerskip.prompts import held_out_code, read_prompts

    if limit < 1:
        raise ValueError(f"--limit must be at least 1, got {limit}")
    prompts = getattr(args, "prompts", None)
    return read_prompts(prompts)[:limit] if prompts else held_out_code(held_out_modules(), limit)


def _compare(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    quiet()
    from layerskip.compare import MODES, compare, teacher_forced

    modes = tuple(args.modes.split(","))
    unknown = [m for m in modes if m not in MODES]
    if unknown:
        raise ValueError(f"--modes has {', '.join(unknown)}; allowed are {', '.join(MODES)}")
    for name, value in (("repeats", args.repeats), ("max-new-tokens", args.max_new_tokens)):
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    sampling, examples = _sampling(args), _examples(args, args.limit)
    if args.teacher_forced:
        lm = load(args)
        document = teacher_forced(
            lm,
            examples,
            sampling=sampling,
            exits=range(1, min(9, lm.stack.num_layers)),
            max_new_tokens=args.max_new_tokens,
        )
        document = {"model": args.model, "prompts": len(examples), **document}
        console.print(_exit_table(document))
        return document
    comparison = _comparison(args, sampling, args.max_new_tokens)
    fit = [e for e in examples if _fits(comparison.lm, e, args.max_new_tokens)]
    if not fit:
        raise ValueError(
            f"no prompt leaves room for {args.max_new_tokens} new tokens in the model's "
            f"{comparison.lm.stack.max_positions} positions"
        )
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("prompts", total=len(fit))
        document = compare(
            comparison,
            fit,
            modes=modes,
            repeats=args.repeats,
            max_repeated=args.max_repeated,
            on_progress=lambda done, total: progress.update(task, completed=done),
        )
    document = {"model": args.model, **document}
    console.print(_mode_table(document))
    return document


def _fits(lm: "SelfSpeculativeLM", example: "Example", max_new_tokens: int) -> bool:
    if lm.tokenizer is None:
        raise ValueError("compare needs a tokenizer, and this model has none")
    room = lm.stack.max_positions - max_new_tokens
    return len(lm.tokenizer(example.prompt)["input_ids"]) <= room


def _comparison(args: argparse.Namespace, sampling: "SamplingParams", tokens: int) -> Any:
    from dataclasses import replace

    from layerskip.api import SelfSpeculativeLM
    from layerskip.compare import Comparison

    if not sampling.greedy and sampling.seed is None:
        sampling = replace(sampling, seed=0)
    model, tokenizer, plan, num_draft_tokens = SelfSpeculativeLM.load_parts(
        args.model,
        exit_layer=args.exit_layer,
        plan=chosen_plan(args),
        num_draft_tokens=args.num_draft_tokens,
        dtype=args.dtype,
        device=args.device,
    )
    lm = SelfSpeculativeLM(
        model,
        tokenizer,
        plan,
        num_draft_tokens=num_draft_tokens,
        exact=args.exact,
        lookup=args.lookup,
    )
    return Comparison(model, lm, sampling=sampling, max_new_tokens=tokens)


def _mode_table(document: dict[str, Any], names: dict[str, str] | None = None) -> Table:
    table = Table(
        box=None,
        padding=(0, 1),
        pad_edge=False,
        title=f"{document['prompts']} prompts, {document['new_tokens']} tokens, "
        f"temperature {document['temperature']:g}, {document['threads']} threads, "
        f"repeated 8-grams {document['repeated_8gram_share']:.0%}",
    )
    for name in ("mode", "tok/s", "vs plain", "95 %", "same", "accepted", "length"):
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for mode, row in document["modes"].items():
        low, high = row["speedup_vs_plain_ci95"]
        table.add_row(
            (names or {}).get(mode, mode),
            f"{row['tokens_per_second']:.0f}",
            f"{row['speedup_vs_plain']:.2f}x",
            f"{low:.2f}-{high:.2f}",
            _share(row["identical_to_plain"]),
            _share(row["acceptance_rate"]),
            "-" if row["mean_accepted_length"] is None else f"{row['mean_accepted_length']:.2f}",
        )
    theory = document.get("theory")
    if theory:
        table.caption = (
            f"theory: length / (d c + v) = {theory['speedup']:.2f}x "
            f"with c = {theory['c']:.3f}, v = {theory['v']:.3f} from bare passes"
        )
    return table


def _exit_table(document: dict[str, Any]) -> Table:
    table = Table(title=f"teacher-forced, {document['positions']} positions")
    for name in ("exit layer", "first draft token accepted", "1 - TV"):
        table.add_column(name, justify="right")
    for e, row in document["exits"].items():
        table.add_row(str(e), f"{row['acceptance_rate']:.3f}", f"{row['overlap']:.3f}")
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _info(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    import torch

    from layerskip.commands.facts import plan_facts
    from layerskip.errors import UnsupportedModelError
    from layerskip.ops.build import description

    try:
        lm = load(args)
    except UnsupportedModelError as error:
        refused = {"model": args.model, "supported": False, "reason": str(error)}
        console.print(_facts_table(refused))
        return refused
    stack = lm.stack
    gpu = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    document = {
        "model": args.model,
        "supported": True,
        "architecture": stack.twin.config.model_type,
        "num_layers": stack.num_layers,
        "exit_layers": f"1 to {stack.num_layers - 1}",
        **plan_facts(args, lm),
        "vocab_size": stack.vocab_size,
        "max_positions": stack.max_positions,
        "parameters": sum(p.numel() for p in stack.twin.parameters()),
        "dtype": str(stack.dtype).removeprefix("torch."),
        "device": str(stack.device),
        "threads": torch.get_num_threads(),
        "kv_cache_bytes_per_token": stack.kv_bytes_per_token,
        "bit_identical": stack.exactness.holds,
        "exactness": lm.exactness,
        "backend": stack.backend,
        "kernels": description(gpu) + "; decoding does not use them yet",
        "version": __version__,
    }
    console.print(_facts_table(document))
    return document


def _facts_table(document: dict[str, Any]) -> Table:
    table = Table(show_header=False, title=f"layerskip {__version__}")
    for key, value in document.items():
        table.add_row(key.replace("_", " "), str(value))
    return table


def _demo(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    from layerskip.compare import compare
    from layerskip.params import SamplingParams

    quiet()
    examples = _examples(args, DEMO_PROMPTS)
    comparison = _comparison(args, SamplingParams(), DEMO_TOKENS)
    legend = ", ".join(f"[{STYLES[o]}]{o}[/]" for o in ("accepted", "recovered", "bonus"))
    console.print(f"Held-out code, completed by {args.model}. Tokens: {legend}\n")
    for example in examples:
        tail = "\n".join(example.prompt.rstrip("\n").split("\n")[-4:]) + "\n"
        console.print(escape(tail), style="dim", end="", highlight=False)
        for step in comparison.lm.stream(example.prompt, max_new_tokens=DEMO_TOKENS):
            _print_tokens(console, comparison.lm, step.round)
        console.print("\n")
    with console.status("timing four decoders in turn"):
        document = compare(comparison, examples, modes=DEMO_MODES, repeats=2, tuning_prompts=1)
    console.print(_mode_table(document, DEMO_NAMES))
    return {"model": args.model, **document}


def _print_tokens(console: Console, lm: "SelfSpeculativeLM", record: Any) -> None:
    for token, origin in zip(record.token_ids, record.origins, strict=True):
        text = lm.tokenizer.decode([token], skip_special_tokens=True)
        console.print(escape(text), style=STYLES[origin] or None, end="", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
