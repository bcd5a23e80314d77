"""A file that changes while training gets on, for a supervisor outside that sees whether it does.

`DIR/heartbeat` holds `{"phase", "step", "beat"}`. Only in the phase `training` does silence mean anything: a compile or
an evaluation takes what it takes.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

NAME = "heartbeat"
EVERY_S = 0.25  # seconds between writes while steps are quicker


class Heartbeat:
    """Writes the file; a disk that does not take it is no reason to end a run."""

    def __init__(self, directory: Path | None) -> None:
        self._path = None if directory is None else directory / NAME
        self._last = 0.0
        self._phase = ""
        self._beat = 0

    def beat(self, phase: str, step: int) -> None:
        """Say that the run is alive, and what it does."""
        now = time.monotonic()
        if self._path is None or (phase == self._phase and now - self._last < EVERY_S):
            return
        self._last, self._phase, self._beat = now, phase, self._beat + 1
        with contextlib.suppress(OSError):
            self._path.write_text(json.dumps({"phase": phase, "step": step, "beat": self._beat}))
