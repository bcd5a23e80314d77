"""From a batch's ids to new tables: the host's preprocessing and the device's step together, split or not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparsecore_reference as reference
from jax.sharding import Mesh

from twinstep.worker.embedding.initial import Normal
from twinstep.worker.embedding.sparsecore.device.engine import Engine, _windows
from twinstep.worker.embedding.sparsecore.inputs import Ragged
from twinstep.worker.embedding.sparsecore.logical import to_logical
from twinstep.worker.embedding.sparsecore.optimizers import Adagrad
from twinstep.worker.embedding.sparsecore.preprocess import Policy, Preprocessor
from twinstep.worker.embedding.sparsecore.spec import Cores, Feature, Limits, Table
from twinstep.worker.embedding.sparsecore.stacking import StackPlan, plan_stacks

SAMPLES = 64
WIDE, TIGHT = Limits(max_ids=512, max_unique=512), Limits(max_ids=24, max_unique=24)


def plan_with(limits: Limits) -> StackPlan:
    tables = [
        Table(name=name, rows=200, dim=8, combiner="mean", optimizer=Adagrad(learning_rate=0.1), limits=limits)
        for name in ("a", "b")
    ]
    features = [Feature(name=f"f{each.name}", table=each.name, samples=SAMPLES) for each in tables]
    plan = plan_stacks(tables, features, Cores(devices=1, per_device=4))
    return plan.with_limits({stack.name: limits for stack in plan.stacks})


def stepped(limits: Limits, split: Any) -> tuple[Any, dict[str, np.ndarray], dict[str, np.ndarray], reference.Bags]:
    plan = plan_with(limits)
    bags = reference.random_bags(plan, 3, longest=9)
    ragged = {
        name: Ragged(
            ids=np.array([each for bag in bags for each in bag], np.int32),
            lengths=np.array([len(bag) for bag in bags], np.int32),
        )
        for name, bags in bags.items()
    }
    preprocessor = Preprocessor(plan, policy=Policy(split=split), threads=1)
    batch = preprocessor(ragged)
    preprocessor.close()
    engine = Engine(plan=plan, mesh=Mesh(np.array(jax.devices()[:1]), ("device",)))
    tables, inputs = engine.initial(0, Normal(std=1.0)), engine.inputs(batch)
    found, checks = jax.jit(engine.look_up)(tables, inputs)
    engine.raise_for(checks)
    gradients = {name: jnp.cos(each) for name, each in found.items()}
    after, checks = jax.jit(engine.update)(tables, inputs, gradients, jnp.int32(0))
    engine.raise_for(checks)
    weights = {chunk.table: chunk.values for chunk in engine.to_logical(after) if chunk.part == "weight"}
    return batch, {name: np.asarray(each) for name, each in found.items()}, weights, bags


@pytest.fixture(scope="module")
def whole() -> Any:
    return stepped(WIDE, "none")


def test_a_batch_goes_from_ids_to_activations(whole: Any) -> None:
    _, activations, _, bags = whole
    plan = plan_with(WIDE)
    engine = Engine(plan=plan, mesh=Mesh(np.array(jax.devices()[:1]), ("device",)))
    tables = {c.table: c.values for c in engine.to_logical(engine.initial(0, Normal(std=1.0))) if c.part == "weight"}
    for name, wanted in reference.look_up(tables, plan, bags).items():
        np.testing.assert_allclose(activations[name], wanted, rtol=1e-5, atol=1e-6)


def test_reading_what_processes_hold_apart_compiles_once_for_all_reads_and_engines() -> None:
    plan, mesh = plan_with(WIDE), Mesh(np.array(jax.devices()[:1]), ("device",))
    windows = _windows(mesh, plan.cores.per_device)
    tables = Engine(plan=plan, mesh=mesh).initial(0, Normal(std=1.0))
    counts = []
    for chunk_rows in (64, 64, 60, 52):  # 200 rows: the last chunk is a shorter one
        engine = Engine(plan=plan, mesh=mesh)
        got = list(to_logical(plan, engine._read_of_all(tables), chunk_rows=chunk_rows))
        for chunk, wanted in zip(got, engine.to_logical(tables, chunk_rows=chunk_rows), strict=True):
            np.testing.assert_array_equal(chunk.values, wanted.values)
        counts.append(windows._cache_size())  # type: ignore[attr-defined]
    assert counts[0] == counts[1]
    assert counts[-1] <= counts[0] + 1  # windows of 16, 15 and 13 rows are one program, those of 2 and 5 two


@pytest.mark.parametrize("split", ["vocabulary", "samples"])
def test_a_batch_over_its_limits_trains_to_the_same_bits(whole: Any, split: Any) -> None:
    batch, activations, weights, _ = stepped(TIGHT, split)
    assert batch.split == split
    assert max(batch.minibatches, len(batch.blocks)) > 1
    for name, wanted in whole[1].items():
        assert activations[name].tobytes() == wanted.tobytes()
    for name, wanted in whole[2].items():
        assert weights[name].tobytes() == wanted.tobytes()
