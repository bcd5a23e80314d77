"""Rows of a table that lie in lines, read and written by Pallas kernels on a TPU: a DMA a row, of a chip's own rows.

XLA's own gather and scatter want rows by columns as soon as a rule sums over columns, and turn the table around at each
hop of a ring, whatever the program asks for. A kernel takes the table as it lies.

# Shapes as in `rows.py`; tables are [R, 1, D], each row a line.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from twinstep.worker.embedding.ring.device.legs import Leg, between, copy, legs_of, own_slots
from twinstep.worker.embedding.ring.device.rows import Load, Ring

TILE = 8  # rows of a tile: a table of whole tiles is named as lines without a copy


def read(table: jax.Array, load: Load, ring: Ring, *, interpret: Any = False) -> jax.Array:
    """Return [L, D]: the rows of this chip that slots name; what stands in other slots has no meaning."""
    legs = _legs(table, load, ring)
    call = pl.pallas_call(
        functools.partial(_move, legs=legs, ring=ring, writes=False),
        in_specs=[_HBM] * (len(legs) + 1),
        out_specs=_HBM,
        out_shape=jax.ShapeDtypeStruct((load.rows.shape[0], *table.shape[1:]), table.dtype),
        scratch_shapes=_scratch(legs),
        interpret=interpret,
        name="ring_read_rows",
    )
    found: jax.Array = call(*(leg.header_of(*load) for leg in legs), table)
    return found.reshape(found.shape[0], -1)


def write(table: jax.Array, load: Load, rows: jax.Array, ring: Ring, *, interpret: Any = False) -> jax.Array:
    """Return the table with those of rows [L, D] in place that slots name on this chip; it is written where it lies."""
    legs = _legs(table, load, ring)
    call = pl.pallas_call(
        functools.partial(_move, legs=legs, ring=ring, writes=True),
        in_specs=[_HBM] * (len(legs) + 2),
        out_specs=_HBM,
        out_shape=jax.ShapeDtypeStruct(table.shape, table.dtype),
        scratch_shapes=_scratch(legs),
        input_output_aliases={len(legs) + 1: 0},
        interpret=interpret,
        name="ring_write_rows",
    )
    new: jax.Array = call(*(leg.header_of(*load) for leg in legs), rows.reshape(rows.shape[0], 1, -1), table)
    return new


_HBM = pl.BlockSpec(memory_space=pl.ANY)


def _legs(table: jax.Array, load: Load, ring: Ring) -> list[Leg]:
    return legs_of([load.rows.shape[0]], [table.shape[0]], ring.chips)


def _scratch(legs: list[Leg]) -> list[Any]:
    header = pltpu.SMEM((1, max(leg.header for leg in legs)), jnp.int32)
    return [header, pltpu.SemaphoreType.DMA(()), pltpu.SemaphoreType.DMA(())]


def _move(*refs: Any, legs: list[Leg], ring: Ring, writes: bool) -> None:
    """Be the kernel: between slots [L, 1, D] and the table, in HBM both."""
    headers, others, (header, local, moved) = refs[: len(legs)], refs[len(legs) : -3], refs[-3:]
    slots, table = (others[0], others[2]) if writes else (others[1], others[0])
    me = ring.me()
    for leg, given in zip(legs, headers, strict=True):
        copy(given, header.at[:, pl.ds(0, leg.header)], local)
        start, stop, row = own_slots(leg, header, me)

        def moving(i: Any, at: Any, leg: Leg = leg) -> Any:
            slot, line = slots.at[pl.ds(leg.first + i, 1)], table.at[pl.ds(at, 1)]
            return pltpu.make_async_copy(slot, line, moved) if writes else pltpu.make_async_copy(line, slot, moved)

        def begin(i: Any, row: Any = row, moving: Any = moving) -> None:
            pl.when(row(i) >= 0)(lambda: moving(i, row(i)).start())

        def end(i: Any, row: Any = row, moving: Any = moving) -> None:
            pl.when(row(i) >= 0)(lambda: moving(i, row(i)).wait())

        between(start, stop, begin)
        between(start, stop, end)
