"""What is to be done with a run in a cluster: every row of the table, and what holds whatever is wanted and found."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinstep.platform.scheduler.cluster.decide import (
    ClusterAction,
    ClusterDo,
    ClusterSight,
    ClusterWanted,
    Sent,
    decide_cluster,
    path_to,
)
from twinstep.platform.scheduler.cluster.status import UNSCHEDULABLE, Finding
from twinstep.spec.states import ACTIVE, FINAL, LIVE, MOVES, RunState

S, D = RunState, ClusterDo
GONE = Finding(state=S.FAILED, reason="its objects are gone", code="Lost", gone=True)


def wants(state: RunState = S.RUNNING, sent: Sent = Sent.SURE, **more: object) -> ClusterWanted:
    return ClusterWanted(state=state, sent=sent, **more)


def sees(state: RunState, *, restarts: int = 0, **more: bool) -> ClusterSight:
    return ClusterSight(finding=Finding(state=state, reason=f"is {state}", restarts=restarts), **more)


def gone(*, confirmed: bool = True) -> ClusterSight:
    return ClusterSight(finding=GONE, confirmed=confirmed)


WITHOUT = Finding(state=S.QUEUED, reason="waits for nodes: 0/3 fit", code=UNSCHEDULABLE)
NO_NODES = ClusterSight(finding=WITHOUT)
FRESH = wants(S.PENDING, Sent.NOTHING)
BEGUN = wants(S.QUEUED, Sent.MAYBE)
LONG = {"active_seconds": 11.0, "max_seconds": 10.0}
WAITED = {"waited_seconds": 11.0, "max_wait_seconds": 10.0}
ROWS = [
    # before a launch
    (FRESH, None, D.LAUNCH, None),
    (replace(FRESH, cancel=True), None, D.MOVE, S.CANCELLED),
    (replace(FRESH, suspend=True), None, D.MOVE, S.QUEUED),
    (replace(FRESH, suspend=True, state=S.QUEUED), None, D.SAY, None),
    (replace(FRESH, before=1), None, D.MOVE, S.QUEUED),
    (replace(FRESH, before=1, state=S.QUEUED), None, D.SAY, None),
    (replace(FRESH, before=1, cancel=True), None, D.MOVE, S.CANCELLED),
    # waited too long
    (replace(FRESH, **WAITED), None, D.MOVE, S.FAILED),
    (replace(FRESH, waited_seconds=10.0, max_wait_seconds=10.0), None, D.LAUNCH, None),
    (replace(FRESH, cancel=True, **WAITED), None, D.MOVE, S.CANCELLED),
    (replace(FRESH, suspend=True, **WAITED), None, D.MOVE, S.QUEUED),
    (replace(FRESH, before=1, **WAITED), None, D.MOVE, S.FAILED),
    (wants(S.QUEUED, **WAITED), sees(S.QUEUED), D.DELETE, None),
    (wants(S.QUEUED, **WAITED), sees(S.QUEUED, deleting=True), D.SAY, None),
    (wants(S.QUEUED, **WAITED), sees(S.FAILED, deleting=True), D.SAY, None),
    (wants(S.QUEUED, **WAITED), sees(S.STARTING), D.MOVE, S.STARTING),
    (wants(S.QUEUED, **WAITED), gone(), D.MOVE, S.FAILED),
    (wants(S.QUEUED, suspend=True, suspended=True, **WAITED), sees(S.QUEUED), D.SAY, S.QUEUED),
    (wants(S.QUEUED, **WAITED), sees(S.STARTING, deleting=True), D.SAY, None),  # its pods go before it does
    (wants(S.RUNNING, **WAITED), sees(S.RUNNING), D.SAY, S.RUNNING),
    # a launch that may have come through
    (BEGUN, None, D.KEEP, None),
    (BEGUN, gone(confirmed=False), D.CONFIRM, None),
    (BEGUN, gone(), D.LAUNCH, None),
    (BEGUN, sees(S.STARTING), D.ADOPT, None),
    (replace(BEGUN, cancel=True), gone(), D.MOVE, S.CANCELLED),
    (replace(BEGUN, cancel=True), sees(S.RUNNING), D.ADOPT, None),
    (replace(BEGUN, suspend=True), gone(), D.SAY, None),
    # gone
    (wants(), gone(confirmed=False), D.CONFIRM, None),
    (wants(), gone(), D.MOVE, S.FAILED),
    (wants(cancel=True), gone(), D.MOVE, S.CANCELLED),
    (wants(**LONG), gone(), D.MOVE, S.FAILED),
    # asked to stop
    (wants(cancel=True), sees(S.RUNNING), D.DELETE, None),
    (wants(cancel=True), sees(S.RUNNING, deleting=True), D.SAY, None),
    (wants(cancel=True), sees(S.SUCCEEDED), D.MOVE, S.SUCCEEDED),
    (wants(cancel=True), sees(S.FAILED), D.MOVE, S.FAILED),
    (wants(cancel=True), sees(S.FAILED, deleting=True), D.SAY, None),
    (wants(**LONG), sees(S.RUNNING), D.DELETE, None),
    (wants(**LONG), sees(S.RUNNING, deleting=True), D.SAY, None),
    (wants(), sees(S.RUNNING, deleting=True), D.SAY, None),
    # suspended
    (wants(suspend=True), sees(S.RUNNING), D.SUSPEND, None),
    (wants(suspend=True, suspended=True), sees(S.QUEUED), D.MOVE, S.QUEUED),
    (wants(S.QUEUED, suspended=True), sees(S.QUEUED), D.UNSUSPEND, None),
    (wants(suspend=True, cancel=True), sees(S.RUNNING), D.DELETE, None),
    # by others
    (wants(S.QUEUED, suspend=True, suspended=True), sees(S.RUNNING, suspended=False), D.SUSPEND, None),
    (wants(suspend=True, suspended=True), sees(S.QUEUED, suspended=True), D.MOVE, S.QUEUED),
    (wants(S.RUNNING), sees(S.QUEUED, suspended=True), D.MOVE, S.QUEUED),
    (wants(S.QUEUED, suspended=True), sees(S.QUEUED, suspended=True), D.UNSUSPEND, None),
    # followed
    (wants(S.QUEUED), sees(S.QUEUED), D.SAY, S.QUEUED),
    (wants(S.QUEUED), sees(S.STARTING), D.MOVE, S.STARTING),
    (wants(S.QUEUED), sees(S.RUNNING), D.MOVE, S.RUNNING),
    (wants(S.STARTING), sees(S.RUNNING), D.MOVE, S.RUNNING),
    (wants(S.STARTING), sees(S.RESTARTING, restarts=1), D.SAY, S.STARTING),
    (wants(S.RUNNING), sees(S.STARTING), D.SAY, S.RUNNING),
    (wants(S.RUNNING), sees(S.RESTARTING, restarts=1), D.MOVE, S.RESTARTING),
    (wants(S.RUNNING, restarts=1), sees(S.RESTARTING, restarts=1), D.SAY, S.RUNNING),
    (wants(S.RESTARTING, restarts=1), sees(S.STARTING, restarts=1), D.SAY, S.RESTARTING),
    (wants(S.RESTARTING, restarts=1), sees(S.RUNNING, restarts=1), D.MOVE, S.RUNNING),
    (wants(S.RUNNING), sees(S.QUEUED), D.MOVE, S.QUEUED),
    (wants(S.QUEUED), sees(S.SUCCEEDED), D.MOVE, S.SUCCEEDED),
    (wants(S.RUNNING), sees(S.FAILED), D.MOVE, S.FAILED),
    (wants(S.RUNNING), sees(S.CANCELLED), D.MOVE, S.CANCELLED),
    (wants(S.RUNNING), None, D.KEEP, None),
    # without nodes
    (wants(S.STARTING), NO_NODES, D.MOVE, S.QUEUED),
    (wants(S.QUEUED), NO_NODES, D.SAY, S.QUEUED),
    (wants(S.QUEUED, **WAITED), NO_NODES, D.DELETE, None),
    (wants(S.RESTARTING, restarts=1), replace(NO_NODES, finding=replace(WITHOUT, restarts=1)), D.MOVE, S.QUEUED),
    (wants(S.RUNNING, reported=True), NO_NODES, D.MOVE, S.QUEUED),  # the first process reports before all have met
    (wants(S.RUNNING, met=True), NO_NODES, D.SAY, S.RUNNING),
    (wants(S.RUNNING, met=True), replace(NO_NODES, finding=replace(WITHOUT, restarts=1)), D.MOVE, S.QUEUED),
]


@pytest.mark.parametrize(("wanted", "sight", "do", "to"), ROWS)
def test_each_row(wanted: ClusterWanted, sight: ClusterSight | None, do: ClusterDo, to: RunState | None) -> None:
    action = decide_cluster(wanted, sight)
    assert (action.do, action.to) == (do, to)
    assert action.reason or do not in (D.SAY, D.MOVE)


def test_a_run_says_when_its_worker_is_silent_and_when_it_never_spoke() -> None:
    talks = wants(silent_seconds=5.0, reported=True)
    assert decide_cluster(talks, sees(S.RUNNING)).reason == "is running"
    silent = decide_cluster(replace(talks, silent_seconds=61.0), sees(S.RUNNING))
    assert "has not reported for more than 60 s" in silent.reason
    later = decide_cluster(replace(talks, silent_seconds=9999.0), sees(S.RUNNING))
    assert later == silent, "what is said does not change from pass to pass, or each would write"
    assert "reach the control plane" in decide_cluster(wants(silent_seconds=61.0), sees(S.RUNNING)).reason
    assert decide_cluster(wants(silent_seconds=None), sees(S.RUNNING)).reason == "is running"


def test_what_a_run_waited_for_is_told_until_its_end() -> None:
    waits = wants(S.QUEUED, **WAITED)
    taken = decide_cluster(waits, NO_NODES)
    assert taken.reason == "waited too long to be started: runtime.max_wait_seconds is 10; it waits for nodes: 0/3 fit"
    goes = replace(waits, reason=taken.reason)
    assert decide_cluster(goes, sees(S.STARTING, deleting=True)).reason == taken.reason, "its pods are gone by now"
    assert decide_cluster(goes, gone()).reason == taken.reason


def test_the_end_of_a_run_that_took_too_long_names_its_limit() -> None:
    assert "runtime.max_seconds is 10" in decide_cluster(wants(**LONG), gone()).reason


wanteds = st.builds(
    ClusterWanted,
    state=st.sampled_from(RunState),
    sent=st.sampled_from(Sent),
    cancel=st.booleans(),
    suspend=st.booleans(),
    suspended=st.booleans(),
    restarts=st.integers(0, 3),
    before=st.none() | st.integers(1, 3),
    active_seconds=st.floats(0, 20),
    max_seconds=st.none() | st.just(10.0),
    waited_seconds=st.sampled_from([0.0, 11.0]),
    max_wait_seconds=st.none() | st.just(10.0),
    silent_seconds=st.none() | st.floats(0, 200),
    reported=st.booleans(),
    met=st.booleans(),
)
findings = st.builds(
    Finding, state=st.sampled_from(sorted(set(RunState) - {S.PENDING})), reason=st.just("seen"),
    restarts=st.integers(0, 3),
) | st.just(GONE)  # fmt: skip
sights = st.none() | st.builds(
    ClusterSight,
    finding=findings,
    deleting=st.booleans(),
    suspended=st.none() | st.booleans(),
    confirmed=st.booleans(),
)


@given(wanteds, sights)
@settings(max_examples=400, deadline=None)
def test_whatever_is_wanted_and_seen(wanted: ClusterWanted, sight: ClusterSight | None) -> None:
    action = decide_cluster(wanted, sight)
    if wanted.state in FINAL:
        assert action.do is D.KEEP, "what has ended has ended"
    if action.do is D.LAUNCH:
        assert wanted.sent is not Sent.SURE, "it was there once, so it is never sent again"
        assert wanted.sent is Sent.NOTHING or (sight is not None and sight.confirmed)
        assert not wanted.cancel
        assert not wanted.suspend
    if wanted.sent is Sent.SURE and sight is not None and sight.finding.gone and not sight.confirmed:
        assert action.do in (D.CONFIRM, D.KEEP), "the mirror alone ends no run"
    assert action.restarts >= wanted.restarts
    if action.do is D.MOVE:
        assert action.to is not None
        assert action.to is not wanted.state
        path = [wanted.state, *path_to(wanted.state, action.to)]
        assert all(to in MOVES[now] for now, to in itertools.pairwise(path)), path


@given(
    st.sampled_from(sorted(LIVE)),
    st.sampled_from(Sent),
    st.lists(st.sampled_from(["runs", "fails", "ends", "collected", "reports"]), max_size=6),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_a_run_that_is_asked_to_stop_comes_to_an_end(
    state: RunState, sent: Sent, happens: list[str], there: bool
) -> None:
    """The cluster does what it likes meanwhile; then it takes away what is being deleted, as it always does."""
    if sent is Sent.SURE and state is S.PENDING:
        state = S.QUEUED
    wanted, deleting, found = wants(state, sent, cancel=True), False, S.RUNNING
    there = there and sent is not Sent.NOTHING
    for event in [*happens, *["collected", "nothing"] * 3]:
        found = {"fails": S.FAILED, "ends": S.SUCCEEDED}.get(event, found)
        if event == "reports" and wanted.state in (S.STARTING, S.RESTARTING):
            wanted = replace(wanted, state=S.RUNNING)
        if event == "collected" and deleting:
            there = False
        sight = sees(found, deleting=deleting, confirmed=True) if there else gone()
        action: ClusterAction = decide_cluster(wanted, sight)
        if action.do is D.ADOPT:
            wanted = replace(wanted, sent=Sent.SURE)
        elif action.do is D.DELETE:
            deleting = True
        elif action.do is D.MOVE:
            wanted = replace(wanted, state=path_to(wanted.state, action.to)[-1])
    assert wanted.state in FINAL


def test_paths_skip_nothing_that_the_table_of_moves_asks_for() -> None:
    for now in sorted(LIVE):
        for to in sorted(set(RunState) - {S.PENDING, now}):
            if (now, to) in ((S.STARTING, S.RESTARTING),) or (to is S.STARTING and now in ACTIVE):
                continue  # never asked for: see the rows
            if to is S.RESTARTING and now not in ACTIVE:
                continue
            path = [now, *path_to(now, to)]
            assert all(second in MOVES[first] for first, second in itertools.pairwise(path)), path
