"""The integer tables that describe one batch to the kernels: what is the same for every batch, and what is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from twinstep.worker.embedding.sparsecore.inputs import Rows
from twinstep.worker.embedding.sparsecore.kernels.columns import (
    ALIGN,
    F_BASE,
    F_IDS,
    F_OFFSETS,
    F_ROTATION,
    F_ROW_OFFSET,
    F_ROWS,
    F_RUN,
    F_WEIGHTS,
    F_WIDE,
    F_WIDTH,
    FEATURE_COLUMNS,
    FOUND_COLUMNS,
    MIN_PARTITIONS,
    S_COMBINER,
    S_EMBEDDINGS,
    S_FIRST,
    S_GAINS,
    S_KEY_BITS,
    S_LAST,
    S_MAX_IDS,
    S_MAX_UNIQUE,
    S_POINTER_COUNT,
    S_POINTERS,
    S_SAMPLE_IDS,
    S_SAMPLES,
    S_SHARD_ROWS,
    S_SLOTS,
    S_WEIGHTED,
    STACK_COLUMNS,
    SUM,
    T_BEGIN,
    T_CORE,
    T_DEVICE,
    T_END,
    T_ENTRIES,
    T_GAINS,
    T_KEPT,
    T_ORIGIN,
    T_SAMPLES,
    T_STACK,
    TASK_COLUMNS,
)
from twinstep.worker.embedding.sparsecore.result import Buffers
from twinstep.worker.embedding.sparsecore.spec import COMBINERS, Cores
from twinstep.worker.embedding.sparsecore.stacking import StackPlan

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """One batch: features [F, FEATURE_COLUMNS], stacks [K, STACK_COLUMNS], tasks [T, TASK_COLUMNS]; and results.

    Tasks are by stack, local device, SparseCore.
    """

    features: Array
    stacks: Array
    tasks: Array
    ids: Array
    """int32 [T, N]: ids per target."""
    unique: Array
    found: Array
    """int64 [T, FOUND_COLUMNS]."""

    @property
    def given(self) -> tuple[Array, Array, Array]:
        """What kernels read."""
        return self.features, self.stacks, self.tasks

    @property
    def out(self) -> tuple[Array, Array, Array]:
        """What kernels write."""
        return self.ids, self.unique, self.found


def cores_of(cores: Cores, local: int) -> tuple[int, int, int, int]:
    """Return (N, log2 N or −1, SparseCores of a device, SparseCores of this host)."""
    count = cores.count
    shift = count.bit_length() - 1 if count & (count - 1) == 0 else -1
    return count, shift, cores.per_device, local * cores.per_device


class Template:
    """Tables of one plan, less what comes with a batch."""

    def __init__(self, plan: StackPlan, local: int) -> None:
        self.plan, self.local = plan, local
        self.names = [place.feature.name for stack in plan.stacks for place in stack.features]
        shards, source = plan.cores.count, local * plan.cores.per_device
        features: list[list[int]] = []
        stacks = np.zeros((len(plan.stacks), STACK_COLUMNS), np.int64)
        for number, stack in enumerate(plan.stacks):
            row = stacks[number]
            row[S_FIRST] = len(features)
            for place in stack.features:
                _, placement = plan.of_table(place.feature.table)
                line = [0] * FEATURE_COLUMNS
                line[F_RUN], line[F_BASE] = place.feature.samples // shards, place.row_offset // shards
                line[F_ROWS] = placement.table.rows
                line[F_ROTATION], line[F_ROW_OFFSET] = placement.rotation, placement.row_offset
                features.append(line)
            row[S_LAST] = len(features)
            row[S_SHARD_ROWS], row[S_KEY_BITS] = stack.rows_per_shard, (stack.rows - 1).bit_length()
            row[S_SAMPLES], row[S_COMBINER] = stack.samples_per_core, COMBINERS.index(stack.combiner)
            row[S_MAX_IDS], row[S_MAX_UNIQUE] = stack.held_to.max_ids, stack.held_to.max_unique
        self._features, self._stacks = np.array(features, np.int64), stacks
        tasks = np.zeros((len(plan.stacks) * source, TASK_COLUMNS), np.int64)
        tasks[:, T_STACK] = np.repeat(np.arange(len(plan.stacks)), source)
        tasks[:, T_CORE] = np.tile(np.arange(source), len(plan.stacks))
        tasks[:, T_DEVICE] = tasks[:, T_CORE] // plan.cores.per_device
        self._tasks = tasks
        self._spans = [slice(int(row[S_FIRST]), int(row[S_LAST])) for row in stacks]

    def fill(self, batch: Mapping[str, Rows], *, kept: bool) -> Tables:
        """Return the tables of a batch, without buffers.

        Args:
            batch: every feature's ids. Whoever calls keeps them alive.
            kept: each task has a stretch of its own in what is kept, and none shares one.
        """
        source, shards = self.local * self.plan.cores.per_device, self.plan.cores.count
        features, stacks, tasks = self._features.copy(), self._stacks.copy(), self._tasks.copy()
        entries = np.zeros((len(features), source), np.int64)
        for number, name in enumerate(self.names):
            rows, line = batch[name], features[number]
            line[F_IDS], line[F_WIDE] = rows.ids.ctypes.data, rows.ids.dtype == np.int64
            line[F_WIDTH] = rows.width
            run = int(line[F_RUN])
            if rows.offsets is None:
                entries[number] = run * rows.width
            else:
                line[F_OFFSETS] = rows.offsets.ctypes.data
                entries[number] = np.diff(rows.offsets[::run])
            if rows.weights is not None:
                line[F_WEIGHTS] = rows.weights.ctypes.data
        totals = np.stack([entries[span].sum(axis=0) for span in self._spans])
        stacks[:, S_WEIGHTED] = [(features[span, F_WEIGHTS] != 0).any() for span in self._spans]
        tasks[:, T_ENTRIES] = totals.reshape(-1)
        if kept:
            of, count = tasks[:, T_STACK], tasks[:, T_ENTRIES]
            weighted, plain = stacks[of, S_WEIGHTED] != 0, stacks[of, S_COMBINER] == SUM
            gained = np.where(weighted, count, np.where(plain, 0, stacks[of, S_SAMPLES]))
            for column, sizes in ((T_KEPT, count), (T_GAINS, gained), (T_SAMPLES, np.where(weighted, count, 0))):
                tasks[1:, column] = np.cumsum(sizes)[:-1]
        return Tables(
            features,
            stacks,
            tasks,
            np.zeros((len(tasks), shards), np.int32),
            np.zeros((len(tasks), shards), np.int32),
            np.zeros((len(tasks), FOUND_COLUMNS), np.int64),
        )

    def set_buffers(self, tables: Tables, buffers: Mapping[str, Buffers], *, pooled: bool) -> None:
        """Say where results go.

        Args:
            tables: of a batch.
            buffers: by stack, zeroed.
            pooled: a device's SparseCores share its slots, one after another, as their required slots say; else each
                has an equal part, and row pointers count from where it begins.
        """
        per_device = self.plan.cores.per_device
        for number, stack in enumerate(self.plan.stacks):
            mine, row = buffers[stack.name], tables.stacks[number]
            row[S_SLOTS], row[S_POINTER_COUNT] = mine.embedding_ids.shape[1], mine.row_pointers.shape[1]
            row[S_POINTERS], row[S_EMBEDDINGS] = mine.row_pointers.ctypes.data, mine.embedding_ids.ctypes.data
            row[S_SAMPLE_IDS], row[S_GAINS] = mine.sample_ids.ctypes.data, mine.gains.ctypes.data
        slots = tables.stacks[tables.tasks[:, T_STACK], S_SLOTS]
        if not pooled:
            within = tables.tasks[:, T_CORE] % per_device
            tables.tasks[:, T_BEGIN] = within * slots // per_device
            tables.tasks[:, T_END] = (within + 1) * slots // per_device
            tables.tasks[:, T_ORIGIN] = tables.tasks[:, T_BEGIN]
        else:
            tables.tasks[:, T_END], tables.tasks[:, T_ORIGIN] = slots, 0

    def set_begins(self, tables: Tables, sizes: Array, *, ends: bool) -> None:
        """Let the SparseCores of a device begin one after another; `sizes` is [T], slots of each, aligned.

        Args:
            ends: each ends where the next begins.
        """
        per_device = self.plan.cores.per_device
        before = np.cumsum(sizes.reshape(-1, per_device), axis=1)
        begins = before - sizes.reshape(-1, per_device)
        slots = tables.stacks[tables.tasks[:, T_STACK], S_SLOTS]
        tables.tasks[:, T_BEGIN] = np.minimum(begins.reshape(-1), slots)
        if ends:
            tables.tasks[:, T_END] = np.minimum(before.reshape(-1), slots)


def partitions(shards: int) -> int:
    """P: row pointers of one SparseCore."""
    return max(shards, MIN_PARTITIONS)


def aligned(count: int) -> int:
    """Round up to whole groups of slots."""
    return -(-count // ALIGN) * ALIGN
