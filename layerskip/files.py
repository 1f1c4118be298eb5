"""Small JSON files: read with one clear sentence for each mistake, written whole or not at all."""

import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

try:  # here: a sink of rounds asks for it twice a line
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def read_json(path: str | Path, what: str) -> Any:
    """The content of a JSON file.

    Args:
        what: the file should be, as "plan file".

    Raises:
        ValueError: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"{what} {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a {what} ({reason_of(error)})") from None


def reason_of(error: Exception) -> str:
    """What is wrong with the content of a file, in words: of a ``KeyError``, what it lacks."""
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]!r}"
    return str(error)


def by_dotted_name(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of an object and of those within it, as "sampling.seed"."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from by_dotted_name(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def check_writable(path: str | Path) -> Path:
    """Raise unless a file can be written there: to be asked before work that it would lose.

    Returns:
        The file itself, where ``path`` is a link to it.
    """
    path = Path(path)
    try:
        file = path.resolve()
        if path.is_dir():
            raise ValueError(f"{path} is a folder; give the name of a file")
        if path.exists() and not path.is_file():  # a device or a pipe would be gone
            raise ValueError(f"{path} is no regular file; give the name of one")
        if not file.parent.is_dir():
            raise ValueError(f"{path} cannot be written: there is no folder {file.parent}")
    except (OSError, RuntimeError) as error:  # a name too long, a folder closed, links in a ring
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be written: {reason}") from None
    if not os.access(file.parent, os.W_OK):
        raise ValueError(f"{path} cannot be written: folder {file.parent} is not writable")
    if file.exists() and not os.access(file, os.W_OK):
        raise ValueError(f"{path} cannot be written: it is there, and write-protected")
    return file


def write_json(path: str | Path, content: Any, *, indent: int | None = None) -> None:
    """Write a JSON file, as ``write_text`` does.

    Raises:
        ValueError: the content is no JSON, or the file cannot be written; an older one is left.
    """
    try:
        text = json.dumps(content, allow_nan=False, indent=indent) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be written: not JSON ({error})") from None
    write_text(path, text)


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file, as ``write_bytes`` does."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file in one move: whoever reads it meets the old content or the new one. An older
    file's rights are the new one's.

    Raises:
        ValueError: the file cannot be written; an older one is left.
    """
    place = check_writable(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=".layerskip.")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        # mkstemp's files are for their owner alone.
        rights = stat.S_IMODE(place.stat().st_mode) if place.exists() else 0o666 & ~_umask()
        Path(temporary).chmod(rights)
        Path(temporary).replace(place)
    except BaseException as error:  # Ctrl-C leaves no temporary file either
        Path(temporary).unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None


def _umask() -> int:
    """The process's mask of file rights; there is no way to read it but to set it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def locked(file: BinaryIO | int, *, wait: bool = True) -> bool:
    """Whether no other process holds a file, or a folder by its number; it is this one's until it
    is closed or unlocked. Windows and some network disks know no such lock: as if nobody did."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # a disk without locks
        return True
    return True


def unlock(file: BinaryIO | int) -> None:
    """Let others have it."""
    if fcntl is None:
        return
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)
