"""The engine: tables of a plan on the devices of a mesh, looked up and updated from the host's buffers.

`Engine.look_up` and `Engine.update` are pure functions to be called under `jax.jit`; on a TPU they go to the
SparseCores, elsewhere the portable implementation does the same over the same buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from twinstep.spec.errors import DataError, SpecError, TrainError
from twinstep.worker.embedding.initial import Initial, first_rows, table_key
from twinstep.worker.embedding.sparsecore import logical
from twinstep.worker.embedding.sparsecore.device import entries as reader
from twinstep.worker.embedding.sparsecore.device import exchange, lookup, stored, tpu, update
from twinstep.worker.embedding.sparsecore.device.entries import Csr, Entries
from twinstep.worker.embedding.sparsecore.device.lookup import Checks
from twinstep.worker.embedding.sparsecore.optimizers import RowOptimizer
from twinstep.worker.embedding.sparsecore.result import Preprocessed
from twinstep.worker.embedding.sparsecore.stacking import Stack, StackPlan

Tables = dict[str, tuple[jax.Array, ...]]
"""By stack: the stored table and its optimizer's slots, over all devices."""


class Inputs(NamedTuple):
    """One batch's buffers, over all devices."""

    stacks: dict[str, tuple[Csr, ...]]
    """By stack: one buffer, or one for each block of samples that the batch was split into."""
    minibatches: Any = None
    """M, 0-d int32, where buffers have the layout with mini-batches along the vocabulary."""


