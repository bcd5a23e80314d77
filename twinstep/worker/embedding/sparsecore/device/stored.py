"""Rows of a stored stack, read and written: the one place that knows how narrow rows are packed.

A device stores [S·R / pack, stored_dim]; a row is `width` values. Where `pack` is over 1, device row r is columns
[r % pack · width, + width) of stored row r // pack. Rows out of range read as zeros and are not written.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from twinstep.worker.embedding.sparsecore.stacking import Stack


def width_of(stack: Stack) -> int:
    """Return W: values of a row as it is looked up: padded to 8, or a packed table's own width."""
    return stack.stored_dim if stack.pack == 1 else stack.placements[0].table.dim


def stored_shape(stack: Stack, per_row: bool = False) -> tuple[int, int]:
    """Return the shape over all devices of the stored table, or of a slot with one number a row."""
    rows = stack.rows // stack.pack
    return (rows, stack.pack) if per_row else (rows, stack.stored_dim)


def take(stored: jax.Array, rows: jax.Array, stack: Stack) -> jax.Array:
    """Return rows of a device's part, [...] int32 → [..., W] (or [..., 1] of a slot with one number a row)."""
    if stack.pack == 1:
        return jnp.take(stored, rows, axis=0, mode="fill", fill_value=0)
    at, columns = _packed(stored, rows, stack)
    return stored.at[at, columns].get(mode="fill", fill_value=0)


def put(stored: jax.Array, rows: jax.Array, values: jax.Array, stack: Stack) -> jax.Array:
    """Return a device's part with rows replaced; each row may be named once. Donated, it is changed in place."""
    if stack.pack == 1:
        return stored.at[rows].set(values, mode="drop", unique_indices=True)
    at, columns = _packed(stored, rows, stack)
    return stored.at[at, columns].set(values, mode="drop", unique_indices=True)


def _packed(stored: jax.Array, rows: jax.Array, stack: Stack) -> tuple[jax.Array, jax.Array]:
    width = 1 if stored.shape[1] == stack.pack else width_of(stack)
    start = (rows % stack.pack) * width
    return (rows // stack.pack)[..., None], start[..., None] + jnp.arange(width, dtype=jnp.int32)
