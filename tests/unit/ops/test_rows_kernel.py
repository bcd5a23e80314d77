"""The CPU kernels for rows of a table: torch's ops and XLA's, bit for bit, for any ids."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twinstep.worker.compile.lower import xla_rows, xla_rows_cpu
from twinstep.worker.ops import rows, rows_kernel

SIZES = st.sampled_from([1, 2, 3, 40, 5_000])


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if rows_kernel.library() is None:
        pytest.skip("no C++ compiler")


class Aten:
    """Let torch's own ops run within the block."""

    def __enter__(self) -> None:
        self._had = rows_kernel.library
        rows_kernel.library = lambda: None

    def __exit__(self, *_: object) -> None:
        rows_kernel.library = self._had


def both(call: Any) -> tuple[Any, Any]:
    ours = call()
    with Aten():
        return ours, call()


@settings(max_examples=60, deadline=None)
@given(num_rows=SIZES, count=st.sampled_from([1, 2, 17, 300]), width=st.integers(1, 9), seed=st.integers(0, 999))
def test_rows_are_found_summed_and_written_as_by_aten(num_rows: int, count: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, num_rows + 3, (count,), generator=generator)  # some name no row
    values = torch.randn(count, width, generator=generator)
    ours, atens = both(lambda: rows.unique_rows(ids, num_rows))
    for mine, theirs in zip(ours, atens, strict=True):
        assert torch.equal(mine, theirs)
    sums, want = both(lambda: rows.sum_rows(values, *ours[1:]))
    assert torch.equal(sums, want)
    table = torch.randn(num_rows, width, generator=generator)
    written, want_written = both(lambda: rows.write_rows(table, ours[0], values))
    assert torch.equal(written, want_written)
    named = torch.zeros(num_rows, dtype=torch.bool)
    named[ids[(ids >= 0) & (ids < num_rows)]] = True
    assert torch.equal(written[~named], table[~named])


def on_xla(num_rows: int, table: Tensor, ids: Tensor, values: Tensor) -> list[np.ndarray[Any, Any]]:
    def step(held: Any, at: Any, given: Any) -> Any:
        found, order, offsets = xla_rows.unique_rows(at, num_rows)
        sums = xla_rows.sum_rows(given, order, offsets)
        return xla_rows.write_rows(held, found, sums), found, order, offsets, sums

    arrays = (jnp.array(table.numpy()), jnp.asarray(ids.numpy(), jnp.int32), jnp.asarray(values.numpy()))
    return [np.asarray(each) for each in jax.jit(step, donate_argnums=0)(*arrays)]


