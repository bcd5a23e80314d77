"""Where a batch is split along the vocabulary: 63 bits, one for each boundary between two of 64 buckets. Pure.

The rule is jax-tpu-embedding's (`minibatching_splits_impl.h`), so that hosts of either come to the same split.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twinstep.worker.embedding.sparsecore.kernels.buckets import BUCKETS

NODES = BUCKETS - 1


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
