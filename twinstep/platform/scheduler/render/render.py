"""One JobSpec → the objects of its run, the numbers that follow from it, and warnings; everyone calls `render`."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any

from twinstep.platform.scheduler.render.context import DOMAIN, RenderContext
from twinstep.platform.scheduler.render.jobset import jobset
from twinstep.platform.scheduler.render.names import check_names, jobset_names, label_value, object_name, rayjob_names
from twinstep.platform.scheduler.render.rayjob import nodes_of, rayjob
from twinstep.platform.scheduler.render.surroundings import network_policy, service_account, spec_map
from twinstep.spec.accelerator import GpuSpec, TpuSpec
from twinstep.spec.errors import Fault, SpecError
from twinstep.spec.job import JobSpec
from twinstep.spec.text import dump_manifests
from twinstep.spec.topology import GPUS, TPUS, slice_shape

Object = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedRun:
    """What a run is in a cluster."""

    name: str
    namespace: str
    objects: tuple[Object, ...]
    """In the order in which they are applied: the workload last."""
    numbers: dict[str, int | str]
    """What follows from the spec: chips, hosts, pods, processes, devices."""
    warnings: tuple[str, ...]
    """What a user may want to change, and why."""

    @property
    def workload(self) -> Object:
        """The JobSet or RayJob."""
        return self.objects[-1]

    @property
    def yaml(self) -> str:
        """All objects as one YAML stream; the same bytes for the same spec."""
        return dump_manifests(self.objects)


def render(
    spec: JobSpec,
    *,
    default_image: str | None = None,
    job_id: str = "",
    run_id: str = "",
    attempt: int = 1,
    api_url: str | None = None,
    followed: bool = False,
) -> RenderedRun:
    """Return the objects of a run of `spec`.

    Args:
        default_image: worker's image where the spec names none; `{kind}` in it becomes the accelerator's kind.
        run_id: a control plane's; empty: the name follows from the spec alone.
        api_url: where workers report; the token is read from a Secret that is not part of the objects.
        followed: a control plane will follow the run, as it does one that has a `run_id`.

    Raises:
        SpecError: the accelerator is no cluster's, no image is known, or a derived name is too long.
    """
    accelerator = spec.accelerator
    if not isinstance(accelerator, TpuSpec | GpuSpec):
        raise _not_valid(
            "accelerator.kind", "runs on this machine, not in a cluster", "cpu", "tpu, gpu",
            "kind: tpu, or twinstep submit, which runs it here",
        )  # fmt: skip
    deadline = None if followed or run_id else _deadline(spec)
    context = _context(spec, default_image, job_id=job_id, run_id=run_id, attempt=attempt, api_url=api_url)
    context = replace(context, deadline_seconds=deadline)
    beside = [spec_map(spec, context)]
    if spec.kubernetes.service_account is None:
        beside.append(service_account(context))
    beside.append(network_policy(context, ray=isinstance(accelerator, GpuSpec)))
    workload, numbers = (
        _tpu(spec, accelerator, context) if isinstance(accelerator, TpuSpec) else _gpu(spec, accelerator, context)
    )
    return RenderedRun(
        name=context.name,
        namespace=context.namespace,
        objects=(*beside, workload),
        numbers=numbers,
        warnings=tuple(_warnings(spec, context, numbers)),
    )


def _context(
    spec: JobSpec, default_image: str | None, *, job_id: str, run_id: str, attempt: int, api_url: str | None
) -> RenderContext:
    image = spec.kubernetes.image or default_image
    if image is not None:
        image = image.replace("{kind}", spec.accelerator.kind)
    if image is None:
        raise _not_valid(
            "kubernetes.image", "is required: no image of the worker is set elsewhere", "null", "an image reference",
            "image: REGISTRY/twinstep-worker@sha256:DIGEST, or twinstep render --image REF",
        )  # fmt: skip
    # The whole of the spec: two specs that share a name must not share objects.
    seed = f"{run_id}/{attempt}" if run_id else hashlib.sha256(spec.model_dump_json().encode()).hexdigest()
    name = object_name(spec.name, seed)
    labels = {
        "app.kubernetes.io/name": "twinstep-worker",
        "app.kubernetes.io/managed-by": "twinstep",
        f"{DOMAIN}/run-name": name,
    }
    if run_id:
        labels |= {
            f"{DOMAIN}/job": label_value(job_id),
            f"{DOMAIN}/run": label_value(run_id),
            f"{DOMAIN}/attempt": str(attempt),
        }
    return RenderContext(
        name=name,
        namespace=spec.kubernetes.namespace,
        title=spec.name,
        image=image,
        run_id=run_id,
        job_id=job_id,
        attempt=attempt,
        api_url=api_url,
        labels=labels,
    )


def _deadline(spec: JobSpec) -> int | None:
    """Return the seconds after which Kubernetes is to end a run that nobody follows; it counts what pods wait, too."""
    limits = spec.runtime
    return None if limits.max_seconds is None else math.ceil(limits.max_seconds + (limits.max_wait_seconds or 0.0))


def _tpu(spec: JobSpec, accelerator: TpuSpec, context: RenderContext) -> tuple[Object, dict[str, int | str]]:
    tpu = TPUS[accelerator.generation]
    shape = slice_shape(
        accelerator.generation,
        accelerator.topology,
        chips_per_host=accelerator.chips_per_host,
        slices=accelerator.slices,
    )
    check_names(jobset_names(context.name, slices=shape.slices, hosts=shape.hosts_per_slice))
    return jobset(spec, accelerator, shape, context), {
        "kind": "JobSet",
        "accelerator": tpu.label,
        "machine_type": shape.machine_type,
        "topology": shape.topology,
        "slices": shape.slices,
        "hosts_per_slice": shape.hosts_per_slice,
        "chips_per_host": shape.chips_per_host,
        "chips": shape.chips,
        "pods": shape.hosts,
        "processes": shape.hosts,
        "devices": shape.devices,
        "sparse_cores": shape.chips * tpu.usable_sparse_cores,
        "hbm_bytes": shape.chips * tpu.hbm_bytes,
    }


def _gpu(spec: JobSpec, accelerator: GpuSpec, context: RenderContext) -> tuple[Object, dict[str, int | str]]:
    gpu = GPUS[accelerator.model]
    nodes, each = nodes_of(accelerator)
    check_names(rayjob_names(context.name))
    return rayjob(spec, accelerator, context), {
        "kind": "RayJob",
        "accelerator": gpu.label,
        "machine_type": gpu.machine.name,
        "nodes": nodes,
        "gpus_per_node": each,
        "gpus": accelerator.count,
        "pods": nodes + 2,  # the head and the submitter
        "processes": accelerator.count,
        "devices": accelerator.count,
        "hbm_bytes": accelerator.count * gpu.memory_bytes,
    }


def _warnings(spec: JobSpec, context: RenderContext, numbers: dict[str, int | str]) -> list[str]:
    found = []
    if "@sha256:" not in context.image:
        found.append(f"image {context.image} is not named by digest: a restart may run other code than the first start")
    if spec.kubernetes.security != "restricted":
        found.append(f"security profile {spec.kubernetes.security} leaves the restricted Pod Security standard")
    if spec.kubernetes.queue is None and int(numbers["pods"]) > 1:
        found.append("no kubernetes.queue: pods wait one by one, and two jobs can hold half of a slice each")
    if spec.kubernetes.priority is not None and spec.kubernetes.queue is None:
        found.append("kubernetes.priority has no effect without kubernetes.queue")
    if spec.checkpoint.path is None:
        found.append("no checkpoint.path: a pod that is preempted starts from the beginning again")
    elif "://" not in spec.checkpoint.path:
        found.append(
            f"checkpoint.path {spec.checkpoint.path} is a directory of the pod, which goes with it: give a URI"
        )
    return found


def _not_valid(field: str, problem: str, given: str, allowed: str, remedy: str) -> SpecError:
    fault = Fault(field=field, problem=problem, given=given, allowed=allowed, remedy=remedy)
    return SpecError(f"the job cannot be rendered: {field} {problem}", remedy=remedy, faults=(fault,))
