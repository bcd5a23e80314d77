"""A whole control plane and a cluster that does something, over HTTP: from a submit to its end, all wishes between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakekube.kubelet import Ending
from fakekube.server import FakeServer
from fakekube.simulation import Simulation

from twinstep.platform.dashboard.reader import Reader
from twinstep.platform.scheduler.attempts import Resize
from twinstep.platform.server import ControlPlane, assemble
from twinstep.platform.settings import ClusterSettings, Settings
from twinstep.spec.parse import validate_spec
from twinstep.spec.states import FINAL, RunState

S = RunState
IMAGE = "registry.example/worker@sha256:" + "0" * 64
TPU = {"kind": "tpu", "generation": "v5p", "topology": "2x2x2"}
GPU = {"kind": "gpu", "model": "h100", "count": 16}
Wait = Callable[..., Any]


@contextmanager
def control_plane(place: Path, server: FakeServer) -> Iterator[ControlPlane]:
    cluster = ClusterSettings(kubeconfig=server.kubeconfig, api_url="http://10.0.0.1:8765")
    plane = assemble(Settings(data_dir=place, reconcile_seconds=0.2, cluster=cluster), pages=False)
    plane.start()
    try:
        yield plane
    finally:
        plane.close()


@pytest.fixture
def simulation(server: FakeServer) -> Iterator[Simulation]:
    with Simulation(server).running() as simulation:
        yield simulation


@pytest.fixture
def plane(tmp_path: Path, server: FakeServer) -> Iterator[ControlPlane]:
    with control_plane(tmp_path / "data", server) as plane:
        yield plane


def submit(plane: ControlPlane, accelerator: dict[str, Any] = TPU, **more: Any) -> str:
    engine = "torchrec" if accelerator["kind"] == "gpu" else "dense"
    spec = {"name": "two", "accelerator": accelerator, "kubernetes": {"image": IMAGE}, "embedding": {"engine": engine},
            **more}  # fmt: skip
    return plane.service.submit_job(validate_spec(spec)).id


def when(plane: ControlPlane, wait: Wait, job_id: str, *states: RunState) -> None:
    wait(lambda: plane.service.get_job(job_id).state in states)


@pytest.mark.parametrize("accelerator", [TPU, GPU], ids=["JobSet", "RayJob"])
def test_from_a_submit_to_its_end(
    plane: ControlPlane, simulation: Simulation, wait: Wait, accelerator: dict[str, Any]
) -> None:
    job_id = submit(plane, accelerator)
    when(plane, wait, job_id, S.RUNNING)
    (run,) = plane.service.list_runs(job_id)
    assert run.cluster is not None
    if run.cluster.kind == "RayJob":
        simulation.kuberay.end(run.cluster.name)
    else:
        simulation.end(run.id)
    when(plane, wait, job_id, S.SUCCEEDED)
    changes = [event.data["to"] for event in plane.service.list_events(job_id).items if event.name == "state_changed"]
    assert changes == ["queued", "starting", "running", "succeeded"]
    health = plane.service.readiness().cluster
    assert health is not None
    assert (health.leads, health.troubles) == (True, [])


@pytest.mark.parametrize("accelerator", [TPU, GPU], ids=["JobSet", "RayJob"])
def test_the_manifests_that_are_shown_are_those_that_were_sent(
    plane: ControlPlane, server: FakeServer, wait: Wait, accelerator: dict[str, Any]
) -> None:
    job_id = submit(plane, accelerator)
    wait(lambda: server.all("JobSet") or server.all("RayJob"))
    shown = list(yaml.safe_load_all(Reader(plane.service).document(job_id, 1, "manifests")))
    assert len(shown) > 3

    def missing(shown: Any, sent: Any, path: str = "") -> list[str]:
        if isinstance(shown, dict) and isinstance(sent, dict):
            return [each for key in shown for each in missing(shown[key], sent.get(key), f"{path}.{key}")]
        if isinstance(shown, list) and isinstance(sent, list) and len(shown) == len(sent):
            pairs = enumerate(zip(shown, sent, strict=True))
            return [each for at, (a, b) in pairs for each in missing(a, b, f"{path}[{at}]")]
        return [] if shown == sent else [path]

    for each in shown:
        (sent,) = (one for one in server.all(each["kind"]) if one["metadata"]["name"] == each["metadata"]["name"])
        assert missing(each, sent) == []


def test_a_cancel_takes_everything_out_of_the_cluster(
    plane: ControlPlane, server: FakeServer, simulation: Simulation, wait: Wait
) -> None:
    job_id = submit(plane)
    when(plane, wait, job_id, S.RUNNING)
    plane.service.cancel_job(job_id)
    when(plane, wait, job_id, *FINAL)
    assert plane.service.get_job(job_id).state is S.CANCELLED
    wait(lambda: not [kind for kind in ("JobSet", "Secret", "ConfigMap", "NetworkPolicy", "Pod") if server.all(kind)])


def test_a_control_plane_that_comes_back_finds_its_runs_again(
    tmp_path: Path, server: FakeServer, simulation: Simulation, wait: Wait
) -> None:
    with control_plane(tmp_path / "data", server) as first:
        job_id = submit(first)
        when(first, wait, job_id, S.RUNNING)
    with control_plane(tmp_path / "data", server) as second:
        simulation.end(second.service.get_job(job_id).run_id)
        when(second, wait, job_id, S.SUCCEEDED)
        assert len(server.all("JobSet")) == 1


def test_suspended_resumed_resized_and_tried_again(
    plane: ControlPlane, server: FakeServer, simulation: Simulation, wait: Wait
) -> None:
    job_id = submit(plane)
    verbs = plane.service.verbs
    when(plane, wait, job_id, S.RUNNING)
    verbs.suspend(job_id, actor="ada")
    when(plane, wait, job_id, S.QUEUED)
    wait(lambda: not simulation.pods())
    verbs.resume(job_id, actor="ada")
    when(plane, wait, job_id, S.RUNNING)
    verbs.resize(job_id, Resize(topology="2x2x4"), actor="ada")
    when(plane, wait, job_id, S.RUNNING)
    first, second = plane.service.list_runs(job_id)
    assert (first.state, len(simulation.pods(second.id))) == (S.CANCELLED, 4)
    simulation.end(second.id, Ending(code=2))
    when(plane, wait, job_id, S.FAILED, S.RESTARTING)
    plane.service.cancel_job(job_id) if plane.service.get_job(job_id).state not in FINAL else None
    when(plane, wait, job_id, *FINAL)
    verbs.retry(job_id, actor="ada")
    when(plane, wait, job_id, S.RUNNING)
    assert [run.attempt for run in plane.service.list_runs(job_id)] == [1, 2, 3]
    assert len(server.all("JobSet")) <= 2
