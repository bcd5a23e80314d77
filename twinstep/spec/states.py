"""States of a run, and the one table of moves between them.

A job's state is the state of its newest run. `cancelled`, `succeeded` and `failed` are final: nothing leaves them.
"""

from __future__ import annotations

from enum import StrEnum

from twinstep.spec.errors import StateError


class RunState(StrEnum):
    """Where a run stands."""

    PENDING = "pending"
    """Stored; nobody has looked at it yet."""
    QUEUED = "queued"
    """Accepted; waits for a free slot (local) or for admission (Kueue)."""
    STARTING = "starting"
    """Its processes or pods are being started; no step was reported yet."""
    RUNNING = "running"
    """Its worker reports."""
    RESTARTING = "restarting"
    """JobSet or Ray is bringing its pods back within the same run."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


MOVES: dict[RunState, frozenset[RunState]] = {
    RunState.PENDING: frozenset({RunState.QUEUED, RunState.FAILED, RunState.CANCELLED}),
    RunState.QUEUED: frozenset({RunState.STARTING, RunState.FAILED, RunState.CANCELLED}),
    # A short run can end before its first report arrives; a slice can be taken away before the first step.
    RunState.STARTING: frozenset(
        {RunState.RUNNING, RunState.QUEUED, RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED}
    ),
    RunState.RUNNING: frozenset(
        {RunState.RESTARTING, RunState.QUEUED, RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED}
    ),
    RunState.RESTARTING: frozenset(
        {RunState.RUNNING, RunState.QUEUED, RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED}
    ),
    RunState.SUCCEEDED: frozenset(),
    RunState.FAILED: frozenset(),
    RunState.CANCELLED: frozenset(),
}

FINAL = frozenset(state for state, targets in MOVES.items() if not targets)
LIVE = frozenset(RunState) - FINAL
ACTIVE = frozenset({RunState.STARTING, RunState.RUNNING, RunState.RESTARTING})
"""States in which a run holds what it asked for: a slot here, nodes in a cluster. Its time limit counts them alone."""
WAITING = frozenset({RunState.PENDING, RunState.QUEUED})
"""States in which a run waits to be started, or to go on; the limit of its wait counts them alone."""


def check_move(now: RunState, to: RunState, *, run_id: str) -> None:
    """Raise StateError unless the table lets run `run_id` go from `now` to `to`."""
    if to not in MOVES[now]:
        allowed = ", ".join(sorted(MOVES[now])) or "none: it is final"
        raise StateError(
            f"run {run_id} cannot go from {now} to {to}",
            remedy=f"states reachable from {now}: {allowed}",
        )
