"""Kueue: Workloads of queued jobs, quota, admission, eviction. Source: Kueue v1beta2's conditions and reasons."""

from __future__ import annotations

import hashlib
from typing import Any

from .resources import Object
from .world import World, fresh_status, going, holds

QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"


class Kueue:
    """The queueing system, with one number of chips for all queues."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.quota: int | None = None
        """Chips it may give in all; None: any number."""
        self.hold: tuple[str, str] | None = None
        """(reason, message) for which nothing is admitted; None: what fits is."""

    def step(self) -> None:
        """Look at every queued JobSet and RayJob once."""
        for kind in ("JobSet", "RayJob"):
            for job in self._world.objects.list(kind):
                if (job["metadata"].get("labels") or {}).get(QUEUE) and not going(job):
                    self._look(job)
        self._admit()

    # ---- what a test does ----

    def evict(self, name: str, reason: str = "Preempted", message: str = "") -> None:
        """Take a job's place away: it is suspended, and waits again."""
        for workload in self._world.objects.list("Workload"):
            if workload["metadata"]["ownerReferences"][0]["name"] == name:
                said = message or "Preempted to accommodate a workload of higher priority"
                self._evict(workload, reason, said)

    # ---- the controller ----

    def _look(self, job: Object) -> None:
        world = self._world
        workload = next(iter(world.owned("Workload", job)), None)
        if workload is None:
            if not _ended(job):
                if not job["spec"].get("suspend"):
                    world.patch(job, {"spec": {"suspend": True}}, manager="kueue")
                world.create(_workload(job, self._priority(job)), job, manager="kueue")
            return
        if _ended(job) and not holds(workload, "Finished"):
            status = fresh_status(workload)
            world.condition(status, "Finished", True, "Succeeded", "Job finished")
            world.status(workload, status)
            return
        if _ended(job):
            return
        if workload["spec"].get("active") is False and holds(workload, "QuotaReserved"):
            self._evict(workload, "Deactivated", "The workload is deactivated")
            return
        # Whoever flips `suspend` himself finds it flipped back.
        wanted = not holds(workload, "Admitted")
        if bool(job["spec"].get("suspend")) is not wanted:
            world.patch(job, {"spec": {"suspend": wanted}}, manager="kueue")

    def _admit(self) -> None:
        waiting, used = [], 0
        for workload in self._world.objects.list("Workload"):
            if holds(workload, "Finished"):
                continue
            if holds(workload, "QuotaReserved"):
                used += _chips(workload)
            elif workload["spec"].get("active", True):
                waiting.append(workload)
        waiting.sort(key=lambda each: (-each["spec"].get("priority", 0), each["metadata"]["creationTimestamp"]))
        for workload in waiting:
            if self.hold:
                self._wait(workload, *self.hold)
                continue
            chips = _chips(workload)
            if self.quota is not None and chips > self.quota:
                self._wait(workload, "ExceedsMaxQuota", f"couldn't assign flavors: {chips} > {self.quota} chips")
            elif self.quota is not None and used + chips > self.quota:
                self._wait(workload, "WaitingForQuota", f"insufficient unused quota, {used + chips - self.quota} more")
                self._preempt(workload)
            else:
                used += chips
                self._reserve(workload)

    def _preempt(self, workload: Object) -> None:
        """Evict the least important workload, where it is less important than this one."""
        held = [each for each in self._world.objects.list("Workload") if holds(each, "QuotaReserved")]
        held = [each for each in held if not holds(each, "Finished")]
        least = min(held, key=lambda each: each["spec"].get("priority", 0), default=None)
        if least is not None and least["spec"].get("priority", 0) < workload["spec"].get("priority", 0):
            name = workload["metadata"]["name"]
            self._evict(least, "Preempted", f"Preempted to accommodate a workload (UID: {name}) due to prioritization")

    def _wait(self, workload: Object, reason: str, message: str) -> None:
        status = fresh_status(workload)
        self._world.condition(status, "QuotaReserved", False, reason, message)
        self._world.status(workload, status)

    def _reserve(self, workload: Object) -> None:
        status = fresh_status(workload)
        for kind in ("Evicted", "Preempted"):
            if holds(workload, kind):
                self._world.condition(status, kind, False, "QuotaReserved", "Previously: evicted")
        self._world.condition(status, "QuotaReserved", True, "QuotaReserved", "Quota reserved in ClusterQueue main")
        self._world.condition(status, "Admitted", True, "Admitted", "The workload is admitted")
        status["admission"] = {
            "clusterQueue": "main",
            "podSetAssignments": [
                {"name": each["name"], "count": each["count"]} for each in workload["spec"]["podSets"]
            ],
        }
        self._world.status(workload, status)
        self._world.event(workload, "Admitted", "Admitted by ClusterQueue main", by="kueue-admission")

    def _evict(self, workload: Object, reason: str, message: str) -> None:
        status = fresh_status(workload)
        self._world.condition(status, "Evicted", True, reason, message)
        if reason == "Preempted":
            self._world.condition(status, "Preempted", True, "InClusterQueue", message)
        self._world.condition(status, "QuotaReserved", False, "Pending", message)
        self._world.condition(status, "Admitted", False, "NoReservation", "The workload has no reservation")
        status.pop("admission", None)
        self._world.status(workload, status)
        self._world.event(workload, "Evicted", message, warning=True, by="kueue")

    def _priority(self, job: Object) -> int:
        name = (job["metadata"].get("labels") or {}).get(PRIORITY)
        found = self._world.get("WorkloadPriorityClass", "", name) if name else None
        return int(found["value"]) if found else 0


def _ended(job: Object) -> bool:
    status: Any = job.get("status") or {}
    return bool(status.get("terminalState")) or status.get("jobDeploymentStatus") in ("Complete", "Failed")


def _workload(job: Object, priority: int) -> Object:
    metadata, kind = job["metadata"], job["kind"].lower()
    ending = hashlib.sha256(metadata["uid"].encode()).hexdigest()[:5]
    name = f"{kind}-{metadata['name']}"[:57] + f"-{ending}"
    if job["kind"] == "JobSet":
        sets = [
            (each["name"], each["replicas"] * each["template"]["spec"].get("parallelism", 1), each["template"]["spec"])
            for each in job["spec"]["replicatedJobs"]
        ]
    else:
        cluster = job["spec"]["rayClusterSpec"]
        sets = [("head", 1, cluster["headGroupSpec"])]
        sets += [
            (each["groupName"], each["replicas"] * each.get("numOfHosts", 1), each)
            for each in cluster.get("workerGroupSpecs", ())
        ]
    spec = {
        "queueName": metadata["labels"][QUEUE],
        "active": True,
        "priority": priority,
        "podSets": [{"name": name, "count": count, "template": body["template"]} for name, count, body in sets],
    }
    labels = {"kueue.x-k8s.io/job-uid": metadata["uid"]}
    own = {"name": name, "namespace": metadata["namespace"], "labels": labels}
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload", "metadata": own, "spec": spec}


def _chips(workload: Object) -> int:
    found = 0
    for each in workload["spec"]["podSets"]:
        for container in each["template"]["spec"]["containers"]:
            limits = (container.get("resources") or {}).get("limits") or {}
            found += each["count"] * sum(int(limits.get(key, 0)) for key in ("google.com/tpu", "nvidia.com/gpu"))
    return found
