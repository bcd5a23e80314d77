"""What processes agree on, writers of checkpoints and loops, where disks may be slow: over the store by which they met.

One may take as long as its disk does: nothing here has a time limit but silence. Who writes beats once in BEAT_S, and
process 0 gives up whoever has not for SILENCE_S, by its own clock; that checkpoint fails, and the next is tried. The
store is process 0's: without process 0 each call raises.
"""

from __future__ import annotations

import pickle
import threading
import time
from typing import Any, TypeVar

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from twinstep.worker.checkpoint.crew import NotWritten
from twinstep.worker.train.processes import Process

Value = TypeVar("Value")
BEAT_S = 1.0
SILENCE_S = 30.0
HASTE_S = 5.0
"""The same for a run that ends because something failed."""
_WAITS = (0.02, 1.0)  # seconds between two looks, at first and at last
_TURN_WAITS = (0.001, 0.25)


class FirstsTurn:
    """Lets the loops of processes wait for what process 0 does alone, for as long as its disk takes.

    An exchange has a time limit, after which whoever does not take part is given up. This one has none: it ends when
    process 0 is done, or gone.

    Args:
        store: of torch.distributed, that all have.
    """

    def __init__(self, process: Process, store: Any) -> None:
        self._first = process.rank == 0
        self._store: Any = PrefixStore("process 0's turn", store.clone())
        self._turns = 0

    def over(self) -> None:
        """Say in process 0 that it is done; wait for that elsewhere. All make each call.

        Raises:
            Exception: process 0 is gone, and the store with it.
        """
        self._turns += 1
        if self._first:
            self._store.add("over", 1)
            return
        wait = _TURN_WAITS[0]
        while self._store.add("over", 0) < self._turns:
            time.sleep(wait)
            wait = min(_TURN_WAITS[1], wait * 1.5)


class SilentError(NotWritten):
    """A process has said nothing for long."""


class StoreCrew:
    """The run's processes. All make each call, in one order, in their writer threads.

    Args:
        store: of torch.distributed, that all have.
    """

    def __init__(self, process: Process, store: Any) -> None:
        self.rank, self.count = process.rank, process.count
        self.silence_s = SILENCE_S
        self._store: Any = PrefixStore("checkpoints", store.clone())  # the loop may wait in the other for long
        self._calls = 0
        self._end = threading.Event()
        if self.rank:
            threading.Thread(target=self._beats, name="checkpoint beats", daemon=True).start()

    def of_first(self, value: Value | None) -> Value | None:
        """Return process 0's value.

        Raises:
            Exception: process 0 is gone, and the store with it.
        """
        self._calls += 1
        key = f"{self._calls}"
        if self.rank == 0:
            self._store.set(key, pickle.dumps(value))
            return value
        self._wait(key)
        found: Value | None = self._get(key)
        return found

    def to_first(self, value: Value) -> list[Value]:
        """Return all values, in process 0; nothing elsewhere.

        Raises:
            SilentError: a process is gone, or cut off.
            Exception: process 0 is gone, and the store with it.
        """
        self._calls += 1
        if self.rank:
            self._store.set(f"{self._calls}/{self.rank}", pickle.dumps(value))
            return []
        found = [value]
        for rank in range(1, self.count):
            key = f"{self._calls}/{rank}"
            self._wait(key, rank)
            found.append(self._get(key))
            self._store.delete_key(key)
        for call in range(max(1, self._calls - 3), self._calls):  # all have read what was said before
            self._store.delete_key(f"{call}")
        return found

    def check(self) -> None:
        """Raise where process 0 is gone."""
        self._store.check([""])

    def close(self) -> None:
        """End the thread that beats."""
        self._end.set()

    def _get(self, key: str) -> Any:
        return pickle.loads(self._store.get(key))  # noqa: S301 (what another process of this run has put there)

    def _wait(self, key: str, rank: int = 0) -> None:
        """Wait for a key; that another process than 0 is to set only while it beats."""
        wait, longest = _WAITS
        beat, since = "", time.monotonic()
        while not self._store.check([key]):
            time.sleep(wait)
            wait = min(longest, wait * 1.5)
            if not rank:
                continue
            now = str(self._store.add(f"beat/{rank}", 0))
            if now != beat:
                beat, since = now, time.monotonic()
            elif time.monotonic() - since > self.silence_s:
                raise SilentError(f"process {rank} has said nothing for {time.monotonic() - since:.0f} s")

    def _beats(self) -> None:
        try:
            while not self._end.wait(BEAT_S):
                self._store.add(f"beat/{self.rank}", 1)
        except Exception:  # process 0 is gone
            return
