"""The simulated controllers do what the notes on JobSet, KubeRay and Kueue say of the real ones, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from fakekube.kubelet import Ending, Work
from fakekube.server import FakeServer
from fakekube.simulation import Simulation

from twinstep.platform.scheduler.cluster.evidence import Evidence
from twinstep.platform.scheduler.cluster.status import Finding, find
from twinstep.platform.scheduler.render.render import RenderedRun, render
from twinstep.spec.parse import parse_spec
from twinstep.spec.words import EXIT_PREEMPTED, EXIT_SPEC

TPU = {"kind": "tpu", "generation": "v5p", "topology": "2x2x2"}
GPU = {"kind": "gpu", "model": "h100", "count": 16}
IMAGE = "registry.example/worker@sha256:" + "0" * 64


@pytest.fixture
def cluster(server: FakeServer) -> Simulation:
    return Simulation(server)


def submit(cluster: Simulation, accelerator: dict[str, Any] | None = None, **kubernetes: Any) -> RenderedRun:
    spec = {"name": "a-run", "accelerator": accelerator or TPU, "kubernetes": {"image": IMAGE, **kubernetes}}
    found = render(parse_spec(yaml.safe_dump(spec)))
    for each in found.objects:
        cluster.server.put(dict(each))
    return found


def workload(cluster: Simulation, run: RenderedRun) -> dict[str, Any]:
    return cluster.server.objects.get(run.workload["kind"], "default", run.name)


def seen(cluster: Simulation, run: RenderedRun) -> Finding:
    """What the control plane makes of it."""
    admission = next(iter(cluster.server.all("Workload")), None)
    evidence = Evidence(
        workload=cluster.world.get(run.workload["kind"], "default", run.name),
        admission=admission,
        pods=cluster.pods(run.name),
        now=cluster.server.objects.clock(),
    )
    return find(evidence, asked_to_stop=False)


def condition(value: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(each for each in value["status"]["conditions"] if each["type"] == kind)


# ---- JobSet ----


def test_a_jobset_makes_a_job_per_slice_and_a_pod_per_host(cluster: Simulation) -> None:
    run = submit(cluster, {**TPU, "slices": 2})
    cluster.settle()
    jobs = cluster.server.all("Job")
    assert [job["metadata"]["name"] for job in jobs] == [f"{run.name}-slice-0", f"{run.name}-slice-1"]
    places = {
        (labels["jobset.sigs.k8s.io/job-index"], labels["batch.kubernetes.io/job-completion-index"])
        for labels in (pod["metadata"]["labels"] for pod in cluster.pods(run.name))
    }
    assert places == {("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")}
    assert [each["metadata"]["name"] for each in cluster.server.all("Service")] == [run.name]
    counts = workload(cluster, run)["status"]["replicatedJobsStatus"]
    assert counts == [{"name": "slice", "ready": 2, "succeeded": 0, "failed": 0, "active": 2, "suspended": 0}]
    assert seen(cluster, run).state == "running"


def test_a_jobset_ends_well_and_goes_after_its_time(cluster: Simulation) -> None:
    run = submit(cluster, ttl_seconds=100)
    cluster.settle()
    assert cluster.end(run.name) == 2
    cluster.settle()
    status = workload(cluster, run)["status"]
    assert (status["terminalState"], condition({"status": status}, "Completed")["status"]) == ("Completed", "True")
    assert seen(cluster, run).state == "succeeded"
    assert len(cluster.pods(run.name)) == 2  # their logs can still be read
    cluster.server.shift += 101
    cluster.settle()
    assert [cluster.server.all(kind) for kind in ("JobSet", "Job", "Pod", "Service")] == [[], [], [], []]


def test_a_failed_pod_restarts_all_of_it_until_it_may_no_more(cluster: Simulation) -> None:
    run = submit(cluster, max_restarts=1)
    cluster.settle()
    before = {pod["metadata"]["uid"] for pod in cluster.pods(run.name)}
    cluster.end(run.name, Ending(code=1), host=0)
    states = []
    while cluster.step():
        states.append(seen(cluster, run).state.value)
    assert "restarting" in states
    assert states[-1] == "running"
    assert workload(cluster, run)["status"]["restarts"] == 1
    assert not before & {pod["metadata"]["uid"] for pod in cluster.pods(run.name)}
    marks = {pod["metadata"]["labels"]["jobset.sigs.k8s.io/restart-attempt"] for pod in cluster.pods(run.name)}
    assert marks == {"1"}
    cluster.end(run.name, Ending(code=1), host=1)
    cluster.settle()
    found = seen(cluster, run)
    assert (found.state, found.code, found.restarts) == ("failed", "ReachedMaxRestarts", 1)
    assert f"first failed job: {run.name}-slice-0" in found.reason


@pytest.mark.parametrize("ending", [Ending(code=1, disrupted=True), Ending(code=EXIT_PREEMPTED)])
def test_a_preempted_pod_is_no_failure(cluster: Simulation, ending: Ending) -> None:
    run = submit(cluster, max_restarts=0)
    for restarts in (1, 2):
        cluster.settle()
        cluster.end(run.name, ending, host=0)
        cluster.settle()
        status = workload(cluster, run)["status"]
        assert (status["restarts"], status["restartsCountTowardsMax"]) == (restarts, 0)
    assert seen(cluster, run).state == "running"


def test_a_wrong_spec_fails_at_once(cluster: Simulation) -> None:
    run = submit(cluster, max_restarts=5)
    cluster.settle()
    cluster.end(run.name, Ending(code=EXIT_SPEC), host=0)
    cluster.settle()
    found = seen(cluster, run)
    assert (found.state, found.code, found.restarts) == ("failed", "FailJobSetFailurePolicyAction", 0)


def test_a_jobset_is_suspended_and_goes_on(cluster: Simulation) -> None:
    run = submit(cluster)
    cluster.settle()
    cluster.world.patch(workload(cluster, run), {"spec": {"suspend": True}})
    cluster.settle()
    assert cluster.pods(run.name) == []
    assert condition(workload(cluster, run), "Suspended")["status"] == "True"
    assert seen(cluster, run).state == "queued"
    cluster.world.patch(workload(cluster, run), {"spec": {"suspend": False}})
    cluster.settle()
    assert condition(workload(cluster, run), "Suspended")["status"] == "False"
    assert seen(cluster, run).state == "running"


def test_a_deadline_ends_a_run_for_good(cluster: Simulation) -> None:
    spec = {"name": "a-run", "accelerator": TPU, "kubernetes": {"image": IMAGE, "max_restarts": 3}}
    run = render(parse_spec(yaml.safe_dump({**spec, "runtime": {"max_seconds": 50}})))
    for each in run.objects:
        cluster.server.put(dict(each))
    cluster.settle()
    cluster.server.shift += 51
    cluster.settle()
    job = cluster.server.all("Job")[0]
    assert condition(job, "Failed")["reason"] == "DeadlineExceeded"
    assert seen(cluster, run).state == "failed"


def test_a_service_of_that_name_is_used_whosever_it_is(cluster: Simulation) -> None:
    found = render(parse_spec(yaml.safe_dump({"name": "a-run", "accelerator": TPU, "kubernetes": {"image": IMAGE}})))
    foreign = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": found.name, "namespace": "default"}}
    uid = cluster.server.put({**foreign, "spec": {"selector": {"app": "other"}}})["metadata"]["uid"]
    submit(cluster)
    cluster.settle()
    assert [each["metadata"]["uid"] for each in cluster.server.all("Service")] == [uid]


# ---- pods ----


def test_a_pod_that_no_node_takes_says_why(cluster: Simulation) -> None:
    cluster.kubelet.full = "0/8 nodes are available: 8 Insufficient google.com/tpu."
    run = submit(cluster)
    cluster.settle()
    scheduled = condition(cluster.pods(run.name)[0], "PodScheduled")
    assert (scheduled["status"], scheduled["reason"]) == ("False", "Unschedulable")
    cluster.server.shift += 61
    assert "Insufficient google.com/tpu" in seen(cluster, run).reason
    assert {each["reason"] for each in cluster.server.all("Event")} >= {"FailedScheduling"}
    cluster.kubelet.full = ""
    cluster.settle()
    assert seen(cluster, run).state == "running"


def test_a_pod_waits_for_its_secret(cluster: Simulation) -> None:
    run = submit(cluster, secret_env={"HF_TOKEN": "keys/hf"})
    cluster.settle()
    waiting = cluster.pods(run.name)[0]["status"]["containerStatuses"][0]["state"]["waiting"]
    assert waiting["reason"] == "CreateContainerConfigError"
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys", "namespace": "default"}}
    cluster.server.put({**secret, "stringData": {"hf": "x"}})
    cluster.settle()
    assert seen(cluster, run).state == "running"


def test_an_oom_kill_says_so_and_an_image_that_does_not_come(cluster: Simulation) -> None:
    run = submit(cluster, max_restarts=0)
    cluster.settle()
    cluster.end(run.name, Ending(code=137, reason="OOMKilled"), host=1)
    cluster.settle()
    found = next(pod for pod in cluster.pods(run.name) if pod["status"]["phase"] == "Failed")
    over = found["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (over["exitCode"], over["reason"]) == (137, "OOMKilled")
    cluster.kubelet.work = lambda pod: Work(pull="ErrImagePull")
    submit_other = render(parse_spec(yaml.safe_dump({"name": "b", "accelerator": TPU, "kubernetes": {"image": IMAGE}})))
    for each in submit_other.objects:
        cluster.server.put(dict(each))
    cluster.settle()
    waiting = cluster.pods(submit_other.name)[0]["status"]["containerStatuses"][0]["state"]["waiting"]
    assert waiting["reason"] == "ErrImagePull"


def test_logs_go_with_their_pod_and_its_last_words_come_before(cluster: Simulation) -> None:
    cluster.kubelet.work = lambda pod: Work(last="saved\n")
    run = submit(cluster)
    cluster.settle()
    pod = cluster.pods(run.name, host=0)[0]
    key = (pod["metadata"]["uid"], "worker", 0)
    cluster.world.delete(pod)
    cluster.step()
    text = b"".join(part for _, part in cluster.server.logs.read(key, 0)[0])
    assert text == b"started\nsaved\n"
    cluster.settle()
    assert not cluster.server.logs.known(key)
    assert cluster.pods(run.name, host=0)[0]["metadata"]["uid"] != pod["metadata"]["uid"]  # it was replaced


# ---- RayJob ----


def walk(cluster: Simulation, run: RenderedRun) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for _ in range(60):
        changed = cluster.step()
        status = workload(cluster, run).get("status") or {}
        pair = (status.get("jobDeploymentStatus", ""), status.get("jobStatus", ""))
        if not found or found[-1] != pair:
            found.append(pair)
        if not changed:
            return found
    raise AssertionError("it is not at rest")


def test_a_rayjob_walks_to_its_end(cluster: Simulation) -> None:
    run = submit(cluster, GPU, ttl_seconds=100)
    assert walk(cluster, run) == [("Initializing", ""), ("Running", "PENDING"), ("Running", "RUNNING")]
    assert seen(cluster, run).state == "running"
    assert len(cluster.pods(run.name)) == 2 + 2  # workers, the head, the submitter
    cluster.kuberay.end(run.name)
    assert walk(cluster, run)[-2:] == [("Running", "SUCCEEDED"), ("Complete", "SUCCEEDED")]
    assert seen(cluster, run).state == "succeeded"
    cluster.server.shift += 101
    cluster.settle()
    assert cluster.server.all("RayCluster") == []
    assert workload(cluster, run)["status"]["jobDeploymentStatus"] == "Complete"  # the RayJob itself stays


def test_a_rayjob_that_fails_gets_a_new_cluster_as_often_as_it_may(cluster: Simulation) -> None:
    run = submit(cluster, GPU, max_restarts=1)
    cluster.settle()
    first = workload(cluster, run)["status"]["rayClusterName"]
    cluster.kuberay.end(run.name, "FAILED", "it broke")
    states = walk(cluster, run)
    assert ("Retrying", "FAILED") in states
    assert states[-1] == ("Running", "RUNNING")
    assert workload(cluster, run)["status"]["rayClusterName"] != first
    cluster.kuberay.end(run.name, "FAILED", "it broke again")
    cluster.settle()
    found = seen(cluster, run)
    assert (found.state, found.code) == ("failed", "AppFailed")
    assert "it broke again" in found.reason


def test_a_rayjob_that_was_stopped_is_no_success(cluster: Simulation) -> None:
    run = submit(cluster, GPU)
    cluster.settle()
    cluster.kuberay.end(run.name, "STOPPED")
    assert walk(cluster, run)[-1] == ("Complete", "STOPPED")
    assert seen(cluster, run).state == "cancelled"


def test_a_rayjob_whose_submitter_hangs_stays_running(cluster: Simulation) -> None:
    run = submit(cluster, GPU)
    cluster.settle()
    cluster.kuberay.submitter_hangs = True
    cluster.kuberay.end(run.name)
    assert walk(cluster, run)[-1] == ("Running", "SUCCEEDED")
    assert seen(cluster, run).state == "running"
    cluster.server.shift += 3600
    assert seen(cluster, run).state == "succeeded"


def test_a_rayjob_that_kuberay_refuses_says_so_in_its_status_only(cluster: Simulation) -> None:
    cluster.kuberay.invalid = "The RayJob spec is invalid: submitterConfig"
    run = submit(cluster, GPU)
    cluster.settle()
    found = seen(cluster, run)
    assert (found.state, found.code) == ("failed", "ValidationFailed")


def test_a_word_of_a_later_kuberay_changes_no_state(cluster: Simulation) -> None:
    run = submit(cluster, GPU)
    cluster.kuberay.word = "Hibernating"
    cluster.settle()
    assert seen(cluster, run).reason == "KubeRay says 'Hibernating'"


def test_a_rayjob_is_suspended_and_goes_on(cluster: Simulation) -> None:
    run = submit(cluster, GPU)
    cluster.settle()
    cluster.world.patch(workload(cluster, run), {"spec": {"suspend": True}})
    assert [state for state, _ in walk(cluster, run)][-2:] == ["Suspending", "Suspended"]
    assert cluster.pods(run.name) == []
    cluster.world.patch(workload(cluster, run), {"spec": {"suspend": False}})
    assert walk(cluster, run)[-1] == ("Running", "RUNNING")


# ---- Kueue ----


@pytest.mark.parametrize("accelerator", [TPU, GPU])
def test_kueue_lets_a_job_in_when_there_is_quota(cluster: Simulation, accelerator: dict[str, Any]) -> None:
    chips = 8 if accelerator is TPU else 16
    cluster.kueue.quota = chips - 1
    run = submit(cluster, accelerator, queue="team")
    cluster.settle()
    assert cluster.pods(run.name) == []
    assert (seen(cluster, run).state, seen(cluster, run).code) == ("queued", "ExceedsMaxQuota")
    found = cluster.server.all("Workload")[0]
    assert found["metadata"]["labels"]["kueue.x-k8s.io/job-uid"] == workload(cluster, run)["metadata"]["uid"]
    cluster.kueue.quota = chips
    cluster.settle()
    assert workload(cluster, run)["spec"]["suspend"] is False
    assert seen(cluster, run).state == "running"


def test_kueue_suspends_again_what_was_let_go_by_somebody_else(cluster: Simulation) -> None:
    cluster.kueue.hold = ("WaitingForQuota", "nothing is free")
    run = submit(cluster, queue="team")
    cluster.settle()
    cluster.world.patch(workload(cluster, run), {"spec": {"suspend": False}})
    cluster.settle()
    assert workload(cluster, run)["spec"]["suspend"] is True
    assert seen(cluster, run).reason == "waits for quota in its queue: nothing is free"


def test_kueue_takes_a_place_away_and_gives_it_back(cluster: Simulation) -> None:
    run = submit(cluster, queue="team")
    cluster.settle()
    cluster.kueue.hold = ("WaitingForQuota", "nothing is free")
    cluster.kueue.evict(run.name)
    cluster.settle()
    assert cluster.pods(run.name) == []
    found = seen(cluster, run)
    assert (found.state, found.code) == ("queued", "Preempted")
    cluster.kueue.hold = None
    cluster.settle()
    assert condition(cluster.server.all("Workload")[0], "Evicted")["status"] == "False"
    assert seen(cluster, run).state == "running"


def test_kueue_preempts_what_is_less_important(cluster: Simulation) -> None:
    cluster.kueue.quota = 8
    kind = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "WorkloadPriorityClass", "metadata": {"name": "high"}}
    cluster.server.put({**kind, "value": 100})
    low = submit(cluster, queue="team")
    cluster.settle()
    high = render(
        parse_spec(
            yaml.safe_dump(
                {
                    "name": "urgent",
                    "accelerator": TPU,
                    "kubernetes": {"image": IMAGE, "queue": "team", "priority": "high"},
                }
            )
        )
    )
    for each in high.objects:
        cluster.server.put(dict(each))
    cluster.settle()
    assert len(cluster.pods(high.name)) == 2
    assert cluster.pods(low.name) == []
    cluster.end(high.name)
    cluster.settle()
    assert len([pod for pod in cluster.pods(low.name) if pod["status"]["phase"] == "Running"]) == 2


def test_a_workload_that_is_not_active_is_a_pause(cluster: Simulation) -> None:
    run = submit(cluster, queue="team")
    cluster.settle()
    found = cluster.server.all("Workload")[0]
    cluster.world.patch(found, {"spec": {"active": False}})
    cluster.settle()
    assert cluster.pods(run.name) == []
    assert seen(cluster, run).code == "Deactivated"
    cluster.world.patch(cluster.server.all("Workload")[0], {"spec": {"active": True}})
    cluster.settle()
    assert seen(cluster, run).state == "running"


def test_it_works_by_itself_too(cluster: Simulation, wait: Any) -> None:
    cluster.kubelet.work = lambda pod: Work(seconds=0.1)
    with cluster.running():
        run = submit(cluster)
        wait(lambda: (workload(cluster, run).get("status") or {}).get("terminalState") == "Completed")
