"""Rows of a stored table on a TPU, read and written for the TensorCore as whole lines: `stored`, without a copy.

SparseCores hold a table row after row. The TensorCore's gather and scatter want whole lanes: of narrow rows XLA copied
the table there, and back, at every step. As lines of 128 values the same bytes are whole lanes, and XLA takes them
where they lie. Rows that share a line are put into it together, and each line is written once.

Shapes: Q rows, W values of a stored row; G values of a piece, the most that rows and lines are both made of.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from twinstep.spec.sparsecore_memory import LANES, in_lines
from twinstep.worker.embedding.sparsecore.device import stored
from twinstep.worker.embedding.sparsecore.stacking import Stack


def take(table: jax.Array, rows: jax.Array, stack: Stack) -> jax.Array:
    """Return rows of a device's part, [Q] int32 → [Q, W]: `stored.take`."""
    if not _suits(table, rows, stack):
        return stored.take(table, rows, stack)
    found = _rows_of(table, rows // stack.pack)
    if stack.pack == 1:
        return found
    return stored.take(found, jnp.arange(len(rows), dtype=jnp.int32) * stack.pack + rows % stack.pack, stack)


def put(table: jax.Array, rows: jax.Array, values: jax.Array, stack: Stack) -> jax.Array:
    """Return a device's part with rows replaced, in place where it is donated: `stored.put`.

    Args:
        table: a device's part.
        rows: [Q] int32, ascending, each once; those that are out of range come last.
        values: [Q, W] of them.
        stack: whose they are.
    """
    if not _suits(table, rows, stack):
        return stored.put(table, rows, values, stack)
    if stack.pack > 1:
        whole = rows // stack.pack
        first = _first(whole)
        at = jnp.cumsum(first, dtype=jnp.int32) - 1
        rows_of = table.shape[0] + jnp.arange(len(rows), dtype=jnp.int32)
        names = rows_of.at[jnp.where(first & (whole < table.shape[0]), at, len(rows))].set(whole, mode="drop")
        values = stored.put(_rows_of(table, names), at * stack.pack + rows % stack.pack, values, stack)
        rows = names
    size, view = _piece(table), table.reshape(-1, LANES)
    per_line, pieces = LANES // size, _pieces(table, rows)
    places, values = pieces // per_line, jnp.tile(values.reshape(-1, size), (1, per_line))
    lines = jnp.take(view, places, axis=0, mode="fill", fill_value=0)
    column = jnp.arange(LANES, dtype=jnp.int32) // size
    for ahead in range(per_line):  # pieces of one line follow one another
        same = (jnp.roll(places, -ahead) == places)[:, None]
        here = jnp.roll(pieces % per_line, -ahead)[:, None] == column
        lines = jnp.where(same & here, jnp.roll(values, -ahead, axis=0), lines)
    absent = view.shape[0] + jnp.arange(len(places), dtype=jnp.int32)
    names = jnp.where(_first(places) & (places < view.shape[0]), places, absent)
    return view.at[names].set(lines, mode="drop", unique_indices=True).reshape(table.shape)


def _suits(table: jax.Array, rows: jax.Array, stack: Stack) -> bool:
    """Say whether a part lies row after row, and is to be worked on in lines; one number a row lies as XLA has it."""
    one_each = table.shape[1] == stack.pack and stored.width_of(stack) > 1
    return not one_each and in_lines(table.shape[0], table.shape[1], rows.size)


def _piece(table: jax.Array) -> int:
    return math.gcd(table.shape[1], LANES)


def _pieces(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Return the numbers of stored rows' pieces, [Q] → [Q · W / G], in their order."""
    count = table.shape[1] // _piece(table)
    return (rows[:, None] * count + jnp.arange(count, dtype=jnp.int32)).reshape(-1)


def _rows_of(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Return stored rows, [Q] → [Q, W], each piece out of its line."""
    size, pieces = _piece(table), _pieces(table, rows)
    per_line = LANES // size
    lines = jnp.take(table.reshape(-1, LANES), pieces // per_line, axis=0, mode="fill", fill_value=0)
    found = lines[:, :size]
    for at in range(1, per_line):
        here = (pieces % per_line == at)[:, None]
        found = jnp.where(here, lines[:, at * size : (at + 1) * size], found)
    return found.reshape(-1, table.shape[1])


def _first(places: jax.Array) -> jax.Array:
    """Say of each place whether it is another than the one before it."""
    return jnp.concatenate([jnp.ones(1, bool), places[1:] != places[:-1]])
