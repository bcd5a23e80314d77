"""Sorted entries → padded CSR: de-duplicated, counted, held to limits, aligned, written."""

from __future__ import annotations

from typing import Any

import numpy as np

from twinstep.worker.embedding.sparsecore.compiled import carray, kernel, pointer
from twinstep.worker.embedding.sparsecore.kernels.columns import (
    ALIGN,
    MIN_PARTITIONS,
    O_DROPPED,
    O_END,
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
    T_STALE,
)

u64, f32 = np.uint64, np.float32
SHORT = 24  # entries of a partition, on average, from which on scanning first is sooner
ALL_ONES = 2**64 - 1  # no entry: its key would be past every shard


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
def scan(entries: Any, n: int, high: int, mask: Any) -> Any:
    """Return how many sorted entries from the first on have keys under `high`, of how many keys, and exact repeats."""
    length, different, repeats, last = 0, 0, 0, u64(ALL_ONES)
    for i in range(n):
        entry = entries[i]
        if np.int64(entry & mask) >= high:
            break
        length += 1
        different += (entry & mask) != (last & mask)
        repeats += entry == last
        last = entry
    return length, different, repeats


@kernel
def scan_weighted(entries: Any, n: int, high: int, mask: Any, bits: Any, samples: Any) -> Any:
    """Do as `scan` where payloads are places of arrival: a repeat has the key and the sample of the entry before."""
    length, different, repeats, last_key, last_sample = 0, 0, 0, np.int64(-1), np.int64(-1)
    for i in range(n):
        key = np.int64(entries[i] & mask)
        if key >= high:
            break
        length += 1
        sample = np.int64(samples[entries[i] >> bits])
        different += key != last_key
        repeats += key == last_key and sample == last_sample
        last_key, last_sample = key, sample
    return length, different, repeats


@kernel
def copy_all(
    entries: Any, length: int, stack: Any, low: int, gains: Any, samples: Any, outs: Any, position: int
) -> None:
    """Write `length` entries without repeats, all of which fit."""
    bits, mask = u64(stack[S_KEY_BITS]), u64((1 << stack[S_KEY_BITS]) - 1)
    weighted, plain = stack[S_WEIGHTED] != 0, stack[S_COMBINER] == SUM
    embeddings, sample_ids, out_gains = outs[1][position:], outs[2][position:], outs[3][position:]
    for i in range(length):
        embeddings[i] = np.int64(entries[i] & mask) - low
    if weighted:
        for i in range(length):
            sample_ids[i] = samples[entries[i] >> bits]
            out_gains[i] = gains[entries[i] >> bits]
        return
    for i in range(length):
        sample_ids[i] = np.int32(entries[i] >> bits)
    if plain:
        out_gains[:length] = f32(1.0)
    else:
        for i in range(length):
            out_gains[i] = gains[entries[i] >> bits]


@kernel
def copy_runs(entries: Any, length: int, stack: Any, low: int, gains: Any, outs: Any, position: int) -> int:
    """Write `length` unweighted entries, repeats added up, all of which fit; return the slot after the last one.

    Nothing in it jumps by the data: whether the next entry repeats the last one cannot be foretold.
    """
    bits, mask = u64(stack[S_KEY_BITS]), u64((1 << stack[S_KEY_BITS]) - 1)
    plain, last, gain = stack[S_COMBINER] == SUM, u64(ALL_ONES), f32(0.0)
    for i in range(length):
        entry = entries[i]
        sample = entry >> bits
        one = f32(1.0) if plain else gains[sample]
        position += entry != last
        gain = f32(one + (gain if entry == last else f32(0.0)))
        outs[1][position - 1] = np.int64(entry & mask) - low
        outs[2][position - 1] = np.int32(sample)
        outs[3][position - 1] = gain
        last = entry
    return position


@kernel
def copy_some(
    entries: Any, length: int, stack: Any, low: int, gains: Any, samples: Any, outs: Any, position: int, end: int
) -> Any:
    """Write `length` entries, repeats added up, as far as limits and slots allow.

    Ids are counted as jax-tpu-embedding counts them: repeats of what a limit drops too, and not of what finds no slot.

    Returns:
        The slot after the last one, ids dropped, and entries dropped for want of slots.
    """
    bits, mask = u64(stack[S_KEY_BITS]), u64((1 << stack[S_KEY_BITS]) - 1)
    max_ids, max_unique = stack[S_MAX_IDS], stack[S_MAX_UNIQUE]
    last_key, last_sample, kept, count, different, dropped, overflow = -1, -1, False, 0, 0, 0, 0
    for i in range(length):
        key = np.int64(entries[i] & mask)
        sample, gain = sample_and_gain(entries[i] >> bits, stack, gains, samples)
        if key == last_key and sample == last_sample:
            if kept:
                outs[3][position - 1] += gain
            elif position < end:
                dropped += 1
            continue
        different += key != last_key
        last_key, last_sample = key, sample
        count += 1
        kept = count <= max_ids and different <= max_unique and position < end
        if kept:
            outs[1][position] = key - low
            outs[2][position] = sample
            outs[3][position] = gain
            position += 1
        else:
            dropped += 1
            overflow += position >= end
    return position, dropped, overflow


