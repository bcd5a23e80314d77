"""The state of a step on one device: parameters, what optimizers keep of them, tables, the batch; exact, with padding.

Where each tensor lives is `spec/placement.py`'s rule, which the compiler follows; how many bytes a TPU needs for it is
`tiles.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from twinstep.preflight.chips import Where
from twinstep.preflight.parameters import Parameter
from twinstep.preflight.shapes import DataShape
from twinstep.preflight.tiles import is_copied, tiled_bytes
from twinstep.preflight.tokens import SPARSE_ROWS_PER_ID, batch_ids
from twinstep.spec.job import JobSpec
from twinstep.spec.optimizers import OptimizerSpec
from twinstep.spec.placement import SHARD_BYTES, SLICE_SHARD_BYTES, Mesh, Placed, Placement, place

QUIET = ("sgd", "adagrad", "rowwise_adagrad")
"""Optimizers that leave rows as they are which a batch does not name, without momentum and weight decay: a table then
has no gradient of its own size (`worker/compile/passes/quiet.py` proves it of the graph)."""


LOOKED_UP = ("_position_embeddings_weight", "_timestamp_embeddings_weight")
"""Parameters that a step looks rows up in, which the rules of placement take for tables."""


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor on one device."""

    name: str
    role: str
    """table, parameter, buffer, optimizer or table optimizer."""
    whole: int
    """Bytes of all of it, without padding."""
    bytes: int
    """Bytes of the device's part, with padding."""
    split: bool
    copied: bool = False
    """Whether a TPU's step copies it into whole lanes (`tiles.is_copied`)."""


def slots_of(spec: OptimizerSpec) -> tuple[int, bool]:
    """Return how many tensors of a parameter's shape an optimizer keeps, and whether it counts steps by parameter."""
    kinds = {"sgd": (int(spec.momentum > 0), False), "adam": (2, True), "adamw": (2, True), "adagrad": (1, True)}
    return kinds.get(spec.kind, (0, False))


def is_quiet(spec: JobSpec) -> bool:
    """Say whether tables are updated by the rows that a batch names alone."""
    asked, wanted = spec.optimizers.sparse, spec.compile.strategies
    decays = asked.weight_decay > 0 and asked.kind != "rowwise_adagrad"
    return (
        asked.kind in QUIET and not asked.momentum and not decays and (wanted is None or "sparse_embedding" in wanted)
    )


def dense_tables(spec: JobSpec, shape: DataShape, found: tuple[Parameter, ...]) -> frozenset[str]:
    """Return the names of tables whose rows a step reads and writes all: with few rows for a batch's ids, or all."""
    ids, tables, quiet = batch_ids(spec, shape), [each for each in found if each.role == "table"], is_quiet(spec)
    return frozenset(
        each.name
        for each, table in zip(tables, shape.tables, strict=True)
        if not quiet or table.rows <= SPARSE_ROWS_PER_ID * ids[table.name]
    )


def placed(spec: JobSpec, found: tuple[Parameter, ...]) -> list[Placed]:
    """Return a step's state as the rules of placement see it: model, then optimizers."""
    quiet = is_quiet(spec)
    made = [
        Placed(
            name=each.name, role="table" if each.name.endswith(LOOKED_UP) else each.role, shape=each.shape,
            itemsize=each.itemsize,
            by_rows=quiet and each.role == "table",
        )
        for each in found
    ]  # fmt: skip
    return made + [slot for each in found if each.role != "buffer" for slot in _slots(spec, each)]


def _slots(spec: JobSpec, each: Parameter) -> Iterator[Placed]:
    table = each.role == "table"
    asked: OptimizerSpec = spec.optimizers.sparse if table else spec.optimizers.dense
    if not each.count:
        return  # without a gradient, an optimizer keeps nothing of it
    by_rows = table and is_quiet(spec)
    count, counts_steps = slots_of(asked)
    for number in range(count):
        yield Placed(
            name=f"slot {number} of {each.name}", role="optimizer", shape=each.shape, itemsize=4, of=each.name,
            by_rows=by_rows,
        )  # fmt: skip
    if asked.kind == "rowwise_adagrad":
        yield Placed(
            name=f"sum of {each.name}", role="optimizer", shape=(each.shape[0], 1), itemsize=4, of=each.name,
            by_rows=by_rows,
        )  # fmt: skip
    if counts_steps:
        yield Placed(name=f"step of {each.name}", role="optimizer", shape=(), itemsize=4, of=each.name)


