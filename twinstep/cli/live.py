"""What a follower sees: a progress bar on a terminal, plain lines elsewhere, and the summary at the end of both.

Views are told what a job's stream says; they ask nobody.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from twinstep.cli.output import clean, console, one_line, summary_table
from twinstep.spec.words import clock, duration, number
from twinstep.worker.train.waiting import Waiting

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

PLAIN_EVERY_S = 5.0  # lines of a log file: one per few seconds of training is enough
_PHASES = {
    "starting": "starting",
    "compiling": "compiling (no steps meanwhile)",
    "training": "training",
    "evaluating": "evaluating",
    "done": "done",
}


def event_line(data: Mapping[str, Any]) -> str:
    """Return one event as a line: time, name, reason."""
    at = clock(data.get("time"), "%H:%M:%S", unknown="--:--:--")
    details = data.get("data")
    name = str(data.get("name", ""))
    if name == "state_changed" and isinstance(details, dict):
        name = f"{details.get('from')} → {details.get('to')}"
    return f"{at}  {one_line(name.replace('_', ' '), width=60)}: {one_line(str(data.get('reason', '')), width=500)}"


class _View:
    """What both views share: the end."""

    loss: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return None

    def show(self, event: str, data: Mapping[str, Any]) -> None:
        """Take one message of the stream."""
        if event == "event":
            self.say(event_line(data))
        elif event == "metrics":
            for point in data.get("items", ()):
                if point.get("name") == "loss":
                    self.loss = point.get("value")
        elif event == "state":
            self.progress(data)

    def say(self, line: str) -> None:
        """Print a line."""
        raise NotImplementedError

    def progress(self, job: Mapping[str, Any]) -> None:
        """Show where the job is."""
        raise NotImplementedError

    def finish(self, job: Mapping[str, Any]) -> None:
        """Print what became of the job."""
        screen = console()
        screen.print(f"{one_line(job['name'])} ({job['id']}) {job['state']}: {one_line(job.get('reason') or '')}")
        if job.get("summary"):
            screen.print(summary_table(job["summary"]))


class PlainView(_View):
    """Lines, for files and pipes: events as they come, progress now and then."""

    def __init__(self) -> None:
        self._said_at, self._said = 0.0, ""
        self._waiting = Waiting(self._say_aside)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._waiting.end()

    def say(self, line: str) -> None:
        """Print a line at once."""
        print(clean(line), flush=True)

    def _say_aside(self, line: str) -> None:
        """Print a line from the thread that waits; where nobody reads it, the watching ends with its own next line."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: it was closed
            self.say(line)

    def progress(self, job: Mapping[str, Any]) -> None:
        """Print where the job is when its phase changes, and every few seconds of training."""
        progress = job.get("progress")
        if not progress:
            return
        phase, now = str(progress.get("phase")), time.monotonic()
        if phase == self._said and (phase != "training" or now - self._said_at < PLAIN_EVERY_S):
            return
        self._said, self._said_at = phase, now
        self._waiting.end()
        parts = [f"{_PHASES.get(phase, one_line(phase))}: step {progress['step']}/{progress['total_steps']}"]
        if phase == "training":
            parts += [f"loss {number(self.loss)}"] if self.loss is not None else []
            parts += [f"{number(progress.get('examples_per_s'), 1)} examples/s"]
            parts.append(f"{duration(progress.get('eta_s'))} left")
        self.say(", ".join(parts))
        if phase in ("starting", "compiling"):
            self._waiting.start(phase)


class RichView(_View):
    """A progress bar that stays at the bottom, with events scrolling by above it."""

    def __init__(self, screen: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar: Progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeElapsedColumn(),
            console=screen,
            transient=True,
        )
        self._task: TaskID = self._bar.add_task("waiting", total=None, figures="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(clean(line))

    def progress(self, job: Mapping[str, Any]) -> None:
        """Move the bar; while the step is compiled it shows that, and the bar pulses."""
        progress = job.get("progress")
        if not progress:
            self._bar.update(self._task, description=one_line(str(job.get("state", "")), width=20))
            return
        phase = str(progress.get("phase"))
        training = phase == "training"
        figures = ""
        if training:
            figures = f"loss {number(self.loss)}  {number(progress.get('examples_per_s'), 0)} examples/s"
            figures += f"  {duration(progress.get('eta_s'))} left"
        self._bar.update(
            self._task,
            description=_PHASES.get(phase, one_line(phase, width=20)),
            completed=progress["step"],
            total=progress["total_steps"] if phase != "compiling" else None,
            figures=figures,
        )
