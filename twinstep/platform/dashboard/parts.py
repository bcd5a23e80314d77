"""The parts of a job's page: facts, charts, events, log, summary, runs. Each shows data it is handed, once.

Parts send only what differs; none of them reads the store. Whatever a worker or a user wrote is shown as text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from nicegui import ui

from twinstep.platform.dashboard import charts, theme, words
from twinstep.platform.dashboard.charts import Line
from twinstep.platform.dashboard.curves import Curve, Scale, curve
from twinstep.platform.dashboard.hosts import Grid
from twinstep.platform.dashboard.plot import Plot
from twinstep.platform.dashboard.views import EventLine, JobLine, RunLine
from twinstep.platform.store.records import LogFilter, MetricSeries
from twinstep.spec.words import DASH, clock, cut, duration, number

MAX_EVENTS = 200
MAX_LOG_LINES = 400
MAX_LINE = 2000  # characters of one log line; a longer one is cut
_COMPILES = ("compil", "recompil")


class Facts:
    """Key figures in a row, and the progress bar under them."""

    NAMES = ("Step", "examples/s", "Loss", "Held-out AUC", "Held-out NE", "Compile", "Duration")

    def __init__(self) -> None:
        self.state = ""
        with ui.element("section").classes("tw-card") as self.root:
            with theme.div("tw-facts"):
                self.values = {name: self._fact(name) for name in self.NAMES}
            with theme.div("tw-progress-wide"):
                self.bar = theme.Bar()
                with theme.div("tw-progress-line"):
                    self.phase = theme.text("")
                    self.eta = theme.text("", "tw-num")

    @staticmethod
    def _fact(name: str) -> ui.label:
        with theme.div():
            theme.text(name, "tw-fact-name")
            return theme.text(DASH, "tw-fact-value")

    def update(self, row: JobLine, *, compile_s: float | None, ne: float | None, now: float) -> None:
        """Show the figures as they are now."""
        total = f" / {row.total_steps:,}" if row.total_steps else ""
        figures = {
            "Step": f"{row.step:,}{total}" if row.step or total else DASH,
            "examples/s": words.rate(row.examples_per_s),
            "Loss": number(row.loss),
            "Held-out AUC": number(row.auc),
            "Held-out NE": number(ne),
            "Compile": duration(compile_s),
            "Duration": duration(row.seconds(now)),
        }
        for name, figure in figures.items():
            self.values[name].set_text(figure)
        self.bar.set(row.step, row.total_steps)
        self.root.classes(remove=f"tw-is-{self.state}", add=f"tw-is-{row.state}")
        self.state = row.state
        self.phase.set_text(phase_words(row))
        eta = row.eta_s is not None and not row.final and row.state == "running"
        self.eta.set_text(f"about {duration(row.eta_s)} of steps left" if eta else "")


def phase_words(row: JobLine) -> str:
    """Return what the job does now, in a few words; compiling is kept apart from steps."""
    if row.final:
        return {"succeeded": "Finished", "failed": "Failed", "cancelled": "Cancelled"}[row.state]
    if row.cancel_requested:
        return "Stopping: the worker was asked to end"
    if row.state in ("pending", "queued"):
        return "Waiting for a free slot"
    return {
        "compiling": "Compiling the step: no steps are counted meanwhile",
        "training": "Training",
        "evaluating": "Evaluating on held-out events",
        "done": "Finishing",
    }.get(row.phase, "Starting")


class Charts:
    """Loss, held-out quality, speed and the token budget over steps; each may be looked at closer."""

    DRAWN: ClassVar[dict[str, tuple[tuple[str, Line], ...]]] = {
        "loss": (("loss", Line("loss", charts.INDIGO)),),
        "quality": (
            ("eval/auc", Line("AUC", charts.TEAL, dots=True)),
            ("eval/ne", Line("NE", charts.AMBER, dots=True, second=True)),
            ("window/auc", Line("AUC in training", charts.BLUE)),
        ),
        "speed": (
            ("examples_per_s", Line("examples/s", charts.INDIGO)),
            ("batches_ready", Line("batches ready", charts.AMBER, second=True)),
        ),
        "tokens": (
            ("real_tokens", Line("real", charts.TEAL)),
            ("dummy_tokens", Line("dummy", charts.AMBER)),
            ("events_cut", Line("events cut", charts.PINK)),
        ),
    }
    """Metrics by chart. Held-out scores are those of the first task."""
    NAMES = tuple(name for lines in DRAWN.values() for name, _ in lines)
    TITLES: ClassVar[dict[str, tuple[str, str]]] = {
        "loss": ("Loss", "training"),
        "quality": ("AUC and NE", "held out"),
        "speed": ("Throughput", "examples per second; batches ready: near 0 the step waits for data"),
        "tokens": ("History tokens", "a step's: real, dummies in its block, events cut for want of room"),
    }

    def __init__(self, on_zoom: Callable[[], Awaitable[None]]) -> None:
        self.plots: dict[str, Plot] = {}
        with theme.div("tw-charts tw-charts-two"):
            for chart, lines in self.DRAWN.items():
                title, note = self.TITLES[chart]
                with theme.card(title, note=note):
                    self.plots[chart] = Plot(
                        [line for _, line in lines], on_zoom=on_zoom, legend=len(lines) > 1, mark=f"chart-{chart}"
                    )

    def windows(self) -> dict[str, tuple[int, int]]:
        """Return the stretch of steps that each metric is looked at in; those looked at whole are left out."""
        return {
            name: (int(plot.window[0]), int(plot.window[1]))
            for chart, plot in self.plots.items()
            if plot.window is not None
            for name, _ in self.DRAWN[chart]
        }

    def update(self, series: Mapping[str, MetricSeries]) -> None:
        """Draw a run's lines; only charts whose points differ are sent."""
        for chart, lines in self.DRAWN.items():
            found = [series.get(name) for name, _ in lines]
            self.plots[chart].set([Curve() if each is None else curve(each, Scale()) for each in found])


