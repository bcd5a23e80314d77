"""Where a batch is split along the vocabulary: 63 bits, one for each boundary between two of 64 buckets. Pure.

The rule is jax-tpu-embedding's (`minibatching_splits_impl.h`), so that hosts of either come to the same split.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from twinstep.worker.embedding.sparsecore.kernels.buckets import BUCKETS

NODES = BUCKETS - 1


def split_bits(loads: npt.NDArray[Any], limit: int) -> int:
    """Return which nodes of the tree over buckets must be split, as bits in level order from the leaves up.

    Two neighbours whose loads together are over the limit are split, and the larger goes up; else their sum does.

    Args:
        loads: [..., 64] integers, by bucket.
        limit: of one minibatch.
    """
    mask, bit = 0, 0
    level = loads.reshape(-1, BUCKETS).astype(np.int64)
    while level.shape[1] > 1:
        left, right = level[:, 0::2], level[:, 1::2]
        over = left + right > limit
        for node in np.flatnonzero(over.any(axis=0)):
            mask |= 1 << (bit + int(node))
        bit += over.shape[1]
        level = np.where(over, np.maximum(left, right), left + right)
    return mask


def minibatch_of_bucket(mask: int) -> npt.NDArray[np.int64]:
    """Return the minibatch of each bucket, [64], ascending from 0: a set bit parts the buckets left and right of it."""
    parted = np.zeros(BUCKETS, np.int64)
    bit, width = 0, 1
    while width < BUCKETS:
        for node in range(BUCKETS // (2 * width)):
            if mask >> bit & 1:
                parted[node * 2 * width + width] = 1
            bit += 1
        width *= 2
    return np.cumsum(parted)
