"""The reconciler of a cluster's runs over a real store: crashes anywhere, two leaders, an API server that is away."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import delete
from stand_in_cluster import StandInCluster

from twinstep.platform.scheduler.cluster import reconcile
from twinstep.platform.scheduler.cluster.lease import uptime
from twinstep.platform.scheduler.cluster.patience import FIRST_S, LONGEST_S, Patience
from twinstep.platform.scheduler.cluster.reconcile import ClusterReconciler, Workers
from twinstep.platform.scheduler.service import Service
from twinstep.platform.settings import ClusterSettings, Settings
from twinstep.platform.store.cluster_runs import ClusterRuns
from twinstep.platform.store.records import JobDetail, Run
from twinstep.platform.store.store import Store
from twinstep.platform.store.tables import JobRow
from twinstep.spec.errors import UnavailableError
from twinstep.spec.job import JobSpec
from twinstep.spec.report import ProgressRecord
from twinstep.spec.states import RunState

S = RunState
IMAGE = "registry.example/worker@sha256:" + "a" * 64


class Crash(BaseException):
    """The control plane is killed here."""


def spec(**more: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "on-tpu",
            "accelerator": {"kind": "tpu", "generation": "v5p", "topology": "2x2x1"},
            "kubernetes": {"image": IMAGE},
            **more,
        }
    )


class Clock:
    """A clock that is set by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Plane:
    """A control plane on a store and a cluster; a second one is its restart, or its rival."""

    def __init__(self, store: Store, cluster: StandInCluster, settings: Settings) -> None:
        self.store, self.cluster, self.clock = store, cluster, Clock()
        self.runs = ClusterRuns(store.database, changed=store.changes.bump)
        self.service = Service(
            store, replace(settings, cluster=ClusterSettings(in_cluster=True, api_url="http://twinstep:8765"))
        )
        self.reconciler = ClusterReconciler(
            self.runs,
            cluster,
            workers=Workers(api_url="http://twinstep:8765"),
            every_seconds=1,
            patience=Patience(self.clock),
        )

    def submit(self, **more: Any) -> JobDetail:
        return self.service.submit_job(spec(**more))

    def passes(self, count: int = 1) -> None:
        for _ in range(count):
            self.reconciler.run_once()
            self.clock.now += LONGEST_S

    def run(self, job: JobDetail) -> Run:
        return self.store.run(self.store.job(job.id).run_id)

    def launched(self, **more: Any) -> JobDetail:
        job = self.submit(**more)
        self.passes(2)
        return job

    def running(self, **more: Any) -> JobDetail:
        job = self.launched(**more)
        self.cluster.ready(job.run_id)
        self.passes()
        assert self.run(job).state is S.RUNNING
        return job


@pytest.fixture
def cluster() -> StandInCluster:
    return StandInCluster()


@pytest.fixture
def plane(store: Store, cluster: StandInCluster, settings: Settings) -> Plane:
    return Plane(store, cluster, settings)


@pytest.fixture
def another(store: Store, cluster: StandInCluster, settings: Settings) -> Callable[[], Plane]:
    return lambda: Plane(store, cluster, settings)


def test_a_run_goes_from_its_submit_to_its_end(plane: Plane, cluster: StandInCluster) -> None:
    job = plane.submit()
    states = []
    for step in (
        lambda: None,
        lambda: None,
        lambda: cluster.ready(job.run_id),
        lambda: cluster.restarting(job.run_id, 1),
        lambda: cluster.ready(job.run_id, restarts=1),
        lambda: cluster.ends(job.run_id),
    ):
        step()
        plane.passes()
        states.append(plane.run(job).state)
    assert states == [S.QUEUED, S.STARTING, S.RUNNING, S.RESTARTING, S.RUNNING, S.SUCCEEDED]
    run = plane.run(job)
    assert (run.restarts, run.cluster is not None and run.cluster.uid) == (1, "uid-1")
    assert cluster.made == [job.run_id]
    changes = [event.data["to"] for event in plane.service.list_events(job.id).items if event.name == "state_changed"]
    assert changes == ["queued", "starting", "running", "restarting", "running", "succeeded"]


