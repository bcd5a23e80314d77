"""Options of charts, as plain data for ECharts.

Nothing that a worker reports becomes a key here: NiceGUI evaluates keys that start with a colon. Names of lines may
be users' words: the tooltip, which ECharts takes for HTML, is our own and escapes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twinstep.platform.dashboard.curves import Curve

GREY = "#868e9c"  # reads on white and on near-black alike, so charts need not know the colour scheme
_FAINT = "rgba(139, 147, 161, 0.18)"
INDIGO, TEAL, AMBER, PINK, BLUE, OLIVE = "#6e6ade", "#0f9485", "#c77711", "#cf4795", "#2e86c9", "#7d8a2e"
PALETTE = (INDIGO, TEAL, AMBER, PINK, BLUE, OLIVE)
"""Lines of a chart, in order: each stands out from white and from near-black, and from its neighbours."""
UNDEFINED = "#d4545a"
MAX_MARKS = 40

_TOOLTIP = """(all) => {
  const safe = (text) => String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
  const figure = (v) => typeof v === 'number' ? Number(v.toPrecision(5)).toLocaleString('en') : '–';
  const rows = all.filter((p) => !p.seriesName.startsWith('~') && p.value[1] !== null);
  if (!rows.length) return '';
  return `<b>${figure(rows[0].value[0])}</b>` + rows.map((p) =>
    `<br><span style="color:${p.color}">●</span> ${safe(p.seriesName)} <b>${figure(p.value[1])}</b>`).join('');
}"""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart."""

    name: str
    color: str
    second: bool = False
    """On an axis of its own, to the right."""
    dots: bool = False
    """Few points that deserve to be seen each."""


def axis(*, right: bool = False) -> dict[str, Any]:
    """Return a value axis that hugs its data."""
    return {
        "type": "value",
        "position": "right" if right else "left",
        "scale": True,
        "splitNumber": 4,
        "axisLabel": {"color": GREY, "fontSize": 11, "hideOverlap": True},
        "axisLine": {"show": False},
        "axisTick": {"show": False},
        "splitLine": {"show": not right, "lineStyle": {"color": _FAINT}},
    }


def _series(line: Line) -> list[dict[str, Any]]:
    """Return a line and, under it, the band from the lowest to the highest of each bucket; without data."""
    band = {
        "type": "line",
        "data": [],
        "silent": True,
        "symbol": "none",
        "stack": f"~{line.name}",
        "stackStrategy": "all",
        "yAxisIndex": int(line.second),
        "lineStyle": {"opacity": 0},
        "color": line.color,
        "z": 1,
    }
    return [
        {
            "name": line.name,
            "type": "line",
            "data": [],
            "color": line.color,
            "yAxisIndex": int(line.second),
            "showSymbol": line.dots,
            "symbol": "circle",
            "symbolSize": 6,
            "lineStyle": {"width": 1.8},
            "markLine": {
                "silent": True,
                "symbol": "none",
                "label": {"show": False},
                "lineStyle": {"color": UNDEFINED, "type": "dotted", "width": 1},
                "data": [],
            },
            "z": 3,
        },
        {**band, "name": f"~{line.name} low"},
        {**band, "name": f"~{line.name} span", "areaStyle": {"color": line.color, "opacity": 0.26}},
    ]


SERIES_PER_LINE = 3


def chart(lines: Sequence[Line], *, legend: bool) -> dict[str, Any]:
    """Return a chart's options, without data. A drag along it, or Ctrl and the wheel, zooms in."""
    return {
        "animation": False,
        "backgroundColor": "transparent",
        "textStyle": {"fontFamily": "system-ui, 'Liberation Sans', 'DejaVu Sans', sans-serif"},
        "grid": {"left": 8, "right": 26, "top": 36, "bottom": 6, "containLabel": True},
        "legend": {
            "show": legend,
            "data": [line.name for line in lines],
            "type": "scroll",
            "top": 0,
            "left": 4,
            "right": 60,
            "itemWidth": 14,
            "itemHeight": 8,
            "textStyle": {"color": GREY, "fontSize": 11},
        },
        "tooltip": {
            "trigger": "axis",
            "confine": True,
            "backgroundColor": "#20252d",
            "borderWidth": 0,
            "textStyle": {"color": "#e6e9ee", "fontSize": 12},
            "axisPointer": {"lineStyle": {"color": GREY, "opacity": 0.5}},
            ":formatter": _TOOLTIP,
        },
        "title": {
            "show": True,
            "text": "No points yet",
            "left": "center",
            "top": "middle",
            "textStyle": {"color": GREY, "fontSize": 12, "fontWeight": "normal"},
        },
        "toolbox": {
            "right": 8,
            "top": 0,
            "itemSize": 12,
            "iconStyle": {"borderColor": GREY},
            "feature": {
                "dataZoom": {"yAxisIndex": "none", "title": {"zoom": "Zoom: drag over the chart", "back": "Zoom out"}},
                "restore": {"title": "Whole run"},
            },
        },
        "dataZoom": [{"type": "inside", "zoomOnMouseWheel": "ctrl", "moveOnMouseMove": "shift", "filterMode": "none"}],
        "xAxis": {
            "type": "value",
            "min": "dataMin",
            "max": "dataMax",
            "axisLabel": {"color": GREY, "fontSize": 11, "hideOverlap": True, "showMinLabel": True},
            "axisLine": {"lineStyle": {"color": _FAINT}},
            "axisTick": {"show": False},
            "splitLine": {"show": False},
        },
        "yAxis": [axis(), axis(right=True)] if any(line.second for line in lines) else [axis()],
        "series": [each for line in lines for each in _series(line)],
    }


def fill(options: dict[str, Any], lines: Sequence[Line], curves: Sequence[Curve]) -> bool:
    """Put the lines' points into a chart's options; say whether anything differs from what was there."""
    empty = not any(curve.points for curve in curves)
    changed = bool(options["title"]["show"] != empty)
    if changed:  # not else: NiceGUI watches an element's options, and sends them whenever one is written
        options["title"]["show"] = empty
    for index, (line, curve) in enumerate(zip(lines, curves, strict=True)):
        main, low, span = options["series"][SERIES_PER_LINE * index : SERIES_PER_LINE * (index + 1)]
        marks = [{"xAxis": x} for x in curve.undefined[:MAX_MARKS]]
        if (main["data"], low["data"], main["markLine"]["data"]) == (curve.points, curve.low, marks):
            continue
        changed = True
        main["data"], low["data"], span["data"] = curve.points, curve.low, curve.span
        main["markLine"]["data"] = marks
        # A single point has no line to be seen by; scores held out are few and deserve their dots.
        main["showSymbol"] = len(curve.points) <= (40 if line.dots else 1)
    return changed
