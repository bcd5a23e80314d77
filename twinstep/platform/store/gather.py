"""Do together what is asked at once: whatever comes while a transaction is under way shares the next one.

A transaction costs about the same for one change as for twenty, and one thread that writes disturbs the others less
than many that wait for each other. Whoever asks gets a future of its own: an answer means that it was committed.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from twinstep.spec.errors import UnavailableError

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
MOST = 100  # of one transaction: other writers wait that long


@dataclass(frozen=True, slots=True)
class _Group(Generic[Asked, Answer]):
    """What was asked in one go, and what is told of it."""

    asked: Sequence[Asked]
    tell: Callable[[Sequence[Answer | Exception]], None]


class Gathered(Generic[Asked, Answer]):
    """A thread that does one kind of work for many who ask for it."""

    def __init__(self, work: Callable[[Sequence[Asked]], Sequence[Answer | Exception]], *, name: str) -> None:
        """`work` gets what was asked, in that order, and returns an answer or an error for each; what it raises is
        everybody's. The thread begins with the first question.
        """
        self._work = work
        self._queue: queue.SimpleQueue[_Group[Asked, Answer] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._lock = threading.Lock()
        self._closed = False
        self._turns: dict[asyncio.AbstractEventLoop, list[tuple[Asked, asyncio.Future[Answer]]]] = {}
        """What was asked in this turn of an event loop."""

    def ask(self, asked: Asked) -> Future[Answer]:
        """Return what will hold the answer, or the error. A future that is cancelled may have been done all the same.

        Raises:
            UnavailableError: it was closed.
        """
        future: Future[Answer] = Future()

        def tell(answers: Sequence[Answer | Exception]) -> None:
            if not future.set_running_or_notify_cancel():
                return
            if isinstance(answers[0], Exception):
                future.set_exception(answers[0])
            else:
                future.set_result(answers[0])

        self._put(_Group((asked,), tell))
        return future

    async def answer(self, asked: Asked) -> Answer:
        """Return the answer, or raise the error; what many tasks ask in one turn of the event loop is done together.

        The thread is woken once the turn is over: awake before, it would take turns with the loop and find little done.

        Raises:
            UnavailableError: it was closed.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        turn = self._turns.setdefault(loop, [])
        if not turn:
            loop.call_soon(self._end_turn, loop)
        turn.append((asked, future))
        return await future

    def close(self) -> None:
        """Do what was asked, and end."""
        with self._lock:
            self._closed = True
            self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout=60)

    def _end_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        turn = self._turns.pop(loop)
        for begin in range(0, len(turn), MOST):
            part = turn[begin : begin + MOST]
            futures = [future for _, future in part]

            def tell(
                answers: Sequence[Answer | Exception], futures: Sequence[asyncio.Future[Answer]] = futures
            ) -> None:
                with suppress(RuntimeError):  # the loop has ended meanwhile, and nobody waits
                    loop.call_soon_threadsafe(_settle, futures, answers)

            try:
                self._put(_Group([asked for asked, _ in part], tell))
            except UnavailableError as error:
                _settle(futures, [error] * len(futures))

    def _put(self, group: _Group[Asked, Answer]) -> None:
        with self._lock:
            if self._closed:
                raise UnavailableError("the control plane is ending", remedy="ask again when it has started again")
            if self._thread.ident is None:
                self._thread.start()
            self._queue.put(group)

    def _loop(self) -> None:
        while (first := self._queue.get()) is not None:
            batch, count, ends = [first], len(first.asked), False
            while count < MOST and not ends:
                try:
                    more = self._queue.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    ends = True
                else:
                    batch.append(more)
                    count += len(more.asked)
            self._answer(batch)
            if ends:
                return

    def _answer(self, batch: Sequence[_Group[Asked, Answer]]) -> None:
        asked = [each for group in batch for each in group.asked]
        answers: Sequence[Answer | Exception]
        try:
            answers = self._work(asked)
        except Exception as error:
            answers = [error] * len(asked)
        at = 0
        for group in batch:
            group.tell(answers[at : at + len(group.asked)])
            at += len(group.asked)


def _settle(futures: Sequence[asyncio.Future[Answer]], answers: Sequence[Answer | Exception]) -> None:
    for future, answer in zip(futures, answers, strict=True):
        if future.done():
            continue  # whoever asked has gone
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
