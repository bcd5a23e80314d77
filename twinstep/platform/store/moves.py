"""Write changes of state and the events of them, in one transaction: guarded by version, checked against the table.

What many runs go through at once is written in as few statements as it takes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, SQLColumnExpression, bindparam, insert, select, update

from twinstep.platform.store.audit import write_entry
from twinstep.platform.store.outbox import put_in_outbox, type_of, webhooks_told
from twinstep.platform.store.tables import EventRow, RunRow
from twinstep.spec.errors import NotFoundError
from twinstep.spec.states import ACTIVE, FINAL, WAITING, RunState, check_move

log = logging.getLogger(__name__)
# Made once: the making of a statement takes longer than its execution.
_NEW_EVENT = insert(EventRow)
_NEW_EVENT_ID = insert(EventRow).returning(EventRow.id)
_NEW_EVENT_IDS = insert(EventRow).returning(EventRow.id, sort_by_parameter_order=True)
_STANDING = (
    select(
        RunRow.id,
        RunRow.job_id,
        RunRow.state,
        RunRow.version,
        RunRow.started_at,
        RunRow.waiting_since,
        RunRow.active_since,
        RunRow.active_seconds,
    )
    .where(RunRow.id.in_(bindparam("run_ids", expanding=True)))
    .order_by(RunRow.id)  # whoever locks several does so in one order
    .with_for_update()
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A run's way along some states."""

    run_id: str
    path: Sequence[RunState]
    if_version: int
    reason: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Further columns, written with the last of the moves."""


def guarded_moves(connection: Connection, moves: Sequence[Move], *, actor: str, time: float) -> list[str | None]:
    """Move runs, each at most once, in the caller's transaction, an event for each state; return the job of each move.

    None stands where another writer was first.

    Raises:
        StateError: the table of moves does not know one; nothing may be kept of the transaction.
        NotFoundError: no such run.
    """
    rows = {row.id: row for row in connection.execute(_STANDING, {"run_ids": [move.run_id for move in moves]})}
    jobs: list[str | None] = []
    written: list[tuple[str, int, dict[str, Any]]] = []
    events: list[dict[str, Any]] = []
    for move in moves:
        row = rows.get(move.run_id)
        if row is None:
            raise NotFoundError(f"there is no run {move.run_id!r}", remedy="list a job's runs: GET /v1/jobs/JOB/runs")
        if row.version != move.if_version:
            jobs.append(None)
            continue
        jobs.append(row.job_id)
        now = RunState(row.state)
        for to in move.path:
            check_move(now, to, run_id=move.run_id)
            events.append(_event_of(move, row.job_id, now, to, actor=actor, time=time))
            now = to
        values = {"state": now, "reason": move.reason, "version": row.version + len(move.path)}
        written.append((move.run_id, row.version, values | _times(row, move.path, time) | dict(move.changes)))
    _update(connection, written)
    add_events(connection, events)
    return jobs


def _event_of(move: Move, job_id: str, now: RunState, to: RunState, *, actor: str, time: float) -> dict[str, Any]:
    return {
        "job_id": job_id,
        "run_id": move.run_id,
        "time": time,
        "name": "state_changed",
        "actor": actor,
        "reason": move.reason,
        "data": {"from": now, "to": to},
    }


def _times(row: Any, path: Sequence[RunState], time: float) -> dict[str, Any]:
    times: dict[str, Any] = {}
    if RunState.STARTING in path and row.started_at is None:
        times["started_at"] = time
    if path[-1] in FINAL:
        times["finished_at"] = time
    if path[-1] in WAITING:
        times |= {} if RunState(row.state) in WAITING else {"waiting_since": time}
    elif row.waiting_since is not None:
        times["waiting_since"] = None
    if path[-1] in ACTIVE and row.active_since is None:
        times["active_since"] = time
    elif path[-1] not in ACTIVE and row.active_since is not None:
        # A clock that was set back counts nothing, and never less than before.
        times |= {"active_since": None, "active_seconds": row.active_seconds + max(0.0, time - row.active_since)}
    return times


def _update(connection: Connection, written: Sequence[tuple[str, int, dict[str, Any]]]) -> None:
    """Write columns of runs at their versions: one statement for those that have the same columns."""

    def columns(item: tuple[str, int, dict[str, Any]]) -> list[str]:
        return sorted(item[2])

    here = (RunRow.id == bindparam("of_run"), RunRow.version == bindparam("at_version"))
    for names, items in groupby(sorted(written, key=columns), key=columns):
        rows = []
        for run_id, version, values in items:
            if any(isinstance(value, SQLColumnExpression) for value in values.values()):
                of_one = update(RunRow).where(RunRow.id == run_id, RunRow.version == version)
                connection.execute(of_one.values(**values))
            else:
                told = {f"new_{name}": value for name, value in values.items()}
                rows.append({"of_run": run_id, "at_version": version} | told)
        if rows:
            connection.execute(update(RunRow).where(*here).values({n: bindparam(f"new_{n}") for n in names}), rows)


def warned(job_id: str, run_id: str, time: float, warnings: Sequence[str]) -> dict[str, Any]:
    """Return the event of a run that was let through though something speaks against it."""
    return {
        "job_id": job_id,
        "run_id": run_id,
        "time": time,
        "name": "warned",
        "actor": "scheduler",
        "reason": "; ".join(warnings),
        "data": {"warnings": list(warnings)},
    }


def add_event(connection: Connection, **values: Any) -> None:
    """Write one event; see `add_events`."""
    add_events(connection, [values])


def add_events(
    connection: Connection, events: Sequence[dict[str, Any]], *, facts: Sequence[Mapping[str, str]] = ()
) -> None:
    """Write events, for each webhook that is to be told of one a place in the outbox, and where a user's request is
    under way its entry in the audit log.

    Args:
        facts: what the log's line of each event is about beside its job and run, where that is not what is bound here.
    """
    if not events:
        return
    told = webhooks_told(connection)
    if not told:
        connection.execute(_NEW_EVENT, events)
    elif len(events) == 1:
        event_id: int = connection.execute(_NEW_EVENT_ID, events[0]).scalar_one()
        put_in_outbox(connection, told, [(event_id, events[0])])
    else:
        ids = connection.execute(_NEW_EVENT_IDS, events).scalars()
        put_in_outbox(connection, told, list(zip(ids, events, strict=True)))
    for number, event in enumerate(events):
        write_entry(connection, target=event["job_id"])
        about = {**(facts[number] if facts else {}), "job_id": event["job_id"], "run_id": event["run_id"]}
        log.info("%s: %s", type_of(event["name"], event["data"]), event["reason"], extra=about)
