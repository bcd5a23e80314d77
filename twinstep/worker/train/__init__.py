"""The train room: one run from its spec to its summary. `run_spec` is the door; the loop itself is in `loop.py`.

Importing this package loads no torch: the environment must be set before torch and jax read it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from twinstep.worker.train.early import EarlyStop
from twinstep.worker.train.environment import named_place, prepare_environment, settle_memory
from twinstep.worker.train.output import giving_up
from twinstep.worker.train.ranks import Ranks

if TYPE_CHECKING:
    from rich.console import Console

    from twinstep.spec.job import JobSpec
    from twinstep.spec.report import RunSummary

_RUN, _JAX = "twinstep.worker.train.run", "twinstep.worker.compile.lower.xla"


def run_spec(
    spec: JobSpec, *, console: Console | None = None, quiet: bool = False, ends_process: bool = False
) -> RunSummary:
    """Train `spec` in this process, report where the environment says so, and return the summary.

    Args:
        console: where progress is drawn; None draws nothing.
        quiet: no progress, even with a console.
        ends_process: the process ends with this run: SIGTERM changes nothing more once the run has ended.

    Raises:
        TwinstepError: the spec asks for what is not here, data is missing, the step cannot be compiled, or the loss
            stopped being finite. The run's end is reported before it is raised.
        SystemExit: after SIGTERM, with code 75 where checkpoints have a place, else 143; after Ctrl-C, with 130.
        KeyboardInterrupt: after a second Ctrl-C.
    """
    if spec.compile.backend == "xla":
        settle_memory()
    with contextlib.ExitStack() as stack:
        if _takes_signals(ends_process):
            early = EarlyStop(place=named_place(spec.checkpoint) is not None)
            stack.callback(early.over)
        prepare_environment(spec)
        with_jax = spec.compile.backend == "xla"
        if console is not None and not quiet and is_first():
            with giving_up(console.file):
                console.print("loading PyTorch" + (" and JAX" if with_jax else ""))
        with _without_collecting(_RUN, *([_JAX] if with_jax else [])):
            from twinstep.worker.train.run import run

            if with_jax:  # which the run imports anyway: where it does not load, the run says so, and reports its end
                with contextlib.suppress(Exception):
                    importlib.import_module(_JAX)
        return run(spec, console=None if quiet else console, ends_process=ends_process, begun=stack.close)


def _takes_signals(ends_process: bool) -> bool:
    """Say whether SIGTERM is this run's from the beginning; one that whoever started the process ignores stays so."""
    here = threading.current_thread() is threading.main_thread()
    return ends_process and here and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@contextlib.contextmanager
def _without_collecting(*modules: str) -> Iterator[None]:
    """Import modules without looking for garbage: a tenth of what a start takes, since what modules make stays.

    What is there then is never looked at again. So nothing is done where all are imported already: a second run in a
    process would keep what the first one left behind for good.
    """
    if all(name in sys.modules for name in modules):
        yield
        return
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collecting:
            gc.enable()


def processes_of(spec: JobSpec, asked: int | None = None) -> int:
    """Return how many processes are to be started here for a spec: 1 for what is one of several already.

    Args:
        asked: instead of the spec's number.
    """
    return 1 if Ranks.from_environment() != Ranks() else asked or spec.runtime.processes


def is_first() -> bool:
    """Return whether this process speaks for its run: rank 0, or the only one."""
    return Ranks.from_environment().first


def run_divided(spec: JobSpec, *, processes: int, as_json: bool = False) -> int:
    """Train `spec` in so many processes on this machine and return their exit code; rank 0 says what is to be said.

    Raises:
        SpecError: the spec's tables are kept by an engine that runs in one process, or it is for other machines.
    """
    from twinstep.worker.train.launch import launch_spec

    return launch_spec(spec, processes=processes, as_json=as_json)
