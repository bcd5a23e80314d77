"""Who is told of what happens, and what is yet to be told: written with the event itself, so that no crash loses it.

A place in the outbox is taken by whoever moves its `due_at` first; nobody holds a lock while a message is on its way.
Times are Unix seconds of this machine. One that lies further off than any pause can (the clock was set back) counts as
come, so a clock that jumps delays nothing for long and loses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, case, delete, func, insert, literal, or_, select, update
from sqlalchemy.orm import aliased

from twinstep.platform.store.audit import write_entry
from twinstep.platform.store.database import Database
from twinstep.platform.store.ids import new_id
from twinstep.platform.store.records import View
from twinstep.platform.store.tables import EventRow, JobRow, OutboxRow, RunRow, WebhookRow
from twinstep.platform.store.troubles import again
from twinstep.spec.errors import ConflictError, NotFoundError
from twinstep.spec.states import RunState

TYPES = (
    "job.submitted",
    *(f"run.{state.value}" for state in RunState),
    "run.restarted",
    "run.warned",
    "run.cancel_requested",
    "run.suspend_requested",
    "run.resume_requested",
    "run.retried",
    "run.resumed",
    "run.resized",
)
"""What a webhook may ask to be told of."""
MAX_WEBHOOKS = 50
MAX_EACH = 100  # messages of one webhook that are taken at once
MAX_PAUSE_S = 3600.0  # between two tries of a message, at most
CLAIM_S = 60.0  # a message is another's for so long: several times what a try can take


class Webhook(View):
    """Somebody who is told of what happens. The secret is not among this: it is shown once."""

    id: str
    """`hook-…`."""
    url: str
    """Where messages are posted."""
    types: list[str]
    """Types of event it is told of; empty: all."""
    created_at: float
    waiting: int
    """Messages that are yet to be delivered."""
    delivered_at: float | None = None
    """When a message was last taken."""
    failing_since: float | None = None
    """Since when none was taken; null while all is well."""
    last_error: str | None = None
    """What went wrong last, while it fails."""
    disabled_at: float | None = None
    """Nothing is sent any more; delete it and make a new one."""
    disabled_reason: str | None = None


class Notice(View):
    """One event for one webhook, claimed by this process for `CLAIM_S`."""

    place: int
    """Its place in the outbox."""
    webhook_id: str
    url: str
    secret: str
    attempts: int
    """Tries, this one included."""
    first_tried_at: float
    failing_since: float | None
    failures: int
    """Tries of its webhook that failed, one after another."""
    event_id: int
    time: float
    type: str
    job_id: str
    job_name: str
    run_id: str | None
    attempt: int | None
    """Which attempt the run is."""
    actor: str
    reason: str
    data: dict[str, Any]


def type_of(name: str, data: dict[str, Any]) -> str:
    """Return the type of an event, as webhooks see it."""
    if name == "submitted":
        return "job.submitted"
    return f"run.{data['to'] if name == 'state_changed' else name}"


_NEW_PLACE = insert(OutboxRow)
_WANTED = select(WebhookRow.id, WebhookRow.types).where(WebhookRow.disabled_at.is_(None))
# One that is deleted meanwhile waits: what is put into its outbox goes with it.
_WANTED = _WANTED.with_for_update(read=True, key_share=True)


def webhooks_told(connection: Connection) -> list[tuple[str, str]]:
    """Return the id of each webhook that is told of events, and the types it asked for, as its column has them."""
    return [(row.id, row.types) for row in connection.execute(_WANTED)]


def put_in_outbox(
    connection: Connection, told: Sequence[tuple[str, str]], events: Sequence[tuple[int, dict[str, Any]]]
) -> None:
    """Give events, by their ids, a place for each webhook that wants their type, in the caller's transaction."""
    rows = [
        {"webhook_id": hook_id, "job_id": event["job_id"], "event_id": event_id, "attempts": 0, "due_at": 0.0}
        for event_id, event in events
        for hook_id, types in told
        if types == "" or f",{type_of(event['name'], event['data'])}," in types
    ]
    if rows:
        connection.execute(_NEW_PLACE, rows)


