"""What one thread does with its tasks: the doors of the kernels.

Each takes `turns`, from which threads take runs of tasks one after another (`claim`); `tables`, (features, stacks,
tasks) as `columns` has them; `cores`, (N, log2 N or −1, SparseCores of a device, SparseCores of this host); `kept`,
(entries uint64, gains float32, samples int32), where each task has its own stretch; and `out`, (ids [T, N], unique ids
[T, N], found [T, FOUND_COLUMNS]).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twinstep.worker.embedding.sparsecore.compiled import fetch_add, kernel
from twinstep.worker.embedding.sparsecore.kernels.blocks import block_samples, in_arrival_order, split_entries
from twinstep.worker.embedding.sparsecore.kernels.buckets import (
    BUCKETS,
    bucket_columns,
    buckets_of,
    first_over,
    mark_buckets,
    split_mask,
)
from twinstep.worker.embedding.sparsecore.kernels.columns import (
    MIN_PARTITIONS,
    O_DROPPED,
    O_ENTRIES,
    O_OUTSIDE,
    S_KEY_BITS,
    S_MAX_IDS,
    S_MAX_UNIQUE,
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
from twinstep.worker.embedding.sparsecore.kernels.vocabulary import arrange, required_slots, write_minibatches
from twinstep.worker.embedding.sparsecore.kernels.write import count, write


@kernel
def claim(turns: Any) -> Any:
    """Take the next run of tasks that no thread has taken; return (first, past the last), both 0 if none is left.

    Args:
        turns: int64: how many were taken, then where each run begins, and where the last one ends.
    """
    at = fetch_add(turns.ctypes.data)
    if at + 2 >= len(turns):
        return 0, 0
    return turns[at + 1], turns[at + 2]


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
def run_whole(turns: Any, tables: Any, cores: Any, kept: Any, spare: Any, counts: Any, out: Any) -> None:
    """Gather, sort and write each task; all of them may share one stretch.

    `spare` is as many uint64 as the largest task has entries, `counts` int32 [MAX_PASSES, 2 ** MAX_DIGIT].
    """
    low, high = claim(turns)
    while low < high:
        for number in range(low, high):
            task = tables[2][number]
            n, outside = sort_task(task, tables, cores, kept, spare, counts)
            out[2][number, O_OUTSIDE] = outside
            if outside == 0:
                write_one(number, n, tables, cores, kept, out)
        low, high = claim(turns)


@kernel
def write_one(number: int, n: int, tables: Any, cores: Any, kept: Any, out: Any) -> None:
    """Write n sorted entries of a task as the only minibatch."""
    task = tables[2][number]
    entries, gains, samples = stretches(task, kept)
    at = (task[T_CORE] - task[T_DEVICE] * cores[2]) * max(cores[0], MIN_PARTITIONS)
    stack = tables[1][task[T_STACK]]
    write(entries, n, gains, samples, stack, task, at, out[0][number], out[1][number], out[2][number])


@kernel
def run_sorted(turns: Any, tables: Any, cores: Any, kept: Any, spare: Any, counts: Any, out: Any) -> None:
    """Gather, sort and count each task; entries stay in its stretch."""
    low, high = claim(turns)
    while low < high:
        for number in range(low, high):
            task = tables[2][number]
            n, outside = sort_task(task, tables, cores, kept, spare, counts)
            out[2][number, O_OUTSIDE] = outside
            out[2][number, O_ENTRIES] = n
            if outside == 0:
                entries, _, samples = stretches(task, kept)
                stack = tables[1][task[T_STACK]]
                count(entries, n, samples, stack, out[0][number], out[1][number], out[2][number])
        low, high = claim(turns)


@kernel
def run_write(turns: Any, tables: Any, cores: Any, kept: Any, out: Any) -> None:
    """Write what `run_sorted` kept, where T_BEGIN says."""
    low, high = claim(turns)
    while low < high:
        for number in range(low, high):
            write_one(number, out[2][number, O_ENTRIES], tables, cores, kept, out)
        low, high = claim(turns)


@kernel
def run_mark_buckets(turns: Any, tables: Any, cores: Any, kept: Any, columns: Any, out: Any, masks: Any) -> None:
    """Hash what `run_sorted` kept, mark it with its buckets, and find where it must be split.

    Args:
        columns: uint64 scratch of the largest task.
        out: O_DROPPED is 1 where limits drop of a bucket that no split parts.
        masks: (uint64 [T] of `split_mask`, int64 [T, 4] of `first_over`), to be written.
    """
    counts = np.empty((4, BUCKETS, cores[0]), np.int32)
    ids, unique, level = counts[0], counts[1], counts[2:]
    buckets = np.empty(len(columns), np.uint8)
    low, high = claim(turns)
    while low < high:
        for number in range(low, high):
            task = tables[2][number]
            stack = tables[1][task[T_STACK]]
            entries, gains, samples = stretches(task, kept)
            n = out[2][number, O_ENTRIES]
            buckets_of(columns, bucket_columns(entries, n, stack, cores[0], columns), buckets)
            counts[:2] = 0
            mark_buckets(entries, n, stack, buckets, gains, samples, ids, unique)
            mask = split_mask(ids, stack[S_MAX_IDS], level) | split_mask(unique, stack[S_MAX_UNIQUE], level)
            masks[0][number] = mask
            out[2][number, O_DROPPED] = first_over(ids, unique, stack, masks[1][number])
        low, high = claim(turns)


@kernel
def run_arrange(
    turns: Any,
    tables: Any,
    cores: Any,
    kept: Any,
    spare: Any,
    out: Any,
    minibatch: Any,
    required: Any,
) -> None:
    """Arrange what is marked by minibatch; write to `required`, int64 [T], the slots that each task then needs.

    `spare` is as many uint64 as the largest task has entries.
    """
    low, high = claim(turns)
    while low < high:
        for number in range(low, high):
            task = tables[2][number]
            stack = tables[1][task[T_STACK]]
            entries, gains, samples = stretches(task, kept)
            n = out[2][number, O_ENTRIES]
            arrange(entries, n, stack, cores[0], minibatch, spare)
            required[number] = required_slots(entries, n, stack, gains, samples, minibatch)
        low, high = claim(turns)


@kernel
def run_write_minibatches(
    turns: Any, tables: Any, cores: Any, kept: Any, out: Any, minibatch: Any, minibatches: int
) -> None:
    """Write what `run_arrange` arranged; T_BEGIN is a task's first slot."""
    shards = cores[0]
    low, high = claim(turns)
    while low < high:
        for number in range(low, high):
            task = tables[2][number]
            stack = tables[1][task[T_STACK]]
            entries, gains, samples = stretches(task, kept)
            at = (task[T_CORE] - task[T_DEVICE] * cores[2]) * max(shards, MIN_PARTITIONS) * minibatches
            n, found = out[2][number, O_ENTRIES], out[2][number]
            write_minibatches(entries, n, gains, samples, stack, task, at, shards, minibatch, found)
        low, high = claim(turns)


