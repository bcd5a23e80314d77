"""What pages say of runs: where their time went, their hosts, their queue, what differs, what may be done."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinstep.platform.dashboard.actions import ACTIONS, possible
from twinstep.platform.dashboard.hosts import MAX_CELLS, Grid, grid, shape_of
from twinstep.platform.dashboard.queues import HERE, NO_QUEUE, queue_view
from twinstep.platform.dashboard.run_parts import MAX_WARNINGS, difference, warning_lines
from twinstep.platform.dashboard.timeline import Stretch, stretches, totals
from twinstep.platform.dashboard.views import EventLine, JobLine, JobWithRuns, RunLine
from twinstep.platform.store.records import HostHeard, Job, Run
from twinstep.spec.states import RunState

V5P = {"kind": "tpu", "generation": "v5p", "topology": "4x4x8", "chips_per_host": None, "slices": 2}


def run_line(**more: Any) -> RunLine:
    fields: dict[str, Any] = {"created": 0.0, "started": None, "ended": None} | more
    return RunLine(id="run-1", number=1, state="running", reason="", **fields)


def move(time: float, to: str, run_id: str = "run-1") -> EventLine:
    return EventLine(time=time, name="state_changed", reason="", run_id=run_id, data={"to": to})


def compiled(time: float, seconds: Any) -> EventLine:
    return EventLine(time=time, name="compiled", reason="", run_id="run-1", data={"seconds": seconds})


@pytest.mark.parametrize("count", [0, 1, MAX_WARNINGS, MAX_WARNINGS + 1, 2000])
def test_every_warning_is_shown_or_counted(count: int) -> None:
    warnings = [f"warning {each}" for each in range(count)]
    lines, left = warning_lines(warnings), count - MAX_WARNINGS
    assert lines[:MAX_WARNINGS] == warnings[:MAX_WARNINGS]
    assert lines[MAX_WARNINGS:] == ([f"and {left:,} more: GET /v1/jobs/JOB/events has all"] if left > 0 else [])


def test_a_runs_time_is_told_state_by_state_with_compiling_apart() -> None:
    events = [
        move(1, "queued"), move(5, "starting"), move(8, "running"), compiled(20, 10.0), compiled(40, "no"),
        move(50, "restarting"), move(55, "running"), move(30, "failed", "run-2"),
    ]  # fmt: skip
    found = stretches(run_line(), events, now=60)
    assert [(each.what, each.start, each.end) for each in found] == [
        ("pending", 0, 1), ("queued", 1, 5), ("starting", 5, 8), ("running", 8, 10), ("compiling", 10, 20),
        ("running", 20, 50), ("restarting", 50, 55), ("running", 55, 60),
    ]  # fmt: skip
    assert totals(found) == {
        "pending": 1, "queued": 4, "starting": 3, "compiling": 10, "running": 37, "restarting": 5,
    }  # fmt: skip
    assert list(totals(found)) == ["pending", "queued", "starting", "compiling", "running", "restarting"]


events = st.one_of(
    st.builds(move, st.floats(-100, 1000), st.sampled_from([state.value for state in RunState])),
    st.builds(compiled, st.floats(-100, 1000), st.floats(-10, 500) | st.none()),
)


@given(st.lists(events, max_size=12), st.none() | st.floats(0, 900))
def test_stretches_follow_on_each_other_whatever_clocks_say(told: list[EventLine], ended: float | None) -> None:
    found = stretches(run_line(ended=ended), told, now=800.0)
    end = 800.0 if ended is None else ended
    assert all(each.seconds > 0 and 0 <= each.start < each.end <= end for each in found)
    assert all(one.end <= other.start for one, other in itertools.pairwise(found))
    assert sum(totals(found).values()) <= end + 1e-6


def run(**more: Any) -> Run:
    fields = {
        "id": "run-1", "job_id": "job-1", "attempt": 1, "backend": "kubernetes", "state": "running", "reason": "",
        "created_at": 0.0, "version": 1,
    }  # fmt: skip
    return Run.model_validate(fields | more)


def trouble(**more: Any) -> dict[str, Any]:
    return {"pods": [{"pod": "p", "slice": 1, "host": 3, "exit_code": 137, "reason": "OOMKilled", **more}]}


def states(found: Grid) -> dict[tuple[int, int], str]:
    return {(host.slice, host.host): host.state for hosts in found.slices for host in hosts}


def test_a_cell_for_each_host_says_what_is_known_of_it() -> None:
    heard = [
        HostHeard(slice=0, host=1, pod="a", time=95.0, line="<b>step 3</b>", restart=1),
        HostHeard(slice=0, host=1, pod="old", time=1.0),
        HostHeard(slice=0, host=2, pod="b", time=10.0, restart=1),
    ]
    found = grid(run(heartbeat_at=99.0, restarts=1, diagnosis=trouble(restart=1)), V5P, heard, now=100.0)
    assert (len(found.slices), len(found.slices[0]), found.note) == (2, 32, "")
    seen = states(found)
    assert [seen[0, 0], seen[0, 1], seen[0, 2], seen[0, 3]] == ["running", "running", "silent", "unknown"]
    assert (seen[1, 3], seen[1, 4]) == ("failed", "unknown")
    assert found.slices[0][1].says.splitlines() == [
        "slice 0, host 1", "pod a, restart 1", "last heard 5 s ago", "<b>step 3</b>",
    ]  # fmt: skip
    assert "OOMKilled, exit code 137" in found.slices[1][3].says
    assert found.title == "v5p 4x4x8: 2 slices of 32 hosts, 4 chips each"


def test_a_pod_of_an_earlier_restart_does_not_colour_the_one_after_it() -> None:
    assert states(grid(run(restarts=1, diagnosis=trouble(restart=0)), V5P, (), now=1.0))[1, 3] == "unknown"
    failed = run(restarts=1, state="failed", diagnosis=trouble(restart=0))
    assert states(grid(failed, V5P, (), now=1.0))[1, 3] == "failed"


def test_pods_that_a_cancel_ended_have_not_failed() -> None:
    found = grid(run(state="cancelled", diagnosis=trouble()), V5P, (), now=1.0)
    assert (states(found)[1, 3], "exit code 137" in found.slices[1][3].says) == ("ended", True)


def test_where_nothing_is_known_of_hosts_it_says_so() -> None:
    found = grid(run(), V5P, (), now=1.0)
    assert "Nothing is known of single hosts" in found.note
    large = {"kind": "tpu", "generation": "v5p", "topology": "16x16x24", "slices": 1}
    assert grid(run(), large, (), now=1.0).slices == ()
    here = grid(run(heartbeat_at=1.0), {"kind": "cpu"}, (), now=3.0)
    assert (states(here), here.note) == ({(0, 0): "running"}, "")


@pytest.mark.parametrize(
    ("accelerator", "expected"),
    [
        ({"kind": "cpu", "devices": 8}, (1, 1)),
        ({"kind": "gpu", "model": "h100", "count": 128}, (1, 16)),
        ({"kind": "gpu", "model": "h100", "count": 4}, (1, 1)),
        ({"kind": "tpu", "generation": "v6e", "topology": "2x4", "chips_per_host": 4}, (1, 2)),
        (V5P, (2, 32)),
    ],
)
def test_hosts_follow_from_the_accelerator(accelerator: Any, expected: tuple[int, int]) -> None:
    assert shape_of(accelerator)[:2] == expected
    assert expected[0] * expected[1] <= MAX_CELLS


def job(job_id: str, **more: Any) -> Job:
    fields = {
        "id": job_id, "name": job_id, "run_id": "run-1", "attempt": 1, "backend": "xla", "accelerator": "tpu",
        "machine": "v5p 4x4x8", "chips": 128, "queue": "train", "model": "dlrmv3", "dataset": "ml-100k",
        "project": "default", "submitted_by": "ada", "state": "queued", "reason": "waits", "created_at": 1.0,
            "run_created_at": 5.0,
    }  # fmt: skip
    return Job.model_validate(fields | more)


def test_queues_tell_who_waits_for_what_and_what_is_in_use() -> None:
    waiting = [job("a"), job("b", queue=None), job("c"), job("d", accelerator="cpu", chips=0, queue=None)]
    active = [job("e"), job("f", project="ads"), job("g", accelerator="cpu", chips=0)]
    view = queue_view(waiting, active, slots=2)
    assert [(row.name, row.queue, row.place) for row in view.waiting] == [
        ("a", "train", 1), ("b", NO_QUEUE, 1), ("c", "train", 2), ("d", HERE, 1),
    ]  # fmt: skip
    lines = {(line.queue, line.project): line.counts for line in view.lines}
    assert lines == {
        ("train", "default"): (2, 256, 1, 128), ("train", "ads"): (0, 0, 1, 128),
        (NO_QUEUE, "default"): (1, 128, 0, 0), (HERE, "default"): (1, 0, 1, 0),
    }  # fmt: skip
    assert (view.chips_used, view.chips_wanted, view.active, view.slots_used, view.slots) == (256, 384, 3, 1, 2)


def test_what_differs_is_told_as_diff_does() -> None:
    lines = difference("a: 1\nb: 2\n", "a: 1\nb: <b>3</b>\n", "run 1", "run 2")
    assert lines[:2] == ["--- run 1", "+++ run 2"]
    assert lines[-2:] == ["-b: 2", "+b: <b>3</b>"]
    assert difference("a", "a", "run 1", "run 2") == []


def with_runs(state: str, *, in_cluster: bool = True, suspended: bool = False, cancel: bool = False) -> JobWithRuns:
    row = JobLine(
        id="j", name="n", state=state, machine="cpu", model="m", dataset="d", backend="b", created=0, run_created=0,
        cancel_requested=cancel,
    )  # fmt: skip
    return JobWithRuns(
        row=row, run_id="r", spec={}, spec_yaml="", runs=(), hosts=Grid(title="", slices=(), note=""),
        in_cluster=in_cluster, suspended=suspended, heard=None,
    )  # fmt: skip


@pytest.mark.parametrize("state", [state.value for state in RunState])
def test_only_what_makes_sense_may_be_done(state: str) -> None:
    names = {action.name for action in ACTIONS}
    for in_cluster in (True, False):
        for suspended in (True, False):
            may = possible(with_runs(state, in_cluster=in_cluster, suspended=suspended))
            assert may <= names
            assert ("cancel" in may) == (state not in ("succeeded", "failed", "cancelled"))
            assert ("retry" in may) == (state in ("failed", "cancelled"))
            assert not (may & {"suspend", "resize"}) or in_cluster
            assert not {"suspend", "resume"} <= may
    assert possible(with_runs(state, cancel=True)) <= {"retry", "resume", "resize"}


def test_a_stretch_has_its_seconds() -> None:
    assert Stretch("running", 1.0, 3.5).seconds == 2.5
