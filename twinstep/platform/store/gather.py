"""Do together what is asked at once: whatever comes while a transaction is under way shares the next one.

A transaction costs about the same for one change as for twenty, and one thread that writes disturbs the others less
than many that wait for each other. Whoever asks gets a future of its own: an answer means that it was committed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from twinstep.spec.errors import UnavailableError

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
MOST = 64  # of one transaction: other writers wait that long


class Gathered(Generic[Asked, Answer]):
    """A thread that does one kind of work for many who ask for it."""

    def __init__(self, work: Callable[[Sequence[Asked]], Sequence[Answer | Exception]], *, name: str) -> None:
        """`work` gets what was asked, in that order, and returns an answer or an error for each; what it raises is
        everybody's. The thread begins with the first question.
        """
        self._work = work
        self._queue: queue.SimpleQueue[tuple[Asked, Future[Answer]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, asked: Asked) -> Future[Answer]:
        """Return what will hold the answer, or the error. A future that is cancelled may have been done all the same.

        Raises:
            UnavailableError: it was closed.
        """
        future: Future[Answer] = Future()
        with self._lock:
            if self._closed:
                raise UnavailableError("the control plane is ending", remedy="ask again when it has started again")
            if self._thread.ident is None:
                self._thread.start()
            self._queue.put((asked, future))
        return future

    def close(self) -> None:
        """Do what was asked, and end."""
        with self._lock:
            self._closed = True
            self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout=60)

    def _loop(self) -> None:
        while (first := self._queue.get()) is not None:
            batch, ends = [first], False
            while len(batch) < MOST and not ends:
                try:
                    more = self._queue.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    ends = True
                else:
                    batch.append(more)
            self._answer(batch)
            if ends:
                return

    def _answer(self, batch: Sequence[tuple[Asked, Future[Answer]]]) -> None:
        answers: Sequence[Answer | Exception]
        try:
            answers = self._work([asked for asked, _ in batch])
        except Exception as error:
            answers = [error] * len(batch)
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.set_running_or_notify_cancel():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
