"""Backward and update of one stack on one device, in plain JAX. Runs inside `shard_map`.

Gradients of a row are summed over the samples of each SparseCore, in order, then over SparseCores, in order; then the
optimizer runs once for each row. Nothing has the size of a table: rows are read, updated and written back.

Shapes as in `entries`; Q = N·S·C rows that a device may be told of.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from twinstep.worker.embedding.sparsecore.device import exchange, rules, stored
from twinstep.worker.embedding.sparsecore.device.entries import Entries
from twinstep.worker.embedding.sparsecore.device.lookup import Checks
from twinstep.worker.embedding.sparsecore.optimizers import RowOptimizer
from twinstep.worker.embedding.sparsecore.stacking import Stack

State = tuple[jax.Array, ...]


class RowGradients(NamedTuple):
    """Gradients of a device's rows, each row once."""

    rows: jax.Array
    """[Q] int32 ascending: device rows, then S·R and more, different each, where there is none."""
    sums: jax.Array
    """[Q, W] float32."""


def row_gradients(
    gradients: jax.Array, entries: Entries, stack: Stack, *, axis: str, capacity: int, check_finite: bool = False
) -> tuple[RowGradients, Checks]:
    """Return the summed gradient of each row of this device that any device's samples name.

    Args:
        gradients: [S·B, W], of activations.
        entries: what was looked up.
        stack: whose they are.
        axis: the mesh axis that devices are along.
        capacity: C, slots of a window.
        check_finite: count values that are no finite numbers.
    """
    windows = exchange.plan(entries, stack, capacity)
    at = entries.core * stack.samples_per_core + entries.sample
    parts = entries.gain[:, None] * jnp.take(gradients, at, axis=0, mode="clip")
    parts = jnp.where(entries.valid[:, None], parts, 0.0)
    sums = jnp.zeros((windows.rows.shape[0], parts.shape[1]), jnp.float32).at[windows.slot].add(parts, mode="drop")
    asked = exchange.send(windows.rows, stack, axis)
    found = _merged(
        exchange.device_rows(asked, stack).reshape(-1),
        exchange.send(sums, stack, axis).reshape(-1, sums.shape[1]),
        stack.cores.per_device * stack.rows_per_shard,
    )
    wrong = jnp.sum(~jnp.isfinite(found.sums), dtype=jnp.int32) if check_finite else jnp.int32(0)
    return found, Checks(entries.out_of_range, windows.left_out, wrong)


def _merged(rows: jax.Array, sums: jax.Array, nowhere: int) -> RowGradients:
    """Add up what several SparseCores sent for one row, in their order."""
    order = jnp.argsort(rows, stable=True)
    ordered = rows[order]
    new = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    at = jnp.cumsum(new, dtype=jnp.int32) - 1
    count = rows.shape[0]
    # Rows that are none get numbers of their own, so that every row is named once.
    names = nowhere + jnp.arange(count, dtype=jnp.int32)
    unique = names.at[jnp.where(new & (ordered < nowhere), at, count)].set(ordered, mode="drop")
    total = jnp.zeros_like(sums).at[at].add(sums[order], indices_are_sorted=True)
    return RowGradients(unique, total)


def apply(
    state: State,
    found: RowGradients,
    stack: Stack,
    *,
    step: jax.Array,
    axis: str,
    refuse: jax.Array | None = None,
    access: ModuleType = stored,
) -> State:
    """Return (table, *slots) with the optimizer's step made on the rows of `found`.

    Args:
        state: this device's part of the stored table and of each slot; donated, they are changed in place.
        found: gradients by row.
        stack: whose they are; its optimizer is a RowOptimizer.
        step: 0-d int32, from 0.
        axis: the mesh axis that devices are along.
        refuse: 0-d bool; true: no row is changed.
        access: `take` and `put` for rows of a part: `stored`, or on a TPU `lines`.
    """
    optimizer = stack.optimizer
    assert isinstance(optimizer, RowOptimizer), "the engine checked it"  # noqa: S101
    rows, sums = found
    if optimizer.clip_norm is not None:
        sums = sums * _scales(found, stack, optimizer.clip_norm, axis)
    if refuse is not None:
        rows = jnp.where(refuse, stack.cores.per_device * stack.rows_per_shard + jnp.arange(len(rows)), rows)
    # `take` reads zeros where there is no row: what is computed there is dropped again, but must not trap.
    weights, *slots = (access.take(each, rows, stack) for each in state)
    new, kept = rules.updated(
        optimizer, sums, weights, tuple(slots), rules.step_numbers(optimizer, step), _widths(rows, stack)
    )
    return tuple(access.put(old, rows, value, stack) for old, value in zip(state, (new, *kept), strict=True))


def _tables_of(rows: jax.Array, stack: Stack) -> jax.Array:
    """Return the number in the stack of each device row's table."""
    local = rows % stack.rows_per_shard
    starts = jnp.asarray([each.row_offset for each in stack.placements], jnp.int32)
    return jnp.searchsorted(starts, local, side="right") - 1


def _widths(rows: jax.Array, stack: Stack) -> Any:
    """Return the true width of each row's table: one number if all are alike, else [rows, 1]."""
    dims = [each.table.dim for each in stack.placements]
    if len(set(dims)) == 1:
        return dims[0]
    return jnp.asarray(dims, jnp.float32)[_tables_of(rows, stack)][:, None]


def _scales(found: RowGradients, stack: Stack, most: float, axis: str) -> jax.Array:
    """Return [rows, 1]: what brings the norm of each table's gradient down to `most`."""
    tables = _tables_of(found.rows, stack)
    real = found.rows < stack.cores.per_device * stack.rows_per_shard
    squares = jnp.where(real, jnp.sum(found.sums * found.sums, axis=1), 0.0)
    norms = jnp.sqrt(jax.lax.psum(jnp.zeros(len(stack.placements), jnp.float32).at[tables].add(squares), axis))
    return jnp.minimum(1.0, most / jnp.maximum(norms, jnp.finfo(jnp.float32).tiny))[tables][:, None]
