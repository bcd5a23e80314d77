"""Trace some steps of a run, as `debug.profile` asks, and say what their time went to. Costs nothing where it is off.

Nothing here ends a run: a trace that cannot be begun or written is told of, and training goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from twinstep.spec.errors import UnavailableError
from twinstep.spec.job import JobSpec
from twinstep.spec.report import PROFILE_PARTS
from twinstep.spec.running import ProfileSpec
from twinstep.spec.words import duration
from twinstep.worker.compile.traces import COMPUTE, STEP, WAIT, Span, Trace, start_trace

FOLDER = "profile"  # in the run's directory, or where a run by hand was started
_OFF: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
Interval = tuple[float, float]


class Profiling:
    """Traces the steps that are asked for, once."""

    def __init__(
        self,
        spec: JobSpec,
        directory: Path | None,
        *,
        tell: Callable[[str, str, dict[str, Any]], None],
        wanted: bool = True,
    ) -> None:
        """`tell` gets the event `profiled` or `profile_failed`: name, reason, data; not `wanted`, nothing is traced."""
        self._asked: ProfileSpec | None = spec.debug.profile if wanted else None
        self._backend, self._tell = spec.compile.backend, tell
        self._directory = (directory or Path.cwd()) / FOLDER
        self._trace: Trace | None = None
        self._first = self._last = 0

    def step(self, number: int) -> contextlib.AbstractContextManager[Any]:
        """Return what is around step `number`, counted from 1: from asking for its batch to having its loss."""
        if self._asked is None:
            return _OFF
        return _Step(self, number)

    def waiting(self) -> contextlib.AbstractContextManager[Any]:
        """Return what is around waiting for a batch."""
        return _OFF if self._trace is None else self._trace.mark(WAIT)

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """Return what is around a program that runs, until its loss is known."""
        return _OFF if self._trace is None else self._trace.mark(COMPUTE)

    def close(self) -> None:
        """End a trace that is under way: a run that stops in the midst of it has traced the steps until then."""
        if self._trace is not None:
            self._finish(self._last)

    def begin(self, number: int) -> Trace | None:
        """Begin the trace where step `number` is one that is asked for; return the one under way."""
        asked = self._asked
        if self._trace is None and asked is not None and asked.start <= number <= asked.last:
            try:
                self._trace = start_trace(self._backend, self._directory)
            except (UnavailableError, OSError) as error:
                self._failed(error)
                return None
            self._first = number
        return self._trace

    def end(self, number: int) -> None:
        """End the trace after the last step that is asked for."""
        self._last = number
        if self._trace is not None and self._asked is not None and number >= self._asked.last:
            self._finish(number)

    def _finish(self, last: int) -> None:
        trace, self._trace, self._asked = self._trace, None, None
        if trace is None:
            return
        try:
            spans = trace.stop()
            size = sum(path.stat().st_size for path in self._directory.rglob("*") if path.is_file())
        except Exception as error:  # whatever a profiler raises, of a full disk too; or its files went meanwhile
            self._failed(error)
            return
        found = breakdown(spans)
        data = {
            "first": self._first,
            "last": last,
            "time_s": {part: round(seconds, 6) for part, seconds in found.items()},
            "directory": str(self._directory),
            "bytes": size,
        }
        self._tell("profiled", _in_words(found, self._first, last, self._directory), data)

    def _failed(self, error: Exception) -> None:
        self._asked = None
        problem = str(error).strip() or type(error).__name__
        reason = f"no trace: {problem[:600]}; training goes on without"
        self._tell("profile_failed", reason, {"directory": str(self._directory)})


class _Step:
    """One step of a run that is to be traced; the trace begins before the first one and ends after the last."""

    def __init__(self, profiling: Profiling, number: int) -> None:
        self._profiling, self._number = profiling, number
        self._mark: contextlib.AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        trace = self._profiling.begin(self._number)
        if trace is not None:
            self._mark = trace.mark(STEP, self._number)
            self._mark.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._mark is not None:
            self._mark.__exit__(kind, error, at)
            self._profiling.end(self._number)


def breakdown(spans: Sequence[Span]) -> dict[str, float]:
    """Return the seconds of the traced steps by what they went to; they add up to the steps' own.

    Each moment counts for the first of `PROFILE_PARTS` that is done in it, on each device; the mean over devices.
    """
    window = union((span.start, span.end) for span in spans if span.what == "step")
    devices: list[int | None] = [*sorted({span.device for span in spans if span.device is not None})] or [None]
    found = dict.fromkeys(PROFILE_PARTS, 0.0)
    for device in devices:
        mine = [span for span in spans if span.device in (None, device) and span.what != "step"]
        seen: list[Interval] = []
        covered = 0.0
        for part in PROFILE_PARTS[:-1]:
            seen = union([*seen, *((span.start, span.end) for span in mine if span.what == part)])
            now = length(within(seen, window))
            found[part] += (now - covered) / len(devices)
            covered = now
        found["idle"] += (length(window) - covered) / len(devices)
    return {part: max(0.0, seconds) for part, seconds in found.items()}


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same moments as intervals that do not touch, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def within(intervals: Sequence[Interval], window: Sequence[Interval]) -> list[Interval]:
    """Return the moments of both; each is a `union`."""
    found: list[Interval] = []
    at = 0
    for start, end in intervals:
        while at < len(window) and window[at][1] <= start:
            at += 1
        for first, last in window[at:]:
            if first >= end:
                break
            found.append((max(start, first), min(end, last)))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Return the sum of their lengths."""
    return sum(end - start for start, end in intervals)


def _in_words(found: dict[str, float], first: int, last: int, directory: Path) -> str:
    whole = sum(found.values()) or 1.0
    shares = ", ".join(f"{part.replace('_', ' ')} {seconds / whole:.0%}" for part, seconds in found.items() if seconds)
    each = duration(whole / (last - first + 1)) if whole >= 1 else f"{1e3 * whole / (last - first + 1):.1f} ms"
    return f"steps {first} to {last}, {each} each: {shares}; the trace is in {directory}"
