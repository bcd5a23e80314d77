"""What pages and routes may ask of the control plane: submit, list, look, cancel, report. One method per question.

Parses nothing that came over HTTP and draws nothing; every method is safe to call from any thread, and blocks.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from twinstep.platform.scheduler.accounts import Accounts
from twinstep.platform.scheduler.attempts import Verbs
from twinstep.platform.scheduler.cluster.connect import ClusterFigures, ClusterHealth
from twinstep.platform.scheduler.explain import Explanation, explain
from twinstep.platform.scheduler.render.render import RenderedRun
from twinstep.platform.scheduler.rundir import RunDir, hash_token
from twinstep.platform.scheduler.runnable import check_runnable, diff_of, planned
from twinstep.platform.scheduler.webhooks import Target, Webhooks
from twinstep.platform.settings import Settings
from twinstep.platform.store.ids import is_job_id
from twinstep.platform.store.logs import EVERYBODY, Logs, StoredLog
from twinstep.platform.store.outbox import Outbox
from twinstep.platform.store.records import (
    EventPage,
    HostHeard,
    Job,
    JobDetail,
    JobPage,
    LogFilter,
    LogPart,
    MetricNames,
    MetricPage,
    Run,
    SeriesPage,
    View,
)
from twinstep.platform.store.search import JobFilter, JobSort
from twinstep.platform.store.store import Store
from twinstep.platform.store.submits import Submit
from twinstep.platform.store.users import Project
from twinstep.spec.errors import AuthError, ConflictError, NotFoundError
from twinstep.spec.job import JobSpec
from twinstep.spec.machine import machine_hosts
from twinstep.spec.paths import check_paths
from twinstep.spec.report import ReportAck, ReportBatch
from twinstep.spec.roles import DEFAULT_PROJECT, LOCAL_USER
from twinstep.spec.states import RunState

MAX_PAGE = 200  # jobs or events one answer holds at most
MAX_POINTS = 10_000  # metric points one answer holds at most
MAX_BUCKETS = 5000  # points of one line of a chart
EXPLAINED_EVENTS = 20
EXPLAINED_LINES = 200  # of a log: an error and what led to it
TROUBLE = "a watch is interrupted; ask with a token for what it says"
READY_AGE_S = 30.0  # a reconciler that has not passed for so long is stuck


class Readiness(View):
    """Whether the control plane does its work."""

    ready: bool
    reconciler_age_seconds: float | None
    """Since the last whole pass over the runs; null before the first."""
    cluster: ClusterHealth | None = None
    """How it stands with the cluster; null where it has none. Its staleness is told, and makes nothing unready:
    workers go on reporting."""
    detail: str
    """What is wrong, or that nothing is."""

    def without_addresses(self) -> Readiness:
        """Return what anybody may know: not where the API server is, nor what it says."""
        if self.cluster is None or not self.cluster.troubles:
            return self
        detail = "the cluster is not heard of" if "not heard of" in self.detail else self.detail
        cluster = self.cluster.model_copy(update={"troubles": [TROUBLE]})
        return self.model_copy(update={"cluster": cluster, "detail": detail})


class Service:
    """The control plane, to those who use it."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        *,
        nudge: Callable[[], None] = lambda: None,
        reconciler_age: Callable[[], float | None] = lambda: None,
        cluster_health: Callable[[], ClusterHealth | None] = lambda: None,
        cluster_figures: Callable[[], ClusterFigures | None] = lambda: None,
    ) -> None:
        """`nudge` makes the reconcilers look at once; `reconciler_age` tells when the slower one last did."""
        self.settings = settings
        self.closing = threading.Event()
        """Set when the control plane is about to end: streams end first."""
        self.accounts = Accounts(store.database, settings)
        """Who may ask what; the methods here leave that to their callers."""
        self.webhooks = Webhooks(Outbox(store.database), Target(settings))
        self.verbs = Verbs(store, settings, nudge=nudge)
        """Retry, suspend, resume and resize."""
        self.logs = Logs(store.database, store.changes)
        """What was collected of runs in a cluster."""
        self._store = store
        self._nudge = store.on_stored = nudge
        self._age = reconciler_age
        self._cluster_health = cluster_health
        self.cluster_figures = cluster_figures
        """What was asked of the cluster so far; None where there is none."""

    # ---- jobs ----

    def check_runnable(self, spec: JobSpec) -> tuple[str, ...]:
        """Raise SpecError where no backend here can run a spec; return warnings. Takes time, unless it is for cpu."""
        check_paths(spec)
        return check_runnable(spec, self.settings)

    async def submit(
        self,
        spec: JobSpec,
        *,
        home: Project,
        key: str | None = None,
        actor: str = LOCAL_USER,
        warnings: tuple[str, ...] = (),
    ) -> tuple[JobDetail, bool, str | None]:
        """Store a job that was checked and that fits its project; the scheduler takes it from there.

        Returns the job once it is committed, whether it was stored now, and if so its spec as JSON; or else raises the
        error of `Store.submit`.

        Args:
            key: the submitter's own, by which a submit that is sent again is known.
            warnings: what `check_runnable` returned; they become an event.
        """
        submit = Submit(spec=spec, project=home.name, home=home, actor=actor, key=key, warnings=warnings)
        job, new = await self._store.submitted(submit)
        return job, new, submit.text if new else None

    def submit_job(self, spec: JobSpec, *, actor: str = LOCAL_USER, project: str = DEFAULT_PROJECT) -> JobDetail:
        """Check and store a job, and wait until it is stored.

        Raises:
            SpecError: no backend of this control plane can run it; nothing is stored.
            NotFoundError: there is no such project.
        """
        warnings = self.check_runnable(spec)
        home = self.accounts.users.project(project)
        submit = Submit(spec=spec, project=home.name, home=home, actor=actor, warnings=warnings)
        return self._store.submit(submit).result()[0]

    def plan_job(self, spec: JobSpec) -> RenderedRun:
        """Return what a spec would become in a cluster, checked as the cluster would; stores and sends nothing.

        Raises:
            SpecError: it is no cluster's, does not fit its accelerator, or the cluster would refuse what it renders to.
        """
        check_paths(spec)
        return planned(spec, self.settings)

    def plan_diff(self, spec: JobSpec, job_id: str) -> str:
        """Return what would be different if a job's newest run had this spec: a unified diff of manifests.

        Raises:
            NotFoundError: no such job.
            SpecError: the spec, or the job's, is no cluster's.
        """
        return diff_of(self._store.job(job_id), spec, self.settings)

    def list_jobs(
        self,
        wanted: JobFilter = JobFilter(),  # noqa: B008  frozen
        *,
        sort: JobSort = JobSort.NEWEST,
        limit: int = 50,
        cursor: str | None = None,
    ) -> JobPage:
        """Return one page of the jobs that fit; give a page's `next_cursor` for the next one."""
        return self._store.jobs(wanted, sort=sort, limit=_within(limit, MAX_PAGE), cursor=cursor)

    def count_jobs(self, projects: frozenset[str] | None = None) -> dict[RunState, int]:
        """Return how many jobs of these projects (None: of all) are in each state."""
        return self._store.count_jobs(projects)

    def get_job(self, job_id: str) -> JobDetail:
        """Return a job with its spec, or raise NotFoundError."""
        return self._store.job(job_id)

    def id_of(self, named: str, projects: frozenset[str] | None) -> str:
        """Return the id of the job that `named` means: an id as it is, a name's newest job of these projects.

        A name that no such job has is returned as it is: there is no job of that id either.
        """
        return named if is_job_id(named) else self._store.newest_of_name(named, projects) or named

    def first_spec(self, job_id: str) -> dict[str, Any]:
        """Return the spec that a job was submitted with, whatever later runs changed, or raise NotFoundError."""
        return self._store.first_spec(job_id)

    def cancel_job(self, job_id: str, *, actor: str = LOCAL_USER) -> JobDetail:
        """Ask for a job to stop. Asking again, also once it is cancelled, changes nothing.

        Raises:
            NotFoundError: no such job.
            ConflictError: it had already succeeded or failed.
        """
        job = self._store.job(job_id)
        while not self._store.request_cancel(job.run_id, actor=actor):
            before, job = job, self._store.job(job_id)
            if job.run_id != before.run_id:
                continue  # it was retried or resized meanwhile: the new run is the one to stop
            if job.state in (RunState.SUCCEEDED, RunState.FAILED):
                raise ConflictError(
                    f"job {job_id} has {job.state} already and cannot be cancelled",
                    remedy="nothing to do: it holds no resources any more",
                )
            return job
        self._nudge()
        return self._store.job(job_id)

    # ---- what belongs to a job ----

    def list_runs(self, job_id: str) -> list[Run]:
        """Return a job's runs, first attempt first, or raise NotFoundError."""
        if runs := self._store.runs(job_id):
            return runs
        self._store.job(job_id)
        return []

    def list_events(self, job_id: str, *, after: int = 0, limit: int = 200) -> EventPage:
        """Return a job's events after a cursor, oldest first, or raise NotFoundError."""
        page = self._store.events(job_id, after=after, limit=_within(limit, MAX_PAGE))
        if not page.items:
            self._store.job(job_id)
        return page

    def list_metrics(
        self,
        job_id: str,
        *,
        after: int = 0,
        names: Sequence[str] = (),
        limit: int = 1000,
        run_id: str | None = None,
    ) -> MetricPage:
        """Return metric points of a job's newest run (or of `run_id`) after a cursor, or raise NotFoundError."""
        run = self._run_of(job_id, run_id)
        return self._store.metrics(run, after=after, names=names, limit=_within(limit, MAX_POINTS))

    def metric_names(self, job_id: str, *, run_id: str | None = None) -> MetricNames:
        """Return the names of the metrics of a job's newest run (or of `run_id`), or raise NotFoundError."""
        run = self._run_of(job_id, run_id)
        return MetricNames(run_id=run, items=self._store.series.names(run))

    def metric_series(
        self,
        job_id: str,
        names: Sequence[str],
        *,
        max_points: int = 500,
        from_step: int | None = None,
        to_step: int | None = None,
        width: int = 1,
        run_id: str | None = None,
    ) -> SeriesPage:
        """Return metrics of a job's newest run (or of `run_id`) in at most `max_points` buckets each.

        Raises:
            NotFoundError: no such job or run.
        """
        run = self._run_of(job_id, run_id)
        found = self._store.series.series(
            run,
            names,
            max_points=_within(max_points, MAX_BUCKETS),
            from_step=from_step,
            to_step=to_step,
            width=width,
        )
        return SeriesPage.model_construct(run_id=run, items=found)

    def last_values(self, run_id: str, names: Sequence[str]) -> dict[str, float | None]:
        """Return the newest value of each metric of a run; a metric without points is left out."""
        return self._store.last_values(run_id, names)

    def read_log(
        self,
        job_id: str,
        *,
        offset: int = 0,
        limit: int = 65536,
        tail: int | None = None,
        run_id: str | None = None,
        wanted: LogFilter = EVERYBODY,
    ) -> LogPart:
        """Return a part of the log of a job's newest run (or of `run_id`) from a byte offset, or its last lines."""
        run = self._store.run(self._run_of(job_id, run_id))
        log = self.log_of(run.id)
        if tail is not None:
            return log.tail(tail, final=run.is_final, wanted=wanted)
        return log.read_log(offset=offset, limit=limit, final=run.is_final, wanted=wanted)

    def check_place(self, job_id: str, wanted: LogFilter, *, run_id: str | None = None) -> None:
        """Raise NotFoundError, which says what there is, where a run has no such slice, host or restart."""
        if wanted == EVERYBODY:
            return  # and a log is read though another version wrote its job's spec
        run = self._store.run(self._run_of(job_id, run_id))
        spec = run.spec if run.spec is not None else self._store.first_spec(job_id)
        slices, hosts = machine_hosts(spec["accelerator"])
        for name, asked, count in (
            ("slice", wanted.slice, slices), ("host", wanted.host, hosts), ("restart", wanted.restart, run.restarts + 1)
        ):  # fmt: skip
            if asked is not None and asked >= count:
                of_slice = " in a slice" if name == "host" else ""
                there = f"the only {name}{of_slice} is 0" if count == 1 else f"give one of 0 to {count - 1}"
                raise NotFoundError(f"attempt {run.attempt} of job {job_id} has no {name} {asked}", remedy=there)

    def heard_hosts(self, run_id: str) -> list[HostHeard]:
        """Return when each host of a run in a cluster was last heard of; hosts that said nothing are left out."""
        return self._store.heard_hosts(run_id)

    def log_of(self, run_id: str) -> RunDir | StoredLog:
        """Return the log of a run: its file here, or what was collected from its pods."""
        if self._store.run(run_id).backend == "kubernetes":
            return self.logs.log(run_id)
        return self.run_dir(run_id)

    def explain_job(self, job_id: str) -> Explanation:
        """Say why a job is where it is, and what to do about it, or raise NotFoundError."""
        job = self._store.job(job_id)
        events = self._store.last_events(job_id, job.run_id, limit=EXPLAINED_EVENTS)
        log = self.read_log(job_id, tail=EXPLAINED_LINES).text.splitlines()
        diagnosis = self._store.run(job.run_id).diagnosis
        saved = self._store.saved_step(job_id)
        return explain(job, saved=saved, events=events, log=log, diagnosis=diagnosis, now=time.time())

    def run_dir(self, run_id: str) -> RunDir:
        """Return the directory of a run that the store knows."""
        return RunDir(self.settings.runs_dir, run_id)

    def change_count(self, job_id: str) -> int:
        """Return a number that changes whenever this process writes something about the job. Asks no database."""
        return self._store.changes.count(job_id)

    def _run_of(self, job_id: str, run_id: str | None) -> str:
        job: Job = self._store.job(job_id)
        if run_id is None or run_id == job.run_id:
            return job.run_id
        if self._store.run(run_id).job_id != job_id:
            raise NotFoundError(f"job {job_id} has no run {run_id!r}", remedy=f"list them: GET /v1/jobs/{job_id}/runs")
        return run_id

    # ---- workers ----

    def report(self, run_id: str, batch: ReportBatch) -> ReportAck:
        """Take in a worker's records, each once. Who sent them was checked before: see `check_token`."""
        return ReportAck(acked=self._store.ingest(run_id, batch.records).acked)

    def check_token(self, run_id: str, token: str) -> None:
        """Raise AuthError unless there is such a run and `token` is its token; the answer does not say which is wrong.

        Takes the same time whatever is wrong.
        """
        given = hash_token(token)
        stored = self._store.token_hashes(run_id) or (hash_token(""),)
        if not sum(hmac.compare_digest(each, given) for each in stored) or not token:  # a sum compares with all
            raise AuthError(
                "the run token is missing or wrong",
                remedy="send `Authorization: Bearer TOKEN` with the TWINSTEP_RUN_TOKEN the worker was started with",
            )

    def count_runs(self) -> dict[RunState, int]:
        """Return how many runs are in each state."""
        return self._store.count_runs()

    def live_runs(self) -> list[Run]:
        """Return every run that has not ended."""
        return self._store.live_runs()

    def readiness(self) -> Readiness:
        """Say whether the database answers and the reconciler passes."""
        self._store.jobs(limit=1)
        age, cluster = self._age(), self._cluster_health()
        if age is None:
            detail = "the reconciler has not passed yet"
        elif age > READY_AGE_S:
            detail = f"the reconciler has not passed for {age:.0f} s; look into the control plane's log"
        else:
            detail = "runs are looked after"
            if cluster is not None and (cluster.watch_age_seconds or READY_AGE_S) >= READY_AGE_S:
                detail = "the cluster is not heard of: " + ("; ".join(cluster.troubles) or "nothing came yet")
            return Readiness(ready=True, reconciler_age_seconds=age, cluster=cluster, detail=detail)
        return Readiness(ready=False, reconciler_age_seconds=age, cluster=cluster, detail=detail)


def _within(limit: int, most: int) -> int:
    return max(1, min(limit, most))
