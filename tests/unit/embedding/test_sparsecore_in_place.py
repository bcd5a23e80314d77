"""Kernels that read and write a table's rows where they lie, run tile by tile by a stand-in for a SparseCore's streams.

libtpu compiles the kernels themselves: test_sparsecore_tpu.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinstep.worker.embedding.sparsecore.device import in_place, stored

STACK: Any = SimpleNamespace(pack=1)
CORES, TILES = 2, 4


class Ref:
    """Memory that a kernel is given, or a part of it; an array of indices names rows."""

    def __init__(self, held: np.ndarray, where: Any = slice(None)) -> None:
        self.held, self.where = held, where

    @property
    def at(self) -> Any:
        return _At(self)


class _At:
    def __init__(self, ref: Ref) -> None:
        self._ref = ref

    def __getitem__(self, where: Any) -> Ref:
        return Ref(self._ref.held, where)


def copied(source: Ref, target: Ref) -> Any:
    """Do what a stream does."""
    rows: Any = target.where
    if isinstance(rows, SimpleNamespace):  # of a scatter, whose marked rows are left out
        ids = rows.values.held
        kept = ids != rows.ignored_value
        assert (ids[kept] < len(target.held)).all()
        target.held[ids[kept]] = source.held[kept]
    elif isinstance(source.where, Ref):  # of a gather
        assert ((source.where.held >= 0) & (source.where.held < len(source.held))).all()
        target.held[target.where] = source.held[source.where.held]
    else:
        target.held[target.where] = source.held[source.where]
    return SimpleNamespace(wait=lambda: None)


@pytest.fixture(autouse=True)
def _tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = SimpleNamespace(size=CORES * TILES, num_subcores=TILES)
    place = {"core": 0, "tile": 0}

    def kernel(body: Any, *, mesh: Any, out_type: Any, scratch_types: Any, compiler_params: Any) -> Any:
        def run(*given: Any) -> Any:
            refs = [Ref(np.array(each) if not isinstance(each, np.ndarray) else each) for each in given]
            made = [Ref(np.full(out_type.shape, np.nan, np.float32))] if out_type else []
            for place["core"] in range(CORES):
                for place["tile"] in range(TILES):
                    body(*refs, *made, *(Ref(np.zeros(shape, kind)) for shape, kind in scratch_types[:2]), None)
            return jnp.asarray(made[0].held) if made else None

        return run

    def loop(start: int, stop: int) -> Any:
        return lambda body: [body(number) for number in range(start, stop)]

    monkeypatch.setattr(in_place.tpu_sc, "VectorSubcoreMesh", lambda **_: mesh)
    monkeypatch.setattr(
        in_place.tpu_sc,
        "Indices",
        lambda values, ignored_value: SimpleNamespace(values=values, ignored_value=ignored_value),
    )
    monkeypatch.setattr(in_place.pltpu, "VMEM", lambda shape, kind: (shape, np.dtype(kind)))
    monkeypatch.setattr(in_place.pltpu, "sync_copy", copied)
    monkeypatch.setattr(in_place.pltpu, "async_copy", lambda source, target, _: copied(source, target))
    monkeypatch.setattr(in_place.pl, "kernel", kernel)
    monkeypatch.setattr(in_place.pl, "loop", loop)
    monkeypatch.setattr(in_place.pl, "ds", lambda start, size: slice(start, start + size))
    monkeypatch.setattr(in_place.pl, "multiple_of", lambda value, _: value)
    monkeypatch.setattr(in_place.jax.lax, "axis_index", lambda name: place[name])
    monkeypatch.setattr(in_place.jax, "new_ref", lambda array: np.array(array))
    monkeypatch.setattr(in_place.jax, "freeze", jnp.asarray)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 700), st.sampled_from([8, 40, 2048, 20_000]), st.integers(0, 2**31))
def test_tiles_read_and_write_the_rows_that_one_gather_and_one_scatter_would(
    rows: int, asked: int, width: int, seed: int
) -> None:
    rows = min(rows, 2_000_000 // width)
    random = np.random.default_rng(seed)
    table = jnp.asarray(random.normal(size=(rows, width)).astype(np.float32))
    # As `update.RowGradients`: each row once, and numbers past the last where there is none.
    some = random.permutation(rows)[:asked]
    wanted = jnp.asarray(np.concatenate([np.sort(some), rows + np.arange(asked - len(some))]).astype(np.int32))
    values = jnp.asarray(random.normal(size=(asked, width)).astype(np.float32))
    assert np.array_equal(in_place.take(table, wanted, STACK), stored.take(table, wanted, STACK))
    assert np.array_equal(in_place.put(table, wanted, values, STACK), stored.put(table, wanted, values, STACK))
