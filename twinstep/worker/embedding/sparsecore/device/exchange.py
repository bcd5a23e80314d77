"""How rows travel between devices: each SparseCore asks each shard for the different rows that it needs, once.

A window of C slots stands for each pair of an asking SparseCore and a shard, so that shapes are static; all windows go
in one all-to-all, and rows, or gradients, come in another. Nothing has the size of a table.

Shapes as in `entries`: D, S, N, E, R, C, W.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from twinstep.worker.embedding.sparsecore.device.entries import Entries
from twinstep.worker.embedding.sparsecore.stacking import Stack

ABSENT = -1  # in a slot of a window that no row was put into


class Windows(NamedTuple):
    """Which rows one device asks for."""

    slot: jax.Array
    """[E] int32: the slot that holds an entry's row, among all S·N·C; S·N·C where the entry is not valid."""
    rows: jax.Array
    """[S·N·C] int32: the local row that a slot stands for, or ABSENT."""
    left_out: jax.Array
    """0-d int32: rows for which a window had no slot."""


def plan(entries: Entries, stack: Stack, capacity: int) -> Windows:
    """Give each different row of each (SparseCore, shard) a slot in its window, in ascending order of rows."""
    cores, shards = stack.cores.per_device, stack.cores.count
    window = entries.core * shards + entries.shard
    other = (window[1:] != window[:-1]) | (entries.row[1:] != entries.row[:-1]) | ~entries.valid[:-1]
    new = entries.valid & jnp.concatenate([jnp.ones(1, bool), other])
    # Rows in windows before this one, and rows so far: entries are in the order of their windows.
    so_far = jnp.cumsum(new, dtype=jnp.int32)
    held = jnp.zeros(cores * shards, jnp.int32).at[jnp.where(new, window, cores * shards)].add(1, mode="drop")
    before = jnp.cumsum(held) - held
    rank = so_far - 1 - before[jnp.clip(window, 0, cores * shards - 1)]
    fits = entries.valid & (rank < capacity)
    nowhere = cores * shards * capacity
    slot = jnp.where(fits, window * capacity + rank, nowhere)
    rows = jnp.full(nowhere, ABSENT, jnp.int32).at[jnp.where(new, slot, nowhere)].set(entries.row, mode="drop")
    return Windows(slot, rows, jnp.sum(jnp.maximum(held - capacity, 0), dtype=jnp.int32))


def send(values: jax.Array, stack: Stack, axis: str) -> jax.Array:
    """Send each window's values to the device of its shard: [S·N·C, ...] → [N, S, C, ...], by asking SparseCore."""
    cores, devices = stack.cores.per_device, stack.cores.devices
    shape = (cores, devices, cores, -1, *values.shape[1:])
    by_device = jnp.moveaxis(values.reshape(shape), 1, 0)
    if devices > 1:
        by_device = jax.lax.all_to_all(by_device, axis, split_axis=0, concat_axis=0, tiled=True)
    return by_device.reshape(devices * cores, cores, -1, *values.shape[1:])


def send_back(values: jax.Array, stack: Stack, axis: str) -> jax.Array:
    """Send what was asked for to who asked: the inverse of `send`."""
    cores, devices = stack.cores.per_device, stack.cores.devices
    tail = values.shape[3:]
    by_device = values.reshape(devices, cores, cores, -1, *tail)
    if devices > 1:
        by_device = jax.lax.all_to_all(by_device, axis, split_axis=0, concat_axis=0, tiled=True)
    return jnp.moveaxis(by_device, 0, 1).reshape(-1, *tail)


def device_rows(asked: jax.Array, stack: Stack) -> jax.Array:
    """Return where received local rows lie on this device, [N, S, C] → [N, S, C]: S·R where there is none."""
    cores, rows = stack.cores.per_device, stack.rows_per_shard
    start = jnp.arange(cores, dtype=jnp.int32)[None, :, None] * rows
    return jnp.where(asked == ABSENT, cores * rows, start + asked)


def capacity_of(stack: Stack, splits: int = 1) -> int:
    """Return C: the most different rows that one SparseCore may ask of one shard.

    Args:
        stack: its limits must be known.
        splits: mini-batches, or sample blocks, that one batch may be split into: each holds up to the limit.
    """
    assert stack.limits is not None, "buffers were made with limits"  # noqa: S101
    most = min(stack.limits.max_unique * splits, stack.rows_per_shard)
    return max(most, 1)