@functools.cache
def _windows(mesh: Mesh, cores: int) -> Callable[[jax.Array, jax.Array, int], jax.Array]:
    """Return what gives all devices the same rows of each shard, [shards, size, width]; compiled once in a process."""
    axis = mesh.axis_names[0]

    def window(table: jax.Array, first: jax.Array, size: int) -> jax.Array:
        def local(table: jax.Array, first: jax.Array) -> jax.Array:
            rows = table.shape[0] // cores
            parts = [jax.lax.dynamic_slice_in_dim(table, core * rows + first, size) for core in range(cores)]
            return jnp.stack(parts)

        mine = jax.shard_map(local, mesh=mesh, in_specs=(P(axis), P()), out_specs=P(axis), check_vma=False)
        return mine(table, first)

    return jax.jit(window, static_argnums=2, out_shardings=NamedSharding(mesh, P()))


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Tables on a mesh of one axis, whose devices are those of the plan."""

    plan: StackPlan
    mesh: Mesh
    backend: Literal["portable", "tpu"] = "portable"
    id_bound_check: Literal["error", "drop"] = "error"
    """An id that names no row: the update changes nothing and `raise_for` says so; or it is left out and counted."""
    nan_check: bool = False
    """Values that are no finite numbers stop the update in the same way."""
    splits: int = 64
    """Most mini-batches along the vocabulary that one batch may come in."""
    capacities: Mapping[str, int] = field(default_factory=dict)
    """By stack: slots of an exchange's window, where less than the limits allow is known to be enough."""

    def __post_init__(self) -> None:
        """Refuse what cannot be run.

        Raises:
            SpecError: the mesh has other devices than the plan, a stack has no limits or no row optimizer.
        """
        if self.mesh.size != self.plan.cores.devices or len(self.mesh.axis_names) != 1:
            raise SpecError(
                f"a mesh of {dict(self.mesh.shape)} for tables that are planned for {self.plan.cores.devices} devices",
                remedy="use a mesh of one axis over as many devices as the plan has",
            )
        for stack in self.plan.stacks:
            if not isinstance(stack.optimizer, RowOptimizer):
                raise SpecError(
                    f"the tables of stack {stack.name!r} have the optimizer {stack.optimizer!r}",
                    remedy="give them one of twinstep.worker.embedding.sparsecore.optimizers",
                )
            if stack.limits is None:
                raise SpecError(f"stack {stack.name!r} has no limits", remedy="compute them from data, or give them")

    @property
    def axis(self) -> str:
        """Name of the mesh's axis."""
        return str(self.mesh.axis_names[0])

    @property
    def sharding(self) -> NamedSharding:
        """How tables, buffers, activations and gradients are spread: rows over devices."""
        return NamedSharding(self.mesh, P(self.axis))

    @property
    def placing(self) -> dict[str, tuple[Any, ...]]:
        """How tables and slots lie, by stack."""
        return {
            stack.name: tuple(self.placing_of(per_row) for _, per_row, _ in logical.parts_of(stack))
            for stack in self.plan.stacks
        }

    def placing_of(self, per_row: bool) -> Any:
        """Return how a part lies: as `sharding`, on a TPU row after row, as SparseCores read them.

        In a TPU's own layout they would be copied whole at every lookup. What has one number a row no SparseCore
        reads: row after row it would take eight times its bytes, and be copied into whole lanes at every update.
        """
        if self.backend != "tpu" or per_row:
            return self.sharding
        return Format(Layout(major_to_minor=(0, 1), tiling=((8,),)), self.sharding)

    def inputs(self, batch: Preprocessed) -> Inputs:
        """Return a preprocessed batch of this host as arrays over all devices; every host calls it with its own."""
        stacks: dict[str, tuple[Csr, ...]] = {}
        pooled = False
        for stack in self.plan.stacks:
            parts = []
            for block in batch.blocks:
                buffers = block[stack.name]
                pooled = buffers.row_pointers.shape[1] > reader.pointers_of(stack)
                fields = (buffers.row_pointers, buffers.embedding_ids, buffers.sample_ids, buffers.gains)
                parts.append(Csr._make(self._spread(each.reshape(-1)) for each in fields))
            stacks[stack.name] = tuple(parts)
        return Inputs(stacks, jnp.int32(batch.minibatches) if pooled else None)

    def _spread(self, local: Any) -> jax.Array:
        return jax.make_array_from_process_local_data(self.sharding, local)

    # Values

    def initial(self, seed: int, how: Initial | Mapping[str, Initial]) -> Tables:
        """Return tables and slots at the start of training, made on the devices.

        Args:
            seed: any integer.
            how: the distribution of all tables, or of each by name.
        """
        by_table = how if isinstance(how, Mapping) else {}
        return {
            stack.name: tuple(
                jax.jit(
                    jax.shard_map(
                        lambda stack=stack, number=number: self._first(stack, number, seed, by_table, how),
                        mesh=self.mesh,
                        in_specs=(),
                        out_specs=P(self.axis),
                        check_vma=False,
                    ),
                    out_shardings=self.placing_of(per_row),
                )()
                for number, (_, per_row, _) in enumerate(logical.parts_of(stack))
            )
            for stack in self.plan.stacks
        }

    def _first(self, stack: Stack, number: int, seed: int, by_table: Mapping[str, Initial], how: Any) -> jax.Array:
        _, per_row, value = logical.parts_of(stack)[number]
        cores = stack.cores.per_device
        rows, width = stored.stored_shape(stack, per_row)
        if number:
            return jnp.full((rows // stack.cores.devices, width), value, jnp.float32)
        shards = jax.lax.axis_index(self.axis) * cores + jnp.arange(cores, dtype=jnp.int32)
        parts = []
        for place in stack.placements:
            local = jnp.arange(place.rows_per_shard, dtype=jnp.int32)[None, :]
            ids = (local * place.shards + (shards[:, None] - place.rotation) % place.shards).reshape(-1)
            made = first_rows(
                by_table.get(place.table.name, how), table_key(seed, place.table.name), ids, place.table.dim, jnp
            )
            made = jnp.where((ids < place.table.rows)[:, None], made, 0.0)
            if stack.pack > 1:
                made = made.reshape(-1, stack.pack * place.table.dim)
            made = jnp.pad(made, ((0, 0), (0, width - made.shape[1])))
            parts.append(made.reshape(cores, -1, width))
        return jnp.concatenate(parts, axis=1).reshape(-1, width)

    def to_logical(self, tables: Tables, *, chunk_rows: int = 1 << 16) -> Any:
        """Give tables and slots as chunks of logical rows: `logical.to_logical`.

        Where other processes hold parts, all must ask, and each has a chunk at a time of every shard.
        """
        if jax.process_count() > 1:
            return logical.to_logical(self.plan, self._read_of_all(tables), chunk_rows=chunk_rows)

        def read(name: str, number: int, shard: int, first: int, last: int) -> logical.Rows:
            stack, array = self.plan.stack(name), tables[name][number]
            rows = stack.rows_per_shard // stack.pack
            device, core = divmod(shard, stack.cores.per_device)
            part = next(
                each
                for each in array.addressable_shards
                if (each.index[0].start or 0) == device * rows * stack.cores.per_device
            )
            return np.asarray(jax.lax.dynamic_slice_in_dim(part.data, core * rows + first, last - first))

        return logical.to_logical(self.plan, read, chunk_rows=chunk_rows)

    def _read_of_all(self, tables: Tables) -> logical.ReadShard:
        """Return what reads rows of all processes' shards: one window of rows of every shard at a time, everywhere."""
        gather, cores = _windows(self.mesh, self.plan.cores.per_device), self.plan.cores.per_device
        held: dict[tuple[str, int, int, int], Any] = {}

        def read(name: str, number: int, shard: int, first: int, last: int) -> logical.Rows:
            table = tables[name][number]
            rows = table.shape[0] // self.mesh.size // cores
            size = min(1 << (last - first - 1).bit_length(), rows)  # few sizes, each of which is a program
            start = min(first, rows - size)
            key = name, number, start, size
            if key not in held:
                held.clear()
                held[key] = np.asarray(gather(table, jnp.int32(start), size))
            found: logical.Rows = held[key][shard, first - start : last - start]
            return found

        return read

    def from_logical(self, read: logical.ReadRows, *, chunk_rows: int = 1 << 16) -> Tables:
        """Return tables and slots made from logical rows, each chunk of which is passed once.

        The host holds what its devices take of one part of one stack at a time.

        Raises:
            SpecError: logical rows have another shape than a table.
        """
        found: Tables = {}
        for stack in self.plan.stacks:
            parts = []
            for number, (_, per_row, _) in enumerate(logical.parts_of(stack)):
                shape = stored.stored_shape(stack, per_row)
                rows, cores = shape[0] // stack.cores.count, stack.cores.per_device
                of_devices: Any = self.sharding.addressable_devices_indices_map(shape)
                shards = [
                    (index[0].start or 0) // rows + core for index in of_devices.values() for core in range(cores)
                ]
                here = logical.fill_shards(stack, number, shards, read, chunk_rows=chunk_rows)
                # Waited for and let go, so that the host never holds two parts.
                placed = [
                    jax.device_put(part, device, may_alias=False).block_until_ready()
                    for device, part in zip(of_devices, here.reshape(-1, cores * rows, shape[1]), strict=True)
                ]
                del here
                array = jax.make_array_from_single_device_arrays(shape, self.sharding, placed)
                parts.append(array if self.backend != "tpu" else jax.device_put(array, self.placing_of(per_row)))
            found[stack.name] = tuple(parts)
        return found

    def rows_here(self, tables: Tables, table: str, ids: Any) -> logical.Rows:
        """Return rows of a table, [n, dim], zeros for those that other processes hold.

        Args:
            tables: as they are.
            table: which.
            ids: [n] int64, in range.
        """
        stack, placement = self.plan.of_table(table)
        weight, cores, dim = tables[stack.name][0], stack.cores.per_device, placement.table.dim
        stored_rows = stack.rows_per_shard // stack.pack
        shards, local = placement.locate(ids)
        found = np.zeros((len(ids), dim), np.float32)
        for part in weight.addressable_shards:
            first = (part.index[0].start or 0) // stored_rows
            here = np.flatnonzero((shards >= first) & (shards < first + cores))
            at = (shards[here] - first) * stored_rows + local[here] // stack.pack
            size = 1 << max(0, len(here) - 1).bit_length()  # few sizes, each of which is a program
            wanted = np.zeros(size, np.int32)
            wanted[: len(here)] = at
            rows = np.asarray(jnp.take(part.data, wanted, axis=0, mode="clip"))[: len(here)]
            columns = (local[here] % stack.pack)[:, None] * dim + np.arange(dim)
            found[here] = np.take_along_axis(rows, columns, axis=1)
        return found

    # The step

    def look_up(self, tables: Tables, inputs: Inputs) -> tuple[dict[str, jax.Array], Checks]:
        """Return each feature's activations, [samples, dim] float32 over the devices, and what was found wrong."""

        def local(tables: Tables, inputs: Inputs) -> tuple[dict[str, jax.Array], Checks]:
            out: dict[str, jax.Array] = {}
            checks = _none_wrong()
            for stack in self.plan.stacks:
                table, buffers = tables[stack.name][0], inputs.stacks[stack.name]
                if self.backend == "tpu":
                    found, wrong = tpu.look_up(table, buffers, stack, inputs.minibatches), _none_wrong()
                else:
                    found, wrong = lookup.look_up(
                        table,
                        _entries(buffers, stack, inputs.minibatches),
                        stack,
                        axis=self.axis,
                        capacity=self._capacity(stack, inputs),
                        check_finite=self.nan_check,
                    )
                out.update(lookup.unstack(found, stack))
                checks = _add(checks, wrong)
            return out, checks.over(self.axis)

        return self._sharded(local, inputs, (P(self.axis), P()))(tables, inputs)

    def update(
        self, tables: Tables, inputs: Inputs, gradients: Mapping[str, jax.Array], step: jax.Array
    ) -> tuple[Tables, Checks]:
        """Return tables and slots after one optimizer step on the rows that a batch names.

        Donate `tables`, and they are changed in place. If anything is found wrong that is to stop a run, no row of any
        table is changed.

        Args:
            tables: before.
            inputs: what was looked up.
            gradients: of each feature's activations, [samples, dim].
            step: 0-d int32, from 0: what schedules and corrections count by.
        """

        def local(
            tables: Tables, inputs: Inputs, gradients: Mapping[str, jax.Array], step: jax.Array
        ) -> tuple[Tables, Checks]:
            if self.backend == "tpu":
                return {
                    stack.name: tpu.update(
                        tables[stack.name],
                        inputs.stacks[stack.name],
                        lookup.restack(gradients, stack),
                        stack,
                        step,
                        inputs.minibatches,
                        axis=self.axis,
                        capacity=self._capacity(stack, inputs),
                    )
                    for stack in self.plan.stacks
                }, _none_wrong()
            found, checks = {}, _none_wrong()
            for stack in self.plan.stacks:
                found[stack.name], wrong = update.row_gradients(
                    lookup.restack(gradients, stack),
                    _entries(inputs.stacks[stack.name], stack, inputs.minibatches),
                    stack,
                    axis=self.axis,
                    capacity=self._capacity(stack, inputs),
                    check_finite=self.nan_check,
                )
                checks = _add(checks, wrong)
            checks = checks.over(self.axis)
            refuse = self._stops(checks)
            return {
                stack.name: update.apply(
                    tables[stack.name], found[stack.name], stack, step=step, axis=self.axis, refuse=refuse
                )
                for stack in self.plan.stacks
            }, checks

        sharded = self._sharded(local, inputs, (P(self.axis), P()), P(self.axis), P())
        return sharded(tables, inputs, gradients, step)

    def raise_for(self, checks: Checks) -> None:
        """Raise if what a lookup or update found wrong is to stop the run. Waits for the device.

        Raises:
            DataError: ids name no row.
            TrainError: limits were not kept to, or values are no finite numbers.
        """
        out_of_range, left_out, not_finite = (int(each) for each in checks)
        if out_of_range and self.id_bound_check == "error":
            raise DataError(
                f"{out_of_range} ids of a batch name no row of their table",
                remedy="set id_bound_check: drop to leave them out, or make the table larger",
            )
        if left_out:
            raise TrainError(
                f"a batch names {left_out} different rows more than max_unique_ids_per_partition allows",
                remedy="raise the limit, or let the batch be split",
            )
        if not_finite:
            raise TrainError(
                f"{not_finite} embedding values or gradients are not finite numbers",
                remedy="lower the learning rate, or clip gradients",
            )

    def _stops(self, checks: Checks) -> jax.Array:
        stops = checks.left_out > 0
        if self.id_bound_check == "error":
            stops |= checks.out_of_range > 0
        return stops | (checks.not_finite > 0) if self.nan_check else stops

    def _capacity(self, stack: Stack, inputs: Inputs) -> int:
        blocks = len(inputs.stacks[stack.name])
        splits = blocks if inputs.minibatches is None else blocks * self.splits
        return self.capacities.get(stack.name) or exchange.capacity_of(stack, splits)

    def _sharded(self, local: Any, inputs: Inputs, out: Any, *more: Any) -> Any:
        spread: Any = Inputs._make((P(self.axis), None if inputs.minibatches is None else P()))
        return jax.shard_map(
            local, mesh=self.mesh, in_specs=(P(self.axis), spread, *more), out_specs=out, check_vma=False
        )


def _entries(buffers: tuple[Csr, ...], stack: Stack, minibatches: Any) -> Entries:
    parts = [reader.read(each, stack, minibatches) for each in buffers]
    return parts[0] if len(parts) == 1 else reader.join(parts, stack)


def _none_wrong() -> Checks:
    return Checks(jnp.int32(0), jnp.int32(0), jnp.int32(0))


def _add(one: Checks, other: Checks) -> Checks:
    return Checks(*(a + b for a, b in zip(one, other, strict=True)))
