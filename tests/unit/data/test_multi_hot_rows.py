"""Rows of bags become batches of fixed slots: nothing lost but what is counted, dummies that say so, faults by row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinstep.spec.errors import DataError
from twinstep.spec.job import DATASETS_OF_ROWS, DataSpec, SplitSpec
from twinstep.worker.data.datasets import ROW_SOURCES, load_dataset
from twinstep.worker.data.events import TableSchema, TaskSchema
from twinstep.worker.data.loader import Loader
from twinstep.worker.data.multi_hot import (
    MULTI_HOT_DIMS,
    MultiHotBatch,
    MultiHotDataset,
    MultiHotFeature,
    MultiHotSchema,
    Rows,
    make_multi_hot_dataset,
    meta_multi_hot,
)
from twinstep.worker.data.order import HostShare
from twinstep.worker.data.synthetic_clicks import make_clicks

TABLE = 9


def rows_of(bags: list[list[list[int]]]) -> Rows:
    """Return rows with `bags[f][r]`, and the row's number as its dense feature."""
    count = len(bags[0])
    return Rows(
        dense=np.arange(count, dtype=np.float32)[:, None],
        values=tuple(np.array([i for bag in feature for i in bag], dtype=np.int64) for feature in bags),
        offsets=tuple(np.cumsum([0, *(len(bag) for bag in feature)]) for feature in bags),
        labels=(np.arange(count) % 2).astype(np.float32)[None],
    )


def schema_of(*max_ids: int) -> MultiHotSchema:
    return MultiHotSchema(
        tables=(TableSchema(name="t", rows=TABLE),),
        dense=("number",),
        features=tuple(MultiHotFeature(name=f"f{f}", table="t", max_ids=most) for f, most in enumerate(max_ids)),
        tasks=(TaskSchema(name="clicked"),),
    )


BAG = st.lists(st.integers(0, TABLE - 1), max_size=6)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[list[list[int]]], tuple[int, ...], list[int], int]:
    count, features = draw(st.integers(2, 7)), draw(st.integers(1, 3))
    bags = [draw(st.lists(BAG, min_size=count, max_size=count)) for _ in range(features)]
    max_ids = tuple(draw(st.integers(1, 4)) for _ in range(features))
    chosen = draw(st.lists(st.integers(0, count - 1), max_size=5))
    return bags, max_ids, chosen, len(chosen) + draw(st.integers(0, 3))


@settings(max_examples=100, deadline=None)
@given(case=tables())
def test_a_batch_holds_each_bags_first_ids_and_counts_the_others(case: Any) -> None:
    bags, max_ids, chosen, size = case
    data = make_multi_hot_dataset(rows_of(bags), schema_of(*max_ids), DataSpec(split=SplitSpec(eval_fraction=0.5)))
    batch, stats = data.pack(np.array(chosen, dtype=np.int64), size)
    starts = np.cumsum([0, *max_ids])
    cut = 0
    for place, row in enumerate(chosen):
        for f, most in enumerate(max_ids):
            length = int(batch.lengths[place, f])
            assert batch.ids[place, starts[f] : starts[f] + length].tolist() == bags[f][row][:most]
            assert not batch.ids[place, starts[f] + length : starts[f + 1]].any()
            cut += len(bags[f][row]) - length
        assert float(batch.dense[place, 0]) == row
        assert float(batch.labels[0, place, 0]) == row % 2
    assert batch.weights[0, :, 0].tolist() == [1.0] * len(chosen) + [0.0] * (size - len(chosen))
    assert not batch.lengths[len(chosen) :].any()
    assert (stats.rows, stats.examples, stats.events_cut) == (len(chosen), len(chosen), cut)
    assert stats.real_tokens + stats.dummy_tokens == size * sum(max_ids)


def test_a_meta_batch_has_the_shapes_and_dtypes_of_a_real_one() -> None:
    spec = DataSpec(dataset="synthetic-clicks", synthetic_events=100, batch_size=8)
    data = load_dataset(spec)
    assert isinstance(data, MultiHotDataset)
    (real, _), meta = Loader(data, spec, seed=0).train_batch(0), meta_multi_hot(data.schema, spec)
    assert [(x.shape, x.dtype) for x in real] == [(x.shape, x.dtype) for x in meta]
    assert set(MULTI_HOT_DIMS) == set(MultiHotBatch._fields)
    assert all(getattr(real, name).shape[at] == 8 for name, at in MULTI_HOT_DIMS.items())
    assert set(ROW_SOURCES) == set(DATASETS_OF_ROWS)


