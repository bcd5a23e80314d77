"""A line now and then while something takes long, where nothing can be redrawn: what, and for how long already."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST, EVERY = 20.0, 60.0
"""Seconds until the first line, and between two."""


class Waiting:
    """Says from a thread of its own what is being waited for, until that is over."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._over: threading.Event | None = None

    def start(self, what: str) -> None:
        """Begin to wait for something; whatever was waited for before is over."""
        self.end()
        self._over = threading.Event()
        threading.Thread(target=self._tell, args=(what, self._over), name="waiting", daemon=True).start()

    def end(self) -> None:
        """What was waited for is over."""
        if self._over is not None:
            self._over.set()
            self._over = None

    def _tell(self, what: str, over: threading.Event) -> None:
        started, pause = time.monotonic(), FIRST
        while not over.wait(pause):
            self._say(f"{what}: {time.monotonic() - started:.0f} s so far")
            pause = EVERY
