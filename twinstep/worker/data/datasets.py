"""Datasets by name: events, schema, split and samples in one frozen value.

`load_dataset` is the door of this room; a new dataset is one row of `SOURCES`, or of `ROW_SOURCES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinstep.spec.job import DataSpec
from twinstep.worker.data.events import DataSchema, Events, Floats, Ints, check_ids
from twinstep.worker.data.movielens import find_movielens, load_movielens
from twinstep.worker.data.multi_hot import MultiHotDataset, MultiHotSchema, Rows, make_multi_hot_dataset
from twinstep.worker.data.samples import Samples, UserLog, make_samples, split_events, user_log
from twinstep.worker.data.synthetic import make_synthetic
from twinstep.worker.data.synthetic_clicks import make_clicks

SOURCES: dict[str, Callable[[DataSpec], tuple[Events, DataSchema]]] = {
    "ml-100k": lambda spec: load_movielens(find_movielens()),
    "synthetic": lambda spec: make_synthetic(spec.synthetic_events),
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
    """[E] int64: action words; bit s - 1 is set for a rating of s stars, so a history carries its ratings."""
    log: UserLog
    train: Samples
    eval: Samples


ROW_SOURCES: dict[str, Callable[[DataSpec], tuple[Rows, MultiHotSchema]]] = {
    "synthetic-clicks": lambda spec: make_clicks(spec.synthetic_events),
}
"""Datasets of rows with dense and multi-hot features; keys are `spec.job.DATASETS_OF_ROWS`."""


def load_dataset(spec: DataSpec) -> Dataset | MultiHotDataset:
    """Read, split and cut the dataset that `spec` names.

    Raises:
        DataError: it is missing or breaks its format, or the split leaves one side empty.
    """
    if spec.dataset in ROW_SOURCES:
        return make_multi_hot_dataset(*ROW_SOURCES[spec.dataset](spec), spec)
    events, schema = SOURCES[spec.dataset](spec)
    return make_dataset(events, schema, spec)


def make_dataset(events: Events, schema: DataSchema, spec: DataSpec) -> Dataset:
    """Split and cut events that are at hand; `load_dataset` without the reading.

    Raises:
        DataError: an id lies outside its table, or the split leaves one side empty.
    """
    schema = schema.with_rows(spec.rows)
    check_ids(events, schema, source=spec.dataset)
    held_out = split_events(events, spec.split)
    log = user_log(events, held_out)
    stars = np.clip(np.round(events.rating).astype(np.int64), 1, schema.action_bits)
    train, held = (
        make_samples(events, log, held_out=side, num_candidates=spec.num_candidates, uih_len=spec.uih_len)
        for side in (False, True)
    )
    return Dataset(
        name=spec.dataset,
        events=events,
        schema=schema,
        held_out=held_out,
        labels=(events.rating >= spec.label_threshold).astype(np.float32)[None],
        actions=np.left_shift(1, stars - 1),
        log=log,
        train=train,
        eval=held,
    )
