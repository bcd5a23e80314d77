"""Run by test_ring_engine.py in a process of its own: JAX must be told of its devices before it is imported.

Arguments: names of cases. Prints one line of JSON a case: its name and what was found.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from torch import nn

from twinstep.worker.embedding.initial import Normal
from twinstep.worker.embedding.optim import RowWiseAdagrad as TorchRowWiseAdagrad
from twinstep.worker.embedding.ring.device.engine import WEIGHT, Bags, Engine
from twinstep.worker.embedding.ring.plan import RingPlan
from twinstep.worker.embedding.sparsecore.optimizers import SGD, Adagrad, Adam, RowOptimizer, RowWiseAdagrad
from twinstep.worker.embedding.sparsecore.spec import Feature, Table

SAMPLES = 16
RATE = 0.05
ORACLES: dict[str, tuple[RowOptimizer, Callable[[list[nn.Parameter]], torch.optim.Optimizer], bool]] = {
    "sgd": (SGD(learning_rate=RATE), lambda params: torch.optim.SGD(params, lr=RATE), False),
    "adagrad": (
        Adagrad(learning_rate=RATE, initial_accumulator=0.0, eps=1e-10),
        lambda params: torch.optim.Adagrad(params, lr=RATE),
        False,
    ),
    "rowwise_adagrad": (
        RowWiseAdagrad(learning_rate=RATE),
        lambda params: TorchRowWiseAdagrad(params, lr=RATE),
        False,
    ),
    "adam": (Adam(learning_rate=RATE), lambda params: torch.optim.SparseAdam(params, lr=RATE), True),
}
"""Ours, eager PyTorch's, and whether that one wants sparse gradients."""


def plan_of(chips: int, optimizer: RowOptimizer, **more: Any) -> RingPlan:
    """Tables whose rows chips divide and do not, one with two features, all combiners, one feature of one id."""
    tables = (
        Table(name="a", rows=24, dim=16, optimizer=optimizer),
        Table(name="b", rows=37, dim=8, combiner="mean", optimizer=optimizer),
        Table(name="c", rows=8, dim=4, combiner="sqrtn", optimizer=optimizer),
    )
    features = (
        Feature(name="f1", table="a", samples=SAMPLES),
        Feature(name="f2", table="b", samples=SAMPLES),
        Feature(name="f3", table="a", samples=SAMPLES),
        Feature(name="f4", table="c", samples=SAMPLES),
    )
    return RingPlan(tables=tables, features=features, chips=chips, **more)


def bags_of(plan: RingPlan, seed: int) -> dict[str, Bags]:
    """Bags with repeated ids, ids that name no row, empty bags; weights on some features."""
    random = np.random.default_rng(seed)
    found = {}
    for number, feature in enumerate(plan.features):
        rows = plan.table(feature.table).rows
        slots = (5, 3, 1, 4)[number % 4]
        ids = random.integers(0, rows, (SAMPLES, slots))
        ids[random.random(ids.shape) < 0.4] = random.integers(0, 3)  # repeated within and over bags and chips
        ids[random.random(ids.shape) < 0.2] = -1
        ids[random.random(ids.shape) < 0.05] = rows + int(random.integers(0, 99))
        ids[3] = -1
        ids[SAMPLES - 1] = rows
        weights = random.random(ids.shape).astype(np.float32) + 0.5 if number in (0, 3) else None
        found[feature.name] = Bags(jnp.asarray(ids, jnp.int32), None if weights is None else jnp.asarray(weights))
    return found


def pooled(weight: torch.Tensor, bags: Bags, combiner: str, sparse: bool) -> torch.Tensor:
    """Return [B, D] by torch's own embedding_bag."""
    ids = torch.tensor(np.asarray(bags.ids), dtype=torch.int64)
    valid = (ids >= 0) & (ids < len(weight))
    weights = torch.ones(ids.shape) if bags.weights is None else torch.tensor(np.asarray(bags.weights))
    weights = torch.where(valid, weights, 0.0)
    if combiner != "sum":
        total = weights.sum(1, True) if combiner == "mean" else weights.square().sum(1, True).sqrt()
        weights = weights / torch.where(total == 0, 1.0, total)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), valid.sum(1).cumsum(0)[:-1]])
    return nn.functional.embedding_bag(
        ids[valid], weight, offsets, mode="sum", per_sample_weights=weights[valid], sparse=sparse
    )


def worst(ours: Any, theirs: Any) -> float:
    return float(np.max(np.abs(np.asarray(ours, np.float32) - np.asarray(theirs, np.float32))))


