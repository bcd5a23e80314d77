"""Which table is divided how: what a user asked for, and for the rest what its size says. Pure; no tensor stack.

The same spec and the same number of processes give the same plan on every process, so none has to be told it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from twinstep.spec.embedding import FUSED, FUSED_ON_GPUS, Sharding
from twinstep.spec.errors import SpecError

Kind = Literal["table_wise", "row_wise", "column_wise", "data_parallel"]

SMALL_BYTES = 1 << 20  # a table up to this size is cheaper to keep everywhere than to ask another process for its rows
COLUMN_STEP = 4  # FBGEMM's kernels read four float32 values at once, so a shard's width is a multiple of four


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSize:
    """What the plan must know of a table."""

    name: str
    rows: int
    dim: int

    @property
    def bytes(self) -> int:
        """Bytes of its float32 weights."""
        return self.rows * self.dim * 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePlan:
    """How one table is divided, among whom, and who said so."""

    table: TableSize
    kind: Kind
    processes: tuple[int, ...]
    """Ranks that have a part of it."""
    why: str


def plan_tables(
    tables: Sequence[TableSize], *, asked: Mapping[str, Sharding], processes: int, sparse: str, device: str = "cpu"
) -> tuple[TablePlan, ...]:
    """Return a plan for every table, in their order.

    `auto` keeps a table of at most SMALL_BYTES on every process, divides one of more than a process's even share of all
    bytes by rows, and gives any other whole to one process. Whole tables are given out the largest first, each to the
    process that has the fewest bytes by then.

    Args:
        asked: sharding by table; `auto` for those that are not named.
        processes: that the tables are divided among.
        sparse: kind of the tables' optimizer.
        device: cpu or cuda: where the tables are.

    Raises:
        SpecError: a name is no table, or a table cannot be divided so; the field is named.
    """
    names = [table.name for table in tables]
    for name in asked:
        if name not in names:
            raise SpecError(
                f"embedding.sharding.{name} is no table of this job",
                remedy=f"did you mean {_nearest(name, names)!r}? tables: {', '.join(names)}",
            )
    share = sum(table.bytes for table in tables) / processes
    kinds: dict[str, tuple[Kind, str]] = {}
    for table in tables:
        wanted = asked.get(table.name, "auto")
        if wanted == "auto":
            kinds[table.name] = _by_size(table, share)
        else:
            _check(table, wanted, processes=processes, sparse=sparse)
            kinds[table.name] = wanted, "the spec says so"
    homes = _homes([table for table in tables if kinds[table.name][0] == "table_wise"], processes)
    everyone = tuple(range(processes))
    plans = tuple(
        TablePlan(table=table, kind=kind, processes=homes.get(table.name, everyone), why=why)
        for table in tables
        for kind, why in [kinds[table.name]]
    )
    _check_optimizer(plans, sparse=sparse, fused=FUSED if device == "cpu" else FUSED_ON_GPUS)
    return plans


def _nearest(name: str, names: Sequence[str]) -> str:
    return difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]


def _by_size(table: TableSize, share: float) -> tuple[Kind, str]:
    if table.bytes <= SMALL_BYTES:
        return "data_parallel", f"at most {SMALL_BYTES >> 20} MiB"
    if table.bytes > share:
        return "row_wise", "more than a process's even share of all tables"
    return "table_wise", "within a process's even share of all tables"


def _homes(tables: Sequence[TableSize], processes: int) -> dict[str, tuple[int, ...]]:
    """Return which process has each whole table."""
    load = [0] * processes
    homes: dict[str, tuple[int, ...]] = {}
    for table in sorted(tables, key=lambda table: -table.bytes):  # of equal ones the first, so all come to the same
        least = min(range(processes), key=load.__getitem__)
        load[least] += table.bytes
        homes[table.name] = (least,)
    return homes


def _check(table: TableSize, kind: Kind, *, processes: int, sparse: str) -> None:
    field = f"embedding.sharding.{table.name}"
    if kind == "column_wise" and table.dim % (COLUMN_STEP * processes):
        raise SpecError(
            f"{field} is column_wise, and {table.dim} columns make no {processes} shards of a multiple of "
            f"{COLUMN_STEP} columns",
            remedy="use row_wise or table_wise, or another model.embedding_dim",
        )
    if kind == "column_wise" and processes > 1 and sparse == "rowwise_adagrad":
        raise SpecError(
            f"{field} is column_wise with optimizers.sparse.kind rowwise_adagrad, which would keep a sum per row and "
            "shard: another number of processes would train another model",
            remedy="use row_wise or table_wise, or optimizers.sparse.kind: adagrad or sgd",
        )
    if kind == "row_wise" and table.rows < processes:
        raise SpecError(
            f"{field} is row_wise, and {table.rows} rows are fewer than {processes} processes",
            remedy="use table_wise or data_parallel",
        )


def _check_optimizer(plans: Sequence[TablePlan], *, sparse: str, fused: Sequence[str]) -> None:
    divided = [plan.table.name for plan in plans if plan.kind != "data_parallel"]
    if divided and sparse not in fused:
        raise SpecError(
            f"optimizers.sparse.kind is {sparse}, which divided tables do not have, and {', '.join(divided)} would be "
            "divided",
            remedy=f"use one of {', '.join(fused)}; or embedding.sharding: data_parallel for these tables",
        )
