"""The engine: tables of a plan on the chips of a mesh, looked up and updated around the ring.

`Engine.look_up` and `Engine.update` are pure functions to be called under `jax.jit`. They have two forms with one
interface and the same numbers: `shift.py` in plain JAX, and `kernel.py`, Pallas kernels with remote DMA for TPUs.

# Shapes: B samples over all chips, S id slots of a sample, D columns of a table, L ids of a table on one chip.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from twinstep.spec.errors import DataError, SpecError
from twinstep.worker.embedding.initial import Initial, first_rows, table_key
from twinstep.worker.embedding.ring.device import kernel, shift
from twinstep.worker.embedding.ring.device.rows import Named, Ring, Values, add_up, named, spread, totals
from twinstep.worker.embedding.ring.device.words import from_words, to_words
from twinstep.worker.embedding.ring.plan import RingPlan
from twinstep.worker.embedding.sparsecore.device import rules
from twinstep.worker.embedding.sparsecore.optimizers import RowOptimizer
from twinstep.worker.embedding.sparsecore.spec import Combiner, Feature, Table

Tables = dict[str, Values]
"""By table: the stored rows and the optimizer's slots, over all chips."""
WEIGHT = "weight"


class Bags(NamedTuple):
    """What the samples of one feature name."""

    ids: jax.Array
    """[B, S] int32; an id that names no row, −1 say, is left out: an empty bag is zeros."""
    weights: jax.Array | None = None
    """[B, S] float32; None: 1 each."""


