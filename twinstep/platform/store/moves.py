"""Write a change of state and the event of it, in one transaction: guarded by version, checked against the table."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, insert, select, update

from twinstep.platform.store.audit import write_entry
from twinstep.platform.store.outbox import put_in_outbox, type_of
from twinstep.platform.store.tables import EventRow, RunRow
from twinstep.spec.errors import NotFoundError
from twinstep.spec.states import ACTIVE, FINAL, RunState, check_move

log = logging.getLogger(__name__)
_NEW_EVENT = insert(EventRow).returning(EventRow.id)


def guarded_move(
    connection: Connection,
    run_id: str,
    path: Sequence[RunState],
    *,
    if_version: int,
    reason: str,
    actor: str,
    time: float,
    changes: dict[str, Any],
) -> str | None:
    """Move a run along a path of states in the caller's transaction; return its job, None where another was first.

    Args:
        changes: further columns, written with the last of the moves.

    Raises:
        StateError: the table of moves does not know one; nothing is changed.
        NotFoundError: no such run.
    """
    row = connection.execute(
        select(
            RunRow.job_id, RunRow.state, RunRow.version, RunRow.started_at, RunRow.active_since, RunRow.active_seconds
        )
        .where(RunRow.id == run_id)
        .with_for_update()
    ).one_or_none()
    if row is None:
        raise NotFoundError(f"there is no run {run_id!r}", remedy="list a job's runs: GET /v1/jobs/JOB/runs")
    if row.version != if_version:
        return None
    now = RunState(row.state)
    for number, to in enumerate(path):
        check_move(now, to, run_id=run_id)
        write_move(
            connection,
            run_id=run_id,
            job_id=row.job_id,
            now=now,
            to=to,
            version=if_version + number,
            reason=reason,
            actor=actor,
            time=time,
            changes=changes if number == len(path) - 1 else {},
        )
        now = to
    times: dict[str, Any] = {}
    if RunState.STARTING in path and row.started_at is None:
        times["started_at"] = time
    if now in FINAL:
        times["finished_at"] = time
    if now in ACTIVE and row.active_since is None:
        times["active_since"] = time
    elif now not in ACTIVE and row.active_since is not None:
        # A clock that was set back counts nothing, and never less than before.
        times |= {"active_since": None, "active_seconds": row.active_seconds + max(0.0, time - row.active_since)}
    if times:
        connection.execute(update(RunRow).where(RunRow.id == run_id).values(**times))
    return str(row.job_id)


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
    """Write one event, for each webhook that is to be told of it a place in the outbox, and where a user's request is
    under way its entry in the audit log."""
    event_id: int = connection.execute(_NEW_EVENT, values).scalar_one()
    put_in_outbox(connection, event_id, job_id=values["job_id"], name=values["name"], data=values["data"])
    write_entry(connection, target=values["job_id"])
    ids = {"job_id": values["job_id"], "run_id": values["run_id"]}
    log.info("%s: %s", type_of(values["name"], values["data"]), values["reason"], extra=ids)
