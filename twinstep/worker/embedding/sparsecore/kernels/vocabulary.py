"""Entries marked with their buckets → minibatches along the vocabulary, each a run of buckets.

Entries are first arranged in the order in which they are written, so that writing is one walk: nothing is kept for each
bucket of each partition, of which there are many more than entries where SparseCores are many.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twinstep.worker.embedding.sparsecore.compiled import kernel
from twinstep.worker.embedding.sparsecore.kernels.buckets import BUCKET_SHIFT, BUCKETS
from twinstep.worker.embedding.sparsecore.kernels.columns import (
    MIN_PARTITIONS,
    O_DROPPED,
    O_OVERFLOW,
    S_KEY_BITS,
    S_MAX_IDS,
    S_MAX_UNIQUE,
    S_SHARD_ROWS,
    S_SLOTS,
    T_BEGIN,
    T_DEVICE,
)
from twinstep.worker.embedding.sparsecore.kernels.write import aligned, close, outputs, sample_and_gain

u64 = np.uint64


@kernel
def arrange(entries: Any, n: int, stack: Any, shards: int, minibatch: Any, spare: Any) -> None:
    """Bring entries of one task, sorted by key and sample, into order by minibatch, partition, bucket, key, sample.

    Args:
        entries, n, stack: of one task, marked with their buckets.
        shards: N.
        minibatch: int64 [64], which minibatch each bucket is in, ascending.
        spare: uint64 scratch, [n].
    """
    places = np.zeros(max(BUCKETS, shards) + 1, np.int64)
    for i in range(n):
        places[(entries[i] >> u64(BUCKET_SHIFT)) + u64(1)] += 1
    for bucket in range(BUCKETS):
        places[bucket + 1] += places[bucket]
    ends = places[1 : BUCKETS + 1].copy()
    for i in range(n):
        bucket = entries[i] >> u64(BUCKET_SHIFT)
        spare[places[bucket]] = entries[i]
        places[bucket] += 1
    entries[:n] = spare[:n]
    first = 0
    while first < BUCKETS:
        last = first
        while last + 1 < BUCKETS and minibatch[last + 1] == minibatch[first]:
            last += 1
        begin = ends[first - 1] if first else 0
        if last > first and ends[last] - begin > 1:
            by_partition(spare[begin : ends[last]], stack, shards, places, entries[begin : ends[last]])
        first = last + 1


@kernel
def by_partition(source: Any, stack: Any, shards: int, places: Any, target: Any) -> None:
    """Sort entries by their partition, stably, into `target`; `places` is int64 scratch, [N + 1] or more."""
    mask, shard_rows = u64((1 << stack[S_KEY_BITS]) - 1), u64(stack[S_SHARD_ROWS])
    places[: shards + 1] = 0
    for i in range(len(source)):
        places[(source[i] & mask) // shard_rows + u64(1)] += 1
    for shard in range(shards):
        places[shard + 1] += places[shard]
    for i in range(len(source)):
        shard = (source[i] & mask) // shard_rows
        target[places[shard]] = source[i]
        places[shard] += 1


@kernel
def required_slots(entries: Any, n: int, stack: Any, gains: Any, samples: Any, minibatch: Any) -> int:
    """Return the slots of one task's arranged entries, every partition of every minibatch rounded up."""
    bits, shard_rows = u64(stack[S_KEY_BITS]), stack[S_SHARD_ROWS]
    mask, body = u64((1 << stack[S_KEY_BITS]) - 1), u64((1 << BUCKET_SHIFT) - 1)
    required, kept, count, different = 0, 0, 0, 0
    cell, last_key, last_sample, number, high = -1, -1, -1, -1, 0
    for i in range(n):
        key, bucket = np.int64(entries[i] & mask), np.int64(entries[i] >> u64(BUCKET_SHIFT))
        sample, _ = sample_and_gain((entries[i] & body) >> bits, stack, gains, samples)
        if key == last_key and sample == last_sample:
            continue
        if minibatch[bucket] != number or key >= high:
            required += aligned(kept)
            kept, cell = 0, -1
            number, high = minibatch[bucket], (key // shard_rows + 1) * shard_rows
        if bucket != cell:
            cell, count, different = bucket, 0, 0
        different += key != last_key
        last_key, last_sample = key, sample
        count += 1
        kept += count <= stack[S_MAX_IDS] and different <= stack[S_MAX_UNIQUE]
    return required + aligned(kept)


@kernel
def write_minibatches(
    entries: Any,
    n: int,
    gains: Any,
    samples: Any,
    stack: Any,
    task: Any,
    at: int,
    shards: int,
    minibatch: Any,
    found: Any,
) -> None:
    """Write arranged entries to their slots, and row pointers [M, partitions].

    Args:
        entries, n, gains, samples, stack, task: of one task.
        at, shards: where its row pointers start among the device's; N.
        minibatch: int64 [64], which minibatch each bucket is in, ascending.
        found: what the task found.
    """
    bits, shard_rows, slots = u64(stack[S_KEY_BITS]), stack[S_SHARD_ROWS], stack[S_SLOTS]
    mask, body = u64((1 << stack[S_KEY_BITS]) - 1), u64((1 << BUCKET_SHIFT) - 1)
    pointers, embeddings, sample_ids, out_gains = outputs(stack, task[T_DEVICE])
    position, done, dropped, overflow, first = task[T_BEGIN], 0, 0, 0, 0
    for number in range(minibatch[BUCKETS - 1] + 1):
        while first < BUCKETS and minibatch[first] <= number:
            first += 1
        past = u64(first) << u64(BUCKET_SHIFT)  # the first entry of the next minibatch, or 0: there is none
        for shard in range(shards):
            low, begin = shard * shard_rows, position
            cell, count, different, last_key, last_sample, kept = -1, 0, 0, -1, -1, False
            while done < n:
                entry = entries[done]
                key = np.int64(entry & mask)
                if key >= low + shard_rows or (first < BUCKETS and entry >= past):
                    break
                done += 1
                bucket = np.int64(entry >> u64(BUCKET_SHIFT))
                sample, gain = sample_and_gain((entry & body) >> bits, stack, gains, samples)
                if key == last_key and sample == last_sample:
                    if kept:
                        out_gains[position - 1] += gain
                    else:
                        dropped += 1
                    continue
                count, different = (count, different) if bucket == cell else (0, 0)
                different += key != last_key
                cell, last_key, last_sample = bucket, key, sample
                count += 1
                kept = count <= stack[S_MAX_IDS] and different <= stack[S_MAX_UNIQUE]
                if kept and position < slots:
                    embeddings[position] = key - low
                    sample_ids[position] = sample
                    out_gains[position] = gain
                    position += 1
                else:
                    dropped += 1
                    overflow += kept
                    kept = False
            pointers[at + shard] = position
            if position != begin:
                position = close(position, slots, embeddings, sample_ids, out_gains)
        for shard in range(shards, MIN_PARTITIONS):
            pointers[at + shard] = position
        at += max(shards, MIN_PARTITIONS)
    found[O_DROPPED], found[O_OVERFLOW] = dropped, overflow
