"""A journal of measurements: what was measured once is not measured again after an interruption."""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from layerskip.files import by_dotted_name, locked

VERSION = 1
MOST_NAMED = 3  # of what differs between two measurements

T = TypeVar("T")


class Journal:
    """Measurements by name, one JSON line each, on the disk before the next one starts. No other
    process may have the file until it is closed.

    The first line says what the measurements are of; it is written with the first of them, so that
    work which fails before leaves no file. A last line that was cut off by a kill is dropped.

    Args:
        path: of the file; None keeps nothing.
        subject: what is measured, by name, ready for JSON; objects are compared value by value.

    Raises:
        ValueError: the file is no journal, is damaged, is of another subject, or another process
            has it.
    """

    def __init__(self, path: str | Path | None, subject: Mapping[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self._known: dict[str, Any] = {}
        self._unwritten: list[Mapping[str, Any]] = []
        self._held: BinaryIO | None = None
        if self.path is not None:
            try:
                self._held = self._hold(self.path)
                self._open(self.path, {"journal": VERSION, **subject})
            except BaseException:
                self.close()
                raise

    def _hold(self, path: Path) -> BinaryIO:
        """The file, made if there is none, with a lock that ends when it is closed."""
        while True:
            try:
                file = path.open("ab")
            except OSError as error:
                raise self._unwritable(error) from None
            if not locked(file, wait=False):
                file.close()
                raise ValueError(f"{path} is being written by another process; wait for its end")
            if _is_at(path, file):
                return file
            file.close()  # whoever had it has removed it: the lock is of a file without a name

    def close(self) -> None:
        """Let other processes have the file; one without any measurement is removed."""
        if self.path is None or self._held is None:
            return
        file, self._held = self._held, None
        with file:
            if not os.fstat(file.fileno()).st_size and _is_at(self.path, file):
                _unlink(self.path, file)

    def _open(self, path: Path, first: Mapping[str, Any]) -> None:
        """Read what is there; nothing is written before it is known to be of this subject."""
        try:
            content = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise self._unwritable(error) from None
        whole = content.rfind(b"\n") + 1
        lines = content[:whole].splitlines()
        if not lines and not _line(first).startswith(content):
            raise self._damaged("line 1")
        if lines:
            _check_subject(path, self._parsed(lines[0], 1), first)
        for number, line in enumerate(lines[1:], 2):
            entry = self._parsed(line, number)
            if entry.keys() != {"what", "result"} or not isinstance(entry["what"], str):
                raise self._damaged(f"line {number}")
            self._known[entry["what"]] = entry["result"]
        if whole < len(content):
            os.truncate(path, whole)
        if not lines:
            self._unwritten = [first]

    def once(self, what: str, measure: Callable[[], Any], read: Callable[[Any], T]) -> T:
        """What ``measure`` gave, now or before the interruption, as ``read`` takes it.

        Args:
            what: name of the measurement.
            measure: returns something ready for JSON.
            read: makes a value of it.
        """
        if what not in self._known:
            result = measure()
            self._append(*self._unwritten, {"what": what, "result": result})
            self._unwritten = []
            self._known[what] = result
        try:
            return read(self._known[what])
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            if self.path is None:
                raise
            raise self._damaged(f"the entry {what!r}") from None

    def _parsed(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict):
            raise self._damaged(f"line {number}")
        return entry

    def _append(self, *entries: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        try:
            with self.path.open("ab") as file:
                file.write(b"".join(map(_line, entries)))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> ValueError:
        return ValueError(f"journal {self.path} cannot be written: {error.strerror}")

    def _damaged(self, where: str) -> ValueError:
        return ValueError(
            f"{self.path} is not a whole journal ({where}); delete it to start from the beginning"
        )


def remove(path: Path) -> None:
    """Remove a journal that is no longer needed, unless another process goes on with it."""
    with suppress(FileNotFoundError), path.open("r+b") as file:
        if locked(file, wait=False) and _is_at(path, file):
            _unlink(path, file)


def _is_at(path: Path, file: BinaryIO) -> bool:
    """Whether the file still has that name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _unlink(path: Path, file: BinaryIO) -> None:
    """Remove a file while it is held."""
    try:
        path.unlink()
    except PermissionError:  # Windows removes no open file
        file.close()
        path.unlink(missing_ok=True)


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, allow_nan=False).encode() + b"\n"


def _check_subject(path: Path, found: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if found.get("journal") != own["journal"]:
        raise ValueError(f"{path} is not a journal of this layerskip; give another name")
    before, now = dict(by_dotted_name(found)), dict(by_dotted_name(json.loads(_line(own))))
    missing = "nothing"  # of an object that has fewer values
    differing = [
        f"{name.replace('_', ' ')} {before.get(name, missing)}, now {now.get(name, missing)}"
        for name in now | before
        if (name in before, before.get(name)) != (name in now, now.get(name))
    ]
    if differing:
        more = len(differing) - MOST_NAMED
        named = "; ".join(differing[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(
            f"{path} is the journal of another measurement ({named}); "
            "delete it or give another name"
        )
