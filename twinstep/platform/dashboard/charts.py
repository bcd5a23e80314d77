"""Options of the charts: loss, held-out AUC and NE, examples per second. Pure data for ECharts.

Names and colours are ours alone: nothing a worker reports becomes a key or a name here, since ECharts reads names as
HTML in tooltips and NiceGUI evaluates keys that start with a colon.
"""

from __future__ import annotations

from typing import Any

_GREY = "#8b93a1"  # reads on white and on near-black alike, so charts need not know the colour scheme
_FAINT = "rgba(139, 147, 161, 0.18)"
INDIGO, TEAL, AMBER = "#6e6ade", "#12a594", "#d98a1f"


def axis(*, name: str = "", right: bool = False) -> dict[str, Any]:
    """Return a value axis that hugs its data."""
    return {
        "type": "value",
        "name": name,
        "nameTextStyle": {"color": _GREY, "fontSize": 11, "align": "left" if not right else "right"},
        "position": "right" if right else "left",
        "scale": True,
        "splitNumber": 4,
        "axisLabel": {"color": _GREY, "fontSize": 11, "hideOverlap": True},
        "axisLine": {"show": False},
        "axisTick": {"show": False},
        "splitLine": {"show": not right, "lineStyle": {"color": _FAINT}},
    }


def line(name: str, color: str, *, dots: bool = False, second: bool = False, area: bool = False) -> dict[str, Any]:
    """Return a line without data."""
    return {
        "name": name,
        "type": "line",
        "data": [],
        "color": color,
        "yAxisIndex": int(second),
        "showSymbol": dots,
        "symbol": "circle",
        "symbolSize": 6,
        "lineStyle": {"width": 1.8},
        **({"areaStyle": {"opacity": 0.08}} if area else {}),
    }


def options(series: list[dict[str, Any]], axes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a chart's options; the x axis is the training step."""
    return {
        "animation": False,
        "backgroundColor": "transparent",
        "textStyle": {"fontFamily": "system-ui, 'Liberation Sans', 'DejaVu Sans', sans-serif"},
        "grid": {
            "left": 8,
            "right": 14,
            "top": 34 if len(series) > 1 else 16,
            "bottom": 6,
            "containLabel": True,
        },
        "legend": {
            "show": len(series) > 1,
            "top": 0,
            "left": 4,
            "itemWidth": 14,
            "itemHeight": 8,
            "textStyle": {"color": _GREY, "fontSize": 11},
        },
        "tooltip": {
            "trigger": "axis",
            "confine": True,
            "backgroundColor": "#20252d",
            "borderWidth": 0,
            "textStyle": {"color": "#e6e9ee", "fontSize": 12},
            "axisPointer": {"lineStyle": {"color": _GREY, "opacity": 0.5}},
        },
        "xAxis": {
            "type": "value",
            "min": "dataMin",
            "max": "dataMax",
            "axisLabel": {"color": _GREY, "fontSize": 11, "hideOverlap": True, "showMinLabel": True},
            "axisLine": {"lineStyle": {"color": _FAINT}},
            "axisTick": {"show": False},
            "splitLine": {"show": False},
        },
        "yAxis": axes,
        "series": series,
    }


def loss_chart() -> dict[str, Any]:
    """Return the options of the loss chart, without data."""
    return options([line("loss", INDIGO)], [axis()])


def quality_chart() -> dict[str, Any]:
    """Return the options of the held-out AUC and NE chart, without data."""
    return options(
        [line("AUC", TEAL, dots=True), line("NE", AMBER, dots=True, second=True)],
        [axis(), axis(right=True)],
    )


def speed_chart() -> dict[str, Any]:
    """Return the options of the throughput chart, without data."""
    return options([line("examples/s", INDIGO, area=True)], [axis()])
