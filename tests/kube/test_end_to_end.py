"""Jobs in a cluster, from a submit over HTTP to their end: a whole control plane, and the API of a cluster.

Runs over the simulated cluster, or over the real one that TWINSTEP_TEST_KUBECONFIG names: there, what asks the
simulation to do something is skipped, and what follows from the API server alone is held.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fakekube.admission import crds_dir, warm
from fakekube.kubelet import Ending, Work
from fakekube.server import FakeServer
from fakekube.simulation import Simulation
from kubernetes import client, config

from twinstep.platform.scheduler.cluster.kinds import rules
from twinstep.platform.server import assemble
from twinstep.platform.settings import ClusterSettings, Settings

IMAGE = os.environ.get("TWINSTEP_TEST_IMAGE", "registry.example/worker@sha256:" + "0" * 64)
TPU = {"kind": "tpu", "generation": "v5p", "topology": "2x2x2"}
GPU = {"kind": "gpu", "model": "h100", "count": 8}
ENDS = ("succeeded", "failed", "cancelled")
Wait = Callable[..., Any]


@dataclass
class Place:
    """The cluster of a test, and one namespace of it."""

    kubeconfig: Path
    """The control plane's."""
    admin: Path
    """The test's own."""
    namespace: str
    server: FakeServer | None = None
    simulated: Simulation | None = None

    @property
    def simulation(self) -> Simulation:
        """The simulated controllers; a test that needs them ends here on a real cluster."""
        if self.simulated is None:
            pytest.skip("only the simulated cluster does what a test tells it")
        return self.simulated

    def client(self) -> client.ApiClient:
        settings = client.Configuration()
        config.load_kube_config(str(self.admin), client_configuration=settings)
        return client.ApiClient(settings)

    def names(self, run_id: str) -> list[str]:
        """What there is of a run, as the API server has it."""
        found = []
        with self.client() as api:
            core, custom = client.CoreV1Api(api), client.CustomObjectsApi(api)
            how = {"label_selector": f"twinstep.dev/run={run_id}"}
            for group, version, plural in (("jobset.x-k8s.io", "v1alpha2", "jobsets"), ("ray.io", "v1", "rayjobs")):
                page = custom.list_namespaced_custom_object(group, version, self.namespace, plural, **how)
                found += [f"{plural}/{each['metadata']['name']}" for each in page["items"]]
            for kind, ask in (
                ("pods", core.list_namespaced_pod),
                ("secrets", core.list_namespaced_secret),
                ("configmaps", core.list_namespaced_config_map),
                ("serviceaccounts", core.list_namespaced_service_account),
                ("networkpolicies", client.NetworkingV1Api(api).list_namespaced_network_policy),
            ):
                found += [f"{kind}/{each.metadata.name}" for each in ask(self.namespace, **how).items]
        return sorted(found)

    def workload(self, run: dict[str, Any]) -> dict[str, Any]:
        """The JobSet or RayJob of a run."""
        kind = run["cluster"]["kind"]
        group, version = ("jobset.x-k8s.io", "v1alpha2") if kind == "JobSet" else ("ray.io", "v1")
        with self.client() as api:
            found: dict[str, Any] = client.CustomObjectsApi(api).get_namespaced_custom_object(
                group, version, self.namespace, f"{kind.lower()}s", run["cluster"]["name"]
            )
        return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    if named := os.environ.get("TWINSTEP_TEST_KUBECONFIG"):
        found = Place(Path(named), Path(named), f"twinstep-test-{secrets.token_hex(4)}")
        with found.client() as api:
            client.CoreV1Api(api).create_namespace({"metadata": {"name": found.namespace}})
            yield found
            client.CoreV1Api(api).delete_namespace(found.namespace)
        return
    warm()
    with FakeServer(tmp_path / "cluster") as server:
        simulation = Simulation(server)
        server.objects.namespace("runs")
        with simulation.running():
            yield Place(server.kubeconfig, server.admin, "runs", server, simulation)


