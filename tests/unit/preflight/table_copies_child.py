"""Compiles lookups and updates of tables of several widths for a TPU; prints the temporaries of each, JSON by width."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROWS, IDS = 1 << 20, 512


def step(table: jax.Array, ids: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Look rows up, and update them."""
    rows = jnp.take(table, ids, axis=0, mode="clip")
    return table.at[ids].add(gradient * rows, mode="drop"), rows.sum()


described = topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1])
whole = NamedSharding(Mesh(np.array(described.devices), ("data",)), PartitionSpec())
found = {}
for width in map(int, sys.argv[2:]):
    shapes = (((ROWS, width), jnp.float32), ((IDS,), jnp.int32), ((IDS, width), jnp.float32))
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for shape, dtype in shapes]
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(whole, None))
    compiled = jitted.lower(*arguments).compile(compiler_options={"xla_optimization_level": "EFFORT_O1"})
    memory = compiled.memory_analysis()
    found[width] = {"temp": memory.temp_size_in_bytes, "alias": memory.alias_size_in_bytes}
print(json.dumps(found))
