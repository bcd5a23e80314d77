"""Rows of a table by id: which rows a list of ids names, the sum of their gradients, and writing them back.

Shapes are fixed, so that a compiled step holds them: `n` ids have `n` slots, whatever they repeat. The slots in use
come first, their rows ascend; a slot that is left over holds a row past the table's end, where nothing is written.

On a CPU `rows_kernel.py` runs them; elsewhere, where it cannot be built, and for other dtypes, layouts or shapes than
it is for, ATen, which checks what it is given. `compile/lower` has what XLA runs.
Ids outside of the table get no slot.
"""

# Shapes: n ids, V rows of a table, D whatever a row holds, flat.

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from twinstep.worker.ops import rows_kernel


def _kernels(*tensors: Tensor, lists: tuple[Tensor, ...], fit: bool = True) -> ctypes.CDLL | None:
    """Return the CPU kernels if they take these tensors: they get bare memory, and believe what they are told of it.

    Args:
        lists: [n] int64, or [n + 1]: ids, rows, order, offsets.
        fit: whether their shapes go together.
    """
    plain = all(each.device.type == "cpu" and each.is_contiguous() for each in (*tensors, *lists))
    listed = all(each.dtype is torch.int64 and each.dim() == 1 for each in lists)
    return rows_kernel.library() if plain and listed and fit else None


@torch.library.custom_op("twinstep::unique_rows", mutates_args=())
def unique_rows(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the rows that `ids` name, each once.

    Args:
        ids: [n] int64.
        num_rows: V.

    Returns:
        rows: [n] int64; the row of each slot, ascending; slots left over hold V and more.
        order: [n] int64; positions of the ids, those of one slot side by side, in the order they were given.
        offsets: [n + 1] int64; slot s has order[offsets[s]:offsets[s + 1]]; slots left over have none.
    """
    if (found := _kernels(lists=(ids,), fit=num_rows >= 0)) is not None:
        return rows_kernel.unique(found, ids, num_rows)
    count = ids.shape[0]
    inside = (ids >= 0) & (ids < num_rows)
    # 32 bits, where they do, sort in half the time.
    narrow = ids.to(torch.int32) if num_rows < torch.iinfo(torch.int32).max else ids
    keys, order = torch.where(inside, narrow, num_rows).sort(stable=True)
    named = keys < num_rows
    first = named.clone()
    first[1:] &= keys[1:] != keys[:-1]
    slot = torch.where(first, first.cumsum(0) - 1, count)  # all but a slot's first id go past the end
    places = torch.arange(count + 1, device=ids.device)
    rows = (places + num_rows).scatter_(0, slot, keys.to(torch.int64))
    end = named.sum()
    offsets = end.repeat(count + 1).scatter_(0, slot, places[:count])
    offsets[count] = end
    return rows[:count].clone(), order, offsets


@unique_rows.register_fake
def _(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(ids), torch.empty_like(ids), ids.new_empty(ids.shape[0] + 1)


@torch.library.custom_op("twinstep::sum_rows", mutates_args=())
def sum_rows(values: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    """Add up what the ids of each slot carry, in the order they were given.

    Args:
        values: [n, D], one row per id.
        order: [n] int64, from `unique_rows`.
        offsets: [n + 1] int64, from `unique_rows`.

    Returns:
        [n, D]; zeros in slots left over.
    """
    values = values.contiguous()
    fit = values.dtype is torch.float32 and values.dim() == 2
    fit = fit and (len(values), len(values) + 1) == (order.numel(), offsets.numel())
    if (found := _kernels(values, lists=(order, offsets), fit=fit)) is not None:
        return rows_kernel.add_up(found, values, order, offsets)
    # A bag per slot: gathers and adds in one pass, in parallel over slots and in one order, hence repeatable.
    bags: Tensor = torch.ops.aten._embedding_bag_forward_only(values, order, offsets, False, 0, False, None, True, -1)[
        0
    ]
    return bags


@sum_rows.register_fake
def _(values: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    return values.new_empty(values.shape)


@torch.library.custom_op("twinstep::write_rows_", mutates_args=("table",))
def write_rows_(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write `values` into the rows of `table` that `rows` name; nothing else of it is read or written.

    Args:
        table: [V, …].
        rows: [n] int64, from `unique_rows`; those of V and more are passed over.
        values: [n, …], the whole new rows.
    """
    values = values.contiguous()
    fit = table.dtype is values.dtype and table.dim() > 0 and values.shape == (rows.numel(), *table.shape[1:])
    if (found := _kernels(table, values, lists=(rows,), fit=fit)) is not None:
        rows_kernel.write(found, table, rows, values)
        return
    if table.device.type == "cpu":
        used = int((rows < table.shape[0]).sum())
        table.index_put_((rows[:used],), values[:used])
        return
    _write_without_count(table, rows, values)


def _write_without_count(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write rows on a device that a count would be waited for: slots left over write the first slot's row once more.

    Where no slot is in use, the table's last row gets what it has: a row past the end would end a CUDA process.
    """
    if not rows.numel() or not len(table):
        return
    named = rows < len(table)
    shape = (-1,) + (1,) * (values.dim() - 1)
    first = rows[:1].clamp(max=len(table) - 1)
    again = torch.where(named[:1].view(shape), values[:1], table.index_select(0, first))
    table.index_put_((torch.where(named, rows, first),), torch.where(named.view(shape), values, again))


@write_rows_.register_fake
def _(table: Tensor, rows: Tensor, values: Tensor) -> None:
    return None


@torch.library.custom_op("twinstep::write_rows", mutates_args=())
def write_rows(table: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """Return a copy of `table` with rows written as `write_rows_` does; compiled steps have no such copy."""
    written = table.clone()
    write_rows_(written, rows, values)
    return written


@write_rows.register_fake
def _(table: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    return torch.empty_like(table)


UNIQUE_ROWS, SUM_ROWS = torch.ops.twinstep.unique_rows.default, torch.ops.twinstep.sum_rows.default
WRITE_ROWS, WRITE_ROWS_IN_PLACE = torch.ops.twinstep.write_rows.default, torch.ops.twinstep.write_rows_.default
"""The operators as a graph holds them."""
