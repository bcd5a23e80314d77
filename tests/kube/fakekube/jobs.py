"""Jobs and JobSets, as their controllers treat them. Source: Kubernetes' job controller; jobset's controller, v0.12."""

from __future__ import annotations

import copy
import re
import secrets
from typing import Any

from twinstep.platform.scheduler.cluster.evidence import seconds

from .resources import Object, Refusal
from .world import World, fresh_status, going, holds

JOBSET = "jobset.sigs.k8s.io"
INDEX = "batch.kubernetes.io/job-completion-index"
ATTEMPT = f"{JOBSET}/restart-attempt"


def indexed_pod(job: Object, index: int) -> Object:
    """Return the pod of one completion index."""
    template, metadata = copy.deepcopy(job["spec"]["template"]), job["metadata"]
    found = template.setdefault("metadata", {})
    labels = {
        **(found.get("labels") or {}),
        "batch.kubernetes.io/job-name": metadata["name"],
        "batch.kubernetes.io/controller-uid": metadata["uid"],
        INDEX: str(index),
    }
    annotations = {**(found.get("annotations") or {}), INDEX: str(index)}
    name = f"{metadata['name']}-{index}-{secrets.token_hex(3)[:5]}"
    body = {**template["spec"], "hostname": f"{metadata['name']}-{index}"}
    own = {"name": name, "namespace": metadata["namespace"], "labels": labels, "annotations": annotations}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": own, "spec": body}


class Jobs:
    """The job controller, for Indexed Jobs whose pods are never restarted in place."""

    def __init__(self, world: World) -> None:
        self._world = world

    def step(self) -> None:
        """Look at every Job once."""
        for job in self._world.objects.list("Job"):
            if not going(job):
                self._look(job)

    def _look(self, job: Object) -> None:
        world, spec, status = self._world, job["spec"], fresh_status(job)
        pods = world.owned("Pod", job)
        alive = [pod for pod in pods if _phase(pod) in ("Pending", "Running") and not going(pod)]
        if holds(job, "Complete") or holds(job, "Failed"):
            for pod in alive:
                world.delete(pod)
            return
        if spec.get("suspend"):
            for pod in alive:
                world.delete(pod)
            status |= {"active": 0, "ready": 0}
            status.pop("startTime", None)
            world.condition(status, "Suspended", True, "JobSuspended", "Job suspended")
            world.status(job, status)
            return
        if holds(job, "Suspended"):
            world.condition(status, "Suspended", False, "JobResumed", "Job resumed")
        status.setdefault("startTime", world.stamp)
        done = {pod["metadata"]["labels"].get(INDEX) for pod in pods if _phase(pod) == "Succeeded"}
        failed = [pod for pod in pods if _phase(pod) == "Failed"]
        status |= {
            "active": len(alive),
            "ready": sum(holds(pod, "Ready") for pod in alive),
            "succeeded": len(done),
            "failed": len(failed),
        }
        if why := self._failure(job, failed, status):
            world.condition(status, "Failed", True, *why)
            world.event(job, why[0], why[1], warning=True, by="job-controller")
        elif len(done) >= spec.get("completions", 1):
            status["completionTime"] = world.stamp
            world.condition(status, "Complete", True, "CompletionsReached", "Reached expected number of succeeded pods")
        else:
            self._fill(job, done | {pod["metadata"]["labels"].get(INDEX) for pod in pods if not _lost(pod)})
        world.status(job, status)

    def _fill(self, job: Object, taken: set[Any]) -> None:
        for index in range(job["spec"].get("completions", 1)):
            if str(index) in taken:
                continue
            try:
                if pod := self._world.create(indexed_pod(job, index), job, manager="kube-controller-manager"):
                    said = f"Created pod: {pod['metadata']['name']}"
                    self._world.event(job, "SuccessfulCreate", said, by="job-controller")
            except Refusal as refusal:
                self._world.event(job, "FailedCreate", refusal.message, warning=True, by="job-controller")

    def _failure(self, job: Object, failed: list[Object], status: Object) -> tuple[str, str] | None:
        spec = job["spec"]
        for pod in failed:
            for index, rule in enumerate((spec.get("podFailurePolicy") or {}).get("rules", ())):
                if (said := _matches(rule, pod)) and rule["action"] == "FailJob":
                    return "PodFailurePolicy", f"{said} matching FailJob rule at index {index}"
        if len(failed) > spec.get("backoffLimit", 6):
            return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
        started, limit = seconds(status.get("startTime")), spec.get("activeDeadlineSeconds")
        if limit is not None and started is not None and self._world.now - started >= limit:
            return "DeadlineExceeded", "Job was active longer than specified deadline"
        return None


