"""What every part of a spec is made of: the base class and the strict numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictInt

INT32_MAX = 2**31 - 1


# Strict: a boolean or a text that looks like a number is none. Not a validator of our own, which would hide the limits
# around it from the JSON Schema.
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Count = Annotated[StrictInt, Field(ge=1, le=INT32_MAX)]


class Spec(BaseModel):
    """Base of every part of a spec: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
