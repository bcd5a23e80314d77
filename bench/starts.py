"""The start of a job, for `recompile.py` and `depth.py`: how long its first step takes, and one at a shape seen before.

Lives in a child process; the parent decides whether its cache directory is fresh.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bench.subject import Subject
from twinstep.worker.compile import CompileEvent, strategies
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


class Deep:
    """A job whose step is compiled once, with equal layers folded into one or not."""

    def __init__(self, *, backend: str, spec: dict[str, Any], cache_dir: str, fold: bool) -> None:
        subject = Subject(spec)
        self._batch = subject.batches(1)[0]
        self._events: list[CompileEvent] = []
        wanted = [each for each in strategies.DEFAULT_STRATEGIES if fold or each.name != strategies.FoldLayers.name]
        self._compiler = subject.compiler(
            backend, cache_dir=Path(cache_dir), on_event=self._events.append, strategies=wanted
        )

    def first(self) -> dict[str, Any]:
        """Compile; return the seconds of all of it, of the capture and of the rest, and the graph's nodes."""
        self._compiler.runner(self._batch)
        event = self._events[-1]
        return {
            "seconds": event.seconds,
            "capture_s": event.capture_seconds,
            "lower_s": event.seconds - event.capture_seconds,
            "nodes": event.nodes,
        }
