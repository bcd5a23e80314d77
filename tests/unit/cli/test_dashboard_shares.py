"""Shares of a time, of whatever a worker says it went to."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinstep.platform.dashboard.shares import Shares, goodput, profile

HUGE = 10**400
values = (
    st.sampled_from([HUGE, -HUGE, math.inf, -math.inf, math.nan, None, True, "3", [], 1e308, 0, 2.5]) | st.integers()
)


@given(st.dictionaries(st.sampled_from(["tensorcore", "compute", "idle", "step", "other"]), values), values, values)
def test_whatever_is_said_is_drawn_or_passed_over(said: dict[str, object], first: object, last: object) -> None:
    for found in (profile({"time_s": said, "first": first, "last": last}), goodput({"time_s": said})):
        assert math.isfinite(found.seconds)
        assert all(seconds > 0 for _, seconds in found.parts)


@pytest.mark.parametrize(("first", "last"), [(0, HUGE), (-HUGE, 3), (HUGE, HUGE), (3, 2), (0, 2.5)])
def test_steps_that_no_run_can_have_show_nothing(first: object, last: object) -> None:
    assert profile({"time_s": {"compute": 1.0}, "first": first, "last": last}) == Shares()


def test_a_part_of_any_size_does_not_hide_the_others() -> None:
    found = profile({"time_s": {"compute": 1.5, "idle": HUGE}, "first": 2, "last": 4})
    assert found.parts == (("compute", 1.5),)
    assert found.says == "steps 2 to 4"
