"""From what is wanted of a run in a cluster and what is found there, decide the one thing to do. Pure.

Level, not edge, as `scheduler/decide.py` is: a lost event, a crash between two steps or a second look changes nothing.
A run is sent once: where its objects are known to have been there and are gone, it has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from twinstep.platform.scheduler.cluster.status import UNSCHEDULABLE, Finding
from twinstep.platform.scheduler.decide import wait_limit
from twinstep.spec.states import ACTIVE, FINAL, WAITING, RunState

SILENT_S = 60.0  # a worker reports every second or two


class Sent(StrEnum):
    """How far a run's objects have come."""

    NOTHING = "nothing"
    MAYBE = "maybe"
    """A launch was begun, and nobody wrote down that it came through."""
    SURE = "sure"
    """The cluster had them: their uid is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterWanted:
    """What the store says of a run in a cluster."""

    state: RunState
    sent: Sent
    reason: str = ""
    """What it says of itself now."""
    cancel: bool = False
    """Somebody asked for it to stop."""
    suspend: bool = False
    """Somebody asked for it to be suspended."""
    suspended: bool = False
    """The cluster was told so."""
    restarts: int = 0
    before: int | None = None
    """An earlier attempt of the job that has not ended yet."""
    active_seconds: float = 0.0
    """Spent starting or running so far."""
    max_seconds: float | None = None
    waited_seconds: float = 0.0
    """Since it is pending or queued; 0 while it is active."""
    max_wait_seconds: float | None = None
    silent_seconds: float | None = None
    """Since the worker was last heard of; None where it has nowhere to report to."""
    reported: bool = False
    """The worker was heard of at all."""
    met: bool = False
    """Its processes have met: the worker, whose first process reports before that, says that it is past `starting`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSight:
    """What a look at the cluster says."""

    finding: Finding
    deleting: bool = False
    """Its objects are on their way out."""
    suspended: bool | None = None
    """Whether the cluster holds it back, as far as its objects say; None: they do not."""
    confirmed: bool = False
    """The API server itself was asked, not the mirror, which may be late."""


