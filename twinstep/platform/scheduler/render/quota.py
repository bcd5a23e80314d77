"""What an admin applies once, so that Kueue admits a job: flavors, a cluster queue with its quota, the local queue.

The quota is what one run of the spec needs; an admin raises it to what the cluster has. Source: Kueue v1beta2's types.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from twinstep.platform.scheduler.render.render import RenderedRun
from twinstep.platform.scheduler.validate.rules import quantity
from twinstep.spec.accelerator import GpuSpec, TpuSpec
from twinstep.spec.errors import Fault, SpecError
from twinstep.spec.job import JobSpec
from twinstep.spec.topology import GPUS, TPUS

API_VERSION = "kueue.x-k8s.io/v1beta2"
PLAIN = "twinstep-plain"
"""Flavor of nodes without accelerators: a Ray head and a submitter run there."""
GIB = 2**30

Object = dict[str, Any]


def quota(spec: JobSpec, run: RenderedRun) -> tuple[Object, ...]:
    """Return the queue objects that admit `run`.

    Raises:
        SpecError: the spec names no queue.
    """
    queue, accelerator = spec.kubernetes.queue, spec.accelerator
    if queue is None or not isinstance(accelerator, TpuSpec | GpuSpec):
        fault = Fault(
            field="kubernetes.queue", problem="is required for a quota", given="null", remedy="queue: training"
        )
        raise SpecError("a quota is for jobs that name a queue", remedy=fault.remedy, faults=(fault,))
    flavor, labels, chip = _flavor(accelerator)
    needed = _needed(run, chip)
    resources = ("cpu", "memory", chip)
    return (
        _object("ResourceFlavor", PLAIN, {}),
        _object("ResourceFlavor", flavor, {"nodeLabels": labels}),
        _object(
            "ClusterQueue",
            f"twinstep-{queue}",
            {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": run.namespace}},
                "queueingStrategy": "BestEffortFIFO",
                "resourceGroups": [
                    {
                        "coveredResources": list(resources),
                        # Tried in order: what needs no accelerator stays off the nodes that have them.
                        "flavors": [
                            _quota(PLAIN, needed[False], resources),
                            _quota(flavor, needed[True], resources),
                        ],
                    }
                ],
            },
        ),
        _object("LocalQueue", queue, {"clusterQueue": f"twinstep-{queue}"}, namespace=run.namespace),
    )


def _flavor(accelerator: TpuSpec | GpuSpec) -> tuple[str, dict[str, str], str]:
    """Return (name, node labels, resource) of the flavor with an accelerator."""
    if isinstance(accelerator, TpuSpec):
        labels = {
            "cloud.google.com/gke-tpu-accelerator": TPUS[accelerator.generation].label,
            "cloud.google.com/gke-tpu-topology": accelerator.topology,
        }
        return f"tpu-{accelerator.generation}-{accelerator.topology}", labels, "google.com/tpu"
    labels = {"cloud.google.com/gke-accelerator": GPUS[accelerator.model].label}
    return f"gpu-{accelerator.model}", labels, "nvidia.com/gpu"


def _needed(run: RenderedRun, chip: str) -> dict[bool, dict[str, float]]:
    """Return what a run's pods request in all: False: those without accelerators, True: those with."""
    found: dict[bool, dict[str, float]] = {False: {}, True: {}}
    for count, pod in pods_of(run.workload):
        for container in pod["containers"]:
            requests = container["resources"]["requests"]
            place = found[chip in requests]
            for name, text in requests.items():
                place[name] = place.get(name, 0.0) + count * (quantity(text) or 0.0)
    return found


def pods_of(workload: Object) -> Iterator[tuple[int, Object]]:
    """Yield (how many, pod spec) of a JobSet or a RayJob."""
    spec = workload["spec"]
    if workload["kind"] == "JobSet":
        for job in spec["replicatedJobs"]:
            body = job["template"]["spec"]
            yield job["replicas"] * body["parallelism"], body["template"]["spec"]
        return
    yield 1, spec["submitterPodTemplate"]["spec"]
    yield 1, spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    for group in spec["rayClusterSpec"]["workerGroupSpecs"]:
        yield group["replicas"] * group["numOfHosts"], group["template"]["spec"]


def _quota(flavor: str, needed: dict[str, float], resources: tuple[str, ...]) -> Object:
    return {
        "name": flavor,
        "resources": [{"name": name, "nominalQuota": _text(name, needed.get(name, 0.0))} for name in resources],
    }


def _text(resource: str, amount: float) -> str:
    if resource == "memory":
        return f"{-(-int(amount) // GIB)}Gi"
    return str(int(amount)) if amount == int(amount) else f"{round(amount * 1000)}m"


def _object(kind: str, name: str, spec: Object, *, namespace: str | None = None) -> Object:
    metadata: Object = {"name": name, "labels": {"app.kubernetes.io/managed-by": "twinstep"}}
    if namespace is not None:
        metadata["namespace"] = namespace
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": spec}
