"""Rows of dense and multi-hot features, what DLRM takes: schema, rows at hand, and the batch of fixed shapes.

A reader (Criteo, Parquet, synthetic) gives `Rows` and a `MultiHotSchema`; `make_multi_hot_dataset` checks and splits
them; `loader.py` asks `MultiHotDataset.pack` for batches; `models/dlrm.py` reads those. No file is read here.

Rows hold each feature as a KeyedJaggedTensor does: values end to end, and offsets. A batch holds them in slots, as
many per row as the feature's `max_ids`: a step's shapes are then fixed, the same for all batches, and pooling is a
sum over slots. Offsets into a flat list would need a scatter, which is slow on a TPU and of no fixed order on a GPU.

# Shapes: R rows of the data, B rows of a batch, N dense features, F multi-hot features, S id slots of a row (the sum
# of the features' max_ids), Q tasks, n ids of one feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinstep.spec.errors import DataError
from twinstep.spec.job import DataSpec
from twinstep.worker.data.badrows import BadRows
from twinstep.worker.data.batch import Batch, BatchStats
from twinstep.worker.data.events import DataSchema, Floats, Ints, TableSchema, TaskSchema, enlarged


class MultiHotBatch(NamedTuple):
    """B rows. Integers are int64 on the host and fit int32; floats are float32. A dummy row weighs 0 in every task."""

    dense: Tensor
    """[B, N] float32."""
    ids: Tensor
    """[B, S] int64: row of each feature's table, feature after feature; 0 where a slot holds none."""
    lengths: Tensor
    """[B, F] int64: ids of each feature, in the first of its slots; 0: the feature is a vector of zeros."""
    labels: Tensor
    """[Q, B, 1] float32; a row is asked for one thing, so K is 1."""
    weights: Tensor
    """[Q, B, 1] float32; 0 for dummy rows."""


