"""A TPU job as a JobSet: one child Job per slice, one pod per host, all of them or none.

Sources: JobSet v1alpha2's types and webhook; GKE's pages on TPU and multislice workloads.
"""

from __future__ import annotations

from typing import Any

from twinstep.platform.scheduler.render import pods
from twinstep.platform.scheduler.render.context import RenderContext
from twinstep.platform.scheduler.render.names import REPLICATED_JOB
from twinstep.spec.accelerator import TpuSpec
from twinstep.spec.job import JobSpec
from twinstep.spec.topology import TPUS, SliceShape
from twinstep.spec.words import EXIT_PREEMPTED, EXIT_SPEC

API_VERSION = "jobset.x-k8s.io/v1alpha2"
WORKER = "worker"
CHIP = "google.com/tpu"
ONE_POOL_PER_SLICE = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}

Object = dict[str, Any]


def jobset(spec: JobSpec, accelerator: TpuSpec, shape: SliceShape, context: RenderContext) -> Object:
    """Return the JobSet."""
    kubernetes = spec.kubernetes
    alone = shape.hosts_per_slice > 1 and not kubernetes.topology_aware
    annotations = {"twinstep.dev/title": context.title, **(ONE_POOL_PER_SLICE if alone else {})}
    metadata = pods.metadata(context.name, context, annotations)
    body: Object = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "coordinator": {"replicatedJob": REPLICATED_JOB, "jobIndex": 0, "podIndex": 0},
        "failurePolicy": failure_policy(kubernetes.max_restarts, deadline=context.deadline_seconds is not None),
        "ttlSecondsAfterFinished": kubernetes.ttl_seconds,
        "replicatedJobs": [
            {"name": REPLICATED_JOB, "replicas": shape.slices, "template": _job(spec, accelerator, shape, context)}
        ],
    }
    pods.hand_to_queue(spec, metadata, body)
    return {"apiVersion": API_VERSION, "kind": "JobSet", "metadata": metadata, "spec": body}


def failure_policy(max_restarts: int, *, deadline: bool) -> Object:
    """Return what becomes of a failed slice: a preempted one is no failure, a wrong spec or a deadline is one for good.

    Child Jobs fail by their pod failure policy for all three reasons, and the Job's message alone tells them apart.
    """
    late = {"name": "deadline", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]}
    return {
        "maxRestarts": max_restarts,
        "restartStrategy": "Recreate",
        "rules": [
            {
                "name": "preempted",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": [
                    ".*condition DisruptionTarget.*",
                    f".*exit code {EXIT_PREEMPTED} .*",
                ],
            },
            {
                "name": "notRetryable",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": [f".*exit code {EXIT_SPEC} .*"],
            },
            *([late] if deadline else []),
        ],
    }


def _job(spec: JobSpec, accelerator: TpuSpec, shape: SliceShape, context: RenderContext) -> Object:
    """Return the template of a slice's Job."""
    body: Object = {
        "parallelism": shape.hosts_per_slice,
        "completions": shape.hosts_per_slice,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": WORKER,
                        "operator": "In",
                        "values": sorted((EXIT_SPEC, EXIT_PREEMPTED)),
                    },
                },
            ]
        },
        "template": _pod(spec, accelerator, shape, context),
    }
    if context.deadline_seconds is not None:
        body["activeDeadlineSeconds"] = context.deadline_seconds
    return {"metadata": {"labels": dict(context.labels)}, "spec": body}


def _placed(shape: SliceShape) -> dict[str, str]:
    """Return what tells Kueue that each slice wants one node pool.

    To Kueue all replicas are one podset: of several slices it must be told how many pods are one.
    """
    pool = "cloud.google.com/gke-nodepool"
    if shape.slices == 1:
        return {"kueue.x-k8s.io/podset-required-topology": pool}
    return {
        "kueue.x-k8s.io/podset-slice-required-topology": pool,
        "kueue.x-k8s.io/podset-slice-size": str(shape.hosts_per_slice),
    }


def _pod(spec: JobSpec, accelerator: TpuSpec, shape: SliceShape, context: RenderContext) -> Object:
    kubernetes, tpu = spec.kubernetes, TPUS[accelerator.generation]
    volumes, mounts = pods.volumes(context.spec_map)
    metadata: Object = {"labels": dict(context.labels)}
    if kubernetes.topology_aware:
        metadata["annotations"] = _placed(shape)
    worker = {
        "name": WORKER,
        "image": context.image,
        "command": pods.argv(pods.COMMAND),
        "env": pods.environment(spec, context, _coordinates(shape, context)),
        "ports": [{"name": "coordinator", "containerPort": pods.COORDINATOR_PORT, "protocol": "TCP"}],
        "resources": pods.resources(spec, tpu.machine(shape.chips_per_host), shape.chips_per_host, CHIP),
        "securityContext": pods.container_security(spec),
        "volumeMounts": mounts,
    }
    return {
        "metadata": metadata,
        "spec": {
            **pods.pod_security(spec),
            "serviceAccountName": kubernetes.service_account or context.name,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": kubernetes.grace_seconds,
            "nodeSelector": {
                "cloud.google.com/gke-tpu-accelerator": tpu.label,
                "cloud.google.com/gke-tpu-topology": shape.topology,
            },
            "tolerations": [{"key": CHIP, "operator": "Exists", "effect": "NoSchedule"}],
            "containers": [worker],
            "volumes": volumes,
        },
    }


def _coordinates(shape: SliceShape, context: RenderContext) -> list[Object]:
    """Return where a pod stands among the others, and where the first one answers."""
    return [
        {"name": "TWINSTEP_SLICES", "value": str(shape.slices)},
        {"name": "TWINSTEP_HOSTS_PER_SLICE", "value": str(shape.hosts_per_slice)},
        pods.from_field("TWINSTEP_SLICE", "metadata.labels['jobset.sigs.k8s.io/job-index']"),
        pods.from_field("TWINSTEP_HOST", "metadata.annotations['batch.kubernetes.io/job-completion-index']"),
        {
            "name": "TWINSTEP_COORDINATOR",
            "value": f"{context.name}-{REPLICATED_JOB}-0-0.{context.name}:{pods.COORDINATOR_PORT}",
        },
    ]
