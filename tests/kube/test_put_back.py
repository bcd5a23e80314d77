"""What stands beside a run that goes on is put back where somebody deletes it; another's is left alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from clusterplane import Plane, left_of, times_made
from fakekube.admission import warm
from fakekube.kubelet import Work
from fakekube.server import FakeServer
from fakekube.simulation import Simulation

from twinstep.platform.scheduler.cluster import beside
from twinstep.platform.scheduler.cluster.beside import Beside
from twinstep.platform.scheduler.cluster.port import WorkloadRef

KINDS = ("ConfigMap", "ServiceAccount", "NetworkPolicy")


@pytest.fixture
def cluster(server: FakeServer) -> Simulation:
    warm()
    found = Simulation(server)
    found.kubelet.work = lambda pod: Work()
    return found


@pytest.fixture
def plane(tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    monkeypatch.setattr(beside, "AGAIN_S", 0.0)
    found = Plane(tmp_path, server.kubeconfig)
    yield found
    found.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_somebody_deletes_beside_a_running_job_is_put_back(
    plane: Plane, server: FakeServer, cluster: Simulation, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = plane.submit()
    plane.go_on(cluster, lambda: plane.state(job.id) == "running")
    (before,) = server.all(kind)
    cluster.world.delete(before)
    assert server.all(kind) == []
    plane.go_on(cluster, lambda: server.all(kind))
    (after,) = server.all(kind)
    for name in ("spec", "data", "immutable", "automountServiceAccountToken"):
        assert after.get(name) == before.get(name)
    for name in ("name", "namespace", "labels", "ownerReferences"):
        assert after["metadata"][name] == before["metadata"][name], name
    assert after["metadata"]["ownerReferences"][0]["uid"] == server.all("JobSet")[0]["metadata"]["uid"]
    assert f"somebody deleted its {kind} {before['metadata']['name']}: it is put back" in caplog.text
    assert plane.state(job.id) == "running"
    cluster.end()
    assert plane.until_ended(cluster, job.id) == "succeeded"
    assert times_made(server) == 1
    cluster.world.delete(server.all("JobSet")[0])
    plane.go_on(cluster, lambda: left_of(server, job.run_id) == [])


def test_another_object_of_that_name_is_left_alone_and_the_run_goes_on(
    plane: Plane, server: FakeServer, cluster: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    job = plane.submit()
    plane.go_on(cluster, lambda: plane.state(job.id) == "running")
    (own,) = server.all("ConfigMap")
    cluster.world.delete(own)
    name = own["metadata"]["name"]
    metadata = {"name": name, "namespace": own["metadata"]["namespace"]}
    uid = server.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"a": "b"}})["metadata"][
        "uid"
    ]
    for _ in range(3):
        cluster.step()
        plane.reconciler.run_once()
    assert [(each["metadata"]["uid"], each["data"]) for each in server.all("ConfigMap")] == [(uid, {"a": "b"})]
    assert plane.state(job.id) == "running"
    assert caplog.text.count("cannot be put back") == 1
    cluster.end()
    assert plane.until_ended(cluster, job.id) == "succeeded"


def test_nothing_is_put_back_of_a_run_that_has_ended_or_is_taken_down(
    plane: Plane, server: FakeServer, cluster: Simulation
) -> None:
    job = plane.submit()
    plane.go_on(cluster, lambda: plane.state(job.id) == "running")
    cluster.end()
    assert plane.until_ended(cluster, job.id) == "succeeded"
    cluster.world.delete(server.all("ConfigMap")[0])
    for _ in range(3):
        cluster.step()
        plane.reconciler.run_once()
    assert server.all("ConfigMap") == []


class _Asked:
    """A cluster that notes of which runs it was asked."""

    def __init__(self) -> None:
        self.runs: list[str] = []

    def put_back(self, run_id: str, *_: object) -> list[str]:
        self.runs.append(run_id)
        return []


def test_a_pass_asks_of_a_few_runs_and_all_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(beside.time, "monotonic", lambda: clock[0])
    cluster = _Asked()
    found = Beside(cluster)  # type: ignore[arg-type]
    names = [f"run-{number}" for number in range(3 * beside.EACH_PASS)]
    ref = WorkloadRef(kind="JobSet", namespace="default", name="a", uid="u")
    for number in range(1, 5):
        for name in names:
            found.stands(name, ref, list)
        found.see_to(until=clock[0] + 5.0)
        assert len(cluster.runs) == min(number, 3) * beside.EACH_PASS
        clock[0] += 1.0
    assert sorted(cluster.runs) == sorted(names)
    clock[0] += beside.AGAIN_S
    found.stands("run-0", ref, list)
    found.see_to(until=clock[0] + 5.0)
    assert cluster.runs[-1] == "run-0"
    found.stands("run-1", ref, list)
    found.see_to(until=clock[0] - 1.0)
    assert cluster.runs[-1] == "run-0"
