"""A chart for each metric of a run that its page has no chart for: a user's own, further tasks' scores, speeds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from twinstep.platform.dashboard import charts, theme
from twinstep.platform.dashboard.charts import Line
from twinstep.platform.dashboard.curves import Curve, Scale, curve
from twinstep.platform.dashboard.plot import Plot
from twinstep.platform.store.records import MetricSeries
from twinstep.spec.words import cut

MOST = 24


class MoreCharts:
    """Closed at first, and read only while it is open; not to be seen where there is nothing more."""

    def __init__(self, on_open: Callable[[], Awaitable[None]], on_zoom: Callable[[], Awaitable[None]]) -> None:
        self.names: list[str] = []
        self.plots: dict[str, Plot] = {}
        self.open = False
        self.on_open, self.on_zoom = on_open, on_zoom
        with theme.tag("details", "", "tw-more tw-hide").mark("more-charts") as self.root:
            with theme.tag("summary", "", "tw-more-head"):
                theme.tag("h2", "More metrics", "tw-h2")
                self.says = theme.text("", "tw-dim tw-small")
            self.body = theme.div("tw-charts tw-charts-two tw-more-charts")
        self.root.on("toggle", self._toggled, js_handler="(event) => emit(event.target.open)")

    async def _toggled(self, event: object) -> None:
        self.open = bool(getattr(event, "args", False))
        if self.open:
            await self.on_open()

    def set_names(self, names: Sequence[str]) -> None:
        """Take in which metrics there are."""
        if list(names) == self.names:
            return
        self.names = list(names)
        theme.show(self.root, bool(names))
        shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        left = f"; the first {MOST} are drawn" if len(names) > MOST else ""
        self.says.set_text(f"{len(names)}: {cut(shown, 160)}{left}")

    def windows(self) -> dict[str, tuple[int, int]]:
        """Return the stretch of steps that each metric to be read is looked at in; without those looked at whole."""
        windows = {name: self.plots[name].window for name in self.wanted() if name in self.plots}
        return {name: (int(window[0]), int(window[1])) for name, window in windows.items() if window is not None}

    def wanted(self) -> list[str]:
        """Return the metrics that are to be read."""
        return self.names[:MOST] if self.open else []

    def update(self, series: Mapping[str, MetricSeries]) -> None:
        """Draw what was read. What was not is another attempt's by now, or has no points: its chart is emptied."""
        for name in self.wanted():
            if name in series and name not in self.plots:
                with self.body, theme.card(cut(name, 80)):
                    line = Line(cut(name, 80), charts.INDIGO, dots=name.startswith("eval/"))
                    self.plots[name] = Plot([line], on_zoom=self.on_zoom)
        for name, plot in self.plots.items():
            found = series.get(name)
            plot.set([curve(found, Scale()) if found is not None and found.steps else Curve()])