class ClusterDo(StrEnum):
    """What there is to do."""

    KEEP = "keep"
    SAY = "say"
    """Stay, and say why."""
    LAUNCH = "launch"
    """Send its objects; the same ones again where an earlier launch did not come through."""
    ADOPT = "adopt"
    """Write down the uid of what an earlier launch made."""
    CONFIRM = "confirm"
    """Ask the API server before it is called gone."""
    DELETE = "delete"
    SUSPEND = "suspend"
    UNSUSPEND = "unsuspend"
    MOVE = "move"
    """To another state, which may be a final one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterAction:
    """One thing to do."""

    do: ClusterDo
    to: RunState | None = None
    """Of a MOVE."""
    reason: str = ""
    restarts: int = 0
    """What is to be stored: never less than before."""
    since: float | None = None
    """Of a MOVE to `queued`: Unix seconds since when it waits; None: since now."""


def decide_cluster(wanted: ClusterWanted, sight: ClusterSight | None) -> ClusterAction:
    """Return the one thing to do now; `sight` is None as long as nothing can be seen."""
    if wanted.state in FINAL:
        return _action(wanted, ClusterDo.KEEP)
    if wanted.sent is Sent.NOTHING:
        return _before_launch(wanted)
    if sight is None:
        return _action(wanted, ClusterDo.KEEP)
    if sight.finding.gone:
        return _gone(wanted, sight)
    if wanted.sent is Sent.MAYBE:
        return _action(wanted, ClusterDo.ADOPT)
    return _there(wanted, sight)


def _before_launch(wanted: ClusterWanted) -> ClusterAction:
    if wanted.cancel:
        return _move(wanted, RunState.CANCELLED, "cancelled before it started")
    if wanted.suspend:
        return _say_queued(wanted, "is suspended, as it was asked to be, and was not started yet")
    if _waited_too_long(wanted):
        return _move(wanted, RunState.FAILED, _wait_limit(wanted))
    if wanted.before is not None:
        return _say_queued(wanted, f"waits for attempt {wanted.before} to stop")
    return _action(wanted, ClusterDo.LAUNCH)


def _say_queued(wanted: ClusterWanted, reason: str) -> ClusterAction:
    if wanted.state is RunState.PENDING:
        return _move(wanted, RunState.QUEUED, reason)
    return _action(wanted, ClusterDo.SAY, reason=reason)


def _gone(wanted: ClusterWanted, sight: ClusterSight) -> ClusterAction:
    if not sight.confirmed:
        return _action(wanted, ClusterDo.CONFIRM)
    if wanted.sent is Sent.MAYBE:
        return _before_launch(wanted)  # its launch came to nothing
    if wanted.cancel:
        return _move(wanted, RunState.CANCELLED, "cancelled")
    if _too_long(wanted):
        return _move(wanted, RunState.FAILED, _time_limit(wanted))
    if _waited_too_long(wanted):
        return _move(wanted, RunState.FAILED, _wait_over(wanted, None))
    return _move(wanted, RunState.FAILED, sight.finding.reason)


def _there(wanted: ClusterWanted, sight: ClusterSight) -> ClusterAction:
    finding = sight.finding
    # Pods that are told to stop fail; a set that failed while it was taken down did so because it was.
    ended = wanted.cancel or _too_long(wanted) or _waited_too_long(wanted)
    taken_down = sight.deleting and finding.state is RunState.FAILED and ended
    if finding.state in FINAL and not taken_down:
        return _move(wanted, finding.state, finding.reason, restarts=finding.restarts)
    if wanted.cancel:
        return _taken_down(wanted, sight, "is being taken down")
    if _too_long(wanted):
        return _taken_down(wanted, sight, _time_limit(wanted))
    # One that was admitted just now, or got its nodes, may start.
    if _waited_too_long(wanted) and (finding.state is RunState.QUEUED or sight.deleting):
        return _taken_down(wanted, sight, _wait_over(wanted, finding))
    if sight.deleting:
        return _action(wanted, ClusterDo.SAY, reason="somebody else has its objects deleted", finding=finding)
    if wanted.suspend and (not wanted.suspended or sight.suspended is False):  # or somebody else let it go on
        return _action(wanted, ClusterDo.SUSPEND)
    if wanted.suspended and not wanted.suspend:
        return _action(wanted, ClusterDo.UNSUSPEND)
    return _follow(wanted, finding)


def _taken_down(wanted: ClusterWanted, sight: ClusterSight, reason: str) -> ClusterAction:
    do = ClusterDo.SAY if sight.deleting else ClusterDo.DELETE
    return _action(wanted, do, reason=reason, finding=sight.finding)


def _follow(wanted: ClusterWanted, finding: Finding) -> ClusterAction:
    """Take over what is found, as far as the table of moves and what the worker itself reported let it."""
    to, now = finding.state, wanted.state
    ran = wanted.met and now is RunState.RUNNING and finding.restarts <= wanted.restarts
    if finding.code == UNSCHEDULABLE and ran:
        to = now  # its processes have met since: what misses a node is not what it needs
    if to is RunState.QUEUED:
        reason = "is suspended, as it was asked to be" if wanted.suspend else finding.reason
        return replace(_move(wanted, to, reason, restarts=finding.restarts), since=finding.since)
    if to is RunState.STARTING and now in (RunState.RUNNING, RunState.RESTARTING):
        to = now  # it ran before, or its worker reports though not all of its pods are ready
    if to is RunState.RESTARTING:
        # Before its first step there is nothing to go back to; and a worker that has reported since is back.
        back = now is RunState.RUNNING and finding.restarts <= wanted.restarts
        to = now if back else to if now in (RunState.RUNNING, RunState.RESTARTING) else RunState.STARTING
    reason = finding.reason
    if finding.state is RunState.RUNNING and (silence := wanted.silent_seconds) is not None and silence > SILENT_S:
        reason += "; " + (_SILENT if wanted.reported else _NEVER_HEARD)
    return _move(wanted, to, reason, restarts=finding.restarts)


_SILENT = f"but its worker has not reported for more than {SILENT_S:g} s"
_NEVER_HEARD = "but its worker has not reported yet: see that its pods reach the control plane"


def _too_long(wanted: ClusterWanted) -> bool:
    return wanted.max_seconds is not None and wanted.active_seconds > wanted.max_seconds


def _waited_too_long(wanted: ClusterWanted) -> bool:
    waits = wanted.state in WAITING and not wanted.suspend
    return waits and wanted.max_wait_seconds is not None and wanted.waited_seconds > wanted.max_wait_seconds


def _wait_limit(wanted: ClusterWanted) -> str:
    return wait_limit(wanted.max_wait_seconds or 0.0)


def _wait_over(wanted: ClusterWanted, finding: Finding | None) -> str:
    """Say that a run waited for too long, and for what, as it was seen last before it was taken down."""
    limit = _wait_limit(wanted)
    if wanted.reason.startswith(limit):
        return wanted.reason
    return limit if finding is None else f"{limit}; it {finding.reason}"


def _time_limit(wanted: ClusterWanted) -> str:
    return f"stopped at its time limit: runtime.max_seconds is {wanted.max_seconds:g}"


def _move(wanted: ClusterWanted, to: RunState, reason: str, *, restarts: int = 0) -> ClusterAction:
    do = ClusterDo.SAY if to is wanted.state else ClusterDo.MOVE
    return ClusterAction(do=do, to=to, reason=reason, restarts=max(wanted.restarts, restarts))


def _action(wanted: ClusterWanted, do: ClusterDo, *, reason: str = "", finding: Finding | None = None) -> ClusterAction:
    return ClusterAction(do=do, reason=reason, restarts=max(wanted.restarts, finding.restarts if finding else 0))


def path_to(now: RunState, to: RunState) -> list[RunState]:
    """Return the moves from a live state to another one, by way of `queued` and `starting` where it has not been there.

    A run that was seen last in its queue, and next when it had ended, did start in between.
    """
    before = [RunState.QUEUED, RunState.STARTING]
    direct = (RunState.QUEUED, RunState.FAILED, RunState.CANCELLED)
    if now in ACTIVE or to in direct:
        return [to]
    skipped = before[before.index(now) + 1 :] if now in before else before
    return [*(state for state in skipped if state is not to), to]