def held(spec: JobSpec, found: tuple[Parameter, ...], place_: Where) -> tuple[Held, ...]:
    """Return what one device holds of the state."""
    inputs = placed(spec, found)
    least = SLICE_SHARD_BYTES if place_.kind == "tpu" else SHARD_BYTES
    where = _placement(inputs, place_.devices, least, splits=spec.compile.backend == "xla")
    roles = {each.name: each.role for each in found}
    tiled = place_.kind == "tpu"
    return tuple(
        Held(
            each.name,
            "table optimizer" if roles.get(each.of) == "table" else roles.get(each.name, "optimizer"),
            each.bytes,
            _local(each, cut, extra, place_.devices, tiled=tiled),
            cut is not None,
            tiled and roles.get(each.name) == "table" and is_copied(each.shape[1]),
        )
        for each, cut, extra in zip(inputs, map(_cut, where.specs), where.extra, strict=True)
    )


def _placement(inputs: list[Placed], devices: int, least: int, *, splits: bool) -> Placement:
    """Return where inputs live; Inductor holds all of them on every device but for large tables."""
    mesh = Mesh.of({"devices": devices}, shard_bytes=least)
    if splits:
        return place(inputs, mesh)
    whole = place([each for each in inputs if each.role != "optimizer" or each.by_rows], mesh)
    known = iter(zip(whole.specs, whole.extra, strict=True))
    pairs = [
        next(known) if each.role != "optimizer" or each.by_rows else ((None,) * len(each.shape), 0) for each in inputs
    ]
    return Placement(tuple(spec for spec, _ in pairs), whole.notes, tuple(extra for _, extra in pairs))


def _cut(spec: tuple[object, ...]) -> int | None:
    return next((dim for dim, axis in enumerate(spec) if axis is not None), None)


def _local(each: Placed, cut: int | None, extra: int, devices: int, *, tiled: bool) -> int:
    sizes = list(each.shape)
    if sizes:
        sizes[0] += extra
    if cut is not None:
        sizes[cut] //= devices
    return tiled_bytes(tuple(sizes), each.itemsize) if tiled else prod(sizes) * each.itemsize


Leaf = tuple[tuple[int, ...], int, int | None]
"""Shape, bytes of an element and batch dimension of a batch's leaf."""


def batch_shapes(spec: JobSpec, shape: DataShape) -> list[Leaf]:
    """Return shape, bytes of an element and batch dimension of each leaf of the global batch."""
    data, tasks = spec.data, shape.tasks
    rows = data.batch_size
    if shape.bags:
        slots = sum(each.max_ids for each in shape.bags)
        return [
            ((rows, shape.dense), 4, 0), ((rows, slots), 8, 0), ((rows, len(shape.bags)), 8, 0),
            ((tasks, rows, 1), 4, 1), ((tasks, rows, 1), 4, 1),
        ]  # fmt: skip
    features, tokens, wide = len(shape.item_features), data.uih_tokens, data.num_candidates
    whole: list[Leaf] = [
        ((features, tokens), 8, 1),
        ((rows, data.uih_len), 8, 0),
        ((rows, len(shape.contextual)), 8, 0),
    ]
    whole += [((tokens,), 8, 0)] * 3 + [((rows,), 8, 0)] * 3 + [((rows, wide), 8, 0), ((features, rows, wide), 8, 1)]
    return [*whole, ((tasks, rows, wide), 4, 1), ((tasks, rows, wide), 4, 1), ((), 4, None)]


def batch_bytes(spec: JobSpec, shape: DataShape, place_: Where) -> int:
    """Return the bytes of a device's part of a batch."""
    total = 0
    for sizes, itemsize, dim in batch_shapes(spec, shape):
        mine = tuple(-(-size // place_.devices) if at == dim else size for at, size in enumerate(sizes))
        total += tiled_bytes(mine, itemsize) if place_.kind == "tpu" else prod(mine) * itemsize
    return total
