"""From what is wanted of a run and what is seen of it, decide the one thing to do.

Pure: no clock, no store, no process.

Level, not edge: the answer depends on the two levels alone, so a lost notice, a crash between two steps or a second
look changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from twinstep.spec.states import FINAL, RunState

NEEDS_MODULES = "waits for a control plane started with --modules"
MAX_LAUNCHES = 3  # a supervisor that cannot start thrice will not start the fourth time


class Seen(StrEnum):
    """What a backend sees of a run."""

    ABSENT = "absent"
    """Nothing was ever started, or not far enough to tell."""
    LAUNCHING = "launching"
    """This control plane has started it and it has not spoken yet."""
    ALIVE = "alive"
    EXITED = "exited"
    VANISHED = "vanished"
    """It was started, is gone, and left no word of how it ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """What is seen, and how it ended where it did."""

    seen: Seen
    code: int | None = None
    """Exit code of the worker; None where a signal ended it."""
    signal: str | None = None
    """Name of that signal."""
    time: float | None = None
    """When it ended, in Unix seconds."""
    stopped: str | None = None
    """None: it ended by itself; `asked`: its supervisor was asked to; `time_limit`; `hung`."""
    problem: str | None = None
    """Why the worker could not be started at all."""
    launches: int = 0
    """Launches of this control plane that came to nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What the store says of a run, and what the queue says."""

    state: RunState
    cancel_requested_at: float | None = None
    slot_free: bool = False
    waited_seconds: float = 0.0
    """Since it is pending or queued, as far as somebody was there to start it."""
    max_wait_seconds: float | None = None
    ahead: int = 0
    """Runs that come first: those that hold a slot, and those that were submitted earlier."""
    barred: bool = False
    """It is code of its submitter's own, which this control plane runs none of; another may."""
    max_seconds: float | None = None
    stop_grace_seconds: float = 10.0


class Do(StrEnum):
    """What there is to do."""

    KEEP = "keep"
    ENQUEUE = "enqueue"
    EXPLAIN = "explain"
    """Say anew why it waits."""
    START = "start"
    """Move it to `starting`, then launch it."""
    LAUNCH = "launch"
    """It is `starting` already: launch it, again where need be."""
    STOP = "stop"
    FORBID = "forbid"
    """See to it that it never starts; it counts as ended then."""
    FINISH = "finish"


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One thing to do."""

    do: Do
    to: RunState | None = None
    """The final state, where the run is to finish."""
    reason: str = ""


KEEP = Action(do=Do.KEEP)


def decide(wanted: Wanted, sight: Sight) -> Action:
    """Return the one thing to do now."""
    if wanted.state in FINAL:
        return KEEP
    if wanted.state in (RunState.PENDING, RunState.QUEUED):
        return _before_start(wanted)
    match sight.seen:
        case Seen.EXITED:
            return _ended(wanted, sight)
        case Seen.VANISHED:
            return _finish(RunState.FAILED, "its supervisor vanished without a word (killed, or the machine restarted)")
        case Seen.ALIVE:
            return Action(do=Do.STOP) if wanted.cancel_requested_at is not None else KEEP
        case Seen.LAUNCHING:
            return KEEP
        case Seen.ABSENT:
            return _absent(wanted, sight)


def _before_start(wanted: Wanted) -> Action:
    if wanted.cancel_requested_at is not None:
        return _finish(RunState.CANCELLED, "cancelled before it started")
    limit = wanted.max_wait_seconds
    if limit is not None and wanted.waited_seconds > limit and not wanted.slot_free:  # else it can start, and does
        return _finish(RunState.FAILED, wait_limit(limit))
    if wanted.barred:
        if wanted.state is RunState.PENDING:
            return Action(do=Do.ENQUEUE, reason=NEEDS_MODULES)
        # One that may start it says which place it has, and starts it once it is first.
        return KEEP if wanted.ahead else Action(do=Do.EXPLAIN, reason=NEEDS_MODULES)
    waits = waits_for(wanted.ahead) if not wanted.slot_free else "is next to start"
    if wanted.state is RunState.PENDING:
        return Action(do=Do.ENQUEUE, reason=waits)
    return Action(do=Do.START) if wanted.slot_free else Action(do=Do.EXPLAIN, reason=waits)


def _absent(wanted: Wanted, sight: Sight) -> Action:
    if wanted.cancel_requested_at is not None or (wanted.barred and wanted.state is RunState.STARTING):
        return Action(do=Do.FORBID)
    if wanted.state is not RunState.STARTING:  # it did run once: starting it again would be a second run
        return _finish(RunState.FAILED, "its directory is gone, and its worker with it")
    if sight.launches >= MAX_LAUNCHES:
        return _finish(RunState.FAILED, f"its supervisor could not be started in {sight.launches} tries")
    return Action(do=Do.LAUNCH)


def _ended(wanted: Wanted, sight: Sight) -> Action:
    how = sight.signal or f"exit code {sight.code}"
    if sight.signal == "SIGKILL":
        how += " (out of memory?)"  # nobody here sent it, and that is who else does
    if sight.problem:
        return _finish(RunState.FAILED, sight.problem)
    if sight.stopped == "time_limit":
        return _finish(RunState.FAILED, f"stopped at its time limit: runtime.max_seconds is {wanted.max_seconds:g}")
    asked = wanted.cancel_requested_at
    if sight.stopped == "hung" and asked is None:
        return _finish(RunState.FAILED, "hung: it ended no training step for as long as runtime.hang_seconds allows")
    if sight.stopped == "asked":
        if asked is None:
            return _finish(RunState.FAILED, "stopped from outside: somebody, or a shutdown, ended its supervisor")
        late = sight.signal == "SIGKILL"
        return _finish(
            RunState.CANCELLED,
            f"cancelled; killed {wanted.stop_grace_seconds:g} s after it was asked to stop" if late else "cancelled",
        )
    if asked is not None and sight.time is not None and sight.time >= asked:
        return _finish(RunState.CANCELLED, "cancelled; its worker stopped by itself")
    if sight.code == 0:
        return _finish(RunState.SUCCEEDED, "its worker finished")
    return _finish(RunState.FAILED, f"its worker ended with {how}")


def _finish(to: RunState, reason: str) -> Action:
    return Action(do=Do.FINISH, to=to, reason=reason)


def wait_limit(seconds: float) -> str:
    """Say that a run waited for too long."""
    return f"waited too long to be started: runtime.max_wait_seconds is {seconds:g}"


def waits_for(ahead: int) -> str:
    """Say how many runs come first."""
    return f"waits for {ahead} run{'' if ahead == 1 else 's'} ahead"
