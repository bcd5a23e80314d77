"""Run by test_sparsecore_lookups.py in a process of its own: JAX must be told of its devices before it is imported.

Prints one line of JSON: by mesh, what was found.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import sparsecore_reference as reference
from jax.sharding import Mesh

from twinstep.worker.embedding.initial import Normal
from twinstep.worker.embedding.sparsecore.device.engine import Engine, Inputs
from twinstep.worker.embedding.sparsecore.device.entries import Csr
from twinstep.worker.embedding.sparsecore.logical import to_logical
from twinstep.worker.embedding.sparsecore.optimizers import Adagrad, Adam, RowOptimizer, RowWiseAdagrad
from twinstep.worker.embedding.sparsecore.spec import Cores, Feature, Limits, Quantization, Table
from twinstep.worker.embedding.sparsecore.stacking import Stacking, StackPlan, plan_stacks

LIMITS = Limits(max_ids=64, max_unique=32)
SLOTS = 256  # of a SparseCore


def plan_for(devices: int, cores: int, stacking: Stacking | None = None) -> StackPlan:
    """Two tables of different widths in a stack, a narrow packed one, one alone; a table with two features."""

    def table(name: str, rows: int, dim: int, combiner: Any, optimizer: RowOptimizer, **more: Any) -> Table:
        return Table(name=name, rows=rows, dim=dim, combiner=combiner, optimizer=optimizer, limits=LIMITS, **more)

    tables = [
        table("a", 50, 16, "mean", Adagrad(learning_rate=0.1, clip_norm=2.0)),
        table("b", 90, 12, "mean", Adagrad(learning_rate=0.1, clip_norm=2.0)),
        table("n", 70, 3, "sqrtn", Adam(learning_rate=0.1)),
        table("q", 40, 8, "sum", RowWiseAdagrad(), quantization=Quantization(num_buckets=9, low=-1.0, high=1.0)),
    ]
    features = [
        Feature(name="f1", table="a", samples=48),
        Feature(name="f2", table="b", samples=96),
        Feature(name="f3", table="a", samples=48),
        Feature(name="f4", table="n", samples=48),
        Feature(name="f5", table="q", samples=48),
    ]
    return plan_stacks(tables, features, Cores(devices=devices, per_device=cores), stacking)


def logical(engine: Engine, tables: Any, *, of_all: bool = False) -> dict[str, np.ndarray]:
    """Logical rows by table and part; `of_all`: as processes read them that hold a part each."""
    found: dict[str, list[np.ndarray]] = {}
    chunks = to_logical(engine.plan, engine._read_of_all(tables), chunk_rows=16) if of_all else None
    for chunk in chunks or engine.to_logical(tables, chunk_rows=16):
        found.setdefault(f"{chunk.table}/{chunk.part}", []).append(chunk.values)
    return {name: np.concatenate(parts) for name, parts in found.items()}


class Case:
    """One plan on one mesh, after one step."""

    def __init__(self, devices: int, cores: int, stacking: Stacking | None = None) -> None:
        self.plan = plan_for(devices, cores, stacking)
        mesh = Mesh(np.array(jax.devices()[:devices]), ("device",))
        self.engine = Engine(plan=self.plan, mesh=mesh, nan_check=True)
        self.tables = self.engine.initial(3, Normal(std=1.0))
        self.bags = reference.random_bags(self.plan, 1)
        random = np.random.default_rng(5)
        widths = {each.table.name: each.table.dim for stack in self.plan.stacks for each in stack.placements}
        places = sorted((each.feature for s in self.plan.stacks for each in s.features), key=lambda each: each.name)
        self.gradients = {
            each.name: random.normal(size=(each.samples, widths[each.table])).astype(np.float32) for each in places
        }
        self.look_up, self.update = jax.jit(self.engine.look_up), jax.jit(self.engine.update)

    def put(self, array: Any) -> jax.Array:
        return jax.device_put(jnp.asarray(array), self.engine.sharding)

    def csr(self, buffers: Any) -> Csr:
        return Csr(*map(self.put, buffers))

    def inputs(self) -> Inputs:
        return Inputs({s.name: (self.csr(reference.plain_buffers(s, self.bags, SLOTS)),) for s in self.plan.stacks})

    def split(self, minibatches: int) -> Inputs:
        cores = self.plan.cores.per_device
        buffers = {
            s.name: reference.split_buffers(s, self.bags, 2 * SLOTS * cores, minibatches) for s in self.plan.stacks
        }
        return Inputs({name: (self.csr(each),) for name, each in buffers.items()}, jnp.int32(minibatches))

    def blocks(self) -> Inputs:
        """The samples of each feature in two blocks: every other one of a SparseCore in the second."""
        parts = []
        for block in (0, 1):
            bags = {name: [b if i % 2 == block else [] for i, b in enumerate(each)] for name, each in self.bags.items()}
            parts.append({s.name: self.csr(reference.plain_buffers(s, bags, SLOTS)) for s in self.plan.stacks})
        return Inputs({name: (parts[0][name], parts[1][name]) for name in parts[0]})

    def step(self, inputs: Inputs) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return activations, and logical tables after an update."""
        found, checks = self.look_up(self.tables, inputs)
        self.engine.raise_for(checks)
        gradients = {name: self.put(each) for name, each in self.gradients.items()}
        tables, checks = self.update(self.tables, inputs, gradients, jnp.int32(0))
        self.engine.raise_for(checks)
        return {name: np.asarray(each) for name, each in found.items()}, logical(self.engine, tables)


