"""Run by test_sparsecore_tpu.py in a process of its own: compiles lookups and updates for a TPU slice with libtpu.

Arguments: slice, SparseCores of a device, then cases. Prints one line of JSON a case: its name, the compiler's memory
report, and whether SparseCores do the work.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from twinstep.worker.embedding.sparsecore.device import stored
from twinstep.worker.embedding.sparsecore.device.engine import Engine, Inputs
from twinstep.worker.embedding.sparsecore.device.entries import Csr
from twinstep.worker.embedding.sparsecore.logical import parts_of
from twinstep.worker.embedding.sparsecore.optimizers import FTRL, SGD, Adagrad, Adam, RowWiseAdagrad
from twinstep.worker.embedding.sparsecore.spec import Cores, Feature, Limits, Quantization, Table
from twinstep.worker.embedding.sparsecore.stacking import StackPlan, plan_stacks

CASES: dict[str, Any] = {
    "adagrad": {"optimizer": Adagrad(weight_decay=0.01, clip_value=1.0), "dims": (16, 16)},
    "adam_minibatches": {"optimizer": Adam(), "dims": (16,), "minibatches": True},
    "packed_sgd": {"optimizer": SGD(), "dims": (3,)},
    "rowwise": {"optimizer": RowWiseAdagrad(), "dims": (16,)},
    "ftrl_quantized": {
        "optimizer": FTRL(l1=0.1, weight_max=2.0),
        "dims": (32,),
        "quantization": Quantization(num_buckets=256, low=-1.0, high=1.0),
    },
}


def plan_of(case: Any, cores: Cores) -> StackPlan:
    tables = [
        Table(
            name=f"t{number}",
            rows=case.get("rows", 20_000),
            dim=dim,
            optimizer=case["optimizer"],
            quantization=case.get("quantization"),
            limits=Limits(max_ids=case.get("max_ids", 64), max_unique=case.get("max_unique", 64)),
        )
        for number, dim in enumerate(case["dims"])
    ]
    samples = case.get("samples", 128) * cores.count
    features = [Feature(name=f"f{each.name}", table=each.name, samples=samples) for each in tables]
    return plan_stacks(tables, features, cores)


def compiled(case: Any, mesh: Mesh, per_device: int) -> dict[str, Any]:
    plan = plan_of(case, Cores(devices=mesh.size, per_device=per_device))
    engine = Engine(plan=plan, mesh=mesh, backend="tpu", splits=2)
    split = case.get("minibatches", False)

    def shape(dims: tuple[int, ...], dtype: Any = jnp.float32, spread: bool = True) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P("device") if spread else P()))

    tables, buffers = {}, {}
    for stack in plan.stacks:
        limits, count = stack.limits, stack.cores.count
        assert limits is not None
        tables[stack.name] = tuple(
            jax.ShapeDtypeStruct(stored.stored_shape(stack, per_row), jnp.float32, sharding=engine.placing_of(per_row))
            for _, per_row, _ in parts_of(stack)
        )
        slots = count * count * -(-limits.max_ids // 8) * 8 * (2 if split else 1)
        pointers = count * max(count, 8) * (64 if split else 1)
        ids = shape((slots,), jnp.int32)
        buffers[stack.name] = (Csr(shape((pointers,), jnp.int32), ids, ids, shape((slots,))),)
    inputs = Inputs(buffers, shape((), jnp.int32, False) if split else None)
    gradients = {
        place.feature.name: shape((place.feature.samples, plan.of_table(place.feature.table)[1].table.dim))
        for stack in plan.stacks
        for place in stack.features
    }
    step = shape((), jnp.int32, False)
    out: dict[str, Any] = {"stacks": [[s.stored_dim, s.pack] for s in plan.stacks]}
    in_place = jax.jit(engine.update, donate_argnums=0, out_shardings=(engine.placing, None))
    traced = {
        "forward": jax.jit(engine.look_up).trace(tables, inputs),
        "backward": in_place.trace(tables, inputs, gradients, step),
    }
    for name, program in traced.items():
        done = program.lower(lowering_platforms=("tpu",)).compile()
        memory, text = done.memory_analysis(), done.as_text()
        out[name] = {
            "temp": memory.temp_size_in_bytes,
            "arguments": memory.argument_size_in_bytes,
            "alias": memory.alias_size_in_bytes,
            "on_sparsecores": "SparseDenseMatmul" in text or "sparse-core-call" in text or "sparsecore" in text.lower(),
            "tables": sum(int(np.prod(each.shape)) * 4 // mesh.size for parts in tables.values() for each in parts),
        }
    return out


def main(topology: str, per_device: str, *names: str) -> None:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices), ("device",))
    cases = {name: CASES.get(name) or eval_case(name) for name in names}
    for name, case in cases.items():
        print(json.dumps([name, compiled(case, mesh, int(per_device))]), flush=True)


def eval_case(text: str) -> Any:
    """Read a case of the memory grid: {"dim": 16, "max_ids": …, "max_unique": …, "samples": …, "kind": …}."""
    given = json.loads(text)
    kinds = {"sgd": SGD(), "adagrad": Adagrad(), "adam": Adam(), "rowwise": RowWiseAdagrad()}
    return {**given, "optimizer": kinds[given.get("kind", "sgd")], "dims": given.get("dims") or (given["dim"],)}


if __name__ == "__main__":
    main(*sys.argv[1:])
