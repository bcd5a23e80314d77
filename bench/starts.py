"""The start of a job, for `recompile.py`: how long its first step takes, and a step at a shape it returns to.

Lives in a child process; the parent decides whether its cache directory is fresh.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bench.subject import Subject
from twinstep.worker.compile import CompileEvent
from twinstep.worker.data.batch import Batch


class Start:
    """A job about to take its first step; its other shape is twice the batch."""

    def __init__(self, *, backend: str, spec: dict[str, Any], cache_dir: str) -> None:
        subject = Subject(spec)
        size = subject.spec.data.batch_size
        self._batch = subject.batches(1)[0]
        self._other = subject.batches(1, batch_size=2 * size)[0]
        self._events: list[CompileEvent] = []
        self._compiler = subject.compiler(backend, cache_dir=Path(cache_dir), on_event=self._events.append)

    def first(self) -> dict[str, Any]:
        """Compile and run one step; return its seconds and whether the cache on disk answered."""
        seconds = self._timed(self._batch)
        return {"seconds": seconds, "cache": self._events[-1].cache, "nodes": self._events[-1].nodes}

    def away(self) -> None:
        """Run one step at the other shape."""
        self._timed(self._other)

    def back(self) -> dict[str, Any]:
        """Run one step at the other shape, then return the seconds of one at the first; how often was compiled."""
        self.away()
        seconds = self._timed(self._batch)
        return {"seconds": seconds, "compiles": len(self._events)}

    def _timed(self, batch: Batch) -> float:
        started = time.perf_counter()
        float(self._compiler(batch).loss)  # waits for the step
        return time.perf_counter() - started
