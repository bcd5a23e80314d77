"""Histories from Parquet files whose columns the spec names: row group by row group, only the columns asked for.

Takes a folder of files (or one), local or behind an fsspec URI; gives Events and the schema of their tables. Ids may be
whole numbers of any size or texts; each table is numbered, kept in a vocabulary, or hashed, as the spec says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from twinstep.spec.columns import ColumnsSpec
from twinstep.spec.errors import DataError
from twinstep.spec.job import DataSpec
from twinstep.worker.data.badrows import BadRows, CheckedRows, Column
from twinstep.worker.data.delimited import gather, is_text
from twinstep.worker.data.events import (
    INT32_MAX,
    STARS,
    DataSchema,
    Events,
    FeatureSchema,
    Floats,
    Ints,
    TableSchema,
    TaskSchema,
    check_names,
    make_events,
    star_actions,
)
from twinstep.worker.data.files import DataFile, Folder, local_folder
from twinstep.worker.data.hashing import hash_ids, text_keys
from twinstep.worker.data.vocabulary import load_vocabulary

ENDINGS = (".parquet", ".parq", ".pq")
BATCH_ROWS = 65_536  # rows converted at a time; they never span row groups
INT64_MAX = np.iinfo(np.int64).max
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


def read_parquet(
    folder: Folder, spec: DataSpec, bad: BadRows, *, batch_rows: int = BATCH_ROWS
) -> tuple[Events, DataSchema]:
    """Read all Parquet files of a folder, in the order of their names. `batch_rows` changes nothing but memory.

    A user's features are those of the user's last row in the files, an item's those of the item's: held out or not, so
    one that changes tells training what comes later. `bad.varying` says of which features and how often.

    Raises:
        DataError: there is no file, one is cut off or has not the columns and types it should, or a row is bad.
    """
    columns = spec.columns
    check_names("data.hash_rows", tuple(spec.hash_rows), columns.id_names)
    files = folder.all_files(*ENDINGS)
    if not files:
        raise folder.lacks("a Parquet file", layout=f"files that end in {', '.join(ENDINGS)}")
    newest = np.zeros(1, dtype=np.int64)  # latest time of any good row so far
    parts = (part for file in files for part in _file(file, columns, bad, newest, batch_rows))
    return _events(gather(parts), spec, bad, folder.called + (f" ({bad.summary()})" if bad.count else ""))


def _file(
    file: DataFile, columns: ColumnsSpec, bad: BadRows, newest: Ints, batch_rows: int
) -> Iterator[dict[str, Column]]:
    """Yield the good rows of one file, batch by batch; `newest[0]` is carried from batch to batch."""
    with file.reading(unpack=False) as stream:
        group = 0
        try:
            parquet = pq.ParquetFile(stream, page_checksum_verification=True)  # of pages that have one
            _check_kinds(file.name, parquet.schema_arrow, columns)
            for group in range(parquet.num_row_groups):
                first = 1
                for batch in parquet.iter_batches(batch_rows, row_groups=[group], columns=list(columns.names)):
                    rows = first + np.arange(len(batch), dtype=np.int64)
                    first += len(batch)
                    yield _Batch(file.name, rows, f"row group {group}, ", batch).convert(columns, bad, newest)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: of a name in the footer
            said = str(error).split("\n")[0][:200]
            raise DataError(
                f"{file.name} cannot be read as Parquet (row group {group}): {said}",
                remedy="see that the file is whole: its last four bytes are PAR1",
            ) from None


def _check_kinds(file: str, schema: pa.Schema, columns: ColumnsSpec) -> None:
    kinds = {field.name: field.type for field in schema}
    for name in columns.names:
        if schema.names.count(name) > 1:
            raise DataError(
                f"{file} has {schema.names.count(name)} columns {name!r}", remedy="give each column a name of its own"
            )
        if name not in kinds:
            raise DataError(
                f"{file} lacks the column {name!r}; it has {', '.join(kinds)[:200]}",
                remedy="name the file's columns in data.columns",
            )
        kind = kinds[name].value_type if pa.types.is_dictionary(kinds[name]) else kinds[name]
        allowed = _allowed(name, columns)
        if not any(fits(kind) for fits in allowed.values()):
            raise DataError(
                f"{file}: the column {name!r} is {kind}, not {' or '.join(allowed)}",
                remedy="write the column in one of these types, or name another one in data.columns",
            )


def _allowed(name: str, columns: ColumnsSpec) -> dict[str, Any]:
    """Return what the type of a column may be, in words, and how to tell."""
    number = {"a whole number": pa.types.is_integer, "a float": pa.types.is_floating}
    if name == columns.time:
        return {"a whole number": pa.types.is_integer, "a timestamp": pa.types.is_timestamp}
    if name in (columns.rating, columns.watch):
        return number
    if name in columns.actions:
        return {"a boolean": pa.types.is_boolean, "a whole number": pa.types.is_integer}
    return {
        "a whole number": pa.types.is_integer,
        "text": lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind),
    }


class _Batch(CheckedRows):
    """Some rows of a row group while they are converted."""

    def __init__(self, file: str, rows: Ints, before: str, batch: pa.RecordBatch) -> None:
        super().__init__(file, rows, before=before)
        self._batch = batch

    def convert(self, columns: ColumnsSpec, bad: BadRows, newest: Ints) -> dict[str, Column]:
        """Return the good rows: keys of ids by column, and time, rating, watch, actions where the spec has them."""
        out: dict[str, Column] = {f"key {name}": self._keys(name) for name in columns.id_names}
        time = self._times(columns)
        out["time"] = time
        if columns.rating is not None:
            out["rating"] = self._floats(columns.rating, "rating")
        if columns.watch is not None:
            out["watch"] = self._floats(columns.watch, "watch time", low=0)
        if columns.actions:
            bits = [self._whole(name, low=0, high=1) << place for place, name in enumerate(columns.actions)]
            out["actions"] = np.bitwise_or.reduce(bits)
        if columns.time_order == "rising":
            self._in_order(time, newest)
        return self.keep(bad, **out)

    def _in_order(self, time: Ints, newest: Ints) -> None:
        """Reject rows earlier than a good one before them; comes last, for the time of a bad row says nothing."""
        so_far = np.maximum.accumulate(np.concatenate((newest, np.where(self.good, time, 0))))
        late = so_far[:-1]
        self.reject(time < late, lambda i: f"has the time {time[i]}, before {late[i]} of an earlier row")
        newest[0] = so_far[-1]

    def _column(self, name: str) -> pa.Array:
        """Return a column decoded; a row without a value is a bad one."""
        column = self._batch.column(name)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        self.reject(column.is_null().to_numpy(zero_copy_only=False), lambda i: f"has no {name}")
        return column

    def _whole(self, name: str, *, low: int, high: int) -> Ints:
        column = self._column(name)
        if pa.types.is_boolean(column.type):
            column = column.cast(pa.int64())
        if pa.types.is_uint64(column.type):
            over = pc.fill_null(pc.greater(column, pa.scalar(INT64_MAX, pa.uint64())), False)
            wide, over_at = column, over.to_numpy(zero_copy_only=False)
            self.reject(over_at, lambda i: f"has {name} {wide[i].as_py()}, beyond int64")
            column = pc.if_else(over, pa.scalar(0, pa.uint64()), column)
        values = np.asarray(pc.fill_null(column.cast(pa.int64()), low), dtype=np.int64)
        self.reject((values < low) | (values > high), lambda i: f"has {name} {values[i]}, outside {low}..{high}")
        return values

    def _keys(self, name: str) -> Ints:
        column = self._column(name)
        if pa.types.is_integer(column.type):
            return self._whole(name, low=-INT64_MAX - 1, high=INT64_MAX)
        column = pc.fill_null(column, "")
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            raw = column.cast(pa.large_binary())
            good = np.array([is_text(value) for value in raw.to_pylist()], dtype=bool)
            self.reject(~good, lambda i: f"has a {name} that is not UTF-8")
            column = pc.if_else(pa.array(good), raw, pa.scalar(b"", raw.type)).cast(pa.large_string())
        return text_keys(column)

    def _times(self, columns: ColumnsSpec) -> Ints:
        column = self._column(columns.time)
        unit = columns.time_unit
        if pa.types.is_timestamp(column.type):
            unit = column.type.unit
            values = np.asarray(pc.fill_null(column.cast(pa.int64()), 0), dtype=np.int64)
        else:
            values = self._whole(columns.time, low=-INT64_MAX - 1, high=INT64_MAX)
        seconds = values // _PER_SECOND[unit]
        self.reject(
            (seconds < 0) | (seconds > INT32_MAX),
            lambda i: f"has the time {values[i]} {unit}, outside 1970 to 2038: see data.columns.time_unit",
        )
        return seconds

    def _floats(self, name: str, what: str, low: float = -np.inf) -> Floats:
        column = pc.fill_null(self._column(name).cast(pa.float64()), 0.0)
        values: NDArray[np.float64] = column.to_numpy(zero_copy_only=False)
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is then refused
            narrow = values.astype(np.float32)
        wrong = ~np.isfinite(narrow) | (narrow < low)
        self.reject(
            wrong, lambda i: f"has the {what} {values[i]:g}, not a finite number{' from 0 up' if low == 0 else ''}"
        )
        return np.where(wrong, np.float32(0), narrow)


def _events(found: dict[str, Column], spec: DataSpec, bad: BadRows, source: str) -> tuple[Events, DataSchema]:
    columns = spec.columns
    if not found or not len(found["time"]):
        raise DataError(f"{source} holds no events", remedy="give files with at least one event per split")
    user_of, user = _number(found[f"key {columns.user}"])
    item_of, item = _number(found[f"key {columns.item}"])
    people = columns.user_features or (columns.user,)
    items = (columns.item, *columns.item_features)
    tables: dict[str, int] = {}
    for names, at, of in ((people, user_of, user), (items, item_of, item)):
        bad.varying.update(_varying({name: found[f"key {name}"] for name in names}, at, of))
    features = [
        np.stack([_rows(name, found[f"key {name}"][at], spec, tables) for name in names], axis=1)
        for names, at in ((people, user_of), (items, item_of))
    ]
    actions = found.get("actions")
    rating: Floats = found["rating"] if "rating" in found else (found["actions"] & 1).astype(np.float32)
    tasks = [TaskSchema(name=name, bits=1 << place) for place, name in enumerate(columns.actions)]
    if columns.rating is not None:
        tasks.append(TaskSchema(name="liked"))
    if columns.watch is not None:
        tasks.append(TaskSchema(name="watch_time", kind="regression"))
    events = make_events(
        user=user,
        item=item,
        rating=rating,
        time=found["time"],
        actions=star_actions(rating, step=1.0, bits=STARS) if actions is None else actions,
        watch=found.get("watch"),
        user_features=features[0],
        item_features=features[1],
        source=source,
    )
    schema = DataSchema(
        tables=tuple(TableSchema(name=name, rows=rows) for name, rows in tables.items()),
        contextual=tuple(FeatureSchema(name=name, table=name) for name in people),
        item_features=tuple(FeatureSchema(name=name, table=name) for name in items),
        tasks=tuple(tasks),
        action_bits=len(columns.actions) or STARS,
    )
    return events, schema


def _number(keys: Ints) -> tuple[Ints, Ints]:
    """Number keys from 0 in rising order; return the last position of each, and the number at each position."""
    _, last, numbers = np.unique(keys[::-1], return_index=True, return_inverse=True)
    return len(keys) - 1 - last, numbers[::-1]


def _varying(features: dict[str, Ints], at: Ints, of: Ints) -> dict[str, int]:
    """Return of how many users (or items) a feature is not in all rows what it is in the last, where it is of any.

    Args:
        features: [E] int64 keys by name.
        at: [P] int64: position of each user's last row.
        of: [E] int64: the user of each row.
    """
    counts = {name: len(np.unique(of[keys != keys[at][of]])) for name, keys in features.items()}
    return {name: count for name, count in counts.items() if count}


def _rows(table: str, keys: Ints, spec: DataSpec, tables: dict[str, int]) -> Ints:
    """Return the table row of each key, and note in `tables` how many rows that table has."""
    if table in spec.hash_rows:
        tables[table] = spec.hash_rows[table]
        return hash_ids(keys, tables[table], table=table)
    if spec.vocabulary is not None:
        vocabulary = load_vocabulary(local_folder(spec.vocabulary, called="data.vocabulary"), table, keys)
        rows, known = vocabulary.find(keys)
        if spec.unlisted == "error" and not known.all():
            raise DataError(
                f"the {table} {keys[~known][0]} is not in the vocabulary {spec.vocabulary}/{table}.txt",
                remedy="set data.unlisted: row, or remove the file so that it is made anew",
            )
        tables[table] = vocabulary.rows
        return rows
    distinct, numbers = np.unique(keys, return_inverse=True)
    tables[table] = len(distinct)
    return numbers
