"""Jobs, runs, events and metrics: everything the control plane remembers, behind short transactions.

A run changes its state in one place, `move`: guarded by version, checked against the table of moves, with its event
in the same transaction. Nothing here starts a process, reads a run's files or waits for anything but the database.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from sqlalchemy import Select, bindparam, func, select, update

from twinstep.platform.store.changes import Changes
from twinstep.platform.store.database import Database
from twinstep.platform.store.gather import Gathered
from twinstep.platform.store.hosts import heard_hosts
from twinstep.platform.store.ingest import Ingested, ingest
from twinstep.platform.store.moves import Move, add_event, guarded_moves
from twinstep.platform.store.records import (
    Event,
    EventPage,
    HostHeard,
    JobDetail,
    JobPage,
    MetricPage,
    MetricPoint,
    Run,
)
from twinstep.platform.store.search import (
    JobFilter,
    JobSort,
    count_states,
    find_jobs,
    job_fields,
    newest_of_name,
    select_jobs,
)
from twinstep.platform.store.series import SeriesReader, last_values
from twinstep.platform.store.submits import Stored, Submit, store_submits
from twinstep.platform.store.tables import EventRow, JobRow, MetricRow, RunRow
from twinstep.platform.store.troubles import again
from twinstep.spec.errors import NotFoundError
from twinstep.spec.job import JobSpec
from twinstep.spec.report import Record
from twinstep.spec.roles import DEFAULT_PROJECT, LOCAL_USER
from twinstep.spec.states import LIVE, RunState

CHECKPOINT_SAVED = "checkpoint_saved"  # what a worker calls the event

_RUN_FIELDS = [getattr(RunRow, name) for name in Run.model_fields]
_JOB = select_jobs().where(JobRow.id == bindparam("job_id"))


class Store:
    """The control plane's memory, on one database."""

    def __init__(self, url: str, *, wait_s: float = 0.0, on_wait: Callable[[str], None] = lambda problem: None) -> None:
        """Open the database at `url`, making or migrating its tables; wait so long for a server that is away.

        `on_wait` is told meanwhile what keeps it from answering.

        Raises:
            UnavailableError: it cannot be used.
        """
        self._database = Database(url, wait_s=wait_s, on_wait=on_wait)
        self.changes = Changes()
        self.series = SeriesReader(self._database)
        """Metrics as charts want them."""
        self.on_stored: Callable[[], None] = lambda: None
        """Is called after each commit of new jobs, whether or not whoever submitted them still waits."""
        self._submits = Gathered(self._store, name="submits")
        if self._database.dialect == "postgresql":
            self.changes.share(self._database.url)

    @property
    def database(self) -> Database:
        """The database, for what keeps its own tables in it."""
        return self._database

    def close(self) -> None:
        """Close the database, once what was submitted is stored."""
        self._submits.close()
        self.changes.close()
        self._database.close()

    # ---- jobs ----

    def submit(self, submit: Submit) -> Future[Stored]:
        """Store a job, its first run (`pending`) and the event of it, all or nothing, together with others that come
        at the same time; return what will hold it once it is committed.

        The future's error is ConflictError where the key came with another request, NotFoundError where there is no
        such project, HomeChangedError where it is not the one that the spec was made to fit.
        """
        return self._submits.ask(submit)

    async def submitted(self, submit: Submit) -> Stored:
        """Store a job, as `submit` does, and return it once it is committed, or raise; for many tasks of a loop."""
        return await self._submits.answer(submit)

    def _store(self, submits: Sequence[Submit]) -> Sequence[Stored | Exception]:
        answers = store_submits(self._database, submits)
        new = [answer[0].id for answer in answers if isinstance(answer, tuple) and answer[1]]
        for job_id in new:
            self.changes.bump(job_id)
        if new:
            self.on_stored()
        return answers

    def create_job(self, spec: JobSpec, *, actor: str = LOCAL_USER, project: str = DEFAULT_PROJECT) -> JobDetail:
        """Store a job; see `submit`."""
        return self.submit(Submit(spec=spec, project=project, actor=actor)).result()[0]

    def create_job_once(
        self, spec: JobSpec, *, key: str, actor: str = LOCAL_USER, project: str = DEFAULT_PROJECT
    ) -> Stored:
        """Store a job unless the actor's `key` has stored it before; return it, and whether it was stored now."""
        return self.submit(Submit(spec=spec, project=project, actor=actor, key=key)).result()

    def job(self, job_id: str) -> JobDetail:
        """Return a job with its spec and the standing of its newest run, or raise NotFoundError."""
        with self._database.read() as connection:
            row = connection.execute(_JOB, {"job_id": job_id}).one_or_none()
        if row is None:
            raise NotFoundError(f"there is no job {job_id!r}", remedy="list the jobs: twinstep ls, or GET /v1/jobs")
        return JobDetail.model_validate(job_fields(row) | {"spec": row.spec})

    def newest_of_name(self, name: str, projects: frozenset[str] | None) -> str | None:
        """Return the id of the newest job of a name, of these projects (None: of any); None where there is none."""
        with self._database.read() as connection:
            return newest_of_name(connection, name, projects)

    def jobs(
        self,
        wanted: JobFilter = JobFilter(),  # noqa: B008  frozen
        *,
        sort: JobSort = JobSort.NEWEST,
        limit: int = 50,
        cursor: str | None = None,
    ) -> JobPage:
        """Return one page of the jobs that fit; `cursor` is a page's `next_cursor`."""
        with self._database.read() as connection:
            return find_jobs(connection, wanted, sort=sort, limit=limit, cursor=cursor)

    def count_jobs(self, projects: frozenset[str] | None = None) -> dict[RunState, int]:
        """Return how many jobs are in each state; a state that no job is in is left out."""
        with self._database.read() as connection:
            return count_states(connection, projects)

    def first_spec(self, job_id: str) -> dict[str, Any]:
        """Return the spec that a job was submitted with, whatever later runs changed, or raise NotFoundError."""
        with self._database.read() as connection:
            spec = connection.execute(select(JobRow.spec).where(JobRow.id == job_id)).scalar_one_or_none()
        if spec is None:
            raise NotFoundError(f"there is no job {job_id!r}", remedy="list the jobs: twinstep ls, or GET /v1/jobs")
        return dict(spec)

    # ---- runs ----

    def run(self, run_id: str) -> Run:
        """Return a run, or raise NotFoundError."""
        with self._database.read() as connection:
            row = connection.execute(select(*_RUN_FIELDS).where(RunRow.id == run_id)).one_or_none()
        if row is None:
            raise NotFoundError(f"there is no run {run_id!r}", remedy="list a job's runs: GET /v1/jobs/JOB/runs")
        return Run.model_validate(row._asdict())

    def runs(self, job_id: str) -> list[Run]:
        """Return a job's runs, first attempt first; empty where there is no such job."""
        query = select(*_RUN_FIELDS).where(RunRow.job_id == job_id).order_by(RunRow.attempt)
        with self._database.read() as connection:
            return [Run.model_validate(row._asdict()) for row in connection.execute(query)]

    def live_runs(self, *, backend: str | None = None) -> list[Run]:
        """Return every run (of one backend) that is not final, in the order they were submitted."""
        query = select(*_RUN_FIELDS).where(RunRow.state.in_(sorted(LIVE))).order_by(RunRow.id)
        if backend is not None:
            query = query.where(RunRow.backend == backend)
        with self._database.read() as connection:
            return [Run.model_validate(row._asdict()) for row in connection.execute(query)]

    def heard_hosts(self, run_id: str) -> list[HostHeard]:
        """Return when each host of a run in a cluster was last heard of; hosts that said nothing are left out."""
        with self._database.read() as connection:
            return heard_hosts(connection, run_id)

    def count_runs(self) -> dict[RunState, int]:
        """Return how many runs are in each state; a state that no run is in is left out."""
        query = select(RunRow.state, func.count()).group_by(RunRow.state)
        with self._database.read() as connection:
            return {RunState(state): count for state, count in connection.execute(query)}

    def token_hashes(self, run_id: str) -> tuple[str, ...]:
        """Return the hashes of a run's tokens: none before its first start, and where there is no such run.

        More than one only where a launch in a cluster was begun again.
        """
        query = select(RunRow.token_hash, RunRow.spare_token_hash).where(RunRow.id == run_id)
        with self._database.read() as connection:
            row = connection.execute(query).one_or_none()
        return tuple(each for each in row or () if each is not None)

    @again
    def move(
        self,
        run_id: str,
        *,
        to: RunState,
        if_version: int,
        reason: str,
        actor: str,
        token_hash: str | None = None,
        home: str | None = None,
    ) -> bool:
        """Move a run to another state and write the event of it; False where somebody else was first.

        Raises:
            StateError: the table of moves does not know this one; nothing is changed.
            NotFoundError: no such run.
        """
        given = {"token_hash": token_hash, "home": home}
        changes = {name: value for name, value in given.items() if value is not None}
        move = Move(run_id=run_id, path=[to], if_version=if_version, reason=reason, changes=changes)
        with self._database.write() as connection:
            (job_id,) = guarded_moves(connection, [move], actor=actor, time=time.time())
        if job_id is not None:
            self.changes.bump(job_id)
        return job_id is not None

    @again
    def set_reasons(self, reasons: Sequence[tuple[Run, str]]) -> None:
        """Say anew why runs are where they are; no change of state, so no event and no new version.

        One transaction for all of a long queue; a run that has moved on since it was read keeps its reason.
        """
        if not reasons:
            return
        query = (
            update(RunRow)
            .where(RunRow.id == bindparam("of_run"), RunRow.version == bindparam("at_version"))
            .values(reason=bindparam("says"))
        )
        rows = [{"of_run": run.id, "at_version": run.version, "says": reason} for run, reason in reasons]
        with self._database.write() as connection:
            connection.execute(query, rows)
        for run, _ in reasons:
            self.changes.bump(run.job_id)

    @again
    def request_cancel(self, run_id: str, *, actor: str) -> bool:
        """Note, once, that a run is to stop; False where it is final or was asked before."""
        now = time.time()
        query = (
            update(RunRow)
            .where(RunRow.id == run_id, RunRow.cancel_requested_at.is_(None), RunRow.state.in_(sorted(LIVE)))
            .values(cancel_requested_at=now, version=RunRow.version + 1)
            .returning(RunRow.job_id)
        )
        with self._database.write() as connection:
            job_id = connection.execute(query).scalar_one_or_none()
            if job_id is not None:
                add_event(
                    connection,
                    job_id=job_id,
                    run_id=run_id,
                    time=now,
                    name="cancel_requested",
                    actor=actor,
                    reason=f"{actor} asked for the run to stop",
                    data={},
                )
        if job_id is not None:
            self.changes.bump(job_id)
        return job_id is not None

    # ---- reports ----

    @again
    def ingest(self, run_id: str, records: Sequence[Record], *, skip_gaps: bool = False) -> Ingested:
        """Store what a worker reported: each record once, in order; see `store.ingest.ingest`."""
        with self._database.write() as connection:
            done = ingest(
                connection,
                run_id,
                records,
                now=time.time(),
                skip_gaps=skip_gaps,
                dialect=self._database.dialect,
            )
        if done.stored:
            self.changes.bump(done.job_id)
        return done

    def events(self, job_id: str, *, after: int = 0, limit: int = 200) -> EventPage:
        """Return a job's events with an id above `after`, oldest first."""
        query = (
            select(EventRow.__table__)
            .where(EventRow.job_id == job_id, EventRow.id > after)
            .order_by(EventRow.id)
            .limit(limit)
        )
        items = self._events(query)
        return EventPage(items=items, next_after=items[-1].id if items else after)

    def last_events(self, job_id: str, run_id: str, *, limit: int) -> list[Event]:
        """Return the newest events of a job's run, oldest first."""
        # By the job as well, for that is what the index begins with.
        of_run = (EventRow.job_id == job_id, EventRow.run_id == run_id)
        query = select(EventRow.__table__).where(*of_run).order_by(EventRow.id.desc()).limit(limit)
        return self._events(query)[::-1]

    def saved_step(self, job_id: str) -> int | None:
        """Return the step of the newest checkpoint that any run of a job has told of; None where none has."""
        told = (EventRow.job_id == job_id, EventRow.name == CHECKPOINT_SAVED)
        found = self._events(select(EventRow.__table__).where(*told).order_by(EventRow.id.desc()).limit(1))
        step = found[0].data.get("step") if found else None
        return step if isinstance(step, int) else None

    def _events(self, query: Select[Any]) -> list[Event]:
        with self._database.read() as connection:
            return [Event.model_validate(row._asdict()) for row in connection.execute(query)]

    def last_values(self, run_id: str, names: Sequence[str]) -> dict[str, float | None]:
        """Return the value of each metric at its last step; a metric without points is left out."""
        with self._database.read() as connection:
            return last_values(connection, run_id, names)

    def metrics(self, run_id: str, *, after: int = 0, names: Sequence[str] = (), limit: int = 1000) -> MetricPage:
        """Return a run's metric points with an id above `after`, in the order they were stored."""
        query = (
            select(MetricRow.__table__)
            .where(MetricRow.run_id == run_id, MetricRow.id > after)
            .order_by(MetricRow.id)
            .limit(limit)
        )
        if names:
            query = query.where(MetricRow.name.in_(names))
        with self._database.read() as connection:
            # The rows are what ingest checked: building without checking again keeps long charts quick.
            items = [MetricPoint.model_construct(**row._asdict()) for row in connection.execute(query)]
        return MetricPage.model_construct(items=items, next_after=items[-1].id if items else after)
