"""``layerskip completion``: what a shell reads to complete commands, options and file names."""

import argparse
from collections.abc import Iterator
from typing import Any

from rich.console import Console

SHELLS = ("bash", "zsh", "fish")
# The shells show its first line beside the command's name.
HOW = """\
Print what a shell reads to complete commands, options and file names.
It is a static script: no Python starts when TAB is pressed.

  bash  layerskip completion bash > ~/.local/share/bash-completion/completions/layerskip
        (read by the package bash-completion; without it, source the file in ~/.bashrc)
  zsh   layerskip completion zsh > ~/.zfunc/_layerskip
        (a folder of $fpath, named in ~/.zshrc before compinit)
  fish  layerskip completion fish > ~/.config/fish/completions/layerskip.fish
"""
FOLDERS = ("model", "runs")  # arguments without an option's metavar that are folders


def add_parser(commands: Any, whole: argparse.ArgumentParser) -> None:
    """Add the command to those of ``add_subparsers``; it completes the parser ``whole``."""
    completion = commands.add_parser(
        "completion",
        help="print a script that completes these commands in a shell",
        description=HOW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    completion.add_argument("shell", choices=SHELLS)
    completion.set_defaults(run=run_completion, whole=whole, json=False)


def run_completion(args: argparse.Namespace, console: Console) -> None:
    """``layerskip completion``."""
    import shtab

    for action in _actions(args.whole):
        if action.metavar == "FILE":
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab looks for it
        elif action.metavar == "DIR" or action.dest in FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    console.file.write(shtab.complete(args.whole, shell=args.shell) + "\n")


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Options and arguments of a parser and its commands."""
    for action in parser._actions:  # noqa: SLF001  # argparse has no other way to them
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action
