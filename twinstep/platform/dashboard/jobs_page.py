"""The page `/`: jobs, narrowed and ordered as its address says, kept current without flicker.

Each refresh reads one page of rows and sends only the cells that differ. Reading is the reader's, off the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from nicegui import ui

from twinstep.platform.dashboard import theme, words
from twinstep.platform.dashboard.filters import ACCELERATORS, ATTEMPTS, BACKENDS, SIZES, SORTS, ListChoice, to_query
from twinstep.platform.dashboard.reader import Reader
from twinstep.platform.dashboard.views import JobLine, JobLines
from twinstep.platform.store.search import SCANNED, JobFilter, JobSort
from twinstep.spec.states import RunState
from twinstep.spec.words import cut, duration, number

REFRESH_SECONDS = 1.0
COMPARED = (2, 6)
"""Fewest and most jobs that are drawn over each other."""
MAX_CHOSEN = 200

_HEADS = (
    ("Job", ""),
    ("State", ""),
    ("Progress", ""),
    ("Runs on", "tw-wide-only"),
    ("examples/s", "tw-right"),
    ("Loss", "tw-right"),
    ("AUC", "tw-right"),
    ("Submitted", "tw-right"),
    ("Duration", "tw-right tw-wide-only"),
)


class Row:
    """One job's row."""

    def __init__(self, row: JobLine, *, chosen: bool, choose: Callable[[bool], None]) -> None:
        self.state = row.state
        self.root = theme.div(f"tw-grid-row tw-is-{row.state}").props(f'data-job="{row.id}"')
        with self.root:
            self.check = theme.check(f"Select {row.name}", choose)
            self.check.props["checked"] = chosen
            with theme.div("tw-cell"):
                ui.link(row.name, f"/jobs/{row.id}").classes("tw-row-link")
                self.about = theme.text(row.id, "tw-mono tw-dim tw-cell")
            with theme.div("tw-cell"):
                self.chip = theme.Chip(row.state)
            with theme.div("tw-progress"):
                self.bar = theme.Bar()
                self.progress = theme.text("", "tw-dim tw-small tw-num tw-cell")
            with theme.div("tw-cell tw-wide-only"):
                theme.text(row.machine, "tw-cell")
                theme.text(f"{row.model} · {row.dataset} · {row.backend}", "tw-dim tw-small tw-cell")
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
        self.about.set_text(row.id + (f" · run {row.attempt}" if row.attempt > 1 else ""))
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


class FilterBar:
    """Search, drop-down lists and a button per state with the number of jobs in it."""

    def __init__(self, wanted: ListChoice, on_change: Callable[[ListChoice], Awaitable[None]]) -> None:
        self.wanted, self.on_change = wanted, on_change
        self.states: dict[str, tuple[ui.element, ui.label]] = {}
        with theme.div("tw-filters"):
            theme.search("Search name, id or spec: lr=0.01", wanted.only.text, lambda text: self._only(text=text))
            self._choice("Accelerator", ACCELERATORS, wanted.only.accelerators, "accelerators")
            self._choice("Backend", BACKENDS, wanted.only.backends, "backends")
            attempts = {"1": "any"} | {str(least): f"{least} or more" for least in ATTEMPTS}
            theme.select(
                "Runs", attempts, str(wanted.only.min_attempt), lambda value: self._only(min_attempt=int(value))
            )
            orders = {sort.value: shown for sort, shown in SORTS.items()}
            theme.select(
                "Order", orders, wanted.sort.value, lambda value: self._set(replace(self.wanted, sort=JobSort(value)))
            )
            sizes = {str(size): str(size) for size in SIZES}
            theme.select(
                "Rows", sizes, str(wanted.size), lambda value: self._set(replace(self.wanted, size=int(value)))
            )
        with theme.div("tw-states").props('role="group" aria-label="States"'):
            for state in RunState:
                self._state(state)

    def _choice(self, label: str, values: tuple[str, ...], now: tuple[str, ...], name: str) -> None:
        theme.select(
            label,
            {"": "any"} | {value: value for value in values},
            now[0] if len(now) == 1 else "",
            lambda value: self._only(**{name: (value,) if value else ()}),
        )

    def _state(self, state: RunState) -> None:
        with theme.tag("button", "", f"tw-state-btn tw-{state.value}").props('type="button"') as button:
            theme.text(state.value)
            count = theme.text("", "tw-num tw-state-count")
        button.props["aria-pressed"] = "true" if state in self.wanted.only.states else "false"
        button.on("click", lambda: self._toggle(state))
        self.states[state.value] = button, count

    def _toggle(self, state: RunState) -> Awaitable[None]:
        now = set(self.wanted.only.states) ^ {state}
        self.states[state.value][0].props["aria-pressed"] = "true" if state in now else "false"
        return self._only(states=tuple(each for each in RunState if each in now))

    def _only(self, **changes: object) -> Awaitable[None]:
        return self._set(replace(self.wanted, only=replace(self.wanted.only, **changes)))  # type: ignore[arg-type]

    def _set(self, wanted: ListChoice) -> Awaitable[None]:
        self.wanted = wanted
        return self.on_change(wanted)

    def count(self, counts: dict[str, int]) -> None:
        """Show how many jobs are in each state."""
        for state, (_, label) in self.states.items():
            label.set_text(f"{counts.get(state, 0):,}")


