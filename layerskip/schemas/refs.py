"""Where the references of a JSON schema lead."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

INDEX = re.compile(r"0|[1-9][0-9]*")  # of an array, in a JSON pointer (RFC 6901, section 4)


class References:
    """The parts of one schema, by pointer.

    Args:
        root: the schema, as Python values.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        old = isinstance(root, Mapping) and isinstance(root.get("id"), str) and "$id" not in root
        self._id = "id" if old else "$id"
        self._named: dict[str, list[str]] = {}
        for name, pointer in self._names():
            self._named.setdefault(name, []).append(pointer)

    def at(self, pointer: str) -> Any:
        """What stands at a JSON pointer."""
        return list(self._way(pointer))[-1][1]

    def target(self, reference: Any, pointer: str) -> str:
        """The pointer that a ``$ref`` means, under the nearest ``$id`` around it.

        Args:
            reference: its value.
            pointer: its own place.
        """
        if isinstance(reference, str):
            name, fragment = urldefrag("#" if reference == "#/" else reference)
            base, uri = self._base(pointer)
            uri, inner = urljoin(uri, name) if name else uri, unquote(fragment)
            anchored = bool(inner) and not inner.startswith("/")
            found = self._named.get(f"{uri}#{inner}" if anchored else uri, [])
            if not name and not anchored:
                found = [base]
            if len(found) == 1:  # nobody can say which of several is meant
                return found[0] + ("" if anchored else inner)
        raise ValueError(
            f"the schema's $ref {reference!r} at {shown(pointer)} leads out of it; put what it "
            "means under $defs"
        )

    def _way(self, pointer: str) -> Iterator[tuple[str, Any]]:
        """What a pointer leads through, from the root on, each with its place."""
        place, found = "", self._root
        yield place, found
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            try:
                if isinstance(found, list) and not INDEX.fullmatch(key):  # int() takes more
                    raise ValueError(key)
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, IndexError, ValueError, TypeError):
                raise ValueError(f"the schema has nothing at $ref {'#' + pointer!r}") from None
            place += f"/{part}"
            yield place, found

    def _base(self, pointer: str) -> tuple[str, str]:
        """Place and absolute name of the nearest schema around a place that has a name."""
        base, uri = "", ""
        for place, value in self._way(pointer):
            name = value.get(self._id) if isinstance(value, Mapping) else None
            if isinstance(name, str) and not name.startswith("#"):
                base, uri = place, urljoin(uri, name.removesuffix("#"))
        return base, uri

    def _names(self) -> Iterator[tuple[str, str]]:
        """Absolute names and anchors, each with its place."""
        stack: list[tuple[Any, str, str]] = [(self._root, "", "")]
        while stack:
            value, pointer, uri = stack.pop()
            if isinstance(value, Mapping):
                name, anchor = value.get(self._id), value.get("$anchor")
                if isinstance(name, str) and not name.startswith("#"):
                    uri = urljoin(uri, name.removesuffix("#"))
                    yield uri, pointer
                elif isinstance(name, str):  # up to draft 7
                    yield f"{uri}{name}", pointer
                if isinstance(anchor, str):
                    yield f"{uri}#{anchor}", pointer
                stack += [(v, f"{pointer}/{escaped(str(k))}", uri) for k, v in value.items()]
            elif isinstance(value, list):
                stack += [(inner, f"{pointer}/{i}", uri) for i, inner in enumerate(value)]


def escaped(key: str) -> str:
    """A key as a part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def shown(pointer: str) -> str:
    """A JSON pointer in a message: on one line, whatever the names in it."""
    return pointer or "/" if pointer.isprintable() else json.dumps(pointer)
