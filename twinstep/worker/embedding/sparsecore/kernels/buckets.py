"""Minibatches along the vocabulary: ids hashed into 64 buckets, buckets joined into runs, runs written.

The hash is HighwayHash (Alakuijala, Cox and Wassenberg, 2016, https://arxiv.org/abs/1612.06257) of the stacked column
as four bytes, with jax-tpu-embedding's key, so that hosts of either agree. Ids are hashed once each, not per entry.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twinstep.worker.embedding.sparsecore.compiled import kernel
from twinstep.worker.embedding.sparsecore.kernels.columns import (
    MIN_PARTITIONS,
    O_DROPPED,
    O_OVERFLOW,
    S_KEY_BITS,
    S_MAX_IDS,
    S_MAX_UNIQUE,
    S_SHARD_ROWS,
    S_SLOTS,
    T_DEVICE,
)
from twinstep.worker.embedding.sparsecore.kernels.write import aligned, close, outputs, sample_and_gain

BUCKETS = 64
_WORD = 2**64 - 1
_KEY = (0x4451E30F87DB9609, 0xCA7358A1FD2737F8, 0x4B2C991FCEE4FDEA, 0x0B2658E18326F6BA)
_MUL_0 = (0xDBE6D5D5FE4CCE2F, 0xA4093822299F31D0, 0x13198A2E03707344, 0x243F6A8885A308D3)
_MUL_1 = (0x3BD39E10CB0EF593, 0xC0ACF169B5F18A8C, 0xBE5466CF34E90C6C, 0x452821E638D01377)
_BYTES = 4


def _turned(word: int, count: int) -> int:
    """Turn both 32-bit halves of a word left."""
    low, high = word & 0xFFFFFFFF, word >> 32
    return sum((((half << count) | (half >> (32 - count))) & 0xFFFFFFFF) << at for half, at in ((low, 0), (high, 32)))


def _swapped(word: int) -> int:
    return (word >> 32) | (word << 32) & _WORD


u64 = np.uint64
# The state after the key and the length, the same for every id: only the packet differs.
A0, A1, A2, A3 = (u64(((mul ^ key) + (_BYTES << 32) + _BYTES) & _WORD) for mul, key in zip(_MUL_0, _KEY, strict=True))
B0, B1, B2, B3 = (u64(_turned(mul ^ _swapped(key), _BYTES)) for mul, key in zip(_MUL_1, _KEY, strict=True))
C0, C1, C2, C3 = (u64(mul) for mul in _MUL_0)
D0, D1, D2, D3 = (u64(mul) for mul in _MUL_1)
LOW = u64(0xFFFFFFFF)
HALF = u64(32)


@kernel
def merge_even(v1: Any, v0: Any) -> Any:
    """Return what the zipper merge adds to the even lane."""
    return (
        (((v0 & u64(0xFF000000)) | (v1 & u64(0xFF00000000))) >> u64(24))
        | (((v0 & u64(0xFF0000000000)) | (v1 & u64(0xFF000000000000))) >> u64(16))
        | (v0 & u64(0xFF0000))
        | ((v0 & u64(0xFF00)) << HALF)
        | ((v1 & u64(0xFF00000000000000)) >> u64(8))
        | (v0 << u64(56))
    )


@kernel
def merge_odd(v1: Any, v0: Any) -> Any:
    """Return what the zipper merge adds to the odd lane."""
    return (
        (((v1 & u64(0xFF000000)) | (v0 & u64(0xFF00000000))) >> u64(24))
        | (v1 & u64(0xFF0000))
        | ((v1 & u64(0xFF0000000000)) >> u64(16))
        | ((v1 & u64(0xFF00)) << u64(24))
        | ((v0 & u64(0xFF000000000000)) >> u64(8))
        | ((v1 & u64(0xFF)) << u64(48))
        | (v0 & u64(0xFF00000000000000))
    )


@kernel
def lane(v0: Any, v1: Any, mul0: Any, mul1: Any, packet: Any) -> Any:
    """Update one of four lanes, before the merge."""
    v1 = v1 + mul0 + packet
    mul0 = mul0 ^ ((v1 & LOW) * (v0 >> HALF))
    v0 = v0 + mul1
    mul1 = mul1 ^ ((v0 & LOW) * (v1 >> HALF))
    return v0, v1, mul0, mul1


@kernel
def update(a: Any, b: Any, c: Any, d: Any, packet: Any) -> Any:
    """Mix a packet of four words into the state: four tuples of four."""
    a0, b0, c0, d0 = lane(a[0], b[0], c[0], d[0], packet[0])
    a1, b1, c1, d1 = lane(a[1], b[1], c[1], d[1], packet[1])
    a2, b2, c2, d2 = lane(a[2], b[2], c[2], d[2], packet[2])
    a3, b3, c3, d3 = lane(a[3], b[3], c[3], d[3], packet[3])
    a0, a1 = a0 + merge_even(b1, b0), a1 + merge_odd(b1, b0)
    a2, a3 = a2 + merge_even(b3, b2), a3 + merge_odd(b3, b2)
    b0, b1 = b0 + merge_even(a1, a0), b1 + merge_odd(a1, a0)
    b2, b3 = b2 + merge_even(a3, a2), b3 + merge_odd(a3, a2)
    return (a0, a1, a2, a3), (b0, b1, b2, b3), (c0, c1, c2, c3), (d0, d1, d2, d3)


@kernel
def half(word: Any) -> Any:
    """Swap the halves of a word."""
    return (word >> HALF) | (word << HALF)


@kernel
def finish(a: Any, b: Any, c: Any, d: Any) -> Any:
    """One of the four last rounds."""
    return update(a, b, c, d, (half(a[2]), half(a[3]), half(a[0]), half(a[1])))


@kernel
def bucket_of(column: Any) -> Any:
    """Return the bucket of a stacked column, 0 to 63. Written without a loop, so that many columns go at once."""
    zero = u64(0)
    a, b, c, d = update(
        (A0, A1, A2, A3), (B0, B1, B2, B3), (C0, C1, C2, C3), (D0, D1, D2, D3), (column, zero, zero, zero)
    )
    a, b, c, d = finish(a, b, c, d)
    a, b, c, d = finish(a, b, c, d)
    a, b, c, d = finish(a, b, c, d)
    a, b, c, d = finish(a, b, c, d)
    return (a[0] + b[0] + c[0] + d[0]) & u64(BUCKETS - 1)


@kernel
def buckets_of(columns: Any, count: int, out: Any) -> None:
    """Write the buckets of many columns."""
    for i in range(count):
        out[i] = bucket_of(columns[i])


@kernel
def bucket_columns(entries: Any, n: int, stack: Any, shards: int, columns: Any) -> int:
    """Write the stacked column of every different key of sorted entries; return how many."""
    mask, shard_rows = u64((1 << stack[S_KEY_BITS]) - 1), stack[S_SHARD_ROWS]
    different, last, shard = 0, -1, 0
    for i in range(n):
        key = np.int64(entries[i] & mask)
        if key != last:
            while key >= (shard + 1) * shard_rows:
                shard += 1
            columns[different] = u64((key - shard * shard_rows) * shards + shard)
            different += 1
            last = key
    return different


@kernel
def count_buckets(
    entries: Any, n: int, stack: Any, buckets: Any, gains: Any, samples: Any, ids: Any, unique: Any, kept: Any
) -> int:
    """Count entries by bucket and partition, [64, N] int32: all, different ids, and those that limits leave.

    Returns:
        How many limits drop.
    """
    bits, shard_rows = u64(stack[S_KEY_BITS]), stack[S_SHARD_ROWS]
    max_ids, max_unique = stack[S_MAX_IDS], stack[S_MAX_UNIQUE]
    mask = u64((1 << stack[S_KEY_BITS]) - 1)
    last_key, last_sample, different, shard, bucket, dropped = -1, -1, -1, 0, 0, 0
    for i in range(n):
        key = np.int64(entries[i] & mask)
        sample, _ = sample_and_gain(entries[i] >> bits, stack, gains, samples)
        if key == last_key and sample == last_sample:
            continue
        while key >= (shard + 1) * shard_rows:
            shard += 1
        if key != last_key:
            different += 1
            bucket = np.int64(buckets[different])
            unique[bucket, shard] += 1
        last_key, last_sample = key, sample
        ids[bucket, shard] += 1
        fits = ids[bucket, shard] <= max_ids and unique[bucket, shard] <= max_unique
        kept[bucket, shard] += fits
        dropped += not fits
    return dropped


@kernel
def split_mask(loads: Any, limit: int, level: Any) -> Any:
    """Return which nodes of the tree over buckets must be split, as 63 bits in level order from the leaves up.

    Two neighbours whose loads together are over the limit are split, and the larger goes up; else their sum does.

    Args:
        loads: int32 [64, N].
        limit: of one minibatch.
        level: int32 [64, N] scratch.
    """
    level[:] = loads
    mask, bit, width = u64(0), 0, BUCKETS // 2
    while width > 0:
        for node in range(width):
            left, right, up = level[2 * node], level[2 * node + 1], level[node]
            split = False
            for shard in range(len(up)):
                larger, both = max(left[shard], right[shard]), left[shard] + right[shard]
                over = both > limit
                split |= over
                up[shard] = larger if over else both
            if split:
                mask |= u64(1) << u64(bit + node)
        bit += width
        width //= 2
    return mask


@kernel
def first_dropped(ids: Any, unique: Any, kept: Any, found: Any) -> None:
    """Write the first (partition, bucket) that limits drop from, and its ids and different ids, to `found`."""
    for shard in range(ids.shape[1]):
        for bucket in range(BUCKETS):
            if kept[bucket, shard] < ids[bucket, shard]:
                found[0], found[1], found[2], found[3] = shard, bucket, ids[bucket, shard], unique[bucket, shard]
                return


@kernel
def required_slots(kept: Any, minibatch: Any, minibatches: int, sums: Any) -> int:
    """Return the slots of one task, every partition of every minibatch rounded up.

    Args:
        kept: int32 [64, N].
        minibatch: int64 [64], which minibatch each bucket is in, ascending.
        minibatches: M.
        sums: int32 [N] scratch.
    """
    required, first = 0, 0
    for number in range(minibatches):
        sums[:] = 0
        while first < BUCKETS and minibatch[first] == number:
            sums += kept[first]
            first += 1
        for shard in range(len(sums)):
            required += aligned(sums[shard])
    return required


@kernel
def place_buckets(
    kept: Any, minibatch: Any, minibatches: int, begin: int, slots: int, outs: Any, at: int, places: Any
) -> int:
    """Give each (bucket, partition) its first slot, write row pointers and fill the gaps; return the end.

    Args:
        kept: int32 [64, N].
        minibatch: int64 [64], which minibatch each bucket is in, ascending.
        minibatches: M.
        begin: first slot of this SparseCore.
        slots: of the device.
        outs: a device's row pointers, embedding ids, sample ids and gains.
        at: where this SparseCore's row pointers start, [M, partitions].
        places: int64 [64, N], to be written.
    """
    pointers, embeddings, sample_ids, out_gains = outs
    shards = kept.shape[1]
    position, first = begin, 0
    for number in range(minibatches):
        last = first
        while last < BUCKETS and minibatch[last] == number:
            last += 1
        row = at + number * max(shards, MIN_PARTITIONS)
        for shard in range(shards):
            for bucket in range(first, last):
                places[bucket, shard] = position
                position += kept[bucket, shard]
            stop = min(position, slots)
            pointers[row + shard] = stop
            close(stop, slots, embeddings, sample_ids, out_gains)
            position = aligned(position)
        for shard in range(shards, MIN_PARTITIONS):
            pointers[row + shard] = min(position, slots)
        first = last
    return position


@kernel
def write_buckets(
    entries: Any,
    n: int,
    gains: Any,
    samples: Any,
    stack: Any,
    task: Any,
    buckets: Any,
    ids: Any,
    unique: Any,
    places: Any,
    found: Any,
) -> None:
    """Write sorted entries to their slots: by minibatch, partition, bucket, local id, sample.

    Args:
        entries, n, gains, samples, stack, task: of one task.
        buckets: uint8, of each different key in order.
        ids, unique: int32 [64, N] of zeros, scratch.
        places: of `place_buckets`; counted on.
        found: what the task found.
    """
    bits, shard_rows = u64(stack[S_KEY_BITS]), stack[S_SHARD_ROWS]
    mask = u64((1 << stack[S_KEY_BITS]) - 1)
    _, embeddings, sample_ids, out_gains = outputs(stack, task[T_DEVICE])
    last_key, last_sample, different, shard, bucket, at, dropped, overflow = -1, -1, -1, 0, 0, -1, 0, 0
    for i in range(n):
        key = np.int64(entries[i] & mask)
        sample, gain = sample_and_gain(entries[i] >> bits, stack, gains, samples)
        if key == last_key and sample == last_sample:
            if at >= 0:
                out_gains[at] += gain
            else:
                dropped += 1
            continue
        while key >= (shard + 1) * shard_rows:
            shard += 1
        if key != last_key:
            different += 1
            bucket = np.int64(buckets[different])
            unique[bucket, shard] += 1
        last_key, last_sample = key, sample
        ids[bucket, shard] += 1
        at = -1
        if ids[bucket, shard] > stack[S_MAX_IDS] or unique[bucket, shard] > stack[S_MAX_UNIQUE]:
            dropped += 1
        elif places[bucket, shard] >= stack[S_SLOTS]:
            dropped += 1
            overflow += 1
        else:
            at = places[bucket, shard]
            places[bucket, shard] = at + 1
            embeddings[at] = key - shard * shard_rows
            sample_ids[at] = sample
            out_gains[at] = gain
    found[O_DROPPED], found[O_OVERFLOW] = dropped, overflow