class Chosen:
    """The jobs that are ticked, over all pages, and what may be done with them all."""

    def __init__(self, reader: Reader, *, after: Callable[[], Awaitable[None]]) -> None:
        self.reader, self.after, self.jobs = reader, after, dict[str, JobLine]()
        self.boxes: Callable[[], dict[str, Row]] = dict
        with theme.div("tw-chosen tw-hide").props('role="region" aria-label="Selected jobs"') as self.root:
            self.count = theme.text("", "tw-num tw-chosen-count")
            theme.button("Clear", "tw-btn-small tw-btn-plain").on("click", self.clear)
            self.compare = theme.button("Compare", "tw-btn-small tw-btn-main").on("click", self._compare)
            self.cancel = theme.button("Cancel…", "tw-btn-small tw-btn-bad").on("click", self._ask)
        with ui.dialog() as self.dialog, theme.div("tw-dialog"):
            self.title = theme.text("", "tw-empty-title")
            self.names = theme.text("", "tw-dim tw-small tw-wrap")
            theme.text(
                "Their workers are asked to stop, and killed after their grace time. Reports are kept.", "tw-dim"
            )
            with theme.div("tw-dialog-row"):
                theme.button("Keep running").on("click", self.dialog.close)
                theme.button("Cancel them", "tw-btn-fill").on("click", self._cancel).mark("confirm")

    def choose(self, job: JobLine, yes: bool) -> None:
        """Take a job in or leave it out."""
        if yes and len(self.jobs) < MAX_CHOSEN:
            self.jobs[job.id] = job
        else:
            self.jobs.pop(job.id, None)
        self.show()

    def show(self) -> None:
        """Say how many there are."""
        least, most = COMPARED
        theme.show(self.root, bool(self.jobs))
        self.count.set_text(f"{len(self.jobs)} selected")
        theme.enable(self.compare, least <= len(self.jobs) <= most)
        self.compare.set_text("Compare" if len(self.jobs) <= most else f"Compare (at most {most})")
        self.compare.props["title"] = f"Draw {least} to {most} jobs over each other"
        theme.enable(self.cancel, any(not job.final for job in self.jobs.values()))

    def clear(self) -> None:
        """Forget them all."""
        self.jobs.clear()
        for row in self.boxes().values():
            row.check.props["checked"] = False
        self.show()

    def _compare(self) -> None:
        ui.navigate.to("/compare?jobs=" + ",".join(self.jobs))

    def _ask(self) -> None:
        live = [job for job in self.jobs.values() if not job.final]
        ended = len(self.jobs) - len(live)
        self.title.set_text(f"Cancel {len(live)} job{'s' if len(live) != 1 else ''}?")
        named = ", ".join(job.name for job in live)
        rest = f"; {ended} that {'has' if ended == 1 else 'have'} ended stay as they are" if ended else ""
        self.names.set_text(cut(named, 400) + rest)
        self.dialog.open()

    async def _cancel(self) -> None:
        self.dialog.close()
        ids = [job.id for job in self.jobs.values() if not job.final]
        failed = await asyncio.to_thread(self.reader.cancel_all, ids)
        for problem in failed[:3]:
            ui.notify(problem, type="negative", position="bottom")
        self.clear()
        await self.after()