@kernel
def write_long(
    entries: Any, n: int, gains: Any, samples: Any, stack: Any, task: Any, outs: Any, at: int, ids: Any, unique: Any
) -> Any:
    """Write partitions of many entries: each is scanned first, so that one which fits is copied in vector registers.

    Returns:
        The slot after the last one, ids dropped, entries dropped for want of slots, and slots that were required.
    """
    mask, bits = u64((1 << stack[S_KEY_BITS]) - 1), u64(stack[S_KEY_BITS])
    shard_rows, weighted = stack[S_SHARD_ROWS], stack[S_WEIGHTED] != 0
    position, end, origin = task[T_BEGIN], task[T_END], task[T_ORIGIN]
    done, dropped, overflow, required = 0, 0, 0, 0
    for shard in range(len(ids)):
        rest, low = entries[done:], shard * shard_rows
        if weighted:
            length, different, repeats = scan_weighted(rest, n - done, low + shard_rows, mask, bits, samples)
        else:
            length, different, repeats = scan(rest, n - done, low + shard_rows, mask)
        count = length - repeats
        fits = count <= stack[S_MAX_IDS] and different <= stack[S_MAX_UNIQUE] and position + count <= end
        if fits and repeats == 0:
            copy_all(rest, length, stack, low, gains, samples, outs, position)
            position += count
        elif fits and not weighted:
            position = copy_runs(rest, length, stack, low, gains, outs, position)
        else:
            position, lost, late = copy_some(rest, length, stack, low, gains, samples, outs, position, end)
            dropped += lost
            overflow += late
        done += length
        ids[shard], unique[shard] = count, different
        required += aligned(count)
        outs[0][at + shard] = position - origin
        position = close(position, end, outs[1], outs[2], outs[3])
    return position, dropped, overflow, required


@kernel
def write_short(entries: Any, n: int, stack: Any, task: Any, outs: Any, at: int, ids: Any, unique: Any) -> Any:
    """Do as `write_long` for an unweighted sum in one walk over all entries: sooner where a partition has few."""
    mask, bits = u64((1 << stack[S_KEY_BITS]) - 1), u64(stack[S_KEY_BITS])
    shard_rows, max_ids, max_unique = stack[S_SHARD_ROWS], stack[S_MAX_IDS], stack[S_MAX_UNIQUE]
    position, end, origin = task[T_BEGIN], task[T_END], task[T_ORIGIN]
    pointers, embeddings, sample_ids, out_gains = outs
    dropped, overflow, required, done = 0, 0, 0, 0
    for shard in range(len(ids)):
        low = shard * shard_rows
        high = u64(low + shard_rows)
        last, last_key, kept, count, different = u64(ALL_ONES), u64(ALL_ONES), False, 0, 0
        while done < n:
            entry = entries[done]
            key = entry & mask
            if key >= high:
                break
            done += 1
            if entry == last:
                if kept:
                    out_gains[position - 1] += f32(1.0)
                elif position < end:
                    dropped += 1
                continue
            different += key != last_key
            last, last_key = entry, key
            count += 1
            kept = count <= max_ids and different <= max_unique and position < end
            if kept:
                embeddings[position] = np.int64(key) - low
                sample_ids[position] = np.int32(entry >> bits)
                out_gains[position] = f32(1.0)
                position += 1
            else:
                dropped += 1
                overflow += position >= end
        ids[shard], unique[shard] = count, different
        required += aligned(count)
        pointers[at + shard] = position - origin
        position = close(position, end, embeddings, sample_ids, out_gains)
    return position, dropped, overflow, required


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
    outs = outputs(stack, task[T_DEVICE])
    if n < SHORT * len(ids) and not stack[S_WEIGHTED] and stack[S_COMBINER] == SUM:
        position, dropped, overflow, required = write_short(entries, n, stack, task, outs, at, ids, unique)
    else:
        position, dropped, overflow, required = write_long(
            entries, n, gains, samples, stack, task, outs, at, ids, unique
        )
    for shard in range(len(ids), MIN_PARTITIONS):
        outs[0][at + shard] = position - task[T_ORIGIN]
    for i in range(position, task[T_STALE]):
        outs[1][i] = 0
        outs[2][i] = 0
        outs[3][i] = 0
    found[O_DROPPED], found[O_OVERFLOW], found[O_REQUIRED], found[O_END] = dropped, overflow, required, position


@kernel
def count(entries: Any, n: int, samples: Any, stack: Any, ids: Any, unique: Any, found: Any) -> None:
    """Count a task's partitions as `write` does, and write nothing."""
    mask, bits = u64((1 << stack[S_KEY_BITS]) - 1), u64(stack[S_KEY_BITS])
    done, required = 0, 0
    for shard in range(len(ids)):
        rest, high = entries[done:], (shard + 1) * stack[S_SHARD_ROWS]
        if stack[S_WEIGHTED]:
            length, different, repeats = scan_weighted(rest, n - done, high, mask, bits, samples)
        else:
            length, different, repeats = scan(rest, n - done, high, mask)
        done += length
        ids[shard], unique[shard] = length - repeats, different
        required += aligned(length - repeats)
    found[O_DROPPED], found[O_OVERFLOW], found[O_REQUIRED] = 0, 0, required
