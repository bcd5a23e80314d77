"""From buckets to a chart's points: gaps stay open, spikes stay, what differs is told, colours are read."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from importlib import resources
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinstep.platform.dashboard import charts
from twinstep.platform.dashboard.charts import Line
from twinstep.platform.dashboard.curves import Curve, Scale, curve, smoothed
from twinstep.platform.dashboard.differences import as_csv, differing, flat, outcomes
from twinstep.platform.dashboard.filters import ListChoice, from_query, to_query
from twinstep.platform.dashboard.plot import _window
from twinstep.platform.store.records import MetricSeries
from twinstep.platform.store.search import JobFilter, JobSort
from twinstep.spec.job import JobSpec
from twinstep.spec.states import RunState


def series(points: dict[int, float | None], **more: Any) -> MetricSeries:
    steps, values = list(points), list(points.values())
    columns = {
        "first_steps": steps, "steps": steps, "times": [100.0 + 6 * step for step in steps], "means": values,
        "lows": values, "highs": values, "undefined": [int(value is None) for value in values],
    }  # fmt: skip
    return MetricSeries.model_validate({"name": "loss", "width": 1, **columns, **more})


def test_points_lie_over_steps_minutes_or_examples() -> None:
    told = series({1: 5.0, 2: 6.0})
    assert curve(told, Scale()).points == [[1, 5.0], [2, 6.0]]
    assert [x for x, _ in curve(told, Scale("time", started=100.0)).points] == pytest.approx([0.1, 0.2])
    scale = Scale("examples", examples_per_step=32)
    assert [x for x, _ in curve(told, scale).points] == [32, 64]
    assert [scale.step_at(x, told) for x in (32, 64)] == [1, 2]
    assert [Scale("time", started=100.0).step_at(x, told) for x in (0.0, 0.11, 9.0)] == [1, 2, 2]


def test_a_stretch_without_points_is_not_drawn_over_and_nan_is_marked() -> None:
    told = curve(series({1: 1.0, 2: 1.0, 3: None, 4: 1.0, 500: 1.0, 501: 1.0}), Scale())
    assert told.points == [[1, 1], [2, 1], [3, None], [4, 1], [4, None], [500, 1], [501, 1]]
    assert told.undefined == [3]
    assert curve(series({100: 1.0, 200: 1.0, 300: 1.0}), Scale()).points == [[100, 1], [200, 1], [300, 1]]


def test_a_spike_within_a_bucket_stays_in_its_band() -> None:
    told = curve(series({8: 1.0, 16: 1.0}, lows=[0.5, None], highs=[9.0, None], width=8), Scale())
    assert (told.low, told.span) == ([[8, 0.5]], [[8, 8.5]])


@given(st.lists(st.none() | st.floats(-1e3, 1e3), max_size=40), st.sampled_from([0.0, 0.6, 0.98]))
def test_smoothing_stays_within_what_is_smoothed_and_keeps_what_is_undefined(values: Any, weight: float) -> None:
    found = smoothed(values, weight)
    assert [value is None for value in found] == [value is None for value in values]
    known = [value for value in values if value is not None]
    assert all(min(known) - 1e-6 <= value <= max(known) + 1e-6 for value in found if value is not None)
    first = next((index for index, value in enumerate(values) if value is not None), None)
    assert first is None or math.isclose(found[first], values[first], rel_tol=1e-9, abs_tol=1e-9)


def test_a_chart_is_told_only_what_differs() -> None:
    lines = [Line("a", charts.INDIGO), Line("b", charts.TEAL)]
    options = charts.chart(lines, legend=False)
    curves = [Curve(points=[[1, 2.0]]), Curve(undefined=[3.0])]
    assert charts.fill(options, lines, curves)
    assert not charts.fill(options, lines, curves)
    assert options["series"][charts.SERIES_PER_LINE]["markLine"]["data"] == [{"xAxis": 3.0}]


@pytest.mark.parametrize(
    "told",
    [None, "x", [], {}, {"start": "0", "end": 9}, {"start": True, "end": 9}, {"from": math.nan, "to": 5.0},
     {"start": 90, "end": 10}, {"start": -5, "end": 500}, {"from": 1e400, "to": 5}, {"start": 0, "end": 100}],
)  # fmt: skip
def test_what_a_browser_says_of_a_zoom_is_not_believed(told: Any) -> None:
    assert _window(told, (0.0, 100.0)) is None


def test_a_zoom_is_a_share_of_the_run_or_a_stretch_of_it() -> None:
    assert _window({"start": 25, "end": 50}, (0.0, 200.0)) == (50.0, 100.0)
    assert _window({"from": 3, "to": 5}, (0.0, 200.0)) == (3.0, 5.0)


def test_only_what_differs_between_specs_is_told() -> None:
    one = JobSpec(name="one").model_dump(mode="json")
    two = JobSpec.model_validate({"name": "two", "train": {"seed": 7}, "data": {"rows": {"movie": 9}}})
    rows = dict(differing([one, two.model_dump(mode="json")]))
    assert rows == {"train.seed": ["0", "7"], "data.rows": ["{}", "–"], "data.rows.movie": ["–", "9"]}
    assert differing([one, {**one, "name": "other"}]) == []
    assert flat({"a": {"b": None, "c": [1, "<b>"]}}) == {"a.b": "null", "a.c": '[1, "<b>"]'}


def test_the_best_is_marked_where_there_is_one() -> None:
    found = {row.name: row for row in outcomes([{"auc": 0.7, "ne": 0.9, "steps": 5}, {"auc": 0.8, "ne": 0.9}, {}])}
    assert found["Held-out AUC"].best == {1}
    assert found["Held-out AUC"].values == ("0.7000", "0.8000", "–")
    assert found["Held-out NE"].best == found["Steps"].best == frozenset()
    assert outcomes([{}, {"auc": None}]) == []


def test_a_table_of_points_runs_nothing_in_a_spreadsheet() -> None:
    told = as_csv([("=cmd()", series({1: 1.5, 2: None}, name='@x,"y"\n'))]).decode()
    rows = list(csv.reader(io.StringIO(told)))
    assert rows[1] == ["'=cmd()", '\'@x,"y"\n', "1", "1", "106.0", "1.5", "1.5", "1.5", "0"]
    assert rows[2][5:] == ["", "", "", "1"]


@given(
    st.builds(
        ListChoice,
        only=st.builds(
            JobFilter,
            states=st.lists(st.sampled_from(list(RunState)), unique=True).map(
                lambda states: tuple(state for state in RunState if state in states)
            ),
            accelerators=st.sampled_from([(), ("tpu",), ("cpu", "gpu")]),
            backends=st.sampled_from([(), ("xla",)]),
            min_attempt=st.integers(1, 3),
            text=st.text(max_size=30).map(str.strip),
        ),
        sort=st.sampled_from(list(JobSort)),
        size=st.sampled_from([25, 50, 100]),
    )
)
def test_an_address_says_all_of_a_filter(choice: ListChoice) -> None:
    from urllib.parse import parse_qsl

    assert from_query(parse_qsl(to_query(choice), keep_blank_values=True)) == choice


@given(st.lists(st.tuples(st.sampled_from(["state", "sort", "size", "q", "min_attempt", "x"]), st.text(max_size=9))))
def test_any_address_shows_something(pairs: Any) -> None:
    assert from_query(pairs).size in (25, 50, 100)


# ---- colours ----


def _light(color: str) -> float:
    channels = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """By WCAG 2."""
    high, low = sorted((_light(one), _light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def mixed(color: str, ground: str, share: float) -> str:
    parts = [
        round(share * int(color[index : index + 2], 16) + (1 - share) * int(ground[index : index + 2], 16))
        for index in (1, 3, 5)
    ]
    return "#" + "".join(f"{part:02x}" for part in parts)


def schemes() -> dict[str, dict[str, str]]:
    css = resources.files("twinstep.platform.dashboard").joinpath("style.css").read_text()
    light, dark = re.findall(r"(?:root|body\.body--dark) \{(.*?)\}", css, re.DOTALL)[:2]

    def found(block: str) -> dict[str, str]:
        told = dict(re.findall(r"--(\w+): (#[0-9a-f]{3,6})\b", block))
        return {
            name: color if len(color) == 7 else "#" + "".join(2 * c for c in color[1:]) for name, color in told.items()
        }

    return {"light": found(light), "dark": found(light) | found(dark)}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_read_on_every_ground_of_both_schemes(scheme: str) -> None:
    colors = schemes()[scheme]
    for text, ground in itertools.product(
        ("text", "dim", "good", "bad", "warn", "busy", "calm", "accent"), ("bg", "card", "faint")
    ):
        assert contrast(colors[text], colors[ground]) >= 4.5, (text, ground, contrast(colors[text], colors[ground]))
    for state in ("good", "bad", "warn", "busy", "calm", "accent"):  # a state's pill is tinted with its own colour
        for ground in ("bg", "card", "faint"):
            pill = mixed(colors[state], colors[ground], 0.11)
            assert contrast(colors[state], pill) >= 4.5, (state, ground, contrast(colors[state], pill))
    assert contrast("#ffffff", colors["fill"]) >= 4.5
    for ground in ("bg", "card"):
        assert contrast(colors["field"], colors[ground]) >= 1.3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lines_of_charts_stand_out_on_both_schemes(scheme: str) -> None:
    card = schemes()[scheme]["card"]
    for color in (*charts.PALETTE, charts.UNDEFINED):
        assert contrast(color, card) >= 3.0, (color, contrast(color, card))
    assert contrast(charts.GREY, card) >= 3.0
    assert len(set(charts.PALETTE)) == 6
