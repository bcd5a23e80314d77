"""A run's objects in a cluster: applied once whatever fails between, never anybody else's, gone without a trace."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from fakekube.resources import BY_KIND
from fakekube.server import FakeServer

from twinstep.platform.scheduler.cluster.kube import KubeCluster
from twinstep.platform.scheduler.cluster.kube_api import Access, KubeApi
from twinstep.platform.scheduler.cluster.port import WorkloadRef
from twinstep.platform.scheduler.cluster.watch import Watcher
from twinstep.platform.scheduler.render.render import RenderedRun, render
from twinstep.spec.errors import ConflictError, NotFoundError, SpecError, UnavailableError
from twinstep.spec.parse import parse_spec

IMAGE = "registry.example/worker@sha256:" + "0" * 64
TPU = {"kind": "tpu", "generation": "v5p", "topology": "2x2x2"}
GPU = {"kind": "gpu", "model": "h100", "count": 8}
Wait = Callable[..., Any]


def rendered(run_id: str = "r1", accelerator: dict[str, Any] = TPU, **kubernetes: Any) -> RenderedRun:
    spec = {"name": "two", "accelerator": accelerator, "kubernetes": {"image": IMAGE, **kubernetes}}
    return render(parse_spec(yaml.safe_dump(spec)), run_id=run_id, job_id="j1", api_url="http://10.0.0.1:8765")


@pytest.fixture
def api(server: FakeServer) -> Iterator[KubeApi]:
    api = KubeApi(Access(kubeconfig=server.kubeconfig))
    yield api
    api.close()


@pytest.fixture
def cluster(api: KubeApi) -> Iterator[KubeCluster]:
    watcher = Watcher(api, watch_seconds=2)
    yield KubeCluster(api, watcher)
    watcher.stop()


def placed(server: FakeServer) -> dict[tuple[str, str], dict[str, Any]]:
    kinds = ("JobSet", "RayJob", "ConfigMap", "ServiceAccount", "NetworkPolicy", "Secret")
    return {(kind, found["metadata"]["name"]): found for kind in kinds for found in server.all(kind)}


@pytest.mark.parametrize("accelerator", [TPU, GPU])
def test_everything_is_there_and_belongs_to_the_workload(
    server: FakeServer, cluster: KubeCluster, accelerator: dict[str, Any]
) -> None:
    run = rendered(accelerator=accelerator)
    ref = cluster.apply("r1", run.objects, token="secret-of-the-run")
    there = placed(server)
    assert set(there) == {(each["kind"], each["metadata"]["name"]) for each in run.objects} | {
        ("Secret", f"{run.name}-token")
    }
    workload = there.pop((run.workload["kind"], run.name))
    assert ref == WorkloadRef(
        kind=workload["kind"], namespace="default", name=run.name, uid=workload["metadata"]["uid"]
    )
    for each in there.values():
        (owner,) = each["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == (workload["kind"], ref.uid)
        assert each["metadata"]["labels"]["twinstep.dev/run"] == "r1"
    secret = there["Secret", f"{run.name}-token"]
    assert base64.b64decode(secret["data"]["token"]) == b"secret-of-the-run"
    managers = {each["manager"] for each in workload["metadata"]["managedFields"]}
    assert managers == {"twinstep"}


def test_applying_again_changes_nothing(server: FakeServer, cluster: KubeCluster) -> None:
    run = rendered()
    ref = cluster.apply("r1", run.objects)
    before = {key: found["metadata"]["resourceVersion"] for key, found in placed(server).items()}
    assert cluster.apply("r1", run.objects) == ref
    assert {key: found["metadata"]["resourceVersion"] for key, found in placed(server).items()} == before


STEPS = 16


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("at", range(STEPS))
def test_wherever_an_apply_breaks_off_the_next_one_finishes_it(
    server: FakeServer, cluster: KubeCluster, at: int, stored: bool
) -> None:
    run = rendered()
    fault = server.faults.drop(stored=stored, times=0)
    before = server.faults.take

    count = 0

    def take(*asked: Any) -> Any:
        nonlocal count
        count += 1
        if count == at + 1:
            fault.left = 1
        return before(*asked)

    server.faults.take = take  # type: ignore[method-assign]
    try:
        ref = cluster.apply("r1", run.objects, token="one")
    except UnavailableError:
        ref = cluster.apply("r1", run.objects, token="two")
    assert fault.hits == (1 if at < count else 0)
    there = placed(server)
    assert len(there) == len(run.objects) + 1
    assert len(server.objects.history("JobSet", run.name)) == 1
    for key, each in there.items():
        if key[0] != "JobSet":
            assert [owner["uid"] for owner in each["metadata"]["ownerReferences"]] == [ref.uid]


@pytest.mark.parametrize("at", range(6, STEPS))
def test_an_adopted_workload_owns_all_that_an_unfinished_apply_left(
    server: FakeServer, cluster: KubeCluster, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    run, ask, asked = rendered(), KubeApi._open, 0

    def breaks_off(*args: Any, **kwargs: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked > at:
            raise UnavailableError("killed", remedy="")
        return ask(*args, **kwargs)

    monkeypatch.setattr(KubeApi, "_open", breaks_off)
    with contextlib.suppress(UnavailableError):
        cluster.apply("r1", run.objects, token="one")
    monkeypatch.setattr(KubeApi, "_open", ask)
    if not server.all("JobSet"):
        return
    ref = cluster.apply("r1", run.objects)  # no new token: pods may have started with the first one
    there = placed(server)
    assert len(there) == len(run.objects) + 1
    assert base64.b64decode(there["Secret", f"{run.name}-token"]["data"]["token"]) == b"one"
    for key, each in there.items():
        assert key[0] == "JobSet" or [owner["uid"] for owner in each["metadata"]["ownerReferences"]] == [ref.uid]


def test_a_secret_of_somebody_else_is_not_made_an_adopted_workloads(server: FakeServer, cluster: KubeCluster) -> None:
    run = rendered()
    cluster.apply("r1", run.objects)
    metadata = {"name": f"{run.name}-token", "namespace": "default", "labels": {"twinstep.dev/run": "another"}}
    server.put({"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "data": {}, "metadata": metadata})
    cluster.apply("r1", run.objects)
    assert "ownerReferences" not in placed(server)["Secret", f"{run.name}-token"]["metadata"]


@pytest.mark.parametrize("kind", ["JobSet", "ConfigMap", "ServiceAccount", "NetworkPolicy", "Secret"])
def test_what_is_somebody_elses_is_refused_by_name_and_left_alone(
    server: FakeServer, cluster: KubeCluster, kind: str
) -> None:
    run = rendered()
    ours = {each["kind"]: each for each in run.objects}
    name = f"{run.name}-token" if kind == "Secret" else ours[kind]["metadata"]["name"]
    foreign = {"apiVersion": "v1", "type": "Opaque", "data": {}} if kind == "Secret" else dict(ours[kind])
    metadata = {"name": name, "namespace": "default", "labels": {"twinstep.dev/run": "another"}}
    made = server.put({**foreign, "kind": kind, "metadata": metadata})
    with pytest.raises(ConflictError, match=f"has a {kind} {name} already, and it is not this run's"):
        cluster.apply("r1", run.objects, token="t")
    left = server.objects.get(kind, "default", name)
    assert left["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


def test_a_service_that_a_jobset_would_take_for_its_own_is_refused_by_name(
    server: FakeServer, cluster: KubeCluster
) -> None:
    run, ray = rendered(), rendered("r2", GPU)
    for name in (run.name, ray.name):
        metadata = {"name": name, "namespace": "default"}
        server.put({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"selector": {"app": "x"}}})
    with pytest.raises(ConflictError, match=f"has a Service {run.name} already"):
        cluster.apply("r1", run.objects, token="t")
    assert placed(server) == {}
    cluster.apply("r2", ray.objects, token="t")  # KubeRay's has another name


def test_one_that_is_being_deleted_is_waited_for(server: FakeServer, cluster: KubeCluster) -> None:
    run = rendered()
    metadata = {**run.workload["metadata"], "finalizers": ["x.example/y"]}
    server.put({**run.workload, "metadata": metadata})
    server.objects.delete(BY_KIND["JobSet"], "default", run.name)
    with pytest.raises(ConflictError, match="is being deleted"):
        cluster.apply("r1", run.objects)


def test_deleting_takes_all_along_and_says_when_there_was_nothing(server: FakeServer, cluster: KubeCluster) -> None:
    run = rendered()
    ref = cluster.apply("r1", run.objects, token="t")
    assert cluster.delete("r1", ref) is True
    assert placed(server) == {}
    assert cluster.delete("r1", ref) is False


def test_deleting_takes_along_what_an_unfinished_apply_left(server: FakeServer, cluster: KubeCluster) -> None:
    run = rendered()
    server.faults.answer(500, method="PATCH", path="/jobsets/")
    with pytest.raises(UnavailableError):
        cluster.apply("r1", run.objects, token="t")
    assert len(placed(server)) == 4
    server.put({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "other", "namespace": "default"}})
    assert cluster.delete("r1", WorkloadRef(kind="JobSet", namespace="default", name=run.name)) is False
    assert set(placed(server)) == {("Secret", "other")}


def test_another_of_the_same_name_is_neither_seen_nor_deleted_nor_suspended(
    server: FakeServer, cluster: KubeCluster
) -> None:
    run = rendered()
    old = cluster.apply("r1", run.objects)
    cluster.delete("r1", old)
    new = cluster.apply("r1", run.objects)
    assert new.uid != old.uid
    assert cluster.confirm("r1", old).workload is None
    assert cluster.delete("r1", old) is False
    with pytest.raises(NotFoundError):
        cluster.suspend("r1", old, True)
    assert cluster.confirm("r1", new).workload is not None
    assert cluster.confirm("r2", WorkloadRef(kind="JobSet", namespace="default", name=run.name)).workload is None


def test_a_suspended_workload_goes_on_again(server: FakeServer, cluster: KubeCluster) -> None:
    run = rendered()
    ref = cluster.apply("r1", run.objects)
    for wanted in (True, True, False):
        cluster.suspend("r1", ref, wanted)
        assert server.objects.get("JobSet", "default", run.name)["spec"]["suspend"] is wanted
    assert len(server.asked("PATCH", "/jobsets/", fieldManager="twinstep")) == 3  # applied; suspended once; resumed


def test_a_queued_workload_is_suspended_by_its_queue(server: FakeServer, cluster: KubeCluster) -> None:
    run = rendered(queue="team")
    ref = cluster.apply("r1", run.objects, token="t")
    secret = server.objects.get("Secret", "default", f"{run.name}-token")
    assert "kueue.x-k8s.io/queue-name" not in secret["metadata"]["labels"]
    with pytest.raises(UnavailableError, match="no Workload"):
        cluster.suspend("r1", ref, True)
    server.put(
        {
            "apiVersion": "kueue.x-k8s.io/v1beta2",
            "kind": "Workload",
            "metadata": {
                "name": "jobset-two-12345",
                "namespace": "default",
                "labels": {"kueue.x-k8s.io/job-uid": ref.uid},
                "ownerReferences": [
                    {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": run.name, "uid": ref.uid}
                ],
            },
            "spec": {
                "queueName": "team",
                "active": True,
                "podSets": [
                    {"name": "slice", "count": 2, "template": run.workload["spec"]["replicatedJobs"][0]["template"]
                     ["spec"]["template"]}
                ],
            },
        }
    )  # fmt: skip
    cluster.suspend("r1", ref, True)
    assert server.objects.get("Workload", "default", "jobset-two-12345")["spec"]["active"] is False
    assert server.objects.get("JobSet", "default", run.name)["spec"]["suspend"] is True  # as it was rendered
    seen = cluster.confirm("r1", ref)
    assert seen.admission is not None
    assert seen.admission["metadata"]["name"] == "jobset-two-12345"
    cluster.suspend("r1", ref, False)
    assert server.objects.get("Workload", "default", "jobset-two-12345")["spec"]["active"] is True


def test_what_the_cluster_refuses_is_a_fault_of_the_spec(server: FakeServer, cluster: KubeCluster) -> None:
    run = rendered()
    broken = {**run.workload, "spec": {**run.workload["spec"], "replicatedJobs": "none"}}
    with pytest.raises(SpecError, match="the cluster refuses the JobSet"):
        cluster.apply("r1", [*run.objects[:-1], broken])


def test_a_field_that_this_version_of_the_kind_lacks_is_a_fault_too(server: FakeServer, cluster: KubeCluster) -> None:
    run = rendered()
    strange = {**run.workload, "spec": {**run.workload["spec"], "paralelism": 1}}
    with pytest.raises(SpecError, match="not declared in schema"):
        cluster.apply("r1", [*run.objects[:-1], strange])


def test_a_missing_namespace_is_told_and_tried_again(server: FakeServer, cluster: KubeCluster) -> None:
    run = rendered(namespace="nowhere")
    with pytest.raises(UnavailableError, match="nowhere"):
        cluster.apply("r1", run.objects)


def test_the_look_and_the_confirmation_say_the_same(server: FakeServer, api: KubeApi, wait: Wait) -> None:
    watcher = Watcher(api, watch_seconds=2)
    cluster = KubeCluster(api, watcher)
    run = rendered()
    try:
        watcher.start()
        ref = cluster.apply("r1", run.objects)
        metadata = {
            "name": "p", "namespace": "default",
            "labels": {"twinstep.dev/run": "r1", "app.kubernetes.io/managed-by": "twinstep"},
        }  # fmt: skip
        spec = {"containers": [{"name": "worker", "image": "i"}]}
        server.put({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})

        def looked() -> Any:
            seen = cluster.look("r1", ref)
            return seen if seen is not None and seen.workload and seen.pods else None

        seen, asked = wait(looked), cluster.confirm("r1", ref)
        assert (seen.workload, seen.pods, seen.admission) == (asked.workload, asked.pods, asked.admission)
        assert cluster.age() is not None
    finally:
        watcher.stop()
