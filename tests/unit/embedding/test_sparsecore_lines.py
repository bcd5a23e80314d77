"""Rows of a stored table read and written as whole lines: bit for bit what plain reads and writes of rows give.

That the TPU compiler takes lines where they lie: test_sparsecore_tpu.py.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from twinstep.worker.embedding.sparsecore.device import lines, stored
from twinstep.worker.embedding.sparsecore.optimizers import RowWiseAdagrad
from twinstep.worker.embedding.sparsecore.spec import Cores, Feature, Table
from twinstep.worker.embedding.sparsecore.stacking import Stack, plan_stacks

WIDTHS = (3, 5, 40, 64, 128, 192)


def stack_of(dim: int) -> Stack:
    table = Table(name="t", rows=4000, dim=dim, optimizer=RowWiseAdagrad())
    (stack,) = plan_stacks([table], [Feature(name="f", table="t", samples=8)], Cores(devices=1, per_device=2)).stacks
    return stack


def case(dim: int, named: int, absent: int, seed: int) -> tuple[Stack, Any, Any, Any]:
    """Return a stack, its part, rows ascending with some that are none at the end, and values; zeros of both signs."""
    stack, random = stack_of(dim), np.random.default_rng(seed)
    count = stack.cores.per_device * stack.rows_per_shard
    # Neighbours share lines: half of the rows come from the first few.
    pool = np.concatenate([np.arange(named), random.integers(0, count, named)])
    rows = np.unique(random.choice(pool, named))
    rows = np.concatenate([rows, count + len(rows) + np.arange(absent)]).astype(np.int32)
    table = random.choice([-0.0, 0.0, 1.5, -2.5, np.inf], stored.stored_shape(stack)).astype(np.float32)
    values = random.choice([-0.0, 0.0, 0.25, -7.0], (len(rows), stored.width_of(stack))).astype(np.float32)
    return stack, jnp.asarray(table), jnp.asarray(rows), jnp.asarray(values)


def same(one: Any, other: Any) -> bool:
    return np.array_equal(np.asarray(one).view(np.int32), np.asarray(other).view(np.int32))


@pytest.mark.parametrize("dim", WIDTHS)
def test_lines_give_and_take_the_bits_of_rows(dim: int) -> None:
    stack, table, rows, values = case(dim, 24, dim % 4, seed=dim)
    assert lines._suits(table, rows, stack), "the case is of lines"
    assert same(lines.take(table, rows, stack), stored.take(table, rows, stack))
    new = lines.put(table, rows, values, stack)
    assert same(new, stored.put(table, rows, values, stack))
    assert not same(new, table)


@pytest.mark.parametrize("dim", [3, 64])
def test_nothing_is_written_where_no_row_is_named(dim: int) -> None:
    stack, table, _, _ = case(dim, 8, 0, seed=1)
    nowhere = stack.cores.per_device * stack.rows_per_shard
    rows = jnp.arange(nowhere, nowhere + 16, dtype=jnp.int32)
    values = jnp.ones((16, stored.width_of(stack)), jnp.float32)
    assert same(lines.put(table, rows, values, stack), table)
    assert not np.asarray(lines.take(table, rows, stack)).any()


def test_all_rows_of_a_line_at_once_and_the_last_line() -> None:
    stack, table, _, _ = case(16, 8, 0, seed=2)
    last = len(table)
    rows = jnp.asarray([0, 1, 2, 3, 4, 5, 6, 7, 8, last - 2, last - 1], jnp.int32)
    values = jnp.arange(11 * 16, dtype=jnp.float32).reshape(11, 16)
    assert same(lines.put(table, rows, values, stack), stored.put(table, rows, values, stack))


@pytest.mark.parametrize("dim", [3, 64])
def test_one_number_a_row_is_read_and_written_as_it_lies(dim: int) -> None:
    stack, _, rows, _ = case(dim, 24, 2, seed=3)
    kept = jnp.asarray(np.random.default_rng(4).normal(size=stored.stored_shape(stack, True)).astype(np.float32))
    assert not lines._suits(kept, rows, stack)
    values = jnp.ones((len(rows), 1), jnp.float32)
    assert same(lines.take(kept, rows, stack), stored.take(kept, rows, stack))
    assert same(lines.put(kept, rows, values, stack), stored.put(kept, rows, values, stack))


def test_as_many_rows_as_a_small_table_has_are_not_worked_on_in_pieces() -> None:
    stack, table, _, _ = case(64, 8, 0, seed=5)
    assert not lines._suits(table, jnp.arange(len(table), dtype=jnp.int32), stack)
    assert lines._suits(table, jnp.arange(len(table) // 2, dtype=jnp.int32), stack)
