"""Retry, suspend, resume, resize: what each makes of a job in each state, once however often it is asked."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update
from stand_in_cluster import StandInCluster

from twinstep.cli.app import run
from twinstep.platform.api import create_app
from twinstep.platform.scheduler.attempts import Resize
from twinstep.platform.scheduler.cluster.reconcile import ClusterReconciler, Workers
from twinstep.platform.scheduler.service import Service
from twinstep.platform.settings import ClusterSettings, Settings
from twinstep.platform.store.cluster_runs import ClusterRuns
from twinstep.platform.store.records import JobDetail
from twinstep.platform.store.store import Store
from twinstep.platform.store.tables import JobRow
from twinstep.spec.errors import ConflictError, NotFoundError, SpecError, TwinstepError
from twinstep.spec.parse import validate_spec
from twinstep.spec.report import EventRecord
from twinstep.spec.states import FINAL, LIVE, RunState

S = RunState
IMAGE = "registry.example/worker@sha256:" + "a" * 64
TPU = {"kind": "tpu", "generation": "v5p", "topology": "2x2x2"}
GPU = {"kind": "gpu", "model": "h100", "count": 8}


class Plane:
    """A service and a cluster whose reconciler is driven by hand."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self.store, self.cluster = store, StandInCluster()
        self.service = Service(store, replace(settings, cluster=ClusterSettings(in_cluster=True)))
        self.verbs = self.service.verbs
        runs = ClusterRuns(store.database, changed=store.changes.bump)
        self.reconciler = ClusterReconciler(runs, self.cluster, workers=Workers(), every_seconds=0)

    def submit(self, accelerator: dict[str, Any] = TPU, **more: Any) -> JobDetail:
        engine = "torchrec" if accelerator["kind"] == "gpu" else "dense"
        spec = {"name": "a-job", "accelerator": accelerator, "kubernetes": {"image": IMAGE},
                "embedding": {"engine": engine}, **more}  # fmt: skip
        return self.service.submit_job(validate_spec(spec))

    def passes(self, count: int = 3) -> None:
        for _ in range(count):
            self.reconciler.run_once()
            self.cluster.collect()

    def running(self, **more: Any) -> JobDetail:
        job = self.submit(**more)
        self.passes()
        self.cluster.ready(job.run_id)
        self.passes()
        assert self.state(job) is S.RUNNING
        return job

    def ended(self, state: RunState) -> JobDetail:
        job = self.submit()
        path = {S.SUCCEEDED: [S.QUEUED, S.STARTING, state]}.get(state, [state])
        for number, to in enumerate(path, start=1):
            self.store.move(job.run_id, to=to, if_version=number, reason="so it went", actor="scheduler")
        return job

    def state(self, job: JobDetail) -> RunState:
        return self.service.get_job(job.id).state

    def events(self, job: JobDetail) -> list[str]:
        return [event.name for event in self.service.list_events(job.id).items]


@pytest.fixture
def plane(store: Store, settings: Settings) -> Plane:
    return Plane(store, settings)


VERBS: dict[str, Callable[[Plane, str], Any]] = {
    "retry": lambda plane, job_id: plane.verbs.retry(job_id, actor="ada"),
    "suspend": lambda plane, job_id: plane.verbs.suspend(job_id, actor="ada"),
    "resume": lambda plane, job_id: plane.verbs.resume(job_id, actor="ada"),
    "resize": lambda plane, job_id: plane.verbs.resize(job_id, Resize(topology="2x2x1"), actor="ada"),
}
TABLE = {
    ("retry", S.FAILED): 2, ("retry", S.CANCELLED): 2, ("retry", S.SUCCEEDED): None, ("retry", S.RUNNING): None,
    ("resume", S.FAILED): 2, ("resume", S.CANCELLED): 2, ("resume", S.SUCCEEDED): None, ("resume", S.RUNNING): 1,
    ("suspend", S.FAILED): None, ("suspend", S.CANCELLED): None, ("suspend", S.SUCCEEDED): None,
    ("suspend", S.RUNNING): 1,
    ("resize", S.FAILED): 2, ("resize", S.CANCELLED): 2, ("resize", S.SUCCEEDED): None, ("resize", S.RUNNING): 2,
}  # fmt: skip
"""Attempts there are afterwards; None: refused."""


