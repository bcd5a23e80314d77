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

from twinstep.worker.embedding.ring.device import lines
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
    *,
    lined: Sequence[bool] = (),
    interpret: Any = False,
) -> list[Values]:
    """Bring sums to the chips that own their rows, which make the optimizer's step.

    Args:
        states: this chip's part of each table and of what its optimizer keeps, [R, …] each.
        loads: of each table, of `rows.totals`: over all chips each position once.
        sums: [L, …] of each table.
        rules: of each table.
        numbers: what each table's rule takes beside rows, the same on every chip: learning rates.
        lined: of each table, whether its rows lie in lines, so that kernels read and write them: on a TPU.
        interpret: `pltpu.InterpretParams()` runs those kernels elsewhere.

    Returns:
        The new states; rows that nobody names keep their bits.
    """
    me = ring.me()
    asked = lined or [False] * len(states)
    flags = [flag and state[0].shape[0] % lines.TILE == 0 for flag, state in zip(asked, states, strict=True)]
    held = [
        tuple(each.reshape(each.shape[0], 1, -1) if flag and each.shape[-1] > 1 else each for each in state)
        for state, flag in zip(states, flags, strict=True)
    ]

    def hop(_: Any, carried: Any) -> Any:
        states, moving = carried
        new = []
        for state, (passing, values), rule, more, flag in zip(states, moving, rules, numbers, flags, strict=True):
            local, mine = _own(passing.rows, state[0], me)
            mine = mine & ~passing.gone
            at = jnp.where(mine, local, 0)
            # Slots that are not this chip's get places of their own past the end, where nothing is written.
            to = jnp.where(mine, local, state[0].shape[0] + jnp.arange(local.shape[0], dtype=local.dtype))
            by_kernel = [flag and each.ndim == 3 for each in state]
            rows = tuple(
                lines.read(each, passing, ring, interpret=interpret) if is_line else each[at]
                for each, is_line in zip(state, by_kernel, strict=True)
            )
            updated = [value.astype(old.dtype) for value, old in zip(rule(values, rows, more), state, strict=True)]
            new.append(
                tuple(
                    lines.write(old, passing, value, ring, interpret=interpret)
                    if is_line
                    else old.at[to].set(value, mode="drop", unique_indices=True)
                    for old, value, is_line in zip(state, updated, by_kernel, strict=True)
                )
            )
        return new, ring.hand_on(moving)

    moving = list(zip(loads, sums, strict=True))
    new, _ = lax.fori_loop(0, ring.chips, hop, (held, moving))
    return [
        tuple(each.reshape(old.shape) for each, old in zip(state, before, strict=True))
        for state, before in zip(new, states, strict=True)
    ]


def _own(rows: jax.Array, table: jax.Array, me: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the local rows of positions, and which of them are this chip's."""
    local = rows - me * table.shape[0]
    return local, (local >= 0) & (local < table.shape[0])
