"""A runs folder: what ``layerskip measure`` writes, line by line, and reports are made of.

``run.json`` says what was measured, ``rounds.jsonl`` holds every round, ``requests.jsonl`` every
finished request, ``samples.jsonl`` the text of a few. A request counts once its line is there.
"""

import errno
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from layerskip.files import by_dotted_name, locked, read_json, unlock, write_json

RUNS_VERSION = 1
RUN, ROUNDS, REQUESTS, SAMPLES = "run.json", "rounds.jsonl", "requests.jsonl", "samples.jsonl"
FILES = (RUN, ROUNDS, REQUESTS, SAMPLES)
BLOCK = 1 << 16
ENCODED = json.JSONEncoder(allow_nan=False).encode
FINITE = json.JSONDecoder(parse_constant=int)  # int takes no NaN or Infinity, which nobody writes
# What lines must hold to be gone on from and summed up.
Fields = Mapping[str, type | tuple[type, ...]]
ROUND_FIELDS: Fields = {"request_id": str, "index": int}
SAMPLE_FIELDS: Fields = {"labels": dict, "arm": str}
REQUEST_FIELDS: Fields = {
    "request_id": str,
    "prompt_index": int,
    "arm": str,
    "labels": dict,
    "new_tokens": int,
    "num_rounds": int,
    "num_draft_tokens": int,
    "num_accepted_tokens": int,
    "decode_seconds": (int, float),
    "tokens_sha256": str,
}


