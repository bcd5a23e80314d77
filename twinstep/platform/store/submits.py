"""What submits write, many in one transaction: jobs, their first runs, the events, and the keys they came with.

Writers have the database to themselves (SQLite) or meet the keys' uniqueness (PostgreSQL): of two submits with one
key, one stores a job and the other finds it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, bindparam, insert, select
from sqlalchemy.exc import IntegrityError

from twinstep.platform import logs
from twinstep.platform.store.audit import write_entries
from twinstep.platform.store.database import Database
from twinstep.platform.store.entry import Entry, current_entry
from twinstep.platform.store.ids import new_id
from twinstep.platform.store.moves import add_events, warned
from twinstep.platform.store.records import JobDetail
from twinstep.platform.store.search import job_fields, select_jobs, spec_fields
from twinstep.platform.store.tables import IdempotencyRow, JobRow, RunRow
from twinstep.platform.store.troubles import again
from twinstep.platform.store.users import Project, held_projects, no_project
from twinstep.platform.store.written import Written
from twinstep.spec.errors import ConflictError, TwinstepError
from twinstep.spec.job import JobSpec
from twinstep.spec.states import RunState

SUBMITTED = "submitted; the scheduler has not looked at it yet"
HELD_BYTES = 2047  # HASHLIB_GIL_MINSIZE - 1 in CPython's Modules/hashlib.h
# Made once: the making of a statement takes longer than its execution.
_NEW_JOB = insert(JobRow)
_NEW_RUN = insert(RunRow)
_NEW_KEY = insert(IdempotencyRow)
# Of owners and keys that were asked for, also pairs that were not: whoever asks looks for their own.
_KNOWN = select(IdempotencyRow.__table__).where(
    IdempotencyRow.owner.in_(bindparam("owners", expanding=True)),
    IdempotencyRow.key.in_(bindparam("keys", expanding=True)),
)
_SPEC = select(JobRow.spec, JobRow.project).where(JobRow.id == bindparam("job_id"))
_JOBS = select_jobs().where(JobRow.id.in_(bindparam("job_ids", expanding=True)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Submit:
    """A job that is to be stored, with what is known of who asks for it."""

    spec: JobSpec
    project: str
    actor: str
    home: Project | None = None
    """The project as the spec was made to fit it; stored only while it is that one. None: whatever it is by then."""
    key: str | None = None
    """The submitter's own, by which a submit that is sent again is known."""
    warnings: tuple[str, ...] = ()
    """What speaks against it, though it is let through."""
    entry: Entry | None = field(default_factory=current_entry)
    """Of the request that is worked on."""
    facts: Mapping[str, str] = field(default_factory=logs.facts)
    """What the log's lines of it are about."""
    body: dict[str, Any] = field(init=False)
    text: Written = field(init=False)
    """The body as it is stored."""
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        body = self.spec.model_dump(mode="json")
        text = Written(json.dumps(body))
        object.__setattr__(self, "body", body)
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "digest", "" if self.key is None else _digest(f"{self.project}\0{text}"))


Stored = tuple[JobDetail, bool]
"""A job, and whether it was stored now."""


def store_submits(database: Database, submits: Sequence[Submit]) -> Sequence[Stored | Exception]:
    """Store jobs in one transaction; return each, or why it is not stored: the others are, all the same.

    The answer to a submit that came before is the job as it is now.
    """
    try:
        return _committed(database, submits)
    except TwinstepError:  # the database's trouble, not one submit's
        raise
    except Exception:  # another control plane stored a key since it was looked for, or one submit cannot be stored
        return [_alone(database, each) for each in submits]


def _alone(database: Database, submit: Submit) -> Stored | Exception:
    try:
        try:
            return _committed(database, [submit])[0]
        except IntegrityError:
            return _committed(database, [submit])[0]  # it finds what the first try met
    except Exception as error:  # its own: those before it are committed
        return error


@again
def _committed(database: Database, submits: Sequence[Submit]) -> Sequence[Stored | Exception]:
    with database.write() as connection:
        answers = _store(connection, submits)
    for each, answer in zip(submits, answers, strict=True):
        if each.entry is not None and isinstance(answer, tuple):
            each.entry.written = True
    return answers


def _store(connection: Connection, submits: Sequence[Submit]) -> list[Stored | Exception]:
    homes = held_projects(connection, {each.project for each in submits})
    known = _known(connection, [(each.actor, each.key) for each in submits if each.key is not None])
    found: list[tuple[str, bool] | TwinstepError] = []
    new: list[tuple[Submit, JobDetail]] = []
    now = time.time()
    for each in submits:
        try:
            job_id = None if each.key is None else _before(connection, known.get((each.actor, each.key)), each, new)
            if job_id is None:
                _check_home(each, homes)
                job_id = new_id("job")
                new.append((each, _new_job(each, job_id, now)))
                if each.key is not None:
                    known[each.actor, each.key] = (each.digest, job_id)
                found.append((job_id, True))
            else:
                found.append((job_id, False))
        except TwinstepError as error:
            found.append(error)
    if new:
        _write(connection, new)
    asked = [(each.entry, told[0]) for each, told in zip(submits, found, strict=True) if isinstance(told, tuple)]
    write_entries(connection, [(entry, job_id) for entry, job_id in asked if entry is not None])
    jobs = {job.id: job for _, job in new}
    if before := {item[0] for item in found if isinstance(item, tuple)} - jobs.keys():
        jobs |= _jobs(connection, before)
    return [(jobs[item[0]], item[1]) if isinstance(item, tuple) else item for item in found]