EVENT_KINDS = {"": "all", "state": "states", "compile": "compiles", "user": "by people", "worker": "by the worker"}


class Events:
    """The newest events, newest on top, under a heading for each run and each restart within it."""

    def __init__(self) -> None:
        self.groups: list[ui.element] = []
        self.key: tuple[str, int] | None = None
        self.restarts = 0
        with theme.card("Events", note="newest first") as right:
            with right:
                theme.select("Show", EVENT_KINDS, "", self._only)
            self.none = theme.text("Nothing has happened yet", "tw-dim tw-small tw-note")
            with theme.div("tw-events-box"):
                self.body = theme.div("tw-events").props('tabindex="0"').mark("events")

    def _only(self, kind: str) -> None:
        # Which are shown is the style sheet's: nothing is read or sent again.
        self.body.props["data-only"] = kind if kind in EVENT_KINDS else ""

    def add(self, events: Sequence[EventLine], numbers: Mapping[str, int]) -> None:
        """Put events, oldest first, on top of those shown; the oldest beyond the limit go.

        Args:
            numbers: of the job's runs, by id.
        """
        if events:
            theme.show(self.none, False)
        for event in events[-MAX_EVENTS:]:
            group = self._group(event, numbers)
            with group:
                self._line(event).move(group, target_index=1)
        left = MAX_EVENTS
        for group in reversed(list(self.groups)):
            children = group.default_slot.children
            while len(children) > max(left, 0) + 1:
                group.remove(children[-1])
            left -= len(children) - 1
            if len(children) == 1:
                self.groups.remove(group)
                group.delete()

    def _group(self, event: EventLine, numbers: Mapping[str, int]) -> ui.element:
        """Return where an event stands: a new run, or a restart of it, begins a group on top."""
        begun = (event.run_id, self.restarts) if self.key is None or self.key[0] == event.run_id else (event.run_id, 0)
        if event.data.get("to") == "restarting":
            begun = (event.run_id, begun[1] + 1)
        if begun != self.key:
            self.key, self.restarts = begun, begun[1]
            with self.body, theme.div("tw-event-group") as group:
                number = numbers.get(event.run_id)
                name = f"Run {number}" if number else "Job"
                theme.text(name + (f", restart {begun[1]}" if begun[1] else ""), "tw-event-run")
            group.move(self.body, target_index=0)
            self.groups.append(group)
        return self.groups[-1]

    @staticmethod
    def _line(event: EventLine) -> ui.element:
        with theme.div(f"tw-event {event_class(event)} tw-by-{event_kind(event)}") as line:
            stamp = theme.text(clock(event.time, "%H:%M:%S"), "tw-dim tw-small tw-num")
            theme.with_props(stamp, title=clock(event.time, "%Y-%m-%d %H:%M:%S %Z"))
            theme.div("tw-event-dot")
            with theme.div():
                theme.text(event_title(event), "tw-event-name")
                if event.reason:
                    theme.text(cut(event.reason, 600), "tw-event-text tw-small")
                if event.actor:
                    theme.text(f"by {event.actor}", "tw-dim tw-small")
        return line