@pytest.mark.parametrize(("verb", "state"), TABLE)
def test_each_verb_in_each_state(plane: Plane, verb: str, state: RunState) -> None:
    job = plane.running() if state is S.RUNNING else plane.ended(state)
    attempts = TABLE[verb, state]
    before = plane.events(job)
    if attempts is None:
        with pytest.raises(ConflictError) as refused:
            VERBS[verb](plane, job.id)
        assert refused.value.remedy
        assert plane.events(job) == before
    else:
        VERBS[verb](plane, job.id)
    runs = plane.service.list_runs(job.id)
    assert [run.attempt for run in runs] == list(range(1, (attempts or 1) + 1))
    if attempts == 2:
        assert runs[1].state is S.PENDING
        assert runs[1].resumed_from == (None if verb == "retry" else runs[0].id)


@pytest.mark.parametrize("verb", VERBS)
def test_a_job_that_is_not_there_is_not_found(plane: Plane, verb: str) -> None:
    with pytest.raises(NotFoundError):
        VERBS[verb](plane, "job-0")


def test_a_job_that_failed_is_tried_again_and_is_as_its_newest_run_is(plane: Plane) -> None:
    job = plane.running()
    plane.cluster.ends(job.run_id, "Failed", reason="FailedJobs")
    plane.passes(1)
    again, new = plane.verbs.retry(job.id, actor="ada")
    assert (again.state, again.attempt, new) == (S.PENDING, 2, True)
    plane.passes()
    plane.cluster.ready(again.run_id)
    plane.passes()
    assert plane.state(job) is S.RUNNING
    assert plane.cluster.made == [job.run_id, again.run_id]
    assert plane.service.list_runs(job.id)[0].state is S.FAILED


def test_a_further_run_says_from_which_checkpoint_it_goes_on(plane: Plane) -> None:
    job = plane.running()
    plane.cluster.ends(job.run_id, "Failed", reason="FailedJobs")
    plane.passes(1)
    again, _ = plane.verbs.retry(job.id, actor="ada")
    assert again.reason.startswith("retried by ada, from the beginning: it has saved no checkpoint; ")
    for seq, step in enumerate((100, 200), start=1):
        saved = EventRecord(seq=seq, time=1.0, name="checkpoint_saved", reason="is whole", data={"step": step})
        plane.store.ingest(again.run_id, [saved])
    assert plane.store.saved_step(job.id) == 200
    plane.passes()
    plane.cluster.ends(again.run_id, "Failed", reason="FailedJobs")
    plane.passes(1)
    assert "it goes on from its checkpoint of step 200" in plane.service.explain_job(job.id).text
    third, _ = plane.verbs.resume(job.id, actor="ada")
    assert third.reason.startswith("resumed by ada, going on from attempt 2, from its checkpoint of step 200; ")
    assert plane.service.explain_job(job.id).text.endswith(" Attempt 3 goes on from its checkpoint of step 200.")


def test_a_suspended_run_gives_its_nodes_back_and_goes_on_when_it_may(plane: Plane) -> None:
    job = plane.running()
    for _ in range(2):
        plane.verbs.suspend(job.id, actor="ada")
        plane.passes()
    assert plane.state(job) is S.QUEUED
    assert plane.service.get_job(job.id).reason == "is suspended, as it was asked to be"
    assert plane.cluster.of(job.run_id)["spec"]["suspend"] is True
    for _ in range(2):
        assert plane.verbs.resume(job.id, actor="ada")[1] is False
        plane.passes()
    assert plane.cluster.of(job.run_id)["spec"]["suspend"] is False
    assert plane.state(job) is S.RUNNING
    assert plane.cluster.made == [job.run_id], "it is the same run"
    names = plane.events(job)
    assert (names.count("suspend_requested"), names.count("resume_requested")) == (1, 1)
    assert (plane.cluster.asked.count("suspend"), plane.cluster.asked.count("unsuspend")) == (1, 1)


