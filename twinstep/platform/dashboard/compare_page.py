"""The page `/compare?jobs=A,B`: two to six jobs, a chart per metric with all of them, and what differs between them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast, get_args
from urllib.parse import urlencode

from nicegui import ui

from twinstep.platform.dashboard import theme
from twinstep.platform.dashboard.charts import PALETTE, Line
from twinstep.platform.dashboard.curves import AXES, Axis, Curve, Scale, curve
from twinstep.platform.dashboard.differences import as_csv, differing, outcomes
from twinstep.platform.dashboard.plot import Plot
from twinstep.platform.dashboard.reader import Reader
from twinstep.platform.dashboard.views import JobWithRuns
from twinstep.platform.store.records import MetricSeries
from twinstep.spec.errors import NotFoundError
from twinstep.spec.words import DASH, cut

REFRESH_SECONDS = 2.0
MOST = len(PALETTE)
FIRST = ("loss", "eval/auc", "eval/ne", "examples_per_s", "step_ms")
"""Metrics that come first; the others follow by name."""
MAX_CHARTS = 12
SMOOTHING = {"0": "none", "0.6": "some", "0.9": "much", "0.98": "most"}
Lines = dict[str, dict[str, MetricSeries]]
"""Series by job and name."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """How it is looked at."""

    axis: Axis = "step"
    smoothing: float = 0.0


class CompareScreen:
    """A comparison on one browser's screen."""

    def __init__(self, reader: Reader, jobs: Sequence[JobWithRuns], names: Sequence[str], view: Look) -> None:
        self.reader, self.view = reader, view
        self.jobs = {job.row.id: job for job in jobs}
        self.series: Lines = {job_id: {} for job_id in self.jobs}
        self.scales = {job_id: self._scale(job, view.axis) for job_id, job in self.jobs.items()}
        self.colors = dict(zip(self.jobs, PALETTE, strict=False))
        self.labels = _labels(jobs)
        self.plots: dict[str, Plot] = {}
        with theme.frame(user=reader.user):
            self._head()
            self.stale = theme.text("", "tw-reason tw-hide")
            with theme.div("tw-charts tw-charts-two"):
                for name in names[:MAX_CHARTS]:
                    self._chart(name)
            if not names:
                with ui.element("section").classes("tw-card tw-empty"):
                    theme.text("Nothing to draw yet", "tw-empty-title")
                    theme.text(
                        "None of these jobs has reported a metric; charts appear when you open this page again.",
                        "tw-dim",
                    )
            if len(names) > MAX_CHARTS:
                left = ", ".join(names[MAX_CHARTS:])
                theme.text(f"Not drawn: {cut(left, 300)}", "tw-dim tw-small tw-wrap")
            with theme.div("tw-two"):
                with theme.card("Outcome", note="the best of each is marked"):
                    self.outcome = theme.div("tw-table tw-compare")
                with theme.card("Spec", note="only what differs"):
                    self.differences = theme.div("tw-table tw-compare")
        self._tables()

    @staticmethod
    def _scale(job: JobWithRuns, axis: Axis) -> Scale:
        started = job.row.started if job.row.started is not None else job.row.run_created
        return Scale(axis=axis, started=started, examples_per_step=job.examples_per_step)

    def _head(self) -> None:
        with theme.div("tw-job-head"):
            with theme.div("tw-min"):
                theme.tag("h1", f"Compare {len(self.jobs)} jobs", "tw-h1")
                with theme.div("tw-keys"):
                    for job_id, job in self.jobs.items():
                        with theme.div("tw-key"):
                            theme.div("tw-key-dot").style(f"background: {self.colors[job_id]}")
                            ui.link(self.labels[job_id], f"/jobs/{job_id}").classes("tw-key-name")
                            theme.Chip(job.row.state)
                            rest = [other for other in self.jobs if other != job_id]
                            if len(rest) > 1:
                                away = ui.link("×", self._address(rest, self.view)).classes("tw-key-away")
                                theme.with_props(away, aria_label=f"Leave out {job.row.name}")
            with theme.div("tw-filters tw-nowrap"):
                theme.select("Over", {**AXES}, self.view.axis, lambda value: self._change(axis=value))
                smoothing = f"{self.view.smoothing:g}"
                theme.select("Smoothing", SMOOTHING, smoothing, lambda value: self._change(smoothing=value))
                theme.button("CSV", "tw-btn-small").on("click", self._csv).tooltip("Every point drawn here")

    @staticmethod
    def _address(jobs: Sequence[str], view: Look) -> str:
        pairs = {"jobs": ",".join(jobs), "x": view.axis, "smooth": f"{view.smoothing:g}"}
        defaults = {"x": "step", "smooth": "0"}
        return "/compare?" + urlencode(
            {key: value for key, value in pairs.items() if defaults.get(key) != value}, safe=","
        )

    def _chart(self, name: str) -> None:
        lines = [Line(self.labels[job_id], self.colors[job_id], dots=name.startswith("eval/")) for job_id in self.jobs]
        with theme.card(cut(name, 80), note=AXES[self.view.axis].lower()) as right:
            plot = self.plots[name] = Plot(lines, on_zoom=self.refresh)
            with right:
                theme.button("PNG", "tw-btn-small").on("click", lambda: self._png(plot, name))

    def _png(self, plot: Plot, name: str) -> None:
        file = "".join(letter if letter.isalnum() else "-" for letter in name)[:60]
        ui.run_javascript(
            f"const chart = getElement({plot.element.id}).chart; const link = document.createElement('a');"
            "const dark = document.body.classList.contains('body--dark');"
            "link.href = chart.getDataURL({pixelRatio: 2, backgroundColor: dark ? '#171b21' : '#ffffff',"
            "excludeComponents: ['toolbox']});"
            f"link.download = 'twinstep-{file}.png'; link.click();"
        )

    def _csv(self) -> None:
        rows = [(self.labels[job_id], series) for job_id, found in self.series.items() for series in found.values()]
        ui.download.content(as_csv(rows), "twinstep-compare.csv", "text/csv")

    async def _change(self, *, axis: str | None = None, smoothing: str | None = None) -> None:
        view = Look(
            axis=cast("Axis", axis) if axis in get_args(Axis) else self.view.axis,
            smoothing=float(smoothing) if smoothing in SMOOTHING else self.view.smoothing,
        )
        if view.axis != self.view.axis:  # other axes, other windows: built anew
            ui.navigate.to(self._address(list(self.jobs), view))
            return
        self.view = view
        ui.navigate.history.replace(self._address(list(self.jobs), view))
        self._draw(self.series)

    async def refresh(self) -> None:
        """Read what is new of every job, in the stretches looked at, and draw it."""
        try:
            series, jobs = await asyncio.to_thread(self._read)
        except Exception as error:
            self.stale.set_text(f"Not refreshed: {error}")
            theme.show(self.stale, True)
            return
        if self.outcome.is_deleted:
            return
        theme.show(self.stale, False)
        self.jobs |= jobs
        self.series = series
        self._draw(series)
        if jobs:
            self._tables()

    @property
    def live(self) -> bool:
        """Whether something may still change."""
        return any(not job.row.final for job in self.jobs.values())

    def _read(self) -> tuple[Lines, dict[str, JobWithRuns]]:
        jobs = {job_id: self.reader.job(job_id) for job_id, job in self.jobs.items() if not job.row.final}
        whole = [name for name, plot in self.plots.items() if plot.window is None]
        found: Lines = {}
        for job_id, scale in self.scales.items():
            found[job_id] = self.reader.series(job_id, whole)
            for name, plot in self.plots.items():
                known = self.series[job_id].get(name)
                if plot.window is None or known is None:
                    continue
                full = self.reader.series(job_id, [name]).get(name, known)
                first, last = (scale.step_at(x, full) for x in plot.window)
                found[job_id] |= self.reader.series(job_id, [name], from_step=first, to_step=last)
        return found, jobs

    def _draw(self, series: Lines) -> None:
        for name, plot in self.plots.items():
            plot.set([self._curve(series[job_id].get(name), self.scales[job_id]) for job_id in self.jobs])

    def _curve(self, series: MetricSeries | None, scale: Scale) -> Curve:
        return Curve() if series is None else curve(series, scale, smoothing=self.view.smoothing)

    def _tables(self) -> None:
        jobs = list(self.jobs.values())
        for table in (self.outcome, self.differences):
            table.clear()
            table.style(f"grid-template-columns: minmax(110px, max-content) repeat({len(jobs)}, minmax(90px, 1fr))")
            with table:
                theme.text("", "tw-th")
                for job_id in self.jobs:
                    with theme.div("tw-th tw-key"):
                        theme.div("tw-key-dot").style(f"background: {self.colors[job_id]}")
                        theme.text(self.labels[job_id], "tw-wrap")
        with self.outcome:
            for row in outcomes([_summary(job) for job in jobs]):
                theme.text(row.name)
                for index, value in enumerate(row.values):
                    theme.text(value, "tw-num" + (" tw-best" if index in row.best else ""))
        with self.differences:
            rows = differing([job.spec for job in jobs])
            for path, values in rows[:100]:
                theme.text(path, "tw-mono tw-wrap")
                for value in values:
                    theme.text(cut(value, 200), "tw-num tw-wrap" + (" tw-dim" if value == DASH else ""))
            if not rows:
                theme.text("Their specs are the same but for their names.", "tw-dim tw-span tw-wrap")


