"""Where the rows of tables lie on a ring of chips, and what is looked up in them. Pure: no jax.

Tables and features are declared as for SparseCores (`sparsecore/spec.py`); here every chip has an equal share of every
table's rows, the last shares padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from twinstep.spec.errors import SpecError
from twinstep.worker.embedding.sparsecore.optimizers import RowOptimizer
from twinstep.worker.embedding.sparsecore.spec import INT32_MAX, Feature, Table

Order = Literal["mod", "block"]
ORDERS: tuple[Order, ...] = get_args(Order)
Dtype = Literal["float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)


@dataclass(frozen=True, slots=True)
class Shards:
    """Where the rows of one table lie: id → position among the stored rows of all chips, laid end to end."""

    rows: int
    """V: ids are 0…V-1."""
    chips: int
    """N."""
    order: Order = "mod"
    """`mod`: id modulo N names the chip, which spreads frequent low ids; `block`: each chip has a run of ids."""

    @property
    def per_chip(self) -> int:
        """R: rows that each chip stores, padding included."""
        return -(-self.rows // self.chips)

    @property
    def stored(self) -> int:
        """Rows that all chips store; this number, and more, is no position."""
        return self.per_chip * self.chips

    def positions(self, ids: Any, xp: Any) -> Any:
        """Return the positions of ids, of any shape and integer dtype; `stored` where an id names no row."""
        inside = (ids >= 0) & (ids < self.rows)
        at = ids if self.order == "block" else ids % self.chips * self.per_chip + ids // self.chips
        return xp.where(inside, at, self.stored)

    def ids(self, positions: Any) -> Any:
        """Return the ids at positions below `stored`; V and more for padding."""
        if self.order == "block":
            return positions
        return positions % self.per_chip * self.chips + positions // self.per_chip


@dataclass(frozen=True, kw_only=True, slots=True)
class RingPlan:
    """Tables on a ring, and the features that read them.

    Raises:
        SpecError: what cannot be laid out or updated; the message names the table or feature.
    """

    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    chips: int
    """N: chips of the ring. One is a ring too: nothing is sent then."""
    order: Order = "mod"
    dtype: Dtype = "float32"
    """Of the stored rows. Gradients, slots and arithmetic are float32."""

    def __post_init__(self) -> None:
        for what, value, allowed in (("order", self.order, ORDERS), ("dtype", self.dtype, DTYPES)):
            if value not in allowed:
                raise SpecError(f"a ring's {what} is {value!r}", remedy=f"use one of {', '.join(allowed)}")
        if self.chips < 1:
            raise SpecError(f"a ring of {self.chips} chips", remedy="give 1 or more chips")
        _once("table", [table.name for table in self.tables])
        _once("feature", [feature.name for feature in self.features])
        for table in self.tables:
            self._check_table(table)
        names = {table.name for table in self.tables}
        for feature in self.features:
            if feature.table not in names:
                raise SpecError(
                    f"feature {feature.name!r} reads table {feature.table!r}, which there is not",
                    remedy=f"name one of {', '.join(sorted(names))}",
                )
            if feature.samples % self.chips:
                raise SpecError(
                    f"feature {feature.name!r} has {feature.samples} samples, which {self.chips} chips do not divide",
                    remedy=f"give it {-(-feature.samples // self.chips) * self.chips} samples",
                )

    def _check_table(self, table: Table) -> None:
        if table.rows < self.chips:
            raise SpecError(
                f"table {table.name!r} has {table.rows} rows for a ring of {self.chips} chips: some would hold none",
                remedy=f"give it {self.chips} rows or more, or keep it whole on each chip",
            )
        if self.shards(table).stored > INT32_MAX:
            raise SpecError(
                f"table {table.name!r} has {table.rows} rows, and positions are 32-bit integers",
                remedy=f"give it {INT32_MAX // self.chips * self.chips} rows at most",
            )
        if not isinstance(table.optimizer, RowOptimizer):
            raise SpecError(
                f"table {table.name!r} has the optimizer {table.optimizer!r}",
                remedy="give it one of twinstep.worker.embedding.sparsecore.optimizers",
            )
        if table.optimizer.clip_norm is not None:
            raise SpecError(
                f"table {table.name!r} has clip_norm, the norm of all rows' gradients, of which a ring keeps no list",
                remedy="use clip_value, or the sparsecore engine",
            )
        if table.quantization is not None:
            raise SpecError(
                f"table {table.name!r} has simulated quantization, which rings do not compute",
                remedy="leave quantization out, or use the sparsecore engine",
            )

    def table(self, name: str) -> Table:
        """Return the table of a name."""
        return next(each for each in self.tables if each.name == name)

    def shards(self, table: Table) -> Shards:
        """Return where a table's rows lie."""
        return Shards(table.rows, self.chips, self.order)

    def features_of(self, table: Table) -> tuple[Feature, ...]:
        """Return the features that read a table, in the plan's order."""
        return tuple(each for each in self.features if each.table == table.name)


def _once(what: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SpecError(f"there are two {what}s {twice[0]!r}", remedy=f"give each {what} a name of its own")
