"""``layerskip generate``: complete one prompt, and show where its tokens came from."""

import argparse
from typing import TYPE_CHECKING, Any

from rich.console import Console

from layerskip.commands.options import (
    chosen_policy,
    draft_options,
    load,
    model_options,
    print_round,
    print_text,
    sampling_of,
    sampling_option,
    sampling_options,
    say,
)
from layerskip.commands.signals import importing
from layerskip.params import VERIFICATIONS
from layerskip.text import TextStream

if TYPE_CHECKING:
    from layerskip.api import SelfSpeculativeLM
    from layerskip.grammar import Grammar
    from layerskip.outputs import GenerationOutput


def add_parsers(commands: Any) -> None:
    """Add this module's command to those of ``add_subparsers``."""
    generate = commands.add_parser("generate", help="complete a prompt")
    generate.set_defaults(run=run_generate)
    model_options(generate)
    draft_options(generate)
    source = generate.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="text to complete")
    source.add_argument(
        "--prompt-file", metavar="FILE", help="UTF-8 file with the text to complete"
    )
    source.add_argument("--chat", metavar="TEXT", help="one user message, chat template applied")
    sampling_options(generate)
    _rule_options(generate)
    generate.add_argument("--stop", action="append", default=[], help="may be given repeatedly")
    _grammar_options(generate)
    generate.add_argument(
        "--policy", metavar="FILE", help="drafts as decided for the task ('report' writes a policy)"
    )
    generate.add_argument("--task", metavar="NAME", help="what the policy calls this request")


def _rule_options(command: argparse.ArgumentParser) -> None:
    for name, kind, what in (
        ("repetition_penalty", float, "of tokens in prompt or output; 1 is none"),
        ("presence_penalty", float, "of tokens in the output"),
        ("frequency_penalty", float, "of tokens in the output, for each time"),
        ("no_repeat_ngram_size", int, "no run of so many tokens comes twice; 0 is off"),
        ("min_new_tokens", int, "no end of sequence before so many"),
    ):
        sampling_option(command, name, kind, what)
    command.add_argument(
        "--verification",
        choices=VERIFICATIONS,
        default="coupled",
        help="of sampled drafts; with token and block the text depends on what is drafted "
        "(default %(default)s)",
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


def run_generate(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """``layerskip generate``."""
    from layerskip.outputs import DecodeStats
    from layerskip.prompts import read_text

    settings = _settings(args)
    prompt = args.prompt
    if args.prompt_file is not None:
        prompt = read_text(args.prompt_file)
    messages = [{"role": "user", "content": args.chat}] if args.chat is not None else None
    lm = load(args)
    batch = lm.open_batch(**settings, num_draft_tokens=args.num_draft_tokens)
    row = batch.add(messages=messages) if messages else batch.add(prompt)
    if prompt is not None:
        print_text(console, prompt, "dim")
    stream = TextStream(lm.tokenizer, args.stop)
    while batch.unfinished:
        for record in batch.step():
            print_round(console, stream, record, lm.eos_ids)
    out = batch.remove(row)
    console.print()
    _print_logprobs(console, lm, out)
    stats: DecodeStats = out.stats
    drafts = "nothing drafted"  # a rate of 0 would say that all of it was wrong
    if stats.num_draft_tokens:
        drafts = f"acceptance rate {stats.acceptance_rate:.2f}, "
        drafts += f"mean accepted length {stats.mean_accepted_length:.2f}"
    console.print(
        f"{stats.new_tokens} tokens, {stats.tokens_per_second:.0f} tokens/s, {drafts}, "
        f"finished: {out.finish_reason}" + (f", seed {out.seed}" if out.seed is not None else ""),
        style="dim",
    )
    return out.to_dict()


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the options say of the request, checked before a weight is read."""
    with importing():
        from layerskip.request import RowSettings, stops_of

    settings = {
        "max_new_tokens": args.max_new_tokens,
        "sampling": sampling_of(args),
        "verification": args.verification,
        "stop": stops_of(args.stop),
        "logprobs": args.logprobs,
        "grammar": _grammar(args),
        "labels": _labels(args),
    }
    RowSettings(**settings, num_draft_tokens=0)  # of the drafts' number the loader knows
    return settings


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


def _labels(args: argparse.Namespace) -> dict[str, str]:
    """The task, by the name that the policy has for it."""
    policy = chosen_policy(args)
    if args.task is None:
        return {}
    if policy is None:
        raise ValueError("--task is for a policy; give --policy FILE")
    if policy.label is None:
        raise ValueError(f"{args.policy} knows no tasks; leave out --task")
    return {policy.label: args.task}


def _print_logprobs(console: Console, lm: "SelfSpeculativeLM", out: "GenerationOutput") -> None:
    """A line for each token: its logarithm, and the likeliest in its place."""
    for entry in out.logprobs:
        pairs = [(entry.token_id, entry.logprob), *entry.top]
        texts = [f"{value:.3f} {lm.tokenizer.decode([token])!r}" for token, value in pairs]
        say(console, "  ".join(texts), "dim")
