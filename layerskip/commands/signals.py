"""Signals that end a command: what it holds is closed, and temporary files go."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def _end(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM, which ``timeout`` and schedulers send, ends the block as Ctrl-C does; the process
    then has the exit code of one that it killed."""

    with _handled(signal.SIGTERM, signal.SIG_DFL, _end):
        yield


@contextmanager
def importing() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the process at once, where there is nothing to lose yet: what they
    raise inside the imports of torch and transformers comes out as other errors, or aborts, or is
    lost."""
    with (
        _handled(signal.SIGINT, signal.default_int_handler, signal.SIG_DFL),
        _handled(signal.SIGTERM, _end, signal.SIG_DFL),
    ):
        yield


@contextmanager
def _handled(
    number: int, usual: Any, handler: Callable[..., object] | signal.Handlers
) -> Iterator[None]:
    """``handler`` has a signal, unless somebody else than ``usual`` has it."""
    main = threading.current_thread() is threading.main_thread()  # others may set none
    if not main or signal.getsignal(number) is not usual:
        yield
        return
    signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, usual)