class JobsScreen:
    """The list on one browser's screen, with its filter, its pager and what it says where it is empty."""

    def __init__(self, reader: Reader, wanted: ListChoice, *, url: str) -> None:
        self.reader, self.wanted, self.rows = reader, wanted, dict[str, Row]()
        self.cursors: list[str | None] = [None]
        """Where each page up to the one shown begins."""
        self.next_cursor: str | None = None
        with theme.frame(here="Jobs", user=reader.user):
            with theme.div("tw-head"):
                theme.tag("h1", "Jobs", "tw-h1")
            self.bar = FilterBar(wanted, self._narrow)
            self.stale = theme.text("", "tw-reason tw-hide")
            self.list = ui.element("section").classes("tw-card tw-list tw-hide")
            with self.list:
                with theme.div("tw-grid-row tw-grid-head"):
                    self.every = theme.check("Select every job of this page", self._choose_page)
                    for name, classes in _HEADS:
                        theme.text(name, f"tw-cell {classes}")
                self.body = theme.div()
                with theme.div("tw-pager") as self.pager:
                    self.newer = theme.button("Back", "tw-btn-small").on("click", self._turn_newer)
                    self.where = theme.text("", "tw-num")
                    self.older = theme.button("Next", "tw-btn-small").on("click", self._turn_older)
            self._nothing(url)
            self.chosen = Chosen(reader, after=self.refresh)
            self.chosen.boxes = lambda: self.rows

    def _nothing(self, url: str) -> None:
        with ui.element("section").classes("tw-card tw-empty tw-hide") as self.empty:
            theme.text("No jobs yet", "tw-empty-title")
            theme.text("Submit a job spec from a terminal, and it appears here at once:", "tw-dim")
            theme.text(f"twinstep submit --url {url} --follow SPEC.yaml", "tw-code")
            theme.text("`twinstep schema` prints what a spec may say; examples/ has whole ones.", "tw-dim tw-small")
        with ui.element("section").classes("tw-card tw-empty tw-hide") as self.none_fits:
            self.none_title = theme.text("", "tw-empty-title")
            theme.text("Take a word or a state out of the filter, or begin anew.", "tw-dim")
            with theme.div("tw-empty-row"):
                ui.link("Show every job", "/").classes("tw-btn")
                self.further = theme.button("Look further").on("click", self._turn_older)

    async def _turn_newer(self) -> None:
        if len(self.cursors) > 1:
            self.cursors.pop()
            await self.refresh()

    async def _turn_older(self) -> None:
        if self.next_cursor is not None:
            self.cursors.append(self.next_cursor)
            await self.refresh()

    async def _narrow(self, wanted: ListChoice) -> None:
        self.wanted, self.cursors, self.next_cursor = wanted, [None], None
        query = to_query(wanted)
        ui.navigate.history.replace(f"/?{query}" if query else "/")
        await self.refresh()

    def _choose_page(self, yes: bool) -> None:
        for job in self.shown:
            self.rows[job.id].check.props["checked"] = yes
            self.chosen.choose(job, yes)

    async def refresh(self) -> None:
        """Read one page of jobs and show what changed."""
        wanted, cursor = self.wanted, self.cursors[-1]
        try:
            page, counts = await asyncio.to_thread(self._read, wanted, cursor)
        except Exception as error:
            self.stale.set_text(f"Not refreshed: {error}")
            theme.show(self.stale, True)
            return
        # The browser has gone, or another page was asked for while this one was read.
        if self.body.is_deleted or (wanted, cursor) != (self.wanted, self.cursors[-1]):
            return
        theme.show(self.stale, False)
        self.bar.count(counts)
        self._show(page)

    def _read(self, wanted: ListChoice, cursor: str | None) -> tuple[JobLines, dict[str, int]]:
        page = self.reader.jobs(wanted.only, sort=wanted.sort, limit=wanted.size, cursor=cursor)
        return page, self.reader.counts()

    def _show(self, page: JobLines) -> None:
        now, self.shown = time.time(), page.rows
        wanted = {row.id for row in page.rows}
        for gone in [job_id for job_id in self.rows if job_id not in wanted]:
            self.rows.pop(gone).root.delete()
        for index, row in enumerate(page.rows):
            if row.id not in self.rows:
                with self.body:
                    self.rows[row.id] = self._row(row)
                self.rows[row.id].root.move(self.body, target_index=index)
            self.rows[row.id].update(row, now=now)
            if row.id in self.chosen.jobs:
                self.chosen.jobs[row.id] = row
        self.every.props["checked"] = bool(page.rows) and wanted <= self.chosen.jobs.keys()
        if self.chosen.jobs:
            self.chosen.show()
        self._show_frame(page)

    def _row(self, job: JobLine) -> Row:
        return Row(job, chosen=job.id in self.chosen.jobs, choose=lambda yes: self.chosen.choose(job, yes))

    def _show_frame(self, page: JobLines) -> None:
        first, narrowed = len(self.cursors) == 1, self.wanted.only != JobFilter()
        self.next_cursor = page.next_cursor
        theme.show(self.list, bool(page.rows) or (not first and not narrowed))
        theme.show(self.empty, first and not page.rows and not narrowed)
        theme.show(self.none_fits, narrowed and not page.rows)
        looked = f" among {SCANNED * len(self.cursors):,} jobs" if page.next_cursor is not None else ""
        self.none_title.set_text(f"No job fits{looked}")
        theme.show(self.further, page.next_cursor is not None)
        theme.show(self.pager, not first or page.next_cursor is not None)
        self.where.set_text(f"Page {len(self.cursors):,}")
        theme.enable(self.newer, not first)
        theme.enable(self.older, page.next_cursor is not None)


async def build(reader: Reader, wanted: ListChoice, *, url: str) -> None:
    """Build the page for one browser, filled at once, and keep it current."""
    page = JobsScreen(reader, wanted, url=url)
    await page.refresh()
    ui.timer(REFRESH_SECONDS, page.refresh, immediate=False)
