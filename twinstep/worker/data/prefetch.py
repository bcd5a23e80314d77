"""Run an iterator ahead in a thread, a bounded number of items, without changing what or how much it yields.

`train/` wraps the loader in it so that packing overlaps the step.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

Item = TypeVar("Item")
POLL_S = 0.1  # how soon a full producer notices that nobody reads any more


class _End:
    """Last entry of the queue: the source is exhausted, or raised `error`."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetch(Generic[Item]):
    """Iterator over `source` that draws at most `depth` + 1 items ahead; also a context manager that stops it.

    An exception of the source is raised where its item would have come, after all items before it.
    """

    def __init__(self, source: Iterator[Item], *, depth: int = 2) -> None:
        self._queue: queue.Queue[Item | _End] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._produce, args=(source,), name="prefetch", daemon=True)
        self._thread.start()

    def _produce(self, source: Iterator[Item]) -> None:
        try:
            for item in source:
                if not self._put(item):
                    return
            self._put(_End(None))
        except BaseException as error:  # the reader raises it
            self._put(_End(error))

    def _put(self, item: Item | _End) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=POLL_S)
            except queue.Full:
                continue
            return True
        return False

    def __iter__(self) -> Self:
        return self

    @property
    def ready(self) -> int:
        """Items that lie ready to be taken."""
        return self._queue.qsize()

    def __next__(self) -> Item:
        if self._ended or self._stop.is_set():
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, _End):
            self._ended = True
            self._thread.join()
            if item.error is not None:
                raise item.error
            raise StopIteration
        return item

    def close(self) -> None:
        """Stop drawing and wait for the thread; what was drawn ahead is dropped. Safe to call twice."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
