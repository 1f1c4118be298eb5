"""The command line: one parser over the commands of ``layerskip.commands``.

Heavy imports happen inside the commands, so that ``--help`` is quick.
"""

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

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
from layerskip.commands.signals import ended_by_sigterm

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

# In the order of ``--help``. Each has ``add_parsers``, whose parsers say what to run.
COMMANDS = (generating, comparing, facts, tuning, measuring, reporting, simulating, ab)


class Parser(argparse.ArgumentParser):
    """Says a bad option in one sentence, as all bad input is."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"layerskip: {message}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse a file without a name, which a variable that is not set leaves: it would be taken
        for the working directory."""
        found = super().parse_known_args(args, namespace)
        for action in self._actions:
            what = {"FILE": "file", "DIR": "folder"}.get(str(action.metavar))
            if what and getattr(found[0], action.dest) == "":
                raise ValueError(f"{action.option_strings[0]} must name a {what}, got ''")
        return found

    def _print_message(self, message: str, file: "SupportsWrite[str] | None" = None) -> None:
        """Argparse's own hides that stdout takes nothing, which unbuffered it says here."""
        if file is None or file is not sys.stdout:
            super()._print_message(message, file)
        else:
            file.write(message)


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
    try:
        with ended_by_sigterm():
            try:
                _run(argv)
            except SystemExit as end:
                if end.code:  # that is what it ends by, whatever can't be written
                    _give_up()
                else:
                    _flush()
                raise
            _flush()
    except BrokenPipeError:  # whoever reads has had enough, as ``head`` has
        return _ended(1)
    except (ValueError, TypeError) as error:
        return _ended(2, str(error))
    except OSError as error:  # what no command could foresee
        where = f"{error.filename}: " if error.filename else ""
        return _ended(2, f"{where}{error.strerror or error}")
    except KeyboardInterrupt:
        return _ended(130, "interrupted")
    return 0


def _flush() -> None:
    """While what can't be written can still be told."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _run(argv: Sequence[str] | None) -> None:
    args = parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a model may write what a terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    # No columns are a terminal of unknown size; rich would show nothing at all.
    width = 80 if os.environ.get("COLUMNS") == "0" else None
    document = args.run(args, _Console(stderr=args.json, emoji=False, width=width))
    if args.json:
        print(json.dumps(document))


class _Console(Console):
    """Where people read; beside a JSON document nobody has to."""

    def on_broken_pipe(self) -> None:
        if not self.stderr:
            raise BrokenPipeError
        self.quiet = True


def _ended(code: int, sentence: str = "") -> int:
    """The exit code, once its reason has been said."""
    with suppress(OSError):
        if sentence and sys.stderr is not None:  # else it would go to stdout
            print(f"layerskip: {sentence}", file=sys.stderr)
    _give_up()
    return code


def _give_up() -> None:
    """What cannot be written goes nowhere: Python flushes at its end, and would tell of it then."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError), Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
