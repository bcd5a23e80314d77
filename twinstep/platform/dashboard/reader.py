"""Reads the control plane for the pages: asks the service, shapes its records into what pages show. Blocks.

Safe to call from any thread.

A Reader is one browser's: it answers what whoever looks may see, and is asked anew each time, for a page outlives the
request it came with, and perhaps the token. What costs something is shared between all browsers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from twinstep.platform.dashboard.hosts import grid
from twinstep.platform.dashboard.queues import QueueView, queue_view
from twinstep.platform.dashboard.shares import goodput
from twinstep.platform.dashboard.views import EventLine, JobLine, JobLines, JobWithRuns, LogPiece, RunLine
from twinstep.platform.scheduler.accounts import LOCAL, Principal
from twinstep.platform.scheduler.attempts import Resize
from twinstep.platform.scheduler.cluster.causes import held_back
from twinstep.platform.scheduler.explain import Explanation
from twinstep.platform.scheduler.runnable import as_run
from twinstep.platform.scheduler.service import Service
from twinstep.platform.store.entry import Entry, under_way
from twinstep.platform.store.logs import EVERYBODY, MAX_LOG_READ
from twinstep.platform.store.records import HostHeard, Job, LogFilter, MetricSeries, Progress, Run
from twinstep.platform.store.search import JobFilter, JobSort
from twinstep.preflight.check import SECONDS_OF_A_SUBMIT, preflight
from twinstep.preflight.words import as_text
from twinstep.spec.errors import AuthError, ConflictError, NotFoundError, TwinstepError
from twinstep.spec.job import JobSpec
from twinstep.spec.roles import Permission
from twinstep.spec.states import RunState
from twinstep.spec.text import dump_yaml

COUNT_EVERY_S = 2.0
COUNT_SHARE = 50  # of the time, a fiftieth at most is spent on counting, however many jobs there are
STILL_EVERY_S = 2.0  # a token that is revoked closes pages so soon
HOSTS_EVERY_S = 3.0
EVENTS_PER_REFRESH = 5
QUEUE_MOST = 1000
LINE_POINTS = 500  # of one line of a chart
LOG_TAIL_BYTES = 64 * 1024
DOWNLOAD_BYTES = 8 * 1024 * 1024
_NOTHING = Progress(time=0.0, phase="", step=0, total_steps=0)


class Counts:
    """How many jobs are in each state, counted once for all who look at the same projects."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._known: dict[frozenset[str] | None, tuple[float, dict[str, int]]] = {}

    def get(self, projects: frozenset[str] | None) -> dict[str, int]:
        """Return the counts as they were a moment ago."""
        with self._lock:
            now = time.monotonic()
            until, counts = self._known.get(projects, (0.0, {}))
            if now >= until:
                if len(self._known) > 100:
                    self._known.clear()
                counts = {state.value: count for state, count in self._service.count_jobs(projects).items()}
                until = now + max(COUNT_EVERY_S, COUNT_SHARE * (time.monotonic() - now))
                self._known[projects] = until, counts
            return counts


