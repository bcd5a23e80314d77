"""The page `/`: every job, newest first, kept current without flicker.

Each refresh reads one page of rows and sends only the cells that differ. Reading is the reader's, off the event loop.
"""

from __future__ import annotations

import asyncio
import time

from nicegui import ui

from twinstep.platform.dashboard import theme, words
from twinstep.platform.dashboard.reader import Reader
from twinstep.platform.dashboard.views import JobLine, JobLines
from twinstep.spec.words import duration, number

PAGE_SIZE = 25
REFRESH_SECONDS = 1.0

_HEADS = (
    ("Job", ""),
    ("State", ""),
    ("Progress", ""),
    ("Model", "tw-wide-only"),
    ("examples/s", "tw-right"),
    ("Loss", "tw-right"),
    ("AUC", "tw-right"),
    ("Submitted", "tw-right"),
    ("Duration", "tw-right tw-wide-only"),
)


class Row:
    """One job's row."""

    def __init__(self, row: JobLine) -> None:
        self.state = row.state
        self.root = theme.div(f"tw-grid-row tw-is-{row.state}").props(f'data-job="{row.id}"')
        with self.root:
            with theme.div("tw-cell"):
                ui.link(row.name, f"/jobs/{row.id}").classes("tw-row-link")
                theme.text(row.id, "tw-mono tw-dim tw-cell")
            with theme.div("tw-cell"):
                self.chip = theme.Chip(row.state)
            with theme.div("tw-progress"):
                self.bar = theme.Bar()
                self.progress = theme.text("", "tw-dim tw-small tw-num tw-cell")
            with theme.div("tw-cell tw-wide-only"):
                theme.text(row.model, "tw-cell")
                theme.text(f"{row.dataset} · {row.backend}", "tw-dim tw-small tw-cell")
            self.speed = self._figure("examples/s")
            self.loss = self._figure("loss")
            self.auc = self._figure("AUC")
            self.age = theme.text("", "tw-cell tw-right tw-dim tw-small")
            self.took = theme.text("", "tw-cell tw-right tw-num tw-wide-only")

    @staticmethod
    def _figure(name: str) -> ui.label:
        return theme.text("", "tw-cell tw-right tw-num").props(f'data-name="{name}"')

    def update(self, row: JobLine, *, now: float) -> None:
        """Show the row as it is now."""
        self.chip.set(row.state)
        if row.state != self.state:
            self.root.classes(remove=f"tw-is-{self.state}", add=f"tw-is-{row.state}")
            self.state = row.state
        self.bar.set(row.step, row.total_steps)
        self.progress.set_text(progress_words(row))
        self.speed.set_text(words.rate(row.examples_per_s))
        self.loss.set_text(number(row.loss))
        self.auc.set_text(number(row.auc))
        self.age.set_text(words.age(now - row.created))
        self.took.set_text(duration(row.seconds(now)))


def progress_words(row: JobLine) -> str:
    """Return where a job stands: `120 / 300`, with the phase where it is not plain training."""
    if row.total_steps == 0:
        return "" if row.final else "waiting" if row.state in ("pending", "queued") else row.phase or "starting"
    steps = f"{row.step:,} / {row.total_steps:,}"
    return f"{steps} · {row.phase}" if row.phase in ("compiling", "evaluating") and not row.final else steps


class JobsScreen:
    """The list on one browser's screen, with its pager and its empty state."""

    def __init__(self, reader: Reader, *, url: str) -> None:
        self.reader, self.rows = reader, dict[str, Row]()
        self.cursors: list[str | None] = [None]
        """Where each page up to the one shown begins."""
        self.next_cursor: str | None = None
        with theme.frame(home=True):
            with theme.div("tw-head"):
                theme.tag("h1", "Jobs", "tw-h1")
            self.stale = theme.text("", "tw-reason tw-hide")
            self.list = ui.element("section").classes("tw-card tw-list tw-hide")
            with self.list:
                with theme.div("tw-grid-row tw-grid-head"):
                    for name, classes in _HEADS:
                        theme.text(name, f"tw-cell {classes}")
                self.body = theme.div()
                with theme.div("tw-pager") as self.pager:
                    self.newer = theme.button("Newer", "tw-btn-small").on("click", self._turn_newer)
                    self.where = theme.text("", "tw-num")
                    self.older = theme.button("Older", "tw-btn-small").on("click", self._turn_older)
            self.empty = ui.element("section").classes("tw-card tw-empty tw-hide")
            with self.empty:
                theme.text("No jobs yet", "tw-empty-title")
                theme.text("Submit a job spec from a terminal, and it appears here at once:", "tw-dim")
                theme.text(f"twinstep submit --url {url} --follow SPEC.yaml", "tw-code")
                theme.text("`twinstep schema` prints what a spec may say; examples/ has whole ones.", "tw-dim tw-small")

    async def _turn_newer(self) -> None:
        if len(self.cursors) > 1:
            self.cursors.pop()
            await self.refresh()

    async def _turn_older(self) -> None:
        if self.next_cursor is not None:
            self.cursors.append(self.next_cursor)
            await self.refresh()

    async def refresh(self) -> None:
        """Read one page of jobs and show what changed."""
        cursor = self.cursors[-1]
        try:
            page = await asyncio.to_thread(self.reader.jobs, limit=PAGE_SIZE, cursor=cursor)
        except Exception as error:
            self.stale.set_text(f"Not refreshed: {error}")
            theme.show(self.stale, True)
            return
        # The browser has gone, or the page was turned while this one was read.
        if self.body.is_deleted or cursor != self.cursors[-1]:
            return
        theme.show(self.stale, False)
        self._show(page)

    def _show(self, page: JobLines) -> None:
        now = time.time()
        wanted = {row.id for row in page.rows}
        for gone in [job_id for job_id in self.rows if job_id not in wanted]:
            self.rows.pop(gone).root.delete()
        for index, row in enumerate(page.rows):
            if row.id not in self.rows:
                with self.body:
                    self.rows[row.id] = Row(row)
                self.rows[row.id].root.move(self.body, target_index=index)
            self.rows[row.id].update(row, now=now)
        first = len(self.cursors) == 1
        self.next_cursor = page.next_cursor
        theme.show(self.list, bool(page.rows) or not first)
        theme.show(self.empty, first and not page.rows)
        theme.show(self.pager, not first or page.next_cursor is not None)
        self.where.set_text(f"Page {len(self.cursors):,}")
        theme.enable(self.newer, not first)
        theme.enable(self.older, page.next_cursor is not None)


async def build(reader: Reader, *, url: str) -> None:
    """Build the page for one browser, filled at once, and keep it current."""
    page = JobsScreen(reader, url=url)
    await page.refresh()
    ui.timer(REFRESH_SECONDS, page.refresh, immediate=False)