class JsonLines:
    """A file of JSON lines that grows by whole lines, so that it can be read after any kill.

    Lines go to the operating system in one write each: a killed process loses none. ``sync``
    brings them to the disk, which a loss of power leaves. A last line that was cut off is dropped
    when the file is opened, and before lines are added. Threads and processes may share the file:
    whoever changes it has it locked. Windows and some network disks know no such lock: one process
    at a time, there.

    Args:
        path: of the file; made if there is none.
        alone: no other process may write the file until it is closed.

    Raises:
        ValueError: it cannot be written, now or later, another process has it alone, or its end is,
            or has become, no JSON line.
    """

    def __init__(self, path: str | Path, *, alone: bool = False) -> None:
        self.path, self._alone, self._turn = Path(path), alone, threading.Lock()
        self._ended = 0  # what this writer added last: the file's size then
        with ExitStack() as opened:
            try:
                self._file = opened.enter_context(self.path.open("a+b", buffering=0))
                if alone and not locked(self._file, wait=False):
                    raise ValueError(
                        f"{path} is being written by another process; wait for its end"
                    )
                with self._to_itself():
                    self._mend()
            except OSError as error:
                raise self._unwritable(error) from None
            opened.pop_all()

    def _mend(self) -> None:
        """End the last line if nothing else is missing of it; drop one that was cut off."""
        size = self._size()
        whole = whole_lines(self._file)
        if whole >= size:  # without locks others may have added whole lines since
            return
        self._file.seek(0)
        begins_well = not whole or self._file.read(1) == b"{"
        self._file.seek(whole)
        rest = self._file.read()
        lost = not rest.strip(b"\0")  # zeros are what a loss of power leaves
        if not begins_well or not (rest.startswith(b"{") or lost):
            raise ValueError(f"{self.path} does not hold JSON lines, and is left as it is")
        try:
            json.loads(rest)
        except (ValueError, RecursionError):
            self.cut(whole)
        else:
            self._file.write(b"\n")

    def append(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Add a line for each entry; none of them if there is no room for all."""
        left = memoryview("".join(f"{ENCODED(e)}\n" for e in entries).encode())
        with self._to_itself():
            before = self._line_start()
            end = before + len(left)
            try:
                while left:
                    left = left[self._file.write(left) :]
            except BaseException as error:  # Ctrl-C leaves no half line either
                if self._size() < end:
                    self.cut(before)
                if not isinstance(error, OSError):
                    raise
                raise self._unwritable(error) from None
            self._ended = end

    def _line_start(self) -> int:
        """The file's size. Another writer may have died within a line since this one opened it,
        and a line that is added to such a one is lost with it."""
        descriptor, size = self._file.fileno(), self._size()
        try:
            if size and size != self._ended:  # else the last line is of this writer, and whole
                os.lseek(descriptor, -1, os.SEEK_END)
                if os.read(descriptor, 1) != b"\n":
                    self._mend()
                    size = self._size()
        except OSError as error:
            raise self._unwritable(error) from None
        return size

    def cut(self, size: int) -> None:
        """Drop what stands behind the first ``size`` bytes."""
        if size < self._size():
            os.ftruncate(self._file.fileno(), size)

    def _size(self) -> int:
        """Of the file that is open: when logs are rotated, another one gets its name."""
        return os.fstat(self._file.fileno()).st_size

    def sync(self) -> None:
        """Wait until the disk has it all; nothing is left to wait for of a file that is closed."""
        if self._file.closed:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            if error.errno != errno.EINVAL:  # of what is on no disk, such as /dev/null
                raise self._unwritable(error) from None

    @contextmanager
    def _to_itself(self) -> Iterator[None]:
        """While nobody else changes the file: a line that is being written looks cut off."""
        with self._turn:
            try:
                if not self._alone:
                    locked(self._file)
                yield
            finally:
                if not self._alone:
                    unlock(self._file)

    def close(self) -> None:
        self._file.close()

    def _unwritable(self, error: OSError) -> ValueError:
        return ValueError(f"{self.path} cannot be written: {error.strerror}")


def read_lines(path: str | Path, fields: Fields | None = None) -> Iterator[dict[str, Any]]:
    """Entries of a file that ``JsonLines`` wrote, one at a time; nothing if there is no file.

    Args:
        fields: that every entry must have, and of which kinds; None: any.

    Raises:
        ValueError: a line other than a last one that was cut off is damaged, or lacks a field.
    """
    path = Path(path)
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield _parsed(path, f"line {number}", line, fields or {})


def _parsed(path: Path, where: str, line: bytes, fields: Fields) -> dict[str, Any]:
    try:
        entry = FINITE.decode(line.decode())
    except (ValueError, RecursionError):
        entry = None
    whole = isinstance(entry, dict)
    if not whole or not all(isinstance(entry.get(name), kind) for name, kind in fields.items()):
        raise damaged(path, where)
    return entry


def damaged(path: Path, where: str) -> ValueError:
    """What is said of a file whose lines nothing can be made of."""
    return ValueError(f"{path} is damaged ({where}); measure again into another folder")


def read_run(folder: str | Path) -> dict[str, Any]:
    """What ``run.json`` says.

    Raises:
        ValueError: the folder is none of ``layerskip measure``, of another version, or was changed.
    """
    if not (Path(folder) / RUN).is_file():
        lacks = f"it has no {RUN}" if Path(folder).is_dir() else "there is no such folder"
        raise ValueError(
            f"{folder} is no runs folder ({lacks}): give what `layerskip measure --out` wrote to"
        )
    content = read_json(Path(folder) / RUN, "measurement")
    if not isinstance(content, dict) or content.get("version") != RUNS_VERSION:
        raise ValueError(f"{Path(folder) / RUN} is no measurement of version {RUNS_VERSION}")
    kinds = (("sampling", dict, "an object"), ("cost", dict, "an object"), ("label", str, "a text"))
    for name, kind, what in kinds:
        if not isinstance(content.get(name), kind | None):
            got = content[name]
            raise ValueError(f"{Path(folder) / RUN}: {name} must be {what} or null, got {got!r}")
    return content


class RunsFolder:
    """A runs folder that is being written: new, or gone on with after an interruption.

    Rounds of a request that was not finished are dropped. A folder without any finished request is
    begun anew.

    Args:
        folder: made if there is none.
        run: content of ``run.json``. Everything in it but the measured costs has to be what it was
            at the first start, and of the costs what they were measured with.

    Raises:
        ValueError: the folder cannot be written, is of other settings, holds something else, or
            another process writes it.
    """

    def __init__(self, folder: str | Path, run: Mapping[str, Any]) -> None:
        self.path = Path(folder)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{folder} cannot be made: {error.strerror}") from None
        self._before()  # a folder that holds something else is left alone
        with ExitStack() as opened:
            requests = JsonLines(self.path / REQUESTS, alone=True)
            self._requests = opened.enter_context(closing(requests))
            before = self._before()  # another process may have begun and ended since
            last = _last_entry(self._requests.path)
            if last is None or before is None:
                write_json(self.path / RUN, {"version": RUNS_VERSION, **run}, indent=1)
            else:
                _check_settings(self.path, before, run)
            self._rounds = opened.enter_context(closing(JsonLines(self.path / ROUNDS)))
            self._rounds.cut(_end_of(self._rounds.path, last))
            self._samples = opened.enter_context(closing(JsonLines(self.path / SAMPLES)))
            self._files = opened.pop_all()

    def _before(self) -> dict[str, Any] | None:
        """What ``run.json`` says; None if the folder is new."""
        if (self.path / RUN).exists():
            return read_run(self.path)
        files = [self.path / name for name in (ROUNDS, REQUESTS, SAMPLES)]
        if any(f.exists() and f.stat().st_size for f in files):
            raise ValueError(f"{self.path} holds records but no {RUN}; give another folder")
        return None

    def finished(self) -> Iterator[dict[str, Any]]:
        """Lines of the requests that were finished before, in their order."""
        return read_lines(self._requests.path, REQUEST_FIELDS)

    def samples(self) -> Iterator[dict[str, Any]]:
        """Lines of the samples so far."""
        return read_lines(self._samples.path, SAMPLE_FIELDS)

    def add(
        self,
        request: Mapping[str, Any],
        rounds: Iterable[Mapping[str, Any]],
        sample: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a finished request with its rounds; on the disk when this returns."""
        self._rounds.append(rounds)
        self._rounds.sync()
        self._requests.append([request])
        self._requests.sync()
        if sample is not None:  # last, so that none is ever of a request that does not count
            self._samples.append([sample])

    def close(self) -> None:
        """Let go of the files; another process may write the folder from here on."""
        self._files.close()


def _check_settings(folder: Path, found: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    before, now = _settings(found), _settings(own)
    for name in [*now, *before]:
        if before.get(name) != now.get(name):
            raise ValueError(
                f"{folder} was measured with other settings ({name.replace('_', ' ')} "
                f"{before.get(name)}, now {now.get(name)}); give another folder"
            )


def _settings(run: Mapping[str, Any]) -> dict[str, Any]:
    """What must not change between two starts, by dotted name, as JSON has it."""
    cost = run.get("cost") or {}  # none in a file that was changed
    kept = {k: v for k, v in run.items() if k != "version"} | {"cost": cost.get("key")}
    return dict(by_dotted_name(json.loads(json.dumps(kept))))


def whole_lines(file: BinaryIO) -> int:
    """Bytes up to the end of the last whole line."""
    return next((start + len(line) for start, line in _backwards(file)), 0)


def _last_entry(path: Path) -> dict[str, Any] | None:
    with path.open("rb") as file:
        lines = (line for _, line in _backwards(file))
        return next((_parsed(path, "near the end", line, REQUEST_FIELDS) for line in lines), None)


def _end_of(path: Path, request: Mapping[str, Any] | None) -> int:
    """Bytes up to the end of that request's last line; it is near the end of the file."""
    if request is None:
        return 0
    request_id = request["request_id"]
    with path.open("rb") as file:
        for start, line in _backwards(file):
            entry = _parsed(path, "near the end", line, ROUND_FIELDS)
            if entry["request_id"] != request_id:
                continue
            if entry["index"] != request["num_rounds"]:  # they count from the prefill's 0
                break
            return start + len(line)
    raise ValueError(
        f"{path} lacks rounds of request {request_id}; measure again into another folder"
    )


def _backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Whole lines from the last one on, each with the place where it starts."""
    start, held = file.seek(0, os.SEEK_END), b""  # what is held begins at start
    while held or start:
        before = held.rfind(b"\n", 0, -1)
        if held.endswith(b"\n") and (before >= 0 or start == 0):
            yield start + before + 1, held[before + 1 :]
            held = held[: before + 1]
        elif before >= 0:  # the last line was cut off
            held = held[: before + 1]
        elif start == 0:
            return
        else:
            size = min(BLOCK, start)
            start -= size
            file.seek(start)
            held = file.read(size) + held
