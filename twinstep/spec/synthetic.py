"""What synthetic data is like: `data.synthetic`. It is seeded: the same spec gives the same data on any machine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictInt, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from twinstep.spec.base import INT32_MAX, Number, Spec, TableName

Rows = Annotated[StrictInt, Field(ge=1, le=10_000_000)]  # each has a popularity, at 8 bytes
MAX_FEATURES = 256


class SyntheticSpec(Spec):
    """Sizes of the synthetic datasets; others ignore them."""

    seed: Annotated[StrictInt, Field(ge=0, le=INT32_MAX)] | None = None
    """Seed of the data; null: one that never changes."""
    zipf: Annotated[Number, Field(ge=0, le=10)] = 1.1
    """Exponent of the popularity of ids: the n-th most popular is drawn in proportion to n^-zipf; 0: all alike."""
    users: Rows | None = None
    """Users of `synthetic`; null: one per 50 events."""
    items: Rows | None = None
    """Items of `synthetic`; null: one per 50 events."""
    history: Literal["uniform", "fixed", "zipf", "lognormal"] = "uniform"
    """Events of a user in `synthetic`: each event's user drawn alike; the same number each; few users with most."""
    history_spread: Annotated[Number, Field(ge=0, le=10)] = 1.0
    """Exponent of `history: zipf`, or standard deviation of the logarithm of `history: lognormal`."""
    user_features: Annotated[dict[TableName, Rows], Field(max_length=MAX_FEATURES)] = Field(default_factory=dict)
    """Further features of `synthetic`'s users: rows of their tables by name."""
    item_features: Annotated[dict[TableName, Rows], Field(max_length=MAX_FEATURES)] = Field(default_factory=dict)
    """Further features of `synthetic`'s items: rows of their tables by name."""
    dense: Annotated[StrictInt, Field(ge=1, le=4096)] = 13
    """Dense features of `synthetic-clicks`."""
    table_rows: Annotated[tuple[Rows, ...], Field(min_length=1, max_length=MAX_FEATURES)] | None = None
    """Rows of the tables of `synthetic-clicks`, one bag of ids each; null: 26 tables as in the Criteo data, smaller."""
    max_ids: Annotated[StrictInt, Field(ge=1, le=1024)] | None = None
    """Most ids of a bag of `synthetic-clicks`; null: 1 with `table_rows`, else what MLPerf's data has, cut to 12."""

    @field_validator("item_features")
    @classmethod
    def _names_are_free(cls, value: dict[str, int], info: ValidationInfo) -> dict[str, int]:
        taken = {*TAKEN, *info.data.get("user_features", {})}
        clash = [name for name in value if name in taken]
        if clash:
            said = {"name": clash[0], "allowed": f"none of {', '.join(sorted(taken))}"}
            free = {name: rows for name, rows in value.items() if name not in taken}
            raise PydanticCustomError("between_fields", "names {name}, which is taken", {**said, "nearest": free})
        return value

    @field_validator("user_features")
    @classmethod
    def _names_are_new(cls, value: dict[str, int]) -> dict[str, int]:
        clash = [name for name in value if name in TAKEN]
        if clash:
            said = {"name": clash[0], "allowed": f"none of {', '.join(TAKEN)}"}
            free = {name: rows for name, rows in value.items() if name not in TAKEN}
            raise PydanticCustomError("between_fields", "names {name}, which is taken", {**said, "nearest": free})
        return value


TAKEN = ("user_id", "segment", "item_id")
"""Features that `synthetic` has anyway."""

SEGMENTS = 8
"""Segments that the users of `synthetic` fall into; rows of their table."""
PER_EVENT = 50  # events per user and per item, where a spec does not say


def users_of(asked: SyntheticSpec, events: int) -> int:
    """Return the users of `synthetic`."""
    return asked.users or max(8, events // PER_EVENT)


def items_of(asked: SyntheticSpec, events: int) -> int:
    """Return the items of `synthetic`."""
    return asked.items or max(16, events // PER_EVENT)


TABLE_ROWS = (2000, 1500, 1000, 800, 600, 500, 400, 300, 250, 200, 150, 100, 90, 80, 70, 60, 50, 40, 30, 20, 15, 10,
              8, 5, 4, 3)  # fmt: skip
"""Rows of the tables of `synthetic-clicks`, where a spec does not say."""
MAX_IDS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 10, 7, 10, 3, 1, 1)
"""Most ids of a bag by feature: the sizes of MLPerf's multi-hot Criteo data, cut to 12."""