Inputs = Mapping[str, Bags]
"""By feature."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Tables on a ring over a mesh's one axis.

    Raises:
        SpecError: the mesh has other chips than the plan, or the kernels cannot run it (the message says why).
    """

    plan: RingPlan
    mesh: Mesh
    form: Literal["shift", "kernel"] = "shift"
    """`shift`: plain JAX; `kernel`: Pallas, on a TPU, or elsewhere interpreted."""
    interpret: Any = False
    """`pltpu.InterpretParams()` runs kernels where no TPU is; for small tests."""

    def __post_init__(self) -> None:
        if self.mesh.size != self.plan.chips or len(self.mesh.axis_names) != 1:
            raise SpecError(
                f"a mesh of {dict(self.mesh.shape)} for tables that are planned for a ring of {self.plan.chips} chips",
                remedy="use a mesh of one axis over as many devices as the plan has chips",
            )
        if self.form == "kernel":
            for table in self.plan.tables:
                per_row = [slot.per_row for slot in _optimizer(table).slots]
                why = kernel.why_not(table.dim, self.plan.dtype, per_row, self.plan.shards(table).per_chip)
                if why is not None:
                    raise SpecError(
                        f"the ring's kernels cannot take table {table.name!r}: {why}", remedy="use form: shift"
                    )

    @property
    def axis(self) -> str:
        """Name of the mesh's axis."""
        return str(self.mesh.axis_names[0])

    @property
    def ring(self) -> Ring:
        """The chips as a ring."""
        on_tpu = self.mesh.devices.flat[0].platform == "tpu"
        return Ring(self.axis, self.plan.chips, search="sort" if on_tpu else "scan")

    @property
    def sharding(self) -> NamedSharding:
        """How tables, bags, activations and gradients are spread: rows over chips."""
        return NamedSharding(self.mesh, P(self.axis))

    # Values

    def parts_of(self, table: Table) -> tuple[tuple[str, bool, float, Any], ...]:
        """Return name, whether it has one number a row, first value and dtype of the stored rows and each slot."""
        slots = _optimizer(table).slots
        return (
            (WEIGHT, False, 0.0, jnp.dtype(self.plan.dtype)),
            *((slot.name, slot.per_row, slot.initial, jnp.dtype("float32")) for slot in slots),
        )

    @property
    def words(self) -> bool:
        """Whether tables' rows are words of two bfloat16, as the kernels take them."""
        return self.form == "kernel" and self.plan.dtype == "bfloat16"

    def stored_shape(self, table: Table, per_row: bool) -> tuple[int, ...]:
        """Return the shape of a part over all chips, as floats; the table itself may be `words`, half as wide."""
        shards = self.plan.shards(table)
        if self.form == "kernel":
            return kernel.stored_shape(shards.per_chip, shards.chips, table.dim, per_row=per_row, dtype=self.plan.dtype)
        return shards.stored, 1 if per_row else table.dim

    def shapes(self, table: Table) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return shape and dtype of each part as it is stored."""
        found = []
        for name, per_row, _, dtype in self.parts_of(table):
            *lead, wide = self.stored_shape(table, per_row)
            kind = (wide // 2, jnp.dtype("int32")) if self.words and name == WEIGHT else (wide, dtype)
            found.append(jax.ShapeDtypeStruct((*lead, kind[0]), kind[1]))
        return tuple(found)

    def _stored(self, values: jax.Array, name: str, dtype: Any) -> jax.Array:
        """Return floats of a part as they are stored."""
        return to_words(values) if self.words and name == WEIGHT else values.astype(dtype)

    def initial(self, seed: int, how: Initial | Mapping[str, Initial]) -> Tables:
        """Return tables and slots at the start of training, each chip's part made on it.

        Args:
            seed: any integer; a value depends on it and on table, row and column alone.
            how: the distribution of all tables, or of each by name.
        """
        found: Tables = {}
        for table in self.plan.tables:
            of_table: Any = how[table.name] if isinstance(how, Mapping) else how
            parts = []
            for name, per_row, value, dtype in self.parts_of(table):
                make = self._first(table, of_table, seed) if name == WEIGHT else None
                parts.append(self._made(table, name, per_row, value, dtype, make))
            found[table.name] = tuple(parts)
        return found

    def _first(self, table: Table, how: Initial, seed: int) -> Callable[[], jax.Array]:
        shards = self.plan.shards(table)

        def make() -> jax.Array:
            me = jax.lax.axis_index(self.axis)
            ids = shards.ids(me * shards.per_chip + jnp.arange(shards.per_chip, dtype=jnp.int32))
            made = first_rows(how, table_key(seed, table.name), ids, table.dim, jnp)
            return jnp.where((ids < table.rows)[:, None], made, 0.0)

        return make

    def _made(self, table: Table, name: str, per_row: bool, value: float, dtype: Any, make: Any) -> jax.Array:
        rows, *rest = self.stored_shape(table, per_row)
        local = (rows // self.plan.chips, *rest)

        def part() -> jax.Array:
            if make is None:
                return jnp.full(local, value, dtype)
            made = make()
            padded = jnp.pad(made, ((0, 0), (0, local[-1] - made.shape[1]))).reshape(local)
            return self._stored(padded, name, dtype)

        spread_out = jax.shard_map(part, mesh=self.mesh, in_specs=(), out_specs=P(self.axis), check_vma=False)
        return jax.jit(spread_out, out_shardings=self.sharding)()

    def to_logical(self, tables: Tables, table: str, part: str = WEIGHT) -> npt.NDArray[np.float32]:
        """Return one part of a table as the host's array, [rows, dim] or [rows, 1], in the order of ids."""
        spec = self.plan.table(table)
        number = [name for name, *_ in self.parts_of(spec)].index(part)
        per_row = self.parts_of(spec)[number][1]
        shards = self.plan.shards(spec)
        stored = tables[table][number]
        floats = from_words(stored) if self.words and part == WEIGHT else stored.astype(jnp.float32)
        array = np.asarray(floats).reshape(self.plan.chips, -1)
        width = 1 if per_row else array.shape[1] // shards.per_chip
        rows = array[:, : shards.per_chip * width].reshape(shards.stored, width)
        return rows[shards.positions(np.arange(spec.rows), np), : 1 if per_row else spec.dim]

    def from_logical(self, table: str, part: str, values: npt.NDArray[np.float32]) -> jax.Array:
        """Return one part of a table, spread over the chips, from [rows, dim] or [rows, 1] in the order of ids.

        Raises:
            SpecError: the values have another shape.
        """
        spec = self.plan.table(table)
        _, per_row, value, dtype = next(each for each in self.parts_of(spec) if each[0] == part)
        wanted = (spec.rows, 1 if per_row else spec.dim)
        if values.shape != wanted:
            raise SpecError(
                f"{part} of table {table!r} is given as {list(values.shape)}",
                remedy=f"the table's own shape is {list(wanted)}",
            )
        shards = self.plan.shards(spec)
        rows, *rest = self.stored_shape(spec, per_row)
        width = 1 if per_row else rest[-1]
        flat = np.full((shards.stored, width), value, np.float32)
        flat[shards.positions(np.arange(spec.rows), np), : wanted[1]] = values
        full = np.full((self.plan.chips, rows // self.plan.chips * int(np.prod(rest))), value, np.float32)
        full[:, : shards.per_chip * width] = flat.reshape(self.plan.chips, -1)
        stored = self._stored(jnp.asarray(full.reshape(rows, *rest)), part, dtype)
        return jax.device_put(stored, self.sharding)

    # The step

    def look_up(self, tables: Tables, inputs: Inputs) -> dict[str, jax.Array]:
        """Return each feature's activations, [B, D] float32 over the chips.

        Raises:
            DataError: a feature's bags are missing or have another shape.
        """
        self._check(inputs)

        def local(tables: Tables, inputs: Inputs) -> dict[str, jax.Array]:
            asked = [self._named(table, inputs) for table in self.plan.tables]
            weights = [tables[table.name][0] for table in self.plan.tables]
            look_up = shift.look_up
            if self.form == "kernel":
                look_up = functools.partial(kernel.look_up, interpret=self.interpret)
            found = look_up(weights, [each.rows for each in asked], self.ring)
            out: dict[str, jax.Array] = {}
            for table, rows, each in zip(self.plan.tables, found, asked, strict=True):
                wide = rows.reshape(rows.shape[0], -1)
                floats = from_words(wide) if self.words else wide.astype(jnp.float32)
                by_id = spread(floats[:, : table.dim], each)
                for feature, part in self._apart(table, by_id, inputs):
                    gains = _gains(inputs[feature.name], table.rows, table.combiner)
                    out[feature.name] = jnp.sum(part * gains[..., None], axis=1)
            return out

        return self._on_each_chip(local, (tables, inputs), out=P(self.axis))

    def update(self, tables: Tables, inputs: Inputs, gradients: Mapping[str, jax.Array], step: jax.Array) -> Tables:
        """Return tables and slots after one step of each table's optimizer; only rows that bags name change.

        Args:
            tables: to be donated, so that rows are written in place.
            inputs: what was looked up.
            gradients: of the activations, [B, D] by feature.
            step: 0-d int32, from 0.

        Raises:
            DataError: as `look_up`.
        """
        self._check(inputs)

        def local(tables: Tables, inputs: Inputs, gradients: Any, step: jax.Array) -> Tables:
            asked = [self._named(table, inputs) for table in self.plan.tables]
            sums: list[Values] = []
            for table, each in zip(self.plan.tables, asked, strict=True):
                parts = [
                    _gains(inputs[f.name], table.rows, table.combiner)[..., None]
                    * gradients[f.name].astype(jnp.float32)[:, None, :]
                    for f in self.plan.features_of(table)
                ]
                flat = jnp.concatenate([part.reshape(-1, table.dim) for part in parts])
                added = add_up(flat, each)
                if self.form == "kernel":
                    added = jnp.pad(added, ((0, 0), (0, self.stored_shape(table, False)[-1] - table.dim)))
                sums.append((added,))
            stored = [self.plan.shards(table).stored for table in self.plan.tables]
            loads, sums = totals([each.rows for each in asked], sums, stored, self.ring)
            numbers = [rules.step_numbers(_optimizer(table), step) for table in self.plan.tables]
            steps = [_rule(_optimizer(table), table.dim) for table in self.plan.tables]
            states = [tables[table.name] for table in self.plan.tables]
            bring_home = shift.bring_home
            if self.form == "kernel":
                per_row = [[flag for _, flag, *_ in self.parts_of(table)] for table in self.plan.tables]
                bring_home = functools.partial(
                    kernel.bring_home, per_row=per_row, words=self.words, interpret=self.interpret
                )
            new = bring_home(states, loads, sums, steps, numbers, self.ring)
            return {table.name: state for table, state in zip(self.plan.tables, new, strict=True)}

        return self._on_each_chip(local, (tables, inputs, dict(gradients), step), out=P(self.axis), whole=3)

    def _on_each_chip(self, local: Any, arguments: tuple[Any, ...], *, out: Any, whole: int | None = None) -> Any:
        specs = tuple(P() if place == whole else P(self.axis) for place in range(len(arguments)))
        return jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False)(*arguments)

    def _named(self, table: Table, inputs: Inputs) -> Named:
        shards = self.plan.shards(table)
        ids = [inputs[feature.name].ids.reshape(-1) for feature in self.plan.features_of(table)]
        return named(shards.positions(jnp.concatenate(ids), jnp), shards.stored)

    def _apart(self, table: Table, by_id: jax.Array, inputs: Inputs) -> list[tuple[Feature, jax.Array]]:
        """Return each feature's rows, [B, S, D], of those of a table's ids end to end."""
        found, start = [], 0
        for feature in self.plan.features_of(table):
            samples, slots = inputs[feature.name].ids.shape
            found.append((feature, by_id[start : start + samples * slots].reshape(samples, slots, -1)))
            start += samples * slots
        return found

    def _check(self, inputs: Inputs) -> None:
        for feature in self.plan.features:
            given = inputs.get(feature.name)
            if given is None or given.ids.ndim != 2 or given.ids.shape[0] != feature.samples:
                what = "no bags" if given is None else f"ids of shape {list(given.ids.shape)}"
                raise DataError(
                    f"feature {feature.name!r} is given {what}", remedy=f"give ids of shape [{feature.samples}, slots]"
                )
            if given.weights is not None and given.weights.shape != given.ids.shape:
                raise DataError(
                    f"feature {feature.name!r} has weights of shape {list(given.weights.shape)}",
                    remedy=f"give one for each id, {list(given.ids.shape)}, or none",
                )


def _optimizer(table: Table) -> RowOptimizer:
    assert isinstance(table.optimizer, RowOptimizer), "the plan checked it"  # noqa: S101
    return table.optimizer


def _gains(bags: Bags, rows: int, combiner: Combiner) -> jax.Array:
    """Return [B, S] float32: the factor of each id's row in its sample's vector; 0 where an id names no row."""
    valid = (bags.ids >= 0) & (bags.ids < rows)
    weights = jnp.where(valid, 1.0 if bags.weights is None else bags.weights.astype(jnp.float32), 0.0)
    if combiner == "sum":
        return weights
    total = jnp.sum(weights * weights if combiner == "sqrtn" else weights, axis=1, keepdims=True)
    total = jnp.sqrt(total) if combiner == "sqrtn" else total
    return jnp.where(valid, weights / jnp.where(total == 0, 1.0, total), 0.0)


def _rule(optimizer: RowOptimizer, dim: int) -> shift.Rule:
    """Return an optimizer's step for k rows of D columns: float32 arithmetic, whatever the rows are stored in."""

    def rule(sums: Values, state: Values, numbers: Values) -> Values:
        weights, *slots = state
        new, kept = rules.updated(optimizer, sums[0], weights.astype(jnp.float32), tuple(slots), numbers, dim)
        return (new, *kept)

    return rule
