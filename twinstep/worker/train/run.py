"""One run: data, model, optimizers and compiler put together, stepped, evaluated, reported.

`run` is called through `twinstep.worker.train.run_spec`, which sets the environment first. SIGTERM ends a run between
two steps (at once, while a program is being compiled) with exit code 143, after the end was reported.
"""

from __future__ import annotations

import os
import platform as machine
import signal
import sys
import threading
from types import FrameType

import torch
from rich.console import Console

from twinstep.spec.errors import TwinstepError
from twinstep.spec.job import JobSpec
from twinstep.spec.report import RunSummary
from twinstep.worker.train.environment import RunContext
from twinstep.worker.train.loop import Trainer
from twinstep.worker.train.progress import ProgressView
from twinstep.worker.train.report import Reporter, make_reporter
from twinstep.worker.train.versions import software_versions

EXIT_STOPPED = 128 + signal.SIGTERM


class StopSignal:
    """Turns SIGTERM into a request to stop that the loop reads, or into SystemExit where the loop cannot look."""

    def __init__(self) -> None:
        self.asked = False
        self.at_once = False
        """Whether to stop where the process is: set while a program is compiled, which is long and writes nothing."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self.at_once:
            self.at_once = False
            raise SystemExit(EXIT_STOPPED)


def run(spec: JobSpec, *, console: Console | None) -> RunSummary:
    """Train `spec` from its data to its summary; see `run_spec`."""
    context = RunContext.from_environment()
    reporter = make_reporter(context)
    stop = StopSignal()
    steps = 0
    try:
        torch.set_num_threads(spec.runtime.threads or os.cpu_count() or 1)
        surroundings = {"versions": software_versions(), "pid": os.getpid(), "threads": torch.get_num_threads()}
        reporter.event("started", f"worker started on {machine.node()}", surroundings)
        reporter.progress("starting", 0, spec.train.steps, examples_per_s=None, eta_s=None)
        with ProgressView(console, spec.train.steps) as view:
            trainer = Trainer(
                spec, reporter=reporter, view=view, stop=stop, run_dir=context.run_dir if context else None
            )
            try:
                summary = trainer.train()
            finally:
                steps = trainer.step
        if summary is None:
            reporter.event("stopped", f"stopped by SIGTERM after step {steps}", {"step": steps})
            sys.exit(EXIT_STOPPED)
        reporter.result(summary)
        reporter.progress("done", steps, spec.train.steps, examples_per_s=summary.examples_per_s, eta_s=0.0)
        return summary
    except BaseException as error:
        _report_end(reporter, error, steps)
        raise
    finally:
        reporter.close()


def _report_end(reporter: Reporter, error: BaseException, step: int) -> None:
    if isinstance(error, TwinstepError):
        reporter.event("failed", str(error), {"code": error.code, "step": step})
    elif isinstance(error, KeyboardInterrupt):
        reporter.event("stopped", f"stopped from the keyboard after step {step}", {"step": step})
    elif not isinstance(error, SystemExit):
        reporter.event("failed", f"{type(error).__name__}: {error}", {"code": "bug", "step": step})
