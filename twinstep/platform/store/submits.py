"""What a submit writes, in the caller's transaction: a job, its first run, the event, and the key it came with.

A writer has the database to itself (SQLite) or meets the key's uniqueness (PostgreSQL): of two submits with one key,
one stores a job and the other finds it.
"""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any

from sqlalchemy import Connection, bindparam, insert, select

from twinstep.platform.store.ids import new_id
from twinstep.platform.store.moves import add_event
from twinstep.platform.store.tables import IdempotencyRow, JobRow, RunRow
from twinstep.spec.errors import ConflictError
from twinstep.spec.states import RunState

# Made once: what a submit takes is mostly the making of its statements.
_NEW_JOB = insert(JobRow)
_NEW_RUN = insert(RunRow)
_NEW_KEY = insert(IdempotencyRow)
_KNOWN = select(IdempotencyRow.digest, IdempotencyRow.job_id).where(
    IdempotencyRow.owner == bindparam("owner"), IdempotencyRow.key == bindparam("key")
)


def add_job(connection: Connection, name: str, spec: dict[str, Any], *, actor: str, project: str) -> str:
    """Write a job, its first run (`pending`) and the event of it; return the job's id."""
    now, job_id, run_id = time.time(), new_id("job"), new_id("run")
    job = {"id": job_id, "name": name, "spec": spec, "created_at": now, "project": project, "submitted_by": actor}
    connection.execute(_NEW_JOB, job)
    connection.execute(
        _NEW_RUN,
        {
            "id": run_id,
            "job_id": job_id,
            "attempt": 1,
            "backend": backend_of(spec),
            "state": RunState.PENDING,
            "reason": "submitted; the scheduler has not looked at it yet",
            "version": 1,
            "created_at": now,
            "acked_seq": 0,
        },
    )
    add_event(
        connection,
        job_id=job_id,
        run_id=run_id,
        time=now,
        name="submitted",
        actor=actor,
        reason=f"job {name} was submitted",
        data={"to": RunState.PENDING},
    )
    return job_id


def backend_of(spec: dict[str, Any]) -> str:
    """Return where runs of a spec run: this machine has processors, a cluster has the rest."""
    return "local" if spec["accelerator"]["kind"] == "cpu" else "kubernetes"


def known_job(connection: Connection, owner: str, key: str, submit: dict[str, Any]) -> str | None:
    """Return the id of the job that `owner` stored with `key`; None where there is none.

    Raises:
        ConflictError: it came with another spec, or for another project.
    """
    row = connection.execute(_KNOWN, {"owner": owner, "key": key}).one_or_none()
    if row is None:
        return None
    if row.digest != _digest(submit):
        raise ConflictError(
            f"the Idempotency-Key {key!r} came with another request before, for job {row.job_id}",
            remedy="send a new key with a new request, or the same request with this one",
        )
    return str(row.job_id)


def remember_key(connection: Connection, owner: str, key: str, submit: dict[str, Any], job_id: str) -> None:
    """Write the key of a job that was just stored."""
    row = {"owner": owner, "key": key, "digest": _digest(submit), "job_id": job_id, "created_at": time.time()}
    connection.execute(_NEW_KEY, row)


def _digest(submit: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(submit, sort_keys=True).encode()).hexdigest()