def against_torch(
    chips: int, kind: str, steps: int = 3, form: Any = "shift", interpret: Any = False, **more: Any
) -> Any:
    """Return the greatest errors of activations and of tables, and of slots, after some steps."""
    optimizer, make, sparse = ORACLES[kind]
    plan = plan_of(chips, optimizer, **more)
    mesh = Mesh(np.array(jax.devices()[:chips]), ("chip",))
    engine = Engine(plan=plan, mesh=mesh, form=form, interpret=interpret)
    tables = engine.initial(7, Normal(std=0.5))
    live = {t.name: nn.Parameter(torch.tensor(engine.to_logical(tables, t.name))) for t in plan.tables}
    theirs = make(list(live.values()))
    first = {name: each.detach().clone() for name, each in live.items()}
    look_up, update = jax.jit(engine.look_up), jax.jit(engine.update, donate_argnums=0)
    forward, named = 0.0, {name: np.zeros(len(each), bool) for name, each in live.items()}
    for step in range(steps):
        bags = bags_of(plan, step)
        inputs = jax.device_put(bags, engine.sharding)
        found = look_up(tables, inputs)
        wanted = {
            f.name: pooled(live[f.table], bags[f.name], plan.table(f.table).combiner, sparse) for f in plan.features
        }
        forward = max([forward, *(worst(found[name], each.detach()) for name, each in wanted.items())])
        torch.manual_seed(step)
        gradients = {name: torch.randn_like(each) for name, each in wanted.items()}
        theirs.zero_grad()
        sum((each * gradients[name]).sum() for name, each in wanted.items()).backward()  # type: ignore[union-attr]
        theirs.step()
        given = {name: jax.device_put(jnp.asarray(each.numpy()), engine.sharding) for name, each in gradients.items()}
        tables = update(tables, inputs, given, jnp.int32(step))
        for f in plan.features:
            ids = np.asarray(bags[f.name].ids)
            named[f.table][ids[(ids >= 0) & (ids < len(named[f.table]))]] = True
        if plan.dtype == "bfloat16":
            with torch.no_grad():
                for each in live.values():
                    each.copy_(each.bfloat16().float())
    values = {name: engine.to_logical(tables, name) for name in live}
    back = {name: engine.from_logical(name, WEIGHT, each) for name, each in values.items()}
    return {
        "forward": forward,
        "tables": max(worst(values[name], each.detach()) for name, each in live.items()),
        "moved": min(worst(values[name], each) for name, each in first.items()),
        "untouched_kept": all(
            np.array_equal(values[name][~named[name]], first[name].numpy()[~named[name]]) for name in live
        ),
        "some_untouched": any(not each.all() for each in named.values()),
        "back": max(worst(back[name], tables[name][0]) for name in live),
        "bits": {name: each.astype(np.float32).tobytes().hex()[:4096] for name, each in values.items()},
    }


def sizes(chips: int) -> Any:
    """Return the most numbers that a device's programs hold in one array, and of what there are none of that size."""
    table = Table(name="t", rows=4096, dim=16, optimizer=Adagrad())
    plan = RingPlan(tables=(table,), features=(Feature(name="f", table="t", samples=128),), chips=chips)
    engine = Engine(plan=plan, mesh=Mesh(np.array(jax.devices()[:chips]), ("chip",)))
    tables = engine.initial(0, Normal(std=1.0))
    bags = {"f": Bags(jax.device_put(jnp.zeros((128, 8), jnp.int32), engine.sharding))}
    gradient = {"f": jax.device_put(jnp.zeros((128, 16)), engine.sharding)}
    texts = [
        jax.jit(engine.look_up).lower(tables, bags).compile().as_text(),
        jax.jit(engine.update, donate_argnums=0).lower(tables, bags, gradient, jnp.int32(0)).compile().as_text(),
    ]
    shapes = [
        [int(n) for n in each.split(",") if n] for text in texts for each in re.findall(r"[fs]\d+\[([\d,]+)\]", text)
    ]
    return {
        "largest": max(int(np.prod(each)) for each in shapes),
        "table": 4096 * 16,
        "rows_of_the_batch": 128 * 8 * 16,
        "part_of_the_table": 4096 * 16 // chips,
        "permutes": sum(text.count("collective-permute(") for text in texts),
        "others": sum(len(re.findall(r"all-gather|all-to-all|all-reduce", text)) for text in texts),
    }


def kernels(chips: int, kind: str, dtype: str = "float32") -> Any:
    """Run the kernels interpreted, looking for races, and hold them to the other form."""
    params = pltpu.InterpretParams(detect_races=True)
    found = against_torch(chips, kind, steps=1, form="kernel", interpret=params, dtype=dtype)
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert interpret_pallas_call.races is not None
    return {**found, "races": interpret_pallas_call.races.races_found}


def run(name: str) -> Any:
    what, *rest = name.split("/")
    if what == "shift":
        chips, kind, order, dtype = rest
        return against_torch(int(chips), kind, order=order, dtype=dtype)
    if what == "kernel":
        return kernels(int(rest[0]), *rest[1:])
    return sizes(int(rest[0]))


if __name__ == "__main__":
    for case in sys.argv[1:]:
        print(json.dumps([case, run(case)]), flush=True)
