"""SIGTERM and Ctrl-C as a wish that the loop reads, or as ToldToStop where it cannot look for a long while."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from twinstep.spec.errors import ToldToStop
from twinstep.spec.words import EXIT_INTERRUPTED

EXIT_STOPPED = 128 + signal.SIGTERM
ONE_PRESS = 1.0
"""Seconds within which SIGINT counts once: a terminal sends it to a launcher's processes, and so does the launcher."""
HEARD = b"\nstopping; Ctrl-C again ends at once, without saving\n"


class StopSignal:
    """Whether somebody wants the run to end. The loop asks between steps, an evaluation between batches."""

    def __init__(self) -> None:
        self.asked = False
        self._at_once = False
        self._aloud = False
        self._pressed: float | None = None
        self._before: dict[int, Any] = {}

    def listen(self, *, aloud: bool = False) -> None:
        """Take SIGTERM and Ctrl-C for the wish; signals belong to the main thread, so elsewhere this does nothing.

        A second Ctrl-C is a KeyboardInterrupt. One that is ignored (by a job in a shell's background) stays so.

        Args:
            aloud: answer the first Ctrl-C with a line on standard error, since a step may take long.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._aloud = aloud
        self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._on_signal)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._on_signal)

    def listen_no_more(self, *, ends_process: bool = False) -> None:
        """Leave signals to whoever had them, unless that was no Python code.

        Args:
            ends_process: the process ends with its run, by now with an exit code that SIGTERM must not change any more.
        """
        while self._before:
            number, handler = self._before.popitem()
            if ends_process and number == signal.SIGTERM:
                handler = signal.SIG_IGN
            if handler is not None:
                signal.signal(number, handler)

    def exit_code(self, code: int) -> int:
        """Return the exit code of a run that was told to stop: 130 after Ctrl-C, else `code`."""
        return code if self._pressed is None else EXIT_INTERRUPTED

    def end_at_once(self) -> None:
        """Stop where the process is from now on: for what takes long and writes nothing (loading data, compiling).

        Raises:
            ToldToStop: a stop was asked for already, or is before `end_between_steps`.
        """
        self._at_once = True
        if self.asked:
            self._end()

    def end_between_steps(self) -> None:
        """Leave it to the loop again."""
        self._at_once = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._pressed is not None and now - self._pressed > ONE_PRESS:
                signal.signal(signal.SIGINT, signal.default_int_handler)  # one more ends what this one left waiting
                raise KeyboardInterrupt
            if self._aloud and self._pressed is None:
                with contextlib.suppress(OSError):
                    os.write(2, HEARD)  # whatever the signal came into may hold sys.stderr's lock
            self._pressed = self._pressed or now
        self.asked = True
        if self._at_once:
            self._end()

    def _end(self) -> None:
        self._at_once = False
        raise ToldToStop(EXIT_STOPPED)
