"""Run by test_ring_tpu.py in a process of its own: compiles rings for a TPU slice with libtpu.

Arguments: slice, then cases: {"form": …, "dim": …, "rows": …, "kind": …, "ids": …}. Prints one line of JSON a case.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from twinstep.spec.errors import SpecError
from twinstep.worker.embedding.ring.device.engine import Bags, Engine
from twinstep.worker.embedding.ring.plan import RingPlan
from twinstep.worker.embedding.sparsecore.optimizers import SGD, Adagrad, Adam, RowWiseAdagrad
from twinstep.worker.embedding.sparsecore.spec import Feature, Table

KINDS: dict[str, Any] = {"sgd": SGD(), "adagrad": Adagrad(), "adam": Adam(), "rowwise_adagrad": RowWiseAdagrad()}


def compiled(case: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    count = case.get("tables", 1)
    tables = tuple(
        Table(name=f"t{n}", rows=case["rows"], dim=case["dim"], optimizer=KINDS[case["kind"]]) for n in range(count)
    )
    samples = case.get("samples", 16) * mesh.size
    features = tuple(Feature(name=f"f{n}", table=f"t{n}", samples=samples) for n in range(count))
    plan = RingPlan(tables=tables, features=features, chips=mesh.size, dtype=case.get("dtype", "float32"))
    try:
        engine = Engine(plan=plan, mesh=mesh, form=case["form"])
    except SpecError as error:
        return {"refused": str(error)}

    def shape(dims: tuple[int, ...], dtype: Any = jnp.float32, spread: bool = True) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P(mesh.axis_names[0]) if spread else P()))

    state = {table.name: tuple(shape(each.shape, each.dtype) for each in engine.shapes(table)) for table in tables}
    inputs = {each.name: Bags(shape((samples, case["ids"]), jnp.int32)) for each in features}
    gradients = {each.name: shape((samples, case["dim"])) for each in features}
    programs = {
        "forward": jax.jit(engine.look_up).trace(state, inputs),
        "backward": jax.jit(engine.update, donate_argnums=0, out_shardings=engine.sharding).trace(
            state, inputs, gradients, shape((), jnp.int32, False)
        ),
    }
    found: dict[str, Any] = {}
    for name, program in programs.items():
        done = program.lower(lowering_platforms=("tpu",)).compile()
        memory, text = done.memory_analysis(), done.as_text()
        found[name] = {
            "arguments": memory.argument_size_in_bytes,
            "alias": memory.alias_size_in_bytes,
            "temp": memory.temp_size_in_bytes,
            "kernels": len(re.findall(r"custom_call_target=\"tpu_custom_call\"", text)),
            "permutes": len(re.findall(r" collective-permute(-start)?\(", text)),
        }
    found["tables"] = sum(int(np.prod(each.shape)) * each.dtype.itemsize for each in jax.tree.leaves(state))
    return found


def main(topology: str, *cases: str) -> None:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices), ("chip",))
    for case in cases:
        print(json.dumps([case, compiled(json.loads(case), mesh)]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
