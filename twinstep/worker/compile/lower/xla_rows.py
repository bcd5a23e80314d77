"""Rows of a table by id, on XLA: what runs `twinstep::unique_rows`, `sum_rows` and `write_rows`.

`xla_ops.py` calls these while the step is traced. Slots are unique and ascend, which scatters are told: they then need
no atomics, and what lies past the table's end is dropped. Under a donated state the table is written in place. Programs
for one CPU call the kernels of `xla_rows_cpu.py` instead.
"""

# Shapes: n ids, V rows of a table, D whatever a row holds, flat.

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from twinstep.worker.compile.lower import xla_rows_cpu


def unique_rows(ids: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return rows [n], order [n] and offsets [n + 1], as the operator says."""
    count, most = ids.shape[0], int(np.iinfo(ids.dtype).max)
    if num_rows + count <= most and xla_rows_cpu.takes(ids):
        return xla_rows_cpu.unique_rows(ids, num_rows)
    places = jnp.arange(count + 1, dtype=ids.dtype)
    inside = (ids >= 0) & (ids < num_rows)
    keys, order = lax.sort((jnp.where(inside, ids, num_rows), places[:count]), num_keys=1, is_stable=True)
    named = keys < num_rows
    first = named & jnp.concatenate([jnp.ones(1, bool), keys[1:] != keys[:-1]])
    slot = jnp.where(first, jnp.cumsum(first, dtype=ids.dtype) - 1, count + 1)
    past = num_rows + jnp.minimum(places[:count], most - num_rows)  # a table as long as its ids reach has one such row
    rows = past.at[slot].set(keys, mode="drop")
    offsets = jnp.full_like(places, jnp.sum(named, dtype=ids.dtype)).at[slot].set(places[:count], mode="drop")
    return rows, order, offsets


def sum_rows(values: jax.Array, order: jax.Array, offsets: jax.Array) -> jax.Array:
    """Return [n, D]: what the ids of each slot carry, added up."""
    if values.dtype == jnp.float32 and xla_rows_cpu.takes(order, offsets):
        return xla_rows_cpu.sum_rows(values, order, offsets)
    count = values.shape[0]
    places = jnp.arange(count, dtype=offsets.dtype)
    slot = jnp.searchsorted(offsets[:count], places, side="right") - 1
    slot = jnp.where(places < offsets[count], slot, count)
    return jnp.zeros_like(values).at[slot].add(values[order], mode="drop", indices_are_sorted=True)


def write_rows(table: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    """Return `table` with rows written; those of V and more are dropped."""
    if table.dtype == values.dtype and xla_rows_cpu.takes(rows):
        return xla_rows_cpu.write_rows(table, rows, values)
    return table.at[rows].set(values, mode="drop", indices_are_sorted=True, unique_indices=True)
