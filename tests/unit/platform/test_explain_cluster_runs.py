"""Why a job in a cluster waits or has failed: by Kueue's, the scheduler's, the kubelet's words; the first pod first."""

from __future__ import annotations

from typing import Any

import pytest

from twinstep.platform.scheduler.cluster.causes import WAITS
from twinstep.platform.scheduler.cluster.diagnose import CANNOT_START, diagnose
from twinstep.platform.scheduler.cluster.evidence import Evidence
from twinstep.platform.scheduler.cluster.status import QUEUE_REASONS, Finding
from twinstep.platform.scheduler.explain import explain
from twinstep.platform.store.records import Diagnosis, JobDetail, PodTrouble
from twinstep.spec.states import RunState

S = RunState


def job(state: RunState, reason: str = "waits", **fields: Any) -> JobDetail:
    blank = {str: "", int: 0, float: 1.0}  # most fields say nothing of why
    needed = {name: field.annotation for name, field in JobDetail.model_fields.items() if field.is_required()}
    base = {name: blank.get(kind, {}) for name, kind in needed.items()} | {"id": "job-1", "created_at": 1.0}
    return JobDetail.model_validate({**base, "state": state, "reason": reason, **fields})


def pod(name: str, **fields: Any) -> PodTrouble:
    return PodTrouble(pod=name, slice=0, host=int(name[-1]), container="worker", **fields)


@pytest.mark.parametrize("code", sorted(QUEUE_REASONS))
def test_every_reason_to_wait_in_a_queue_has_a_next_step(code: str) -> None:
    found = explain(job(S.QUEUED, f"{QUEUE_REASONS[code]}: 4 more needed"), diagnosis=Diagnosis(code=code))
    assert found.cause == WAITS[code][0]
    assert "4 more needed" in found.text
    assert found.next_step


def test_pods_that_no_node_takes_and_images_that_are_not_there() -> None:
    message = "waits for nodes: 0/3 nodes are available: insufficient google.com/tpu"
    found = explain(job(S.STARTING, message), diagnosis=Diagnosis(code="Unschedulable", waits=message))
    assert (found.cause, "insufficient google.com/tpu" in found.text) == ("no_nodes", True)
    for reason in CANNOT_START:
        trouble = pod("p-0", reason=reason, message="manifest unknown")
        found = explain(job(S.STARTING), diagnosis=Diagnosis(code="Starting", pods=[trouble]))
        assert found.cause in ("image", "config", "container")
        assert "manifest unknown" in found.text
        assert found.next_step


def test_a_suspended_job_says_how_it_goes_on() -> None:
    found = explain(job(S.QUEUED, "is suspended, as it was asked to be", suspend_requested_at=1.0))
    assert (found.cause, "twinstep resume job-1" in found.next_step) == ("suspended", True)


NCCL = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251"
FAILURES = [
    ([pod("p-1", exit_code=137, reason="OOMKilled"), pod("p-0", exit_code=1, reason="Error")], [NCCL], "host_memory"),
    ([pod("p-0", exit_code=1, reason="Error")], [NCCL], "peer_lost"),
    ([pod("p-0", exit_code=1, reason="Error")], ["RESOURCE_EXHAUSTED: Out of memory", NCCL], "accelerator_memory"),
    ([pod("p-0", exit_code=137, reason="Error")], ["step 7"], "killed"),
    ([pod("p-0", exit_code=2, reason="Error")], [], "spec"),
    ([pod("p-0", exit_code=139, reason="Error")], [], "crash"),
    ([pod("p-0", exit_code=75, reason="Error")], [], "preempted"),
    ([pod("p-0", exit_code=76, reason="Error"), pod("p-1", exit_code=76, reason="Error")], ["step 7"], "peer_lost"),
    ([pod("p-0", exit_code=3, reason="Error")], ["step 7"], "worker_failed"),
    ([pod("p-0", reason="Evicted", message="The node was low on resource: memory")], [], "node_lost"),
]


