"""A run of sections on a machine that may go away: a record after each, an end to each."""

import faulthandler
import json
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from gpu.backends import output_of
from layerskip.files import check_writable, write_json

Found = dict[str, Any]


class Run:
    """Sections, one after another, and the record that grows.

    Args:
        folder: of records; made if there is none.
        facts: of the machine; ``gpu`` is part of the record's name.
        commit: of the sources; None asks git.
        sizes: "toy" or "full".
        suffix: of the record's name.

    Raises:
        ValueError: no record can be written there.
    """

    def __init__(
        self, folder: Path, facts: dict[str, str], *, commit: str | None, sizes: str, suffix: str
    ):
        now = datetime.now(UTC)
        gpu = "-".join(facts["gpu"].replace("/", " ").split())
        self.file = folder / f"{now.date().isoformat()}-{gpu}{suffix}.json"
        machine = {
            **facts,
            "commit": commit or commit_here(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "sizes": sizes,
        }
        self.record: Found = {"machine": machine, "sections": earlier(self.file, machine)}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"folder {folder} cannot be made: {error.strerror}") from None
        check_writable(self.file)

    def section(self, name: str, run: Callable[[Found], None], *, hung: float) -> bool:
        """Run one section, print and write what it found; whether it passed.

        Args:
            run: fills a dictionary, whose ``ok`` says whether every check passed.
            hung: seconds after which the process is ended from another thread, with the place
                where it stood on stderr. A call into a driver that never returns cannot be ended
                otherwise; the record says that the section was begun.
        """
        start = time.monotonic()
        found: Found = {"ok": False, "unfinished": True}
        self.record["sections"][name] = found
        self.write()
        with ended_after(hung):
            try:
                run(found)
            except Exception:  # noqa: BLE001  the sections after it are worth their minutes
                found |= {"ok": False, "error": traceback.format_exc(limit=-3)}
        del found["unfinished"]
        found["seconds"] = round(time.monotonic() - start, 1)
        self.write()
        print(f"{name}: {'ok' if found['ok'] else 'FAILED'} ({found['seconds']} s)")
        for key, value in found.items():
            if key not in {"ok", "seconds"}:
                print(f"  {key}: {in_words(value)}")
        sys.stdout.flush()
        return found["ok"]

    def write(self) -> None:
        """The record so far, in one move: a process that is killed leaves the one before."""
        write_json(self.file, finite(self.record), indent=1)


def earlier(file: Path, machine: dict[str, str]) -> Found:
    """Sections of the same day, machine and commit, which this run adds to."""
    if machine["commit"] == "unknown" or machine["commit"].endswith("-changed"):
        return {}
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        return dict(record["sections"]) if record["machine"] == machine else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def commit_here() -> str:
    """Of these sources, with a mark if they were changed."""
    commit = output_of(["git", "rev-parse", "HEAD"])
    changed = "-changed" if output_of(["git", "status", "--porcelain", "-uno"]) else ""
    return commit + changed if commit else "unknown"


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinities: they become texts."""
    if isinstance(value, dict):
        return {str(name): finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    unusual = isinstance(value, float) and not abs(value) < float("inf")
    return str(value) if unusual else value


def in_words(value: Any) -> str:
    """A finding on one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {in_words(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return f"[{', '.join(in_words(inner) for inner in value)}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """End the process if the body takes longer, wherever it stands."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise ``TimeoutError`` in the body, once Python runs again, if it takes longer.

    For a part of a section that others can do without, such as a compiler's work. Only the main
    thread can be interrupted so; elsewhere nothing is limited.
    """
    if threading.current_thread() is not threading.main_thread() or os.name != "posix":
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
