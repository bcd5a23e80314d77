"""Rows of a stored table on a TPU, read and written by its SparseCores' tiles, as Pallas kernels.

For updates that the TensorCore computes. XLA's own gather and scatter want a table in whole lanes, and copy it there
and back at every step; these read and write its rows where SparseCores have them. A tile's stream leaves out rows that
are none. libtpu compiles them for v5p, v6e and v7x; no interpreter knows such streams, so a test stands in for tiles.

Shapes: Q rows, W columns.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc

from twinstep.worker.embedding.sparsecore.device import stored
from twinstep.worker.embedding.sparsecore.stacking import Stack

AT_ONCE = 128  # rows of one stream: as many indices as one may have
TILE_BYTES = 64 << 10  # of a tile's memory for the rows of one stream
ALIGN = 8  # rows at which a slice may begin
ABSENT = -1


def take(table: jax.Array, rows: jax.Array, stack: Stack) -> jax.Array:
    """Return rows of a device's part: `stored.take`."""
    if not _suits(table, stack):
        return stored.take(table, rows, stack)
    here = rows < table.shape[0]
    mesh, per, size, padded = _shares(table, jnp.where(here, rows, 0), 0)

    def body(table: Any, wanted: Any, out: Any, ids: Any, some: Any, done: Any) -> None:
        def stream(start: Any) -> None:
            pltpu.sync_copy(wanted.at[pl.ds(start, size)], ids)
            pltpu.async_copy(table.at[ids], some, done).wait()
            pltpu.sync_copy(some, out.at[pl.ds(start, size)])

        _each(mesh, per, size, stream)

    kind = jax.ShapeDtypeStruct((len(padded), table.shape[1]), table.dtype)
    found = _kernel(body, mesh, size, table, kind)(table, padded)[: len(rows)]
    return jnp.where(here[:, None], found, 0.0)


def put(table: jax.Array, rows: jax.Array, values: jax.Array, stack: Stack) -> jax.Array:
    """Return a device's part with rows replaced, in place: `stored.put`."""
    if not _suits(table, stack):
        return stored.put(table, rows, values, stack)
    mesh, per, size, padded = _shares(table, jnp.where(rows < table.shape[0], rows, ABSENT), ABSENT)
    values = jnp.pad(values, ((0, len(padded) - len(rows)), (0, 0)))

    def body(table: Any, wanted: Any, values: Any, ids: Any, some: Any, done: Any) -> None:
        def stream(start: Any) -> None:
            pltpu.sync_copy(wanted.at[pl.ds(start, size)], ids)
            pltpu.sync_copy(values.at[pl.ds(start, size)], some)
            pltpu.async_copy(some, table.at[tpu_sc.Indices(ids, ignored_value=ABSENT)], done).wait()

        _each(mesh, per, size, stream)

    held = jax.new_ref(table)
    _kernel(body, mesh, size, table, ())(held, padded, values)
    return jax.freeze(held)


def _suits(table: jax.Array, stack: Stack) -> bool:
    """Say whether a part is stored row after row: packed rows share one, and one number a row lies as XLA has it."""
    return stack.pack == 1 and table.shape[1] > 1


def _shares(table: jax.Array, rows: jax.Array, filler: int) -> tuple[Any, int, int, jax.Array]:
    """Return the tiles, how many rows each has, how many at once, and the rows padded to as many."""
    mesh = tpu_sc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="tile")
    most = max(ALIGN, min(AT_ONCE, TILE_BYTES // (table.shape[1] * table.dtype.itemsize)) // ALIGN * ALIGN)
    each = -(-len(rows) // mesh.size)
    size = min(most, -(-each // ALIGN) * ALIGN)
    per = -(-each // size) * size
    return mesh, per, size, jnp.pad(rows, (0, per * mesh.size - len(rows)), constant_values=filler)


def _each(mesh: Any, per: int, size: int, stream: Any) -> None:
    """Run the streams of the tile that this is."""
    first = (jax.lax.axis_index("core") * mesh.num_subcores + jax.lax.axis_index("tile")) * per

    @pl.loop(0, per // size)
    def _(number: Any) -> None:
        stream(pl.multiple_of(first + number * size, ALIGN))


def _kernel(body: Any, mesh: Any, size: int, table: jax.Array, out: Any) -> Any:
    scratch = [
        pltpu.VMEM((size,), jnp.int32),
        pltpu.VMEM((size, table.shape[1]), table.dtype),
        pltpu.SemaphoreType.DMA,
    ]
    return functools.partial(
        pl.kernel,
        mesh=mesh,
        out_type=out,
        scratch_types=scratch,
        compiler_params=pltpu.CompilerParams(use_tc_tiling_on_sc=False),
    )(body)
