"""A chart on a page: shows curves, and asks for finer ones where somebody looks closer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from nicegui import ui
from nicegui.events import GenericEventArguments

from twinstep.platform.dashboard import charts
from twinstep.platform.dashboard.charts import Line
from twinstep.platform.dashboard.curves import Curve


class Plot:
    """One chart."""

    def __init__(
        self, lines: Sequence[Line], *, on_zoom: Callable[[], Awaitable[None]], legend: bool = False, mark: str = ""
    ) -> None:
        self.lines, self.on_zoom = tuple(lines), on_zoom
        self.window: tuple[float, float] | None = None
        """The stretch of x that is looked at; None: all."""
        self.whole: tuple[float, float] | None = None
        """The first and the last x there is."""
        self.element = ui.echart(charts.chart(lines, legend=legend)).classes("tw-chart").mark(mark)
        # Only numbers come back: the event of a toolbox carries them in a batch.
        pick = (
            "(e) => { const z = (e.batch || [e])[0];"
            " emit({start: z.start, end: z.end, from: z.startValue, to: z.endValue}) }"
        )
        self.element.on("chart:datazoom", self._zoomed, js_handler=pick, throttle=0.3, leading_events=False)
        self.element.on("chart:restore", self._restored, js_handler="() => emit()")

    def set(self, curves: Sequence[Curve]) -> None:
        """Show these curves, one per line; nothing is sent while they are what is shown already."""
        options = self.element.options
        changed = charts.fill(options, self.lines, curves)
        if self.window is None:
            ends = [curve.ends for curve in curves if curve.ends is not None]
            whole = (min(first for first, _ in ends), max(last for _, last in ends)) if ends else None
            if whole != self.whole:
                self.whole, changed = whole, True
                # Fixed: a finer stretch must not move the window that somebody looks through.
                options["xAxis"]["min"], options["xAxis"]["max"] = whole or ("dataMin", "dataMax")
        if changed:
            self.element.update()

    async def _zoomed(self, event: GenericEventArguments) -> None:
        window = _window(event.args, self.whole)
        if window != self.window:
            self.window = window
            await self.on_zoom()

    async def _restored(self) -> None:
        if self.window is not None:
            self.window = None
            await self.on_zoom()


def _window(told: Any, whole: tuple[float, float] | None) -> tuple[float, float] | None:
    """Return the stretch that a zoom is about; None where it is all there is, or what the browser says is none."""
    if not isinstance(told, dict) or whole is None:
        return None

    def number(name: str) -> float | None:
        value = told.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    first, last = whole
    start, end = number("start"), number("end")
    low = number("from") if start is None else first + (last - first) * start / 100
    high = number("to") if end is None else first + (last - first) * end / 100
    if low is None or high is None or not first <= low < high <= last:
        return None
    return None if (low, high) == (first, last) else (low, high)
