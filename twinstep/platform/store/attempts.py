"""Further runs of a job, and the wish to suspend one: what retry, resume, resize and suspend write."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, case, insert, select, update
from sqlalchemy.exc import IntegrityError

from twinstep.platform.store.database import Database
from twinstep.platform.store.ids import new_id
from twinstep.platform.store.moves import add_event, warned
from twinstep.platform.store.submits import known_job, remember_key
from twinstep.platform.store.tables import JobRow, RunRow
from twinstep.platform.store.troubles import again
from twinstep.platform.store.users import held_projects
from twinstep.spec.errors import ConflictError
from twinstep.spec.states import LIVE, RunState


@dataclass(frozen=True, kw_only=True, slots=True)
class NewAttempt:
    """A run that is to follow another one of its job."""

    verb: str
    """retried, resumed or resized: the name of its event."""
    after: str
    """The newest run, as whoever asks has seen it."""
    version: int
    """Of that run, then."""
    spec: dict[str, Any] | None = None
    """Its own; None: that of the run before."""
    resumed_from: str | None = None
    says: str = ""
    """What is different, in a few words."""
    warnings: tuple[str, ...] = ()
    """What speaks against it, though it is let through."""


class Attempts:
    """The runs of jobs, as the verbs of their users write them."""

    def __init__(self, database: Database, *, changed: Callable[[str], None]) -> None:
        """`changed` is told the id of each job about which something was written."""
        self._database = database
        self._changed = changed

    @again
    def known(self, job_id: str, *, actor: str, key: str, asked: dict[str, Any]) -> bool:
        """Say whether this very request came before with this key.

        Raises:
            ConflictError: the key came with another request.
        """
        with self._database.read() as connection:
            return known_job(connection, actor, key, {"job": job_id, **asked}) is not None

    @again
    def add(self, job_id: str, wanted: NewAttempt, *, actor: str, key: str | None, asked: dict[str, Any]) -> bool:
        """Store a run; where the one before has not ended, ask it to stop in the same transaction.

        Args:
            key: the user's own, by which a request that is sent again is known; `asked` is what it asks.

        Returns:
            Whether it was stored now; False where the key had stored it before.

        Raises:
            ConflictError: the job was changed since it was looked at, or the key came with another request.
        """
        request = {"job": job_id, **asked}
        try:
            with self._database.write() as connection:
                if key is not None and known_job(connection, actor, key, request) is not None:
                    return False
                _add(connection, job_id, wanted, actor=actor)
                if key is not None:
                    remember_key(connection, actor, key, request, job_id)
        except IntegrityError:  # another writer stored the key or the attempt since they were looked for
            if key is not None and self.known(job_id, actor=actor, key=key, asked=asked):
                return False
            raise _changed_meanwhile(job_id) from None
        self._changed(job_id)
        return True

    @again
    def wish(self, run_id: str, *, suspended: bool, actor: str) -> bool:
        """Note, once, that a run is to be suspended, or may go on; False where it is so, or the run has ended."""
        now = time.time()
        column = RunRow.suspend_requested_at
        wished = column.is_(None) if suspended else column.is_not(None)
        return self._wish(run_id, [wished], {"suspend_requested_at": now if suspended else None}, actor, suspended, now)

    @again
    def free(self, run_id: str, *, actor: str) -> bool:
        """Note, once, that a run may go on which nobody asked here to suspend; False where that is known, or it ended.

        The cluster counts as told to suspend it, and so is told that it may go on.
        """
        unknown = [RunRow.suspend_requested_at.is_(None), RunRow.suspended_at.is_(None)]
        now = time.time()
        return self._wish(run_id, unknown, {"suspended_at": now}, actor, False, now)

    def _wish(
        self,
        run_id: str,
        only: Sequence[ColumnElement[bool]],
        changes: dict[str, float | None],
        actor: str,
        suspended: bool,
        now: float,
    ) -> bool:
        query = (
            update(RunRow)
            .where(RunRow.id == run_id, RunRow.state.in_(sorted(LIVE)), RunRow.cancel_requested_at.is_(None), *only)
            # A wait begins anew once it may go on.
            .values(
                **changes,
                waiting_since=case((RunRow.waiting_since.is_not(None), now), else_=None),
                version=RunRow.version + 1,
            )
            .returning(RunRow.job_id)
        )
        with self._database.write() as connection:
            job_id = connection.execute(query).scalar_one_or_none()
            if job_id is None:
                return False
            event = {"name": "suspend_requested"} if suspended else {"name": "resume_requested"}
            add_event(
                connection,
                job_id=job_id,
                run_id=run_id,
                time=now,
                actor=actor,
                reason=f"{actor} asked for the run {'to be suspended' if suspended else 'to go on'}",
                data={},
                **event,
            )
        self._changed(job_id)
        return True


def _add(connection: Connection, job_id: str, wanted: NewAttempt, *, actor: str) -> None:
    columns = (RunRow.id, RunRow.version, RunRow.attempt, RunRow.state, RunRow.spec, RunRow.backend)
    newest = connection.execute(
        select(*columns).where(RunRow.job_id == job_id).order_by(RunRow.attempt.desc()).limit(1).with_for_update()
    ).one()
    if (newest.id, newest.version) != (wanted.after, wanted.version):
        raise _changed_meanwhile(job_id)
    project: str = connection.execute(select(JobRow.project).where(JobRow.id == job_id)).scalar_one()
    if not held_projects(connection, {project}):
        raise ConflictError(
            f"the project {project} of job {job_id} was deleted: no run of it can begin",
            remedy="submit its spec to another project: twinstep submit SPEC --project NAME",
        )
    now, run_id, attempt = time.time(), new_id("run"), newest.attempt + 1
    stops = newest.state in LIVE
    said = f"attempt {attempt}{wanted.says}"
    if stops:
        connection.execute(
            update(RunRow)
            .where(RunRow.id == newest.id, RunRow.cancel_requested_at.is_(None))
            .values(cancel_requested_at=now, version=RunRow.version + 1)
        )
        add_event(
            connection,
            job_id=job_id,
            run_id=newest.id,
            time=now,
            name="cancel_requested",
            actor=actor,
            reason=f"it makes room for {said}",
            data={},
        )
    connection.execute(
        insert(RunRow).values(
            id=run_id,
            job_id=job_id,
            attempt=attempt,
            backend=newest.backend,
            spec=wanted.spec or newest.spec,
            resumed_from=wanted.resumed_from,
            state=RunState.PENDING,
            reason=f"{wanted.verb} by {actor}{wanted.says}; the scheduler has not looked at it yet",
            version=1,
            created_at=now,
            waiting_since=now,
            acked_seq=0,
        )
    )
    add_event(
        connection,
        job_id=job_id,
        run_id=run_id,
        time=now,
        name=wanted.verb,
        actor=actor,
        reason=f"{actor} asked for {said}",
        data={"to": RunState.PENDING, "attempt": attempt, "after": newest.id},
    )
    if wanted.warnings:
        add_event(connection, **warned(job_id, run_id, now, wanted.warnings))


def _changed_meanwhile(job_id: str) -> ConflictError:
    return ConflictError(f"job {job_id} was changed meanwhile", remedy="look at it, and ask again if it is still due")