MULTI_HOT_DIMS: dict[str, int] = {"dense": 0, "ids": 0, "lengths": 0, "labels": 1, "weights": 1}
"""Position of the dimension that grows with B, by field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiHotFeature:
    """One bag of ids per row, looked up in a table that others may share, and summed."""

    name: str
    table: str
    max_ids: int = 1
    """Ids kept per row, at least 1; a longer bag loses its tail, which is counted (`BatchStats.events_cut`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiHotSchema:
    """What a model must know of such a dataset, and all it may know."""

    tables: tuple[TableSchema, ...]
    dense: tuple[str, ...]
    """Names of the dense features."""
    features: tuple[MultiHotFeature, ...]
    tasks: tuple[TaskSchema, ...]
    """Binary ones first."""

    @property
    def num_slots(self) -> int:
        """S: id slots of a row."""
        return sum(feature.max_ids for feature in self.features)

    def with_rows(self, rows: dict[str, int]) -> MultiHotSchema:
        """Return the schema with tables enlarged to `rows`.

        Raises:
            DataError: a name is no table, or fewer rows are asked for than the data has.
        """
        return replace(self, tables=enlarged(self.tables, rows))


AnyBatch = Batch | MultiHotBatch
AnySchema = DataSchema | MultiHotSchema


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """Rows at hand, in the order of their source, which is taken for the order of time."""

    dense: Floats
    """[R, N] float32, finite: a reader fills what is missing, and may take logarithms."""
    values: tuple[Ints, ...]
    """[n] int64 per feature: ids, row after row."""
    offsets: tuple[Ints, ...]
    """[R + 1] int64 per feature: row r has values[offsets[r] : offsets[r + 1]]."""
    labels: Floats
    """[Q, R] float32; 0 or 1 for binary tasks."""

    def __len__(self) -> int:
        return int(self.labels.shape[1])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MultiHotDataset:
    """All a loader needs: rows, split."""

    name: str
    schema: MultiHotSchema
    rows: Rows
    train: Ints
    """[number of training rows] int64: positions in `rows`."""
    eval: Ints
    """The same of held-out rows, the newest ones."""
    left_out: BadRows
    """Rows that broke their format, where `data.on_bad_row` is `skip`."""

    def pack(self, chosen: Ints, batch_size: int) -> tuple[MultiHotBatch, BatchStats]:
        """Build the batch of the rows `chosen`, at most `batch_size` of them; dummy rows fill it up."""
        B, count, rows = batch_size, len(chosen), self.rows
        assert count <= B, "more rows than a batch has"  # noqa: S101
        ids = np.zeros((B, self.schema.num_slots), dtype=np.int64)
        lengths = np.zeros((B, len(self.schema.features)), dtype=np.int64)
        start = cut = 0
        for f, feature in enumerate(self.schema.features):
            first = rows.offsets[f][chosen]
            asked = rows.offsets[f][chosen + 1] - first
            kept = np.minimum(asked, feature.max_ids)
            row, place = _ragged(kept)
            ids[row, start + place] = rows.values[f][first[row] + place]
            lengths[:count, f] = kept
            start += feature.max_ids
            cut += int((asked - kept).sum())
        dense = np.zeros((B, rows.dense.shape[1]), dtype=np.float32)
        dense[:count] = rows.dense[chosen]
        labels, weights = (np.zeros((len(rows.labels), B, 1), dtype=np.float32) for _ in range(2))
        labels[:, :count, 0] = rows.labels[:, chosen]
        weights[:, :count] = 1
        batch = MultiHotBatch(*(torch.from_numpy(each) for each in (dense, ids, lengths, labels, weights)))
        real = int(lengths.sum())
        stats = BatchStats(
            rows=count,
            real_tokens=real,
            dummy_tokens=ids.size - real,
            events_cut=cut,
            examples=count,
            padded_candidates=B - count,
        )
        return batch, stats


def make_multi_hot_dataset(
    rows: Rows, schema: MultiHotSchema, spec: DataSpec, *, left_out: BadRows | None = None, checked: bool = False
) -> MultiHotDataset:
    """Check rows that are at hand against their schema, and split them: the last `eval_fraction` is held out.

    Args:
        checked: the reader has held every row to the schema; rows that are mapped from files would all be read again.

    Raises:
        DataError: rows break their form (the message names feature and row), an id lies outside its table, or the
            split leaves one side empty.
    """
    schema = schema.with_rows(spec.rows)
    if not checked:
        check_rows(rows, schema, source=spec.dataset)
    first = round(len(rows) * (1 - spec.split.eval_fraction))
    if not 0 < first < len(rows):
        raise DataError(
            f"a split of {len(rows)} rows leaves none {'held out' if first else 'to train on'}",
            remedy="change data.split.eval_fraction, or give more rows",
        )
    return MultiHotDataset(
        name=spec.dataset,
        schema=schema,
        rows=rows,
        train=np.arange(first),
        eval=np.arange(first, len(rows)),
        left_out=BadRows() if left_out is None else left_out,
    )


def check_rows(rows: Rows, schema: MultiHotSchema, *, source: str) -> None:
    """Raise DataError unless rows have the schema's features, whole offsets, finite numbers and ids in their tables."""
    count = len(rows)
    _check_numbers(rows.dense, (count, len(schema.dense)), schema.dense, source, "dense features")
    tasks = tuple(task.name for task in schema.tasks)
    _check_numbers(rows.labels.T, (count, len(tasks)), tasks, source, "labels")
    for task, labels in zip(schema.tasks, rows.labels, strict=True):
        wrong = np.flatnonzero((labels != 0) & (labels != 1))
        if task.kind == "binary" and len(wrong):
            raise DataError(
                f"{source} row {wrong[0] + 1}: the label {task.name} is {labels[wrong[0]]:g}, not 0 or 1",
                remedy="mend or remove that row",
            )
    if not len(rows.values) == len(rows.offsets) == len(schema.features):
        raise DataError(
            f"{source} has {len(rows.values)} lists of ids for {len(schema.features)} features",
            remedy="give one list per feature, in the order of the schema",
        )
    limits = {table.name: table.rows for table in schema.tables}
    for feature, values, offsets in zip(schema.features, rows.values, rows.offsets, strict=True):
        _check_ids(feature, values, offsets, count, limits[feature.table], source)


def _check_numbers(
    found: NDArray[np.float32], shape: tuple[int, int], names: Sequence[str], source: str, what: str
) -> None:
    if found.shape != shape:
        raise DataError(
            f"{source} has {what} of the shape {list(found.shape)}, not {list(shape)}",
            remedy="give one number per row and feature",
        )
    bad = np.argwhere(~np.isfinite(found))
    if len(bad):
        row, column = bad[0]
        raise DataError(
            f"{source} row {row + 1}: {names[column]} is {found[row, column]}", remedy="mend or remove that row"
        )


def _check_ids(feature: MultiHotFeature, values: Ints, offsets: Ints, count: int, limit: int, source: str) -> None:
    whole = len(offsets) == count + 1 and offsets[0] == 0 and offsets[-1] == len(values)
    if not whole or bool((np.diff(offsets) < 0).any()):
        raise DataError(
            f"{source}: the offsets of {feature.name} do not cut its {len(values)} ids into {count} rows",
            remedy=f"give {count + 1} offsets that rise from 0 to {len(values)}",
        )
    wrong = np.flatnonzero((values < 0) | (values >= limit))
    if len(wrong):
        row = int(np.searchsorted(offsets, wrong[0], side="right"))
        raise DataError(
            f"{source} row {row}: {feature.name} has the id {values[wrong[0]]}, outside 0..{limit - 1} "
            f"of the table {feature.table!r}",
            remedy=f"number the ids from 0, hash them, or set data.rows.{feature.table}",
        )


def _ragged(lengths: Ints) -> tuple[Ints, Ints]:
    """Return, for rows of these lengths laid end to end, each entry's row and its place in the row."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def meta_multi_hot(schema: MultiHotSchema, spec: DataSpec) -> MultiHotBatch:
    """Return a batch of the shapes and dtypes that a loader gives, on the meta device: it holds no values."""
    B, Q = spec.batch_size, len(schema.tasks)
    ids, lengths = (
        torch.empty(B, width, dtype=torch.int64, device="meta") for width in (schema.num_slots, len(schema.features))
    )
    labels, weights = (torch.empty(Q, B, 1, device="meta") for _ in range(2))
    return MultiHotBatch(
        dense=torch.empty(B, len(schema.dense), device="meta"), ids=ids, lengths=lengths, labels=labels, weights=weights
    )
