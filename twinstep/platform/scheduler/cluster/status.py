"""What a JobSet's or a RayJob's status says of a run: one finding, by precedence, the first row that fits.

Final findings are final for the store too: an object that goes after its run ended (TTL, a tidy admin) changes nothing.
Sources: JobSet v1alpha2 and its controller; KubeRay v1 and `rayjob_controller.go`; Kueue v1beta2's conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from twinstep.platform.scheduler.cluster.evidence import Evidence, Object, fails, holds, seconds
from twinstep.spec.states import RunState

UNSCHEDULABLE_S = 60.0  # a pod that no node takes for so long waits for capacity, not for the scheduler
UNSCHEDULABLE = "Unschedulable"
FINISHING_S = 600.0  # Ray's job is done; its submitter may take so long to say so
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a look says."""

    state: RunState
    reason: str
    """Why, in words for people."""
    restarts: int = 0
    """Times the cluster has started the pods again within the run."""
    code: str = ""
    """The cluster's own word for the reason: WaitingForQuota, ReachedMaxRestarts."""
    since: float | None = None
    """Unix seconds since when it waits for nodes; None where it does not."""
    gone: bool = False
    """The workload is not there."""


def find(evidence: Evidence, *, asked_to_stop: bool) -> Finding:
    """Return what `evidence` says of a run that has not ended yet."""
    workload = evidence.workload
    if workload is None:
        return _gone(asked_to_stop)
    found = READERS[workload["kind"]](evidence)
    if asked_to_stop and workload["metadata"].get("deletionTimestamp") and found.state not in _ENDS:
        return Finding(state=found.state, reason="is being taken down", restarts=found.restarts, code="Deleting")
    return found


_ENDS = (RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED)


def _gone(asked_to_stop: bool) -> Finding:
    if asked_to_stop:
        return Finding(state=RunState.CANCELLED, reason="cancelled", gone=True)
    return Finding(
        state=RunState.FAILED,
        reason="its objects are gone from the cluster: somebody else deleted them before it ended",
        code="Lost",
        gone=True,
    )


# ---- queueing, the same for both ----


def is_suspended(evidence: Evidence) -> bool | None:
    """Say whether somebody holds a workload back, whoever that is; None where its objects do not say.

    A queue suspends what it has not admitted: of a queued workload its Workload says whether it may be admitted.
    """
    workload, admission = evidence.workload, evidence.admission
    if workload is None:
        return None
    if QUEUE_LABEL not in (workload["metadata"].get("labels") or {}):
        return bool((workload.get("spec") or {}).get("suspend"))
    return None if admission is None else (admission.get("spec") or {}).get("active") is False


def _waiting(evidence: Evidence) -> Finding | None:
    """Return why a suspended workload is suspended; None where it is not."""
    workload = evidence.workload or {}
    if not workload["spec"].get("suspend"):
        return None
    if QUEUE_LABEL not in (workload["metadata"].get("labels") or {}):
        return Finding(state=RunState.QUEUED, reason="is suspended", code="Suspended")
    evicted = holds(evidence.admission, "Evicted") or holds(evidence.admission, "Preempted")
    if evicted:
        return Finding(
            state=RunState.QUEUED,
            reason=f"was taken off its nodes: {evicted.message or evicted.reason}",
            code=evicted.reason,
        )
    waits = fails(evidence.admission, "QuotaReserved") or fails(evidence.admission, "Admitted")
    if waits:
        return Finding(state=RunState.QUEUED, reason=_sentence(waits.message, waits.reason), code=waits.reason)
    return Finding(state=RunState.QUEUED, reason="waits for its queue to look at it", code="Pending")


def _sentence(message: str, reason: str) -> str:
    known = QUEUE_REASONS.get(reason)
    return f"{known}: {message}" if known and message else known or message or reason


QUEUE_REASONS: Mapping[str, str] = {
    "Pending": "waits in its queue",
    "WaitingForQuota": "waits for quota in its queue",
    "ExceedsMaxQuota": "asks for more than its queue may ever give",
    "NoMatchingFlavor": "no flavor of its queue has such nodes",
    "TopologyPlacementFailed": "no place with that topology is free",
    "Misconfigured": "its queue is not set up right",
    "Inadmissible": "its queue cannot admit it",
    "PodsReadyTimeout": "its pods were not ready in time",
    "Deactivated": "it was deactivated",
}
"""Kueue's reasons in words."""


# ---- JobSet ----


def _jobset(evidence: Evidence) -> Finding:
    workload = evidence.workload or {}
    status: Object = workload.get("status") or {}
    restarts = int(status.get("restarts") or 0)
    failed = holds(workload, "Failed")
    if status.get("terminalState") == "Completed" or (holds(workload, "Completed") and not failed):
        return Finding(state=RunState.SUCCEEDED, reason="all its pods ended well", restarts=restarts)
    if status.get("terminalState") == "Failed" or failed:
        why = failed.message or failed.reason if failed else ""
        code = failed.reason if failed else "Failed"
        return Finding(
            state=RunState.FAILED, reason=f"{JOBSET_REASONS.get(code, 'the JobSet failed')}: {why}".rstrip(": "),
            restarts=restarts, code=code,
        )  # fmt: skip
    if waiting := _waiting(evidence):
        return waiting
    wanted, ready = _slices(workload, status)
    if ready < wanted and (waiting := _without_nodes(evidence, restarts)):
        return waiting
    if holds(workload, "RestartingJobSet") or (restarts and ready < wanted):
        return Finding(
            state=RunState.RESTARTING, reason=f"its pods are started again, for the {_nth(restarts)} time",
            restarts=restarts, code="RestartingJobSet",
        )  # fmt: skip
    if ready < wanted:
        return _starting(f"{ready} of {wanted} slices are ready", restarts)
    return Finding(state=RunState.RUNNING, reason="all its slices are ready", restarts=restarts)


