"""Stacked and sharded tables to logical rows and back: what checkpoints hold depends on no plan.

A logical part is a table's weight, or one of its optimizer's slots: [rows, dim] float32, or [rows, 1] where the slot
has one number a row, in the order of ids, without padding. Both ways go by chunks of rows: never is a table copied
whole, and of a stack a host holds what its own shards take of one part. No jax here; `device/engine.py` says how parts
of its arrays are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twinstep.spec.errors import SpecError
from twinstep.worker.embedding.sparsecore.optimizers import RowOptimizer
from twinstep.worker.embedding.sparsecore.stacking import Placement, Stack, StackPlan

Rows = npt.NDArray[np.float32]
WEIGHT = "weight"
ReadShard = Callable[[str, int, int, int, int], Rows]
"""(stack, part number, shard, first and last + 1 stored row of the shard) → stored rows."""
ReadRows = Callable[[str, str, int, int, int], Rows]
"""(table, part, first row, last + 1, step) → every step-th logical row: those of one shard."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows `start` to `start + len(values)` of one part of a table."""

    table: str
    part: str
    """`weight`, or the slot's name."""
    start: int
    values: Rows


def parts_of(stack: Stack) -> tuple[tuple[str, bool, float], ...]:
    """Return name, whether it has one number a row, and the value of padding, of the table and each slot."""
    optimizer = stack.optimizer
    slots = optimizer.slots if isinstance(optimizer, RowOptimizer) else ()
    return ((WEIGHT, False, 0.0), *((slot.name, slot.per_row, slot.initial) for slot in slots))


def to_logical(plan: StackPlan, read: ReadShard, *, chunk_rows: int = 1 << 16) -> Iterator[Chunk]:
    """Give all tables and slots as logical rows, table by table, part by part, in the order of rows.

    Args:
        plan: where rows lie.
        read: gives stored rows of one shard.
        chunk_rows: rows of a chunk, about.
    """
    for stack in plan.stacks:
        for placement in stack.placements:
            step = max(chunk_rows // (stack.cores.count * stack.pack), 1) * stack.cores.count * stack.pack
            for number, (name, per_row, _) in enumerate(parts_of(stack)):
                for start in range(0, placement.table.rows, step):
                    stop = min(start + step, placement.table.rows)
                    yield Chunk(
                        placement.table.name, name, start, _gather(stack, placement, read, number, per_row, start, stop)
                    )


def _gather(
    stack: Stack, placement: Placement, read: ReadShard, number: int, per_row: bool, start: int, stop: int
) -> Rows:
    """Return logical rows [start, stop); start is a multiple of N · pack."""
    shards, width = stack.cores.count, 1 if per_row else placement.table.dim
    local = -(-stop // shards) - start // shards
    out = np.empty((local, shards, width), np.float32)
    first = start // shards + placement.row_offset
    for shard in range(shards):
        stored = read(stack.name, number, shard, first // stack.pack, -(-(first + local) // stack.pack))
        out[:, (shard - placement.rotation) % shards] = _unpacked(stored, stack, per_row)[:local, :width]
    return out.reshape(-1, width)[: stop - start]


def _unpacked(stored: Rows, stack: Stack, per_row: bool) -> Rows:
    """Return local rows of stored rows."""
    if stack.pack == 1:
        return stored
    width = 1 if per_row else stack.placements[0].table.dim
    return stored[:, : stack.pack * width].reshape(-1, width)


def fill_shards(stack: Stack, number: int, shards: Sequence[int], read: ReadRows, *, chunk_rows: int = 1 << 16) -> Rows:
    """Return stored rows of some shards of one part, made from logical rows; padding has a fixed value.

    Args:
        stack: where rows lie.
        number: of the part: 0 for the weight, then the slots.
        shards: which.
        read: gives logical rows; asked for those of these shards alone, of all of them before the next chunk of rows.
        chunk_rows: rows of a table, of all shards, that are passed at a time, about.

    Returns:
        [shards, stored rows, width].

    Raises:
        SpecError: logical rows have another shape than the table.
    """
    name, per_row, padding = parts_of(stack)[number]
    count, pack = stack.cores.count, stack.pack
    shape = (len(shards), stack.rows_per_shard // pack, pack if per_row else stack.stored_dim)
    stored = np.full(shape, padding, np.float32)
    step = max(chunk_rows // (count * pack), 1) * count * pack
    for placement in stack.placements:
        table, width = placement.table, 1 if per_row else placement.table.dim
        for start in range(0, table.rows, step):
            stop = min(start + step, table.rows)
            at = (placement.row_offset + start // count) // pack
            for place, shard in enumerate(shards):
                first = start + (shard - placement.rotation) % count
                mine = np.asarray(read(table.name, name, first, stop, count))
                wanted = (len(range(first, stop, count)), width)
                if mine.shape != wanted:
                    raise SpecError(
                        f"{name} of table {table.name!r}: every {count}th row from {first} to {stop} is given "
                        f"as {list(mine.shape)}",
                        remedy=f"it is {list(wanted)} of a table of {table.rows} rows: load it into one of the same "
                        "rows and width",
                    )
                _store(stored[place], at, mine, pack)
    return stored


def _store(stored: Rows, at: int, rows: Rows, pack: int) -> None:
    """Write local rows from the first place of stored row `at` on, `pack` of them side by side."""
    (full, rest), width = divmod(len(rows), pack), rows.shape[1]
    stored[at : at + full, : pack * width] = rows[: full * pack].reshape(full, pack * width)
    if rest:
        stored[at + full, : rest * width] = rows[full * pack :].reshape(-1)