def _matches(rule: Object, pod: Object) -> str:
    where = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    for wanted in rule.get("onPodConditions", ()):
        if holds(pod, wanted["type"]):
            return f"Pod {where} has condition {wanted['type']}"
    codes = rule.get("onExitCodes")
    if not codes:
        return ""
    for each in pod["status"].get("containerStatuses", ()):
        code = ((each.get("state") or {}).get("terminated") or {}).get("exitCode", 0)
        inside = code in codes["values"]
        named = codes.get("containerName") in (None, each["name"])
        if named and code and inside is (codes["operator"] == "In"):
            return f"Container {each['name']} for pod {where} failed with exit code {code}"
    return ""


def _phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase", "Pending"))


def _lost(pod: Object) -> bool:
    """Say whether another pod may take this one's index: with a pod failure policy, once it has ended only."""
    return _phase(pod) == "Failed"


class JobSets:
    """The JobSet controller."""

    def __init__(self, world: World) -> None:
        self._world = world

    def step(self) -> None:
        """Look at every JobSet once."""
        for each in self._world.objects.list("JobSet"):
            if not going(each) and not each["spec"].get("managedBy"):
                self._look(each)

    def _look(self, jobset: Object) -> None:
        world, status = self._world, fresh_status(jobset)
        jobs = world.owned("Job", jobset)
        if status.get("terminalState"):
            self._tidy(jobset, jobs, status)
            return
        status.setdefault("restarts", 0)
        status.setdefault("restartsCountTowardsMax", 0)
        now = [job for job in jobs if job["metadata"]["labels"][ATTEMPT] == str(status["restarts"])]
        for job in jobs:
            if job not in now:
                world.delete(job, propagation="Foreground")
        self._service(jobset)
        suspended = bool(jobset["spec"].get("suspend"))
        self._fill(jobset, {job["metadata"]["name"] for job in jobs}, status["restarts"], suspended)
        for job in now:
            if bool(job["spec"].get("suspend")) is not suspended:
                world.patch(job, {"spec": {"suspend": suspended}})
        self._suspension(status, suspended)
        status["replicatedJobsStatus"] = [_count(each["name"], now) for each in jobset["spec"]["replicatedJobs"]]
        wanted = sum(each["replicas"] for each in jobset["spec"]["replicatedJobs"])
        if failed := [job for job in now if holds(job, "Failed")]:
            self._fail(jobset, min(failed, key=_when), status)
        elif len(now) == wanted and all(holds(job, "Complete") for job in now):
            self._end(jobset, status, "Completed", "AllJobsCompleted", "jobset completed successfully")
        elif holds({"status": status}, "RestartingJobSet") and len(now) == wanted:
            world.condition(status, "RestartingJobSet", False, "JobsRecreated", "all jobs were created again")
        world.status(jobset, status)

    def _suspension(self, status: Object, suspended: bool) -> None:
        if suspended:
            self._world.condition(status, "Suspended", True, "SuspendedJobs", "jobset is suspended")
        elif holds({"status": status}, "Suspended"):
            self._world.condition(status, "Suspended", False, "ResumeJobs", "jobset is resumed")

    def _service(self, jobset: Object) -> None:
        """Make the headless Service; one of that name is used, whosever it is."""
        metadata = jobset["metadata"]
        name = (jobset["spec"].get("network") or {}).get("subdomain") or metadata["name"]
        body = {"clusterIP": "None", "selector": {f"{JOBSET}/jobset-name": metadata["name"]}}
        own = {"name": name, "namespace": metadata["namespace"]}
        self._world.create({"apiVersion": "v1", "kind": "Service", "metadata": own, "spec": body}, jobset)

    def _fill(self, jobset: Object, there: set[str], attempt: int, suspended: bool) -> None:
        name, namespace = jobset["metadata"]["name"], jobset["metadata"]["namespace"]
        for replicated in jobset["spec"]["replicatedJobs"]:
            for index in range(replicated["replicas"]):
                own = f"{name}-{replicated['name']}-{index}"
                if own in there:
                    continue
                marks = {
                    f"{JOBSET}/jobset-name": name,
                    f"{JOBSET}/jobset-uid": jobset["metadata"]["uid"],
                    f"{JOBSET}/replicatedjob-name": replicated["name"],
                    f"{JOBSET}/replicatedjob-replicas": str(replicated["replicas"]),
                    f"{JOBSET}/job-index": str(index),
                    ATTEMPT: str(attempt),
                }
                template = copy.deepcopy(replicated["template"])
                labels = {**((template.get("metadata") or {}).get("labels") or {}), **marks}
                spec = {**template["spec"], "suspend": suspended}
                pod = spec["template"].setdefault("metadata", {})
                pod["labels"] = {**(pod.get("labels") or {}), **marks}
                pod["annotations"] = {**(pod.get("annotations") or {}), **marks}
                job = {"apiVersion": "batch/v1", "kind": "Job", "spec": spec}
                job["metadata"] = {"name": own, "namespace": namespace, "labels": labels, "annotations": marks}
                self._world.create(job, jobset, manager="jobset-controller")

    def _fail(self, jobset: Object, job: Object, status: Object) -> None:
        policy, first = jobset["spec"].get("failurePolicy"), f" (first failed job: {job['metadata']['name']})"
        if policy is None:
            self._end(jobset, status, "Failed", "FailedJobs", f"jobset failed due to one or more job failures{first}")
            return
        action = next((rule["action"] for rule in policy.get("rules", ()) if _fits(rule, job)), "RestartJobSet")
        if action == "FailJobSet":
            said = f"jobset failed due to FailJobSet failure policy action{first}"
            self._end(jobset, status, "Failed", "FailJobSetFailurePolicyAction", said)
            return
        counts = action == "RestartJobSet"
        if counts and status["restartsCountTowardsMax"] >= policy.get("maxRestarts", 0):
            said = f"jobset failed due to reaching max number of restarts{first}"
            self._end(jobset, status, "Failed", "ReachedMaxRestarts", said)
            return
        status["restarts"] += 1
        status["restartsCountTowardsMax"] += counts
        self._world.condition(status, "RestartingJobSet", True, "RestartJobSet", f"restarting jobset{first}")
        self._world.event(jobset, "RestartJobSet", f"restarting jobset{first}", warning=True, by="jobset-controller")
        status["replicatedJobsStatus"] = [_count(each["name"], []) for each in jobset["spec"]["replicatedJobs"]]

    def _end(self, jobset: Object, status: Object, state: str, reason: str, message: str) -> None:
        status["terminalState"] = state
        self._world.condition(status, state, True, reason, message)
        self._world.event(jobset, reason, message, warning=state == "Failed", by="jobset-controller")

    def _tidy(self, jobset: Object, jobs: list[Object], status: Object) -> None:
        """An ended JobSet's active Jobs go, their logs with them; after its time to live it goes itself."""
        for job in jobs:
            if not holds(job, "Complete") and not holds(job, "Failed"):
                self._world.delete(job, propagation="Foreground")
        ttl = jobset["spec"].get("ttlSecondsAfterFinished")
        ended = next(each for each in status["conditions"] if each["type"] == status["terminalState"])
        since = seconds(ended["lastTransitionTime"]) or 0.0
        if ttl is not None and self._world.now - since >= ttl:
            self._world.delete(jobset, propagation="Foreground")