class Outbox:
    """Webhooks and their messages."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @again
    def add(self, url: str, types: Sequence[str], *, secret: str) -> Webhook:
        """Store a webhook.

        Raises:
            ConflictError: there are too many.
        """
        hook_id, text = new_id("hook"), f",{','.join(types)}," if types else ""
        with self._database.write() as connection:
            if connection.execute(select(func.count()).select_from(WebhookRow)).scalar_one() >= MAX_WEBHOOKS:
                raise ConflictError(f"there are {MAX_WEBHOOKS} webhooks already", remedy="delete one of them first")
            connection.execute(
                insert(WebhookRow).values(
                    id=hook_id, url=url, types=text, secret=secret, created_at=time.time(), due_at=0.0, failures=0
                )
            )
            write_entry(connection, target=hook_id)
        return self.get(hook_id)

    def all(self) -> list[Webhook]:
        """Return every webhook, the oldest first."""
        return self._find()

    def get(self, hook_id: str) -> Webhook:
        """Return a webhook, or raise NotFoundError."""
        if found := self._find(hook_id):
            return found[0]
        raise _no_such(hook_id)

    def _find(self, hook_id: str | None = None) -> list[Webhook]:
        waiting = select(func.count()).where(OutboxRow.webhook_id == WebhookRow.id).scalar_subquery()
        names = [name for name in Webhook.model_fields if name != "waiting"]
        query = select(*(getattr(WebhookRow, name) for name in names), waiting.label("waiting")).order_by(WebhookRow.id)
        if hook_id is not None:
            query = query.where(WebhookRow.id == hook_id)
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        return [
            Webhook.model_validate(row._asdict() | {"types": [each for each in row.types.split(",") if each]})
            for row in rows
        ]

    @again
    def remove(self, hook_id: str) -> None:
        """Delete a webhook and what it was yet to be told, or raise NotFoundError."""
        with self._database.write() as connection:
            if not connection.execute(delete(WebhookRow).where(WebhookRow.id == hook_id)).rowcount:
                raise _no_such(hook_id)
            write_entry(connection, target=hook_id)

    @again
    def claim(self, *, limit: int, each: int = MAX_EACH, under_way: Mapping[str, int] | None = None) -> list[Notice]:
        """Take messages that are due: of each job the oldest, of a webhook `each` at most, and of one that fails one.

        What is taken is nobody else's for `CLAIM_S`; what is then neither delivered nor put off is due again.

        Args:
            under_way: by webhook, how many messages the caller has on their way to it; they count.
        """
        if limit <= 0:
            return []
        now, busy = time.time(), dict(under_way or {})
        left = {hook: each - count for hook, count in busy.items()}
        room = (case(left, value=WebhookRow.id, else_=each) if left else literal(each)).label("room")
        before = aliased(OutboxRow)
        earlier = select(before.id).where(
            before.webhook_id == OutboxRow.webhook_id, before.job_id == OutboxRow.job_id, before.id < OutboxRow.id
        )
        order = (OutboxRow.attempts, OutboxRow.id)  # one that is never taken is not the one that is tried
        place = func.row_number().over(partition_by=OutboxRow.webhook_id, order_by=order).label("place")
        columns = (OutboxRow.id, OutboxRow.webhook_id, OutboxRow.attempts, WebhookRow.failing_since, place, room)
        come = (
            select(*columns)
            .join(WebhookRow, WebhookRow.id == OutboxRow.webhook_id)
            .where(WebhookRow.disabled_at.is_(None), _come(WebhookRow.due_at, now), _come(OutboxRow.due_at, now))
            .where(~earlier.exists(), or_(WebhookRow.failing_since.is_(None), WebhookRow.id.not_in(list(busy))))
            .subquery()
        )
        due = select(come).where(come.c.place <= come.c.room).order_by(come.c.attempts, come.c.id).limit(limit)
        with self._database.read() as connection:  # mostly there is nothing, and no writer is disturbed
            found = connection.execute(due).all()
        taken: list[int] = []
        probed: set[str] = set()
        if not found:
            return []
        with self._database.write() as connection:
            for row in found:
                if row.failing_since is not None and row.webhook_id in probed:
                    continue
                claim = (
                    update(OutboxRow)
                    .where(OutboxRow.id == row.id, OutboxRow.attempts == row.attempts)
                    .values(
                        attempts=row.attempts + 1,
                        due_at=now + CLAIM_S,
                        first_tried_at=func.coalesce(OutboxRow.first_tried_at, now),
                    )
                )
                if connection.execute(claim).rowcount:
                    taken.append(row.id)
                    probed.add(row.webhook_id)
            return self._messages(connection, taken)

    def _messages(self, connection: Connection, places: Sequence[int]) -> list[Notice]:
        query = (
            select(
                OutboxRow.id.label("place"), OutboxRow.attempts, OutboxRow.first_tried_at,
                WebhookRow.id.label("webhook_id"), WebhookRow.url, WebhookRow.secret, WebhookRow.failing_since,
                WebhookRow.failures,
                EventRow.id.label("event_id"), EventRow.time, EventRow.name, EventRow.job_id, EventRow.run_id,
                EventRow.actor, EventRow.reason, EventRow.data, JobRow.name.label("job_name"), RunRow.attempt,
            )
            .join(WebhookRow, WebhookRow.id == OutboxRow.webhook_id)
            .join(EventRow, EventRow.id == OutboxRow.event_id)
            .join(JobRow, JobRow.id == EventRow.job_id)
            .join(RunRow, RunRow.id == EventRow.run_id, isouter=True)
            .where(OutboxRow.id.in_(places))
            .order_by(OutboxRow.id)
        )  # fmt: skip
        rows = [row._asdict() for row in connection.execute(query)]
        return [Notice.model_validate(row | {"type": type_of(row["name"], row["data"])}) for row in rows]

    @again
    def delivered(self, message: Notice) -> None:
        """Forget a message that was taken; its webhook is well."""
        with self._database.write() as connection:
            connection.execute(delete(OutboxRow).where(OutboxRow.id == message.place))
            connection.execute(
                update(WebhookRow)
                .where(WebhookRow.id == message.webhook_id)
                .values(delivered_at=time.time(), failures=0, due_at=0.0, failing_since=None, last_error=None)
            )

    @again
    def put_off(self, message: Notice, problem: str, *, pause_s: float, webhook_pause_s: float, drop: bool) -> None:
        """Note that a message was not taken, and try later; with `drop` never again.

        Args:
            pause_s: until this message is tried again.
            webhook_pause_s: until anything is sent to its webhook again.
        """
        now = time.time()
        with self._database.write() as connection:
            here = OutboxRow.id == message.place
            connection.execute(
                delete(OutboxRow).where(here) if drop else update(OutboxRow).where(here).values(due_at=now + pause_s)
            )
            connection.execute(
                update(WebhookRow)
                .where(WebhookRow.id == message.webhook_id)
                .values(
                    failures=WebhookRow.failures + 1,
                    failing_since=func.coalesce(WebhookRow.failing_since, now),
                    due_at=now + webhook_pause_s,
                    last_error=problem,
                )
            )

    @again
    def disable(self, message: Notice, reason: str) -> None:
        """Send a message's webhook nothing any more, and forget what it was yet to be told.

        One that has taken another message since this one was claimed goes on.
        """
        same = WebhookRow.failing_since.is_not_distinct_from(message.failing_since)
        with self._database.write() as connection:
            done = connection.execute(
                update(WebhookRow)
                .where(WebhookRow.id == message.webhook_id, WebhookRow.disabled_at.is_(None), same)
                .values(disabled_at=time.time(), disabled_reason=reason)
            )
            if done.rowcount:
                connection.execute(delete(OutboxRow).where(OutboxRow.webhook_id == message.webhook_id))


def _come(column: Any, now: float) -> Any:
    return or_(column <= now, column > now + 2 * MAX_PAUSE_S)


def _no_such(hook_id: str) -> NotFoundError:
    return NotFoundError(f"there is no webhook {hook_id!r}", remedy="list them: twinstep webhooks ls, GET /v1/webhooks")
