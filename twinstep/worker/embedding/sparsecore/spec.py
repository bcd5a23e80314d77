"""What is declared: embedding tables, the features that read them, and the SparseCores that hold them.

Frozen, and apart from where things lie, which `stacking` plans. Ids are rows of a table, from 0.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, get_args

from twinstep.spec.errors import SpecError

Combiner = Literal["sum", "mean", "sqrtn"]
COMBINERS: tuple[Combiner, ...] = get_args(Combiner)
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """The SparseCores of a job: N = `devices` × `per_device`, any number, not only a power of two."""

    devices: int
    """D: devices (chips) of the whole job."""
    per_device: int
    """S: SparseCores of one device."""

    def __post_init__(self) -> None:
        for name, value in (("devices", self.devices), ("SparseCores per device", self.per_device)):
            if value < 1:
                raise SpecError(f"{value} {name}", remedy=f"give 1 or more {name}")

    @property
    def count(self) -> int:
        """N: SparseCores of the whole job, which is the number of shards of every table."""
        return self.devices * self.per_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that one partition may hold: what one SparseCore asks of another one in a step."""

    max_ids: int
    """max_ids_per_partition: (id, sample) pairs, after de-duplication within a sample."""
    max_unique: int
    """max_unique_ids_per_partition: different ids."""

    def __post_init__(self) -> None:
        for name, value in (("max_ids", self.max_ids), ("max_unique", self.max_unique)):
            if not 1 <= value <= INT32_MAX:
                raise SpecError(
                    f"a limit {name} of {value} can never hold one sample", remedy=f"give 1 to {INT32_MAX} for {name}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Simulated quantization of looked-up rows: `num_buckets` values from `low` to `high`; storage stays float32."""

    num_buckets: int
    low: float
    high: float

    def __post_init__(self) -> None:
        if self.num_buckets < 2:
            raise SpecError(f"quantization to {self.num_buckets} values", remedy="give num_buckets 2 or more")
        if not self.low < self.high:
            raise SpecError(f"quantization from {self.low} to {self.high}", remedy="give low below high")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One logical table, [rows, dim] float32."""

    name: str
    rows: int
    dim: int
    combiner: Combiner = "sum"
    """How the rows that one sample names become one vector."""
    optimizer: Hashable = None
    """Any frozen value; tables of equal optimizers may share a stack."""
    quantization: Quantization | None = None
    limits: Limits | None = None
    """Limits of this table alone; None: computed from data."""

    def __post_init__(self) -> None:
        if not self.name:
            raise SpecError("a table without a name", remedy="name it")
        for what, value in (("rows", self.rows), ("columns", self.dim)):
            if value < 1:
                raise SpecError(f"table {self.name!r} has {value} {what}", remedy=f"give it 1 or more {what}")
        if self.combiner not in COMBINERS:
            raise SpecError(
                f"table {self.name!r} has the combiner {self.combiner!r}", remedy=f"use one of {', '.join(COMBINERS)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One input that reads a table: each of its samples names any number of rows, and becomes one vector."""

    name: str
    table: str
    """Name of its table. Several features may read one table."""
    samples: int
    """Samples of a global batch: the batch, or batch × positions where each position has a vector of its own."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise SpecError(
                f"feature {self.name!r} has {self.samples} samples", remedy="give it 1 or more samples of a batch"
            )
