"""When to try again what did not work: later each time, never at the same moment as others, and not for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from twinstep.platform.backoff import backoff

FIRST_S = 1.0
LONGEST_S = 60.0


@dataclass(slots=True)
class _Wait:
    since: float
    """Of the first failure in a row."""
    failures: int
    until: float


class Patience:
    """Waits, by whatever is tried. In memory: who takes over begins anew, and tries at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waits: dict[tuple[str, str], _Wait] = {}

    def waits(self, run_id: str, what: str) -> bool:
        """Say whether it is too early to try again."""
        wait = self._waits.get((run_id, what))
        return wait is not None and self._clock() < wait.until

    def hold(self, run_id: str, what: str, seconds: float) -> None:
        """Do not try for so long: it was asked for, and takes its time."""
        now = self._clock()
        self._waits[run_id, what] = _Wait(since=now, failures=1, until=now + seconds)

    def failed(self, run_id: str, what: str) -> float:
        """Note a failure; return for how many seconds it has been failing."""
        now = self._clock()
        wait = self._waits.get((run_id, what))
        failures = 1 if wait is None else wait.failures + 1
        since = now if wait is None else wait.since
        delay = backoff(failures, first=FIRST_S, longest=LONGEST_S)
        self._waits[run_id, what] = _Wait(since=since, failures=failures, until=now + delay)
        return now - since

    def worked(self, run_id: str, what: str) -> None:
        """Forget the failures."""
        self._waits.pop((run_id, what), None)

    def keep_only(self, run_ids: Collection[str]) -> None:
        """Forget runs that have ended."""
        for key in [key for key in self._waits if key[0] not in run_ids]:
            del self._waits[key]
