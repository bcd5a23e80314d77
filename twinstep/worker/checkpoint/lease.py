"""One writer a place. A local directory is held by a lock that the kernel drops with its holder; a URI by a lease.

A lease is a small object that its holder writes anew every BEAT_S with a count. Whoever else wants the place watches
for LEASE_S, on its own clock, whether the object changes: no two clocks are ever compared, so skew between hosts does
nothing. A later attempt of the same job takes over at once, since the control plane starts one only when the one before
has ended; should that one live on, it finds the lease another's before its next checkpoint and before each commit, and
writes no more. What it wrote till then lies under names of its own, and never where its successor writes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Protocol

from twinstep.spec.errors import TwinstepError, UnavailableError
from twinstep.worker.checkpoint.errors import TakenError
from twinstep.worker.checkpoint.place import LocalPlace, Place, unavailable

BEAT_S = 5.0
SETTLE_S = 1.0  # of two that took a lease at once, who wrote last has it: as long as a write may take to be seen
LEASE_S = 20.0  # four beats: a holder that is slow is not taken for one that is gone
LEASE = "lease.json"
LOCK = "lock"


class Hold(Protocol):
    """The right to write to a place."""

    writer: str
    """End of the names of what its holder writes, where two may hold it at once; empty where nobody else can."""

    def check(self) -> None:
        """Raise TakenError unless it still holds."""

    def release(self) -> None:
        """Give it back. Doing it twice changes nothing."""


class LocalHold:
    """An flock on a file in the directory.

    Raises:
        TakenError: another process has it.
        UnavailableError: the directory cannot be made or written.
    """

    writer = ""

    def __init__(self, place: LocalPlace, owner: str) -> None:
        try:
            place.path.mkdir(parents=True, exist_ok=True)
            self._fd: int | None = os.open(place.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UnavailableError(
                f"checkpoints cannot be written to {place.url}: {error.strerror}",
                remedy="set checkpoint.path to a directory that can be written",
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(self._fd)
            raise taken(place, holder) from None
        except OSError as error:
            os.close(self._fd)
            raise UnavailableError(
                f"the directory {place.url} cannot be locked: {error.strerror}",
                remedy="set checkpoint.path to a directory on a file system with locks, or to a URI",
            ) from error
        with contextlib.suppress(OSError):  # words for others only: a full disk may have room later
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, owner.encode()[:200], 0)

    def check(self) -> None:
        """Do nothing: the kernel lets nobody else have it."""

    def release(self) -> None:
        """Close the file, which drops the lock."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Lease:
    """A lease on a place without locks.

    Raises:
        TakenError: its holder is alive.
        UnavailableError: it cannot be read or written.
    """

    def __init__(
        self,
        place: Place,
        owner: str,
        *,
        lineage: str = "",
        attempt: int = 0,
        beat_s: float = BEAT_S,
        lease_s: float = LEASE_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`lineage` names the job, of which `attempt` supersedes those with lower numbers."""
        self._place, self._owner, self._beat_s = place, owner, beat_s
        self._lineage, self._attempt, self._nonce, self._count = lineage, attempt, uuid.uuid4().hex, 0
        self.writer = self._nonce[:8]
        self._lost: str | None = None
        self._end = threading.Event()
        try:
            self._take(lease_s, sleep)
        except TwinstepError:
            raise
        except Exception as error:  # OSError, or whatever the client of a store raises
            raise unavailable(place.url, error) from error
        self._thread = threading.Thread(target=self._beats, name="checkpoint lease", daemon=True)
        self._thread.start()

    def _take(self, lease_s: float, sleep: Callable[[float], None]) -> None:
        before = self._place.get(LEASE)
        if before is not None and not self._supersedes(before):
            waited = 0.0
            while waited < lease_s:
                sleep(self._beat_s)
                waited += self._beat_s
                now = self._place.get(LEASE)
                if now is None:
                    break
                if now != before:
                    raise taken(self._place, _field(now, "owner") or "another process")
        self._beat()
        sleep(min(self._beat_s, SETTLE_S))
        self.check()

    def _supersedes(self, lease: bytes) -> bool:
        if _field(lease, "released") == "True":
            return True
        same = bool(self._lineage) and _field(lease, "lineage") == self._lineage
        attempt = _field(lease, "attempt") or "0"
        sound = attempt.isascii() and attempt.isdecimal() and len(attempt) < 19
        return same and sound and int(attempt) < self._attempt

    def _beat(self, *, released: bool = False) -> None:
        self._count += 1
        told = {
            "owner": self._owner, "nonce": self._nonce, "count": self._count, "lineage": self._lineage,
            "attempt": self._attempt, "released": released,
        }  # fmt: skip
        self._place.put(LEASE, json.dumps(told).encode())

    def _beats(self) -> None:
        while not self._end.wait(self._beat_s) and self._lost is None:
            # A store's client raises anything while it is away: the next beat may come through.
            with contextlib.suppress(Exception):
                self.check()
                self._beat()

    def check(self) -> None:
        """Raise TakenError where another took the place."""
        now = self._place.get(LEASE)
        if self._lost is None and now is not None and _field(now, "nonce") != self._nonce:
            self._lost = _field(now, "owner") or "another process"
        if self._lost is not None:
            raise taken(self._place, self._lost)

    def release(self) -> None:
        """Say that it is free, where it is still ours to say."""
        if self._end.is_set():
            return
        self._end.set()
        self._thread.join()
        try:
            self.check()
            self._beat(released=True)
        except Exception:  # taken, or the store is away: it runs out by itself
            return


def hold(place: Place, owner: str, *, lineage: str = "", attempt: int = 0) -> Hold:
    """Return the right to write to `place`.

    Raises:
        TakenError: another process has it.
        UnavailableError: it cannot be written.
    """
    if isinstance(place, LocalPlace):
        return LocalHold(place, owner)
    return Lease(place, owner, lineage=lineage, attempt=attempt)


def taken(place: Place, holder: str) -> TakenError:
    """Return the error that says who has a place."""
    return TakenError(
        f"checkpoints in {place.url} are written by {holder}; a second writer would spoil them",
        remedy="wait for it to end, or set another checkpoint.path",
    )


def _field(lease: bytes, name: str) -> str:
    try:
        return str(json.loads(lease).get(name, ""))
    except (ValueError, AttributeError):
        return ""
