"""Sorted entries → padded CSR: de-duplicated, counted, held to limits, aligned, written."""

from __future__ import annotations

from typing import Any

import numpy as np

from twinstep.worker.embedding.sparsecore.compiled import carray, kernel, pointer
from twinstep.worker.embedding.sparsecore.kernels.columns import (
    ALIGN,
    MIN_PARTITIONS,
    O_DROPPED,
    O_OVERFLOW,
    O_REQUIRED,
    PADDING_ID,
    S_COMBINER,
    S_EMBEDDINGS,
    S_GAINS,
    S_KEY_BITS,
    S_MAX_IDS,
    S_MAX_UNIQUE,
    S_POINTER_COUNT,
    S_POINTERS,
    S_SAMPLE_IDS,
    S_SHARD_ROWS,
    S_SLOTS,
    S_WEIGHTED,
    SUM,
    T_BEGIN,
    T_DEVICE,
    T_END,
    T_ORIGIN,
)

u64, f32 = np.uint64, np.float32


@kernel
def aligned(count: int) -> int:
    """Round up to ALIGN."""
    return (count + ALIGN - 1) // ALIGN * ALIGN


@kernel
def outputs(stack: Any, device: int) -> Any:
    """Return a device's row pointers, embedding ids, sample ids and gains."""
    slots, start = stack[S_SLOTS], device * stack[S_SLOTS] * 4
    pointers = carray(
        pointer(stack[S_POINTERS] + device * stack[S_POINTER_COUNT] * 4), (stack[S_POINTER_COUNT],), np.int32
    )
    return (
        pointers,
        carray(pointer(stack[S_EMBEDDINGS] + start), (slots,), np.int32),
        carray(pointer(stack[S_SAMPLE_IDS] + start), (slots,), np.int32),
        carray(pointer(stack[S_GAINS] + start), (slots,), np.float32),
    )


@kernel
def close(position: int, end: int, embeddings: Any, sample_ids: Any, out_gains: Any) -> int:
    """Fill up to the next aligned slot; return it."""
    stop = min(aligned(position), end)
    for i in range(position, stop):
        embeddings[i] = PADDING_ID
        sample_ids[i] = PADDING_ID
        out_gains[i] = np.nan
    return stop


@kernel
def sample_and_gain(payload: Any, stack: Any, gains: Any, samples: Any) -> Any:
    """Return an entry's stacked sample and gain."""
    if stack[S_WEIGHTED]:
        return np.int64(samples[payload]), gains[payload]
    if stack[S_COMBINER] == SUM:
        return np.int64(payload), f32(1.0)
    return np.int64(payload), gains[payload]


@kernel
def write(
    entries: Any, n: int, gains: Any, samples: Any, stack: Any, task: Any, at: int, ids: Any, unique: Any, found: Any
) -> None:
    """Write a task's partitions, and count them.

    Args:
        entries: sorted, n of them.
        gains, samples: what payloads point at.
        stack, task: rows of the tables.
        at: where its row pointers start among the device's.
        ids, unique: int32 [N], ids and different ids per target, after de-duplication and before any drop.
        found: what it found.
    """
    bits, shard_rows = u64(stack[S_KEY_BITS]), stack[S_SHARD_ROWS]
    max_ids, max_unique = stack[S_MAX_IDS], stack[S_MAX_UNIQUE]
    mask = u64((1 << stack[S_KEY_BITS]) - 1)
    pointers, embeddings, sample_ids, out_gains = outputs(stack, task[T_DEVICE])
    position, end, origin = task[T_BEGIN], task[T_END], task[T_ORIGIN]
    i, last_key, last_sample, kept, dropped, overflow, required = 0, -1, -1, False, 0, 0, 0
    for shard in range(len(ids)):
        low, high = shard * shard_rows, (shard + 1) * shard_rows
        count, different = 0, 0
        while i < n:
            key = np.int64(entries[i] & mask)
            if key >= high:
                break
            sample, gain = sample_and_gain(entries[i] >> bits, stack, gains, samples)
            i += 1
            if key == last_key and sample == last_sample:
                if kept:
                    out_gains[position - 1] += gain
                else:
                    dropped += 1
                continue
            different += key != last_key
            last_key, last_sample = key, sample
            count += 1
            kept = count <= max_ids and different <= max_unique and position < end
            if kept:
                embeddings[position] = key - low
                sample_ids[position] = sample
                out_gains[position] = gain
                position += 1
            else:
                dropped += 1
                overflow += position >= end
        ids[shard], unique[shard] = count, different
        required += aligned(count)
        pointers[at + shard] = position - origin
        position = close(position, end, embeddings, sample_ids, out_gains)
    for shard in range(len(ids), MIN_PARTITIONS):
        pointers[at + shard] = position - origin
    found[O_DROPPED], found[O_OVERFLOW], found[O_REQUIRED] = dropped, overflow, required


@kernel
def count(entries: Any, n: int, gains: Any, samples: Any, stack: Any, ids: Any, unique: Any, found: Any) -> None:
    """Count a task's partitions as `write` does, and write nothing."""
    bits, shard_rows = u64(stack[S_KEY_BITS]), stack[S_SHARD_ROWS]
    mask = u64((1 << stack[S_KEY_BITS]) - 1)
    last_key, last_sample, shard, required = -1, -1, 0, 0
    ids[:] = 0
    unique[:] = 0
    for i in range(n):
        key = np.int64(entries[i] & mask)
        sample, _ = sample_and_gain(entries[i] >> bits, stack, gains, samples)
        if key == last_key and sample == last_sample:
            continue
        while key >= (shard + 1) * shard_rows:
            shard += 1
        unique[shard] += key != last_key
        ids[shard] += 1
        last_key, last_sample = key, sample
    for shard in range(len(ids)):
        required += aligned(ids[shard])
    found[O_DROPPED], found[O_OVERFLOW], found[O_REQUIRED] = 0, 0, required
