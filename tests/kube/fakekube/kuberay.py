"""KubeRay's operator: a RayJob's walk through its states. Source: KubeRay 1.7, `rayjob_controller.go`."""

from __future__ import annotations

import copy
import secrets

from twinstep.platform.scheduler.cluster.evidence import seconds

from .kubelet import is_ready
from .resources import Object
from .world import World, fresh_status, going

ENDS = ("Complete", "Failed", "ValidationFailed")


class KubeRay:
    """The operator, for RayJobs in K8sJobMode."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.invalid = ""
        """Why new RayJobs are refused in their status; empty: they are not."""
        self.submitter_hangs = False
        """Ray's job ends and its submitter does not: the RayJob stays `Running`."""
        self.word = ""
        """A status of a later version, given instead of `Running`."""
        self._told: dict[str, tuple[str, str]] = {}

    def end(self, name: str, status: str = "SUCCEEDED", message: str = "") -> None:
        """Let a RayJob's job end in Ray, as `SUCCEEDED`, `FAILED` or `STOPPED`."""
        self._told[name] = (status, message)

    def step(self) -> None:
        """Look at every RayJob and RayCluster once."""
        for cluster in self._world.objects.list("RayCluster"):
            if not going(cluster):
                self._cluster(cluster)
        for job in self._world.objects.list("RayJob"):
            if not going(job):
                self._job(job)

    # ---- RayCluster ----

    def _cluster(self, cluster: Object) -> None:
        world, metadata = self._world, cluster["metadata"]
        pods = world.owned("Pod", cluster)
        groups = [("head", 1, cluster["spec"]["headGroupSpec"])]
        for group in cluster["spec"].get("workerGroupSpecs", ()):
            groups.append((group["groupName"], group["replicas"] * group.get("numOfHosts", 1), group))
        for name, count, group in groups:
            own = [pod for pod in pods if pod["metadata"]["labels"]["ray.io/group"] == name]
            for pod in own:
                if pod["status"].get("phase") in ("Failed", "Succeeded") and not going(pod):
                    world.delete(pod)  # made again in the next step
            for _ in range(count - len(own)):
                world.create(_ray_pod(cluster, name, group), cluster, manager="kuberay-operator")
        service = {"name": f"{metadata['name']}-head-svc", "namespace": metadata["namespace"]}
        body = {"selector": {"ray.io/cluster": metadata["name"], "ray.io/node-type": "head"}}
        world.create({"apiVersion": "v1", "kind": "Service", "metadata": service, "spec": body}, cluster)
        wanted, ready = sum(count for _, count, _ in groups), sum(is_ready(pod) for pod in pods)
        status = fresh_status(cluster)
        status |= {"desiredWorkerReplicas": wanted - 1, "readyWorkerReplicas": max(0, ready - 1)}
        if ready >= wanted:
            status["state"] = "ready"
        world.condition(status, "RayClusterProvisioned", ready >= wanted, "AllPodRunningAndReadyFirstTime")
        world.status(cluster, status)

    # ---- RayJob ----

    def _job(self, job: Object) -> None:
        world, status = self._world, fresh_status(job)
        now = status.get("jobDeploymentStatus", "")
        if now in ENDS:
            self._tidy(job, status)
            return
        late = self._late(job, status)
        if job["spec"].get("suspend") and now not in ("Suspended", "Suspending"):
            if now or status.get("rayClusterName"):
                status["jobDeploymentStatus"] = "Suspending"
            else:
                status["jobDeploymentStatus"] = "Suspended"
        elif late:
            self._end(status, "Failed", "FAILED", "DeadlineExceeded", late)
        else:
            step = {"": self._new, "Initializing": self._initializing, "Running": self._running}
            step |= {"Retrying": self._retrying, "Suspending": self._suspending, "Suspended": self._suspended}
            step.get(now, self._running)(job, status)
        world.status(job, status)

    def _new(self, job: Object, status: Object) -> None:
        if self.invalid:
            self._end(status, "ValidationFailed", "", "ValidationFailed", self.invalid)
            return
        status |= {
            "jobDeploymentStatus": "Initializing",
            "jobId": f"{job['metadata']['name']}-{secrets.token_hex(3)[:5]}",
            "rayClusterName": f"{job['metadata']['name']}-{secrets.token_hex(3)[:5]}",
            "startTime": self._world.stamp,
        }
        status.setdefault("failed", 0)
        status.setdefault("succeeded", 0)

    def _initializing(self, job: Object, status: Object) -> None:
        namespace, name = job["metadata"]["namespace"], status["rayClusterName"]
        cluster = self._world.get("RayCluster", namespace, name)
        if cluster is None:
            body = copy.deepcopy(job["spec"]["rayClusterSpec"])
            made = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "spec": body}
            made["metadata"] = {"name": name, "namespace": namespace}
            made["metadata"]["labels"] = {"ray.io/originated-from-cr-name": job["metadata"]["name"]}
            self._world.create(made, job, manager="kuberay-operator")
            return
        status["rayClusterStatus"] = cluster.get("status") or {}
        if (cluster.get("status") or {}).get("state") == "ready":
            status["dashboardURL"] = f"{name}-head-svc.{namespace}.svc.cluster.local:8265"
            status["jobDeploymentStatus"] = "Running"
            status["jobStatus"] = "PENDING"
            self._submit(job)

    def _submit(self, job: Object) -> None:
        """Make the submitter: a Job of the RayJob's own name."""
        template = copy.deepcopy(job["spec"].get("submitterPodTemplate"))
        if template is None:
            pod = {"containers": [{"name": "ray-job-submitter", "image": "i"}], "restartPolicy": "Never"}
            template = {"spec": pod}
        labels = (template.get("metadata") or {}).get("labels") or {}
        template["metadata"] = {"labels": {**labels, "ray.io/originated-from-cr-name": job["metadata"]["name"]}}
        spec = {"completions": 1, "parallelism": 1, "backoffLimit": 2, "template": template}
        own = {"name": job["metadata"]["name"], "namespace": job["metadata"]["namespace"]}
        made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": own, "spec": spec}
        self._world.create(made, job, manager="kuberay-operator")

    def _running(self, job: Object, status: Object) -> None:
        status["jobDeploymentStatus"] = self.word or "Running"
        told = self._told.get(job["metadata"]["name"])
        if status.get("jobStatus") == "PENDING":
            status["jobStatus"] = "RUNNING"
        elif status.get("jobStatus") == "RUNNING" and told:
            del self._told[job["metadata"]["name"]]
            status["jobStatus"], status["message"] = told
            status["endTime"] = self._world.stamp
        elif status.get("jobStatus") in ("SUCCEEDED", "FAILED", "STOPPED") and not self.submitter_hangs:
            ended = str(status["jobStatus"])
            if ended == "FAILED" and status["failed"] < job["spec"].get("backoffLimit", 0):
                status["failed"] += 1
                status["jobDeploymentStatus"] = "Retrying"
                return
            status["failed" if ended == "FAILED" else "succeeded"] += ended != "STOPPED"
            reason = "AppFailed" if ended == "FAILED" else ""
            self._end(status, "Failed" if ended == "FAILED" else "Complete", ended, reason, status.get("message", ""))

    def _retrying(self, job: Object, status: Object) -> None:
        self._down(job, status)
        for key in ("jobId", "rayClusterName", "dashboardURL", "rayClusterStatus", "jobStatus", "endTime", "message"):
            status.pop(key, None)
        status["jobDeploymentStatus"] = ""

    def _suspending(self, job: Object, status: Object) -> None:
        self._down(job, status)
        kept = {key: status[key] for key in ("failed", "succeeded") if key in status}
        status.clear()
        status |= {**kept, "jobDeploymentStatus": "Suspended"}

    def _suspended(self, job: Object, status: Object) -> None:
        if not job["spec"].get("suspend"):
            status["jobDeploymentStatus"] = ""

    def _down(self, job: Object, status: Object) -> None:
        for kind in ("RayCluster", "Job"):
            for each in self._world.owned(kind, job):
                self._world.delete(each)

    def _end(self, status: Object, deployment: str, job: str, reason: str, message: str) -> None:
        status |= {"jobDeploymentStatus": deployment, "message": message}
        if job:
            status["jobStatus"] = job
        if reason:
            status["reason"] = reason
        status.setdefault("endTime", self._world.stamp)

    def _late(self, job: Object, status: Object) -> str:
        limit, started = job["spec"].get("activeDeadlineSeconds"), seconds(status.get("startTime"))
        if limit is None or started is None or self._world.now - started < limit:
            return ""
        return f"The RayJob has passed the activeDeadlineSeconds. StartTime: {status['startTime']}."

    def _tidy(self, job: Object, status: Object) -> None:
        """Take an ended job's cluster down after its time to live. The RayJob itself stays."""
        ended, ttl = seconds(status.get("endTime")) or 0.0, job["spec"].get("ttlSecondsAfterFinished", 0)
        if job["spec"].get("shutdownAfterJobFinishes") and self._world.now - ended >= ttl:
            for each in self._world.owned("RayCluster", job):
                self._world.delete(each)


def _ray_pod(cluster: Object, group: str, spec: Object) -> Object:
    template, metadata = copy.deepcopy(spec["template"]), cluster["metadata"]
    kind = "head" if group == "head" else "worker"
    labels = {**((template.get("metadata") or {}).get("labels") or {})}
    labels |= {"ray.io/cluster": metadata["name"], "ray.io/node-type": kind, "ray.io/group": group}
    prefix = f"{metadata['name']}-{'' if kind == 'head' else group + '-'}{kind}-"[:50].lower()
    own = {"name": f"{prefix}{secrets.token_hex(3)[:5]}", "namespace": metadata["namespace"], "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": own, "spec": template["spec"]}
