"""A journal of measurements: what was measured once is not measured again after an interruption."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class Journal:
    """Measurements by name, one JSON line each, on the disk before the next one starts.

    The first line says what the measurements are of. A last line that was cut off by a kill is
    dropped.

    Args:
        path: of the file; None keeps nothing.
        subject: what is measured, by name, ready for JSON.

    Raises:
        ValueError: the file is no journal, is damaged, or is of another subject.
    """

    def __init__(self, path: str | Path | None, subject: Mapping[str, str | int | float]) -> None:
        self.path = None if path is None else Path(path)
        self._known: dict[str, Any] = {}
        first = {"journal": 1, **subject}
        if self.path is None:
            return
        lines = self._whole_lines()
        if not lines:
            self._append(first)
            return
        _check_subject(self.path, self._parsed(lines[0], 1), first)
        for number, line in enumerate(lines[1:], 2):
            entry = self._parsed(line, number)
            if entry.keys() != {"what", "result"} or not isinstance(entry["what"], str):
                raise self._damaged(f"line {number}")
            self._known[entry["what"]] = entry["result"]

    def once(self, what: str, measure: Callable[[], Any], read: Callable[[Any], T]) -> T:
        """What ``measure`` gave, now or before the interruption, as ``read`` takes it.

        Args:
            what: name of the measurement.
            measure: returns something ready for JSON.
            read: makes a value of it.
        """
        if what not in self._known:
            result = measure()
            self._append({"what": what, "result": result})
            self._known[what] = result
        try:
            return read(self._known[what])
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            if self.path is None:
                raise
            raise self._damaged(f"the entry {what!r}") from None

    def knows(self, what: str) -> bool:
        """Whether this was measured before."""
        return what in self._known

    def close(self) -> None:
        """Remove the file: nothing is left to go on with."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _whole_lines(self) -> list[bytes]:
        """Lines of the file; what follows the last whole one is cut off."""
        assert self.path is not None
        try:
            with self.path.open("a+b") as file:
                file.seek(0)
                content = file.read()
                whole = content.rfind(b"\n") + 1
                # A kill leaves the beginning of a line of ours; anything else is somebody's file.
                if whole < len(content) and not content[whole:].startswith(b"{"):
                    raise self._damaged("its end")
                file.truncate(whole)
        except OSError as error:
            raise ValueError(
                f"journal {self.path} cannot be written: {error.strerror}; "
                "give --out another folder"
            ) from None
        return content[:whole].splitlines()

    def _parsed(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict):
            raise self._damaged(f"line {number}")
        return entry

    def _append(self, entry: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        with self.path.open("ab") as file:
            file.write(json.dumps(entry, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _damaged(self, where: str) -> ValueError:
        return ValueError(
            f"{self.path} is not a whole journal ({where}); delete it to start from the beginning"
        )


def _check_subject(path: Path, found: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if found.get("journal") != own["journal"]:
        raise ValueError(f"{path} is not a journal of this layerskip; give --out another name")
    differing = [name for name in own if found.get(name) != own[name]]
    if differing:
        name = differing[0]
        raise ValueError(
            f"{path} is the journal of a search with another {name.replace('_', ' ')} "
            f"({found.get(name)}, now {own[name]}); delete it or give --out another name"
        )
