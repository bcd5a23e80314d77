"""Whatever goes wrong between the control plane and the cluster: nothing is lost, nothing is doubled, nothing hangs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clusterplane import GPU, TPU, Plane, left_of, times_made
from fakekube.admission import warm
from fakekube.kubelet import Ending, Work
from fakekube.server import FakeServer
from fakekube.simulation import Simulation

from twinstep.platform.scheduler.cluster.kube_api import Access, KubeApi
from twinstep.platform.scheduler.cluster.lease import Elector, LeaseTimes
from twinstep.platform.store.records import JobDetail
from twinstep.spec.errors import UnavailableError
from twinstep.spec.states import FINAL

Wait = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def schemas() -> None:
    warm()


@pytest.fixture
def cluster(server: FakeServer) -> Simulation:
    found = Simulation(server)
    found.kubelet.work = lambda pod: Work(seconds=0.2)
    return found


@pytest.fixture
def plane(tmp_path: Path, server: FakeServer) -> Iterator[Plane]:
    found = Plane(tmp_path, server.kubeconfig)
    yield found
    found.close()


def once_and_for_all(plane: Plane, job: JobDetail) -> None:
    """What holds of every run that nobody tried again: one attempt, one way in, one end."""
    assert [run.attempt for run in plane.store.runs(job.id)] == [1]
    events = plane.events(job.id)
    assert len([name for name in events if name in FINAL]) == 1
    assert events.count("queued") == 1


# ---- the API server fails ----

PATHS = {
    "the secret": ("POST", "/secrets"),
    "the config map": ("PATCH", "/configmaps/"),
    "the account": ("PATCH", "/serviceaccounts/"),
    "the workload": ("PATCH", "/jobsets/"),
    "the look before": ("GET", "/jobsets/"),
}
FAULTS: dict[str, Callable[[Any, str, str], Any]] = {
    "500": lambda faults, method, path: faults.answer(500, method=method, path=path, times=2, watch=False),
    "429": lambda faults, method, path: faults.answer(429, method=method, path=path, times=2, watch=False),
    "503": lambda faults, method, path: faults.answer(503, method=method, path=path, watch=False),
    "500 once it is stored": lambda faults, method, path: faults.answer(
        500, method=method, path=path, stored=True, watch=False
    ),
    "504 once it is stored": lambda faults, method, path: faults.answer(
        504, method=method, path=path, stored=True, watch=False
    ),
    "no answer once it is stored": lambda faults, method, path: faults.hang(0.6, method=method, path=path),
    "a connection that is closed": lambda faults, method, path: faults.drop(method=method, path=path, times=2),
    "a connection that is closed once it is stored": lambda faults, method, path: faults.drop(
        method=method, path=path, stored=True
    ),
}


SOME = ("500", "504 once it is stored", "a connection that is closed once it is stored")


@pytest.mark.parametrize(
    ("what", "how"), [(what, how) for what in PATHS for how in FAULTS if what == "the workload" or how in SOME]
)
def test_a_submit_comes_through_whatever_the_api_server_answers(
    plane: Plane, server: FakeServer, cluster: Simulation, what: str, how: str
) -> None:
    FAULTS[how](server.faults, *PATHS[what])
    job = plane.submit()
    assert plane.until_ended(cluster, job.id) == "succeeded"
    assert times_made(server) == 1
    once_and_for_all(plane, job)


@pytest.mark.parametrize("how", ["500", "429", "504 once it is stored", "no answer once it is stored"])
def test_a_cancel_comes_through_whatever_the_api_server_answers(
    plane: Plane, server: FakeServer, cluster: Simulation, how: str
) -> None:
    cluster.kubelet.work = lambda pod: Work()
    job = plane.submit()
    plane.go_on(cluster, lambda: plane.state(job.id) == "running")
    FAULTS[how](server.faults, "DELETE", "/jobsets/")
    plane.store.request_cancel(job.run_id, actor="a-user")
    assert plane.until_ended(cluster, job.id) == "cancelled"
    assert left_of(server, job.run_id) == [], "its pods had ended before it was said to have"


def test_an_api_server_that_is_away_changes_no_state_and_is_told_of(
    plane: Plane, server: FakeServer, cluster: Simulation, wait: Wait
) -> None:
    cluster.kubelet.work = lambda pod: Work()
    running = plane.submit("running")
    plane.go_on(cluster, lambda: plane.state(running.id) == "running")
    with server.away():
        waiting = plane.submit("waiting")
        for _ in range(20):
            plane.reconciler.run_once()
            time.sleep(0.02)
        assert plane.state(running.id) == "running"
        assert plane.state(waiting.id) == "queued"
        assert "is tried again" in plane.store.job(waiting.id).reason
        before = plane.watcher.age()
        assert before is not None
        wait(lambda: (plane.watcher.age() or 0) > before + 0.2)
    plane.go_on(cluster, lambda: plane.state(waiting.id) == "running")
    cluster.end()
    assert plane.until_ended(cluster, running.id) == "succeeded"
    assert plane.until_ended(cluster, waiting.id) == "succeeded"
    assert times_made(server) == 2


KINDS = ("gone", "half_line", "garbage", "duplicate", "old", "close")


@pytest.mark.parametrize(("accelerator", "kind"), [*((TPU, kind) for kind in KINDS), (GPU, "gone"), (GPU, "old")])
def test_watches_that_break_all_the_time_tell_the_truth_in_the_end(
    plane: Plane, server: FakeServer, cluster: Simulation, kind: str, accelerator: dict[str, Any]
) -> None:
    for events in (0, 1, 2, 0, 3, 1):
        server.faults.watch(kind, times=8, events=events, seconds=0.05)
    job = plane.submit("a-run", accelerator)
    server.close_watches()
    plane.go_on(cluster, lambda: plane.state(job.id) in ("running", *FINAL))
    for each in server.all("RayJob"):
        cluster.kuberay.end(each["metadata"]["name"])
    assert plane.until_ended(cluster, job.id) == "succeeded"
    assert times_made(server, "JobSet" if accelerator is TPU else "RayJob") == 1
    once_and_for_all(plane, job)


def test_a_history_that_is_compacted_all_the_time_loses_nothing(
    plane: Plane, server: FakeServer, cluster: Simulation
) -> None:
    job = plane.submit()

    def until() -> bool:
        server.objects.compact()
        server.close_watches("jobsets" if time.monotonic() % 2 < 1 else "pods")
        return plane.state(job.id) in FINAL

    plane.go_on(cluster, until)
    assert plane.state(job.id) == "succeeded"


# ---- others in the cluster ----


@pytest.mark.parametrize("when", ["queued", "running"])
def test_a_workload_that_somebody_else_deletes_is_lost_and_never_sent_again(
    plane: Plane, server: FakeServer, cluster: Simulation, when: str
) -> None:
    cluster.kubelet.work = lambda pod: Work()
    if when == "queued":
        cluster.kueue.hold = ("WaitingForQuota", "nothing is free")
    job = plane.submit(kubernetes={"queue": "team"})
    plane.go_on(cluster, lambda: plane.state(job.id) == when and server.all("JobSet"))
    plane.go_on(cluster, lambda: plane.runs.live()[0].cluster and plane.runs.live()[0].cluster.uid)
    cluster.world.delete(server.all("JobSet")[0])
    assert plane.until_ended(cluster, job.id) == "failed"
    assert "gone from the cluster" in plane.store.job(job.id).reason
    for _ in range(5):
        cluster.step()
        plane.reconciler.run_once()
    assert times_made(server) == 1
    assert left_of(server, job.run_id) == []


def test_another_of_the_same_name_is_left_alone_and_the_run_is_lost(
    plane: Plane, server: FakeServer, cluster: Simulation
) -> None:
    cluster.kubelet.work = lambda pod: Work()
    job = plane.submit()
    plane.go_on(cluster, lambda: plane.state(job.id) == "running")
    own = server.all("JobSet")[0]
    cluster.world.delete(own)
    cluster.settle()
    stranger = {**own, "metadata": {"name": own["metadata"]["name"], "namespace": "default", "labels": {"mine": "1"}}}
    stranger.pop("status", None)
    uid = server.put(stranger)["metadata"]["uid"]
    assert plane.until_ended(cluster, job.id) == "failed"
    assert [each["metadata"]["uid"] for each in server.all("JobSet")] == [uid]


@pytest.mark.parametrize("label", ["twinstep.dev/run", "app.kubernetes.io/managed-by"])
def test_a_workload_whose_label_somebody_takes_away_is_followed_and_has_it_again(
    plane: Plane, server: FakeServer, cluster: Simulation, label: str
) -> None:
    cluster.kubelet.work = lambda pod: Work()
    job = plane.submit()
    plane.go_on(cluster, lambda: plane.state(job.id) == "running")
    metadata = server.all("JobSet")[0]["metadata"]
    plane.api.merge("JobSet", "default", metadata["name"], {"metadata": {"labels": {label: None}}})
    plane.go_on(cluster, lambda: server.all("JobSet")[0]["metadata"]["labels"] == metadata["labels"])
    assert plane.state(job.id) == "running"
    cluster.end()
    assert plane.until_ended(cluster, job.id) == "succeeded"
    assert times_made(server) == 1


def test_a_pod_that_somebody_deletes_is_a_restart_at_most(
    plane: Plane, server: FakeServer, cluster: Simulation
) -> None:
    cluster.kubelet.work = lambda pod: Work()
    job = plane.submit(kubernetes={"max_restarts": 3})
    plane.go_on(cluster, lambda: plane.state(job.id) == "running")
    cluster.world.delete(cluster.pods()[0])
    plane.go_on(cluster, lambda: plane.store.runs(job.id)[0].restarts >= 1)
    plane.go_on(cluster, lambda: plane.state(job.id) == "running" and cluster.end())
    assert plane.until_ended(cluster, job.id) == "succeeded"
    assert times_made(server) == 1


@pytest.mark.parametrize("ending", ["succeeded", "failed"])
def test_what_goes_after_its_time_to_live_stays_as_it_ended(
    tmp_path: Path, server: FakeServer, cluster: Simulation, ending: str
) -> None:
    code = 0 if ending == "succeeded" else 1
    cluster.kubelet.work = lambda pod: Work(seconds=0.1, ending=Ending(code=code))
    plane = Plane(tmp_path, server.kubeconfig)
    job = plane.submit(kubernetes={"ttl_seconds": 60, "max_restarts": 0})
    assert plane.until_ended(cluster, job.id) == ending
    reason = plane.store.job(job.id).reason
    server.shift += 61
    cluster.settle()
    assert left_of(server, job.run_id) == []
    plane.reconciler.run_once()
    plane.close()
    plane = Plane(tmp_path, server.kubeconfig)  # and after a restart, which sees nothing of it any more
    for _ in range(3):
        plane.reconciler.run_once()
    found = plane.store.job(job.id)
    assert (found.state, found.reason) == (ending, reason)
    assert times_made(server) == 1
    plane.close()


# ---- clocks ----


@pytest.mark.parametrize("jump", [86_400.0, -86_400.0])
def test_a_cluster_whose_clock_jumps_changes_no_state(
    plane: Plane, server: FakeServer, cluster: Simulation, jump: float
) -> None:
    cluster.kubelet.work = lambda pod: Work()
    job = plane.submit(kubernetes={"ttl_seconds": 30 * 86_400})
    plane.go_on(cluster, lambda: plane.state(job.id) == "running")
    server.shift += jump
    for _ in range(5):
        cluster.step()
        plane.reconciler.run_once()
    assert plane.state(job.id) == "running"
    cluster.end()
    assert plane.until_ended(cluster, job.id) == "succeeded"


@pytest.mark.parametrize("jump", [86_400.0, -86_400.0])
def test_a_control_plane_whose_clock_jumps_ends_no_run_before_its_time(
    plane: Plane, server: FakeServer, cluster: Simulation, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    cluster.kubelet.work = lambda pod: Work()
    job = plane.submit(runtime={"max_seconds": 3600})
    plane.go_on(cluster, lambda: plane.state(job.id) == "running")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + jump)
    for _ in range(5):
        cluster.step()
        plane.reconciler.run_once()
    assert plane.state(job.id) == "running"
    cluster.end()
    assert plane.until_ended(cluster, job.id) == "succeeded"
    assert times_made(server) == 1


# ---- several control planes ----


def test_two_that_both_believe_to_lead_double_nothing(tmp_path: Path, server: FakeServer, cluster: Simulation) -> None:
    one, two = Plane(tmp_path, server.kubeconfig, read_s=5), Plane(tmp_path, server.kubeconfig, read_s=5)
    try:
        one.reconciler.start()
        two.reconciler.start()
        jobs = [(one if index % 2 else two).submit(f"run-{index}") for index in range(8)]
        with cluster.running():
            ends = time.monotonic() + 60
            while any(one.store.job(job.id).state not in FINAL for job in jobs) and time.monotonic() < ends:
                time.sleep(0.05)
        assert [one.state(job.id) for job in jobs] == ["succeeded"] * len(jobs)
        assert times_made(server) == len(jobs)
        for job in jobs:
            once_and_for_all(one, job)
    finally:
        for each in (one, two):
            each.reconciler.stop()
            each.close()


QUICK = LeaseTimes(lasts=2.0, holds=1.2, every=0.2)


@contextlib.contextmanager
def replica(directory: Path, server: FakeServer, name: str) -> Iterator[tuple[Plane, Elector]]:
    """A control plane that acts only while it holds the Lease."""
    api = KubeApi(Access(kubeconfig=server.kubeconfig), read_s=0.6)
    elector = Elector(api, namespace="default", name="twinstep", identity=name, times=QUICK)
    plane = Plane(directory, server.kubeconfig, leads=lambda: elector.leads)
    elector.start()
    plane.reconciler.start()
    try:
        yield plane, elector
    finally:
        plane.reconciler.stop()
        elector.stop()
        plane.close()
        api.close()


def test_who_leads_is_lost_and_another_one_goes_on(
    tmp_path: Path, server: FakeServer, cluster: Simulation, wait: Wait
) -> None:
    cluster.kubelet.work = lambda pod: Work(seconds=3.0)
    replicas = (replica(tmp_path, server, "one"), replica(tmp_path, server, "two"))
    with cluster.running(), replicas[0] as one, replicas[1] as two:
        (lead, first), (other, second) = wait(
            lambda: (one, two) if one[1].leads else (two, one) if two[1].leads else None
        )
        jobs = [other.submit(f"run-{index}") for index in range(3)]
        wait(lambda: all(other.state(job.id) == "running" for job in jobs))
        # Its way to the API server is cut: it must count itself out before the other one takes over.
        first._api._open = lead.api._open = _cut
        wait(lambda: second.leads)
        assert not first.leads
        late = lead.submit("late")
        wait(lambda: all(other.state(job.id) == "succeeded" for job in [*jobs, late]), seconds=40)
        assert times_made(server) == 4
        for job in [*jobs, late]:
            once_and_for_all(other, job)


def _cut(*args: Any, **kwargs: Any) -> Any:
    raise UnavailableError("the way to the API server is cut", remedy="mend it")
