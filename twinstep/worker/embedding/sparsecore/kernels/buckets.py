"""Minibatches along the vocabulary: ids hashed into 64 buckets, counted, and where they must be parted.

The hash is HighwayHash (Alakuijala, Cox and Wassenberg, 2016, https://arxiv.org/abs/1612.06257) of the stacked column
as four bytes, with jax-tpu-embedding's key, so that hosts of either agree. Ids are hashed once each, not per entry.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twinstep.worker.embedding.sparsecore.compiled import inlined, kernel
from twinstep.worker.embedding.sparsecore.kernels.columns import S_KEY_BITS, S_MAX_IDS, S_MAX_UNIQUE, S_SHARD_ROWS
from twinstep.worker.embedding.sparsecore.kernels.write import sample_and_gain

BUCKETS = 64
BUCKET_SHIFT = 58  # of an entry: key and payload take the bits below, see stacking.MAX_SAMPLES_PER_DEVICE
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


u64, i32 = np.uint64, np.int32
# The state after the key and the length, the same for every id: only the packet differs.
A0, A1, A2, A3 = (u64(((mul ^ key) + (_BYTES << 32) + _BYTES) & _WORD) for mul, key in zip(_MUL_0, _KEY, strict=True))
B0, B1, B2, B3 = (u64(_turned(mul ^ _swapped(key), _BYTES)) for mul, key in zip(_MUL_1, _KEY, strict=True))
C0, C1, C2, C3 = (u64(mul) for mul in _MUL_0)
D0, D1, D2, D3 = (u64(mul) for mul in _MUL_1)
LOW = u64(0xFFFFFFFF)
HALF = u64(32)


@inlined
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


@inlined
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


@inlined
def lane(v0: Any, v1: Any, mul0: Any, mul1: Any, packet: Any) -> Any:
    """Update one of four lanes, before the merge."""
    v1 = v1 + mul0 + packet
    mul0 = mul0 ^ ((v1 & LOW) * (v0 >> HALF))
    v0 = v0 + mul1
    mul1 = mul1 ^ ((v0 & LOW) * (v1 >> HALF))
    return v0, v1, mul0, mul1


@inlined
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


@inlined
def half(word: Any) -> Any:
    """Swap the halves of a word."""
    return (word >> HALF) | (word << HALF)


@inlined
def finish(a: Any, b: Any, c: Any, d: Any) -> Any:
    """One of the four last rounds."""
    return update(a, b, c, d, (half(a[2]), half(a[3]), half(a[0]), half(a[1])))


@inlined
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
def mark_buckets(
    entries: Any, n: int, stack: Any, buckets: Any, gains: Any, samples: Any, ids: Any, unique: Any
) -> None:
    """Put each entry's bucket into its highest bits, and count ids and different ids by bucket and partition.

    Args:
        entries, n, stack, gains, samples: of one task; sorted.
        buckets: of each different key in order.
        ids, unique: int32 [64, N] of zeros, to be counted into.
    """
    bits, shard_rows = u64(stack[S_KEY_BITS]), stack[S_SHARD_ROWS]
    mask = u64((1 << stack[S_KEY_BITS]) - 1)
    last_key, last_sample, different, shard, bucket = -1, -1, -1, 0, 0
    for i in range(n):
        entry = entries[i]
        key = np.int64(entry & mask)
        sample, _ = sample_and_gain(entry >> bits, stack, gains, samples)
        if key != last_key:
            while key >= (shard + 1) * shard_rows:
                shard += 1
            different += 1
            bucket = np.int64(buckets[different])
            unique[bucket, shard] += 1
        ids[bucket, shard] += key != last_key or sample != last_sample
        last_key, last_sample = key, sample
        entries[i] = entry | u64(bucket) << u64(BUCKET_SHIFT)


@kernel
def split_mask(loads: Any, limit: int, level: Any) -> Any:
    """Return which nodes of the tree over buckets must be split, as 63 bits in level order from the leaves up.

    Two neighbours whose loads together are over the limit are split, and the larger goes up; else their sum does.

    Args:
        loads: int32 [64, N].
        limit: of one minibatch.
        level: int32 [2, 64, N] scratch.
    """
    mask, bit, width, turn, bound = u64(0), 0, BUCKETS // 2, 0, i32(limit)
    below = loads
    while width > 0:
        above = level[turn]
        for node in range(width):
            left, right, up = below[2 * node], below[2 * node + 1], above[node]
            most = i32(0)
            for shard in range(len(up)):
                most = max(most, i32(left[shard] + right[shard]))
            if most > bound:
                mask |= u64(1) << u64(bit + node)
                for shard in range(len(up)):
                    both = i32(left[shard] + right[shard])
                    up[shard] = max(left[shard], right[shard]) if both > bound else both
            else:
                for shard in range(len(up)):
                    up[shard] = i32(left[shard] + right[shard])
        below, turn = above, 1 - turn
        bit += width
        width //= 2
    return mask


@kernel
def first_over(ids: Any, unique: Any, stack: Any, found: Any) -> bool:
    """Return whether one bucket of one partition alone is over a limit; write the first one to `found`.

    Args:
        ids, unique: int32 [64, N], of `mark_buckets`.
        stack: for its limits.
        found: int64 [4]: partition, bucket, its ids and its different ids.
    """
    max_ids, max_unique, over = i32(stack[S_MAX_IDS]), i32(stack[S_MAX_UNIQUE]), False
    for bucket in range(BUCKETS):
        for shard in range(ids.shape[1]):
            over |= (ids[bucket, shard] > max_ids) | (unique[bucket, shard] > max_unique)
    if not over:
        return False
    for shard in range(ids.shape[1]):
        for bucket in range(BUCKETS):
            if ids[bucket, shard] > max_ids or unique[bucket, shard] > max_unique:
                found[0], found[1], found[2], found[3] = shard, bucket, ids[bucket, shard], unique[bucket, shard]
                return True
    return False
