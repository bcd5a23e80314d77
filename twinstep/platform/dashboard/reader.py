"""Reads the control plane for the pages: asks the service, shapes its records into what pages show. Blocks.

Safe to call from any thread.

One Reader serves every browser. It keeps each looked-at run's chart lines and reads only the points that are new, so
a refresh costs the same however long a run is and however many look at it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from twinstep.platform.dashboard.series import Series
from twinstep.platform.dashboard.views import EventLine, JobLine, JobLines, JobWithRuns, Lines, LogPiece, RunLine
from twinstep.platform.scheduler.service import Service
from twinstep.platform.store.records import Job, JobDetail
from twinstep.spec.job import JobSpec
from twinstep.spec.parse import dump_spec

KEPT_RUNS = 200  # runs whose lines stay in memory: about 100 kB each at most
KEPT_ABOUT = 5000
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
        self._about: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def jobs(self, *, limit: int, cursor: str | None) -> JobLines:
        """Return one page of jobs, newest first."""
        page = self._service.list_jobs(limit=limit, cursor=cursor)
        rows = tuple(self._row(job) for job in page.items)
        return JobLines(rows=rows, next_cursor=page.next_cursor)

    def job(self, job_id: str) -> JobWithRuns:
        """Return a job with its runs, or raise NotFoundError."""
        job = self._service.get_job(job_id)
        runs = self._service.list_runs(job_id)
        return JobWithRuns(
            row=self._row(job),
            run_id=job.run_id,
            spec_yaml=dump_spec(JobSpec.model_validate(job.spec)),
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

    def _row(self, job: Job) -> JobLine:
        progress, summary = job.progress, job.summary
        model, dataset = self._model_and_dataset(job)
        points = self._newest(job) if summary is None else {}
        return JobLine(
            id=job.id,
            name=job.name,
            state=job.state.value,
            reason=job.reason,
            model=model,
            dataset=dataset,
            backend=job.backend,
            phase=progress.phase if progress else "",
            step=progress.step if progress else 0,
            total_steps=progress.total_steps if progress else 0,
            examples_per_s=summary.examples_per_s if summary else progress.examples_per_s if progress else None,
            eta_s=progress.eta_s if progress else None,
            loss=summary.final_loss if summary else points.get("loss"),
            auc=summary.auc if summary else points.get("auc"),
            created=job.created_at,
            started=job.started_at,
            ended=job.finished_at,
            cancel_requested=job.cancel_requested_at is not None,
        )

    def _newest(self, job: Job) -> dict[str, float | None]:
        """Return the newest value of each line of a run that has no summary."""
        if job.progress is None:
            return {}
        kept = self._kept(job.run_id)
        with kept.lock:
            self._catch_up(job.id, job.run_id, kept)
            return {line: series.last for line, series in kept.series.items()}

    def _model_and_dataset(self, job: Job) -> tuple[str, str]:
        """Return what the list says of a job's spec, which never changes and so is asked for once."""
        with self._lock:
            known = self._about.get(job.id)
        if known is None:
            spec = (job if isinstance(job, JobDetail) else self._service.get_job(job.id)).spec
            known = str(spec["model"]["kind"]), str(spec["data"]["dataset"])
            with self._lock:
                self._about[job.id] = known
                if len(self._about) > KEPT_ABOUT:
                    self._about.popitem(last=False)
        return known

    def _kept(self, run_id: str) -> RunLines:
        with self._lock:
            kept = self._lines.setdefault(run_id, RunLines())
            self._lines.move_to_end(run_id)
            if len(self._lines) > KEPT_RUNS:
                self._lines.popitem(last=False)
            return kept
