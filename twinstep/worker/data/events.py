"""Events, the table every dataset becomes, and the schema that says the tables and tasks it needs.

`movielens.py` and `synthetic.py` make both, `samples.py` cuts them, `models/` reads the schema. No file is read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from twinstep.spec.errors import DataError

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

INT32_MAX = 2**31 - 1  # ids and times become int32 on XLA without a warning, so what does not fit is refused here
STARS = 5  # of most ratings


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
    bits: int = 0
    """Action bits of which any makes a binary label 1; 0: the label is whether the rating reaches the threshold."""


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

    def with_tasks(self, names: Sequence[str] | None) -> DataSchema:
        """Return the schema with these tasks only, in the schema's own order; None: the binary ones.

        Raises:
            DataError: a name is no task of the dataset.
        """
        if names is None:
            return replace(self, tasks=tuple(task for task in self.tasks if task.kind == "binary"))
        check_names("data.tasks", names, [task.name for task in self.tasks])
        return replace(self, tasks=tuple(task for task in self.tasks if task.name in names))

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


def check_names(field: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise DataError unless all names that a field of the spec gives are known."""
    for name in names:
        if name not in known:
            raise DataError(
                f"{field} names {name!r}, which this dataset does not have", remedy=f"one of: {', '.join(known)}"
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Events:
    """Who rated what and when, sorted by (time, user, order in the source)."""

    # Shapes: E events, P users, C contextual features, F item features, I items; Q tasks below.

    user: Ints
    """[E] int64, 0..P-1."""
    item: Ints
    """[E] int64, 0..I-1."""
    rating: Floats
    """[E] float32."""
    time: Ints
    """[E] int64: seconds, 0..2^31-1."""
    actions: Ints
    """[E] int64: action words, what the user did as bits; a history carries them, a candidate does not."""
    watch: Floats
    """[E] float32: seconds watched; 0 where the data does not say. Label of regression tasks."""
    user_features: Ints
    """[P, C] int64: ids of the contextual features."""
    item_features: Ints
    """[I, F] int64: ids of the item features."""

    def __len__(self) -> int:
        return len(self.user)


def make_events(
    *,
    user: Ints,
    item: Ints,
    rating: Floats,
    time: Ints,
    user_features: Ints,
    item_features: Ints,
    source: str,
    actions: Ints | None = None,
    watch: Floats | None = None,
) -> Events:
    """Return the events sorted and checked.

    Args:
        actions: None: bit s - 1 is set for a rating of s stars, so that a history carries its ratings.
        watch: None: zeros.

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
    order = np.lexsort((user, time))  # stable: events of one user and second keep the order of the source
    return Events(
        user=user[order],
        item=item[order],
        rating=rating[order],
        time=time[order],
        actions=star_actions(rating[order], step=1.0, bits=STARS) if actions is None else actions[order],
        watch=np.zeros(len(user), dtype=np.float32) if watch is None else watch[order],
        user_features=user_features,
        item_features=item_features,
    )


def star_actions(rating: Floats, *, step: float, bits: int) -> Ints:
    """Return action words with one bit set each: bit s - 1 for a rating of s steps; ratings beyond are the nearest."""
    steps = np.clip(np.round(rating / step).astype(np.int64), 1, bits)
    return np.left_shift(np.int64(1), steps - 1)


def task_labels(events: Events, schema: DataSchema, *, threshold: float) -> Floats:
    """Return the label of every task for every event, [Q, E] float32.

    Binary: whether a bit of the task is set in the action word, or, where the task has none, whether the rating is
    `threshold` or more. Regression: seconds watched.
    """
    labels = np.empty((len(schema.tasks), len(events)), dtype=np.float32)
    for row, task in zip(labels, schema.tasks, strict=True):
        if task.kind == "regression":
            row[:] = events.watch
        elif task.bits:
            row[:] = (events.actions & task.bits) != 0
        else:
            row[:] = events.rating >= threshold
    return labels


def select_features(events: Events, schema: DataSchema, names: Sequence[str] | None) -> tuple[Events, DataSchema]:
    """Return events and schema with these features only, in their own order; the first item feature always stays.

    Raises:
        DataError: a name is no feature of the dataset.
    """
    if names is None:
        return events, schema
    first = schema.item_features[0].name
    check_names("data.features", names, [each.name for each in (*schema.contextual, *schema.item_features)])
    people = [i for i, each in enumerate(schema.contextual) if each.name in names]
    items = [i for i, each in enumerate(schema.item_features) if each.name in names or each.name == first]
    contextual = tuple(schema.contextual[i] for i in people)
    item_features = tuple(schema.item_features[i] for i in items)
    tables = {each.table for each in (*contextual, *item_features)}
    return (
        replace(events, user_features=events.user_features[:, people], item_features=events.item_features[:, items]),
        replace(
            schema,
            contextual=contextual,
            item_features=item_features,
            tables=tuple(table for table in schema.tables if table.name in tables),
        ),
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
