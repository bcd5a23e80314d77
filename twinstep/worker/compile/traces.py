"""Traces of a few steps by the profiler of whatever runs them, as files for TensorBoard, and what they show as spans.

XLA's steps are traced by `jax.profiler` (an XSpace: `plugins/profile/TIME/HOST.xplane.pb`, which XProf reads); steps of
PyTorch and Inductor by `torch.profiler` (`HOST.pt.trace.json.gz`). Names of planes and lines of an XSpace are those of
XLA's `tsl/profiler/utils/xplane_schema.cc`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity

from twinstep.spec.errors import UnavailableError

What = Literal["tensorcore", "sparsecore", "compute", "collectives", "host_input", "step"]
WAIT, COMPUTE, STEP = "twinstep.host_input", "twinstep.compute", "twinstep.step"
"""Names by which the loop marks, in a trace, waiting for a batch, a program that runs, and a step as a whole."""
_OURS = (WAIT, COMPUTE, STEP)
_MARKS: dict[str, What] = {WAIT: "host_input", STEP: "step"}

_COLLECTIVE = re.compile(
    r"^%?(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast|ragged-all-to-all)"
    r"|^(nccl|gloo:|c10d::)",
    re.IGNORECASE,
)
_TENSORCORE = re.compile(r"^/device:TPU:(\d+)$")
_SPARSECORE = re.compile(r"^/device:TPU:(\d+) SparseCore \d+$")
_OP_LINES = {"XLA Ops", "Async XLA Ops", "Sparse Core Ops"}
_HOST = "/host:CPU"


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time in which something was done."""

    what: What
    start: float
    """Seconds, by the trace's own clock."""
    end: float
    device: int | None = None
    """Of several devices the one that did it; None: the host, whose spans hold for every device."""


class Trace(Protocol):
    """A trace under way."""

    def mark(self, name: str, step: int = 0) -> contextlib.AbstractContextManager[Any]:
        """Return what marks a stretch in the trace."""

    def stop(self) -> list[Span]:
        """End it, write its files and return what it shows.

        Raises:
            OSError, RuntimeError: it cannot be written.
        """


def start_trace(backend: str, directory: Path) -> Trace:
    """Begin to trace this process into files below `directory`.

    Raises:
        UnavailableError: another trace is under way in this process, or the directory cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnavailableError(
            f"the directory {directory} for a trace cannot be made: {error.strerror}",
            remedy="make room, or free its name",
        ) from None
    try:
        return _XlaTrace(directory) if backend == "xla" else _TorchTrace(directory)
    except RuntimeError as error:
        raise UnavailableError(
            f"the profiler cannot be started: {str(error).splitlines()[0]}",
            remedy="a process has one profiler: end the other first, or leave out debug.profile",
        ) from None


class _XlaTrace:
    """A trace by `jax.profiler`."""

    def __init__(self, directory: Path) -> None:
        import jax

        self._jax, self._directory = jax, directory
        self._before = set(directory.rglob("*.xplane.pb"))
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of Python would be traced: steps take many times as long
        jax.profiler.start_trace(str(directory), profiler_options=options)

    def mark(self, name: str, step: int = 0) -> contextlib.AbstractContextManager[Any]:
        """Return an annotation; that of a step is one by which XProf tells steps apart."""
        profiler = self._jax.profiler
        if name == STEP:
            return profiler.StepTraceAnnotation(name, step_num=step)  # type: ignore[no-any-return]
        return profiler.TraceAnnotation(name)  # type: ignore[no-any-return]

    def stop(self) -> list[Span]:
        """End it, write the XSpace and read it again."""
        self._jax.profiler.stop_trace()  # type: ignore[no-untyped-call]
        written = sorted(set(self._directory.rglob("*.xplane.pb")) - self._before)
        if not written:
            raise RuntimeError("the profiler wrote no trace")
        return list(spans_of_xspace(self._jax.profiler.ProfileData.from_file(str(written[-1]))))


def spans_of_xspace(space: Any) -> Iterator[Span]:
    """Yield what an XSpace shows: operations of devices, or of the host's processors where they are the device."""
    for plane in space.planes:
        tensor, sparse = _TENSORCORE.match(plane.name), _SPARSECORE.match(plane.name)
        device = int((tensor or sparse).group(1)) if tensor or sparse else None  # type: ignore[union-attr]
        if device is None and plane.name != _HOST:
            continue
        for line in plane.lines:
            if device is not None and line.name not in _OP_LINES:
                continue
            for event in line.events:
                what = _what_on_host(event) if device is None else _what_on_device(event.name, line.name, bool(sparse))
                if what is not None and event.duration_ns > 0:
                    start = event.start_ns / 1e9
                    yield Span(what, start, start + event.duration_ns / 1e9, device)


def _what_on_device(name: str, line: str, sparse: bool) -> What | None:
    if _COLLECTIVE.match(name):
        return "collectives"
    if sparse:
        return "sparsecore"
    return None if line == "Async XLA Ops" else "tensorcore"  # copies beside the cores' work


def _what_on_host(event: Any) -> What | None:
    if event.name in _MARKS:
        return _MARKS[event.name]
    if not any(key == "hlo_op" for key, _ in event.stats):
        return None
    return "collectives" if _COLLECTIVE.match(event.name) else "compute"


class _TorchTrace:
    """A trace by `torch.profiler`."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._cuda = directory, torch.cuda.is_available()
        if torch.autograd.profiler._is_profiler_enabled:  # PyTorch itself would go on in silence
            raise RuntimeError("another torch profiler is under way in this process")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def mark(self, name: str, step: int = 0) -> contextlib.AbstractContextManager[Any]:
        """Return a record."""
        return record_function(name)

    def stop(self) -> list[Span]:
        """End it, and write the trace as TensorBoard's plugin reads it."""
        self._profile.stop()
        name = f"{platform.node()}_{os.getpid()}.{time.time_ns()}.pt.trace.json.gz"
        self._profile.export_chrome_trace(str(self._directory / name))
        if not (self._directory / name).exists():
            raise RuntimeError("the profiler wrote no trace")
        events = self._profile.events()  # type: ignore[no-untyped-call]
        return list(spans_of_torch(events or (), cuda=self._cuda))


def spans_of_torch(events: Sequence[Any], *, cuda: bool) -> Iterator[Span]:
    """Yield what a trace of PyTorch shows: kernels where there is a GPU, else programs while they run.

    On a CPU a program computes as long as it runs; what Inductor compiled leaves no record of its own in it.
    """
    for event in events:
        on_device = event.device_type.name != "CPU"
        what: What | None = _MARKS.get(event.name) if not on_device else None
        if _COLLECTIVE.match(event.name):
            what = "collectives"
        elif (on_device and event.name not in _OURS) or (event.name == COMPUTE and not cuda):
            what = "compute"
        if what is not None:
            device = event.device_index if on_device else None
            yield Span(what, event.time_range.start / 1e6, event.time_range.end / 1e6, device)
