"""A GPU job as a RayJob: a head that does no work, one worker group of whole or part nodes, Ray Train inside.

The entrypoint (`worker/train/ray_job.py`) finds the spec and the number of ranks in the head's environment, so its line
is the same for every job. Ray has no telemetry here. A pod that is to go drains its Ray node for most of its grace, in
which the ranks save what they have; so long the Jobs API waits too before it kills an entrypoint that it was told to
stop. The dashboard listens in the pod network, since KubeRay asks it from elsewhere; the NetworkPolicy lets the job's
own pods and the operator through.
Source: KubeRay's v1 types, its validation and its submitter (`common/job.go`); Ray's `_private/node.py` (drain on
SIGTERM) and `job_supervisor.py`.
"""

from __future__ import annotations

import math
import shlex
from typing import Any

from twinstep.platform.scheduler.render import pods
from twinstep.platform.scheduler.render.context import RenderContext
from twinstep.platform.scheduler.render.names import GROUP
from twinstep.spec.accelerator import GpuSpec
from twinstep.spec.job import JobSpec
from twinstep.spec.topology import GPUS

API_VERSION = "ray.io/v1"
RAY_VERSION = "2.60.0"
GPU = "nvidia.com/gpu"
COMMAND = ("python", "-m", "twinstep.worker.train.ray_job")
DRAIN_SHARE = 0.9  # of a pod's grace: the rest is for Ray's own processes to end
HEAD = {"requests": {"cpu": "4", "memory": "16Gi"}, "limits": {"memory": "16Gi"}}
SUBMITTER = {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "512Mi"}}

Object = dict[str, Any]


def entrypoint(words: tuple[str, ...]) -> str:
    """Return a command as the one line that KubeRay splices into a shell, each word byte for byte.

    Quoted for that shell; and `$` doubled before, since the line is a container's argument to the kubelet.
    """
    return pods.escaped(shlex.join(words))


def nodes_of(accelerator: GpuSpec) -> tuple[int, int]:
    """Return (nodes, GPUs of each)."""
    per_node = GPUS[accelerator.model].per_node
    return (1, accelerator.count) if accelerator.count < per_node else (accelerator.count // per_node, per_node)


def rayjob(spec: JobSpec, accelerator: GpuSpec, context: RenderContext) -> Object:
    """Return the RayJob."""
    kubernetes = spec.kubernetes
    metadata = pods.metadata(context.name, context, {"twinstep.dev/title": context.title})
    body: Object = {
        "entrypoint": entrypoint(COMMAND),
        "submissionMode": "K8sJobMode",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": kubernetes.ttl_seconds,
        "backoffLimit": kubernetes.max_restarts,
        "submitterPodTemplate": _submitter(spec, context),
        "rayClusterSpec": {
            "rayVersion": RAY_VERSION,
            "headGroupSpec": {
                "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},  # noqa: S104  within the pod network
                "template": _pod(spec, accelerator, context, "ray-head", HEAD, {}),
            },
            "workerGroupSpecs": [_workers(spec, accelerator, context)],
        },
    }
    if context.deadline_seconds is not None:
        body["activeDeadlineSeconds"] = context.deadline_seconds
    pods.hand_to_queue(spec, metadata, body)
    return {"apiVersion": API_VERSION, "kind": "RayJob", "metadata": metadata, "spec": body}


def _workers(spec: JobSpec, accelerator: GpuSpec, context: RenderContext) -> Object:
    gpu = GPUS[accelerator.model]
    nodes, each = nodes_of(accelerator)
    placement = {
        "nodeSelector": {"cloud.google.com/gke-accelerator": gpu.label},
        "tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}],
    }
    resources = pods.resources(spec, gpu.machine, each, GPU)
    return {
        "groupName": GROUP,
        "replicas": nodes,
        "minReplicas": nodes,
        "maxReplicas": nodes,
        "numOfHosts": 1,
        "rayStartParams": {},
        "template": _pod(
            spec, accelerator, context, "ray-worker", resources, placement, shm_gib=spec.kubernetes.shm_gib
        ),
    }


def _environment(spec: JobSpec, accelerator: GpuSpec) -> list[Object]:
    """Return what Ray's processes and the entrypoint read beside a worker's own environment."""
    grace = spec.kubernetes.grace_seconds
    return [
        {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"},
        {"name": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "value": str(max(1, math.floor(grace * DRAIN_SHARE)))},
        {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(grace)},
        {"name": "TWINSTEP_SPEC", "value": pods.SPEC_FILE},
        {"name": "TWINSTEP_PROCESSES", "value": str(accelerator.count)},
    ]


def _pod(
    spec: JobSpec,
    accelerator: GpuSpec,
    context: RenderContext,
    container: str,
    resources: Object,
    placement: Object,
    *,
    shm_gib: int | None = None,
) -> Object:
    volumes, mounts = pods.volumes(context.spec_map, shm_gib=shm_gib)
    kubernetes = spec.kubernetes
    metadata: Object = {"labels": dict(context.labels)}
    if kubernetes.topology_aware and placement:
        metadata["annotations"] = {"kueue.x-k8s.io/podset-preferred-topology": "cloud.google.com/gce-topology-block"}
    return {
        "metadata": metadata,
        "spec": {
            **pods.pod_security(spec),
            "serviceAccountName": kubernetes.service_account or context.name,
            "terminationGracePeriodSeconds": kubernetes.grace_seconds,
            **placement,
            "containers": [
                {
                    "name": container,
                    "image": context.image,
                    "env": pods.environment(spec, context, _environment(spec, accelerator)),
                    "resources": resources,
                    "securityContext": pods.container_security(spec),
                    "volumeMounts": mounts,
                }
            ],
            "volumes": volumes,
        },
    }


def _submitter(spec: JobSpec, context: RenderContext) -> Object:
    """Return the pod that hands the entrypoint to Ray; its command is KubeRay's own."""
    return {
        "metadata": {"labels": dict(context.labels)},
        "spec": {
            **pods.pod_security(spec),
            "serviceAccountName": spec.kubernetes.service_account or context.name,
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": "ray-job-submitter",
                    "image": context.image,
                    "env": [{"name": "HOME", "value": "/tmp"}],  # noqa: S108  the pod's own
                    "resources": SUBMITTER,
                    "securityContext": pods.container_security(spec),
                    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108
                }
            ],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        },
    }
