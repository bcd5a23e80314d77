"""SIGTERM as a wish that the loop reads, or as SystemExit where it cannot look for a long while."""

from __future__ import annotations

import signal
import threading
from types import FrameType

EXIT_STOPPED = 128 + signal.SIGTERM


class StopSignal:
    """Whether somebody wants the run to end. The loop asks between steps, an evaluation between batches."""

    def __init__(self) -> None:
        self.asked = False
        self._at_once = False

    def listen(self) -> None:
        """Take SIGTERM for the wish; signals belong to the main thread, so elsewhere this does nothing."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)

    def end_at_once(self) -> None:
        """Stop where the process is from now on: for what takes long and writes nothing (loading data, compiling).

        Raises:
            SystemExit: a stop was asked for already, or is before `end_between_steps`.
        """
        self._at_once = True
        if self.asked:
            self._end()

    def end_between_steps(self) -> None:
        """Leave it to the loop again."""
        self._at_once = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self._at_once:
            self._end()

    def _end(self) -> None:
        self._at_once = False
        raise SystemExit(EXIT_STOPPED)
