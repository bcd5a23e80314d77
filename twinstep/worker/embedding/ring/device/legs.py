"""How slots travel in the ring's kernels: in legs, each with a header and two places on every chip.

A leg is a run of one table's slots. While one leg is on its way to the next chip, the kernel works on another; each has
two places, one to stand in and one to arrive at. A chip tells the chip before it when the place it left is free.

# Shapes: C slots of a leg, H int32 of its header, N chips, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from twinstep.worker.embedding.ring.device.rows import Ring

LANES = 128
MOST = 8192  # slots of a leg: its header is read from SMEM
LEAST = 2  # legs, so that there is always one to work on


@dataclass(frozen=True, slots=True)
class Leg:
    """Slots `first` to `first + count` of a table."""

    table: int
    first: int
    count: int
    rows: int
    """R: rows of the table on one chip."""
    chips: int

    @property
    def ids_at(self) -> int:
        """Where positions begin in the header; before them stand the N + 1 bounds of each chip's slots."""
        return -(-(self.chips + 1) // LANES) * LANES

    @property
    def header(self) -> int:
        """H."""
        return self.ids_at + -(-self.count // LANES) * LANES

    def header_of(self, rows: jax.Array, gone: jax.Array | None = None) -> jax.Array:
        """Return the header [1, H] int32 of this leg's part of a table's slots.

        Args:
            rows: [L] positions, ascending.
            gone: [L] bool, slots that are passed over: their position is −1; None: there are none.
        """
        part = lax.slice_in_dim(rows, self.first, self.first + self.count)
        bounds = jnp.searchsorted(part, jnp.arange(self.chips + 1, dtype=jnp.int32) * self.rows, method="compare_all")
        if gone is not None:
            part = jnp.where(lax.slice_in_dim(gone, self.first, self.first + self.count), -1, part)
        bounds = jnp.pad(bounds.astype(jnp.int32), (0, self.ids_at - self.chips - 1))
        return jnp.concatenate([bounds, jnp.pad(part, (0, self.header - self.ids_at - self.count))])[None]


def legs_of(counts: Sequence[int], rows: Sequence[int], chips: int) -> list[Leg]:
    """Return the legs of tables with so many slots and rows on a chip."""
    found = []
    for table, (count, each) in enumerate(zip(counts, rows, strict=True)):
        parts = max(-(-count // MOST), -(-LEAST // len(counts)))
        size = -(-count // parts)
        for first in range(0, count, size):
            found.append(Leg(table, first, min(size, count - first), each, chips))
    return found


class Road:
    """The way to the next chip, for one kernel; to be made inside it."""

    def __init__(self, ring: Ring) -> None:
        self.chips = ring.chips
        self.me = ring.me()
        self._ring = ring
        self.right = self._place((self.me + 1) % ring.chips)
        self.left = self._place((self.me + ring.chips - 1) % ring.chips)

    def _place(self, number: jax.Array) -> Any:
        if isinstance(self._ring.axis, str):
            return {self._ring.axis: number}
        found = {}
        for axis in reversed(self._ring.axis):
            size = lax.axis_size(axis)
            found[axis], number = number % size, number // size
        return found

    def meet(self) -> None:
        """Wait until both neighbours are in this kernel."""
        if self.chips == 1:
            return
        barrier = pltpu.get_barrier_semaphore()
        for neighbour in (self.left, self.right):
            pl.semaphore_signal(barrier, 1, device_id=neighbour, device_id_type=pl.DeviceIdType.MESH)
        pl.semaphore_wait(barrier, 2)

    def send(self, source: Any, target: Any, sent: Any, arrived: Any) -> Any:
        """Return the copy of `source` to `target` on the next chip; or of what arrives here from the one before."""
        return pltpu.make_async_remote_copy(
            source, target, sent, arrived, device_id=self.right, device_id_type=pl.DeviceIdType.MESH
        )

    def free(self, semaphore: Any) -> None:
        """Tell the chip before that a place is free."""
        pl.semaphore_signal(semaphore, 1, device_id=self.left, device_id_type=pl.DeviceIdType.MESH)


def own_slots(leg: Leg, header: Any, me: Any) -> tuple[Any, Any, Callable[[Any], Any]]:
    """Return the bounds of the slots of one chip's rows, and what gives a slot's local row, below 0 if it is gone.

    Args:
        leg: whose header was read.
        header: in SMEM, [1, H] or more.
        me: the chip.
    """
    return header[0, me], header[0, me + 1], lambda i: header[0, leg.ids_at + i] - me * leg.rows


def copy(source: Any, target: Any, semaphore: Any) -> None:
    """Copy within the chip, and wait for it."""
    moving = pltpu.make_async_copy(source, target, semaphore)
    moving.start()
    moving.wait()


def between(start: Any, stop: Any, do: Any) -> None:
    """Call `do` for each number from `start` to `stop`."""

    def body(i: Any, _: Any) -> Any:
        do(i)
        return _

    lax.fori_loop(start, stop, body, jnp.int32(0))