JOBSET_REASONS: Mapping[str, str] = {
    "ReachedMaxRestarts": "it failed more often than it may be started again",
    "FailedJobs": "a slice failed",
    "FailJobSetFailurePolicyAction": "it failed in a way that starting it again cannot mend",
}
"""JobSet's reasons of failure in words."""


def _slices(workload: Object, status: Object) -> tuple[int, int]:
    """Return (wanted, ready): the status counts child Jobs, which are slices, in an order that is not the spec's."""
    wanted = sum(int(job.get("replicas", 1)) for job in workload["spec"]["replicatedJobs"])
    jobs = status.get("replicatedJobsStatus") or ()
    return wanted, sum(int(job.get("ready") or 0) + int(job.get("succeeded") or 0) for job in jobs)


def _nth(count: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(count % 10 if count % 100 not in (11, 12, 13) else 0, "th")
    return f"{max(count, 1)}{ending if count else 'st'}"


# ---- RayJob ----


def _rayjob(evidence: Evidence) -> Finding:
    workload = evidence.workload or {}
    status: Object = workload.get("status") or {}
    deployment, job = status.get("jobDeploymentStatus") or "", status.get("jobStatus") or ""
    restarts = int(status.get("failed") or 0)
    if deployment in ("Complete", "Failed", "ValidationFailed"):
        return _ray_end(deployment, job, status, restarts)
    if deployment in ("Suspending", "Suspended") or not deployment:
        if waiting := _waiting(evidence):
            return waiting
        if deployment:
            return Finding(state=RunState.QUEUED, reason="is suspended", restarts=restarts, code=deployment)
    if deployment == "Retrying":
        return Finding(
            state=RunState.RESTARTING, reason="a new Ray cluster is made for it", restarts=restarts, code=deployment
        )
    if deployment == "Running" and job in ("SUCCEEDED", "FAILED", "STOPPED"):
        return _ray_finishing(job, status, evidence.now, restarts)
    if deployment == "Running" and job == "RUNNING":
        return Finding(state=RunState.RUNNING, reason="its Ray job runs", restarts=restarts)
    if deployment in ("", "Initializing", "Waiting", "Running"):
        starts = "its Ray cluster is being made" if deployment != "Running" else "its Ray job starts"
        return _without_nodes(evidence, restarts) or _starting(starts, restarts)
    # A word that a later KubeRay has: say it, and stay.
    return Finding(state=RunState.STARTING, reason=f"KubeRay says {deployment!r}", restarts=restarts, code=deployment)


def _ray_end(deployment: str, job: str, status: Object, restarts: int) -> Finding:
    message = status.get("message") or ""
    if deployment == "Complete" and job == "STOPPED":  # no success: somebody stopped it
        return Finding(state=RunState.CANCELLED, reason="its Ray job was stopped", restarts=restarts, code=job)
    if deployment == "Complete" and job != "FAILED":
        return Finding(state=RunState.SUCCEEDED, reason="its Ray job ended well", restarts=restarts)
    code = status.get("reason") or deployment
    why = RAY_REASONS.get(code, "the RayJob failed")
    return Finding(state=RunState.FAILED, reason=f"{why}: {message}".rstrip(": "), restarts=restarts, code=code)


def _ray_finishing(job: str, status: Object, now: float, restarts: int) -> Finding:
    """Ray's job has ended and KubeRay has not said so yet: give its submitter time, then believe Ray."""
    ended = seconds(status.get("endTime"))
    if ended is not None and now - ended > FINISHING_S:
        return _ray_end("Complete", job, {**status, "reason": status.get("reason") or "AppFailed"}, restarts)
    return Finding(
        state=RunState.RUNNING, reason="its Ray job has ended; KubeRay tidies up", restarts=restarts, code=job
    )


RAY_REASONS: Mapping[str, str] = {
    "AppFailed": "its worker failed",
    "SubmissionFailed": "Ray could not be handed the job",
    "DeadlineExceeded": "stopped at its time limit",
    "PreRunningDeadlineExceeded": "it did not start in time",
    "JobStatusCheckTimeoutExceeded": "its Ray head did not answer any more",
    "ValidationFailed": "KubeRay refused it",
}
"""KubeRay's reasons of failure in words."""


# ---- pods ----


def _starting(reason: str, restarts: int) -> Finding:
    return Finding(state=RunState.STARTING, reason=reason, restarts=restarts, code="Starting")


def _without_nodes(evidence: Evidence, restarts: int) -> Finding | None:
    """Return that a run was admitted and waits all the same, for nodes that there are not; None where it does not.

    It holds nothing of what it asked for, or not all, and cannot go on: that is a queue, whoever keeps it.
    """
    without = [found for pod in evidence.pods if (found := fails(pod, "PodScheduled"))]
    since = [(found.since, found.message) for found in without if found.reason == UNSCHEDULABLE and found.since]
    first, message = min(since, default=(evidence.now, ""))
    if evidence.now - first <= UNSCHEDULABLE_S:
        return None
    reason = f"waits for nodes: {message}"
    return Finding(state=RunState.QUEUED, reason=reason, restarts=restarts, code=UNSCHEDULABLE, since=first)


READERS: dict[str, Callable[[Evidence], Finding]] = {"JobSet": _jobset, "RayJob": _rayjob}
"""How a workload's status is read, by kind."""