def test_the_pods_get_the_token_that_reports_are_taken_with(plane: Plane, cluster: StandInCluster) -> None:
    job = plane.launched()
    plane.service.check_token(job.run_id, cluster.secrets[job.run_id])
    stored = str(cluster.there) + str(plane.service.get_job(job.id)) + str(plane.service.list_events(job.id))
    assert cluster.secrets[job.run_id] not in stored


POINTS = [
    (part, name, when, nth)
    for part, name, calls in [
        ("runs", "begin_launch", 1),
        ("cluster", "apply", 1),
        ("runs", "note", 1),
        ("runs", "advance", 3),
        ("cluster", "confirm", 1),
        ("runs", "remark", 3),
    ]
    for nth in range(1, calls + 1)
    for when in ("before", "after")
]


@pytest.mark.parametrize(("part", "name", "when", "nth"), POINTS)
def test_a_control_plane_killed_anywhere_neither_loses_a_run_nor_sends_it_twice(
    plane: Plane, cluster: StandInCluster, another: Callable[[], Plane], monkeypatch, part, name, when, nth
) -> None:
    job = plane.submit()
    whole, calls = getattr(getattr(plane, part), name), 0

    def broken(*args: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls == nth and when == "before":
            raise Crash
        result = whole(*args, **options)
        if calls == nth:
            raise Crash
        return result

    def to_its_end(plane: Plane) -> None:
        for _ in range(4):
            plane.passes()
            if cluster.made:
                cluster.ready(job.run_id)
        cluster.ends(job.run_id)
        plane.passes(2)

    with monkeypatch.context() as patch:
        patch.setattr(getattr(plane, part), name, broken)
        try:
            to_its_end(plane)
        except Crash:
            calls = -100
    to_its_end(another())
    assert plane.run(job).state is S.SUCCEEDED
    assert cluster.made == [job.run_id]
    plane.service.check_token(job.run_id, cluster.secrets[job.run_id])


def test_two_that_think_they_lead_send_one_workload_and_either_token_is_good(
    plane: Plane, cluster: StandInCluster, another: Callable[[], Plane]
) -> None:
    """One is about to send when its lease ends, the other takes over and sends, and the first sends after all."""
    rival, job = another(), plane.submit()

    def overtaken(call: str, run_id: str) -> None:
        if call == "apply":
            cluster.fail = lambda call, run_id: None
            rival.passes(3)

    cluster.fail = overtaken
    plane.passes()
    for each in (plane, rival, plane):
        each.passes()
    assert cluster.made == [job.run_id]
    plane.service.check_token(job.run_id, cluster.secrets[job.run_id])
    cluster.ends(job.run_id)
    rival.passes()
    assert plane.run(job).state is S.SUCCEEDED


def test_a_launch_that_was_overtaken_by_its_cancel_leaves_nothing(
    plane: Plane, cluster: StandInCluster, another: Callable[[], Plane]
) -> None:
    rival, job = another(), plane.submit()

    def overtaken(call: str, run_id: str) -> None:
        if call == "apply":
            cluster.fail = lambda call, run_id: None
            plane.service.cancel_job(job.id)
            rival.passes(3)
            assert plane.run(job).state is S.CANCELLED

    cluster.fail = overtaken
    plane.passes(2)
    cluster.collect()
    assert cluster.there == {}


@pytest.mark.parametrize("whose", ["ours", "another control plane's", "ours, and it has ended by itself"])
def test_a_workload_whose_run_has_ended_is_swept_up_and_nobody_elses(
    plane: Plane, cluster: StandInCluster, another: Callable[[], Plane], whose: str
) -> None:
    """A control plane was killed after it sent, and before it could see that the run had been cancelled."""
    job = plane.running()
    workload = cluster.of(job.run_id)
    plane.runs.advance(plane.runs.live()[0], [S.CANCELLED], reason="by another leader")
    if "another" in whose:
        workload["metadata"]["labels"]["twinstep.dev/run"] = "run-of-others"
    if "by itself" in whose:
        cluster.ends(job.run_id)
    another().passes(2)
    assert (workload["metadata"].get("deletionTimestamp") is not None) == (whose == "ours")
    assert plane.run(job).state is S.CANCELLED


def test_workloads_that_have_ended_and_stay_for_a_while_cost_no_request(
    plane: Plane, cluster: StandInCluster, another: Callable[[], Plane]
) -> None:
    """A thousand of them, a day long, would keep the thread that looks after live runs from doing so."""
    for job in [plane.running(), plane.running()]:
        cluster.ends(job.run_id)
    plane.passes()
    cluster.asked.clear()
    another().passes(2)
    assert cluster.asked == []


def away(call: str, run_id: str) -> None:
    raise UnavailableError("the API server does not answer", remedy="wait")


def test_an_api_server_that_is_away_is_told_of_and_asked_ever_more_seldom(
    plane: Plane, cluster: StandInCluster
) -> None:
    job = plane.submit()
    cluster.fail = away
    for _ in range(600):  # ten minutes, a pass a second
        plane.reconciler.run_once()
        plane.clock.now += 1
    assert "the API server does not answer" in plane.run(job).reason
    assert 10 <= len(cluster.asked) <= 30, "bounded: once a minute in the end"
    cluster.fail = lambda call, run_id: None
    plane.passes(4)
    assert plane.run(job).state is S.STARTING


def test_a_server_that_is_away_is_not_asked_for_every_run_of_a_pass(plane: Plane, cluster: StandInCluster) -> None:
    jobs = [plane.submit() for _ in range(20)]
    cluster.fail = away
    plane.reconciler.run_once()
    assert len(cluster.asked) == reconcile.MAX_IN_A_ROW
    cluster.fail = lambda call, run_id: None
    plane.passes(3)
    assert {plane.run(job).state for job in jobs} == {S.STARTING}
    assert sorted(cluster.made) == sorted(job.run_id for job in jobs)


def test_an_answer_that_was_lost_after_the_object_was_stored_makes_no_second(
    plane: Plane, cluster: StandInCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, whole = plane.submit(), cluster.apply

    def lost(*args: Any, **options: Any) -> Any:
        whole(*args, **options)
        raise UnavailableError("the answer did not come", remedy="wait")

    with monkeypatch.context() as patch:
        patch.setattr(cluster, "apply", lost)
        plane.passes()
    plane.passes(3)
    assert cluster.made == [job.run_id]
    assert plane.run(job).state is S.STARTING
    plane.service.check_token(job.run_id, cluster.secrets[job.run_id])


def test_what_the_cluster_refuses_fails_at_once_with_its_words(plane: Plane, cluster: StandInCluster) -> None:
    job = plane.submit()
    cluster.refuses = "spec.replicatedJobs: too many"
    plane.passes(3)
    run = plane.run(job)
    assert (run.state, cluster.asked.count("apply")) == (S.FAILED, 1)
    assert "too many" in run.reason


def test_a_name_that_is_taken_is_waited_for_and_not_for_ever(plane: Plane, cluster: StandInCluster) -> None:
    job = plane.launched()
    workload = cluster.of(job.run_id)
    other = plane.submit()
    with_name = {**workload, "metadata": {**workload["metadata"], "labels": {"twinstep.dev/run": "run-of-others"}}}
    name = plane.reconciler._rendered(plane.runs.live()[1]).name
    with_name["metadata"]["name"] = name
    cluster.there["JobSet", "default", name] = with_name
    plane.passes(3)
    assert "is there already" in plane.run(other).reason
    assert plane.run(other).state is S.QUEUED
    plane.passes(30)
    assert plane.run(other).state is S.FAILED
    assert cluster.there["JobSet", "default", name] is with_name, "what is not ours stays"


def test_the_trouble_of_one_run_stops_no_other(plane: Plane, cluster: StandInCluster) -> None:
    bad, good = plane.launched(), plane.launched()
    cluster.of(bad.run_id).pop("spec")  # what no look can be made of
    cluster.ready(good.run_id)
    plane.passes()
    assert plane.run(good).state is S.RUNNING
    assert "is tried again: KeyError" in plane.run(bad).reason


# ---- what happens to objects ----


def test_objects_that_somebody_else_deleted_end_the_run_and_come_not_back(
    plane: Plane, cluster: StandInCluster
) -> None:
    job = plane.running()
    cluster.there.clear()
    plane.passes(5)
    run = plane.run(job)
    assert run.state is S.FAILED
    assert "somebody else deleted them" in run.reason
    assert cluster.made == [job.run_id]


def test_the_mirror_alone_ends_no_run(plane: Plane, cluster: StandInCluster) -> None:
    job = plane.running()
    cluster.late = {}
    plane.passes(5)
    assert plane.run(job).state is S.RUNNING
    cluster.filled = False
    cluster.fail = away
    plane.passes(5)
    assert plane.run(job).state is S.RUNNING


def test_a_workload_that_the_mirror_never_sees_is_not_asked_for_at_each_pass_and_can_be_cancelled(
    plane: Plane, cluster: StandInCluster
) -> None:
    job = plane.running()
    cluster.late = {}  # somebody strips its labels
    for _ in range(10):
        plane.reconciler.run_once()
    assert cluster.asked.count("confirm") == 1
    plane.passes()
    plane.service.cancel_job(job.id)
    plane.passes(3)
    cluster.collect()
    plane.passes()
    assert plane.run(job).state is S.CANCELLED


def test_a_run_that_has_ended_has_ended_whatever_becomes_of_its_objects(
    plane: Plane, cluster: StandInCluster, another: Callable[[], Plane]
) -> None:
    job = plane.running()
    cluster.ends(job.run_id)
    plane.passes()
    cluster.there.clear()  # its time to live is over
    another().passes(3)
    assert plane.run(job).state is S.SUCCEEDED
    assert cluster.made == [job.run_id]


def test_restarts_never_fall(plane: Plane, cluster: StandInCluster) -> None:
    job = plane.running()
    seen = []
    for restarts in (1, 2, 0, 3, 1):
        cluster.ready(job.run_id, restarts=restarts)
        plane.passes()
        seen.append(plane.run(job).restarts)
    assert seen == [1, 2, 2, 3, 3]


def test_a_report_and_a_finding_agree_on_when_it_runs(plane: Plane, cluster: StandInCluster) -> None:
    job = plane.launched()
    report = ProgressRecord(seq=1, time=1.0, phase="training", step=1, total_steps=9)
    plane.store.ingest(job.run_id, [report])
    assert plane.run(job).state is S.RUNNING
    plane.passes()  # not all pods are ready in the cluster's eyes, and the worker reports
    assert plane.run(job).state is S.RUNNING
    cluster.restarting(job.run_id, 1)
    plane.passes()
    assert plane.run(job).state is S.RESTARTING
    plane.store.ingest(job.run_id, [report.model_copy(update={"seq": 2})])
    plane.passes(2)
    assert plane.run(job).state is S.RUNNING, "it reports again, and goes not back and forth"


# ---- wishes ----


@pytest.mark.parametrize("at", ["pending", "launched", "running"])
def test_a_cancelled_run_is_cancelled_once_its_objects_are_gone(plane: Plane, cluster: StandInCluster, at: str) -> None:
    job = {"pending": plane.submit, "launched": plane.launched, "running": plane.running}[at]()
    plane.service.cancel_job(job.id)
    plane.passes(2)
    if at != "pending":
        assert plane.run(job).state not in (S.CANCELLED,), "its pods may still hold their nodes"
        assert "is being taken down" in plane.run(job).reason
        cluster.ends(job.run_id, "Failed", reason="FailedJobs", message="pods were told to stop")
        plane.passes()
        cluster.collect()
        plane.passes(2)
    assert plane.run(job).state is S.CANCELLED
    assert cluster.there == {}


def test_a_run_that_took_too_long_is_stopped_and_says_its_limit(
    plane: Plane, cluster: StandInCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = plane.running(runtime={"max_seconds": 3600})
    later, passed = time.time() + 3601, uptime() + 3601
    monkeypatch.setattr("twinstep.platform.scheduler.cluster.reconcile.time.time", lambda: later)
    monkeypatch.setattr("twinstep.platform.scheduler.cluster.reconcile.uptime", lambda: passed)
    plane.passes(2)
    assert cluster.asked.count("delete") == 1
    cluster.collect()
    plane.passes(2)
    run = plane.run(job)
    assert (run.state, "runtime.max_seconds is 3600" in run.reason) == (S.FAILED, True)


def waits_for_quota(cluster: StandInCluster, run_id: str) -> None:
    workload = cluster.of(run_id)
    workload["spec"]["suspend"] = True
    workload["metadata"].setdefault("labels", {})["kueue.x-k8s.io/queue-name"] = "here"


def test_a_run_that_waits_in_its_queue_for_too_long_leaves_it_and_says_so(
    plane: Plane, cluster: StandInCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = plane.launched(runtime={"max_wait_seconds": 3600})
    waits_for_quota(cluster, job.run_id)
    plane.passes()
    assert plane.run(job).state is S.QUEUED
    later, passed = time.time() + 3601, uptime() + 3601
    monkeypatch.setattr("twinstep.platform.scheduler.cluster.reconcile.time.time", lambda: later)
    monkeypatch.setattr("twinstep.platform.scheduler.cluster.reconcile.uptime", lambda: passed)
    plane.passes(2)
    assert cluster.asked.count("delete") == 1
    assert "its queue" in plane.run(job).reason, "it says what it waited for"
    cluster.collect()
    plane.passes(2)
    run = plane.run(job)
    assert (run.state, "runtime.max_wait_seconds is 3600" in run.reason) == (S.FAILED, True), run.reason
    assert run.waiting_since is None
    assert cluster.there == {}
    assert "max_wait_seconds" in plane.service.explain_job(job.id).next_step


def without_a_node(since: float) -> dict[str, Any]:
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes are available: insufficient google.com/tpu",
        "lastTransitionTime": datetime.fromtimestamp(since, UTC).isoformat(),
    }
    return {"metadata": {"name": "p-0", "labels": {}}, "status": {"phase": "Pending", "conditions": [condition]}}


def test_a_run_that_is_admitted_and_gets_no_nodes_waits_and_for_too_long_ends_and_says_for_what(
    plane: Plane, cluster: StandInCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = plane.launched(runtime={"max_wait_seconds": 3600, "max_seconds": 60})
    plane.passes()
    begun = plane.run(job)
    assert begun.state is S.STARTING
    cluster.pods[job.run_id] = [without_a_node(time.time() - 61)]
    plane.passes()
    run = plane.run(job)
    assert (run.state, run.waiting_since) == (S.QUEUED, begun.active_since), "it never got what it waits for"
    assert run.active_since is None, "its time limit counts no waiting"
    told = plane.service.explain_job(job.id)
    assert (told.cause, "insufficient google.com/tpu" in told.text) == ("no_nodes", True), told
    later, passed = time.time() + 3601, uptime() + 3601
    monkeypatch.setattr("twinstep.platform.scheduler.cluster.reconcile.time.time", lambda: later)
    monkeypatch.setattr("twinstep.platform.scheduler.cluster.reconcile.uptime", lambda: passed)
    plane.passes(2)
    assert cluster.asked.count("delete") == 1
    cluster.pods[job.run_id] = []  # they go first
    plane.passes()
    cluster.collect()
    plane.passes(2)
    run = plane.run(job)
    assert (run.state, cluster.there) == (S.FAILED, {})
    told = plane.service.explain_job(job.id)
    (event,) = [each for each in plane.store.events(job.id).items if each.data.get("to") == S.FAILED]
    for words in (run.reason, event.reason, told.text):
        assert "runtime.max_wait_seconds is 3600" in words
        assert "insufficient google.com/tpu" in words
    assert (told.cause, "max_wait_seconds" in told.next_step) == ("wait_limit", True)


@pytest.mark.parametrize("reports", [False, True])
def test_a_run_that_had_nodes_waits_since_it_lost_them_and_no_second_is_counted_twice(
    plane: Plane, cluster: StandInCluster, monkeypatch: pytest.MonkeyPatch, reports: bool
) -> None:
    job = plane.launched(runtime={"max_wait_seconds": 600})
    plane.passes()
    if reports:  # before its processes have met
        first = ProgressRecord(seq=1, time=1.0, phase="starting", step=0, total_steps=9)
        plane.store.ingest(job.run_id, [first])
    begun = plane.run(job)
    assert (begun.state, begun.active_since is not None) == (S.RUNNING if reports else S.STARTING, True)
    now, passed = time.time(), uptime()
    monkeypatch.setattr("twinstep.platform.scheduler.cluster.reconcile.time.time", lambda: now + 700)
    monkeypatch.setattr("twinstep.platform.scheduler.cluster.reconcile.uptime", lambda: passed + 700)
    lost = float(int(now) + 600)
    cluster.pods[job.run_id] = [without_a_node(lost + 30), without_a_node(lost)]
    plane.passes(2)
    run = plane.run(job)
    assert (run.state, run.waiting_since, "delete" in cluster.asked) == (S.QUEUED, lost, False)
    assert (run.active_since, run.active_seconds) == (None, lost - (begun.active_since or 0.0))


def test_a_run_waits_for_nodes_until_its_processes_have_met(plane: Plane, cluster: StandInCluster) -> None:
    job = plane.launched()
    plane.passes()
    first = ProgressRecord(seq=1, time=1.0, phase="starting", step=0, total_steps=9)
    plane.store.ingest(job.run_id, [first])
    cluster.pods[job.run_id] = [without_a_node(time.time() - 61)]
    plane.passes()
    assert plane.run(job).state is S.QUEUED
    plane.store.ingest(job.run_id, [first.model_copy(update={"seq": 2})])
    plane.passes()
    assert plane.run(job).state is S.QUEUED, "the first process goes on reporting that it starts"
    cluster.pods[job.run_id] = []
    plane.passes()
    plane.store.ingest(job.run_id, [first.model_copy(update={"seq": 3, "phase": "compiling"})])
    cluster.pods[job.run_id] = [without_a_node(time.time() - 61)]
    plane.passes()
    assert plane.run(job).state is S.RUNNING, "what misses a node now is not what it needs"


def test_a_run_that_gets_its_nodes_late_starts_and_its_wait_is_over(plane: Plane, cluster: StandInCluster) -> None:
    job = plane.launched(runtime={"max_wait_seconds": 3600})
    cluster.pods[job.run_id] = [without_a_node(time.time() - 61)]
    plane.passes()
    assert plane.run(job).state is S.QUEUED
    cluster.pods[job.run_id] = []
    plane.passes()
    run = plane.run(job)
    assert (run.state, run.waiting_since) == (S.STARTING, None)
    cluster.ready(job.run_id)
    plane.passes()
    assert plane.run(job).state is S.RUNNING


def test_a_restart_that_gets_no_nodes_waits_and_goes_on_as_the_same_run(plane: Plane, cluster: StandInCluster) -> None:
    job = plane.running()
    cluster.restarting(job.run_id, 1)
    plane.passes()
    cluster.pods[job.run_id] = [without_a_node(time.time() - 61)]
    plane.passes()
    assert (plane.run(job).state, plane.run(job).restarts) == (S.QUEUED, 1)
    cluster.pods[job.run_id] = []
    plane.passes()
    assert plane.run(job).state is S.STARTING
    cluster.ready(job.run_id, restarts=1)
    plane.passes()
    assert (plane.run(job).state, plane.run(job).restarts, cluster.made) == (S.RUNNING, 1, [job.run_id])


def test_a_wait_begins_anew_where_a_run_is_taken_off_its_nodes_or_resumed(
    plane: Plane, cluster: StandInCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = plane.running(runtime={"max_wait_seconds": 3600})
    assert plane.run(job).waiting_since is None
    begun = time.time()
    waits_for_quota(cluster, job.run_id)
    plane.passes()
    run = plane.run(job)
    assert (run.state, run.waiting_since is not None and run.waiting_since >= begun) == (S.QUEUED, True)
    plane.service.verbs.suspend(job.id, actor="user")
    now, passed = time.time, uptime()
    for module in ("scheduler.cluster.reconcile", "store.attempts"):
        monkeypatch.setattr(f"twinstep.platform.{module}.time.time", lambda: now() + 7200)
    monkeypatch.setattr("twinstep.platform.scheduler.cluster.reconcile.uptime", lambda: passed + 7200)
    plane.passes(2)
    assert "delete" not in cluster.asked, "who suspends a run lets it wait"
    plane.service.verbs.resume(job.id, actor="user")
    plane.passes(2)
    assert "delete" not in cluster.asked, "from the resume on it may wait as long as before"


@pytest.mark.parametrize("jump", [90_000, -90_000])
def test_a_clock_that_is_set_ends_no_wait(
    plane: Plane, cluster: StandInCluster, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    job = plane.launched(runtime={"max_wait_seconds": 3600})
    waits_for_quota(cluster, job.run_id)
    plane.passes()
    now = time.time
    monkeypatch.setattr("twinstep.platform.scheduler.cluster.reconcile.time.time", lambda: now() + jump)
    plane.passes(2)
    assert "delete" not in cluster.asked
    assert plane.run(job).state is S.QUEUED


@pytest.mark.parametrize("jump", [90_000, -90_000])
def test_a_clock_that_is_set_takes_no_runs_time(
    plane: Plane, cluster: StandInCluster, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    job = plane.running(runtime={"max_seconds": 3600})
    now, passed = time.time, uptime()
    monkeypatch.setattr("twinstep.platform.scheduler.cluster.reconcile.time.time", lambda: now() + jump)
    plane.passes(2)
    assert plane.run(job).state is S.RUNNING
    monkeypatch.setattr("twinstep.platform.scheduler.cluster.reconcile.time.time", lambda: now() + jump + 3601)
    monkeypatch.setattr("twinstep.platform.scheduler.cluster.reconcile.uptime", lambda: passed + 3601)
    plane.passes(2)
    assert cluster.asked.count("delete") == 1, "the time that has passed is counted still"


def test_the_first_pod_that_failed_stands_in_the_reason_and_stays_when_it_is_gone(
    plane: Plane, cluster: StandInCluster
) -> None:
    job = plane.running()

    def pod(host: int, code: int, reason: str, at: str) -> dict[str, Any]:
        labels = {"jobset.sigs.k8s.io/job-index": "0", "batch.kubernetes.io/job-completion-index": str(host)}
        ended = {"exitCode": code, "reason": reason, "finishedAt": at}
        status = {"containerStatuses": [{"name": "worker", "state": {"terminated": ended}}]}
        return {"metadata": {"name": f"p-{host}", "labels": labels}, "status": status}

    cluster.pods[job.run_id] = [
        pod(0, 1, "Error", "2026-01-01T00:00:09Z"),
        pod(1, 137, "OOMKilled", "2026-01-01T00:00:01Z"),
    ]
    plane.passes()
    cluster.pods[job.run_id] = []
    cluster.ends(job.run_id, "Failed", reason="ReachedMaxRestarts", message="jobset failed")
    plane.passes()
    run = plane.run(job)
    assert "host 1 of slice 0 (pod p-1) ran out of memory (OOMKilled)" in run.reason
    assert run.diagnosis is not None
    assert [each.exit_code for each in run.diagnosis.pods] == [137, 1]


# ---- leading, and how much it takes ----


def test_one_that_does_not_lead_asks_and_writes_nothing(
    plane: Plane, cluster: StandInCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = plane.submit()
    monkeypatch.setattr(plane.reconciler, "_leads", lambda: False)
    plane.passes(3)
    assert (plane.run(job).state, cluster.asked) == (S.PENDING, [])
    assert plane.reconciler.age() is not None


@pytest.fixture
def many(plane: Plane) -> Plane:
    for _ in range(40):
        plane.submit()
    plane.passes(2)
    return plane


def test_a_pass_over_runs_of_which_nothing_changed_asks_the_store_once_and_writes_nothing(
    many: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for name in ("read", "write"):
        whole = getattr(many.store.database, name)
        monkeypatch.setattr(many.store.database, name, lambda w=whole, n=name: asked.append(n) or w())
    many.passes(2)
    asked.clear()
    many.passes()
    assert asked == ["read"]


def _changes(plane: Plane, job: JobDetail) -> list[str]:
    events = plane.service.list_events(job.id).items
    return [event.data["to"] for event in events if event.name == "state_changed"]


def test_runs_that_change_in_one_pass_share_a_transaction_and_each_has_its_event(
    plane: Plane, cluster: StandInCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinstep.platform.scheduler.cluster.reconcile.TOGETHER", 5)
    monkeypatch.setattr("twinstep.platform.scheduler.cluster.reconcile.TOGETHER_S", 60.0)
    jobs = [plane.running(name=f"run-{number}") for number in range(12)]
    for number, job in enumerate(jobs):
        cluster.ends(job.run_id) if number % 2 else cluster.restarting(job.run_id, 1)
    writes = []
    write = plane.store.database.write
    monkeypatch.setattr(plane.store.database, "write", lambda: (writes.append(1), write())[1])
    plane.passes()
    assert len(writes) == 3
    assert [plane.run(job).state for job in jobs] == [S.RESTARTING, S.SUCCEEDED] * 6
    for number, job in enumerate(jobs):
        assert _changes(plane, job)[-2:] == ["running", "succeeded" if number % 2 else "restarting"]
        assert (plane.run(job).finished_at is not None) == bool(number % 2)


@pytest.mark.parametrize("after", [False, True])
def test_a_control_plane_killed_while_it_writes_what_has_changed_leaves_nothing_lost_or_double(
    plane: Plane,
    cluster: StandInCluster,
    another: Callable[[], Plane],
    monkeypatch: pytest.MonkeyPatch,
    after: bool,
) -> None:
    jobs = [plane.running(name=f"run-{number}") for number in range(3)]
    for job in jobs:
        cluster.ends(job.run_id)
    advanced = ClusterRuns.advance_all

    def killed(self: ClusterRuns, moves: Any) -> Any:
        if after:
            advanced(self, moves)
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(ClusterRuns, "advance_all", killed)
        with pytest.raises(Crash):
            plane.passes()
    another().passes(2)
    for job in jobs:
        assert plane.run(job).state is S.SUCCEEDED
        assert _changes(plane, job).count("succeeded") == 1


def test_a_run_that_cannot_be_moved_keeps_no_other_of_its_pass(
    plane: Plane, cluster: StandInCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One was moved by another meanwhile, one is asked for what the table of moves does not know, one is gone."""
    jobs = [plane.running(name=f"run-{number}") for number in range(4)]
    for job in jobs:
        cluster.ends(job.run_id)
    moved, odd, gone, well = jobs
    advanced = ClusterRuns.advance_all

    def meddled(self: ClusterRuns, moves: Any) -> Any:
        if len(moves) > 1:
            plane.store.request_cancel(moved.run_id, actor="ada")
            with plane.store.database.write() as connection:
                connection.execute(delete(JobRow).where(JobRow.id == gone.id))
            moves = [(run, replace(move, path=[S.PENDING]) if run.id == odd.run_id else move) for run, move in moves]
        return advanced(self, moves)

    with monkeypatch.context() as patch:
        patch.setattr(ClusterRuns, "advance_all", meddled)
        plane.passes()
    assert [plane.run(job).state for job in (moved, odd, well)] == [S.RUNNING, S.RUNNING, S.SUCCEEDED]
    assert "cannot go from running to pending" in plane.run(odd).reason
    plane.passes()
    assert [plane.run(job).state for job in (moved, odd, well)] == [S.SUCCEEDED] * 3


def test_patience_grows_is_bounded_and_is_never_the_same_for_two() -> None:
    clock = Clock()
    patience = Patience(clock)
    waits = []
    for _ in range(12):
        patience.failed("r", "launch")
        before = clock.now
        while patience.waits("r", "launch"):
            clock.now += 0.05
        waits.append(clock.now - before)
    assert FIRST_S / 2 <= waits[0] <= FIRST_S + 0.1
    assert all(LONGEST_S / 2 <= each <= LONGEST_S + 0.1 for each in waits[-3:])
    assert len(set(waits)) > 6
    patience.worked("r", "launch")
    assert not patience.waits("r", "launch")
