"""A batch's ids → the padded CSR that SparseCores read, bit for bit that of jax-tpu-embedding where it has the case.

One task per stack, device and source SparseCore: gather its ids, sort them by target and local row, write them out.
Over a limit a batch is split, dropped from, or refused; nothing is ever cut silently.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from twinstep.spec.errors import DataError, SpecError
from twinstep.worker.embedding.sparsecore.inputs import (
    BoundCheck,
    Given,
    Rows,
    check_bound_check,
    hold_to_bounds,
    missing,
    rows_of,
)
from twinstep.worker.embedding.sparsecore.kernels.buckets import BUCKETS
from twinstep.worker.embedding.sparsecore.kernels.columns import (
    O_DROPPED,
    O_END,
    O_OUTSIDE,
    O_OVERFLOW,
    O_REQUIRED,
    S_COMBINER,
    S_MAX_IDS,
    S_MAX_UNIQUE,
    S_SAMPLES,
    S_WEIGHTED,
    SUM,
    T_ENTRIES,
    T_GAINS,
    T_KEPT,
    T_SAMPLES,
    T_STACK,
    T_STALE,
)
from twinstep.worker.embedding.sparsecore.kernels.run import (
    run_arrange,
    run_block_samples,
    run_mark_buckets,
    run_sorted,
    run_split_entries,
    run_whole,
    run_write,
    run_write_block,
    run_write_minibatches,
)
from twinstep.worker.embedding.sparsecore.minibatches import minibatch_of_bucket
from twinstep.worker.embedding.sparsecore.result import Preprocessed, Slabs, Split, Statistics, fresh
from twinstep.worker.embedding.sparsecore.stacking import MAX_SAMPLES_PER_DEVICE, Stack, StackPlan
from twinstep.worker.embedding.sparsecore.tables import Tables, Template, aligned, cores_of, partitions
from twinstep.worker.embedding.sparsecore.workers import Scratch, Workers

LOG = logging.getLogger(__name__)
Array = npt.NDArray[Any]
Agree = Callable[[int, int], int]
"""(number of the question, this host's bits) → the bits of all hosts, ORed. Every host asks in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What to do with what does not fit."""

    id_bound_check: BoundCheck = "error"
    """Ids that are no rows of their table: refuse the batch, drop them, or take them modulo the rows; counted."""
    split: Split = "none"
    """Over a limit: split the batch along the vocabulary, or along samples; else refuse it, unless ids may drop."""
    allow_id_dropping: bool = False
    """Over a limit that no split helps, drop entries, and say how many: those of high local rows go first."""


class Preprocessor:
    """Turns batches into buffers, one batch at a time. Buffers are not written to again while anything holds them.

    Args:
        plan: with limits for every stack.
        local_devices: L, devices of this host; None: all of them.
        policy: what to do with what does not fit.
        threads: of this host's processors; None: all that this process may use.
        agree: how hosts agree on a split; needed where they are several and the split is along the vocabulary.
        quiet: drops are counted and not logged.

    Raises:
        SpecError: a stack has no limits, devices do not fit, or hosts could not agree.
    """

    def __init__(
        self,
        plan: StackPlan,
        *,
        local_devices: int | None = None,
        policy: Policy | None = None,
        threads: int | None = None,
        agree: Agree | None = None,
        quiet: bool = False,
    ) -> None:
        self.plan, self.policy = plan, policy or Policy()
        self.local = plan.cores.devices if local_devices is None else local_devices
        if not 1 <= self.local <= plan.cores.devices:
            raise SpecError(
                f"{self.local} local devices of {plan.cores.devices}", remedy=f"give 1 to {plan.cores.devices}"
            )
        check_bound_check(self.policy.id_bound_check)
        if self.policy.split == "vocabulary" and agree is None and self.local < plan.cores.devices:
            raise SpecError(
                "hosts must agree on how a batch is split along the vocabulary, and have no way to",
                remedy="give `agree`, or split along samples",
            )
        self._agree = agree or (lambda number, bits: bits)
        self._asked, self._quiet = 0, quiet
        self._template = Template(plan, self.local)
        self._cores = cores_of(plan.cores, self.local)
        self._workers = Workers(threads)
        pooled = BUCKETS if self.policy.split == "vocabulary" else 1  # 64 minibatches at most share the slots
        self._slots = {stack.name: self._slots_of(stack, pooled) for stack in plan.stacks}
        self._slabs, self._whole_shapes = Slabs(), self._shapes(1, self._slots)

    def __call__(self, batch: Mapping[str, Given]) -> Preprocessed:
        """Preprocess one batch of this host.

        Raises:
            DataError: the batch does not fit the declarations, an id is out of range, or a limit does not hold and
                the policy leaves nothing else to do. Nothing is changed then.
        """
        rows = self.rows(batch)
        kept = self.policy.split == "vocabulary"
        tables, memory, outside = self._first_pass(rows, kept=kept)
        if not kept:
            blocks, over = memory, self._over(tables)
            if over is None:
                return self._result((blocks,), 1, "none", tables, outside)
            if self.policy.split == "samples":
                return self._by_samples(rows, outside)
            self._refuse_or_warn(tables, over)
            return self._result((blocks,), 1, "none", tables, outside)
        mine = any(self._limits_over(tables))
        self._asked += 1
        if not self._agree(2 * self._asked, int(mine)):
            return self._result((self._write_whole(tables, memory),), 1, "none", tables, outside)
        return self._by_vocabulary(tables, memory, outside)

    def close(self) -> None:
        """End the threads."""
        self._workers.close()

    def rows(self, batch: Mapping[str, Given]) -> dict[str, Rows]:
        """Check a batch and return its features as kernels read them.

        Raises:
            DataError: it does not fit the declarations.
        """
        missing(batch, self._template.names)
        share = self.plan.cores.devices
        return {
            place.feature.name: rows_of(
                place.feature.name, batch[place.feature.name], place.feature.samples * self.local // share
            )
            for stack in self.plan.stacks
            for place in stack.features
        }

    # How a batch goes through.

    def _first_pass(self, rows: dict[str, Rows], *, kept: bool) -> tuple[Tables, Any, dict[str, int]]:
        """Sort, and write unless entries are kept; mend or refuse ids out of range."""
        run = self._sorted if kept else self._whole
        tables, memory = run(rows)
        if not tables.found[:, O_OUTSIDE].any():
            return tables, memory, {}
        outside = {}
        for name, each in rows.items():
            _, placement = self.plan.of_table(self.plan.of_feature(name)[1].feature.table)
            table, check = placement.table, self.policy.id_bound_check
            rows[name], count = hold_to_bounds(name, each, table.name, table.rows, check)
            if count:
                outside[name] = count
        tables, memory = run(rows)
        return tables, memory, outside

    def _whole(self, rows: Mapping[str, Rows]) -> tuple[Tables, Any]:
        tables = self._template.fill(rows, kept=False)
        slab, tables.tasks[:, T_STALE] = self._slabs.take(self._whole_shapes, len(tables.tasks))
        buffers = slab.buffers()
        self._template.set_buffers(tables, buffers, pooled=False)
        most = int(tables.tasks[:, T_ENTRIES].max())
        gained = max(most, int(tables.stacks[:, S_SAMPLES].max())) if self._any_gains(tables) else 1
        weighted = most if tables.stacks[:, S_WEIGHTED].any() else 1

        def work(turns: Array, scratch: Scratch) -> None:
            own = (
                scratch.take("entries", np.uint64, most),
                scratch.take("gains", np.float32, gained),
                scratch.take("samples", np.int32, weighted),
            )
            spare = scratch.take("spare", np.uint64, most)
            run_whole(turns, tables.given, self._cores, own, spare, scratch.counts, tables.out)

        self._workers.run(self._workers.share(tables.tasks[:, T_ENTRIES]), work)
        if not tables.found[:, O_OUTSIDE].any():
            slab.written = tables.found[:, O_END].copy()
        return tables, buffers

    def _sorted(self, rows: Mapping[str, Rows]) -> tuple[Tables, Any]:
        tables = self._template.fill(rows, kept=True)
        last = tables.tasks[-1]
        scratch = self._workers.scratch[0]
        extra = int(last[T_ENTRIES]) + int(tables.stacks[:, S_SAMPLES].max())
        kept = (
            scratch.take("kept", np.uint64, int(last[T_KEPT]) + extra),
            scratch.take("kept gains", np.float32, int(last[T_GAINS]) + extra),
            scratch.take("kept samples", np.int32, int(last[T_SAMPLES]) + extra),
        )
        most = int(tables.tasks[:, T_ENTRIES].max())

        def work(turns: Array, own: Scratch) -> None:
            spare = own.take("spare", np.uint64, most)
            run_sorted(turns, tables.given, self._cores, kept, spare, own.counts, tables.out)

        self._workers.run(self._workers.share(tables.tasks[:, T_ENTRIES]), work)
        return tables, kept

    def _write_whole(self, tables: Tables, kept: Any) -> Any:
        """Write what is kept as one minibatch, the SparseCores of a device one after another."""
        buffers = fresh(self._shapes(BUCKETS, self._slots))
        self._template.set_buffers(tables, buffers, pooled=True)
        self._template.set_begins(tables, tables.found[:, O_REQUIRED], ends=True)
        self._workers.run(
            self._workers.share(tables.tasks[:, T_ENTRIES]),
            lambda turns, _: run_write(turns, tables.given, self._cores, kept, tables.out),
        )
        self._check_overflow(tables)
        return buffers

    def _by_vocabulary(self, tables: Tables, kept: Any, outside: dict[str, int]) -> Preprocessed:
        most, tasks = int(tables.tasks[:, T_ENTRIES].max()), len(tables.tasks)
        if most > MAX_SAMPLES_PER_DEVICE and tables.stacks[:, S_WEIGHTED].any():  # places of arrival, beside a bucket
            raise DataError(
                f"a SparseCore asks for {most} ids with weights, and {MAX_SAMPLES_PER_DEVICE} can be split",
                remedy="give smaller batches, or split along samples",
            )
        masks = np.zeros(tasks, np.uint64), np.zeros((tasks, 4), np.int64)
        shares = self._workers.share(tables.tasks[:, T_ENTRIES])

        def mark(turns: Array, own: Scratch) -> None:
            columns = own.take("spare", np.uint64, most)
            run_mark_buckets(turns, tables.given, self._cores, kept, columns, tables.out, masks)

        self._workers.run(shares, mark)
        mask = int(np.bitwise_or.reduce(masks[0]))
        minibatch = minibatch_of_bucket(self._agree(2 * self._asked + 1, mask))
        count = int(minibatch[-1]) + 1
        if tables.found[:, O_DROPPED].any() and not self.policy.allow_id_dropping:
            raise self._bucket_error(tables, masks[1])
        required = np.empty(tasks, np.int64)

        def place(turns: Array, own: Scratch) -> None:
            spare = own.take("spare", np.uint64, most)
            run_arrange(turns, tables.given, self._cores, kept, spare, tables.out, minibatch, required)

        self._workers.run(shares, place)
        buffers = fresh(self._shapes(BUCKETS, self._slots))
        self._template.set_buffers(tables, buffers, pooled=True)
        self._template.set_begins(tables, required, ends=False)
        self._workers.run(
            shares,
            lambda turns, _: run_write_minibatches(
                turns, tables.given, self._cores, kept, tables.out, minibatch, count
            ),
        )
        self._check_overflow(tables)
        return self._result((buffers,), count, "vocabulary", tables, outside)

    def _by_samples(self, rows: Mapping[str, Rows], outside: dict[str, int]) -> Preprocessed:
        tables, kept = self._sorted(rows)
        most, widest = int(tables.tasks[:, T_ENTRIES].max()), int(tables.stacks[:, S_SAMPLES].max())
        blocks = np.zeros((len(tables.tasks), widest), np.int32)
        found = np.zeros(len(tables.tasks), np.int64)
        shares = self._workers.share(tables.tasks[:, T_ENTRIES])

        def cut(turns: Array, own: Scratch) -> None:
            spare = own.take("arrivals", np.int64, 2 * most)[: 2 * most].reshape(2, most)
            run_block_samples(turns, tables.given, self._cores, kept, spare, tables.out, blocks, found)

        self._workers.run(shares, cut)
        if found.min() < 0:
            raise self._sample_error(tables, found)
        count = int(found.max())
        edges = np.zeros((len(tables.tasks), count + 1), np.int64)

        def split(turns: Array, own: Scratch) -> None:
            spare = own.take("spare", np.uint64, most)
            run_split_entries(turns, tables.given, kept, spare, blocks, count, edges, tables.out)

        self._workers.run(shares, split)
        whole = replace(tables, ids=tables.ids.copy(), unique=tables.unique.copy(), found=tables.found.copy())
        written = []
        for block in range(count):
            buffers = fresh(self._shapes(1, self._slots))
            self._template.set_buffers(tables, buffers, pooled=False)
            self._workers.run(
                shares,
                lambda turns, _, at=block: run_write_block(  # type: ignore[misc]
                    turns, tables.given, self._cores, kept, edges, at, tables.out
                ),
            )
            self._check_overflow(tables)
            whole.found[:, O_DROPPED] += tables.found[:, O_DROPPED]
            written.append(buffers)
        return self._result(tuple(written), 1, "samples", whole, outside)

    # Sizes.

    def _slots_of(self, stack: Stack, minibatches: int) -> int:
        """Slots of one device's buffers: as asked for, at most what the limits can need."""
        per_device = self.plan.cores.per_device
        most = aligned(stack.held_to.max_ids) * per_device * self.plan.cores.count * minibatches
        if stack.buffer is None:
            return most
        asked = -(-stack.buffer // (8 * per_device)) * 8 * per_device
        if asked > most:
            LOG.warning(
                "stack %r asks for %d slots and its limits need %d at most; it gets these", stack.name, asked, most
            )
        return min(asked, most)

    def _shapes(self, minibatches: int, slots: Mapping[str, int]) -> dict[str, Any]:
        pointers = partitions(self.plan.cores.count) * minibatches * self.plan.cores.per_device
        return {name: ((self.local, pointers), (self.local, count)) for name, count in slots.items()}

    @staticmethod
    def _any_gains(tables: Tables) -> bool:
        return bool(((tables.stacks[:, S_WEIGHTED] != 0) | (tables.stacks[:, S_COMBINER] != SUM)).any())

    # What did not fit.

    def _limits_over(self, tables: Tables) -> list[bool]:
        """Return for each task whether a partition is over a limit."""
        ids = tables.stacks[tables.tasks[:, T_STACK], S_MAX_IDS]
        unique = tables.stacks[tables.tasks[:, T_STACK], S_MAX_UNIQUE]
        over = (tables.ids.max(axis=1) > ids) | (tables.unique.max(axis=1) > unique)
        return list(over.tolist())

    def _over(self, tables: Tables) -> DataError | None:
        """Return what is over a limit, or over its buffer; None if all fits."""
        if not tables.found[:, O_DROPPED].any():
            return None
        limits = self._limits_over(tables)
        if any(limits):
            return self._limit_error(tables, limits.index(True))
        return self._overflow_error(tables)

    def _refuse_or_warn(self, tables: Tables, over: DataError) -> None:
        if not self.policy.allow_id_dropping:
            raise over
        if not self._quiet:
            LOG.warning("%d ids dropped: %s", int(tables.found[:, O_DROPPED].sum()), over.problem)

    def _check_overflow(self, tables: Tables) -> None:
        if tables.found[:, O_OVERFLOW].any():
            self._refuse_or_warn(tables, self._overflow_error(tables))

    def _place(self, tables: Tables, task: int) -> tuple[Stack, str]:
        stack = self.plan.stacks[int(tables.tasks[task, T_STACK])]
        names = ", ".join(repr(each.table.name) for each in stack.placements)
        core = task % self._cores[3]
        where = f"stack {stack.name!r} (tables {names}), SparseCore {core % self._cores[2]} of local device "
        return stack, where + str(core // self._cores[2])

    def _limit_error(self, tables: Tables, task: int) -> DataError:
        stack, where = self._place(tables, task)
        limits = stack.held_to
        mine = tables.tasks[:, T_STACK] == tables.tasks[task, T_STACK]
        need = f"max_ids {tables.ids[mine].max()} and max_unique {tables.unique[mine].max()}"
        what, found, allowed = "ids", tables.ids, limits.max_ids
        if found[task].max() <= allowed:
            what, found, allowed = "unique ids", tables.unique, limits.max_unique
        worst = int(found[task].argmax())
        return DataError(
            f"{where} asks for {found[task, worst]} {what} of partition {worst}, and {allowed} are allowed",
            remedy=f"allow {need}, which this batch needs, or split batches, or let ids drop",
        )

    def _overflow_error(self, tables: Tables) -> DataError:
        task = int(np.argmax(tables.found[:, O_OVERFLOW]))
        stack, where = self._place(tables, task)
        mine = tables.tasks[:, T_STACK] == tables.tasks[task, T_STACK]
        need = int(tables.found[mine, O_REQUIRED].max()) * self._cores[2]
        return DataError(
            f"{where} needs {tables.found[task, O_REQUIRED]} slots, a device's buffer has {self._slots[stack.name]}",
            remedy=f"give it a buffer of {need} slots, or none, or let ids drop",
        )

    def _bucket_error(self, tables: Tables, first: Array) -> DataError:
        task = int(np.flatnonzero(tables.found[:, O_DROPPED])[0])
        shard, _, ids, unique = first[task].tolist()
        stack, where = self._place(tables, task)
        limits = stack.held_to
        return DataError(
            f"{where} asks for {ids} ids, {unique} of them different, of partition {shard} in one bucket of the "
            f"vocabulary, which no split parts; {limits.max_ids} and {limits.max_unique} are allowed",
            remedy="split along samples, raise the limits, or let ids drop",
        )

    def _sample_error(self, tables: Tables, found: Array) -> DataError:
        task = int(np.argmin(found))
        stack, where = self._place(tables, task)
        limits = stack.held_to
        return DataError(
            f"{where}: stacked sample {-1 - int(found[task])} alone asks for more of one partition than is allowed, "
            f"{limits.max_ids} ids and {limits.max_unique} different ones",
            remedy="raise the limits, or shorten the sample",
        )

    def _result(self, blocks: Any, count: int, split: Split, tables: Tables, outside: dict[str, int]) -> Preprocessed:
        names = [stack.name for stack in self.plan.stacks]
        shape = (len(names), self.local, self._cores[2], -1)
        ids, unique = (each.reshape(shape).max(axis=2).reshape(len(names), -1) for each in (tables.ids, tables.unique))
        required = tables.found[:, O_REQUIRED].reshape(len(names), -1)
        dropped = tables.found[:, O_DROPPED].reshape(len(names), -1).sum(axis=1)
        statistics = Statistics(
            dict(zip(names, ids, strict=True)),
            dict(zip(names, unique, strict=True)),
            dict(zip(names, required, strict=True)),
            dict(zip(names, dropped.tolist(), strict=True)),
            outside,
        )
        return Preprocessed(blocks, count, split, statistics)
