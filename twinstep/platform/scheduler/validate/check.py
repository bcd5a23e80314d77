"""Check objects as the API server would, before they are sent; raise one error that names every fault."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from twinstep.platform.scheduler.validate.rules import MAX_OBJECT, RULES, any_object, ray_groups
from twinstep.platform.scheduler.validate.schemas import CustomResources, core_faults
from twinstep.spec.errors import Fault, SpecError

CORE = (("v1", "ConfigMap"), ("v1", "ServiceAccount"), ("networking.k8s.io/v1", "NetworkPolicy"))
"""Kinds whose schemas come with the installation."""


def faults_of(value: Mapping[str, Any], custom: CustomResources | None = None) -> list[Fault]:
    """Return what the cluster would refuse in one object.

    Args:
        custom: schemas of custom resources; None: their pods and rules are checked, their own fields are not.
    """
    kind = (value["apiVersion"], value["kind"])
    found = []
    if kind in CORE:
        found += core_faults(value)
    elif custom is not None and (schema := custom.find(*kind)) is not None:
        found += schema.faults(value)
    else:
        found += _parts(value)
    if found:  # rules take the form for granted
        return found
    found += any_object(value)
    for rule in RULES.get(kind, ()):
        found += rule(value)
    size = len(json.dumps(value, separators=(",", ":")))
    if size > MAX_OBJECT:
        found.append(
            Fault(field="", problem="is too large", given=f"{size} bytes", allowed=f"{MAX_OBJECT}", remedy="less env")
        )
    return found


def check(objects: Iterable[Mapping[str, Any]], custom: CustomResources | None = None) -> None:
    """Raise SpecError unless a cluster would take all `objects`.

    Raises:
        SpecError: `faults` names object and field of each.
    """
    found = [
        Fault(
            field=f"{value['kind']}/{value['metadata']['name']}: {fault.field}",
            problem=fault.problem,
            given=fault.given,
            allowed=fault.allowed,
            remedy=fault.remedy,
        )
        for value in objects
        for fault in faults_of(value, custom)
    ]
    if found:
        raise SpecError(
            f"the cluster would refuse what the spec renders to: {len(found)} faults",
            remedy="mend the fields named; where none is the spec's, it is a bug of the renderer",
            faults=tuple(found[:50]),
        )


def _parts(value: Mapping[str, Any]) -> list[Fault]:
    """Return faults of the core objects inside a workload whose own schema is not at hand."""
    metadata = {"name": value["metadata"]["name"]}
    found = []
    if value["kind"] == "JobSet":
        for job in value["spec"]["replicatedJobs"]:
            found += core_faults({"apiVersion": "batch/v1", "kind": "Job", **job["template"], "metadata": metadata})
    if value["kind"] == "RayJob":
        in_groups = (group["template"] for group in ray_groups(value["spec"]["rayClusterSpec"]))
        templates = [value["spec"].get("submitterPodTemplate"), *in_groups]
        for template in filter(None, templates):
            found += core_faults({"apiVersion": "v1", "kind": "Pod", **template, "metadata": metadata})
    return found