def test_a_run_suspended_for_days_is_neither_sent_again_nor_stopped_for_its_time_limit(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = plane.running(runtime={"max_seconds": 3600})
    plane.verbs.suspend(job.id, actor="ada")
    plane.passes()
    before = len(plane.cluster.asked)
    now = plane.store.run(job.run_id).created_at
    for day in range(1, 8):
        there = now + day * 86400
        monkeypatch.setattr("twinstep.platform.scheduler.cluster.reconcile.time.time", lambda there=there: there)
        plane.passes(5)
    assert len(plane.cluster.asked) == before, "no hot loop"
    assert (plane.state(job), plane.cluster.made) == (S.QUEUED, [job.run_id])


def test_a_run_that_somebody_else_suspends_says_so_and_goes_on_once_it_may(plane: Plane) -> None:
    job = plane.running()
    plane.cluster.of(job.run_id)["spec"]["suspend"] = True  # kubectl patch
    plane.passes()
    said = plane.service.explain_job(job.id)
    assert (plane.state(job), said.cause) == (S.QUEUED, "suspended")
    assert "twinstep resume" in said.next_step
    assert "suspend" not in plane.cluster.asked, "whoever did it meant it"
    for _ in range(2):
        plane.verbs.resume(job.id, actor="ada")
        plane.passes()
    assert plane.cluster.of(job.run_id)["spec"]["suspend"] is False
    assert (plane.state(job), plane.cluster.made) == (S.RUNNING, [job.run_id])
    assert plane.events(job).count("resume_requested") == 1
    assert plane.cluster.asked.count("unsuspend") == 1


def test_a_run_that_somebody_else_lets_go_on_is_suspended_still(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinstep.platform.scheduler.cluster.reconcile.SETTLE_S", 0.0)
    job = plane.running()
    plane.verbs.suspend(job.id, actor="ada")
    plane.passes()
    plane.cluster.of(job.run_id)["spec"]["suspend"] = False
    plane.passes()
    assert plane.cluster.of(job.run_id)["spec"]["suspend"] is True
    assert plane.state(job) is S.QUEUED
    plane.verbs.resume(job.id, actor="ada")
    plane.passes()
    assert (plane.state(job), plane.cluster.made) == (S.RUNNING, [job.run_id])


def test_what_is_suspended_before_it_was_sent_is_not_sent(plane: Plane) -> None:
    job = plane.submit()
    plane.verbs.suspend(job.id, actor="ada")
    plane.passes()
    assert (plane.state(job), plane.cluster.made) == (S.QUEUED, [])
    plane.verbs.resume(job.id, actor="ada")
    plane.passes()
    assert plane.cluster.made == [job.run_id]


def test_another_size_starts_once_the_one_before_has_stopped(plane: Plane) -> None:
    job = plane.running()
    size = Resize(topology="2x2x4", batch_size=64)
    resized, new = plane.verbs.resize(job.id, size, actor="ada")
    assert new
    assert plane.verbs.resize(job.id, size, actor="ada")[1] is False, "it has that size already"
    plane.reconciler.run_once()
    assert plane.cluster.made == [job.run_id]
    assert plane.service.get_job(job.id).reason == "waits for attempt 1 to stop"
    plane.passes(5)
    first, second = plane.service.list_runs(job.id)
    assert (first.state, second.state) == (S.CANCELLED, S.STARTING)
    assert plane.cluster.made == [job.run_id, resized.run_id]
    spec = plane.service.get_job(job.id).spec
    assert (spec["accelerator"]["topology"], spec["data"]["batch_size"]) == ("2x2x4", 64)
    assert second.spec == spec
    parallelism = plane.cluster.of(second.id)["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"]
    assert parallelism == 4


@pytest.mark.parametrize(
    ("accelerator", "size", "field"),
    [
        (TPU, {"topology": "2x2x3"}, "accelerator.topology"),
        (TPU, {"topology": "0x4"}, "accelerator.topology"),
        (TPU, {"slices": 0}, "accelerator.slices"),
        (TPU, {"slices": 2**31}, "accelerator.slices"),
        (TPU, {"gpus": 8}, "gpus"),
        (GPU, {"gpus": 12}, "accelerator.count"),
        (GPU, {"topology": "2x2x1"}, "topology"),
        (TPU, {"batch_size": 0}, "data.batch_size"),
        (TPU, {}, None),
    ],
)
def test_a_size_that_is_none_is_refused_by_field_and_the_run_goes_on(
    plane: Plane, accelerator: dict[str, Any], size: dict[str, Any], field: str | None
) -> None:
    job = plane.submit(accelerator)
    with pytest.raises(SpecError) as refused:
        plane.verbs.resize(job.id, Resize(**size), actor="ada")
    assert [fault.field for fault in refused.value.faults][:1] == ([field] if field else [])
    (run,) = plane.service.list_runs(job.id)
    assert (run.cancel_requested_at, run.state in LIVE) == (None, True)


def test_a_key_makes_one_run_whatever_happens_between(plane: Plane) -> None:
    job = plane.ended(S.FAILED)
    assert plane.verbs.retry(job.id, actor="ada", key="k")[1] is True
    assert plane.verbs.retry(job.id, actor="ada", key="k")[1] is False
    plane.service.cancel_job(job.id)
    plane.passes()
    assert plane.verbs.retry(job.id, actor="ada", key="k")[1] is False
    with pytest.raises(ConflictError, match="came with another request"):
        plane.verbs.resume(job.id, actor="ada", key="k")
    assert plane.verbs.retry(job.id, actor="bob", key="k")[1] is True, "the key is one user's own"
    assert len(plane.service.list_runs(job.id)) == 3


@pytest.mark.parametrize("key", ["the-same", None])
def test_of_many_who_retry_at_once_one_makes_a_run(plane: Plane, key: str | None) -> None:
    job = plane.ended(S.FAILED)
    barrier, said = threading.Barrier(8), []

    def ask() -> None:
        barrier.wait()
        try:
            said.append(plane.verbs.retry(job.id, actor="ada", key=key)[1])
        except TwinstepError as error:
            said.append(type(error))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(plane.service.list_runs(job.id)) == 2
    assert said.count(True) == 1
    assert set(said) - {True} == ({False} if key else {ConflictError})


def test_a_run_made_while_its_job_is_cancelled_is_the_one_that_stops(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resize asks the run before to stop, so that asking it once more says nothing new: the new one is meant."""
    job = plane.running()
    ask = plane.store.request_cancel

    def resized_first(run_id: str, *, actor: str) -> bool:
        monkeypatch.undo()
        plane.verbs.resize(job.id, Resize(topology="2x2x1"), actor="b")
        return ask(run_id, actor=actor)

    monkeypatch.setattr(plane.store, "request_cancel", resized_first)
    found = plane.service.cancel_job(job.id)
    assert (found.attempt, found.cancel_requested_at is None) == (2, False)


def test_a_job_whose_spec_a_later_version_wrote_is_refused_by_field(plane: Plane) -> None:
    job = plane.running()
    plane.service.cancel_job(job.id)
    plane.passes()
    with plane.store.database.write() as connection:
        later = job.spec | {"accelerator": job.spec["accelerator"] | {"generation": "v99"}}
        connection.execute(update(JobRow).where(JobRow.id == job.id).values(spec=later))
    for ask in (
        lambda: plane.verbs.retry(job.id, actor="a"),
        lambda: plane.verbs.resume(job.id, actor="a"),
        lambda: plane.service.plan_diff(validate_spec(job.spec), job.id),
    ):
        with pytest.raises(SpecError, match="the job's spec is not valid"):
            ask()


def test_a_local_job_is_resized_once_its_run_has_stopped(live, wait) -> None:
    job = live.submit("sleeps")
    live.when(job["id"], "running", "starting")
    answer = live.http.post(f"/v1/jobs/{job['id']}/resize", json={"batch_size": 8})
    assert answer.status_code == 201, answer.text
    assert answer.json()["spec"]["data"]["batch_size"] == 8

    def second_is_up() -> bool:
        runs = live.http.get(f"/v1/jobs/{job['id']}/runs").json()["items"]
        first, second = sorted(runs, key=lambda run: run["attempt"])
        assert second["started_at"] is None or first["finished_at"] is not None, "two runs of a job at once"
        return second["started_at"] is not None

    wait(second_is_up)
    live.http.post(f"/v1/jobs/{job['id']}/cancel")
    live.when(job["id"], "cancelled")


def test_a_local_job_is_tried_again_and_not_suspended(live) -> None:
    job = live.submit("crashes")
    live.when(job["id"], "failed")
    answer = live.http.post(f"/v1/jobs/{job['id']}/suspend")
    assert (answer.status_code, "own machine" in answer.json()["detail"]) == (409, True), answer.text
    key = {"Idempotency-Key": "once"}
    answers = [live.http.post(f"/v1/jobs/{job['id']}/retry", headers=key) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 200]
    live.when(job["id"], "failed")
    runs = live.http.get(f"/v1/jobs/{job['id']}/runs").json()["items"]
    assert [(run["attempt"], run["state"]) for run in runs] == [(1, "failed"), (2, "failed")]
    assert RunState(live.job(job["id"])["state"]) in FINAL


def test_the_routes_answer_with_the_job_or_with_what_to_do(plane: Plane) -> None:
    app, job = create_app(plane.service), plane.running()

    class http:
        @staticmethod
        def post(path: str, **options: Any) -> httpx.Response:
            async def ask() -> httpx.Response:
                transport = httpx.ASGITransport(app=app)
                async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                    return await client.post(path, **options)

            return asyncio.run(ask())

    path = f"/v1/jobs/{job.id}"
    assert http.post(f"{path}/suspend").status_code == 200
    assert http.post(f"{path}/resume").status_code == 200
    answer = http.post(f"{path}/resize", json={"topology": "2x2x1"})
    assert (answer.status_code, answer.headers["location"], answer.json()["attempt"]) == (201, path, 2)
    assert http.post(f"{path}/retry").status_code == 409
    for body in ({"topology": 4}, {"size": 9}, [], {"slices": True}, {"gpus": 1.5}):
        problem = http.post(f"{path}/resize", json=body)
        assert (problem.status_code, problem.json()["code"]) == (422, "invalid_request"), problem.text
    assert http.post(f"{path}/resize", content=b"{}", headers={"content-type": "text/plain"}).status_code == 415


def test_a_plan_says_what_would_be_different_and_nothing_else(plane: Plane) -> None:
    job = plane.submit()
    spec = plane.service.get_job(job.id).spec
    assert plane.service.plan_diff(validate_spec(spec), job.id) == ""
    larger = {**spec, "accelerator": {**spec["accelerator"], "topology": "2x2x4"}}
    lines = plane.service.plan_diff(validate_spec(larger), job.id).splitlines()
    changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert any("+" in line and "parallelism: 4" in line for line in changed)
    assert any("gke-tpu-topology: 2x2x4" in line for line in changed)
    assert not any("name:" in line for line in changed), "the same run keeps its names"
    with pytest.raises(NotFoundError):
        plane.service.plan_diff(validate_spec(spec), "job-0")


def test_the_commands_ask_for_each_verb_and_say_what_came_of_it(live, capsys: pytest.CaptureFixture[str]) -> None:
    job = live.submit("crashes")
    live.when(job["id"], "failed")

    def ask(*words: str) -> tuple[int, dict[str, Any]]:
        code = run([*words, "--url", str(live.http.base_url), "--json"])
        return code, json.loads(capsys.readouterr().out)

    code, said = ask("retry", job["id"])
    assert (code, said["job"]["attempt"]) == (0, 2)
    live.when(job["id"], "failed")
    code, said = ask("resume", job["name"])
    assert (code, said["job"]["attempt"]) == (0, 3)
    for words, kind in ((["suspend", job["id"]], "conflict"), (["resize", job["id"], "--gpus", "8"], "invalid_spec")):
        code, said = ask(*words)
        assert (code, said["error"]["code"]) == (2, kind)
        assert said["error"]["remedy"]


def test_a_cluster_that_cannot_be_read_ends_the_start_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    for words in (["--kubeconfig", str(tmp_path / "none")], ["--namespace", "ml"], ["--in-cluster", "--context", "a"]):
        assert run(["up", "--port", "0", "--data-dir", str(data), *words]) == 2
        assert "fix:" in capsys.readouterr().err
        assert not data.exists()


def test_a_job_is_as_old_as_its_submit_whatever_runs_follow(plane: Plane) -> None:
    job = plane.ended(S.FAILED)
    plane.verbs.retry(job.id, actor="ada")
    found = plane.service.get_job(job.id)
    first, second = plane.service.list_runs(job.id)
    assert (found.created_at, found.run_created_at) == (first.created_at, second.created_at)
    assert found.run_created_at > found.created_at == job.created_at
    assert plane.service.list_jobs().items[0].created_at == job.created_at


@pytest.mark.parametrize(
    ("accelerator", "asked", "there"),
    [
        (TPU, {"slice": 1}, "the only slice is 0"),
        (TPU, {"host": 2}, "give one of 0 to 1"),
        (TPU, {"restart": 1}, "the only restart is 0"),
        (GPU | {"count": 24}, {"host": 3}, "give one of 0 to 2"),
        (GPU, {"host": 1}, "the only host in a slice is 0"),
    ],
)
def test_a_log_of_a_host_that_there_is_not_says_which_there_are(
    plane: Plane, accelerator: dict[str, Any], asked: dict[str, int], there: str
) -> None:
    job = plane.submit(accelerator)
    app = create_app(plane.service)

    async def answers() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            fits = {name: number - 1 for name, number in asked.items()}
            return [await http.get(f"/v1/jobs/{job.id}/logs", params=each) for each in (asked, fits)]

    wrong, right = asyncio.run(answers())
    assert (wrong.status_code, wrong.json()["remedy"]) == (404, there)
    assert right.status_code == 200


def test_all_verbs_at_once_lose_nothing_and_double_nothing(plane: Plane) -> None:
    job = plane.running()
    verbs: dict[str, Callable[[int], Any]] = {
        "retry": lambda at: plane.verbs.retry(job.id, actor="ada", key=f"retry-{at % 3}")[1],
        "resume": lambda at: plane.verbs.resume(job.id, actor="ada")[1],
        "resize": lambda at: plane.verbs.resize(job.id, Resize(topology="2x2x4"), actor="ada", key=f"size-{at}")[1],
        "suspend": lambda at: plane.verbs.suspend(job.id, actor="ada") and False,
        "cancel": lambda at: plane.service.cancel_job(job.id, actor="ada") and False,
    }
    made, wrong, begin = list[bool](), list[BaseException](), threading.Barrier(20)

    def ask(number: int) -> None:
        begin.wait()
        for at in range(3):
            try:
                made.append(bool(verbs[list(verbs)[number % len(verbs)]](number + at)))
            except ConflictError:
                continue
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        plane.passes(1)
    assert wrong == []
    plane.service.cancel_job(job.id)
    plane.passes(20)
    runs = plane.service.list_runs(job.id)
    assert [run.attempt for run in runs] == list(range(1, sum(made) + 2))
    assert {run.state for run in runs} == {S.CANCELLED}
    events = [event for event in plane.service.list_events(job.id).items if event.name == "cancel_requested"]
    assert len({event.run_id for event in events}) == len(events)
    assert plane.cluster.workloads() == {}


@pytest.mark.parametrize("verb", ["retry", "resume", "resize"])
def test_of_a_job_whose_project_is_gone_no_run_begins_and_it_says_why(
    store: Store, settings: Settings, verb: str
) -> None:
    plane = Plane(store, settings)
    users = plane.service.accounts.users
    users.create_project("team", namespace="default", queue=None, image=None)
    spec = {"name": "a-job", "accelerator": TPU, "kubernetes": {"image": IMAGE}}
    job = plane.service.submit_job(validate_spec(spec), project="team")
    store.move(job.run_id, to=S.FAILED, if_version=1, reason="so it went", actor="scheduler")
    users.delete_project("team")
    size = (Resize(topology="2x2x1"),) if verb == "resize" else ()
    with pytest.raises(ConflictError, match=r"project team .* was deleted") as told:
        getattr(plane.verbs, verb)(job.id, *size, actor="user")
    assert "another project" in told.value.remedy
    assert len(plane.service.list_runs(job.id)) == 1