def _fits(rule: Object, job: Object) -> bool:
    failed = next(each for each in job["status"]["conditions"] if each["type"] == "Failed")
    reasons, patterns = rule.get("onJobFailureReasons"), rule.get("onJobFailureMessagePatterns")
    targets = rule.get("targetReplicatedJobs")
    return (
        (not reasons or failed["reason"] in reasons)
        and (not patterns or any(re.search(each, failed["message"]) for each in patterns))
        and (not targets or job["metadata"]["labels"][f"{JOBSET}/replicatedjob-name"] in targets)
    )


def _when(job: Object) -> tuple[str, str]:
    failed = next(each for each in job["status"]["conditions"] if each["type"] == "Failed")
    return failed["lastTransitionTime"], job["metadata"]["name"]


def _count(name: str, jobs: list[Object]) -> Object:
    """Return the counts of one replicated job: of Jobs, not of pods."""
    own = [job for job in jobs if job["metadata"]["labels"][f"{JOBSET}/replicatedjob-name"] == name]
    found = {"name": name, "ready": 0, "succeeded": 0, "failed": 0, "active": 0, "suspended": 0}
    for job in own:
        status = job.get("status") or {}
        if holds(job, "Complete"):
            found["succeeded"] += 1
        elif holds(job, "Failed"):
            found["failed"] += 1
        elif job["spec"].get("suspend"):
            found["suspended"] += 1
        else:
            found["active"] += status.get("active", 0) > 0
            done = status.get("ready", 0) + status.get("succeeded", 0)
            found["ready"] += done >= min(job["spec"].get("parallelism", 1), job["spec"].get("completions", 1))
    return found
