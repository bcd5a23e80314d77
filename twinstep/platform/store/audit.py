"""The audit log: who changed what, or tried to. Rows are only added; the database itself refuses anything else.

A request that may change something has an Entry under way (`entry.py`). What writes the change writes the entry in the
same transaction, so that neither is there without the other; whatever was refused, or changed nothing, is written by
itself afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

from sqlalchemy import Connection, insert, select

from twinstep.platform.store.database import Database
from twinstep.platform.store.entry import Entry, current_entry
from twinstep.platform.store.records import View
from twinstep.platform.store.tables import AuditRow

Outcome = Literal["done", "refused", "failed"]
MAX_TARGET, MAX_REASON = 255, 1000  # characters that are kept; what is refused may be of any length


class AuditRecord(View):
    """A change, or an attempt at one that was refused."""

    id: int
    """Grows; give the smallest as `before` for older ones."""
    time: float
    actor: str
    """The user, or `user` where no login is asked for, or `anonymous`."""
    token_id: str | None
    """Which of the user's tokens it was."""
    action: str
    """What was done, as `job.submit`."""
    target: str
    """To what: an id, a name or a path."""
    project: str | None
    outcome: str
    """done, refused (not allowed, or not valid), or failed (a fault of the control plane's)."""
    reason: str
    """Why it was refused."""
    request_id: str
    """`X-Request-Id` of the answer."""
    address: str
    """Where the request came from; behind a proxy, the proxy's."""
    data: dict[str, Any]
    """Details; `security`: the exception from the restricted profile that a job's pods were granted."""


class AuditPage(View):
    """Some of the audit log, newest first."""

    items: list[AuditRecord]
    next_before: int | None = None
    """Give it as `before` for older ones; null at the end."""


_NEW_ENTRY = insert(AuditRow)  # made once: the making of a statement takes longer than its execution


def write_entry(connection: Connection, *, target: str, project: str | None = None, **data: Any) -> None:
    """Write the entry under way, as done, in the caller's transaction; nothing where none is, or it is written."""
    entry = current_entry()
    if entry is None or entry.written:
        return
    entry.target, entry.project = target, project or entry.project
    entry.data |= data
    connection.execute(_NEW_ENTRY, _row(entry, "done", ""))
    entry.written = True


def write_entries(connection: Connection, entries: Sequence[tuple[Entry, str]]) -> None:
    """Write entries, each with its target, as done, in the caller's transaction; whoever commits says so on them."""
    rows = []
    for entry, target in entries:
        entry.target = target
        rows.append(_row(entry, "done", ""))
    if rows:
        connection.execute(_NEW_ENTRY, rows)


class AuditLog:
    """The audit log in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, entry: Entry, *, outcome: Outcome, reason: str = "") -> None:
        """Write an entry by itself."""
        with self._database.write() as connection:
            connection.execute(insert(AuditRow).values(**_row(entry, outcome, reason)))

    def page(
        self,
        *,
        before: int | None = None,
        limit: int = 100,
        actor: str | None = None,
        action: str | None = None,
        project: str | None = None,
        outcome: Outcome | None = None,
    ) -> AuditPage:
        """Return entries, newest first, that fit what is given."""
        query = select(AuditRow.__table__).order_by(AuditRow.id.desc()).limit(limit + 1)
        if before is not None:
            query = query.where(AuditRow.id < before)
        for column, wanted in (
            (AuditRow.actor, actor),
            (AuditRow.action, action),
            (AuditRow.project, project),
            (AuditRow.outcome, outcome),
        ):
            if wanted is not None:
                query = query.where(column == wanted)
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        items = [AuditRecord.model_validate(row._asdict()) for row in rows[:limit]]
        return AuditPage(items=items, next_before=items[-1].id if len(rows) > limit else None)


def _row(entry: Entry, outcome: Outcome, reason: str) -> dict[str, Any]:
    return {
        "time": time.time(),
        "actor": entry.actor,
        "token_id": entry.token_id,
        "action": entry.action,
        "target": _text(entry.target)[:MAX_TARGET],
        "project": None if entry.project is None else _text(entry.project)[:63],
        "outcome": outcome,
        "reason": _text(reason)[:MAX_REASON],
        "request_id": entry.request_id,
        "address": entry.address[:64],
        "data": entry.data,
    }


def _text(text: str) -> str:
    """Return what any database can keep: no NUL, no half of a surrogate pair."""
    return text.replace("\0", "\ufffd").encode(errors="replace").decode()
