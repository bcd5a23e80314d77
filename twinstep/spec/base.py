"""What every part of a spec is made of: the base class, the strict numbers and names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt

from twinstep.spec.text import plain_text

INT32_MAX = 2**31 - 1


# Strict: a boolean or a text that looks like a number is none. Not a validator of our own, which would hide the limits
# around it from the JSON Schema.
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Count = Annotated[StrictInt, Field(ge=1, le=INT32_MAX)]
FieldName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,127}$")]
"""Of a feature, a task or a column."""
TableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,127}$")]
"""Of a feature that has a table: without dots, which divide the names of a model's tensors."""
MAX_BATCH = 65536
"""Samples of a step, over all devices."""
MAX_TABLES = 1024
"""Tables that one part of a spec may name; each costs time wherever a spec is looked at."""


class Spec(BaseModel):
    """Base of every part of a spec: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def with_kind(value: Any, default: str | None = None) -> Any:
    """Return what stands in a union of parts, ready for pydantic to tell its member by `kind`.

    Args:
        default: the kind of a mapping that names none; None leaves it without.
    """
    if not isinstance(value, Mapping):
        return value
    kind = value.get("kind", default)
    # Pydantic writes a kind it does not know out, and cannot where a number in it has thousands of digits.
    return {**value, "kind": kind if isinstance(kind, str) else plain_text(kind)} if kind is not None else value
