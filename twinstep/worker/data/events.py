"""Events, the table every dataset becomes, and the schema that says the tables and tasks it needs.

`movielens.py` and `synthetic.py` make both, `samples.py` cuts them, `models/` reads the schema. No file is read here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from twinstep.spec.errors import DataError

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

INT32_MAX = 2**31 - 1  # ids and times become int32 on XLA without a warning, so what does not fit is refused here


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSchema:
    """One embedding table."""

    name: str
    rows: int
    """Ids are 0..rows-1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureSchema:
    """One id feature, looked up in a table that others may share."""

    name: str
    table: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSchema:
    """One thing to predict for a candidate."""

    name: str
    kind: Literal["binary", "regression"] = "binary"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSchema:
    """What a model must know of a dataset, and all it may know."""

    tables: tuple[TableSchema, ...]
    contextual: tuple[FeatureSchema, ...]
    """One id per row each; the order is that of their slots."""
    item_features: tuple[FeatureSchema, ...]
    """One id per event and candidate each; the first is the item itself."""
    tasks: tuple[TaskSchema, ...]
    """Binary ones first."""
    action_bits: int
    """Bits of an event's action word."""

    def with_rows(self, rows: dict[str, int]) -> DataSchema:
        """Return the schema with tables enlarged to `rows`.

        Raises:
            DataError: a name is no table, or fewer rows are asked for than the data has.
        """
        return replace(self, tables=enlarged(self.tables, rows))


def enlarged(tables: tuple[TableSchema, ...], rows: dict[str, int]) -> tuple[TableSchema, ...]:
    """Return the tables with those named in `rows` enlarged.

    Raises:
        DataError: a name is no table, or fewer rows are asked for than the data has.
    """
    names = {table.name for table in tables}
    for name in rows:
        if name not in names:
            raise DataError(
                f"data.rows names the table {name!r}, which this dataset does not have",
                remedy=f"tables: {', '.join(sorted(names))}",
            )
    for table in tables:
        if rows.get(table.name, table.rows) < table.rows:
            raise DataError(
                f"data.rows gives the table {table.name!r} {rows[table.name]} rows, but its ids need {table.rows}",
                remedy=f"{table.name}: {table.rows}, or leave it out",
            )
    return tuple(replace(table, rows=rows.get(table.name, table.rows)) for table in tables)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Events:
    """Who rated what and when, sorted by (time, user, order in the source)."""

    # Shapes: E events, P users, C contextual features, F item features, I items.

    user: Ints
    """[E] int64, 0..P-1."""
    item: Ints
    """[E] int64, 0..I-1."""
    rating: Floats
    """[E] float32."""
    time: Ints
    """[E] int64: seconds, 0..2^31-1."""
    user_features: Ints
    """[P, C] int64: ids of the contextual features."""
    item_features: Ints
    """[I, F] int64: ids of the item features."""

    def __len__(self) -> int:
        return len(self.user)


def make_events(
    *, user: Ints, item: Ints, rating: Floats, time: Ints, user_features: Ints, item_features: Ints, source: str
) -> Events:
    """Return the events sorted and checked.

    Raises:
        DataError: there are none, or a time does not fit 31 bits (milliseconds, say), or a rating is not finite.
    """
    if not len(user):
        raise DataError(f"{source} holds no events", remedy="give a dataset with at least one event per split")
    if int(time.min()) < 0 or int(time.max()) > INT32_MAX:
        worst = int(time.max()) if int(time.max()) > INT32_MAX else int(time.min())
        raise DataError(
            f"{source} has the time {worst}, outside 0..{INT32_MAX}",
            remedy="give times as whole Unix seconds, not milliseconds",
        )
    if not bool(np.isfinite(rating).all()):
        raise DataError(f"{source} has a rating that is not finite", remedy="mend or drop the row")
    order = np.lexsort((np.arange(len(user)), user, time))
    return Events(
        user=user[order],
        item=item[order],
        rating=rating[order],
        time=time[order],
        user_features=user_features,
        item_features=item_features,
    )


def check_ids(events: Events, schema: DataSchema, *, source: str) -> None:
    """Raise DataError unless every id lies inside its table: backends differ in what they do with one that does not."""
    rows = {table.name: table.rows for table in schema.tables}
    for features, values in (
        (schema.contextual, events.user_features),
        (schema.item_features, events.item_features),
    ):
        for column, feature in enumerate(features):
            ids = values[:, column]
            limit = rows[feature.table]
            if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= limit):
                raise DataError(
                    f"{source}: {feature.name} has ids from {int(ids.min())} to {int(ids.max())}, "
                    f"outside 0..{limit - 1} of the table {feature.table!r}",
                    remedy=f"number the ids from 0, or set data.rows.{feature.table}",
                )
