"""Live tables of which devices have some: what is written to the others is nothing that devices have to take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from torch import nn

from twinstep.worker.checkpoint import manifest
from twinstep.worker.checkpoint.place import open_place
from twinstep.worker.checkpoint.read import Reader, SavedRows
from twinstep.worker.checkpoint.saver import Checkpoints
from twinstep.worker.embedding.collection import EmbeddingCollection, Lookup
from twinstep.worker.embedding.declared import Declared, Zeros, declare, declared, start_tables, untouched
from twinstep.worker.embedding.initial import Normal
from twinstep.worker.embedding.sparsecore.device.around import AroundStep
from twinstep.worker.embedding.sparsecore.device.engine import Engine
from twinstep.worker.embedding.sparsecore.live import LiveTables
from twinstep.worker.embedding.sparsecore.logical import fill_shards, to_logical
from twinstep.worker.embedding.sparsecore.optimizers import Adagrad, RowWiseAdagrad
from twinstep.worker.embedding.sparsecore.spec import Cores, Feature, Limits, Table
from twinstep.worker.embedding.sparsecore.stacking import plan_stacks
from twinstep.worker.train.processes import Process, Together
from twinstep.worker.train.sparsecore import SparseCoreStepper

ROWS, DIM = 40, 8
IDS = np.arange(ROWS)


def declared_tables(*names: str) -> tuple[EmbeddingCollection, torch.optim.Optimizer]:
    """Return tables that no host has whole, and an Adagrad whose sums are declared too."""
    collection = EmbeddingCollection(dict.fromkeys(names, (ROWS, DIM)), declared=True)
    start_tables(collection, lambda rows: Normal(std=1.0), seed=1)
    optimizer = torch.optim.SGD(collection.parameters(), lr=0.1)
    for each in collection.parameters():
        optimizer.state[each] = {"sum": untouched(ROWS, DIM)}
        declare(optimizer.state[each]["sum"], Zeros((DIM,)))
    return collection, optimizer


def around(live: LiveTables, *names: str) -> AroundStep:
    limits, rule = Limits(max_ids=8, max_unique=8), Adagrad(learning_rate=0.1)
    plan = plan_stacks(
        [Table(name=name, rows=ROWS, dim=DIM, optimizer=rule, limits=limits) for name in names],
        [Feature(name=f"of {name}", table=name, samples=8) for name in names],
        Cores(devices=1, per_device=4),
    )
    engine = Engine(plan=plan, mesh=Mesh(np.array(jax.devices()[:1]), ("device",)))
    return AroundStep(engine, [f"of {name}" for name in names], live)


def test_a_table_that_nobody_reads_wipes_none_that_is_trained_when_it_is_filled_for_a_checkpoint() -> None:
    collection, optimizer = declared_tables("read", "unread")
    live = LiveTables(collection, optimizer, "adagrad", unread={"unread"})
    devices = around(live, "read")
    devices.push()
    trained = devices.rows_here("read", IDS)
    assert np.abs(trained).min() > 0
    live.devices_alone_know()  # steps have run
    live.fill()  # as a save does
    known = declared(collection.weights["unread"])
    assert known is not None
    assert known.source is None
    assert collection.weights["unread"].detach().abs().min() > 0
    devices.push_written()
    assert devices.rows_here("read", IDS).tobytes() == trained.tobytes()


class Asking(nn.Module):
    """A model that looks up the ids of a batch in one table."""

    def __init__(self, collection: EmbeddingCollection) -> None:
        super().__init__()
        self.tables = collection

    def lookups(self, batch: torch.Tensor) -> list[Lookup]:
        return [Lookup("read", batch, torch.ones_like(batch, dtype=torch.bool))]


def test_an_evaluation_before_the_first_step_asks_devices_where_they_have_the_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collection, optimizer = declared_tables("read", "unread")
    stepper: Any = object.__new__(SparseCoreStepper)
    stepper._model, stepper._together = Asking(collection), Together(Process(rank=0, count=1))
    stepper._tables = LiveTables(collection, optimizer, "adagrad", unread={"unread"})
    stepper._around = around(stepper._tables, "read")
    stepper._compiler = SimpleNamespace(pull_rest=dict)
    table = collection.weights["read"].detach()
    stepper.pull_to_read()(torch.tensor([3]))  # nobody has them yet
    assert table.abs().amin(dim=1).nonzero().flatten().tolist() == [3]
    stepper._around.push()  # as going on from a checkpoint does
    monkeypatch.setattr(Declared, "fill_rows", None)
    stepper.pull_to_read()(torch.tensor([3, 30]))
    assert table.abs().amin(dim=1).nonzero().flatten().tolist() == [3, 30]
    first = declared(collection.weights["read"])
    assert first is not None
    assert torch.equal(table[[3, 30]], first.rows(3, 31, 27))


def test_going_on_reads_every_row_of_a_checkpoint_once_whatever_shards_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "PIECE_BYTES", 7 * DIM * 4)  # chunks and pieces do not end together
    collection, optimizer = declared_tables("one", "two")
    live = LiveTables(collection, optimizer, "adagrad")
    generator = torch.Generator().manual_seed(0)
    wanted = {
        f"{table}/{part}": torch.rand(ROWS, DIM, generator=generator)
        for table in ("one", "two")
        for part in ("weight", "accumulator")
    }
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(wanted, step=1, about={})
    checkpoints.finish()
    (name,) = (each for each in checkpoints.place.names() if not each.startswith("."))
    checkpoints.close()

    def saved() -> Reader:
        reader = Reader(open_place(tmp_path), name)
        for each in wanted:
            known = declared(live.held(*each.split("/")))
            assert known is not None
            known.source = SavedRows(reader, each)
        return reader

    reader, engine = saved(), around(live, "one", "two").engine
    tables = engine.from_logical(live.read, chunk_rows=12)
    found: dict[str, list[Any]] = {}
    for chunk in engine.to_logical(tables):
        found.setdefault(f"{chunk.table}/{chunk.part}", []).append(torch.from_numpy(chunk.values))
    assert {each: torch.equal(torch.cat(parts), wanted[each]) for each, parts in found.items()} == dict.fromkeys(
        wanted, True
    )
    assert reader.bytes_read == 4 * ROWS * DIM * 4
    reader, (stack,) = saved(), engine.plan.stacks
    part = fill_shards(stack, 0, [3, 1], live.read, chunk_rows=12)  # of a host of several
    assert part.tobytes() == np.asarray(tables[stack.name][0]).reshape(4, -1, DIM)[[3, 1]].tobytes()
    assert reader.bytes_read == 2 * ROWS * DIM * 4


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    dim=st.sampled_from((1, 3, 8, 12)),
    cores=st.integers(1, 8),
    here=st.integers(1, 60),
    back=st.integers(1, 60),
)
def test_rows_come_back_from_all_shards_whatever_the_chunks(
    rows: list[int], dim: int, cores: int, here: int, back: int
) -> None:
    limits, random = Limits(max_ids=8, max_unique=8), np.random.default_rng(0)
    tables = [
        Table(name=f"t{each}", rows=count, dim=dim, optimizer=RowWiseAdagrad(), limits=limits)
        for each, count in enumerate(rows)
    ]
    features = [Feature(name=f"of {each.name}", table=each.name, samples=8 * cores) for each in tables]
    plan = plan_stacks(tables, features, Cores(devices=cores, per_device=1))
    values = {
        (each.name, part): random.random((each.rows, width), np.float32)
        for each in tables
        for part, width in (("weight", dim), ("accumulator", 1))
    }
    stored = {
        (stack.name, number): fill_shards(
            stack,
            number,
            range(cores),
            lambda table, part, start, stop, step: values[table, part][start:stop:step],
            chunk_rows=here,
        )
        for stack in plan.stacks
        for number in range(2)
    }
    found: dict[tuple[str, str], list[Any]] = {}
    for chunk in to_logical(plan, lambda name, part, shard, a, b: stored[name, part][shard, a:b], chunk_rows=back):
        found.setdefault((chunk.table, chunk.part), []).append(chunk.values)
    assert {each: np.concatenate(parts).tobytes() for each, parts in found.items()} == {
        each: value.tobytes() for each, value in values.items()
    }


def test_what_is_written_to_a_table_that_devices_have_is_taken() -> None:
    collection, optimizer = declared_tables("read", "unread")
    live = LiveTables(collection, optimizer, "adagrad", unread={"unread"})
    devices = around(live, "read")
    devices.push()
    live.fill()
    with torch.no_grad():
        collection.weights["read"][3] = 7.0
    devices.push_written()
    assert devices.rows_here("read", IDS).tobytes() == collection.weights["read"].detach().numpy().tobytes()