def _summary(job: JobWithRuns) -> dict[str, object]:
    if job.summary is not None:
        return job.summary
    row = job.row
    return {"auc": row.auc, "final_loss": row.loss, "examples_per_s": row.examples_per_s, "steps": row.step or None}


def _labels(jobs: Sequence[JobWithRuns]) -> dict[str, str]:
    """Return a name for each job that is no other's: its own, or with the end of its id."""
    names = [job.row.name for job in jobs]
    return {
        job.row.id: job.row.name if names.count(job.row.name) == 1 else f"{job.row.name} {job.row.id[-5:]}"
        for job in jobs
    }


async def build(reader: Reader, *, jobs: str, axis: str, smoothing: str) -> None:
    """Build the page for one browser; what is asked for and is not there is left out and said."""
    ids = list(dict.fromkeys(job_id for job_id in jobs.split(",") if job_id))[:MOST]
    found, missing = await asyncio.to_thread(_read_jobs, reader, ids)
    ui.page_title("Compare · Twinstep")
    if not found:
        with theme.frame(user=reader.user), ui.element("section").classes("tw-card tw-empty"):
            theme.text("Nothing to compare", "tw-empty-title")
            theme.text(f"Tick two to {MOST} jobs in the list, then press Compare.", "tw-dim")
            ui.link("All jobs", "/").classes("tw-btn")
        return
    names = await asyncio.to_thread(_names, reader, [job.row.id for job in found])
    view = Look(
        axis=cast("Axis", axis) if axis in get_args(Axis) else "step",
        smoothing=float(smoothing) if smoothing in SMOOTHING else 0.0,
    )
    page = CompareScreen(reader, found, names, view)
    if missing:
        ui.notify(f"Not there: {cut(', '.join(missing), 200)}", position="bottom")
    await page.refresh()
    if page.live:
        ui.timer(REFRESH_SECONDS, page.refresh, immediate=False)


def _read_jobs(reader: Reader, ids: Sequence[str]) -> tuple[list[JobWithRuns], list[str]]:
    found, missing = [], []
    for job_id in ids:
        try:
            found.append(reader.job(job_id))
        except NotFoundError:
            missing.append(job_id)
    return found, missing


def _names(reader: Reader, ids: Sequence[str]) -> list[str]:
    names = {name for job_id in ids for name in reader.metric_names(job_id)}
    return [name for name in FIRST if name in names] + sorted(names - set(FIRST))