def event_kind(event: EventLine) -> str:
    """Return which of `EVENT_KINDS` an event is of."""
    if event.name == "state_changed":
        return "state"
    if event.name.startswith(_COMPILES):
        return "compile"
    return "worker" if event.actor == "worker" else "other" if event.actor == "scheduler" else "user"


def event_title(event: EventLine) -> str:
    """Return an event's heading: `starting → running`, `compiled · 8.4 s`."""
    data = event.data
    if event.name == "state_changed" and "from" in data and "to" in data:
        return cut(f"{data['from']} → {data['to']}", 80)
    seconds = data.get("seconds")
    timed = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    title = event.name.replace("_", " ") + (f" · {duration(seconds)}" if timed else "")
    return cut(title, 80)


def event_class(event: EventLine) -> str:
    """Return the class that colours an event's dot."""
    if event.name.startswith(_COMPILES):
        return "tw-event-compile"
    state = event.data.get("to", event.name)
    if state in ("failed", "cancelled"):
        return "tw-event-bad"
    if state == "succeeded" or event.name == "evaluated":
        return "tw-event-good"
    return "tw-event-state" if "to" in event.data else ""


def compile_seconds(event: EventLine) -> float:
    """Return the seconds of a compile event, 0 of any other."""
    seconds = event.data.get("seconds")
    if not isinstance(seconds, int | float) or event.name not in ("compiled", "recompiled"):
        return 0.0
    return float(seconds)


