"""A control plane that is killed between any two steps loses no run, starts none twice, and leaves nothing behind."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusterplane import GPU, TPU, Killed, Plane, left_of, times_made
from fakekube.admission import warm
from fakekube.kubelet import Work
from fakekube.server import FakeServer
from fakekube.simulation import Simulation

from twinstep.platform.scheduler.rundir import hash_token
from twinstep.platform.store.records import JobDetail
from twinstep.spec.states import FINAL

STEPS = 46
"""As many as there are, or a few more: a step that is never reached is a run that nobody disturbs."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    warm()
    with FakeServer(tmp_path_factory.mktemp("cluster")) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(server: FakeServer) -> Simulation:
    found = Simulation(server)
    found.kubelet.work = lambda pod: Work(seconds=0.1)
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


class Planes:
    """One control plane after another on the same store."""

    def __init__(self, directory: Path, server: FakeServer) -> None:
        self._directory = directory
        self._server = server
        self.now = Plane(directory, server.kubeconfig)

    def take_over(self) -> Plane:
        self.now.close()
        self.now = Plane(self._directory, self._server.kubeconfig)
        return self.now


@pytest.fixture(scope="module")
def planes(directory: Path, server: FakeServer) -> Iterator[Planes]:
    found = Planes(directory, server)
    yield found
    found.now.close()


def killed_at(planes: Planes, cluster: Simulation, step: int, until: Any) -> bool:
    """Go on until something is so, or until the control plane is killed; then let another one take over."""
    planes.now.kill_at(step)
    try:
        planes.now.go_on(cluster, until)
    except Killed:
        planes.take_over()
        return True
    planes.now.kill_at(0)
    return False


def check_token(server: FakeServer, plane: Plane, run_id: str) -> None:
    """Whatever token the pods of a run were given is one that the store takes."""
    secrets = [each for each in server.all("Secret") if each["metadata"]["labels"]["twinstep.dev/run"] == run_id]
    (secret,) = secrets
    token = base64.b64decode(secret["data"]["token"]).decode()
    assert hash_token(token) in plane.store.token_hashes(run_id)


def ended_well(server: FakeServer, cluster: Simulation, plane: Plane, job: JobDetail, kind: str) -> None:
    before = times_made(server, kind)
    plane.go_on(cluster, lambda: plane.state(job.id) in ("running", *FINAL))
    check_token(server, plane, job.run_id)
    if kind == "RayJob":
        name = next(each["metadata"]["name"] for each in server.all(kind))
        cluster.kuberay.end(name)
    assert plane.until_ended(cluster, job.id) == "succeeded"
    assert times_made(server, kind) == before
    events = plane.events(job.id)
    assert events == [name for index, name in enumerate(events) if name not in events[:index]], "nothing twice"
    assert [name for name in events if name in FINAL] == ["succeeded"]
    assert [run.attempt for run in plane.store.runs(job.id)] == [1]
    (workload,) = server.all(kind)
    cluster.world.delete(workload)
    cluster.settle()
    plane.reconciler.run_once()
    assert left_of(server, job.run_id) == []
    assert plane.state(job.id) == "succeeded"


@pytest.mark.parametrize("step", range(1, STEPS))
def test_a_submit_survives_a_kill_at_any_step(
    server: FakeServer, cluster: Simulation, planes: Planes, step: int
) -> None:
    made = times_made(server)
    job = planes.now.submit("a-run", TPU)
    killed_at(planes, cluster, step, lambda: planes.now.state(job.id) in ("running", *FINAL))
    plane = planes.now
    plane.go_on(cluster, lambda: plane.state(job.id) in ("running", *FINAL))
    assert times_made(server) == made + 1
    ended_well(server, cluster, plane, job, "JobSet")


@pytest.mark.parametrize("step", range(1, STEPS, 5))
def test_a_submit_to_ray_survives_a_kill_too(
    server: FakeServer, cluster: Simulation, planes: Planes, step: int
) -> None:
    made = times_made(server, "RayJob")
    job = planes.now.submit("a-run", GPU)
    killed_at(planes, cluster, step, lambda: planes.now.state(job.id) in ("running", *FINAL))
    plane = planes.now
    plane.go_on(cluster, lambda: plane.state(job.id) in ("running", *FINAL))
    assert times_made(server, "RayJob") == made + 1
    ended_well(server, cluster, plane, job, "RayJob")


@pytest.mark.parametrize("step", range(1, STEPS, 4))
def test_a_cancel_survives_a_kill_at_any_step_of_the_submit_or_its_own(
    server: FakeServer, cluster: Simulation, planes: Planes, step: int
) -> None:
    job = planes.now.submit("a-run", TPU)
    killed_at(planes, cluster, step, lambda: planes.now.state(job.id) in ("running", *FINAL))
    planes.now.store.request_cancel(job.run_id, actor="a-user")
    killed_at(planes, cluster, step // 2 + 1, lambda: planes.now.state(job.id) in FINAL)
    assert planes.now.until_ended(cluster, job.id) in ("cancelled", "succeeded")
    cluster.settle()
    if planes.now.state(job.id) == "cancelled":
        planes.now.go_on(cluster, lambda: left_of(server, job.run_id) == [])
    else:
        for each in server.all("JobSet"):
            cluster.world.delete(each)
        cluster.settle()
