"""How tables are divided: what was asked for, what sizes say, and what cannot be."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinstep.spec.errors import SpecError
from twinstep.worker.embedding.hybrid.plan import SMALL_BYTES, Kind, TableSize, plan_tables

SMALL, LARGE = TableSize(name="small", rows=100, dim=16), TableSize(name="large", rows=1_000_000, dim=16)
MIDDLE = TableSize(name="middle", rows=100_000, dim=16)


def kinds(
    *tables: TableSize, asked: dict[str, Kind] | None = None, processes: int = 2, sparse: str = "sgd"
) -> list[str]:
    plans = plan_tables(tables, asked=asked or {}, processes=processes, sparse=sparse)
    return [plan.kind for plan in plans]


def test_sizes_decide_what_nobody_asked_for() -> None:
    assert kinds(SMALL, MIDDLE, LARGE) == ["data_parallel", "table_wise", "row_wise"]
    assert kinds(SMALL, MIDDLE, LARGE, processes=1) == ["data_parallel", "table_wise", "table_wise"]


def test_what_is_asked_for_stands() -> None:
    asked: dict[str, Kind] = {"small": "row_wise", "large": "data_parallel", "middle": "column_wise"}
    assert kinds(SMALL, MIDDLE, LARGE, asked=asked) == ["row_wise", "column_wise", "data_parallel"]


@given(st.lists(st.integers(1, 3_000_000), min_size=1, max_size=8), st.integers(1, 16))
def test_no_table_larger_than_an_even_share_is_given_whole_to_one_process(rows: list[int], processes: int) -> None:
    tables = [TableSize(name=f"t{index}", rows=count, dim=8) for index, count in enumerate(rows)]
    plans = plan_tables(tables, asked={}, processes=processes, sparse="rowwise_adagrad")
    share = sum(table.bytes for table in tables) / processes
    assert [plan.table for plan in plans] == tables
    for plan in plans:
        assert (plan.kind == "data_parallel") == (plan.table.bytes <= SMALL_BYTES)
        assert plan.kind != "table_wise" or plan.table.bytes <= share or processes == 1
    sizes = sorted(plans, key=lambda plan: plan.table.bytes)  # a larger table is never kept by more processes
    order = {"data_parallel": 0, "table_wise": 1, "row_wise": 2}
    assert all(order[a.kind] <= order[b.kind] for a, b in pairwise(sizes))


@pytest.mark.parametrize(
    ("asked", "sparse", "processes", "said"),
    [
        ({"lage": "row_wise"}, "sgd", 2, "embedding.sharding.lage is no table of this job"),
        ({"small": "column_wise"}, "sgd", 3, "16 columns make no 3 shards"),
        ({"large": "column_wise"}, "rowwise_adagrad", 2, "would keep a sum per row and shard"),
        ({"small": "row_wise"}, "sgd", 101, "100 rows are fewer than 101 processes"),
        ({"small": "table_wise"}, "adam", 2, "is adam, which divided tables do not have, and small, large would"),
    ],
)
def test_what_cannot_be_divided_so_is_refused_with_what_can(
    asked: dict[str, Kind], sparse: str, processes: int, said: str
) -> None:
    with pytest.raises(SpecError, match=said) as refused:
        kinds(SMALL, LARGE, asked=asked, processes=processes, sparse=sparse)
    assert refused.value.remedy


def test_the_nearest_table_is_named() -> None:
    with pytest.raises(SpecError) as refused:
        kinds(SMALL, LARGE, asked={"lage": "row_wise"})
    assert "'large'" in refused.value.remedy


def test_adam_is_for_tables_that_every_process_keeps() -> None:
    every: dict[str, Kind] = {"small": "data_parallel", "large": "data_parallel"}
    assert kinds(SMALL, LARGE, asked=every, sparse="adam") == ["data_parallel", "data_parallel"]


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise"])
def test_divided_tables_take_adam_where_fbgemm_has_it(kind: Kind) -> None:
    tables, asked = [TableSize(name="t", rows=4096, dim=16)], {"t": kind}
    with pytest.raises(SpecError, match=r"optimizers\.sparse\.kind is adam") as refused:
        plan_tables(tables, asked=asked, processes=2, sparse="adam")
    assert "adam" not in refused.value.remedy
    (plan,) = plan_tables(tables, asked=asked, processes=2, sparse="adam", device="cuda")
    assert plan.kind == kind
    with pytest.raises(SpecError, match="adamw"):
        plan_tables(tables, asked=asked, processes=2, sparse="adamw", device="cuda")
