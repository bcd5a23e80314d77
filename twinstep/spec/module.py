"""A user's own nn.Module in a job spec: where its factory is found, what it is called with. Text alone.

Nothing here imports it: a control plane stores these words, and only what builds the model acts on them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictInt, field_validator
from pydantic_core import PydanticCustomError

from twinstep.spec.base import INT32_MAX, Spec

FACTORY = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"
EXAMPLE = "my_package.ranker:build"
MAX_ARGUMENTS = 64
MAX_ARGUMENT_DEPTH = 8
INT64_MAX = 2**63 - 1
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|[\ud800-\udfff]")


def _factory(value: Any) -> Any:
    """Refuse what is no `package.module:name`, with the nearest that is."""
    if not isinstance(value, str) or re.fullmatch(FACTORY[1:-1], value):
        return value
    parts = re.split(r"[.:/]+", value.strip()[:200].replace(".py:", ":"))
    words = [re.sub(r"\W", "_", each, flags=re.ASCII) for each in parts if each]
    guess = f"{'.'.join(words[:-1])}:{words[-1]}" if len(words) > 1 else f"{words[0]}:build" if words else EXAMPLE
    raise PydanticCustomError(
        "between_fields",
        "is no package.module:name",
        {
            "allowed": f"a module that Python can import, a colon, and a function or class in it: {EXAMPLE}",
            "nearest": guess if re.fullmatch(FACTORY[1:-1], guess) else EXAMPLE,
        },
    )


class ModuleSpec(Spec):
    """Your own `nn.Module`: what a factory in your package returns, and what it is called with."""

    kind: Literal["module"]
    """The model."""
    factory: Annotated[
        str, Field(min_length=3, max_length=256, pattern=FACTORY, examples=[EXAMPLE]), BeforeValidator(_factory)
    ]
    """`package.module:name` of a function or class; called as `name(config, **arguments)`, with a
    `twinstep.ModuleConfig`, it returns an `nn.Module`. No control plane imports it."""
    source: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")] | None = None
    """Local folder, by its whole path, that the package lies in, where the worker is; null: where Python looks."""
    arguments: Annotated[
        dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")], Any],
        Field(max_length=MAX_ARGUMENTS),
    ] = Field(default_factory=dict)
    """Keyword arguments of the factory, JSON values."""
    embedding_dim: Annotated[StrictInt, Field(ge=1, le=16384)] = 32
    """E: floats per row of every table of an embedding collection."""
    dense_parameters: Annotated[StrictInt, Field(ge=0, le=INT32_MAX)] | None = None
    """Numbers in the module's parameters outside its tables, for preflight, which cannot know; null: it counts none."""

    @field_validator("source")
    @classmethod
    def _is_local(cls, value: str | None) -> str | None:
        if value is not None and "://" in value:
            said = {"allowed": "a folder where the worker is, by its whole path; or null", "nearest": None}
            raise PydanticCustomError("between_fields", "is no local folder: code is not fetched", said)
        return value

    @field_validator("arguments")
    @classmethod
    def _plain(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, given in value.items():
            for problem in _problems(given, MAX_ARGUMENT_DEPTH):
                others = {key: each for key, each in value.items() if not any(_problems(each, MAX_ARGUMENT_DEPTH))}
                raise PydanticCustomError(
                    "between_fields",
                    "{name}: {problem}",
                    {
                        "name": name,
                        "problem": problem,
                        "allowed": f"JSON values: finite numbers, integers of 64 bits, text without control "
                        f"characters, lists and mappings {MAX_ARGUMENT_DEPTH} deep at most",
                        "nearest": others,
                    },
                )
        return value

    @property
    def draws(self) -> bool:
        """Whether training draws random numbers; of a module nobody knows before it is there."""
        return False


def _problems(value: Any, depth: int) -> Iterator[str]:
    """Yield what of a value neither a database nor another process would give back as it is."""
    if depth == 0:
        yield "is nested too deeply"
    elif isinstance(value, float) and not math.isfinite(value):
        yield "a number is not finite"
    elif isinstance(value, int) and not -INT64_MAX - 1 <= value <= INT64_MAX:
        yield "a whole number has more than 64 bits"
    elif isinstance(value, str) and _CONTROL.search(value):
        yield "text has control characters"
    elif not isinstance(value, str | int | float | list | Mapping | None):
        yield "is no JSON value"
    elif isinstance(value, list):
        for each in value:
            yield from _problems(each, depth - 1)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _problems(key, depth) if isinstance(key, str) else ["a name is no text"]
            yield from _problems(each, depth - 1)