class Reader:
    """Everything the pages read, and what they do to jobs."""

    def __init__(self, service: Service, *, principal: Principal = LOCAL, counts: Counts | None = None) -> None:
        self._service = service
        self._counts = counts or Counts(service)
        self._principal, self._looked_at = principal, time.monotonic()
        self._hosts: tuple[str, float, list[HostHeard]] | None = None
        self.user = "" if principal.is_local else principal.user
        """Who looks; empty where no login is asked for."""

    # ---- who may ----

    def _who(self) -> Principal:
        """Return who looks and what they may now, or raise AuthError where they are logged out."""
        now = time.monotonic()
        if now - self._looked_at > STILL_EVERY_S:
            still = self._service.accounts.still(self._principal)
            if still is None:
                raise AuthError("you are not logged in any more", remedy="log in again: /login")
            self._principal, self._looked_at = still, now
        return self._principal

    def _check(self, job_id: str, permission: Permission = Permission.READ) -> None:
        self._service.accounts.check_job(self._who(), permission, job_id)

    def may_steer(self, job_id: str) -> bool:
        """Say whether whoever looks may cancel this job."""
        try:
            self._check(job_id, Permission.SUBMIT)
        except TwinstepError:
            return False
        return True

    @contextmanager
    def _doing(self, action: str, job_id: str) -> Iterator[Principal]:
        """Let what is within, a change of a job, be checked, done and written in the audit log as whoever looks."""
        who = self._who()
        entry = Entry(actor=who.user, action=action, target=job_id, token_id=who.token_id)
        audit = self._service.accounts.audit
        with under_way(entry):
            try:
                self._check(job_id, Permission.SUBMIT)
                yield who
            except TwinstepError as error:
                audit.add(entry, outcome="refused", reason=str(error))
                raise
            if not entry.written:
                audit.add(entry, outcome="done")

    # ---- jobs ----

    def jobs(self, wanted: JobFilter, *, sort: JobSort, limit: int, cursor: str | None) -> JobLines:
        """Return one page of the jobs that fit."""
        wanted = replace(wanted, projects=self._who().projects())
        page = self._service.list_jobs(wanted, sort=sort, limit=limit, cursor=cursor)
        rows = tuple(self._row(job) for job in page.items)
        return JobLines(rows=rows, next_cursor=page.next_cursor)

    def id_of(self, named: str) -> str:
        """Return the id of the job that an id or a name means; see `Service.id_of`."""
        return self._service.id_of(named, self._who().projects())

    def queue(self) -> QueueView:
        """Return what waits, what runs, and on how many chips; of very many the first thousand each."""
        projects = self._who().projects()

        def every(states: tuple[RunState, ...]) -> list[Job]:
            found: list[Job] = []
            cursor = None
            while len(found) < QUEUE_MOST:
                wanted = JobFilter(states=states, projects=projects)
                page = self._service.list_jobs(wanted, sort=JobSort.OLDEST, limit=200, cursor=cursor)
                found += page.items
                cursor = page.next_cursor
                if cursor is None:
                    break
            return found

        waiting = every((RunState.PENDING, RunState.QUEUED))
        active = every((RunState.STARTING, RunState.RUNNING, RunState.RESTARTING))
        return queue_view(waiting, active, slots=self._service.settings.max_parallel_runs)

    def counts(self) -> dict[str, int]:
        """Return how many jobs are in each state, as it was a moment ago."""
        return self._counts.get(self._who().projects())

    def job(self, job_id: str) -> JobWithRuns:
        """Return a job with its runs, or raise NotFoundError."""
        self._check(job_id)
        job = self._service.get_job(job_id)
        runs = self._service.list_runs(job_id)
        return JobWithRuns(
            row=self._row(job),
            run_id=job.run_id,
            spec=job.spec,
            spec_yaml=dump_yaml(job.spec),
            runs=tuple(
                RunLine(
                    id=run.id,
                    number=run.attempt,
                    state=run.state.value,
                    reason=run.reason,
                    created=run.created_at,
                    started=run.started_at,
                    ended=run.finished_at,
                    restarts=run.restarts,
                )
                for run in runs
            ),
            hosts=grid(runs[-1], job.spec["accelerator"], self._heard(runs[-1]), now=time.time()),
            in_cluster=runs[-1].backend == "kubernetes",
            suspended=job.suspend_requested_at is not None or (bool(runs) and held_back(runs[-1].diagnosis)),
            heard=job.heartbeat_at,
            may_steer=self.may_steer(job_id),
            summary=job.summary.model_dump(mode="json") if job.summary is not None else None,
            goodput=goodput((job.summary or job.progress or _NOTHING).model_dump()),
        )

    def _heard(self, run: Run) -> list[HostHeard]:
        """Return what was heard of a cluster run's hosts, as it was a moment ago."""
        if run.backend != "kubernetes":
            return []
        now = time.monotonic()
        if self._hosts is None or self._hosts[0] != run.id or now >= self._hosts[1]:
            self._hosts = run.id, now + HOSTS_EVERY_S, self._service.heard_hosts(run.id)
        return self._hosts[2]

    def explain(self, job_id: str) -> Explanation:
        """Return why a job is where it is, and what to do about it."""
        self._check(job_id)
        return self._service.explain_job(job_id)

    def document(self, job_id: str, number: int, kind: str) -> str:
        """Return a run's spec, or the manifests it is in a cluster, as YAML, or what preflight says of it, as text.

        Where there are no manifests, in words why.

        Raises:
            NotFoundError: no such job, or no such run of it.
        """
        self._check(job_id)
        job = self._service.get_job(job_id)
        run = next((run for run in self._service.list_runs(job_id) if run.attempt == number), None)
        if run is None:
            raise NotFoundError(f"job {job_id} has no run {number}", remedy="choose another")
        body = run.spec if run.spec is not None else self._service.first_spec(job_id)
        if kind == "spec":
            return dump_yaml(body)
        if kind == "preflight":
            return _preflight(body)
        if body["accelerator"]["kind"] == "cpu":
            return f"# {job.name} runs on the control plane's own machine: it is no object of a cluster.\n"
        try:
            spec = JobSpec.model_validate(body)
            return as_run(spec, self._service.settings, job_id=job_id, run_id=run.id, attempt=run.attempt)
        except (TwinstepError, ValidationError) as error:  # a spec of another version
            return f"# It cannot be rendered: {str(error).splitlines()[0]}\n"

    # ---- metrics ----

    def metric_names(self, job_id: str) -> list[str]:
        """Return the names of the metrics of a job's newest run."""
        self._check(job_id)
        return self._service.metric_names(job_id).items

    def series(
        self,
        job_id: str,
        names: Sequence[str],
        *,
        run_id: str | None = None,
        from_step: int | None = None,
        to_step: int | None = None,
    ) -> dict[str, MetricSeries]:
        """Return metrics by name, in few points each; those that the run has no points of are left out."""
        self._check(job_id)
        page = self._service.metric_series(
            job_id, names, max_points=LINE_POINTS, run_id=run_id, from_step=from_step, to_step=to_step
        )
        return {series.name: series for series in page.items}

    # ---- what happened ----

    def events(self, job_id: str, *, after: int) -> tuple[list[EventLine], int]:
        """Return events after a cursor, oldest first, and the cursor to go on from."""
        self._check(job_id)
        found: list[EventLine] = []
        for _ in range(EVENTS_PER_REFRESH):
            page = self._service.list_events(job_id, after=after, limit=200)
            found += [
                EventLine(
                    time=event.time,
                    name=event.name,
                    reason=event.reason,
                    actor=event.actor,
                    run_id=event.run_id or "",
                    data=event.data,
                )
                for event in page.items
            ]
            after = page.next_after
            if len(page.items) < 200:
                break
        return found, after

    def log(self, job_id: str, run_id: str, *, at: int, wanted: LogFilter = EVERYBODY) -> LogPiece:
        """Return what a log has after byte `at` (-1: its end), no more than the page keeps anyway."""
        self._check(job_id)
        begin = max(at, 0)
        part = self._service.read_log(job_id, offset=begin, limit=LOG_TAIL_BYTES, run_id=run_id, wanted=wanted)
        text, skipped = part.text, max(0, part.size - begin - LOG_TAIL_BYTES)
        if skipped:
            part = self._service.read_log(
                job_id, offset=begin + skipped, limit=LOG_TAIL_BYTES, run_id=run_id, wanted=wanted
            )
            # This begins within a line, perhaps within a character: show it from the next line on.
            text = part.text.partition("\n")[2] or part.text
        return LogPiece(text=text, next=part.next_offset, skipped=skipped, at_end=part.next_offset >= part.size)

    def whole_log(self, job_id: str, run_id: str, *, wanted: LogFilter = EVERYBODY) -> bytes:
        """Return a run's log, of a very long one its last `DOWNLOAD_BYTES`."""
        self._check(job_id)
        size = self._service.read_log(job_id, limit=4, run_id=run_id, wanted=wanted).size
        begin = at = max(0, size - DOWNLOAD_BYTES)
        parts = [f"… {begin:,} bytes before this are left out …\n"] if begin else []
        while at < size:
            part = self._service.read_log(job_id, offset=at, limit=MAX_LOG_READ, run_id=run_id, wanted=wanted)
            if part.next_offset <= at:
                break
            parts.append(part.text)
            at = part.next_offset
        return "".join(parts).encode()

    # ---- what is done ----

    def cancel(self, job_id: str) -> None:
        """Ask for a job to stop; raises ConflictError where it has ended."""
        self.steer(job_id, "cancel")

    def steer(self, job_id: str, verb: str) -> None:
        """Cancel, retry, suspend or resume a job; raises what the service does where it makes no sense."""
        with self._doing(f"job.{verb}", job_id) as who:
            verbs = self._service.verbs
            do: dict[str, Callable[..., object]] = {
                "cancel": self._service.cancel_job, "retry": verbs.retry, "suspend": verbs.suspend,
                "resume": verbs.resume,
            }  # fmt: skip
            do[verb](job_id, actor=who.user)

    def resize(self, job_id: str, size: Resize) -> None:
        """Run a job at another size; raises SpecError where there is none such."""
        with self._doing("job.resize", job_id) as who:
            self._service.verbs.resize(job_id, size, actor=who.user)

    def cancel_all(self, job_ids: Sequence[str]) -> list[str]:
        """Ask for jobs to stop; return what was said of those that could not be asked."""
        problems: list[str] = []
        for job_id in job_ids:
            try:
                self.cancel(job_id)
            except ConflictError:
                continue  # it has ended meanwhile, which is what was wanted
            except TwinstepError as error:
                problems.append(str(error))
        return problems

    def _row(self, job: Job) -> JobLine:
        progress, summary = job.progress, job.summary
        newest = {} if summary or not progress else self._service.last_values(job.run_id, ("loss", "eval/auc"))
        return JobLine(
            id=job.id,
            name=job.name,
            state=job.state.value,
            reason=job.reason,
            machine=job.machine,
            model=job.factory or job.model,
            dataset=job.dataset,
            attempt=job.attempt,
            backend=job.backend,
            phase=progress.phase if progress else "",
            step=progress.step if progress else 0,
            total_steps=progress.total_steps if progress else 0,
            examples_per_s=summary.examples_per_s if summary else progress.examples_per_s if progress else None,
            eta_s=progress.eta_s if progress else None,
            loss=summary.final_loss if summary else newest.get("loss"),
            auc=summary.auc if summary else newest.get("eval/auc"),
            created=job.created_at,
            run_created=job.run_created_at,
            started=job.started_at,
            ended=job.finished_at,
            cancel_requested=job.cancel_requested_at is not None,
        )


def _preflight(body: dict[str, Any]) -> str:
    try:
        return as_text(preflight(JobSpec.model_validate(body), seconds=SECONDS_OF_A_SUBMIT))
    except ValidationError as error:  # a spec of another version
        return f"It cannot be looked at: {str(error).splitlines()[0]}"
