"""Runs in a cluster in the store: what a pass reads, writes guarded by version, tokens of launches begun twice."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from twinstep.platform.scheduler.rundir import hash_token
from twinstep.platform.scheduler.service import Service
from twinstep.platform.settings import ClusterSettings, Settings
from twinstep.platform.store.cluster_runs import ClusterRun, ClusterRuns, Remark
from twinstep.platform.store.records import Workload
from twinstep.platform.store.store import Store
from twinstep.spec.errors import AuthError, SpecError, StateError, UnavailableError
from twinstep.spec.job import JobSpec
from twinstep.spec.states import RunState

TPU = {
    "accelerator": {"kind": "tpu", "generation": "v5p", "topology": "2x2x1"},
    "kubernetes": {"image": "registry.example/worker@sha256:" + "a" * 64},
}
POD = {"in_cluster": True}
OURS = Workload(kind="JobSet", namespace="default", name="tpu-12345")


def spec(name: str = "on-tpu", **more: object) -> JobSpec:
    return JobSpec.model_validate({"name": name, **TPU, **more})


@pytest.fixture
def runs(store: Store) -> ClusterRuns:
    return ClusterRuns(store.database, changed=store.changes.bump)


def the_run(runs: ClusterRuns) -> ClusterRun:
    (found,) = runs.live()
    return found


def test_each_reconciler_is_given_the_runs_of_its_own_backend(store: Store, runs: ClusterRuns) -> None:
    here, there = store.create_job(JobSpec(name="here")), store.create_job(spec())
    assert [run.id for run in runs.live()] == [there.run_id]
    assert [run.id for run in store.live_runs(backend="local")] == [here.run_id]
    assert {run.id for run in store.live_runs()} == {here.run_id, there.run_id}
    assert store.run(there.run_id).backend == "kubernetes"


def test_of_two_launches_at_one_version_one_may_send(store: Store, runs: ClusterRuns) -> None:
    store.create_job(spec())
    seen = the_run(runs)
    assert runs.begin_launch(seen, OURS, token_hash="a" * 64, reason="is sent") == 2
    assert runs.begin_launch(seen, OURS, token_hash="b" * 64, reason="is sent") is None
    now = the_run(runs)
    assert (now.state, now.cluster, now.version) == (RunState.QUEUED, OURS, 2)
    assert store.token_hashes(now.id) == ("a" * 64,)


def test_the_token_of_the_launch_before_stays_good_and_no_older_one(
    store: Store, runs: ClusterRuns, settings: Settings
) -> None:
    job = store.create_job(spec())
    service = Service(store, settings)
    for token in ("first", "second", "third"):
        assert runs.begin_launch(the_run(runs), OURS, token_hash=hash_token(token), reason="is sent")
    for token in ("third", "second"):
        service.check_token(job.run_id, token)
    for token in ("first", "", "fourth"):
        with pytest.raises(AuthError):
            service.check_token(job.run_id, token)


def test_a_path_of_moves_is_written_whole_or_not_at_all(store: Store, runs: ClusterRuns) -> None:
    job = store.create_job(spec())
    run = the_run(runs)
    with pytest.raises(StateError):
        runs.advance(run, [RunState.QUEUED, RunState.RUNNING], reason="too far")
    assert the_run(runs) == run
    assert runs.advance(run, [RunState.QUEUED, RunState.STARTING, RunState.RUNNING], reason="all at once")
    assert not runs.advance(run, [RunState.CANCELLED], reason="too late")
    assert (the_run(runs).state, the_run(runs).version) == (RunState.RUNNING, 4)
    changes = [event.data for event in store.events(job.id).items if event.name == "state_changed"]
    assert [change["to"] for change in changes] == ["queued", "starting", "running"]


def test_the_time_limit_counts_what_a_run_was_active_and_a_clock_set_back_takes_nothing(
    store: Store, runs: ClusterRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = store.create_job(spec())
    clock = itertools.chain([100, 110, 150, 300, 290, 400])  # queued, starting, queued, starting, queued, starting
    there = SimpleNamespace(time=lambda: float(next(clock)))
    monkeypatch.setattr("twinstep.platform.store.cluster_runs.time", there)
    to = [RunState.QUEUED, RunState.STARTING]
    for state in [*to, *to, *to]:
        runs.advance(the_run(runs), [state], reason="goes on")
    run = store.run(job.run_id)
    assert (run.active_seconds, run.active_since, run.started_at) == (40.0, 400.0, 110.0)


def test_remarks_need_no_new_version_and_lose_against_a_move(store: Store, runs: ClusterRuns) -> None:
    job = store.create_job(spec())
    run = the_run(runs)
    runs.remark([Remark(run=run, reason="waits for quota", restarts=0, diagnosis={"code": "WaitingForQuota"})])
    now = the_run(runs)
    assert (now.reason, now.version, now.diagnosis) == ("waits for quota", run.version, {"code": "WaitingForQuota"})
    runs.advance(now, [RunState.QUEUED], reason="moved")
    runs.remark([Remark(run=now, reason="late", restarts=9, diagnosis=None)])
    assert (the_run(runs).reason, the_run(runs).restarts) == ("moved", 0)
    assert store.job(job.id).restarts == 0


def test_pods_that_were_started_again_are_an_event(store: Store, runs: ClusterRuns) -> None:
    job = store.create_job(spec())
    runs.remark([Remark(run=the_run(runs), reason="for the 1st time", restarts=1, diagnosis=None)])
    assert [event.name for event in store.events(job.id).items] == ["submitted", "restarted"]
    assert store.job(job.id).restarts == 1


def test_a_run_that_has_ended_takes_no_note(store: Store, runs: ClusterRuns) -> None:
    job = store.create_job(spec())
    run = the_run(runs)
    assert runs.ended([run.id, "run-of-others"]) == {}
    runs.advance(run, [RunState.FAILED], reason="no")
    assert runs.note(run, if_version=2, suspended_at=1.0) is None
    assert runs.ended([run.id, "run-of-others"]) == {run.id: RunState.FAILED}
    assert store.job(job.id).state is RunState.FAILED


def test_a_tpu_job_is_taken_where_there_is_a_cluster_and_what_it_would_refuse_is_not(
    store: Store, settings: Settings
) -> None:
    with pytest.raises(SpecError, match="no tpu to run on here"):
        Service(store, settings).submit_job(spec())
    service = Service(store, replace(settings, cluster=ClusterSettings(in_cluster=True, namespaces=("default", "ml"))))
    bad = {
        "kubernetes.namespace": {**TPU["kubernetes"], "namespace": "other"},
        "kubernetes.image": {},
        "ConfigMap": {**TPU["kubernetes"], "env": {f"E{n}": "x" * 20_000 for n in range(99)}},
    }
    for field, kubernetes in bad.items():
        with pytest.raises(SpecError) as refused:
            service.submit_job(spec(kubernetes=kubernetes))
        assert any(field in fault.field for fault in refused.value.faults), refused.value.faults
    assert service.list_jobs().items == []
    assert service.submit_job(spec(kubernetes={**TPU["kubernetes"], "namespace": "ml"})).state is RunState.PENDING


@pytest.mark.parametrize(
    "wrong",
    [{}, {"in_cluster": True, "context": "c"}, {**POD, "namespaces": ()}, {**POD, "api_url": "twinstep:8765"}],
)
def test_cluster_settings_that_cannot_be_meant_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UnavailableError):
        ClusterSettings(**wrong)