@pytest.mark.parametrize(("pods", "log", "cause"), FAILURES)
def test_the_first_pod_that_failed_is_the_cause_unless_the_log_tells_more(
    pods: list[PodTrouble], log: list[str], cause: str
) -> None:
    found = explain(job(S.FAILED, "a slice failed"), log=log, diagnosis=Diagnosis(code="FailedJobs", pods=pods))
    assert found.cause == cause
    assert f"(pod {pods[0].pod})" in found.text, "where it happened"
    assert "before any other" in found.text
    assert found.next_step


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("its objects are gone from the cluster: somebody else deleted them before it ended", "lost"),
        ("the cluster refused it: spec.replicatedJobs is too long", "refused"),
        ("it cannot be started: kubernetes.image is required", "refused"),
        ("stopped at its time limit: runtime.max_seconds is 10", "time_limit"),
    ],
)
def test_what_the_reason_says_where_no_pod_says_more(reason: str, cause: str) -> None:
    found = explain(job(S.FAILED, reason))
    assert (found.cause, bool(found.next_step)) == (cause, True)


@pytest.mark.parametrize("pods", [[], *(pods for pods, _, _ in FAILURES)])
@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("stopped at its time limit: runtime.max_seconds is 10", "time_limit"),
        ("waited too long to be started: runtime.max_wait_seconds is 10; it waits for nodes", "wait_limit"),
    ],
)
def test_a_limit_ended_a_run_whatever_failed_before(pods: list[PodTrouble], reason: str, cause: str) -> None:
    found = explain(job(S.FAILED, reason), log=["step 7", NCCL], diagnosis=Diagnosis(code="Unschedulable", pods=pods))
    assert (found.cause, reason in found.text) == (cause, True)
    assert f"runtime.max_{'wait_' if cause == 'wait_limit' else ''}seconds" in found.next_step
    assert NCCL in found.evidence, "what failed before is shown"


def _pod(host: int, code: int, at: str) -> dict[str, Any]:
    ended = {"exitCode": code, "reason": "Error", "finishedAt": at, "message": "line one\nline two"}
    labels = {"jobset.sigs.k8s.io/job-index": "1", "jobset.sigs.k8s.io/restart-attempt": "2"}
    return {
        "metadata": {
            "name": f"p-{host}",
            "labels": labels,
            "annotations": {"batch.kubernetes.io/job-completion-index": str(host)},
        },
        "status": {"containerStatuses": [{"name": "worker", "state": {"terminated": ended}}]},
    }


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ([(1, 134, 10), (0, 1, 12)], 0),  # rank 0 failed, and its peers were gone before it had told so
        ([(1, 134, 10), (2, 143, 11), (0, 2, 10)], 0),
        ([(1, 134, 10), (2, 134, 10)], 1),
        ([(1, 134, 10), (0, 1, 400)], 1),  # another thing, much later
        ([(1, 137, 10), (0, 134, 9)], 1),
        ([(1, 1, 10), (0, 134, 11)], 1),
        ([(1, 76, 10), (0, 134, 11)], 0),  # it crashed, and its peer missed it before its kubelet had told so
        ([(1, 76, 10), (2, 134, 10), (0, 1, 12)], 0),
        ([(1, 76, 10), (2, 143, 11)], 1),
    ],
)
def test_a_worker_that_was_aborted_since_its_peer_was_gone_is_not_the_first(
    ends: list[tuple[int, int, int]], first: int
) -> None:
    pods = [_pod(host, code, f"2026-01-01T00:{at // 60:02}:{at % 60:02}+00:00") for host, code, at in ends]
    finding = Finding(state=S.RESTARTING, reason="again", code="RestartingJobSet")
    found = diagnose(Evidence(workload=None, pods=pods), finding, before=None)
    assert found is not None
    assert found["pods"][0]["host"] == first


def test_a_diagnosis_is_small_says_the_first_first_and_keeps_what_is_gone() -> None:
    finding = Finding(state=S.RESTARTING, reason="again", code="RestartingJobSet")
    pods = [_pod(host, 1, f"2026-01-01T00:00:{30 - host:02}+00:00") for host in range(20)]
    kept = diagnose(Evidence(workload=None, pods=pods), finding, before=None)
    found = Diagnosis.model_validate(kept)
    assert [(each.pod, each.slice, each.host, each.restart) for each in found.pods] == [
        ("p-19", 1, 19, 2), ("p-18", 1, 18, 2), ("p-17", 1, 17, 2)
    ]  # fmt: skip
    assert found.pods[0].message == "line one line two"
    again = diagnose(Evidence(workload=None, pods=()), finding, before=kept)
    assert again == kept, "the pods are gone, what they said is not; and nothing new is written"
    quiet = Finding(state=S.RUNNING, reason="all its slices are ready")
    assert diagnose(Evidence(workload=None, pods=()), quiet, before=None) is None
