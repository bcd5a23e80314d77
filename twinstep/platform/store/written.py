"""JSON in columns: how it is written and read, and text that is JSON already."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json


class Written(str):
    """JSON that was written already: a column takes it as it is."""

    __slots__ = ()


def write_json(value: Any) -> str:
    """Return a value as the text of a column; searches know its form: a space after each comma and colon."""
    return value if isinstance(value, Written) else json.dumps(value)


def read_json(text: str | bytes) -> Any:
    """Return what the text of a column says."""
    return from_json(text)
