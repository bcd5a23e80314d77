"""The table of states: complete, with ends that can be reached and never left."""

from __future__ import annotations

import itertools

import pytest

from twinstep.spec.errors import StateError
from twinstep.spec.states import FINAL, LIVE, MOVES, RunState, check_move


def test_every_state_has_a_row_and_an_end_can_be_reached_from_it() -> None:
    assert set(MOVES) == set(RunState)
    for state in RunState:
        reached, frontier = {state}, {state}
        while frontier:
            frontier = {to for each in frontier for to in MOVES[each]} - reached
            reached |= frontier
        assert reached & FINAL


def test_a_final_state_is_never_left_and_every_live_one_can_fail_or_be_cancelled() -> None:
    assert {RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED} == FINAL
    for state in LIVE:
        assert {RunState.FAILED, RunState.CANCELLED} <= MOVES[state]


def test_a_move_that_is_not_in_the_table_names_the_run_and_both_states() -> None:
    for now, to in itertools.product(RunState, RunState):
        if to in MOVES[now]:
            check_move(now, to, run_id="run-1")
        else:
            with pytest.raises(StateError, match=f"run-1 cannot go from {now} to {to}"):
                check_move(now, to, run_id="run-1")
