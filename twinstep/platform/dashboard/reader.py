"""Reads the control plane for the pages: asks the service, shapes its records into what pages show. Blocks.

Safe to call from any thread.

One Reader serves every browser. It keeps each looked-at run's chart lines and reads only the points that are new, so
a refresh costs the same however long a run is and however many look at it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

from twinstep.platform.dashboard.series import Series
from twinstep.platform.dashboard.views import EventLine, JobLine, JobLines, JobWithRuns, Lines, LogPiece, RunLine
from twinstep.platform.scheduler.service import Service
from twinstep.platform.store.records import Job
from twinstep.platform.store.search import JobFilter, JobSort
from twinstep.spec.errors import ConflictError, TwinstepError
from twinstep.spec.text import dump_yaml

KEPT_RUNS = 200  # runs whose lines stay in memory: about 100 kB each at most
COUNT_EVERY_S = 2.0
COUNT_SHARE = 50  # of the time, a fiftieth at most is spent on counting, however many jobs there are
POINTS_PER_READ = 5000
READS_PER_REFRESH = 4  # a run of millions of points fills its charts over a few refreshes, not in one long wait
EVENTS_PER_REFRESH = 5
# Metric, as workers name it → line of a chart. Held-out scores are those of the first task.
DRAWN = {"loss": "loss", "examples_per_s": "examples_per_s", "eval/auc": "auc", "eval/ne": "ne"}
LOG_TAIL_BYTES = 64 * 1024


class RunLines:
    """The chart lines of one run, and how far its points are read."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.cursor = 0
        self.version = 0
        self.series = {line: Series() for line in DRAWN.values()}


class Reader:
    """Everything the pages read and the one thing they do: cancel."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._lines: OrderedDict[str, RunLines] = OrderedDict()
        self._counting = threading.Lock()
        self._counts: dict[str, int] = {}
        self._count_next = 0.0

    def jobs(self, wanted: JobFilter, *, sort: JobSort, limit: int, cursor: str | None) -> JobLines:
        """Return one page of the jobs that fit."""
        page = self._service.list_jobs(wanted, sort=sort, limit=limit, cursor=cursor)
        rows = tuple(self._row(job) for job in page.items)
        return JobLines(rows=rows, next_cursor=page.next_cursor)

    def counts(self) -> dict[str, int]:
        """Return how many jobs are in each state, as it was a moment ago: counted once for all who look."""
        with self._counting:
            now = time.monotonic()
            if now >= self._count_next:
                self._counts = {state.value: count for state, count in self._service.count_jobs().items()}
                took = time.monotonic() - now
                self._count_next = now + max(COUNT_EVERY_S, COUNT_SHARE * took)
            return self._counts

    def job(self, job_id: str) -> JobWithRuns:
        """Return a job with its runs, or raise NotFoundError."""
        job = self._service.get_job(job_id)
        runs = self._service.list_runs(job_id)
        return JobWithRuns(
            row=self._row(job),
            run_id=job.run_id,
            spec_yaml=dump_yaml(job.spec),
            runs=tuple(
                RunLine(
                    id=run.id,
                    number=run.attempt,
                    state=run.state.value,
                    reason=run.reason,
                    started=run.started_at,
                    ended=run.finished_at,
                )
                for run in runs
            ),
            summary=job.summary.model_dump(mode="json") if job.summary is not None else None,
        )

    def next_step(self, job_id: str) -> str:
        """Return what to do about a job; empty where nothing is to be done, or no job is there."""
        return self._service.explain_job(job_id).next_step

    def lines(self, job_id: str, run_id: str) -> Lines:
        """Return the chart lines of a run, after reading what is new."""
        kept = self._kept(run_id)
        with kept.lock:
            self._catch_up(job_id, run_id, kept)
            return Lines(points={line: series.points() for line, series in kept.series.items()}, version=kept.version)

    def _catch_up(self, job_id: str, run_id: str, kept: RunLines) -> None:
        """Read the points after the cursor. The caller holds the lock: a second browser finds the work done."""
        for _ in range(READS_PER_REFRESH):
            page = self._service.list_metrics(
                job_id, after=kept.cursor, names=tuple(DRAWN), limit=POINTS_PER_READ, run_id=run_id
            )
            for point in page.items:
                kept.series[DRAWN[point.name]].add(point.step, point.value)
            kept.cursor = page.next_after
            kept.version += bool(page.items)
            if len(page.items) < POINTS_PER_READ:
                return

    def events(self, job_id: str, *, after: int) -> tuple[list[EventLine], int]:
        """Return events after a cursor, oldest first, and the cursor to go on from."""
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

    def log(self, job_id: str, run_id: str, *, at: int) -> LogPiece:
        """Return what a log has after byte `at` (-1: its end), no more than the page keeps anyway."""
        begin = max(at, 0)
        part = self._service.read_log(job_id, offset=begin, limit=LOG_TAIL_BYTES, run_id=run_id)
        text, skipped = part.text, max(0, part.size - begin - LOG_TAIL_BYTES)
        if skipped:
            part = self._service.read_log(job_id, offset=begin + skipped, limit=LOG_TAIL_BYTES, run_id=run_id)
            # This begins within a line, perhaps within a character: show it from the next line on.
            text = part.text.partition("\n")[2] or part.text
        return LogPiece(text=text, next=part.next_offset, skipped=skipped, at_end=part.next_offset >= part.size)

    def cancel(self, job_id: str) -> None:
        """Ask for a job to stop; raises ConflictError where it has ended."""
        self._service.cancel_job(job_id)

    def cancel_all(self, job_ids: Sequence[str]) -> list[str]:
        """Ask for jobs to stop; return what was said of those that could not be asked."""
        problems: list[str] = []
        for job_id in job_ids:
            try:
                self._service.cancel_job(job_id)
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
            model=job.model,
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
            started=job.started_at,
            ended=job.finished_at,
            cancel_requested=job.cancel_requested_at is not None,
        )

    def _kept(self, run_id: str) -> RunLines:
        with self._lock:
            kept = self._lines.setdefault(run_id, RunLines())
            self._lines.move_to_end(run_id)
            if len(self._lines) > KEPT_RUNS:
                self._lines.popitem(last=False)
            return kept
