"""What a person sees of a run in a terminal: compiling apart from steps; in a log file, a line now and then.

A terminal that went away, or a log on a full disk, is no reason to end a run: what cannot be shown is not.
"""

from __future__ import annotations

import contextlib
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from twinstep.worker.train.output import giving_up
from twinstep.worker.train.waiting import Waiting

LINE_EVERY = 5.0  # seconds between lines where nothing can be redrawn (a log file)


class ProgressView:
    """Draws a run's progress on a console; without one, draws nothing."""

    def __init__(self, console: Console | None, total_steps: int) -> None:
        self._console = console
        self._total = total_steps
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = 0.0
        self._waiting = Waiting(self.say)
        if console is not None and console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=console,
            )

    def __enter__(self) -> ProgressView:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        self._waiting.end()
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()

    def end(self, text: str) -> None:
        """Draw no more, and print a last line."""
        self._stop()
        self.say(text)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._console is not None:
            with giving_up(self._console.file):
                self._console.print(text, markup=False, highlight=False)

    def starting(self, what: str) -> None:
        """Show what a run does before its first step: reading data, building the model."""
        self._long(what)

    def compiling(self, reason: str) -> None:
        """Show that a program is being made; steps stand still meanwhile."""
        self._long(f"compiling ({reason})")

    def compiled(self) -> None:
        """A program is made: nobody waits for it any more."""
        self._waiting.end()

    def _long(self, what: str) -> None:
        if self._bar is not None:
            self._drop()
            self._task = self._bar.add_task(what, total=None, note="")
        elif self._console is not None:
            self.say(what)
            self._waiting.start(what)

    def step(self, step: int, *, loss: float, examples_per_s: float, eta_s: float) -> None:
        """Show that `step` steps are done."""
        self._waiting.end()
        if self._bar is not None:
            if self._task is None or self._bar.tasks[-1].total is None:
                self._drop()
                self._task = self._bar.add_task("training", total=self._total, note="")
            note = f"loss {loss:.4f}  {examples_per_s:,.0f} examples/s"
            self._bar.update(self._task, completed=step, note=note)
        elif step == self._total or time.monotonic() - self._last_line >= LINE_EVERY:
            self._last_line = time.monotonic()
            self.say(f"step {step}/{self._total}  loss {loss:.4f}  {examples_per_s:,.0f} examples/s  ETA {eta_s:.0f} s")

    def evaluating(self) -> None:
        """Show that held-out data is being scored."""
        self._waiting.end()
        if self._bar is not None:
            self._drop()
            self._task = self._bar.add_task("evaluating", total=None, note="")

    def _drop(self) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