def test_every_held_out_row_is_seen_once_and_no_training_row_among_them() -> None:
    spec = DataSpec(dataset="synthetic-clicks", synthetic_events=103, batch_size=8)
    data = load_dataset(spec)
    assert isinstance(data, MultiHotDataset)
    held = [batch for batch, _ in Loader(data, spec, seed=0).eval_batches()]
    seen = np.concatenate([batch.dense[batch.weights[0, :, 0] > 0].numpy() for batch in held])
    assert np.array_equal(seen, data.rows.dense[data.eval])
    assert set(data.train.tolist()) | set(data.eval.tolist()) == set(range(103))
    assert not set(data.train.tolist()) & set(data.eval.tolist())


def test_synthetic_clicks_are_the_same_each_time_and_of_both_classes() -> None:
    (first, schema), (again, _) = make_clicks(300), make_clicks(300)
    for a, b in zip(first.values, again.values, strict=True):
        assert np.array_equal(a, b)
    assert np.array_equal(first.dense, again.dense)
    assert 0.1 < float(first.labels.mean()) < 0.6
    assert len(schema.dense) == 13
    assert len(schema.features) == 26


@pytest.mark.parametrize("hosts", [2, 3])
def test_hosts_share_a_batch_of_rows_without_overlap_or_loss(hosts: int) -> None:
    spec = DataSpec(dataset="synthetic-clicks", synthetic_events=103, batch_size=8)
    data = load_dataset(spec)
    whole, _ = Loader(data, spec, seed=0).train_batch(3)
    parts = [
        Loader(data, spec, seed=0, share=HostShare(host=host, hosts=hosts)).train_batch(3)[0] for host in range(hosts)
    ]
    assert len({part.dense.shape for part in parts}) == 1
    for name, at in MULTI_HOT_DIMS.items():
        joined = torch.cat([getattr(part, name) for part in parts], dim=at)
        assert torch.equal(joined.narrow(at, 0, 8), getattr(whole, name))
        assert not joined.narrow(at, 8, joined.shape[at] - 8).any()


BAGS = [[[1], [2, 3], []], [[0], [], [8]]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dense": np.array([[0], [np.nan], [1]], dtype=np.float32)}, "row 2: number is nan"),
        ({"dense": np.zeros((3, 2), dtype=np.float32)}, r"shape \[3, 2\], not \[3, 1\]"),
        ({"labels": np.array([[0, 1, 2]], dtype=np.float32)}, "row 3: the label clicked is 2, not 0 or 1"),
        ({"labels": np.zeros((2, 3), dtype=np.float32)}, r"labels of the shape \[3, 2\]"),
        ({"values": (np.array([1, 2, 9]), np.array([0, 8]))}, "row 2: f0 has the id 9, outside 0..8 of the table 't'"),
        ({"values": (np.array([1, 2, 3]), np.array([-1, 8]))}, "row 1: f1 has the id -1"),
        ({"values": (np.array([1, 2, 3]),)}, "1 lists of ids for 2 features"),
        ({"offsets": (np.array([0, 1, 3, 3]), np.array([0, 1, 0, 2]))}, "offsets of f1 do not cut"),
        ({"offsets": (np.array([0, 1, 3, 4]), np.array([0, 1, 1, 2]))}, "offsets of f0 do not cut"),
    ],
)
def test_rows_that_break_their_form_are_refused_by_feature_and_row(change: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        make_multi_hot_dataset(replace(rows_of(BAGS), **change), schema_of(2, 1), DataSpec())


def test_a_split_that_leaves_a_side_empty_is_refused() -> None:
    with pytest.raises(DataError, match="leaves none held out"):
        make_multi_hot_dataset(rows_of([[[1]]]), schema_of(1), DataSpec())


def test_a_table_may_be_made_larger_by_the_spec_but_not_smaller() -> None:
    larger = make_multi_hot_dataset(rows_of(BAGS), schema_of(2, 1), DataSpec(rows={"t": 40}))
    assert larger.schema.tables[0].rows == 40
    with pytest.raises(DataError, match="its ids need 9"):
        make_multi_hot_dataset(rows_of(BAGS), schema_of(2, 1), DataSpec(rows={"t": 4}))
