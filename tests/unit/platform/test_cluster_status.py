"""What a cluster's objects say of a run: the tables of precedence, row by row, and what must not mislead them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinstep.platform.scheduler.cluster.evidence import Evidence, holds, number, seconds
from twinstep.platform.scheduler.cluster.status import FINISHING_S, UNSCHEDULABLE_S, Finding, find
from twinstep.spec.states import RunState

NOW = 1_800_000_000.0
QUEUED = {"kueue.x-k8s.io/queue-name": "q"}


def condition(kind: str, status: str = "True", reason: str = "", message: str = "", time: str | None = None) -> Any:
    found = {"type": kind, "status": status, "reason": reason, "message": message}
    return found if time is None else {**found, "lastTransitionTime": time}


def jobset(
    *conditions: Any,
    ready: int = 0,
    succeeded: int = 0,
    restarts: int = 0,
    replicas: int = 2,
    suspend: bool = False,
    labels: Any = None,
    terminal: str | None = None,
    deleting: bool = False,
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": "a", "labels": labels or {}}
    if deleting:
        metadata["deletionTimestamp"] = "2026-11-29T10:00:00Z"
    status: dict[str, Any] = {
        "conditions": list(conditions),
        "restarts": restarts,
        "replicatedJobsStatus": [{"name": "slice", "ready": ready, "succeeded": succeeded, "active": replicas}],
    }
    if terminal:
        status["terminalState"] = terminal
    spec = {"suspend": suspend, "replicatedJobs": [{"name": "slice", "replicas": replicas}]}
    return {"kind": "JobSet", "metadata": metadata, "spec": spec, "status": status}


def rayjob(deployment: str = "", job: str = "", **status: Any) -> dict[str, Any]:
    return {
        "kind": "RayJob",
        "metadata": {"name": "a", "labels": {}},
        "spec": {"suspend": False},
        "status": {"jobDeploymentStatus": deployment, "jobStatus": job, **status},
    }


def look(workload: Any, *, asked: bool = False, admission: Any = None, pods: Any = (), now: float = NOW) -> Finding:
    return find(Evidence(workload=workload, admission=admission, pods=pods, now=now), asked_to_stop=asked)


def unschedulable(since: float) -> Any:
    from datetime import UTC, datetime

    time = datetime.fromtimestamp(since, UTC).isoformat()
    return {"status": {"conditions": [condition("PodScheduled", "False", "Unschedulable", "0/3 nodes fit", time)]}}


S = RunState
JOBSETS = [
    ("not there", None, S.FAILED, "gone from the cluster"),
    ("completed", jobset(condition("Completed"), ready=0), S.SUCCEEDED, "ended well"),
    ("terminal state alone", jobset(terminal="Completed"), S.SUCCEEDED, "ended well"),
    (
        "failed",
        jobset(condition("Failed", reason="ReachedMaxRestarts", message="job a-slice-0")),
        S.FAILED,
        "a-slice-0",
    ),
    ("failed by policy", jobset(condition("Failed", reason="FailJobSetFailurePolicyAction")), S.FAILED, "cannot mend"),
    ("suspended by hand", jobset(suspend=True), S.QUEUED, "suspended"),
    ("suspended in a queue", jobset(suspend=True, labels=QUEUED), S.QUEUED, "queue"),
    ("restarting", jobset(condition("RestartingJobSet"), restarts=2), S.RESTARTING, "2nd time"),
    ("restarted, not ready", jobset(restarts=3, ready=1), S.RESTARTING, "3rd time"),
    ("starting", jobset(ready=1), S.STARTING, "1 of 2 slices"),
    ("no status yet", {**jobset(), "status": {}}, S.STARTING, "0 of 2"),
    ("running", jobset(ready=2), S.RUNNING, "all its slices"),
    ("one slice done early", jobset(ready=1, succeeded=1), S.RUNNING, "all its slices"),
    ("running after restarts", jobset(ready=2, restarts=4), S.RUNNING, "all its slices"),
]


@pytest.mark.parametrize(("workload", "state", "words"), [row[1:] for row in JOBSETS], ids=[row[0] for row in JOBSETS])
def test_a_jobset_says(workload: Any, state: RunState, words: str) -> None:
    found = look(workload)
    assert found.state is state
    assert words in found.reason


RAYJOBS = [
    ("new", rayjob(), S.STARTING, "being made"),
    ("initializing", rayjob("Initializing"), S.STARTING, "being made"),
    ("submitted", rayjob("Running", "PENDING"), S.STARTING, "starts"),
    ("running", rayjob("Running", "RUNNING"), S.RUNNING, "runs"),
    ("finishing", rayjob("Running", "SUCCEEDED"), S.RUNNING, "tidies up"),
    ("complete", rayjob("Complete", "SUCCEEDED"), S.SUCCEEDED, "ended well"),
    ("complete but stopped", rayjob("Complete", "STOPPED"), S.CANCELLED, "stopped"),
    ("complete but failed", rayjob("Complete", "FAILED", reason="AppFailed", message="exit 1"), S.FAILED, "exit 1"),
    ("failed", rayjob("Failed", "FAILED", reason="SubmissionFailed"), S.FAILED, "handed"),
    ("refused", rayjob("ValidationFailed", message="bad"), S.FAILED, "refused"),
    ("retrying", rayjob("Retrying", failed=1), S.RESTARTING, "new Ray cluster"),
    ("suspended", rayjob("Suspended"), S.QUEUED, "suspended"),
    ("a word of tomorrow", rayjob("Hibernating", "RUNNING"), S.STARTING, "Hibernating"),
]


@pytest.mark.parametrize(("workload", "state", "words"), [row[1:] for row in RAYJOBS], ids=[row[0] for row in RAYJOBS])
def test_a_rayjob_says(workload: Any, state: RunState, words: str) -> None:
    found = look(workload)
    assert found.state is state
    assert words in found.reason


def test_a_deleted_workload_is_cancelled_if_we_asked_and_lost_if_we_did_not() -> None:
    assert look(None, asked=True).state is S.CANCELLED
    assert look(None).state is S.FAILED
    assert look(None).code == "Lost"
    assert look(jobset(ready=2, deleting=True), asked=True).reason == "is being taken down"
    assert look(jobset(condition("Completed"), deleting=True), asked=True).state is S.SUCCEEDED


def test_the_queues_reason_is_the_runs() -> None:
    waiting = condition("QuotaReserved", "False", "WaitingForQuota", "needs 9, 4 free")
    admission = {"status": {"conditions": [waiting]}}
    found = look(jobset(suspend=True, labels=QUEUED), admission=admission)
    assert (found.state, found.code) == (S.QUEUED, "WaitingForQuota")
    assert found.reason == "waits for quota in its queue: needs 9, 4 free"
    evicted = {
        "status": {
            "conditions": [
                condition("Evicted", reason="Preempted", message="for job b"),
                *admission["status"]["conditions"],
            ]
        }
    }
    assert "taken off" in look(jobset(suspend=True, labels=QUEUED), admission=evicted).reason
    old = {
        "status": {
            "conditions": [
                condition("Evicted", "False", "QuotaReserved"),
                condition("QuotaReserved", "False", "Pending"),
            ]
        }
    }
    assert "taken off" not in look(jobset(suspend=True, labels=QUEUED), admission=old).reason


def test_a_pod_that_no_node_takes_is_said_after_a_while() -> None:
    young, old = unschedulable(NOW - UNSCHEDULABLE_S / 2), unschedulable(NOW - UNSCHEDULABLE_S * 2)
    assert look(jobset(), pods=(young,)).code == "Starting"
    found = look(jobset(), pods=(young, old))
    assert (found.state, found.code) == (S.QUEUED, "Unschedulable"), "admitted or not, it waits"
    assert "0/3 nodes fit" in found.reason
    assert look(jobset(restarts=2, ready=1), pods=(old,)).restarts == 2
    assert look(jobset(ready=2), pods=(old,)).state is S.RUNNING, "a pod that nothing waits for"


@pytest.mark.parametrize(
    ("deployment", "job", "state"),
    [
        ("", "", S.QUEUED),
        ("Initializing", "", S.QUEUED),
        ("Running", "PENDING", S.QUEUED),
        ("Running", "RUNNING", S.RUNNING),
    ],
)
def test_a_ray_cluster_that_no_node_takes_waits_too(deployment: str, job: str, state: RunState) -> None:
    found = look(rayjob(deployment, job), pods=(unschedulable(NOW - UNSCHEDULABLE_S * 2),))
    assert found.state is state


def test_a_job_that_ray_ended_is_believed_after_a_while() -> None:
    ended = rayjob("Running", "SUCCEEDED", endTime="2026-11-29T10:00:00Z")
    at = seconds("2026-11-29T10:00:00Z")
    assert at is not None
    assert look(ended, now=at + FINISHING_S / 2).state is S.RUNNING
    assert look(ended, now=at + FINISHING_S * 2).state is S.SUCCEEDED
    failed = rayjob("Running", "FAILED", endTime="2026-11-29T10:00:00Z")
    assert look(failed, now=at + FINISHING_S * 2).state is S.FAILED


def test_order_and_times_of_conditions_decide_nothing() -> None:
    conditions = [
        condition("Completed", time="2026-11-29T10:00:00Z"),
        condition("Suspended", "False", time="2026-11-29T11:00:00Z"),
        condition("Failed", "False"),
        condition("RestartingJobSet", "Unknown", time="not a time"),
    ]
    for order in itertools.permutations(conditions):
        assert look(jobset(*order)).state is S.SUCCEEDED


def test_times_of_every_offset_are_read() -> None:
    assert seconds("2026-11-29T12:00:00+02:00") == seconds("2026-11-29T10:00:00Z") == seconds("2026-11-29T10:00:00.0Z")
    assert seconds(None) is None
    assert seconds("yesterday") is None
    assert holds({"status": None}, "Failed") is None


@given(
    types=st.lists(st.sampled_from(["Completed", "Failed", "Suspended", "RestartingJobSet", "Odd"]), max_size=5),
    statuses=st.lists(st.sampled_from(["True", "False", "Unknown"]), min_size=5, max_size=5),
    ready=st.integers(0, 3), succeeded=st.integers(0, 3), restarts=st.integers(0, 5), suspend=st.booleans(),
    queued=st.booleans(), asked=st.booleans(), deleting=st.booleans(),
)  # fmt: skip
def test_any_jobset_says_something_in_words(
    types: list[str], statuses: list[str], ready: int, succeeded: int, restarts: int, suspend: bool,
    queued: bool, asked: bool, deleting: bool,
) -> None:  # fmt: skip
    conditions = [condition(kind, status) for kind, status in zip(types, statuses, strict=False)]
    value = jobset(
        *conditions, ready=ready, succeeded=succeeded, restarts=restarts, suspend=suspend,
        labels=QUEUED if queued else None, deleting=deleting,
    )  # fmt: skip
    found = look(value, asked=asked)
    assert found.reason
    assert found.restarts in (0, restarts)
    failed = ("Failed", "True") in zip(types, statuses, strict=False)
    assert (found.state is S.FAILED) == failed


@given(deployment=st.text(max_size=12), job=st.text(max_size=12), failed=st.integers(0, 9))
def test_any_rayjob_says_something_in_words(deployment: str, job: str, failed: int) -> None:
    assert look(rayjob(deployment, job, failed=failed)).reason


@given(st.text(max_size=12) | st.integers(0, 10**12).map(str))
def test_a_label_is_read_as_a_number_or_as_none_and_never_raises(text: str) -> None:
    found = number(text)
    assert found is None or (0 <= found < 10**9 and int(text) == found)
    assert number(None) is number("\N{SUPERSCRIPT TWO}") is None
