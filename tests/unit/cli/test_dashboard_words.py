"""The pure parts of the pages: bounded series, words, rows of tables."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinstep.platform.dashboard import words
from twinstep.platform.dashboard.parts import compile_seconds, event_class, event_title, phase_words, summary_rows
from twinstep.platform.dashboard.series import MAX_POINTS, Series
from twinstep.platform.dashboard.views import EventLine, JobLine
from twinstep.spec.states import RunState

finite = st.floats(-1e6, 1e6)


@given(st.lists(finite, max_size=400), st.integers(1, 20).map(lambda half: 2 * half))
def test_a_series_is_bounded_ordered_and_ends_at_the_last_step(values: list[float], limit: int) -> None:
    series = Series(limit=limit)
    for step, value in enumerate(values, 1):
        assert series.add(step, value)
    points = series.points()
    assert len(points) <= limit
    steps = [point[0] for point in points]
    assert steps == sorted(set(steps))
    assert all(min(values) - 1e-6 <= value <= max(values) + 1e-6 for _, value in points)
    assert (steps[-1] if values else 0) == len(values)
    if len(values) < limit:
        assert points == [[step, value] for step, value in enumerate(values, 1)]


@given(st.integers(1, 4000))
def test_a_series_keeps_the_mean_of_all_its_points(count: int) -> None:
    series = Series(limit=16)
    for step in range(1, count + 1):
        series.add(step, float(step))
    points = series.points()
    weights = [series.stride] * len(points)
    weights[-1] = count - series.stride * (len(points) - 1)
    total = sum(weight * value for weight, (_, value) in zip(weights, points, strict=True))
    assert math.isclose(total / count, (count + 1) / 2)


def test_what_is_no_number_is_not_drawn() -> None:
    series = Series()
    for value in (None, math.nan, math.inf, True):
        assert not series.add(1, value)
    assert series.points() == []
    assert series.last is None


def test_a_million_points_stay_a_thousand() -> None:
    series = Series()
    for step in range(1_000_000):
        series.add(step, 1.0)
    assert len(series.points()) <= MAX_POINTS


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "now"), (9, "9 s ago"), (44, "40 s ago"), (61, "1 min ago"), (90_000, "1 d ago")]
)
def test_ages_are_in_one_unit(seconds: float, shown: str) -> None:
    assert words.age(seconds) == shown


def test_colours_cursor_moves_and_titles_leave_a_log_line() -> None:
    line = "a\x1b[31mred\x1b[0m\x1b]0;title\x07b\x1b[2J\x00\x9bc\td\u202ee"
    assert words.printable(line) == "aredbc\tde"


@given(st.text())
def test_a_printable_line_holds_no_controls(text: str) -> None:
    assert not any((ord(c) < 0x20 and c != "\t") or 0x7F <= ord(c) < 0xA0 for c in words.printable(text))


@given(
    st.dictionaries(
        st.sampled_from(["auc", "ne", "baselines", "versions", "steps", "backend"]),
        st.none() | st.text() | st.booleans() | st.dictionaries(st.text(), st.none() | st.text()) | st.integers(),
    )
)
def test_a_summary_of_any_shape_becomes_rows_of_text(summary: dict[str, object]) -> None:
    for name, value in summary_rows(summary):
        assert isinstance(name, str)
        assert isinstance(value, str)


def test_every_state_has_its_words() -> None:
    for state in RunState:
        row = JobLine(id="j", name="n", state=state, machine="cpu", model="m", dataset="d", backend="b", created=0)
        assert phase_words(row)
        assert row.seconds(5) is None


def test_events_are_titled_timed_and_coloured_by_what_they_are() -> None:
    def event(name: str, **data: object) -> EventLine:
        return EventLine(time=0, name=name, reason="", data=data)

    moved, compiled = event("state_changed", **{"from": "starting", "to": "failed"}), event("recompiled", seconds=2.5)
    assert (event_title(moved), event_class(moved)) == ("starting → failed", "tw-event-bad")
    assert (event_title(compiled), event_class(compiled)) == ("recompiled · 2.5 s", "tw-event-compile")
    assert compile_seconds(compiled) == 2.5
    assert compile_seconds(event("evaluated", seconds=2.5)) == 0
    assert compile_seconds(event("compiled", seconds="2")) == 0
    assert event_title(event("x", seconds=True)) == "x"
