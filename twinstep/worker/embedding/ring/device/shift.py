"""The ring in plain JAX: `ppermute` hands slots on, XLA gathers and scatters. One of two forms, see `kernel.py`.

It runs wherever XLA does, on a CPU at its speed. Each hop reads as many rows of a chip as there are slots, of which it
keeps those that are its own; the kernels touch these alone.

# Shapes as in `rows.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from twinstep.worker.embedding.ring.device.rows import Load, Ring, Values, along

Rule = Callable[[Values, Values, Values], Values]
"""(sums, rows of each state, numbers) → new rows of each state, all [k, …]: an optimizer's step for k rows."""


def look_up(tables: Sequence[jax.Array], rows: Sequence[jax.Array], ring: Ring) -> list[jax.Array]:
    """Return the rows of each table that this chip names.

    Args:
        tables: this chip's part of each, [R, …].
        rows: [L] of each, positions as `rows.Named` has them.

    Returns:
        [L, …] of each; zeros in slots left over.
    """
    me = ring.me()
    empty = [
        jnp.zeros((each.shape[0], *table.shape[1:]), table.dtype) for table, each in zip(tables, rows, strict=True)
    ]

    def hop(_: Any, carried: Any) -> Any:
        filled = []
        for table, (passing, found) in zip(tables, carried, strict=True):
            local, mine = _own(passing, table, me)
            filled.append((passing, jnp.where(along(mine, found), table[jnp.where(mine, local, 0)], found)))
        return ring.hand_on(filled)

    carried = list(zip(rows, empty, strict=True))
    return [found for _, found in lax.fori_loop(0, ring.chips, hop, carried)]


def bring_home(
    states: Sequence[Values],
    loads: Sequence[Load],
    sums: Sequence[Values],
    rules: Sequence[Rule],
    numbers: Sequence[Values],
    ring: Ring,
) -> list[Values]:
    """Bring sums to the chips that own their rows, which make the optimizer's step.

    Args:
        states: this chip's part of each table and of what its optimizer keeps, [R, …] each.
        loads: of each table, of `rows.totals`: over all chips each position once.
        sums: [L, …] of each table.
        rules: of each table.
        numbers: what each table's rule takes beside rows, the same on every chip: learning rates.

    Returns:
        The new states; rows that nobody names keep their bits.
    """
    me = ring.me()

    def hop(_: Any, carried: Any) -> Any:
        states, moving = carried
        new = []
        for state, (passing, values), rule, more in zip(states, moving, rules, numbers, strict=True):
            local, mine = _own(passing.rows, state[0], me)
            mine = mine & ~passing.gone
            at = jnp.where(mine, local, 0)
            updated = rule(values, tuple(each[at] for each in state), more)
            # Slots that are not this chip's get places of their own past the end, where nothing is written.
            to = jnp.where(mine, local, state[0].shape[0] + jnp.arange(local.shape[0], dtype=local.dtype))
            new.append(
                tuple(
                    old.at[to].set(value.astype(old.dtype), mode="drop", unique_indices=True)
                    for old, value in zip(state, updated, strict=True)
                )
            )
        return new, ring.hand_on(moving)

    moving = list(zip(loads, sums, strict=True))
    new, _ = lax.fori_loop(0, ring.chips, hop, (list(states), moving))
    return [tuple(each) for each in new]


def _own(rows: jax.Array, table: jax.Array, me: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the local rows of positions, and which of them are this chip's."""
    local = rows - me * table.shape[0]
    return local, (local >= 0) & (local < table.shape[0])
