"""Rows of a table on XLA's CPU: custom calls of the C++ kernels that PyTorch's programs run.

XLA sorts by comparison and scatters row by row in a loop of the program: for 4,352 ids and two tensors of 64 columns
2.6 ms of one core, the kernels 0.2 ms. For programs of one device only: GSPMD cannot split such a call.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from twinstep.worker.ops import native, rows_kernel

LOG = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("rows_ffi.cpp")
UNIQUE, SUM, WRITE = "twinstep_unique_rows", "twinstep_sum_rows", "twinstep_write_rows"


class _Wanted:
    on = False


@contextlib.contextmanager
def on_one_cpu(wanted: bool) -> Iterator[None]:
    """Trace within the block for a program of one CPU device, or not."""
    before, _Wanted.on = _Wanted.on, wanted
    try:
        yield
    finally:
        _Wanted.on = before


def takes(*ids: jax.Array) -> bool:
    """Say whether the kernels run on these ids in what is being traced, and register them with XLA if so."""
    return _Wanted.on and all(each.dtype == jnp.int32 for each in ids) and register()


def register() -> bool:
    """Make the kernels known to XLA; say whether there are any. A program from elsewhere needs it before it runs."""
    return _door() is not None


@functools.cache
def _door() -> ctypes.CDLL | None:
    flags = (f"-I{rows_kernel.HEADER.parent}", f"-I{jax.ffi.include_dir()}", f"-DJAX={jax.__version__}")
    try:
        library = native.load(native.build(SOURCE, flags=flags, reads=(rows_kernel.HEADER,)))
    except native.BuildError as error:
        LOG.warning("XLA on the CPU writes rows of tables by its own scatters, which is slower: %s", error)
        return None
    handlers = {UNIQUE: library.rows_ffi_unique, SUM: library.rows_ffi_sum, WRITE: library.rows_ffi_write}
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")  # type: ignore[no-untyped-call]
    return library


def unique_rows(ids: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return rows [n], order [n] and offsets [n + 1], as the operator says."""
    (count,) = ids.shape
    shapes = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in (count, count, count + 1)]  # type: ignore[no-untyped-call]
    rows, order, offsets = jax.ffi.ffi_call(UNIQUE, shapes)(ids, num_rows=np.int64(num_rows))
    return rows, order, offsets


def sum_rows(values: jax.Array, order: jax.Array, offsets: jax.Array) -> jax.Array:
    """Return [n, D]: what the ids of each slot carry, added up."""
    shape = jax.ShapeDtypeStruct(values.shape, values.dtype)  # type: ignore[no-untyped-call]
    out: jax.Array = jax.ffi.ffi_call(SUM, shape)(values, order, offsets)
    return out


def write_rows(table: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    """Return `table` with rows written, in its own memory where nothing else reads it later."""
    shape = jax.ShapeDtypeStruct(table.shape, table.dtype)  # type: ignore[no-untyped-call]
    out: jax.Array = jax.ffi.ffi_call(WRITE, shape, input_output_aliases={0: 0})(table, rows, values)
    return out
