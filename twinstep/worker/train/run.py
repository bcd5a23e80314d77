"""One run: data, model, optimizers and compiler put together, stepped, evaluated, reported.

`run` is called through `twinstep.worker.train.run_spec`, which sets the environment first. SIGTERM ends a run between
two steps (at once, while data is loaded or a program compiled), after its state was saved and its end reported: with
exit code 75 where there is a place for checkpoints, so that whoever restarts it does not count that as a failure, and
with 143 where there is none. Ctrl-C does the same, with 130; a second one ends at once.
"""

from __future__ import annotations

import os
import platform as machine
import sys
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console

from twinstep.spec.errors import PeerLostError, ToldToStop, TrainError, TwinstepError
from twinstep.spec.job import JobSpec
from twinstep.spec.report import RunSummary
from twinstep.spec.words import EXIT_INTERRUPTED, EXIT_PREEMPTED
from twinstep.worker.train.environment import RunContext, usable_processors
from twinstep.worker.train.group import Group
from twinstep.worker.train.loop import Trainer
from twinstep.worker.train.output import flush_output
from twinstep.worker.train.processes import Process, Together
from twinstep.worker.train.progress import ProgressView
from twinstep.worker.train.ranks import Ranks
from twinstep.worker.train.report import Reporter, make_reporter
from twinstep.worker.train.saving import place_of
from twinstep.worker.train.stop import EXIT_STOPPED, StopSignal
from twinstep.worker.train.versions import software_versions


def run(
    spec: JobSpec, *, console: Console | None, ends_process: bool = False, begun: Callable[[], None] = lambda: None
) -> RunSummary:
    """Train `spec` from its data to its summary; see `run_spec`.

    Args:
        begun: called once this process has met the others, and from then on ends in order when it is told to stop.
    """
    together = processes(spec)
    context = RunContext.from_environment() if together.first else None
    console = console if together.first else None
    reporter = make_reporter(context)
    stop = StopSignal()
    stop.listen(aloud=together.first)
    steps = 0
    try:
        torch.set_num_threads(spec.runtime.threads or max(1, usable_processors() // Ranks.from_environment().on_host))
        surroundings = {"versions": software_versions(), "pid": os.getpid(), "threads": torch.get_num_threads()}
        reporter.event("started", f"worker started on {machine.node()}", surroundings)
        reporter.progress("starting", 0, spec.train.steps, examples_per_s=None, eta_s=None)
        together.join()
        begun()
        with together.minding(), ProgressView(console, spec.train.steps) as view:
            run_dir = context.run_dir if context else None
            trainer = _made(spec, reporter=reporter, view=view, stop=stop, run_dir=run_dir, together=together)
            try:
                summary, code = _trained(trainer, stop)
            finally:
                steps = trainer.step
                trainer.close(wait=not isinstance(sys.exception(), KeyboardInterrupt))  # a second Ctrl-C does not
        if summary is None:
            sys.exit(stop.exit_code(code))
        reporter.result(summary)
        more = summary.model_dump(include={"tokens_per_s", "goodput", "chip_hours", "time_s"})
        reporter.progress("done", steps, spec.train.steps, examples_per_s=summary.examples_per_s, eta_s=0.0, **more)
        return summary
    except BaseException as error:
        begun()
        stop.end_between_steps()  # a second SIGTERM must not cut the report of the end short
        together.tell_failure(error)
        if isinstance(error, PeerLostError) and stop.asked:  # the other one was told to stop too, and did so sooner
            code = _stopped(spec, stop)
            _report_end(reporter, SystemExit(code), steps)
            sys.exit(code)
        if _out_of_memory(error):
            does_not_fit = TrainError(
                "the run does not fit in this machine's memory",
                remedy="make data.batch_size, data.uih_len or the model (its embedding tables first) smaller",
            )
            _report_end(reporter, does_not_fit, steps)
            raise does_not_fit from error
        _report_end(reporter, error, steps)
        raise
    finally:
        try:
            together.leave()
        finally:
            try:
                reporter.close()
            finally:
                flush_output()
                stop.listen_no_more(ends_process=ends_process)


def processes(spec: JobSpec) -> Together:
    """Return what the processes of a run agree through, before they have met."""
    if spec.embedding.engine != "torchrec":
        return Together(Process.from_environment())
    ranks = Ranks.from_environment()
    device = torch.device("cuda", ranks.local) if spec.accelerator.kind == "gpu" else torch.device("cpu")
    return Group(ranks, device=device, seconds=spec.runtime.peer_seconds)


def _made(spec: JobSpec, *, stop: StopSignal, **surroundings: Any) -> Trainer:
    """Load the data, build the model and go on from a checkpoint; a wish to stop ends this at once."""
    try:
        stop.end_at_once()
        surroundings["view"].starting("reading data")
        trainer = Trainer(spec, stop=stop, **surroundings)
        stop.end_between_steps()
    except SystemExit as error:
        stop.end_between_steps()
        _check_told(error)
        surroundings["view"].end("stopped before a step was done; checkpoints are as they were")
        sys.exit(_stopped(spec, stop))
    return trainer


def _stopped(spec: JobSpec, stop: StopSignal) -> int:
    """Return the exit code of a run of `spec` that was told to stop."""
    return stop.exit_code(EXIT_STOPPED if place_of(spec.checkpoint) is None else EXIT_PREEMPTED)


def _trained(trainer: Trainer, stop: StopSignal) -> tuple[RunSummary | None, int]:
    """Train; return the summary, or None and the exit code for a run that was told to stop and has saved its state."""
    together = True
    try:
        summary = trainer.train()
    except SystemExit as error:  # told to stop while a program was compiled, which leaves the state as it was
        _check_told(error)
        summary, together = None, False
    if summary is not None:
        return summary, 0
    stop.end_between_steps()  # a second SIGTERM must not cut the last checkpoint short
    return None, trainer.leave(together=together)


def _check_told(error: SystemExit) -> None:
    """Raise TrainError unless a signal ended what went on: a run whose own code ends it is not to be started again."""
    if not isinstance(error, ToldToStop):
        raise TrainError(f"the model's code ends the process: {error.code}", remedy="raise an error instead") from error


# What PyTorch's allocator, C++ and XLA say; none of them raises MemoryError.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "std::bad_alloc", "RESOURCE_EXHAUSTED: Out of memory")


def _out_of_memory(error: BaseException | None) -> bool:
    """Say whether an error, or one that it was made from, is that memory ran out."""
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY):
            return True
        error = error.__cause__
    return False


def _report_end(reporter: Reporter, error: BaseException, step: int) -> None:
    if isinstance(error, TwinstepError):
        reporter.event("failed", str(error), {"code": error.code, "step": step})
    elif isinstance(error, KeyboardInterrupt):
        reporter.event("stopped", f"stopped from the keyboard after step {step}", {"step": step})
    elif isinstance(error, SystemExit):
        how = "from the keyboard" if error.code == EXIT_INTERRUPTED else "by SIGTERM"
        reporter.event("stopped", f"stopped {how} after step {step}", {"step": step})
    else:
        reporter.event("failed", f"{type(error).__name__}: {error}", {"code": "bug", "step": step})
