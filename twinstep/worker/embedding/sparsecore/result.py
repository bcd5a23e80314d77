"""What preprocessing gives: buffers by stack, statistics by stack, and how a batch was split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Split = Literal["none", "vocabulary", "samples"]
"""How a batch over its limits is split; `none`: it is not."""


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """One stack's padded CSR for the devices of this host, L of them. What nothing was written to is 0."""

    row_pointers: Array
    """int32 [L, pointers]: ends of partitions, [cores, max(N, 8)], or [cores, M, max(N, 8)] where M minibatches are."""
    embedding_ids: Array
    """int32 [L, slots], local rows of the target shard; 2³¹ − 1 between partitions."""
    sample_ids: Array
    """int32 [L, slots], stacked samples of the source SparseCore."""
    gains: Array
    """float32 [L, slots]; NaN between partitions."""


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """What one batch asked for, by stack, after de-duplication and before any drop."""

    max_ids: Mapping[str, Array]
    """int32 [L · N]: of each device and target, the most over the device's SparseCores."""
    max_unique: Mapping[str, Array]
    """Likewise, of different ids."""
    required: Mapping[str, Array]
    """int64 [L · S]: slots of each source SparseCore, partitions rounded up to 8."""
    dropped: Mapping[str, int]
    """Entries that limits or a full buffer cost."""
    outside: Mapping[str, int]
    """By feature: ids out of range that were dropped or wrapped. Features without any are left out."""


@dataclass(frozen=True, slots=True, eq=False)
class Preprocessed:
    """A batch as SparseCores read it."""

    blocks: tuple[Mapping[str, Buffers], ...]
    """Buffers by stack: one mapping, or one per block of samples where the split is along samples."""
    minibatches: int
    """M within each block's buffers: 1, or more where the split is along the vocabulary."""
    split: Split
    statistics: Statistics

    @property
    def buffers(self) -> Mapping[str, Buffers]:
        """The only block's buffers, where the split is not along samples."""
        (only,) = self.blocks
        return only


def slab(shapes: Mapping[str, tuple[tuple[int, int], tuple[int, int]]]) -> dict[str, Buffers]:
    """Return zeroed buffers of all stacks, by (shape of row pointers, shape of the others).

    They share one allocation, so that the system maps it in large pages and zeroes only what is touched.
    """
    words = sum(_line(rows * count) + 3 * _line(local * slots) for (rows, count), (local, slots) in shapes.values())
    memory = np.zeros(words, np.int32)
    at = 0

    def take(shape: tuple[int, int], kind: Any) -> Array:
        nonlocal at
        part: Array = memory[at : at + shape[0] * shape[1]].view(kind).reshape(shape)
        at += _line(shape[0] * shape[1])
        return part

    return {
        name: Buffers(take(first, np.int32), take(rest, np.int32), take(rest, np.int32), take(rest, np.float32))
        for name, (first, rest) in shapes.items()
    }


def _line(words: int) -> int:
    return -(-words // 16) * 16  # a cache line
