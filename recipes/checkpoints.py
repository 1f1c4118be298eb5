"""Checkpoints of a run that a crash at any moment leaves usable, and signals that end it in order.

A checkpoint is written into a folder of another name, flushed to the disk, and renamed: a folder
named ``step-N`` is whole, whatever happened.
"""

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from types import TracebackType
from typing import Any

import torch

from layerskip.files import locked, read_json, reason_of, write_json

KEPT, RUN = 2, "run.json"
STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """While no other run writes into a folder, which is made; one that nothing came into is removed
    again. Of processes that were started together the first holds it for all.

    Raises:
        ValueError: another run does, or the folder cannot be made.
    """
    if os.environ.get("RANK", "0") not in ("", "0"):
        yield
        return
    there = out.is_dir()
    out.mkdir(parents=True, exist_ok=True)
    try:
        number = os.open(out, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        yield
        return
    try:
        if not locked(number, wait=False):
            raise ValueError(
                f"another run is writing into {out}; wait for its end, or give another"
            )
        try:
            yield
        finally:
            if not there:  # while it is held: afterwards another run may have it
                with suppress(OSError):
                    out.rmdir()
    finally:
        os.close(number)


class AnotherRunError(ValueError):
    """What was kept is of a run with other settings or other data."""


def write_checkpoint(folder: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Write ``folder/step-N``, and remove all but the newest ``KEPT``.

    Args:
        folder: of the run's checkpoints; made if it is not there.
        step: steps that were taken.
        write: puts the files into the folder it is given.
    """
    path, partial = folder / f"step-{step}", folder / f"partial-{step}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    for file in partial.rglob("*"):
        _flush(file)
    shutil.rmtree(path, ignore_errors=True)
    partial.rename(path)
    _flush(folder)
    for old in checkpoints(folder)[:-KEPT]:
        shutil.rmtree(old)
    for left in folder.glob("partial-*"):
        shutil.rmtree(left)
    return path


def checkpoints(folder: Path) -> list[Path]:
    """The whole ones, the oldest first."""
    found = [path for path in folder.glob("step-*") if path.name[5:].isdigit()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Steps that were taken when it was written."""
    return int(checkpoint.name[5:])


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write what a run goes on from, as ``torch.load`` reads it.

    Raises:
        ValueError: it cannot be written; what came of it is gone.
    """
    try:
        with path.open("wb") as file:  # not torch's own, which lose what the system said
            torch.save(state, file)
    except (OSError, RuntimeError) as error:
        behind = _behind(error)
        if behind is None:
            raise
        if isinstance(behind, KeyboardInterrupt):  # a second Ctrl-C: the first was noted
            raise behind from None
        path.unlink(missing_ok=True)
        raise ValueError(f"{path} cannot be written: {behind.strerror}") from None


def _behind(error: BaseException | None) -> OSError | KeyboardInterrupt | None:
    """What lies behind an error: torch ends a file that was broken off by one more that fails."""
    while error is not None and not isinstance(error, OSError | KeyboardInterrupt):
        error = error.__context__
    return error


def write_run(folder: Path, seconds: float, identity: Mapping[str, Any]) -> None:
    """Note in a checkpoint how long its run took so far, and what its weights follow from."""
    write_json(folder / RUN, {"seconds": seconds, "identity": dict(identity)})


def read_run(checkpoint: Path, identity: Mapping[str, Any]) -> float:
    """Seconds that the run of a checkpoint took, if it is of this run.

    Raises:
        AnotherRunError: it is of another; the first setting that differs is named.
    """
    run = read_json(checkpoint / RUN, "checkpoint of this recipe")
    check_same(checkpoint, run["identity"], identity)
    seconds: float = run["seconds"]
    return seconds


def check_same(path: Path, kept: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise, naming the first difference, unless ``path`` was made with the settings of now."""
    for name, value in now.items():
        if kept.get(name) != value:
            raise AnotherRunError(
                f"{path} was made with another {name} ({kept.get(name)}, now {value}); go on with "
                "the same settings, or give another out"
            )


@contextmanager
def loading(path: Path, otherwise: str) -> Iterator[None]:
    """Within it, whatever a damaged file raises (there are many kinds) becomes one sentence.

    Args:
        path: that is loaded.
        otherwise: what can be done without it, as "begin again".
    """
    try:
        yield
    except AnotherRunError:
        raise
    except Exception as error:  # noqa: BLE001
        said = reason_of(error).strip().split("\n")[0] or type(error).__name__
        if isinstance(error, UnpicklingError):  # torch's own words advise to trust it
            said = "it is not what torch wrote"
        raise ValueError(
            f"{path} cannot be loaded ({said}); if it is damaged, delete it to {otherwise}"
        ) from None


def _flush(path: Path) -> None:
    """Have the disk hold what was written: a rename may otherwise overtake it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class StopRequest:
    """Within it, Ctrl-C and SIGTERM are noted, and the loop ends after its step; a second signal
    does what it always did.

    Attributes:
        number: of the one that came; 0: none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in STOPPING:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _note(self, number: int, _: object) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