def _check_home(submit: Submit, homes: Mapping[str, Project]) -> None:
    """Raise where the submit's project is gone, or another has its name by now."""
    home = homes.get(submit.project)
    if home is None:
        raise no_project(submit.project)
    if submit.home is not None and submit.home != home:
        raise HomeChangedError(f"the project {submit.project} was changed meanwhile", remedy="send it once more")


class HomeChangedError(ConflictError):
    """A project is another than the one that a spec was made to fit."""


def _new_job(submit: Submit, job_id: str, now: float) -> JobDetail:
    """Return a job as it will be read once it is stored."""
    return JobDetail(
        id=job_id,
        name=submit.spec.name,
        project=submit.project,
        submitted_by=submit.actor,
        created_at=now,
        run_id=new_id("run"),
        run_created_at=now,
        state=RunState.PENDING,
        reason=SUBMITTED,
        attempt=1,
        spec=submit.body,
        **spec_fields(submit.body),
    )


def _write(connection: Connection, new: Sequence[tuple[Submit, JobDetail]]) -> None:
    jobs, runs, events, facts, keys = [], [], [], list[Mapping[str, str]](), []
    for each, job in new:
        now, job_id, run_id, name = job.created_at, job.id, job.run_id, job.name
        jobs.append(
            {
                "id": job_id,
                "name": name,
                "spec": each.text,
                "created_at": now,
                "project": each.project,
                "submitted_by": each.actor,
            }
        )
        runs.append(
            {
                "id": run_id,
                "job_id": job_id,
                "attempt": 1,
                "backend": backend_of(each.body),
                "state": RunState.PENDING,
                "reason": SUBMITTED,
                "version": 1,
                "created_at": now,
                "waiting_since": now,
                "acked_seq": 0,
            }
        )
        events.append(
            {
                "job_id": job_id,
                "run_id": run_id,
                "time": now,
                "name": "submitted",
                "actor": each.actor,
                "reason": f"job {name} was submitted",
                "data": {"to": RunState.PENDING},
            }
        )
        facts.append(each.facts)
        if each.warnings:
            events.append(warned(job_id, run_id, now, each.warnings))
            facts.append(each.facts)
        if each.key is not None:
            keys.append(_key_row(each.actor, each.key, each.digest, job_id, now))
    connection.execute(_NEW_JOB, jobs)
    connection.execute(_NEW_RUN, runs)
    if keys:
        connection.execute(_NEW_KEY, keys)
    add_events(connection, events, facts=facts)


def backend_of(spec: dict[str, Any]) -> str:
    """Return where runs of a spec run: this machine has processors, a cluster has the rest."""
    return "local" if spec["accelerator"]["kind"] == "cpu" else "kubernetes"


def _jobs(connection: Connection, job_ids: Iterable[str]) -> dict[str, JobDetail]:
    rows = connection.execute(_JOBS, {"job_ids": sorted(job_ids)})
    return {row.id: JobDetail.model_validate(job_fields(row) | {"spec": row.spec}) for row in rows}


# ---- keys ----


def _before(
    connection: Connection, known: tuple[str, str] | None, submit: Submit, new: Sequence[tuple[Submit, JobDetail]]
) -> str | None:
    """Return the id of the job that this very submit has stored before; None where its key is new.

    A digest that differs may be that of the same spec with its names in another order, or of another version's.

    Raises:
        ConflictError: the key came with another spec, or for another project.
    """
    if known is not None and known[0] != submit.digest:
        stored = [(each.body, each.project) for each, job in new if job.id == known[1]]
        stored += [(row.spec, row.project) for row in connection.execute(_SPEC, {"job_id": known[1]})]
        if stored == [(submit.body, submit.project)]:
            return known[1]
    return _same(known, submit.key or "", submit.digest)


def known_job(connection: Connection, owner: str, key: str, request: dict[str, Any]) -> str | None:
    """Return the id of the job that `owner` asked something of with `key`; None where there is none.

    Raises:
        ConflictError: it came with another request.
    """
    return _same(_known(connection, [(owner, key)]).get((owner, key)), key, digest_of(request))


def remember_key(connection: Connection, owner: str, key: str, request: dict[str, Any], job_id: str) -> None:
    """Write the key of a request that was just stored."""
    connection.execute(_NEW_KEY, _key_row(owner, key, digest_of(request), job_id, time.time()))


def digest_of(request: dict[str, Any]) -> str:
    """Return what a request is known by."""
    return _digest(json.dumps(request, sort_keys=True))


def _digest(words: str) -> str:
    text, found = words.encode(), hashlib.sha256()
    # hashlib lets other threads run while it takes in more than 2047 bytes, which takes it microseconds; to get its
    # turn again takes as long as another thread may keep it, 5 ms. On the event loop every request would wait so long.
    for begin in range(0, len(text), HELD_BYTES):
        found.update(text[begin : begin + HELD_BYTES])
    return found.hexdigest()


def _known(connection: Connection, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], tuple[str, str]]:
    """Return digest and job of each owner and key that are stored."""
    if not pairs:
        return {}
    asked = {"owners": sorted({owner for owner, _ in pairs}), "keys": sorted({key for _, key in pairs})}
    return {(row.owner, row.key): (row.digest, row.job_id) for row in connection.execute(_KNOWN, asked)}


def _same(known: tuple[str, str] | None, key: str, digest: str) -> str | None:
    if known is not None and known[0] != digest:
        raise ConflictError(
            f"the Idempotency-Key {key!r} came with another request before, for job {known[1]}",
            remedy="send a new key with a new request, or the same request with this one",
        )
    return None if known is None else known[1]


def _key_row(owner: str, key: str, digest: str, job_id: str, now: float) -> dict[str, Any]:
    return {"owner": owner, "key": key, "digest": digest, "job_id": job_id, "created_at": now}