class LogTail:
    """The end of a run's log; follows while scrolled to the bottom. May be narrowed to lines that hold a text."""

    def __init__(
        self, grid: Grid, on_wanted: Callable[[LogFilter], Awaitable[None]], on_download: Callable[[], Awaitable[None]]
    ) -> None:
        """Build the card; where a run has several hosts, with a choice of whose lines are shown."""
        self.wanted, self.on_wanted = LogFilter(), on_wanted
        self.counts = (0, 0)
        self.lines: deque[str] = deque(maxlen=MAX_LOG_LINES)
        self.partial, self.looked_for = "", ""
        with theme.card("Log", classes="tw-span") as right:
            self.log = ui.log(max_lines=MAX_LOG_LINES).classes("tw-log").mark("log")
            self.none = theme.text("No line of the newest ones holds this.", "tw-dim tw-small tw-note tw-hide")
        with right:
            theme.search("Find in the log", "", self._look_for).classes("tw-search-small")
            self.right = theme.div("tw-log-choice")
            theme.button("Download", "tw-btn-small").on("click", on_download).mark("download-log")
        self.set_hosts(grid)

    def set_hosts(self, grid: Grid) -> None:
        """Offer the slices and hosts there are; where they are others than before, everybody's lines are wanted."""
        counts = len(grid.slices), max(map(len, grid.slices), default=0)
        if counts == self.counts:
            return
        self.counts, self.wanted = counts, LogFilter()
        self.right.clear()
        with self.right:
            for name, count in zip(("slice", "host"), counts, strict=True):
                if count > 1:
                    options = {"": "all"} | {str(index): str(index) for index in range(count)}
                    theme.select(name.capitalize(), options, "", partial(self._choose, name))

    async def _choose(self, name: str, value: str) -> None:
        number = int(value) if value.isascii() and value.isdecimal() and len(value) < 6 else None
        self.wanted = self.wanted.model_copy(update={name: number})
        await self.on_wanted(self.wanted)

    def _look_for(self, words: str) -> None:
        self.looked_for = words.lower()
        self.log.clear()
        for line in self.lines:
            self._push(line)
        theme.show(self.none, bool(self.lines) and not any(self.looked_for in line.lower() for line in self.lines))

    def _push(self, line: str) -> None:
        if self.looked_for in line.lower():
            self.log.push(line)
            theme.show(self.none, False)

    def reset(self) -> None:
        """Forget every line: another run, or another host's lines."""
        self.log.clear()
        self.lines.clear()
        self.partial = ""

    def add(self, text: str, *, skipped: int, flush: bool) -> None:
        """Append text; a line that has not ended waits for its end, or for `flush`."""
        if skipped:
            self._push(f"… {skipped:,} bytes not shown; `twinstep logs` has them …")
            self.partial = ""
        *lines, self.partial = (self.partial + text).split("\n")
        if (flush or len(self.partial) > MAX_LINE) and self.partial:
            lines, self.partial = [*lines, self.partial], ""
        for line in lines[-MAX_LOG_LINES:]:
            # A progress bar redraws its line with carriage returns: what stands last is what was to be seen.
            shown = line.rstrip("\r").rsplit("\r", 1)[-1]
            self.lines.append(cut(words.printable(shown), MAX_LINE) or " ")
            self._push(self.lines[-1])


class Table:
    """A small table that is rebuilt only when its content differs."""

    def __init__(self, classes: str) -> None:
        self.root = theme.div(f"tw-table {classes}")
        self.content: Any = None

    def set(self, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show these rows."""
        if (heads, rows) == self.content:
            return
        self.content = (heads, rows)
        self.root.clear()
        with self.root:
            for head in heads:
                theme.text(head, "tw-th")
            for row in rows:
                for index, cell in enumerate(row):
                    theme.text(cell, "tw-num" + (" tw-wrap" if index == len(row) - 1 else ""))


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a finished run's summary as names and figures, the baselines beside the model's AUC."""
    get = summary.get
    rows = [("Held-out AUC", number(get("auc")))]
    baselines = get("baselines")
    if isinstance(baselines, dict):
        for name, score in list(baselines.items())[:8]:
            auc = score.get("auc") if isinstance(score, dict) else None
            rows.append((f"AUC of {cut(str(name), 40).replace('_', ' ')}", number(auc)))
    rows += [
        ("Held-out NE", number(get("ne"))),
        ("Final loss", number(get("final_loss"))),
        ("Backend", cut(str(get("backend", DASH)), 40)),
        ("Steps", number(get("steps"))),
        ("Training examples", number(get("examples"))),
        ("examples/s", words.rate(get("examples_per_s"))),
        ("Compile", duration(get("compile_s"))),
        ("Training", duration(get("train_s"))),
        ("Evaluation", f"{duration(get('eval_s'))} on {number(get('eval_examples'))} examples"),
        ("Parameters", number(get("parameters"))),
    ]
    versions = get("versions")
    if isinstance(versions, dict) and versions:
        shown = ", ".join(f"{name} {version}" for name, version in list(versions.items())[:12])
        rows.append(("Versions", cut(shown, 300)))
    return rows


def run_rows(runs: Sequence[RunLine], *, now: float) -> list[tuple[str, ...]]:
    """Return the runs, the newest first: number, state, run id, duration, restarts, reason."""
    rows: list[tuple[str, ...]] = []
    for run in reversed(runs[-50:]):
        took = None if run.started is None else (run.ended if run.ended is not None else now) - run.started
        rows.append((str(run.number), run.state, run.id, duration(took), str(run.restarts), cut(run.reason, 300)))
    return rows
