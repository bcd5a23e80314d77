"""Rows that one chip names in a step, each once, and their gradients added up: over the chip, and over the ring.

All runs inside `shard_map`, in plain JAX. Positions are those of `plan.Shards`: chip q of N stores positions q·R to
(q + 1)·R, and N·R and more are no row.

# Shapes: n ids of one chip, L slots (L = n: every id may name another row), R rows of a chip, D columns, N chips.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Values = tuple[jax.Array, ...]


@dataclass(frozen=True, slots=True)
class Ring:
    """Chips in a circle: chip i hands on to chip i + 1, the last to the first."""

    axis: str | tuple[str, ...]
    """The mesh's axis, or axes, along which chips are numbered."""
    chips: int
    """N."""
    search: str = "scan"
    """How rows are found among others, of `jnp.searchsorted`: `scan` on a CPU, `sort` on a TPU."""

    def me(self) -> jax.Array:
        """Return this chip's number, 0-d int32."""
        return lax.axis_index(self.axis)

    def hand_on(self, tree: Any) -> Any:
        """Give arrays to the next chip and return those of the chip before."""
        if self.chips == 1:
            return tree
        steps = [(i, (i + 1) % self.chips) for i in range(self.chips)]
        return jax.tree.map(lambda each: lax.ppermute(each, self.axis, steps), tree)


class Named(NamedTuple):
    """The rows that a chip's ids name."""

    rows: jax.Array
    """[L] int32 ascending: each position once, then N·R and more where a slot is left over."""
    slot: jax.Array
    """[n] int32: the slot of each id's row; L where an id names none."""


def named(positions: jax.Array, stored: int) -> Named:
    """Return the different rows among positions [n]; those of `stored` and more name none."""
    count = positions.shape[0]
    places = jnp.arange(count, dtype=jnp.int32)
    keys, order = lax.sort((jnp.minimum(positions, stored).astype(jnp.int32), places), num_keys=1, is_stable=True)
    real = keys < stored
    first = real & jnp.concatenate([jnp.ones(1, bool), keys[1:] != keys[:-1]])
    slot = jnp.cumsum(first, dtype=jnp.int32) - 1
    rows = (places + stored).at[jnp.where(first, slot, count)].set(keys, mode="drop")
    return Named(rows, jnp.zeros_like(places).at[order].set(jnp.where(real, slot, count), unique_indices=True))


class Load(NamedTuple):
    """Slots on their way to the chips that own their rows."""

    rows: jax.Array
    """[L] int32 ascending, as in Named."""
    gone: jax.Array
    """[L] bool: what the slot had is in another chip's slot for the same row."""


def load(found: Named) -> Load:
    """Return slots that all count."""
    return Load(found.rows, jnp.zeros(found.rows.shape, bool))


def add_up(values: jax.Array, found: Named) -> jax.Array:
    """Return [L, …] float32: what this chip's ids carry, [n, …], added up by row."""
    zeros = jnp.zeros((found.rows.shape[0], *values.shape[1:]), jnp.float32)
    return zeros.at[found.slot].add(values.astype(jnp.float32), mode="drop")


def spread(rows: jax.Array, found: Named) -> jax.Array:
    """Return [n, …]: each id's row of [L, …]; zeros where an id names none."""
    return rows.at[found.slot].get(mode="fill", fill_value=0)


def totals(
    rows: Sequence[jax.Array], sums: Sequence[Values], stored: Sequence[int], ring: Ring
) -> tuple[list[Load], list[Values]]:
    """Add up what several chips have for one row, of each table; each row is then in one chip's slots only.

    A chip's slots go once around the ring, and each chip that they pass adds what it has for the same rows. Of the
    chips that name a row, the one with the least number keeps it: the order of the sum depends on numbers alone, and no
    chip ever holds more than its own L slots.

    Args:
        rows: of each table [L], of `named`.
        sums: of each table any arrays [L, …] float32.
        stored: N·R of each table.

    Returns:
        slots and sums of each table, on whatever chip they stand.
    """
    carried = [(each, values, jnp.zeros(each.shape, bool)) for each, values in zip(rows, sums, strict=True)]
    if ring.chips == 1:
        return [Load(each, gone) for each, _, gone in carried], list(sums)
    me = ring.me()

    def hop(k: jax.Array, carried: Any) -> Any:
        came_from = (me - k) % ring.chips
        out = []
        for mine, own, nowhere, (passing, total, kept) in zip(rows, sums, stored, ring.hand_on(carried), strict=True):
            at = jnp.minimum(jnp.searchsorted(mine, passing, method=ring.search), mine.shape[0] - 1)
            same = (mine[at] == passing) & (passing < nowhere)
            total = tuple(old + jnp.where(along(same, old), each[at], 0) for old, each in zip(total, own, strict=True))
            out.append((passing, total, kept | (same & (me < came_from))))
        return out

    carried = lax.fori_loop(1, ring.chips, hop, carried)
    return [Load(each, gone) for each, _, gone in carried], [total for _, total, _ in carried]


def along(flags: jax.Array, values: jax.Array) -> jax.Array:
    """Return flags [k] so that they broadcast along the rows of `values`."""
    return flags.reshape(flags.shape + (1,) * (values.ndim - 1))
