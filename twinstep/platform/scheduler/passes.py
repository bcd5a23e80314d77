"""A thread that passes over the runs again and again, at once where it is nudged; both reconcilers are one."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod

from twinstep.spec.errors import TwinstepError, UnavailableError

log = logging.getLogger(__name__)
MAX_REASON = 2000  # characters of what a run says of its trouble


class Passes(ABC):
    """The loop; `run_once` is one pass of it."""

    def __init__(self, name: str, *, every_seconds: float, pause_seconds: float = 0.0) -> None:
        """A pass comes `every_seconds`, or when nudged, yet not before `pause_seconds` have gone by."""
        self._every = every_seconds
        self._pause = pause_seconds
        self._nudged = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._passed_at: float | None = None

    @abstractmethod
    def run_once(self) -> None:
        """Look at every run that is not final, and do the one thing each needs."""

    def start(self) -> None:
        """Begin to pass over the runs."""
        self._thread.start()

    def stop(self) -> None:
        """End after the pass that is under way. Runs go on."""
        self._stopping.set()
        self._nudged.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=30)

    def nudge(self) -> None:
        """Pass at once: something was submitted or cancelled, or has changed."""
        self._nudged.set()

    def age(self) -> float | None:
        """Return the seconds since the last whole pass; None before the first."""
        return None if self._passed_at is None else time.monotonic() - self._passed_at

    def passed(self) -> None:
        """Note that a pass is done."""
        self._passed_at = time.monotonic()

    def _loop(self) -> None:
        told = ""
        while not self._stopping.is_set():
            try:
                self.run_once()
                told = ""
            except UnavailableError as error:
                if told != str(error):  # once, not at every pass until it is mended
                    told = str(error)
                    log.error("a pass over the runs failed: %s; the next one tries again", told)
            except Exception:
                log.exception("a pass over the runs failed; the next one tries again")
            self._stopping.wait(self._pause)
            self._nudged.wait(self._every)
            self._nudged.clear()


def trouble_with(run_id: str, error: Exception) -> str:
    """Return what a run says when it could not be looked after; the log has the traceback where it is a bug."""
    if isinstance(error, TwinstepError):
        return f"is tried again: {error}"[:MAX_REASON]
    log.exception("run %s could not be looked after", run_id)
    return f"is tried again: {type(error).__name__}: {error}"[:MAX_REASON]
