"""What preprocessing gives: buffers by stack, statistics by stack, and how a batch was split."""

from __future__ import annotations

import sys
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


Shapes = Mapping[str, tuple[tuple[int, int], tuple[int, int]]]
"""By stack: the shape of row pointers, and that of the others."""


@dataclass(slots=True, eq=False)
class Slab:
    """One allocation for the buffers of all stacks, so that the system maps it in large pages."""

    memory: Array
    shapes: Shapes
    written: Array | None
    """int64 [T], by task: the slot after the last one that is not 0; None: not known."""

    def buffers(self) -> dict[str, Buffers]:
        """Return views of its memory, by stack."""
        at = 0

        def take(shape: tuple[int, int], kind: Any) -> Array:
            nonlocal at
            part: Array = self.memory[at : at + shape[0] * shape[1]].view(kind).reshape(shape)
            at += _line(shape[0] * shape[1])
            return part

        return {
            name: Buffers(take(first, np.int32), take(rest, np.int32), take(rest, np.int32), take(rest, np.float32))
            for name, (first, rest) in self.shapes.items()
        }


def fresh(shapes: Shapes) -> dict[str, Buffers]:
    """Return zeroed buffers of all stacks."""
    return Slab(np.zeros(_words(shapes), np.int32), shapes, None).buffers()


class Slabs:
    """Hands out slabs, and takes those again whose views are all gone: the system need not map and zero them anew.

    A view keeps its slab's memory alive and counted, wherever it is held: what is still read is never handed out.
    """

    KEPT = 4  # a batch that is made, one that waits, one that runs, and one to spare

    def __init__(self) -> None:
        self._slabs: list[Slab] = []

    def take(self, shapes: Shapes, tasks: int) -> tuple[Slab, Array]:
        """Return a slab, and by task (int64) the slot after the last one that may not be 0.

        Whoever writes says what was written, in `Slab.written`; a slab of which that is not known is not used again.
        """
        held = [each for each in self._slabs if sys.getrefcount(each.memory) > _IDLE]
        idle = [each for each in self._slabs if each not in held and each.written is not None]
        self._slabs = held[-self.KEPT :]
        found = next((each for each in idle if each.shapes == shapes), None)
        if found is None:
            found = Slab(np.zeros(_words(shapes), np.int32), shapes, None)
        stale = np.zeros(tasks, np.int64) if found.written is None else found.written
        found.written = None
        self._slabs += [found, *(each for each in idle if each is not found)]
        del self._slabs[self.KEPT :]
        return found, stale


def _idle_count() -> int:
    slab = Slab(np.zeros(1, np.int32), {}, None)
    return sys.getrefcount(slab.memory)


_IDLE = _idle_count()
"""References that a slab's memory has while no view of it is left."""


def _words(shapes: Shapes) -> int:
    return sum(_line(rows * count) + 3 * _line(local * slots) for (rows, count), (local, slots) in shapes.values())


def _line(words: int) -> int:
    return -(-words // 16) * 16  # a cache line
