"""The pipelined step against a simulator that keeps gradients in a queue: the same bits, turn for turn."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparsecore_reference as reference
from jax.sharding import Mesh

from twinstep.spec.errors import DataError, SpecError, TrainError
from twinstep.worker.embedding.initial import Uniform
from twinstep.worker.embedding.sparsecore.device.engine import Engine, Inputs
from twinstep.worker.embedding.sparsecore.device.entries import Csr
from twinstep.worker.embedding.sparsecore.device.pipeline import Trainer
from twinstep.worker.embedding.sparsecore.optimizers import SGD
from twinstep.worker.embedding.sparsecore.spec import Cores, Feature, Limits, Table
from twinstep.worker.embedding.sparsecore.stacking import plan_stacks

ROWS, DIM, SAMPLES = 24, 8, 8
PLAN = plan_stacks(
    [Table(name="t", rows=ROWS, dim=DIM, optimizer=SGD(learning_rate=0.5), limits=Limits(max_ids=32, max_unique=8))],
    [Feature(name="f", table="t", samples=SAMPLES)],
    Cores(devices=1, per_device=2),
)
STACK = PLAN.stacks[0]


def bags_of(number: int) -> reference.Bags:
    """One id a sample, and ids that follow each other's batches, so that staleness shows."""
    random = np.random.default_rng(number)
    return {"f": [[int(each)] for each in random.integers(0, 6, SAMPLES)]}


def inputs_of(bags: reference.Bags) -> Inputs:
    return Inputs({STACK.name: (Csr(*map(jnp.asarray, reference.plain_buffers(STACK, bags, 64))),)})


def dense_step(dense: Any, activations: Any, rest: Any) -> Any:
    """Numbers that are exact in float32, so that host and device agree to the bit."""
    gradient = jnp.floor(activations["f"] * 0.5 + dense * 0.25 + rest)
    return dense + 1.0, {"f": gradient}, jnp.sum(activations["f"])


def engine_of(**more: Any) -> Engine:
    return Engine(plan=PLAN, mesh=Mesh(np.array(jax.devices()[:1]), ("device",)), **more)


def table_of(engine: Engine, tables: Any) -> np.ndarray:
    return np.concatenate([chunk.values for chunk in engine.to_logical(tables)])


def whole_numbers(engine: Engine) -> Any:
    """Return tables of small whole numbers."""
    values = np.random.default_rng(0).integers(-8, 8, (ROWS, DIM)).astype(np.float32)
    return engine.from_logical(lambda table, part, start, stop, step: values[start:stop:step])


def simulated(first: np.ndarray, batches: int, delay: int) -> tuple[np.ndarray, float, list[float]]:
    """Train with updates that arrive `delay` lookups late."""
    table, dense, outputs = first.copy(), 0.0, []
    waiting: collections.deque[Any] = collections.deque()

    def arrive() -> None:
        ids, gradient = waiting.popleft()
        total = np.zeros_like(table)
        np.add.at(total, ids, gradient)
        table[:] -= np.float32(0.5) * total

    for number in range(batches):
        while len(waiting) > delay:
            arrive()
        ids = np.array([bag[0] for bag in bags_of(number)["f"]])
        activations = table[ids]
        outputs.append(float(activations.sum()))
        waiting.append((ids, np.floor(activations * np.float32(0.5) + np.float32(dense * 0.25) + np.float32(number))))
        dense += 1.0
    while waiting:
        arrive()
    return table, dense, outputs


@pytest.mark.parametrize(("pipeline", "delay"), [("off", 0), ("full", 1)])
def test_stale_weights_are_those_of_the_table_in_the_docs(pipeline: Any, delay: int) -> None:
    engine = engine_of()
    for batches in (0, 1, 2, 3, 7):
        tables = whole_numbers(engine)
        first = table_of(engine, tables)
        trainer = Trainer(engine, dense_step, tables, jnp.float32(0), pipeline=pipeline)
        results = list(trainer.run((inputs_of(bags_of(n)), jnp.float32(n)) for n in range(batches)))
        table, dense, outputs = simulated(first, batches, delay)
        assert [each.batch for each in results] == list(range(batches))
        assert [float(each.outputs) for each in results] == outputs
        assert table_of(engine, trainer.tables).tobytes() == table.tobytes()
        assert float(trainer.dense) == dense
        assert trainer.step == batches