@kernel
def run_block_samples(
    turns: Any, tables: Any, cores: Any, kept: Any, spare: Any, out: Any, blocks: Any, found: Any
) -> None:
    """Cut each task's stacked samples into blocks that fit the limits.

    Args:
        spare: int64 scratch, [2, entries of the largest task].
        blocks: int32 [T, most samples], to be written: the block of each stacked sample.
        found: int64 [T], to be written: how many blocks, or −1 − sample where one sample alone is over a limit.
    """
    low, high = claim(turns)
    while low < high:
        for number in range(low, high):
            task = tables[2][number]
            stack = tables[1][task[T_STACK]]
            entries, gains, samples = stretches(task, kept)
            total, different = in_arrival_order(entries, out[2][number, O_ENTRIES], stack, gains, samples, spare)
            found[number] = block_samples(spare, total, different, stack, cores[0], blocks[number])
        low, high = claim(turns)


@kernel
def run_split_entries(
    turns: Any, tables: Any, kept: Any, spare: Any, blocks: Any, count: int, edges: Any, out: Any
) -> None:
    """Reorder each task's kept entries by block, stably; `edges` is int64 [T, count + 1], where blocks begin."""
    low, high = claim(turns)
    while low < high:
        for number in range(low, high):
            task = tables[2][number]
            stack = tables[1][task[T_STACK]]
            entries, gains, samples = stretches(task, kept)
            n = out[2][number, O_ENTRIES]
            split_entries(entries, n, stack, gains, samples, spare, blocks[number], count, edges[number])
        low, high = claim(turns)


@kernel
def run_write_block(turns: Any, tables: Any, cores: Any, kept: Any, edges: Any, block: int, out: Any) -> None:
    """Write one block of each task as a batch of its own."""
    low, high = claim(turns)
    while low < high:
        for number in range(low, high):
            task = tables[2][number]
            begin, end = edges[number, block], edges[number, block + 1]
            _, gains, samples = stretches(task, kept)
            at = (task[T_CORE] - task[T_DEVICE] * cores[2]) * max(cores[0], MIN_PARTITIONS)
            entries = kept[0][task[T_KEPT] + begin :]
            stack = tables[1][task[T_STACK]]
            write(entries, end - begin, gains, samples, stack, task, at, out[0][number], out[1][number], out[2][number])
        low, high = claim(turns)
