"""Threads that run kernels: started once, each with scratch memory that grows to what a batch needs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import numpy.typing as npt

from twinstep.spec.errors import SpecError
from twinstep.worker.embedding.sparsecore.kernels.order import MAX_DIGIT, MAX_PASSES

Array = npt.NDArray[Any]
FEW = 100_000  # ids that one thread does sooner than several can be woken
TURNS = 12  # runs of tasks for each thread: more even the load, fewer share fewer cache lines


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
        self._spread = _Spread()
        self._pool = ThreadPoolExecutor(count - 1, "sparsecore", self._spread.join) if count > 1 else None

    def share(self, entries: Array) -> Array:
        """Cut tasks into runs of neighbours of about as many entries; return where each begins, and the last one ends.

        Neighbours write to the same cache lines. What is too little for several threads is one run.
        """
        count, total = len(self.scratch), int(entries.sum())
        if count == 1 or total < FEW:
            return np.array([0, len(entries)], np.int64)
        ends = np.cumsum(entries)
        cuts = np.searchsorted(ends - entries / 2, np.arange(1, count * TURNS) * (total / (count * TURNS)))
        return np.unique(np.concatenate([[0], cuts, [len(entries)]])).astype(np.int64)

    def run(self, shares: Array, work: Callable[[Array, Scratch], None]) -> None:
        """Do `work` on all tasks; return when all are done.

        Each thread takes the next run of tasks once it has done one, so that none waits for one that started late.

        Args:
            shares: of `share`.
            work: takes `turns` of `kernels.run.claim`, and a thread's scratch memory.
        """
        turns = np.concatenate([[0], shares])
        others = []
        if self._pool is not None and len(shares) > 2:
            self._spread.around()
            scratch = self.scratch[1 : len(shares) - 1]
            others = [self._pool.submit(work, turns, each) for each in scratch]
        try:
            work(turns, self.scratch[0])
        finally:
            begun = [each for each in others if not each.cancel()]  # one that has not would find nothing left to do
            wait(begun)
        for each in begun:
            each.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


class _Spread:
    """Keeps a pool's threads off the processor that gives them work, and apart.

    Linux wakes a thread beside whoever wakes it unless another processor is idle, and to a guest of KVM those that are
    idle look taken (`vcpu_is_preempted`): threads woken for a few milliseconds then run one after another.
    """

    def __init__(self) -> None:
        self._threads: list[int] = []
        self._placed: tuple[int, int] | None = None
        self._where = getattr(ctypes.CDLL(None), "sched_getcpu", None)

    def join(self) -> None:
        """Count the calling thread in."""
        self._threads.append(threading.get_native_id())

    def around(self) -> None:
        """Place the threads on the processors that this process may use, less the one that this thread is on."""
        here = -1 if self._where is None else int(self._where())
        if here < 0 or self._placed == (here, len(self._threads)):
            return
        self._placed = (here, len(self._threads))
        others = sorted(os.sched_getaffinity(0) - {here})
        if not others:
            return
        for thread, mine in zip(self._threads, np.array_split(others, len(self._threads) or 1), strict=False):
            with contextlib.suppress(OSError):  # it has ended, or the processors are no longer ours: as it was
                os.sched_setaffinity(thread, [int(each) for each in mine] or others)
