"""The page `/queue`: what waits, for what, in what order and since when; chips in use by queue and project."""

from __future__ import annotations

import asyncio
import time

from nicegui import ui

from twinstep.platform.dashboard import theme, words
from twinstep.platform.dashboard.parts import Table
from twinstep.platform.dashboard.queues import QueueView
from twinstep.platform.dashboard.reader import Reader
from twinstep.spec.words import cut, duration

REFRESH_SECONDS = 2.0
MAX_ROWS = 200
FIGURES = ("Waiting", "Active", "Chips in use", "Chips waited for", "Slots of this machine")
HEADS = ("#", "Job", "Queue", "Asks for", "Waits", "For what")


class QueueScreen:
    """The queues on one browser's screen."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self.shown = reader, None
        self.ages: list[tuple[ui.label, float]] = []
        self.drawn: object = None
        with theme.frame(here="Queue", user=reader.user):
            with theme.div("tw-head"):
                theme.tag("h1", "Queue", "tw-h1")
            self.stale = theme.text("", "tw-reason tw-hide")
            with ui.element("section").classes("tw-card"), theme.div("tw-facts tw-facts-only"):
                self.figures = {name: self._figure(name) for name in FIGURES}
            with theme.card("Queues", note="by project", classes="tw-section"):
                self.queues = Table("tw-queues")
                self.no_queues = theme.text("Nothing waits and nothing runs.", "tw-dim tw-small tw-note tw-hide")
            with theme.card("Waiting", note="the oldest first; a queue may let others go first", classes="tw-section"):
                self.waiting = theme.div("tw-table tw-waiting").mark("waiting")
                self.nothing = theme.text(
                    "No job waits. One that does is shown here with what it waits for.",
                    "tw-dim tw-small tw-note tw-hide",
                )

    @staticmethod
    def _figure(name: str) -> ui.label:
        with theme.div():
            theme.text(name, "tw-fact-name")
            return theme.text("", "tw-fact-value")

    async def refresh(self) -> None:
        """Read the queues and show what changed."""
        try:
            view = await asyncio.to_thread(self.reader.queue)
        except Exception as error:
            self.stale.set_text(f"Not refreshed: {error}")
            theme.show(self.stale, True)
            return
        if self.waiting.is_deleted:
            return
        theme.show(self.stale, False)
        self._show(view)

    def _show(self, view: QueueView) -> None:
        figures = (
            f"{len(view.waiting):,}", f"{view.active:,}", f"{view.chips_used:,}", f"{view.chips_wanted:,}",
            f"{view.slots_used} of {view.slots}",
        )  # fmt: skip
        for name, figure in zip(FIGURES, figures, strict=True):
            self.figures[name].set_text(figure)
        rows = [(line.queue, line.project, *(f"{count:,}" for count in line.counts)) for line in view.lines]
        self.queues.set(("Queue", "Project", "Waiting", "for chips", "Active", "on chips"), rows)
        theme.show(self.queues.root, bool(rows))
        theme.show(self.no_queues, not rows)
        theme.show(self.nothing, not view.waiting)
        theme.show(self.waiting, bool(view.waiting))
        shown = view.waiting[:MAX_ROWS]
        if shown != self.drawn:
            self.drawn = shown
            self.waiting.clear()
            self.ages.clear()
            with self.waiting:
                for head in HEADS:
                    theme.text(head, "tw-th")
                for job in shown:
                    theme.text(str(job.place), "tw-num")
                    ui.link(job.name, f"/jobs/{job.id}").classes("tw-cell tw-key-name")
                    theme.text(f"{job.queue} · {job.project}" if job.project != "default" else job.queue, "tw-cell")
                    theme.text(job.machine, "tw-cell")
                    self.ages.append((theme.text("", "tw-num"), job.since))
                    theme.text(cut(job.reason, 400), "tw-wrap")
                if len(view.waiting) > MAX_ROWS:
                    theme.text(f"and {len(view.waiting) - MAX_ROWS:,} more", "tw-dim tw-span")
        now = time.time()
        for label, since in self.ages:
            label.set_text(duration(now - since) if now - since >= 60 else words.age(now - since).removesuffix(" ago"))


async def build(reader: Reader) -> None:
    """Build the page for one browser, filled at once, and keep it current."""
    page = QueueScreen(reader)
    await page.refresh()
    ui.timer(REFRESH_SECONDS, page.refresh, immediate=False)
