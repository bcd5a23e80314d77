"""Datasets by name: events, schema, split and samples in one frozen value.

`load_dataset` is the door of this room; a new dataset is one row of `SOURCES`, or of `ROW_SOURCES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from twinstep.spec.job import DataSpec
from twinstep.worker.data.badrows import BadRows
from twinstep.worker.data.events import DataSchema, Events, Floats, Ints, check_ids, select_features, task_labels
from twinstep.worker.data.multi_hot import MultiHotDataset, MultiHotSchema, Rows, make_multi_hot_dataset
from twinstep.worker.data.samples import Samples, UserLog, make_samples, split_events, user_log
from twinstep.worker.data.synthetic import make_synthetic
from twinstep.worker.data.synthetic_clicks import make_clicks_asked

Source = Callable[[DataSpec, BadRows], tuple[Events, DataSchema]]


def _reader(module: str, name: str) -> Callable[..., Any]:
    """Return a reader of files, imported where it is asked for: with what parses them, a tenth of a start."""
    return cast("Callable[..., Any]", getattr(importlib.import_module(f"twinstep.worker.data.{module}"), name))


def _folder(spec: DataSpec) -> Any:
    return _reader("files", "open_folder")(spec.path or "")


SOURCES: dict[str, Source] = {
    "ml-100k": lambda spec, bad: _reader("movielens", "read_ml_100k")(_reader("movielens", "find_ml_100k")(), bad),
    "ml-1m": lambda spec, bad: _reader("movielens", "read_ml_1m")(_folder(spec), bad),
    "ml-20m": lambda spec, bad: _reader("movielens", "read_ml_20m")(_folder(spec), bad),
    "kuairand-1k": lambda spec, bad: _reader("kuairand", "read_kuairand")(_folder(spec), bad),
    "streaming": lambda spec, bad: _reader("streaming", "read_streaming")(_folder(spec), spec.rows, bad),
    "parquet": lambda spec, bad: _reader("parquet", "read_parquet")(_folder(spec), spec, bad),
    "synthetic": lambda spec, bad: make_synthetic(spec.synthetic_events, spec.synthetic),
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dataset:
    """All a loader and the baselines need."""

    # Shapes: E events, Q tasks.

    name: str
    events: Events
    schema: DataSchema
    held_out: NDArray[np.bool_]
    """[E] bool."""
    labels: Floats
    """[Q, E] float32."""
    actions: Ints
    """[E] int64: action words of the events."""
    log: UserLog
    train: Samples
    eval: Samples
    left_out: BadRows
    """Rows that broke their format, where `data.on_bad_row` is `skip`."""


ROW_SOURCES: dict[str, Callable[[DataSpec, BadRows], tuple[Rows, MultiHotSchema]]] = {
    "criteo": lambda spec, bad: _reader("criteo", "read_criteo")(_folder(spec), spec, bad),
    "synthetic-clicks": lambda spec, bad: make_clicks_asked(spec.synthetic_events, spec.synthetic),
}
"""Datasets of rows with dense and multi-hot features; keys are `spec.job.DATASETS_OF_ROWS`."""


def load_dataset(spec: DataSpec) -> Dataset | MultiHotDataset:
    """Read, split and cut the dataset that `spec` names.

    Raises:
        DataError: it is missing or breaks its format, or the split leaves one side empty.
    """
    bad = BadRows(policy=spec.on_bad_row)
    if spec.dataset in ROW_SOURCES:
        return make_multi_hot_dataset(
            *ROW_SOURCES[spec.dataset](spec, bad), spec, left_out=bad, checked=spec.dataset == "criteo"
        )
    events, schema = SOURCES[spec.dataset](spec, bad)
    return make_dataset(events, schema, spec, left_out=bad)


def make_dataset(events: Events, schema: DataSchema, spec: DataSpec, *, left_out: BadRows | None = None) -> Dataset:
    """Split and cut events that are at hand; `load_dataset` without the reading.

    Raises:
        DataError: a task, feature or table is none of the dataset's, an id lies outside its table, or the split
            leaves one side empty.
    """
    events, schema = select_features(events, schema.with_tasks(spec.tasks), spec.features)
    schema = schema.with_rows(spec.rows)
    check_ids(events, schema, source=spec.dataset)
    held_out = split_events(events, spec.split)
    log = user_log(events, held_out)
    train, held = (
        make_samples(events, log, held_out=side, num_candidates=slots, uih_len=spec.uih_len)
        for side, slots in ((False, spec.num_candidates), (True, spec.eval_slots))
    )
    return Dataset(
        name=spec.dataset,
        events=events,
        schema=schema,
        held_out=held_out,
        labels=task_labels(events, schema, threshold=spec.label_threshold),
        actions=events.actions,
        log=log,
        train=train,
        eval=held,
        left_out=BadRows() if left_out is None else left_out,
    )
