"""The page `/jobs/ID`: one job from its spec to its summary, live while it runs. `/jobs/NAME`: the newest of a name.

Each refresh reads what is new since the last: events, log and points go by cursors, so a long run costs no more than
a short one. Reading is the reader's, off the event loop.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from nicegui import ui

from twinstep.platform.dashboard import theme
from twinstep.platform.dashboard.actions import Actions
from twinstep.platform.dashboard.more_charts import MoreCharts
from twinstep.platform.dashboard.parts import (
    Charts,
    Events,
    Facts,
    LogTail,
    Table,
    compile_seconds,
    run_rows,
    summary_rows,
)
from twinstep.platform.dashboard.reader import Reader
from twinstep.platform.dashboard.run_parts import SHOWN_RUNS, Documents, Hosts, ShareCard, Timeline, Warned, Why
from twinstep.platform.dashboard.shares import Shares, profile
from twinstep.platform.dashboard.timeline import stretches
from twinstep.platform.dashboard.views import EventLine, JobLine, JobWithRuns, LogPiece
from twinstep.platform.scheduler.explain import SILENT_S, Explanation
from twinstep.platform.store.records import LogFilter, MetricSeries
from twinstep.spec.errors import NotFoundError, TwinstepError
from twinstep.spec.words import clock

REFRESH_SECONDS = 1.0
WAITS_S = 5.0  # a job that waits for no longer than this needs no explanation
EXPLAIN_EVERY_S = 5.0
MAX_PAST = 2000
TIMED = ("state_changed", "compiled", "recompiled")
ENDED = {"succeeded": "✓ ", "failed": "✗ ", "cancelled": "✗ "}
NAMES_EVERY = 5  # a metric that is reported for the first time is seen at every fifth look
FINAL_EVERY = 5  # a job that ended is looked at every fifth time: late reports, another run


class _Read(NamedTuple):
    """What one refresh read."""

    detail: JobWithRuns
    series: dict[str, MetricSeries]
    events: list[EventLine]
    event_at: int
    log: LogPiece | None
    wanted: LogFilter
    """Whose lines they are."""
    more: list[str]
    """The metrics that the page has no chart of its own for."""
    why: Explanation | None
    """Why it does not run well; None where it does."""


class JobScreen:
    """One job on one browser's screen."""

    def __init__(self, reader: Reader, detail: JobWithRuns) -> None:
        self.reader, self.job_id = reader, detail.row.id
        self.run_id, self.log_at, self.event_at, self.ticks = "", -1, 0, 0
        self.past: list[EventLine] = []
        """What the times of its runs follow from."""
        self.explained: tuple[tuple[str, str, int], Explanation] | None = None
        self.compile_s: dict[str, float] = {}
        """Seconds of compiling by run, summed from events until the summary says it."""
        self.row, self.wanted, self.title = detail.row, LogFilter(), ""
        # A click refreshes too; two reads from one cursor would show the same events twice.
        self.reading = asyncio.Lock()
        with theme.frame(user=reader.user):
            self._head(detail)
            self.stale = theme.text("", "tw-reason tw-hide")
            self.why, self.warned = Why(), Warned()
            self.facts = Facts()
            self.charts = Charts(self.refresh)
            self.more = MoreCharts(self._again, self.refresh)
            self.timeline = Timeline()
            with theme.div("tw-two"):
                with theme.div("tw-stack"):
                    self.goodput = ShareCard("Goodput", note="useful step time over wall time", mark="goodput")
                    self.profile = ShareCard("Profile", note="of the steps that were traced", mark="profile")
                    self.hosts = Hosts()
                    with theme.card("Summary", note="held-out scores beside the baselines'"):
                        self.no_summary = theme.text("Shown when the run has ended well.", "tw-dim tw-small tw-note")
                        self.summary = Table("tw-kv")
                self.events = Events()
                self.log = LogTail(detail.hosts, self._other_lines, self._download_log)
                self.documents = Documents(self._document, [run.number for run in detail.runs])
                with theme.card("Runs", note="newest first"):
                    self.runs = Table("tw-runs")

    async def _document(self, number: int, kind: str) -> str:
        try:
            return await asyncio.to_thread(self.reader.document, self.job_id, number, kind)
        except TwinstepError as error:
            return f"# {error}"

    def _head(self, detail: JobWithRuns) -> None:
        row = detail.row
        with theme.div("tw-job-head"):
            with theme.div("tw-min"):
                with theme.div("tw-job-title"):
                    theme.tag("h1", row.name, "tw-h1")
                    self.chip = theme.Chip(row.state)
                theme.text(row.id, "tw-mono tw-dim")
                self.about = theme.text(_about(row), "tw-dim tw-small")
            self.actions = Actions(self.reader, detail, after=self._acted)

    async def _other_lines(self, wanted: LogFilter) -> None:
        self.wanted, self.log_at, self.ticks = wanted, -1, max(self.ticks, 1)
        self.log.reset()
        await self.refresh(always=True)

    async def _again(self) -> None:
        await self.refresh(always=True)

    async def _download_log(self) -> None:
        run_id, wanted = self.run_id, self.wanted
        try:
            text = await asyncio.to_thread(self.reader.whole_log, self.job_id, run_id, wanted=wanted)
        except TwinstepError as error:
            ui.notify(str(error), type="negative", position="bottom")
            return
        ui.download.content(text, f"{self.row.name}-{run_id}.log", "text/plain; charset=utf-8")

    async def _acted(self) -> None:
        self.ticks = 1
        await self.refresh()

    async def refresh(self, *, always: bool = False) -> None:
        """Read what is new and show it; a store that does not answer is said, and asked again."""
        tick, self.ticks = self.ticks, self.ticks + 1
        if self.row.final and tick > 1 and tick % FINAL_EVERY and not always:
            return
        async with self.reading:
            try:
                # The log comes once the browser is there: it scrolls to its end when lines are added to it.
                read = await asyncio.to_thread(self._read, with_log=tick > 0)
            except Exception as error:
                self.stale.set_text(f"Not refreshed: {error}")
                theme.show(self.stale, True)
                return
            if not self.runs.root.is_deleted:  # the browser has not gone
                self._show(read)
                await self.documents.set_runs([run.number for run in read.detail.runs])

    def _read(self, *, with_log: bool) -> _Read:
        """Read the job and what follows the cursors. In a thread of its own: touches no element, moves no cursor."""
        detail = self.reader.job(self.job_id)
        series = self._series(detail.run_id)
        events, event_at = self.reader.events(self.job_id, after=self.event_at)
        wanted = self.wanted
        log_at = self.log_at if detail.run_id == self.run_id else -1
        log = self.reader.log(self.job_id, detail.run_id, at=log_at, wanted=wanted) if with_log else None
        more = self.more.names
        if self.ticks % NAMES_EVERY == 1 or detail.run_id != self.run_id:
            more = [name for name in self.reader.metric_names(self.job_id) if name not in Charts.NAMES]
        return _Read(detail, series, events, event_at, log, wanted, more, self._explained(detail))

    def _explained(self, detail: JobWithRuns) -> Explanation | None:
        """Return why a job does not run well; asked for now and then while nothing else changes."""
        row, now = detail.row, time.time()
        silent = detail.heard is not None and now - detail.heard > SILENT_S
        waits = row.state in ("pending", "queued", "starting", "restarting") and now - row.run_created > WAITS_S
        if not (row.state == "failed" or waits or (row.state == "running" and silent)):
            self.explained = None
            return None
        asked = (row.state, row.reason, int(now / EXPLAIN_EVERY_S) if not row.final else 0)
        if self.explained is None or self.explained[0] != asked:
            self.explained = asked, self.reader.explain(self.job_id)
        return self.explained[1]

    def _series(self, run_id: str) -> dict[str, MetricSeries]:
        """Read each chart's lines, those that are looked at closely in the stretch that is looked at."""
        windows = self.charts.windows() | self.more.windows()
        whole = [name for name in (*Charts.NAMES, *self.more.wanted()) if name not in windows]
        found = self.reader.series(self.job_id, whole, run_id=run_id)
        for name, (first, last) in windows.items():
            found |= self.reader.series(self.job_id, [name], run_id=run_id, from_step=first, to_step=last)
        return found

    def _set_title(self, row: JobLine) -> None:
        """Let a tab in the background tell how far the job is."""
        done = f"{100 * row.step // row.total_steps} % " if row.state == "running" and row.total_steps else ""
        title = f"{done or ENDED.get(row.state, '')}{row.name} · Twinstep"
        if title != self.title:
            self.title = title
            ui.page_title(title)

    def _show(self, read: _Read) -> None:
        detail, events = read.detail, read.events
        now, row = time.time(), detail.row
        if detail.run_id != self.run_id:
            self.run_id = detail.run_id
            self.log_at = -1
            self.log.reset()
            self.profile.set(Shares())
            self.warned.set(())
            # A run that follows a resize is of another size.
            self.about.set_text(_about(row))
            self.log.set_hosts(detail.hosts)
            self.wanted = self.log.wanted
        self.row, self.event_at = row, read.event_at
        self.chip.set(row.state)
        self.actions.update(detail)
        theme.show(self.stale, False)
        self.why.set(read.why, bad=row.state == "failed")
        summary = detail.summary or {}
        nes = read.series["eval/ne"].means if "eval/ne" in read.series else []
        for event in events:
            if seconds := compile_seconds(event):
                self.compile_s[event.run_id] = self.compile_s.get(event.run_id, 0.0) + seconds
            if event.name == "warned" and event.run_id == self.run_id:
                self.warned.set([str(each) for each in event.data.get("warnings", ())])
            if event.name == "profiled" and event.run_id == self.run_id:
                self.profile.set(profile(event.data))
        self.goodput.set(detail.goodput)
        compile_s = summary.get("compile_s", self.compile_s.get(self.run_id))
        self.facts.update(row, compile_s=compile_s, ne=summary.get("ne", nes[-1] if nes else None), now=now)
        self.charts.update(read.series)
        self.more.set_names(read.more)
        self.more.update(read.series)
        self._set_title(row)
        self.events.add(events, {run.id: run.number for run in detail.runs})
        self.hosts.set(detail.hosts)
        self.past += [event for event in events if event.name in TIMED][-MAX_PAST:]
        runs = detail.runs[-SHOWN_RUNS:]
        self.timeline.set([(f"Run {run.number}", stretches(run, self.past, now=now)) for run in reversed(runs)])
        if read.log is not None and read.wanted == self.wanted:
            self.log_at = read.log.next
            self.log.add(read.log.text, skipped=read.log.skipped, flush=row.final and read.log.at_end)
        theme.show(self.no_summary, detail.summary is None)
        if detail.summary is not None:
            self.summary.set(("", ""), summary_rows(detail.summary))
        self.runs.set(("", "State", "Run", "Duration", "Restarts", "Reason"), run_rows(detail.runs, now=now))


def _about(row: JobLine) -> str:
    return f"{row.machine} · {row.model} · {row.dataset} · {row.backend} · submitted {clock(row.created)}"


async def build(reader: Reader, job_id: str) -> None:
    """Build the page of a job, by its id or its name, and keep it current; one that says so where there is none.

    The status of the answer is then 404.
    """
    try:
        detail = await asyncio.to_thread(lambda: reader.job(reader.id_of(job_id)))
    except NotFoundError:
        build_missing(f"There is no job {job_id[:80]!r}.")
        return
    page = JobScreen(reader, detail)
    await page.refresh()
    await page.documents.show()
    ui.timer(REFRESH_SECONDS, page.refresh, immediate=False)


def build_missing(problem: str) -> None:
    """Build the page for an address that leads nowhere."""
    ui.context.client.status_code = 404
    ui.page_title("Not found · Twinstep")
    with theme.frame(), ui.element("section").classes("tw-card tw-empty"):
        theme.text("Not found", "tw-empty-title")
        theme.text(problem, "tw-dim tw-wrap")
        ui.link("All jobs", "/").classes("tw-btn")
