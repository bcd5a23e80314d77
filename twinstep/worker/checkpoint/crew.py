"""A checkpoint that several processes write, each its own rows into files of its own; process 0 makes it count.

All processes copy their rows at the same step. Their writer threads then agree three times: process 0 says under which
name, each says what it wrote or why it could not, and process 0 says that it has written the manifest, or removed what
there is. So all are done at about the same time, and none waits for another between two steps instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from torch import Tensor

from twinstep.worker.checkpoint.content import Snapshot
from twinstep.worker.checkpoint.place import Place, in_words
from twinstep.worker.checkpoint.shares import Held, shares
from twinstep.worker.checkpoint.write import Written, write_parts

Value = TypeVar("Value")
GIVE_UP_S = 2.0  # as long as a file may take to be written


class Crew(Protocol):
    """The processes that write checkpoints together. All make each call, in one order, in their writer threads."""

    rank: int
    count: int

    def of_first(self, value: Value | None) -> Value | None:
        """Return process 0's value."""

    def to_first(self, value: Value) -> list[Value]:
        """Return all values, in process 0; nothing elsewhere."""

    def check(self) -> None:
        """Raise where process 0 is gone, so that nobody waits for what is written."""


class NotWritten(Exception):
    """A process could not write its rows, or they hold what no run could go on from."""


class Beside:
    """One thread at a time that works beside the run."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._given_up = threading.Event()

    @property
    def given_up(self) -> bool:
        """Whether nobody wants what it makes any more."""
        return self._given_up.is_set()

    def give_up(self) -> None:
        """Let it end where it asks next, and wait for that for no longer than GIVE_UP_S."""
        self._given_up.set()
        self.finish(GIVE_UP_S)

    def check(self) -> None:
        """Raise NotWritten where it was given up."""
        if self.given_up:
            raise NotWritten("the run has ended without waiting for it")

    @property
    def busy(self) -> bool:
        """Whether it is still at work."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[..., None], *args: Any) -> None:
        """Start, once what was started before has ended."""
        self.finish()
        self._thread = threading.Thread(target=work, args=args, name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self, timeout: float | None = None) -> bool:
        """Wait until it has ended; return whether that was in time."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True


def prefix_of(rank: int) -> str:
    """Return the beginning of the names of a process's files."""
    return f"data-{rank:04d}"


def written_or_why(
    place: Place,
    name: str,
    snapshot: Snapshot,
    *,
    prefix: str,
    only_finite: bool,
    check: Callable[[], None] = lambda: None,
) -> Written | str:
    """Write a snapshot's parts; return what was written, or in words why it could not be.

    Args:
        check: raises where there is no use in writing further; asked before each file.
    """
    try:
        if only_finite and (path := snapshot.not_finite()) is not None:
            return f"{path} holds NaN or infinity"
        return write_parts(place, name, snapshot.parts, prefix=prefix, check=check)
    except NotWritten as error:
        return str(error)
    except Exception as error:  # a file system's OSError, or whatever the client of a store raises
        return in_words(error)


class Member:
    """The part of checkpoints that a process other than process 0 has."""

    def __init__(self, place: Place, crew: Crew, *, only_finite: bool) -> None:
        self._place, self._crew, self._only_finite = place, crew, only_finite
        self._snapshot = Snapshot()
        self._beside = Beside()

    def save(self, tensors: Mapping[str, Tensor], held: Held) -> None:
        """Copy this process's rows of `tensors`, and let a thread write them."""
        self._beside.finish()
        self._snapshot.take(tensors, shares(tensors, self._crew.count, held)[self._crew.rank])
        self._beside.start(self._write)

    def finish(self, timeout: float | None = None) -> None:
        """Wait until that is done, or process 0 has given it up."""
        self._beside.finish(timeout)

    def give_up(self) -> None:
        """Write no more files, and wait for nobody."""
        self._beside.give_up()

    def _check(self) -> None:
        self._beside.check()
        self._crew.check()

    def _write(self) -> None:
        crew = self._crew
        try:
            name = crew.of_first(None)
            if name is not None:
                found = written_or_why(
                    self._place,
                    name,
                    self._snapshot,
                    prefix=prefix_of(crew.rank),
                    only_finite=self._only_finite,
                    check=self._check,
                )
                crew.to_first(found)
            crew.of_first(None)
        except Exception:  # process 0 is gone: the loop meets that as well, and says so
            return
