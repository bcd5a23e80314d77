"""One rule for first values whatever holds a table, and tables of which a process has only the rows that it wants."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from twinstep.spec.parse import validate_spec
from twinstep.worker.data.events import TableSchema, TaskSchema
from twinstep.worker.data.multi_hot import MultiHotFeature, MultiHotSchema
from twinstep.worker.embedding.collection import tables_of
from twinstep.worker.embedding.declared import Zeros, declare, declared, untouched
from twinstep.worker.embedding.initial import Normal, Uniform, fill_first_rows, first_rows, table_key
from twinstep.worker.embedding.sparsecore.device.engine import Engine
from twinstep.worker.embedding.sparsecore.optimizers import SGD
from twinstep.worker.embedding.sparsecore.spec import Cores, Feature, Limits, Table
from twinstep.worker.embedding.sparsecore.stacking import plan_stacks
from twinstep.worker.models.registry import build_model

SCHEMA = MultiHotSchema(
    tables=(TableSchema(name="a_b", rows=37), TableSchema(name="c", rows=50)),
    dense=("x",),
    features=(MultiHotFeature(name="f", table="a_b"), MultiHotFeature(name="g", table="c")),
    tasks=(TaskSchema(name="clicked"),),
)
SPEC = validate_spec(
    {
        "name": "t",
        "model": {"kind": "dlrm", "embedding_dim": 8},
        "data": {"dataset": "synthetic-clicks"},
        "train": {"seed": 3},
    }
)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 5000), st.integers(0, 3000), st.integers(1, 40), st.integers(1, 7), st.booleans())
def test_rows_made_by_many_threads_in_blocks_are_the_rule_s(
    start: int, count: int, dim: int, step: int, normal: bool
) -> None:
    how: Any = Normal(std=0.1) if normal else Uniform(bound=0.1)
    out = np.empty((count, dim), np.float32)
    fill_first_rows(out, how, table_key(1, "t"), start, step)
    assert out.tobytes() == first_rows(how, table_key(1, "t"), start + step * np.arange(count), dim, np).tobytes()


def test_a_model_starts_from_the_numbers_that_devices_make() -> None:
    weights = tables_of(build_model(SPEC, SCHEMA)).weights
    tables = [
        Table(name=table.name, rows=table.rows, dim=8, optimizer=SGD(), limits=Limits(max_ids=8, max_unique=8))
        for table in SCHEMA.tables
    ]
    features = [Feature(name=each.name, table=each.table, samples=8) for each in SCHEMA.features]
    plan = plan_stacks(tables, features, Cores(devices=1, per_device=4))
    engine = Engine(plan=plan, mesh=Mesh(np.array(jax.devices()[:1]), ("device",)))
    made = engine.initial(3, {table.name: Uniform(bound=table.rows**-0.5) for table in SCHEMA.tables})
    for chunk in engine.to_logical(made):
        assert chunk.values.tobytes() == weights[chunk.table].detach().numpy().tobytes()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 36), st.integers(1, 37), st.integers(1, 9))
def test_any_rows_of_a_declared_table_are_those_of_one_that_is_whole(start: int, stop: int, step: int) -> None:
    whole = tables_of(build_model(SPEC, SCHEMA)).weights["a_b"]
    apart = tables_of(build_model(SPEC, SCHEMA, processes=2)).weights["a_b"]
    known = declared(apart)
    assert known is not None
    assert declared(whole) is None
    assert torch.equal(known.rows(start, stop, step), whole[start:stop:step])
    version = apart._version
    known.fill_rows(np.array([start]))
    assert torch.equal(apart[start], whole[start])
    assert apart._version == version  # nobody wrote to it whom a backend had to follow
    known.fill()
    assert torch.equal(apart, whole)
    assert known.source is None
    assert apart._version > version


class Counting:
    """A source that notes which rows it was asked for."""

    def __init__(self, value: float) -> None:
        self.asked: list[list[int]] = []
        self._value = value

    def rows(self, start: int, stop: int, step: int = 1) -> torch.Tensor:
        raise AssertionError("rows beside those that are wanted")

    def pick(self, ids: Any) -> torch.Tensor:
        self.asked.append(ids.tolist())
        return torch.full((len(ids), 2), self._value)


def test_rows_for_an_evaluation_are_written_alone_and_once() -> None:
    tensor, source = untouched(10_000, 2), Counting(5.0)
    known = declare(tensor, source)
    known.fill_rows(np.array([7, 9000]))
    known.fill_rows(np.array([9000, 7]))
    known.fill_rows(np.array([9000, 3, 8, 3]))
    assert source.asked == [[7, 9000], [3, 8]]
    assert tensor[:, 0].nonzero().flatten().tolist() == [3, 7, 8, 9000]
    known.source = other = Counting(6.0)  # a checkpoint
    known.fill_rows(np.array([7]))
    assert other.asked == [[7]]
    assert tensor[[7, 8], 0].tolist() == [6.0, 5.0]


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(0, 36), max_size=9))
def test_rows_that_are_picked_are_those_of_the_table(ids: set[int]) -> None:
    apart = tables_of(build_model(SPEC, SCHEMA, processes=2)).weights["a_b"]
    known, picked = declared(apart), np.array(sorted(ids), np.int64)
    assert known is not None
    assert known.source is not None
    assert torch.equal(known.source.pick(picked), known.rows(0, 37)[torch.from_numpy(picked)])
    assert Zeros((3,)).pick(picked).shape == (len(ids), 3)


def test_dense_parameters_are_the_same_whether_tables_are_declared_or_not() -> None:
    one, other = build_model(SPEC, SCHEMA), build_model(SPEC, SCHEMA, processes=2)
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert a.shape == b.shape
        assert declared(b) is not None or torch.equal(a, b), name


def test_what_optimizers_keep_of_rows_starts_from_zeros() -> None:
    assert torch.equal(Zeros((3,)).rows(2, 9, 2), torch.zeros(4, 3))
