"""Where the references of a JSON schema lead."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote


class References:
    """The parts of one schema, by pointer.

    Args:
        root: the schema, as Python values.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._anchors = _anchors(root)

    def at(self, pointer: str) -> Any:
        """What stands at a JSON pointer."""
        found = self._root
        for part in pointer.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, IndexError, ValueError, TypeError):
                raise ValueError(f"the schema has nothing at $ref '#{pointer}'") from None
        return found

    def target(self, reference: Any, pointer: str) -> str:
        """The pointer that a ``$ref`` means.

        Args:
            reference: its value.
            pointer: its own place.
        """
        if isinstance(reference, str):
            if reference in ("#", "#/"):
                return ""
            if reference.startswith("#/"):
                return reference[1:]
            if reference in self._anchors:
                return self._anchors[reference]
        raise ValueError(
            f"the schema's $ref {reference!r} at {pointer or '/'} leads out of it; put what it "
            "means under $defs"
        )


def _anchors(root: Any) -> dict[str, str]:
    """Pointers of what has an anchor or an absolute name."""
    found: dict[str, str] = {}
    stack: list[tuple[Any, str]] = [(root, "")]
    while stack:
        value, pointer = stack.pop()
        if isinstance(value, Mapping):
            for word, prefix in (("$anchor", "#"), ("$id", ""), ("id", "")):
                if isinstance(value.get(word), str):
                    found.setdefault(prefix + value[word].removesuffix("#"), pointer)
                    found.setdefault(prefix + value[word], pointer)
            for key, inner in value.items():
                part = str(key).replace("~", "~0").replace("/", "~1").replace("%", "%25")
                stack.append((inner, f"{pointer}/{part}"))
        elif isinstance(value, list):
            stack += [(inner, f"{pointer}/{i}") for i, inner in enumerate(value)]
    return found
