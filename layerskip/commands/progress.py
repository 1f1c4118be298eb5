"""How far a command is, for who waits for it."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def counting(console: Console) -> Progress:
    """A bar of things done, of how many, and for how long yet; it goes when it is stopped."""
    return _bar(console, MofNCompleteColumn())


def sharing(console: Console) -> Progress:
    """The same of the share that is done of what nobody counts."""
    return _bar(console)


def _bar(console: Console, *more: ProgressColumn) -> Progress:
    shown = (TextColumn("{task.description}"), BarColumn(), *more)
    return Progress(
        *shown, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True
    )
