"""The pure parts of the pages: words, rows of tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinstep.platform.dashboard import words
from twinstep.platform.dashboard.parts import compile_seconds, event_class, event_title, phase_words, summary_rows
from twinstep.platform.dashboard.views import EventLine, JobLine
from twinstep.spec.states import RunState


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


AT = {"created": 0.0, "run_created": 0.0}


def test_every_state_has_its_words() -> None:
    for state in RunState:
        row = JobLine(id="j", name="n", state=state, machine="cpu", model="m", dataset="d", backend="b", **AT)
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
