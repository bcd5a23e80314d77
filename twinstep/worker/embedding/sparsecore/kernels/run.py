"""What one thread does with its tasks: the doors of the kernels.

Each takes `chosen`, the numbers of its tasks; `tables`, (features, stacks, tasks) as `columns` has them; `cores`,
(N, log2 N or −1, SparseCores of a device, SparseCores of this host); `kept`, (entries uint64, gains float32, samples
int32), where each task has its own stretch; and `out`, (ids [T, N], unique ids [T, N], found [T, FOUND_COLUMNS]).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twinstep.worker.embedding.sparsecore.compiled import kernel
from twinstep.worker.embedding.sparsecore.kernels.blocks import block_samples, in_arrival_order, split_entries
from twinstep.worker.embedding.sparsecore.kernels.buckets import (
    BUCKETS,
    bucket_columns,
    buckets_of,
    count_buckets,
    first_dropped,
    place_buckets,
    required_slots,
    split_mask,
    write_buckets,
)
from twinstep.worker.embedding.sparsecore.kernels.columns import (
    MIN_PARTITIONS,
    O_DROPPED,
    O_ENTRIES,
    O_OUTSIDE,
    S_KEY_BITS,
    S_MAX_IDS,
    S_MAX_UNIQUE,
    S_SLOTS,
    T_BEGIN,
    T_CORE,
    T_DEVICE,
    T_ENTRIES,
    T_GAINS,
    T_KEPT,
    T_SAMPLES,
    T_STACK,
)
from twinstep.worker.embedding.sparsecore.kernels.gather import gather
from twinstep.worker.embedding.sparsecore.kernels.order import order, passes_of
from twinstep.worker.embedding.sparsecore.kernels.write import count, outputs, write


@kernel
def stretches(task: Any, kept: Any) -> Any:
    """Return a task's entries, gains and samples."""
    return kept[0][task[T_KEPT] :], kept[1][task[T_GAINS] :], kept[2][task[T_SAMPLES] :]


@kernel
def sort_task(task: Any, tables: Any, cores: Any, kept: Any, spare: Any, counts: Any) -> Any:
    """Gather a task's entries and sort them; return how many, and how many ids are out of range."""
    shards, shift, _, local = cores
    stack = tables[1][task[T_STACK]]
    entries, gains, samples = stretches(task, kept)
    passes = passes_of(task[T_ENTRIES], stack[S_KEY_BITS])
    first = entries if passes % 2 == 0 else spare
    n, outside = gather(task, stack, tables[0], (shards, shift), local, first, gains, samples)
    if outside == 0:
        order(entries, spare, n, stack[S_KEY_BITS], passes, counts)
    return n, outside


@kernel
def run_whole(chosen: Any, tables: Any, cores: Any, kept: Any, spare: Any, counts: Any, out: Any) -> None:
    """Gather, sort and write each chosen task; all of them may share one stretch.

    `spare` is as many uint64 as the largest task has entries, `counts` int32 [MAX_PASSES, 2 ** MAX_DIGIT].
    """
    for number in chosen:
        task = tables[2][number]
        n, outside = sort_task(task, tables, cores, kept, spare, counts)
        out[2][number, O_OUTSIDE] = outside
        if outside == 0:
            write_one(number, n, tables, cores, kept, out)


@kernel
def write_one(number: int, n: int, tables: Any, cores: Any, kept: Any, out: Any) -> None:
    """Write n sorted entries of a task as the only minibatch."""
    task = tables[2][number]
    entries, gains, samples = stretches(task, kept)
    at = (task[T_CORE] - task[T_DEVICE] * cores[2]) * max(cores[0], MIN_PARTITIONS)
    stack = tables[1][task[T_STACK]]
    write(entries, n, gains, samples, stack, task, at, out[0][number], out[1][number], out[2][number])


@kernel
def run_sorted(chosen: Any, tables: Any, cores: Any, kept: Any, spare: Any, counts: Any, out: Any) -> None:
    """Gather, sort and count each chosen task; entries stay in its stretch."""
    for number in chosen:
        task = tables[2][number]
        n, outside = sort_task(task, tables, cores, kept, spare, counts)
        out[2][number, O_OUTSIDE] = outside
        out[2][number, O_ENTRIES] = n
        if outside == 0:
            entries, _, samples = stretches(task, kept)
            stack = tables[1][task[T_STACK]]
            count(entries, n, samples, stack, out[0][number], out[1][number], out[2][number])


@kernel
def run_write(chosen: Any, tables: Any, cores: Any, kept: Any, out: Any) -> None:
    """Write what `run_sorted` kept, where T_BEGIN says."""
    for number in chosen:
        write_one(number, out[2][number, O_ENTRIES], tables, cores, kept, out)


