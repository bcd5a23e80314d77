"""What preflight counts is what is built: tensors of the model, of its optimizers, of a batch, tables of datasets."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinstep.preflight.chips import where
from twinstep.preflight.parameters import parameters
from twinstep.preflight.shapes import data_shape
from twinstep.preflight.state import batch_bytes, batch_shapes, held
from twinstep.spec.job import DATASETS_OF_FILES, DATASETS_OF_ROWS, DataSpec, JobSpec
from twinstep.worker.data.batch import BATCH_DIMS, meta_batch
from twinstep.worker.data.datasets import load_dataset
from twinstep.worker.data.multi_hot import MULTI_HOT_DIMS, AnySchema, MultiHotSchema, meta_multi_hot
from twinstep.worker.embedding.optim import build_optimizers
from twinstep.worker.models.registry import build_meta_model, build_model

few = settings(max_examples=25, deadline=None)
widths = st.sampled_from((1, 3, 8, 16))
rows = st.integers(1, 40)


@st.composite
def histories(draw: st.DrawFn) -> dict[str, Any]:
    """Specs of DLRMv3 with any sizes and features."""
    model = {name: draw(widths) for name in (
        "embedding_dim", "transducer_dim", "num_heads", "linear_dim", "attention_dim", "hidden_dim", "head_hidden_dim",
    )} | {
        "num_layers": draw(st.integers(1, 3)),
        "group_norm": draw(st.booleans()),
        "relative_bias": draw(st.sampled_from(("none", "time", "position", "both"))),
        "postprocessor": draw(st.sampled_from(("timestamp", "layer_norm", "l2_norm"))),
        "position_rows": draw(st.sampled_from((None, 7))),
        "time_rows": draw(st.sampled_from((2, 2049))),
    }  # fmt: skip
    names = st.sampled_from(("a", "b", "c"))
    people, things = draw(st.dictionaries(names, rows)), draw(st.dictionaries(names.map(lambda n: f"i_{n}"), rows))
    data = {
        "dataset": "synthetic",
        "synthetic_events": draw(st.integers(400, 1500)),
        "batch_size": draw(st.integers(1, 9)),
        "uih_len": draw(st.sampled_from((1, 5, 300))),
        "num_candidates": draw(st.integers(1, 4)),
        "rows": {"item_id": 3000} if draw(st.booleans()) else {},
        "synthetic": {"user_features": people, "item_features": things},
        "features": draw(st.sampled_from((None, ("segment",), ("item_id",), ("user_id", "segment")))),
    }
    return {"model": model, "data": data}


@st.composite
def clicks(draw: st.DrawFn) -> dict[str, Any]:
    """Specs of DLRM with any sizes and tables."""
    deep = st.lists(widths, max_size=2)
    model = {
        "kind": "dlrm",
        "embedding_dim": draw(widths),
        "bottom_dims": draw(deep),
        "over_dims": draw(deep),
        "interaction": draw(st.sampled_from(("dot", "dcn"))),
        "num_cross_layers": draw(st.integers(1, 3)),
        "cross_rank": draw(widths),
    }
    asked = {"dense": draw(st.integers(1, 5)), "table_rows": draw(st.sampled_from((None, (4, 9), (5,))))}
    data = {"dataset": "synthetic-clicks", "synthetic_events": 200, "batch_size": draw(st.integers(1, 9))}
    return {"model": model, "data": {**data, "synthetic": asked, "rows": {"cat_0": 5000}}}


kinds = ("sgd", "adam", "adamw", "adagrad")


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    """Specs with any optimizers."""
    dense = {"kind": draw(st.sampled_from(kinds))}
    sparse = {"kind": draw(st.sampled_from((*kinds, "rowwise_adagrad")))}
    for each in (dense, sparse):
        if each["kind"] == "sgd" and draw(st.booleans()):
            each["momentum"] = 0.9  # type: ignore[assignment]
    shape = draw(st.one_of(histories(), clicks()))
    return JobSpec.model_validate({"name": "sizes", **shape, "optimizers": {"dense": dense, "sparse": sparse}})


def schema_of(spec: JobSpec) -> AnySchema:
    return load_dataset(spec.data).schema


@few
@given(specs())
def test_parameters_are_those_of_the_model_that_is_built(spec: JobSpec) -> None:
    model = build_meta_model(spec, schema_of(spec))
    built = [(name, tuple(each.shape), each.element_size()) for name, each in model.named_parameters()]
    built += [(name, tuple(each.shape), each.element_size()) for name, each in model.named_buffers()]
    counted = parameters(spec, data_shape(spec.data))
    assert sorted((each.name, each.shape, each.itemsize) for each in counted) == sorted(built)


@few
@given(specs())
def test_the_optimizers_keep_what_is_counted(spec: JobSpec) -> None:
    model = build_model(spec, schema_of(spec))
    kept = 0
    for optimizer in build_optimizers(spec.optimizers, model).values():
        for parameter in (each for group in optimizer.param_groups for each in group["params"] if each.numel()):
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        kept += sum(
            each.numel() * each.element_size()
            for parameter, state in optimizer.state.items()
            for each in state.values()
            if isinstance(each, torch.Tensor) and parameter.numel()
        )
    counted = held(spec, parameters(spec, data_shape(spec.data)), where(spec))
    assert sum(each.whole for each in counted if each.role in ("optimizer", "table optimizer")) == kept


@few
@given(specs())
def test_a_batch_has_the_leaves_that_are_counted(spec: JobSpec) -> None:
    schema = schema_of(spec)
    batch = meta_multi_hot(schema, spec.data) if isinstance(schema, MultiHotSchema) else meta_batch(schema, spec.data)
    dims = MULTI_HOT_DIMS if isinstance(schema, MultiHotSchema) else BATCH_DIMS
    leaves = [(tuple(leaf.shape), leaf.element_size(), dims.get(name)) for name, leaf in batch._asdict().items()]
    shape = data_shape(spec.data)
    assert sorted(batch_shapes(spec, shape), key=str) == sorted(leaves, key=str)
    assert batch_bytes(spec, shape, where(spec)) == sum(leaf.numel() * leaf.element_size() for leaf in batch)


@pytest.mark.parametrize("spec", [
    {"dataset": "ml-100k"},
    {"dataset": "ml-100k", "features": ["age", "genre"], "rows": {"genre": 100}},
    {"dataset": "synthetic", "synthetic": {"users": 11, "items": 33, "item_features": {"brand": 9}}},
])  # fmt: skip
def test_tables_of_a_dataset_are_known_without_reading_it(spec: dict[str, Any]) -> None:
    if spec["dataset"] == "ml-100k":
        pytest.importorskip("recbole", reason="the dataset comes with recbole", exc_type=ImportError)
    job = JobSpec.model_validate({"name": "sizes", "data": spec})
    schema, shape = schema_of(job), data_shape(job.data)
    assert [(table.name, table.rows) for table in schema.tables] == [(t.name, t.rows) for t in shape.tables]
    assert all(table.exact for table in shape.tables)
    assert len(schema.tasks) == shape.tasks


def test_a_users_own_files_have_the_rows_that_the_spec_says_and_others_are_named() -> None:
    data = {"dataset": "parquet", "path": "/data/x", "hash_rows": {"item_id": 1000},
            "columns": {"actions": ["click", "like"], "item_features": ["brand"], "watch": "seen"}}  # fmt: skip
    shape = data_shape(JobSpec.model_validate({"name": "sizes", "data": data}).data)
    assert {table.name: table.rows for table in shape.tables} == {"user_id": 0, "item_id": 1000, "brand": 0}
    assert shape.unknown == ("user_id", "brand")
    assert (shape.tasks, shape.action_bits) == (3, 2)
    asked = JobSpec.model_validate({"name": "sizes", "data": {**data, "rows": {"user_id": 7, "brand": 5}}})
    assert data_shape(asked.data).unknown == ()


def test_every_dataset_that_a_spec_may_name_has_a_shape() -> None:
    for name in get_args(DataSpec.model_fields["dataset"].annotation):
        path = "/data/x" if name in DATASETS_OF_FILES else None
        shape = data_shape(DataSpec.model_validate({"dataset": name, "path": path}))
        assert shape.tables, name
        assert bool(shape.bags) == (name in DATASETS_OF_ROWS)
