"""Table and feature stacking: which tables share one stacked table, and where each row and sample lies in it.

Pure: declarations in, a `StackPlan` out. The layout is that of jax-tpu-embedding (`nn/table_stacking.py`), so that its
primitives read our tables and buffers. Legend: N SparseCores = shards, S of them on a device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from twinstep.spec.errors import SpecError
from twinstep.worker.embedding.sparsecore.spec import (
    INT32_MAX,
    Combiner,
    Cores,
    Feature,
    Limits,
    Quantization,
    Table,
)

ROW_ALIGN = 8  # rows of a shard, and float32 columns of a row: 32 bytes
FLOAT_BYTES = 4
ACTIVATION_LIMIT = 2 * 1024 * 1024  # bytes of activations per SparseCore; jax-tpu-embedding's auto_stack_tables
NAME_SHOWN, NAME_HASH = 50, 12  # characters of a long stack's name, and of the hash that follows
MOST_WASTE = 0.25  # of a narrow table's bytes
MAX_PACKED_WIDTH = 7
MAX_SAMPLES_PER_DEVICE = 2**26 - 1  # of a stack; jax-tpu-embedding's sort key

Ids = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one table lies in its stack.

    Row `id` of the table is at local row `id // N + row_offset` of shard `(id % N + rotation) % N`.
    """

    table: Table
    stack: str
    padded_rows: int
    """Rows with padding, over all shards: a multiple of 8 · N · pack."""
    row_offset: int
    """row_offset_in_shard: local rows of earlier tables of the stack."""
    rotation: int
    """shard_rotation: shards by which it is turned, so that the first rows of all tables do not meet on one."""
    shards: int
    """N."""

    @property
    def rows_per_shard(self) -> int:
        """Local rows of this table on each shard, padding included."""
        return self.padded_rows // self.shards

    def locate(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return shard and local row within the stack's shard, of each id."""
        return (ids % self.shards + self.rotation) % self.shards, ids // self.shards + self.row_offset

    def logical(self, shard: Ids, local: Ids) -> Ids:
        """Return the ids at shard and local row: the inverse of `locate`. Padding gives ids of `table.rows` or more."""
        return np.asarray((local - self.row_offset) * self.shards + (shard - self.rotation) % self.shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeaturePlace:
    """Where one feature's samples lie among the stacked samples."""

    feature: Feature
    row_offset: int
    """Global samples of earlier features of the stack. On each SparseCore its samples start at row_offset / N."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Tables that are stored, looked up and updated as one.

    Each shard stores [rows_per_shard / pack, stored_dim] float32. Where `pack` is 1 a local row is a stored row, and
    stored_dim is the width padded to 8. Narrow tables have `pack` local rows in a stored row: local row r is columns
    [r % pack · dim, + dim) of stored row r // pack. Buffers of ids speak of local rows in either case.
    """

    name: str
    placements: tuple[Placement, ...]
    features: tuple[FeaturePlace, ...]
    """In ascending row_offset."""
    cores: Cores
    stored_dim: int
    pack: int
    limits: Limits | None
    """None until they are given or computed from data."""
    buffer: int | None = None
    """COO slots per device that were asked for; None: as many as the limits can need."""

    @property
    def held_to(self) -> Limits:
        """Its limits.

        Raises:
            SpecError: there are none yet.
        """
        if self.limits is None:
            raise SpecError(
                f"stack {self.name!r} has no limits",
                remedy="give its tables limits, or compute them from batches: limits.limits_from_batches",
            )
        return self.limits

    @property
    def combiner(self) -> Combiner:
        """The combiner of all its tables."""
        return self.placements[0].table.combiner

    @property
    def optimizer(self) -> Hashable:
        """The optimizer of all its tables."""
        return self.placements[0].table.optimizer

    @property
    def quantization(self) -> Quantization | None:
        """The quantization of all its tables."""
        return self.placements[0].table.quantization

    @property
    def rows(self) -> int:
        """stack_vocab_size: local rows over all shards."""
        return sum(each.padded_rows for each in self.placements)

    @property
    def rows_per_shard(self) -> int:
        """R: local rows of one shard."""
        return self.rows // self.cores.count

    @property
    def samples(self) -> int:
        """total_sample_count: global samples of all its features."""
        return sum(each.feature.samples for each in self.features)

    @property
    def samples_per_core(self) -> int:
        """B: stacked samples of one SparseCore."""
        return self.samples // self.cores.count

    @property
    def stored_bytes(self) -> int:
        """Bytes of the stored table over all shards, without optimizer slots. Counted in Python integers."""
        return self.rows // self.pack * self.stored_dim * FLOAT_BYTES

    def table_bytes(self, placement: Placement) -> int:
        """Bytes that one of its tables takes, padding included."""
        return placement.padded_rows // self.pack * self.stored_dim * FLOAT_BYTES

    def waste(self, placement: Placement) -> float:
        """Share of a table's bytes that hold no value of it, from 0 to 1."""
        return 1.0 - placement.table.rows * placement.table.dim * FLOAT_BYTES / self.table_bytes(placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPlan:
    """All stacks of a job. Stack names and table names are unique."""

    cores: Cores
    stacks: tuple[Stack, ...]

    def stack(self, name: str) -> Stack:
        """Return the stack of that name."""
        return next(each for each in self.stacks if each.name == name)

    def of_table(self, table: str) -> tuple[Stack, Placement]:
        """Return the stack that holds a table, and where in it."""
        return next((stack, each) for stack in self.stacks for each in stack.placements if each.table.name == table)

    def of_feature(self, feature: str) -> tuple[Stack, FeaturePlace]:
        """Return the stack that a feature reads, and where its samples lie."""
        return next((stack, each) for stack in self.stacks for each in stack.features if each.feature.name == feature)

    def with_limits(self, limits: Mapping[str, Limits], buffers: Mapping[str, int] | None = None) -> StackPlan:
        """Return this plan with other limits, and buffers, for the stacks that are named.

        Raises:
            SpecError: no stack has such a name.
        """
        known = [each.name for each in self.stacks]
        unknown = sorted({*limits, *(buffers or {})} - set(known))
        if unknown:
            raise SpecError(
                f"limits for {unknown[0]!r}, which is no stack", remedy=f"limits go by stack: {', '.join(known)}"
            )
        stacks = (
            replace(each, limits=limits.get(each.name, each.limits), buffer=(buffers or {}).get(each.name, each.buffer))
            for each in self.stacks
        )
        return replace(self, stacks=tuple(stacks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacking:
    """How tables are put together."""

    disable_table_stacking: bool = False
    """Every table is a stack of its own."""
    groups: tuple[tuple[str, ...], ...] | None = None
    """Manual: tables by name, which may differ in width; tables in no group stay alone. None: automatic."""
    activation_limit: int = ACTIVATION_LIMIT
    """Bytes of activations per SparseCore that tables of one automatic stack may take together."""
    rotation: int | None = None
    """Shards from one table of a stack to the next; None: the SparseCores of a device."""
    pack_narrow: bool = True
    """Tables of width 1 to 7 share stored rows. Off, each row is padded to 8 columns as in jax-tpu-embedding."""
    max_ids_per_chip_per_sample: int | None = None
    """Sizes the COO buffers: so many ids per sample of a device; None: what the limits can need."""


def plan_stacks(
    tables: Sequence[Table], features: Sequence[Feature], cores: Cores, how: Stacking | None = None
) -> StackPlan:
    """Lay out tables and features.

    Args:
        tables: in any order; each must be read by a feature.
        features: their order decides the order of tables within stacks, and of samples.
        cores: of the whole job.
        how: automatic stacking if None.

    Raises:
        SpecError: names are not unique, a feature has no table or a table no feature, samples do not divide by the
            SparseCores, a group mixes what cannot be mixed, or a stack is larger than its ids can name.
    """
    how = how or Stacking()
    by_name = _checked(tables, features, cores)
    ordered = list(dict.fromkeys(each.table for each in features))
    stacks = []
    for group, alone in _groups(ordered, by_name, features, cores, how):
        members = [each for each in features if each.table in group]
        if alone:  # jax-tpu-embedding orders the features of a table that is not stacked by name
            members.sort(key=lambda each: each.name)
        stacks.append(_stack(group, by_name, members, cores, how))
    names = [each.name for each in stacks]
    for name in names:
        if names.count(name) > 1:
            raise SpecError(f"two stacks are named {name!r}", remedy="rename one of their tables")
    return StackPlan(cores=cores, stacks=tuple(stacks))


def _checked(tables: Sequence[Table], features: Sequence[Feature], cores: Cores) -> dict[str, Table]:
    for what, names in (("table", [each.name for each in tables]), ("feature", [each.name for each in features])):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SpecError(f"two {what}s are named {twice[0]!r}", remedy=f"give each {what} a name of its own")
    by_name = {each.name: each for each in tables}
    for feature in features:
        if feature.table not in by_name:
            raise SpecError(
                f"feature {feature.name!r} reads the table {feature.table!r}, which is not declared",
                remedy=f"declare it, or use one of {', '.join(sorted(by_name))}",
            )
        if feature.samples % cores.count:
            least = -(-feature.samples // cores.count) * cores.count
            raise SpecError(
                f"feature {feature.name!r} has {feature.samples} samples, which do not divide by "
                f"{cores.count} SparseCores",
                remedy=f"pad the batch with empty samples to {least}",
            )
    unread = sorted(set(by_name) - {each.table for each in features})
    if unread:
        raise SpecError(f"no feature reads the table {unread[0]!r}", remedy="remove it, or give it a feature")
    return by_name


def pack_of(dim: int, how: Stacking) -> int:
    """Return how many rows of a narrow table share a stored row: the fewest with which padding is under a quarter."""
    if not how.pack_narrow or dim > MAX_PACKED_WIDTH:
        return 1
    return next(pack for pack in range(1, ROW_ALIGN + 1) if pack * dim > (1 - MOST_WASTE) * _up(pack * dim, ROW_ALIGN))


def _groups(
    ordered: list[str], by_name: Mapping[str, Table], features: Sequence[Feature], cores: Cores, how: Stacking
) -> Iterable[tuple[tuple[str, ...], bool]]:
    """Give each stack's tables, and whether it is a table that is not to be stacked."""
    if how.disable_table_stacking:
        return [((name,), True) for name in ordered]
    if how.groups is not None:
        _check_groups(how.groups, by_name)
        grouped = {name for group in how.groups for name in group}
        return [
            *((group, False) for group in how.groups),
            *(((name,), True) for name in ordered if name not in grouped),
        ]
    return [(group, False) for group in _automatic(ordered, by_name, features, cores, how)]


def _automatic(
    ordered: list[str], by_name: Mapping[str, Table], features: Sequence[Feature], cores: Cores, how: Stacking
) -> list[tuple[str, ...]]:
    """Group by width, optimizer, combiner and quantization; first fit under the limit of activation bytes."""
    alike: dict[Hashable, list[str]] = {}
    for name in ordered:
        table = by_name[name]
        pack = pack_of(table.dim, how)
        width = _up(table.dim, ROW_ALIGN) if pack == 1 else table.dim
        alike.setdefault((width, pack, table.optimizer, table.combiner, table.quantization), []).append(name)
    taken = dict.fromkeys(ordered, 0)
    for feature in features:
        width = _up(by_name[feature.table].dim, ROW_ALIGN)
        taken[feature.table] += feature.samples // cores.count * width * FLOAT_BYTES
    stacks: list[tuple[str, ...]] = []
    for names in alike.values():
        opened: list[list[str]] = []
        for name in names:
            fits = (each for each in opened if sum(taken[it] for it in each) + taken[name] <= how.activation_limit)
            group = next(fits, None)
            if group is None:
                opened.append([name])
            else:
                group.append(name)
        stacks.extend(map(tuple, opened))
    return stacks


def _check_groups(groups: Sequence[Sequence[str]], by_name: Mapping[str, Table]) -> None:
    names = [name for group in groups for name in group]
    for name in names:
        if name not in by_name:
            raise SpecError(
                f"a stack names the table {name!r}, which is not declared",
                remedy=f"use one of {', '.join(sorted(by_name))}",
            )
        if names.count(name) > 1:
            raise SpecError(f"the table {name!r} is in two stacks", remedy="leave it in one")
    for group in groups:
        if not group:
            raise SpecError("a stack without tables", remedy="name its tables, or remove it")
        first = by_name[group[0]]
        for other in (by_name[name] for name in group[1:]):
            for what in ("optimizer", "combiner", "quantization"):
                if getattr(other, what) != getattr(first, what):
                    raise SpecError(
                        f"tables {first.name!r} and {other.name!r} of one stack differ in their {what}: "
                        f"{getattr(first, what)} and {getattr(other, what)}",
                        remedy=f"stack tables of one {what} only",
                    )


def _stack(
    group: Sequence[str], by_name: Mapping[str, Table], features: Sequence[Feature], cores: Cores, how: Stacking
) -> Stack:
    tables = [by_name[name] for name in group]
    widths = {table.dim for table in tables}
    pack = pack_of(tables[0].dim, how) if len(widths) == 1 else 1
    stored = _up(tables[0].dim * pack, ROW_ALIGN) if pack > 1 else max(_up(width, ROW_ALIGN) for width in widths)
    name = stack_name(group)
    turn = cores.per_device if how.rotation is None else how.rotation
    placements: list[Placement] = []
    offset = 0
    for number, table in enumerate(tables):
        padded = _up(table.rows, ROW_ALIGN * cores.count * pack)
        placements.append(
            Placement(
                table=table,
                stack=name,
                padded_rows=padded,
                row_offset=offset,
                rotation=number * turn % cores.count,
                shards=cores.count,
            )
        )
        offset += padded // cores.count
    if offset * cores.count > INT32_MAX:
        raise SpecError(
            f"stack {name!r} has {offset * cores.count} rows, and its ids are int32, up to {INT32_MAX}",
            remedy="put its tables into several stacks, or split the table",
        )
    places, start = [], 0
    for feature in features:
        places.append(FeaturePlace(feature=feature, row_offset=start))
        start += feature.samples
    if start // cores.devices > MAX_SAMPLES_PER_DEVICE:
        raise SpecError(
            f"stack {name!r} has {start // cores.devices} samples on a device, more than {MAX_SAMPLES_PER_DEVICE}",
            remedy="put its tables into several stacks, or use more devices",
        )
    per_sample = how.max_ids_per_chip_per_sample
    return Stack(
        name=name,
        placements=tuple(placements),
        features=tuple(places),
        cores=cores,
        stored_dim=stored,
        pack=pack,
        limits=_together([table.limits for table in tables]),
        buffer=None if per_sample is None else _up(per_sample * (start // cores.devices), ROW_ALIGN * cores.per_device),
    )


def _together(limits: Sequence[Limits | None]) -> Limits | None:
    """Return limits that hold for a stack whatever the rotation: the sums. None if a table has none."""
    given = [each for each in limits if each is not None]
    if len(given) < len(limits):
        return None
    ids, unique = sum(each.max_ids for each in given), sum(each.max_unique for each in given)
    return Limits(max_ids=min(ids, INT32_MAX), max_unique=min(unique, INT32_MAX))


def stack_name(tables: Sequence[str]) -> str:
    """Return a stack's name: its tables', cut and told apart by a hash where that is long."""
    full = "_".join(tables)
    if len(full) <= NAME_SHOWN:
        return full
    return f"{full[:NAME_SHOWN]}...{hashlib.sha256(full.encode()).hexdigest()[:NAME_HASH]}"


def column_transform(placement: Placement, ids: Ids) -> Ids:
    """Return the stacked column of each id, `local row · N + shard`: what jax-tpu-embedding hashes and sorts by."""
    shard, local = placement.locate(ids)
    return np.asarray(local * placement.shards + shard)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