@kernel
def run_count_buckets(
    chosen: Any, tables: Any, cores: Any, kept: Any, columns: Any, buckets: Any, out: Any, sizes: Any, masks: Any
) -> None:
    """Hash what `run_sorted` kept, count it by bucket, and find where it must be split.

    Args:
        columns: uint64 scratch of the largest task.
        buckets: uint8, laid out as the entries: of each task's different keys in order.
        out: O_DROPPED is what limits drop of a bucket that no split parts.
        sizes: int32 [T, 64, N] of zeros: what limits leave of each bucket and partition.
        masks: (uint64 [T] of `split_mask`, int64 [T, 4] of `first_dropped`), to be written.
    """
    ids, unique = np.empty((BUCKETS, cores[0]), np.int32), np.empty((BUCKETS, cores[0]), np.int32)
    level = np.empty((BUCKETS, cores[0]), np.int32)
    for number in chosen:
        task = tables[2][number]
        stack = tables[1][task[T_STACK]]
        entries, gains, samples = stretches(task, kept)
        n = out[2][number, O_ENTRIES]
        mine = buckets[task[T_KEPT] :]
        buckets_of(columns, bucket_columns(entries, n, stack, cores[0], columns), mine)
        ids[:] = 0
        unique[:] = 0
        dropped = count_buckets(entries, n, stack, mine, gains, samples, ids, unique, sizes[number])
        masks[0][number] = split_mask(ids, stack[S_MAX_IDS], level) | split_mask(unique, stack[S_MAX_UNIQUE], level)
        out[2][number, O_DROPPED] = dropped
        if dropped:
            first_dropped(ids, unique, sizes[number], masks[1][number])


@kernel
def run_require_buckets(chosen: Any, sizes: Any, minibatch: Any, minibatches: int, required: Any) -> None:
    """Write to `required`, int64 [T], the slots that each chosen task needs in so many minibatches."""
    sums = np.empty(sizes.shape[2], np.int32)
    for number in chosen:
        required[number] = required_slots(sizes[number], minibatch, minibatches, sums)


@kernel
def run_write_buckets(
    chosen: Any,
    tables: Any,
    cores: Any,
    kept: Any,
    buckets: Any,
    out: Any,
    kept_sizes: Any,
    minibatch: Any,
    minibatches: int,
) -> None:
    """Write what `run_sorted` kept as minibatches along the vocabulary; T_BEGIN is a task's first slot."""
    shards = cores[0]
    places = np.empty((BUCKETS, shards), np.int64)
    ids, unique = np.empty((BUCKETS, shards), np.int32), np.empty((BUCKETS, shards), np.int32)
    for number in chosen:
        task = tables[2][number]
        stack = tables[1][task[T_STACK]]
        entries, gains, samples = stretches(task, kept)
        at = (task[T_CORE] - task[T_DEVICE] * cores[2]) * max(shards, MIN_PARTITIONS) * minibatches
        outs = outputs(stack, task[T_DEVICE])
        place_buckets(kept_sizes[number], minibatch, minibatches, task[T_BEGIN], stack[S_SLOTS], outs, at, places)
        ids[:] = 0
        unique[:] = 0
        n, mine = out[2][number, O_ENTRIES], buckets[task[T_KEPT] :]
        write_buckets(entries, n, gains, samples, stack, task, mine, ids, unique, places, out[2][number])


@kernel
def run_block_samples(
    chosen: Any, tables: Any, cores: Any, kept: Any, spare: Any, out: Any, blocks: Any, found: Any
) -> None:
    """Cut each chosen task's stacked samples into blocks that fit the limits.

    Args:
        spare: int64 scratch, [2, entries of the largest task].
        blocks: int32 [T, most samples], to be written: the block of each stacked sample.
        found: int64 [T], to be written: how many blocks, or −1 − sample where one sample alone is over a limit.
    """
    for number in chosen:
        task = tables[2][number]
        stack = tables[1][task[T_STACK]]
        entries, gains, samples = stretches(task, kept)
        total, different = in_arrival_order(entries, out[2][number, O_ENTRIES], stack, gains, samples, spare)
        found[number] = block_samples(spare, total, different, stack, cores[0], blocks[number])


@kernel
def run_split_entries(
    chosen: Any, tables: Any, kept: Any, spare: Any, blocks: Any, count: int, edges: Any, out: Any
) -> None:
    """Reorder each task's kept entries by block, stably; `edges` is int64 [T, count + 1], where blocks begin."""
    for number in chosen:
        task = tables[2][number]
        stack = tables[1][task[T_STACK]]
        entries, gains, samples = stretches(task, kept)
        n = out[2][number, O_ENTRIES]
        split_entries(entries, n, stack, gains, samples, spare, blocks[number], count, edges[number])


@kernel
def run_write_block(chosen: Any, tables: Any, cores: Any, kept: Any, edges: Any, block: int, out: Any) -> None:
    """Write one block of each chosen task as a batch of its own."""
    for number in chosen:
        task = tables[2][number]
        low, high = edges[number, block], edges[number, block + 1]
        _, gains, samples = stretches(task, kept)
        at = (task[T_CORE] - task[T_DEVICE] * cores[2]) * max(cores[0], MIN_PARTITIONS)
        entries = kept[0][task[T_KEPT] + low :]
        stack = tables[1][task[T_STACK]]
        write(entries, high - low, gains, samples, stack, task, at, out[0][number], out[1][number], out[2][number])
