"""SIGTERM before a run has begun: while its packages are imported, or while it waits for its other processes.

Python hears a signal between two of its own instructions: in a library that waits for a peer, not at all. Here a thread
hears it, from the pipe that the interpreter's C code writes to, and ends the process at once: there is nothing to save.
The exit code is that of a run that was told to stop, so that nobody takes it for a failure. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType

from twinstep.spec.words import EXIT_PREEMPTED
from twinstep.worker.train.stop import EXIT_STOPPED

WORDS = b"told to stop before the run had begun: nothing was changed\n"


class EarlyStop:
    """Ends this process at SIGTERM until `over`; for the main thread of a process that ends with its run.

    Args:
        place: whether checkpoints have a place, and so the run goes on when it is started again.
    """

    def __init__(self, *, place: bool) -> None:
        self._code = EXIT_PREEMPTED if place else EXIT_STOPPED
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(self._read, True)
        self._lock, self._over = threading.Lock(), False
        self._handler = signal.signal(signal.SIGTERM, _hear)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="early stop", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while told := os.read(self._read, 64):
            with self._lock:  # either this ends the process, or the run has begun, and hears the signal itself
                if self._over:
                    return
                if signal.SIGTERM in told:
                    with contextlib.suppress(OSError):
                        os.write(2, WORDS)
                    os._exit(self._code)

    def over(self) -> None:
        """Leave SIGTERM to whoever listens by now. Doing it twice changes nothing."""
        with self._lock:
            if self._over:
                return
            self._over = True
        signal.set_wakeup_fd(self._wakeup)
        if signal.getsignal(signal.SIGTERM) is _hear:
            signal.signal(signal.SIGTERM, self._handler)
        os.close(self._write)  # the thread reads the end
        self._thread.join()
        os.close(self._read)


def _hear(number: int, frame: FrameType | None) -> None:
    """Do nothing: with a handler of its own the interpreter writes to the pipe."""