@dataclass
class Live:
    """A control plane that answers over HTTP."""

    http: httpx.Client
    place: Place
    wait: Wait

    def submit(self, accelerator: dict[str, Any], *, name: str = "a-job", **more: Any) -> dict[str, Any]:
        kubernetes = {"namespace": self.place.namespace, "image": IMAGE, **more.pop("kubernetes", {})}
        engine = "torchrec" if accelerator["kind"] == "gpu" else "dense"
        body = {"name": name, "accelerator": accelerator, "embedding": {"engine": engine}, "kubernetes": kubernetes}
        answer = self.http.post("/v1/jobs", json={**body, **more})
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    def ask(self, job: dict[str, Any], verb: str, **body: Any) -> dict[str, Any]:
        answer = self.http.post(f"/v1/jobs/{job['id']}/{verb}", **({"json": body} if body else {}))
        assert answer.status_code in (200, 201, 202), answer.text
        return dict(answer.json())

    def job(self, job: dict[str, Any]) -> dict[str, Any]:
        return dict(self.http.get(f"/v1/jobs/{job['id']}").json())

    def runs(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        found = self.http.get(f"/v1/jobs/{job['id']}/runs").json()
        return list(found["items"] if isinstance(found, dict) else found)

    def when(self, job: dict[str, Any], *states: str) -> dict[str, Any]:
        return dict(self.wait(lambda: (found := self.job(job))["state"] in states and found, seconds=40))

    def explained(self, job: dict[str, Any], *words: str) -> dict[str, Any]:
        """Wait until the explanation has all the words."""

        def check() -> dict[str, Any] | None:
            found = self.http.get(f"/v1/jobs/{job['id']}/explain").json()
            return found if all(word in str(found) for word in words) else None

        return dict(self.wait(check))

    def path(self, job: dict[str, Any]) -> list[str]:
        """The states a job has been in."""
        items = self.http.get(f"/v1/jobs/{job['id']}/events", params={"limit": 200}).json()["items"]
        return [each["data"]["to"] for each in items if each["name"] == "state_changed"]


@pytest.fixture
def live(place: Place, tmp_path: Path, wait: Wait) -> Iterator[Live]:
    cluster = ClusterSettings(
        kubeconfig=place.kubeconfig, namespaces=(place.namespace,), api_url="http://10.0.0.1:8765", crds=crds_dir()
    )
    if place.server is not None:  # the control plane has the rights of its role and no others
        place.server.api.allowed = {
            (group, resource, verb)
            for rule in rules()
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
    settings = Settings(data_dir=tmp_path / "data", port=0, reconcile_seconds=0.1, cluster=cluster)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        plane = assemble(replace(settings, port=listener.getsockname()[1]), pages=False)
        plane.start()
        server = uvicorn.Server(uvicorn.Config(plane.app, log_config=None, access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        wait(lambda: server.started)
        try:
            with httpx.Client(base_url=plane.settings.url, timeout=20, trust_env=False) as http:
                yield Live(http, place, wait)
        finally:
            plane.service.closing.set()
            server.should_exit = True
            thread.join(timeout=20)
            plane.close()
    if place.server is not None:
        place.server.api.allowed = None


def finish(live: Live, job: dict[str, Any], ending: Ending | None = None, *, status: str = "SUCCEEDED") -> None:
    """Let the newest run of a job end, as its workers would end it."""
    run = live.runs(job)[-1]
    if run["cluster"]["kind"] == "RayJob":
        live.place.simulation.kuberay.end(run["cluster"]["name"], status)
    else:
        assert live.place.simulation.end(run["id"], ending)


# ---- let through ----


def test_a_job_that_is_let_through_with_warnings_says_so_in_its_answer_and_its_events(live: Live) -> None:
    data = {"dataset": "synthetic", "rows": {"item_id": 2**31 - 1}}
    kubernetes = {"namespace": live.place.namespace, "image": "registry.example/worker:1"}
    body = {"name": "too-large", "accelerator": GPU, "embedding": {"engine": "torchrec"}, "data": data,
            "kubernetes": kubernetes}  # fmt: skip
    first, again = (live.http.post("/v1/jobs", json=body, headers={"Idempotency-Key": "one"}) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 200), first.text
    job, warnings = first.json(), first.json()["warnings"]
    assert any("is not named by digest" in each for each in warnings)
    assert any(each.startswith("preflight: ") for each in warnings)
    assert again.json()["warnings"] == warnings
    assert live.http.post("/v1/jobs:plan", json=body).json()["warnings"] == warnings
    live.ask(job, "cancel")
    live.when(job, "cancelled")
    live.ask(job, "retry")
    events = live.http.get(f"/v1/jobs/{job['id']}/events", params={"limit": 200}).json()["items"]
    told = [each for each in events if each["name"] == "warned"]
    assert [each["data"]["warnings"] for each in told] == [warnings] * 2
    assert [each["run_id"] for each in told] == [each["id"] for each in live.runs(job)]
    live.ask(job, "cancel")
    live.when(job, "cancelled")


# ---- to the end ----


@pytest.mark.parametrize(
    ("accelerator", "pods"),
    [({**TPU, "topology": "2x2x1"}, 1), ({**TPU, "slices": 2}, 4), (GPU, 3)],
    ids=["one-slice", "two-slices", "ray"],
)
def test_a_job_goes_from_submit_to_succeeded(live: Live, accelerator: dict[str, Any], pods: int) -> None:
    job = live.submit(accelerator)
    live.when(job, "queued", "starting", "running")
    live.wait(lambda: (live.runs(job)[0]["cluster"] or {}).get("uid"))
    run = live.runs(job)[0]
    workload = live.place.workload(run)
    assert workload["metadata"]["uid"] == run["cluster"]["uid"]
    assert workload["metadata"]["labels"]["twinstep.dev/job"] == job["id"]
    kinds = {name.split("/")[0] for name in live.place.names(run["id"])}
    assert {"secrets", "configmaps", "serviceaccounts", "networkpolicies"} <= kinds
    assert live.place.simulation
    live.when(job, "running")
    assert len([name for name in live.place.names(run["id"]) if name.startswith("pods/")]) == pods
    finish(live, job)
    live.when(job, "succeeded")
    assert live.path(job) == ["queued", "starting", "running", "succeeded"]


def test_a_job_waits_in_its_queue_and_says_for_what(live: Live) -> None:
    kueue = live.place.simulation.kueue
    kueue.hold = ("WaitingForQuota", "insufficient unused quota for google.com/tpu, 4 more needed")
    job = live.submit(TPU, kubernetes={"queue": "team"})
    live.explained(job, "quota", "4 more needed")
    assert live.job(job)["state"] == "queued"
    kueue.hold = None
    live.when(job, "running")
    finish(live, job)
    live.when(job, "succeeded")


# ---- verbs ----


@pytest.mark.parametrize("accelerator", [TPU, GPU], ids=["jobset", "rayjob"])
@pytest.mark.parametrize("when", ["queued", "running"])
def test_a_cancelled_job_leaves_nothing(live: Live, accelerator: dict[str, Any], when: str) -> None:
    if when == "running":
        assert live.place.simulation
    elif live.place.simulated:
        live.place.simulated.kueue.hold = ("WaitingForQuota", "nothing is free")
    job = live.submit(accelerator, kubernetes={"queue": "team"} if when == "queued" else {})
    live.when(job, when)
    live.wait(lambda: (live.runs(job)[0]["cluster"] or {}).get("uid"))
    live.ask(job, "cancel")
    live.when(job, "cancelled")
    live.wait(lambda: live.place.names(job["run_id"]) == [])
    assert live.ask(job, "cancel")["state"] == "cancelled"


def test_a_failed_job_is_tried_again_as_another_run(live: Live) -> None:
    assert live.place.simulation
    job = live.submit(TPU, kubernetes={"max_restarts": 0})
    live.when(job, "running")
    finish(live, job, Ending(code=1))
    live.when(job, "failed")
    live.ask(job, "retry")
    live.when(job, "running")
    first, second = live.runs(job)
    assert (first["state"], second["attempt"]) == ("failed", 2)
    assert first["cluster"]["name"] != second["cluster"]["name"]
    finish(live, job)
    live.when(job, "succeeded")
    assert live.runs(job)[0]["state"] == "failed"


@pytest.mark.parametrize("queue", [None, "team"])
@pytest.mark.parametrize("accelerator", [TPU, GPU], ids=["jobset", "rayjob"])
def test_a_suspended_job_gives_its_nodes_back_and_goes_on(
    live: Live, accelerator: dict[str, Any], queue: str | None
) -> None:
    assert live.place.simulation
    job = live.submit(accelerator, kubernetes={"queue": queue} if queue else {})
    live.when(job, "running")
    live.ask(job, "suspend")
    live.when(job, "queued")
    live.wait(lambda: not [name for name in live.place.names(job["run_id"]) if name.startswith("pods/")])
    assert live.job(job)["run_id"] == job["run_id"]
    live.ask(job, "resume")
    live.when(job, "running")
    finish(live, job)
    live.when(job, "succeeded")
    assert len(live.runs(job)) == 1


def test_a_resized_job_runs_again_on_other_chips_once_it_has_stopped(live: Live) -> None:
    simulation = live.place.simulation
    job = live.submit(TPU)
    live.when(job, "running")
    live.ask(job, "resize", topology="2x2x4")
    live.wait(lambda: len(live.runs(job)) == 2)
    live.wait(lambda: live.runs(job)[0]["state"] in ENDS)
    live.when(job, "running")
    first, second = live.runs(job)
    assert first["state"] == "cancelled"
    live.wait(lambda: live.place.names(first["id"]) == [])
    assert len(simulation.pods(second["id"])) == 4
    finish(live, job)
    live.when(job, "succeeded")


# ---- what happens to a job ----


def test_a_preempted_job_waits_and_runs_again_as_the_same_run(live: Live) -> None:
    kueue = live.place.simulation.kueue
    job = live.submit(TPU, kubernetes={"queue": "team"})
    live.when(job, "running")
    kueue.hold = ("WaitingForQuota", "nothing is free")
    kueue.evict(live.runs(job)[0]["cluster"]["name"])
    live.when(job, "queued")
    assert "was taken off its nodes" in live.job(job)["reason"]
    kueue.hold = None
    live.when(job, "running")
    finish(live, job)
    live.when(job, "succeeded")
    assert len(live.runs(job)) == 1
    assert live.path(job)[-3:] == ["starting", "running", "succeeded"]


def test_a_preempted_node_is_a_restart_that_costs_no_try(live: Live) -> None:
    simulation = live.place.simulation
    job = live.submit(TPU, kubernetes={"max_restarts": 0})
    live.when(job, "running")
    assert simulation.end(job["run_id"], Ending(code=137, disrupted=True), host=0)
    live.wait(lambda: live.runs(job)[0]["restarts"] == 1)
    live.when(job, "running")
    finish(live, job)
    live.when(job, "succeeded")


def test_a_job_that_ran_out_of_memory_is_explained(live: Live) -> None:
    simulation = live.place.simulation
    job = live.submit(TPU, kubernetes={"max_restarts": 0})
    live.when(job, "running")
    assert simulation.end(job["run_id"], Ending(code=137, reason="OOMKilled"), host=1)
    live.when(job, "failed")
    found = live.explained(job, "memory")
    assert found["next_step"]


def test_a_job_that_no_node_takes_is_explained(live: Live) -> None:
    live.place.simulation.kubelet.full = "0/8 nodes are available: 8 Insufficient google.com/tpu."
    assert live.place.server is not None
    live.place.server.shift = -120.0  # it has been so for two minutes
    job = live.submit(TPU)
    live.explained(job, "Insufficient google.com/tpu")
    live.when(job, "queued")
    live.ask(job, "cancel")
    live.when(job, "cancelled")
    live.place.simulation.kubelet.full = ""
    job = live.submit(TPU, name="another")
    live.when(job, "running")


def test_an_image_that_does_not_come_is_explained(live: Live) -> None:
    live.place.simulation.kubelet.work = lambda pod: Work(pull="ErrImagePull")
    job = live.submit(TPU)
    live.explained(job, "image")
    live.ask(job, "cancel")
    live.when(job, "cancelled")