@pytest.mark.parametrize(("num_rows", "count"), [(1, 5), (3, 40), (5_000, 300)])
def test_xlas_calls_give_the_bits_of_its_own_ops(num_rows: int, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(-1, num_rows + 2, (count,), generator=generator)
    inputs = (torch.randn(num_rows, 6, generator=generator), ids, torch.randn(count, 6, generator=generator))
    plain = on_xla(num_rows, *inputs)
    with xla_rows_cpu.on_one_cpu(True):
        assert xla_rows_cpu.takes(jnp.zeros(1, jnp.int32))
        calls = on_xla(num_rows, *inputs)
    for mine, theirs in zip(calls, plain, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_xla_writes_a_donated_table_in_place() -> None:
    def write(table: Any, at: Any, values: Any) -> Any:
        return xla_rows.write_rows(table, at, values)

    shapes = [
        jax.ShapeDtypeStruct(*each) for each in (((1000, 4), jnp.float32), ((3,), jnp.int32), ((3, 4), jnp.float32))
    ]
    with xla_rows_cpu.on_one_cpu(True):
        compiled = jax.jit(write, donate_argnums=0).lower(*shapes).compile()
    assert "twinstep_write_rows" in compiled.as_text()
    assert "copy(" not in compiled.as_text()
    assert compiled.memory_analysis().alias_size_in_bytes == 16_000


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_other_dtypes_and_layouts_are_taken_too(dtype: torch.dtype) -> None:
    table = torch.arange(24).reshape(6, 4).to(dtype)
    at, values = torch.tensor([1, 4, 6]), torch.full((3, 4), 7).to(dtype)
    for held, given_values in ((table, values), (table.t().contiguous().t(), values.t().contiguous().t())):
        ours, want = both(lambda held=held, values=given_values: rows.write_rows(held, at, values))
        assert torch.equal(ours, want)


IDS, VALUES, TABLE = torch.tensor([3, 1, 3]), torch.arange(6.0).reshape(3, 2), torch.zeros(5, 2)
SLOTS = rows.unique_rows(IDS, 5)
UNFIT = {
    "ids as int32": lambda: rows.unique_rows(IDS.int(), 5),
    "ids with gaps": lambda: rows.unique_rows(torch.tensor([3, 9, 1, 9, 3, 9])[::2], 5),
    "ids of two dimensions": lambda: rows.unique_rows(IDS.reshape(1, 3), 5)[0],
    "order as int32": lambda: rows.sum_rows(VALUES, SLOTS[1].int(), SLOTS[2]),
    "offsets as int32": lambda: rows.sum_rows(VALUES, SLOTS[1], SLOTS[2].int()),
    "both as int32": lambda: rows.sum_rows(VALUES, SLOTS[1].int(), SLOTS[2].int()),
    "order with gaps": lambda: rows.sum_rows(VALUES, SLOTS[1].repeat_interleave(2)[::2], SLOTS[2]),
    "too few offsets": lambda: rows.sum_rows(VALUES, SLOTS[1], SLOTS[2][:2].contiguous()),
    "values of three dimensions": lambda: rows.sum_rows(VALUES[None], SLOTS[1], SLOTS[2]),
    "rows as int32": lambda: rows.write_rows(TABLE, SLOTS[0].int(), VALUES),
    "rows of two dimensions": lambda: rows.write_rows(TABLE, SLOTS[0].reshape(1, 3), VALUES),
    "narrower values": lambda: rows.write_rows(TABLE, SLOTS[0], VALUES[:, :1]),
    "wider values": lambda: rows.write_rows(TABLE, SLOTS[0], torch.ones(3, 7)),
    "fewer values": lambda: rows.write_rows(TABLE, SLOTS[0], VALUES[:1]),
    "values of another dtype": lambda: rows.write_rows(TABLE, SLOTS[0], VALUES.double()),
}


@pytest.mark.parametrize("given", UNFIT)
def test_the_kernels_get_only_memory_that_is_as_they_read_it(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all else torch's own ops say what it is, or that it is wrong."""
    for name in ("unique", "add_up", "write"):
        monkeypatch.setattr(rows_kernel, name, lambda *_, name=name: pytest.fail(f"{name} reads this as memory"))
    with contextlib.suppress(RuntimeError, IndexError, ValueError):
        UNFIT[given]()


@pytest.mark.parametrize("num_rows", [2**31 - 1, 2**31 - 2, 2**31 - 7])
@pytest.mark.parametrize("kernels", [True, False])
def test_slots_left_over_of_the_longest_table_name_none_of_its_rows(num_rows: int, kernels: bool) -> None:
    ids = jnp.array([num_rows - 1, 3, 3, -1, 3, 3, 3, 3, 3, 3], jnp.int32)
    with xla_rows_cpu.on_one_cpu(kernels):
        found = np.asarray(jax.jit(lambda at: xla_rows.unique_rows(at, num_rows))(ids)[0]).tolist()
    assert found[:2] == [3, num_rows - 1]
    assert all(row >= num_rows for row in found[2:])


def test_without_a_compiler_torchs_own_ops_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_kernel, "library", lambda: None)
    found, order, offsets = rows.unique_rows(torch.tensor([3, 1, 3]), 5)
    assert (found.tolist(), order.tolist(), offsets.tolist()) == ([1, 3, 7], [1, 0, 2], [0, 1, 3, 3])
