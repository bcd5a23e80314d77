"""Threads that run kernels: started once, each with scratch memory that grows to what a batch needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from twinstep.spec.errors import SpecError
from twinstep.worker.embedding.sparsecore.kernels.order import MAX_DIGIT, MAX_PASSES

Array = npt.NDArray[Any]
FEW = 100_000  # ids that one thread does sooner than several can be woken
EVEN = 1.05  # of an equal share: as much more as a thread may get


class Scratch:
    """One thread's memory."""

    def __init__(self) -> None:
        self.counts = np.empty((MAX_PASSES, 1 << MAX_DIGIT), np.int32)
        self._kept: dict[str, Array] = {}

    def take(self, name: str, kind: Any, size: int) -> Array:
        """Return an array of at least `size`, the same one as long as it is large enough."""
        found = self._kept.get(name)
        if found is None or len(found) < size:
            found = self._kept[name] = np.empty(max(size, 1), kind)
        return found


class Workers:
    """A pool of `threads`, this one included. Kernels hold no lock of the interpreter, so they run at once."""

    def __init__(self, threads: int | None = None) -> None:
        """Start no thread yet.

        Raises:
            SpecError: fewer than 1 thread.
        """
        count = len(os.sched_getaffinity(0)) if threads is None else threads
        if count < 1:
            raise SpecError(f"{threads} threads", remedy="give 1 or more threads")
        self.scratch = [Scratch() for _ in range(count)]
        self._pool = ThreadPoolExecutor(count - 1, "sparsecore") if count > 1 else None

    def share(self, entries: Array) -> list[Array]:
        """Deal tasks out by their entries; return task numbers by thread, ascending.

        Runs of neighbours where these are nearly even, since neighbours write to the same cache lines; else the largest
        first to whoever has least.
        """
        count, total = len(self.scratch), int(entries.sum())
        if count == 1 or total < FEW:
            return [np.arange(len(entries))]
        ends = np.cumsum(entries)
        cuts = np.searchsorted(ends - entries / 2, np.arange(1, count) * (total / count))
        runs = [each for each in np.split(np.arange(len(entries)), cuts) if len(each)]
        if max(int(entries[each].sum()) for each in runs) <= EVEN * total / count:
            return runs
        loads, dealt = [0] * count, [[] for _ in range(count)]  # type: list[int], list[list[int]]
        for number in np.argsort(-entries, kind="stable").tolist():
            least = loads.index(min(loads))
            loads[least] += int(entries[number]) + 1
            dealt[least].append(number)
        return [np.array(sorted(each), np.int64) for each in dealt if each]

    def run(self, shares: Sequence[Array], work: Callable[[Array, Scratch], None]) -> None:
        """Do `work` on each share of tasks, one thread each; return when all are done."""
        others = []
        if self._pool is not None:
            pairs = zip(shares[1:], self.scratch[1:], strict=False)
            others = [self._pool.submit(work, share, scratch) for share, scratch in pairs]
        work(shares[0], self.scratch[0])
        for each in others:
            each.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
