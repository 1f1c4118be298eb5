"""The command line: one parser over the commands of ``layerskip.commands``.

Heavy imports happen inside the commands, so that ``--help`` is quick.
"""

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from rich.console import Console

from layerskip import __version__
from layerskip.commands import (
    ab,
    comparing,
    completing,
    facts,
    generating,
    measuring,
    reporting,
    simulating,
    tuning,
)

# In the order of ``--help``. Each has ``add_parsers``, whose parsers say what to run.
COMMANDS = (generating, comparing, facts, tuning, measuring, reporting, simulating, ab)


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
    for module in COMMANDS:
        module.add_parsers(commands)
    completing.add_parser(commands, top)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; bad input is one sentence on stderr and exit code 2."""
    args = parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a model may write what a terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        document = args.run(args, Console(stderr=args.json, emoji=False))
        if args.json:
            print(json.dumps(document), flush=True)
    except BrokenPipeError:  # whoever reads has had enough, as ``head`` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at its end
        return 1
    except (ValueError, TypeError) as error:
        print(f"layerskip: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # what no command could foresee
        where = f"{error.filename}: " if error.filename else ""
        print(f"layerskip: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("layerskip: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
