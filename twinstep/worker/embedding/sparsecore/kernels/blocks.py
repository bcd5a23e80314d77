"""Minibatches along samples: stacked samples cut into blocks, each of which fits the limits.

Every id of a sample is in its block, so a block is a small batch of its own: forward runs block by block, and the
gradients of a row are added over blocks before its one update.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twinstep.worker.embedding.sparsecore.compiled import kernel
from twinstep.worker.embedding.sparsecore.kernels.columns import (
    S_KEY_BITS,
    S_MAX_IDS,
    S_MAX_UNIQUE,
    S_SAMPLES,
    S_SHARD_ROWS,
)
from twinstep.worker.embedding.sparsecore.kernels.write import sample_and_gain

u64 = np.uint64
SHARD_BITS = 32


@kernel
def in_arrival_order(entries: Any, n: int, stack: Any, gains: Any, samples: Any, spare: Any) -> Any:
    """Bring sorted entries back into the order of samples, without duplicates.

    Args:
        entries, n, stack, gains, samples: of one task.
        spare: int64 [2, n], to be written: sample, and `shard << SHARD_BITS | number of its different key`.

    Returns:
        How many entries, and how many different keys.
    """
    bits, shard_rows = u64(stack[S_KEY_BITS]), stack[S_SHARD_ROWS]
    mask = u64((1 << stack[S_KEY_BITS]) - 1)
    places = np.zeros(stack[S_SAMPLES] + 1, np.int64)
    for step in range(2):
        last_key, last_sample, different, shard, total = -1, -1, -1, 0, 0
        for i in range(n):
            key = np.int64(entries[i] & mask)
            sample, _ = sample_and_gain(entries[i] >> bits, stack, gains, samples)
            different += key != last_key
            if key == last_key and sample == last_sample:
                continue
            while key >= (shard + 1) * shard_rows:
                shard += 1
            last_key, last_sample = key, sample
            total += 1
            if step == 0:
                places[sample + 1] += 1
            else:
                at = places[sample]
                places[sample] = at + 1
                spare[0, at] = sample
                spare[1, at] = shard << SHARD_BITS | different
        if step == 0:
            for sample in range(stack[S_SAMPLES]):
                places[sample + 1] += places[sample]
    return total, different + 1


@kernel
def block_samples(spare: Any, total: int, different: int, stack: Any, shards: int, blocks: Any) -> int:
    """Cut greedily: a sample joins the block unless a partition would then be over a limit.

    Args:
        spare: of `in_arrival_order`.
        total, different: what it returned.
        stack: for its limits.
        shards: N.
        blocks: int32 [samples], to be written.

    Returns:
        How many blocks; −1 − sample where one sample alone is over a limit.
    """
    seen = np.full(different, -1, np.int64)
    sizes = np.zeros((2, shards), np.int64)
    block, start, i = 0, 0, 0
    for sample in range(stack[S_SAMPLES]):
        first, over, attempt = i, True, 0
        while over and attempt < 2:
            over, i = False, first
            while i < total and spare[0, i] == sample:
                shard, key = spare[1, i] >> SHARD_BITS, spare[1, i] & ((1 << SHARD_BITS) - 1)
                sizes[0, shard] += 1
                sizes[1, shard] += seen[key] < block
                seen[key] = block
                over |= sizes[0, shard] > stack[S_MAX_IDS] or sizes[1, shard] > stack[S_MAX_UNIQUE]
                i += 1
            if over:
                if sample == start and attempt == 0:
                    return -1 - sample
                block, start = block + 1, sample
                sizes[:] = 0
                attempt += 1
        if over:
            return -1 - sample
        blocks[sample] = block
    return block + 1


@kernel
def split_entries(
    entries: Any, n: int, stack: Any, gains: Any, samples: Any, spare: Any, blocks: Any, count: int, edges: Any
) -> None:
    """Reorder sorted entries by block; each block stays sorted.

    Args:
        entries, n, stack, gains, samples: of one task.
        spare: uint64 scratch, [n].
        blocks: int32 [samples], the block of each stacked sample.
        count: blocks of the batch, those of other tasks included.
        edges: int64 [count + 1], to be written.
    """
    bits = u64(stack[S_KEY_BITS])
    edges[:] = 0
    for i in range(n):
        spare[i] = entries[i]
        sample, _ = sample_and_gain(entries[i] >> bits, stack, gains, samples)
        edges[blocks[sample] + 1] += 1
    for block in range(count):
        edges[block + 1] += edges[block]
    places = edges[:-1].copy()
    for i in range(n):
        sample, _ = sample_and_gain(spare[i] >> bits, stack, gains, samples)
        block = blocks[sample]
        entries[places[block]] = spare[i]
        places[block] += 1
