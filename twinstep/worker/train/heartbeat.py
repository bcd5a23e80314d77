"""A file that changes while training gets on, for a supervisor outside that sees whether it does.

`DIR/heartbeat` holds `{"phase", "step", "beat"}`. Only in the phase `training` does silence mean anything: a compile or
an evaluation takes what it takes.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

NAME = "heartbeat"
WIDTH = 96  # bytes of the file, always: it is written over in place, which takes microseconds


def last_step(directory: Path | None) -> int | None:
    """Return the step that the heartbeat in `directory` tells of; None: there is none."""
    if directory is None:
        return None
    try:
        return int(json.loads((directory / NAME).read_bytes())["step"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


class Heartbeat:
    """Writes the file; a disk that does not take it is no reason to end a run."""

    def __init__(self, directory: Path | None) -> None:
        self._fd: int | None = None
        self._beat = 0
        if directory is not None:
            with contextlib.suppress(OSError):
                self._fd = os.open(directory / NAME, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def beat(self, phase: str, step: int) -> None:
        """Say that the run is alive, and what it does."""
        if self._fd is None:
            return
        self._beat += 1
        told = json.dumps({"phase": phase, "step": step, "beat": self._beat}).encode()
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, told.ljust(WIDTH), 0)

    def close(self) -> None:
        """Write no more."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
