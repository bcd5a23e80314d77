"""Parts that every pod is made of: security, environment, resources, volumes. Plain dicts, as Kubernetes takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from twinstep.platform.scheduler.render.context import RenderContext
from twinstep.spec.job import JobSpec
from twinstep.spec.sparsecore import libtpu_arguments
from twinstep.spec.topology import Machine

SPEC_DIR = "/etc/twinstep"
SPEC_FILE = f"{SPEC_DIR}/job.json"
RUN_DIR = "/run/twinstep"
CACHE_DIR = "/var/cache/twinstep"
USER = 65532  # nobody's, and not root's; images of ours have it
SHARE = 0.9  # of a machine's memory and processors: the node's own pods need the rest
COORDINATOR_PORT = 8482  # JAX's on TPU

LIBTPU = "LIBTPU_INIT_ARGS"

COMMAND = ("python", "-m", "twinstep", "train", SPEC_FILE)

Object = dict[str, Any]


def escaped(text: str) -> str:
    """Return text that the kubelet hands on byte for byte: it would expand `$(NAME)` and fold `$$` in arguments."""
    return text.replace("$", "$$")


def argv(words: Sequence[str]) -> list[str]:
    """Return a command for a container, each word byte for byte."""
    return [escaped(word) for word in words]


def environment(spec: JobSpec, context: RenderContext, extra: Sequence[Object] = ()) -> list[Object]:
    """Return the worker's environment, each name once: the platform's, the user's, what a backend adds.

    The user's values win over defaults of ours; names that the platform must set itself are refused in a spec.
    """
    entries: dict[str, Object] = {
        "HOME": {"name": "HOME", "value": RUN_DIR},
        "PYTHONUNBUFFERED": {"name": "PYTHONUNBUFFERED", "value": "1"},
        "XDG_CACHE_HOME": {"name": "XDG_CACHE_HOME", "value": CACHE_DIR},
    }
    for name, value in spec.kubernetes.env.items():
        entries[name] = {"name": name, "value": escaped(value)}
    if spec.embedding.sparsecore is not None:
        # libtpu takes the last of two values of a flag: the user's own come behind.
        flags = [libtpu_arguments(spec.embedding.sparsecore), spec.kubernetes.env.get(LIBTPU, "")]
        text = " ".join(filter(None, flags))
        if text:
            entries[LIBTPU] = {"name": LIBTPU, "value": escaped(text)}
    for name, place in spec.kubernetes.secret_env.items():
        secret_name, key = place.split("/")
        entries[name] = {"name": name, "valueFrom": {"secretKeyRef": {"name": secret_name, "key": key}}}
    if spec.checkpoint.path is not None and context.job_id:
        place = f"{spec.checkpoint.path.rstrip('/')}/{context.job_id}"
        entries["TWINSTEP_CHECKPOINTS"] = {"name": "TWINSTEP_CHECKPOINTS", "value": escaped(place)}
        entries["TWINSTEP_ATTEMPT"] = {"name": "TWINSTEP_ATTEMPT", "value": str(context.attempt)}
    if context.api_url is not None:
        secret = {"name": context.token_secret, "key": "token"}
        ours: list[Object] = [
            {"name": "TWINSTEP_RUN_ID", "value": context.run_id},
            {"name": "TWINSTEP_RUN_DIR", "value": RUN_DIR},
            {"name": "TWINSTEP_API_URL", "value": context.api_url},
            {"name": "TWINSTEP_RUN_TOKEN", "valueFrom": {"secretKeyRef": secret}},
        ]
        entries.update({entry["name"]: entry for entry in ours})
    entries.update({entry["name"]: entry for entry in extra})
    return list(entries.values())


def container_security(spec: JobSpec) -> Object:
    """Return a container's security context by the spec's profile."""
    profile = spec.kubernetes.security
    if profile == "tpu-privileged":
        return {"privileged": True, "runAsUser": 0}
    capabilities: Object = {"drop": ["ALL"]}
    if profile == "tpu-memlock":
        capabilities["add"] = ["SYS_RESOURCE"]  # to raise the limit on locked memory
    return {"allowPrivilegeEscalation": False, "capabilities": capabilities, "readOnlyRootFilesystem": True}


def pod_security(spec: JobSpec) -> Object:
    """Return a pod's fields of security by the spec's profile; `restricted` meets the Pod Security standard."""
    profile = spec.kubernetes.security
    context: Object = {"seccompProfile": {"type": "RuntimeDefault"}}
    if profile != "tpu-privileged":
        context |= {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}
    fields: Object = {"automountServiceAccountToken": False, "enableServiceLinks": False, "securityContext": context}
    if profile == "host-network":
        fields |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return fields


def resources(spec: JobSpec, machine: Machine, accelerators: int, resource: str) -> Object:
    """Return requests and limits of a worker with so many of a machine's accelerators.

    Memory is limited to what is requested, or a node under pressure would kill the largest pod; processors are not.
    """
    share = SHARE * accelerators / machine.accelerators
    cpus = spec.kubernetes.cpu or max(1, math.floor(machine.cpus * share))
    memory = f"{spec.kubernetes.memory_gib or max(1, math.floor(machine.memory_gib * share))}Gi"
    return {
        "requests": {"cpu": str(cpus), "memory": memory, resource: str(accelerators)},
        "limits": {"memory": memory, resource: str(accelerators)},
    }


def volumes(spec_map: str, *, shm_gib: int | None = None) -> tuple[list[Object], list[Object]]:
    """Return (volumes, mounts) of a worker: the spec, directories it may write to, shared memory where wanted."""
    found: list[tuple[Object, Object]] = [
        (
            {"name": "spec", "configMap": {"name": spec_map}},
            {"name": "spec", "mountPath": SPEC_DIR, "readOnly": True},
        ),
        ({"name": "run", "emptyDir": {}}, {"name": "run", "mountPath": RUN_DIR}),
        ({"name": "cache", "emptyDir": {}}, {"name": "cache", "mountPath": CACHE_DIR}),
        ({"name": "tmp", "emptyDir": {}}, {"name": "tmp", "mountPath": "/tmp"}),  # noqa: S108  the pod's own
    ]
    if shm_gib is not None:
        found.append(
            (
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shm_gib}Gi"}},
                {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  the pod's own
            )
        )
    return [volume for volume, _ in found], [mount for _, mount in found]


def from_field(name: str, path: str) -> Object:
    """Return an environment variable with the value of a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def metadata(name: str, context: RenderContext, annotations: Mapping[str, str] | None = None) -> Object:
    """Return an object's metadata."""
    found: Object = {"name": name, "namespace": context.namespace, "labels": dict(context.labels)}
    if annotations:
        found["annotations"] = dict(annotations)
    return found


def hand_to_queue(spec: JobSpec, metadata: Object, body: Object) -> None:
    """Let Kueue start a workload whose spec names a queue: its labels, and a body that waits for it."""
    kubernetes = spec.kubernetes
    if kubernetes.queue is not None:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = kubernetes.queue
        if kubernetes.priority is not None:
            metadata["labels"]["kueue.x-k8s.io/priority-class"] = kubernetes.priority
        body["suspend"] = True
