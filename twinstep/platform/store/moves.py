"""Write a change of state and the event of it, in one transaction. Whether the move is allowed was asked before."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, insert, update

from twinstep.platform.store.tables import EventRow, RunRow
from twinstep.spec.states import RunState


def write_move(
    connection: Connection,
    *,
    run_id: str,
    job_id: str,
    now: RunState,
    to: RunState,
    version: int,
    reason: str,
    actor: str,
    time: float,
    changes: dict[str, Any],
) -> None:
    """Write a move that was checked, and its event, in the caller's transaction."""
    connection.execute(
        update(RunRow)
        .where(RunRow.id == run_id, RunRow.version == version)
        .values(state=to, reason=reason, version=version + 1, **changes)
    )
    add_event(
        connection,
        job_id=job_id,
        run_id=run_id,
        time=time,
        name="state_changed",
        actor=actor,
        reason=reason,
        data={"from": now, "to": to},
    )


def add_event(connection: Connection, **values: Any) -> None:
    """Write one event."""
    connection.execute(insert(EventRow).values(**values))