def test_a_run_that_is_closed_finishes_what_it_took() -> None:
    engine = engine_of()
    trainer = Trainer(engine, dense_step, whole_numbers(engine), jnp.float32(0), pipeline="full")
    first = table_of(engine, trainer.tables)
    run = trainer.run((inputs_of(bags_of(n)), jnp.float32(n)) for n in range(100))
    next(run)
    run.close()
    table, dense, _ = simulated(first, 2, 1)
    assert table_of(engine, trainer.tables).tobytes() == table.tobytes()
    assert float(trainer.dense) == dense == trainer.step


def broken(bags: reference.Bags) -> Inputs:
    """Return buffers with an id beyond the shard's rows."""
    csr = inputs_of(bags).stacks[STACK.name][0]
    ids = np.asarray(csr.embedding_ids).copy()
    ids[0] = STACK.rows_per_shard + 3
    return Inputs({STACK.name: (csr._replace(embedding_ids=jnp.asarray(ids)),)})


def test_an_id_that_names_no_row_changes_nothing_and_says_so() -> None:
    engine = engine_of()
    tables = whole_numbers(engine)
    before = table_of(engine, tables)
    gradients = {"f": jnp.ones((SAMPLES, DIM))}
    after, checks = jax.jit(engine.update)(tables, broken(bags_of(0)), gradients, jnp.int32(0))
    assert int(checks.out_of_range) == 1
    assert table_of(engine, after).tobytes() == before.tobytes()
    with pytest.raises(DataError, match="1 ids"):
        engine.raise_for(checks)
    dropping = engine_of(id_bound_check="drop")
    after, checks = jax.jit(dropping.update)(tables, broken(bags_of(0)), gradients, jnp.int32(0))
    dropping.raise_for(checks)
    assert int(checks.out_of_range) == 1
    moved = (table_of(dropping, after) != before).any(axis=1).sum()
    assert 0 < moved <= len({bag[0] for bag in bags_of(0)["f"]})


def test_a_gradient_that_is_no_number_changes_nothing_and_says_so() -> None:
    engine = engine_of(nan_check=True)
    tables = whole_numbers(engine)
    gradients = {"f": jnp.ones((SAMPLES, DIM)).at[3, 2].set(jnp.nan)}
    after, checks = jax.jit(engine.update)(tables, inputs_of(bags_of(0)), gradients, jnp.int32(0))
    assert table_of(engine, after).tobytes() == table_of(engine, tables).tobytes()
    with pytest.raises(TrainError, match="not finite"):
        engine.raise_for(checks)


def test_a_window_too_small_is_told_and_not_dropped_in_silence() -> None:
    engine = engine_of(capacities={STACK.name: 1})
    tables = whole_numbers(engine)
    bags = {"f": [[n] for n in range(SAMPLES)]}
    after, checks = jax.jit(engine.update)(tables, inputs_of(bags), {"f": jnp.ones((SAMPLES, DIM))}, jnp.int32(0))
    assert int(checks.left_out) == SAMPLES - 4
    assert table_of(engine, after).tobytes() == table_of(engine, tables).tobytes()
    with pytest.raises(TrainError, match="max_unique_ids_per_partition"):
        engine.raise_for(checks)


def test_a_fault_in_a_run_stops_it_and_leaves_it_usable() -> None:
    engine = engine_of()
    trainer = Trainer(engine, dense_step, whole_numbers(engine), jnp.float32(0), pipeline="full")
    good, bad = (inputs_of(bags_of(0)), jnp.float32(0)), (broken(bags_of(1)), jnp.float32(1))
    with pytest.raises(DataError):
        list(trainer.run([good, bad, good]))
    before = trainer.step
    assert len(list(trainer.run([good]))) == 1
    assert trainer.step == before + 1


def test_what_no_engine_can_run_is_refused() -> None:
    engine = engine_of()
    with pytest.raises(SpecError, match="pipeline"):
        Trainer(engine, dense_step, engine.initial(0, Uniform(bound=1.0)), None, pipeline="half")  # type: ignore[arg-type]
    table = Table(name="t", rows=ROWS, dim=DIM, optimizer="adam", limits=Limits(max_ids=32, max_unique=8))
    for tables, devices in (([table], 1), ([Table(name="t", rows=ROWS, dim=DIM, optimizer=SGD())], 1), ([table], 2)):
        plan = plan_stacks(tables, [Feature(name="f", table="t", samples=8)], Cores(devices=devices, per_device=2))
        with pytest.raises(SpecError):
            Engine(plan=plan, mesh=engine.mesh)