def errors(case: Case, activations: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the largest differences from the float64 reference."""
    before = {
        name.partition("/")[0]: each for name, each in logical(case.engine, case.tables).items() if "/weight" in name
    }
    rounded = {**before, "q": np.clip(np.floor(np.clip(before["q"].astype(np.float64), -1, 1) * 4 + 0.5) / 4, -1, 1)}
    wanted = reference.look_up(rounded, case.plan, case.bags)
    worst = {"activations": max(float(np.abs(activations[name] - wanted[name]).max()) for name in wanted)}
    untouched, others = True, 0
    for name, (g, named) in reference.table_gradients(case.plan, case.bags, case.gradients).items():
        w = before[name].astype(np.float64)
        if name in "ab":
            g *= min(1.0, 2.0 / np.linalg.norm(g))
            new = w - 0.1 * g / np.sqrt(0.1 + g**2)
        elif name == "n":
            first, second = 0.1 * g, 0.001 * g**2
            new = w - 0.1 * (first / 0.1) / (np.sqrt(second / 0.001) + 1e-8)
        else:
            new = w - 0.001 * g / (np.sqrt((g**2).mean(1, keepdims=True)) + 1e-8)
        found = after[f"{name}/weight"]
        worst[name] = float(np.abs(found - np.where(named[:, None], new, w)).max())
        untouched &= bool(np.array_equal(found[~named], before[name][~named]))
        others += int((~named).sum())
    return {**worst, "untouched_keep_their_bits": untouched and others > 0}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def main(split_on: list[str], meshes: list[str]) -> None:
    """Look at each mesh, DEVICESxCORES, split the batch on some, and move tables from one to the next."""
    out: dict[str, Any] = {}
    moved: dict[str, np.ndarray] | None = None
    first: dict[str, np.ndarray] | None = None
    for number, mesh in enumerate(meshes):
        devices, cores = map(int, mesh.split("x"))
        stacking = Stacking(disable_table_stacking=True) if number % 2 else None
        case = Case(devices, cores, stacking)
        start = logical(case.engine, case.tables)
        first = first or start
        activations, after = case.step(case.inputs())
        found: dict[str, Any] = errors(case, activations, after)
        if mesh in split_on:
            split = case.step(case.split(3))
            blocks = case.step(case.blocks())
            found["processes_read_the_same"] = same(start, logical(case.engine, case.tables, of_all=True))
            found["minibatches_are_exact"] = same(activations, split[0]) and same(after, split[1])
            found["blocks_are_exact"] = same(activations, blocks[0]) and same(after, blocks[1])
        found["starts_alike"] = same(first, start)
        if moved is not None:
            there = moved
            loaded = case.engine.from_logical(
                lambda t, p, a, b, by, there=there: there[f"{t}/{p}"][a:b:by], chunk_rows=24
            )
            found["moves"] = same(moved, logical(case.engine, loaded))
        moved = after
        out[mesh] = found
    json.dump(out, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2:])
